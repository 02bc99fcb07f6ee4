"""Shards: a run's work dealt to processes that do not talk to each other and write one folder."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from farspan.cli import app
from farspan.demo import run_demo
from farspan.lm import LM, wrap
from farspan.measuring import dealing, sharding
from farspan.measuring.dealing import BANDS, LONG, REREAD, CellCost, deal
from farspan.measuring.grid import measure
from farspan.measuring.loop import Watch
from farspan.measuring.result import Measured
from farspan.measuring.sharding import chosen_shard, parse_shard
from farspan.record import Row, Run, latest, read_header, read_rows
from farspan.terminal import Terminal

from tiny import tiny_model

METHODS = ["full", "sinks:window=12,sinks=2"]
TASKS = ["perplexity:target_tokens=8", "curve"]
SHAPES = (  # (10^9 weights, layers, hidden size) of 14 models from 0.1 to 8 billion weights
    *((0.1, 30, 576), (0.5, 24, 896), (1.1, 22, 2048), (1.5, 28, 1536), (2.7, 32, 2560), (3.8, 32, 3072)),
    *((6.1, 32, 4096), (6.7, 32, 4096), (6.7, 32, 4096), (7.2, 32, 4096), (7.2, 32, 4096)),
    *((8.0, 32, 4096), (8.0, 32, 4096), (8.2, 36, 4096)),
)


@pytest.fixture(autouse=True)
def _no_array(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ID", "COUNT", "MIN", "STEP"):
        monkeypatch.delenv(f"SLURM_ARRAY_TASK_{name}", raising=False)


# dealing


def cost(lengths: Sequence[int], per_token: float, per_pair: float, scored: int) -> float:
    """A text is read once; `scored` tokens are scored at each length; 0: as many as were read."""

    def forward(before: int, tokens: int) -> float:
        return per_token * tokens + per_pair * tokens * (before + tokens / 2)

    return forward(0, max(lengths)) + sum(2 * forward(length, scored or length) for length in lengths)


def cell(name: str, lengths: Sequence[int], repeats: int, *how: Any) -> CellCost:
    """A task with the costs of `cost`."""
    alone = tuple(cost([length], *how) for length in lengths)
    up_to = tuple(cost(lengths[: at + 1], *how) for at in range(len(lengths)))
    return CellCost((name, "full", "curve"), (up_to[-1],) * repeats, tuple(lengths), alone, up_to)


def comparison() -> list[CellCost]:
    """14 models x 8 methods x 10 repeats at 32 lengths to 128K, nested and probed."""
    lengths = [4096 * i for i in range(1, 33)]
    return [
        cell(f"{weights} {method} {scored}", lengths, 10, 2e9 * weights, 4.0 * layers * hidden, scored)
        for weights, layers, hidden in SHAPES
        for method in range(8)
        for scored in (0, 1536)
    ]


def some_cells(seed: int) -> list[CellCost]:
    rng = random.Random(seed)
    cells = []
    for number in range(rng.randrange(1, 9)):
        lengths = sorted(rng.sample(range(1000, 132_000), rng.randrange(1, 9)))
        one = cell(str(number), lengths, rng.randrange(1, 12), rng.uniform(1, 1e9), rng.uniform(0, 1e5), 500)
        cells.append(replace(one, divisible=rng.random() < 0.8))
    return cells


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("count", [1, 2, 5, 60])
def test_every_repeat_at_every_length_is_dealt_to_one_shard(seed: int, count: int) -> None:
    cells = some_cells(seed)
    dealing = deal(cells, count)
    dealt = Counter(
        (unit.cell, repeat, length)
        for shard in range(count)
        for unit in dealing.owned(shard)
        for repeat in range(*unit.repeats)
        for length in cells[unit.cell].lengths[slice(*unit.lengths)]
    )
    places = [(n, r, length) for n, one in enumerate(cells) for r in range(len(one.repeats)) for length in one.lengths]
    assert dealt == Counter(places)
    for unit in dealing.units:
        if not cells[unit.cell].divisible:
            assert unit.repeats == (0, len(cells[unit.cell].repeats))
            assert unit.lengths == (0, len(cells[unit.cell].lengths))


def test_all_shards_compute_the_same_dealing() -> None:
    one, other = (deal(comparison(), 64) for _ in range(2))
    assert one.units == other.units
    assert one.owners == other.owners


def test_a_thousand_shards_are_balanced_to_a_tenth() -> None:
    cells = comparison()
    dealing = deal(cells, 1000)
    assert dealing.imbalance <= 0.10
    assert dealing.longest <= 1.10 * sum(one.flops for one in cells) / 1000  # with all that is read twice


def test_work_that_balances_whole_is_not_cut() -> None:
    cells = [cell(str(number), (1024, 65_536, 131_072), 10, 1e9, 1e5, 1536) for number in range(16)]
    dealing = deal(cells, 4)
    assert len(dealing.units) == 16
    assert dealing.imbalance == 0
    groups = deal(cells[:2], 4)
    assert {unit.repeats for unit in groups.units} == {(0, 5), (5, 10)}
    assert {unit.lengths for unit in groups.units} == {(0, 3)}


@pytest.mark.parametrize("seed", range(20))
def test_only_single_repeats_are_cut_into_bands_above_32k_that_cost_at_most_twice(seed: int) -> None:
    cells = some_cells(seed)
    dealing = deal(cells, 60)
    for number, one in enumerate(cells):
        short = sum(length <= LONG for length in one.lengths)
        bands: dict[tuple[int, int], list[Any]] = {}
        for unit in dealing.units:
            if unit.cell == number and unit.lengths != (0, len(one.lengths)):
                assert unit.repeats[1] - unit.repeats[0] == 1
                assert unit.lengths[0] == 0 or unit.lengths[0] >= short
                bands.setdefault(unit.repeats, []).append(unit)
        for (repeat, _), units in bands.items():
            assert 2 <= len(units) <= BANDS
            assert sum(unit.flops for unit in units) <= REREAD * one.repeats[repeat] * (1 + 1e-9)


@pytest.mark.parametrize("part", [0.9, 0.5, 0.4])
def test_bands_cost_what_their_lengths_cost_alone_and_are_as_few_as_possible(part: float) -> None:
    lengths, how = [4096 * i for i in range(1, 33)], (1e9, 1e5, 0)
    one = cell("nested", lengths, 1, *how)
    most = part * one.repeats[0]
    bands = sorted(one.bands(most))
    assert [first for first, *_ in bands[1:]] == [end for _, end, _ in bands[:-1]]
    assert (bands[0][0], bands[-1][1]) == (0, 32)
    for first, end, share in bands:
        assert share == pytest.approx(cost(lengths[first:end], *how) / one.repeats[0])
        assert share <= part
    fewer = combinations(range(8, 32), len(bands) - 2)
    assert not any(all(cost(lengths[a:b], *how) <= most for a, b in pairwise([0, *ends, 32])) for ends in fewer)


def test_bands_are_not_smaller_than_their_number_and_the_reading_of_a_text_again_allow() -> None:
    many = cell("nested", [4096 * i for i in range(1, 33)], 1, 1e9, 1e5, 0)
    assert len(many.bands(1.0)) == BANDS
    lengths = [124_000, 126_000, 128_000, 130_000]
    much, little = (cell("probe", lengths, 1, 1e9, 1e5, scored) for scored in (20_000, 1_500))
    assert [len(one.bands(1.0)) for one in (much, little)] == [4, 2]
    short = cell("short", [8_000, 16_000, 32_768], 1, 1e9, 1e5, 0)
    assert short.bands(1.0) == [(0, 3, 1.0)]
    one = cell("one long", [24_000, 32_000, 33_000], 1, 1e9, 1e5, 0)
    assert [(first, last) for first, last, _ in sorted(one.bands(1.0))] == [(0, 2), (2, 3)]


def test_no_text_is_read_again_where_that_does_not_shorten_the_longest_shard() -> None:
    lengths = [8192 * i for i in range(1, 17)]
    cells = [
        cell(f"{weights} {method}", lengths, 10, 2e9 * weights, 4.0 * layers * hidden, 512)
        for weights, layers, hidden in SHAPES
        for method in range(8)
    ]
    dealing = deal(cells, 1000)  # 1,120 texts, of which the costliest takes longer than the mean of the shards
    assert dealing.longest == max(max(one.repeats) for one in cells)
    assert sum(dealing.loads) == pytest.approx(sum(one.flops for one in cells))


# which shard this is


@pytest.mark.parametrize("given", ["3/2", "0/2", "a/b", "", "2", "1/2/3", "-1/2", "1/100001", "1/١", "1.0/2"])
def test_a_shard_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(ValueError, match=r"expected I/N with 1 <= I <= N .*--shard"):
        parse_shard(given)
    ended = CliRunner().invoke(app, ["curve", "demo", "--shard", given])
    assert ended.exit_code == 2
    assert len(ended.stderr.strip().splitlines()) == 1


def test_the_task_of_a_slurm_array_is_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_shard(None) is None
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")
    assert chosen_shard(None) is None  # an old Slurm, without the count
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "4")
    monkeypatch.setenv("SLURM_ARRAY_TASK_MIN", "5")
    assert chosen_shard(None) == (3, 4)
    assert chosen_shard((1, 4)) == (1, 4)
    assert chosen_shard((1, 1)) is None
    monkeypatch.setenv("SLURM_ARRAY_TASK_STEP", "2")
    assert chosen_shard(None) == (2, 4)
    for wrong in ("4", "8", "13", "x"):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", wrong)
        with pytest.raises(ValueError, match=rf"SLURM_ARRAY_TASK_ID={wrong}, .* give --shard I/N, or --shard 1/1"):
            chosen_shard(None)


# shards of a run


def run(lms: list[LM], text: str, folder: Path, shard: tuple[int, int] | None = None, **changes: Any) -> Measured:
    settings: dict[str, Any] = {"lengths": (16, 32), "repeats": 5, "refusals": True} | changes
    methods, tasks = settings.pop("methods", METHODS), settings.pop("tasks", TASKS)
    return measure(lms, methods, tasks, text=text, out=folder, shard=shard, **settings)


class Near(float):
    """A float that equals those within 1e-4: another batch rounds otherwise."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 1e-4

    __hash__ = float.__hash__


