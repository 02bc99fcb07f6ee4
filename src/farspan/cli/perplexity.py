"""`farspan perplexity`."""

from typing import Annotated, Any

import typer

from farspan.cli.measured import run_measurement
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


def perplexity(
    models: Models,
    method: Methods = None,
    text: Text = "builtin",
    lengths: Annotated[
        str, typer.Option(help="512,1024,2048 or 512:16384; auto: powers of two to twice the trained length.")
    ] = "auto",
    points: Points = None,
    spacing: Annotated[Spacing | None, typer.Option(help="Spacing of a range A:B, default log.")] = None,
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
    """Perplexity by length: how well a model predicts the same tokens after more and more of their text."""
    with said(running.kept):
        from farspan.tasks.perplexity import Perplexity

        chosen = chosen_lengths(lengths, points, spacing, Spacing.log)
        if target_tokens is not None and targets == "all":
            raise ValueError("--target-tokens belongs to --targets fixed or last; all scores every token: omit one")
        tasks = [Perplexity(targets, target_tokens, buckets)]
        what: dict[str, Any] = {"text": text, "lengths": chosen or "auto", "repeats": repeats, "seed": seed}
        run_measurement(models, method, tasks, running=running, loader=loading.loader(attention), out=out, **what)
