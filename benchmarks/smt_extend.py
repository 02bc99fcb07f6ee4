"""Whether Sparse Memory Training extends a model: perplexity, memory, and what the old window loses.

    python benchmarks/smt_extend.py [RECIPE ...] [--model FOLDER] [--out FOLDER] [--picture FILE] [--repeats N]
                                    [--steps N] [--quick] [--check]
    python benchmarks/smt_extend.py [RECIPE ...] --paired [--seeds 0 1 2] [--out FOLDER] [--repeats N]
    python benchmarks/smt_extend.py --out FOLDER --record | --recorded [--paired] [--picture FILE] [--check]

The embedded model, or --model, trained on 512 tokens, is taken to 4,096 from `configs/smt-demo.toml` by each recipe,
with the same rows of the same documents, where the recipe has no others, and measured on held-out files:

    perplexity   every token of 4,096 in one pass, as in tables 1, 4, 9 and 11 of the paper: means over the first L
    more context the same last 128 tokens after more and more text
    memory       the forgetting curve, natural and shuffled text, up to a context of 4,096

with full attention, `smt` also under StreamingLLM and LM-Infinite. The untrained model is measured as well, alone and
under YaRN, NTK, StreamingLLM and LM-Infinite. A recipe lengthens memory if its half-life is at least 4 times the
model's, paired over documents, and it copies at least 0.1 more than it guesses at a context of 2,048. Where the memory
index is near 0.5 over many lengths, small differences change the half-life a lot. The span, the area under the memory
index, is robust to them, so a second claim of ours is 4 times the span, on natural and on shuffled text.

A claim is met if its mean and its 95 % interval are within the bound, and missed otherwise.

--paired measures less: copy and control of natural text alone, of the recipes against the model under YaRN (factor 8),
which is not trained, as differences over the same texts. The seeds of a recipe are averaged text by text.

Trainings and measurements are kept in --out and continued. --record keeps the rows of --out in benchmarks/smt_extend/;
--recorded prints and judges these instead of measuring. --check fails when a bound is missed. Last line: the claims
as JSON.
"""

import argparse
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import recorded as kept
import torch
from common import (
    Interval,
    end,
    folder_or_scratch,
    interval,
    only_png,
    parser_of,
    run_script,
    running_mean,
    table,
    with_ends,
)
from scipy.stats import t as student

from farspan import LM, Row, load, measure, method, stats
from farspan.loading.places import DEMO, folder_of
from farspan.report import perplexity as report
from farspan.report.figure import Figure, Line, Rule
from farspan.report.picture import draw_grid
from farspan.train import smt
from farspan.train.config import read_config
from farspan.train.progress import TrainingWatch

RECORDED = Path(__file__).with_suffix("")
CONFIG = Path(__file__).parent.parent / "configs" / "smt-demo.toml"
WINDOW = 512  # tokens; the target is 8 times it
TEXT = "builtin:held-out+tests"
PERPLEXITY_LENGTHS = (256, 512, 1024, 2048, 4096)
CURVE_LENGTHS = (64, 128, 192, 254, 320, 384, 511, 640, 768, 1023, 1279, 1535, 2047)
SHUFFLED_LENGTHS = (128, 254, 511, 1023, 2047)
PAIRED_LENGTHS = (127, 254, 511, 1023, 1535, 2047)
BASE, YARNED, PAIRED = "base", "base + yarn8", "paired"
MUCH_MORE = 0.05  # nats
ASKED = 1023  # tokens of a text whose context, twice that and two separators, is 4 windows
NEAR = {"streaming": "sinks:window=508,sinks=4", "infinite": "lambda_mask:window=512"}  # table 9's two
UNTRAINED = {"yarn8": "rope:type=yarn,factor=8", "yarn4": "rope:type=yarn,factor=4", "ntk8": "rope:type=ntk,factor=8"}
LABELS = {how: label for label, how in (UNTRAINED | NEAR).items()}

