"""The cost of a measurement before it runs: tokens, floating-point operations, memory, time."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from farspan.hf.device import wait
from farspan.lm import LM
from farspan.measuring.loop import batch_that_fits, key_bytes, within_positions
from farspan.methods import Method
from farspan.reader import Reader, logits_at_once
from farspan.tasks.base import Bound, Work

CALIBRATION_CONTEXT = 2048  # tokens, at most
CALIBRATION_RUNS = 3


@dataclass(frozen=True)
class Plan:
    """Predicted cost of a measurement."""

    num_examples: int
    tokens: int  # fed to the model, over all rows
    flops: float
    extra_bytes: int  # above the model: keys, one chunk's attention mask, one block of logits
    seconds: float | None  # by a short calibration on the model; None without one
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
    calibrate: bool = True,
) -> Plan:
    """Return the cost of `measure_cell` with the same arguments.

    The time is a sum over chunks of (constant + a · tokens + b · tokens · context) + c · scored positions, whose
    four numbers are measured on the model with the run's own batch and chunk, in a few forwards.

    Raises:
        ValueError: a text too short for the lengths.
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
        seconds = None
        if calibrate:
            cost = _calibrated(reader, batch, chunk, max(s.num_before + s.num_tokens for s in steps), bool(fallback))
            # examples of a batch run together; ceil: the last batch may be smaller
            seconds = sum(s.num_rows * cost(s) for s in steps) / repeats * math.ceil(repeats / batch)
    keys = batch * max(key_bytes(method, lm, s, chunk) * 5 // 4 + _mask_bytes(method, s) for s in steps)
    return Plan(
        num_examples=len(examples),
        tokens=sum(w.num_rows * w.num_tokens for w in work),
        flops=flops,
        extra_bytes=(sum(parts.values()) - parts["weights"] if parts else keys) + 3 * 4 * logits_at_once(lm),
        seconds=seconds,
        fallback=fallback,
        parts=parts,
    )


def _mask_bytes(method: Method, step: Work) -> int:
    """Return the bytes of the mask of one chunk: a byte for each pair of its tokens and the tokens they may see."""
    return step.num_rows * step.num_tokens * (method.kept(step.num_before) + step.num_tokens)


def _chunks(work: Work, chunk: int) -> list[Work]:
    """Return the forwards of this work; the positions of the output head are its last ones."""
    steps = []
    for first in range(0, work.num_tokens, chunk):
        tokens = min(chunk, work.num_tokens - first)
        left = work.num_tokens - first - tokens
        scored = max(0, min(tokens, work.num_scored - left))
        steps.append(Work(work.num_rows, work.num_before + first, tokens, scored))
    return steps


def _calibrated(reader: Reader, batch: int, chunk: int, longest: int, plain: bool) -> Callable[[Work], float]:
    """Return a function of the seconds of a step of `batch` rows, fitted to the times of a few steps of this reader."""
    tokens = min(chunk, longest, CALIBRATION_CONTEXT)
    context = max(1, min(longest, CALIBRATION_CONTEXT) - tokens)
    few = max(1, tokens // 8)
    ids = torch.randint(3, min(1000, reader.lm.vocabulary), (batch, context + tokens))

    def timed(before: int, num_tokens: int, keep: slice) -> float:
        memory = reader.read(ids[:, :before])
        seconds = []
        for _ in range(CALIBRATION_RUNS + 1):
            wait(reader.lm.device)
            started = time.perf_counter()
            # one more token than is fed: the last scored token is only a target
            memory.score(ids[:, : num_tokens + 1], keep)
            wait(reader.lm.device)
            seconds.append(time.perf_counter() - started)
        return min(seconds[1:])  # other processes on the machine only add time

    nothing, everything = slice(tokens, tokens), slice(1, None)
    short = timed(1, few, slice(few, few))
    near = timed(1, tokens, nothing)
    far = near if plain else timed(context, tokens, nothing)
    head = max(0.0, timed(1, tokens, everything) - near) / tokens
    per_pair = max(0.0, far - near) / (tokens * max(1, context - 1))
    per_token = max(0.0, near - short - per_pair * (tokens**2 - few**2)) / max(1, tokens - few)
    constant = max(0.0, short - per_token * few)
    return lambda s: (
        constant
        + per_token * s.num_tokens
        + per_pair * s.num_tokens * (s.num_before + s.num_tokens)
        + head * s.num_scored
    )
