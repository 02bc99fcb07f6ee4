"""Curves against curves: against scipy on the raw numbers, against counting by hand, and in simulation."""

import itertools
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats
from scipy.special import stdtr, stdtrit

from farspan import stats
from farspan.report.contrasts import difference_line, robustness_lines
from farspan.stats import Difference, run_differences
from farspan.stats.text_robustness import AtLength, robustness

LENGTHS = np.linspace(500, 16_000, 32, dtype=int)


def curve(copy: Any, control: Any = 0.4, lengths: Any = (100,), targets: Any = None) -> stats.MeasuredCurve:
    """`copy` and `control`: repeats x lengths, or what broadcasts to it; `targets`: names of repeats, or of cells."""
    lengths = np.asarray(lengths)
    repeats = max(len(values) for values in (copy, control) if np.ndim(values) == 2)
    if targets is None:
        targets = [f"t{i}" for i in range(repeats)]
    if np.ndim(targets) == 1:
        targets = np.repeat(np.array(targets)[:, None], len(lengths), 1)
    copy, control = (np.array(np.broadcast_to(half, (repeats, len(lengths))), float) for half in (copy, control))
    return stats.MeasuredCurve(lengths, lengths, copy, control, {}, 2 * lengths, np.array(targets))


def source(values: Any, **more: Any) -> stats.MeasuredCurve:
    """A curve of one length whose control has these values."""
    return curve(1.0, np.array(values, float)[:, None], **more)


def at_one_length(*values: Any, **more: Any) -> AtLength:
    curves = {name: source(one) for name, one in zip("abc", values, strict=False)}
    return robustness(curves, **more).lengths[0]


def permuted(one: stats.MeasuredCurve, order: Any) -> stats.MeasuredCurve:
    return stats.MeasuredCurve(
        one.lengths, one.scored, one.copy[order], one.control[order], {}, one.context, one.targets[order]
    )


RNG = np.random.default_rng(0)
RAW = 0.4 + 0.05 * RNG.standard_normal((1, 8)) + 0.01 * RNG.standard_normal((3, 8)) + [[0.0], [0.01], [0.02]]


# correction


def test_holm_is_what_one_gets_by_hand() -> None:
    # 4 x .005, 3 x .010, 2 x .030, and 1 x .040 not below the one before
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def test_holm_says_no_more_than_1_and_leaves_out_what_was_not_tested() -> None:
    assert stats.holm([0.9, None, 0.04]) == [pytest.approx(0.9), None, pytest.approx(0.08)]
    assert stats.holm([0.7, 0.8]) == [1.0, 1.0]
    assert stats.holm([None]) == [None]


# tests at a length


def test_three_sources_are_tested_as_scipy_tests_the_raw_numbers() -> None:
    found = at_one_length(*RAW)
    assert found.anova == pytest.approx(scipy_stats.f_oneway(*RAW).pvalue)
    assert found.kruskal == pytest.approx(scipy_stats.kruskal(*RAW).pvalue)
    assert found.paired == pytest.approx(scipy_stats.friedmanchisquare(*RAW).pvalue)
    assert found.pairs == 8
    assert found.means == pytest.approx({"a": RAW[0].mean(), "b": RAW[1].mean(), "c": RAW[2].mean()})


def test_two_sources_are_tested_by_all_their_sign_flips() -> None:
    differences = RAW[1] - RAW[0]
    flips = np.array(list(itertools.product([1, -1], repeat=8))) @ differences
    expected = np.mean(np.abs(flips) >= abs(differences.sum()) - 1e-12)
    assert at_one_length(RAW[0], RAW[1]).paired == pytest.approx(expected)


def test_many_targets_have_their_sign_flips_drawn_and_the_seed_says_which() -> None:
    first = np.linspace(0.3, 0.5, 20)
    second = first + np.tile([0.004, -0.003], 10)
    p = [at_one_length(first, second, seed=seed).paired for seed in (0, 0, 1)]
    assert p[0] == p[1] != p[2]
    differences = second - first
    expected = scipy_stats.ttest_1samp(differences, 0).pvalue
    assert p[0] == pytest.approx(expected, abs=0.08)


def test_the_interval_and_the_equivalence_are_students() -> None:
    found = at_one_length(RAW[0], RAW[1], margin=0.015)
    expected = scipy_stats.ttest_rel(RAW[1], RAW[0])
    interval = expected.confidence_interval(0.9)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    differences = RAW[1] - RAW[0]
    one_sided = [
        scipy_stats.ttest_1samp(differences, -0.015, alternative="greater").pvalue,
        scipy_stats.ttest_1samp(differences, 0.015, alternative="less").pvalue,
    ]
    assert found.tost == pytest.approx(max(one_sided))


def test_the_interval_of_a_difference_of_accuracies_ends_at_1() -> None:
    found = at_one_length([0.0, 0.1, 0.0], [0.1, 1.0, 1.0])
    naive = scipy_stats.ttest_1samp([0.1, 0.9, 1.0], 0).confidence_interval(0.9)
    assert naive.high > 1
    assert (found.low, found.high) == (pytest.approx(naive.low), 1.0)


def test_the_two_sources_that_differ_most_decide() -> None:
    found = at_one_length(*RAW, margin=0.015)
    assert found.sources == ("a", "c")
    assert found.difference == pytest.approx((RAW[2] - RAW[0]).mean())
    assert found.tost == pytest.approx(at_one_length(RAW[0], RAW[2], margin=0.015).tost)


