"""The loop around `measure`: models × methods × tasks, one run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypedDict, runtime_checkable

from farspan.lm import LM, Load
from farspan.measure import Watch, measure
from farspan.methods import Method, method
from farspan.plan import Plan, plan
from farspan.record import Row, Run, latest
from farspan.tasks import Example, Task
from farspan.text.corpora import UNKNOWN_SHARE, Corpus

DEFAULT_REPEATS = 10


class PlanOptions(TypedDict, total=False):
    """How a sweep is carried out, whatever it measures; see `farspan.measure.measure`."""

    loader: Load
    batch: int | None
    chunk: int | None


class Options(PlanOptions, total=False):
    watch: Watch


def trained_lengths(models: Sequence[str | LM], options: PlanOptions) -> list[int | None]:
    """The tokens that each model was trained on, where it says so; nothing is loaded for it."""
    loader = options.get("loader") or Load()
    return [loader.trained(model) for model in models]


@dataclass(frozen=True)
class Setup:
    """One task, as one model is asked it."""

    task: Task
    what: str  # names it in plans and beside its first example
    lengths: tuple[int, ...]  # in the task's unit
    repeats: int
    seed: int
    batch: int | None = None  # repeats read at once, where the caller leaves them open
    chunk: int | None = None  # tokens of one forward, likewise
    notice: str = ""  # what a user should know before it begins


@dataclass(frozen=True)
class Asked:
    """All that one model is asked."""

    setups: Sequence[Setup]
    about: dict[str, Any]  # recorded beside the model's identity


Asking = Callable[[LM, Watch], Asked]


def about(*texts: Corpus) -> dict[str, Any]:
    """What is recorded of texts beside a model: what another tokenizer's numbers need for a comparison."""
    per_token = {text.hash: text.characters_per_token for text in texts}
    unknown = {text.hash: round(text.unknown, 4) for text in texts if text.unknown > UNKNOWN_SHARE}
    return {"texts": sorted(per_token), "characters_per_token": per_token} | ({"unknown": unknown} if unknown else {})


@runtime_checkable
class Shown(Protocol):
    """A task that can say an example in words, as `farspan.report.example` reads it."""

    def shown(self, lm: LM, example: Example, length: int) -> dict[str, Any]: ...


def sweep(
    models: Sequence[str | LM],
    methods: Sequence[str],
    header: dict[str, Any],
    asking: Asking,
    out: str | Path,
    *,
    refusals: bool = False,
    loader: Load | None = None,
    batch: int | None = None,
    chunk: int | None = None,
    watch: Watch | None = None,
) -> list[Row]:
    """Measures every model under every method into the run folder `out`, and returns all its rows; of a
    measurement that was repeated, the last.

    Models are loaded one after another. Repeating the call continues where it stopped.

    Args:
        header: of the run: what is measured, without the methods.
        asking: what a model that is loaded is asked.
        refusals: record what a model or method refuses as rows of status "refused" with the reason, and measure the
            rest: a task's other lengths where the examples of some cannot be made, else the other tasks.

    Raises:
        ValueError: settings, texts or models that cannot be; a folder with another run.
        OSError: the disk is full.
    """
    watch, loader = watch or Watch(), loader or Load()
    chosen = [method(text) for text in methods]
    with Run.open(out, header | {"methods": [str(how) for how in chosen]}) as run:
        for model in models:
            # a call each, so that a model is gone before the next is loaded
            _sweep_model(loader(model), chosen, asking, run, refusals, batch, chunk, watch)
        return latest(run.rows)


def _sweep_model(
    lm: LM,
    methods: Sequence[Method],
    asking: Asking,
    run: Run,
    refusals: bool,
    batch: int | None,
    chunk: int | None,
    watch: Watch,
) -> None:
    asked = asking(lm, watch)
    run.add_model(lm.identity | asked.about)
    for one in asked.setups:
        run.refuse_other_version(one.task.name, one.task.version)
    for one in asked.setups:
        if one.notice:
            watch.notice(one.notice)
        if refusals:
            one, reasons = _possible(lm, one)
            for reason in dict.fromkeys(reasons.values()):
                at = [f"{length:,}" for length, why in reasons.items() if why == reason]
                watch.notice(f"{lm.name}, {one.what} at {', '.join(at)}: refused: {reason}")
            for how in methods:
                _refuse(run, lm, how, one, reasons)
        for how in methods if one.lengths else ():
            watch.start(f"{lm.name} {how} {one.what}", len(one.lengths) * one.repeats)
            try:
                measure(
                    one.task,
                    how,
                    lm,
                    run,
                    lengths=one.lengths,
                    repeats=one.repeats,
                    seed=one.seed,
                    batch=batch or one.batch,
                    chunk=chunk or one.chunk,
                    watch=watch,
                )
            except ValueError as error:
                if not refusals:
                    raise
                watch.notice(f"{lm.name} {how}, {one.what}: refused: {error}")
                _refuse(run, lm, how, one, dict.fromkeys(one.lengths, str(error)))
        show_first(one.task, lm, run, one.what, one.lengths, one.repeats, one.seed)


