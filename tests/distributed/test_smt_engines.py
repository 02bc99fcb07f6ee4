"""Sparse Memory Training on two processes, `make test-distributed`: each engine is the one in use, and ends where one
process does."""

import signal
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file
from test_smt import LINES, SENTENCE
from torch import Tensor, testing
from transformers import PreTrainedTokenizerFast

from engines import TIMEOUT, TORCHRUN, losses, signalled, train
from tiny import saved, tiny_model

KILLER = signalled("trainer.state.global_step == 6")
TERMINATED_IN_ONE = signalled('trainer.state.global_step == 4 and os.environ["RANK"] == "1"', "SIGTERM")

pytestmark = pytest.mark.timeout(2 * TIMEOUT)


@pytest.fixture
def folder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    saved(tmp_path / "model", tokenizer)
    (tmp_path / "text").mkdir()
    for number in range(3):
        (tmp_path / "text" / f"{number}.txt").write_text("".join(SENTENCE.format(number * i) for i in range(12)))
    (tmp_path / "a.toml").write_text(LINES)
    (tmp_path / "killer.py").write_text(KILLER)
    (tmp_path / "terminator.py").write_text(TERMINATED_IN_ONE)
    return tmp_path


def run(
    folder: Path,
    out: str,
    *overrides: str,
    processes: int = 2,
    script: str | None = None,
    launcher: tuple[str, ...] = TORCHRUN,
) -> subprocess.CompletedProcess[str]:
    chosen = [f"out={folder / out}", f"model.name={folder / 'model'}", f"data.text={folder / 'text'}"]
    # two forwards a step
    chosen += ["trainer.batch=4", f"trainer.micro_batch={2 // processes}", *overrides]
    return train("smt", folder / "a.toml", chosen, processes, script, launcher)


def weights(folder: Path, out: str) -> dict[str, Tensor]:
    return load_file(folder / out / "model.safetensors")


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "deepspeed"])
def test_two_processes_train_as_one(folder: Path, engine: str) -> None:
    done = run(folder, "two", f"trainer.engine={engine}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rows of 32 tokens, to 128") == 1
    run(folder, "one", "trainer.engine=single", processes=1)
    assert losses(folder, "two") == pytest.approx(losses(folder, "one"), rel=2e-3)
    one, two = weights(folder, "one"), weights(folder, "two")
    before = load_file(folder / "model" / "model.safetensors")
    assert one.keys() == two.keys() == before.keys()
    for name in one:
        testing.assert_close(two[name], one[name], rtol=0.1, atol=5e-3)
        if "q_proj" not in name and "k_proj" not in name:
            testing.assert_close(two[name], before[name], rtol=0, atol=0)


@pytest.mark.parametrize(("what", "family"), [("all", "llama"), ("lora", "llama"), ("qk", "gpt_neox")])
def test_whatever_is_trained_can_be_sharded(folder: Path, what: str, family: str) -> None:
    tiny_model(family).save_pretrained(folder / "model")
    rank = ["trained.rank=2"] if what == "lora" else []
    overrides = [f"trained.what={what}", *rank, "optimizer.weight_decay=0.1"]
    for out, engine, processes in (("one", "single", 1), ("two", "fsdp2", 2)):
        done = run(folder, out, f"trainer.engine={engine}", *overrides, processes=processes)
        assert done.returncode == 0, done.stderr
    assert losses(folder, "two") == pytest.approx(losses(folder, "one"), rel=2e-3)
    one, two = weights(folder, "one"), weights(folder, "two")
    assert one.keys() == two.keys() == load_file(folder / "model" / "model.safetensors").keys()
    for name in one:
        if "query_key_value.bias" in name:
            continue  # a bias of the keys moves no attention: AdamW makes steps of its gradient's noise
        testing.assert_close(two[name], one[name], rtol=0.1, atol=5e-3)


def test_a_watched_training_on_two_processes_ends(folder: Path) -> None:
    (folder / "held-out.txt").write_text("".join(SENTENCE.format(f"{i} of {i * i}") for i in range(90)))
    watch = [f"watch.text={folder / 'held-out.txt'}", "watch.every=6", "watch.repeats=2", "watch.tokens=20000"]
    done = run(folder, "two", "trainer.engine=ddp", *watch)
    assert done.returncode == 0, done.stderr
    assert "| 128 |" in (folder / "two" / "README.md").read_text()


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "deepspeed"])
def test_two_processes_that_were_killed_continue_to_the_same_losses(folder: Path, engine: str) -> None:
    run(folder, "whole", f"trainer.engine={engine}")
    done = run(folder, "killed", f"trainer.engine={engine}", script=str(folder / "killer.py"))
    assert done.returncode != 0
    assert str(-signal.SIGKILL.value) in done.stderr
    assert not (folder / "killed" / "model.safetensors").exists()
    done = run(folder, "killed", f"trainer.engine={engine}")
    assert done.returncode == 0, done.stderr
    assert losses(folder, "killed") == losses(folder, "whole")
    for name, weight in weights(folder, "whole").items():
        testing.assert_close(weights(folder, "killed")[name], weight, rtol=0, atol=0)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_both_processes_save_when_one_is_terminated(folder: Path, engine: str) -> None:
    run(folder, "whole", f"trainer.engine={engine}")
    done = run(folder, "stopped", f"trainer.engine={engine}", script=str(folder / "terminator.py"))
    assert done.returncode != 0
    assert [path.name for path in (folder / "stopped" / "checkpoints").glob("checkpoint-*")] == ["checkpoint-5"]
    done = run(folder, "stopped", f"trainer.engine={engine}")
    assert done.returncode == 0, done.stderr
    for name, weight in weights(folder, "whole").items():
        testing.assert_close(weights(folder, "stopped")[name], weight, rtol=0, atol=0)


def test_what_accelerate_launches_is_a_training_on_two_processes(folder: Path) -> None:
    # accelerate itself starts several processes on CPUs through MPI alone, and with the flag of GPUs through torchrun
    launcher = ("accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1")
    launcher = (*launcher, "--mixed_precision=no", "--dynamo_backend=no", "-m")
    done = run(folder, "two", "trainer.engine=ddp", launcher=launcher, script="farspan")
    assert done.returncode == 0, done.stderr
    assert len(losses(folder, "two")) == 6


@pytest.mark.parametrize("engine", ["deepspeed"])
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.bf16=true", "trains in bf16 only on GPUs"),
        ("optimizer.name=muon", 'optimizer.name = "muon" needs whole matrices'),
    ],
)
def test_deepspeed_says_what_it_cannot_do(folder: Path, engine: str, override: str, message: str) -> None:
    done = run(folder, "a", f"trainer.engine={engine}", override)
    assert done.returncode != 0
    assert message in done.stderr


def test_one_process_among_two_is_refused(folder: Path) -> None:
    done = run(folder, "a", "trainer.engine=single")
    assert done.returncode != 0
    assert 'trainer.engine = "single", and the launcher started 2 processes' in done.stderr


def test_a_sharded_model_is_not_watched_in_silence(folder: Path) -> None:
    done = run(folder, "a", "trainer.engine=fsdp2", "watch.every=6")
    assert done.returncode != 0
    assert "parameters are sharded over processes" in done.stderr