def test_targets_are_paired_whatever_the_order_of_the_repeats() -> None:
    order = np.random.default_rng(1).permutation(8)
    straight = robustness({"a": source(RAW[0]), "b": source(RAW[1])})
    mixed = robustness({"a": source(RAW[0]), "b": permuted(source(RAW[1]), order)})
    assert mixed.lengths[0].paired == straight.lengths[0].paired
    assert mixed.lengths[0].low == pytest.approx(straight.lengths[0].low)
    # and not by the order, which would be this
    unmatched = robustness({"a": source(RAW[0]), "b": source(RAW[1][order])})
    assert unmatched.lengths[0].paired != straight.lengths[0].paired


def test_a_missing_cell_leaves_its_target_out_of_the_pairs_alone() -> None:
    second = RAW[1].copy()
    second[3] = np.nan
    found = at_one_length(RAW[0], second, RAW[2])
    kept = np.delete(RAW, 3, axis=1)
    assert found.pairs == 7
    assert found.paired == pytest.approx(scipy_stats.friedmanchisquare(*kept).pvalue)
    assert found.anova == pytest.approx(scipy_stats.f_oneway(RAW[0], kept[1], RAW[2]).pvalue)


def test_the_copy_half_is_compared_when_asked_for() -> None:
    curves = {name: curve(RAW[i][:, None], 0.1) for i, name in enumerate("abc")}
    assert robustness(curves, "copy").lengths[0].paired == pytest.approx(scipy_stats.friedmanchisquare(*RAW).pvalue)
    assert robustness(curves, "control").lengths[0].paired == 1.0


def test_other_targets_are_compared_unpaired() -> None:
    curves = {"a": source(RAW[0]), "b": source(RAW[1] + 0.1, targets=[f"u{i}" for i in range(8)])}
    found = robustness(curves)
    at = found.lengths[0]
    interval = scipy_stats.ttest_ind(RAW[1] + 0.1, RAW[0], equal_var=False).confidence_interval(0.9)
    assert (at.pairs, at.paired, found.test) == (0, None, "Kruskal-Wallis")
    assert (at.low, at.high) == pytest.approx((interval.low, interval.high))
    assert found.verdict == "different"
    assert "measured with different targets" in " ".join(found.notes)


def test_targets_that_no_row_names_are_never_paired() -> None:
    curves = {name: source(RAW[i], targets=[""] * 8) for i, name in enumerate("ab")}
    assert robustness(curves).lengths[0].pairs == 0


def test_fewer_than_three_pairs_are_not_tested_and_it_is_said() -> None:
    second = source(RAW[1], targets=["t0", "t1", *(f"u{i}" for i in range(6))])
    found = robustness({"a": source(RAW[0]), "b": second})
    at = found.lengths[0]
    assert (at.pairs, at.paired, at.tost, at.verdict) == (2, None, None, "undecided")
    assert at.reason == "2 targets are shared; a test needs 3"
    assert "not tested at 100: 2 targets are shared" in found.notes[0]
    assert found.verdict == "undecided"


# numbers without spread


def test_sources_that_agree_entirely_are_equal() -> None:
    for number in (2, 3):
        found = at_one_length(*[np.full(5, 0.4)] * number)
        assert (found.anova, found.kruskal, found.paired, found.tost) == (1.0, 1.0, 1.0, 0.5**5)
        assert found.verdict == "equivalent"


def test_sources_that_agree_on_every_target_are_equal() -> None:
    for number in (2, 3):
        found = at_one_length(*[RAW[0]] * number)
        assert (found.paired, found.tost, found.verdict) == (1.0, 0.5**8, "equivalent")


def test_four_equal_targets_are_too_few_for_equivalence() -> None:
    found = at_one_length(np.full(4, 0.4), np.full(4, 0.4))
    assert (found.tost, found.verdict) == (0.5**4, "undecided")


def test_two_differences_have_no_p_and_few_equal_ones_no_verdict() -> None:
    assert np.isnan(stats.student_mean(np.array([0.1, 0.1]))[3])
    value, low, high, p = stats.student_mean(np.full(3, 0.1))
    assert (value, p) == (pytest.approx(0.1), 0.25)
    assert np.isnan([low, high]).all()
    assert stats.student_mean(np.full(6, 0.1))[3] == 0.5**5


@pytest.mark.parametrize("value", [0.0, 0.1, -3.0])
def test_differences_that_are_all_the_same_have_no_interval(value: float) -> None:
    mean, low, high, _ = stats.student_mean(np.full(8, value))
    assert mean == pytest.approx(value)
    assert np.isnan([low, high]).all()


@pytest.mark.parametrize("repeats", [2, 3, 4])
def test_few_repeats_of_coarse_scores_find_no_more_differences_than_chance_allows(repeats: int) -> None:
    # scores are multiples of 1/32, so that differences are often all the same
    rng = np.random.default_rng(0)
    text = 0.4 + rng.normal(0, 0.05, (2000, repeats))
    first, second = (np.round((text + rng.normal(0, 0.02, text.shape)) * 32) / 32 for _ in range(2))
    p = np.array([stats.student_mean(one)[3] for one in second - first])
    assert np.mean(p < 0.05) <= 0.05


