"""A joint test over all lengths of a curve: the longest length to which it exceeds a threshold, or shows memory."""

from functools import lru_cache

import numpy as np
from jaxtyping import Float

from farspan.stats.forgetting_curves import MeasuredCurve, index_by_repeat, is_judged
from farspan.stats.headlines import LEVELS

JOINT_SAMPLES = 4000  # simulated to calibrate the test
JOINT_REPEATS = 40  # more are calibrated like this number, which is slightly conservative


def established(curve: MeasuredCurve, name: str, level: float) -> float:
    """Return the longest length L for which a joint test shows that, at L or later, the curve of `name`, one of
    CROSSINGS, exceeds its threshold, or for "gap" that the gap exceeds 0: one-sided at `level`, over repeats. Return 0
    if there is none, and under two repeats.

    For a repeat r at length L, d = c - 0.99 for `fine`, c - M - 0.01 for `coarse`, else m - threshold, with m of
    `index_by_repeat`. Its mean exceeds 0 exactly where the curve exceeds its threshold. The null hypothesis is that no
    length from L on exceeds it. The statistic is the largest Student's t, on a normal scale, of means of d over
    windows of lengths: those that begin at L, and for `fine`, which may need warm-up, also short ones that begin later.
    Lengths are tested in order up to the first not rejected, so that all tests together have the error probability of
    one. The quantile is simulated under independent normal noise, with the repeats that each length has; noise shared
    by lengths makes the windows more alike and the test conservative.
    """
    tested = {"fine": curve.copy, "coarse": curve.copy - curve.control}
    excess = tested.get(name, index_by_repeat(curve)) - LEVELS.get(name, 0.0)
    count = np.isfinite(excess).sum(0)
    usable = is_judged(curve) & (count > 1)
    lengths, excess, count = curve.lengths[usable], excess[:, usable], count[usable]
    found = 0.0
    for first in range(len(count)):
        repeats = tuple(int(one) for one in np.minimum(count[first:], JOINT_REPEATS))
        if _statistic(excess[:, first:], name == "fine") <= _joint_quantile(repeats, name == "fine", level):
            break
        found = float(lengths[first])
    return found


def _statistic(excess: Float[np.ndarray, "*samples repeats lengths"], anywhere: bool) -> Float[np.ndarray, "*samples"]:
    """Return the largest t of the windows of the joint test. NaN: not measured; each length has two repeats or more.

    A window's t has the degrees of freedom of the repeats that its variance comes from (after Satterthwaite 1946,
    Biometrics Bulletin 2: n - 1 where every length has n). Wallace's normal scale (1959, Annals of Mathematical
    Statistics 30) makes windows of few and of many repeats comparable; without it, one length of two repeats would
    decide the quantile alone.
    """
    begins, ends = _windows(excess.shape[-1], anywhere=anywhere)
    is_measured = np.isfinite(excess)
    count = is_measured.sum(-2, keepdims=True)
    mean = np.nansum(excess, -2, keepdims=True) / count
    shares = is_measured / (count * (count - 1.0))
    deviation = np.where(is_measured, excess - mean, 0.0) / np.sqrt(count * (count - 1))
    means = _window_sums(mean, begins, ends)[..., 0, :]
    error = np.sqrt((_window_sums(deviation, begins, ends) ** 2).sum(-2))
    t = np.divide(means, error, out=np.where(means > 0, np.inf, -np.inf), where=error > 1e-12)
    variance = _window_sums(shares, begins, ends)
    freedom = variance.sum(-2) ** 2 / (variance**2).sum(-2) - 1
    scale = (8 * freedom + 1) / (8 * freedom + 3) * np.sqrt(freedom)
    return np.asarray((np.sign(t) * scale * np.sqrt(np.log1p(t**2 / freedom))).max(-1))


def _windows(lengths: int, *, anywhere: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return first and last + 1 of the windows of the joint test: all that begin at the first length; `anywhere`: also
    those of 1, 2, 4, ... lengths that begin at any length."""
    found = [(0, end) for end in range(1, lengths + 1)]
    size = 1
    while anywhere and size < lengths:
        found += [(begin, begin + size) for begin in range(1, lengths - size + 1)]
        size *= 2
    begins, ends = np.array(found).T
    return begins, ends


def _window_sums(values: Float[np.ndarray, "*samples lengths"], begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    sums = np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, -1)], -1)
    return sums[..., ends] - sums[..., begins]


@lru_cache(maxsize=1024)
def _joint_quantile(repeats: tuple[int, ...], anywhere: bool, level: float) -> float:
    """Return the 1 - level quantile of the statistic under the null hypothesis, with the `repeats` of each length."""
    rng = np.random.default_rng(0)
    most = max(repeats)
    is_measured = np.arange(most)[:, None] < np.array(repeats)
    largest = [
        _statistic(np.where(is_measured, rng.standard_normal((200, most, len(repeats))), np.nan), anywhere)
        for _ in range(JOINT_SAMPLES // 200)
    ]
    return float(np.quantile(np.concatenate(largest), 1 - level))
