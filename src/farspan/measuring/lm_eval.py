"""A recorded forgetting curve as tasks of lm-evaluation-harness: `lm_eval --include_path FOLDER --tasks farspan_curve`.

The harness requests log-likelihoods of strings. For each repeat and length of the curve, the tasks request them after
the copied text and after the irrelevant one: for the whole scored part (`nats` per token), and for single tokens,
spread over it (`acc`, whether each is the model's most likely token). The harness moves white space at the end of a
context to the target, which then has several tokens and is right if all are; so single tokens after white space are
left out.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from farspan.files import write
from farspan.lm import LM
from farspan.loading.places import folder_of
from farspan.measuring.again import arguments_of, refuse_difference, repeatable
from farspan.measuring.loader import Load
from farspan.measuring.loop import Watch
from farspan.measuring.setups import grid
from farspan.record import DEFAULT_REPEATS
from farspan.report.runs import Source
from farspan.tasks.base import Example, digest
from farspan.tasks.curve import BoundCurve, Texts
from farspan.text.prompts import decoded

SINGLE = 8  # tokens of each scored part whose accuracy is measured one by one
MOSTLY = 0.9  # share of contexts that decode and encode exactly, below which a line reports it
GROUP = "farspan_curve"
HALVES = ("copy", "control")
TASK = """task: {task}
custom_dataset: !function farspan_curve.dataset
dataset_kwargs:
  half: {half}
  length: {length}
output_type: loglikelihood
test_split: test
doc_to_text: context
doc_to_target: target
target_delimiter: ""
num_fewshot: 0
process_results: !function farspan_curve.results
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: nats
    aggregation: mean
    higher_is_better: false
metadata:
  version: {version}
"""
CODE = '''"""Documents and scores of the tasks in this folder, which farspan wrote."""

import json
from pathlib import Path

from datasets import Dataset


def dataset(half, length, **_):
    """Return the requests of one half at one length: for each text the whole scored part first, then single tokens."""
    data = json.loads((Path(__file__).parent / "texts.json").read_text("utf-8"))
    texts, separator, documents = data["texts"], data["separator"], []
    for one in data["requests"]:
        if (one["half"], one["length"]) == (half, length):
            before = separator + texts[one["read"]][: one["read_end"]] + separator
            text = texts[one["asked"]]
            for number, (first, last) in enumerate(one["parts"]):
                context = before + text[one["asked_begin"] : first]
                tokens = 0 if number else one["scored"]
                documents.append({"context": context, "target": text[first:last], "tokens": tokens})
    return {"test": Dataset.from_list(documents)}


def results(document, results):
    """Return nats per token of a whole scored part, or whether a single token was the most likely."""
    ((log_likelihood, is_greedy),) = results
    if document["tokens"]:
        return {"nats": -log_likelihood / document["tokens"]}
    return {"acc": float(is_greedy)}
'''
ABOUT = """# The forgetting curve of {model} in lm-evaluation-harness

```sh
lm_eval --include_path {folder} --tasks {group} --model hf --model_args pretrained={place},max_length={tokens}
```

`{group}_copy_N` asks for the last part of N tokens after the same text, `{group}_control_N` after an irrelevant one.
`nats`: mean nats per token of the whole part. `acc`: share of single tokens, {single} of each text, to which the model
gives the highest probability. Lengths are in tokens of {model}'s tokenizer: {lengths}. {exact} of {count} contexts are
tokenised again as exactly the run's tokens. Without `max_length` the harness cuts contexts beyond the model's own.
"""


def write_lm_eval(source: Source, folder: Path, notice: Callable[[str], object] = lambda line: None) -> list[Path]:
    """Write the folder lm_eval: a task for each length and half, their group, texts and a README.

    Args:
        notice: called with a line if many contexts are tokenised to other tokens than the run's.

    Raises:
        ValueError: no forgetting curve in the run, several of them, or one whose text or tokenizer has changed since.
    """
    baseline = repeatable(source)
    ((model, _),) = baseline.header["models"].items()
    loader = Load()
    lm = loader(model, weights=False)
    bound, examples = _measured(baseline, lm, loader)
    requests = [one for example in examples for one in _requests(lm, bound, example)]
    lengths = sorted({one["length"] for one in requests})
    contexts = [bound.num_tokens(lm, one, length) for one in examples for length in one.lengths]
    exact = [one.pop("exact") for one in requests]
    texts = {name: decoded(lm.tokenizer, tokens) for one in examples for name, tokens in _names(one).values()}
    data = {"separator": decoded(lm.tokenizer, bound.separator(lm)), "texts": texts, "requests": requests}
    files = {"texts.json": json.dumps(data), "farspan_curve.py": CODE}
    tasks = {f"{GROUP}_{half}_{length}": (half, length) for half in HALVES for length in lengths}
    files[f"{GROUP}.yaml"] = "\n".join([f"group: {GROUP}", "task:", *(f"  - {task}" for task in tasks), ""])
    for task, (half, length) in tasks.items():
        files[f"{task}.yaml"] = TASK.format(task=task, half=half, length=length, version=bound.version)
    files["README.md"] = ABOUT.format(
        model=model,
        place=folder_of(model),
        folder="lm_eval",
        group=GROUP,
        tokens=max(contexts),
        single=SINGLE,
        lengths=", ".join(f"{length:,}" for length in lengths),
        exact=sum(exact),
        count=len(exact),
    )
    if sum(exact) < MOSTLY * len(exact):
        notice(
            f"only {sum(exact):,} of {len(exact):,} contexts are tokenised again as the run's tokens (shuffled text "
            "hardly ever is): the numbers of lm-evaluation-harness will differ from the run's"
        )
    place = folder / "lm_eval"
    place.mkdir()
    for name, content in files.items():
        write(place / name, content)
    return [place / name for name in files]


def _measured(baseline: Source, lm: LM, loader: Load) -> tuple[BoundCurve, list[Example[Texts]]]:
    """Return the curve of a run and its examples, with the lengths that were measured."""
    settings = baseline.header["settings"]
    rows = [row for row in baseline.rows if row.task == "curve" and row.depth == 0 and row.status == "ok"]
    specs = [spec for spec, entry in settings["tasks"].items() if entry["task"] == "curve"]
    if len(specs) != 1 or not rows:
        raise ValueError(
            f"{baseline.folder} holds {len(specs) if rows else 0} forgetting curves, and lm-eval takes one: measure it "
            "in a run of its own (farspan curve MODEL)"
        )
    refuse_difference(baseline, lm, loader)
    how = arguments_of(settings) | {"cost": False, "refusals": True}
    (setup,) = grid([lm], specs, loader=loader, **how).setups(lm, Watch())
    assert isinstance(setup.bound, BoundCurve)
    lengths = setup.lengths or tuple(sorted({row.length for row in rows}))
    repeats = max(row.repeat for row in rows) + 1 if setup.lengths is None else setup.repeats or DEFAULT_REPEATS
    examples = replace(setup, lengths=lengths, repeats=repeats).examples(lm, settings["seed"])
    made: dict[tuple[int, int], tuple[int, str, int]] = {}  # number, text and control of an example
    for number, one in enumerate(examples):
        other = one.repeat if one.payload.other_repeat is None else one.payload.other_repeat
        made |= {(one.repeat, length): (number, digest(one.payload.target), other) for length in one.lengths}
    wanted: dict[int, set[int]] = {}
    for row in rows:
        number, *same = made.get((row.repeat, row.length), (-1,))
        if same != [row.scores.get("target"), row.scores["control_repeat"]]:
            raise ValueError(
                f"{baseline.folder}: the text of repeat {row.repeat} at {row.length:,} tokens is not made again from "
                "its settings. Measure the curve again"
            )
        wanted.setdefault(number, set()).add(row.length)
    kept = [replace(examples[number], lengths=tuple(sorted(lengths))) for number, lengths in sorted(wanted.items())]
    return setup.bound, kept


def _names(example: Example[Texts]) -> dict[str, tuple[str, np.ndarray]]:
    """Return the names and tokens of an example's texts, by part; each is written once."""
    ids = {name: tokens for name, tokens in example.payload.named if name != "other_repeat"}
    return {name: (digest(tokens), tokens) for name, tokens in ids.items()}


