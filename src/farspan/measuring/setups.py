"""The tasks, lengths and repeats of a run, bound to each model."""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from farspan.files import expanded
from farspan.lengths import check_lengths
from farspan.lm import DEFAULT_TRAINED_LENGTH, LM
from farspan.measuring.adaptive import prepared, round_one
from farspan.measuring.arguments import Lengths, Tasks, lengths_of, tasks_of, whole
from farspan.measuring.loader import Load
from farspan.measuring.loop import Watch
from farspan.methods import Method
from farspan.record import DEFAULT_REPEATS, LARGEST, default_folder
from farspan.tasks import Bound, Example, Task
from farspan.tasks.cost import BoundCost
from farspan.tasks.curve import BoundCurve, Curve
from farspan.tasks.perplexity import Perplexity
from farspan.text.documents import Text, named
from farspan.text.names import described

COST_REPEATS = 3  # of which a table takes the median


@dataclass(frozen=True)
class Setup:
    """One task, as it is measured on one model."""

    bound: Bound[Any]
    what: str  # its name in plans, notices and with its first example
    lengths: tuple[int, ...] | None  # in the task's unit; None: adaptive
    repeats: int | None
    longest: int = 0  # tokens, of adaptive lengths
    # lengths of all models of the run, which texts are sampled for; None: given, adaptive, or without effect on texts
    sampled: tuple[int, ...] | None = None
    batch: int | None = None  # as of `Grid`
    chunk: int | None = None
    beside: bool = False  # costs that are measured in addition to the tasks

    def sizes(self, lm: LM) -> dict[str, Any]:
        """Return the repeats that are read together, and the tokens of one forward; None: what fits."""
        longest = self.lengths[-1] if self.lengths else self.longest
        return {"batch": self.batch or self.bound.batch(longest), "chunk": self.chunk or self.bound.chunk(lm, longest)}

    def examples(self, lm: LM, seed: int) -> list[Example[Any]]:
        """Return the examples at its lengths."""
        if not self.lengths:
            return []
        return self.bound.examples_at(lm, self.lengths, self.repeats or DEFAULT_REPEATS, seed, self.sampled)

    @property
    def curve(self) -> BoundCurve | None:
        """The curve whose lengths are adaptive; None: lengths are given."""
        return self.bound if self.lengths is None and isinstance(self.bound, BoundCurve) else None

    @property
    def sampled_to(self) -> tuple[int, ...]:
        """The lengths that texts are sampled for, or the tokens sampled for adaptive lengths; (): lengths are given."""
        return self.sampled or () if self.curve is None else (self.curve.window or self.longest,)

    @property
    def first_round(self) -> "Setup":
        """Itself, with the lengths and repeats of the first round where they are adaptive."""
        if self.curve is None:
            return self
        lengths, repeats = round_one(self.curve, self.longest, self.repeats)
        return replace(self, lengths=lengths, repeats=repeats)


