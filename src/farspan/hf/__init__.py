"""All access to transformers' internals: caches, attention, RoPE, the output head, masks, limits."""

from farspan.hf.attention import CustomAttention, attention_names, replaced_attention
from farspan.hf.decoder import decoder_of, head_at, logits, plain_hidden, watched_decoder
from farspan.hf.device import free_bytes, has_instructions
from farspan.hf.facts import (
    checkpoint_activations,
    first_not_finite,
    flops,
    heads_of,
    input_device,
    key_bytes_per_token,
    position_limit,
)
from farspan.hf.masks import causal_mask, gapped_mask, sliding_windows
from farspan.hf.parallel import bytes_here, check_divides, least, num_parts, refuse_divided
from farspan.hf.probe import attention_layers, watch_attention
from farspan.hf.rotary import (
    length_dependent_rope,
    plain_rope,
    rope,
    rope_frequencies,
    rope_precision,
    rotary_modules,
    set_rope,
)
from farspan.hf.scope import Scope, alone, check_scope
from farspan.hf.stream import Stream

__all__ = [
    "CustomAttention",
    "Scope",
    "Stream",
    "alone",
    "attention_layers",
    "attention_names",
    "bytes_here",
    "causal_mask",
    "check_divides",
    "check_scope",
    "checkpoint_activations",
    "decoder_of",
    "first_not_finite",
    "flops",
    "free_bytes",
    "gapped_mask",
    "has_instructions",
    "head_at",
    "heads_of",
    "input_device",
    "key_bytes_per_token",
    "least",
    "length_dependent_rope",
    "logits",
    "num_parts",
    "plain_hidden",
    "plain_rope",
    "position_limit",
    "refuse_divided",
    "replaced_attention",
    "rope",
    "rope_frequencies",
    "rope_precision",
    "rotary_modules",
    "set_rope",
    "sliding_windows",
    "watch_attention",
    "watched_decoder",
]
