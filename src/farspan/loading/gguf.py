"""GGUF files as folders of safetensors: the weights dequantised to float32, once for each file, in farspan's cache.

Checksums detect a damaged folder, which is made again.

The weights are those in the file, up to float32 rounding: a 4-bit file keeps its 4-bit precision, only in a format that
every safetensors reader accepts. transformers dequantises them and translates their names, for the architectures that
it has a converter for. The folder needs 4 bytes for each parameter.

transformers leaves some values out that change scores. Theta, windows and soft caps are compared with the file and set,
as is the scale of attention of Gemma's 27B models, which no file holds. It also leaves the scaling of RoPE out. That is
read here as llama.cpp stores it: fields `rope.scaling.*` (linear, YaRN), or the tensor `rope_freqs` with a divisor of
each frequency (Llama 3). Any other scaling is refused. So is a way to split text before byte-pair encoding
(`tokenizer.ggml.pre`) that neither transformers nor this module knows, and a file whose weights are not all those of
the model. A sentencepiece tokenizer adds a space before a text unless the file has
`tokenizer.ggml.add_space_prefix = false`, which transformers ignores.
"""

import hashlib
import json
import math
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import decoders, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from farspan.extras import optional_import
from farspan.files import built, cache_folder, read_json
from farspan.hf.masks import FULL, SLIDING, layer_windows
from farspan.hf.rotary import rope_frequencies, set_rope
from farspan.loading.errors import RefusedError
from farspan.terminal import report
from farspan.text import checksums

ABOUT = "gguf.json"  # in the folder: the source of its weights
VERSION = "version-5"  # an empty file in the folder; folders without it can have other weights, config or tokens
TOKENIZER = ("tokenizer.ggml.model", "tokenizer.ggml.tokens")  # its kind and its vocabulary
SPACE = "tokenizer.ggml.add_space_prefix"  # whether sentencepiece adds a space before a text
ENDS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
# Ways to split text (`tokenizer.ggml.pre`), by llama.cpp's names: GPT-2's, and GPT-2's after single digits.
LIKE_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais")
DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
# The parameters of YaRN: of GGUF, and of transformers.
YARN = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
# Values that change scores: of GGUF, and of transformers, which drops them for some architectures.
SCORING = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
THETAS = {"rope.freq_base": FULL, "rope.freq_base_swa": SLIDING}  # with the layers of each
TURNED = "rope.dimension_count"  # of a head
NORMS = "ssm.dt_b_c_rms"  # of FalconMamba, whose files name the architecture of Mamba
# The layers by which llama.cpp recognises the models that scale attention by the model's width, not by 256.
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
# llama.cpp stores only the resulting divisors. Every Llama from 3.1 has these parameters, with factors of its own.
LLAMA3 = {
    "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
}  # fmt: skip