def test_two_sources_of_three_other_targets_each_are_never_called_different() -> None:
    # the chi-square of Kruskal-Wallis gives p = 0.0495 for an order that one in ten has by chance
    values = np.array([0.3, 0.31, 0.32])
    curves = {"a": source(values), "b": source(values + 0.1, targets=["u0", "u1", "u2"])}
    at = robustness(curves).lengths[0]
    assert (at.kruskal, at.verdict) == (pytest.approx(0.1), "undecided")


def test_constants_that_differ_are_different() -> None:
    found = at_one_length(*(np.full(10, value) for value in (0.4, 0.4, 0.5)))
    assert found.anova is None  # no variance within the sources: F is not defined
    assert (found.low, found.high, found.tost) == (pytest.approx(0.1), pytest.approx(0.1), 1.0)
    assert found.verdict == "different"


# verdicts


def sources(
    rng: np.random.Generator, number: int, difference: float, residual: float, lengths: int = 1
) -> dict[str, stats.MeasuredCurve]:
    """Ten targets that differ by 5 points; the last source differs from the others."""
    text = 0.4 + 0.05 * rng.standard_normal((10, 1))
    result = {}
    for i in range(number):
        values = text + residual * rng.standard_normal((10, lengths)) + difference * (i == number - 1)
        result["abc"[i]] = curve(1.0, values, lengths=100 * np.arange(1, lengths + 1))
    return result


def shares(number: int, difference: float, residual: float, trials: int = 300) -> dict[str, float]:
    """How often each test finds something at 5 %, and how often sources are called equivalent."""
    rng = np.random.default_rng([number, trials])
    found = [robustness(sources(rng, number, difference, residual)).lengths[0] for _ in range(trials)]
    share = {name: float(np.mean([getattr(one, name) < 0.05 for one in found])) for name in ("anova", "paired")}
    return share | {"equivalent": float(np.mean([one.verdict == "equivalent" for one in found]))}


def test_pairing_finds_what_the_papers_anova_does_not() -> None:
    # ten values that spread by 5 points, a difference of 2: analysis of variance finds it once in eight
    found = shares(3, 0.02, 0.01)
    assert found["anova"] < 0.2
    assert found["paired"] > 0.9


@pytest.mark.parametrize("number", [2, 3])
def test_pairing_finds_a_difference_where_there_is_none_at_most_once_in_twenty(number: int) -> None:
    found = shares(number, 0.0, 0.01)
    assert 0.01 < found["paired"] < 0.09


@pytest.mark.parametrize("number", [2, 3])
def test_equivalence_is_claimed_where_it_is_and_not_where_it_is_not(number: int) -> None:
    assert shares(number, 0.0, 0.003, 100)["equivalent"] > 0.9
    assert shares(number, 0.02, 0.003, 100)["equivalent"] == 0.0
    assert shares(number, 0.01, 0.003, 200)["equivalent"] < 0.09  # at the margin: once in twenty


def test_equivalence_is_over_all_lengths_or_not_at_all() -> None:
    values = np.array([0.4, 0.42, 0.45, 0.5, 0.55])[:, None]
    same = {name: curve(1.0, np.repeat(values, 2, 1), lengths=(100, 200)) for name in "ab"}
    assert robustness(same).verdict == "equivalent"
    scattered = np.array([[0.0, 0.05], [0.0, -0.05], [0.0, 0.04], [0.0, -0.04], [0.0, 0.01]])
    same["b"] = curve(1.0, values + scattered, lengths=(100, 200))
    found = robustness(same)
    assert [one.verdict for one in found.lengths] == ["equivalent", "undecided"]
    assert found.verdict == "undecided"


def test_a_difference_within_the_margin_is_equivalent_however_certain() -> None:
    found = at_one_length(RAW[0], RAW[0] + 0.005 + 0.0001 * np.arange(8))
    assert found.paired == pytest.approx(2 / 2**8)
    assert found.verdict == "equivalent"


def test_a_difference_has_to_survive_the_correction_over_lengths() -> None:
    rng = np.random.default_rng(0)
    text = 0.4 + 0.05 * rng.standard_normal((8, 1)) + np.zeros(8)
    noise = 0.03 * rng.standard_normal((8, 8))
    noise[:, 0] = 0.02 + 0.01 * rng.random(8)  # p = 2 / 2^8 = .0078 there
    lengths = tuple(range(100, 900, 100))
    curves = {"a": curve(1.0, text, lengths=lengths), "b": curve(1.0, text + noise, lengths=lengths)}
    first = robustness(curves).lengths[0]
    assert (first.paired, first.paired_holm) == (pytest.approx(2 / 256), pytest.approx(16 / 256))
    assert first.verdict == "undecided"
    fewer = {name: one.kept(one.lengths < 500) for name, one in curves.items()}
    assert robustness(fewer).lengths[0].verdict == "different"


