"""Picture and model card of a CEPE training: its losses, and what is expected with and without context."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from farspan.report.picture import saved
from farspan.report.training import MEASURED, Log, base_of, draw_measured, measured_table

TERMS = {"loss_ce": "cross-entropy", "loss_kl": "KL divergence from the teacher"}


def draw(log: Log, folder: str | Path, window: int) -> list[Path]:
    """Draws a training's log into losses.png and losses.svg; returns the two paths, none where nothing was logged.

    Args:
        window: tokens that the decoder holds; lengths within it, which have no context, are drawn with dashes.
    """
    entries = [entry for entry in log if "loss" in entry]
    if not entries:
        return []
    measured = [entry for entry in log if any(map(MEASURED.fullmatch, entry))]
    figure = Figure(figsize=(12 if measured else 6, 5), layout="constrained")
    left, *right = figure.subplots(1, 2 if measured else 1, squeeze=False)[0]
    for term, label in {"loss": "loss", **TERMS}.items():
        found = [(entry["step"], entry[term]) for entry in entries if term in entry]
        if found:
            left.plot(*zip(*found, strict=True), marker="o" if len(found) == 1 else None, label=label)
    left.set(xlabel="step", ylabel="nats per token", title="Training loss")
    for axes in right:
        draw_measured(axes, measured, window)
        axes.set(ylabel="perplexity", title="Held-out perplexity by length (dashed: without context)")
    for axes in (left, *right):
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8)
    return saved(figure, Path(folder), "losses")


CARD = """---
library_name: farspan
{base}tags: [farspan, long-context, cepe]
---
# {name} with an encoder for what lies far back (CEPE{distilled}, {stage})

Made by farspan: an encoder and cross-attention, {trained:,} parameters, were trained beside {name}, which is
unchanged and not in this folder. {steps:,} steps of {batch:,} windows: {decoder:,} tokens in the decoder behind
{chunks:,} chunks of {chunk:,}. Open it with `farspan.load(FOLDER)` and read with the method
`cepe:chunk={chunk},decoder_window={window}`. What is trained beside a Llama model comes under Meta's licence for it.
{measured}
![losses](losses.png)

All settings, versions and hardware: `training.json`. The losses: `log.jsonl`.
"""


def model_card(summary: Mapping[str, Any], log: Log) -> str:
    """The README.md of a trained model, from what its training.json and log.jsonl hold."""
    settings, steps = summary["settings"], summary["settings"]["trainer"]["steps"]
    name, data = settings["model"]["name"], settings["data"]
    return CARD.format(
        **base_of(name),
        distilled="-Distilled" if "distill" in settings else "",
        stage="warm-up" if summary["stage"] == "warmup" else "main stage",
        trained=summary["trained"],
        steps=steps,
        batch=summary["rows"] // steps,
        window=data["decoder"] + len(summary["from"]["separator"]["ids"]),
        measured=measured_table(log, settings["watch"]["text"]),
        **{key: data[key] for key in ("decoder", "chunks", "chunk")},
    )
