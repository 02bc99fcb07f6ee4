"""Models and methods side by side: the same tokens, what failed, who wins, and what it cost."""

import csv
import json
import re
from collections import Counter
from dataclasses import asdict, dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import ttest_1samp, ttest_rel
from typer.testing import CliRunner

from farspan.cli import app
from farspan.hf import device
from farspan.lm import LM, wrap
from farspan.measuring.grid import measure, plans
from farspan.measuring.loop import Watch, measure_cell
from farspan.measuring.plan import plan_examples
from farspan.measuring.setups import grid
from farspan.methods import method
from farspan.record import Row, Run, read_header, read_rows
from farspan.report import cells as report
from farspan.report.export import plain
from farspan.report.figures import PRICES, cost_figure
from farspan.report.page import write_report
from farspan.report.runs import short_names
from farspan.report.sections import contents
from farspan.report.tables import WINS, print_comparison, write_comparison
from farspan.report.terminal import Results
from farspan.tasks import task
from farspan.tasks.cost import BoundCost
from farspan.tasks.curve import BoundCurve
from farspan.terminal import Terminal

from tiny import configure, tiny_model

METHODS = ["full", "sinks:window=12,sinks=2", "topk:k=4"]
LENGTHS = (16, 32)
TASKS = ("perplexity:target_tokens=8", "curve")


@dataclass(frozen=True)
class ShortCost(BoundCost):
    """A cost whose answers are short: these tests are not about its numbers."""

    new_tokens: int = 3


@pytest.fixture(autouse=True)
def _short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farspan.measuring.setups.BoundCost", ShortCost)


def settings(text: str, **changes: Any) -> dict[str, Any]:
    return {"text": text, "lengths": LENGTHS, "repeats": 4, "cost": True} | changes


def compare(
    lms: list[Any], methods: list[str], folder: Path, what: dict[str, Any], tasks: tuple[str, ...] = TASKS
) -> list[Row]:
    return measure(lms, methods, tasks, out=folder / "run", refusals=True, **what).rows


def compared(
    lms: list[Any],
    text: str,
    folder: Path,
    methods: list[str] = METHODS,
    tasks: tuple[str, ...] = TASKS,
    **changes: Any,
) -> list[report.Cell]:
    rows = compare(lms, methods, folder, settings(text, **changes), tasks)
    return report.cells(rows, read_header(folder / "run"))


def test_all_cells_are_asked_for_the_same_tokens(lm: LM, tokenizer: Any, text: str, tmp_path: Path) -> None:
    other = wrap(tiny_model("qwen2"), tokenizer, "tiny-other")
    rows = compare([lm, other], METHODS, tmp_path, settings(text))
    examples = {(row.model, row.method, row.task): set() for row in rows if row.task != "cost"}
    for row in rows:
        if row.task != "cost":
            examples[row.model, row.method, row.task].add((row.example, row.length))
    assert len(examples) == 2 * 3 * 2
    for asked in ("perplexity", "curve"):
        assert len({frozenset(v) for (_, _, name), v in examples.items() if name == asked}) == 1
    assert all(row.status == "ok" for row in rows)


def test_a_model_without_time_for_one_length_has_the_status_budget(lm: LM, text: str, tmp_path: Path) -> None:
    how = settings(text, lengths="auto", repeats=None, minutes=1e-9, cost=False)
    rows = compare([lm], ["full"], tmp_path, how, ("curve",))
    assert rows
    assert {row.status for row in rows} == {"budget"}
    assert all("0.0 s are left after timing" in str(row.reason) for row in rows)


