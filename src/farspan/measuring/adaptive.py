"""Choose lengths and repeats where the curve needs them, for `--lengths auto`.

1. A coarse grid up to the longest length, 4 repeats, shortest first. It ends after three amnesia lengths in a row:
   lengths where the upper end of the memory index's interval is under 0.02.
2. New lengths between the two measured lengths around each threshold (fine, half-life, reach), and around each end of
   its interval by chance, until the two are closer than a 32nd of the longest length and an eighth of their own, or
   than that interval. An interval ends at measured lengths, so sparse lengths would make it wider than chance does.
3. Repeats, four at a time and only at the two lengths around half-life and reach, while the interval by chance extends
   to either side by more than a 32nd of the longest length and 5 % of the value, and beyond the two lengths; up to 32,
   and none if 32 would not be enough. Up to 12 repeats at all lengths up to the half-life while the joint test shows no
   memory. Lengths are not refined again after that.
4. Rows that ran out of memory in an earlier session and were not tried again in rounds 1 to 3.

Without a budget each decision depends only on the rows, so a stopped run continues with the same decisions. With a
budget, lengths are measured as far as the planned time allows; repeating the command measures more.
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from farspan import stats
from farspan.lm import LM
from farspan.measuring.loop import Watch, measure_cell
from farspan.measuring.plan import plan, still_missing
from farspan.methods import Method
from farspan.record import Row, Run
from farspan.tasks.curve import RING, BoundCurve
from farspan.text.names import described

MOST_REPEATS = 32
SHORTEST = 63  # tokens; 32 of them are scored, enough to judge a threshold by
LEAST = 16  # tokens that a text must allow
GRID = 8  # steps of the coarse grid
RESOLUTION = 32  # parts of the longest length
RELATIVE_RESOLUTION = 8  # parts of a length
PRECISION = 0.05  # of a value: half the width of its interval
PIECES = 4  # parts, at most, that a bracket is divided into in one round
SHOWN_BY = 12  # repeats, at most, to show that a half-life is not due to chance
AMNESIA = 0.02  # memory index
AMNESIA_LENGTHS = 3  # in a row
REFINED = ("fine", "half_life", "reach")
REPEATED = ("half_life", "reach")
BUDGET_SHARE = 0.8  # share of the budget that a plan may take: plans are inexact


@dataclass
class TimeBudget:
    """Time that a measurement may take."""

    seconds: float = math.inf
    started: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self.started)


class BudgetError(ValueError):
    """The time of a measurement is too short for its first length."""


def coarse_lengths(longest: int, shortest: int = SHORTEST) -> tuple[int, ...]:
    """Return the eighths of the longest length, and its repeated halves down to the shortest."""
    even = {longest * i // GRID for i in range(1, GRID + 1)}
    halves = {longest >> i for i in range(longest.bit_length())}
    return tuple(sorted(length for length in even | halves if length >= min(shortest, longest)))


def round_one(task: BoundCurve, longest: int, repeats: int | None) -> tuple[tuple[int, ...], int]:
    """Return lengths and repeats of the first round."""
    shortest = sum(task.probe) + 1 if task.depths != (0.0,) else SHORTEST
    return coarse_lengths(longest, shortest), repeats or RING


def prepared(task: BoundCurve, longest: int, repeats: int | None, window: int | None = None) -> tuple[BoundCurve, int]:
    """Return the task with texts sampled once for all rounds, and the longest length, reduced if the text is short.

    Args:
        window: tokens sampled for each repeat, if more than `longest`: one number for all models that are compared.

    Raises:
        ValueError: the text is too short for 4 windows (or `repeats`) of LEAST tokens.
    """
    least = repeats or RING
    if task.prefix is not None and task.prefix.source == task.target.source:
        least *= 2  # one half of the tokens precedes the other
    texts = [task.target, *([task.prefix] if task.prefix is not None else [])]
    window = min([max(longest, window or 0), *(len(text.tokens) // least for text in texts)])
    if window < min(longest, LEAST):
        shortest = min(texts, key=lambda text: len(text.tokens))
        raise ValueError(
            f"{described(shortest.name)} is too short for a forgetting curve: it has {len(shortest.tokens):,} tokens, "
            f"and {least} windows of {LEAST} are needed at least; give a text of {least * LEAST:,} tokens or more"
        )
    windows = min(text.num_windows(window, least) for text in texts)
    pool = repeats or min(MOST_REPEATS, windows * RING // least) // RING * RING
    return replace(task, window=window, pool=pool), min(longest, window)


def measure_adaptively(
    task: BoundCurve,
    method: Method,
    lm: LM,
    run: Run,
    *,
    longest: int,
    repeats: int | None,
    seed: int,
    batch: int | None,
    chunk: int | None,
    budget: TimeBudget,
    watch: Watch,
) -> list[Row]:
    """Measure a curve and return its rows. `task` and `longest` as `prepared` returns them.

    Args:
        repeats: at every length; None: 4, and more where a threshold is undecided.

    Raises:
        ValueError: a text too short.
        BudgetError: a budget too small for one length.
    """
    rounds = _Rounds(task, method, lm, run, longest, seed, {"batch": batch, "chunk": chunk}, budget, watch)
    failed = {id(row) for row in rounds.rows if row.status == "oom"}
    grid, start = round_one(task, longest, repeats)
    lengths = rounds.affordable(grid, start)
    rounds.measure(task, lengths, start, "", to_amnesia=True)
    rounds.record_unaffordable(grid if budget.left < 0 else [n for n in grid if n not in lengths], start)

    # decisions use only the lengths and repeats of the rounds so far, not rows that an earlier run added
    chosen = dict.fromkeys(grid, start)
    while new := finer_lengths(rounds.curve(chosen), longest):
        chosen |= dict.fromkeys(new, start)
        if not rounds.measure(task, new, start, ", refining"):
            break
    given_up: set[str] = set()
    curve_only = replace(task, depths=(0.0,))
    while repeats is None and start < (task.pool or 0):
        more, hopeless = undecided(rounds.curve(chosen), longest, task.pool or 0)
        for name in sorted(hopeless - given_up):
            watch.notice(
                f"{lm.name} {method}: an interval of {name.replace('_', '-')} within "
                f"{longest / RESOLUTION:,.0f} tokens or {PRECISION:.0%} of it needs more than {task.pool} repeats, so "
                "none are added automatically; measure more than these at every length (--repeats)"
            )
        given_up |= hopeless
        start += RING
        if not more or not rounds.measure(curve_only, more, start, f", {start} repeats where undecided"):
            break
        chosen |= dict.fromkeys(more, start)
    if left := [row for row in rounds.rows if id(row) in failed]:
        again = tuple(sorted({row.length for row in left}))
        rounds.measure(task, again, 1 + max(row.repeat for row in left), ", rows that ran out of memory before")
    return rounds.rows


def finer_lengths(curve: stats.MeasuredCurve, longest: int) -> tuple[int, ...]:
    """Return new lengths inside the brackets that are still wide, around each threshold and around each end of its
    interval by chance. Brackets no wider than that interval are not refined."""
    new: set[int] = set()
    measured = curve.kept(curve.measured)
    if not len(measured.lengths):
        return ()
    chance = stats.by_chance(measured)
    for name, (value, censored) in stats.headline(measured, REFINED).items():
        if value == 0.0 or censored:
            continue
        low, high, _ = chance.get(name, (value, value, False))
        for before, after in {stats.between(measured, end) for end in (low, value, high)}:
            fine_enough = max(1.0, min(longest / RESOLUTION, after / RELATIVE_RESOLUTION))
            fine_enough = max(fine_enough, high - low)
            pieces = min(PIECES, math.ceil((after - before) / fine_enough))
            new |= {int(length) for length in np.linspace(before, after, pieces + 1)[1:-1]}
    return tuple(sorted(new - set(curve.lengths.tolist())))


def undecided(curve: stats.MeasuredCurve, longest: int, most: int) -> tuple[tuple[int, ...], set[str]]:
    """Return the lengths that need more repeats, and the thresholds that even `most` repeats would not decide."""
    measured = curve.kept(curve.measured)
    if not len(measured.lengths):
        return (), set()
    chance, values = stats.by_chance(measured), stats.headline(measured, REPEATED)
    more: set[int] = set()
    hopeless = set()
    for name, (value, censored) in values.items():
        if value == 0.0 or censored or not chance:
            continue
        if name not in chance:
            more |= set(stats.between(measured, value))
            continue
        low, high, _ = chance[name]
        wanted = 2 * max(longest / RESOLUTION, PRECISION * value)
        now = stats.repeats_near(measured, value)
        with_most = stats.expansion(float(most)) / stats.expansion(float(now)) * math.sqrt(now / most)
        around = {stats.between(measured, end) for end in (low, value, high)}
        if high - low <= wanted or len(around) == 1:  # its interval ends at the two lengths, with more repeats too
            continue
        if now >= most or (high - low) * with_most > wanted:
            hopeless.add(name)
        else:
            more |= set(stats.between(measured, value))
    half_life, _ = values["half_life"]
    few = stats.whole_repeats(measured) < SHOWN_BY
    if half_life > 0 and few and not stats.exceeds(measured, "gap", stats.JOINT_LEVEL):
        more |= {length for length in measured.lengths.tolist() if length <= stats.between(measured, half_life)[1]}
    return tuple(sorted(more)), hopeless


def last_worth_measuring(rows: Sequence[Row], longest: int) -> int:
    """Return the third amnesia length in a row, or `longest` if there is none."""
    if not any(row.depth == 0 and row.status == "ok" for row in rows):
        return longest
    return end_of_amnesia(stats.curve(rows)) or longest


def end_of_amnesia(curve: stats.MeasuredCurve) -> int | None:
    """Return the third amnesia length in a row; None if there is none yet."""
    index = stats.index_by_repeat(curve)
    _, upper = stats.interval(index, 0.9)
    is_same = np.isnan(upper) & (np.isfinite(index).sum(0) > 1)  # as where no repeat has a token that is copied
    lost = np.where(is_same, stats.measured_mean(index), upper) < AMNESIA  # False under two repeats
    for end in range(AMNESIA_LENGTHS, len(lost) + 1):
        if lost[end - AMNESIA_LENGTHS : end].all():
            return int(curve.lengths[end - 1])
    return None


@dataclass
class _Rounds:
    """The common arguments of the calls of `measure_cell`, and the time they take."""

    task: BoundCurve
    method: Method
    lm: LM
    run: Run
    longest: int
    seed: int
    sizes: Mapping[str, Any]  # batch and chunk
    budget: TimeBudget
    watch: Watch
    seconds: float = 0.0
    tokens: int = 0

    @property
    def rows(self) -> list[Row]:
        return self.run.of(self.lm.name, str(self.method), self.task.measurement)

    def curve(self, repeats: Mapping[int, int]) -> stats.MeasuredCurve:
        """Return the curve at these lengths, of the first repeats of each."""
        return stats.curve(row for row in self.rows if row.repeat < repeats.get(row.length, 0))

    def affordable(self, grid: tuple[int, ...], repeats: int) -> tuple[int, ...]:
        """Return the lengths of the grid that are measured, and as many others, shortest first, as the budget allows.

        Raises:
            BudgetError: the budget is too small for one length.
        """
        if self.budget.seconds == math.inf:
            return grid
        left, _ = still_missing(self.task.examples(self.lm, grid, repeats, self.seed), self.rows)
        if not (missing := tuple(sorted({length for one in left for length in one.lengths}))):
            return grid

        how: dict[str, Any] = {"repeats": repeats, "seed": self.seed, **self.sizes}
        cost = partial(plan, self.task, self.method, self.lm, **how)
        everything = cost(lengths=missing, calibrate=True)
        seconds = everything.seconds or 0.0
        may = self.budget.left * BUDGET_SHARE * everything.flops / max(seconds, 1e-9)
        for end in range(len(missing), 0, -1):
            if cost(lengths=missing[:end]).flops <= may:
                return tuple(n for n in grid if n not in missing[end:])
        needed = cost(lengths=missing[:1]).flops * seconds / everything.flops / BUDGET_SHARE
        raise BudgetError(
            f"{max(self.budget.left, 0.0):,.1f} s are left after timing {self.lm.name}, too little for the first "
            f"length: {repeats} repeats of {missing[0]:,} tokens take about {max(needed, 1.0):,.0f} s; give more "
            "--minutes"
        )

    def measure(
        self, task: BoundCurve, lengths: tuple[int, ...], repeats: int, title: str, *, to_amnesia: bool = False
    ) -> bool:
        """Call `measure_cell` once; return False if there is no time for it."""

        def longest() -> int:
            if self.budget.left < 0:
                return 0
            if not to_amnesia:
                return self.longest
            return last_worth_measuring([r for r in self.rows if r.repeat < repeats], self.longest)

        left, _ = still_missing(task.examples(self.lm, lengths, repeats, self.seed), self.rows)
        tokens = sum(w.num_rows * w.num_tokens for one in left for w in task.work(self.lm, one))
        if self.tokens and self.seconds / self.tokens * tokens > self.budget.left:
            self.watch.notice(f"{self.lm.name} {self.method}: no time is left for more lengths or repeats (--minutes)")
            return False
        self.watch.start(f"{self.lm.name} {self.method}{title}", len(lengths) * repeats * len(task.depths))
        started = time.monotonic()
        measure_cell(
            task,
            self.method,
            self.lm,
            self.run,
            lengths=lengths,
            repeats=repeats,
            seed=self.seed,
            longest=longest,
            watch=self.watch,
            **self.sizes,
        )
        self.seconds, self.tokens = self.seconds + time.monotonic() - started, self.tokens + tokens
        return True

    def record_unaffordable(self, lengths: Iterable[int], repeats: int) -> None:
        """Record rows for lengths outside the budget, so that the statistics do not treat the last measured length as
        the end of the curve."""
        end = last_worth_measuring([row for row in self.rows if row.repeat < repeats], self.longest)
        done = {row.length for row in self.rows}
        example = self.task.examples(self.lm, (self.longest,), self.task.pool or RING, self.seed)[0]
        for length in (length for length in lengths if length not in done and length <= end):
            lost = {"status": "budget", "reason": f"no time for it in {self.budget.seconds:,.0f} s"}
            place = {"length": length, "repeat": 0, "example": example.id}
            self.run.append(self.task.row(self.lm, str(self.method), self.seed, **place, **lost))
