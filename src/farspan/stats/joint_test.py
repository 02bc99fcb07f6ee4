"""A joint test over all lengths of a curve: the longest length to which it exceeds a threshold, or shows memory."""

from functools import lru_cache

import numpy as np
from jaxtyping import Float

from farspan.stats.forgetting_curves import MeasuredCurve, is_judged
from farspan.stats.headlines import FINE, LEVELS
from farspan.stats.intervals import measured_mean

JOINT_SAMPLES = 4000  # simulated to calibrate the test
JOINT_REPEATS = 40  # more are calibrated like this number, which is slightly conservative


def established(curve: MeasuredCurve, name: str, level: float) -> float:
    """Return the longest length L for which a joint test shows that, at L or later, the curve of `name`, one of
    CROSSINGS, exceeds its threshold, or for "gap" that the gap exceeds 0: one-sided at `level`, over repeats. Return 0
    if there is none, and under two repeats.

    For a repeat r at length L, d = c - 0.99 for `fine`, c - M for "gap", c - M - 0.01 for `coarse`, else (c - M) -
    threshold · (1 - M), whose mean exceeds 0 exactly where the curve exceeds its threshold. The null hypothesis is
    that no length from L on exceeds it. The statistic is the largest Student's t of means of d over windows of lengths:
    those that begin at L, and for `fine`, which may need warm-up, also short ones that begin later. Lengths are tested
    in order up to the first not rejected, so that all tests together have the error probability of one. The quantile is
    simulated under independent normal noise; noise shared by lengths makes the windows more alike and the test
    conservative.
    """
    judged = is_judged(curve)
    lengths, copy, control = curve.lengths[judged], curve.copy[:, judged], curve.control[:, judged]
    if name == "fine":
        excess = copy - FINE
    else:
        excess = copy - control - LEVELS.get(name, 0.0) * (1.0 if name == "coarse" else 1.0 - control)
    count = np.isfinite(excess).sum(0)
    lengths, excess, count = lengths[count > 1], excess[:, count > 1], count[count > 1]
    if len(count) == 0:
        return 0.0
    mean = measured_mean(excess)
    deviation = np.where(np.isfinite(excess), excess - mean, 0.0) / np.sqrt(count * (count - 1))
    limit = _joint_quantile(min(int(count.min()), JOINT_REPEATS), len(count), name == "fine", level)
    found = 0.0
    for first in range(len(count)):
        begins, ends = _windows(len(count) - first, anywhere=name == "fine")
        means = _window_sums(mean[first:], begins, ends)
        error = np.sqrt((_window_sums(deviation[:, first:], begins, ends) ** 2).sum(0))
        t = np.divide(means, error, out=np.where(means > 0, np.inf, -np.inf), where=error > 1e-12)
        if t.max() <= limit:
            break
        found = float(lengths[first])
    return found


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


@lru_cache(maxsize=256)
def _joint_quantile(repeats: int, lengths: int, anywhere: bool, level: float) -> float:
    """Return the 1 - level quantile of the joint test's statistic under the null hypothesis."""
    rng = np.random.default_rng(0)
    begins, ends = _windows(lengths, anywhere=anywhere)
    largest = []
    for _ in range(JOINT_SAMPLES // 200):
        sums = _window_sums(rng.standard_normal((200, repeats, lengths)), begins, ends)
        largest.append((sums.mean(1) / (sums.std(1, ddof=1) / np.sqrt(repeats))).max(1))
    return float(np.quantile(np.concatenate(largest), 1 - level))
