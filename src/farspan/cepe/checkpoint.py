"""Make and load CEPE models; `saving` writes them.

A whole model has the layout of the authors' checkpoints: the decoder's config.json with flat fields, weights
`model.layers.{i}.cross_attn.*` and `encoder.*`. An adapter holds only the added weights, and the base's name, revision
and a hash of its weights. A base with another hash is refused.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import cached_file

from farspan import hf
from farspan.cepe import config as fields
from farspan.cepe import encoder as encoders
from farspan.cepe import surgery
from farspan.cepe.model import CepeModel, cepe_class
from farspan.cepe.saving import ADAPTER, is_added, weights_hash
from farspan.loading import load_config, load_tokenizer, load_weights, locating, own_module
from farspan.loading.errors import RefusedError, explained
from farspan.loading.places import cached_parts, place_of
from farspan.record import changed_fields


def from_base(
    base: Any,
    encoder: Any,
    *,
    num_cross_attn_layers: int | None = None,
    num_cross_attn_hidden_states: int = 1,
    encoder_layers: int | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    **hub: Any,
) -> Any:
    """Return a CEPE model whose outputs equal those of its base until it is trained (Yen et al. 2024, section 2).

    Args:
        base: a causal model of transformers, or its folder or hub id. A given model object itself becomes the CEPE
            model; its weights are not copied.
        encoder: a model, a config (random weights), or a folder or hub id, such as one of masked-language training.
        num_cross_attn_layers: the number of decoder layers, the last ones, that read the context; default all.
        num_cross_attn_hidden_states: 1 (default): all these layers read the encoder's last states. Other values: each
            of them reads the states of a different encoder layer.
        encoder_layers: the number of encoder layers, the first ones, to keep; default all.
        dtype: of the added weights; default the base's. To train over a base in bfloat16, use torch.float32.
        tokenizer: of the base; default that in its folder. It is compared with the one in the encoder's folder, if both
            are known.
        revision, hub: of the base, as in transformers' `from_pretrained`.
        trust_remote_code, allow_pickle: of base and encoder, as in `farspan.load`.

    Raises:
        ValueError: a model that cannot be loaded or extended, an encoder that is not bidirectional, a number of layers
            or states that decoder or encoder does not have, or tokenizers with different ids for a token.
    """
    if isinstance(base, str | Path):
        tokenizer = tokenizer or tokenizer_in(base, revision, trust_remote_code, **locating(hub))
    of_encoder = tokenizer_in(encoder, None, trust_remote_code) if isinstance(encoder, str | Path) else None
    if tokenizer is not None and of_encoder is not None:
        check_tokenizers(tokenizer, of_encoder)
    base = _base(base, revision, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle, **hub)
    if isinstance(base, CepeModel):
        raise ValueError(f"{_name(base)} is a CEPE model already: give the decoder it was made from")
    dtype = dtype or base.dtype
    common: dict[str, Any] = {"trust_remote_code": trust_remote_code, "allow_pickle": allow_pickle}
    encoder = encoders.load(encoder, dtype=dtype, layers=encoder_layers, **common)
    name = {"name": _name(base), "revision": getattr(base.config, "_commit_hash", None) or revision}
    model = _extended(base, encoder, num_cross_attn_layers, num_cross_attn_hidden_states, dtype)
    model.config.cepe_base = name
    surgery.initialise(model)
    surgery.check_sites(model)
    return model


def from_pretrained(
    path: str | Path,
    *,
    base: Any = None,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    **hub: Any,
) -> Any:
    """Load a CEPE model from a folder or hub id: the authors' checkpoints, `save_pretrained`'s, and adapters.

    Args:
        base: of an adapter: a model, or its folder or hub id; default the base that the adapter names.
        dtype: of the weights; "auto" (default) keeps the dtype of the checkpoint. Added weights that were made in
            float32 over a base in 16 bits stay float32.
        revision, trust_remote_code: as in transformers' `from_pretrained`.
        allow_pickle: also read .bin weights, with `weights_only=True`; by default only safetensors are read.
        hub: passed on to transformers, such as device_map="auto", attn_implementation, quantization_config.

    Raises:
        ValueError: not a CEPE model; weights that are missing, damaged or unexpected; an adapter of another base; or
            `base` given for a whole CEPE model.
    """
    common: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    config = load_config(path, **common, **locating(hub))
    if own_module(config) is None:
        raise ValueError(f"{path} is not a CEPE model: its config.json has no do_cross_attention and encoder_config")
    with explained(path, "model", "config.json", None):
        fields.check(config)
    if getattr(config, "cepe_weights", None) is not None:
        options = {"trust_remote_code": trust_remote_code, "allow_pickle": allow_pickle} | hub
        return _from_adapter(str(path), config, base, dtype, revision, options)
    if base is not None:
        raise ValueError(f"{path} holds a whole CEPE model, its base included: leave out base")
    with explained(path, "model", "config.json", None):
        kind = class_of(config)
    model, _ = load_weights(kind, path, config, dtype=dtype, allow_pickle=allow_pickle, **common, **hub)
    model.freeze_base()
    return model


def class_of(config: Any) -> Any:
    """Return the CEPE model class for a decoder's config.

    Raises:
        RefusedError: transformers has no causal language model for the config.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise RefusedError(f"{type(config).__name__} belongs to no causal language model known to transformers")
    return cepe_class(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])


