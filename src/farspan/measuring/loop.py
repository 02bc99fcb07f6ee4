"""Evaluate one task on one model under one method. Resumes a run; uses smaller batches when memory runs out."""

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from farspan.hf.device import is_out_of_memory, peak_bytes
from farspan.lm import LM
from farspan.measuring.operations import Operations
from farspan.methods import Method
from farspan.reader import CHUNK, TOKENS_AT_ONCE, Reader
from farspan.reader.served.client import TooLongError
from farspan.record import UNFINISHED, Row, Run
from farspan.tasks.base import Bound, Example, Result, Work

SMALLEST_CHUNK = 64  # tokens; below this the overhead of each forward outweighs the memory saved
MEMORY_SHARE = 0.3  # of the free memory, for the keys of one batch
Mine = Callable[[int, int], bool]  # whether a shard measures this repeat at this length


@dataclass(frozen=True)
class Watch:
    """Callbacks on the progress of a measurement. All optional."""

    start: Callable[[str, int], None] = lambda title, total: None  # a title, and its number of rows
    row: Callable[[Row, int, int], None] = lambda row, done, total: None  # a new row, number of rows so far and in all
    notice: Callable[[str], None] = lambda text: None  # a line for the user
    share: Callable[[float], None] = lambda share: None  # before each row: the estimated share of the work that is done


class Ledger:
    """The rows of one task, model and method in a run: keeps which are done or missing, and writes new ones."""

    def __init__(
        self,
        run: Run,
        bound: Bound[Any],
        method: Method,
        lm: LM,
        examples: Sequence[Example[Any]],
        seed: int,
        watch: Watch,
        mine: Mine | None = None,
    ) -> None:
        self.run, self.bound, self.method, self.lm, self.seed, self.watch = run, bound, method, lm, seed, watch
        self.examples = examples
        self._measurement = bound.measurement
        self._wanted = {
            (e.id, length, depth)
            for e in examples
            for length in e.lengths
            if mine is None or mine(e.repeat, length)
            for depth in e.depths
        }
        # rows that ran out of memory or time are measured again: more of it may be free now, or the batch smaller
        self._done = {row.place for row in self.rows if row.status not in UNFINISHED}
        self._end = math.inf  # the largest length still wanted
        self._left = Counter(length for _, length, _ in self._wanted - self._done)  # missing rows by length
        self._work: dict[int, float] = {}  # operations for a row of each length
        self._worked = 0.0  # operations for the rows of this session

    @property
    def rows(self) -> list[Row]:
        """All wanted rows of these examples, from this and earlier sessions."""
        rows = self.run.of(self.lm.name, str(self.method), self._measurement)
        return [row for row in rows if row.place in self._wanted]

    def missing(self, example: Example[Any]) -> tuple[int, ...]:
        """Return the lengths at which a wanted row of the example is missing."""

        def lacks(length: int) -> bool:
            places = ((example.id, length, depth) for depth in example.depths)
            return any(place in self._wanted and place not in self._done for place in places)

        return tuple(length for length in example.lengths if length <= self._end and lacks(length))

    def leave_out(self, beyond: int) -> None:
        """Leave out lengths beyond this one."""
        self._end = min(self._end, beyond)

    def weigh(self, operations: Operations) -> None:
        """Estimate the work for the missing rows of each length; examples with the same lengths are taken as alike."""
        for example in {example.lengths: example for example in self.examples}.values():
            lengths = tuple(length for length in example.lengths if self._left[length])
            sums = [operations(example, lengths[:end]) / len(example.depths) for end in range(len(lengths) + 1)]
            self._work |= {n: more - less for n, less, more in zip(lengths, sums, sums[1:], strict=False)}

    def _share(self) -> float:
        """Return the share of this session's work that is done."""
        left = sum(self._work.get(n, 0.0) * count for n, count in self._left.items() if n <= self._end)
        return self._worked / (self._worked + left) if left else 1.0

    def goes_on(self, after: int) -> bool:
        """Return whether lengths above this one are still wanted."""
        return after < self._end

    def write(self, result: Result, seconds: float = 0.0, reading: dict[str, Any] | None = None) -> None:
        """Append the row of a result. Skip rows that exist or belong to another shard: a batch begun by an earlier
        session is read again as a whole, to get the same numbers."""
        place = result.example.id, result.length, result.depth
        if place in self._done or place not in self._wanted:
            return
        row = self.bound.row(
            self.lm,
            str(self.method),
            self.seed,
            length=result.length,
            repeat=result.example.repeat,
            example=result.example.id,
            depth=result.depth,
            status=result.status,
            reason=result.reason,
            scores=result.scores,
            num_seen=result.num_seen,
            num_kept=result.num_kept,
            seconds=round(seconds, 4),
            peak_bytes=peak_bytes(self.lm.device),
            reading=reading or {},
        )
        self.run.append(row)
        self._done.add(place)
        self._left[result.length] -= 1
        self._worked += self._work.get(result.length, 0.0)
        if self._work:
            self.watch.share(self._share())
        self.watch.row(row, len(self._done), len(self._wanted))

    def fail(self, example: Example[Any], length: int, status: str, reason: str) -> None:
        """Append a row for each depth of a length that cannot be measured."""
        for depth in example.depths:
            self.write(Result(example, length, depth, status=status, reason=reason))

    def fail_from(self, failing: Example[Any], length: int, problem: str) -> None:
        """Append rows of status "oom" for all that is missing at this length, where an example failed, and beyond."""
        untried = f"not tried: repeat {failing.repeat} failed at {length:,} tokens"
        for example in self.examples:
            for n in self.missing(example):
                if n >= length:
                    self.fail(example, n, "oom", problem if example.id == failing.id else untried)


