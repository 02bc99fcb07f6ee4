"""Does recurrence lower perplexity without lengthening memory (Forgetting Curve paper, section 5 and figure 5)?

    python benchmarks/llama_xl.py [--out runs/llama_xl] [--steps N] [--quick] [--record] [--picture FILE] [--check]
    python benchmarks/llama_xl.py --recorded [--picture FILE] [--check]

The embedded model is trained further from configs/llama-xl-demo.toml, each time with three seeds: with a memory of 384
tokens before each row of 128 (Transformer-XL), and without one, on the same rows. Measured on held-out files:

    perplexity   the same last 128 tokens of 2,048, after more and more of the text before them; and the mean over all
                 tokens of 2,048 in one pass, up to more and more of them
    memory       the forgetting curve of natural text, and of its tokens in shuffled order

read with the memory of the training, and those with a memory also with shorter ones. The embedded model itself, which
was trained on 512 tokens without recurrence, is read with the same memories.

Numbers are paired by text: of each text, the mean over the seeds; intervals are over texts. The half-life's ratio is
the geometric mean over the seeds. That of natural text is judged against a factor of 1.5: the paper's finding, that
the curve does not move, is reproduced if the whole interval is within the factor, refuted if it is beyond, else open.

Trainings and measurements are kept in --out and continued. --record keeps the rows beside this script, --recorded
judges these alone. --check fails when perplexity does not gain, or a half-life is open. Last line: the figures as JSON.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Interval, end, interval, only_png, parser_of, run_script, running_mean, table, with_ends
from recorded import BENCHMARKS, record, recorded, with_tables
from scipy.stats import t as student
from smt_extend import with_interpolation

from farspan import LM, Row, load, measure, stats
from farspan.loading.places import DEMO, folder_of
from farspan.report.figure import Figure, Line
from farspan.report.perplexity import series as perplexities
from farspan.report.picture import draw_grid
from farspan.train import lm as training
from farspan.train.config import read_config
from farspan.train.progress import TrainingWatch
from farspan.train.recurrence import reading

CONFIG = BENCHMARKS.parent / "configs" / "llama-xl-demo.toml"
ROWS = BENCHMARKS / "llama_xl"
PAGE = BENCHMARKS / "llama_xl.md"
TEXT = "builtin:held-out+tests"
SEGMENT = 128  # tokens
MEMORIES = (0, 128, 384)  # tokens; the last is that of the training
TRAINED = (0, MEMORIES[-1])
SEEDS = (0, 1, 2)
SPANS = (256, 512, 1024, 2048)  # tokens of perplexity
LENGTHS = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512)
SHOWN = ("half_life", "reach")
FACTOR = 1.5
PARTS = ("perplexity", "all", "natural", "shuffled")  # of what is measured of a model with one memory
EMBEDDED = "embedded"


@dataclass(frozen=True)
class Read:
    """What was measured of the models of one kind, one for each seed, read with one memory."""

    nats: np.ndarray  # [seeds, texts, spans], of the same tokens
    means: np.ndarray  # [seeds, texts, spans], of all tokens of a span
    natural: list[stats.MeasuredCurve]
    shuffled: list[stats.MeasuredCurve]


def name_of(memory: int, seed: int) -> str:
    return f"memory-{memory}-seed-{seed}"


def trained(memory: int, seed: int, out: Path, steps: int | None) -> LM:
    """Return a model of a seed; train it, or continue its training, where it is not finished."""
    folder = out / "models" / name_of(memory, seed)
    overrides = [f"out='{folder}'", f"recurrence.memory={memory}", f"trainer.seed={seed}"]
    overrides += [] if steps is None else [f"trainer.steps={steps}", f"optimizer.warmup_steps={steps // 10}"]
    if not (folder / "training.json").exists():
        training.train(
            read_config(CONFIG, training.LmSettings, overrides),
            TrainingWatch(notice=lambda line: print(f"  {line}", flush=True)),
        )
    return replace(load(folder, dtype="float32", device="cpu"), name=name_of(memory, seed))


def measured(lm: LM, memories: Sequence[int], out: Path, repeats: int) -> None:
    """Measure a model with each memory, into out/measured/MODEL/PART-MEMORY."""
    settings: Sequence[tuple[str, Sequence[int], str, int]] = (
        (TEXT, SPANS, f"perplexity:target_tokens={SEGMENT}", 2 * repeats),
        (TEXT, SPANS[-1:], "perplexity:targets=all", 2 * repeats),
        (TEXT, LENGTHS, "curve", 2 * repeats),
        (f"shuffled:{TEXT}", LENGTHS, "curve", repeats),
    )
    for memory in memories:
        for part, (text, lengths, task, times) in zip(PARTS, settings, strict=True):
            into = out / "measured" / lm.name / f"{part}-{memory}"
            measure([lm], [reading(memory, SEGMENT)], [task], text=text, lengths=lengths, repeats=times, out=into)


def found_in(folder: Path) -> tuple[dict[str, Read], int]:
    """Return what was recorded, by a name of the models and the memory they were read with, and the number of seeds."""
    seeds = [seed for seed in SEEDS if all(complete(folder, name_of(memory, seed), memory) for memory in TRAINED)]
    kinds = {f"trained with {memory}": [name_of(memory, seed) for seed in seeds] for memory in TRAINED}
    kinds["embedded model"] = [EMBEDDED]
    found = {}
    for kind, names in kinds.items():
        for memory in MEMORIES:
            if names and all(complete(folder, name, memory) for name in names):
                rows = [[rows_of(folder, name, part, memory) for name in names] for part in PARTS]
                nats, means = np.array([by_text(one) for one in rows[0]]), np.array([over_all(one) for one in rows[1]])
                natural, shuffled = ([stats.curve(one) for one in part] for part in rows[2:])
                found[f"{kind}, read with {memory}"] = Read(nats, means, natural, shuffled)
    return found, len(seeds)


def complete(folder: Path, model: str, memory: int) -> bool:
    return all(rows_of(folder, model, part, memory) for part in PARTS)


def rows_of(folder: Path, model: str, part: str, memory: int) -> list[Row]:
    rows = recorded(folder, model, f"{part}-{memory}")[1]
    assert all(row.status == "ok" for row in rows), [row.reason for row in rows if row.status != "ok"]
    return rows


def by_text(rows: Sequence[Row]) -> np.ndarray:
    """Return nats [texts, spans]."""
    (one,) = perplexities(rows)
    return one.values("nats")


def over_all(rows: Sequence[Row]) -> np.ndarray:
    """Return the mean nats of the first tokens of each text, up to each span [texts, spans]."""
    (one,) = perplexities(rows)
    return running_mean(one, "nats")[:, np.searchsorted(one.ends, SPANS)]


def mean_halves(curves: Sequence[stats.MeasuredCurve]) -> list[np.ndarray]:
    """Return copy and control by length, means over texts and seeds."""
    return [np.mean([stats.measured_mean(getattr(one, half)) for one in curves], 0) for half in ("copy", "control")]


def gain(before: Read, after: Read) -> Interval:
    """Return the nats per token by which the second is better at the last span, over texts."""
    return interval((before.nats - after.nats)[:, :, -1].mean(0))


def fall(nats: np.ndarray) -> Interval:
    """Return by how many nats per token the second span is above the last, over texts."""
    return interval((nats[:, :, 1] - nats[:, :, -1]).mean(0))


def ratio(before: Sequence[stats.MeasuredCurve], after: Sequence[stats.MeasuredCurve], name: str) -> Interval:
    """Return the geometric mean over the seeds of a number of the curves over that of others, paired by text (delta
    method; spreads are those of the bootstrap, quantiles Student's; the interval covers where interpolation can move
    the numbers, `stats.interpolated`). NaN where one is 0."""
    g = stats.multipliers(len(before[0].copy), stats.BOOTSTRAPS, 0)
    logs, texts, drawn = [], list[float](), np.zeros(len(g))
    for one, other in zip(before, after, strict=True):
        assert (one.targets == other.targets).all(), "other texts"
        (a, a_low, a_high), (b, b_low, b_high) = (with_interpolation(curve, name) for curve in (one, other))
        if not a or not b:
            return np.nan, np.nan, np.nan
        logs.append(np.log([b / a, b_low / a_high, b_high / a_low]))
        texts += [stats.repeats_of(one, name, a), stats.repeats_of(other, name, b)]
        drawn += (stats.headlines_sampled(other, g)[name][0] / b - stats.headlines_sampled(one, g)[name][0] / a) / len(
            before
        )
    half = float(student.ppf(0.975, min(texts) - 1) * np.std(drawn))
    return tuple(np.exp(np.mean(logs, 0) + np.array([0, -half, half])).tolist())


def verdict(value: Interval) -> str:
    if value[1] > 1 / FACTOR and value[2] < FACTOR:
        return "does not move"
    return "moves" if value[1] > FACTOR or value[2] < 1 / FACTOR else "open"


def pairs(found: Mapping[str, Read]) -> Iterator[tuple[str, Read, Read]]:
    """Yield what is compared: a name, without and with the memory."""
    most = TRAINED[1]
    for name, before, after in (
        ("trained without and with", "trained with 0, read with 0", f"trained with {most}, read with {most}"),
        (
            "trained with, read without and with",
            f"trained with {most}, read with 0",
            f"trained with {most}, read with {most}",
        ),
        ("embedded model, read without and with", "embedded model, read with 0", f"embedded model, read with {most}"),
    ):
        if before in found and after in found:
            yield name, found[before], found[after]


def perplexity_table(found: Mapping[str, Read]) -> str:
    head = ["nats per token", "of", *(f"{n:,} tokens" for n in SPANS), f"{SPANS[1]:,} less {SPANS[-1]:,}"]
    lines = []
    for name, one in found.items():
        for of, nats in (("the same tokens", one.nats), ("all tokens", one.means)):
            cells = [f"{mean:.3f}" for mean in nats.mean((0, 1))]
            lines.append([name, of, *cells, with_ends(fall(nats), 3, "+")])
    return table(head, lines)


def memory_table(found: Mapping[str, Read]) -> str:
    shown = [n for n in (16, 32, 64, 128, 256, 384, 512, 640) if n in LENGTHS]
    lines = []
    for name, one in found.items():
        for text, of in (("natural", one.natural), ("shuffled", one.shuffled)):
            at = np.searchsorted(of[0].lengths, shown)
            copy, control = (means[at] for means in mean_halves(of))
            cells = [f"{c:.2f} / {m:.2f}" for c, m in zip(copy, control, strict=True)]
            numbers = [", ".join(f"{stats.headline(curve)[what][0]:.0f}" for curve in of) for what in SHOWN]
            lines.append([name, text, *cells, *numbers])
    return table(["copy / control", "text", *(f"{n:,}" for n in shown), "half-life", "reach"], lines)


def claims_table(found: Mapping[str, Read]) -> str:
    lines = []
    for name, before, after in pairs(found):
        for text in ("natural", "shuffled"):
            ratios = [ratio(getattr(before, text), getattr(after, text), what) for what in SHOWN]
            cells = ["none" if np.isnan(value[0]) else f"{with_ends(value)}, {verdict(value)}" for value in ratios]
            lines.append([name, str(len(before.nats)), with_ends(gain(before, after), 3, "+"), text, *cells])
    return table(["models", "seeds", "nats gained at 2,048", "text", "half-life, ratio", "reach, ratio"], lines)


TABLES = {"perplexity": perplexity_table, "memory": memory_table, "claims": claims_table}


def page(found: Mapping[str, Read]) -> str:
    """Return the page, with its tables made again."""
    return with_tables(PAGE.read_text(), lambda name: TABLES[name](found))


def judged(found: Mapping[str, Read], seeds: int) -> tuple[dict[str, Any], list[str]]:
    """Return the figures, and the bounds that were missed."""
    figures: dict[str, Any] = {"seeds": seeds}
    missed = [] if seeds >= len(SEEDS) else [f"{seeds} of {len(SEEDS)} seeds were trained"]
    for name, before, after in pairs(found):
        gained = gain(before, after)
        times = ratio(before.natural, after.natural, "half_life")
        figures[name] = {"nats": gained, "half_life": times, "verdict": verdict(times)}
        if gained[1] <= 0:
            missed.append(f"{name}: perplexity gains {with_ends(gained, 3, '+')} nats")
        if verdict(times) == "open":
            missed.append(f"{name}: the half-life's ratio is {with_ends(times)}")
    return figures, missed


def draw(found: Mapping[str, Read], file: Path) -> None:
    """Draw nats by the text before the scored tokens, and copy and control by length (figure 5)."""
    nats, natural, shuffled = list[Line](), list[Line](), list[Line]()
    for index, (name, one) in enumerate(found.items()):
        label = f"{name} ({'1 model' if name.startswith('embedded') else f'{len(one.nats)} seeds'})"
        nats.append(Line(label, SPANS, one.nats.mean((0, 1)), index))
        nats.append(Line("", SPANS, one.means.mean((0, 1)), index, style="dotted"))
        for lines, of in ((natural, one.natural), (shuffled, one.shuffled)):
            copy, control = mean_halves(of)
            lines += [Line(label, of[0].lengths, copy, index), Line("", of[0].lengths, control, index, style="dotted")]
    size: dict[str, Any] = {"num_members": len(found)}
    panels = [
        Figure(
            "Same 128 tokens (solid), all tokens (dotted)", "length of the text (tokens)",
            "nats per token", nats, log_x=True, ticks=SPANS, **size,
        )
    ]  # fmt: skip
    for kind, lines in (("Natural", natural), ("Shuffled", shuffled)):
        title, x = f"{kind} text: copy (solid) and control (dotted)", "length of the text to be copied (tokens)"
        panels.append(Figure(title, x, "accuracy", lines, span=(0.0, 1.0), **size))
    only_png(draw_grid([panels], file.parent, file.stem))


def run(out: Path, steps: int | None, repeats: int) -> None:
    """Train and measure what is not there yet."""
    embedded = replace(load(folder_of(DEMO), dtype="float32", device="cpu"), name=EMBEDDED)
    for shorter in (False, True):  # first, of all seeds, what is compared
        for seed in SEEDS:
            for memory in TRAINED:
                memories = [one for one in MEMORIES if one < memory] if shorter else [memory]
                print(f"{name_of(memory, seed)}, read with {', '.join(map(str, memories)) or 'no other'}", flush=True)
                measured(trained(memory, seed, out, steps), memories, out, repeats)
        measured(embedded, MEMORIES, out, repeats)


def main() -> None:
    parser = parser_of(__doc__, "8 steps and 3 texts")
    parser.add_argument("--out", type=Path, default=Path("runs/llama_xl"), help="keep models and rows here")
    parser.add_argument("--steps", type=int, help="of each training; default: those of the config")
    parser.add_argument("--repeats", type=int, default=8, help="shuffled texts; twice as many natural ones")
    parser.add_argument("--record", action="store_true", help="keep the rows beside this script, and make the page")
    parser.add_argument("--recorded", action="store_true", help="judge the rows kept beside this script")
    parser.add_argument("--picture", type=Path, help="draw into this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = ROWS
    if not options.recorded:
        steps, repeats = (8, 3) if options.quick else (options.steps, options.repeats)
        run(options.out, steps, repeats)
        folder = options.out / "recorded"
        record(options.out / "measured", folder)
        if options.record:
            print(f"{record(options.out / 'measured', ROWS):,} bytes of rows")
    found, seeds = found_in(folder)
    for made in TABLES.values():
        print(made(found), end="\n\n")
    if options.record or options.recorded:
        PAGE.write_text(page(found))
    if options.picture:
        draw(found, options.picture)
    figures, missed = judged(found, seeds)
    end(figures, missed, options.check)


if __name__ == "__main__":
    run_script(main)
