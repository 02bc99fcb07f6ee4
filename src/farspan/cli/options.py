"""Options that several commands share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from farspan.cli.messages import ROWS_KEPT, one_line_errors
from farspan.methods import check_names

if TYPE_CHECKING:
    from farspan.measuring.loader import Load

Dtype = Literal["auto", "float32", "bfloat16", "float16"]  # as in farspan.lm, which imports torch
Spacing = Literal["linear", "log"]  # as in farspan.lengths, which imports numpy


def checked(check: Callable[[str], None]) -> Callable[[Any], Any]:
    """Return a callback that checks each value of an option before the command imports torch, which takes seconds."""

    def callback(given: Any) -> Any:
        with one_line_errors():
            for one in [given] if isinstance(given, str) else given or ():
                check(one)
        return given

    return callback


def _known_text(name: str) -> None:
    from farspan.text.documents import check_name

    check_name(name)


def _known_place(model: str) -> None:
    """Raise ValueError for a path that does not exist, or that is of a run."""
    from farspan.files import expanded

    is_path = model.startswith((".", "/", "~")) and " " not in model  # with spaces: a question (ask --base-url)
    place = expanded(model)
    if is_path and not place.exists():
        raise ValueError(f"model {model!r} is neither a folder nor a hub id such as org/name")
    if model == "demo" or " " in model:
        return
    folder = place.parent if place.is_file() else place
    if (folder / "run.json").is_file() and not (folder / "config.json").exists():
        raise ValueError(
            f"model {model!r} is a run of farspan, expected a model. Print the run with farspan report {folder}, or "
            f"measure it again with farspan check {folder} MODEL"
        )


def option(panel: str, help: str, *names: str, **settings: Any) -> Any:
    """Return an option of one group of `--help`."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


def count(panel: str, help: str, least: int = 1, most: int | None = None, names: Sequence[str] = ()) -> Any:
    return option(panel, help, *names, min=least, max=most, metavar="N")


def of_method(help: str) -> Any:
    return option(MODEL, help, metavar="METHOD", callback=checked(check_names))


def of_text(help: str) -> Any:
    return option(TEXTS, help, metavar="TEXT", callback=checked(_known_text))


TEXTS, LENGTHS, TASK = "Texts", "Lengths and examples", "Task"
MODEL, SERVED, RUN = "Model", "Served model", "Run"
ONLY_SERVED = ("--served-model", "--tokenizer", "--concurrency", "--wait", "--insecure")  # no effect on other models
ONLY_LOCAL = ("--attention", "--device", "--device-map", "--dtype", "--revision", "--gguf", "--allow-pickle")

KNOWN = checked(_known_place)
LOCAL = "Causal model: folder, GGUF file, hub id or demo."
IF_NEEDED = "Causal model: folder, GGUF file, hub id, demo, or address of a server. Not needed with --base-url."
LocalModel = Annotated[str, typer.Argument(metavar="MODEL", help=LOCAL, callback=KNOWN)]
LocalModels = Annotated[list[str], typer.Argument(metavar="MODEL...", help=LOCAL, callback=KNOWN)]
Model = Annotated[str | None, typer.Argument(help=IF_NEEDED, callback=KNOWN)]
Models = Annotated[list[str] | None, typer.Argument(metavar="MODEL...", help=IF_NEEDED, callback=KNOWN)]
Methods = Annotated[
    list[str] | None, of_method("Method of reading, such as sinks:window=508; default full. Repeatable.")
]
OneMethod = Annotated[str, of_method("Method of reading, such as sinks:window=508.")]
Text = Annotated[str, of_text("Text: FILE, FOLDER, org/name, builtin, builtin:held-out, shuffled:TEXT or random.")]
Documents = Annotated[str, of_text("Text: FILE, FOLDER, org/name, builtin or builtin:held-out.")]
TargetTexts = Annotated[
    list[str] | None,
    of_text("Text to copy, or shuffled: the tokens of --text in random order; default: --text. Repeatable."),
]
PrefixTexts = Annotated[
    list[str] | None, of_text("Irrelevant text of the control; default: chosen by the protocol. Repeatable.")
]
Warmup = Annotated[
    int | None,
    count(
        TASK,
        "Tokens of a probe that are read before scoring; default 128, or 512 if a length exceeds 8,192; fewer with "
        "many depths.",
        0,
    ),
]
Scored = Annotated[
    int | None,
    count(
        TASK,
        "Tokens of a probe that are scored; default 256, or 1,024 if a length exceeds 8,192; fewer with many depths.",
    ),
]
Repeats = Annotated[int, option(LENGTHS, "Examples at each length.", metavar="N")]
Seed = Annotated[int, count(LENGTHS, "Random seed for choosing texts.", 0)]
OUT = "Run folder; default: one under runs/. A run there is continued"
Out = Annotated[Path | None, option(RUN, f"{OUT}.", metavar="FOLDER")]
Batch = Annotated[int | None, count(RUN, "Examples read at once; default: as many as memory allows.")]
Chunk = Annotated[int | None, count(RUN, "Tokens of a row in one forward pass; default 1,024, on a GPU up to 8,192.")]
AsJson = Annotated[bool, option(RUN, "Print the results as one line of JSON at the end.", "--json")]


