"""Making and loading CEPE models; `saving` writes them.

A whole model lies in the layout of the authors' checkpoints: the decoder's config.json with flat fields, weights
`model.layers.{i}.cross_attn.*` and `encoder.*`. An adapter holds only what was added, and the base's name, revision
and a hash of its weights, by which another base is refused.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import cached_file

from farspan.cepe import config as fields
from farspan.cepe import encoder as encoders
from farspan.cepe import surgery
from farspan.cepe.model import Cepe, cepe_class
from farspan.cepe.saving import ADAPTER, is_added, weights_hash


def from_base(
    base: Any,
    encoder: Any,
    *,
    num_cross_attn_layers: int | None = None,
    num_cross_attn_hidden_states: int = 1,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
    encoder_tokenizer: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **hub: Any,
) -> Any:
    """A CEPE model that says exactly what its base says, until it is trained (Yen et al. 2024, section 2).

    Args:
        base: a causal model of transformers, or its folder or hub id. A model that is given becomes the CEPE model: no
            weight is copied.
        encoder: a model, a config (random weights), or a folder or hub id, such as one of masked-language training.
        num_cross_attn_layers: layers, counted from the last, that read the context; default all.
        num_cross_attn_hidden_states: 1: all read the encoder's last states; else each reads states of its own.
        dtype: of what is added; default the base's. torch.float32 over a base in bfloat16 trains well.
        tokenizer, encoder_tokenizer: compared if both are known; default those that lie with base and encoder.
        revision, trust_remote_code, hub: of the base, as in transformers' `from_pretrained`.

    Raises:
        ValueError: a model that cannot be loaded or extended, an encoder that does not look both ways, numbers that
            do not fit, or tokenizers that disagree.
    """
    if isinstance(base, str | Path):
        tokenizer = tokenizer or _tokenizer(base, revision, trust_remote_code)
    if isinstance(encoder, str | Path):
        encoder_tokenizer = encoder_tokenizer or _tokenizer(encoder, None, trust_remote_code)
    if tokenizer is not None and encoder_tokenizer is not None:
        check_tokenizers(tokenizer, encoder_tokenizer)
    base = _base(base, revision, trust_remote_code, hub)
    if isinstance(base, Cepe):
        raise ValueError(f"{_name(base)} is a CEPE model already: give the decoder it was made from")
    dtype = dtype or base.dtype
    encoder = encoders.load(encoder, dtype=dtype, trust_remote_code=trust_remote_code)
    name = {"name": _name(base), "revision": getattr(base.config, "_commit_hash", None) or revision}
    model = _extended(base, encoder, num_cross_attn_layers, num_cross_attn_hidden_states, dtype)
    model.config.cepe_base = name
    surgery.initialise(model)
    surgery.check_sites(model, model.reading)
    return model


def from_pretrained(
    path: str | Path,
    *,
    base: Any = None,
    dtype: str | torch.dtype = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    **hub: Any,
) -> Any:
    """A CEPE model from a folder or hub id: the authors' checkpoints, `save_pretrained`'s, and adapters.

    Args:
        base: for an adapter: the model, its folder or hub id; default the one it names.
        dtype: "auto" is the checkpoint's own.
        hub: passed on to transformers, such as device_map="auto", attn_implementation, quantization_config. Weights in
            .bin files are read with weights_only=True.

    Raises:
        ValueError: no CEPE model, weights that are missing, damaged or unknown, or an adapter for another base.
    """
    place = str(Path(path).expanduser()) if Path(path).expanduser().is_dir() else str(path)
    common = {"revision": revision, "trust_remote_code": trust_remote_code}
    with _explained(path):
        config = AutoConfig.from_pretrained(place, **common)
    if not fields.is_cepe(config):
        raise ValueError(f"{path} is no CEPE model: its config.json has no do_cross_attention and encoder_config")
    fields.check(config)
    if getattr(config, "cepe_weights", None) is not None:
        return _from_adapter(place, config, base, dtype, revision, trust_remote_code, hub)
    if base is not None:
        raise ValueError(f"{path} holds a whole CEPE model, its base included: leave out base")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{path}: {type(config).__name__} belongs to no causal language model known to transformers")
    kind = cepe_class(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    with _explained(path):
        model, report = kind.from_pretrained(  # type: ignore[attr-defined]
            place, config=config, dtype=dtype, output_loading_info=True, **common, **hub
        )
    unknown = [key for key in report["unexpected_keys"] if is_added(key)]
    for keys, what in ((report["missing_keys"], "lacks weights"), (unknown, "has weights without a place")):
        if keys:
            raise ValueError(f"{path} {what}, {len(keys)} in all, such as {sorted(keys)[0]}")
    model.freeze_base()
    return model.eval()


def check_tokenizers(tokenizer: Any, encoder_tokenizer: Any) -> None:
    """Both must give a text the same ids; the encoder's may know more, such as [MASK].

    Raises:
        ValueError: a token that they number differently.
    """
    known = encoder_tokenizer.get_vocab()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if known.get(token) != index:
            theirs = f"has it as {known[token]}" if token in known else "does not know it"
            raise ValueError(
                f"decoder and encoder have tokenizers that disagree: token {token!r} is {index} for the decoder, and "
                f"the encoder's {theirs}. Train an encoder on the decoder's tokenizer (farspan train mlm)"
            )


def _extended(base: Any, encoder: Any, layers: int | None, states: int, dtype: torch.dtype) -> Any:
    """The base as a CEPE model, its cross-attention of random weights."""
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
    place: str,
    config: Any,
    base: Any,
    dtype: str | torch.dtype,
    revision: str | None,
    trust_remote_code: bool,
    hub: dict[str, Any],
) -> Any:
    made_for = config.cepe_base
    if base is None and made_for["name"] is None:
        raise ValueError(f"adapter {place} does not say which base it is for: give base=")
    its_revision = made_for["revision"] if base is None else None
    given = made_for["name"] if base is None else base
    try:
        base = _base(given, its_revision, trust_remote_code, {"dtype": dtype} | hub)
    except ValueError as error:
        raise ValueError(
            f"adapter {place} needs its base: give base=, or correct cepe_base in config.json. {error}"
        ) from error
    found, wanted = weights_hash(base), config.cepe_weights
    if (
        found != wanted if found and wanted else _name(base) != made_for["name"]
    ):  # quantised: only names can be compared
        its = made_for["name"] + (f" ({made_for['revision']})" if made_for["revision"] else "")
        raise ValueError(f"adapter {place} was made for {its}, not for {_name(base)}: their weights differ")
    with _explained(place):
        tensors = load_file(cached_file(place, ADAPTER, revision=revision))
    added = next(iter(tensors.values())).dtype if isinstance(dtype, str) else dtype
    if getattr(config, "added_dtype", None) == "float32":
        added = torch.float32
    encoder = encoders.build(config.encoder_config)
    states = config.num_cross_attn_hidden_states
    model = _extended(base, encoder, config.num_cross_attn_layers, states, added)
    model.config.cepe_base = made_for
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    missing = [key for key in missing if is_added(key)]
    if missing or unexpected:
        wrong = (missing + unexpected)[0]
        raise ValueError(f"the weights of adapter {place} are not those its config.json describes: {wrong}")
    return model.eval()


def _base(base: Any, revision: str | None, trust_remote_code: bool, hub: dict[str, Any]) -> Any:
    if isinstance(base, PreTrainedModel):
        return base
    place = str(Path(base).expanduser())
    with _explained(base):
        return AutoModelForCausalLM.from_pretrained(
            place, revision=revision, trust_remote_code=trust_remote_code, **{"dtype": "auto"} | hub
        ).eval()


def _name(model: Any) -> str | None:
    return getattr(model.config, "_name_or_path", None) or None


def _tokenizer(place: str | Path, revision: str | None, trust_remote_code: bool) -> Any:
    try:
        return AutoTokenizer.from_pretrained(
            str(Path(place).expanduser()), revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError):
        return None  # models are also kept without one; ids the encoder does not know are refused when they come


class _explained:  # noqa: N801
    """Errors of loading as ValueErrors that name what was loaded."""

    def __init__(self, what: str | Path) -> None:
        self.what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SafetensorError):
            raise ValueError(f"the weights of {self.what} are damaged or incomplete: {error}") from error
        if isinstance(error, OSError | ImportError):
            raise ValueError(f"{self.what} cannot be loaded: {error}") from error
