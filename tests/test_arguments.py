"""The arguments of `farspan.measure`: what is accepted, and the line that refuses the rest."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farspan
from farspan.lm import LM
from farspan.record import read_header

TASK = "perplexity:target_tokens=8"


def test_one_object_and_numbers_of_numpy_are_as_good_as_lists_and_ints(lm: LM, text: str, tmp_path: Path) -> None:
    given = farspan.measure(
        lm,
        farspan.method("topk:k=4"),
        farspan.task(TASK),
        text=Path(text),
        lengths=np.int64(32),
        repeats=np.int64(2),
        seed=np.int64(1),
        batch=np.int64(1),
        chunk=np.int64(64),
        shard=(np.int64(1), np.int64(1)),
        out=tmp_path / "given",
    )
    plain = farspan.measure(
        [lm],
        ["topk:k=4"],
        [TASK],
        text=text,
        lengths=[32],
        repeats=2,
        seed=1,
        batch=1,
        chunk=64,
        out=tmp_path / "plain",
    )
    assert [row.scores for row in given.rows] == [row.scores for row in plain.rows]
    assert len(given.rows) == 2
    assert read_header(given.folder)["settings"] == read_header(plain.folder)["settings"]


def test_a_shard_may_be_written_as_on_the_command_line(folder: Path, text: str, tmp_path: Path) -> None:
    rows = [
        farspan.measure(folder, tasks=TASK, text=text, lengths=32, repeats=4, shard=shard, out=tmp_path / "run").rows
        for shard in ("1/2", "2/2")
    ]
    assert len(rows[0]) < len(rows[1]) == 4


def test_a_model_is_named_by_a_path(text: str, tmp_path: Path, folder: Path) -> None:
    found = farspan.measure(folder, tasks=TASK, text=text, lengths=32, repeats=1, out=tmp_path / "run")
    assert [row.model for row in found.rows] == [str(folder)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"models": []}, "models: got none, expected at least one"),
        ({"methods": []}, "methods: got none, expected at least one"),
        ({"tasks": []}, "tasks: got none, expected at least one"),
        ({"models": 3}, "models: got int, expected a folder, a hub id, or a model of farspan.load"),
        ({"methods": [TASK, 3]}, "methods: got int, expected methods such as 'full'"),
        ({"tasks": 3}, "tasks: got int, expected tasks such as 'perplexity'"),
        ({"lengths": "128,256"}, "lengths: got '128,256', expected numbers such as"),
        ({"lengths": [128.5]}, "lengths: got 128.5, expected numbers such as"),
        ({"lengths": {32: 1}}, "lengths: got {32: 1}, expected numbers such as"),
        ({"repeats": True}, "repeats: got True, expected a whole number"),
        ({"repeats": 2.5}, "repeats: got 2.5, expected a whole number, at least 1"),
        ({"seed": -1}, "seed: got -1, expected a whole number, at least 0"),
        ({"cost": "no"}, "cost: got 'no', expected True or False"),
        ({"refusals": 1}, "refusals: got 1, expected True or False"),
        ({"batch": 0}, "batch: got 0, expected a whole number, at least 1"),
        ({"shard": "3/2"}, "shard: got '3/2', expected I/N"),
        ({"shard": 3}, "shard: got '3', expected I/N"),
        ({"shard": (1,)}, "shard: got '(1,)', expected I/N"),
        ({"minutes": "3"}, "minutes: got '3', expected a positive number"),
        ({"minutes": True}, "minutes: got True, expected a positive number (--minutes)"),
        ({"lengths": True}, "lengths: got True, expected numbers such as"),
        ({"batch": True}, "batch: got True, expected a whole number"),
        ({"seed": False}, "seed: got False, expected a whole number"),
        (
            {"ray": "local", "gpus_per_model": True},
            "gpus_per_model: got True, expected a whole number, at least 1 (--",
        ),
        ({"text": 3}, "text: got int, expected a name such as 'builtin', a path, or a list of documents"),
    ],
)
def test_other_arguments_are_refused_before_a_folder_is_made(
    given: dict[str, Any], message: str, lm: LM, text: str, tmp_path: Path
) -> None:
    arguments = {"models": lm, "tasks": TASK, "text": text, "lengths": 32, "out": tmp_path / "run"} | given
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        farspan.measure(**arguments)
    assert not (tmp_path / "run").exists()


def test_a_network_that_is_not_wrapped_is_refused(lm: LM, text: str) -> None:
    with pytest.raises(ValueError, match=r"models: got LlamaForCausalLM, expected .* farspan.wrap"):
        farspan.measure(lm.model, tasks=TASK, text=text)


@pytest.mark.parametrize("given", [5, True, "5", [0, "1"], [False, True], {0.0: 1}])
def test_depths_that_are_no_list_of_numbers_are_refused(given: Any, lm: LM, text: str) -> None:
    with pytest.raises(ValueError, match=r"^depths: got .*, expected a list of numbers such as \[0, 0\.5, 1\]$"):
        farspan.curve(lm, text=text, depths=given)


@pytest.mark.parametrize("given", [True, "512", 512.0])
def test_a_trained_length_that_is_no_whole_number_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=f"^the trained length is {given!r}, expected 1 to "):
        farspan.load("demo", trained_length=given, weights=False)


@pytest.mark.parametrize("given", [True, 2.5, "2", 0])
def test_steps_between_measurements_that_are_no_whole_number_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=f"^every: got {given!r}, expected a whole number of steps, at least 1$"):
        farspan.CurveCallback(every=given)
