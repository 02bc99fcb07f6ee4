"""Results as `.eval_results/*.yaml` of a model's repository on the Hub (`huggingface_hub.EvalResultEntry`).

The Hub files each result under a benchmark: the id of a data set, and the name of a task within it.
"""

from collections.abc import Sequence
from pathlib import Path

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml
from huggingface_hub.utils import HFValidationError, validate_repo_id

from farspan.files import write
from farspan.record import by_key
from farspan.report.export import bounds, counted
from farspan.report.exports.numbers import Number, is_hub_id, numbers_of, slug, text_of
from farspan.report.runs import Source
from farspan.stats import MemoryLength
from farspan.text.hub import HUB_ID
from farspan.text.names import described


def write_eval_results(source: Source, folder: Path, dataset: str | None = None) -> list[Path]:
    """Write .eval_results/farspan.yaml, an entry for each number.

    Args:
        dataset: id of the data set on the Hub; default: the text, where it is one of the Hub.

    Raises:
        ValueError: results of several models, or a text or id that is no data set of the Hub.
    """
    if dataset is not None:
        try:
            validate_repo_id(dataset)
        except HFValidationError:
            raise ValueError(
                f"--dataset {dataset!r} cannot be a data set of the Hub: expected OWNER/NAME, of letters, digits, "
                "-, _ and ."
            ) from None
    numbers = numbers_of(source)
    if not numbers:
        raise ValueError(f"{source.folder} has no number that is better when it is higher or lower: nothing to export")
    models = list(dict.fromkeys(number.member.model for number in numbers))
    if len(models) > 1:
        raise ValueError(
            f"{source.folder} holds results of {len(models)} models ({', '.join(models)}), and .eval_results belongs "
            "to the repository of one: name it with --model"
        )
    day = str(source.header["sessions"][-1].get("started", "")) if source.header["sessions"] else ""
    entries = [
        EvalResultEntry(
            dataset_id=dataset or _dataset(number),
            task_id=task_id,
            value=float(f"{number.value:.6g}"),
            date=day or None,
            notes=_notes(number),
        )
        for number, task_id in zip(numbers, _task_ids(numbers), strict=True)
    ]
    place = folder / ".eval_results"
    place.mkdir(exist_ok=True)
    write(place / "farspan.yaml", yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False))
    return [place / "farspan.yaml"]


def _task_ids(numbers: Sequence[Number]) -> list[str]:
    """Return a different name for each number: task, number and length, with the method, and with the number of the
    task among those of its kind, where there are several."""
    methods = {one.member.method for one in numbers}
    kinds = by_key(dict.fromkeys((one.group.task, one.group.spec) for one in numbers))
    found = []
    for one in numbers:
        parts = [one.group.task, one.id]
        parts += [slug(one.member.method)] if len(methods) > 1 else []
        specs = kinds[one.group.task]
        parts += [str(specs.index(one.group.spec) + 1)] if len(specs) > 1 else []
        found.append("_".join(parts))
    return found


def _dataset(number: Number) -> str:
    """Return the id of a text on the Hub."""
    name = text_of(number)
    if (found := HUB_ID.fullmatch(name)) and is_hub_id(found["id"]):
        return found["id"]
    raise ValueError(
        f"the Hub lists results by data set, and {described(name)} is not on the Hub: name a data set with --dataset "
        "OWNER/NAME"
    )


def _notes(number: Number) -> str:
    """Return how a number was measured: interval, method, task, settings and version."""
    memory = number.memory or MemoryLength(number.value)
    interval = bounds(number.low, number.high, "{:.6g}".format, high_is_beyond=memory.interval_censored)
    beyond = "the value is beyond the lengths measured" if memory.censored else ""
    if memory.below is not None:
        beyond = f"the value is below {memory.below:,.0f}, the shortest length judged"
    parts = [
        "farspan",
        number.meaning,
        f"95 % interval {interval}" if interval else "",
        beyond,
        counted(number.n, "repeat" if number.length is None else "example"),
        f"method {number.member.method}",
        f"{number.group.spec}, version {number.group.version}",
    ]
    return "; ".join(part for part in parts if part)
