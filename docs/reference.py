"""Write the reference pages of the documentation from the code: commands, methods, tasks, draws, configs and rows.

`pages` returns them; `docs/hook.py` puts them into the site, so that no page can differ from the code.
"""

import ast
import inspect
import json
import math
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel

import farspan
from farspan import schema
from farspan.cli.commands import app
from farspan.methods import METHODS
from farspan.tasks import TASKS
from farspan.train.config import RECIPES, Settings, settings_of, table_of
from farspan.train.draws import DRAWS

# public names beside those of `farspan` itself
MODULES = {
    "farspan.callback": ("MeasuringCallback",),
    "farspan.reader": ("Reader", "Memory", "Scores"),
    "farspan.measuring.result": ("Measured",),
    "farspan.record": ("Row", "Run", "read_header", "read_examples"),
    "farspan.stats": ("curves", "summarise"),
    "farspan.doctor": ("diagnose",),
}


def pages() -> dict[str, str]:
    """Return the Markdown of each page by its path in the site."""
    return {
        "reference/commands.md": _commands(),
        "reference/python.md": _python(),
        "reference/methods.md": _methods(),
        "reference/tasks.md": _tasks(),
        "reference/draws.md": _draws(),
        "reference/configs.md": _configs(),
        "reference/rows.md": _rows(),
    }


def _commands() -> str:
    parts = ["# Commands", "The same text as `farspan COMMAND --help`."]
    seen: dict[str, str] = {}
    for path, command in _walk(typer.main.get_command(app)):
        parts += _command(path, command, seen)
    return _joined(parts)


def _walk(command: Any, path: str = "farspan") -> Iterator[tuple[str, Any]]:
    """Yield each command that can be run, with the words that start it."""
    if path == "farspan" or not hasattr(command, "commands"):
        yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from _walk(inner, f"{path} {name}")


def _command(path: str, command: Any, seen: dict[str, str]) -> Iterator[str]:
    """Yield the parts of a command's section.

    Args:
        seen: the commands whose groups of options were shown before, by the group's table; these are not repeated.
    """
    yield f"## {path}"
    yield _prose(command.help or "")
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    usage = " ".join([path, *(_value(one) for one in arguments), *(["[OPTIONS]"] if options else [])])
    yield f"```text\n{usage}\n```"
    if command.epilog:
        yield f"Example: `{command.epilog.removeprefix('Example: ')}`"
    yield _table(("argument", "meaning"), ((f"`{_value(one)}`", one.help or "") for one in arguments))
    for panel in dict.fromkeys(one.rich_help_panel or "Options" for one in options):
        rows = (_option(one) for one in options if (one.rich_help_panel or "Options") == panel)
        table = _table(("option", "value", "meaning"), rows)
        first = seen.setdefault(table, path)
        yield f"**{panel}**" + ("" if first == path else f": as of [`{first}`](#{first.replace(' ', '-')})")
        yield table if first == path else ""


def _option(option: Any) -> tuple[str, str, str]:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    value = "" if option.is_flag else _value(option)
    least, most = getattr(option, "min", None), getattr(option, "max", None)
    if least is not None:
        value += f", at least {_number(least)}" if most is None else f", {_number(least)} to {_number(most)}"
    default = "" if option.default in (None, False, ()) or option.is_flag else f" Default: `{option.default}`."
    return names, value, (option.help or "") + default


def _value(parameter: Any) -> str:
    """Return what a user gives for an argument or option."""
    if parameter.metavar:
        return parameter.metavar
    if parameter.param_type_name == "argument":
        return parameter.name.upper()
    annotation = parameter.type_descriptor.annotation
    return _words(get_args(annotation)[0] if get_origin(annotation) is list else annotation)


def _python() -> str:
    parts = [
        "# Python",
        "`import farspan` loads nothing heavy: each name is imported when it is first used.",
        "[Methods](methods.md) and [tasks](tasks.md) are named by strings, as on the command line.",
    ]
    homes = {name: f"farspan.{farspan._HOMES[name]}" for name in sorted(farspan._HOMES, key=str.lower)}
    for name, home in homes.items():
        # where it is defined: mkdocstrings does not follow names through modules that import lazily
        parts.append(
            f"::: {_defined(home, name)}\n    options:\n      heading: farspan.{name}\n      toc_label: {name}"
        )
    parts.append("## Further names")
    known = set(homes)
    for module, names in MODULES.items():
        parts += [f"::: {_defined(module, name)}" for name in names if name not in known]
    return _joined(parts)


