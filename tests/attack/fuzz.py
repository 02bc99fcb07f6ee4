"""Properties of the readers, for hypothesis: any input gives a value or ValueError, and what is parsed is written as it
was.

Each target runs in a child of the zygote, for a number of seconds or of examples. To add one: a strategy, and a
function of a folder of its own and of what the strategy draws.
"""

import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st

from attack.harness import Finding, Stage
from attack.stage import CONFIGS

MEMORY = 4 << 30  # bytes that a target may take


@dataclass(frozen=True)
class Job:
    """One target with a seed, for so many seconds; or, where these are 0, for so many examples."""

    target: str
    seed: int
    seconds: float = 0.0
    examples: int = 100

    @property
    def name(self) -> str:
        return self.target if not self.seed else f"{self.target}, {self.seed}"


def jobs(seconds: float, at_once: int, seed: int = 0) -> Iterator[Job]:
    """All targets, so that they take so many seconds in all, with so many of them at once."""
    each = seconds * at_once / len(TARGETS)
    for target in TARGETS:
        yield Job(target, seed, each)


def attack(stage: Stage, one: Job) -> tuple[int, list[Finding]]:
    """Runs a target in a child; returns the number of its examples and what it found."""
    with stage.copy(stage.made("curve")) as here:
        shutil.copytree(stage.made("index") / "index", here / "index")
        told = here.parent / "told.json"
        end = stage.zygote.call(
            "attack.fuzz:run", one.target, one.seed, one.seconds, one.examples, str(told), cwd=here,
            timeout=2 * one.seconds + 120,
        )  # fmt: skip
        if not told.exists():
            return 0, [Finding("hang" if end.hung else "crash", f"exit code {end.code}: {end.stderr[-500:]}")]
        answer = json.loads(told.read_text())
        found = [Finding("fuzz", text) for text in answer["found"]]
        if end.hung or end.code:
            found.append(Finding("hang" if end.hung else "crash", f"exit code {end.code}: {end.stderr[-500:]}"))
        return answer["examples"], found


def run(target: str, seed: int, seconds: float, examples: int, told: str) -> None:
    """In the child: draws examples until the time is over, and writes what it found."""
    strategy, check = TARGETS[target]
    folder = Path.cwd()
    count, found, places = 0, list[str](), set[str]()
    started = time.monotonic()

    def tell() -> None:
        Path(told).write_text(json.dumps({"examples": count, "found": found}))

    tell()
    while True:

        @hypothesis.seed(seed)
        @settings(
            max_examples=examples,
            deadline=None,
            report_multiple_bugs=False,
            database=None,
            verbosity=Verbosity.quiet,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.target, Phase.shrink) if not places else (Phase.generate,),
        )
        @given(strategy())
        def holds(value: Any) -> None:
            nonlocal count
            count += 1
            try:
                check(folder, value)
            except ValueError as error:
                if not str(error).strip():
                    raise AssertionError("a ValueError without words") from error

        try:
            holds()
        except Exception as error:  # whatever it is, it is a finding
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/farspan/" in frame.filename]
            place = f"{frames[-1].filename.partition('/farspan/')[2]}:{frames[-1].lineno}" if frames else "fuzz"
            what = f"{type(error).__name__} at {place}"
            if what not in places:
                places.add(what)
                note = " ".join(getattr(error, "__notes__", ()))
                found.append(f"{what}: {str(error)[:200]}: {note[:400]}")
        tell()
        seed += 1
        if time.monotonic() - started >= seconds:
            break
    sys.stdout.flush()


# strategies


def json_values() -> Any:
    odd = st.sampled_from([float("nan"), float("inf"), 10**30, -1, 0, 1e-320, "", "\ud800", "\x1b[31m", "x" * 300])
    plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | odd
    return st.recursive(
        plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=8,
    )  # fmt: skip


