"""Configs, tokenizers and weights of transformers, from a folder or the hub, with safety checks and one-line errors.

farspan calls `from_pretrained` for models, encoders and tokenizers only in this module. So these rules hold everywhere:

- Python code that comes with a model runs only with trust_remote_code=True; there is no prompt.
- Pickled weights are read only with allow_pickle=True, whatever file names them.
- Missing and unexpected weights are refused or named.
- An error is a ValueError of one line that names the model and the fix.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import cached_file

from farspan.files import expanded, parse_json
from farspan.hf.device import is_out_of_memory
from farspan.lengths import LARGEST
from farspan.text.hub import offline

logger = logging.getLogger(__name__)

DEMO = "demo"  # the embedded model
POSITIVE = (
    "num_hidden_layers", "n_layer", "hidden_size", "n_embd", "num_attention_heads", "n_head", "num_key_value_heads",
    "vocab_size", "head_dim",
)  # fmt: skip
LOCAL = ("cache_dir", "token", "subfolder", "local_files_only", "proxies")  # the hub's options that locate files
# Errors of transformers for impossible values in a config, a tokenizer's files or an index of weights: it checks types
# of fields (StrictDataclassError), but computes with any values. The values are the user's, so each is reported as an
# error for the user; the cause is chained.
BROKEN = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, RuntimeError, StrictDataclassError,
    TypeError, ValueError,
)  # fmt: skip
# Models unknown to transformers: the fields of config.json that mark them, and the module whose
# `from_pretrained` loads them. It is imported when the first such model is loaded.
LOADERS = {("do_cross_attention", "encoder_config"): "farspan.cepe"}
# Buffers that older versions of transformers saved and newer ones compute.
COMPUTED = re.compile(
    r"(^|\.)(inv_freq|rotary_emb\.(cos|sin)_cached|position_ids|embed_positions(\.weights)?"
    r"|(attn|attention|self_attention)\.(masked_)?bias)$"
)
LONGEST = 300  # characters shown of a message of transformers


def folder_of(name: str) -> str:
    """Return the folder of the embedded model for `demo`, and any other name as it is."""
    return str(files("farspan") / "assets" / "demo") if name == DEMO else name


def place_of(name: str | Path) -> str:
    """Return the folder of a model, with ~ expanded, or a hub id as it is; `demo` is the embedded model.

    Raises:
        ValueError: an empty name, the home folder of an unknown user, or not UTF-8, which safetensors cannot open.
    """
    if str(name) != str(name).encode(errors="ignore").decode():
        raise ValueError(f"model {str(name)!a} cannot be opened: its name is not UTF-8. Rename the folder")
    place = folder_of(str(name))
    folder = expanded(place)
    return str(folder) if folder.is_dir() else place


def load_config(
    name: str | Path, *, what: str = "model", revision: str | None = None, trust_remote_code: bool | None = None
) -> Any:
    """Return the config of a model.

    Args:
        what: the noun for it in errors.
        trust_remote_code: None is False, and means that no option can allow it.

    Raises:
        ValueError: no such model, or a config that is damaged, impossible, unknown to transformers or needs code.
    """
    place = place_of(name)
    if Path(place).is_dir() and not (Path(place) / "config.json").is_file():
        raise ValueError(f"folder {str(name)!r} holds no {what}: it has no config.json. Give the folder of a {what}")
    with explained(name, what, "config.json", trust_remote_code):
        fields, _ = PreTrainedConfig.get_config_dict(place, revision=revision)
        _check_config(fields, bool(trust_remote_code))
        return AutoConfig.from_pretrained(place, revision=revision, trust_remote_code=bool(trust_remote_code))


def load_tokenizer(
    name: str | Path, *, what: str = "model", revision: str | None = None, trust_remote_code: bool | None = None
) -> Any:
    """Return the tokenizer that comes with a model. The arguments are those of `load_config`.

    Raises:
        ValueError: no tokenizer, or one that is damaged, unknown to transformers or needs code.
    """
    place = place_of(name)
    with explained(name, what, "tokenizer", trust_remote_code):
        return AutoTokenizer.from_pretrained(place, revision=revision, trust_remote_code=bool(trust_remote_code))


def own_loader(config: PreTrainedConfig) -> Callable[..., Any] | None:
    """Return the `from_pretrained` of a model unknown to transformers; None for known models."""
    for fields, module in LOADERS.items():
        if all(getattr(config, field, None) for field in fields):
            return import_module(module).from_pretrained
    return None


def load_weights(
    kind: Any,
    name: str | Path,
    config: PreTrainedConfig,
    *,
    what: str = "model",
    revision: str | None = None,
    trust_remote_code: bool | None = None,
    allow_pickle: bool = False,
    optional: tuple[str, ...] = (),
    **options: Any,
) -> tuple[Any, dict[str, int]]:
    """Return the model with its weights in eval mode, and the number of weights left out, by module.

    Args:
        kind: a class with `from_pretrained`, such as AutoModelForCausalLM.
        optional: beginnings of names of weights that may be missing.
        options: of `from_pretrained`.

    Raises:
        ValueError: weights that are missing, damaged, pickled or of other shapes, unexpected weights
            of the model's own modules, or a config from which no model can be built.
    """
    place = place_of(name)
    if not allow_pickle:
        with explained(name, what, "index of weights", trust_remote_code):
            _refuse_pickles(place, config, {key: options[key] for key in LOCAL if key in options}, revision)
    with explained(name, what, "config.json", trust_remote_code):
        try:
            model, report = kind.from_pretrained(
                place,
                config=config,
                output_loading_info=True,
                use_safetensors=None if allow_pickle else True,
                revision=revision,
                trust_remote_code=bool(trust_remote_code),
                **options,
            )
        except ImportError as error:
            if not (attention := options.get("attn_implementation")):
                raise
            needs = f"attention {attention!r} cannot be used here ({one_line(error)})"
            raise _RefusedError(f"{needs}: install what it needs, or leave --attention out") from error
    if missing := sorted(key for key in report["missing_keys"] if not key.startswith(optional or (" ",))):
        raise ValueError(
            f"{what} {str(name)!r} lacks {len(missing):,} of its weights, such as {missing[0]!r}: "
            "download it again, or correct its config.json"
        )
    if not getattr(config, "quantization_config", None):
        with explained(name, what, "weights", trust_remote_code):
            _refuse_integers(place, {key: options[key] for key in LOCAL if key in options}, revision)
    return model.eval(), _left_out(model, report["unexpected_keys"], name, what)


def _left_out(model: Any, unexpected: Iterable[str], name: str | Path, what: str) -> dict[str, int]:
    """Return the number of unused weights by module, such as a vision tower.

    Raises:
        ValueError: unexpected weights in the model's own modules, such as further layers or biases of its layers.
    """
    modules = {module for module, _ in model.named_modules()} - {"", model.base_model_prefix}
    config = model.config.get_text_config(decoder=True)
    layers = getattr(config, "num_hidden_layers", 0)
    more = getattr(config, "num_nextn_predict_layers", 0) or 0  # extra layers, which only draft tokens
    drafting = tuple(f".layers.{index}." for index in range(layers, layers + more))
    without, within = Counter[str](), list[str]()
    for key in sorted(unexpected):
        if COMPUTED.search(key):
            continue
        parts = key.split(".")
        inside = [".".join(parts[:end]) for end in range(1, len(parts))]
        if drafting and any(one in f".{key}" for one in drafting):
            without[f"layers.{layers}"] += 1
        elif modules.intersection(inside):
            within.append(key)
        else:
            own = [part for part in parts[:-1] if part != model.base_model_prefix]
            without[own[0] if own else parts[-1]] += 1
    if within:
        raise ValueError(
            f"{what} {str(name)!r} has {len(within):,} weights that its config.json leaves no place for, such as "
            f"{within[0]!r}: correct config.json (num_hidden_layers is {layers}), or download it again"
        )
    return dict(sorted(without.items()))


class _RefusedError(ValueError):
    """A refusal of this module; `explained` adds the model's name before it."""


