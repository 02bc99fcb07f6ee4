"""The base of the tasks `curve` and `recall`: the text to copy, the irrelevant text, and the tokens of a probe."""

from typing import ClassVar

from farspan.lm import LM
from farspan.tasks.base import Task
from farspan.text.corpora import Corpus, load

PROBED = (128, 256)  # tokens of a probe for warm-up, and scored
PROBED_LONG = (512, 1024)  # the same if the largest length exceeds LONG
LONG = 8192  # tokens; curves that go further are probed with more tokens
RECALLED = "copied beyond guessing"  # copy accuracy minus control; without it, better guesses would pass for memory
MEAN_RECALLED = f"{RECALLED} (mean over depths)"


class CopyTask(Task):
    """A task that compares copying a text with guessing it."""

    warmup: int | None  # tokens of a probe that precede the scored ones
    scored: int | None  # tokens of a probe that are scored
    target_text: str | None  # the text to copy; None: that of the measurement
    prefix_text: str | None  # the irrelevant text of the control

    details: ClassVar[tuple[str, ...]] = ("copy", "control")
    same_at_depths: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if "" in (self.target_text, self.prefix_text):
            raise ValueError("a text has no name: got '', expected one for target_text or prefix_text, or leave it out")

    @property
    def reads_text(self) -> bool:
        return self.target_text is None or "shuffled" in (self.target_text, self.prefix_text)

    def named_texts(self, lm: LM, text: str) -> tuple[Corpus, Corpus | None]:
        """Return the target text and the irrelevant text, if it has a name; `text`: that of the measurement."""

        def named(name: str) -> Corpus:
            return load(f"shuffled:{text}" if name == "shuffled" else name, lm.tokenizer)

        return named(self.target_text or text), named(self.prefix_text) if self.prefix_text else None

    def probe_tokens(self, largest: int, context: int | None, *, always: bool = True) -> tuple[int, int]:
        """Return `warmup` and `scored`, chosen for the largest length where they are None.

        Args:
            context: tokens, of a map: the choice takes at most a quarter of them, to be short enough for several
                depths.
            always: False: only if the usual choice does not fit into them.

        Raises:
            ValueError: a probe that was given is longer than the largest length.
        """

        def given_or(w: int, k: int) -> tuple[int, int]:
            return w if self.warmup is None else self.warmup, k if self.scored is None else self.scored

        w, k = PROBED_LONG if largest > LONG else PROBED
        if context is not None and (always or sum(given_or(w, k)) >= context):
            while w > 1 and w + k > context // 4:
                w, k = w // 2, k // 2
        w, k = given_or(w, k)
        if (self.warmup, self.scored) != (None, None) and 0 < largest < w + k:
            raise ValueError(
                f"a probe of {w} + {k} tokens (--warmup, --scored) is longer than the longest text, {largest:,} "
                "tokens: give smaller ones, or longer --lengths"
            )
        return w, k
