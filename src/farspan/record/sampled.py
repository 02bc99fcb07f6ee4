"""The lengths for which a run samples its texts, where these follow from its models, and their check."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LARGEST = "largest_trained_length"  # setting: of models with different ones, in tokens
# of a model in run.json, by task, where lengths follow from the models: its own lengths, and those of all models of the
# run, for which texts are sampled; of an adaptive curve the longest, and the tokens sampled
LENGTHS, SAMPLED = "lengths", "sampled"


def refuse_other_texts(folder: Path, header: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise ValueError if a model would read other texts than the run has of it, or of another model with its
    tokenizer: the tables would treat them as one set.

    Args:
        header: of run.json.
        identity: of the model, with its lengths.
    """
    now = identity.get(SAMPLED, {})
    for name, about in header["models"].items():
        is_same = name == identity["name"]
        if not is_same and (identity.get("tokenizer") is None or about.get("tokenizer") != identity["tokenizer"]):
            continue
        for task, lengths in now.items():
            if SAMPLED not in about:  # an older farspan sampled the texts of each model for its own lengths
                own = identity[LENGTHS][task]
                # but those of adaptive curves for the largest trained length, if these differed
                same_before = own[-1] == lengths[-1] or (len(lengths) == 1 and LARGEST in header["settings"])
                before = [*lengths] if same_before or not is_same else own
            else:
                before = about[SAMPLED].get(task, lengths)
            if list(lengths) != list(before):
                raise ValueError(
                    f"{folder}: the texts of {task} were sampled for lengths of {spanned(before)} tokens; with the "
                    f"models named now, they would be sampled for {spanned(lengths)}. Measure all models into another "
                    "folder (out); with --lengths there, models can be added later"
                )


def spanned(lengths: Sequence[int]) -> str:
    """Return the range of lengths, such as "32 to 1,024"."""
    return f"{lengths[0]:,} to {lengths[-1]:,}" if len(lengths) > 1 else f"{lengths[0]:,}"
