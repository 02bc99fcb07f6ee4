"""Trainings on several processes: how they are started, killed and read."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

TIMEOUT = 1000  # seconds
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")


def signalled(when: str, signal: str = "SIGKILL") -> str:
    """The source of a `farspan` that gets a signal before a step of its training for which `when` is true."""
    return f"""
import os, signal
from farspan.cli import main
from farspan.train.terms_trainer import TermsTrainer
step = TermsTrainer.training_step

def training_step(trainer, *others, **named):
    if {when}:
        os.kill(os.getpid(), signal.{signal})
    return step(trainer, *others, **named)

TermsTrainer.training_step = training_step
main()
"""


def train(
    recipe: str, config: Path, chosen: Iterable[str], processes: int,
    script: str | None = None, launcher: tuple[str, ...] = TORCHRUN,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """`farspan train`, or a script in its place, with chosen settings."""
    command = [sys.executable, *(("-m", *launcher) if processes > 1 else ())]
    command += [script] if script else ["-m", "farspan"]
    command += ["train", recipe, str(config), *(part for one in chosen for part in ("--set", one))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=TIMEOUT)


def losses(folder: Path, out: str) -> list[float]:
    log = [json.loads(line) for line in (folder / out / "log.jsonl").read_text().splitlines()]
    return [entry["loss"] for entry in log if "loss" in entry]
