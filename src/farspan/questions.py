"""Loops around `measure` for any question: several models, several methods, one task, one run."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from farspan.curves import DEFAULT_REPEATS
from farspan.lm import DEFAULT_TRAINED_LENGTH, LM, Load
from farspan.measure import Watch, measure
from farspan.methods import method
from farspan.plan import Plan, plan
from farspan.record import Row, Run, latest
from farspan.tasks import Example, Question, Task, task


@dataclass(frozen=True)
class QuestionSettings:
    """What a task is measured with; the same for every model and method of a run."""

    task: str  # as `farspan.tasks.task` parses it
    text: str = "builtin"  # for tasks that ask about a text
    lengths: tuple[int, ...] | None = None  # in the question's unit, ascending; None: the question's own
    repeats: int = DEFAULT_REPEATS  # examples
    seed: int = 0

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats = {self.repeats}; at least 1 is needed")


@runtime_checkable
class Shown(Protocol):
    """A task that can say an example in words, as `farspan.report.example` reads it."""

    def shown(self, lm: LM, example: Example, length: int) -> dict[str, Any]: ...


def measure_question(
    models: Sequence[str | LM],
    methods: Sequence[str],
    settings: QuestionSettings,
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
        ValueError: settings, data or models that cannot be; a folder with another run.
        OSError: the disk is full.
    """
    watch, loader = watch or Watch(), loader or Load()
    chosen = [method(text) for text in methods]
    question = task(settings.task)
    lengths = _lengths(question, settings, models, loader)
    header = {**asdict(settings), "task": str(question), "methods": [str(m) for m in chosen], "lengths": lengths}
    with Run.open(out, header) as run:
        for model in models:
            lm = loader(model)
            asked = question.on(lm, settings.text)
            run.add_model(lm.identity | {"asked": asked.settings})
            for how in chosen:
                watch.start(f"{lm.name} {how}", len(lengths) * settings.repeats)
                measure(
                    asked,
                    how,
                    lm,
                    run,
                    lengths=lengths,
                    repeats=settings.repeats,
                    seed=settings.seed,
                    batch=batch,
                    chunk=chunk,
                    watch=watch,
                )
            show_first(asked, lm, run, str(question), lengths, settings.repeats, settings.seed)
            del lm, asked  # gone before the next one is loaded
        return latest(run.rows)


def plan_question(
    models: Sequence[str | LM],
    methods: Sequence[str],
    settings: QuestionSettings,
    *,
    loader: Load | None = None,
    batch: int | None = None,
    chunk: int | None = None,
) -> Iterator[tuple[str, str, str, Plan]]:
    """What `measure_question` would cost, by model, method and task."""
    loader, question = loader or Load(), task(settings.task)
    lengths = _lengths(question, settings, models, loader)
    for model in models:
        lm = loader(model)
        asked = question.on(lm, settings.text)
        for text in methods:
            how = method(text)
            cost = plan(
                asked,
                how,
                lm,
                lengths=lengths,
                repeats=settings.repeats,
                seed=settings.seed,
                batch=batch,
                chunk=chunk,
            )
            yield lm.name, str(how), str(question), cost


def _lengths(
    question: Question, settings: QuestionSettings, models: Sequence[str | LM], loader: Load
) -> tuple[int, ...]:
    known = [loader.trained(model) for model in models]
    return settings.lengths or question.lengths([length or DEFAULT_TRAINED_LENGTH for length in known])


def show_first(asked: Task, lm: LM, run: Run, what: str, lengths: Sequence[int], repeats: int, seed: int) -> None:
    """Keeps the first example, at the shortest length that is not nothing, in words beside the rows."""
    if not isinstance(asked, Shown):
        return
    measured = {row.example for row in run.rows if row.model == lm.name and row.status == "ok"}
    examples = [one for one in asked.examples(lm, lengths, repeats, seed) if one.id in measured]
    if examples:
        length = next((length for length in lengths if length), lengths[0])
        run.add_example({"model": lm.name, "what": what} | asked.shown(lm, examples[0], length))
