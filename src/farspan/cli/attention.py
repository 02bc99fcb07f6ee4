"""`farspan attention`."""

from typing import Annotated

import typer

from farspan.cli.options import (
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


def attention(
    models: Models,
    method: Methods = None,
    text: Text = "builtin",
    lengths: Annotated[
        str,
        typer.Option(help="Where queries stand: 512,4096 or 512:16384; auto: parts of the trained length, to 8,192."),
    ] = "auto",
    points: Points = None,
    spacing: Annotated[Spacing | None, typer.Option(help="Of a range A:B, default log.")] = None,
    repeats: Annotated[int, typer.Option(help="Windows of the text, from as many documents as possible.")] = 10,
    layers: Annotated[str, typer.Option(help="all, or as 0,5,-1: the first, the sixth, the last.")] = "all",
    sinks: Annotated[int, typer.Option(min=0, help="First tokens of a text that `rest` does without.")] = 8,
    bin: Annotated[
        int | None, typer.Option(min=1, help="Tokens of distance; default 1,024, or less on short lengths.")
    ] = None,
    map_bins: Annotated[int, typer.Option(min=0, max=512, help="Of the map's queries and keys; 0: no map.")] = 128,
    seed: Seed = 0,
    out: Out = None,
    *,
    loading: Loading,
    running: Running,
) -> None:
    """Where attention goes: by distance, by rank, by layer and head, with and without sinks, and a map."""
    with said(running.kept):
        from farspan.attention_stats import AttentionSettings, measure_attention, plan_attention

        chosen = chosen_lengths(lengths, points, spacing, Spacing.log)
        settings = AttentionSettings(text, chosen, repeats, seed, chosen_layers(layers), sinks, bin, map_bins)
        loader = loading.loader()
        methods = method or ["full"]
        if running.plan:
            plans = plan_attention(models, methods, settings, loader=loader, batch=running.batch, chunk=running.chunk)
            print_plans(list(plans), "", running.as_json)
            return
        options = {"loader": loader, "batch": running.batch, "chunk": running.chunk}
        rows, folder, console = watched(
            measure_attention, "attention", models, methods, settings, out, running.as_json, **options
        )
        if show(rows, folder, console, running.as_json):
            raise typer.Exit(1)


def chosen_layers(text: str) -> tuple[int, ...] | None:
    """What --layers says; None for `all`.

    Raises:
        ValueError: neither `all` nor numbers.
    """
    if text == "all":
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"layers {text!r} are neither all nor like 0,5,-1") from error
