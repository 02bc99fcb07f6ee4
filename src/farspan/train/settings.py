"""The tables that the configs of all trainings have in common."""

from typing import Literal

import torch
from pydantic import Field

from farspan import hf
from farspan.train import engines
from farspan.train.config import Out, Settings
from farspan.train.optimizer import OptimizerSettings

Engine = Literal["auto", "single", "ddp", "fsdp2", "deepspeed"]


class RunSettings(Settings):
    """[trainer]: steps, batches, engine and precision, and how often the training logs and saves."""

    steps: int = Field(gt=0)
    batch: int | None = Field(None, gt=0)  # rows of one step, over all processes; default one micro-batch of each
    micro_batch: int = Field(1, gt=0)  # rows of one forward pass in one process
    seed: int = Field(0, ge=0)  # random seed
    engine: Engine = "auto"  # auto: one process, or that of the launcher, such as DDP under torchrun
    # whether activations are bf16; weights and their updates stay fp32; auto: if the device has instructions for it
    bf16: bool | Literal["auto"] = "auto"
    activation_checkpointing: bool = False  # compute activations of a layer again in the backward pass: less memory
    attention: Literal["sdpa", "eager", "flash_attention_2"] | None = None  # default sdpa if the model supports it
    # of the saved weights; auto: that of the model before the training, so that untrained weights do not change
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    workers: int = Field(0, ge=0)  # processes that prepare batches
    report_to: tuple[str, ...] = ()  # trackers, such as tensorboard, wandb
    log_every: int = Field(50, gt=0)  # steps
    save_every: int = Field(500, gt=0)  # steps; a kill loses at most this number, Ctrl-C none

    @property
    def uses_bf16(self) -> bool:
        """Whether activations are bf16."""
        if self.bf16 != "auto":
            return self.bf16
        if torch.cuda.is_available():
            return torch.cuda.is_bf16_supported(including_emulation=False)
        # DeepSpeed trains in bf16 only on GPUs
        return self.engine != "deepspeed" and hf.has_instructions(torch.device("cpu"), torch.bfloat16)

    @property
    def rows_per_step(self) -> int:
        """Rows of one step, over all processes."""
        return self.batch or self.micro_batch * engines.num_processes()


class PretrainingSettings(RunSettings):
    """[trainer] of a pre-training."""

    window: int = Field(1024, gt=1)  # tokens of a row
    batch: int | None = Field(256, gt=0)
    micro_batch: int = Field(8, gt=0)
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of the saved weights
    compile: bool = False  # compile the model with torch.compile
    evaluate_every: int = Field(500, gt=0)  # steps from one evaluation of the held-out text to the next


class TrainingSettings(Settings):
    """The part that the configs of all trainings have in common."""

    out: Out
    optimizer: OptimizerSettings
    trainer: RunSettings
