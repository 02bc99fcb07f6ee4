"""Retrieval-augmented language modelling: how well a model predicts a text after k passages retrieved for it.

    nats = mean over i > q of -log p(x_i | separator, d_1 ... d_k, x_1 ... x_{i-1})      perplexity = exp(nats)

x: a window of n tokens of the text (2,048); its first q (256) are the query and are not scored; d_1 ... d_k: the
passages retrieved by the query, best first, each of at most 256 tokens with the blank line that ends it. Yen et al.
2024 (CEPE), arXiv 2402.16617, section 4.1 and table 2, k = 0, 8, 20, 50; a length of this task is k. Plain readers put
all passages before the text, RePlug reads each in a pass of its own, CEPE encodes them in parallel. The targets are the
same at every k. `passages=random` is the control, k random passages of the same index. It shows the effects that any
passages have (a mixture of passes, a longer prompt), which are not due to retrieval.

Ours differs in three ways. The index may contain the scored text, so passages that share a run of `overlap` words with
the window are left out and counted; the authors retrieve from other documents. Their passages are raw slices of 256
tokens; ours end with a blank line, unless they are cut. The weights of a mixture are the method's own, or with
`weights=retriever` the softmax of the retriever's scores, which every row records.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar

import numpy as np
import torch

from farspan.lm import LM
from farspan.reader import Reader
from farspan.specs import choice, limited
from farspan.tasks.base import BoundText, Example, Parts, Quality, Result, Task, Work, digest, not_finite
from farspan.tasks.passages import PASSAGE_TOKENS, WEIGHTS, ended_by_blank, joined, passage_weights, places, row
from farspan.text.corpora import Corpus, load
from farspan.text.retrieval import Index, open_index, words_of

WINDOW = 2048  # tokens
QUERY = 256  # tokens
OVERLAP = 13  # words in a row, as Brown et al. 2020, arXiv 2005.14165, appendix C, define an overlap
SPARE = 32  # passages requested beyond k, to replace those left out
PASSAGES = ("found", "random")


@dataclass(frozen=True)
class Retrieved:
    """A window of the text with its passages, best first."""

    text: np.ndarray
    passages: tuple[np.ndarray, ...]
    numbers: np.ndarray  # of the passages in the index
    scores: np.ndarray  # the retriever's
    excluded: int  # passages left out because they hold part of the window


@dataclass(frozen=True)
class Ralm(Task):
    """Nats per token of windows of the text after passages of an index."""

    index: str  # a folder, as `farspan index` writes it
    window: int = limited(WINDOW, 2, quiet=True)  # tokens
    query: int = field(default=QUERY, metadata={"quiet": True})  # first tokens of the window, which are not scored
    passage_tokens: int = limited(PASSAGE_TOKENS, 1, quiet=True)  # of each passage, at most
    weights: str = choice(WEIGHTS, "method", quiet=True)
    overlap: int = limited(OVERLAP, quiet=True)  # words; 0: nothing is left out
    passages: str = choice(PASSAGES, "found", quiet=True)

    name: ClassVar[str] = "ralm"
    unit: ClassVar[str] = "passages"
    quality: ClassVar[Quality] = Quality("nats", "perplexity", higher_is_better=False, exp=True)
    details: ClassVar[tuple[str, ...]] = ("accuracy",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.query < self.window:
            raise ValueError(f"query = {self.query} of a window of {self.window} tokens: give 1 to {self.window - 1}")

    def on(self, lm: LM, text: str) -> "BoundRalm":
        return BoundRalm(**vars(self), text=load(text, lm.tokenizer), opened=open_index(self.index))

    def lengths(self, trained: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of passages in table 2."""
        return 0, 8, 20, 50


