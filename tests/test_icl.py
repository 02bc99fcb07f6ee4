"""In-context learning: against plain forwards over whole prompts, made rows of all eleven sets, and three real ones."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import farspan
from farspan import hf
from farspan.lm import LM, load, wrap
from farspan.measuring.plan import plan
from farspan.methods import method
from farspan.reader import BaseMemory
from farspan.tasks import task
from farspan.tasks.icl import SCORINGS, BoundIcl, predictions
from farspan.tasks.icl_sets import SETS, TREC_FINE, Labelled, load_own, load_set
from farspan.text import hub, tables

import tiny
from cepe_models import tiny_cepe
from naive import nats_after
from tiny import PlannedAndFed, tiny_model, write_lines

LENGTHS = (1, 2, 5)
METHODS = [
    "full",
    "sinks:window=64,sinks=4",
    "lambda_mask:window=64,sinks=4",
    "topk:k=32",
    "rope:type=yarn,factor=4",
    "replug",
    "replug:weights=bm25",
    "rope:type=yarn,factor=4+replug",
]
ARCHITECTURES = [
    "llama", "mistral", "qwen3", "gpt_neox", "gpt2", "opt", "gemma2", "gemma3", "llama4", "bloom", "gptj", "falcon",
    "smollm3", "mamba2", "rwkv", "falcon_h1", "granite_hybrid", "mamba",
]  # fmt: skip


def made(scoring: str = "plain", head: int = 2, options: tuple[str, ...] = ("red fox", "dog", "the lazy dog")) -> Any:
    """Three classes of three demonstrations, nine questions."""
    shown = tuple(Labelled(f"a fox number {i} of kind {i % 3}", i % 3) for i in range(9))
    asked = tuple(Labelled(f"which dog is {i}", i % 3) for i in range(9))
    return BoundIcl("made", "Query: {}\nKind:", options, shown, asked, scoring, head)


def parts(what: BoundIcl, example: Any, length: int) -> Any:
    return example.payload.parts(what.head, length)


measured = partial(tiny.measured, lengths=LENGTHS, repeats=4)


def text_of(tokenizer: Any, ids: np.ndarray) -> str:
    return tokenizer.decode(ids.tolist())


def naive_nats(lm: LM, before: Sequence[int], option: list[int]) -> float:
    return float(nats_after(lm.model, before, option)[0].sum())


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mistral", "mamba2"])
def test_every_option_is_expected_as_in_a_plain_forward_of_the_whole_prompt(
    architecture: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    lm = wrap(tiny_model(architecture), tokenizer, "tiny")
    what = made()
    rows = measured(tmp_path, lm, what)
    examples = {example.id: example for example in what.examples(lm, LENGTHS, 4, 0)}
    options = [ids.tolist() for ids in what.option_ids(lm)]
    assert len(rows) == 12
    for row in rows:
        front, passages, query = parts(what, examples[row.example], row.length)
        prompt = [*lm.separator.ids, *np.concatenate([front, *passages, query]).tolist()]
        assert row.num_seen == row.scores["context"] == len(prompt)
        for index, option in enumerate(options):
            assert row.scores["nats"][index] == pytest.approx(naive_nats(lm, prompt, option), abs=3e-5)
            assert row.scores["prior"][index] == pytest.approx(naive_nats(lm, lm.separator.ids, option), abs=3e-5)


def test_the_prompt_is_the_papers_two_demonstrations_in_front(lm: LM) -> None:
    what = made()
    [example] = what.examples(lm, (4,), 1, 0)
    front, passages, query = parts(what, example, 4)
    shown = [text_of(lm.tokenizer, ids) for ids in passages]
    assert text_of(lm.tokenizer, front).count("Query: ") == 2
    assert len(shown) == 2
    for one in shown:
        assert one.startswith("\n\nQuery: a fox number ")
        assert any(one.endswith(f"\nKind: {option}") for option in what.options)
    assert text_of(lm.tokenizer, query).startswith("\n\nQuery: which dog is ")
    assert text_of(lm.tokenizer, query).endswith("\nKind:")
    assert [text_of(lm.tokenizer, ids) for ids in what.option_ids(lm)] == [" red fox", " dog", " the lazy dog"]


def test_pieces_are_the_tokens_of_the_joined_prompt(shared_data: Path) -> None:
    for name in ("tokenizers/gpt2", "tokenizers/mistral-7b-v0.1", "models/stories260K"):
        known = AutoTokenizer.from_pretrained(shared_data / name)
        lm = SimpleNamespace(tokenizer=known, separator=SimpleNamespace(ids=()), name=name)
        what = made()
        [example] = what.examples(lm, (5,), 1, 0)
        front, passages, query = parts(what, example, 5)
        whole = np.concatenate([front, *passages, query, what.option_ids(lm)[0]])
        assert known(text_of(known, whole), add_special_tokens=False)["input_ids"] == whole.tolist(), name


def test_no_demonstrations_ask_the_question_alone(lm: LM, tmp_path: Path) -> None:
    what = made()
    [row] = measured(tmp_path, lm, what, lengths=(0,), repeats=1)
    [example] = what.examples(lm, (0,), 1, 0)
    assert text_of(lm.tokenizer, parts(what, example, 0)[2]).startswith("Query: which")
    assert row.num_seen == 1 + len(parts(what, example, 0)[2])


@pytest.mark.parametrize("head", [0, 1, 2, 3, 9])
def test_all_demonstrations_are_shown_once_wherever_they_stand(head: int, lm: LM) -> None:
    what = made(head=head)
    [example] = what.examples(lm, (7,), 1, 0)
    for length in (0, 1, 2, 3, 7):
        front, passages, _ = parts(what, example, length)
        assert len(passages) == max(0, length - head)
        assert sum(text_of(lm.tokenizer, ids).count("Query") for ids in (front, *passages)) == length


def test_demonstrations_are_balanced_at_every_number(lm: LM) -> None:
    what = made()
    for example in what.examples(lm, (9,), 9, 0):
        kinds = [text[-1] for text in text_of(lm.tokenizer, np.concatenate(example.payload.shown)).split("\nKind")[:-1]]
        assert len(kinds) == 9
        for count in range(1, 10):
            numbers = Counter(kinds[:count])
            assert max(numbers.values()) - min(numbers.get(kind, 0) for kind in "012") <= 1


def test_every_model_is_shown_the_same_whatever_else_is_asked(lm: LM, shared_data: Path) -> None:
    what = made()
    other = SimpleNamespace(
        tokenizer=AutoTokenizer.from_pretrained(shared_data / "tokenizers" / "gpt2"),
        name="other",
        separator=lm.separator,
    )

    def shown(of: Any, repeats: int, longest: int) -> list[str]:
        examples = what.examples(of, (2, longest), repeats, 3)
        return [text_of(of.tokenizer, np.concatenate(e.payload.shown[:2])) for e in examples[:2]]

    assert shown(lm, 2, 4) == shown(other, 5, 9)
    assert shown(lm, 2, 4) != [
        text_of(lm.tokenizer, np.concatenate(e.payload.shown)) for e in what.examples(lm, (2,), 2, 4)
    ]


def test_a_question_is_never_its_own_demonstration(lm: LM) -> None:
    same = tuple(Labelled(f"text {i}", i % 2) for i in range(6))
    what = BoundIcl("made", "{}\n:", ("dog", "fox"), same, same)
    for example in what.examples(lm, (5,), 6, 0):
        asked = text_of(lm.tokenizer, example.payload.alone).partition("\n")[0]
        assert asked not in text_of(lm.tokenizer, np.concatenate(example.payload.shown))


def test_the_generated_set_shows_the_pair_of_the_question_once_among_the_first(lm: LM) -> None:
    what, places = task("icl:set=copy").on(lm, ""), set()
    assert Counter(Counter(one.label for one in what.demonstrations).values()) == {128: 8}
    for example in what.examples(lm, (6, 30), 40, 0):
        shown = [text_of(lm.tokenizer, ids).strip() for ids in example.payload.shown]
        question = text_of(lm.tokenizer, example.payload.query).strip()
        assert [one.startswith(question + " ") for one in shown].count(True) == 1
        (place,) = (i for i, one in enumerate(shown) if one.startswith(question + " "))
        assert shown[place] == f"{question} {what.options[example.payload.gold]}"
        places.add(place)
    assert places == set(range(6))
    with pytest.raises(ValueError, match="copy asks for one of the demonstrations: got 0 of them"):
        what.examples(lm, (0, 6), 2, 0)


def test_the_four_scorings_are_what_they_say() -> None:
    # option 0 is likeliest, 1 per token, 2 beyond its prior, 3 that per token
    nats, prior, tokens = [4.0, 5.0, 9.0, 6.0], [2.0, 2.0, 20.0, 16.0], [1, 4, 3, 2]
    naive = {
        "plain": min(range(4), key=lambda i: nats[i]),
        "normalized": min(range(4), key=lambda i: nats[i] / tokens[i]),
        "calibrated": min(range(4), key=lambda i: nats[i] - prior[i]),
        "both": min(range(4), key=lambda i: (nats[i] - prior[i]) / tokens[i]),
    }
    assert predictions(nats, prior, tokens) == naive == {"plain": 0, "normalized": 1, "calibrated": 2, "both": 3}


@pytest.mark.parametrize("scoring", SCORINGS)
def test_a_row_holds_all_that_its_scores_are_made_of(scoring: str, lm: LM, tmp_path: Path) -> None:
    rows = measured(tmp_path, lm, made(scoring))
    for row in rows:
        scores = row.scores
        again = predictions(scores["nats"], scores["prior"], scores["tokens"])
        assert scores["predicted"] == again[scoring]
        assert scores["accuracy"] == float(again[scoring] == scores["gold"]) == scores[f"accuracy_{scoring}"]
        assert {name: scores[f"accuracy_{name}"] for name in SCORINGS} == {
            name: float(index == scores["gold"]) for name, index in again.items()
        }
    assert len(json.dumps(rows[0].scores)) < 1000


@pytest.mark.parametrize("how", METHODS)
def test_it_runs_under_every_method_and_resumes(how: str, lm: LM, tmp_path: Path) -> None:
    some: dict[str, Any] = {"lengths": (1, 5), "repeats": 2}
    rows = measured(tmp_path, lm, made(), how, **some)
    assert [row.status for row in rows] == ["ok"] * 4
    before = (tmp_path / "rows.jsonl").read_bytes()
    assert measured(tmp_path, lm, made(), how, **some) == rows
    assert (tmp_path / "rows.jsonl").read_bytes() == before


def test_replug_reads_a_pass_for_each_demonstration_behind_the_first_two(lm: LM, tmp_path: Path) -> None:
    what = made()
    [row] = measured(tmp_path, lm, what, "replug", lengths=(5,), repeats=1)
    front, passages, query = parts(what, what.examples(lm, (5,), 1, 0)[0], 5)
    assert row.num_kept == 3 * (1 + len(front) + len(query)) + sum(map(len, passages))
    assert row.scores["context"] == 1 + len(front) + len(query) + sum(map(len, passages))


@pytest.mark.parametrize("head", [1, 2, 5])
def test_an_encoder_reads_the_demonstrations_behind_the_first_two_and_a_row_says_so(
    head: int, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    lm = wrap(tiny_cepe(), tokenizer, "tiny-cepe")
    what = made(head=head)
    rows = measured(tmp_path, lm, what, "cepe:chunk=16,decoder_window=400")
    examples = {example.id: example for example in what.examples(lm, LENGTHS, 4, 0)}
    for row in rows:
        front, passages, query = parts(what, examples[row.example], row.length)
        encoded = passages if len(passages) > 1 else []  # one passage is a document
        assert row.scores["demonstrations"] == {"head": min(head, row.length), "passages": len(passages)}
        assert row.scores["in_encoder"] == sum(map(len, encoded))
        assert row.scores["in_decoder"] == row.num_seen - sum(map(len, encoded))
        assert row.num_seen == 1 + len(front) + sum(map(len, passages)) + len(query)
    assert any(row.scores["in_encoder"] for row in rows) == (head < 4)


@pytest.mark.parametrize(
    ("architecture", "batch"), [*((name, 2) for name in ARCHITECTURES), ("llama", 1), ("gpt2", 1), ("mamba2", 1)]
)
def test_many_continuations_in_one_forward_score_as_each_by_itself(
    architecture: str, batch: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    lm = wrap(tiny_model(architecture), tokenizer, "tiny")
    rng = torch.Generator().manual_seed(0)
    read = torch.randint(1, 300, (batch, 60), generator=rng)
    asked = torch.randint(1, 300, (5 * batch, 7), generator=rng)
    asked[-1, 4:] = -1  # padding
    with method("full").on(lm) as reader:
        memory = reader.read(read)
        assert isinstance(memory, BaseMemory)
        for keep in (slice(None), slice(2, 6), slice(0, 1), slice(3, 3)):
            each = [memory.score(asked[first : first + batch], keep) for first in range(0, 5 * batch, batch)]
            for reader.chunk in (1024, 13):  # type: ignore[misc]
                together = memory.score(asked, keep)
                torch.testing.assert_close(
                    together.nats, torch.cat([one.nats for one in each]), atol=1e-5, rtol=1e-5, equal_nan=True
                )
                assert torch.equal(together.rank, torch.cat([one.rank for one in each]))
        assert memory.num_seen == 60


def test_options_are_scored_in_one_forward_for_each_of_their_lengths(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    what = made(options=("red fox", "dog", "the lazy dog", "big fox", "old fox"))
    fed: list[tuple[int, ...]] = []
    step, branch = hf.Stream.step, hf.Stream.branch
    with method("full").on(lm) as reader:
        [example] = what.examples(lm, (2,), 1, 0)
        list(what.run(reader, [example]))  # what is found out once
        monkeypatch.setattr(hf.Stream, "step", lambda self, ids: (fed.append(tuple(ids.shape)), step(self, ids))[1])
        monkeypatch.setattr(hf.Stream, "branch", lambda self, ids: (fed.append(tuple(ids.shape)), branch(self, ids))[1])
        list(what.run(reader, [example]))
    front, _, query = parts(what, example, 2)
    lengths = Counter(len(ids) - 1 for ids in what.option_ids(lm))
    asked = [shape for fed, n in lengths.items() if fed for shape in ([(n, 1, fed)] if n > 2 else n * [(1, fed)])]
    assert max(lengths.values()) > 2
    assert sorted(fed) == sorted([(1, 1), (1, 1 + len(front)), (1, len(query)), *asked, *asked])


def test_the_plan_counts_what_is_fed(lm: LM) -> None:
    what = made()
    cost = plan(what, method("full"), lm, lengths=(2,), repeats=1, calibrate=False)
    [example] = what.examples(lm, (2,), 1, 0)
    front, _, query = parts(what, example, 2)
    options = sum(len(ids) - 1 for ids in what.option_ids(lm))
    assert cost.tokens == 2 * options + 2 + len(front) + len(query)


@pytest.mark.parametrize(
    ("batch", "how"), [(1, "full"), (2, "full"), (5, "full"), (2, "replug"), (2, "replug:piece=4,tail=2")]
)
def test_the_tokens_of_a_plan_are_those_that_are_fed(
    batch: int, how: str, lm: LM, planned_and_fed: PlannedAndFed
) -> None:
    planned, fed = planned_and_fed(made(), lm, how, lengths=(1, 5), repeats=5, batch=batch)
    assert planned == fed > 0


def test_what_the_positions_do_not_hold_is_a_row_that_says_so(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    lm = wrap(tiny_model("gpt2", n_positions=80), tokenizer, "tiny")
    rows = measured(tmp_path, lm, made(), lengths=(0, 9))
    assert {(row.length, row.status) for row in rows} == {(0, "ok"), (9, "too_long")}
    assert "the model has 80 positions" in rows[0].reason


def test_no_finite_numbers_are_a_row_that_says_so(lm: LM, tmp_path: Path) -> None:
    lm.model.lm_head.weight.data[:] = torch.nan
    assert {row.status for row in measured(tmp_path, lm, made())} == {"nan"}


@pytest.mark.parametrize(
    ("what", "lengths", "repeats", "problem"),
    [
        (made(options=("red", "", "blue")), (1,), 1, "option '' of made"),
        (made(), (10,), 1, "made has 9 demonstrations; 10 are needed"),
        (made(), (1,), 10, "made has 9 questions; 10 are needed"),
    ],
)
def test_what_cannot_be_asked_is_refused(what: Any, lengths: Any, repeats: int, problem: str, lm: LM) -> None:
    with pytest.raises(ValueError, match=problem):
        what.examples(lm, lengths, repeats, 0)


def test_no_option_begins_another_which_it_would_always_beat(lm: LM) -> None:
    plain, ended = (made(options=("dog", other, "lazy dog")).option_ids(lm) for other in ("fox", "dog fox"))
    assert [len(ids) for ids in ended] == [len(plain[0]) + 1, len(plain[0]) + 2, len(plain[2]) + 1]
    assert {lm.tokenizer.decode(ids[-1:]) for ids in ended} == {"\n"}
    assert not any(tuple(a) == tuple(b[: len(a)]) for a, b in permutations(ended, 2))


def test_options_that_no_token_tells_apart_are_refused(lm: LM) -> None:
    class Deaf:
        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            return {"input_ids": [1] * len(text.split("\n")[-1].split(":")[0]) + [2] * text.count(": ")}

    deaf = SimpleNamespace(tokenizer=Deaf(), name="deaf", separator=lm.separator)
    with pytest.raises(ValueError, match="'dog' and 'fox' of made are the same tokens for deaf"):
        made(options=("dog", "fox")).option_ids(deaf)

    class Mute(Deaf):
        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            return {"input_ids": [1] * text.count("Kind")}

    mute = SimpleNamespace(tokenizer=Mute(), name="mute", separator=lm.separator)
    with pytest.raises(ValueError, match="option 'dog' of made has no token under the tokenizer of mute"):
        made(options=("dog", "fox")).option_ids(mute)


def words_of(name: str) -> list[str]:
    """What the label column of a made file says, a few classes of the set."""
    own = {"nlu_scenario": ["alarm", "iot"], "nlu_intent": ["alarm_query", "iot_hue_lighton"]}
    banking = {"banking77": ["age_limit", "card_arrival"], "clinic150": ["oil_change_how", "oos"]}
    return list(SETS[name].names) or (own | banking)[name]


@pytest.mark.parametrize("name", SETS)
def test_ten_made_rows_of_each_set_are_read(name: str, tmp_path: Path, lm: LM) -> None:
    of, words = SETS[name], words_of(name)
    for split in dict.fromkeys(of.splits):
        rows = [{of.text[0]: f"{split} text {i}", of.label[0]: words[i % len(words)]} for i in range(10)]
        write_lines(tmp_path / f"{split}.jsonl", rows)
    what = task(f"icl:set={name},data={tmp_path}").on(lm, "")
    assert isinstance(what, BoundIcl)
    assert what.options == (
        of.options or tuple(word.replace("_", " ") for word in sorted(words))
        if not of.names
        else (of.options or of.names)
    )
    if of.splits[0] == of.splits[1]:
        assert (len(what.demonstrations), len(what.questions)) == (8, 2)
        assert not {one.text for one in what.demonstrations} & {one.text for one in what.questions}
    else:
        assert [one.text for one in what.questions] == [f"{of.splits[1]} text {i}" for i in range(10)]
        assert [one.label for one in what.demonstrations] == [
            list(of.names or sorted(words)).index(words[i % len(words)]) for i in range(10)
        ]
    assert what.examples(lm, (2,), 1, 0)
    assert what.scoring == of.scoring


@pytest.mark.parametrize("name", SETS)
def test_numbers_of_parquet_files_are_named_by_the_data_set_itself(name: str, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    of, words = SETS[name], words_of(name)[::-1]  # another order than ours
    for split in dict.fromkeys(of.splits):
        numbers = [i % len(words) for i in range(10)]
        table = arrow.table({of.text[0]: [f"text {i}" for i in range(10)], of.label[0]: numbers})
        about = {"info": {"features": {of.label[0]: {"names": words, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(about)})
        parquet.write_table(table, tmp_path / f"{split}-00000-of-00001.parquet")
    options, demonstrations, _ = load_set(name, str(tmp_path))
    own = dict(zip(of.names, of.options or of.names, strict=True)) or {word: word.replace("_", " ") for word in words}
    said = {one.text: options[one.label] for one in demonstrations}
    assert said == {text: own[words[int(text.split()[1]) % len(words)]] for text in said}


def test_the_verbalisers_of_trec_are_all_fifty() -> None:
    assert len(TREC_FINE) == 50
    assert len(set(TREC_FINE.values())) == 50
    assert list(TREC_FINE)[:3] == ["ABBR:abb", "ABBR:exp", "ENTY:animal"]
    assert (TREC_FINE["NUM:volsize"], TREC_FINE["HUM:ind"]) == ("numeric size", "human individual")


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"txt": "a", "label": "neg"}], r"no column 'text'; it has \['txt', 'label'\]"),
        ([{"text": "a", "sentiment": "neg"}], r"no column 'label'; it has \['text', 'sentiment'\]"),
        ([{"text": "a", "label": "neg"}, {"text": "b"}], r"row 2 has no 'label'; it has \['text'\]"),
        ([{"text": "a", "label": "bad"}], "row 1, column 'label': got class 'bad', expected 0 to 1, or neg, pos"),
        ([{"text": "a", "label": -1}], "class -1"),
        ([{"text": "a", "label": 2}], "class 2"),
        ([{"text": None, "label": 0}], "row 1: got nothing, expected text"),
        ([{"text": "  ", "label": 0}], "row 1: got '  ', expected text"),
        ([], "holds no rows"),
        (["neg"], "has no named columns: got str 'neg'"),
    ],
)
def test_rows_that_are_not_the_sets_are_refused(rows: list[Any], problem: str, tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_lines(tmp_path / f"{split}.jsonl", rows)
    with pytest.raises(ValueError, match=problem):
        load_set("mr", str(tmp_path))


@pytest.mark.parametrize(
    ("suffix", "content"), [("csv", "text,label\na,0\n"), ("jsonl", '{"text": "a", "label": 0}\n')]
)
def test_numbers_without_names_are_refused(suffix: str, content: str, tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.{suffix}").write_text(content)
    with pytest.raises(ValueError, match=r"row 1, column 'label': got '?0'?, expected the name of a class in words"):
        load_set("banking77", str(tmp_path))


def test_files_that_are_not_there_or_damaged_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is not a folder with train"):
        load_set("mr", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"has no file train that ends in .*; it holds \[\]\. Name the folder"):
        load_set("mr", str(tmp_path))
    (tmp_path / "train.jsonl").write_text('{"text": "a", "label": 0}\n{"text"')
    with pytest.raises(ValueError, match=r"train\.jsonl is a file, not a folder with train"):
        load_set("mr", str(tmp_path / "train.jsonl"))
    with pytest.raises(ValueError, match=r"train\.jsonl, line 2 is damaged: expected JSON"):
        load_set("mr", str(tmp_path))
    (tmp_path / "train.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not UTF-8"):
        load_set("mr", str(tmp_path))
    with pytest.raises(ValueError, match="neither a file"):
        tables.read_table(tmp_path / "missing.jsonl")


def test_the_hub_is_asked_for_the_right_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(*given: Any, **named: Any) -> Any:
        asked.append((given, named))
        features = {"intent": SimpleNamespace(names=["age_limit", "oos"]), "text": SimpleNamespace()}
        return SimpleNamespace(features=features, to_list=lambda: [{"text": "a", "intent": 1}])

    monkeypatch.setattr(hub, "optional_import", lambda module, extra: SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(hub, "is_offline_mode", lambda: False)
    options, shown, _ = load_set("clinic150", None)
    assert (options, options[shown[0].label]) == (("age limit", "oos"), "oos")
    assert asked == [(("clinc/clinc_oos", "plus"), {"split": split}) for split in ("train", "validation")]


OWN = [
    {"utterance": f"please {verb} {thing}", "intent": f"{verb}_{thing}", "id": str(place)}
    for place, (verb, thing) in enumerate([("play", "music"), ("stop", "music"), ("play", "film"), ("stop", "film")])
]


def write_own(folder: Path, suffix: str, rows: list[dict[str, Any]] = OWN, asked: str = "test") -> str:
    """Two splits of a data set with columns of its own, in one of the formats."""
    for split, more in (("train", ""), (asked, " now")):
        lines = [row | {"utterance": row["utterance"] + more} if "utterance" in row else row for row in rows]
        file = folder / f"{split}{suffix}"
        if suffix == ".parquet":
            pyarrow = pytest.importorskip("pyarrow")
            pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(lines), file)
        elif suffix == ".csv":
            text = [",".join(lines[0]), *(",".join(row.values()) for row in lines)]
            file.write_text("\n".join(text) + "\n")
        else:
            write_lines(file, lines)
    return str(folder)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_data_set_of_ones_own_is_read_by_the_names_of_its_columns(suffix: str, lm: LM, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    folder = write_own(tmp_path / "data", suffix, asked="test" if suffix == ".csv" else "validation")
    what = task(f"icl:data={folder},text=utterance,label=intent").on(lm, "")
    assert isinstance(what, BoundIcl)
    assert what.options == ("play film", "play music", "stop film", "stop music")
    assert (what.question.format("x"), what.scoring) == ("Utterance: x\nIntent:", "plain")
    assert [(one.text, what.options[one.label]) for one in what.questions[:2]] == [
        ("please play music now", "play music"), ("please stop music now", "stop music"),
    ]  # fmt: skip
    rows = measured(tmp_path / "run", lm, what, lengths=(0, 4), repeats=4)
    assert {row.status for row in rows} == {"ok"}
    assert rows[0].settings["set"] == folder


@pytest.mark.parametrize(
    ("rows", "columns", "problem"),
    [
        (OWN, ("text", "intent"), r"no column 'text'; it has \['utterance', 'intent', 'id'\]"),
        (OWN, ("utterance", "label"), "no column 'label'"),
        ([*OWN, {"utterance": "x", "intent": None}], ("utterance", "intent"), "row 5, column 'intent': got None"),
        ([*OWN, {"utterance": "x", "intent": 3}], ("utterance", "intent"), "row 5, column 'intent': got 3"),
        ([*OWN, {"utterance": "x", "intent": " "}], ("utterance", "intent"), "row 5, column 'intent': got ' '"),
        ([*OWN, {"utterance": "", "intent": "y"}], ("utterance", "intent"), "row 5: got '', expected text"),
        (OWN[:1], ("utterance", "intent"), "holds one class, 'play_music'; at least two are needed"),
        (
            [*OWN, {"utterance": "x", "intent": "play music"}],
            ("utterance", "intent"),
            "classes 'play music' and 'play_music' of .* are both scored as 'play music'",
        ),
    ],
)
def test_what_is_wrong_with_a_data_set_of_ones_own_is_named(
    rows: list[dict[str, Any]], columns: tuple[str, str], problem: str, tmp_path: Path
) -> None:
    folder = write_own(tmp_path, ".jsonl", rows)
    if rows[-1].get("utterance") == "":
        (tmp_path / "test.jsonl").write_text(json.dumps(OWN[0]) + "\n")
    with pytest.raises(ValueError, match=problem):
        load_own(folder, *columns)


def test_a_folder_without_questions_is_refused_with_what_is_there(tmp_path: Path) -> None:
    write_own(tmp_path, ".jsonl", asked="train")
    with pytest.raises(ValueError, match=r"no file test or validation that ends in .*it holds \['train.jsonl'\]"):
        load_own(str(tmp_path), "utterance", "intent")


@pytest.mark.parametrize(
    ("name", "folder", "options", "shown", "asked"),
    [
        ("banking77", "banking77", 77, 10003, 3080),
        ("trec_coarse", "trec", 6, 5452, 500),
        ("trec_fine", "trec", 50, 5452, 500),
        ("sst2", "sst2", 2, 6920, 872),
    ],
)
def test_real_sets_are_read_and_measured(
    name: str, folder: str, options: int, shown: int, asked: int, shared_data: Path, tmp_path: Path
) -> None:
    lm = load(shared_data / "models" / "stories260K", dtype="float32", device="cpu")
    what = task(f"icl:set={name},data={shared_data / 'icl' / folder}").on(lm, "")
    assert isinstance(what, BoundIcl)
    assert (len(what.options), len(what.demonstrations), len(what.questions)) == (options, shown, asked)
    assert len({one.label for one in what.demonstrations}) == options
    rows = measured(tmp_path, lm, what, lengths=(2, 5), repeats=1)
    assert [row.status for row in rows] == ["ok"] * 2
    assert all(len(row.scores["nats"]) == options for row in rows)


def test_real_labels_are_the_right_ones(shared_data: Path) -> None:
    options, shown, _ = load_set("trec_fine", str(shared_data / "icl" / "trec"))
    assert (shown[0].text[:24], options[shown[0].label]) == ("How did serfdom develop ", "description manner")
    options, shown, _ = load_set("sst2", str(shared_data / "icl" / "sst2"))
    assert (shown[1].text[:11], options[shown[1].label]) == ("apparently ", "negative")
    options, _, asked = load_set("banking77", str(shared_data / "icl" / "banking77"))
    assert (asked[0].text, options[asked[0].label]) == ("How do I locate my card?", "card arrival")
    names = json.loads((shared_data / "icl" / "banking77" / "categories.json").read_text())
    assert set(options) == {name.replace("_", " ") for name in names}


def test_the_first_example_is_kept_in_words(lm: LM) -> None:
    what = made()
    example = what.examples(lm, LENGTHS, 1, 0)[0]
    shown = what.shown(lm, example, 5)
    text = "".join("".join(words) for _, words in shown["parts"])
    right = what.options[example.payload.gold]
    assert text.endswith(f"\nKind: {right}")
    assert text.count("\nKind:") == 6
    asked = shown["parts"][-1][1]
    assert "".join(asked[-shown["scored"] :]) == f" {right}"


def test_a_run_is_not_continued_on_data_whose_classes_have_other_names(tmp_path: Path, lm: LM) -> None:
    (tmp_path / "data").mkdir()
    what = f"icl:data={write_own(tmp_path / 'data', '.jsonl')},text=utterance,label=intent"
    farspan.measure(lm, "full", what, lengths=[0], repeats=2, out=tmp_path / "run")
    write_own(tmp_path / "data", ".jsonl", [row | {"intent": row["intent"].replace("play", "run")} for row in OWN])
    with tiny.refused("the data .* has changed since"):
        farspan.measure(lm, "full", what, lengths=[0], repeats=2, out=tmp_path / "run")


def test_questions_that_are_equal_are_examples_of_their_own(lm: LM, tmp_path: Path) -> None:
    what = made()
    asked = (*what.questions[:3], what.questions[0], replace(what.questions[0], label=1))
    rows = measured(tmp_path, lm, replace(what, questions=asked), lengths=(0,), repeats=5)
    assert len({row.example for row in rows}) == len(rows) == 5
