"""Means with intervals, two-sided tests of them, and their correction for several tests.

Nothing is tested with fewer than LEAST_PAIRS values. If all values are the same, an error cannot be estimated and
Student's t does not apply; p is then that of a sign test, 2^(1 - n) two-sided and 2^-n one-sided, so that a verdict
needs at least six equal differences, and an equivalence five.
"""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from scipy.special import ndtr, stdtr, stdtrit

LEVEL = 0.05
LEAST_PAIRS = 3  # values; with fewer nothing is tested
NO_SPREAD = 1e-9  # standard errors smaller than this share of a value are rounding errors


def measured_mean(values: Float[np.ndarray, "repeats *cells"]) -> Float[np.ndarray, "*cells"]:
    """Return the means over the repeats that have a value; NaN where none has."""
    found = np.isfinite(values)
    count = found.sum(0)
    return np.divide(np.where(found, values, 0.0).sum(0), count, out=np.full(count.shape, np.nan), where=count > 0)


def interval(
    values: Float[np.ndarray, "repeats *cells"], share: float = 0.95
) -> tuple[Float[np.ndarray, "*cells"], Float[np.ndarray, "*cells"]]:
    """Return the interval (Student's) that holds the mean over repeats with probability `share`, in each cell; NaN
    under two repeats, and where all values are the same, so that their spread is unknown."""
    count = np.isfinite(values).sum(0)
    mean = measured_mean(values)
    freedom = np.maximum(count - 1, 1)
    error = np.sqrt(measured_mean((values - mean) ** 2) / freedom)
    is_known = (count > 1) & (error > NO_SPREAD * np.abs(mean))
    half = np.where(is_known, stdtrit(freedom, 0.5 + share / 2) * error, np.nan)
    return np.asarray(mean - half), np.asarray(mean + half)  # arrays also for one cell


def bands(
    values: Float[np.ndarray, "repeats *cells"], least: float = 0.0, most: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return the 95 % interval of a mean, cut to the values possible, by default those of an accuracy."""
    low, high = (np.asarray(np.clip(end, least, most)) for end in interval(values))
    return low, high


def student_mean(values: Float[np.ndarray, "values"], most: float = math.inf) -> tuple[float, float, float, float]:
    """Return the mean, such as of paired differences, its 95 % interval (Student's, cut to ± `most`, the largest value
    possible), and the two-sided p against a mean of 0, which the interval excludes if p is below 0.05. p is NaN under
    LEAST_PAIRS values; the interval is NaN under two values, and if all values are the same, so that their spread is
    unknown."""
    n = len(values)
    if n < 2:
        return (float(values.mean()) if n else np.nan), np.nan, np.nan, np.nan
    value, error, freedom = mean_error(values)
    half = float(stdtrit(freedom, 1 - LEVEL / 2)) * error
    if error <= NO_SPREAD * abs(value):
        half = np.nan
    p = two_sided(value, error, freedom, n) if n >= LEAST_PAIRS else np.nan
    return value, *within(value - half, value + half, most), p


def within(low: float, high: float, most: float) -> tuple[float, float]:
    """Return an interval cut to ± `most`; NaN stays NaN."""
    return float(np.clip(low, -most, most)), float(np.clip(high, -most, most))


def has_no_width(value: float, low: float, high: float) -> bool:
    """Return whether an interval has no width, as when all values are the same: the error is then unknown."""
    return high - low <= 2 * NO_SPREAD * abs(value)


def two_sided(value: float, error: float, freedom: float, values: int) -> float:
    """Return p of the t test; of a sign test if there is no spread."""
    if value == 0.0:
        return 1.0
    if error <= NO_SPREAD * abs(value):
        return 0.5 ** (values - 1)
    return float(2 * stdtr(freedom, -abs(value) / error))


def tost(difference: float, error: float, freedom: float, margin: float, values: int) -> float:
    """Return the larger p of the two one-sided tests (Schuirmann 1987) against a difference of ± margin; of a sign test
    if there is no spread."""
    if error <= NO_SPREAD * abs(difference):
        return 0.5**values if abs(difference) < margin else 1.0
    return float(stdtr(freedom, -(margin - abs(difference)) / error))


def paired_tost(differences: Float[np.ndarray, "values"], margin: float) -> float:
    """Return p as `tost` for answers that are right or wrong, by score tests of the difference of two paired shares
    (Tango 1998, Statistics in Medicine 17), which hold where few answers change or none. Of scores from 0 to 1, a given
    mean difference changes the fewest answers if it changes each by 1, so they hold for graded answers too.

    Args:
        differences: of paired answers: -1, 0 or 1.
        margin: of the difference of the shares, below 1.
    """
    n, gained, lost = len(differences), int((differences > 0).sum()), int((differences < 0).sum())

    def beyond(far: int, near: int) -> float:
        """Return p against a difference of `margin` or more in the direction of `far`."""
        b = (2 * n - far + near) * margin - far - near
        share = (math.sqrt(b**2 + 8 * n * near * margin * (1 - margin)) - b) / (4 * n)  # expected share of `near`
        return float(ndtr((far - near - n * margin) / math.sqrt(n * (2 * share + margin * (1 - margin)))))

    return max(beyond(gained, lost), beyond(lost, gained))


def mean_error(differences: np.ndarray) -> tuple[float, float, float]:
    """Return the mean, its standard error and the degrees of freedom."""
    n = len(differences)
    error = 0.0 if np.ptp(differences) == 0 else float(differences.std(ddof=1) / np.sqrt(n))
    return float(differences.mean()), error, n - 1.0


def equal_shares(shares: Float[np.ndarray, "repeats *cells"]) -> Float[np.ndarray, "*cells"]:
    """Return the number of repeats with equal shares of a variance that would estimate it as well as repeats with these
    shares do: one more than its degrees of freedom (after Satterthwaite 1946, Biometrics Bulletin 2)."""
    return np.asarray(shares.sum(0) ** 2 / (shares**2).sum(0))


def welch_error(first: np.ndarray, second: np.ndarray) -> tuple[float, float, float]:
    """Return the difference of two means of unpaired values, second minus first, its standard error and its degrees of
    freedom (Welch 1947)."""
    squared = [mean_error(values)[1] ** 2 for values in (first, second)]
    freedom = welch_freedom(squared, [len(first) - 1.0, len(second) - 1.0])
    return float(second.mean() - first.mean()), float(np.sqrt(sum(squared))), freedom


def welch_freedom(squared_errors: Sequence[float], freedoms: Sequence[float]) -> float:
    """Return the degrees of freedom of a difference of two means (Welch 1947)."""
    parts = sum(e**2 / n for e, n in zip(squared_errors, freedoms, strict=True))
    return sum(squared_errors) ** 2 / parts if parts else min(freedoms)


def holm(p: Sequence[float | None]) -> list[float | None]:
    """Correct p values for several tests: multiply the i-th smallest of n by n - i + 1, not below the one before, at
    most 1 (Holm 1979, Scandinavian Journal of Statistics 6). None and NaN, as of a single value, become None and are
    not counted."""
    order = sorted((value, index) for index, value in enumerate(p) if value is not None and not math.isnan(value))
    corrected: list[float | None] = [None] * len(p)
    largest = 0.0
    for rank, (value, index) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * value))
        corrected[index] = largest
    return corrected
