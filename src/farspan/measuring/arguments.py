"""The arguments of `farspan.measure`, checked before anything is loaded. Any other value is a ValueError."""

import math
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from farspan.lm import LM
from farspan.measuring.loader import is_url
from farspan.methods import Method, method
from farspan.record import Shard
from farspan.tasks import Task, task

Models = str | Path | LM | Sequence[str | Path | LM]
Methods = str | Method | Sequence[str | Method]
Tasks = str | Task | Sequence[str | Task]
Lengths = int | Sequence[int] | Literal["auto"] | None


def models_of(given: Any) -> list[str | LM]:
    """Return one or several models as a list, with paths as strings."""
    what = "a folder, a hub id, or a model of farspan.load, farspan.wrap or farspan.served"
    return [one if isinstance(one, LM) else os.fspath(one) for one in _several(given, "models", what, LM, PathLike)]


def methods_of(given: Any) -> list[Method]:
    """Return one or several methods as a list."""
    found = _several(given, "methods", "methods such as 'full' or farspan.method('sinks')", Method)
    return [method(one) if isinstance(one, str) else one for one in found]


def tasks_of(given: Any) -> list[Task]:
    """Return one or several tasks as a list."""
    found = _several(given, "tasks", "tasks such as 'perplexity' or farspan.task('curve')", Task)
    return [task(one) if isinstance(one, str) else one for one in found]


def lengths_of(given: Any) -> tuple[int, ...] | Literal["auto"] | None:
    """Return lengths as a tuple of numbers; None and "auto" as they are."""
    if given is None:
        return None
    if isinstance(given, str) and given == "auto":
        return "auto"
    listed = [given] if isinstance(given, str | Mapping) or not isinstance(given, Iterable) else given
    return tuple(whole(one, "lengths", expected='numbers such as [128, 256], "auto" or None') for one in listed)


def whole(value: Any, name: str, least: int | None = None, expected: str = "") -> int:
    """Return a whole number as an int; numbers of numpy are accepted."""
    expected = expected or f"a whole number, at least {least} (--{name.replace('_', '-')})"
    try:
        number = operator.index(value) if not isinstance(value, bool) else None
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"{name}: got {value!r}, expected {expected}")
    if least is not None and number < least:
        raise ValueError(f"{name}: got {number}, expected {expected}")
    return number


def positive(value: Any, name: str, meaning: str = "") -> float:
    """Return a positive number; numbers of numpy are accepted.

    Args:
        meaning: of the number, for the error.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not (is_number and 0 < value < math.inf):
        given = f"{value:g}" if is_number else repr(value)
        raise ValueError(f"{name}: got {given}, expected a positive number{meaning} (--{name})")
    return float(value)


def depths_of(given: Any) -> tuple[float, ...]:
    """Return depths as a tuple of numbers."""
    listed: list[Any] = [given] if isinstance(given, str | Mapping) or not isinstance(given, Iterable) else list(given)
    if any(isinstance(one, bool) or not isinstance(one, Real) for one in listed) or not isinstance(given, Iterable):
        raise ValueError(f"depths: got {given!r}, expected a list of numbers such as [0, 0.5, 1]")
    return tuple(map(float, listed))


def _several(given: Any, name: str, expected: str, *kinds: type) -> list[Any]:
    allowed = (str, *kinds)
    alone = isinstance(given, allowed) or not isinstance(given, Iterable)
    found = [given] if alone else list(given)
    if not found:
        raise ValueError(f"{name}: got none, expected at least one")
    for one in found:
        if not isinstance(one, allowed):
            raise ValueError(f"{name}: got {type(one).__name__}, expected {expected}")
    return found


def check_division(
    models: Sequence[str | LM],
    shard: Shard | str | None,
    ray: str | None,
    gpus_per_model: int | None,
    minutes: float | None,
) -> None:
    """Raise ValueError for arguments that exclude each other."""
    if ray is None:
        if gpus_per_model is not None:
            raise ValueError("gpus_per_model belongs to ray: give both, or omit it (--gpus-per-model, --ray)")
        return
    if gpus_per_model is not None:
        whole(gpus_per_model, "gpus_per_model", least=1)
    if shard is not None:
        raise ValueError("shard and ray both divide a run: use one of them (--shard, --ray)")
    if minutes is not None:
        raise ValueError("a budget in minutes belongs to one process: omit it with ray (--minutes, --ray)")
    if (gpus_per_model or 1) > 1 and (urls := [model for model in models if isinstance(model, str) and is_url(model)]):
        raise ValueError(f"the server at {urls[0]} divides its model by itself: omit gpus_per_model (--gpus-per-model)")
    if loaded := [model.name for model in models if not isinstance(model, str)]:
        raise ValueError(
            f"with ray each worker loads the models: got the loaded model {loaded[0]}, expected its folder"
        )
