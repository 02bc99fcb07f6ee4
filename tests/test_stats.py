"""Memory lengths and intervals: against the published curve, against curves whose answer is known, against twins."""

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm, ttest_1samp
from scipy.stats import t as student

from farspan import stats
from farspan.record import Row
from farspan.stats import headlines, joint_test, memory_lengths
from farspan.tasks.published import read_authors_file

LLAMA3_8B = Path(__file__).parent / "data" / "llama3_8b_forgetting_curve.json"
SETTINGS = {"protocol": "nested", "compat": False, "target_text": "books", "prefix_text": None}
LENGTHS = (100, 200, 300, 400)


def row(length: int, repeat: int, copy: float, control: float, **changes: Any) -> Row:
    scores = {"copy": copy, "control": control, "control_repeat": repeat}
    scores |= {"scored": math.ceil(length / 2), "context": 2 * length + 2}
    values = {"model": "m", "method": "full", "task": "curve", "version": 1, "settings": SETTINGS, "seed": 0}
    values |= {"length": length, "repeat": repeat, "example": f"{length} {repeat}", "scores": scores}
    return Row(**(values | changes))


def failed(length: int, repeat: int, status: str) -> Row:
    return row(length, repeat, 0.0, 0.0, status=status, scores={})


def rows(copy: Any, control: Any = 0.2, lengths: tuple[int, ...] = LENGTHS, repeats: int = 2) -> list[Row]:
    """`copy` and `control`: one number, one for each length, or repeats x lengths."""
    shape = (np.asarray(copy).shape[0] if np.ndim(copy) == 2 else repeats, len(lengths))
    copy, control = np.broadcast_to(copy, shape), np.broadcast_to(control, shape)
    return [
        row(length, repeat, float(copy[repeat, i]), float(control[repeat, i]))
        for repeat in range(shape[0])
        for i, length in enumerate(lengths)
    ]


def summary(copy: Any, control: Any = 0.2, bootstraps: int = 0, **more: Any) -> stats.Summary:
    return stats.summarise(stats.curve(rows(copy, control, **more)), bootstraps=bootstraps)


# the published curve


@pytest.fixture(scope="module")
def llama() -> stats.Summary:
    return stats.summarise(stats.curve(read_authors_file(LLAMA3_8B, "Llama-3-8B")))


def test_the_published_curve_has_the_fine_length_of_the_papers_table(llama: stats.Summary) -> None:
    assert (llama.paper_fine.value, llama.paper_fine.censored) == (4134, False)


def test_the_published_curve_has_the_coarse_length_of_the_papers_table(llama: stats.Summary) -> None:
    assert (llama.paper_coarse.value, llama.paper_coarse.censored) == (9293, True)


@pytest.mark.parametrize(
    ("name", "value", "low", "high"),
    [("fine", 4164, 4160, 4167), ("half_life", 4928, 4919, 4937), ("reach", 6067, 6040, 6099)],
)
def test_the_published_curve_crosses_where_the_notes_say(
    llama: stats.Summary, name: str, value: int, low: int, high: int
) -> None:
    length = getattr(llama, name)
    assert round(length.value) == value
    chance = stats.by_chance(stats.curve(read_authors_file(LLAMA3_8B, "Llama-3-8B")))[name]
    # the notes give percentiles; ten repeats need 2.262 / 1.960 * sqrt(10 / 9) = 1.217 times as much
    if name != "fine":  # its lower end also moves for texts that none of the ten repeats is like
        assert chance[0] == pytest.approx(value - 1.217 * (value - low), abs=0.4 * (high - low))
    assert chance[1] == pytest.approx(value + 1.217 * (high - value), abs=0.4 * (high - low))


@pytest.mark.parametrize(
    ("name", "low", "high"), [("fine", 3619, 4650), ("half_life", 4650, 5166), ("reach", 5682, 6198)]
)
def test_the_published_curves_intervals_end_at_measured_lengths(
    llama: stats.Summary, name: str, low: int, high: int
) -> None:
    length = getattr(llama, name)
    assert (length.low, length.high) == (low, high)


def test_the_published_curve_has_the_areas_of_the_notes(llama: stats.Summary) -> None:
    # the notes leave out what lies before the first length, 8 tokens
    assert llama.span.value == pytest.approx(5040, abs=8)
    assert llama.gap_area.value == pytest.approx(2631, abs=8)


def test_the_published_curves_known_passage_is_found_contaminated(llama: stats.Summary) -> None:
    assert {"length": 1555, "repeat": 0, "control": 0.867609} in llama.contaminated


# curves whose answer is known

