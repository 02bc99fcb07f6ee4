"""A causal model with its tokenizer: loading, identity, separator."""

import hashlib
import logging
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import AutoModelForCausalLM

from farspan import hf
from farspan.files import expanded
from farspan.lengths import LARGEST
from farspan.loading import LOCAL, load_config, load_tokenizer, load_weights, locating, own_module, without_weights
from farspan.loading.devices import check_device_map, device_of, own_dtype
from farspan.loading.gguf import identity, is_gguf
from farspan.loading.places import folder_of, gguf_file, place_of
from farspan.text.corpora import tokenizer_hash

logger = logging.getLogger(__name__)

DEFAULT_TRAINED_LENGTH = 2048  # tokens, for configs without a trained length
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Separator:
    """The tokens before each text, and their kind."""

    ids: tuple[int, ...]
    kind: str  # "bos", "eos" or "newline"


@dataclass(frozen=True, eq=False, repr=False)
class LM:
    """A causal language model, its tokenizer and its identity."""

    model: Any  # a transformers causal model in eval mode
    tokenizer: Any
    name: str  # as the user gave it
    separator: Separator
    trained_length: int | None  # tokens; None if the config has none
    position_limit: int | None  # tokens; the end of a table of positions
    identity: dict[str, Any]  # recorded in runs
    planned_device: torch.device | None = None  # where a model without weights would be; None: it has weights

    def __repr__(self) -> str:
        """Return one line, such as `LM('demo', 2,164,416 parameters, float32, cpu, trained length 512 tokens)`."""
        about = self.identity
        parts = [repr(self.name)]
        parts += [f"{about['parameters']:,} parameters"] if about["parameters"] else []
        parts += [about["dtype"]] if about["dtype"] else []
        parts.append(str(self.planned_device or about["device"]))
        parts += [f"trained length {self.trained_length:,} tokens"] if self.trained_length else []
        return f"{type(self).__name__}({', '.join(parts)})"

    @property
    def device(self) -> torch.device:
        """The device for token ids."""
        return self.planned_device or hf.input_device(self.model)

    @property
    def has_weights(self) -> bool:
        """Whether the model can be run. Without weights it can only be planned with."""
        return self.planned_device is None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and activations."""
        return self.model.dtype

    @property
    def num_layers(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).num_hidden_layers)

    @property
    def vocabulary(self) -> int:
        """Entries of the model's embedding, which can be more than the tokenizer's."""
        return self.model.get_input_embeddings().num_embeddings

    @property
    def stop_tokens(self) -> list[int]:
        """Ids of the tokens that end an answer, ascending."""
        ids = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        known = ids if isinstance(ids, list) else [ids, self.tokenizer.eos_token_id]
        return sorted({one for one in known if one is not None})

    @property
    def num_parts(self) -> int:
        """How many processes divide the model, each with a device of its own (tensor parallelism); 1: it is whole."""
        return hf.num_parts(self.model)

    @cached_property
    def _key_bytes(self) -> dict[int | None, int]:
        return hf.key_bytes_by_window(self.model)

    @property
    def key_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token over all layers, in this process."""
        return sum(self._key_bytes.values()) // self.num_parts

    def key_bytes(self, num_tokens: int, chunk: int) -> int:
        """Return the bytes of the keys and values of one row, in this process, of `num_tokens` read in forwards of
        `chunk` tokens: a layer with a window holds no more than it before a forward, and those of the forward."""
        held = (
            each * (num_tokens if window is None else min(num_tokens, window - 1 + chunk))
            for window, each in self._key_bytes.items()
        )
        return sum(held) // self.num_parts

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters and buffers in this process."""
        return sum(map(hf.bytes_here, (*self.model.parameters(), *self.model.buffers())))

    @property
    def free_bytes(self) -> int:
        """Free memory of the device; of a divided model, the least of all its devices."""
        free = hf.free_bytes(self.device)
        return free if self.num_parts == 1 else hf.least(free, self.model)

    @cached_property
    def _flops(self) -> tuple[float, dict[int | None, float], float]:
        return hf.flops(self.model)

    def flops(self, num_before: int, num_tokens: int, num_scored: int, most: float = math.inf) -> float:
        """Return the multiplications and additions of one forward of one row: `num_tokens` after `num_before` others,
        attention over all pairs of these tokens and the keys held, at most `most` keys for each token, and the output
        head at `num_scored` positions."""
        per_token, per_pair, per_scored = self._flops
        attention = sum(
            cost * num_tokens * min(most, num_tokens + (num_before if window is None else min(num_before, window - 1)))
            for window, cost in per_pair.items()
        )
        return per_token * num_tokens + attention + per_scored * num_scored

    @property
    def limit(self) -> str:
        """The largest number of tokens that can be read, as text for messages."""
        return f"the model has {self.position_limit:,} positions"

    @property
    def how_queried(self) -> str:
        """How scores are requested from a served model, as text; empty: it runs in this process."""
        return ""

    @property
    def rows_at_once(self) -> int | None:
        """The most repeats to read together; None: as many as memory allows."""
        return None

    def renew(self) -> None:
        """Record the model as it is now in its identity: it can have been trained since it was wrapped."""
        if self.has_weights:
            self.identity.update(_identity(self.model))

    def own_reader(self) -> Any:
        """Return the reader of a model that runs on a server; None: it runs in this process."""
        return None

    def first_not_finite(self) -> AbstractContextManager[Callable[[], str]]:
        """Watch the outputs of every module inside the `with`; see `hf.first_not_finite`."""
        return hf.first_not_finite(self.model)


def load(
    model: str | Path,
    *,
    dtype: Dtype = "auto",
    device: str | torch.device | None = None,
    attention: str | None = None,
    trained_length: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool | None = False,
    allow_pickle: bool = False,
    gguf: str | None = None,
    weights: bool = True,
    **hub: Any,
) -> LM:
    """Load a causal model and its tokenizer from a local folder or the hub.

    Args:
        model: a folder, a hub id, a GGUF file, or "demo", the embedded model. With HF_HUB_OFFLINE=1 only cached files
            are used. A GGUF file is dequantised to float32 and cached (extra `gguf`).
        dtype: of weights and activations; "auto" is the checkpoint's own, but float32 instead of a 16-bit dtype
            that the CPU has no instructions for (`hf.has_instructions`), which is up to 10 times slower.
        device: "cpu", "cuda", "cuda:1", "mps"; default the first accelerator, else the CPU.
        attention: transformers' name of an attention implementation; default the model's own, eager for Gemma 2.
        trained_length: tokens; overrides the config's.
        revision: branch, tag or commit on the hub.
        trust_remote_code: run code that comes with the model; None: no, and the caller has no option to allow it.
        allow_pickle: also read .bin weights, which can run code; otherwise safetensors only.
        gguf: the GGUF file to load, of a folder or a hub id that holds several.
        weights: False: load only config and tokenizer, enough for plans; reading is refused. Chunked reading is then
            not checked, and the size of quantised weights is counted in the dtype.
        hub: passed on to `from_pretrained`, such as device_map="auto", distributed_config, quantization_config. Options
            that locate files (subfolder, token, cache_dir, local_files_only, proxies) also apply to config and
            tokenizer.

    Raises:
        ValueError: no such model, not cached while offline, gated, no safetensors, no tokenizer, not a causal
            language model, a GGUF file that cannot be converted, a config from which no model can be built, weights
            missing, without a place in the model, damaged or of other shapes, a vocabulary smaller than the
            tokenizer's, no such device, or heads that the processes of a `distributed_config` cannot divide evenly.
        OSError: the disk is full.
    """
    name = str(model)
    if gguf is not None:
        name = gguf_file(name, gguf, revision, **locating(hub))
        revision = None  # the file is already local
        hub = {key: value for key, value in hub.items() if key not in LOCAL}
    _check_options(name, dtype, attention, trained_length, revision)
    common: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code, **locating(hub)}
    if "device_map" in hub or "distributed_config" in hub:  # these choose the devices
        check_device_map(hub.get("device_map"))
        place = None if weights else device_of(None)
    else:
        place = device_of(device)
    config = load_config(name, **common)
    hf.check_divides(config, hub.get("distributed_config"), name)
    shown = name if gguf is None else f"{model}/{gguf}"
    kind = own_dtype(name, config, place) if dtype == "auto" else getattr(torch, dtype)
    if not weights:
        network = without_weights(name, config, dtype=kind, attention=attention, trust_remote_code=trust_remote_code)
        lm = wrap(network, load_tokenizer(name, **common), shown, trained_length=trained_length)
        return replace(lm, planned_device=place)
    own_options = {"dtype": kind, "attn_implementation": attention, "allow_pickle": allow_pickle}
    options: dict[str, Any] = own_options | common | hub
    left_out: dict[str, int] = {}
    if (own := own_module(config)) is not None:
        network = own.from_pretrained(name, **options)
    else:
        network, left_out = load_weights(AutoModelForCausalLM, name, config, **options)
    tokenizer = load_tokenizer(name, **common)
    if place is not None:
        network = network.to(place)
    lm = wrap(network, tokenizer, shown, trained_length=trained_length)
    if (source := identity(place_of(name))) is not None:
        lm.identity["gguf"] = source
    if left_out:
        lm.identity["left_out"] = left_out
        parts = ", ".join(f"{module!r} ({count:,})" for module, count in left_out.items())
        logger.warning("model %r: weights that a text-only decoder does not use are left out: %s", name, parts)
    return lm


def wrap(model: Any, tokenizer: Any, name: str, *, trained_length: int | None = None) -> LM:
    """Return an LM of a model that is already in memory.

    Raises:
        ValueError: the tokenizer has more entries than the model.
    """
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise ValueError(
            f"the tokenizer has {len(tokenizer):,} entries, model {name!r} only {rows:,}: they do not belong together"
        )
    from_config = _trained_length(model.config)
    separator = choose_separator(tokenizer)
    identity = {
        "name": name,
        "revision": getattr(model.config, "_commit_hash", None),
        **_identity(model),
        "trained_length": trained_length or from_config,
        "config_trained_length": from_config,
        "separator": {"kind": separator.kind, "ids": list(separator.ids)},
        "tokenizer": tokenizer_hash(tokenizer),
    }
    return LM(model, tokenizer, name, separator, trained_length or from_config, hf.position_limit(model), identity)


def _identity(model: Any) -> dict[str, Any]:
    """Return the part of a model's identity that training or an edit of its config can change."""
    return {
        "architecture": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": getattr(model.config, "_attn_implementation", None),
        "device": str(hf.input_device(model)),
        "fingerprint": fingerprint(model),
        "config": hf.scoring_fields(model.config),
    }


