"""farspan measures how far back a language model remembers, and extends it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from farspan.callback import CurveCallback, PerplexityCallback
    from farspan.compare import CurveSettings, measure_curves
    from farspan.lm import LM, load, wrap
    from farspan.methods import method
    from farspan.record import Row, Run, read_rows

_HOMES = {
    "CurveCallback": "callback",
    "CurveSettings": "compare",
    "LM": "lm",
    "PerplexityCallback": "callback",
    "Row": "record",
    "Run": "record",
    "load": "lm",
    "measure_curves": "compare",
    "method": "methods",
    "read_rows": "record",
    "wrap": "lm",
}
__all__ = [
    "LM",
    "CurveCallback",
    "CurveSettings",
    "PerplexityCallback",
    "Row",
    "Run",
    "load",
    "measure_curves",
    "method",
    "read_rows",
    "wrap",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used, so that `import farspan` does not import torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'farspan' has no attribute {name!r}")
    return getattr(import_module(f"farspan.{_HOMES[name]}"), name)
