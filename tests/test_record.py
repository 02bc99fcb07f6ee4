"""Rows on disk: what is written is read again, whatever ends the process that writes."""

import json
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from farspan.record import Row, Run, current, default_folder, latest, read_examples, read_header, read_rows
from farspan.record.run import _alike
from farspan.schema import FORM, check_row

from tiny import files_no_larger_than

SETTINGS = {"task": "curve", "seed": 0, "lengths": (8, 16)}
IDENTITY = {"name": "tiny", "dtype": "float32", "fingerprint": "abc"}
SCORES = {"copy": 0.5, "control": 0.25, "control_repeat": 1, "scored": 4, "context": 18, "copy_nats": None}
EXAMPLE = {
    "model": "tiny",
    "what": "nested, book",
    "length": 8,
    "repeat": 0,
    "parts": [["separator", ["<s>"]], ["asked", ["a", "b"]]],
    "scored": 1,
    "example": "e0",
    "task": "curve",
    "settings": {},
}
APPENDS_FOREVER = """
import itertools, sys
from farspan.record import Row, Run

with Run.open(sys.argv[1], {"task": "curve"}) as run:
    for repeat in itertools.count(len(run.rows)):
        scores = {"hits": "ab" * 5000}
        run.append(Row("tiny", "full", "own", 1, {}, 8, repeat, 0, f"example {repeat}", scores=scores))
"""


def row(repeat: int) -> Row:
    return Row(
        model="tiny",
        method="full",
        task="curve",
        version=1,
        settings={"protocol": "nested", "target_text": "book"},
        length=8,
        repeat=repeat,
        seed=0,
        example=f"example {repeat}",
        scores=SCORES,
        seconds=0.25,
    )


def made(folder: Path, count: int = 3) -> Path:
    """The rows.jsonl of a run of some rows."""
    with Run.open(folder, SETTINGS) as run:
        for repeat in range(count):
            run.append(row(repeat))
    return folder / "rows.jsonl"


def test_what_is_appended_is_read_again(tmp_path: Path) -> None:
    made(tmp_path / "run")
    assert read_rows(tmp_path / "run") == [row(0), row(1), row(2)]


@pytest.mark.parametrize(
    ("recorded", "now", "alike"),
    [
        ([6.98, 2.16], [7.263, 1.944], True),  # of one model under two attention kernels in bf16
        ([6.98, 2.16], [6.28, 2.16], False),
        ([None, 2.16], [7.0, 2.16], True),
        (None, [7.0], True),
    ],
)
def test_a_server_is_another_one_if_it_scores_differently_beyond_rounding(
    recorded: list[float | None] | None, now: list[float | None], alike: bool
) -> None:
    assert _alike(recorded, now) == alike


def test_a_row_is_on_disk_as_soon_as_it_is_appended(tmp_path: Path) -> None:
    with Run.open(tmp_path / "run", SETTINGS) as run:
        run.append(row(0))
        assert read_rows(tmp_path / "run") == [row(0)]


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    made(tmp_path / "run")
    with Run.open(tmp_path / "run", SETTINGS) as run:
        assert run.rows == [row(0), row(1), row(2)]
        run.append(row(3))
    assert read_rows(tmp_path / "run") == [row(repeat) for repeat in range(4)]


def test_settings_and_every_start_are_recorded_with_command_and_versions(tmp_path: Path) -> None:
    made(tmp_path / "run")
    made(tmp_path / "run", 0)
    assert read_header(tmp_path / "run")["settings"] == {"task": "curve", "seed": 0, "lengths": [8, 16]}
    sessions = read_header(tmp_path / "run")["sessions"]
    assert len(sessions) == 2
    assert sessions[0]["command"] == sys.argv
    assert {"started", "python", "packages", "platform", "cores", "threads", "git"} <= sessions[0].keys()
    assert sessions[0]["packages"].keys() >= {"farspan", "torch", "transformers"}


def test_the_key_of_a_row_is_what_was_measured_not_how_it_went() -> None:
    assert row(0).key == replace(row(0), seconds=9.0, status="oom").key
    assert len({row(0).key, row(1).key, replace(row(0), length=9).key, replace(row(0), method="sinks").key}) == 4


