"""Texts: where they are read from, how they become tokens once, and which windows are cut from them."""

import copy
import gzip
import hashlib
import json
import platform
import re
import sysconfig
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub.constants
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, CTRLTokenizer, PreTrainedTokenizerFast

from farspan.files import parse_json
from farspan.stats import short_text
from farspan.text import checksums, corpora, tokenising, utf8
from farspan.text.corpora import Corpus, join, load
from farspan.text.documents import named, read_texts
from farspan.text.library import COPY, MIN_CHARACTERS, builtin_texts, copied, installed, is_held_out
from farspan.text.names import described, title_of
from farspan.train.batches import train_tokenizer

from tiny import refused as one_line
from tiny import tiny_tokenizer, write_lines


class Counting:
    """A tokenizer that counts how often it is asked."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer, self.calls = tokenizer, 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        return self.tokenizer(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


class Rows:
    """What `datasets.load_dataset` returns, as far as a text needs it."""

    def __init__(self, rows: Sequence[Mapping[str, object]]) -> None:
        self.rows, self.column_names = rows, list(rows[0])

    def __iter__(self) -> Iterator[Mapping[str, object]]:
        return iter(self.rows)


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, "utf-8")
    return path


def write_parquet(path: Path, **columns: Sequence[object]) -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path)
    return path


def counted(*sizes: int) -> Corpus:
    """Documents of these sizes whose tokens are their own places."""
    return Corpus("counted", "hash", np.arange(sum(sizes)), np.concatenate([[0], np.cumsum(sizes)]))


# where texts are read from


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        pytest.param("book.txt", "one\n\ntwo é\n", ["one\n\ntwo é\n"], id="a text file is one document"),
        pytest.param("code.rs", "fn main", ["fn main"], id="an unknown ending is read as text"),
        pytest.param("a.jsonl", '{"text": "one"}\n{"text": "two\\u2028lines"}', ["one", "two\u2028lines"], id="lines"),
        pytest.param("a.jsonl#body", '{"text": "no", "body": "yes"}', ["yes"], id="a column is named after a #"),
        pytest.param("a.jsonl", '{"text": "one"}\n\n  \n{"text": "two"}', ["one", "two"], id="blank lines are skipped"),
        pytest.param("a.jsonl", '{"text": null}\n{"text": "one"}', ["one"], id="null is no document"),
        pytest.param(
            "a.tsv", 'body\ttext\n2\tsay "x"\n3\t"closed"\n4\t"say ""x"""', ['say "x"', "closed", 'say "x"'],
            id="quotes within cells",
        ),
    ],
)  # fmt: skip
def test_a_file_holds_these_documents(tmp_path: Path, name: str, content: str, texts: list[str]) -> None:
    write(tmp_path / name.partition("#")[0], content)
    assert list(read_texts(str(tmp_path / name))) == texts


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"text": "one"}\n{"body": "two"}', r"line 2 has no column 'text'; it has \['body'\]: .*#COLUMN"),
        ("a.jsonl", '"bare"', r"line 1 has no named columns: got str 'bare', expected an object"),
        ("a.jsonl", '{"text": "one"}\n{"text": \n', r"a\.jsonl, line 2 is damaged: expected JSON"),
        ("a.jsonl", '{"text": ' + "[" * 100_000, r"a\.jsonl, line 1 is damaged: got values nested"),
        (
            "a.jsonl", '{"text": "\\ud83d\\ude00"}\n{"text": "a\\ud800"}\n',
            r"a\.jsonl, line 2: column 'text' holds '.ud...' at character .*half of a surrogate pair",
        ),
        ("a.jsonl#", '{"text": "one"}\n', r"has no column after #: write .*a\.jsonl#COLUMN, or omit the #"),
        ("empty.txt", " \n", r"empty\.txt' holds no documents"),
    ],
    ids=["no column", "no object", "no JSON", "deep", "half of a surrogate pair", "# without a column", "empty"],
)  # fmt: skip
def test_a_file_is_refused_with_the_place_of_what_is_wrong(tmp_path: Path, name: str, content: str, said: str) -> None:
    write(tmp_path / name.partition("#")[0], content)
    with pytest.raises(ValueError, match=said):
        list(read_texts(str(tmp_path / name)))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no such text", r"text 'no such text' is neither a file, a folder, a hub dataset"),
        ("builtin:test", r"'builtin:test' is unknown: use builtin, builtin:train"),
        ("builtin:held-out+", r"text 'builtin:held-out\+' is unknown"),
        ("~no-such-user/x", "'~no-such-user/x' is not a path: "),
    ],
)
def test_an_unknown_text_is_refused_with_what_a_text_can_be(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        list(read_texts(name))


ROWS = [("one, and", "1"), ("two\nlines", "2"), (None, "3")]  # text, body


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'text,body\n"one, and",1\n"two\nlines",2\n,3\n'),
        ("a.TSV", 'text\tbody\none, and\t1\n"two\nlines"\t2\n\t3\n'),
        ("a.json", json.dumps([{"text": text, "body": body} for text, body in ROWS])),
        ("a.parquet", ""),
    ],
)
def test_a_table_holds_a_document_a_row(tmp_path: Path, name: str, content: str) -> None:
    file = write(tmp_path / name, content)
    if name == "a.parquet":
        write_parquet(file, text=[text for text, _ in ROWS], body=[body for _, body in ROWS])
    assert list(read_texts(str(file))) == ["one, and", "two\nlines"]
    assert list(read_texts(f"{file}#body")) == ["1", "2", "3"]
    said = rf"{re.escape(name)}.* has no column 'nothere'; it has \['.*'\]: write .*#COLUMN"
    with pytest.raises(ValueError, match=said):
        list(read_texts(f"{file}#nothere"))


