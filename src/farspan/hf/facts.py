"""Facts about a model that measuring and training need: devices, limits, sizes, the first non-finite output."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from farspan.hf.cache import tensors
from farspan.hf.decoder import decoder_of

# Names of tables of positions in decoders: learned, or computed once for a fixed number of positions
POSITION_TABLES = ("wpe", "embed_positions", "position_embedding", "position_embeddings", "positions_embed")
COMPUTED_TABLES = ("embed_positions", "pos_encoding")
# Fields of configs: the number of a layer's experts, and how many of them a token uses
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
USED_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")
# Fields of configs: the number of heads of an indexer (sparse attention), and their dimension
INDEX_HEADS, INDEX_DIMENSION = ("index_n_heads", "indexer_n_heads"), ("index_head_dim", "indexer_head_dim")
# Model types with properties that no field of their config shows:
ALL_EXPERTS = ("llama4_text",)  # the code computes every expert for every token
ATTENDING_TWICE = ("diffllama",)  # each layer attends twice, with the values of one half of the heads at a time
DOUBLED_KEYS = ("mimo_v2_flash",)  # layers with a sliding window have twice as many key heads
SLIDING_KINDS = ("sliding_attention", "hybrid_sliding")  # kinds of layers with a sliding window
WITHOUT_INDEXER = (*SLIDING_KINDS, "full_attention", "heavily_compressed_attention")


def input_device(model: Any) -> torch.device:
    """Return the device for token ids; with weights offloaded by accelerate, the device they are loaded to."""
    embeddings = model.get_input_embeddings()
    execution = getattr(getattr(embeddings, "_hf_hook", None), "execution_device", None)
    return embeddings.weight.device if execution is None else torch.device(execution)


def offloaded(model: Any, name: str) -> Tensor | None:
    """Return the values of a weight that accelerate has moved to the CPU or to disk; None if it has none of that name,
    such as of a model without weights."""
    module, _, key = name.rpartition(".")
    hook = getattr(model.get_submodule(module), "_hf_hook", None)
    maps = (getattr(one, "weights_map", None) for one in getattr(hook, "hooks", [hook]))
    return next((weights[key] for weights in maps if weights is not None and key in weights), None)


def position_limit(model: Any) -> int | None:
    """Return the longest text that a decoder with a table of positions can read, in tokens; None if positions are
    unlimited. The positions of a vision tower or an encoder do not count."""
    decoder = decoder_of(model)
    for name, module in decoder.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in POSITION_TABLES:
            return module.num_embeddings - int(getattr(module, "offset", 0))
        for table in (getattr(module, name, None) for name in COMPUTED_TABLES):
            if isinstance(table, Tensor):
                return len(table)
    if hasattr(decoder, "build_mpt_alibi_tensor"):  # MPT computes biases for this many keys, then takes a part of them
        return int(decoder.config.max_seq_len)
    return None


def key_bytes_by_window(model: Any) -> dict[int | None, int]:
    """Return the bytes of one token's keys and values, from the config, by the window of the layers that hold them in
    tokens (None: no window)."""
    held: dict[int | None, int] = {}
    for cost in _attention_costs(model.config.get_text_config(decoder=True)):
        held[cost.window] = held.get(cost.window, 0) + math.ceil(cost.held * model.dtype.itemsize)
    return held


def heads_of(config: Any) -> tuple[int, int]:
    """Return the number of query heads, 0 for a model without attention, and the dimension of their queries and keys;
    if it differs between layers, that of the first."""
    return _heads(layer_configs(config)[0])


def _heads(config: Any) -> tuple[int, int]:
    """Return `heads_of` of one layer's config."""
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return 0, 0
    if getattr(config, "kv_lora_rank", None):  # its head_dim is that of the rotated part
        return heads, config.qk_nope_head_dim + config.qk_rope_head_dim
    named = (getattr(config, name, None) for name in ("head_dim", "kv_channels"))  # the second of JetMoE
    return heads, next(filter(None, named), config.hidden_size // heads)


class _AttentionCost(NamedTuple):
    """The cost of one attention layer, or of its near or its far keys."""

    window: int | None  # tokens, the query's own included; None: the whole text
    per_pair: float  # multiplications and additions per query-key pair
    held: float  # numbers in the cache per token


def _attention_costs(config: Any) -> list[_AttentionCost]:
    """Return the cost of each attention layer. A layer of DeepSeek V4 can have two: of its near keys, and of compressed
    keys, each for several tokens of the whole text."""
    layers, shared = layer_configs(config), getattr(config, "num_kv_shared_layers", None) or 0
    rates = getattr(config, "compress_rates", None) or {}  # tokens of a compressed key, by kind of layer
    costs = []
    for index, window in _windows(config).items():
        per_pair, held = _per_pair(layers[index]), float(_held(layers[index]))
        if rates and (rate := rates.get(config.layer_types[index])):
            near = _with(layers[index], {"index_n_heads": 0})
            keys = _held(near) / 2  # which are also the values
            costs.append(_AttentionCost(config.sliding_window, _per_pair(near), keys))
            per_pair, held = per_pair / rate, (held - keys) / rate
        costs.append(_AttentionCost(window, per_pair, held if index < len(layers) - shared else 0))
    return costs


def layer_configs(config: Any) -> list[Any]:
    """Return the config of each layer, with this layer's heads. They differ in Gemma 4, whose global layers have larger
    heads. A layer without an indexer has `index_n_heads` 0."""
    count = config.num_hidden_layers
    layers = list(config.per_layer_config) if getattr(config, "is_heterogeneous", False) else [config] * count
    return [_with(layer, _own_fields(config, index)) for index, layer in enumerate(layers)]


def _own_fields(config: Any, index: int) -> dict[str, int]:
    """Return the fields of one layer that a config has under other names or only in its code."""
    kinds, indexers, heads = (
        getattr(config, name, None) for name in ("layer_types", "indexer_types", "num_attention_heads_per_layer")
    )
    kind, own = kinds[index] if kinds else None, dict[str, int]()
    if heads:  # Laguna
        own["num_attention_heads"] = heads[index]
    if kind in SLIDING_KINDS:
        fields = ("num_attention_heads", "num_key_value_heads", "head_dim")
        own |= {name: value for name in fields if (value := getattr(config, f"swa_{name}", None))}  # Inkling
        if config.model_type in DOUBLED_KEYS:
            own["num_key_value_heads"] = 2 * config.num_key_value_heads
    if kind in WITHOUT_INDEXER or (indexers and indexers[index] == "shared"):
        own["index_n_heads"] = 0
    return own


def _with(config: Any, fields: dict[str, int]) -> Any:
    """Return a config with some fields changed; those that it lacks are left out."""
    fields = {name: value for name, value in fields.items() if getattr(config, name, value) != value}
    if fields:
        config = copy(config)
        for name, value in fields.items():
            setattr(config, name, value)
    return config


def _per_pair(config: Any) -> float:
    """Return a layer's multiplications and additions per query-key pair: of its scores and sums, and of the scores of
    an indexer (sparse attention)."""
    heads, dim = _heads(config)
    values = getattr(config, "v_head_dim", None) or dim
    times = 2.0 if config.model_type in ATTENDING_TWICE else 1.0
    every = getattr(config, "indexer_compress_ratio", None) or 1  # an indexer of Qwen4-Exp has a key for so many tokens
    indexer = _count(config, INDEX_HEADS) * (_count(config, INDEX_DIMENSION) + 1) / every
    return 2.0 * heads * (dim + values) * times + 2.0 * indexer


def _held(config: Any) -> int:
    """Return how many numbers a layer caches per key: its keys and values, of one head for multi-query attention.
    Multi-head latent attention (MLA) caches a compressed latent and the rotated part of one key; all heads share them.
    An indexer has one key of its own."""
    index = int(_count(config, INDEX_DIMENSION)) if _count(config, INDEX_HEADS) else 0
    if rank := getattr(config, "kv_lora_rank", None):
        return int(rank + config.qk_rope_head_dim + index)
    heads, dim = _heads(config)
    # Falcon's new architecture repeats shared keys before it caches them
    one_head = getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False)
    key_heads = 1 if one_head else getattr(config, "num_key_value_heads", None) or heads
    return int(key_heads * (dim + (getattr(config, "v_head_dim", None) or dim)) + index)


