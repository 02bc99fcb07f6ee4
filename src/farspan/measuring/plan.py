"""The cost of a measurement before it runs: tokens, floating-point operations, memory, time.

Everything except the time is computed from the model's config and tokenizer, so the model needs no weights.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from farspan.lm import LM
from farspan.measuring.arguments import positive
from farspan.measuring.calibration import calibrated
from farspan.measuring.loop import batch_that_fits, chunk_of, key_bytes, within_positions
from farspan.measuring.operations import flops_of
from farspan.methods import Method
from farspan.reader import logits_at_once
from farspan.record import UNFINISHED, Row, by_key, continued, latest, read_header, read_rows
from farspan.tasks.base import Bound, Example, Work


@dataclass(frozen=True)
class Plan:
    """Predicted cost of a measurement."""

    num_examples: int  # with something left to measure
    tokens: int  # fed to the model, over all rows
    flops: float
    weight_bytes: int  # of the model, buffers included
    extra_bytes: int  # above the model: keys, one chunk's attention mask, one block of logits
    batch: int  # examples read together
    seconds: float | None  # measured on the model or from the operations; None: not requested
    fallback: str | None  # why the model will be read with plain forwards; None: it will not
    parts: dict[str, int] | None = None  # bytes by purpose, the model's included; None: not known
    num_done: int = 0  # measurements that the run has already
    longest: int = 0  # tokens of the longest context, with those that are scored
    trained_length: int | None = None  # tokens; of the model without the method

    def after(self, before: "Plan", every: "Plan") -> "Plan":
        """Return the cost that one length adds to the shorter ones, which may share the text that is read.

        Args:
            before: the plan of all shorter lengths.
            every: that of all lengths up to this one.
        """
        flops = every.flops - before.flops
        seconds = self.seconds and self.seconds * flops / self.flops
        return replace(self, tokens=every.tokens - before.tokens, flops=flops, seconds=seconds)


class Planned(NamedTuple):
    """The cost of one cell of a run."""

    model: str
    method: str
    what: str  # the task with its options
    length: int | None  # None: of all lengths
    cost: Plan | str  # str: the reason why it will be refused


def plan(
    bound: Bound[Any],
    method: Method,
    lm: LM,
    *,
    lengths: Sequence[int],
    repeats: int,
    seed: int = 0,
    **options: Any,
) -> Plan:
    """Return the cost of `measure_cell` with the same arguments. The options are those of `plan_examples`.

    Raises:
        ValueError: a text too short for the lengths; as `plan_examples`.
    """
    return plan_examples(bound, method, lm, bound.examples(lm, lengths, repeats, seed), repeats, **options)


def plan_examples(
    bound: Bound[Any],
    method: Method,
    lm: LM,
    examples: Sequence[Example[Any]],
    repeats: int,
    *,
    batch: int | None = None,
    chunk: int | None = None,
    calibrate: bool = False,
    tflops: float | None = None,
    rows: Sequence[Row] = (),
) -> Plan:
    """Return the cost of measuring these examples, or of what they lack.

    Args:
        batch, chunk: as of `measure_cell`.
        calibrate: measure the time of a few forwards on the model, with the run's own batch and chunk.
        tflops: 10^12 floating-point operations per second of the machine, from which the time is computed.
        rows: of the run, of this task, model and method; what they hold is not measured again.

    Raises:
        ValueError: lengths beyond the model's positions, or a model without weights to calibrate on.
    """
    possible = within_positions(bound, lm, examples)
    if not possible:
        fewest = min(bound.num_tokens(lm, example, length) for example in examples for length in example.lengths)
        raise ValueError(
            f"needs {fewest:,} tokens, {lm.name} has {lm.position_limit:,} positions: give smaller lengths (--lengths)"
        )
    examples, num_done = still_missing(possible, rows)
    if not examples:
        seconds = 0.0 if calibrate or tflops is not None else None
        return Plan(0, 0, 0.0, lm.num_bytes, 0, 0, seconds, None, num_done=num_done)
    by_example = [list(bound.work(lm, example)) for example in examples]
    batch = min(repeats, batch or batch_that_fits(bound, method, lm, examples))
    together = batch if bound.reads_together else 1
    num_rows = together * max(w.num_rows for some in by_example for w in some)
    longest = max(w.num_before + w.num_tokens for some in by_example for w in some)
    head = len(bound.separator(lm))
    with method.on(lm) as reader, bound.around(reader):
        chunk = reader.chunk = chunk or chunk_of(reader, batch)
        parts = reader.bytes_needed(num_rows, longest)
        work = [w for some in by_example for w in reader.forwards(some, head)]
        by_batch = [list(bound.work_of_batch(lm, example)) for example in examples[::batch]]
        once = [w for some in by_batch for w in reader.forwards(some, head)]
        flops = sum(map(flops_of(reader), [*work, *once]))
        if fallback := reader.fallback:
            chunk = max(w.num_tokens for w in work)  # one forward
        steps = [step for w in work for step in _chunks(w, chunk)]
        seconds = None if tflops is None else flops / (1e12 * tflops)
        if calibrate:
            speed = calibrated(reader, method, steps, together)
            # examples of a batch run together; ceil: the last batch may be smaller
            seconds = sum(s.num_rows * speed.seconds(s) for s in steps) / repeats * math.ceil(repeats / together)
            seconds += sum(s.num_rows * speed.seconds(s) for w in once for s in _chunks(w, chunk))
    # memory counts what the method keeps of a whole text, also where each forward reads a part of it
    steps += [step for some in by_example for w in some for step in _chunks(w, chunk)]
    keys = together * max(
        (key_bytes(method, lm, s, chunk) + _bytes_twice(method, lm, s)) * 5 // 4 + _mask_bytes(method, s) for s in steps
    )
    return Plan(
        num_examples=len(examples),
        tokens=sum(w.num_rows * w.num_tokens for w in [*work, *once]),
        flops=flops,
        weight_bytes=lm.num_bytes,
        extra_bytes=(sum(parts.values()) - parts["weights"] if parts else keys) + 3 * 4 * logits_at_once(lm.device),
        batch=together,
        seconds=seconds,
        fallback=fallback,
        parts=parts,
        num_done=num_done,
        longest=longest,
        trained_length=lm.trained_length,
    )


def plan_alike(
    bound: Bound[Any],
    method: Method,
    lm: LM,
    examples: Sequence[Example[Any]],
    repeats: int,
    rows_of_each: Iterable[Sequence[Row]],
    **options: Any,
) -> Plan:
    """Return the cost of measuring the same examples under several methods, each of which costs as much as `method`.

    Args:
        rows_of_each: the rows that the run has under each of them.
        options: as of `plan_examples`.

    Raises:
        ValueError: as `plan`.
    """
    alike = by_key((frozenset(_finished(rows)), rows) for rows in rows_of_each)
    costs = list[Plan]()
    for some in alike.values():
        costs += [plan_examples(bound, method, lm, examples, repeats, rows=some[0], **options)] * len(some)
    return replace(
        max(costs, key=lambda one: one.extra_bytes),
        num_examples=sum(one.num_examples for one in costs),
        tokens=sum(one.tokens for one in costs),
        flops=sum(one.flops for one in costs),
        seconds=None if costs[0].seconds is None else sum(one.seconds or 0.0 for one in costs),
        num_done=sum(one.num_done for one in costs),
    )


def check_timing(calibrate: bool, tflops: float | None) -> None:
    """Raise ValueError for both ways to a time, or `tflops` that is not a positive number."""
    if tflops is None:
        return
    positive(tflops, "tflops", ", the 10^12 floating-point operations that the machine does in a second")
    if calibrate:
        raise ValueError("tflops and calibrate both give the time: use one of them (--tflops, --calibrate)")


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run."""
    return (folder / "run.json").exists()