def contents(rows: list[Row]) -> list[tuple[Any, ...]]:
    """Rows without times and memory; nats as far as another batch gives the same."""

    def near(value: Any) -> Any:
        return Near(value) if isinstance(value, float) else value

    return [
        (*row.key, row.repeat, row.status, row.reason, {name: near(value) for name, value in row.scores.items()})
        for row in sorted(rows, key=lambda row: (*row.key, row.repeat))
    ]


@pytest.fixture
def two(lm: LM, tokenizer: Any) -> list[LM]:
    return [lm, wrap(tiny_model("qwen2"), tokenizer, "tiny-other")]


@pytest.mark.parametrize("count", [2, 11])
def test_shards_give_the_rows_of_one_process(two: list[LM], text: str, tmp_path: Path, count: int) -> None:
    whole = run(two, text, tmp_path / "whole")
    parts = [run(two, text, tmp_path / "parts", (number, count)) for number in range(count, 0, -1)]
    assert contents(parts[-1].rows) == contents(whole.rows)
    rows = read_rows(tmp_path / "parts")
    assert len(rows) == len(latest(rows))
    files = sorted(path.name for path in (tmp_path / "parts").glob("rows*.jsonl"))
    assert len(files) == count
    assert count > 2 or len(parts[0].rows) < 50  # of 80
    lines = sum(len((tmp_path / "parts" / name).read_text().splitlines()) for name in files)
    assert lines == len(rows)  # none was measured twice
    headers = [read_header(tmp_path / name) for name in ("whole", "parts")]
    assert list(headers[0]["models"]) == list(headers[1]["models"]) == ["tiny-llama", "tiny-other"]
    assert [one["shard"] for one in headers[1]["sessions"]] == [[number, count] for number in range(count, 0, -1)]


