"""Every method beside every other: memory, perplexity, LongPPL, needles and cost, and which measures agree.

    python benchmarks/methods_table.py [--model FOLDER] [--text TEXT] [--part NAME] [--method PREFIX] [--out FOLDER]
    python benchmarks/methods_table.py --record | --write | --check | --quick

Each part is one run of `farspan.measure` of all methods on the same tokens, at parts of the trained length, here W; the
same command goes on where it was stopped. Default: the embedded model, on text that it was not trained on.

--record keeps the rows of all parts below --out in benchmarks/methods_table/; --write makes the tables of
docs/methods_table.md and its picture of these rows; --check judges the claims of that page by them. --quick measures
two examples of every part under two methods, in under a minute.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import real_tables
import recorded as kept
import torch
from common import Interval, end, only_png, parser_of, run_script, table, with_ends
from real_tables import MISSING, costs, quality_table
from scipy.special import logsumexp
from scipy.stats import rankdata

from farspan import measure
from farspan.lm import load
from farspan.loading.places import DEMO
from farspan.record import Row
from farspan.report.cells import Cell, by_example, cells
from farspan.report.curves import CurveMember, series
from farspan.report.figure import Figure, Line, pareto_front
from farspan.report.picture import draw_figure
from farspan.stats import Difference, differences, holm, student_mean

RECORDED = kept.BENCHMARKS / "methods_table"
PAGE = kept.BENCHMARKS.parent / "docs" / "methods_table.md"
TEXT = "builtin:held-out+tests"  # that the embedded model was not trained on
MODELS = {"demo": "the embedded model"} | real_tables.MODELS
IN_REAL_MODELS = {  # parts, by ours
    "natural": "methods-natural",
    "shuffled": "methods",
    "far": "far-shuffled",
    "longppl": "longppl",
    "needle": "methods-needle",
    "own": "methods-own",
}
METHODS = (
    "full",
    "sinks:window={window}",
    "lambda_mask:window={trained}",
    "rope:type=linear,factor=4",
    "rope:type=ntk,factor=4",
    "rope:type=yarn,factor=4",
    "rope:type=yarn,factor=4+temperature",
    "rope:type=truncated",
    "rope:type=factors,file={factors}",
    "temperature",
    "selfextend:group=8",
    "dca",
    "topk:k=64",
    "snapkv:capacity={half}",
    "tova:share=0.25",
    "knorm:share=0.25",
    "replug:piece={half},tail={quarter}",
    "ape:piece={half}",
)
FACTORS = RECORDED / "factors.json"  # by `search_rope.py --shape factors`
NTK = "rope:type=ntk,factor=4"
STRONG = "rope:type=yarn,factor=4"  # has the longest memory of these; it chooses the key tokens of the part `shared`
SAMPLES = 2000  # of methods, for the interval of a correlation


@dataclass(frozen=True)
class Part:
    """One run: a task at lengths in parts of the trained length."""

    task: str
    shares: tuple[float, ...] = (1, 2, 4)
    repeats: int = 16
    shuffled: bool = False
    cost: bool = False  # also seconds and memory, apart from the task
    only: str = ""  # the one method that is measured; default: all
    lengths: tuple[int, ...] = ()  # in the task's own unit, of a task without text; about as many tokens as `shares`

    @property
    def name(self) -> str:
        """The name of its task."""
        return self.task.partition(":")[0]

    def measured(self, model: str, methods: Sequence[str], text: str, out: Path, repeats: int | None) -> int:
        """Measure it, and return the number of rows."""
        lm = load(model, dtype="bfloat16")  # on every machine, whatever is fastest there
        trained = lm.trained_length or 0
        sizes = {"trained": trained, "window": trained - 4, "half": trained // 2, "quarter": trained // 4}
        if model != DEMO:  # the factors are those of the embedded model
            methods = [how for how in methods if "{factors}" not in how]
        read: dict[str, Any] = {} if self.lengths else {"text": f"shuffled:{text}" if self.shuffled else text}
        probe = {"warmup": min(128, trained // 16), "scored": min(256, trained // 8)}
        return len(
            measure(
                [lm],
                [self.only] if self.only else [how.format(**sizes, factors=FACTORS) for how in methods],
                [self.task.format(**probe, keys=out.parent / "keys")],
                **read,
                lengths=self.lengths or tuple(int(share * trained) for share in self.shares),
                repeats=repeats or self.repeats,
                cost=self.cost,
                refusals=True,
                out=out,
            ).rows
        )


PROBE = "curve:protocol=probe,warmup={warmup},scored={scored}"
FALL = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1, 3 / 2, 2, 3, 4)
PARTS = {
    "natural": Part(PROBE, FALL, 8),
    "shuffled": Part(PROBE, FALL, 8, shuffled=True),
    "perplexity": Part("perplexity:targets=fixed", cost=True),
    "longppl": Part("longppl:keys=own"),
    "keys": Part("longppl:keys=own", only=STRONG),
    "shared": Part("longppl:keys={keys}"),
    "needle": Part("needle:kind=multikey"),
    "own": Part("own"),
    "icl": Part("icl:set=copy", repeats=64, lengths=(27, 54, 109)),
}
NUMBERS = {"half_life": "half-life", "reach": "reach", "span": "span"}
TEXTS = {"natural": "natural text", "shuffled": "shuffled text"}
NAMES = {
    "perplexity": "perplexity",
    "longppl": "LongPPL",
    "shared": "LongPPL, YaRN's key tokens",
    "needle": "needles",
    "own": "facts",
}
SHARE = "share of key tokens"
NATS = "nats of needles"  # of the forced answer, also where no method answers right
GUESSED = 7 * np.log(10)  # nats of a needle's seven digits
ICL = "nats of demonstrated outputs"
PRICES = {
    "memory": ("context_bytes", "memory of a context of {:,} tokens (MiB)", 2**20),
    "seconds": ("prefill_seconds", "seconds to the first token after {:,} tokens", 1),
}
PICTURES = (  # model, price, file; at one window all methods keep as much of a real model's context
    ("demo", "memory", "methods_memory"),
    ("demo", "seconds", "methods_seconds"),
    ("SmolLM2-135M-Instruct.Q4_1", "seconds", "methods_seconds_smollm2"),
)
MARKS = {True: " ▲", False: " ▼"}


def rows_of(model: str, part: str) -> tuple[dict[str, Any], list[Row]]:
    """Return run.json and the rows of one run; two empty ones where it was not recorded. Those of a real model are the
    rows of docs/real_models.md."""
    if model in real_tables.MODELS:
        return real_tables.recorded(model, IN_REAL_MODELS[part]) if part in IN_REAL_MODELS else ({}, [])
    return kept.recorded(RECORDED, model, part)


@cache
def quality(model: str, part: str) -> list[Cell]:
    """Return the quality of a run by method and length; of a run with costs also these."""
    header, rows = rows_of(model, part)
    return [cell for cell in cells(rows, header) if cell.task.startswith(PARTS[part].name)] if rows else []


def priced(model: str) -> list[Cell]:
    """Return the cells that have costs: those of perplexity, of a real model in a run of its own."""
    return real_tables.quality(model, "cost") if model in real_tables.MODELS else quality(model, "perplexity")


@cache
def curves(model: str, part: str) -> dict[str, CurveMember]:
    """Return the forgetting curves of a run by method."""
    header, rows = rows_of(model, part)
    found = series(rows, header.get("models", {}))
    return {one.method: one for one in found if one.summary is not None}


def memory(model: str) -> str:
    """Return the memory lengths by method, marked where they differ from those of the first method."""
    every = {part: by_method for part in TEXTS if (by_method := curves(model, part))}
    found: dict[tuple[str, str, str], Difference] = {}
    for part, by_method in every.items():
        first, *others = by_method.values()
        for other in others:
            for which in differences(first.curve, other.curve):
                if which.name in NUMBERS:
                    found[part, other.method, which.name] = which
    corrected = dict(zip(found, holm([one.p for one in found.values()]), strict=True))
    lines = []
    for how in dict.fromkeys(how for by_method in every.values() for how in by_method):
        line = [f"`{how}`"]
        for part, by_method in every.items():
            for name in NUMBERS:
                member = by_method.get(how)
                p, at = corrected.get((part, how, name)), (part, how, name)
                mark = MARKS[found[at].value > 0] if p is not None and p < 0.05 else ""
                line.append(MISSING if member is None else f"{getattr(member.summary, name)}{mark}")
        lines.append(line)
    heads = [f"{name}, {TEXTS[part]}" for part in every for name in NUMBERS.values()]
    return table(["", *heads], lines)


def _method(cell: Cell) -> str:
    return f"`{cell.method}`"


def qualities(model: str, part: str) -> str:
    """Return a run's quality by method and length."""
    return quality_table(quality(model, part), _method)


