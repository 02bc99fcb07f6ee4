"""The documentation: its tutorial and how-to pages run as they are written, its reference names everything."""

import re
import runpy
import shlex
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import fields
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.logging import disable_progress_bar, enable_progress_bar
from typer.testing import CliRunner

import farspan
from farspan import read_rows
from farspan.cli import app
from farspan.cli.commands import COMMANDS, TRAININGS
from farspan.methods import METHODS
from farspan.schema.row import Row
from farspan.stats import curves, summarise
from farspan.tasks import TASKS
from farspan.text import library
from farspan.train.draws import DRAWS

from pages import BLOCK, shows

DOCS = Path(__file__).parents[1] / "docs"
TUTORIAL, HOWTOS = DOCS / "tutorial.md", sorted((DOCS / "howto").glob("*.md"))
INSTALLED = library.installed
INSTALLATION = ("python3 -m venv", "memory/bin/pip install", "source memory")  # of the tutorial, not run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which the tutorial has run: the other pages use its second model."""
    folder = tmp_path_factory.mktemp("docs")
    disable_progress_bar()  # the command line sets the variable for it, which is read before a test begins
    with pytest.MonkeyPatch.context() as patch:
        run_page(TUTORIAL, folder, patch)
    yield folder
    enable_progress_bar()


