"""The only file that reaches into transformers: a model's cache or recurrent state, its head, its limits."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

STATE_NAMES = (
    "past_key_values",
    "cache_params",
    "state",
)  # how models call what they carry; the last is RWKV's
POSITION_TABLES = ("wpe", "embed_positions", "position_embedding", "position_embeddings")


class BufferLayer(DynamicLayer):
    """Keys and values of one layer in a buffer with room to grow.

    Reading n tokens in chunks of c copies O(n) keys where concatenation copies O(n² / c), and forgetting the
    last tokens is setting `length` back.
    """

    def __init__(self, capacity: int = 0, **kwargs: Any) -> None:
        super().__init__()
        self.capacity = capacity  # tokens to make room for at the first one
        self.length = 0
        self.key_buffer: Tensor | None = None
        self.value_buffer: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[-2]
        self.key_buffer = self._write(self.key_buffer, key_states, end)
        self.value_buffer = self._write(self.value_buffer, value_states, end)
        self.length = end
        self.keys, self.values = self.key_buffer[..., :end, :], self.value_buffer[..., :end, :]
        return self.keys, self.values

    def _write(self, buffer: Tensor | None, states: Tensor, end: int) -> Tensor:
        if buffer is None or end > buffer.shape[-2]:
            capacity = max(end, self.capacity if buffer is None else buffer.shape[-2] * 5 // 4)
            grown = states.new_empty((*states.shape[:-2], capacity, states.shape[-1]))
            if buffer is not None:
                grown[..., : self.length, :] = buffer[..., : self.length, :]
            buffer = grown
        buffer[..., self.length : end, :] = states
        return buffer

    def get_seq_length(self) -> int:
        return self.length


class Stream:
    """A causal model in the middle of some text: what it carries from one chunk to the next.

    The rows of a batch are texts of one length, without padding. `capacity`: tokens to make room for at once;
    more are taken in, at the price of moving what is there.
    """

    def __init__(self, model: Any, capacity: int = 0) -> None:
        self.model = model
        self.parameters = inspect.signature(model.forward).parameters
        names = [name for name in STATE_NAMES if name in self.parameters]
        if not names:
            raise TypeError(f"{type(model).__name__}.forward takes none of {', '.join(STATE_NAMES)}")
        self.state_name = names[0]
        self.state: Any = None if self.state_name == "state" else _new_cache(model, capacity)
        self.num_seen = 0
        self.output: Any = None

    def step(self, ids: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time hidden"]:
        """Feeds the next tokens; returns the last hidden states, which `logits` turns into logits."""
        if self.state_name == "state" and ids.shape[1] == 1 and len(ids) > 1:
            return self._step_row_by_row(ids)
        arguments = {self.state_name: self.state, "use_cache": True}
        self.output = _base_forward(self.model, ids, self.num_seen, arguments, self.parameters)
        if self.state_name == "state":
            self.state = self.output.state
        self.num_seen += ids.shape[1]
        return self.output[0]

    def _step_row_by_row(self, ids: Tensor) -> Tensor:
        """One token of several rows of RWKV, whose own code then mixes the rows (transformers 5.23)."""
        whole, start, hidden, states = self.state, self.num_seen, [], []
        for row in range(len(ids)):
            self.num_seen = start
            self.state = None if whole is None else [part[row : row + 1] for part in whole]
            hidden.append(self.step(ids[row : row + 1]))
            states.append(self.state)
        self.state = [torch.cat(parts) for parts in zip(*states, strict=True)]
        return torch.cat(hidden)

    def snapshot(self) -> Any:
        """What `restore` needs, once, to forget everything fed after this moment. Holds no copy of any keys."""
        if self.state_name == "state":
            return self.num_seen, _cloned(self.state)
        return self.num_seen, [
            layer.length if isinstance(layer, BufferLayer) else _saved(layer) for layer in self.state.layers
        ]

    def restore(self, snapshot: Any) -> None:
        self.num_seen, saved = snapshot
        if self.state_name == "state":
            self.state = saved
            return
        del self.state.layers[len(saved) :]  # layers that came into being with their first token
        for layer, value in zip(self.state.layers, saved, strict=True):
            if isinstance(layer, BufferLayer):
                layer.length = value
            else:
                layer.__dict__.clear()
                layer.__dict__.update(value)

    @property
    def num_kept(self) -> int:
        """Tokens whose keys are held, largest over layers; 0 for a model that is recurrent throughout."""
        if self.state_name == "state":
            return 0
        kept = [0]
        for layer in self.state.layers:
            if isinstance(layer, BufferLayer):
                kept.append(layer.length)
            elif getattr(layer, "keys", None) is not None:
                kept.append(layer.keys.shape[-2] if layer.keys.dim() > 1 else 0)
        return max(kept)

    @property
    def num_bytes(self) -> int:
        """Held for this text over all layers, spare room included."""
        values = self.state if self.state_name == "state" else [vars(layer) for layer in self.state.layers]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(values)}
        return sum(storages.values())


def plain_hidden(model: Any, ids: Int[Tensor, "batch time"]) -> tuple[Float[Tensor, "batch time hidden"], Any]:
    """The last hidden states of one ordinary forward over a whole text, and the output they came in."""
    parameters = inspect.signature(model.forward).parameters
    output = _base_forward(model, ids, 0, {"use_cache": False}, parameters)
    return output[0], output


def logits(
    model: Any, hidden: Float[Tensor, "batch time hidden"], output: Any
) -> Float[Tensor, "batch time vocabulary"]:
    """The logits of some hidden states that came in `output`, as the model itself computes them.

    The model runs with its decoder standing still and giving `hidden`, so that what some families do behind
    the output matrix (soft caps, scales) is theirs and not repeated here.
    """
    part = copy(output)
    part[next(iter(part.keys()))] = hidden
    any_ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
    with _standing_still(model.get_decoder(), part):
        return model(input_ids=any_ids).logits


def position_limit(model: Any) -> int | None:
    """The longest text a model with learned positions can read; None where positions do not end."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in POSITION_TABLES:
            return module.num_embeddings - int(getattr(module, "offset", 0))
    return None


