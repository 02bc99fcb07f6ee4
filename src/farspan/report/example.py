"""The first example of each task in readable form, and which tokens were predicted, from a run's examples.jsonl.

{"model", "what", "length", "repeat", "parts": [["separator", [tokens]], ["read", [tokens]], ["separator", [tokens]],
 ["asked", [tokens]]], "scored": k, "task", "settings", "example"}     one JSON object per line

Tokens are text; the last k of "asked" are scored. `task`, `settings` and `example` are those of the rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from farspan import stats
from farspan.record import ABSENT, Row, read_examples
from farspan.report.runs import Source
from farspan.schema.row import measurement_of

HITS = ("copy_hits", "hits")  # scores with a bit for each scored token


@dataclass(frozen=True)
class ShownText:
    """Some text that is shown in one way."""

    kind: str  # separator, read, fed; if scored: remembered, guessed, missed, or hit if no control is known
    text: str


@dataclass(frozen=True)
class ShownExample:
    source: Source
    model: str
    method: str | None  # whose result is shown; None: there is no row
    what: str
    length: int
    num_tokens: int
    num_scored: int
    num_hits: int | None  # None: the row does not record them
    answer: str  # of the model; "": none is recorded
    pieces: list[ShownText]


def examples(source: Source) -> list[ShownExample]:
    """Return the first example of each model and task in a run; none if the run has none.

    Raises:
        ValueError: a line that is not an example.
    """
    found: dict[tuple[str, str], ShownExample] = {}
    for values in read_examples(source.folder):
        if (values["model"], values["what"]) not in found:
            found[values["model"], values["what"]] = _example(source, values)
    return list(found.values())


def _example(source: Source, values: Mapping[str, Any]) -> ShownExample:
    parts, scored = values["parts"], values["scored"]
    asked = parts[-1][1]
    rows = _rows(source, values)
    mine = [row for row in rows if row.repeat == values["repeat"] and values.get("example") in (None, row.example)]
    pieces = [ShownText("read" if kind == "asked" else kind, "".join(tokens)) for kind, tokens in parts[:-1]]
    pieces.append(ShownText("fed", "".join(asked[:-scored])))
    hits = next((found for name in HITS if (found := _hits(mine, name, scored)) is not None), None)
    # a target's control is in the row of the text that was read instead
    other = [row for row in rows if row.scores.get("control_repeat") == values["repeat"]]
    pieces += _scored(asked[-scored:], hits, _hits(other, "control_hits", scored))
    answer = mine[0].scores.get("prediction") if mine else None
    return ShownExample(
        source=source,
        model=values["model"],
        method=mine[0].method if mine else None,
        what=values["what"],
        length=values["length"],
        num_tokens=sum(len(tokens) for _, tokens in parts),
        num_scored=scored,
        num_hits=None if hits is None else int(hits.sum()),
        answer=answer if isinstance(answer, str) else "",
        pieces=[piece for piece in pieces if piece.text],
    )


def _rows(source: Source, values: Mapping[str, Any]) -> list[Row]:
    """Return the rows of an example's model, task and length at its depth, the first that is measured, under the first
    method that has any."""
    measurement = measurement_of(values["task"], values["settings"])
    rows = [row for row in source.rows if (row.model, row.length) == (values["model"], values["length"])]
    rows = [row for row in rows if row.measurement == measurement and row.status not in ("refused", "budget")]
    rows = [row for row in rows if row.depth == rows[0].depth and row.status in ("ok", *ABSENT)]
    return [row for row in rows if row.method == rows[0].method]


def _hits(rows: Sequence[Row], name: str, scored: int) -> np.ndarray | None:
    for row in rows:
        hits = row.scores.get(name)
        if isinstance(hits, str) and row.scores.get("scored") == scored:
            return stats.unpacked(hits, scored)
    return None


def _scored(tokens: Sequence[str], hits: np.ndarray | None, control: np.ndarray | None) -> Iterator[ShownText]:
    """Yield the scored tokens; neighbours of the same kind are joined."""
    kinds = ["fed" if hits is None else _kind(i, hits, control) for i in range(len(tokens))]
    for kind, same in groupby(zip(kinds, tokens, strict=True), key=lambda pair: pair[0]):
        yield ShownText(kind, "".join(token for _, token in same))


def _kind(index: int, hits: np.ndarray, control: np.ndarray | None) -> str:
    if not hits[index]:
        return "missed"
    if control is None:
        return "hit"
    return "guessed" if control[index] else "remembered"
