"""Refuse unsafe or impossible models before transformers reads them, and weights that it would misread."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import MODEL_FOR_MASKED_LM_MAPPING, PreTrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import cached_file

from farspan.files import parse_json
from farspan.lengths import LARGEST
from farspan.loading.errors import RefusedError

POSITIVE = (
    "num_hidden_layers", "n_layer", "hidden_size", "n_embd", "num_attention_heads", "n_head", "num_key_value_heads",
    "vocab_size", "head_dim",
)  # fmt: skip


def check_config(fields: Any, trust_remote_code: bool) -> None:
    """Refuse values of config.json for which transformers fails without naming them, or builds a model that cannot
    work."""
    if not isinstance(fields, dict):
        raise RefusedError("config.json is damaged: expected a JSON object. Download it again")
    for name in POSITIVE:
        value = fields.get(name)
        if isinstance(value, int) and value < 1:
            raise RefusedError(f"config.json has {name} = {value}, expected at least 1. Correct it")
    longest = fields.get("max_position_embeddings")
    if isinstance(longest, int) and not 2 <= longest <= LARGEST:
        raise RefusedError(f"config.json has max_position_embeddings = {longest}, expected 2 to {LARGEST:,} tokens")
    dtype = fields.get("dtype", fields.get("torch_dtype"))
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise RefusedError(f"config.json has dtype = {dtype!r}, expected one of torch, such as float32 or bfloat16")
    if isinstance(window := fields.get("sliding_window"), str):
        raise RefusedError(f"config.json has sliding_window = {window!r:.60}, expected a number of tokens. Correct it")
    for rope in (fields.get("rope_parameters"), fields.get("rope_scaling")):
        for name in ("factor", "rope_theta"):
            value = rope.get(name) if isinstance(rope, dict) else None
            if isinstance(value, int | float) and value <= 0:
                raise RefusedError(f"config.json has {name} = {value} of RoPE, expected more than 0. Correct it")
    quantization = fields.get("quantization_config")
    if quantization and not _is_known_quantization(quantization):  # transformers would not dequantise them
        raise RefusedError(
            f"config.json has quantization_config = {quantization!r:.60}, expected an object whose quant_method "
            f"transformers {transformers.__version__} knows. Correct it, or choose another model"
        )
    kernel = fields.get("attn_implementation", fields.get("_attn_implementation"))
    if isinstance(kernel, str) and "/" in kernel and not trust_remote_code:
        raise RefusedError(
            f"config.json has attn_implementation = {kernel!r}, whose code would be downloaded and run: remove it, or "
            "allow code with --trust-remote-code (trust_remote_code=True)"
        )
    if isinstance(fields.get("text_config"), dict):
        check_config(fields["text_config"], trust_remote_code)


def check_causal(config: PreTrainedConfig) -> None:
    """Refuse encoders, which transformers builds as causal models all the same, with new weights where an output head
    is missing."""
    decodes = getattr(config, "is_decoder", True) or getattr(config, "is_encoder_decoder", False)
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not decodes:
        raise RefusedError(
            f"it is an encoder (model_type {config.model_type!r}), expected a causal language model (a decoder), which "
            "predicts each token from the tokens before it. Choose another model"
        )


def check_windows(config: PreTrainedConfig) -> None:
    """Refuse layers with a sliding window that has no size: some models would read the whole text in them, others
    fail."""
    text = config.get_text_config(decoder=True)
    if "sliding_attention" in (getattr(text, "layer_types", None) or ()) and not getattr(text, "sliding_window", None):
        raise RefusedError(
            "config.json has layers of sliding_attention (layer_types) without sliding_window, the tokens that they "
            "see: add it, or change these layers to full_attention"
        )


def _is_known_quantization(config: Any) -> bool:
    if not isinstance(config, dict):
        return False
    bitsandbytes = config.get("load_in_8bit") or config.get("load_in_4bit")
    return bool(bitsandbytes) or config.get("quant_method") in list(AUTO_QUANTIZATION_CONFIG_MAPPING)


def refuse_pickles(place: str, config: PreTrainedConfig, options: dict[str, Any], revision: str | None) -> None:
    """Refuse any setting that makes transformers read weights other than safetensors files of this place.

    transformers reads the files that config.json names (`transformers_weights`), else model.safetensors, else the files
    of any kind that an index names; and an adapter next to them.
    """
    named = getattr(config, "transformers_weights", None)
    if named is not None and not _is_safetensors(named, (".safetensors", ".safetensors.index.json")):
        raise RefusedError(f"config.json names the weights {named!r}, expected a .safetensors file of the same folder")
    found = partial(_found, place, options, revision)
    if found("adapter_config.json") and not found("adapter_model.safetensors") and found("adapter_model.bin"):
        raise RefusedError(f"the weights of its adapter are pickled (adapter_model.bin): {PICKLED}")
    for file in _indexes(place, options, revision):
        holds = parse_json(file.read_bytes(), file.name)
        if not isinstance(holds, dict) or not isinstance(holds.get("weight_map"), dict) or "metadata" not in holds:
            raise RefusedError(f"{file.name} is damaged: expected an object with metadata and weight_map")
        for shard in sorted(map(str, set(holds["weight_map"].values()))):
            if not _is_safetensors(shard):
                raise RefusedError(
                    f"{file.name} names the weights {shard!r}, expected .safetensors files of the same folder; "
                    + PICKLED
                )


PICKLED = (
    "other weights can run code when they are read: convert them to safetensors, or allow them with "
    "allow_pickle=True (--allow-pickle)"
)


def _found(place: str, options: dict[str, Any], revision: str | None, file: str) -> Path | None:
    """Return the path of a file of a folder or a hub id; None if it has no such file."""
    if Path(place).is_dir():
        path = Path(place) / options.get("subfolder", "") / file
        return path if path.exists() else None
    quiet = {f"_raise_exceptions_for_{kind}": False for kind in ("gated_repo", "missing_entries", "connection_errors")}
    cached = cached_file(place, file, revision=revision, **quiet, **options)
    return None if cached is None else Path(cached)


def _indexes(place: str, options: dict[str, Any], revision: str | None) -> list[Path]:
    """Return the index files, which list the weights of each safetensors file."""
    if Path(place).is_dir():
        return list((Path(place) / options.get("subfolder", "")).glob("*.safetensors.index*.json"))
    index = _found(place, options, revision, "model.safetensors.index.json")
    return [index] if index else []


def refuse_integers(place: str, options: dict[str, Any], revision: str | None) -> None:
    """Refuse integer weights of a config without quantization: transformers would not dequantise them."""
    files = {"model.safetensors"}
    for index in _indexes(place, options, revision):
        files.update(parse_json(index.read_bytes(), index.name)["weight_map"].values())
    for file in sorted(files):
        if (path := _found(place, options, revision, file)) is None:
            continue
        with safe_open(path, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118  (not a dict)
                dtype = weights.get_slice(name).get_dtype()
                if name.endswith(".weight") and dtype[0] in "IU":
                    raise RefusedError(
                        f"its weight {name!r} holds integers ({dtype}), and config.json has no quantization_config "
                        "that defines their meaning: restore quantization_config, or choose another model"
                    )


def _is_safetensors(name: Any, endings: tuple[str, ...] = (".safetensors",)) -> bool:
    return isinstance(name, str) and name.endswith(endings) and Path(name).name == name
