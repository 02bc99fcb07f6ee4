"""The demonstration: the embedded model's forgetting curve on text it never saw, natural and shuffled."""

import shutil
from importlib.resources import as_file, files
from pathlib import Path

from rich.console import Console

from farspan.compare import CurveSettings, Load, Watch, measure_curves
from farspan.display import Display, memory_table
from farspan.record import Row, read_header
from farspan.report import tables
from farspan.report.picture import draw_curves

TEXTS = ("builtin:held-out", "shuffled:builtin:held-out")
LENGTHS = (32, 64, 96, 128, 160, 192, 224, 254, 288, 320, 352, 384, 448, 511)
REPEATS = 12
NEXT = "farspan curve MODEL --text FOLDER"


def run_demo(out: Path, console: Console, *, fresh: bool = False) -> Path:
    """Measures, draws and explains; returns the picture's path.

    Raises:
        ValueError: `out` holds something else.
    """
    if fresh and (out / "natural" / "run.json").exists():
        shutil.rmtree(out)
    rows: list[Row] = []
    console.print("A small model of 2 M parameters reads a text, then predicts the same text again, token by token:")
    console.print("  natural: a Python file it never saw. What it cannot guess, it must remember.")
    console.print("  shuffled: the tokens of such files in random order. Nothing to guess; memory alone.\n")
    with as_file(files("farspan") / "assets" / "demo") as folder, Display(console) as display:
        watch = Watch(display.start, display.row)
        for name, text in zip(("natural", "shuffled"), TEXTS, strict=True):
            settings = CurveSettings(text=text, lengths=LENGTHS, repeats=REPEATS)
            rows += measure_curves(
                [str(folder)], ["full"], settings, out / name, loader=Load(dtype="float32"), watch=watch
            )
    series = tables.series(rows, read_header(out / "natural")["models"])
    picture, _ = draw_curves(series, out, "Forgetting curve of farspan's embedded model")
    console.print(memory_table(series))
    console.print(f"\npicture: {picture}", highlight=False, soft_wrap=True)
    console.print(f"next, with a model of your own (a folder or a hub id): [bold]{NEXT}[/bold]")
    return picture
