"""CEPE's trainings on two processes, `make test-distributed`: each engine is the one in use, and ends where one process
does, also after a kill."""

import json
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from torch import testing
from transformers import PreTrainedTokenizerFast

import farspan

from cepe_models import tiny_encoder
from engines import TIMEOUT, losses, signalled, train
from tiny import saved

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "mu", "nu"]
TRAINED = """
[optimizer]
lr = 1e-2
warmup_steps = 1
decay_fraction = 0.5
[trainer]
steps = 6
batch = 4
bf16 = false
log_every = 1
save_every = 3
"""
LINES = f"""
[model]
dtype = "float32"
[data]
decoder = 24
chunks = 3
chunk = 8
[watch]
every = 0
{TRAINED}"""
ENCODER_LINES = f"""
[encoder]
hidden = 32
feed_forward = 48
layers = 2
heads = 2
{TRAINED}
window = 32
evaluate_every = 3
"""

pytestmark = pytest.mark.timeout(3 * TIMEOUT)


@pytest.fixture
def folder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    saved(tmp_path / "decoder", tokenizer)
    tiny_encoder().save_pretrained(tmp_path / "encoder")
    rng = np.random.default_rng(0)
    lines = [json.dumps({"text": " ".join(rng.choice(WORDS, 300))}) for _ in range(6)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "a.toml").write_text(LINES)
    (tmp_path / "mlm.toml").write_text(ENCODER_LINES)
    killer = signalled("trainer.state.global_step == 4")  # a checkpoint was saved after step 3
    (tmp_path / "killer.py").write_text(killer)
    return tmp_path


def run(
    folder: Path, recipe: str, out: str, engine: str, *overrides: str, script: str | None = None
) -> subprocess.CompletedProcess[str]:
    processes = 1 if engine == "single" else 2
    names = {"model.name": "decoder", "model.encoder": "encoder"}
    if recipe == "mlm":
        names = {"decoder": "decoder", "data.held_out": "a.jsonl"}
    chosen = [f"out={folder / out}", *(f"{key}={folder / name}" for key, name in names.items())]
    chosen += [f"data.text={folder / 'a.jsonl'}", f"trainer.micro_batch={2 // processes}"]
    chosen += [f"trainer.engine={engine}", *(["distill={}"] if recipe == "distill" else []), *overrides]
    return train(recipe, folder / ("mlm.toml" if recipe == "mlm" else "a.toml"), chosen, processes, script)


def assert_trained_alike(folder: Path, one: str, other: str) -> None:
    assert losses(folder, other) == pytest.approx(losses(folder, one), rel=1e-4)
    a, b = (load_file(folder / out / "cepe_adapter.safetensors") for out in (one, other))
    assert a.keys() == b.keys()
    for name in a:
        testing.assert_close(b[name], a[name], rtol=0.1, atol=5e-3)


@pytest.mark.parametrize("recipe", ["cepe", "distill"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "deepspeed"])
def test_two_processes_train_as_one(folder: Path, engine: str, recipe: str) -> None:
    for chosen in ("single", engine):
        done = run(folder, recipe, chosen, chosen)
        assert done.returncode == 0, done.stderr
    assert_trained_alike(folder, "single", engine)
    farspan.load(folder / engine, device="cpu")  # refuses an adapter that is not its base's


@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])
def test_two_processes_train_an_encoder_as_one(folder: Path, engine: str) -> None:
    for chosen in ("single", "ddp", engine):
        done = run(folder, "mlm", chosen, chosen)
        assert done.returncode == 0, done.stderr
    assert losses(folder, "ddp") == pytest.approx(losses(folder, "single"), rel=1e-4)
    assert losses(folder, engine) == pytest.approx(losses(folder, "ddp"), rel=1e-4)
    one, two = (load_file(folder / out / "model.safetensors") for out in ("ddp", engine))
    assert one.keys() == two.keys()
    for name in one:
        testing.assert_close(two[name], one[name], rtol=0.1, atol=5e-3)


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("cepe", ("model.dtype=bfloat16", "trainer.activation_checkpointing=true")),  # beside what is trained in fp32
        ("distill", ("distill.stored=false", "trainer.steps=2")),  # a sharded teacher is asked at each step
    ],
)
def test_a_sharded_decoder_trains_as_a_whole_one(folder: Path, recipe: str, overrides: tuple[str, ...]) -> None:
    for engine in ("single", "fsdp2"):
        done = run(folder, recipe, engine, engine, *overrides)
        assert done.returncode == 0, done.stderr
    assert_trained_alike(folder, "single", "fsdp2")


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "deepspeed"])
def test_two_processes_that_were_killed_continue_to_the_same_losses(folder: Path, engine: str) -> None:
    run(folder, "cepe", "whole", engine)
    done = run(folder, "cepe", "killed", engine, script=str(folder / "killer.py"))
    assert done.returncode != 0
    assert str(-signal.SIGKILL.value) in done.stderr
    assert (folder / "killed" / "checkpoints" / "checkpoint-3").is_dir()
    assert not (folder / "killed" / "cepe_adapter.safetensors").exists()
    done = run(folder, "cepe", "killed", engine)
    assert done.returncode == 0, done.stderr
    assert losses(folder, "killed") == losses(folder, "whole")
    kept = load_file(folder / "killed" / "checkpoints" / "checkpoint-6" / "model.safetensors")
    assert all(name.startswith("encoder.") or ".cross_attn." in name for name in kept)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [(["optimizer.name=muon"], "needs whole matrices"), (["watch.every=2"], "parameters are sharded over")],
)
def test_what_cannot_be_sharded_is_refused(folder: Path, overrides: list[str], message: str) -> None:
    done = run(folder, "cepe", "a", "fsdp2", *overrides)
    assert done.returncode != 0
    assert message in done.stderr
