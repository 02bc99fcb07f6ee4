"""Send runs and measurements of trainings to experiment trackers: numbers through transformers' integrations, so that
their environment variables apply, and pictures through each tracker's own API."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import integration_utils

from farspan import __version__
from farspan.report.export import counted
from farspan.report.exports.numbers import Number, numbers_of, slug
from farspan.report.kinds import KINDS, MEMBERS
from farspan.report.picture import as_pixels
from farspan.report.runs import Group, Source, grouped, short_names
from farspan.report.task_report import TaskReport

PROJECT = "farspan"  # of trackio; W&B and MLflow take theirs from the environment
STEP = "train/global_step"  # the axis that transformers' integrations log for trackers without steps of their own


@dataclass(frozen=True)
class Tracker:
    """What farspan needs of a tracker besides transformers' integration of it."""

    picture: Callable[[Any, str, np.ndarray, int], None]  # logs one, given the integration, a name and a step
    close: Callable[[], None] = lambda: None  # ends a run that the integration leaves open
    resumes: bool = False  # the integration continues a run of the same name
    error: str = "builtins:ValueError"  # raised by the tracker itself, such as without an account


def _tensorboard(integration: Any, name: str, image: np.ndarray, step: int) -> None:
    integration.tb_writer.add_image(name, image, step, dataformats="HWC")


def _log_image(module: str, integration: Any, name: str, image: np.ndarray, step: int) -> None:
    """Log a picture to one of the trackers with the interface of W&B."""
    tracker = import_module(module)
    tracker.log({name: tracker.Image(image), STEP: step})


def _mlflow(integration: Any, name: str, image: np.ndarray, step: int) -> None:
    import_module("mlflow").log_image(image, key=name.replace("/", "_"), step=step)


TRACKERS = {
    "tensorboard": Tracker(_tensorboard),
    "wandb": Tracker(partial(_log_image, "wandb"), lambda: import_module("wandb").finish(), error="wandb.errors:Error"),
    "trackio": Tracker(partial(_log_image, "trackio"), resumes=True),
    "mlflow": Tracker(_mlflow, error="mlflow.exceptions:MlflowException"),
}


def refuse_missing(names: Iterable[str]) -> None:
    """Raise ValueError for one of `TRACKERS` that is not installed; other names are ignored."""
    installed = integration_utils.get_available_reporting_integrations()
    for name in names:
        if name in TRACKERS and name not in installed:
            raise ValueError(f"{name} is not installed: pip install {name}")


def reporters(callbacks: Iterable[TrainerCallback]) -> list[TrainerCallback]:
    """Return the callbacks of a Trainer that are transformers' integrations of trackers."""
    kinds = tuple(integration_utils.INTEGRATION_TO_CALLBACK.values())
    return [one for one in callbacks if isinstance(one, kinds)]


def at_each_length(numbers: Iterable[Number]) -> dict[str, float]:
    """Return numbers by name and length, such as `control_256`, those without a length by name."""
    found = {}
    for one in numbers:
        found[one.id] = one.value
        found |= {f"{name}_{one.length}": value for name, value in one.details.items()}
    return found


def log_pictures(integration: TrainerCallback, pictures: Mapping[str, np.ndarray], step: int) -> None:
    """Log pictures to the tracker of an integration, if it shows pictures.

    Args:
        pictures: images of type uint8, [height, width, 3], by name.
    """
    for name, tracker in TRACKERS.items():
        if isinstance(integration, integration_utils.INTEGRATION_TO_CALLBACK[name]):
            for called, image in pictures.items():
                tracker.picture(integration, called, image, step)


def pictures_of(source: Source) -> dict[tuple[str, str], dict[str, np.ndarray]]:
    """Return the picture of each task, by model and method and then by the name of the task."""
    groups = grouped([source], MEMBERS)
    found: dict[tuple[str, str], dict[str, np.ndarray]] = {}
    for group, name in zip(groups, _task_names(groups), strict=True):
        report = KINDS.get(group.task, TaskReport)([group], source.folder)
        for member in group.members:
            figure = report.figure(replace(group, members=[member])) if member.good else None
            if figure is not None:
                found.setdefault((member.model, member.method), {})[name] = as_pixels(figure)
    return found


