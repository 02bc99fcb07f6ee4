"""Rows of token ids cut from a corpus, and a tokenizer trained on one."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset

from farspan.files import added
from farspan.text.corpora import Corpus, load
from farspan.train.checkpoint import writing
from farspan.train.progress import Notice

SHARED = 0.01  # of the tokens of a text; short documents can be in two texts by chance


class View:
    """All documents as one stream of tokens, with a separator before each. Only tokens that are read are copied."""

    def __init__(self, corpus: Corpus, order: Int[np.ndarray, "documents"], separator: Sequence[int]) -> None:
        self.corpus, self.order, self.separator = corpus, order, np.asarray(separator, np.int64)
        # the number of tokens of the stream up to the end of each document
        self.ends = np.cumsum(np.diff(corpus.starts)[order] + len(self.separator))

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, begin: int, length: int) -> tuple[Int[np.ndarray, "length"], Int[np.ndarray, "documents"]]:
        """Return the `length` tokens of the stream from `begin` on, and the numbers of their documents."""
        first = int(np.searchsorted(self.ends, begin, side="right"))
        parts, touched = [], []
        done, place = 0, begin - (int(self.ends[first - 1]) if first else 0)
        while done < length:
            document = int(self.order[first])
            if place < len(self.separator):
                parts.append(self.separator[place : place + length - done])
                done, place = done + len(parts[-1]), len(self.separator)
            start = int(self.corpus.starts[document]) + place - len(self.separator)
            parts.append(self.corpus.tokens[start : min(start + length - done, int(self.corpus.starts[document + 1]))])
            done, place = done + len(parts[-1]), 0
            touched.append(document)
            first += 1
        return np.concatenate(parts).astype(np.int64), np.asarray(touched)


class PackedRows(Dataset[dict[str, Tensor]]):
    """All documents in random order as one stream, with the separator before each, cut into rows of `length` tokens.

    Tokens at the end that do not fill a row are left out. Labels equal the inputs (the model shifts them).

    Raises:
        ValueError: a shuffled text, or one that is shorter than one row.
    """

    def __init__(self, corpus: Corpus, length: int, separator: tuple[int, ...], seed: int) -> None:
        corpus.check_ordered()
        order = np.random.default_rng(seed).permutation(corpus.num_documents)
        self.corpus, self.stream, self.length = corpus, View(corpus, order, separator), length
        if len(self.stream) < length:
            raise ValueError(
                f"text {corpus.name!r} has {len(self.stream):,} tokens, less than one row of {length:,}: give a longer "
                "text, or shorter rows"
            )

    def __len__(self) -> int:
        return len(self.stream) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.from_numpy(self.stream.read(index * self.length, self.length)[0])
        return {"input_ids": row, "labels": row}


def read_corpus(name: str, tokenizer: Any, notice: Notice) -> Corpus:
    """Return a text as token ids, as `farspan.text.corpora.load`; call `notice` with a line before and after."""
    notice(f"text {name!r}: reading and tokenising")
    corpus = load(name, tokenizer)
    notice(f"text {name!r}: {len(corpus.tokens):,} tokens")
    return corpus


def read_held_out(name: str | None, text: Corpus, tokenizer: Any, notice: Notice) -> Corpus | None:
    """Return the text `data.held_out` of a training on `text`, None if it has none; call `notice` with a line if it is
    trained on."""
    if not name:
        return None
    held_out = read_corpus(name, tokenizer, notice)
    if how := trained_on(held_out, text):
        notice(f"data.held_out = {name!r} {how}: its loss is not that of held-out text")
    return held_out


def trained_on(judged: Corpus, text: Corpus) -> str:
    """Return in words how much of the evaluation text `judged` is in the training text; "" if hardly any."""
    if judged.source == text.source:
        return "is the text that is trained on"
    share = judged.share_in(text)
    return f"has {share:.0%} of its tokens in documents that are trained on" if share >= SHARED else ""


def train_tokenizer(texts: Iterable[str], vocabulary: int, folder: Path) -> None:
    """Train a byte-level BPE tokenizer of `vocabulary` entries, with `<s>` (id 0) as beginning and end of text.

    tokenizer.json is written to `folder` last: if it exists, the other files do.

    Raises:
        ValueError: `vocabulary` is too small for `<s>` and all bytes, or `folder` cannot be written.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocabulary <= len(alphabet):
        raise ValueError(
            f"tokenizer.vocabulary = {vocabulary} is too small; use more than {len(alphabet)}, one for each byte"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    with writing(folder), added(folder, last="tokenizer.json") as new:
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>").save_pretrained(new)
