"""Pictures of trainings, and the model card of a Sparse Memory Training: the paper's figures 8 and 9 (training
perplexity by step) and 10 (at the end of each length), and costs and gains inside and beyond the window."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from farspan.report.curve_figures import ACCURACY, LENGTH
from farspan.report.export import counted
from farspan.report.figure import COLOURS, Figure, Line, Rule
from farspan.report.picture import draw_grid
from farspan.stats import MeasuredCurve, MemoryLength, Summary, measured_mean
from farspan.train.draws import MEMORIES

TERMS = {"loss_sparse": "target after sampled memory", "loss_window": "ordinary window"}
REPEATING = re.compile(r"\brepeat=(?!0*\.?0*(,|$))")  # a share above 0
PERPLEXITY = re.compile(r"farspan/perplexity_(\d+)")  # logged by PerplexityCallback, with a length in tokens
SHOWN = 5  # curves of a training in one picture
SIZE = (6.0, 5.0)  # of a figure in inches
Log = Sequence[Mapping[str, Any]]


def draw_losses(log: Log, folder: str | Path, window: int) -> list[Path]:
    """Draw a training's log, entries with a `step`, into losses.png and losses.svg and return the two paths; none where
    nothing was logged yet.

    Args:
        window: tokens of the window that is extended; lengths within it are dashed.
    """
    entries = [entry for entry in log if any(term in entry for term in TERMS)]
    if not entries:
        return []
    by_step, by_length = [], []
    for index, (term, label) in enumerate(TERMS.items()):
        found = ((entry["step"], math.exp(entry[term])) for entry in entries if term in entry)
        by_step.append(line(label, found, index))
        by_length.append(line(label, sorted(last_of_each_length(entries, term).items()), index))
    reached = line("length", ((entry["step"], entry["length"]) for entry in entries), 2)
    figures: list[list[Figure | None]] = [
        [
            Figure("Training perplexity", "step", "perplexity", by_step, log_y=True),
            Figure(
                "Training perplexity at the end of each length", "length (tokens)", "perplexity", by_length, log_y=True
            ),
        ],
        [
            Figure("Length that the training has reached", "step", "length (tokens)", [reached]),
            measured_figure(log, window, "dashed: inside the window"),
        ],
    ]
    return draw_grid(figures, folder, "losses", size=SIZE)


def line(label: str, points: Iterable[tuple[float, float]], index: int, **look: Any) -> Line:
    """Return a line through (x, y)."""
    points = list(points)
    return Line(label, [x for x, _ in points], [y for _, y in points], index, **look)


def measured_figure(log: Log, window: int, dashed: str) -> Figure | None:
    """Return the perplexity of the measured text by step, a line for each length; None where it was not measured.

    Args:
        window: lengths of at most this many tokens are dashed.
        dashed: what dashed lines mean.
    """
    lengths = _measured_lengths(log)
    lines = []
    for place, length in enumerate(lengths):
        name = f"farspan/perplexity_{length}"
        found = ((entry["step"], entry[name]) for entry in log if name in entry)
        look = {"style": "dashed" if length <= window else "solid", "shade": place / max(1, len(lengths) - 1)}
        lines.append(line(f"{length:,} tokens", found, 0, **look))
    return Figure(f"Perplexity by length ({dashed})", "step", "perplexity", lines, log_y=True) if lines else None


def _measured_lengths(log: Log) -> list[int]:
    return sorted({int(match[1]) for entry in log for name in entry if (match := PERPLEXITY.fullmatch(name))})


def last_of_each_length(log: Log, term: str) -> dict[int, float]:
    """Return the training perplexity of a term at the last entry of each length, by length."""
    return {entry["length"]: math.exp(entry[term]) for entry in log if term in entry}


def draw_memory(
    steps: Mapping[int, tuple[MeasuredCurve, Summary]], folder: str | Path, trained: int | None, trained_at: int
) -> list[Path]:
    """Draw half-life and span against the step, and some of the curves, into training.png and training.svg; return the
    two paths.

    Args:
        trained: tokens of the context that the model is trained on.
        trained_at: the length whose whole context has that many tokens.
    """
    order = sorted(steps)
    numbers, curves = [], []
    for index, name in enumerate(("half_life", "span")):
        found = {step: getattr(steps[step][1], name) for step in order}
        points = [
            {"step": step, "tokens": one.value, "tokens_low": one.low, "tokens_high": one.high}
            for step, one in found.items()
        ]
        label = name.replace("_", "-")
        numbers.append(Line.of(label, points, "step", "tokens", index))
        if over := [(step, one.value) for step, one in found.items() if one.censored]:
            # another marker in the same colour
            numbers.append(line(f"{label}: at least", over, index + 3 * len(COLOURS), style="points"))
    for step in sorted({order[round(place)] for place in np.linspace(0, len(order) - 1, SHOWN)}):
        curve = steps[step][0].kept(steps[step][0].measured)
        shade = order.index(step) / max(1, len(order) - 1)
        for half, values, style in ((f"step {step:,}", curve.copy, "solid"), ("", curve.control, "dashed")):
            drawn = zip(curve.lengths.tolist(), measured_mean(values).tolist(), strict=True)
            curves.append(line(half, drawn, 0, style=style, shade=shade))
    text = f"context = {trained:,} (trained)" if trained else ""
    left = Figure(
        "Memory of the model in training, 95 % intervals", "step", "tokens", numbers,
        rules=[Rule(text, y=trained_at)] if trained else [],
    )  # fmt: skip
    right = Figure(
        "Forgetting curves: copy, and control (dashed)", LENGTH, ACCURACY, curves,
        rules=[Rule(text, x=trained_at)] if trained else [], log_x=True, span=(-0.02, 1.02),
    )  # fmt: skip
    return draw_grid([[left, right]], folder, "training", size=SIZE)


# the model card

CARD = """---
library_name: transformers
{base}tags: [farspan, long-context, sparse-memory-training]
---
# {name}, extended to {target:,} tokens

