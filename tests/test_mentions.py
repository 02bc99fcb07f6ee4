"""Mentions: what is found in texts made by hand, scores against plain forwards, and memories whose gain is known."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from shared import SHARED_DATA
from test_cli import done, farspan, last_line, refused
from transformers import PreTrainedTokenizerFast

from farspan.lm import LM, wrap
from farspan.methods import method
from farspan.reader import Scores
from farspan.record import read_rows
from farspan.tasks import mentions
from farspan.tasks.mentions import BoundMentions, MentionText, Word, kind_of, words_of
from farspan.text.corpora import load
from farspan.text.prompts import token_texts

import tiny
from naive import nats_after
from tiny import PlannedAndFed, saved, tiny_model, write_lines

LENGTHS = (400, 700)
SMALL = {"distance": 150, "target_tokens": 120}
NAMES = ["Ada", "Grace", "Alan", "Kurt", "Emmy", "Sonja", "Paul", "Edith", "Rosa", "Felix"]


def novel(count: int, seed: int = 0) -> str:
    """Small words, among which a random name, identifier or number comes now and then."""
    rng = np.random.default_rng(seed)
    small = ["the", "dog", "and", "lazy", "brown", "over", "quick", "of"]
    rare = [*NAMES, *(f"x_{word}" for word in ("one", "two", "ten")), *map(str, range(1811, 1820))]
    return " ".join(str(rng.choice(rare if i % 6 == 5 else small)) for i in range(count))


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "novels").mkdir()
    for i in range(4):
        (tmp_path / "novels" / f"{i}.txt").write_text(novel(700, i))
    return str(tmp_path / "novels")


def bound(lm: LM, text: str, **changes: Any) -> BoundMentions:
    return BoundMentions(**(SMALL | changes), text=load(text, lm.tokenizer))


measured = partial(tiny.measured, lengths=LENGTHS, repeats=3, batch=2)


# what is found


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("1984", "number"), ("x86", "number"), ("7", ""), ("get_name", "identifier"), ("getName", "identifier"),
        ("_private", ""), ("__all__", ""), ("Ada", "name"), ("NATO", "name"), ("Al", ""), ("whale", ""),
    ],
)  # fmt: skip
def test_words_are_told_apart_by_their_spelling(word: str, kind: str) -> None:
    assert kind_of(word) == kind


def test_the_texts_of_tokens_are_the_text_although_decoding_removes_spaces() -> None:
    """T5's and BERT's tokenizers, among others, decode "did n't say ." to "didn't say."."""
    pieces = [("<unk>", 0.0), *((piece, -1.0) for piece in ("▁did", "▁n", "'", "t", "▁say", "▁", "."))]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer, backend.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    cleaning = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    ids = cleaning("did n't say .", add_special_tokens=False)["input_ids"]
    assert token_texts(cleaning, ids) == ["did", " n", "'", "t", " say", " ", "."]


def test_neighbouring_characters_of_several_byte_tokens_are_each_read_once() -> None:
    """A decoder with byte fallback, as of Llama 2, decodes all bytes in a row as replacement characters unless all of
    them are whole characters."""
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256)), ("▁", -1.0), ("a", -1.0)]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    parts = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    backend.decoder = tokenizers.decoders.Sequence([*parts, tokenizers.decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    ids = tokenizer("a Жан 😀a", add_special_tokens=False)["input_ids"]
    assert "".join(token_texts(tokenizer, ids)) == "a Жан 😀a"
    assert token_texts(tokenizer, ids)[2:8] == [" ", "", "Ж", "", "а", ""]
    assert token_texts(tokenizer, ids[3:-2])[-4:] == [" ", "", "", ""]  # the last character is cut


def found(lm: LM, text: str) -> list[str]:
    ids = lm.tokenizer(text, add_special_tokens=False)["input_ids"]
    return [word.text for word in words_of(lm, np.array(ids))]


def test_a_name_is_inside_a_sentence_somewhere_and_its_letters_are_nowhere_else(lm: LM) -> None:
    assert found(lm, "then Ada saw Alan. Alan saw Ada, and") == ["Ada", "Alan", "Alan", "Ada"]
    assert found(lm, "so. Then Ada saw. Then Alan ran") == ["Ada", "Alan"]  # "Then" begins its sentences
    assert found(lm, "the Rose and the rose and Ada too") == ["Ada"]
    assert found(lm, "call Rose or Roseanne or Ada there") == ["Roseanne", "Ada"]
    assert found(lm, "in 1811 and x_1811, in 1812 but") == ["x_1811", "1812"]
    assert found(lm, "a Zoé or “Zoé, Zoë b") == ["Zoé", "Zoé", "Zoë"]  # two tokens of one letter
    assert found(lm, "a Zo\N{REPLACEMENT CHARACTER} b") == []  # a letter that the text lacks


def test_a_word_is_whole_if_its_tokens_have_all_its_letters(lm: LM) -> None:
    tokens = np.array(lm.tokenizer("a Zoé or Émile b", add_special_tokens=False)["input_ids"])
    assert [(word.text, word.whole) for word in words_of(lm, tokens)] == [("Zoé", True), ("Émile", False)]


def naive_mentions(lm: LM, tokens: np.ndarray, distance: int, targets: int) -> dict[str, tuple[int, int, int]]:
    """The words of `novel` that recur as the task needs it: index of the later mention, of the earlier one, and of its
    last token."""
    rare = [*NAMES, "x_one", "x_two", "x_ten", *map(str, range(1811, 1820))]
    answer = {}
    for word in rare:
        ids = lm.tokenizer(f" {word}", add_special_tokens=False)["input_ids"]
        ids = ids if lm.tokenizer.decode(ids[:1]).strip() else ids[1:]  # a blank alone
        at = [i for i in range(len(tokens)) if tokens[i : i + len(ids)].tolist() == ids]
        first = len(tokens) - targets
        inside = [i for i in at if i >= first]
        before = [i for i in at if i + len(ids) <= first]
        last = before[-1] + len(ids) - 1 if before else 0
        if inside and before and inside[0] - last >= distance and before[-1] == at[at.index(inside[0]) - 1]:
            answer[word] = inside[0], before[-1], last
    return answer


def test_mentions_are_those_that_a_search_for_every_word_finds(lm: LM, text: str) -> None:
    what = bound(lm, text)
    examples = what.examples(lm, LENGTHS, 4, 0)
    counts = []
    for example in examples:
        wanted = naive_mentions(lm, example.payload.tokens, distance=150, targets=120)
        given = {one.word: (one.first, one.earlier, one.last) for one in example.payload.mentions}
        assert given.items() <= wanted.items()
        most = max(sum(back <= t <= at - 150 for at, _, back in wanted.values()) for *_, t in wanted.values())
        assert most - 2 <= len(given) <= most  # two may have no other word of their form, or be cut by the window
        firsts, _, lasts = zip(*given.values(), strict=True)
        assert min(firsts) - max(lasts) >= 150
        for length in LENGTHS:
            inside = {word for word, (_, earlier, _) in given.items() if earlier >= 700 - length}
            assert {one.word for one in example.payload.at(length)} == inside
            counts.append(len(inside))
    assert min(counts) >= 1
    assert sum(counts) > 15


def test_the_control_lacks_the_earlier_mentions_and_nothing_else(lm: LM, text: str) -> None:
    what = bound(lm, text)
    for example in what.examples(lm, LENGTHS, 4, 0):
        payload = example.payload
        for length in LENGTHS:
            whole, without = payload.tokens[-length:], payload.without(length)
            assert whole[-120:].tolist() == without[-120:].tolist()
            changed = np.flatnonzero(whole != without)
            places = [
                place - (700 - length) + i for one in payload.at(length) for place, ids in one.replaced
                for i in range(len(ids))
            ]  # fmt: skip
            assert set(changed) <= set(places)
            shown = lm.tokenizer.decode(without[:-120].tolist()).split()[1:]  # without a word that is cut
            before = lm.tokenizer.decode(whole[:-120].tolist()).split()[1:]
            for one in payload.at(length):
                assert one.word in before
                assert one.word not in shown
            pairs = [(old, new) for old, new in zip(before, shown, strict=True) if old != new]
            assert pairs
            assert all(kind_of(old) == kind_of(new) for old, new in pairs)


def test_replacing_words_are_drawn_in_the_order_of_the_text(lm: LM, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in that of a set of strings, which differs from process to process."""
    words = [Word("Ada", "name", 10 * i, 10 * i + 1, str(i), True) for i in range(8)]
    words += [
        Word(f"N{i}{j}", "name", 100 + 10 * i + j, 101 + 10 * i + j, str(i), True)
        for i in range(8)
        for j in range(i + 1)
    ]
    monkeypatch.setattr(mentions, "words_of", lambda lm, tokens: [*words, Word("Ada", "name", 700, 701, " ", True)])
    among: list[int] = []
    rng = SimpleNamespace(integers=lambda most: among.append(most) or 0)
    found = bound(lm, text)._marked(lm, np.arange(800), rng)
    assert [one.word for one in found.mentions] == ["Ada"]
    assert among == [1, 2, 3, 4, 5, 6, 7, 8]


