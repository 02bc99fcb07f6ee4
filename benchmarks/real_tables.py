"""Tables, pictures and claims of docs/real_models.md, made of the rows that `real_models.py --record` kept.

A table stands on the page between `<!-- table: NAME MODEL -->` and `<!-- end -->`.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import common
import numpy as np
import recorded as kept
import topk_figure
from common import Interval, only_png, table, with_ends
from scipy.special import stdtrit

from farspan.record import Row
from farspan.report.attention import At
from farspan.report.attention import series as attention_series
from farspan.report.cells import Cell, cells
from farspan.report.curve_figures import map_figure
from farspan.report.curve_section import draw_curves
from farspan.report.curves import CurveMember, series
from farspan.report.figure import Figure, Line, Style, sample_size
from farspan.report.perplexity import PerplexityMember
from farspan.report.perplexity import series as perplexity_series
from farspan.report.picture import draw_figure
from farspan.stats import (
    Difference,
    MeasuredCurve,
    MemoryLength,
    differences,
    interval,
    measured_mean,
    signed_tokens,
    student_mean,
    whole_repeats,
)

RECORDED = kept.BENCHMARKS / "real_models"
PAGE = RECORDED.parents[1] / "docs" / "real_models.md"
PICTURES = PAGE.parent / "pictures"
MODELS = {"SmolLM2-135M-Instruct.Q4_1": "SmolLM2", "gemma-3-270m-q4_k_m": "Gemma 3"}
# after a model's name: that of a model that a recipe made of it
DECOYS = ("SMT, decoys", "SMT, decoys, seed 1", "SMT, decoys, seed 2")
LOG_N = ("SMT, decoys, log-n", "SMT, decoys, log-n, seed 1", "SMT, decoys, log-n, seed 2")  # read with log-n scaling
EQUAL = "SMT, 120 steps"  # as many as the trainings with decoys
RECURRENCES = "SMT, recurrences"  # 120 steps too
EXTENDED = (
    *(f" {how}" for how in ("SMT", EQUAL, RECURRENCES, *DECOYS, *LOG_N)),
    " CEPE",
    " CEPE, seed 1",
)
PLAIN = "as it is"  # how the tables call a model under full attention, in bfloat16
NUMBERS = {"half_life": "half-life", "reach": "reach", "span": "span"}
TEXTS = {"natural": "books", "shuffled": "books, shuffled", "python": "Python", "nested": "books, `nested`"}
MISSING = "–"
STRETCHED = "`selfextend:group=8,window=2048`"
PICTURED = (  # of the methods in the tables: those with most memory, and the models that they are compared with
    PLAIN,
    "rope:type=yarn,factor=2",
    "rope:type=yarn,factor=4",
    STRETCHED.strip("`"),
    "replug:weights=uniform,piece=2048,tail=4096",
    "ape:temperature=0.9,scale=0.9,piece=2048",
    "dca:chunk=2048",
)


def recorded(model: str, part: str) -> tuple[dict[str, Any], list[Row]]:
    """Return run.json and the rows of one run; two empty ones where it was not recorded."""
    return kept.recorded(RECORDED, model, part)


def curves(model: str, *parts: str) -> list[CurveMember]:
    """Return the forgetting curves of some runs, with names that distinguish them."""
    found = [recorded(name, part) for part in parts for name in (model, *(f"{model}{end}" for end in EXTENDED))]
    models = {name: about for header, _ in found for name, about in header.get("models", {}).items()}
    rows = [row for _, rows in found for row in rows]
    return [one for one in series(rows, models) if one.summary is not None]


def quality(model: str, part: str) -> list[Cell]:
    """Return the quality of a run by model, method and length."""
    header, rows = recorded(model, part)
    for other, more in (recorded(f"{model}{end}", part) for end in EXTENDED):
        header = {**other, **header, "models": header.get("models", {}) | other["models"]} if more else header
        rows = rows + more
    return cells(rows, header) if rows else []


def by_length(head: str, lines: Mapping[str, Mapping[int, str]], unit: str = "") -> str:
    """Return a table with a column for each length."""
    lengths = sorted({length for line in lines.values() for length in line})
    named = [[name, *(line.get(n, MISSING) for n in lengths)] for name, line in lines.items()]
    return table([head, *(f"{n:,}{unit}" for n in lengths)], named)


def label(one: CurveMember) -> str:
    """Return what tells a curve from the others of its run: the type of its weights, its recipe, or its method."""
    return member(one.model, one.method)


def member(model: str, method: str) -> str:
    """Return what tells a line of a comparison from the others: the recipe that made its model, or its method. A model
    of CEPE is its base under every method but `cepe`."""
    made = model.partition(" ")[2]
    if made and not made.startswith("CEPE"):
        return made
    seed = made.removeprefix("CEPE") if method.startswith("cepe") else ""
    return PLAIN if method == "full" else f"`{method}`{seed}"


def halves(one: CurveMember) -> dict[int, str]:
    """Return copy and control accuracy of a curve by length."""
    means = zip(measured_mean(one.measured.copy), measured_mean(one.measured.control), strict=True)
    written = [" / ".join(f"{half:.2f}".removeprefix("0") for half in both) for both in means]
    return dict(zip(one.measured.lengths.tolist(), written, strict=True))


def memory_lengths() -> str:
    """Return the memory lengths of every model and text under full attention."""
    lines = []
    for model, short in MODELS.items():
        for part, text in TEXTS.items():
            for one in curves(model, part):
                numbers = [str(getattr(one.summary, name)) for name in NUMBERS]
                lines.append([short, f"{one.trained_length:,}", text, str(whole_repeats(one.curve)), *numbers])
    return table(["model", "trained on", "text", "texts", *NUMBERS.values()], lines)


def curve_points(model: str) -> str:
    """Return copy and control accuracy by text and length."""
    return by_length(
        "copy / control", {text: halves(one) for part, text in TEXTS.items() for one in curves(model, part)}
    )


def curve_by_member(part: str) -> Callable[[str], str]:
    """Return a function that makes the table of a run's curves by method or type of weights."""
    return lambda model: by_length("copy / control", {label(one): halves(one) for one in curves(model, part)})


