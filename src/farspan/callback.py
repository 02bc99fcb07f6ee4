"""The forgetting curve of a model while it is trained, and its perplexity: callbacks for the Hugging Face Trainer.

    Trainer(..., processing_class=tokenizer, callbacks=[farspan.CurveCallback(every=500)])

Every measurement asks for the same texts at the same lengths, so that steps are paired, and feeds the model a bounded
number of tokens. The training does not notice: modules keep their modes, random generators their states.
"""

import logging
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from farspan import stats
from farspan.corpus import Corpus
from farspan.lengths import spaced_lengths
from farspan.lm import DEFAULT_TRAINED_LENGTH, fingerprint, wrap
from farspan.measuring.adaptive import SHORTEST, prepared
from farspan.measuring.grid import Grid, about
from farspan.measuring.loop import Watch, measure_cell
from farspan.measuring.plan import plan
from farspan.methods.full import Full
from farspan.reader import dense_reader, read_alike
from farspan.record import Run
from farspan.report.picture import draw_training
from farspan.tasks.base import Task
from farspan.tasks.curve import Curve, Protocol
from farspan.tasks.perplexity import Perplexity

REPEATS = (4, 3, 2)  # the first that the budget allows ...
POINTS = range(16, 5, -1)  # ... with as many lengths as it allows
MOST_NATS = 700.0  # beyond which their exponential is no number
logger = logging.getLogger(__name__)


