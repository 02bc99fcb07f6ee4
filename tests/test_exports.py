"""Runs in the formats of other tools: each is read back, or judged by the schema or reader of its tool."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries
from jsonschema import Draft7Validator
from markdown_it import MarkdownIt
from test_cli import farspan, last_line, refused

import farspan as library
from farspan.loading.places import folder_of
from farspan.record import Row, read_header, read_rows
from farspan.report.curves import series
from farspan.report.export import number as written
from farspan.report.exports import FORMATS, export
from farspan.report.exports.eval_results import _dataset, _notes
from farspan.report.exports.every_eval_ever import _result
from farspan.report.exports.model_card import write_model_card
from farspan.report.exports.numbers import numbers_of
from farspan.report.exports.rows import METADATA, rows_table
from farspan.report.notices import unfinished
from farspan.report.runs import Source, read_run
from farspan.stats import MemoryLength, summarise

from naive import nats_after
from tiny import CODE

SCHEMA = Path(__file__).parent / "data" / "every_eval_ever" / "eval.schema.json"
LENGTHS = (64, 128, 256)
REPEATS = 3
MEASURED = {"text": CODE, "shard": (1, 1)}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the embedded model: a forgetting curve, and perplexity, under two methods."""
    folder = tmp_path_factory.mktemp("runs") / "both"
    settings: dict[str, Any] = {"lengths": LENGTHS, "repeats": REPEATS, "out": folder, **MEASURED}
    library.measure(["demo"], ["full", "sinks:window=100"], ["curve", "perplexity:target_tokens=32"], **settings)
    return folder


Change = Callable[[list[Row]], list[Row]]


@pytest.fixture
def changed(run: Path, tmp_path: Path) -> Callable[[Change], Path]:
    """Makes a run of other rows, with the header of the one above."""

    def made(change: Change) -> Path:
        folder = tmp_path / "changed"
        folder.mkdir()
        (folder / "run.json").write_bytes((run / "run.json").read_bytes())
        lines = (json.dumps(asdict(row)) + "\n" for row in change(read_rows(run)))
        (folder / "rows.jsonl").write_text("".join(lines))
        return folder

    return made


def failing(rows: list[Row]) -> list[Row]:
    return [replace(row, status="oom", reason="no memory", scores={}) for row in rows]


# rows


def known(row: Row) -> dict[str, Any]:
    """The fields of a row, nested ones by name, those without a value left out."""
    nested = {f"{name}.{key}": v for name in ("settings", "scores", "reading") for key, v in getattr(row, name).items()}
    flat = {name: v for name, v in asdict(row).items() if name not in ("settings", "scores", "reading")} | nested
    return {name: value for name, value in flat.items() if value is not None}


def test_parquet_holds_every_row_and_the_run(run: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    (path,) = export(run, "parquet")
    table = parquet.read_table(path)
    read = [{name: value for name, value in line.items() if value is not None} for line in table.to_pylist()]
    rows = read_run(run).rows
    assert len(read) == len(rows) == 2 * 2 * len(LENGTHS) * REPEATS
    for line, row in zip(read, rows, strict=True):
        as_json = {"reading.repeats", "reading.cuts"}
        assert {k: json.loads(v) if k in as_json else v for k, v in line.items()} == known(row)
    assert json.loads(table.schema.metadata[METADATA]) == read_header(run)


def test_csv_holds_every_row(run: Path) -> None:
    pandas = pytest.importorskip("pandas")
    (path,) = export(run, "csv")
    table = pandas.read_csv(path, keep_default_na=False)
    rows = read_run(run).rows
    assert len(table) == len(rows)
    for column in ("model", "method", "task", "example", "length", "repeat"):
        assert table[column].tolist() == [getattr(row, column) for row in rows]
    copies = [row.scores["copy"] for row in rows if row.task == "curve"]
    assert table["scores.copy"][table.task == "curve"].astype(float).tolist() == pytest.approx(copies)


def test_failed_rows_are_in_the_formats_of_rows(changed: Callable[[Change], Path]) -> None:
    folder = changed(failing)
    (path,) = export(folder, "csv")
    assert path.read_text().count(",oom,no memory,") == len(read_rows(folder))


def test_values_of_several_types_are_json() -> None:
    row = Row("m", "full", "t", 1, {}, 1, 0, 0, "e")
    rows = [replace(row, scores={"nats": nats}) for nats in (1.5, [1.0, None], None, {"a": 2})]
    source = replace(read_run_of([row]), rows=rows)
    assert [line.get("scores.nats") for line in rows_table(source).lines] == ["1.5", "[1.0, null]", None, '{"a": 2}']


def read_run_of(rows: list[Row]) -> Source:
    return Source("", Path(), {"settings": {"tasks": {}}, "models": {}, "sessions": []}, rows)


# every_eval_ever


def records(folder: Path, **options: Any) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in export(folder, "every-eval-ever", **options)]