def rows_so_far(folder: Path, settings: Mapping[str, Any], *, may_grow: bool = False) -> list[Row]:
    """Return the rows of the run that these settings would continue; none if there is no run.

    Raises:
        ValueError: a run with other settings.
    """
    if not is_run(folder):
        return []
    rows = latest(read_rows(folder))
    continued(folder, read_header(folder)["settings"], settings, rows, divided=False, may_grow=may_grow)
    return rows


def still_missing(examples: Sequence[Example[Any]], rows: Sequence[Row]) -> tuple[list[Example[Any]], int]:
    """Return the examples with the lengths at which they lack a finished row, and the number of finished rows."""
    done = _finished(rows)
    wanted = {e.id: {n: {(e.id, n, depth) for depth in e.depths} for n in e.lengths} for e in examples}
    left = [replace(e, lengths=tuple(n for n in e.lengths if wanted[e.id][n] - done)) for e in examples]
    every = set[tuple[str, int, float]]().union(*(at for by_length in wanted.values() for at in by_length.values()))
    return [e for e in left if e.lengths], len(every & done)


def _finished(rows: Sequence[Row]) -> set[tuple[str, int, float]]:
    """Return the places of the rows that are not measured again."""
    return {row.place for row in rows if row.status not in UNFINISHED}


def _bytes_twice(method: Method, lm: LM, step: Work) -> int:
    """Return the bytes of the keys that a method holds a second time while it generates, half of keys and values."""
    is_generated = step.num_tokens == 1 and step.num_scored
    return step.num_rows * lm.key_bytes(method.kept_twice(step.num_before), 1) // 2 if is_generated else 0


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