def _check_config(fields: Any, trust_remote_code: bool) -> None:
    """Refuse values of config.json for which transformers fails without naming them, or builds a model that cannot
    work."""
    if not isinstance(fields, dict):
        raise _RefusedError("config.json is damaged: expected a JSON object. Download it again")
    for name in POSITIVE:
        value = fields.get(name)
        if isinstance(value, int) and value < 1:
            raise _RefusedError(f"config.json has {name} = {value}, expected at least 1. Correct it")
    longest = fields.get("max_position_embeddings")
    if isinstance(longest, int) and not 2 <= longest <= LARGEST:
        raise _RefusedError(f"config.json has max_position_embeddings = {longest}, expected 2 to {LARGEST:,} tokens")
    dtype = fields.get("dtype", fields.get("torch_dtype"))
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise _RefusedError(f"config.json has dtype = {dtype!r}, expected one of torch, such as float32 or bfloat16")
    if isinstance(window := fields.get("sliding_window"), str):
        raise _RefusedError(f"config.json has sliding_window = {window!r:.60}, expected a number of tokens. Correct it")
    for rope in (fields.get("rope_parameters"), fields.get("rope_scaling")):
        for name in ("factor", "rope_theta"):
            value = rope.get(name) if isinstance(rope, dict) else None
            if isinstance(value, int | float) and value <= 0:
                raise _RefusedError(f"config.json has {name} = {value} of RoPE, expected more than 0. Correct it")
    quantization = fields.get("quantization_config")
    if quantization and not _is_known_quantization(quantization):  # transformers would not dequantise them
        raise _RefusedError(
            f"config.json has quantization_config = {quantization!r:.60}, expected an object whose quant_method "
            f"transformers {transformers.__version__} knows. Correct it, or choose another model"
        )
    kernel = fields.get("attn_implementation", fields.get("_attn_implementation"))
    if isinstance(kernel, str) and "/" in kernel and not trust_remote_code:
        raise _RefusedError(
            f"config.json has attn_implementation = {kernel!r}, whose code would be downloaded and run: remove it, or "
            "allow code with --trust-remote-code (trust_remote_code=True)"
        )
    if isinstance(fields.get("text_config"), dict):
        _check_config(fields["text_config"], trust_remote_code)


