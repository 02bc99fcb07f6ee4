"""Long documents are tokenised in pieces, and their tokens are those of the whole document, value for value."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from farspan.text import tokenising
from farspan.text.tokenising import tokenised

hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = (
    "the quick brown fox jumps over the lazy dog. It's 1984, and 2,048 of 'em don't\n\n\tcare:  naïve café 日本語!\r\n"
)


def trained(model: Any, trainer: Any, normalizer: Any, pre_tokenizer: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator([WORDS * 3, "aaaaaaaa aaaa ======== 0123456789 0101"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def bpe(**options: Any) -> trainers.BpeTrainer:
    options = {"vocab_size": 400, "special_tokens": ["<unk>", "<s>"], "show_progress": False} | options
    return trainers.BpeTrainer(**options)


def byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def llama3() -> PreTrainedTokenizerFast:
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), byte_level()])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(models.BPE(ignore_merges=True), bpe(initial_alphabet=alphabet), None, split)


def gpt2_with_runs_of_spaces() -> PreTrainedTokenizerFast:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = trained(models.BPE(), bpe(initial_alphabet=alphabet), None, pre_tokenizers.ByteLevel())
    tokenizer.add_tokens([AddedToken(" " * n, normalized=False) for n in range(24, 1, -1)])
    return tokenizer


def without_words() -> PreTrainedTokenizerFast:
    before = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return trained(models.BPE(unk_token="<unk>", fuse_unk=False), bpe(max_token_length=8), before, None)


def metaspace() -> PreTrainedTokenizerFast:
    return trained(models.BPE(unk_token="<unk>"), bpe(), normalizers.NFKC(), pre_tokenizers.Metaspace())


def unigram() -> PreTrainedTokenizerFast:
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False, shrinking_factor=0.75
    )
    before = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    return trained(models.Unigram(), trainer, before, pre_tokenizers.Metaspace())


def wordpiece() -> PreTrainedTokenizerFast:
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False)
    before = normalizers.BertNormalizer()
    return trained(models.WordPiece(unk_token="<unk>"), trainer, before, pre_tokenizers.BertPreTokenizer())


def end_of_word() -> PreTrainedTokenizerFast:
    model = models.BPE(unk_token="<unk>", end_of_word_suffix="</w>", fuse_unk=True)
    return trained(model, bpe(end_of_word_suffix="</w>"), normalizers.Lowercase(), pre_tokenizers.Whitespace())


MADE: list[Callable[[], PreTrainedTokenizerFast]] = [
    llama3,
    gpt2_with_runs_of_spaces,
    without_words,
    metaspace,
    unigram,
    wordpiece,
    end_of_word,
]
REAL = ["tokenizers/gpt2", "tokenizers/mistral-7b-v0.1", "models/stories260K"]


@pytest.fixture(scope="module", params=[*MADE, *REAL], ids=lambda one: one if isinstance(one, str) else one.__name__)
def any_tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    if callable(request.param):
        return request.param()
    return AutoTokenizer.from_pretrained(request.getfixturevalue("shared_data") / request.param)


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WINDOW", 600), ("OVERLAP", 200), ("MOST", 1 << 16), ("AT_ONCE", 3)):
        monkeypatch.setattr(tokenising, name, value)


def in_pieces(tokenizer: Any, *texts: str, block: int = 97) -> list[list[int]]:
    """The ids of texts that are given in blocks."""
    documents, ids = list[list[int]](), list[int]()
    for some, last in tokenised(
        ([text[i : i + block] for i in range(0, len(text), block)] for text in texts), tokenizer
    ):
        ids += some.tolist()
        if last:
            documents.append(ids)
            ids = []
    assert not ids
    return documents


def whole(tokenizer: Any, *texts: str) -> list[list[int]]:
    return tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]


CHARACTERS = st.one_of(
    st.sampled_from(list("  \n\r\t'.,-=_aeist0123456789Éß")),
    st.characters(codec="utf-8"),
    st.sampled_from(["é", "e\u0301", "ﬁ", "½", "日本", "😀", "👩‍👩‍👧", "ᄀ", "\u0345", "İ", "<s>", "▁", "</w>", "##"]),
)
PARTS = st.one_of(
    st.tuples(st.lists(CHARACTERS, max_size=40).map("".join), st.integers(1, 4)),
    st.tuples(st.sampled_from([WORDS, WORDS.replace(" ", ""), "It's "]), st.integers(1, 12)),
    st.tuples(CHARACTERS, st.integers(1, 1500)),  # runs
    st.tuples(st.text("0123456789abc ", min_size=2, max_size=7), st.integers(1, 500)),
)
TEXTS = st.lists(PARTS, min_size=1, max_size=8).map(lambda parts: "".join(text * count for text, count in parts))


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(text=TEXTS)
def test_tokens_of_pieces_are_those_of_the_whole(any_tokenizer: Any, text: str) -> None:
    assert in_pieces(any_tokenizer, text) == whole(any_tokenizer, text)


def test_tokens_of_a_book_are_those_of_the_whole(any_tokenizer: Any, shared_data: Path) -> None:
    book = (shared_data / "books" / "tinyshakespeare.txt").read_text("utf-8")[:20_000]
    for text in (book, book.replace("\n", " ")):
        assert in_pieces(any_tokenizer, text) == whole(any_tokenizer, text)


def test_long_runs_of_one_character_have_the_tokens_of_the_whole(any_tokenizer: Any) -> None:
    for character in " \na=0-":
        text = f"x{character * 3071}the end"
        assert in_pieces(any_tokenizer, text) == whole(any_tokenizer, text)


def test_long_and_short_documents_keep_their_order() -> None:
    tokenizer = llama3()
    texts = ["short", WORDS * 20, "", "a", "b" * 5000, WORDS]
    assert in_pieces(tokenizer, *texts) == whole(tokenizer, *texts)


def test_short_documents_are_given_whole_and_long_ones_never() -> None:
    tokenizer = llama3()
    sizes: list[int] = []

    class Watched:
        is_fast = True
        backend_tokenizer = tokenizer.backend_tokenizer

        def __call__(self, texts: list[str], **options: Any) -> Any:
            sizes.extend(map(len, texts))
            return tokenizer(texts, **options)

    in_pieces(Watched(), "a" * 800, WORDS * 100)
    assert sizes == [800, tokenising.OVERLAP]  # of the long one, a sample


def test_a_word_longer_than_the_longest_window_is_refused_where_only_words_can_be_cut() -> None:
    tokenizer = unigram()
    text = "ab" * 20_000
    assert in_pieces(tokenizer, text) == whole(tokenizer, text)
    with pytest.raises(ValueError, match=r"between its characters .* there is no place .*\(Unigram\).*Break very long"):
        in_pieces(tokenizer, "ab" * (tokenising.MOST + 1))


def test_a_tokenizer_of_python_takes_documents_whole_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        is_fast = False

        def __call__(self, texts: list[str], **options: Any) -> dict[str, Any]:
            return {"input_ids": [list(map(ord, text)) for text in texts]}

    monkeypatch.setattr(tokenising, "SLOW", 5000)
    assert in_pieces(Slow(), "ab" * 2500) == [list(map(ord, "ab" * 2500))]
    with pytest.raises(ValueError, match=r"Slow is written in Python .* more than 5,000 characters\. Use the fast"):
        in_pieces(Slow(), "ab" * 2501)


def test_a_tokenizer_that_changes_text_before_its_backend_gets_it_whole() -> None:
    tokenizer = llama3()

    class Upper(PreTrainedTokenizerFast):
        def __call__(self, texts: list[str], **options: Any) -> Any:  # type: ignore[override]
            return super().__call__([text.upper() for text in texts], **options)

    upper = Upper(tokenizer_object=copy.deepcopy(tokenizer.backend_tokenizer))
    assert in_pieces(upper, WORDS * 20) == whole(tokenizer, WORDS.upper() * 20)


def test_the_tokenizer_of_the_user_stays_as_it_was() -> None:
    tokenizer = llama3()
    before = tokenizer.backend_tokenizer.to_str()
    in_pieces(tokenizer, WORDS * 20)
    assert tokenizer.backend_tokenizer.to_str() == before


def test_what_is_held_of_a_long_document_does_not_grow_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    forget = tokenising._Text.forget

    def watched(text: tokenising._Text, before: int) -> None:
        held.append(len(text._held))
        forget(text, before)

    monkeypatch.setattr(tokenising._Text, "forget", watched)

    def blocks() -> Iterator[str]:
        for _ in range(200):
            yield WORDS * 3

    counts = [len(ids) for ids, _ in tokenised([blocks()], llama3())]
    assert sum(counts) == len(whole(llama3(), WORDS * 600)[0])
    assert max(held) < (tokenising.AT_ONCE + 3) * tokenising.WINDOW + tokenising.OVERLAP
    assert max(counts) < 2 * tokenising.WINDOW


def test_progress_counts_characters() -> None:
    seen: list[int] = []
    list(tokenised([["short"], [WORDS * 40], ["x"]], llama3(), seen.append))
    assert seen == sorted(seen)
    assert seen[-1] == 6 + len(WORDS) * 40
    assert np.diff(seen).max() < 4 * tokenising.WINDOW
