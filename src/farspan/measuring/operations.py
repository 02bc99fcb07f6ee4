"""The operations of examples at some of their lengths, as a reader runs them."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from typing import Any

from farspan.reader import Reader
from farspan.tasks.base import Bound, Example, Work


def flops_of(reader: Reader) -> Callable[[Work], float]:
    """Return a function that counts the floating-point operations of a forward over all its rows. Equal forwards, of
    which thousands of repeats have many, are computed once."""
    return cache(lambda work: work.num_rows * reader.flops(work.num_before, work.num_tokens, work.num_scored))


class Operations:
    """Count the floating-point operations of a task's examples."""

    def __init__(self, reader: Reader, bound: Bound[Any]) -> None:
        self._reader, self._bound = reader, bound
        self._head = len(bound.separator(reader.lm))
        self._flops_of = flops_of(reader)

    def __call__(self, example: Example[Any], chosen: Collection[int]) -> float:
        """Return the operations of an example at the chosen ones of its lengths, which share the text they read."""
        lengths = tuple(length for length in example.lengths if length in chosen)
        if not lengths:
            return 0.0
        stops = tuple(length for length in example.lengths if length <= lengths[-1])
        work = self._bound.work(self._reader.lm, replace(example, lengths=lengths, stops=stops))
        return sum(map(self._flops_of, self._reader.forwards(work, self._head)))