STEP = (1.0, 1.0, 0.6, 0.2)  # control 0.2: memory index 1, 1, 0.5, 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("paper_fine", 200),
        ("paper_coarse", 300),
        ("fine", 202.5),
        ("coarse", 397.5),
        ("half_life", 300),
        ("reach", 390),
        ("span", 300),
        ("gap_area", 240),
    ],
)
def test_a_step_has_exactly_its_lengths(name: str, value: float) -> None:
    length = getattr(summary(STEP), name)
    assert length.value == pytest.approx(value, abs=1e-9)
    assert not length.censored


def test_a_cliff_is_as_wide_as_it_is() -> None:
    assert summary(STEP).cliff == pytest.approx(380 - 220)


def test_a_curve_that_never_falls_has_no_cliff() -> None:
    assert summary(1.0).cliff is None


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ("oom", "out of memory"),
        ("too_long", "the model's positions end"),
        ("nan", "NaN logits"),
        (None, "the longest length measured"),
    ],
)
@pytest.mark.parametrize("name", ["paper_fine", "paper_coarse", "fine", "coarse", "half_life", "reach"])
def test_a_curve_that_always_passes_is_censored_and_says_why(name: str, status: str | None, reason: str) -> None:
    beyond = [failed(500, repeat, status) for repeat in range(2)] if status else []
    length = getattr(stats.summarise(stats.curve(rows(1.0) + beyond), bootstraps=0), name)
    assert (length.value, length.censored, length.reason) == (400, True, reason)


def test_a_censored_length_prints_that_it_is_larger() -> None:
    assert (
        str(stats.MemoryLength(9293.0, 9150.0, 9293.0, censored=True, interval_censored=True))
        == ">9,293 [9,150, >9,293]"
    )


@pytest.mark.parametrize("name", ["fine", "coarse", "half_life", "reach"])
def test_a_curve_that_never_passes_is_below_the_shortest_length(name: str) -> None:
    length = getattr(summary(0.2, bootstraps=50), name)
    assert (length.value, length.censored, length.below) == (0.0, False, 100)
    assert str(length) == "<100 [0, 100]"
    assert "below the threshold already at" in length.reason


def test_a_length_with_few_scored_tokens_judges_no_threshold() -> None:
    assert summary((1.0, 0.5, 0.5), lengths=(62, 200, 300)).fine.value == 0.0
    assert summary((1.0, 0.5, 0.5), lengths=(64, 200, 300)).fine.value > 64


def test_what_comes_before_the_first_length_that_passes_is_warm_up() -> None:
    assert summary((0.5, 1.0, 1.0, 0.2)).fine.value == pytest.approx(300 + 100 * 0.01 / 0.8)


def test_a_lone_late_pass_does_not_stretch_the_memory() -> None:
    found = summary((1.0, 0.2, 0.2, 0.25))
    assert found.paper_coarse.value == 400
    assert found.half_life.value == pytest.approx(100 + 100 * 0.5 / (1 - 0.0625 / 3))


def test_the_area_under_a_rectangle_is_its_area() -> None:
    found = summary(1.0, 0.5)
    assert (found.span.value, found.gap_area.value) == (400, 200)


def test_a_rise_is_told_by_how_far_it_stands_above_the_fit() -> None:
    assert summary((1.0, 0.2, 0.8, 0.0), 0.0).nonmonotone == pytest.approx(0.3)
    assert summary((1.0, 0.8, 0.2, 0.0), 0.0).nonmonotone == 0.0


def test_warm_up_at_lengths_too_short_to_judge_is_no_rise() -> None:
    assert summary((0.2, 1.0, 1.0, 0.2), lengths=(8, 100, 200, 300)).nonmonotone == 0.0


def test_the_memory_index_is_zero_where_the_control_leaves_nothing_to_remember() -> None:
    assert stats.memory_index(stats.curve(rows(1.0, (0.5, 1.0, 1.0, 0.5)))).tolist() == [1.0, 0.0, 0.0, 1.0]


# the fit


def naive_isotonic(values: np.ndarray, weights: np.ndarray) -> list[float]:
    """Pools neighbours that rise, until none does."""
    blocks = [[value, weight, 1] for value, weight in zip(values, weights, strict=True)]
    while rising := [i for i in range(len(blocks) - 1) if blocks[i][0] < blocks[i + 1][0]]:
        (a, v, m), (b, w, n) = blocks[rising[0]], blocks.pop(rising[0] + 1)
        blocks[rising[0]] = [(a * v + b * w) / (v + w), v + w, m + n]
    return [value for value, _, count in blocks for _ in range(int(count))]


