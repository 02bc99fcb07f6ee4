"""Models × methods × tasks × lengths on the same tokens, and what each costs: one run, one table."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from farspan.lengths import check_lengths
from farspan.lm import DEFAULT_TRAINED_LENGTH, LM, Load
from farspan.measure import Watch, measure
from farspan.methods import Method, method
from farspan.plan import Plan, plan
from farspan.questions import show_first
from farspan.record import Row, Run, latest
from farspan.tasks import Question, Task, task
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


@dataclass(frozen=True)
class _Part:
    """One task of a comparison with its lengths, or its cost."""

    question: Question | None  # None: cost
    lengths: tuple[int, ...]
    repeats: int

    def on(self, lm: LM, text: str) -> Task:
        return Cost() if self.question is None else self.question.on(lm, text)


def compare(
    models: Sequence[str | LM],
    methods: Sequence[str],
    settings: CompareSettings,
    out: str | Path,
    *,
    loader: Load | None = None,
    batch: int | None = None,
    chunk: int | None = None,
    watch: Watch | None = None,
) -> list[Row]:
    """Measures every task on every model under every method into the run folder `out`, and returns all its rows; of a
    measurement that was repeated, the last.

    Every cell is asked for the same tokens. What is recorded already is not measured again. A model or method that
    refuses leaves rows that say why, of status "refused", and the others go on.

    Raises:
        ValueError: settings or models that cannot be; a folder with another run.
        OSError: the disk is full.
    """
    watch, loader = watch or Watch(), loader or Load()
    chosen, questions = [method(text) for text in methods], [task(text) for text in settings.tasks]
    parts = _parts(questions, settings, [loader.trained(model) or DEFAULT_TRAINED_LENGTH for model in models])
    asked = {str(one): {"quality": asdict(one.quality), "unit": one.unit} for one in questions}
    header = {"task": "compare", "methods": [str(m) for m in chosen], "questions": asked, **asdict(settings)}
    with Run.open(out, header) as run:
        for model in models:
            # a call each, so that a model is gone before the next is loaded
            _compare_model(model, chosen, parts, settings, run, loader, batch, chunk, watch)
        return latest(run.rows)


def _compare_model(
    model: str | LM,
    methods: Sequence[Method],
    parts: Sequence[_Part],
    settings: CompareSettings,
    run: Run,
    loader: Load,
    batch: int | None,
    chunk: int | None,
    watch: Watch,
) -> None:
    lm = loader(model)
    tasks = [part.on(lm, settings.text) for part in parts]
    asked = {str(part.question): one.settings for part, one in zip(parts, tasks, strict=True) if part.question}
    run.add_model(lm.identity | {"questions": asked})
    for part, one in zip(parts, tasks, strict=True):
        for how in methods:
            watch.start(f"{lm.name} {how} {part.question or one.name}", len(part.lengths) * part.repeats)
            try:
                measure(
                    one,
                    how,
                    lm,
                    run,
                    lengths=part.lengths,
                    repeats=part.repeats,
                    seed=settings.seed,
                    batch=batch if part.question else 1,
                    chunk=chunk,
                    watch=watch,
                )
            except ValueError as error:
                watch.notice(f"{lm.name} {how}: {error}")
                for length in part.lengths:
                    run.append(_refused(lm, how, one, length, settings.seed, str(error)))
        if any(row.model == lm.name and row.settings == one.settings and row.status == "ok" for row in run.rows):
            show_first(one, lm, run, str(part.question), part.lengths, part.repeats, settings.seed)


def plan_compare(
    models: Sequence[str | LM],
    methods: Sequence[str],
    settings: CompareSettings,
    *,
    loader: Load | None = None,
    batch: int | None = None,
    chunk: int | None = None,
) -> Iterator[tuple[str, str, str, Plan | str]]:
    """What each cell of `compare` would cost, by model, method, and task and length; or why it is refused."""
    loader = loader or Load()
    chosen, questions = [method(text) for text in methods], [task(text) for text in settings.tasks]
    parts = _parts(questions, settings, [loader.trained(model) or DEFAULT_TRAINED_LENGTH for model in models])
    for model in models:
        lm = loader(model)
        for part in parts:
            one = part.on(lm, settings.text)
            for how in chosen:
                for length in part.lengths:
                    cost: Plan | str
                    try:
                        cost = plan(
                            one,
                            how,
                            lm,
                            lengths=(length,),
                            repeats=part.repeats,
                            seed=settings.seed,
                            batch=batch if part.question else 1,
                            chunk=chunk,
                        )
                    except ValueError as error:
                        cost = str(error)
                    yield lm.name, str(how), f"{part.question or one.name} {length:,}", cost


def _parts(questions: Sequence[Question], settings: CompareSettings, trained: Sequence[int]) -> list[_Part]:
    parts = [_Part(one, settings.lengths or one.lengths(trained), settings.repeats) for one in questions]
    if settings.cost:
        # the contexts that the tasks ask for, where they count tokens
        lengths = {
            length for part in parts for length in part.lengths if part.question and part.question.unit == "tokens"
        }
        parts.append(_Part(None, tuple(sorted(lengths)) or PerplexityQuestion().lengths(trained), COST_REPEATS))
    return parts


def _refused(lm: LM, how: Method, one: Task, length: int, seed: int, reason: str) -> Row:
    """Stands for all examples of a length that could not be asked."""
    return Row(
        model=lm.name,
        method=str(how),
        task=one.name,
        version=one.version,
        settings=one.settings,
        length=length,
        repeat=0,
        seed=seed,
        example=f"{one.name} refused",
        status="refused",
        reason=reason,
    )
