"""Loops around `measure` for attention statistics: several models, several methods, one run."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from farspan import corpus, hf
from farspan.curves import DEFAULT_REPEATS
from farspan.lengths import check_lengths
from farspan.lm import DEFAULT_TRAINED_LENGTH, LM, Load
from farspan.measure import TOKENS_AT_ONCE, Watch, measure
from farspan.methods import method
from farspan.plan import Plan, plan
from farspan.record import Row, Run, latest
from farspan.tasks.attention import MAP_BINS, SINKS, Attention, check_numbers, watchable

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


def measure_attention(
    models: Sequence[str | LM],
    methods: Sequence[str],
    settings: AttentionSettings,
    out: str | Path,
    *,
    loader: Load | None = None,
    batch: int | None = None,
    chunk: int | None = None,
    watch: Watch | None = None,
) -> list[Row]:
    """Looks at the attention of every model under every method into the run folder `out`, and returns all its rows;
    of a measurement that was repeated, the last.

    Models are loaded one after another. Repeating the call continues where it stopped.

    Raises:
        ValueError: settings, texts or models that cannot be; a method with attention of its own; a folder with
            another run.
        OSError: the disk is full.
    """
    watch, loader = watch or Watch(), loader or Load()
    chosen = [method(text) for text in methods]
    settings = _resolved(settings, models, loader)
    assert settings.lengths is not None
    with Run.open(out, {"task": Attention.name, "methods": [str(m) for m in chosen], **asdict(settings)}) as run:
        for model in models:
            lm = loader(model)
            task = settings.task(lm)
            per_token = {task.text.hash: task.text.characters_per_token}
            run.add_model(lm.identity | {"texts": sorted(per_token), "characters_per_token": per_token})
            for how in chosen:
                watch.notice(f"queries at {', '.join(f'{n:,}' for n in settings.lengths)} tokens, {lm.name} {how}")
                watch.start(f"{lm.name} {how}", len(settings.lengths) * settings.repeats)
                measure(
                    task,
                    how,
                    lm,
                    run,
                    lengths=settings.lengths,
                    repeats=settings.repeats,
                    seed=settings.seed,
                    batch=batch or default_batch(settings),
                    chunk=chunk,
                    watch=watch,
                )
            del lm  # gone before the next one is loaded
        return latest(run.rows)


def plan_attention(
    models: Sequence[str | LM],
    methods: Sequence[str],
    settings: AttentionSettings,
    *,
    loader: Load | None = None,
    batch: int | None = None,
    chunk: int | None = None,
) -> Iterator[tuple[str, str, dict[str, Any], Plan]]:
    """What `measure_attention` would cost, by model, method and settings of the task."""
    loader = loader or Load()
    settings = _resolved(settings, models, loader)
    assert settings.lengths is not None

    def see(layer: int, queries: torch.Tensor, keys: torch.Tensor, scores: torch.Tensor) -> None:
        scores.softmax(-1, dtype=torch.float32).mean(1)  # most of what looking takes

    for model in models:
        lm = loader(model)
        task = settings.task(lm)
        for text in methods:
            how = method(text)
            with how.on(lm) as reader:
                watchable(reader)
            with hf.watch_attention(lm, settings.layers, None if settings.map_bins else (), see):
                cost = plan(
                    task,
                    how,
                    lm,
                    lengths=settings.lengths,
                    repeats=settings.repeats,
                    seed=settings.seed,
                    batch=batch or default_batch(settings),
                    chunk=chunk,
                )
            yield lm.name, str(how), task.settings, cost


def default_batch(settings: AttentionSettings) -> int:
    """Repeats read at once: more than one only where texts are short."""
    assert settings.lengths is not None
    return max(1, TOKENS_AT_ONCE // settings.lengths[-1])


def _resolved(settings: AttentionSettings, models: Sequence[str | LM], loader: Load) -> AttentionSettings:
    return settings.resolved([loader.trained(model) for model in models])
