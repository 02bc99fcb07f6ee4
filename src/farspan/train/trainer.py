"""The glue every training shares around the Hugging Face Trainer: engine, batches, schedule, checkpoints, a log."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch.utils.data import Dataset

from farspan.train import engines
from farspan.train.config import Settings
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
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of the saved weights
    workers: int = Field(0, ge=0)  # processes that prepare batches
    report_to: tuple[str, ...] = ()  # such as tensorboard, wandb
    log_every: int = Field(50, gt=0)  # steps
    save_every: int = Field(500, gt=0)  # steps; what a kill loses at most


class TrainerSettings(RunSettings):
    """[trainer] of a pre-training."""

    window: int = Field(1024, gt=1)  # tokens of a row
    batch: int | None = Field(256, gt=0)
    micro_batch: int = Field(8, gt=0)
    compile: bool = False
    evaluate_every: int = Field(500, gt=0)  # steps


def refuse_impossible(settings: RunSettings, optimizer: OptimizerSettings) -> None:
    """Refuses, before any long work, what can be told without a model.

    Raises:
        ValueError: an engine that does not fit, a batch that is no multiple of the micro-batch, a schedule longer than
            the training, or somewhere to report to that is unknown or not installed.
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


def run(
    model: Any,
    rows: Dataset[Any],
    held_out: Dataset[Any] | None,
    optimizer_settings: OptimizerSettings,
    settings: RunSettings,
    out: Path,
    *,
    trainer_class: Callable[..., Any] | None = None,
    callbacks: Sequence[Any] = (),
    finish: Callable[[Any], Any] = lambda model: model,
    again: Callable[[], Any],
    arguments: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains `model` and saves it in `out`; continues from the last checkpoint there, if there is one.

    Writes `log.jsonl`: a line each `log_every` steps. Returns parameters, rows read, losses and seconds.

    Args:
        trainer_class: makes the Trainer; default transformers' own.
        callbacks: of the Trainer.
        finish: what makes of the trained model the one that is saved.
        again: makes the model that was to be trained, to put together one that is sharded.
        arguments: more of transformers' TrainingArguments.
        options: of the Trainer.

    Raises:
        ValueError: a longer training's checkpoints in `out`, or another engine in use than the one that was asked for.
    """
    from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

    class Log(TrainerCallback):
        """log.jsonl as it grows: also what a killed training has said so far. Each checkpoint has its loss there."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_log |= control.should_save

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                (out / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in state.log_history))

    class Engaged(TrainerCallback):
        """Checks the engine where it stands: when everything is prepared, and nothing is trained."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            engines.refuse_other(settings.engine, trainer)
            engines.refuse_muon(engines.in_use(trainer), optimizer_settings.name)
            if engines.in_use(trainer) == "deepspeed":
                engines.refuse_rounding(settings.bf16, settings.dtype)

    rows_at_once = settings.micro_batch * engines.num_processes()
    batch = settings.batch or rows_at_once
    chosen = TrainingArguments(
        output_dir=str(out / "checkpoints"),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.micro_batch,
        per_device_eval_batch_size=settings.micro_batch,
        gradient_accumulation_steps=batch // rows_at_once,
        max_grad_norm=optimizer_settings.clip,
        bf16=settings.bf16,
        seed=settings.seed,
        data_seed=settings.seed,
        logging_steps=settings.log_every,
        save_steps=settings.save_every,
        save_total_limit=1,
        report_to=list(settings.report_to),
        dataloader_num_workers=settings.workers,
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        **(engines.training_arguments(settings.engine, settings.bf16, engines.sharded(model)) | dict(arguments or {})),
    )
    trainer = (trainer_class or Trainer)(
        model=model,
        args=chosen,
        train_dataset=rows,
        eval_dataset=held_out,
        callbacks=[Engaged(), Log(), *callbacks],
        **options,
    )
    # made when the Trainer asks: optimizers that are handed over DeepSpeed replaces in silence, and FSDP refuses
    optimizer, rate = build(model, optimizer_settings, settings.steps)

    def create_optimizer(*args: Any, **options: Any) -> torch.optim.Optimizer:
        trainer.optimizer = optimizer
        return optimizer

    def create_scheduler(*args: Any, **options: Any) -> torch.optim.lr_scheduler.LRScheduler:
        trainer.lr_scheduler = rate
        return rate

    trainer.create_optimizer, trainer.create_scheduler = create_optimizer, create_scheduler
    started = time.perf_counter()
    checkpoint = _last_checkpoint(out / "checkpoints")
    try:
        before = TrainerState.load_from_json(str(checkpoint / "trainer_state.json")) if checkpoint else TrainerState()
    except ValueError as error:
        raise damaged(checkpoint, error) from error
    if before.global_step > settings.steps:
        raise ValueError(
            f"{checkpoint} is of a longer training than trainer.steps = {settings.steps}: choose another folder for out"
        )
    if checkpoint and before.global_step == settings.steps:
        # the Trainer would take one step more
        trainer._load_from_checkpoint(str(checkpoint))
        trainer.state = before
    else:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    state = engines.whole_state(model) if engines.sharded(model) else None
    history = trainer.state.log_history
    final = trainer.evaluate()["eval_loss"] if held_out is not None else None
    parameters = sum(p.numel() for p in model.parameters())
    if trainer.is_world_process_zero():
        if state is not None:
            model = again()
            assert state.keys() == dict(model.named_parameters()).keys(), "another model than was trained"
            model.load_state_dict(state, strict=False)  # buffers are as they were made
        finish(model).to(getattr(torch, settings.dtype)).save_pretrained(out)
    losses = [entry["loss"] for entry in history if "loss" in entry]
    num_rows = trainer.num_examples(trainer.get_train_dataloader())
    epochs, more = divmod(settings.steps, -(-num_rows // batch))  # an epoch's last step has what is left
    return {
        "parameters": parameters,
        "rows": epochs * num_rows + more * batch,  # read in all
        "loss": losses[-1],  # nats per token, mean since the line before, at most `log_every` steps
        "held_out_loss": final,  # nats per token
        "seconds": round(time.perf_counter() - started, 1),  # since the last start
    }


def write_up(out: Path, summary: Mapping[str, Any], tokenizer: Any) -> None:
    """Puts tokenizer and training.json beside a trained model."""
    tokenizer.save_pretrained(out)
    (out / "training.json").write_text(json.dumps(summary, indent=2) + "\n")


def read_log(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def damaged(checkpoint: str | Path | None, error: Exception) -> ValueError:
    """What to say of a checkpoint that cannot be read."""
    return ValueError(
        f"checkpoint {checkpoint} is damaged or half written ({error}): delete it, and the training goes on from the "
        "one before it, or begins anew"
    )


def _last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end; a kill can leave one without its last file."""
    whole = [file.parent for file in folder.glob("checkpoint-*/trainer_state.json") if file.stat().st_size]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
