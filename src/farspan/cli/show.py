"""What commands show in the same way: a plan, a measurement's progress and its end."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farspan.cli.options import err
from farspan.terminal import Terminal

if TYPE_CHECKING:
    from farspan.plan import Plan
    from farspan.record import Row


def watched(
    measure: Callable[..., "list[Row]"],
    command: str,
    models: list[str],
    methods: list[str],
    settings: Any,
    out: Path | None,
    as_json: bool,
    **options: Any,
) -> tuple[list["Row"], Path, Terminal]:
    """Measures with a progress line; returns all rows, the run's folder and where to print.

    Args:
        measure: called with models, methods, settings, the folder and `options`.
        command: names the folder, where none is given.
        settings: a dataclass, of which the folder's name has a hash.
    """
    from dataclasses import asdict

    from farspan.display import Display
    from farspan.measure import Watch
    from farspan.record import default_folder

    folder = out or default_folder(command, models, [methods, asdict(settings)])
    console = err if as_json else Terminal()
    with Display(console) as display:
        watch = Watch(display.start, display.row, display.notice)
        return measure(models, methods, settings, folder, watch=watch, **options), folder, console


def show(rows: list["Row"], folder: Path, console: Terminal, as_json: bool, **options: Any) -> int:
    """Print and draw what a run holds, and print it as JSON where that is asked for; return how much of it failed."""
    from farspan.record import read_header
    from farspan.report import results

    found = results(rows, read_header(folder), folder, **options)
    found.print(console)
    if as_json:
        print(json.dumps(found.as_data()))
    return found.num_failed


def print_plans(plans: "Sequence[tuple[str, str, str, Plan | str]]", first: str, as_json: bool) -> None:
    from dataclasses import asdict

    from rich.table import Table

    from farspan.report.runs import short_names

    table = Table(title=f"plan: nothing is measured yet{first}", title_justify="left")
    for column in ("model", "method", "asked", "examples", "tokens", "TFLOP", "memory", "time"):
        left = column in ("model", "method", "asked")
        table.add_column(column, justify="left" if left else "right", no_wrap=not left, overflow="fold")
    short = short_names(model for model, *_ in plans)
    for model, method, what, cost in plans:
        if isinstance(cost, str):
            table.add_row(short[model], method, what, *[""] * 4, "refused")
            continue
        seconds = cost.seconds or 0.0
        table.add_row(
            short[model],
            method,
            what,
            f"{cost.num_examples:,}",
            f"{cost.tokens:,}",
            f"{cost.flops / 1e12:,.3g}",
            f"{cost.extra_bytes / 2**30:,.2f} GiB",
            time.strftime("%H:%M:%S", time.gmtime(seconds)) if seconds < 86400 else f"{seconds / 3600:,.0f} h",
        )
    console = err if as_json else Terminal()
    console.print(table)
    for model, method, what, cost in plans:
        if isinstance(cost, str):
            console.print(f"{model} {method}, {what}: {cost}", style="red", markup=False, highlight=False)
            continue
        if cost.fallback:
            console.print(f"{model} {method}: read with plain forwards: {cost.fallback}", style="yellow", markup=False)
        if cost.parts:
            parts = ", ".join(f"{name.replace('_', ' ')} {size / 2**30:,.3g} GiB" for name, size in cost.parts.items())
            console.print(f"{model} {method}: {parts}", markup=False, highlight=False)
    if as_json:
        cells = [
            {"model": model, "method": method, "what": what}
            | ({"refused": cost} if isinstance(cost, str) else asdict(cost))
            for model, method, what, cost in plans
        ]
        print(json.dumps({"plans": cells}))
