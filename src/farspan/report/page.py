"""Runs on one page: self-contained HTML that opens from disk offline, with Markdown and CSV beside it.

A pure function of the runs. Everything in them may come from a stranger's model, text or file name: the template
escapes it, interactive.py escapes what plotly would read as HTML, and the page's content security policy loads nothing
and runs no script but the page's own.
"""

import hashlib
import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from farspan.extras import optional_import
from farspan.files import expanded, write
from farspan.record import refuse_file
from farspan.report.cells import cells_of
from farspan.report.export import quality_table, write_csv
from farspan.report.kinds import MEMBERS, reports
from farspan.report.markdown import markdown_page
from farspan.report.runs import grouped, read_sources
from farspan.report.sections import contents
from farspan.terminal import shown

PAGE, TABLES = "report.html", "report.md"
CSV = ("quality.csv", "curves.csv", "memory_lengths.csv", "perplexity.csv", "positions.csv", "depths.csv")


def write_report(
    folders: Sequence[str | Path], out: Path, notice: Callable[[str], None] = lambda line: None
) -> list[Path]:
    """Write report.html and report.md of some runs into a folder, with quality.csv and the CSV files of the runs'
    tasks; return their paths.

    Runs without rows are left out, each with a notice; notices also name runs that are not finished, and models with
    the same weights.

    Raises:
        ValueError: no run with rows, a folder with something other than a run, an output folder with files of these
            names that farspan did not write, or a missing package of the extra `report`.
    """
    template = _environment().get_template("page.html.j2")
    plotly = optional_import("plotly.offline", "report").get_plotlyjs()
    scripts = [plotly, (Path(__file__).parent / "page.js").read_text("utf-8")]
    assert not any("</script" in script.lower() for script in scripts)
    sources = read_sources(folders, notice)
    groups = grouped(sources, MEMBERS)
    out = expanded(out)
    refuse_file(out)
    _refuse_others(out)
    parts = reports(groups, out)
    context = contents(sources, groups, parts)
    for line in context["notes"]:
        notice(line)
    drawn = {
        figure["id"]: {"data": figure["data"], "layout": figure["layout"]}
        for section in context["groups"]
        for figure in section["figures"]
    }
    tables = {"quality.csv": quality_table([cell for group in groups for cell in cells_of(group)])}
    for part in parts:
        tables |= part.csv_tables()
    html = template.render(context, figures=drawn, scripts=scripts, hashes=[_hash(s) for s in scripts])
    out.mkdir(parents=True, exist_ok=True)
    write(out / PAGE, html)
    write(out / TABLES, shown(markdown_page(context, list(tables))))
    for name in set(CSV) - {*tables}:  # of an earlier report of other runs
        (out / name).unlink(missing_ok=True)
    return [out / PAGE, out / TABLES, *(write_csv(out / name, table) for name, table in tables.items())]


def _refuse_others(out: Path) -> None:
    """Raise ValueError where a file in the place of one of the report's was not written by farspan."""
    page = out / PAGE
    ours = page.is_file() and b'id="figures"' in page.read_bytes()
    if not ours and (found := [name for name in (PAGE, TABLES, *CSV) if (out / name).exists()]):
        raise ValueError(
            f"{out} contains {found[0]}, which farspan did not write. Move or delete it, or choose another folder (out)"
        )


def _environment() -> Any:
    jinja2 = optional_import("jinja2", "report")
    markupsafe = optional_import("markupsafe", "report")

    def breaks(text: str) -> Any:
        """Allow line breaks after each comma, colon, slash and plus of a name, but not within its words."""
        return markupsafe.Markup(re.sub(r"(?<=[,:/+])(?=.)", "<wbr>", str(markupsafe.escape(text))))

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breaks"] = breaks
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}  # of `tojson`
    return environment


def _hash(script: str) -> str:
    """Return a script's hash as a content security policy names it."""
    return f"'sha256-{b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
