"""Retrieval-augmented perplexity: against one forward over everything, mixtures by hand, and what the command says."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_cli import done, farspan, last_line, refused
from transformers import PreTrainedTokenizerFast

from farspan.lm import LM, wrap
from farspan.measuring.grid import measure
from farspan.record import Row, read_examples
from farspan.report.cells import cells
from farspan.tasks.ralm import BoundRalm, Ralm
from farspan.text.corpora import load
from farspan.text.retrieval import build

import tiny
from cepe_models import tiny_cepe
from naive import nats_after
from tiny import PlannedAndFed, tiny_model

LENGTHS = (0, 1, 3)
SMALL = {"window": 60, "query": 20, "passage_tokens": 25}


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """Documents to be found, a text that is asked about, and a folder that holds both."""
    rng = np.random.default_rng(0)
    words = [a + b for a in ("fox", "dog", "over", "lazy", "quick") for b in "abcdefghij"]
    for name in ("found/0", "found/1", "found/2", "asked/0", "both/0", "both/1"):
        path = tmp_path / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(" ".join(rng.choice(words) for _ in range(400)))
    (tmp_path / "both" / "0.txt").write_text((tmp_path / "asked" / "0.txt").read_text())
    return tmp_path


def ralm(documents: Path, lm: LM, found: str = "found", **changes: Any) -> BoundRalm:
    index = build(str(documents / found), documents / f"index-{found}", words=10)
    text = load(str(documents / "asked"), lm.tokenizer)
    return BoundRalm(index=str(index.folder), opened=index, text=text, **(SMALL | changes))


measured = partial(tiny.measured, lengths=LENGTHS, repeats=3, chunk=23)


def passages_of(asked: BoundRalm, lm: LM, row: Row) -> tuple[list[list[int]], list[int]]:
    example = next(one for one in asked.examples(lm, LENGTHS, 3, 0) if one.id == row.example)
    given = example.payload
    return [ids.tolist() for ids in given.passages[: row.length]], given.text.tolist()


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2", "mamba"])
def test_joined_passages_equal_one_forward_over_everything(
    architecture: str, documents: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    lm = wrap(tiny_model(architecture), tokenizer, "tiny")
    asked = ralm(documents, lm)
    rows = measured(documents / "run", lm, asked)
    assert len(rows) == 9
    for row in rows:
        passages, text = passages_of(asked, lm, row)
        before = [*lm.separator.ids, *(i for ids in passages for i in ids), *text[:20]]
        nats, _ = nats_after(lm.model, before, text[20:])
        assert row.scores["nats"] == pytest.approx(float(nats.mean()), abs=1e-5)
        assert row.scores["scored"] == 40
        assert row.scores["passage_tokens"] == [len(ids) for ids in passages]
        assert row.num_seen == 1 + sum(map(len, passages)) + 20
        assert row.scores["context"] == row.num_seen + 40
    assert len({round(row.scores["nats"], 4) for row in rows}) == 9  # passages change what is expected


@pytest.mark.parametrize("weights", ["method", "retriever"])
def test_replug_mixes_a_pass_for_each_passage(weights: str, documents: Path, lm: LM) -> None:
    asked = ralm(documents, lm, weights=weights)
    rows = [row for row in measured(documents / "run", lm, asked, "replug") if row.length == 3]
    shares = []
    for row in rows:
        passages, text = passages_of(asked, lm, row)
        fit = torch.tensor(row.scores["passage_scores"])
        share = fit.softmax(-1) if weights == "retriever" else torch.full((3,), 1 / 3)
        each = [nats_after(lm.model, [*lm.separator.ids, *ids, *text[:20]], text[20:])[0] for ids in passages]
        nats = -sum(w * (-one).exp() for w, one in zip(share, each, strict=True)).log()
        assert row.scores["nats"] == pytest.approx(float(nats.mean()), abs=1e-4 if weights == "retriever" else 1e-5)
        shares.append(share)
    assert (weights == "retriever") == any(float(share.max()) > 0.4 for share in shares)


def test_passages_come_best_first_and_few_are_the_first_of_many(documents: Path, lm: LM) -> None:
    asked = ralm(documents, lm)
    by = {(row.repeat, row.length): row.scores for row in measured(documents / "run", lm, asked)}
    for repeat in range(3):
        three = by[repeat, 3]
        assert three["passage_scores"] == sorted(three["passage_scores"], reverse=True)
        assert three["passage_scores"][-1] > 0
        assert by[repeat, 1]["passages"] == three["passages"][:1]
        assert by[repeat, 0]["passages"] == []


def test_the_query_is_the_beginning_of_the_window_alone(documents: Path, lm: LM) -> None:
    asked = ralm(documents, lm)
    example = asked.examples(lm, LENGTHS, 3, 0)[0]
    query = lm.tokenizer.decode(example.payload.text[:20].tolist())
    assert asked.opened.search([query], 3)[0][0].tolist() == example.payload.numbers.tolist()


def test_the_text_itself_is_not_found_and_what_was_left_out_is_counted(documents: Path, lm: LM) -> None:
    def words(text: str) -> str:
        return " ".join(text.split())

    asked, anything = (ralm(documents, lm, "both", overlap=overlap) for overlap in (5, 0))
    for clean, leaking in zip(asked.examples(lm, (3,), 3, 0), anything.examples(lm, (3,), 3, 0), strict=True):
        window = words(lm.tokenizer.decode(clean.payload.text.tolist()))
        itself = [words(asked.opened.passage(int(n)))[10:40] in window for n in leaking.payload.numbers]
        assert any(itself)
        assert clean.payload.excluded >= sum(itself)
        assert leaking.payload.excluded == 0
        for number in clean.payload.numbers:
            parts = words(asked.opened.passage(int(number))).split()
            assert not any(" ".join(parts[i : i + 5]) in window for i in range(len(parts) - 4))


def test_passages_shorter_than_the_overlap_are_compared_whole(documents: Path, lm: LM) -> None:
    asked = ralm(documents, lm, "both", overlap=13)  # passages of 10 words
    for example in asked.examples(lm, (3,), 3, 0):
        window = " ".join(lm.tokenizer.decode(example.payload.text.tolist()).split())
        assert example.payload.excluded > 0
        assert not any(" ".join(asked.opened.passage(int(n)).split()) in window for n in example.payload.numbers)


def test_overlaps_are_found_in_scripts_without_spaces(documents: Path, lm: LM) -> None:
    chinese = "今天天气很好，我们去公园散步。小明在图书馆看书，他喜欢历史。老师说明天有考试，大家都很紧张。"
    other = "山上有一座古老的寺庙，里面住着一位和尚。河边的柳树在风中摇摆，孩子们在桥上放风筝。"
    (documents / "chinese").mkdir()
    (documents / "chinese" / "0.txt").write_text(chinese + other)
    asked = ralm(documents, lm, "chinese", overlap=8)
    numbers, _, excluded = asked._chosen(chinese[:10], chinese, 3, np.random.default_rng(0))
    assert excluded == 4  # of 10 words each, with 41 of the window
    assert all(asked.opened.passage(int(n)).strip() not in chinese for n in numbers)


def test_random_passages_are_the_control(documents: Path, lm: LM) -> None:
    found, drawn = (ralm(documents, lm, "both", overlap=5, passages=how) for how in ("found", "random"))
    rows = measured(documents / "run", lm, drawn, repeats=6, lengths=(0, 1, 30))
    best = {
        row.repeat: row.scores["passages"] for row in measured(documents / "b", lm, found, lengths=(30,), repeats=6)
    }
    for row in rows:
        own = row.scores["passages"]
        assert len(set(own)) == row.length
        assert row.scores["passage_scores"] == [0.0] * row.length
        assert row.length < 30 or set(own) != set(best[row.repeat])
        window = next(e for e in drawn.examples(lm, (0, 1, 30), 6, 0) if e.id == row.example).payload.text
        for number in own:
            assert _shared(drawn.opened.passage(number), lm.tokenizer.decode(window.tolist())) < 5
    long = [tuple(row.scores["passages"]) for row in rows if row.length == 30]
    assert len(set(long)) == 6  # each window has its own
    assert any(row.scores["excluded"] for row in rows)
    again = measured(documents / "again", lm, drawn, repeats=2, lengths=(1, 30))
    assert {row.key: row.scores for row in again}.items() <= {row.key: row.scores for row in rows}.items()
    assert {one.id for one in drawn.examples(lm, (0,), 3, 0)}.isdisjoint(
        {one.id for one in found.examples(lm, (0,), 3, 0)}
    )


def _shared(text: str, other: str) -> int:
    """Words of the longest run that two texts share."""
    (a, b), longest = (text.split(), other.split()), 0
    for i in range(len(a)):
        for j in range(len(b)):
            length = 0
            while i + length < len(a) and j + length < len(b) and a[i + length] == b[j + length]:
                length += 1
            longest = max(longest, length)
    return longest


def test_passages_of_an_index_may_all_be_asked_for(documents: Path, lm: LM) -> None:
    asked = ralm(documents, lm, overlap=0)
    [example] = asked.examples(lm, (len(asked.opened),), 1, 0)  # more than are searched at first
    assert sorted(example.payload.numbers) == list(range(len(asked.opened)))
    query = lm.tokenizer.decode(example.payload.text[:20].tolist())
    assert example.payload.numbers.tolist() == asked.opened.search([query], len(asked.opened))[0][0].tolist()


@pytest.mark.parametrize("decoder", [0, 1, 2])
def test_a_row_says_what_an_encoder_read(decoder: int, documents: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    lm = wrap(tiny_cepe(), tokenizer, "tiny-cepe")
    rows = measured(
        documents / "run", lm, ralm(documents, lm), f"cepe:chunk=16,decoder_window=200,decoder_passages={decoder}"
    )
    for row in rows:
        scores = row.scores
        encoded = scores["passage_tokens"][decoder:] if row.length > 1 else []  # one passage is a document
        assert scores["in_encoder"] == sum(encoded)
        assert scores["in_decoder"] + scores["in_encoder"] == row.num_seen == scores["context"] - scores["scored"]
    assert any(row.scores["in_encoder"] for row in rows)


def test_what_was_left_out_is_made_up_for_from_further_down(
    documents: Path, lm: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ralm(documents, lm, "both", overlap=2)
    enough = asked.examples(lm, (12,), 3, 0)
    assert all(example.payload.excluded for example in enough)
    monkeypatch.setattr("farspan.tasks.ralm.SPARE", 0)  # so that the index is asked again, for more
    for one, other in zip(enough, asked.examples(lm, (12,), 3, 0), strict=True):
        assert one.payload.numbers.tolist() == other.payload.numbers.tolist()
        assert len(set(one.payload.numbers.tolist())) == 12
        assert one.payload.excluded == other.payload.excluded


def test_too_few_passages_are_an_error_that_counts_them(documents: Path, lm: LM) -> None:
    asked = ralm(documents, lm, "asked", overlap=1)  # every passage shares a word with every window
    with pytest.raises(ValueError, match=r"3 passages are needed .*; index .* holds 40, of which 40 share 1 words"):
        asked.examples(lm, (3,), 1, 0)


def test_what_is_asked_otherwise_makes_other_examples(documents: Path, lm: LM) -> None:
    one, *others = (
        {example.id for example in ralm(documents, lm, found, weights=weights).examples(lm, (0,), 3, 0)}
        for found, weights in (("found", "method"), ("both", "method"), ("found", "retriever"))
    )
    assert all(one.isdisjoint(other) for other in others)


def test_the_same_is_asked_again(documents: Path, lm: LM) -> None:
    one = ralm(documents, lm).examples(lm, LENGTHS, 3, 0)
    assert [e.id for e in one] == [e.id for e in ralm(documents, lm).examples(lm, LENGTHS, 3, 0)]


@pytest.mark.parametrize("how", ["full", "replug", "replug:piece=4"])
def test_the_tokens_of_a_plan_are_those_that_are_fed(
    how: str, documents: Path, lm: LM, planned_and_fed: PlannedAndFed
) -> None:
    planned, fed = planned_and_fed(ralm(documents, lm), lm, how, lengths=LENGTHS, repeats=3)
    assert planned == fed > 0


def test_what_does_not_fit_is_a_row_that_says_so(documents: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    lm = wrap(tiny_model("gpt2", n_positions=100), tokenizer, "short")
    rows = measured(documents / "run", lm, ralm(documents, lm))
    assert {(row.length, row.status) for row in rows} == {(0, "ok"), (1, "ok"), (3, "too_long")}


def test_numbers_that_are_not_finite_are_rows_that_say_so(documents: Path, lm: LM) -> None:
    lm.model.model.norm.weight.data[0] = torch.nan
    rows = measured(documents / "run", lm, ralm(documents, lm))
    assert {(row.status, row.reason) for row in rows} == {("nan", "40 scored tokens have no finite log-probability")}
    assert not any("accuracy" in row.scores for row in rows)


def test_the_first_example_is_kept_whole(documents: Path, lm: LM) -> None:
    asked = ralm(documents, lm)
    text = f"ralm:index={documents / 'index-found'},window=60,query=20,passage_tokens=25"
    options = {"text": str(documents / "asked"), "lengths": LENGTHS, "repeats": 2, "out": documents / "run"}
    rows = measure([lm], ["full"], [text], **options).rows
    (shown,) = read_examples(documents / "run")
    passages, ids = passages_of(asked, lm, next(row for row in rows if row.repeat == 0 and row.length == 1))
    assert shown["what"] == text
    assert shown["scored"] == 40
    assert ["".join(tokens) for _, tokens in shown["parts"]] == [
        lm.tokenizer.decode(part) for part in ([0], passages[0], ids)
    ]


def test_cells_are_means_with_intervals(documents: Path, lm: LM) -> None:
    rows = measured(documents / "run", lm, ralm(documents, lm))
    entry = {"task": "ralm", "unit": "passages", "quality": asdict(Ralm.quality), "details": list(Ralm.details)}
    header = {"settings": {"tasks": {"ralm": entry}}, "models": {lm.name: {"tasks": {"ralm": rows[0].settings}}}}
    (none, one, three) = cells(rows, header)
    nats = [row.scores["nats"] for row in rows if row.length == 3]
    assert three.value == pytest.approx(np.exp(np.mean(nats)))
    half = 4.302653 * np.std(nats, ddof=1) / np.sqrt(3)  # Student's, two degrees of freedom
    assert (three.low, three.high) == pytest.approx((np.exp(np.mean(nats) - half), np.exp(np.mean(nats) + half)))
    assert (none.length, one.length, three.n, three.statuses) == (0, 1, 3, {})
    assert three.details == {"accuracy": pytest.approx(np.mean([r.scores["accuracy"] for r in rows if r.length == 3]))}


def test_the_command_measures_plans_and_goes_on(documents: Path, lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(documents)
    for saved in (lm.model, lm.tokenizer):
        saved.save_pretrained("tiny")
    farspan("index", "--text", "found", "--out", "index", "--words", 10)
    name = "ralm:index=index,window=60,query=20,passage_tokens=25"
    common = ("task", name, "tiny", "--text", "asked", "--lengths", "0,1,3", "--repeats", 2, "--device", "cpu")
    plans = last_line(farspan(*common, "--plan", "--json"))["plans"]
    assert [(one["what"], one["num_examples"]) for one in plans] == [(name, 2)]
    assert not Path("runs").exists()

    both = (*common, "--method", "full", "--method", "replug")
    result = done(farspan(*both, "--json"))
    summary = last_line(result)
    assert [(one["method"], one["length"]) for one in summary["results"]] == [
        (how, k) for how in ("full", "replug:weights=uniform") for k in (0, 1, 3)
    ]
    assert summary["quality"] == "perplexity"
    assert summary["unit"] == "passages"
    rows = (Path(summary["run"]) / "rows.jsonl").read_bytes()
    table = farspan(*both).stdout
    assert "perplexity (lower is better)" in " ".join(table.split())
    assert (Path(summary["run"]) / "rows.jsonl").read_bytes() == rows
    assert [json.loads(line)["status"] for line in rows.splitlines()] == ["ok"] * 12

    compared = ("compare", "tiny", "--task", name, *common[3:], "--no-cost")
    plans = last_line(farspan(*compared, "--plan", "--json"))["plans"]
    assert [one["length"] for one in plans] == [0, 1, 3]
    assert "from 1 on" in refused(farspan(*compared, "--task", "perplexity"))


def test_the_command_refuses_what_is_not_there(documents: Path, lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(documents)
    for saved in (lm.model, lm.tokenizer):
        saved.save_pretrained("tiny")
    assert "task 'rlam' is unknown" in refused(farspan("task", "rlam", "tiny"))
    assert "holds no index" in refused(farspan("task", "ralm:index=none", "tiny", "--text", "asked"))
    assert "from 1 on" in refused(farspan("task", "own", "tiny", "--lengths", "0,512"))


def test_a_run_with_another_index_is_refused(documents: Path, lm: LM) -> None:
    text = f"ralm:index={documents / 'index'},window=60,query=20"
    options = {"text": str(documents / "asked"), "lengths": (1,), "repeats": 2, "out": documents / "run"}
    build(str(documents / "found"), documents / "index", words=10)
    measure([lm], ["full"], [text], **options)
    (documents / "index").rename(documents / "before")
    build(str(documents / "both"), documents / "index", words=10)
    with pytest.raises(ValueError, match=r"the index .* has changed since"):
        measure([lm], ["full"], [text], **options)