def test_every_eval_ever_is_valid_under_its_schema(run: Path) -> None:
    validator = Draft7Validator(json.loads(SCHEMA.read_text()))
    (one,) = records(run)
    assert not list(validator.iter_errors(one))
    assert one["schema_version"] == json.loads(SCHEMA.read_text())["version"]
    assert one["model_info"]["inference_engine"]["name"] == "transformers"
    for result in one["evaluation_results"]:
        least, most = (float(result["metric_config"][end]) for end in ("min_score", "max_score"))
        assert least <= result["score_details"]["score"] <= most
        if result["metric_config"]["metric_name"] == "copied beyond guessing":
            assert (least, most) == (-1, 1)
    ids = [result["evaluation_result_id"] for result in one["evaluation_results"]]
    assert len(set(ids)) == len(ids) == 2 * (5 + 2 * len(LENGTHS))


def test_no_score_is_below_the_least_possible(changed: Callable[[Change], Path]) -> None:
    def swapped(row: Row) -> Row:
        halves = {"copy": row.scores["control"], "control": row.scores["copy"]}
        return replace(row, scores=row.scores | halves)

    (one,) = records(changed(lambda rows: [swapped(row) for row in rows if row.task == "curve"]))
    scores = {}
    for result in one["evaluation_results"]:
        name, score = result["metric_config"]["metric_name"], result["score_details"]["score"]
        assert float(result["metric_config"]["min_score"]) <= score
        scores[name] = score
    assert scores["span"] < 0


@pytest.mark.parametrize(
    ("name", "unit", "least"),
    [
        ("nats gained per mention", "nats", None),
        ("words of an own task", "score", None),
        ("seconds to it", "seconds", 0),
    ],
)
def test_a_quality_that_is_no_share_is_no_proportion(name: str, unit: str, least: float | None, tmp_path: Path) -> None:
    settings = {"text": "t", "text_hash": "h"}
    rows = [Row("m", "full", "mentions", 1, settings, 64, i, 0, str(i), scores={"gain": 1.5 + i}) for i in range(3)]
    quality = {"score": "gain", "name": name, "higher_is_better": True, "exp": False}
    tasks = {"mentions": {"task": "mentions", "unit": "tokens", "quality": quality}}
    header = {"settings": {"methods": ["full"], "tasks": tasks}, "models": {"m": {"tasks": {"mentions": settings}}}}
    (one,) = numbers_of(Source.of("a", tmp_path, header, rows))
    assert (one.unit, one.bounds) == (unit, (least, None))
    found = _result(one)["metric_config"]
    expected = unit, "-Infinity" if least is None else least, "Infinity"
    assert (found["metric_unit"], found["min_score"], found["max_score"]) == expected


def test_the_schema_can_refuse(run: Path) -> None:
    (one,) = records(run)
    del one["evaluation_results"][0]["score_details"]["score"]
    assert list(Draft7Validator(json.loads(SCHEMA.read_text())).iter_errors(one))


def test_every_eval_ever_has_the_intervals_of_the_curve(run: Path) -> None:
    (record,) = records(run)
    rows = [row for row in read_run(run).rows if row.task == "curve" and row.method == "full"]
    half = summarise(series(rows, {})[0].curve).half_life
    (found,) = (
        one["score_details"]
        for one in record["evaluation_results"]
        if one["metric_config"]["metric_kind"] == "half_life"
        and one["generation_config"]["additional_details"]["method"] == "full"
    )
    assert found["score"] == half.value
    interval = found["uncertainty"]["confidence_interval"]
    assert (interval["lower"], interval["upper"], interval["confidence_level"]) == (half.low, half.high, 0.95)
    beyond = found.get("details", {}).get("value_beyond_lengths_measured", "false")
    assert beyond == str(half.censored).lower()