@pytest.mark.parametrize(
    "tasks",
    [
        ("perplexity:targets=all", "perplexity:targets=all,buckets=4"),
        ("icl:set=copy,scoring=plain", "icl:set=copy,scoring=calibrated"),
    ],
)
def test_tasks_that_share_their_examples_have_rows_of_their_own(
    tasks: tuple[str, ...], lm: LM, text: str, tmp_path: Path
) -> None:
    how = {"lengths": (2, 4), "repeats": 3}
    if "perplexity" in tasks[0]:
        how = settings(text, lengths=(16, 32), cost=False)
    rows = compare([lm], ["full"], tmp_path, how, tasks)
    assert set(Counter(row.measurement for row in rows).values()) == {len(rows) / 2}
    assert rows[0].example == rows[len(rows) // 2].example
    assert rows == compare([lm], ["full"], tmp_path, how, tasks)  # nothing is measured again


def test_a_budget_that_ran_out_is_left_out_once_the_task_was_measured(lm: LM, text: str, tmp_path: Path) -> None:
    how = settings(text, lengths="auto", repeats=2, minutes=1e-9, cost=False)
    tasks = ("curve", "curve:target_text=shuffled")
    assert len({row.measurement for row in compare([lm], ["full"], tmp_path, how, tasks)}) == 2
    rows = compare([lm], ["full"], tmp_path, how | {"minutes": None}, tasks)
    assert {row.status for row in rows} == {"ok"}


def test_differences_of_shares_end_at_1_and_those_of_nats_do_not() -> None:
    def cell(quality: dict[str, Any]) -> report.Cell:
        entry = {"task": "passkey", "unit": "tokens", "quality": quality, "details": []}
        rows = [
            Row("tiny", method, "passkey", 1, {}, 64, i, 0, f"p{i}", scores={"right": float(right)})
            for method, answers in (("full", (0, 0, 0)), ("topk:k=4", (1, 1, 0)))
            for i, right in enumerate(answers)
        ]
        settings = {"tasks": {"passkey": entry}, "methods": ["full", "topk:k=4"]}
        header = {"settings": settings, "models": {"tiny": {"tasks": {"passkey": {}}}}}
        return report.cells(rows, header)[1]

    shares = {"score": "right", "name": "right answers", "higher_is_better": True, "exp": False, "graded": False}
    nats = shares | {"name": "nats gained per mention"}
    low, high = ttest_1samp([1, 1, 0], 0).confidence_interval()
    assert high > 2
    assert (cell(shares).difference_low, cell(shares).difference_high) == (pytest.approx(low), 1.0)
    assert (cell(nats).difference_low, cell(nats).difference_high) == (pytest.approx(low), pytest.approx(high))


def test_a_cell_holds_the_mean_of_its_rows_and_the_paired_test(lm: LM, text: str, tmp_path: Path) -> None:
    found = compared([lm], text, tmp_path, cost=False)
    rows = read_rows(tmp_path / "run")

    def nats(how: str, length: int) -> list[float]:
        mine = [r for r in rows if (r.task, r.method, r.length) == ("perplexity", how, length)]
        return [r.scores["nats"] for r in sorted(mine, key=lambda r: r.repeat)]

    cell = next(c for c in found if (c.method, c.length, c.exp) == ("topk:k=4", 32, True))
    mine, base = nats("topk:k=4", 32), nats("full", 32)
    assert cell.value == pytest.approx(np.exp(np.mean(mine)))
    assert cell.difference == pytest.approx(np.mean(mine) - np.mean(base))
    expected = ttest_rel(mine, base)
    assert cell.p == pytest.approx(expected.pvalue)
    low, high = expected.confidence_interval()
    assert (cell.difference_low, cell.difference_high) == (pytest.approx(low), pytest.approx(high))
    assert (cell.n, cell.pairs) == (4, 4)
    of_task = [c.p for c in found if c.exp and c.p is not None]
    assert len(of_task) == 4
    assert cell.p_holm is not None
    assert cell.p_holm >= cell.p


SETTINGS = {"targets": "fixed", "target_tokens": 4, "text": "books"}


def row(method: str, example: str, nats: float, model: str = "m", **more: Any) -> Row:
    return Row(model, method, "perplexity", 1, SETTINGS, 8, 0, 0, example, scores={"nats": nats}, **more)


NATS = {"score": "nats", "name": "perplexity", "higher_is_better": False, "exp": True, "graded": False}
ENTRY = {"task": "perplexity", "unit": "tokens", "quality": NATS, "details": []}
HEADER = {
    "models": {"m": {"tasks": {"perplexity": SETTINGS}}},
    "settings": {"compared": True, "methods": ["full", "better", "worse", "same"], "tasks": {"perplexity": ENTRY}},
}


def test_verdicts_are_of_what_is_certain_and_know_which_way_is_better() -> None:
    noise = np.random.default_rng(0).normal(size=(4, 8))
    shift = {"full": 0.0, "better": -1.0, "worse": 1.0, "same": 0.0}
    rows = [row(how, str(i), i + by + 0.1 * noise[k, i]) for k, (how, by) in enumerate(shift.items()) for i in range(8)]
    verdicts = {cell.method: cell.verdict for cell in report.cells(rows, HEADER)}
    assert verdicts == {"full": "", "better": "win", "worse": "loss", "same": "not shown"}


def test_rounding_that_all_examples_have_is_no_win() -> None:
    shift = {"full": 0.0, "better": -1e-4, "worse": 1e-3}
    rows = [row(how, str(i), i + by + 1e-6 * i) for how, by in shift.items() for i in range(8)]
    full, better, worse = report.cells(rows, HEADER)
    assert better.p_holm is not None
    assert better.p_holm < 0.02
    assert (full.verdict, better.verdict, worse.verdict) == ("", "not shown", "loss")


def test_a_cell_whose_cost_failed_has_its_reason() -> None:
    cost = Row("m", "full", "cost", 1, {}, 8, 0, 0, "c", status="oom", reason="8 GiB")
    cell = report.cells([row("full", "a", 1.0), cost], HEADER)[0]
    assert (cell.cost_failed, cell.cost_reason) == ("oom", "8 GiB")
    assert not {"cost_failed", "cost_reason"} & report.as_plain(cell).keys()


def test_the_command_for_the_page_can_be_copied_with_spaces_in_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    Results([row("full", "a", 1.0)], HEADER | {"sessions": []}, folder).print(Terminal())
    assert f"page: farspan report '{folder}'" in capsys.readouterr().out


def test_a_cost_that_failed_counts_once_as_a_failure(tmp_path: Path) -> None:
    tasks = {f"perplexity:target_tokens={n}": ENTRY for n in (4, 8)}
    known = {spec: SETTINGS | {"target_tokens": n} for spec, n in zip(tasks, (4, 8), strict=True)}
    header = HEADER | {
        "models": {"m": {"tasks": known}},
        "settings": {"compared": True, "methods": ["full"], "tasks": tasks},
    }
    rows = [replace(row("full", spec, 1.0), settings=one) for spec, one in known.items()]
    costs = [Row("m", "full", "cost", 1, {}, 8, i, 0, f"c{i}", status="oom", reason="8 GiB") for i in range(2)]
    for some, failed in (([], 0), (costs, 1)):
        found = Results(rows + some, header, tmp_path)
        assert len([cell for cells in found.cells for cell in cells]) == 2
        assert found.num_failed == found.as_data()["failed_cells"] == failed


def test_the_costs_of_several_tasks_are_shown_once_on_a_page(tmp_path: Path) -> None:
    tasks = {f"perplexity:target_tokens={n}": ENTRY for n in (4, 8)}
    known = {spec: SETTINGS | {"target_tokens": n} for spec, n in zip(tasks, (4, 8), strict=True)}
    header = {"models": {"m": {"tasks": known}}, "settings": {"methods": ["full"], "tasks": tasks}, "sessions": []}
    scores = {"nats": 1.0, "accuracy": 0.5}
    rows = [replace(row("full", spec, 1.0), settings=one, scores=scores) for spec, one in known.items()]
    rows.append(Row("m", "full", "cost", 1, {}, 8, 0, 0, "c", scores={"prefill_rate": 10.0, "decode_rate": 2.0}))
    found = Results(rows, header, tmp_path)
    shown = contents([found.source], found.groups, found.parts)["groups"]
    assert [len(one["costs"]) for one in shown] == [1, 0]


def test_rows_without_key_tokens_or_time_have_not_failed(tmp_path: Path) -> None:
    how = {"no_keys": "full", "budget": "better", "oom": "worse"}
    rows = [row(name, "a", 1.0, status=status, reason=f"of {status}") for status, name in how.items()]
    rows.append(replace(row("worse", "b", 1.0), status="budget", repeat=1))
    found = Results(rows, HEADER, tmp_path)
    assert (found.num_failed, found.failures) == (1, ["1 of 4 rows failed:", "perplexity: m worse at 8: oom: of oom"])
    assert found.absent == "3 of 4 rows have no number, first at length 8, repeat 0: of no_keys"
    assert "no_keys" not in "\n".join(line for line in written(found, tmp_path) if line.startswith("- "))


def written(found: Results, folder: Path) -> list[str]:
    """The lines of compare.md."""
    path, _ = write_comparison([cell for cells in found.cells for cell in cells], folder)
    return path.read_text().splitlines()


def test_right_and_wrong_answers_have_intervals_within_0_and_1() -> None:
    entry = ENTRY | {"quality": NATS | {"score": "hit", "name": "accuracy", "higher_is_better": True, "exp": False}}
    header = HEADER | {"settings": {"methods": ["full", "better"], "tasks": {"perplexity": entry}}}
    right = {"full": [1.0] * 6, "better": [1.0] * 5 + [0.0]}
    rows = [
        Row("m", how, "perplexity", 1, SETTINGS, 8, 0, 0, str(i), scores={"hit": hit})
        for how, hits in right.items()
        for i, hit in enumerate(hits)
    ]
    ends = [(round(one.low or 0, 2), round(one.high or 0, 2)) for one in report.cells(rows, header)]
    assert ends == [(0.61, 1.0), (0.44, 0.97)]  # Wilson's score interval of 6 and of 5 among 6


SLICES = {"protocol": "nested", "target_text": "t", "target_hash": "h", "prefix_text": None, "prefix_hash": None}


def of_depths(task: str, method: str, shift: float) -> list[Row]:
    """Rows of four texts at eight depths; texts differ more than the depths of one."""
    noise = np.random.default_rng(0).normal(scale=0.05, size=(2, 4, 8))
    scores = 0.5 + 0.1 * np.arange(4)[:, None] + noise[0] + (shift * np.array([[0.2], [1.0], [1.4], [1.4]]) + noise[1])
    found = {(i, k): {"copy": float(scores[i, k]), "control": 0.0, "control_repeat": i} for i, k in np.ndindex(4, 8)}
    return [
        Row("m", method, task, 1, SLICES, 8, i, 0, str(i), depth=k / 8, scores=numbers)
        for (i, k), numbers in found.items()
    ]


@pytest.mark.parametrize(
    ("task", "recorded", "n"),
    [
        ("curve", {}, 4),
        ("needle", {}, 32),
        ("mine", {"same_at_depths": True}, 4),
        ("mine", {"same_at_depths": False}, 32),
    ],
)
def test_the_depths_of_a_copied_text_are_one_example(task: str, recorded: dict[str, bool], n: int) -> None:
    """Slices of one text are not independent; needles at several depths are questions of their own."""
    quality = {"score": "copy", "name": "copy accuracy", "higher_is_better": True, "exp": False, "graded": True}
    tasks = {task: {"task": task, "unit": "tokens", "quality": quality} | recorded}
    header = {"models": {"m": {"tasks": {task: SLICES}}}, "settings": {"methods": ["full", "worse"], "tasks": tasks}}
    rows = of_depths(task, "full", 0.0) + of_depths(task, "worse", -0.1)
    full, worse = report.cells(rows, header)
    assert (full.n, worse.n, worse.pairs) == (n, n, n)
    table = np.array([one.scores["copy"] for one in rows]).reshape(2, 4, 8)
    values, differences = table.reshape(2, n, -1).mean(2), (table[1] - table[0]).reshape(n, -1).mean(1)
    assert worse.p == pytest.approx(ttest_1samp(differences, 0).pvalue)
    low, high = ttest_1samp(values[1], 0).confidence_interval(0.95)
    assert (worse.value, worse.low, worse.high) == (
        pytest.approx(table[1].mean()),
        pytest.approx(low),
        pytest.approx(high),
    )


def test_the_table_has_intervals_and_says_when_examples_are_few() -> None:
    for count, few in ((4, True), (8, False)):
        rows = [row(how, str(i), 2 + 0.1 * i) for how in ("full", "better") for i in range(count)]
        found = report.cells(rows, HEADER)
        file = StringIO()
        print_comparison(found, Terminal(file=file, width=100))
        shown = file.getvalue()
        assert f"n = {count} examples, 95 % intervals" in shown
        first = found[0]
        assert first.low is not None
        assert f"[{first.low:.2f}, " in shown
        assert ("intervals of fewer than 8 examples are wide" in " ".join(shown.split())) == few
        assert max(map(len, shown.splitlines())) <= 100


def test_other_examples_are_not_compared() -> None:
    rows = [row("full", f"a{i}", i) for i in range(4)] + [row("better", f"b{i}", i - 3.0) for i in range(4)]
    cell = report.cells(rows, HEADER)[1]
    assert (cell.value is not None, cell.pairs, cell.verdict, cell.p) == (True, 0, "", None)


def test_a_table_notes_once_why_cells_have_no_mark(tmp_path: Path) -> None:
    note = "no mark without shared examples, as of models with another tokenizer than the baseline"
    rows = [row(how, str(i), i + by + 0.01 * (-1) ** i) for how, by in (("full", 0), ("better", -1)) for i in range(8)]
    other = [row("worse", f"other {i}", i + 1.0) for i in range(8)]
    missing = [row("worse", "other", 1.0, status="oom")]
    models = {"m": HEADER["models"]["m"] | {"name": "m"}}
    (tmp_path / "run.json").write_text(json.dumps(HEADER | {"models": models, "sessions": []}))
    for some, noted in (([*rows, *missing], False), ([*rows, *other], True)):
        table, _ = write_comparison(report.cells(some, HEADER), tmp_path)
        assert table.read_text().count(note) == noted
        more = {"accuracy": 0.5, "scored": 4}
        whole = [asdict(one) | {"repeat": i % 8, "scores": one.scores | more} for i, one in enumerate(some)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in whole))
        page, *_ = write_report([tmp_path], tmp_path / "page")
        assert page.read_text().count(f"after Holm; {note}.") == noted