def test_a_design_that_can_show_nothing_says_how_many_repeats_it_takes() -> None:
    lengths = tuple(range(100, 1700, 100))
    curves = {name: curve(1.0, RAW[i][:8, None] + np.zeros(16), lengths=lengths) for i, name in enumerate("ab")}
    # 16 lengths x 2 / 2^n < .05 from n = 10 on
    assert "measure at least 10 repeats" in " ".join(robustness(curves).notes)
    ten = {name: source([*RAW[i], 0.4, 0.5]) for i, name in enumerate("ab")}
    assert robustness(ten).notes == ()
    # sign flips have no p below 2 / 10,000, which 250 lengths make .05
    many = {name: curve(1.0, one.control[:3, :1] + np.zeros(250), lengths=range(250)) for name, one in curves.items()}
    assert robustness(many).notes == (
        "3 repeats at 250 lengths are too few to show any difference: measure fewer lengths",
    )


@pytest.mark.parametrize(
    ("curves", "more", "message"),
    [
        ({"a": source(RAW[0])}, {}, r"1 source of text \(a\).*two or more"),
        ({}, {}, r"0 source of text \(none\)"),
        ({"a": source(RAW[0]), "b": source(RAW[1])}, {"margin": 1.0}, r"margin of 1.0 .*0.01 is one point"),
        ({"a": source(RAW[0]), "b": source(RAW[1], lengths=(200,))}, {}, r"a has 100; b has 200.*same --lengths"),
        ({"a": source(RAW[0]), "b": source(RAW[1])}, {"half": "both"}, "half: got 'both', expected 'copy' or"),
    ],
)
def test_what_cannot_be_compared_is_refused(curves: Any, more: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        robustness(curves, **more)


# two runs


def falling(middle: Any, repeats: int = 6, lengths: Any = LENGTHS, scale: float = 300.0) -> np.ndarray:
    """Memory index that falls around `middle`, a number or one for each repeat."""
    middle = np.broadcast_to(middle, repeats)[:, None]
    return 1 / (1 + np.exp((np.asarray(lengths) - middle) / scale))


def run(
    middle: Any, lengths: Any = LENGTHS, repeats: int = 6, scale: float = 300.0, **more: Any
) -> stats.MeasuredCurve:
    return curve(0.4 + 0.6 * falling(middle, repeats, lengths, scale), 0.4, lengths=lengths, **more)


def of(found: list[stats.Difference], name: str) -> Any:
    return next(one for one in found if one.name == name)


MIDDLES = np.array([4000, 4400, 4800, 5200, 5600, 6000])


@pytest.mark.parametrize("longest", [LENGTHS[-1], 5500])  # in some resamples it crosses beyond 5,500 tokens
def test_a_curve_differs_from_itself_by_nothing(longest: int) -> None:
    lengths = LENGTHS[longest >= LENGTHS]
    for one in stats.differences(run(MIDDLES, lengths), run(MIDDLES, lengths)):
        if one.name == "reach" and longest == 5500:  # beyond the lengths measured of both
            continue
        assert (one.value, one.low, one.high, one.p, one.pairs) == (0.0, 0.0, 0.0, 1.0, 6)


def test_all_differences_of_two_curves_come_from_one_set_of_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    draw = stats.headlines_sampled
    monkeypatch.setattr(run_differences, "headlines_sampled", lambda one, *rest: drawn.append(one) or draw(one, *rest))
    stats.differences(run(3000.0), run(4000.0))
    assert len(drawn) == 2  # both curves
    drawn.clear()
    stats.differences(run(3000.0), run(4000.0, LENGTHS[:-1]))
    assert len(drawn) == 3  # and the longer one up to the last length of the other


def test_a_curve_moved_by_1000_tokens_differs_by_1000_tokens() -> None:
    found = stats.differences(run(5000), run(6000))  # two steps of the grid
    for name in ("half_life", "reach", "span", "fine"):
        assert of(found, name).value == pytest.approx(1000, abs=1)
        assert of(found, name).p == 0.5**5  # six equal differences
    assert of(found, "half_life").values == pytest.approx((5000, 6000), abs=1)


def test_what_targets_differ_by_falls_out() -> None:
    noise = np.random.default_rng(0).normal(0, 20, 6)
    half_life = of(stats.differences(run(MIDDLES), run(MIDDLES + 200 + noise)), "half_life")
    alone = stats.summarise(run(MIDDLES)).half_life
    assert half_life.value == pytest.approx(200, abs=60)
    assert half_life.p < 0.01
    assert half_life.high - half_life.low < 0.1 * (alone.high - alone.low)


def test_the_interval_of_an_area_is_students_of_the_targets_differences() -> None:
    rng = np.random.default_rng(2)
    a, b = run(MIDDLES), run(MIDDLES + rng.normal(300, 200, 6))
    area = [np.trapezoid(falling_with_0, [0, *LENGTHS]) for falling_with_0 in _with_first((b.copy - a.copy) / 0.6)]
    expected = scipy_stats.ttest_1samp(area, 0)
    span = of(stats.differences(a, b, bootstraps=20_000), "span")
    assert span.value == pytest.approx(np.mean(area))
    interval = expected.confidence_interval(0.95)
    assert (span.low, span.high) == pytest.approx((interval.low, interval.high), rel=0.03)
    assert span.p == pytest.approx(expected.pvalue, rel=0.1)


def _with_first(values: np.ndarray) -> np.ndarray:
    return np.concatenate([values[:, :1], values], 1)


def test_p_is_below_a_twentieth_where_the_interval_leaves_out_0() -> None:
    rng = np.random.default_rng(3)
    seen = set()
    for shift in np.linspace(0, 400, 9):
        for one in stats.differences(run(MIDDLES), run(MIDDLES + rng.normal(shift, 150, 6))):
            assert (one.p < 0.05) == (one.low > 0 or one.high < 0)
            seen.add(one.p < 0.05)
    assert seen == {True, False}


def _by_lengths_left_out(one: stats.MeasuredCurve, half_life: float) -> tuple[float, float]:
    """How far the half-life moves down and up if either length around it is left out."""
    around = [LENGTHS[half_life > LENGTHS].max(), LENGTHS[half_life <= LENGTHS].min()]
    moved = [stats.headline(one.kept(one.lengths != end))["half_life"][0] for end in around]
    places = [min(max(place, around[0]), around[1]) for place in (half_life, *moved)]
    return half_life - min(places), max(places) - half_life


@pytest.mark.parametrize("place", [0, 1])
def test_a_difference_from_a_length_below_the_shortest_covers_all_values_that_it_can_have(place: int) -> None:
    noise = np.random.default_rng(0).normal(0, 20, 6)
    known, unknown = run(MIDDLES + noise), run(0.0)  # half-life of the second: below LENGTHS[0]
    pair = (unknown, known) if place == 0 else (known, unknown)
    found = of(stats.differences(*pair), "half_life")
    assert found.below == ((LENGTHS[0], 0.0) if place == 0 else (0.0, LENGTHS[0]))
    down, up = _by_lengths_left_out(known, abs(found.value))
    nearest = abs(found.value) - LENGTHS[0] - down
    half = float(stdtrit(5, 0.975)) * found.error
    ends = sorted(abs(end) for end in (found.low, found.high))
    assert ends == pytest.approx([nearest - half, abs(found.value) + half + up])
    assert found.p == pytest.approx(2 * float(stdtr(5, -nearest / found.error)))


def test_two_lengths_below_the_shortest_are_not_tested() -> None:
    found = of(stats.differences(run(0.0), run(50.0)), "half_life")
    assert (found.value, found.p) == (0.0, None)
    assert (found.low, found.high) == (-LENGTHS[0], LENGTHS[0])


def test_equal_curves_below_the_shortest_length_do_not_differ() -> None:
    found = of(stats.differences(run(0.0), run(0.0)), "half_life")
    assert difference_line(found) == "half-life: a <500, b <500: 0 tokens, p = 1.000, 6 shared targets"


def test_runs_are_paired_by_target_whatever_the_order_and_beside_targets_of_one_alone() -> None:
    b = run(MIDDLES + 100 * np.arange(6))
    more = run([*(MIDDLES + 100 * np.arange(6))[::-1], 9000], repeats=7, targets=[f"t{i}" for i in range(5, -2, -1)])
    assert more.targets[-1, 0] == "t-1"
    straight, mixed = stats.differences(run(MIDDLES), b), stats.differences(run(MIDDLES), more)
    for one, other in zip(straight, mixed, strict=True):
        assert other.value == pytest.approx(one.value)
        assert (other.low, other.high) == pytest.approx((one.low, one.high))
        assert other.pairs == 6


def test_a_cell_that_one_run_misses_is_left_out_of_both() -> None:
    a, b = run(MIDDLES), run(MIDDLES + 500)
    without = [permuted(one, [0, 1, 2, 4, 5]) for one in (a, b)]
    b.copy[3] = np.nan
    found = stats.differences(a, b)
    assert [one.pairs for one in found] == [5] * 4
    assert [one.value for one in found] == pytest.approx([one.value for one in stats.differences(*without)])
    one_cell = run(MIDDLES + 500)
    one_cell.control[3, 9] = np.nan
    both = run(MIDDLES)
    both.copy[3, 9] = np.nan
    expected = stats.headline(one_cell)["half_life"][0] - stats.headline(both)["half_life"][0]
    assert of(stats.differences(a, one_cell), "half_life").value == pytest.approx(expected)


def test_lengths_of_one_run_alone_make_no_difference_significant() -> None:
    """The same model on the same texts, whose curve the sparse lengths follow badly."""
    sparse = LENGTHS[[0, 1, -1]]
    alone = of(stats.differences(run(MIDDLES), run(MIDDLES, sparse)), "half_life")
    assert abs(alone.value) > 500  # by interpolation
    assert alone.p == 1.0
    assert 0.0 in (alone.low, alone.high)
    third = LENGTHS[::3]
    found, common = (
        of(stats.differences(run(MIDDLES, lengths), run(MIDDLES - 3000, third)), "half_life")
        for lengths in (LENGTHS, third)
    )
    ends = [found.low, common.low, common.high, found.high, 0.0]
    assert ends == sorted(ends)
    assert common.p <= found.p < 0.05


def test_a_run_that_begins_at_a_longer_length_does_not_differ_from_itself() -> None:
    late = run(MIDDLES, LENGTHS[9:])
    for pair in ((run(MIDDLES), late), (late, run(MIDDLES))):
        assert min(one.p for one in stats.differences(*pair) if one.p is not None) > 0.05


def test_lengths_beyond_the_range_of_the_other_run_are_used() -> None:
    for name in ("half_life", "reach", "span"):
        whole = of(stats.differences(run(MIDDLES), run(MIDDLES - 1000)), name)
        ended = of(stats.differences(run(MIDDLES, LENGTHS[LENGTHS <= 9000]), run(MIDDLES - 1000)), name)
        assert (ended.value, ended.p) == pytest.approx((whole.value, whole.p), rel=0.05, abs=1e-9)


def test_two_runs_are_equivalent_only_if_they_are_at_their_common_lengths_too() -> None:
    """A model that remembers less, of whose sparse lengths the interpolated half-life is as long as the other's."""
    middles, sparse = 5000 + (MIDDLES - 5000) / 20, LENGTHS[::8]
    worse = run(middles - 400, sparse)
    found, common = (of(stats.differences(run(middles, at), worse), "half_life") for at in (LENGTHS, sparse))
    assert abs(found.value) < 100
    assert common.value + float(stdtrit(common.freedom, 0.975)) * common.error < -500
    assert stats.tost(found.value, found.error, found.freedom, 250, 6) > 0.05


def test_too_few_texts_at_the_common_lengths_leave_no_p() -> None:
    whole, sparse = run(MIDDLES), LENGTHS[::8]
    copy = whole.copy.copy()
    copy[2:, sparse[2] == LENGTHS] = np.nan
    found = of(stats.differences(replace(whole, copy=copy), run(MIDDLES - 2000, sparse)), "half_life")
    assert "p unknown (fewer than 3 texts)" in difference_line(found)


def test_runs_without_a_common_length_in_their_common_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"of both: old at 500, 4,000 and new at 1,000, 2,000 tokens"):
        stats.differences(run(3000, (500, 4000)), run(3000, (1000, 2000)), names=("old", "new"))
    with pytest.raises(ValueError, match=r"of both: old at 500, 1,000 and new at 700, 2,000 tokens"):
        stats.differences(run(3000, (500, 1000)), run(3000, (700, 2000)), names=("old", "new"))


