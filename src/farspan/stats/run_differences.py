"""Differences between the numbers of two runs, on the same targets, or in characters of the text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtrit

from farspan.stats.forgetting_curves import MeasuredCurve, is_judged, shortest_judged, whole_repeats
from farspan.stats.headlines import BOOTSTRAPS, headline, headlines_sampled, multipliers, repeats_of
from farspan.stats.intervals import LEAST_PAIRS, has_no_width, two_sided, welch_freedom
from farspan.stats.memory_lengths import MemoryLength

COMPARED = ("half_life", "reach", "span", "fine")
UNKNOWN = "not known"
MEASURED = ("lengths", "copy", "control")  # what memory lengths follow from


@dataclass(frozen=True)
class Difference:
    """A number of the second curve minus the first's, with its 95 % interval.

    The interval is difference ± t · s of the bootstrap of `stats`, with the same multipliers for a target in both
    curves. p is that of the two-sided t test with this s, but at least twice the share of resamples in which the
    smaller crossing is beyond the lengths measured: below 0.05 only if the interval excludes 0. A crossing is only
    known up to interpolation (`interpolated`): the interval covers all values that both can have, and p is the largest
    of these. `error` is s without this, since nearly equal curves share the error.

    Lengths that only one curve measured can make a difference by interpolation alone, and below the first length an
    area takes the value there. If such a length is below the other's last, the interval also covers the difference at
    the common lengths, and p is the larger of the two.
    """

    name: str  # one of COMPARED
    curves: tuple[str, str]
    values: tuple[float, float]
    value: float  # second minus first
    low: float | None  # None: unbounded, for a crossing that may be beyond the lengths measured
    high: float | None
    p: float | None  # None with too few repeats, or if crossings beyond the lengths leave the sign open
    pairs: int  # targets shared; 0: unpaired
    censored: tuple[str, ...]  # the curves whose value is larger than measured
    error: float  # s; larger where lengths differ, so that a test of equivalence holds for both differences
    freedom: float  # degrees of freedom of t
    unit: str = "tokens"
    below: tuple[float, float] = (0.0, 0.0)  # the values are smaller than these and written as 0; 0: measured

    @property
    def known(self) -> str:
        """The difference as text without its unit, as `known_difference`."""
        first, second = (name in self.censored for name in self.curves)
        is_same = self.low is not None and self.low == self.high
        return signed_tokens(self.value) if is_same else known_difference(self.value, (first, second), self.below)

    @property
    def is_known(self) -> bool:
        """Whether it is a number or a bound."""
        return self.known != UNKNOWN

    @property
    def interval(self) -> str:
        """The interval as text; "" if it has no width, or if nothing is known of the difference."""
        if not self.is_known:
            return ""
        if self.low is not None and self.high is not None and has_no_width(self.value, self.low, self.high):
            return ""
        low = "-∞" if self.low is None else signed_tokens(self.low)
        high = "∞" if self.high is None else signed_tokens(self.high)
        return f"[{low}, {high}]"


def as_lengths(
    names: Sequence[str], values: Sequence[float], censored: Sequence[str], below: Sequence[float]
) -> list[MemoryLength]:
    """Return the values of a `Difference` as memory lengths, which print whether they are measured; `names` as in
    `censored`."""
    both = zip(names, values, below, strict=True)
    return [MemoryLength(value, censored=name in censored, below=least or None) for name, value, least in both]


def signed_tokens(tokens: float) -> str:
    """Write a difference of lengths as a whole number with its sign, 0 without one."""
    text = f"{tokens:+,.0f}"
    return "0" if text in ("+0", "-0") else text


def known_difference(value: float, censored: tuple[bool, bool], below: tuple[float, float]) -> str:
    """Write the difference of two lengths, the second minus the first, with `>` or `<` where it is only known to be
    larger or smaller, since one of them is a bound.

    Args:
        value: of a length below those measured as 0.
        censored: the lengths are larger than measured.
        below: the lengths are smaller than these; 0: measured.
    """
    is_larger, is_smaller = censored[1] or below[0] > 0, censored[0] or below[1] > 0
    if is_larger and is_smaller:
        return UNKNOWN
    sign = ">" if is_larger else "<" if is_smaller else ""
    return sign + signed_tokens(value - below[0] + below[1])


def differences(
    a: MeasuredCurve,
    b: MeasuredCurve,
    *,
    names: tuple[str, str] = ("a", "b"),
    seed: int = 0,
    bootstraps: int = BOOTSTRAPS,
) -> list[Difference]:
    """Return b minus a, in tokens, over their shared targets; the span is taken up to the last length of both.

    Repeats are paired by their target, in any order. If a repeat has another target at each length, as in the paper's
    protocol, they are paired at the lengths that both have.

    Raises:
        ValueError: the two share fewer than 2 targets, or have overlapping ranges without a common length.
    """
    first, second = _of_shared_targets(a, b)
    pairs = len(first.copy)
    if pairs < 2:
        known = [sorted(set(one.targets[one.targets != ""].tolist())) for one in (a, b)]
        held = [
            f"{name} has {len(found)} targets{f' ({found[0]}, ...)' if found else ' that its rows name'}"
            for name, found in zip(names, known, strict=True)
        ]
        raise ValueError(
            f"{names[0]} and {names[1]} share {'one' if pairs else 'no'} target at any length, and 2 are needed: "
            f"{' and '.join(held)}. Measure both with the same text, tokenizer, seed and longest length; "
            f"models with different tokenizers are compared in characters"
        )
    g = multipliers(pairs, bootstraps, seed)

    def measured_at(one: MeasuredCurve, other: MeasuredCurve) -> list[Difference]:
        return _differences(one, other, (g, g), names, (1.0, 1.0), pairs)

    found = measured_at(first, second)
    alike = _without_lengths_of_one(first, second), _without_lengths_of_one(second, first)
    if [len(one.lengths) for one in alike] == [len(first.lengths), len(second.lengths)]:
        return found
    if not np.isin(first.lengths, second.lengths).any():
        at = " and ".join(
            f"{name} at {', '.join(f'{length:,}' for length in one.lengths)}"
            for name, one in zip(names, (first, second), strict=True)
        )
        raise ValueError(f"no length was measured of both: {at} tokens. Measure both at the same lengths")
    return [_covering(*both) for both in zip(found, measured_at(*alike), strict=True)]


def differences_in_characters(
    a: MeasuredCurve,
    b: MeasuredCurve,
    a_characters_per_token: float,
    b_characters_per_token: float,
    *,
    names: tuple[str, str] = ("a", "b"),
    seed: int = 0,
    bootstraps: int = BOOTSTRAPS,
) -> list[Difference]:
    """Return b minus a in characters of the text, unpaired: models with different tokenizers share no targets.

    Raises:
        ValueError: characters per token that are not a positive number, or a curve with fewer than 2 whole repeats.
    """
    scales = a_characters_per_token, b_characters_per_token
    curves = [one.kept(one.measured) for one in (a, b)]
    for name, one, scale in zip(names, curves, scales, strict=True):
        if not (np.isfinite(scale) and scale > 0):
            raise ValueError(f"{name}: {scale} characters per token is not a positive number")
        if (repeats := whole_repeats(one)) < 2:
            raise ValueError(f"{name} has {repeats} repeats with both halves; an interval needs 2 or more")
    first, second = curves
    g = [multipliers(len(one.copy), bootstraps, seed + i) for i, one in enumerate(curves)]
    return _differences(first, second, (g[0], g[1]), names, scales, 0)


def _differences(
    a: MeasuredCurve,
    b: MeasuredCurve,
    multipliers: tuple[np.ndarray, np.ndarray],
    names: tuple[str, str],
    scales: tuple[float, float],
    pairs: int,
) -> list[Difference]:
    end = min(one.lengths[-1] * scale for one, scale in zip((a, b), scales, strict=True))
    first, second = (_numbers(one, g, scale, end) for one, g, scale in zip((a, b), multipliers, scales, strict=True))
    # the same values at each length, as of an unchanged model: crossings do not differ in any resample
    same = pairs > 0 and all(np.array_equal(getattr(a, key), getattr(b, key), equal_nan=True) for key in MEASURED)
    return [_difference(name, names, first[name], second[name], same, pairs) for name in COMPARED]


@dataclass(frozen=True)
class _Number:
    """A number of one curve, in the unit of the difference."""

    value: float
    samples: np.ndarray  # its value in each resample
    repeats: float  # those that it depends on
    is_censored: bool  # larger than the lengths measured
    beyond: float  # share of the resamples in which it is
    below: float  # the value is smaller than this and written as 0; 0: measured
    down: float  # by how much it can be smaller or larger than `value`, by interpolation
    up: float


def _numbers(curve: MeasuredCurve, g: np.ndarray, scale: float, end: float) -> dict[str, _Number]:
    """Return the numbers of COMPARED, the span up to the length `end`."""
    cut = _until(curve, round(end / scale))
    whole = headline(curve, COMPARED), headlines_sampled(curve, g, COMPARED)
    ended = whole if cut is curve else (headline(cut, ("span",)), headlines_sampled(cut, g, ("span",)))
    found = {}
    for name in COMPARED:
        # a crossing outside of the lengths measured may be anywhere there; the span ends at a known length
        is_crossing = name != "span"
        of, (values, samples) = (curve, whole) if is_crossing else (cut, ended)
        (value, is_censored), (sampled, beyond) = values[name], samples[name]
        found[name] = _Number(
            value * scale,
            sampled * scale,
            repeats_of(of, name, value),
            is_crossing and is_censored,
            float(np.mean(beyond)) if is_crossing else 0.0,
            shortest_judged(curve) * scale if is_crossing and value == 0.0 else 0.0,
            *(tokens * scale for tokens in interpolated(of, name, value, is_censored)),
        )
    return found


def _difference(
    name: str, names: tuple[str, str], first: _Number, second: _Number, same: bool, pairs: int
) -> Difference:
    both = first, second
    fewest = min(one.repeats for one in both)
    if pairs:
        error, freedom = float(np.std(second.samples - first.samples)), fewest - 1.0
    else:
        squared = [float(np.var(one.samples)) for one in both]
        error, freedom = float(np.sqrt(sum(squared))), welch_freedom(squared, [one.repeats - 1.0 for one in both])
    value = second.value - first.value
    less, more = (0.0, 0.0) if same else (second.down + first.up, second.up + first.down)
    least = min(0.0, value + more) if value < 0 else max(0.0, value - less)
    half = float(stdtrit(freedom, 0.975)) * error
    censored = tuple(label for label, one in zip(names, both, strict=True) if one.is_censored)
    is_open = [one.beyond > 0.025 and (not same or bool(censored)) for one in both]
    sign_unknown = (
        len(censored) == 2
        or (first.is_censored and value > 0)
        or (second.is_censored and value < 0)
        or (first.below > 0 and second.below > 0 and not same)
    )
    # in these resamples the smaller length may be the larger one, and s holds the end of its curve instead
    p = max(two_sided(least, error, freedom, int(fewest)), min(1.0, 2 * both[int(value < 0)].beyond))
    return Difference(
        name,
        names,
        values=(first.value, second.value),
        value=value,
        low=None if is_open[0] else value - half - less,
        high=None if is_open[1] else value + half + more,
        p=None if sign_unknown or fewest < LEAST_PAIRS else p,
        pairs=pairs,
        censored=censored,
        error=error,
        freedom=freedom,
        unit="tokens" if pairs else "characters",
        below=(first.below, second.below),
    )


def interpolated(curve: MeasuredCurve, name: str, value: float, is_beyond: bool) -> tuple[float, float]:
    """Return how much smaller and larger than by linear interpolation a crossing can be.

    It is between two measured lengths. Each of them is left out in turn: this moves the half-life of a cliff to either
    length, and that of a curve which falls evenly hardly at all. A curve bends where it leaves 1 and where it reaches
    0, so `fine` can be up to the next length, and `reach` down to the one before. Below the first length a crossing can
    be anywhere.
    """
    if name == "span" or is_beyond:
        return 0.0, 0.0
    lengths = curve.lengths[is_judged(curve)]
    after = int(np.searchsorted(lengths, value))
    if after == 0:
        return value, float(lengths[0]) - value
    ends = lengths[after - 1 : after + 1]
    moved = [headline(curve.kept(curve.lengths != end), (name,))[name] for end in ends if len(lengths) > 2]
    places = np.clip([ends[1] if beyond else place for place, beyond in moved] or ends, *ends)
    least, most = (ends[0] if name == "reach" else min(places)), (ends[1] if name == "fine" else max(places))
    return max(0.0, value - float(least)), max(0.0, float(most) - value)


def _without_lengths_of_one(one: MeasuredCurve, other: MeasuredCurve) -> MeasuredCurve:
    """Return a curve without the lengths up to the other's last that the other did not measure. If no length is common,
    those before the other's first are kept."""
    common = np.isin(one.lengths, other.lengths)
    first = 0 if common.any() else other.lengths[0]
    covered = (one.lengths > first) & (one.lengths < other.lengths[-1])
    return one.kept(~covered | common)