def _requests(lm: LM, bound: BoundCurve, example: Example[Texts]) -> Iterator[dict[str, Any]]:
    """Yield the requests of an example, for both halves at each length, with offsets in characters."""
    names = _names(example)
    halves = {"copy": ("target", "target"), "control": ("target", "other")}
    if "prefix" in names:
        halves["control"] = ("prefix", "target")
    separator = list(bound.separator(lm))
    between = decoded(lm.tokenizer, separator)
    for length in example.lengths:
        start, warmup, scored = bound.slice_at(length, 0.0)
        first, end = start + warmup, start + warmup + scored
        for half, parts in halves.items():
            (read, read_ids), (asked, asked_ids) = (names[part] for part in parts)
            spans = [(_offset(lm, asked_ids, first), _offset(lm, asked_ids, end))]
            spans += _single_tokens(lm, asked_ids, start, first, end)
            ids = [*separator, *read_ids[:length].tolist(), *separator, *asked_ids[start:end].tolist()]
            before = decoded(lm.tokenizer, read_ids)[: _offset(lm, read_ids, length)]
            after = decoded(lm.tokenizer, asked_ids)[_offset(lm, asked_ids, start) : spans[0][1]]
            text = f"{between}{before}{between}{after}"
            yield {
                "half": half,
                "length": length,
                "repeat": example.repeat,
                "read": read,
                "read_end": _offset(lm, read_ids, length),
                "asked": asked,
                "asked_begin": _offset(lm, asked_ids, start),
                "scored": scored,
                "parts": spans,
                "exact": lm.tokenizer(text, add_special_tokens=False)["input_ids"] == ids,
            }


def _single_tokens(lm: LM, ids: np.ndarray, start: int, first: int, end: int) -> list[tuple[int, int]]:
    """Return the characters of up to SINGLE tokens of ids[first:end], spread over them, that the harness scores as one
    token each after ids[start:first]."""
    text, begin = decoded(lm.tokenizer, ids[:end]), _offset(lm, ids, start)
    found: dict[int, tuple[int, int] | None] = {}  # by place; None: not one token

    def known(place: int) -> tuple[int, int] | None:
        a, b = _offset(lm, ids, place), _offset(lm, ids, place + 1)
        if a == b or text[a - 1].isspace():
            return None
        before, whole = (lm.tokenizer(text[begin:to], add_special_tokens=False)["input_ids"] for to in (a, b))
        return (a, b) if len(whole) == len(before) + 1 else None

    for wanted in np.unique(np.linspace(first, end - 1, SINGLE).round().astype(int)).tolist():
        for place in (*range(wanted, end), *range(wanted - 1, first - 1, -1)):  # the next one, or the one before
            if place not in found:
                found[place] = known(place)
                if found[place] is not None:
                    break
    return [span for _, span in sorted(found.items()) if span is not None]


def _offset(lm: LM, ids: np.ndarray, tokens: int) -> int:
    """Return the number of characters in the first tokens of a text, without an incomplete last character."""
    return len(decoded(lm.tokenizer, ids[:tokens]).rstrip("\ufffd"))
