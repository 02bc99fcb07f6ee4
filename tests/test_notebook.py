"""The notebook of examples/ and the script that executes notebooks."""

import json
import os
import re
import resource
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from pages import masked

ROOT = Path(__file__).parents[1]
TUTORIAL = ROOT / "examples" / "tutorial.ipynb"
MOST_BYTES = 250_000
MOST_SECONDS = 45  # of CPU


def outputs(path: Path) -> list[Any]:
    cells = [cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    every = [output for cell in cells for output in cell["outputs"]]
    return [output for output in every if output["output_type"] != "stream"]  # lines of progress, where it is slow


def html(path: Path) -> str:
    return "".join("".join(output.get("data", {}).get("text/html", "")) for output in outputs(path))


def words(path: Path) -> str:
    """Return what the cells show as HTML, without tags and numbers."""
    return masked(unescape(re.sub(r"<[^>]+>", " ", html(path))))


def execute(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / "packaging" / "notebook.py"), str(path)]
    return subprocess.run(words, capture_output=True, text=True, cwd=path.parent, env=os.environ | environment)


def notebook(path: Path, source: str, kernel: str = "python3") -> Path:
    cell = {"cell_type": "code", "id": "a", "source": source, "metadata": {}, "outputs": [], "execution_count": None}
    about = {"kernelspec": {"name": kernel, "display_name": kernel, "language": "python"}}
    path.write_text(json.dumps({"cells": [cell], "metadata": about, "nbformat": 4, "nbformat_minor": 5}))
    return path


def test_the_tutorial_is_kept_executed_small_and_without_places_of_a_machine() -> None:
    assert TUTORIAL.stat().st_size < MOST_BYTES
    assert {output["output_type"] for output in outputs(TUTORIAL)} <= {"execute_result", "display_data"}
    assert "half-life" in html(TUTORIAL)
    assert html(TUTORIAL).count("<img") == 2
    text = TUTORIAL.read_text("utf-8")
    assert not any(place in text for place in ("/tmp/", "/home/", "/root/", "/work/"))


@pytest.mark.timeout(1200)
def test_the_tutorial_shows_what_its_cells_give_now(tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    copy = tmp_path / TUTORIAL.name
    copy.write_bytes(TUTORIAL.read_bytes())
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = execute(copy)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < MOST_SECONDS
    assert words(copy) == words(TUTORIAL), "make notebook stores the outputs again"
    assert len(outputs(copy)) == len(outputs(TUTORIAL))
    assert (tmp_path / "runs" / "kept" / "curve.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("source", "kernel", "error"),
    [
        ("1 / 0", "python3", "a cell raised ZeroDivisionError: division by zero. Correct the cell"),
        ("1", "lisp", "kernel 'lisp' is not installed: pip install 'farspan[notebook]', or choose another kernel"),
        ("1", "broken", "kernel 'broken' does not start or died"),
        ("import os; os._exit(3)", "python3", "kernel 'python3' does not start or died"),
    ],
)
def test_what_stops_a_notebook_is_one_line(source: str, kernel: str, error: str, tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    broken = tmp_path / "kernels" / "broken"
    broken.mkdir(parents=True)
    about = {"argv": [sys.executable, "-c", "raise SystemExit(3)"], "display_name": "broken", "language": "python"}
    (broken / "kernel.json").write_text(json.dumps(about))
    path = notebook(tmp_path / "one.ipynb", source, kernel)
    before = path.read_bytes()
    done = execute(path, JUPYTER_PATH=str(tmp_path))
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "[IPKernelApp]" not in line]  # a kernel's own lines
    assert line.startswith(f"error: {path}: ")
    assert error in line
    assert path.read_bytes() == before


def test_what_is_no_notebook_and_a_missing_extra_are_one_line(tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    (tmp_path / "no.ipynb").write_text("{")
    done = execute(tmp_path / "no.ipynb")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path / 'no.ipynb'} is not a notebook: ")
    assert done.stderr.count("\n") == 1
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['nbclient'] = None")
    path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = execute(tmp_path / "no.ipynb", PYTHONPATH=os.pathsep.join(path))
    assert done.stderr == "error: this needs the package nbclient: pip install 'farspan[notebook]'\n"
