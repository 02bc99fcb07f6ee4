"""CEPE's trainings on two processes, `make test-distributed`: they end where one process does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from torch import testing
from transformers import PreTrainedTokenizerFast

from cepe_models import tiny_encoder
from tiny import tiny_model

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "mu", "nu"]
LINES = """
[model]
dtype = "float32"
[data]
decoder = 24
chunks = 3
chunk = 8
[optimizer]
lr = 1e-2
warmup_steps = 1
decay_fraction = 0.5
[trainer]
steps = 6
batch = 4
bf16 = false
log_every = 2
save_every = 3
[watch]
every = 0
"""


@pytest.fixture
def folder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    tiny_model().save_pretrained(tmp_path / "decoder")
    tokenizer.save_pretrained(tmp_path / "decoder")
    tiny_encoder().save_pretrained(tmp_path / "encoder")
    rng = np.random.default_rng(0)
    lines = [json.dumps({"text": " ".join(rng.choice(WORDS, 300))}) for _ in range(6)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "a.toml").write_text(LINES)
    return tmp_path


def run(folder: Path, recipe: str, out: str, processes: int, *overrides: str) -> subprocess.CompletedProcess[str]:
    chosen = [f"out={folder / out}", f"model.name={folder / 'decoder'}", f"model.encoder={folder / 'encoder'}"]
    chosen += [f"data.text={folder / 'a.jsonl'}", f"trainer.micro_batch={2 // processes}", *overrides]
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "farspan", "train", recipe, str(folder / "a.toml")]
    command += [part for one in chosen for part in ("--set", one)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)


@pytest.mark.parametrize("recipe", ["cepe", "distill"])
def test_two_processes_train_as_one(folder: Path, recipe: str) -> None:
    for out, processes, engine in (("two", 2, "ddp"), ("one", 1, "single")):
        done = run(folder, recipe, out, processes, f"trainer.engine={engine}")
        assert done.returncode == 0, done.stderr
    logs = [
        [json.loads(line) for line in (folder / out / "log.jsonl").read_text().splitlines()] for out in ("one", "two")
    ]
    one, two = ([entry["loss"] for entry in log if "loss" in entry] for log in logs)
    assert two == pytest.approx(one, rel=1e-4)
    a, b = (load_file(folder / out / "cepe_adapter.safetensors") for out in ("one", "two"))
    assert a.keys() == b.keys()
    for name in a:
        testing.assert_close(b[name], a[name], rtol=0.1, atol=5e-3)