def _defined(module: str, name: str) -> str:
    found = getattr(sys.modules.get(module) or __import__(module, fromlist=[name]), name)
    return f"{found.__module__}.{name}"


def _methods() -> str:
    parts = [
        "# Settings of methods",
        "A method is named as `sinks:window=508,sinks=4`, several of them as `METHOD+METHOD` "
        "([explanations](../methods.md)). Settings without a default are required.",
    ]
    for name, kind in METHODS.items():
        parts += [f"## {name}", _prose(inspect.getdoc(kind) or ""), _settings(kind)]
    return _joined(parts)


def _tasks() -> str:
    parts = [
        "# Settings of tasks",
        "A task is named as `passkey:depths=5` ([explanations](../tasks.md)). Settings without a default are required.",
    ]
    for name, kind in TASKS.items():
        scores = f" Further scores: {', '.join(f'`{one}`' for one in kind.details)}." if kind.details else ""
        parts += [
            f"## {name}",
            _prose(inspect.getdoc(kind) or ""),
            f"A length counts {kind.unit}.{scores}",
            _settings(kind),
        ]
    return _joined(parts)


def _draws() -> str:
    parts = [
        "# Draws of training rows",
        "`smt.draw` of `farspan train smt` names the way in which the tokens of a row are sampled from a document, "
        "as `sparse:window=256` ([explanations](../training.md)).",
    ]
    for name, kind in DRAWS.items():
        parts += [f"## {name}", _prose(inspect.getdoc(kind) or ""), _settings(kind)]
    return _joined(parts)


def _configs() -> str:
    parts = [
        "# Training configs",
        "One TOML file for each training. `--set TABLE.KEY=VALUE` overrides a key ([explanations](../training.md)).",
    ]
    for name in RECIPES:
        kind = settings_of(name)
        parts += [f"## farspan train {name}", _prose(inspect.getdoc(kind) or "")]
        tables = [key for key, hint in _hints(kind).items() if table_of(hint)]
        parts.append(_settings(kind, leave_out=tables))
        for key in tables:
            table = table_of(_hints(kind)[key])
            assert table is not None
            parts += [f"### {key} of {name}", _prose(inspect.getdoc(table) or ""), _settings(table)]
    return _joined(parts)


def _rows() -> str:
    parts = [
        "# Fields of a row",
        "A line of `rows.jsonl` is one example at one length ([files of a run](../records.md)).",
        _settings(schema.Row, first="field"),
    ]
    for task, (settings, scores, needed) in schema.KINDS.items():
        parts.append(f"## {task}")
        for title, kind in (("settings", settings), ("scores", scores)):
            if table := _settings(kind, first="field"):
                parts += [f"### {title} of {task}", table, *_nested(kind)]
        if needed:
            parts.append(f"Every row of status `ok` has the scores {', '.join(f'`{one}`' for one in needed)}.")
    parts += ["## Other tasks", _settings(schema.OTHER[1], first="field")]
    for title, kind in (("run.json", schema.Header), ("Identity: a model in run.json", schema.Identity)):
        parts += [f"## {title}", _settings(kind, first="field"), *_nested(kind)]
    parts += ["## A line of examples.jsonl", _settings(schema.ExampleLine, first="field")]
    return _joined(parts)


def _nested(kind: Any) -> Iterator[str]:
    """Yield the tables of a row's fields that are tables themselves, but not of those with a section of their own."""
    for hint in _hints(kind).values():
        for inner in (hint, *get_args(hint)):
            if isinstance(inner, type) and issubclass(inner, schema.Checked) and inner is not schema.Identity:
                yield f"`{inner.__name__}`:"
                yield _settings(inner, first="field")


def _settings(kind: Any, first: str = "setting", leave_out: Iterable[str] = ()) -> str:
    """Return a table of the fields of a dataclass or a pydantic model; "" if it has none."""
    notes, hints, rows = _notes(kind), _hints(kind), []
    for name, default in _defaults(kind).items():
        if name in leave_out:
            continue
        alias = getattr(getattr(kind, "model_fields", {}).get(name), "alias", None) or name
        rows.append((f"`{alias}`", notes.get(name, ""), _words(hints[name]), default))
    return _table((first, "meaning", "type", "default"), rows)


def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _defaults(kind: Any) -> dict[str, str]:
    """Return each field's default as text, "" for a required one."""
    if is_dataclass(kind):
        made = {one.name: one.default_factory() for one in fields(kind) if one.default_factory is not MISSING}
        given = {one.name: made.get(one.name, one.default) for one in fields(kind)}
        return {name: "" if value is MISSING else _shown(value, quoted=False) for name, value in given.items()}
    assert issubclass(kind, BaseModel)
    return {
        name: "" if field.is_required() else _shown(field.get_default(call_default_factory=True), quoted=True)
        for name, field in kind.model_fields.items()
    }