def test_examples_do_not_depend_on_the_number_of_repeats_and_differ_by_seed(lm: LM, text: str) -> None:
    ids = [[one.id for one in bound(lm, text).examples(lm, LENGTHS, *how)] for how in ((2, 0), (4, 0), (2, 1))]
    assert ids[0] == ids[1][:2]
    assert not set(ids[1]) & set(ids[2])


def test_equal_windows_are_examples_of_their_own(lm: LM, tmp_path: Path) -> None:
    small = "the lazy dog and the quick brown dog " * 30
    document = f"so 1811 or 1812 and {small} then 1811 and the quick brown dog over the lazy dog"
    length = len(lm.tokenizer(document, add_special_tokens=False)["input_ids"])
    place = write_lines(tmp_path / "copies.jsonl", [{"text": document}] * 4)
    rows = measured(tmp_path / "run", lm, bound(lm, place), lengths=(length,))
    assert sorted(row.repeat for row in rows) == [0, 1, 2]
    assert [row.scores["words"] for row in rows] == [["1811"]] * 3


# scores


def naive_nats(lm: LM, tokens: np.ndarray, spans: list[slice]) -> list[float]:
    nats, _ = nats_after(lm.model, lm.separator.ids, tokens.tolist())
    return [float(nats[span].sum()) for span in spans]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mamba"])
