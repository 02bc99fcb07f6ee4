"""Lines about whole runs: rows that they lack, models with the same weights, and costs of different machines."""

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from farspan.record import LENGTHS, by_key, changed_fields
from farspan.report.header import rows_of
from farspan.report.runs import Source, cost_rows

DEFAULT_NAME = re.compile(r".+-[0-9a-f]{8}")  # of `farspan.record.default_folder`
MACHINE = ("processor", "cores", "threads", "accelerators")  # of a session; costs are compared where these are equal


def notices(sources: Sequence[Source]) -> list[str]:
    """Return the lines to show before the results of some runs."""
    return [
        *filter(None, map(unfinished, sources)),
        *same_weights(sources),
        *other_tokenizers(sources),
        *uneven_costs(sources),
    ]


def same_weights(sources: Iterable[Source]) -> list[str]:
    """Return a line for each set of models that have the same weights. Servers do not report theirs."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, about in (item for source in sources for item in source.header["models"].items()):
        if about.get("fingerprint") and about.get("architecture"):
            found.setdefault(about["fingerprint"], {}).setdefault(name, about.get("config") or {})
    return [
        f"{', '.join(names)} have the same weights (fingerprint {mark}): under the same method they can differ only by "
        f"{_by_configs(list(names.values()))}how they were read"
        for mark, names in found.items()
        if len(names) > 1
    ]


def other_tokenizers(sources: Iterable[Source]) -> list[str]:
    """Return a line if models have different tokenizers: their numbers per token cannot be compared."""
    models = (item for source in sources for item in source.header["models"].items())
    found = by_key(dict.fromkeys((about["tokenizer"], name) for name, about in models if about.get("tokenizer")))
    if len(found) < 2:
        return []
    whose = " | ".join(", ".join(names) for names in found.values())
    return [
        f"models have different tokenizers ({whose}): lengths are in tokens of each, and nats and perplexity are per "
        "token, so they cannot be compared between these; only memory lengths are, in characters of the text"
    ]


def _by_configs(configs: Sequence[dict[str, Any]]) -> str:
    """Return the words of `same_weights` about the configs, where these differ from the first or are not recorded."""
    if not all(configs):
        return "their configs and by "
    different = dict.fromkeys(filter(None, (changed_fields(configs[0], one) for one in configs[1:])))
    return f"their configs ({' | '.join(different)}) and by " if different else ""


def uneven_costs(sources: Sequence[Source]) -> list[str]:
    """Return a line if the costs of runs were measured on machines that differ."""
    different = machines_apart([source for source in sources if cost_rows(source)])
    if not different:
        return []
    return [f"costs were measured in sessions that differ in {', '.join(different)}: times of different lines may too"]


def machines_apart(sources: Sequence[Source]) -> list[str]:
    """Return how the machines of the runs' sessions, or the devices of the models with costs, differ, such as
    `threads (1 and 2)`. Rows do not say in which session they were measured."""
    sessions = [session for source in sources for session in source.header["sessions"]]
    return apart(sessions, MACHINE) + apart([one for source in sources for one in _devices(source)], ("device",))


def _devices(source: Source) -> Iterator[dict[str, str]]:
    """Yield the device of each model with costs, when it was first measured and in each session."""
    first = {name: about.get("device") for name, about in source.header["models"].items()}
    for devices in (first, *(session.get("devices", {}) for session in source.header["sessions"])):
        for model in dict.fromkeys(model for model, *_ in cost_rows(source)):
            if device := devices.get(model):
                yield {"device": device}


def apart(entries: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Return the names whose values differ among entries, each with its values."""
    values = {name: dict.fromkeys(str(one.get(name)) for one in entries) for name in names}
    return [f"{name} ({' and '.join(found)})" for name, found in values.items() if len(found) > 1]


