"""The only file that reaches into transformers: a model's cache or recurrent state, attention, RoPE, head, limits."""

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import count
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import flash_attention_mask

from farspan.attention import Attend, Call, Eviction, Layer, SinkWindow, angles, dense, keeps_to_its_own, turned

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
        self.num_dropped = 0  # tokens read whose keys are not here
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
        return self.length + self.num_dropped

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, num_seen: int) -> "BufferLayer":
        """Return a layer that holds these keys and values of the `num_seen` tokens read."""
        layer = cls()
        layer.update(keys, values)
        layer.num_dropped = num_seen - layer.length
        return layer


class SinkLayer(DynamicLayer):
    """Keys and values of one layer: the first tokens, and as many of the last as the next one may see."""

    is_croppable = False

    def __init__(self, shape: SinkWindow, **kwargs: Any) -> None:
        super().__init__()
        self.shape = shape
        self.num_seen = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """All keys and values that these queries may see; what the next ones cannot is then let go."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        keys, values = torch.cat([self.keys, key_states], -2), torch.cat([self.values, value_states], -2)
        self.num_seen += key_states.shape[-2]
        last = self.num_seen - max(self.shape.first_near(self.num_seen), 0)
        dropped = keys.shape[-2] - self.shape.sinks - last
        self.keys, self.values = (keys, values) if dropped <= 0 else (self._kept(keys, last), self._kept(values, last))
        return keys, values

    def _kept(self, states: Tensor, last: int) -> Tensor:
        first_behind = states.shape[-2] - last
        return torch.cat([states[..., : self.shape.sinks, :], states[..., first_behind:, :]], -2)

    def get_seq_length(self) -> int:
        return self.num_seen


class Stream:
    """A causal model in the middle of some text: what it carries from one chunk to the next.

    The rows of a batch are texts of one length, without padding. `capacity`: tokens to make room for at once;
    more are taken in, at the price of moving what is there. `attention`: what stands in for the model's own.
    """

    def __init__(self, model: Any, capacity: int = 0, attention: "Attention | None" = None) -> None:
        self.model = model
        self.attention = attention
        self.parameters = inspect.signature(model.forward).parameters
        names = [name for name in STATE_NAMES if name in self.parameters]
        if not names:
            raise TypeError(f"{type(model).__name__}.forward takes none of {', '.join(STATE_NAMES)}")
        self.state_name = names[0]
        self.state: Any = None if self.state_name == "state" else _new_cache(model, capacity, attention)
        self.num_seen = 0
        self.output: Any = None
        self.last_queries: dict[int, Call] = {}  # by layer: calls of the last queries, without keys, until `evict`
        self.positions: dict[int, Tensor] = {}  # by layer: of the keys that an eviction has chosen
        self.evicted = False

    def step(self, ids: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time hidden"]:
        """Feeds the next tokens; returns the last hidden states, which `logits` turns into logits."""
        if self.state_name == "state" and ids.shape[1] == 1 and len(ids) > 1:
            return self._step_row_by_row(ids)
        arguments = {self.state_name: self.state, "use_cache": True}
        if self.attention is None:
            self.output = _base_forward(self.model, ids, self.num_seen, arguments, self.parameters)
        else:
            with self.attention.reading(self):
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

    @property
    def can_branch(self) -> bool:
        """Whether all that is carried are keys and values of whole texts, which `branch` needs."""
        plain = self.attention is None and self.state_name == "past_key_values"
        return plain and all(isinstance(layer, BufferLayer) for layer in self.state.layers)

    def branch(self, ids: Int[Tensor, "branches batch time"]) -> Float[Tensor, "branches batch time hidden"]:
        """Feeds several continuations of the text in one forward; each sees the text and itself. Then `restore`."""
        count, batch, time = ids.shape
        rows = ids.transpose(0, 1).reshape(batch, count * time)
        own = torch.block_diag(*[torch.ones(time, time, device=ids.device).tril()] * count)
        mask = torch.zeros(count * time, self.num_seen + count * time, dtype=self.model.dtype, device=ids.device)
        mask[:, self.num_seen :].masked_fill_(own == 0, torch.finfo(self.model.dtype).min)
        arguments = {self.state_name: self.state, "use_cache": True, "attention_mask": mask.expand(batch, 1, -1, -1)}
        positions = (self.num_seen + torch.arange(time, device=ids.device)).repeat(count)
        self.output = _base_forward(self.model, rows, positions, arguments, self.parameters)
        return self.output[0].reshape(batch, count, time, -1).transpose(0, 1)

    def evict(self) -> None:
        """Drop the keys that the method does not choose. Tokens fed afterwards see the chosen keys and each other."""
        assert self.attention is not None
        assert self.attention.eviction is not None
        layers, positions = list(self.state.layers), dict[int, Tensor]()
        for index, last in self.last_queries.items():
            keys, values = layers[index].keys, layers[index].values
            call = replace(last, key=keys, value=values, start=self.num_seen - last.query.shape[3])
            if (chosen := self.attention.eviction.choose(call)) is not None:
                keys, values = (x.gather(2, chosen[..., None].expand(-1, -1, -1, x.shape[3])) for x in (keys, values))
                layers[index] = BufferLayer.of(keys, values, self.num_seen)
                positions[index] = (chosen + call.num_missing).int()
        self.state.layers, self.positions, self.last_queries, self.evicted = layers, positions, {}, True

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
        queries = {index: call.query for index, call in self.last_queries.items()}
        tensors = _tensors([values, queries, self.positions])
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())


class Scope:
    """While a method is on. What was read in it cannot be used outside."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.on = True

    def check(self) -> None:
        if not self.on:
            raise ValueError(f"{self.name} is no longer on: use what it has read inside its `with`")


