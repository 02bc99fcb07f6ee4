"""Rows of Sparse Memory Training from long documents: a pure function of a sample's index."""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset

from farspan.text.corpora import Corpus, join
from farspan.train.blocks import NOT_A_TARGET
from farspan.train.draws import Draw, Drawn, Recurrences
from farspan.train.objective import Rows
from farspan.train.schedule import Schedule

Short = Literal["skip", "use", "join"]
Mixed = Literal["concat", "alternate", "off"]
FirstTarget = Literal["auto", "keep", "mask"]


class SparseRows(Dataset[dict[str, dict[str, Tensor]]]):
    """Rows sampled from windows at random places of documents. A document is chosen in proportion to its tokens.

    A window has the length of the step (`schedule`): the separator, and tokens of one document. Positions count from
    the separator. A sample has up to two rows: `sparse`, a sample of the window's tokens, and `window`, its first
    tokens without gaps (mixed training, section 3.3).

    Args:
        row: tokens of a row, the model's window.
        targets: the number of tokens at the end of a window that are predicted.
        batch: samples of one step.
        separator: token ids before the tokens of a document.
        short: documents shorter than the length of a step are left out (`skip`) or used whole if they fill a row
            (`use`), or all documents are joined to one text, with separators between them (`join`).
        mixed: a sample has both rows (`concat`), one of them in turns (`alternate`), or only `sparse` (`off`).
        first_target: whether the first target, which follows the sampled memory, is predicted: if the last memory token
            is the one directly before it (`auto`), always (`keep`, as in equation 2), or never (`mask`).
        mine: returns two places in the tokens of a corpus for each mention in it, for the draw `recurrences`.

    Raises:
        ValueError: a shuffled text, rows too short for targets and memory, no document long enough, or no recurrences.
    """

    def __init__(
        self,
        corpus: Corpus,
        draw: Draw,
        schedule: Schedule,
        *,
        row: int,
        targets: int,
        batch: int,
        separator: Sequence[int],
        seed: int,
        short: Short = "skip",
        mixed: Mixed = "concat",
        first_target: FirstTarget = "auto",
        mine: Callable[[Corpus], Int[np.ndarray, "pairs 2"]] | None = None,
    ) -> None:
        corpus.check_ordered()
        self.text = corpus  # its documents are not joined
        if not 0 < targets < row:
            raise ValueError(f"smt.targets = {targets:,} must leave tokens for a memory in rows of {row:,} tokens")
        if short == "join":
            documents = (corpus.document(index) for index in range(corpus.num_documents))
            tokens = join(documents, tuple(separator))
            corpus = Corpus(corpus.name, corpus.hash, tokens, np.array([0, len(tokens)]))
        self.corpus, self.draw, self.schedule = corpus, draw, schedule
        self.row, self.targets, self.batch, self.seed = row, targets, batch, seed
        self.separator = np.asarray(separator, np.int64)
        self.short, self.mixed, self.first_target = short, mixed, first_target
        self.sizes = np.diff(corpus.starts) + len(self.separator)
        self._found: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by length, see `_documents`
        for length in sorted(schedule.stages, reverse=True):  # an error names the longest length without documents
            self._documents(length)
        self.pairs = mine(self.corpus) if mine is not None and isinstance(draw, Recurrences) else None
        self[0]  # raises now if the draw does not fit these rows

    def __len__(self) -> int:
        return self.schedule.steps * self.batch

    def __getitem__(self, index: int) -> dict[str, dict[str, Tensor]]:
        step = index // self.batch
        rng = np.random.default_rng((self.seed, index))
        documents, ends = self._documents(self.schedule.at(step))
        document = documents[np.searchsorted(ends, rng.integers(ends[-1]), side="right")]
        length = min(self.schedule.at(step), int(self.sizes[document]))
        begin = int(self.corpus.starts[document]) + int(rng.integers(self.sizes[document] - length + 1))
        sample = {}
        if self.mixed != "alternate" or step % 2 == 0:
            sample["sparse"] = self._row(*self._drawn(begin, length, rng))
        if self.mixed == "concat" or (self.mixed == "alternate" and step % 2 == 1):
            whole = np.arange(self.row)
            sample["window"] = self._row(begin, Drawn(whole, whole, self.row - 1))
        return sample

    def _drawn(self, begin: int, length: int, rng: np.random.Generator) -> tuple[int, Drawn]:
        """Return where the text of a row begins in the corpus, and the row. The text is the window from `begin` on, or
        for mentions their whole document."""
        if self.pairs is None or not isinstance(self.draw, Recurrences) or rng.random() >= self.draw.share:
            return begin, self.draw(length, self.row, self.targets, rng)
        earlier, later = self.pairs[rng.integers(len(self.pairs))].tolist()
        document = int(np.searchsorted(self.corpus.starts, later, side="right")) - 1
        first = int(self.corpus.starts[document])
        moved = len(self.separator) - first
        size = int(self.sizes[document])
        return first, self.draw.around(earlier + moved, later + moved, size, length, self.row, rng)

    def _documents(self, length: int) -> tuple[Int[np.ndarray, "documents"], Int[np.ndarray, "documents"]]:
        """Return the numbers of the documents that can be used for a length, and the cumulative sum of their tokens."""
        if length not in self._found:
            shortest = min(length, self.row) if self.short == "use" else length
            documents = np.flatnonzero(self.sizes >= shortest)
            if not len(documents):
                raise ValueError(
                    f"text {self.corpus.name!r} has no document of {shortest:,} tokens for lengths of {length:,}, its "
                    f"longest has {int(self.sizes.max()):,}: give longer documents, a smaller lengths.target, "
                    'data.short = "use" (documents up to their length) or "join" (all documents as one text)'
                )
            self._found[length] = documents, np.cumsum(self.sizes[documents])
        return self._found[length]

    def _row(self, begin: int, drawn: Drawn) -> dict[str, Tensor]:
        head = len(self.separator)
        ids = np.empty(len(drawn.tokens), np.int64)
        inside = drawn.tokens >= head
        ids[~inside] = self.separator[drawn.tokens[~inside]]
        ids[inside] = self.corpus.tokens[begin + drawn.tokens[inside] - head]
        labels = np.full(len(ids), NOT_A_TARGET, np.int64)
        first = len(ids) - drawn.num_targets
        labels[first:] = ids[first:]
        if self.first_target != "keep":
            labels[1:][np.diff(drawn.tokens) != 1] = NOT_A_TARGET
        if self.first_target == "mask" and drawn.has_memory:
            labels[first] = NOT_A_TARGET
        return {
            "input_ids": torch.from_numpy(ids),
            "position_ids": torch.from_numpy(drawn.positions.astype(np.int64)),
            "labels": torch.from_numpy(labels),
        }

    def summary(self) -> dict[str, int | float]:
        """Return counts for the longest length: all documents, those that are long enough, those used, their separate
        windows, all samples of the training, and samples per window (`passes`)."""
        longest = max(self.schedule.stages)
        documents, _ = self._documents(longest)
        windows = int(np.maximum(1, self.sizes[documents] // longest).sum())
        return {
            "documents": len(self.sizes),
            "long_enough": int((self.sizes >= longest).sum()),
            "used": len(documents),
            "windows": windows,
            "samples": len(self),
            "passes": round(len(self) / windows, 2),
        }


def collated(samples: Sequence[dict[str, dict[str, Tensor]]]) -> dict[str, Rows]:
    """Return samples as one batch. Shorter rows are padded at their end, where no other token attends to."""
    return {name: _stacked([sample[name] for sample in samples]) for name in samples[0]}


def _stacked(rows: Sequence[dict[str, Tensor]]) -> Rows:
    longest = max(len(row["input_ids"]) for row in rows)

    def filled(row: dict[str, Tensor], name: str) -> Tensor:
        values = row[name]
        missing = longest - len(values)
        if name == "position_ids":
            more = values[-1] + torch.arange(1, missing + 1)
        else:
            more = values.new_full((missing,), NOT_A_TARGET if name == "labels" else 0)
        return torch.cat([values, more])

    return {name: torch.stack([filled(row, name) for row in rows]) for name in rows[0]}
