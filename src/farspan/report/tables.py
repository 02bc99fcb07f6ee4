"""Curves with their numbers, for pictures, tables and JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farspan import stats
from farspan.record import Row


@dataclass(frozen=True)
class Series:
    """One curve, what it is of, and its numbers."""

    name: str  # tells it from the others it stands beside
    model: str
    method: str
    what: str  # protocol and texts
    curve: stats.Curve
    summary: stats.Summary | None  # None where every row failed
    trained_length: int | None = None  # tokens of the whole context
    map: stats.Map | None = None  # where several depths were asked for
    characters_per_token: float | None = None  # of the target text under the model's tokenizer


def series(rows: Iterable[Row], models: Mapping[str, Mapping[str, Any]]) -> list[Series]:
    """The curves among the rows, with their numbers. `models`: as run.json has them."""
    groups = {key: group for key, group in stats.by_curve(rows).items() if any(row.depth == 0 for row in group)}
    several = [len({key[part] for key in groups}) > 1 for part in range(3)]
    short_names = {key[0]: key[0].rstrip("/").rpartition("/")[2] for key in groups}
    if len(set(short_names.values())) < len(short_names):
        short_names = {name: name for name in short_names}
    result = []
    for (model, method, what), group in groups.items():
        parts = [short_names[model]] if several[0] else []
        parts += [what] if several[2] or not several[0] else []
        parts += [method] if several[1] else []
        curve = stats.curve(group)
        about = models.get(model, {})
        result.append(
            Series(
                " ".join(parts),
                model,
                method,
                what,
                curve,
                stats.summarise(curve) if curve.measured.any() else None,
                about.get("trained_length"),
                stats.memory_map(group) if any(row.depth for row in group) else None,
                about.get("characters_per_token", {}).get(group[0].settings.get("target_hash")),
            )
        )
    return result


def as_data(curves: Sequence[Series]) -> list[dict[str, Any]]:
    """Every curve with its points and its numbers, ready for JSON."""
    found = []
    for one in curves:
        entry: dict[str, Any] = {"model": one.model, "method": one.method, "task": "curve", "what": one.what}
        entry["failed"] = {str(length): status for length, status in one.curve.failures.items()}
        if one.summary is not None:
            good = one.curve.kept(one.curve.measured)
            entry |= {
                "lengths": good.lengths.tolist(),
                "copy": stats.measured_mean(good.copy).round(6).tolist(),
                "control": stats.measured_mean(good.control).round(6).tolist(),
                "summary": one.summary.as_dict(),
            }
        found.append(entry)
    return found