def measure_cell(
    bound: Bound[Any],
    method: Method,
    lm: LM,
    run: Run,
    *,
    lengths: Sequence[int],
    repeats: int,
    seed: int = 0,
    sampled: Sequence[int] | None = None,
    batch: int | None = None,
    chunk: int | None = None,
    longest: Callable[[], int] | None = None,
    mine: Mine | None = None,
    watch: Watch | None = None,
) -> list[Row]:
    """Measure the missing rows of one task on one model under one method; return all its rows.

    Args:
        lengths: in the task's unit, ascending.
        sampled: all lengths for which texts are sampled, as of `Bound.examples_at`; None: `lengths`.
        batch: repeats read together; default: what fits by estimate.
        chunk: tokens of each text in one forward; default: `chunk_of`. Both are halved when memory runs out, the
            chunk first; an example that fails with both at their smallest gets a row with status "oom".
        longest: called at the start and after each length of a batch; returns the largest length to measure. Longer
            ones get no row.
        mine: returns whether a repeat is measured at a length; default: every repeat at every length.
        watch: called with each new row, and with notices such as a fallback.

    Raises:
        ValueError: a text too short for the lengths.
        OSError: the disk is full.
    """
    watch = watch or Watch()
    examples = bound.examples_at(lm, lengths, repeats, seed, sampled)
    ledger = Ledger(run, bound, method, lm, examples, seed, watch, mine)
    if lm.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(lm.device)
    for example in examples:
        for length in ledger.missing(example):
            if not _within_positions(bound, lm, example, length):
                tokens = bound.num_tokens(lm, example, length)
                ledger.fail(example, length, "too_long", f"needs {tokens:,} tokens, {lm.limit}")
    if longest is not None:
        ledger.leave_out(longest())
    if not any(map(ledger.missing, examples)):
        return ledger.rows
    with method.on(lm) as reader:
        fitting = within_positions(bound, lm, examples)
        if bound.needs_nats and not reader.gives_nats:
            raise ValueError(
                f"{bound.task} needs the log-probability of given tokens, and {lm.name} only returns new ones: measure "
                "a forgetting curve or recall, or serve the model with vLLM or SGLang"
            )
        if reader.fallback:
            watch.notice(f"{lm.name} is read with plain forwards, slower and without a cache: {reader.fallback}")
        else:
            free = lm.free_bytes
            for example in fitting:
                for length in ledger.missing(example):
                    if reason := _cannot_fit(bound, method, lm, replace(example, lengths=(length,)), free):
                        ledger.fail(example, length, "oom", reason)
        reader.capacity = max((bound.num_tokens(lm, e, n) for e in fitting for n in e.lengths), default=0)
        ledger.weigh(Operations(reader, bound))
        size = batch or batch_that_fits(bound, method, lm, fitting)
        _measure_batches(reader, ledger, fitting, size, chunk or chunk_of(reader, min(size, len(fitting))), longest)
    return ledger.rows


