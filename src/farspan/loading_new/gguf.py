"""GGUF files as folders of safetensors: the weights dequantised to float32, once for each file, in farspan's cache.

The weights are those that the file stores, to float32 rounding: a file of 4 bits stays a model of 4 bits, and is only
stored in a format that every reader of safetensors takes. transformers dequantises them and translates their names, for
the architectures that it has a converter for. The folder needs 4 bytes for each parameter.
"""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import cached_file

from farspan.extras import optional_import
from farspan.files import built, cache_folder, read_json
from farspan.terminal import report

ABOUT = "gguf.json"  # in the folder: what it was made of


def is_gguf(place: str | Path) -> bool:
    """Return whether a name is that of a GGUF file that exists."""
    return str(place).endswith(".gguf") and Path(place).is_file()


def found(model: str, file: str, revision: str | None) -> Path:
    """Return where a GGUF file of a folder or a hub id is stored, downloaded if it has to be.

    Raises:
        ValueError: the name of the file does not end with .gguf, or the folder has no such file; names those it has.
        OSError: the hub has no such file, or cannot be reached.
    """
    if not file.endswith(".gguf"):
        raise ValueError(f"gguf: got {file!r}, expected the name of a file that ends with .gguf (--gguf)")
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return Path(cached_file(model, file, revision=revision))
    if not (folder / file).is_file():
        others = ", ".join(sorted(path.name for path in folder.glob("*.gguf"))) or "none"
        raise ValueError(f"folder {model} has no file {file!r}: its GGUF files are {others} (--gguf)")
    return folder / file


def converted(file: Path) -> Path:
    """Return the folder with config, tokenizer and float32 weights of a GGUF file, made where it does not exist yet.

    Raises:
        ValueError: the package `gguf` is not installed, the file is damaged, or transformers has no converter for its
            architecture.
        OSError: the disk is full.
    """
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    folder = cache_folder() / "models" / f"{file.stem}-{digest[:16]}"
    if (folder / ABOUT).is_file():
        return folder
    about = {"file": file.name, "sha256": digest, **_described(file)}
    report(f"{file.name}: dequantising {about['num_weights']:,} weights once, into {folder}")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # `save_pretrained` of a model that was quantised is refused, so its weights move into one that never was
    config = model.config
    del config.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    with built(folder) as new:
        plain.save_pretrained(new)
        tokenizer.save_pretrained(new)
        (new / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
    return folder


def identity(folder: str | Path) -> dict[str, Any] | None:
    """Return what a folder was converted from, for the record of a model; None for other folders."""
    path = Path(folder) / ABOUT
    return dict(read_json(path)) if path.is_file() else None


def _described(file: Path) -> dict[str, Any]:
    """Return the architecture of a GGUF file, how many weights it has, and how many of its tensors have which type."""
    gguf = optional_import("gguf", "gguf")
    try:
        reader = gguf.GGUFReader(file)
        architecture = reader.get_field("general.architecture").contents()
    except (ValueError, AttributeError, IndexError, KeyError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no GGUF file, or is damaged ({error}): download it again") from error
    return {
        "architecture": architecture,
        "num_weights": sum(int(tensor.n_elements) for tensor in reader.tensors),
        "tensors": dict(Counter(tensor.tensor_type.name for tensor in reader.tensors).most_common()),
    }
