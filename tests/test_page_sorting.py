"""Tables of the report page: a click or a key on a column header sorts their rows."""

from pathlib import Path
from typing import Any

import pytest
from browser import opened
from test_page import rows, run

from farspan.report.page import write_report

LENGTHS = {"small": 1.0, "large": 0.3, "other": 0.7}  # copy accuracy of a model at every length but the first
CELLS = {  # the texts of a column, ascending
    "numbers": ["-0.50 [-0.6, 0.4]", "−0.25", "< 0.001", "0.001", "0.01 ▲", "9.5", "1,024", "oom", "–"],
    "censored": ["0 [0, 12]", "895 [764, 1,024]", ">895 [764, >1,024]", "896", "∞"],
    "bytes": ["512 bytes", "2.00 KiB", "8.25 MiB + 12.4 KiB", "700 MiB + 1.00 MiB", "1.50 GiB + 200 MiB", "-"],
    "words": ["full", "rope:factor=4", "rope:factor=16", "–"],
}


@pytest.fixture
def page(browser: Any, tmp_path: Path) -> Any:
    """A page with three models, open in a browser."""
    folders = [
        run(tmp_path / name, rows({100: 1.0, 200: copy, 300: copy}, model=f"org/{name}"))
        for name, copy in LENGTHS.items()
    ]
    opened(browser, write_report(folders, tmp_path / "out")[0])
    return browser


def shown(page: Any) -> tuple[list[str], list[str | None]]:
    """Return the models in the order of the first table, and what is announced of each of its headers."""
    table = "document.querySelector('.lengths')"
    names = page.execute_script(f"return [...{table}.tBodies[0].rows].map(row => row.cells[0].innerText)")
    heads = page.execute_script(f"return [...{table}.tHead.rows[0].cells].map(head => head.getAttribute('aria-sort'))")
    return [name.split()[-1] for name in names], heads


def head(page: Any, column: int) -> Any:
    return page.find_elements("css selector", ".lengths")[0].find_elements("css selector", "thead button")[column]


def test_a_header_sorts_up_then_down_then_as_before(page: Any) -> None:
    before, announced = shown(page)
    assert announced == [None] * len(announced)
    expected = [(["large", "other", "small"], "ascending"), (["small", "other", "large"], "descending"), (before, None)]
    for names, direction in expected:
        head(page, 4).click()  # the span
        assert shown(page) == (names, [*announced[:4], direction, *announced[5:]])


def test_headers_are_reached_and_pressed_with_the_keyboard(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    before, _ = shown(page)
    head(page, 0).send_keys(Keys.ENTER)
    assert shown(page)[0] == sorted(before)
    page.switch_to.active_element.send_keys(Keys.SPACE)
    assert shown(page)[0] == sorted(before, reverse=True)
    page.switch_to.active_element.send_keys(Keys.TAB)
    page.switch_to.active_element.send_keys(Keys.ENTER)
    assert shown(page)[1][:2] == [None, "ascending"]


@pytest.mark.parametrize("texts", CELLS.values(), ids=CELLS)
def test_rows_are_sorted_by_the_first_number_and_missing_ones_are_last(page: Any, texts: list[str]) -> None:
    put = """
        const [texts] = arguments, rows = texts.map((text) => {
          const row = document.createElement("tr");
          row.append(document.createElement("td"), document.createElement("td"));
          row.cells[1].append(text);
          return row;
        });
        return [1, -1].map((direction) => sorted(rows, 1, direction).map((row) => row.cells[1].textContent));
    """
    up, down = page.execute_script(put, texts[::-1])
    missing = [text for text in texts if text in ("oom", "–", "-")]
    present = texts[: len(texts) - len(missing)]
    assert (up[: len(present)], down[: len(present)]) == (present, present[::-1])
    assert sorted(up[len(present) :]) == sorted(down[len(present) :]) == sorted(missing)