def damaged(*bases: bytes) -> Any:
    """Some of these bytes with a few places changed, cut, doubled or put in."""
    pieces = [b"\0", b"\xff", b"\n", b'"', b"{", b"}", b"[", b"]", b",", b":", b"=", b"#", b"\xef\xbb\xbf", b"NaN",
              b"1e999", b"null", b"-1", b"9" * 30, b"\xed\xa0\x80", b"\\ud800", b"\x1b[31m", b"[" * 2000, b"\r\n",
              b"'''", b'"""']  # fmt: skip

    @st.composite
    def draw_damaged(draw: Any) -> bytes:
        data = draw(st.sampled_from(bases))
        for _ in range(draw(st.integers(0, 4))):
            a, b = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
            how = draw(st.sampled_from(("cut", "delete", "double", "put in", "change", "flip")))
            piece = draw(st.sampled_from(pieces) | st.binary(max_size=8))
            if how == "cut":
                data = data[:a]
            elif how == "delete":
                data = data[:a] + data[b:]
            elif how == "double":
                data = data[:b] + data[a:]
            elif how == "put in":
                data = data[:a] + piece + data[a:]
            elif how == "change":
                data = data[:a] + piece + data[a + len(piece) :]
            elif data:
                place = min(a, len(data) - 1)
                data = data[:place] + bytes([data[place] ^ (1 << draw(st.integers(0, 7)))]) + data[place + 1 :]
        return bytes(data)

    return draw_damaged() | st.binary(max_size=60)


def changed(base: Any) -> Any:
    """A JSON value with a few of its values, anywhere inside, replaced or removed."""

    @st.composite
    def draw_changed(draw: Any) -> Any:
        value = json.loads(json.dumps(base))
        for _ in range(draw(st.integers(1, 3))):
            places = list(_places(value))
            if not places:
                return draw(json_values())
            holder, key = draw(st.sampled_from(places))
            if isinstance(holder, dict) and draw(st.integers(0, 9)) == 0:
                holder.pop(key, None)
            else:
                holder[key] = draw(json_values())
        return value

    return draw_changed()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys: Sequence[Any] = list(value) if isinstance(value, dict) else ()
    keys = range(len(value)) if isinstance(value, list) else keys
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _line(value: Any) -> bytes:
    return (json.dumps(value) + "\n").encode()


def rows_strategy() -> Any:
    lines = Path("run/rows.jsonl").read_bytes().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines]
    whole = b"".join(lines)
    one_changed = st.sampled_from(range(len(rows))).flatmap(
        lambda i: changed(rows[i]).map(lambda row: b"".join([*lines[:i], _line(row), *lines[i + 1 :]]))
    )
    return one_changed | damaged(whole)


def header_strategy() -> Any:
    base = json.loads(Path("run/run.json").read_text())
    return changed(base).map(lambda value: json.dumps(value).encode()) | damaged(Path("run/run.json").read_bytes())


def examples_strategy() -> Any:
    lines = Path("run/examples.jsonl").read_bytes().splitlines(keepends=True)
    return changed(json.loads(lines[0])).map(_line) | damaged(b"".join(lines))


def toml_strategy() -> Any:
    kind = st.sampled_from(sorted(CONFIGS))
    key = st.sampled_from(["out", "model.name", "trainer.steps", "optimizer.betas", "data.mixture", "x.y", "", "."])
    override = st.builds(lambda a, b: f"{a}={b}", key | st.text(max_size=8), st.text(max_size=12)) | st.text(max_size=8)
    return st.tuples(kind, damaged(*(text.encode() for text in CONFIGS.values())), st.lists(override, max_size=2))


def jsonl_strategy() -> Any:
    texts = Path("text.jsonl").read_bytes()
    return changed({"text": "a b"}).map(_line) | json_values().map(_line) | damaged(texts[:400])


def parquet_strategy() -> Any:
    return damaged(Path("text.parquet").read_bytes())


def table_strategy() -> Any:
    csv = b'question,answers,label\n"who, is",x,0\nwhat,"y\nz",1\n'
    bases = (csv, csv.replace(b",", b"\t"), Path("nq.jsonl").read_bytes()[:600], b'[{"text": "x", "label": 1}]')
    return st.tuples(st.sampled_from((".csv", ".tsv", ".jsonl", ".json", ".parquet")), damaged(*bases))


def questions_strategy() -> Any:
    base = json.loads(Path("nq.jsonl").read_text().splitlines()[0])
    return changed(base).map(_line)


def index_strategy() -> Any:
    files = ["index.json", "starts.npy", "documents.npy", "passages.txt"]
    files += [str(path.relative_to("index")) for path in sorted(Path("index/bm25").iterdir())]
    return st.sampled_from(files).flatmap(
        lambda file: st.tuples(st.just(file), damaged((Path("index") / file).read_bytes()))
    )


def cache_strategy() -> Any:
    (folder,) = Path("cache/corpora").iterdir()
    files = sorted(path.name for path in folder.iterdir())
    return st.sampled_from(files).flatmap(lambda file: st.tuples(st.just(file), damaged((folder / file).read_bytes())))


