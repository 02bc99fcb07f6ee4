"""Runs on real Ray clusters of several nodes on this machine: the same rows, each once, whatever dies or joins.

A loopback-only machine has no address but those of 127/8, and Ray rewrites 127.0.0.1, so nodes have the ones after it.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from farspan import measure
from farspan.measuring.loop import Watch
from farspan.record import Row, latest, read_header, read_rows

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]
MB = 2**20
METHODS = ["full", "sinks:window=60"]
LENGTHS = (32, 64, 128, 256)
REPEATS = 20
COMMAND = ["perplexity", "demo", "--target-tokens", "16", "--lengths", "32,64,128,256", "--repeats", "20"]
DRIVER = """
import sys
import ray
address = sys.argv.pop(1)
ray.init(address, _node_ip_address="127.0.0.2", log_to_driver=False)
from farspan.cli import main
main()
"""


class Nodes:
    """A cluster; each node has one CPU, so one worker unless GPUs are declared."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # by default workers wait for all other processes of the machine
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112, as Ray spells it
        self.cluster = Cluster()

    def add(self, address: str, **resources: Any) -> Any:
        fixed = {"num_cpus": 1, "object_store_memory": 80 * MB, "include_dashboard": False}
        return self.cluster.add_node(node_ip_address=address, **fixed, **resources)

    def workers(self) -> list[psutil.Process]:
        """Return the processes that measure."""
        below = psutil.Process().children(recursive=True)
        return [one for one in below if one.cmdline()[:1] and one.cmdline()[0].startswith("ray::Worker.measure")]


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    ray = pytest.importorskip("ray")
    nodes = Nodes()
    nodes.add("127.0.0.2")
    yield nodes
    ray.shutdown()
    nodes.cluster.shutdown()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """The rows of one process."""
    return contents(run(tmp_path_factory.mktemp("whole") / "run"))


def run(out: Path, **given: Any) -> list[Row]:
    asked: dict[str, Any] = {"lengths": LENGTHS, "repeats": REPEATS, "out": out}
    return measure(["demo"], METHODS, ["perplexity:target_tokens=16"], **asked, **given).rows


def on(nodes: Nodes, out: Path, **given: Any) -> list[Row]:
    import ray

    ray.init(nodes.cluster.address, _node_ip_address="127.0.0.2", log_to_driver=False)
    return run(out, ray=nodes.cluster.address, **given)


def contents(rows: list[Row]) -> list[tuple[Any, ...]]:
    """Rows without times and memory; nats as far as another batch gives the same."""

    def rounded(value: Any) -> Any:
        return round(value, 4) if isinstance(value, float) else value

    return sorted((*r.key, r.status, json.dumps({name: rounded(v) for name, v in r.scores.items()})) for r in rows)


def writers(out: Path) -> set[int]:
    """Return the numbers of the workers that measured anything."""
    return {int(file.name.split("-")[1]) for file in out.glob("rows-*.jsonl") if file.stat().st_size}


def test_a_killed_worker_is_replaced(nodes: Nodes, tmp_path: Path, whole: list[tuple[Any, ...]]) -> None:
    nodes.add("127.0.0.3")
    killed, notices = list[int](), list[str]()

    def kill(row: Row, done: int, total: int) -> None:
        if done > 8 and not killed and (working := nodes.workers()):
            killed.append(working[0].pid)
            working[0].kill()

    rows = on(nodes, tmp_path / "run", watch=Watch(row=kill, notice=notices.append))
    assert killed
    assert any("Its unit of work is measured again" in line for line in notices)
    assert contents(rows) == whole
    assert len(read_rows(tmp_path / "run")) == len(latest(read_rows(tmp_path / "run"))) == len(whole)


def test_a_node_is_removed_and_another_one_joins(nodes: Nodes, tmp_path: Path, whole: list[tuple[Any, ...]]) -> None:
    second = nodes.add("127.0.0.3")
    changed, notices = list[str](), list[str]()

    def change(row: Row, done: int, total: int) -> None:
        if done > 8 and not changed:
            changed.append("127.0.0.4")
            nodes.cluster.remove_node(second, allow_graceful=False)
            nodes.add("127.0.0.4")

    rows = on(nodes, tmp_path / "run", watch=Watch(row=change, notice=notices.append))
    assert changed
    assert contents(rows) == whole
    assert len(read_rows(tmp_path / "run")) == len(whole)
    assert sum("127.0.0.3 ended" in line for line in notices) >= 1


def test_a_node_that_joins_late_takes_part(nodes: Nodes, tmp_path: Path, whole: list[tuple[Any, ...]]) -> None:
    titles = list[str]()

    def start(title: str, total: int) -> None:
        titles.append(title)
        workers = [one for one in psutil.Process().children(recursive=True) if one.cmdline()[:1]]
        workers = [one for one in workers if one.cmdline()[0].startswith("ray::Worker")]
        if title == "1 workers":  # it waits until the second one has started, which takes seconds
            nodes.add("127.0.0.3")
            for worker in workers:
                worker.suspend()
        elif title == "2 workers":
            for worker in workers:
                worker.resume()

    rows = on(nodes, tmp_path / "run", watch=Watch(start=start))
    assert "2 workers" in titles
    assert len(writers(tmp_path / "run")) == 2
    assert contents(rows) == whole


def test_a_killed_driver_is_repeated_and_goes_on(nodes: Nodes, tmp_path: Path, whole: list[tuple[Any, ...]]) -> None:
    nodes.add("127.0.0.3")
    out = tmp_path / "run"
    methods = [part for one in METHODS for part in ("--method", one)]
    address = nodes.cluster.address
    command = [sys.executable, "-c", DRIVER, address, *COMMAND, *methods, "--out", str(out), "--ray", address]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 400
    while not out.is_dir() or sum(file.stat().st_size > 0 for file in out.glob("rows-*.jsonl")) < 1:
        assert first.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = read_rows(out)
    assert 0 < len(before) < len(whole)
    second = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert second.returncode == 0, second.stderr
    rows = read_rows(out)
    assert contents(rows) == whole
    assert {json.dumps(row.scores) for row in before} <= {json.dumps(row.scores) for row in rows}
    assert "perplexity" in second.stdout
    assert sum(one["command"][1:2] == ["perplexity"] for one in read_header(out)["sessions"]) >= 4  # also the workers


def test_an_address_that_does_not_answer_is_one_line_within_a_minute(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    out = tmp_path / "run"
    command = [sys.executable, "-m", "farspan", "perplexity", "demo", "--target-tokens", "16", "--lengths", "32,64"]
    command += ["--out", str(out)]
    assert subprocess.run(command, capture_output=True, timeout=300, check=False).returncode == 0
    before = (out / "rows.jsonl").read_bytes()
    with socket.create_server(("127.0.0.2", 0)) as silent:
        address = f"127.0.0.2:{silent.getsockname()[1]}"
        started = time.monotonic()
        ended = subprocess.run([*command, "--ray", address], capture_output=True, text=True, timeout=200, check=False)
    assert time.monotonic() - started < 60 + 60  # with the start of Python on a busy machine
    assert ended.returncode == 2
    assert f"error: no Ray cluster answers at {address}" in ended.stderr
    assert (out / "rows.jsonl").read_bytes() == before
