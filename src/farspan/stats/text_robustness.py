"""Test whether another text changes the numbers of a curve.

Liu et al. 2024, arXiv 2410.04727, section 3.4 and appendix A: a one-way ANOVA and a Kruskal-Wallis test at each length
over sources of the irrelevant text, where "not significant" is read as "equal". We do both, and add:

    paired        all sources have the same targets, so each target is its own control: Friedman's test for three
                  sources or more, sign flips for two. Differences between targets (several points) cancel out
    equivalence   two one-sided tests (Schuirmann 1987): the 90 % interval of the mean difference of every two sources
                  is within ± margin. Only this shows that the text does not matter
    correction    Holm 1979 over the lengths, for each kind of test
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit
from scipy.stats import chi2, f_oneway, friedmanchisquare, kruskal, mannwhitneyu, permutation_test

from farspan.stats.forgetting_curves import MeasuredCurve
from farspan.stats.intervals import LEAST_PAIRS, LEVEL, has_no_width, holm, mean_error, tost, welch_error, within

Half = Literal["copy", "control"]
Verdict = Literal["equivalent", "different", "undecided"]

MARGIN = 0.01  # accuracy; a difference within it does not matter
PERMUTATIONS = 9999  # at most; up to 13 pairs, all sign flips are enumerated
MOST_PAIRS = 100  # with more, the smallest possible p is the same, or negligible


@dataclass(frozen=True)
class AtLength:
    """The sources at one length. Accuracies from 0 to 1; None if nothing was tested."""

    length: int  # tokens
    means: dict[str, float]  # by source, over all its values
    pairs: int  # targets that all sources share
    anova: float | None  # p, as in the paper: unpaired, over all values
    kruskal: float | None  # likewise
    paired: float | None = None  # p of Friedman's test or of sign flips
    sources: tuple[str, str] | None = None  # the pair whose interval extends farthest from 0
    difference: float | None = None  # of their means, second minus first, over the shared targets
    low: float | None = None  # its 90 % interval, Student's (Welch's if no targets are shared)
    high: float | None = None
    tost: float | None = None  # p of the two one-sided tests, the largest over every two sources
    verdict: Verdict = "undecided"
    anova_holm: float | None = None  # corrected for the number of lengths
    kruskal_holm: float | None = None
    paired_holm: float | None = None
    tost_holm: float | None = None
    reason: str = ""  # why nothing was tested

    @property
    def interval(self) -> str:
        """The interval as text, in points of accuracy; "" if there is none, or one without width."""
        if self.difference is None or self.low is None or self.high is None:
            return ""
        if has_no_width(self.difference, self.low, self.high):
            return ""
        return f"[{100 * self.low:+.1f}, {100 * self.high:+.1f}]"


@dataclass(frozen=True)
class Robustness:
    """The tests whether the source of a text changes an accuracy.

    At a length: `equivalent` if p of the two one-sided tests is below 0.05 for every two sources (their 90 % intervals
    are within the margin), even if a difference within the margin is certain; else `different` if the corrected p of
    the paired test is below 0.05 (of Kruskal-Wallis, if the sources have different targets); else `undecided`. Overall:
    `different` if any length is, `equivalent` if every length tested is (all must hold, so no correction is needed).
    """

    half: Half
    sources: tuple[str, ...]
    margin: float
    test: str  # the test of `paired` and `verdict`
    lengths: tuple[AtLength, ...]
    verdict: Verdict
    notes: tuple[str, ...] = ()


def robustness(
    curves: Mapping[str, MeasuredCurve], half: Half = "control", *, margin: float = MARGIN, seed: int = 0
) -> Robustness:
    """Compare the accuracy of copy or control between sources of a text, by name, at the lengths that all have.

    Args:
        margin: accuracy; smaller differences do not matter.

    Raises:
        ValueError: fewer than two sources, an impossible margin, or no length that all sources measured.
    """
    if half not in ("copy", "control"):
        raise ValueError(f"half: got {half!r}, expected 'copy' or 'control'")
    if len(curves) < 2:
        raise ValueError(
            f"{len(curves)} source of text ({', '.join(curves) or 'none'}): a comparison needs two or more. Measure "
            "other texts too"
        )
    if not 0 < margin < 1:
        raise ValueError(f"a margin of {margin} is not between 0 and 1; 0.01 is one point of accuracy")
    measured = {name: one.lengths[np.isfinite(getattr(one, half)).any(0)] for name, one in curves.items()}
    common = sorted(set.intersection(*(set(lengths.tolist()) for lengths in measured.values())))
    if not common:
        raise ValueError(
            "no length was measured with all sources: "
            + "; ".join(f"{name} has {', '.join(map(str, found)) or 'none'}" for name, found in measured.items())
            + ". Measure them at the same --lengths"
        )
    cells = {length: {name: _values(one, half, length) for name, one in curves.items()} for length in common}
    shared = {
        length: set.intersection(*(set(found) - {""} for _, found in at.values())) for length, at in cells.items()
    }
    is_paired = any(shared.values())
    found = [_at_length(n, cells[n], sorted(shared[n]), is_paired, margin, seed) for n in common]
    corrected: dict[str, Any] = {
        name: holm([getattr(one, name) for one in found]) for name in ("anova", "kruskal", "paired", "tost")
    }
    for i, one in enumerate(found):
        decides = corrected["paired" if is_paired else "kruskal"][i]
        verdict: Verdict = "undecided"
        if one.tost is not None and one.tost < LEVEL:
            verdict = "equivalent"
        elif not one.reason and decides is not None and decides < LEVEL:
            verdict = "different"
        found[i] = replace(one, verdict=verdict, **{f"{name}_holm": p[i] for name, p in corrected.items()})
    tested = [one.verdict for one in found if not one.reason]
    overall: Verdict = "undecided"
    if "different" in tested:
        overall = "different"
    elif tested and set(tested) == {"equivalent"}:
        overall = "equivalent"
    test = ("sign flips" if len(curves) == 2 else "Friedman") if is_paired else "Kruskal-Wallis"
    return Robustness(half, tuple(curves), margin, test, tuple(found), overall, tuple(_notes(found, test, len(curves))))


def _values(curve: MeasuredCurve, half: Half, length: int) -> tuple[np.ndarray, dict[str, float]]:
    """Return all values at a length, and by target those whose target is known."""
    column = int(np.flatnonzero(curve.lengths == length)[0])
    values = getattr(curve, half)[:, column]
    good = np.isfinite(values)
    targets = curve.targets[good, column].tolist()
    return values[good], {target: float(value) for target, value in zip(targets, values[good], strict=True) if target}


def _at_length(
    length: int,
    cells: Mapping[str, tuple[np.ndarray, dict[str, float]]],
    shared: Sequence[str],
    is_paired: bool,
    margin: float,
    seed: int,
) -> AtLength:
    values = {name: all_values for name, (all_values, _) in cells.items()}
    compared = {name: np.array([by[target] for target in shared]) for name, (_, by) in cells.items()}
    if not is_paired:
        compared = values
    groups = list(values.values())
    unpaired = min(map(len, groups)) >= LEAST_PAIRS
    least = min(map(len, compared.values()))
    result = AtLength(
        length,
        {name: float(group.mean()) for name, group in values.items()},
        len(shared),
        _anova(groups) if unpaired else None,
        _kruskal(groups) if unpaired else None,
    )
    if least < LEAST_PAIRS:
        what = "targets are shared" if is_paired else "values of a source"
        return replace(result, reason=f"{least} {what}; a test needs {LEAST_PAIRS}")
    intervals = {}
    for pair in combinations(compared, 2):
        first, second = compared[pair[0]], compared[pair[1]]
        mean, error, freedom = mean_error(second - first) if is_paired else welch_error(first, second)
        half = float(stdtrit(freedom, 0.95)) * error
        equivalent = tost(mean, error, freedom, margin, min(len(first), len(second)))
        intervals[pair] = mean, *within(mean - half, mean + half, 1.0), equivalent
    farthest = max(intervals, key=lambda pair: max(-intervals[pair][1], intervals[pair][2]))
    mean, low, high, _ = intervals[farthest]
    return replace(
        result,
        paired=_paired(np.stack(list(compared.values())), seed) if is_paired else None,
        sources=farthest,
        difference=mean,
        low=low,
        high=high,
        tost=max(p for *_, p in intervals.values()),
    )


def _anova(groups: Sequence[np.ndarray]) -> float | None:
    if all(np.ptp(group) == 0 for group in groups):  # no variance within: F is 0 / 0 or infinite
        return 1.0 if np.ptp(np.concatenate(groups)) == 0 else None
    return float(f_oneway(*groups).pvalue)


def _kruskal(groups: Sequence[np.ndarray]) -> float:
    if np.ptp(np.concatenate(groups)) == 0:
        return 1.0
    if len(groups) == 2:  # the same test of two sources, exact for few values, where the chi-square is too small
        return float(mannwhitneyu(*groups).pvalue)
    return float(kruskal(*groups).pvalue)


def _paired(values: Float[np.ndarray, "sources targets"], seed: int) -> float:
    if (np.ptp(values, axis=0) == 0).all():
        return 1.0
    if len(values) > 2:
        return float(friedmanchisquare(*values).pvalue)
    return float(
        permutation_test(
            (values[1] - values[0],),
            np.mean,
            permutation_type="samples",  # of a single sample: its signs
            n_resamples=PERMUTATIONS,
            random_state=np.random.default_rng(seed),
        ).pvalue
    )


def _notes(found: Sequence[AtLength], test: str, sources: int) -> list[str]:
    notes = []
    if untested := [one for one in found if one.reason]:
        where = ", ".join(f"{one.length:,}" for one in untested)
        notes.append(f"not tested at {where}: {untested[0].reason}")
    tested = [one.pairs for one in found if one.paired is not None]
    if tested and len(tested) * _smallest_p(test, max(tested), sources) >= LEVEL:
        possible = range(LEAST_PAIRS, MOST_PAIRS)
        needed = next((n for n in possible if len(tested) * _smallest_p(test, n, sources) < LEVEL), None)
        notes.append(
            f"{max(tested)} repeats at {len(tested)} lengths are too few to show any difference: measure "
            f"{f'at least {needed} repeats, or ' if needed else ''}fewer lengths"
        )
    if test == "Kruskal-Wallis":
        notes.append(
            "the texts were measured with different targets, whose differences can hide those between the texts"
        )
    return notes


def _smallest_p(test: str, pairs: int, sources: int) -> float:
    """Return the smallest possible p of the test: that of sources ranked in the same order by every target."""
    if test == "Friedman":
        return float(chi2.sf(pairs * (sources - 1), sources - 1))
    return max(2.0**-pairs, 1 / (PERMUTATIONS + 1)) * 2
