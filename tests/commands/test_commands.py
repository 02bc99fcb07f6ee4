"""Every command on every page, executed on the embedded model in the order of its page: `make test-pages`.

tests/commands/conftest.py has the files that pages name, so that commands are executed as they are written, with the
changes of `SMALLER`. What a page shows of the output is compared, except for numbers.
"""

import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path

import pytest
import shellingham
from transformers.utils.logging import disable_progress_bar, enable_progress_bar
from typer.testing import CliRunner

from farspan.cli import app

from pages import PAGES, ROOT, examples, shows

# pages whose commands tests/test_docs.py executes
ELSEWHERE = {page for page in PAGES if page.parent.name == "howto" or page.name == "tutorial.md"}
EXECUTED = {"demo": "tests/test_demo.py, which also compares the output that the README shows"}

STEPS = " --set trainer.steps=2 --set trainer.batch=2 --set trainer.micro_batch=2"
TEXTS = STEPS + " --set data.text=books/"
SHORT = TEXTS + " --set data.decoder=64 --set data.chunks=2 --set data.chunk=32"
SMALLER = (  # expressions and what replaces them, for runs that would take minutes
    (r"--lengths (1024:65536|512:16384)", "--lengths 320,511"),
    (r" --gpus-per-model 4", ""),  # tests/distributed has a cluster that declares GPUs
    (r"--lengths (8192(,32768)?|20480)\b", "--lengths 1024"),
    (r"--lengths 2048,8192,16384\b", "--lengths 512,1024"),
    (r"--lengths 2048,4096$", "--lengths 2048 --repeats 3"),
    (r"--lengths 10,100,300 --repeats 60", "--lengths 10,40 --repeats 3"),
    (r"--repeats 100?\b", "--repeats 3"),
    (r"^compare (demo|MODEL)\w* (?!.*(--lengths|runs/search)).*--task curve.*", r"\g<0> --lengths 320,511 --repeats 3"),
    (r"^task qa:.*", r"\g<0> --lengths 1,5 --repeats 3"),
    (r"^search rope MODEL.*|--evaluations 12", r"\g<0> --evaluations 4 --repeats 4"),
    (r"^train lm llama-83m", r"\g<0> --set data.held_out=books/ --set trainer.window=64 --set trainer.bf16=false"
     " --set tokenizer.vocabulary=512 --set model.layers=2 --set model.hidden=64" + TEXTS),
    (r"^train smt smt-demo", r"\g<0> --set lengths.target=1024" + TEXTS),
    (r"^train smt (configs/)?smt-smollm2.*", r"\g<0> --set model.name=MODEL --set out=models/smollm2"
     " --set model.window=384 --set lengths.target=1152"
     " --set model.rope=rope:type=yarn,factor=4 --set lengths.first=576 --set lengths.by=576" + TEXTS),
    (r"^train mlm .*", r"\g<0> --set data.held_out=books/ --set trainer.window=64"
     " --set encoder.layers=1 --set encoder.hidden=64 --set encoder.feed_forward=64 --set encoder.heads=2" + STEPS),
    (r"^train (cepe|distill) .*", r"\g<0>" + SHORT),
)  # fmt: skip
ALL = [(page, *one) for page in PAGES if page not in ELSEWHERE for one in dict.fromkeys(examples(page))
       if one[0] not in EXECUTED]  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command line turns progress bars off by a variable that is read before a test begins."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # by default workers wait for all other processes
    disable_progress_bar()
    yield
    enable_progress_bar()


def folder_of(page: Path, files: Path) -> Path:
    """Return the folder of a page, in which its commands run one after the other."""
    folder = files.parent / f"page-{page.stem}"
    if not folder.exists():
        shutil.copytree(files, folder, symlinks=True)
    return folder


@contextmanager
def cluster(command: str) -> Iterator[None]:
    """A cluster of Ray, for a command that needs one."""
    if "--ray auto" not in command:
        yield
        return
    ray = pytest.importorskip("ray")
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.2")
    try:
        yield
    finally:
        ray.shutdown()


def smaller(command: str) -> str:
    for pattern, replacement in SMALLER:
        command = re.sub(pattern, replacement, command)
    return command


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default::ResourceWarning")  # of Ray
@pytest.mark.parametrize(
    ("page", "command", "shown"), ALL, ids=[f"{page.stem}-{command[:70]}" for page, command, _ in ALL]
)
def test_a_command_of_a_page_runs_and_prints_what_the_page_shows(
    page: Path, command: str, shown: str, files: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder_of(page, files))
    monkeypatch.setenv("HOME", str(files.parent))  # where --install-completion and Ray write
    monkeypatch.setattr(shellingham, "detect_shell", lambda: ("bash", "/bin/bash"))
    words = shlex.split(smaller(command).replace("http://127.0.0.1:8000", server))
    words = [part for word in words for part in (sorted(glob(word)) if "*" in word else [word])]
    with cluster(command):
        result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, f"{shlex.join(words)}\n{result.output}\n{result.exception!r}"
    shows(result.output, shown)
    if "--plan" in words and "--calibrate" not in words:  # whose numbers are the same on every machine
        assert [line.strip() for line in shown.splitlines() if line.strip() not in result.output] == []


def test_no_change_of_a_command_is_left_over() -> None:
    commands = [command for _, command, _ in ALL]
    assert len(commands) > 70
    assert all(any(re.search(pattern, command) for command in commands) for pattern, _ in SMALLER)
    assert all(name in dict(examples(ROOT / "README.md")) for name in EXECUTED)
