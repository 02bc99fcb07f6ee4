"""Pictures and plain data of curves, from rows alone."""

import json
import math
import re
import warnings
from dataclasses import replace
from io import StringIO
from itertools import combinations, product
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.collections import FillBetweenPolyCollection
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure as Canvas
from scipy.stats import ttest_1samp

from farspan.record import Row
from farspan.report import training
from farspan.report.cells import Cell, cells, interval_of
from farspan.report.cells import failures as reasons
from farspan.report.curve_figures import curve_figure
from farspan.report.curve_section import CurveReport, draw_curves, print_curves
from farspan.report.curves import CurveMember, as_data, remarks, series, verdict
from farspan.report.example import examples
from farspan.report.export import numbers, ranged
from farspan.report.figure import MARKED, Failed, Figure, Heat, Line, Rule, Style, colour, pareto_front, shape
from farspan.report.figures import cost_figure, group_figure
from farspan.report.interactive import as_plotly
from farspan.report.kinds import MEMBERS
from farspan.report.legends import add_legend_inside
from farspan.report.picture import SIZE, draw_grid, draw_on, draw_with_legend
from farspan.report.runs import Source, differences_of, grouped, groups_of_rows
from farspan.report.tables import cost_tables, costs_of
from farspan.stats import curve, summarise
from farspan.terminal import Terminal

pytestmark = pytest.mark.usefixtures("drawn")
MODELS = {"org/small": {"trained_length": 512}}
CURVE = {100: 1.0, 200: 1.0, 300: 0.6, 400: 0.2}  # copy accuracy; control 0.2: half-life 300


def row(length: int, repeat: int, copy: float | None, model: str = "org/small", text: str = "books") -> Row:
    """`copy` None: a row that ran out of memory."""
    settings = {"protocol": "nested", "compat": False, "target_text": text, "prefix_text": None}
    values: dict[str, Any] = {"status": "oom"}
    if copy is not None:
        scores = {"copy": copy + 0.01 * repeat, "control": 0.2, "control_repeat": repeat}
        values = {"scores": scores | {"scored": math.ceil(length / 2), "context": 2 * length + 2}}
    return Row(model, "full", "curve", 1, settings, length, repeat, 0, f"{text} {length} {repeat}", **values)


def rows(copy: dict[int, float] = CURVE, repeats: int = 1, **changes: str) -> list[Row]:
    return [row(length, r, value, **changes) for r in range(repeats) for length, value in copy.items()]


def failures(*lengths: int, **changes: str) -> list[Row]:
    return [row(length, repeat, None, **changes) for length in lengths for repeat in range(2)]


def svg(measured: list[Row], folder: Path, title: str = "a title") -> str:
    return draw_curves(series(measured, MODELS), folder, title)[1].read_text()


def test_a_curve_becomes_a_png_with_something_on_it(tmp_path: Path) -> None:
    path, _ = draw_curves(series(rows(), MODELS), tmp_path, "a title")
    assert path.name == "curve.png"
    assert matplotlib.image.imread(path).std() > 0.05


def test_a_curve_becomes_an_svg_of_the_name_asked_for(tmp_path: Path) -> None:
    _, path = draw_curves(series(rows(), MODELS), tmp_path, "a title", name="other")
    assert path.name == "other.svg"
    assert path.read_text().rstrip().endswith("</svg>")