def test_gains_equal_plain_forwards_over_both_texts(
    architecture: str, tokenizer: PreTrainedTokenizerFast, text: str, tmp_path: Path
) -> None:
    lm = wrap(tiny_model(architecture, **({"n_positions": 1024} if architecture == "gpt2" else {})), tokenizer, "tiny")
    what = bound(lm, text)
    rows = measured(tmp_path / "run", lm, what, chunk=97, repeats=2)
    examples = {example.id: example.payload for example in what.examples(lm, LENGTHS, 2, 0)}
    assert len(rows) == 4
    for row in rows:
        payload: MentionText = examples[row.example]
        sides = []
        for tokens in (payload.tokens[-row.length :], payload.without(row.length)):
            spans = [slice(one.first - 700 + row.length, one.end - 700 + row.length) for one in payload.at(row.length)]
            sides.append(naive_nats(lm, tokens, spans))
        assert row.status == "ok"
        assert row.scores["nats"] == pytest.approx(np.mean(sides[0]), abs=1e-4)
        assert row.scores["control"] == pytest.approx(np.mean(sides[1]), abs=1e-4)
        assert row.scores["gains"] == pytest.approx(np.subtract(sides[1], sides[0]), abs=1e-4)
        assert row.scores["gain"] == pytest.approx(np.mean(row.scores["gains"]))
        assert row.scores["mentions"] == len(row.scores["words"]) == len(sides[0])
        assert row.scores["distance"] >= 150
    assert max(abs(row.scores["gain"]) for row in rows) > 1e-3  # otherwise equality would say nothing


def test_a_model_that_does_not_see_the_earlier_mentions_gains_exactly_nothing(
    tokenizer: PreTrainedTokenizerFast, text: str, tmp_path: Path
) -> None:
    lm = wrap(tiny_model("mistral"), tokenizer, "tiny")  # two layers that see 40 tokens each
    rows = measured(tmp_path / "run", lm, bound(lm, text))
    assert [row.scores["gain"] for row in rows] == [0.0] * 6


def test_no_token_within_the_distance_of_a_mention_is_replaced(lm: LM, text: str) -> None:
    """At these seeds an earlier mention of several tokens begins 150 tokens before the later one. Its last tokens are
    nearer, and once gave a gain to a model that sees the last 149."""
    near = wrap(tiny_model("mistral", sliding_window=149, num_hidden_layers=1), lm.tokenizer, "tiny")
    for seed in (17, 32):
        examples = bound(lm, text).examples(lm, LENGTHS, 2, seed)
        with method("full").on(near) as reader:
            assert [one.scores["gain"] for one in bound(lm, text).run(reader, examples)] == [0.0] * 4


