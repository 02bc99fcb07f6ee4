"""The operations of examples at some of their lengths, as a reader runs them."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from farspan.reader import Reader
from farspan.tasks.base import Bound, Example, Work


class Operations:
    """Count the floating-point operations of a task's examples; each kind of forward is counted once."""

    def __init__(self, reader: Reader, bound: Bound[Any]) -> None:
        self._reader, self._bound = reader, bound
        self._head = len(bound.separator(reader.lm))
        self._known: dict[Work, float] = {}

    def __call__(self, example: Example[Any], chosen: Collection[int]) -> float:
        """Return the operations of an example at the chosen ones of its lengths, which share the text they read."""
        asked = tuple(length for length in example.lengths if length in chosen)
        stops = tuple(length for length in example.lengths if asked and length <= asked[-1])
        if not asked:
            return 0.0
        work = self._bound.work(self._reader.lm, replace(example, lengths=asked, stops=stops))
        return sum(map(self._of, self._reader.forwards(work, self._head)))

    def _of(self, work: Work) -> float:
        if work not in self._known:
            flops = self._reader.flops(work.num_before, work.num_tokens, work.num_scored)
            self._known[work] = work.num_rows * flops
        return self._known[work]