ByMethod = dict[str, dict[Any, float]]  # a number of each example, by method


def _common(methods: ByMethod) -> ByMethod:
    """Return the numbers of the examples that all methods have."""
    shared = [one for one in next(iter(methods.values()), {}) if all(one in by for by in methods.values())]
    return {how: {one: by[one] for one in shared} for how, by in methods.items()}


def _numbers(rows: Iterable[Row], place: str, number: Callable[[Row], float]) -> dict[Any, ByMethod]:
    """Return a number of each example by place ("length" or "depth") and method, the mean over its rows there."""
    found: dict[float, dict[str, dict[str, list[float]]]] = {}
    for row in rows:
        by = found.setdefault(getattr(row, place), {}).setdefault(row.method, {})
        by.setdefault(row.example, []).append(number(row))
    return {
        at: {how: {one: float(np.mean(some)) for one, some in by.items()} for how, by in methods.items()}
        for at, methods in sorted(found.items())
    }


def _scored(model: str, part: str) -> list[Row]:
    return [row for row in rows_of(model, part)[1] if row.status == "ok"]


def token_nats(model: str) -> dict[int, ByMethod]:
    """Return the nats per token by length; of a real model those of LongPPL's targets, read under every method."""
    task, score = ("longppl", "nats_all") if model in real_tables.MODELS else ("perplexity", "nats")
    rows = (row for row in rows_of(model, task)[1] if row.task == task and row.status in ("ok", "no_keys"))
    return _numbers(rows, "length", lambda row: row.scores[score])


