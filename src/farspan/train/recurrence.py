"""Segment-level recurrence (Transformer-XL) for a Llama: rows that continue each other, with a memory between steps.

    [k; v] of step t  = [memory of step t - 1, without gradient; keys and values of the segment]
    memory of step t  = the last `memory` of them
    visible(i)        = the whole memory, and the tokens of the segment up to i

Dai et al. 2019, arXiv 1901.02860, section 3.2. The memory has keys and values instead of hidden states, as in Llama-XL
of the Forgetting Curve paper, appendix D.2, equations 3 to 8. Positions count from the first token of the memory, so
that all are below memory + segment. RoPE is a relative encoding: for the next step keys are rotated to their new
positions, and the trained weights are those of a plain Llama. The method
`sinks:window=MEMORY+1,sinks=0,stride=SEGMENT` reads text as in training.

Left out: the L2 norm of keys (equation 2). In the paper it serves positions beyond those of the training, which the
paper does not use, and transformers' Llama has no such norm.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset
from transformers import DynamicCache

from farspan import hf
from farspan.hf.attend import angles, turned
from farspan.methods.sinks import Sinks
from farspan.text.corpora import Corpus
from farspan.train import engines
from farspan.train.batches import View
from farspan.train.config import Settings
from farspan.train.settings import RunSettings

Carried = list[tuple[Tensor, Tensor]]  # keys and values of each layer, [batch, heads, tokens, dim]


class RecurrenceSettings(Settings):
    """[recurrence]: each row of a step continues the same row of the previous step, and attends to tokens of it."""

    memory: int = Field(ge=0)  # tokens before a row that it attends to, in addition to its own; 0: none


def refuse_unfit(trainer: RunSettings) -> None:
    """Raise ValueError where the memory of a row cannot be kept from step to step: for several processes or GPUs, and
    for activation checkpointing."""
    if engines.num_processes() > 1 or torch.cuda.device_count() > 1:
        found = f"{engines.num_processes()} processes and {torch.cuda.device_count()} GPUs"
        raise ValueError(
            f"[recurrence] trains in one process on one device: got {found}. Start one process, with "
            "CUDA_VISIBLE_DEVICES=0 if there are several GPUs"
        )
    if trainer.activation_checkpointing:
        raise ValueError(
            "trainer.activation_checkpointing = true keeps no keys for the memory of [recurrence]: set it to false, "
            "and lower trainer.micro_batch to need less memory"
        )


def reading(memory: int, segment: int) -> str:
    """Return the method that reads text as in training, such as `sinks:window=1025,sinks=0,stride=1024`."""
    return str(Sinks(window=memory + 1, sinks=0, stride=segment))


class ConsecutiveRows(Dataset[dict[str, Tensor]]):
    """All documents as one stream, a separator before each; row r of a step continues row r of the previous step.

    Sample `step * rows + r` has the tokens `input_ids` [segment], the token after each as `labels` [segment], `row` r,
    and `begins`, which is true in the first step. Row r begins r / rows of the way through the stream. After the end
    of the stream a row continues at its beginning.

    Args:
        segment: tokens of a row.
        rows: rows of a step.
        steps: the number of steps; None: one pass of the stream, without the tokens that do not fill a row.

    Raises:
        ValueError: a shuffled text, or a text with fewer tokens than a step reads.
    """

    def __init__(
        self, corpus: Corpus, segment: int, rows: int, separator: tuple[int, ...], seed: int, steps: int | None = None
    ) -> None:
        corpus.check_ordered()
        order = np.random.default_rng(seed).permutation(corpus.num_documents)
        self.corpus, self.stream = corpus, View(corpus, order, separator)
        self.segment, self.rows = segment, rows
        self.stretch = len(self.stream) // rows
        if self.stretch <= segment:
            raise ValueError(
                f"text {corpus.name!r} has {len(self.stream):,} tokens, and {rows:,} consecutive rows of {segment:,} "
                f"need more than {rows * segment:,}: give more text, fewer rows at once or a smaller trainer.window"
            )
        self.steps = (self.stretch - 1) // segment if steps is None else steps

    def __len__(self) -> int:
        return self.steps * self.rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        step, row = divmod(index, self.rows)
        size = len(self.stream)
        begin, length = (row * self.stretch + step * self.segment) % size, self.segment + 1
        tokens = self.stream.read(begin, min(length, size - begin))[0]
        if len(tokens) < length:
            tokens = np.concatenate([tokens, self.stream.read(0, length - len(tokens))[0]])
        ids = torch.from_numpy(tokens)
        return {
            "input_ids": ids[:-1],
            "labels": ids[1:],
            "row": torch.tensor(row),
            "begins": torch.tensor(step == 0),
        }


class Recurrence:
    """The terms of a TermsTrainer for ConsecutiveRows, and the memories of their rows.

    Each micro-batch of a step has its own memory. An evaluation has separate ones, which are empty at its beginning.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.carried: dict[str, Carried] = {}  # of the training, by the first row of a micro-batch
        self._evaluated: dict[str, Carried] = {}

    def __call__(self, model: Any, core: Any, batch: Mapping[str, Tensor]) -> dict[str, Float[Tensor, ""]]:
        """Return `lm`, the mean nats per token of consecutive rows, and keep keys and values for the next step."""
        ids, row = batch["input_ids"], str(int(batch["row"][0]))
        carried = self.carried if model.training else self._evaluated
        if bool(batch["begins"][0]):
            carried.pop(row, None)
        before = carried.get(row, [])
        held = before[0][0].shape[2] if before else 0
        cache = DynamicCache() if self.memory else None
        for layer, (keys, values) in enumerate(before):
            assert cache is not None
            cache.update(keys.to(ids.device), values.to(ids.device), layer)
        positions = torch.arange(held, held + ids.shape[1], device=ids.device)
        inputs = {"position_ids": positions[None], "past_key_values": cache, "use_cache": cache is not None}
        labels = batch["labels"]
        output = model(input_ids=ids, labels=labels, shift_labels=labels, **inputs)
        if cache is not None:
            inv_freq = hf.rotary_modules(core)[0].inv_freq
            carried[row] = [self._last(layer.keys, layer.values, inv_freq) for layer in cache.layers]
        return {"lm": output.loss}

    @torch.no_grad()
    def _last(
        self,
        keys: Float[Tensor, "batch heads tokens dim"],
        values: Float[Tensor, "batch heads tokens dim"],
        inv_freq: Float[Tensor, "pairs"],
    ) -> tuple[Tensor, Tensor]:
        """Return the last `memory` keys, rotated to positions from 0 on, and values, without gradient."""
        count = keys.shape[2]
        here = torch.arange(max(0, count - self.memory), count, device=keys.device)
        first = count - len(here)
        last = keys[:, :, first:]
        if first:
            last = turned(last, angles(here, inv_freq), angles(here - first, inv_freq))
        return last.clone(), values[:, :, first:].clone()

    def state_dict(self) -> dict[str, Carried]:
        """Return the memories of the training, for a checkpoint."""
        return self.carried

    def load_state_dict(self, state_dict: dict[str, Carried]) -> None:
        self.carried = state_dict