def test_a_picture_of_many_curves_has_space_for_them(tmp_path: Path) -> None:
    many = [one for i in range(60) for one in rows(model=f"org/model-{i}")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "axes sizes collapsed to zero"
        drawn = svg(many, tmp_path, ", ".join(f"model-{i}" for i in range(60)))
    assert re.search(r"and \d+ more", drawn)
    assert "model-59" not in drawn


def test_the_picture_of_one_curve_names_what_it_shows(tmp_path: Path) -> None:
    drawn = svg(rows(), tmp_path)
    for words in ("a title", "copy", "control", "fine memory 202", "coarse memory 398", "amnesia", "half-life 300"):
        assert f"<!-- {words} -->" in drawn


def test_a_picture_names_how_many_texts_it_is_of(tmp_path: Path) -> None:
    assert "<!-- n = 1 text -->" in svg(rows(), tmp_path)
    assert "<!-- n = 3 texts, 95 % intervals -->" in svg(rows(repeats=3), tmp_path)
    assert "<!-- n = 2 to 3 texts, 95 % intervals -->" in svg([*rows(repeats=2), row(100, 2, 1.0)], tmp_path)


def test_the_picture_shades_no_amnesia_where_coarse_memory_goes_on(tmp_path: Path) -> None:
    drawn = svg(rows({100: 1.0, 200: 1.0, 300: 0.6, 400: 0.5}), tmp_path)
    assert "<!-- coarse memory &gt;400 -->" in drawn
    assert "amnesia" not in drawn


@pytest.mark.parametrize("copy", [1.0, 0.2], ids=["all fine", "amnesia"])
def test_the_picture_shades_no_lengths_without_a_result(copy: float) -> None:
    (one,) = series(rows({100: 1.0, 200: copy}) + failures(400), MODELS)
    assert curve_figure([one]).areas[-1].end == 200


def x_limits(one: Figure) -> tuple[float, float]:
    """The range of the x axis of a figure, as it is drawn."""
    axes = Canvas().subplots()
    draw_on(axes, one)
    return axes.get_xlim()


@pytest.mark.parametrize("failed", [[], failures(500)], ids=["all measured", "one length failed"])
def test_the_length_axis_begins_at_0_whether_or_not_a_length_failed(failed: list[Row]) -> None:
    end = 500 if failed else 400
    assert x_limits(curve_figure(series(rows() + failed, MODELS))) == (0, pytest.approx(1.015 * end))


def test_a_value_at_0_is_not_drawn_on_the_edge_of_the_axis() -> None:
    start, _ = x_limits(Figure("steps", "step", "loss", [Line("one", [0, 10], [2.0, 1.0], 0)]))
    assert start < 0


def test_a_figure_without_values_is_drawn() -> None:
    assert x_limits(Figure("nothing", "length", "accuracy", [], span=(0, 1))) == (0, 1)


def printed(curves: list[CurveMember], **options: bool) -> str:
    console = Terminal(file=StringIO(), width=80)
    print_curves(curves, console, **options)
    return console.file.getvalue()


def test_the_headline_is_half_life_reach_and_span_and_the_papers_lengths_are_a_table_of_their_own() -> None:
    curves = series(rows(repeats=3), MODELS)
    shown = printed(curves)
    assert re.findall(r"^  (half-life|reach|span|fine|coarse|paper)", shown, re.M) == ["half-life", "reach", "span"]
    assert "coarse" not in shown
    added = printed(curves, paper=True).removeprefix(shown)
    assert re.findall(r"^  (half-life|reach|span|fine|coarse|paper \w+)", added, re.M) == [
        "fine", "coarse", "paper fine", "paper coarse",
    ]  # fmt: skip
    assert not any("coarse" in line for line in remarks(curves[0], ("half_life", "reach", "span")))


def test_copy_and_control_are_printed_by_length() -> None:
    measured = rows(repeats=3) + failures(500) + rows({100: 0.9, 300: 0.5}, repeats=3, model="org/other")
    lines = [line.split() for line in printed(series(measured, MODELS)).splitlines()]
    assert ["length", "small", "copy", "small", "control", "other", "copy", "other", "control"] in lines
    assert ["100", "1.010", "0.200", "0.910", "0.200"] in lines
    assert ["200", "1.010", "0.200"] in lines
    assert ["500", "oom", "oom"] in lines


@pytest.mark.parametrize(
    ("copies", "said"),
    [
        ({100: 0.2, 200: 0.2}, "recalls less than a twentieth .* at every length measured$"),
        ({100: 1.0, 200: 1.0}, "recalls at least half .* up to 200 tokens, the longest length measured$"),
        ({100: 0.5, 200: 0.2}, "recalls less than half .* at every length measured, and at least a twentieth .* up to"),
        ({100: 1.0, 200: 0.4}, "at least half .* up to 1.. tokens, and at least a twentieth .* up to 200, the longest"),
        (CURVE, r"up to 3.. tokens, and .* up to 3.. \(a text and its copy fill .* of 512 tokens at 255\)$"),
    ],
)
def test_a_verdict_is_one_sentence(copies: dict[int, float], said: str) -> None:
    (one,) = series(rows(copies, repeats=3), MODELS if copies is CURVE else {})
    assert re.search(said, verdict(one)), verdict(one)


@pytest.mark.parametrize(
    ("length", "trained", "said"),
    [
        (300, 512, "small: a text and its copy exceed the trained length of 512 tokens at 300\n"),
        (255, 512, ""),  # they fill it
        (300, None, ""),
    ],
)
def test_recall_beyond_the_trained_length_is_named_as_curves_name_it(
    length: int, trained: int | None, said: str, tmp_path: Path
) -> None:
    near = [replace(one, depth=0.5, scores=one.scores | {"distance": 9}) for one in rows({length: 0.9})]
    models = {"org/small": {"trained_length": trained}}
    shown = CurveReport(groups_of_rows([*rows({length: 0.9}), *near], "curve", CurveMember, models), tmp_path)
    console = Terminal(file=StringIO(), width=80)
    shown.print(console)
    assert console.file.getvalue().endswith(said)
    assert ("trained" in console.file.getvalue()) is bool(said)
    (one,) = series(rows({length: 0.9, 400: 0.8}), models)
    assert ("exceed the trained length of 512 tokens at 300)" in verdict(one)) is bool(said)
    assert shown.section(shown.groups[0], 1)["remarks"][: bool(said)] == said.splitlines()


@pytest.mark.parametrize(("count", "said"), [(1, "1 window with"), (2, "2 windows with")])
def test_contaminated_windows_are_counted_in_words(count: int, said: str) -> None:
    (one,) = series(rows(repeats=12), MODELS)
    found = [{"window": number} for number in range(count)]
    one.__dict__["summary"] = replace(one.summary, contaminated=found)
    assert any(said in line for line in remarks(one))


def test_a_half_life_below_the_shortest_length_without_contaminated_windows_is_written_so() -> None:
    (one,) = series(rows({100: 0.6, 200: 0.3}, repeats=3), MODELS)
    found = {"contaminated": [{"window": 0}], "without_contaminated": {"half_life": (0.0, False)}}
    one.__dict__["summary"] = replace(one.summary, **found)
    assert any(line.endswith("without, half-life is <100") for line in remarks(one))


NOISY = [{100: 1.0, 400: 0.2, 800: 0.2}, {100: 0.7, 400: 0.6, 800: 0.2}]  # copy accuracy of two repeats


def test_lengths_too_far_apart_for_a_memory_length_are_named_once() -> None:
    (one,) = series(rows({100: 1.0, 400: 0.2, 800: 0.2}, repeats=3), MODELS)
    (line,) = [line for line in remarks(one) if "too far apart" in line]
    assert "half-life is between 100 and 400, reach is between 100 and 400; measure lengths between these" in line
    noisy = [row(length, repeat, copy) for repeat, copies in enumerate(NOISY) for length, copy in copies.items()]
    (by_chance,) = series(noisy, MODELS)
    assert not [line for line in remarks(by_chance) if "too far apart" in line]
    assert [
        line for line in remarks(by_chance) if "half-life, reach: the interval is wide because texts differ" in line
    ]
    (fine_grid,) = series(rows(repeats=3) + rows({250: 0.8, 275: 0.7, 325: 0.5, 350: 0.4}, repeats=3), MODELS)
    assert not [line for line in remarks(fine_grid) if "too far apart" in line]


def test_three_rouge_scores_of_0_have_no_interval() -> None:
    rouge, exact = ({"score": "score", "name": "ROUGE-L", "exp": False, "graded": one} for one in (True, False))
    zeros = np.zeros(3)
    assert interval_of(zeros, rouge) == (None, None)
    assert interval_of(zeros, exact) == (0.0, pytest.approx(0.5615, abs=1e-3))  # Wilson's, of right and wrong answers
    assert interval_of(np.full(4, 0.8), exact) == (None, None)  # means over depths


def test_the_interval_of_a_memory_index_ends_at_1() -> None:
    (one,) = series([row(100, repeat, copy) for repeat, copy in enumerate((0.8, 0.95, 1.0))], MODELS)
    (point,) = one.points()
    assert point["memory_index_high"] == 1.0
    worse = [row(100, repeat, copy) for repeat, copy in enumerate((0.1, 0.15, 0.2))]
    (point,) = series(worse, MODELS)[0].points()
    assert point["memory_index_low"] < 0  # worse than the control of 0.2


def test_the_interval_of_a_perplexity_begins_at_1() -> None:
    perplexity = {"score": "nats", "name": "perplexity", "exp": True}
    values = np.array([0.1, 0.9])
    assert ttest_1samp(values, 0).confidence_interval().low < 0
    assert interval_of(values, perplexity)[0] == 0.0
    assert numbers("nats", values, least=0.0)["nats_low"] == 0.0


def test_texts_that_are_all_copied_alike_have_no_interval() -> None:
    (one,) = series([row(100, repeat, 1 - 0.01 * repeat) for repeat in range(3)], MODELS)
    (point,) = one.points()
    assert [ranged(point, name) for name in ("copy", "control", "memory_index")] == ["1.000", "0.200", "1.000"]


def test_gains_in_nats_are_no_shares() -> None:
    gain = {"name": "nats less with the first mention", "exp": False}
    assert interval_of(np.zeros(4), gain) == (None, None)
    values = np.array([0.02, 0.0, 0.01, 0.3, 0.0, 0.05])
    found = ttest_1samp(values, 0).confidence_interval(0.95)
    assert interval_of(values, gain) == pytest.approx((found.low, found.high))
    assert found.low < 0


def test_nats_of_tokens_that_are_certain_are_no_shares() -> None:
    certain = {"name": "perplexity", "exp": True, "graded": False}
    assert interval_of(np.zeros(4), certain) == (None, None)


def test_the_interval_of_a_difference_of_shares_is_cut_to_what_is_possible() -> None:
    gained = {"name": "copied beyond guessing", "exp": False, "score": "copy - control"}
    assert interval_of(np.array([-0.02, 0.99]), gained) == (-1.0, 1.0)
    assert interval_of(np.array([0.02, 0.99]), gained) == (-1.0, 1.0)
    assert interval_of(np.array([0.02, 0.99]), gained | {"score": "copy"}) == (0.0, 1.0)


def test_a_failed_row_leaves_neither_half_of_its_targets_in_the_quality() -> None:
    """Each text is copied as well as it is guessed, so nothing is copied beyond guessing, whichever row fails, and no
    method more than another."""

    def measured(method: str, shares: tuple[float, ...]) -> list[Row]:
        others = [(repeat - 1) % 4 for repeat in range(4)]  # a control is scored on the target of the repeat before
        halves = [{"copy": shares[i], "control": shares[j], "control_repeat": j} for i, j in enumerate(others)]
        return [
            replace(row(100, i, 0.0), method=method, scores=half | {"scored": 50, "context": 202})
            for i, half in enumerate(halves)
        ]

    whole, better = measured("full", (0.1, 0.3, 0.5, 0.9)), measured("topk:k=4", (0.2, 0.6, 0.4, 0.8))
    for lost in range(4):
        some = [row(100, repeat, None) if repeat == lost else one for repeat, one in enumerate(whole)]
        cell, other = cells([*some, *better], {"settings": {}, "models": {}})
        assert (cell.value, cell.n, cell.statuses) == (pytest.approx(0.0), 2, {"oom": 1})
        assert cell.details["copy"] == pytest.approx(cell.details["control"])
        assert (other.difference, other.pairs) == (pytest.approx(0.0), 2)
    (cell,) = cells(whole, {"settings": {}, "models": {}})
    assert (cell.value, cell.low, cell.high) == (0.0, None, None)  # no text differs from another
    (cell,) = cells(whole[:1], {"settings": {}, "models": {}})  # of a run that has just begun
    assert cell.n == 1


def test_the_interval_of_a_score_that_can_be_negative_contains_its_mean() -> None:
    low, high = interval_of(np.array([-0.5, -0.4]), {"name": "rank correlation", "exp": False, "score": "r"})
    assert low is not None
    assert high is not None
    assert low < -0.45 < high


def test_the_picture_marks_the_context_the_model_was_trained_on(tmp_path: Path) -> None:
    assert "<!-- context = 512 (trained) -->" in svg(rows(), tmp_path)
    assert "(trained)" not in svg(rows(model="org/other"), tmp_path)


def test_figures_in_which_members_have_no_result_share_one_legend(tmp_path: Path) -> None:
    """Inside of each figure it covered the values."""
    lines = [Line(name, [1, 2], [1, 2], index) for index, name in enumerate(("first", "second"))]
    failed = Failed("second", "second: no result, oom", 1, {4: "oom"}, frozenset())
    never = Failed("third", "third: no result, refused", 2, {4: "refused"}, frozenset())
    also = Failed("third", "third: no result, oom, refused", 2, {4: "refused", 8: "oom"}, frozenset())
    figures = Figure("a", "x", "y", lines, failed=[also]), Figure("b", "x", "y", lines[:1], failed=[failed, never])
    drawn = draw_grid([figures], tmp_path, "grid")[1].read_text()
    shown = ["first", "second", "crossed: no result", "third: no result, oom, refused"]
    assert [drawn.count(f"<!-- {label} -->") for label in shown] == [1, 1, 1, 1]
    assert "second: no result" not in drawn
    assert drawn.count("<!-- third") == 1
    other = Figure("b", "x", "y", [Line("other", [1, 2], [1, 2], 0)])  # the colour of the first member
    drawn = draw_grid([(figures[0], other)], tmp_path, "apart")[1].read_text()
    assert drawn.count("legend_") == 2


@pytest.mark.parametrize("log_x", [False, True])
def test_labels_of_rules_hide_neither_lines_nor_each_other(log_x: bool) -> None:
    x = np.linspace(64, 4096, 40)
    rules = [Rule(f"context = {at:,} (trained)", x=at) for at in (512, 600, 1024, 4096)] + [Rule("half-life", y=0.5)]
    canvas = Canvas(figsize=SIZE, layout="constrained")
    axes = canvas.subplots()
    line = Line("line", x, x / 4096, 0, x / 4096 - 0.1, x / 4096 + 0.1)
    draw_with_legend(axes, Figure("a title", "x", "y", [line], rules=rules, log_x=log_x))
    canvas.draw_without_rendering()
    labels = [label.get_window_extent() for label in axes.texts]
    boxes = [*labels, axes.title.get_window_extent(), axes.bbox]
    assert len(labels) == 5
    assert not [(one, other) for one, other in combinations(boxes, 2) if one.overlaps(other)]
    above = [box for box in labels if box.y0 > axes.bbox.y1]
    assert len(above) == 4
    assert all(axes.bbox.containsx(end) for box in above for end in (box.x0, box.x1))
    assert all(canvas.bbox.containsx(end) for box in labels for end in (box.x0, box.x1))


@pytest.mark.parametrize("y", [0.0, 1.0])
def test_labels_beside_the_axes_end_with_them(y: float) -> None:
    canvas = Canvas(figsize=SIZE, layout="constrained")
    axes = canvas.subplots()
    line = Line("line", [64, 256], [0.3, 0.2], 0)
    draw_on(axes, Figure("a", "x", "y", [line], rules=[Rule("context = 1,024 (trained)", y=y)], span=(0, 1)))
    canvas.draw_without_rendering()
    (box,) = (text.get_window_extent() for text in axes.texts)
    assert axes.bbox.y0 <= box.y0 < box.y1 <= axes.bbox.y1
    assert box.x0 > axes.bbox.x1


def test_a_rule_beyond_the_lengths_of_a_curve_has_no_label() -> None:
    axes = Canvas().subplots()
    line = Line("line", [64.0, 256.0], [0.3, 0.2], 0)
    draw_on(axes, Figure("a", "x", "y", [line], rules=[Rule("5,120 (trained)", x=5120.0)], span=(0, 1)))
    assert list(axes.texts) == []


@pytest.mark.parametrize(("rows", "numbered"), [(5, True), (30, False)])
def test_a_map_has_numbers_where_they_do_not_overlap(rows: int, numbered: bool) -> None:
    canvas = Canvas(figsize=(4.5, 2.9), layout="constrained")
    axes = canvas.subplots()
    names = [str(row) for row in range(rows)]
    draw_on(axes, Heat("a map", "head", "layer", np.full((rows, 9), 0.5), [*map(str, range(9))], names, "share"))
    canvas.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert bool(boxes) is numbered
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_lengths_below_a_figure_do_not_overlap() -> None:
    canvas = Canvas(figsize=(5.0, 4.2), layout="constrained")
    axes = canvas.subplots()
    ticks = [1024, 2048, 4096, 6144, 8192, 10240, 12288, 14336, 16384]
    draw_on(axes, Figure("a", "length", "y", [Line("line", ticks, ticks, 0)], log_x=True, ticks=ticks))
    canvas.draw_without_rendering()
    labels = [label for label in axes.get_xticklabels() if label.get_text()]
    assert [label.get_text() for label in labels][-1] == "16,384"
    assert {"1,024", "2,048", "4,096"} < {label.get_text() for label in labels}
    boxes = [label.get_window_extent() for label in labels]
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    assert list(axes.get_xticks()) == ticks


@pytest.mark.parametrize(("length", "rotation"), [(1_024, 0.0), (1_048_576, 45.0)])
def test_lengths_below_a_map_are_level_where_they_fit(length: int, rotation: float) -> None:
    canvas = Canvas(figsize=SIZE, layout="constrained")
    axes = canvas.subplots()
    lengths = [f"{length + i:,}" for i in range(14)]
    draw_on(axes, Heat("a map", "length", "depth", np.full((2, 14), 0.5), lengths, ["0", "1"], "recall"))
    canvas.draw_without_rendering()
    assert {label.get_rotation() for label in axes.get_xticklabels()} == {rotation}
    if not rotation:
        boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_numbers_in_a_map_have_the_shade_with_more_contrast() -> None:
    axes = Canvas(figsize=SIZE).subplots()
    values = np.linspace(0, 1, 21)[None]
    draw_on(axes, Heat("a map", "x", "y", values, [*map(str, range(21))], ["0"], "recall"))
    for value, text in zip(values[0], axes.texts, strict=True):
        light = np.array(axes.images[0].cmap(value)[:3])
        light = np.where(light <= 0.04045, light / 12.92, ((light + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]
        assert text.get_color() == ("white" if 1.05 / (light + 0.05) > (light + 0.05) / 0.05 else "black"), value


def test_perplexities_on_the_right_are_round_numbers() -> None:
    axes = Canvas(figsize=SIZE).subplots()
    line = Line("line", [64.0, 256.0], [1.3, 3.9], 0)
    draw_on(axes, Figure("a", "x", "nats", [line], exp="perplexity"))
    (right,) = axes.child_axes
    shown = [(tick, label.get_text()) for tick, label in zip(right.get_yticks(), right.get_yticklabels(), strict=True)]
    assert [text for _, text in shown] == ["5", "10", "20", "50"]
    assert [tick for tick, _ in shown] == pytest.approx(np.log([5, 10, 20, 50]))


def test_the_legend_shows_dashes_beside_the_marker() -> None:
    canvas = Canvas(figsize=SIZE, layout="constrained")
    line = Line("control", [1, 2], [1, 2], 0, style="dashed")
    draw_with_legend(canvas.subplots(), Figure("a", "x", "y", [line]))
    (ends,) = {tuple(one.get_xdata()) for one in canvas.legends[0].get_lines()}
    assert ends[-1] - ends[0] > 4 * 6  # two periods of dashes on both sides of a marker of 6 points


@pytest.mark.parametrize("log_y", [False, True])
@pytest.mark.parametrize("layout", [None, "constrained"])
def test_a_legend_within_axes_covers_no_interval(layout: Any, log_y: bool) -> None:
    canvas = Canvas(figsize=(5.0, 3.5), layout=layout)
    axes = canvas.subplots()
    lines = []
    for index in range(6):
        y = np.array([0.9, 0.5, 0.1]) if index % 2 else np.array([0.1, 0.5, 0.9])
        lines.append(Line(f"sinks:window={index}", [64, 128, 256], y, index, y - 0.09, y + 0.09))
    draw_on(axes, Figure("a", "x", "y", lines, log_x=True, log_y=log_y, num_members=6))
    add_legend_inside(axes)
    canvas.draw_without_rendering()
    legend = axes.get_legend()
    assert legend is not None
    bars = [segment for one in axes.containers for segment in one[2][0].get_segments()]
    assert len(bars) == 18
    assert max(axes.transData.transform(bar)[:, 1].max() for bar in bars) < legend.get_window_extent().y0
    assert max(axes.get_yticks()) <= 1.001 < axes.get_ylim()[1]  # no number beside the legend
    assert legend.get_window_extent().width <= axes.bbox.width


def test_a_long_title_lies_within_the_picture() -> None:
    text = "/home/someone/" + "a-folder-of-texts-with-a-long-name/" * 3 + "MOBY_DICK.TXT"
    title = f"Forgetting curve of one, two, three (nested, {text}; probe 32+96, shuffled:{text})"
    canvas = Canvas(figsize=SIZE, layout="constrained")
    axes = canvas.subplots()
    draw_with_legend(axes, Figure(title, "x", "y", [Line("line", [1, 2], [1, 2], 0)], note="n = 20 texts"))
    canvas.draw_without_rendering()
    box = axes.title.get_window_extent()
    assert box.width > canvas.bbox.width / 2
    assert 0 <= box.x0 < box.x1 <= canvas.bbox.x1
    assert box.y1 <= canvas.bbox.y1
    assert axes.get_title().endswith("n = 20 texts")


def test_the_last_point_of_a_figure_is_clear_of_its_edge() -> None:
    canvas = Canvas(figsize=SIZE, layout="constrained")
    axes = canvas.subplots()
    axes.set_xlim(0, 30)  # as of a picture that is drawn in several steps
    draw_on(axes, Figure("a", "x", "y", [Line("line", [10.0, 30.0], [1.0, 2.0], 0, style="points")]))
    assert axes.get_xlim() == (0, 31.5)


def test_intervals_of_many_members_are_error_bars() -> None:
    """Bands would hide each other."""
    x = np.arange(1.0, 31.0)
    for count, bands in ((4, 4), (5, 0)):
        lines = [Line(f"model {index}", x, x, index, x - 1, x + 1) for index in range(count)]
        figure = Figure("", "x", "y", lines, num_members=count)
        axes = Canvas().subplots()
        draw_on(axes, figure)
        assert sum(isinstance(one, FillBetweenPolyCollection) for one in axes.collections) == bands
        assert len(axes.containers) == count - bands
        traces = as_plotly(figure)["data"]
        assert sum(trace["meta"]["kind"] == "band" for trace in traces) == bands
        bars = [trace["error_y"]["array"] for trace in traces if "error_y" in trace]
        assert [sum(end is not None for end in one) for one in bars] == [15] * (count - bands)


def test_the_interval_of_one_point_is_an_error_bar() -> None:
    """A band would have no width."""
    line = Line("line", [64.0, 128.0], [3.0, np.nan], 0, [2.5, np.nan], [3.5, np.nan])
    (trace,) = as_plotly(Figure("a", "x", "y", [line], num_members=1))["data"]
    assert trace["error_y"]["array"] == [0.5, None]


@pytest.mark.parametrize(("more_is_better", "higher_is_better"), list(product((False, True), repeat=2)))
def test_no_point_is_beyond_the_pareto_front(more_is_better: bool, higher_is_better: bool) -> None:
    points = [(float(x), float(y)) for x, y in np.random.default_rng(0).integers(1, 30, (40, 2))]
    signs = np.array([1 if more_is_better else -1, 1 if higher_is_better else -1])
    good = signs * points
    unbeaten = {
        point for point, one in zip(points, good, strict=True) if not ((good >= one).all(1) & (good > one).any(1)).any()
    }
    corners = pareto_front(points, more_is_better, higher_is_better)
    assert unbeaten <= {(x, y) for x, y in corners}
    assert not any((good > corner).all(1).any() for corner in signs * corners)
    assert ((np.diff(corners, axis=0) == 0).sum(1) >= 1).all()  # a staircase
    assert (signs * corners)[:, 0].tolist() == sorted((signs * corners)[:, 0], reverse=True)
    assert corners[-1][0] == min(points, key=lambda point: signs[0] * point[0])[0]


@pytest.mark.parametrize("ends", [(4.1, 4.9), (5, 40), (3, 9), (1, 2e6), (0.001, 0.0013), (17.30, 17.34), (4, 4)])
def test_a_logarithmic_axis_has_four_numbers_or_more(ends: tuple[float, float]) -> None:
    points = [Line("", [x], [y], 0, style="points") for x, y in zip(ends, ends, strict=True)]
    figure = Figure("", "x", "y", points, log_x=True, log_y=True, counts=False)
    axes = Canvas().subplots()
    draw_on(axes, figure)
    for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        at = [place for place in axis.get_majorticklocs() if limits[0] <= place <= limits[1]]
        assert 4 <= len(at) <= 8
        shown = axis.get_major_formatter().format_ticks(at)
        assert [float(text.replace(",", "")) for text in shown] == pytest.approx(at, rel=1e-9)
    for axis in (as_plotly(figure)["layout"][name] for name in ("xaxis", "yaxis")):
        low, high = (10**end for end in axis["range"])
        assert low < ends[0] <= ends[1] < high
        assert 4 <= len([one for one in axis["tickvals"] if low <= one <= high]) <= 8
        assert [float(text.replace(",", "")) for text in axis["ticktext"]] == axis["tickvals"]


def test_thousands_have_a_comma_on_both_axes() -> None:
    axes = Canvas().subplots()
    draw_on(axes, Figure("", "x", "y", [Line("", [1000.0, 9000.0], [0.0, 9000.0], 0, style="points")], counts=False))
    for axis in (axes.xaxis, axes.yaxis):
        assert "8,000" in axis.get_major_formatter().format_ticks(axis.get_majorticklocs())


def test_many_lengths_within_two_octaves_have_four_numbers() -> None:
    axes = Canvas().subplots()
    x = np.linspace(512, 1000, 20)
    draw_on(axes, Figure("", "x", "y", [Line("", x, x, 0)], log_x=True, ticks=[*map(int, x)]))
    low, high = axes.get_xlim()
    assert len([place for place in axes.get_xticks() if low <= place <= high]) >= 4


def test_points_that_differ_by_rounding_are_equal_on_the_pareto_front() -> None:
    same_cost = pareto_front([(1.0, 5.0), (1.0001, 4.0)], more_is_better=False, higher_is_better=False)
    assert same_cost.tolist() == [[1.0001, 4.0], [1.0001, 4.0]]
    same_quality = pareto_front([(1.0, 5.0), (2.0, 4.9999), (3.0, 4.0)], more_is_better=False, higher_is_better=False)
    assert same_quality.tolist() == [[1.0, 5.0], [3.0, 5.0], [3.0, 4.0], [3.0, 4.0]]


def test_titles_of_a_row_are_at_the_same_height(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line("line", [64.0, 256.0], [3.0, 2.0], 0)
    pair = [
        Figure("one", "x", "y", [line], rules=[Rule("512 (trained)", x=128.0)], note="n = 4 examples"),
        Figure("other", "x", "y", [line], note="n = 4 examples"),
    ]
    kept: list[Canvas] = []
    monkeypatch.setattr("farspan.report.picture.saved", lambda canvas, *_: kept.append(canvas) or [])
    draw_grid([pair], tmp_path, "grid")
    kept[0].draw_without_rendering()
    titles = [axes._left_title.get_window_extent() for axes in kept[0].axes]
    assert len(titles) == 2
    assert titles[0].y0 == pytest.approx(titles[1].y0)


def test_a_line_without_costs_shows_why_they_failed() -> None:
    about = ("own", 8, "tokens", "right", False)
    found = [
        Cell("m", "full", *about, value=0.5, prefill_rate=10.0, prefill_seconds=1.0),
        Cell("m", "refused", *about, failed="refused", reason="no RoPE"),
        Cell("m", "costly", *about, value=0.5, cost_failed="oom", cost_reason="8 GiB"),
        Cell("served", "full", *about, value=0.5),
    ]
    ((_, _, lines),) = cost_tables(found)
    assert [line[2] for line in lines] == [
        "8",
        "failed: refused",
        "failed: oom",
    ]  # and no line for a server, which has none
    assert reasons(found) == ["own: m refused at 8: refused: no RoPE", "cost: m costly at 8: oom: 8 GiB"]


def test_each_size_of_a_cost_has_its_own_unit() -> None:
    memory = {"weight_bytes": 8.25 * 2**20, "context_bytes": 36 * 2**10, "activation_bytes": 12.0}
    found = [Cell("m", "full", "own", 8, "tokens", "right", False, prefill_rate=10.0, **memory)]
    assert costs_of(found)[-1] == "8.25 MiB + 36.0 KiB + 12 bytes"
    assert costs_of([replace(found[0], context_bytes=None)])[-1] == "8.25 MiB + ? + 12 bytes"


def test_costs_that_failed_are_named_once() -> None:
    costs = {"value": 0.5, "cost_failed": "oom", "cost_reason": "8 GiB"}
    found = [Cell("m", "full", task, 8, "tokens", "right", False, **costs) for task in ("a", "b")]
    assert reasons(found) == ["cost: m full at 8: oom: 8 GiB"]


def test_the_label_of_a_rule_is_below_the_buttons_of_the_page() -> None:
    line = Line("line", [64.0, 256.0], [3.0, 2.0], 0)
    plain, ruled = (
        as_plotly(Figure("a", "x", "y", [line], rules=rules)) for rules in ([], [Rule("512 (trained)", x=512.0)])
    )
    assert ruled["layout"]["margin"]["t"] >= plain["layout"]["margin"]["t"] + 14


def test_the_pareto_front_is_on_the_picture_and_on_the_page() -> None:
    cells = [
        Cell("m", name, "own", 8, "tokens", "right", False, 9, value, value - 0.1, value + 0.1, prefill_seconds=seconds)
        for name, value, seconds in (("full", 0.9, 2.0), ("topk:k=4", 0.5, 3.0), ("sinks", 0.6, 1.0))
    ]
    figure = cost_figure(cells, "seconds", True)
    assert figure is not None
    axes = Canvas().subplots()
    draw_on(axes, figure)
    (front,) = (line for line in axes.lines if line.get_label() == "Pareto front")
    corners = [(1.0, 0.6), (2.0, 0.6), (2.0, 0.9), (3.0, 0.9)]
    assert list(zip(*front.get_data(), strict=True)) == corners
    (trace,) = (one for one in as_plotly(figure)["data"] if one["mode"] == "lines")
    assert list(zip(trace["x"], trace["y"], strict=True)) == corners
    for found, better in ((cells[:1], True), (cells, None)):
        figure = cost_figure(found, "seconds", better)
        assert figure is not None
        assert figure.front is None


@pytest.mark.parametrize("log_x", [False, True])
def test_a_rule_beyond_all_lengths_is_on_the_picture(log_x: bool) -> None:
    axes = Canvas().subplots()
    line = Line("line", [64.0, 256.0], [3.0, 2.0], 0)
    draw_on(axes, Figure("a", "x", "y", [line], rules=[Rule("512 (trained)", x=512.0)], log_x=log_x))
    assert axes.get_xlim()[1] > 512


def test_the_picture_shows_lengths_that_failed_and_why(tmp_path: Path) -> None:
    assert "<!-- no result: oom -->" in svg(rows() + failures(500, 600), tmp_path)
    assert "failed" not in svg(rows(), tmp_path)


@pytest.fixture
def of_three_that_failed() -> Figure:
    statuses = [{512: "oom", 1024: "oom"}, {1024: "oom"}, {512: "nan"}]
    failed = [Failed(f"m{i}", f"m{i}", i, one, frozenset()) for i, one in enumerate(statuses)]
    return Figure("a", "x", "y", [Line("line", [64.0], [3.0], 0)], failed=failed)


def test_a_legend_names_crosses_after_lines(of_three_that_failed: Figure) -> None:
    canvas = Canvas(figsize=SIZE, layout="constrained")
    draw_with_legend(canvas.subplots(), replace(of_three_that_failed, num_members=5))  # with error bars
    assert [text.get_text() for text in canvas.legends[0].get_texts()] == ["line", "m0", "m1", "m2"]


def test_crosses_of_members_differ_in_shape_and_place(of_three_that_failed: Figure) -> None:
    axes = Canvas().subplots()
    draw_on(axes, of_three_that_failed)
    crosses = [line for line in axes.lines if str(line.get_label()).startswith("m")]
    outlines = [crosses[i].get_marker().vertices for i in range(3)]
    assert not any(np.array_equal(a, b) for a, b in combinations(outlines, 2))
    places = [place for line in crosses for place in zip(*line.get_data(), strict=True)]
    assert sorted(x for x, _ in places) == [512, 512, 1024, 1024]
    assert len(set(places)) == 4
    assert min(y for _, y in places) == crosses[0].get_ydata()[0]


@pytest.mark.parametrize("look", [{}, {"span": (0.0, 3.0)}, {"log_y": True}], ids=["free", "span", "log"])
def test_crosses_are_below_all_values_and_their_numbers(of_three_that_failed: Figure, look: dict[str, Any]) -> None:
    canvas = Canvas()
    axes = canvas.subplots()
    lowest = Line("line", [64.0, 512.0], [3.0, 0.01], 0, [2.9, 0.001], [3.0, 0.1])
    draw_on(axes, replace(of_three_that_failed, lines=[lowest], exp="e", **look))
    canvas.draw_without_rendering()
    line = next(line for line in axes.lines if line.get_label() == "line")
    floor = axes.transData.transform(np.stack(line.get_data(), 1))[:, 1].min()
    for place in (axes, *axes.child_axes):
        floor = min(floor, *(axes.transData.transform((64, tick))[1] for tick in place.get_yticks()))
    crosses = (one for one in axes.lines if str(one.get_label()).startswith("m"))
    assert all(one.get_transform().transform(np.stack(one.get_data(), 1))[:, 1].max() < floor for one in crosses)


def test_crosses_on_the_page_differ_in_shape_and_place(of_three_that_failed: Figure) -> None:
    crosses = [trace for trace in as_plotly(of_three_that_failed)["data"] if trace["meta"]["kind"] == "failed"]
    assert len({one["marker"]["symbol"][0] for one in crosses}) == 3
    assert len({place for one in crosses for place in zip(one["x"], one["y"], strict=True)}) == 4


def test_a_length_that_failed_in_one_repeat_alone_is_drawn_from_the_others(tmp_path: Path) -> None:
    assert "failed" not in svg([*rows(), row(500, 0, 0.2), row(500, 1, None)], tmp_path)


def test_one_repeat_is_drawn_without_an_interval(tmp_path: Path) -> None:
    assert "<!-- half-life 300 -->" in svg(rows(repeats=1), tmp_path)


def test_repeats_are_drawn_with_their_interval(tmp_path: Path) -> None:
    assert re.search(r"<!-- half-life 301 \[2\d\d, 400\] -->", svg(rows(repeats=2), tmp_path))


def test_a_single_length_is_drawn(tmp_path: Path) -> None:
    assert "<!-- fine memory &gt;100 -->" in svg(rows({100: 1.0}), tmp_path)


def test_several_curves_stand_in_one_picture_under_their_names(tmp_path: Path) -> None:
    drawn = svg(rows() + rows({100: 1.0, 200: 0.2}, model="org/tiny") + failures(300, model="org/tiny"), tmp_path)
    legend = re.findall("<!-- (.*) -->", drawn)[-6:]
    assert legend == [
        "small: half-life 300",
        "tiny: half-life 150",
        "tiny: no result: oom",
        "copy",
        "control",
        "half-life",
    ]
    assert "amnesia" not in drawn


def test_the_legend_has_a_half_life_beyond_the_lengths_measured(tmp_path: Path) -> None:
    drawn = svg(rows() + rows({100: 1.0, 200: 1.0}, model="org/tiny"), tmp_path)
    assert re.search("<!-- tiny: half-life &gt;200.* -->", drawn)


def test_more_curves_than_colours_are_drawn(tmp_path: Path) -> None:
    measured = [r for i in range(8) for r in rows({100: 1.0, 200: 0.2}, model=f"org/model-{i}")]
    assert "<!-- model-7: half-life 1" in svg(measured, tmp_path)


@pytest.mark.parametrize(("count", "bars"), [(4, 4), (5, 0)])
def test_half_lives_of_many_curves_have_no_intervals_that_cover_each_other(count: int, bars: int) -> None:
    measured = [r for i in range(count) for r in rows(repeats=2, model=f"m-{i}")]
    marks = [line for line in curve_figure(series(measured, MODELS)).lines if line.style == "mark"]
    assert len(marks) == count
    assert sum(bool(np.isfinite(np.asarray(line.low, float)).all()) for line in marks) == bars


@pytest.mark.parametrize("style", ["solid", "dashed", "dotted", "points", "mark"])
@pytest.mark.parametrize("count", [3, 40])
def test_lines_of_seven_members_differ_in_more_than_colour(style: Style, count: int) -> None:
    """In the picture, its legend, and on the page; also where not every point has a marker."""
    x = np.linspace(100, 4000, count)
    lines = [Line(f"model {index}", x, x / 4000, index, style=style) for index in range(7)]
    axes = Canvas().subplots()
    draw_on(axes, Figure("seven", "length", "accuracy", lines))
    handles, _ = axes.get_legend_handles_labels()
    shown = [handle[0] if isinstance(handle, ErrorbarContainer) else handle for handle in handles]
    assert len({line.get_marker() for line in shown}) == len({line.get_marker() for line in axes.lines}) == 7
    symbols = {trace["marker"]["symbol"] for trace in as_plotly(Figure("", "x", "y", lines))["data"]}
    assert len(symbols) == len({shape(index)[0] for index in range(7)}) == 7


def test_a_line_of_many_points_has_few_markers() -> None:
    axes = Canvas().subplots()
    x = np.arange(100.0)
    draw_on(axes, Figure("", "x", "y", [Line(f"model {index}", x, x, index) for index in range(2)]))
    (first, every), (second, _) = (line.get_markevery() for line in axes.lines)
    assert len(x[first::every]) <= MARKED
    assert first != second


def test_points_without_a_line_are_all_drawn() -> None:
    axes = Canvas().subplots()
    x = np.arange(100.0)
    figure = Figure("", "x", "y", [Line("", x, x, 3, style="points")])
    draw_on(axes, figure)
    first, every = axes.lines[0].get_markevery()
    assert len(x[first::every]) == 100
    assert "maxdisplayed" not in as_plotly(figure)["data"][0]["marker"]


def test_a_curve_of_failures_alone_has_no_numbers() -> None:
    found = series(rows() + failures(100, 200, model="org/large"), MODELS)
    assert [one.summary is None for one in found] == [False, True]


def test_a_series_knows_the_length_its_model_was_trained_on() -> None:
    found = series(rows() + rows(model="org/other"), MODELS)
    assert [one.trained_length for one in found] == [512, None]


@pytest.mark.parametrize(
    "methods",
    [
        ["full", "rope:type=yarn,factor=4"],
        ["sinks:window=508,sinks=4", "sinks:window=60,sinks=4"],
        ["full", "rope:type=yarn,factor=4+temperature"],
    ],
    ids=["one of a kind", "two of a kind", "composed"],
)
def test_names_have_all_settings_of_a_method(methods: list[str]) -> None:
    measured = [replace(one, method=method) for method in methods for one in rows()]
    assert [one.name for one in series(measured, MODELS)] == methods
    header = {"settings": {"text": "books"}, "models": {"org/small": {"name": "org/small"}}, "sessions": []}
    (group,) = grouped([Source.of("run", "run", header, measured)], MEMBERS)
    assert [one.name for one in group.members] == [f"small {method}" for method in methods]


def test_the_figure_of_quality_marks_where_text_and_copy_fill_the_trained_length() -> None:
    header = {"settings": {"text": "books"}, "models": MODELS, "sessions": []}
    (group,) = grouped([Source.of("run", "run", header, rows())], MEMBERS)
    (one,) = group.members
    assert one.trained_at is not None
    assert one.trained_at < 512
    figure = group_figure(group)
    assert figure is not None
    assert figure.rules == [Rule("context = 512 (trained)", x=one.trained_at)]


@pytest.mark.parametrize("models", [("org/a",), ("org/a", "org/b")])
@pytest.mark.parametrize("texts", [("books",), ("books", "code")])
def test_no_two_curves_have_the_same_name(models: tuple[str, ...], texts: tuple[str, ...]) -> None:
    measured = [r for model in models for text in texts for r in rows(model=model, text=text)]
    names = [one.name for one in series(measured, {})]
    assert len(set(names)) == len(names) == len(models) * len(texts)


def test_data_are_json_without_nan() -> None:
    measured = [*rows(), row(500, 0, 0.2), row(500, 1, None), *failures(600), *failures(100, model="org/large")]
    small, large = json.loads(json.dumps(as_data(series(measured, MODELS)), allow_nan=False))
    assert small["summary"]["half_life"]["value"] == pytest.approx(301, abs=1)
    assert small["failed"] == {"500": "oom", "600": "oom"}
    assert large == {"model": "org/large", "method": "full", "task": "curve", "what": "nested, books"} | {
        "failed": {"100": "oom"}
    }


def test_data_hold_the_means_of_the_repeats() -> None:
    (found,) = as_data(series(rows(repeats=2) + failures(500), MODELS))
    assert found["lengths"] == [100, 200, 300, 400]
    assert found["copy"] == pytest.approx([1.005, 1.005, 0.605, 0.205])
    assert found["control"] == pytest.approx([0.2] * 4)


@pytest.mark.parametrize(
    ("titles", "words"),
    [
        (["nested, books", "nested, shuffled:books"], ["natural text", "shuffled text"]),
        (["nested, books", "probe 32+96, books"], ["nested", "probe 32+96"]),
        (["nested, books", "nested, shuffled:books", "nested, code"], ["books", "shuffled:books", "code"]),
        (["all tokens, books", "last 9 tokens, fixed, books"], ["all tokens, books", "last 9 tokens, fixed, books"]),
    ],
    ids=["shuffled", "protocols", "texts", "other parts"],
)
def test_curves_are_named_by_what_distinguishes_them(titles: list[str], words: list[str]) -> None:
    assert list(differences_of(titles).values()) == words


def test_the_picture_of_recall_names_the_texts(tmp_path: Path) -> None:
    measured = []
    for text, depth in product(("books", "code"), (0.0, 0.5)):
        one = row(100, 0, 0.9, text=text)
        measured.append(replace(one, depth=depth, scores=one.scores | {"distance": 100 * (1 - depth)}))
    CurveReport(groups_of_rows(measured, "curve", CurveMember, MODELS), tmp_path).draw()
    drawn = (tmp_path / "recall.svg").read_text()
    assert re.findall("<!-- (.*) -->", drawn)[-5:] == ["books", "code", "copy", "control", "memory index"]


def test_each_part_of_a_table_of_recall_names_depth_and_distance(tmp_path: Path) -> None:
    measured = []
    for repeat, depth in product(range(3), (0.0, 0.5)):
        one = row(100, repeat, 0.9)
        measured.append(replace(one, depth=depth, scores=one.scores | {"distance": 100 * (1 - depth)}))
    file = StringIO()
    CurveReport(groups_of_rows(measured, "curve", CurveMember, MODELS), tmp_path).print(Terminal(file=file, width=60))
    heads = [line.split() for line in file.getvalue().splitlines() if line.split()[:1] == ["depth"]]
    assert heads == [["depth", "distance", "memory", "index"], ["depth", "distance", "copy", "control"]]


def test_lengths_beyond_those_measured_have_their_own_mark_in_trainings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(training, "draw_grid", lambda grid, *_, **__: figures.extend(grid[0]) or [])
    measured = curve(rows({100: 1.0, 200: 1.0}, 3))
    training.draw_memory({1: (measured, summarise(measured))}, tmp_path, None, 100)
    drawn = {line.label: line for line in figures[0].lines}
    assert set(drawn) == {"half-life", "half-life: at least", "span", "span: at least"}
    for name in ("half-life", "span"):
        value, mark = drawn[name], drawn[f"{name}: at least"]
        assert (mark.style, shape(mark.index)[0], colour(mark.index)) == ("mark", "▲", colour(value.index))


def test_differences_name_curves_as_the_table_does(tmp_path: Path) -> None:
    full = [replace(one, scores=one.scores | {"target": f"t{one.repeat}"}) for one in rows(repeats=3)]
    measured = full + [replace(one, method="sinks") for one in full]
    file = StringIO()
    CurveReport(groups_of_rows(measured, "curve", CurveMember, MODELS), tmp_path).print(Terminal(file=file, width=80))
    assert re.search(r"^half-life: full \S+, sinks \S+: ", file.getvalue(), re.M)


@pytest.mark.parametrize("depths", [(1.0, 0.0), (0.5,)])
def test_an_example_has_the_answer_at_its_own_depth(depths: tuple[float, ...], tmp_path: Path) -> None:
    parts = [["read", ["hay"]], ["asked", [" The number is", " 7"]]]
    shown = {"model": "tiny", "what": "needle", "task": "needle", "settings": {}, "length": 100, "repeat": 0}
    (tmp_path / "examples.jsonl").write_text(json.dumps(shown | {"parts": parts, "scored": 1}) + "\n")
    found = [
        Row("tiny", "full", "needle", 1, {}, 100, 0, 0, "one", depth=depth, scores={"prediction": f"at {depth}"})
        for depth in depths  # the example is at the first of them
    ]
    (example,) = examples(Source("run", tmp_path, {}, found))
    assert (example.method, example.answer) == ("full", f"at {depths[0]}")
