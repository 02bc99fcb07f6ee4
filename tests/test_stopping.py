"""SIGINT and SIGTERM end a command with one line, whenever they come."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farspan.loading.places import DEMO

from tiny import CODE

BEGINNING = """
import sys, time
from farspan.cli import stopping
def command():
    try:
        print("begun", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        if "swallow" not in sys.argv:
            raise
"""
BY_PLAIN_CODE = BEGINNING + "stopping.run(command)"
BY_A_COMMAND = (
    BEGINNING
    + """
import typer
from farspan.cli.messages import one_line_errors
app = typer.Typer()
@app.command()
def reported():
    with one_line_errors("rows are kept"):
        command()
sys.argv[1:] = []
stopping.run(app)
"""
)


def stopped(code: str, by: signal.Signals, *arguments: str) -> tuple[int, str]:
    """Exit code and standard error of Python code that gets a signal once it prints."""
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(by)
        _, errors = process.communicate(timeout=60)
        return process.returncode, errors


@pytest.mark.parametrize(
    ("by", "code", "word"), [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "terminated\n")]
)
@pytest.mark.parametrize("arguments", [(), ("swallow",)], ids=["raised", "swallowed"])
def test_a_signal_outside_of_any_command_ends_in_one_line(
    by: signal.Signals, code: int, word: str, arguments: tuple[str, ...]
) -> None:
    assert stopped(BY_PLAIN_CODE, by, *arguments) == (code, word)


@pytest.mark.parametrize(
    ("by", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_command_reports_what_it_kept_once(by: signal.Signals, code: int, word: str) -> None:
    assert stopped(BY_A_COMMAND, by) == (code, f"{word}: rows are kept\n")


def test_a_signal_that_was_ignored_at_the_start_stays_ignored() -> None:
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + BY_PLAIN_CODE.replace("60", "1")
    assert stopped(code, signal.SIGINT) == (0, "")


@pytest.mark.parametrize(
    ("by", "ends"), [(signal.SIGINT, (130, "interrupted\n")), (signal.SIGTERM, (143, "terminated\n"))]
)
def test_a_signal_in_a_finaliser_ends_the_command_too(by: signal.Signals, ends: tuple[int, str]) -> None:
    finaliser = "class It:\n    def __del__(self):\n        print('begun', flush=True)\n        time.sleep(1)\n"
    command = "def command():\n    it = It()\n    del it\n    time.sleep(60)\n"
    code = f"import time\nfrom farspan.cli import stopping\n{finaliser}{command}stopping.run(command)"
    assert stopped(code, by) == ends


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_end_of_a_command_changes_nothing(by: signal.Signals) -> None:
    at_exit = "atexit.register(lambda: (print('begun', flush=True), time.sleep(1)))"
    code = f"import atexit, time\nfrom farspan.cli import stopping\n{at_exit}\nstopping.run(lambda: None)"
    assert stopped(code, by) == (0, "")


def test_a_measurement_that_is_terminated_keeps_its_rows_and_shows_the_cursor_again(tmp_path: Path) -> None:
    words = f"-m farspan curve {DEMO} --lengths 8:128 --repeats 200 --out run --text {CODE}".split()
    screen, terminal = pty.openpty()
    with subprocess.Popen([sys.executable, *words], cwd=tmp_path, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        deadline = time.monotonic() + 120
        while not ((rows := tmp_path / "run" / "rows.jsonl").exists() and rows.stat().st_size):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.terminate()
        shown = b""
        try:
            while part := os.read(screen, 10_000):
                shown += part
        except OSError:  # the terminal was closed
            pass
        assert process.wait() == 143
    os.close(screen)
    message = b"terminated: the rows measured so far, if any, are kept, and the same command continues"
    assert message in b" ".join(shown.split())
    assert b"Traceback" not in shown
    assert shown.count(b"\x1b[?25l") <= shown.count(b"\x1b[?25h")
