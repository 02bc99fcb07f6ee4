"""Picture and model card of a CEPE training: its losses, and perplexity with and without context."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farspan.report.export import counted
from farspan.report.figure import Figure
from farspan.report.picture import draw_grid
from farspan.report.training import SIZE, Log, base_of, line, measured_figure, measured_table

TERMS = {"loss": "loss", "loss_ce": "cross-entropy", "loss_kl": "KL divergence from the teacher"}


def draw(log: Log, folder: str | Path, window: int) -> list[Path]:
    """Draw a training's log into losses.png and losses.svg and return the two paths; none where nothing was logged.

    Args:
        window: tokens that the decoder holds; lengths within it, which have no context, are dashed.
    """
    entries = [entry for entry in log if "loss" in entry]
    if not entries:
        return []
    losses = [
        line(label, ((entry["step"], entry[term]) for entry in entries if term in entry), index)
        for index, (term, label) in enumerate(TERMS.items())
    ]
    figures = [Figure("Training loss", "step", "nats per token", [one for one in losses if one.x])]
    measured = measured_figure(log, window, "dashed: without context")
    return draw_grid([[*figures, *([measured] if measured else [])]], folder, "losses", size=SIZE)


CARD = """---
library_name: farspan
{base}tags: [farspan, long-context, cepe]
---
# {name} with an encoder of distant context (CEPE{distilled}, {stage})

Made by farspan: {parts} {name}, which is
unchanged and not in this folder. {steps:,} steps of {batch}: {decoder:,} tokens in the decoder {context}
{chunks:,} chunks of {chunk:,}, of the text `{text}`. Open it with `farspan.load(FOLDER)` and read with the method
`cepe:chunk={chunk},decoder_window={window}`. The licence of the decoder may hold for weights trained beside it, as
Meta's for Llama does.
{copies}{measured}
![losses](losses.png)

All settings, versions and hardware: `training.json`. The losses: `log.jsonl`.
"""
TRAINED = "an encoder and cross-attention, {trained:,} parameters, were trained beside"
FROZEN = "cross-attention, {trained:,} parameters, was trained between a frozen encoder and"
COPIES = """
It was trained to copy its context {how}. The forgetting curve measures copying, and the Forgetting Curve paper
(section 3.2) measures it on models that are not trained on it: do not compare this model's forgetting curve with those
of other models.
"""


def model_card(summary: Mapping[str, Any], log: Log) -> str:
    """Return the README.md of a trained model, from its training.json and log.jsonl."""
    settings, steps = summary["settings"], summary["settings"]["trainer"]["steps"]
    model, data, warms_up = settings["model"], settings["data"], summary["stage"] == "warmup"
    copies = {
        "in this warm-up": warms_up,
        "in its warm-up": model["warmed_up"] and not model["random_encoder"],
        "in a share of its windows (`copied`)": data["mixture"].get("copied") and not warms_up,
    }
    how = " and ".join(when for when, copied in copies.items() if copied)
    return CARD.format(
        **base_of(model["name"]),
        distilled="-Distilled" if "distill" in settings else "",
        stage="warm-up" if warms_up else "main stage",
        parts=(TRAINED if model["train_encoder"] else FROZEN).format(trained=summary["trained"]),
        context="and the same tokens as" if warms_up else "after",
        copies=COPIES.format(how=how) if how else "",
        steps=steps,
        batch=counted(summary["rows"] // steps, "window"),
        window=data["decoder"] + len(summary["from"]["separator"]["ids"]),
        text=Path(data["text"]).name,
        measured=measured_table(
            log, settings["watch"]["text"], trained_on=summary.get("measured_on_training_text", False)
        ),
        **{key: data[key] for key in ("decoder", "chunks", "chunk")},
    )