def authors_strategy() -> Any:
    base = [{"length": 64, "copy_accs": [0.5, 0.6], "lm_accs": [0.3, 0.3]}]
    return changed(base).map(_line) | damaged(Path("authors.json").read_bytes()[:300])


def _spelled(names: Sequence[str], settings: Sequence[str]) -> Any:
    value = st.text(max_size=6) | st.sampled_from(
        ["1", "0", "-1", "4", "64", "2.5", "nan", "inf", "1e307", "1_0", "\u0661", "9" * 30, "yarn", "linear", "ntk",
         "dynamic", "uniform", "mr", "qasper", "squality", "last", "all", "text"]
    )  # fmt: skip
    setting = st.builds(lambda key, one: f"{key}={one}", st.sampled_from(settings) | st.text(max_size=4), value)
    part = st.builds(
        lambda name, given: name + (":" + ",".join(given) if given else ""),
        st.sampled_from(names),
        st.lists(setting, max_size=4),
    )
    return st.lists(part | st.text(max_size=8), min_size=1, max_size=3).map("+".join)


def methods_strategy() -> Any:
    from dataclasses import fields

    from farspan.methods import METHODS

    return _spelled(list(METHODS), sorted({field.name for kind in METHODS.values() for field in fields(kind)}))  # type: ignore[arg-type]


def tasks_strategy() -> Any:
    from dataclasses import fields

    from farspan.tasks import TASKS

    return _spelled(list(TASKS), sorted({field.name for kind in TASKS.values() for field in fields(kind)}))  # type: ignore[arg-type]


def lengths_strategy() -> Any:
    number = st.integers(-5, 10**6).map(str) | st.text(max_size=3) | st.just("9" * 30)
    text = st.lists(number, max_size=4).flatmap(lambda parts: st.sampled_from(",:").map(lambda by: by.join(parts)))
    return st.tuples(text | st.text(max_size=12), st.integers(-1, 40), st.sampled_from(("linear", "log")))


def text_names_strategy() -> Any:
    names = ["builtin", "random", "shuffled", "text.txt", "text.jsonl", "docs", "nothere", "a/b", "~", ".."]
    part = st.sampled_from(names)
    by = st.sampled_from([":", "#", "@", "/", "+", ""])
    return st.lists(st.tuples(part | st.text(max_size=6), by), min_size=1, max_size=3).map(
        lambda pairs: "".join(a + b for a, b in pairs)
    )


# what must hold


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def check_rows(folder: Path, data: bytes) -> None:
    from farspan.record import latest, read_rows
    from farspan.report.curves import series

    place = folder / "fuzzed"
    place.mkdir(exist_ok=True)
    shutil.copy(folder / "run" / "run.json", place)
    _write(place / "rows.jsonl", data)
    rows = read_rows(place)
    assert len({row.key for row in latest(rows)}) == len(latest(rows))
    if data != (folder / "run" / "rows.jsonl").read_bytes() and len(rows) <= 8:
        json.dumps([str(one.summary) for one in series(rows[:4], {})])


def check_report(folder: Path, data: bytes) -> None:
    from farspan.report.page import write_report

    place = folder / "fuzzed"
    place.mkdir(exist_ok=True)
    shutil.copy(folder / "run" / "rows.jsonl", place)
    _write(place / "run.json", data)
    write_report([place], folder / "fuzzed-report")


def check_examples(folder: Path, data: bytes) -> None:
    from farspan.report.example import examples
    from farspan.report.runs import read_sources

    place = folder / "fuzzed"
    place.mkdir(exist_ok=True)
    for name in ("rows.jsonl", "run.json"):
        shutil.copy(folder / "run" / name, place)
    _write(place / "examples.jsonl", data)
    for source in read_sources([place]):
        examples(source)


def check_toml(folder: Path, value: tuple[str, bytes, list[str]]) -> None:
    from farspan.train.config import read_config, settings_of

    recipe, data, overrides = value
    _write(folder / "fuzzed.toml", data)
    settings = read_config(folder / "fuzzed.toml", settings_of(recipe), overrides)
    again = settings_of(recipe).model_validate(settings.model_dump())
    assert again.model_dump_json() == settings.model_dump_json()


def check_texts(folder: Path, data: bytes, suffix: str) -> None:
    from farspan.text.documents import read_texts

    _write(folder / f"fuzzed{suffix}", data)
    for text in read_texts(str(folder / f"fuzzed{suffix}")):
        text.encode()


def check_table(folder: Path, value: tuple[str, bytes]) -> None:
    from farspan.text.tables import read_table

    suffix, data = value
    _write(folder / f"fuzzed{suffix}", data)
    table = read_table(folder / f"fuzzed{suffix}")
    assert table.rows


