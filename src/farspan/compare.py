"""Loops around `measure`: several models, several methods, one run."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from farspan import corpus
from farspan.lm import LM, load
from farspan.measure import measure
from farspan.methods import Method, method
from farspan.plan import Plan, plan
from farspan.record import Row, Run, latest
from farspan.tasks.curve import Curve

AUTHORS_POINTS = 32
AUTHORS_SHORTEST = 8
DEFAULT_POINTS = 16
DEFAULT_TRAINED_LENGTH = 2048  # tokens, where a config says none


@dataclass(frozen=True)
class CurveSettings:
    """What a forgetting curve is measured with; the same for every model and method of a run."""

    text: str = "builtin"
    target_text: str | None = None  # S; None: `text`
    prefix_text: str | None = None  # I; None: the protocol's own
    lengths: tuple[int, ...] | None = None  # tokens; None: 16 of them to a context of twice the trained length
    repeats: int = 10
    seed: int = 0
    protocol: Literal["paper", "nested"] = "nested"
    compat: bool = False  # the authors' token ids

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats = {self.repeats}; at least 1 is needed")
        if self.protocol not in ("paper", "nested"):
            raise ValueError(f"protocol {self.protocol!r} is unknown; known are paper and nested")
        if self.lengths is not None:
            check_lengths(self.lengths)

    def task(self, lm: LM) -> Curve:
        """The task for one model, its texts tokenised.

        Raises:
            ValueError: a text that cannot be read.
        """

        def named(text: str) -> corpus.Corpus:
            return corpus.load(f"shuffled:{self.text}" if text == "shuffled" else text, lm.tokenizer)

        return Curve(
            target=named(self.target_text or self.text),
            prefix=named(self.prefix_text) if self.prefix_text else None,
            protocol=self.protocol,
            compat=self.compat,
        )


@dataclass(frozen=True)
class Load:
    """How each model is loaded; see `farspan.load`."""

    dtype: Any = "auto"
    device: str | None = None
    attention: str | None = None
    trained_length: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, model: str) -> LM:
        return load(
            model,
            dtype=self.dtype,
            device=self.device,
            attention=self.attention,
            trained_length=self.trained_length,
            **self.options,
        )


def measure_curves(
    models: Sequence[str | LM],
    methods: Sequence[str],
    settings: CurveSettings,
    out: str | Path,
    *,
    loader: Load | None = None,
    batch: int | None = None,
    chunk: int | None = None,
    watch: Watch | None = None,
) -> list[Row]:
    """Measures every model under every method into the run folder `out`, and returns all its rows; of a
    measurement that was repeated, the last.

    Models are loaded one after another. Repeating the call continues where it stopped.

    Raises:
        ValueError: settings, texts or models that cannot be; a folder with another run.
        OSError: the disk is full.
    """
    watch, loader = watch or Watch(), loader or Load()
    chosen = [method(text) for text in methods]
    with Run.open(out, {"task": Curve.name, "methods": [str(m) for m in chosen], **asdict(settings)}) as run:
        for model in models:
            # a call each, so that a model is gone before the next is loaded
            _measure_model(model, chosen, settings, run, loader, batch, chunk, watch)
        return latest(run.rows)


def _measure_model(
    model: str | LM,
    methods: Sequence[Method],
    settings: CurveSettings,
    run: Run,
    loader: Load,
    batch: int | None,
    chunk: int | None,
    watch: Watch,
) -> None:
    lm = model if isinstance(model, LM) else loader(model)
    task = settings.task(lm)
    run.add_model(lm.identity | {"texts": {name: task.settings[name] for name in ("target_hash", "prefix_hash")}})
    lengths = settings.lengths or default_lengths(lm, task)
    for how in methods:
        watch.start(f"{lm.name} {how}", len(lengths) * settings.repeats)
        watch.notice(f"separator: {lm.separator.kind} {list(task.separator(lm))}")
        measure(
            task,
            how,
            lm,
            run,
            lengths=lengths,
            repeats=settings.repeats,
            seed=settings.seed,
            batch=batch,
            chunk=chunk,
            on_row=watch.row,
            on_notice=watch.notice,
        )


def plan_curves(
    models: Sequence[str],
    methods: Sequence[str],
    settings: CurveSettings,
    *,
    loader: Load | None = None,
    batch: int | None = None,
    chunk: int | None = None,
) -> list[tuple[str, str, Plan]]:
    """What `measure_curves` would cost, by model and method."""
    plans = []
    for model in models:
        lm = (loader or Load())(model)
        task = settings.task(lm)
        lengths = settings.lengths or default_lengths(lm, task)
        for text in methods:
            how = method(text)
            cost = plan(
                task,
                how,
                lm,
                lengths=lengths,
                repeats=settings.repeats,
                seed=settings.seed,
                batch=batch,
                chunk=chunk,
            )
            plans.append((lm.name, str(how), cost))
    return plans


def default_folder(models: Sequence[str], methods: Sequence[str], settings: CurveSettings) -> Path:
    """runs/NAME, the same for the same command, so that repeating it continues it."""
    what = json.dumps([list(models), list(methods), asdict(settings)])
    name = Path(models[0]).name or "model"
    return Path("runs") / f"curve-{name}-{hashlib.sha256(what.encode()).hexdigest()[:8]}"


def default_lengths(lm: LM, task: Curve) -> tuple[int, ...]:
    """16 lengths, evenly spaced, to a context of twice the trained length, or to where positions end."""
    context = 2 * (lm.trained_length or DEFAULT_TRAINED_LENGTH)
    longest = min(context, lm.position_limit or context) // 2 - len(task.separator(lm))
    return spaced_lengths(max(1, longest // DEFAULT_POINTS), longest, DEFAULT_POINTS)


def authors_lengths(longest: int) -> tuple[int, ...]:
    """The grid of the authors' script, as their Table 3 used it: linspace(8, longest, 32)."""
    return spaced_lengths(AUTHORS_SHORTEST, longest, AUTHORS_POINTS)


