"""The glue every training shares around the Hugging Face Trainer: batches, schedule, checkpoints, a log."""

import json
import time
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset

from farspan.train.config import Settings
from farspan.train.optimizer import OptimizerSettings, build


class TrainerSettings(Settings):
    """[trainer]: how long, how large, how often."""

    steps: int = Field(gt=0)
    window: int = Field(1024, gt=1)  # tokens of a row
    batch: int = Field(256, gt=0)  # rows of one step, over all processes
    micro_batch: int = Field(8, gt=0)  # rows of one forward in one process
    seed: int = 0
    bf16: bool = True  # activations; the weights and their updates stay fp32
    compile: bool = False
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of the saved weights
    log_every: int = Field(50, gt=0)  # steps
    save_every: int = Field(500, gt=0)  # steps; what a kill loses at most
    evaluate_every: int = Field(500, gt=0)  # steps


def run(
    model: Any,
    rows: Dataset[dict[str, Tensor]],
    held_out: Dataset[dict[str, Tensor]] | None,
    optimizer_settings: OptimizerSettings,
    settings: TrainerSettings,
    out: Path,
) -> dict[str, Any]:
    """Trains `model` and saves it in `out`; continues from the last checkpoint there, if there is one.

    Writes `log.jsonl`: a line each `log_every` steps. Returns parameters, tokens, losses and seconds.

    Raises:
        ValueError: a batch that is no multiple of the micro-batch, or a longer training's checkpoints in `out`.
    """
    from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

    class Log(TrainerCallback):
        """log.jsonl as it grows: also what a killed training has said so far."""

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                (out / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in state.log_history))

    use_cpu = not torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=str(out / "checkpoints"),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.micro_batch,
        per_device_eval_batch_size=settings.micro_batch,
        max_grad_norm=optimizer_settings.clip,
        bf16=settings.bf16,
        use_cpu=use_cpu,
        torch_compile=settings.compile,
        seed=settings.seed,
        data_seed=settings.seed,
        logging_steps=settings.log_every,
        save_steps=settings.save_every,
        save_total_limit=1,
        eval_strategy="no" if held_out is None else "steps",
        eval_steps=settings.evaluate_every,
        report_to=[],
        dataloader_pin_memory=not use_cpu,
    )
    rows_at_once = settings.micro_batch * arguments.world_size
    if settings.batch % rows_at_once:
        raise ValueError(
            f"trainer.batch = {settings.batch} is not a multiple of trainer.micro_batch x processes = {rows_at_once}"
        )
    arguments.gradient_accumulation_steps = settings.batch // rows_at_once

    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        eval_dataset=held_out,
        optimizers=build(model, optimizer_settings, settings.steps),
        callbacks=[Log()],
    )
    started = time.perf_counter()
    checkpoint = _last_checkpoint(out / "checkpoints")
    before = TrainerState.load_from_json(str(checkpoint / "trainer_state.json")) if checkpoint else TrainerState()
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
    history = trainer.state.log_history
    final = trainer.evaluate()["eval_loss"] if held_out is not None else None
    if trainer.is_world_process_zero():
        model.to(getattr(torch, settings.dtype)).save_pretrained(out)
    losses = [entry["loss"] for entry in history if "loss" in entry]
    num_rows = trainer.num_examples(trainer.get_train_dataloader())
    epochs, more = divmod(settings.steps, -(-num_rows // settings.batch))  # an epoch's last step has what is left
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": (epochs * num_rows + more * settings.batch) * settings.window,
        "loss": losses[-1] if losses else None,  # nats per token, mean over the last `log_every` steps
        "held_out_loss": final,  # nats per token
        "seconds": round(time.perf_counter() - started, 1),  # since the last start
    }


def _last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end; a kill can leave one without its last file."""
    whole = [file.parent for file in folder.glob("checkpoint-*/trainer_state.json") if file.stat().st_size]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