def tokens(model: str) -> str:
    """Return the nats per token by method and length."""
    return _marked("nats per token", {f"{length:,}": by for length, by in token_nats(model).items()}, digits=2)


def output_nats(model: str) -> dict[int, ByMethod]:
    """Return the nats of the right output among all outputs, by number of demonstrations."""

    def right(row: Row) -> float:
        costs = np.array(row.scores["nats"])
        return float(costs[row.scores["gold"]] + logsumexp(-costs))

    return _numbers(_scored(model, "icl"), "length", right)


def outputs(model: str) -> str:
    """Return the nats of the right output by method and number of demonstrations."""
    columns = {f"{n} pairs": by for n, by in output_nats(model).items()}
    return _marked("nats of the right output", columns, digits=2)


def needle_nats(model: str) -> dict[int, ByMethod]:
    """Return the nats of a needle's answer by length, each the mean over its depths."""
    return _numbers(_scored(model, "needle"), "length", lambda row: row.scores["nats"])


def needle_nats_at(model: str, length: int) -> dict[float, ByMethod]:
    """Return the nats of a needle's answer at one length by depth."""
    rows = (row for row in _scored(model, "needle") if row.length == length)
    return _numbers(rows, "depth", lambda row: row.scores["nats"])


def more_than_first(methods: ByMethod) -> dict[str, tuple[float, float, float, float]]:
    """Return by how much the numbers of each method but the first exceed those of the first: mean, low, high and p,
    paired by example."""
    first, *others = methods.values()
    gaps = ([by[one] - first[one] for one in by if one in first] for by in others)
    return {how: student_mean(np.array(some)) for how, some in zip(list(methods)[1:], gaps, strict=True)}


def nats(model: str) -> str:
    """Return the nats of a needle's answer by method and length."""
    columns = {f"{length:,}": methods for length, methods in needle_nats(model).items()}
    return _marked("nats of an answer", columns)


def nats_by_distance(length: int) -> Callable[[str], str]:
    """Return a function that makes the table of the nats of a needle's answer by method and distance."""

    def made(model: str) -> str:
        at = needle_nats_at(model, length).items()
        columns = {f"{round((1 - depth) * length, -2):,.0f} back": methods for depth, methods in at}
        return _marked("nats of an answer", columns)

    return made


