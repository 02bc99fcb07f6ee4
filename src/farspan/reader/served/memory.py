"""The reader of a model on a server: token ids are kept here, and each score is a request."""

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from farspan.reader import Reader
from farspan.reader.logits import Head, Sampling, Scores
from farspan.reader.memory import BaseMemory, Ids
from farspan.reader.served.transports import Transport

if TYPE_CHECKING:
    from farspan.reader.served import ServedLM


@dataclass
class ServedReader(Reader):
    """Reads by keeping token ids, which each score sends; the server has a prefix cache, or reads them again."""

    lm: "ServedLM"
    chunk: int = 1024  # without effect: the server chooses its own
    capacity: int = 0

    @property
    def gives_nats(self) -> bool:
        return self.lm.transport.gives_nats

    def usage(self, rows: int) -> dict[str, Any]:
        used = vars(self.lm.client.take())
        return {name: n // rows if isinstance(n, int) else n for name, n in used.items() if n is not None}

    def read(self, *passages: Ids, head: Ids | None = None, weights: Tensor | None = None) -> "ServedMemory":
        memory = ServedMemory(self.lm, self.lm.transport)
        for part in ([head] if head is not None else []) + list(passages):
            memory.read(part)
        return memory


class ServedMemory(BaseMemory):
    """Token ids [batch, time] that every request begins with."""

    def __init__(self, lm: "ServedLM", transport: Transport) -> None:
        super().__init__(lm)
        self.transport = transport
        self.ids = torch.empty(0, 0, dtype=torch.long)

    @property
    def num_bytes(self) -> int:
        return self.ids.nbytes

    @contextmanager
    def _alone(self) -> Iterator[None]:
        yield  # requests of several threads do not disturb each other

    def read(self, ids: Ids) -> None:
        ids = self._to_read(ids)
        self.ids = torch.cat([self.ids, ids], 1) if self.batch else ids
        self.batch, self.num_seen = ids.shape[0], self.ids.shape[1]

    def _score_group(self, ids: Tensor, kept: range) -> Scores:
        """Return the scores of rows [batch, time], requested one after another: they share no prefix."""
        nats, rank = torch.full((len(ids), len(kept)), math.nan), torch.full((len(ids), len(kept)), -1)
        for row, (before, target) in enumerate(zip(self.ids.tolist(), ids.tolist(), strict=True)):
            own = range(kept.start, min(kept.stop, sum(token >= 0 for token in target)))  # without padding
            for column, (one, place) in enumerate(self.transport.expect(before, target, own) if own else ()):
                nats[row, column], rank[row, column] = one, place
        return Scores(nats, rank)

    def _generate(self, ids: Ids, how: Sampling, on_token: Callable[[Tensor], None] | None) -> list[Tensor]:
        """Return new tokens. `on_token` is called only after all tokens have arrived."""
        prompts = torch.cat([self.ids, ids], 1).tolist()
        rows = [self.transport.generate(prompt, how)[0] if how.max_new_tokens else [] for prompt in prompts]
        if on_token is not None:
            for tokens in zip_longest(*rows, fillvalue=-1):
                on_token(torch.tensor(tokens))
        return [torch.tensor(row, dtype=torch.long) for row in rows]

    def fork(self) -> AbstractContextManager[Callable[[Tensor], Tensor]]:
        self._no_logits()

    def predictions(self, ids: Tensor, kept: range) -> Generator[tuple[Tensor, Head], None, None]:
        self._no_logits()

    def _no_logits(self) -> NoReturn:
        raise ValueError(f"{self.lm.name} is served: its logits stay on the server, so only full attention can read it")


class Placeholder(torch.nn.Module):
    """Takes the place of a model on a server: raises ValueError when a method or check uses it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise ValueError(
            f"{self.name} runs on a server: this needs the model itself in this process. A served model is read by "
            "the method full, and measured by curve, recall, perplexity and tasks"
        )
