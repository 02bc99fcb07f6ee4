"""What the plan of a training prints: its steps, and their time."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from transformers import TrainerCallback

from farspan.callback import MeasuringCallback
from farspan.hf.device import peak_bytes, wait
from farspan.report.export import counted, duration, memory_size
from farspan.train import engines
from farspan.train.progress import OnlyPlanned, TrainingWatch
from farspan.train.settings import RunSettings

STEPS = 3  # that run; the first is not timed, as it also prepares kernels and the optimizer's states


class StepTimes(TrainerCallback):
    """Record when each step ends, and stop the training after STEPS."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.peak_bytes = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wait(args.device)
        self.ends.append(time.perf_counter())
        self.peak_bytes = peak_bytes(args.device)
        control.should_training_stop |= len(self.ends) == STEPS
        control.should_save = control.should_evaluate = False

    @property
    def step_seconds(self) -> float | None:
        """The mean time of a step; None after a training of one step, which is not timed."""
        return (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1) if len(self.ends) > 1 else None


def steps_in_words(
    how: RunSettings, read: dict[str, int], row: int | None, checkpoint: Path | None, *, finished: bool
) -> str:
    """Return the steps of a training as text, with their tokens if all rows have `row`, and where it continues."""
    line = f"{how.steps:,} steps of {counted(how.rows_per_step, 'row')}"
    if row is not None:
        line += f" of {row:,} tokens: {how.rows_per_step * row:,} tokens a step, {read['tokens']:,} in all"
    if checkpoint is not None:
        ended = f"is finished ({checkpoint.name}): nothing would be trained"
        line += f"; the training {ended if finished else f'continues from {checkpoint.name}'}"
    return line


def end_plan(
    trainer: Any,
    callbacks: Sequence[MeasuringCallback],
    watch: TrainingWatch,
    line: str,
    read: dict[str, int],
    left: int,
) -> NoReturn:
    """Report a line about a planned training, and, if requested, the time of its steps that are left; raise
    OnlyPlanned with its numbers.

    Args:
        read: numbers of rows and, if known, of tokens that all steps read.
        left: steps that are left.
    """
    for callback in callbacks:
        callback.prepare(trainer.model, trainer.processing_class)
    watch.notice(line)
    timed = dict[str, float | None]()
    if watch.calibrate and left:
        trainer.add_callback(times := StepTimes())
        with engines.products(trainer.args):
            trainer.train()
        each, size = times.step_seconds, times.peak_bytes
        timed = {"step_seconds": each, "seconds": each and each * left, "peak_bytes": size}
        line = "a training of one step is not timed"
        if each is not None:
            line = f"a step takes {each:.2g} s here, {left:,} steps {duration(each * left)}"
        watch.notice(f"{line}; peak memory {memory_size(size)}")
    raise OnlyPlanned({"steps": trainer.args.max_steps, "steps_left": left} | read | timed)
