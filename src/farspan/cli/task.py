"""`farspan task` and `farspan compare`: any tasks."""

from typing import Annotated, Any

import typer

from farspan.cli.measured import run_measurement
from farspan.cli.messages import one_line_errors
from farspan.cli.options import (
    TASK,
    Loading,
    Methods,
    Models,
    Repeats,
    Running,
    TextOptions,
    checked,
    option,
)
from farspan.tasks import check_name
from farspan.tasks import task as parsed


def task(
    name: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help="A task with its settings, such as qa:data=nq.jsonl,shots=2.",
            callback=checked(check_name),
        ),
    ],
    models: Models = None,
    *,
    sampling: TextOptions,
    repeats: Repeats = 10,
    method: Methods = None,
    loading: Loading,
    running: Running,
) -> None:
    """Measure any task by length: retrieval-augmented perplexity, question answering, in-context learning, and more.

    A length is a number of tokens, passages or demonstrations, by task; of passages and demonstrations it may be 0.
    With --lengths auto: the task's default lengths.
    """
    with one_line_errors(running.kept):
        settings = _settings(sampling, [name])
        run_measurement(models, method, [name], running, loading, repeats=repeats, **settings)


def compare(
    models: Models = None,
    *,
    task: Annotated[
        list[str] | None,
        option(
            TASK,
            "A task with its settings; default perplexity. Repeatable.",
            "--task",
            metavar="TASK",
            callback=checked(check_name),
        ),
    ] = None,
    cost: Annotated[bool, option(TASK, "Also measure tokens per second and memory.")] = True,
    sampling: TextOptions,
    repeats: Repeats = 10,
    method: Methods = None,
    loading: Loading,
    running: Running,
) -> None:
    """Compare models and methods on the same tokens: quality, paired with the first model and method; speed; memory.

    A length counts what the tasks count; it may be 0 if none of them counts tokens. With --lengths auto: each task's
    default lengths.
    """
    with one_line_errors(running.kept):
        tasks = task or ["perplexity"]
        settings = _settings(sampling, tasks)
        run_measurement(models, method, tasks, running, loading, repeats=repeats, cost=cost, refusals=True, **settings)


def _settings(sampling: TextOptions, tasks: list[str]) -> dict[str, Any]:
    """Return the settings of `TextOptions`; a length may be 0 if no task counts tokens."""
    return sampling.settings(zero=all(parsed(one).unit != "tokens" for one in tasks), auto=None)
