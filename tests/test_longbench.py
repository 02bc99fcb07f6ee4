"""LongBench: made rows of its one form, its prompts and scorers, and its texts as texts to be expected."""

import importlib.util
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farspan.lm import LM
from farspan.tasks import scoring, task
from farspan.tasks.documents import Answering
from farspan.tasks.longbench import PAPER, SETS, BoundLongBench, load_items
from farspan.tasks.perplexity import BoundPerplexity
from farspan.text import corpora

import tiny
from toys import perplexity_of

INSTALLED = {name for name in ("rouge", "jieba") if importlib.util.find_spec(name)}


def rows_of(name: str, count: int = 10) -> list[dict[str, Any]]:
    answers = {
        "passage_retrieval_en": "Paragraph 3",
        "passage_retrieval_zh": "段落3",
        "passage_count": "3",
        "trec": "Food",
    }
    return [
        {
            "input": f"Question {i}?",
            "context": f"The fox number {i} jumps over the lazy dog. " * 5,
            "answers": [answers.get(name, f"fox {i}")],
            "length": 40,
            "dataset": name,
            "language": "en",
            "all_classes": ["Food", "Color"] if name in ("trec", "lsht") else None,
            "_id": f"{i:04x}",
        }
        for i in range(count)
    ]


def write(folder: Path, name: str, rows: list[Any]) -> str:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


measured = partial(tiny.measured, lengths=(900,), repeats=10)


@pytest.mark.parametrize("name", SETS)
def test_ten_made_rows_of_each_set_are_answered(name: str, lm: LM, tmp_path: Path) -> None:
    data = write(tmp_path, name, rows_of(name))
    question = task(f"longbench:set={name},view=answers,data={data},new_tokens=3")
    if missing := set(scoring.NEEDED.get(SETS[name].scorer, ())) - INSTALLED:
        with pytest.raises(ValueError, match=rf"needs the package ({'|'.join(missing)}): pip install 'farspan\[tasks"):
            question.on(lm, "")
        return
    what = question.on(lm, "")
    rows = measured(tmp_path / "run", lm, what)
    assert [row.status for row in rows] == ["ok"] * 10
    assert {row.scores["item"] for row in rows} == {f"{i:04x}" for i in range(10)}


@pytest.mark.parametrize("name", SETS)
def test_prompts_are_the_benchmarks_with_everything_filled_in(name: str, tmp_path: Path) -> None:
    item = load_items(name, write(tmp_path, name, rows_of(name, 1)))[0]
    row = rows_of(name, 1)[0]
    whole = item.before + item.document + item.after
    assert whole == SETS[name].prompt.format(context=row["context"], input=row["input"])
    assert re.findall(r"[{}]", whole) == []


def test_lengths_of_answers_and_scorers_are_the_benchmarks() -> None:
    assert {name: of.new_tokens for name, of in SETS.items()} == {
        "narrativeqa": 128, "qasper": 128, "multifieldqa_en": 64, "multifieldqa_zh": 64, "hotpotqa": 32, "2wikimqa": 32,
        "musique": 32, "dureader": 128, "gov_report": 512, "qmsum": 512, "multi_news": 512, "vcsum": 512, "trec": 64,
        "triviaqa": 32, "samsum": 128, "lsht": 64, "passage_count": 32, "passage_retrieval_en": 32,
        "passage_retrieval_zh": 32, "lcc": 64, "repobench-p": 64,
    }  # fmt: skip
    assert all(of.scorer in scoring.LONGBENCH for of in SETS.values())
    assert {name for name, of in SETS.items() if of.one_line} == {"trec", "triviaqa", "samsum", "lsht"}
    assert len(PAPER) == 12


def test_few_shot_sets_are_judged_by_their_first_line(tmp_path: Path) -> None:
    items = tuple(load_items("trec", write(tmp_path, "trec", rows_of("trec"))))
    what = BoundLongBench("trec", items, Answering(5))
    assert what.judged("\nFood\nColor", items[0]) == {"score": 1.0}
    assert what.judged("Color\nFood", items[0]) == {"score": 0.0}
    counted = tuple(load_items("passage_count", write(tmp_path, "passage_count", rows_of("passage_count"))))
    assert BoundLongBench("passage_count", counted, Answering(5)).judged("\n3\n4", counted[0]) == {"score": 0.5}


