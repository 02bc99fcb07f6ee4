"""Runs and measurements of trainings in trackers: tensorboard and trackio are read back where they are installed, and
W&B and MLflow are recorded at the border of their modules, as they contact a server or take long to import."""

import json
import sqlite3
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_callback import curves, logged, text, trainer  # noqa: F401
from test_cli import farspan, last_line, refused

import farspan as library
from farspan.record import read_header, read_rows
from farspan.report.exports.numbers import Number, numbers_of
from farspan.report.runs import of_model, read_run

from tiny import CODE

LENGTHS = (16, 32)
METHODS = ("full", "sinks:window=24,sinks=4")
Logged = dict[str, dict[int, float]]  # value by name and step


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the embedded model under two methods: a forgetting curve and perplexity."""
    folder = tmp_path_factory.mktemp("runs") / "both"
    settings: dict[str, Any] = {"text": CODE, "lengths": LENGTHS, "repeats": 3, "out": folder, "shard": (1, 1)}
    library.measure(["demo"], list(METHODS), ["curve", "perplexity:target_tokens=8"], **settings)
    return folder


def expected(run: Path, method: str) -> Logged:
    """The numbers of a method by the name and step that transformers' integrations give them."""
    found: Logged = {}
    for one in numbers_of(read_run(run)):
        if one.member.method == method:
            ends = {f"{one.name}_low": one.low, f"{one.name}_high": one.high}
            for name, value in {one.name: one.value, **ends, **one.details}.items():
                if value is not None:
                    found.setdefault(f"eval/{one.group.task}/{name}", {})[one.length or 0] = value
    assert {
        "eval/curve/half_life",
        "eval/curve/copied_beyond_guessing",
        "eval/curve/copy",
        "eval/curve/control",
    } <= found.keys()
    assert set(found["eval/perplexity/accuracy"]) == set(LENGTHS)
    return found


def alike(found: Logged, wanted: Logged) -> bool:
    assert found.keys() == wanted.keys()
    return all(found[name] == pytest.approx(wanted[name], rel=1e-6) for name in wanted)


# tensorboard


def events(folder: Path) -> Any:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    read = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    read.Reload()
    return read


def scalars(read: Any) -> Logged:
    return {name: {one.step: one.value for one in read.Scalars(name)} for name in read.Tags()["scalars"]}


def pixels(png: bytes) -> np.ndarray:
    from io import BytesIO

    from PIL import Image

    return np.asarray(Image.open(BytesIO(png)).convert("RGB"))


PICTURE = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """All figures are one image: to draw one takes a quarter of a second."""
    monkeypatch.setattr("farspan.measuring.trackers.as_pixels", lambda figure: PICTURE)


def is_picture(image: np.ndarray) -> bool:
    return np.array_equal(image, PICTURE)


def is_drawn(image: np.ndarray) -> bool:
    """Whether an image has the size of a figure, paper and lines."""
    return image.shape == (600, 900, 3) and 0.3 < (image > 200).mean() < 0.999


def test_a_run_is_in_tensorboard_with_all_its_numbers(run: Path, undrawn: None) -> None:
    pytest.importorskip("tensorboard")
    for _ in range(2):  # the second export replaces the first
        done = farspan("export", run, "--to", "tensorboard", "--json")
        assert done.exit_code == 0, done.output
    written = [Path(path) for path in last_line(done)["written"]]
    assert [path.parent.relative_to(run) for path in written] == [
        Path("export/tensorboard/demo_full"), Path("export/tensorboard/demo_sinks_window_24_sinks_4")
    ]  # fmt: skip
    for path, method in zip(written, METHODS, strict=True):
        assert list(path.parent.iterdir()) == [path]
        read = events(path.parent)
        assert alike(scalars(read), expected(run, method))
        assert read.Tags()["images"] == ["eval/curve", "eval/perplexity"]
        for name in read.Tags()["images"]:
            (image,) = read.Images(name)
            assert is_picture(pixels(image.encoded_image_string))
        about = json.loads(read.Tensors("args/text_summary")[0].tensor_proto.string_val[0])
        assert (about["model"], about["method"], about["dtype"]) == ("demo", method, "float32")


