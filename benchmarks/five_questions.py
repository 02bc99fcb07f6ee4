"""How long the commands of the five how-to pages take on a model.

    python benchmarks/five_questions.py [--model FOLDER] [--replace OLD NEW] [--out FOLDER]

Each page of docs/howto answers one question. Its files are written and its commands run as they are on the page, each
in a process of its own, in one folder. `demo` stands for the model. Two pages also need the model `longer`, which the
tutorial trains in 8 steps. The CPU time is that of the process and its children. A failed command ends the measurement.

For a model with another trained length the lengths on the pages are not fitting: replace them, such as `--replace
'target = 2048' 'target = 8192'`. Last line: the figures as JSON.
"""

import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import parser_of, run_script, table

DOCS = Path(__file__).resolve().parents[1] / "docs"
TUTORIAL = DOCS / "tutorial.md"
BLOCK = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)
WORSE = 3  # the exit code of `farspan check` for a model that is worse: a result


def page_of(path: Path, model: str, replaced: list[tuple[str, str]]) -> tuple[str, dict[str, str], list[str]]:
    """The title of a page, its files by name, and its commands, with another model in the place of `demo`."""
    text = path.read_text("utf-8")
    for old, new in replaced:
        text = text.replace(old, new)
    files, commands = {}, []
    for language, name, content in BLOCK.findall(text):
        if name:
            files[name] = content.replace('name = "demo"', f"name = {json.dumps(model)}")
        elif language == "sh":
            lines = content.replace("\\\n", " ").splitlines()
            commands += [line for line in lines if line.startswith("farspan ")]
    return text.splitlines()[0].removeprefix("# "), files, commands


def timed(command: str, model: str, folder: Path) -> dict[str, Any]:
    """CPU and wall seconds of a command, which runs in a folder.

    Raises:
        SystemExit: the command fails; what it printed.
    """
    words = [model if word == "demo" else word for word in shlex.split(command)[1:]]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "farspan", *words], cwd=folder, capture_output=True, text=True)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, WORSE if words[0] == "check" else 0):
        raise SystemExit(f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"command": " ".join(command.split()), "cpu": round(cpu, 1), "wall": round(wall, 1)}


def measured(model: str, replaced: list[tuple[str, str]], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The times of the commands of each page, by its title, after the tutorial's training."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in (TUTORIAL, *sorted((DOCS / "howto").glob("*.md"))):
        title, files, commands = page_of(path, model, replaced)
        for name, content in files.items():
            (folder / name).write_text(content, "utf-8")
        if path == TUTORIAL:
            commands = [command for command in commands if command.startswith("farspan train ")]
        found[title] = []
        for command in commands:
            found[title].append(one := timed(command, model, folder))
            print(f"{one['cpu']:7.1f} s CPU {one['wall']:7.1f} s  {one['command']}", file=sys.stderr, flush=True)
    return found


def times_table(found: dict[str, list[dict[str, Any]]]) -> str:
    lines = []
    for title, times in found.items():
        lines += [[title, f"`{one['command']}`", f"{one['cpu']:.1f}", f"{one['wall']:.1f}"] for one in times]
        if len(times) > 1:
            lines.append([title, "all", *(f"{sum(one[name] for one in times):.1f}" for name in ("cpu", "wall"))])
    return table(["page", "command", "CPU, s", "wall, s"], lines)


def main() -> None:
    parser = parser_of(__doc__, check=None)
    parser.add_argument("--model", default="demo", help="folder or hub id; default the embedded model")
    parser.add_argument("--replace", nargs=2, action="append", default=[], metavar=("OLD", "NEW"), help="in all pages")
    parser.add_argument("--out", type=Path, help="folder to work in, which is kept; default a temporary one")
    asked = parser.parse_args()
    model = str(Path(asked.model).resolve()) if Path(asked.model).is_dir() else asked.model
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["FARSPAN_CACHE"] = str(folder / "cache")  # texts are tokenised as on a first day
        found = measured(model, [tuple(pair) for pair in asked.replace], folder)
    print(times_table(found))
    print(json.dumps({"model": asked.model, "replaced": asked.replace, "pages": found}))


if __name__ == "__main__":
    run_script(main)