def lengths_by_member(part: str) -> Callable[[str], str]:
    """Return a function that makes the table of a run's memory lengths, with the paired differences from the first."""

    def made(model: str) -> str:
        first, *others = curves(model, part)
        lines = [[label(first), *(str(getattr(first.summary, name)) for name in NUMBERS)]]
        for one in others:
            found = {d.name: d for d in differences(first.curve, one.curve, names=(label(first), label(one)))}
            both = [f"{getattr(one.summary, name)}; {difference(found[name])}" for name in NUMBERS]
            lines.append([label(one), *both])
        return table(["", *NUMBERS.values()], lines)

    return made


def far(model: str) -> str:
    """Return copy and control accuracy on both kinds of books at the length of `far-shuffled`, and what is copied
    beyond guessing, with its interval."""
    shuffled = {label(one): one for one in curves(model, "far-shuffled")}
    lines = []
    for one in curves(model, "methods-natural"):
        other = shuffled[label(one)]
        (length,) = other.measured.lengths.tolist()
        cells = (cell for each in (one, other) for cell in (halves(each)[length], signed(*beyond(each, length))))
        lines.append([label(one), *cells])
    beside = ("copied beyond guessing", "copy / control, shuffled", "copied beyond guessing, shuffled")
    return table(["", "copy / control, books", *beside], lines)


def beyond(one: CurveMember, length: int) -> Interval:
    """Return how much of a text of one length is copied beyond guessing: mean, low, high over texts."""
    return over_texts((one.curve.copy - one.curve.control)[:, one.curve.lengths == length].ravel().tolist())


def difference(one: Difference) -> str:
    return f"{one.known} {one.interval}".rstrip()


def quality_by_method(part: str) -> Callable[[str], str]:
    """Return a function that makes the table of a run's quality by method and length."""
    return lambda model: quality_table(quality(model, part), lambda cell: member(cell.model, cell.method))


def quality_table(found: Sequence[Cell], name: Callable[[Cell], str]) -> str:
    """Return the quality by length; a number in parentheses: examples, where there are fewer than elsewhere.

    Args:
        name: returns the name of a cell's line.
    """
    most = max(cell.n for cell in found)
    lines: dict[str, dict[int, str]] = {}
    for cell in found:
        fewer = f" ({cell.n})" if cell.n < most and cell.value is not None else ""
        lines.setdefault(name(cell), {})[cell.length] = written(cell) + fewer
    return by_length(f"{found[0].quality}; {most} examples", lines, "" if found[0].unit == "tokens" else " shown")


def written(cell: Cell) -> str:
    """Return the mean of a cell with its interval, marked where it is better or worse than the first line's."""
    if cell.value is None:
        return cell.failed or MISSING
    digits = 1 if cell.value >= 10 else 3 if cell.value < 1 else 2
    text = f"{cell.value:.{digits}f}"
    if cell.low is not None and cell.high is not None:
        text += f" [{cell.low:.{digits}f}, {cell.high:.{digits}f}]"
    return text + {"win": " ▲", "loss": " ▼"}.get(cell.verdict, "")


def read_by(model: str, how: str) -> tuple[str, str]:
    """Return the model and method that `how` names: a method, or a recipe of EXTENDED."""
    return (f"{model} {how}", "full") if f" {how}" in EXTENDED else (model, how)


def nats(model: str, how: str, length: int) -> dict[int, float]:
    """Return the nats per token of the perplexity runs by repeat; `how` as in `read_by`."""
    model, method = read_by(model, how)
    rows = recorded(model, "perplexity")[1]
    return {row.repeat: row.scores["nats"] for row in rows if (row.method, row.length) == (method, length)}


def more_nats(model: str, one: tuple[str, int], other: tuple[str, int]) -> Interval:
    """Return how many nats per token more `one` takes than `other`, each a method and a length, on the same targets:
    the mean and its 95 % interval over texts."""
    return paired(*(nats(model, *which) for which in (one, other)))


def paired(first: Mapping[Any, float], second: Mapping[Any, float]) -> Interval:
    """Return the mean of the first less the second over the texts of both, and its 95 % interval."""
    return over_texts([first[repeat] - second[repeat] for repeat in sorted(first.keys() & second.keys())])


def over_texts(values: Sequence[float]) -> Interval:
    """Return the mean of one value of each text, and its 95 % interval. NaN: not measured."""
    return common.interval(np.array(values))


def signed(mean: float, low: float, high: float) -> str:
    """Return a difference with its interval."""
    return with_ends((mean, low, high), 3, "+z")


def nats_differences(model: str) -> str:
    """Return paired differences of nats per token that the page speaks of."""
    yarn, sinks = "rope:type=yarn,factor=4", "sinks:window=8188,sinks=4"
    pairs = [
        *((("full", 8192), ("full", 2048)), (("full", 16384), ("full", 8192)), ((sinks, 32768), ("full", 8192))),
        *((("lambda_mask:window=8192,sinks=10", 32768), ("full", 8192)), (("dca", 16384), ("full", 8192))),
        (("selfextend:group=8,window=2048", 16384), ("full", 8192)),
        *((("rope:type=yarn,factor=2", n), ("full", 8192)) for n in (8192, 16384)),
        *(((yarn, n), ("full", 8192)) for n in (8192, 16384, 32768)),
        *((("SMT", n), (yarn, n)) for n in (8192, 16384, 32768)),
        *((("SMT", n), ("full", 8192)) for n in (8192, 16384, 32768)),
        *((("SMT, decoys", n), ("SMT", n)) for n in (2048, 8192, 16384)),
    ]
    lines = []
    for one, other in pairs:
        if nats(model, *one):
            named = (f"{member(*read_by(model, how))} at {n:,}" for how, n in (one, other))
            lines.append([*named, signed(*more_nats(model, one, other))])
    return table(["", "less", "nats per token"], lines)


def nats_by_method(model: str) -> str:
    """Return how many nats per token more each method takes at each length than the model as it is at its trained
    length, paired by text."""
    header, rows = recorded(model, "perplexity")
    least = "full", header["models"][model]["trained_length"]
    lines: dict[str, dict[int, str]] = {}
    for method, length in dict.fromkeys((row.method, row.length) for row in rows):
        if (method, length) != least:
            lines.setdefault(member(model, method), {})[length] = signed(*more_nats(model, (method, length), least))
    return by_length(f"nats per token, more than {PLAIN} at {least[1]:,}", lines)


