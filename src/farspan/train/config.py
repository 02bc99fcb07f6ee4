"""One TOML file configures a training; every field can be overridden as `a.b=c`."""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from farspan.record import refuse_differences
from farspan.spelling import closest


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
            f"{'.'.join(map(str, e['loc']))}: {e['msg']} (given {e.get('input')!r}){_meant(kind, e)}"
            for e in error.errors()
        )
        raise ValueError(f"config {path}: {problems}") from error


BEGUN = ("log.jsonl", "tokenizer.json")  # the first that a training writes
MAY_CHANGE = ("out", "trainer.steps", "trainer.log_every", "trainer.save_every", "trainer.evaluate_every")


def refuse_other_settings(out: Path, settings: Settings) -> None:
    """Makes a training's folder, with `settings.json`, and keeps it from being continued with other settings.

    Where it trains, how long, and how often it speaks may change; so may everything where a training was refused before
    it began.

    Raises:
        ValueError: the folder was begun with other settings.
    """
    out.mkdir(parents=True, exist_ok=True)
    file = out / "settings.json"
    now = settings.model_dump(mode="json")
    if file.exists() and any((out / begun).exists() for begun in BEGUN):
        refuse_differences(out, "training", json.loads(file.read_text()), now, MAY_CHANGE)
    file.write_text(json.dumps(now, indent=2) + "\n")


def _meant(kind: type[Settings], error: Any) -> str:
    """What may have been meant by a key that does not exist."""
    *tables, key = error["loc"]
    for table in tables:
        kind = getattr(getattr(kind, "model_fields", {}).get(table), "annotation", None) or Settings
    known = getattr(kind, "model_fields", {})
    return closest(str(key), known) if error["type"] == "extra_forbidden" else ""


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
