"""The measurements of a recorded run, repeated on another model: the same tasks, texts, lengths, repeats and seed."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from farspan.files import expanded
from farspan.lm import LM
from farspan.measuring.arguments import methods_of
from farspan.measuring.grid import measure
from farspan.measuring.loader import Load
from farspan.measuring.loop import Watch
from farspan.measuring.result import Measured
from farspan.measuring.setups import grid, hashes_of
from farspan.record import SAMPLED, default_folder, read_header, refuse_changed_files, spanned
from farspan.report.runs import Source, read_run

SETTINGS = ("text", "lengths", "repeats", "seed", "cost")
FROM_CONTEXT = (None, "auto")  # lengths that follow from the trained length


def read_baseline(run: str | Path, model: str | None = None) -> Source:
    """Read a run of one model that can be repeated.

    Args:
        model: its name, if the run has several.

    Raises:
        ValueError: no run, a run without rows or without a number that should rise or fall, and as `repeatable`.
    """
    source = repeatable(read_run(run, model))
    tasks = source.header["settings"]["tasks"]
    if all(entry["quality"]["higher_is_better"] is None for entry in tasks.values()):
        raise ValueError(
            f"{source.folder} has nothing to compare: {', '.join(tasks)} has no number that should rise or fall. Give "
            "a run of a curve, of perplexity or of a task with answers"
        )
    return source


def repeatable(source: Source) -> Source:
    """Return a run with its one model.

    Raises:
        ValueError: a run without results, of several models, or that does not record how it was measured.
    """
    if not {"methods", *SETTINGS} <= source.header["settings"].keys():
        raise ValueError(
            f"{source.folder} does not record how it was measured: it was imported, or measured by an older farspan. "
            "Measure it again"
        )
    if "search" in source.header["settings"]:
        raise ValueError(
            f"{source.folder} is a search, which cannot be repeated on another model: measure a baseline with `farspan "
            "compare`"
        )
    models = list(dict.fromkeys(row.model for row in source.rows))
    if len(models) > 1:
        raise ValueError(
            f"{source.folder} holds {len(models)} models ({', '.join(models)}): name one with --baseline-model, or in "
            "`farspan export` with --model"
        )
    trained = {name: about.get("trained_length") for name, about in read_header(source.folder)["models"].items()}
    if source.header["settings"]["lengths"] in FROM_CONTEXT and len(set(trained.values())) > 1:
        lengths = ", ".join(f"{name}: {length}" for name, length in trained.items())
        raise ValueError(
            f"the lengths of {source.folder} follow from the trained lengths of all its models ({lengths} tokens), so "
            "they cannot be repeated on one. Measure the baseline alone, or all models with --lengths"
        )
    if not any(row.status == "ok" for row in source.rows):
        first = source.rows[0]
        raise ValueError(
            f"{source.folder}: none of the {len(source.rows):,} rows has a result, first: {first.status}: "
            f"{first.reason}. Measure it again"
        )
    return replace(source, header=source.header | {"models": {models[0]: source.header["models"].get(models[0], {})}})


def measure_again(
    baseline: Source,
    model: str | LM,
    *,
    cost: bool = True,
    loader: Load | None = None,
    out: str | Path | None = None,
    batch: int | None = None,
    chunk: int | None = None,
    watch: Watch | None = None,
) -> Measured:
    """Measure a model as the baseline was measured.

    Args:
        cost: also measure seconds and memory, if the baseline has them.
        out: the run folder; default: one under runs/, the same for the same baseline and model.

    Raises:
        ValueError: `out` is the baseline's folder; the model has another tokenizer or chat template, or the tasks
            another version or text than the baseline's, or lengths that follow from another trained length; and as
            `farspan.measure`.
    """
    if out is not None and expanded(out).resolve() == Path(baseline.folder).resolve():
        raise ValueError(f"{out} is the baseline itself: give another folder for the new rows (out), or leave it out")
    loader = loader or Load()
    refuse_difference(baseline, loader(model, weights=False), loader)
    settings = baseline.header["settings"] | ({} if cost else {"cost": False})
    name = model if isinstance(model, str) else model.name
    folder = default_folder("check", [name], [str(baseline.folder.resolve()), settings])
    return measure(
        [model],
        settings["methods"],
        list(settings["tasks"]),
        out=out or folder,
        loader=loader,
        batch=batch,
        chunk=chunk,
        shard=(1, 1),
        watch=watch,
        **arguments_of(settings),
    )


def arguments_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `measure` and `grid`, but for models, methods and tasks, that a run records."""
    return {key: settings[key] for key in SETTINGS} | {"refusals": bool(settings.get("compared"))}


def refuse_difference(baseline: Source, lm: LM, loader: Load) -> None:
    """Raise ValueError, with both values, where a model cannot be measured on the texts of the baseline.

    Args:
        lm: the model; its weights are not needed.
        loader: how it was loaded.
    """
    settings = baseline.header["settings"]
    ((before, about),) = baseline.header["models"].items()
    known, mine = about.get("tokenizer"), lm.identity.get("tokenizer")
    if known != mine:
        raise ValueError(
            f"{lm.name} has another tokenizer than the baseline {before} (hash {mine}, baseline {known}): their texts "
            "would be other tokens. Compare them with `farspan compare`, whose lengths are then in characters"
        )
    if settings["lengths"] in FROM_CONTEXT and about.get("trained_length") != lm.trained_length:
        raise ValueError(
            f"the lengths of {baseline.folder} follow from the trained length, {about.get('trained_length')} tokens, "
            f"and {lm.name} was trained on {lm.trained_length}: give --trained-length {about.get('trained_length')}, "
            "or measure the baseline with --lengths"
        )
    what = grid([lm], list(settings["tasks"]), loader=loader, **arguments_of(settings))
    refuse_changed_files(baseline.folder, settings.get("files", {}), hashes_of(methods_of(settings["methods"])))
    versions = {row.task: row.version for row in baseline.rows}
    for one in what.setups(lm, Watch()):
        version = versions.get(one.bound.task, one.bound.version)
        if version != one.bound.version:
            raise ValueError(
                f"{baseline.folder} holds version {version} of the task {one.bound.task}, this farspan measures "
                f"version {one.bound.version}, whose numbers differ: measure the baseline again"
            )
        if (chat := one.bound.chat(lm)) is not None and about.get("chat", chat) != chat:
            raise ValueError(
                f"{lm.name} has another chat template than the baseline {before}: the prompts of {one.what} would be "
                "other tokens. Give the model the template of the baseline, or measure both with `farspan compare`"
            )
        recorded = about.get("tasks", {}).get(one.what)
        if recorded is None:  # costs beside the tasks
            continue
        if (sampled := about.get(SAMPLED, {}).get(one.what)) not in (None, list(one.sampled_to)):
            raise ValueError(
                f"the texts of {one.what} in {baseline.folder} were sampled for lengths of {spanned(sampled)} tokens, "
                f"those of {lm.name} alone would be sampled for {spanned(one.sampled_to)}: measure the baseline with "
                "--lengths"
            )
        now = one.bound.settings
        if different := [
            f"{key} was {recorded.get(key)!r}, now {now.get(key)!r}"
            for key in dict.fromkeys([*recorded, *now])
            if recorded.get(key) != now.get(key)
        ]:
            raise ValueError(
                f"{one.what} would not be measured as in {baseline.folder}: {'; '.join(different)}. Restore the text "
                "or data, or measure the baseline again"
            )
