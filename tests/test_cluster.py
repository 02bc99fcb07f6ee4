"""Runs on a cluster: the driver with workers in this process. tests/distributed has real clusters."""

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_sharding import contents
from typer.testing import CliRunner

from farspan.cli import app
from farspan.lm import LM, load
from farspan.measuring import cluster
from farspan.measuring.followers import Unwritten
from farspan.measuring.grid import measure
from farspan.measuring.loop import Watch
from farspan.measuring.one_model import begin_model
from farspan.measuring.result import Measured
from farspan.measuring.setups import Grid
from farspan.record import Tail, latest, read_header, read_rows
from farspan.tasks import task

METHODS = ["full", "sinks:window=12,sinks=2"]


def node(name: str, cpus: int = 1, gpus: int = 0, *, alive: bool = True) -> dict[str, Any]:
    return {
        "NodeID": name * 56,  # Ray checks that it is hexadecimal
        "Alive": alive,
        "NodeManagerAddress": f"address of {name}",
        "Resources": {"CPU": float(cpus)} | ({"GPU": float(gpus)} if gpus else {}),
    }


class RayError(Exception):
    """As ray.exceptions.RayError."""


class RayTaskError(RayError):
    """As ray.exceptions.RayTaskError."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"a trace of many lines\n{cause}")
        self.cause = cause


class FakeRay:
    """Ray with one process: a call is carried out when it is waited for.

    Args:
        nodes: as `ray.nodes()`; a test may change them.
        before: called before each call of a worker, with its number from 0 and the method's name; raises RayError for
            a worker that dies.
    """

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, nodes: list[dict[str, Any]], before: Callable[[int, str], None] = lambda *_: None) -> None:
        self.all_nodes, self.before = nodes, before
        self.made: list[str] = []  # the node of each worker
        self.calls: list[tuple[int, str, Any]] = []
        self._queue: list[Any] = []

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return self.all_nodes

    def remote(self, kind: type) -> Any:
        def made(**options: Any) -> Any:
            number, worker = len(self.made), kind()
            self.made.append(options["scheduling_strategy"].node_id[0])

            def call(name: str) -> Any:
                return SimpleNamespace(remote=lambda *a, **k: self._later(number, name, getattr(worker, name), a, k))

            return SimpleNamespace(**{name: call(name) for name in ("begin", "measure", "end")}, worker=worker)

        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=lambda: made(**options)))

    def _later(self, number: int, name: str, function: Any, given: Any, named: Any) -> Any:
        def answer() -> Any:
            self.before(number, name)
            self.calls.append((number, name, given))
            try:
                return function(*given, **named)
            except Exception as error:
                raise RayTaskError(error) from error

        self._queue.append(answer)
        return answer

    def wait(self, calls: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        ready = calls if num_returns == len(self._queue) and timeout == cluster.END else self._queue[:1]
        self._queue = [one for one in self._queue if one not in ready]
        if timeout == cluster.END:
            for one in ready:
                one()
        return ready, []

    def get(self, call: Any) -> Any:
        return call()

    def kill(self, actor: Any) -> None:
        run = getattr(actor.worker, "_run", None)
        if run is not None:
            run._file.close()
            run._lock.close()


@pytest.fixture
def one(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Measured]:
    """Measure one small run, in this process or on a fake cluster."""
    # what the workers change of their process
    monkeypatch.setattr(sys, "argv", list(sys.argv))

    def run(out: Path, ray: FakeRay | None = None, **given: Any) -> Measured:
        if ray is not None:
            found = {"ray": ray}
            real = cluster.optional_import
            monkeypatch.setattr(cluster, "optional_import", lambda name, extra: found.get(name) or real(name, extra))
        asked: dict[str, Any] = {"text": text, "lengths": (16, 32), "repeats": 6} | given
        models, methods, tasks = asked.pop("models", [str(folder)]), asked.pop("methods", METHODS), ["curve"]
        return measure(models, methods, tasks, out=out, ray=None if ray is None else "auto", **asked)

    return run


def test_workers_give_the_rows_of_one_process(one: Callable[..., Measured], tmp_path: Path) -> None:
    whole = one(tmp_path / "whole")
    ray, shown, titles = FakeRay([node("a"), node("b")]), list[tuple[int, int]](), list[str]()
    watch = Watch(row=lambda row, done, total: shown.append((done, total)), start=lambda title, _: titles.append(title))
    measured = one(tmp_path / "run", ray, watch=watch)
    assert contents(measured.rows) == contents(whole.rows)
    assert measured.missing == {}
    assert ray.made == ["a", "b"]
    rows = read_rows(tmp_path / "run")
    assert len(rows) == len(latest(rows)) == 24
    assert shown == [(done, 24) for done in range(1, 25)]
    assert titles[-1] == "2 workers"
    files = sorted(path.name for path in (tmp_path / "run").glob("rows*.jsonl") if path.stat().st_size)
    assert len(files) == 2
    assert all("ended" in session for session in read_header(tmp_path / "run")["sessions"])
    units = [given for _, name, given in ray.calls if name == "measure"]
    assert len(units) >= 2 * 4
    again = FakeRay([node("a")])
    assert contents(one(tmp_path / "run", again).rows) == contents(whole.rows)
    assert again.made == []  # all is there


def test_a_worker_that_dies_is_replaced_and_its_unit_measured_again(
    one: Callable[..., Measured], tmp_path: Path
) -> None:
    whole = one(tmp_path / "whole")
    notices, deaths = list[str](), [2, 5]

    def before(number: int, name: str) -> None:
        if name == "measure" and sum(name == "measure" for _, name, _ in ray.calls) in deaths:
            deaths.pop(0)
            raise RayError("The actor died")

    ray = FakeRay([node("a"), node("b")], before)
    measured = one(tmp_path / "run", ray, watch=Watch(notice=notices.append))
    assert contents(measured.rows) == contents(whole.rows)
    assert not deaths
    assert len(ray.made) == 4
    assert sum("ended. Its unit of work is measured again" in line for line in notices) == 2


def test_a_node_that_leaves_is_done_without_and_one_that_joins_is_used(
    one: Callable[..., Measured], tmp_path: Path
) -> None:
    whole = one(tmp_path / "whole")

    def before(number: int, name: str) -> None:
        if name == "measure" and len(ray.calls) > 2:
            ray.all_nodes = [node("a", alive=False), node("b")]
            if ray.made[number] == "a":
                raise RayError("its node has died")

    ray = FakeRay([node("a")], before)
    assert contents(one(tmp_path / "run", ray).rows) == contents(whole.rows)
    assert ray.made == ["a", "b"]


def test_a_worker_keeps_its_model_and_loads_it_once(
    one: Callable[..., Measured], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []

    def counted(model: str, **options: Any) -> Any:
        if options.get("weights", True):
            loaded.append(model)
        return load(model, **options)

    other = tmp_path / "other"
    other.symlink_to(folder)
    monkeypatch.setattr("farspan.measuring.loader.load", counted)
    models = [str(folder), str(other)]
    one(tmp_path / "run", FakeRay([node("a"), node("b")]), models=models)
    assert sorted(loaded) == sorted(models)


def test_a_run_without_a_worker_that_lives_ends_with_the_reason(one: Callable[..., Measured], tmp_path: Path) -> None:
    def before(number: int, name: str) -> None:
        raise RayError("No module named 'farspan'\nmore")

    with pytest.raises(ValueError, match=r"no worker of the cluster stays alive, .*: No module named 'farspan'$"):
        one(tmp_path / "run", FakeRay([node("a")], before))


def test_an_error_of_a_worker_is_that_of_the_command(one: Callable[..., Measured], tmp_path: Path) -> None:
    one(tmp_path / "run", lengths=(16,))
    with pytest.raises(ValueError, match=r"^.*run holds another run, made with other settings: lengths"):
        one(tmp_path / "run", FakeRay([node("a")]))

    def before(number: int, name: str) -> None:
        if name == "measure":
            raise RayTaskError(OSError(28, "No space left", "rows"))

    with pytest.raises(OSError, match="No space left"):
        one(tmp_path / "new", FakeRay([node("a")], before))
    assert contents(one(tmp_path / "new").rows) == contents(one(tmp_path / "whole").rows)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"shard": (1, 2)}, "shard and ray both divide a run"),
        ({"minutes": 1.0, "lengths": "auto"}, "a budget in minutes belongs to one process"),
        ({"gpus_per_model": 0}, "gpus_per_model: got 0, expected a whole number, at least 1"),
        ({"gpus_per_model": 2}, "no machine of the cluster has 2 GPUs"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(
    one: Callable[..., Measured], tmp_path: Path, given: dict[str, Any], error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        one(tmp_path / "run", FakeRay([node("a")]), **given)
    assert not (tmp_path / "run").exists()


def test_a_worker_has_a_gpu_or_a_group_or_a_machine_without_any() -> None:
    nodes = [node("a", 8, 4), node("b", 8, 3), node("c", 4), node("d", 8, 8, alive=False)]
    each = cluster.slots(nodes, None)
    assert [(slot.node[0], slot.index, slot.gpus) for slot in each] == [
        *(("a", index, 1) for index in range(4)),
        *(("b", index, 1) for index in range(3)),
    ]
    assert [(slot.node[0], slot.gpus) for slot in cluster.slots(nodes, 2)] == [("a", 2), ("a", 2), ("b", 2)]
    machines = [("a", 0, 8), ("b", 0, 8), ("c", 0, 4)]
    assert [(slot.node[0], slot.gpus, slot.cpus) for slot in cluster.slots(nodes, None, on_cpu=True)] == machines
    assert [slot.node[0] for slot in cluster.slots([node("a", 0), node("b", 2)], None)] == ["b"]
    assert cluster.slots(nodes, 16) == []


def test_new_rows_are_read_once_and_a_line_when_it_is_whole(one: Callable[..., Measured], tmp_path: Path) -> None:
    rows = one(tmp_path / "run").rows
    file = tmp_path / "run" / "rows.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(lines[0] + lines[1][:40])
    tail = Tail(tmp_path / "run")
    assert tail.new() == rows[:1]
    assert tail.new() == []
    file.write_text("".join(lines[:3]))
    (tmp_path / "run" / "rows-1-of-2.jsonl").write_text(lines[3])
    assert tail.new() == rows[1:4]


# the command


def test_a_missing_package_is_named_with_the_extra(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    command = ["perplexity", str(folder), "--text", text, "--lengths", "16,32", "--target-tokens", "4"]
    result = CliRunner().invoke(app, [*command, "--ray", "auto"])
    assert result.exit_code == 2
    assert result.stderr.splitlines() == ["error: this needs the package ray: pip install 'farspan[cluster]'"]


def test_a_cluster_that_does_not_answer_is_one_line(
    folder: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "ANSWER", 2.0)
    command = ["perplexity", str(folder), "--text", text, "--lengths", "16,32", "--target-tokens", "4"]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "run"), "--ray", address])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) <= 3  # as wide as the terminal
    assert f"error: no Ray cluster answers at {address}" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("after", [[], ["--seed", "3"]])
def test_ray_without_an_address_is_the_cluster_of_this_machine(
    after: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(cluster, "_refuse_silent", lambda address: asked.append(address) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        CliRunner().invoke(app, ["perplexity", str(folder), "--lengths", "16", "--ray", *after], catch_exceptions=False)
    assert asked == ["auto"]


def test_gpus_per_model_belongs_to_ray(folder: Path) -> None:
    result = CliRunner().invoke(app, ["perplexity", str(folder), "--gpus-per-model", "2"])
    assert result.exit_code == 2
    assert "gpus_per_model belongs to ray" in result.stderr


def test_a_follower_of_a_model_held_by_several_processes_binds_its_tasks(lm: LM) -> None:
    tasks = (task("perplexity:targets=all"),)
    what = Grid(tasks, "random", (64,), 2, 0, cost=False, compared=False, trained=(lm.trained_length or 0,))
    (setup,) = begin_model(lm, what, Unwritten(), (lm.name,), Watch())
    assert setup.bound.task == "perplexity"
