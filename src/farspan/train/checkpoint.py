"""Checkpoints: find the one that a training continues from, check each of its files, and refuse other inputs.

A kill while a checkpoint is written leaves a folder without its last file, trainer_state.json. Such a folder is
skipped. If any other file cannot be read, the error names it, and the training is refused until the checkpoint is
deleted.
"""

import json
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from safetensors import SafetensorError
from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from farspan import files
from farspan.files import is_disk_full
from farspan.hf.device import is_out_of_memory
from farspan.record import changed_fields, environment
from farspan.text.corpora import Corpus
from farspan.train.engines import is_first_process

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
    configs = {name: (CONFIGS[name], fields) for name, fields in others.items() if name in CONFIGS}
    now = {} if base is None else {BASE: ("the model that is trained", base)}
    if not finished:
        now[TEXT] = f"text {corpus.name!r} or its tokenizer", corpus.hash
    found = {name: value for name, value in others.items() if name not in CONFIGS}
    for name, value in found.items():
        if name in HELD and continues and (folder / name).exists():
            found[name] = (folder / name).read_text()
        elif name in HELD or not finished:
            now[name] = f"the {name}", value
    now |= configs
    for name, (what, value) in now.items():
        if not continues or not (file := folder / name).exists():
            continue
        before, changed = file.read_text(), f"{what} has changed since the training in {folder.parent} began"
        if name in CONFIGS:
            if different := changed_fields(json.loads(before), json.loads(value)):
                raise ValueError(
                    f"{changed}: {different}. Restore it (config.json), or train into another folder (out)"
                )
        elif before != value:
            raise ValueError(
                f"{changed}: its hash is {value}, expected {before}. Restore it, or train into another folder (out)"
            )
    if not plan and is_first_process():
        for name, (_, value) in now.items():
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


class Clock(TrainerCallback, ExportableState):
    """Count the seconds of a training over all its sessions, and store them in its checkpoints, with the versions and
    hardware of each session.

    Args:
        state: of the checkpoint from which the training continues. What a session did after its last checkpoint is not
            counted, as its steps are done again.
    """

    def __init__(self, state: TrainerState) -> None:
        self.before, self.started = self.stored(state), time.perf_counter()
        self.sessions = [*self.sessions_of(state), {"first_step": state.global_step + 1} | environment()]

    @classmethod
    def stored(cls, state: TrainerState) -> float:
        """Return the seconds up to a checkpoint; 0 for the state of a training that begins."""
        its = state.stateful_callbacks.get(cls.__name__)
        return float(its["attributes"]["seconds"]) if its else 0.0

    @classmethod
    def sessions_of(cls, state: TrainerState) -> list[dict[str, Any]]:
        """Return the first step, versions and hardware of each session up to a checkpoint."""
        its = state.stateful_callbacks.get(cls.__name__)
        return list(its["attributes"].get("sessions", ())) if its else []  # older checkpoints have none

    def state(self) -> dict[str, Any]:
        seconds = self.before + time.perf_counter() - self.started
        return {"args": {}, "attributes": {"seconds": round(seconds, 1), "sessions": self.sessions}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())  # the Trainer expects it, see `stored`
