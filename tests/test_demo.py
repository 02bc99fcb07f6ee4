"""The demonstration, the examples and the embedded model, as a user runs them."""

import json
import resource
import runpy
import subprocess
import sys
from importlib import import_module
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from pages import BLOCK, shows

ROOT = Path(__file__).parents[1]
ASSETS = Path(str(files("farspan"))) / "assets" / "demo"
# `farspan demo` with a sixth of the repeats and half of the lengths; _options sets the environment of its imports
DEMO = """
from farspan.cli import commands, main
commands._options()
from farspan import demo
demo.REPEATS = 2
demo.LENGTHS = demo.LENGTHS[1::2]
main()
"""


def test_the_demo_ends_with_lengths_a_picture_and_the_next_command(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DEMO, "demo", "--out", str(tmp_path / "demo")]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # of the process alone, whatever else the machine does; the whole demo takes thrice as many, and less than a minute
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 35
    for said in ("half-life", "reach", "picture:", "farspan curve MODEL"):
        assert said in done.stdout
    assert (tmp_path / "demo" / "curve.png").stat().st_size > 10_000
    assert not done.stderr
    readme = (ROOT / "README.md").read_text("utf-8")
    (sample,) = (content for language, _, content in BLOCK.findall(readme) if language == "text")
    shows(done.stdout, sample)


def test_the_embedded_model_is_small_and_bf16() -> None:
    weights = ASSETS / "model.safetensors"
    assert weights.stat().st_size <= 8 * 2**20
    with safe_open(weights, "pt") as tensors:
        assert {tensors.get_tensor(name).dtype for name in tensors.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_the_embedded_model_comes_with_its_card_config_and_log() -> None:
    assert {"README.md", "training.json", "log.jsonl", "config.json", "tokenizer.json"} <= {
        path.name for path in ASSETS.iterdir()
    }


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    assert "half-life" in capsys.readouterr().out


def test_the_embedded_model_remembers_inside_its_window_and_not_at_twice_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # as for a script that is run: its neighbours can be imported
    script = import_module("embedded_model")
    measure = script.measure
    monkeypatch.setattr(script, "measure", lambda *given, **settings: measure(*given, **settings | {"repeats": 3}))
    monkeypatch.setattr(script, "LENGTHS", (64, 254, 511))
    texts = (script.TEXTS[0], "builtin:held-out", script.TEXTS[2])  # 30 million characters of training text take long
    monkeypatch.setattr(script, "TEXTS", texts)
    monkeypatch.setattr(sys, "argv", ["embedded_model.py", "--quick", "--out", str(tmp_path)])
    script.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    natural = figures["builtin:held-out+tests"]
    assert natural["copy"]["64"] > natural["control"]["64"] + 0.2
    assert figures["shuffled_inside"] > 0.3
    assert figures["shuffled_at_twice_the_window"] < 0.05