def test_the_path_is_that_of_the_datastore_and_the_same_again(run: Path, tmp_path: Path) -> None:
    (path,) = export(run, "every-eval-ever", tmp_path / "a")
    (again,) = export(run, "every-eval-ever", tmp_path / "b")
    assert path.relative_to(tmp_path / "a") == again.relative_to(tmp_path / "b")
    assert path.relative_to(tmp_path / "a").parts[:-1] == ("data", "farspan", "local", "demo")


def test_a_run_that_was_continued_replaces_its_record(changed: Callable[[Change], Path]) -> None:
    folder = changed(lambda rows: [row for row in rows if row.repeat < 3])
    (path,) = export(folder, "every-eval-ever")
    lines = (folder / "rows.jsonl").read_text()
    (folder / "rows.jsonl").write_text(lines[: lines.rindex('{"model"')])
    header = read_header(folder)
    later = header["sessions"][0] | {"started": "2030-01-01T00:00:00+00:00"}
    (folder / "run.json").write_text(json.dumps(header | {"sessions": [*header["sessions"], later]}))
    before = path.read_text()
    assert export(folder, "every-eval-ever") == [path]
    assert path.read_text() != before
    assert len(list((folder / "export").rglob("*.json"))) == 1


# the Hub


def test_eval_results_are_read_by_the_hubs_library(run: Path) -> None:
    (path,) = export(run, "hf-eval-results", dataset="someone/texts")
    assert path.parts[-2:] == (".eval_results", "farspan.yaml")
    entries = parse_eval_result_entries(yaml.safe_load(path.read_text()))
    numbers = numbers_of(read_run(run))
    assert [one.value for one in entries] == [pytest.approx(one.value, rel=1e-5) for one in numbers]
    assert {one.dataset_id for one in entries} == {"someone/texts"}
    tasks = [one.task_id for one in entries]
    assert len(set(tasks)) == len(tasks)
    assert "curve_half_life_full" in tasks
    assert any(one.startswith("perplexity_perplexity_256_sinks_window_100") for one in tasks)
    assert all("95 % interval [" in one.notes for one in entries if one.task_id.startswith("perplexity"))


def test_an_interval_that_ends_beyond_the_lengths_measured_is_marked_in_the_eval_results(run: Path) -> None:
    number = replace(numbers_of(read_run(run))[0], low=0.0, high=256.0, memory=MemoryLength(128.0))
    assert "95 % interval [0, 256];" in _notes(number)
    assert "95 % interval [0, >256];" in _notes(replace(number, memory=MemoryLength(128.0, interval_censored=True)))
    below = replace(number, memory=MemoryLength(0.0, below=64.0))
    assert "the value is below 64, the shortest length judged;" in _notes(below)


def test_a_text_of_the_hub_names_the_data_set(changed: Callable[[Change], Path]) -> None:
    folder = changed(lambda rows: [row for row in rows if row.task == "perplexity"])
    text = (folder / "run.json").read_text().replace(CODE, "owner/books")
    (folder / "run.json").write_text(text)
    rows = (folder / "rows.jsonl").read_text().replace(CODE, "owner/books")
    (folder / "rows.jsonl").write_text(rows)
    (path,) = export(folder, "hf-eval-results")
    assert {one["dataset"]["id"] for one in yaml.safe_load(path.read_text())} == {"owner/books"}


@pytest.mark.parametrize(
    ("name", "dataset"),
    [
        ("owner/books", "owner/books"),
        ("owner/books@part-2:test", "owner/books"),
        ("owner/books:test#body", "owner/books"),
        ("shuffled:owner/books", None),
        ("./books", None),
    ],
)
def test_the_data_set_of_a_text_has_no_part_and_no_split(name: str, dataset: str | None, run: Path) -> None:
    number = numbers_of(read_run(run))[0]
    for row in number.member.rows:
        row.settings["target_text"] = row.settings["text"] = name
    if dataset is None:
        with pytest.raises(ValueError, match="name a data set with --dataset OWNER/NAME"):
            _dataset(number)
    else:
        assert _dataset(number) == dataset


