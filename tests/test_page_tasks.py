"""A page from a real run of every task: its numbers are there, in a browser."""

import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import opened
from test_cli import farspan
from transformers import PreTrainedTokenizerFast

from farspan.lm import load
from farspan.record import Row, read_rows
from farspan.report.export import three_digits
from farspan.report.page import write_report
from farspan.tasks import TASKS, Bound, Example, task

from tiny import saved, write_lines

pytest.importorskip("jinja2")
pytest.importorskip("plotly")

WORDS = [
    a + b for a in ("Fox", "dog", "Over", "lazy", "Quick", "brow") for b in ("el", "ar", "ing", "ton", "wick", "y")
]
METHODS = ["full", "rope:type=yarn,factor=2"]
NAMES = ["Ada", "Grace", "Alan", "Kurt", "Emmy", "Sonja"]
# by task: the command, and the score of a row whose mean is the quality
RUNS = {
    "curve": ("curve model --lengths 16,64", "copy"),
    "recall": ("recall model --length 64 --points 3 --warmup 4 --scored 8", "copy"),
    "perplexity": ("perplexity model --lengths 32,64 --target-tokens 16", "nats"),
    "longppl": ("task longppl:alpha=0,beta=20,target_tokens=16 model --lengths 64,128", "nats"),
    "mentions": ("task mentions:distance=60,target_tokens=60 model --lengths 300,400", "gain"),
    "attention": ("attention model --lengths 32,64 --map-bins 8", "pareto"),
    "own": ("task own:pairs=2 model --lengths 300,400", "right"),
    "passkey": ("task passkey:depths=2 model --lengths 300,400", "right"),
    "needle": ("task needle:depths=0+1 model --lengths 500,640", "right"),
    "icl": ("task icl:data=classes,text=text,label=label model --lengths 0,3", "accuracy"),
    "qa": ("task qa:data=nq.jsonl,shots=1,new_tokens=3 model --lengths 0,2", "exact_match"),
    "ralm": ("task ralm:index=index,window=60,query=20,passage_tokens=25 model --lengths 0,2", "nats"),
    "zeroscrolls": ("task zeroscrolls:set=qasper,data=scrolls.jsonl,new_tokens=3 model --lengths 400,500", "score"),
    "longbench": (
        "task longbench:set=qasper,data=longbench,new_tokens=3,view=answers model --lengths 800,900",
        "score",
    ),
    "longbench2": ("task longbench2:data=longbench2.jsonl,truncate=middle model --lengths 300,900", "score"),
    "cost": ("task cost:new_tokens=2 model --lengths 300,900", "prefill_seconds"),
}
SPELLED = {  # of tasks with a command of their own
    "recall": "recall:points=3,warmup=4,scored=8",
    "perplexity": "perplexity:target_tokens=16",
    "attention": "attention:map_bins=8",
}
TITLES = {
    "curve": "Forgetting curve",
    "recall": "Recall by distance",
    "perplexity": "Perplexity",
    "attention": "Attention",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A folder with a model, a text, and the data of every task."""
    folder = tmp_path_factory.mktemp("tasks")
    saved(folder / "model", tokenizer)
    rng = np.random.default_rng(0)
    (folder / "text").mkdir()
    for i in range(3):
        (folder / "text" / f"{i}.txt").write_text(" ".join(f"{' '.join(rng.choice(WORDS, 9))}." for _ in range(60)))
    passages = [{"id": str(n), "title": f"title {n}", "text": f"passage {n} of a fox.", "score": 1.0} for n in range(3)]
    write_lines(folder / "nq.jsonl", [{"question": f"who is {n}", "answers": [n], "ctxs": passages} for n in NAMES])
    classes = [{"text": f"a fox number {i}", "label": ("red", "dog", "fox")[i % 3]} for i in range(15)]
    for name in ("train", "test"):
        write_lines(folder / "classes" / f"{name}.jsonl", classes)
    stories = [(f"Who is {i}?\n\nText {i}.\n\nMore of it.", f"fox {i}") for i in range(4)]
    write_lines(
        folder / "scrolls.jsonl",
        [{"id": str(i), "pid": f"{i}_0", "input": text, "output": answer} for i, (text, answer) in enumerate(stories)],
    )
    about = {"length": 40, "dataset": "qasper", "language": "en", "all_classes": None}
    documents = [("The fox jumps over the lazy dog. " * 3, f"Question {i}?", f"fox {i}") for i in range(4)]
    write_lines(
        folder / "longbench" / "qasper.jsonl",
        [{"context": c, "input": q, "answers": [a], "_id": str(i)} | about for i, (c, q, a) in enumerate(documents)],
    )
    asked = [
        {"_id": str(i), "domain": "d", "sub_domain": "s", "difficulty": "easy", "length": "short"}
        | {"question": f"Who is {i}?", "answer": "ABCD"[i], "context": f"The fox {i} and the lazy dog. " * 5}
        | {f"choice_{letter}": f"fox {letter}" for letter in "ABCD"}
        for i in range(4)
    ]
    write_lines(folder / "longbench2.jsonl", asked)
    return folder


def measured(place: Path, name: str) -> Path:
    if name == "ralm":
        farspan("index", "--text", "text", "--out", "index")
    text = ["--text", "text"] if TASKS[name].reads_text else []
    arguments = [*RUNS[name][0].split(), *text, "--repeats", "3", "--out", f"run-{name}"]
    assert farspan(*arguments, *(f"--method={how}" for how in METHODS)).exit_code == 0
    return place / f"run-{name}"


def mean(rows: list[Row], score: str) -> float:
    values = [row.scores["all"]["pareto"] if score == "pareto" else row.scores[score] for row in rows]
    return float(np.mean(values))


def first_example(folder: Path) -> dict[str, Any]:
    (line,) = (folder / "examples.jsonl").read_text("utf-8").splitlines()
    example: dict[str, Any] = json.loads(line)
    return example


def shown_example(page: str) -> str:
    """The text of the only example on a page."""
    (section,) = re.findall('<section id="examples">(.*?)</section>', page, re.S)
    (tokens,) = re.findall('<div class="tokens">(.*?)</div>', section, re.S)
    return html.unescape(re.sub("<[^>]*>", "", tokens))


def test_every_task_has_a_run_here() -> None:
    assert set(TASKS) <= set(RUNS)


def test_a_page_of_every_task_shows_its_numbers(
    browser: Any, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    monkeypatch.chdir(place)
    folders = {name: measured(place, name) for name in RUNS}
    page, *_ = write_report(list(folders.values()), tmp_path / "all")
    opened(browser, page)
    sections = browser.find_elements("css selector", "section[id^=group]")
    for section, (name, folder) in zip(sections, folders.items(), strict=True):
        assert section.find_element("tag name", "h2").text.lower().startswith(TITLES.get(name, name).lower())
        rows = read_rows(folder)
        score = RUNS[name][1]
        table = browser.execute_script(
            "const it = arguments[0].querySelector('details.quality'); it.open = true;"
            "return [...it.querySelectorAll('tbody tr')].map(row => [...row.cells].map(cell => cell.innerText))",
            section,
        )
        lengths = sorted({row.length for row in rows})
        assert [line[0].split()[-1] for line in table] == METHODS, name
        for line, how in zip(table, METHODS, strict=True):
            for cell, length in zip(line[2:], lengths, strict=False):
                value = mean([row for row in rows if (row.method, row.length) == (how, length)], score)
                assert cell.split()[0] == (three_digits(np.exp(value)) if score == "nats" else f"{value:.3f}"), name
        browser.execute_script("arguments[0].scrollIntoView()", section.find_element("css selector", ".figure"))
        WebDriverWait(section, 20, 0.02).until(lambda it: it.find_elements("css selector", ".figure .main-svg"), name)
    texts = browser.find_element("tag name", "main").text
    assert "First examples" in texts
    assert "What was not measured" not in texts
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


@pytest.mark.parametrize("name", RUNS)
def test_a_page_of_one_run_names_its_task_and_shows_its_first_example_whole(
    name: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    folder = place / f"run-{name}"  # of the test before, if it ran
    if not folder.exists():
        measured(place, name)
    page, *_ = write_report([folder], tmp_path / "out")
    text = page.read_text("utf-8")
    title = " ".join(re.sub("<[^>]*>", " ", re.findall("<h1>(.*?)</h1>", text, re.S)[0]).split())
    assert title.startswith(TITLES.get(name, ""))
    assert title.endswith("of model")
    assert name in title or name in TITLES
    assert "Longppl" not in text + (tmp_path / "out" / "report.md").read_text("utf-8")
    if name == "cost":  # of random tokens, which are not shown
        assert not (folder / "examples.jsonl").exists()
        return
    assert shown_example(text) == "".join(token for _, part in first_example(folder)["parts"] for token in part)


@pytest.mark.parametrize("name", TASKS)
def test_tokens_and_work_of_an_example_do_not_depend_on_the_examples_made_since(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    if name == "ralm":
        farspan("index", "--text", "text", "--out", "index")
    words = RUNS[name][0].split()
    spec = words[1] if words[0] == "task" else SPELLED.get(name, name)
    lengths = tuple(int(length) for length in words[words.index("model") + 2].split(","))
    lm = load("model")

    def bound() -> Bound[Any]:
        return task(spec).resolved(lengths, (64,)).on(lm, "text")

    def costs(bound: Bound[Any], examples: list[Example[Any]]) -> list[Any]:
        tokens = [bound.num_tokens(lm, example, length) for example in examples for length in lengths]
        return [*tokens, *(list(bound.work(lm, example)) for example in examples)]

    one = bound()
    examples = one.examples(lm, lengths, 2, 0)
    before = costs(one, examples)
    one.examples(lm, (lengths[-1] + (lengths[-1] > 8),), 3, 1)
    assert costs(one, examples) == before
    assert costs(bound(), examples) == before


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("name", ["needle", "own", "icl"])
def test_pictures_of_a_task_are_drawn(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of curves, attention, perplexity, longppl and mentions are drawn in their own tests."""
    monkeypatch.chdir(place)
    pictures = [path.stat().st_size for path in measured(place, name).glob("*.png")]
    assert min(pictures, default=0) > 10_000
