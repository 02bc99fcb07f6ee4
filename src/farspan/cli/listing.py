"""`farspan methods` and `farspan tasks`: what can be named, with its settings."""

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any

import typer

from farspan.cli.messages import one_line_errors
from farspan.cli.options import AsJson
from farspan.terminal import Terminal

Named = Annotated[str | None, typer.Argument(metavar="NAME", help="Describe this one only, in full.")]


def methods(name: Named = None, *, as_json: AsJson = False) -> None:
    """List the methods of reading with their settings, or describe one.

    Optional settings are in brackets: [SETTING=DEFAULT|OTHERS], or [SETTING: VALUES] and [SETTING] without a default.
    A method is written as METHOD:SETTING=VALUE,SETTING=VALUE; several are joined by +.
    """
    with one_line_errors():
        from farspan.methods import METHODS

        _list("method", METHODS, name, as_json)


def tasks(name: Named = None, *, as_json: AsJson = False) -> None:
    """List the tasks with their settings, or describe one.

    Optional settings are in brackets: [SETTING=DEFAULT|OTHERS], or [SETTING: VALUES] and [SETTING] without a default.
    A task is written as TASK:SETTING=VALUE,SETTING=VALUE. A length counts tokens, unless another unit is named.
    """
    with one_line_errors():
        from farspan.tasks import TASKS

        _list("task", TASKS, name, as_json)


def _list(noun: str, kinds: Mapping[str, type], only: str | None, as_json: bool) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from farspan.specs import check_known

    if only is not None:
        check_known(noun, only, kinds)
    found = [_described(name, kind) for name, kind in kinds.items() if only in (None, name)]
    if as_json:
        print(json.dumps({f"{noun}s": found}))
        return
    table = Table(box=SIMPLE_HEAD)
    for column in (noun, "settings", "meaning"):
        table.add_column(column, no_wrap=column == noun, overflow="fold")
    for one in found:
        written = [f"{name}={'|'.join(one['values'].get(name, ('...',)))}" for name in one["required"]]
        for name, default in one["optional"].items():
            shown = [*([default] if default is not None else []), *one["values"].get(name, ())]
            equals = ": " if default is None else "="
            written.append(f"[{name}{equals}{'|'.join(dict.fromkeys(shown))}]" if shown else f"[{name}]")
        unit = one.get("unit", "tokens")
        about = one["about"] if unit == "tokens" else f"{one['about']} A length counts {unit}."
        table.add_row(one["name"], " ".join(written), about)
    Terminal().print(table)
    if only is not None:
        about = inspect.getdoc(inspect.getmodule(kinds[only])) or ""
        about = re.sub(r"(?<=\S)\n(?=[^\s`-])", " ", about)  # formulas, tables and lists keep their lines
        Terminal().print(about, markup=False, highlight=False)


def _described(name: str, kind: Any) -> dict[str, Any]:
    """Return a method or task as JSON: its name, first sentence, required settings, and optional ones with defaults,
    as they are written on the command line (None: no value), and the known values of some."""
    from farspan.specs import as_written

    about = " ".join((inspect.getdoc(kind) or "").split()).partition(". ")[0].rstrip(".") + "."
    settings = {field.name: field.default for field in fields(kind)}
    found: dict[str, Any] = {
        "name": name,
        "about": about,
        "required": [key for key, value in settings.items() if value is MISSING],
    }
    found["optional"] = {
        key: None if value is None else as_written(value) for key, value in settings.items() if value is not MISSING
    }
    found["values"] = {field.name: known for field in fields(kind) if (known := field.metadata.get("known"))}
    return found | ({"unit": kind.unit} if hasattr(kind, "unit") else {})