def flops(model: Any) -> tuple[float, dict[int | None, float], float]:
    """Return the multiplications and additions per token fed; per query-key pair, by the attention layers' window in
    tokens (None: no window); and per position at which the output head runs.

    Counts all weights that read text outside of embeddings and output head (of experts, the share that a token uses,
    or would use if all were used equally) and the attention's scores and sums, but no activations.
    """
    config = model.config.get_text_config(decoder=True)
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head = model.get_output_embeddings()
    left_out = {id(p) for module in (*tables, head) if module is not None for p in module.parameters()}
    read = {id(p) for p in decoder_of(model).parameters()}
    left_out |= {id(p) for p in model.base_model.parameters()} - read  # of a vision tower
    experts = _count(config, EXPERTS)
    used = 0.0 if config.model_type in ALL_EXPERTS else _count(config, USED_EXPERTS)
    idle = getattr(config, "zero_expert_num", None) or 0  # LongCat's experts without weights
    active = used * experts / (experts + idle) if used and experts else 0.0  # experts computed for a token; 0: all
    body = sum(
        p.numel() * (_share(name, p, experts, active) if active else 1.0)
        for name, p in model.named_parameters(remove_duplicate=False)  # Zamba's layers share weights
        if id(p) not in left_out
    )
    if stack := getattr(config, "num_layers_per_stack", None):  # HRM-text runs the layers of its two stacks repeatedly
        body *= config.num_hidden_layers / (2 * stack)
    per_pair: dict[int | None, float] = {}
    for cost in _attention_costs(config):
        per_pair[cost.window] = per_pair.get(cost.window, 0.0) + cost.per_pair
    return 2.0 * body, per_pair, 2.0 * config.hidden_size * model.get_input_embeddings().num_embeddings


