"""The command line: what it measures, what it refuses and in which words, what it leaves behind."""

import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer
from click.testing import Result
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from farspan import __version__
from farspan.cli import app
from farspan.cli.commands import COMMANDS, SEARCHES, TRAININGS
from farspan.measuring.setups import grid
from farspan.methods import METHODS
from farspan.methods.rope import TYPES
from farspan.record import by_key, read_header, read_rows, refuse_differences
from farspan.report.export import memory_size
from farspan.tasks import TASKS
from farspan.tasks.curve import BoundCurve
from farspan.train.config import parsed, read_config, recipe_of, settings_of, shipped_configs

from tiny import saved, tiny_model

HEAVY = {"torch", "transformers", "numpy", "scipy", "matplotlib"}
pytestmark = pytest.mark.usefixtures("text_file")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A folder with a tiny Llama, and a tiny GPT-2 of 64 positions."""
    folder = tmp_path_factory.mktemp("models")
    for name, model in (("llama", tiny_model()), ("gpt2", tiny_model("gpt2", n_positions=64))):
        saved(folder / name, tokenizer, model)
    return folder


def farspan(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def curve(model: Path | str, *options: object) -> Result:
    """A small curve into run/, whose options later ones override."""
    small = ("--text", "text.txt", "--lengths", "4,8,16", "--repeats", 2, "--device", "cpu", "--out", "run")
    return farspan("curve", model, *small, *options)


def done(result: Result) -> Result:
    """What a command that ended well returns."""
    assert result.exit_code == 0, result.output
    return result


def refused(result: Result) -> str:
    """What was said on the way out with exit code 2: one message, no traceback."""
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.split())


def last_line(result: Result) -> Any:
    """The JSON of the last line printed; NaN and Infinity are no JSON."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(result.stdout.splitlines()[-1], parse_constant=refuse)


PROBE = ("--warmup", 2, "--scored", 4)


# quick answers


@pytest.mark.parametrize(
    "arguments", [["--help"], ["curve", "--help"], ["search", "rope", "--help"], ["--version"]], ids=" ".join
)
def test_quick_answers_import_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom farspan.cli import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\n"
        f"print('heavy:', sorted({HEAVY} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_the_version_is_said() -> None:
    assert farspan("--version").stdout == f"farspan {__version__}\n"


def test_help_names_every_command() -> None:
    said = farspan("--help").stdout
    assert all(command in said for command in ("demo", "curve", "recall", "report", "import", "search", "train"))


@pytest.mark.parametrize(
    "name", [*COMMANDS, *(f"train {name}" for name in TRAININGS), *(f"search {name}" for name in SEARCHES)]
)
def test_the_help_of_every_command_ends_with_an_example_that_its_options_take(name: str) -> None:
    said = " ".join(farspan(*name.split(), "--help").stdout.split())
    example = said.rpartition("Example: ")[2].partition(" Configs that")[0]
    words = shlex.split(example)
    assert words[: 1 + len(name.split())] == ["farspan", *name.split()]
    command: Any = typer.main.get_command(app)
    for part in name.split():
        command = command.commands[part]
    command.make_context(name, words[1 + len(name.split()) :])  # raises for options that the command does not have


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_names_only_options_that_it_has(name: str) -> None:
    root: Any = typer.main.get_command(app)
    command = root.commands[name]
    known = {option for one in command.params for option in one.opts}
    texts = [command.help, *(one.help or "" for one in command.params)]
    assert {option for text in texts for option in re.findall(r"--[a-z][a-z-]*", text)} <= known


def test_only_a_run_that_can_grow_is_said_to_grow() -> None:
    for command, grows in ((["curve"], True), (["check"], False), (["search", "rope"], False)):
        said = farspan(*command, "--help").stdout.replace("│", " ")
        assert ("also with more repeats or lengths" in " ".join(said.split())) == grows


@pytest.mark.parametrize("name", TRAININGS)
def test_the_configs_in_the_help_of_a_training_are_read_by_it(name: str) -> None:
    kind = settings_of(name)
    words = shlex.split(TRAININGS[name][1])
    read_config(words[0], kind, [after for word, after in pairwise(words) if word == "--set"])
    said = " ".join(farspan("train", name, "--help").stdout.split())
    for word in (named := re.search(r"Configs that come with farspan: (.*) Keys of", said)[1].split(", ")):  # type: ignore[index]
        read_config(word, kind)
    assert named == [config for config in shipped_configs() if recipe_of(parsed(config)) == name]


def test_the_help_of_a_training_names_its_keys() -> None:
    said = farspan("train", "smt", "--help").stdout
    assert "\n[data] text, short, separator\n" in said
    assert "explained in docs/training.md" in said


# measuring


def test_a_curve_is_measured_and_drawn(models: Path, drawn: None) -> None:
    result = done(curve(models / "llama"))
    rows = read_rows("run")
    assert sorted((row.length, row.repeat) for row in rows) == [(n, i) for n in (4, 8, 16) for i in (0, 1)]
    assert {row.status for row in rows} == {"ok"}
    assert "memory lengths" in result.stdout
    assert list(Path("run").glob("*.png"))