def test_bands_of_lengths_give_the_rows_of_one_process(
    lm: LM, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (dealing, sharding):
        monkeypatch.setattr(module, "LONG", 16)
    asked: dict[str, Any] = {"lengths": (16, 32, 64, 96), "repeats": 2}
    whole = run([lm], text, tmp_path / "whole", **asked)
    parts = [run([lm], text, tmp_path / "parts", (number, 24), **asked) for number in range(1, 25)]
    assert contents(parts[-1].rows) == contents(whole.rows)
    of = Counter[tuple[str, str, str]]()  # the files that hold lengths of an example
    for path in (tmp_path / "parts").glob("rows*.jsonl"):
        of.update(
            {(row["method"], row["task"], row["example"]) for row in map(json.loads, path.read_text().splitlines())}
        )
    assert max(of.values()) > 1


def test_a_shard_returns_what_the_others_still_have_to_measure(two: list[LM], text: str, tmp_path: Path) -> None:
    first = run(two, text, tmp_path / "run", (2, 3))
    assert set(first.missing) == {"1/3", "3/3"}
    assert sum(int(line.removesuffix(" rows")) for line in first.missing.values()) == 80 - len(first.rows)
    second = run(two, text, tmp_path / "run", (1, 3))
    assert second.missing == {"3/3": first.missing["3/3"]}
    assert run(two, text, tmp_path / "run", (3, 3)).missing == {}
    assert run(two, text, tmp_path / "run", (2, 3)).missing == {}


@pytest.mark.parametrize(
    "asked",
    [
        {"lengths": (8, 16), "tasks": ["perplexity:target_tokens=8", "curve"], "repeats": 3},
        {"tasks": ["curve"], "methods": ["full", "sinks:window=600"]},  # refused only while it is measured
    ],
    ids=["lengths", "method"],
)
def test_what_is_refused_is_not_missing_in_the_shards(lm: LM, text: str, tmp_path: Path, asked: dict[str, Any]) -> None:
    whole = run([lm], text, tmp_path / "whole", **asked)
    assert {row.status for row in whole.rows} == {"ok", "refused"}
    parts = [run([lm], text, tmp_path / "parts", (number, 2), **asked) for number in (1, 2)]
    assert contents(parts[-1].rows) == contents(whole.rows)
    assert parts[-1].missing == {}


def test_a_text_is_read_once_for_the_repeats_and_lengths_of_a_shard(lm: LM, text: str, tmp_path: Path) -> None:
    for number in (1, 2):
        run([lm], text, tmp_path / "run", (number, 2), tasks=["curve"], lengths=(8, 16, 32), repeats=6)
    readings = {(row.example, json.dumps(row.reading["cuts"])) for row in read_rows(tmp_path / "run")}
    cuts = {cuts for _, cuts in readings}
    assert cuts == {"[8]", "[8, 16]", "[8, 16, 32]"}  # as one process reads


def test_a_run_of_one_process_is_continued_by_shards_and_by_one_process_again(
    lm: LM, text: str, tmp_path: Path
) -> None:
    whole = run([lm], text, tmp_path / "run")
    rows = tmp_path / "run" / "rows.jsonl"
    lines = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join(lines[:7]) + lines[7][:30])
    for number in (1, 2):
        part = run([lm], text, tmp_path / "run", (number, 2))
    assert contents(part.rows) == contents(whole.rows)
    shares = [len((tmp_path / "run" / f"rows-{number}-of-2.jsonl").read_text().splitlines()) for number in (1, 2)]
    assert sum(shares) == len(lines) - 7
    (tmp_path / "run" / "rows-2-of-2.jsonl").unlink()
    assert contents(run([lm], text, tmp_path / "run").rows) == contents(whole.rows)


