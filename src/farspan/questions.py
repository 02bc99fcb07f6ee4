"""One task of any kind: several models, several methods, one run."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Unpack

from farspan.lm import DEFAULT_TRAINED_LENGTH, LM
from farspan.measure import Watch
from farspan.plan import Plan
from farspan.record import Row
from farspan.sweep import DEFAULT_REPEATS, Asked, Options, PlanOptions, Setup, sweep, sweep_plans, trained_lengths
from farspan.tasks import task


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

    def asking(self, lm: LM, watch: Watch) -> Asked:
        """What `sweep` asks one model. Of settings with lengths."""
        assert self.lengths is not None
        asked = task(self.task).on(lm, self.text)
        return Asked([Setup(asked, self.task, self.lengths, self.repeats, self.seed)], {"asked": asked.settings})


def measure_question(
    models: Sequence[str | LM],
    methods: Sequence[str],
    settings: QuestionSettings,
    out: str | Path,
    **options: Unpack[Options],
) -> list[Row]:
    """Measures every model under every method into the run folder `out`, as `farspan.sweep.sweep` says."""
    settings = _resolved(settings, models, options)
    return sweep(models, methods, asdict(settings), settings.asking, out, **options)


def plan_question(
    models: Sequence[str | LM], methods: Sequence[str], settings: QuestionSettings, **options: Unpack[PlanOptions]
) -> Iterator[tuple[str, str, str, Plan | str]]:
    """What `measure_question` would cost, by model, method and task."""
    return sweep_plans(models, methods, _resolved(settings, models, options).asking, **options)


def _resolved(settings: QuestionSettings, models: Sequence[str | LM], options: PlanOptions) -> QuestionSettings:
    question = task(settings.task)
    trained = [length or DEFAULT_TRAINED_LENGTH for length in trained_lengths(models, options)]
    return replace(settings, task=str(question), lengths=settings.lengths or question.lengths(trained))
