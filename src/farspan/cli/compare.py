"""`farspan compare`."""

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
    said,
)
from farspan.cli.show import print_plans, show, watched


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
        from farspan.compare import CompareSettings, plan_compare
        from farspan.compare import compare as compared

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
        if show(rows, folder, console, running.as_json, compared=True):
            raise typer.Exit(1)