@pytest.mark.parametrize("divided_first", [True, False], ids=["shards, then one process", "one process, then shards"])
def test_rows_of_more_repeats_replace_those_of_other_writers(
    divided_first: bool, lm: LM, text: str, tmp_path: Path
) -> None:
    whole = run([lm], text, tmp_path / "whole", tasks=["curve"], repeats=8)
    for number in (1, 2) if divided_first else (1,):
        shard = (number, 2) if divided_first else None
        run([lm], text, tmp_path / "run", shard, tasks=["curve"])  # 5 repeats

    def stop(*of: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([lm], text, tmp_path / "run", tasks=["curve"], repeats=8, watch=Watch(start=stop))
    for number in (1,) if divided_first else (1, 2):
        shard = None if divided_first else (number, 2)
        found = run([lm], text, tmp_path / "run", shard, tasks=["curve"], repeats=8)
    assert contents(found.rows) == contents(latest(read_rows(tmp_path / "run"))) == contents(whole.rows)
    written: list[Row] = []
    watch = Watch(row=lambda row, done, total: written.append(row))
    run([lm], text, tmp_path / "run", tasks=["curve"], repeats=8, watch=watch)
    assert not written


def test_rows_of_a_run_that_grows_twice_replace_those_of_its_shards(lm: LM, text: str, tmp_path: Path) -> None:
    for number in (1, 2):
        run([lm], text, tmp_path / "run", (number, 2), tasks=["curve"])  # 5 repeats
    whole = run([lm], text, tmp_path / "run", tasks=["curve"], repeats=8)
    written: list[Row] = []
    watch = Watch(row=lambda row, done, total: written.append(row))
    run([lm], text, tmp_path / "run", tasks=["curve"], repeats=9, methods=METHODS[:1], watch=watch)
    assert {row.repeat for row in written} == {4, 8}  # repeat 4 has another control
    found = latest(read_rows(tmp_path / "run"))
    other = [[row for row in rows if row.method == METHODS[1]] for rows in (found, whole.rows)]
    assert contents(other[0]) == contents(other[1])


def test_a_run_that_records_only_the_rows_before_the_last_change_opens(lm: LM, text: str, tmp_path: Path) -> None:
    for number in (1, 2):
        run([lm], text, tmp_path / "run", (number, 2), tasks=["curve"])
    whole = run([lm], text, tmp_path / "run", tasks=["curve"], repeats=8)
    header = read_header(tmp_path / "run")
    (header["rows_before"],) = header["rows_before"]  # as an older farspan
    (tmp_path / "run" / "run.json").write_text(json.dumps(header))
    assert contents(latest(read_rows(tmp_path / "run"))) == contents(whole.rows)
    run([lm], text, tmp_path / "run", tasks=["curve"], repeats=9)
    assert len(read_header(tmp_path / "run")["rows_before"]) == 2


def test_a_folder_of_an_earlier_version_opens(lm: LM, text: str, tmp_path: Path) -> None:
    whole = run([lm], text, tmp_path / "run")
    (tmp_path / "run" / "run.lock").unlink()  # which it did not have
    assert contents(read_rows(tmp_path / "run")) == contents(whole.rows)
    new: list[Row] = []
    watch = Watch(row=lambda row, done, total: new.append(row))
    part = run([lm], text, tmp_path / "run", (1, 2), watch=watch)
    assert not new
    assert part.missing == {}
    assert contents(part.rows) == contents(whole.rows)


def test_the_torn_line_of_a_killed_shard_is_measured_again(lm: LM, text: str, tmp_path: Path) -> None:
    for number in (1, 2):
        whole = run([lm], text, tmp_path / "run", (number, 2))
    file = tmp_path / "run" / "rows-1-of-2.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-2]) + lines[-2][:50])
    assert len(read_rows(tmp_path / "run")) == len(whole.rows) - 2
    assert run([lm], text, tmp_path / "run", (2, 2)).missing == {"1/2": "2 rows"}
    assert contents(run([lm], text, tmp_path / "run", (1, 2)).rows) == contents(whole.rows)


def test_a_row_of_two_writers_counts_once_and_a_finished_one_before_others(lm: LM, text: str, tmp_path: Path) -> None:
    for number in (1, 2):
        whole = run([lm], text, tmp_path / "run", (number, 2))
    first = json.loads((tmp_path / "run" / "rows-1-of-2.jsonl").read_text().splitlines()[0])
    failed = first | {"status": "oom", "reason": "none", "scores": {}}
    (tmp_path / "run" / "rows.jsonl").write_text(json.dumps(failed) + "\n")
    shutil.copy(tmp_path / "run" / "rows-2-of-2.jsonl", tmp_path / "run" / "rows-1-of-9.jsonl")
    assert contents(read_rows(tmp_path / "run")) == contents(whole.rows)


def test_adaptive_curves_are_measured_whole_by_one_shard_each(two: list[LM], text: str, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"tasks": ["curve"], "lengths": "auto", "repeats": 2, "refusals": False}
    whole = run(two, text, tmp_path / "whole", **asked)
    said: list[str] = []
    first = run(two, text, tmp_path / "run", (1, 3), watch=Watch(notice=said.append), **asked)
    assert "A curve with --lengths auto is not divided" in said[0]
    assert set(first.missing) == {"2/3", "3/3"}
    assert all("with --lengths auto" in line for line in first.missing.values())
    run(two, text, tmp_path / "run", (2, 3), **asked)
    last = run(two, text, tmp_path / "run", (3, 3), **asked)
    assert last.missing == {}
    assert contents(last.rows) == contents(whole.rows)
    assert list(read_header(tmp_path / "run")["models"]) == ["tiny-llama", "tiny-other"]  # as in the command


def test_a_shard_with_nothing_to_measure_ends_at_once(lm: LM, text: str, tmp_path: Path) -> None:
    said: list[str] = []
    asked: dict[str, Any] = {"tasks": ["curve"], "lengths": "auto", "repeats": 2, "refusals": False}
    part = run([lm], text, tmp_path / "run", (3, 3), watch=Watch(notice=said.append), **asked)
    assert "0 of 2 units of work" in said[0]
    assert "1 of 3 shards have nothing to measure" in said[0]
    assert part.rows == []


# several writers of one folder

SETTINGS = {"task": "curve", "seed": 0}


def test_a_shard_is_written_by_one_process(tmp_path: Path) -> None:
    with Run.open(tmp_path / "run", SETTINGS, (1, 2)), Run.open(tmp_path / "run", SETTINGS, (2, 2)):
        for shard, who in (((1, 2), "shard 1/2 of .*run"), ((1, 3), "shard 1/2 of .*run"), (None, "shard 1/2 of")):
            with pytest.raises(ValueError, match=rf"^{who}.* is being written by another process. Wait"):
                Run.open(tmp_path / "run", SETTINGS, shard)
    with (
        Run.open(tmp_path / "run", SETTINGS),
        pytest.raises(ValueError, match=r"run is being written by another process"),
    ):
        Run.open(tmp_path / "run", SETTINGS, (1, 2))
    with Run.open(tmp_path / "run", SETTINGS, (1, 3)):
        pass
    assert [one.get("shard") for one in read_header(tmp_path / "run")["sessions"]] == [None, [1, 3]]


def test_two_shards_with_other_settings_are_refused_also_before_the_first_row(tmp_path: Path) -> None:
    with Run.open(tmp_path / "run", SETTINGS, (1, 2)):
        before = read_header(tmp_path / "run")
        with pytest.raises(ValueError, match=r"other settings: seed was 0, now 1\. Repeat"):
            Run.open(tmp_path / "run", SETTINGS | {"seed": 1}, (2, 2))
        assert read_header(tmp_path / "run") == before
        assert not (tmp_path / "run" / "rows-2-of-2.jsonl").exists()


def test_a_shard_that_fails_before_its_first_row_leaves_the_files_of_the_others(tmp_path: Path) -> None:
    failing = Run.open(tmp_path / "run", SETTINGS, (2, 2))  # which makes run.json
    with Run.open(tmp_path / "run", SETTINGS, (1, 2)):
        failing.__exit__(KeyError, KeyError(), None)
    with pytest.raises(KeyError), Run.open(tmp_path / "run", SETTINGS, (2, 2)):
        raise KeyError
    names = {"run.json", "run.lock", "rows-1-of-2.jsonl", "rows-1-of-2.lock"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == names
    with pytest.raises(KeyError), Run.open(tmp_path / "alone", SETTINGS, (2, 2)):
        raise KeyError
    assert not (tmp_path / "alone").exists()


def test_models_and_examples_of_shards_are_kept_beside_each_other(tmp_path: Path) -> None:
    example = {"what": "q", "length": 8, "repeat": 0, "parts": [["asked", ["a", "b"]]], "scored": 1}
    example |= {"task": "curve", "settings": {}, "example": "e0"}
    with Run.open(tmp_path / "run", SETTINGS, (1, 2)) as one, Run.open(tmp_path / "run", SETTINGS, (2, 2)) as other:
        for run, name in ((one, "b"), (other, "a"), (one, "c")):
            run.add_model({"name": name}, ["a", "b", "c"])
            run.add_example(example | {"model": name}, {"e0"})
    assert list(read_header(tmp_path / "run")["models"]) == ["a", "b", "c"]
    assert (tmp_path / "run" / "examples.jsonl").read_text().count("\n") == 3
    sessions = read_header(tmp_path / "run")["sessions"]
    assert [("ended" in one, one["shard"]) for one in sessions] == [(True, [1, 2]), (True, [2, 2])]


def test_shards_of_two_states_of_a_file_of_a_method_are_refused_also_before_the_first_row(tmp_path: Path) -> None:
    before, now = ({"methods": ["how"], "files": {"how": {"factors.json": mark}}} for mark in "ab")
    with Run.open(tmp_path / "run", before, (1, 2)):
        with pytest.raises(ValueError, match=r"factors\.json has changed since .*: its hash was a, now b"):
            Run.open(tmp_path / "run", now, (2, 2))
        with Run.open(tmp_path / "run", before, (2, 2)):
            pass
    with Run.open(tmp_path / "run", now, (2, 2)):  # nothing was measured, and no shard writes
        pass


def test_shards_of_two_versions_of_a_task_are_refused_also_before_the_first_row(tmp_path: Path) -> None:
    with Run.open(tmp_path / "run", SETTINGS, (1, 2)) as one, Run.open(tmp_path / "run", SETTINGS, (2, 2)) as other:
        one.add_model({"name": "a", "versions": {"curve": 1}})
        for name in ("a", "b"):
            with pytest.raises(ValueError, match="version 1 of the task curve: this farspan measures version 2"):
                other.add_model({"name": name, "versions": {"curve": 2}})
        other.add_model({"name": "a", "versions": {"curve": 1}})
    assert list(read_header(tmp_path / "run")["models"]) == ["a"]


def test_shards_name_the_methods_of_the_run_in_its_order(tmp_path: Path) -> None:
    asked = {"methods": ["full", "dca"]}
    with Run.open(tmp_path / "run", asked, (1, 2)) as run:
        run.append(Row("m", "full", "other", 1, {}, length=8, repeat=0, seed=0, example="e"))
    with pytest.raises(ValueError, match=r"in its order\. Got dca, full; expected full, dca"):
        Run.open(tmp_path / "run", {"methods": ["dca", "full"]}, (1, 2))
    assert "ended" in read_header(tmp_path / "run")["sessions"][0]
    with Run.open(tmp_path / "run", {"methods": ["dca", "full"]}):  # one process may change the order
        pass
    assert "ended" not in read_header(tmp_path / "run")["sessions"][0]  # shards now have other parts
    with Run.open(tmp_path / "run", {"methods": ["dca", "full"]}, (2, 2)):
        pass


# the command


def test_a_shard_prints_what_is_missing_and_the_last_one_the_tables(
    folder: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["perplexity", str(folder), "--text", text, "--lengths", "16,32", "--target-tokens", "4", "--out", "run"]
    first = CliRunner().invoke(app, [*command, "--shard", "2/2", "--json"])
    assert first.exit_code == 0, first.output
    assert json.loads(first.stdout.splitlines()[-1]) == {"run": "run", "shard": "2/2", "missing": {"1/2": "10 rows"}}
    assert "shard 2/2: its part is measured" in first.stderr
    assert "still missing: 10 rows of shard 1/2" in first.stderr
    assert not list(Path("run").glob("*.png"))
    planned = CliRunner().invoke(app, [*command, "--plan", "--shard", "1/2"])
    assert "shard 1/2: 1 of 2 units of work, 50.0% of the operations" in planned.stderr
    last = CliRunner().invoke(app, [*command, "--shard", "1/2"])
    assert last.exit_code == 0, last.output
    assert "tokens take at the shortest length" in last.stdout
    assert "rows: run/rows*.jsonl" in last.stdout
    assert list(Path("run").glob("*.png"))


def test_the_shard_1_of_1_is_the_whole_run(lm: LM, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "deal", lambda *_: pytest.fail("dealt"))
    assert run([lm], text, tmp_path / "run", (1, 1)).missing == {}
    assert (tmp_path / "run" / "rows.jsonl").exists()


class StoppedError(Exception):
    """Raised instead of measuring."""


def test_the_demo_is_measured_whole_in_a_slurm_array_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: Any, shard: tuple[int, int], **others: Any) -> Measured:
        raise StoppedError(shard)

    monkeypatch.setattr("farspan.demo.measure", measured)
    with pytest.raises(StoppedError, match=r"\(1, 1\)"):
        run_demo(tmp_path, Terminal())
