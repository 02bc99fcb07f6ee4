"""`farspan attention`."""

from typing import Annotated, Any

import typer

from farspan.cli.measured import run_measurement
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


def attention(
    models: Models,
    method: Methods = None,
    text: Text = "builtin",
    lengths: Annotated[
        str,
        typer.Option(help="Positions of queries: 512,4096 or 512:16384; auto: parts of the trained length, to 8,192."),
    ] = "auto",
    points: Points = None,
    spacing: Annotated[Spacing | None, typer.Option(help="Spacing of a range A:B, default log.")] = None,
    repeats: Annotated[int, typer.Option(help="Windows of the text, from as many documents as possible.")] = 10,
    layers: Annotated[str, typer.Option(help="all, or as 0,5,-1: the first, the sixth, the last.")] = "all",
    sinks: Annotated[int, typer.Option(min=0, help="First tokens of a text that `rest` leaves out.")] = 8,
    bin: Annotated[
        int | None, typer.Option(min=1, help="Tokens of distance; default 1,024, or less on short lengths.")
    ] = None,
    map_bins: Annotated[int, typer.Option(min=0, max=512, help="Bins of the map, by query and key; 0: no map.")] = 128,
    seed: Seed = 0,
    out: Out = None,
    *,
    loading: Loading,
    running: Running,
) -> None:
    """Where attention goes: by distance, by rank, by layer and head, with and without sinks, and a map."""
    with said(running.kept):
        from farspan.tasks.attention import Attention

        chosen = chosen_lengths(lengths, points, spacing, Spacing.log)
        tasks = [Attention(chosen_layers(layers), sinks, bin, map_bins)]
        what: dict[str, Any] = {"text": text, "lengths": chosen or "auto", "repeats": repeats, "seed": seed}
        run_measurement(models, method, tasks, running=running, loader=loading.loader(), out=out, **what)


def chosen_layers(text: str) -> tuple[int, ...] | None:
    """Return the layers that --layers names; None for `all`.

    Raises:
        ValueError: neither `all` nor numbers.
    """
    if text == "all":
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"layers: got {text!r}, expected all, or numbers as 0,5,-1 (--layers)") from error
