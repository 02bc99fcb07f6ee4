"""The demonstration and the example, as a user runs them."""

import json
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

ROOT = Path(__file__).parents[1]
ASSETS = Path(str(files("farspan"))) / "assets" / "demo"


def test_the_demo_ends_with_lengths_a_picture_and_the_next_command(tmp_path: Path) -> None:
    started = time.monotonic()
    start = "from farspan.cli import main; main()"
    command = [sys.executable, "-c", start, "demo", "--out", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert time.monotonic() - started < 180  # under 60 s on a machine that does nothing else
    for said in ("half-life", "reach", "picture:", "farspan curve MODEL"):
        assert said in done.stdout
    assert (tmp_path / "demo" / "curve.png").stat().st_size > 10_000
    assert not done.stderr


def test_the_embedded_model_is_small_and_bf16() -> None:
    weights = ASSETS / "model.safetensors"
    assert weights.stat().st_size <= 8 * 2**20
    with safe_open(weights, "pt") as tensors:
        assert {tensors.get_tensor(name).dtype for name in tensors.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_the_embedded_model_comes_with_its_card_config_and_log() -> None:
    assert {"README.md", "training.json", "log.jsonl", "config.json", "tokenizer.json"} <= {
        path.name for path in ASSETS.iterdir()
    }


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(script: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "half-life" in done.stdout


def test_the_embedded_model_remembers_inside_its_window_and_not_at_twice_of_it(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "embedded_model.py"
    command = [sys.executable, str(script), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    figures = json.loads(done.stdout.splitlines()[-1])
    natural = figures["builtin:held-out+tests"]
    assert natural["copy"]["64"] > natural["control"]["64"] + 0.2
    assert figures["shuffled_inside"] > 0.3
    assert figures["shuffled_at_twice_the_window"] < 0.05