@dataclass(frozen=True)
class LocalLoading:
    """Options: how models are loaded by a command that needs their weights."""

    attention: Annotated[
        str | None, option(MODEL, "Attention implementation of transformers: eager, sdpa, ...", metavar="NAME")
    ] = None
    device: Annotated[str | None, option(MODEL, "cpu, cuda, cuda:1 or mps; default: an accelerator, if any.")] = None
    device_map: Annotated[str | None, option(MODEL, "auto: divide the model by layers among all accelerators.")] = None
    dtype: Annotated[
        Dtype,
        option(
            MODEL,
            "Precision of weights and activations; auto: as stored, but float32 on a CPU without instructions for it.",
        ),
    ] = "auto"
    trained_length: Annotated[
        int | None, count(MODEL, "Trained context length in tokens; default: from the config.")
    ] = None
    revision: Annotated[str | None, option(MODEL, "Branch, tag or commit on the hub.")] = None
    gguf: Annotated[
        str | None, option(MODEL, "GGUF file of a folder or hub id that holds several.", metavar="FILE")
    ] = None
    trust_remote_code: Annotated[bool, option(MODEL, "Run Python code that comes with the model.")] = False
    allow_pickle: Annotated[bool, option(MODEL, "Also read .bin weights, which can run code.")] = False

    @property
    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults, by name."""
        return {
            f"--{field.name.replace('_', '-')}": value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        }

    @staticmethod
    def refuse_unused(names: Sequence[str], models: Sequence[str]) -> None:
        """Raise ValueError if these options were given and all models are served, so that they have no effect."""
        from farspan.measuring.loader import is_url

        if names and all(map(is_url, models)):
            listed = ", ".join(names)
            raise ValueError(f"{listed}: no effect on the served model {models[0]!r}. Omit {listed}")

    def refuse_chunk(self, chunk: int | None, models: Sequence[str]) -> None:
        """Raise ValueError if --chunk was given and all models are served."""
        self.refuse_unused(["--chunk"] * (chunk is not None), models)

    def models(self, given: list[str] | None) -> list[str]:
        """Return the models to measure.

        Raises:
            ValueError: one is a server.
        """
        from farspan.measuring.loader import is_url

        if url := next(filter(is_url, given or ()), None):
            raise ValueError(
                f"model {url!r} is a server, and this command needs weights: give a folder, file or hub id"
            )
        return list(given or ())

    def loader(self) -> "Load":
        """Return the loader of the models."""
        from farspan.measuring.loader import Load

        if self.device is not None and self.device_map is not None:
            raise ValueError("--device and --device-map contradict each other: give one")
        names = "revision", "trust_remote_code", "allow_pickle", "gguf"
        options = {name: getattr(self, name) for name in names}
        if self.device_map is not None:
            options["device_map"] = self.device_map
        return Load(self.dtype, self.device, self.attention, self.trained_length, options)


@dataclass(frozen=True)
class Loading(LocalLoading):
    """Options: how models are loaded, or reached on a server."""

    base_url: Annotated[
        str | None,
        option(SERVED, "Server, such as vLLM, SGLang or llama-server: http://127.0.0.1:8000.", metavar="URL"),
    ] = None
    served_model: Annotated[str | None, option(SERVED, "The model's name on the server; default: the only one.")] = None
    tokenizer: Annotated[
        str | None, option(SERVED, "Its tokenizer: folder, GGUF file or hub id; default: the one the server names.")
    ] = None
    concurrency: Annotated[
        int | None, count(SERVED, "Requests at once; default 8, for llama-server 1.", least=1, most=1024)
    ] = None
    wait: Annotated[float, option(SERVED, "Seconds to wait for a server that stops answering.", min=0.0)] = 60.0
    insecure: Annotated[bool, option(SERVED, "Allow http to another machine.", "--insecure")] = False

    def models(self, given: list[str] | None) -> list[str]:
        """Return the models to measure: those given, then the served one.

        Raises:
            ValueError: none at all, options of a served model without one, or options without effect on a served one.
        """
        from farspan.measuring.loader import is_url

        if self.base_url and not is_url(self.base_url):
            raise ValueError(
                f"--base-url: got {self.base_url!r}, expected the address of a server that begins with http:// or "
                f"https://, such as http://{self.base_url}"
            )
        models = [*(given or ()), *([self.base_url] if self.base_url else ())]
        if not models:
            raise ValueError("no model: give a folder, a GGUF file, a hub id, demo, or the server of one (--base-url)")
        if (unused := [name for name in self.given if name in ONLY_SERVED]) and not any(map(is_url, models)):
            raise ValueError(
                f"{', '.join(unused)} without a served model: got {', '.join(map(repr, models))}, expected "
                f"--base-url URL. Give --base-url, or leave out {', '.join(unused)}"
            )
        self.refuse_unused([name for name in self.given if name in ONLY_LOCAL], models)
        return models

    def only_model(self, given: str | None) -> str:
        """Return the model of a command that takes one.

        Raises:
            ValueError: as `models`, or a model beside a served one.
        """
        (model, *more) = self.models([given] if given else None)
        if more:
            raise ValueError(f"two models: got {given!r} and --base-url, expected one: leave out one of them")
        return model

    def loader(self) -> "Load":
        names = "tokenizer", "concurrency", "wait", "insecure", "trust_remote_code"
        served = {"model": self.served_model} | {name: getattr(self, name) for name in names}
        return replace(super().loader(), served=served)


@dataclass(frozen=True)
class TextOptions:
    """Options: which texts are measured, at which lengths."""

    text: Text = "builtin"
    lengths: Annotated[
        str, option(LENGTHS, "512,1024,2048, or a range 512:16384; auto: chosen for model and task.", metavar="LENGTHS")
    ] = "auto"
    points: Annotated[int | None, count(LENGTHS, "Number of lengths in a range; default 16.", 1, 10_000)] = None
    spacing: Annotated[
        Spacing | None,
        option(LENGTHS, "Spacing of lengths in a range; default log, but linear for a forgetting curve."),
    ] = None
    seed: Seed = 0

    def settings(self, spacing: Spacing = "log", *, zero: bool = False, auto: str | None = "auto") -> dict[str, Any]:
        """Return text, lengths and seed, as `farspan.measure` takes them.

        Args:
            spacing: the default of --spacing.
            zero: a list may begin with 0, the control of tasks that count passages or demonstrations.
            auto: the lengths for `--lengths auto`; None: the defaults of the task or search, the same for all models.
        """
        from farspan.lengths import DEFAULT_POINTS, parse_lengths

        if (self.points or self.spacing) and ":" not in self.lengths:
            raise ValueError("--points and --spacing belong to a range, such as --lengths 512:16384")
        how = self.points or DEFAULT_POINTS, self.spacing or spacing
        first, comma, rest = self.lengths.partition(",")
        lengths: Any = auto
        if zero and first.strip() == "0":
            if rest.strip() == "auto":
                raise ValueError(f"lengths {self.lengths!r} mix numbers and auto: give one of the two")
            lengths = (0, *(parse_lengths(rest, *how) if comma else ()))
        elif self.lengths != "auto":
            lengths = parse_lengths(self.lengths, *how)
        return {"text": self.text, "lengths": lengths, "seed": self.seed}


@dataclass(frozen=True)
class Dividing:
    """Options: where rows are stored, and how the measurement is divided."""

    out: Annotated[Path | None, option(RUN, f"{OUT}, also with more repeats or lengths.", metavar="FOLDER")] = None
    batch: Batch = None
    chunk: Chunk = None
    shard: Annotated[
        str | None,
        option(
            RUN,
            "Measure part I of N; other processes measure the rest. Default in a Slurm array: its numbers.",
            metavar="I/N",
        ),
    ] = None
    ray: Annotated[
        str | None,
        option(
            RUN,
            "HOST:PORT of a Ray cluster to use; local: this machine's devices; no value: this machine's cluster.",
            metavar="[ADDRESS]",
        ),
    ] = None
    gpus_per_model: Annotated[
        int | None, count(RUN, "With --ray: GPUs that share a model (tensor parallelism); default 1.")
    ] = None


@dataclass(frozen=True)
class Planning:
    """Options: whether a run is only planned."""

    plan: Annotated[
        bool,
        option(
            RUN,
            "Print tokens, FLOPs and memory of the run, and stop. Needs no weights, only config.json and tokenizer.",
            "--plan",
        ),
    ] = False
    calibrate: Annotated[
        bool, option(RUN, "With --plan: also load the model and time it, in about 15 seconds.", "--calibrate")
    ] = False
    tflops: Annotated[
        float | None, option(RUN, "With --plan: speed of the machine in TFLOP/s, such as 0.3.", metavar="X")
    ] = None

    def check(self) -> None:
        """Raise ValueError for options of a plan without --plan."""
        for name, given in {"--calibrate": self.calibrate, "--tflops": self.tflops is not None}.items():
            if given and not self.plan:
                raise ValueError(f"{name} belongs to --plan, which measures nothing: give both, or omit {name}")

    @property
    def kept(self) -> str:
        """Return what remains if the command is stopped."""
        return "" if self.plan else ROWS_KEPT


@dataclass(frozen=True)
class Running(Planning, Dividing):
    """Options: how a measurement is carried out."""

    quiet: Annotated[bool, option(RUN, "Print no progress, only results.", "--quiet", "-q")] = False
    as_json: AsJson = False