def test_the_run_says_what_it_was_made_with(models: Path) -> None:
    curve(models / "llama", "--seed", 3)
    header = read_header("run")
    assert header["settings"]["lengths"] == [4, 8, 16]
    assert header["settings"]["seed"] == 3
    assert header["models"][str(models / "llama")]["fingerprint"]


def test_repeating_a_finished_curve_measures_nothing_again(models: Path) -> None:
    curve(models / "llama")
    before = Path("run/rows.jsonl").read_bytes()
    assert curve(models / "llama").exit_code == 0
    assert Path("run/rows.jsonl").read_bytes() == before


def test_repeating_a_stopped_curve_measures_what_is_missing(models: Path) -> None:
    curve(models / "llama")
    path = Path("run/rows.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + lines[3][:30])  # as a kill leaves it
    assert curve(models / "llama").exit_code == 0
    assert path.read_bytes().startswith(b"".join(lines[:3]))
    assert len({row.key for row in read_rows("run")}) == len(read_rows("run")) == 6


def test_without_out_the_same_command_finds_its_own_run_again(models: Path) -> None:
    command = ("curve", models / "llama", "--text", "text.txt", "--lengths", "4,8", "--repeats", 2, "--device", "cpu")
    for _ in range(2):
        done(farspan(*command))
    (folder,) = Path("runs").iterdir()
    assert len(read_rows(folder)) == 4
    assert len(read_header(folder)["sessions"]) == 2


def test_json_is_one_line_printed_last_and_alone_on_stdout(models: Path) -> None:
    result = curve(models / "llama", "--json")
    assert len(result.stdout.splitlines()) == 1
    (entry,) = last_line(result)["curves"]
    assert (entry["model"], entry["method"], entry["lengths"]) == (str(models / "llama"), "full", [4, 8, 16])
    assert last_line(result)["failed_rows"] == 0
    assert "memory lengths" in result.stderr


def test_a_plan_measures_nothing(models: Path) -> None:
    result = done(curve(models / "llama", "--plan"))
    assert "nothing is measured yet" in result.stdout
    assert sorted(path.name for path in Path().iterdir()) == ["text.txt"]


def test_a_plan_of_a_finished_run_is_one_line(models: Path) -> None:
    done(curve(models / "llama"))
    assert done(curve(models / "llama", "--plan")).stdout == "plan: nothing is left to measure; finished rows: 6\n"
    (plan,) = last_line(curve(models / "llama", "--plan", "--json"))["plans"]
    assert (plan["num_examples"], plan["num_done"]) == (0, 6)


def test_the_numbers_of_a_plan_are_on_one_line_of_80_columns(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    methods = ("full", "sinks:window=8,sinks=4", "rope:type=yarn,factor=4")
    options = [word for one in methods for word in ("--method", one)]
    tasks = ("--task", "curve:protocol=nested", "--task", "perplexity:target_tokens=16", "--lengths", "32,64")
    command = ("compare", models / "llama", *options, *tasks, "--text", "text.txt", "--repeats", 2)
    costs = last_line(farspan(*command, "--plan", "--json"))["plans"]
    printed = farspan(*command, "--plan").stdout
    total = sum(cost["tokens"] for cost in costs if "tokens" in cost)
    assert (f"all: {total:,} tokens, " in printed) == (len([cost for cost in costs if "tokens" in cost]) > 1)
    assert len(costs) > 6
    table = printed.partition("all: ")[0].splitlines()
    assert max(map(len, table)) <= 80
    cells = by_key(((cost["method"], cost["what"]), cost) for cost in costs)
    for (how, what), some in cells.items():
        lines = [line for line in table if f" {how.split(',')[0]}" in line and f" {what.partition(':')[0]} " in line]
        (line,) = [line for line in lines if " 32–64 " in line]
        assert f" {sum(cost['tokens'] for cost in some):,} " in line
        assert f" {memory_size(max(cost['extra_bytes'] for cost in some))} " in line
    assert len(table) <= 2 * len(cells) + 6  # a line for each method, task and break of a name


def test_a_plan_as_json_is_one_line_printed_last(models: Path) -> None:
    (plan,) = last_line(curve(models / "llama", "--plan", "--json"))["plans"]
    assert plan["num_examples"] == 2
    assert plan["tokens"] > 0
    assert plan["seconds"] is None
    assert not Path("run").exists()
    (timed,) = last_line(curve(models / "llama", "--plan", "--calibrate", "--json"))["plans"]
    assert timed["seconds"] > 0
    assert timed | {"seconds": None} == plan


def test_a_plan_prints_the_weights_and_how_to_get_a_time(models: Path) -> None:
    said = " ".join(curve(models / "llama", "--plan").stdout.split())
    assert f"{models / 'llama'}: the weights need a further 148 KiB" in said
    assert "memory: keys and values, one attention mask and one block of logits; no weights, no activations" in said
    assert "time: --calibrate loads the model and times it, --tflops X divides the FLOPs by X * 10^12" in said
    assert "exceed the trained length" not in said
    said = " ".join(curve(models / "llama", "--plan", "--trained-length", "30").stdout.split())
    assert f"{models / 'llama'}: contexts of up to 33 tokens exceed the trained length of 30 tokens" in said
    (plan,) = last_line(curve(models / "llama", "--plan", "--tflops", "1e-9", "--json"))["plans"]
    assert plan["seconds"] == pytest.approx(plan["flops"] / 1e3)
    assert plan["seconds"] == pytest.approx(7319.68)
    timed = curve(models / "llama", "--plan", "--tflops", "1e-9").stdout
    assert "2.0 hours" in timed
    assert "--calibrate" not in timed


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("curve", ("--tflops", "1"), "--tflops belongs to --plan"),
        ("perplexity", ("--calibrate",), "--calibrate belongs to --plan"),
        ("compare", ("--plan", "--tflops", "0"), "tflops: got 0, expected a positive number"),
        ("attention", ("--plan", "--tflops", "inf"), "tflops: got inf, expected a positive number"),
        ("recall", ("--plan", "--tflops", "1", "--calibrate"), "both give the time: use one of them"),
    ],
)
def test_a_time_without_a_plan_or_in_two_ways_is_refused_in_one_line(
    models: Path, command: str, options: tuple[str, ...], message: str
) -> None:
    result = farspan(command, models / "llama", "--text", "text.txt", *options)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("curve", ("--lengths", "8,16")),
        ("recall", ("--length", "64", "--points", "2", "--warmup", "4", "--scored", "4")),
        ("perplexity", ("--lengths", "16,32", "--target-tokens", "8")),
        ("attention", ("--lengths", "16,32")),
        ("compare", ("--lengths", "16,32", "--task", "own", "--task", "passkey")),
        ("ask", ("--context", "text.txt")),
    ],
)
def test_a_plan_needs_config_and_tokenizer_only(
    models: Path, tmp_path: Path, command: str, options: tuple[str, ...]
) -> None:
    shutil.copytree(models / "llama", "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    options = (*options, "--plan", "--json")
    options = options if command == "ask" else (*options, "--text", "text.txt", "--device", "cpu")
    whole, bare = (last_line(farspan(command, model, *options)) for model in (models / "llama", "bare"))
    for plan in (*whole.get("plans", ()), *bare.get("plans", ())):
        plan.pop("model")
        assert "refused" not in plan or command == "compare"
    assert bare == whole


def test_lengths_are_chosen_by_themselves(models: Path) -> None:
    result = done(curve(models / "llama", "--lengths", "auto", "--trained-length", 64, "--text", "random", "--json"))
    (found,) = last_line(result)["curves"]
    assert found["lengths"] == [63]  # half of twice the trained length, less a separator; none shorter can be judged
    assert read_header("run")["settings"]["lengths"] == "auto"


def test_depths_make_a_map(models: Path, drawn: None) -> None:
    result = done(curve(models / "llama", "--depths", 3, "--lengths", "16,32", *PROBE, "--json"))
    rows = read_rows("run")
    assert {(row.length, row.depth) for row in rows} == {(n, d) for n in (16, 32) for d in (0.0, 0.5, 1.0)}
    assert {row.settings["protocol"] for row in rows} == {"probe"}
    assert {Path(path).name for path in last_line(result)["pictures"]} == {
        f"{name}.{ending}" for name in ("map", "curve") for ending in ("png", "svg")
    }
    assert "are those of the beginning of the texts (depth 0)" in " ".join(result.output.split())
    assert last_line(result)["quality"] == "copied beyond guessing (mean over depths)"
    copies = [row.scores["copy"] for row in rows if row.length == 16]
    assert last_line(result)["results"][0]["value"] == pytest.approx(sum(copies) / len(copies), abs=1e-6)


def test_recall_is_the_map_at_one_length(models: Path, drawn: None) -> None:
    small = ("--text", "text.txt", "--repeats", 2, "--points", 3, "--device", "cpu", "--out", "run")
    result = done(farspan("recall", models / "llama", *small, "--trained-length", 64))
    rows = read_rows("run")
    assert {row.depth for row in rows} == {0.0, 0.5, 1.0}
    (length,) = {row.length for row in rows}
    assert max(row.scores["context"] for row in rows) == 64
    assert {row.scores["distance"] for row in rows if row.depth == 0} == {length + 1}
    assert "(depth: share of the text; distance in tokens; means, n = " in " ".join(result.stdout.split())
    assert Path("run/recall.png").exists()
    assert "Recall by distance of llama (probe " in Path("run/recall.svg").read_text()


@pytest.mark.parametrize(
    "command",
    [
        ("recall", "--length", 40, "--points", 3),
        ("recall", "--lengths", 40, "--points", 3),
        ("curve", "--lengths", 40, "--depths", 3),
    ],
)
def test_short_texts_have_depths_too(command: tuple[object, ...], models: Path) -> None:
    name, *options = command
    done(farspan(name, models / "llama", *options, "--text", "text.txt", "--repeats", 2, "--out", "run"))
    assert {(row.depth, row.scores["scored"]) for row in read_rows("run")} == {(0.0, 4), (0.5, 4), (1.0, 4)}


def test_texts_are_tested_against_each_other(models: Path) -> None:
    Path("other.txt").write_text("pack my box with five dozen liquor jugs " * 60)
    both = ("--prefix-text", "text.txt", "--prefix-text", "other.txt", "--repeats", 4, "--test", "--json")
    result = done(curve(models / "llama", *both))
    (test,) = last_line(result)["tests"]
    assert [at["pairs"] for at in test["lengths"]] == [4, 4, 4]
    assert "irrelevant text" in result.stderr


def test_runs_become_a_page(models: Path) -> None:
    curve(models / "llama")
    result = done(farspan("report", "run", "--out", "page", "--json"))
    assert {Path(path).name for path in last_line(result)["written"]} == {
        "report.html",
        "report.md",
        "curves.csv",
        "memory_lengths.csv",
        "quality.csv",
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--depths", "0,1.5"), "from 0, the beginning of the text, which gives the curve, to at most 1"),
        (("--depths", "3", *PROBE, "--lengths", "4,16"), "are too short for depths"),
        (("--protocol", "probe", "--warmup", 20, "--scored", 20), "longer than the longest text, 16 tokens"),
        (("--warmup", 20), "belong to protocol=probe"),
        (("--minutes", 1), "needs --lengths auto"),
        (("--minutes", 1, "--lengths", "auto", "--plan"), "--minutes 1 has no effect on --plan, which measures"),
        (("--test",), "two or more --prefix-text"),
        (("--lengths", "auto", "--minutes", "0.0001", "--trained-length", 64), "give more --minutes"),
    ],
)
def test_what_cannot_be_asked_is_refused(models: Path, options: tuple[object, ...], said: str) -> None:
    assert said in refused(curve(models / "llama", *options))