def topk(model: str) -> tuple[PerplexityMember, list[PerplexityMember], list[int]]:
    """Return full attention, top-k attention by ascending k, and these k."""
    full, *others = perplexity_series(recorded(model, "topk")[1])
    return full, others, [int(one.method.partition("=")[2]) for one in others]


def topk_cost(model: str, k: int) -> np.ndarray:
    """Return the nats per token that k keys take more than full attention: mean, low, high by length [3, lengths]."""
    full, others, ks = topk(model)
    more = others[ks.index(k)].values("nats") - full.values("nats")
    return np.stack([measured_mean(more), *interval(more)])


def topk_nats(model: str) -> str:
    """Return the table of `topk_cost`."""
    full, _, ks = topk(model)
    lines = {}
    for k in ks:
        ends = topk_cost(model, k).T
        lines[f"{k:,}"] = dict(zip(full.lengths, (signed(*map(float, three)) for three in ends), strict=True))
    return by_length("k", lines)


def nats_under(rows: Sequence[Row], method: str, length: int) -> dict[int, float]:
    """Return the nats per token by repeat of a method, by the end of its name."""
    return {row.repeat: row.scores["nats"] for row in rows if row.method.endswith(method) and row.length == length}


def ralm_cost(model: str, passages: int, method: str = "full") -> Interval:
    """Return how many nats per token more windows take after retrieved passages than without: mean, low, high."""
    rows = recorded(model, "ralm")[1]
    return paired(nats_under(rows, method, passages), nats_under(rows, "full", 0))


def ralm(model: str) -> str:
    """Return the perplexity after retrieved passages, and the table of `ralm_cost`, by method."""
    lines: dict[str, dict[int, str]] = {}
    cells = quality(model, "ralm")
    for cell in cells:
        name = member(cell.model, cell.method)
        lines.setdefault(f"perplexity, {name}", {})[cell.length] = written(cell)
        if cell.length and cell.n:
            more = signed(*ralm_cost(model, cell.length, cell.method))
            lines.setdefault(f"nats per token more than without, {name}", {})[cell.length] = more
    return by_length(f"{cells[0].n} windows", lines, " passages")


def encoded_nats(model: str, one: tuple[str, int], other: tuple[str, int], part: str = "encoded") -> Interval:
    """Return `more_nats` of the runs of the model with an encoder and without; a method by the end of its name.

    Args:
        part: `encoded`, of the training with seed 0, or `encoded-more`, of that with seed 1, on more texts.
    """
    rows = [row for made in ("", " CEPE", " CEPE, seed 1") for row in recorded(f"{model}{made}", part)[1]]
    return paired(*(nats_under(rows, *which) for which in (one, other)))


CEPE, SHARPER = "decoder_window=512", "trained_chunks=8"  # how the names of the methods end
SINKS, REPLUG = "window=508,sinks=4", "piece=128,tail=128"
ENCODED_PAIRS = (
    ((CEPE, 2048), ("full", 512)),
    ((CEPE, 8192), ("full", 512)),
    ((CEPE, 8192), (CEPE, 512)),
    ((CEPE, 8192), (CEPE, 2048)),
    ((CEPE, 8192), ("full", 8192)),
    ((CEPE, 8192), (SINKS, 8192)),
    ((CEPE, 8192), (REPLUG, 8192)),
    ((SHARPER, 8192), (CEPE, 8192)),
)


def encoded_differences(model: str) -> str:
    """Return paired differences of nats per token with an encoder, of both trainings."""
    names = {"full": PLAIN, CEPE: "CEPE", SHARPER: f"CEPE, {SHARPER}", SINKS: "sinks", REPLUG: "RePlug"}
    lines = []
    for both in ENCODED_PAIRS:
        named = (f"{names[how]} at {length:,}" for how, length in both)
        found = (encoded_nats(model, *both, part) for part in ("encoded", "encoded-more"))
        lines.append([*named, *(MISSING if np.isnan(one[0]) else signed(*one) for one in found)])
    return table(["nats per token", "less", "seed 0, 300 steps, 4 texts", "seed 1, 150 steps, 32 texts"], lines)


def costs(found: Sequence[Cell], name: Callable[[Cell], str]) -> str:
    """Return the cost by length: seconds to the first token, tokens read and generated a second, memory of the context.

    Args:
        name: returns the name of a cell's line.
    """
    lines: dict[str, dict[int, str]] = {}
    for cell in found:
        speeds = (cell.prefill_seconds, cell.prefill_rate, cell.decode_rate)
        if cell.context_bytes is not None and None not in speeds:
            text = "{:.2f} s / {:,.0f} / {:,.3g} / {:.1f} MiB".format(*speeds, cell.context_bytes / 2**20)
            lines.setdefault(name(cell), {})[cell.length] = text
    return by_length("seconds to the first token / tokens read, generated a second / context", lines)


def gpu_seconds(model: str) -> str:
    """Return the seconds in which one text was read on a GPU, by method and length."""
    lines: dict[str, dict[int, str]] = {}
    for row in recorded(model, "gpu")[1]:
        lines.setdefault(member(row.model, row.method), {})[row.length] = f"{row.seconds:.2f}"
    return by_length("seconds", lines)


LATE = 200  # last steps of the main stage of CEPE, of 300
STEP_TOKENS = 8 * (1024 + 256)  # of the encoder and the decoder


def training_slope(model: str) -> tuple[int, Interval]:
    """Return the tokens of the main stage of CEPE, and by how many nats its loss rises with each doubling of the tokens
    over the last LATE steps: the slope of least squares, low, high (Student's t)."""
    text = (RECORDED / f"{model} CEPE" / "training-main.jsonl").read_text()
    logged = [line for line in map(json.loads, text.splitlines()) if "loss_nats" in line]
    steps, nats = np.array([(line["step"], line["loss_nats"]) for line in logged]).T
    late = steps > steps[-1] - LATE
    (slope, _), covariance = np.polyfit(np.log2(steps[late]), nats[late], 1, cov=True)
    half = stdtrit(late.sum() - 2, 0.975) * np.sqrt(covariance[0, 0])
    return int(steps[-1]) * STEP_TOKENS, (float(slope), float(slope - half), float(slope + half))


