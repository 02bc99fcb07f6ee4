"""The model cards, README.md, of trainings: Sparse Memory Training, CEPE, and segment-level recurrence."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farspan.report.export import counted
from farspan.report.training import Log, measured_lengths, memory_length
from farspan.train.draws import MEMORIES

REPEATING = re.compile(r"\brepeat=(?!0*\.?0*(,|$))")  # a share above 0
END = """![losses](losses.png)

All settings, versions and hardware: `training.json`. The losses: `log.jsonl`.
"""
SMT_CARD = (
    """---
library_name: transformers
{base}tags: [farspan, long-context, sparse-memory-training]
---
# {name}, extended to {target:,} tokens

Made by farspan from {name}, which was trained with contexts of {before:,} tokens, by Sparse Memory Training:
{rows} (the draw `{draw}`). {trained:,} of {parameters:,} parameters
were trained, for {steps:,} steps of {batch}. It opens in plain transformers.
{repeats}{scaled}{measured}
"""
    + END
)
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


def smt_card(summary: Mapping[str, Any], log: Log) -> str:
    """Return the card of a Sparse Memory Training.

    Args:
        summary: the content of training.json.
        log: the entries of log.jsonl.
    """
    settings = summary["settings"]
    draw, target = settings["smt"]["draw"], settings["lengths"]["target"]
    name = draw.partition(":")[0]
    where = "each token at its own position" if name in MEMORIES else "at positions of up to the same number"
    return SMT_CARD.format(
        **_base(settings["model"]["name"]),
        before=summary["from"]["trained_length"] or summary["window"],
        target=target,
        rows=(WHOLE if name == "full" else ROWS).format(window=summary["window"], target=target, where=where),
        draw=draw,
        repeats=REPEATS.format(draw=draw) if REPEATING.search(draw) else "",
        scaled=SCALED.format(how=how) if (how := _scaling(summary)) else "",
        measured=measured_table(summary, log),
        **_steps_of(summary, "row"),
        **{key: summary[key] for key in ("trained", "parameters")},
    )


def _scaling(summary: Mapping[str, Any]) -> str:
    """Return the settings of the method `temperature` under which a model was trained; "" if it was not."""
    temperature = summary["settings"]["model"].get("temperature")
    if temperature == "learned":
        return "scales=THIS_FOLDER"
    return f"original={summary['from']['trained_length'] or summary['window']}" if temperature else ""


CEPE_CARD = (
    """---
library_name: farspan
{base}tags: [farspan, long-context, cepe]
---
# {name} with an encoder of distant context (CEPE{distilled}, {stage})

Made by farspan: {parts} {name}, which is
unchanged and not in this folder. {steps:,} steps of {batch}: {decoder:,} tokens in the decoder {context}
{chunks:,} chunks of {chunk:,}, of the text `{text}`. Open it with `farspan.load(FOLDER)` and read with the method
`cepe:chunk={chunk},decoder_window={window}`. The licence of the decoder may hold for weights trained beside it, as
Meta's for Llama does.
{retrieved}{taught}{copies}{measured}
"""
    + END
)
RETRIEVED = """
In {share:.0%} of the windows the chunks were instead the passages of the index `{index}` that match the first {query:,}
of the decoder's tokens best; these tokens were not predicted.
"""
TAUGHT = """
It learned from the distributions of {teacher}, which read chunks and decoder's tokens in one window.
"""
TRAINED = "an encoder and cross-attention, {trained:,} parameters, were trained beside"
FROZEN = "cross-attention, {trained:,} parameters, was trained between a frozen encoder and"
COPIES = """
It was trained to copy its context {how}. The forgetting curve measures copying, and the Forgetting Curve paper
(section 3.2) measures it on models that are not trained on it: do not compare this model's forgetting curve with those
of other models.
"""


def cepe_card(summary: Mapping[str, Any], log: Log) -> str:
    """Return the card of a CEPE training; arguments as of `smt_card`."""
    settings = summary["settings"]
    model, data, warms_up = settings["model"], settings["data"], summary["stage"] == "warmup"
    copies = {
        "in this warm-up": warms_up,
        "in its warm-up": model["warmed_up"] and not model["random_encoder"],
        "in a share of its windows (`copied`)": data["mixture"].get("copied") and not warms_up,
    }
    how = " and ".join(when for when, copied in copies.items() if copied)
    share, its = data["mixture"].get("retrieved"), settings.get("distill", {"kl": 0})
    teacher = _base(its.get("teacher") or model["name"])["name"]
    return CEPE_CARD.format(
        **_base(model["name"]),
        distilled="-Distilled" if "distill" in settings else "",
        stage="warm-up" if warms_up else "main stage",
        parts=(TRAINED if model["train_encoder"] else FROZEN).format(trained=summary["trained"]),
        context="and the same tokens as" if warms_up else "after",
        retrieved=RETRIEVED.format(share=share, index=Path(data["index"]).name, query=data["query"]) if share else "",
        taught=TAUGHT.format(teacher=teacher) if its["kl"] else "",
        copies=COPIES.format(how=how) if how else "",
        window=data["decoder"] + len(summary["from"]["separator"]["ids"]),
        text=Path(data["text"]).name,
        measured=measured_table(summary, log),
        **_steps_of(summary, "window"),
        **{key: data[key] for key in ("decoder", "chunks", "chunk")},
    )


RECURRENCE_CARD = """# {name}

