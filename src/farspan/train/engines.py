"""Engines that run a training in one or several processes, and their checks: single, DDP, FSDP2, DeepSpeed ZeRO-2.

transformers and accelerate can silently use another engine: with FSDP on CPUs, the Trainer uses plain data parallelism.
So the engine in use is read from the objects that were created, not from the settings.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch

from farspan.extras import optional_import
from farspan.hf.products import by_onednn

PATIENCE = timedelta(days=2)  # processes wait while the first one tokenises a text or runs a teacher


def processes() -> Any:
    """Return accelerate's PartialState. The first call connects the processes."""
    return optional_import("accelerate", "train").PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)


def is_first_process() -> bool:
    """Return whether this process writes files and prints lines: rank 0 of the launcher's processes."""
    return os.environ.get("RANK", "0") == "0"


def num_processes() -> int:
    """Return the number of processes that the launcher (torchrun, accelerate launch) started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def in_any_process(flag: bool) -> bool:
    """Return, in all processes of a training, whether a flag is set in one of them."""
    if num_processes() == 1:
        return flag
    from accelerate.utils import gather

    return bool(gather(torch.tensor([flag], device=processes().device)).any())


def refuse_unfit(engine: str, optimizer: str) -> None:
    """Raise ValueError for an engine for several processes in a single process, `single` in several, Muon under an
    engine that splits matrices, or an engine that is not installed."""
    refuse_muon(engine, optimizer)
    if engine == "deepspeed":
        optional_import("deepspeed", "deepspeed")
    processes = num_processes()
    if engine in ("ddp", "fsdp2", "deepspeed") and processes < 2:
        raise ValueError(
            f'trainer.engine = "{engine}" distributes a training over processes, but there is only one: start it with '
            "`torchrun --nproc-per-node=N -m farspan train ...` or `accelerate launch`"
        )
    if engine == "single" and processes > 1:
        raise ValueError(f'trainer.engine = "single", and the launcher started {processes} processes: start one')


def shard(model: Any, parts: Iterable[Any], whole: set[Any] | None = None) -> None:
    """Shard a model over the processes (FSDP2), on GPUs and on CPUs alike.

    Args:
        parts: modules whose parameters are gathered together, inner modules first. Parameters outside of them are
            gathered with the model.
        whole: parameters that are not sharded: every process keeps them.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    state = processes()
    mesh = init_device_mesh(state.device.type, (state.num_processes,))
    for parameter in whole or ():
        parameter.data = parameter.data.to(state.device)
    for part in parts:
        fully_shard(part, mesh=mesh)
    # by default the outermost module stays gathered until the backward pass, which an evaluation does not have
    fully_shard(model, mesh=mesh, reshard_after_forward=True, ignored_params=whole)


def layers_of(model: Any) -> list[Any]:
    """Return a model's layers, inner modules first: those that transformers never splits between devices.

    Raises:
        ValueError: the model's family does not name such modules.
    """
    kinds = set(model._no_split_modules or ())
    found = [module for module in model.modules() if type(module).__name__ in kinds]
    if not found:
        raise ValueError(f'trainer.engine = "fsdp2" cannot find the layers of {type(model).__name__}: use "ddp"')
    return found[::-1]


def training_arguments(engine: str, bf16: bool, is_sharded: bool) -> dict[str, Any]:
    """Return the arguments of transformers' TrainingArguments for the engine.

    accelerate shards models on accelerators only.

    Args:
        bf16: whether activations are bf16.
        is_sharded: the model is sharded already (`shard`), and needs no argument.

    Raises:
        ValueError: DeepSpeed is to train in bf16 on CPUs.
    """
    on_cpu = not torch.cuda.is_available()
    if engine == "deepspeed":
        if bf16 and on_cpu:
            raise ValueError(
                'trainer.engine = "deepspeed" trains in bf16 only on GPUs, as transformers starts it: on CPUs set '
                "trainer.bf16 = false"
            )
        config = {  # ZeRO stage 2, as in Sparse Memory Training, table 8, with our own optimizer
            "zero_optimization": {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 2e8},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": bf16},
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        }
        arguments: dict[str, Any] = {"deepspeed": config, "use_cpu": False}
        if on_cpu:
            from accelerate import DistributedType, PartialState

            # accelerate has no argument for DeepSpeed on CPUs: with cpu=True it silently leaves DeepSpeed out, with
            # cpu=False each process takes itself for the only one. TrainingArguments accepts a PartialState that exists
            # already (`use_configured_state`), and only the attribute of that one sets the engine.
            PartialState(cpu=True).distributed_type = DistributedType.DEEPSPEED
            arguments |= {"accelerator_config": {"use_configured_state": True}}
        return arguments
    if engine == "fsdp2" and not on_cpu and not is_sharded:
        return {"fsdp": True, "fsdp_config": {"version": 2}}
    return {"use_cpu": on_cpu}