def _covering(one: Difference, other: Difference) -> Difference:
    """Return a difference whose interval covers those of both, with the larger p."""
    freedom = min(one.freedom, other.freedom)
    return replace(
        one,
        low=None if one.low is None or other.low is None else min(one.low, other.low),
        high=None if one.high is None or other.high is None else max(one.high, other.high),
        p=None if one.p is None or other.p is None else max(one.p, other.p),
        error=max(one.error, other.error) + abs(one.value - other.value) / float(stdtrit(freedom, 0.95)),
        freedom=freedom,
    )


def _of_shared_targets(a: MeasuredCurve, b: MeasuredCurve) -> tuple[MeasuredCurve, MeasuredCurve]:
    """Return both curves with one repeat for each shared target, in the same order. A length that both measured keeps
    only the repeats that are whole in both."""
    of_a, of_b = _target_of_repeats(a), _target_of_repeats(b)
    if of_a is None or of_b is None:
        pair = list(_cell_by_cell(a, b))
    else:
        shared = [target for target in dict.fromkeys(of_a) if target and target in of_b]
        pair = [_rows(a, [of_a.index(t) for t in shared]), _rows(b, [of_b.index(t) for t in shared])]
    found = [one.whole for one in pair]
    for i, length in enumerate(pair[0].lengths):
        for j in np.flatnonzero(pair[1].lengths == length):
            both = found[0][:, i] & found[1][:, j]
            if both.any():
                found[0][:, i] = found[1][:, j] = both
    pair = [
        replace(one, copy=np.where(good, one.copy, np.nan), control=np.where(good, one.control, np.nan))
        for one, good in zip(pair, found, strict=True)
    ]
    measured = np.flatnonzero(found[0].any(1) & found[1].any(1)).tolist()
    first, second = (_rows(one, measured) for one in pair)
    return first.kept(first.measured), second.kept(second.measured)