def test_a_cell_of_a_table_may_hold_a_whole_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utf8, "BLOCK", 1 << 10)
    long = "the quick brown fox\n" * 20_000
    file = write(tmp_path / "a.csv", f'body,text\nx,"{long}"\ny,"one ""more"""\n')
    assert list(read_texts(str(file))) == [long, 'one "more"']


@pytest.mark.parametrize("rows", ['1,"never closed\n2,next\n', '1,"ends here', '1,"two" words\n2,a "b"\n'])
def test_a_quote_that_does_not_end_its_cell_is_refused_with_the_line_of_its_row(rows: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", f"body,text\n0,first\n{rows}")
    with pytest.raises(ValueError, match=r"row that begins in line 3 is damaged: .* must end with one"):
        list(read_texts(str(file)))


def test_tables_of_a_folder_are_jsonl_and_parquet(tmp_path: Path) -> None:
    for name in ("a.csv", "b.tsv", "c.json"):
        write(tmp_path / name, "x")
    write_lines(tmp_path / "d.jsonl", [{"text": "one"}])
    assert list(read_texts(str(tmp_path))) == ["one"]


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    write_parquet(tmp_path / "c.parquet", text=["four"])
    write(tmp_path / "b" / "deep.md", "three")
    write_lines(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    write(tmp_path / "ignored.py", "not a text of the folder")
    assert list(read_texts(str(tmp_path))) == ["one", "two", "three", "four"]


def test_a_missing_file_is_not_looked_for_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("the hub was asked"))
    for name in ("books/missing.txt", "books/missing.TXT"):
        with pytest.raises(ValueError, match=f"text {name!r} is neither a file"):
            list(read_texts(name))


EXPECTED = "expected files that end in .txt, .md, .jsonl, .ndjson, .parquet."


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ((), f"got no files, {EXPECTED} Give another folder, or name one"),
        (("b.py", "sub/LICENSE", ".a.txt"), "got .py, no ending, expected files that end in"),
        (("a.csv", "b.csv"), f"got .csv, {EXPECTED} Name one file: "),
    ],
)
def test_a_folder_without_texts_is_refused_with_its_endings(files: tuple[str, ...], said: str, tmp_path: Path) -> None:
    for name in files:
        write(tmp_path / name, "text")
    with pytest.raises(ValueError, match=re.escape(said)):
        list(read_texts(str(tmp_path)))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ([{"role": "user"}], "list"),
        ({"a": 1}, "dict"),
        (1.5, "float"),
        (float("nan"), "float"),
        (True, "bool"),
        (7, "int"),
    ],
)
def test_a_column_that_holds_no_text_is_refused_with_its_place(tmp_path: Path, value: object, kind: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "one"}, {"text": value}])
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 2: column 'text' does not hold text: got {kind} .*#COLUMN"):
        list(read_texts(str(path)))
    path = write_parquet(tmp_path / "a.parquet", text=[value, value])
    with pytest.raises(ValueError, match=rf"a\.parquet, row 1: column 'text' does not hold text: got {kind} "):
        list(read_texts(str(path)))