@pytest.mark.parametrize("seed", range(5))
def test_the_fit_equals_its_naive_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, weights = rng.random(30), rng.integers(1, 10, 30).astype(float)
    np.testing.assert_allclose(headlines.isotonic(values, weights), naive_isotonic(values, weights), atol=1e-12)


@pytest.mark.parametrize("warm_up", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_crossings_are_where_the_fit_is_interpolated(seed: int, warm_up: bool) -> None:
    rng = np.random.default_rng(seed)
    lengths, weights = np.cumsum(rng.integers(1, 50, 12)), rng.integers(1, 10, 12).astype(float)
    values = np.linspace(rng.uniform(0.2, 1.2), rng.uniform(-0.2, 0.8), 12) + rng.normal(0, 0.2, (40, 12))
    found, beyond = headlines.crossings(lengths, values, 0.5, weights, warm_up=warm_up)
    for row, value, censored in zip(values, found, beyond, strict=True):
        first = int(np.argmax(row > 0.5)) if warm_up else 0
        fit = naive_isotonic(row[first:], weights[first:])
        below = [i for i, fitted in enumerate(fit) if fitted <= 0.5]
        if not (row > 0.5).any() or fit[0] <= 0.5:
            assert (value, censored) == (0.0, False)
        elif not below:
            assert (value, censored) == (lengths[-1], True)
        else:
            high, low, at = fit[below[0] - 1], fit[below[0]], lengths[first + below[0] - 1 :]
            assert value == pytest.approx(at[0] + (high - 0.5) / (high - low) * (at[1] - at[0]))
            assert not censored


def test_the_papers_coarse_length_grows_with_the_lengths_measured_and_ours_does_not() -> None:
    def mean_lengths(num_amnesia: int) -> tuple[float, float]:
        rng = np.random.default_rng(0)
        memory = np.arange(100, 1100, 100)
        lengths = np.concatenate([memory, np.linspace(1200, 16_000, num_amnesia).astype(int)])
        gap = np.concatenate([np.full(len(memory), 0.5), np.zeros(num_amnesia)])
        found = []
        for _ in range(40):
            control = np.full((4, len(lengths)), 0.4)
            copy = control + gap + rng.normal(0, 0.017, control.shape)
            one = stats.MeasuredCurve(lengths, lengths, copy, control, {}, 2 * lengths, np.full(copy.shape, ""))
            numbers = stats.summarise(one, bootstraps=0)
            found.append((numbers.paper_coarse.value, numbers.coarse.value))
        paper, ours = np.mean(found, 0)
        return float(paper), float(ours)

    (few_paper, few_ours), (many_paper, many_ours) = mean_lengths(8), mean_lengths(64)
    assert many_paper > 1.5 * few_paper
    assert many_paper > 10 * 1100
    assert many_ours < 1.1 * few_ours
    assert many_ours < 2 * 1100


# intervals


def test_one_repeat_has_no_interval() -> None:
    half_life = summary(STEP, repeats=1, bootstraps=50).half_life
    assert (half_life.low, half_life.high) == (None, None)


def test_a_crossing_between_lengths_of_one_text_has_no_interval() -> None:
    copies = np.tile(STEP, (4, 1))
    copies[:, 0] -= 0.0, 0.02, 0.01, 0.0
    few = [one for one in rows(copies) if one.length <= 200 or one.repeat == 0]
    found = stats.summarise(stats.curve(few), bootstraps=50)
    assert (found.half_life.value, found.half_life.low, found.half_life.high) == (pytest.approx(300), None, None)
    assert (found.span.low is None, found.repeats) == (False, 4)


def test_areas_that_all_repeats_have_and_equal_means_have_no_interval() -> None:
    found = summary(STEP, repeats=5, bootstraps=50)
    assert (found.span.value, found.span.low, found.span.high) == (pytest.approx(300), None, None)
    assert (found.gap_area.low, str(found.span)) == (None, "300")
    low, high = stats.interval(np.array([[0.5, 0.5, 0.0], [0.5, 0.7, 0.0]]))
    assert np.isnan([low[0], high[0], low[2], high[2]]).all()
    assert low[1] < 0.6 < high[1]


def test_repeats_that_agree_leave_open_where_between_two_lengths_the_curve_crosses() -> None:
    half_life = summary((1.0, 1.0, 0.7, 0.2), repeats=5, bootstraps=50).half_life
    assert half_life.value == pytest.approx(325, abs=5)
    assert (half_life.low, half_life.high) == (300, 400)


@pytest.mark.parametrize("repeats", [4, 10])
def test_a_cliff_between_two_lengths_is_inside_the_interval(repeats: int) -> None:
    # interpolation places it in the middle, and chance by some tokens around that
    lengths, rng = np.linspace(1000, 16_000, 16, dtype=int), np.random.default_rng(0)
    held = 0
    for seed in range(40):
        control = 0.4 + rng.normal(0, 0.03, (repeats, 1)) + np.zeros(16)
        copy = control + (lengths < 5100) * (1 - control) + rng.normal(0, 0.017, control.shape)
        one = stats.MeasuredCurve(
            lengths, lengths, np.clip(copy, 0, 1), control, {}, 2 * lengths, np.full(copy.shape, "")
        )
        found = stats.summarise(one, seed=seed, bootstraps=100)
        held += all(getattr(found, name).low <= 5100 <= getattr(found, name).high for name in ("half_life", "reach"))
    assert held >= 36


@pytest.mark.parametrize("repeats", [4, 10, 32])
@pytest.mark.parametrize("noise", [0.02, 0.05])
def test_a_model_without_memory_has_memory_lengths_of_0_or_intervals_that_hold_0(noise: float, repeats: int) -> None:
    lengths, rng, trials = np.linspace(512, 8192, 16, dtype=int), np.random.default_rng(repeats), 20
    names = (*stats.CROSSINGS, "paper_fine", "paper_coarse", "span")
    held = dict.fromkeys(names, 0)
    for seed in range(trials):
        control = np.full((repeats, 16), 0.4)
        copy = control + rng.normal(0, noise, control.shape)
        one = stats.MeasuredCurve(lengths, lengths, copy, control, {}, 2 * lengths, np.full(copy.shape, ""))
        found = stats.summarise(one, seed=seed, bootstraps=100)
        for name in names:
            length = getattr(found, name)
            held[name] += length.value == 0 or (length.low is not None and length.low <= 0 <= length.high)
    assert min(held.values()) >= 0.9 * trials - 2


def test_a_lucky_length_is_no_memory_and_it_is_said() -> None:
    lengths = np.arange(100, 1700, 100)
    noise = np.random.default_rng(5).normal(0, 0.03, (4, 16))
    one = stats.MeasuredCurve(
        lengths, lengths, 0.4 + noise, np.full((4, 16), 0.4), {}, 2 * lengths, np.full((4, 16), "")
    )
    found = stats.summarise(one, bootstraps=100).paper_coarse
    assert (found.value, found.low) == (1400, 0)
    assert "joint test" in found.reason


def unevenly_measured(excess: np.ndarray, few: int | list[int]) -> stats.MeasuredCurve:
    """A curve of six texts, of which the lengths `few` have two."""
    copy, control = 0.4 + excess, np.full(excess.shape, 0.4)
    copy[2:, few], control[2:, few] = np.nan, np.nan
    lengths = np.arange(1, 9) * 64
    return stats.MeasuredCurve(lengths, lengths, copy, control, {}, 2 * lengths, np.full(copy.shape, ""))


@pytest.mark.parametrize("few", [1, 3, 7])
def test_one_length_of_few_texts_does_not_hide_a_memory_that_the_others_show(few: int) -> None:
    rng = np.random.default_rng(few)
    found = stats.summarise(unevenly_measured((np.arange(8) < 5) * 0.45 + rng.normal(0, 0.08, (6, 8)), few))
    assert found.half_life.low > 0
    assert "joint test" not in found.half_life.reason


@pytest.mark.parametrize("few", [0, 1, 7])
def test_the_joint_test_shows_a_memory_in_5_of_100_models_without_one(few: int) -> None:
    rng, trials = np.random.default_rng(few), 400
    curves = (unevenly_measured(rng.normal(0, 0.05, (6, 8)), few) for _ in range(trials))
    shown = sum(stats.exceeds(one, "gap", stats.JOINT_LEVEL) for one in curves)
    assert 0.02 * trials <= shown <= 0.085 * trials  # three standard deviations of chance around 5 %


@pytest.mark.parametrize(("copy", "control", "name"), [(1.0, 0.2, "fine"), (1 / 32, 0.0, "gap")])
def test_equal_accuracies_of_few_tokens_show_less_than_those_of_many(copy: float, control: float, name: str) -> None:
    """Half of the tokens of a length are scored, in two texts: 64 or 6,400 tokens in all."""
    few, many = (stats.curve(rows(copy, control, lengths=(length,))) for length in (64, 6400))
    assert not stats.exceeds(few, name, stats.JOINT_LEVEL)
    assert stats.exceeds(many, name, stats.JOINT_LEVEL)


@pytest.mark.parametrize("repeats", [2, 6])
def test_the_statistic_of_a_whole_curve_is_the_largest_t_of_its_windows(repeats: int) -> None:
    curves = np.random.default_rng(0).normal(0.2, 1, (40, repeats, 5))
    largest = [max(ttest_1samp(one[:, :end].sum(1), 0).statistic for end in range(1, 6)) for one in curves]
    found = joint_test._statistic(curves, np.ones((repeats, 5), bool), False)
    assert np.array_equal(np.argsort(found), np.argsort(largest))
    normal = norm.isf(student.sf(np.array(largest), repeats - 1))
    assert found == pytest.approx(normal, rel=0.1 if repeats == 2 else 0.01)


def test_the_memory_index_of_repeats_has_its_mean_and_its_jackknife_error() -> None:
    rng = np.random.default_rng(0)
    control = rng.uniform(0.1, 0.7, (5, 8))
    copy = control + rng.uniform(0, 1, (5, 8)) * (1 - control)
    copy[3:, 2], control[3:, 2] = np.nan, np.nan
    lengths = np.arange(1, 9) * 64
    one = stats.MeasuredCurve(lengths, lengths, copy, control, {}, 2 * lengths, np.full(copy.shape, ""))
    found = stats.index_by_repeat(one)
    assert np.allclose(stats.measured_mean(found), stats.memory_index(one))
    for at in range(8):
        kept = np.flatnonzero(np.isfinite(copy[:, at]))
        one_left_out = [np.setdiff1d(kept, r) for r in kept]
        index = [(copy[o, at] - control[o, at]).mean() / (1 - control[o, at]).mean() for o in one_left_out]
        n = len(kept)
        error = math.sqrt((n - 1) / n * np.sum((np.array(index) - np.mean(index)) ** 2))
        assert found[kept, at].std(ddof=1) / math.sqrt(n) == pytest.approx(error)


def test_the_memory_index_of_repeats_is_0_where_the_control_leaves_nothing_to_remember() -> None:
    one = stats.curve(rows((1.0, 1.0, 0.9, 0.9), 1.0))
    assert stats.index_by_repeat(one)[:, :2].tolist() == [[0.0, 0.0]] * len(one.copy)


@pytest.mark.parametrize("noise", ["of the accuracy", "of the index"])
@pytest.mark.parametrize("index", [0.0, 0.5])
def test_the_interval_of_the_memory_index_holds_the_truth_where_texts_differ_in_control(
    index: float, noise: str
) -> None:
    rng, held, trials, lengths = np.random.default_rng(0), 0, 1000, np.array([64])
    for _ in range(trials):
        control = rng.uniform(0.1, 0.8, (6, 1))
        sigma = 0.1 * (1 - control) if noise == "of the index" else 0.05
        copy = control + index * (1 - control) + rng.normal(0, 1, (6, 1)) * sigma
        one = stats.MeasuredCurve(lengths, lengths, copy, control, {}, 2 * lengths, np.full(copy.shape, ""))
        (low,), (high,) = stats.interval(stats.index_by_repeat(one))
        held += low <= index <= high
    assert 0.93 * trials <= held <= 0.97 * trials


def test_the_memory_index_of_a_length_without_a_whole_repeat_has_no_spread() -> None:
    one = stats.curve(rows((1.0, 0.9, 0.8, 0.7)))
    halves = replace(one, copy=one.copy.copy(), control=one.control.copy())
    halves.copy[0, 1], halves.control[1, 1] = np.nan, np.nan
    found = stats.index_by_repeat(halves)
    assert np.allclose(stats.measured_mean(found), stats.memory_index(halves))
    assert np.isfinite(found).sum(0).tolist() == [2, 1, 2, 2]


def test_a_span_below_minus_the_longest_length_is_within_its_interval() -> None:
    # copies that are predicted much worse than they are guessed: an index of (0.6 - 0.9) / (1 - 0.9)
    found = summary(np.array([[0.6, 0.6], [0.58, 0.6], [0.62, 0.61]]), 0.9, 50, lengths=(100, 200))
    assert found.span.value == pytest.approx(-600, abs=5)
    assert found.span.low < found.span.value < found.span.high < -500
    assert found.gap_area.low >= -200


def test_the_interval_of_a_span_is_wider_where_some_lengths_have_few_texts() -> None:
    rng, held, trials = np.random.default_rng(0), 0, 100
    for _ in range(trials):
        span = stats.summarise(unevenly_measured(rng.normal(0, 0.02, (6, 8)), [1, 5]), bootstraps=200).span
        held += span.low <= 0 <= span.high
    assert held >= 0.92 * trials


def test_an_area_below_0_lies_inside_its_interval() -> None:
    level = np.linspace(-0.05, -0.09, 4)[:, None] + np.zeros(4)
    found = summary(0.4 + level, 0.4, bootstraps=200)
    for area in (found.span, found.gap_area):
        assert area.low < area.value < area.high < 0


def test_texts_that_no_repeat_is_like_move_the_outer_ends_further() -> None:
    lengths = np.arange(100, 2100, 100)
    ends = np.array([900, 1000, 1100, 1200])[:, None]
    copy = 0.4 + 0.6 / (1 + np.exp((lengths - ends) / 20))
    one = stats.MeasuredCurve(
        lengths, lengths, copy, np.full(copy.shape, 0.4), {}, 2 * lengths, np.full(copy.shape, "")
    )
    found = memory_lengths._unseen_texts(one)
    expected = 2.353 * np.std([900, 1000, 1100, 1200], ddof=1) * (1 - 0.01 / 0.6) ** 4
    assert found["fine"] == pytest.approx(expected, rel=0.05)
    assert found["reach"] < found["fine"]
    assert found["half_life"] < 0.1 * found["fine"]


def test_a_resample_keeps_a_repeats_lengths_together() -> None:
    # the area of two lengths is 150 copy[0] + 50 copy[1]: here the same in each repeat, so that it has no spread
    deviation = np.linspace(-0.1, 0.1, 8)
    span = summary(np.stack([0.6 + deviation, 0.6 - 3 * deviation], 1), 0.0, 50, lengths=(100, 200)).span
    assert (span.value, span.low, span.high) == (pytest.approx(120), None, None)


def test_lengths_that_vary_together_widen_the_interval_of_the_area() -> None:
    level = np.linspace(0.4, 0.8, 8)
    found = stats.curve(rows(np.stack([level, level], 1), 0.0, lengths=(100, 200)))
    low, high = stats.bands(found.copy)
    span = stats.summarise(found).span
    assert span.high - span.low == pytest.approx(200 * (high - low)[0], rel=0.1)


def test_the_same_seed_gives_the_same_interval() -> None:
    copy = np.random.default_rng(0).random((6, 4))
    assert summary(copy, 0.0, 50).span == summary(copy, 0.0, 50).span


def test_drawn_means_spread_as_means_of_so_many_repeats_do() -> None:
    values = np.random.default_rng(0).normal(0.5, 0.1, (8, 2))
    values[4:, 0] = np.nan  # four repeats at one length, eight at the other
    drawn = headlines._sampled(values, stats.multipliers(8, 40_000, 0))
    for column, count in ((0, 4), (1, 8)):
        expected = values[:count, column].std(ddof=1) / np.sqrt(count)
        assert drawn[:, column].std() == pytest.approx(expected, rel=0.02)
        assert drawn[:, column].mean() == pytest.approx(values[:count, column].mean(), abs=1e-3)
    deviation = values - np.nanmean(values, axis=0)
    expected = np.nansum(deviation[:, 0] * deviation[:, 1]) / np.sqrt(4 * 3 * 8 * 7)
    assert np.cov(drawn.T)[0, 1] == pytest.approx(expected, abs=3e-5)


def test_a_crossing_rests_on_the_fewer_repeats_around_it_and_an_area_on_those_of_its_variance() -> None:
    found = stats.curve([*rows(STEP, repeats=4), *[row(n, r, 0.5, 0.2) for n in (200, 300) for r in range(4, 9)]])
    assert stats.repeats_of(found, "half_life", 250.0) == 9
    assert stats.repeats_of(found, "half_life", 350.0) == 4
    assert stats.repeats_of(found, "span", 250.0) == pytest.approx(5.418, abs=1e-3)
    assert stats.repeats_near(stats.curve(rows(STEP, repeats=1)), 250.0) == 2


@pytest.mark.parametrize("repeats", [4, 10])
@pytest.mark.parametrize(("scale", "text", "shift"), [(60, 0.05, 0), (291, 0.15, 200)], ids=["steep", "texts differ"])
def test_intervals_hold_the_truth_19_times_in_20(scale: float, text: float, shift: float, repeats: int) -> None:
    # benchmarks/interval_coverage.py has more curves, designs and trials
    lengths, trials = np.linspace(8, 16_000, 32, dtype=int), 100
    rng = np.random.default_rng(repeats)

    def drawn(count: int) -> tuple[np.ndarray, np.ndarray]:
        control = np.clip(0.45 + rng.normal(0, text, (count, 1)) + np.zeros(32), 0.01, 0.95)
        copy = control + (1 - control) / (1 + np.exp((lengths - 5086 - rng.normal(0, shift, (count, 1))) / scale))
        return np.clip(copy + rng.normal(0, 0.034, copy.shape) * np.sqrt(copy * (1 - copy)), 0, 1), control

    def found(copy: np.ndarray, control: np.ndarray) -> stats.MeasuredCurve:
        return stats.MeasuredCurve(lengths, lengths, copy, control, {}, 2 * lengths, np.full(copy.shape, ""))

    true = stats.headline(found(*drawn(20_000)))
    held = dict.fromkeys(("fine", "half_life", "reach", "span"), 0)
    for seed in range(trials):
        numbers = stats.summarise(found(*drawn(repeats)), seed=seed, bootstraps=200)
        for name in held:
            length = getattr(numbers, name)
            held[name] += length.low <= true[name][0] <= length.high
    for count in held.values():
        assert 0.88 * trials <= count  # three standard deviations of so many trials are 0.065


# failures and gaps


def test_a_failed_row_is_a_gap_and_is_named() -> None:
    found = stats.curve(
        [*rows(STEP, repeats=1), *[row(n, 1, 0.4, 0.2) for n in (100, 300, 400)], failed(200, 1, "nan")]
    )
    assert np.isnan(found.copy[1]).tolist() == [False, True, False, False]
    assert stats.measured_mean(found.copy).tolist() == pytest.approx([0.7, 1.0, 0.5, 0.3])
    assert stats.summarise(found, bootstraps=0).failed == {200: "nan"}


def test_a_length_where_every_repeat_failed_is_left_out_of_the_numbers() -> None:
    found = stats.curve([r for r in rows(STEP) if r.length != 200] + [failed(200, r, "oom") for r in range(2)])
    assert found.measured.tolist() == [True, False, True, True]
    assert stats.summarise(found, bootstraps=0).half_life.value == pytest.approx(300)


def test_a_repeat_that_failed_everywhere_does_not_widen_the_interval() -> None:
    measured = rows(STEP, repeats=1) + [failed(n, 1, "nan") for n in LENGTHS]
    alone = stats.summarise(stats.curve(measured), bootstraps=50)
    assert (alone.half_life.value, alone.half_life.low, alone.repeats) == (pytest.approx(300), None, 1)


def test_bands_are_students_intervals_and_need_two_repeats() -> None:
    low, high = stats.bands(np.array([[0.5, 0.5], [0.6, np.nan], [0.7, np.nan]]))
    half = 4.3027 * 0.1 / np.sqrt(3)  # t of two degrees of freedom
    assert [low[0], high[0]] == pytest.approx([0.6 - half, 0.6 + half], abs=1e-4)
    assert np.isnan([low[1], high[1]]).all()


def test_a_curve_of_failures_alone_has_no_numbers() -> None:
    with pytest.raises(ValueError, match=r"no length was measured.*oom"):
        stats.summarise(stats.curve([failed(100, 0, "oom")]))


def test_no_rows_are_no_curve() -> None:
    with pytest.raises(ValueError, match="no rows"):
        stats.curve([])


# which rows belong together


def ring(repeat: int, of: int) -> Row:
    """A row of `nested`: its control was asked for the target of the repeat before it."""
    scores = {"copy": 1.0, "control": repeat / 10, "control_repeat": (repeat - 1) % of, "scored": 50, "context": 202}
    return row(100, repeat, 0, 0, scores=scores)


def test_a_control_is_paired_with_the_copy_of_its_own_target() -> None:
    found = stats.curve([ring(repeat, of=3) for repeat in range(3)])
    assert found.control[:, 0].tolist() == [0.1, 0.2, 0.0]


def test_a_run_that_is_not_finished_has_a_curve() -> None:
    found = stats.summarise(stats.curve([ring(repeat, of=4) for repeat in range(2)]), bootstraps=50)
    assert found.half_life.value == 100


@pytest.mark.parametrize("change", [{"model": "other"}, {"method": "sinks"}, {"settings": SETTINGS | {"compat": True}}])
def test_rows_of_two_curves_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="belong to 2 curves"):
        stats.curve([row(100, 0, 1.0, 0.2), row(200, 0, 1.0, 0.2, **change)])


