"""Tests made of a user's own text: what is hidden where, and memories of which the answers are known."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_cli import farspan, last_line, refused
from transformers import PreTrainedTokenizerFast

from farspan.lm import LM, wrap
from farspan.measuring.grid import measure
from farspan.reader import Scores
from farspan.record import read_examples
from farspan.tasks.own import CUE, PARAPHRASES, TARGET, TESTS, BoundOwn
from farspan.text.corpora import Corpus, load
from farspan.text.prompts import encoded

import tiny
from naive import nats_after
from tiny import PlannedAndFed, blank_first_tokenizer, tiny_model

LENGTHS = (400, 600, 1000)
WORDS = [
    a + b for a in ("Fox", "dog", "Over", "lazy", "Quick", "brow") for b in ("el", "ar", "ing", "ton", "wick", "y")
]


@pytest.fixture
def text(tmp_path: Path) -> str:
    """Sentences of random words in three documents."""
    rng = np.random.default_rng(0)
    (tmp_path / "documents").mkdir()
    for i in range(3):
        sentences = [" ".join(rng.choice(WORDS, 9)) + "." for _ in range(120)]
        (tmp_path / "documents" / f"{i}.txt").write_text(" ".join(sentences))
    return str(tmp_path / "documents")


def own(text: str, lm: LM, **changes: Any) -> BoundOwn:
    return BoundOwn(text=load(text, lm.tokenizer), **changes)


measured = partial(tiny.measured, lengths=LENGTHS, repeats=3, chunk=97)


class Knowing:
    """A reader whose memory knows the answers to what it has read, in its last `reach` tokens, and nothing else."""

    def __init__(self, lm: LM, reach: int) -> None:
        self.lm, self.reach = lm, reach

    def read(self, *passages: torch.Tensor, head: torch.Tensor) -> "KnowingMemory":
        parts = [head[0], *(ids[0] for ids in passages)]
        return KnowingMemory(self.lm, torch.cat(parts).tolist()[-self.reach :])


class KnowingMemory:
    num_encoded = 0

    def __init__(self, lm: LM, known: list[int]) -> None:
        self.lm, self.known, self.num_seen, self.num_kept = lm, known, len(known), len(known)

    def score(self, ids: torch.Tensor, keep: slice) -> Scores:
        question, answer = ids[0, : keep.start].tolist(), ids[0, keep].tolist()
        text, asked = self.lm.tokenizer.decode(self.known), self.lm.tokenizer.decode(question)
        if "____" in asked:
            sentence = asked.partition("here? ")[2].partition("\nAnswer")[0]
            right = sentence.replace("____", self.lm.tokenizer.decode(answer).strip()) in text
        else:
            right = self.lm.tokenizer.decode(question + answer).strip() in text
        rank = torch.full((1, len(answer)), 0 if right else 1)
        return Scores(rank.float() + 0.5, rank)


def answers(asked: BoundOwn, lm: LM, reach: int, lengths: tuple[int, ...] = LENGTHS, repeats: int = 4) -> list[Any]:
    examples = asked.examples(lm, lengths, repeats, 0)
    return list(asked.run(Knowing(lm, reach), examples))  # type: ignore[arg-type]


# what is hidden where


def test_a_context_has_its_length_and_holds_all_facts(text: str, lm: LM) -> None:
    asked = own(text, lm)
    for example in asked.examples(lm, LENGTHS, 4, 0):
        given = example.payload
        facts = [fact.ids for fact in given.facts]
        assert len(facts) == 1 + 4 + 1
        for length in LENGTHS:
            tokens, begins = asked.context(lm, example, length)
            assert len(tokens) == length
            inside = np.ones(length, bool)
            for fact, begin in zip(facts, begins, strict=True):
                assert tokens[begin : begin + len(fact)].tolist() == fact.tolist()
                inside[begin : begin + len(fact)] = False
            assert tokens[inside].tolist() == given.filler[: inside.sum()].tolist()  # and the rest is the text


def test_facts_keep_their_depth_at_every_length(text: str, lm: LM) -> None:
    asked = own(text, lm)
    depths = []
    for example in asked.examples(lm, LENGTHS, 6, 0):
        for length in LENGTHS:
            _, begins = asked.context(lm, example, length)
            others = example.payload.num_facts
            given = np.array([fact.depth for fact in example.payload.facts])
            assert begins == pytest.approx(given * (length - others), abs=others + 16)
        depths += given.tolist()
    assert min(depths) < 0.1
    assert max(depths) > 0.9


def test_facts_are_the_users_own(text: str, lm: LM) -> None:
    asked = own(text, lm)
    whole = " ".join(Path(text, f"{i}.txt").read_text() for i in range(3))
    for example in asked.examples(lm, LENGTHS, 6, 0):
        said = asked._texts(lm, example)
        assert "".join(said["recall"]) in whole
        assert said["pairs"][0].split()[3] in WORDS
        assert all(option.strip() in WORDS for option in said["cloze"][1:])
        sentence = said["cloze"][0].partition("here? ")[2].partition("\nAnswer")[0]
        assert sentence.replace("____", said["cloze"][1].strip()) in whole


def test_wrong_options_stand_in_the_shortest_context_too(text: str, lm: LM) -> None:
    asked = own(text, lm)
    for example in asked.examples(lm, LENGTHS, 6, 0):
        shortest = lm.tokenizer.decode(asked.context(lm, example, LENGTHS[0])[0].tolist())
        right, *wrong = (option.strip() for option in asked._texts(lm, example)["cloze"][1:])
        assert len({right, *wrong}) == 4
        assert all(word in shortest for word in wrong)
        assert {word[0].isupper() for word in wrong} == {right[0].isupper()}


def test_the_missing_word_is_missing_also_from_identifiers(lm: LM, tmp_path: Path) -> None:
    sentence = "the parser reads in_file and utf8name before other_names of each module_path."
    (tmp_path / "code.txt").write_text(" ".join(f"{word} and others were here. {sentence}" for word in WORDS * 8))
    for example in own(str(tmp_path), lm, tests="cloze").examples(lm, (400,), 6, 0):
        query = example.payload.queries["cloze"]
        question, answer = (lm.tokenizer.decode(ids.tolist()) for ids in (query.ids, query.answers[0]))
        blanked = question.partition("here? ")[2].partition("\nAnswer")[0]
        assert "____" in blanked
        assert answer.strip() not in re.findall(r"[^\W\d_]{4,}", blanked)


def test_other_pairs_have_other_words_and_numbers(text: str, lm: LM) -> None:
    for example in own(text, lm, tests="pairs", pairs=7).examples(lm, LENGTHS, 4, 0):
        lines = [lm.tokenizer.decode(fact.ids.tolist()) for fact in example.payload.facts]
        assert len({line.split()[3] for line in lines}) == len({line.split()[5] for line in lines}) == 7


def test_a_paraphrased_question_shares_only_the_word_with_the_line_and_offers_all_numbers(text: str, lm: LM) -> None:
    questions = set()
    for example in own(text, lm, tests="pairs", questions="paraphrased").examples(lm, (400,), 16, 0):
        lines = [lm.tokenizer.decode(fact.ids.tolist()) for fact in example.payload.facts]
        query = example.payload.queries["pairs"]
        question = lm.tokenizer.decode(query.ids.tolist())
        word, number = re.findall(r"The number of (\w+) is (\d+)\.", lines[0])[0]
        assert set(re.findall(r"\w+", question)) & set(re.findall(r"\w+", lines[0])) == {word}
        assert [lm.tokenizer.decode(ids.tolist()).strip() for ids in query.answers] == [
            re.findall(r"\d+", line)[0] for line in lines
        ]
        assert lm.tokenizer.decode(query.answers[0].tolist()).strip() == number
        questions.add(question.replace(word, ""))
    assert questions == {one.format(word="") for one in PARAPHRASES}


def test_the_length_suggested_for_a_short_text_fits_it(text: str, lm: LM) -> None:
    asked = own(text, lm)
    with pytest.raises(ValueError, match="a smaller longest length") as error:
        asked.examples(lm, (LENGTHS[0], 100_000), 2, 0)
    longest = int(re.search("at most ([0-9,]+) here", str(error.value))[1].replace(",", ""))
    assert len(asked.examples(lm, (LENGTHS[0], longest), 2, 0)) == 2
    with pytest.raises(ValueError, match="a smaller longest length"):
        asked.examples(lm, (LENGTHS[0], longest + 1), 2, 0)


def test_few_examples_are_the_first_of_many(text: str, lm: LM) -> None:
    few, many = (own(text, lm).examples(lm, LENGTHS, repeats, 0) for repeats in (2, 5))
    assert [one.id for one in few] == [one.id for one in many[:2]]
    assert {one.id for one in few}.isdisjoint({one.id for one in own(text, lm).examples(lm, LENGTHS, 2, 1)})


# known memories


def test_a_memory_of_everything_is_right(text: str, lm: LM) -> None:
    for result in answers(own(text, lm), lm, reach=10**6):
        assert {test: result.scores[test] for test in TESTS} == {"recall": 1.0, "pairs": 1.0, "cloze": 1.0}
        assert result.scores["right"] == 1.0
        assert result.scores["control"] == pytest.approx((0 + 0 + 1 / 4) / 3)


def test_a_memory_of_nothing_gets_what_guessing_gets(text: str, lm: LM) -> None:
    for result in answers(own(text, lm), lm, reach=1):
        assert result.scores["right"] == result.scores["control"] == pytest.approx(1 / 12)


def test_what_is_out_of_reach_is_forgotten(text: str, lm: LM) -> None:
    remembered = set()
    for result in answers(own(text, lm), lm, reach=300, lengths=(1000,), repeats=8):
        for test in TESTS:
            distance = result.scores["distance"][test]
            if abs(distance - 250) > 50 + 60:  # a fact is shorter than 60 tokens
                assert result.scores[test] == (1.0 if distance < 250 else {"cloze": 0.25}.get(test, 0.0))
                remembered.add((test, distance < 250))
    assert len(remembered) >= 5


@pytest.mark.parametrize("questions", ["same", "paraphrased"])
def test_answers_have_the_tokens_of_words_inside_a_text(questions: str, text: str) -> None:
    lm = wrap(tiny_model(), blank_first_tokenizer(WORDS), "tiny")
    for example in own(text, lm, questions=questions).examples(lm, (1200,), 2, 0):
        for test in ("pairs", "cloze"):
            for answer in example.payload.queries[test].answers:
                inside = encoded(lm.tokenizer, f"dog {lm.tokenizer.decode(answer.tolist()).strip()}")
                assert answer.tolist() == inside[len(encoded(lm.tokenizer, "dog")) :].tolist()


# real readers


@pytest.mark.parametrize(
    ("architecture", "questions"),
    [("llama", "same"), ("llama", "paraphrased"), ("mistral", "same"), ("gpt2", "same"), ("mamba", "paraphrased")],
)
def test_numbers_equal_one_forward_over_everything(
    architecture: str, questions: str, text: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    changes = {"n_positions": 1200} if architecture == "gpt2" else {}
    lm = wrap(tiny_model(architecture, **changes), tokenizer, "tiny")
    asked = own(text, lm, questions=questions)
    lengths = LENGTHS[:1] if architecture == "mamba" else LENGTHS[:2]  # it is slow without its kernels
    examples = {example.id: example for example in asked.examples(lm, lengths, 2, 0)}

    def naive(before: list[int], question: np.ndarray, answer: np.ndarray) -> tuple[float, torch.Tensor]:
        nats, hits = nats_after(lm.model, [*lm.separator.ids, *before, *question], answer)
        return float(nats.sum()), hits

    for row in measured(tmp_path / "run", lm, asked, lengths=lengths, repeats=2):
        example = examples[row.example]
        context = asked.context(lm, example, row.length)[0].tolist()
        for test in TESTS:
            question, options = example.payload.queries[test].ids, example.payload.queries[test].answers
            within = [naive(context, question, option) for option in options]
            without = [naive([], question, option) for option in options]
            assert row.scores["nats"][test] == pytest.approx([nats for nats, _ in within], abs=1e-3)
            assert row.scores["control_nats"][test] == pytest.approx([nats for nats, _ in without], abs=1e-3)
            raised = np.array([nats for nats, _ in without]) - [nats for nats, _ in within]
            hits, best = within[0][1].double(), raised > raised.max() - 1e-3
            chosen = best[0] / best.sum()
            pairs = hits.prod() if questions == "same" else chosen
            expected = {"recall": hits.mean(), "pairs": pairs, "cloze": chosen}
            assert row.scores[test] == pytest.approx(float(expected[test]))


@pytest.mark.parametrize("how", ["sinks:window=96,sinks=4", "replug:piece=100,tail=50", "rope:type=yarn,factor=2"])
def test_other_methods_answer_as_well(how: str, text: str, lm: LM, tmp_path: Path) -> None:
    rows = measured(tmp_path / "run", lm, own(text, lm), how, lengths=LENGTHS[:1], repeats=2)
    assert {row.status for row in rows} == {"ok"}
    assert all(0 <= row.scores["right"] <= 1 for row in rows)


@pytest.mark.parametrize("tests", ["all", "recall", "cloze"])
def test_the_tokens_of_a_plan_are_those_that_are_fed(
    tests: str, text: str, lm: LM, planned_and_fed: PlannedAndFed
) -> None:
    planned, fed = planned_and_fed(own(text, lm, tests=tests), lm, lengths=LENGTHS[:2], repeats=3, batch=3)
    assert planned == fed


def test_what_does_not_fit_is_a_row_that_says_so(text: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    lm = wrap(tiny_model("gpt2", n_positions=700), tokenizer, "short")
    rows = measured(tmp_path / "run", lm, own(text, lm), lengths=(400, 690))
    assert {(row.length, row.status) for row in rows} == {(400, "ok"), (690, "too_long")}


def test_numbers_that_are_not_finite_are_rows_that_say_so(text: str, lm: LM, tmp_path: Path) -> None:
    lm.model.model.norm.weight.data[0] = torch.nan
    rows = measured(tmp_path / "run", lm, own(text, lm))
    assert {row.status for row in rows} == {"nan"}
    assert rows[0].reason == "no finite log-probabilities: recall, pairs, cloze"


# bad input


def test_lengths_without_room_for_the_facts_are_refused(text: str, lm: LM) -> None:
    with pytest.raises(ValueError, match=f"40 tokens is too short: recall hides {CUE + TARGET}"):
        own(text, lm).examples(lm, (40,), 1, 0)
    with pytest.raises(ValueError, match="200 tokens is too short: its facts have"):
        own(text, lm).examples(lm, (200,), 1, 0)


def test_windows_without_words_are_passed_over(lm: LM, tmp_path: Path) -> None:
    words = " ".join(f"{a}{b}" for a in ("quick", "brown", "lazy", "jumps") for b in ("fox", "dog", "over"))
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text("1 2 3 4 5 6 7 8 9 " * 500 if i % 2 else f"The {words} of {words}. " * 100)
    asked = own(str(tmp_path), lm)
    examples = asked.examples(lm, (512, 700), 3, 0)
    assert [example.repeat for example in examples] == [0, 1, 2]
    texts = [lm.tokenizer.decode(example.payload.filler.tolist()) for example in examples]
    assert all("quick" in text for text in texts)
    assert len({example.id for example in examples}) == 3
    assert [example.id for example in asked.examples(lm, (512, 700), 2, 0)] == [example.id for example in examples[:2]]


def test_the_vowels_of_devanagari_are_parts_of_its_words(lm: LM, tmp_path: Path) -> None:
    """They are marks, which `\\w` does not match: without them hardly any word has four letters."""
    words = ["पुस्तक", "विद्यालय", "किताबें", "लड़कियाँ", "बाज़ार", "हिन्दुस्तान", "कहानियाँ", "पहाड़ियों"]
    rng = np.random.default_rng(0)
    (tmp_path / "a.txt").write_text(". ".join(" ".join(rng.choice(words, 8)) for _ in range(200)))
    for example in own(str(tmp_path), lm).examples(lm, (2000,), 2, 0):
        answer, *others = [
            lm.tokenizer.decode(one.tolist()).strip() for one in example.payload.queries["cloze"].answers
        ]
        assert answer in words
        assert set(others) < set(words)
        assert f"The number of {lm.tokenizer.decode(example.payload.queries['pairs'].ids.tolist()).split()[3]} is" in (
            lm.tokenizer.decode(np.concatenate([fact.ids for fact in example.payload.facts]).tolist())
        )


def test_windows_never_overlap_where_some_have_no_words(lm: LM) -> None:
    """Three documents hold a window each, one without words; as one text they hold four, which overlap with these."""
    words, digits = "The quick brown foxes jump over lazy dogs there again. " * 200, "1 2 3 4 5 6 7 8 9 " * 200
    tokens = [encoded(lm.tokenizer, document)[:1200] for document in (words, digits, words)]
    asked = BoundOwn(text=Corpus("made", "hash", np.concatenate(tokens), np.arange(4) * 1200))
    for seed in range(5):
        assert len(asked.examples(lm, (400,), 2, seed)) == 2
        with pytest.raises(ValueError, match="has a stretch with"):
            asked.examples(lm, (400,), 3, seed)


def test_a_text_without_words_can_only_be_recalled(lm: LM, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 2 3 4 5 6 7 8 9 " * 500)
    with pytest.raises(ValueError, match="0 different words of four letters or more"):
        own(str(tmp_path), lm).examples(lm, (400,), 1, 0)
    assert own(str(tmp_path), lm, tests="recall").examples(lm, (400,), 1, 0)


# the command


def test_the_command_asks_about_a_folder(text: str, lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for saved in (lm.model, lm.tokenizer):
        saved.save_pretrained(tmp_path / "models" / "tiny")
    common = ("task", "own", "models/tiny", "--text", text, "--lengths", "400,600", "--repeats", 3, "--device", "cpu")
    summary = last_line(farspan(*common, "--json"))
    assert [(one["length"], one["num_examples"]) for one in summary["results"]] == [(400, 3), (600, 3)]
    assert set(summary["results"][0]["details"]) == {"control", *TESTS}
    assert summary["task"] == "own:tests=all,pairs=4"
    assert "give a text of at least 300,000 tokens" in refused(farspan(*common, "--repeats", 300))


def test_the_first_example_is_kept_whole(text: str, lm: LM, tmp_path: Path) -> None:
    rows = measure([lm], ["full"], ["own"], text=text, lengths=(400,), repeats=2, out=tmp_path / "run").rows
    (shown,) = read_examples(tmp_path / "run")
    first = next(row for row in rows if row.repeat == 0).scores
    separator, read, asked = ("".join(tokens) for _, tokens in shown["parts"])
    assert separator == "<s>"
    assert first["answers"]["pairs"][0] + first["answers"]["pairs"][1] in read
    assert asked == "".join(first["answers"]["cloze"][:2])
    assert "".join(shown["parts"][2][1][-shown["scored"] :]) == first["answers"]["cloze"][1]


def test_real_books_give_questions_that_a_reader_could_answer(shared_data: Path) -> None:
    from farspan.lm import load as load_lm

    lm = load_lm(shared_data / "models" / "stories260K", dtype="float32", device="cpu")
    asked = own(str(shared_data / "books" / "great_gatsby.txt"), lm)
    results = answers(asked, lm, reach=10**6, lengths=(512, 1024), repeats=10)
    assert all(result.scores["pairs"] == result.scores["recall"] == 1.0 for result in results)
    assert np.mean([result.scores["cloze"] for result in results]) > 0.9
