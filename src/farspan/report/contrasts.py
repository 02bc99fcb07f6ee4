"""Which curves of a report are compared with each other, and the results of the paired tests."""

from collections.abc import Sequence
from dataclasses import dataclass

from farspan.paired import Difference, Half, Robustness, differences, differences_in_characters, robustness
from farspan.report.curves import Measured

TEXTS: dict[str, tuple[str, Half]] = {
    "prefix_text": ("irrelevant text", "control"),
    "target_text": ("target text", "copy"),
}


@dataclass(frozen=True)
class TextTest:
    """Whether another text gives a model other numbers, within one run."""

    run: str
    model: str
    method: str
    which: str  # of the two texts
    result: Robustness


def group_differences(curves: Sequence[Measured]) -> list[Difference]:
    """Return the differences of each curve of a group from its first: over the targets they share, else in characters
    of the text, unpaired; pairs with neither are left out."""
    members = [one.series for one in curves if one.series.summary is not None and len(one.series.curve.lengths) > 1]
    found: list[Difference] = []
    for other in members[1:]:
        first, names = members[0], (members[0].name, other.name)
        try:
            found += differences(first.curve, other.curve, names=names)
        except ValueError:  # fewer than two shared targets
            scales = first.characters_per_token, other.characters_per_token
            if scales[0] is None or scales[1] is None or first.characters_per_token == other.characters_per_token:
                continue
            try:
                found += differences_in_characters(first.curve, other.curve, scales[0], scales[1], names=names)
            except ValueError:  # too few repeats for an interval
                continue
    return found


def text_tests(members: Sequence[Measured]) -> list[TextTest]:
    """Return, for each run, model and method measured with several irrelevant texts, or several target texts, all else
    equal, whether these change the curve. Texts without a common length are left out."""
    found = []
    for which, (name, half) in TEXTS.items():
        sets: dict[str, list[Measured]] = {}
        for one in members:
            settings = one.member.rows[0].settings
            rest = {
                key: value for key, value in settings.items() if key not in (which, f"{which.partition('_')[0]}_hash")
            }
            key = str(
                (
                    one.member.source.name,
                    one.series.model,
                    one.series.method,
                    one.member.rows[0].version,
                    sorted(rest.items()),
                )
            )
            sets.setdefault(key, []).append(one)
        for alike in sets.values():
            curves = {
                str(one.member.rows[0].settings.get(which) or "the protocol's own"): one.series.curve for one in alike
            }
            if len(curves) < 2:
                continue
            try:
                result = robustness(curves, half)
            except ValueError:  # no length was measured with all of them
                continue
            about = alike[0]
            found.append(TextTest(about.member.source.name, about.series.model, about.series.method, name, result))
    return found