def test_a_protocol_may_be_auto(models: Path, drawn: None) -> None:
    assert curve(models / "llama", "--protocol", "auto").exit_code == 0
    assert {row.settings["protocol"] for row in read_rows("run")} == {"nested"}
    assert "'auto'" in refused(curve(models / "llama", "--protocol", "mine"))


def test_lengths_beyond_learned_positions_fail_by_themselves(models: Path, drawn: None) -> None:
    result = curve(models / "gpt2", "--lengths", "8,16,40", "--json")
    assert result.exit_code == 1, result.output
    assert {(row.length, row.status) for row in read_rows("run")} == {(8, "ok"), (16, "ok"), (40, "too_long")}
    (reason,) = {row.reason for row in read_rows("run") if row.length == 40}
    assert reason == "needs 82 tokens, the model has 64 positions"
    assert "2 of 6 rows failed" in result.stderr
    assert last_line(result)["failed_rows"] == 2
    assert last_line(result)["curves"][0]["failed"] == {"40": "too_long"}


def test_a_curve_of_failures_only_still_ends_with_words_and_json(models: Path) -> None:
    result = curve(models / "gpt2", "--lengths", "40,50", "--json")
    assert result.exit_code == 1, result.output
    assert last_line(result)["failed_rows"] == 4


# what is refused: exit code 2, and what was given, what is allowed, what to do


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--lengths", "8,4", "lengths [8, 4] must ascend, each once: write 4,8"),
        ("--lengths", "4,4", "lengths [4, 4] must ascend, each once: write 4"),
        ("--lengths", "0,4", "lengths: got [0, 4], expected numbers of tokens from 1 on"),
        ("--lengths", "-4,8", "lengths: got [-4, 8], expected numbers of tokens from 1 on"),
        *(
            ("--lengths", value, f"lengths: got {value!r}, expected numbers like 512,1024,2048, a range like "
             "512:16384, or auto")
            for value in ("many", "4,", "", "1:2:3")
        ),
        ("--lengths", "8:" + 23 * "9", "expected at most 1,000,000,000,000 tokens"),
        ("--lengths", 23 * "9", "expected at most 1,000,000,000,000 tokens"),
        ("--lengths", "8:4", "lengths: got 8:4, expected A:B with 0 < A <= B (--lengths)"),
        ("--lengths", "0:4", "lengths: got 0:4, expected A:B with 0 < A <= B (--lengths)"),
        ("--repeats", "0", "repeats: got 0, expected a whole number, at least 1"),
        ("--method", "nope", "method 'nope' is unknown; known are full"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_before_the_model_is_looked_for(option: str, value: str, said: str) -> None:
    assert said in refused(curve("no-model", option, value))
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("curve", "demo", "--method", "full", "--method", "yarn"), "write rope:type=yarn,factor=4"),
        (("recall", "demo", "--method", "full+nope:x=1"), "method 'nope' is unknown"),
        (("task", "paskey", "demo"), "did you mean 'passkey'"),
        (("compare", "demo", "--task", "perplexity", "--task", "curv"), "did you mean 'curve'"),
        (("perplexity", "./nowhere"), "neither a folder nor a hub id"),
        (("doctor", "demo", "--method", "sinkz:window=9"), "did you mean 'sinks'"),
        (
            ("curve", "demo", "--text", "books/missing.txt"),
            "text 'books/missing.txt' is neither a file, a folder, a hub dataset (org/name) nor a built-in text",
        ),
        (("recall", "demo", "--target-text", "shuffled:./missing"), "text './missing' is neither a file, a folder"),
        (("ask", "~/nowhere/model", "Who?"), "neither a folder nor a hub id"),
    ],
)
def test_what_is_misspelled_is_refused_before_torch_is_imported(arguments: tuple[str, ...], said: str) -> None:
    code = "import sys; from farspan.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (2, "False\n"), found.stderr
    assert said in found.stderr
    assert found.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "name", "about"), [("methods", "sinks", "2309.17453"), ("tasks", "own", "argmax_w")]
)
def test_one_method_or_task_is_described_in_full(command: str, name: str, about: str) -> None:
    shown = done(farspan(command, name)).stdout
    assert about in shown
    assert not {"topk", "passkey"} & set(shown.split())
    (one,) = last_line(farspan(command, name, "--json"))[command]
    assert one["name"] == name
    assert f"{command[:-1]} 'nme' is unknown; known are" in refused(farspan(command, "nme"))


