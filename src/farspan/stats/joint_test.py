"""A joint test over all lengths of a curve: the longest length to which it exceeds a threshold, or shows memory."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import betainc, ndtri

from farspan.stats.forgetting_curves import MeasuredCurve, index_by_repeat, is_judged
from farspan.stats.headlines import LEVELS
from farspan.stats.intervals import equal_shares, measured_mean

JOINT_SAMPLES = 4000  # simulated to calibrate the test
JOINT_REPEATS = 40  # more are calibrated like this number, which is slightly conservative


def established(curve: MeasuredCurve, name: str, level: float) -> float:
    """Return the longest length L for which a joint test shows that, at L or later, the curve of `name`, one of
    CROSSINGS, exceeds its threshold, or for "gap" that the gap exceeds 0: one-sided at `level`, over repeats. Return 0
    if there is none, and under two repeats.
    """
    return max(_shown(curve, name, level), default=0.0)


def exceeds(curve: MeasuredCurve, name: str, level: float) -> bool:
    """Return whether the joint test shows that the curve of `name` exceeds its threshold at any length; see
    `established`."""
    return any(True for _ in _shown(curve, name, level))


def _shown(curve: MeasuredCurve, name: str, level: float) -> Iterator[float]:
    """Yield the lengths for which the joint test shows that the curve exceeds its threshold there or later.

    For a repeat r at length L, d = c - 0.99 for `fine`, c - M - 0.01 for `coarse`, else m - threshold, with m of
    `index_by_repeat`. Its mean exceeds 0 exactly where the curve exceeds its threshold. The null hypothesis is that no
    length from L on exceeds it. The statistic is the largest Student's t, on a normal scale, of means of d over
    windows of lengths: those that begin at L, and for `fine`, which may need warm-up, also short ones that begin later.
    Lengths are tested in order up to the first not rejected, so that all tests together have the error probability of
    one. The quantile is simulated under independent normal noise, with the repeats that each length has; noise shared
    by lengths makes the windows more alike and the test conservative. Where the repeats are all the same, as accuracies
    of few tokens often are, their error is unknown, and the test is that of their tokens (`_of_tokens`).
    """
    if name == "fine":
        tested = curve.copy
    elif name == "coarse":
        tested = curve.copy - curve.control
    else:
        tested = index_by_repeat(curve)
    threshold = LEVELS.get(name, 0.0)
    excess = tested - threshold
    count = np.isfinite(excess).sum(0)
    usable = is_judged(curve) & (count > 1)
    lengths, excess, count = curve.lengths[usable], excess[:, usable], count[usable]
    tokens = curve.scored[usable] * count
    hits, guessed = (measured_mean(half[:, usable]) * tokens for half in (curve.copy, curve.control))
    guess = (guessed + 1) / (tokens + 2)  # after Laplace: a share of 0 of few tokens is not a rate of 0
    needed = {"fine": np.full(len(lengths), threshold), "coarse": guess + threshold}
    least = needed.get(name, guess + threshold * (1 - guess)) * tokens
    for first, length in enumerate(lengths):
        later, anywhere = excess[:, first:], name == "fine"
        repeats = tuple(int(one) for one in np.minimum(count[first:], JOINT_REPEATS))
        equal = _of_tokens(hits[first:], least[first:], tokens[first:], anywhere)
        if _statistic(later, np.isfinite(later), anywhere, equal) <= _joint_quantile(repeats, anywhere, level):
            return
        yield float(length)


def _of_tokens(
    hits: Float[np.ndarray, "lengths"],
    least: Float[np.ndarray, "lengths"],
    tokens: Int[np.ndarray, "lengths"],
    anywhere: bool,
) -> Float[np.ndarray, "windows"]:
    """Return, on a normal scale, how unlikely the hits of each window are if `least` are expected (binomial)."""
    h, few, n = (values @ _windows(len(hits), anywhere=anywhere) for values in (hits, least, tokens))
    return np.asarray(-ndtri(betainc(np.maximum(h, 1e-9), n - h + 1, few / n)))


def _statistic(
    excess: Float[np.ndarray, "*samples repeats lengths"],
    is_measured: Bool[np.ndarray, "repeats lengths"],
    anywhere: bool,
    equal: Float[np.ndarray, "windows"] | float = np.inf,
) -> Float[np.ndarray, "*samples"]:
    """Return the largest t of the windows of the joint test; each length has two repeats or more.

    A window's t has the degrees of freedom of the repeats that its variance comes from (`equal_shares`; n - 1 where
    every length has n). Wallace's normal scale (1959, Annals of Mathematical Statistics 30) makes windows of few and of
    many repeats comparable; without it, one length of two repeats would decide the quantile alone.
    """
    windows, count = _windows(excess.shape[-1], anywhere=anywhere), is_measured.sum(0)
    mean = np.where(is_measured, excess, 0.0).sum(-2) / count
    deviation = np.where(is_measured, excess - mean[..., None, :], 0.0) / np.sqrt(count * (count - 1))
    means, error = mean @ windows, np.sqrt(((deviation @ windows) ** 2).sum(-2))
    varies = error > 1e-12
    t = np.divide(means, error, out=np.full(means.shape, -np.inf), where=varies)
    variance = (is_measured / (count * (count - 1))) @ windows  # shares of each repeat
    freedom = equal_shares(variance) - 1
    scale = (8 * freedom + 1) / (8 * freedom + 3) * np.sqrt(freedom)
    found = np.sign(t) * scale * np.sqrt(np.log1p(t**2 / freedom))
    return np.asarray(np.where(~varies & (means > 0), equal, found).max(-1))


@lru_cache(maxsize=64)
def _windows(lengths: int, *, anywhere: bool) -> Float[np.ndarray, "lengths windows"]:
    """Return 1 for the lengths of each window of the joint test: all windows that begin at the first length;
    `anywhere`: also those of 1, 2, 4, ... lengths that begin at any length."""
    found = [(0, end) for end in range(1, lengths + 1)]
    size = 1
    while anywhere and size < lengths:
        found += [(begin, begin + size) for begin in range(1, lengths - size + 1)]
        size *= 2
    begins, ends = np.array(found).T
    at = np.arange(lengths)[:, None]
    return ((begins <= at) & (at < ends)).astype(float)


@lru_cache(maxsize=1024)
def _joint_quantile(repeats: tuple[int, ...], anywhere: bool, level: float) -> float:
    """Return the 1 - level quantile of the statistic under the null hypothesis, with the `repeats` of each length."""
    rng = np.random.default_rng(0)
    is_measured = np.arange(max(repeats))[:, None] < np.array(repeats)
    largest = [
        _statistic(rng.standard_normal((200, *is_measured.shape)), is_measured, anywhere)
        for _ in range(JOINT_SAMPLES // 200)
    ]
    return float(np.quantile(np.concatenate(largest), 1 - level))
