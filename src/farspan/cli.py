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


@app.command()
def curve(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Folders or hub ids of causal models.")],
    method: Annotated[list[str] | None, typer.Option(help="How the model reads, default full; repeatable.")] = None,
    text: Annotated[str, typer.Option(help="FILE, FOLDER, org/name, builtin, builtin:held-out or random.")] = "builtin",
    target_text: Annotated[
        str | None, typer.Option(help="Text to be copied; default --text. `shuffled`: --text in shuffled order.")
    ] = None,
    prefix_text: Annotated[
        str | None, typer.Option(help="Irrelevant text of the control; default the protocol's own.")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="512,1024,2048 or 512:16384; default up to twice the trained length in all.")
    ] = None,
    points: Annotated[int | None, typer.Option(help="Lengths in a range A:B, default 16.")] = None,
    spacing: Annotated[Spacing | None, typer.Option(help="Of a range A:B, default linear.")] = None,
    repeats: Annotated[int, typer.Option(help="Targets at each length.")] = 10,
    protocol: Annotated[Protocol, typer.Option(help="nested: ours; paper: the authors'.")] = Protocol.nested,
    compat: Annotated[
        Compat | None, typer.Option(help="The authors' token ids and grid; implies --protocol paper.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the choice of texts.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Run folder; default: one under runs/.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps.")] = None,
    device_map: Annotated[str | None, typer.Option(help="`auto` spreads a model over accelerators.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="auto: the checkpoint's own.")] = Dtype.auto,
    attention: Annotated[str | None, typer.Option(help="Attention implementation of transformers.")] = None,
    trained_length: Annotated[int | None, typer.Option(help="Tokens; overrides the model's config.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that comes with the model.")] = False,
    allow_pickle: Annotated[bool, typer.Option(help="Also read .bin weights, which can run code.")] = False,
    batch: Annotated[int | None, typer.Option(min=1, help="Repeats read at once; default what fits.")] = None,
    chunk: Annotated[int | None, typer.Option(min=1, help="Tokens of one forward.")] = None,
    plan: Annotated[bool, typer.Option(help="Say tokens, FLOPs, memory and time; measure nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON last.")] = False,
) -> None:
    """The forgetting curve: how long a text a model can copy from memory, with its memory lengths and a picture."""
    with _said():
        from farspan.compare import (
            DEFAULT_POINTS,
            CurveSettings,
            Load,
            authors_lengths,
            default_folder,
            parse_lengths,
        )

        if (points or spacing) and ":" not in (lengths or ""):
            raise ValueError("--points and --spacing belong to a range, such as --lengths 512:16384")
        if device is not None and device_map is not None:
            raise ValueError("--device and --device-map contradict each other: give one")
        if compat is not None and (points or spacing or not (lengths or "").startswith("8:")):
            raise ValueError("--compat authors measures 32 lengths from 8 on: name the longest, --lengths 8:N")
        spaced: Literal["linear", "log"] = "log" if spacing is Spacing.log else "linear"
        chosen = parse_lengths(lengths, points or DEFAULT_POINTS, spaced) if lengths is not None else None
        if compat is not None and chosen is not None:
            chosen = authors_lengths(chosen[-1])
        settings = CurveSettings(
            text=text,
            target_text=target_text,
            prefix_text=prefix_text,
            lengths=chosen,
            repeats=repeats,
            seed=seed,
            protocol="paper" if compat else protocol.value,
            compat=compat is not None,
        )
        options: dict[str, Any] = {
            "revision": revision,
            "trust_remote_code": trust_remote_code,
            "allow_pickle": allow_pickle,
        }
        if device_map is not None:
            options["device_map"] = device_map
        loader = Load(dtype.value, device, attention, trained_length, options)
        methods = method or ["full"]
        if plan:
            _print_plans(models, methods, settings, loader, batch, chunk, as_json)
            return
        folder = out or default_folder(models, methods, settings)
        _measure(models, methods, settings, loader, folder, batch, chunk, as_json)


def _measure(
    models: list[str],
    methods: list[str],
    settings: "CurveSettings",
    loader: "Load",
    folder: Path,
    batch: int | None,
    chunk: int | None,
    as_json: bool,
) -> None:
    from farspan.compare import Watch, measure_curves
    from farspan.display import Display

    console = err if as_json else Console()
    with Display(console) as display:
        watch = Watch(display.start, display.row, display.notice)
        rows = measure_curves(models, methods, settings, folder, loader=loader, batch=batch, chunk=chunk, watch=watch)
    missing = _show(rows, folder, console, as_json)
    if missing:
        raise typer.Exit(1)


def _show(rows: list["Row"], folder: Path, console: Console, as_json: bool) -> int:
    """Draws and prints what a run holds; returns how many of its rows failed."""
    from farspan.display import print_memory_lengths, remarks
    from farspan.record import read_header
    from farspan.report.picture import draw_curves
    from farspan.report.tables import as_data, series

    curves = series(rows, read_header(folder)["models"])
    drawn = [one for one in curves if one.summary is not None]
    pictures = []
    if drawn:
        what = "; ".join(sorted({one.what for one in drawn}))
        names = ", ".join(sorted({one.model.rstrip("/").rpartition("/")[2] for one in drawn}))
        pictures = draw_curves(drawn, folder, f"Forgetting curve of {names} ({what})")
        print_memory_lengths(drawn, console)
        for line in (line for one in drawn for line in remarks(one)):
            console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    failed = [row for row in rows if row.status != "ok"]
    if failed:
        first = f"{len(failed)} of {len(rows)} rows failed, first: {failed[0].status}: {failed[0].reason}"
        console.print(first, style="red", markup=False, highlight=False, soft_wrap=True)
    for line in [f"rows: {folder / 'rows.jsonl'}", *(f"picture: {path}" for path in pictures)]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if as_json:
        summary = {
            "run": str(folder),
            "curves": as_data(curves),
            "failed_rows": len(failed),
            "pictures": [str(path) for path in pictures],
        }
        print(json.dumps(summary))
    return len(failed)


def _print_plans(
    models: list[str],
    methods: list[str],
    settings: "CurveSettings",
    loader: "Load",
    batch: int | None,
    chunk: int | None,
    as_json: bool,
) -> None:
    from dataclasses import asdict

    from rich.table import Table

    from farspan.compare import plan_curves

    plans = plan_curves(models, methods, settings, loader=loader, batch=batch, chunk=chunk)
    table = Table(title="plan: nothing is measured yet", title_justify="left")
    for column in ("model", "method", "examples", "tokens", "PFLOP", "memory above the model", "time"):
        table.add_column(column, justify="left" if column in ("model", "method") else "right")
    for model, method, cost in plans:
        seconds = cost.seconds or 0.0
        table.add_row(
            model,
            method,
            f"{cost.num_examples:,}",
            f"{cost.tokens:,}",
            f"{cost.flops / 1e15:,.3g}",
            f"{cost.extra_bytes / 2**30:,.2f} GiB",
            time.strftime("%H:%M:%S", time.gmtime(seconds)) if seconds < 86400 else f"{seconds / 3600:,.0f} h",
        )
    (err if as_json else Console()).print(table)
    if as_json:
        print(
            json.dumps({"plans": [{"model": model, "method": method, **asdict(cost)} for model, method, cost in plans]})
        )


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
