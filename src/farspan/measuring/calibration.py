"""Measure the time of forwards on the model itself, in a few seconds."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from farspan.hf.device import wait
from farspan.methods import Method
from farspan.reader import Memory, Reader
from farspan.tasks.base import Work

PARTS = 64, 8, 1  # of the largest forward: the sizes that are timed, and one token
RUNS = 3  # the fastest counts: other processes on the machine only add time
ENOUGH = 1.0  # seconds; after that no further run
NEAR, FAR = 2.0, 5.0  # seconds that one forward may take, at the beginning and at the end of a text
READ = 2048  # tokens of the far text, at most, if it has to be read
clock = time.perf_counter


@dataclass(frozen=True)
class Speed:
    """The seconds of forwards of one batch, by their size in tokens."""

    operations: Callable[[int], float]  # operations of one token, by the number of tokens before it
    sizes: Sequence[int]  # ascending, from 1
    near: Sequence[float]  # seconds, after one token
    slopes: Sequence[float]  # seconds for each further operation of one token, due to more tokens before it
    per_scored: float  # seconds, for each position of the output head

    def seconds(self, step: Work) -> float:
        """Return the seconds of a forward of the batch, interpolated between sizes."""
        size, largest = step.num_tokens, self.sizes[-1]
        near, slope = (float(np.interp(size, self.sizes, values)) for values in (self.near, self.slopes))
        if size > largest:  # its tokens also attend to more of each other
            near *= size / largest * self.operations(size) / self.operations(largest)
            slope *= size / largest
        further = max(0.0, self.operations(step.num_before) - self.operations(1))
        return near + slope * further + self.per_scored * step.num_scored


def calibrated(reader: Reader, method: Method, steps: Sequence[Work], batch: int) -> Speed:
    """Time forwards of sizes up to that of the largest step, after the shortest and after the longest text.

    If all rows would take too long, fewer are timed and their time is scaled; sizes that are too slow even with one
    row are left out. If the reader keeps keys, random keys replace the longest text.
    """

    def operations(num_before: int) -> float:
        # at most `num_before`: a forward is of one pass, and `kept` counts all passes
        return reader.lm.flops(min(num_before, method.kept(num_before)), 1, 0)

    largest, far = max(step.num_tokens for step in steps), max(step.num_before for step in steps)
    timer = _Timer(reader, batch, largest)
    far = far if timer.skips else min(far, READ)
    sizes, near = [1], [timer.least(1, 1, 0.0, NEAR)]
    for size in sorted({max(1, largest // part) for part in PARTS} - {1}):
        seconds = timer.least(1, size, near[-1] * size / sizes[-1], NEAR)
        if seconds == 0.0:
            break
        sizes, near = [*sizes, size], [*near, seconds]
    middle = len(sizes) // 2
    head = timer.least(1, sizes[middle], near[middle], NEAR, scored=True) - near[middle]
    further, slopes = operations(far) - operations(1), [0.0] * len(sizes)
    if further > 0:
        for at, size in enumerate(sizes):
            seconds = timer.least(far, size, near[at] * operations(far) / operations(1), FAR)
            slopes[at] = max(0.0, seconds - near[at]) / further
            if seconds == 0.0:
                slopes[at] = slopes[at - 1] * size / sizes[at - 1]
    return Speed(operations, sizes, near, slopes, max(0.0, head) / sizes[middle])


class _Timer:
    """Times forwards of a reader; holds one memory at a time."""

    def __init__(self, reader: Reader, batch: int, largest: int) -> None:
        self.reader, self.batch, self.largest = reader, batch, largest
        self.ids = torch.randint(3, min(1000, reader.lm.vocabulary), (batch, max(largest, READ) + 1))
        self.place: tuple[int, int] | None = None  # tokens and rows of the memory
        self.memory: Memory | None = None
        self.skips = reader.read(self.ids[:, :1]).skip(0)

    def least(self, before: int, size: int, expected: float, most: float, *, scored: bool = False) -> float:
        """Return the seconds of a forward of `size` tokens after `before` others; 0 if one row takes more than `most`.

        Args:
            expected: upper estimate of the seconds, with all rows.
            scored: run the output head at every position.
        """
        rows = self.batch if expected <= most else int(self.batch * most / expected)
        if rows == 0:
            return 0.0
        memory, seconds = self._after(before, rows), list[float]()
        while len(seconds) < RUNS and sum(seconds) < ENOUGH:
            wait(self.reader.lm.device)
            started = clock()
            # one token more than is fed: the last one is only a target
            memory.score(self.ids[:rows, : size + 1], slice(1 if scored else size + 1, size + 1))
            wait(self.reader.lm.device)
            seconds.append(clock() - started)
        return min(seconds) * self.batch / rows

    def _after(self, before: int, rows: int) -> Memory:
        if self.memory is None or self.place != (before, rows):
            self.memory, self.reader.capacity = None, before + self.largest + 1
            memory = self.reader.read(self.ids[:rows, :1])
            if self.skips:
                memory.skip(before - 1)
            else:
                memory.read(self.ids[:rows, 1:before])  # not as a passage, which a method may cut
            self.place, self.memory = (before, rows), memory
        return self.memory