def _measure_batches(
    reader: Reader,
    ledger: Ledger,
    examples: Sequence[Example[Any]],
    size: int,
    largest_chunk: int,
    longest: Callable[[], int] | None,
) -> None:
    """Measure the missing rows in batches of at most `size`; when memory runs out, in smaller chunks, then batches.
    Examples that are read one by one need as much memory in a smaller batch: each is then tried alone."""
    queue = _batches(examples, ledger.missing, ledger.rows, size)
    while queue:
        group = queue[0]
        unmeasured = tuple(sorted({length for example in group.examples for length in ledger.missing(example)}))
        if not unmeasured:
            queue.popleft()
            continue
        reader.chunk = min(largest_chunk, group.chunk or largest_chunk)
        try:
            problem = _measure_batch(reader, ledger, group.examples, unmeasured, longest)
        except TooLongError as error:
            queue.popleft()
            if len(group.examples) > 1:  # the server refused one of them; the others may fit
                queue.extendleft(_Batch((example,), group.chunk) for example in reversed(group.examples))
            else:
                for length in ledger.missing(group.examples[0]):
                    ledger.fail(group.examples[0], length, "too_long", str(error))
            continue
        if problem is None:
            continue
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        reader.capacity = 0  # the buffers for the longest length may be too large
        notice = ledger.watch.notice
        if reader.chunk > SMALLEST_CHUNK:
            largest_chunk = max(SMALLEST_CHUNK, reader.chunk // 2)
            notice(f"out of memory: continuing with chunks of {largest_chunk} tokens")
        elif len(group.examples) > 1:
            size = len(group.examples) // 2 if ledger.bound.reads_together else 1
            queue = _batches(examples, ledger.missing, [], size)
            notice(f"out of memory: continuing with {size} repeats together")
        else:
            failing = group.examples[0]
            at = min(ledger.missing(failing), default=unmeasured[-1])  # shorter lengths of this call have been written
            notice(f"out of memory at length {at:,} even with one repeat and the smallest chunk")
            ledger.fail_from(failing, at, problem)


def _measure_batch(
    reader: Reader,
    ledger: Ledger,
    batch: Sequence[Example[Any]],
    lengths: tuple[int, ...],
    longest: Callable[[], int] | None,
) -> str | None:
    """Measure a batch at these lengths. The results of one length arrive together and share its time equally. If memory
    runs out, return the message; the error's traceback, which keeps the tensors alive, ends here."""
    started = time.perf_counter()
    ready: list[Result] = []
    how = {"repeats": [example.repeat for example in batch], "chunk": reader.chunk}
    cuts = tuple(length for length in batch[0].lengths if length <= lengths[-1])
    try:
        for result in ledger.bound.run(reader, [replace(example, lengths=lengths, stops=cuts) for example in batch]):
            ready.append(result)
            if len(ready) == len(batch) * len(batch[0].depths):
                now = time.perf_counter()
                reading = how | {"cuts": [cut for cut in cuts if cut <= result.length]}
                reading |= reader.usage(len(ready))
                for finished in ready:
                    ledger.write(finished, (now - started) / len(ready), reading)
                ready, started = [], now
                if longest is not None:
                    ledger.leave_out(longest())
                if not ledger.goes_on(result.length):
                    break
    except (RuntimeError, MemoryError) as error:
        # the processes of a divided model cannot switch to smaller chunks independently
        if not is_out_of_memory(error) or reader.lm.num_parts > 1:
            raise
        return str(error).partition("\n")[0]
    return None


@dataclass(frozen=True)
class _Batch:
    """Examples read together."""

    examples: tuple[Example[Any], ...]
    chunk: int | None = None  # tokens of one forward, if an earlier session began this batch


def _batches(
    examples: Sequence[Example[Any]], missing: Callable[[Example[Any]], tuple[int, ...]], rows: Sequence[Row], size: int
) -> deque[_Batch]:
    """Return the missing rows in batches of at most `size` examples that lack the same lengths. A batch that
    has some `rows` is read again as a whole: in low precision, a row depends on the others of its batch."""
    alike: dict[tuple[int, ...], dict[int, Example[Any]]] = defaultdict(dict)
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
        fresh, placed = defaultdict[tuple[int, ...], list[Example[Any]]](list), set[int]()
        for repeat, example in by_repeat.items():
            if repeat in placed or not (lacking := missing(example)):
                continue
            repeats, chunk = begun.get((lengths, repeat), ((), None))
            if repeats and len(repeats) <= size and by_repeat.keys() >= set(repeats):
                batches.append(_Batch(tuple(by_repeat[one] for one in repeats), chunk))
                placed |= set(repeats)
            else:
                fresh[lacking].append(example)
        for alone in fresh.values():
            batches += [_Batch(tuple(alone[first : first + size])) for first in range(0, len(alone), size)]
    return batches


def chunk_of(reader: Reader, texts: int) -> int:
    """Return the tokens of each text in one forward of so many: more than CHUNK only if few are read together, so
    that activations need no more memory."""
    return max(min(CHUNK, reader.chunk), reader.chunk // texts)


def within_positions(bound: Bound[Any], lm: LM, examples: Sequence[Example[Any]]) -> list[Example[Any]]:
    """Return the examples without the lengths that a model with learned positions cannot read."""
    shortened = [
        replace(e, lengths=tuple(n for n in e.lengths if _within_positions(bound, lm, e, n))) for e in examples
    ]
    return [example for example in shortened if example.lengths]


def _within_positions(bound: Bound[Any], lm: LM, example: Example[Any], length: int) -> bool:
    return lm.position_limit is None or bound.num_tokens(lm, example, length) <= lm.position_limit


def key_bytes(method: Method, lm: LM, work: Work, chunk: int) -> int:
    """Return the bytes of the keys of this work, over its rows: those that the method keeps, and those of a chunk."""
    return work.num_rows * lm.key_bytes(method.kept(work.num_before) + min(work.num_tokens, chunk), chunk)


def _cannot_fit(bound: Bound[Any], method: Method, lm: LM, example: Example[Any], free: int) -> str:
    """Return why an example cannot be read even alone: its keys exceed the free memory (bytes); "" if they fit."""
    keys = max((key_bytes(method, lm, w, SMALLEST_CHUNK) for w in set(bound.work(lm, example))), default=0)
    if keys <= free:
        return ""
    from farspan.report.export import memory_size  # scipy takes a while, and most texts fit

    return f"keys of {memory_size(keys)} alone, {memory_size(free)} are free"


def batch_that_fits(bound: Bound[Any], method: Method, lm: LM, examples: Sequence[Example[Any]]) -> int:
    """Return how many repeats to read together: enough to keep the device busy, with their keys in a share of the free
    memory."""
    work = {w for example in examples for w in bound.work(lm, example)}  # thousands of repeats have the same work
    if not work:
        return 1
    if lm.rows_at_once is not None:
        return lm.rows_at_once
    longest = max(w.num_before + w.num_tokens for w in work)
    keys = max(key_bytes(method, lm, w, CHUNK) for w in work)
    free = lm.free_bytes - (0 if lm.has_weights else lm.num_bytes)  # a plan has not loaded the weights
    return max(1, min(TOKENS_AT_ONCE // max(1, min(longest, CHUNK)), int(free * MEMORY_SHARE / max(1, keys))))
