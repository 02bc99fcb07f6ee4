"""The tasks, one file each; only this table lists their names."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from farspan.specs import Kinds, check_known, one_of

if TYPE_CHECKING:
    from farspan.tasks.base import Bound, Example, Quality, Result, Task, Work

__all__ = ["TASKS", "Bound", "Example", "Quality", "Result", "Task", "Work", "check_name", "task"]

TASKS: "Kinds[Task]" = Kinds(
    __name__,
    {
        "perplexity": "Perplexity",
        "longppl": "LongPPL",
        "mentions": "Mentions",
        "curve": "Curve",
        "recall": "Recall",
        "attention": "Attention",
        "icl": "Icl",
        "zeroscrolls": "ZeroScrolls",
        "longbench": "LongBench",
        "longbench2": "LongBench2",
        "ralm": "Ralm",
        "qa": "Qa",
        "own": "Own",
        "passkey": "Passkey",
        "needle": "Needle",
        "cost": "Cost",
    },
)


def task(text: str) -> "Task":
    """Return the task that `text` names, such as `perplexity:targets=last`.

    Raises:
        ValueError: an unknown name or setting, or a value out of range.
    """
    return one_of(TASKS, text, "task")


def check_name(text: str) -> None:
    """Raise ValueError if the name of the task in `text` is unknown; settings are not checked. Imports no task, and so
    not torch."""
    check_known("task", text.partition(":")[0].strip(), TASKS)


def __getattr__(name: str) -> Any:
    """The names of `base`, which needs torch, are imported when they are first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("farspan.tasks.base"), name)
