"""What Sparse Memory Training minimises, equations 2 and 3, in nats per token:

    mean over targets of -log p(token | sampled memory, the target before it)
    + β · mean over the ordinary window of -log p(token | window before it)

The paper writes sums (the second without its sign); with sums the window, which has twice as many tokens, would
outweigh the target 2 : 1 at β = 1. The output head runs on predicted tokens alone, in blocks (of sharded
models, in one).
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from farspan import hf
from farspan.reader import LOGITS_AT_ONCE, LOGITS_AT_ONCE_ELSEWHERE
from farspan.train.engines import sharded

NOT_A_TARGET = -100
Rows = dict[str, Int[Tensor, "batch time"]]  # input_ids, position_ids, and labels: tokens, or NOT_A_TARGET


def terms(model: Any, core: Any, batch: Mapping[str, Rows]) -> dict[str, Float[Tensor, ""]]:
    """The mean nats per predicted token of each group of rows in `batch`.

    Groups of one shape go through the model together.

    Args:
        model: what is to be called: the model, or what data parallelism has put around it.
        core: the model itself.
    """
    if len({rows["input_ids"].shape[1] for rows in batch.values()}) > 1:
        return {name: value for one in batch for name, value in terms(model, core, {one: batch[one]}).items()}
    input_ids, position_ids, labels = (
        torch.cat([rows[key] for rows in batch.values()]) for key in ("input_ids", "position_ids", "labels")
    )
    sizes = [len(rows["input_ids"]) for rows in batch.values()]
    if sharded(core):
        nats = _nats_in_one_forward(model, core, input_ids, position_ids, labels)
        counts = [int((part[:, 1:] != NOT_A_TARGET).sum()) for part in labels.split(sizes)]
        return {name: part.mean() for name, part in zip(batch, nats.split(counts), strict=True)}
    hidden, output = decoded(model, core, input_ids, position_ids)
    parts = zip(batch, hidden.split(sizes), labels.split(sizes), strict=True)
    return {name: mean_nats(core, part, output, targets) for name, part, targets in parts}


def _nats_in_one_forward(
    model: Any, core: Any, input_ids: Tensor, position_ids: Tensor, labels: Tensor
) -> Float[Tensor, "predicted"]:
    """-log p of each predicted token, row by row, with all their logits at once: parameters that are sharded are only
    there while the model itself runs, so the head cannot be run again behind it."""
    wanted = torch.nn.functional.pad(labels[:, 1:] != NOT_A_TARGET, (0, 1))
    with hf.head_at(core, wanted):
        output = model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=hf.gapped_mask(core, position_ids),
            use_cache=False,
        )
    return cross_entropy(output.logits[0].float(), labels[:, 1:][wanted[:, :-1]], reduction="none")


def decoded(
    model: Any, core: Any, input_ids: Int[Tensor, "batch time"], position_ids: Int[Tensor, "batch time"]
) -> tuple[Float[Tensor, "batch time hidden"], Any]:
    """The last hidden states of rows whose positions may have gaps, and the output they came in."""
    options = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(core.forward).parameters else {}
    with hf.watched_decoder(core) as seen:
        model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=hf.gapped_mask(core, position_ids),
            use_cache=False,
            **options,
        )
    return seen[-1][0], seen[-1]


def mean_nats(
    core: Any, hidden: Float[Tensor, "batch time hidden"], output: Any, labels: Int[Tensor, "batch time"]
) -> Float[Tensor, ""]:
    """The mean of -log p(label) over the positions that have one; position t is predicted from hidden state t - 1.

    No more logits than fit into a block are held: of several blocks each is computed again for its gradient.
    """
    wanted = labels[:, 1:] != NOT_A_TARGET
    hidden, labels = hidden[:, :-1][wanted], labels[:, 1:][wanted]
    limit = LOGITS_AT_ONCE.get(hidden.device.type, LOGITS_AT_ONCE_ELSEWHERE)
    size = max(1, limit // core.get_input_embeddings().num_embeddings)
    total = hidden.new_zeros((), dtype=torch.float32)

    def summed(block: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(hf.logits(core, block[None], output)[0].float(), targets, reduction="sum")

    for first in range(0, len(labels), size):
        block = hidden[first : first + size], labels[first : first + size]
        alone = len(labels) <= size or not torch.is_grad_enabled()
        total = total + (summed(*block) if alone else checkpoint(summed, *block, use_reentrant=False))
    return total / max(1, len(labels))
