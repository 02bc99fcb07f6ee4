"""benchmarks/untrained_memory.py: its page, seeds averaged by text, paired differences, and how models are given."""

import gzip
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farspan.record import Row, Run
from farspan.stats import student_mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
untrained_memory: Any = importlib.import_module("untrained_memory")


def test_the_tables_of_the_page_are_those_of_the_recorded_rows() -> None:
    assert untrained_memory.PAGE.read_text() == untrained_memory.page()


def test_recorded_rows_name_no_folder_of_a_machine() -> None:
    paths = sorted(untrained_memory.RECORDED.parent.rglob("*.jsonl.gz"))
    assert paths
    assert [path for path in paths if b'"/' in gzip.decompress(path.read_bytes())] == []


def rows(folder: Path, member: str, gains: list[float]) -> None:
    with Run.open(folder / "rows" / member / "mentions library", {}) as run:
        for i, gain in enumerate(gains):
            scores = {"gain": gain, "nats": 1.0, "control": 1.0 + gain, "mentions": 1}
            settings = {"text": "t", "distance": 1000, "target_tokens": 1024}
            run.append(Row(member, "full", "mentions", 1, settings, 2048, i, 0, f"{i}", scores=scores))


def test_the_seeds_of_a_recipe_are_averaged_by_text_before_they_are_paired(tmp_path: Path) -> None:
    values = {"yarn8": [1.0, 2.0, 4.0, 3.0], "new.0": [2.0, 2.0, 5.0, 6.0], "new.1": [1.0, 4.0, 5.0, 2.0]}
    for member, gains in values.items():
        rows(tmp_path, member, gains)
    line = untrained_memory.compared(untrained_memory.measured(tmp_path / "rows"), "new", "yarn8").splitlines()[-1]
    differences = np.mean([values["new.0"], values["new.1"]], 0) - values["yarn8"]
    mean, low, high, p = student_mean(differences)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:] == [
        "library", "2,048", "4", "3.375", "2.500", f"{mean:+.3f} [{low:.3f}, {high:.3f}]", f"{p:.2g}",
    ]  # fmt: skip


def test_the_texts_of_a_difference_are_those_that_both_have() -> None:
    by = {("curve", "library", 2048): {f"text {n}": n / 10 for n in range(6)}}
    fewer = {key: {text: value / 2 for text, value in list(of.items())[:4]} for key, of in by.items()}
    line = untrained_memory.compared({"new": by, "yarn8": fewer}, "new", "yarn8").splitlines()[-1]
    assert line.split(" | ")[3] == "4"


def test_models_are_given_with_the_name_of_their_recipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["untrained_memory.py", "folder"])
    with pytest.raises(SystemExit):
        untrained_memory.main()
    assert "got 'folder', expected NAME=FOLDER" in capsys.readouterr().err


def test_a_task_is_predicted_by_what_ranks_the_models_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["yarn-skip", "yarn-decoys", "yarn-decoys-log-n", "yarn-recurrences", "truncated-skip"]
    order = {name: i for i, name in enumerate([*names, "yarn16", "yarn16-log-n"])}
    untrained = untrained_memory.SIZES["demo"].untrained
    by_recipe = {untrained.get(name, name): i for name, i in order.items()}
    # memory rises with the order, and so does the loss; in text "b", which only some models have, answers fall with it
    monkeypatch.setattr(untrained_memory, "_memory_at", lambda recipe, part, tokens: by_recipe[recipe])
    monkeypatch.setattr(untrained_memory, "nats_of", lambda size, recipe, part: {0: float(by_recipe[recipe])})
    nats = "needle: nats of an answer (less is better)", "library", 1024
    found = {
        name: {("own: right answers", "library", 1024): {"a": i} | ({"b": -9 * i} if i else {}), nats: {"a": i}}
        for name, i in order.items()
    }
    right, cost = untrained_memory.correlations(found).splitlines()[2:]
    assert right.split(" | ")[0] == "| own: right answers, 1,024 (1 texts)"
    assert [cell.split()[0] for cell in right.split(" | ")[1:]] == ["+1.00", "+1.00", "-1.00", "+2.00", "+2.00"]
    assert [cell.split()[0] for cell in cost.split(" | ")[1:]] == ["-1.00", "-1.00", "+1.00", "-2.00", "-2.00"]
    assert "| 6 models |" in untrained_memory.correlations(found, "yarn*")