def _marked(what: str, columns: dict[str, ByMethod], digits: int = 1) -> str:
    """Return a table of nats with their intervals over examples, marked where they differ from those of the first
    method: paired by example, after Holm over the table."""
    tests = {(column, how): more for column, by in columns.items() for how, more in more_than_first(by).items()}
    corrected = dict(zip(tests, holm([p for *_, p in tests.values()]), strict=True))
    lines: dict[str, list[str]] = {}
    for column, methods in columns.items():
        for how, by in methods.items():
            mean, low, high, _ = student_mean(np.array(list(by.values())))
            p, at = corrected.get((column, how)), (column, how)
            mark = MARKS[tests[at][0] < 0] if p is not None and p < 0.05 else ""
            lines.setdefault(how, [f"`{how}`"]).append(f"{with_ends((mean, low, high), digits)}{mark}")
    number = max(len(by) for methods in columns.values() for by in methods.values())
    for how, line in lines.items():
        texts = max(len(methods.get(how, ())) for methods in columns.values())
        line[0] += f" ({texts})" * (texts < number)
    return table([f"{what}; {number} texts", *columns], list(lines.values()))


def _copied(row: Row) -> float:
    """Return what was copied beyond guessing."""
    return float(row.scores["copy"] - row.scores["control"])


BESIDE: dict[str, tuple[str, Callable[[Row], float]]] = {  # parts of a method that has texts of its own, and of `full`
    "natural-beside": ("copied beyond guessing, books", _copied),
    "far-beside": ("copied beyond guessing, shuffled", _copied),
    "longppl-beside": ("nats per token", lambda row: row.scores["nats_all"]),
    "needle-beside": ("nats of a needle's answer", lambda row: row.scores["nats"]),
}


def beside_full(model: str) -> str:
    """Return what a method that has texts of its own scores, and `full` on the same texts, paired by text."""
    first, other = real_tables.curves(model, "natural-beside")
    texts = str(real_tables.whole_repeats(first.curve))
    lines = []
    for one in (one for one in differences(first.curve, other.curve) if one.name in NUMBERS):
        both = (str(getattr(curve.summary, one.name)) for curve in (first, other))
        lines.append([f"{NUMBERS[one.name]}, books", MISSING, texts, *both, real_tables.difference(one)])
    for part, (what, number) in BESIDE.items():
        rows = (row for row in real_tables.recorded(model, part)[1] if row.status in ("ok", "no_keys"))
        for length, methods in _numbers(rows, "length", number).items():
            shared = _common(methods)
            ((how, (*more, _)),) = more_than_first(shared).items()
            means = (f"{np.mean(list(by.values())):.2f}" for by in shared.values())
            lines.append([what, f"{length:,}", str(len(shared[how])), *means, real_tables.signed(*more)])
    return table(["measure", "tokens", "texts", "`full`", f"`{how}`", "more"], lines)


def best(model: str) -> str:
    """Return the best method of each measure and length, and how much better it is than the next, paired by example;
    p after Holm over the table. Of memory lengths only spans, since half-lives and reaches beyond the last length
    cannot be ordered; LongPPL is left out: each method has key tokens of its own."""
    found = [one for part in TEXTS for one in _best_span(model, part)]
    found += [one for part in NAMES if part != "longppl" for one in _best(model, part)]
    corrected = holm([p for *_, p in found])
    lines = [
        [what, length, f"`{first}`", f"`{second}`", gap, f"{p:.2g}"]
        for (what, length, first, second, gap, _), p in zip(found, corrected, strict=True)
        if p is not None
    ]
    return table(["measure", "tokens", "best", "next", "better by", "p"], lines)


Best = tuple[str, str, str, str, str, float | None]  # measure, tokens, best and next method, difference, p


def _best_span(model: str, part: str) -> Iterator[Best]:
    members = curves(model, part)
    spans = {how: one.summary.span.value for how, one in members.items() if one.summary is not None}
    first, second = (members[how] for how in sorted(spans, key=lambda how: -spans[how])[:2])
    gap = next(one for one in differences(second.curve, first.curve) if one.name == "span")
    longest = max(point["length"] for point in first.points())
    yield f"span, {TEXTS[part]}", f"to {longest:,}", first.method, second.method, f"{gap.known} {gap.interval}", gap.p


