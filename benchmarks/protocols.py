"""How the protocols of the forgetting curve agree, and where they differ: nested, paper, and probes of two sizes.

    python benchmarks/protocols.py [MODEL ...] [--text TEXT] [--repeats N] [--out FOLDER] [--quick] [--check]

For each model (default the embedded one): copy and control by length under each protocol on natural and on shuffled
text, and probes of 64 scored tokens after more and more tokens of warm-up, at one length. With --check, fails when a
control accuracy differs from `nested`'s by more than both intervals allow at a length within the window (beyond it
the contexts differ, and a broken model guesses worse in the longer one), or when a probe of the embedded model does not
reach further than `nested`. Last line: the figures as JSON.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from common import end, folder_or_scratch, parser_of, run_script

from farspan import measure, stats
from farspan.loading.places import DEMO, folder_of
from farspan.measuring.loader import Load
from farspan.record import read_header
from farspan.report.curve_section import draw_curves
from farspan.report.curves import series
from farspan.tasks.curve import Curve

WINDOW = 512  # tokens that the models were trained on
LENGTHS = (64, 96, 128, 192, 254, 320, 384, 448, 511)
PROTOCOLS: dict[str, dict[str, Any]] = {
    "nested": {"protocol": "nested"},
    "paper": {"protocol": "paper"},
    "probe 128+256": {"protocol": "probe", "warmup": 128, "scored": 256},
    "probe 32+64": {"protocol": "probe", "warmup": 32, "scored": 64},
}
WARMUPS = (0, 4, 16, 32, 64, 128)
SWEPT = {"lengths": (254,), "protocol": "probe", "scored": 64}


def main() -> None:
    parser = parser_of(__doc__, "8 repeats, three lengths", "fail when the protocols disagree")
    parser.add_argument("models", nargs="*", default=[folder_of(DEMO)])
    parser.add_argument("--text", default="builtin:held-out+tests")
    parser.add_argument("--repeats", type=int, default=24)
    parser.add_argument("--out", type=Path, help="keep runs and pictures here")
    options = parser.parse_args()
    lengths, repeats = ((96, 254, 448), 8) if options.quick else (LENGTHS, options.repeats)
    figures: dict[str, Any] = {}
    with folder_or_scratch(options.out) as out:
        for model in options.models:
            name = Path(model).name
            for text in (options.text, f"shuffled:{options.text}"):
                kind = "shuffled" if text.startswith("shuffled:") else "natural"
                drawn = []
                for label, how in PROTOCOLS.items():
                    if kind == "shuffled" and label == "paper":
                        continue  # the authors have no shuffled text
                    rows, found = measured(model, text, {"lengths": lengths, **how}, repeats, out / name / kind / label)
                    drawn += found
                    figures[f"{name} {kind} {label}"] = said(stats.curve(rows))
                draw_curves(drawn, out / name, f"{name}: protocols on {kind} text", f"protocols-{kind}")
                for warmup in WARMUPS:
                    folder = out / name / kind / f"warm-up {warmup}"
                    rows, _ = measured(model, text, SWEPT | {"warmup": warmup}, repeats, folder)
                    figures[f"{name} {kind} warm-up {warmup}"] = said(stats.curve(rows))
    missed = [problem for model in options.models for problem in problems(figures, Path(model).name)]
    end(figures, missed, options.check)


def measured(model: str, text: str, how: dict[str, Any], repeats: int, folder: Path) -> tuple[Any, Any]:
    how = dict(how)
    lengths = how.pop("lengths", "auto")
    what: dict[str, Any] = {"text": text, "lengths": lengths, "repeats": repeats, "loader": Load(dtype="float32")}
    rows = measure([model], ["full"], [Curve(**how)], out=folder, **what).rows
    return rows, series(rows, read_header(folder)["models"])


def said(curve: stats.MeasuredCurve) -> dict[str, Any]:
    """Accuracies by length with half their intervals, printed and returned."""
    result: dict[str, Any] = {}
    for half in ("copy", "control"):
        values = getattr(curve, half)
        low, high = stats.bands(values)
        result[half] = dict(zip(map(int, curve.lengths), stats.measured_mean(values).round(3).tolist(), strict=True))
        result[f"{half}_half_interval"] = ((high - low) / 2).round(3).tolist()
    summary = stats.summarise(curve)
    result |= {"half_life": str(summary.half_life), "reach": str(summary.reach), "span": str(summary.span)}
    print(json.dumps(result), flush=True)
    return result


def problems(figures: dict[str, Any], name: str) -> list[str]:
    found = []
    for kind in ("natural", "shuffled"):
        nested = figures[f"{name} {kind} nested"]
        for label in PROTOCOLS:
            if label != "nested" and (other := figures.get(f"{name} {kind} {label}")):
                apart = np.abs(np.subtract(list(nested["control"].values()), list(other["control"].values())))
                allowed = np.add(nested["control_half_interval"], other["control_half_interval"])
                inside = np.array([2 * length + 2 <= WINDOW for length in nested["control"]])
                if (apart > allowed)[inside].any():
                    found.append(f"{name}, {kind}: controls of nested and {label} differ by up to {apart.max():.2f}")
    if name == "demo":
        nested, probe = (figures[f"{name} shuffled {label}"]["copy"][448] for label in ("nested", "probe 32+64"))
        if probe <= nested:
            found.append(f"a probe copies {probe} of 448 tokens, nested {nested}")
    return found


if __name__ == "__main__":
    run_script(main)
