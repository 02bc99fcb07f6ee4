"""The protocol of a method and its promises, which `farspan doctor` and tests/test_contract.py check."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor

from farspan.lm import LM
from farspan.reader import DenseReader, Reader
from farspan.specs import check_settings, written

ROPE, ATTENTION, TEMPERATURE, PASSAGES = "RoPE", "attention", "temperature", "passages"  # the parts a method can change
ORDER = (ROPE, ATTENTION, TEMPERATURE, PASSAGES)  # from the inside out


@runtime_checkable
class Method(Protocol):
    """A frozen dataclass whose fields are its settings; `str` writes it in the form that `method` parses.

    Members with a body are defaults for classes that inherit from `Method`.
    """

    name: ClassVar[str] = ""
    in_model: ClassVar[bool] = True  # the model, called directly inside `on`, gives the same scores
    scores_as_it_reads: ClassVar[bool] = True  # a scored token sees the text as if it were read

    def __post_init__(self) -> None:
        check_settings(self)

    def __str__(self) -> str:
        return written(self.name, self)

    def on(self, lm: LM) -> AbstractContextManager[Reader]: ...

    def fitted(self, trained_length: int | None) -> "Method":
        """Return it with a window, if none is given, set from the trained length (tokens) of a model, so that rows name
        the window."""
        return self

    def extended(self, trained_length: int | None) -> int | None:
        """Return the trained length (tokens) of a model under this method."""
        return trained_length

    def kept(self, num_tokens: int) -> int:
        """Return the largest number of tokens whose keys are held while `num_tokens` are read."""
        return num_tokens

    def kept_to_answer(self, num_tokens: int) -> int:
        """Return the largest number of tokens whose keys are held from the first `score` or `generate` on."""
        return self.kept(num_tokens)

    def kept_twice(self, num_tokens: int) -> int:
        """Return the largest number of tokens whose keys are also held at other positions, while single tokens are fed
        after `num_tokens`."""
        return 0

    @property
    def changes(self) -> tuple[str, ...]:
        """The parts it changes, of ORDER. Methods compose if no two change the same part; () composes with none."""
        return ()

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that its settings name: a run is not continued after their content has changed."""
        return ()

    def passes(self, num_tokens: int) -> list[int]:
        """Return the number of tokens in each pass that reads a text of `num_tokens`."""
        return [num_tokens]

    def around(self, reader: DenseReader) -> AbstractContextManager[Reader]:
        """Apply it to the reader of the methods composed inside it."""
        return self.on(reader.lm)

    def small(self, num_tokens: int) -> "Method":
        """Return it with settings small enough to change the scores after a text of `num_tokens`: windows of at most a
        fifth of it, other numbers of tokens at most a sixteenth."""
        return self

    def neutral(self, num_tokens: int) -> "Method | None":
        """Return the setting that equals full attention on `num_tokens`; None if none is known."""
        return None

    def neutral_limit(self, trained_length: int | None) -> int | None:
        """Return the longest text, in tokens, for which a model of this trained length accepts the neutral setting."""
        return trained_length

    def forgetful(self, window: int) -> "Method | None":
        """Return it with a window of at most `window` tokens and at most 8 first tokens; None if it has no window."""
        return None

    @property
    def sees(self) -> int | None:
        """The nearest tokens that every query sees in each layer, itself included; None: all."""
        return None

    @property
    def reach(self) -> int | None:
        """The largest number of nearest tokens that a query can see in a layer, itself included, besides the `first` of
        the text; None: all."""
        return None

    @property
    def first(self) -> int:
        """Tokens at the beginning of the text that stay visible beyond `reach`."""
        return 0

    def frequencies(self, lm: LM) -> tuple[Tensor, float] | None:
        """Return the RoPE frequencies [pairs] that it gives the model, in float32, and the factor of the cosines and
        sines; None if the model keeps its own."""
        return None