def test_runs_with_other_lengths_are_compared_up_to_where_both_end() -> None:
    def straight(lengths: Any) -> stats.MeasuredCurve:
        """Memory index 1 - length / 20,000: interpolation gives its area exactly."""
        return curve(np.tile(1 - np.asarray(lengths) / 20_000, (3, 1)), 0.0, lengths=lengths)

    to_16_000, grid = straight(LENGTHS), LENGTHS.tolist()
    for other in ([500, 3000, 8000], [500, 10_250], grid, [*grid, 17_000]):
        end = min(other[-1], 16_000)
        expected = 500 * (1 - 500 / 20_000) + (end - 500) - (end**2 - 500**2) / 40_000
        span = of(stats.differences(to_16_000, straight(other)), "span")
        assert span.values == pytest.approx((expected, expected))
        half_life = of(stats.differences(to_16_000, straight(other)), "half_life")
        assert half_life.values[0] == pytest.approx(10_000)
    early = of(stats.differences(to_16_000, curve(np.ones((3, 1)), 0.0, lengths=(200,))), "span")
    assert early.values == pytest.approx((200 * (1 - 500 / 20_000), 200))


def test_where_each_length_has_its_own_targets_these_are_paired_length_by_length() -> None:
    targets = np.array([[f"{length} {repeat}" for length in LENGTHS] for repeat in range(6)])
    a, b = run(MIDDLES, targets=targets), run(MIDDLES + 500, targets=targets)
    rng = np.random.default_rng(0)
    for column in range(len(LENGTHS)):
        order = rng.permutation(6)
        for values in (b.copy, b.control, b.targets):
            values[:, column] = values[order, column]
    expected = stats.differences(run(MIDDLES), run(MIDDLES + 500))
    for one, other in zip(stats.differences(a, b), expected, strict=True):
        assert other.value == pytest.approx(one.value)
        assert (other.low, other.high) == pytest.approx((one.low, one.high))


