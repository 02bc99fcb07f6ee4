"""Measure one run with several processes, shards, on one machine or over a shared file system.

Each shard computes the same dealing of the run's work from its arguments (`farspan.measuring.dealing`), measures its
part, and writes rows to a file of its own. Shards do not communicate and can start and end at different times.
"""

import operator
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from farspan.lm import LM
from farspan.measuring.dealing import LONG, CellCost, Dealing, Unit, deal
from farspan.measuring.loader import Load
from farspan.measuring.loop import Mine, Watch, within_positions
from farspan.measuring.operations import Operations
from farspan.measuring.setups import Grid, Setup, possible_lengths
from farspan.methods import Method
from farspan.reader import Reader
from farspan.record import DEFAULT_REPEATS, Row, Shard, by_key
from farspan.tasks import Bound, Example

MOST = 100_000  # shards
RowKey = tuple[str, str, str, str, int, float]  # `Row.key`: model, method, task with settings, example, length, depth


def parse_shard(text: str) -> Shard:
    """Return the shard written as I/N, such as 2/8.

    Raises:
        ValueError: not two numbers, or not 1 <= I <= N.
    """
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII)
    return _checked(int(found[1]), int(found[2]), text) if found else _checked(0, 0, text)


def chosen_shard(given: Shard | str | None) -> Shard | None:
    """Return the shard to measure: the given one, else the Slurm array task's; None: the whole run.

    Raises:
        ValueError: not a shard, or variables of Slurm that do not number the array's tasks.
    """
    if isinstance(given, str):
        shard = parse_shard(given)
    elif given is not None:
        try:
            number, count = map(operator.index, given)
        except (TypeError, ValueError):
            number = count = 0
        shard = _checked(number, count, f"{number}/{count}" if count else str(given))
    elif {"SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"} <= os.environ.keys():
        shard = _slurm_shard(os.environ)
    else:
        return None
    return None if shard[1] == 1 else shard


def _checked(number: int, count: int, text: str) -> Shard:
    if not 1 <= number <= count <= MOST:
        raise ValueError(
            f"shard: got {text!r}, expected I/N with 1 <= I <= N <= {MOST:,}, such as 2/8 for the second of 8 (--shard)"
        )
    return number, count


def _slurm_shard(variables: Mapping[str, str]) -> Shard:
    names = ("ID", "COUNT", "MIN", "STEP")
    given = {name: variables[f"SLURM_ARRAY_TASK_{name}"] for name in names if f"SLURM_ARRAY_TASK_{name}" in variables}
    text = ", ".join(f"SLURM_ARRAY_TASK_{name}={value}" for name, value in given.items())
    if all(re.fullmatch(r"\d{1,9}", value, re.ASCII) for value in given.values()):
        task, count, least, step = (int(given.get(name, default)) for name, default in zip(names, "0001", strict=True))
        number, rest = divmod(task - least, max(1, step))
        if not rest and 0 <= number < count <= MOST:
            return number + 1, count
    raise ValueError(
        f"{text} do not number the tasks of an array from the first on: give --shard I/N, or --shard 1/1 to measure "
        "everything in this process"
    )


@dataclass(frozen=True, eq=False)
class Content:
    """The content of a cell: its cost and its rows."""

    cell: CellCost
    measurement: str  # its task with settings
    places: Sequence[Sequence[tuple[str, tuple[int, ...], tuple[float, ...]]]]  # the examples of each repeat

    def rows(self, unit: Unit) -> set[RowKey]:
        """Return the keys of the rows of a unit."""
        model, method, _ = self.cell.name
        wanted = set(self.cell.lengths[slice(*unit.lengths)])
        return {
            (model, method, self.measurement, example, length, depth)
            for examples in self.places[slice(*unit.repeats)]
            for example, lengths, depths in examples
            for length in lengths
            if length in wanted
            for depth in depths
        }


@dataclass(frozen=True, eq=False)
class KnownRows:
    """The rows that a run has."""

    found: set[RowKey]
    refused: set[tuple[str, str, str, int]]  # model, method, task with settings, and length

    @classmethod
    def of(cls, rows: Iterable[Row]) -> "KnownRows":
        """Return the keys of these rows."""
        found, refused = set[RowKey](), set[tuple[str, str, str, int]]()
        for row in rows:
            found.add(row.key)
            if row.status == "refused":
                refused.add((row.model, row.method, row.measurement, row.length))
        return cls(found, refused)


