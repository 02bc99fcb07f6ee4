"""Whether Sparse Memory Training extends a model: expectation, memory, and what the old window loses.

    python benchmarks/smt_extend.py [RECIPE ...] [--out FOLDER] [--picture FILE] [--repeats N] [--steps N]
                                    [--quick] [--check]

The embedded model, trained on 512 tokens, is taken to 4,096 from `configs/smt-demo.toml` by each recipe (default all),
with the same rows of the same documents where the recipe does not say otherwise, and measured on held-out files:

    perplexity   every token of 4,096 in one pass, as in tables 1, 4, 9 and 11 of the paper: means over the first L
    more context the same last 128 tokens behind more and more text
    memory       the forgetting curve, natural and shuffled text, up to a context of 4,096

with full attention, the first also under StreamingLLM and LM-Infinite. Beside them stands the model as it is,
alone and under YaRN, NTK, StreamingLLM and LM-Infinite. A recipe lengthens memory if its half-life is at least 4 times
the model's, paired over documents, and it copies at least 0.1 more than it guesses at a context of 2,048. One seed.

Trainings and measurements are kept in --out and continued. --check fails when a bound is missed. Last line: the figures
as JSON.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from scipy.stats import t as student

from farspan import LM, CurveSettings, Row, load, measure_curves, method, stats
from farspan.demo import embedded_model
from farspan.perplexity import PerplexitySettings, measure_perplexity
from farspan.report import perplexity as report
from farspan.train import smt
from farspan.train.config import read_config

CONFIG = Path(__file__).parent.parent / "configs" / "smt-demo.toml"
WINDOW, TARGET = 512, 4096  # tokens
TEXT = "builtin:held-out+tests"
PERPLEXITY_LENGTHS = (256, 512, 1024, 2048, 4096)
CURVE_LENGTHS = (64, 128, 192, 254, 320, 384, 511, 640, 768, 1023, 1279, 1535, 2047)
SHUFFLED_LENGTHS = (128, 254, 511, 1023, 2047)
ASKED = 1023  # tokens of a text whose context, twice that and two separators, is 4 windows
NEAR = {"streaming": "sinks:window=508,sinks=4", "infinite": "lambda_mask:window=512"}  # table 9's two
UNTRAINED = {
    f"{kind}{factor}": f"rope:type={kind},factor={factor}" for kind, factor in (("yarn", 8), ("yarn", 4), ("ntk", 8))
}

# what differs from the config and from COMMON, as `farspan train smt --set` takes it
COMMON = ("optimizer.lr=1e-3", "trainer.batch=2", "trainer.micro_batch=2", "trainer.attention=eager", "watch.every=0")
YARN = "model.rope='rope:type=yarn,factor=8'"
SPANS, SKIP, EVERYTHING = "smt.draw='spans:span=32'", "smt.draw='skip'", "trained.what='all'"
RECIPES: dict[str, tuple[str, ...]] = {
    "smt": (),
    "yarn-smt": (YARN,),
    "yarn-spans-all": (YARN, SPANS, EVERYTHING),
    "unmixed": ("smt.mixed='off'",),
    "spans": (SPANS,),
    "yarn-skip": (YARN, SKIP),
    "skip": (SKIP,),
    "full": ("smt.draw='full'", "trainer.batch=1", "trainer.micro_batch=1", "trainer.attention=sdpa"),
    "uniform": ("smt.draw='uniform'",),
    "pose": ("smt.draw='pose'",),
    "yarn-skip-all": (YARN, SKIP, EVERYTHING, "optimizer.name='muon'", "optimizer.decay_fraction=0.5"),
}
SHARE = {"full": 0.36, "yarn-skip-all": 3.0}  # of the steps: one of full length takes longer; and what more would give
BOUNDS = {  # nats per token, but the last two: times, and accuracy
    "base_at_4096_over_512": ("at least", 1.0),
    "smt_at_4096_over_512": ("at most", 0.0),
    "smt_more_context": ("at most", 0.0),
    "smt_window_lost": ("at most", 0.05),
    "unmixed_window_lost_more": ("at least", 0.0),
    "half_life_ratio": ("at least", 4.0),
    "gap_at_2048": ("at least", 0.1),
}


def settings_of(name: str, out: Path, steps: int) -> smt.SmtSettings:
    """The config of a recipe."""
    own = round(steps * SHARE.get(name, 1.0))
    overrides = [*COMMON, *RECIPES[name], f"out='{out / 'models' / name}'", f"trainer.steps={own}"]
    overrides += [f"optimizer.warmup_steps={own // 10}", "trainer.log_every=20", "trainer.save_every=100"]
    return read_config(CONFIG, smt.SmtSettings, overrides)


def extended(name: str, out: Path, steps: int) -> LM:
    """The model that a recipe makes; trained where it is not there yet."""
    settings = settings_of(name, out, steps)
    if not (Path(settings.out) / "training.json").exists():
        started = time.process_time()
        smt.train(settings, notice=lambda text: print(f"  {text}", flush=True))
        (Path(settings.out) / "cpu_seconds").write_text(f"{time.process_time() - started:.0f}")
    return replace(load(settings.out, dtype="float32", device="cpu"), name=name)


def measured(lm: LM, methods: Sequence[str], out: Path, repeats: int, quick: bool) -> dict[str, Any]:
    """What is measured of a model, by method."""
    lengths = (256, 512, 1024) if quick else PERPLEXITY_LENGTHS
    folder = out / "measured" / lm.name
    every, more = (
        measure_perplexity([lm], methods, PerplexitySettings(TEXT, of, repeats, targets=what, **given), folder / what)
        for what, of, given in (("all", lengths[-1:], {}), ("fixed", lengths, {"target_tokens": 128}))
    )
    recalling = [how for how in methods if how not in NEAR.values()]
    natural, shuffled = (
        measure_curves([lm], recalling, CurveSettings(text=text, lengths=of, repeats=repeats), folder / kind)
        for kind, text, of in (
            ("natural", TEXT, (64, 254, 511) if quick else CURVE_LENGTHS),
            ("shuffled", f"shuffled:{TEXT}", (64, 254, 511) if quick else SHUFFLED_LENGTHS),
        )
    )
    return {
        how: {
            "every": report.series(of_method(every, how))[0],
            "more": report.series(of_method(more, how))[0],
            **{
                kind: stats.curve(of_method(rows, how)) if how in recalling else None
                for kind, rows in (("natural", natural), ("shuffled", shuffled))
            },
        }
        for how in methods
    }


def of_method(rows: Sequence[Row], how: str) -> list[Row]:
    found = [row for row in rows if row.method == str(method(how))]
    assert all(row.status == "ok" for row in found), [row.reason for row in found if row.status != "ok"]
    return found


def up_to(one: report.Series) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Lengths, and nats and accuracy [repeats, lengths] of all tokens up to each."""
    widths = np.diff([0, *one.ends])
    nats, accuracy = (
        np.cumsum(values * widths, 1) / np.cumsum(widths) for values in (one.position_nats, one.position_accuracy)
    )
    which = [i for i, end in enumerate(one.ends) if end >= 256]
    return [one.ends[i] for i in which], nats[:, which], accuracy[:, which]


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """Mean over documents and its 95 % interval (Student's)."""
    half = student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean()), float(values.mean() - half), float(values.mean() + half)