def test_a_crossing_beyond_the_lengths_measured_bounds_the_difference() -> None:
    short = LENGTHS[LENGTHS <= 8000]
    half_life = of(stats.differences(run(5000, short), run(9000, short)), "half_life")
    assert half_life.censored == ("b",)
    assert half_life.value == pytest.approx(3000, abs=1)
    assert half_life.low == pytest.approx(3000, abs=1)
    assert half_life.high is None
    assert half_life.p == 0.5**5
    both = of(stats.differences(run(9500, short), run(9000, short)), "half_life")
    assert (both.censored, both.low, both.high, both.p) == (("a", "b"), None, None, None)
    sign_open = of(stats.differences(run(12_000), run(9000, short)), "half_life")
    assert (sign_open.censored, sign_open.p) == (("b",), None)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_length_that_may_be_beyond_its_curve_is_not_smaller_beyond_chance(swapped: bool) -> None:
    # the shorter curve ends at 200, just below half; in some resamples it does not fall to half by then
    long = curve([[1, 1, 0.9 + change, 0.1] for change in (-0.02, 0.0, 0.01, 0.02)], 0.0, (100, 200, 400, 800))
    short = curve([[0.9, copy] for copy in (0.25, 0.45, 0.55, 0.7)], 0.0, (100, 200))
    beyond = stats.headlines_sampled(short, stats.multipliers(4, 2000, 0))["half_life"][1].mean()
    assert beyond > 0.2
    found = of(stats.differences(*((short, long) if swapped else (long, short))), "half_life")
    assert sorted(found.values) == [pytest.approx(199, abs=3), pytest.approx(600, abs=15)]
    assert (found.low if swapped else found.high) is None
    assert found.p == pytest.approx(2 * beyond)


