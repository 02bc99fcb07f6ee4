"""How a model is made to read a long text. One file each; this table is the only place that knows their names."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from farspan.lm import LM
from farspan.methods.cepe import Cepe
from farspan.methods.full import Full
from farspan.methods.lambda_mask import LambdaMask
from farspan.methods.replug import Replug
from farspan.methods.rope import Rope
from farspan.methods.sinks import Sinks
from farspan.methods.topk import TopK
from farspan.reader import Reader
from farspan.spelling import one_of


@runtime_checkable
class Method(Protocol):
    """A frozen dataclass whose fields are its settings; `str` writes it as `method` parses it."""

    def on(self, lm: LM) -> AbstractContextManager[Reader]: ...

    def kept(self, num_tokens: int) -> int:
        """Of that many tokens read, those whose keys are held."""
        ...


METHODS: dict[str, type[Method]] = {
    "full": Full,
    "sinks": Sinks,
    "lambda_mask": LambdaMask,
    "rope": Rope,
    "topk": TopK,
    "replug": Replug,
    "cepe": Cepe,
}
ROPE, ATTENTION, PASSAGES = (Rope,), (Sinks, LambdaMask, TopK), (Replug,)  # what composes, from the inside out


@dataclass(frozen=True)
class Composed:
    """Methods one around the other: RoPE, then attention, then passages; at most one of each."""

    parts: tuple[Method, ...]

    def __post_init__(self) -> None:
        for part in self.parts:
            if not isinstance(part, ROPE + ATTENTION + PASSAGES):
                raise ValueError(f"{part} cannot be composed with other methods: name it alone")
            if isinstance(part, Rope) and part.type == "dynamic" and any(isinstance(p, ATTENTION) for p in self.parts):
                raise ValueError(f"{self}: dynamic RoPE brings attention of its own; use linear, ntk or yarn")
        for kinds, what in ((ROPE, "RoPE"), (ATTENTION, "attention"), (PASSAGES, "passages")):
            same = [str(part) for part in self.parts if isinstance(part, kinds)]
            if len(same) > 1:
                raise ValueError(f"{' and '.join(same)} cannot be composed: both say how {what} works; use one of them")

    def __str__(self) -> str:
        return "+".join(str(part) for part in self.parts)

    def kept(self, num_tokens: int) -> int:
        return min(part.kept(num_tokens) for part in self.parts)

    @contextmanager
    def on(self, lm: LM) -> Iterator[Reader]:
        with ExitStack() as stack:
            reader: Reader | None = None
            for part in self.parts:
                if isinstance(part, Replug) and reader is not None:
                    reader = part.around(reader)
                else:
                    reader = stack.enter_context(part.on(lm if reader is None else reader.lm))
            assert reader is not None
            yield reader


def method(text: str) -> Method:
    """The method that `text` names, as `sinks:window=2045,sinks=4`, or several joined by `+`, in any order.

    Raises:
        ValueError: an unknown name or setting, a value out of range, or methods that do not go together.
    """
    written = text.split("+")
    if len(written) > 1 and not all(part.strip() for part in written):
        raise ValueError(f"method {text!r} has a + with no method beside it: write METHOD+METHOD, or one METHOD")
    parts = tuple(one_of(METHODS, part, "method") for part in written)
    if len(parts) == 1:
        return parts[0]
    order = ROPE + ATTENTION + PASSAGES
    return Composed(tuple(sorted(parts, key=lambda part: order.index(type(part)) if type(part) in order else 0)))
