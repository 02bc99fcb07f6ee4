"""The order of CEPE's context: what positions or ages of chunks change for copying, chunk ends, shuffles, perplexity.

    python benchmarks/cepe_order.py [--long STEPS [--encoder]] [--out FOLDER] [--quick] [--check] [--gradients] [--page]

Beside the embedded model, frozen. One warm-up without order (configs/cepe-warmup-demo.toml, shorter), and after it for
each seed one main stage for each order (none, position, age; configs/cepe-order-demo.toml) on the same samples. With
--long, main stages of so many steps without order and with positions, measured up to 16,384 tokens, and one (seed 0)
with positions without random offsets, measured at the trained length; with --encoder, these main stages train the
encoder too. A repeated script continues where it was stopped. Measured on disjoint pieces of held-out text, the same
for all models. Of a piece, its last tokens up to the length are the context, in chunks of 16, and the decoder reads

    copy      a slice from anywhere in the context again; share of its tokens that are predicted
    control   the same slice after the context of another piece; share that can be guessed
    natural   the tokens after the context; nats, also without a context

and copy and natural again with the context's chunks in random order. A slice has 128 tokens, the first 32 not scored.
`none, sharper`: scores of the cross-attention are multiplied by ln(chunks) / ln(chunks trained), without training.
`none, slice's chunks`: the context is only the 8 or 9 chunks that hold the slice, so that no other chunk can be
mistaken for one of them: about the most that a model without order could gain from knowing it.
Intervals: Student's t over pieces, each the mean over seeds; differences are paired by piece.
--check: exits with 1 and prints the claims that do not hold, if there are any. --page: writes the tables of
cepe_order.md and its picture again, from the rows kept beside it; trains and measures nothing.
"""

import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import end, interval, missed, only_png, parser_of, run_script, table
from recorded import with_tables

from farspan.report.figure import Figure, Line
from farspan.report.picture import draw_grid

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "benchmarks/cepe_order.md"
ROWS = ROOT / "benchmarks/cepe_order.jsonl.gz"
LONG_ROWS = ROOT / "benchmarks/cepe_order_long.jsonl.gz"  # after a longer main stage
ENCODER_ROWS = ROOT / "benchmarks/cepe_order_encoder.jsonl.gz"  # after one that trained the encoder too
TEXT = "builtin:held-out+tests"
SEEDS = (0, 1, 2)
ORDERS = ("none", "position", "age")
SHARPER = "none, sharper"
ORACLE = "none, slice's chunks"
CHUNK, TRAINED = 16, 24  # tokens; chunks of a row of the training
SLICE, FED = 128, 32  # tokens; of the slice, those that are only fed
GROUPS = {(1024, 4096, 16384): 8, (65536, 131072): 4}  # tokens of a context: pieces
LONG = (1024, 4096, 16384)  # tokens of a context after a longer training
FIXED = TRAINED * CHUNK  # tokens of a row's context: with this range of the positions they have no random offsets
CLAIMED = 16384  # tokens
TIMES = 2.0  # by which order must copy more than none
WARM_UP = ("trainer.bf16=false", "trainer.batch=8", "trainer.micro_batch=8", "data.chunks=4", "data.chunk=32",
           "trainer.steps=240", "optimizer.warmup_steps=10", "trainer.save_every=60")  # fmt: skip
FEW = ("trainer.steps=4", "optimizer.warmup_steps=1", "trainer.save_every=2", "trainer.log_every=2")


def train(config: str, out: Path, overrides: tuple[str, ...]) -> None:
    """Run a training, or what is missing of it."""
    from farspan.train import cepe
    from farspan.train.config import read_config
    from farspan.train.progress import TrainingWatch

    if not (out / "cepe_adapter.safetensors").exists():
        settings = read_config(ROOT / f"configs/{config}.toml", cepe.CepeSettings, [f"out={out}", *overrides])
        summary = cepe.train(settings, TrainingWatch(notice=print))
        print(f"{out.name}: loss {summary['loss']:.3f}, {summary['seconds']} s", flush=True)


def pieces(lm: Any, length: int, count: int) -> np.ndarray:
    """Return disjoint pieces of held-out text, [count, length + SLICE]."""
    from farspan.text import corpora
    from farspan.train.batches import View

    corpus = corpora.load(TEXT, lm.tokenizer)
    stream = View(corpus, np.random.default_rng(0).permutation(corpus.num_documents), lm.separator.ids)
    size = length + SLICE
    return np.stack([stream.read(i * size, size)[0] for i in range(count)])