# what differs from the config and from COMMON, as `farspan train smt --set` takes it
COMMON = ("optimizer.lr=1e-3", "trainer.batch=2", "trainer.micro_batch=2", "trainer.attention=eager", "watch.every=0")
YARN, NTK = (f"model.rope='{UNTRAINED[label]}'" for label in ("yarn8", "ntk8"))
SPANS, SKIP, ALL, AGAIN = "smt.draw='spans:span=32'", "smt.draw='skip'", "trained.what='all'", "trainer.seed=1"
REPEAT = "smt.draw='skip:repeat=0.2'"
RECIPES: dict[str, tuple[str, ...]] = {
    "smt": (),
    "yarn-repeat": (YARN, REPEAT),
    "unmixed": ("smt.mixed='off'",),
    "uniform": ("smt.draw='uniform'",),
    "pose": ("smt.draw='pose'",),
    "full": ("smt.draw='full'", "trainer.batch=1", "trainer.micro_batch=1", "trainer.attention=sdpa"),
    # the rest by name
    "yarn-skip": (YARN, SKIP),
    "yarn-repeat-only": (YARN, "smt.draw='skip:repeat=1'"),
    "yarn-repeat-half": (YARN, "smt.draw='skip:repeat=0.5'"),
    "repeat-only": ("smt.draw='skip:repeat=1'",),
    "yarn-repeat-again": (YARN, REPEAT, AGAIN),
    "yarn-smt": (YARN,),
    "ntk-smt": (NTK,),
    "smt-long": (),
    "all": (ALL,),
    "smt-again": (AGAIN,),
    "yarn-skip-again": (YARN, SKIP, AGAIN),
    "spans": (SPANS,),
    "skip": (SKIP,),
    "yarn-skip-all": (YARN, SKIP, ALL, "optimizer.name='muon'", "optimizer.decay_fraction=0.5"),
    "yarn-spans-all": (YARN, SPANS, ALL),
}
DEFAULT = tuple(RECIPES)[:6]
SHARE = {"full": 0.36, "smt-long": 4.0, "yarn-skip-all": 3.0}  # of the steps; one of full length takes longer