def _is_known_quantization(config: Any) -> bool:
    if not isinstance(config, dict):
        return False
    bitsandbytes = config.get("load_in_8bit") or config.get("load_in_4bit")
    return bool(bitsandbytes) or config.get("quant_method") in list(AUTO_QUANTIZATION_CONFIG_MAPPING)


def _refuse_pickles(place: str, config: PreTrainedConfig, options: dict[str, Any], revision: str | None) -> None:
    """Refuse any setting that makes transformers read weights other than safetensors files of this place.

    It reads those that config.json names (`transformers_weights`), else model.safetensors, else the files that an index
    names, of any kind; and an adapter next to them.
    """
    named = getattr(config, "transformers_weights", None)
    if named is not None and not _is_safetensors(named, (".safetensors", ".safetensors.index.json")):
        raise _RefusedError(f"config.json names the weights {named!r}, expected a .safetensors file of the same folder")
    found = partial(_found, place, options, revision)
    if found("adapter_config.json") and not found("adapter_model.safetensors") and found("adapter_model.bin"):
        raise _RefusedError(f"the weights of its adapter are pickled (adapter_model.bin): {PICKLED}")
    for file in _indexes(place, options, revision):
        holds = parse_json(file.read_bytes(), file.name)
        if not isinstance(holds, dict) or not isinstance(holds.get("weight_map"), dict) or "metadata" not in holds:
            raise _RefusedError(f"{file.name} is damaged: expected an object with metadata and weight_map")
        for shard in sorted(map(str, set(holds["weight_map"].values()))):
            if not _is_safetensors(shard):
                raise _RefusedError(
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


def _refuse_integers(place: str, options: dict[str, Any], revision: str | None) -> None:
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
                    raise _RefusedError(
                        f"its weight {name!r} holds integers ({dtype}), and config.json has no quantization_config "
                        "that defines their meaning: restore quantization_config, or choose another model"
                    )


def _is_safetensors(name: Any, endings: tuple[str, ...] = (".safetensors",)) -> bool:
    return isinstance(name, str) and name.endswith(endings) and Path(name).name == name


class explained:  # noqa: N801
    """A context manager that turns errors of loading into ValueErrors of one line."""

    def __init__(self, name: str | Path, what: str, part: str, trust_remote_code: bool | None) -> None:
        self.name, self.what, self.part, self.trust = str(name), what, part, trust_remote_code

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if error is None or is_out_of_memory(error):
            return
        of = f"{self.what} {self.name!r}"
        if isinstance(error, _RefusedError):
            raise ValueError(f"{of} cannot be loaded: {error}") from error
        if isinstance(error, SafetensorError):
            raise ValueError(f"the weights of {of} are damaged or incomplete ({error}): download them again") from error
        if isinstance(error, RuntimeError) and "mismatched" in str(error):
            raise ValueError(
                f"the weights of {of} have other shapes than its config.json defines. Correct that file, or download "
                "both again"
            ) from error
        if isinstance(error, ValueError) and isinstance(error.__cause__, OSError):
            error = error.__cause__
        if isinstance(error, OSError | HFValidationError | ImportError):
            raise ValueError(_not_found(self.name, self.what, self.part, error)) from error
        # `tokenizers` raises plain Exceptions
        if isinstance(error, BROKEN) or type(error) is Exception:
            raise ValueError(f"{of} {self._broken(error)}") from error

    def _broken(self, error: BaseException) -> str:
        said = one_line(error)
        if "trust_remote_code" in str(error):
            if self.trust is None:
                return "comes with Python code of its own, which is not run here: choose one without code of its own"
            return (
                "comes with Python code of its own, which is not run unless you allow it: read that code, then give "
                "--trust-remote-code (trust_remote_code=True)"
            )
        if "Unrecognized" in str(error) or "does not recognize" in str(error):
            said = said.partition(" Model type should be one of")[0].partition(" Should have a")[0]
            said = said.partition(" This could be because")[0].partition(" for this kind of ")[0].rstrip(".")
            return f"is not a causal language model known to transformers {transformers.__version__}: {said}"
        if damaged := damaged_json(place_of(self.name)):
            return f"cannot be loaded: {damaged}. Download it again"
        if self.part == "tokenizer":
            if "backend tokenizer" in said:
                return (
                    "comes without a tokenizer that transformers can load: expected tokenizer.json, or a "
                    "sentencepiece or tiktoken file and that package"
                )
            return (
                "has a tokenizer that cannot be loaded: tokenizer.json, tokenizer_config.json or "
                f"special_tokens_map.json have content that transformers does not accept ({said}). Download them again"
            )
        return f"cannot be built from its {self.part}: {said}. Correct that file, or download it again"


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line of at most `LONGEST` characters."""
    said = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    said = re.sub(r"<class '([\w.]+\.)?(\w+)'>", r"\2", " ".join(said.split()).rstrip("."))
    if isinstance(error, StrictDataclassError):
        said = (said.partition("Error: ")[2] or said).partition(" Errors: ")[0]
    elif isinstance(error, KeyError):
        said = said if " " in said else f"{said!r} is not known, or missing"
    elif not isinstance(error, ValueError) or not said:
        said = f"{type(error).__name__}: {said}"
    return said if len(said) <= LONGEST else f"{said[:LONGEST]}…"


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


def _not_found(name: str, what: str, part: str, error: BaseException) -> str:
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__

    def caused_by(*kinds: type[BaseException]) -> bool:
        return any(isinstance(link, kinds) for link in chain)

    said = " ".join(str(error).split())
    if caused_by(GatedRepoError):
        return (
            f"{what} {name!r} is gated on the hub: request access on its page, then run `hf auth login` or set HF_TOKEN"
        )
    if (folder := expanded(name)).is_dir():
        if damaged := damaged_json(str(folder)):
            return f"folder {name} cannot be loaded: {damaged}. Download it again"
        if part == "config.json" and "safetensors" in said and any(folder.glob("*.bin")):
            return (
                f"folder {name} holds no safetensors weights; .bin weights can run code when they are read: "
                "convert them, or allow it with allow_pickle=True (--allow-pickle)"
            )
        return f"folder {name} cannot be loaded: {said.rstrip('.')}. Download it again"
    if name.startswith((".", "/", "~")) or caused_by(HFValidationError):
        return f"{what} {name!r} is neither a folder nor a hub id such as org/name"
    if offline() or caused_by(OfflineModeIsEnabled):
        return f"{what} {name!r} is neither a folder nor cached, and HF_HUB_OFFLINE is set: unset it to download"
    if caused_by(RepositoryNotFoundError):
        return f"{what} {name!r} is neither a folder nor on the hub (a private one needs `hf auth login`)"
    if caused_by(LocalEntryNotFoundError):
        return f"{what} {name!r} is neither a folder nor cached, and the hub cannot be reached: {said}"
    return f"{what} {name!r} cannot be loaded: {said}"