@dataclass(frozen=True)
class Composed(Method):
    """Nested methods: RoPE, then attention, then temperature, then passages; at most one of each."""

    parts: tuple[Method, ...]

    def __post_init__(self) -> None:
        for part in self.parts:
            if not part.changes:
                raise ValueError(f"{part} cannot be composed with other methods: name it alone")
        for what in ORDER:
            same = [str(part) for part in self.parts if what in part.changes]
            if len(same) > 1:
                raise ValueError(
                    f"{' and '.join(same)} cannot be composed: both change how {what} works; use one of them, "
                    f"with methods of the other kinds: {', '.join(kind for kind in ORDER if kind != what)}"
                )
        order = sorted(self.parts, key=lambda part: ORDER.index(part.changes[0]))
        object.__setattr__(self, "parts", tuple(order))

    def __str__(self) -> str:
        return "+".join(str(part) for part in self.parts)

    def fitted(self, trained_length: int | None) -> Method:
        parts: list[Method] = []
        for part in self.parts:
            parts.append(part.fitted(trained_length))
            trained_length = part.extended(trained_length)
        return Composed(tuple(parts))

    def extended(self, trained_length: int | None) -> int | None:
        for part in self.parts:
            trained_length = part.extended(trained_length)
        return trained_length

    @property
    def changes(self) -> tuple[str, ...]:
        return tuple(what for part in self.parts for what in part.changes)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(file for part in self.parts for file in part.files)

    @property
    def in_model(self) -> bool:  # type: ignore[override]
        return all(part.in_model for part in self.parts)

    @property
    def scores_as_it_reads(self) -> bool:  # type: ignore[override]
        return all(part.scores_as_it_reads for part in self.parts)

    def kept(self, num_tokens: int) -> int:
        return sum(min(part.kept(n) for part in self._inside) for n in self.parts[-1].passes(num_tokens))

    def kept_to_answer(self, num_tokens: int) -> int:
        return sum(min(part.kept_to_answer(n) for part in self._inside) for n in self.parts[-1].passes(num_tokens))

    def kept_twice(self, num_tokens: int) -> int:
        return sum(max(part.kept_twice(n) for part in self._inside) for n in self.parts[-1].passes(num_tokens))

    @contextmanager
    def on(self, lm: LM) -> Iterator[Reader]:
        with ExitStack() as stack:
            reader: Any = None
            for part in self.parts:
                reader = stack.enter_context(part.on(lm) if reader is None else part.around(reader))
            yield reader

    def small(self, num_tokens: int) -> Method:
        return Composed(tuple(part.small(num_tokens) for part in self.parts))

    def neutral(self, num_tokens: int) -> Method | None:
        neutral = [one for part in self.parts if (one := part.neutral(num_tokens)) is not None]
        return Composed(tuple(neutral)) if len(neutral) == len(self.parts) else None

    def neutral_limit(self, trained_length: int | None) -> int | None:
        for part in self.parts:
            trained_length = part.neutral_limit(trained_length)
        return trained_length

    def forgetful(self, window: int) -> Method | None:
        """Return it as `Method.forgetful`, without methods that change passages: several passes forget nothing."""
        forgetful = tuple(part.forgetful(window) or part for part in self._inside)
        if all(part.reach is None for part in forgetful):
            return None
        return forgetful[0] if len(forgetful) == 1 else Composed(forgetful)

    @property
    def _inside(self) -> list[Method]:
        """The parts that are applied to the model within each pass."""
        return [part for part in self.parts if PASSAGES not in part.changes]

    @property
    def sees(self) -> int | None:
        return min((part.sees for part in self.parts if part.sees is not None), default=None)

    @property
    def reach(self) -> int | None:
        return min((part.reach for part in self.parts if part.reach is not None), default=None)

    @property
    def first(self) -> int:
        return max(part.first for part in self.parts)

    def frequencies(self, lm: LM) -> tuple[Tensor, float] | None:
        return self.parts[0].frequencies(lm)
