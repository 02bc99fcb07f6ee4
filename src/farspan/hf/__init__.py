# ruff: noqa: F401  (the names are for `from farspan import hf`)
"""All access to transformers' internals: caches, attention, RoPE, the output head, masks, limits."""

from farspan.hf.attention import CustomAttention, attention_names, replaced_attention
from farspan.hf.config import scoring_fields
from farspan.hf.decoder import decoder_of, head_at, logits, plain_hidden, watched_decoder
from farspan.hf.device import free_bytes, has_instructions
from farspan.hf.facts import (
    checkpoint_activations,
    first_not_finite,
    flops,
    heads_of,
    input_device,
    key_bytes_by_window,
    offloaded,
    position_limit,
)
from farspan.hf.masks import causal_mask, gapped_mask, sliding_windows
from farspan.hf.parallel import bytes_here, check_divides, least, num_parts, refuse_divided
from farspan.hf.probe import attention_layers, check_cached_keys, rotates_only_near, watch_attention
from farspan.hf.rotary import (
    full_attention_rope,
    length_dependent_rope,
    plain_rope,
    rope,
    rope_frequencies,
    rope_precision,
    rotary_modules,
    rotation_error,
    set_context,
    set_rope,
)
from farspan.hf.scope import Scope, alone, check_scope
from farspan.hf.stream import Stream
