"""The calculated cost of reading with an encoder: memory in bytes, by part, and floating-point operations.

The parts of memory are the weights, the encoder's states, keys and values, and the largest activations of one forward
pass. Table 1 of Yen et al. 2024, arXiv 2402.16617, has the measured sum. Ours is smaller: it has no keys and values of
the encoder, no dense mask, and logits of the queried positions only.
"""

from dataclasses import dataclass
from typing import Any

from farspan import hf
from farspan.cepe.encoder import TOKENS_AT_ONCE


@dataclass(frozen=True)
class Sizes:
    """A transformer's sizes, from its config."""

    hidden: int
    inner: int  # heads · head dimension
    keys: int  # key heads · head dimension
    feed_forward: int
    layers: int
    vocabulary: int
    cross_layers: int | None = None  # with cross-attention, in the decoder of a CEPE model; None: all

    @classmethod
    def of(cls, config: Any) -> "Sizes":
        crossed = getattr(config, "num_cross_attn_layers", None)
        config = config.get_text_config(decoder=True)
        heads, dim = hf.heads_of(config)
        keys = (getattr(config, "num_key_value_heads", None) or heads) * dim
        feed_forward = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        sizes = config.hidden_size, heads * dim, keys, feed_forward, config.num_hidden_layers, config.vocab_size
        return cls(*sizes, crossed)

    @property
    def matrices(self) -> int:
        """The number of weights of one layer with a gated feed-forward."""
        return self.hidden * (2 * self.inner + 2 * self.keys + 3 * self.feed_forward)

    def activations(self, tokens: int) -> int:
        """Return the largest number of values that the forward pass of one layer over `tokens` tokens holds at once."""
        return tokens * (2 * self.hidden + 3 * self.feed_forward)


def memory(
    decoder: Sizes,
    encoder: Sizes | None,
    *,
    weights: int,
    context: int,
    tokens: int,
    rows: int = 1,
    at_once: int | None = None,
    kept: int = 1,
    itemsize: int = 2,
) -> dict[str, int]:
    """Return the bytes of `context` tokens in the encoder and `tokens` in the decoder, in each of `rows` rows, by part
    of memory.

    Args:
        encoder: None: the decoder reads without an encoder.
        weights: bytes of all weights.
        at_once: tokens of one forward pass of the decoder; default all.
        kept: the number of positions whose logits are computed, in float32.
        itemsize: bytes of one number.
    """
    reading = rows * decoder.activations(min(tokens, at_once or tokens)) * itemsize
    encoding = states = 0
    if encoder is not None and context:
        states = rows * context * encoder.hidden * itemsize
        encoding = encoder.activations(min(rows * context, TOKENS_AT_ONCE)) * itemsize
        reading += rows * context * 2 * decoder.keys * itemsize  # of one layer, freed after it
    return {
        "weights": weights,
        "context_states": states,
        "keys_and_values": rows * tokens * decoder.layers * 2 * decoder.keys * itemsize,
        "activations": max(reading, encoding) + rows * kept * decoder.vocabulary * 4,
    }


def prefill_flops(
    decoder: Sizes, encoder: Sizes | None, *, context: int, tokens: int, kept: int = 1, chunk: int = 256
) -> float:
    """Return the number of multiplications and additions to read `context` tokens in chunks of `chunk`, then `tokens`
    in the decoder, with logits of `kept` positions. Causal attention counts half of all pairs of tokens."""
    own = 2 * decoder.matrices * tokens + 4 * decoder.inner * tokens * (tokens + 1) / 2
    total = decoder.layers * own + 2 * decoder.hidden * decoder.vocabulary * kept
    if encoder is None or not context:
        return total
    cross = 2 * tokens * 2 * decoder.hidden * decoder.inner + 2 * context * 2 * encoder.hidden * decoder.keys
    cross += 4 * decoder.inner * tokens * context
    states = 2 * encoder.matrices * context + 4 * encoder.inner * context * chunk
    return total + (decoder.cross_layers or decoder.layers) * cross + encoder.layers * states


def parameters(decoder: Sizes, encoder: Sizes | None = None) -> int:
    """Return the number of weights of a Llama with untied embeddings; with an encoder, of the CEPE model."""
    count = decoder.layers * (decoder.matrices + 2 * decoder.hidden) + (2 * decoder.vocabulary + 1) * decoder.hidden
    if encoder is None:
        return count
    cross = 2 * decoder.hidden * decoder.inner + 2 * encoder.hidden * decoder.keys + decoder.hidden
    states = encoder.layers * (encoder.matrices + 2 * encoder.hidden) + (encoder.vocabulary + 1) * encoder.hidden
    return count + (decoder.cross_layers or decoder.layers) * cross + states
