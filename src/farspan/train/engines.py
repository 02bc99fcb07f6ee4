"""How a training is spread over processes, and whether it really is: one process, DDP, FSDP2, DeepSpeed ZeRO-2.

transformers and accelerate fall back in silence: asked for FSDP on CPUs, the Trainer is plain data parallelism. So the
engine in use is read off what was made, not off what was asked.
"""

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch

from farspan.corpus import optional_import

PATIENCE = timedelta(days=2)  # for the first process, which tokenises a text, or asks a teacher, while others wait


def processes() -> Any:
    """accelerate's PartialState."""
    return optional_import("accelerate", "train").PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)


def num_processes() -> int:
    """As the launcher (torchrun, accelerate launch) says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def refuse_unfit(engine: str, optimizer: str) -> None:
    """Raises ValueError for an engine for several processes where there is one, or the reverse, one that is not
    installed, or one that the optimizer does not fit."""
    refuse_muon(engine, optimizer)
    if engine == "deepspeed":
        optional_import("deepspeed", "deepspeed")
    processes = num_processes()
    if engine in ("ddp", "fsdp2", "deepspeed") and processes < 2:
        raise ValueError(
            f'trainer.engine = "{engine}" spreads a training over processes, and there is one: start it with '
            "`torchrun --nproc-per-node=N -m farspan train ...` or `accelerate launch`"
        )
    if engine == "single" and processes > 1:
        raise ValueError(f'trainer.engine = "single", and the launcher started {processes} processes: start one')


def shard(model: Any, parts: Iterable[Any], processes: Any, whole: set[Any] | None = None) -> None:
    """Spreads a model over the processes (FSDP2), on GPUs and on CPUs alike.

    Args:
        parts: modules that are gathered one by one, inner ones first; what is in none of them is with the model.
        processes: accelerate's PartialState.
        whole: parameters that every process keeps.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(processes.device.type, (processes.num_processes,))
    for parameter in whole or ():
        parameter.data = parameter.data.to(processes.device)
    for part in parts:
        fully_shard(part, mesh=mesh)
    # by default the outermost stays gathered after a forward, and an evaluation has no backward that would end it
    fully_shard(model, mesh=mesh, reshard_after_forward=True, ignored_params=whole)


def layers_of(model: Any) -> list[Any]:
    """The modules that transformers never spreads over devices, inner ones first: a model's layers.

    Raises:
        ValueError: the family does not name them.
    """
    kinds = set(model._no_split_modules or ())
    found = [module for module in model.modules() if type(module).__name__ in kinds]
    if not found:
        raise ValueError(f'trainer.engine = "fsdp2" does not know the layers of {type(model).__name__}: use "ddp"')
    return found[::-1]


def training_arguments(engine: str, bf16: bool, is_sharded: bool) -> dict[str, Any]:
    """What transformers' TrainingArguments need for the engine.

    accelerate shards models on accelerators alone, and is told nothing of one that is sharded already. Of DeepSpeed on
    CPUs it knows nothing: told of CPUs it leaves DeepSpeed out in silence, and not told of them it takes each process
    for the only one. So it is told the processes and the engine, as if both went together; without bf16.

    Raises:
        ValueError: DeepSpeed is asked for and not installed, or is to train in bf16 on CPUs.
    """
    on_cpu = not torch.cuda.is_available()
    if engine == "deepspeed":
        if bf16 and on_cpu:
            raise ValueError(
                'trainer.engine = "deepspeed" trains in bf16 on GPUs alone, as transformers starts it: on CPUs set '
                "trainer.bf16 = false"
            )
        arguments: dict[str, Any] = {"deepspeed": deepspeed_config(bf16), "use_cpu": False}
        if on_cpu:
            from accelerate import DistributedType, PartialState

            PartialState(cpu=True).distributed_type = DistributedType.DEEPSPEED
            arguments |= {"accelerator_config": {"use_configured_state": True}}
        return arguments
    if engine == "fsdp2" and not on_cpu and not is_sharded:
        return {"fsdp": True, "fsdp_config": {"version": 2}}
    return {"use_cpu": on_cpu}


def deepspeed_config(bf16: bool) -> dict[str, Any]:
    """ZeRO stage 2, as in Sparse Memory Training, table 8, with the optimizer of our own.

    Raises:
        ValueError: DeepSpeed is not installed.
    """
    optional_import("deepspeed", "deepspeed")
    return {
        "zero_optimization": {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 2e8},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }


def refuse_muon(engine: str, optimizer: str) -> None:
    if engine in ("fsdp2", "deepspeed") and optimizer == "muon":
        raise ValueError(
            f'optimizer.name = "muon" works on whole matrices, and {engine} has them in parts: use "adamw", or '
            'trainer.engine = "ddp"'
        )


def refuse_rounding(bf16: bool, dtype: torch.dtype) -> None:
    """Raises ValueError for a training under DeepSpeed whose result would pass for more exact than it is.

    Args:
        dtype: of the saved weights.
    """
    if bf16 and dtype is not torch.bfloat16:
        raise ValueError(
            f"the dtype of the saved weights is {str(dtype).removeprefix('torch.')}, and DeepSpeed has rounded them to "
            'bf16, those too that are not trained: use trainer.dtype = "bfloat16" or trainer.bf16 = false'
        )


def in_use(trainer: Any) -> str:
    """The engine of a Trainer that has begun to train."""
    if hasattr(trainer.model_wrapped, "zero_optimization_stage"):
        stage = trainer.model_wrapped.zero_optimization_stage()
        return "deepspeed" if stage == 2 else f"DeepSpeed ZeRO-{stage}"
    if sharded(trainer.model_wrapped):
        return "fsdp2"
    if isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel):
        return "ddp"
    return "single" if trainer.accelerator.num_processes == 1 else str(trainer.accelerator.distributed_type.value)


def refuse_other(engine: str, trainer: Any) -> None:
    """Raises ValueError where another engine is in use than `engine`, or processes work beside each other in none."""
    used = in_use(trainer)
    if engine != used and not (engine == "auto" and used in ("single", "ddp", "fsdp2", "deepspeed")):
        raise ValueError(
            f'trainer.engine = "{engine}" was asked for, and {used} is in use: check the launcher and its config '
            "(accelerate's own settings come first)"
        )


def sharded(model: Any) -> bool:
    """Whether the parameters are in parts on several processes."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole_state(model: Any, *, trained: bool = False) -> dict[str, torch.Tensor]:
    """The parameters, or only those that are trained, on the CPU: whole in the first process, where all ask for them,
    and none in the others."""
    first, state = os.environ.get("RANK", "0") == "0", {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not trained:
            value = parameter.detach()
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            if first:
                state[name] = value.cpu()
    return state
