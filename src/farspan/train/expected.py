"""The values that a field of a training's config takes, in words, for errors."""

from collections.abc import Iterable, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ONE = {int: "a whole number", float: "a number", str: "text"}
SEVERAL = {int: "whole numbers", float: "numbers", str: "texts"}
LIMITS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}  # attributes of pydantic's limits


def expected_values(field: FieldInfo) -> str:
    """Return the values that a field takes, such as `a whole number above 0` or `true, false or 'auto'`."""
    return _one_of(_alternatives(field.annotation, field.metadata))


def _one_of(alternatives: Sequence[str]) -> str:
    *others, last = alternatives
    return f"{', '.join(others)} or {last}" if others else last


def _alternatives(hint: Any, limits: Iterable[Any], words: dict[type, str] = ONE) -> list[str]:
    if get_origin(hint) is Annotated:
        hint, *limits = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not NoneType]
        if float in kinds:  # which takes whole numbers too
            kinds = [kind for kind in kinds if kind is not int]
        return [one for kind in kinds for one in _alternatives(kind, limits, words)]
    if get_origin(hint) is Literal:
        return [repr(one) for one in get_args(hint)]
    if get_origin(hint) is tuple:
        kind, *more = get_args(hint)
        least = any(getattr(one, "min_length", None) for one in limits)
        count = f"{1 + len(more)} " if more != [...] else "one or more " if least else ""
        return [f"a list of {count}{_one_of(_alternatives(kind, (), SEVERAL))}"]
    if get_origin(hint) is dict:
        keys, kind = (_one_of(_alternatives(one, (), SEVERAL)) for one in get_args(hint))
        return [f"a table of {kind} with keys {keys}"]
    if hint is bool:
        return ["true", "false"]
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return ["a table"]
    return [" ".join([words[hint], *_limits(limits)])]


def _limits(found: Iterable[Any]) -> list[str]:
    every = [part for one in found for part in (one.metadata if isinstance(one, FieldInfo) else [one])]
    limits = [f"{word} {value:,}" for one in every for name, word in LIMITS.items()
              if (value := getattr(one, name, None)) is not None]  # fmt: skip
    return [" and ".join(limits)] if limits else []