def ratio(curve: stats.Curve, base: stats.Curve) -> dict[str, float]:
    """Half-life over the base's, paired by document: its 95 % interval (delta method), and p of its being at most 4.
    Spreads are those of the bootstrap, quantiles Student's, as in `farspan.paired`."""
    pair = [one.kept(one.measured) for one in (base, curve)]
    assert (pair[0].targets == pair[1].targets).all(), "other documents"
    g = stats.multipliers(len(pair[0].copy), stats.BOOTSTRAPS, 0)
    (a, _), (b, censored) = (stats.headline(one)["half_life"] for one in pair)
    drawn_a, drawn_b = (stats.headlines_drawn(one, g)["half_life"][0] for one in pair)
    freedom = len(pair[0].copy) - 1
    half = float(student.ppf(0.975, freedom) * np.std(drawn_b - b / a * drawn_a)) / a
    error = float(np.std(drawn_b - 4 * drawn_a))
    p = float(student.sf((b - 4 * a) / error, freedom))
    return {"ratio": b / a, "low": b / a - half, "high": b / a + half, "p_under_4": p, "censored": float(censored)}


def nearest(curve: stats.Curve) -> int:
    """Which of its lengths is nearest to the one asked about."""
    return int(np.argmin(np.abs(curve.lengths - ASKED)))