# what a kill leaves


@pytest.mark.parametrize("kept", [1, 40, -1], ids=["one byte", "some bytes", "all but the newline"])
def test_a_torn_last_line_is_dropped(tmp_path: Path, kept: int) -> None:
    path = made(tmp_path / "run")
    *whole, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole) + last[:kept])
    assert read_rows(tmp_path / "run") == [row(0), row(1)]
    with Run.open(tmp_path / "run", SETTINGS) as run:
        run.append(row(2))
    assert read_rows(tmp_path / "run") == [row(0), row(1), row(2)]


def test_reading_does_not_touch_a_torn_last_line(tmp_path: Path) -> None:
    path = made(tmp_path / "run")
    path.write_bytes(path.read_bytes()[:-20])
    before = path.read_bytes()
    read_rows(tmp_path / "run")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "damage", ['{"model": "ti', "[]", "{}", '{"model": "tiny", "colour": "red"}', '{"model": "tiny"}', "\x00\x00"]
)
def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path, damage: str) -> None:
    path = made(tmp_path / "run")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], damage + "\n", *lines[1:]]))
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2 is not a row"):
        read_rows(tmp_path / "run")


def test_a_run_with_a_damaged_line_is_left_as_it_is_and_unlocked(tmp_path: Path) -> None:
    path = made(tmp_path / "run")
    good = path.read_bytes()
    path.write_bytes(b"damaged\n" + good)
    with pytest.raises(ValueError, match="line 1 is not a row"):
        Run.open(tmp_path / "run", SETTINGS)
    assert path.read_bytes() == b"damaged\n" + good
    path.write_bytes(good)
    with Run.open(tmp_path / "run", SETTINGS) as run:
        assert len(run.rows) == 3


def test_a_killed_process_leaves_a_run_that_can_be_read_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "run" / "rows.jsonl"
    for more in (1, 2):  # the second process continues the run of the first
        wanted = (path.stat().st_size if path.exists() else 0) + 300_000
        process = subprocess.Popen([sys.executable, "-c", APPENDS_FOREVER, str(tmp_path / "run")])
        try:
            deadline = time.monotonic() + 60
            while not (path.exists() and path.stat().st_size > wanted):
                assert process.poll() is None, "the process ended by itself"
                assert time.monotonic() < deadline, "the process wrote nothing"
                time.sleep(0.01)
        finally:
            process.kill()
        assert process.wait() == -signal.SIGKILL
        rows = read_rows(tmp_path / "run")
        assert [one.repeat for one in rows] == list(range(len(rows)))
        assert len(rows) >= more * 25
    with Run.open(tmp_path / "run", {"task": "curve"}) as run:
        assert run.rows == rows


def test_a_start_that_ended_before_run_json_does_not_block_the_next(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / ".farspan-part-12345678").mkdir()
    (tmp_path / ".farspan-part-12345678" / "lock").touch()
    (tmp_path / ".farspan-part-12345678" / "run.json").write_text('{"settings"')
    made(tmp_path)
    assert len(read_rows(tmp_path)) == 3


# a full disk


@pytest.mark.parametrize("room", [0, 50])  # bytes
def test_a_full_disk_leaves_the_rows_before_and_is_named_with_their_number_and_file(tmp_path: Path, room: int) -> None:
    path = made(tmp_path / "run")
    before = path.read_bytes()
    said = "the 3 rows before it are safe: free space and repeat the command"
    with Run.open(tmp_path / "run", SETTINGS) as run:
        with files_no_larger_than(len(before) + room), pytest.raises(OSError, match=said) as raised:
            run.append(row(3))
        assert raised.value.filename == str(path)
        assert raised.value.errno
        assert path.read_bytes() == before
        assert len(run.rows) == 3
        run.append(row(3))  # there is room again
    assert read_rows(tmp_path / "run") == [row(repeat) for repeat in range(4)]