def _scores(model: str, part: str) -> tuple[int, dict[int, ByMethod]]:
    """Return 1 if more is better, else -1, and the quality of each example by length."""
    if part == "perplexity":
        return -1, token_nats(model)
    header, rows = rows_of(model, part)
    at: dict[int, dict[str, list[Row]]] = {}
    for row in rows:
        if row.task == PARTS[part].name:
            at.setdefault(row.length, {}).setdefault(row.method, []).append(row)
    entries = header["settings"]["tasks"].values() if rows else ()
    about: dict[str, Any] = next((entry["quality"] for entry in entries if entry["quality"]["score"]), {})
    found = {n: {how: by_example(mine, about["score"]) for how, mine in by.items()} for n, by in sorted(at.items())}
    return 1 if about.get("higher_is_better") else -1, found


def _best(model: str, part: str) -> Iterator[Best]:
    sign, found = _scores(model, part)
    for length, by in found.items():
        most = max(len(mine) for mine in by.values())
        whole = _common({how: mine for how, mine in by.items() if 2 * len(mine) >= most})
        first, second = sorted(whole, key=lambda how: (-sign * np.mean(list(whole[how].values())), how))[:2]
        gaps = np.array([sign * (whole[first][one] - whole[second][one]) for one in whole[first]])
        if gaps.any():
            mean, low, high, p = student_mean(gaps)
            yield NAMES[part], f"{length:,}", first, second, with_ends((mean, low, high), 3), p


@cache
def measures(model: str, length: int) -> dict[str, dict[str, float]]:
    """Return each measure by method at one length, larger is better."""
    found: dict[str, dict[str, float]] = {}
    for part, text in (*TEXTS.items(), ("far", TEXTS["shuffled"])):
        for how, one in curves(model, part).items():
            for point in one.points():
                if point["length"] == length and "memory_index" in point:
                    found.setdefault(f"memory, {text}", {})[how] = point["memory_index"]
    by_tokens = token_nats(model)
    by_outputs = dict(zip(by_tokens, output_nats(model).values(), strict=False))  # {} of a real model
    for name, numbers in ((NATS, needle_nats(model)), (NAMES["perplexity"], by_tokens), (ICL, by_outputs)):
        for how, by in _common(numbers.get(length, {})).items():
            found.setdefault(name, {})[how] = -float(np.mean(list(by.values())))
    for part in (one for one in NAMES if one not in ("needle", "perplexity")):
        for cell in quality(model, part):
            if cell.length == length and cell.value is not None:
                better = -np.log(cell.value) if cell.exp else cell.value
                found.setdefault(NAMES[part], {})[cell.method] = float(better)
                if part == "longppl":
                    found.setdefault(SHARE, {})[cell.method] = cell.details["share"]
    return found


def _compared(model: str) -> list[int]:
    """Return the lengths at which measures are compared: of the embedded model two and four windows."""
    return list(token_nats(model))[model == "demo" :]


def correlations(model: str) -> str:
    """Return Spearman's rank correlation of all pairs of measures over the methods, by length."""
    lengths = _compared(model)
    at = {length: measures(model, length) for length in lengths}
    lines = []
    for one, other in combinations(at[lengths[0]], 2):
        line = [one, other]
        for length in lengths:
            line.append(_correlation(together(at[length], one, other)))
        lines.append(line)
    return table(["measure", "measure", *(f"{length:,}" for length in lengths)], lines)


def together(found: dict[str, dict[str, float]], *names: str) -> np.ndarray:
    """Return some measures [methods, measures] of the methods that have all of them."""
    columns = [found.get(name, {}) for name in names]
    values = [[one[how] for one in columns] for how in columns[0] if all(how in one for one in columns)]
    return np.array(values).reshape(-1, len(names))


def _correlation(values: np.ndarray) -> str:
    """Return the correlation of two measures [methods, 2] with its interval by resampling methods, and their number."""
    if len(values) < 5:
        return MISSING
    if not (np.ptp(values, axis=0) > 0).all():
        return f"{MISSING} (equal values)"
    return f"{with_ends(resampled(values, first_two), 2, '+')} ({len(values)})"


