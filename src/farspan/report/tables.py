"""Curves as text and as plain data."""

from collections.abc import Iterable, Mapping
from typing import Any

from farspan import stats
from farspan.record import Row
from farspan.report.picture import Series


def series(rows: Iterable[Row], models: Mapping[str, Mapping[str, Any]]) -> list[Series]:
    """The curves among the rows that have at least one good row, with their numbers. `models`: as run.json has them."""
    found = stats.curves(rows)
    models_found = {key[0] for key in found}
    several_models = len(models_found) > 1
    short_names = {model: model.rstrip("/").rpartition("/")[2] for model in models_found}
    if len(set(short_names.values())) < len(models_found):
        short_names = {model: model for model in models_found}
    several_methods = len({key[1] for key in found}) > 1
    several_texts = len({key[2] for key in found}) > 1
    result = []
    for (model, method, what), curve in found.items():
        if not curve.measured.any():
            continue
        parts = [short_names[model]] if several_models else []
        parts += [what] if several_texts or not several_models else []
        name = " ".join([*parts, *([method] if several_methods else [])])
        trained = models.get(model, {}).get("trained_length")
        result.append(Series(name, curve, stats.summarise(curve), trained))
    return result


def as_data(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Every curve with its points and its numbers, ready for JSON."""
    found = []
    for (model, method, what), curve in stats.curves(rows).items():
        entry: dict[str, Any] = {"model": model, "method": method, "task": "curve", "what": what}
        entry["failed"] = {str(length): status for length, status in curve.failures.items()}
        if curve.measured.any():
            good = curve.kept(curve.measured)
            entry |= {
                "lengths": good.lengths.tolist(),
                "copy": stats.measured_mean(good.copy).round(6).tolist(),
                "control": stats.measured_mean(good.control).round(6).tolist(),
                "summary": stats.summarise(curve).as_dict(),
            }
        found.append(entry)
    return found
