"""Bounds of the source that keep it small: files, functions, the top level, imports and names."""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import farspan
from farspan.lm import LM

SOURCE = Path(farspan.__file__).parent
MOST_FILE_LINES = 450
MOST_FUNCTION_LINES = 80
MOST_AT_TOP = 24  # modules and packages
NOT_ON_WINDOWS = ("fcntl", "resource")
IMPORTS = f"""
import sys
from pathlib import Path
from types import SimpleNamespace as Config
import psutil  # on Linux it needs resource itself
sys.modules.update(dict.fromkeys({NOT_ON_WINDOWS}))  # importing them raises ImportError
import farspan
assert set(farspan.__all__) <= set(dir(farspan))
assert "torch" not in sys.modules and "numpy" not in sys.modules
from farspan.report.page import write_report
import farspan.report.terminal
farspan.open_run("run").table()
write_report(["run"], Path("report"))
assert "torch" not in sys.modules
import farspan.lm
from farspan.loading import own_module
assert "farspan.cepe" not in sys.modules  # a model type of its own: imported when the first such model is loaded
assert own_module(Config(do_cross_attention=True)) is None
assert own_module(Config(do_cross_attention=True, encoder_config={{"model_type": "llama"}})) is not None
assert "farspan.cepe" in sys.modules
for name in farspan.__all__:
    getattr(farspan, name)
"""


@cache
def parsed() -> dict[str, ast.Module]:
    """The syntax tree of each module by its name; that of a package is its __init__."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = ("farspan", *path.relative_to(SOURCE).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text("utf-8"))
    return found


def imported(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Yield the modules of farspan that a module imports, at once or later, in a function."""
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in known else node.module for name in names)


def test_every_file_is_short() -> None:
    lines = {str(path.relative_to(SOURCE)): len(path.read_text("utf-8").splitlines()) for path in SOURCE.rglob("*.py")}
    assert {name: count for name, count in lines.items() if count > MOST_FILE_LINES} == {}


def test_every_function_is_short() -> None:
    functions = (
        (name, node)
        for name, tree in parsed().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    lines = {f"{name}.{node.name}": (node.end_lineno or 0) - node.lineno + 1 for name, node in functions}
    assert {name: count for name, count in lines.items() if count > MOST_FUNCTION_LINES} == {}


def test_the_top_level_has_few_modules_and_packages() -> None:
    at_top = {name for name in parsed() if name.count(".") == 1} - {"farspan.__main__"}
    assert len(at_top) <= MOST_AT_TOP


def test_no_modules_import_each_other() -> None:
    known = set(parsed())
    graph = {name: set(imported(tree, known)) - {name} for name, tree in parsed().items()}
    assert len(graph["farspan.measuring.grid"]) > 10
    TopologicalSorter(graph).prepare()  # raises CycleError, which lists the modules of a cycle


def test_every_class_has_a_name_of_its_own() -> None:
    owners = defaultdict(list)
    for name, tree in parsed().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                owners[node.name].append(name)
    assert {name: modules for name, modules in owners.items() if len(modules) > 1} == {}


def test_a_process_imports_what_it_needs_when_it_needs_it_and_nothing_that_windows_lacks(
    lm: LM, tmp_path: Path
) -> None:
    """Public names are listed, a run is opened and its page written without torch; then all names are imported."""
    farspan.curve(lm, text=["the quick brown fox " * 50], lengths=(4,), repeats=2, out=tmp_path / "run")
    program = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000
