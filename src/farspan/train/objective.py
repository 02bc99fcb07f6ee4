"""The objective of Sparse Memory Training, equations 2 and 3, in nats per token:

    mean over targets of -log p(token | sampled memory, the target tokens before it)
    + β · mean over the ordinary window of -log p(token | the window's tokens before it)

Equation 2, the first term, is a mean in the paper too, but equation 3 has sums, and no minus signs. With sums the
window, which has twice as many tokens, would outweigh the target 2 : 1 at β = 1. The output head runs on predicted
tokens only: in blocks, or, in a sharded model, on all at once.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from farspan import hf
from farspan.train.blocks import NOT_A_TARGET, summed_nats
from farspan.train.engines import sharded

Rows = dict[str, Int[Tensor, "batch time"]]  # input_ids, position_ids, and labels: tokens, or NOT_A_TARGET


def terms(model: Any, core: Any, batch: Mapping[str, Rows]) -> dict[str, Float[Tensor, ""]]:
    """Return the mean nats per predicted token of each group of rows in `batch`.

    If all groups have rows of the same length, one forward pass reads them all; else each has its own.

    Args:
        model: the model to call: `core` itself, or the wrapper that data parallelism has put around it.
        core: the transformers model.
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
    """Return -log p of each predicted token, row by row. All logits are computed at once: the parameters of a sharded
    model are gathered only while the model itself runs, so its head cannot run in blocks afterwards."""
    wanted = torch.nn.functional.pad(labels[:, 1:] != NOT_A_TARGET, (0, 1))
    with hf.head_at(core, wanted):
        output = model(**_gapped(core, input_ids, position_ids))
    return cross_entropy(output.logits[0].float(), labels[:, 1:][wanted[:, :-1]], reduction="none")


def _gapped(core: Any, input_ids: Tensor, position_ids: Tensor) -> dict[str, Any]:
    """Return the model's inputs for rows whose positions may have gaps."""
    mask = hf.gapped_mask(core, position_ids)
    return {"input_ids": input_ids, "position_ids": position_ids, "attention_mask": mask, "use_cache": False}


def decoded(
    model: Any, core: Any, input_ids: Int[Tensor, "batch time"], position_ids: Int[Tensor, "batch time"]
) -> tuple[Float[Tensor, "batch time hidden"], Any]:
    """Return the last hidden states of rows whose positions may have gaps, and the decoder's output object."""
    return last_hidden(model, core, **_gapped(core, input_ids, position_ids))


def last_hidden(model: Any, core: Any, **inputs: Any) -> tuple[Float[Tensor, "batch time hidden"], Any]:
    """Run `model`; return the decoder's last hidden states, and the decoder's output object, which holds them. If the
    model has the argument `logits_to_keep`, its head runs on one position only."""
    if "logits_to_keep" in inspect.signature(core.forward).parameters:
        inputs["logits_to_keep"] = 1
    with hf.watched_decoder(core) as seen:
        model(**inputs)
    return seen[-1][0], seen[-1]


def mean_nats(
    core: Any, hidden: Float[Tensor, "batch time hidden"], output: Any, labels: Int[Tensor, "batch time"]
) -> Float[Tensor, ""]:
    """Return the mean of -log p(label) over the positions that have a label, in nats and fp32; 0 if none has.
    Position t is predicted from hidden state t - 1."""
    wanted = labels[:, 1:] != NOT_A_TARGET
    hidden, labels = hidden[:, :-1][wanted], labels[:, 1:][wanted]
    vocabulary = core.get_input_embeddings().num_embeddings
    total = summed_nats(lambda block: hf.logits(core, block[None], output)[0], vocabulary, hidden, labels)
    return total / max(1, len(labels))
