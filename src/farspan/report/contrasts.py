"""Which curves of a report are compared with each other, and the results of the paired tests."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from farspan.record import TEXTS
from farspan.report.curves import CurveMember, spoken
from farspan.report.export import p_value
from farspan.stats import (
    LEAST_PAIRS,
    LEVEL,
    Difference,
    MemoryLength,
    as_lengths,
    differences,
    differences_in_characters,
    holm,
)
from farspan.stats.text_robustness import Half, Robustness, robustness

NAMED = 3  # curves that a sentence names, at most
COMPARED: dict[str, tuple[str, Half]] = {  # settings of a curve: the text, and the half that it can change
    "prefix_text": ("irrelevant text", "control"),
    "target_text": ("target text", "copy"),
}


@dataclass(frozen=True)
class TextTest:
    """The test whether another text changes a model's numbers, within one run."""

    run: str
    model: str
    method: str
    which: str  # of the two texts
    result: Robustness


def group_differences(curves: Sequence[CurveMember]) -> list[Difference]:
    """Return the differences of each curve of a group from the first: over shared targets, else unpaired in characters
    of the text. Curves for which neither is possible are left out."""
    shown = [one for one in curves if len(one.curve.lengths) > 1 and len(one.measured.lengths)]
    found: list[Difference] = []
    for other in shown[1:]:
        first, names = shown[0], (shown[0].name, other.name)
        try:
            found += differences(first.curve, other.curve, names=names)
        except ValueError:  # fewer than two shared targets, or no common length
            scales = first.characters_per_token, other.characters_per_token
            if scales[0] is None or scales[1] is None or scales[0] == scales[1]:
                continue
            with suppress(ValueError):  # too few repeats for an interval
                found += differences_in_characters(first.curve, other.curve, scales[0], scales[1], names=names)
    return found


def longest_memory(curves: Sequence[CurveMember]) -> str:
    """Return in one sentence which curve of a group has the longest half-life, or which share it, which of the others
    are shorter beyond chance, and for which that could not be tested. If several half-lives exceed the lengths
    measured, spans are compared. Empty if unknown."""
    shown = [one for one in curves if one.summary is not None and len(one.measured.lengths) > 1]
    scales = {one.characters_per_token for one in shown}
    if not shown or (len(scales) > 1 and None in scales):
        return ""
    over = [one for one in shown if one.summary is not None and one.summary.half_life.censored]
    name = "span" if len(over) > 1 else "half_life"

    def tokens(one: CurveMember) -> MemoryLength:
        found: MemoryLength = getattr(one.summary, name)
        return found

    def scale(one: CurveMember) -> float:
        return one.characters_per_token or 1.0 if len(scales) > 1 else 1.0

    def size(one: CurveMember) -> float:
        return tokens(one).value * scale(one)

    best = max(shown, key=size)
    if tokens(best).value <= 0:
        least = max(tokens(one).below or 0.0 for one in shown)
        return f"No {spoken(name)} {f'reaches {least:,.0f}' if least else 'is above 0'} tokens."
    value = f"{tokens(best)} tokens"
    tied = [one.name for one in shown if one is not best and size(one) == size(best)]
    others = [one for one in shown if size(one) < size(best)]
    if len(shown) == 1:
        return f"The {spoken(name)} of {best.name} is {value}."
    last = best.measured.lengths[-1] * scale(best)
    if ended := [one for one in others if tokens(one).censored and one.measured.lengths[-1] * scale(one) < last]:
        at = min(one.measured.lengths[-1] for one in ended)
        which = f"{_named([one.name for one in ended])}, measured only up to {at:,} tokens"
        return f"Which has the longest {spoken(name)} is not known: it can be {which}."
    found = {one.curves[1]: one for one in group_differences([best, *others]) if one.name == name}
    corrected = holm([one.p for one in found.values()])
    p = {which: p for which, p in zip(found, corrected, strict=True) if p is not None}
    shorter = [one.name for one in others if p.get(one.name, 1.0) < LEVEL and found[one.name].value < 0]
    rest = [one.name for one in others if one.name in p and one.name not in shorter]
    untested = [one.name for one in others if one.name not in p]
    longest = f"{best.name} has the longest {spoken(name)}, {value}"
    if tied:
        longest = f"{best.name} and {_named(tied)} have the longest {spoken(name)}, {value} each"
    unknown = f"; that of {_named(untested)} could not be tested" if untested else ""
    if not shorter:
        equal = f", but no other is shorter beyond chance (p ≥ {LEVEL:g} after Holm)" if rest else ""
        return f"{longest}{equal}{unknown}."
    how = f"beyond chance (p < {LEVEL:g} after Holm)"
    if rest or untested or tied:
        other = f", that of {_named(rest)} is not" if rest else ""
        return f"{longest}; that of {_named(shorter)} is shorter {how}{other}{unknown}."
    return f"{best.name} remembers longest: its {spoken(name)} is {value}; that of {_named(shorter)} is shorter {how}."


