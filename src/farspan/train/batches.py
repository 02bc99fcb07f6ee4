"""What a training reads: rows of token ids cut from a corpus."""

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.utils.data import Dataset

from farspan.corpus import Corpus, join


class PackedRows(Dataset[dict[str, Tensor]]):
    """All documents behind one another, the separator before each, cut in rows of `length` tokens.

    Rows start every `length` tokens; what is left at the end is not read. Labels equal the inputs (the model
    shifts them).

    Raises:
        ValueError: the corpus is shorter than one row.
    """

    def __init__(self, corpus: Corpus, length: int, separator: tuple[int, ...], seed: int) -> None:
        order = np.random.default_rng(seed).permutation(corpus.num_documents).tolist()
        stream = join((corpus.document(i) for i in order), separator)
        num_rows = len(stream) // length
        if num_rows == 0:
            raise ValueError(f"text {corpus.name!r} has {len(stream):,} tokens, less than one row of {length:,}")
        self.rows: Int[np.ndarray, "rows length"] = stream[: num_rows * length].reshape(num_rows, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.from_numpy(self.rows[index])
        return {"input_ids": row, "labels": row}


def train_tokenizer(texts: list[str], vocabulary: int, folder: Path) -> None:
    """Trains a byte-level BPE tokenizer of `vocabulary` entries, `<s>` (id 0) as beginning and end of text."""
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
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>").save_pretrained(folder)