def test_a_disk_full_at_the_start_damages_nothing_and_does_not_block_the_repeated_command(tmp_path: Path) -> None:
    for count in (0, 3):
        before = read_header(tmp_path / "run") if count else None
        with files_no_larger_than(10), pytest.raises(OSError, match="File too large"):
            Run.open(tmp_path / "run", SETTINGS)
        assert before is None or read_header(tmp_path / "run") == before
        made(tmp_path / "run")
        assert len(read_rows(tmp_path / "run")) == count + 3


def test_a_row_with_nan_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with Run.open(tmp_path / "run", SETTINGS) as run, pytest.raises(ValueError, match="JSON"):
        run.append(replace(row(0), scores={"copy": float("nan")}))
    assert (tmp_path / "run" / "rows.jsonl").read_bytes() == b""


# what is refused


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (SETTINGS | {"seed": 1}, r"other settings: seed was 0, now 1\. Repeat .* another folder \(out\)"),
        ({"task": "curve", "lengths": (8, 16), "depth": 2}, r"depth was None, now 2; seed was 0, now None"),
    ],
)
def test_other_settings_are_refused_with_both_values_and_the_run_is_left_as_it_was(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    made(tmp_path / "run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(ValueError, match=said):
        Run.open(tmp_path / "run", settings)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


@pytest.mark.parametrize(
    ("before", "now", "lengths", "last", "grows"),
    [
        (4, 8, [8], 3, True),
        (8, 4, [8], 4, False),
        (8, 4, [8], 3, True),  # of a command that ended before it measured more
        (None, 11, [8], 9, True),  # 10 without a number
        (None, 9, [8], 9, False),
        (4, None, [8], 3, True),
        (11, None, [8], 10, False),
        (4, 8, "auto", 3, False),
        (4, 8, None, 3, False),
    ],
)
def test_a_run_with_given_lengths_takes_more_repeats(
    before: int | None, now: int | None, lengths: Any, last: int, grows: bool, tmp_path: Path
) -> None:
    first, then = (SETTINGS | {"lengths": lengths, "repeats": count} for count in (before, now))
    with Run.open(tmp_path, first) as run:
        run.append(replace(row(last), length=8))
    other = pytest.raises(ValueError, match=f"repeats was {before}, now {now}")
    with other:
        Run.open(tmp_path, then)
    with pytest.raises(ValueError, match="add others in one process, without --shard" if grows else "repeats was"):
        Run.open(tmp_path, then, (1, 2), may_grow=True)
    with nullcontext() if grows else other, Run.open(tmp_path, then, may_grow=True) as run:
        assert read_header(tmp_path)["settings"]["repeats"] == now
        assert len(run.rows) == 1


def test_a_run_takes_more_lengths_below_its_longest(tmp_path: Path) -> None:
    first = SETTINGS | {"lengths": [8, 16], "repeats": 4}
    with Run.open(tmp_path, first) as run:
        run.append(replace(row(0), length=8))
    for other in ([8, 16, 32], [16], [4, 8]):
        added = r"lengths was \[8, 16\], now \[.*\(more repeats, and lengths below its longest, may be added\)"
        with pytest.raises(ValueError, match=added):
            Run.open(tmp_path, first | {"lengths": other}, may_grow=True)
    with Run.open(tmp_path, first | {"lengths": (4, 8, 12, 16), "repeats": 5}, may_grow=True):
        settings = read_header(tmp_path)["settings"]
    assert (settings["lengths"], settings["repeats"]) == ([4, 8, 12, 16], 5)
    with Run.open(tmp_path, first, may_grow=True):  # nothing more was measured
        assert read_header(tmp_path)["settings"]["lengths"] == [8, 16]


def test_the_last_row_of_a_repeat_counts_though_its_example_changed(tmp_path: Path) -> None:
    old, new = row(0), replace(row(0), example="other")
    with Run.open(tmp_path, SETTINGS) as run:
        for one in (old, row(1), new):
            run.append(one)
        assert run.of(old.model, old.method, old.measurement) == [new, row(1)]
    assert current(run.rows) == read_rows(tmp_path) == [row(1), new]


def test_a_run_whose_form_has_no_version_is_continued(tmp_path: Path) -> None:
    path = made(tmp_path / "run").with_name("run.json")
    header = json.loads(path.read_text())
    assert header.pop("version") == FORM
    path.write_text(json.dumps(header))
    assert len(read_rows(tmp_path / "run")) == 3
    made(tmp_path / "run")


def test_a_run_of_a_newer_form_is_refused(tmp_path: Path) -> None:
    path = made(tmp_path / "run").with_name("run.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": FORM + 1}))
    for read in (read_rows, lambda folder: Run.open(folder, SETTINGS)):
        with pytest.raises(ValueError, match=r"got version 3, expected at most 2: a newer farspan wrote it\. "):
            read(tmp_path / "run")