@pytest.mark.parametrize(("command", "known"), [("methods", METHODS), ("tasks", TASKS)])
def test_methods_and_tasks_are_listed_with_settings_and_defaults(command: str, known: Mapping[str, Any]) -> None:
    found = {one["name"]: one for one in json.loads(farspan(command, "--json").stdout)[command]}
    assert list(found) == list(known)
    words = " ".join(farspan(command).stdout.split())
    for name, kind in known.items():
        assert f" {name} " in words
        assert found[name]["about"].endswith(".")
        for field in fields(kind):
            if field.default is MISSING:
                assert field.name in found[name]["required"]
            else:
                assert field.name in found[name]["optional"]
    of_methods = ("selfextend group=... [window]", "[pool=max|mean]", "none|position|age]")
    of_tasks = ("passkey [depths=5] [digits=5]", "[kind=single|multikey|", "[size: short|medium|long]")
    assert all(written in words for written in (of_methods if command == "methods" else of_tasks))
    assert all(one["values"] == {"type": list(TYPES)} for one in found.values() if one["name"] == "rope")


@pytest.mark.parametrize("command", [(), ("curve",), ("train", "lm"), ("search", "rope"), ("index",)])
def test_h_is_help(command: tuple[str, ...]) -> None:
    result = farspan(*command, "-h")
    assert (result.exit_code, result.stdout) == (0, farspan(*command, "--help").stdout)
    assert "Usage" in result.stdout