def correlation(model: str, one: str, other: str, length: int) -> Interval:
    """Return the rank correlation of two measures over the methods, and its interval."""
    return resampled(together(measures(model, length), one, other), first_two)


def first_two(values: np.ndarray) -> np.ndarray:
    """Return the rank correlations [...] of the first two of measures [..., methods, measures]."""
    return rank_correlations(values)[..., 0, 1]


def second_more_than_third(values: np.ndarray) -> np.ndarray:
    """Return how much more the second of measures [..., methods, measures] correlates with the first than the third."""
    correlations = rank_correlations(values)
    return correlations[..., 0, 1] - correlations[..., 0, 2]


def rank_correlations(values: np.ndarray) -> np.ndarray:
    """Return Spearman's correlations [..., measures, measures] of values [..., methods, measures]."""
    ranks = rankdata(np.round(values, 9), axis=-2)  # equal scores that were summed in another order are ties
    ranks -= ranks.mean(-2, keepdims=True)
    ranks /= np.sqrt((ranks**2).sum(-2, keepdims=True))
    return np.swapaxes(ranks, -1, -2) @ ranks


def resampled(values: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]) -> Interval:
    """Return a statistic of values [methods, measures], and its 95 % interval by resampling methods. Samples in which
    a measure is the same for all methods are left out: they have no rank correlation."""
    rng = np.random.default_rng(0)
    draws = np.array([values[rng.integers(len(values), size=len(values))] for _ in range(SAMPLES)])
    draws = draws[(np.ptp(draws, axis=1) > 0).all(-1)]
    low, high = np.quantile(statistic(draws), [0.025, 0.975])
    return float(statistic(values)), float(low), float(high)


def against_perplexity(found: dict[str, dict[str, float]], task: str, measure: str) -> Interval:
    """Return how much more one of the `measures` correlates with a task over the methods than perplexity does, and its
    95 % interval by resampling methods."""
    return resampled(together(found, task, measure, NAMES["perplexity"]), second_more_than_third)


def predictors(model: str) -> str:
    """Return by how much the correlation of each measure with each task exceeds that of perplexity."""
    lengths = _compared(model)
    lines = []
    for task in (NATS, NAMES["own"], ICL):
        for measured in (*(f"memory, {text}" for text in TEXTS.values()), NAMES["longppl"], NAMES["shared"], SHARE):
            found = [against_perplexity(measures(model, length), task, measured) for length in lengths]
            lines.append([task, measured, *(with_ends(one, 2, "+") for one in found)])
    return table(["task", "measure", *(f"{length:,}" for length in lengths)], lines)


def predicting(model: str, length: int) -> dict[str, dict[str, float]]:
    """Return the `measures` of the methods that still predict at a length: those that take less than a nat per token
    more than the first method does at the shortest length."""
    first = next(iter(next(iter(token_nats(model).values())).values()))
    found = measures(model, length)
    most = float(np.mean(list(first.values()))) + 1
    able = {how for how, value in found[NAMES["perplexity"]].items() if -value < most}
    return {name: {how: value for how, value in by.items() if how in able} for name, by in found.items()}


def predicting_correlations(model: str) -> str:
    """Return, over the methods that still predict, the correlation of each measure with the tasks, and by how much it
    exceeds that of perplexity."""
    at = {length: predicting(model, length) for length in _compared(model)[1:]}
    perplexity = NAMES["perplexity"]
    names = *(f"memory, {text}" for text in TEXTS.values()), SHARE, perplexity
    lines = []
    for task, name in product((NATS, NAMES["own"]), names):
        line = [task, name]
        for found in at.values():
            line.append(_correlation(together(found, task, name)))
            gap = against_perplexity(found, task, name)
            line.append(MISSING if name == perplexity else with_ends(gap, 2, "+"))
        lines.append(line)
    heads = [head for length in at for head in (f"{length:,}", "more than perplexity")]
    return table(["task", "measure", *heads], lines)


TABLES: dict[str, Callable[[str], str]] = {
    "memory": memory,
    "costs": lambda model: costs(priced(model), _method),
    "costs-gpu": lambda model: costs(real_tables.quality(model, "cost-gpu"), _method),
    "costs-gpu-far": lambda model: costs(real_tables.quality(model, "cost-gpu-far"), _method),
    "best": best,
    "correlations": correlations,
    "predictors": predictors,
    "predicting": predicting_correlations,
    "nats": nats,
    **{f"nats-{length}": nats_by_distance(length) for length in (8192, 16384, 32768)},
    "outputs": outputs,
    "tokens": tokens,
    "beside": beside_full,
    **{part: partial(qualities, part=part) for part in NAMES},
}


