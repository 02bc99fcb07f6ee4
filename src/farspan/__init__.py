"""farspan measures how far back a language model remembers, and extends that range."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from farspan import doctor, stats
    from farspan.callback import CurveCallback, PerplexityCallback
    from farspan.lm import LM, load, wrap
    from farspan.measuring.calls import compare, curve
    from farspan.measuring.grid import measure
    from farspan.measuring.result import Measured, open_run
    from farspan.methods import method
    from farspan.reader.served import served
    from farspan.record import Row, Run, read_rows
    from farspan.tasks import task

_HOMES = {
    "CurveCallback": "callback",
    "LM": "lm",
    "Measured": "measuring.result",
    "PerplexityCallback": "callback",
    "Row": "record",
    "Run": "record",
    "compare": "measuring.calls",
    "curve": "measuring.calls",
    "load": "lm",
    "measure": "measuring.grid",
    "method": "methods",
    "open_run": "measuring.result",
    "read_rows": "record",
    "served": "reader.served",
    "task": "tasks",
    "wrap": "lm",
}
_MODULES = ("doctor", "stats")
__all__ = [
    "LM",
    "CurveCallback",
    "Measured",
    "PerplexityCallback",
    "Row",
    "Run",
    "compare",
    "curve",
    "doctor",
    "load",
    "measure",
    "method",
    "open_run",
    "read_rows",
    "served",
    "stats",
    "task",
    "wrap",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used, so that `import farspan` does not import torch."""
    if name in _MODULES:
        return import_module(f"farspan.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'farspan' has no attribute {name!r}")
    return getattr(import_module(f"farspan.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