def test_a_quiet_command_prints_results_and_no_progress(models: Path) -> None:
    arguments = ("perplexity", models / "llama", "--text", "text.txt", "--lengths", "16,32", "--repeats", 2)
    loud, quiet = (farspan(*arguments, "--device", "cpu", "--out", name, *options) for name, options in (
        ("loud", ()), ("quiet", ("-q",)),
    ))  # fmt: skip
    assert "separator:" in loud.stdout
    assert "separator:" not in quiet.stdout
    assert "rows: quiet" in quiet.stdout
    assert "nats/token" in quiet.stdout


@pytest.mark.parametrize(
    ("option", "value"), [("--trained-length", 0), ("--seed", -1), ("--points", 0), ("--scored", 0), ("--chunk", -7)]
)
def test_a_number_out_of_range_is_refused_with_the_value_and_the_range(option: str, value: int) -> None:
    result = curve("no-model", option, value)
    assert result.stderr.count("\n") == 1
    said = refused(result)
    assert said.startswith(f"error: Invalid value for '{option}'")
    assert "expected at least" in said
    assert f"(got '{value}')" in said


def test_numbers_of_tokens_beyond_any_text_are_refused(models: Path) -> None:
    many = 23 * "9"
    probe = curve(models / "llama", "--text", "text.txt", "--protocol", "probe", "--scored", many, "--lengths", "16,32")
    assert f"+ {many} tokens (--warmup, --scored) is longer than the longest text" in refused(probe)
    said = refused(curve(models / "llama", "--text", "text.txt", "--trained-length", many))
    assert f"the trained length is {many}, expected 1 to 1,000,000,000,000 tokens" in said


