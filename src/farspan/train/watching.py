"""Measurements of the model in training, on text that it is not trained on: `[watch]` of a config."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from farspan.callback import CurveCallback, MeasuringCallback, PerplexityCallback
from farspan.text.corpora import Corpus, load
from farspan.train.batches import trained_on
from farspan.train.config import Settings
from farspan.train.engines import is_first_process
from farspan.train.progress import Notice
from farspan.train.settings import TrainingSettings

CURVE_EXTRA = 16  # tokens of a curve's context in addition to text and copy; approximate


class WatchSettings(Settings):
    """[watch]: see `farspan.callback`."""

    text: str = "builtin:held-out"
    # steps from one measurement to the next, the first being before the training; 0: never; default a quarter of all
    every: int | None = Field(None, ge=0)
    # tokens; default depends on the recipe
    lengths: tuple[Annotated[int, Field(gt=1)], ...] | None = Field(None, min_length=1)
    repeats: int = Field(4, gt=1)  # number of windows of the perplexity
    curve: bool = True  # also measure a small forgetting curve
    tokens: int | None = Field(None, gt=0)  # at most, fed for one curve; default 24 times its longest context

    @model_validator(mode="after")
    def _has_effect(self) -> "WatchSettings":
        if self.every == 0 and "every" not in self.model_fields_set:  # a given 0 turns measurements off
            others = (name for name in type(self).model_fields if name != "every")
            self.refuse_unused(others, "every = 0", "an every above 0")
        if self.every != 0 and not self.curve:
            self.refuse_unused(("tokens",), "curve = false", "curve = true")
        return self


class WatchedSettings(TrainingSettings):
    """The part that the configs of trainings with measurements have in common."""

    watch: WatchSettings = WatchSettings()


def measuring(
    settings: WatchedSettings,
    method: Any,
    *,
    tokenizer: Any = None,
    trained_length: int,
    lengths: Sequence[int],
    longest: int,
) -> list[MeasuringCallback]:
    """Return the callbacks that measure perplexity and, with `watch.curve`, a forgetting curve.

    There are none under `trainer.engine = "fsdp2"` by default: a sharded model cannot be measured in one process. If
    `watch.every` is given, the callbacks refuse the training.

    Args:
        method: how texts are read.
        tokenizer: default the Trainer's.
        trained_length: tokens of the trained context.
        lengths: tokens of the perplexity's windows, if `watch.lengths` is not given.
        longest: tokens of the curve's longest context.
    """
    watch, trainer, out = settings.watch, settings.trainer, Path(settings.out)
    if watch.every == 0 or (watch.every is None and trainer.engine == "fsdp2"):
        return []
    every = watch.every or max(1, -(-trainer.steps // 4))
    common: dict[str, Any] = {
        "tokenizer": tokenizer,
        "text": watch.text,
        "every": every,
        "at_start": True,
        "trained_length": trained_length,
    }
    found: list[MeasuringCallback] = [
        PerplexityCallback(**common, lengths=watch.lengths or lengths, repeats=watch.repeats, out=out / "perplexity")
    ]
    if watch.curve:
        text = max(1, (longest - CURVE_EXTRA) // 2)
        found.append(CurveCallback(**common, longest=text, tokens=watch.tokens or 24 * longest, out=out / "farspan"))
    for callback in found:
        callback.method = method
    return found


def measures_training_text(
    callbacks: Sequence[MeasuringCallback], corpus: Corpus, tokenizer: Any, notice: Notice
) -> bool:
    """Return whether these callbacks measure the model on its training text, or on documents of it; if so, call
    `notice` with a line. Only in the first process, which measures."""
    if not callbacks or not is_first_process():
        return False
    name = callbacks[0].text
    with suppress(ValueError):  # a text that cannot be read is refused by the callbacks
        if how := trained_on(load(name, tokenizer), corpus):
            notice(f"watch.text = {name!r} {how}: it is not measured on held-out text")
            return True
    return False