def training_needed(model: str) -> str:
    """Return the table of `training_slope`, and of the tokens at which the loss would be lower by what the context is
    worth to the model that reads all of it: calculated, with the interval of the slope."""
    trained, slopes = training_slope(model)
    worth = encoded_nats(model, ("full", 512), ("full", 8192), "encoded-more")[0]
    tokens = [f"{trained * 2 ** (worth / -one) / 1e6:.3g} million" if one < 0 else "not reached" for one in slopes]
    head = (
        f"nats per doubling of tokens, last {LATE} steps",
        "8,192 tokens are worth, nats",
        "tokens to fall by as much",
    )
    return table(head, [[signed(*slopes), f"{worth:.3f}", "{} [{}, {}]".format(*tokens)]])


HEAVIEST, FIRST = ("all", "pareto"), ("sinks",)  # shares of attention in the scores of a row, by layer and head


def attention(model: str) -> str:
    """Return the shares of attention by length, with their intervals over texts."""
    (one,) = attention_series(recorded(model, "attention")[1])
    has_windows = min(one.at[0].visible) < max(one.at[0].visible)
    nearest = f"nearest {one.settings['bin']:,} tokens"
    names = {"pareto": "heaviest quarter", "pareto_rest": "heaviest quarter, no sinks", "sinks": "sinks"}
    names |= {"nearest_bin": nearest, "nearest_bin_rest": f"{nearest}, no sinks"}
    lines = []
    for at in one.at:
        data = at.as_data()
        values = [tuple(data[f"{n}{end}"] for end in ("", "_low", "_high")) for n in names]
        if has_windows:
            values += [of_full_layers(model, at.length, share) for share in (HEAVIEST, FIRST)]
        lines.append([f"{at.length:,}", *(_share(*three) for three in values)])
    more = ["heaviest quarter, layers without a window", "sinks, there"] if has_windows else []
    return table(["keys", *names.values(), *more], lines)


def _share(mean: float, low: float | None, high: float | None) -> str:
    """Return a share with its interval, which is None where all texts have the same."""
    return f"{mean:.3f}" if low is None else f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def of_full_layers(model: str, length: int, share: Sequence[str]) -> Interval:
    """Return the mean of a share of attention, HEAVIEST or FIRST, over the heads of the layers that see most keys, with
    its interval over texts."""
    found = [row.scores for row in recorded(model, "attention")[1] if row.length == length]
    visible = np.array(found[0]["visible"])
    return over_texts(
        [float(np.array(reduce(getitem, share, scores))[visible == visible.max()].mean()) for scores in found]
    )


