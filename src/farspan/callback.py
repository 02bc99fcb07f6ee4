"""Callbacks for the Hugging Face Trainer that measure the model in training: its forgetting curve, its perplexity.

    trainer = Trainer(..., processing_class=tokenizer)
    farspan.CurveCallback(every=500).attach(trainer)

All measurements use the same texts at the same lengths, so steps can be compared text by text; each feeds the model a
bounded number of tokens. They do not change the training: modules keep their training mode, random generators their
states.
"""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, TypedDict, Unpack

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import CallbackHandler

from farspan import stats
from farspan.files import expanded
from farspan.hf.training import evaluated_weights, set_aside, unwrapped
from farspan.lengths import check_lengths, spaced_lengths
from farspan.lm import DEFAULT_TRAINED_LENGTH, LM, fingerprint, wrap
from farspan.measuring import trackers
from farspan.measuring.adaptive import SHORTEST, prepared
from farspan.measuring.arguments import whole
from farspan.measuring.loop import Watch, measure_cell
from farspan.measuring.one_model import about
from farspan.measuring.plan import plan
from farspan.measuring.setups import Grid
from farspan.methods.full import Full
from farspan.reader import dense_reader, read_alike
from farspan.record import VERSIONS, Run, refuse_other_texts
from farspan.report.exports.numbers import numbers_of
from farspan.report.runs import Source, of_model
from farspan.report.training import draw_memory
from farspan.tasks.base import Bound, Task
from farspan.tasks.curve import Curve
from farspan.tasks.perplexity import Perplexity

REPEATS = (4, 3, 2)  # the first number that the budget allows with at least 6 lengths is used ...
POINTS = range(16, 5, -1)  # ... with the largest number of lengths, 16 to 6, that the budget then allows
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}  # by the name of a mixed precision
MOST_NATS = 700.0  # the exponential of a larger number is not a finite float
logger = logging.getLogger(__name__)


class Common(TypedDict, total=False):
    """The arguments that both callbacks have."""

    text: str
    every: int
    out: str | Path | None
    trained_length: int | None
    at_start: bool
    seed: int


