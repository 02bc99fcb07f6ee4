"""Rows of long documents and how long these are: by the sample's index and nothing else."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from farspan.text.corpora import Corpus
from farspan.train.draws import draw_named
from farspan.train.objective import NOT_A_TARGET
from farspan.train.schedule import LengthSettings, Schedule, schedule
from farspan.train.smt import notes_on
from farspan.train.windows import SparseRows, collated

ROW = 32


def numbered(*sizes: int) -> Corpus:
    """Documents whose tokens are 1,000 times their number from 1 on, plus the place from 0 on."""
    tokens = np.concatenate([1000 * (number + 1) + np.arange(size) for number, size in enumerate(sizes)])
    return Corpus("numbers", "hash", tokens.astype(np.int32), np.cumsum([0, *sizes]))


def plan(**changes: Any) -> Schedule:
    return schedule(LengthSettings(**({"target": 128} | changes)), ROW, 60, seed=0)


def rows(*sizes: int, draw: str = "sparse", lengths: Schedule | None = None, **options: Any) -> SparseRows:
    options = {"row": ROW, "targets": 16, "batch": 2, "separator": (7,), "seed": 0} | options
    return SparseRows(numbered(*(sizes or (300, 500))), draw_named(draw), lengths or plan(), **options)


# lengths


def test_the_paper_goes_from_4k_to_64k_by_2k_every_thousand_steps() -> None:
    paper = schedule(LengthSettings(target=65536, every=1000), 4096, 30_000, seed=0)
    assert len(paper.stages) == 30
    assert [paper.at(step) for step in (0, 999, 1000, 29_999)] == [6144, 6144, 8192, 65536]


def test_stages_share_the_steps_where_nothing_else_is_said() -> None:
    found = [plan().at(step) for step in range(60)]
    assert found == sorted(found)
    assert Counter(found) == {48 + 16 * stage: 10 for stage in range(6)}


def test_the_last_stage_is_the_target() -> None:
    assert plan(target=100).stages == (48, 64, 80, 96, 100)
    assert plan(target=40).stages == (40,)


def test_cover_goes_back_to_the_lengths_it_has_reached() -> None:
    progressive, cover = plan(), plan(mode="cover")
    found = [cover.at(step) for step in range(60)]
    assert all(length <= progressive.at(step) for step, length in enumerate(found))
    assert len(set(found[50:])) > 2
    assert found == [cover.at(step) for step in range(60)]
    assert found != [replace(cover, seed=1).at(step) for step in range(60)]


def test_a_fixed_length_is_the_target_throughout() -> None:
    assert {plan(mode="fixed").at(step) for step in range(60)} == {128}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": 32}, "lengths.target = 32 is within the window of 32 tokens"),
        ({"first": 20}, "lengths.first = 20 must be above the window of 32"),
        ({"first": 200}, "lengths.first = 200 must be above the window .* and at most lengths.target = 128"),
        ({"every": 20}, "lengths.target = 128 is length 6 and needs trainer.steps >= 101: got 60. Train longer"),
        ({"by": 1}, "needs trainer.steps >= "),
    ],
)
def test_impossible_lengths_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**changes)


@pytest.mark.parametrize(("steps", "every"), [(5, None), (59, 20), (2, None), (1, None), (10, 20)])
def test_too_few_steps_are_refused_with_settings_that_they_suffice_for(steps: int, every: int | None) -> None:
    with pytest.raises(ValueError, match="Train longer, or give") as raised:
        schedule(LengthSettings(target=128, every=every), 32, steps, 0)
    assert ("lengths.every" in str(raised.value)) == (every is not None)
    if least := re.search(r"lengths.by >= (\d+)", str(raised.value)):
        schedule(LengthSettings(target=128, every=every, by=int(least[1])), 32, steps, 0)
        with pytest.raises(ValueError, match="Train longer"):
            schedule(LengthSettings(target=128, every=every, by=int(least[1]) - 1), 32, steps, 0)
    else:
        assert 'lengths.mode = "fixed"' in str(raised.value)
        schedule(LengthSettings(target=128, mode="fixed"), 32, steps, 0)


# rows


def test_a_row_is_of_one_document_behind_the_separator() -> None:
    for index in range(120):
        sample = rows()[index]
        for row in sample.values():
            ids, positions = row["input_ids"], row["position_ids"]
            first = positions == 0
            assert (ids[first] == 7).all()
            places = ids[~first] - positions[~first]  # of position 0 in the corpus' numbers
            assert len(set(places.tolist())) == 1


@pytest.mark.parametrize(
    "draw", ["sparse", "uniform", "spans:span=4", "pose", "skip", "skip:repeat=1", "random", "full"]
)
def test_what_is_predicted_is_what_stands_behind_its_predecessor(draw: str) -> None:
    for index in range(60):
        row = rows(draw=draw)[index]["sparse"]
        ids, labels = row["input_ids"], row["labels"]
        kept = labels != NOT_A_TARGET
        assert (labels[kept] == ids[kept]).all()
        before = ids[:-1][kept[1:]]
        assert ((ids[1:][kept[1:]] - before == 1) | (before == 7)).all()
        assert not kept[0]


def test_the_first_target_follows_its_rule() -> None:
    kept = {
        rule: [int((rows(first_target=rule)[i]["sparse"]["labels"] != NOT_A_TARGET).sum()) for i in range(100)]
        for rule in ("auto", "keep", "mask")
    }
    assert set(kept["keep"]) == {16}
    assert set(kept["mask"]) == {15}
    for draw, row in (("sparse", "window"), ("full", "sparse"), ("random", "sparse")):  # nothing was sampled
        auto, mask = (rows(draw=draw, first_target=rule)[0][row]["labels"] for rule in ("auto", "mask"))
        assert torch.equal(auto, mask)
    assert 0.3 < np.mean(kept["auto"]) - 15 < 0.8  # the last of the memory is drawn every other time


def test_the_window_is_the_beginning_of_the_same_text() -> None:
    sample = rows(draw="full")[3]
    window, whole = sample["window"], sample["sparse"]
    assert window["position_ids"].tolist() == list(range(ROW))
    assert torch.equal(window["input_ids"], whole["input_ids"][:ROW])
    assert torch.equal(window["labels"][1:], window["input_ids"][1:])


@pytest.mark.parametrize(
    ("mixed", "names"),
    [
        ("concat", [["sparse", "window"]] * 4),
        ("alternate", [["sparse"]] * 2 + [["window"]] * 2),
        ("off", [["sparse"]] * 4),
    ],
)
def test_the_window_comes_with_each_step_in_turns_or_not_at_all(mixed: Any, names: list[list[str]]) -> None:
    assert [list(rows(mixed=mixed)[index]) for index in range(4)] == names


def test_a_sample_is_a_function_of_its_index() -> None:
    one, other = rows(), rows()
    for index in (5, 3, 119, 3):
        assert same(one[index], other[index])
    assert not same(one[3], one[5])
    assert not same(one[3], rows(seed=1)[3])


def same(one: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]]) -> bool:
    return all(torch.equal(one[name][key], other[name][key]) for name in one for key in one[name])


def test_any_number_of_workers_prepares_the_same_batches() -> None:
    def batches(workers: int) -> list[dict[str, dict[str, Tensor]]]:
        loader = DataLoader(rows(), batch_size=2, num_workers=workers, collate_fn=collated)
        return [batch for _, batch in zip(range(8), loader, strict=False)]

    assert all(map(same, batches(0), batches(2)))


def test_samples_of_a_step_have_its_length() -> None:
    made = rows(draw="full", mixed="off")
    for index in (0, 1, 19, 20, 119):
        assert len(made[index]["sparse"]["input_ids"]) == made.schedule.at(index // 2)


def test_long_documents_are_read_as_often_as_they_have_tokens() -> None:
    made = rows(200, 600, lengths=plan(mode="fixed"))
    found = Counter(int(made[index]["sparse"]["input_ids"][-1]) // 1000 for index in range(120))
    assert 0.6 < found[2] / 120 < 0.9


def test_rows_of_different_lengths_are_filled_up_where_no_token_sees_it() -> None:
    made = rows(90, 300, draw="full", mixed="off", short="use", lengths=plan(mode="fixed"))
    samples = [made[index] for index in range(40)]
    batch = collated(samples)["sparse"]
    short = min(range(40), key=lambda index: len(samples[index]["sparse"]["input_ids"]))
    size = len(samples[short]["sparse"]["input_ids"])
    assert (size, batch["input_ids"].shape) == (91, (40, 128))
    assert (batch["labels"][short, size:] == NOT_A_TARGET).all()
    assert batch["position_ids"][short].tolist() == list(range(128))


# documents that are too short


def test_short_documents_are_left_out_and_counted() -> None:
    made = rows(50, 60, 300)
    assert {int(made[i]["sparse"]["input_ids"][-1]) // 1000 for i in range(100, 120)} == {3}
    assert 1 in {int(made[i]["sparse"]["input_ids"][-1]) // 1000 for i in range(20)}  # long enough in the first stage
    assert next(notes_on(made)) == "2 of 3 documents are shorter than 128 tokens: left out"


def test_short_documents_are_used_up_to_their_length_if_wished() -> None:
    made = rows(20, 60, 300, short="use", lengths=plan(mode="fixed"))
    last = {int(made[i]["sparse"]["input_ids"][-1]) // 1000: made[i]["sparse"]["position_ids"][-1] for i in range(120)}
    assert last == {2: 60, 3: 127}  # the first one fills no row
    assert "left out below 32, used up to their length above" in next(notes_on(made))


def test_documents_can_be_joined_with_separators_between() -> None:
    made = rows(*[20] * 40, draw="full", short="join", lengths=plan(mode="fixed"))
    ids = made[0]["sparse"]["input_ids"]
    assert (ids == 7).sum() >= 6
    assert list(notes_on(made)) == [
        "the training reads 120 windows, and the text holds 6 of 128 tokens: each about 20.0 times"
    ]


def test_a_text_that_ends_before_the_training_does_is_said_to() -> None:
    assert [text for text in notes_on(rows()) if "windows" in text] == [
        "the training reads 120 windows, and the text holds 5 of 128 tokens: each about 24.0 times"
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rows(50, 60), "no document of 128 tokens for lengths of 128, its longest has 61"),
        (lambda: rows(20, short="use"), "no document of 32 tokens"),
        (lambda: rows(targets=32), "smt.targets = 32 must leave tokens for a memory in rows of 32 tokens"),
        (lambda: rows(draw="sparse:window=7"), "window = 7 cannot hold the nearest half of 16 sampled tokens"),
        (lambda: rows(targets=2, lengths=plan(first=33)), None),
    ],
)
def test_impossible_rows_are_refused(make: Callable[[], SparseRows], message: str | None) -> None:
    if message is None:
        assert len(make()) == 120
        return
    with pytest.raises(ValueError, match=message):
        make()


def test_shuffled_text_is_refused() -> None:
    shuffled = replace(numbered(300), shuffled=True)
    with pytest.raises(ValueError, match="is shuffled: training needs its own order"):
        SparseRows(shuffled, draw_named("sparse"), plan(), row=ROW, targets=16, batch=1, separator=(), seed=0)
