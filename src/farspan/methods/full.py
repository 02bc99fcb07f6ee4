"""Full attention: the model as it is.

    visible(i) = {j : j <= i}

Keeps every key. The reference every other method is compared with.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

from farspan.lm import LM
from farspan.methods.base import Method
from farspan.reader import Reader, dense_reader


@dataclass(frozen=True)
class Full(Method):
    """The model as it is, read in chunks."""

    name: ClassVar[str] = "full"

    def neutral(self, num_tokens: int) -> "Full":
        return self

    def on(self, lm: LM) -> AbstractContextManager[Reader]:
        return nullcontext(lm.own_reader() or dense_reader(lm))
