"""Models × methods × tasks × lengths on the same tokens, and what each costs: one run, one table."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Unpack

from farspan.lengths import check_lengths
from farspan.lm import DEFAULT_TRAINED_LENGTH, LM
from farspan.measure import Watch
from farspan.plan import Plan
from farspan.record import Row
from farspan.sweep import Asked, Asking, Options, PlanOptions, Setup, sweep, sweep_plans, trained_lengths
from farspan.tasks import task
from farspan.tasks.cost import Cost
from farspan.tasks.perplexity import PerplexityQuestion

COST_REPEATS = 3  # of which a table takes the median


@dataclass(frozen=True)
class CompareSettings:
    """What models and methods are compared by; the same for all of them."""

    tasks: tuple[str, ...] = ("perplexity",)  # as `farspan.tasks.task` parses them
    text: str = "builtin"
    lengths: tuple[int, ...] | None = None  # of every task; None: each task's own
    repeats: int = 10
    seed: int = 0
    cost: bool = True  # seconds and bytes, measured apart from the tasks

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats = {self.repeats}; at least 1 is needed")
        if self.lengths is not None:
            check_lengths(self.lengths)


def compare(
    models: Sequence[str | LM],
    methods: Sequence[str],
    settings: CompareSettings,
    out: str | Path,
    **options: Unpack[Options],
) -> list[Row]:
    """Measures every task on every model under every method into the run folder `out`, as `farspan.sweep.sweep` says.

    Every cell is asked for the same tokens. A model or method that refuses leaves rows of status "refused".
    """
    asked = {str(one): {"quality": asdict(one.quality), "unit": one.unit} for one in map(task, settings.tasks)}
    header = {"task": "compare", "questions": asked, **asdict(settings)}
    return sweep(models, methods, header, _asking(settings, models, options), out, refusals=True, **options)


def plan_compare(
    models: Sequence[str | LM], methods: Sequence[str], settings: CompareSettings, **options: Unpack[PlanOptions]
) -> Iterator[tuple[str, str, str, Plan | str]]:
    """What each cell of `compare` would cost, by model, method, and task and length; or why it is refused."""
    return sweep_plans(models, methods, _asking(settings, models, options), refusals=True, **options)


def _asking(settings: CompareSettings, models: Sequence[str | LM], options: PlanOptions) -> Asking:
    questions = [task(text) for text in settings.tasks]
    trained = [length or DEFAULT_TRAINED_LENGTH for length in trained_lengths(models, options)]
    lengths = [settings.lengths or one.lengths(trained) for one in questions]
    # the contexts that the tasks ask for, where they count tokens
    contexts = {n for one, mine in zip(questions, lengths, strict=True) if one.unit == "tokens" for n in mine}
    read = tuple(sorted(contexts)) or PerplexityQuestion().lengths(trained)

    def asking(lm: LM, watch: Watch) -> Asked:
        setups = [
            Setup(one.on(lm, settings.text), str(one), mine, settings.repeats, settings.seed)
            for one, mine in zip(questions, lengths, strict=True)
        ]
        about = {"questions": {one.what: one.task.settings for one in setups}}
        if settings.cost:
            setups.append(Setup(Cost(), Cost.name, read, COST_REPEATS, settings.seed, batch=1))
        return Asked(setups, about)

    return asking
