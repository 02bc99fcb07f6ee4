"""run.json in one form, whatever version of farspan wrote it.

Each task of a run is an entry of `settings.tasks`: the task of its rows, the unit of its lengths, its quality (the
score that measures it), details (further scores), and whether all depths of an example have the same text or answer.
`models.NAME.tasks` holds the settings that the rows of each task have under that model. Rows without a run and imported
ones, which record no tasks, are given theirs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from farspan.record import Row
from farspan.stats import label, perplexity_label, version_label

COST = "cost"  # the task of rows that hold seconds and bytes


def _entry(score: str, name: str, higher_is_better: bool | None, *details: str, **more: bool) -> dict[str, Any]:
    quality = {"score": score, "name": name, "higher_is_better": higher_is_better, "exp": False, "graded": False} | more
    return {"unit": "tokens", "quality": quality, "details": list(details)}


# of rows whose run records no tasks
ENTRIES: dict[str, dict[str, Any]] = {
    "curve": _entry("copy - control", "copied beyond guessing", True, "copy", "control", graded=True),
    "perplexity": _entry("nats", "perplexity", False, "accuracy", exp=True),
    "attention": _entry("all.pareto", "attention of the heaviest quarter of the keys", None, "sinks", graded=True),
}
SAME_AT_DEPTHS = ("curve", "passkey")  # of runs that do not record it
# the title of a task in a few words, from its settings; other tasks have the task as it is spelled
LABELS: dict[str, Callable[..., str]] = {"curve": label, "perplexity": perplexity_label}


def current_header(header: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Return a header in the form above; a header that has this form is returned unchanged.

    Args:
        header: run.json.
        rows: of the run.

    Raises:
        ValueError: the header records no tasks, and the rows have one whose score is not known.
    """
    settings = header["settings"]
    if isinstance(settings.get("tasks"), dict):
        return dict(header)
    models = {name: dict(about) for name, about in header.get("models", {}).items()}
    tasks = _tasks_of_rows(models, rows)
    return {**header, "settings": {**settings, "tasks": tasks}, "models": models}


def _tasks_of_rows(models: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Return an entry for each task, settings and version among the rows, and record the settings in `models`."""
    tasks: dict[str, Any] = {}
    known: dict[tuple[str, str, int, int], str] = {}  # rows of a run share their settings
    for row in rows:
        place = row.model, row.task, row.version, id(row.settings)
        if row.task == COST or place in known:
            continue
        if row.task not in ENTRIES:
            raise ValueError(
                f"run.json does not record its tasks (settings.tasks), and the score of {row.task!r} is not known "
                "without them. Measure it again"
            )
        mine = models.setdefault(row.model, {"name": row.model}).setdefault("tasks", {})
        for spec in _specs(row):
            taken = tasks.get(spec, {"task": row.task, "version": row.version})
            same_task = (taken["task"], taken["version"]) == (row.task, row.version)
            if same_task and mine.get(spec, row.settings) == row.settings:
                break
        known[place] = spec
        if spec not in tasks:
            tasks[spec] = {"task": row.task, "version": row.version} | ENTRIES[row.task]
        mine[spec] = row.settings
    return tasks


def _specs(row: Row) -> Iterator[str]:
    """Yield names for the task of a row, the shortest first."""
    if row.task in LABELS:
        yield LABELS[row.task](row.settings)
        yield LABELS[row.task](row.settings) + version_label(row.version)
        yield LABELS[row.task](row.settings, whole=True)
    else:
        yield row.task
    number = 2
    while True:
        yield f"{row.task} {number}{version_label(row.version)}"
        number += 1


def rows_of(header: Mapping[str, Any], rows: Sequence[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Return the rows of each task of a run, by (task as it is spelled, model, method).

    Args:
        header: in the current form.
    """
    tasks = header["settings"]["tasks"]
    found: dict[tuple[str, str, str], list[Row]] = {}
    known: dict[tuple[str, str, int, int], str | None] = {}
    for row in rows:
        place = row.model, row.task, row.version, id(row.settings)
        if place not in known:
            mine = header["models"].get(row.model, {}).get("tasks", {})
            known[place] = next(
                (
                    spec
                    for spec, settings in mine.items()
                    if spec in tasks
                    and tasks[spec]["task"] == row.task
                    and tasks[spec].get("version", row.version) == row.version
                    and settings == row.settings
                ),
                None,
            )
        if (spec := known[place]) is not None:
            found.setdefault((spec, row.model, row.method), []).append(row)
    return found


def same_at_depths(entry: Mapping[str, Any]) -> bool:
    """Return whether the questions of a task of `settings.tasks` have the same text or answer at all depths of an
    example."""
    return bool(entry.get("same_at_depths", entry["task"] in SAME_AT_DEPTHS))


def methods_of(header: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """Return the methods of a run, in the order in which they were requested."""
    return list(dict.fromkeys([*header["settings"].get("methods", []), *(row.method for row in rows)]))