def unfinished(source: Source) -> str:
    """Return a line with the number of rows that run.json plans and the run lacks, and the command that measures them;
    "" if none is known to be missing."""
    planned, missing, is_exact = _planned(source)
    if not missing:
        return ""
    models = list(source.header["models"])
    whose = models[0] if len(models) == 1 else f"{len(models)} models"
    count = f"{missing:,} of the {planned:,} rows planned for {whose}" if is_exact else f"at least {missing:,} rows"
    given = filter(None, map(_options_of, source.header["sessions"]))
    commands = [shlex.join(["farspan", *_into(source.folder, options)]) for options in given]
    fix = f"`{commands[-1]}` measures them" if commands else "Repeat its command to measure them"
    if len({*commands}) > 1:
        fix += ", if it names all models and methods of the run"
    return f"the run {source.name} is not finished: it lacks {count}. {fix}; all numbers are of the others"


def _into(folder: Path, words: list[str]) -> list[str]:
    """Return the words of a command that continues the run in this folder, which can have been moved since."""
    if words[0] == "train":  # its runs are in the folder of the config
        return words
    if words[0] == "demo":  # it writes a run for each of its texts
        folder = Path(os.path.normpath(folder / ".."))
    words = [part for one in words for part in (["--out", one[6:]] if one.startswith("--out=") else [one])]
    if "--out" not in words[:-1]:
        has_own_name = folder.name == "demo" if words[0] == "demo" else DEFAULT_NAME.fullmatch(folder.name)
        is_here = has_own_name and Path("runs", folder.name).resolve() == folder.resolve()
        return words if is_here else [*words, "--out", str(folder)]
    place = words.index("--out") + 1
    is_here = Path(words[place]).resolve() == folder.resolve()
    return words if is_here else [*words[:place], str(folder), *words[place + 1 :]]


def _options_of(session: Mapping[str, Any]) -> list[str]:
    """Return the options of a session's farspan command; [] if Python called farspan."""
    program, *options = map(str, session.get("command") or [""])
    is_farspan = Path(program).stem == "farspan" or Path(program).parts[-2:] == ("farspan", "__main__.py")
    return options if is_farspan else []


def command_of(session: Mapping[str, Any]) -> str:
    """Return a session's farspan command as one would type it; "" if Python called farspan."""
    options = _options_of(session)
    return shlex.join(["farspan", *options]) if options else ""


def _planned(source: Source) -> tuple[int, int, bool]:
    """Return how many rows the models in run.json have according to its settings, how many of these are missing, and
    whether both are exact. They are lower limits where the lengths, repeats or depths are not known, and 0 where
    the run chose its lengths while it measured, and of a search, which measures some tasks at some lengths."""
    settings, models = source.header["settings"], source.header["models"]
    given, repeats = settings.get("lengths"), settings.get("repeats")
    if given == "auto" or "search" in settings or "methods" not in settings:
        return 0, 0, False
    found, sessions = rows_of(source.header, source.rows), source.header["sessions"]
    named = {pair for one in sessions for pair in product(one.get("models", ()), one.get("methods") or ())}
    is_recorded = bool(sessions) and all(one.get("methods") for one in sessions)  # not by an older farspan
    planned, missing, is_exact = 0, 0, bool(given and repeats)
    for spec in settings["tasks"]:
        rows = [row for (task, *_), some in found.items() if task == spec for row in some]
        is_exact = is_exact and bool(rows)
        measured = {row.length for row in rows}
        known = repeats or len({row.repeat for row in rows})
        depths = len({row.depth for row in rows if row.status != "refused"}) or 1
        begun = [name for name in models if spec in models[name].get("tasks", {})]
        for model, method in product(begun, settings["methods"]):
            if is_recorded and (model, method) not in named:
                continue  # measured by commands that named other methods
            mine = found.get((spec, model, method), [])
            lengths = set(given or models[model].get(LENGTHS, {}).get(spec) or measured)
            refused = {row.length for row in mine if row.status == "refused"}
            counts = Counter(row.length for row in mine)
            planned += known * depths * len(lengths - refused)
            missing += sum(max(0, known * depths - counts[length]) for length in lengths - refused)
    return planned, missing, is_exact
