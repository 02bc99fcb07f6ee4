"""Samples of a CEPE training: the end of a document in the decoder, the rest as chunks in the encoder.

    ... | C_1 | C_2 | ... | C_k | x_1 ... x_n |          one window of T = k · L + n tokens, chunks of L

Yen et al. 2024, arXiv 2402.16617, sections 2.2 and 2.3. A window is sampled in one of four ways, which are mixed by
weights: from a document of at least T tokens (`filter`), from all documents in a row (`cat`), its n tokens as in `cat`,
with the passages that match the first of them best as chunks (`retrieved`, section 7.1), or the chunks as in `cat`,
with n tokens from anywhere in them as x (`copied`, ours: a main stage can unlearn to copy). The paper mixes filter and
cat 2 : 1. In the warm-up the chunks are the decoder's own tokens.

For a model with order, an offset puts a sample's context some chunks before the decoder. It is sampled log-uniformly up
to the range of the order, so that far distances are trained at the cost of a window, and near ones as often.

A sample is a pure function of the seed and its index: the same on any number of processes and after a resume. Only the
tokens are stored; `farspan.text.corpora` keeps them memory-mapped.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool
from pydantic import Field, field_validator, model_validator
from torch import Tensor
from torch.utils.data import Dataset

from farspan.text.corpora import Corpus
from farspan.text.prompts import encoded
from farspan.text.retrieval import Index
from farspan.train.batches import View
from farspan.train.blocks import NOT_A_TARGET
from farspan.train.config import Settings

Kind = Literal["filter", "cat", "retrieved", "copied"]
KINDS: tuple[Kind, ...] = get_args(Kind)
TWO_TO_ONE: dict[Kind, float] = {"filter": 2 / 3, "cat": 1 / 3}
ROUNDING = 0.01  # by which weights written as decimals may miss 1


class NoiseSettings(Settings):
    """[data.noise], appendix A.2: the tokens of chunks that the cross-attention does not see."""

    rate: float = Field(0.3, ge=0, le=1)  # of chunks that are masked
    whole: float = Field(0.1, ge=0, le=1)  # of these, the share masked entirely; of the others a suffix is masked


class DocumentSettings(Settings):
    """[data]: texts, see `farspan.text.documents`, and how windows are sampled from them."""

    text: str
    mixture: dict[Kind, float] = Field(default=TWO_TO_ONE, validate_default=True)  # weights that sum to 1
    decoder: int = Field(4096, gt=1)  # tokens
    chunks: int = Field(16, gt=0)
    chunk: int = Field(256, gt=0)  # tokens
    separator: bool = True  # put the tokenizer's beginning of text before the decoder's tokens, as at inference
    noise: NoiseSettings = NoiseSettings()
    index: str | None = None  # passages for `retrieved`, made by `farspan index`
    query: int = Field(256, gt=0)  # the first of the decoder's tokens, the query for passages, not predicted

    @field_validator("mixture")
    @classmethod
    def _sums(cls, mixture: dict[str, float]) -> dict[str, float]:
        given = " + ".join(f"{kind} {weight:g}" for kind, weight in mixture.items())
        total = sum(mixture.values())
        if not mixture or min(mixture.values()) < 0 or not abs(total - 1) <= ROUNDING:  # also of nan
            raise ValueError(
                f"the weights {given or '(none)'} sum to {total:g}; give weights of {', '.join(KINDS)} that sum to 1, "
                "such as { filter = 0.667, cat = 0.333 }"
            )
        return {kind: weight / total for kind, weight in mixture.items()}

    @model_validator(mode="after")
    def _retrieves(self) -> "DocumentSettings":
        if self.mixture.get("retrieved"):
            if self.index is None:
                raise ValueError("the mixture has `retrieved` and no index: give data.index (farspan index makes one)")
            if self.query >= self.decoder:
                raise ValueError(
                    f"query = {self.query:,} leaves no tokens to predict of decoder = {self.decoder:,} tokens"
                )
        else:
            fix = "mixture = { retrieved = 1.0 }"
            self.refuse_unused(("index", "query"), "a mixture without `retrieved`", fix)
        if self.mixture.get("copied") and self.decoder > self.chunks * self.chunk:
            raise ValueError(
                f"the mixture has `copied`: data.decoder = {self.decoder:,} tokens must be at most the data.chunks x "
                f"data.chunk = {self.chunks * self.chunk:,} that they are copied from"
            )
        return self


class DocumentRows(Dataset[dict[str, Tensor]]):
    """Windows as the decoder's tokens and the encoder's chunks.

    A sample has `input_ids` and `labels` [separator + n], `context_input_ids` and `context_attention_mask` [k, L], and
    with `longest` `context_padding_mask` [k, L], 0 where a passage is shorter than a chunk, and `context_offset`, the
    tokens between context and decoder.

    Args:
        samples: the number of samples.
        separator: the tokenizer's beginning of text; put between documents in `cat`.
        copies: the chunks are the decoder's own tokens (the warm-up, section 2.3).
        noise: None: all tokens of every chunk are seen.
        index, tokenizer: for `retrieved`.
        longest: tokens from the first of a context to the decoder, with its offset; 0: no offsets.

    Raises:
        ValueError: a shuffled text, no document of T tokens for `filter`, a text of fewer for `cat`, or, for the
            warm-up, chunks that do not hold exactly the decoder's tokens.
    """

    def __init__(
        self,
        corpus: Corpus,
        settings: DocumentSettings,
        *,
        samples: int,
        separator: Sequence[int],
        seed: int,
        copies: bool = False,
        noise: NoiseSettings | None = None,
        index: Index | None = None,
        tokenizer: Any = None,
        longest: int = 0,
    ) -> None:
        corpus.check_ordered()
        context = settings.chunks * settings.chunk
        if copies and settings.mixture.get("retrieved"):
            raise ValueError(
                "the warm-up copies the decoder's tokens, not passages: leave `retrieved` out of data.mixture"
            )
        if copies and context != settings.decoder:
            raise ValueError(
                f"the warm-up copies the decoder's tokens: data.chunks x data.chunk = {settings.chunks} x "
                f"{settings.chunk} = {context:,} must be data.decoder = {settings.decoder:,}"
            )
        self.corpus, self.settings, self.samples, self.seed = corpus, settings, samples, seed
        self.noise, self.index, self.tokenizer = noise, index, tokenizer
        self.most = longest // settings.chunk - settings.chunks if longest else None  # chunks of an offset
        self.before = np.asarray(separator if settings.separator else (), np.int64)
        self.window = settings.decoder if copies else settings.decoder + context  # tokens
        self.kinds = [kind for kind in KINDS if settings.mixture.get(kind)]
        self.weights = [settings.mixture[kind] for kind in self.kinds]
        order = np.random.default_rng(seed).permutation(corpus.num_documents)
        self.stream = View(corpus, order, separator)
        sizes = np.diff(corpus.starts)
        self.long = np.flatnonzero(sizes >= self.window)
        self.places = np.cumsum(sizes[self.long] - self.window + 1)  # where a window can begin
        if "filter" in self.kinds and not len(self.long):
            raise ValueError(
                f"text {corpus.name!r} has no document of {self.window:,} tokens, its longest has "
                f"{int(sizes.max()):,}: give longer documents, fewer data.chunks, or data.mixture = {{ cat = 1.0 }} "
                "(all documents as one text)"
            )
        if set(self.kinds) - {"filter"} and len(self.stream) < self.window:
            raise ValueError(
                f"text {corpus.name!r} has {len(self.stream):,} tokens, less than a window of {self.window:,}"
            )
        self._found: dict[int, np.ndarray] = {}  # tokens of passages
        self.equal = corpus.first_equal(np.arange(corpus.num_documents if "retrieved" in self.kinds else 0))

    @property
    def inputs(self) -> dict[str, str]:
        """The hash of the index by its name, if there is one."""
        return {} if self.index is None else {"index": self.index.hash}

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        settings, rng = self.settings, np.random.default_rng((self.seed, index))
        kind = self.kinds[int(rng.choice(len(self.kinds), p=self.weights))]
        seen = np.ones((settings.chunks, settings.chunk), bool)
        predicted = 0  # the first of the decoder's tokens that is predicted
        if kind == "filter":
            place = int(rng.integers(self.places[-1]))
            which = int(np.searchsorted(self.places, place, side="right"))
            document = int(self.long[which])
            place -= int(self.places[which - 1]) if which else 0
            begin = int(self.corpus.starts[document]) + place
            tokens = self.corpus.tokens[begin : begin + self.window].astype(np.int64)
        else:
            length = settings.decoder if kind == "retrieved" else self.window
            tokens, touched = self.stream.read(int(rng.integers(len(self.stream) - length + 1)), length)
        decoder, context = tokens[-settings.decoder :], tokens[: settings.chunks * settings.chunk]
        if kind == "copied":
            begin = int(rng.integers(len(context) - settings.decoder + 1))
            decoder = context[begin : begin + settings.decoder]
        if kind == "retrieved":
            context, seen = self._retrieved(decoder[: settings.query], touched)
            predicted = settings.query
        there = seen  # also tokens that noise hides
        if self.noise is not None:
            seen = seen & noise(settings.chunks, settings.chunk, self.noise, rng)
        labels = np.concatenate([self.before, decoder])
        labels[: len(self.before) + predicted] = NOT_A_TARGET
        sample = {
            "input_ids": torch.from_numpy(np.concatenate([self.before, decoder])),
            "labels": torch.from_numpy(labels),
            "context_input_ids": torch.from_numpy(context.reshape(settings.chunks, settings.chunk)),
            "context_attention_mask": torch.from_numpy(seen.astype(np.int64)),
        }
        if self.most is not None:
            sample["context_padding_mask"] = torch.from_numpy(there.astype(np.int64))
            sample["context_offset"] = torch.tensor(settings.chunk * (int((self.most + 2) ** rng.random()) - 1))
        return sample

    def _retrieved(self, query: np.ndarray, own: np.ndarray) -> tuple[np.ndarray, Bool[np.ndarray, "chunks chunk"]]:
        """Return the best passages of documents that are neither in `own` nor copies of these, and a mask of their
        tokens.

        In an index of the training text, passages of the query's own documents would be copies of the tokens to be
        predicted. In an index of another text, documents of the same numbers are left out too, which does no harm.
        """
        assert self.index is not None
        settings, index = self.settings, self.index
        own = np.flatnonzero(np.isin(self.equal, self.equal[own]))
        ids = np.zeros((settings.chunks, settings.chunk), np.int64)
        seen = np.zeros(ids.shape, bool)
        mine = int(np.isin(index.documents, own).sum())
        wanted = min(len(index), settings.chunks + mine)
        numbers = index.search([self.tokenizer.decode(query.tolist())], wanted)[0][0]
        others = numbers[~np.isin(index.documents[numbers], own)][: settings.chunks].tolist()
        for row, number in enumerate(others):
            if number not in self._found:
                self._found[number] = encoded(self.tokenizer, index.passage(number))[: settings.chunk]
            passage = self._found[number]
            ids[row, : len(passage)], seen[row, : len(passage)] = passage, True
        return ids, seen


def noise(
    chunks: int, length: int, settings: NoiseSettings, rng: np.random.Generator
) -> Bool[np.ndarray, "chunks length"]:
    """Return a mask of the tokens of each chunk that are seen: with probability `rate` a chunk is masked, of these
    `whole` entirely, the others in a suffix of 1 to L tokens (appendix A.2; the released code samples 1 to L - 1)."""
    seen = np.ones((chunks, length), bool)
    for row in seen:
        if rng.random() < settings.rate:
            suffix = length if rng.random() < settings.whole else int(rng.integers(1, length + 1))
            row[length - suffix :] = False
    return seen
