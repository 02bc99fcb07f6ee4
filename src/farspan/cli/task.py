"""`farspan task`."""

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


def task(
    name: Annotated[str, typer.Argument(metavar="TASK", help="A task with its settings, as qa:data=nq.jsonl,shots=2.")],
    models: Models,
    method: Methods = None,
    text: Text = "builtin",
    lengths: Annotated[
        str, typer.Option(help="0,8,20 or 512:16384, in the task's unit (tokens, passages); auto: the task's own.")
    ] = "auto",
    points: Points = None,
    spacing: Annotated[Spacing | None, typer.Option(help="Of a range A:B, default log.")] = None,
    repeats: Annotated[int, typer.Option(help="Examples.")] = 10,
    seed: Seed = 0,
    out: Out = None,
    attention: Attention = None,
    *,
    loading: Loading,
    running: Running,
) -> None:
    """A long-context task by length: retrieval-augmented perplexity, question answering, tests of your own text."""
    with said(running.kept):
        from farspan.questions import QuestionSettings, measure_question, plan_question
        from farspan.tasks import task as parsed

        chosen: tuple[int, ...] | None
        first, comma, rest = lengths.partition(",")
        if parsed(name).unit != "tokens" and first.strip() == "0":
            # a length of 0 is the control of tasks that count passages or demonstrations
            if rest.strip() == "auto":
                raise ValueError(f"lengths {lengths!r} mix numbers and auto: give one of the two")
            chosen = (0, *((chosen_lengths(rest, points, spacing, Spacing.log) or ()) if comma else ()))
        else:
            chosen = chosen_lengths(lengths, points, spacing, Spacing.log)
        settings = QuestionSettings(name, text, chosen, repeats, seed)
        loader = loading.loader(attention)
        methods = method or ["full"]
        if running.plan:
            plans = plan_question(models, methods, settings, loader=loader, batch=running.batch, chunk=running.chunk)
            print_plans(list(plans), "", running.as_json)
            return
        options = {"loader": loader, "batch": running.batch, "chunk": running.chunk}
        rows, folder, console = watched(
            measure_question, name.partition(":")[0], models, methods, settings, out, running.as_json, **options
        )
        if show(rows, folder, console, running.as_json):
            raise typer.Exit(1)
