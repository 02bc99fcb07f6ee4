"""Pictures and model card of a Sparse Memory Training: its figures 8 and 9 (training perplexity by step), figure 10 (at
the end of each length), and what it costs and gains inside and beyond the window."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from farspan.report.picture import saved

TERMS = {"loss_sparse": ("target behind sampled memory", "#0072B2"), "loss_window": ("ordinary window", "#D55E00")}
REPEATING = re.compile(r"\brepeat=(?!0*\.?0*(,|$))")  # a share above 0
MEASURED = re.compile(r"farspan/perplexity_(\d+)")
Log = Sequence[Mapping[str, Any]]


def draw_losses(log: Log, folder: str | Path, window: int) -> list[Path]:
    """Draws a training's log, entries with a `step`, into losses.png and losses.svg; returns the two paths, none where
    nothing was logged yet.

    Args:
        window: tokens of the window that is extended; lengths within it are drawn with dashes.
    """
    entries = [entry for entry in log if any(term in entry for term in TERMS)]
    if not entries:
        return []
    measured = [entry for entry in log if any(map(MEASURED.fullmatch, entry))]
    figure = Figure(figsize=(18 if measured else 12, 5), layout="constrained")
    axes = figure.subplots(1, 3 if measured else 2)
    _by_step(axes[0], entries)
    _by_length(axes[1], entries)
    if measured:
        draw_measured(axes[2], measured, window)
    for one in axes:
        one.grid(alpha=0.25)
        one.legend(fontsize=8)
        one.set_ylabel("perplexity")
        one.set_yscale("log")
        one.yaxis.set_major_formatter("{x:g}")
        one.yaxis.set_minor_formatter("{x:g}")
    return saved(figure, Path(folder), "losses")


CARD = """---
library_name: transformers
{base}tags: [farspan, long-context, sparse-memory-training]
---
# {name}, extended to {target:,} tokens

Made by farspan from {name}, which was trained on {window:,} tokens, by Sparse Memory Training: rows of {window:,}
tokens drawn from documents of up to {target:,}, each token at its own position. {trained:,} of {parameters:,}
parameters were trained, for {steps:,} steps of {batch:,} rows. It opens in plain transformers.
{repeats}{measured}
![losses](losses.png)

All settings, versions and hardware: `training.json`. The losses: `log.jsonl`.
"""
REPEATS = """
Some rows were a text and the same text again, `[bos] S [bos] S` (the draw `{draw}`). That is the task of the forgetting
curve, which the Forgetting Curve paper (section 3.2) measures on models that are not trained on it: do not compare this
model's forgetting curve with those of other models.
"""


def model_card(summary: Mapping[str, Any], log: Log) -> str:
    """The README.md of a trained model, from what its training.json and log.jsonl hold."""
    settings = summary["settings"]
    name, steps, draw = settings["model"]["name"], settings["trainer"]["steps"], settings["smt"]["draw"]
    return CARD.format(
        **base_of(name),
        target=settings["lengths"]["target"],
        steps=steps,
        batch=summary["rows"] // steps,
        repeats=REPEATS.format(draw=draw) if REPEATING.search(draw) else "",
        measured=measured_table(log, settings["watch"]["text"]),
        **{key: summary[key] for key in ("window", "trained", "parameters")},
    )


def base_of(name: str) -> dict[str, str]:
    """How a card names the model that was trained: a line of its head where that is on the hub, and the name."""
    on_hub = "/" in name and not Path(name).exists()
    return {"base": f"base_model: {name}\n" if on_hub else "", "name": name if on_hub else Path(name).name}


def measured_table(log: Log, text: str) -> str:
    measured = [entry for entry in log if any(map(MEASURED.fullmatch, entry))]
    if not measured:
        return ""
    ends = measured[0], measured[-1]
    steps = _steps(ends)
    lines = [f"\nHeld-out text ({text}), the same tokens behind more and more of it:\n"]
    lines += ["| tokens | " + " | ".join(f"{what}, {at}" for what in ("perplexity", "accuracy") for at in steps) + " |"]
    lines += ["|---|---|---|---|---|"]
    for length in sorted(
        {int(name.rpartition("_")[2]) for entry in ends for name in entry if MEASURED.fullmatch(name)}
    ):
        # a step where all windows of a length failed has no value
        values = [_written(entry.get(f"farspan/perplexity_{length}"), ".4g") for entry in ends]
        values += [_written(entry.get(f"farspan/accuracy_{length}"), ".3f") for entry in ends]
        lines.append(f"| {length:,} | " + " | ".join(values) + " |")
    if curves := [entry for entry in log if "farspan/half_life" in entry]:
        ends = curves[0], curves[-1]
        for name, key in (("half-life", "farspan/half_life"), ("span", "farspan/span")):
            found = ", ".join(f"{entry[key]:,.0f}" for entry in ends)
            lines.append(f"\nForgetting curve, {name} in tokens, {', '.join(_steps(ends))}: {found}.")
    return "\n".join([*lines, ""])


def _written(value: float | None, form: str) -> str:
    return "—" if value is None else format(value, form)


def _steps(entries: Log) -> list[str]:
    return [f"step {entry['step']:,}" for entry in entries]


def last_of_each_length(log: Log, term: str) -> dict[int, float]:
    """The training perplexity of a term at the last entry of each length, by length."""
    return {entry["length"]: math.exp(entry[term]) for entry in log if term in entry}


def _by_step(axes: Axes, entries: Log) -> None:
    for term, (label, colour) in TERMS.items():
        found = [(entry["step"], math.exp(entry[term])) for entry in entries if term in entry]
        if found:
            axes.plot(*zip(*found, strict=True), marker="o" if len(found) == 1 else None, color=colour, label=label)
    lengths = axes.twinx()
    lengths.step(
        [entry["step"] for entry in entries],
        [entry["length"] for entry in entries],
        where="pre",
        color="#999999",
        linewidth=1,
    )
    lengths.set_ylabel("length (tokens)", color="#777777")
    axes.set(xlabel="step", title="Training perplexity, and the length it has reached (grey)")


def _by_length(axes: Axes, entries: Log) -> None:
    for term, (label, colour) in TERMS.items():
        found = sorted(last_of_each_length(entries, term).items())
        if found:
            axes.plot(*zip(*found, strict=True), "o-", markersize=4, color=colour, label=label)
    axes.set(xlabel="length (tokens)", title="Training perplexity at the end of each length")


def draw_measured(axes: Axes, measured: Log, window: int) -> None:
    names = {name for entry in measured for name in entry if MEASURED.fullmatch(name)}
    order = sorted((int(name.rpartition("_")[2]), name) for name in names)
    for place, (length, name) in enumerate(order):
        found = [(entry["step"], entry[name]) for entry in measured if name in entry]
        colour = colormaps["viridis_r"](0.1 + 0.9 * place / max(1, len(order) - 1))
        line = "--" if length <= window else "-"
        axes.plot(*zip(*found, strict=True), line, marker="o", markersize=4, color=colour, label=f"{length:,} tokens")
    axes.set(xlabel="step", title="Held-out perplexity by length (dashed: inside the window)")