def test_a_document_is_cut_in_the_middle_where_that_was_said(lm: LM, tmp_path: Path) -> None:
    data = write(tmp_path, "hotpotqa", rows_of("hotpotqa"))
    short = measured(
        tmp_path / "a", lm, task(f"longbench:set=hotpotqa,view=answers,data={data}").on(lm, ""), lengths=(330,)
    )
    assert {row.status for row in short} == {"too_long"}
    what = task(f"longbench:set=hotpotqa,view=answers,data={data},truncate=middle").on(lm, "")
    rows = measured(tmp_path / "b", lm, what, lengths=(330,))
    assert {row.status for row in rows} == {"ok"}
    assert all(row.scores["left_out"] > 0 and row.num_seen == 330 - 32 for row in rows)


def test_equal_rows_of_the_data_are_examples_of_their_own(lm: LM, tmp_path: Path) -> None:
    data = write(tmp_path, "hotpotqa", [*rows_of("hotpotqa", 2), *rows_of("hotpotqa", 1)])
    what = task(f"longbench:set=hotpotqa,view=answers,data={data},new_tokens=2").on(lm, "")
    rows = measured(tmp_path / "run", lm, what, repeats=3)
    assert sorted(row.scores["item"] for row in rows) == ["0000", "0000", "0001"]
    again = what.examples(lm, (900,), 2, 0)
    assert [example.id for example in again] == [row.example for row in rows[:2]]


def test_the_papers_view_is_perplexity_of_the_contexts(lm: LM, tmp_path: Path) -> None:
    data = write(tmp_path, "hotpotqa", rows_of("hotpotqa"))
    what = task(f"longbench:set=hotpotqa,data={data}").on(lm, "")
    assert isinstance(what, BoundPerplexity)
    assert what.targets == "all"
    assert what.text.num_documents == 10
    rows = measured(tmp_path / "a", lm, what, lengths=(20, 40), repeats=5)
    same = perplexity_of(corpora.load(f"{data}/hotpotqa.jsonl#context", lm.tokenizer), "all")
    again = measured(tmp_path / "b", lm, same, lengths=(20, 40), repeats=5)
    assert [row.scores for row in rows] == [row.scores for row in again]
    assert np.isfinite([row.scores["nats"] for row in rows]).all()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"context": None}, r"no column 'context'; it has \['input', 'answers'"),
        ({"_id": None}, "no column '_id'"),
        ({"dataset": "musique"}, "holds rows of 'musique', not of 'hotpotqa'"),
        ({"context": 5}, "row 1, column 'context': got int 5, expected text"),
        ({"input": ["x"]}, r"row 1, column 'input': got list \['x'\], expected text"),
        ({"answers": "yes"}, "row 1, column 'answers': got str 'yes', expected a list of texts"),
        ({"answers": [{"x": 1}]}, "row 1, column 'answers', entry 1: got dict"),
        ({"all_classes": "abc"}, "row 1, column 'all_classes': got str 'abc', expected a list of texts"),
    ],
)
def test_rows_that_are_not_the_sets_are_refused(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    rows = [{key: value for key, value in (row | change).items() if value is not None} for row in rows_of("hotpotqa")]
    for row in rows:
        row.setdefault("all_classes", None)
    with pytest.raises(ValueError, match=problem):
        load_items("hotpotqa", write(tmp_path, "hotpotqa", rows))


def test_rows_of_the_even_lengths_are_of_the_same_set(tmp_path: Path) -> None:
    rows = [row | {"dataset": "hotpotqa_e"} for row in rows_of("hotpotqa")]
    assert len(load_items("hotpotqa", write(tmp_path, "hotpotqa", rows))) == 10


def test_an_empty_reference_is_counted_and_not_asked(lm: LM, tmp_path: Path) -> None:
    rows = rows_of("hotpotqa", 2)
    rows[0]["answers"] = []
    what = task(f"longbench:set=hotpotqa,view=answers,data={write(tmp_path, 'hotpotqa', rows)},new_tokens=2").on(lm, "")
    found = measured(tmp_path / "run", lm, what, repeats=2)
    assert sorted(row.status for row in found) == ["no_reference", "ok"]


@pytest.mark.parametrize("view", ["text", "answers"])
def test_without_data_the_way_to_it_is_named(view: str, lm: LM) -> None:
    with pytest.raises(ValueError, match=r"needs data: .*data\.zip of THUDM/LongBench"):
        task(f"longbench:set=qasper,view={view}").on(lm, "")
