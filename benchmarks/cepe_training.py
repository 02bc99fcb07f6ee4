"""CEPE from scratch on one CPU core: warm-up, main stage and distillation beside the embedded model, and what it gains.

    python benchmarks/cepe_training.py [--folder FOLDER] [--encoder demo|mlm] [--ablations 'A;B'] [--quick] [--check]

The embedded model (trained on 512 tokens) is frozen. The encoder starts from its blocks, made bidirectional (--encoder
mlm: from an encoder of `farspan train mlm`, from random weights, with a longer warm-up). The trainings are those of
configs/*-demo.toml. A repeated script continues where it was stopped.
Measured on held-out files: perplexity of the last 256 tokens after more and more of their document, from 512 tokens to
16 times that, on the same targets for all: the embedded model alone, with attention sinks, YaRN and RePlug, and CEPE
and CEPE-Distilled with a decoder of 512. Intervals: Student's t over documents; differences are paired. Also: the
warm-up's loss against the base's, forgetting curves, what a teacher costs above its forward alone, and how long a step
waits for data. --ablations: short main stages instead, one field of the config changed in each (`all`: every one).
Last line: the figures as JSON. --check: exits with 1 and prints the claims that do not hold, if there are any.
"""

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Interval, end, interval, missed, parser_of, run_script, table, with_ends

ROOT = Path(__file__).resolve().parents[1]
TEXT = "builtin:held-out+tests"
WINDOW = 512  # tokens the embedded model was trained on
LENGTHS = (512, 1024, 2048, 4096, 8192)
CLAIMED_FROM = 2048  # tokens; from here on CEPE is claimed to be ahead of every reader without training
CURVE = (64, 128, 250, 500, 1000, 2000)  # tokens of a text to be copied; half of what is read
TARGETS = 256
TASK = f"perplexity:target_tokens={TARGETS}"
READERS = {
    "embedded model": "full",
    "+ sinks": "sinks:window=508",
    "+ YaRN": "rope:type=yarn,factor=16",
    "+ RePlug": "replug:piece=128,tail=128,weights=bm25",
}
CEPE = f"cepe:chunk=64,decoder_window={WINDOW + 1}"
ABLATIONS = {  # what a main stage, or a distillation, is given
    "as published": ("main", ()),
    "filter only": ("main", ("data.mixture={ filter = 1.0 }",)),
    "cat only": ("main", ("data.mixture={ cat = 1.0 }",)),
    "RetDoc": ("main", ("data.mixture={ retrieved = 1.0 }", "data.query=64")),
    "frozen encoder": ("main", ("model.train_encoder=false",)),
    "random encoder": ("main", ("model.random_encoder=true",)),
    "no warm-up": ("main", ("model.warmed_up=",)),
    "no warm-up, random q, k, v": ("main", ("model.warmed_up=", "model.initial=random")),
    "no warm-up, zero q, k, v": ("main", ("model.warmed_up=", "model.initial=zero")),
    "c_KL = 0": ("distilled", ("distill.kl=0",)),
    "c_KL = 1": ("distilled", ("distill.kl=1",)),
    "c_KL = 2": ("distilled", ("distill.kl=2",)),
}
FEW = ("trainer.steps=6", "optimizer.warmup_steps=1", "trainer.save_every=3", "trainer.log_every=2")


