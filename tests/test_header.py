"""run.json in one form: what older versions wrote, and what is written now."""

from typing import Any

import pytest

from farspan.record import Row
from farspan.report.cells import cells
from farspan.report.header import current_header
from farspan.report.terminal import Results
from farspan.schema import check_header

CURVE = {"protocol": "nested", "compat": False, "target_text": "books", "target_hash": "aa", "prefix_text": None}
OWN = {"tests": ["recall"], "pairs": 4, "text": "books", "text_hash": "aa"}
RIGHT = {"score": "right", "name": "right answers", "higher_is_better": True, "exp": False, "graded": False}
COPY = {"score": "copy", "name": "copy accuracy", "higher_is_better": True, "exp": False, "graded": True}
PARETO = {"score": "all.pareto", "name": "share", "higher_is_better": None, "exp": False, "graded": True}


def rows(task: str, settings: dict[str, Any], scores: dict[str, Any], method: str = "full", **more: Any) -> list[Row]:
    examples = [f"{task} {settings} {i}" for i in range(3)]
    numbers = [scores | ({"control_repeat": i} if task == "curve" else {}) for i in range(3)]
    return [Row("m", method, task, 1, settings, 8, i, 0, examples[i], scores=numbers[i], **more) for i in range(3)]


def now(**tasks: tuple[str, dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
    """A header as measuring writes it: by task as it is spelled, the task of its rows, quality and settings."""
    entries = {
        spec: {"task": task, "unit": "tokens", "quality": quality, "details": ["control"]}
        for spec, (task, quality, _) in tasks.items()
    }
    settings = {
        "tasks": entries,
        "methods": ["full", "topk:k=4"],
        "lengths": [8],
        "repeats": 3,
        "seed": 0,
        "cost": False,
    }
    models = {"m": {"name": "m", "tasks": {spec: asked for spec, (_, _, asked) in tasks.items()}}}
    return {"settings": settings, "models": models, "sessions": []}


def test_a_header_of_now_stays_as_it_is() -> None:
    header = now(own=("own", RIGHT, OWN))
    check_header(header)
    assert current_header(header, []) == header


def test_cells_of_a_header_of_now_are_told_apart_by_task_and_settings() -> None:
    probe = CURVE | {"protocol": "probe", "warmup": 4, "scored": 4}
    header = now(curve=("curve", COPY, CURVE), recall=("curve", COPY, probe), own=("own", RIGHT, OWN))
    half = {"scored": 4, "context": 18}
    measured = rows("curve", CURVE, {"copy": 0.5, "control": 0.1} | half)
    measured += rows("curve", probe, {"copy": 0.25, "control": 0.2} | half)
    measured += rows("own", OWN, {"right": 1.0, "control": 0.3})
    found = {cell.task: (cell.value, cell.details["control"], cell.n) for cell in cells(measured, header)}
    assert found == {
        "curve": (0.5, pytest.approx(0.1), 3),
        "recall": (0.25, pytest.approx(0.2), 3),
        "own": (1.0, pytest.approx(0.3), 3),
    }


def test_a_score_may_be_nested_and_neither_direction_better() -> None:
    header = now(attention=("attention", PARETO, OWN))
    measured = rows("attention", OWN, {"all": {"pareto": [[0.25, 0.75], [0.5, 0.5]]}})
    measured += rows("attention", OWN, {"all": {"pareto": [[0.75, 0.75], [0.75, 0.75]]}}, "topk:k=4")
    first, second = cells(measured, header)
    assert (first.value, second.value) == (0.5, 0.75)
    assert (second.difference, second.verdict) == (0.25, "")


UNRECORDED = {"settings": {"imported": "file"}, "models": {}, "sessions": []}


@pytest.mark.parametrize(
    ("task", "asked", "scores", "quality"),
    [
        ("curve", CURVE, {"copy": 1.0, "control": 0.5}, "copied beyond guessing"),
        ("perplexity", {"targets": "all", "text": "books"}, {"nats": 1.0}, "perplexity"),
    ],
)
def test_tasks_that_a_header_does_not_record_come_from_the_rows(
    task: str, asked: dict[str, Any], scores: dict[str, Any], quality: str
) -> None:
    header = current_header(UNRECORDED, rows(task, asked, scores))
    ((spec, entry),) = header["settings"]["tasks"].items()
    assert entry["quality"]["name"] == quality
    assert header["models"]["m"]["tasks"] == {spec: asked}
    check_header(header)


def test_an_unrecorded_task_whose_score_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match=r"does not record its tasks .*, and the score of 'own' is not known"):
        current_header(UNRECORDED, rows("own", OWN, {"right": 1.0}))


def test_a_row_without_the_score_of_its_task_is_named(tmp_path: Any) -> None:
    header = now(own=("own", RIGHT, OWN))
    with pytest.raises(ValueError, match=r"length 8, repeat 0 has no score 'right': delete it from rows\*\.jsonl"):
        Results(rows("own", OWN, {"wrong": 1.0}), header, tmp_path)


def test_results_hold_what_each_command_prints_as_json(tmp_path: Any, drawn: None) -> None:
    header = now(own=("own", RIGHT, OWN))
    measured = rows("own", OWN, {"right": 1.0}) + rows("own", OWN, {"right": 0.0}, "topk:k=4")
    one = Results(measured, header, tmp_path)
    assert {"run", "task", "quality", "unit", "results", "failed_rows", "pictures"} == one.as_data().keys()
    assert [path.name for path in one.pictures] == ["quality.png", "quality.svg"]
    header["settings"]["compared"] = True
    compared = Results(measured, header, tmp_path).as_data()
    assert {"run", "cells", "failed_cells", "pictures"} == compared.keys()
    assert [cell["verdict"] for cell in compared["cells"]] == ["", "not shown"]


def test_a_damaged_task_in_a_header_is_refused() -> None:
    header = now(own=("own", RIGHT | {"exp": "yes"}, OWN))
    with pytest.raises(ValueError, match=r"settings\.tasks\.own\.quality\.exp"):
        check_header(header)
