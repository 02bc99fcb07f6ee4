"""The glue every training shares around the Hugging Face Trainer: engine, batches, schedule, checkpoints, a log."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainerState, TrainingArguments

from farspan import files
from farspan.callback import MeasuringCallback
from farspan.train import checkpoint as checkpoints
from farspan.train import engines
from farspan.train.config import CHECKPOINTS, Settings
from farspan.train.optimizer import OptimizerSettings, build, decay_steps

Engine = Literal["auto", "single", "ddp", "fsdp2", "deepspeed"]


class RunSettings(Settings):
    """[trainer]: how long, how large, how often, on what."""

    steps: int = Field(gt=0)
    batch: int | None = Field(None, gt=0)  # rows of one step, over all processes; default one micro-batch of each
    micro_batch: int = Field(1, gt=0)  # rows of one forward in one process
    seed: int = 0
    engine: Engine = "auto"  # auto: one process, or DDP where the launcher started several
    bf16: bool = True  # activations; the weights and their updates stay fp32
    activation_checkpointing: bool = False  # activations are computed again for the gradient, layer by layer
    attention: Literal["sdpa", "eager", "flash_attention_2"] | None = None  # default sdpa, where the model has it
    # of the saved weights; auto: that of the model that is trained, so that untrained weights keep every bit
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    workers: int = Field(0, ge=0)  # processes that prepare batches
    report_to: tuple[str, ...] = ()  # such as tensorboard, wandb
    log_every: int = Field(50, gt=0)  # steps
    save_every: int = Field(500, gt=0)  # steps; a kill loses at most so many


class TrainerSettings(RunSettings):
    """[trainer] of a pre-training."""

    window: int = Field(1024, gt=1)  # tokens of a row
    batch: int | None = Field(256, gt=0)
    micro_batch: int = Field(8, gt=0)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of the saved weights
    compile: bool = False
    evaluate_every: int = Field(500, gt=0)  # steps


def refuse_impossible(settings: RunSettings, optimizer: OptimizerSettings) -> None:
    """Refuse, before any long work, settings that are wrong for every model.

    Raises:
        ValueError: an engine that does not fit, a batch that is no multiple of the micro-batch, a schedule longer than
            the training, or a name in `report_to` that is unknown or not installed.
    """
    from transformers.integrations import get_reporting_integration_callbacks

    engines.refuse_unfit(settings.engine, optimizer.name)
    rows_at_once = settings.micro_batch * engines.num_processes()
    if settings.batch and settings.batch % rows_at_once:
        raise ValueError(
            f"trainer.batch = {settings.batch} is not a multiple of trainer.micro_batch x processes = {rows_at_once}"
        )
    decay_steps(optimizer, settings.steps)
    named = list(settings.report_to)
    try:
        for reporter in get_reporting_integration_callbacks(named[0] if len(named) == 1 else named):  # also all, none
            reporter()
    except (ValueError, RuntimeError, ImportError) as error:
        raise ValueError(f"trainer.report_to = {named}: {error}") from error


class PlacedArguments(TrainingArguments):
    """TrainingArguments for a model that is on its devices already."""

    place_model_on_device = False


class LogFile(TrainerCallback):
    """Write the log history to a file as it grows, so that it also holds the losses of a training that is killed. Each
    checkpoint's step is logged."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log |= control.should_save

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            files.write(self.file, "".join(json.dumps(entry) + "\n" for entry in state.log_history))


class AtBegin(TrainerCallback):
    """Call `check` when everything is prepared and nothing is trained yet."""

    def __init__(self, check: Callable[[], None]) -> None:
        self.check = check

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.check()


def save_whole(model: Any, dtype: torch.dtype, folder: Path) -> None:
    """Save a transformers model, its weights as `dtype`."""
    model.to(dtype).save_pretrained(folder)