def test_two_versions_of_a_task_are_two_curves_with_labels_of_their_own() -> None:
    both = rows(STEP) + [replace(r, version=2, example=f"{r.example} new") for r in rows(STEP)]
    names = ["nested, books (task version 1)", "nested, books (task version 2)"]
    assert [what for _, _, what in stats.by_curve(both)] == names
    assert [what for _, _, what in stats.curves(both)] == names
    assert [what for _, _, what in stats.by_curve(rows(STEP))] == ["nested, books"]


def test_thousands_of_repeats_take_a_time_linear_in_rows() -> None:
    many = [row(100, repeat, 1.0, 0.2) for repeat in range(20_000)]
    started = time.process_time()
    stats.curve(many)
    assert time.process_time() - started < 2  # searching the repeats for every row takes more


def test_rows_are_sorted_into_their_curves() -> None:
    found = stats.curves([row(100, 0, 1.0, 0.2, model=name) for name in "ab"] + [row(100, 0, 1.0, 0.2, task="recall")])
    assert list(found) == [("a", "full", "nested, books"), ("b", "full", "nested, books")]


# text known by heart


def test_a_control_far_above_the_others_is_found_contaminated() -> None:
    control = np.array([[0.40], [0.41], [0.42], [0.43], [0.60]])
    found = summary(np.ones((5, 1)), control, lengths=(100,))
    assert found.contaminated == [{"length": 100, "repeat": 4, "control": 0.60}]


