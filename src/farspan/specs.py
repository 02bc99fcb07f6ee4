"""A method or a task as text: `name:setting=value,setting=value`; the values of a list are joined by `+`.

A setting that is None is left out if that is its default. `auto` is None, for every setting that can be None.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from importlib import import_module
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

M = TypeVar("M")
AUTO = "auto"  # None


class Kinds(Mapping[str, type[M]]):
    """Classes by name. The class NAME is in the module PACKAGE.NAME, which is imported when the class is first used, so
    that names are known without importing torch.

    Args:
        package: its name.
        classes: the name of each class.
    """

    def __init__(self, package: str, classes: Mapping[str, str]) -> None:
        self._package, self._classes = package, classes

    def __getitem__(self, name: str) -> type[M]:
        kind: type[M] = getattr(import_module(f"{self._package}.{name}"), self._classes[name])
        return kind

    def __contains__(self, name: object) -> bool:
        return name in self._classes

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)


def written(name: str, settings: Any) -> str:
    """Return the settings, a dataclass, as text that `one_of` parses. Settings equal to their default are left out if
    it is None or they have `metadata={"quiet": True}`."""
    listed = []
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value != field.default or not (value is None or field.metadata.get("quiet")):
            listed.append(f"{field.name}={as_written(value)}")
    return f"{name}:{','.join(listed)}" if listed else name


def one_of(known: Mapping[str, type[M]], text: str, noun: str) -> M:
    """Return an instance of the class in `known` that `text` names, with its settings. `noun` names its kind in errors.

    Raises:
        ValueError: an unknown name or setting, or a value out of range.
    """
    name, _, settings = text.strip().partition(":")
    check_known(noun, name, known)
    return _parsed(known[name], f"{noun} {name!r}", name, settings)


def _parsed(kind: type[M], noun: str, name: str, settings: str) -> M:
    """Return an instance of `kind` with these settings."""
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    if settings and not known:
        raise ValueError(f"{noun} has no settings; {settings!r} was given")
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for part in settings.split(",") if settings else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in known:
            has = ", ".join(known)
            raise ValueError(f"{noun} has no setting {key!r}{closest(key, known)}; it has {has}")
        if not equals or key in values:
            problem = "is given twice: give it once" if equals else f"has no value: write {key}=VALUE"
            raise ValueError(f"setting {key!r} of {noun} {problem}")
        if not value:
            raise ValueError(f"setting {key!r} of {noun} is empty: write {key}=VALUE, or leave it out")
        is_none = value == AUTO and NoneType in get_args(hints[key])
        values[key] = None if is_none else _read(noun, key, value, hints[key])
    for key, field in known.items():
        if key not in values and field.default is MISSING:
            allowed = f", one of {', '.join(some)}" if (some := field.metadata.get("known")) else ""
            raise ValueError(f"{noun} needs {key}: write {name}:{key}=...{allowed}")
    return kind(**values)


def check_known(what: str, value: str, known: Iterable[str]) -> None:
    """Raise ValueError, with the nearest name, unless the value is known. `what` precedes it: "draw", "pool ="."""
    if value not in known:
        raise ValueError(f"{what} {value!r} is unknown; known are {', '.join(known)}{closest(value, known)}")


def choice(known: Iterable[str], default: Any = MISSING, *, quiet: bool = False) -> Any:
    """Return the field of a setting that is one of these, or None if that is its default. `quiet`: see `written`."""
    return dataclasses.field(default=default, metadata={"known": tuple(known), "quiet": quiet})


def limited(default: Any = MISSING, least: float = 0, most: float = math.inf, *, quiet: bool = False) -> Any:
    """Return the field of a setting that is a finite number from `least` to `most`, or None if that is its default.
    `quiet`: see `written`."""
    return dataclasses.field(default=default, metadata={"limits": (least, most), "quiet": quiet})


def check_settings(settings: Any) -> None:
    """Raise ValueError unless each `choice` of a method or task is known, and each `limited` number in its range. The
    choice `auto` becomes None where that is the default."""
    for one in fields(settings):
        if (value := getattr(settings, one.name)) is None:
            continue
        if known := one.metadata.get("known"):
            optional = (AUTO,) if one.default is None else ()
            check_known(f"{settings.name}: {one.name} =", value, (*known, *optional))
            if value in optional:
                object.__setattr__(settings, one.name, None)
        if (limits := one.metadata.get("limits")) and not (limits[0] <= value <= limits[1] and value < math.inf):
            expected = "at least {:,}" if limits[1] == math.inf else "{:,} to {:,}"
            given = f"{settings.name}: {one.name}: got {as_written(value)}"
            raise ValueError(f"{given}, expected {expected.format(*limits)}")


def closest(given: str, known: Iterable[str]) -> str:
    """Return a suggestion to append after an unknown name; "" if it resembles none of the known."""
    known, (name, comma, settings) = list(known), given.partition(",")
    if comma and name in known:
        return f" (did you mean {f'{name}:{settings}'!r}?)"
    match = get_close_matches(given, known, n=1, cutoff=0.55)
    return f" (did you mean {match[0]!r}?)" if match else ""


def _read(noun: str, key: str, value: str, hint: Any) -> Any:
    kind = next(kind for kind in (get_args(hint) if get_origin(hint) is UnionType else (hint,)) if kind is not NoneType)
    if get_origin(kind) is tuple:
        return tuple(_read(noun, key, part, get_args(kind)[0]) for part in value.split("+"))
    if kind is str or isinstance(kind, str):
        return value
    if kind is bool:
        if value.lower() not in ("true", "false"):
            raise ValueError(f"setting {key} of {noun} must be true or false, not {value!r}")
        return value.lower() == "true"
    try:
        return kind(value.replace("_", ""))
    except ValueError as error:
        wanted = "a whole number" if kind is int else "a number"
        raise ValueError(f"setting {key} of {noun} must be {wanted}, not {value!r}") from error


def as_written(value: Any) -> str:
    """Return the value of a setting as `one_of` parses it."""
    if value is None:
        return AUTO
    if isinstance(value, tuple):
        return "+".join(map(as_written, value))
    if isinstance(value, bool):
        return str(value).lower()
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e15
    return str(int(value)) if whole else str(value).replace("e+", "e")  # a + joins values, and methods