@dataclass
class _Use:
    """Who uses a model: one thread at a time, under the methods that have changed it."""

    lock: RLock = field(default_factory=RLock)
    scopes: list[Scope] = field(default_factory=list)  # the last one entered is the one to read under


_USES: WeakKeyDictionary[nn.Module, _Use] = WeakKeyDictionary()


def _use(model: nn.Module) -> _Use:
    return _USES.get(model) or _USES.setdefault(model, _Use())


@contextmanager
def alone(model: nn.Module) -> Iterator[None]:
    """Keep other threads from running `model` meanwhile: a forward and the output head depend on what is set in it."""
    with _use(model).lock:
        yield


@contextmanager
def _changed(
    model: nn.Module, scope: Scope, change: Callable[[], None], undo: Callable[[], None], *, reserved: bool
) -> Iterator[None]:
    """Change `model`, and undo it afterwards, while no other thread runs it. `reserved`: meanwhile it can be read by
    readers of this scope alone, so that no other reader is silently given the change."""
    use = _use(model)
    try:
        with use.lock:  # around both: between the two another thread could read
            change()
            if reserved:
                use.scopes.append(scope)
        yield
    finally:
        scope.on = False
        with use.lock:
            undo()
            if scope in use.scopes:
                use.scopes.remove(scope)


def check_scope(model: nn.Module, scope: Scope | None) -> None:
    """Raise ValueError unless a reader of `scope` reads the model as it is now."""
    scopes = _use(model).scopes
    if scopes and scopes[-1] is not scope:
        raise ValueError(f"{scopes[-1].name} is on for this model: read with its reader, or leave its `with` first")


