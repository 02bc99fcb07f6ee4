"""GGUF files as folders of safetensors: the weights dequantised to float32, once for each file, in farspan's cache.

Checksums detect a damaged folder, which is made again.

The weights are those in the file, up to float32 rounding: a 4-bit file keeps its 4-bit precision, only in a format that
every safetensors reader accepts. transformers dequantises them and translates their names, for the architectures that
it has a converter for. The folder needs 4 bytes for each parameter.
"""

import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from farspan.extras import optional_import
from farspan.files import built, cache_folder, read_json
from farspan.loading.errors import RefusedError
from farspan.terminal import report
from farspan.text import checksums

ABOUT = "gguf.json"  # in the folder: the source of its weights


def is_gguf(place: str | Path) -> bool:
    """Return whether `place` is an existing GGUF file."""
    return str(place).endswith(".gguf") and Path(place).is_file()


def converted(file: Path) -> Path:
    """Return the folder with config, tokenizer and float32 weights of a GGUF file, made where it does not exist yet.

    Raises:
        ValueError: the package `gguf` is not installed, the file is damaged, or transformers cannot read its
            architecture.
        OSError: the disk is full.
    """
    status = file.stat()
    digest = _digest(file, status.st_size, status.st_mtime_ns)
    folder = cache_folder() / "models" / f"{file.stem}-{digest[:16]}"
    if checksums.is_sealed(folder):
        try:
            checksums.verify(folder, ABOUT, "config.json")
        except ValueError as error:
            report(f"{error}. The GGUF file is converted again")
        else:
            return folder
    about = {"file": file.name, "sha256": digest, **_described(file)}
    report(f"{file.name}: dequantising {about['num_weights']:,} weights once, into {folder}")
    options = {"gguf_file": file.name, "trust_remote_code": False}
    try:
        with _alone(file) as place:
            model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **options)
            tokenizer = AutoTokenizer.from_pretrained(place, **options)
    except ValueError as error:
        if "not supported" not in str(error):
            raise
        raise RefusedError(
            f"its architecture is {about['architecture']!r}, which transformers {transformers.__version__} cannot read "
            f"from GGUF files: expected one of {', '.join(known_architectures())}. Load its safetensors weights instead"
        ) from error
    # `save_pretrained` refuses a model that was quantised, so its weights move into one that never was
    config = model.config
    del config.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    with built(folder, replace=True) as new:
        plain.save_pretrained(new)
        tokenizer.save_pretrained(new)
        (new / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
        checksums.seal(new)
    return folder


def known_architectures() -> list[str]:
    """Return the architectures that transformers can read from GGUF files."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    return sorted(set(GGUF_SUPPORTED_ARCHITECTURES) - {"general", "tokenizer"})


def identity(folder: str | Path) -> dict[str, Any] | None:
    """Return what a folder was converted from, for the record of a model; None for other folders."""
    path = Path(folder) / ABOUT
    return dict(read_json(path)) if path.is_file() else None


@contextmanager
def _alone(file: Path) -> Iterator[str]:
    """Yield a folder with only the file: its own folder may hold adapters, pickles or code, which transformers would
    also read."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / file.name).symlink_to(file.resolve())
        yield place


@lru_cache
def _digest(file: Path, size: int, changed: int) -> str:
    """Return the SHA-256 of a file. Size and time of its last change tell when it has to be read again."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _described(file: Path) -> dict[str, Any]:
    """Return the architecture of a GGUF file, how many weights it has, and the number of its tensors by type."""
    gguf = optional_import("gguf", "gguf")
    try:
        reader = gguf.GGUFReader(file)
        architecture = reader.get_field("general.architecture").contents()
    except (ValueError, AttributeError, IndexError, KeyError, OSError, UnicodeDecodeError) as error:
        raise RefusedError("it is not a GGUF file, or is damaged: download it again") from error
    return {
        "architecture": architecture,
        "num_weights": sum(int(tensor.n_elements) for tensor in reader.tensors),
        "tensors": dict(Counter(tensor.tensor_type.name for tensor in reader.tensors).most_common()),
    }
