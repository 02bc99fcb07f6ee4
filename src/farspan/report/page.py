"""Runs on one page: self-contained HTML that opens from disk offline, with Markdown and CSV beside it.

A pure function of what the runs hold. Everything in them may come from a stranger's model, text or file name: the
template escapes it, figures.py escapes what plotly would read as HTML, and the page's content security policy lets
nothing be loaded and no script run but the page's own.
"""

import hashlib
import json
from base64 import b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from farspan.extras import optional_import
from farspan.files import write
from farspan.record import refuse_file
from farspan.report import perplexity
from farspan.report.export import markdown_page, write_curves, write_memory_lengths, write_perplexity, write_positions
from farspan.report.sections import contents
from farspan.report.tables import grouped, read_sources
from farspan.terminal import shown

NAMES = ("report.html", "report.md", "curves.csv", "memory_lengths.csv", "perplexity.csv", "positions.csv")


def write_report(
    folders: Sequence[str | Path], out: Path, notice: Callable[[str], None] = lambda line: None
) -> list[Path]:
    """Writes report.html and report.md of some runs into a folder, and beside them, of what the runs hold, curves.csv
    and memory_lengths.csv, perplexity.csv and positions.csv; returns their paths.

    Runs without rows are left out, each with a notice.

    Raises:
        ValueError: no run with rows, something that is no run, a folder with such files of others, or a package of the
            extra `report` is missing.
    """
    template = _environment().get_template("page.html.j2")
    plotly = optional_import("plotly.offline", "report").get_plotlyjs()
    scripts = [plotly, (Path(__file__).parent / "page.js").read_text("utf-8")]
    assert not any("</script" in script.lower() for script in scripts)
    sources = read_sources(folders, notice)
    groups, expected = grouped(sources), perplexity.grouped(sources)
    out = Path(out)
    refuse_file(out)
    _refuse_others(out)
    context = contents(sources, groups, expected)
    drawn = {
        place: figure
        for section in (*context["groups"], *context["perplexity"], *context["comparisons"])
        for place, figure in section["figures"].items()
    }
    html = template.render(context, figures=_for_script(drawn), scripts=scripts, hashes=[_hash(s) for s in scripts])
    out.mkdir(parents=True, exist_ok=True)
    for name, text in (("report.html", html), ("report.md", shown(markdown_page(context)))):
        write(out / name, text)
    written = [out / "report.html", out / "report.md"]
    if groups or not expected:
        written += [write_curves(groups, out / "curves.csv"), write_memory_lengths(groups, out / "memory_lengths.csv")]
    if expected:
        written.append(write_perplexity(expected, out / "perplexity.csv"))
    if any(one.series.ends for group in expected for one in group.members):
        written.append(write_positions(expected, out / "positions.csv"))
    return written


def _refuse_others(out: Path) -> None:
    """Raises ValueError where a file in the place of one of the report's was not written by farspan."""
    page = out / "report.html"
    ours = page.is_file() and b'id="figures"' in page.read_bytes()
    if not ours and (found := [name for name in NAMES if (out / name).exists()]):
        raise ValueError(
            f"{out} holds a {found[0]} that is of no report of farspan. Delete it, or choose another folder (--out)"
        )


def _environment() -> Any:
    jinja2 = optional_import("jinja2", "report")
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _hash(script: str) -> str:
    """As a content security policy names a script that may run."""
    return f"'sha256-{b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _for_script(value: Any) -> str:
    """JSON that a <script> element can hold: nothing in it ends the element or begins a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