def test_runs_that_share_no_target_are_refused_with_what_each_has() -> None:
    other = run(5000, targets=[f"u{i}" for i in range(6)])
    with pytest.raises(ValueError, match=r"old and new share no target.*old has 6 targets \(t0.*new has 6.*\(u0"):
        stats.differences(run(5000), other, names=("old", "new"))
    with pytest.raises(ValueError, match=r"b has 0 targets that its rows name"):
        stats.differences(run(5000), run(5000, targets=[""] * 6))
    with pytest.raises(ValueError, match="share one target"):
        stats.differences(run(5000), run(5000, targets=["t0", *(f"u{i}" for i in range(5))]))


def test_other_tokenizers_are_compared_in_characters() -> None:
    # the same text in 4 and in 2 characters a token: half the tokens, the same characters
    found = stats.differences_in_characters(run(4000), run(8000, scale=600), 4.0, 2.0)
    half_life = of(found, "half_life")
    assert half_life.values == pytest.approx((16_000, 16_000), rel=1e-3)
    assert (half_life.unit, half_life.pairs) == ("characters", 0)
    assert of(found, "span").values == pytest.approx((16_000, 16_000), rel=0.01)


def test_unpaired_differences_are_welchs() -> None:
    a, b = run(MIDDLES), run(MIDDLES[:4] + 300, repeats=4)
    first, second = (
        [np.trapezoid(row, [0, *LENGTHS]) for row in _with_first((one.copy - 0.4) / 0.6)] for one in (a, b)
    )
    expected = scipy_stats.ttest_ind(second, first, equal_var=False)
    span = of(stats.differences_in_characters(a, b, 1.0, 1.0, bootstraps=20_000), "span")
    interval = expected.confidence_interval(0.95)
    assert (span.low, span.high) == pytest.approx((interval.low, interval.high), rel=0.05)
    assert span.p == pytest.approx(expected.pvalue, rel=0.1)


def test_four_characters_a_token_make_four_times_the_difference_and_its_interval() -> None:
    runs = run(MIDDLES), run(MIDDLES[::-1] + 300)
    tokens, characters = (stats.differences_in_characters(*runs, scale, scale) for scale in (1.0, 4.0))
    for one, other in zip(tokens, characters, strict=True):
        assert one.low < one.value < one.high
        assert (other.value, other.low, other.high) == pytest.approx((4 * one.value, 4 * one.low, 4 * one.high))
        assert other.p == pytest.approx(one.p)


