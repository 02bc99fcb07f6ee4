"""How a model is made to read a long text. One file each; this table is the only place that knows their names."""

from contextlib import AbstractContextManager
from typing import Protocol

from farspan.lm import LM
from farspan.methods.full import Full
from farspan.reader import Reader


class Method(Protocol):
    """A frozen dataclass whose fields are its settings; `str` writes it as `method` parses it."""

    def on(self, lm: LM) -> AbstractContextManager[Reader]: ...


METHODS: dict[str, type[Method]] = {"full": Full}


def method(text: str) -> Method:
    """The method that `text` names.

    Raises:
        ValueError: an unknown name, or settings for a method that has none.
    """
    name, _, settings = text.partition(":")
    if name not in METHODS:
        raise ValueError(f"method {name!r} is unknown; known are {', '.join(METHODS)}")
    if settings:
        raise ValueError(f"method {name!r} has no settings; {settings!r} was given")
    return METHODS[name]()