def test_bytes_are_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "a.parquet", text=[b"abc"])
    with pytest.raises(ValueError, match=r"row 1: column 'text' does not hold text: got bytes b'abc'"):
        list(read_texts(str(path)))
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: Rows([{"text": "a"}, {"text": b"abc"}]))
    said = r"hub dataset org/name@default:train, row 2: column 'text' does not hold text: got bytes"
    with pytest.raises(ValueError, match=said):
        list(read_texts("org/name"))


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    for name, content in (("a.txt", "one\ufeff"), ("a.jsonl", '{"text": "one\ufeff"}\n{"text": "one\ufeff"}\n')):
        path = tmp_path / name
        path.write_bytes(content.encode("utf-8-sig"))
        assert set(read_texts(str(path))) == {"one\ufeff"}


@pytest.mark.parametrize("content", [b"", b"PAR1", b"no parquet" * 9, b"PAR1" + b"\xff" * 64 + b"PAR1"])
def test_a_parquet_file_that_is_none_is_named(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.parquet is not a parquet file, or is damaged: [^\n]*$"):
        list(read_texts(str(tmp_path / "a.parquet")))


def test_lines_may_end_in_any_way_and_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\r\n\r{"text": "b"}\r{"text": 1}')
    with pytest.raises(ValueError, match="line 4: column"):
        list(read_texts(str(tmp_path / "a.jsonl")))
    (tmp_path / "a.txt").write_bytes(b"a\r\nb\rc\n")
    assert list(read_texts(str(tmp_path / "a.txt"))) == ["a\nb\nc\n"]


def test_a_file_is_the_same_text_whatever_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffé\r\n日本\r😀\r\n".encode())
    for size in (1, 2, 3, 5, 100):
        monkeypatch.setattr(utf8, "BLOCK", size)
        assert list(read_texts(str(tmp_path / "a.txt"))) == ["é\n日本\n😀\n"]
    (tmp_path / "a.txt").write_bytes("aé\r\n日".encode() + b"\xff")
    for size in (1, 2, 3, 5, 100):
        monkeypatch.setattr(utf8, "BLOCK", size)
        with pytest.raises(ValueError, match="got the byte 0xff at place 8"):
            list(read_texts(str(tmp_path / "a.txt")))


def test_folders_are_read_without_hidden_files_and_whatever_the_case_of_endings(tmp_path: Path) -> None:
    for name in ("a.TXT", ".hidden.txt", ".git/b.txt", "c.txt/d.md"):
        write(tmp_path / name, name)
    assert list(read_texts(str(tmp_path))) == ["a.TXT", "c.txt/d.md"]
    write_lines(tmp_path / "E.JSONL", [{"text": "e"}])
    assert list(read_texts(str(tmp_path))) == ["e", "a.TXT", "c.txt/d.md"]


NO_NAME = r"a text has no name: got '.*', expected a file.*variable of the shell"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", NO_NAME),
        ("#text", NO_NAME),
        ("shuffled:", "has no name of a text: write shuffled:TEXT"),
        ("shuffled:shuffled:", "has no name of a text: write shuffled:TEXT"),
    ],
)
def test_a_text_without_a_name_is_not_the_current_folder(
    name: str, said: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.txt", "the fox")
    with pytest.raises(ValueError, match=said):
        load(name, tokenizer)


def test_a_column_of_what_has_none_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "texts" / "a.txt", "one")
    for place in (path, path.parent):
        with pytest.raises(ValueError, match=r"has no columns: got #body, but .*\. Omit it\."):
            list(read_texts(f"{place}#body"))


