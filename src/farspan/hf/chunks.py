"""Checks on a few hundred tokens: can a model read in chunks, and take several continuations in one forward?"""

from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from farspan.hf.decoder import logits, plain_hidden
from farspan.hf.device import is_out_of_memory
from farspan.hf.rotary import length_dependent_rope
from farspan.hf.stream import Stream

LOGITS_AT_ONCE = {"cpu": 1 << 22}  # values; the output head runs on small blocks on a CPU,
LOGITS_AT_ONCE_ELSEWHERE = 1 << 25  # on large ones where each block reads the whole matrix from slow memory
CHECK_TEXT = (
    "The quick brown fox jumps over the lazy dog. A reader that reads a text in pieces has to arrive where a reader "
    "of the whole arrives: same words, same order, same expectations. Names help to see it: Ada, Grace, Alan, Kurt, "
    "Emmy, Srinivasa; and numbers do as well: 3, 14, 159, 2653, 58979. "
)
# the errors of a model that cannot be read this way
TROUBLE = (TypeError, ValueError, AttributeError, LookupError, RuntimeError)
_BRANCHES: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def self_check(lm: Any) -> str | None:
    """Return why `lm` must be read with plain forwards, or None. Compares chunks, one token and a fork with a forward.

    Uses two rows of about 300 tokens in the dtype of the run. In float32 the largest difference of logits must be below
    1e-3 of their spread; in lower precision 98 % of the likeliest tokens must agree and the mean KL divergence stay
    below 0.01 nats. In chunks, transformers 5.23 silently gives different logits for Mamba-1, FalconMamba, Jamba and
    RecurrentGemma.

    Raises:
        ValueError: a forward that fails, predictions that depend on later tokens, or an output head that cannot be run
            separately.
    """
    if scaling := length_dependent_rope(lm.model):
        return f"its RoPE scaling ({scaling}) depends on the length of the text, and cached keys are not rotated again"
    if not lm.has_weights:
        return None  # a plan assumes that chunks work, as in most models
    tokens = lm.tokenizer(CHECK_TEXT * 8, add_special_tokens=False, verbose=False)["input_ids"]
    length = min(300, len(tokens), lm.position_limit or 300)
    ids = torch.tensor([tokens[:length], tokens[:length][::-1]], device=lm.device)
    cut = length // 3
    with torch.no_grad():
        few = ids[:, :32]
        later = torch.cat([few[:, :16], few[:, 16:].flip(0)], 1)  # as many tokens, for the same rounding
        try:
            own, changed = (lm.model(input_ids=some, use_cache=False).logits.float() for some in (few, later))
            # also of the few tokens: in bfloat16 a longer forward rounds differently, which is no fault of the head
            (hidden, head), (whole, output) = (plain_hidden(lm.model, some) for some in (few, ids))
        except TROUBLE as error:
            if is_out_of_memory(error):
                raise
            line = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ValueError(
                f"{lm.name}: its own forward fails on a text of {length} tokens or fewer: {line}"
            ) from error
        if bool(own.isnan().any()):
            return None  # the rows will have the status "nan" in any case
        causal, separate = _Difference(), _Difference()
        causal.add(own[:, :16], changed[:, :16])
        if problem := causal.problem(lm.dtype):
            raise ValueError(
                f"{lm.name}: its predictions depend on later tokens: not a causal model ({problem}). Give a model that "
                "predicts each token from the tokens before it"
            )
        separate.add(own, logits(lm.model, hidden, head).float().to(own.device))
        if problem := separate.problem(lm.dtype):
            raise ValueError(
                f"{lm.name}: the output head does not give the model's own logits when it is run separately; "
                f"this architecture cannot be read yet ({problem})"
            )
        try:
            stream = Stream(lm.model)
            parts = [stream.step(ids[:, :cut])]
            with stream.unchanged():  # which must leave no state
                stream.step(ids.flip(1)[:, : cut + 7])
            cuts = pairwise((cut, 2 * cut + 5, 2 * cut + 6, length))
            parts += [stream.step(ids[:, first:last]) for first, last in cuts]
        except TROUBLE as error:
            if is_out_of_memory(error):
                raise
            return f"reading in chunks fails: {type(error).__name__}: {error}"
        chunked = torch.cat(parts, 1)
        difference = _Difference()
        block = max(1, logits_at_once(lm.device) // (2 * lm.vocabulary))
        for first in range(0, length, block):
            here = slice(first, first + block)
            expected = logits(lm.model, whole[:, here], output).float()
            difference.add(expected, logits(lm.model, chunked[:, here], stream.output).float())
    problem = difference.problem(lm.dtype)
    return problem and f"in chunks {problem}"


def can_branch(lm: Any) -> bool:
    """Return whether several continuations in one forward get the same logits as one by one. Some families derive
    positions or biases from the mask and need another shape. Checked once, on a few tokens."""
    if "local" in (getattr(lm.model.config, "attention_layers", None) or ()):
        return False  # GPT-Neo's windows count keys, not positions; the few tokens below may all be within one
    if lm not in _BRANCHES:
        ids = torch.tensor(lm.tokenizer(CHECK_TEXT, add_special_tokens=False, verbose=False)["input_ids"])
        ids = ids.to(lm.device)[None, : lm.position_limit]
        few = max(1, min(8, ids.shape[1] // 8))
        text, branches = ids[:, : -3 * few], ids[:, -3 * few :].reshape(3, 1, few)
        stream = Stream(lm.model)
        difference = _Difference()
        with torch.no_grad():
            stream.step(text)
            try:
                with stream.unchanged():
                    together = logits(lm.model, stream.branch(branches)[:, 0], stream.output).float()
                for branch, given in zip(branches, together, strict=True):
                    with stream.unchanged():
                        expected = logits(lm.model, stream.step(branch), stream.output).float()
                    difference.add(expected, given[None])
            except TROUBLE as error:
                if is_out_of_memory(error):
                    raise
                _BRANCHES[lm] = False
            else:
                _BRANCHES[lm] = difference.problem(lm.dtype) is None
    return _BRANCHES[lm]


class _Difference:
    """The difference between two computations of the same logits [batch, time, vocabulary], summed over blocks."""

    def __init__(self) -> None:
        self.largest, self.spread, self.same, self.divergence, self.count = 0.0, 0.0, 0.0, 0.0, 0

    def add(self, expected: Tensor, given: Tensor) -> None:
        apart = (expected - given)[expected.isfinite()].abs()  # a family may exclude tokens with -inf
        self.largest = max(self.largest, float(apart.max().nan_to_num(torch.inf)))
        self.spread = max(self.spread, float(expected[expected.isfinite()].std()))
        self.same += float((expected.argmax(-1) == given.argmax(-1)).float().sum())
        log_p, log_q = expected.log_softmax(-1), given.log_softmax(-1)
        self.divergence += float((log_p.exp() * (log_p - log_q).nan_to_num(0.0)).sum())
        self.count += expected.shape[0] * expected.shape[1]

    def problem(self, dtype: torch.dtype) -> str | None:
        if dtype == torch.float32:
            relative = self.largest / max(self.spread, 1e-9)
            return None if relative < 1e-3 else f"its logits differ by {relative:.2g} of their spread"
        agreement, divergence = self.same / self.count, self.divergence / self.count
        if (agreement >= 0.98 and divergence < 0.01) or (agreement >= 0.9 and divergence < 0.001):
            return None
        return f"{1 - agreement:.1%} of its likeliest tokens differ (KL divergence {divergence:.2g} nats)"


def logits_at_once(device: torch.device) -> int:
    """Return how many logits to hold at a time, over the rows of a batch."""
    return LOGITS_AT_ONCE.get(device.type, LOGITS_AT_ONCE_ELSEWHERE)