class Knowing:
    """Reads a text and remembers its last `reach` tokens: a token after two that it has read there costs nothing if it
    followed them, every other token costs 3 nats."""

    chunk, capacity, incremental = 1024, 0, False

    def __init__(self, lm: LM, reach: int) -> None:
        self.lm, self.reach = lm, reach

    def read(self, *passages: torch.Tensor, head: torch.Tensor) -> SimpleNamespace:
        text = torch.cat([head, *passages], 1)

        def score(ids: torch.Tensor) -> Scores:
            nats = torch.full(ids.shape, 3.0)
            for row, (old, new) in enumerate(zip(text.tolist(), ids.tolist(), strict=True)):
                whole = old + new
                for i in range(len(new)):
                    at = len(old) + i
                    known = whole[max(0, at - self.reach) : at]
                    seen = {tuple(known[k : k + 4]) for k in range(len(known) - 3)}
                    nats[row, i] = 0.0 if tuple(whole[at - 3 : at + 1]) in seen else 3.0
            return Scores(nats, torch.zeros_like(ids))

        return SimpleNamespace(num_seen=text.shape[1], num_kept=0, score=score)


def gains(lm: LM, text: str, reach: int) -> list[float]:
    what = bound(lm, text)
    batch = what.examples(lm, LENGTHS, 4, 0)
    return [one.scores["gain"] for one in what.run(Knowing(lm, reach), batch)]  # type: ignore[arg-type]


def test_a_memory_of_the_whole_text_gains_and_one_that_is_shorter_than_the_distance_gains_nothing(
    lm: LM, text: str
) -> None:
    assert min(gains(lm, text, 10_000)) > 0
    assert gains(lm, text, 20) == [0.0] * 8


def test_a_plan_counts_the_tokens_that_are_fed(lm: LM, text: str, planned_and_fed: PlannedAndFed) -> None:
    tokens = planned_and_fed(bound(lm, text), lm, lengths=LENGTHS, repeats=3, batch=2)
    assert tokens == (3 * 2 * sum(LENGTHS),) * 2


def test_numbers_that_are_not_finite_are_rows_that_say_so(lm: LM, text: str, tmp_path: Path) -> None:
    lm.model.lm_head.weight.data[5] = torch.nan
    rows = measured(tmp_path / "run", lm, bound(lm, text))
    assert {row.status for row in rows} == {"nan"}
    assert all("scored tokens have no finite log-probability" in row.reason for row in rows)


# settings and the command


def test_lengths_that_do_not_hold_the_distance_and_texts_without_mentions_are_refused(
    lm: LM, text: str, tmp_path: Path
) -> None:
    with pytest.raises(
        ValueError, match=r"distance=150 and target_tokens=120 do not fit into 270 tokens: give lengths"
    ):
        bound(lm, text).examples(lm, (270, 300), 1, 0)
    plain = tmp_path / "plain.txt"
    plain.write_text(" ".join("the lazy dog and a fox" for _ in range(300)))
    with pytest.raises(ValueError, match=r"0 of its \d+ windows of 400 tokens have a name, identifier or number that"):
        bound(lm, str(plain)).examples(lm, (400,), 2, 0)


@pytest.mark.usefixtures("drawn")
def test_the_command_shows_the_gain_with_its_interval(
    text: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved("model", tokenizer)
    given = ("model", "--text", text, "--lengths", "400,500", "--repeats", 3, "--out", "run")
    result = done(farspan("task", "mentions:distance=150,target_tokens=120", *given, "--json"))
    first = last_line(result)["results"][0]
    rows = [row for row in read_rows("run") if row.length == 400]
    assert first["value"] == pytest.approx(np.mean([row.scores["gain"] for row in rows]), abs=1e-5)
    assert first["low"] < first["value"] < first["high"]
    assert set(first["details"]) == {"nats", "control", "mentions"}
    assert "do not fit into 400 tokens" in refused(farspan("task", "mentions", *given))


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="no real data here")
def test_books_have_mentions_of_people_and_places(lm: LM, tmp_path: Path) -> None:
    book = min((SHARED_DATA / "books").glob("*.txt"))
    (tmp_path / "book.txt").write_text(book.read_text("utf-8")[:300_000], "utf-8")
    what = BoundMentions(distance=300, target_tokens=300, text=load(str(tmp_path / "book.txt"), lm.tokenizer))
    words = {one.word for each in what.examples(lm, (3000,), 2, 0) for one in each.payload.mentions}
    assert words
    assert all(kind_of(word) for word in words)
