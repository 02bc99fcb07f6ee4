"""What reaches the terminal and the pictures: names, texts, answers and errors as they are, and nothing that a terminal
obeys."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import transformers
from click.testing import Result
from matplotlib.figure import Figure
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from farspan.cli import app
from farspan.report import progress
from farspan.report.cells import Cell, by_member
from farspan.report.figures import quality_figure
from farspan.report.picture import saved
from farspan.report.tables import costs_of, print_comparison, print_costs, print_quality, with_direction
from farspan.terminal import Terminal, shown

from tiny import tiny_model

HOSTILE = "\x1b]0;title\x07\x1b[31m\x9b2J\x7f\x08\r\x1b]52;c;eA==\x1b\\"
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
NAME = "m[/x]y[bold]:smile:a$\\frac$z\x1b[31m"  # a folder within a folder


def printed(*what: object, **options: object) -> str:
    file = StringIO()
    Terminal(file=file, width=200, color_system=None, **options).print(*what)
    return file.getvalue()


def test_control_characters_are_shown_as_signs() -> None:
    assert shown("a\x1b[31mb\x07\x9b\x7f\r\n\tc\r\ud800") == "a␛[31mb␇\ufffd␡\n\tc␍\ufffd"
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE))
    for what in (HOSTILE, Text(HOSTILE), table):
        assert not OBEYED.search(printed(what))
        assert "]52;c;eA==" in printed(what)


def test_brackets_colons_and_backslashes_are_shown_as_they_are() -> None:
    said = "m[/x]y [bold]b[/bold] :smile: \\[0, 1] [red]"
    assert printed(said) == said + "\n"
    table = Table(title=said)
    table.add_column(said)
    table.add_row(said)
    assert printed(table).count(said) == 3


def test_a_name_too_long_for_its_column_is_broken_between_its_settings() -> None:
    file = StringIO()
    lines = [["sinks:window=64,sinks=4+rope:type=yarn,factor=4", "1,024", "0.123 [0.100, 0.150]"]]
    Terminal(file=file, width=60).print_table("a title", ["method", "tokens", "quality"], lines, num_names=1)
    first = [line.split()[0] for line in file.getvalue().splitlines()[4:] if line.strip()]
    assert first == ["sinks:window=64,", "sinks=4+", "rope:type=yarn,", "factor=4"]
    assert "sinks:window=64,sinks=4+rope:type=yarn,factor=4" in _wide(lines)


@pytest.mark.parametrize("window", [64, 508, 2_524, 32_768])
def test_no_line_of_a_head_is_a_comma_alone(window: int) -> None:
    file = StringIO()
    heads = [
        "length",
        *(f"sinks:window={window},sinks=4+rope:type=yarn,factor=4 {half}" for half in ("copy", "control")),
    ]
    Terminal(file=file, width=40).print_table("a title", heads, [["64", "0.5", "0.25"]], num_keys=1)
    words = file.getvalue().split()
    assert not {",", "+"} & set(words)
    assert f"sinks:window={window}"[:16] in " ".join(words)
    assert "".join(words).count(",") == 4


def test_a_line_breaks_between_words_on_a_terminal_and_nowhere_else() -> None:
    words = "the quick brown fox jumps over the lazy dog"
    for text, is_terminal, lines in (
        (words, True, ["the quick brown fox", "jumps over the lazy", "dog"]),
        (words, False, [words]),
        (f"rows: {'x' * 30}", True, [f"rows: {'x' * 30}"]),
    ):
        file = StringIO()
        terminal = Terminal(file=file, width=20, force_terminal=is_terminal, legacy_windows=False, color_system=None)
        terminal.print_line(text)
        assert [line.rstrip() for line in file.getvalue().splitlines()] == lines
        file.truncate(file.seek(0))
        terminal.print_command(text)
        assert file.getvalue().splitlines() == [text]


def _wide(lines: list[list[str]]) -> str:
    file = StringIO()
    Terminal(file=file, width=200).print_table("a title", ["method", "tokens", "quality"], lines, num_names=1)
    return file.getvalue()


METHODS = ("full", "sinks:window=508,sinks=4", "rope:type=yarn,factor=4")


def lines_of(*, width: int, print_to: Callable[[Terminal], None]) -> list[str]:
    file = StringIO()
    print_to(Terminal(file=file, width=width))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    return lines


def cells_of(*, task: str, lengths: Sequence[int], details: Sequence[str] = ()) -> list[Cell]:
    """Cells with intervals, verdicts and costs, no two of which have a number in common."""
    numbers = (round(0.1 + 0.001 * i, 3) for i in range(1000))
    cells = []
    for method in METHODS:
        for length in lengths:
            value, low, high = (next(numbers) for _ in range(3))
            found = {"value": value, "low": low, "high": high, "verdict": "" if method == "full" else "win"}
            found |= {"details": {name: next(numbers) for name in details}, "tokens_per_second": 1e5 * next(numbers)}
            costs = {name: 1e5 * next(numbers) for name in ("prefill_rate", "decode_rate")}
            memory = {name: 2**30 * next(numbers) for name in ("weight_bytes", "context_bytes", "activation_bytes")}
            about = ("SmolLM2-135M", method, task, length, "tokens", "right answers", False)
            cells.append(Cell(*about, n=25, kept=float(length), **found, **costs, **memory))
    return cells


@pytest.mark.parametrize(("unit", "by"), [("tokens", "length in tokens"), ("passages", "number of passages")])
def test_titles_and_axes_name_what_the_lengths_count(unit: str, by: str) -> None:
    cells = [replace(cell, unit=unit) for cell in cells_of(task="qa", lengths=[1, 2])]
    title = lines_of(width=80, print_to=lambda console: print_comparison(cells, console))[0]
    assert title.startswith(f"qa: right answers by {by}; n = 25 examples")
    assert quality_figure(cells, "", {}).x == by.replace("in tokens", "(tokens)")


@pytest.mark.parametrize("width", [60, 80])
def test_every_number_of_a_comparison_is_on_one_line_of_a_narrow_terminal(width: int) -> None:
    cells = cells_of(task="curve:protocol=nested", lengths=[512 << i for i in range(6)])
    lines = lines_of(
        width=width, print_to=lambda console: [one(cells, console) for one in (print_comparison, print_costs)]
    )
    for cell in cells:
        assert sum(f" {cell.value:.3f}{'' if cell.method == 'full' else ' ▲'} " in line for line in lines) == 1
    for mine in by_member(cells):
        for cost in costs_of(mine)[1:]:
            assert sum(f" {cost} " in f"{line} " for line in lines) == 1, cost
    heads = [line.split() for line in lines]
    assert all(any(f"{cell.length:,}" in words for words in heads) for cell in cells)


@pytest.mark.parametrize("width", [60, 80])
def test_every_number_and_interval_of_a_task_is_on_one_line_of_a_narrow_terminal(width: int) -> None:
    cells = cells_of(task="own", lengths=(512, 1024), details=("control", "recall", "pairs", "cloze"))
    quality = {"name": "right answers", "higher_is_better": True}
    lines = lines_of(width=width, print_to=lambda console: print_quality(cells, quality, console))
    for cell in cells:
        (line,) = [line for line in lines if f" {cell.value:.3f} [{cell.low:.3f}, {cell.high:.3f}] " in line]
        assert f" {cell.length:,} " in line
        for value in cell.details.values():
            (line,) = [line for line in lines if f" {value:.3f} " in line]
            assert f" {cell.length:,} " in line, "each part names the length of its lines"
        assert sum(f" {cell.tokens_per_second:,.0f} " in line for line in lines) == 1


@pytest.mark.parametrize(
    ("name", "better", "head"),
    [
        ("accuracy", True, "accuracy (higher is better)"),
        ("copied (mean over depths)", True, "copied (mean over depths, higher is better)"),
        ("seconds to the first token", False, "seconds to the first token (lower is better)"),
        ("weight of sinks", None, "weight of sinks"),
    ],
)
def test_the_head_of_a_quality_has_one_bracket(name: str, better: bool | None, head: str) -> None:
    assert with_direction({"name": name, "higher_is_better": better}) == head


def test_what_moves_on_a_terminal_holds_no_control_characters_of_names() -> None:
    file = StringIO()
    terminal = Terminal(file=file, width=200, color_system=None, force_terminal=True, legacy_windows=False)
    with Progress(TextColumn("{task.description}", markup=False), console=terminal) as progress:
        progress.add_task("\x1b]0;title\x07[/x]", total=1)
    with terminal.status("\x1b]0;title\x07[/x]"):
        pass
    assert "␛]0;title␇[/x]" in file.getvalue()
    assert "\x1b]0" not in file.getvalue()


def test_dollar_signs_of_names_are_no_formulas(tmp_path: Path, drawn: None) -> None:
    for name in ("a$\\frac$z", "cost_$^$b", "$", "a$b", "\x1b[31m"):
        figure = Figure()
        axes = figure.subplots()
        axes.plot([1, 1000], [1, 1000], label=name)
        axes.set(title=name, xlabel=name, xscale="log")
        axes.annotate(name, (1, 1))
        axes.legend()
        figure.legend()
        _, svg = saved(figure, tmp_path, "picture")
        assert svg.stat().st_size
        assert axes.get_title() == name.replace("\x1b", "\ufffd")
    assert axes.xaxis.get_ticklabels()[1].get_parse_math(), "powers of ten are no longer drawn as such"


# the commands


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    folder = tmp_path_factory.mktemp("models") / NAME
    tiny_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    transformers.utils.logging.disable_progress_bar()  # it writes carriage returns
    Path("a$\\frac$z[x]\x1b[31m.txt").write_text(" ".join(f"word{i * i % 97}" for i in range(600)))


TEXT = "a$\\frac$z[x]\x1b[31m.txt"


def farspan(*arguments: object) -> Result:
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert not OBEYED.search(result.output), result.output
    return result


SMALL = ("--text", TEXT, "--lengths", "4,8,16", "--repeats", 2, "--device", "cpu")


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("curve", (*SMALL, "--plan")),
        ("curve", SMALL),
        ("perplexity", ("--text", TEXT, "--lengths", "8,16", "--repeats", 2, "--device", "cpu")),
        ("doctor", ("--device", "cpu")),
        ("ask", ("Who?", "--context", TEXT, "--device", "cpu", "--max-new-tokens", 3)),
    ],
    ids=["curve --plan", "curve", "perplexity", "doctor", "ask"],
)
def test_a_hostile_name_harms_no_command(model: Path, command: str, options: tuple[object, ...]) -> None:
    result = farspan(command, model, *options)
    assert result.exit_code == 0 or command == "doctor", result.output
    if command != "ask":
        assert "y[bold]:smile:a$\\frac$z␛[31m" in "".join(result.output.replace("│", "").split())


def test_a_hostile_name_harms_no_index(model: Path) -> None:
    result = farspan("index", "--text", TEXT, "--out", "i[/x]\x1b[31m", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout.splitlines()[-1])["passages"] == 6
    assert "i[/x]␛[31m" in farspan("index", "--text", TEXT, "--out", "i[/x]\x1b[31m").stdout


def test_errors_are_one_line_whatever_they_name() -> None:
    result = farspan("curve", "./no\x1b]0;x\x07[/x]\nsuch", *SMALL)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "[/x]" in result.stderr


def test_an_answer_of_control_characters_is_shown_as_signs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", lambda self, ids, **_: HOSTILE * len(ids))
    result = farspan("ask", model, "Who?", "--context", TEXT, "--device", "cpu", "--max-new-tokens", 3)
    assert result.stdout == shown(HOSTILE) * 3 + "\n"


def test_the_time_left_follows_the_work_and_not_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four rows, the last two are 90 % of the work: after half of the rows, 10 s, 90 s are left."""
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    printed = StringIO()
    with progress.Display(Terminal(file=printed)) as display:
        display.progress.get_time = lambda: now
        display.start("cell", 4)
        for done, share in enumerate((0.05, 0.1, 0.55), start=1):
            display.share(share)
            now += 100 * (share - (0, 0.05, 0.1)[done - 1])
            display.step(done, 4, "state")
    assert printed.getvalue().splitlines() == ["cell: 3/4, state, 0:00:45 left"]


def test_many_short_measurements_print_lines_as_one_long_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    printed = StringIO()
    with progress.Display(Terminal(file=printed)) as display:
        for cell in range(6):
            display.start(f"cell {cell}", 1)
            now += 10.0
            display.step(1, 1, "done")
    assert [line.partition(":")[0] for line in printed.getvalue().splitlines()] == ["cell 1", "cell 3", "cell 5"]
