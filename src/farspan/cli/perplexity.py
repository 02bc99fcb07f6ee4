"""`farspan perplexity`."""

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
        if show(rows, folder, console, running.as_json):
            raise typer.Exit(1)
