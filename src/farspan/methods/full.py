"""Full attention: the model as it is.

    visible(i) = {j : j <= i}

Keeps every key. The reference every other method is compared with.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from farspan.lm import LM
from farspan.reader import Reader, dense_reader


@dataclass(frozen=True)
class Full:
    """The model as it is, read in chunks."""

    def __str__(self) -> str:
        return "full"

    def kept(self, num_tokens: int) -> int:
        return num_tokens

    @contextmanager
    def on(self, lm: LM) -> Iterator[Reader]:
        yield dense_reader(lm)
