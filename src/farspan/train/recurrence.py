"""Segment-level recurrence (Transformer-XL) for a Llama: rows that continue each other, and the memory they carry.

    [k; v] of step t  = [memory of step t - 1, without gradient; keys and values of the segment]
    memory of step t  = the last `memory` of them
    visible(i)        = the whole memory, and the tokens of the segment up to i

Dai et al. 2019, arXiv 1901.02860, section 3.2; with keys and values in the memory instead of hidden states, as Llama-XL
of the Forgetting Curve paper, appendix D.2, equations 3 to 8. Positions count from the first token of the memory, so
that none exceeds memory + segment. RoPE is a relative encoding: keys are carried by rotating them back, and the weights
are those of a plain Llama. To read as in training is the method `sinks:window=MEMORY+1,sinks=0,stride=SEGMENT`.

Left out: the L2 norm of keys (equation 2). The paper has it for positions beyond those of the training, which it does
not use, and transformers' Llama has no such norm.
"""

from collections.abc import Mapping
from pathlib import Path
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
from farspan.train.trainer import RunSettings

Carried = list[tuple[Tensor, Tensor]]  # keys and values of each layer, [batch, heads, tokens, dim]


class RecurrenceSettings(Settings):
    """[recurrence]: a row continues that of the step before, and attends to the last tokens of what it has read."""

    memory: int = Field(ge=0)  # tokens before each row that it attends to, besides the row; 0: none


def refuse_unfit(trainer: RunSettings) -> None:
    """Refuse settings under which the memory of a row could not be carried.

    Raises:
        ValueError: several processes or GPUs, or activation checkpointing.
    """
    if engines.num_processes() > 1 or torch.cuda.device_count() > 1:
        found = f"{engines.num_processes()} processes and {torch.cuda.device_count()} GPUs"
        raise ValueError(
            f"[recurrence] carries the memory of each row in one process on one device: got {found}. Start one "
            "process, with CUDA_VISIBLE_DEVICES=0 where there are several GPUs"
        )
    if trainer.activation_checkpointing:
        raise ValueError(
            "trainer.activation_checkpointing = true keeps no keys for the memory of [recurrence]: set it to false, "
            "and lower trainer.micro_batch to need less memory"
        )


def reading(memory: int, segment: int) -> str:
    """Return the method that reads as a model was trained."""
    return str(Sinks(window=memory + 1, sinks=0, stride=segment))


class ConsecutiveRows(Dataset[dict[str, Tensor]]):
    """All documents as one stream, a separator before each; row r of a step continues row r of the step before.

    Sample `step * rows + r` has the tokens `input_ids` [segment], the token after each as `labels` [segment], `row` r,
    and `begins`, whether it is the first of its row. Row r begins after r / rows of the stream. The stream is read as
    a ring.

    Args:
        steps: how many there are; None: one pass of the stream, without the tokens that do not fill a row.

    Raises:
        ValueError: a shuffled text, or one of fewer tokens than a step reads.
    """

    def __init__(
        self, corpus: Corpus, segment: int, rows: int, separator: tuple[int, ...], seed: int, steps: int | None = None
    ) -> None:
        corpus.check_ordered()
        order = np.random.default_rng(seed).permutation(corpus.num_documents)
        self.stream, self.segment, self.rows = View(corpus, order, separator), segment, rows
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
    """The terms of a TermsTrainer whose rows are ConsecutiveRows, and the memories that they carry.

    Each micro-batch of a step has a memory of its own; so have those of an evaluation, which begins without one.
    """

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.carried: dict[str, Carried] = {}  # by the first row of a micro-batch, of the training
        self._evaluated: dict[str, Carried] = {}

    def __call__(self, model: Any, core: Any, batch: Mapping[str, Tensor]) -> dict[str, Float[Tensor, ""]]:
        """Return the mean nats per token of consecutive rows; carry their keys and values on."""
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
        """Return the last keys, as if at positions from 0 on, and values, without gradient."""
        count = keys.shape[2]
        here = torch.arange(max(0, count - self.memory), count, device=keys.device)
        first = count - len(here)
        last = keys[:, :, first:]
        if first:
            last = turned(last, angles(here, inv_freq), angles(here - first, inv_freq))
        return last.clone(), values[:, :, first:].clone()

    def state_dict(self) -> dict[str, Carried]:
        """Return what a checkpoint needs to continue."""
        return self.carried

    def load_state_dict(self, state: dict[str, Carried]) -> None:
        self.carried = state


CARD = """# {name}

A Llama of {parameters:,} parameters, trained by `farspan train lm` with segment-level recurrence (Transformer-XL): rows
of {segment:,} tokens, and a memory of {memory:,} tokens before each. Read it as it was trained:

    farspan curve FOLDER --method {reading}

Without the method it reads with full attention, which is the same for texts of up to {segment:,} tokens.
"""


def model_card(summary: Mapping[str, Any], log: Any) -> str:
    """Return the README.md of a model trained with recurrence, from the content of its training.json."""
    settings = summary["settings"]
    return CARD.format(
        name=Path(settings["out"]).name,
        parameters=summary["parameters"],
        segment=settings["trainer"]["window"],
        memory=settings["recurrence"]["memory"],
        reading=summary["reading"],
    )
