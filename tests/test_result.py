"""The result of a measurement in Python: frames, tables, pictures, notebooks, saving and opening."""

import json
import re
import sys
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure

import farspan
from farspan import Measured, stats
from farspan.lm import LM, wrap
from farspan.record import read_header, read_rows
from farspan.text.documents import named, read_texts

WORDS = ["fox", "dog", "quick", "lazy", "brown", "jumps", "over", "the"]
TEXT = [" ".join(WORDS[i * i % 11 % 8] + str(i + 1000 * part) for i in range(200)) for part in range(3)]
PERPLEXITY = "perplexity:targets=last,target_tokens=4"
SMALL: dict[str, Any] = {"text": TEXT, "lengths": (4, 8, 16), "repeats": 3}
FEW = SMALL | {"lengths": (8, 16)}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    pyplot.switch_backend("agg")
    yield
    pyplot.close("all")


@pytest.fixture
def measured(lm: LM) -> Measured:
    return farspan.curve(lm, **SMALL, out="run")


def text_of(html: str) -> str:
    """The text of a page; every element is closed."""

    class Reader(HTMLParser):
        words = ""

        def __init__(self) -> None:
            super().__init__()
            self.opened: list[str] = []

        def handle_data(self, data: str) -> None:
            self.words += data

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            self.opened += [tag] * (tag != "img")

        def handle_endtag(self, tag: str) -> None:
            assert self.opened.pop() == tag

    reader = Reader()
    reader.feed(html)
    assert not reader.opened
    return reader.words


def test_a_frame_has_a_line_for_each_row_with_its_scores(measured: Measured) -> None:
    frame = measured.to_pandas()
    assert len(frame) == len(measured.rows) == 9
    for row, (_, line) in zip(measured.rows, frame.iterrows(), strict=True):
        for name in ("model", "method", "task", "length", "repeat", "status", "seconds"):
            assert line[name] == getattr(row, name)
        assert line["scores.copy"] == row.scores["copy"]
        assert line["settings.protocol"] == "nested"


def test_a_frame_holds_failed_rows_and_several_tasks(lm: LM) -> None:
    measured = farspan.measure(lm, tasks=[PERPLEXITY, "curve"], **FEW)
    failed = replace(measured.rows[0], status="oom", scores={})
    frame = Measured(measured.folder, [failed, *measured.rows[1:]]).to_pandas()
    assert len(frame) == 12
    assert frame["status"].tolist() == ["oom", *["ok"] * 11]
    assert np.isnan(frame["scores.nats"][0])
    assert frame["scores.nats"].notna().sum() == 5
    assert frame["scores.copy"].notna().sum() == 6


def test_tables_are_those_of_the_page(measured: Measured) -> None:
    quality = measured.table()
    assert quality["length"].tolist() == [4, 8, 16]
    by_hand = [np.mean([row.scores["copy"] for row in measured.rows if row.length == n]) for n in (4, 8, 16)]
    np.testing.assert_allclose(quality["value"], by_hand)
    lengths = measured.table("memory_lengths").set_index("measure")
    assert lengths["tokens"]["half_life"] == stats.summarise(stats.curve(measured.rows)).half_life.value
    with pytest.raises(ValueError, match="table 'memory' is unknown; known are quality, curves, memory_lengths"):
        measured.table("memory")