Made by farspan from {name}, which was trained with contexts of {before:,} tokens, by Sparse Memory Training:
{rows} (the draw `{draw}`). {trained:,} of {parameters:,} parameters
were trained, for {steps:,} steps of {batch}. It opens in plain transformers.
{repeats}{scaled}{measured}
![losses](losses.png)

All settings, versions and hardware: `training.json`. The losses: `log.jsonl`.
"""
ROWS = "rows of {window:,} tokens from documents of up to {target:,}, {where}"  # of each draw but `full`
WHOLE = "whole documents of up to {target:,} tokens"
REPEATS = """
Some rows were a text and the same text again, `[bos] S [bos] S` (the draw `{draw}`). That is the task of the forgetting
curve, which the Forgetting Curve paper (section 3.2) measures on models that are not trained on it: do not compare this
model's forgetting curve with those of other models.
"""
SCALED = """
It was trained with log-n scaling of its queries, which a plain checkpoint does not hold: read it with
`--method temperature:{how}`.
"""


def model_card(summary: Mapping[str, Any], log: Log) -> str:
    """Return the README.md of a trained model, from its training.json and log.jsonl."""
    settings = summary["settings"]
    steps, draw, target = settings["trainer"]["steps"], settings["smt"]["draw"], settings["lengths"]["target"]
    name = draw.partition(":")[0]
    where = "each token at its own position" if name in MEMORIES else "at positions of up to the same number"
    return CARD.format(
        **base_of(settings["model"]["name"]),
        before=summary["from"]["trained_length"] or summary["window"],
        target=target,
        rows=(WHOLE if name == "full" else ROWS).format(window=summary["window"], target=target, where=where),
        draw=draw,
        steps=steps,
        batch=counted(summary["rows"] // steps, "row"),
        repeats=REPEATS.format(draw=draw) if REPEATING.search(draw) else "",
        scaled=SCALED.format(how=how) if (how := _scaling(summary)) else "",
        measured=measured_table(
            log, settings["watch"]["text"], trained_on=summary.get("measured_on_training_text", False)
        ),
        **{key: summary[key] for key in ("trained", "parameters")},
    )


def _scaling(summary: Mapping[str, Any]) -> str:
    """Return the settings of the method `temperature` under which a model was trained; "" if it was not."""
    temperature = summary["settings"]["model"].get("temperature")
    if temperature == "learned":
        return "scales=THIS_FOLDER"
    return f"original={summary['from']['trained_length'] or summary['window']}" if temperature else ""


def base_of(name: str) -> dict[str, str]:
    """Return how a card names the base model: a line of its header if the model is on the hub, and the name."""
    on_hub = "/" in name and not Path(name).exists()
    return {"base": f"base_model: {name}\n" if on_hub else "", "name": name if on_hub else Path(name).name}


def measured_table(log: Log, text: str, *, trained_on: bool = False) -> str:
    """Return the measurements on a text at the first and the last step as Markdown; "" if there are none.

    Args:
        trained_on: the text is that of the training.
    """
    measured = [entry for entry in log if _measured_lengths([entry])]
    if not measured:
        return ""
    ends = measured[0], measured[-1]
    steps = _steps(ends)
    kind = "Text of the training" if trained_on else "Held-out text"
    lines = [f"\n{kind} ({text}), the same tokens after more and more of it:\n"]
    lines += ["| tokens | " + " | ".join(f"{what}, {at}" for what in ("perplexity", "accuracy") for at in steps) + " |"]
    lines += ["|---|---|---|---|---|"]
    for length in _measured_lengths(ends):
        # a step where all windows of a length failed has no value
        values = [_written(entry.get(f"farspan/perplexity_{length}"), ".4g") for entry in ends]
        values += [_written(entry.get(f"farspan/accuracy_{length}"), ".3f") for entry in ends]
        lines.append(f"| {length:,} | " + " | ".join(values) + " |")
    if curves := [entry for entry in log if "farspan/half_life" in entry]:
        ends = curves[0], curves[-1]
        for name in ("half_life", "span"):
            found = ", ".join(memory_length(entry, name) for entry in ends)
            title = f"Forgetting curve, {name.replace('_', '-')} in tokens, {', '.join(_steps(ends))}"
            lines.append(f"\n{title}: {found}.")
        if {">", "<"} & {*lines[-1], *lines[-2]}:
            lines.append("\n`>`, `<`: beyond the lengths measured.")
    return "\n".join([*lines, ""])


def memory_length(logged: Mapping[str, Any], name: str) -> str:
    """Return half_life or span of an entry of a log in whole tokens, with `>` or `<` if it is outside the lengths
    measured."""
    key = f"farspan/{name}"
    more, below = bool(logged.get(f"{key}_censored")), logged.get(f"{key}_below")
    return str(MemoryLength(logged[key], censored=more, below=below))


def _written(value: float | None, form: str) -> str:
    return "—" if value is None else format(value, form)


def _steps(entries: Log) -> list[str]:
    return [f"step {entry['step']:,}" for entry in entries]