@dataclass(frozen=True)
class Found:
    """What is measured of a model under a method."""

    every: report.PerplexityMember  # all tokens
    more: report.PerplexityMember  # the last ones, after more and more text
    natural: stats.MeasuredCurve | None
    shuffled: stats.MeasuredCurve | None

    def up_to(self) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Lengths, and nats and accuracy [repeats, lengths] of all tokens up to each."""
        ends = np.array(self.every.ends)
        kept = ends >= PERPLEXITY_LENGTHS[0]
        nats, hits = (running_mean(self.every, of)[:, kept] for of in ("nats", "hits"))
        return ends[kept].tolist(), nats, hits

    def gap(self) -> Interval:
        """Copy above control at a context of 4 windows."""
        assert self.natural is not None
        at = int(np.argmin(np.abs(self.natural.lengths - ASKED)))
        return interval((self.natural.copy - self.natural.control)[:, at])


def extended(name: str, model: str, out: Path, steps: int, seed: int = 0, more: Sequence[str] = ()) -> LM:
    """What a recipe makes of a model; trained where it is not there yet. `more`: further settings."""
    own, folder = round(steps * SHARE.get(name, 1.0)), out / "models" / (f"{name}-{seed}" if seed else name)
    overrides = [*COMMON, *RECIPES[name], f"model.name='{model}'", f"out='{folder}'", f"trainer.steps={own}"]
    overrides += [f"optimizer.warmup_steps={own // 10}", "trainer.log_every=20", "trainer.save_every=100"]
    overrides += [*([f"trainer.seed={seed}"] if seed else []), *more]
    if not (folder / "training.json").exists():
        started = time.process_time()
        smt.train(
            read_config(CONFIG, smt.SmtSettings, overrides),
            TrainingWatch(notice=lambda text: print(f"  {text}", flush=True)),
        )
        print(f"  trained in {time.process_time() - started:.0f} CPU seconds", flush=True)
    return replace(load(folder, dtype="float32", device="cpu"), name=name)


def measured(lm: LM, methods: Sequence[str], out: Path, repeats: int, quick: bool) -> dict[str, Found]:
    """By model and method."""
    lengths = PERPLEXITY_LENGTHS[:3] if quick else PERPLEXITY_LENGTHS
    folder = out / "measured" / lm.name
    every, more = (
        measure([lm], methods, [task], text=TEXT, lengths=of, repeats=repeats, out=folder / what).rows
        for what, of, task in (
            ("all", lengths[-1:], "perplexity:targets=all"),
            ("fixed", lengths, "perplexity:target_tokens=128"),
        )
    )
    recalling = [how for how in methods if how not in NEAR.values()]
    natural, shuffled = (
        measure([lm], recalling, ["curve"], text=text, lengths=of, repeats=repeats, out=folder / kind).rows
        for kind, text, of in (
            ("natural", TEXT, (64, 254, 511) if quick else CURVE_LENGTHS),
            ("shuffled", f"shuffled:{TEXT}", (128, 254, 511) if quick else SHUFFLED_LENGTHS),
        )
    )
    return found_of(lm.name, methods, {"all": every, "fixed": more, "natural": natural, "shuffled": shuffled})


def found_of(name: str, methods: Sequence[str], rows: Mapping[str, Sequence[Row]]) -> dict[str, Found]:
    """By model and method, from the rows of each part."""
    return {
        name if how == "full" else f"{name} + {LABELS[how]}": Found(
            report.series(of_method(rows["all"], how))[0],
            report.series(of_method(rows["fixed"], how))[0],
            *(
                None if how in NEAR.values() else stats.curve(of_method(rows[part], how))
                for part in ("natural", "shuffled")
            ),
        )
        for how in methods
    }


def recorded_models() -> dict[str, Found]:
    """By model and method, from the rows that are kept with the project."""
    found: dict[str, Found] = {}
    for name in ("base", *RECIPES):
        rows = {part: kept.recorded(RECORDED, name, part)[1] for part in ("all", "fixed", "natural", "shuffled")}
        present = {row.method for row in rows["all"]}
        found |= found_of(name, [how for how in ("full", *LABELS) if str(method(how)) in present], rows)
    return found


def of_method(rows: Sequence[Row], how: str) -> list[Row]:
    found = [row for row in rows if row.method == str(method(how))]
    assert all(row.status == "ok" for row in found), [row.reason for row in found if row.status != "ok"]
    return found


def with_interpolation(curve: stats.MeasuredCurve, name: str) -> Interval:
    """Return a number of a curve, and the ends between which interpolation can move it."""
    value, is_censored = stats.headline(curve)[name]
    less, more = stats.interpolated(curve, name, value, is_censored)
    return value, value - less, value + more


def times(curve: stats.MeasuredCurve | None, base: stats.MeasuredCurve | None, name: str, tests: int = 1) -> Interval:
    """A number of a curve over that of the base's, paired by document (delta method). Spreads are those of the
    bootstrap, quantiles Student's, as in `farspan.stats`; the interval covers where interpolation can move a half-life
    (`stats.interpolated`). NaN, which meets no bound, where the base's is 0.

    Args:
        tests: the number of tests that Bonferroni's correction of the interval is for.
    """
    assert curve is not None
    assert base is not None
    shared = np.isin(base.lengths, curve.lengths), np.isin(curve.lengths, base.lengths)
    assert (base.targets[:, shared[0]] == curve.targets[:, shared[1]]).all(), "other documents"
    g = stats.multipliers(len(base.copy), stats.BOOTSTRAPS, 0)
    (a, a_low, a_high), (b, b_low, b_high) = (with_interpolation(one, name) for one in (base, curve))
    if a == 0:
        return math.nan, math.nan, math.nan
    if curve is base:
        return 1.0, 1.0, 1.0
    drawn_a, drawn_b = (stats.headlines_sampled(one, g)[name][0] for one in (base, curve))
    texts = min(stats.repeats_of(base, name, a), stats.repeats_of(curve, name, b))
    half = float(student.ppf(1 - 0.025 / tests, texts - 1) * np.std(drawn_b - b / a * drawn_a)) / a
    return b / a, b_low / a_high - half, b_high / a_low + half


def claims(found: Mapping[str, Found]) -> Iterator[tuple[str, str, float, Interval]]:
    """What the paper and we claim, the bound, and what was measured; of memory, of the recipe that gains most."""
    base = found["base"]
    before = base.up_to()[1]
    yield (
        "the model explodes: 4,096 tokens over 512, nats",
        "at least",
        1.0,
        interval(before[:, -1] - before[:, 1]),
    )
    if smt_found := found.get("smt"):
        nats, more = smt_found.up_to()[1], smt_found.more.values("nats")
        lost = nats[:, 1] - before[:, 1]
        yield "after SMT it does not", "at most", 0.0, interval(nats[:, -1] - nats[:, 1])
        yield (
            "and improves: the same tokens after 4,096, not 512",
            "at most",
            0.0,
            interval(more[:, -1] - more[:, 1]),
        )
        yield "inside the old window SMT loses, nats", "at most", 0.05, interval(lost)
        if "unmixed" in found:
            more_lost = found["unmixed"].up_to()[1][:, 1] - nats[:, 1]
            # "much more" is as much as SMT itself may lose
            yield "without mixed training more, nats", "at least", MUCH_MORE, interval(more_lost)
    for number, of, text in (
        ("half-life", "half_life", "natural"),
        ("span", "span", "natural"),
        ("span on shuffled text", "span", "shuffled"),
    ):
        gained = {name: times(getattr(found[name], text), getattr(base, text), of) for name in RECIPES if name in found}
        if gained:
            best = max(gained, key=lambda name: gained[name][0])
            yield f"best {number}, times the model's (`{best}`)", "at least", 4.0, gained[best]
            if of == "half_life":
                yield "its copy above control at a context of 2,048", "at least", 0.1, found[best].gap()


def verdict(how: str, bound: float, value: Interval) -> str:
    """Whether the mean and the whole interval are within the bound."""
    sign = 1 if how == "at least" else -1
    return "met" if sign * value[1 if sign > 0 else 2] >= sign * bound else "missed"


def said(values: Interval, digits: int = 2, sign: str = "") -> str:
    mean, low, high = values
    return f"{mean:{sign}.{digits}f} ± {(high - low) / 2:.{digits}f}"


def mean_said(values: np.ndarray, digits: int = 2, sign: str = "+") -> str:
    return said(interval(values), digits, sign)


def perplexity_tables(found: Mapping[str, Found]) -> Iterator[str]:
    """Tables 1, 9 and 11 in small: all tokens up to L; and the same tokens after more text."""
    base = found["base"]
    lengths, before, _ = base.up_to()
    first, second = [], []
    for name, one in found.items():
        _, nats, accuracy = one.up_to()
        cells = [f"{np.exp(nats[:, i].mean()):,.2f} / {accuracy[:, i].mean():.2f}" for i in range(len(lengths))]
        lost = mean_said(nats[:, 1] - before[:, 1], 3) if one is not base else "0"
        first.append([name, *cells, mean_said(one.every.by_bucket("nats")[:, -1], sign=""), lost])
        more = one.more.values("nats").T
        second.append([name, mean_said(more[1], sign=""), *(mean_said(further - more[1]) for further in more[2:])])
    tail = f"nats, {base.every.ends[-2]:,} to {lengths[-1]:,}"
    yield table(["perplexity / accuracy", *(f"{n:,}" for n in lengths), tail, f"nats lost within {WINDOW}"], first)
    yield table(["nats", f"{WINDOW}", *(f"{n:,} - {WINDOW}" for n in base.more.lengths[2:])], second)


def memory_table(found: Mapping[str, Found]) -> str:
    base = found["base"]
    assert base.natural is not None
    assert base.shuffled is not None
    shown = [n for n in (128, 254, 511, 1023, 1535, 2047) if n in base.natural.lengths]
    lines = []
    for name, one in found.items():
        assert one.natural is not None
        assert one.shuffled is not None
        at = np.searchsorted(one.natural.lengths, shown)
        copy, control = (stats.measured_mean(half)[at] for half in (one.natural.copy, one.natural.control))
        summary, shuffled = stats.summarise(one.natural), stats.summarise(one.shuffled)
        lines.append(
            [
                name,
                *(f"{c:.2f} / {m:.2f}" for c, m in zip(copy, control, strict=True)),
                said(one.gap()),
                str(summary.half_life),
                with_ends(times(one.natural, base.natural, "half_life")),
                with_ends(times(one.natural, base.natural, "span")),
                *(f"{value:.2f}" for value in stats.measured_mean(one.shuffled.copy)),
                str(shuffled.reach),
                with_ends(times(one.shuffled, base.shuffled, "span")),
            ]
        )
    head = ["copy / control", *(f"{n:,}" for n in shown), f"gap at {min(ASKED, shown[-1]):,}"]
    head += ["half-life", "× base", "span × base", *(f"shuffled {n:,}" for n in base.shuffled.lengths)]
    return table([*head, "its reach", "its span × base"], lines)


def paired_curves(
    names: Sequence[str], options: argparse.Namespace, out: Path, steps: int, repeats: int
) -> dict[str, list[stats.MeasuredCurve]]:
    """Measure the model as it is and under YaRN, and train and measure each recipe from each seed."""
    what: dict[str, Any] = {"tasks": ["curve"], "text": TEXT, "lengths": PAIRED_LENGTHS, "repeats": repeats}
    base = replace(load(folder_of(options.model), dtype="float32", device="cpu"), name="base")
    methods = ["full", UNTRAINED["yarn8"]]
    found = {BASE: measure([base], methods, out=out / "measured" / BASE / PAIRED, **what).rows}
    for name in names:
        for seed in options.seeds:
            lm = extended(name, options.model, out, steps, seed)
            folder = out / "measured" / f"{name}-{seed}" / PAIRED
            found[f"{name}-{seed}"] = measure([lm], ["full"], out=folder, **what).rows
    return by_recipe(found)


def by_recipe(rows: Mapping[str, Sequence[Row]]) -> dict[str, list[stats.MeasuredCurve]]:
    """Return the curves of the paired comparison by recipe, one for each seed, from the rows of each model."""
    found = {
        of: [stats.curve(of_method(rows[BASE], how))] for of, how in ((BASE, "full"), (YARNED, UNTRAINED["yarn8"]))
    }
    for name, of in rows.items():
        if name != BASE:
            found.setdefault(name.rpartition("-")[0], []).append(stats.curve(of_method(of, "full")))
    return found


def recorded_pairs() -> dict[str, list[stats.MeasuredCurve]]:
    """Return the curves of the paired comparison that are kept with the project."""
    models = [path.parent.name for path in sorted(RECORDED.glob(f"*/{PAIRED}.jsonl.gz"))]
    return by_recipe({name: kept.recorded(RECORDED, name, PAIRED)[1] for name in models})


def mean_over_seeds(curves: Sequence[stats.MeasuredCurve]) -> stats.MeasuredCurve:
    """Return the mean of the curves of a recipe's seeds, text by text."""
    assert all((one.targets == curves[0].targets).all() for one in curves), "other texts"
    means = {half: np.mean([getattr(one, half) for one in curves], 0) for half in ("copy", "control")}
    return replace(curves[0], **means)