class Attention(Scope):
    """What stands in for a model's own attention while a method is on."""

    def __init__(
        self,
        attend: Attend,
        layers: list[Layer],
        *,
        name: str,
        shape: SinkWindow | None,
        padding: bool,
        eviction: Eviction | None = None,
    ) -> None:
        super().__init__(name)
        self.attend, self.layers = attend, layers
        self.shape = shape  # of caches that drop keys while a text is read; None: they keep all
        self.eviction = eviction  # chooses the keys that are kept once the text has been read; None: all
        self.padding = padding  # whether a padded batch can be read when the model is called by itself
        self.stream: Stream | None = None  # that reads; None: the model is called by itself
        self.offset: int | None = None  # the same as the model's masks have it, when it is called by itself

    @contextmanager
    def reading(self, stream: Stream) -> Iterator[None]:
        self.stream = stream
        try:
            yield
        finally:
            self.stream = None

    def mask(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """The padding of a model called by itself, [batch, keys]; None without any. Visibility is not its business."""
        offset = kwargs.get("q_offset")
        self.offset = None if offset is None else int(offset)
        return flash_attention_mask(*args, **kwargs)

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """An attention function as transformers calls it: [batch, heads, time, dim] to [batch, time, heads, dim]."""
        layer, stream = self.layers[module.layer_idx], self.stream
        if stream is None:
            self._check_call(attention_mask, kwargs.get("position_ids"), layer, query, key)
        batch, heads, time, dim = query.shape
        call = Call(
            query=query.view(batch, key.shape[1], heads // key.shape[1], time, dim),
            key=key,
            value=value,
            scale=dim**-0.5 if scaling is None else scaling,
            softcap=softcap,
            layer=layer,
            start=self._start(key.shape[2] - time) if stream is None else stream.num_seen,
            real=attention_mask,
            positions=None if stream is None else stream.positions.get(layer.index),
        )
        if stream is not None and self.eviction is not None and not stream.evicted:
            stream.last_queries[layer.index] = _last_queries(
                call, stream.last_queries.get(layer.index), self.eviction.window
            )
        out = self.attend(call)
        return out.reshape(batch, heads, time, -1).transpose(1, 2).contiguous(), None

    def _start(self, without_drops: int) -> int:
        """Position of the first query of a model called by itself; a cache with a window has dropped earlier keys."""
        return without_drops if self.offset is None else self.offset

    def _check_call(
        self, mask: Tensor | None, positions: Tensor | None, layer: Layer, query: Tensor, key: Tensor
    ) -> None:
        """Refuses what cannot be told apart when a model is called by itself."""
        if mask is not None and mask.dim() != 2:
            raise ValueError(f"{self.name} has a mask of its own: leave out attention masks that are not [batch, time]")
        if mask is not None and not self.padding:
            raise ValueError(f"{self.name} reads rows of one length: leave out the padding, or read rows one by one")
        if mask is None and positions is not None and bool((positions.diff(dim=-1) != 1).any()):
            raise ValueError(f"{self.name} reads one text in each row: positions {positions.tolist()} have gaps")
        missing = 0 if self.offset is None else self.offset + query.shape[2] - key.shape[2]
        only_near = self.padding or (self.shape is not None and keeps_to_its_own(layer, self.shape))
        if missing < 0 or (missing and not only_near):
            raise ValueError(
                f"{self.name} finds a cache that has let go of tokens, or has room for more: use DynamicCache()"
            )


def _last_queries(call: Call, before: Call | None, most: int) -> Call:
    """Return a call of the last queries alone, at most so many: of this call and the one before it in the text."""
    queries = call.query if before is None else torch.cat([before.query, call.query], 3)
    empty = call.key[:, :, :0].clone(), call.value[:, :, :0].clone()  # no views, which would keep the keys in memory
    return replace(call, query=queries[..., -most:, :].clone(), key=empty[0], value=empty[1])


_NUMBERS = count()


@contextmanager
def attention(
    model: Any,
    attend: Attend,
    layers: list[Layer],
    *,
    name: str,
    shape: SinkWindow | None = None,
    eviction: Eviction | None = None,
    padding: bool = False,
    reserved: bool = False,
) -> Iterator[Attention]:
    """Lets `model` attend by `attend`; inside, also when it is called by itself. `reserved`: other readers are refused
    meanwhile.

    Raises:
        ValueError: another method has taken its place already.
    """
    key = f"farspan_{next(_NUMBERS)}"
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
    before = [(config, config._attn_implementation_internal) for config in configs if hasattr(config, _SWITCH)]
    if any(str(own).startswith("farspan_") for _, own in before):
        raise ValueError(f"{name} cannot be put on a model whose attention another method has taken over")
    stand_in = Attention(attend, layers, name=name, shape=shape, padding=padding, eviction=eviction)
    AttentionInterface.register(key, stand_in)
    AttentionMaskInterface.register(key, stand_in.mask)

    def switch() -> None:
        for config, _ in before:
            config._attn_implementation_internal = key

    def restore() -> None:
        for config, own in before:
            config._attn_implementation_internal = own

    try:
        with _changed(model, stand_in, switch, restore, reserved=reserved):
            yield stand_in
    finally:
        del AttentionInterface._global_mapping[key], AttentionMaskInterface._global_mapping[key]


def attention_names() -> list[str]:
    """Return the names of the attention implementations of transformers."""
    return ["eager", *sorted(AttentionInterface().valid_keys())]


_SWITCH = "_attn_implementation_internal"
PROBE_LENGTH = 24  # tokens
PROBE_SHIFT = 500  # positions


def attention_layers(model: Any, *, name: str, rotary: bool = True) -> list[Layer]:
    """What a method has to know of each attention layer, found by running a few tokens through the model.

    With our attention at its plainest the model has to give the hidden states of its own. Read at positions that
    are shifted, each layer's queries and keys have to be those of before, turned by one of the model's RoPE
    frequencies, or unchanged (a layer without RoPE).

    Args:
        name: of the method, for what is refused.
        rotary: whether the method turns queries and keys; otherwise any positions will do.

    Raises:
        ValueError: attention that does not go through transformers' interface or takes more than it passes on,
            states beside keys, chunked attention, learned positions, RoPE in a layout other than half and half.
    """
    family = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    caches = DynamicCache(config=model.config).layers
    others = {type(layer).__name__ for layer in caches if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)}
    if kinds or others:
        raise ValueError(
            f"{name} cannot be used with {family}, which has layers of {', '.join(sorted(kinds | others))}"
        )
    windows = [getattr(layer, "sliding_window", None) for layer in caches]
    plain = [Layer(index, None, window) for index, window in enumerate(windows)]
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def watching(call: Call) -> Tensor:
        seen[call.layer.index] = call.query.flatten(1, 2), call.key
        return dense(call)

    ids = ((1 + torch.arange(PROBE_LENGTH, device=input_device(model))) * 7919 % config.vocab_size)[None]

    def watched(start: int) -> dict[int, tuple[Tensor, Tensor]]:
        seen.clear()
        around = f"{name} cannot be used with {family}: its attention does not go through transformers' interface"
        with attention(model, watching, plain, name=name, padding=True):
            try:
                given, _ = plain_hidden(model, ids, start)
            except torch.OutOfMemoryError:
                raise
            except (TypeError, AttributeError, LookupError, RuntimeError) as error:  # it misses a mask it asks for
                raise ValueError(around) from error
        if len(seen) < len(caches) or not caches:
            raise ValueError(around)
        if not _close(given, expected):
            raise ValueError(
                f"{name} cannot be used with {family}: its attention is more than queries, keys and values"
            )
        return dict(seen)

    with torch.no_grad():
        expected, _ = plain_hidden(model, ids)
        if not expected.isfinite().all():
            raise ValueError(
                f"{name} cannot be used with this {family}: its hidden states are not finite (NaN or infinite). Its "
                "weights are damaged, or its dtype is too small: download it again, or use --dtype float32"
            )
        here = watched(0)
        if not rotary:
            return plain
        if (limit := position_limit(model)) is not None:
            raise ValueError(f"{name} turns RoPE, and {family} has {limit} learned positions instead: use topk or full")
        if "position_ids" not in inspect.signature(model.forward).parameters:
            raise ValueError(f"{name} turns RoPE, and {family} takes no positions: nothing says how it turns")
        there = watched(PROBE_SHIFT)
    frequencies = [
        buffer
        for module in decoder_of(model).modules()
        for key, buffer in module._buffers.items()
        if key.endswith("inv_freq") and "original" not in key and buffer is not None
    ]
    return [
        Layer(
            index, _frequencies(here[index], there[index], frequencies, f"{name} cannot be used with {family}"), window
        )
        for index, window in enumerate(windows)
    ]


See = Callable[[int, Tensor, Tensor, Tensor], None]


@contextmanager
def watch_attention(
    lm: Any, layers: Collection[int] | None, queries: Collection[int] | None, see: See
) -> Iterator[None]:
    """Shows `see` how the chosen queries of some layers weigh the keys, while a text is read in whatever chunks.

    The model attends in blocks meanwhile, as it does by itself; no weights are kept, and those of one block held.

    Args:
        lm: an `LM` under no method that brings attention of its own.
        layers: whose, counted from 0, or from the end with -1; None: every layer.
        queries: their positions in the text, from 0; None: every query.
        see: is given a layer, the positions of some queries [some] and of keys [keys], consecutive, and scores
            [batch, heads, some, keys], whose softmax are the weights: -inf where a query must not look. Keys that none
            of these queries sees may be missing. It must leave the scores as they are.

    Raises:
        ValueError: attention that cannot be seen through transformers' interface or is more than a softmax over keys
            (weight for nothing, ALiBi, chunks, states), or that a method has taken over.
    """
    name = "watching attention"
    known = attention_layers(lm.model, name=name, rotary=False)
    count = len(known)
    if unknown := [layer for layer in layers or () if not -count <= layer < count]:
        raise ValueError(f"{lm.name} has no attention layer {unknown[0]}: its layers are 0 to {count - 1}")
    watched = set(range(count)) if layers is None else {layer % count for layer in layers}

    def attend(call: Call) -> Tensor:
        block = visible = slice(0)

        def scores(call: Call, some: slice, there: slice) -> Tensor:
            nonlocal block, visible
            block, visible = some, there
            return call.scores(call.query[..., some, :], call.key[:, :, there])

        def show(masked: Tensor) -> Tensor:
            first, last = call.start + block.start, call.start + block.stop
            at = range(first, last) if queries is None else sorted(q for q in queries if first <= q < last)
            if at:
                rows = slice(None) if queries is None else torch.tensor([q - first for q in at], device=masked.device)
                keys = torch.arange(call.num_missing + visible.start, call.num_missing + visible.stop)
                see(call.layer.index, torch.tensor(at), keys, masked[..., rows, :].flatten(1, 2))
            return masked

        return dense(call, scores=scores, select=show) if call.layer.index in watched else dense(call)

    with attention(lm.model, attend, known, name=name, padding=True):
        yield


def _frequencies(
    before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], known: list[Tensor], refusal: str
) -> Tensor | None:
    """Which of a model's RoPE frequencies turn queries and keys by the probe's shift; None: they do not turn."""
    if all(map(_close, before, after)):
        return None
    positions = torch.arange(PROBE_LENGTH, device=before[0].device)
    for inv_freq in known:
        if 2 * inv_freq.numel() > before[0].shape[-1]:
            continue
        here, there = angles(positions, inv_freq), angles(positions + PROBE_SHIFT, inv_freq)
        if all(_close(turned(x, here, there), y) for x, y in zip(before, after, strict=True)):
            return inv_freq
    raise ValueError(f"{refusal}: its RoPE turns dimensions in another layout (interleaved?) than half and half")