@dataclass(frozen=True)
class FileHeader:
    """The content of a GGUF file besides its weights."""

    about: dict[str, Any]  # for the record of a model
    scaling: dict[str, Any]  # of RoPE, as `rope_parameters` of transformers; empty: none
    divisors: torch.Tensor | None  # of RoPE's frequencies
    ends: set[int]  # tokens that end a turn or a message; transformers reads only the one that ends a text
    split: str | None  # how the tokenizer splits text before byte-pair encoding
    spaced: bool  # whether sentencepiece adds a space before a text
    scoring: dict[str, Any]  # values of the fields SCORING, THETAS, TURNED and NORMS


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
            if (folder / VERSION).exists():
                return folder
    header = _header(file)
    about = {"file": file.name, "sha256": digest, **header.about}
    report(f"{file.name}: dequantising {about['num_weights']:,} weights once, into {folder}")
    options = {"gguf_file": file.name, "trust_remote_code": False}
    try:
        with _alone(file) as place:
            model, loaded = AutoModelForCausalLM.from_pretrained(
                place, dtype=torch.float32, output_loading_info=True, **options
            )
            tokenizer = AutoTokenizer.from_pretrained(place, **options)
    except ValueError as error:
        if "not supported" not in str(error):
            raise
        from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

        known = sorted({*GGUF_SUPPORTED_ARCHITECTURES} - {"general", "tokenizer"})
        raise RefusedError(
            f"its architecture is {about['architecture']!r}, which transformers {transformers.__version__} cannot read "
            f"from GGUF files: expected one of {', '.join(known)}. Load its safetensors weights instead"
        ) from error
    _refuse_other_weights(model, header, loaded["missing_keys"])
    _split(tokenizer, header.split)
    if not header.spaced:
        _without_space(tokenizer.backend_tokenizer)
    _complete(model, header)
    if _scale(model, header):
        about["rope_parameters"] = model.config.rope_parameters
    if header.ends:
        eos = model.config.eos_token_id
        about["stop_tokens"] = sorted({*(eos if isinstance(eos, list) else [eos]), *header.ends} - {None})
    # `save_pretrained` refuses a model that was quantised, so its weights move into one that never was
    config = model.config
    vars(config).pop("quantization_config", None)  # transformers 5.15 has none here
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    if header.ends:
        plain.generation_config.eos_token_id = about["stop_tokens"]
    with built(folder, replace=True) as new:
        plain.save_pretrained(new)
        tokenizer.save_pretrained(new)
        (new / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
        (new / VERSION).touch()
        checksums.seal(new)
    return folder


def identity(folder: str | Path) -> dict[str, Any] | None:
    """Return the record of the GGUF file that a folder was converted from; None for other folders."""
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


def _header(file: Path) -> FileHeader:
    """Read the header of a GGUF file.

    Raises:
        ValueError: the file is damaged, has no tokenizer, or scales RoPE in a way that is not known.
    """
    gguf = optional_import("gguf", "gguf")
    try:
        reader = gguf.GGUFReader(file)
        architecture = reader.get_field("general.architecture").contents()
        fields = {key.removeprefix(f"{architecture}."): field for key, field in reader.fields.items()}
        rope = {key: field.contents() for key, field in fields.items() if key.startswith("rope.")}
        trained = fields["context_length"].contents() if "context_length" in fields else None
        ends = {fields[key].contents() for key in ENDS if key in fields}
        split = fields["tokenizer.ggml.pre"].contents() if "tokenizer.ggml.pre" in fields else None
        spaced = bool(fields[SPACE].contents()) if SPACE in fields else True
        parts = int(fields["split.count"].contents()) if "split.count" in fields else 1
        scoring = {key: fields[key].contents() for key in (*SCORING, *THETAS, TURNED, NORMS) if key in fields}
        absent = [name for name in TOKENIZER if name not in fields]
        divisors = None
        for tensor in reader.tensors:
            if "rope_freqs" in tensor.name:
                divisors = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
    except (ValueError, AttributeError, IndexError, KeyError, OSError, UnicodeDecodeError) as error:
        raise RefusedError("it is not a GGUF file, or is damaged: download it again") from error
    if parts > 1:
        raise RefusedError(f"it is one of {parts} parts of a model: join them first, with `llama-gguf-split --merge`")
    if absent:
        raise RefusedError(
            f"it holds no tokenizer: it lacks the fields {', '.join(absent)}. Choose a GGUF file that has them, or "
            "load its safetensors weights instead"
        )
    if factors := [tensor.name for tensor in reader.tensors if "rope_factors" in tensor.name]:
        raise _unknown_scaling(f"the tensor {factors[0]}")
    about = {
        "architecture": architecture,
        "num_weights": sum(int(tensor.n_elements) for tensor in reader.tensors),
        "tensors": dict(Counter(tensor.tensor_type.name for tensor in reader.tensors).most_common()),
    }
    return FileHeader(about, _scaling(rope, trained), divisors, ends, split, spaced, scoring)


def _refuse_other_weights(model: Any, header: FileHeader, missing: Collection[str]) -> None:
    """Raise RefusedError if a model's weights are not those of the file: transformers fills missing ones with random
    numbers, and drops those that it does not know."""
    if missing:
        raise RefusedError(
            f"it lacks {len(missing):,} weights of the model, such as {min(missing)!r}: download it again"
        )
    held = header.about["num_weights"] - (0 if header.divisors is None else header.divisors.numel())
    own = sum(one.numel() for one in {one.data_ptr(): one for one in model.state_dict().values()}.values())
    if own != held:
        raise RefusedError(
            f"it holds {held:,} weights, but the model that transformers {transformers.__version__} makes of it has "
            f"{own:,}. Load its safetensors weights instead"
        )


def _complete(model: Any, header: FileHeader) -> None:
    """Give a model's config the values of its GGUF file that transformers has dropped.

    Raises:
        RefusedError: a value that this model of transformers does not have.
    """
    config, family = model.config, type(model).__name__

    def refusal(field: str) -> RefusedError:
        return RefusedError(
            f"its field {field} is {header.scoring[field]}, which the {family} that transformers "
            f"{transformers.__version__} makes of it does not use. Load its safetensors weights instead"
        )

    if header.scoring.get(NORMS):
        raise refusal(NORMS)
    for field, name in SCORING.items():
        value = header.scoring.get(field) or None  # 0: none
        if field not in header.scoring or getattr(config, name, None) == value:
            continue
        if not hasattr(config, name):
            raise refusal(field)
        setattr(config, name, value)
        if name == "sliding_window" and value not in layer_windows(model)[0]:
            raise refusal(field)
    for field, kind in THETAS.items():
        own = getattr(config, "rope_parameters", None) or {}
        plain, theta = own.get(kind, own), header.scoring.get(field)
        if theta is None or math.isclose(plain.get("rope_theta", math.nan), theta, rel_tol=1e-6):
            continue
        if "rope_theta" not in plain or (plain is own and kind == SLIDING):
            raise refusal(field)
        changed = plain | {"rope_theta": theta}
        set_rope(model, changed if plain is own else own | {kind: changed})
    turned = {2 * values.numel() for _, values in rope_frequencies(model)}
    if turned and header.scoring.get(TURNED, max(turned)) not in turned:
        raise refusal(TURNED)
    if config.num_hidden_layers == LAYERS_OF_27B.get(header.about["architecture"]):
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads


def _split(tokenizer: Any, name: str | None) -> None:
    """Make a byte-pair tokenizer split text in the way that its GGUF file names; transformers implements few of them.

    Raises:
        RefusedError: a way that neither transformers nor farspan knows.
    """
    backend = tokenizer.backend_tokenizer
    # what transformers falls back to
    is_default = isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) and backend.pre_tokenizer.use_regex
    if name is None or name in LIKE_GPT2 or not is_default:
        return
    if name not in DIGITS:
        raise RefusedError(
            f"its tokenizer splits text as {name!r}, which transformers {transformers.__version__} does not know: its "
            "tokens would be other ones. Load its safetensors weights instead"
        )
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def _without_space(backend: Any) -> None:
    """Let a sentencepiece tokenizer add no space before a text, and remove none when it decodes."""
    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):  # else it adds none, as of Gemma, or is not one
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def _unknown_scaling(got: str) -> RefusedError:
    return RefusedError(
        f"the scaling of its RoPE is not known: got {got}, expected linear, yarn or the divisors of Llama 3 "
        "(rope_freqs). Load its safetensors weights instead"
    )