@dataclass(frozen=True, kw_only=True)
class BoundRalm(Ralm, BoundText[Retrieved]):
    """Perplexity of one text after passages of one index."""

    opened: Index

    task: ClassVar[str] = "ralm"
    reads_together: ClassVar[bool] = False
    version: ClassVar[int] = 3

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "window": self.window,
            "query": self.query,
            "passage_tokens": self.passage_tokens,
            "weights": self.weights,
            "overlap": self.overlap,
            "passages": self.passages,
            **self.text.named,
            "index": str(self.opened.folder),
            "index_hash": self.opened.hash,
            "retriever": self.opened.about["encoder"] or self.opened.about["kind"],
        }

    def num_tokens(self, lm: LM, example: Example[Retrieved], length: int) -> int:
        """Return the number of tokens fed if every passage has `passage_tokens`."""
        return len(lm.separator.ids) + length * self.passage_tokens + self.window - 1

    def windows_read(self, lm: LM, lengths: Sequence[int], repeats: int) -> list[tuple[Corpus, int, int]]:
        return []  # its windows are short: the long context is passages

    def examples(self, lm: LM, lengths: Sequence[int], repeats: int, seed: int) -> list[Example[Retrieved]]:
        """Return a window for each repeat, from as many documents as possible, with its passages.

        Raises:
            ValueError: a text too short, or an index with too few passages.
        """
        windows = self.text.windows(self.window, repeats, seed)
        queries = [lm.tokenizer.decode(tokens[: self.query].tolist()) for tokens in windows]
        what = f"{self.task} {self.version} {self.query} {lm.separator.ids} {seed}"
        found = []
        for repeat, (tokens, query) in enumerate(zip(windows, queries, strict=True)):
            window, rng = lm.tokenizer.decode(tokens.tolist()), np.random.default_rng([seed, repeat])
            numbers, scores, excluded = self._chosen(query, window, lengths[-1], rng)
            whole = (ended_by_blank(lm.tokenizer, self.opened.passage(number)) for number in numbers)
            pieces = tuple(ids[: self.passage_tokens] for ids in whole)
            how = f"{what} {repeat} {self.opened.hash} {self.weights} {self.passages}"
            given = Retrieved(tokens, pieces, numbers, scores, excluded)
            found.append(Example(digest(how, tokens, *joined(pieces), numbers), repeat, tuple(lengths), given))
        return found

    def _chosen(
        self, query: str, window: str, count: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Return numbers and scores of the first `count` passages that do not overlap with the window, and how many
        were left out."""
        runs_of_window, excluded = cache(partial(_runs, tuple(words_of(window)))), 0  # by their number of words
        order, chosen = self._in_order(query, count, rng), list[tuple[int, float]]()
        while len(chosen) < count:
            number, score = next(order, (None, 0.0))
            if number is None:
                raise ValueError(
                    f"{count} passages are needed (--lengths); index {self.opened.folder} holds {len(self.opened):,}, "
                    f"of which {excluded} share {self.overlap} words in a row with the scored text: "
                    "index more documents, or choose fewer passages"
                )
            words = words_of(self.opened.passage(number))
            shared = min(self.overlap, len(words))  # of a shorter passage all words
            if _runs(words, shared).isdisjoint(runs_of_window(shared)):
                chosen.append((number, score))
            else:
                excluded += 1
        numbers, scores = ([one[i] for one in chosen] for i in (0, 1))
        return np.array(numbers, np.int64), np.array(scores, np.float32), excluded

    def _in_order(self, query: str, count: int, rng: np.random.Generator) -> Iterator[tuple[int, float]]:
        """Yield number and score of all passages, best first; with passages=random in random order, of score 0."""
        if self.passages == "random":
            yield from ((int(number), 0.0) for number in rng.permutation(len(self.opened)))
            return
        given: set[int] = set()
        wanted = min(count + SPARE, len(self.opened))
        while len(given) < len(self.opened):
            numbers, scores = (values[0].tolist() for values in self.opened.search([query], wanted))
            yield from (one for one in zip(numbers, scores, strict=True) if one[0] not in given)
            given, wanted = given | set(numbers), min(2 * wanted, len(self.opened))

    def work(self, lm: LM, example: Example[Retrieved]) -> Iterator[Work]:
        for length in example.lengths:
            passages = tuple(map(len, example.payload.passages[:length]))
            before = len(lm.separator.ids) + sum(passages) + self.query
            yield Work(1, 0, before, 0, passages)
            yield Work(1, before, self.window - self.query - 1, self.window - self.query)

    def run(self, reader: Reader, batch: Sequence[Example[Retrieved]]) -> Iterator[Result]:
        """Yield results, fewest passages first. Examples are read one by one, since their passages differ in length."""
        head = torch.tensor([reader.lm.separator.ids])
        for length in batch[0].lengths:
            for example in batch:
                given = example.payload
                passages = given.passages[:length]
                weights = passage_weights(self.weights, given.scores[:length])
                memory = reader.read(*map(row, passages), head=head, weights=weights)
                memory.read(row(given.text[: self.query]))
                scores = memory.score(row(given.text[self.query :]))
                nats = scores.nats[0].cpu().double().numpy()
                failed = int((~np.isfinite(nats)).sum())
                hits = (scores.rank[0] == 0).cpu().numpy()
                values = {
                    "nats": None if failed else float(nats.mean()),
                    **({} if failed else {"accuracy": float(hits.mean())}),
                    "scored": len(nats),
                    "context": head.shape[1] + sum(map(len, passages)) + self.window,
                    "passages": given.numbers[:length].tolist(),
                    "passage_scores": [round(float(score), 4) for score in given.scores[:length]],
                    "passage_tokens": [len(ids) for ids in passages],
                    "excluded": given.excluded,
                    **places(memory),
                }
                yield Result.of(example, length, memory, values, not_finite(failed))

    def parts(self, lm: LM, example: Example[Retrieved], length: int) -> Parts:
        given = example.payload
        read = [("read", ids) for ids in given.passages[:length]]
        return [("separator", lm.separator.ids), *read, ("asked", given.text)], self.window - self.query


def _runs(words: Sequence[str], count: int) -> set[tuple[str, ...]]:
    """Return all runs of `count` words; none if `count` is 0."""
    return set(zip(*(words[first:] for first in range(count)), strict=False)) if count else set()
