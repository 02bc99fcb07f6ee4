"""Check the values of a data set's rows. Any other value is a ValueError with the file, row, column and value."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from farspan.text.utf8 import refuse_surrogates

SHOWN = 60  # characters of a value in an error


def text_of(value: Any, where: str) -> str:
    """Return a value that must be text, without half of a surrogate pair, which no tokenizer reads; it may be empty."""
    if not isinstance(value, str):
        raise ValueError(f"{where}: got {_kind(value)}, expected text")
    refuse_surrogates(value, where)
    return value


def texts_of(value: Any, where: str, *, numbers: bool = False) -> list[str]:
    """Return a value that must be a list of texts, without its None. `numbers`: also accept numbers, as text."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where}: got {_kind(value)}, expected a list of texts")
    return [
        str(one) if numbers and _is_number(one) else text_of(one, f"{where}, entry {place}")
        for place, one in enumerate(value, 1)
        if one is not None
    ]


def number_of(value: Any, where: str) -> float:
    """Return a value that must be a finite number."""
    if not _is_number(value):
        raise ValueError(f"{where}: got {_kind(value)}, expected a number")
    return float(value)


def inside(value: Any, where: str, key: str) -> Any:
    """Return the value of a key in what must be an object with that key."""
    if not isinstance(value, Mapping) or key not in value:
        has = f"an object with {', '.join(map(str, value))}" if isinstance(value, Mapping) else _kind(value)
        raise ValueError(f"{where}: got {has:.{4 * SHOWN}}, expected an object with {key!r}")
    return value[key]


def rows_of(value: Any, where: str) -> Sequence[Any]:
    """Return a value that must be a list."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where}: got {_kind(value)}, expected a list")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {value!r:.{SHOWN}}"
