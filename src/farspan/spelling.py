"""A method or a task as text: `name:setting=value,setting=value`."""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import Any, TypeVar, get_args, get_type_hints

M = TypeVar("M")


def written(name: str, settings: Any) -> str:
    """The settings, a dataclass, as they are parsed again. Those that are None, or that say of themselves that they
    matter only when changed (`metadata={"quiet": True}`), are left out."""
    given = {field.name: getattr(settings, field.name) for field in fields(settings)}
    quiet = {
        field.name for field in fields(settings) if field.metadata.get("quiet") and given[field.name] == field.default
    }
    said = ",".join(f"{key}={_plain(v)}" for key, v in given.items() if v is not None and key not in quiet)
    return f"{name}:{said}" if said else name


def one_of(known: Mapping[str, type[M]], text: str, noun: str) -> M:
    """What `text` names among the known, with its settings. `noun` is what they are, for errors.

    Raises:
        ValueError: an unknown name or setting, or a value out of range.
    """
    name, _, settings = text.strip().partition(":")
    if name not in known:
        raise ValueError(f"{noun} {name!r} is unknown; known are {', '.join(known)}{closest(name, known)}")
    return _parsed(known[name], f"{noun} {name!r}", name, settings)


def _parsed(kind: type[M], noun: str, name: str, settings: str) -> M:
    """One of this kind with these settings.

    Raises:
        ValueError: an unknown or repeated setting, one that is missing, a value of another type or out of range.
    """
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
        values[key] = _read(noun, key, value, hints[key])
    for key, field in known.items():
        if key not in values and field.default is MISSING:
            raise ValueError(f"{noun} needs {key}: write {name}:{key}=...")
    return kind(**values)


def closest(given: str, known: Iterable[str]) -> str:
    """A hint at what was meant, to stand behind a name that is unknown; nothing if it resembles none."""
    match = get_close_matches(given, list(known), n=1, cutoff=0.5)
    return f" (did you mean {match[0]!r}?)" if match else ""


def _read(noun: str, key: str, value: str, hint: Any) -> Any:
    kind = next(kind for kind in (get_args(hint) or (hint,)) if kind is not type(None))
    if kind is str or isinstance(kind, str):
        return value
    try:
        return kind(value.replace("_", ""))
    except ValueError as error:
        wanted = "a whole number" if kind is int else "a number"
        raise ValueError(f"setting {key} of {noun} must be {wanted}, not {value!r}") from error


def _plain(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
