"""The lines of a report about models that have the same weights."""

from collections.abc import Iterable, Sequence
from typing import Any

from farspan.record import changed_fields
from farspan.report.runs import Source


def same_weights(sources: Iterable[Source]) -> list[str]:
    """Return a line for each set of models that have the same weights. Servers do not report theirs."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, about in (item for source in sources for item in source.header["models"].items()):
        if about.get("fingerprint") and about.get("architecture"):
            found.setdefault(about["fingerprint"], {}).setdefault(name, about.get("config") or {})
    return [
        f"{', '.join(names)} have the same weights (fingerprint {mark}): under the same method they can differ only by "
        f"{_by_configs(list(names.values()))}how they were read"
        for mark, names in found.items()
        if len(names) > 1
    ]


def _by_configs(configs: Sequence[dict[str, Any]]) -> str:
    """Return the words of `same_weights` about the configs, where these differ from the first or are not recorded."""
    if not all(configs):
        return "their configs and by "
    different = dict.fromkeys(filter(None, (changed_fields(configs[0], one) for one in configs[1:])))
    return f"their configs ({' | '.join(different)}) and by " if different else ""