def test_a_text_that_the_hub_does_not_have_needs_a_data_set(run: Path) -> None:
    said = refused(farspan("export", run, "--to", "hf-eval-results"))
    assert f"'{CODE}' is not on the Hub" in said
    assert "--dataset OWNER/NAME" in said


@pytest.mark.parametrize("name", ["my texts", "a/b/c", ""])
def test_a_data_set_that_the_hub_cannot_have_is_refused(run: Path, name: str) -> None:
    said = refused(farspan("export", run, "--to", "hf-eval-results", "--dataset", name))
    assert f"--dataset {name!r} cannot be a data set of the Hub: expected OWNER/NAME" in said


# the model card


def test_the_card_has_tables_and_pictures(run: Path, tmp_path: Path, drawn: None) -> None:
    section, *pictures = export(run, "model-card", tmp_path / "card")
    text = section.read_text()
    html = MarkdownIt("commonmark").enable("table").render(text)
    assert html.count("<table>") == 3
    shown = [line.partition("(")[2].rstrip(")") for line in text.splitlines() if line.startswith("![")]
    assert shown == ["curve.png", "perplexity.png"]
    assert all((section.parent / name).stat().st_size > 10_000 for name in shown)
    assert {section.parent / name for name in shown} <= set(pictures)
    for number in numbers_of(read_run(run)):
        value = f"{number.value:,.0f}" if number.unit == "tokens" else written(number.value)
        assert value in html, number.id
    card = ModelCard(f"---\nlicense: mit\n---\n# A model\n\n{text}")
    assert card.data.license == "mit"
    assert "## Long-context memory" in card.text


def test_the_lengths_of_a_card_ascend_where_methods_have_others(changed: Callable[[Change], Path]) -> None:
    folder = changed(lambda rows: [row for row in rows if row.method != "full" or row.length > min(LENGTHS)])
    card = export(folder, "model-card")[0].read_text()
    heads = [line for line in card.splitlines() if line.startswith("| model") and "half-life" not in line]
    assert heads == [f"| model | method | {' | '.join(f'{one:,}' for one in LENGTHS)} |  |"] * 2


def test_the_card_has_the_commands_of_all_sessions_once_each(changed: Callable[[Change], Path], tmp_path: Path) -> None:
    folder = changed(lambda rows: rows)
    header = json.loads((folder / "run.json").read_text())
    (session,) = header["sessions"]
    words = [["curve", "demo", "--out", "a b"], ["perplexity", "demo", "--method", "sinks"]]
    ran = [session | {"command": ["/bin/farspan", *words[number]]} for number in (0, 1, 1)]
    (folder / "run.json").write_text(json.dumps(header | {"sessions": ran}))
    section, *_ = export(folder, "model-card", tmp_path / "card")
    commands = [line.partition(": ")[2] for line in section.read_text().splitlines() if line.startswith("farspan ")]
    assert commands == ["farspan curve demo --out 'a b'", "farspan perplexity demo --method sinks"]