A Llama of {parameters:,} parameters, trained by `farspan train lm` with segment-level recurrence (Transformer-XL): rows
of {segment:,} tokens, and a memory of {memory:,} tokens before each. Read it as it was trained:

    farspan curve FOLDER --method {reading}

Without the method it reads with full attention, which is the same for texts of up to {segment:,} tokens.
"""


def recurrence_card(summary: Mapping[str, Any], log: Log) -> str:
    """Return the card of a training with recurrence; arguments as of `smt_card`."""
    settings = summary["settings"]
    return RECURRENCE_CARD.format(
        name=Path(settings["out"]).name,
        parameters=summary["parameters"],
        segment=settings["trainer"]["window"],
        memory=settings["recurrence"]["memory"],
        reading=summary["reading"],
    )


# parts of several cards


def _base(name: str) -> dict[str, str]:
    """Return how a card names the base model: a line of its header if the model is on the hub, and the name."""
    on_hub = "/" in name and not Path(name).exists()
    return {"base": f"base_model: {name}\n" if on_hub else "", "name": name if on_hub else Path(name).name}


def _steps_of(summary: Mapping[str, Any], sample: str) -> dict[str, Any]:
    """Return the number of steps, and their samples in words."""
    steps = summary["settings"]["trainer"]["steps"]
    return {"steps": steps, "batch": counted(summary["rows"] // steps, sample)}


def measured_table(summary: Mapping[str, Any], log: Log) -> str:
    """Return the measurements on a text at the first and the last step as Markdown; "" if there are none."""
    measured = [entry for entry in log if measured_lengths([entry])]
    if not measured:
        return ""
    ends = measured[0], measured[-1]
    steps = _names_of_steps(ends)
    kind = (
        "Text of the training, in whole or in part"
        if summary.get("measured_on_training_text", False)
        else "Held-out text"
    )
    text = summary["settings"]["watch"]["text"]
    lines = [f"\n{kind} ({text}), the same tokens after more and more of it:\n"]
    lines += ["| tokens | " + " | ".join(f"{what}, {at}" for what in ("perplexity", "accuracy") for at in steps) + " |"]
    lines += ["|---|---|---|---|---|"]
    for length in measured_lengths(ends):
        # a step where all windows of a length failed has no value
        values = [_written(entry.get(f"farspan/perplexity_{length}"), ".4g") for entry in ends]
        values += [_written(entry.get(f"farspan/accuracy_{length}"), ".3f") for entry in ends]
        lines.append(f"| {length:,} | " + " | ".join(values) + " |")
    if curves := [entry for entry in log if "farspan/half_life" in entry]:
        ends = curves[0], curves[-1]
        for name in ("half_life", "span"):
            found = ", ".join(memory_length(entry, name) for entry in ends)
            title = f"Forgetting curve, {name.replace('_', '-')} in tokens, {', '.join(_names_of_steps(ends))}"
            lines.append(f"\n{title}: {found}.")
        if {">", "<"} & {*lines[-1], *lines[-2]}:
            lines.append("\n`>`, `<`: beyond the lengths measured.")
    return "\n".join([*lines, ""])


def _written(value: float | None, form: str) -> str:
    return "—" if value is None else format(value, form)


def _names_of_steps(entries: Log) -> list[str]:
    return [f"step {entry['step']:,}" for entry in entries]