def _named(names: Sequence[str]) -> str:
    return f"{len(names)} others" if len(names) > NAMED else ", ".join(names)


def text_tests(curves: Sequence[CurveMember]) -> list[TextTest]:
    """Test whether the text changes the curve, for each run, model and method measured with several irrelevant or
    target texts and otherwise equal settings. Texts without a common length are left out."""
    found = []
    for which, (name, half) in COMPARED.items():
        alike: dict[str, list[CurveMember]] = {}
        for one in curves:
            row = one.rows[0]
            rest = sorted((key, value) for key, value in row.settings.items() if key not in (which, TEXTS[which]))
            alike.setdefault(repr((one.source.name, one.model, one.method, row.version, rest)), []).append(one)
        for members in alike.values():
            by_text = {str(one.rows[0].settings.get(which) or "the protocol's own"): one.curve for one in members}
            if len(by_text) > 1:
                with suppress(ValueError):  # no length was measured with all of them
                    about = members[0].source.name, members[0].model, members[0].method
                    found.append(TextTest(*about, name, robustness(by_text, half)))
    return found


def robustness_lines(result: Robustness) -> list[str]:
    """Return the verdict of a test of several texts as a sentence, then its numbers in a few indented lines."""
    accuracy = f"{result.half} accuracy"
    texts = f"{', '.join(result.sources[:-1])} and {result.sources[-1]}"
    sentences = {
        "equivalent": f"{accuracy} is the same with {texts}: differences are within ±{100 * result.margin:g} points",
        "different": f"{accuracy} differs between {texts}",
        "undecided": f"it is undecided whether {accuracy} differs between {texts}; more repeats can decide it",
    }
    lines = [sentences[result.verdict]]
    for verdict in ("equivalent", "different", "undecided"):
        some = [one for one in result.lengths if one.verdict == verdict and not one.reason]
        if not some:
            continue
        where = ", ".join(f"{one.length:,}" for one in some)
        worst = max(some, key=lambda one: abs(one.difference or 0.0))
        assert worst.sources is not None
        assert worst.difference is not None
        p = p_value(worst.paired_holm if worst.paired is not None else worst.kruskal_holm)
        lines.append(
            f"  {verdict} at {where} tokens; largest difference at {worst.length:,}: {worst.sources[1]} minus "
            f"{worst.sources[0]} is {100 * worst.difference:+.1f} points"
            f"{f', 90 % interval {worst.interval}' if worst.interval else ''}, {_p(p)} ({result.test}, Holm-corrected)"
        )
    papers = [
        f"{label} {_p(p_value(min(known)))}"
        for label, name in (("ANOVA", "anova_holm"), ("Kruskal-Wallis", "kruskal_holm"))
        if (known := [p for one in result.lengths if (p := getattr(one, name)) is not None])
    ]
    if papers:
        lines.append(f"  unpaired tests of the paper, smallest Holm-corrected p of all lengths: {', '.join(papers)}")
    return lines + [f"  {note}" for note in result.notes]


def difference_line(one: Difference) -> str:
    """Return a difference between two curves as a line."""
    first, second = as_lengths(one.curves, one.values, one.censored, one.below)
    how = f"{one.pairs} shared targets" if one.pairs else "unpaired"
    value = " ".join(part for part in (one.known, one.interval, one.unit if one.is_known else "") if part)
    name = one.name.replace("_", "-")
    return f"{name}: {one.curves[0]} {first}, {one.curves[1]} {second}: {value}, {_p(p_of_difference(one))}, {how}"


def p_of_difference(one: Difference) -> str:
    """Write the p of a difference; the reason where it is unknown."""
    if one.p is not None:
        return p_value(one.p)
    few = one.freedom + 1 < LEAST_PAIRS if one.pairs else not (one.censored or any(one.below))
    return f"unknown ({f'fewer than {LEAST_PAIRS} texts' if few else 'outside the lengths measured'})"


def _p(text: str) -> str:
    return f"p {'= ' if text[0].isdigit() else ''}{text}"
