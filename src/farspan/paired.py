"""Curves against curves: whether another text changes the numbers, and by how much two runs differ.

Liu et al. 2024, arXiv 2410.04727, section 3.4 and appendix A: a one-way ANOVA and a Kruskal-Wallis test at each length
over sources of the irrelevant text, and what is not significant is read as equal. We make both, and what they lack:

    paired        all sources ask for the same targets, so each target is its own control: Friedman's test for three
                  sources or more, sign flips for two. What targets differ by, several points, falls out
    equivalence   two one-sided tests (Schuirmann 1987): the 90 % interval of the mean difference of every two sources
                  lies within ± margin. Only this says that the text does not matter
    correction    Holm 1979 over the lengths, for each kind of test

Few repeats: nothing is tested with fewer than LEAST_PAIRS of them. Where all values are the same, an error cannot be
estimated and Student's t does not apply; the p given there is that of signs, 2^(1 - n) two-sided and 2^-n one-sided,
so that at least six equal differences are needed for a verdict, and five for an equivalence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, count
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float
from scipy.stats import chi2, f_oneway, friedmanchisquare, kruskal, mannwhitneyu, permutation_test
from scipy.stats import t as student

from farspan import stats

Half = Literal["copy", "control"]
Verdict = Literal["equivalent", "different", "undecided"]

MARGIN = 0.01  # accuracy; a difference within it does not matter
LEVEL = 0.05
LEAST_PAIRS = 3  # targets, or values of each source where targets differ; with fewer nothing is tested
NO_SPREAD = 1e-9  # standard errors smaller than this share of a value are rounding
PERMUTATIONS = 9999  # at most; up to 13 pairs all sign flips are made
COMPARED = ("half_life", "reach", "span", "fine")


@dataclass(frozen=True)
class AtLength:
    """The sources at one length. Accuracies between 0 and 1; None where nothing was tested."""

    length: int  # tokens
    means: dict[str, float]  # by source, over all its values
    pairs: int  # targets that all sources were asked for
    anova: float | None  # p, as in the paper: unpaired, over all values
    kruskal: float | None  # likewise
    paired: float | None  # p of Friedman's test or of sign flips
    sources: tuple[str, str] | None  # the two whose interval reaches farthest from 0
    difference: float | None  # of their means, second minus first, over the shared targets
    low: float | None  # its 90 % interval, Student's (Welch's where no targets are shared)
    high: float | None
    tost: float | None  # p of the two one-sided tests, the largest over every two sources
    verdict: Verdict = "undecided"
    anova_holm: float | None = None  # corrected for the number of lengths
    kruskal_holm: float | None = None
    paired_holm: float | None = None
    tost_holm: float | None = None
    reason: str = ""  # why nothing was tested


@dataclass(frozen=True)
class Robustness:
    """Whether the source of a text changes an accuracy.

    At a length: `equivalent` where p of the two one-sided tests is below 0.05 for every two sources (their 90 %
    intervals lie within the margin), also when a difference within it is certain; else `different` where the
    corrected p of the paired test is below 0.05 (of Kruskal-Wallis, where the sources have other targets); else
    `undecided`. Over all: `different` if it is at any
    length, `equivalent` if it is at every length tested (all must hold, so no correction is due).
    """

    half: Half
    sources: tuple[str, ...]
    margin: float
    test: str  # what `paired` and `verdict` rest on
    lengths: tuple[AtLength, ...]
    verdict: Verdict
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Difference:
    """How much larger a number of the second curve is than the first's, with its 95 % interval.

    The interval is difference ± t · s of the bootstrap of `stats`, with the same multipliers for a target in both
    curves, and p is two-sided of the t test with that s: below 0.05 where the interval leaves out 0.
    """

    name: str  # one of COMPARED
    curves: tuple[str, str]
    values: tuple[float, float]
    value: float  # second minus first
    low: float | None  # None: unbounded, for a crossing that may lie beyond the lengths measured
    high: float | None
    p: float | None  # None with too few repeats, or where crossings beyond the lengths leave even the sign open
    pairs: int  # targets shared; 0: unpaired
    censored: tuple[str, ...]  # of which curves the value is larger than measured
    unit: str = "tokens"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def holm(p: Sequence[float | None]) -> list[float | None]:
    """Corrected for several tests: the i-th smallest of n times n - i + 1, not below the one before, at most 1
    (Holm 1979, Scandinavian Journal of Statistics 6). None stays and does not count."""
    order = sorted((value, index) for index, value in enumerate(p) if value is not None)
    corrected: list[float | None] = [None] * len(p)
    largest = 0.0
    for rank, (value, index) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * value))
        corrected[index] = largest
    return corrected


# other texts


def robustness(
    curves: Mapping[str, stats.Curve], half: Half = "control", *, margin: float = MARGIN, seed: int = 0
) -> Robustness:
    """Compares one half's accuracy between sources of a text, by name, at the lengths that all have.

    Args:
        margin: accuracy; differences within it count as none.

    Raises:
        ValueError: fewer than two sources, a margin that is none, or no length that all sources measured.
    """
    if half not in ("copy", "control"):
        raise ValueError(f"half {half!r} is neither 'copy' nor 'control'")
    if len(curves) < 2:
        raise ValueError(
            f"{len(curves)} source of text ({', '.join(curves) or 'none'}): a comparison needs two or more"
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
    anova, kruskal_wallis = holm([one.anova for one in found]), holm([one.kruskal for one in found])
    paired, tost = holm([one.paired for one in found]), holm([one.tost for one in found])
    for i, one in enumerate(found):
        decides = paired[i] if is_paired else kruskal_wallis[i]
        verdict: Verdict = "undecided"
        if one.tost is not None and one.tost < LEVEL:
            verdict = "equivalent"
        elif not one.reason and decides is not None and decides < LEVEL:
            verdict = "different"
        found[i] = replace(
            one,
            verdict=verdict,
            anova_holm=anova[i],
            kruskal_holm=kruskal_wallis[i],
            paired_holm=paired[i],
            tost_holm=tost[i],
        )
    tested = [one.verdict for one in found if not one.reason]
    overall: Verdict = "undecided"
    if "different" in tested:
        overall = "different"
    elif tested and set(tested) == {"equivalent"}:
        overall = "equivalent"
    test = ("sign flips" if len(curves) == 2 else "Friedman") if is_paired else "Kruskal-Wallis"
    return Robustness(half, tuple(curves), margin, test, tuple(found), overall, tuple(_notes(found, test, len(curves))))


def _values(curve: stats.Curve, half: Half, length: int) -> tuple[np.ndarray, dict[str, float]]:
    """All values at a length, and by target those whose target is known."""
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
        *(None, None, None, None, None, None),
    )
    if least < LEAST_PAIRS:
        what = "targets are shared" if is_paired else "values of a source"
        return replace(result, reason=f"{least} {what}; a test needs {LEAST_PAIRS}")
    intervals = {}
    for pair in combinations(compared, 2):
        first, second = compared[pair[0]], compared[pair[1]]
        mean, error, freedom = _paired_error(second - first) if is_paired else _welch_error(first, second)
        half = float(student.ppf(0.95, freedom)) * error
        equivalent = _tost(mean, error, freedom, margin, min(len(first), len(second)))
        intervals[pair] = mean, mean - half, mean + half, equivalent
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


def _paired_error(differences: np.ndarray) -> tuple[float, float, float]:
    """Mean, its standard error, degrees of freedom."""
    n = len(differences)
    error = 0.0 if np.ptp(differences) == 0 else float(differences.std(ddof=1) / np.sqrt(n))
    return float(differences.mean()), error, n - 1.0


def _welch_error(first: np.ndarray, second: np.ndarray) -> tuple[float, float, float]:
    """The same of the difference of two means of other targets (Welch 1947)."""
    squared = [_paired_error(values)[1] ** 2 for values in (first, second)]
    freedom = _welch_freedom(squared, [len(first) - 1.0, len(second) - 1.0])
    return float(second.mean() - first.mean()), float(np.sqrt(sum(squared))), freedom


def _welch_freedom(squared_errors: Sequence[float], freedoms: Sequence[float]) -> float:
    parts = sum(e**2 / n for e, n in zip(squared_errors, freedoms, strict=True))
    return sum(squared_errors) ** 2 / parts if parts else min(freedoms)


def _tost(difference: float, error: float, freedom: float, margin: float, values: int) -> float:
    """p of the larger of the two one-sided tests against a difference of ± margin."""
    if error <= NO_SPREAD * abs(difference):
        return 0.5**values if abs(difference) < margin else 1.0
    return float(student.sf((margin - abs(difference)) / error, freedom))


def _notes(found: Sequence[AtLength], test: str, sources: int) -> list[str]:
    notes = []
    if untested := [one for one in found if one.reason]:
        where = ", ".join(f"{one.length:,}" for one in untested)
        notes.append(f"not tested at {where}: {untested[0].reason}")
    tested = [one.pairs for one in found if one.paired is not None]
    if tested and len(tested) * _smallest_p(test, max(tested), sources) >= LEVEL:
        needed = next(n for n in count(LEAST_PAIRS) if len(tested) * _smallest_p(test, n, sources) < LEVEL)
        notes.append(
            f"with {max(tested)} shared targets at {len(tested)} lengths no difference can be shown, however large: "
            f"measure {needed} repeats, or fewer lengths"
        )
    if test == "Kruskal-Wallis":
        notes.append("the sources share no targets, so what targets differ by hides what sources differ by")
    return notes


def _smallest_p(test: str, pairs: int, sources: int) -> float:
    """What the test says of sources that every target puts into the same order."""
    if test == "Friedman":
        return float(chi2.sf(pairs * (sources - 1), sources - 1))
    return max(2.0**-pairs, 1 / (PERMUTATIONS + 1)) * 2


# two runs


def differences(
    a: stats.Curve,
    b: stats.Curve,
    *,
    names: tuple[str, str] = ("a", "b"),
    seed: int = 0,
    bootstraps: int = stats.BOOTSTRAPS,
) -> list[Difference]:
    """b minus a, in tokens, over the targets that both were asked for; the span up to the last length of both.

    Repeats are paired by their target, whatever their order. Where a repeat has another target at each length, as in
    the paper's protocol, at the lengths that both have.

    Raises:
        ValueError: the two share fewer than 2 targets.
    """
    first, second = _of_shared_targets(a, b)
    pairs = len(first.copy)
    if pairs < 2:
        known = [sorted(set(one.targets[one.targets != ""].tolist())) for one in (a, b)]
        said = [
            f"{name} has {len(found)} targets{f' ({found[0]}, ...)' if found else ' that its rows name'}"
            for name, found in zip(names, known, strict=True)
        ]
        raise ValueError(
            f"{names[0]} and {names[1]} share {'one' if pairs else 'no'} target at any length, and 2 are needed: "
            f"{' and '.join(said)}. Measure both with the same text, tokenizer, seed and longest length; "
            f"models with different tokenizers are compared in characters"
        )
    g = stats.multipliers(pairs, bootstraps, seed)
    return _differences(first, second, (g, g), names, (1.0, 1.0), pairs, "tokens")


def differences_in_characters(
    a: stats.Curve,
    b: stats.Curve,
    a_characters_per_token: float,
    b_characters_per_token: float,
    *,
    names: tuple[str, str] = ("a", "b"),
    seed: int = 0,
    bootstraps: int = stats.BOOTSTRAPS,
) -> list[Difference]:
    """b minus a in characters of the text, for models with different tokenizers, whose targets are never the same:
    unpaired.

    Raises:
        ValueError: characters per token that are no positive number, or a curve with fewer than 2 whole repeats.
    """
    scales = a_characters_per_token, b_characters_per_token
    curves = [one.kept(one.measured) for one in (a, b)]
    for name, one, scale in zip(names, curves, scales, strict=True):
        if not (np.isfinite(scale) and scale > 0):
            raise ValueError(f"{name}: {scale} characters per token is not a positive number")
        if (repeats := stats.whole_repeats(one)) < 2:
            raise ValueError(f"{name} has {repeats} repeats with both halves; an interval needs 2 or more")
    first, second = curves
    g = [stats.multipliers(len(one.copy), bootstraps, seed + i) for i, one in enumerate(curves)]
    return _differences(first, second, (g[0], g[1]), names, scales, 0, "characters")


def _differences(
    a: stats.Curve,
    b: stats.Curve,
    multipliers: tuple[np.ndarray, np.ndarray],
    names: tuple[str, str],
    scales: tuple[float, float],
    pairs: int,
    unit: str,
) -> list[Difference]:
    end = min(one.lengths[-1] * scale for one, scale in zip((a, b), scales, strict=True))
    same_end = [_until(one, round(end / scale)) for one, scale in zip((a, b), scales, strict=True)]
    whole = [(stats.headline(one), stats.headlines_drawn(one, g)) for one, g in zip((a, b), multipliers, strict=True)]
    ended = [
        numbers if cut is one else (stats.headline(cut), stats.headlines_drawn(cut, g))
        for one, cut, g, numbers in zip((a, b), same_end, multipliers, whole, strict=True)
    ]
    result = []
    for name in COMPARED:
        curves, numbers = (same_end, ended) if name == "span" else ([a, b], whole)
        found = [values[name] for values, _ in numbers]
        drawn = [draws[name] for _, draws in numbers]
        values = [value * scale for (value, _), scale in zip(found, scales, strict=True)]
        draws = [others * scale for (others, _), scale in zip(drawn, scales, strict=True)]
        repeats = [stats.repeats_behind(one, name, value) for one, (value, _) in zip(curves, found, strict=True)]
        freedom: float
        if pairs:
            error, freedom = float(np.std(draws[1] - draws[0])), min(repeats) - 1
        else:
            squared = [float(np.var(others)) for others in draws]
            error, freedom = float(np.sqrt(sum(squared))), _welch_freedom(squared, [n - 1.0 for n in repeats])
        value = values[1] - values[0]
        half = float(student.ppf(0.975, freedom)) * error
        # a crossing beyond the lengths measured may lie anywhere there; the span is asked up to a length
        is_open = [name != "span" and float(np.mean(beyond)) > 0.025 for _, beyond in drawn]
        censored = [name != "span" and is_censored for _, is_censored in found]
        sign_unknown = all(censored) or (censored[0] and value > 0) or (censored[1] and value < 0)
        result.append(
            Difference(
                name,
                names,
                (values[0], values[1]),
                value,
                None if is_open[0] else value - half,
                None if is_open[1] else value + half,
                None if sign_unknown or min(repeats) < LEAST_PAIRS else _two_sided(value, error, freedom, min(repeats)),
                pairs,
                tuple(label for label, is_censored in zip(names, censored, strict=True) if is_censored),
                unit,
            )
        )
    return result


def student_mean(values: Float[np.ndarray, "values"]) -> tuple[float, float, float, float]:
    """The mean, such as of paired differences, its 95 % interval (Student's), and the two-sided p against a mean of 0,
    which the interval leaves out where p is below 0.05. The interval is NaN under two values, p under LEAST_PAIRS; so
    is the interval where fewer than six values are all the same but not 0, which gives no idea of their spread."""
    n = len(values)
    if n < 2:
        return (float(values.mean()) if n else np.nan), np.nan, np.nan, np.nan
    value, error, freedom = _paired_error(values)
    half = float(student.ppf(1 - LEVEL / 2, freedom)) * error
    p = _two_sided(value, error, freedom, n)
    if p >= LEVEL and error <= NO_SPREAD * abs(value) and value != 0.0:
        half = np.nan
    return value, value - half, value + half, p if n >= LEAST_PAIRS else np.nan


def _two_sided(value: float, error: float, freedom: float, values: int) -> float:
    """p of the t test; of the signs where there is no spread."""
    if value == 0.0:
        return 1.0
    if error <= NO_SPREAD * abs(value):
        return 0.5 ** (values - 1)
    return float(2 * student.sf(abs(value) / error, freedom))


def _of_shared_targets(a: stats.Curve, b: stats.Curve) -> tuple[stats.Curve, stats.Curve]:
    """Both curves with one repeat for each shared target, in the same order. A length that both measured keeps only
    the repeats that are whole in both."""
    of_a, of_b = _target_of_repeats(a), _target_of_repeats(b)
    if of_a is None or of_b is None:
        pair = list(_cell_by_cell(a, b))
    else:
        shared = [target for target in dict.fromkeys(of_a) if target and target in of_b]
        pair = [_rows(a, [of_a.index(t) for t in shared]), _rows(b, [of_b.index(t) for t in shared])]
    found = [_whole(one) for one in pair]
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


def _target_of_repeats(curve: stats.Curve) -> list[str] | None:
    """The one target of each repeat, "" where no row names it; None where repeats have several."""
    named = [sorted(set(row.tolist()) - {""}) for row in curve.targets]
    return None if any(len(row) > 1 for row in named) else [row[0] if row else "" for row in named]


def _cell_by_cell(a: stats.Curve, b: stats.Curve) -> tuple[stats.Curve, stats.Curve]:
    """b in the order of a's targets, anew at each length; lengths of both alone."""
    a, b = a.kept(np.isin(a.lengths, b.lengths)), b.kept(np.isin(b.lengths, a.lengths))
    copy, control = np.full(a.copy.shape, np.nan), np.full(a.copy.shape, np.nan)
    for column in range(len(a.lengths)):
        rows = {target: row for row, target in enumerate(b.targets[:, column].tolist()) if target}
        for i, target in enumerate(a.targets[:, column].tolist()):
            if target in rows:
                copy[i, column], control[i, column] = b.copy[rows[target], column], b.control[rows[target], column]
    return a, replace(b, copy=copy, control=control, targets=a.targets)


def _rows(curve: stats.Curve, which: list[int]) -> stats.Curve:
    return replace(curve, copy=curve.copy[which], control=curve.control[which], targets=curve.targets[which])


def _whole(curve: stats.Curve) -> Bool[np.ndarray, "repeats lengths"]:
    return np.isfinite(curve.copy) & np.isfinite(curve.control)


def _until(curve: stats.Curve, end: int) -> stats.Curve:
    """The curve up to a length; where it was not measured there, each repeat is interpolated."""
    if end >= curve.lengths[-1]:
        return curve
    if end in curve.lengths:
        return curve.kept(curve.lengths <= end)
    after = int(np.searchsorted(curve.lengths, end))
    before = max(after - 1, 0)  # before the first length the value there holds
    share = (end - curve.lengths[before]) / (curve.lengths[after] - curve.lengths[before]) if after else 0.0
    cut = curve.kept(np.arange(len(curve.lengths)) <= after)
    for values in (cut.copy, cut.control):
        values[:, after] = (1 - share) * values[:, before] + share * values[:, after]
    cut.lengths[after] = end
    return cut.kept(cut.measured)


# in words


def said(result: Robustness | Sequence[Difference]) -> list[str]:
    """A few lines for a terminal."""
    if isinstance(result, Robustness):
        return _robustness_said(result)
    return [_difference_said(one) for one in result]


def _robustness_said(result: Robustness) -> list[str]:
    names = {
        "equivalent": f"does not matter, within ±{100 * result.margin:g} points",
        "different": "matters",
        "undecided": "is undecided",
    }
    lines = [f"{result.half} accuracy, {' / '.join(result.sources)}: the text {names[result.verdict]}"]
    for verdict in ("equivalent", "different", "undecided"):
        some = [one for one in result.lengths if one.verdict == verdict and not one.reason]
        if not some:
            continue
        where = ", ".join(f"{one.length:,}" for one in some)
        worst = max(some, key=lambda one: abs(one.difference or 0.0))
        assert worst.sources is not None
        assert worst.difference is not None
        assert worst.low is not None
        assert worst.high is not None
        p = worst.paired_holm if worst.paired is not None else worst.kruskal_holm
        lines.append(
            f"  {verdict} at {where}; most at {worst.length:,}: {worst.sources[1]} - {worst.sources[0]} "
            f"{100 * worst.difference:+.1f} points [{100 * worst.low:+.1f}, {100 * worst.high:+.1f}] (90 %), "
            f"{_p(p)} ({result.test}, Holm)"
        )
    papers = [
        f"{label} {_p(min(known))}"
        for label, name in (("ANOVA", "anova_holm"), ("Kruskal-Wallis", "kruskal_holm"))
        if (known := [p for one in result.lengths if (p := getattr(one, name)) is not None])
    ]
    if papers:
        lines.append(f"  the paper's unpaired tests, smallest over lengths (Holm): {', '.join(papers)}")
    return lines + [f"  {note}" for note in result.notes]


def _difference_said(one: Difference) -> str:
    shown = [
        f"{'>' if name in one.censored else ''}{value:,.0f}" for name, value in zip(one.curves, one.values, strict=True)
    ]
    low = "-∞" if one.low is None else f"{one.low:+,.0f}"
    high = "∞" if one.high is None else f"{one.high:+,.0f}"
    how = f"{one.pairs} shared targets" if one.pairs else "unpaired"
    return (
        f"{one.name.replace('_', '-')}: {one.curves[0]} {shown[0]}, {one.curves[1]} {shown[1]}: {one.value:+,.0f} "
        f"[{low}, {high}] {one.unit}, {_p(one.p)}, {how}"
    )


def _p(p: float | None) -> str:
    return "p unknown" if p is None else "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