def check_questions(folder: Path, data: bytes) -> None:
    from farspan.tasks.qa import read_questions

    _write(folder / "fuzzed.jsonl", data)
    read_questions(str(folder / "fuzzed.jsonl"))


def check_index(folder: Path, value: tuple[str, bytes]) -> None:
    from farspan.text.retrieval import open_index

    file, data = value
    place = folder / "fuzzed-index"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder / "index", place)
    whole = (place / file).read_bytes()
    _write(place / file, data)
    index = open_index(place)
    numbers, _ = index.search(["the quick fox", "river stone"], 3)
    texts = [index.passage(int(number)) for row in numbers for number in row]
    if data != whole:  # what is not refused must be as it was
        before = open_index(folder / "index")
        known, _ = before.search(["the quick fox", "river stone"], 3)
        assert texts == [before.passage(int(number)) for row in known for number in row], "other passages are found"


def check_cache(folder: Path, value: tuple[str, bytes]) -> None:
    import os

    from farspan.text import corpora

    file, data = value
    cache = folder / "fuzzed-cache"
    shutil.rmtree(cache, ignore_errors=True)
    shutil.copytree(folder / "cache", cache)
    (place,) = (cache / "corpora").iterdir()
    _write(place / file, data)
    loaded = _tokenizer(str(folder / "models" / "llama"))
    before = os.environ.get("FARSPAN_CACHE", "")
    try:
        os.environ["FARSPAN_CACHE"] = str(folder / "cache")
        right = corpora.load(str(folder / "text.txt"), loaded)
        os.environ["FARSPAN_CACHE"] = str(cache)
        found = corpora.load(str(folder / "text.txt"), loaded)
    finally:
        os.environ["FARSPAN_CACHE"] = before
    assert list(found.tokens) == list(right.tokens), "other tokens under the same hash"
    assert list(found.starts) == list(right.starts), "other documents under the same hash"


@cache
def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def check_authors(folder: Path, data: bytes) -> None:
    from farspan.tasks.published import read_authors_file

    _write(folder / "fuzzed.json", data)
    for row in read_authors_file(folder / "fuzzed.json", "m"):
        json.dumps(row.scores, allow_nan=False)
        assert row.length > 0
        assert isinstance(row.length, int)
        assert not isinstance(row.length, bool)


def check_method(folder: Path, text: str) -> None:
    from farspan.methods import method

    one = method(text)
    assert method(str(one)) == one
    assert str(method(str(one))) == str(one)


def check_task(folder: Path, text: str) -> None:
    from farspan.tasks import task

    one = task(text)
    assert task(str(one)) == one
    assert str(task(str(one))) == str(one)


def check_lengths(folder: Path, value: tuple[str, int, Any]) -> None:
    from farspan.lengths import check_lengths as checked
    from farspan.lengths import parse_depths, parse_lengths

    text, points, spacing = value
    try:
        depths = parse_depths(text if len(text) < 6 or not text.isdigit() else "5")
        assert depths[0] == 0
        assert all(0 <= depth <= 1 for depth in depths)
    except ValueError:
        pass
    lengths = parse_lengths(text, points, spacing)
    checked(lengths)


def check_text_name(folder: Path, name: str) -> None:
    from farspan.text.documents import read_texts

    if "builtin" in name or name.startswith(("/", "~", "..")):
        return  # all of Python's library, or of the disk
    next(read_texts(name))


Target = tuple[Callable[[], Any], Callable[[Path, Any], None]]
TARGETS: dict[str, Target] = {
    "rows": (rows_strategy, check_rows),
    "run.json and report": (header_strategy, check_report),
    "examples": (examples_strategy, check_examples),
    "TOML": (toml_strategy, check_toml),
    "jsonl": (jsonl_strategy, partial(check_texts, suffix=".jsonl")),
    "parquet": (parquet_strategy, partial(check_texts, suffix=".parquet")),
    "tables": (table_strategy, check_table),
    "questions": (questions_strategy, check_questions),
    "index": (index_strategy, check_index),
    "cache": (cache_strategy, check_cache),
    "authors": (authors_strategy, check_authors),
    "methods": (methods_strategy, check_method),
    "tasks": (tasks_strategy, check_task),
    "lengths": (lengths_strategy, check_lengths),
    "names of texts": (text_names_strategy, check_text_name),
}


def sample(examples: int) -> list[Job]:
    return [replace(Job(target, 1), examples=examples) for target in TARGETS]
