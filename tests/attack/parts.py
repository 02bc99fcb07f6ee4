"""The parts of `python -m attack`: each returns (name, table, findings) of all its attacks."""

import json
from typing import Any

from browser import chromium

from attack.harness import Finding, Stage, message
from attack.inputs import Input

Results = list[tuple[str, str, list[Finding]]]


def inputs(given: Any, stages: list[Stage]) -> Results:
    from attack.__main__ import shared_out
    from attack.wrong import all_inputs, attack, sample

    chosen = [one for one in all_inputs() if given.only in one.id]
    if given.sample:
        chosen = sample(chosen, given.sample, given.skip)

    def attacked(stage: Stage, one: Input) -> list[Finding]:
        end, found = attack(stage, one)
        if given.messages:
            line = {"input": one.id, "expect": one.expect, "code": end.code, "message": message(end.stderr)}
            with given.messages.open("a") as file:
                file.write(json.dumps(line) + "\n")
        return found

    done = shared_out(stages, chosen, attacked, lambda one: one.id)
    return [(one.name, one.table, findings) for one, findings in done]


def kills(given: Any, stages: list[Stage]) -> Results:
    """Each SIGKILL that hit is an attack, as is each SIGINT or SIGTERM; findings are of the last kill of a sequence."""
    from attack import kills
    from attack.__main__ import shared_out

    chosen = [one for one in kills.sequences(given.sample) if given.only in one.name]
    hits = dict[str, int]()

    def attack(stage: Stage, one: kills.Series) -> list[Finding]:
        hits[one.name], found = kills.attack(stage, one)
        return found

    results: Results = []
    for one, findings in shared_out(stages, chosen, attack, lambda one: one.name):
        kind = f"SIGKILL, {one.killed.name}"
        done: Results = [(one.name, kind, []) for _ in range(hits.get(one.name, 0))]
        if findings:
            done[-1:] = [(one.name, kind, findings)]
        results += done
    for beside in (one for one in kills.BESIDE if given.only in one.name):
        hit, found = kills.attack_shards(stages[0], beside)
        results += [(beside.name, f"SIGKILL, {beside.name}", found if number == 0 else []) for number in range(hit)]
    signalled = [one for one in kills.signals() if given.only in one.name]
    if given.sample:
        signalled = signalled[:: max(1, len(signalled) // (4 * given.sample))]
    over = dict[str, bool]()

    def attack_signal(stage: Stage, one: kills.Signalled) -> list[Finding]:
        over[one.name], found = kills.attack_signal(stage, one)
        return found

    for one, findings in shared_out(stages, signalled, attack_signal, lambda one: one.name):
        kind = one.name.partition(" ")[0] + (", was over" if over.get(one.name) else "")
        results.append((one.name, kind, findings))
    return results


def limits(given: Any, stages: list[Stage]) -> Results:
    from attack import limits
    from attack.__main__ import shared_out

    chosen = [one for one in limits.all_limits() if given.only in one.name]
    if given.sample:
        chosen = chosen[:: max(1, len(chosen) // (4 * given.sample))]
    done = shared_out(stages, chosen, limits.attack, lambda one: one.name)
    return [(one.name, one.kind, findings) for one, findings in done]


def hostile(given: Any, stages: list[Stage]) -> Results:
    from attack import hostile
    from attack.__main__ import shared_out

    chosen = [one for one in hostile.all_pages() if given.only in one.name]
    if given.sample:
        chosen = chosen[:: max(1, len(chosen) // given.sample)]
    with chromium() as browser:
        done = shared_out(
            stages[:1], chosen, lambda stage, one: hostile.attack(stage, one, browser), lambda one: one.name
        )
        seen = "in Chromium" if browser is not None else "without a browser"
    return [(one.name, seen, findings) for one, findings in done]


def fuzz(given: Any, stages: list[Stage]) -> Results:
    from attack import fuzz
    from attack.__main__ import shared_out

    chosen = [one for one in fuzz.jobs(given.seconds, len(stages), given.seed) if given.only in one.name]
    counts = dict[str, int]()

    def attack(stage: Stage, one: fuzz.Job) -> list[Finding]:
        counts[one.name], found = fuzz.attack(stage, one)
        return found

    done = shared_out(stages, chosen, attack, lambda one: one.name)
    return [(one.name, f"{one.name}: {counts.get(one.name, 0):,} examples", findings) for one, findings in done]
