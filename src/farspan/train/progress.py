"""Report the progress of a training: steps, losses, and measurements of the model in training, as text."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from farspan import files
from farspan.report.training import PERPLEXITY, memory_length

Notice = Callable[[str], None]


@dataclass(frozen=True)
class TrainingWatch:
    """Functions that are called with the progress of a training, in its first process. All are optional."""

    start: Callable[[str, int], None] = lambda title, total: None  # a title, and the number of steps
    step: Callable[[int, int, str], None] = lambda done, total, state: None  # steps done, all steps, the last loss
    notice: Notice = lambda line: None  # a line for the user
    plan: bool = False  # check the training and describe it in notices: train and write nothing
    calibrate: bool = False  # with `plan`: also time some steps, whose result is discarded


class OnlyPlanned(BaseException):
    """The end of a plan, where the training would begin.

    Attributes:
        numbers: steps, steps_left, rows and tokens of the training; with `calibrate` also step_seconds, seconds (of the
            steps that are left) and peak_bytes.
    """

    def __init__(self, numbers: dict[str, Any]) -> None:
        self.numbers = numbers


class LogFile(TrainerCallback):
    """Write the log history to a file after each entry, so that the losses of a training that is killed are kept. Log
    also at the step of each checkpoint."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log |= control.should_save

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            files.write(self.file, "".join(json.dumps(entry) + "\n" for entry in state.log_history))


class Steps(TrainerCallback):
    """Report each step with the last logged loss, and each measurement, to a TrainingWatch; with the first one, that
    the weights will be rounded to `dtype`."""

    def __init__(self, watch: TrainingWatch, dtype: torch.dtype = torch.float32) -> None:
        short = str(dtype).removeprefix("torch.")
        self.watch, self.loss = watch, ""
        self.note = "" if dtype == torch.float32 else f" (weights in training; saved ones are rounded to {short})"

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watch.notice(f"training steps {state.global_step + 1:,} to {state.max_steps:,}")
        self.watch.start("training steps", state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watch.step(state.global_step, state.max_steps, self.loss)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.loss = loss_in_words(logs["loss"], parts_of(logs))
        if measured := _measured(logs):
            self.watch.notice(f"step {state.global_step:,}: {measured}{self.note}")
            self.note = ""


def parts_of(logged: Mapping[str, Any]) -> dict[str, float]:
    """Return the parts of the loss in an entry of a log, by name, such as `sparse` and `window`."""
    return {name.removeprefix("loss_"): value for name, value in logged.items() if name.startswith("loss_")}


def loss_in_words(loss: float, parts: Mapping[str, float], unit: str = "") -> str:
    """Return a loss as text, with its parts if there are several: `loss 4.501 (weighted sum of sparse 2.511 and window
    1.990)`. If there is one, return it without its weight. A unit, such as " nats per token", is that of the parts."""
    if len(parts) < 2:
        return f"loss {next(iter(parts.values()), loss):.3f}{unit}"
    shown = " and ".join(f"{name} {value:.3f}" for name, value in parts.items())
    return f"loss {loss:.3f} (weighted sum of {shown}{unit})"


def _measured(logged: Mapping[str, float]) -> str:
    """Return the measurements in an entry of a log as text; an empty string if there are none."""
    if "eval_loss" in logged:
        return f"held-out loss {logged['eval_loss']:.3f} nats per token"
    if "farspan/span" in logged:
        return f"half-life {memory_length(logged, 'half_life')}, span {memory_length(logged, 'span')} tokens"
    found = [(int(name[1]), value) for key, value in logged.items() if (name := PERPLEXITY.fullmatch(key))]
    return f"perplexity {', '.join(f'{value:.4g} at {n:,}' for n, value in found)} tokens" if found else ""
