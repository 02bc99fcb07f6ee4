"""Errors of loading a model, in one line each."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import transformers
from huggingface_hub import is_offline_mode
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError

from farspan.files import expanded, is_disk_full, parse_json
from farspan.hf.device import is_out_of_memory
from farspan.specs import closest
from farspan.text.hub import why_not_downloaded

# Errors of transformers for impossible values in a config, a tokenizer's files or an index of weights: it checks types
# of fields (StrictDataclassError), but computes with any values. The values are the user's, so each is reported as an
# error for the user; the cause is chained.
BROKEN = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, RuntimeError, StrictDataclassError,
    TypeError, ValueError,
)  # fmt: skip
LONGEST = 300  # characters shown of a message of transformers
NOTHING: Mapping[str, Any] = MappingProxyType({})


class RefusedError(ValueError):
    """Raised for input that farspan itself refuses; `explained` adds the name before the message."""


@contextmanager
def explained(
    name: str | Path, what: str, part: str, trust_remote_code: bool | None, local: Mapping[str, Any] = NOTHING
) -> Iterator[None]:
    """Turn errors of loading in the block into ValueErrors of one line. Others, such as too little memory or a full
    disk, stay.

    Args:
        name: what is loaded: a folder, a file or a hub id.
        what: its kind, such as "model" or "encoder".
        part: what is read of it, such as "config.json" or "tokenizer".
        trust_remote_code: whether its own Python code may run; None: there is no way to allow it.
        local: the options that locate files, `farspan.loading.LOCAL`.
    """
    local_files_only = bool(local.get("local_files_only"))
    try:
        yield
    except Exception as error:  # `tokenizers` raises plain Exceptions
        if (line := _explained(error, str(name), what, part, trust_remote_code, local_files_only)) is None:
            raise
        raise ValueError(line) from error


def _explained(
    error: BaseException, name: str, what: str, part: str, trust: bool | None, local_files_only: bool
) -> str | None:
    """Return a line about an error of loading; None for an error of another kind."""
    if is_out_of_memory(error) or (isinstance(error, OSError) and is_disk_full(error)):
        return None
    of = f"{what} {name!r}"
    if isinstance(error, RefusedError):
        return f"{of} cannot be loaded: {error}"
    if isinstance(error, SafetensorError):
        return f"the weights of {of} are damaged or incomplete ({error}): download them again"
    if isinstance(error, RuntimeError) and "mismatched" in str(error):
        return (
            f"the weights of {of} have other shapes than its config.json defines. Correct that file, or download "
            "both again"
        )
    if isinstance(error, ValueError) and isinstance(error.__cause__, OSError):
        error = error.__cause__
    if isinstance(error, OSError | HFValidationError | ImportError):
        return _not_found(name, what, part, error, local_files_only)
    if isinstance(error, BROKEN) or type(error) is Exception:
        return f"{of} {_broken(error, name, what, part, trust)}"
    return None


def _broken(error: BaseException, name: str, what: str, part: str, trust: bool | None) -> str:
    message = one_line(error)
    if "trust_remote_code" in str(error):
        if trust is None:
            return "comes with Python code of its own, which is not run here: choose one without code of its own"
        return (
            "comes with Python code of its own, which is not run unless you allow it: read that code, then give "
            "--trust-remote-code (trust_remote_code=True)"
        )
    if "Unrecognized" in str(error) or "does not recognize" in str(error):
        message = message.partition(" Model type should be one of")[0].partition(" Should have a")[0]
        message = message.partition(" This could be because")[0].partition(" for this kind of ")[0].rstrip(".")
        kind = "not a causal language model" if what == "model" else f"no {what}"
        known = f"is {kind} known to transformers {transformers.__version__}: {message}"
        return f"{known}. Give another {what}, or install a newer transformers"
    if damaged := damaged_json(str(expanded(name))):
        return f"cannot be loaded: {damaged}. Download it again"
    if part == "tokenizer":
        if "backend tokenizer" in message:
            return (
                "comes without a tokenizer that transformers can load: expected tokenizer.json, or a "
                "sentencepiece or tiktoken file and that package. Save its tokenizer into the same folder"
            )
        # an AttributeError or TypeError is about objects of transformers, and names nothing of the files
        why = "" if isinstance(error, AttributeError | TypeError) else f" ({message})"
        return (
            "has a tokenizer that cannot be loaded: tokenizer.json, tokenizer_config.json or "
            f"special_tokens_map.json have content that transformers does not accept{why}. Download them again"
        )
    if option := re.search(r"__init__\(\) got an unexpected keyword argument '(\w+)'", message):
        return f"has no option {option[1]!r}, which was given to load: correct its name, or leave it out"
    return f"cannot be built from its {part}: {message}. Correct that file, or download it again"


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line of at most `LONGEST` characters."""
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    message = re.sub(r"<class '([\w.]+\.)?(\w+)'>", r"\2", " ".join(message.split()).rstrip("."))
    if isinstance(error, StrictDataclassError):
        message = (message.partition("Error: ")[2] or message).partition(" Errors: ")[0]
    elif isinstance(error, KeyError):
        message = message if " " in message else f"{message!r} is not known, or missing"
    elif not isinstance(error, ValueError) or not message:
        message = f"{type(error).__name__}: {message}"
    return message if len(message) <= LONGEST else f"{message[:LONGEST]}…"


