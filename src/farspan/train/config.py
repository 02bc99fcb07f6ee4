"""The config of a training: one TOML file, each field of which can be overridden as `table.key=value`."""

import json
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module, resources
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from farspan import files
from farspan.record import refuse_differences
from farspan.schema import shortened
from farspan.specs import as_written, closest
from farspan.train.expected import expected_values

MOST_WHOLE = 2**31 - 1  # the largest whole number: the product of two fits 64 bits
MOST = 1e30  # the largest other number: float32 reaches 3e38


class Settings(BaseModel):
    """A table of a training's config. Unknown keys are errors, and so are numbers that are not finite or too large."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, field: ValidationInfo) -> Any:
        kind = cls.model_fields[str(field.field_name)].annotation
        if isinstance(value, bool) and {int, float} & {kind, *get_args(kind)}:  # pydantic reads true as 1
            raise PydanticCustomError("boolean", "a number")
        return value

    @field_validator("*", mode="after")
    @classmethod
    def _not_too_large(cls, value: Any) -> Any:
        for number in value if isinstance(value, tuple) else (value,):
            most = MOST_WHOLE if isinstance(number, int) else MOST
            if isinstance(number, int | float) and abs(number) > most:
                raise ValueError(f"expected at most {as_written(most) if most == MOST else f'{most:,}'}")
        return value

    def refuse_unused(self, names: Iterable[str], given: str, fix: str, table: str = "") -> None:
        """Raise ValueError for the first of these fields that is not its default, as `given` leaves it without effect.

        Args:
            fix: what it needs instead.
            table: of the fields, with a dot, where the error is not located in it.
        """
        for name in names:
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(f"{table}{name} = {value!r} has no effect with {given}: leave it out, or give {fix}")


def _folder(name: str) -> str:
    if not name.strip() or "\0" in name:
        raise ValueError("expected the name of a folder, such as models/mine; . is the current folder")
    return str(files.expanded(name)) if name.startswith("~") else name


Out = Annotated[str, AfterValidator(_folder)]  # the folder that a training writes
S = TypeVar("S", bound=Settings)
RECIPES = ("lm", "smt", "mlm", "cepe", "distill")  # modules of farspan.train


def settings_of(recipe: str) -> type[Settings]:
    """Return the class of a recipe's config, such as `LmSettings`."""
    found: type[Settings] = getattr(import_module(f"farspan.train.{recipe}"), f"{recipe.capitalize()}Settings")
    return found


def recipe_of(values: dict[str, Any]) -> str | None:
    """Return the first recipe whose config can have the keys of these values, and needs no others."""
    return next((recipe for recipe in RECIPES if not _wrong_keys(settings_of(recipe), values)), None)


def table_of(hint: Any) -> type[Settings] | None:
    """Return the class of a config's table from its annotation; None for a plain value."""
    kinds = (kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and issubclass(kind, Settings))
    return next(kinds, None)


def keys_of(kind: type[Settings], table: str = "") -> Iterator[str]:
    """Yield a line for each table of a config, with its keys, such as `[data] text, held_out`."""
    inner = {name: one for name, field in kind.model_fields.items() if (one := table_of(field.annotation))}
    keys = ", ".join(name for name in kind.model_fields if name not in inner)
    yield f"[{table}] {keys}" if table else keys
    for name, one in inner.items():
        yield from keys_of(one, f"{table}.{name}".removeprefix("."))


def shipped_configs() -> dict[str, Path]:
    """Return the paths of the configs that come with farspan, by name, from the package or a checkout's `configs/`."""
    package = Path(str(resources.files("farspan")))
    inside = package / "configs"
    folder = inside if inside.is_dir() else package.parents[1] / "configs"
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def read_config(path: str | Path, kind: type[S], overrides: Sequence[str] = ()) -> S:
    """Read a TOML file as settings of the class `kind`.

    Args:
        path: of a file, or the name of a config that comes with farspan, such as smt-demo.
        overrides: such as `optimizer.lr=1e-3`; a value that is not TOML is text.

    Raises:
        ValueError: no such file, not TOML, a config of another recipe, an unknown key, or a missing or impossible
            value.
    """
    values = parsed(path)
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"--set {override!r} is not of the form table.key=value")
        _put(values, key.strip().split("."), _toml_value(value.strip()))
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        own = parsed(path)
        if _wrong_keys(kind, own) & _wrong_keys(kind, values) and (recipe := recipe_of(own)):
            raise ValueError(f"config {path} is of the recipe {recipe}: use farspan train {recipe} {path}") from error
        problems = dict.fromkeys(_problem(kind, values, one) for one in error.errors())
        raise ValueError(f"config {path}: {'; '.join(problems)}") from error


