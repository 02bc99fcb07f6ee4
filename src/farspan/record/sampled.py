"""Checks that all models of a run read the same texts: their content, and the lengths for which they are sampled."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

LARGEST = "largest_trained_length"  # setting: of models with different ones, in tokens
# of a model in run.json, by task, where lengths follow from the models: its own lengths, and those of all models of the
# run, for which texts are sampled; of an adaptive curve the longest, and the tokens sampled
LENGTHS, SAMPLED = "lengths", "sampled"
VERSIONS = "versions"  # of a model in run.json: the version of each task, by its name in rows
CONTENTS = "contents"  # of a model in run.json: by name of a text, a hash of its documents that no tokenizer changes
# in the settings of a task: names and their hashes, of texts, of all that is tokens, and of all that is read
TEXTS = {"text": "text_hash", "target_text": "target_hash", "prefix_text": "prefix_hash"}
OF_TOKENS = {**TEXTS, "keys": "keys_hash"}  # the last: the key tokens of LongPPL
HASHES = {**OF_TOKENS, "data": "data_hash", "index": "index_hash"}


def refuse_other_texts(folder: Path, header: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise ValueError if a model would read a text, a data set or an index in another state than a model of the run
    did, or texts sampled for other lengths than one with its tokenizer: the tables would treat them as one set.

    Args:
        header: of run.json.
        identity: of the model, with its tasks and lengths.
    """
    now = identity.get(SAMPLED, {})
    for name, about in header["models"].items():
        for what, old, new in _read_by_both(about, identity):
            if old != new:
                raise ValueError(
                    f"{folder}: {what} has changed since {name} was measured: its hash was {old}, now {new}. Restore "
                    "it to continue the run, or measure all models into another folder (out)"
                )
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


def _read_by_both(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield what two models read, as text, and its hash for each; models of an older farspan have no `CONTENTS`."""
    is_same = before.get("tokenizer") == now.get("tokenizer") is not None
    for task, settings in now.get("tasks", {}).items():
        known = before.get("tasks", {}).get(task, {})
        for name, key in HASHES.items():
            if (is_same or name not in OF_TOKENS) and known.get(key) is not None and settings.get(key) is not None:
                kind = name.removeprefix("target_").removeprefix("prefix_")
                yield f"the {kind} {settings.get(name, settings.get('set'))!r}", known[key], settings[key]
    for name, hashed in now.get(CONTENTS, {}).items():
        yield f"the text {name!r}", before.get(CONTENTS, {}).get(name, hashed), hashed


def spanned(lengths: Sequence[int]) -> str:
    """Return the range of lengths, such as "32 to 1,024"."""
    return f"{lengths[0]:,} to {lengths[-1]:,}" if len(lengths) > 1 else f"{lengths[0]:,}"