def _share(name: str, weight: Tensor, experts: float, active: float) -> float:
    """Return the share of a weight that a token uses: of all experts in one weight (LongCat has more than `experts`,
    some without effect), of one of them, or all of it."""
    if weight.ndim == 3 and (".experts." in name or len(weight) == experts):
        return active / len(weight)
    return active / experts if ".experts." in name else 1.0


def _count(config: Any, names: Sequence[str]) -> float:
    """Return the first of these fields of a config, 0 without any; of a list by layer (HunYuan), the mean."""
    configs = (config, getattr(config, "ffn_config", None))  # the second of DBRX
    found = next((value for one in configs for name in names if (value := getattr(one, name, None))), 0)
    return float(sum(found) / len(found) if isinstance(found, list) else found)


def _windows(config: Any) -> dict[int, int | None]:
    """Return the window of each attention layer in tokens, the query's own included, by layer; None: the whole text."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return dict.fromkeys(range(config.num_hidden_layers), window)
    chunk = getattr(config, "attention_chunk_size", None)
    windows = dict.fromkeys(SLIDING_KINDS, window) | {"chunked_attention": chunk}
    others = ("linear_attention", "conv", "moe", "mlp")
    return {index: windows.get(kind) for index, kind in enumerate(kinds) if kind not in others}


@contextmanager
def first_not_finite(model: nn.Module) -> Iterator[Callable[[], str]]:
    """Watch the outputs of every module inside the `with`. Yield a function that returns the name of the first module
    whose output is not finite, "" if there is none."""
    found: list[str] = []

    def watching(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def watch(module: nn.Module, given: Any, result: Any) -> None:
            floats = (t for t in tensors(result) if t.is_floating_point())
            if not found and any(not bool(t.isfinite().all()) for t in floats):
                found.append(name)

        return watch

    hooks = [module.register_forward_hook(watching(name)) for name, module in model.named_modules() if name]
    try:
        yield lambda: found[0] if found else ""
    finally:
        for hook in hooks:
            hook.remove()


def checkpoint_activations(model: Any) -> None:
    """Recompute activations inside layers in the backward pass instead of keeping them."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})  # positional: the parameter's name has changed between versions
