"""Passages and how they are found: against BM25 by its formula, every score by hand, and what an index refuses."""

import hashlib
import json
import math
import re
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from fake_servers import closed_hub
from test_cli import farspan, last_line, refused
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from farspan import Row, measure
from farspan.text import checksums, encoders, retrieval
from farspan.text.retrieval import Index, bm25, build, open_index

from tiny import refused as one_line
from tiny import tiny_tokenizer

TOPICS = ["river", "castle", "engine", "garden", "violin", "harbour", "copper", "planet", "winter", "saddle"]


@pytest.fixture
def text(tmp_path: Path) -> str:
    """Five documents of which each speaks of two topics, in two hundred words or so."""
    folder = tmp_path / "documents"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(5):
        topics = TOPICS[2 * i : 2 * i + 2]
        words = [topics[int(rng.integers(2))] if rng.random() < 0.2 else f"word{rng.integers(60)}" for _ in range(203)]
        (folder / f"{i}.txt").write_text("\n".join(words) + "\n")
    return str(folder)


@pytest.fixture
def index(text: str, tmp_path: Path) -> Index:
    return build(text, tmp_path / "index", words=20)


def texts(index: Index) -> list[str]:
    return [index.passage(i) for i in range(len(index))]


def naive_bm25(query: str, passages: list[str]) -> list[float]:
    """By the formula at the top of retrieval.py."""
    cut = [re.findall(r"\w\w+", passage.lower()) for passage in passages]
    mean = sum(map(len, cut)) / len(cut)
    scores = []
    for words in cut:
        score = 0.0
        for term in re.findall(r"\w\w+", query.lower()):
            held, here = sum(term in other for other in cut), words.count(term)
            idf = math.log(1 + (len(cut) - held + 0.5) / (held + 0.5))
            score += idf * here / (here + 1.5 * (1 - 0.75 + 0.75 * len(words) / mean))
        scores.append(score)
    return scores


# passages


def test_passages_joined_are_the_documents(text: str, index: Index) -> None:
    documents = [path.read_text() for path in sorted(Path(text).iterdir())]
    joined = ["".join(index.passage(int(i)) for i in np.flatnonzero(index.documents == d)) for d in range(5)]
    assert joined == documents
    counts = [len(passage.split()) for passage in texts(index)]
    assert counts == ([20] * 10 + [3]) * 5


