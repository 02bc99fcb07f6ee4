"""Mentions in a corpus that a model predicts from far back, for the draw `recurrences`.

A later mention is a key token of LongPPL (`farspan.tasks.longppl`, with the paper's thresholds): at least 2 nats harder
after a short context than after a long one, and below 2 nats after the long one. Its earlier mention is the nearest
place before the short context at which the same `ngram` tokens end. The model itself chooses both, before it is
trained, under the RoPE with which the training begins.

The corpus is cut into windows inside documents. Windows are read in random order until there are `tokens` of them. The
result is a function of the model, the corpus and the seed. What is found is stored after each window, so that mining
that was stopped continues, and a training that continues has the rows that it began with, also on a machine that rounds
otherwise.
"""

import json
from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from farspan import files
from farspan.lm import LM
from farspan.methods.full import Full
from farspan.reader import Reader
from farspan.record import by_key
from farspan.stats import unpacked
from farspan.tasks.base import Example
from farspan.tasks.longppl import BoundLongPPL, LongPPL
from farspan.text.corpora import Corpus
from farspan.train.draws import Recurrences
from farspan.train.progress import Notice

Pairs = Int[np.ndarray, "pairs 2"]  # the earlier and the later place, in the tokens of a corpus
FEWEST = 4  # short contexts in a window; of a shorter one, few tokens have a longer context


def mined(
    lm: LM,
    corpus: Corpus,
    draw: Recurrences,
    *,
    row: int,
    longest: int,
    head: int,
    seed: int,
    file: Path | None = None,
    notice: Notice = lambda line: None,
) -> Pairs:
    """Return the mentions that the model finds in a corpus, in the order in which its windows are read.

    Args:
        row: tokens of a training row. The short context is half of it, or an eighth of the long one if that is less.
        longest: tokens of the long context, the separator included.
        head: tokens of the separator in a training row.
        file: where the mentions are stored; windows in it are not read again, unless they are of other arguments.
        notice: called with lines about the progress.

    Raises:
        ValueError: the model finds none, or a damaged file.
    """
    short = min(row // 2, max(1, longest // 8))
    task = BoundLongPPL(how=LongPPL(targets="all", short=short, block=short), text=corpus)
    cut = list(windows(corpus, longest - len(lm.separator.ids), FEWEST * short, draw.tokens, seed))
    read = sum(end - begin for begin, end in cut)
    model = {"model": lm.identity["fingerprint"], "dtype": str(lm.model.dtype), "config": lm.identity["config"]}
    of = model | {"text": corpus.hash, "row": row, "longest": longest, "head": head, "seed": seed} | vars(draw)
    found = _stored(file, of)
    notice(f"text {corpus.name!r}: reading {read:,} tokens for recurrences")
    with Full().on(lm) as reader:
        for number, (begin, end) in enumerate(cut[len(found) :], len(found) + 1):
            window = np.asarray(corpus.tokens[begin:end], np.int64)
            document = int(np.searchsorted(corpus.starts, begin, side="right")) - 1
            low, high = int(corpus.starts[document]) - head, int(corpus.starts[document + 1])
            keys = key_places(task, reader, window)
            pairs = [
                (begin + earlier, begin + later)
                for earlier, later in recurring(window, keys, 2 * short, draw)
                if draw.fits(begin + earlier - low, begin + later - low, high - low, row)
            ]
            found.append({"keys": len(keys), "pairs": pairs})
            if file is not None:
                files.write(file, json.dumps({"of": of, "windows": found}) + "\n")
            mentions = sum(len(one["pairs"]) for one in found)
            notice(f"text {corpus.name!r}: {number:,} of {len(cut):,} windows read, {mentions:,} recurrences found")
    every = [pair for one in found for pair in one["pairs"]]
    if not every:
        keys_found = sum(one["keys"] for one in found)
        raise ValueError(
            f"no recurrences found in the corpus: of {read:,} tokens read in text {corpus.name!r}, {keys_found:,} need "
            f"the long context of {longest:,} tokens, and none of these has a fitting earlier mention. Give longer "
            'documents, read more (smt.draw = "recurrences:tokens=N"), or use another draw'
        )
    return np.array(every, np.int64)


def _stored(file: Path | None, of: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what was found in the windows that are in a file, if it is of these arguments: by window, the number of
    key tokens, and the pairs.

    Raises:
        ValueError: the file is no JSON.
    """
    if file is None or not file.exists():
        return []
    stored = files.read_json(file)
    same = isinstance(stored, dict) and stored.get("of") == json.loads(json.dumps(of))
    return stored["windows"] if same else []


def windows(corpus: Corpus, most: int, least: int, tokens: int, seed: int) -> Iterator[tuple[int, int]]:
    """Yield the beginning and the end of windows of a corpus, in random order, until they have so many tokens.

    Args:
        most: tokens of a window; the last one of a document may be shorter.
        least: tokens of the shortest window.
    """
    documents = pairwise(corpus.starts.tolist())
    cut = [(at, min(at + most, end)) for begin, end in documents for at in range(begin, end, most)]
    cut = [(begin, end) for begin, end in cut if end - begin >= least]
    for index in np.random.default_rng(seed).permutation(len(cut)):
        if tokens <= 0:
            return
        begin, end = cut[index]
        tokens -= end - begin
        yield begin, end


def key_places(task: BoundLongPPL, reader: Reader, window: Int[np.ndarray, "time"]) -> list[int]:
    """Return the places of the key tokens of a window.

    Raises:
        ValueError: scores that are not finite.
    """
    length = len(window)
    [result] = task.run(reader, [Example("", 0, (length,), window)])
    if "key_bits" not in result.scores:
        raise ValueError(f"recurrences cannot be found: {result.reason}")
    first, end = task.span(length, length)
    return (first + np.flatnonzero(unpacked(result.scores["key_bits"], end - first))).tolist()


def recurring(
    window: Int[np.ndarray, "time"], later: list[int], distance: int, draw: Recurrences
) -> Iterator[tuple[int, int]]:
    """Yield the earlier and the later place of each of the `later` ones that has an earlier mention, at least
    `distance` tokens before it and not at the beginning of the window."""
    tokens: list[int] = window.tolist()
    ends = by_key((tuple(tokens[end - draw.ngram + 1 : end + 1]), end) for end in range(draw.ngram, len(tokens)))
    for place in later:
        before = ends.get(tuple(tokens[place - draw.ngram + 1 : place + 1]), [])
        if (nearest := bisect_right(before, place - distance)) == 0:
            continue
        earlier = before[nearest - 1]
        if _same(tokens, earlier, place) <= draw.largest:
            yield earlier, place


def _same(tokens: list[int], earlier: int, later: int) -> int:
    """Return the number of tokens of the passage around two places that is the same."""
    begin, end = 0, 1
    while earlier - begin > 0 and tokens[earlier - begin - 1] == tokens[later - begin - 1]:
        begin += 1
    while later + end < len(tokens) and tokens[earlier + end] == tokens[later + end]:
        end += 1
    return begin + end
