"""The demonstration: the embedded model's forgetting curve on unseen text, natural and shuffled."""

import shutil
from pathlib import Path

from rich.text import Text

from farspan.lm import LM, load, wrap
from farspan.loading.places import DEMO, folder_of
from farspan.measuring.grid import measure
from farspan.measuring.loop import Watch
from farspan.record import Row, read_header
from farspan.report.curve_section import draw_curves, print_curves
from farspan.report.curves import series
from farspan.report.progress import Display
from farspan.terminal import Terminal

TEXTS = {"natural": "builtin:held-out+tests", "shuffled": "shuffled:builtin:held-out+tests"}
LENGTHS = (32, 64, 96, 128, 160, 192, 224, 254, 288, 320, 352, 384, 448, 511)
REPEATS = 12
NEXT = "farspan curve MODEL --text FOLDER"


def embedded_model() -> LM:
    """Return the model that comes with farspan, in fp32."""
    lm = load(folder_of(DEMO), dtype="float32", device="cpu")
    return wrap(lm.model, lm.tokenizer, "farspan-demo")


def run_demo(out: Path, console: Terminal, *, fresh: bool = False) -> int:
    """Measure, draw and explain; return how many rows failed.

    Raises:
        ValueError: `out` holds something else.
    """
    for name in TEXTS if fresh else ():
        if (out / name / "run.json").exists():
            shutil.rmtree(out / name)
    rows: list[Row] = []
    console.print("A model of 2 M parameters reads a text, then predicts the same text again, token by token:")
    console.print("  natural: a Python file it never saw. It must remember the tokens it cannot guess.")
    console.print("  shuffled: the tokens of such files in random order. Nothing can be guessed: memory alone.\n")
    lm = embedded_model()
    with Display(console) as display:
        watch = Watch(display.start, display.row, share=display.share)
        for name, text in TEXTS.items():
            measured = measure(
                [lm],
                ["full"],
                ["curve"],
                text=text,
                lengths=LENGTHS,
                repeats=REPEATS,
                out=out / name,
                shard=(1, 1),  # the whole run, also in a task of a Slurm array
                watch=watch,
            )
            rows += measured.rows
    curves = series(rows, read_header(out / "natural")["models"])
    drawn = [one for one in curves if one.summary is not None]
    picture, _ = draw_curves(drawn, out, "Forgetting curve of farspan's embedded model")
    print_curves(drawn, console)
    console.print_line(f"\npicture: {picture}")
    console.print("next, with a model of your own (a folder or a hub id):", Text(NEXT, style="bold"))
    return sum(row.status != "ok" for row in rows)