class Measuring(TrainerCallback):
    """Measures a task on the model in training, every so many steps and at the last one; logs and records it.

    What is measured goes to the log history and every callback that listens to logs; rows go into a run folder,
    `folder`, a model `step-N` for each step. A resumed training continues its folder, and one that begins anew gets
    another (`NAME-2`). With several processes the first one measures.
    """

    name: str  # of the run folder
    seconds: str  # the name under which the time is logged, with each measurement
    method: Any = Full()  # how texts are read
    _task: Any
    _text: Corpus
    _what: dict[str, Any]
    _spec: str  # the task as text
    _record: dict[str, Any]

    def __init__(
        self,
        tokenizer: Any,
        *,
        every: int,
        out: str | Path | None,
        trained_length: int | None,
        at_start: bool,
    ) -> None:
        if every < 1:
            raise ValueError(f"every = {every}; it is a number of steps, at least 1")
        self.tokenizer, self.every, self.out = tokenizer, every, out
        self.trained_length, self.at_start = trained_length, at_start

    def choose(self) -> None:
        """Sets `_task` and `_what`: the task, lengths, repeats and seed, the same for all steps; and `_record`, the
        settings of the run."""
        raise NotImplementedError

    def _recorded(self, task: Task, text: str) -> None:
        """Set `_spec` and `_record`."""
        self._spec = str(task)
        what = Grid((task,), text, cost=False, trained=(), **self._what)
        self._record = what.header | {"methods": [str(self.method)]}

    def summarised(self, run: Run, step: int) -> dict[str, float]:
        """The values to log of a step that was measured; none where it failed."""
        raise NotImplementedError

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = _unwrapped(kwargs["model"])
        if not state.is_world_process_zero:
            return
        tokenizer = self.tokenizer if self.tokenizer is not None else kwargs.get("processing_class")
        if tokenizer is None:
            name = type(self).__name__
            raise ValueError(
                f"{name} has no tokenizer: give it one, {name}(tokenizer), or give the Trainer "
                "processing_class=tokenizer"
            )
        self._lm = wrap(model, tokenizer, "step-0", trained_length=self.trained_length)
        self.folder = _run_folder(Path(self.out or Path(args.output_dir) / self.name), begins=state.global_step == 0)
        self._autocast = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        with _set_aside(model):
            dense_reader(self._lm)  # checks itself, once and outside of any autocast
            self.choose()
        self._record["autocast"] = str(self._autocast).removeprefix("torch.") if self._autocast else None
        Run.open(self.folder, self._record).__exit__(None, None, None)  # says now what it would say at the first step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0 and self.at_start:  # once every callback has had its say on its settings
            self._measure(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0 or control.should_training_stop:
            self._measure(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_training_stop:  # by a callback that was asked after this one
            self._measure(args, state, control)

    def _measure(self, args: Any, state: Any, control: Any) -> None:
        if not state.is_world_process_zero or any(
            entry.get("step") == state.global_step and f"farspan/{self.seconds}" in entry for entry in state.log_history
        ):
            return
        started, name = time.perf_counter(), f"step-{state.global_step}"
        named = {"name": name, "fingerprint": fingerprint(self._lm.model)}
        identity = self._lm.identity | named | about(self._text) | {"tasks": {self._spec: self._task.settings}}
        lm = replace(self._lm, name=name, identity=identity)
        read_alike(lm, self._lm)
        autocast = torch.autocast(lm.device.type, self._autocast) if self._autocast else nullcontext()
        with _set_aside(lm.model), Run.open(self.folder, self._record) as run:
            # where a resumed training comes to a step again, its weights may differ in their last bits
            if name not in run.header["models"]:
                run.add_model(identity)
            with autocast:
                measure_cell(self._task, self.method, lm, run, **self._what, watch=Watch(notice=logger.warning))
            values = self.summarised(run, state.global_step)
        if values:
            values[self.seconds] = time.perf_counter() - started
            _log(args, state, control, {f"farspan/{name}": round(value, 4) for name, value in values.items()})


class CurveCallback(Measuring):
    """Measures half-life and span of the model in training; logs, records and draws them.

    `farspan/half_life`, `farspan/span` (tokens) and `farspan/seconds`; rows go into the run folder `farspan`.
    `training.png` and `training.svg` beside them are drawn anew after each measurement. As `Measuring`.

    Args:
        tokenizer: default the Trainer's `processing_class`.
        text: named as everywhere; best one that the model is not trained on.
        every: steps from one measurement to the next; the last step is measured in any case.
        tokens: fed to the model for one measurement, at most.
        out: the run folder; default `farspan` in the Trainer's `output_dir`.
        trained_length: tokens; default what the model's config says.
        longest: tokens of the longest text to be copied; default what a context of twice the trained length holds.
        protocol: default `nested`, or `probe` where the longest text has more than 8,192 tokens.
        at_start: measures the model before its first step as well.
        seed: of which texts are drawn.

    Raises, when the training begins:
        ValueError: no tokenizer, a budget too small, texts that cannot be read, sharded parameters, a training resumed
            with other settings, or a folder that holds something else.
    """

    name, seconds = "farspan", "seconds"

    def __init__(
        self,
        tokenizer: Any = None,
        *,
        text: str = "builtin:held-out",
        every: int = 1000,
        tokens: int = 200_000,
        out: str | Path | None = None,
        trained_length: int | None = None,
        longest: int | None = None,
        protocol: Protocol | None = None,
        at_start: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(tokenizer, every=every, out=out, trained_length=trained_length, at_start=at_start)
        self.tokens, self.longest = tokens, longest
        self.text, self.seed = text, seed
        self.curve = Curve(protocol=protocol)
        self._summaries: dict[int, tuple[stats.Curve, stats.Summary]] = {}

    def choose(self) -> None:
        """Texts, lengths and repeats within the budget."""
        self._summaries.clear()
        trained = self._lm.trained_length or DEFAULT_TRAINED_LENGTH
        curve = self.curve.resolved(None if self.longest is None else (self.longest,), (trained,))
        task = curve.on(self._lm, self.text)
        context = min(2 * trained, self._lm.position_limit or 2 * trained)
        wanted = self.longest or max(1, task.largest_length(self._lm, context))
        self._task, longest = prepared(task, wanted, REPEATS[0])
        if longest < wanted:
            logger.warning("text %r is too short for %d tokens: lengths end at %d", self.text, wanted, longest)
        shortest = min(SHORTEST, max(1, longest // 4))
        for repeats, points in ((repeats, points) for repeats in REPEATS for points in POINTS):
            lengths = spaced_lengths(shortest, longest, points, "log")
            what: dict[str, Any] = {"lengths": lengths, "repeats": repeats, "seed": self.seed}
            needed = plan(self._task, self.method, self._lm, calibrate=False, **what).tokens
            if needed <= self.tokens:
                break
        else:
            raise ValueError(
                f"tokens = {self.tokens:,} are too few for {len(lengths)} lengths up to {longest:,} tokens with "
                f"{repeats} repeats: give CurveCallback tokens={needed} or more, or a smaller longest"
            )
        self._what, self._text = what, self._task.target
        self._trained_at = self._task.largest_length(self._lm, trained)
        self._recorded(curve, self.text)

    def summarised(self, run: Run, step: int) -> dict[str, float]:
        for (model, _, _), curve in stats.curves(run.rows).items():
            measured = int(model.removeprefix("step-"))
            if (measured == step or measured not in self._summaries) and curve.measured.any():
                self._summaries[measured] = curve, stats.summarise(curve)
        if self._summaries:
            draw_training(self._summaries, self.folder, self._lm.trained_length, self._trained_at)
        if step not in self._summaries:
            return {}
        _, numbers = self._summaries[step]
        return {"half_life": numbers.half_life.value, "span": numbers.span.value}


class PerplexityCallback(Measuring):
    """Measures how well the model in training expects the same tokens behind more and more of their text.

    `farspan/perplexity_N` and `farspan/accuracy_N` for each length of N tokens: those within the trained context say
    what a training costs there, those beyond what it gains. Rows go into the run folder `perplexity`. As `Measuring`.

    Args:
        lengths: tokens; default a half, one and two trained lengths.
        repeats: windows of the text, from as many documents as possible.
        others: as `CurveCallback`.

    Raises, when the training begins:
        ValueError: as `CurveCallback`, or lengths too short for targets.
    """

    name, seconds = "perplexity", "perplexity_seconds"

    def __init__(
        self,
        tokenizer: Any = None,
        *,
        text: str = "builtin:held-out",
        every: int = 1000,
        lengths: Sequence[int] | None = None,
        repeats: int = 4,
        out: str | Path | None = None,
        trained_length: int | None = None,
        at_start: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(tokenizer, every=every, out=out, trained_length=trained_length, at_start=at_start)
        self.text, self.lengths, self.repeats, self.seed = text, tuple(lengths) if lengths else None, repeats, seed

    def choose(self) -> None:
        trained = self._lm.trained_length or DEFAULT_TRAINED_LENGTH
        lengths = self.lengths or tuple(max(2, n) for n in (trained // 2, trained, 2 * trained))
        perplexity = Perplexity(target_tokens=None).resolved(lengths, (trained,))
        self._task = perplexity.on(self._lm, self.text)
        self._text = self._task.text
        self._what = {"lengths": lengths, "repeats": self.repeats, "seed": self.seed}
        self._task.examples(self._lm, **self._what)  # says now that the text is too short
        self._recorded(perplexity, self.text)

    def summarised(self, run: Run, step: int) -> dict[str, float]:
        found: dict[str, float] = {}
        for length in self._what["lengths"]:
            asked = [row for row in run.rows if (row.model, row.length) == (f"step-{step}", length)]
            rows = [row.scores for row in asked if row.status == "ok"]  # of others there are no numbers, or not all
            if rows:
                found[f"perplexity_{length}"] = math.exp(min(sum(s["nats"] for s in rows) / len(rows), MOST_NATS))
                found[f"accuracy_{length}"] = sum(s["accuracy"] for s in rows) / len(rows)
        return found


def _run_folder(base: Path, *, begins: bool) -> Path:
    """`base` for the first training, `base-2`, `base-3` and so on for later ones; a resumed one continues the last."""

    def numbered(n: int) -> Path:
        return base if n == 1 else base.with_name(f"{base.name}-{n}")

    n = 1
    while (rows := numbered(n) / "rows.jsonl").exists() and rows.stat().st_size:
        n += 1
    return numbered(n if begins else max(1, n - 1))


def _unwrapped(model: Any) -> Any:
    """The model itself, out of what data parallelism, torch.compile and PEFT put around it.

    Raises:
        ValueError: its parameters are sharded.
    """
    from accelerate.utils import extract_model_from_parallel

    kinds: tuple[type, ...] = ()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.tensor import DTensor

        kinds = (FullyShardedDataParallel, DTensor)
    parts = [*model.modules(), *model.parameters()]
    if any(isinstance(part, kinds) or hasattr(part, "ds_id") for part in parts):
        raise ValueError(
            "the model's parameters are sharded over processes (FSDP, DeepSpeed ZeRO-3 or tensor parallel), and "
            "CurveCallback measures in one process: train without it and measure the checkpoints with `farspan curve`, "
            "or train with DDP or ZeRO-2"
        )
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextmanager
def _set_aside(model: Any) -> Iterator[None]:
    """Inside, the model is in eval mode without gradients; afterwards every module has its own mode again, and all
    random generators are where they were."""
    modes = [(module, module.training) for module in model.modules()]
    devices = [device for device in {p.device for p in model.parameters()} if device.type not in ("cpu", "meta")]
    python, numpy, forward = random.getstate(), np.random.get_state(), model.__dict__.get("forward")
    try:
        model.eval()
        if "_original_forward" in model.__dict__:  # accelerate put an autocast around the model, but not its decoder
            model.forward = model._original_forward
        with torch.random.fork_rng(devices), torch.no_grad():
            yield
    finally:
        if forward is not None:
            model.forward = forward
        for module, mode in modes:
            module.training = mode
        random.setstate(python)
        np.random.set_state(numpy)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the keys' memory, for the training


def _log(args: Any, state: Any, control: Any, values: dict[str, Any]) -> None:
    """What `Trainer.log` does, from a callback: these are not given the Trainer, only called by its handler."""
    values = values | {"epoch": state.epoch}
    state.log_history.append(values | {"step": state.global_step})
    frame: FrameType | None = sys._getframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), CallbackHandler):
        frame = frame.f_back
    if frame is not None:
        should_log = control.should_log  # is taken back by on_log, and the Trainer's own values are still to come
        frame.f_locals["self"].on_log(args, state, control, values)
        control.should_log = should_log
