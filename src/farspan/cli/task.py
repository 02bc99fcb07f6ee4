"""`farspan task` and `farspan compare`: any tasks."""

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


def task(
    name: Annotated[str, typer.Argument(metavar="TASK", help="A task with its settings, as qa:data=nq.jsonl,shots=2.")],
    models: Models,
    method: Methods = None,
    text: Text = "builtin",
    lengths: Annotated[
        str, typer.Option(help="0,8,20 or 512:16384, in the task's unit (tokens, passages); auto: the task's own.")
    ] = "auto",
    points: Points = None,
    spacing: Annotated[Spacing | None, typer.Option(help="Spacing of a range A:B, default log.")] = None,
    repeats: Annotated[int, typer.Option(help="Examples.")] = 10,
    seed: Seed = 0,
    out: Out = None,
    attention: Attention = None,
    *,
    loading: Loading,
    running: Running,
) -> None:
    """Any task by length: retrieval-augmented perplexity, question answering, in-context learning, tests of a text."""
    with said(running.kept):
        from farspan.tasks import task as parsed

        chosen = chosen_lengths(lengths, points, spacing, Spacing.log, zero=parsed(name).unit != "tokens")
        what: dict[str, Any] = {"text": text, "lengths": chosen, "repeats": repeats, "seed": seed}
        run_measurement(models, method, [name], running=running, loader=loading.loader(attention), out=out, **what)


def compare(
    models: Models,
    method: Methods = None,
    task: Annotated[
        list[str] | None,
        typer.Option("--task", help="A task with its settings, default perplexity; repeatable."),
    ] = None,
    text: Text = "builtin",
    lengths: Annotated[str, typer.Option(help="512,1024,2048 or 512:16384; auto: each task's own.")] = "auto",
    points: Points = None,
    spacing: Annotated[Spacing | None, typer.Option(help="Spacing of a range A:B, default log.")] = None,
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
        chosen = chosen_lengths(lengths, points, spacing, Spacing.log)
        what: dict[str, Any] = {"text": text, "lengths": chosen, "repeats": repeats, "seed": seed, "cost": cost}
        options: dict[str, Any] = {
            "running": running,
            "loader": loading.loader(attention),
            "out": out,
            "refusals": True,
        }
        run_measurement(models, method, task or ["perplexity"], **options, **what)
