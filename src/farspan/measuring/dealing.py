"""Deal the work of a run to shards: processes that measure it together without talking to each other.

A cell is one task on one model under one method. It is dealt whole where that balances the shards. Otherwise its
repeats are cut into groups, down to single ones, and then a repeat into at most four bands of lengths above 32,768
tokens. Groups lose nothing, since every repeat reads a text of its own. A band reads the text before it again, so bands
are used only if they shorten the longest shard, and never cost more than twice a repeat in one piece.

Units are dealt longest first to the least loaded shard: R. L. Graham, "Bounds on multiprocessing timing anomalies",
SIAM J. Appl. Math. 17 (1969). All of it is a function of the cells and the number of shards alone, so that every shard
computes the same dealing.
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

BALANCED = 1.05  # the longest shard over the mean of the work in one piece; no smaller units are tried below that
WORTH = 0.98  # of the longest shard: smaller units must bring it below that
SMALLER = 0.9  # the largest unit of one try over that of the try before
TRIES = 40
LONG = 32_768  # length from which on a repeat may be cut
BANDS = 4
LARGER = 1.05  # a largest band that cannot be had, over the one tried before
REREAD = 2.0  # cost of a repeat in bands, at most, over its cost in one piece


@dataclass(frozen=True, eq=False)
class CellCost:
    """The cost of one task on one model under one method, in floating-point operations."""

    name: tuple[str, str, str]  # model, method, task
    repeats: tuple[float, ...]  # cost of each repeat at all lengths
    lengths: tuple[int, ...]  # ascending
    alone: tuple[float, ...] = ()  # cost of the first repeat at one length; only needed with lengths above LONG
    up_to: tuple[float, ...] = ()  # cost of the first repeat at this length and all shorter ones
    divisible: bool = True  # False: lengths are chosen while measuring, from the rows of all repeats

    @cached_property
    def flops(self) -> float:
        return sum(self.repeats)

    @cached_property
    def _scored(self) -> list[float]:
        """The cumulated cost of all lengths before each, without the reading of the text that they share."""
        sums = [0.0]
        for at in range(len(self.lengths) - 1):
            read = self.alone[at + 1] - self.up_to[at + 1] + self.up_to[at]
            sums.append(sums[-1] + self.alone[at] - read)
        return sums

    def _band(self, first: int, last: int) -> float:
        """Return the cost of the lengths from one to another, both included, after reading the text from its begin."""
        return self.alone[last] + self._scored[last] - self._scored[first]

    def bands(self, largest: float) -> Sequence[tuple[int, int, float]]:
        """Return bands of lengths: the first, the one after the last, and the share of a repeat's cost.

        Each costs at most `largest`, or as little more as BANDS and REREAD allow.
        """
        whole = [(0, len(self.lengths), 1.0)]
        if not self.alone or not self.up_to[-1]:
            return whole
        while largest < self.up_to[-1]:
            found = self._cut(largest)
            if len(found) <= BANDS and sum(share for *_, share in found) <= REREAD:
                return found
            largest *= LARGER
        return whole

    @cached_property
    def _num_short(self) -> int:
        return sum(length <= LONG for length in self.lengths)

    def _cut(self, largest: float) -> list[tuple[int, int, float]]:
        """Return bands of at most this cost, the longest lengths first; one length and all short ones are never cut.
        Where they are more than BANDS, the others are left out."""
        bands, end = list[tuple[int, int, float]](), len(self.lengths)
        while end > 0 and len(bands) <= BANDS:
            first = end - 1
            while first > 0 and self._band(first - 1, end - 1) <= largest:
                first -= 1
            if first < max(1, self._num_short):
                first = 0
            bands.append((first, end, self._band(first, end - 1) / self.up_to[-1]))
            end = first
        return bands


@dataclass(frozen=True)
class Unit:
    """Work that one shard does: some repeats of a cell at some of its lengths."""

    cell: int
    repeats: tuple[int, int]  # the first, and the one after the last
    lengths: tuple[int, int]  # the same, of the cell's lengths
    flops: float


@dataclass(frozen=True, eq=False)
class Dealing:
    """Which shard does which units."""

    cells: Sequence[CellCost]
    units: Sequence[Unit]
    owners: Sequence[int]  # of each unit: its shard, from 0
    loads: Sequence[float]  # of each shard

    @property
    def longest(self) -> float:
        return max(self.loads)

    @property
    def imbalance(self) -> float:
        """How much longer than the mean the longest shard is; 0 where there is nothing to do."""
        mean = sum(self.loads) / len(self.loads)
        return self.longest / mean - 1 if mean else 0.0

    def owned(self, shard: int) -> list[Unit]:
        """Return the units of a shard, from 0."""
        return [unit for unit, owner in zip(self.units, self.owners, strict=True) if owner == shard]


def deal(cells: Sequence[CellCost], count: int) -> Dealing:
    """Deal the cells to `count` shards, in units as large as balance allows."""
    mean = sum(cell.flops for cell in cells) / count
    largest = max([mean, *(max(cell.repeats, default=0.0) for cell in cells)])  # no repeat is cut at first
    best: Dealing | None = None
    for cut, number in itertools.product((False, True), range(TRIES)):
        dealing = _longest_first(cells, _units(cells, largest * SMALLER**number, cut=cut), count)
        if best is None or dealing.longest < WORTH * best.longest:
            best = dealing
        if best.longest <= BALANCED * mean:
            break
    assert best is not None
    return best


def _units(cells: Sequence[CellCost], largest: float, *, cut: bool) -> list[Unit]:
    """Return units that cost no more than `largest` where a cell can be divided that far; `cut`: also into bands."""
    units = []
    for number, cell in enumerate(cells):
        repeats, lengths = len(cell.repeats), (0, len(cell.lengths))
        groups = max(1, min(math.ceil(cell.flops / largest), repeats)) if largest and cell.divisible else 1
        bands = cell.bands(largest) if cut and groups == repeats and cell.divisible else [(*lengths, 1.0)]
        for group in range(groups):
            first, end = repeats * group // groups, repeats * (group + 1) // groups
            flops = sum(cell.repeats[first:end])
            units += [Unit(number, (first, end), (a, b), flops * share) for a, b, share in bands]
    return units


def _longest_first(cells: Sequence[CellCost], units: Sequence[Unit], count: int) -> Dealing:
    heap = [(0.0, shard) for shard in range(count)]
    owners = [0] * len(units)
    for number in sorted(range(len(units)), key=lambda number: (-units[number].flops, number)):
        load, owners[number] = heap[0]
        heapq.heapreplace(heap, (load + units[number].flops, owners[number]))
    loads = [0.0] * count
    for load, shard in heap:
        loads[shard] = load
    return Dealing(cells, units, owners, loads)