def gap_at_four_windows(curve: stats.Curve) -> tuple[float, float, float]:
    """Copy above control, with its interval."""
    return interval((curve.copy - curve.control)[:, nearest(curve)])


def said(values: tuple[float, float, float], digits: int = 2, sign: bool = False) -> str:
    mean, low, high = values
    return f"{mean:{'+' if sign else ''}.{digits}f} ± {(high - low) / 2:.{digits}f}"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def expectation_tables(found: dict[str, dict[str, Any]], base: dict[str, Any]) -> tuple[str, str]:
    """Tables 1, 9 and 11 in small: all tokens up to L; and the same tokens behind more text."""
    lengths, base_nats, _ = up_to(base["every"])
    first, second = [], []
    for name, one in found.items():
        _, nats, accuracy = up_to(one["every"])
        inside = interval(nats[:, 1] - base_nats[:, 1])
        cells = [f"{np.exp(nats[:, i].mean()):,.2f} / {accuracy[:, i].mean():.2f}" for i in range(len(lengths))]
        tail = interval(one["every"].position_nats[:, -1])
        first.append([name, *cells, said(tail), said(inside, 3, sign=True) if one is not base else "0"])
        more = one["more"].nats
        changes = [said(interval(more[:, i] - more[:, 1]), sign=True) for i in range(2, more.shape[1])]
        second.append([name, said(interval(more[:, 1])), *changes])
    tail = f"nats, {base['every'].ends[-2]:,} to {lengths[-1]:,}"
    return (
        table(["", *(f"{n:,}" for n in lengths), tail, "nats lost within 512"], first),
        table(["", "512", *(f"{n:,} - 512" for n in base["more"].lengths[2:])], second),
    )


def memory_table(found: dict[str, dict[str, Any]], base: dict[str, Any]) -> str:
    natural, shuffled = base["natural"].lengths, base["shuffled"].lengths
    shown = [n for n in (128, 254, 511, 1023, 1535, 2047) if n in natural]
    lines = []
    for name, one in found.items():
        cells = []
        for length in shown:
            at = int(np.flatnonzero(natural == length)[0])
            copy, control = (stats.measured_mean(getattr(one["natural"], half))[at] for half in ("copy", "control"))
            cells.append(f"{copy:.2f} / {control:.2f}")
        half_life = str(stats.summarise(one["natural"]).half_life)
        gap = said(gap_at_four_windows(one["natural"]))
        r = ratio(one["natural"], base["natural"])
        times = "1" if one is base else f"{r['ratio']:.2f} [{r['low']:.2f}, {r['high']:.2f}]"
        recalled = [f"{value:.2f}" for value in stats.measured_mean(one["shuffled"].copy)]
        reach = str(stats.summarise(one["shuffled"]).reach)
        lines.append([name, *cells, gap, half_life, times, *recalled, reach])
    head = ["copy / control", *(f"{n:,}" for n in shown), f"gap at {min(ASKED, natural[-1]):,}", "half-life", "× base"]
    head += [*(f"shuffled {n:,}" for n in shuffled), "its reach"]
    return table(head, lines)


