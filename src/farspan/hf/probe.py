"""Properties of attention layers, found by running a few tokens; and their weights while a text is read."""

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from farspan.hf.attend import Call, Layer, angles, dense, turned
from farspan.hf.attention import LEARNED_SINKS, more_than_keys, replaced_attention
from farspan.hf.decoder import decoder_of, plain_hidden
from farspan.hf.device import is_out_of_memory
from farspan.hf.facts import input_device, position_limit
from farspan.hf.masks import layer_windows
from farspan.hf.parallel import refuse_divided
from farspan.hf.rotary import rope_frequencies
from farspan.hf.scope import alone
from farspan.hf.stream import Stream

PROBE_LENGTH = 24  # tokens
PROBE_SHIFT = 500  # positions
# Relative differences of equal computations are up to 0.039 in bfloat16 and 0.0046 in float16, in Gemma 3 270M.
TOLERANCES, TOLERANCE = {torch.float32: 5e-3, torch.float16: 0.02}, 0.1  # the second is that of other dtypes

Seen = dict[int, list[tuple[Tensor, Tensor]]]  # queries and keys of each time that a layer attends


def attention_layers(model: Any, *, name: str, rotary: bool = True, once: bool = False) -> list[Layer]:
    """Return the properties of each attention layer, found by running a few tokens through the model.

    With our full attention the model must give the same hidden states as with its own. Shifted positions must rotate
    each layer's queries and keys by one of the model's RoPE frequencies, or not change them (a layer without RoPE).

    Args:
        name: the method's, for error messages.
        rotary: whether the method rotates queries and keys; otherwise any kind of positions is accepted.
        once: whether layers that attend several times in a forward are refused, as those of DiffLlama.

    Raises:
        ValueError: attention that does not go through transformers' interface or needs more than it passes on,
            states besides keys, chunked attention, learned positions, RoPE in a layout other than half and half. For
            a model without weights, only those that its config shows.
    """
    family = type(model).__name__
    refusal = f"{name} cannot be used with {family}"
    windows, others = layer_windows(model)
    if others:
        raise ValueError(f"{refusal}, which has layers of {', '.join(others)}")
    plain = [Layer(index, None, window) for index, window in enumerate(windows)]
    if input_device(model).type == "meta":  # no weights, so nothing can be run
        if any(getattr(module, learned, None) is not None for module in model.modules() for learned in LEARNED_SINKS):
            raise ValueError(more_than_keys(name, family))
        if rotary:
            _check_positions(model, name)
        return plain

    def watched(start: int) -> Seen:
        given, seen = _watched(model, plain, start, name=name)
        if not close(given, expected):
            raise ValueError(more_than_keys(name, family))
        return seen

    with torch.no_grad():
        expected, _ = plain_hidden(model, _probe_ids(model))
        if not expected.isfinite().all():
            raise ValueError(
                f"{name} cannot be used with this {family}: its hidden states are not finite (NaN or infinite). Its "
                "weights are damaged, or its dtype is too small: download it again, or use --dtype float32"
            )
        here = watched(0)
        if once and max(map(len, here.values())) > 1:
            raise ValueError(f"{refusal}: its weights are differences of several softmaxes over keys")
        if not rotary:
            return plain
        _check_positions(model, name)
        there = watched(PROBE_SHIFT)
    known = [values for _, values in rope_frequencies(decoder_of(model))]
    return [
        Layer(index, _frequencies(here[index][-1], there[index][-1], known, refusal), window)
        for index, window in enumerate(windows)
    ]


def rotates_only_near(model: Any) -> bool:
    """Return whether some layers attend to the whole text and none of these rotates its keys, as in Cohere 2, EXAONE 4
    and Flint, found by running a few tokens at two positions. False for a model without weights."""
    windows, others = layer_windows(model)
    far = [index for index, window in enumerate(windows) if window is None]
    if others or len(far) in (0, len(windows)) or input_device(model).type == "meta":
        return False
    held: list[list[Tensor]] = []
    for start in (0, PROBE_SHIFT):
        stream = Stream(model)
        stream.shift = start
        with alone(model), torch.no_grad():
            stream.step(_probe_ids(model))
        layers = [stream.state.layers[index] for index in far]
        # latent attention caches what it rotates as values
        held.append([states for layer in layers for states in (layer.keys, layer.values)])
    return all(close(there, here) for here, there in zip(*held, strict=True))


def _watched(model: Any, layers: list[Layer], start: int, *, name: str) -> tuple[Tensor, Seen]:
    """Run a few tokens at positions from `start` on, and return the hidden states, and queries and keys by layer.

    Raises:
        ValueError: a layer's attention does not go through transformers' interface, or needs more than it passes on.
    """
    refusal = f"{name} cannot be used with {type(model).__name__}"
    around = f"{refusal}: its attention does not go through transformers' interface"
    seen: Seen = {}

    def watching(call: Call) -> Tensor:
        seen.setdefault(call.layer.index, []).append((call.query.flatten(1, 2), call.key))
        return dense(call)

    with replaced_attention(model, watching, layers, name=name, padding=True):
        try:
            given, _ = plain_hidden(model, _probe_ids(model), start)
        except (TypeError, AttributeError, LookupError, RuntimeError) as error:  # a mask that it needs is missing
            if is_out_of_memory(error):
                raise
            raise ValueError(around) from error
        except ValueError as error:  # weight on no key, or a mask of the model's own, as Doge makes from its values
            raise ValueError(more_than_keys(name, type(model).__name__)) from error
    if len(seen) < len(layers) or not layers:
        raise ValueError(around)
    return given, seen