def key_weights(at: At, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Return distances, 1 for the query's own key, and the natural logarithms of the mean weight of a key there
    [texts, distances], in the layers that see most keys. `part`: "all", or "rest", without the sinks."""
    sees_most = np.array(at.visible) == max(at.visible)
    sums = at.shares[part]["distance"][:, sees_most].mean((1, 2))  # of the nearest keys
    ends = np.array(at.ends)
    starts = np.array([0, *at.ends[:-1]])
    return np.sqrt((starts + 1) * ends), np.log(np.diff(sums, prepend=0) / (ends - starts))


def decay_power(model: str, length: int) -> Interval:
    """Return the power of the distance with which the weight of a key falls without sinks, from 8 tokens to half of the
    text: mean, low, high over texts."""
    (one,) = attention_series(recorded(model, "attention")[1])
    distances, logs = key_weights(next(at for at in one.at if at.length == length), "rest")
    some = (distances >= 8) & (distances <= length / 2)
    return over_texts(np.polyfit(np.log(distances[some]), logs[:, some].T, 1)[0].tolist())


STYLES: dict[str, Style] = {"all": "solid", "rest": "dashed"}


def decay_figure(model: str, title: str) -> Figure | None:
    """Return the mean weight of a key by its distance from the query, with sinks and without, at the shortest and the
    longest length; None: not recorded."""
    lines, texts = [], []
    for one in attention_series(recorded(model, "attention")[1]):
        for index, at in enumerate((one.at[0], one.at[-1])):
            for part, style in STYLES.items():
                distances, logs = key_weights(at, part)
                texts.append(len(logs))
                mean, low, high = np.exp([measured_mean(logs), *interval(logs)])
                name = f"query at {at.length:,}" if part == "all" else ""
                lines.append(Line(name, distances, mean, index, low, high, style=style))
    look: dict[str, Any] = {"log_x": True, "log_y": True, "num_members": len(lines) // 2}
    look["note"] = sample_size(texts, "text")
    x, keys = "distance (tokens)", list(zip(("all keys", "without the first 8 tokens"), STYLES.values(), strict=True))
    return Figure(title, x, "mean weight of a key", lines, keys=keys, **look) if lines else None


def recall_map(model: str) -> str:
    """Return the memory index by length and depth."""
    (one,) = curves(model, "depths")
    recall = one.everywhere
    lines = {
        f"{depth:g}": {n: f"{x:.2f}" for n, x in zip(recall.lengths.tolist(), recall.memory_index[:, i], strict=True)}
        for i, depth in enumerate(recall.depths)
    }
    return by_length("depth", lines)


def answer_nats(model: str, how: str, depth: float, length: int) -> dict[int, float]:
    """Return the nats of a needle's answer by repeat; `how` as in `read_by`."""
    model, method = read_by(model, how)
    place = method, depth, length
    rows = [row for row in recorded(model, "needle")[1] if (row.method, row.depth, row.length) == place]
    return {row.repeat: row.scores["nats"] for row in rows}


def needle_nats(model: str) -> dict[float, dict[int, Interval]]:
    """Return the nats of a needle's answer by depth and length, of the model as it is: mean, low, high over texts."""
    found: dict[float, dict[int, Interval]] = {}
    for depth, length in sorted({(row.depth, row.length) for row in recorded(model, "needle")[1]}):
        each = answer_nats(model, "full", depth, length)
        found.setdefault(depth, {})[length] = over_texts(list(each.values()))
    return found


def needle_depths(model: str) -> str:
    """Return the table of `needle_nats`."""
    found = needle_nats(model).items()
    lines = {f"{depth:g}": {n: with_ends(x, 1) for n, x in line.items()} for depth, line in found}
    return by_length("nats of the answer, by depth", lines)


NEEDLE_TOKENS = 8192


def needle_decoys(model: str, how: str, depth: float) -> Interval:
    """Return how many nats more a needle's answer takes after a training with decoys: mean, low, high over texts."""
    return paired(*(answer_nats(model, one, depth, NEEDLE_TOKENS) for one in (how, "full")))


def needle_methods(model: str) -> str:
    """Return the nats of a needle's answer by depth, before and after trainings with decoys."""
    lines = []
    for depth in needle_nats(model):
        line = [f"{depth:g}"]
        for how in ("full", *DECOYS):
            mean = f"{np.mean(list(answer_nats(model, how, depth, NEEDLE_TOKENS).values())):.1f}"
            more = with_ends(needle_decoys(model, how, depth), 1, "+z")
            line.append(mean if how == "full" else f"{mean}; {more}")
        lines.append(line)
    return table(["depth", PLAIN, *(f"{how}; more than {PLAIN}" for how in DECOYS)], lines)


def spans_of_seeds(model: str) -> dict[str, list[Difference]]:
    """Return by how much the span is longer after each training with decoys, by what it is compared with."""
    found = {label(one): one for one in curves(model, "recipes")}
    return {
        how: [_span(found[how], found[seed]) for seed in DECOYS]
        for how in (PLAIN, "`rope:type=yarn,factor=4`", STRETCHED, "SMT", EQUAL, RECURRENCES)
    }


def over_seeds(found: Sequence[Difference]) -> Interval:
    """Return the mean over seeds and its interval."""
    return student_mean(np.array([one.value for one in found]))[:3]


def seeds(model: str) -> str:
    """Return by how much the span is longer after trainings with decoys: each with its interval over texts, and the
    mean with its interval over seeds."""
    lines = []
    for how, found in spans_of_seeds(model).items():
        mean, low, high = over_seeds(found)
        each = [f"{signed_tokens(one.value)} {one.interval}" for one in found]
        lines.append([how, *each, f"{signed_tokens(mean)} [{signed_tokens(low)}, {signed_tokens(high)}]"])
    return table(
        [
            "span of SMT with decoys, longer than that of",
            *(f"seed {n}" for n in range(len(DECOYS))),
            "mean of the seeds",
        ],
        lines,
    )


def gains(model: str, part: str) -> dict[str, dict[int, Interval]]:
    """Return, by method, the `_gains` over the model as it is."""
    first, *others = curves(model, part)
    return {label(one): _gains(first, one) for one in others}


def _gains(first: CurveMember, one: CurveMember) -> dict[int, Interval]:
    return more_copied(first.curve, one.curve)


def more_copied(first: MeasuredCurve, one: MeasuredCurve) -> dict[int, Interval]:
    """Return by length how much more one curve copies beyond what is guessed than the first, text by text: mean, low,
    high."""
    more = one.copy - one.control - (first.copy - first.control)
    ends = np.stack([measured_mean(more), *interval(more)], 1)
    return dict(zip(one.lengths.tolist(), map(tuple, ends.tolist()), strict=True))


def gaps(found: Mapping[str, Mapping[int, Interval]], what: str) -> str:
    """Return a table of gains by line and length."""
    lines = {name: {n: signed(*gain) for n, gain in line.items()} for name, line in found.items()}
    return by_length(f"{what}, more than as it is", lines)


def facts_gains(model: str) -> dict[str, dict[int, Interval]]:
    """Return how many more of the facts are answered than by the model as it is, paired by example: by line, length."""
    found: dict[str, dict[int, Interval]] = {}
    for cell in quality(model, "own"):
        if cell.difference is not None and cell.difference_low is not None and cell.difference_high is not None:
            gain = cell.difference, cell.difference_low, cell.difference_high
            found.setdefault(member(cell.model, cell.method), {})[cell.length] = gain
    return found


def more_facts(model: str, method: str, score: str) -> Interval:
    """Return how much more of a score of `own` a method has beyond the window than the model as it is, by example."""
    rows = recorded(model, "own-far")[1]
    return paired(*({row.example: row.scores[score] for row in rows if row.method == one} for one in (method, "full")))


def facts_far(model: str) -> str:
    """Return the answers of `own` by method at one length beyond the window, in all and of the passage alone."""
    rows, lines = recorded(model, "own-far")[1], []
    for method in dict.fromkeys(row.method for row in rows):
        line = [member(model, method)]
        for score in ("right", "recall"):
            mean, low, high = over_texts([row.scores[score] for row in rows if row.method == method])
            more = "–" if method == "full" else signed(*more_facts(model, method, score))
            line += [f"{mean:.3f} [{max(0, low):.3f}, {min(1, high):.3f}]", more]
        lines.append(line)
    columns = ["right answers", "more than as it is", "tokens of the passage", "more than as it is"]
    return table([f"{rows[0].length:,} tokens", *columns], lines)


TABLES: dict[str, Callable[[str], str]] = {
    "curve": curve_points,
    "weights": curve_by_member("weights"),
    "weights-lengths": lengths_by_member("weights"),
    "methods": curve_by_member("methods"),
    "methods-lengths": lengths_by_member("methods"),
    "recipes": curve_by_member("recipes"),
    "recipes-lengths": lengths_by_member("recipes"),
    "methods-natural": curve_by_member("methods-natural"),
    "methods-natural-lengths": lengths_by_member("methods-natural"),
    "natural-by-method": curve_by_member("natural-by-method"),
    "natural-by-method-lengths": lengths_by_member("natural-by-method"),
    "natural-by-method-gaps": lambda model: gaps(gains(model, "natural-by-method"), "copied beyond guessing"),
    "far": far,
    "own-far": facts_far,
    "own-gaps": lambda model: gaps(facts_gains(model), "right answers"),
    "rope": curve_by_member("rope"),
    "rope-gaps": lambda model: gaps(gains(model, "rope"), "copied beyond guessing"),
    "encoded-curve": curve_by_member("encoded-curve"),
    "costs": lambda model: costs(quality(model, "cost"), lambda cell: member(cell.model, cell.method)),
    "cost-encoded": lambda model: costs(quality(model, "cost-encoded"), lambda cell: member(cell.model, cell.method)),
    "gpu": gpu_seconds,
    "nats": nats_differences,
    "nats-by-method": nats_by_method,
    "encoded-nats": encoded_differences,
    "training-slope": training_needed,
    "attention": attention,
    "topk-nats": topk_nats,
    "ralm": ralm,
    "depths": recall_map,
    "needle-nats": needle_depths,
    "needle-methods": needle_methods,
    "seeds": seeds,
    **{
        part: quality_by_method(part)
        for part in (
            "perplexity",
            "encoded",
            "own",
            "needle",
            "sst2",
            "trec",
            "banking77",
            "qmsum",
        )
    },
}


def made(name: str) -> str:
    """Return a table by its name on the page."""
    if name == "memory-lengths":
        return memory_lengths()
    kind, short = name.split(" ", 1)
    return TABLES[kind](next(model for model, one in MODELS.items() if one == short))


def page() -> str:
    """Return the page with its tables made again of the recorded rows."""
    return kept.with_tables(PAGE.read_text(), made)


def draw() -> Iterator[Path]:
    """Draw the pictures of the page."""
    for model, short in MODELS.items():
        name = "real_" + short.lower().replace(" ", "_")
        texts = ((curves(model, part), text) for part, text in TEXTS.items() if part != "nested")
        if members := [replace(one, name=text) for found, text in texts for one in found]:
            yield only_png(draw_curves(members, PICTURES, f"Forgetting curves of {short}", name))
        parts = {"methods": "method", "methods-natural": "method, books", "natural-by-method": "method", "rope": "RoPE"}
        for part, by in parts.items():
            members = [replace(one, name=label(one).strip("`")) for one in curves(model, part)]
            if members := [one for one in members if not part.startswith("methods") or one.name in PICTURED]:
                yield only_png(
                    draw_curves(members, PICTURES, f"Forgetting curves of {short} by {by}", f"{name}_{part}")
                )
        for one in curves(model, "depths"):
            yield only_png(draw_figure(map_figure(one, f"Memory index of {short}"), PICTURES, f"{name}_map"))
        if (decay := decay_figure(model, f"Attention of {short} by distance")) is not None:
            yield only_png(draw_figure(decay, PICTURES, f"{name}_distance"))
        if recorded(model, "topk")[1]:
            path = PICTURES / f"{name}_topk.png"
            topk_figure.draw(*topk(model), path, f"Top-k attention of {short}, 4 books")
            yield path


def claims() -> dict[str, bool]:
    """Return the claims of the page, and whether the rows support each."""
    smollm2, gemma = MODELS
    natural, shuffled, nested = (curves(smollm2, part)[0] for part in ("natural", "shuffled", "nested"))
    (depths,), (large,), (books,) = curves(smollm2, "depths"), curves(gemma, "shuffled"), curves(gemma, "natural")
    weights = {label(one): one for one in curves(smollm2, "weights")}
    methods, recipes = ({label(one): one for one in curves(smollm2, part)} for part in ("methods", "recipes"))
    spans = spans_of_seeds(smollm2)
    encoded = {label(one): one for one in curves(smollm2, "encoded-curve")}
    needles = {depth: line[8192] for depth, line in needle_nats(smollm2).items()}
    rope = gains(smollm2, "rope")
    lost, kept = depths.everywhere.memory_index[-1, :2].tolist()  # at depths 0 and 0.25
    (attention_of,) = attention_series(recorded(smollm2, "attention")[1])
    heaviest = [at.as_data() for at in attention_of.at]
    return {
        "SmolLM2: the half-life on books is inside the window, within 10 %": _within(natural, "half_life", 0.1),
        "SmolLM2: the reach on books within 10 %": _known_to(natural, "reach", 0.1),
        "SmolLM2: the span on both texts within 10 %": all(_within(one, "span", 0.1) for one in (natural, shuffled)),
        "SmolLM2: nothing is copied at 7,680 tokens": _gap(shuffled, 7680)[1] < 0.05,
        "SmolLM2: the control on books is the same at 512 and 8,192 tokens": _change_of_control(natural, 512, 8192),
        "SmolLM2: in 7,680 tokens the beginning is lost and a quarter further on is not": lost < 0.1 < 0.5 < kept,
        "SmolLM2: 6,144 tokens are copied in a context beyond the window": _gap(nested, 6144)[0] > 0.1,
        "SmolLM2: at 7,680 tokens YaRN by 2 copies at least 0.3 more than the model as it is, and NTK by 2 0.2": all(
            rope[f"`rope:type={how},factor=2`"][7680][1] > least for how, least in (("yarn", 0.3), ("ntk", 0.2))
        ),
        "SmolLM2: at 4,096 tokens both copy less than the model as it is": all(
            rope[f"`rope:type={how},factor=2`"][4096][2] < 0 for how in ("yarn", "ntk")
        ),
        "SmolLM2: the first needle in 8,192 tokens takes more than twice the nats of every other": (
            needles.pop(0.0)[1] > 2 * max(high for _, _, high in needles.values())
        ),
        "SmolLM2: 256 keys cost less than 0.09 nats up to 2,048 tokens": bool(
            np.all(topk_cost(smollm2, 256)[2] < 0.09)
        ),
        "SmolLM2: 8 and 20 passages of other books save less than 0.05 nats": all(
            ralm_cost(smollm2, k)[1] > -0.05 for k in (8, 20)
        ),
        "Gemma 3: under RePlug 8 and 20 passages of other books change nats by less than 0.01": all(
            max(map(abs, ralm_cost(gemma, passages, "replug:weights=uniform")[1:])) < 0.01 for passages in (8, 20)
        ),
        "SmolLM2: 50 passages, which exceed its window, cost nats": ralm_cost(smollm2, 50)[1] > 1,
        "Gemma 3: passages of other books cost nats, also 50, which its window holds": all(
            ralm_cost(gemma, k)[1] > 0 for k in (8, 20, 50)
        ),
        "SmolLM2: 64 keys cost nats at 2,048 tokens": bool(topk_cost(smollm2, 64)[1, -1] > 0),
        "SmolLM2: a quarter of the keys holds 90 % of the weight": all(one["pareto_low"] > 0.9 for one in heaviest),
        "Gemma 3: in layers without a window a quarter of the keys holds 90 % of the weight": all(
            of_full_layers(gemma, n, HEAVIEST)[1] > 0.9 for n in (4096, 8192, 16384, 32768)
        ),
        "SmolLM2: float32 has the half-life of bfloat16": _same_half_life(weights[PLAIN], weights["float32"]),
        "SmolLM2: Q8_0 has the half-life of bfloat16": _same_half_life(weights[PLAIN], weights["Q8_0"]),
        "SmolLM2: Q4_0 has a shorter one": not _same_half_life(weights[PLAIN], weights["Q4_0"]),
        "SmolLM2: perplexity at 8,192 tokens, where nothing is copied, is that at 2,048": _within_nats(
            smollm2, ("full", 8192), ("full", 2048), 0.05
        ),
        "SmolLM2: sinks at four windows keep the perplexity of one": _within_nats(
            smollm2, ("sinks:window=8188,sinks=4", 32768), ("full", 8192), 0.05
        ),
        "SMT has fewer nats than YaRN at two windows": more_nats(
            smollm2, ("SMT", 16384), ("rope:type=yarn,factor=4", 16384)
        )[2]
        < 0,
        "SMT copies at two windows": _gap(recipes["SMT"], 16384)[0] > 0.1,
        "SMT has a longer span than the model as it is": _longer_span(recipes[PLAIN], recipes["SMT"]),
        "SMT with decoys, every seed, has a longer span than the model as it is, SMT, Self-Extend and YaRN by 4": all(
            one.low is not None and one.low > 0 for found in spans.values() for one in found
        ),
        "SMT with decoys has a longer span than these, by the interval over seeds": all(
            over_seeds(found)[1] > 0 for found in spans.values()
        ),
        "SMT with decoys, every seed: the first needle in 8,192 tokens takes at least 5 nats less than before": all(
            needle_decoys(smollm2, seed, 0.0)[2] < -5 for seed in DECOYS
        ),
        "SMT with decoys, seeds 0 and 2, takes more nats than SMT at one and two windows": all(
            more_nats(smollm2, (seed, n), ("SMT", n))[1] > 0 for seed in (DECOYS[0], DECOYS[2]) for n in (8192, 16384)
        ),
        "SMT with decoys and log-n scaling, every seed, copies more at two windows than without, seed by seed": all(
            _gains(recipes[seed], recipes[scaled])[16384][1] > 0 for seed, scaled in zip(DECOYS, LOG_N, strict=True)
        ),
        "SMT with recurrences has a shorter span than SMT after 120 and 200 steps": all(
            _longer_span(recipes[RECURRENCES], recipes[how]) for how in ("SMT", EQUAL)
        ),
        "SMT with decoys, every seed, copies more than SMT at 4,096 to 16,384 tokens": all(
            _gains(recipes["SMT"], recipes[seed])[length][1] > 0
            for length in (4096, 6144, 8192, 16384)
            for seed in DECOYS
        ),
        "Gemma 3 copies more of the books than it guesses, at its whole window": _gap(books, 32768)[0] > 0.1,
        "Gemma 3 under YaRN by 2 and Self-Extend copies more than as it is at 1, 1.5 and 2 windows": all(
            gain[length][1] > 0
            for gain in gains(gemma, "natural-by-method").values()
            for length in (32768, 49152, 65536)
        ),
        "Gemma 3 fails at two windows, and predicts at four under sinks and RePlug as at one, within 0.03 nats": (
            more_nats(gemma, ("full", 65536), ("full", 32768))[1] > 0.3
            and all(
                _within_nats(gemma, (how, 131072), ("full", 32768), 0.03)
                for how in ("sinks:window=32764,sinks=4", "replug:weights=uniform,piece=8192,tail=16384")
            )
        ),
        "Gemma 3: at four windows Self-Extend, also with a window of 8,192, and DCA take at most 0.12 nats more": all(
            more_nats(gemma, (how, 131072), ("full", 32768))[2] < 0.12
            for how in ("selfextend:group=8", "selfextend:group=8,window=8192", "dca")
        ),
        "Gemma 3: at two windows YaRN by 2 and Self-Extend recall 0.1 more of a passage than the model as it is": all(
            more_facts(gemma, how, "recall")[1] > 0.1
            for how in ("rope:type=yarn,factor=2", "selfextend:group=8,window=8192")
        ),
        "Gemma 3: at four windows YaRN by 4, DCA with chunks of 8,192 and APE cost nats": all(
            more_nats(gemma, (how, 131072), ("full", 32768))[1] > 0
            for how in ("rope:type=yarn,factor=4", "dca:chunk=8192", "ape:temperature=0.9,scale=0.9,piece=8192")
        ),
        "SmolLM2: Self-Extend has a longer span, without training": _longer_span(methods[PLAIN], methods[STRETCHED]),
        "SmolLM2: Self-Extend copies a fifth more than it guesses at two windows": _gap(methods[STRETCHED], 16384)[0]
        > 0.2,
        "SmolLM2: of DCA less than a seventh is copied at two windows": _gap(methods["`dca`"], 16384)[1] < 1 / 7,
        "SmolLM2: YaRN by 2 copies nothing at two windows": _gap(methods["`rope:type=yarn,factor=2`"], 16384)[1] < 0.05,
        "CEPE with a decoder of 512 tokens predicts at 8,192 as the model that reads all, within 0.1 nats": (
            max(map(abs, encoded_nats(smollm2, (CEPE, 8192), ("full", 8192))[1:])) < 0.1
        ),
        "CEPE takes fewer nats at 8,192 tokens than at 512, and than the model as it is at 512": all(
            encoded_nats(smollm2, (CEPE, 8192), other, "encoded-more")[2] < 0 for other in ((CEPE, 512), ("full", 512))
        ),
        "CEPE: from 2,048 to 8,192 tokens nats change by less than 0.01": (
            max(map(abs, encoded_nats(smollm2, (CEPE, 8192), (CEPE, 2048), "encoded-more"))) < 0.01
        ),
        "CEPE takes fewer nats at 8,192 than `sinks` and more than the model that reads all": (
            encoded_nats(smollm2, (CEPE, 8192), (SINKS, 8192), "encoded-more")[2]
            < 0
            < encoded_nats(smollm2, (CEPE, 8192), ("full", 8192), "encoded-more")[1]
        ),
        "CEPE copies nothing of 2,048 tokens": _gap(encoded[f"`cepe:chunk=128,{CEPE}`"], 2048)[1] < 0.05,
        "CEPE: scores sharpened by the logarithm of the chunks cost nats at 8,192": (
            encoded_nats(smollm2, (SHARPER, 8192), (CEPE, 8192))[1] > 0
        ),
        "CEPE: the loss of the last steps is not shown to fall": training_slope(smollm2)[1][2] > 0,
        "Without sinks the weight of a key falls with its distance, by a power of -2/3 to -1": all(
            decay_power(model, length)[1] > -1 and decay_power(model, length)[2] < -2 / 3
            for model, length in ((smollm2, 8192), (gemma, 32768))
        ),
        "Gemma 3: the half-life on shuffled books is inside the window": _within(large, "half_life", 0.25),
        **_claims_of_tasks(smollm2),
    }


def _claims_of_tasks(smollm2: str) -> dict[str, bool]:
    """Return the claims on books in their own order, at four windows, and on facts."""
    books, facts = {label(one): one for one in curves(smollm2, "methods-natural")}, facts_gains(smollm2)
    halved = "`rope:type=yarn,factor=2`"
    yarn, replug = "`rope:type=yarn,factor=4`", "`replug:weights=uniform,piece=2048,tail=4096`"
    ape = "`ape:temperature=0.9,scale=0.9,piece=2048`"
    return {
        "SmolLM2: on books YaRN by 4 has a longer span than the model as it is": _longer_span(
            books[PLAIN], books[yarn]
        ),
        "SmolLM2: on books YaRN by 4 copies at two windows 0.3 more than it guesses": (
            _gap(books[yarn], 16384)[0] > 0.3
        ),
        "SmolLM2: on books Self-Extend has a longer span than YaRN by 4, and copies 0.3 more than it guesses": (
            _longer_span(books[yarn], books[STRETCHED]) and _gap(books[STRETCHED], 16384)[0] > 0.3
        ),
        "SmolLM2: on books YaRN by 2 copies at one window 0.3 more than the model as it is, and at two less than 0.1": (
            _gains(books[PLAIN], books[halved])[8192][1] > 0.3 and _gap(books[halved], 16384)[1] < 0.1
        ),
        "SmolLM2: on books RePlug has a longer span than the model as it is, and a shorter one than Self-Extend": (
            _longer_span(books[PLAIN], books[replug]) and _longer_span(books[replug], books[STRETCHED])
        ),
        "SmolLM2: on books APE has a longer span than RePlug, and a shorter one than Self-Extend": (
            _longer_span(books[replug], books[ape]) and _longer_span(books[ape], books[STRETCHED])
        ),
        "SmolLM2: on books DCA by 2,048 has a longer span than DCA and the model, and copies 0.2 beyond guessing": (
            all(_longer_span(books[one], books["`dca:chunk=2048`"]) for one in (PLAIN, "`dca`"))
            and _gap(books["`dca:chunk=2048`"], 16384)[0] > 0.2
        ),
        "SmolLM2: on books sinks copies at two windows less than 0.1 more than it guesses": (
            _gap(books["`sinks:window=8188,sinks=4`"], 16384)[1] < 0.1
        ),
        "SmolLM2: on books Self-Extend copies at four windows 0.1 more than it guesses, than YaRN by 4, than itself": (
            _gap(books[STRETCHED], 32768)[0] > 0.1
            and all(_gains(books[one], books[STRETCHED])[32768][1] > 0.1 for one in (PLAIN, yarn))
        ),
        "SmolLM2: on books YaRN by 4 copies at four windows less than 0.1 more than it guesses": (
            _gap(books[yarn], 32768)[1] < 0.1
        ),
        "SmolLM2: at four windows Self-Extend, DCA, RePlug and APE copy more than they guess, of both texts": all(
            _gap(found[how], 32768)[0] > 0
            for found in (books, {label(one): one for one in curves(smollm2, "far-shuffled")})
            for how in (STRETCHED, "`selfextend:group=8`", "`dca`", "`dca:chunk=2048`", replug, ape)
        ),
        "SmolLM2: Self-Extend answers as many facts at one window as the model as it is, within 0.1": (
            max(map(abs, facts[STRETCHED][8192][1:])) < 0.1
        ),
        "SMT with decoys, seed 2, answers more facts at two windows": facts[DECOYS[2]][16384][1] > 0,
    }


def _within(one: CurveMember, name: str, share: float) -> bool:
    """Return whether a memory length and its interval end inside the window, no further from it than a share of it."""
    assert one.summary is not None
    high = getattr(one.summary, name).high
    return _known_to(one, name, share) and one.trained_length is not None and bool(high < one.trained_length)


def _known_to(one: CurveMember, name: str, share: float) -> bool:
    """Return whether the interval of a memory length ends no further from it than a share of it."""
    assert one.summary is not None
    found: MemoryLength = getattr(one.summary, name)
    if found.low is None or found.high is None or found.interval_censored:
        return False
    return bool(max(found.high - found.value, found.value - found.low) <= share * found.value)


def _within_nats(model: str, one: tuple[str, int], other: tuple[str, int], bound: float) -> bool:
    """Return whether the interval of a paired difference lies within a bound on both sides."""
    _, low, high = more_nats(model, one, other)
    return bool(max(-low, high) < bound)


def _gap(one: CurveMember, length: int) -> tuple[float, float]:
    """Return the 95 % interval of copy less control at one length."""
    return beyond(one, length)[1:]


def _change_of_control(one: CurveMember, short: int, long: int) -> bool:
    """Return whether the control differs between two lengths by less than 3 points, with its interval."""
    low, high = interval(
        one.curve.control[:, one.curve.lengths == long] - one.curve.control[:, one.curve.lengths == short]
    )
    return bool(max(-low[0], high[0]) < 0.03)


def _longer_span(first: CurveMember, second: CurveMember) -> bool:
    """Return whether the span of the second is longer, by the interval of the paired difference."""
    found = _span(first, second)
    return found.low is not None and found.low > 0


def _span(first: CurveMember, second: CurveMember) -> Difference:
    """Return by how much the span of the second is longer, text by text."""
    (found,) = (one for one in differences(first.curve, second.curve) if one.name == "span")
    return found


def _same_half_life(first: CurveMember, second: CurveMember) -> bool:
    """Return whether the interval of the paired difference of half-lives holds 0."""
    (found,) = (one for one in differences(first.curve, second.curve) if one.name == "half_life")
    return (found.low is None or found.low <= 0) and (found.high is None or found.high >= 0)
