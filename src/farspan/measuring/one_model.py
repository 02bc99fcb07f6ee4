"""Measure all tasks of a run on one model, under each method."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from farspan.hf.training import set_aside
from farspan.lm import LM
from farspan.measuring.adaptive import BudgetError, TimeBudget, measure_adaptively
from farspan.measuring.loop import Mine, Watch, measure_cell
from farspan.measuring.setups import Grid, Setup, possible_lengths
from farspan.measuring.sharding import Sharding
from farspan.methods import Method
from farspan.reader.served.client import ServerError
from farspan.record import ABSENT, CONTENTS, DEFAULT_REPEATS, LENGTHS, SAMPLED, VERSIONS, Run, latest
from farspan.schema.row import no_example
from farspan.tasks.cost import BoundCost
from farspan.tasks.curve import RING
from farspan.text.corpora import UNKNOWN_SHARE, Corpus
from farspan.text.names import described

CROSSING_SHARE = 0.1  # of the longest windows that hold the end of a document; such a share is reported


def measure_model(
    lm: LM, methods: Sequence[Method], what: Grid, run: Run, part: Sharding | None, seconds: float, watch: Watch
) -> float:
    """Measure a model in at most `seconds`, counted after it is loaded and its texts are tokenised. Return the seconds
    used."""
    setups = begin_model(lm, what, run, part.models if part is not None else (), watch)
    started = time.monotonic()
    # a Trainer leaves its model in training mode, with dropout; a method of the user's own may train at test time
    with set_aside(lm.model, gradients=True):
        measure_setups(setups, lm, methods, what, run, part, TimeBudget(seconds), watch)
    return time.monotonic() - started


def begin_model(lm: LM, what: Grid, run: Run, order: Sequence[str], watch: Watch) -> list[Setup]:
    """Record a model in a run, or check that it is the run's, and return the tasks bound to it.

    Args:
        order: names of models, in the order in which to record them.

    Raises:
        ValueError: another model of that name, another config or chat template of it, a text that has changed, or rows
            of another version of a task.
    """
    if lm.how_queried:
        watch.notice(lm.how_queried)
    setups = what.setups(lm, watch)
    run.add_model(identity_of(lm, setups, what), order)
    if next(iter(run.header["models"]), None) == lm.name:  # not again for each model, nor by its followers
        for line in crossings(setups, lm, what.seed):
            watch.notice(line)
    return setups


def identity_of(lm: LM, setups: Sequence[Setup], what: Grid) -> dict[str, Any]:
    """Return the record of a model in a run: itself, its tasks, and what they read."""
    tasks = {one.what: one.bound.settings for one in setups if not one.beside}
    texts = about(*(text for one in setups for text in one.bound.texts))
    versions = {one.bound.task: one.bound.version for one in setups}
    record = lm.identity | texts | _chat(setups, lm) | {"tasks": tasks, VERSIONS: versions} | _lengths_of(setups, what)
    ends = next((found for one in setups if (found := one.bound.ends(lm)) is not None), None)
    return record if ends is None else record | {"stop_tokens": ends}


def _chat(setups: Sequence[Setup], lm: LM) -> dict[str, Any]:
    """Return the record of the chat template, if a task uses it; one that cannot be filled in is refused later."""
    with suppress(ValueError):
        for one in setups:
            if (found := one.bound.chat(lm)) is not None:
                return {"chat": found}
    return {}


def crossings(setups: Sequence[Setup], lm: LM, seed: int) -> Iterator[str]:
    """Yield a line for each text with many longest windows that hold the end of a document, and one for each with
    windows in copies."""
    longest: dict[str, tuple[Corpus, int, int]] = {}
    for one in setups:
        lengths, repeats = (one.lengths or (one.longest,)), one.repeats or DEFAULT_REPEATS
        if one.curve is not None:
            repeats = one.curve.pool or RING
        for text, length, count in one.bound.windows_read(lm, (*lengths, *(one.sampled or lengths)[-1:]), repeats):
            if not text.shuffled and length > longest.get(text.hash, (text, 0, 0))[1]:
                longest[text.hash] = text, length, count
    for text, length, count in longest.values():
        with suppress(ValueError):  # a text too short is refused later
            crossing, copied = text.num_crossing_and_copied(length, count, seed)
            if crossing >= CROSSING_SHARE * count:
                yield (
                    f"{described(text.name)}: {crossing} of {count} windows of {length:,} tokens hold the end of a "
                    "document, so a gain from a long context may mean less. Give longer documents, or smaller lengths"
                )
            if copied:
                yield (
                    f"{described(text.name)}: {copied} of {count} windows of {length:,} tokens are from documents that "
                    "repeat the document of another window. They count as different texts, so intervals are too "
                    "narrow. Remove duplicate documents"
                )


def measure_setups(
    setups: Sequence[Setup],
    lm: LM,
    methods: Sequence[Method],
    what: Grid,
    run: Run,
    part: Sharding | None,
    budget: TimeBudget,
    watch: Watch,
) -> None:
    """Measure the tasks on a model under each method, or the part of a shard."""
    cells = [(one, methods if part is None else part.methods(lm, methods, one)) for one in setups]
    left = sum(len(some) for _, some in cells)
    for one, some in cells:
        if part is not None and not some:
            continue
        if not isinstance(one.bound, BoundCost):  # which reads random tokens alone
            watch.notice(f"{one.what}, separator: {lm.separator.kind} {list(one.bound.separator(lm))}")
        if what.compared:
            one, reasons = possible_lengths(lm, one, what.seed)
            for reason in dict.fromkeys(reasons.values()):
                at = [f"{length:,}" for length, why in reasons.items() if why == reason]
                watch.notice(f"{lm.name}, {one.what} at {', '.join(at)}: refused: {reason}")
            for how in some:
                _refuse(run, lm, how, one, what.seed, reasons)
        for done, how in enumerate(some if one.lengths != () else ()):
            try:
                mine = None if part is None else part.mine(lm.name, str(how), one.what)
                share = TimeBudget(budget.left / (left - done))
                _measure_setup(one, how, lm, run, what.seed, share, mine, watch)
            except ValueError as error:
                if not what.compared or isinstance(error, ServerError):
                    raise
                status = "budget" if isinstance(error, BudgetError) else "refused"
                watch.notice(f"{lm.name} {how}, {one.what}: {status}: {error}")
                reasons = dict.fromkeys(_unmeasured(run, lm, how, one), str(error))
                _refuse(run, lm, how, one, what.seed, reasons, status)
        left -= len(some)
        keep_first(run, lm, one, what.seed)


def _measure_setup(
    one: Setup, how: Method, lm: LM, run: Run, seed: int, budget: TimeBudget, mine: Mine | None, watch: Watch
) -> None:
    same: dict[str, Any] = {"seed": seed, "watch": watch, **one.sizes(lm)}
    if one.curve is not None:
        same |= {"longest": one.longest, "repeats": one.repeats, "budget": budget}
        measure_adaptively(one.curve, how, lm, run, **same)
        return
    assert one.lengths is not None
    repeats = one.repeats or DEFAULT_REPEATS
    watch.start(f"{lm.name} {how} {one.what}", len(one.lengths) * repeats)
    measure_cell(one.bound, how, lm, run, lengths=one.lengths, repeats=repeats, sampled=one.sampled, mine=mine, **same)


def about(*texts: Corpus) -> dict[str, Any]:
    """Return the record of texts for a model, which comparisons with another tokenizer's numbers need."""
    contents = {text.name: text.content for text in texts if text.content is not None}
    per_token = {text.hash: text.characters_per_token for text in texts}
    unknown = {text.hash: round(text.unknown, 4) for text in texts if text.unknown > UNKNOWN_SHARE}
    known = {"texts": sorted(per_token), "characters_per_token": per_token, CONTENTS: contents}
    return known | ({"unknown": unknown} if unknown else {})


