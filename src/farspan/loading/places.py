"""Where a model is: the embedded model, a folder, a GGUF file or a hub id."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from farspan.files import expanded
from farspan.loading import gguf
from farspan.loading.errors import explained
from farspan.terminal import report
from farspan.text.hub import cached_only

DEMO = "demo"  # the embedded model


def folder_of(name: str) -> str:
    """Return the folder of the embedded model for `demo`, and any other name as it is."""
    if name != DEMO:
        return name
    if (Path(DEMO) / "config.json").is_file():
        _report_which()
    return str(files("farspan") / "assets" / DEMO)


@cache
def _report_which() -> None:
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


def cached_parts(place: str, local: Mapping[str, Any]) -> AbstractContextManager[bool]:
    """Return a context in which only cached files of a place are used, if that is wanted or the hub cannot be reached.

    Args:
        place: as `place_of` returns it.
        local: the options that locate files, `farspan.loading.LOCAL`.
    """
    wanted = bool(local.get("local_files_only"))
    if Path(place).is_dir() and not wanted:
        return nullcontext(False)
    return cached_only(wanted=wanted, proxies=bool(local.get("proxies")))


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
    with explained(f"{model}/{file}", "model", "GGUF file", None, local), cached_parts(str(model), local):
        return str(cached_file(str(model), file, revision=revision, **local))