def test_the_card_shows_the_pictures_of_each_task_of_a_run(tmp_path: Path, drawn: None) -> None:
    quality = {"score": "found", "name": "right answers", "higher_is_better": True, "exp": False}
    unit = {"unit": "tokens", "quality": quality}
    texts = {"text": "t", "text_hash": "h"}
    nested = {"protocol": "nested", "compat": False, "target_text": "books", "prefix_text": None}
    rows, tasks, settings = [], {}, {"curve": nested, "passkey": texts, "icl": texts}
    for task, given in settings.items():
        tasks[task] = {"task": task, **unit}
        for length, depth, repeat in product((64, 128), (0.0,) if task == "icl" else (0.0, 0.5), range(2)):
            scores = {"found": 0.5, "copy": 0.9, "control": 0.2, "control_repeat": repeat, "scored": length // 2}
            scores |= {"context": 2 * length + 2, "distance": length}
            about = (given, length, repeat, 0, f"{task} {length} {depth} {repeat}")
            rows.append(Row("m", "full", task, 1, *about, scores=scores, depth=depth))
    header = {"settings": {"methods": ["full"], "tasks": tasks}, "models": {"m": {"tasks": settings}}, "sessions": []}
    section, *pictures = write_model_card(Source.of("a", tmp_path, header, rows), tmp_path)
    assert len(set(pictures)) == len(pictures)
    shown = [line.partition("(")[2].rstrip(")") for line in section.read_text().splitlines() if line.startswith("![")]
    assert shown == ["map.png", "curve.png", "depth-quality.png", "depth-map.png", "quality.png"]


def test_recall_by_distance_is_exported_without_memory_lengths(tmp_path: Path, drawn: None) -> None:
    run = tmp_path / "recall"
    farspan("recall", "demo", "--length", 64, "--points", 2, "--repeats", 2, "--device", "cpu", "--out", run)
    assert {number.name for number in numbers_of(read_run(run))} == {"copied_beyond_guessing_mean_over_depths"}
    section, *pictures = export(run, "model-card")
    assert "### Recall by distance, probe 4+8, builtin\n\nCopied beyond guessing" in section.read_text()
    assert {path.name for path in pictures} == {"recall.png", "recall.svg"}


def test_a_name_cannot_end_the_table_or_add_markup(changed: Callable[[Change], Path]) -> None:
    folder = changed(lambda rows: [replace(row, model="a|b<script>") for row in rows])
    header = json.loads((folder / "run.json").read_text())
    header["models"] = {"a|b<script>": header["models"]["demo"] | {"name": "a|b<script>"}}
    (folder / "run.json").write_text(json.dumps(header))
    text = export(folder, "model-card")[0].read_text()
    assert "<script>" not in text
    assert "a\\|b" in text


# all of them


@pytest.mark.parametrize("to", sorted(FORMATS))
def test_the_name_of_a_text_may_be_no_unicode(to: str, changed: Callable[[Change], Path]) -> None:
    def named(row: Row) -> Row:
        text = "target_text" if row.task == "curve" else "text"
        return replace(row, settings=row.settings | {text: os.fsdecode(b"caf\xe9.txt")})

    if to == "parquet":
        pytest.importorskip("pyarrow")
    folder = changed(lambda rows: [named(row) for row in rows if row.method == "full"])
    header = json.loads((folder / "run.json").read_text())
    for spec, settings in header["models"]["demo"]["tasks"].items():
        header["models"]["demo"]["tasks"][spec] = next(
            named(row).settings for row in read_rows(folder) if row.settings.keys() == settings.keys()
        )
    (folder / "run.json").write_text(json.dumps(header))
    options = {"dataset": "a/b"} if to == "hf-eval-results" else {}
    assert all(path.exists() for path in export(folder, to, **options))


def test_a_run_of_several_models_is_one_record_each(changed: Callable[[Change], Path]) -> None:
    folder = changed(lambda rows: [replace(row, model=name) for name in ("demo", "second") for row in rows])
    header = json.loads((folder / "run.json").read_text())
    header["models"]["second"] = header["models"]["demo"] | {"name": "second"}
    (folder / "run.json").write_text(json.dumps(header))
    assert [one["model_info"]["id"] for one in records(folder)] == ["demo", "second"]
    said = refused(farspan("export", folder, "--to", "hf-eval-results", "--dataset", "a/b"))
    assert "2 models (demo, second)" in said
    done = farspan("export", folder, "--to", "hf-eval-results", "--dataset", "a/b", "--model", "second")
    assert done.exit_code == 0, done.output
    assert "no model" not in refused(farspan("export", folder, "--to", "csv", "--model", "third"))


def test_a_file_is_no_folder_for_an_export(tmp_path: Path) -> None:
    said = refused(farspan("export", tmp_path, "--to", "csv", "--out", "some/b.csv"))
    assert said == "error: --out some/b.csv: got the name of a csv file, expected a folder. Give some/b"


def test_partial_runs_are_exported_with_a_line(changed: Callable[[Change], Path]) -> None:
    folder = changed(lambda rows: [*failing(rows[:2]), *rows[2:-4]])
    done = farspan("export", folder, "--to", "every-eval-ever", "--json")
    assert done.exit_code == 0, done.output
    assert "2 of 32 rows have no result and are left out, first: oom: no memory" in done.stderr
    assert "it lacks 4 of the 36 rows planned for demo." in done.stderr
    assert all(Path(path).exists() for path in last_line(done)["written"])


def test_a_whole_run_lacks_nothing(run: Path) -> None:
    source = read_run(run)
    assert unfinished(source) == ""


@pytest.mark.parametrize("to", [name for name in FORMATS if name not in ("parquet", "csv")])
def test_a_run_that_failed_is_refused(to: str, changed: Callable[[Change], Path]) -> None:
    said = refused(farspan("export", changed(failing), "--to", to))
    assert "none of the 36 rows has a result, first: oom: no memory" in said
    assert said.count("error:") == 1


@pytest.mark.parametrize("to", FORMATS)
def test_an_empty_run_is_refused(to: str, changed: Callable[[Change], Path]) -> None:
    folder = changed(lambda rows: [])
    said = refused(farspan("export", folder, "--to", to))
    assert "holds no rows yet" in said
    assert not (folder / "export").exists()


def test_other_folders_and_formats_are_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("")
    assert "holds no run" in refused(farspan("export", tmp_path / "notes", "--to", "csv"))
    assert f"{run}: model 'x' is unknown; known are" in refused(
        farspan("export", run, "--to", "model-card", "--model", "x")
    )
    assert "format 'xlsx' is unknown; known are parquet, csv, every" in refused(farspan("export", run, "--to", "xlsx"))
    assert "--dataset belongs to" in refused(farspan("export", run, "--to", "csv", "--dataset", "a/b"))
    (tmp_path / "file").write_text("")
    assert "is a file" in refused(farspan("export", run, "--to", "csv", "--out", tmp_path / "file"))


def test_a_file_of_the_users_is_not_replaced(run: Path, tmp_path: Path) -> None:
    mine = tmp_path / "rows.csv"
    mine.write_text("mine")
    assert "rows.csv exists" in refused(farspan("export", run, "--to", "csv", "--out", tmp_path))
    assert mine.read_text() == "mine"


def test_a_missing_package_names_its_extra(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'farspan[data]'" in refused(farspan("export", run, "--to", "parquet"))


def test_a_task_without_a_direction_is_left_out(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"lengths": (64,), "repeats": 2, "out": tmp_path / "run", **MEASURED}
    library.measure(["demo"], ["full"], ["attention:map_bins=0", "perplexity:target_tokens=32"], **settings)
    notices: list[str] = []
    (record,) = records(tmp_path / "run", notice=notices.append)
    assert {one["metric_config"]["metric_kind"] for one in record["evaluation_results"]} == {"perplexity"}
    assert any("attention" in line for line in notices)


# lm-evaluation-harness


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("curves") / "curve"
    settings: dict[str, Any] = {"lengths": (32, 64), "repeats": 3, "out": folder, **MEASURED}
    library.measure([library.load("demo", dtype="float32", device="cpu")], ["full"], ["curve"], **settings)
    return folder


@pytest.fixture(scope="module")
def tasks(curve: Path) -> Path:
    """The folder of tasks of that run."""
    done = farspan("export", curve, "--to", "lm-eval")
    assert done.exit_code == 0, done.output
    return curve / "export" / "lm_eval"


def recorded(folder: Path, half: str, length: int, score: str) -> float:
    rows = [row for row in read_rows(folder) if row.length == length]
    return sum(row.scores[f"{half}{score}"] for row in rows) / len(rows)


@pytest.mark.parametrize("half", ["copy", "control"])
@pytest.mark.parametrize("length", [32, 64])
def test_the_requests_have_the_log_likelihoods_of_the_rows(half: str, length: int, curve: Path, tasks: Path) -> None:
    """What the harness does with a request, done naively: the model's log-probabilities of the target's tokens."""
    code = runpy.run_path(str(tasks / "farspan_curve.py"))
    lm = library.load("demo", dtype="float32", device="cpu")
    nats, right = [], []
    for document in code["dataset"](half=half, length=length, version=3)["test"]:
        before, whole = (
            lm.tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (document["context"], document["context"] + document["target"])
        )
        found, hits = nats_after(lm.model, before, whole[len(before) :])
        likelihood = -float(found.sum()), bool(hits.all())
        for name, value in code["results"](document, [likelihood]).items():
            (nats if name == "nats" else right).append(value)
    assert len(nats) == 3
    assert sum(nats) / 3 == pytest.approx(recorded(curve, half, length, "_nats"), rel=0.02)
    assert sum(right) / len(right) == pytest.approx(recorded(curve, half, length, ""), abs=0.25)


@pytest.mark.parametrize("half", ["copy", "control"])
@pytest.mark.parametrize("length", [32, 64])
def test_a_single_token_is_scored_as_one(half: str, length: int, tasks: Path) -> None:
    """The harness moves white space at the end of a context to the target."""
    code = runpy.run_path(str(tasks / "farspan_curve.py"))
    tokenizer = library.load("demo", weights=False).tokenizer
    documents = [one for one in code["dataset"](half=half, length=length)["test"] if not one["tokens"]]
    assert len(documents) == 3 * 8
    assert len({one["context"] for one in documents}) == 3 * 8
    for one in documents:
        assert one["context"] == one["context"].rstrip()
        before, whole = (len(tokenizer(text)["input_ids"]) for text in (one["context"], one["context"] + one["target"]))
        assert whole == before + 1


def test_texts_that_are_not_tokenised_again_as_before_are_announced(curve: Path, tmp_path: Path) -> None:
    lm = library.load("demo", dtype="float32", device="cpu")
    what = MEASURED | {"text": f"shuffled:{MEASURED['text']}", "lengths": (32,), "repeats": 2}
    library.measure([lm], ["full"], ["curve"], **what, out=tmp_path / "run")
    done = farspan("export", tmp_path / "run", "--to", "lm-eval")
    assert re.match(r"only \d of 4 contexts are tokenised again as the run's tokens", done.stderr)
    assert farspan("export", curve, "--to", "lm-eval").stderr == ""


def test_the_harness_measures_the_curve(curve: Path, tasks: Path, tmp_path: Path) -> None:
    """Needs lm-evaluation-harness, in this environment or in that of the interpreter named by FARSPAN_LM_EVAL."""
    python = os.environ.get("FARSPAN_LM_EVAL") or (sys.executable if find_spec("lm_eval") else None)
    if python is None:
        pytest.skip("lm_eval is not installed, and FARSPAN_LM_EVAL names no interpreter that has it")
    model = f"pretrained={folder_of('demo')},max_length=256,dtype=float32"
    command = [python, "-m", "lm_eval", "--include_path", str(tasks), "--tasks", "farspan_curve", "--model", "hf"]
    command += ["--model_args", model, "--device", "cpu", "--batch_size", "8", "--output_path", str(tmp_path)]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, timeout=280)
    (path,) = tmp_path.rglob("results_*.json")
    found = json.loads(path.read_text())["results"]
    for half in ("copy", "control"):
        for length in (32, 64):
            of = found[f"farspan_curve_{half}_{length}"]
            assert of["nats,none"] == pytest.approx(recorded(curve, half, length, "_nats"), rel=0.02)
            assert of["acc,none"] == pytest.approx(recorded(curve, half, length, ""), abs=0.25)


def test_lm_eval_takes_one_curve_whose_text_is_there(curve: Path, tmp_path: Path) -> None:
    def copied(name: str, old: str, new: str) -> Path:
        shutil.copytree(curve, tmp_path / new)
        path = tmp_path / new / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
        return tmp_path / new

    known = read_rows(curve)[0].settings["target_hash"]
    assert "target_hash was '1111'" in refused(farspan("export", copied("run.json", known, "1111"), "--to", "lm-eval"))
    target = read_rows(curve)[0].scores["target"]
    other = copied("rows.jsonl", target, "2222")
    assert "the text of repeat 0 at 32 tokens is not made again" in refused(farspan("export", other, "--to", "lm-eval"))


def test_lm_eval_needs_a_curve(changed: Callable[[Change], Path]) -> None:
    folder = changed(lambda rows: [row for row in rows if row.task == "perplexity"])
    assert "holds 0 forgetting curves" in refused(farspan("export", folder, "--to", "lm-eval"))