def _lengths_of(setups: Sequence[Setup], what: Grid) -> dict[str, dict[str, list[int]]]:
    """Return the record of the lengths of a model, and of those for which its texts are sampled, by task; nothing where
    lengths are given."""
    if isinstance(what.lengths, tuple):
        return {}
    mine = [one for one in setups if not one.beside]
    return {
        LENGTHS: {one.what: list(one.lengths or (one.longest,)) for one in mine},
        SAMPLED: {one.what: list(one.sampled_to) for one in mine if one.sampled_to},
    }


def keep_first(run: Run, lm: LM, one: Setup, seed: int) -> None:
    """Write the first example measured, at its shortest length above 0, in readable form next to the rows, unless the
    run has one of the examples that are measured now."""
    bound = one.bound
    if one.curve is not None:
        one = replace(one, lengths=(one.longest,), repeats=one.curve.pool or RING)
    measured = lm.name, bound.measurement
    of_task = [row for row in run.rows if (row.model, row.measurement) == measured]
    mine = [row for row in of_task if row.status in ("ok", *ABSENT)]
    if not mine:
        return
    examples = {example.id: example for example in one.examples(lm, seed)}
    if run.has_example(lm.name, one.what, examples):
        return
    if found := [row for row in mine if row.example in examples]:
        first = min(found, key=lambda row: (row.repeat, row.length == 0, row.length, row.depth))
        if words := bound.shown(lm, examples[first.example], first.length):
            named = {"model": lm.name, "what": one.what, "task": bound.task, "settings": bound.settings}
            run.add_example(named | {"example": first.example} | words, examples)


def _unmeasured(run: Run, lm: LM, how: Method, one: Setup) -> list[int]:
    """Return the lengths at which not all repeats have rows; an error can come after others were measured."""
    rows = run.of(lm.name, str(how), one.bound.measurement)
    measured = Counter(length for length, _ in {(row.length, row.repeat) for row in rows if not row.of_all})
    return [n for n in one.lengths or (one.longest,) if measured[n] < (one.repeats or DEFAULT_REPEATS)]


def _refuse(
    run: Run, lm: LM, how: Method, one: Setup, seed: int, reasons: Mapping[int, str], status: str = "refused"
) -> None:
    """Record the refused lengths, each once: one row of that status in place of the rows of its examples."""
    known = {(row.key, row.reason) for row in latest(run.rows) if row.status == status} if reasons else set()
    for length, reason in reasons.items():
        place = {"length": length, "repeat": 0, "example": no_example(one.bound.task)}
        row = one.bound.row(lm, str(how), seed, **place, status=status, reason=reason)
        if (row.key, row.reason) not in known:
            run.append(row)
