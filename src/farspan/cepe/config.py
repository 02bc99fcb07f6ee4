"""The fields that mark a decoder's config.json as that of a CEPE model.

They are top-level fields of the decoder's config, as in the authors' checkpoints. `model_type` remains the decoder's.
"""

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from farspan.cepe.order import ORDERS
from farspan.specs import check_known

NOT_OF_THE_MODEL = {"architectures", "_name_or_path", "transformers_version", "torch_dtype", "dtype", "model_type"}
FIXED = {  # other fields that the authors' code reads, with the values that describe this model
    "do_cross_attention": True,
    "encoder_is_model": False,
    "train_encoder": True,
    "encode_mode": "context_only",
    "train_batch_mode": "none",
    "offload_hidden_states": False,
    "is_decoder": True,
}


def extend(
    config: PreTrainedConfig, encoder: PreTrainedConfig, num_cross_attn_layers: int | None, num_states: int
) -> None:
    """Write the fields of a CEPE model into a decoder's config.

    Args:
        num_cross_attn_layers, num_states: as in `farspan.cepe.from_base`.

    Raises:
        ValueError: a number of layers or of states that the decoder or the encoder does not have.
    """
    depth = config.get_text_config(decoder=True).num_hidden_layers
    layers = depth if num_cross_attn_layers is None else num_cross_attn_layers
    sizes = {"num_cross_attn_layers": layers, "num_cross_attn_hidden_states": num_states}
    its_encoder = {"encoder_hidden_size": encoder.hidden_size, "encoder_config": encoder.to_dict()}
    config.update(FIXED | sizes | its_encoder)
    check(config)


def check(config: PreTrainedConfig) -> None:
    """Raise ValueError, with the field, its value and the allowed ones, for an unsupported value in a CEPE model's
    config."""
    depth = config.get_text_config(decoder=True).num_hidden_layers
    layers = config.num_cross_attn_layers
    if not 1 <= layers <= depth:
        raise ValueError(f"num_cross_attn_layers = {layers}; the decoder has {depth} layers: give 1 to {depth}")
    for name in ("encoder_is_model", "encode_mode"):
        if (value := getattr(config, name, FIXED[name])) != FIXED[name]:
            raise ValueError(f"{name} = {value!r} is not supported; only {FIXED[name]!r} is")
    states, has = num_states(config), encoder_config(config.encoder_config).num_hidden_layers + 1
    if states > has:
        raise ValueError(
            f"num_cross_attn_hidden_states = {config.num_cross_attn_hidden_states} gives each of {states} layers "
            f"different states, and the encoder has {has}: use num_cross_attn_layers <= {has}"
        )
    if (order := order_of(config)) != "none":
        check_order(order, config.cepe_order_layers, config.cepe_order_range, layers)


def check_order(order: str, ordered: int, longest: int, layers: int) -> None:
    """Raise ValueError for an unknown order (`farspan.cepe.order`), or a number out of range.

    Args:
        ordered: the number of layers that read the order, 1 to `layers`.
        longest: the largest distance in tokens, at least 1.
        layers: the number of layers with cross-attention.
    """
    check_known("order of a CEPE model", order, ORDERS)
    if not 1 <= ordered <= layers:
        raise ValueError(f"{ordered} layers with order: expected 1 to {layers}, the layers with cross-attention")
    if longest < 1:
        raise ValueError(f"an order with a range of {longest} tokens: expected at least 1")


def order_of(config: PreTrainedConfig) -> str:
    """Return the order of a model's context: none, position or age (`farspan.cepe.order`). A config without the field,
    such as a published one, has none."""
    return getattr(config, "cepe_order", "none")


def num_states(config: PreTrainedConfig) -> int:
    """Return the number of encoder layers whose states are kept: 1, or one for each layer with cross-attention."""
    return 1 if getattr(config, "num_cross_attn_hidden_states", 1) == 1 else config.num_cross_attn_layers


def encoder_config(fields: dict[str, Any]) -> PreTrainedConfig:
    """Return the encoder's config from its saved fields. Fields that do not describe the model, such as those for
    generation that older versions of transformers saved, are left out."""
    kind = CONFIG_MAPPING[fields.get("model_type", "llama")]
    known = set(kind().to_dict()) | {"rope_theta", "rope_scaling", "is_causal"}
    config = kind(**{key: value for key, value in fields.items() if key in known - NOT_OF_THE_MODEL})
    config.is_causal = False  # makes a decoder's layers bidirectional in transformers
    config.use_cache = False
    return config