def trained_length_of(model: str | Path, **hub: Any) -> int | None:
    """Return the trained length (tokens) in a model's config, without loading the model; None if it has none.

    Raises:
        ValueError: no such config.
    """
    return _trained_length(_config_of(model, hub)[1])


def position_limit_of(model: str | Path, **hub: Any) -> int | None:
    """Return the longest text (tokens) that a model's table of positions allows, without loading its weights; None if
    it has no such table.

    Raises:
        ValueError: no such config, or one from which no model can be built.
    """
    name, config = _config_of(model, hub)
    return hf.position_limit(without_weights(name, config, trust_remote_code=hub.get("trust_remote_code")))


def _config_of(model: str | Path, hub: dict[str, Any]) -> tuple[str | Path, Any]:
    """Return the place of a model, that of the converted file if it is a GGUF file, and its config."""
    options = {key: hub[key] for key in ("revision", "trust_remote_code") if key in hub}
    local = locating(hub)
    if (file := hub.get("gguf")) is not None:
        model, local = gguf_file(model, file, options.pop("revision", None), **local), {}
    return model, load_config(model, **options, **local)


def _trained_length(config: Any) -> int | None:
    config = config.get_text_config(decoder=True)
    names = ("max_position_embeddings", "context_length", "max_seq_len")
    return next((length for name in names if (length := getattr(config, name, None))), None)


