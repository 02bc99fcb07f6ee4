"""Checkpoints: find the one that a training continues from, check each of its files, and write only finite weights.

A kill while a checkpoint is written leaves a folder without its last file, trainer_state.json. Such a folder is
skipped. If any other file cannot be read, the error names it, and the training is refused until the checkpoint is
deleted.
"""

import json
import math
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from farspan import files
from farspan.files import is_disk_full, parse_json
from farspan.hf.device import is_out_of_memory
from farspan.record import changed_fields
from farspan.text.corpora import Corpus
from farspan.train.engines import in_any_process, is_first_process

TEXT = "text"  # the file with the hash of the text
BASE = "base"  # the file with the fingerprint of the model that the training started from
HELD = ("encoder", "warmed_up")  # files with the fingerprints of weights that are then in each checkpoint
# files with the fields of a model's config, as JSON, and what the model is
CONFIGS = {"base_config": "the config of the model that is trained", "teacher_config": "the config of the teacher"}
NAMED = re.compile(r"checkpoint-(\d+)")
# what torch.load, safetensors and JSON raise for files that are truncated, or of another program or version
UNREADABLE = (OSError, EOFError, RuntimeError, UnpicklingError, SafetensorError, ValueError, TypeError, LookupError,
              AttributeError)  # fmt: skip


def damaged(file: Path, why: object) -> ValueError:
    """Return the error for a file of a checkpoint that cannot be used."""
    folder = file.parent
    others = [step for step in steps(folder.parent) if folder.parent / f"checkpoint-{step}" != folder]
    then = f"continues from checkpoint-{others[-1]}" if others else "begins again, since there is no other checkpoint"
    return ValueError(
        f"{file} is damaged, incomplete or of another version: {why}. Delete the folder {folder} and repeat the "
        f"command: the training {then}"
    )


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Convert errors in the block into errors that name a file of a checkpoint.

    Raises:
        ValueError: the file cannot be used; names it.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")  # for a file that torch did not write
            yield
    except UNREADABLE as error:
        if is_out_of_memory(error):
            raise
        # not torch's own message, which suggests to load the file in a way that can run code in it
        why = f"its content cannot be read ({type(error).__name__})"
        if isinstance(error, UnicodeDecodeError):
            why = f"it holds a text that is not UTF-8 ({error.reason})"
        elif isinstance(error, ValueError | OSError) and str(error):
            why = str(error).partition("\n")[0]
        raise damaged(file, why) from error


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Convert errors of writing in the block into errors that name the file or folder `place`.

    Raises:
        ValueError: `place` cannot be written; names it.
    """
    try:
        yield
    except Exception as error:  # tokenizers raise a plain Exception
        is_full = is_disk_full(error)
        if not is_full and not isinstance(error, OSError | SafetensorError):
            raise
        why = "no space is left on the disk" if is_full else str(error).partition("\n")[0]
        raise ValueError(
            f"{place} cannot be written: {why}. Free space there and repeat the command: the training continues from "
            "its last checkpoint, or begins again if it has none"
        ) from error


def begun(folder: Path) -> dict[int, Path]:
    """Return the checkpoints in a folder, including incomplete ones: their paths by step, in order."""
    found = ((NAMED.fullmatch(path.name), path) for path in folder.glob("checkpoint-*") if path.is_dir())
    return dict(sorted((int(name[1]), path) for name, path in found if name))


def steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, in order."""
    files = {step: path / TRAINER_STATE_NAME for step, path in begun(folder).items()}
    return [step for step, file in files.items() if file.exists() and file.stat().st_size]


def last(folder: Path, first_save: int, notice: Callable[[str], None]) -> Path | None:
    """Return the newest complete checkpoint; call `notice` with a line for each newer, incomplete one.

    Args:
        first_save: the step of the training's first checkpoint. Only this one is written while no complete one exists;
            so if there is no complete one, an incomplete one of a later step was damaged after it was written.

    Raises:
        ValueError: a checkpoint that was damaged after it was written.
    """
    whole = max(steps(folder), default=0)
    for step, path in begun(folder).items():
        if step <= whole:
            continue
        if not whole and step > first_save:
            raise damaged(path / TRAINER_STATE_NAME, "it is missing or empty")
        goes_on = f"continues from checkpoint-{whole}" if whole else "begins again"
        notice(f"{path} has no {TRAINER_STATE_NAME}, as it is incomplete: the training {goes_on}")
    return folder / f"checkpoint-{whole}" if whole else None


