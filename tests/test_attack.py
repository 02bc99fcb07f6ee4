"""A sample of the attacks of `make test-attack`: wrong inputs, kills, little room, hostile pages, damaged files.

All run in forks of one process that has imported everything (tests/attack); each test is one kind of attack. Pictures
are not drawn here.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browser import chromium

from attack import fuzz, hostile, kills, limits, wrong
from attack.harness import Command, End, Stage, Zygote, judge, rows_of

pytest.importorskip("pyarrow")

OF_EACH = int(os.environ.get("FARSPAN_ATTACK_SAMPLE", "2"))  # inputs of each table
INPUTS = wrong.sample(wrong.all_inputs(), OF_EACH)
KILLED = ("curve auto bf16", "curve probe", "train smt", "index")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Zygote(drawn=False) as zygote:
        yield Stage(zygote, tmp_path_factory.mktemp("attack") / "stage")


@pytest.mark.parametrize("one", INPUTS, ids=lambda one: one.id)
def test_a_wrong_input_is_refused_in_a_line(stage: Stage, one: wrong.Input) -> None:
    end, found = wrong.attack(stage, one)
    assert not found, end.stderr


@pytest.mark.parametrize("name", KILLED)
def test_a_command_that_is_killed_and_repeated_ends_as_if_it_never_was(stage: Stage, name: str) -> None:
    killed = next(one for one in kills.COMMANDS if one.name == name)
    _, found = kills.attack(stage, kills.Series(killed, 0), timed=False)
    assert not found


def test_two_shards_that_are_killed_beside_each_other_end_with_the_rows_of_one_process(stage: Stage) -> None:
    hits, found = kills.attack_shards(stage, replace(kills.BESIDE[0], kills=4))
    assert not found
    assert hits >= 4


def test_a_full_disk_is_named_and_the_command_goes_on_where_there_is_room(stage: Stage) -> None:
    if not limits.can_mount():
        pytest.skip("a small disk needs root and mount")
    one = next(one for one in limits.all_limits() if one.name == "perplexity, disk of 25%")
    assert not limits.attack(stage, one)


@pytest.mark.parametrize("name", ["perplexity, two in one folder", "train smt, two in one folder"])
def test_of_two_in_one_folder_one_is_refused_and_the_other_ends_well(stage: Stage, name: str) -> None:
    assert not limits.attack(stage, next(one for one in limits.all_limits() if one.name == name))


def test_a_page_of_hostile_texts_runs_and_loads_nothing(stage: Stage) -> None:
    with chromium() as browser:
        assert not hostile.attack(stage, hostile.Hostile("curve", "polyglot"), browser)


@pytest.mark.parametrize("job", fuzz.sample(5), ids=lambda job: job.target)
def test_a_reader_gives_a_value_or_a_value_error(stage: Stage, job: fuzz.Job) -> None:
    _, found = fuzz.attack(stage, job)
    assert not found


# the harness itself


def ended(code: int = 2, stderr: str = "", stdout: str = "") -> End:
    return End(("curve",), code, stdout, stderr)


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (ended(1, "Traceback (most recent call last):\n  File x\nKeyError: 'a'\n"), "traceback"),
        (ended(0), "silent"),
        (ended(-9), "crash"),
        (ended(2, "error: [Errno 28] No space left on device"), "unclear"),
        (ended(2, "error: Expecting value: line 1 column 1 (char 0)"), "unclear"),
        (ended(2, "error: 7 is wrong"), "no fix"),
        (ended(2, "error: something is wrong; use another"), "no name"),
        (ended(2, ""), "unclear"),
        (ended(2, "error: run \x1b[31m is 7; use another"), "escape"),
    ],
)
def test_the_judge_sees_what_is_wrong(end: End, kind: str) -> None:
    assert kind in [one.kind for one in judge(end, expect="refused", names=("7",))]


def test_the_judge_lets_a_clear_refusal_pass() -> None:
    end = ended(2, "error: --points is 7, more than the 4 lengths there are; use --points 4\n")
    assert judge(end, expect="refused", names=("--points",)) == []


def test_rows_that_are_lost_twice_or_other_are_seen() -> None:
    before = {("a",): [{"copy": 1.0}], ("b",): [{"copy": 0.5}]}
    assert wrong.different(before, {("a",): [{"copy": 1.0}], ("b",): [{"copy": 0.5}]}) == []
    assert [one.detail for one in wrong.different(before, {("a",): [{"copy": 0.0}, {"copy": 1.0}]})] == [
        "1 rows are missing, 0 are of other examples",
        "1 rows are there twice",
        "1 of 2 rows have other scores",
    ]


def test_rows_are_counted_beside_a_link_to_nothing_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"length": 8}\n{"len')
    (tmp_path / "rows-1.jsonl").symlink_to("/nothere")
    (tmp_path / "rows-2.jsonl").mkdir()
    assert rows_of(tmp_path) == [{"length": 8}]


def test_there_are_enough_attacks() -> None:
    known = list(wrong.all_inputs())
    assert len(known) > 1500
    assert len({one.id for one in known}) == len(known)
    assert sum(1 for _ in kills.sequences()) * 3 > 300


def test_a_kill_comes_where_it_is_asked_for(stage: Stage) -> None:
    with stage.copy() as here:
        (end,) = stage.zygote.run(Command(kills.PERPLEXITY, here, kill={"operation": 3}))
        assert end.code == -9
        (end,) = stage.zygote.run(Command(kills.PERPLEXITY, here, limits={"file": 700}))
        assert end.code == -25