def made(name: str) -> str:
    """Return a table by its name on the page: the kind of table, and the model."""
    kind, model = name.split(" ", 1)
    return TABLES[kind](model)


def page() -> str:
    """Return the page with its tables made again of the recorded rows."""
    return kept.with_tables(PAGE.read_text(), made)


def pareto(model: str, price: str, unit: str, scale: float) -> Figure:
    """Return the span on shuffled text over a cost at the longest length, a point for each method.

    Args:
        price: a field of the cells.
        unit: what the axis shows, with a place for the length.
        scale: what a unit of the figure is in that of the field.
    """
    longest = max(cell.length for cell in priced(model))
    cost = {cell.method: getattr(cell, price) for cell in priced(model) if cell.length == longest}
    lines = []
    for index, (how, one) in enumerate(curves(model, "shuffled").items()):
        if cost.get(how) and one.summary is not None:
            span = one.summary.span
            low, high = ([np.nan if limit is None else limit] for limit in (span.low, span.high))
            lines.append(Line(how, [cost[how] / scale], [span.value], index, low, high, [[how]], "cost", "points"))
    return Figure(
        title=f"What each method remembers and costs: {MODELS[model]}",
        x=unit.format(longest),
        y="span on shuffled text (tokens)",
        lines=lines,
        log_x=True,
        counts=False,
        num_members=len(lines),
        front=pareto_front([(line.x[0], line.y[0]) for line in lines], False, True),
    )


def claims() -> dict[str, bool]:
    """Return the claims of the page, and whether the rows support each."""
    yarn, warm = "rope:type=yarn,factor=4", "rope:type=yarn,factor=4+temperature"
    searched = "rope:type=factors,file=factors.json"
    parallel = "ape:temperature=0.9,scale=0.9,piece=256", "replug:weights=uniform,piece=256,tail=128"
    verdicts = {(cell.method, cell.length): cell.verdict for cell in quality("demo", "perplexity")}
    facts = [against_perplexity(measures("demo", 2048), "facts", f"memory, {text}") for text in TEXTS.values()]
    real = "SmolLM2-135M-Instruct.Q4_1"
    gaps, able = more_than_first(needle_nats_at(real, 8192)[0.0]), predicting(real, 16384)
    longer = "rope:type=yarn", "rope:type=ntk", "replug", "ape", "selfextend", "dca:"  # how their names begin
    return {
        "YaRN has a longer span than full on both texts": all(_change(part, "full", yarn) > 0 for part in TEXTS),
        "YaRN has a longer span on shuffled text than every method without it but APE and searched factors": all(
            _change("shuffled", how, yarn) > 0
            for how in curves("demo", "shuffled")
            if not how.startswith((yarn, searched, "ape"))
        ),
        "APE has a longer span than YaRN on natural text, and is not shown to on shuffled text": (
            _change("natural", yarn, parallel[0]),
            _change("shuffled", yarn, parallel[0]),
        )
        == (1, 0),
        "searched factors have a longer span than YaRN on both texts": all(
            _change(part, yarn, searched) > 0 for part in TEXTS
        ),
        "temperature lengthens YaRN's span on shuffled text, and is not shown to on natural text": (
            _change("shuffled", yarn, warm),
            _change("natural", yarn, warm),
        )
        == (1, 0),
        "APE and RePlug predict better than full at four windows": all(
            verdicts[how, 2048] == "win" for how in parallel
        ),
        "APE and RePlug lengthen the span on both texts": all(
            _change(part, "full", how) > 0 for part in TEXTS for how in parallel
        ),
        "TOVA and Knorm at a quarter of the keys shorten the span": all(
            _change("shuffled", "full", how) < 0 for how in ("tova:share=0.25", "knorm:share=0.25")
        ),
        "memory is not shown to predict facts better or worse than perplexity": all(
            low < 0 < high for _, low, high in facts
        ),
        "SmolLM2: the first needle takes less than under full under the methods that lengthen memory": all(
            more[2] < 0 for how, more in gaps.items() if how.startswith(longer)
        ),
        "SmolLM2, two windows: the farthest needle is found under these but YaRN by 2 and NTK": (
            found_farthest(real, 16384)
            == {how for how in gaps if how.startswith(longer) and how not in ("rope:type=yarn,factor=2", NTK)}
        ),
        "SmolLM2, four windows: it is found under Self-Extend by a window and DCA by chunks of 2,048 alone": (
            found_farthest(real, 32768) == {"selfextend:group=8,window=2048", "dca:chunk=2048"}
        ),
        "SmolLM2, two and four windows: needles follow memory of natural text": all(
            correlation(real, "memory, natural text", NATS, length)[1] > 0.5 for length in (16384, 32768)
        ),
        "SmolLM2, two windows, methods that predict: needles follow memory more closely than perplexity": (
            against_perplexity(able, NATS, "memory, natural text")[1] > 0
        ),
        "SmolLM2, two windows, methods that predict: facts follow perplexity more closely than memory": (
            against_perplexity(able, NAMES["own"], "memory, natural text")[2] < 0
        ),
        "LongPPL over YaRN's key tokens follows needles more closely than perplexity does, at two windows": (
            against_perplexity(measures("demo", 1024), NATS, NAMES["shared"])[1] > 0
        ),
    }