def against_yarn(curves: Mapping[str, Sequence[stats.MeasuredCurve]]) -> dict[str, dict[int, Interval]]:
    """Print the gap between copy and control of each recipe, the mean over its seeds, and return how much it is above
    that of untrained YaRN, by length, paired over texts."""
    means = {name: mean_over_seeds(of) for name, of in curves.items()}
    lines, found = [], {}
    gaps = {name: one.copy - one.control for name, one in means.items()}
    for name, one in means.items():
        index = ", ".join(f"{value:.3f}" for value in stats.memory_index(one))
        cells = [f"{value:.3f}" for value in stats.measured_mean(gaps[name])]
        lines.append([name, str(len(curves[name])), *cells, index, with_ends(times(one, means[BASE], "half_life"))])
        if name not in (BASE, YARNED):
            more = [interval(of) for of in (gaps[name] - gaps[YARNED]).T]
            found[name] = dict(zip(one.lengths.tolist(), more, strict=True))
            lines.append(["above YaRN", "", *(f"{m:+.3f} [{low:.3f}, {high:.3f}]" for m, low, high in more), "", ""])
    lengths = [f"{n:,}" for n in means[BASE].lengths]
    texts = stats.whole_repeats(means[BASE])
    head = [f"gap, {texts} texts", "seeds", *lengths, "memory index at these", "half-life, × base"]
    print(f"\n{table(head, lines)}")
    return found