def test_a_contaminated_window_has_the_number_of_its_repeat_where_the_first_repeats_are_missing() -> None:
    some = [
        replace(one, repeat=one.repeat + 4) for one in rows(np.ones((3, 1)), np.array([[0.2], [0.2], [0.9]]), (100,))
    ]
    for one in some:
        one.scores["control_repeat"] += 4
    found = stats.summarise(stats.curve(some), bootstraps=0)
    assert found.contaminated == [{"length": 100, "repeat": 6, "control": 0.9}]


def test_a_fit_that_equals_the_level_to_the_end_crosses_where_it_falls_to_it() -> None:
    half = summary((0.99, 0.46, 0.54), 0.0, lengths=(256, 512, 1024)).half_life  # the fit is 0.99, 0.5, 0.5
    assert (half.value, half.censored) == (pytest.approx(512), False)


def test_a_control_that_guesses_nearly_everything_is_found_contaminated() -> None:
    assert summary(1.0, (0.2, 0.9, 0.2, 0.2), repeats=1).contaminated == [{"length": 200, "repeat": 0, "control": 0.9}]


def test_controls_that_agree_are_not_contaminated() -> None:
    found = summary(1.0, 0.4)
    assert (found.contaminated, found.without_contaminated) == ([], {})


def test_the_numbers_without_a_contaminated_window_are_those_of_the_other_repeats() -> None:
    copy, control = np.tile(STEP, (4, 1)), np.full((4, 4), 0.2)
    copy[3, 2] = control[3, 2] = 0.9
    found = summary(copy, control)
    assert found.half_life.value != pytest.approx(300, abs=1)
    assert found.without_contaminated["half_life"] == (pytest.approx(300), False)