def parsed(path: str | Path) -> dict[str, Any]:
    """Return the values of a config, without defaults and checks.

    Raises:
        ValueError: as `read_config`: no such file, or not TOML.
    """
    try:
        return tomllib.loads(_config_file(path).read_text("utf-8"))
    except FileNotFoundError as error:
        known = shipped_configs()
        raise ValueError(
            f"config {path} does not exist{closest(Path(path).stem, known)}: give a TOML file, or the name of a config "
            f"that comes with farspan: {', '.join(known)}"
        ) from error
    except OSError as error:
        raise ValueError(f"config {path} cannot be read: {error.strerror}. Give a TOML file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"config {path} is not UTF-8 ({error.reason} at byte {error.start:,}). Convert it") from error
    except (ValueError, RecursionError) as error:  # also an integer of more digits than Python reads
        why = str(error)
        if isinstance(error, RecursionError):
            why = "got tables or lists nested too deeply. Flatten them"
        elif not isinstance(error, tomllib.TOMLDecodeError):
            why = "got an integer of more than 4,300 digits. Shorten it"
        raise ValueError(f"config {path} is not TOML: {why}") from error


def _config_file(path: str | Path) -> Path:
    return Path(path) if Path(path).exists() else shipped_configs().get(str(path), Path(path))


SETTINGS = "settings.json"
BEGUN = "log.jsonl"  # exists in the folder of a training that has logged a step
TOKENIZER = "tokenizer.json"  # may exist before: a training can train its tokenizer first
MAY_CHANGE = ("out", "trainer.steps", "trainer.log_every", "trainer.save_every", "trainer.evaluate_every")
# of a model, as patterns
MODEL_FILES = ("config.json", "adapter_config.json", "*.safetensors", "pytorch_model*.bin", TOKENIZER)
CHECKPOINTS = "checkpoints"  # the folder in a training's folder that holds them, and its lock
LOCK = "lock"


def refuse_other_settings(out: Path, settings: Settings) -> None:
    """Raise ValueError if the training in a folder has other settings, or its settings.json is damaged.

    The folder, and how often it logs, saves and evaluates may change, and so may the number of steps, as far as
    `farspan.train.trainer.record_settings` allows. Before the first line of log.jsonl all settings may change, except
    those of a tokenizer that is trained already.
    """
    file = out / SETTINGS
    now = settings.model_dump(mode="json")
    begun = (out / BEGUN).exists()
    if file.exists() and (begun or (out / TOKENIZER).exists()):
        binding = dict if begun else _of_tokenizer
        before = _completed(_read_settings(file), type(settings))
        how = before.get("trainer")
        for name in ("batch", "bf16"):  # older versions did not record what followed for them
            if isinstance(how, dict) and how.get(name) in (None, "auto"):
                how[name] = now["trainer"][name]
        refuse_differences(out, "training", binding(before), binding(now), MAY_CHANGE)


def _of_tokenizer(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that determine a trained tokenizer."""
    data = settings.get("data")
    return {"tokenizer": settings.get("tokenizer"), "data.text": data.get("text") if isinstance(data, dict) else data}


def _completed(before: dict[str, Any], kind: type[Settings]) -> dict[str, Any]:
    """Return saved settings, with the defaults of fields that older versions of farspan did not have."""
    try:
        return kind.model_validate_json(json.dumps(before)).model_dump(mode="json")
    except ValidationError:
        return before  # the error then names the differences


def _read_settings(file: Path) -> dict[str, Any]:
    fix = f"Delete {file} and repeat the command with the settings that the training was begun with."
    try:
        before = files.read_json(file)
    except ValueError as error:
        raise ValueError(f"{error}. {fix}") from error
    if not isinstance(before, dict):
        raise ValueError(f"{file} is damaged: got {str(before)[:40]!r}, expected the settings of a training. {fix}")
    return before


@contextmanager
def only_one_in(out: Path) -> Iterator[None]:
    """Hold the lock of a training's folder. If the training is refused before it writes its settings, remove the
    folders that were created.

    Raises:
        ValueError: another process trains there, `out` is a file or holds a model that no training made, or its
            `checkpoints` is a symbolic link.
    """
    working = out / CHECKPOINTS
    if working.is_symlink():
        raise ValueError(f"{working} is a symbolic link: got {working.readlink()}, expected a folder. Delete the link")
    if not (out / SETTINGS).exists() and not (working / LOCK).exists():
        for pattern in MODEL_FILES:
            if found := next(out.glob(pattern), None):
                raise ValueError(
                    f"out = {str(out)!r} holds another model ({found.name}), which the training would replace: choose "
                    "another folder"
                )
    made = [folder for folder in (working, *working.parents) if not folder.exists()]
    try:
        working.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(
            f"out = {str(out)!r} is not a folder: got a file, or a folder inside of one. Choose another"
        ) from error
    with files.locked(working / LOCK):
        try:
            yield
        finally:
            if made and not (out / SETTINGS).exists():
                with suppress(PermissionError):  # on Windows, where a lock that is held cannot be deleted
                    (working / LOCK).unlink()
                with suppress(OSError):  # stops at the first folder that is not empty
                    for folder in made:
                        folder.rmdir()


def _wrong_keys(kind: type[Settings], values: dict[str, Any]) -> set[str]:
    """Return pydantic's names for what is wrong with the keys of a config: `extra_forbidden`, `missing`."""
    try:
        kind.model_validate(values)
    except ValidationError as error:
        return {e["type"] for e in error.errors()} & {"extra_forbidden", "missing"}
    return set()


def _problem(kind: type[Settings], values: Any, error: Any) -> str:
    """Return what is wrong with a field of a config, with its name, from an error of pydantic."""
    place, field = list[str](), None
    for part in error["loc"]:  # a field, or a table and its field; then parts of a value, and the types that were tried
        if (found := kind.model_fields.get(str(part))) is None:
            break
        place, field, values = [*place, str(part)], found, values.get(part) if isinstance(values, dict) else None
        if (table := table_of(found.annotation)) is None:
            break
        kind = table
    name = ".".join(place)
    if error["type"] == "missing" and len(place) == len(error["loc"]):  # not a number of a list
        return f"{name}: missing, expected a value"
    if error["type"] == "extra_forbidden":
        return f"{'.'.join(map(str, error['loc']))}: {_unknown(kind, str(error['loc'][-1]))}"
    if error["type"] != "value_error":
        assert field is not None
        expected = "a finite number" if error["type"] == "finite_number" else expected_values(field)
        return f"{name}: got {_shown(values)}, expected {expected}"
    message = str(error["msg"]).removeprefix("Value error, ")  # pydantic's prefix
    if isinstance(error["input"], dict):  # of a table, which names its fields
        return f"{name}: {message}" if name else message
    return f"{name}: got {_shown(values)}, {message}"


def _shown(value: Any) -> str:
    """Return a value as in TOML, at most 60 characters."""
    return str(value).lower() if isinstance(value, bool) else shortened(value)


def _unknown(kind: type[Settings], key: str) -> str:
    for name, field in kind.model_fields.items():
        if key in (table_of(field.annotation) or Settings).model_fields:
            return f"unknown key (did you mean {name}.{key}?)"
    return f"unknown key{closest(key, kind.model_fields)}"


def _put(values: dict[str, Any], key: list[str], value: Any) -> None:
    for table in key[:-1]:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise ValueError(f"--set {'.'.join(key)}: {table} is a value, not a table")
    values[key[-1]] = value


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