@pytest.mark.parametrize("command", [("curve",), ("ask",), ("index",), ("search", "rope"), ("train", "smt")])
def test_help_names_the_value_of_an_option_and_nothing_after_a_switch(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = farspan(*command, "--help").stdout.replace("<bool>  Show this message", "")
    assert not re.findall(r"--\S+ .*<(?:bool|str|int|float|list.*)>", shown)
    assert not re.findall(r"\d{10}", shown)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["curve"], "error: no model: give a folder, a GGUF file, a hub id, demo, or the server of one (--base-url)\n"),
        (
            ["curve", "demo", "--served-model", "x", "--concurrency", "2"],
            "error: --served-model, --concurrency without a served model: got 'demo', expected --base-url URL. "
            "Give --base-url, or leave out --served-model, --concurrency\n",
        ),
        (
            ["perplexity", "demo", "--wait", "5", "--insecure"],
            "error: --wait, --insecure without a served model: got 'demo', expected --base-url URL. "
            "Give --base-url, or leave out --wait, --insecure\n",
        ),
        (
            ["curve", "--base-url", "127.0.0.1:8000", "--tokenizer", "demo"],
            "error: --base-url: got '127.0.0.1:8000', expected the address of a server that begins with http:// or "
            "https://, such as http://127.0.0.1:8000\n",
        ),
        (
            ["ask", "demo", "who?", "--tokenizer", "demo"],
            "error: --tokenizer without a served model: got 'demo', expected --base-url URL. "
            "Give --base-url, or leave out --tokenizer\n",
        ),
        (
            ["curve", "http://127.0.0.1:9", "--dtype", "bfloat16", "--device-map", "auto", "--gguf", "x.gguf"],
            "error: --device-map, --dtype, --gguf: no effect on the served model 'http://127.0.0.1:9'. "
            "Omit --device-map, --dtype, --gguf\n",
        ),
        (
            ["ask", "--base-url", "http://127.0.0.1:9", "who?", "--chunk", "64"],
            "error: --chunk: no effect on the served model 'http://127.0.0.1:9'. Omit --chunk\n",
        ),
        *(
            (
                [*command, *out],
                "error: Invalid value for '--out': got '', expected a folder, such as runs/mine. See farspan --help\n",
            )
            for command in (["curve", "m"], ["index", "--text", "builtin"], ["report", "run"])
            for out in (["--out", ""], ["--out="])
        ),
        (["nope"], "error: No such command 'nope'. See farspan --help\n"),
        (["curv"], "error: No such command 'curv'. Did you mean 'curve'? See farspan --help\n"),
        (["train", "lm", "a", "b"], "error: Got unexpected extra argument(s) (b). See farspan train lm --help\n"),
        (["curve", "m", "--zzzz"], "error: No such option: --zzzz. See farspan curve --help\n"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(arguments: list[str], line: str) -> None:
    result = CliRunner().invoke(app, arguments, prog_name="farspan")
    assert (result.exit_code, result.stderr, result.stdout) == (2, line, "")


@pytest.mark.parametrize("command", [["ask", "demo", "who?"], ["doctor", "demo"]])
def test_a_model_beside_a_server_is_refused_where_one_is_expected(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--base-url", "http://127.0.0.1:9"])
    expected = "error: two models: got 'demo' and --base-url, expected one: leave out one of them\n"
    assert (result.exit_code, result.stderr) == (2, expected)


@pytest.mark.parametrize("command", [["attention"], ["search", "rope"]])
def test_commands_that_need_weights_offer_no_server(command: list[str]) -> None:
    said = farspan(*command, "--help").stdout
    assert "hub id" in said
    assert not any(word in said for word in ("--base-url", "--served-model", "server", "Served"))
    result = farspan(*command, "http://127.0.0.1:1")
    assert result.exit_code != 0
    assert "'http://127.0.0.1:1' is a server, and this command needs weights" in result.stderr


def test_without_a_command_the_help_is_shown() -> None:
    for arguments in ([], ["train"]):
        result = farspan(*arguments)
        assert "Usage" in result.output
        assert "error" not in result.stderr


def test_a_long_name_is_cut_where_it_is_refused() -> None:
    said = refused(curve("x" * 5000))
    assert len(said) < 1100
    assert "…" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--prefix-text", ""), "a text has no name: got ''"),
        (("--attention", "flash_attention_3"), "'flash_attention_3' cannot be used here.* leave --attention out"),
        (
            ("--lengths", "100000"),
            r"text 'text\.txt' has .* give a text of at least .* tokens, or a smaller longest length \(at most",
        ),
        (("--out", "."), "is not empty and holds no run"),
        (("--device", "gpu"), "device 'gpu' cannot be used"),
    ],
)
def test_what_a_curve_cannot_use_is_refused(models: Path, options: tuple[str, ...], said: str) -> None:
    assert re.search(said, refused(curve(models / "llama", *options)))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("curve", "~nouser/x"), "'~nouser/x' is not a path"),
        (("curve", "./nowhere"), "model './nowhere' is neither a folder nor a hub id such as org/name"),
        (("report", "nothing"), "holds no run"),
        (("task", "qa:data=", "no-model"), "setting 'data' of task 'qa' is empty"),
        (("import", "missing.json", "--out", "run"), "missing.json does not exist"),
    ],
)
def test_what_is_not_there_is_refused(command: tuple[str, ...], said: str) -> None:
    assert said in refused(farspan(*command))


@pytest.mark.parametrize(
    "command",
    [
        ("task", "passkey"),
        ("task", "icl:set=copy"),
        ("curve", "--target-text", "random"),
        ("recall", "--target-text", "random", "--prefix-text", "shuffled:builtin"),
        ("compare", "--task", "passkey", "--task", "curve:target_text=random"),
    ],
    ids=" ".join,
)
def test_a_text_that_nothing_reads_is_refused(command: tuple[str, ...]) -> None:
    said = refused(farspan(*command, "demo", "--text", "text.txt"))
    assert said.startswith("error: text 'text.txt' has no effect: got ")
    assert said.endswith("which read only texts or data of their own. Leave it out (--text)")


