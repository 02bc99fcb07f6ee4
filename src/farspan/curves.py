"""Loops around `measure` for forgetting curves: several models, several methods, one run."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from farspan.adaptive import Budget, measure_adaptively, prepared, round_one
from farspan.lengths import DEFAULT_POINTS, check_lengths, spaced_lengths
from farspan.lm import DEFAULT_TRAINED_LENGTH, LM, Load
from farspan.measure import Watch, measure
from farspan.methods import Method, method
from farspan.plan import Plan, plan
from farspan.record import Row, Run, latest
from farspan.stats import label
from farspan.sweep import DEFAULT_REPEATS, about, show_first
from farspan.tasks.curve import LONG, RING, Curve, Protocol, check_depths
from farspan.text import corpora as corpus

PROBED = (128, 256)  # tokens of a probe that warm up, and that are scored ...
PROBED_LONG = (512, 1024)  # ... where the largest length exceeds LONG


@dataclass(frozen=True)
class CurveSettings:
    """What forgetting curves are measured with; the same for every model and method of a run."""

    text: str = "builtin"
    target_texts: tuple[str, ...] = ()  # S; none: `text`
    prefix_texts: tuple[str, ...] = ()  # I; none: the protocol's own
    lengths: tuple[int, ...] | None = None  # tokens; None: where the curve needs them, up to twice the trained length
    repeats: int | None = None  # None: 10, or with lengths of None as many as the thresholds need
    seed: int = 0
    protocol: Protocol | None = None  # None: nested; probe for depths, and where the largest length exceeds 8,192
    warmup: int | None = None  # tokens of a probe; None: 128, or 512 where the largest length exceeds 8,192
    scored: int | None = None  # tokens of a probe; None: 256, or 1,024
    depths: tuple[float, ...] = (0.0,)
    whole_window: bool = False  # one length: the longest whose context the model was trained on
    compat: bool = False  # the authors' token ids

    def __post_init__(self) -> None:
        if self.repeats is not None and self.repeats < 1:
            raise ValueError(f"repeats = {self.repeats}; at least 1 is needed")
        if self.protocol not in (None, "paper", "nested", "probe"):
            raise ValueError(f"protocol {self.protocol!r} is unknown; known are paper, nested and probe")
        if self.lengths is not None:
            check_lengths(self.lengths)

    def resolved(self, trained: Sequence[int | None]) -> "CurveSettings":
        """With one protocol for the run, and its tokens, chosen for models trained on these lengths.

        Raises:
            ValueError: a probe longer than the lengths.
        """
        context = max(length or DEFAULT_TRAINED_LENGTH for length in trained) * (1 if self.whole_window else 2)
        largest = self.lengths[-1] if self.lengths else context // 2
        map_ = self.whole_window or self.depths != (0.0,)
        protocol = self.protocol or ("probe" if map_ or largest > LONG else "nested")
        if protocol != "probe":
            check_depths(self.depths, protocol, (), 0)
            if self.warmup is not None or self.scored is not None:
                raise ValueError(f"--warmup and --scored belong to --protocol probe, not to {protocol}")
            return replace(self, protocol=protocol)
        warmup, scored = PROBED_LONG if largest > LONG else PROBED
        while map_ and not self.lengths and warmup > 1 and warmup + scored > context // 4:
            warmup, scored = warmup // 2, scored // 2  # a map needs lengths with room for depths
        warmup = self.warmup if self.warmup is not None else warmup
        scored = self.scored if self.scored is not None else scored
        if (self.warmup is not None or self.scored is not None) and warmup + scored > largest:
            raise ValueError(
                f"a probe of {warmup} + {scored} tokens (--warmup, --scored) is longer than the longest text, "
                f"{largest:,} tokens: give smaller ones, or longer --lengths"
            )
        check_depths(self.depths, protocol, self.lengths or (), warmup + scored)
        return replace(self, protocol=protocol, warmup=warmup, scored=scored)

    def tasks(self, lm: LM) -> list[Curve]:
        """The tasks for one model, a task for each pair of texts, tokenised. Of settings that are resolved.

        Raises:
            ValueError: a text that cannot be read.
        """

        def named(text: str) -> corpus.Corpus:
            return corpus.load(f"shuffled:{self.text}" if text == "shuffled" else text, lm.tokenizer)

        assert self.protocol is not None, "resolve the settings first"
        targets = [named(text) for text in self.target_texts or (self.text,)]
        prefixes: list[corpus.Corpus | None] = [named(text) for text in self.prefix_texts]
        prefixes = prefixes or [None]
        probe = {} if self.warmup is None or self.scored is None else {"warmup": self.warmup, "scored": self.scored}
        return [
            Curve(target, prefix, self.protocol, self.compat, depths=self.depths, **probe)
            for target in targets
            for prefix in prefixes
        ]


def measure_curves(
    models: Sequence[str | LM],
    methods: Sequence[str],
    settings: CurveSettings,
    out: str | Path,
    *,
    loader: Load | None = None,
    minutes: float | None = None,
    batch: int | None = None,
    chunk: int | None = None,
    watch: Watch | None = None,
) -> list[Row]:
    """Measures every model under every method into the run folder `out`, and returns all its rows; of a
    measurement that was repeated, the last.

    Models are loaded one after another. Repeating the call continues where it stopped.

    Args:
        minutes: a budget for all of it, with lengths of None. What it leaves out are rows that say so.

    Raises:
        ValueError: settings, texts or models that cannot be; a folder with another run; too small a budget.
        OSError: the disk is full.
    """
    watch, loader = watch or Watch(), loader or Load()
    chosen = [method(text) for text in methods]
    settings = _resolved(settings, models, loader)
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes: got {minutes:g}, expected a positive number (--minutes)")
    if minutes is not None and (settings.lengths is not None or settings.protocol == "paper"):
        raise ValueError("a budget in minutes goes with --lengths auto, which has something to choose")
    budget = Budget() if minutes is None else Budget(60 * minutes)
    with Run.open(out, {"task": Curve.name, "methods": [str(m) for m in chosen], **asdict(settings)}) as run:
        for done, model in enumerate(models):
            # a call each, so that a model is gone before the next is loaded
            share = Budget(budget.left / (len(models) - done))
            _measure_model(model, chosen, settings, run, loader, share, batch, chunk, watch)
        return latest(run.rows)


def _measure_model(
    model: str | LM,
    methods: Sequence[Method],
    settings: CurveSettings,
    run: Run,
    loader: Load,
    budget: Budget,
    batch: int | None,
    chunk: int | None,
    watch: Watch,
) -> None:
    lm = loader(model)
    tasks = settings.tasks(lm)
    texts = [text for task in tasks for text in (task.target, task.prefix) if text is not None]
    run.add_model(lm.identity | about(*texts))
    run.refuse_other_version(Curve.name, Curve.version)
    for done, (how, task) in enumerate((how, task) for how in methods for task in tasks):
        watch.notice(f"protocol {task.protocol}, separator: {lm.separator.kind} {list(task.separator(lm))}")
        lengths = settings.lengths or _fixed_lengths(lm, task, settings)
        if lengths is not None:
            repeats = settings.repeats or DEFAULT_REPEATS
            watch.start(f"{lm.name} {how}", len(lengths) * repeats * len(task.depths))
            measure(
                task,
                how,
                lm,
                run,
                lengths=lengths,
                repeats=repeats,
                seed=settings.seed,
                batch=batch,
                chunk=chunk,
                watch=watch,
            )
        else:
            task, longest = _prepared(lm, task, settings, watch)
            left = budget.left / (len(methods) * len(tasks) - done)
            measure_adaptively(
                task,
                how,
                lm,
                run,
                longest=longest,
                repeats=settings.repeats,
                seed=settings.seed,
                batch=batch,
                chunk=chunk,
                budget=Budget(left),
                watch=watch,
            )
            lengths, repeats = (longest,), task.pool or RING
        show_first(task, lm, run, label(task.settings), lengths, repeats, settings.seed)


def plan_curves(
    models: Sequence[str | LM],
    methods: Sequence[str],
    settings: CurveSettings,
    *,
    loader: Load | None = None,
    batch: int | None = None,
    chunk: int | None = None,
) -> list[tuple[str, str, str, Plan]]:
    """What `measure_curves` would cost, by model, method and what is asked; with lengths of None its first round."""
    loader = loader or Load()
    settings = _resolved(settings, models, loader)
    plans = []
    for model in models:
        lm = loader(model)
        for task in settings.tasks(lm):
            lengths, repeats = settings.lengths or _fixed_lengths(lm, task, settings), settings.repeats
            if lengths is None:
                task, longest = _prepared(lm, task, settings, Watch())
                lengths, repeats = round_one(task, longest, repeats)
            for text in methods:
                cost = plan(
                    task,
                    method(text),
                    lm,
                    lengths=lengths,
                    repeats=repeats or DEFAULT_REPEATS,
                    seed=settings.seed,
                    batch=batch,
                    chunk=chunk,
                )
                plans.append((lm.name, str(method(text)), label(task.settings), cost))
    return plans


def _resolved(settings: CurveSettings, models: Sequence[str | LM], loader: Load) -> CurveSettings:
    return settings.resolved([loader.trained(model) for model in models])


def _fixed_lengths(lm: LM, task: Curve, settings: CurveSettings) -> tuple[int, ...] | None:
    """The lengths of what is not measured adaptively."""
    if settings.whole_window:
        return (_largest_length(lm, task, lm.trained_length or DEFAULT_TRAINED_LENGTH),)
    return default_lengths(lm, task) if task.protocol == "paper" else None


def _prepared(lm: LM, task: Curve, settings: CurveSettings, watch: Watch) -> tuple[Curve, int]:
    longest = _largest_length(lm, task, 2 * (lm.trained_length or DEFAULT_TRAINED_LENGTH))
    task, possible = prepared(task, longest, settings.repeats)
    if possible < longest:
        watch.notice(f"the text is too short for lengths of {longest:,}: they end at {possible:,} tokens")
    return task, possible


def _largest_length(lm: LM, task: Curve, context: int) -> int:
    return max(1, task.largest_length(lm, min(context, lm.position_limit or context)))


def default_lengths(lm: LM, task: Curve) -> tuple[int, ...]:
    """16 lengths, evenly spaced, to a context of twice the trained length, or to where positions end."""
    longest = _largest_length(lm, task, 2 * (lm.trained_length or DEFAULT_TRAINED_LENGTH))
    return spaced_lengths(max(1, longest // DEFAULT_POINTS), longest, DEFAULT_POINTS)