def test_models_of_similar_names_have_folders_of_their_own(run: Path, tmp_path: Path, undrawn: None) -> None:
    pytest.importorskip("tensorboard")
    rows = [one for one in read_rows(run) if one.method == "full"]
    header, names = read_header(run), ("a.b", "A-b", "..")
    header["models"] = {name: header["models"]["demo"] | {"name": name} for name in names}
    (tmp_path / "run.json").write_text(json.dumps(header))
    lines = [json.dumps(asdict(replace(one, model=name))) + "\n" for name in names for one in rows]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    done = farspan("export", tmp_path, "--to", "tensorboard")
    assert done.exit_code == 0, done.output
    places = sorted(path.parent for path in (tmp_path / "export").rglob("events.*"))
    assert [place.name for place in places] == ["a_b", "a_b_2", "run"]
    assert len(scalars(events(places[1]))) == len(expected(run, "full"))


def test_the_runs_of_an_earlier_export_do_not_stay(run: Path, tmp_path: Path, undrawn: None) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "run.json").write_bytes((run / "run.json").read_bytes())
    every = read_rows(run)
    for kept, places, more in (
        ({"full"}, ["demo"], []),
        ({one.method for one in every}, ["demo_full", "demo_sinks_window_24_sinks_4"], []),
        ({"full"}, ["demo"], ["--model", "demo"]),
    ):
        lines = [json.dumps(asdict(one)) + "\n" for one in every if one.method in kept]
        (tmp_path / "rows.jsonl").write_text("".join(lines))
        done = farspan("export", tmp_path, "--to", "tensorboard", *more)
        assert done.exit_code == 0, done.output
        assert sorted(path.parent.name for path in (tmp_path / "export").rglob("events.*")) == places


# trackio


def recorded(folder: Path, project: str) -> dict[str, list[dict[str, Any]]]:
    """What trackio's database holds, by run."""
    with sqlite3.connect(folder / f"{project}.db") as database:
        found: dict[str, list[dict[str, Any]]] = {}
        for name, metrics in database.execute("SELECT run_name, metrics FROM metrics ORDER BY id"):
            found.setdefault(name, []).append(json.loads(metrics))
    return found


def by_step(entries: list[dict[str, Any]]) -> Logged:
    found: Logged = {}
    for entry in entries:
        step = entry.pop("train/global_step")
        for name, value in entry.items():
            if not isinstance(value, dict):
                found.setdefault(name, {})[step] = value
    return found


def test_a_run_is_in_trackio_with_all_its_numbers(run: Path, undrawn: None, unconnected: list[Any]) -> None:
    trackio = pytest.importorskip("trackio")
    done = farspan("export", run, "--to", "trackio", "--json")
    assert done.exit_code == 0, done.output
    assert last_line(done) == json.loads(done.stdout) == {"written": []}
    folder = Path(trackio.TRACKIO_DIR)
    for (name, entries), method in zip(recorded(folder, "farspan").items(), METHODS, strict=True):
        assert name.startswith(f"both demo {method} ")
        pictures = [value for entry in entries for value in entry.values() if isinstance(value, dict)]
        assert len(pictures) == 2
        assert all(is_picture(pixels((folder / "media" / one["file_path"]).read_bytes())) for one in pictures)
        assert alike(by_step(entries), expected(run, method))
    assert not unconnected


