"""`farspan perplexity`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from farspan.cli.show import print_end, print_plans, watched
from farspan.terminal import Terminal

if TYPE_CHECKING:
    from farspan.record import Row


def perplexity(
    models: Models,
    method: Methods = None,
    text: Text = "builtin",
    lengths: Annotated[
        str, typer.Option(help="512,1024,2048 or 512:16384; auto: powers of two to twice the trained length.")
    ] = "auto",
    points: Points = None,
    spacing: Annotated[Spacing | None, typer.Option(help="Of a range A:B, default log.")] = None,
    repeats: Annotated[int, typer.Option(help="Windows of the text, from as many documents as possible.")] = 10,
    targets: Annotated[
        str, typer.Option(help="fixed: the same tokens at all lengths; last: of each length; all: every token.")
    ] = "fixed",
    target_tokens: Annotated[
        int | None, typer.Option(min=1, help="Scored at each length; default 256, or half of the smallest length.")
    ] = None,
    buckets: Annotated[
        int | None, typer.Option(min=1, help="Equal parts of a text, with --targets all; default powers of two.")
    ] = None,
    seed: Seed = 0,
    out: Out = None,
    attention: Attention = None,
    *,
    loading: Loading,
    running: Running,
) -> None:
    """Perplexity by length: how well a model expects the same tokens behind more and more of their text."""
    with said(running.kept):
        from farspan.perplexity import PerplexitySettings, measure_perplexity, plan_perplexity

        chosen = chosen_lengths(lengths, points, spacing, Spacing.log)
        settings = PerplexitySettings(text, chosen, repeats, seed, targets, target_tokens, buckets)
        loader = loading.loader(attention)
        methods = method or ["full"]
        if running.plan:
            plans = plan_perplexity(models, methods, settings, loader=loader, batch=running.batch, chunk=running.chunk)
            print_plans(list(plans), "", running.as_json)
            return
        options = {"loader": loader, "batch": running.batch, "chunk": running.chunk}
        rows, folder, console = watched(
            measure_perplexity, "perplexity", models, methods, settings, out, running.as_json, **options
        )
        if show_perplexity(rows, folder, console, running.as_json):
            raise typer.Exit(1)


def show_perplexity(rows: list["Row"], folder: Path, console: Terminal, as_json: bool) -> int:
    """Draws and prints what a run holds; returns how many of its rows failed."""
    from farspan.record import read_header
    from farspan.report import perplexity as report
    from farspan.report.tables import short_names

    found = report.series(rows)
    drawn = [one for one in found if one.measured.any()]
    pictures: list[Path] = []
    if drawn:
        about = read_header(folder)["models"]
        trained = {about.get(one.model, {}).get("trained_length") for one in drawn}
        what = "; ".join(sorted({one.what for one in drawn}))
        names = ", ".join(sorted(short_names(one.model for one in drawn).values()))
        pictures = report.draw_perplexity(drawn, folder, f"Perplexity of {names} ({what})", trained)
        report.print_perplexity(drawn, console)
    failed = print_end(rows, folder, pictures, console)
    if as_json:
        summary = {
            "run": str(folder),
            "perplexity": report.as_data(found),
            "failed_rows": failed,
            "pictures": [str(path) for path in pictures],
        }
        print(json.dumps(summary))
    return failed
