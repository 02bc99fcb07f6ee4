"""Regression checks: a model measured again as a recorded run, and whether it changed beyond chance."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import binom, norm, ttest_1samp
from test_cli import farspan, last_line, refused
from transformers import AutoModelForCausalLM, AutoTokenizer

import farspan as library
from farspan.loading.places import folder_of
from farspan.measuring.again import measure_again, read_baseline
from farspan.record import Row, read_rows
from farspan.report.changes import COSTS, TOLERANCES, Change, Comparison, Estimate, compare
from farspan.report.changes_table import print_changes
from farspan.report.notices import other_tokenizers, same_weights, uneven_costs, unfinished
from farspan.report.runs import Source, read_run
from farspan.stats import Difference, paired_tost, tost
from farspan.terminal import Terminal

from tiny import CODE, write_lines

CPU = ("--device", "cpu")
TASKS = ("curve", "perplexity:target_tokens=16")
MEASURED: dict[str, Any] = {"text": CODE, "shard": (1, 1)}


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the embedded model."""
    folder = tmp_path_factory.mktemp("check") / "baseline"
    library.measure(["demo"], ["full"], TASKS, **MEASURED, lengths=(32, 64, 128), repeats=8, out=folder)
    return folder


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with noise in the weights of its attention."""
    folder = tmp_path_factory.mktemp("models") / "damaged"
    model = AutoModelForCausalLM.from_pretrained(folder_of("demo"))
    torch.manual_seed(0)
    for layer in model.model.layers:
        weight = layer.self_attn.o_proj.weight
        weight.data += 3 * weight.std() * torch.randn_like(weight)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(folder_of("demo")).save_pretrained(folder)
    return folder


def test_the_same_model_is_equal(baseline: Path, tmp_path: Path) -> None:
    done = farspan("check", baseline, "demo", "--out", tmp_path / "run", "--strict", "--json", *CPU)
    assert done.exit_code == 0, done.output
    found = last_line(done)
    assert found["verdict"] == "equal"
    assert {one["verdict"] for one in found["changes"]} == {"equal"}
    assert {one["name"] for one in found["changes"]} >= {"span", "perplexity"}
    assert all(one["difference"]["value"] == 0 for one in found["changes"])
    assert "+0.0" not in done.stderr
    assert [row.example for row in read_rows(tmp_path / "run")] == [row.example for row in read_rows(baseline)]


def test_the_baseline_is_not_written_into(baseline: Path) -> None:
    before = (baseline / "rows.jsonl").read_bytes()
    done = farspan("check", baseline, "demo", "--out", baseline, *CPU)
    assert (done.exit_code, "is the baseline itself: give another folder" in done.stderr) == (2, True)
    assert (baseline / "rows.jsonl").read_bytes() == before


def test_a_damaged_model_is_worse_and_has_its_own_exit_code(baseline: Path, damaged: Path, tmp_path: Path) -> None:
    done = farspan("check", baseline, damaged, "--out", tmp_path / "run", "--json", *CPU)
    assert done.exit_code == 3, done.output
    found = last_line(done)
    assert found["verdict"] == "worse"
    assert all(one["verdict"] == "worse" for one in found["changes"] if one["kind"] == "perplexity")
    assert "verdict: worse" in done.stderr
    assert "measurements of the model: " in done.stderr


def test_a_folder_of_several_checks_compares_the_model_that_was_named(
    baseline: Path, damaged: Path, tmp_path: Path
) -> None:
    verdicts = []
    for model in ("demo", damaged, "demo"):
        done = farspan("check", baseline, model, "--out", tmp_path / "run", "--json", *CPU)
        verdicts.append((done.exit_code, last_line(done)["verdict"]))
    assert verdicts == [(0, "equal"), (3, "worse"), (0, "equal")]


def test_failed_rows_of_another_model_in_the_folder_do_not_count(baseline: Path, damaged: Path, tmp_path: Path) -> None:
    common = ("check", baseline, "--out", tmp_path / "run", "--json", *CPU)
    farspan(*common, damaged)
    with (tmp_path / "run" / "rows.jsonl").open("a") as rows:
        for row in read_rows(tmp_path / "run"):
            rows.write(json.dumps(asdict(replace(row, status="oom", reason="no memory", scores={}))) + "\n")
    done = farspan(*common, "demo")
    assert (done.exit_code, last_line(done)["failed_rows"]) == (0, 0), done.output


def test_the_mended_model_is_better(damaged: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    library.measure([str(damaged)], ["full"], TASKS[1:], **MEASURED, lengths=(32, 64), repeats=8, out=bad)
    done = farspan("check", bad, "demo", "--out", tmp_path / "run", "--json", *CPU)
    assert done.exit_code == 0, done.output
    assert last_line(done)["verdict"] == "better"


def test_undecided_fails_with_strict_alone(baseline: Path, damaged: Path, tmp_path: Path) -> None:
    """With two texts nothing can be tested."""
    few = tmp_path / "few"
    library.measure(["demo"], ["full"], TASKS[1:], **MEASURED, lengths=(32, 64), repeats=2, out=few)
    common = ("check", few, damaged, "--out", tmp_path / "run", *CPU)
    assert farspan(*common).exit_code == 0
    assert farspan(*common, "--strict").exit_code == 4


def test_adaptive_lengths_are_paired_by_their_texts(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    rng = np.random.default_rng(0)
    text.write_text(" ".join(str(n) for n in rng.integers(0, 1000, 6000)))
    options: dict[str, Any] = {
        "text": str(text),
        "lengths": "auto",
        "repeats": 8,
        "out": tmp_path / "auto",
        "shard": (1, 1),
    }
    lm = library.load("demo", device="cpu", trained_length=64)
    library.measure([lm], ["full"], ["curve"], **options)
    before = read_baseline(tmp_path / "auto")
    again = measure_again(before, lm, out=tmp_path / "again")
    header = json.loads((tmp_path / "again" / "run.json").read_text())
    found = compare(before, Source.of("now", tmp_path / "again", header, again.rows))
    assert found.changes
    assert {one.verdict for one in found.changes} == {"equal"}
    longer = library.load("demo", device="cpu", trained_length=128)
    with pytest.raises(ValueError, match="follow from the trained length, 64 tokens, and demo was trained on 128"):
        measure_again(before, longer, out=tmp_path / "longer")


# verdicts


def compared(change: Callable[[Row], Row], baseline: Path, tolerances: Any = TOLERANCES) -> Comparison:
    """The baseline against itself with changed rows."""
    before = read_baseline(baseline)
    return compare(before, replace(before, rows=[change(row) for row in before.rows]), tolerances)


def shifted(by: float, noise: float = 0.0) -> Callable[[Row], Row]:
    """Adds nats to perplexity, with noise."""
    rng = np.random.default_rng(1)

    def change(row: Row) -> Row:
        if row.task != "perplexity":
            return row
        nats = row.scores["nats"] + by + noise * rng.standard_normal()
        return replace(row, scores=row.scores | {"nats": nats})

    return change


def perplexities(found: Comparison) -> list[Change]:
    return [one for one in found.changes if one.kind == "perplexity"]


@pytest.mark.parametrize(
    ("by", "noise", "verdict"),
    [
        (0.0, 0.003, "equal"),
        (0.2, 0.01, "worse"),
        (-0.2, 0.01, "better"),
        (0.0, 0.5, "undecided"),
        (0.005, 0.0, "equal"),
    ],
)
def test_verdicts(by: float, noise: float, verdict: str, baseline: Path) -> None:
    found = perplexities(compared(shifted(by, noise), baseline))
    assert len(found) == 3
    assert {one.verdict for one in found} == {verdict}


def test_a_tolerance_makes_a_change_equal(baseline: Path) -> None:
    found = compared(shifted(0.2, 0.01), baseline, TOLERANCES | {"perplexity": 0.5})
    assert {one.verdict for one in perplexities(found)} == {"equal"}


def test_changes_are_those_of_paired_t_tests(baseline: Path) -> None:
    change = shifted(0.01, 0.02)
    found = perplexities(compared(change, baseline))
    change = shifted(0.01, 0.02)
    pairs: dict[int, list[float]] = {}
    for row in read_baseline(baseline).rows:
        if row.task == "perplexity":
            pairs.setdefault(row.length, []).append(change(row).scores["nats"] - row.scores["nats"])
    for one in found:
        assert one.length is not None
        values, margin = pairs[one.length], np.log(1.02)
        naive = ttest_1samp(values, 0)
        low, high = naive.confidence_interval(0.95)
        assert (one.difference.low, one.difference.high) == (pytest.approx(low), pytest.approx(high))
        assert one.difference.p == pytest.approx(naive.pvalue)
        sides = (ttest_1samp(values, -margin, alternative="greater"), ttest_1samp(values, margin, alternative="less"))
        assert one.difference.tost == pytest.approx(max(side.pvalue for side in sides))
        assert one.p_holm is not None
        assert one.p_holm >= one.difference.p


def test_equality_without_spread_needs_five_pairs() -> None:
    assert tost(0.0, 0.0, 3.0, 0.1, 4) > 0.05 > tost(0.0, 0.0, 4.0, 0.1, 5)
    assert tost(0.2, 0.0, 4.0, 0.1, 5) == 1.0


def changed_answers(count: int, lost: int, gained: int) -> np.ndarray:
    return np.repeat([0.0, -1.0, 1.0], [count - lost - gained, lost, gained])


@pytest.mark.parametrize(("count", "lost", "gained"), [(10, 0, 0), (60, 1, 0), (60, 1, 2), (80, 0, 3), (12, 5, 4)])
def test_answers_are_equal_by_score_tests_at_the_likeliest_shares(count: int, lost: int, gained: int) -> None:
    margin = 0.05

    def beyond(far: int, near: int) -> float:
        """p against a difference of `margin`, with the likeliest share of the other direction."""

        def surprise(share: float) -> float:
            parts = (far, margin + share), (near, share), (count - far - near, 1 - margin - 2 * share)
            return -sum(n * np.log(p) for n, p in parts if n)

        share = minimize_scalar(surprise, bounds=(1e-12, (1 - margin) / 2 - 1e-12), options={"xatol": 1e-12}).x
        spread = np.sqrt(count * (margin + 2 * share - margin**2))
        return float(norm.cdf((far - near - count * margin) / spread))

    naive = max(beyond(lost, gained), beyond(gained, lost))
    assert paired_tost(changed_answers(count, lost, gained), margin) == pytest.approx(naive, abs=1e-4)


@pytest.mark.parametrize("count", [5, 10, 30, 52, 60, 100, 200])
def test_a_model_with_fewer_right_answers_is_seldom_called_equal(count: int) -> None:
    """Of models that lose an answer in 20, beyond none that they gain."""
    passes = [k for k in range(count + 1) if paired_tost(changed_answers(count, k, 0), 0.05) < 0.05]
    assert sum(binom.pmf(k, count, 0.05) for k in passes) < 0.07  # 0.77 of 5 and 0.6 of 10 by their spread alone


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize(("repeats", "verdict"), [(10, "undecided"), (52, "equal")])
def test_few_unchanged_answers_do_not_show_that_a_model_is_equal(
    repeats: int, verdict: str, graded: bool, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quality = {"score": "right", "name": "right answers", "higher_is_better": True, "exp": False, "graded": graded}
    entry = {"task": "passkey", "unit": "tokens", "quality": quality, "details": []}
    before = read_baseline(baseline)
    header = before.header | {
        "settings": before.header["settings"] | {"tasks": {"passkey": entry}},
        "models": {"demo": before.header["models"]["demo"] | {"tasks": {"passkey": {}}}},
    }
    rows = [
        Row(
            "demo",
            "full",
            "passkey",
            1,
            {},
            64,
            i,
            0,
            f"p{i}",
            depth=depth,
            scores={"right": (0.3 if graded else 1.0) * (i % 3 > 0 or depth)},
        )
        for i in range(repeats)
        for depth in (0.0, 1.0)
    ]
    source = replace(before, header=header, rows=rows)
    found = compare(source, source)
    (one,) = found.changes
    assert (one.pairs, one.verdict, found.verdict) == (repeats, verdict, verdict)
    print_changes(found, Terminal(width=200))
    why = "the scores of all 10 answers are unchanged. `equal` within 5 points then needs 52: measure the baseline"
    assert (why in capsys.readouterr().out) == (verdict == "undecided")


@pytest.mark.parametrize(("score", "most"), [("right", 1.0), ("copy - control", 2.0)])
def test_the_interval_of_a_difference_ends_at_the_largest_difference_possible(
    score: str, most: float, baseline: Path
) -> None:
    quality = {"score": score, "name": "right answers", "higher_is_better": True, "exp": False, "graded": False}
    entry = {"task": "passkey", "unit": "tokens", "quality": quality, "details": []}
    before = read_baseline(baseline)
    header = before.header | {
        "settings": before.header["settings"] | {"tasks": {"passkey": entry}},
        "models": {"demo": before.header["models"]["demo"] | {"tasks": {"passkey": {}}}},
    }

    def source(scores: list[dict[str, float]]) -> Source:
        rows = [Row("demo", "full", "passkey", 1, {}, 64, i, 0, f"p{i}", scores=one) for i, one in enumerate(scores)]
        return replace(before, header=header, rows=rows)

    names = score.split(" - ")
    first, second = ([dict.fromkeys(names, 0.0) | {names[0]: value} for value in of] for of in ((0, 0, 0), (1, 1, 0)))
    (one,) = compare(source(first), source(second)).changes
    low, high = ttest_1samp([1, 1, 0], 0).confidence_interval(0.95)
    assert (low, high) == (pytest.approx(-0.768, abs=1e-3), pytest.approx(2.101, abs=1e-3))
    assert (one.difference.low, one.difference.high) == (pytest.approx(low), most)


@pytest.mark.parametrize(("noise", "verdict"), [(0.001, "equal"), (0.0, "undecided")])
def test_four_texts_decide_equality_only_where_their_changes_differ(
    noise: float, verdict: str, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change = shifted(0.0, noise)
    found = perplexities(compared(lambda row: change(row) if row.repeat < 4 else replace(row, status="oom"), baseline))
    assert {(one.pairs, one.verdict) for one in found} == {(4, verdict)}
    print_changes(Comparison(found), Terminal(width=80))
    reason = "the change is the same for all 4 texts"
    assert capsys.readouterr().out.count(reason) == (verdict == "undecided")  # once for all numbers


def test_an_unbounded_interval_has_a_reason(baseline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unbounded(*_: Any, **__: Any) -> list[Difference]:
        curves, values = ("baseline", "model"), (500.0, 499.0)
        return [Difference("reach", curves, values, -1.0, None, None, 0.9, 8, (), 30.0, 7.0)]

    monkeypatch.setattr("farspan.report.changes.differences", unbounded)
    (one,) = [one for one in compared(lambda row: row, baseline).changes if one.kind == "memory"]
    assert one.verdict == "undecided"
    assert one.reason == "in part of the resamples it is beyond the lengths measured, so its interval is unbounded"


def test_a_length_of_0_in_both_models_is_named(baseline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Difference("half_life", ("baseline", "model"), (0.0, 0.0), 0.0, None, None, 1.0, 8, (), 30.0, 7.0)
    none = replace(lost, name="span", low=0.0, high=0.0)
    found = [replace(lost, below=(64.0, 64.0)), none]
    monkeypatch.setattr("farspan.report.changes.differences", lambda *_, **__: found)
    changes = compared(lambda row: row, baseline)
    assert "full: half-life is below the lengths measured, of both models: not compared" in changes.remarks
    assert "full: span is 0 in both models: not compared" in changes.remarks
    assert "memory" not in {one.kind for one in changes.changes}


def half_of_copies(row: Row) -> Row:
    return row if row.task != "curve" else replace(row, scores=row.scores | {"copy": row.scores["control"]})


def test_a_lost_memory_is_worse(baseline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {one.name: one for one in compared(half_of_copies, baseline).changes if one.kind == "memory"}
    assert found["span"].verdict == "worse"
    assert found["span"].now == pytest.approx(0)
    print_changes(Comparison([found["reach"]]), Terminal(width=120))
    printed = capsys.readouterr().out
    assert (
        next(line.split()[2] for line in printed.splitlines() if "reach" in line) == "<64"
    )  # at 32 too few tokens are scored


def test_the_depths_of_a_text_are_one_pair(tmp_path: Path) -> None:
    task = "recall:points=4,warmup=4,scored=8"
    library.measure("demo", "full", task, **MEASURED, lengths=64, repeats=5, out=tmp_path / "run")
    before = read_baseline(tmp_path / "run")
    (found,) = compare(before, before).changes
    assert (len(before.rows), found.kind, found.pairs) == (20, "score", 5)


def with_costs(seconds: tuple[float, ...], kept: int) -> list[Row]:
    names = tuple(COSTS)
    scores = [dict(zip(names, (one, 32 / one, kept << 20), strict=True)) for one in seconds]
    return [Row("demo", "full", "cost", 1, {}, 64, i, 0, f"c{i}", scores=one) for i, one in enumerate(scores)]


@pytest.mark.parametrize(
    ("seconds", "kept", "verdicts"),
    [
        ((1.0, 1.01, 0.99), 100, ["equal", "equal", "equal"]),
        ((2.0, 2.02, 1.98), 100, ["worse", "worse", "equal"]),
        ((0.5, 0.505, 0.495), 100, ["better", "better", "equal"]),
        ((1.3, 0.9, 1.8), 200, ["undecided", "undecided", "worse"]),
    ],
)
def test_costs_are_worse_beyond_the_tolerance(
    seconds: tuple[float, ...], kept: int, verdicts: list[str], baseline: Path
) -> None:
    before = read_baseline(baseline)
    first, second = (
        replace(before, rows=[*before.rows, *with_costs(*one)]) for one in (((1.0, 1.02, 0.98), 100), (seconds, kept))
    )
    found = compare(first, second)
    costs = [one for one in found.changes if one.kind == "cost"]
    assert [one.verdict for one in costs] == verdicts
    assert (costs[2].name, costs[2].baseline, costs[2].now) == ("context MiB", 100, kept)


@pytest.mark.parametrize(("seconds", "verdict"), [((1.0, 1.0, 1.0), "equal"), ((2.0, 2.1, 2.2), "worse")])
def test_a_run_of_costs_alone_is_judged_by_them(seconds: tuple[float, ...], verdict: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    library.measure("demo", "full", "cost:new_tokens=2", lengths=64, repeats=1, out=run)
    before, now = (
        replace(read_run(run), rows=[replace(one, settings={"new_tokens": 2}) for one in with_costs(times, 100)])
        for times in ((1.0, 1.0, 1.0), seconds)
    )
    found = compare(before, now)
    assert (found.verdict, {one.kind for one in found.changes}, found.lacking) == (verdict, {"cost"}, [])


def test_a_cost_that_could_not_be_measured_is_named(baseline: Path) -> None:
    before = read_baseline(baseline)
    costs = with_costs((1.0, 1.02, 0.98), 100)
    failed = [replace(row, status="oom", reason="no memory", scores={}) for row in costs[1:]]
    first, second = (replace(before, rows=[*before.rows, *rows]) for rows in (costs, [costs[0], *failed]))
    found = compare(first, second)
    assert "cost" not in {one.kind for one in found.changes}
    names = ", ".join(name for name, *_ in COSTS.values())
    few = "the model has fewer than 3 measurements: oom: no memory"
    assert f"full {names} at 64 tokens: not compared, {few}" in found.remarks


def test_a_run_of_costs_is_not_equal_where_the_model_lacks_one(tmp_path: Path) -> None:
    run, times = tmp_path / "run", (1.0, 1.0, 1.0)
    library.measure("demo", "full", "cost:new_tokens=2", lengths=64, repeats=1, out=run)
    rows = [replace(one, settings={"new_tokens": 2}) for one in with_costs(times, 100)]
    far = [replace(one, length=128) for one in rows]
    failed = [replace(one, status="oom", reason="8 GiB", scores={}) for one in far]
    before, now = (replace(read_run(run), rows=[*rows, *more]) for more in (far, failed))
    for one, other, whose in ((before, now, "model"), (now, before, "baseline")):
        found = compare(one, other)
        assert (found.verdict, len(found.lacking)) == ("undecided", 1)
        assert f"128 tokens: not compared, the {whose} has fewer than 3 measurements: oom: 8 GiB" in found.lacking[0]


def test_costs_need_not_be_measured_again(tmp_path: Path) -> None:
    run, task = tmp_path / "base", "perplexity:target_tokens=8"
    library.measure("demo", "full", task, **MEASURED, lengths=32, repeats=5, cost=True, out=run)
    done = farspan("check", run, "demo", "--no-cost", "--out", tmp_path / "run", *CPU)
    assert "cost is not compared: that of the model was not measured" in done.stdout
    assert {row.task for row in read_rows(run)} == {"perplexity", "cost"}
    assert {row.task for row in read_rows(tmp_path / "run")} == {"perplexity"}


def test_costs_of_another_machine_are_not_compared(baseline: Path) -> None:
    before = read_baseline(baseline)
    before = replace(before, rows=[*before.rows, *with_costs((1.0, 1.02, 0.98), 100)])
    session = before.header["sessions"][-1] | {"threads": 99}
    found = compare(before, replace(before, header=before.header | {"sessions": [session]}))
    assert not [one for one in found.changes if one.kind == "cost"]
    assert any("threads (1 and 99)" in line for line in found.remarks)
    # nor are those of a run that was opened again here: its rows do not say where they were measured
    again = before.header | {"sessions": [session, before.header["sessions"][-1]]}
    found = compare(replace(before, header=again), before)
    assert not [one for one in found.changes if one.kind == "cost"]
    assert any("threads (99 and 1)" in line for line in found.remarks)


def test_numbers_are_not_folded_at_80_columns(baseline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = read_baseline(baseline)
    first = replace(before, rows=[*before.rows, *with_costs((1.0, 1.02, 0.98), 10**6)])
    second = replace(before, rows=[*map(shifted(0.1, 0.1), before.rows), *with_costs((1.3, 0.9, 1.8), 10**6)])
    print_changes(compare(first, second), Terminal(width=80))
    printed = capsys.readouterr().out
    assert len([line for line in printed.splitlines() if "within" in line and "verdict" in line]) == 1  # one table
    assert printed.count("[") == printed.count("]")
    assert all(line.count("[") == line.count("]") for line in printed.splitlines())
    assert "equal: the 90 % interval of the change (not shown) is within the tolerance" in printed


def test_a_wide_table_of_changes_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    named = [("cost", "tokens/s out"), ("perplexity", "perplexity"), ("score", "nats gained per mention")]
    some = [
        Change(kind, name, "full", "", 32_768, 1e4, 1.2e4, Estimate(0.1, -0.1, 0.3, 0.09), 0.2, True, 9, 0.09)
        for kind, name in named
    ]
    print_changes(Comparison(some), Terminal(width=80))
    printed = capsys.readouterr().out
    assert printed.count("baseline  ") == 1
    assert printed.count("p = 0.090") == 3
    assert "10,000 " in printed  # without decimals


def test_lengths_in_names_are_not_broken_at_their_comma(capsys: pytest.CaptureFixture[str]) -> None:
    one = Change("cost", "tokens/s out", "full", "", 32768, 1e4, 1.2e4, Estimate(0.1, -0.1, 0.3), 0.2, True, 3)
    print_changes(Comparison([one]), Terminal(width=60))
    assert "32,768" in capsys.readouterr().out


def test_a_length_beyond_those_measured_and_the_p_of_what_is_undecided_are_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    unsure = Estimate(-48.0, -90.0, -6.0, 0.03)
    one = Change(
        "memory", "reach", "full", "curve", None, 2048, 2000, unsure, 102, True, 9, 0.09, censored=("baseline",)
    )
    print_changes(Comparison([one]), Terminal(width=120))
    line = next(line.split() for line in capsys.readouterr().out.splitlines() if "reach" in line)
    assert line[1:4] == [">2,048", "2,000", "<-48"]
    assert " ".join(line).endswith("undecided, p = 0.090")


def test_changes_of_nats_are_not_points(capsys: pytest.CaptureFixture[str]) -> None:
    one = Change(
        "score", "nats gained per mention", "full", "", 64, 0.9, 0.7, Estimate(-0.2, -0.3, -0.1), 0.05, True, 9
    )
    print_changes(Comparison([one]), Terminal(width=120))
    printed = capsys.readouterr().out
    assert "-0.2 [-0.3, -0.1]" in printed
    assert "±0.05 nats" in printed


# what is refused


def test_a_file_of_a_method_that_has_changed_is_refused(tmp_path: Path) -> None:
    factors, pairs = tmp_path / "factors.json", 64
    factors.write_text(json.dumps([1.0] * pairs))
    how, run = f"rope:type=factors,factor=4,file={factors}", tmp_path / "run"
    library.measure("demo", how, TASKS[1], **MEASURED, lengths=32, repeats=2, out=run)
    factors.write_text(json.dumps([2.0] * pairs))
    said = refused(farspan("check", run, "demo", "--out", tmp_path / "again", *CPU))
    assert "factors.json has changed since this run measured rope:type=factors" in said


def test_a_baseline_without_a_number_to_compare_is_refused_before_it_is_measured(tmp_path: Path) -> None:
    library.measure(["demo"], ["full"], ["attention"], text="builtin:held-out", lengths=(64,), repeats=2, out=tmp_path)
    said = refused(farspan("check", tmp_path, "demo", "--out", tmp_path / "again", *CPU))
    assert "has nothing to compare: attention" in said
    assert not (tmp_path / "again").exists()


def test_another_tokenizer_is_refused(baseline: Path, damaged: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(damaged, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = refused(farspan("check", baseline, other, "--out", tmp_path / "run", *CPU))
    assert "has another tokenizer than the baseline demo" in said
    assert not (tmp_path / "run").exists()


@pytest.fixture
def rewritten(baseline: Path, tmp_path: Path) -> Callable[[str, str, str], Path]:
    """The baseline with some text of one of its files replaced."""

    def copy(name: str, old: str, new: str) -> Path:
        shutil.copytree(baseline, tmp_path / "copy")
        content = (tmp_path / "copy" / name).read_text()
        assert old in content
        (tmp_path / "copy" / name).write_text(content.replace(old, new))
        return tmp_path / "copy"

    return copy


def test_another_version_is_refused(rewritten: Callable[[str, str, str], Path]) -> None:
    said = refused(farspan("check", rewritten("rows.jsonl", '"version": 3', '"version": 2'), "demo", *CPU))
    assert "holds version 2 of the task curve, this farspan measures version 3" in said


def test_another_text_is_refused(rewritten: Callable[[str, str, str], Path], baseline: Path) -> None:
    known = read_rows(baseline)[0].settings["target_hash"]
    said = refused(farspan("check", rewritten("run.json", known, "0000"), "demo", *CPU))
    assert f"target_hash was '0000', now '{known}'" in said


def test_runs_that_are_no_baseline_are_refused(baseline: Path, tmp_path: Path) -> None:
    assert "holds no run" in refused(farspan("check", tmp_path, "demo"))
    assert "no model" in refused(farspan("check", baseline))
    old = tmp_path / "old"
    shutil.copytree(baseline, old)
    header = json.loads((old / "run.json").read_text())
    header["settings"] = {"task": "curve"}
    (old / "run.json").write_text(json.dumps(header))
    assert "does not record how it was measured" in refused(farspan("check", old, "demo"))
    (old / "run.json").write_bytes((baseline / "run.json").read_bytes())
    rows = [json.loads(line) for line in (baseline / "rows.jsonl").read_text().splitlines()]
    failed = [row | {"status": "oom", "reason": "no memory", "scores": {}} for row in rows]
    write_lines(old / "rows.jsonl", failed)
    assert "none of the 48 rows has a result, first: oom: no memory" in refused(farspan("check", old, "demo"))
    both = [*rows, *(row | {"model": "second"} for row in rows)]
    write_lines(old / "rows.jsonl", both)
    assert "holds 2 models (demo, second): name one with --baseline-model" in refused(farspan("check", old, "demo"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("speed=0.1", "known are memory"),
        ("0", "between 0 and 1"),
        ("memory=x", "between 0 and 1"),
        ("nan", "between 0 and 1"),
    ],
)
def test_wrong_tolerances_are_refused(given: str, said: str, baseline: Path) -> None:
    assert said in refused(farspan("check", baseline, "demo", "--tolerance", given))


def test_the_lengths_of_models_with_other_windows_cannot_be_repeated(baseline: Path, tmp_path: Path) -> None:
    folder = tmp_path / "both"
    shutil.copytree(baseline, folder)
    header = json.loads((folder / "run.json").read_text())
    header["settings"]["lengths"] = None
    header["models"]["short"] = header["models"]["demo"] | {"trained_length": 256}
    (folder / "run.json").write_text(json.dumps(header))
    said = refused(farspan("check", folder, "demo"))
    assert "follow from the trained lengths of all its models (demo: 512, short: 256 tokens)" in said


def test_a_search_is_no_baseline(baseline: Path, tmp_path: Path) -> None:
    folder = tmp_path / "search"
    shutil.copytree(baseline, folder)
    header = json.loads((folder / "run.json").read_text())
    header["settings"]["search"] = {"shape": "yarn"}
    (folder / "run.json").write_text(json.dumps(header))
    assert "is a search, which cannot be repeated" in refused(farspan("check", folder, "demo"))


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (lambda row: row.task == "perplexity", "curve:protocol=nested full is not compared: the baseline has no rows"),
        (lambda row: row.task == "curve", "perplexity:targets=fixed,target_tokens=16 full is not compared"),
        (lambda row: row.task == "curve" or row.length < 128, "full at 128 tokens is not compared: no example"),
        (lambda row: row.task == "perplexity" or row.length < 128, "full at 128 tokens is not compared: only one"),
    ],
)
def test_what_an_unfinished_baseline_lacks_is_named_and_nothing_is_equal(
    left: Callable[[Row], bool], said: str, baseline: Path
) -> None:
    whole = read_baseline(baseline)
    part = replace(whole, rows=[row for row in whole.rows if left(row)])
    found = compare(part, whole)
    assert found.verdict == "undecided"
    assert any(said in line for line in found.as_data()["remarks"])
    failed = replace(whole, rows=[row if left(row) else replace(row, status="nan", scores={}) for row in whole.rows])
    assert {compare(whole, other).verdict for other in (part, failed)} == {"undecided"}
    assert compare(whole, whole).verdict == "equal"


def test_the_first_lines_name_the_rows_that_a_cut_run_lacks_and_the_command_that_measures_them(
    baseline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "a b" / "cut"
    shutil.copytree(baseline, cut)
    lines = (cut / "rows.jsonl").read_text().splitlines(keepends=True)
    (cut / "rows.jsonl").write_text("".join(lines[:-3]) + lines[-3][:90])  # a last line torn by a kill
    header = json.loads((cut / "run.json").read_text())
    header["sessions"][-1]["command"] = ["/opt/bin/farspan", "compare", "demo", "--out", "a b"]
    (cut / "run.json").write_text(json.dumps(header))
    command = f"farspan compare demo --out '{cut}'"  # the run is where it is now, not where it was measured
    expected = f"3 of the 48 rows planned for demo. `{command}` measures them"
    assert expected in unfinished(read_baseline(cut))
    pytest.importorskip("jinja2")
    pytest.importorskip("plotly")
    done = farspan("report", cut, "--out", tmp_path / "report")
    assert expected in done.stderr
    markdown = (tmp_path / "report/report.md").read_text().replace("\\", "")
    assert expected in markdown[: markdown.index("##")]
    page = unescape((tmp_path / "report/report.html").read_text())
    assert expected in page[page.index("<h1>") : page.index("<h2")]
    library.open_run(cut).results.print_tables(Terminal(width=300))
    assert capsys.readouterr().out.startswith(f"the run cut is not finished: it lacks {expected}")
    done = farspan("check", cut, "demo", "--out", tmp_path / "run", "--json", *CPU)
    assert expected in done.stderr[: done.stderr.index("changes from the baseline")]
    assert expected in last_line(done)["unfinished"]


def test_a_run_of_several_commands_names_the_last_and_what_it_must_name(baseline: Path, tmp_path: Path) -> None:
    run = shutil.copytree(baseline, tmp_path / "run")
    rows = (run / "rows.jsonl").read_text().splitlines(keepends=True)
    (run / "rows.jsonl").write_text("".join(rows[:-3]))
    header = json.loads((run / "run.json").read_text())
    (session,) = header["sessions"]
    commands = [["farspan", "curve", "demo", "--repeats", count, "--out", str(run)] for count in ("4", "8")]
    header["sessions"] = [session | {"command": command} for command in commands]
    (run / "run.json").write_text(json.dumps(header))
    said = f"`farspan curve demo --repeats 8 --out {run}` measures them, if it names all models and methods of the run"
    assert said in unfinished(read_run(run))


@pytest.mark.parametrize(
    ("command", "folder", "continues"),
    [
        ("curve demo", "runs/curve-demo-0123abcd", "curve demo"),
        ("curve demo", "runs/first", "curve demo --out {}"),  # renamed
        ("curve demo", "elsewhere/runs/curve-demo-0123abcd", "curve demo --out {}"),
        ("curve demo --out=runs/first", "runs/first", "curve demo --out runs/first"),
        ("curve demo --out=runs/first", "runs/second", "curve demo --out {}"),
        ("demo", "runs/demo/natural", "demo"),
        ("demo", "runs/mine/natural", "demo --out {above}"),
        ("demo --out mine", "mine/shuffled", "demo --out mine"),
        ("train smt smt-demo", "smt-demo/perplexity", "train smt smt-demo"),
    ],
)
def test_the_command_of_an_unfinished_run_continues_it_in_its_folder(
    command: str, folder: str, continues: str, baseline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    whole = read_baseline(baseline)
    header = whole.header | {"sessions": [{"command": ["/opt/bin/farspan", *command.split()]}]}
    place = (tmp_path / folder).resolve()
    cut = replace(whole, folder=place, header=header, rows=whole.rows[:-1])
    assert f"`farspan {continues.format(place, above=place.parent)}` measures them" in unfinished(cut)


def test_models_with_the_same_weights_or_other_tokenizers_are_named(baseline: Path) -> None:
    whole = read_baseline(baseline)
    about = whole.header["models"]["demo"]

    def as_copy(**more: Any) -> Source:
        rows = [replace(row, model="copy") for row in whole.rows]
        return replace(whole, header=whole.header | {"models": {"copy": about | more}}, rows=rows)

    assert compare(whole, as_copy()).remarks[0].startswith("demo, copy have the same weights (fingerprint ")
    assert same_weights([whole, as_copy(fingerprint="another")]) == same_weights([whole, whole]) == []
    assert same_weights([as_copy(architecture=None), whole]) == []  # of a server
    (line,) = other_tokenizers([whole, as_copy(tokenizer="another")])
    assert line.startswith("models have different tokenizers (demo | copy): ")
    assert other_tokenizers([whole, as_copy()]) == other_tokenizers([whole, as_copy(tokenizer=None)]) == []


def test_rows_of_a_method_or_depth_that_was_not_begun_are_missing(tmp_path: Path) -> None:
    library.measure(["demo"], ["full"], ["passkey:depths=3"], lengths=(256, 384), repeats=2, out=tmp_path / "run")
    source = read_run(tmp_path / "run")
    assert unfinished(source) == ""
    settings = source.header["settings"]
    methods = {"methods": ["full", "sinks:window=64"]}
    later = source.header | {"settings": settings | methods}
    (session,) = later["sessions"]
    assert unfinished(replace(source, header=later)) == ""  # another model was measured under the second
    for one in (session | methods, {"command": []}):  # an older farspan did not record what a command named
        missing = unfinished(replace(source, header=later | {"sessions": [one]}))
        assert "it lacks 12 of the 24 rows planned for demo." in missing
    assert "1 of the 12 rows" in unfinished(replace(source, rows=source.rows[:-1]))
    unknown = replace(source, header=source.header | {"settings": settings | {"repeats": None}})
    assert "it lacks at least 1 rows." in unfinished(replace(unknown, rows=source.rows[:-1]))
    assert unfinished(replace(unknown, header=source.header | {"settings": settings | {"lengths": "auto"}})) == ""


def test_curves_that_chose_their_lengths_may_differ_in_them(baseline: Path) -> None:
    whole = read_baseline(baseline)
    header = whole.header | {"settings": whole.header["settings"] | {"lengths": "auto"}}
    curves = replace(whole, header=header, rows=[row for row in whole.rows if row.task == "curve"])
    fewer = replace(curves, rows=[row for row in curves.rows if row.length < 128])
    assert not compare(fewer, curves).lacking
    assert not compare(curves, fewer).lacking


def test_costs_of_sessions_on_other_machines_are_named(baseline: Path) -> None:
    whole = read_baseline(baseline)
    (session,) = whole.header["sessions"]
    costs = [replace(whole.rows[0], task="cost", scores={"prefill_seconds": 1.0})]

    def with_sessions(*sessions: Any, rows: Any = costs) -> Source:
        return replace(whole, header=whole.header | {"sessions": list(sessions)}, rows=[*whole.rows, *rows])

    other = session | {"threads": 64}
    expected = f"costs were measured in sessions that differ in threads ({session['threads']} and 64): times of"
    assert uneven_costs([with_sessions(session, other)])[0].startswith(expected)
    assert uneven_costs([with_sessions(session), with_sessions(other)])[0].startswith(expected)
    assert uneven_costs([with_sessions(session, session)]) == []
    elsewhere = session | {"devices": {costs[0].model: "cuda:0"}}
    (line,) = uneven_costs([with_sessions(session, elsewhere)])
    assert line.startswith("costs were measured in sessions that differ in device (cpu and cuda:0): times of")
    assert uneven_costs([with_sessions(session), with_sessions(other, rows=[])]) == []  # of which only one has costs
