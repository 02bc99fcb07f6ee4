"""A model in the middle of a text."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from farspan.hf.attention import CustomAttention, StreamAttentionState
from farspan.hf.cache import BufferLayer, cloned, new_cache, saved, tensors
from farspan.hf.decoder import forward
from farspan.hf.prefix import in_two_parts

# arguments of `forward` for a cache or state; the last is RWKV's
STATE_NAMES = ("past_key_values", "cache_params", "state")


class Stream:
    """A causal model in the middle of a text: the cache or state that it passes from one chunk to the next.

    The rows of a batch are texts of one length, without padding. `capacity`: tokens to allocate for at once; more can
    be read, but the tokens held are then copied. `attention`: replaces the model's own.
    """

    def __init__(self, model: Any, capacity: int = 0, attention: CustomAttention | None = None) -> None:
        self.model = model
        self.attention = attention
        self.parameters = inspect.signature(model.forward).parameters
        names = [name for name in STATE_NAMES if name in self.parameters]
        if not names:
            raise TypeError(f"{type(model).__name__}.forward takes none of {', '.join(STATE_NAMES)}")
        self.state_name = names[0]
        self.state: Any = None if self.state_name == "state" else self._new_cache(capacity)
        self.num_seen = 0
        self.shift = 0  # position of the next token minus `num_seen`
        self.output: Any = None
        self.reading = StreamAttentionState()

    def _new_cache(self, capacity: int) -> Any:
        layers, shape = ([], None) if self.attention is None else (self.attention.layers, self.attention.shape)
        return new_cache(self.model, capacity, layers, shape)

    def step(self, ids: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time hidden"]:
        """Feed the next tokens; return the last hidden states, from which `logits` computes logits."""
        if self.state_name == "state" and ids.shape[1] == 1 and len(ids) > 1:
            return self._step_row_by_row(ids)
        arguments = {self.state_name: self.state, "use_cache": True}
        self.reading.start = self.num_seen
        with in_two_parts() if self.attention is None else self.attention.reading(self.reading):
            self.output = forward(self.model, ids, self.num_seen + self.shift, arguments, self.parameters)
        if self.state_name == "state":
            self.state = self.output.state
        self.num_seen += ids.shape[1]
        return self.output[0]

    def skip(self, num_tokens: int) -> None:
        """Count this many tokens as read, with random keys and values: later steps take as long as after a real text,
        but their results are meaningless."""
        made: dict[tuple[int, ...], Tensor] = {}

        def like(held: Tensor) -> Tensor:
            shape = (1, *held.shape[1:-2], num_tokens, held.shape[-1])
            if shape not in made:
                made[shape] = torch.randn(shape, dtype=held.dtype, device=held.device)
            return made[shape].expand(held.shape[0], *shape[1:])

        for layer in () if self.state_name == "state" else self.state.layers:
            if isinstance(layer, DynamicLayer) and layer.keys is not None:
                layer.update(like(layer.keys), like(layer.values))
        self.num_seen += num_tokens

    def _step_row_by_row(self, ids: Tensor) -> Tensor:
        """Feed one token to each of several rows of RWKV, whose own code would mix the rows (transformers 5.23)."""
        whole, start, hidden, states = self.state, self.num_seen, [], []
        for row in range(len(ids)):
            self.num_seen = start
            self.state = None if whole is None else [part[row : row + 1] for part in whole]
            hidden.append(self.step(ids[row : row + 1]))
            states.append(self.state)
        self.state = [torch.cat(parts) for parts in zip(*states, strict=True)]
        return torch.cat(hidden)

    @property
    def can_branch(self) -> bool:
        """Whether the state is only keys and values of whole texts, as `branch` needs."""
        plain = self.attention is None and self.state_name == "past_key_values"
        return plain and all(isinstance(layer, BufferLayer) for layer in self.state.layers)

    def branch(self, ids: Int[Tensor, "branches batch time"]) -> Float[Tensor, "branches batch time hidden"]:
        """Feed several continuations of the text in one forward; each sees the text and itself. Within `unchanged`."""
        count, batch, time = ids.shape
        rows = ids.transpose(0, 1).reshape(batch, count * time)
        own = torch.block_diag(*[torch.ones(time, time, device=ids.device).tril()] * count)
        mask = torch.zeros(count * time, self.num_seen + count * time, dtype=self.model.dtype, device=ids.device)
        mask[:, self.num_seen :].masked_fill_(own == 0, torch.finfo(self.model.dtype).min)
        arguments = {self.state_name: self.state, "use_cache": True, "attention_mask": mask.expand(batch, 1, -1, -1)}
        positions = (self.num_seen + torch.arange(time, device=ids.device)).repeat(count)
        with in_two_parts():
            self.output = forward(self.model, rows, positions, arguments, self.parameters)
        return self.output[0].reshape(batch, count, time, -1).transpose(0, 1)

    def evict(self) -> None:
        """Drop the keys that the method does not choose. Tokens fed afterwards see the chosen keys and each other."""
        assert self.attention is not None
        assert self.attention.eviction is not None
        layers, positions = self.state.layers, dict[int, Tensor]()  # one by one, so that two caches never exist
        for index, last in self.reading.last_queries.items():
            keys, values = layers[index].keys, layers[index].values
            call = replace(last, key=keys, value=values, start=self.num_seen - last.query.shape[3])
            if (chosen := self.attention.eviction.choose(call)) is not None:
                keys, values = (x.gather(2, chosen[..., None].expand(-1, -1, -1, x.shape[3])) for x in (keys, values))
                layers[index] = BufferLayer.of(keys, values, self.num_seen)
                positions[index] = (chosen + call.num_missing).int()
        self.reading = StreamAttentionState(positions=positions, evicted=True)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Drop the tokens fed in the block when it ends, also after an error. Copies no keys."""
        num_seen, has_cache = self.num_seen, self.state_name != "state"
        turned, self.reading.turned = self.reading.turned, {}
        if has_cache:
            before = [layer.length if isinstance(layer, BufferLayer) else saved(layer) for layer in self.state.layers]
        else:
            before = cloned(self.state)
        try:
            yield
        finally:
            self.num_seen = num_seen
            self.reading.turned = turned
            if has_cache:
                self._restore(before)
            else:
                self.state = before

    def _restore(self, before: list[Any]) -> None:
        del self.state.layers[len(before) :]  # layers that were created with their first token
        for layer, value in zip(self.state.layers, before, strict=True):
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
        """Bytes held for this text over all layers, spare capacity included."""
        values = self.state if self.state_name == "state" else [vars(layer) for layer in self.state.layers]
        queries = [call.query for call in self.reading.last_queries.values()]
        held = tensors([values, queries, self.reading.positions])
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
        return sum(storages.values())
