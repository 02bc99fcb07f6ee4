"""Compare the settings of a run, or of anything else that is continued, with those of now."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from farspan.record.sampled import LARGEST
from farspan.schema.row import Row

DEFAULT_REPEATS = 10  # of a run with lengths, where its settings give none


def continued(
    folder: Path,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    rows: Sequence[Row],
    *,
    divided: bool,
    may_grow: bool,
) -> dict[str, Any]:
    """Return the settings of a run that is continued: the methods are those of now, then earlier ones that have rows.

    Args:
        divided: among shards, which must all name the same methods, lengths and repeats, since these decide which shard
            measures what.
        may_grow: whether given lengths and repeats may be others than before that contain those of all rows. The
            longest length, on which the texts depend, must be the same.

    Raises:
        ValueError: other settings, other methods of a divided run, or a file of a method with rows has changed.
    """
    if may_grow:
        grown = {**before, **_grown(before, as_read(now), rows)}
        if divided and grown != before:
            raise ValueError(
                f"{folder}: with --shard and --ray the lengths and repeats must be those of the run. Repeat these, or "
                "add others in one process, without --shard and --ray"
            )
        before = grown
    may_add = may_grow and not divided and isinstance(before["lengths"], list)
    more = " (more repeats, and lengths below its longest, may be added)" if may_add else ""
    refuse_differences(folder, "run", _by_name(before), _by_name(now), more=more)
    if before.get(LARGEST) != now.get(LARGEST):
        raise ValueError(
            f"{folder}: --lengths auto chooses texts by the trained lengths of all models of a run, and the models "
            "named now have others than those before. Name the same models, or measure all into another folder (out)"
        )
    if "methods" not in before or "methods" not in now:
        return dict(before)
    measured = {row.method for row in rows if row.status != "refused"}
    # other shards may be measuring with files before their first row
    read = before["methods"] if divided else measured
    files = {name: hashes for name, hashes in before.get("files", {}).items() if name in read}
    refuse_changed_files(folder, {name: files[name] for name in files.keys() & {*now["methods"]}}, now.get("files", {}))
    if divided and now["methods"] != before["methods"]:
        raise ValueError(
            f"{folder}: with --shard and --ray the methods must be those of the run, in its order. Got "
            f"{', '.join(now['methods'])}; expected {', '.join(before['methods'])}. Repeat these, or continue the run "
            "in one process"
        )
    methods = [*now["methods"], *(name for name in before["methods"] if name in measured - {*now["methods"]})]
    files |= now.get("files", {})
    return {**before, "methods": methods} | ({"files": files} if files else {})


def refuse_changed_files(
    folder: Path, before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]
) -> None:
    """Raise ValueError if a method of a run read a file whose hash is another now.

    Args:
        before, now: by method, the hash of each file.
    """
    for name, hashes in before.items():
        for file, old in hashes.items():
            if (new := now.get(name, {}).get(file)) != old:
                raise ValueError(
                    f"{folder}: {file} has changed since this run measured {name}: its hash was {old}, "
                    f"{f'now {new}' if new else 'now there is no such file'}. Restore the file, or measure again into "
                    "another folder (out)"
                )


def as_read(value: Any) -> Any:
    """Return a value as it is read back from JSON, for comparison with values of a file: tuples become lists."""
    return json.loads(json.dumps(value))


def refuse_differences(
    folder: Path, what: str, before: dict[str, Any], now: dict[str, Any], may_change: Sequence[str] = (), more: str = ""
) -> None:
    """Raise ValueError, with both values, if two nested settings differ in a key that must not change.

    Args:
        more: what else may be given to continue it.
    """
    old, new = dict(flat(before)), dict(flat(as_read(now)))
    found = [
        f"{name} was {old.get(name)!r}, now {new.get(name)!r}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and name not in may_change
    ]
    if found:
        raise ValueError(
            f"{folder} holds another {what}, made with other settings: {'; '.join(found)}. "
            f"Repeat that {what}'s settings to continue it{more}, or choose another folder (out)"
        )


def _grown(before: Mapping[str, Any], now: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Return the lengths and repeats of now that contain all those of the rows; none of lengths that are not given,
    since these depend on the repeats."""
    old, new = before["lengths"], now["lengths"]
    if not (isinstance(old, list) and isinstance(new, list)):
        return {}
    measured = [(row.length, row.repeat) for row in rows if not row.of_all]
    has_all = {length for length, _ in measured} <= {*new}
    grown = {"lengths": new} if has_all and old[-1] == new[-1] else {}
    is_enough = all(repeat < (now["repeats"] or DEFAULT_REPEATS) for _, repeat in measured)
    return grown | ({"repeats": now["repeats"]} if is_enough else {})


def _by_name(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a run keeps, with its tasks as written: their spelling identifies them."""
    kept = {name: value for name, value in settings.items() if name not in ("methods", "files", LARGEST)}
    return kept | ({"tasks": ", ".join(kept["tasks"])} if isinstance(kept.get("tasks"), dict) else {})


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the single values of nested settings, each with its keys, joined by dots."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, f"{name}.{key}" if name else key)
    else:
        yield name, value
