"""Runs wrong inputs and judges each: all tables, or a sample of them."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from attack import damages, inputs
from attack.harness import Command, End, Finding, Stage, judge, rows_of
from attack.inputs import MEMORY, Input

TABLES = (
    inputs.options,
    inputs.combinations,
    inputs.spellings,
    inputs.configs,
    damages.models,
    damages.code,
    damages.texts,
    damages.data,
    damages.imports,
    damages.runs,
    damages.checkpoints,
    damages.caches,
    damages.indexes,
)

AT_ONCE = ("options", "combinations", "spellings", "models", "code")  # known to be wrong before anything is measured


def all_inputs() -> Iterator[Input]:
    for table in TABLES:
        yield from table()


def sample(wrong: Iterable[Input], of_each: int, skip: int = 0) -> list[Input]:
    """Some of each table, the same ones each time; `skip`: so many of each are left out first."""
    by_table: dict[str, list[Input]] = {}
    for one in wrong:
        by_table.setdefault(one.table, []).append(one)
    chosen = []
    for table in by_table.values():
        chosen += sorted(table, key=lambda one: hashlib.sha256(one.id.encode()).digest())[skip:][:of_each]
    return chosen


def attack(stage: Stage, one: Input) -> tuple[End, list[Finding]]:
    """Runs the command on what was damaged, and judges how it ends."""
    origin = stage.made(one.made) if one.made else None
    with stage.copy(origin) as here:
        before = scores_of(here / "run")
        stdin = None
        if one.damage is not None:
            one.damage(here)
        if one.stdin is not None:
            stdin = here.parent / "stdin"
            stdin.write_text(one.stdin)
        rows_before = len(rows_of(here))
        limits = {"memory": MEMORY}
        (end,) = stage.zygote.run(Command(one.argv, here, limits=limits, stdin=stdin, timeout=one.timeout))
        rows = rows_of(here)
        expect = one.expect
        if expect == "same":
            expect = "any" if end.code == 2 else "ok"
        counts = {"rows_before": rows_before, "rows_after": len(rows), "at_once": one.table in AT_ONCE}
        found = judge(end, expect=expect, names=one.names, **counts)
        if one.expect == "same" and end.code == 0 and not found:
            after = scores_of(here / one.argv[-1]) if "--out" in one.argv else scores_of(here / "run")
            found += different(before, after)
        found += left(here, one)
    return end, found


def scores_of(run: Path) -> dict[tuple[object, ...], list[object]]:
    """What was measured, by what makes a row the same as another."""
    found: dict[tuple[object, ...], list[object]] = {}
    for row in rows_of(run):
        key = tuple(str(row.get(name)) for name in ("model", "method", "task", "example", "length", "depth"))
        found.setdefault(key, []).append(row.get("scores"))
    return found


def different(
    before: dict[tuple[object, ...], list[object]], after: dict[tuple[object, ...], list[object]]
) -> list[Finding]:
    """Rows that are missing, there twice, or have other scores."""
    found = []
    missing, more = before.keys() - after.keys(), after.keys() - before.keys()
    if missing or more:
        found.append(Finding("silent", f"{len(missing)} rows are missing, {len(more)} are of other examples"))
    twice = [key for key, scores in after.items() if len(scores) > 1]
    if twice:
        found.append(Finding("silent", f"{len(twice)} rows are there twice"))
    moved = [key for key in before.keys() & after.keys() if before[key][0] != after[key][0]]
    if moved:
        found.append(Finding("silent", f"{len(moved)} of {len(before)} rows have other scores"))
    return found


def left(here: Path, one: Input) -> list[Finding]:
    """What a command must not leave behind."""
    found = []
    if (here / damages.PWNED).exists():
        found.append(Finding("executed", "code of the input ran"))
    if one.table == "links" and (here / "precious").read_bytes() != b"mine\n":
        found.append(Finding("executed", "a file was written through a link"))
    return found
