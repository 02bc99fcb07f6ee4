"""Question answering: what is right, the formats of the data sets, the prompt word for word, greedy answers."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_cli import farspan, last_line, refused
from transformers import PreTrainedTokenizerFast

from farspan.lm import LM, wrap
from farspan.measuring.grid import measure
from farspan.record import read_examples
from farspan.tasks import task
from farspan.tasks.base import stops
from farspan.tasks.qa import BoundQa, Passage, Question, _holds, exact_match, read_questions
from farspan.text.prompts import encoded, following
from farspan.text.retrieval import build

import tiny
from cepe_models import tiny_cepe
from naive import greedy_until
from tiny import PlannedAndFed, blank_first_tokenizer, tiny_model, write_lines

PEOPLE = ["Ada", "Grace", "Alan", "Kurt", "Emmy", "Sonja", "Carl", "Marie", "Niels", "Lise"]


def contexts(i: int) -> list[dict[str, Any]]:
    return [
        {"id": str(n), "title": f"{PEOPLE[i]} {n}", "text": f"{PEOPLE[i]} has {n} dogs.", "score": str(9.5 - n)}
        for n in range(4)
    ]


# ten rows of each schema: Natural Questions as the authors' and Contriever's files hold it; nq_open and TriviaQA as the
# hub does; PopQA
NQ = [{"question": f"who is {n}", "answers": [n, f"The {n}"], "ctxs": contexts(i)} for i, n in enumerate(PEOPLE)]
NQ_OPEN = [{"question": f"who is {n}", "answer": [n, f"The {n}"]} for n in PEOPLE]
TRIVIA = [
    {
        "question": f"who is {n}",
        "question_id": f"tc_{i}",
        "question_source": "http://www.example.org/",
        "entity_pages": {"doc_source": [], "filename": [], "title": [], "wiki_context": []},
        "search_results": {"description": [], "filename": [], "rank": [], "title": [], "url": [], "search_context": []},
        "answer": {
            "aliases": [n, f"The {n}"],
            "normalized_aliases": [n.lower()],
            "matched_wiki_entity_name": "",
            "normalized_matched_wiki_entity_name": "",
            "normalized_value": n.lower(),
            "type": "WikipediaEntity",
            "value": n,
        },
    }
    for i, n in enumerate(PEOPLE)
]
POPQA = [
    {"id": i, "subj": n, "prop": "name", "obj": n, "question": f"who is {n}", "possible_answers": f'["{n}", "The {n}"]'}
    for i, n in enumerate(PEOPLE)
]


@pytest.fixture
def data(tmp_path: Path) -> str:
    return write_lines(tmp_path / "nq.jsonl", NQ)


def qa(data: str, **changes: Any) -> BoundQa:
    asked, skipped = read_questions(data)
    return BoundQa(data=data, questions=asked, pool=asked, skipped=skipped, **({"new_tokens": 6} | changes))


measured = partial(tiny.measured, lengths=(0, 1, 3), repeats=3, chunk=23)


# data


@pytest.mark.parametrize("rows", [NQ, NQ_OPEN, TRIVIA, POPQA], ids=["nq", "nq_open", "trivia", "popqa"])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_every_format_gives_the_same_questions(rows: list[dict[str, Any]], suffix: str, tmp_path: Path) -> None:
    if suffix == "jsonl":
        path = write_lines(tmp_path / "data.jsonl", rows)
    else:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        path = str(tmp_path / "data.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    asked, skipped = read_questions(path)
    assert skipped == 0
    assert [(one.question, one.answers) for one in asked] == [(f"who is {n}", (n, f"The {n}")) for n in PEOPLE]
    if rows is NQ:
        assert asked[2].passages[1] == Passage("Alan has 1 dogs.", "Alan 1", 8.5, "Alan 1")
        assert len(asked[2].passages) == 4


def test_rows_without_an_answer_are_skipped_and_counted(tmp_path: Path) -> None:
    rows = [
        *NQ,
        {"question": "what", "answers": []},
        {"question": "", "answers": ["x"]},
        {"question": "y", "answers": [""]},
    ]
    asked, skipped = read_questions(write_lines(tmp_path / "a.jsonl", rows))
    assert (len(asked), skipped) == (10, 3)
    assert qa(write_lines(tmp_path / "a.jsonl", rows)).settings["skipped"] == 3
    with pytest.raises(ValueError, match=r"holds no question with an answer \(2 rows\)"):
        read_questions(write_lines(tmp_path / "b.jsonl", rows[10:12]))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"query": "x", "answers": ["y"]}', r"has no column 'question'; it has \['query', 'answers'\]"),
        (
            '{"question": "x", "target": ["y"]}',
            r"no column 'answers' or 'answer' or 'possible_answers'; it has \['question', 't",
        ),
        ('{"question": "x", "answers": ["y"]}\n{"question": "x"}', r"row 2 has no 'answers'; it has \['question'\]"),
        (
            '{"question": "x", "answers": ["y"], "ctxs": [{"title": "z"}]}',
            r"row 1, passage 1 of ctxs: got an object with title, expected an object with 'text'",
        ),
        ('{"question": 7, "answers": ["y"]}', "row 1, column 'question': got int 7, expected text"),
        ('{"question": "x", "answers": true}', "row 1, column 'answers', entry 1: got bool True, expected text"),
        ('{"question": "x", "answers": [["y"]]}', r"column 'answers', entry 1: got list \['y'\], expected text"),
        ('{"question": "x", "answers": NaN}', "column 'answers', entry 1: got float nan, expected text"),
        ('{"question": "x", "answers": {"value": "y", "aliases": 3}}', "'aliases': got int 3, expected a list"),
        ('{"question": "x", "answers": "y", "ctxs": 5}', "row 1, column 'ctxs': got int 5, expected a list"),
        ('{"question": "x", "answers": "y", "ctxs": [{"text": 5}]}', "of ctxs, 'text': got int 5, expected text"),
        ('{"question": "x", "answers": "y", "ctxs": [{"text": "z", "score": "hi"}]}', "got a score of 'hi', expected"),
        (
            '{"question": "x", "answers": "y", "ctxs": [{"text": "z", "score": NaN}]}',
            "'score': got float nan, expected",
        ),
        ('{"question": "x", "answers": "[1"}', "the answers '.1' are not JSON"),
        ("{", "line 1 is damaged: expected JSON"),
        ("[1]", r"has no named columns: got list \[1\]"),
    ],
)
def test_what_is_wrong_with_a_row_is_named(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=said):
        read_questions(str(tmp_path / "a.jsonl"))


# what is asked


def test_the_prompt_is_the_one_of_the_paper(data: str, lm: LM) -> None:
    asked = qa(data)
    for example in asked.examples(lm, (2,), 3, 0):
        which = PEOPLE.index(example.payload.question.answers[0])
        shots = [PEOPLE.index(shot.answers[0]) for shot in asked._demonstrations(which, 0)]
        assert len({which, *shots}) == 3
        expected = "".join(
            f"Document (Title: {PEOPLE[i]} 0): {PEOPLE[i]} has 0 dogs.\n\n"
            f"Question: who is {PEOPLE[i]}\nAnswer: {PEOPLE[i]}\n\n"
            for i in shots
        )
        name = PEOPLE[which]
        expected += (
            f"Document (Title: {name} 0): {name} has 0 dogs.\n\nDocument (Title: {name} 1): {name} has 1 dogs.\n\n"
        )
        expected += f"Question: who is {name}\nAnswer:"
        ids = np.concatenate([example.payload.head, *example.payload.passages, example.payload.query])
        assert ids[0] == lm.separator.ids[0]
        assert lm.tokenizer.decode(ids[1:].tolist()) == expected


def test_demonstrations_depend_on_the_seed_and_the_question_alone(data: str, lm: LM) -> None:
    few, many = qa(data).examples(lm, (1,), 2, 0), qa(data).examples(lm, (1,), 6, 0)
    assert [one.id for one in few] == [one.id for one in many[:2]]
    assert {one.id for one in few}.isdisjoint({one.id for one in qa(data).examples(lm, (1,), 6, 1)})
    shots = {tuple(shot.question for shot in qa(data)._demonstrations(which, 0)) for which in range(10)}
    assert len(shots) > 8  # each question has its own


def test_a_question_is_never_its_own_demonstration(data: str, lm: LM) -> None:
    asked = qa(data, shots=9)
    for which in range(10):
        assert {shot.question for shot in asked._demonstrations(which, 0)} == {
            one.question for i, one in enumerate(asked.questions) if i != which
        }
    twice = BoundQa(data="x", questions=(Question("Who?", ("a",)),), pool=(Question("who", ("b",)),), shots=1)
    with pytest.raises(ValueError, match="shots: got 1 demonstrations, expected at most 0"):
        twice.examples(lm, (0,), 1, 0)


def test_long_passages_lose_their_end(data: str, lm: LM) -> None:
    example = qa(data, passage_tokens=12).examples(lm, (1,), 1, 0)[0]
    name = example.payload.question.answers[0]
    whole = encoded(lm.tokenizer, f"Document (Title: {name} 0): {name} has 0 dogs.\n\n")
    blank = following(lm.tokenizer, "\n\n", before="x")
    assert 0 < len(blank) < 12 < len(whole)
    for passage in (example.payload.passages[0], example.payload.head[1:13]):
        assert len(passage) == 12
        assert lm.tokenizer.decode(passage.tolist()).endswith("\n\n")
    expected = [*whole[: 12 - len(blank)].tolist(), *blank.tolist()]
    assert example.payload.passages[0].tolist() == expected


def test_questions_have_no_blank_at_the_beginning_of_their_line(data: str) -> None:
    lm = wrap(tiny_model(), blank_first_tokenizer(map(chr, (10, *range(33, 127)))), "tiny")
    given = qa(data).examples(lm, (1,), 1, 0)[0].payload
    text = lm.tokenizer.decode(np.concatenate([given.head[1:], *given.passages, given.query]))
    assert text.count("\n\nQuestion: who") == 3


def test_questions_with_too_few_passages_are_not_asked(tmp_path: Path, lm: LM) -> None:
    rows = [row | {"ctxs": row["ctxs"][: 2 + i % 3]} for i, row in enumerate(NQ)]
    asked = qa(write_lines(tmp_path / "a.jsonl", rows))
    chosen = {asked.questions.index(one.payload.question) for one in asked.examples(lm, (1, 4), 3, 0)}
    assert chosen == {2, 5, 8}
    with pytest.raises(ValueError, match=r"4 questions are needed, .* has 3 with at least 4 passages, of .* index"):
        asked.examples(lm, (1, 4), 4, 0)


def test_passages_of_an_index_are_those_that_fit_the_question(tmp_path: Path, lm: LM) -> None:
    for name in PEOPLE:
        (tmp_path / f"{name}.txt").write_text(f"all that is known of {name.lower()} " * 5)
    index = build(str(tmp_path), tmp_path / "index", words=30)
    asked = qa(write_lines(tmp_path / "nq.jsonl", NQ_OPEN), index=str(index.folder), opened=index, shots=0)
    rows = measured(tmp_path / "run", lm, asked, lengths=(1,), repeats=10)
    assert {row.scores["in_passages"] for row in rows} == {1.0}
    assert {index.passage(int(row.scores["passages"][0])).split()[5].title() for row in rows} == set(PEOPLE)
    with pytest.raises(ValueError, match=r"11 questions are needed, and .* has 10: choose fewer \(--repeats\)$"):
        asked.examples(lm, (1,), 11, 0)


def test_demonstrations_are_questions_with_passages(data: str, lm: LM, tmp_path: Path) -> None:
    bare = [{"question": f"bare {i}", "answers": ["x"]} for i in range(9)]
    asked = qa(write_lines(tmp_path / "some.jsonl", [*NQ, *bare]), shots=2)
    assert all(one.passages for which in range(3) for one in asked._demonstrations(which, 0))
    asked = replace(qa(data, shots=2), pool=read_questions(write_lines(tmp_path / "bare.jsonl", bare))[0])
    with pytest.raises(ValueError, match="number of other questions with passages"):
        asked.examples(lm, (1,), 1, 0)


def test_an_answer_that_was_cut_from_its_passage_is_not_in_the_passages(lm: LM, tmp_path: Path) -> None:
    long = {"title": "t", "text": "dog " * 80 + "zebra"}
    rows = [
        {"question": "who", "answer": ["zebra"], "ctxs": [long]},
        {"question": "what", "answer": ["dog"], "ctxs": [long]},
    ]
    cut = qa(write_lines(tmp_path / "long.jsonl", rows), shots=0, passage_tokens=60)
    found = {row.scores["question"]: row.scores["in_passages"]
             for row in measured(tmp_path / "run", lm, cut, lengths=(1,), repeats=2)}  # fmt: skip
    assert found == {"who": 0.0, "what": 1.0}


def test_an_answer_is_found_among_words_and_in_scripts_without_spaces_among_characters() -> None:
    assert _holds("他出生在北京，后来去了上海。", ["南京", "北京"])
    assert not _holds("他出生在北京。", ["北方", "京北"])
    assert not _holds("the doghouse", ["dog"])
    assert _holds("A dog, at home", ["the dog at"])


# answers


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mamba"])
def test_answers_are_greedy(architecture: str, data: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    lm = wrap(tiny_model(architecture), tokenizer, "tiny")
    asked = qa(data, shots=1)
    ends = stops(lm, one_line=True)
    rows = measured(tmp_path / "run", lm, asked)
    examples = {example.id: example.payload for example in asked.examples(lm, (0, 1, 3), 3, 0)}
    for row in rows:
        given = examples[row.example]
        prompt = np.concatenate([given.head, *given.passages[: row.length], given.query])
        new = greedy_until(lm.model, prompt, 6, ends)
        answer = tokenizer.decode(new, skip_special_tokens=True).partition("\n")[0].strip()
        assert row.scores["answer"] == answer
        assert row.scores["new_tokens"] == len(new)
        assert row.scores["context"] == len(prompt)
        assert row.scores["head_tokens"] + sum(row.scores["passage_tokens"]) < len(prompt)
        assert row.scores["exact_match"] == (exact_match(answer, row.scores["answers"]))
    assert len({row.scores["answer"] for row in rows}) > 1


class Answering:
    """A reader whose memory answers with a text, and says what it was given."""

    def __init__(self, lm: LM, text: str) -> None:
        self.lm, self.text, self.given = lm, text, SimpleNamespace()

    def read(self, *passages: torch.Tensor, head: torch.Tensor, weights: torch.Tensor | None) -> Any:
        self.given = SimpleNamespace(passages=passages, head=head, weights=weights)
        return SimpleNamespace(num_seen=1, num_kept=1, num_encoded=0, read=lambda ids: None, generate=self.generate)

    def generate(self, ids: torch.Tensor, max_new_tokens: int, *, stop: list[int]) -> list[torch.Tensor]:
        self.given.stop = stop
        return [torch.from_numpy(encoded(self.lm.tokenizer, self.text))]


@pytest.mark.parametrize(
    ("text", "right"), [(" {}", 1.0), (" the {}.\nQuestion: who", 1.0), ("\n{}", 0.0), ("", 0.0), (" {} dogs", 0.0)]
)
def test_the_first_line_is_the_answer(text: str, right: float, data: str, lm: LM) -> None:
    asked = qa(data)
    (example,) = asked.examples(lm, (2,), 1, 0)
    name = example.payload.question.answers[0]
    reader = Answering(lm, text.format(name))
    (result,) = asked.run(reader, [example])  # type: ignore[arg-type]
    assert result.scores["exact_match"] == right
    assert reader.given.stop == stops(lm, one_line=True)


def test_weights_of_the_retriever_reach_the_reader(data: str, lm: LM, tmp_path: Path) -> None:
    asked = qa(data, weights="retriever")
    (example,) = asked.examples(lm, (3,), 1, 0)
    reader = Answering(lm, "")
    list(asked.run(reader, [example]))  # type: ignore[arg-type]
    torch.testing.assert_close(reader.given.weights, torch.tensor([9.5, 8.5, 7.5]).softmax(-1))
    bare = [row | {"ctxs": [{"text": "x"}]} for row in NQ]
    asked = qa(write_lines(tmp_path / "bare.jsonl", bare), weights="retriever")
    with pytest.raises(ValueError, match="passages without a score, which weights=retriever needs"):
        list(asked.run(reader, asked.examples(lm, (1,), 1, 0)))  # type: ignore[arg-type]


def test_answers_end_with_a_line_and_with_all_end_tokens_of_the_model(tokenizer: PreTrainedTokenizerFast) -> None:
    lm = wrap(tiny_model("llama"), tokenizer, "tiny")
    assert {tokenizer.decode([token]) for token in stops(lm, one_line=True)} == {"\n", "<s>"}
    assert stops(lm, one_line=False) == [tokenizer.eos_token_id]
    lm.model.generation_config.eos_token_id = [7, tokenizer.eos_token_id]
    assert stops(lm, one_line=False) == sorted([7, tokenizer.eos_token_id])


def test_replug_answers_from_all_passages(data: str, lm: LM, tmp_path: Path) -> None:
    rows = measured(tmp_path / "run", lm, qa(data), "replug:weights=bm25", lengths=(2,))
    assert {row.status for row in rows} == {"ok"}
    assert all(row.num_kept > row.num_seen for row in rows)  # a prompt of its own for each passage


@pytest.mark.parametrize("decoder", [0, 1, 3])
def test_a_row_says_what_an_encoder_read(
    decoder: int, data: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    lm = wrap(tiny_cepe(), tokenizer, "tiny-cepe")
    how = f"cepe:chunk=16,decoder_window=400,decoder_passages={decoder}"
    rows = measured(tmp_path / "run", lm, qa(data, shots=1), how, chunk=None)
    for row in rows:
        scores = row.scores
        encoded = scores["passage_tokens"][decoder:] if row.length > 1 else []  # one passage is a document
        assert scores["in_encoder"] == sum(encoded)
        assert scores["in_decoder"] + scores["in_encoder"] == scores["context"] - 1  # the last is asked
    assert any(row.scores["in_encoder"] for row in rows) == (decoder < 3)


def test_prompts_that_do_not_fit_are_rows_that_say_so(
    data: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    lm = wrap(tiny_model("gpt2", n_positions=160), tokenizer, "short")
    rows = measured(tmp_path / "run", lm, qa(data, shots=1))
    assert {(row.length, row.status) for row in rows} == {(0, "ok"), (1, "ok"), (3, "too_long")}


def test_the_first_example_is_kept_whole(data: str, lm: LM, tmp_path: Path) -> None:
    options = {"lengths": (1,), "repeats": 2, "out": tmp_path / "run"}
    rows = measure([lm], ["full"], [f"qa:data={data},new_tokens=3"], **options).rows
    (shown,) = read_examples(tmp_path / "run")
    text = "".join(token for _, tokens in shown["parts"] for token in tokens)
    first = next(row for row in rows if row.repeat == 0).scores
    assert text.startswith("<s>Document (Title: ")
    assert text.endswith(f"Question: {first['question']}\nAnswer: {first['answers'][0]}")
    assert "".join(shown["parts"][-1][1][-shown["scored"] :]) == f" {first['answers'][0]}"


@pytest.mark.parametrize(
    ("lengths", "said"),
    [("", "lengths: got '', expected"), ("0,auto", "mix numbers and auto"), ("0,", "lengths: got '', expected")],
)
def test_lengths_that_say_nothing_are_refused(lengths: str, said: str, data: str) -> None:
    assert said in refused(farspan("task", f"qa:data={data}", "no-model", "--lengths", lengths))


@pytest.mark.parametrize("how", ["full", "replug", "replug:piece=8,tail=3"])
def test_the_tokens_of_a_plan_are_those_that_are_fed(
    how: str, data: str, lm: LM, planned_and_fed: PlannedAndFed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farspan.tasks.qa.stops", lambda *args, **options: [])  # the longest possible answers
    planned, fed = planned_and_fed(qa(data), lm, how, lengths=(0, 1, 3), repeats=3)
    assert planned == fed > 0


def test_the_command_answers(data: str, lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for saved in (lm.model, lm.tokenizer):
        saved.save_pretrained("tiny")
    common = ("task", "qa:data=nq.jsonl,new_tokens=4", "tiny", "--repeats", 3, "--device", "cpu")
    asked = (*common, "--lengths", "0,2", "--json")
    assert last_line(farspan(*asked, "--plan"))["plans"][0]["tokens"] > 100
    summary = last_line(farspan(*asked))
    assert [(one["length"], one["num_examples"]) for one in summary["results"]] == [(0, 3), (2, 3)]
    assert summary["quality"] == "exact match"
    assert last_line(farspan(*asked, "--plan"))["plans"][0]["tokens"] == 0
    assert "with at least 5 passages" in refused(farspan(*common, "--lengths", "5"))


def test_a_model_without_finite_numbers_answers_nothing_and_its_rows_say_so(data: str, lm: LM, tmp_path: Path) -> None:
    lm.model.model.norm.weight.data.fill_(torch.nan)
    rows = measured(tmp_path / "run", lm, task(f"qa:data={data},shots=0").on(lm, ""), lengths=(1, 2), repeats=2)
    assert [(row.status, row.scores) for row in rows] == [("nan", {})] * 4
    assert "logits that are not finite" in rows[0].reason
