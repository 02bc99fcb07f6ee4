"""The numbers of a curve: crossings of thresholds and areas under it; for the measured curve, and for curves sampled
around it (see `farspan.stats.memory_lengths`)."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit

from farspan.stats.forgetting_curves import (
    MeasuredCurve,
    gap,
    index_by_repeat,
    is_judged,
    memory_index,
    repeats_at,
    repeats_near,
    whole_repeats,
)
from farspan.stats.intervals import equal_shares, measured_mean

FINE = 0.99  # copy accuracy
COARSE = 0.01  # gap
HALF_LIFE = 0.5  # memory index
REACH = 0.05  # memory index
LEVELS = {"fine": FINE, "coarse": COARSE, "half_life": HALF_LIFE, "reach": REACH}
CROSSINGS = tuple(LEVELS)
HEADLINES = (*CROSSINGS, "span", "gap_area")
BOOTSTRAPS = 2000
RANDOM_NUMBERS = 40_000_000  # random numbers of one bootstrap, at most (320 MB)


def headline(curve: MeasuredCurve, names: Sequence[str] = HEADLINES) -> dict[str, tuple[float, bool]]:
    """Return, by name, the value and whether it is right-censored, for a curve with a good row at every length."""
    found = _headlines(curve, measured_mean(curve.copy)[None], gap(curve)[None], memory_index(curve)[None], names)
    return {name: (float(values[0]), bool(censored[0])) for name, (values, censored) in found.items()}


def headlines_sampled(
    curve: MeasuredCurve, multipliers: Float[np.ndarray, "samples repeats"], names: Sequence[str] = HEADLINES
) -> dict[str, tuple[Float[np.ndarray, "samples"], np.ndarray]]:
    """Return the values and censoring of curves sampled around a curve, one for each row of multipliers."""
    by_repeat = curve.copy, curve.copy - curve.control, index_by_repeat(curve)
    C, G, m = (_sampled(values, multipliers) for values in by_repeat)
    return _headlines(curve, C, G, m, names)


def multipliers(repeats: int, count: int, seed: int) -> Float[np.ndarray, "samples repeats"]:
    """Return the multipliers g of the bootstrap, the same for compared curves of the same targets. With thousands of
    repeats there are fewer samples, so that all fit into memory."""
    count = min(count, max(100, RANDOM_NUMBERS // max(1, repeats)))
    return np.random.default_rng(seed).standard_normal((count, repeats))


def _sampled(
    values: Float[np.ndarray, "repeats lengths"], multipliers: Float[np.ndarray, "samples repeats"]
) -> Float[np.ndarray, "samples lengths"]:
    """Return C*, G* or m* of the bootstrap. A length with one repeat has no spread and is not changed."""
    mean, count = measured_mean(values), np.isfinite(values).sum(0)
    deviation = np.where(np.isfinite(values), values - mean, 0.0) / np.sqrt(np.maximum(count * (count - 1), 1))
    return mean + multipliers @ deviation


def _headlines(
    curve: MeasuredCurve,
    C: Float[np.ndarray, "samples lengths"],
    G: Float[np.ndarray, "samples lengths"],
    m: Float[np.ndarray, "samples lengths"],
    names: Sequence[str],
) -> dict[str, tuple[Float[np.ndarray, "samples"], np.ndarray]]:
    """Return the numbers of many mean curves of copy accuracy, gap and memory index at the lengths of `curve`."""
    judged = is_judged(curve)
    L, w = curve.lengths[judged], repeats_at(curve)[judged]
    found = {}
    for name in names:
        values = {"fine": C, "coarse": G, "gap_area": G}.get(name, m)
        if name in LEVELS:
            found[name] = crossings(L, values[:, judged], LEVELS[name], w, warm_up=name == "fine")
        else:
            found[name] = _areas(curve.lengths, values), m[:, -1] > REACH
    return found


def crossings(
    lengths: np.ndarray,
    values: Float[np.ndarray, "samples lengths"],
    level: float,
    weights: np.ndarray,
    *,
    warm_up: bool = False,
) -> tuple[Float[np.ndarray, "samples"], np.ndarray]:
    """Return the length at which the values fall to `level`, and whether it is beyond the last one: isotonic fit,
    linear interpolation; 0 if the fit never exceeds it. `warm_up`: start at the first length that exceeds the level.

    The fit itself is not computed. It exceeds the level up to the maximum of the sum of weight · (value - level).
    Before that point it is the least mean of the ranges that end there, after it the largest mean of the ranges that
    begin there (Robertson, Wright and Dykstra 1988, Order Restricted Statistical Inference, section 1.4).
    """
    at = np.arange(len(lengths) + 1)
    warm = (at[:-1] >= (values > level).argmax(1)[:, None]) if warm_up else np.ones(values.shape, bool)
    sums = np.zeros((2, len(values), len(at)))  # of weight · (value - level) and of weight, before each length
    np.cumsum([warm * weights * (values - level), warm * weights], axis=2, out=sums[:, :, 1:])
    most = sums[0].max(1, keepdims=True) - 1e-12 * weights.sum()  # of sums that differ by rounding, the first
    end = (sums[0] >= most).argmax(1)  # lengths up to the crossing
    result = np.concatenate([[0], lengths])[end].astype(float)
    inside = np.flatnonzero((end > 0) & (end < len(lengths)))
    excess, weight = sums[:, inside] - sums[:, inside, end[inside]][:, :, None]
    side = at - end[inside, None]
    mean = np.divide(excess, weight, out=np.zeros_like(excess), where=side != 0)
    above, below = np.where(side < 0, mean, np.inf).min(1), np.where(side > 0, mean, -np.inf).max(1)
    result[inside] += above / (above - below) * (lengths[end[inside]] - lengths[end[inside] - 1])
    return result, end == len(lengths)


def isotonic(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    from scipy.optimize import isotonic_regression  # takes half a second, and plans do not need it

    return isotonic_regression(values, weights=weights, increasing=False).x


def _areas(lengths: np.ndarray, values: Float[np.ndarray, "samples lengths"]) -> Float[np.ndarray, "samples"]:
    """Return ∫ dL from 0 to the last length; before the first length, its value is used."""
    return np.trapezoid(np.concatenate([values[:, :1], values], 1), np.concatenate([[0], lengths]))


def expansion(repeats: float) -> float:
    """Return the number of standard errors from a value to an end of its 95 % interval: Student's quantile."""
    return float(stdtrit(repeats - 1, 0.975))


def repeats_of(curve: MeasuredCurve, name: str, value: float) -> float:
    """Return the number of repeats that a value depends on: those near a crossing; for an area, of whose variance each
    repeat has a share, as many as `equal_shares`: n where all lengths have n."""
    if name in CROSSINGS:
        return float(max(2, min(repeats_near(curve, value), whole_repeats(curve))))
    is_measured, count = np.isfinite(curve.copy), repeats_at(curve)
    shares = (is_measured / np.maximum(count * (count - 1), 1))[:, count > 1].sum(1)
    return max(2.0, round(float(equal_shares(shares)), 6)) if shares.any() else 2.0