def test_passages_of_tokens_have_as_many(text: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    index = build(text, tmp_path / "index", tokens=50, tokenizer=tokenizer)
    document = (Path(text) / "0.txt").read_text()
    first = [index.passage(int(i)) for i in np.flatnonzero(index.documents == 0)]
    ids = tokenizer(document, add_special_tokens=False)["input_ids"]
    assert "".join(first) == document
    assert [tokenizer.decode(ids[i : i + 50]) for i in range(0, len(ids), 50)] == first


def test_letters_of_several_bytes_stay_whole(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("größer ça 日本語 naïve über œuvre")
    assert texts(build(str(tmp_path / "text.txt"), tmp_path / "index", words=2)) == [
        "größer ça ",
        "日本",
        "語 naïve ",
        "über œuvre",
    ]


def test_an_index_is_memory_mapped(index: Index) -> None:
    index.search(["river"], 1)
    assert isinstance(index._text, np.memmap)
    assert isinstance(index._starts, np.memmap)
    assert isinstance(index._bm25.scores["data"], np.memmap)


# search


@pytest.mark.parametrize("query", ["river castle", "Violin violin word3", "planet word7 unheard", "winter"])
def test_bm25_equals_its_formula(index: Index, query: str) -> None:
    expected = np.array(naive_bm25(query, texts(index)))
    assert expected.max() > 1
    numbers, scores = index.search([query], len(index))
    assert sorted(numbers[0]) == list(range(len(index)))
    np.testing.assert_allclose(scores[0], expected[numbers[0]], atol=1e-5)
    np.testing.assert_allclose(retrieval.bm25(query, texts(index)), expected, atol=1e-5)
    assert (np.diff(scores[0]) <= 0).all()


def test_few_are_the_best_of_all_and_equals_come_in_order(index: Index) -> None:
    queries = ["river word3", "saddle", "unheard of", ""]
    everything, _ = index.search(queries, len(index))
    for count in (1, 2, 7, 30):
        numbers, scores = index.search(queries, count)
        assert np.array_equal(numbers, everything[:, :count])
        assert scores.shape == (4, count)
    assert everything[2].tolist() == everything[3].tolist() == list(range(len(index)))  # nothing fits any


def test_scripts_without_spaces_are_searched_by_characters() -> None:
    scores = bm25("猫が好きな動物", ["犬は公園で遊びます。", "その動物は猫です。", "天気がいいですね。"])
    assert max(range(3), key=scores.__getitem__) == 1
    assert min(scores) < max(scores)


@pytest.mark.parametrize(
    ("query", "passages"),
    [
        ("किताब कहाँ है", ["सीता बाजार गई थी।", "राम ने किताब मेज पर रखी।"]),  # vowels are marks after consonants
        ("தமிழ் மொழி", ["வானம் நீலம்", "மொழி பழமையானது"]),
        ("a café", ["the cafeteria of a cafe", unicodedata.normalize("NFD", "the old café")]),
    ],
)
def test_words_keep_their_marks(query: str, passages: list[str]) -> None:
    scores = bm25(query, passages)
    assert scores[0] == 0.0
    assert scores[1] > 0.0


def test_passages_of_scripts_without_spaces_are_cut_by_characters(tmp_path: Path) -> None:
    chinese = "今天天气很好，我们去公园散步。小明在图书馆看书，他喜欢历史。" * 4 + "mixed with words"
    path = tmp_path / "text.txt"
    path.write_text(chinese)
    index = build(str(path), tmp_path / "index", words=20)
    found = texts(index)
    assert "".join(found) == chinese
    assert [len(re.findall("[一-龥]", passage)) for passage in found[:5]] == [20] * 5
    assert found[-1].endswith("mixed with words")


def test_a_passage_finds_itself(index: Index) -> None:
    chosen = [i for i in range(len(index)) if len(index.passage(i).split()) == 20]
    numbers, _ = index.search([index.passage(i) for i in chosen], 1)
    assert numbers[:, 0].tolist() == chosen


@pytest.mark.parametrize("kind", ["dense", "faiss"])
def test_vectors_are_searched_by_inner_product(
    text: str, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "faiss":
        pytest.importorskip("faiss")

    def encode(given: list[str], show_progress_bar: bool) -> np.ndarray:
        counts = [[one.count(topic) + 0.01 * i for i, topic in enumerate(TOPICS)] for one in given]
        return np.array(counts, np.float32)

    both = SimpleNamespace(encode_query=encode, encode_document=encode)
    monkeypatch.setattr(encoders, "encoder_named", lambda name: both)
    monkeypatch.setattr(retrieval, "VECTORS_AT_ONCE", 7)
    index = build(text, tmp_path / "index", kind=kind, words=20, encoder="some/encoder")
    queries = ["river river castle", "planet saddle"]
    expected = encode(queries, False) @ encode(texts(index), False).T
    numbers, scores = index.search(queries, 9)
    np.testing.assert_allclose(scores, np.take_along_axis(expected, numbers, 1), atol=1e-5)
    np.testing.assert_allclose(scores, -np.sort(-expected)[:, :9], atol=1e-5)
    assert index.about["encoder"] == "some/encoder"


@pytest.fixture
def encoder(tmp_path: Path) -> Callable[..., str]:
    """Save an encoder of random weights and its tokenizer in a folder, always the same one; return it."""
    pytest.importorskip("sentence_transformers")

    def save(seed: int = 0, **changes: Any) -> str:
        torch.manual_seed(seed)
        sizes = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32}
        model = BertModel(BertConfig(**sizes, num_attention_heads=2, **changes))
        model.embeddings.word_embeddings.weight.data.normal_()
        model.save_pretrained(tmp_path / "encoder")
        tokenizer = tiny_tokenizer()
        tokenizer.pad_token = "<s>"
        tokenizer.save_pretrained(tmp_path / "encoder")
        return str(tmp_path / "encoder")

    return save


@pytest.mark.parametrize("kind", ["dense", "faiss"])
@pytest.mark.parametrize(
    ("change", "different"),
    [({"seed": 1}, "its hash was .*, now "), ({"layer_norm_eps": 0.5}, "layer_norm_eps was 1e-12, now 0.5")],
)
def test_an_index_of_an_encoder_that_has_changed_is_refused(
    text: str, tmp_path: Path, encoder: Callable[..., str], kind: str, change: dict[str, Any], different: str
) -> None:
    if kind == "faiss":
        pytest.importorskip("faiss")
    folder = tmp_path / "index"
    first = build(text, folder, kind=kind, words=20, encoder=encoder())
    assert build(text, folder, kind=kind, words=20, encoder=encoder()).hash == open_index(folder).hash == first.hash
    name = encoder(**change)
    said = f"'{name}' has changed since it made the vectors of {folder}, or .*: {different}.* delete {folder} and"
    with one_line(said):
        open_index(folder)
    with one_line(said):
        build(text, folder, kind=kind, words=20, encoder=name)
    other = build(text, tmp_path / "other", kind=kind, words=20, encoder=name)
    assert (other.hash != first.hash) == ("seed" in change)
    shutil.rmtree(name)  # then it is not known, and reported when it is needed
    with pytest.raises(ValueError, match="is neither a folder"):
        open_index(folder).search(["river"], 1)


@pytest.mark.parametrize("kind", ["dense", "faiss"])
def test_queries_and_passages_have_the_prompts_of_the_encoder(
    text: str, tmp_path: Path, encoder: Callable[..., str], kind: str
) -> None:
    pytest.importorskip(kind if kind == "faiss" else "sentence_transformers")
    from sentence_transformers import SentenceTransformer

    name = str(tmp_path / "prompted")
    prompts = {"query": "planet planet planet: ", "document": "river: "}
    SentenceTransformer(encoder(), prompts=prompts).save(name)
    index = build(text, tmp_path / "index", kind=kind, words=20, encoder=name)
    known = SentenceTransformer(name, prompts=prompts)
    passages, query = known.encode_document(texts(index)), known.encode_query("castle")
    assert np.abs(query - known.encode("castle")).max() > 0.01
    _, [scores] = index.search(["castle"], 3)
    np.testing.assert_allclose(scores, -np.sort(-(passages @ query))[:3], rtol=1e-4)
    few = texts(index)[:4]
    np.testing.assert_allclose(retrieval.dense("castle", few, name), passages[:4] @ query, rtol=1e-4)


def test_passages_that_an_encoder_does_not_read_whole_are_reported(
    text: str, tmp_path: Path, encoder: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    name = encoder(max_position_embeddings=48)
    build(text, tmp_path / "short", kind="dense", words=2, encoder=name)
    assert "passages have more tokens" not in capsys.readouterr().err
    assert len(build(text, tmp_path / "long", kind="dense", words=200, encoder=name)) == 10  # five are the short rests
    assert "warning: 5 of 10 passages have more tokens than the 48 that the encoder" in capsys.readouterr().err


def test_an_index_without_the_record_of_its_encoder_is_opened(
    text: str, tmp_path: Path, encoder: Callable[..., str]
) -> None:
    """Its hash, which is in runs, is that of an older version of farspan."""
    build(text, tmp_path / "index", kind="dense", words=20, encoder=encoder())
    file = tmp_path / "index" / "index.json"
    about = json.loads(file.read_text())
    old = {name: value for name, value in about.items() if name not in ("encoder_fingerprint", "encoder_config")}
    file.write_text(json.dumps(old))
    checksums.seal(tmp_path / "index")
    encoder(seed=1)
    index = build(text, tmp_path / "index", kind="dense", words=20, encoder=str(tmp_path / "encoder"))
    assert index.hash == hashlib.sha256(json.dumps(old, sort_keys=True).encode()).hexdigest()[:16]


def test_a_run_is_not_continued_with_an_encoder_that_has_changed(
    text: str, tmp_path: Path, encoder: Callable[..., str]
) -> None:
    def measured(seed: int) -> list[Row]:
        how = f"replug:weights=dense,piece=32,tail=8,encoder={encoder(seed=seed)}"
        task = "perplexity:target_tokens=16"
        return measure(["demo"], [how], [task], text=text, lengths=(64,), repeats=1, out=tmp_path / "run")

    assert measured(0) == measured(0)
    with pytest.raises(ValueError, match=r"model\.safetensors has changed since this run measured replug"):
        measured(1)


def test_an_encoder_is_loaded_again_when_its_files_change(encoder: Callable[..., str]) -> None:
    first = retrieval.dense("the fox", ["a dog", "the fox"], encoder())
    assert retrieval.dense("the fox", ["a dog", "the fox"], encoder()) == pytest.approx(first)
    assert retrieval.dense("the fox", ["a dog", "the fox"], encoder(seed=1)) != pytest.approx(first, rel=1e-2)


def test_more_passages_than_there_are_cannot_be_found(index: Index) -> None:
    with pytest.raises(ValueError, match=r"56 passages of .* were requested; it holds 55"):
        index.search(["river"], 56)


# building


def test_an_index_is_built_once(text: str, index: Index, tmp_path: Path) -> None:
    written = {file: file.stat().st_mtime_ns for file in (tmp_path / "index").rglob("*")}
    again = build(text, tmp_path / "index", words=20)
    assert again.hash == index.hash
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "index").rglob("*")} == written


def test_an_index_of_other_documents_is_refused(text: str, index: Index, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cut\.words was 20, now 30"):
        build(text, tmp_path / "index", words=30)
    (Path(text) / "0.txt").write_text("something else")
    with pytest.raises(ValueError, match="holds an index of other documents: 5, not the 5 of "):
        build(text, tmp_path / "index", words=20)


def test_a_file_is_no_folder_for_an_index(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="file is a file, expected a folder: choose another folder"):
        build(text, tmp_path / "file", words=20)
    assert (tmp_path / "file").read_text() == "mine"


def test_the_hash_tells_indexes_apart(text: str, index: Index, tmp_path: Path) -> None:
    assert build(text, tmp_path / "other", words=21).hash != index.hash
    assert build(text, tmp_path / "same", words=20).hash == index.hash


def test_a_build_that_fails_leaves_nothing(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(retrieval, "_write_bm25", full)
    with pytest.raises(OSError, match="no space"):
        build(text, tmp_path / "place" / "index")
    assert list((tmp_path / "place").iterdir()) == []


def test_a_folder_with_something_else_is_left_alone(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no index"):
        build(text, Path(text))
    (tmp_path / "empty").mkdir()
    assert len(build(text, tmp_path / "empty", words=20)) == 55


def test_what_is_no_index_is_named(tmp_path: Path, index: Index) -> None:
    with pytest.raises(ValueError, match="holds no index: make one with `farspan index"):
        open_index(tmp_path)
    path = index.folder / "index.json"
    path.write_text(json.dumps(index.about | {"format": 0}))
    with pytest.raises(ValueError, match="written by another version"):
        open_index(index.folder)
    path.write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        open_index(index.folder)


def files(index: Index) -> list[str]:
    return sorted(str(path.relative_to(index.folder)) for path in index.folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "missing", "longer", "zeroed", "{}"])
def test_a_damaged_index_is_refused_with_the_file_and_what_to_do(damage: str, index: Index) -> None:
    for name in files(index):
        path = index.folder / name
        data = path.read_bytes()
        path.unlink()  # another file, as a copy is
        changes = {"flipped": data[:-3] + bytes([data[-3] ^ 1]) + data[-2:], "zeroed": bytes(len(data))}
        changes |= {"cut": data[: len(data) // 2], "empty": b"", "longer": data + b"\xff\xfe", "{}": b"{}"}
        if damage != "missing":
            path.write_bytes(changes[damage])
        with pytest.raises(ValueError, match=r"^[^\n]*(farspan index)[^\n]*$") as raised:
            open_index(index.folder)
        if name != "index.json":  # of which a changed one may be of another format
            assert Path(name).name in str(raised.value)
        path.unlink(missing_ok=True)
        path.write_bytes(data)
    assert len(open_index(index.folder)) == 55


def test_an_index_without_checksums_or_of_an_unknown_kind_is_refused(index: Index) -> None:
    (index.folder / "index.json").write_text(json.dumps(index.about | {"kind": "dance"}))
    checksums.seal(index.folder)
    with pytest.raises(ValueError, match="is damaged: kind: got 'dance', expected 'bm25', 'dense' or 'faiss'"):
        open_index(index.folder)
    (index.folder / "checksums.json").unlink()
    with pytest.raises(ValueError, match="written by another version of farspan, or has no checksums"):
        open_index(index.folder)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("documents", "x", "documents: got 'x', expected integer"),
        ("text_hash", None, "text_hash: got None, expected string"),
        ("cut", None, "cut: got None, expected"),
        ("encoder", 5, "encoder: got 5, expected string"),
        ("kind", "dense", "encoder: got None, expected the name of an encoder"),
    ],
)
def test_an_index_of_a_stranger_with_fitting_checksums_is_checked(
    key: str, value: object, said: str, text: str, index: Index
) -> None:
    place = index.folder / "index.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {key: value}))
    checksums.seal(index.folder)
    for use in (lambda: open_index(index.folder), lambda: build(text, index.folder)):
        with pytest.raises(ValueError, match=f"index.json is damaged: {said}.*Delete"):
            use()


def test_an_index_whose_places_are_no_integers_is_refused(index: Index) -> None:
    np.save(index.folder / "starts.npy", np.load(index.folder / "starts.npy").astype(float))
    checksums.seal(index.folder)
    with pytest.raises(ValueError, match=r"starts.npy does not fit passages.txt. Delete"):
        open_index(index.folder)


def test_an_index_that_another_process_built_meanwhile_is_kept(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = retrieval._write_bm25

    def slow(words: int) -> None:
        def write(*arguments: object) -> None:
            monkeypatch.setattr(retrieval, "_write_bm25", original)
            build(text, tmp_path / "index", words=words)
            original(*arguments)

        monkeypatch.setattr(retrieval, "_write_bm25", write)

    slow(20)
    assert len(build(text, tmp_path / "index", words=20)) == 55
    shutil.rmtree(tmp_path / "index")
    slow(30)
    with pytest.raises(ValueError, match=r"cut\.words was 30, now 20"):
        build(text, tmp_path / "index", words=20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["documents", "index"]


def test_what_a_killed_build_left_is_removed_by_the_next(text: str, tmp_path: Path) -> None:
    for _ in range(2):  # an index that is built, and one that is there
        (tmp_path / "place" / ".farspan-part-12345678").mkdir(parents=True)
        (tmp_path / "place" / ".farspan-part-12345678" / "lock").touch()
        build(text, tmp_path / "place" / "index")
        assert [path.name for path in (tmp_path / "place").iterdir()] == ["index"]


def test_an_encoder_that_cannot_be_loaded_is_one_line(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sentence_transformers")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # it reads the environment once
    with pytest.raises(ValueError, match=r"^encoder 'some/encoder' is neither [^\n]*HF_HUB_OFFLINE[^\n]*$"):
        build(text, tmp_path / "index", kind="dense", encoder="some/encoder")
    closed = closed_hub(monkeypatch)
    with pytest.raises(
        ValueError, match=rf"^encoder 'some/encoder' is neither a folder nor cached, and {closed} cannot"
    ):
        build(text, tmp_path / "index", kind="dense", encoder="some/encoder")


def test_too_little_memory_for_an_encoder_is_reported_as_that(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> NoReturn:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(encoders, "optional_import", lambda *_: SimpleNamespace(SentenceTransformer=load))
    said = refused(farspan("index", "--text", text, "--out", tmp_path / "index", "--kind", "dense"))
    assert said == "error: out of memory: no memory; try a smaller --encoder, or --kind bm25"


def test_what_cannot_be_built_is_said(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a . b , c")
    with pytest.raises(ValueError, match="no words for BM25"):
        build(str(tmp_path / "text.txt"), tmp_path / "index")
    with pytest.raises(ValueError, match="kind 'bm52' is unknown; known are bm25, dense, faiss"):
        build("builtin", tmp_path / "index", kind="bm52")
    with pytest.raises(ValueError, match="at least 1"):
        build("builtin", tmp_path / "index", words=0)
    with pytest.raises(ValueError, match="a tokenizer that returns the place"):
        build("builtin", tmp_path / "index", tokens=10)
    for name in ("random", "shuffled:builtin"):
        with pytest.raises(ValueError, match=f"text {name!r} has tokens but no documents"):
            build(name, tmp_path / "index")


# the command


def test_the_command_says_what_it_built(text: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    result = farspan("index", "--text", text, "--out", tmp_path / "a", "--words", 20, "--json")
    assert last_line(result) == {
        "index": str(tmp_path / "a"),
        "kind": "bm25",
        "documents": 5,
        "passages": 55,
        "bytes": sum(file.stat().st_size for file in (tmp_path / "a").rglob("*") if file.is_file()),
        "seconds": last_line(result)["seconds"],
    }
    tokens = ("--passage-tokens", 50, "--tokenizer", tmp_path / "tokenizer")
    assert "passages of 5 documents" in farspan("index", "--text", text, "--out", tmp_path / "b", *tokens).stdout


def test_the_command_refuses_what_contradicts_itself(text: str, tmp_path: Path) -> None:
    def said(*options: object) -> str:
        return refused(farspan("index", "--text", text, "--out", tmp_path / "a", *options))

    assert "--passage-tokens and --tokenizer go together" in said("--passage-tokens", 50)
    assert "give one" in said("--passage-tokens", 50, "--tokenizer", "x", "--words", 3)
    assert "--encoder belongs to" in said("--encoder", "x")
    assert "tokenizer '/no/such' is neither" in said("--passage-tokens", 50, "--tokenizer", "/no/such")