def _shown(value: Any, *, quoted: bool) -> str:
    """Return a default as a user writes it: in TOML if `quoted`, else as a setting on the command line."""
    if value is None:
        return "none"
    if isinstance(value, Settings):
        return "see below"
    if not quoted and isinstance(value, str | tuple):
        return f"`{value if isinstance(value, str) else '+'.join(map(str, value))}`" if value else ""
    return f"`{json.dumps(value)}`"


def _notes(kind: type) -> dict[str, str]:
    """Return the comments of a class's fields: those at the end of the line, and those above it."""
    notes: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("farspan"):
            continue
        source = textwrap.dedent(inspect.getsource(base))
        comments = {
            token.start[0]: (token.string.lstrip("# "), token.line.lstrip().startswith("#"))
            for token in tokenize.generate_tokens(StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
        (node,) = ast.parse(source).body
        assert isinstance(node, ast.ClassDef)
        for field in node.body:
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            lines = [comments[line][0] for line in range(field.lineno, (field.end_lineno or 0) + 1) if line in comments]
            above = field.lineno - 1
            while above in comments and comments[above][1]:
                lines.insert(0, comments[above][0])
                above -= 1
            note = re.sub(r"\s*(type: ignore|noqa).*", "", " ".join(lines))
            notes[field.target.id] = re.sub(r"[\w.]*\b[A-Z][A-Z_]+\b", partial(_constant, base.__module__), note)
    return notes


def _constant(module: str, name: re.Match[str]) -> str:
    """Return the values of a constant that a comment names: a number, or names."""
    value: Any = sys.modules[module]
    for part in name[0].split("."):
        value = getattr(value, part, farspan if part == "farspan" else None)
    if isinstance(value, int):
        return f"{value:,}"
    known = isinstance(value, tuple | list | Mapping) and all(isinstance(one, str) for one in value)
    return ", ".join(f"`{one}`" for one in value) if known else name[0]


def _words(hint: Any) -> str:
    """Return a type in words, with its range."""
    names = {
        int: "integer",
        float: "number",
        str: "text",
        Path: "path",
        bool: "true or false",
        Any: "any",
        type(None): "none",
    }
    if hint in (names if getattr(hint, "__hash__", None) else ()):
        return names[hint]
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = [limit for one in inner[1:] for limit in getattr(one, "metadata", [one])]
        low = next((one.ge for one in limits if getattr(one, "ge", None) is not None), None)
        above = next((one.gt for one in limits if getattr(one, "gt", None) is not None), None)
        high = next((one.le for one in limits if getattr(one, "le", None) is not None), None)
        span = (
            ""
            if low is None
            else f", at least {_number(low)}"
            if high is None
            else f", {_number(low)} to {_number(high)}"
        )
        return _words(inner[0]) + (f", above {_number(above)}" if above is not None else span)
    if origin is None:
        return f"`{getattr(hint, '__name__', hint)}`"
    if getattr(hint, "__name__", "") == "Literal" or str(origin) == "typing.Literal":
        return " or ".join(f"`{one}`" for one in inner)
    if origin in (tuple, list):
        return f"list of {_words(inner[0])}"
    if origin is dict or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return f"table of {_words(inner[1])}" if inner[1] is not Any else "table"
    return " or ".join(_words(one) for one in inner if one is not type(None))


def _number(value: float) -> str:
    value = int(value) if value == int(value) else value
    for base in (10, 2):
        power = round(math.log(value, base)) if value >= 10**9 else 0
        if power and base**power == value:
            return f"{base}^{power}"
    return f"{value:,}"


def _prose(text: str) -> str:
    """Return a docstring as Markdown: sections such as `Raises:` become paragraphs, formulas stay as they are."""
    return re.sub(r"(?m)^(Raises|Args|Returns):$", r"\n**\1**\n", text).replace("<", "&lt;") if text else ""


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table; "" without rows. Columns that are empty in all rows are left out."""
    rows = list(rows)
    used = [column for column in range(len(head)) if column == 0 or any(row[column] for row in rows)]
    if not rows:
        return ""
    lines = [[head[column] for column in used], ["---"] * len(used)]
    lines += [[" ".join(row[column].split()).replace("|", "\\|") for column in used] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _joined(parts: Iterable[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    for page, text in pages().items():
        print(f"<!-- {page} -->\n{text}")