def test_settings_are_the_same_after_their_way_through_json(tmp_path: Path) -> None:
    made(tmp_path / "run")
    made(tmp_path / "run")  # the lengths are a tuple here and a list there
    assert len(read_rows(tmp_path / "run")) == 6


def test_another_model_of_the_same_name_is_refused(tmp_path: Path) -> None:
    with Run.open(tmp_path / "run", SETTINGS) as run:
        run.add_model(IDENTITY)
        run.append(row(0))
    with (
        Run.open(tmp_path / "run", SETTINGS) as run,
        pytest.raises(ValueError, match=r"weights of tiny have changed .*fingerprint was 'abc', now 'xyz'"),
    ):
        run.add_model(IDENTITY | {"fingerprint": "xyz"})
    assert read_header(tmp_path / "run")["models"] == {"tiny": IDENTITY}


def test_the_same_model_and_a_second_one_are_taken(tmp_path: Path) -> None:
    other = IDENTITY | {"name": "other"}
    with Run.open(tmp_path / "run", SETTINGS) as run:
        for identity in (IDENTITY, IDENTITY, other):
            run.add_model(identity)
    assert read_header(tmp_path / "run")["models"] == {"tiny": IDENTITY, "other": other}


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with Run.open(tmp_path / "run", SETTINGS) as run:
        with pytest.raises(ValueError, match="is being written by another process"):
            Run.open(tmp_path / "run", SETTINGS)
        run.append(row(0))
    made(tmp_path / "run", 0)  # free again
    assert read_rows(tmp_path / "run") == [row(0)]


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"is not empty and holds no run .*\(out\)"):
        Run.open(tmp_path, SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_rows_without_their_run_json_are_refused(tmp_path: Path) -> None:
    made(tmp_path / "run")
    (tmp_path / "run" / "run.json").unlink()
    with pytest.raises(ValueError, match=r"no run\.json"):
        Run.open(tmp_path / "run", SETTINGS)


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    made(tmp_path)
    assert len(read_rows(tmp_path)) == 3


def test_a_folder_without_a_run_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no run \(no run\.json\)"):
        read_rows(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [('{"settings', "is damaged.*Restore it, or choose another"), ('{"lr": 1}', "not written by farspan")],
)
def test_a_run_json_that_is_damaged_or_of_another_program_is_named(tmp_path: Path, content: str, reason: str) -> None:
    (tmp_path / "run.json").write_text(content)
    for read in (read_rows, lambda folder: Run.open(folder, SETTINGS)):
        with pytest.raises(ValueError, match=rf"run\.json .*{reason}"):
            read(tmp_path)


def test_rows_are_plain_json_that_other_programs_read(tmp_path: Path) -> None:
    lines = made(tmp_path / "run").read_text().splitlines()
    assert json.loads(lines[1])["repeat"] == 1
    assert json.loads(lines[1])["scores"] == SCORES


def test_a_run_without_rows_is_begun_anew_with_other_settings(tmp_path: Path) -> None:
    with Run.open(tmp_path, {"text": "a typo"}) as run:
        run.add_model({"name": "m", "fingerprint": "1"})
    with Run.open(tmp_path, {"text": "corrected"}) as run:
        run.add_model({"name": "m", "fingerprint": "2"})
    assert read_header(tmp_path)["settings"] == {"text": "corrected"}


def test_the_default_folder_is_the_same_for_the_same_command_only() -> None:
    assert default_folder("curve", ["a/b"], {"seed": 0}) == default_folder("curve", ["a/b"], {"seed": 0})
    assert default_folder("curve", ["a/b"], {"seed": 0}) != default_folder("curve", ["a/b"], {"seed": 1})
    assert default_folder("curve", ["a/b"], {}).name.startswith("curve-b-")


# damaged, edited and foreign files


def test_a_share_of_another_task_above_one_is_refused() -> None:
    own = Row("m", "full", "own", 2, {}, 300, 0, 0, "e", scores={"right": 0.5, "pairs": 1.0, "nats": {"pairs": [3.0]}})
    assert check_row(asdict(own), {})["scores"]["pairs"] == 1.0
    with pytest.raises(ValueError, match=r"scores\.pairs: got 3\.0, expected less than or equal to 1"):
        check_row(asdict(replace(own, scores={"pairs": 3.0})), {})
    with pytest.raises(ValueError, match=r"scores\.token_hits: got -1\.0, expected greater than or equal to 0"):
        check_row(asdict(replace(own, task="needle", scores={"right": 0.5, "token_hits": -1.0})), {})


def test_a_torn_last_example_is_dropped_before_the_next_is_added(tmp_path: Path) -> None:
    with Run.open(tmp_path / "run", SETTINGS) as run:
        run.add_example(EXAMPLE, {"e0"})
        run.add_example(EXAMPLE | {"what": "other"}, {"e0"})
    path = tmp_path / "run" / "examples.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    for _ in range(2):
        with Run.open(tmp_path / "run", SETTINGS) as run:
            run.add_example(EXAMPLE | {"what": "other"}, {"e0"})
        assert read_examples(tmp_path / "run") == [EXAMPLE, EXAMPLE | {"what": "other"}]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("scores", None, "scores: got None"),
        ("scores", [], "scores: got []"),
        ("scores", {}, "scores: copy is missing"),
        ("settings", None, "settings: got None"),
        ("settings", {}, "settings.protocol: is missing"),
        ("length", "64", "length: got '64'"),
        ("length", None, "length: got None"),
        ("length", -5, "length: got -5"),
        ("length", 10**30, "length: got 1000"),
        ("length", 64.0, "length: got 64.0"),
        ("repeat", "0", "repeat: got '0'"),
        ("depth", "0", "depth: got '0'"),
        ("depth", 1.5, "depth: got 1.5"),
        ("model", ["m"], "model: got ['m']"),
        ("status", 5, "status: got 5"),
        ("seconds", float("nan"), "seconds: got nan"),
        ("colour", "red", "colour: is not a field"),
        ("scores.copy", 7.0, "scores.copy: got 7.0, expected less than or equal to 1"),
        ("scores.copy", True, "scores.copy: got True"),
        ("scores.scored", 0, "scores.scored: got 0"),
        ("scores.copy_hits", "zz", "scores.copy_hits: got 'zz'"),
        ("scores.copy_hits", "", "scores.copy_hits: got 0 bits, expected one for each of 4"),
        ("scores.control_repeat", None, "scores: control_repeat is missing"),
        ("scores.copy_nats", float("inf"), "scores.copy_nats: got inf"),
        ("settings.target_text", 3, "settings.target_text: got 3"),
    ],
)
def test_a_wrong_value_in_a_row_is_named_with_file_line_and_field(
    tmp_path: Path, field: str, value: object, said: str
) -> None:
    path = made(tmp_path / "run")
    lines = path.read_text().splitlines(keepends=True)
    values = json.loads(lines[1])
    *outer, name = field.split(".")
    (values[outer[0]] if outer else values)[name] = value
    path.write_text("".join([lines[0], json.dumps(values) + "\n", *lines[2:]]))
    for read in (read_rows, lambda folder: Run.open(folder, SETTINGS)):
        with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2 is not a row: {re.escape(said)}"):
            read(tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"models": []}, r"models: got \[\]"),
        ({"models": {"m": []}}, r"models.m: got \[\]"),
        ({"models": {"m": {"name": "m", "trained_length": "64"}}}, "models.m.trained_length: got '64'"),
        ({"models": {"m": {"name": "m", "characters_per_token": {"a": 0}}}}, "characters_per_token.a: got 0"),
        ({"sessions": {}}, "sessions: got {}"),
        ({"sessions": [{"command": 5}]}, "sessions.0.command: got 5"),
        ({"settings": None}, "settings: got None"),
    ],
)
def test_a_wrong_value_in_run_json_is_named(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = made(tmp_path / "run").with_name("run.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    for read in (read_header, read_rows, lambda folder: Run.open(folder, SETTINGS)):
        with pytest.raises(ValueError, match=rf"run\.json is damaged: .*{said}"):
            read(tmp_path / "run")


@pytest.mark.parametrize("name", ["rows.jsonl", "run.json", "examples.jsonl"])
@pytest.mark.parametrize(
    "content", [b"[" * 10**5, b"\xff", b"9" * 5000, b'{"a": ' * 200 + b"1" + b"}" * 200, b"null", b"\x00"]
)
def test_bytes_that_are_no_values_are_a_value_error_that_names_the_file(
    tmp_path: Path, name: str, content: bytes
) -> None:
    made(tmp_path / "run")
    (tmp_path / "run" / name).write_bytes(content + b"\n\n")
    with pytest.raises(ValueError, match=rf"{re.escape(name)}(, line 1)? (is|was) "):
        read_header(tmp_path / "run"), read_rows(tmp_path / "run"), read_examples(tmp_path / "run")


def test_files_that_farspan_writes_are_not_written_through_links(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("years of work")
    made(tmp_path / "run")
    (tmp_path / "run" / "examples.jsonl").symlink_to(tmp_path / "mine")
    (tmp_path / "mine").write_text("")
    with Run.open(tmp_path / "run", SETTINGS) as run:
        run.add_example(EXAMPLE, {"e0"})
    assert (tmp_path / "mine").read_text() == ""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "rows.jsonl").symlink_to(tmp_path / "mine")
    (tmp_path / "other" / "run.json").write_text((tmp_path / "run" / "run.json").read_text())
    with pytest.raises(ValueError, match=r"rows\.jsonl is not a regular file"):
        Run.open(tmp_path / "other", SETTINGS)


def test_a_run_that_ends_by_an_error_before_its_first_row_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for folder in (tmp_path / "there", tmp_path / "deep" / "run"):
        with pytest.raises(KeyError), Run.open(folder, SETTINGS):
            raise KeyError
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["there"]

    def fails(run: Run) -> None:
        run.append(row(0))
        raise KeyError

    with pytest.raises(KeyError), Run.open(tmp_path / "run", SETTINGS) as run:
        fails(run)
    assert read_rows(tmp_path / "run") == [row(0)]


def test_refused_rows_of_two_questions_of_one_task_are_both_kept() -> None:
    refused = replace(row(0), status="refused", example="curve refused", scores={})
    other = replace(refused, settings={"protocol": "paper", "target_text": "book"})
    assert latest([refused, other, refused]) == [refused, other]


def test_a_length_without_time_that_was_then_refused_and_then_measured_has_its_row() -> None:
    refused = replace(row(0), status="refused", example="curve refused", scores={})
    assert latest([replace(refused, status="budget"), refused, row(0)]) == [row(0)]


def test_the_rows_of_one_model_and_method_are_found_without_the_others(tmp_path: Path) -> None:
    with Run.open(tmp_path / "run", SETTINGS) as run:
        run.append(replace(row(0), status="oom"))
        run.append(replace(row(0), method="sinks"))
        run.append(row(0))
        assert run.of("tiny", "full", row(0).measurement) == [row(0)]
        assert run.of("tiny", "other", row(0).measurement) == []


def test_rows_of_another_version_of_a_task_are_refused_with_both_versions(tmp_path: Path) -> None:
    made(tmp_path / "run")
    with Run.open(tmp_path / "run", SETTINGS) as run:
        run.refuse_other_versions({"curve": 1, "perplexity": 9})
        with pytest.raises(ValueError, match=r"holds rows of version 1 .*version 2"):
            run.refuse_other_versions({"curve": 2})
