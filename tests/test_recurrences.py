"""The draw `recurrences`: mentions mined as a naive twin finds them, rows of them, and trainings on these rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_smt import Make, losses, settings  # noqa: F401
from test_smt_rows import numbered, plan

import farspan
from farspan.lm import LM
from farspan.text.corpora import Corpus
from farspan.train import mining
from farspan.train.draws import Drawn, Recurrences, draw_named
from farspan.train.mining import mined, recurring, windows
from farspan.train.progress import TrainingWatch
from farspan.train.smt import SmtSettings, train
from farspan.train.windows import SparseRows

from tiny import CODE, interrupted, nats_of, refused

ROW, SHORT = 128, 64
DRAW = Recurrences(ngram=3, largest=20, tokens=10_000)


@pytest.fixture(scope="module")
def demo() -> LM:
    return farspan.load("demo", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def code(demo: LM) -> Corpus:
    """Twelve documents of 300 to 700 tokens."""
    ids = np.array(demo.tokenizer(Path(CODE).read_text(), add_special_tokens=False)["input_ids"], np.int32)
    sizes = np.random.default_rng(0).integers(300, 700, 12)
    return Corpus("code", "hash", ids[: sizes.sum()], np.cumsum([0, *sizes]))


def naive_key(model: Any, text: list[int], place: int) -> bool:
    """LongPPL's criterion for one token: its short context begins 64 tokens before its block of 64 targets."""

    def nats(begin: int) -> float:
        ids = torch.tensor([0, *text[begin : place + 1]])
        with torch.no_grad():
            return float(nats_of(model(ids[None]).logits[0], ids)[-1])

    block = 2 * SHORT + (place - 2 * SHORT) // SHORT * SHORT
    return nats(block - SHORT) - nats(0) > 2 and nats(0) < 2


def naive_earlier(text: list[int], place: int) -> int | None:
    """The nearest earlier place with the same three tokens, unless it is in a long passage that is repeated."""
    for end in range(place - 2 * SHORT, 2, -1):
        if text[end - 2 : end + 1] == text[place - 2 : place + 1]:
            passage = {0}
            while end + min(passage) > 0 and text[end + min(passage) - 1] == text[place + min(passage) - 1]:
                passage.add(min(passage) - 1)
            while (
                place + max(passage) + 1 < len(text) and text[end + max(passage) + 1] == text[place + max(passage) + 1]
            ):
                passage.add(max(passage) + 1)
            return end if len(passage) <= 20 else None
    return None


def naive_fits(earlier: int, later: int, size: int) -> bool:
    """Whether two halves of 64 tokens, the first one after token 0, hold the mentions and do not overlap."""
    return any(
        first >= 1 and first <= earlier - 2 and earlier < first + 63 <= second
        for second in range(max(0, later - 63), min(later - 2, size - 64) + 1)
        for first in range(earlier - 63, earlier)
    )


def test_mentions_are_those_that_the_naive_twin_finds(demo: LM, code: Corpus) -> None:
    found = mined(demo, code, DRAW, row=ROW, longest=512, head=1, seed=0).tolist()
    expected = []
    for document in range(code.num_documents):
        whole, start = code.document(document).tolist(), int(code.starts[document])
        for begin in range(0, len(whole), 511):
            text = whole[begin : begin + 511]
            if len(text) < 4 * SHORT:
                continue
            for place in range(2 * SHORT, len(text)):
                earlier = naive_earlier(text, place)
                if earlier is None or not naive_key(demo.model, text, place):
                    continue
                if naive_fits(begin + earlier + 1, begin + place + 1, len(whole) + 1):
                    expected.append([start + begin + earlier, start + begin + place])
    assert sorted(found) == sorted(expected)
    assert len(expected) > 10


def test_of_several_earlier_mentions_the_nearest_beyond_the_short_context_counts() -> None:
    text = 100 + np.arange(100)
    for end in (20, 40, 60):
        text[end - 2 : end + 1] = 7, 8, 9
    text[78:81] = 7, 8, 9
    assert list(recurring(text, [80], 20, DRAW)) == [(60, 80)]
    assert list(recurring(text, [80], 21, DRAW)) == [(40, 80)]
    assert list(recurring(text, [80], 61, DRAW)) == []
    text[60:79] = text[20:39]  # with two tokens on each side, a passage of 23 that is the same
    assert list(recurring(text, [78], 20, Recurrences(ngram=3, largest=22))) == []
    assert list(recurring(text, [78], 20, Recurrences(ngram=3, largest=23))) == [(38, 78)]


