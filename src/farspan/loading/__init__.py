"""Configs, tokenizers and weights of transformers, from a folder or the hub, with safety checks and one-line errors.

Only this package calls `from_pretrained` for models, encoders and tokenizers. So these rules hold everywhere:

- Python code that comes with a model runs only with trust_remote_code=True; there is no prompt.
- Pickled weights are read only with allow_pickle=True, whatever file names them.
- Missing and unexpected weights are refused or named.
- An error is a ValueError of one line that names the model and the fix.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.utils import cached_file, extract_commit_hash, logging

from farspan.loading.errors import RefusedError, explained, one_line, only_adapter
from farspan.loading.places import cached_parts, place_of
from farspan.loading.refusals import check_causal, check_config, check_windows, refuse_integers, refuse_pickles

LOCAL = ("cache_dir", "token", "subfolder", "local_files_only", "proxies")  # the hub's options that locate files
# Models unknown to transformers: the fields of config.json that mark them, and the module that loads them. Its
# `class_of` returns the class for a config, its `from_pretrained` loads a model. It is imported when first needed.
LOADERS = {("do_cross_attention", "encoder_config"): "farspan.cepe"}
# Buffers that older versions of transformers saved and newer ones compute.
COMPUTED = re.compile(
    r"(^|\.)(inv_freq|rotary_emb\.(cos|sin)_cached|position_ids|embed_positions(\.weights)?"
    r"|(attn|attention|self_attention)\.(masked_)?bias)$"
)


def locating(options: dict[str, Any]) -> dict[str, Any]:
    """Return those of the options that locate files, for all parts of a model alike."""
    return {key: options[key] for key in LOCAL if key in options}


def load_config(
    name: str | Path,
    *,
    what: str = "model",
    revision: str | None = None,
    trust_remote_code: bool | None = None,
    **local: Any,
) -> Any:
    """Return the config of a model, with the commit of the hub that it is from, if any.

    Args:
        what: the noun for it in errors.
        trust_remote_code: None: False, and no option can allow it.
        local: the options of `LOCAL`.

    Raises:
        ValueError: no such model, or a config that is damaged, impossible, unknown to transformers or needs code.
    """
    place = place_of(name)
    folder = Path(place, local.get("subfolder", ""))
    if Path(place).is_dir() and not (folder / "config.json").is_file():
        shown = str(folder if "subfolder" in local else name)
        if (folder / "adapter_config.json").is_file():
            raise ValueError(only_adapter(shown, what))
        raise ValueError(f"folder {shown!r} holds no {what}: it has no config.json. Give a folder that holds one")
    with explained(name, what, "config.json", trust_remote_code, local), cached_parts(place, local):
        fields, _ = PreTrainedConfig.get_config_dict(place, revision=revision, **local)
        check_config(fields, bool(trust_remote_code))
        config = AutoConfig.from_pretrained(
            place, revision=revision, trust_remote_code=bool(trust_remote_code), **local
        )
        if getattr(config, "_commit_hash", None) is None:  # transformers 5.23 does not set it
            file = cached_file(place, "config.json", revision=revision, **local)
            config._commit_hash = extract_commit_hash(file, None)
        check_windows(config)
        return config


def load_tokenizer(
    name: str | Path,
    *,
    what: str = "model",
    revision: str | None = None,
    trust_remote_code: bool | None = None,
    **local: Any,
) -> Any:
    """Return the tokenizer that comes with a model. The arguments are those of `load_config`.

    Raises:
        ValueError: no tokenizer, or one that is damaged, unknown to transformers or needs code.
    """
    place = place_of(name)
    with explained(name, what, "tokenizer", trust_remote_code, local), cached_parts(place, local):
        return AutoTokenizer.from_pretrained(
            place, revision=revision, trust_remote_code=bool(trust_remote_code), **local
        )


def own_module(config: PreTrainedConfig) -> Any:
    """Return the module that makes a model unknown to transformers; None for known models."""
    for fields, module in LOADERS.items():
        if all(getattr(config, field, None) for field in fields):
            return import_module(module)
    return None


def stored_dtype(config: PreTrainedConfig) -> torch.dtype | None:
    """Return the dtype that a config gives its weights; None: it gives none."""
    return config.dtype or config.get_text_config(decoder=True).dtype


def without_weights(
    name: str | Path,
    config: PreTrainedConfig,
    *,
    dtype: str | torch.dtype = "auto",
    attention: str | None = None,
    trust_remote_code: bool | None = None,
) -> Any:
    """Return a model in eval mode, from its config alone. Its weights have shapes and dtypes but no values or memory.

    Args:
        dtype: "auto" is the config's, float32 where it has none.
        attention: as `attn_implementation` of transformers; None: the model's own.

    Raises:
        ValueError: a config from which no model can be built.
    """
    if dtype == "auto":
        dtype = stored_dtype(config) or torch.float32
    options: dict[str, Any] = {"dtype": dtype} | _kernel(config, attention)
    with explained(name, "model", "config.json", trust_remote_code), torch.device("meta"):
        check_causal(config)
        if (own := own_module(config)) is not None:
            model = own.class_of(config)._from_config(config, **options)
        else:
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=bool(trust_remote_code), **options)
    for part, module in model.named_modules():
        if not {*(model._keep_in_fp32_modules_strict or ())}.isdisjoint(part.split(".")):
            module.float()  # as `from_pretrained` does
    return model.eval()


def _kernel(config: PreTrainedConfig, wanted: str | None) -> dict[str, str]:
    """Return transformers' option for the attention that is wanted, by default eager for models that cap its scores,
    such as Gemma 2: transformers 5.15 would choose sdpa, which does not cap them. Empty: as transformers chooses."""
    capped = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    kernel = wanted or (None if capped is None else "eager")
    return {"attn_implementation": kernel} if kernel else {}


@contextmanager
def _transient_bars() -> Iterator[None]:
    """Remove transformers' progress bars from the terminal once they are complete."""
    before = logging.set_tqdm_hook(lambda bar, given, named: bar(*given, **named | {"leave": False}))
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


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
        optional: prefixes of the names of weights that may be missing.
        options: passed to `from_pretrained`.

    Raises:
        ValueError: weights that are missing, damaged, pickled or of other shapes, unexpected weights
            of the model's own modules, or a config from which no model can be built.
    """
    place, local = place_of(name), locating(options)
    if not allow_pickle:
        with explained(name, what, "index of weights", trust_remote_code, local), cached_parts(place, local):
            refuse_pickles(place, config, local, revision)
    with explained(name, what, "config.json", trust_remote_code, local), cached_parts(place, local):
        if kind is AutoModelForCausalLM:
            check_causal(config)
        try:
            with _transient_bars():
                model, report = kind.from_pretrained(
                    place,
                    config=config,
                    output_loading_info=True,
                    use_safetensors=None if allow_pickle else True,
                    revision=revision,
                    trust_remote_code=bool(trust_remote_code),
                    **options | _kernel(config, options.get("attn_implementation")),
                )
        except ImportError as error:
            if not (attention := options.get("attn_implementation")):
                raise
            needs = f"attention {attention!r} cannot be used here ({one_line(error)})"
            raise RefusedError(f"{needs}: install what it needs, or leave --attention out") from error
    if missing := sorted(key for key in report["missing_keys"] if not key.startswith(optional)):
        fix = "download it again, or correct its config.json"
        if (saved := getattr(config, "architectures", None)) and saved[0] != type(model).__name__:
            fix = f"it was saved as {saved[0]}, and is read as {type(model).__name__}. Give another, or {fix}"
        raise ValueError(f"{what} {str(name)!r} lacks {len(missing):,} of its weights, such as {missing[0]!r}: {fix}")
    if not getattr(config, "quantization_config", None):
        with explained(name, what, "weights", trust_remote_code, local), cached_parts(place, local):
            refuse_integers(place, local, revision)
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