def _close(given: Tensor, expected: Tensor) -> bool:
    apart = (given.float() - expected.float()).norm() / expected.float().norm()
    return bool(apart < (5e-3 if expected.dtype == torch.float32 else 0.1))


def plain_rope(model: Any, *, name: str) -> tuple[float, Tensor]:
    """theta and the frequencies of a model with one RoPE, not scaled.

    Raises:
        ValueError: no RoPE, one that differs between layers, or one that is scaled already.
    """
    family = type(model).__name__
    modules = _rotary(model)
    parameters = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        raise ValueError(f"{name} changes one RoPE, and {family} has several: {', '.join(parameters)}")
    if not modules or not parameters:
        raise ValueError(f"{name} changes RoPE frequencies, and {family} has none that can be changed")
    if (kind := parameters.get("rope_type", "default")) != "default":
        raise ValueError(f"{name} scales plain RoPE, and that of {family} is scaled already ({kind}): use full")
    return float(parameters["rope_theta"]), modules[0].inv_freq


@contextmanager
def rope(model: Any, inv_freq: Float[Tensor, "pairs"], scale: float, *, name: str) -> Iterator[Scope]:
    """Lets `model` rotate by other frequencies, in float32, its cosines and sines multiplied with `scale`."""
    modules = _rotary(model)
    before = [(module, module._buffers["inv_freq"], module.attention_scaling) for module in modules]
    scope = Scope(name)

    def scaled() -> None:
        for module, own, own_scale in before:
            module._buffers["inv_freq"] = inv_freq.to(own.device)
            module.attention_scaling = own_scale * scale

    def restore() -> None:
        for module, own, own_scale in before:
            module._buffers["inv_freq"], module.attention_scaling = own, own_scale

    with _changed(model, scope, scaled, restore, reserved=True):
        yield scope