def _scaling(rope: dict[str, Any], trained: int | None) -> dict[str, Any]:
    """Return transformers' parameters of a scaled RoPE, from the fields `rope.*` of a GGUF file; empty: not scaled.

    Args:
        trained: the trained length, in tokens.
    """
    given = {key.removeprefix("rope.scaling."): value for key, value in rope.items() if key.startswith("rope.scaling.")}
    given.pop("finetuned", None)  # whether the model was trained with the scaling
    kind = given.pop("type", "linear")  # as llama.cpp reads a file without a type
    factor = float(given.pop("factor", 0) or rope.get("rope.scale_linear", 0) or 1)  # the second is the older name
    if kind not in ("none", "linear", "yarn"):
        raise _unknown_scaling(f"the type {kind!r}")
    known = YARN if kind == "yarn" else ("original_context_length",)  # without YaRN it has no meaning
    if others := sorted(key for key in given if key not in known and not (key == "attn_factor" and given[key] == 1)):
        raise _unknown_scaling(f"the field rope.scaling.{others[0]} = {given[others[0]]}")
    if kind == "none" or factor == 1:
        return {}
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    given = {"original_context_length": trained} | given
    return {"rope_type": kind, "factor": factor} | {new: given[old] for old, new in YARN.items() if old in given}


def _scale(model: Any, header: FileHeader) -> bool:
    """Give a model the RoPE of its GGUF file. Return whether it differs from the one that transformers has read.

    Raises:
        RefusedError: the divisors are not those of Llama 3, or the model has no RoPE that can be scaled.
    """
    scaling, divisors = header.scaling, header.divisors
    own = getattr(model.config, "rope_parameters", None) or {}
    # Of several RoPEs, llama.cpp scales that of the layers with full attention.
    plain = own.get(FULL, own)
    wanted = None
    if divisors is not None:
        pairs = torch.arange(len(divisors)) / len(divisors)
        wanted = plain.get("rope_theta", 1.0) ** -pairs / divisors
        if not scaling and _rotates_by(model, wanted):
            return False
        if scaling:
            raise _unknown_scaling(f"both {scaling['rope_type']} and the tensor rope_freqs")
        scaling = LLAMA3 | {"factor": float(divisors.max())}
    if not scaling:
        return False
    if plain.get("rope_type", "default") != "default" or "rope_theta" not in plain:
        raise _unknown_scaling(f"{scaling['rope_type']} for a {type(model).__name__}")
    scaled = plain | scaling
    set_rope(model, scaled if plain is own else own | {FULL: scaled})
    if wanted is not None and not _rotates_by(model, wanted):
        raise _unknown_scaling(f"{len(wanted)} divisors of at most {scaling['factor']:g} in the tensor rope_freqs")
    return True


def _rotates_by(model: Any, wanted: torch.Tensor) -> bool:
    """Return whether a model has a RoPE with these frequencies."""
    return any(
        own.shape == wanted.shape and torch.allclose(own, wanted, rtol=1e-4, atol=1e-12)
        for _, own in rope_frequencies(model)
    )