def draw(found: Mapping[str, Found], file: Path) -> None:
    """Draw nats per token by position, and the memory index by length, with 95 % intervals over documents."""
    nats, memory = list[Line](), list[Line]()
    for index, (name, one) in enumerate(found.items()):
        assert one.natural is not None
        curve = one.natural
        indices = (curve.copy - curve.control) / (1 - stats.measured_mean(curve.control))
        style: Any = "dashed" if name.startswith("base") else "solid"
        for lines, x, values in ((nats, one.every.ends, one.every.by_bucket("nats")), (memory, curve.lengths, indices)):
            mean = stats.measured_mean(values)
            lines.append(Line(name, x, mean, index, *stats.interval(values), style=style))
    size: dict[str, Any] = {"num_members": len(found)}
    window = Rule(f"trained length {WINDOW:,}", x=WINDOW)
    left = Figure(
        "Nats per token", "position (tokens)", "nats per token", nats, rules=[window], log_x=True,
        ticks=PERPLEXITY_LENGTHS, **size,
    )  # fmt: skip
    right = Figure(
        "Memory of natural text", "length of the text to be copied (tokens)", "memory index", memory,
        rules=[Rule("half-life", y=stats.HALF_LIFE)], **size,
    )  # fmt: skip
    only_png(draw_grid([[left, right]], file.parent, file.stem, size=(6.5, 5.0)))