class Reading:
    """One piece's encoded context, and what a model predicts after parts of it."""

    def __init__(self, lm: Any, ids: np.ndarray) -> None:
        from farspan.cepe.encoder import encode

        self.lm, self.model = lm, lm.model
        chunks = torch.from_numpy(ids).view(1, -1, CHUNK)
        with torch.no_grad():
            self.states = encode(lm.model.encoder, chunks).states[0]

    @torch.no_grad()
    def nats_and_hits(
        self, decoder: np.ndarray, length: int, chosen: np.ndarray | None = None, factor: float = 1.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return nats and whether the first guess is right, [rows, SLICE], for slices [rows, SLICE] after the context's
        last `length` tokens, or after the chosen of its chunks, in the order in which they are given."""
        from farspan.cepe import Context

        states = self.states[:, self.states.shape[1] - length :]
        if chosen is not None:
            states = states.unflatten(1, (-1, CHUNK))[:, chosen].flatten(1, 2)
        given: tuple[torch.Tensor, ...] = (states,)
        if self.model.context_order is not None:
            given = self.model.context_order(given, torch.arange(states.shape[1], 0, -1)[None], CHUNK)
        ids = torch.from_numpy(decoder)
        before = torch.tensor(self.lm.separator.ids).expand(len(ids), -1)
        with self.model.attending(Context(given, score_factor=factor) if length else None):
            logits = self.model(input_ids=torch.cat([before, ids], 1), use_cache=False).logits[
                :, before.shape[1] - 1 : -1
            ]
        nats = -logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        return nats.numpy(), (logits.argmax(-1) == ids).numpy()


def begin_of(text: int, length: int) -> int:
    """Return where in a context of that length the slice of this piece begins; the same for all models."""
    return int(np.random.default_rng((text, length)).integers(length - SLICE + 1))


def measured(
    lm: Any, lengths: tuple[int, ...], texts: np.ndarray, pair: int, readings: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of pieces 2·pair and 2·pair + 1, each of which is the other's control."""
    longest = lengths[-1]
    which = (2 * pair, 2 * pair + 1)
    encoded = {i: Reading(lm, texts[i, :longest]) for i in which}
    alone = {i: float(encoded[i].nats_and_hits(texts[i : i + 1, longest:], 0)[0].mean()) for i in which}
    for length in lengths:
        begins = {i: begin_of(i, length) for i in which}
        slices = {i: texts[i, longest - length + begins[i] :][:SLICE] for i in which}
        shuffled = np.random.default_rng((pair, length)).permutation(length // CHUNK)
        for reading in readings:
            factor = max(1.0, math.log(length / CHUNK) / math.log(TRAINED)) if reading == SHARPER else 1.0
            found: dict[int, tuple[np.ndarray, ...]] = {}
            for i, other in (which, which[::-1]):
                decoder = np.stack([texts[i, longest:], slices[i], slices[other]])
                in_order, mixed = None, shuffled
                if reading == ORACLE:
                    in_order = np.arange(begins[i] // CHUNK, (begins[i] + SLICE - 1) // CHUNK + 1)
                    mixed = in_order[::-1].copy()
                found[i] = encoded[i].nats_and_hits(decoder, length, in_order, factor)
                found[i] += encoded[i].nats_and_hits(decoder[:2], length, mixed, factor)
            for i, other in (which, which[::-1]):
                nats, hits, nats_shuffled, hits_shuffled = found[i]
                scored = slice(FED, None)
                yield {
                    "reading": reading, "length": length, "text": i,
                    "place": (begins[i] + FED) % CHUNK,  # of the first scored token in its chunk
                    "copy": bits(hits[1, scored]), "control": bits(found[other][1][2, scored]),
                    "shuffled": bits(hits_shuffled[1, scored]),
                    "copy_nats": round(float(nats[1, scored].mean()), 5),
                    "shuffled_nats": round(float(nats_shuffled[1, scored].mean()), 5),
                    "alone": round(alone[i], 5), "natural": round(float(nats[0].mean()), 5),
                    "natural_shuffled": round(float(nats_shuffled[0].mean()), 5),
                }  # fmt: skip


def bits(hits: np.ndarray) -> str:
    return "".join("1" if hit else "0" for hit in hits)


def run_long(out: Path, steps: int, encoder: bool) -> list[dict[str, Any]]:
    """Train and measure what is missing of longer main stages, seed by seed; return all rows. `encoder`: they train the
    encoder too, and none has positions without random offsets."""
    few = (
        f"trainer.steps={steps}",
        f"trainer.save_every={steps // 8}",
        f"trainer.log_every={max(1, steps // 100)}",
        f"model.train_encoder={str(encoder).lower()}",
    )
    warmed, folder = out / "warmup", out / f"steps-{steps}{'-encoder' * encoder}"
    train("cepe-warmup-demo", warmed, WARM_UP)
    for seed in SEEDS:
        for order in ORDERS[:2]:
            own = (f"model.warmed_up={warmed}", f"model.order={order}", f"trainer.seed={seed}", *few)
            train("cepe-order-demo", folder / f"{order}-{seed}", own)
            measure(folder / f"{order}-{seed}", order, seed, LONG, GROUPS[LONG])
    if not encoder:
        fixed = (
            f"model.warmed_up={warmed}",
            "model.order=position",
            "trainer.seed=0",
            f"model.order_range={FIXED}",
            *few,
        )
        train("cepe-order-demo", folder / "fixed-0", fixed)
        for name, order in (("none-0", "none"), ("fixed-0", "position")):
            measure(folder / name, order, 0, (FIXED,), 16)
    places = sorted(folder.glob("*/order.jsonl"))
    return [json.loads(line) for place in places for line in place.read_text().splitlines()]


def run(
    out: Path, seeds: tuple[int, ...], groups: dict[tuple[int, ...], int], few: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Train and measure what is missing; return all rows."""
    warmed = out / "warmup"
    train("cepe-warmup-demo", warmed, (*WARM_UP, *few))
    for order in ORDERS:
        for seed in seeds:
            own = (f"model.warmed_up={warmed}", f"model.order={order}", f"trainer.seed={seed}", *few)
            train("cepe-order-demo", out / f"{order}-{seed}", own)
    for lengths, count in groups.items():  # the shorter ones of all models first
        for seed in seeds if lengths[-1] <= CLAIMED else seeds[:1]:
            for order in ORDERS:
                measure(out / f"{order}-{seed}", order, seed, lengths, count)
    places = [out / f"{order}-{seed}" / "order.jsonl" for seed in seeds for order in ORDERS]
    return [json.loads(line) for place in places for line in place.read_text().splitlines()]


def measure(folder: Path, order: str, seed: int, lengths: tuple[int, ...], count: int) -> None:
    """Add the rows of a model that are missing."""
    from farspan.lm import load

    place = folder / "order.jsonl"
    kept = [json.loads(line) for line in place.read_text().splitlines()] if place.exists() else []
    done = {(row["length"], row["text"]) for row in kept}
    missing = [pair for pair in range(count // 2) if (lengths[-1], 2 * pair + 1) not in done]
    if not missing:
        return
    lm = load(folder, dtype="float32", device="cpu")
    texts = pieces(lm, lengths[-1], count)
    for pair in missing:
        rows = measured(lm, lengths, texts, pair, (order, SHARPER, ORACLE) if order == "none" else (order,))
        lines = [json.dumps(row | {"seed": seed}) + "\n" for row in rows]
        with place.open("a") as file:
            file.write("".join(lines))  # at once, so that a pair is there or not
    print(f"{folder.name}: {lengths[-1]:,} tokens", flush=True)


def agreement(out: Path, folder: Path) -> tuple[float, float]:
    """Return the cosine of the gradients of W, the projection of the positions, on two times 32 copied samples without
    noise, and the size of the vectors that it adds as a share of the states'."""
    from torch.utils.data import default_collate

    from farspan.train import cepe
    from farspan.train.config import read_config
    from farspan.train.progress import TrainingWatch

    given = [f"out={out / 'gradients'}", f"model.warmed_up={folder}", "model.order=position", "data.noise.rate=0"]
    given.append("data.mixture={ copied = 1.0 }")
    settings = read_config(ROOT / "configs/cepe-order-demo.toml", cepe.CepeSettings, given)
    lm = cepe.opened(settings)
    rows, model, found = cepe.prepare(settings, lm, TrainingWatch()), lm.model.train(), []
    order = model.context_order
    for first in (0, 32):
        model.zero_grad()
        for begin in range(first, first + 32, 8):
            batch = default_collate([rows[i] for i in range(begin, begin + 8)])
            cepe.terms(model, model, batch)["nats"].backward()
        found.append(order.position.weight.grad.flatten().clone())
    with torch.no_grad():
        (zero,) = order((torch.zeros(1, 2048, order.position.out_features),), torch.arange(2048, 0, -1)[None], CHUNK)
        states = model.encode_context(rows[0]["context_input_ids"][None]).states[0]
    cosine = torch.cosine_similarity(found[0], found[1], 0)
    return float(cosine), float(zero.norm(dim=-1).mean() / states.norm(dim=-1).mean())


# tables


def share(hits: str, chosen: range | None = None, place: int = 0) -> float:
    """The share of hits, of all tokens or of those at some places of a chunk; NaN where there are none."""
    kept = [hit == "1" for i, hit in enumerate(hits) if chosen is None or (place + i) % CHUNK in chosen]
    return float(np.mean(kept)) if kept else math.nan


MEASURES = {
    "copied": lambda r: share(r["copy"]) - share(r["control"]),
    "copied, chunks shuffled": lambda r: share(r["shuffled"]) - share(r["control"]),
    "lost by shuffling": lambda r: share(r["copy"]) - share(r["shuffled"]),
    "first token of a chunk": lambda r: (
        share(r["copy"], range(1), r["place"]) - share(r["control"], range(1), r["place"])
    ),
    "last half of a chunk": lambda r: (
        share(r["copy"], range(8, 16), r["place"]) - share(r["control"], range(8, 16), r["place"])
    ),
    "nats of the copy": lambda r: r["copy_nats"],
    "nats of the copy, more if shuffled": lambda r: r["shuffled_nats"] - r["copy_nats"],
    "nats": lambda r: r["natural"],
    "nats gained from the context": lambda r: r["alone"] - r["natural"],
    "nats more if shuffled": lambda r: r["natural_shuffled"] - r["natural"],
}


# measures of the whole context and its order, which the oracle does not have
WHOLE_CONTEXT = ("nats", "nats gained from the context", "nats more if shuffled", "lost by shuffling",
                 "copied, chunks shuffled", "nats of the copy, more if shuffled")  # fmt: skip


def by_text(rows: list[dict[str, Any]], measure: str, reading: str, length: int, seed: int | None = None) -> np.ndarray:
    """Return a measure piece by piece, the mean over seeds, or of one seed."""
    value = MEASURES[measure]
    found: dict[int, list[float]] = {}
    for row in rows:
        if (row["reading"], row["length"]) == (reading, length) and seed in (None, row["seed"]):
            found.setdefault(row["text"], []).append(value(row))
    return np.array([np.mean(found[text]) for text in sorted(found)])


def cell(values: np.ndarray, digits: int = 3) -> str:
    mean, low, high = interval(values)
    spread = "" if math.isnan(low) else f" [{low:.{digits}f}, {high:.{digits}f}]"  # none where all are the same
    return f"{mean:.{digits}f}{spread}"


def table_of(rows: list[dict[str, Any]], name: str) -> str:
    """A table of one measure by length; `MEASURE to none`: paired differences; `seeds`: each seed alone."""
    lengths = sorted({row["length"] for row in rows})
    wanted = (*ORDERS, SHARPER, *(() if name.removesuffix(" to none") in WHOLE_CONTEXT else (ORACLE,)))
    readings = [reading for reading in wanted if any(row["reading"] == reading for row in rows)]
    if name == "seeds":
        lines = [
            [reading, *(f"{by_text(rows, 'copied', reading, CLAIMED, seed).mean():.3f}" for seed in SEEDS)]
            for reading in readings
        ]
        return table(["copied of 16,384 tokens", *(f"seed {seed}" for seed in SEEDS)], lines)
    measure, differs = name.removesuffix(" to none"), name.endswith(" to none")
    lines = []
    for reading in readings[1:] if differs else readings:
        values = [by_text(rows, measure, reading, n) for n in lengths]
        if differs:
            values = [one - by_text(rows, measure, "none", n) for one, n in zip(values, lengths, strict=True)]
        lines.append([reading, *map(cell, values)])
    return table([name, *(f"{length:,}" for length in lengths)], lines)


def claims(rows: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """What is claimed: a value, and the most it may be."""
    none, position = (by_text(rows, "copied", reading, CLAIMED) for reading in ("none", "position"))
    worse = by_text(rows, "nats", "position", CLAIMED) - by_text(rows, "nats", "none", CLAIMED)
    hurt = by_text(rows, "lost by shuffling", "position", CLAIMED)
    return {
        f"{TIMES:g} x copied without order, less copied with positions, at {CLAIMED:,} tokens: upper end": (
            interval(TIMES * none - position)[2], 0.0,
        ),
        f"nats with positions above those without, at {CLAIMED:,} tokens: lower end": (interval(worse)[1], 0.0),
        "copied with positions in shuffled chunks, less in order: upper end": (interval(-hurt)[2], 0.0),
    }  # fmt: skip


def draw(rows: list[dict[str, Any]]) -> Path:
    """The forgetting curve through the context: copied beyond what is guessed, by the length of the context."""
    lengths = sorted({row["length"] for row in rows})
    panels = []
    for measure, title in (("copied", "All tokens of the slice"), ("first token of a chunk", "First token of a chunk")):
        lines = []
        for index, order in enumerate(ORDERS):
            mean, low, high = np.array([interval(by_text(rows, measure, order, n)) for n in lengths]).T
            lines.append(Line(f"order = {order}", lengths, mean, index, low, high))
        labels: dict[str, Any] = {"x": "context (tokens)", "y": "copied beyond what is guessed"}
        panels.append(Figure(title, **labels, lines=lines, log_x=True, ticks=lengths, num_members=len(lines)))
    return only_png(draw_grid([panels], ROOT / "docs/pictures", "cepe_order"))


def kept_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(file.read_bytes()).decode().splitlines()]


def keep(rows: list[dict[str, Any]], file: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_bytes(gzip.compress(lines.encode(), mtime=0))  # without the time: equal rows make equal files


def page_table(name: str) -> str:
    """Return a table of the page; `long NAME`: of the longer main stage, `fixed NAME`: without random offsets,
    `encoder NAME`: of the main stage that trains the encoder too."""
    kind, _, rest = name.partition(" ")
    if kind == "encoder":
        return table_of(kept_rows(ENCODER_ROWS), rest)
    if kind not in ("long", "fixed"):
        return table_of(kept_rows(ROWS), name)
    return table_of([row for row in kept_rows(LONG_ROWS) if (row["length"] == FIXED) == (kind == "fixed")], rest)


def main() -> None:
    parser = parser_of(__doc__, "a few steps, two pieces, one seed: shows that all of it runs")
    parser.add_argument("--out", type=Path, default=Path("runs/cepe-order"))
    parser.add_argument("--long", type=int, metavar="STEPS", help="of a longer main stage, without order and with it")
    parser.add_argument("--encoder", action="store_true", help="with --long: train the encoder too")
    parser.add_argument(
        "--gradients", action="store_true", help="only the gradients of trained models and of the warm-up"
    )
    parser.add_argument("--page", action="store_true", help="write page and picture from the kept rows")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.page:
        PAGE.write_text(with_tables(PAGE.read_text(), page_table))
        print(draw(kept_rows(ROWS)))
        return
    if arguments.gradients:
        out = arguments.out / f"steps-{arguments.long}" if arguments.long else arguments.out
        for name in (*(() if arguments.long else ("warmup",)), *(f"position-{seed}" for seed in SEEDS)):
            cosine, size = agreement(arguments.out, out / name)
            print(
                f"{name}: cosine of two gradients {cosine:.3f}, size of the vectors {size:.3f} of the states'",
                flush=True,
            )
        return
    if arguments.quick:
        rows = run(arguments.out / "quick", (0,), {(256, 512): 2}, FEW)
    elif arguments.long:
        every = run_long(arguments.out, arguments.long, arguments.encoder)
        keep(every, ENCODER_ROWS if arguments.encoder else LONG_ROWS)
        rows = [row for row in every if row["length"] != FIXED]
    else:
        keep(rows := run(arguments.out, SEEDS, GROUPS, ()), ROWS)
    for name in MEASURES:
        print(table_of(rows, name), end="\n\n", flush=True)
    not_held = missed({} if arguments.quick else claims(rows))
    end({"rows": len(rows), "seeds": len({row["seed"] for row in rows})}, not_held, arguments.check)


if __name__ == "__main__":
    run_script(main)