@pytest.mark.parametrize("name", ["latin.txt", "latin.jsonl"])
def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes('{"text": "é"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"{name} is not UTF-8 text: got the byte 0xe9 at place 10 .*iconv"):
        list(read_texts(str(tmp_path / name)))


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a.unknown"])
def test_utf16_and_utf32_without_a_byte_order_mark_are_refused(tmp_path: Path, name: str, encoding: str) -> None:
    (tmp_path / name).write_bytes('{"text": "Plain text."}\n'.encode(encoding))
    with one_line(rf"{name} is not UTF-8 text: got the character NUL in (character|line) \d.* iconv"):
        list(read_texts(str(tmp_path / name)))


def test_lines_of_ndjson_are_documents(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.ndjson", [{"text": "one"}, {"text": "two"}])
    write_lines(tmp_path / "b.NDJSON", [{"body": "three"}])
    assert list(read_texts(str(tmp_path / "a.ndjson"))) == ["one", "two"]
    assert list(read_texts(f"{tmp_path / 'b.NDJSON'}#body")) == ["three"]
    (tmp_path / "b.NDJSON").unlink()
    assert list(read_texts(str(tmp_path))) == ["one", "two"]


def test_tokenizers_in_python_with_other_merges_are_others(tmp_path: Path) -> None:
    """Those of fast tokenizers are in what they write of themselves; their hashes name caches and are in runs."""
    letters = [*"the", *(f"{letter}@@" for letter in "the")]
    vocabulary = {token: i for i, token in enumerate(["<unk>", *letters, "th@@", "he", "the"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))

    def hash_with(*merges: str) -> str:
        (tmp_path / "merges.txt").write_text("\n".join(["#version", *merges, ""]))
        made = CTRLTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
        return corpora.tokenizer_hash(made)

    assert hash_with("t h", "th e</w>") == hash_with("t h", "th e</w>")
    assert len({hash_with("t h", "th e</w>"), hash_with("th e</w>", "t h"), hash_with("h e</w>"), hash_with()}) == 4
    fast = tiny_tokenizer()
    settled = json.loads(fast.backend_tokenizer.to_str())
    content = json.dumps({key: value for key, value in settled.items() if key not in ("truncation", "padding")})
    assert corpora.tokenizer_hash(fast) == hashlib.sha256(content.encode()).hexdigest()[:16]


# the hub


def test_a_hub_dataset_is_asked_for_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[object] = []

    def load_dataset(*arguments: object, **options: object) -> Rows:
        asked.append((arguments, options))
        return Rows([{"body": "one"}, {"body": None}, {"body": "two"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(read_texts("org/name@config-1:validation#body")) == ["one", "two"]
    assert asked == [(("org/name", "config-1"), {"split": "validation"})]


def test_a_hub_dataset_is_its_train_split_and_text_column_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *where, split: Rows([{"text": f"{where} {split}", "other": "no"}])
    )
    assert list(read_texts("org/name")) == ["('org/name', None) train"]


def test_a_missing_column_of_a_hub_dataset_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: Rows([{"body": "one"}]))
    with pytest.raises(ValueError, match=r"org/name has no column 'text'; it has \['body'\]: write org/name#COLUMN"):
        list(read_texts("org/name"))


def test_a_hub_dataset_that_cannot_be_read_while_offline_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # it reads the environment once
    with pytest.raises(
        ValueError, match=r"^text 'org/name' is neither a file nor a folder, and .*HF_HUB_OFFLINE is set"
    ):
        list(read_texts("org/name"))


def test_a_hub_dataset_that_cannot_be_read_online_does_not_speak_of_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(*_: object, **__: object) -> Rows:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("farspan.text.hub._is_reached", lambda: True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ValueError, match="no route") as raised:
        list(read_texts("org/name"))
    assert "OFFLINE" not in str(raised.value)


# tokens, and the cache


def test_documents_keep_their_tokens_and_their_bounds(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    texts = ["the quick brown fox", "é", "jumps"]
    corpus = load(str(write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])), tokenizer)
    assert corpus.num_documents == 3
    assert [tokenizer.decode(corpus.document(i)) for i in range(3)] == texts


def test_no_special_token_is_added_and_one_spelled_out_is_text(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    corpus = load(str(write(tmp_path / "a.txt", "the <s> fox")), tokenizer)
    assert tokenizer.bos_token_id not in corpus.tokens
    assert tokenizer.decode(corpus.tokens) == "the <s> fox"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of texts in a cache of the test's own."""
    monkeypatch.setenv("FARSPAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "corpora"


@pytest.mark.usefixtures("kept")
def test_a_text_is_tokenised_once(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "a.txt", "the quick brown fox")
    counting = Counting(tokenizer)
    first = load(str(path), counting)
    assert counting.calls == 1
    second = load(str(path), counting)
    assert counting.calls == 1
    assert np.array_equal(first.tokens, second.tokens)


@pytest.mark.usefixtures("kept")
def test_a_text_is_never_in_memory_as_a_whole(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenising, "CHARACTERS_AT_ONCE", 20_000)
    monkeypatch.setattr(utf8, "BLOCK", 20_000)
    monkeypatch.setattr(corpora, "documents", lambda name: (f"{i} the quick brown fox " * 300 for i in range(200)))
    tracemalloc.start()
    text = load("a", tokenizer)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert text.num_documents == 200
    assert tokenizer.decode(text.document(199)) == "199 the quick brown fox " * 300
    assert peak < text.characters / 3


def test_the_cache_is_where_farspan_cache_says(kept: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    corpus = load(str(write(tmp_path / "a.txt", "the fox")), tokenizer)
    assert [path.name for path in kept.iterdir()] == [corpus.hash]


def test_a_half_written_cache_is_written_again(kept: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "a.txt", "the quick brown fox")
    folder = kept / load(str(path), tokenizer).hash
    (folder / "starts.npy").unlink()
    (folder / "tokens.npy").write_bytes(b"half")
    assert tokenizer.decode(load(str(path), tokenizer).tokens) == "the quick brown fox"


def test_a_changed_file_has_another_hash(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "a.txt"
    first = load(str(write(path, "the fox")), tokenizer)
    second = load(str(write(path, "the dog")), tokenizer)
    assert first.hash != second.hash
    assert tokenizer.decode(second.tokens) == "the dog"


def test_the_same_text_under_another_name_has_the_same_hash(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    paths = [write(tmp_path / name, "the fox") for name in ("a.txt", "b.txt")]
    assert load(str(paths[0]), tokenizer).hash == load(str(paths[1]), tokenizer).hash


def test_where_documents_end_is_part_of_the_hash(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    one = write_lines(tmp_path / "one.jsonl", [{"text": "ab"}, {"text": "c"}])
    two = write_lines(tmp_path / "two.jsonl", [{"text": "a"}, {"text": "bc"}])
    assert load(str(one), tokenizer).hash != load(str(two), tokenizer).hash


def test_another_tokenizer_gives_another_hash(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["quick brown"])
    path = str(write(tmp_path / "a.txt", "the quick brown fox"))
    assert load(path, tokenizer).hash != load(path, other).hash


def test_a_text_that_changes_while_it_is_read_is_refused_and_not_kept(
    kept: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = corpora.documents
    for texts in (
        (["the fox"], ["the dog"]),
        (["the fox"], ["the fox", "dog"]),
        (["the fox", "dog"], ["the fox"]),
        (["the fox", " "], ["the fox", "dog"]),
        (["the fox", "dog"], ["the foxd", "og"]),
    ):
        monkeypatch.setattr(corpora, "documents", Mock(side_effect=[iter(reading) for reading in texts]))
        with pytest.raises(ValueError, match="text 'a' changed while it was read"):
            load("a", tokenizer)
        assert list(kept.iterdir()) == []
    monkeypatch.setattr(corpora, "documents", original)
    assert tokenizer.decode(load(str(write(tmp_path / "a.txt", "the fox")), tokenizer).tokens) == "the fox"


@pytest.mark.parametrize("file", ["tokens.npy", "starts.npy", "about.json", "checksums.json"])
@pytest.mark.parametrize("damage", ["zeroed", "flipped", "cut", "empty", "missing", "longer", "{}"])
def test_a_damaged_cache_is_made_again(
    file: str,
    damage: str,
    kept: Path,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = str(write(tmp_path / "a.txt", "the quick brown fox"))
    whole = load(path, tokenizer)
    expected, place = whole.tokens.copy(), kept / whole.hash / file
    data = place.read_bytes()
    place.unlink()
    if damage != "missing":
        changes = {"zeroed": bytes(len(data)), "flipped": data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]}
        changes |= {"cut": data[: len(data) // 2], "empty": b"", "longer": data + b"\0\0\0\0", "{}": b"{}"}
        place.write_bytes(changes[damage])
    again = load(path, tokenizer)
    assert again.tokens.tolist() == expected.tolist()
    assert again.starts.tolist() == [0, len(expected)]
    said = capsys.readouterr().err
    if (file, damage) != ("checksums.json", "missing"):
        assert said.startswith(
            f"the tokens of text {path!r} are computed again, since their copy in the cache is damaged"
        )
        assert said.count("\n") == 1
    assert load(path, tokenizer).tokens.tolist() == expected.tolist()
    assert capsys.readouterr().err == ""


def test_a_cache_is_verified_once(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write(tmp_path / "a.txt", "the quick brown fox, once"))
    load(path, tokenizer)
    monkeypatch.setattr(checksums, "_sum", lambda path: pytest.fail("read again"))
    load(path, tokenizer)


def test_what_a_killed_process_left_in_the_cache_is_removed(
    kept: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    for _ in range(2):  # a text that is made, and one that is there
        write(kept / ".farspan-part-12345678" / "lock", "")
        corpus = load(str(write(tmp_path / "a.txt", "the quick brown fox")), tokenizer)
        assert [path.name for path in kept.iterdir()] == [corpus.hash]


def test_texts_the_tokenizer_does_not_know_are_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"<unk>": 0, "the": 1, "fox": 2}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    fine = load(str(write(tmp_path / "fine.txt", "the fox " * 50 + "dog")), tokenizer)
    assert (capsys.readouterr().err, round(fine.unknown, 3)) == ("", 0.01)
    path = write(tmp_path / "foreign.txt", "the dog")
    assert load(str(path), tokenizer).unknown == load(str(path), tokenizer).unknown == 0.5
    said = capsys.readouterr().err
    assert "warning: 50.0% of the tokens of text" in said
    assert said.count("\n") == 1
    load(str(write(tmp_path / "same.txt", "the " * 50)), tokenizer)
    assert "warning: 100.0% of the tokens of text" in capsys.readouterr().err


def test_documents_left_out_are_counted(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": None}, {"text": "one"}, {"text": " \n"}])
    assert load(str(path), tokenizer).num_documents == 1
    assert "2 blank documents or rows without text (null) are left out" in capsys.readouterr().err


def test_a_long_document_has_the_tokens_of_the_whole(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    text = "the quick brown fox jumps over the lazy dog " * 8000
    assert len(text) > tokenising.WINDOW + tokenising.OVERLAP
    found = load(str(write(tmp_path / "a.txt", text)), tokenizer)
    assert found.tokens.tolist() == tokenizer(text, verbose=False)["input_ids"]
    assert (found.characters, found.starts.tolist()) == (len(text), [0, len(found.tokens)])


def test_progress_of_a_long_text_is_printed(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(corpora, "LINE_EVERY", (0.0, 0.0))
    load(str(write(tmp_path / "a.txt", "the quick brown fox, slowly " * 10_000)), tokenizer)
    lines = capsys.readouterr().err.splitlines()
    assert "of 0 million characters" in lines[0]
    assert all(line.startswith("tokenising '") for line in lines)
    assert "tokenising" in lines[-1]
    assert ": 100% of " in lines[-1]


# the text every Python brings


@pytest.fixture(scope="module")
def builtin() -> dict[str, list[str]]:
    """The documents of every part. The library is read once for all of them."""
    parts = ("", "train", "held-out", "train+tests", "held-out+tests")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", cache(Path.read_text))
        return {part: list(builtin_texts(part)) for part in parts}


def test_builtin_train_with_and_without_tests_has_nothing_held_out(builtin: dict[str, list[str]]) -> None:
    held_out = set(builtin["held-out"])
    assert held_out <= set(builtin["held-out+tests"])
    assert not set(builtin["train"]) & held_out
    assert not set(builtin["train+tests"]) & set(builtin["held-out+tests"])


COPIED = parse_json(gzip.decompress(files("farspan").joinpath(COPY).read_bytes()), COPY)["python"]
of_that_python = pytest.mark.skipif(platform.python_version() != COPIED, reason=f"the copy is of Python {COPIED}")


@of_that_python
def test_the_copy_of_the_held_out_part_is_what_this_python_has() -> None:
    here = {place: text for place, text in installed(is_held_out) if len(text) >= MIN_CHARACTERS}
    assert dict(copied()) == here


@pytest.mark.parametrize(
    ("part", "number", "hashed"), [("held-out", 40, "4e822fa8141203bb"), ("held-out+tests", 92, "a21e2e88a7d2b704")]
)
def test_the_held_out_part_is_that_of_recorded_numbers_under_every_python(
    part: str, number: int, hashed: str, library: Path
) -> None:
    texts = list(builtin_texts(part))
    assert len(texts) == number
    assert hashlib.sha256("".join(f"{text}\0" for text in texts).encode()).hexdigest()[:16] == hashed


def test_the_licence_of_python_is_beside_the_copy() -> None:
    licence = files("farspan").joinpath("assets/library/LICENSE").read_text("utf-8")
    assert "PYTHON SOFTWARE FOUNDATION LICENSE" in licence


@of_that_python
def test_builtin_train_and_held_out_are_together_the_builtin_text(builtin: dict[str, list[str]]) -> None:
    assert sorted(builtin["train"] + builtin["held-out"]) == sorted(builtin[""])


def test_about_a_twentieth_of_the_builtin_text_is_held_out(builtin: dict[str, list[str]]) -> None:
    assert 0.02 < len(builtin["held-out"]) / len(builtin[""]) < 0.1


def test_builtin_has_no_duplicates_and_nothing_tiny(builtin: dict[str, list[str]]) -> None:
    assert len(set(builtin[""])) == len(builtin[""])
    assert min(map(len, builtin[""])) >= 200


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of our own."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    return tmp_path


def test_builtin_has_no_tests_and_nothing_installed(library: Path) -> None:
    places = ["os.py", "test/a.py", "json/tests/b.py", "idlelib/idle_test/c.py", "site-packages/d.py", "e.txt"]
    for place in places:
        write(library / place, f"this is {place} " * 50)
    found = "".join(builtin_texts())
    assert [place for place in places if f"this is {place} " in found] == ["os.py"]


def test_builtin_leaves_out_what_is_not_utf8(library: Path) -> None:
    (library / "latin.py").write_bytes(("é" * 300).encode("latin-1"))
    assert not any("é" * 300 in text for text in builtin_texts())


def test_what_is_held_out_does_not_return_as_a_copy_among_the_tests(library: Path) -> None:
    for number, (_, text) in enumerate(copied()):
        write(library / f"module{number}.py", text)
        write(library / "a" / "test" / f"copy{number}.py", text)
    write(library / "another.py", "is in no copy " * 50)
    trained = set(builtin_texts("train+tests"))
    assert "is in no copy " * 50 in trained
    assert not trained & set(builtin_texts("held-out+tests"))


# random and shuffled tokens


def test_random_text_has_ordinary_tokens_only_and_all_of_them(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = load("random", tokenizer).tokens
    assert set(np.unique(tokens).tolist()) == set(range(len(tokenizer))) - set(tokenizer.all_special_ids)


def test_random_text_is_the_same_each_time(tokenizer: PreTrainedTokenizerFast) -> None:
    assert np.array_equal(load("random", tokenizer).tokens, load("random", tokenizer).tokens)


def test_random_text_has_no_special_token_without_a_role(tokenizer: Any) -> None:
    """As the reserved tokens of Llama 3, which are special and not among `all_special_ids`."""
    reserved = copy.deepcopy(tokenizer)
    number = len(reserved)
    reserved.backend_tokenizer.add_special_tokens(["<|reserved|>"])
    assert len(reserved) == number + 1
    assert number not in reserved.all_special_ids
    assert reserved.added_tokens_decoder[number].special
    text = load("random", reserved)
    assert number not in text.tokens
    assert text.hash != load("random", tokenizer).hash


def test_shuffled_windows_are_permutations_of_the_plain_ones(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = str(write(tmp_path / "a.txt", "the quick brown fox jumps over the lazy dog " * 40))
    plain, shuffled = load(path, tokenizer).windows(50, 3, 0), load(f"shuffled:{path}", tokenizer).windows(50, 3, 0)
    for before, after in zip(plain, shuffled, strict=True):
        assert sorted(before) == sorted(after)
        assert not np.array_equal(before, after)


def test_a_shuffled_text_has_a_hash_of_its_own_and_knows_its_source(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = str(write(tmp_path / "a.txt", "the quick brown fox"))
    plain, shuffled, twice = (load(name + path, tokenizer) for name in ("", "shuffled:", "shuffled:shuffled:"))
    assert shuffled.hash == twice.hash != plain.hash
    assert shuffled.source == twice.source == plain.source == plain.hash


# windows


def test_windows_are_unbroken_stretches_of_one_document() -> None:
    corpus = counted(23, 40, 9, 31)
    for window in corpus.windows(10, 8, 0):
        assert np.array_equal(window, np.arange(window[0], window[0] + 10))
        assert np.searchsorted(corpus.starts, window[0], "right") == np.searchsorted(corpus.starts, window[-1], "right")


@pytest.mark.parametrize("sizes", [(23, 40, 9, 31), (103,), (9,) * 11], ids=["documents", "one", "joined"])
def test_windows_do_not_overlap(sizes: tuple[int, ...]) -> None:
    for seed in range(5):
        tokens = np.concatenate(counted(*sizes).windows(10, 8, seed))
        assert len(set(tokens.tolist())) == 80


def test_windows_come_from_different_documents_where_possible() -> None:
    corpus = counted(100, 30, 5, 30, 30)
    for seed in range(5):
        starts = [window[0] for window in corpus.windows(10, 4, seed)]
        assert len({int(np.searchsorted(corpus.starts, start, "right")) for start in starts}) == 4


def test_a_window_does_not_depend_on_how_many_there_are() -> None:
    corpus = counted(100, 30, 5, 30, 30)
    few, many = corpus.windows(10, 3, 0), corpus.windows(10, 15, 0)
    assert np.array_equal(few, many[:3])


def test_another_seed_gives_other_windows() -> None:
    corpus = counted(1000, 1000)
    assert not np.array_equal(corpus.windows(10, 4, 0), corpus.windows(10, 4, 1))


def test_documents_too_short_for_the_windows_are_read_as_one() -> None:
    windows = counted(*[8] * 10).windows(20, 4, 0)
    assert all(np.array_equal(window, np.arange(window[0], window[0] + 20)) for window in windows)


@pytest.mark.parametrize(
    ("sizes", "length", "count"), [((8,) * 10, 20, 4), ((100, 100), 20, 10), ((25, 55), 20, 4), ((40, 40), 40, 2)]
)
def test_windows_that_hold_the_end_of_a_document_are_counted(sizes: tuple[int, ...], length: int, count: int) -> None:
    corpus = counted(*sizes)
    for seed in range(5):
        ends = [
            any(window[0] < start <= window[-1] for start in corpus.starts)
            for window in corpus.windows(length, count, seed)
        ]
        assert corpus.num_crossing_and_copied(length, count, seed)[0] == sum(ends)
    assert (sum(ends) > 0) == (sizes[0] < length or sizes == (25, 55))


def test_windows_in_copies_of_a_document_are_counted() -> None:
    copied, starts = np.arange(50), np.arange(0, 301, 50)
    tokens = np.concatenate([copied, copied + 100, copied, copied + 200, copied, copied + 300])
    text = Corpus("a", "a", tokens, starts)
    for seed in range(5):
        assert text.num_crossing_and_copied(30, 6, seed)[1] == 2
        windows = text.windows(20, 8, seed)  # six documents, then two of them again
        originals = sum(window[0] < 100 for window in windows)
        assert 2 <= text.num_crossing_and_copied(20, 8, seed)[1] < originals
        assert text.num_crossing_and_copied(60, 4, seed)[1] == 0  # windows over several documents
        assert counted(50, 50, 50).num_crossing_and_copied(20, 6, seed)[1] == 0


def test_a_text_too_short_says_what_it_has_and_what_would_do() -> None:
    with pytest.raises(
        ValueError, match=r"'counted' has 100 tokens, 1 window of 60; 4 are needed.*at most 25 here\), or fewer repeats"
    ):
        counted(50, 50).windows(60, 4, 0)


def test_a_text_with_fewer_tokens_than_windows_is_not_told_a_length() -> None:
    said = r"has 3 tokens, 0 windows of 60; 4 are needed: give a text of at least 240 tokens$"
    with pytest.raises(ValueError, match=said):
        counted(3).windows(60, 4, 0)


def test_the_length_that_a_refusal_recommends_is_possible() -> None:
    assert len(counted(50, 53).windows(103 // 4, 4, 0)) == 4


def test_joined_documents_have_a_separator_before_each() -> None:
    assert join([np.array([5, 6]), np.array([7])], (1, 2)).tolist() == [1, 2, 5, 6, 1, 2, 7]


def test_a_warning_of_one_token_shows_no_token_of_thousands_of_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer").mkdir()
    train_tokenizer(["ab" * 4096], 270, tmp_path / "tokenizer")
    (tmp_path / "text.txt").write_text("ab" * 40_960)
    load(str(tmp_path / "text.txt"), AutoTokenizer.from_pretrained(tmp_path / "tokenizer"))
    assert "are one token ('abab" in (said := capsys.readouterr().err)
    assert len(said) < 300


def test_the_places_of_windows_are_drawn_once_for_all_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, draw = list[tuple[int, ...]](), Corpus._places
    monkeypatch.setattr(Corpus, "_places", lambda self, *what: drawn.append(what) or draw(self, *what))
    text = Corpus("text", "hash", np.arange(100), np.arange(0, 101, 10))
    first = text.windows(5, 4, 0)
    assert all(map(np.array_equal, first, text.windows(5, 4, 0)))
    text.num_crossing_and_copied(5, 4, 0)
    assert drawn == [(5, 4, 0)]
    text.windows(5, 4, 1)
    assert len(drawn) == 2
    assert replace(text, name="other")._first == {}


def test_documents_given_as_a_list_are_described_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARSPAN_CACHE", str(tmp_path))
    name = named(["one", "two"])
    assert described(name) == title_of(name) == short_text(name) == "a list of documents"
    assert title_of(f"shuffled:{name}") == short_text(f"shuffled:{name}") == "shuffled:a list of documents"
    for other in ("builtin", "books/texts/a.jsonl", "org/texts"):
        assert (title_of(other), described(other)) == (other, f"text {other!r}")
    with pytest.raises(ValueError, match=r"^a list of documents has \d+ tokens, 0 windows of 400; "):
        load(name, tiny_tokenizer()).windows(400, 1, 0)


@pytest.mark.parametrize("given", [{"one": "two"}, b"one"])
def test_a_dict_is_no_list_of_documents(given: Any) -> None:
    said = rf"^text: got {type(given).__name__}, expected a name such as 'builtin', a path, or a list of documents$"
    with pytest.raises(ValueError, match=said):
        named(given)