_OBJECTS = re.compile(r"^(generation_|tokenizer_|adapter_)?config\.json$|^tokenizer\.json$|\.index\.json$")


def damaged_json(place: str) -> str | None:
    """Return the name of a folder's first damaged JSON file and its error; None if all are valid."""
    for file in sorted(Path(place).glob("*.json")) if Path(place).is_dir() else ():
        try:
            holds = parse_json(file.read_bytes(), file.name) if file.is_file() else {}
        except ValueError as error:
            return one_line(error)
        if not isinstance(holds, dict) and _OBJECTS.search(file.name):
            return f"{file.name} is damaged: expected a JSON object"
    return None


def only_adapter(folder: str, what: str) -> str:
    """Return the error for a folder with an adapter and no weights of its base."""
    return (
        f"folder {folder!r} holds an adapter of PEFT, not a whole {what}. Merge it into its base "
        "(merge_and_unload() of peft), and save the result with its tokenizer in another folder"
    )


def _not_found(name: str, what: str, part: str, error: BaseException, local_files_only: bool) -> str:
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__

    def caused_by(*kinds: type[BaseException]) -> bool:
        return any(isinstance(link, kinds) for link in chain)

    message = " ".join(str(error).split())
    if caused_by(GatedRepoError):
        return (
            f"{what} {name!r} is gated on the hub: request access on its page, then run `hf auth login` or set HF_TOKEN"
        )
    if (folder := expanded(name)).is_dir():
        if damaged := damaged_json(str(folder)):
            return f"folder {name} cannot be loaded: {damaged}. Download it again"
        if part == "config.json" and "safetensors" in message and any(folder.glob("*.bin")):
            return (
                f"folder {name} holds no safetensors weights; .bin weights can run code when they are read: "
                "convert them, or allow it with allow_pickle=True (--allow-pickle)"
            )
        if "no file named model.safetensors" in message:
            if (folder / "adapter_config.json").is_file():
                return only_adapter(name, what)
            return f"folder {name} holds no weights: expected model.safetensors. Copy the weights of the {what} into it"
        return f"folder {name} cannot be loaded: {message.rstrip('.')}. Download it again"
    if folder.is_file():
        return f"{what} {name!r} is a file: give its folder, or a file that ends with .gguf"
    if name.startswith((".", "/", "~")) or caused_by(HFValidationError):
        return f"{what} {name!r} is neither a folder nor a hub id such as org/name"
    near = closest(name, ["demo"] if what == "model" else [])
    if caused_by(RepositoryNotFoundError):
        return f"{what} {name!r} is neither a folder nor on the hub{near} (a private one needs `hf auth login`)"
    if local_files_only or is_offline_mode() or caused_by(LocalEntryNotFoundError, OfflineModeIsEnabled):
        why = why_not_downloaded(local_files_only=local_files_only)
        return f"{what} {name!r} is neither a folder nor cached{near}, and {why}"
    return f"{what} {name!r} cannot be loaded: {message}"
