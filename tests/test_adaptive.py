"""`--lengths auto` against readers whose memory ends at a known place."""

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from farspan import stats
from farspan.measuring import adaptive
from farspan.measuring.adaptive import (
    TimeBudget,
    coarse_lengths,
    finer_lengths,
    measure_adaptively,
    prepared,
    undecided,
)
from farspan.measuring.loop import Watch, measure_cell
from farspan.record import Row, Run, read_rows
from farspan.report.cells import cells
from farspan.tasks.curve import BoundCurve

from toys import ToyMethod, copier, counting_text, curve_of, fading, toy_lm

LONGEST = 512


def adaptively(
    folder: Path,
    rule: Any,
    task: BoundCurve | None = None,
    longest: int = LONGEST,
    repeats: int | None = None,
    budget: TimeBudget | None = None,
    watch: Watch | None = None,
) -> list[Row]:
    task, longest = prepared(task or curve_of(counting_text(40, 2000)), longest, repeats)
    with Run.open(folder, {}) as run:
        return measure_adaptively(
            task,
            ToyMethod(rule),
            toy_lm(),
            run,
            longest=longest,
            repeats=repeats,
            seed=0,
            batch=4,
            chunk=None,
            budget=budget or TimeBudget(),
            watch=watch or Watch(),
        )


def tokens(rows: Sequence[Row], task: BoundCurve) -> int:
    """What was fed, each reading of a text counted once."""
    repeats = task.pool or 10
    examples = {e.id: e for e in task.examples(toy_lm(), (LONGEST,), repeats, 0)}
    lengths = {id: tuple(sorted(r.length for r in rows if r.example == id)) for id in {r.example for r in rows}}
    return sum(
        work.num_rows * work.num_tokens
        for id, found in lengths.items()
        for work in task.work(toy_lm(), adaptive.replace(examples[id], lengths=found))
    )


def test_the_coarse_grid_is_even_above_and_halves_below() -> None:
    assert coarse_lengths(512) == (64, 128, 192, 256, 320, 384, 448, 512)
    assert coarse_lengths(16_000)[:5] == (125, 250, 500, 1000, 2000)
    assert coarse_lengths(40) == (40,)


@pytest.mark.parametrize("distance", [100, 205, 333])
def test_the_end_of_memory_is_found_to_a_32nd_of_the_longest_length(distance: int, tmp_path: Path) -> None:
    rows = adaptively(tmp_path, copier(distance))
    half_life = stats.summarise(stats.curve(rows), bootstraps=0).half_life.value
    assert abs(half_life - (distance - 1)) <= LONGEST / 32
    assert len({row.length for row in rows}) < 20


def test_what_lies_beyond_three_lengths_of_amnesia_is_not_measured(tmp_path: Path) -> None:
    rows = adaptively(tmp_path, copier(150))
    assert max(row.length for row in rows) == 320  # 192, 256 and 320 are amnesia
    assert all(row.status == "ok" for row in rows)


def test_a_reader_that_remembers_everything_is_measured_to_the_end(tmp_path: Path) -> None:
    rows = adaptively(tmp_path, copier(10_000))
    assert {row.length for row in rows} == set(coarse_lengths(LONGEST))
    assert stats.summarise(stats.curve(rows), bootstraps=0).reach.censored


def test_repeats_are_added_where_a_threshold_is_undecided_and_nowhere_else(tmp_path: Path) -> None:
    rows = adaptively(tmp_path, fading(300, noise=0.06))
    repeats = {length: sum(row.length == length for row in rows) for length in {row.length for row in rows}}
    found = stats.summarise(stats.curve(rows))
    assert found.half_life.low is not None
    assert found.half_life.high is not None
    busy = [length for length, count in repeats.items() if count > 4]
    assert 2 <= len(busy) < len(repeats) / 2
    assert min(abs(length - found.half_life.value) for length in busy) < LONGEST / 8
    for length in busy:
        assert min(abs(length - threshold.value) for threshold in (found.half_life, found.reach)) < LONGEST / 6


def test_what_lies_within_chance_is_not_measured_more_finely(tmp_path: Path) -> None:
    lengths = {
        noise: {row.length for row in adaptively(tmp_path / str(noise), fading(300, noise))} for noise in (0, 0.3)
    }
    assert lengths[0] > lengths[0.3] == set(coarse_lengths(LONGEST))


