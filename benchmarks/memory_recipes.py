"""Which short training lengthens memory without training what the forgetting curve measures?

    python benchmarks/memory_recipes.py [RECIPE ...] [--seeds 0 1 2] [--out FOLDER] [--repeats N] [--long] [--record]
                                        [--part PART ...] [--write] [--check] [--quick]

The embedded model (window 512) is taken to 8,192 tokens by each recipe: 300 steps of 2 rows of 512 tokens, in turns
sparse rows and ordinary windows, queries and keys only, AdamW at 1e-3, from three seeds. The settings are those of
configs/smt-decoys.toml with the changes in `RECIPES`; a training writes all of them into settings.json beside its
model. No recipe trains rows `[bos] S [bos] S`. Measured on held-out files, under the method that the recipe names and
against the model itself and untrained YaRN, on the same texts:

    natural, shuffled   copy and control with the probe of 32 + 96 tokens, contexts up to 16 windows
    inside              nats of all tokens of one window, of 16 times as many texts
    beyond              nats of all tokens of 8,192, of 4 texts at most
    long                with --long, and instead: as natural, contexts up to 32 windows

The seeds of a recipe are averaged text by text: intervals are over texts. A recipe passes if its half-life on natural
text is at least 4 times the model's and 1.5 times that of untrained YaRN, and it loses at most 0.02 nats inside the
window; each by its whole interval, at a level corrected for the number of recipes (Bonferroni). Trainings and
measurements in --out are continued.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import recorded as kept
import torch
from common import Interval, end, interval, parser_of, table
from scipy.stats import t as student
from smt_extend import said, times

from farspan import LM, Row, load, measure, method, stats
from farspan.train import smt
from farspan.train.config import read_config
from farspan.train.progress import TrainingWatch

PAGE = Path(__file__).with_suffix(".md")
RECORDED = Path(__file__).with_suffix("")
TEXT = "builtin:held-out+tests"
TARGET = 8192  # tokens
AT = 2047  # tokens of a text whose context is 8 windows
MISSING = "–"
LOST, MOST_LOST = "nats lost inside", 0.02
LENGTHS = (127, 255, 511, 1023, 1535, 2047, 2559, 3071, 3967)
PROBE = "curve:protocol=probe,warmup=32,scored=96"
PARTS: dict[str, tuple[str, str, tuple[int, ...]]] = {  # text, task, lengths
    "natural": (TEXT, PROBE, LENGTHS),
    "shuffled": (f"shuffled:{TEXT}", PROBE, (255, 511, 1023, 2047, 3967)),
    "inside": (TEXT, "perplexity:targets=all", (512,)),
    "beyond": (TEXT, "perplexity:targets=all", (TARGET,)),
}
LONG = {"long": (TEXT, PROBE, (511, 1023, 2047, 3071, 3967, 5119, 6655, 7935))}
YARN, LONGER_YARN, LONGEST_YARN, TRUNCATED, LOG_N = (
    "rope:type=yarn,factor=8",
    "rope:type=yarn,factor=16",
    "rope:type=yarn,factor=32",
    "rope:type=truncated",
    "temperature:original=512",  # the default would be the extended length, up to which nothing is scaled
)
LEARNED = "temperature:scales={}"  # the folder of the model
UNTRAINED = ("full", YARN, LONGER_YARN, f"{LONGER_YARN}+temperature")
UNTRAINED_LONG = (LONGER_YARN, LONGEST_YARN, f"{LONGEST_YARN}+temperature")

CONFIG = kept.BENCHMARKS.parent / "configs" / "smt-decoys.toml"
SKIP, MENTIONS = (f"smt.draw='{draw}'" for draw in ("skip", "recurrences:share=0.5"))
COPYING = ("2.0", "2.1", "3.2")  # heads; see `copying_heads`
COPIES = 0.25  # the least mean weight of a head that copies: half of what the weakest of these three has
HEADS = f"trained.heads={list(COPYING)}"
COMMON = ("watch.every=0", "trainer.save_every=100")
RECIPES: dict[str, tuple[tuple[str, ...], str]] = {  # changes of the config, and how the model is read
    "yarn-skip": ((SKIP,), "full"),
    "yarn-decoys": ((), "full"),
    "yarn-decoys-log-n": (("model.temperature=true",), LOG_N),
    "yarn-learned-log-n": (("model.temperature='learned'",), LEARNED),
    "yarn-recurrences": ((MENTIONS,), "full"),
    "yarn-decoys-heads": ((HEADS,), "full"),
    "truncated-skip": ((f"model.rope='{TRUNCATED}'", SKIP), "full"),
}

CHANGES = (  # recipes that differ in one thing from another
    ("yarn-decoys", "yarn-skip"),
    ("yarn-decoys-log-n", "yarn-decoys"),
    ("yarn-learned-log-n", "yarn-decoys-log-n"),
    ("yarn-recurrences", "yarn-skip"),
    ("yarn-decoys-heads", "yarn-decoys"),
)


def copying_heads(lm: LM, repeats: int = 16, length: int = 100) -> dict[str, float]:
    """Return the heads of a model that copy, each with its mean weight, on shuffled repeats, on the token after the
    earlier mention. The model's attention is `eager`.

    Raises:
        SystemExit: no head copies.
    """
    rng = np.random.default_rng(0)
    half = torch.from_numpy(rng.integers(5, lm.vocabulary, size=(repeats, length)))
    with torch.no_grad():
        weights = lm.model(torch.cat([half, half], 1), output_attentions=True).attentions
    later = torch.arange(length, 2 * length - 1)
    found = {
        f"{layer}.{head}": float(one[:, head, later, later - length + 1].mean())
        for layer, one in enumerate(weights)
        for head in range(one.shape[1])
    }
    if not (copying := {head: weight for head, weight in found.items() if weight >= COPIES}):
        best = max(found, key=found.__getitem__)
        raise SystemExit(
            f"no head of {lm.name} copies: the largest weight on the token after the earlier mention is "
            f"{found[best]:.2f}, of head {best}, expected at least {COPIES}. Train all queries and keys"
        )
    return copying


def trained(name: str, seed: int, out: Path, steps: int) -> LM:
    """Train a recipe where it is not there yet."""
    folder = out / "models" / f"{name}-{seed}"
    overrides = [*COMMON, *RECIPES[name][0], f"out='{folder}'", f"trainer.steps={steps}", f"trainer.seed={seed}"]
    if not (folder / "training.json").exists():
        smt.train(
            read_config(CONFIG, smt.SmtSettings, overrides),
            TrainingWatch(notice=lambda line: print(f"  {line}", flush=True)),
        )
    return replace(load(folder, dtype="float32"), name=folder.name)


def measured(lm: LM, methods: Sequence[str], out: Path, options: argparse.Namespace) -> None:
    repeats, quick = options.repeats, options.quick
    for part, (text, task, lengths) in (LONG if options.long else PARTS).items():
        if part not in (options.part or (*PARTS, *LONG)):
            continue
        texts = {"beyond": min(repeats, 4), "inside": 16 * repeats}.get(part, repeats)
        if quick:
            texts, lengths = 2, tuple(n for n in lengths if n <= 512)
        if not lengths:
            continue
        folder = out / "measured" / lm.name / part
        measure([lm], methods, [task], text=text, lengths=lengths, repeats=texts, out=folder)


def rows_of(model: str, part: str, how: str) -> list[Row]:
    rows = kept.recorded(RECORDED, model, part)[1]
    return [row for row in rows if row.method == str(method(how)) and row.status == "ok"]


def seeds(name: str) -> list[tuple[str, str]]:
    """Return the recorded models of a recipe, or of an untrained method the model itself, each with its method."""
    if name not in RECIPES:
        return [("base", name)]
    folders = sorted(folder.name for folder in RECORDED.glob(f"{name}-[0-9]*"))
    return [(folder, RECIPES[name][1].format(folder)) for folder in folders]


@cache
def curve_of(name: str, part: str) -> stats.MeasuredCurve:
    """Return a forgetting curve, the mean of all seeds text by text."""
    curves = [stats.curve(rows_of(model, part, how)) for model, how in seeds(name)]
    assert all((one.targets == curves[0].targets).all() for one in curves), "other texts"
    means = {half: np.mean([getattr(one, half) for one in curves], 0) for half in ("copy", "control")}
    return replace(curves[0], **means)


def nats_of(name: str, part: str) -> np.ndarray:
    """Return nats per token of each text, the mean of all seeds."""
    found = [{row.repeat: row.scores["nats"] for row in rows_of(model, part, how)} for model, how in seeds(name)]
    return np.array([np.mean([one[repeat] for one in found]) for repeat in sorted(found[0])])


def lost(name: str, other: str, tests: int) -> Interval:
    """Return the nats per token that a recipe loses inside the window against another."""
    more = nats_of(name, "inside") - nats_of(other, "inside")
    return widened(interval(more), len(more), tests)


def widened(value: Interval, texts: int, tests: int) -> Interval:
    """Return a 95 % interval at the level that Bonferroni's correction for so many tests asks for."""
    mean, low, high = value
    more = student.ppf(1 - 0.025 / tests, texts - 1) / student.ppf(0.975, texts - 1)
    return mean, mean - (mean - low) * more, mean + (high - mean) * more