def all_measured(
    names: Sequence[str], options: argparse.Namespace, out: Path, steps: int, repeats: int
) -> dict[str, Found]:
    """Measure the model under the untrained methods, and train and measure each recipe."""
    near, scaled = list(NEAR.values()), list(UNTRAINED.values())[: 1 if options.quick else None]
    base = replace(load(folder_of(options.model), dtype="float32", device="cpu"), name="base")
    found = measured(base, ["full", *scaled, *near], out, repeats, options.quick)
    for name in names:
        print(f"{name}: {' '.join(RECIPES[name])}", flush=True)
        methods = ["full", *(near if name == "smt" else [])]
        found |= measured(extended(name, options.model, out, steps), methods, out, repeats, options.quick)
    return found


def main() -> None:
    parser = parser_of(__doc__, "two recipes of few steps, short texts")
    parser.add_argument("recipes", nargs="*", help=f"of {', '.join(RECIPES)}; default the first {len(DEFAULT)}")
    parser.add_argument("--model", default=DEMO, help="a folder, instead of the embedded model; trained on 512 tokens")
    parser.add_argument("--out", type=Path, help="keep models and rows here, and continue them")
    parser.add_argument("--picture", type=Path, help="draw the model, YaRN and the default recipes into this file")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--record", action="store_true", help="keep the rows of --out with the project")
    parser.add_argument("--recorded", action="store_true", help="print and judge the kept rows")
    parser.add_argument("--paired", action="store_true", help="only the recipes against untrained YaRN, paired")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of --paired")
    options = parser.parse_args()
    if unknown := set(options.recipes) - set(RECIPES):
        parser.error(f"unknown recipes {', '.join(sorted(unknown))}; known are {', '.join(RECIPES)}")
    if options.record:
        if options.out is None:
            parser.error("--record keeps the rows of --out FOLDER: give it")
        print(f"{kept.record(options.out / 'measured', RECORDED):,} bytes in {RECORDED}")
        return
    names = options.recipes or DEFAULT[: 2 if options.quick else None]
    steps, repeats = (16, 4) if options.quick else (options.steps, options.repeats)
    torch.set_num_threads(1)
    with folder_or_scratch(options.out) as out:
        out = out if options.model == DEMO else out / Path(options.model).name
        if options.paired:
            curves = recorded_pairs() if options.recorded else paired_curves(names, options, out, steps, repeats)
            end(against_yarn(curves), [], options.check)
            return
        found = recorded_models() if options.recorded else all_measured(names, options, out, steps, repeats)
    made = list(claims(found))
    lines = [
        [claim, f"{how} {bound:g}", f"{said(value)}, {verdict(how, bound, value)}"] for claim, how, bound, value in made
    ]
    claimed = table(["claim", "required", "measured"], lines)
    remembering = {name: one for name, one in found.items() if one.natural is not None}
    for text in (claimed, *perplexity_tables(found), memory_table(remembering)):
        print(f"\n{text}")
    if options.picture:
        drawn = ("base", "base + yarn8", *DEFAULT)
        draw({name: one for name, one in remembering.items() if name in drawn}, options.picture)
    print()
    missed = [claim for claim, how, bound, value in made if verdict(how, bound, value) == "missed"]
    end({claim: value for claim, _, _, value in made}, missed, options.check)


if __name__ == "__main__":
    run_script(main)