@pytest.mark.parametrize(
    "tasks", [("passkey", "own"), ("curve:target_text=shuffled",), ("recall:target_text=random,prefix_text=shuffled",)]
)
def test_a_text_that_one_task_reads_is_accepted(tasks: tuple[str, ...]) -> None:
    assert grid(["demo"], tasks, text="text.txt").text == "text.txt"


@pytest.mark.parametrize("command", ["curve", "perplexity", "attention", "compare"])
def test_every_model_is_looked_for_before_the_first_is_measured(models: Path, command: str) -> None:
    options = ("--text", "text.txt", "--lengths", "16", "--repeats", 2, "--out", "run")
    assert "'./missing' is neither a folder" in refused(farspan(command, models / "llama", "./missing", *options))
    assert not Path("run").exists()


def test_depths_that_no_length_has_are_refused_before_a_model_is_loaded(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farspan.measuring.loader.load", lambda *_, **__: pytest.fail("loaded"))
    said = refused(curve(models / "llama", "--depths", 3, *PROBE, "--lengths", "4,16"))
    assert "lengths up to 6 tokens, which --warmup and --scored need, are too short for depths" in said
    assert "depths need --protocol probe" in refused(curve(models / "llama", "--depths", 3, "--protocol", "nested"))
    for number in ("", 0, 1, 10**6):
        assert "from 2 to 1,000" in refused(curve(models / "llama", "--depths", number))


def test_a_run_that_could_not_begin_leaves_no_folder(models: Path) -> None:
    for options in (("--text", "missing.txt"), ("--lengths", "4,9000")):
        refused(curve(models / "llama", *options, "--out", "deep/run"))
        assert not Path("deep").exists()


def test_a_file_in_the_place_of_a_run_is_named(models: Path) -> None:
    for out in ("text.txt", "text.txt/run"):
        assert "text.txt is a file, " in refused(curve(models / "llama", "--out", out))


def test_the_error_of_a_training_names_the_key_of_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(*_: object) -> NoReturn:
        refuse_differences(Path("old"), "training", {"lr": 1}, {"lr": 2})
        raise AssertionError

    monkeypatch.setattr("farspan.train.smt.train", train)
    said = refused(farspan("train", "smt", "smt-demo"))
    assert said.endswith("Repeat that training's settings to continue it, or choose another folder (--set out=FOLDER)")


def test_a_run_in_the_place_of_a_model_is_named(models: Path) -> None:
    Path("a").mkdir()
    Path("a/run.json").write_text("{}")
    for given in ("a", "a/run.json", "./a"):
        said = refused(farspan("curve", given))
        assert f"model {given!r} is a run of farspan, expected a model" in said
        assert "farspan report a, or" in said


def test_a_misspelt_demo_is_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farspan.loading.errors.is_offline_mode", lambda: True)
    assert "nor cached (did you mean 'demo'?)" in refused(farspan("curve", "dmeo"))


def test_all_commands_plan_perplexity_at_short_lengths(models: Path) -> None:
    options = (models / "llama", "--lengths", "16,32", "--text", "text.txt", "--repeats", 2, "--plan", "--json")
    compare = ("compare", "--no-cost", "--task")
    commands = ("perplexity",), ("task", "perplexity"), (*compare, "perplexity"), (*compare, "perplexity:targets=fixed")
    for command in commands:
        for cost in last_line(farspan(*command, *options))["plans"]:
            assert cost["what"].endswith("target_tokens=8")
    said = refused(farspan("task", "perplexity:target_tokens=16", *options))
    assert "give fewer (perplexity:target_tokens=N; farspan perplexity: --target-tokens N)" in said


def test_a_full_disk_is_reported_with_the_file_and_what_to_do(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    said = refused(curve(models / "llama"))
    assert said == "error: run/run.json: No space left on device. Free space and repeat the command"


def test_a_text_that_has_changed_is_reported_as_that(models: Path) -> None:
    curve(models / "llama")
    Path("text.txt").write_text(Path("text.txt").read_text() + "more")
    assert "run: the text 'text.txt' has changed since" in refused(curve(models / "llama"))


def test_a_raised_task_version_is_refused_before_anything_is_measured(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curve(models / "llama")
    before = Path("run/rows.jsonl").read_bytes()
    monkeypatch.setattr(BoundCurve, "version", BoundCurve.version + 1)
    said = refused(curve(models / "llama"))
    assert f"holds rows of version {BoundCurve.version - 1} of the task curve" in said
    assert Path("run/rows.jsonl").read_bytes() == before


def test_a_repeated_command_goes_on_after_an_example_was_torn(models: Path) -> None:
    curve(models / "llama")
    whole = Path("run/examples.jsonl").read_bytes()
    Path("run/examples.jsonl").write_bytes(whole[:-40])
    for _ in range(2):
        assert curve(models / "llama").exit_code == 0
        assert Path("run/examples.jsonl").read_bytes() == whole


def test_a_run_made_with_other_settings_is_refused_with_both_values(models: Path) -> None:
    curve(models / "llama")
    before = Path("run/rows.jsonl").read_bytes()
    said = refused(curve(models / "llama", "--seed", 1))
    assert "run holds another run, made with other settings: seed was 0, now 1." in said
    assert "choose another folder (--out" in said
    assert Path("run/rows.jsonl").read_bytes() == before


def test_a_run_of_another_model_of_that_name_is_refused(models: Path) -> None:
    Path("model").symlink_to(models / "llama")
    curve("model")
    Path("model").unlink()
    Path("model").symlink_to(models / "gpt2")
    assert "architecture was 'LlamaForCausalLM', now 'GPT2LMHeadModel'" in refused(curve("model"))


# results of others


def published(path: str) -> str:
    points = [
        {"length": n, "copy_accs": [1.0, 1.0, 0.9 - n / 1000], "lm_accs": [0.3, 0.4, 0.3]} for n in (8, 64, 128, 256)
    ]
    Path(path).write_text(json.dumps(points))
    return path


def test_published_results_become_a_run(drawn: None) -> None:
    result = done(farspan("import", published("theirs.json"), "--out", "run", "--json"))
    rows = read_rows("run")
    assert len(rows) == 12
    assert {row.model for row in rows} == {"theirs"}
    assert rows[2].scores["copy"] == pytest.approx(0.892)
    assert last_line(result)["curves"][0]["lengths"] == [8, 64, 128, 256]
    assert list(Path("run").glob("*.png"))


def test_importing_again_adds_nothing() -> None:
    for _ in range(2):
        assert farspan("import", published("theirs.json"), "--out", "run").exit_code == 0
    assert len(read_rows("run")) == 12


def test_imported_rows_and_their_tables_are_in_the_home_folder_that_is_named(
    monkeypatch: pytest.MonkeyPatch, drawn: None
) -> None:
    monkeypatch.setenv("HOME", str(Path.cwd() / "home"))
    monkeypatch.setenv("USERPROFILE", str(Path.cwd() / "home"))
    published("theirs.json")
    assert farspan("import", "theirs.json", "--out=~/run").exit_code == 0
    assert len(read_rows("home/run")) == 12
    assert list(Path("home/run").glob("*.png"))
    assert not Path("~").exists()


def test_a_changed_file_is_not_imported_into_the_run_of_the_old_one() -> None:
    """The rows of the old file had stayed."""
    farspan("import", published("theirs.json"), "--out", "run")
    before = Path("run/rows.jsonl").read_bytes()
    Path("theirs.json").write_text(Path("theirs.json").read_text().replace("0.3", "0.2"))
    assert "made with other settings: hash was" in refused(farspan("import", "theirs.json", "--out", "run"))
    assert Path("run/rows.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [
        '{"not": "a list"}',
        '[{"length": 8}]',
        "no JSON",
        "[]",
        '[{"length": 8, "copy_accs": [1], "lm_accs": []}]',
        '[{"length": 8, "copy_accs": [], "lm_accs": []}]',
        '[{"length": 8, "copy_accs": [1.5], "lm_accs": [0]}]',
        *(
            f'[{{"length": {length}, "copy_accs": [1], "lm_accs": [0]}}]'
            for length in ("-64", "0", "64.7", "true", '"64"', "null", "1e400", "1e30", "1" + 400 * "0", 5000 * "9")
        ),
        '[{"length": 8, "copy_accs": [1], "lm_accs": [0]}, {"length": 8, "copy_accs": [1], "lm_accs": [0]}]',
        100_000 * "[",
    ],
)
def test_a_file_that_is_no_result_of_the_authors_is_refused(content: str) -> None:
    Path("wrong.json").write_text(content)
    said = refused(farspan("import", "wrong.json", "--out", "run"))
    assert "wrong.json is not a result file of the forgetting curve's authors, a JSON list of objects" in said
    assert len(said) < 400
    assert not Path("run").exists()


def test_the_list_of_trainings_breaks_lines_only_where_they_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = CliRunner().invoke(app, ["train", "--help"]).stdout.splitlines()
    ends = [
        line.rstrip(" │") for line in lines if line.rstrip(" │").endswith(("Repeating the command", "in one window"))
    ]
    assert all(len(end) >= 80 for end in ends)


def test_the_paragraphs_of_a_help_break_only_where_a_line_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = [line.strip() for line in CliRunner().invoke(app, ["compare", "--help"]).stdout.splitlines()]
    assert "auto: each task's default lengths." in lines


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--repeats", "x"), "Invalid value for '--repeats': expected a whole number (got 'x')"),
        (("--minutes", "x"), "Invalid value for '--minutes': expected a number (got 'x')"),
        (("--points", "0"), "Invalid value for '--points': expected at least 1 (got '0')"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_in_plain_words(options: tuple[str, ...], said: str) -> None:
    assert refused(farspan("curve", "demo", *options)).startswith(f"error: {said}")
