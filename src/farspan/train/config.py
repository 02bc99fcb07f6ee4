"""One TOML file configures a training; every field can be overridden as `a.b=c`."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError


class Settings(BaseModel):
    """A table of a training's config. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


S = TypeVar("S", bound=Settings)


def read_config(path: str | Path, kind: type[S], overrides: Sequence[str] = ()) -> S:
    """The TOML file `path` as `kind`, with `overrides` such as `optimizer.lr=1e-3` (values are TOML, else text).

    Raises:
        ValueError: no such file, not TOML, an unknown key, a missing or an impossible value.
    """
    try:
        values = tomllib.loads(Path(path).read_text("utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"config {path} does not exist") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"config {path} is not TOML: {error}") from error
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"--set {override!r} is not of the form table.key=value")
        _put(values, key.strip().split("."), _toml_value(value.strip()))
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, e['loc']))}: {e['msg']} (given {e.get('input')!r})" for e in error.errors()
        )
        raise ValueError(f"config {path}: {problems}") from error


def _put(values: dict[str, Any], key: list[str], value: Any) -> None:
    for table in key[:-1]:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise ValueError(f"--set {'.'.join(key)}: {table} is a value, not a table")
    values[key[-1]] = value


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
