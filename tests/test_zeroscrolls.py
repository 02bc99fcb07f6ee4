"""Documents and answers: made rows of every form, prompts word for word, plain generation, and real meetings."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from farspan.lm import LM, load, wrap
from farspan.loading import load_tokenizer
from farspan.tasks import documents, scoring, task
from farspan.tasks.documents import Answering, Item
from farspan.tasks.zeroscrolls import SETS, BoundZeroScrolls, load_items
from farspan.text.prompts import continued, line_ends, pieces

import tiny
from cepe_models import tiny_cepe
from naive import greedy_until
from tiny import tiny_model, write_lines

METHODS = [
    "full",
    "sinks:window=64,sinks=4",
    "lambda_mask:window=64,sinks=4",
    "topk:k=32",
    "rope:type=yarn,factor=4",
    "replug:piece=64,tail=32",
    "replug:piece=64,tail=32,weights=bm25",
]
OPTIONS = "\n\n (A) The sea\n (B) A ship\n (C) The sea and a ship\n (D) None\n\n\n"


def rows_of(name: str, count: int = 10) -> list[dict[str, Any]]:
    """Rows as SCROLLS has them."""
    if name == "quality":
        inputs = [f"What was seen {i}?{OPTIONS}It was long ago.\n\nStory {i}." for i in range(count)]
        return [{"id": str(i), "pid": f"{i}_0", "input": text, "output": "A ship"} for i, text in enumerate(inputs)]
    asked = "{question}" in SETS[name].question
    inputs = [(f"Who is {i}?\n\n" if asked else "") + f"Text {i}.\n\nMore of it." for i in range(count)]
    return [{"id": str(i), "pid": f"{i}_0", "input": text, "output": f"fox {i}"} for i, text in enumerate(inputs)]


def made(documents: list[str] | None = None, truncate: str = "none", omitted: str = "", **how: Any) -> BoundZeroScrolls:
    texts = documents or [f"the quick brown fox {i} jumps over the lazy dog. " * (i + 1) for i in range(4)]
    items = tuple(Item(f"item {i}", "Story:\n", t, "\n\nWho?\nAnswer:\n", ("fox",)) for i, t in enumerate(texts))
    return BoundZeroScrolls("qasper", items, Answering(**({"new_tokens": 6} | how)), truncate, omitted)


measured = partial(tiny.measured, lengths=(300,), repeats=4)


@pytest.mark.parametrize("name", SETS)
def test_ten_made_rows_of_each_set_are_read_and_answered(name: str, lm: LM, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "validation.jsonl", rows_of(name))
    what = task(f"zeroscrolls:set={name},data={file},new_tokens=3").on(lm, "")
    rows = measured(tmp_path / "run", lm, what, lengths=(900,), repeats=10)
    assert [row.status for row in rows] == ["ok"] * 10
    assert {row.scores["item"] for row in rows} == {str(i) for i in range(10)}
    assert load_items(name, str(tmp_path)) == load_items(name, file)


@pytest.mark.parametrize(
    ("name", "before", "after", "references"),
    [
        (
            "narrativeqa",
            "Story:\nText 0.\n\nMore of it.",
            "\n\nYou are given a story, which can be either a novel or a movie script, and a question. Answer the "
            "question as concisely as you can, using a single phrase if possible.\n\nQuestion:\nWho is 0?\n\nAnswer:\n",
            ("fox 0",),
        ),
        (
            "qasper",
            "Article:\nText 0.\n\nMore of it.",
            "\n\nYou are given a scientific article and a question. Answer the question as concisely as you can, using "
            "a single phrase or sentence if possible. If the question cannot be answered based on the information in "
            'the article, write "unanswerable". If the question is a yes/no question, answer "yes", "no", or '
            '"unanswerable".\n\nQuestion:\nWho is 0?\n\nAnswer:\n',
            ("fox 0",),
        ),
        (
            "govreport",
            "Report:\nText 0.\n\nMore of it.",
            "\n\nInstruction: You are given a report by a government agency. Write a one-page summary of the report.\n"
            "Summary:\n",
            ("fox 0",),
        ),
        (
            "summ_screen_fd",
            "Episode Script:\nText 0.\n\nMore of it.",
            "\n\nYou are given a script of a TV episode. Summarize the episode in a paragraph.\n\nSummary:\n",
            ("fox 0",),
        ),
        (
            "qmsum",
            "Transcript:\nText 0.\n\nMore of it.",
            "\n\nYou are given a meeting transcript and a query containing a question or instruction. Answer the query "
            "in one or more sentences.\n\nQuery:\nWho is 0?\n\nAnswer:\n",
            ("fox 0",),
        ),
        (
            "quality",
            "Story:\nIt was long ago.\n\nStory 0.",
            "\n\nYou are provided a story and a multiple-choice question with 4 possible answers (marked by A, B, C, "
            "D). Choose the best answer by writing its corresponding letter (either A, B, C, or D).\n\nQuestion and "
            "Possible Answers:\nWhat was seen 0?\n\n(A) The sea\n(B) A ship\n(C) The sea and a ship\n(D) None"
            "\n\nAnswer:",
            ("B",),
        ),
    ],
)
def test_the_document_stands_before_the_instruction(
    name: str, before: str, after: str, references: tuple[str, ...], tmp_path: Path
) -> None:
    item = load_items(name, write_lines(tmp_path / "x.jsonl", rows_of(name)))[0]
    assert item.before + item.document == before
    assert item.after == after
    assert item.references == references


def test_settings_are_the_papers(lm: LM, tmp_path: Path) -> None:
    def answering(name: str) -> Answering:
        file = write_lines(tmp_path / f"{name}.jsonl", rows_of(name))
        return task(f"zeroscrolls:set={name},data={file}").on(lm, "").answering  # type: ignore[attr-defined]

    assert {name: answering(name).new_tokens for name in SETS} == {
        "narrativeqa": 50, "qasper": 50, "quality": 50, "govreport": 1024, "summ_screen_fd": 1024, "qmsum": 1024
    }  # fmt: skip
    assert answering("govreport") == Answering(1024, min_new_tokens=10, temperature=1.0, top_p=0.95)
    assert answering("qasper").one_line
    assert not answering("qmsum").one_line


def test_the_choice_is_the_equal_option_not_the_first_that_contains_it(tmp_path: Path) -> None:
    rows = rows_of("quality", 1)
    rows[0]["output"] = "The sea and a ship"
    assert load_items("quality", write_lines(tmp_path / "x.jsonl", rows))[0].references == ("C",)
    rows[0]["output"] = "The sea"
    assert load_items("quality", write_lines(tmp_path / "x.jsonl", rows))[0].references == ("A",)


def test_a_gold_a_is_not_met_by_an_empty_answer() -> None:
    item = Item("x", "", "", "", ("A",), ("The sea", "A ship", "a", "None"))
    what = BoundZeroScrolls("quality", (item,), Answering(5))
    right = ["A", " A", "(A) The sea", "the sea"]
    wrong = ["", "the", "B", "A ship"]
    assert [what.judged(text, item)["score"] for text in right + wrong] == [1.0] * 4 + [0.0] * 4


def test_all_references_of_a_question_count(tmp_path: Path) -> None:
    rows = [
        {"id": "q", "pid": f"q_{i}", "input": "Who?\n\nText", "output": text} for i, text in enumerate(["fox", "dog"])
    ]
    [item] = load_items("qasper", write_lines(tmp_path / "x.jsonl", rows))
    assert item.references == ("fox", "dog")
    what = BoundZeroScrolls("qasper", (item,), Answering(5))
    assert what.judged("the dog", item) == {"score": 1.0}


def test_summaries_are_judged_by_rouge_l_with_the_others_beside_it() -> None:
    item = Item("x", "", "", "", ("the cat sat on the mat", "nothing"))
    scores = BoundZeroScrolls("qmsum", (item,), Answering(5)).judged("a cat on a mat", item)
    assert scores == {"score": scoring.rouge("a cat on a mat", item.references)["rougeL"], **scoring.rouge(
        "a cat on a mat", item.references
    )}  # fmt: skip


def test_the_publications_own_forms_are_read(tmp_path: Path) -> None:
    story = {"document": {"text": "Once."}, "question": {"text": "Who?"}, "answers": [{"text": "a"}, {"text": "fox"}]}
    [item] = load_items("narrativeqa", write_lines(tmp_path / "a.jsonl", [story]))
    assert (item.document, item.references) == ("Once.", ("a", "fox"))
    assert "Question:\nWho?" in item.after
    [item] = load_items("govreport", write_lines(tmp_path / "b.jsonl", [{"report": "Long.", "summary": "Short."}]))
    assert (item.document, item.references) == ("Long.", ("Short.",))
    meeting = {
        "meeting_transcripts": [{"speaker": "Ada", "content": "Hello ."}, {"speaker": "Kurt", "content": "Yes ."}],
        "general_query_list": [{"query": "What?", "answer": "Greetings."}],
        "specific_query_list": [{"query": "Who?", "answer": "Ada."}, {"query": "Why?", "answer": "So."}],
    }
    items = load_items("qmsum", write_lines(tmp_path / "c.jsonl", [meeting]))
    assert [item.references for item in items] == [("Greetings.",), ("Ada.",), ("So.",)]
    assert {item.document for item in items} == {"Ada: Hello .\nKurt: Yes ."}
    assert items[1].after.endswith("Query:\nWho?\n\nAnswer:\n")


@pytest.mark.parametrize("truncate", ["none", "beginning", "middle", "end"])
def test_answers_equal_plain_forwards_over_the_prompt_that_is_left(truncate: str, lm: LM, tmp_path: Path) -> None:
    what = made(truncate=truncate, omitted="... [cut]", one_line=True)
    length = 300 if truncate == "none" else 60
    rows = measured(tmp_path, lm, what, lengths=(length,))
    cut = 0
    for row, example in zip(rows, what.examples(lm, (length,), 4, 0), strict=True):
        ids = {key: value.tolist() for key, value in vars(example.payload).items() if key != "item"}
        room = length - 1 - len(ids["before"]) - len(ids["after"]) - 6
        note = pieces(lm.tokenizer, "x", "... [cut]")[1].tolist()
        document = ids["document"]
        if len(document) > room:
            cut += 1
            if truncate == "beginning":
                left = document[-room:]
            elif truncate == "middle":
                left = document[: room // 2] + document[-(room - room // 2) :]
            else:
                left = document[: room - len(note)] + note
        else:
            left = document
        prompt = [*lm.separator.ids, *ids["before"], *left, *ids["after"]]
        new = greedy_until(lm.model, prompt, 6, {0, *line_ends(lm.tokenizer)})
        assert row.scores["prediction"] == lm.tokenizer.decode(new).split("\n")[0]
        assert (row.scores["new"], row.num_seen, row.scores["context"]) == (len(new), len(prompt), len(prompt))
        kept = len(left) - (len(note) if truncate == "end" and left != document else 0)
        assert (row.scores["document"], row.scores["left_out"]) == (len(document), len(document) - kept)
        assert row.num_seen + 6 <= length
    assert bool(cut) == (truncate != "none")


def test_a_row_says_what_an_encoder_read(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    lm = wrap(tiny_cepe(), tokenizer, "tiny-cepe")
    rows = measured(tmp_path, lm, made(), "cepe:chunk=16,decoder_window=60")
    assert [row.status for row in rows] == ["ok"] * 4
    for row in rows:
        over = max(0, row.num_seen + 6 - 60)
        assert row.scores["in_encoder"] == -(-over // 16) * 16  # whole chunks, as few as will do
        assert row.scores["in_decoder"] + row.scores["in_encoder"] == row.num_seen
        assert row.scores["left_out"] == 0
    assert len({row.scores["in_encoder"] for row in rows}) > 1


def test_a_document_that_is_too_long_is_counted_and_not_asked(lm: LM, tmp_path: Path) -> None:
    rows = measured(tmp_path, lm, made(), lengths=(60, 300))
    assert sorted(row.status for row in rows if row.length == 60) == ["ok"] * 2 + ["too_long"] * 2
    assert {row.status for row in rows if row.length == 300} == {"ok"}
    reason = next(row.reason for row in rows if row.status == "too_long")
    assert reason.startswith("the document has ")
    assert reason.endswith("more than 60; leave out a part of it (truncate=beginning, middle or end)")


def test_where_nothing_of_a_document_fits_it_is_not_asked(lm: LM, tmp_path: Path) -> None:
    rows = measured(tmp_path, lm, made(truncate="end", omitted="... [cut]"), lengths=(30,))
    assert {row.status for row in rows} == {"too_long"}
    assert "nothing of the document fits into 30" in rows[0].reason


def test_an_example_without_a_reference_is_counted_and_not_asked(lm: LM, tmp_path: Path) -> None:
    data = rows_of("qasper", 4)
    data[1]["output"], data[2]["output"] = "", None
    what = task(f"zeroscrolls:set=qasper,data={write_lines(tmp_path / 'x.jsonl', data)},new_tokens=2").on(lm, "")
    rows = measured(tmp_path / "run", lm, what, lengths=(900,))
    assert sorted(row.status for row in rows) == ["no_reference", "no_reference", "ok", "ok"]
    assert {row.reason for row in rows} == {"", "1 has no reference answer", "2 has no reference answer"}


def test_questions_that_are_alike_are_a_row_each(lm: LM, tmp_path: Path) -> None:
    rows = measured(tmp_path, lm, made(["the same story"] * 4))
    assert sorted(row.scores["item"] for row in rows) == [f"item {i}" for i in range(4)]


@pytest.mark.parametrize("how", METHODS)
def test_it_runs_under_every_method_and_resumes(how: str, lm: LM, tmp_path: Path) -> None:
    rows = measured(tmp_path, lm, made(), how)
    assert [row.status for row in rows] == ["ok"] * 4
    before = (tmp_path / "rows.jsonl").read_bytes()
    assert measured(tmp_path, lm, made(), how) == rows
    assert (tmp_path / "rows.jsonl").read_bytes() == before


def test_a_window_that_holds_everything_answers_as_full_attention(lm: LM, tmp_path: Path) -> None:
    full = measured(tmp_path / "full", lm, made())
    window = measured(tmp_path / "window", lm, made(), "sinks:window=400,sinks=4")
    assert [row.scores for row in full] == [row.scores for row in window]


def test_sampled_answers_are_the_same_again_and_differ_between_seeds(lm: LM, tmp_path: Path) -> None:
    what = made(temperature=1.0, top_p=0.95, min_new_tokens=3, new_tokens=12)
    once, again, other = (
        {row.scores["item"]: row.scores["prediction"] for row in measured(tmp_path / name, lm, what, seed=seed)}
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert once == again
    assert once != other


def test_an_answer_of_one_line_ends_there(lm: LM, tmp_path: Path) -> None:
    newline = line_ends(lm.tokenizer)[0]
    lm.model.lm_head.weight.data[:] = 0.0
    lm.model.lm_head.weight.data[newline] = 0.0
    free = measured(tmp_path / "a", lm, made(new_tokens=4))
    assert {row.scores["new"] for row in free} == {0}  # token 0, the end of text, is the first of equals
    lm.model.lm_head.register_forward_hook(lambda module, given, out: out.index_fill(-1, torch.tensor([newline]), 9.0))
    assert {row.scores["new"] for row in measured(tmp_path / "b", lm, made(new_tokens=4))} == {4}
    lines = measured(tmp_path / "c", lm, made(new_tokens=4, one_line=True))
    assert {(row.scores["new"], row.scores["prediction"]) for row in lines} == {(0, "")}


def test_parts_of_a_prompt_are_the_tokens_of_the_whole(shared_data: Path) -> None:
    texts = ("Story: ", "Once upon a time.\nIt was", "\n\nQuestion:\nWho?\n\nAnswer:\n")
    for name in ("tokenizers/gpt2", "tokenizers/mistral-7b-v0.1", "models/stories260K"):
        known = AutoTokenizer.from_pretrained(shared_data / name)
        parts = pieces(known, *texts)
        assert np.concatenate(parts).tolist() == known("".join(texts), add_special_tokens=False)["input_ids"]
        assert known.decode(parts[1].tolist()).strip().startswith("Once upon")
        assert known.decode(parts[2].tolist()).lstrip().startswith("Question")


def test_a_text_that_continues_another_is_the_text_of_its_tokens() -> None:
    known = load_tokenizer("demo")  # it has a token for a line end and a space
    for text in ("the fox", " the fox", "  the fox", "\n the fox"):
        assert known.decode(np.concatenate(continued(known, text, " ran"))) == f"{text} ran"


def test_a_prompt_is_tokenised_once_for_all_methods(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenised = []

    def counted(tokenizer: Any, *texts: str) -> list[np.ndarray]:
        tokenised.append(texts[1])
        return pieces(tokenizer, *texts)

    monkeypatch.setattr(documents, "pieces", counted)
    what = made()
    every = [what.examples(lm, (300,), repeats, 0) for repeats in (4, 2)]
    assert len(set(tokenised)) == len(tokenised) == 4
    assert [one.id for one in every[1]] == [one.id for one in every[0][:2]]


def test_a_text_that_spells_a_special_token_is_only_text(lm: LM) -> None:
    assert 0 not in pieces(lm.tokenizer, "a <s> b", " <s>")[0]


def test_real_tokenizers_end_lines(shared_data: Path) -> None:
    for name, ends in (("tokenizers/gpt2", "\n"), ("tokenizers/mistral-7b-v0.1", "\n")):
        known = AutoTokenizer.from_pretrained(shared_data / name)
        [*_, last] = known(f"x{ends}", add_special_tokens=False)["input_ids"]
        assert last in line_ends(known)
        assert known("x", add_special_tokens=False)["input_ids"][-1] not in line_ends(known)


@pytest.mark.parametrize(
    ("name", "rows", "problem"),
    [
        ("qasper", [{"id": 1, "text": "x"}], r"no column 'input'; it has \['id', 'text'\]"),
        ("qasper", [{"id": 1, "input": "x"}], r"no column 'output'"),
        ("qasper", [{"id": 1, "input": "Who? no line", "output": "x"}], "input of 1 has no empty line"),
        (
            "qasper",
            [{"id": None, "input": f"{who}?\n\nx", "output": "x"} for who in ("Who", "Whose")],
            "rows with the id None have different inputs",
        ),
        ("qmsum", [{"meeting": []}], "no column 'meeting_transcripts'"),
        ("quality", [{"id": 1, "input": "Who?\n\nx", "output": "x"}], r"no four options marked \(A\)"),
        ("quality", [{"id": 1, "input": f"Who?{OPTIONS}x", "output": "y"}], "answer of 1, 'y', is none of its options"),
        ("qasper", [], "holds no rows"),
        ("qasper", [{"id": 1, "input": 5, "output": "x"}], "row 1, column 'input': got int 5, expected text"),
        ("qasper", [{"id": 1, "input": "Who?\n\nx", "output": [1]}], r"column 'output': got list \[1\], expected text"),
        ("govreport", [{"report": 5, "summary": "x"}], "row 1, column 'report': got int 5, expected text"),
        (
            "narrativeqa",
            [{"document": {"text": "x"}, "question": "why", "answers": []}],
            "row 1, column 'question': got str 'why', expected an object with 'text'",
        ),
        (
            "narrativeqa",
            [{"document": {"text": "x"}, "question": {"text": "y"}, "answers": [{"txt": "z"}]}],
            "row 1, column 'answers': got an object with txt, expected an object with 'text'",
        ),
        (
            "qmsum",
            [{"meeting_transcripts": [["A", "x"]], "general_query_list": [], "specific_query_list": []}],
            "row 1, column 'meeting_transcripts': got list .* expected an object with 'speaker'",
        ),
        (
            "qmsum",
            [{"meeting_transcripts": [], "general_query_list": 3, "specific_query_list": []}],
            "row 1, column 'general_query_list': got int 3, expected a list",
        ),
    ],
)
def test_rows_that_are_not_the_sets_are_refused(name: str, rows: list[Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        load_items(name, write_lines(tmp_path / "x.jsonl", rows))


def test_too_few_examples_are_refused(lm: LM) -> None:
    with pytest.raises(ValueError, match="qasper has 4 examples; 5 are needed"):
        made().examples(lm, (300,), 5, 0)


def test_real_meetings_are_answered(shared_data: Path, tmp_path: Path) -> None:
    lm = load(shared_data / "models" / "stories260K", dtype="float32", device="cpu")
    file = shared_data / "meetings" / "qmsum_val.jsonl"
    what = task(f"zeroscrolls:set=qmsum,data={file},truncate=beginning,new_tokens=16").on(lm, "")
    assert isinstance(what, BoundZeroScrolls)
    assert len(what.items) == 272
    for how in ("full", "sinks:window=128,sinks=4", "replug:piece=128,tail=64"):
        (row,) = measured(tmp_path, lm, what, how, lengths=(512,), repeats=1)
        assert row.status == "ok"
        assert row.scores["left_out"] > 4000
        assert 0 <= row.scores["score"] <= 1
    whole = task(f"zeroscrolls:set=qmsum,data={file},new_tokens=16").on(lm, "")
    assert {row.status for row in measured(tmp_path, lm, whole, lengths=(512,), repeats=2)} == {"too_long"}


def test_a_model_without_an_end_of_text_can_be_asked(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>")
    lm = wrap(tiny_model(), plain, "tiny")
    assert {row.status for row in measured(tmp_path, lm, made())} == {"ok"}
    assert SimpleNamespace(eos=plain.eos_token_id).eos is None


def test_the_first_example_is_kept_in_words_with_what_fits_of_its_document(lm: LM) -> None:
    what = made(truncate="end")
    example = max(what.examples(lm, (60,), 4, 0), key=lambda one: len(one.payload.document))
    whole, cut = (what.shown(lm, example, length) for length in (900, 60))
    text = "".join("".join(words) for _, words in whole["parts"])
    assert text.startswith("Story:\nthe quick brown fox")
    assert text.endswith("\n\nWho?\nAnswer:\n fox")
    assert len(cut["parts"][1][1]) < len(whole["parts"][1][1])


def test_a_model_without_finite_numbers_answers_nothing_and_its_rows_say_so(lm: LM, tmp_path: Path) -> None:
    lm.model.model.norm.weight.data.fill_(torch.nan)
    rows = measured(tmp_path, lm, made(), lengths=(400,), repeats=2)
    assert [(row.status, row.scores) for row in rows] == [("nan", {})] * 2
    assert "logits that are not finite" in rows[0].reason
