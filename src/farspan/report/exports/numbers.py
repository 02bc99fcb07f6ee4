"""The numbers of a run, one by one: memory lengths, and the quality of each task at each length."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farspan.report.cells import cells_of, in_nats, in_seconds, least_share
from farspan.report.curve_section import COLUMNS
from farspan.report.curves import HEADLINE, CurveMember, curves_of
from farspan.report.kinds import MEMBERS
from farspan.report.runs import Group, Member, Source, grouped
from farspan.stats import MemoryLength
from farspan.text.hub import HUB_ID
from farspan.text.names import title_of


@dataclass(frozen=True)
class Number:
    """One number of a model under a method, with its 95 % interval."""

    member: Member
    group: Group
    name: str  # of the number: half_life, perplexity
    meaning: str
    value: float
    low: float | None  # None: no interval
    high: float | None
    unit: str  # tokens, share, perplexity, nats, seconds; score: of a task of the user's own, whose unit is not known
    higher_is_better: bool
    n: int  # repeats
    length: int | None = None  # in the group's unit; None: of the whole curve
    memory: MemoryLength | None = None  # what the number is, if it is a memory length
    details: Mapping[str, float] = field(default_factory=dict)  # means of other scores at this length

    @property
    def id(self) -> str:
        """Name, and length where there is one: perplexity_1024."""
        return self.name if self.length is None else f"{self.name}_{self.length}"

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """The least and the largest possible value; None: there is none."""
        if self.unit == "share":
            return least_share(self.group.entry["quality"]), 1.0
        if self.name == "span":  # below 0 where a copy is predicted worse than it is guessed
            return None, None
        return {"tokens": 0.0, "seconds": 0.0, "perplexity": 1.0}.get(self.unit), None


def numbers_of(source: Source) -> list[Number]:
    """Return all numbers of a run that have a result and a better direction, in the order of its tasks."""
    return [one for group in grouped([source], MEMBERS) for one in _numbers(group)]


def _numbers(group: Group) -> Iterator[Number]:
    quality = group.entry["quality"]
    if quality["higher_is_better"] is None:
        return
    cells = cells_of(group)
    unit = _unit(quality, [cell.value for cell in cells if cell.value is not None])
    for member in group.members:
        if isinstance(member, CurveMember) and curves_of([member]) and not member.is_recall:
            yield from _memory(member, group)
        for cell in cells:
            if cell.whose == member.whose and cell.value is not None:
                about = slug(quality["name"]), f"{quality['name']}, mean over examples", cell.value
                direction = bool(quality["higher_is_better"])
                given = (*about, cell.low, cell.high, unit, direction, cell.n, cell.length)
                yield Number(member, group, *given, details=cell.details)


def _unit(quality: Mapping[str, Any], values: Sequence[float]) -> str:
    """Return the unit of a quality, as of `Number`. A share, or a difference of two, is known by its values."""
    if quality["exp"] or in_nats(quality["name"]):
        return "perplexity" if quality["exp"] else "nats"
    if in_seconds(quality["name"]):
        return "seconds"
    return "share" if all(least_share(quality) <= value <= 1 for value in values) else "score"


def _memory(member: CurveMember, group: Group) -> Iterator[Number]:
    if member.summary is None:
        return
    for name in COLUMNS:
        one = getattr(member.summary, name)
        about = name, f"forgetting curve: {HEADLINE[name]}", one.value, one.low, one.high
        yield Number(member, group, *about, "tokens", True, member.summary.repeats, memory=one)


def slug(name: str) -> str:
    """Return a name of lower-case letters, digits and underscores."""
    return "_".join("".join(sign if sign.isalnum() else " " for sign in name.lower()).split())


def is_hub_id(name: str) -> bool:
    """Return whether a name has the form OWNER/NAME, and is no file or folder here."""
    found = HUB_ID.fullmatch(name)
    return found is not None and found["id"] == name and name[0] != "." and not Path(name).exists()


def task_settings(number: Number) -> dict[str, Any]:
    """Return the settings of the rows that a number is of."""
    return dict(number.member.rows[0].settings)


def text_of(number: Number) -> str:
    """Return the text or data that a number was measured on, as it was named; the task where it names none."""
    settings = task_settings(number)
    named = settings.get("target_text") or settings.get("text") or settings.get("data") or number.group.spec
    return title_of(str(named))
