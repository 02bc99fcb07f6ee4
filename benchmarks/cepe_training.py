"""CEPE from scratch on one CPU core: warm-up, main stage and distillation beside the embedded model, and what it gains.

    python benchmarks/cepe_training.py [--folder FOLDER] [--quick] [--check]

The embedded model (trained on 512 tokens) stays as it is. Its own blocks, made to look both ways, begin the encoder
(--encoder mlm: one of `farspan train mlm`, from random weights). The trainings are those of configs/*-demo.toml;
repeated, the script goes on where it was stopped.
Measured on held-out files: perplexity of the last 128 tokens behind more and more
of their document, from 512 tokens to 16 times that, on the same targets for all: the embedded model alone, with
attention sinks, YaRN and RePlug, and CEPE and CEPE-Distilled with a decoder of 512. Intervals: Student's t over
documents; differences are paired. Also: the warm-up's loss against the base's, forgetting curves, what a teacher costs
above its forward alone, and how long a step waits for data. Last line: the figures as JSON.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats as distributions

ROOT = Path(__file__).resolve().parents[1]
TEXT = "builtin:held-out+tests"
WINDOW = 512  # tokens the embedded model was trained on
LENGTHS = (512, 1024, 2048, 4096, 8192)
TARGETS = 128
READERS = {
    "embedded model": "full",
    "+ sinks": "sinks:window=508",
    "+ YaRN": "rope:type=yarn,factor=16",
    "+ RePlug": "replug:piece=128,tail=256,weights=bm25",
}
CEPE = f"cepe:chunk=64,decoder_window={WINDOW + 1}"
BOUNDS = {  # largest that is allowed
    "warmup_share_of_base_loss": 0.5,
    "gain_upper": 0.0,  # nats, upper end of the paired difference at 16 windows to no context
    "growth_at_16": 0.1,  # nats from the best length to the longest
    "teacher_over_forward": 1.2,
    "data_share": 0.03,
}


def trainings(folder: Path, encoder: str, quick: bool) -> dict[str, Any]:
    """Runs what is missing; returns the summaries."""
    from farspan.train import cepe, distill, mlm
    from farspan.train.config import read_config

    few = (
        ["trainer.steps=6", "optimizer.warmup_steps=1", "trainer.save_every=3", "trainer.log_every=2"] if quick else []
    )
    done: dict[str, Any] = {}
    if encoder == "mlm":
        overrides = [f"out={folder / 'encoder'}", *few]
        done["encoder"] = mlm.train(read_config(ROOT / "configs/mlm-demo.toml", mlm.MlmSettings, overrides))
        encoder = str(folder / "encoder")
    stages: tuple[tuple[str, str, Any, Any], ...] = (
        ("warmup", "cepe-warmup-demo", cepe.CepeSettings, cepe.train),
        ("main", "cepe-demo", cepe.CepeSettings, cepe.train),
        ("distilled", "distill-demo", distill.DistillSettings, distill.train),
    )
    for name, config, kind, train in stages:
        overrides = [f"out={folder / name}", f"model.encoder={encoder}", *few]
        overrides += [] if name == "warmup" else [f"model.warmed_up={folder / 'warmup'}"]
        done[name] = train(read_config(ROOT / f"configs/{config}.toml", kind, overrides), print)
        print(f"{name}: loss {done[name]['loss']:.3f}, {done[name]['seconds']} s", flush=True)
    return done


def nats(rows: list[Any], model: str, method: str) -> dict[int, np.ndarray]:
    """Mean nats of the targets by length, document by document."""
    found: dict[int, np.ndarray] = {}
    for length in sorted({row.length for row in rows}):
        mine = [r for r in rows if (r.model, r.method, r.length, r.status) == (model, method, length, "ok")]
        found[length] = np.array([row.scores["nats"] for row in sorted(mine, key=lambda row: row.repeat)])
    return found


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """The mean, and its 95 % interval by Student's t."""
    half = distributions.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean()), float(values.mean() - half), float(values.mean() + half)