def found_farthest(model: str, length: int) -> set[str]:
    """Return the methods under which the farthest needle takes fewer nats than guessed digits, by the interval."""
    found = needle_nats_at(model, length)[0.0]
    return {how for how, by in found.items() if student_mean(np.array(list(by.values())))[2] < GUESSED}


def _change(part: str, one: str, other: str) -> int:
    """Return 1 where the span of the embedded model is longer by the other method than by the one, -1 where it is
    shorter, and 0 where the interval of the paired difference holds 0."""
    every = curves("demo", part)
    (span,) = (found for found in differences(every[one].curve, every[other].curve) if found.name == "span")
    if span.low is None or span.high is None:
        return 0
    return int(span.low > 0) - int(span.high < 0)


def measure_parts(options: argparse.Namespace) -> None:
    """Measure the chosen parts, each into a run folder of its own."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) if options.quick else options.out
        prefixes = ("full", "sinks") if options.quick else tuple(options.method or ("",))
        methods = [how for how in METHODS if how.startswith(prefixes)]
        name = "demo" if options.model == DEMO else Path(options.model).resolve().name
        for part in options.part or PARTS:
            where, repeats = out / name / part, 2 if options.quick else options.repeats
            try:
                rows = PARTS[part].measured(options.model, methods, options.text, where, repeats)
            except (ValueError, OSError) as error:
                sys.exit(f"{part}: {error}")
            print(f"{name} {part}: {rows} rows in {where}", flush=True)


def main() -> None:
    parser = parser_of(
        __doc__,
        "two examples of every part under two methods",
        check="fail where the rows do not support a claim of that page",
    )
    parser.add_argument("--model", default=DEMO, help="a folder; default: the embedded model")
    parser.add_argument("--text", default=TEXT, help="a text that the model was not trained on")
    parser.add_argument("--part", action="append", choices=PARTS, help="only these")
    parser.add_argument("--method", action="append", help="only those that begin so, such as rope")
    parser.add_argument("--repeats", type=int, help="examples at each length, instead of those of the part")
    parser.add_argument("--out", type=Path, default=Path("runs/methods_table"), help="folder for the runs")
    parser.add_argument("--record", action="store_true", help="keep the rows of all runs below --out")
    parser.add_argument("--write", action="store_true", help="make tables and picture of docs/methods_table.md")
    options = parser.parse_args()
    if options.record:
        print(f"{kept.record(options.out, RECORDED):,} bytes in {RECORDED}")
    elif options.write:
        PAGE.write_text(page())
        for model, name, file in PICTURES:
            print(only_png(draw_figure(pareto(model, *PRICES[name]), PAGE.parent / "pictures", file)))
    elif options.check:
        found = claims()
        end(found, [name for name, holds in found.items() if not holds], check=True)
    else:
        measure_parts(options)


if __name__ == "__main__":
    run_script(main)