def length_dependent_rope(model: Any) -> str | None:
    """The RoPE scaling of a model whose rotation depends on how long the text is, so that cached keys go stale."""
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            return str(parameters["rope_type"])
    return None


def input_device(model: Any) -> torch.device:
    """Where token ids go; with weights offloaded by accelerate, where they are brought to."""
    embeddings = model.get_input_embeddings()
    execution = getattr(getattr(embeddings, "_hf_hook", None), "execution_device", None)
    return embeddings.weight.device if execution is None else torch.device(execution)


def key_bytes_per_token(model: Any) -> int:
    """What the keys and values of one token take over all layers, by the config; an upper bound for windows."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return 0
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    return 2 * config.num_hidden_layers * key_value_heads * dim * model.dtype.itemsize


def _base_forward(model: Any, ids: Tensor, start: int, arguments: dict[str, Any], parameters: Any) -> Any:
    if "position_ids" in parameters:
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)
        arguments["position_ids"] = positions.expand(ids.shape[0], -1)
    return model.get_decoder()(input_ids=ids, **arguments)


def _new_cache(model: Any, capacity: int) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    cache.layers = [BufferLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = BufferLayer
    return cache


@contextmanager
def _standing_still(base: nn.Module, output: Any) -> Iterator[None]:
    before = base.__dict__.get("forward")  # accelerate puts its own there
    base.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        if before is None:
            del base.forward
        else:
            base.forward = before


def _saved(layer: Any) -> dict[str, Any]:
    """Sliding layers replace their keys and values at each step, recurrent ones write into their states."""
    return {name: value if name in ("keys", "values") else _cloned(value) for name, value in vars(layer).items()}


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _cloned(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cloned(item) for item in value)
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
