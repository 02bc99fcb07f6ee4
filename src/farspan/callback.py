"""The forgetting curve of a model while it is trained: a callback for the Hugging Face Trainer.

    Trainer(..., processing_class=tokenizer, callbacks=[farspan.CurveCallback(every=500)])

Every measurement asks for the same texts at the same lengths, so that steps are paired, and feeds the model a bounded
number of tokens. The training does not notice: modules keep their modes, random generators their states.
"""

import logging
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from farspan import stats
from farspan.adaptive import SHORTEST, prepared
from farspan.curves import CurveSettings
from farspan.lengths import spaced_lengths
from farspan.lm import DEFAULT_TRAINED_LENGTH, LM, fingerprint, wrap
from farspan.measure import Watch, measure
from farspan.methods.full import Full
from farspan.plan import plan
from farspan.reader import DenseReader, dense_reader
from farspan.record import Run
from farspan.report.picture import draw_training
from farspan.tasks.curve import Curve, Protocol

REPEATS = (4, 3, 2)  # the first that the budget allows ...
POINTS = range(16, 5, -1)  # ... with as many lengths as it allows
logger = logging.getLogger(__name__)


class CurveCallback(TrainerCallback):
    """Measures half-life and span of the model in training; logs, records and draws them.

    `farspan/half_life`, `farspan/span` (tokens) and `farspan/seconds` reach the log history and every callback that
    listens to logs. Rows go into a run folder, `folder`, a model `step-N` for each step; `training.png` and
    `training.svg` beside them are drawn anew after each measurement. A resumed training continues its folder, and
    one that begins anew gets another (`farspan-2`). With several processes the first one measures.

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
        if every < 1:
            raise ValueError(f"every = {every}; it is a number of steps, at least 1")
        self.tokenizer, self.every, self.tokens, self.out = tokenizer, every, tokens, out
        self.trained_length, self.longest, self.at_start = trained_length, longest, at_start
        lengths = None if longest is None else (longest,)
        self.settings = CurveSettings(text=text, lengths=lengths, protocol=protocol, seed=seed)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = _unwrapped(kwargs["model"])
        if not state.is_world_process_zero:
            return
        tokenizer = self.tokenizer if self.tokenizer is not None else kwargs.get("processing_class")
        if tokenizer is None:
            raise ValueError(
                "CurveCallback has no tokenizer: give it one, CurveCallback(tokenizer), or give the Trainer "
                "processing_class=tokenizer"
            )
        self._lm = wrap(model, tokenizer, "step-0", trained_length=self.trained_length)
        self.folder = _run_folder(Path(self.out or Path(args.output_dir) / "farspan"), begins=state.global_step == 0)
        self._autocast = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        with _set_aside(model):
            self._method = _Checked(dense_reader(self._lm).fallback)
            self._choose()
        self._summaries: dict[int, tuple[stats.Curve, stats.Summary]] = {}
        Run.open(self.folder, self._record).__exit__(None, None, None)  # says now what it would say at the first step
        if state.global_step == 0 and self.at_start:
            self._measure(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0 or control.should_training_stop:
            self._measure(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_training_stop:  # by a callback that was asked after this one
            self._measure(args, state, control)

    def _choose(self) -> None:
        """Texts, lengths and repeats, the same for all steps, within the budget."""
        trained = self._lm.trained_length or DEFAULT_TRAINED_LENGTH
        settings = self.settings.resolved([trained])
        (task,) = settings.tasks(self._lm)
        context = min(2 * trained, self._lm.position_limit or 2 * trained)
        wanted = self.longest or max(1, task.largest_length(self._lm, context))
        self._task, longest = prepared(task, wanted, REPEATS[0])
        if longest < wanted:
            logger.warning("text %r is too short for %d tokens: lengths end at %d", settings.text, wanted, longest)
        shortest = min(SHORTEST, max(1, longest // 4))
        for repeats, points in ((repeats, points) for repeats in REPEATS for points in POINTS):
            lengths = spaced_lengths(shortest, longest, points, "log")
            what: dict[str, Any] = {"lengths": lengths, "repeats": repeats, "seed": settings.seed}
            needed = plan(self._task, self._method, self._lm, calibrate=False, **what).tokens
            if needed <= self.tokens:
                break
        else:
            raise ValueError(
                f"tokens = {self.tokens:,} are too few for {len(lengths)} lengths up to {longest:,} tokens with "
                f"{repeats} repeats: give CurveCallback tokens={needed} or more, or a smaller longest"
            )
        self._what = what
        self._trained_at = self._task.largest_length(self._lm, trained)
        dtype = str(self._autocast).removeprefix("torch.") if self._autocast else None
        self._record = {"task": Curve.name, "methods": ["full"], "autocast": dtype, **asdict(replace(settings, **what))}

    def _measure(self, args: Any, state: Any, control: Any) -> None:
        if not state.is_world_process_zero or any(
            entry.get("step") == state.global_step and "farspan/span" in entry for entry in state.log_history
        ):
            return
        started, name = time.perf_counter(), f"step-{state.global_step}"
        text = self._task.target
        identity = self._lm.identity | {"name": name, "fingerprint": fingerprint(self._lm.model)}
        identity |= {"texts": [text.hash], "characters_per_token": {text.hash: text.characters_per_token}}
        lm = replace(self._lm, name=name, identity=identity)
        autocast = torch.autocast(lm.device.type, self._autocast) if self._autocast else nullcontext()
        with _set_aside(lm.model), Run.open(self.folder, self._record) as run:
            # where a resumed training comes to a step again, its weights may differ in their last bits
            if name not in run.header["models"]:
                run.add_model(identity)
            with autocast:
                measure(self._task, self._method, lm, run, **self._what, watch=Watch(notice=logger.warning))
            for (model, _, _), curve in stats.curves(run.rows).items():
                step = int(model.removeprefix("step-"))
                if (step == state.global_step or step not in self._summaries) and curve.measured.any():
                    self._summaries[step] = curve, stats.summarise(curve)
            if self._summaries:
                draw_training(self._summaries, self.folder, self._lm.trained_length, self._trained_at)
        if state.global_step in self._summaries:
            _, numbers = self._summaries[state.global_step]
            values = {"half_life": numbers.half_life.value, "span": numbers.span.value}
            values["seconds"] = time.perf_counter() - started
            _log(args, state, control, {f"farspan/{name}": round(value, 2) for name, value in values.items()})


@dataclass(frozen=True)
class _Checked(Full):
    """Full attention, read as the self-check before the first step found right: at all steps in the same way."""

    fallback: str | None

    @contextmanager
    def on(self, lm: LM) -> Iterator[DenseReader]:
        yield DenseReader(lm, fallback=self.fallback)


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
