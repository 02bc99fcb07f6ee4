"""Why a trained model that copies from 16,384 tokens back fails to in a longer text: keys that are farther back.

    python benchmarks/farther_keys.py MODEL [--length 16384] [--texts 1] [--data FOLDER] [--method M]
    python benchmarks/farther_keys.py --write | --quick

MODEL reads `[bos] S [bos] S`, S being `--length` tokens of a book, and predicts the second S at five places: near its
beginning, as `probe` does, at a quarter, a half and three quarters of it, and at its end, as `nested` also does. The
distance to the token to be copied is the same everywhere, and the text before grows to twice the length.

A look-alike is another key after the same token: a head that copies cannot tell it from the right one but by distance.
Measured at each place: the share of tokens that are copied, also where the layers with heads that copy cannot see the
look-alikes farther back than the right token, or nothing farther back but the first token; and the weights of heads on
the right token, on farther and nearer look-alikes, on the first token of all, and on others.

A second table has the mean score that a head gives to the right token, if it were at other distances: RoPE turns it by
the distance alone, so it is computed from `copying_distance.rows` of 1,026 tokens, as there.

Each run of MODEL replaces its lines in farther_keys.jsonl.gz; --write makes the tables of farther_keys.md of all lines.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import recorded as kept
import torch
from common import end, parser_of, run_script, table
from copying_distance import COPYING, HALF, Line, last_books, queries_and_keys, rows, scores
from real_tables import MISSING, over_texts, signed
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from farspan import load
from farspan.hf.attend import angles
from farspan.lm import LM
from farspan.loading.places import DEMO, folder_of
from farspan.methods import method

HEADS = ("17.3", "18.6", "18.7", "18.8", "20.6", "23.2")  # of SmolLM2, each with most weight at some far distance
QUICK_HEADS = ("2.0", "2.1", "3.2")  # of the embedded model
SCORED, PIECE = 256, 1024  # tokens of a place; of one forward
SHORTEST = 4096  # tokens of S, so that places do not overlap
PLACES = ("beginning", "1/4", "1/2", "3/4", "end")
PARTS = ("right token", "farther look-alikes", "nearer look-alikes", "first token", "others")
SEEN = ("as it is", "farther look-alikes hidden", "all farther keys hidden")
DISTANCES = (4096, 8192, 12288, 16384, 18432, 20480, 22528, 24576, 26624, 28672, 30720, 32768, 49152, 65536)
KEPT = kept.BENCHMARKS / "farther_keys.jsonl.gz"
PAGE = Path(__file__).with_suffix(".md")
NAME = "farther_keys"  # of the attention function


def texts(lm: LM, books: Path, length: int, number: int) -> Iterator[Tensor]:
    """Yield S of each text [length]."""
    files = last_books(books)
    for text in range(number):
        words = files[text % len(files)].read_text()[200_000 : 200_000 + 8 * length]
        found = torch.tensor(lm.tokenizer(words, add_special_tokens=False)["input_ids"])
        if len(found) < length:
            raise ValueError(f"text {text} has {len(found):,} tokens: give a --length up to that")
        yield found[:length]


@dataclass(frozen=True)
class Keys:
    """Which keys [queries, keys] of the queries of a place are of which kind, and the right one of each query."""

    right: Tensor  # int64 [queries]
    alike: Tensor
    farther: Tensor  # than the right one, but for the first token
    earlier: Tensor  # or the query's own

    @classmethod
    def of(cls, row: Tensor, start: int, stop: int, length: int) -> "Keys":
        at, key = torch.arange(start, stop)[:, None], torch.arange(stop)
        right = at - length
        alike = (row[:stop].roll(1) == row[start:stop, None]) & (key != right) & (key > 0)
        return cls(right[:, 0], alike, (key < right) & (key > 0), key <= at)

    def seen(self, what: str) -> Tensor:
        """Return which keys can be seen in one of SEEN but the first."""
        hidden = {SEEN[1]: self.farther & self.alike, SEEN[2]: self.farther}[what]
        return self.earlier & ~hidden

    def weights(self, query: Tensor, key: Tensor, scale: float) -> list[float]:
        """Return the mean weight of a head [queries and keys, dim] on each of PARTS."""
        weight = ((query.float() @ key.float().T) * scale).masked_fill(~self.earlier, -torch.inf).softmax(-1)
        parts = [
            weight.gather(1, self.right[:, None])[:, 0],
            (weight * (self.alike & self.farther)).sum(1),
            (weight * (self.alike & ~self.farther)).sum(1),
            weight[:, 0],
        ]
        parts.append(1 - torch.stack(parts).sum(0))
        return [float(part.mean()) for part in parts]


def by_layer(heads: Sequence[str]) -> dict[int, list[int]]:
    """Return the numbers of heads such as 18.7 by their layers, which ascend."""
    pairs = sorted(tuple(map(int, head.split("."))) for head in heads)
    return {layer: [number for _, number in of] for layer, of in groupby(pairs, key=itemgetter(0))}


@contextmanager
def attending(model: Any, attention: Callable[..., Any]) -> Iterator[None]:
    """Let a model attend by a function, which gets the masks of sdpa."""
    before = model.config._attn_implementation
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def read(lm: LM, half: Tensor, heads: Sequence[str], layers: Sequence[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read a text twice and yield, for each place, what is kept of it.

    Args:
        layers: those in which keys are hidden.
    """
    length, begin = len(half), torch.tensor(lm.separator.ids)[:1]
    row = torch.cat([begin, half, begin, half])
    last = len(row) - 1
    starts = [length + 2 + SCORED, *(length + 1 + length * n // 4 - SCORED // 2 for n in (1, 2, 3)), last - SCORED]
    cache, numbers = DynamicCache(config=lm.model.config), by_layer(heads)
    found: dict[str, list[float]] = {}
    keys: Keys | None = None
    what = SEEN[0]

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        layer = module.layer_idx
        if keys is not None and what == SEEN[0]:
            for number in numbers.get(layer, ()):
                own = key[0, number // (query.shape[1] // key.shape[1])]
                found[f"{layer}.{number}"] = keys.weights(query[0, number], own, options["scaling"])
        elif keys is not None and layer in layers:
            mask = keys.seen(what)[None, None]
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    def forward(start: int, stop: int, scored: int) -> Tensor:
        with torch.no_grad():
            ids = row[None, start:stop]
            return lm.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=scored).logits[0]

    inside = {token for start in starts for token in range(start + 1, start + SCORED)}
    cuts = {*range(0, last, PIECE), *starts, *(start + SCORED for start in starts), last} - inside
    with attending(lm.model, attention):
        for start, stop in pairwise(sorted(cuts)):
            if start not in starts:
                forward(start, stop, 1)
                continue
            keys, hits = Keys.of(row, start, stop, length), {}
            for what in reversed(SEEN):  # so that what is kept is what all layers saw
                if cache.get_seq_length() > start:
                    cache.crop(start - stop)
                hits[what] = (forward(start, stop, SCORED).argmax(-1) == row[start + 1 : stop + 1]).int().tolist()
            farther = (keys.alike & keys.farther).sum(1).tolist()
            place = PLACES[starts.index(start)]
            yield place, {"before": start, "hits": hits, "farther": farther, "weights": dict(found)}
            keys = None


def score_by_distance(lm: LM, books: Path, heads: Sequence[str]) -> dict[str, list[float]]:
    """Return the mean score of the right token at each of DISTANCES, of heads of a model under its own RoPE."""
    rope = lm.model.model.rotary_emb
    at = angles(torch.tensor(DISTANCES), rope.inv_freq.float().cpu())
    numbers = by_layer(heads)
    asked = torch.arange(HALF + 3, 2 * HALF + 1)
    found: dict[str, list[Tensor]] = {head: [] for head in heads}
    for row in rows(lm, books, 2, shuffled=False):
        for layer, (queries, keys) in zip(numbers, queries_and_keys(lm, row, list(numbers)), strict=True):
            factor = rope.attention_scaling**2 * lm.model.model.layers[layer].self_attn.scaling
            for number in numbers[layer]:
                key = keys[asked - HALF, number // (queries.shape[1] // keys.shape[1])]
                of_head = scores(queries[asked, number].float(), key.float(), at, factor).mean(0)
                found[f"{layer}.{number}"].append(of_head)
    return {head: torch.stack(of).mean(0).tolist() for head, of in found.items()}


def measured(options: argparse.Namespace, heads: Sequence[str], layers: Sequence[int]) -> list[Line]:
    """Read the texts, and return a line for each place of each, and one of the scores."""
    lm, lines, books = load(options.model, dtype="bfloat16"), [], options.data / "books"
    if lm.num_layers <= max(layers):
        raise ValueError(
            f"{options.model} has {lm.num_layers} layers: give a model with the architecture of SmolLM2-135M"
        )
    with method(options.method).on(lm):
        for number, half in enumerate(texts(lm, books, options.length, options.texts)):
            for place, one in read(lm, half, heads, layers):
                lines.append({"of": options.name, "text": number, "place": place, **one})
                copied = ", ".join(f"{np.mean(hits):.3f} {what}" for what, hits in reversed(one["hits"].items()))
                print(f"text {number}, {place}: copied {copied}", flush=True)
    if options.method == "full":
        of_heads = score_by_distance(load(options.model, dtype="float32"), books, heads)
        lines.append({"of": options.name, "scores": of_heads})
    return lines


def of_place(lines: Sequence[Line], of: str, place: str) -> list[Line]:
    return [line for line in lines if line["of"] == of and line.get("place") == place]


def places(lines: Sequence[Line]) -> str:
    """Return the table of what is copied at each place."""
    found = []
    for of in dict.fromkeys(line["of"] for line in lines):
        for place in PLACES:
            own = of_place(lines, of, place)
            if not own:
                continue
            hits = [np.concatenate([line["hits"][what] for line in own]) for what in SEEN]
            farther = np.concatenate([line["farther"] for line in own])
            apart = [hits[0][farther == 0], hits[0][farther > 0]]
            cells = [f"{one.mean():.2f}" if len(one) else MISSING for one in (*hits, *apart)]
            found.append([of, place, f"{own[0]['before']:,}", f"{len(farther)}", *cells])
    heads = [f"copied, {what}" for what in SEEN]
    return table(["", "place", "tokens before", "scored", *heads, "without a farther look-alike", "with one"], found)


def gains(lines: Sequence[Line]) -> str:
    """Return how much more is copied where farther keys are hidden, and by a model than by the first: text by text,
    with intervals over the texts, of models that read as many as the first."""
    of, *others = dict.fromkeys(line["of"] for line in lines)

    def copied(name: str, what: str = SEEN[0]) -> np.ndarray:
        """Return the copied share [places, texts]."""
        each = [[np.mean(line["hits"][what]) for line in of_place(lines, name, place)] for place in PLACES]
        return np.array(each)

    own = copied(of)
    others = [one for one in others if copied(one).shape == own.shape]
    found = {f"{one}, {SEEN[2]}; more than {SEEN[0]}": copied(one, SEEN[2]) - copied(one) for one in (of, *others)}
    found |= {f"{one}; more than {of}": copied(one) - own for one in others}
    lines_of = [[name, *(signed(*over_texts(at.tolist())) for at in more)] for name, more in found.items()]
    return table(["copied", *PLACES], lines_of) if own.shape[1] > 1 else ""  # one text has no interval


def looks(lines: Sequence[Line]) -> str:
    """Return the table of where heads look."""
    found = []
    for of in dict.fromkeys(line["of"] for line in lines):
        own = [of_place(lines, of, place) for place in PLACES]
        for head in own[0][0]["weights"] if own[0] else ():
            for number, part in enumerate(PARTS):
                means = [np.mean([line["weights"][head][number] for line in at]) for at in own]
                found.append([of, head, part, *(f"{mean:.2f}" for mean in means)])
    return table(["", "head", "weight on", *PLACES], found)


def scored(lines: Sequence[Line]) -> str:
    """Return the table of scores by distance."""
    found = [
        [line["of"], head, *(f"{score:.1f}" for score in of)]
        for line in lines
        for head, of in line.get("scores", {}).items()
    ]
    return table(["", "head", *(f"{n:,}" for n in DISTANCES)], found)


TABLES = {"places": places, "gains": gains, "looks": looks, "scores": scored}


def main() -> None:
    parser = parser_of(__doc__, "the embedded model, short; nothing is kept", check=None)
    parser.add_argument("model", nargs="?", help="a folder with the architecture of SmolLM2-135M")
    parser.add_argument("--name", default="trained", help="of the model, in the tables")
    parser.add_argument("--method", default="full")
    parser.add_argument("--length", type=int, default=16_384)
    parser.add_argument("--texts", type=int, default=1)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with books/")
    parser.add_argument("--write", action="store_true", help="make the tables of the page of the kept lines")
    options = parser.parse_args()
    if options.write:
        lines = kept.read_lines(KEPT)
        PAGE.write_text(kept.with_tables(PAGE.read_text(), lambda name: TABLES[name](lines)))
        return
    if not any((options.data / "books").glob("*.txt")):
        parser.error(f"{options.data} has no books/*.txt: give a folder with books/ (--data)")
    heads, layers = (QUICK_HEADS, (2, 3)) if options.quick else (HEADS, COPYING)
    if options.quick:
        options.model, options.length, options.texts = folder_of(DEMO), SHORTEST, 1
    if options.length < SHORTEST:
        parser.error(f"--length {options.length}: the five places overlap; give at least {SHORTEST}")
    if options.model is None:
        parser.error("give a model: a folder with the architecture of SmolLM2-135M, or --quick")
    torch.set_num_threads(1)
    lines = measured(options, heads, layers)
    if not options.quick:
        before = kept.read_lines(KEPT)
        order = list(dict.fromkeys(line["of"] for line in (*before, *lines)))
        others = (line for line in before if line["of"] != options.name)
        kept.write_lines(KEPT, sorted([*others, *lines], key=lambda line: order.index(line["of"])))
    for made in TABLES.values():
        print(f"\n{made(lines)}")
    found = {place: of_place(lines, options.name, place) for place in PLACES}
    copied = {
        place: {what: float(np.mean([one["hits"][what] for one in of])) for what in SEEN} for place, of in found.items()
    }
    end(copied, [], False)


if __name__ == "__main__":
    run_script(main)