def test_texts_of_one_name_in_two_places_are_two_curves() -> None:
    settings = {"protocol": "nested", "compat": False, "target_text": "t.txt", "prefix_text": None}
    found = stats.by_curve(
        [
            replace(r, settings=settings | {"prefix_text": f"/{place}/p.txt"}, example=f"{place} {r.example}")
            for place in "xy"
            for r in rows(STEP)
        ]
    )
    assert [what for _, _, what in found] == ["nested, t.txt after /x/p.txt", "nested, t.txt after /y/p.txt"]


def test_a_failed_row_leaves_neither_half_of_its_targets() -> None:
    """Each text is copied as well as it is guessed, so the gap is 0 whichever row fails."""
    shares = (0.1, 0.3, 0.5, 0.9)

    def row_of(repeat: int) -> Row:
        other = (repeat - 1) % 4
        scores = {"copy": shares[repeat], "control": shares[other], "control_repeat": other}
        return row(100, repeat, 0, 0, scores=scores | {"scored": 50, "context": 202})

    for lost in range(4):
        found = stats.curve([failed(100, lost, "oom") if repeat == lost else row_of(repeat) for repeat in range(4)])
        assert stats.gap(found) == pytest.approx([0.0])
    begun = stats.curve([row_of(0)])
    assert begun.measured.tolist() == [True]


def test_holm_multiplies_by_the_number_of_tests_left_and_counts_only_known_values() -> None:
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert stats.holm([0.01, math.nan, 0.03, None]) == [0.02, None, 0.03, None]


def test_a_length_without_a_result_has_no_memory_index() -> None:
    curve = stats.curve([*rows(0.8, lengths=(100, 200)), failed(300, 0, "oom"), failed(300, 1, "oom")])
    assert stats.memory_index(curve).tolist() == [
        pytest.approx(0.75),
        pytest.approx(0.75),
        pytest.approx(np.nan, nan_ok=True),
    ]
    assert stats.summarise(curve).reach.value == 200
