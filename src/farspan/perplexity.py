"""Perplexity by length: several models, several methods, one run."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Unpack

from farspan.lengths import check_lengths
from farspan.lm import DEFAULT_TRAINED_LENGTH, LM
from farspan.measure import Watch
from farspan.plan import Plan
from farspan.reader import CHUNK
from farspan.record import Row
from farspan.stats import perplexity_label
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
from farspan.tasks.perplexity import TARGET_TOKENS, Perplexity, check_target_tokens, check_targets, shortest_length
from farspan.text import corpora as corpus

MASK = 1 << 22  # of one forward on a CPU, where attention in chunks holds a number for each token and token read
OPTION = "--target-tokens"
SMALLEST_CHUNK = 256  # tokens; smaller ones take longer


@dataclass(frozen=True)
class PerplexitySettings:
    """What perplexity is measured with; the same for every model and method of a run."""

    text: str = "builtin"
    lengths: tuple[int, ...] | None = None  # tokens; None: powers of two up to twice the trained length
    repeats: int = DEFAULT_REPEATS  # windows, from as many documents as possible
    seed: int = 0
    targets: str = "fixed"  # one of TARGETS
    target_tokens: int | None = None  # None: 256, or half of the smallest length where that is less
    buckets: int | None = None  # of positions, with targets `all`; None: powers of two

    def __post_init__(self) -> None:
        check_targets(self.targets)
        if self.repeats < 1:
            raise ValueError(f"repeats = {self.repeats}; at least 1 is needed")
        if self.lengths is not None:
            check_lengths(self.lengths)
        if self.target_tokens is not None:
            if self.targets == "all":
                raise ValueError("--target-tokens belongs to --targets fixed or last; all scores every token")
            if self.lengths is not None:
                check_target_tokens(self.target_tokens, self.lengths, OPTION)
        if self.buckets is not None and self.targets != "all":
            raise ValueError(f"--buckets belongs to --targets all, not to {self.targets}")

    def resolved(self, trained: Sequence[int | None]) -> "PerplexitySettings":
        """With one number of target tokens for the run, chosen for models trained on these lengths."""
        if self.target_tokens is not None or self.targets == "all":
            return self
        shortest = (
            self.lengths[0]
            if self.lengths
            else min(shortest_length(length or DEFAULT_TRAINED_LENGTH) for length in trained)
        )
        return replace(self, target_tokens=max(1, min(TARGET_TOKENS, shortest // 2)))

    def task(self, lm: LM) -> Perplexity:
        """The task for one model, its text tokenised.

        Raises:
            ValueError: a text that cannot be read.
        """
        text = corpus.load(self.text, lm.tokenizer)
        return Perplexity(text, self.targets, self.target_tokens or TARGET_TOKENS, self.buckets)

    def asking(self, lm: LM, watch: Watch) -> Asked:
        """What `sweep` asks one model. Of settings that are resolved."""
        task = self.task(lm)
        lengths = self.lengths or default_lengths(lm, task, self.repeats, watch)
        notice = f"targets {task.targets}, separator: {lm.separator.kind} {list(lm.separator.ids)}"
        chunk = default_chunk(lm, lengths[-1])
        setup = Setup(
            task, perplexity_label(task.settings), lengths, self.repeats, self.seed, chunk=chunk, notice=notice
        )
        return Asked([setup], about(task.text))


def measure_perplexity(
    models: Sequence[str | LM],
    methods: Sequence[str],
    settings: PerplexitySettings,
    out: str | Path,
    **options: Unpack[Options],
) -> list[Row]:
    """Measures every model under every method into the run folder `out`, as `farspan.sweep.sweep` says."""
    settings = settings.resolved(trained_lengths(models, options))
    header = {"task": Perplexity.name, **asdict(settings)}
    return sweep(models, methods, header, settings.asking, out, **options)


def plan_perplexity(
    models: Sequence[str | LM], methods: Sequence[str], settings: PerplexitySettings, **options: Unpack[PlanOptions]
) -> Iterator[tuple[str, str, str, Plan | str]]:
    """What `measure_perplexity` would cost, by model, method and what is scored."""
    return sweep_plans(models, methods, settings.resolved(trained_lengths(models, options)).asking, **options)


def default_lengths(lm: LM, task: Perplexity, repeats: int, watch: Watch) -> tuple[int, ...]:
    """Powers of two from 512, or a quarter of the trained length, to twice the trained length, or to where positions
    or the text end.

    Raises:
        ValueError: more target tokens than there is room for.
    """
    trained = lm.trained_length or DEFAULT_TRAINED_LENGTH
    room = 2 * trained
    if lm.position_limit is not None:
        room = min(room, lm.position_limit - task.num_tokens(lm, 0))
    shortest = shortest_length(trained)
    while task.targets != "all" and shortest < 2 * task.target_tokens:
        shortest *= 2
    lengths = [shortest << i for i in range(room.bit_length()) if shortest << i <= room]
    if not lengths:
        if task.targets != "all":
            check_target_tokens(task.target_tokens, (room,), OPTION)
        return (room,)
    fitting = [length for length in lengths if task.text.num_windows(length, repeats) >= repeats]
    if fitting and fitting != lengths:
        watch.notice(f"the text is too short for lengths of {lengths[-1]:,}: they end at {fitting[-1]:,} tokens")
    return tuple(fitting or lengths[:1])


def default_chunk(lm: LM, longest: int) -> int | None:
    """Tokens of one forward: fewer than the reader's own where these would make the mask of a long text the largest
    part of what it takes on a CPU. None: the reader's own."""
    if lm.device.type != "cpu" or CHUNK * longest <= MASK:
        return None
    return max(SMALLEST_CHUNK, MASK // longest)
