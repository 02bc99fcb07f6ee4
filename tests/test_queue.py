"""The order in which units of a run are handed to workers."""

import pytest

from farspan.measuring.queue import MOST_TRIES, UnitQueue


def test_units_of_the_loaded_model_come_first_and_the_longest_of_them() -> None:
    queue = UnitQueue(["a", "b", "a", "b", "a"], [1.0, 9.0, 5.0, 2.0, 3.0])
    order = []
    while (unit := queue.take(0)) is not None:
        queue.done(0)
        order.append(unit)
    assert order == [1, 3, 2, 4, 0]  # b has more work than a; then all of a
    assert queue.left == 0


def test_workers_are_spread_over_the_models_by_their_work() -> None:
    queue = UnitQueue(["a"] * 6 + ["b"] * 3, [1.0] * 9)
    assert [queue.take(worker) for worker in range(4)] == [0, 6, 1, 2]  # 6 of a: 6 alone, 3 for a second worker
    queue.done(1)
    assert queue.take(1) == 7  # the model that the worker has loaded
    assert queue.left == 8
    assert [queue.take(4) is None for _ in range(5)] == [False] * 4 + [True]  # four waited


def test_a_worker_whose_model_is_done_helps_with_another() -> None:
    queue = UnitQueue(["a", "b", "b"], [9.0, 1.0, 2.0])
    assert queue.take(0) == 0
    queue.done(0)
    assert queue.take(0) == 2


def test_the_unit_of_a_dead_worker_is_done_by_another_one() -> None:
    queue = UnitQueue(["a", "a"], [2.0, 1.0])
    assert queue.take(0) == 0
    assert not queue.tried(0)
    assert queue.lost(0) == 0
    assert queue.lost(1) is None  # it had none
    assert queue.left == 2
    assert queue.take(2) == 0
    assert queue.tried(0)
    queue.done(2)
    assert queue.take(2) == 1
    queue.done(2)
    assert queue.take(2) is None
    assert queue.left == 0


def test_a_unit_that_ends_all_its_workers_ends_the_run() -> None:
    queue = UnitQueue(["model"], [1.0])
    for worker in range(MOST_TRIES - 1):
        queue.take(worker)
        queue.lost(worker)
    queue.take(MOST_TRIES)
    with pytest.raises(ValueError, match=r"4 workers have died while they measured the same part of model.*--batch"):
        queue.lost(MOST_TRIES)
