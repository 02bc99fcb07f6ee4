"""Published forgetting curves: the result files of the authors' script as rows."""

import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from farspan.files import read_json
from farspan.record import Row
from farspan.schema import Checked, Positive, check
from farspan.schema.row import Share
from farspan.tasks.curve import BoundCurve


class PublishedLength(Checked):
    """The accuracies at one length in a result file of the authors' script."""

    length: Positive
    copy_accs: Annotated[list[Share], Field(min_length=1)]
    lm_accs: list[Share]


PUBLISHED = TypeAdapter(Annotated[list[PublishedLength], Field(min_length=1)])


def read_authors_file(path: str | Path, model: str) -> list[Row]:
    """Return the rows of a result file of the authors' script: a list of {"length", "copy_accs", "lm_accs"}.

    Raises:
        ValueError: not such a file.
    """
    path = Path(path)
    what = (
        "is not a result file of the forgetting curve's authors, a JSON list of objects with length, copy_accs, lm_accs"
    )
    try:
        points = read_json(path)
        _check(points)
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist: expected a result file of the forgetting curve's authors") from error
    except ValueError as error:
        raise ValueError(f"{path} {what}: {error}. Correct the file") from error
    return [
        Row(
            model=model,
            method="full",
            task=BoundCurve.task,
            version=BoundCurve.version,
            settings={"protocol": "paper", "compat": True, "target_text": "PG-19 test", "imported": path.name},
            length=point["length"],
            repeat=repeat,
            seed=0,
            example=f"{path.name}:{point['length']}:{repeat}",
            scores={
                "copy": float(copy),
                "control": float(control),
                "control_repeat": repeat,
                "scored": math.ceil(point["length"] / 2),
                "context": 2 * point["length"] + 2,
            },
        )
        for point in points
        for repeat, (copy, control) in enumerate(zip(point["copy_accs"], point["lm_accs"], strict=True))
    ]


def _check(points: Any) -> None:
    """Raise ValueError, with field and value, unless these are the entries of a result file of the authors' script."""
    check(PUBLISHED, points)
    lengths = [point["length"] for point in points]
    for number, point in enumerate(points):
        copies, controls = len(point["copy_accs"]), len(point["lm_accs"])
        if copies != controls:
            raise ValueError(f"{number}.lm_accs: got {controls} accuracies, expected {copies}, as many as copy_accs")
        if lengths.count(point["length"]) > 1:
            raise ValueError(f"{number}.length: got {point['length']:,} twice, expected each length once")