def test_what_a_model_or_method_refuses_is_a_row_that_says_so_and_the_others_go_on(
    lm: LM, tokenizer: Any, text: str, tmp_path: Path
) -> None:
    gpt2 = wrap(tiny_model("gpt2"), tokenizer, "tiny-gpt2")
    said: list[str] = []
    what = settings(text) | {"watch": Watch(notice=said.append)}
    rows = compare([lm, gpt2], ["full", "rope:type=yarn,factor=2"], tmp_path, what)
    found = report.cells(rows, read_header(tmp_path / "run"))
    refused = [cell for cell in found if cell.failed]
    assert {(cell.model, cell.method, cell.failed) for cell in refused} == {
        ("tiny-gpt2", "rope:type=yarn,factor=2", "refused")
    }
    assert len(refused) == 2 * len(LENGTHS)
    assert all("RoPE" in cell.reason for cell in refused)
    assert sum(cell.value is not None for cell in found) == 3 * 2 * len(LENGTHS)
    assert any("tiny-gpt2" in line for line in said)
    assert len(report.failures(found)) == 2


def test_lengths_that_are_too_short_are_refused_and_the_others_measured(
    folder: Path, text: str, tmp_path: Path
) -> None:
    arguments = ["compare", str(folder), "--text", text, "--lengths", "8,16,32", "--repeats", "3", "--no-cost"]
    arguments += ["--task", "perplexity:target_tokens=8", "--task", "curve", "--out", str(tmp_path / "run")]
    result = CliRunner().invoke(app, [*arguments, "--method", "full", "--method", "topk:k=4"])
    assert result.exit_code == 1
    rows = read_rows(tmp_path / "run")
    found = {(cell.task.partition(":")[0], cell.method, cell.length): cell for cell in report.cells(
        rows, read_header(tmp_path / "run"))}  # fmt: skip
    failed = {key: cell.failed for key, cell in found.items() if cell.failed}
    assert failed == {("perplexity", how, 8): "refused" for how in ("full", "topk:k=4")}
    assert all(cell.n == 3 for key, cell in found.items() if key not in failed)
    said = [line for line in result.stderr.splitlines() if "at 8: refused" in line]
    assert len(said) == 1
    assert "full, " in said[0]
    assert "topk:k=4 at 8: refused: 8 target tokens leave no context in lengths up to 8 tokens" in said[0]
    assert "give fewer (perplexity:target_tokens=N; farspan perplexity: --target-tokens N)" in said[0]
    before = (tmp_path / "run" / "rows.jsonl").read_bytes()
    assert CliRunner().invoke(app, [*arguments, "--method", "full", "--method", "topk:k=4"]).exit_code == 1
    assert (tmp_path / "run" / "rows.jsonl").read_bytes() == before