@dataclass(frozen=True)
class Grid:
    """The tasks, lengths and repeats of a run, the same for all its models and methods."""

    tasks: tuple[Task, ...]
    text: str
    lengths: tuple[int, ...] | Literal["auto"] | None
    repeats: int | None
    seed: int
    cost: bool
    compared: bool  # lines are compared with the first; refusals are recorded
    trained: tuple[int, ...]  # tokens, of each model
    limits: tuple[int | None, ...] = ()  # tokens that each of several models can read; (): one model, or given lengths
    batch: int | None = None  # repeats that are read together; None: what fits. Not recorded, as `chunk`
    chunk: int | None = None  # tokens of one forward

    @property
    def adaptive(self) -> bool:
        """Whether lengths are chosen while measuring."""
        return self.lengths == "auto" and any(isinstance(one, Curve) and one.protocol != "paper" for one in self.tasks)

    @property
    def header(self) -> dict[str, Any]:
        """Its record for run.json."""
        tasks: dict[str, dict[str, Any]] = {
            str(one): {"task": one.row_task, "unit": one.unit, "quality": asdict(one.quality), "details": one.details}
            | {"same_at_depths": one.same_at_depths}
            for one in self.tasks
        }
        same = {"text": self.text, "lengths": self.lengths, "repeats": self.repeats, "seed": self.seed}
        if self.lengths == "auto" and self._largest is not None:  # which decides the texts: see `_setup`
            same[LARGEST] = self._largest
        return {"tasks": tasks, **same, "cost": self.cost, "compared": self.compared}

    def run(
        self, models: Sequence[str | LM], methods: Sequence[Method], out: str | Path | None
    ) -> tuple[Path, dict[str, Any]]:
        """Return the folder of the run, and the settings in its run.json.

        Args:
            out: the folder; default: one under runs/, the same for the same arguments.

        Raises:
            ValueError: the same method twice.
        """
        names = [str(how) for how in methods]
        _refuse_repeats("method", names, " (--method)")
        files = hashes_of(methods)
        settings = self.header | {"methods": names} | ({"files": files} if files else {})
        if out is not None:
            return expanded(out), settings
        command = self.tasks[0].name if len(self.tasks) == 1 and not self.cost else "compare"
        return default_folder(command, _names(models), settings), settings

    def fitted(self, methods: Sequence[Method]) -> list[Method]:
        """Return the methods with default windows chosen for the smallest trained length of the run."""
        return [how.fitted(min(self.trained)) for how in methods]

    def setups(self, lm: LM, watch: Watch) -> list[Setup]:
        """Bind the tasks to one model.

        Raises:
            ValueError: a text that cannot be read, or tasks whose rows cannot be distinguished.
        """
        setups = [self._setup(one, lm, watch) for one in self.tasks]
        for a, b in combinations(setups, 2):
            if a.bound.measurement == b.bound.measurement:
                raise ValueError(
                    f"{a.what} and {b.what} measure the same rows of the task {a.bound.task}: measure them in two runs"
                )
        costs = [one.what for one in setups if one.bound.task == BoundCost.task]
        if len(costs) > 1:
            raise ValueError(f"{' and '.join(costs)} would share one table of costs: measure them in two runs")
        if self.cost and not costs and lm.own_reader() is None:  # rows of a served model count its requests and tokens
            # the contexts of the tasks that count tokens
            contexts = {n for one, task in zip(setups, self.tasks, strict=True) if task.unit == "tokens"
                        for n in one.lengths or ()}  # fmt: skip
            lengths = tuple(sorted(contexts)) or Perplexity().lengths(self.trained)
            lengths = self._with_room(BoundCost(), lm, lengths)
            setups.append(Setup(BoundCost(), BoundCost.task, lengths, COST_REPEATS, beside=True))
        return [replace(one, batch=self.batch, chunk=self.chunk) for one in setups]

    @property
    def _largest(self) -> int | None:
        """The largest trained length of models whose trained lengths differ."""
        return max(self.trained) if len(set(self.trained)) > 1 else None

    def _setup(self, one: Task, lm: LM, watch: Watch) -> Setup:
        bound = one.on(lm, self.text)
        if isinstance(bound, BoundCurve) and bound.adaptive and self.lengths == "auto":
            longest = bound.longest(lm, 2)
            bound, possible = prepared(bound, longest, self.repeats, self._window(bound, lm))
            if possible < longest:
                watch.notice(f"the text is too short for lengths of {longest:,}: they end at {possible:,} tokens")
            return Setup(bound, str(one), None, self.repeats, possible)
        repeats = self.repeats or DEFAULT_REPEATS
        if isinstance(self.lengths, tuple):
            return Setup(bound, str(one), self.lengths, repeats)
        auto = bound.auto_lengths(lm, repeats) if self.lengths == "auto" else None
        lengths = auto or self._default_lengths(one, bound, lm)
        if not lengths:  # the rows state that no length fits
            lengths = one.lengths(self.trained)
        elif not auto and lengths != one.lengths(self.trained):
            most = f"{lm.name} takes at most {lm.position_limit:,} tokens"
            watch.notice(f"{most}: the default lengths of {one} end at {lengths[-1]:,}")
        return Setup(bound, str(one), lengths, repeats, sampled=self._sampled(one, bound, lm, lengths, repeats))

    def _sampled(
        self, one: Task, bound: Bound[Any], lm: LM, lengths: tuple[int, ...], repeats: int
    ) -> tuple[int, ...] | None:
        """Return the lengths of all models of the run, for which texts are sampled, so that all of them read the same;
        None if the texts of a task do not depend on its lengths."""
        if not bound.texts or (isinstance(bound, BoundCurve) and not bound.samples_windows):
            return None
        found = set(lengths)
        for other in self._others(lm):
            with suppress(ValueError):  # positions too few for the targets: an error of that model
                auto = bound.auto_lengths(other, repeats, quiet=True) if self.lengths == "auto" else None
                found.update(auto or self._default_lengths(one, bound, other))
        return tuple(sorted(found))

    def _window(self, bound: BoundCurve, lm: LM) -> int:
        """Return the tokens that are sampled for each repeat of an adaptive curve, the same for all models."""
        if self._largest is not None:
            return bound.largest_length(lm, 2 * self._largest)
        return max(bound.longest(one, 2) for one in (lm, *self._others(lm)))

    def _others(self, lm: LM) -> list[LM]:
        """Return the model with the context of each model of a run: its trained length and its positions."""
        contexts = dict.fromkeys(zip(self.trained, self.limits, strict=True)) if self.limits else {}
        return [replace(lm, trained_length=trained, position_limit=limit) for trained, limit in contexts]

    def _default_lengths(self, one: Task, bound: Bound[Any], lm: LM) -> tuple[int, ...]:
        """Return the default lengths that fit the model's positions."""
        lengths, limit = one.lengths(self.trained), lm.position_limit
        if one.unit != "tokens" or limit is None:
            return lengths
        longest = bound.largest_length(lm, limit) if isinstance(bound, BoundCurve) else limit
        return self._with_room(bound, lm, tuple(n for n in lengths if n <= longest))

    def _with_room(self, bound: Bound[Any], lm: LM, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Return lengths in tokens, a longest one within the model's positions shortened so that what follows the text,
        such as a question and its answer, fits as well. Models with different positions keep the same lengths."""
        limit = lm.position_limit
        if limit is None or not lengths or lengths[-1] > limit or len(set(self.limits)) > 1:
            return lengths
        *shorter, longest = lengths
        with suppress(ValueError):  # a text too short is refused later
            while longest > max(shorter, default=0):
                examples = bound.examples(lm, (*shorter, longest), self.repeats or DEFAULT_REPEATS, self.seed)
                beyond = max(bound.num_tokens(lm, one, longest) for one in examples) - limit
                if beyond <= 0:
                    return (*shorter, longest)
                longest -= beyond  # the examples of another length can end otherwise
        return lengths


def grid(
    models: Sequence[str | LM],
    tasks: Tasks,
    *,
    text: Text = "builtin",
    lengths: Lengths = None,
    repeats: int | None = None,
    seed: int = 0,
    cost: bool = False,
    refusals: bool = False,
    batch: int | None = None,
    chunk: int | None = None,
    loader: Load | None = None,
) -> Grid:
    """Return the grid of `measure` with these arguments and all defaults resolved.

    Raises:
        ValueError: unknown tasks, the same model or task twice, a text that no task reads, or another argument that is
            impossible.
    """
    loader = loader or Load()
    sizes = (("repeats", repeats), ("batch", batch), ("chunk", chunk))
    repeats, batch, chunk = (None if one is None else whole(one, name, least=1) for name, one in sizes)
    seed = whole(seed, "seed", least=0)
    for name, value in (("cost", cost), ("refusals", refusals)):
        if not isinstance(value, bool):
            raise ValueError(f"{name}: got {value!r}, expected True or False")
    chosen = tasks_of(tasks)
    wanted = lengths_of(lengths)
    given = wanted if isinstance(wanted, tuple) else None
    for one in chosen:
        if given is not None:
            # a length of 0 passages or demonstrations is the control of the tasks that count them
            control = one.unit != "tokens" and given[:1] == (0,)
            if not control or given[1:]:
                check_lengths(given[1:] if control else given)
    _refuse_repeats("model", _names(models))
    trained = tuple(loader.trained(model) or DEFAULT_TRAINED_LENGTH for model in models)
    resolved = tuple(one.resolved(given, trained) for one in chosen)
    for one in resolved:
        if given is not None and not refusals:
            one.check(given)
    name = named(text)
    if name != "builtin" and not any(one.reads_text for one in resolved):
        raise ValueError(
            f"{described(name)} has no effect: got {', '.join(map(str, resolved))}, which read only texts or data of "
            "their own. Leave it out (--text)"
        )
    _refuse_repeats("task", list(map(str, resolved)), " (--task)")
    several = given is None and len(models) > 1 and any(one.unit == "tokens" for one in resolved)
    limits = tuple(map(loader.limit, models)) if several else ()
    return Grid(resolved, name, wanted, repeats, seed, cost, refusals, trained, limits, batch, chunk)


def _names(models: Sequence[str | LM]) -> list[str]:
    return [one if isinstance(one, str) else one.name for one in models]


def _refuse_repeats(noun: str, names: Sequence[str], option: str = "") -> None:
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f"{noun} {twice[0]} is given twice: name each once{option}")


def hashes_of(methods: Sequence[Method]) -> dict[str, dict[str, str]]:
    """Return the hash of each file that methods read, by method; methods that read none are left out."""
    read = {
        str(how): {
            str(file): hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in how.files if file.is_file()
        }
        for how in methods
    }
    return {name: hashes for name, hashes in read.items() if hashes}


def possible_lengths(lm: LM, one: Setup, seed: int) -> tuple[Setup, dict[int, str]]:
    """Return the setup with the lengths for which examples can be made, and why the other lengths fail.

    Lengths are tried one by one only if all together fail: one may be too short for the targets or too long.
    """
    reasons: dict[int, str] = {}

    def made(lengths: tuple[int, ...]) -> bool:
        try:
            one.bound.examples(lm, lengths, one.repeats or DEFAULT_REPEATS, seed)
        except ValueError as error:
            reasons.update(dict.fromkeys(lengths, str(error)))
            return False
        return True

    if one.lengths is None or made(every := one.sampled or one.lengths):
        return one, {}
    reasons.clear()
    rest = tuple(length for length in every if made((length,)))
    rest = rest if rest and made(rest) else ()
    own = {length: reason for length, reason in reasons.items() if length in one.lengths}
    return replace(one, lengths=tuple(n for n in one.lengths if n in rest), sampled=rest), own