@cache
def judged(name: str) -> dict[str, Interval]:
    """Return what a recipe is judged by, with intervals corrected for the number of recipes."""
    natural, tests = curve_of(name, "natural"), len(known())
    yarn = max((YARN, LONGER_YARN), key=lambda how: stats.headline(curve_of(how, "natural"))["half_life"][0])
    found = {
        "times the model's half-life": times(natural, curve_of("full", "natural"), "half_life"),
        "times untrained YaRN's": times(natural, curve_of(yarn, "natural"), "half_life"),
        "span of shuffled text, times YaRN's": times(curve_of(name, "shuffled"), curve_of(yarn, "shuffled"), "span"),
    }
    judged = {what: widened(value, len(natural.copy), tests) for what, value in found.items()}
    return judged | {LOST: lost(name, "full", tests)}


def passes(found: Mapping[str, Interval]) -> bool:
    longer, than_yarn, _, lost = found.values()
    return longer[1] >= 4 and than_yarn[1] >= 1.5 and within(lost) == "yes"


def within(lost: Interval) -> str:
    """Return whether a loss is at most 0.02 nats: `yes` or `no` by the whole interval."""
    return "yes" if lost[2] <= MOST_LOST else "no" if lost[1] > MOST_LOST else "undecided"


def known() -> list[str]:
    return [name for name in RECIPES if seeds(name)]