def spaced_lengths(
    shortest: int, longest: int, points: int, spacing: Literal["linear", "log"] = "linear"
) -> tuple[int, ...]:
    """`points` lengths from the shortest to the longest, rounded down, without repetitions.

    Raises:
        ValueError: an impossible range.
    """
    if not 0 < shortest <= longest:
        raise ValueError(
            f"lengths {shortest}:{longest} are no range: the first must be positive and not above the last"
        )
    if points < 1:
        raise ValueError(f"points = {points}; at least 1 is needed")
    space = np.geomspace if spacing == "log" else np.linspace
    # the last bits of geomspace must not lose the end of the range
    values = [math.floor(value + 1e-9) for value in space(shortest, longest, points)]
    return tuple(sorted(set(values)))


def parse_lengths(text: str, points: int, spacing: Literal["linear", "log"]) -> tuple[int, ...]:
    """Lengths as the command line writes them: `512,1024,2048`, or `512:16384` with points and spacing.

    Raises:
        ValueError: not numbers, not ascending, not positive.
    """
    try:
        if ":" in text:
            shortest, longest = (int(part) for part in text.split(":"))
            return spaced_lengths(shortest, longest, points, spacing)
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        if "lengths" in str(error) or "points" in str(error):
            raise
        raise ValueError(f"lengths {text!r} are neither like 512,1024,2048 nor like 512:16384") from error
    check_lengths(lengths)
    return lengths


def check_lengths(lengths: Sequence[int]) -> None:
    """Raises ValueError unless the lengths are positive and ascend."""
    if not lengths or any(length <= 0 for length in lengths):
        raise ValueError(f"lengths {list(lengths)} must be positive numbers of tokens")
    if any(a >= b for a, b in pairwise(lengths)):
        raise ValueError(
            f"lengths {list(lengths)} must ascend, each once: write {','.join(map(str, sorted(set(lengths))))}"
        )