def test_windows_are_inside_documents_until_enough_is_read() -> None:
    corpus = numbered(30, 100, 65)
    every = sorted(windows(corpus, 40, 20, 10**6, seed=0))
    assert every == [(0, 30), (30, 70), (70, 110), (110, 130), (130, 170), (170, 195)]
    assert sorted(windows(corpus, 40, 26, 10**6, seed=0)) == [(0, 30), (30, 70), (70, 110), (130, 170)]
    some = [list(windows(corpus, 40, 20, 70, seed)) for seed in (0, 0, 1)]
    assert some[0] == some[1] != some[2]
    assert 70 <= sum(end - begin for begin, end in some[0]) < 110


def test_a_model_that_finds_nothing_is_refused(demo: LM) -> None:
    ids = np.random.default_rng(0).integers(5, demo.vocabulary, 600).astype(np.int32)
    noise = Corpus("noise", "hash", ids, np.array([0, 600]))
    message = (
        r"no recurrences found in the corpus: of 511 tokens read in text .noise., \d+ need the long context "
        r"of 512 tokens, .* Give longer documents, read more \(smt\.draw = \"recurrences:tokens=N\"\), or use "
    )
    with refused(message):
        mined(demo, noise, DRAW, row=ROW, longest=512, head=1, seed=0)


# rows


def around(earlier: int, later: int, size: int, row: int, seed: int) -> Drawn:
    return DRAW.around(earlier, later, size, 300, row, np.random.default_rng(seed))


@pytest.mark.parametrize("row", [32, 33])
@pytest.mark.parametrize(("earlier", "later", "size"), [(40, 150, 200), (3, 60, 80), (50, 99, 100), (20, 38, 60)])
def test_a_row_holds_both_mentions_and_no_text_twice(row: int, earlier: int, later: int, size: int) -> None:
    assert DRAW.fits(earlier, later, size, row)
    half, seen, last = row - row // 2, set(), 0
    for seed in range(300):
        one = around(earlier, later, size, row, seed)
        first, second = one.tokens[1:half], one.tokens[half:]
        assert (len(one.tokens), one.tokens[0], one.num_targets) == (row, 0, row - 1)
        assert (np.diff(first) == 1).all()
        assert (np.diff(second) == 1).all()
        assert {earlier - 2, earlier} <= set(first.tolist())
        assert {later - 2, later} <= set(second.tolist())
        assert first[0] >= 1
        assert first[-1] < second[0]
        assert second[-1] < size
        gap = int(one.positions[half]) - half
        assert one.positions.tolist() == [*range(half), *range(half + gap, row + gap)]
        seen.add((int(first[0]), int(second[0])))
        last = max(last, int(one.positions[-1]))
    assert len(seen) > 3
    assert 280 < last < 300


def test_places_that_no_row_can_hold_do_not_fit() -> None:
    assert not DRAW.fits(2, 60, 80, 32)  # its three tokens begin with the first of the document
    assert not DRAW.fits(20, 22, 60, 32)  # the later one would be in the first half
    assert not DRAW.fits(3, 12, 60, 32)  # the first half reaches beyond it
    assert not Recurrences(ngram=17).fits(40, 150, 200, 32)
    fitting = [
        (DRAW.fits(a, b, size, ROW), naive_fits(a, b, size))
        for a in range(1, 70, 3) for b in range(a + 1, 140, 5) for size in (b + 1, b + 9, 130, 200) if b < size
    ]  # fmt: skip
    assert [one for one, _ in fitting] == [other for _, other in fitting]
    assert {one for one, _ in fitting} == {True, False}


def rows(draw: str, **options: Any) -> SparseRows:
    options = {"row": 32, "targets": 16, "batch": 2, "separator": (7,), "seed": 0} | options
    pairs = np.array([(40, 150), (350, 520)])
    return SparseRows(numbered(300, 500), draw_named(draw), plan(), mine=lambda corpus: pairs, **options)