def refuse_other_inputs(
    folder: Path,
    corpus: Corpus,
    base: str | None,
    others: Mapping[str, str],
    *,
    continues: bool,
    finished: bool,
    plan: bool,
) -> dict[str, str]:
    """Record what a training began with in its folder of checkpoints, or compare it if the training continues: the hash
    of its text, the fingerprint of the model that it started from, its config, and the hashes of other inputs. A plan
    only compares. Return the hashes of the other inputs; of weights that a checkpoint holds, those at the beginning.

    Args:
        base: None: the training starts from no model.
        others: by name; those named in HELD are not compared, those in CONFIGS field by field.
        finished: nothing of text and other inputs is read any more.

    Raises:
        ValueError: the text, its tokenizer, the model or another input has changed since the training began.
    """
    configs = {name: fields for name, fields in others.items() if name in CONFIGS}
    others = {name: value for name, value in others.items() if name not in CONFIGS}
    now = {} if base is None else {BASE: ("the model that is trained", base)}
    if not finished:
        now[TEXT] = f"text {corpus.name!r} or its tokenizer", corpus.hash
    found = dict(others)
    for name, value in others.items():
        if name in HELD and continues and (folder / name).exists():
            found[name] = (folder / name).read_text()
        elif name in HELD or not finished:
            now[name] = f"the {name}", value
    for name, (what, value) in now.items():
        file = folder / name
        if continues and file.exists() and (before := file.read_text()) != value:
            raise ValueError(
                f"{what} has changed since the training in {folder.parent} began: its hash is {value}, expected "
                f"{before}. Restore it, or train into another folder (out)"
            )
    for name, fields in configs.items():
        file = folder / name
        if continues and file.exists() and (different := changed_fields(*map(json.loads, (file.read_text(), fields)))):
            raise ValueError(
                f"{CONFIGS[name]} has changed since the training in {folder.parent} began: {different}. Restore it "
                "(config.json), or train into another folder (out)"
            )
    if not plan and is_first_process():
        for name, value in ({name: value for name, (_, value) in now.items()} | configs).items():
            files.write(folder / name, value)
    return found


def state_of(checkpoint: Path) -> TrainerState:
    """Return the state of the training that a checkpoint holds.

    Raises:
        ValueError: the state cannot be read, is of another version, or has another step than the folder's name.
    """
    file = checkpoint / TRAINER_STATE_NAME
    with reading(file):
        state = TrainerState.load_from_json(str(file))
        if repr(state.global_step) != (step := checkpoint.name.removeprefix("checkpoint-")):
            raise ValueError(f"got step {state.global_step!r}, expected {step}, as in the folder's name")
        if not isinstance(state.max_steps, int) or state.max_steps < state.global_step:
            raise ValueError(f"got max_steps {state.max_steps!r}, expected at least {step}")
        history = state.log_history if isinstance(state.log_history, list) else [state.log_history]
        if not all(isinstance(entry, dict) and isinstance(entry.get("step"), int) for entry in history):
            raise ValueError("its log_history has entries without a step")
        if not any(isinstance(entry.get("loss"), float | int) for entry in state.log_history):
            raise ValueError("its log_history has no loss")
        if not isinstance(state.stateful_callbacks, dict) or "TrainerControl" not in state.stateful_callbacks:
            raise ValueError("its stateful_callbacks have no TrainerControl")
        Clock.stored(state)
    return state