def send(to: str, source: Source, folder: Path, notice: Callable[[str], None] = lambda line: None) -> list[Path]:
    """Send a run to a tracker, each model under each method as a run of its own. Return the files written to `folder`:
    only tensorboard writes there, a folder for each run; the other trackers store their data elsewhere.

    A series over lengths has the length as its step, in the unit of its task. Memory lengths and pictures are at step
    0.

    Args:
        to: one of `TRACKERS`.
        notice: called with a line for each run that was sent.

    Raises:
        ValueError: the tracker is not installed, or refuses the run.
    """
    refuse_missing([to])
    numbers, pictures = numbers_of(source), pictures_of(source)
    whose = list(dict.fromkeys([(one.member.model, one.member.method) for one in numbers] + list(pictures)))
    short, methods = short_names(model for model, _ in whose), {method for _, method in whose}
    tracker, places = TRACKERS[to], list[Path]()
    for model, method in whose:
        name = f"{short[model]} {method}" if len(methods) > 1 else short[model]
        mine = [one for one in numbers if (one.member.model, one.member.method) == (model, method)]
        integration = integration_utils.INTEGRATION_TO_CALLBACK[to]()
        called = f"{source.name} {name}".replace("/", "_")  # trackio has folders of this name
        called += f" {datetime.now():%Y-%m-%d %H:%M:%S}" if tracker.resumes else ""
        if to == "tensorboard":
            place = folder / to / (slug(name) or "run")
            places.append(place if place not in places else place.with_name(f"{place.name}_{len(places) + 1}"))
            integration.logging_dir = str(places[-1])
        about = _About(
            output_dir=str(folder), run_name=called, project=PROJECT, settings=_config(source, model, method)
        )
        shown = pictures.get((model, method), {})
        try:
            with redirect_stdout(sys.stderr):
                _send_one(integration, tracker, about, _by_step(mine), shown)
        except resolve_name(tracker.error) as error:
            raise ValueError(f"{to}: {str(error).strip()}") from error
        notice(f"{to}: run {called!r}, {counted(len(mine), 'number')} and {counted(len(shown), 'picture')}")
    return [_renamed(path) for place in places for path in place.iterdir()]


class _About(TrainingArguments):
    """The arguments that an integration takes from a Trainer, for a run of measurements."""

    def __init__(self, *, settings: dict[str, Any], **arguments: Any) -> None:
        super().__init__(**arguments)
        self.settings = settings

    def __post_init__(self) -> None:
        """Choose no device: there is nothing to train."""

    def to_dict(self) -> dict[str, Any]:
        return dict(self.settings)

    def to_json_string(self) -> str:
        return json.dumps(self.settings, indent=2)


def _send_one(
    integration: Any,
    tracker: Tracker,
    about: TrainingArguments,
    numbers: Mapping[int, Mapping[str, float]],
    pictures: Mapping[str, np.ndarray],
) -> None:
    state, control = TrainerState(), TrainerControl()
    integration.on_train_begin(about, state, control)
    for step, values in sorted(numbers.items()):
        state.global_step = step
        integration.on_log(about, state, control, logs=dict(values))
    log_pictures(integration, {f"eval/{name}": image for name, image in pictures.items()}, 0)
    integration.on_train_end(about, state, control)
    tracker.close()


def _by_step(numbers: Sequence[Number]) -> dict[int, dict[str, float]]:
    """Return the numbers to log at each step, under names that the integrations group under "eval"."""
    groups = list(dict.fromkeys(one.group for one in numbers))
    names = dict(zip(groups, _task_names(groups), strict=True))
    found: dict[int, dict[str, float]] = {}
    for one in numbers:
        ends = {f"{one.name}_low": one.low, f"{one.name}_high": one.high}
        values = {one.name: one.value, **ends, **one.details}
        at = found.setdefault(one.length or 0, {})
        at |= {f"eval_{names[one.group]}/{name}": value for name, value in values.items() if value is not None}
    return found


def _config(source: Source, model: str, method: str) -> dict[str, Any]:
    """Return the settings of a run and the facts about its model that are single values."""
    known = source.header["settings"] | source.header["models"].get(model, {})
    plain = {name: value for name, value in known.items() if isinstance(value, str | int | float)}
    tasks = ", ".join(source.header["settings"]["tasks"])
    return plain | {"model": model, "method": method, "tasks": tasks, "run": source.name, "farspan": __version__}


def _task_names(groups: Sequence[Group]) -> list[str]:
    """Return a name for each group: its task, with its settings where there are several of that task."""
    count = Counter(group.task for group in groups)
    return [group.task if count[group.task] == 1 else slug(group.spec) for group in groups]


def _renamed(path: Path) -> Path:
    """Give a file of tensorboard a name without the time, so that the next export replaces it."""
    return path.rename(path.with_name("events.out.tfevents.farspan"))
