"""The Hugging Face Trainer for objectives that are weighted sums of means, on what little of a model is trained."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import Trainer
from transformers.utils import SAFE_WEIGHTS_NAME

Terms = Callable[[Any, Any, Mapping[str, Tensor]], dict[str, Tensor]]


class TermsTrainer(Trainer):
    """Trains on samples in their order, logs each term of the loss, and keeps only what is trained in checkpoints.

    The batches of one step are contiguous samples, on any number of processes.

    Args:
        terms: from what is to be called, the model itself (they differ under data parallelism) and a batch, the means.
        weights: of the terms in the loss.
    """

    loss_is_scaled_for_ga = False  # each loss is a mean; the Trainer divides it by the number of micro-batches

    def __init__(self, *args: Any, terms: Terms, weights: Mapping[str, float], **options: Any) -> None:
        super().__init__(*args, **options)
        self.model_accepts_loss_kwargs = False
        self.terms, self.weights, self.core = terms, weights, self.model
        self._seen: dict[str, list[Tensor]] = {}  # since the last log

    def _get_train_sampler(self, *args: Any, **options: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        found = self.terms(model, self.core, inputs)
        if model.training:
            for name, value in found.items():
                self._seen.setdefault(name, []).append(value.detach())
        return torch.stack([self.weights[name] * value for name, value in found.items()]).sum()

    def prediction_step(self, model: Any, inputs: dict[str, Tensor], *args: Any, **options: Any) -> tuple[Any, ...]:
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # transformers' estimate knows one model and one length

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and len(self._seen) > 1:
            for name in sorted(self._seen):
                mean = self.accelerator.gather(torch.stack(self._seen[name]).mean()[None]).mean()
                logs[f"loss_{name}"] = round(float(mean), 4)
        if "loss" in logs:
            self._seen.clear()
        super().log(logs, start_time)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        state = state_dict or self.core.state_dict()
        trained = {name for name, parameter in self.core.named_parameters() if parameter.requires_grad}
        kept = {name: value.detach().contiguous() for name, value in state.items() if name in trained}
        save_file(kept, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        try:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        except SafetensorError as error:
            raise ValueError(
                f"checkpoint {resume_from_checkpoint} is damaged or half written ({error}): delete it, and the "
                "training goes on from the one before it, or begins anew"
            ) from error

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        trained = {name for name, parameter in self.core.named_parameters() if parameter.requires_grad}
        wrong = sorted(trained & set(load_result.missing_keys)) + sorted(load_result.unexpected_keys)
        if wrong:
            raise ValueError(f"the checkpoint is of another training: {wrong[0]} and {len(wrong) - 1} more differ")
