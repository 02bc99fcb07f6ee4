"""LongBench v2: made questions of its form, by likelihood against plain forwards, by generation, refusals."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from test_cli import done, farspan, last_line, refused
from transformers import PreTrainedTokenizerFast

from farspan.lm import LM, wrap
from farspan.record import read_rows
from farspan.tasks import task
from farspan.tasks.longbench2 import BEGUN, LETTERS, ByLikelihood, load_items

import tiny
from naive import nats_after
from tiny import PlannedAndFed, saved, tiny_model, write_lines


def question(i: int, **changes: Any) -> dict[str, Any]:
    made = {
        "_id": f"{i:04x}",
        "domain": "Single-Document QA",
        "sub_domain": "Literary",
        "difficulty": ("easy", "hard")[i % 2],
        "length": ("short", "medium", "long")[i % 3],
        "question": f"Who is number {i}?",
        **{f"choice_{letter}": f"the {letter} fox of {i} {{or not}}" for letter in LETTERS},
        "answer": LETTERS[i % 4],
        "context": f" The fox number {i} jumps over the lazy dog. " * 5,
    }
    return {name: value for name, value in (made | changes).items() if value is not ...}


def written(folder: Path, rows: list[Any] | None = None, name: str = "data.jsonl") -> str:
    rows = [question(i) for i in range(12)] if rows is None else rows
    path = folder / name
    if name.endswith("json"):
        path.write_text(json.dumps(rows))
    elif name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        write_lines(path, rows)
    return str(path)


measured = partial(tiny.measured, lengths=(900,), repeats=12)


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "mistral"])
def test_likelihoods_equal_plain_forwards_of_the_whole_prompt(
    architecture: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    lm = wrap(tiny_model(architecture), tokenizer, "tiny")
    data = written(tmp_path)
    rows = measured(tmp_path / "run", lm, task(f"longbench2:data={data}").on(lm, ""))
    by_name = {f"{i:04x}": question(i) for i in range(12)}
    letters, scores = set(), []
    for row in rows:
        given = by_name[row.scores["item"]]
        prompt = (
            "Please read the following text and answer the question below.\n\n<text>\n"
            f"{given['context'].strip()}\n</text>\n\nWhat is the correct answer to this question: {given['question']}\n"
            f"Choices:\n(A) {given['choice_A']}\n(B) {given['choice_B']}\n(C) {given['choice_C']}\n"
            f'(D) {given["choice_D"]}\n\nFormat your response as follows: "The correct answer is (insert answer '
            'here)".\n\nThe correct answer is'
        )
        begun = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        nats = []
        for letter in LETTERS:
            whole = tokenizer(f"{prompt} ({letter})", add_special_tokens=False)["input_ids"]
            assert whole[: len(begun)] == begun
            nats.append(float(nats_after(lm.model, [*lm.separator.ids, *begun], whole[len(begun) :])[0].sum()))
        assert row.status == "ok"
        assert row.scores["nats"] == pytest.approx(nats, abs=1e-4)
        assert row.scores["letter"] == LETTERS[int(np.argmin(nats))]
        assert row.scores["score"] == float(row.scores["letter"] == given["answer"])
        assert row.scores["context"] == len(lm.separator.ids) + len(begun)
        assert [row.scores[name] for name in ("difficulty", "size")] == [given["difficulty"], given["length"]]
        letters.add(row.scores["letter"])
        scores.append(row.scores["score"])
    assert len(rows) == 12
    assert 0 < np.mean(scores) < 1  # otherwise the right letter is not what counts


@pytest.mark.parametrize("name", ["data.jsonl", "questions.json", "train-00000-of-00001.parquet"])
def test_a_file_or_a_folder_with_it_is_read(name: str, tmp_path: Path) -> None:
    data = written(tmp_path, None, name)
    items = load_items(data, None, None, begun=True)
    assert [item.name for item in items] == [f"{i:04x}" for i in range(12)]
    assert items[5].document == question(5)["context"].strip()
    if not name.startswith("questions"):
        assert load_items(str(tmp_path), None, None, begun=True) == items
    assert [item.name for item in load_items(data, "hard", "short", begun=True)] == ["0003", "0009"]
    assert len(load_items(data, None, "long", begun=False)) == 4


@pytest.mark.parametrize(
    ("prediction", "letter"),
    [
        ("The correct answer is (B).", "B"),
        ("Well. **The correct answer is D**", "D"),
        ("The correct answer is (insert answer here)", None),
        ("B", None),
        ("The correct answer is (E)", None),
        ("The correct answer is (Because it is blue)", None),
        ("The correct answer is A or B. The correct answer is (B)", "B"),
        ("", None),
    ],
)
def test_the_answer_is_the_letter_after_the_benchmarks_words(
    prediction: str, letter: str | None, lm: LM, tmp_path: Path
) -> None:
    what = task(f"longbench2:ask=generated,data={written(tmp_path)}").on(lm, "")
    item = what.items[1]
    assert item.references == ("B",)
    assert what.judged(prediction, item) == {"score": float(letter == "B"), "letter": letter}


def test_generated_answers_follow_the_benchmarks_prompt(lm: LM, tmp_path: Path) -> None:
    what = task(f"longbench2:ask=generated,data={written(tmp_path)},new_tokens=4").on(lm, "")
    assert what.items[0].after.endswith('"The correct answer is (insert answer here)".')
    assert not what.needs_nats
    rows = measured(tmp_path / "run", lm, what, repeats=3)
    assert {row.status for row in rows} == {"ok"}
    assert all(row.scores["new"] <= 4 and "prediction" in row.scores and row.scores["score"] == 0 for row in rows)
    assert task(f"longbench2:ask=generated,data={written(tmp_path)}").on(lm, "").answering.new_tokens == 128


def test_a_text_that_is_too_long_is_recorded_or_loses_its_middle(lm: LM, tmp_path: Path) -> None:
    data = written(tmp_path)
    short = measured(tmp_path / "a", lm, task(f"longbench2:data={data}").on(lm, ""), lengths=(380,))
    assert {row.status for row in short} == {"too_long"}
    what = task(f"longbench2:data={data},truncate=middle").on(lm, "")
    assert isinstance(what, ByLikelihood)
    rows = measured(tmp_path / "b", lm, what, lengths=(380,))
    assert {row.status for row in rows} == {"ok"}
    longest = max(map(len, what.choices))
    assert all(row.scores["left_out"] > 0 and row.num_seen == 380 - longest for row in rows)


@pytest.mark.parametrize("ask", ["likelihood", "generated,new_tokens=3"])
def test_the_tokens_of_a_plan_are_those_that_are_fed(
    ask: str, lm: LM, tmp_path: Path, planned_and_fed: PlannedAndFed
) -> None:
    what = task(f"longbench2:ask={ask},data={written(tmp_path)},truncate=end").on(lm, "")
    planned, fed = planned_and_fed(what, lm, lengths=(380, 900), repeats=2)
    assert planned == fed > 0


def test_numbers_that_are_not_finite_are_rows_that_say_so(lm: LM, tmp_path: Path) -> None:
    lm.model.model.layers[1].mlp.up_proj.weight.data[3] = torch.inf
    rows = measured(tmp_path / "run", lm, task(f"longbench2:data={written(tmp_path)}").on(lm, ""), repeats=2)
    assert {(row.status, row.reason) for row in rows} == {("nan", "4 of the 4 answers have no finite log-probability")}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"context": ...}, r"no column 'context'; it has \['_id', 'domain'"),
        ({"choice_C": ...}, "no column 'choice_C'"),
        ({"difficulty": ...}, "no column 'difficulty'"),
        ({"context": 5}, "row 1, column 'context': got int 5, expected text"),
        ({"context": "  "}, "row 1, column 'context': got an empty text"),
        ({"question": None}, "row 1, column 'question': got nothing, expected text"),
        ({"answer": "E"}, "row 1, column 'answer': got 'E', expected one of A, B, C, D"),
        ({"answer": 2}, "row 1, column 'answer': got int 2, expected text"),
    ],
)
def test_rows_of_another_form_are_refused(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        load_items(written(tmp_path, [question(0, **change)]), None, None, begun=True)


def test_questions_that_are_not_there_are_named(tmp_path: Path) -> None:
    data = written(tmp_path, [question(0)])
    with pytest.raises(ValueError, match=r"has no question with difficulty=hard, size=long: leave one out"):
        load_items(data, "hard", "long", begun=True)


@pytest.mark.usefixtures("hub_offline")
def test_without_data_the_hubs_data_set_is_read_and_named_if_it_is_not_there(lm: LM) -> None:
    with pytest.raises(ValueError, match=r"THUDM/LongBench-v2@default:train"):
        task("longbench2").on(lm, "")


@pytest.fixture
def place(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved("model", tokenizer)
    written(tmp_path)


@pytest.mark.usefixtures("place")
def test_the_command_measures_compares_and_plans() -> None:
    arguments = ("task", "longbench2:data=data.jsonl", "model", "--lengths", "900", "--repeats", 8, "--out", "run")
    (cost,) = last_line(farspan(*arguments, "--plan", "--json"))["plans"]
    assert cost["tokens"] > 8 * 400
    result = done(farspan(*arguments, "--json"))
    data = last_line(result)
    assert data["quality"] == "accuracy"
    (found,) = data["results"]
    assert found["value"] == pytest.approx(np.mean([row.scores["score"] for row in read_rows("run")]))
    assert found["low"] < found["high"]  # Wilson's
    (shown,) = [json.loads(line) for line in Path("run/examples.jsonl").read_text().splitlines()]
    text = "".join("".join(part) for _, part in shown["parts"])
    assert f"{BEGUN} (" in text.replace(" ( ", " (")
    compared = farspan(
        *("compare", "model", "--task", "longbench2:data=data.jsonl", "--lengths", "900", "--repeats", 8, "--no-cost"),
        *("--method", "full", "--method", "ape", "--out", "compared", "--json"),
    )
    assert compared.exit_code == 0, compared.output
    assert len(last_line(compared)["cells"]) == 2
    assert "expected one of A, B, C, D" in refused(
        farspan("task", f"longbench2:data={written(Path(), [question(0, answer='x')], 'bad.jsonl')}", "model")
    )
