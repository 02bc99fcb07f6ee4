"""The glue every training shares around the Hugging Face Trainer: engine, batches, schedule, checkpoints, a log."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch.utils.data import Dataset

from farspan import files
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
    save_every: int = Field(500, gt=0)  # steps; what a kill loses at most


class TrainerSettings(RunSettings):
    """[trainer] of a pre-training."""

    window: int = Field(1024, gt=1)  # tokens of a row
    batch: int | None = Field(256, gt=0)
    micro_batch: int = Field(8, gt=0)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of the saved weights
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
    base_dtype: torch.dtype = torch.float32,
    arguments: Mapping[str, Any] | None = None,
    notice: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> dict[str, Any]:
    """Train `model` and save it in `out`; continue from the last checkpoint there, if there is one.

    Writes `log.jsonl`: a line each `log_every` steps. Returns parameters, rows read, losses and seconds.

    Losses and the gradient's norm are checked whenever they are logged, trained weights before each checkpoint, whose
    step is always logged first. A loss that is logged is the mean of all steps since the line before, over all
    processes, so that no step is passed over; and it is on the CPU then in any case, so that the check costs no wait
    for the device.

    Args:
        trainer_class: makes the Trainer; default `farspan.train.checkpoint.CheckpointTrainer`.
        callbacks: of the Trainer.
        finish: what makes of the trained model the one that is saved.
        base_dtype: of the saved weights where `trainer.dtype` is "auto".
        notice: called with each line that a user should read.
        again: makes the model that was to be trained, to put together one that is sharded.
        arguments: more of transformers' TrainingArguments.
        options: of the Trainer.

    Raises:
        ValueError: a longer training's checkpoints in `out`, a damaged one, another engine in use than the one that was
            asked for, a training that diverges, or a disk that is full.
    """
    from transformers import TrainerCallback, TrainerState, TrainingArguments

    from farspan.train import checkpoint as checkpoints

    class Log(TrainerCallback):
        """log.jsonl as it grows: also what a killed training has said so far. Each checkpoint has its loss there."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_log |= control.should_save

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                files.write(out / "log.jsonl", "".join(json.dumps(entry) + "\n" for entry in state.log_history))

    class Finite(TrainerCallback):
        """Stops a training that diverges, before anything of it is written."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            refuse_weights()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            rate = optimizer_settings.lr
            checkpoints.refuse_not_finite_values(logs, state, rate, out)
            if "loss" in logs and control.should_save and (name := weight_not_finite()):
                what = f"weight {name} holds NaN or infinity after step {state.global_step:,}"
                raise checkpoints.diverged(what, rate, out)

    def refuse_weights() -> None:
        if (name := weight_not_finite()) and checkpoint is not None:
            raise checkpoints.damaged(checkpoint / "model.safetensors", f"weight {name} holds NaN or infinity")
        if name:
            checkpoints.refuse_not_finite(model, "the model")

    def weight_not_finite() -> str | None:
        """The name of a trained weight that is not finite; the same answer, None or not, in all processes."""
        found = checkpoints.not_finite((n, p) for n, p in model.named_parameters() if p.requires_grad)
        flag = torch.tensor([found is not None], device=trainer.args.device)
        return (found or "of another process") if bool(trainer.accelerator.gather(flag).any()) else None

    class Engaged(TrainerCallback):
        """Checks the engine where it stands: when everything is prepared, and nothing is trained."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            engines.refuse_other(settings.engine, trainer)
            engines.refuse_muon(engines.in_use(trainer), optimizer_settings.name)
            if engines.in_use(trainer) == "deepspeed":
                engines.refuse_rounding(settings.bf16, dtype)

    rows_at_once = settings.micro_batch * engines.num_processes()
    batch = settings.batch or rows_at_once
    dtype = base_dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
    chosen = TrainingArguments(
        output_dir=str(out / CHECKPOINTS),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.micro_batch,
        per_device_eval_batch_size=settings.micro_batch,
        gradient_accumulation_steps=batch // rows_at_once,
        max_grad_norm=optimizer_settings.clip,
        bf16=settings.bf16,
        seed=settings.seed,
        data_seed=settings.seed,
        logging_steps=settings.log_every,
        logging_nan_inf_filter=False,  # it would count a loss of NaN as the mean of the others
        save_steps=settings.save_every,
        report_to=list(settings.report_to),
        dataloader_num_workers=settings.workers,
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
        **(engines.training_arguments(settings.engine, settings.bf16, engines.sharded(model)) | dict(arguments or {})),
    )
    trainer = (trainer_class or checkpoints.CheckpointTrainer)(
        model=model,
        args=chosen,
        train_dataset=rows,
        eval_dataset=held_out,
        callbacks=[Engaged(), Finite(), Log(), *callbacks],
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
    first_save = min(settings.save_every, settings.steps)
    checkpoint = checkpoints.last(out / CHECKPOINTS, first_save, notice if trainer.is_world_process_zero() else _silent)
    before = checkpoints.state_of(checkpoint) if checkpoint else TrainerState()
    if before.global_step > settings.steps:
        raise ValueError(
            f"{checkpoint} is of a longer training than trainer.steps = {settings.steps}: choose another folder for out"
        )
    if checkpoint and before.global_step == settings.steps:
        # the Trainer would take one step more
        trainer._load_from_checkpoint(str(checkpoint))
        trainer.state = before
        refuse_weights()
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
        with checkpoints.writing(out), files.added(out, last="config.json") as new:
            finish(model).to(dtype).save_pretrained(new)
    logged = [entry for entry in history if "loss" in entry]
    num_rows = trainer.num_examples(trainer.get_train_dataloader())
    epochs, more = divmod(settings.steps, -(-num_rows // batch))  # an epoch's last step has what is left
    return {
        "parameters": parameters,
        "rows": epochs * num_rows + more * batch,  # read in all
        "loss": logged[-1]["loss"],  # nats per token, mean since the line before, at most `log_every` steps
        # its parts, where there are several, such as those of the sparse rows and of the ordinary window
        "losses": {name.removeprefix("loss_"): value for name, value in logged[-1].items() if name.startswith("loss_")},
        "held_out_loss": final,  # nats per token
        "seconds": round(time.perf_counter() - started, 1),  # since the last start
    }


def write_up(out: Path, summary: Mapping[str, Any], tokenizer: Any) -> None:
    """Put tokenizer and training.json beside a trained model.

    Raises:
        ValueError: the disk is full.
    """
    from farspan.train.checkpoint import writing

    with writing(out):
        with files.added(out, last="tokenizer.json") as new:
            tokenizer.save_pretrained(new)
        files.write(out / "training.json", json.dumps(summary, indent=2) + "\n")


def write_card(out: Path, card: str, draw: Callable[[], Any]) -> None:
    """Put the model card and the picture of its losses, which `draw` makes, beside a trained model.

    Raises:
        ValueError: the disk is full.
    """
    from farspan.train.checkpoint import writing

    with writing(out):
        draw()
        files.write(out / "README.md", card)


def read_log(out: Path) -> list[dict[str, Any]]:
    file = out / "log.jsonl"
    return [
        files.parse_json(line, f"{file}, line {number}") for number, line in enumerate(file.read_text().splitlines(), 1)
    ]


def _silent(text: str) -> None:
    pass
