"""The Trainer with checkpoints that are checked: see `farspan.train.checkpoint`."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from farspan.files import parse_json
from farspan.hf.products import refuse_fallback
from farspan.train.checkpoint import begun, damaged, reading, writing
from farspan.train.engines import in_any_process
from farspan.train.finite import diverged, not_finite, refuse_not_finite, refuse_not_finite_values


class AtBegin(TrainerCallback):
    """Call `check` when everything is prepared and nothing is trained yet."""

    def __init__(self, check: Callable[[], None]) -> None:
        self.check = check

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.check()


class Intervals(TrainerCallback):
    """Log, save and evaluate as often as the settings require, also in a training that continues: the Trainer itself
    uses the intervals stored in the checkpoint."""

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

    def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
        loss = super().training_step(*args, **options)
        refuse_fallback()
        return loss

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
