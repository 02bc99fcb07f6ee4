"""The one evaluation loop: task × reader × lengths → rows. Resumes, backs off when memory runs out."""

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from farspan.device import free_bytes, is_out_of_memory, peak_bytes
from farspan.lm import LM
from farspan.methods import Method
from farspan.reader import CHUNK, Reader
from farspan.record import Row, Run
from farspan.tasks import Example, Result, Task, Work

SMALLEST_CHUNK = 64  # tokens; below that the overhead of each forward outweighs what it frees
TOKENS_AT_ONCE = 8192  # of one forward, over the rows of a batch
TRIED_AGAIN = ("oom", "budget")  # statuses
MEMORY_SHARE = 0.3  # of what is free, for the keys of one batch


@dataclass(frozen=True)
class Watch:
    """What wants to know how a measurement is getting on. All optional."""

    start: Callable[[str, int], None] = lambda title, total: None  # what begins, and how many rows it will have
    row: Callable[[Row, int, int], None] = lambda row, done, total: None  # a new row, how many exist, will exist
    notice: Callable[[str], None] = lambda text: None  # what a user should know


def measure(
    task: Task,
    method: Method,
    lm: LM,
    run: Run,
    *,
    lengths: Sequence[int],
    repeats: int,
    seed: int = 0,
    batch: int | None = None,
    chunk: int | None = None,
    longest: Callable[[], int] | None = None,
    watch: Watch | None = None,
) -> list[Row]:
    """Measures what `run` does not hold yet and returns the rows of this task, method and model, all of them.

    Args:
        lengths: tokens, ascending.
        batch: repeats read at once; default what fits by estimate.
        chunk: tokens of one forward; default the reader's own. Both are halved when memory runs out, the chunk
            first; what fails with the smallest of both is a row with status "oom".
        longest: asked at the start and after each length of a batch: the largest length still worth measuring.
            What is longer gets no row.
        watch: told of each new row, and of what a user should know, such as a fallback.

    Raises:
        ValueError: a text too short for the lengths.
        OSError: the disk is full.
    """
    watch = watch or Watch()
    examples = task.examples(lm, lengths, repeats, seed)
    wanted = {(e.id, length, depth) for e in examples for length in e.lengths for depth in e.depths}
    end = math.inf  # tokens: the largest length still wanted

    def mine() -> list[Row]:
        ours = run.of(lm.name, str(method))
        return [row for row in ours if (row.example, row.length, row.depth) in wanted]

    # what ran out of memory or time is tried again: there may be more of it, or a smaller batch was asked for
    done = {(row.example, row.length, row.depth) for row in mine() if row.status not in TRIED_AGAIN}
    total = len(wanted)

    def write(result: Result, seconds: float, reading: dict[str, Any] | None = None) -> None:
        if (result.example.id, result.length, result.depth) in done:
            return  # of a batch that an earlier session began: read again so that the others are read as they were
        row = Row(
            model=lm.name,
            method=str(method),
            task=task.name,
            version=task.version,
            settings=task.settings,
            length=result.length,
            repeat=result.example.repeat,
            seed=seed,
            example=result.example.id,
            depth=result.depth,
            status=result.status,
            reason=result.reason,
            scores=result.scores,
            num_seen=result.num_seen,
            num_kept=result.num_kept,
            seconds=round(seconds, 4),
            peak_bytes=peak_bytes(lm.device),
            reading=reading or {},
        )
        run.append(row)
        done.add((result.example.id, result.length, result.depth))
        watch.row(row, len(done), total)

    def failed(example: Example, length: int, status: str, reason: str) -> None:
        for depth in example.depths:
            write(Result(example, length, depth, status=status, reason=reason), 0.0)

    def goes_on(after: int) -> bool:
        nonlocal end
        if longest is not None:
            end = min(end, longest())
        return after < end

    def missing(example: Example) -> tuple[int, ...]:
        def lacks(length: int) -> bool:
            return any((example.id, length, depth) not in done for depth in example.depths)

        return tuple(length for length in example.lengths if length <= end and lacks(length))

    if lm.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(lm.device)
    for example in examples:
        for length in missing(example):
            if not _within_positions(task, lm, length):
                reason = f"needs {task.num_tokens(lm, length):,} tokens, the model has {lm.position_limit:,} positions"
                failed(example, length, "too_long", reason)

    goes_on(0)
    if not any(missing(example) for example in examples):
        return mine()
    with method.on(lm) as reader:
        if reader.fallback:
            watch.notice(f"{lm.name} is read with plain forwards, slower and without a cache: {reader.fallback}")
        else:
            free = free_bytes(lm.device)
            for example in within_positions(task, lm, examples):
                for length in missing(example):
                    if reason := _cannot_fit(task, method, lm, replace(example, lengths=(length,)), free):
                        failed(example, length, "oom", reason)
        largest_chunk = chunk or reader.chunk
        fitting = within_positions(task, lm, examples)
        reader.capacity = max((task.num_tokens(lm, n) for e in fitting for n in e.lengths), default=0)
        size = batch or batch_that_fits(task, method, lm, fitting)
        queue = _batches(fitting, missing, mine(), size)
        while queue:
            group = queue[0]
            unmeasured = tuple(sorted({length for example in group.examples for length in missing(example)}))
            if not unmeasured:
                queue.popleft()
                continue
            reader.chunk = min(largest_chunk, group.chunk or largest_chunk)
            try:
                _measure_group(task, reader, group.examples, unmeasured, write, goes_on)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                problem = str(error).partition("\n")[0]
            else:
                continue
            # out of the `except`, whose traceback keeps the tensors alive
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            reader.capacity = 0  # room for the longest length may be what was too much for the others
            if reader.chunk > SMALLEST_CHUNK:
                largest_chunk = max(SMALLEST_CHUNK, reader.chunk // 2)
                watch.notice(f"out of memory: going on with chunks of {largest_chunk} tokens")
            elif len(group.examples) > 1:
                size = max(1, len(group.examples) // 2)
                queue = _batches(fitting, missing, [], size)
                watch.notice(f"out of memory: going on with {size} repeats at once")
            else:
                failing = group.examples[0]
                at = unmeasured[0]
                watch.notice(f"out of memory at length {at:,} even with one repeat and the smallest chunk")
                for example in examples:
                    tried = example.id == failing.id
                    reason = problem if tried else f"not tried: repeat {failing.repeat} failed at {at:,} tokens"
                    for length in missing(example):
                        if length >= at:
                            failed(example, length, "oom", reason)
    return mine()


def _measure_group(
    task: Task,
    reader: Reader,
    group: Sequence[Example],
    lengths: tuple[int, ...],
    write: Callable[[Result, float, dict[str, Any]], None],
    goes_on: Callable[[int], bool],
) -> None:
    """Measures a batch at some of its lengths. The results of one length come together, so the time between is shared
    among them."""
    started = time.perf_counter()
    ready: list[Result] = []
    how = {"repeats": [example.repeat for example in group], "chunk": reader.chunk}
    cuts = tuple(length for length in group[0].lengths if length <= lengths[-1])
    for result in task.run(reader, [replace(example, lengths=lengths, stops=cuts) for example in group]):
        ready.append(result)
        if len(ready) == len(group) * len(group[0].depths):
            now = time.perf_counter()
            reading = how | {"cuts": [cut for cut in cuts if cut <= result.length]}
            for finished in ready:
                write(finished, (now - started) / len(ready), reading)
            ready, started = [], now
            if not goes_on(result.length):
                return


@dataclass(frozen=True)
class _Batch:
    """Examples that are read together."""

    examples: tuple[Example, ...]
    chunk: int | None = None  # tokens of one forward, where an earlier session began this batch


def _batches(
    examples: Sequence[Example], missing: Callable[[Example], tuple[int, ...]], rows: Sequence[Row], size: int
) -> deque[_Batch]:
    """What is missing in batches of at most `size` examples of the same lengths. A batch that `rows` show to be begun
    is read as a whole again: in low precision, a row depends on what is read beside it."""
    alike: dict[tuple[int, ...], dict[int, Example]] = defaultdict(dict)
    lengths_of = {}
    for example in examples:
        alike[example.lengths][example.repeat] = example
        lengths_of[example.id] = example.lengths
    begun: dict[tuple[tuple[int, ...], int], tuple[tuple[int, ...], int]] = {}
    for row in rows:
        if row.reading and row.example in lengths_of:
            repeats = tuple(row.reading["repeats"])
            begun |= {(lengths_of[row.example], repeat): (repeats, row.reading["chunk"]) for repeat in repeats}
    batches: deque[_Batch] = deque()
    for lengths, by_repeat in alike.items():
        fresh, placed = list[Example](), set[int]()
        for repeat, example in by_repeat.items():
            if repeat in placed or not missing(example):
                continue
            repeats, chunk = begun.get((lengths, repeat), ((), None))
            if repeats and len(repeats) <= size and by_repeat.keys() >= set(repeats):
                batches.append(_Batch(tuple(by_repeat[one] for one in repeats), chunk))
                placed |= set(repeats)
            else:
                fresh.append(example)
        batches += [_Batch(tuple(fresh[first : first + size])) for first in range(0, len(fresh), size)]
    return batches


def within_positions(task: Task, lm: LM, examples: Sequence[Example]) -> list[Example]:
    """The examples without the lengths that a model with learned positions cannot read."""
    shortened = [replace(e, lengths=tuple(n for n in e.lengths if _within_positions(task, lm, n))) for e in examples]
    return [example for example in shortened if example.lengths]


def _within_positions(task: Task, lm: LM, length: int) -> bool:
    return lm.position_limit is None or task.num_tokens(lm, length) <= lm.position_limit


def key_bytes(method: Method, lm: LM, work: Work, chunk: int) -> int:
    """What the keys of one stretch of work take, over its rows: those that the method keeps, and those of a chunk."""
    before = method.kept(work.num_before)
    return work.num_rows * lm.key_bytes_per_token * (before + min(work.num_tokens, chunk))


def _cannot_fit(task: Task, method: Method, lm: LM, example: Example, free: int) -> str:
    """Why an example cannot be read even alone, where its keys are more than the free memory (bytes); else ""."""
    keys = max((key_bytes(method, lm, w, SMALLEST_CHUNK) for w in set(task.work(lm, example))), default=0)
    return f"keys of {keys / 2**30:,.1f} GiB alone, {free / 2**30:,.1f} GiB are free" if keys > free else ""


def batch_that_fits(task: Task, method: Method, lm: LM, examples: Sequence[Example]) -> int:
    """Repeats to read at once: enough to keep the device busy, and their keys in a share of the free memory."""
    work = {w for example in examples for w in task.work(lm, example)}  # thousands of repeats have the same
    if not work:
        return 1
    longest = max(w.num_before + w.num_tokens for w in work)
    keys = max(key_bytes(method, lm, w, CHUNK) for w in work)
    return max(
        1,
        min(TOKENS_AT_ONCE // max(1, min(longest, 1024)), int(free_bytes(lm.device) * MEMORY_SHARE / max(1, keys))),
    )
