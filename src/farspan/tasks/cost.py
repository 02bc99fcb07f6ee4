"""The cost of reading and answering: time to the first token, tokens per second, and memory by purpose.

    prefill    tokens read / seconds until the first new token
    decode     further new tokens / their seconds
    memory     above the model, at the peak of both: the memory kept for the context; the rest is activations

Rows are read one at a time, on random tokens: the cost of a token does not depend on its id. The beginning of each row
is read before it without being measured, and every timing waits for the device. Yen et al. 2024 (CEPE), arXiv
2402.16617, section 3 and table 1, report throughput and memory beside perplexity in the same way; their baselines were
run without a common setting.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from farspan.hf.device import peak_above, wait
from farspan.lengths import doubled_lengths
from farspan.lm import LM
from farspan.reader import NotFiniteError, Reader
from farspan.specs import limited
from farspan.tasks.base import Bound, Example, Quality, Result, Task, Work

WARM_UP = 64  # tokens


@dataclass(frozen=True)
class Cost(Task):
    """Seconds and bytes of reading a context and of generating after it."""

    new_tokens: int = limited(32, 2)  # generated after the context

    name: ClassVar[str] = "cost"
    reads_text: ClassVar[bool] = False
    quality: ClassVar[Quality] = Quality("prefill_seconds", "seconds to the first token", higher_is_better=False)

    def lengths(self, trained: Sequence[int]) -> tuple[int, ...]:
        """Return a quarter of the smallest trained length, but at least 256, and its doublings to twice the largest."""
        return doubled_lengths(max(256, min(trained) // 4), trained)

    def check(self, lengths: Sequence[int]) -> None:
        if lengths[0] < 2:
            raise ValueError(
                f"cost: length {lengths[0]} has no token to read before the last one: give 2 tokens or more"
            )

    def on(self, lm: LM, text: str) -> "BoundCost":
        """Bind the task; it reads no text.

        Raises:
            ValueError: the model is served.
        """
        if lm.own_reader() is not None:
            raise ValueError(
                f"cost: {lm.name} is read by its server, whose seconds and memory cannot be measured from here: leave "
                "it out. The rows of other tasks count its requests and tokens"
            )
        return BoundCost(**vars(self))


@dataclass(frozen=True)
class BoundCost(Cost, Bound[np.ndarray]):
    """Seconds and bytes by the length of the context."""

    task: ClassVar[str] = "cost"
    reads_together: ClassVar[bool] = False
    version: ClassVar[int] = 1

    @property
    def settings(self) -> dict[str, Any]:
        return {"new_tokens": self.new_tokens}

    def batch(self, longest: int) -> int:
        return 1

    def examples(self, lm: LM, lengths: Sequence[int], repeats: int, seed: int) -> list[Example[np.ndarray]]:
        return [
            Example(
                f"cost-{self.new_tokens}-{seed}-{repeat}",
                repeat,
                tuple(lengths),
                np.random.default_rng([seed, repeat]).integers(3, lm.vocabulary, lengths[-1]),
            )
            for repeat in range(repeats)
        ]

    def work(self, lm: LM, example: Example[np.ndarray]) -> Iterator[Work]:
        for length in example.lengths:
            for tokens in (min(WARM_UP, length), length):
                yield Work(1, 0, tokens, 1)
                yield from (Work(1, tokens + i, 1, 1) for i in range(self.new_tokens - 1))

    def run(self, reader: Reader, batch: Sequence[Example[np.ndarray]]) -> Iterator[Result]:
        weights = reader.lm.num_bytes
        for length in batch[0].lengths:
            reader.capacity = length + self.new_tokens - 1  # no more than this length needs
            for example in batch:
                text = torch.from_numpy(example.payload[None, :length])
                try:
                    self._once(reader, text[:, :WARM_UP])
                    scores, seen, kept = self._once(reader, text)
                except NotFiniteError as error:
                    yield Result(example, length, status="nan", reason=str(error))
                    continue
                yield Result(example, length, scores=scores | {"weight_bytes": weights}, num_seen=seen, num_kept=kept)

    def _once(self, reader: Reader, text: torch.Tensor) -> tuple[dict[str, Any], int, int]:
        """Return seconds and bytes of one text [1, length], and the tokens seen and kept before its last."""
        device, stamps = reader.lm.device, []

        def stamp(token: torch.Tensor) -> None:
            wait(device)
            stamps.append(time.perf_counter())

        with peak_above(device) as peak:
            started = time.perf_counter()
            memory = reader.read(text[:, :-1])
            memory.generate(text[:, -1:], self.new_tokens, min_new_tokens=self.new_tokens, on_token=stamp)
            kept = memory.num_bytes
        scores = {
            "prefill_seconds": stamps[0] - started,
            "prefill_rate": text.shape[1] / (stamps[0] - started),  # tokens per second
            "decode_rate": (len(stamps) - 1) / (stamps[-1] - stamps[0]),
            "context_bytes": kept,
            "activation_bytes": None if peak.num_bytes is None else max(0, peak.num_bytes - kept),
        }
        return scores, memory.num_seen, memory.num_kept