def train(name: str, out: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Runs a training, or what is missing of it; returns its summary."""
    from farspan.train import cepe, distill, mlm
    from farspan.train.config import read_config
    from farspan.train.progress import TrainingWatch

    recipes: dict[str, tuple[str, Any, Any]] = {
        "encoder": ("mlm-demo", mlm.MlmSettings, mlm.train),
        "warmup": ("cepe-warmup-demo", cepe.CepeSettings, cepe.train),
        "main": ("cepe-demo", cepe.CepeSettings, cepe.train),
        "distilled": ("distill-demo", distill.DistillSettings, distill.train),
    }
    config, kind, train = recipes[name]
    settings = read_config(ROOT / f"configs/{config}.toml", kind, [f"out={out}", *overrides])
    summary = train(settings, TrainingWatch(notice=print))
    print(f"{out.name}: loss {summary['loss']:.3f}, {summary['seconds']} s", flush=True)
    return summary


def trainings(folder: Path, encoder: str, few: tuple[str, ...]) -> dict[str, Any]:
    """Encoder, warm-up, main stage and distillation; returns the summaries."""
    done: dict[str, Any] = {}
    warmup = [f"model.encoder={encoder}"]
    if encoder == "mlm":
        done["encoder"] = train("encoder", folder / "encoder", few)
        # at 300 steps copying has just begun
        warmup = [f"model.encoder={folder / 'encoder'}", "trainer.steps=900", "optimizer.warmup_steps=10"]
    done["warmup"] = train("warmup", folder / "warmup", (*warmup, *few))
    for name in ("main", "distilled"):
        done[name] = train(name, folder / name, (f"model.warmed_up={folder / 'warmup'}", *few))
    return done


def nats(rows: list[Any], model: str, method: str, repeats: int) -> dict[int, np.ndarray]:
    """Mean nats of the targets by length, document by document.

    Raises:
        ValueError: a document that could not be measured.
    """
    found: dict[int, np.ndarray] = {}
    for length in sorted({row.length for row in rows}):
        mine = [r for r in rows if (r.model, r.method, r.length, r.status) == (model, method, length, "ok")]
        if len(mine) != repeats:
            raise ValueError(f"{method} at {length:,} tokens: {len(mine)} of {repeats} documents were measured")
        found[length] = np.array([row.scores["nats"] for row in sorted(mine, key=lambda row: row.repeat)])
    return found


def alone(place: Path, lengths: tuple[int, ...], repeats: int) -> dict[str, dict[int, np.ndarray]]:
    """Perplexities without what was trained."""
    from farspan import measure
    from farspan.demo import embedded_model

    base = embedded_model()
    what: dict[str, Any] = {"text": TEXT, "lengths": lengths, "repeats": repeats}
    rows = measure([base], list(READERS.values()), [TASK], out=place, **what).rows
    return {name: nats(rows, base.name, written(how), repeats) for name, how in READERS.items()}


def with_context(model: Path, lengths: tuple[int, ...], repeats: int) -> dict[int, np.ndarray]:
    """Perplexity of a trained model."""
    from farspan import load, measure

    lm = load(model, dtype="float32", device="cpu")
    what: dict[str, Any] = {"text": TEXT, "lengths": lengths, "repeats": repeats}
    rows = measure([lm], [CEPE], [TASK], out=model / f"perplexity-{repeats}", **what).rows
    return nats(rows, lm.name, written(CEPE), repeats)


def written(method: str) -> str:
    from farspan.methods import method as parsed

    return str(parsed(method))


def spans(folder: Path, lengths: tuple[int, ...], repeats: int) -> dict[str, Any]:
    """Forgetting curves: what of a text is copied beyond what can be guessed, by its length, text by text."""
    from farspan import load, measure, stats
    from farspan.demo import embedded_model

    what: dict[str, Any] = {"text": TEXT, "lengths": lengths, "repeats": repeats}
    found: dict[str, Any] = {}
    for label, how, lm in (
        ("embedded model", "full", embedded_model()),
        ("CEPE", CEPE, load(folder / "main", dtype="float32", device="cpu")),
    ):
        out = folder / f"curve-{label.replace(' ', '-')}-{repeats}"
        rows = measure([lm], [how], ["curve"], out=out, **what).rows
        (curve,) = stats.curves(rows).values()
        found[label] = dict(zip(curve.lengths.tolist(), (curve.copy - curve.control).T, strict=True))
    return found


def copying(folder: Path, rows: int) -> tuple[float, float]:
    """Nats per token of held-out windows under the warmed-up model, their copies in the encoder, and under the base."""
    from torch.utils.data import default_collate

    from farspan.lm import load
    from farspan.text import corpora
    from farspan.train.cepe import terms
    from farspan.train.documents import DocumentRows, DocumentSettings

    lm = load(folder / "warmup", dtype="float32", device="cpu")
    data = DocumentSettings(text=TEXT, mixture={"cat": 1.0}, decoder=128, chunks=2, chunk=64)
    text = corpora.load(TEXT, lm.tokenizer)
    windows = DocumentRows(text, data, samples=rows, separator=lm.separator.ids, seed=1, copies=True)
    batch = default_collate([windows[i] for i in range(rows)])
    nothing = batch | {"context_attention_mask": torch.zeros_like(batch["context_attention_mask"])}
    with torch.no_grad():
        one, other = (float(terms(lm.model, lm.model, given)["nats"]) for given in (batch, nothing))
    return one, other


def costs(folder: Path) -> dict[str, float]:
    """What the teacher's pre-computation takes over its forward alone, and the share of a step that data take."""
    from tempfile import TemporaryDirectory

    from torch.utils.data import default_collate

    from farspan import hf
    from farspan.train.cepe import opened, prepare
    from farspan.train.config import read_config
    from farspan.train.distill import DistillSettings, store, teacher_of, terms
    from farspan.train.progress import TrainingWatch

    with TemporaryDirectory() as place:
        overrides = [f"out={place}", f"model.warmed_up={folder / 'warmup'}", "trainer.steps=4"]
        overrides += ["optimizer.warmup_steps=1"]
        settings = read_config(ROOT / "configs/distill-demo.toml", DistillSettings, overrides)
        lm = opened(settings)
        rows, model = prepare(settings, lm, TrainingWatch()), lm.model
        teacher = teacher_of(settings, rows, lm)
        least = {"forward": math.inf, "store": math.inf}
        batches = [default_collate([rows[i] for i in range(first, first + 8)]) for first in range(0, 32, 8)]

        def forward() -> None:
            for batch in batches:
                whole = torch.cat([batch["input_ids"], batch["context_input_ids"].flatten(1)], 1)
                with torch.no_grad(), hf.watched_decoder(model) as seen:
                    model(input_ids=whole, use_cache=False, logits_to_keep=1)
                    n = batch["input_ids"].shape[1]
                    hf.logits(model, seen[-1][0][:, -n:], seen[-1])

        for turn in range(5):  # in turns, the least of each: another process may be in the way
            for name in least:
                started = time.process_time()
                if name == "forward":
                    forward()
                else:
                    taught = store(teacher, rows, Path(place) / f"teacher-{turn}", TrainingWatch())
                least[name] = min(least[name], time.process_time() - started)
        seconds = {"data": 0.0, "step": 0.0}  # a process of its own has nothing else to do: CPU time is waiting time
        for first in range(0, 32, 8):
            started = time.process_time()
            batch = default_collate([taught[i] for i in range(first, first + 8)])
            waited = time.process_time()
            sum(terms(settings.distill, None, model, model, batch).values()).backward()  # type: ignore[union-attr]
            seconds["data"] += waited - started
            seconds["step"] += time.process_time() - waited
    return {
        "teacher_over_forward": least["store"] / least["forward"],
        "data_share": seconds["data"] / (seconds["data"] + seconds["step"]),
    }


def perplexities(found: dict[str, dict[int, np.ndarray]], lengths: tuple[int, ...]) -> str:
    """A table of perplexities with intervals."""
    lines = []
    for name, by_length in found.items():
        cells = [list(map(math.exp, interval(values))) for values in by_length.values()]
        lines.append([name, *map(with_ends, cells)])
    return table(["", *(f"{length:,}" for length in lengths)], lines)


def differences(found: dict[int, np.ndarray], other: dict[int, np.ndarray]) -> dict[int, Interval]:
    """Nats per token more than `other`, document by document, with intervals, beyond the window."""
    return {length: interval(values - other[length]) for length, values in found.items() if length > WINDOW}


def said(gains: dict[int, Interval]) -> str:
    return "; ".join(f"{length:,}: {with_ends(gain, 4, '+')}" for length, gain in gains.items())


def ablated(folder: Path, names: list[str], encoder: str, steps: int, repeats: int, quick: bool) -> dict[str, Any]:
    """Short trainings after the same warm-up, each with one field changed: loss, what they gain from context, and what
    they lose to the first of them."""
    from farspan.text.retrieval import build

    lengths = LENGTHS[:2] if quick else (WINDOW, 2048, 8192)
    few = FEW if quick else (f"trainer.steps={steps}", "optimizer.warmup_steps=15", "trainer.save_every=20")
    figures: dict[str, Any] = {}
    first: dict[int, np.ndarray] = {}
    if "RetDoc" in names:
        build("builtin:train+tests", folder / "passages", words=40)
    for name in names:
        kind, fields = ABLATIONS[name]
        out = folder / f"ablation-{name.replace(', ', '-').replace(' ', '-').replace('=', '')}"
        given = (f"model.encoder={encoder}", f"model.warmed_up={folder / 'warmup'}", *few, *fields)
        given += (f"data.index={folder / 'passages'}",) if name == "RetDoc" else ()
        summary = train(kind, out, given)
        found = with_context(out, lengths, repeats)
        gain = differences(found, dict.fromkeys(lengths, found[WINDOW]))  # there all stands in the decoder: the base
        first = first or found
        figures[name] = {"loss": summary["loss"], "gain": gain, f"to {names[0]}": differences(found, first)}
        cells = (name, f"{summary['loss']:.3f}", said(gain), said(differences(found, first)))
        print(f"| {' | '.join(cells)} |", flush=True)
    return figures


def measured(folder: Path, lengths: tuple[int, ...], curve: tuple[int, ...], repeats: int) -> dict[str, Any]:
    """Prints tables, differences and costs; returns them, and `claims`: value, and the largest that is allowed."""
    copied, base = copying(folder, 8 if repeats == 2 else 64)
    figures: dict[str, Any] = {"copying_nats": copied, "base_nats": base}
    print(f"warm-up: {copied:.3f} nats per token of a copied text, base {base:.3f}", flush=True)

    found = alone(folder / f"alone-{repeats}", lengths, repeats)
    found["CEPE"] = with_context(folder / "main", lengths, repeats)
    found["CEPE-Distilled"] = with_context(folder / "distilled", lengths, repeats)
    print(perplexities(found, lengths), flush=True)
    for name, by_length in found.items():
        figures[name] = {length: math.exp(values.mean()) for length, values in by_length.items()}
    for name in ("CEPE", "CEPE-Distilled"):
        for rival in READERS:
            # the model alone is best inside its window; the others are compared length by length
            theirs = found[rival] if rival[0] == "+" else dict.fromkeys(lengths, found[rival][WINDOW])
            figures[f"{name} to {rival}"] = gains = differences(found[name], theirs)
            print(f"{name}, nats to {rival}, paired: {said(gains)}", flush=True)
    gaps = spans(folder, curve, repeats)
    for name, by_length in gaps.items():
        figures[f"curve of {name}"] = {length: interval(values) for length, values in by_length.items()}
        print(f"copied beyond what is guessed, {name}: {said(figures[f'curve of {name}'])}", flush=True)
    figures |= costs(folder)
    print(f"teacher over its forward {figures['teacher_over_forward']:.2f}, data {figures['data_share']:.2%} of a step")

    gains, last, most = figures["CEPE to embedded model"], lengths[-1], curve[-1]
    upper = {
        f"less nats with CEPE than {rival} at {length:,} tokens: upper end": (
            figures[f"CEPE to {rival}"][length][2],
            0.0,
        )
        for rival in READERS
        for length in lengths
        if length >= CLAIMED_FROM
    }
    best = min(mean for mean, _, _ in gains.values())
    more = interval(gaps["CEPE"][most] - gaps["embedded model"][most])
    figures["claims"] = {
        "warm-up: share of the base's loss": (copied / base, 0.5),
        **upper,
        f"no explosion: nats at {last:,} tokens above the best": (gains[last][0] - best, 0.1),
        f"copied of {most:,} tokens by the base beyond what CEPE copies: upper end": (-more[1], 0.0),
        "teacher's pre-computation over its forward": (figures["teacher_over_forward"], 1.2),
        "data: share of a step": (figures["data_share"], 0.03),
    }
    return figures


def main() -> None:
    parser = parser_of(__doc__, "a few steps, two documents: shows that all of it runs")
    parser.add_argument("--folder", type=Path, default=Path("runs/cepe-training"))
    parser.add_argument("--encoder", choices=("demo", "mlm"), default="demo")
    parser.add_argument("--repeats", type=int, default=48, help="documents")
    parser.add_argument("--ablations", default="", help=f"names with ; between, or all: {'; '.join(ABLATIONS)}")
    parser.add_argument("--steps", type=int, default=100, help="of an ablation")
    arguments = parser.parse_args()
    names = list(ABLATIONS) if arguments.ablations == "all" else [n for n in arguments.ablations.split(";") if n]
    if unknown := [name for name in names if name not in ABLATIONS]:
        parser.error(f"--ablations {unknown[0]}: choose of {'; '.join(ABLATIONS)}")
    torch.set_num_threads(1)
    quick, encoder = arguments.quick, arguments.encoder
    folder = arguments.folder / ("quick" if quick else "") / encoder
    repeats = 2 if quick else arguments.repeats

    done = trainings(folder, encoder, FEW if quick else ())
    figures: dict[str, Any] = {f"{name}_loss": summary["loss"] for name, summary in done.items()}
    if names:
        begins = str(folder / "encoder") if encoder == "mlm" else encoder
        figures |= ablated(folder, names, begins, arguments.steps, repeats, quick)
    else:
        figures |= measured(folder, LENGTHS[: 2 if quick else None], CURVE[: 2 if quick else None], repeats)
    # a few steps on two documents show that all of it runs, and nothing more
    end(figures, missed({} if quick else figures.get("claims", {})), arguments.check)


if __name__ == "__main__":
    run_script(main)