def _rotary(model: Any) -> list[Any]:
    return [module for module in decoder_of(model).modules() if "inv_freq" in module._buffers]


def plain_hidden(
    model: Any, ids: Int[Tensor, "batch time"], start: int = 0
) -> tuple[Float[Tensor, "batch time hidden"], Any]:
    """The last hidden states of one ordinary forward over a whole text, and the output they came in."""
    parameters = inspect.signature(model.forward).parameters
    output = _base_forward(model, ids, start, {"use_cache": False}, parameters)
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
    with _standing_still(decoder_of(model), part):
        return model(input_ids=any_ids).logits


@contextmanager
def watched_decoder(model: Any) -> Iterator[list[Any]]:
    """Inside, the list of what the decoder gave, forward by forward. `logits` turns it into logits."""
    seen: list[Any] = []
    hook = decoder_of(model).register_forward_hook(lambda module, given, output: seen.append(output))
    try:
        yield seen
    finally:
        hook.remove()


@contextmanager
def head_at(model: Any, wanted: Tensor) -> Iterator[None]:
    """Inside, the output head runs on the hidden states at `wanted` [batch, time] alone, as one row."""

    def chosen(module: Any, given: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (given[0][wanted][None],)

    hook = model.get_output_embeddings().register_forward_pre_hook(chosen)
    try:
        yield
    finally:
        hook.remove()


def gapped_mask(model: Any, positions: Int[Tensor, "batch time"]) -> Tensor | dict[str, Tensor]:
    """What to pass as attention_mask where positions have gaps, [batch, time] or one [batch, 1, time, time] by kind of
    layer.

    Without any, transformers takes every gap for the beginning of another text, and nothing is seen across it
    (masking_utils, whenever there is no cache, as in training). Ones keep it from that, but count sliding windows in
    rows instead of positions: these get masks of their own, over `0 <= position - position' < window`.
    """
    windows = sliding_windows(model)
    if not any(windows.values()):
        return torch.ones_like(positions)
    masks = {kind: causal_mask(model, positions, window) for kind, window in windows.items()}
    return masks if getattr(model.config.get_text_config(decoder=True), "layer_types", None) else masks[SLIDING]


def causal_mask(model: Any, positions: Int[Tensor, "batch time"], window: int | None) -> Tensor:
    """Who sees whom by position, in the form that the model's attention takes: [batch, 1, time, time]."""
    distance = positions[:, None, :, None] - positions[:, None, None, :]
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if model.config._attn_implementation != "eager":
        return visible
    return torch.zeros(visible.shape, device=positions.device).masked_fill_(~visible, torch.finfo(model.dtype).min)


SLIDING = "sliding_attention"


def sliding_windows(model: Any) -> dict[str, int | None]:
    """The kinds of attention layers of a model, with the tokens that each sees, None for all.

    Raises:
        ValueError: layers that are neither full nor sliding attention.
    """
    config = model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=model.config).layers
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", SLIDING}
    kinds |= {type(one).__name__ for one in layers if type(one) not in (DynamicLayer, DynamicSlidingWindowLayer)}
    if kinds or not layers:
        raise ValueError(f"{type(model).__name__} has layers of {', '.join(sorted(kinds)) or 'no attention'}")
    windows = {getattr(layer, "sliding_window", None) for layer in layers}
    return {"full_attention" if window is None else SLIDING: window for window in windows}


