"""The table of what changed between two runs, for a terminal."""

from math import exp

from farspan.record import by_key
from farspan.report.cells import UNCORRECTED, in_nats
from farspan.report.changes import Change, Comparison
from farspan.report.export import number, three_digits
from farspan.stats import as_lengths, known_difference, signed_tokens
from farspan.stats.intervals import has_no_width
from farspan.terminal import Terminal

LEGEND = (
    "equal: the 90 % interval of the change (not shown) is within the tolerance (two one-sided tests, p < 0.05); "
    "worse, better: p < 0.05, two-sided, after Holm; for a cost, the 95 % interval is beyond the tolerance; "
    f"undecided: p after Holm; the {UNCORRECTED}"
)


def print_changes(found: Comparison, console: Terminal) -> None:
    """Print a table of changes for each method, what the verdicts mean, why some are undecided, and the remarks."""
    tasks = len({one.task for one in found.changes if one.kind == "score"}) > 1
    for method in dict.fromkeys(one.method for one in found.changes):
        lines = [_line(one, tasks) for one in found.changes if one.method == method]
        title = f"{method}: changes from the baseline, on the same texts"
        console.print_table(title, ["", "baseline", "model", "change [95 %]", "within", "verdict"], lines, num_names=1)
    if found.changes:
        console.print_line(LEGEND, style="dim")
    reasons = by_key((one.reason or _without_spread(one), one) for one in found.changes if one.verdict == "undecided")
    for reason, some in reasons.items():
        names = (f"{one.method} {one.name}" + ("" if one.length is None else f" {one.length:,}") for one in some)
        if reason:
            console.print_line(f"{', '.join(names)}: {reason}", style="dim")
    for line in (*found.lacking, *found.remarks):
        console.print_line(line, style="dim")


def _without_spread(one: Change) -> str:
    """Return why a change that is the same for every text, but for rounding, is undecided; "" of others."""
    low, high = one.difference.low, one.difference.high
    if low is None or high is None or not has_no_width(one.difference.value, low, high):
        return ""
    return (
        f"the change is the same for all {one.pairs} texts. `equal` then needs 5 texts, `worse` or `better` 6: measure "
        "the baseline with more --repeats"
    )


def _line(one: Change, tasks: bool) -> list[str]:
    """Return the line of a change: numbers, the difference with its interval and its margin, in tokens, points of a
    score (pt), nats or per cent.

    Args:
        tasks: name the task of a score.
    """

    def write(value: float | None, unbounded: str = "") -> str:
        if value is None:
            return unbounded
        if one.kind == "memory":
            return signed_tokens(value)
        if in_nats(one.name):
            return f"{value:+.3g}" if value else "0"
        share = 100 * (value if one.kind == "score" else exp(value) - 1)
        if abs(share) >= 10:
            return f"{share:+.0f}"
        return f"{share:+.1f}" if round(share, 1) else "0"

    name = one.name if one.length is None else f"{one.name} {one.length:,}"
    name += f", {one.task.partition(':')[0]}" if tasks and one.kind == "score" else ""
    values = one.baseline, one.now
    shown = [three_digits(value) if one.kind in ("perplexity", "cost") else number(value) for value in values]
    difference, change = one.difference, write(one.difference.value)
    if one.kind == "memory":
        shown = [str(length) for length in as_lengths(("baseline", "model"), values, one.censored, one.below)]
        is_longer = "baseline" in one.censored, "model" in one.censored
        change = known_difference(difference.value, is_longer, one.below)
    has_interval = (difference.low, difference.high) != (None, None) and difference.low != difference.high
    ends = f" [{write(difference.low, '-∞')}, {write(difference.high, '∞')}]" if has_interval else ""
    unit = " nats" if in_nats(one.name) else {"memory": "", "score": " pt"}.get(one.kind, " %")
    margin = write(one.margin).removeprefix("+").removesuffix(".0")
    verdict: str = one.verdict
    if verdict == "undecided" and one.p_holm is not None:
        verdict += f", p = {one.p_holm:.3f}"
    return [name, *shown, f"{change}{ends}{unit}", f"±{margin}{unit}", verdict]