def run_page(page: Path, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Write the files that a page names, run its commands, and compare what they print with what it shows. Trainings
    have 6 steps on a twentieth of Python's library, and 3 or 4 texts stand for 4 to 12: with YaRN a model remembers
    more from the first on. Lengths are shortened, but for the curves of the tutorial and the check of a baseline."""
    patch.chdir(folder)
    patch.setenv("COLUMNS", "80")
    patch.setattr(library, "installed", lambda wanted: islice(INSTALLED(wanted), 0, None, 20))
    printed = ""
    for language, title, content in BLOCK.findall(page.read_text("utf-8")):
        if title:
            Path(title).write_text(re.sub(r"^steps = \d+", "steps = 6", content, flags=re.M), "utf-8")
        elif language == "sh":
            commands = content.replace("\\\n", " ").splitlines()
            commands = [command for command in commands if not command.startswith(INSTALLATION)]
            what = "compare" if page == TUTORIAL else "builtin:held-out"
            commands = [re.sub(rf"({what} .*--lengths )([\d,]+)", shortened, command) for command in commands]
            printed = "".join(output_of(command) for command in commands)
        elif language == "text":
            shows(printed, content)
        else:
            raise AssertionError(f"{page.name} has a block of {language!r} that is neither run nor written")


def shortened(command: re.Match[str]) -> str:
    return command[1] + ",".join(
        str(min(length * 3 // 5, 400 + length // 8)) for length in map(int, command[2].split(","))
    )


def output_of(command: str) -> str:
    few = re.sub(r"(?<=--repeats )\d+", lambda found: "3" if int(found[0]) < 8 else "4", command)
    name, *arguments = shlex.split(few)
    if name == "python":
        with redirect_stdout(StringIO()) as printed:
            runpy.run_path(*arguments)
        return printed.getvalue()
    assert name == "farspan", command
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, f"{command}\n{result.output}\n{result.exception!r}"
    return result.output


@pytest.mark.timeout(600)
def test_the_tutorial_runs_as_written_and_its_second_model_remembers_more(folder: Path) -> None:
    found = {model: summarise(one).span for (model, _, _), one in curves(read_rows(folder / "runs" / "two")).items()}
    assert found["longer"].value > 2 * found["demo"].value


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", HOWTOS, ids=lambda page: page.stem)
def test_a_how_to_page_runs_as_written(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_page(page, folder, monkeypatch)


def test_the_methods_for_long_documents_answer_questions_about_two_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt"):
        Path(name).write_text("The new server is in room 214. " * 10)
    named = re.findall(r"^- `(.+?)`:", (DOCS / "howto" / "ask-documents.md").read_text("utf-8"), re.M)
    assert len(named) == 4
    for method in named:
        output_of(f"farspan ask demo Where? --context a.txt --context b.txt --max-new-tokens 2 --method {method}")


@pytest.mark.parametrize("page", HOWTOS, ids=lambda page: page.stem)
def test_a_how_to_page_answers_with_at_most_three_commands(page: Path) -> None:
    assert len(re.findall("^farspan ", page.read_text("utf-8"), re.M)) <= 3


@pytest.mark.parametrize("page", HOWTOS, ids=lambda page: page.stem)
def test_the_benchmark_of_the_how_to_pages_runs_their_commands_on_another_model(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = DOCS.parent / "benchmarks" / "five_questions.py"
    monkeypatch.syspath_prepend(script.parent)  # as for a script that is run: its neighbours can be imported
    names = runpy.run_path(str(script))
    title, written, commands = names["page_of"](page, "my/model", [("--lengths ", "--lengths 64,")])
    text = page.read_text("utf-8")
    assert text.startswith(f"# {title}\n")
    assert len(commands) == len(re.findall("^farspan ", text, re.M))
    assert all("--lengths 64," in command for command in commands if "--lengths" in command)
    assert sum('name = "my/model"' in content for content in written.values()) == text.count('name = "demo"')


def test_a_page_that_shows_what_is_not_printed_is_found() -> None:
    printed = "start\n  span   237 [189, >284]\nrows: runs/one\n"
    shows(printed, "start\nspan  1 [0, 2]\n…\n")
    for wrong in ("span of 237\n", "…\nrows: runs/two\n", "…\nrows: runs/one\nstart\n", "start\nrows: runs/one\n"):
        with pytest.raises(AssertionError):
            shows(printed, wrong)


@pytest.fixture(scope="module")
def reference() -> dict[str, str]:
    """The generated pages, without the folder and the ending of their names."""
    return {Path(path).stem: text for path, text in runpy.run_path(str(DOCS / "reference.py"))["pages"]().items()}


def section(page: str, title: str) -> str:
    """Return the text under a heading of the second level."""
    found = re.search(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", page, re.M | re.S)
    assert found, f"{title} has no section"
    return found[1]


def test_the_reference_has_every_command_with_every_option(reference: dict[str, str]) -> None:
    paths = {f"farspan {name}": one for name, one in COMMANDS.items()}
    paths |= {f"farspan train {name}": one for name, one in TRAININGS.items()}
    for path, (_, example) in paths.items():
        shown = section(reference["commands"], path)
        assert f"{path} {example}" in shown
        for first in re.findall(r"as of \[`(.*?)`\]", shown):  # groups that several commands share
            shown += section(reference["commands"], first)
        printed = CliRunner().invoke(app, [*path.split()[1:], "--help"], env={"COLUMNS": "200"}).output
        options = set(re.findall(r"│ +(?:\* +)?(--[a-z-]+)", printed)) - {"--help"}
        assert options
        for option in options:
            assert f"`{option}`" in shown, f"{option} of {path}"


@pytest.mark.parametrize(("page", "known"), [("methods", METHODS), ("tasks", TASKS), ("draws", DRAWS)])
def test_the_reference_has_every_setting_of_every(page: str, known: dict[str, Any], reference: dict[str, str]) -> None:
    for name, kind in known.items():
        shown = section(reference[page], name)
        assert all(f"| `{field.name}` |" in shown for field in fields(kind))


def test_the_reference_has_every_field_of_a_row_and_every_public_name(reference: dict[str, str]) -> None:
    assert all(f"| `{field.name}` |" in reference["rows"] for field in fields(Row))
    for name in farspan._HOMES:
        assert re.search(rf"^::: farspan\.\S*\b{name}$", reference["python"], re.M)


def test_every_page_of_the_documentation_is_in_the_navigation() -> None:
    listed = (DOCS.parent / "mkdocs.yml").read_text("utf-8")
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    pages |= {f"repository/benchmarks/{path.name}" for path in (DOCS.parent / "benchmarks").glob("*.md")}
    assert all(f": {page}\n" in listed for page in pages)