def set_rope(model: Any, parameters: dict[str, Any]) -> None:
    """Gives `model` another RoPE for good: in its config, as `rope_parameters`, and in its frequencies."""
    config = model.config.get_text_config(decoder=True)
    config.rope_parameters = dict(parameters)
    for module in _rotary(model):
        made = type(module)(config=config)
        for name, value in made._buffers.items():
            module._buffers[name] = value.to(input_device(model))
        for name in ("attention_scaling", "rope_type"):
            setattr(module, name, getattr(made, name))


def checkpoint_activations(model: Any) -> None:
    """Keeps no activations inside layers for the gradient; they are computed again."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})  # by place: its name has changed between versions


def rope_precision(model: Any) -> set[torch.dtype]:
    """Of the frequencies that a model turns by."""
    return {module.inv_freq.dtype for module in _rotary(model)}


def position_limit(model: Any) -> int | None:
    """Return the longest text that a decoder with learned positions can read, in tokens; None where positions do not
    end. The positions of a vision tower or an encoder do not count."""
    for name, module in decoder_of(model).named_modules():
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


def flops(model: Any) -> tuple[float, float, float]:
    """Return the multiplications and additions for a token fed, for a pair of query and key, and for a position at
    which the output head runs. Matrices and attention count; norms and activations do not."""
    config = model.config.get_text_config(decoder=True)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    embeddings = {id(p) for module in ends if module for p in module.parameters()}
    body = sum(p.numel() for p in model.parameters() if id(p) not in embeddings)
    vocabulary = ends[0].num_embeddings
    return 2.0 * body, 4.0 * config.num_hidden_layers * config.hidden_size, 2.0 * config.hidden_size * vocabulary


@contextmanager
def first_not_finite(model: nn.Module) -> Iterator[Callable[[], str]]:
    """Watch the outputs of every module inside the `with`. Yield a function that returns the name of the first module
    whose output is not finite, "" if there is none."""
    found: list[str] = []

    def watching(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def watch(module: nn.Module, given: Any, result: Any) -> None:
            tensors = (t for t in _tensors(result) if t.is_floating_point())
            if not found and any(not bool(t.isfinite().all()) for t in tensors):
                found.append(name)

        return watch

    hooks = [module.register_forward_hook(watching(name)) for name, module in model.named_modules() if name]
    try:
        yield lambda: found[0] if found else ""
    finally:
        for hook in hooks:
            hook.remove()


def decoder_of(model: Any) -> Any:
    """Return the module that turns token ids into the last hidden states, without a vision tower or an encoder."""
    found = model.get_decoder()
    # ModernBERT-decoder calls its output matrix `decoder`, which transformers then takes for it
    return model.base_model if found is model.get_output_embeddings() else found


def _base_forward(model: Any, ids: Tensor, start: int | Tensor, arguments: dict[str, Any], parameters: Any) -> Any:
    """`start`: the position of the first token, or of each."""
    if "position_ids" in parameters:
        if not isinstance(start, Tensor):
            start = torch.arange(start, start + ids.shape[1], device=ids.device)
        arguments["position_ids"] = start.expand(ids.shape[0], -1)
    return decoder_of(model)(input_ids=ids, **arguments)


def _new_cache(model: Any, capacity: int, attention: "Attention | None") -> DynamicCache:
    cache = DynamicCache(config=model.config)
    cache.layers = [BufferLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    if attention is not None and attention.shape is not None:
        shape = attention.shape
        bounded = [keeps_to_its_own(layer, shape) for layer in attention.layers]
        cache.layers = [own if keep else SinkLayer(shape) for own, keep in zip(cache.layers, bounded, strict=True)]
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