def test_repeats_that_would_not_help_are_not_made_and_said(tmp_path: Path) -> None:
    said: list[str] = []
    rows = adaptively(tmp_path, fading(300, noise=0.3), watch=Watch(notice=said.append))
    assert max(row.repeat for row in rows) == 3
    wanted = f"of half-life within {LONGEST // 32} tokens or 5% of it needs more than 32 repeats"
    assert any(wanted in line and "(--repeats)" in line for line in said)


def test_given_repeats_stay_as_they_are(tmp_path: Path) -> None:
    rows = adaptively(tmp_path, fading(300, noise=0.06), repeats=6)
    assert {row.repeat for row in rows} == set(range(6))
    counts = {length: sum(row.length == length for row in rows) for length in {row.length for row in rows}}
    assert set(counts.values()) == {6}


def test_a_third_of_the_tokens_of_a_fixed_grid_gives_the_same_lengths(tmp_path: Path) -> None:
    task = curve_of(counting_text(40, 2000))
    rule = fading(300, noise=0.06)
    rows = adaptively(tmp_path / "auto", rule, task)
    grid = tuple(LONGEST * i // 32 for i in range(1, 33))
    with Run.open(tmp_path / "fixed", {}) as run:
        fixed = measure_cell(task, ToyMethod(rule), toy_lm(), run, lengths=grid, repeats=10, batch=5)
    assert 3 * tokens(rows, prepared(task, LONGEST, None)[0]) < tokens(fixed, task)
    ours, theirs = (stats.summarise(stats.curve(found)) for found in (rows, fixed))
    for name in ("half_life", "reach"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert a.low <= b.high
        assert b.low <= a.high


@pytest.mark.parametrize(
    ("half_life", "noise", "cuts"), [(300, 0.06, (3, 30, 74)), (150, 0.2, (60, 75))], ids=["lengths", "repeats"]
)
def test_a_killed_run_decides_as_if_it_had_not_been(
    half_life: int, noise: float, cuts: tuple[int, ...], tmp_path: Path
) -> None:
    rule = fading(half_life, noise)
    whole = adaptively(tmp_path / "whole", rule)
    kept = (tmp_path / "whole" / "rows.jsonl").read_text().splitlines(keepends=True)
    for cut in cuts:
        folder = tmp_path / f"cut-{cut}"
        adaptively(folder, copier(1), longest=64)  # a run folder, emptied and filled with the first rows
        (folder / "rows.jsonl").write_text("".join(kept[:cut]))
        again = adaptively(folder, rule)
        assert {row.key for row in again} == {row.key for row in whole}


def test_what_ran_out_of_memory_at_every_length_is_measured_by_the_next_run(tmp_path: Path) -> None:
    rule, short = copier(150), True

    def needs_memory(back: int, position: int, text: int) -> bool:
        if short:
            raise torch.OutOfMemoryError("not enough memory: you tried to allocate 9 GiB")
        return rule(back, position, text)

    whole = adaptively(tmp_path / "whole", rule)
    assert {row.status for row in adaptively(tmp_path / "run", needs_memory)} == {"oom"}
    short = False
    again = adaptively(tmp_path / "run", needs_memory)
    assert {row.status for row in again} == {"ok"}
    hits = {row.key: row.scores["copy_hits"] for row in again}
    assert {key: hits[key] for key in (row.key for row in whole)} == {row.key: row.scores["copy_hits"] for row in whole}


def test_a_map_has_every_depth_at_every_length(tmp_path: Path) -> None:
    task = curve_of(counting_text(40, 2000), protocol="probe", warmup=8, scored=24, depths=(0.0, 0.5, 1.0))
    rows = adaptively(tmp_path, copier(150), task)
    found = stats.memory_map(rows)
    assert set(coarse_lengths(LONGEST, 33)[:4]) < set(found.lengths.tolist())
    assert np.isfinite(found.memory_index).all()
    assert found.depths.tolist() == [0, 0.5, 1]
    recalled = found.memory_index == 1.0
    assert (recalled == (found.distance <= 150)).all()


def test_a_mean_over_depths_is_over_texts_that_were_measured_at_all_of_them(tmp_path: Path) -> None:
    # repeats that decide a half-life are measured at depth 0 alone, where the least is remembered
    task = curve_of(counting_text(40, 2000), protocol="probe", warmup=8, scored=24, depths=(0.0, 0.5, 1.0))
    rows = adaptively(tmp_path, fading(300, noise=0.06), task)
    repeats = {length: Counter(row.depth for row in rows if row.length == length) for length in (320, 448)}
    assert repeats == {320: {0.0: 4, 0.5: 4, 1.0: 4}, 448: {0.0: 12, 0.5: 4, 1.0: 4}}
    quality = {"score": "copy - control", "name": "copied", "higher_is_better": True, "exp": False, "graded": True}
    entry = {"task": "curve", "unit": "tokens", "quality": quality, "details": ["copy"], "same_at_depths": True}
    settings = {"tasks": {"curve": entry}, "methods": ["toy"]}
    header = {"settings": settings, "models": {"toy": {"tasks": {"curve": rows[0].settings}}}}
    found = {cell.length: cell for cell in cells(rows, header)}
    for length, cell in found.items():
        of_all = [row.scores["copy"] for row in rows if row.length == length and row.repeat < 4]  # no token is guessed
        assert (cell.n, cell.value, cell.details["copy"]) == (4, *2 * [pytest.approx(np.mean(of_all))])


# budgets


def ticking(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    """A clock on which each look takes `step` seconds."""
    clock = itertools.count(0.0, step)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))


def test_a_budget_that_runs_out_leaves_rows_that_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive._Rounds, "affordable", lambda self, grid, repeats: grid)
    ticking(monkeypatch, 1.0)
    rows = adaptively(tmp_path, copier(10_000), budget=TimeBudget(6.5, started=0.0))
    left_out = [row for row in rows if row.status == "budget"]
    assert left_out
    assert {row.length for row in rows} == set(coarse_lengths(LONGEST))
    summary = stats.summarise(stats.curve(rows), bootstraps=0)
    assert summary.reach.censored
    assert summary.reach.reason == "the time given ran out"