def check_tokenizers(tokenizer: Any, encoder_tokenizer: Any) -> None:
    """Raise ValueError, with the first token, unless each token of the decoder has the same id in the encoder's
    tokenizer, which may have more tokens, such as [MASK]."""
    known = encoder_tokenizer.get_vocab()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if known.get(token) != index:
            theirs = f"has id {known[token]}" if token in known else "is missing"
            raise ValueError(
                f"decoder and encoder have different tokenizers: token {token!r} has id {index} in the decoder's and "
                f"{theirs} in the encoder's. Use an encoder that was trained with the decoder's tokenizer"
            )


def _extended(base: Any, encoder: Any, layers: int | None, states: int, dtype: torch.dtype) -> Any:
    """Turn the base itself into a CEPE model whose cross-attention has random weights."""
    if offloaded := [name for name, weight in base.named_parameters() if weight.is_meta]:
        raise ValueError(
            f"{_name(base)} has weights that are offloaded, such as {offloaded[0]}: load it without offloading"
        )
    config = deepcopy(base.config)
    fields.extend(config, encoder.config, layers, states)
    if dtype == torch.float32 and base.dtype != torch.float32:
        config.added_dtype = "float32"
    kind: Any = type(base)
    before = base.config, kind
    base.config, base.__class__ = config, cepe_class(kind)
    try:
        base.extend(encoder.to(base.get_input_embeddings().weight.device, dtype))
    except ValueError:
        base.config, base.__class__ = before
        del base.encoder, base.reading
        raise
    for layer in surgery.layers_of(base):
        if hasattr(layer, "cross_attn"):
            own = next(p for name, p in layer.named_parameters() if not name.startswith("cross_attn"))
            layer.cross_attn.to(own.device, dtype)
    return base.train(base.training)


def _from_adapter(
    place: str, config: Any, base: Any, dtype: str | torch.dtype, revision: str | None, options: dict[str, Any]
) -> Any:
    made_for = config.cepe_base
    if base is None and made_for["name"] is None:
        raise ValueError(f"adapter {place} does not name its base: give base=")
    given, its_revision = (made_for["name"], made_for["revision"]) if base is None else (base, None)
    local = locating(options)
    options.pop("subfolder", None)  # the adapter's, not the base's
    try:
        base = _base(given, its_revision, dtype=dtype, **options)
    except ValueError as error:
        raise ValueError(
            f"adapter {place} needs its base: give base=, or correct cepe_base in config.json. {error}"
        ) from error
    _refuse_other_base(place, config, base)
    folder = place_of(place)
    with explained(place, "adapter", ADAPTER, None, local), cached_parts(folder, local):
        tensors = load_file(cached_file(folder, ADAPTER, revision=revision, **local))
    if getattr(config, "added_dtype", None) == "float32":
        dtype = torch.float32
    elif isinstance(dtype, str):
        dtype = next(iter(tensors.values())).dtype if dtype == "auto" else getattr(torch, dtype)
    encoder, states = encoders.build(config.encoder_config), config.num_cross_attn_hidden_states
    model = _extended(base, encoder, config.num_cross_attn_layers, states, dtype)
    model.config.cepe_base = made_for
    if (order := fields.order_of(config)) != "none":
        model.add_order(order, layers=config.cepe_order_layers, longest=config.cepe_order_range)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    missing = [key for key in missing if is_added(key)]
    if missing or unexpected:
        wrong = (missing + unexpected)[0]
        raise ValueError(f"the weights of adapter {place} are not those its config.json describes: {wrong}")
    return model.eval()


def _refuse_other_base(place: str, config: Any, base: Any) -> None:
    """Raise ValueError if `base` is not the one that an adapter with this config was made for."""
    made_for, its_hash = config.cepe_base, getattr(config, "cepe_weights_by_row", None)
    by_row = its_hash is not None  # older versions did not record it
    hashes = weights_hash(base, by_row=by_row), its_hash if by_row else config.cepe_weights
    names = _name(base), made_for["name"]
    one, other = hashes if all(hashes) else names  # quantised weights have no hash
    if one != other:
        its = made_for["name"] + (f" ({made_for['revision']})" if made_for["revision"] else "")
        raise ValueError(f"adapter {place} was made for {its}, not for {_name(base)}: their weights differ")
    if not all(hashes):
        return  # a GGUF file holds the same config with rounded numbers
    before, now = (hf.scoring_fields(one) for one in (config, base.config))
    if different := changed_fields({name: value for name, value in before.items() if name not in fields.FIXED}, now):
        raise ValueError(
            f"adapter {place} was trained beside {_name(base)} with another config: {different}. Restore the base's "
            "config.json, or give base="
        )


def _base(
    base: Any, revision: str | None, *, trust_remote_code: bool, dtype: str | torch.dtype = "auto", **options: Any
) -> Any:
    """Return `base` if it is a model; else load it."""
    if isinstance(base, PreTrainedModel):
        return base
    common: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    config = load_config(base, **common, **locating(options))
    return load_weights(AutoModelForCausalLM, base, config, dtype=dtype, **common, **options)[0]


def _name(model: Any) -> str | None:
    return getattr(model.config, "_name_or_path", None) or None


def tokenizer_in(place: str | Path, revision: str | None, trust_remote_code: bool | None, **local: Any) -> Any:
    """Return the tokenizer that comes with a model; None if its folder has none."""
    folder = Path(place_of(place), local.get("subfolder", ""))
    if folder.is_dir() and not any(folder.glob("*token*")):
        return None  # a model can be saved without a tokenizer; `encode` refuses ids that the encoder does not have
    return load_tokenizer(place, revision=revision, trust_remote_code=trust_remote_code, **local)
