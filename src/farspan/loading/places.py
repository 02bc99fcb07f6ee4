"""Where a model is: the embedded model, a folder, a GGUF file or a hub id."""

import socket
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants, is_offline_mode, try_to_load_from_cache
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers.utils import cached_file

from farspan.files import expanded
from farspan.loading import gguf
from farspan.loading.errors import explained
from farspan.terminal import report

DEMO = "demo"  # the embedded model


def folder_of(name: str) -> str:
    """Return the folder of the embedded model for `demo`, and any other name as it is."""
    if name != DEMO:
        return name
    if (Path(DEMO) / "config.json").is_file():
        _say_which()
    return str(files("farspan") / "assets" / DEMO)


@cache
def _say_which() -> None:
    report(f"model {DEMO!r} is the embedded model: for the folder {DEMO} here, write ./{DEMO}")


def place_of(name: str | Path) -> str:
    """Return the folder of a model, with ~ expanded, or a hub id as it is; `demo` is the embedded model. A GGUF file is
    converted to a folder first, once.

    Raises:
        ValueError: an empty name, the home folder of an unknown user, or not UTF-8, which safetensors cannot open.
    """
    if str(name) != str(name).encode(errors="ignore").decode():
        raise ValueError(f"model {str(name)!a} cannot be opened: its name is not UTF-8. Rename the folder")
    place = folder_of(str(name))
    folder = expanded(place)
    if gguf.is_gguf(folder):
        with explained(name, "model", "GGUF file", None):
            return str(gguf.converted(folder))
    return str(folder) if folder.is_dir() else place


def check_hub(model: str, file: str, revision: str | None, local: dict[str, Any]) -> None:
    """Check that a file of a hub id is cached or the hub can be reached: huggingface_hub would try for half a minute.

    Raises:
        LocalEntryNotFoundError: neither.
    """
    if is_offline_mode() or local.get("local_files_only") or local.get("proxies") or getproxies():
        return
    file = str(Path(local.get("subfolder", ""), file))
    if isinstance(try_to_load_from_cache(model, file, local.get("cache_dir"), revision), str):
        return
    hub = urlsplit(constants.ENDPOINT)
    address = hub.hostname or "", hub.port or (80 if hub.scheme == "http" else 443)
    try:
        socket.create_connection(address, constants.HF_HUB_ETAG_TIMEOUT).close()
    except OSError as error:
        raise LocalEntryNotFoundError(f"{constants.ENDPOINT} cannot be reached") from error


def gguf_file(model: str | Path, file: str, revision: str | None, **local: Any) -> str:
    """Return where a GGUF file of a folder or a hub id is stored; downloads it if it has to.

    Args:
        local: the options that locate files, `farspan.loading.LOCAL`.

    Raises:
        ValueError: the name of the file does not end with .gguf, or there is no such file.
    """
    if not file.endswith(".gguf"):
        raise ValueError(f"gguf: got {file!r}, expected the name of a file that ends with .gguf (--gguf)")
    folder = expanded(folder_of(str(model)))
    if folder.is_dir():
        folder /= local.get("subfolder", "")
        if not gguf.is_gguf(folder / file):
            others = ", ".join(sorted(path.name for path in folder.glob("*.gguf"))) or "none"
            shown = folder if "subfolder" in local else model
            raise ValueError(f"folder {shown} has no file {file!r}: its GGUF files are {others} (--gguf)")
        return str(folder / file)
    with explained(f"{model}/{file}", "model", "GGUF file", None):
        check_hub(str(model), file, revision, local)
        return str(cached_file(str(model), file, revision=revision, **local))
