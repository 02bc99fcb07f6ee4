"""run.json in one form, whatever version of farspan wrote it.

Each task of a run is an entry of `settings.tasks`: the task of its rows, the unit of its lengths, its quality (the
score that measures it) and details (further scores). `models.NAME.tasks` holds the settings that the rows of each task
have under that model. Older versions recorded `settings.task` (curve, perplexity, attention, or a task as it is
spelled) or, of comparisons, `settings.questions`; what they did not record comes from the rows and from
`farspan.tasks`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from farspan.record import Row
from farspan.stats import label, perplexity_label, version_label

COST = "cost"  # the task of rows that hold seconds and bytes
PARETO = "all.pareto"
PARETO_NAME = "attention of the heaviest quarter of the keys"


def _entry(
    unit: str, score: str, name: str, higher_is_better: bool | None, *details: str, **more: bool
) -> dict[str, Any]:
    quality = {"score": score, "name": name, "higher_is_better": higher_is_better, "exp": False, "graded": False} | more
    return {"unit": unit, "quality": quality, "details": list(details)}


# for runs that record neither quality nor the spelling of a task
ENTRIES: dict[str, dict[str, Any]] = {
    "curve": _entry("tokens", "copy - control", "copied beyond guessing", True, "copy", "control", graded=True),
    "perplexity": _entry("tokens", "nats", "perplexity", False, "accuracy", exp=True),
    "attention": _entry("tokens", PARETO, PARETO_NAME, None, "sinks", graded=True),
}
# the title of a task in a few words, from its settings; other tasks have the task as it is spelled
LABELS: dict[str, Callable[..., str]] = {"curve": label, "perplexity": perplexity_label}


def current_header(header: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Return a header in the form above; a header that has this form is returned unchanged.

    Args:
        header: run.json.
        rows: of the run.
    """
    settings = header["settings"]
    if isinstance(settings.get("tasks"), dict):
        return dict(header)
    models = {name: dict(about) for name, about in header.get("models", {}).items()}
    if "questions" in settings:
        tasks = {
            spec: _compared(spec, what, [about.get("questions", {}).get(spec) for about in models.values()], rows)
            for spec, what in settings["questions"].items()
        }
        for about in models.values():
            about["tasks"] = about.get("questions", {})
    else:
        tasks = _tasks_of_rows(settings, models, rows)
    return {**header, "settings": {**settings, "tasks": tasks}, "models": models}


def _compared(spec: str, what: Mapping[str, Any], settings: Sequence[Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Return the entry of a task of an old comparison."""
    name = spec.partition(":")[0]
    tasks = {row.task for row in rows if row.settings in settings and row.task != COST}
    graded = what["quality"]["score"] in ("score", "copy")
    about = {"task": name if name in tasks or not tasks else min(tasks), "unit": what["unit"], "details": []}
    return about | {"quality": {"graded": graded} | what["quality"]}


def _tasks_of_rows(settings: Mapping[str, Any], models: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Return an entry for each task, settings and version among the rows, and record the settings in `models`."""
    tasks: dict[str, Any] = {}
    known: dict[tuple[str, str, int, int], str] = {}  # rows of a run share their settings
    for row in rows:
        place = row.model, row.task, row.version, id(row.settings)
        if row.task == COST or place in known:
            continue
        mine = models.setdefault(row.model, {"name": row.model}).setdefault("tasks", {})
        for spec in _specs(row, settings):
            taken = tasks.get(spec, {"task": row.task, "version": row.version})
            same_task = (taken["task"], taken["version"]) == (row.task, row.version)
            if same_task and mine.get(spec, row.settings) == row.settings:
                break
        known[place] = spec
        if spec not in tasks:
            tasks[spec] = {"task": row.task, "version": row.version} | _known_entry(row, settings)
        mine[spec] = row.settings
    return tasks


def _specs(row: Row, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield names for the task of a row, the shortest first."""
    recorded = str(settings.get("task", ""))
    if row.task in LABELS:
        yield LABELS[row.task](row.settings)
        yield LABELS[row.task](row.settings) + version_label(row.version)
        yield LABELS[row.task](row.settings, whole=True)
    else:
        yield recorded if recorded.partition(":")[0] == row.task else row.task
    number = 2
    while True:
        yield f"{row.task} {number}{version_label(row.version)}"
        number += 1


def _known_entry(row: Row, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return unit, quality and details of a row's task, as far as they can be known."""
    if row.task in ENTRIES:
        return ENTRIES[row.task]
    from farspan.tasks import task  # needs torch, and only these runs need it

    for spec in (str(settings.get("task", "")), f"{row.task}:set={row.settings.get('set')}", row.task):
        if spec.partition(":")[0] != row.task:
            continue
        try:
            one = task(spec)
        except ValueError:
            continue
        of = one.quality
        return _entry(one.unit, of.score, of.name, of.higher_is_better, *one.details, exp=of.exp, graded=of.graded)
    numbers = [name for name, value in row.scores.items() if isinstance(value, int | float)] or ["score"]
    return _entry("tokens", numbers[0], numbers[0], None, graded=True)


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


def methods_of(header: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """Return the methods of a run, in the order in which they were requested."""
    return list(dict.fromkeys([*header["settings"].get("methods", []), *(row.method for row in rows)]))