def test_samples_of_mentions_are_texts_of_their_document() -> None:
    samples = [rows("recurrences:share=1")[index]["sparse"]["input_ids"].tolist() for index in range(60)]
    assert {sample[0] for sample in samples} == {7}
    of = {1: (1040, 1150), 2: (2050, 2220)}  # place 350 of the text is place 50 of the second document
    for sample in samples:
        assert all(place in sample for place in of[sample[1] // 1000])
    assert {sample[1] // 1000 for sample in samples} == {1, 2}


def test_the_share_of_rows_with_mentions() -> None:
    given = rows("recurrences:share=0.3")
    jumps = [(np.diff(given[index]["sparse"]["input_ids"][1:]) != 1).any() for index in range(len(given))]
    assert 0.2 < np.mean(jumps) < 0.4
    other = rows("skip")
    assert other.pairs is None


@pytest.mark.parametrize("setting", ["share=2", "ngram=0", "largest=0", "tokens=0"])
def test_impossible_settings_are_refused(setting: str) -> None:
    with refused(setting.replace("=", " = ")):
        draw_named(f"recurrences:{setting}")


# trainings


@pytest.fixture
def every_place(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Takes every token for a key token, as a tiny model predicts none; returns the lengths of the windows read."""
    lengths: list[int] = []

    def key_places(task: Any, reader: Any, window: np.ndarray) -> list[int]:
        lengths.append(len(window))
        return list(range(16, len(window)))

    monkeypatch.setattr(mining, "key_places", key_places)
    return lengths


def stored(folder: Path) -> Any:
    return json.loads((folder / "recurrences.json").read_text())


def stop_mining(chosen: SmtSettings, windows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C while a training mines, after so many windows."""
    left, key_places = iter(range(windows)), mining.key_places

    def stopping(task: Any, reader: Any, window: np.ndarray) -> list[int]:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return key_places(task, reader, window)

    with monkeypatch.context() as patched:
        patched.setattr(mining, "key_places", stopping)
        with pytest.raises(KeyboardInterrupt):
            train(chosen)


def test_a_training_mines_once_and_a_stopped_one_continues_with_the_same_rows(
    settings: Make,  # noqa: F811
    counted: list[int],
    every_place: list[int],
    tmp_path: Path,
) -> None:
    draw = "smt.draw=recurrences:share=1,ngram=2"
    train(settings("whole", draw))
    read = len(every_place)
    assert read > 0
    with interrupted(counted, 7):
        train(settings("stopped", draw))
    assert sum(len(one["pairs"]) for one in stored(tmp_path / "stopped")["windows"]) > 10
    train(settings("stopped", draw))
    assert len(every_place) == 2 * read  # not a third time
    assert losses(settings("stopped", draw)) == losses(settings("whole", draw))


@pytest.mark.parametrize(
    "changed",
    ["smt.draw=recurrences:ngram=3", "trainer.seed=1", "model.window=48", "model.rope=rope:type=yarn,factor=2"],
)
def test_mentions_of_other_settings_are_mined_again(
    settings: Make,  # noqa: F811
    every_place: list[int],
    changed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    common = "smt.draw=recurrences:ngram=2", "trainer.steps=6", "lengths.by=48"
    stop_mining(settings("a", *common, changed), 1, monkeypatch)
    before, _ = stored(tmp_path / "a"), every_place.clear()
    train(settings("a", *common))
    after = stored(tmp_path / "a")
    assert before["of"] != after["of"]
    assert len(every_place) == len(after["windows"])


def test_mining_that_was_stopped_continues_with_the_next_window(
    settings: Make,  # noqa: F811
    every_place: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = "smt.draw=recurrences:ngram=2", "trainer.steps=6", "lengths.by=48"
    train(settings("whole", *chosen))
    whole, _ = stored(tmp_path / "whole"), every_place.clear()
    stop_mining(settings("stopped", *chosen), 2, monkeypatch)
    assert stored(tmp_path / "stopped")["windows"] == whole["windows"][:2]
    lines: list[str] = []
    train(settings("stopped", *chosen), TrainingWatch(notice=lines.append))
    assert stored(tmp_path / "stopped") == whole
    assert len(every_place) == len(whole["windows"]) > 3
    assert sum("windows read, " in line for line in lines) == len(every_place) - 2
    found = sum(len(one["pairs"]) for one in whole["windows"])
    assert any(
        f"{len(every_place)} of {len(every_place)} windows read, {found:,} recurrences" in line for line in lines
    )


def test_a_plan_names_the_number_of_mentions_and_stores_nothing(
    settings: Make,  # noqa: F811
    every_place: list[int],
    tmp_path: Path,
) -> None:
    chosen = settings("a", "smt.draw=recurrences:ngram=2")
    lines: list[str] = []
    train(chosen, TrainingWatch(notice=lines.append, plan=True))
    assert any("mentions found that need a long context" in line for line in lines)
    assert not (tmp_path / "a").exists()


def test_damaged_mentions_are_named(settings: Make, every_place: list[int], tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "recurrences.json").write_text("[[1, 2")
    with refused(r"recurrences\.json"):
        train(settings("a", "smt.draw=recurrences:ngram=2"))


def test_nothing_is_trained_where_nothing_is_found(settings: Make, tmp_path: Path) -> None:  # noqa: F811
    with refused("no recurrences found in the corpus"):
        train(settings("a", "smt.draw=recurrences"))
    assert not (tmp_path / "a" / "log.jsonl").exists()


def test_the_long_context_is_the_target_where_rope_is_scaled(settings: Make, every_place: list[int]) -> None:  # noqa: F811
    for overrides, longest in (([], 511), (["model.rope=rope:type=yarn,factor=2", "lengths.target=256"], 255)):
        every_place.clear()
        chosen = settings("a", "smt.draw=recurrences:ngram=2", "trainer.steps=30", *overrides)
        train(chosen, TrainingWatch(plan=True))
        assert max(every_place) == longest
