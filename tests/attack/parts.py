"""The parts of `python -m attack`: each returns (name, table, findings) of all its attacks."""

from typing import Any

from attack.harness import Finding, Stage

Results = list[tuple[str, str, list[Finding]]]


def inputs(given: Any, stages: list[Stage]) -> Results:
    from attack.__main__ import shared_out
    from attack.wrong import all_inputs, attack, sample

    chosen = [one for one in all_inputs() if given.only in one.id]
    if given.sample:
        chosen = sample(chosen, given.sample)
    done = shared_out(stages, chosen, lambda stage, one: attack(stage, one)[1], lambda one: one.id)
    return [(one.name, one.table, findings) for one, findings in done]