def test_more_time_measures_what_was_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(adaptive._Rounds, "affordable", lambda self, grid, repeats: grid[:3])
        adaptively(tmp_path, copier(10_000), budget=TimeBudget(1e6))
    assert any(row.status == "budget" for row in read_rows(tmp_path))
    rows = adaptively(tmp_path, copier(10_000))
    assert {row.status for row in rows} == {"ok"}
    assert np.isfinite(stats.curve(rows).copy).all()
    assert len({(row.repeat, row.length) for row in rows}) == len(rows)


@pytest.mark.parametrize(("left", "lengths"), [(1000.0, 8), (100.0, 3), (0.0, 0)])
def test_the_plan_says_how_many_lengths_a_budget_allows(
    left: float, lengths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned(task: BoundCurve, *_: Any, lengths: tuple[int, ...], **__: Any) -> Any:
        return SimpleNamespace(flops=float(sum(lengths)), seconds=sum(lengths) / 5)

    monkeypatch.setattr(adaptive, "plan", planned)
    if lengths:
        rows = adaptively(tmp_path, copier(10_000), budget=TimeBudget(left))
        measured = {row.length for row in rows if row.status == "ok"}
        assert measured == set(coarse_lengths(LONGEST)[:lengths])
    else:
        with pytest.raises(ValueError, match="give more --minutes"):
            adaptively(tmp_path, copier(10_000), budget=TimeBudget(left))


def test_what_is_measured_already_costs_no_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def planned(task: BoundCurve, *_: Any, lengths: tuple[int, ...], **__: Any) -> Any:
        return SimpleNamespace(flops=float(len(lengths)), seconds=float(len(lengths)))

    monkeypatch.setattr(adaptive, "plan", planned)
    for times in (1, 2, 3):
        rows = adaptively(tmp_path, copier(10_000), budget=TimeBudget(4.0))  # three lengths, at 80 % of it
        assert len({row.length for row in rows if row.status == "ok"}) == min(8, 3 * times)


# texts


def test_a_short_text_ends_the_lengths() -> None:
    task, longest = prepared(curve_of(counting_text(1, 400)), LONGEST, None)
    assert longest == 100  # four windows
    assert len(task.examples(toy_lm(), (longest,), 4, 0)) == 4


def test_one_text_in_front_of_itself_needs_twice_as_much() -> None:
    text = counting_text(1, 400)
    task, longest = prepared(curve_of(text, prefix=text), LONGEST, None)
    assert longest == 50
    assert len(task.examples(toy_lm(), (longest,), 4, 0)) == 4


def test_a_text_of_a_few_tokens_is_refused() -> None:
    said = "too short for a forgetting curve: it has 63 tokens, and 4 windows of 16 are needed at least; give a text"
    with pytest.raises(ValueError, match=said):
        prepared(curve_of(counting_text(1, 63)), LONGEST, None)
    assert prepared(curve_of(counting_text(1, 64)), LONGEST, None)[1] == 16


def test_more_repeats_keep_the_targets_of_the_first() -> None:
    task, longest = prepared(curve_of(counting_text(40, 2000)), LONGEST, None)
    few, many = (task.examples(toy_lm(), (100, longest), repeats, 0) for repeats in (4, 12))
    assert [example.id for example in few] == [example.id for example in many[:4]]
    other_lengths = task.examples(toy_lm(), (30,), 4, 0)
    assert [example.id for example in few] == [example.id for example in other_lengths]


def a_curve(
    values: Sequence[float], lengths: Sequence[int], repeats: int = 4, spread: float = 0.0
) -> stats.MeasuredCurve:
    shape = (repeats, len(values))
    noise = np.linspace(-spread, spread, repeats)[:, None]
    copy = np.array(values) + noise
    n = np.array(lengths)
    return stats.MeasuredCurve(n, n, copy, np.zeros(shape), {}, 2 * n, np.full(shape, ""))


def test_brackets_are_cut_until_they_are_narrow() -> None:
    curve = a_curve([1, 1, 0, 0], [100, 200, 300, 400])
    assert finer_lengths(curve, 3200) == (233, 266)  # an eighth of 300 tokens
    assert finer_lengths(curve, 800) == (225, 250, 275)
    assert finer_lengths(a_curve([1, 1, 0, 0], [100, 200, 202, 400]), 6400) == ()


def test_the_ends_of_an_interval_are_refined_as_the_threshold_is() -> None:
    # chance moves half-life between 233 and 307, whose ends are in the brackets before and after
    lengths = [100, 200, 300, 400]
    curve = a_curve([1, 0.8, 0.4, 0], lengths, repeats=8, spread=0.18)
    low, high, _ = stats.by_chance(curve)["half_life"]
    assert low < 300 < high
    finer = finer_lengths(curve, 800)
    assert any(200 < length < 300 for length in finer)
    assert any(300 < length < 400 for length in finer)


def test_an_interval_that_is_narrow_enough_is_decided() -> None:
    lengths = [100, 200, 300, 400]
    assert undecided(a_curve([1, 0.9, 0.1, 0], lengths), 512, 32) == ((), set())
    assert undecided(a_curve([1, 0.9, 0.45, 0], lengths, spread=0.15), 512, 32) == ((200, 300), set())
    assert undecided(a_curve([1, 0.9, 0.1, 0], lengths, spread=0.5), 512, 32)[1] >= {"half_life"}


def test_repeats_are_not_added_for_an_interval_that_ends_at_the_lengths_around_it() -> None:
    curve = a_curve([1, 0.9, 0.1, 0], [100, 200, 300, 400], spread=0.15)
    low, high, _ = stats.by_chance(curve)["half_life"]
    assert 200 < low < 250 < high < 300
    assert high - low > 512 / 16
    found = stats.summarise(curve).half_life
    assert (found.low, found.high) == (200, 300)
    assert undecided(curve, 512, 32) == ((), {"reach"})


def test_repeats_without_a_result_do_not_count_for_showing_a_memory() -> None:
    """Four whole repeats do not show a half-life; eight that failed do not make them twelve."""
    lengths = [100, 200, 300, 400]
    curve = a_curve([0.6, 0.5, 0.3, 0.2], lengths, repeats=4)
    four = replace(curve, copy=curve.copy + np.array([[-0.5], [-0.4], [0.1], [0.8]]))
    none = np.full((8, 4), np.nan)
    failed = replace(
        four,
        copy=np.concatenate([four.copy, none]),
        control=np.concatenate([four.control, none]),
        targets=np.full((12, 4), ""),
    )
    assert not stats.exceeds(four, "gap", stats.JOINT_LEVEL)
    assert set(undecided(four, 512, 32)[0]) >= {100, 200}
    assert undecided(failed, 512, 32) == undecided(four, 512, 32)


def test_a_threshold_that_rests_on_one_repeat_is_undecided() -> None:
    curve = a_curve([1, 0.9, 0.1, 0], [100, 200, 300, 400])
    curve.copy[1:, 2:] = np.nan
    assert undecided(curve, 512, 32) == ((200, 300, 400), set())