@pytest.mark.usefixtures("drawn")
def test_without_pandas_the_error_names_the_extra(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    for call in (measured.to_pandas, measured.table):
        with pytest.raises(ValueError, match=re.escape("package pandas: pip install 'farspan[table]'")):
            call()
    assert "memory lengths" in measured._repr_html_()


@pytest.mark.usefixtures("drawn")
def test_a_curve_is_drawn_on_given_axes_and_on_new_ones(measured: Measured) -> None:
    figure, (left, right) = pyplot.subplots(1, 2)
    assert measured.plot(right) is right
    assert not left.lines
    assert {"copy", "control"} <= set(right.get_legend_handles_labels()[1])
    copy = right.lines[right.get_legend_handles_labels()[1].index("copy")]
    np.testing.assert_allclose(copy.get_ydata(), measured.table("curves")["copy"], atol=1e-6)
    new = measured.plot()
    assert new.figure is not figure
    assert new.get_title().startswith("Forgetting curve of tiny-llama")
    assert pyplot.get_fignums() == [1, 2]


@pytest.mark.usefixtures("drawn")
def test_of_several_tasks_one_is_named(lm: LM) -> None:
    measured = farspan.compare(lm, ["full", "sinks:window=12"], [PERPLEXITY, "curve"], **FEW, cost=False)
    assert measured.plot(task="curve").get_ylabel() == "accuracy (share of tokens predicted)"
    assert measured.plot(task="perplexity").get_ylabel() == "nats per token"
    with pytest.raises(ValueError, match=r"has the tasks perplexity:.*; curve:.*: name one of them, plot\(task=...\)"):
        measured.plot()
    with pytest.raises(ValueError, match=r"task 'recall' is unknown; known are perplexity:.*, curve:"):
        measured.plot(task="recall")
    assert text_of(measured._repr_html_()).count("▲/·/▼") == 4  # head and legend of two tables
    assert measured._repr_html_().count("<img") == 2


@pytest.mark.usefixtures("drawn")
def test_a_notebook_shows_tables_and_a_picture_and_writes_nothing(measured: Measured) -> None:
    before = sorted(path.name for path in measured.folder.iterdir())
    html = measured._repr_html_()
    said = text_of(html)
    assert "run: 9 rows" in said
    assert str(stats.summarise(stats.curve(measured.rows)).half_life) in said
    (picture,) = re.findall(r'<img src="data:image/png;base64,([^"]+)" alt="Forgetting curve of tiny-llama', html)
    assert b64decode(picture).startswith(b"\x89PNG")
    assert len(html) < 100_000
    assert sorted(path.name for path in measured.folder.iterdir()) == before


@pytest.mark.usefixtures("drawn")
def test_names_in_a_notebook_are_text(lm: LM) -> None:
    lm = wrap(lm.model, lm.tokenizer, "<script>alert(1)</script>$x$\x1b[31m")
    measured = farspan.curve(lm, **SMALL, out="run")
    assert "<script" not in measured._repr_html_()
    assert "\x1b" not in measured._repr_html_()
    assert not measured.plot().title.get_parse_math()


def test_what_failed_is_in_a_notebook(measured: Measured) -> None:
    rows = [replace(row, status="oom", reason="no memory", scores={}) for row in measured.rows]
    broken = Measured(measured.folder, rows)
    assert "9 of 9 rows failed, first: oom: no memory" in text_of(broken._repr_html_())
    with pytest.raises(ValueError, match=r"has no result to plot: 9 of 9 rows failed, first: oom: no memory"):
        broken.plot()


def test_a_run_that_was_saved_is_opened_as_it_was(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = measured.save("copy")
    assert [path.name for path in pictures] == ["curve.png", "curve.svg"]
    assert all(path.parent == Path("copy") and path.exists() for path in pictures)
    opened = farspan.open_run("copy")
    assert opened.rows == measured.rows
    assert read_header("copy") == read_header("run")
    assert opened.to_pandas().equals(measured.to_pandas())
    assert measured.save("copy") == pictures  # the same run again
    assert measured.save() == measured.save("run") == [Path("run/curve.png"), Path("run/curve.svg")]


def test_nothing_else_is_overwritten(measured: Measured, lm: LM) -> None:
    farspan.curve(lm, **SMALL | {"repeats": 2}, out="other")
    with pytest.raises(ValueError, match="other holds another run: choose another folder"):
        measured.save("other")
    assert len(read_rows("other")) == 6
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"mine is not empty and holds no run \(no run.json\)"):
        measured.save("mine")
    with pytest.raises(ValueError, match=r"mine/notes.txt is a file"):
        measured.save("mine/notes.txt")
    with pytest.raises(ValueError, match="mine holds no run"):
        farspan.open_run("mine")


def test_a_run_without_rows_is_shown_and_not_drawn(measured: Measured) -> None:
    Path("run/rows.jsonl").write_text("")
    empty = farspan.open_run("run")
    assert "run: 0 rows" in text_of(empty._repr_html_())
    assert "run holds no rows yet: repeat the command that made it" in text_of(empty._repr_html_())
    assert len(empty.table()) == len(empty.to_pandas()) == 0
    for call in (empty.plot, lambda: empty.table("curves")):
        with pytest.raises(ValueError, match="run holds no rows yet"):
            call()


def test_one_model_method_and_task_need_no_list(lm: LM) -> None:
    one = farspan.measure(lm, "full", "curve", **SMALL, out="one")
    several = farspan.measure([lm], ["full"], ["curve"], **SMALL, out="several")
    assert [row.scores for row in one.rows] == [row.scores for row in several.rows]


def test_documents_are_a_text_as_a_file_of_them_is(lm: LM, measured: Measured) -> None:
    Path("texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXT))
    of_file = farspan.curve(lm, **SMALL | {"text": "texts.jsonl"}, out="of_file")
    assert [row.scores for row in of_file.rows] == [row.scores for row in measured.rows]
    assert len(farspan.curve(lm, **SMALL, out="run").rows) == 9  # it is the same text, and the run is whole
    assert len(read_header("run")["sessions"]) == 2
    own = {"target_text": [TEXT[1]], "prefix_text": (one for one in [TEXT[2]])}
    farspan.curve(lm, **SMALL | {"text": "builtin"}, **own, out="targets")
    assert list(read_texts(named(["a\nb", "", "ü"]))) == ["a\nb", "ü"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "two\nlines",
            "got a string of 9 characters, expected a name such as 'builtin' or that of a file. Give a document as",
        ),
        ("x" * 5000, "got a string of 5,000 characters, expected a name"),
        ("a document " * 30, "got a string of 330 characters, expected a name"),
        ([], "got no document with text in it, expected at least one"),
        ([" ", ""], "got no document with text in it"),
        (["a", 3], "got int as document 1, expected a string"),
        (["\ud800"], "document 0"),
    ],
)
def test_texts_that_are_none_are_refused(text: Any, error: str, lm: LM) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        farspan.curve(lm, **SMALL | {"text": text}, out="refused")
    assert not Path("refused").exists()


def test_pictures_are_drawn_once_and_closed(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: saved.append(path) or Path(path).touch())
    measured.save()
    measured.save()
    assert len(saved) == 2
    assert not pyplot.get_fignums()
