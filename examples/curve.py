"""The forgetting curve of a model, in Python: the embedded model, or the one named on the command line."""

import sys
from importlib.resources import files

import farspan
from farspan.stats import curves, summarise

model = sys.argv[1] if len(sys.argv) > 1 else str(files("farspan") / "assets" / "demo")
measured = farspan.curve(model, text="builtin:held-out", lengths=(32, 128, 240, 400), repeats=4, out="runs/example")

for (name, method, what), curve in curves(measured.rows).items():
    numbers = summarise(curve)
    print(f"{name} ({method}; {what}, farspan {farspan.__version__})")
    for length, copy, control in zip(curve.lengths, curve.copy.mean(0), curve.control.mean(0), strict=True):
        print(f"  {length:5} tokens: copy {copy:.2f}, control {control:.2f}")
    print(f"  half-life {numbers.half_life}, reach {numbers.reach} tokens")