def perplexities(folder: Path, lengths: tuple[int, ...], repeats: int) -> dict[str, dict[int, np.ndarray]]:
    from farspan.demo import embedded_model
    from farspan.lm import load
    from farspan.perplexity import PerplexitySettings, measure_perplexity

    settings = PerplexitySettings(TEXT, lengths, repeats, target_tokens=TARGETS)
    base = embedded_model()
    rows = measure_perplexity([base], list(READERS.values()), settings, folder / f"base-{repeats}")
    found = {name: nats(rows, base.name, written(how)) for name, how in READERS.items()}
    for label, name in (("CEPE", "main"), ("CEPE-Distilled", "distilled")):
        lm = load(folder / name, dtype="float32", device="cpu")
        rows = measure_perplexity([lm], [CEPE], settings, folder / f"{name}-perplexity-{repeats}")
        found[label] = nats(rows, lm.name, written(CEPE))
    return found


def written(method: str) -> str:
    from farspan.methods import method as parsed

    return str(parsed(method))


def spans(folder: Path, lengths: tuple[int, ...], repeats: int) -> dict[str, Any]:
    """Forgetting curves: what of a text is copied beyond what can be guessed."""
    from farspan import stats
    from farspan.curves import CurveSettings, measure_curves
    from farspan.demo import embedded_model
    from farspan.lm import load

    settings = CurveSettings(text=TEXT, lengths=lengths, repeats=repeats)
    found: dict[str, Any] = {}
    for label, how, lm in (
        ("embedded model", "full", embedded_model()),
        ("CEPE", CEPE, load(folder / "main", dtype="float32", device="cpu")),
    ):
        rows = measure_curves([lm], [how], settings, folder / f"curve-{label.replace(' ', '-')}-{repeats}")
        (curve,) = stats.curves(rows).values()
        found[label] = {int(n): round(float(g), 3) for n, g in zip(curve.lengths, stats.gap(curve), strict=True)}
    return found


def copying(folder: Path, rows: int) -> tuple[float, float]:
    """Nats per token of held-out windows under the warmed-up model, their copies in the encoder, and under the base."""
    from farspan import corpus
    from farspan.lm import load
    from farspan.train.cepe import terms
    from farspan.train.documents import DocumentRows, DocumentSettings, collated

    lm = load(folder / "warmup", dtype="float32", device="cpu")
    data = DocumentSettings(text=TEXT, mixture={"cat": 1.0}, decoder=128, chunks=2, chunk=64)
    text = corpus.load(TEXT, lm.tokenizer)
    windows = DocumentRows(text, data, samples=rows, separator=lm.separator.ids, seed=1, copies=True)
    batch = collated([windows[i] for i in range(rows)])
    nothing = batch | {"context_attention_mask": torch.zeros_like(batch["context_attention_mask"])}
    with torch.no_grad():
        one, other = (float(terms(lm.model, lm.model, given)["nats"]) for given in (batch, nothing))
    return one, other