def figures_of(found: dict[str, dict[str, Any]], base: dict[str, Any]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    lengths, base_nats, _ = up_to(base["every"])
    for name, one in found.items():
        _, nats, _ = up_to(one["every"])
        more = one["more"].nats
        figures[name] = {
            "nats": dict(zip(lengths, nats.mean(0).round(3).tolist(), strict=True)),
            "last_over_512": interval(nats[:, -1] - nats[:, 1]),
            "more_context": interval(more[:, -1] - more[:, 1]),
            "window_lost": interval(nats[:, 1] - base_nats[:, 1]),
        }
        if one["natural"] is not None:
            scaled = found[f"base + {next(iter(UNTRAINED))}"]["shuffled"]
            at = nearest(scaled)
            figures[name] |= {
                "gap": gap_at_four_windows(one["natural"]),
                "half_life": ratio(one["natural"], base["natural"]),
                "shuffled_reach": str(stats.summarise(one["shuffled"]).reach),
                "shuffled_over_yarn": interval(one["shuffled"].copy[:, at] - scaled.copy[:, at]),
            }
    return figures


def judged(figures: dict[str, Any]) -> dict[str, float]:
    """What the bounds are about; of memory, the recipe whose half-life grew most."""
    values = {"base_at_4096_over_512": figures["base"]["last_over_512"][0]}
    if "smt" in figures:
        values |= {
            "smt_at_4096_over_512": figures["smt"]["last_over_512"][0],
            "smt_more_context": figures["smt"]["more_context"][0],
            "smt_window_lost": figures["smt"]["window_lost"][0],
        }
    if {"smt", "unmixed"} <= set(figures):
        lost = (figures[name]["window_lost"][0] for name in ("unmixed", "smt"))
        values["unmixed_window_lost_more"] = next(lost) - next(lost)
    trained = [figures[name] for name in RECIPES if name in figures]
    if trained:
        best = max(trained, key=lambda one: one["half_life"]["ratio"])
        values |= {"half_life_ratio": best["half_life"]["ratio"], "gap_at_2048": best["gap"][0]}
    return values


def draw(found: dict[str, dict[str, Any]], file: Path) -> None:
    """Nats per token by position, and the memory index by length."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, (name, one) in enumerate(found.items()):
        style = {
            "linestyle": "--" if name.startswith("base") else "-",
            "color": colormaps["tab20"](index),
            "label": name,
        }
        left.plot(one["every"].ends, one["every"].position_nats.mean(0), **style)
        right.plot(one["natural"].lengths, stats.memory_index(one["natural"]), **style)
    left.set(xscale="log", xlabel="position (tokens)", ylabel="nats per token", ylim=(1.3, 4.2))
    left.set_title("expects what comes")
    left.axvline(WINDOW, color="#777777", linestyle=":")
    right.set(xlabel="length of the text to be copied (tokens)", ylabel="memory index", title="remembers what was")
    right.axhline(stats.HALF_LIFE, color="#777777", linestyle=":")
    figure.legend(*right.get_legend_handles_labels(), loc="outside right upper", fontsize=8, frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.25)
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--out", type=Path, help="keep models and rows here, and continue them")
    parser.add_argument("--picture", type=Path, help="draw into this file")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="two recipes of few steps, short texts")
    parser.add_argument("--check", action="store_true", help="fail when a bound is missed")
    options = parser.parse_args()
    if unknown := set(options.recipes) - set(RECIPES):
        parser.error(f"unknown recipes {', '.join(sorted(unknown))}; known are {', '.join(RECIPES)}")
    names = options.recipes or (["smt", "yarn-smt"] if options.quick else list(RECIPES))
    steps, repeats = (16, 4) if options.quick else (options.steps, options.repeats)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        lm = replace(embedded_model(), name="base")
        near = list(NEAR.values())
        untrained = ["full", *(list(UNTRAINED.values())[:1] if options.quick else UNTRAINED.values()), *near]
        labels = {how: label for label, how in (UNTRAINED | NEAR).items()}
        found = {
            "base" if how == "full" else f"base + {labels[how]}": one
            for how, one in measured(lm, untrained, out, repeats, options.quick).items()
        }
        for index, name in enumerate(names):
            print(f"{name}: {' '.join(RECIPES[name])}", flush=True)
            of_methods = measured(
                extended(name, out, steps), ["full", *(near if index == 0 else [])], out, repeats, options.quick
            )
            for how, one in of_methods.items():
                found[name if how == "full" else f"{name} + {labels[how]}"] = one
    base = found["base"]
    for text in expectation_tables(found, base):
        print(f"\n{text}")
    remembering = {name: one for name, one in found.items() if one["natural"] is not None}
    print(f"\n{memory_table(remembering, base)}\n")
    if options.picture:
        draw(remembering, options.picture)
    figures = figures_of(found, base)
    values = judged(figures)
    print(json.dumps({"judged": values, **figures}))
    missed = [
        f"{name} = {value:.3g}, {how} {bound}"
        for name, value in values.items()
        for how, bound in [BOUNDS[name]]
        if (value < bound if how == "at least" else value > bound)
    ]
    if options.check and missed:
        sys.exit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