def memory() -> str:
    """Return the table of all recipes and untrained methods."""
    lines = []
    for name in (*UNTRAINED, *known()):
        natural, shuffled = (curve_of(name, part) for part in ("natural", "shuffled"))
        gap = interval((natural.copy - natural.control)[:, list(natural.lengths).index(AT)])
        numbers, alone = stats.summarise(natural), stats.summarise(shuffled)
        beyond = interval(nats_of(name, "beyond"))
        lines.append([
            f"`{name}`", str(len(seeds(name)) if name in RECIPES else MISSING),
            str(numbers.half_life), str(numbers.reach), str(numbers.span),
            said(gap, 3), str(alone.reach), str(alone.span), said(beyond),
        ])  # fmt: skip
    apart = ("reach, shuffled", "span, shuffled")
    return table(["", "seeds", "half-life", "reach", "span", f"gap at {AT:,}", *apart, "nats to 8,192"], lines)


def verdicts() -> str:
    """Return the table that judges the recipes."""
    lines = []
    for name in known():
        found = judged(name)
        inside = f"{within(found[LOST])} ({len(seeds(name))}, {len(nats_of(name, 'inside'))})"
        bounds = "met" if passes(found) else "missed"
        lines.append([f"`{name}`", *(said(one, 3) for one in found.values()), inside, bounds])
    return table(["", *judged(known()[0]), f"within {MOST_LOST} (seeds, texts)", "bounds"], lines)


