"""Every command and every block of Python on every page: its options and values are those that farspan has."""

import ast
import importlib
import inspect
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import farspan
from farspan.cli import app
from farspan.cli.check import read_tolerances
from farspan.cli.commands import TRAININGS
from farspan.cli.options import TextOptions
from farspan.measuring.sharding import parse_shard
from farspan.train.config import read_config

from pages import BLOCK, PAGES, ROOT, code_and_prose, commands, examples

ROOT_COMMAND: Any = typer.main.get_command(app)
PLACEHOLDERS = dict.fromkeys(("books/", "A", "B", "FOLDER"), "builtin")
PLACEHOLDERS |= {"shuffled:FOLDER": "shuffled:builtin", "...": "demo"}
INLINE = "`farspan "  # the beginning of a command within a sentence
VALUES: dict[str, Callable[[Any], Any]] = {  # of options and arguments that the command line reads as text
    "method": farspan.method,
    "task": farspan.task,
    "tolerance": lambda text: read_tolerances([text]),
    "shard": parse_shard,
}


def command_of(words: list[str]) -> tuple[str, Any, list[str]]:
    """Return the name of a command, the command, and its own words."""
    found, name, words = ROOT_COMMAND, "farspan", [*words]
    while words and words[0] in getattr(found, "commands", {}):
        name += f" {words[0]}"
        found = found.commands[words.pop(0)]
    return name, found, words


def check(command: str) -> None:
    """Read a command as the command line does, and the values that it leaves to the command."""
    name, found, words = command_of([PLACEHOLDERS.get(word, word) for word in shlex.split(command)])
    if name == "farspan":  # whose options are executed as they are read
        assert set(words) <= {option for one in found.params for option in one.opts}
        return
    given = found.make_context(name, words).params
    values = {"task": given["name"]} if name == "farspan task" else {}
    for option, value in (given | values).items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is not None and option in VALUES:
                VALUES[option](one)
    if given.get("lengths"):
        TextOptions(lengths=given["lengths"], points=given.get("points"), spacing=given.get("spacing")).settings(
            zero=True
        )
    recipe = name.removeprefix("farspan train ")
    if recipe in TRAININGS:
        path = ROOT / given["config"]
        kind = getattr(importlib.import_module(f"farspan.train.{recipe}"), f"{recipe.capitalize()}Settings")
        read_config(path if path.exists() else given["config"], kind, given["overrides"] or [])


ALL = [(page, command) for page in PAGES for command, _ in examples(page)]
WRITTEN = {title for page in PAGES for _, title, _ in BLOCK.findall(page.read_text("utf-8")) if title}


@pytest.mark.parametrize(("page", "command"), ALL, ids=lambda part: part.stem if isinstance(part, Path) else part[:60])
def test_a_command_of_a_page_has_known_options_and_values(page: Path, command: str) -> None:
    if not WRITTEN & set(command.split()):  # else its page is executed
        check(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_command_within_a_sentence_has_known_options(page: Path) -> None:
    for inline in code_and_prose(page)[1].split(INLINE)[1:]:
        _, found, words = command_of(inline.partition("`")[0].split())
        known = {option for one in found.params for option in (*one.opts, *one.secondary_opts)} | {"--help"}
        assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known, inline.partition("`")[0]


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("curve demo --lenghts 64", "No such option"),
        ("curve demo --lengths 64..128", "64..128"),
        ("compare demo --method full --method sink:window=508", "sink"),
        ("task passkeys demo", "passkeys"),
        ("train smt smt-demo --set trainer.step=24", "trainer.step"),
        ("index --text FOLDER --out DIR passages of 100 words", "unexpected extra argument"),
    ],
)
def test_a_command_with_a_mistake_is_found(command: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(ALL) > 80
    with pytest.raises(Exception) as raised:  # noqa: PT011, whose message may be printed instead
        check(*commands(f"$ farspan {command}  # a comment"))
    assert error in f"{raised.value} {capsys.readouterr().err}"


def missing(code: str) -> Iterator[str]:
    """Yield the names of farspan, and the arguments of its functions, in a block of Python that do not exist."""
    tree = ast.parse(code)
    known: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "farspan":
            for alias in node.names:
                known[alias.asname or alias.name] = found = attribute(importlib.import_module(node.module), alias.name)
                if found is None:
                    yield f"{node.module}.{alias.name}"
    known.setdefault("farspan", farspan)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Call) and value_of(node, known) is None:
            yield ast.unparse(node)
        if isinstance(node, ast.Call) and (called := value_of(node.func, known)) not in (None, UNKNOWN):
            parameters = dict(inspect.signature(called).parameters)
            if called in (farspan.curve, farspan.compare):
                del parameters["options"]  # further arguments of measure
                parameters |= inspect.signature(farspan.measure).parameters
            if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
                unknown = [str(one.arg) for one in node.keywords if one.arg not in parameters]
                yield from (f"{name} of {ast.unparse(node.func)}" for name in unknown)


UNKNOWN = object()  # a value that only running the code gives


def value_of(node: ast.AST, known: dict[str, Any]) -> Any:
    """Return what a name or an attribute is; None: it does not exist; UNKNOWN: it is nothing of farspan's modules."""
    if isinstance(node, ast.Name):
        return known.get(node.id, UNKNOWN)
    if not isinstance(node, ast.Attribute):
        return UNKNOWN
    of = value_of(node.value, known)
    return attribute(of, node.attr) if inspect.ismodule(of) or inspect.isclass(of) else UNKNOWN


def attribute(of: Any, name: str) -> Any:
    if not hasattr(of, name) and inspect.ismodule(of):
        try:
            return importlib.import_module(f"{of.__name__}.{name}")
        except ModuleNotFoundError:
            return None
    return getattr(of, name, None)


BLOCKS = [(page, language, code) for page in PAGES for language, _, code in BLOCK.findall(page.read_text("utf-8"))]
PYTHON = [(page, code) for page, language, code in BLOCKS if language == "python"]


@pytest.mark.parametrize(("page", "code"), PYTHON, ids=lambda part: part.stem if isinstance(part, Path) else "")
def test_a_block_of_python_has_names_and_arguments_that_farspan_has(page: Path, code: str) -> None:
    assert list(missing(code)) == []


def test_a_block_of_python_with_a_mistake_is_found() -> None:
    assert len(PYTHON) > 5
    assert list(missing("import farspan\nfarspan.curves(lm)\n")) == ["farspan.curves"]
    assert list(missing("from farspan.text import corpus\n")) == ["farspan.text.corpus"]
    assert list(missing("farspan.curve(lm, txt='a')")) == ["txt of farspan.curve"]
    assert list(missing("curve.rows\nfarspan.method('full').on(lm)")) == []
    with pytest.raises(SyntaxError):
        list(missing("lm = farspan.load("))