def not_finite(parameters: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first parameter that holds NaN or infinity in this process; None if all are finite. Waits
    once for the device."""
    named = [(name, p.to_local() if hasattr(p, "to_local") else p) for name, p in parameters]
    named = [(name, p.detach()) for name, p in named if p.numel()]
    if not named:
        return None
    finite = torch.stack([p.isfinite().all().to(named[0][1].device) for _, p in named]).tolist()
    return next((name for (name, _), fine in zip(named, finite, strict=True) if not fine), None)


def refuse_not_finite(model: Any, what: str) -> None:
    """Raise ValueError, with the first of them, if weights of a model are not finite, before it is trained or used in a
    training.

    Args:
        what: the name of the model, for the error.
    """
    if (name := not_finite(model.named_parameters())) is not None:
        raise ValueError(
            f"{what} cannot be used: its weight {name} holds NaN or infinity, expected finite numbers. Choose another "
            "model, or download it again"
        )


def refuse_not_finite_values(values: Mapping[str, Any], state: TrainerState, args: TrainingArguments) -> None:
    """Raise ValueError, with the steps, if a training diverged: a loss or the gradient's norm is NaN or infinite.

    Args:
        values: the values being logged. A loss is the mean over all processes and all steps since the previous line,
            so no step is left out. It is on the CPU already, so the check does not wait for the device.
    """
    for key, name in (("loss", "loss"), ("eval_loss", "held-out loss"), ("grad_norm", "norm of the gradient")):
        value = values.get(key)
        if value is None or math.isfinite(value):
            continue
        now = state.global_step
        before = max((e["step"] for e in state.log_history if "loss" in e and e["step"] < now), default=0)
        when = f"at step {now:,}" if key != "loss" or before + 1 == now else f"in steps {before + 1:,} to {now:,}"
        raise diverged(f"the {name} is {value} {when}, expected a finite number", args)


def diverged(what: str, args: TrainingArguments) -> ValueError:
    """Return the error for a training that diverged; it names the last checkpoint."""
    folder = Path(args.output_dir)
    kept = max(steps(folder), default=0)
    last_one = f"the last checkpoint is {folder / f'checkpoint-{kept}'}" if kept else "there is no checkpoint"
    return ValueError(
        f"the training diverged: {what}. No model was saved; {last_one}. Lower optimizer.lr = {args.learning_rate:g} "
        "or optimizer.weight_decay, or give more optimizer.warmup_steps, and train into another folder (out)"
    )


class AtBegin(TrainerCallback):
    """Call `check` when everything is prepared and nothing is trained yet."""

    def __init__(self, check: Callable[[], None]) -> None:
        self.check = check

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.check()


class Clock(TrainerCallback, ExportableState):
    """Count the seconds of a training over all its sessions, and store them in its checkpoints.

    Args:
        state: of the checkpoint from which the training continues. Seconds after it, in a session that was stopped, are
            not counted, as its steps are done again.
    """

    def __init__(self, state: TrainerState) -> None:
        self.before, self.started = self.stored(state), time.perf_counter()

    @classmethod
    def stored(cls, state: TrainerState) -> float:
        """Return the seconds up to a checkpoint; 0 for the state of a training that begins."""
        its = state.stateful_callbacks.get(cls.__name__)
        return float(its["attributes"]["seconds"]) if its else 0.0

    def state(self) -> dict[str, Any]:
        seconds = self.before + time.perf_counter() - self.started
        return {"args": {}, "attributes": {"seconds": round(seconds, 1)}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())  # the Trainer expects it, see `stored`


class Intervals(TrainerCallback):
    """Log, save and evaluate as often as the settings say, also in a training that continues: the Trainer goes on as
    often as before the checkpoint."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.compute_steps(args, state.max_steps)


class CheckpointTrainer(Trainer):
    """The Trainer with a given optimizer and schedule. It stops if a loss or a saved weight is not finite. If a file of
    a checkpoint cannot be read or written, the error names it.

    transformers has no public method that reads or writes one file of a checkpoint, so private ones are overridden.
    """

    def __init__(
        self,
        *args: Any,
        optimizer_and_schedule: tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR],
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.optimizer: Any = None  # during the training, accelerate's wrapper of the given one
        self.optimizer_and_schedule = optimizer_and_schedule

    # not given as the argument `optimizers`: DeepSpeed replaces these silently, and FSDP refuses them

    def create_optimizer(self, *args: Any, **options: Any) -> torch.optim.Optimizer:
        self.optimizer = self.optimizer_and_schedule[0]
        return self.optimizer

    def create_scheduler(self, *args: Any, **options: Any) -> torch.optim.lr_scheduler.LRScheduler:
        self.lr_scheduler = self.optimizer_and_schedule[1]
        return self.lr_scheduler

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        refuse_not_finite_values(logs, self.state, self.args)
        # at the step of a checkpoint, log is called before the checkpoint is written
        if "loss" in logs and self.control.should_save and (name := self._weight_not_finite()):
            what = f"weight {name} holds NaN or infinity after step {self.state.global_step:,}"
            raise diverged(what, self.args)
        super().log(logs, start_time)

    def refuse_weights(self, checkpoint: Path | None) -> None:
        """Raise ValueError, with the first of them, for weights to train that are not finite, before a training begins
        or continues from `checkpoint`."""
        if (name := self._weight_not_finite()) and checkpoint is not None:
            raise damaged(checkpoint / SAFE_WEIGHTS_NAME, f"weight {name} holds NaN or infinity")
        if name:
            refuse_not_finite(self.model, "the model")

    def _weight_not_finite(self) -> str | None:
        """Return the name of a trained weight that is not finite in any process; None, in all processes, if all are."""
        found = not_finite((name, p) for name, p in self.model.named_parameters() if p.requires_grad)
        return (found or "of another process") if in_any_process(found is not None) else None

    def restore(self, checkpoint: Path, state: TrainerState) -> None:
        """Load the weights and set the state of a finished training. (`train` would take one more step.)

        Raises:
            ValueError: weights that cannot be read, or are not finite.
        """
        self._load_from_checkpoint(str(checkpoint))
        self.state = state
        self.refuse_weights(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        if self.is_fsdp_enabled:  # saved by accelerate, in another layout
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        weights = folder / SAFE_WEIGHTS_NAME
        if (index := folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
            weights = index
        else:
            with reading(weights), safe_open(weights, framework="pt"):
                pass  # refuse also a missing file: transformers would read pickled weights instead
        with reading(folder / CONFIG_NAME):
            parse_json((folder / CONFIG_NAME).read_bytes(), CONFIG_NAME)
        with reading(weights):
            return super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or ())
        if wrong := sorted(set(load_result.missing_keys) - tied) + sorted(load_result.unexpected_keys):
            raise ValueError(f"it is of another model: {wrong[0]} and {len(wrong) - 1} other weights differ")
        self.model.tie_weights()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            file = Path(checkpoint) / SCHEDULER_NAME
            with reading(file):
                state = torch.load(file, map_location="cpu", weights_only=True)
                if not isinstance(state, dict) or state.keys() != self.lr_scheduler.state_dict().keys():
                    raise ValueError("it holds no state of this schedule")
            with reading(Path(checkpoint) / OPTIMIZER_NAME):
                (Path(checkpoint) / OPTIMIZER_NAME).stat()  # transformers would silently start with a new optimizer
                self.load_optimizer(checkpoint)
        else:
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            schedule = self.optimizer_and_schedule[1]
            groups = zip(schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True)
            for group, rate, share_at in groups:  # the rate stored after the last step of a shorter training is 0
                group["lr"] = rate * share_at(schedule.last_epoch)
            schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]  # what is logged

    def load_optimizer(self, checkpoint: str) -> None:
        """Load the optimizer and the schedule, whose file has been checked."""
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            with reading(Path(checkpoint) / SCALER_NAME):
                super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder, several = Path(checkpoint), self.args.world_size > 1
        file = folder / (f"rng_state_{self.args.process_index}.pth" if several else "rng_state.pth")
        # a training with another number of processes wrote files of other names, which are not read
        there = file.exists() or file.is_symlink()
        if not file.is_file() and (there or not any(folder.glob("rng_state*.pth"))):
            raise damaged(file, "it is missing, or not a file")
        with reading(file):
            super()._load_rng_state(checkpoint)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint, then delete the older ones: transformers' save_total_limit deletes any `checkpoint-*`."""
        folder, now = Path(self.args.output_dir), self.state.global_step
        with writing(folder / f"checkpoint-{now}"):
            super()._save_checkpoint(model, trial)
        if self.args.should_save:
            for step, path in begun(folder).items():
                if step < now:
                    shutil.rmtree(path, ignore_errors=True)
