"""What a model was asked, in its own tokens, and which of them it knew: from examples.jsonl of a run.

{"model", "what", "length", "repeat", "parts": [["separator", [tokens]], ["read", [tokens]], ["separator", [tokens]],
 ["asked", [tokens]]], "scored": k}          one JSON object a line; tokens as text; the last k of "asked" are scored
"""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from farspan import stats
from farspan.record import Row, read_examples
from farspan.report.tables import Source


@dataclass(frozen=True)
class Piece:
    """Some text that is shown in one way."""

    kind: str  # separator, read, fed; and of the scored: remembered, guessed, missed, or hit where no control is known
    text: str


@dataclass(frozen=True)
class Example:
    source: Source
    model: str
    method: str | None  # whose hits these are; None: no row says
    what: str
    length: int
    repeat: int
    num_tokens: int
    num_scored: int
    num_hits: int | None  # None: no row says
    pieces: list[Piece]


def examples(source: Source) -> list[Example]:
    """The first example of each model and each kind of question in a run; none where the run keeps none.

    Raises:
        ValueError: a line that is not an example.
    """
    found: dict[tuple[str, str], Example] = {}
    for values in read_examples(source.folder):
        if (values["model"], values["what"]) not in found:
            found[values["model"], values["what"]] = _example(source, values)
    return list(found.values())


def _example(source: Source, values: dict[str, Any]) -> Example:
    parts, scored = values["parts"], values["scored"]
    model, what, length, repeat = (values[name] for name in ("model", "what", "length", "repeat"))
    asked = parts[-1][1]
    pieces = [Piece("read" if kind == "asked" else kind, "".join(tokens)) for kind, tokens in parts[:-1]]
    pieces.append(Piece("fed", "".join(asked[:-scored])))
    rows = [
        row
        for row in source.rows
        if row.task == "curve" and row.model == model and (row.length, row.depth, row.status) == (length, 0.0, "ok")
        and stats.label(row.settings) == what and row.scores["scored"] == scored
    ]  # fmt: skip
    rows = [row for row in rows if row.method == rows[0].method]
    copy = _hits(rows, "copy", [row.repeat == repeat for row in rows])
    control = _hits(rows, "control", [row.scores["control_repeat"] == repeat for row in rows])
    if copy is None:
        pieces.append(Piece("fed", "".join(asked[-scored:])))
    else:
        kinds = [_kind(i, copy, control) for i in range(scored)]
        for kind, same in groupby(zip(kinds, asked[-scored:], strict=True), key=lambda pair: pair[0]):
            pieces.append(Piece(kind, "".join(token for _, token in same)))
    return Example(
        source=source,
        model=model,
        method=None if copy is None else rows[0].method,
        what=what,
        length=length,
        repeat=repeat,
        num_tokens=sum(len(tokens) for _, tokens in parts),
        num_scored=scored,
        num_hits=None if copy is None else int(copy.sum()),
        pieces=[piece for piece in pieces if piece.text],
    )


def _hits(rows: list[Row], name: str, of_target: list[bool]) -> np.ndarray | None:
    for row, its in zip(rows, of_target, strict=True):
        if its and f"{name}_hits" in row.scores:
            return stats.unpacked(row.scores[f"{name}_hits"], row.scores["scored"])
    return None


def _kind(index: int, copy: np.ndarray, control: np.ndarray | None) -> str:
    if not copy[index]:
        return "missed"
    if control is None:
        return "hit"
    return "guessed" if control[index] else "remembered"
