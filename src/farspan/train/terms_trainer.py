"""The Hugging Face Trainer for objectives that are weighted sums of means, also of models that are partly frozen."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict as parts
from torch.distributed.checkpoint.stateful import Stateful
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.utils import SAFE_WEIGHTS_NAME

from farspan.train.blocks import NOT_A_TARGET
from farspan.train.checkpoint import reading
from farspan.train.checkpoint_trainer import CheckpointTrainer
from farspan.train.engines import sharded, whole_state

Terms = Callable[[Any, Any, Any], dict[str, Tensor]]
CARRIED = "carried.pt"  # the file of a checkpoint with the state of the terms
SHARE = "share_of_the_step"  # key in a batch: by term, its labels, relative to their mean number in the step's batches
WHOLE = parts.StateDictOptions(full_state_dict=True, cpu_offload=True, strict=False)


def _mean_over_labels(judged: Any) -> dict[str, float]:
    """Return the held-out loss; the Trainer's own is a mean over rows, whatever their number of labels."""
    return {"loss": float((judged.predictions * judged.label_ids).sum() / max(1, judged.label_ids.sum()))}


class TermsTrainer(CheckpointTrainer):
    """Train on samples in their order, log each term of the loss, and keep only trained weights in checkpoints.

    The batches of one step are contiguous samples, on any number of processes. A model that is sharded already (FSDP2)
    is trained as it is. Its checkpoints are unsharded, so that any number of processes can continue from them.

    Args:
        terms: returns the terms of the loss by name, each a mean, for the model to call, the transformers model (they
            differ under data parallelism) and a batch.
        weights: the weight of each term in the loss.
        core: the transformers model if a wrapper of it is trained (LoRA); default the trained model.
        predicted: returns the labels of a batch over which each term is a mean, by term; give it if batches differ in
            their number of labels. Each batch then counts in proportion to it, so that each term of a step's loss is
            one mean over all labels, on any number of processes.
        notes: returns more values to log, given the number of steps done.
        state: state that the terms keep from step to step, as dicts and lists of tensors, saved in checkpoints; for one
            process only.
    """

    loss_is_scaled_for_ga = False  # each loss is a mean; the Trainer divides it by the number of micro-batches

    def __init__(
        self,
        *args: Any,
        terms: Terms,
        weights: Mapping[str, float],
        core: Any = None,
        predicted: Callable[[Any], Mapping[str, Tensor]] | None = None,
        notes: Callable[[int], Mapping[str, float]] = lambda step: {},
        state: Stateful | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.model_accepts_loss_kwargs = False
        self.args.train_sampling_strategy = "sequential"
        self.terms, self.weights, self.predicted, self.notes = terms, weights, predicted, notes
        self.compute_metrics = None if predicted is None else _mean_over_labels
        self.carried = state
        self.trained = self.model
        self.core = self.model if core is None else core
        self._seen: dict[str, list[Tensor]] = {}  # since the last log
        if sharded(self.model):
            # transformers shards a model only while it loads it, and then cannot resume its training
            if not hasattr(self, "is_distributed_loading_by_transformers"):
                raise ValueError('trainer.engine = "fsdp2" needs a newer transformers: update it, or use "ddp"')
            self.is_distributed_loading_by_transformers = True  # else accelerate would put DDP around it

    def _defer_fsdp_gradient_reduction(self) -> AbstractContextManager[None]:
        # private, as there is no argument for it; the Trainer's version reads a sharding config that was never set
        return nullcontext()

    def get_batch_samples(self, *args: Any, **options: Any) -> tuple[list[Any], Any]:
        batches, num_items = super().get_batch_samples(*args, **options)
        if self.predicted is not None and batches:
            labels = [self.predicted(batch) for batch in batches]
            numbers = [torch.stack([(some != NOT_A_TARGET).sum() for some in one.values()]) for one in labels]
            counts = torch.stack(numbers).to(self.args.device, torch.float32)  # [batches, terms]
            mean = self.accelerator.gather(counts).mean(0)
            shares = counts / torch.where(mean > 0, mean, 1)
            batches = [
                dict(batch) | {SHARE: dict(zip(one, share, strict=True))}
                for batch, one, share in zip(batches, labels, shares, strict=True)
            ]
        return batches, num_items

    def compute_loss(
        self, model: Any, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        inputs = dict(inputs)
        shares = inputs.pop(SHARE, {})
        found = {name: shares.get(name, 1.0) * value for name, value in self.terms(model, self.core, inputs).items()}
        if model.training:
            for name, value in found.items():
                self._seen.setdefault(name, []).append(value.detach())
        return torch.stack([self.weights[name] * value for name, value in found.items()]).sum()

    def prediction_step(self, model: Any, inputs: Mapping[str, Any], *args: Any, **options: Any) -> tuple[Any, ...]:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs).detach()
        if self.predicted is None:
            return loss, None, None
        (labels,) = self.predicted(inputs).values()  # the recipes with a held-out text have one term
        return None, loss.repeat(len(labels)), (labels != NOT_A_TARGET).sum(-1)  # see `_mean_over_labels`

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # transformers' estimate assumes one model, one length, and no nested batches

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            for name in sorted(self._seen):
                mean = self.accelerator.gather(torch.stack(self._seen[name]).mean()[None]).mean()
                logs[f"loss_{name}"] = round(float(mean), 4)
            self._seen.clear()
            logs |= self.notes(self.state.global_step)
        super().log(logs, start_time)

    # checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.is_fsdp_enabled:  # saved by accelerate, in another layout
            return super().save_model(output_dir, _internal_call)
        state = whole_state(self.trained, trained=True)
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            kept = {name: state[name].contiguous() for name in self._trained_names()}
            save_file(kept, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
            if self.carried is not None:
                torch.save(self.carried.state_dict(), folder / CARRIED)
        return None

    # private, as transformers has no public methods for loading weights, or for saving or loading an optimizer

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.is_fsdp_enabled:  # saved by accelerate, in another layout
            return super()._load_from_checkpoint(resume_from_checkpoint, model)
        file = Path(resume_from_checkpoint) / SAFE_WEIGHTS_NAME
        with reading(file):
            state: dict[str, Any] = dict(load_file(file))
            if wrong := sorted(self._trained_names() ^ set(state)):
                raise ValueError(f"it is of another training: {wrong[0]} and {len(wrong) - 1} other weights differ")
            parts.set_model_state_dict(self.trained, state, options=WHOLE)
        if self.carried is not None:
            with reading(file := Path(resume_from_checkpoint) / CARRIED):
                self.carried.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        return None

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.is_fsdp_enabled or not sharded(self.trained):
            return super()._save_optimizer_and_scheduler(output_dir)
        state = parts.get_optimizer_state_dict(self.trained, self.optimizer.optimizer, options=WHOLE)
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)
        return None

    def load_optimizer(self, checkpoint: str) -> None:
        if not sharded(self.trained):
            return super().load_optimizer(checkpoint)
        state = torch.load(Path(checkpoint) / OPTIMIZER_NAME, map_location="cpu", weights_only=True)
        parts.set_optimizer_state_dict(self.trained, self.optimizer.optimizer, state, options=WHOLE)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))
        return None

    def _trained_names(self) -> set[str]:
        return {name for name, parameter in self.trained.named_parameters() if parameter.requires_grad}