def run(
    model: Any,
    rows: Dataset[Any],
    held_out: Dataset[Any] | None,
    optimizer_settings: OptimizerSettings,
    settings: RunSettings,
    out: Path,
    *,
    trainer_class: Callable[..., checkpoints.CheckpointTrainer] = checkpoints.CheckpointTrainer,
    callbacks: Sequence[MeasuringCallback] = (),
    save: Callable[[Any, torch.dtype, Path], None] = save_whole,
    again: Callable[[], Any],
    base_dtype: torch.dtype = torch.float32,
    arguments: Mapping[str, Any] | None = None,
    notice: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> dict[str, Any]:
    """Train `model` and save it in `out`; continue from the last checkpoint there, if there is one.

    Writes `log.jsonl`: a line each `log_every` steps. Returns parameters, rows read, losses and seconds.

    Args:
        callbacks: measure the model in training.
        save: saves the trained model, or a part of it, as a dtype in a folder.
        base_dtype: of the saved weights where `trainer.dtype` is "auto".
        notice: called with each line that a user should read.
        again: makes the untrained model a second time; the whole weights of a sharded model are loaded into it.
        arguments: more of transformers' TrainingArguments.
        options: of the Trainer.

    Raises:
        ValueError: a longer training's checkpoints in `out`, a damaged one, another engine in use than the one that was
            asked for, a training that diverges, or a disk that is full.
    """
    batch = settings.batch or settings.micro_batch * engines.num_processes()
    dtype = base_dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
    trainer = trainer_class(
        model=model,
        args=_arguments(settings, optimizer_settings, batch, out, engines.sharded(model), arguments or {}),
        train_dataset=rows,
        eval_dataset=held_out,
        callbacks=[LogFile(out / "log.jsonl")],
        optimizer_and_schedule=build(model, optimizer_settings, settings.steps),
        **options,
    )
    started, notice = time.perf_counter(), notice if trainer.is_world_process_zero() else _silent
    checkpoint = checkpoints.last(out / CHECKPOINTS, min(settings.save_every, settings.steps), notice)
    before = checkpoints.state_of(checkpoint) if checkpoint else TrainerState()
    if before.global_step > settings.steps:
        raise ValueError(
            f"{checkpoint} is of a longer training than trainer.steps = {settings.steps}: choose another folder for out"
        )
    if checkpoint and before.global_step == settings.steps:
        trainer.restore(checkpoint, before)
    else:
        check = partial(_refuse_begin, trainer, settings, optimizer_settings.name, dtype, checkpoint)
        trainer.add_callback(AtBegin(check))
        for callback in callbacks:
            callback.attach(trainer)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    state = engines.whole_state(model) if engines.sharded(model) else None
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    final = trainer.evaluate()["eval_loss"] if held_out is not None else None
    parameters = sum(p.numel() for p in model.parameters())
    if trainer.is_world_process_zero():
        if state is not None:
            model = again()
            assert state.keys() == dict(model.named_parameters()).keys(), "another model than was trained"
            model.load_state_dict(state, strict=False)  # buffers are as they were made
        with checkpoints.writing(out), files.added(out, last="config.json") as new:
            save(model, dtype, new)
    return {
        "parameters": parameters,
        "rows": _rows_read(len(rows), batch, settings.steps),  # type: ignore[arg-type]
        "loss": logged[-1]["loss"],  # nats per token, mean since the line before, at most `log_every` steps
        # its parts, where there are several, such as those of the sparse rows and of the ordinary window
        "losses": {name.removeprefix("loss_"): value for name, value in logged[-1].items() if name.startswith("loss_")},
        "held_out_loss": final,  # nats per token
        "seconds": round(time.perf_counter() - started, 1),  # since the last start
    }


def _rows_read(rows: int, batch: int, steps: int) -> int:
    """Return the number of rows that are read in all: the last step of an epoch has the remaining ones."""
    epochs, more = divmod(steps, -(-rows // batch))
    return epochs * rows + more * batch


def _arguments(
    settings: RunSettings,
    optimizer: OptimizerSettings,
    batch: int,
    out: Path,
    is_sharded: bool,
    more: Mapping[str, Any],
) -> TrainingArguments:
    """Return the Trainer's arguments for a training in steps of `batch` rows."""
    arguments: dict[str, Any] = {
        "output_dir": str(out / CHECKPOINTS),
        "max_steps": settings.steps,
        "per_device_train_batch_size": settings.micro_batch,
        "per_device_eval_batch_size": settings.micro_batch,
        "gradient_accumulation_steps": batch // (settings.micro_batch * engines.num_processes()),
        "learning_rate": optimizer.lr,  # named in messages; the optimizer and its schedule are given to the Trainer
        "max_grad_norm": optimizer.clip,
        "bf16": settings.bf16,
        "seed": settings.seed,
        "data_seed": settings.seed,
        "logging_steps": settings.log_every,
        "logging_nan_inf_filter": False,  # it would replace a loss of NaN by the mean of the others
        "save_steps": settings.save_every,
        "report_to": list(settings.report_to),
        "dataloader_num_workers": settings.workers,
        "dataloader_pin_memory": torch.cuda.is_available(),
        "remove_unused_columns": False,
    }
    arguments |= engines.training_arguments(settings.engine, settings.bf16, is_sharded)
    return (PlacedArguments if is_sharded else TrainingArguments)(**(arguments | dict(more)))


def pretraining_arguments(settings: TrainerSettings, held_out: Any) -> dict[str, Any]:
    """Return the additional TrainingArguments of a pre-training."""
    return {
        "torch_compile": settings.compile,
        "eval_strategy": "steps" if held_out else "no",
        "eval_steps": settings.evaluate_every,
    }


def _refuse_begin(
    trainer: checkpoints.CheckpointTrainer,
    settings: RunSettings,
    optimizer: str,
    dtype: torch.dtype,
    checkpoint: Path | None,
) -> None:
    """Refuse a training that is prepared, before its first step.

    Raises:
        ValueError: another engine in use than asked for, one that the optimizer or the dtype of the saved weights does
            not fit, or weights that are not finite.
    """
    engines.refuse_other(settings.engine, trainer)
    engines.refuse_muon(engines.in_use(trainer), optimizer)
    if engines.in_use(trainer) == "deepspeed":
        engines.refuse_rounding(settings.bf16, dtype)
    trainer.refuse_weights(checkpoint)


def write_up(out: Path, summary: Mapping[str, Any], tokenizer: Any) -> None:
    """Write tokenizer and training.json to the folder of a trained model.

    Raises:
        ValueError: the disk is full.
    """
    with checkpoints.writing(out):
        with files.added(out, last="tokenizer.json") as new:
            tokenizer.save_pretrained(new)
        files.write(out / "training.json", json.dumps(summary, indent=2) + "\n")


def write_card(out: Path, card: str, draw: Callable[[], Any]) -> None:
    """Write the model card and the picture of its losses, which `draw` makes, to the folder of a trained model.

    Raises:
        ValueError: the disk is full.
    """
    with checkpoints.writing(out):
        draw()
        files.write(out / "README.md", card)


def read_log(out: Path) -> list[dict[str, Any]]:
    """Return the entries of a training's log."""
    file = out / "log.jsonl"
    return [
        files.parse_json(line, f"{file}, line {number}") for number, line in enumerate(file.read_text().splitlines(), 1)
    ]


def _silent(text: str) -> None:
    pass