def use_one_gpu(arguments: Any, notice: Callable[[str], None]) -> None:
    """Let a single process train on one GPU, with a notice that it does; `arguments` are those of a Trainer.

    Without a launcher transformers uses all GPUs (DataParallel), each with a batch of its own: a step would train
    several times `trainer.batch` rows.
    """
    if (gpus := arguments.n_gpu) > 1:
        notice(
            f"one process trains on one of the {gpus} GPUs: to train on all of them, start it with "
            f"`torchrun --nproc-per-node={gpus} -m farspan train ...`"
        )
        arguments._n_gpu = 1  # transformers has no argument for it


def refuse_muon(engine: str, optimizer: str) -> None:
    """Raise ValueError if the optimizer is Muon and the engine splits matrices."""
    if engine in ("fsdp2", "deepspeed") and optimizer == "muon":
        raise ValueError(
            f'optimizer.name = "muon" needs whole matrices, and {engine} splits them: use "adamw", or '
            'trainer.engine = "ddp"'
        )


def refuse_rounding(bf16: bool, dtype: torch.dtype) -> None:
    """Raise ValueError if a training under DeepSpeed would save weights, which it rounds to bf16, in a wider dtype.

    Args:
        bf16: whether DeepSpeed holds the model in bf16.
        dtype: of the saved weights.
    """
    if bf16 and dtype is not torch.bfloat16:
        raise ValueError(
            f"the dtype of the saved weights is {str(dtype).removeprefix('torch.')}, but DeepSpeed rounds all weights "
            'to bf16, untrained ones too: use trainer.dtype = "bfloat16" or trainer.bf16 = false'
        )


def products(args: Any) -> AbstractContextManager[None]:
    """Compute matrix products as `by_onednn`, except in a training under torch.compile: compiled code reads the setting
    that `by_onednn` changes, and can fail with it."""
    return nullcontext() if args.torch_compile else by_onednn(args.device)


def in_use(trainer: Any) -> str:
    """Return the name of the engine that a Trainer uses, once it has prepared its model."""
    if hasattr(trainer.model_wrapped, "zero_optimization_stage"):
        stage = trainer.model_wrapped.zero_optimization_stage()
        return "deepspeed" if stage == 2 else f"DeepSpeed ZeRO-{stage}"
    if sharded(trainer.model_wrapped):
        return "fsdp2"
    if isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel):
        return "ddp"
    if isinstance(trainer.model_wrapped, torch.nn.DataParallel):
        return "DataParallel"
    return "single" if trainer.accelerator.num_processes == 1 else str(trainer.accelerator.distributed_type.value)


def refuse_other(engine: str, trainer: Any) -> None:
    """Raise ValueError if another engine is in use than `engine`, or, under "auto", one that farspan does not know."""
    used = in_use(trainer)
    if engine != used and not (engine == "auto" and used in ("single", "ddp", "fsdp2", "deepspeed")):
        raise ValueError(
            f'trainer.engine = "{engine}" was requested, but {used} is in use: check the launcher and its config '
            "(accelerate's own settings come first)"
        )


def sharded(model: Any) -> bool:
    """Return whether the parameters are sharded over processes."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole_state(model: Any, *, trained: bool = False) -> dict[str, torch.Tensor]:
    """Return the parameters by name, or only the trained ones, unsharded and on the CPU. Only the first process gets
    them, the others an empty dict; all processes must call this."""
    state = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not trained:
            value = parameter.detach()
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            if is_first_process():
                state[name] = value.cpu()
    return state