def _target_of_repeats(curve: MeasuredCurve) -> list[str] | None:
    """Return the one target of each repeat, "" if no row names it; None if repeats have several."""
    named = [sorted(set(row.tolist()) - {""}) for row in curve.targets]
    return None if any(len(row) > 1 for row in named) else [row[0] if row else "" for row in named]


def _cell_by_cell(a: MeasuredCurve, b: MeasuredCurve) -> tuple[MeasuredCurve, MeasuredCurve]:
    """Return both curves at their shared lengths, with b in the order of a's targets at each length."""
    a, b = a.kept(np.isin(a.lengths, b.lengths)), b.kept(np.isin(b.lengths, a.lengths))
    copy, control = np.full(a.copy.shape, np.nan), np.full(a.copy.shape, np.nan)
    for column in range(len(a.lengths)):
        rows = {target: row for row, target in enumerate(b.targets[:, column].tolist()) if target}
        for i, target in enumerate(a.targets[:, column].tolist()):
            if target in rows:
                copy[i, column], control[i, column] = b.copy[rows[target], column], b.control[rows[target], column]
    return a, replace(b, copy=copy, control=control, targets=a.targets)


def _rows(curve: MeasuredCurve, which: list[int]) -> MeasuredCurve:
    return replace(curve, copy=curve.copy[which], control=curve.control[which], targets=curve.targets[which])


def _until(curve: MeasuredCurve, end: int) -> MeasuredCurve:
    """Return the curve up to a length; if it was not measured there, interpolate each repeat."""
    if end >= curve.lengths[-1]:
        return curve
    if end in curve.lengths:
        return curve.kept(curve.lengths <= end)
    after = int(np.searchsorted(curve.lengths, end))
    before = max(after - 1, 0)  # below the first length its value is used
    share = (end - curve.lengths[before]) / (curve.lengths[after] - curve.lengths[before]) if after else 0.0
    cut = curve.kept(np.arange(len(curve.lengths)) <= after)
    for values in (cut.copy, cut.control):
        values[:, after] = (1 - share) * values[:, before] + share * values[:, after]
    cut.lengths[after] = end
    return cut.kept(cut.measured)
