"""The Hugging Face Trainer with the objective of Sparse Memory Training."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import Trainer

from farspan.train.objective import Rows, terms
from farspan.train.schedule import Schedule


class SparseTrainer(Trainer):
    """Trains on samples in their order, with a mean for each kind of row, and logs these means and the length.

    The batches of one step are contiguous samples, on any number of processes.
    """

    loss_is_scaled_for_ga = False  # each loss is a mean; the Trainer divides it by the number of micro-batches

    def __init__(self, *args: Any, core: Any, beta: float, schedule: Schedule, **options: Any) -> None:
        super().__init__(*args, **options)
        self.model_accepts_loss_kwargs = False
        self.core, self.beta, self.schedule = core, beta, schedule
        self._terms: dict[str, list[Tensor]] = {}  # since the last log

    def _get_train_sampler(self, *args: Any, **options: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)

    def compute_loss(
        self, model: Any, inputs: dict[str, Rows], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        found = terms(model, self.core, inputs)
        for name, value in found.items():
            self._terms.setdefault(name, []).append(value.detach())
        weights = {"sparse": 1.0, "window": self.beta}
        return torch.stack([weights[name] * value for name, value in found.items()]).sum()

    def floating_point_ops(self, inputs: dict[str, Rows]) -> int:
        return 0  # transformers' estimate knows no nested batches

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            for name in sorted(self._terms):
                mean = self.accelerator.gather(torch.stack(self._terms[name]).mean()[None]).mean()
                logs[f"loss_{name}"] = round(float(mean), 4)
            self._terms.clear()
            logs["length"] = self.schedule.at(self.state.global_step - 1)
        super().log(logs, start_time)