@pytest.fixture
def unconnected(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The places to which a socket was connected, or at which it listens."""
    import socket

    found: list[Any] = []
    for method in ("connect", "connect_ex", "bind"):
        monkeypatch.setattr(socket.socket, method, lambda self, place, *more: found.append(place))
    return found


# W&B and MLflow, recorded


class Calls(list[tuple[str, tuple[Any, ...], dict[str, Any]]]):
    """Calls of a module's functions, in order."""

    def function(self, name: str, returned: Any = None) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.append((name, arguments, options))
            return returned

        return call

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(arguments, options) for called, arguments, options in self if called == name]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Makes a module that can be imported: `module("a.b", name=value)`."""

    def made(path: str, **content: Any) -> ModuleType:
        one = ModuleType(path)
        one.__spec__ = ModuleSpec(path, None, is_package=True)
        one.__path__ = []
        vars(one).update(content)
        monkeypatch.setitem(sys.modules, path, one)
        if "." in path:
            parent, _, name = path.rpartition(".")
            setattr(sys.modules[parent], name, one)
        return one

    return made


class WandbError(Exception):
    pass


@pytest.fixture
def wandb(module: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """W&B as transformers and farspan call it. `runs`: what each run was given."""
    for name in ("WANDB_LOG_MODEL", "WANDB_WATCH", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    runs: list[dict[str, Any]] = []

    class Config(dict[str, Any]):
        def update(self, values: dict[str, Any], allow_val_change: bool = False) -> None:  # type: ignore[override]
            super().update(values)

    def init(**options: Any) -> None:
        runs.append({"options": options, "config": Config(), "log": []})
        one.run = SimpleNamespace(_label=lambda **label: None, summary={})
        one.config = runs[-1]["config"]

    def log(values: dict[str, Any]) -> None:
        assert one.run is not None, "no run is open"
        runs[-1]["log"].append(values)

    def finish() -> None:
        one.run = None

    one = module("wandb", run=None, init=init, log=log, finish=finish, Image=lambda image: {"image": image})
    module("wandb.sdk"), module("wandb.sdk.lib"), module("wandb.sdk.lib.config_util", ConfigError=WandbError)
    module("wandb.errors", Error=WandbError)
    return SimpleNamespace(module=one, runs=runs)


def test_a_run_is_in_wandb_with_all_its_numbers(run: Path, undrawn: None, wandb: SimpleNamespace) -> None:
    done = farspan("export", run, "--to", "wandb")
    assert done.exit_code == 0, done.output
    assert [one["options"]["name"] for one in wandb.runs] == ["both demo full", "both demo sinks:window=24,sinks=4"]
    assert wandb.module.run is None
    for one, method in zip(wandb.runs, METHODS, strict=True):
        pictures = [value["image"] for entry in one["log"] for value in entry.values() if isinstance(value, dict)]
        assert len(pictures) == 2
        assert all(map(is_picture, pictures))
        assert alike(by_step(one["log"]), expected(run, method))
        assert one["config"]["method"] == method


def test_what_wandb_refuses_is_one_line(run: Path, undrawn: None, wandb: SimpleNamespace) -> None:
    def init(**options: Any) -> None:
        raise WandbError("No API key configured. Use `wandb login` to log in.")

    wandb.module.init = init  # type: ignore[attr-defined]
    assert "wandb: No API key configured" in refused(farspan("export", run, "--to", "wandb"))


@pytest.fixture
def mlflow(module: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch) -> Calls:
    monkeypatch.delenv("MLFLOW_FLATTEN_PARAMS", raising=False)
    calls = Calls()
    names = ("start_run", "end_run", "log_params", "log_metrics", "log_image", "set_tracking_uri")
    one = module("mlflow", __version__="3.1.0", **{name: calls.function(name) for name in names})
    one.is_tracking_uri_set = calls.function("is_tracking_uri_set", returned=True)  # type: ignore[attr-defined]
    one.get_tracking_uri = lambda: "here"  # type: ignore[attr-defined]
    run = SimpleNamespace(info=SimpleNamespace(run_id="1"))

    def active_run() -> Any:
        return run if len(calls.named("start_run")) > len(calls.named("end_run")) else None

    one.active_run = active_run  # type: ignore[attr-defined]
    module("mlflow.utils")
    module("mlflow.utils.validation", MAX_PARAM_VAL_LENGTH=6000, MAX_PARAMS_TAGS_PER_BATCH=100)
    module("mlflow.exceptions", MlflowException=KeyError)
    return calls


def test_a_run_is_in_mlflow_with_all_its_numbers(run: Path, undrawn: None, mlflow: Calls) -> None:
    done = farspan("export", run, "--to", "mlflow")
    assert done.exit_code == 0, done.output
    starts = [index for index, (name, _, _) in enumerate(mlflow) if name == "start_run"]
    assert len(starts) == len(mlflow.named("end_run")) == 2
    for begin, end, method in zip(starts, [*starts[1:], None], METHODS, strict=True):
        mine = Calls(mlflow[begin:end])
        assert mine.named("start_run") == [((), {"run_name": f"both demo {method}", "nested": False})]
        assert mine.named("log_params")[0][0][0]["method"] == method
        found: Logged = {}
        for _, options in mine.named("log_metrics"):
            for name, value in options["metrics"].items():
                found.setdefault(name.replace("eval_", "eval/"), {})[options["step"]] = value
        assert alike(found, expected(run, method))
        pictures = mine.named("log_image")
        assert [options for _, options in pictures] == [
            {"key": "eval_curve", "step": 0}, {"key": "eval_perplexity", "step": 0}
        ]  # fmt: skip
        assert all(is_picture(arguments[0]) for arguments, _ in pictures)


# refusals


@pytest.mark.parametrize("to", ["tensorboard", "wandb", "trackio", "mlflow"])
def test_a_tracker_that_is_not_installed_is_one_line(run: Path, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    hidden = {to, "tensorboardX"} if to == "tensorboard" else {to}
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in hidden else found(name, *more))
    said = refused(farspan("export", run, "--to", to))
    assert f"{to} is not installed: pip install {to}" in said


def test_a_folder_is_not_for_trackers_with_a_place_of_their_own(run: Path, tmp_path: Path) -> None:
    said = refused(farspan("export", run, "--to", "mlflow", "--out", tmp_path / "here"))
    assert "no effect with --to mlflow, which stores its runs itself" in said


# trainings


def test_a_training_shows_its_curves_in_trackers(trainer: Any, curves: Any, tmp_path: Path) -> None:  # noqa: F811
    installed = [name for name in ("tensorboard", "trackio") if find_spec(name) is not None]
    if not installed:
        pytest.skip("neither tensorboard nor trackio is installed")
    callback = curves()
    training = trainer(callback, steps=4, report_to=installed, project="training", run_name="tiny")
    training.train()
    source = read_run(callback.folder)
    wanted: Logged = {}
    for step in (2, 4):
        for one in numbers_of(of_model(source, f"step-{step}")):
            for name, value in named(one).items():
                wanted.setdefault(f"train/farspan/{name}", {})[step] = value
    for name in ("half_life", "span"):
        history = logged(training.state.log_history, f"farspan/{name}")
        assert history == pytest.approx(wanted[f"train/farspan/{name}"], abs=1e-4)
        wanted[f"train/farspan/{name}"] = history  # rounded
    assert len(wanted) == 5 + 3 * len(source.header["settings"]["lengths"])
    assert not [name for entry in training.state.log_history for name in entry if "copy" in name]
    if "tensorboard" in installed:
        (folder,) = (tmp_path / "out" / "runs").iterdir()
        read = events(folder)
        found = {name: values for name, values in scalars(read).items() if name in wanted}
        assert alike(found, wanted)
        assert [one.step for one in read.Images("train/farspan/curve")] == [2, 4]
        assert all(is_drawn(pixels(one.encoded_image_string)) for one in read.Images("train/farspan/curve"))
    if "trackio" in installed:
        import trackio

        entries = recorded(Path(trackio.TRACKIO_DIR), "training")["tiny"]
        shown = [entry["train/global_step"] for entry in entries if "train/farspan/curve" in entry]
        assert shown == [2, 4]
        assert alike({name: values for name, values in by_step(entries).items() if name in wanted}, wanted)


def named(one: Number) -> dict[str, float]:
    return {one.id: one.value} | {f"{name}_{one.length}": value for name, value in one.details.items()}