def _probe_ids(model: Any) -> Tensor:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return ((1 + torch.arange(PROBE_LENGTH, device=input_device(model))) * 7919 % vocabulary)[None]


def check_cached_keys(model: Any, layers: list[Layer], *, name: str) -> None:
    """Check that the cache of a model holds the keys and values that its attention reads, of which an eviction keeps a
    part for each head.

    Args:
        layers: from `attention_layers`.
        name: the method's, for error messages.

    Raises:
        ValueError: the cache holds something else, such as a compressed latent, or values in another order of heads.
            For a model without weights, only what its config shows.
    """
    refusal = f"{name} cannot be used with {type(model).__name__}: its cache holds"
    if getattr(model.config.get_text_config(decoder=True), "kv_lora_rank", None):
        raise ValueError(f"{refusal} a compressed latent instead of keys, of which {name} keeps a part: use full")
    if input_device(model).type == "meta":
        return
    alike: list[bool] = []

    def watching(call: Call) -> Tensor:
        layer = stream.state.layers[call.layer.index]
        for held, read in ((layer.keys, call.key), (layer.values, call.value)):
            alike.append(torch.equal(held, read[:, :, -held.shape[2] :]))  # with a window it holds only the last ones
        return dense(call)

    with replaced_attention(model, watching, layers, name=name, padding=True) as attention, torch.no_grad():
        stream = Stream(model, PROBE_LENGTH, attention)
        stream.step(_probe_ids(model))
    if not all(alike):
        raise ValueError(
            f"{refusal} other keys or values than its attention reads, of which {name} keeps a part: use full"
        )


def _check_positions(model: Any, name: str) -> None:
    family = type(model).__name__
    if (limit := position_limit(model)) is not None:
        raise ValueError(f"{name} rotates by RoPE, and {family} has {limit} learned positions: use topk or full")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{name} rotates by RoPE, and {family} takes no positions: use topk or full")


def _frequencies(
    before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], known: list[Tensor], refusal: str
) -> Tensor | None:
    """Return the RoPE frequencies that rotate queries and keys by the probe's shift; None: they are not rotated."""
    positions = torch.arange(PROBE_LENGTH, device=before[0].device)
    errors: list[tuple[float, Tensor | None]] = [(max(map(_apart, before, after)), None)]
    for inv_freq in known:
        if 2 * inv_freq.numel() > before[0].shape[-1]:
            continue
        here, there = angles(positions, inv_freq), angles(positions + PROBE_SHIFT, inv_freq)
        errors.append((max(_apart(turned(x, here, there), y) for x, y in zip(before, after, strict=True)), inv_freq))
    # the smallest, not the first below the tolerance: queries and keys that turn slowly look almost unrotated
    error, found = min(errors, key=lambda one: one[0])
    if error < TOLERANCES.get(before[0].dtype, TOLERANCE):
        return found
    raise ValueError(f"{refusal}: its RoPE rotates dimensions in another layout (interleaved?) than half and half")


def close(given: Tensor, expected: Tensor) -> bool:
    return _apart(given, expected) < TOLERANCES.get(expected.dtype, TOLERANCE)


def _apart(given: Tensor, expected: Tensor) -> float:
    return float((given.float() - expected.float()).norm() / expected.float().norm())


See = Callable[[int, Tensor, Tensor, Tensor], None]


@contextmanager
def watch_attention(
    lm: Any, layers: Collection[int] | None, queries: Collection[int] | None, see: See
) -> Iterator[None]:
    """Call `see` with the attention scores of chosen queries and layers while a text is read, in any chunks.

    The model attends in blocks meanwhile, with unchanged results; only the weights of one block are held.

    Args:
        lm: an `LM` under no method that replaces its attention.
        layers: counted from 0, or from the end with -1; None: every layer.
        queries: their positions in the text, from 0; None: every query.
        see: takes a layer, the positions of queries [some], the consecutive positions of keys [keys], and scores
            [batch, heads, some, keys] (-inf: masked), whose softmax gives the weights. Keys that none of these
            queries sees may be missing. It must not change the scores.

    Raises:
        ValueError: attention that transformers' interface does not expose, that is more than a softmax over keys
            (weight on no key, ALiBi, chunks, states, differences), or that a method has replaced; heads on several
            devices.
    """
    name = "watching attention"
    refuse_divided(lm.model, name)
    known = attention_layers(lm.model, name=name, rotary=False, once=True)
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

    with replaced_attention(lm.model, attend, known, name=name, padding=True):
        yield