@dataclass(frozen=True, eq=False)
class Sharding:
    """The part of a run that one shard measures."""

    shard: Shard
    models: Sequence[str]  # names, in the order of the command
    contents: Sequence[Content]
    units: Sequence[Unit] | None = None  # None: those that the dealing gives to the shard

    @cached_property
    def dealing(self) -> Dealing:
        return deal([one.cell for one in self.contents], self.shard[1])

    @cached_property
    def _units(self) -> dict[tuple[str, str, str], list[Unit]]:
        """The units of this shard by model, method and task."""
        units = self.dealing.owned(self.shard[0] - 1) if self.units is None else self.units
        return by_key((self.contents[unit.cell].cell.name, unit) for unit in units)

    def only(self, unit: Unit) -> "Sharding":
        """Return a part that consists of one unit, small enough to be sent to another machine."""
        content = replace(self.contents[unit.cell], places=())
        return Sharding(self.shard, self.models, [content], [replace(unit, cell=0)])

    def measured(self, models: Sequence[str | LM]) -> list[str | LM]:
        """Return the command's models on which this shard measures anything."""
        names = {name for name, _, _ in self._units}
        return [model for model, name in zip(models, self.models, strict=True) if name in names]

    def methods(self, lm: LM, methods: Sequence[Method], one: Setup) -> list[Method]:
        """Return the methods under which this shard measures any part of a task on a model."""
        return [how for how in methods if (lm.name, str(how), one.what) in self._units]

    def mine(self, model: str, method: str, task: str) -> Mine:
        """Return a function that returns whether this shard measures a repeat at a length of a cell of its own."""
        units = self._units[model, method, task]
        lengths = self.contents[units[0].cell].cell.lengths
        parts = [(range(*unit.repeats), set(lengths[slice(*unit.lengths)])) for unit in units]
        return lambda repeat, length: any(repeat in repeats and length in chosen for repeats, chosen in parts)

    def __str__(self) -> str:
        dealing, (number, count) = self.dealing, self.shard
        total, units = sum(dealing.loads), sum(map(len, self._units.values()))
        share = dealing.loads[number - 1] / total if total else 0.0
        line = f"shard {number}/{count}: {units} of {len(dealing.units)} units of work, {share:.1%} of the operations"
        if len(dealing.units) < count:
            line += f"; {count - len(dealing.units)} of {count} shards have nothing to measure"
        elif total:
            line += f"; the longest shard has {dealing.imbalance:.0%} more than the mean"
        if not all(one.cell.divisible for one in self.contents):
            line += ". A curve with --lengths auto is not divided: its lengths depend on the rows before. Give lengths"
        return line

    def lacking(self, unit: Unit, known: KnownRows) -> set[RowKey]:
        """Return the rows of a unit that are neither in the run nor refused."""
        return {
            (model, method, measurement, example, length, depth)
            for model, method, measurement, example, length, depth in self.contents[unit.cell].rows(unit) - known.found
            if (model, method, measurement, length) not in known.refused
        }

    def missing(self, rows: Sequence[Row], sessions: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return the work that a run lacks, by shard, such as {"2/8": "40 rows"}.

        Args:
            rows: all of the run.
            sessions: as run.json lists them. A curve with --lengths auto is complete when its shard has ended.
        """
        known = KnownRows.of(rows)
        count = self.shard[1]
        ended = {tuple(one["shard"]): "ended" in one for one in sessions if one.get("shard")}  # last session of each
        left, curves = Counter[int](), Counter[int]()
        for unit, owner in zip(self.dealing.units, self.dealing.owners, strict=True):
            if self.contents[unit.cell].cell.divisible:
                left[owner] += len(self.lacking(unit, known))
            else:
                curves[owner] += not ended.get((owner + 1, count), False)
        lines = {}
        for owner in sorted(left.keys() | curves.keys()):
            parts = [f"{left[owner]:,} rows"] * bool(left[owner])
            parts += [f"{curves[owner]:,} curves with --lengths auto"] * bool(curves[owner])
            if parts:
                lines[f"{owner + 1}/{count}"] = " and ".join(parts)
        return lines


def sharding(models: Sequence[str | LM], methods: Sequence[Method], what: Grid, shard: Shard, loader: Load) -> Sharding:
    """Return the part of a shard. Models are loaded without weights, one after another.

    Raises:
        ValueError: texts or models that cannot be used; lengths or methods that are refused, unless `what.compared`.
    """
    names, contents = list[str](), dict[tuple[str, str, str], Content]()
    for model in models:
        lm = loader(model, weights=False)
        names.append(lm.name)
        for one in what.setups(lm, Watch()):
            for content in _contents(lm, methods, one, what):
                contents.setdefault(content.cell.name, content)  # a model may be given twice
    return Sharding(shard, names, list(contents.values()))


def _contents(lm: LM, methods: Sequence[Method], one: Setup, what: Grid) -> list[Content]:
    """Return the contents of one task on one model under each method."""
    adaptive = one.lengths is None
    if adaptive:
        one = one.first_round
    elif what.compared:
        one, _ = possible_lengths(lm, one, what.seed)
    lengths, repeats = one.lengths or (), one.repeats or DEFAULT_REPEATS
    examples = one.examples(lm, what.seed)
    by_repeat = [[example for example in examples if example.repeat == repeat] for repeat in range(repeats)]
    places = [[(example.id, example.lengths, example.depths) for example in some] for some in by_repeat]
    fitting = [within_positions(one.bound, lm, some) for some in by_repeat]
    contents = []
    for how in methods:
        name, measurement = (lm.name, str(how), one.what), one.bound.measurement
        try:
            with how.on(lm) as reader:
                costs = _costs(reader, one.bound, fitting, lengths)
        except ValueError:
            if not what.compared:
                raise
            costs = (0.0,) * repeats, (), ()  # the shard that measures this cell records the refusal
        contents.append(
            Content(CellCost(name, costs[0], lengths, *costs[1:], divisible=not adaptive), measurement, places)
        )
    return contents


def _costs(
    reader: Reader, bound: Bound[Any], examples: Sequence[Sequence[Example[Any]]], lengths: Sequence[int]
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Return the operations of each repeat, and of the first repeat at each length alone and up to each length."""
    flops = Operations(reader, bound)
    repeats = tuple(sum(flops(example, lengths) for example in some) for some in examples)
    if not lengths or lengths[-1] <= LONG:
        return repeats, (), ()  # never cut into bands
    alone = tuple(sum(flops(example, (length,)) for example in examples[0]) for length in lengths)
    up_to = tuple(sum(flops(example, lengths[: at + 1]) for example in examples[0]) for at in range(len(lengths)))
    return repeats, alone, up_to
