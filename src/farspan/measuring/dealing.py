"""Deal the work of a run to shards: processes that measure it together without communicating.

A cell is one task on one model under one method. It is dealt in one piece if that balances the shards. Otherwise its
repeats are divided into groups, down to single repeats, and then each repeat into at most four bands of lengths above
32,768 tokens. Groups cost nothing extra, since every repeat reads its own text. A band reads the text before it again,
so bands are used only if they shorten the longest shard, and together cost at most twice the undivided repeat.

Units are dealt longest first to the least loaded shard: R. L. Graham, "Bounds on multiprocessing timing anomalies",
SIAM J. Appl. Math. 17 (1969). The result depends only on the cells and the number of shards, so every shard computes
the same dealing.
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

BALANCED = 1.05  # longest shard over the mean load of undivided work; below this, no smaller units are tried
WORTH = 0.98  # smaller units must reduce the longest shard to less than this share
SMALLER = 0.9  # ratio of the largest units of one try and the try before
TRIES = 40
LONG = 32_768  # tokens; a repeat may be cut at longer lengths
BANDS = 4
LARGER = 1.05  # factor on the largest band if no cut with smaller bands is allowed
REREAD = 2.0  # cost of a repeat in bands, at most, over its cost in one piece


@dataclass(frozen=True, eq=False)
class CellCost:
    """The cost of one task on one model under one method, in floating-point operations."""

    name: tuple[str, str, str]  # model, method, task
    repeats: tuple[float, ...]  # cost of each repeat at all lengths
    lengths: tuple[int, ...]  # ascending
    alone: tuple[float, ...] = ()  # cost of the first repeat at each length alone; only needed with lengths above LONG
    up_to: tuple[float, ...] = ()  # cost of the first repeat at each length and all shorter ones
    divisible: bool = True  # False: lengths are chosen while measuring, from the rows of all repeats

    @cached_property
    def flops(self) -> float:
        return sum(self.repeats)

    @cached_property
    def _scored(self) -> list[float]:
        """For each length, the cost of all shorter ones without reading the text that they share."""
        sums = [0.0]
        for at in range(len(self.lengths) - 1):
            read = self.alone[at + 1] - self.up_to[at + 1] + self.up_to[at]
            sums.append(sums[-1] + self.alone[at] - read)
        return sums

    def _band(self, first: int, last: int) -> float:
        """Return the cost of the lengths `first` to `last`, both included, and of reading the text from its start."""
        return self.alone[last] + self._scored[last] - self._scored[first]

    def bands(self, largest: float) -> Sequence[tuple[int, int, float]]:
        """Return bands of lengths as (first, last + 1, share of a repeat's cost).

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

    def _cut(self, largest: float) -> list[tuple[int, int, float]]:
        """Return bands of at most this cost, longest lengths first. A single length, and all short lengths together,
        are never cut. If there are more than BANDS, the others are left out."""
        bands, end = list[tuple[int, int, float]](), len(self.lengths)
        num_short = sum(length <= LONG for length in self.lengths)
        while end > 0 and len(bands) <= BANDS:
            first = end - 1
            while first > 0 and self._band(first - 1, end - 1) <= largest:
                first -= 1
            if first < max(1, num_short):
                first = 0
            bands.append((first, end, self._band(first, end - 1) / self.up_to[-1]))
            end = first
        return bands


@dataclass(frozen=True)
class Unit:
    """Work that one shard does: some repeats of a cell at some of its lengths."""

    cell: int
    repeats: tuple[int, int]  # first, last + 1
    lengths: tuple[int, int]  # first, last + 1 in the cell's lengths
    flops: float


@dataclass(frozen=True, eq=False)
class Dealing:
    """Which shard does which units."""

    units: Sequence[Unit]
    owners: Sequence[int]  # the shard of each unit, from 0
    loads: Sequence[float]  # by shard

    @property
    def longest(self) -> float:
        return max(self.loads)

    @property
    def imbalance(self) -> float:
        """Excess of the longest shard over the mean, as a share of the mean; 0 if there is no work."""
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
        dealing = _longest_first(_units(cells, largest * SMALLER**number, cut=cut), count)
        if best is None or dealing.longest < WORTH * best.longest:
            best = dealing
        if best.longest <= BALANCED * mean:
            break
    assert best is not None
    return best


def _units(cells: Sequence[CellCost], largest: float, *, cut: bool) -> list[Unit]:
    """Return units that cost at most `largest`, as far as cells can be divided; `cut`: also divide into bands."""
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


def _longest_first(units: Sequence[Unit], count: int) -> Dealing:
    heap = [(0.0, shard) for shard in range(count)]
    owners = [0] * len(units)
    for number in sorted(range(len(units)), key=lambda number: (-units[number].flops, number)):
        load, owners[number] = heap[0]
        heapq.heapreplace(heap, (load + units[number].flops, owners[number]))
    loads = [0.0] * count
    for load, shard in heap:
        loads[shard] = load
    return Dealing(units, owners, loads)