def test_lengths_longer_than_the_text_are_refused_and_the_others_measured(lm: LM, text: str, tmp_path: Path) -> None:
    found = compared([lm], text, tmp_path, ["full"], lengths=(16, 32, 4096), cost=False)
    assert {(cell.length, cell.failed) for cell in found} == {(16, ""), (32, ""), (4096, "refused")}
    assert all("tokens" in cell.reason for cell in found if cell.failed)


def test_a_method_that_fails_at_a_long_length_keeps_the_shorter_ones(lm: LM, text: str, tmp_path: Path) -> None:
    how = "selfextend:group=2,window=16"
    found = compared(
        [lm], text, tmp_path, [how], tasks=("curve",), lengths=(16, 32, 600), repeats=2, batch=2, cost=False
    )
    assert [(cell.length, cell.n, cell.failed, cell.statuses) for cell in found] == [
        (16, 2, "", {}), (32, 2, "", {}), (600, 0, "refused", {"refused": 1})
    ]  # fmt: skip


def test_a_method_that_fails_after_some_repeats_is_called_refused(
    lm: LM, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, count = BoundCurve.run, [0]

    def fails(*arguments: Any, **options: Any) -> Any:
        count[0] += 1
        if count[0] > 2:
            raise ValueError("too much")
        return read(*arguments, **options)

    monkeypatch.setattr(BoundCurve, "run", fails)
    task = "curve:depths=0.0+0.25+0.5+0.75,protocol=probe,warmup=2,scored=4"
    (cell,) = compared([lm], text, tmp_path, ["full"], tasks=(task,), lengths=(32,), repeats=4, batch=1, cost=False)
    assert (cell.n, cell.statuses) == (1, {"refused": 1})  # of two repeats, one text has both halves


def test_two_questions_of_one_task_that_are_refused_are_two_rows(lm: LM, text: str, tmp_path: Path) -> None:
    tasks = ("perplexity:target_tokens=64", "perplexity:target_tokens=96")
    found = compared([lm], text, tmp_path, ["full"], tasks=tasks, cost=False)
    assert {(cell.task, cell.failed) for cell in found} == {
        (f"perplexity:targets=fixed,target_tokens={n}", "refused") for n in (64, 96)
    }
    assert {cell.reason[:2] for cell in found} == {"64", "96"}


def test_a_refusal_of_lengths_or_repeats_ends_when_the_run_is_continued_without_them(
    lm: LM, text: str, tmp_path: Path
) -> None:
    def measured(**changes: Any) -> list[tuple[int, int, dict[str, int]]]:
        how = {"tasks": ("perplexity:target_tokens=8",), "lengths": (16, 32), "cost": False} | changes
        found = compared([lm], text, tmp_path, ["full"], **how)
        assert found == report.cells(read_rows(tmp_path / "run"), read_header(tmp_path / "run"))
        return [(cell.length, cell.n, cell.statuses) for cell in found]

    for repeats in (4, 5):
        complete = [(16, repeats, {}), (32, repeats, {})]
        assert measured(repeats=repeats) == complete
        refused = [(16, repeats, {"refused": 1}), (32, repeats, {"refused": 1})]
        assert measured(repeats=10_000) == measured(repeats=10_000) == refused
        assert measured(repeats=repeats) == complete
    assert measured(repeats=5, lengths=(8, 16, 32)) == [(8, 0, {"refused": 1}), *complete]
    assert measured(repeats=5) == complete


def test_what_is_recorded_is_not_measured_again(lm: LM, text: str, tmp_path: Path) -> None:
    compared([lm], text, tmp_path)
    before = (tmp_path / "run" / "rows.jsonl").read_bytes()
    compared([lm], text, tmp_path)
    assert (tmp_path / "run" / "rows.jsonl").read_bytes() == before


def test_another_command_adds_methods_to_a_run_and_drops_none_with_rows(lm: LM, text: str, tmp_path: Path) -> None:
    compared([lm], text, tmp_path, METHODS[:2])
    before = (tmp_path / "run" / "rows.jsonl").read_bytes()
    added = ["full", "topk:k=4", METHODS[1]]
    found = compared([lm], text, tmp_path, added)
    after = (tmp_path / "run" / "rows.jsonl").read_bytes()
    assert after.startswith(before)
    assert {json.loads(line)["method"] for line in after[len(before) :].splitlines()} == {"topk:k=4"}
    assert list(dict.fromkeys(cell.method for cell in found)) == added
    assert read_header(tmp_path / "run")["settings"]["methods"] == added
    for first in METHODS[1:2], ["topk:k=4", "full"]:  # the first method is the baseline
        compared([lm], text, tmp_path, first)
        methods = read_header(tmp_path / "run")["settings"]["methods"]
        assert methods[: len(first)] == first
        assert sorted(methods) == sorted(added)
    assert (tmp_path / "run" / "rows.jsonl").read_bytes() == after


def test_a_method_that_was_refused_can_be_left_out_again(lm: LM, text: str, tmp_path: Path) -> None:
    asked = {"text": text, "lengths": (16,), "repeats": 2, "out": tmp_path / "run"}
    measure(lm, "full", "perplexity:target_tokens=8", **asked)
    with pytest.raises(ValueError, match="reads with an encoder"):
        measure(lm, ["full", "cepe"], "perplexity:target_tokens=8", **asked)
    measure(lm, "full", "perplexity:target_tokens=8", **asked)
    assert read_header(tmp_path / "run")["settings"]["methods"] == ["full"]


def test_a_method_is_named_once(lm: LM, text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"method topk:k=4 is given twice: name each once"):
        compared([lm], text, tmp_path, ["topk:k=4", "full", "topk:k=4"])


def test_a_model_is_named_once(lm: LM, text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"model {lm.name} is given twice: name each once"):
        compared([lm, lm], text, tmp_path, ["full"])
    with pytest.raises(ValueError, match="model demo is given twice: name each once"):
        grid(["demo", "gpt2", "demo"], "passkey")


def test_a_refused_method_that_is_left_out_is_in_no_table_and_no_failure(lm: LM, text: str, tmp_path: Path) -> None:
    compared([lm], text, tmp_path, ["full", "cepe"], cost=False)
    rows = compare([lm], ["full"], tmp_path, settings(text, cost=False))
    found = Results(rows, read_header(tmp_path / "run"), tmp_path / "run")
    assert found.num_failed == 0
    assert found.failures == []
    assert {cell.method for cells in found.cells for cell in cells} == {"full"}


def test_a_run_is_not_continued_with_a_file_of_a_method_that_has_changed(lm: LM, text: str, tmp_path: Path) -> None:
    factors = tmp_path / "factors.json"
    how = f"rope:type=factors,factor=4,file={factors}"
    factors.write_text("[1, 2]")  # of another model
    assert {cell.failed for cell in compared([lm], text, tmp_path, [how], cost=False)} == {"refused"}
    factors.write_text("[1, 2, 3, 4]")
    rows = compare([lm], ["full", how], tmp_path, settings(text, cost=False))
    assert {row.status for row in rows} == {"ok"}  # the refusal has been replaced
    factors.write_text("[1, 2, 3, 5]")
    with pytest.raises(ValueError, match=r"factors.json has changed since this run measured rope:type=factors"):
        compared([lm], text, tmp_path, [how], cost=False)
    compared([lm], text, tmp_path, ["full"], cost=False)
    with pytest.raises(ValueError, match="has changed"):
        compared([lm], text, tmp_path, [how], cost=False)
    factors.unlink()
    with pytest.raises(ValueError, match="now there is no such file"):
        compared([lm], text, tmp_path, [how], cost=False)


def test_cost_splits_what_is_held_from_what_is_passing(lm: LM, tmp_path: Path) -> None:
    with Run.open(tmp_path, {}) as run:
        for text in ("full", "sinks:window=40,sinks=4"):
            measure_cell(BoundCost(new_tokens=4), method(text), lm, run, lengths=(64, 256), repeats=1, batch=1)
        found = {(row.method, row.length): row.scores for row in run.rows}
    weights = sum(p.numel() * p.element_size() for p in [*lm.model.parameters(), *lm.model.buffers()])
    for scores in found.values():
        assert scores["weight_bytes"] == weights
        assert scores["prefill_rate"] > 0
        assert scores["decode_rate"] > 0
        assert scores["activation_bytes"] >= 0
    per_token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, dimensions, bytes
    assert found["full", 256]["context_bytes"] >= 255 * per_token
    assert found["full", 64]["context_bytes"] < 128 * per_token  # no room that another length needs
    windowed = {length: found["sinks:window=40,sinks=4", length]["context_bytes"] for length in (64, 256)}
    assert windowed[256] <= 1.1 * windowed[64]


def test_costs_are_measured_alone(lm: LM, tmp_path: Path) -> None:
    methods = ["full", "topk:k=4"]
    found = measure([lm], methods, "cost:new_tokens=3", lengths=(16, 32), repeats=4, out=tmp_path / "run")
    assert {(row.task, row.status) for row in found.rows} == {("cost", "ok")}
    assert len(found.rows) == 2 * 2 * 4
    cells = report.cells(found.rows, read_header(tmp_path / "run"))
    for cell in cells:
        seconds = [
            one.scores["prefill_seconds"]
            for one in found.rows
            if (one.method, one.length) == (cell.method, cell.length)
        ]
        assert cell.value == pytest.approx(np.mean(seconds))
        assert cell.prefill_seconds == pytest.approx(np.median(seconds))
        assert (cell.n, cell.quality) == (4, "seconds to the first token")
    assert {cell.verdict for cell in cells} == {""}  # of times, which also depend on what else the machine does
    prices = {price: cost_figure(cells, price, False) is not None for price in PRICES}
    assert prices == {"seconds": False, "rate": False, "memory": True}  # not seconds against seconds


def test_costs_asked_for_twice_are_measured_once(lm: LM, text: str, tmp_path: Path) -> None:
    rows = compare([lm], ["full"], tmp_path, settings(text), ("perplexity:target_tokens=8", "cost:new_tokens=2"))
    assert [row.settings for row in rows if row.task == "cost"] == [{"new_tokens": 2}] * 2 * 4


def test_times_are_no_shares(tmp_path: Path) -> None:
    quality = {"score": "prefill_seconds", "name": "seconds to the first token", "exp": False}
    low, high = report.interval_of(np.array([0.4, 0.7, 0.95]), quality)
    assert low is not None
    assert high is not None
    assert low < 0.1
    assert high > 1.3
    assert report.interval_of(np.array([0.1, 0.3]), quality)[0] == 0.0  # no time is below it
    low, _ = report.interval_of(np.array([0.45, 0.7, 0.95]), quality)
    assert low is not None
    assert low > 0


def test_two_settings_of_the_cost_are_refused_in_one_run(lm: LM, tmp_path: Path) -> None:
    tasks = ["cost:new_tokens=2", "cost:new_tokens=4"]
    with pytest.raises(ValueError, match="cost:new_tokens=2 and cost:new_tokens=4 would share one table of costs"):
        measure([lm], ["full"], tasks, lengths=16, out=tmp_path / "run")


def test_a_cost_without_a_token_to_read_is_refused(lm: LM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="length 1 has no token to read before the last one: give 2 tokens or more"):
        measure([lm], ["full"], "cost", lengths=1, out=tmp_path / "run")


def test_the_peak_of_some_work_is_what_it_took_above_what_was_there() -> None:
    with device.peak_above(torch.device("cpu")) as peak:
        block = torch.ones(50 << 18)  # 50 MiB
        del block
    with device.peak_above(torch.device("cpu")) as nothing:
        pass
    if peak.num_bytes is None:
        pytest.skip("the peak of a process is not known on this system")
    assert 45 << 20 <= peak.num_bytes <= 60 << 20
    assert nothing.num_bytes is not None
    assert nothing.num_bytes < 5 << 20


def test_what_cannot_fit_is_a_row_that_says_so_without_being_tried(
    lm: LM, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    per_token = 2 * 2 * 2 * 8 * 4
    monkeypatch.setattr("farspan.hf.free_bytes", lambda device: 30 * per_token)
    found = compared([lm], text, tmp_path, ["full", "sinks:window=12,sinks=2"], tasks=("perplexity:target_tokens=8",))
    failed = {(cell.method, cell.length): cell.reason for cell in found if cell.failed}
    assert set(failed) == {("full", 32), ("sinks:window=12,sinks=2", 32)} or set(failed) == {("full", 32)}
    assert failed["full", 32].startswith("keys of ")
    assert failed["full", 32].endswith(" KiB alone, 7.50 KiB are free")


def test_a_plan_has_a_line_for_each_cell(tmp_path: Path, text: str, folder: Path) -> None:
    what = grid([str(folder)], TASKS, refusals=True, **settings(text, cost=False))
    planned = list(plans([str(folder)], ["full", "sinks:window=9000"], what))
    assert [(one.what, one.length) for one in planned if one.method == "full"] == [
        ("perplexity:targets=fixed,target_tokens=8", 16), ("perplexity:targets=fixed,target_tokens=8", 32),
        ("curve:protocol=nested", 16), ("curve:protocol=nested", 32),
    ]  # fmt: skip
    assert all(isinstance(one.cost, str) == one.method.startswith("sinks") for one in planned)


def test_a_plan_by_length_counts_the_text_that_lengths_share_once(text: str, folder: Path) -> None:
    def costs(*, refusals: bool) -> list[tuple[int, float, float]]:
        what = grid([str(folder)], TASKS, refusals=refusals, **settings(text, cost=False))
        found: dict[str, list[Any]] = {}
        for one in plans([str(folder)], "full", what, tflops=1.0):
            found.setdefault(one.what, []).append(one.cost)
        return [
            (sum(p.tokens for p in some), sum(p.flops for p in some), sum(p.seconds for p in some))
            for some in found.values()
        ]

    assert costs(refusals=True) == [pytest.approx(one) for one in costs(refusals=False)]


def test_the_first_length_of_a_plan_is_planned_once(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[set[int]] = []

    def watched(bound: Any, how: Any, lm: LM, examples: Any, *given: Any, **more: Any) -> Any:
        planned.append({length for example in examples for length in example.lengths})
        return plan_examples(bound, how, lm, examples, *given, **more)

    monkeypatch.setattr("farspan.measuring.grid.plan_examples", watched)
    what = grid([str(folder)], TASKS[:1], refusals=True, **settings(text, cost=False))
    assert len(list(plans([str(folder)], "full", what))) == 2
    assert planned == [{16}, {32}, {16, 32}]


@pytest.mark.parametrize(("lengths", "targets"), [("auto", 64), ("512,1024", 256), ("64,256", 32)])
def test_the_default_task_has_targets_that_fit_the_shortest_length(
    lengths: str, targets: int, text: str, folder: Path
) -> None:
    arguments = ["compare", str(folder), "--plan", "--json", "--text", text, "--lengths", lengths, "--no-cost"]
    result = CliRunner().invoke(app, [*arguments, "--repeats", "2"])
    whats = {one["what"] for one in json.loads(result.stdout.splitlines()[-1])["plans"]}
    assert whats == {f"perplexity:targets=fixed,target_tokens={targets}"}


def test_a_plan_prints_each_reason_of_a_method_once(text: str, folder: Path) -> None:
    arguments = ["compare", str(folder), "--plan", "--text", text, "--lengths", "6,7,8,32", "--no-cost"]
    result = CliRunner().invoke(app, [*arguments, "--task", "perplexity:target_tokens=8"])
    (line,) = [line for line in result.stdout.splitlines() if "target tokens leave no context" in line]
    assert "target_tokens=8 at 6, 7, 8: refused: 8 target tokens" in line
    several = ["--method", "full", "--method", "knorm:capacity=8", "--method", "sinks:window=9000"]
    shown = CliRunner().invoke(app, [*arguments, *several, "--task", "perplexity:target_tokens=8"]).stdout
    assert shown.count("target tokens leave no context") == 1
    assert shown.count("sinks:window=9000,sinks=4, perplexity:target") == 1
    configure(folder, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert CliRunner().invoke(app, arguments).stdout.count("read with plain forwards") == 1


def test_a_plan_by_length_leaves_out_what_the_run_has(tmp_path: Path, text: str, folder: Path) -> None:
    asked, out = settings(text), tmp_path / "run"
    what = grid([str(folder)], TASKS, refusals=True, **asked)

    def left() -> dict[tuple[str, int | None], int]:
        planned = plans([str(folder)], METHODS[:1], what, out=out)
        return {(one.what, one.length): one.cost.num_examples for one in planned if not isinstance(one.cost, str)}

    names = [*left()]
    assert len(names) == 2 * len(TASKS) + 2  # and the cost
    measure([str(folder)], METHODS[:1], TASKS, out=out, refusals=True, **asked)
    assert left() == dict.fromkeys(names, 0)
    rows = (out / "rows.jsonl").read_text().splitlines(keepends=True)
    short = [line for line in rows if json.loads(line)["length"] == 16 and json.loads(line)["task"] == "perplexity"]
    (out / "rows.jsonl").write_text("".join(line for line in rows if line not in short))
    assert {name: count for name, count in left().items() if count} == {names[0]: 4}
    other = grid([str(folder)], TASKS, refusals=True, **asked, seed=1)
    with pytest.raises(ValueError, match="seed was 0, now 1"):
        next(plans([str(folder)], METHODS[:1], other, out=out))


def test_the_command_prints_tables_draws_and_ends_with_what_failed(
    folder: Path, text: str, tmp_path: Path, drawn: None
) -> None:
    arguments = ["compare", str(folder), "--text", text, "--lengths", "16,32", "--repeats", "3", "--json"]
    arguments += ["--task", "perplexity:target_tokens=8", "--out", str(tmp_path / "run")]
    arguments += ["--method", "full", "--method", "topk:k=4", "--method", "sinks:window=9000"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["failed_cells"] == 2
    assert len(summary["cells"]) == 6
    assert WINS in result.stderr
    assert "refused" in result.stderr
    for name in ("compare.png", "compare.svg", "compare.md", "compare.csv"):
        assert (tmp_path / "run" / name).stat().st_size > 200
    with (tmp_path / "run" / "compare.csv").open() as file:
        assert [line["length"] for line in csv.DictReader(file)] == ["16", "32"] * 3


def test_the_picture_shows_quality_by_length_with_and_without_cost(
    lm: LM, text: str, tmp_path: Path, drawn: None
) -> None:
    for cost in (False, True):
        folder = tmp_path / str(cost)
        rows = compare([lm], METHODS[:2], folder, settings(text, cost=cost), TASKS[:1])
        results = Results(rows, read_header(folder / "run"), folder)
        (picture,) = (path.read_text() for path in results.pictures if path.name == "compare.svg")
        assert "<!-- length (tokens) -->" in picture
        assert "<!-- nats per token -->" in picture
        assert ("<!-- seconds to the first token -->" in picture) is cost
        assert picture.count("<!-- tiny-llama sinks:window=12,sinks=2 -->") == 1  # one legend


def test_a_cell_of_the_table_is_no_formula_and_no_control_character(tmp_path: Path) -> None:
    cell = report.Cell("=1+1", "full", "own", 8, "tokens", "nats", False, failed="refused", reason="\x1b[2J", p=1e-9)
    write_comparison([cell], tmp_path)
    with (tmp_path / "compare.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert (line["model"], line["reason"], line["p"]) == ("'=1+1", "␛[2J", "1e-09")


def test_the_page_shows_the_table_and_why_cells_failed(lm: LM, tokenizer: Any, text: str, tmp_path: Path) -> None:
    gpt2 = wrap(tiny_model("gpt2"), tokenizer, "<b>gpt2</b>")
    compare([lm, gpt2], ["full", "topk:k=4", "rope:type=yarn,factor=2"], tmp_path, settings(text))
    write_report([tmp_path / "run"], tmp_path / "page")
    page = (tmp_path / "page" / "report.html").read_text()
    assert "Forgetting curve, nested, " in page
    assert "Copied beyond guessing (higher is better), by length in tokens" in page
    assert 'title="&lt;b&gt;gpt2&lt;/b&gt;, full, run run"' in page
    assert "<b>gpt2" not in page
    assert "seconds to the first token" in page
    assert "First examples" in page
    markdown = (tmp_path / "page" / "report.md").read_text()
    assert f"| {WINS} |" in markdown
    assert "\n▲ better, ▼ worse than the baseline, the first line, · no difference shown" in markdown
    assert "| model | method | run | trained | 16 | 32 |" in markdown
    assert "| model | method | run | length | difference | interval |" in markdown
    whose = set(re.findall(r"^\| (\S+) \| topk:k=4 \| run \|", markdown, re.M))
    assert whose == {plain(name) for name in short_names([lm.name, gpt2.name]).values()}
    for text in (page, markdown):
        assert "not corrected for the number of comparisons: p can be above 0.05 beside one without 0." in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--task", "perplexty"], "did you mean 'perplexity'?"),
        (["--task", "curve:protocol=mine"], "known are paper, nested, probe"),
        (["--task", "curve:warmup=5"], "warmup and scored belong to protocol=probe, not to protocol=nested"),
        (["--task", "perplexity:targets=all,target_tokens=5"], "targets=all scores every token"),
        (["--task", "perplexity:target_tokens=0"], "target_tokens: got 0"),
        (["--task", "qa:data="], "setting 'data' of task 'qa' is empty"),
        (["--method", "sinks:windw=3"], "did you mean 'window'?"),
        (["--lengths", "0,4"], "lengths"),
        (["--repeats", "0"], "at least 1"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], said: str, folder: Path) -> None:
    result = CliRunner().invoke(app, ["compare", str(folder), *arguments])
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_default_lengths_leave_the_targets_context(lm: LM, text: str, tmp_path: Path) -> None:
    assert task("perplexity").lengths([512]) == (512, 1024)
    assert task("perplexity:target_tokens=100").lengths([512, 4096]) == (256, 512, 1024, 2048, 4096, 8192)
    assert task("perplexity:targets=all").lengths([64]) == (16, 32, 64, 128)
    Path(text).write_text(3 * Path(text).read_text())
    what = settings(text, lengths=None, repeats=2)
    rows = compare([lm], ["full"], tmp_path, what, ("perplexity",))
    assert {row.status for row in rows} == {"ok"}


def test_a_table_marks_wins_and_counts_them() -> None:
    shift = {"full": (0.0, 0.0), "better": (-1.0, 0.0), "alike": (0.1, 0.5)}
    rows = [row(how, str(i), i + by + noise * (-1) ** i) for how, (by, noise) in shift.items() for i in range(8)]
    console = Terminal(record=True, width=160)
    print_comparison(report.cells(rows, HEADER), console)
    shown = console.export_text()
    assert "12.2 ▲" in shown
    assert "36.6 ·" in shown
    assert "1/0/0" in shown
    assert "0/1/0" in shown
    assert "· no difference shown" in shown


def test_two_refused_questions_of_one_task_are_both_named(tokenizer: Any, text: str, tmp_path: Path) -> None:
    gpt2 = wrap(tiny_model("gpt2"), tokenizer, "tiny-gpt2")
    tasks = ("perplexity:target_tokens=8", "perplexity:targets=all")
    found = compared([gpt2], text, tmp_path, ["full", "rope:type=yarn,factor=2"], tasks=tasks)
    refused = [cell for cell in found if cell.failed == "refused"]
    assert len(refused) == 2 * len(LENGTHS)
    assert len({cell.task for cell in refused}) == 2
