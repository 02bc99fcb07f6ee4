"""Encode a context in separate chunks, in batches of bounded memory, without masked tokens."""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, PreTrainedConfig

from farspan.cepe.config import encoder_config
from farspan.cepe.context import BUDGET, Context, Mode
from farspan.cepe.order import ContextOrder
from farspan.cepe.surgery import layers_of
from farspan.hf.products import by_onednn
from farspan.hf.training import evaluating
from farspan.loading import load_config, load_weights

TOKENS_AT_ONCE = 1 << 14  # of one forward pass of the encoder, which bounds its activations


def encode(
    encoder: Any,
    ids: Int[Tensor, "rows chunks length"],
    mask: Int[Tensor, "rows chunks length"] | None = None,
    *,
    padding_mask: Int[Tensor, "rows chunks length"] | None = None,
    num_states: int = 1,
    order: ContextOrder | None = None,
    offset: int | Int[Tensor, "rows"] = 0,
    mode: Mode = "auto",
    budget: int = BUDGET,
) -> Context:
    """Return the states of all chunks. Each chunk is encoded separately, with positions from 0.

    Chunks whose tokens are all masked are not encoded. If all tokens of all rows are masked and autograd is enabled,
    one chunk is encoded, and contributes zero with a gradient of zero.

    Args:
        mask: 0 for tokens to leave out; None: there are none.
        padding_mask: 0 for padding, which does not count in the distances of `order`, 1 for tokens, left out or not;
            None: all tokens that are left out are padding.
        num_states: the number of encoder layers, the last ones, whose states are returned.
        order: adds vectors for the distance from the decoder to the states; None: nothing is added.
        offset: tokens between the context and the decoder, for `order`.
        mode, budget: see `Context`.

    Raises:
        ValueError: ids of another shape or device, no ids, chunks longer than the encoder's window, ids that the
            encoder does not have, or a context beyond the range of `order`.
    """
    _check(encoder, ids, mask, padding_mask)
    rows, chunks, length = ids.shape
    if order is not None:
        tokens = torch.ones_like(ids) if mask is None else mask
        tokens = (tokens if padding_mask is None else padding_mask).reshape(rows, -1).ne(0)
        distances = tokens.flip(1).cumsum(1).flip(1)  # 1 for the last token
        distances = distances + torch.as_tensor(offset, device=ids.device).reshape(-1, 1).expand(rows, 1)
        order.check(int(distances.max()))
    flat, at_once = ids.reshape(-1, length), max(1, TOKENS_AT_ONCE // length)
    if mask is None or bool(mask.all()):
        states = _states(encoder, [flat[i : i + at_once] for i in range(0, len(flat), at_once)], None, num_states)
        states = tuple(s.view(rows, chunks * length, -1) for s in states)
        if order is not None:
            states = order(states, distances, length)
        return Context(states, mode=mode, budget=budget)
    real = mask.reshape(-1, length).bool()
    seen = real.any(-1)
    if not bool(seen.any()):
        if not torch.is_grad_enabled():
            width = encoder.config.hidden_size
            none = ids.new_empty(rows, 0, width, dtype=encoder.dtype)
            return Context((none,) * num_states, mode=mode, budget=budget)
        states = tuple(s.expand(rows, -1, -1) for s in _states(encoder, [ids[0, :1]], None, num_states))
        if order is not None:
            states = order(states, distances[:, -length:], length)
        return Context(states, None, torch.zeros(rows, device=ids.device, dtype=encoder.dtype), "recompute")
    # as many parts as without a mask: all processes that share a sharded encoder must call it equally often
    which = [part for part in seen.nonzero()[:, 0].tensor_split(-(-len(flat) // at_once)) if len(part)]
    states = _states(encoder, [flat[w] for w in which], [real[w] for w in which], num_states)
    counts = real.view(rows, -1).sum(-1).tolist()
    compact = tuple(pad_sequence(list(s[real[seen]].split(counts)), batch_first=True) for s in states)
    if order is not None:
        theirs = distances[real.view(rows, -1)].split(counts)
        compact = order(compact, pad_sequence(list(theirs), batch_first=True), length)
    if min(counts) == max(counts):
        return Context(compact, mode=mode, budget=budget)
    there = torch.tensor(counts, device=ids.device)
    allowed = torch.arange(max(counts), device=ids.device) < there[:, None]
    # a row without tokens attends to all and is multiplied by zero: softmax over nothing is NaN on some devices
    visible = None if min(counts) else (there > 0).to(encoder.dtype)
    return Context(compact, allowed | (there == 0)[:, None], visible, mode, budget)


def _states(
    encoder: Any, ids: list[Tensor], masks: list[Tensor] | None, num_states: int
) -> tuple[Float[Tensor, "chunks length width"], ...]:
    """Return the states of the last `num_states` layers for several batches of chunks, concatenated."""
    parts: list[tuple[Tensor, ...]] = []
    for index, batch in enumerate(ids):
        # no mask where nothing is masked: kernels without a mask are faster and need less memory
        mask = None if masks is None or bool(masks[index].all()) else masks[index].long()
        with by_onednn(batch.device):
            output = encoder(input_ids=batch, attention_mask=mask, output_hidden_states=num_states > 1)
        last = output.last_hidden_state
        parts.append((last,) if num_states == 1 else (*output.hidden_states[-num_states:-1], last))
    return tuple(torch.cat(same) for same in zip(*parts, strict=True))


def window_of(encoder: Any) -> int | None:
    """Return the largest number of tokens in a chunk; None if the encoder's config does not name it."""
    return getattr(encoder.config, "max_position_embeddings", None)


def _check(encoder: Any, ids: Tensor, *masks: Tensor | None) -> None:
    if ids.dim() != 3:
        raise ValueError(f"the ids of a context have shape {tuple(ids.shape)}: expected [batch, chunks, length]")
    for mask in masks:
        if mask is not None and mask.shape != ids.shape:
            raise ValueError(
                f"the mask of a context has shape {tuple(mask.shape)}, its ids {tuple(ids.shape)}: give one shape"
            )
    if ids.numel() == 0:
        raise ValueError(f"the context is empty, of shape {tuple(ids.shape)}: leave it out to read without one")
    limit = window_of(encoder)
    if limit is not None and ids.shape[2] > limit:
        raise ValueError(
            f"chunks of {ids.shape[2]:,} tokens are longer than the encoder's window of {limit:,}: cut the context "
            f"into chunks of at most {limit:,}"
        )
    embeddings = encoder.get_input_embeddings()
    where = embeddings.weight.device
    if ids.device != where and not hasattr(embeddings, "_hf_hook"):
        raise ValueError(
            f"the context is on {ids.device}, the encoder on {where}: move it there with .to({str(where)!r})"
        )
    if (largest := int(ids.max())) >= embeddings.num_embeddings or int(ids.min()) < 0:
        raise ValueError(
            f"the context holds token {largest if largest >= embeddings.num_embeddings else int(ids.min()):,}, the "
            f"encoder has {embeddings.num_embeddings:,} tokens: encoder and decoder must share a tokenizer"
        )


def build(fields: dict[str, Any]) -> Any:
    """Return an encoder of random weights from the `encoder_config` of a CEPE model."""
    return AutoModel.from_config(encoder_config(fields))


def load(
    encoder: Any,
    *,
    dtype: torch.dtype,
    layers: int | None = None,
    trust_remote_code: bool | None = None,
    allow_pickle: bool = False,
) -> Any:
    """Return an encoder from a config (random weights), a model, or a folder or hub id, such as one of a
    masked-language model.

    Args:
        dtype: of the weights.
        layers: the number of layers, the first ones, to keep; default all.
        trust_remote_code, allow_pickle: as in `farspan.load`.

    Raises:
        ValueError: an encoder that cannot be loaded, has fewer layers, or is not bidirectional.
    """
    if isinstance(encoder, PreTrainedConfig):
        model = AutoModel.from_config(encoder_config(encoder.to_dict())).to(dtype)
    elif isinstance(encoder, str | Path):
        common: dict[str, Any] = {"what": "encoder", "trust_remote_code": trust_remote_code}
        config = encoder_config(load_config(encoder, **common).to_dict())
        optional = ("pooler.",)  # never used
        options: dict[str, Any] = {"dtype": dtype, "allow_pickle": allow_pickle, "optional": optional, **common}
        model, _ = load_weights(AutoModel, encoder, config, **options)
    else:
        model = encoder.base_model.to(dtype)  # of a masked-language model, its body
        model.config.is_causal, model.config.use_cache = False, False
    if layers is not None:
        _keep_first(model, layers)
    _check_both_ways(model)
    return model


def _keep_first(encoder: Any, layers: int) -> None:
    found = layers_of(encoder)
    if not 1 <= layers <= len(found):
        raise ValueError(f"cannot keep {layers:,} layers of an encoder with {len(found):,}: give 1 to {len(found):,}")
    del found[layers:]
    encoder.config.num_hidden_layers = layers
    if getattr(encoder.config, "layer_types", None):
        encoder.config.layer_types = encoder.config.layer_types[:layers]


@torch.no_grad()
def _check_both_ways(encoder: Any) -> None:
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]], device=encoder.get_input_embeddings().weight.device)
    with evaluating(encoder):
        one, other = encoder(input_ids=ids % encoder.config.vocab_size).last_hidden_state
    if torch.equal(one[0], other[0]):
        raise ValueError(
            f"{type(encoder).__name__} is causal, not bidirectional, so it cannot be the encoder: use a "
            "bidirectional model, or one whose attention transformers makes bidirectional with config.is_causal = False"
        )