def changes() -> str:
    """Return the table of recipes against those from which they differ in one thing, paired."""
    lines = []
    for name, other in CHANGES:
        natural, shuffled = (
            times(curve_of(name, part), curve_of(other, part), "span") for part in ("natural", "shuffled")
        )
        tests, texts = len(CHANGES), len(curve_of(name, "natural").copy)
        found = (*(widened(value, texts, tests) for value in (natural, shuffled)), lost(name, other, tests))
        lines.append([f"`{name}`", f"`{other}`", *(said(one, 3) for one in found)])
    return table(["", "against", "span, times", "span of shuffled text, times", "nats lost inside"], lines)


def long() -> str:
    """Return the table of contexts up to 32 windows, of the recipes that were measured there, against the YaRN from
    which they start and against the longest one."""
    names = [name for name in known() if all(rows_of(model, "long", how) for model, how in seeds(name))]
    pairs = ((LONGER_YARN, "half_life"), (LONGER_YARN, "span"), (LONGEST_YARN, "span"))
    lines = []
    for name in (*UNTRAINED_LONG, *names):
        curve = curve_of(name, "long")
        numbers, texts = stats.summarise(curve), len(curve.copy)
        against = [
            said(widened(times(curve, curve_of(other, "long"), what), texts, len(names)), 3)
            if name != other
            else MISSING
            for other, what in pairs
        ]
        count = str(len(seeds(name)) if name in names else MISSING)
        lines.append([f"`{name}`", count, str(numbers.half_life), str(numbers.span), *against])
    head = [
        "half-life",
        "span",
        "half-life, times YaRN's by 16",
        "span, times YaRN's by 16",
        "span, times YaRN's by 32",
    ]
    return table(["", "seeds", *head], lines)


def page() -> str:
    """Return the page with its tables made again of the recorded rows."""
    return kept.with_tables(PAGE.read_text(), lambda name: TABLES[name]())


TABLES = {"memory": memory, "verdicts": verdicts, "changes": changes, "long": long}


def main() -> None:
    parser = parser_of(
        __doc__, "one recipe of 40 steps, one seed, short texts", "fail where no recipe keeps all bounds"
    )
    parser.add_argument("recipes", nargs="*", help=f"of {', '.join(RECIPES)}; default all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="folder for models and runs; a run in it is continued")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--part", choices=PARTS, nargs="+", help="measure only these; default all")
    parser.add_argument("--long", action="store_true", help="measure in contexts up to 32 windows, and nothing else")
    parser.add_argument("--heads", action="store_true", help="only print which heads copy")
    parser.add_argument("--record", action="store_true", help="keep the rows of all runs below --out")
    parser.add_argument("--write", action="store_true", help="make the tables of the page")
    options = parser.parse_args()
    if unknown := set(options.recipes) - set(RECIPES):
        parser.error(f"unknown recipes {', '.join(sorted(unknown))}; known are {', '.join(RECIPES)}")
    torch.set_num_threads(1)
    if options.heads:
        print(copying_heads(load("demo", dtype="float32", attention="eager")))
        return
    if options.record:
        print(f"{kept.record(options.out / 'measured', RECORDED):,} bytes")
    elif not (options.write or options.check):
        out = options.out or Path("runs/memory_recipes")
        names, numbers = options.recipes or list(RECIPES), options.seeds
        if options.quick:
            names, numbers = names[:1], numbers[:1]
        untrained = UNTRAINED_LONG if options.long else UNTRAINED
        measured(replace(load("demo", dtype="float32"), name="base"), untrained, out, options)
        for seed in numbers:
            for name in names:
                print(f"{name}, seed {seed}", flush=True)
                lm = trained(name, seed, out, 40 if options.quick else 300)
                how = RECIPES[name][1].format((out / "models" / lm.name).resolve())
                measured(lm, [how], out, options)
        return
    if options.write:
        PAGE.write_text(page())
    found = {name: judged(name) for name in known()}
    missed = [] if any(passes(one) for one in found.values()) else ["no recipe keeps all bounds"]
    end(found, missed, options.check)


if __name__ == "__main__":
    main()