@pytest.mark.parametrize(
    ("scale", "repeats", "message"),
    [(0.0, 6, "b: 0.0 characters per token"), (np.nan, 6, "b: nan characters"), (4.0, 1, "b has 1 repeats")],
)
def test_characters_need_a_scale_and_repeats(scale: float, repeats: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stats.differences_in_characters(run(5000), run(5000, repeats=repeats), 4.0, scale)


def test_intervals_of_differences_hold_the_truth_19_times_in_20() -> None:
    rng = np.random.default_rng(0)
    lengths, trials, held = LENGTHS[:20], 120, {"half_life": 0, "span": 0}
    chance = 0  # how often the interval of the half-life without the error of interpolating holds it

    def noisy(middles: np.ndarray) -> stats.MeasuredCurve:
        one = run(middles, lengths)
        copy = one.copy + rng.normal(0, 0.017, one.copy.shape) * np.sqrt(4 * one.copy * (1 - one.copy))
        return curve(np.clip(copy, 0, 1), 0.4, lengths=lengths)

    far = np.array([[5300], [5000]]) + rng.normal(0, 400, 20_000)  # one text, two runs
    truth = [stats.headline(run(middles, lengths, 20_000)) for middles in far]
    true = {name: truth[0][name][0] - truth[1][name][0] for name in held}
    for _ in range(trials):
        middles = 5000 + rng.normal(0, 400, 6)
        for one in stats.differences(noisy(middles), noisy(middles + 300), bootstraps=200):
            if one.name in held:
                held[one.name] += one.low <= true[one.name] <= one.high
                assert one.high - one.low < 1000  # two steps of the grid
            if one.name == "half_life":
                half = float(stdtrit(one.freedom, 0.975)) * one.error
                chance += abs(one.value - true[one.name]) <= half
    for count in (chance, held["span"]):
        assert 0.89 * trials <= count < trials  # three standard deviations of so many trials are 0.06
    assert chance <= held["half_life"]


@pytest.mark.parametrize("points", [8, 16])
def test_differences_of_curves_that_fall_between_two_lengths_hold_the_truth(points: int) -> None:
    """Of other shapes, so that linear interpolation moves the two crossings differently."""
    lengths, every = np.linspace(16_384 / points, 16_384, points).round(), np.arange(16, 16_385, 16)
    shapes = [(5086, 60), (5086, 1200), (5400, 60), (7600, 60), (9000, 300)]
    for one, other in itertools.combinations(shapes, 2):
        (a, b), wholes = ([run(m, at, scale=s) for m, s in (one, other)] for at in (lengths, every))
        truth = [stats.headline(whole) for whole in wholes]
        for found in stats.differences(a, b):
            if found.name == "span":
                continue
            true = truth[1][found.name][0] - truth[0][found.name][0]
            assert found.low is None or found.low <= true
            assert found.high is None or true <= found.high
            if found.p is not None and found.p < 0.05:
                assert np.sign(found.value) == np.sign(true)
                assert found.low > 0 or found.high < 0


# in words and as data


def test_robustness_is_said_in_a_few_lines() -> None:
    curves = {"books": source(RAW[0]), "code": source(RAW[1]), "random": source(RAW[2] - 0.2)}
    lines = robustness_lines(robustness(curves))
    assert lines[0] == "control accuracy differs between books, code and random"
    assert lines[1].startswith("  different at 100 tokens; largest difference at 100: random minus ")
    assert " points, 90 % interval [" in lines[1]
    assert lines[1].endswith(", p < 0.001 (Friedman, Holm-corrected)")
    assert lines[2].startswith(
        "  unpaired tests of the paper, smallest Holm-corrected p of all lengths: ANOVA p < 0.001"
    )
    same = {name: source(RAW[0]) for name in ("books", "code")}
    expected = "control accuracy is the same with books and code: differences are within ±1 points"
    assert robustness_lines(robustness(same))[0] == expected
    few = {"books": source(RAW[0][:4]), "code": source(RAW[1][:4])}
    assert robustness_lines(robustness(few))[0] == (
        "it is undecided whether control accuracy differs between books and code; more repeats can decide it"
    )


def test_differences_are_said_with_what_they_are_of() -> None:
    short = LENGTHS[LENGTHS <= 8000]
    found = stats.differences(run(5000, short), run(9000, short), names=("old", "new"))
    half_life = difference_line(found[0])
    assert half_life == "half-life: old 5,000, new >8,000: >+3,000 [+3,000, ∞] tokens, p = 0.031, 6 shared targets"


def test_results_are_data() -> None:
    found = asdict(robustness({"a": source(RAW[0]), "b": source(RAW[1])}))
    assert found["lengths"][0]["means"]["a"] == pytest.approx(RAW[0].mean())
    assert asdict(stats.differences(run(5000), run(6000))[0])["name"] == "half_life"


# intervals without width


def test_the_difference_of_a_curve_from_itself_is_printed_without_an_interval() -> None:
    one = curve(np.clip(1.2 - LENGTHS / 16_000 + 0.1 * RNG.standard_normal((6, 1)), 0, 1), lengths=LENGTHS)
    lines = [difference_line(found) for found in stats.differences(one, one)]
    assert [line.partition(": ")[0] for line in lines] == ["half-life", "reach", "span", "fine"]
    assert any(": 0 tokens, p = 1.000" in line for line in lines)
    assert not any("[0, 0]" in line for line in lines)


@pytest.mark.parametrize("half_lives", [(9000, 9000), (9500, 9000)])
def test_a_difference_of_0_is_printed_without_a_sign(half_lives: tuple[float, float]) -> None:
    short = LENGTHS[LENGTHS <= 8000]
    a, b = (run(one, short) for one in half_lives)
    found = of(stats.differences(a, b), "half_life")
    assert (found.value, found.interval) == (0, "")
    for value in (0.0, -0.0, 0.3, -0.4):
        assert " >8,000: not known, p unknown" in difference_line(replace(found, value=value))
        assert replace(found, value=value, censored=()).known == "0"
    found = replace(found, censored=())
    assert replace(found, value=1.0, low=-0.4, high=2.0).interval == "[0, +2]"


@pytest.mark.parametrize(
    ("value", "censored", "below", "known"),
    [
        (-173.0, (), (0.0, 0.0), "-173"),
        (-301.0, (), (0.0, 128.0), "<-173"),  # of 301 and less than 128
        (301.0, (), (128.0, 0.0), ">+173"),
        (-100.0, ("a",), (0.0, 0.0), "<-100"),
        (-400.0, ("a",), (0.0, 128.0), "<-272"),
        (100.0, ("b",), (0.0, 0.0), ">+100"),
        (0.0, ("a", "b"), (0.0, 0.0), "not known"),
        (0.0, (), (128.0, 128.0), "not known"),
    ],
)
def test_a_difference_of_bounds_is_a_bound(
    value: float, censored: tuple[str, ...], below: tuple[float, float], known: str
) -> None:
    one = Difference("reach", ("a", "b"), (0, 0), value, None, 200.0, None, 4, censored, 1.0, 3.0, below=below)
    assert one.known == known
    assert (one.interval == "") == (known == "not known")
    assert replace(one, value=0.0, low=0.0, high=0.0).known == "0"  # the same curve


def test_a_difference_without_a_p_has_the_reason() -> None:
    one = Difference("fine", ("a", "b"), (0.0, 0.0), 0.0, None, None, None, 4, (), 1.0, 3.0, below=(500.0, 500.0))
    assert "p unknown (outside the lengths measured)" in difference_line(one)
    assert "p unknown (outside the lengths measured)" in difference_line(replace(one, censored=("a",), below=(0, 0)))
    assert "p unknown (fewer than 3 texts)" in difference_line(replace(one, pairs=2, freedom=1.0))


def test_texts_with_equal_scores_are_reported_without_an_interval() -> None:
    result = robustness({"a": source(RAW[0]), "b": source(RAW[0])})
    assert "+0.0 points, p = 1.000" in robustness_lines(result)[1]
    assert result.lengths[0].interval == ""