class MeasuringCallback(TrainerCallback, ABC):
    """Measure a task on the model in training every `every` steps and at the last step; log and record the results.

    Rows are written to the run folder `folder`, each step as a model `step-N`. A resumed training continues its folder,
    without the rows of steps after its checkpoint; a new training in the same place gets another one (`NAME-2`). With
    several processes the first one measures.

    Add it to a Trainer with `attach`. Given to the Trainer as `callbacks=[...]` it measures as well, but the values are
    then only in the log history and the run folder: transformers gives a callback no access to the other callbacks,
    such as those of `report_to`. A Trainer takes one callback of each class.

    Args:
        tokenizer: default the Trainer's `processing_class`, or its tokenizer if it is a processor.
        text: name of a text (see `farspan.text.documents`), preferably one that the model is not trained on.
        every: steps from one measurement to the next; the last step is measured in any case.
        out: the run folder; default `name` in the Trainer's `output_dir`.
        trained_length: tokens; default the trained length in the model's config.
        at_start: also measure the model before its first step.
        seed: random seed for choosing texts.

    Raises:
        ValueError: `every` is below 1.
    """

    name: ClassVar[str]  # of the run folder
    seconds: ClassVar[str]  # the name under which the duration of each measurement is logged
    method: Any = Full()  # how texts are read
    _listeners: CallbackHandler | None = None

    def __init__(
        self,
        tokenizer: Any = None,
        *,
        text: str = "builtin:held-out",
        every: int = 1000,
        out: str | Path | None = None,
        trained_length: int | None = None,
        at_start: bool = False,
        seed: int = 0,
    ) -> None:
        every = whole(every, "every", least=1, expected="a whole number of steps, at least 1")
        self.tokenizer, self.text, self.every, self.out, self.seed = tokenizer, text, every, out, seed
        self.trained_length, self.at_start = trained_length, at_start

    def attach(self, trainer: Trainer) -> None:
        """Add this callback to `trainer`; measured values are then logged to its other callbacks too."""
        self._listeners = trainer.callback_handler
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)

    @abstractmethod
    def choose(self, lm: LM) -> tuple[Task, Bound[Any], dict[str, Any]]:
        """Return the task, the task bound to its text, and `lengths`, `repeats` and `seed`, which all steps share.

        Raises:
            ValueError: a text that is too short, or a budget that is too small.
        """

    @abstractmethod
    def summarised(self, run: Run, step: int) -> dict[str, float]:
        """Return the values to log for a step that was measured, by name; empty if the measurement failed."""

    def prepare(self, model: Any, tokenizer: Any = None) -> Task:
        """Choose what is measured, and check that the model can be read.

        Raises:
            ValueError: as the class, when the training begins; except for its folder and a second callback.
        """
        given = self.tokenizer if self.tokenizer is not None else tokenizer
        # else a processor, such as of a model of text and images
        tokenizer = given if hasattr(given, "bos_token_id") else getattr(given, "tokenizer", None)
        if tokenizer is None:
            name = type(self).__name__
            raise ValueError(
                f"{name} has no tokenizer: give it one, {name}(tokenizer), or give the Trainer "
                "processing_class=tokenizer"
            )
        self._lm = wrap(unwrapped(model), tokenizer, "step-0", trained_length=self.trained_length)
        with set_aside(self._lm.model):
            dense_reader(self._lm)  # runs its checks once, outside of autocast
            task, self._task, self._what = self.choose(self._lm)
        self._spec = str(task)
        return task

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # each training has a new state, the only object that all callbacks see
        if vars(state).setdefault(f"farspan/{self.seconds}", self) is not self:
            name = type(self).__name__
            raise ValueError(
                f"several {name} in one Trainer: expected one, since they log the same names. Keep one, and measure "
                "saved checkpoints on other texts or lengths with `farspan curve` or `farspan perplexity`"
            )
        model = unwrapped(kwargs["model"])
        if not state.is_world_process_zero:
            return
        task = self.prepare(model, kwargs.get("processing_class"))
        base = expanded(self.out or Path(args.output_dir) / self.name)
        self.folder = _run_folder(base, begins=state.global_step == 0)
        # as the Trainer passes it on to accelerate, whose launcher can set it too
        self._autocast = AUTOCAST.get(args.mixed_precision)
        grid = Grid((task,), self.text, cost=False, compared=False, trained=(), **self._what)
        autocast = str(self._autocast).removeprefix("torch.") if self._autocast else None
        self._record = grid.header | {"methods": [str(self.method)], "autocast": autocast}
        with Run.open(self.folder, self._record) as run:  # raises errors now instead of at a later step
            kept = {name: one for name, one in run.header["models"].items() if _step_of(name) <= state.global_step}
            refuse_other_texts(self.folder, run.header | {"models": kept}, self._identity(self._lm.name))
            # steps after the checkpoint are measured again: the training may go on with other settings
            run.cut(lambda row: _step_of(row.model) > state.global_step)
            run.refuse_other_versions({self._task.task: self._task.version})
        if self._listeners is None and args.report_to:
            logger.warning(
                "the values of %s are not reported to %s: add it with .attach(trainer) instead of callbacks=[...]",
                *(type(self).__name__, ", ".join(args.report_to)),
            )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0 and self.at_start:  # not in on_train_begin: a later callback can still raise there
            self._measure(args, state, control, kwargs.get("optimizer"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0 or control.should_training_stop:
            self._measure(args, state, control, kwargs.get("optimizer"))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_training_stop:  # set by a callback that runs after this one
            self._measure(args, state, control, kwargs.get("optimizer"))

    def _measure(self, args: Any, state: Any, control: Any, optimizer: Any) -> None:
        if not state.is_world_process_zero or any(
            entry.get("step") == state.global_step and f"farspan/{self.seconds}" in entry for entry in state.log_history
        ):
            return
        started, name = time.perf_counter(), f"step-{state.global_step}"
        with evaluated_weights(self._lm.model, optimizer):
            run, values = self._measured(name, state.global_step)
        if values:
            values[self.seconds] = time.perf_counter() - started
            self._log(args, state, control, {f"farspan/{name}": round(value, 4) for name, value in values.items()})
            self._track(args, state, control, run, name, values)

    def _measured(self, name: str, step: int) -> tuple[Run, dict[str, float]]:
        """Measure the model as it is now; return the run, and the values to log."""
        identity = self._identity(name) | {"fingerprint": fingerprint(self._lm.model)}
        lm = replace(self._lm, name=name, identity=identity)
        read_alike(lm, self._lm)
        autocast = torch.autocast(lm.device.type, self._autocast) if self._autocast else nullcontext()
        with set_aside(lm.model), Run.open(self.folder, self._record) as run:
            run.add_model(identity)
            with autocast:
                measure_cell(self._task, self.method, lm, run, **self._what, watch=Watch(notice=logger.warning))
            return run, self.summarised(run, step)

    def _identity(self, name: str) -> dict[str, Any]:
        task = {"tasks": {self._spec: self._task.settings}, VERSIONS: {self._task.task: self._task.version}}
        return self._lm.identity | {"name": name} | about(*self._task.texts) | task

    def _log(self, args: Any, state: Any, control: Any, values: dict[str, Any]) -> None:
        """Add values to the log history, and call `on_log` of all callbacks if this one is attached.

        Trainer.log does both, but subclasses of the Trainer (TRL) add values of their own there, and clear them.
        """
        values = values | {"epoch": state.epoch}
        state.log_history.append(values | {"step": state.global_step})
        if self._listeners is not None:
            should_log = control.should_log  # on_log resets it, and the Trainer's own values are still to be logged
            self._listeners.on_log(args, state, control, values)
            control.should_log = should_log

    def _track(self, args: Any, state: Any, control: Any, run: Run, name: str, logged: Container[str]) -> None:
        """Send pictures, and the numbers at each length that were not logged, to the trackers of `report_to`. The
        numbers are too many for the log history and for callbacks that print it."""
        listening = trackers.reporters(self._listeners.callbacks) if self._listeners is not None else []
        if not listening:
            return
        source = of_model(Source.of("", self.folder, run.header, run.rows), name)
        numbers = trackers.at_each_length(numbers_of(source))
        values = {f"farspan/{number}": value for number, value in numbers.items() if number not in logged}
        pictures = {
            f"train/farspan/{task}": image
            for shown in trackers.pictures_of(source).values()
            for task, image in shown.items()
        }
        for one in listening:
            trackers.log_pictures(one, pictures, state.global_step)
            one.on_log(args, state, control, logs=dict(values))


class CurveCallback(MeasuringCallback):
    """Measure half-life and span of the model in training; log, record and draw them. See `MeasuringCallback`.

    Logs `farspan/half_life`, `farspan/span` (tokens), `farspan/half_life_censored`, `farspan/span_censored` (1: the
    true value is beyond the lengths measured), `farspan/half_life_below` (tokens: the true value is smaller, and
    written as 0) and `farspan/seconds`; trackers of `report_to` also get the other memory lengths, both accuracies at
    each length and the picture of the curve. The run folder is `farspan`; `training.png` and `training.svg` in it are
    drawn again after each measurement.

    Args:
        tokenizer, common: as for `MeasuringCallback`.
        tokens: the most tokens that one measurement feeds to the model.
        longest: tokens of the longest text to be copied; default the longest whose context fits twice the trained
            length.
        protocol: default `nested`, or `probe` if the longest text has more than 4,096 tokens.

    Raises, when the training begins:
        ValueError: no tokenizer, a second callback of this class, `tokens` too few, texts that cannot be read, sharded
            parameters, a training resumed with other settings, or a folder that holds something else.
    """

    name, seconds = "farspan", "seconds"

    def __init__(
        self,
        tokenizer: Any = None,
        *,
        tokens: int = 200_000,
        longest: int | None = None,
        protocol: str | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(tokenizer, **common)
        self.tokens, self.longest = tokens, longest
        self.curve = Curve(protocol=protocol)
        self._summaries: dict[int, tuple[stats.MeasuredCurve, stats.Summary]] = {}

    def choose(self, lm: LM) -> tuple[Task, Bound[Any], dict[str, Any]]:
        self._summaries.clear()
        trained = lm.trained_length or DEFAULT_TRAINED_LENGTH
        curve = self.curve.resolved(None if self.longest is None else (self.longest,), (trained,))
        task = curve.on(lm, self.text)
        context = min(2 * trained, lm.position_limit or 2 * trained)
        wanted = self.longest or max(1, task.largest_length(lm, context))
        task, longest = prepared(task, wanted, REPEATS[0])
        if longest < wanted:
            logger.warning("text %r is too short for %d tokens: lengths end at %d", self.text, wanted, longest)
        self._trained_at = task.largest_length(lm, trained)
        shortest = min(SHORTEST, max(1, longest // 4))
        for repeats, points in product(REPEATS, POINTS):
            lengths = spaced_lengths(shortest, longest, points, "log")
            what: dict[str, Any] = {"lengths": lengths, "repeats": repeats, "seed": self.seed}
            needed = plan(task, self.method, lm, calibrate=False, **what).tokens
            if needed <= self.tokens:
                return curve, task, what
        raise ValueError(
            f"tokens = {self.tokens:,} are too few for {len(lengths)} lengths up to {longest:,} tokens with "
            f"{repeats} repeats: give CurveCallback tokens={needed} or more, or a smaller longest"
        )

    def summarised(self, run: Run, step: int) -> dict[str, float]:
        for (model, _, _), curve in stats.curves(run.rows).items():
            measured = _step_of(model)
            if (measured == step or measured not in self._summaries) and curve.measured.any():
                self._summaries[measured] = curve, stats.summarise(curve)
        if self._summaries:
            draw_memory(self._summaries, self.folder, self._lm.trained_length, self._trained_at)
        if step not in self._summaries:
            return {}
        mine = [row for row in run.rows if row.model == f"step-{step}"]
        if failed := [row for row in mine if row.status != "ok"]:
            logger.warning(
                "step %d: half-life and span are of fewer texts or lengths than at other steps, since %d of %d rows "
                "failed, first at %s tokens: %s",
                step, len(failed), len(mine), f"{failed[0].length:,}", failed[0].reason or failed[0].status,
            )  # fmt: skip
        _, numbers = self._summaries[step]
        lengths = {"half_life": numbers.half_life, "span": numbers.span}
        values = {name: one.value for name, one in lengths.items()}
        values |= {f"{name}_below": one.below for name, one in lengths.items() if one.below is not None}
        return values | {f"{name}_censored": float(one.censored) for name, one in lengths.items()}


class PerplexityCallback(MeasuringCallback):
    """Measure the perplexity and the accuracy of the model in training on the same tokens, after more and more of their
    text. See `MeasuringCallback`.

    Logs `farspan/perplexity_N` and `farspan/accuracy_N` for each length of N tokens: lengths within the trained context
    show what the training loses there, longer ones what it gains. The run folder is `perplexity`.

    Args:
        tokenizer, common: as for `MeasuringCallback`.
        lengths: in tokens; default half, once and twice the trained length.
        repeats: the number of windows of the text, from as many documents as possible.

    Raises, when the training begins:
        ValueError: as `CurveCallback`, or lengths too short to have targets.
    """

    name, seconds = "perplexity", "perplexity_seconds"

    def __init__(
        self, tokenizer: Any = None, *, lengths: Sequence[int] | None = None, repeats: int = 4, **common: Unpack[Common]
    ) -> None:
        super().__init__(tokenizer, **common)
        self.lengths, self.repeats = None if lengths is None else tuple(lengths), repeats

    def choose(self, lm: LM) -> tuple[Task, Bound[Any], dict[str, Any]]:
        trained = lm.trained_length or DEFAULT_TRAINED_LENGTH
        own = tuple(sorted({max(2, n) for n in (trained // 2, trained, 2 * trained)}))
        lengths = own if self.lengths is None else self.lengths
        check_lengths(lengths)
        perplexity = Perplexity().resolved(lengths, (trained,))
        task = perplexity.on(lm, self.text)
        what: dict[str, Any] = {"lengths": lengths, "repeats": self.repeats, "seed": self.seed}
        task.examples(lm, **what)  # raises if the text is too short
        return perplexity, task, what

    def summarised(self, run: Run, step: int) -> dict[str, float]:
        found: dict[str, float] = {}
        for length in self._what["lengths"]:
            measured = [row for row in run.rows if (row.model, row.length) == (f"step-{step}", length)]
            rows = [row.scores for row in measured if row.status == "ok"]  # other rows lack some or all scores
            if failed := len(measured) - len(rows):  # a mean of the others would be of other windows than before
                logger.warning(
                    "step %d: no perplexity at %s tokens, since %d of %d windows have none: %s",
                    step, f"{length:,}", failed, len(measured),
                    next(row.reason or row.status for row in measured if row.status != "ok"),
                )  # fmt: skip
            elif rows:
                found[f"perplexity_{length}"] = math.exp(min(sum(s["nats"] for s in rows) / len(rows), MOST_NATS))
                found[f"accuracy_{length}"] = sum(s["accuracy"] for s in rows) / len(rows)
        return found


def _step_of(model: str) -> int:
    """Return the step after which a model with the name `step-N` was measured."""
    return int(model.removeprefix("step-"))


def _run_folder(base: Path, *, begins: bool) -> Path:
    """Return `base` for the first training, `base-2`, `base-3` and so on for later ones; the last one for a resumed
    training, which may have measured nothing yet."""

    def numbered(n: int) -> Path:
        return base if n == 1 else base.with_name(f"{base.name}-{n}")

    n = 1
    while (rows := numbered(n) / "rows.jsonl").exists() and rows.stat().st_size:
        n += 1
    begun = begins or (numbered(n) / "run.json").exists()
    return numbered(n if begun else max(1, n - 1))
