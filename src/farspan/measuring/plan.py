"""The cost of a measurement before it runs: tokens, floating-point operations, memory, time.

Everything except the time is computed from the model's config and tokenizer, so the model needs no weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from farspan.lm import LM
from farspan.measuring.calibration import calibrated
from farspan.measuring.loop import batch_that_fits, key_bytes, within_positions
from farspan.methods import Method
from farspan.reader import logits_at_once
from farspan.tasks.base import Bound, Work


@dataclass(frozen=True)
class Plan:
    """Predicted cost of a measurement."""

    num_examples: int
    tokens: int  # fed to the model, over all rows
    flops: float
    weight_bytes: int  # of the model, buffers included
    extra_bytes: int  # above the model: keys, one chunk's attention mask, one block of logits
    batch: int  # examples read together
    seconds: float | None  # measured on the model or from the operations; None: not requested
    fallback: str | None  # why the model will be read with plain forwards; None: it will not
    parts: dict[str, int] | None = None  # bytes by purpose, the model's included; None: not known


def plan(
    bound: Bound[Any],
    method: Method,
    lm: LM,
    *,
    lengths: Sequence[int],
    repeats: int,
    seed: int = 0,
    batch: int | None = None,
    chunk: int | None = None,
    calibrate: bool = False,
    tflops: float | None = None,
) -> Plan:
    """Return the cost of `measure_cell` with the same arguments.

    Args:
        calibrate: measure the time of a few forwards on the model, with the run's own batch and chunk.
        tflops: 10^12 floating-point operations per second of the machine, from which the time is computed.

    Raises:
        ValueError: a text too short for the lengths, or a model without weights to calibrate on.
    """
    examples = within_positions(bound, lm, bound.examples(lm, lengths, repeats, seed))
    work = [w for example in examples for w in bound.work(lm, example)]
    if not work:
        raise ValueError(f"{lm.name} has {lm.position_limit:,} positions; every length needs more: give smaller ones")
    batch = min(repeats, batch or batch_that_fits(bound, method, lm, examples))
    rows = batch * max(w.num_rows for w in work)
    longest = max(w.num_before + w.num_tokens for w in work)
    with method.on(lm) as reader, bound.around(reader):
        chunk = reader.chunk = chunk or reader.chunk
        parts = reader.bytes_needed(rows, longest)
        flops = sum(w.num_rows * reader.flops(w.num_before, w.num_tokens, w.num_scored) for w in work)
        fallback = reader.fallback
        if fallback:  # every score reads everything again, in one forward
            work = [Work(w.num_rows, 0, w.num_before + w.num_tokens, w.num_scored) for w in work if w.num_scored]
            chunk = max(w.num_tokens for w in work)
        steps = [step for w in work for step in _chunks(w, chunk)]
        seconds = None if tflops is None else flops / (1e12 * tflops)
        if calibrate:
            speed = calibrated(reader, method, steps, batch)
            # examples of a batch run together; ceil: the last batch may be smaller
            seconds = sum(s.num_rows * speed.seconds(s) for s in steps) / repeats * math.ceil(repeats / batch)
    keys = batch * max(key_bytes(method, lm, s, chunk) * 5 // 4 + _mask_bytes(method, s) for s in steps)
    return Plan(
        num_examples=len(examples),
        tokens=sum(w.num_rows * w.num_tokens for w in work),
        flops=flops,
        weight_bytes=lm.num_bytes,
        extra_bytes=(sum(parts.values()) - parts["weights"] if parts else keys) + 3 * 4 * logits_at_once(lm),
        batch=batch,
        seconds=seconds,
        fallback=fallback,
        parts=parts,
    )


def _mask_bytes(method: Method, step: Work) -> int:
    """Return the bytes of the mask of one chunk: a byte for each pair of its tokens and the tokens they may see."""
    return step.num_rows * step.num_tokens * (method.kept(step.num_before) + step.num_tokens)


def _chunks(work: Work, chunk: int) -> list[Work]:
    """Return the forwards of this work; the output head runs at its last positions."""
    steps = []
    for first in range(0, work.num_tokens, chunk):
        tokens = min(chunk, work.num_tokens - first)
        left = work.num_tokens - first - tokens
        scored = max(0, min(tokens, work.num_scored - left))
        steps.append(Work(work.num_rows, work.num_before + first, tokens, scored))
    return steps
