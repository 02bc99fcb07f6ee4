"""Models whose heads two processes of a worker divide, on a Ray cluster whose two GPUs are only declared: torch sees
none, and computes on the CPU, with gloo instead of NCCL."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_ray import Nodes

from farspan import measure
from farspan.measuring.loader import Load
from farspan.measuring.loop import Watch
from farspan.record import Row, read_header

from tiny import saved, tiny_tokenizer

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]
METHODS = [
    "full",
    "sinks:window=60",
    "lambda_mask:window=40",
    "rope:type=yarn,factor=2",
    "selfextend:window=64,group=4",
    "dca:chunk=48,local=8",
    "topk:k=16",
    "snapkv:capacity=64",
    "knorm:capacity=64",
    "temperature:original=64",
    "replug:piece=32,tail=16",
]
TASKS = ["curve:protocol=nested", "perplexity:target_tokens=16"]
LENGTHS = (32, 96, 160)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"), tiny_tokenizer())


@pytest.fixture
def address() -> Iterator[str]:
    ray = pytest.importorskip("ray")
    nodes = Nodes()
    nodes.add("127.0.0.2", num_gpus=2)
    ray.init(nodes.cluster.address, _node_ip_address="127.0.0.2", log_to_driver=False)
    yield nodes.cluster.address
    ray.shutdown()
    nodes.cluster.shutdown()


def run(folder: Path, out: Path, methods: list[str] = METHODS, repeats: int = 3, **given: Any) -> list[Row]:
    return measure(
        [str(folder)], methods, TASKS, lengths=LENGTHS, repeats=repeats, out=out, refusals=True, **given
    ).rows


def same_rows(given: list[Row], expected: list[Row]) -> None:
    """Sums of two parts differ in the last digits."""
    for one, other in zip(*(sorted(rows, key=lambda row: row.key) for rows in (given, expected)), strict=True):
        assert (one.key, one.status, one.scores) == (other.key, other.status, pytest.approx(other.scores, abs=1e-4))


def followers() -> list[psutil.Process]:
    below = psutil.Process().children(recursive=True)
    return [one for one in below if "farspan.measuring.followers" in one.cmdline()]


def test_two_processes_give_the_rows_of_one(folder: Path, address: str, tmp_path: Path) -> None:
    seen = set[int]()
    watch = Watch(row=lambda *_: seen.update(one.pid for one in followers()))
    rows = run(folder, tmp_path / "two", ray=address, gpus_per_model=2, watch=watch)
    assert len(seen) == 1
    same_rows(rows, run(folder, tmp_path / "one"))
    assert {row.status for row in rows} == {"ok"}
    one, two = (read_header(tmp_path / name)["models"][str(folder)] for name in ("one", "two"))
    assert one == two
    assert not followers()
    assert run(folder, tmp_path / "two") == rows  # a whole model goes on with the run, and has nothing to measure


def test_bytes_are_those_of_one_device(folder: Path, address: str, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"methods": ["full"], "repeats": 1, "cost": True}
    one, two = (
        {r.length: r.scores for r in run(folder, tmp_path / name, **asked, **given) if r.task == "cost"}
        for name, given in {"one": {}, "two": {"ray": address, "gpus_per_model": 2}}.items()
    )
    assert one.keys() == two.keys() == set(LENGTHS)
    for length in LENGTHS:
        assert 2 * two[length]["context_bytes"] == one[length]["context_bytes"]
        assert one[length]["weight_bytes"] / 2 <= two[length]["weight_bytes"] < one[length]["weight_bytes"]


@pytest.mark.parametrize("kind", ["follower", "worker"])
def test_a_killed_process_is_replaced_with_its_group(kind: str, folder: Path, address: str, tmp_path: Path) -> None:
    killed, notices = list[psutil.Process](), list[str]()

    def kill(row: Row, done: int, total: int) -> None:
        if done > 4 and not killed and (found := followers()):
            killed.extend(found)
            (found[0] if kind == "follower" else found[0].parent()).kill()

    asked: dict[str, Any] = {"methods": ["full", "topk:k=16"], "repeats": 40}
    watch = Watch(row=kill, notice=notices.append)
    rows = run(folder, tmp_path / "two", ray=address, gpus_per_model=2, watch=watch, **asked)
    assert len(killed) == 1
    assert not killed[0].is_running()
    assert any("Its unit of work is measured again" in line for line in notices)
    same_rows(rows, run(folder, tmp_path / "one", **asked))


def test_what_needs_all_heads_of_a_layer_is_refused(folder: Path, address: str, tmp_path: Path) -> None:
    two = {"ray": address, "gpus_per_model": 2}
    rows = run(folder, tmp_path / "run", ["tova:capacity=16"], 1, **two)
    assert {row.status for row in rows} == {"refused"}
    assert all("tova:capacity=16 needs all heads of a layer together" in row.reason for row in rows)
    with pytest.raises(ValueError, match="watching attention needs all heads of a layer together"):
        measure([str(folder)], tasks=["attention"], lengths=(32,), repeats=1, out=tmp_path / "attention", **two)


def test_a_model_that_cannot_be_divided_is_refused_before_a_worker_starts(address: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'demo' has 3 heads and 3 key-value heads, which 2 devices cannot divide"):
        measure(["demo"], tasks="curve", lengths=(32,), repeats=1, out=tmp_path / "run", ray=address, gpus_per_model=2)
    assert not (tmp_path / "run").exists()


def test_layers_are_divided_where_a_device_map_is_given(folder: Path, address: str, tmp_path: Path) -> None:
    seen = list[psutil.Process]()
    asked: dict[str, Any] = {"methods": ["full"], "loader": Load(options={"device_map": "cpu"})}
    watch = Watch(row=lambda *_: seen.extend(followers()))
    rows = run(folder, tmp_path / "two", ray=address, gpus_per_model=2, watch=watch, **asked)
    assert not seen
    same_rows(rows, run(folder, tmp_path / "one", methods=["full"]))
