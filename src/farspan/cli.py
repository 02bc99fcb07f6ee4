"""The command line: thin and typed. Nothing heavy is imported before a command needs it."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from farspan import __version__

if TYPE_CHECKING:
    from farspan.compare import CurveSettings, Load
    from farspan.plan import Plan
    from farspan.record import Row

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="farspan measures how far back a language model remembers, and extends it.",
    pretty_exceptions_enable=False,
)
train_app = typer.Typer(no_args_is_help=True, help="Train or extend a model. A config is one TOML file.")
app.add_typer(train_app, name="train")
err = Console(stderr=True)


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Protocol(StrEnum):
    nested = "nested"
    probe = "probe"
    paper = "paper"


class Spacing(StrEnum):
    linear = "linear"
    log = "log"


class Compat(StrEnum):
    authors = "authors"


def main() -> None:
    """The entry point. Exit 1 when rows are missing, 2 for what a user can mend, 130 when interrupted."""
    app()


@contextmanager
def _said() -> Iterator[None]:
    """Errors that a user can mend become one line."""
    try:
        yield
    except KeyboardInterrupt as error:
        err.print("interrupted; what was measured is kept, and the same command goes on from there")
        raise typer.Exit(130) from error
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        message = str(error)
        if isinstance(error, RuntimeError | MemoryError):
            from farspan.measure import is_out_of_memory

            if not is_out_of_memory(error):
                raise
            first = message.partition("\n")[0]
            message = f"out of memory: {first}; try --dtype bfloat16, --device-map auto or another --device"
        if os.environ.get("FARSPAN_DEBUG"):
            raise
        err.print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error


def _version(wanted: bool) -> None:
    if wanted:
        print(f"farspan {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say the version.")
    ] = False,
) -> None:
    # transformers' own progress and advice would bury ours
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1" if not sys.stderr.isatty() else "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the runs and the picture go.")] = Path("runs/demo"),
    fresh: Annotated[bool, typer.Option(help="Measure again instead of continuing.")] = False,
) -> None:
    """The forgetting curve of the embedded model: offline, in under a minute, ends with a picture."""
    with _said():
        from farspan.demo import run_demo

        if run_demo(out, Console(), fresh=fresh):
            raise typer.Exit(1)


Models = Annotated[list[str], typer.Argument(metavar="MODEL...", help="Folders or hub ids of causal models.")]
Methods = Annotated[list[str] | None, typer.Option("--method", help="How the model reads, default full; repeatable.")]
Text = Annotated[str, typer.Option(help="FILE, FOLDER, org/name, builtin, builtin:held-out or random.")]
TargetTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--target-text", help="Text to be copied; default --text. `shuffled`: --text in shuffled order. Repeatable."
    ),
]
PrefixTexts = Annotated[
    list[str] | None,
    typer.Option("--prefix-text", help="Irrelevant text of the control; default the protocol's own. Repeatable."),
]
Warmup = Annotated[
    int | None, typer.Option(min=0, help="Tokens of a probe that are fed first; default 128, beyond 8,192 512.")
]
Scored = Annotated[
    int | None, typer.Option(min=1, help="Tokens of a probe that are scored; default 256, beyond 8,192 1,024.")
]
Seed = Annotated[int, typer.Option(help="Of the choice of texts.")]
Out = Annotated[Path | None, typer.Option(help="Run folder; default: one under runs/.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps.")]
DeviceMap = Annotated[str | None, typer.Option(help="`auto` spreads a model over accelerators.")]
ModelDtype = Annotated[Dtype, typer.Option(help="auto: the checkpoint's own.")]
Attention = Annotated[str | None, typer.Option(help="Attention implementation of transformers.")]
TrainedLength = Annotated[int | None, typer.Option(min=1, help="Tokens; overrides the model's config.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")]
RemoteCode = Annotated[bool, typer.Option(help="Run code that comes with the model.")]
Pickle = Annotated[bool, typer.Option(help="Also read .bin weights, which can run code.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Repeats read at once; default what fits.")]
Chunk = Annotated[int | None, typer.Option(min=1, help="Tokens of one forward.")]
PlanOnly = Annotated[bool, typer.Option("--plan", help="Say tokens, FLOPs, memory and time; measure nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON last.")]


@app.command()
def curve(
    models: Models,
    method: Methods = None,
    text: Text = "builtin",
    target_text: TargetTexts = None,
    prefix_text: PrefixTexts = None,
    lengths: Annotated[
        str, typer.Option(help="512,1024,2048 or 512:16384; auto: where the curve needs them.")
    ] = "auto",
    points: Annotated[int | None, typer.Option(min=1, help="Lengths in a range A:B, default 16.")] = None,
    spacing: Annotated[Spacing | None, typer.Option(help="Of a range A:B, default linear.")] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Targets at each length; default 10, with auto lengths 4 or as needed.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Budget of time; goes with auto lengths.")] = None,
    protocol: Annotated[
        Protocol | None,
        typer.Option(help="nested; probe: cheap at any length; paper: the authors'. Default by the largest length."),
    ] = None,
    depths: Annotated[
        str | None, typer.Option(help="5, or 0,0.5,1: where in the texts to ask, as a map; implies --protocol probe.")
    ] = None,
    warmup: Warmup = None,
    scored: Scored = None,
    compat: Annotated[
        Compat | None, typer.Option(help="The authors' token ids and grid; implies --protocol paper.")
    ] = None,
    test: Annotated[
        bool, typer.Option("--test", help="Test whether several prefix or target texts give the same curve.")
    ] = False,
    seed: Seed = 0,
    out: Out = None,
    device: Device = None,
    device_map: DeviceMap = None,
    dtype: ModelDtype = Dtype.auto,
    attention: Attention = None,
    trained_length: TrainedLength = None,
    revision: Revision = None,
    trust_remote_code: RemoteCode = False,
    allow_pickle: Pickle = False,
    batch: Batch = None,
    chunk: Chunk = None,
    plan: PlanOnly = False,
    as_json: AsJson = False,
) -> None:
    """The forgetting curve: how long a text a model can copy from memory, with its memory lengths and a picture."""
    with _said():
        from farspan.compare import CurveSettings
        from farspan.lengths import DEFAULT_POINTS, authors_lengths, parse_depths, parse_lengths

        if (points or spacing) and ":" not in lengths:
            raise ValueError("--points and --spacing belong to a range, such as --lengths 512:16384")
        if compat is not None and (points or spacing or not lengths.startswith("8:")):
            raise ValueError("--compat authors measures 32 lengths from 8 on: name the longest, --lengths 8:N")
        if test and len(target_text or ()) < 2 and len(prefix_text or ()) < 2:
            raise ValueError("--test compares texts: give two or more --prefix-text, or two or more --target-text")
        for texts in (target_text or [], prefix_text or []):
            if len(set(texts)) < len(texts):
                raise ValueError(f"texts {', '.join(texts)} are not all different: name each once")
        spaced: Literal["linear", "log"] = "log" if spacing is Spacing.log else "linear"
        chosen = parse_lengths(lengths, points or DEFAULT_POINTS, spaced) if lengths != "auto" else None
        if compat is not None and chosen is not None:
            chosen = authors_lengths(chosen[-1])
        settings = CurveSettings(
            text=text,
            target_texts=tuple(target_text or ()),
            prefix_texts=tuple(prefix_text or ()),
            lengths=chosen,
            repeats=repeats,
            seed=seed,
            protocol="paper" if compat else protocol.value if protocol else "probe" if depths else None,
            warmup=warmup,
            scored=scored,
            depths=parse_depths(depths) if depths else (0.0,),
            compat=compat is not None,
        )
        loader = _loader(
            device, device_map, dtype, attention, trained_length, revision, trust_remote_code, allow_pickle
        )
        _curves(models, method, settings, loader, out, minutes, batch, chunk, plan, as_json, test)


@app.command()
def recall(
    models: Models,
    method: Methods = None,
    text: Text = "builtin",
    target_text: TargetTexts = None,
    prefix_text: PrefixTexts = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the text; default what fits the trained length.")
    ] = None,
    points: Annotated[int, typer.Option(min=2, help="Places in the text, evenly spaced.")] = 16,
    repeats: Annotated[int | None, typer.Option(help="Texts; default 10.")] = None,
    warmup: Warmup = None,
    scored: Scored = None,
    seed: Seed = 0,
    out: Out = None,
    device: Device = None,
    device_map: DeviceMap = None,
    dtype: ModelDtype = Dtype.auto,
    attention: Attention = None,
    trained_length: TrainedLength = None,
    revision: Revision = None,
    trust_remote_code: RemoteCode = False,
    allow_pickle: Pickle = False,
    batch: Batch = None,
    chunk: Chunk = None,
    plan: PlanOnly = False,
    as_json: AsJson = False,
) -> None:
    """Recall by distance: how well a model copies from near and from far, in one reading of a text of one length."""
    with _said():
        from farspan.compare import CurveSettings
        from farspan.lengths import parse_depths

        settings = CurveSettings(
            text=text,
            target_texts=tuple(target_text or ()),
            prefix_texts=tuple(prefix_text or ()),
            lengths=(length,) if length else None,
            repeats=repeats,
            seed=seed,
            protocol="probe",
            warmup=warmup,
            scored=scored,
            depths=parse_depths(str(points)),
            whole_window=length is None,
        )
        loader = _loader(
            device, device_map, dtype, attention, trained_length, revision, trust_remote_code, allow_pickle
        )
        _curves(models, method, settings, loader, out, None, batch, chunk, plan, as_json)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    out: Annotated[Path, typer.Option(help="Folder for the page and the tables.")] = Path("report"),
    as_json: AsJson = False,
) -> None:
    """One page of any runs that opens anywhere: curves, maps, memory lengths, failures; also Markdown and CSV."""
    with _said():
        from farspan.report.page import write_report

        written = write_report(runs, out)
        for path in written:
            (err if as_json else Console()).print(str(path), markup=False, highlight=False, soft_wrap=True)
        if as_json:
            print(json.dumps({"written": [str(path) for path in written]}))


def _loader(
    device: str | None,
    device_map: str | None,
    dtype: Dtype,
    attention: str | None,
    trained_length: int | None,
    revision: str | None,
    trust_remote_code: bool,
    allow_pickle: bool,
) -> "Load":
    from farspan.compare import Load

    if device is not None and device_map is not None:
        raise ValueError("--device and --device-map contradict each other: give one")
    options: dict[str, Any] = {
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "allow_pickle": allow_pickle,
    }
    if device_map is not None:
        options["device_map"] = device_map
    return Load(dtype.value, device, attention, trained_length, options)


def _curves(
    models: list[str],
    methods: list[str] | None,
    settings: "CurveSettings",
    loader: "Load",
    out: Path | None,
    minutes: float | None,
    batch: int | None,
    chunk: int | None,
    plan: bool,
    as_json: bool,
    test: bool = False,
) -> None:
    """What `curve` and `recall` do once they know what is asked."""
    from farspan.compare import default_folder, measure_curves, plan_curves
    from farspan.display import Display
    from farspan.measure import Watch

    methods = methods or ["full"]
    if plan:
        adaptive = settings.lengths is None and settings.protocol != "paper" and not settings.whole_window
        first = "; the first round of --lengths auto, about two thirds of it all" if adaptive else ""
        plans = plan_curves(models, methods, settings, loader=loader, batch=batch, chunk=chunk)
        _print_plans(plans, first, as_json)
        return
    folder = out or default_folder(models, methods, settings)
    console = err if as_json else Console()
    with Display(console) as display:
        rows = measure_curves(
            models,
            methods,
            settings,
            folder,
            loader=loader,
            minutes=minutes,
            batch=batch,
            chunk=chunk,
            watch=Watch(display.start, display.row, display.notice),
        )
    if _show(rows, folder, console, as_json, test):
        raise typer.Exit(1)


def _show(rows: list["Row"], folder: Path, console: Console, as_json: bool, test: bool = False) -> int:
    """Draws and prints what a run holds; returns how many of its rows failed."""
    from farspan.display import print_memory_lengths, print_recall
    from farspan.record import read_header
    from farspan.report.picture import draw_curves, draw_maps
    from farspan.report.tables import as_data, remarks, series

    curves = series(rows, read_header(folder)["models"])
    drawn = [one for one in curves if one.summary is not None]
    at_one_length = bool(drawn) and all(one.map is not None and len(one.curve.lengths) == 1 for one in drawn)
    lines: list[str] = []
    pictures = []
    if drawn:
        what = "; ".join(sorted({one.what for one in drawn}))
        names = ", ".join(sorted({one.model.rstrip("/").rpartition("/")[2] for one in drawn}))
        maps = [one for one in drawn if one.map is not None]
        if maps:
            pictures += draw_maps(maps, folder, f"Recall of {names} ({what})")
        if at_one_length:
            print_recall(drawn, console)
        else:
            pictures += draw_curves(drawn, folder, f"Forgetting curve of {names} ({what})")
            print_memory_lengths(drawn, console)
            lines += [line for one in drawn for line in remarks(one)]
    tests = _tested(folder) if test and drawn else []
    differences = _differences(folder) if len(drawn) > 1 and not test else []
    for line in [*lines, *(line for _, said in [*tests, *differences] for line in said)]:
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    failed = [row for row in rows if row.status not in ("ok", "budget")]
    if failed:
        first = f"{len(failed)} of {len(rows)} rows failed, first: {failed[0].status}: {failed[0].reason}"
        console.print(first, style="red", markup=False, highlight=False, soft_wrap=True)
    for line in [f"rows: {folder / 'rows.jsonl'}", *(f"picture: {path}" for path in pictures)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if as_json:
        summary = {
            "run": str(folder),
            "curves": as_data(curves),
            "tests": [result for result, _ in tests],
            "differences": [result for result, _ in differences],
            "failed_rows": len(failed),
            "pictures": [str(path) for path in pictures],
        }
        print(json.dumps(summary))
    return len(failed)


def _tested(folder: Path) -> list[tuple[dict[str, Any], list[str]]]:
    """What the tests of several texts say, as data and in words.

    Raises:
        ValueError: nothing that can be tested.
    """
    from farspan.paired import said
    from farspan.report.contrasts import text_tests
    from farspan.report.tables import grouped, read_sources

    tests = text_tests([member for group in grouped(read_sources([folder])) for member in group.members])
    if not tests:
        raise ValueError(f"{folder} holds too little to test its texts by: at least 3 repeats at a length are needed")
    return [
        (
            {"model": test.model, "method": test.method, "texts": test.which} | test.result.as_dict(),
            [f"{test.model} {test.method}, {test.which}: {line}" for line in said(test.result)],
        )
        for test in tests
    ]


def _differences(folder: Path) -> list[tuple[dict[str, Any], list[str]]]:
    """What curves under one question differ by from the first of them, as data and in words."""
    from farspan.paired import said
    from farspan.report.contrasts import group_differences
    from farspan.report.tables import grouped, read_sources

    found = [one for group in grouped(read_sources([folder])) for one in group_differences(group)]
    # a length that is 0 in both says nothing
    return [(one.as_dict(), said([one]) if any(one.values) else []) for one in found]


def _print_plans(plans: list[tuple[str, str, str, "Plan"]], first: str, as_json: bool) -> None:
    from dataclasses import asdict

    from rich.table import Table

    table = Table(title=f"plan: nothing is measured yet{first}", title_justify="left")
    for column in ("model", "method", "asked", "examples", "tokens", "TFLOP", "memory", "time"):
        left = column in ("model", "method", "asked")
        table.add_column(column, justify="left" if left else "right", no_wrap=not left, overflow="fold")
    for model, method, what, cost in plans:
        seconds = cost.seconds or 0.0
        table.add_row(
            model.rstrip("/").rpartition("/")[2],
            method,
            what,
            f"{cost.num_examples:,}",
            f"{cost.tokens:,}",
            f"{cost.flops / 1e12:,.3g}",
            f"{cost.extra_bytes / 2**30:,.2f} GiB",
            time.strftime("%H:%M:%S", time.gmtime(seconds)) if seconds < 86400 else f"{seconds / 3600:,.0f} h",
        )
    console = err if as_json else Console()
    console.print(table)
    for model, method, _, cost in plans:
        if cost.fallback:
            console.print(f"{model} {method}: read with plain forwards: {cost.fallback}", style="yellow", markup=False)
    if as_json:
        cells = [
            {"model": model, "method": method, "what": what, **asdict(cost)} for model, method, what, cost in plans
        ]
        print(json.dumps({"plans": cells}))


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(help="Folder or hub id of a causal model.")],
    method: Annotated[str, typer.Option(help="How the model reads.")] = "full",
    text: Text = "builtin",
    device: Device = None,
    device_map: DeviceMap = None,
    dtype: ModelDtype = Dtype.auto,
    attention: Attention = None,
    trained_length: TrainedLength = None,
    revision: Revision = None,
    trust_remote_code: RemoteCode = False,
    allow_pickle: Pickle = False,
    as_json: AsJson = False,
) -> None:
    """Is a method really doing on this model what it says? Checks in under a minute; exit 1 when one fails."""
    with _said():
        from dataclasses import asdict

        from farspan.doctor import beginning, diagnose, print_checks
        from farspan.methods import method as parsed

        wanted = parsed(method)
        loader = _loader(
            device, device_map, dtype, attention, trained_length, revision, trust_remote_code, allow_pickle
        )
        excerpt, console = beginning(text), err if as_json else Console()
        with console.status(f"loading {model}") as status:
            lm = loader(model)
            checks = diagnose(
                lm, wanted, excerpt, watch=lambda name, done, total: status.update(f"{done + 1}/{total}: {name}")
            )
        failed = print_checks(checks, f"{wanted} on {model}", console)
        if as_json:
            print(
                json.dumps(
                    {"model": model, "method": str(wanted), "failed": failed, "checks": list(map(asdict, checks))}
                )
            )
        if failed:
            raise typer.Exit(1)


@app.command("import")
def import_file(
    file: Annotated[Path, typer.Argument(help="Result file of the authors' script: JSON with copy_accs and lm_accs.")],
    out: Annotated[Path, typer.Option(help="Run folder to make.")],
    model: Annotated[str | None, typer.Option(help="Whose results they are; default the file's name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON last.")] = False,
) -> None:
    """Brings published results into a run, with their memory lengths and a picture."""
    with _said():
        from farspan.record import Run
        from farspan.tasks.curve import read_authors_file

        rows = read_authors_file(file, model or file.stem)
        with Run.open(out, {"task": "curve", "imported": file.name, "model": model or file.stem}) as run:
            known = {row.key for row in run.rows}
            for row in rows:
                if row.key not in known:
                    run.append(row)
            _show(run.rows, out, err if as_json else Console(), as_json)


@train_app.command("lm")
def train_lm(
    config: Annotated[Path, typer.Argument(help="TOML file; see configs/.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="TABLE.KEY=VALUE; repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON last.")] = False,
) -> None:
    """Pre-trains a small Llama, tokenizer included. Repeating the command continues a training that was stopped."""
    with _said():
        from farspan.train.config import read_config
        from farspan.train.lm import LmSettings, train

        settings = read_config(config, LmSettings, overrides or [])
        summary = train(settings)
        console = err if as_json else Console()
        console.print(
            f"{summary['parameters']:,} parameters, {summary['tokens']:,} tokens, loss {summary['loss']:.3f}, "
            f"held-out loss {summary['held_out_loss']} nats per token: {settings.out}"
        )
        if as_json:
            print(json.dumps(summary))


@app.command()
def perplexity(
    models: Models,
    method: Methods = None,
    text: Text = "builtin",
    lengths: Annotated[
        str, typer.Option(help="512,1024,2048 or 512:16384; auto: powers of two to twice the trained length.")
    ] = "auto",
    points: Annotated[int | None, typer.Option(min=1, help="Lengths in a range A:B, default 16.")] = None,
    spacing: Annotated[Spacing | None, typer.Option(help="Of a range A:B, default log.")] = None,
    repeats: Annotated[int, typer.Option(help="Windows of the text, from as many documents as possible.")] = 10,
    targets: Annotated[
        str, typer.Option(help="fixed: the same tokens at all lengths; last: of each length; all: every token.")
    ] = "fixed",
    target_tokens: Annotated[
        int | None, typer.Option(min=1, help="Scored at each length; default 256, or half of the smallest length.")
    ] = None,
    buckets: Annotated[
        int | None, typer.Option(min=1, help="Equal parts of a text, with --targets all; default powers of two.")
    ] = None,
    seed: Seed = 0,
    out: Out = None,
    device: Device = None,
    device_map: DeviceMap = None,
    dtype: ModelDtype = Dtype.auto,
    attention: Attention = None,
    trained_length: TrainedLength = None,
    revision: Revision = None,
    trust_remote_code: RemoteCode = False,
    allow_pickle: Pickle = False,
    batch: Batch = None,
    chunk: Chunk = None,
    plan: PlanOnly = False,
    as_json: AsJson = False,
) -> None:
    """Perplexity by length: how well a model expects the same tokens behind more and more of their text."""
    with _said():
        from farspan.lengths import DEFAULT_POINTS, parse_lengths
        from farspan.perplexity import PerplexitySettings, default_folder, measure_perplexity, plan_perplexity

        if (points or spacing) and ":" not in lengths:
            raise ValueError("--points and --spacing belong to a range, such as --lengths 512:16384")
        spaced: Literal["linear", "log"] = "linear" if spacing is Spacing.linear else "log"
        chosen = parse_lengths(lengths, points or DEFAULT_POINTS, spaced) if lengths != "auto" else None
        settings = PerplexitySettings(text, chosen, repeats, seed, targets, target_tokens, buckets)
        loader = _loader(
            device, device_map, dtype, attention, trained_length, revision, trust_remote_code, allow_pickle
        )
        methods = method or ["full"]
        if plan:
            from farspan.report.perplexity import label

            plans = plan_perplexity(models, methods, settings, loader=loader, batch=batch, chunk=chunk)
            _print_plans([(name, how, label(what), cost) for name, how, what, cost in plans], "", as_json)
            return
        from farspan.display import Display
        from farspan.measure import Watch

        folder = out or default_folder(models, methods, settings)
        console = err if as_json else Console()
        with Display(console) as display:
            rows = measure_perplexity(
                models,
                methods,
                settings,
                folder,
                loader=loader,
                batch=batch,
                chunk=chunk,
                watch=Watch(display.start, display.row, display.notice),
            )
        if _show_perplexity(rows, folder, console, as_json):
            raise typer.Exit(1)


def _show_perplexity(rows: list["Row"], folder: Path, console: Console, as_json: bool) -> int:
    """Draws and prints what a run holds; returns how many of its rows failed."""
    from farspan.record import read_header
    from farspan.report import perplexity as report

    found = report.series(rows)
    drawn = [one for one in found if one.measured.any()]
    pictures: list[Path] = []
    if drawn:
        about = read_header(folder)["models"]
        trained = {about.get(one.model, {}).get("trained_length") for one in drawn}
        what = "; ".join(sorted({one.what for one in drawn}))
        names = ", ".join(sorted({one.model.rstrip("/").rpartition("/")[2] for one in drawn}))
        pictures = report.draw_perplexity(drawn, folder, f"Perplexity of {names} ({what})", trained)
        report.print_perplexity(drawn, console)
    failed = [row for row in rows if row.status != "ok"]
    if failed:
        first = f"{len(failed)} of {len(rows)} rows failed, first: {failed[0].status}: {failed[0].reason}"
        console.print(first, style="red", markup=False, highlight=False, soft_wrap=True)
    for line in [f"rows: {folder / 'rows.jsonl'}", *(f"picture: {path}" for path in pictures)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if as_json:
        summary = {
            "run": str(folder),
            "perplexity": report.as_data(found),
            "failed_rows": len(failed),
            "pictures": [str(path) for path in pictures],
        }
        print(json.dumps(summary))
    return len(failed)