def choose_separator(tokenizer: Any) -> Separator:
    """Return the tokenizer's bos token, else its eos, else a newline, as the separator before a text."""
    if tokenizer.bos_token_id is not None:
        return Separator((tokenizer.bos_token_id,), "bos")
    if tokenizer.eos_token_id is not None:
        return Separator((tokenizer.eos_token_id,), "eos")
    newline = tuple(tokenizer("\n", add_special_tokens=False)["input_ids"])
    if not newline:
        raise ValueError("the tokenizer has no bos, no eos and no token for a newline: one is needed before a text")
    return Separator(newline, "newline")


BLOCK = 1 << 25  # bytes


def fingerprint(model: Any) -> str:
    """Return a hash that identifies a model: of every weight's name, shape, dtype and values, also where they are
    offloaded, and of the adapters of PEFT that are on."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        values = hf.offloaded(model, name) if weight.device.type == "meta" else weight
        if weight.numel() and values is not None:
            whole = values.full_tensor() if hasattr(values, "full_tensor") else values  # the weight of a sharded model
            digest.update(_sums(whole.detach()).cpu().numpy().tobytes())
    if (peft := sys.modules.get("peft.tuners.tuners_utils")) is not None:  # else the model has no adapters
        for name, module in model.named_modules():
            if isinstance(module, peft.BaseTunerLayer):
                active = () if module.disable_adapters else tuple(module.active_adapters)
                digest.update(f"{name} {active} {getattr(module, 'scaling', None)}".encode())
    return digest.hexdigest()[:16]


def _sums(weight: torch.Tensor) -> torch.Tensor:
    """Return sums of a weight's bytes, block by block, read as 64-bit integers, each times an odd number of its place.
    They are fast, and the same on every device, since integers can be added in any order."""
    sums = []
    for block in weight.reshape(-1).contiguous().view(torch.uint8).split(BLOCK):
        words = torch.cat([block, block.new_zeros(-len(block) % 8)]).view(torch.int64)
        sums.append((words * torch.arange(1, 2 * len(words), 2, device=words.device)).sum())
    return torch.stack(sums)


def _check_options(
    name: str, dtype: str, attention: str | None, trained_length: int | None, revision: str | None
) -> None:
    if revision is not None and expanded(folder_of(name)).exists():
        raise ValueError(
            f"model {name!r} has no revisions: got revision {revision!r}, which only models of the hub have. Omit it "
            "(--revision)"
        )
    if expanded(name).is_file() and not is_gguf(expanded(name)):
        raise ValueError(f"model {name!r} is a file: give its folder, or a file that ends with .gguf")
    if dtype not in get_args(Dtype):
        raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(get_args(Dtype))}")
    is_number = isinstance(trained_length, Integral) and not isinstance(trained_length, bool)
    if trained_length is not None and not (is_number and 1 <= trained_length <= LARGEST):
        raise ValueError(f"the trained length is {trained_length!r}, expected 1 to {LARGEST:,} tokens")
    if attention is not None and "/" not in attention and attention not in (known := hf.attention_names()):
        raise ValueError(f"attention {attention!r} is unknown, expected one of {', '.join(known)}; or leave it out")
