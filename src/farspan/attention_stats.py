"""Attention statistics: several models, several methods, one run."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Unpack

import torch

from farspan import hf
from farspan.lengths import check_lengths
from farspan.lm import DEFAULT_TRAINED_LENGTH, LM, Load
from farspan.measure import TOKENS_AT_ONCE, Watch
from farspan.methods import method
from farspan.plan import Plan
from farspan.record import Row
from farspan.sweep import (
    DEFAULT_REPEATS,
    Asked,
    Options,
    PlanOptions,
    Setup,
    about,
    sweep,
    sweep_plans,
    trained_lengths,
)
from farspan.tasks.attention import MAP_BINS, SINKS, Attention, check_numbers, watchable
from farspan.text import corpora as corpus

LONGEST = 8192  # tokens, of lengths that are chosen by themselves: what a reading takes grows with their square
PARTS = (8, 4, 2, 1)  # lengths are these parts of the longest: 512, 1024, 2048 and 4096 of the paper's models
BIN = 1024  # tokens; a quarter of the longest length, where that is less


@dataclass(frozen=True)
class AttentionSettings:
    """What attention is looked at with; the same for every model and method of a run."""

    text: str = "builtin"
    lengths: tuple[int, ...] | None = None  # tokens; None: an eighth, a quarter, half and all of the trained length
    repeats: int = DEFAULT_REPEATS  # windows, from as many documents as possible
    seed: int = 0
    layers: tuple[int, ...] | None = None  # from 0, or from the end with -1; None: all
    sinks: int = SINKS  # first tokens of a text
    bin: int | None = None  # tokens of distance; None: 1,024, or less on short lengths
    map_bins: int = MAP_BINS  # 0: no map

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats = {self.repeats}; at least 1 is needed")
        if self.lengths is not None:
            check_lengths(self.lengths)
        check_numbers(BIN if self.bin is None else self.bin, self.sinks, self.map_bins)

    def resolved(self, trained: Sequence[int | None]) -> "AttentionSettings":
        """With lengths and bins for all models of the run, which were trained on these lengths."""
        longest = min(LONGEST, max(length or DEFAULT_TRAINED_LENGTH for length in trained))
        lengths = self.lengths or tuple(sorted({longest // part for part in PARTS} - set(range(self.sinks + 1))))
        quarter = max(1, (lengths or (1,))[-1] // 4)
        bin = self.bin or min(BIN, 1 << (quarter.bit_length() - 1))
        return replace(self, lengths=lengths or (longest,), bin=bin)

    def task(self, lm: LM) -> Attention:
        """The task for one model, its text tokenised. Of settings that are resolved.

        Raises:
            ValueError: a text that cannot be read.
        """
        assert self.bin is not None
        return Attention(corpus.load(self.text, lm.tokenizer), self.bin, self.sinks, self.layers, self.map_bins)

    def asking(self, lm: LM, watch: Watch) -> Asked:
        """What `sweep` asks one model. Of settings that are resolved."""
        assert self.lengths is not None
        task = self.task(lm)
        batch = max(1, TOKENS_AT_ONCE // self.lengths[-1])  # more than one repeat only where texts are short
        notice = f"queries at {', '.join(f'{n:,}' for n in self.lengths)} tokens"
        setup = Setup(task, task.text.name, self.lengths, self.repeats, self.seed, batch=batch, notice=notice)
        return Asked([setup], about(task.text))


def measure_attention(
    models: Sequence[str | LM],
    methods: Sequence[str],
    settings: AttentionSettings,
    out: str | Path,
    **options: Unpack[Options],
) -> list[Row]:
    """Looks at the attention of every model under every method into the run folder `out`, as `farspan.sweep.sweep`
    says.

    Raises:
        ValueError: besides, a method with attention of its own.
    """
    settings = settings.resolved(trained_lengths(models, options))
    header = {"task": Attention.name, **asdict(settings)}
    return sweep(models, methods, header, settings.asking, out, **options)


def plan_attention(
    models: Sequence[str | LM], methods: Sequence[str], settings: AttentionSettings, **options: Unpack[PlanOptions]
) -> Iterator[tuple[str, str, str, Plan | str]]:
    """What `measure_attention` would cost, by model, method and text."""
    settings = settings.resolved(trained_lengths(models, options))
    loader = options.get("loader") or Load()

    def see(layer: int, queries: torch.Tensor, keys: torch.Tensor, scores: torch.Tensor) -> None:
        scores.softmax(-1, dtype=torch.float32).mean(1)  # most of what looking takes

    for model in models:
        lm = loader(model)
        for how in methods:
            with method(how).on(lm) as reader:
                watchable(reader)
        with hf.watch_attention(lm, settings.layers, None if settings.map_bins else (), see):
            yield from sweep_plans([lm], methods, settings.asking, **options)
