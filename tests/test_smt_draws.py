"""Sampling with decay: exact levels, the right probabilities, no duplicates, in time; and the draws beside it."""

import time
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import chi2

from farspan.train.draws import (
    Drawn,
    FullLength,
    Pose,
    RandomPositions,
    Spans,
    SparseMemory,
    Uniform,
    draw,
    draw_named,
    levels,
)

from tiny import refused

SETTINGS = [  # M, N, W, T
    (60, 8, None, None),
    (100, 8, None, None),
    (23, 8, None, None),
    (100, 7, None, None),
    (100, 9, 5, None),
    (200, 8, None, 3),
    (15, 8, None, None),
    (64, 16, 8, None),
]


def test_the_levels_of_table_6_are_those_of_the_paper() -> None:
    n = w = 8
    assert levels(w, n) == [(0, w, n)]
    assert levels(2 * w, n) == [(w, 2 * w, n // 2), (0, w, n // 2)]
    assert levels(4 * w, n) == [(3 * w, 4 * w, n // 2), (0, 3 * w, n // 2)]
    assert levels(5 * w, n) == [(4 * w, 5 * w, n // 2), (2 * w, 4 * w, n // 4), (0, 2 * w, n // 4)]
    assert levels(7 * w, n) == [(6 * w, 7 * w, n // 2), (4 * w, 6 * w, n // 4), (0, 4 * w, n // 4)]


def test_the_levels_of_64k_halve_in_count_and_double_in_width() -> None:
    found = levels(65536 - 2048, 2048)
    assert [(high - low, count) for low, high, count in found] == [
        (2048, 1024), (4096, 512), (8192, 256), (16384, 128), (32768, 128),
    ]  # fmt: skip


def test_the_number_of_levels_follows_the_thresholds() -> None:
    width = 64
    for length in range(width, 60 * width):
        thresholds = [(3 * 2**j - 1) * width for j in range(6)]  # 2W, 5W, 11W, 23W, 47W, 95W
        assert len(levels(length, width)) == 1 + sum(length >= threshold for threshold in thresholds)


def test_two_tokens_are_split_and_a_single_one_is_not() -> None:
    assert levels(100, 2) == [(98, 100, 1), (0, 98, 1)]
    assert levels(100, 3) == [(97, 100, 1), (91, 97, 1), (0, 91, 1)]


@pytest.mark.parametrize(("memory", "sampled", "window", "iterations"), SETTINGS)
def test_levels_cover_the_memory_once_and_thin_out(
    memory: int, sampled: int, window: int | None, iterations: int | None
) -> None:
    found = levels(memory, sampled, window, iterations)
    assert found[0][1] == memory
    assert found[-1][0] == 0
    assert all(near[0] == far[1] for near, far in pairwise(found))
    assert sum(count for _, _, count in found) == sampled
    density = [count / (high - low) for low, high, count in found]
    assert min(density) > 0
    if window is None and sampled % 2 == 0:
        assert density == sorted(density, reverse=True)
    assert iterations is None or len(found) <= iterations


@pytest.mark.parametrize(("memory", "sampled", "window", "iterations"), SETTINGS)
def test_every_position_of_a_level_is_drawn_equally_often(
    memory: int, sampled: int, window: int | None, iterations: int | None
) -> None:
    draws, counts = 5000, np.zeros(memory)
    for index in range(draws):
        positions = draw(memory, sampled, np.random.default_rng((3, index)), window, iterations)
        assert (np.diff(positions) > 0).all()
        counts[positions] += 1
    for low, high, count in levels(memory, sampled, window, iterations):
        assert counts[low:high].sum() == count * draws
        width, p = high - low, count / (high - low)
        if p == 1:
            continue
        # drawing without replacement makes the statistic smaller by (width - 1) / width
        statistic = ((counts[low:high] - draws * p) ** 2).sum() / (draws * p * (1 - p)) * (width - 1) / width
        assert chi2.sf(statistic, width - 1) > 1e-4


@pytest.mark.parametrize(("memory", "milliseconds"), [(65536, 0.3), (1 << 20, 1.0)])
def test_a_draw_is_fast_at_any_length(memory: int, milliseconds: float) -> None:
    rng = np.random.default_rng(0)
    seconds = []
    for _ in range(50):
        started = time.process_time()
        draw(memory, 2048, rng)
        seconds.append(time.process_time() - started)
    assert min(seconds) * 1000 < milliseconds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((7, 8), "a memory of 7 tokens holds no 8 different ones"),
        ((100, 8, 3), "window = 3 cannot hold the nearest half of 8 sampled tokens; use at least 4"),
        ((100, 7, 3), "window = 3 cannot hold the nearest half of 7 sampled tokens; use at least 4"),
        ((100, 0), "num_sampled = 0"),
        ((100, 8, None, 0), "max_iterations = 0"),
    ],
)
def test_an_impossible_sampling_is_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        levels(*arguments)


# the draws


def drawn(text: str, length: int = 400, row: int = 32, targets: int = 16, seed: int = 0) -> Drawn:
    return draw_named(text)(length, row, targets, np.random.default_rng(seed))


@pytest.mark.parametrize("text", ["sparse", "sparse:window=10,keep_first=2", "uniform", "spans:span=4", "spans:span=5"])
def test_sampled_memory_keeps_its_positions_before_a_whole_target(text: str) -> None:
    for seed in range(50):
        row = drawn(text, seed=seed)
        assert len(row.tokens) == 32
        assert (row.tokens == row.positions).all()
        assert (np.diff(row.tokens) > 0).all()
        assert row.tokens[-16:].tolist() == list(range(384, 400))
        assert (row.tokens[0] >= 0, row.num_targets) == (True, 16)


def test_the_first_tokens_can_always_be_in_the_memory() -> None:
    assert all(drawn("sparse:keep_first=3", seed=seed).tokens[:3].tolist() == [0, 1, 2] for seed in range(20))


def test_uniform_sampling_has_no_decay() -> None:
    near, far = (
        np.mean([(drawn(text, seed=seed).tokens < 192).sum() for seed in range(300)]) for text in ("uniform", "sparse")
    )
    assert near == pytest.approx(8, abs=0.3)
    assert far < 4


@pytest.mark.parametrize("length", [400, 403, 32])
def test_spans_are_contiguous_and_reach_every_token(length: int) -> None:
    seen: set[int] = set()
    for seed in range(2000):
        memory = drawn("spans:span=4", length, seed=seed).tokens[:-16]
        starts = memory.reshape(-1, 4)
        assert (np.diff(starts, axis=1) == 1).all()
        seen |= set(memory.tolist())
    assert seen == set(range(length - 16))


@pytest.mark.parametrize("chunks", [2, 3])
def test_pose_moves_whole_chunks_apart(chunks: int) -> None:
    gaps, last = 0, 0
    for seed in range(200):
        row = drawn(f"pose:chunks={chunks}", seed=seed)
        assert row.positions[0] == row.tokens[0] == 0
        assert (np.diff(row.positions) >= 1).all()
        assert (np.diff(row.positions) > 1).sum() <= chunks - 1
        gaps, last = max(gaps, int((np.diff(row.positions) > 1).sum())), max(last, int(row.positions[-1]))
        assert (last < 400, row.num_targets) == (True, 31)
    assert (gaps, last > 390) == (chunks - 1, True)


def test_skips_move_one_text_apart_behind_the_first_token() -> None:
    begins, last = set(), 0
    for seed in range(200):
        row = drawn("skip:chunks=3", seed=seed)
        assert row.tokens[0] == row.positions[0] == 0
        assert (np.diff(row.tokens[1:]) == 1).all()
        assert (np.diff(row.positions) >= 1).all()
        assert (np.diff(row.positions) > 1).sum() <= 2
        begins.add(int(row.tokens[1]))
        last = max(last, int(row.positions[-1]))
    assert len(begins) > 50
    assert 390 < last < 400


@pytest.mark.parametrize("row", [32, 33])
def test_a_share_of_the_skips_repeats_a_passage_of_half_a_row(row: int) -> None:
    repeats, begins, last = 0, set(), 0
    for seed in range(400):
        one = drawn("skip:repeat=0.25", row=row, seed=seed)
        half = row - 16
        assert (len(one.tokens), one.num_targets, one.tokens[0]) == (row, row - 1, 0)
        if (one.tokens[half:] == one.tokens[:16]).all():
            repeats += 1
            assert (np.diff(one.tokens[1:half]) == 1).all()
            gap = int(one.positions[half]) - half
            assert one.positions.tolist() == [*range(half), *range(half + gap, row + gap)]
            begins.add(int(one.tokens[1]))
            last = max(last, int(one.positions[-1]), int(one.tokens[-1]))
        else:
            assert (np.diff(one.tokens[1:]) == 1).all()
    assert 70 < repeats < 130
    assert len(begins) > 50
    assert 370 < last < 400


def test_the_end_of_a_document_is_repeated_too() -> None:
    assert max(drawn("skip:repeat=1", 40, seed=seed).tokens.max() for seed in range(200)) == 39


def test_random_positions_stand_under_contiguous_text() -> None:
    rows = [drawn("random", seed=seed) for seed in range(100)]
    assert all((np.diff(row.tokens) == 1).all() and (np.diff(row.positions) >= 1).all() for row in rows)
    assert max(row.positions[-1] for row in rows) == 399
    assert len({int(row.tokens[0]) for row in rows}) > 50


def test_the_full_length_is_everything() -> None:
    row = drawn("full")
    assert row.tokens.tolist() == row.positions.tolist() == list(range(400))
    assert row.num_targets == 399


def test_draws_are_named_with_their_settings() -> None:
    assert draw_named("sparse:window=64,max_iterations=3") == SparseMemory(64, 3)
    assert draw_named("spans:span=32") == Spans(32)
    assert [draw_named(name) for name in ("uniform", "pose", "random", "full")] == [
        Uniform(), Pose(), RandomPositions(), FullLength(),
    ]  # fmt: skip


def test_decoys_end_like_the_middle_of_a_span_and_stand_before_it() -> None:
    seen = set()
    for seed in range(50):
        row = drawn("decoys:smallest=8,largest=24,shared=4,share=1", 4000, 256, 255, seed)
        assert len(row.tokens) == 256
        assert row.tokens[0] == 0
        assert (np.diff(row.tokens[1:128]) == 1).all()  # the first half is contiguous
        jumps = [128, *(i for i in range(129, 256) if row.tokens[i] != row.tokens[i - 1] + 1), 256]
        pieces = [row.tokens[a:b] for a, b in pairwise(jumps)]
        shared, other, span = pieces[:3]
        if len(shared) != 4:  # the other text happens to follow it in the document
            continue
        middle = span.tolist().index(shared[0]) + 4
        assert shared.tolist() == span[middle - 4 : middle].tolist()
        assert other[0] != span[middle]
        assert set(span.tolist()) <= set(row.tokens[1:128].tolist())  # the right one is far
        assert np.diff(row.positions[[127, 128]])[0] >= 1
        assert row.positions[-1] < 4000
        seen.add(middle)
    assert min(seen) <= 5 < 10 <= max(seen)


def test_the_share_of_rows_with_decoys() -> None:
    rows = [drawn("decoys:smallest=8,largest=24,share=0.3", 4000, 256, 255, seed) for seed in range(400)]
    with_decoys = sum(len(np.unique(row.tokens)) < 256 for row in rows)
    assert 90 <= with_decoys <= 150


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sparce", "draw 'sparce' is unknown.*did you mean 'sparse'"),
        ("spans", "needs span"),
        ("spans:span=0", "span = 0 of draw 'spans:span=0' must be at least 1"),
        ("uniform:window=3", "has no settings"),
        ("skip:repeat=1.5", "repeat = 1.5 of draw 'skip:repeat=1.5' is a share of the rows: at most 1"),
        ("skip:repeat=-0.5", "repeat = -0.5 of draw 'skip:repeat=-0.5' must be at least 0"),
        ("decoys:share=2", "share = 2.0 of draw 'decoys:share=2' is a share of the rows: at most 1"),
        ("decoys:smallest=6", "got shared = 4, smallest = 6 and largest = 128"),
        ("decoys:smallest=20,largest=10", "smallest = 20 and largest = 10"),
    ],
)
def test_an_unknown_draw_is_refused(text: str, message: str) -> None:
    with refused(message):
        draw_named(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("spans:span=17", "spans of 17 tokens do not fit into a memory of 16 sampled"),
        ("spans:span=4,window=7", "window = 7 cannot hold the nearest half of 4 spans of 4 tokens; use at least 8"),
        ("sparse:keep_first=16", "keep_first = 16 leaves no token to sample for a memory of 16 tokens"),
        ("pose:chunks=33", "33 chunks do not fit into a row of 32 tokens"),
        ("skip:chunks=33,repeat=0.99", "33 chunks do not fit into a row of 32 tokens; use at most 32"),
        ("decoys:share=0.01", "largest = 128 tokens do not fit into half a row of 32 tokens; use at most 15"),
    ],
)
def test_a_draw_that_does_not_fit_the_row_is_refused(text: str, message: str) -> None:
    """Whatever the seed: a training makes only its first row before it begins."""
    for seed in range(8):
        with refused(message):
            drawn(text, seed=seed)
