"""What the embedded model shows: memory inside its window, none at twice the window, on files it never saw.

    python benchmarks/embedded_model.py [--quick] [--check] [--out FOLDER]

Natural text of held-out files, of files it was trained on (figure 4 of Liu et al. 2024: the curve barely moves), and
shuffled tokens of held-out files. Draws all three in one picture. Last line: the figures as JSON.
"""

from pathlib import Path
from typing import Any

from common import end, folder_or_scratch, parser_of, run_script

from farspan import measure
from farspan.loading.places import DEMO, folder_of
from farspan.measuring.loader import Load
from farspan.record import read_header
from farspan.report.curve_section import draw_curves
from farspan.report.curves import series
from farspan.stats import measured_mean

TEXTS = ("builtin:held-out+tests", "builtin:train+tests", "shuffled:builtin:held-out+tests")
LENGTHS = (32, 48, 64, 96, 128, 160, 192, 224, 254, 288, 320, 384, 448, 511)
BOUNDS = "copy >= 0.85 and >= 0.3 above control inside the window; shuffled < 0.05 at twice the window"


def main() -> None:
    parser = parser_of(__doc__, "8 repeats instead of 40")
    parser.add_argument("--out", type=Path, help="keep runs and picture here")
    options = parser.parse_args()
    model = folder_of(DEMO)
    with folder_or_scratch(options.out) as out:
        rows = []
        for text in TEXTS:
            what: dict[str, Any] = {"text": text, "lengths": LENGTHS, "repeats": 8 if options.quick else 40}
            folder = out / text.replace(":", "-")
            rows += measure([model], ["full"], ["curve"], out=folder, loader=Load(dtype="float32"), **what).rows
        found = series(rows, read_header(folder)["models"])
        print(draw_curves(found, out, "The embedded model on held-out, training and shuffled text")[0])

    figures: dict[str, Any] = {}
    for one in found:
        copy, control = measured_mean(one.curve.copy), measured_mean(one.curve.control)
        print(one.name)
        for length, c, m in zip(one.curve.lengths, copy, control, strict=True):
            print(f"  {length:4}  copy {c:.3f}  control {m:.3f}")
        text = one.name.removeprefix("nested, ")
        figures[text] = {
            "copy": dict(zip(map(int, one.curve.lengths), copy.round(3).tolist(), strict=True)),
            "control": dict(zip(map(int, one.curve.lengths), control.round(3).tolist(), strict=True)),
            **{name: str(getattr(one.summary, name)) for name in ("fine", "half_life", "reach", "span")},
        }
    natural, shuffled = figures[TEXTS[0]], figures[TEXTS[2]]
    inside = [length for length in LENGTHS if 2 * length + 2 <= 512]
    best = max((c for n in inside if (c := natural["copy"][n]) - natural["control"][n] >= 0.3), default=0.0)
    figures["best_copy_with_gap"] = best
    figures["shuffled_inside"] = max(shuffled["copy"][n] for n in inside)
    figures["shuffled_at_twice_the_window"] = shuffled["copy"][LENGTHS[-1]]
    fell = figures["shuffled_at_twice_the_window"] < 0.05 < figures["shuffled_inside"] / 2
    end(figures, [] if best >= 0.85 and fell else [BOUNDS], options.check)


if __name__ == "__main__":
    run_script(main)