def _possible(lm: LM, one: Setup) -> tuple[Setup, dict[int, str]]:
    """Return the setup with the lengths that examples can be made for, and the reason for each of the others.

    Lengths are tried alone only if all together fail: one may be as short as the targets, or longer than the text.
    """
    reasons: dict[int, str] = {}

    def possible(lengths: tuple[int, ...]) -> bool:
        try:
            one.task.examples(lm, lengths, one.repeats, one.seed)
        except ValueError as error:
            reasons.update(dict.fromkeys(lengths, str(error)))
            return False
        return True

    if possible(one.lengths):
        return one, {}
    reasons.clear()
    rest = tuple(length for length in one.lengths if possible((length,)))
    return replace(one, lengths=rest if rest and possible(rest) else ()), reasons


def sweep_plans(
    models: Sequence[str | LM],
    methods: Sequence[str],
    asking: Asking,
    *,
    refusals: bool = False,
    loader: Load | None = None,
    batch: int | None = None,
    chunk: int | None = None,
) -> Iterator[tuple[str, str, str, Plan | str]]:
    """What `sweep` would cost, by model, method and what is asked; with refusals length by length, and where one is
    refused, why."""
    loader, chosen = loader or Load(), [method(text) for text in methods]
    for model in models:
        lm = loader(model)
        for one in asking(lm, Watch()).setups:
            parts = [one]
            if refusals:
                parts = [replace(one, lengths=(n,), what=f"{one.what} {n:,}") for n in one.lengths]
            for how, part in ((how, part) for how in chosen for part in parts):
                cost: Plan | str
                try:
                    cost = plan(
                        part.task,
                        how,
                        lm,
                        lengths=part.lengths,
                        repeats=part.repeats,
                        seed=part.seed,
                        batch=batch or part.batch,
                        chunk=chunk or part.chunk,
                    )
                except ValueError as error:
                    if not refusals:
                        raise
                    cost = str(error)
                yield lm.name, str(how), part.what, cost


def show_first(task: Task, lm: LM, run: Run, what: str, lengths: Sequence[int], repeats: int, seed: int) -> None:
    """Keeps the first example that was measured, at its shortest length that is not nothing, in words beside the
    rows."""
    if not isinstance(task, Shown) or run.has_example(lm.name, what):
        return
    mine = [row for row in run.rows if (row.model, row.settings, row.status) == (lm.name, task.settings, "ok")]
    if not mine:
        return
    examples = {example.id: example for example in task.examples(lm, lengths, repeats, seed)}
    if found := [row for row in mine if row.example in examples]:
        first = min(found, key=lambda row: (row.repeat, row.length == 0, row.length, row.depth))
        run.add_example({"model": lm.name, "what": what} | task.shown(lm, examples[first.example], first.length))


def _refuse(run: Run, lm: LM, how: Method, one: Setup, reasons: Mapping[int, str]) -> None:
    """Record the refused lengths, each once: one row of status "refused" in place of the rows of its examples."""
    known = {(row.key, row.reason) for row in run.rows if row.status == "refused"}
    for length, reason in reasons.items():
        row = _refused(lm, how, one, length, reason)
        if (row.key, row.reason) not in known:
            run.append(row)


def _refused(lm: LM, how: Method, one: Setup, length: int, reason: str) -> Row:
    """Stands for all examples of a length that could not be asked."""
    return Row(
        model=lm.name,
        method=str(how),
        task=one.task.name,
        version=one.task.version,
        settings=one.task.settings,
        length=length,
        repeat=0,
        seed=one.seed,
        example=f"{one.task.name} refused",  # Row.key tells two questions of one task apart by their settings
        status="refused",
        reason=reason,
    )