def costs(folder: Path) -> dict[str, float]:
    """What the teacher's pre-computation takes over its forward alone, and the share of a step that data take."""
    from tempfile import TemporaryDirectory

    from farspan import hf
    from farspan.train.config import read_config
    from farspan.train.distill import DistillSettings, prepare, store, teacher_of, terms
    from farspan.train.documents import collated

    with TemporaryDirectory() as place:
        overrides = [f"out={place}", f"model.warmed_up={folder / 'warmup'}", "trainer.steps=4"]
        overrides += ["optimizer.warmup_steps=1"]
        settings = read_config(ROOT / "configs/distill-demo.toml", DistillSettings, overrides)
        ready = prepare(settings, lambda text: None)
        teacher, seconds = teacher_of(settings, ready), {"forward": math.inf, "store": math.inf}
        batches = [collated([ready.rows[i] for i in range(first, first + 8)]) for first in range(0, 32, 8)]

        def forward() -> None:
            for batch in batches:
                whole = torch.cat([batch["input_ids"], batch["context_input_ids"].flatten(1)], 1)
                with torch.no_grad(), hf.watched_decoder(ready.model) as seen:
                    ready.model(input_ids=whole, use_cache=False, logits_to_keep=1)
                    n = batch["input_ids"].shape[1]
                    hf.logits(ready.model, seen[-1][0][:, -n:], seen[-1])

        for turn in range(5):  # in turns, the best of each: another process may be in the way
            for name in seconds:
                started = time.process_time()
                if name == "forward":
                    forward()
                else:
                    store(teacher, ready.rows, Path(place) / f"teacher-{turn}", lambda text: None)
                seconds[name] = min(seconds[name], time.process_time() - started)
        started = time.process_time()
        batch = collated([ready.rows[i] for i in range(8)])
        data = time.process_time() - started
        started = time.process_time()
        terms(settings.distill, teacher, ready.model, ready.model, batch)["ce"].backward()
        step = time.process_time() - started
    return {"teacher_over_forward": seconds["store"] / seconds["forward"], "data_share": data / (data + step)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/cepe-training"))
    parser.add_argument("--encoder", choices=("demo", "mlm"), default="demo")
    parser.add_argument("--repeats", type=int, default=48, help="documents")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = arguments.folder / ("quick" if arguments.quick else "")
    lengths = LENGTHS[:2] if arguments.quick else LENGTHS
    repeats = 2 if arguments.quick else arguments.repeats

    done = trainings(folder, arguments.encoder, arguments.quick)
    figures: dict[str, Any] = {f"{name}_loss": round(summary["loss"], 4) for name, summary in done.items()}
    copied, base = copying(folder, 8 if arguments.quick else 64)
    figures |= {"copying_nats": copied, "base_nats": base, "warmup_share_of_base_loss": copied / base}
    print(f"warm-up: {copied:.3f} nats per token of a copied text, base {base:.3f}", flush=True)

    found = perplexities(folder, lengths, repeats)
    print("| | " + " | ".join(f"{length:,}" for length in lengths) + " |")
    print("|---" * (len(lengths) + 1) + "|")
    for name, by_length in found.items():
        cells = [tuple(map(math.exp, interval(values))) for values in by_length.values()]
        print(f"| {name} | " + " | ".join(f"{m:.2f} [{low:.2f}, {high:.2f}]" for m, low, high in cells) + " |")
        figures[name] = {length: round(cell[0], 4) for length, cell in zip(by_length, cells, strict=True)}
    without = found["embedded model"][WINDOW]
    for name in ("CEPE", "CEPE-Distilled"):
        gains = {length: interval(values - without) for length, values in found[name].items() if length > WINDOW}
        said = [f"{length:,}: {m:+.4f} [{low:+.4f}, {high:+.4f}]" for length, (m, low, high) in gains.items()]
        print(f"{name}, nats to the decoder's window alone, paired: " + "; ".join(said), flush=True)
        figures[f"{name} gain"] = gains
    longest = figures["CEPE gain"][lengths[-1]]
    figures["gain_upper"] = longest[2]
    figures["growth_at_16"] = longest[0] - min(mean for mean, _, _ in figures["CEPE gain"].values())
    figures["curves"] = spans(folder, (64, 256) if arguments.quick else (64, 128, 250, 500, 1000, 2000), repeats)
    for name, gaps in figures["curves"].items():
        print(f"copied beyond what is guessed, {name}: {gaps}")
    figures |= costs(folder)
    print(f"teacher over its forward {figures['teacher_over_forward']:.2f}, data {figures['data_share']:.1%} of a step")
    print(json.dumps(figures))
    missed = [name for name, bound in BOUNDS.items() if not figures[name] <= bound]
    if arguments.check and missed:
        sys.exit(f"missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
