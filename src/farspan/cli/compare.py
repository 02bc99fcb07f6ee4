"""`farspan compare`."""

import json
from typing import Annotated

import typer

from farspan.cli.options import (
    Attention,
    Loading,
    Methods,
    Models,
    Out,
    Points,
    Running,
    Seed,
    Spacing,
    Text,
    chosen_lengths,
    err,
    said,
)
from farspan.cli.show import print_end, print_plans, watched


def compare(
    models: Models,
    method: Methods = None,
    task: Annotated[
        list[str] | None,
        typer.Option("--task", help="What is asked, default perplexity; curve:protocol=probe. Repeatable."),
    ] = None,
    text: Text = "builtin",
    lengths: Annotated[str, typer.Option(help="512,1024,2048 or 512:16384; auto: each task's own.")] = "auto",
    points: Points = None,
    spacing: Annotated[Spacing | None, typer.Option(help="Of a range A:B, default log.")] = None,
    repeats: Annotated[int, typer.Option(help="Examples of each length.")] = 10,
    cost: Annotated[bool, typer.Option(help="Also measure tokens per second and memory.")] = True,
    seed: Seed = 0,
    out: Out = None,
    attention: Attention = None,
    *,
    loading: Loading,
    running: Running,
) -> None:
    """Models and methods side by side on the same tokens: quality, paired with the first; speed; memory."""
    with said(running.kept):
        from dataclasses import asdict

        from farspan.compare import CompareSettings, plan_compare
        from farspan.compare import compare as compared
        from farspan.record import read_header
        from farspan.report import compare as report

        chosen = chosen_lengths(lengths, points, spacing, Spacing.log)
        settings = CompareSettings(tuple(task or ["perplexity"]), text, chosen, repeats, seed, cost)
        loader = loading.loader(attention)
        methods = method or ["full"]
        if running.plan:
            plans = plan_compare(models, methods, settings, loader=loader, batch=running.batch, chunk=running.chunk)
            print_plans(list(plans), "", running.as_json)
            return
        options = {"loader": loader, "batch": running.batch, "chunk": running.chunk}
        rows, folder, console = watched(compared, "compare", models, methods, settings, out, running.as_json, **options)
        found = report.cells(rows, read_header(folder))
        report.print_comparison(found, console)
        pictures = report.draw_comparison(found, folder)
        for path in report.write_tables(found, folder):
            console.print_line(f"table: {path}")
        console.print_line(f"page: farspan report {folder}")
        missing = [cell for cell in found if cell.failed]
        print_end(rows, folder, pictures, console)
        for line in report.failures(found):
            err.print_line(line, style="red")
        if running.as_json:
            cells = [asdict(cell) for cell in found]
            print(json.dumps({"run": str(folder), "cells": cells, "failed_cells": len(missing)}))
        if missing:
            raise typer.Exit(1)
