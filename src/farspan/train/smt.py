"""Sparse Memory Training: extends any causal model's context at the cost of its own window.

Sparse Memory Training for Long-Sequence Modeling, section 3 and appendices B.1 and D. Of a long document the end is the
target and the rest memory, of which few tokens are drawn, fewer the further away (`draws`). They stand at their own
positions in one ordinary row, so that a step costs the same whatever the document's length. The loss is that of the
target, plus that of the ordinary window (`objective`); queries and keys alone are trained (`trained`); documents grow
as the training goes on (`schedule`). There is no public code. Ours takes Algorithm 1 where the paper contradicts it,
means instead of sums, and looks for what would make it silently wrong first (`preflight`).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from farspan import hf
from farspan.callback import CurveCallback, Measuring, PerplexityCallback
from farspan.corpus import load
from farspan.lm import LM
from farspan.lm import load as load_model
from farspan.loading import DEMO, folder_of, load_config
from farspan.methods import method
from farspan.methods.rope import Rope, ntk
from farspan.record import environment
from farspan.report.training import draw_losses, model_card
from farspan.train import engines
from farspan.train.checkpoint import refuse_not_finite
from farspan.train.config import Out, Settings, in_its_folder, refuse_other_settings
from farspan.train.draws import draw, draw_named, levels
from farspan.train.objective import terms
from farspan.train.optimizer import OptimizerSettings, build
from farspan.train.preflight import preflight, usable
from farspan.train.schedule import LengthSettings, schedule
from farspan.train.trained import Count, TrainedSettings, choose, plain
from farspan.train.trainer import RunSettings, read_log, refuse_impossible, run, write_card, write_up
from farspan.train.windows import FirstTarget, Mixed, Short, SparseRows, collated

__all__ = ["SmtSettings", "draw", "levels", "train"]
CURVE_EXTRA = 16  # tokens of a curve's context beside text and copy, about


class ModelSettings(Settings):
    """[model]: what is extended."""

    name: str  # a folder or hub id, or `demo`, the embedded one
    window: int | None = Field(None, gt=3)  # tokens of a row; default what the model was trained on
    rope: str | None = None  # such as rope:type=yarn,factor=8; stays in the trained model
    revision: str | None = None


class DataSettings(Settings):
    """[data]: texts, named as everywhere (see `farspan.corpus`)."""

    text: str  # documents, longer than lengths.target where they can be
    short: Short = "skip"  # what becomes of shorter ones
    separator: bool = True  # whether a document stands behind the tokenizer's beginning of text, as when it is read


class SparseSettings(Settings):
    """[smt]: rows and objective."""

    draw: str = "sparse"
    targets: int | None = Field(None, gt=0)  # tokens; default half a window
    beta: float = Field(1.0, ge=0)  # weight of the ordinary window
    mixed: Mixed = "concat"
    first_target: FirstTarget = "auto"


class SmtOptimizer(OptimizerSettings):
    """[optimizer], table 8 and appendix D.2: AdamW at 1e-5, warm-up, no decay of the rate."""

    lr: float = Field(1e-5, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(0.0, ge=0)
    decay_fraction: float = Field(0.0, ge=0, le=1)


class SmtTrainer(RunSettings):
    """[trainer]: batch 1."""

    log_every: int = Field(10, gt=0)


class WatchSettings(Settings):
    """[watch]: what is measured while it is trained, on text it is not trained on; see `farspan.callback`."""

    text: str = "builtin:held-out"
    every: int | None = Field(None, ge=0)  # steps; 0: never; default a quarter of all, and before the first
    lengths: tuple[int, ...] | None = None  # tokens; default half the window, and doubled from there to the target
    repeats: int = Field(4, gt=1)  # windows of the perplexity
    curve: bool = True  # also a small forgetting curve
    tokens: int | None = Field(None, gt=0)  # fed for one curve, at most; default 24 times the target


class SmtSettings(Settings):
    """The whole config of `farspan train smt`."""

    out: Out
    model: ModelSettings
    data: DataSettings
    lengths: LengthSettings
    smt: SparseSettings = SparseSettings()
    trained: TrainedSettings = TrainedSettings()
    optimizer: SmtOptimizer = SmtOptimizer()
    trainer: SmtTrainer
    watch: WatchSettings = WatchSettings()


@in_its_folder
def train(settings: SmtSettings, notice: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Trains, or continues a training that was stopped, and saves model and tokenizer in `settings.out`.

    Returns what `training.json` in that folder holds. `notice` is told what a user should know.

    Raises:
        ValueError: impossible settings, a model that cannot be trained so, documents that are all too short, another
            engine in use than asked for, or `out` holds another training.
    """
    from transformers import set_seed

    from farspan.train.terms_trainer import TermsTrainer

    processes = engines.processes()
    out = Path(settings.out)
    set_seed(settings.trainer.seed)
    refuse_impossible(settings.trainer, settings.optimizer)
    lm = opened(settings)
    use_cache = lm.model.config.use_cache
    with processes.main_process_first():
        refuse_other_settings(out, settings)
        rows = rows_of(lm, settings, processes.num_processes)
    model, count = prepared(lm, settings)
    if processes.is_main_process:
        notice(f"{lm.name}, window {rows.row:,} tokens: {count}")
        for line in said(rows):
            notice(line)
    if settings.trainer.engine == "fsdp2":
        engines.shard(lm.model, engines.layers_of(lm.model), processes)

    def finished(model: Any) -> Any:
        model = plain(model)
        model.config.get_text_config(decoder=True).max_position_embeddings = settings.lengths.target
        model.config.use_cache = use_cache
        return model

    summary = run(
        model,
        rows,
        None,
        settings.optimizer,
        settings.trainer,
        out,
        trainer_class=TermsTrainer,
        callbacks=watching(lm, settings, out),
        finish=finished,
        again=lambda: choose(opened(settings, "cpu").model, settings.trained)[0],
        base_dtype=dtype_of(settings.model),
        notice=notice,
        processing_class=lm.tokenizer,
        data_collator=collated,
        core=lm.model,
        terms=terms,
        weights={"sparse": 1.0, "window": settings.smt.beta},
        notes=lambda step: {"length": rows.schedule.at(step - 1)},
    )
    del summary["held_out_loss"]
    summary |= {"trained": count.trained, "window": rows.row, "text": rows.summary(), "from": lm.identity}
    summary |= {"settings": settings.model_dump(mode="json"), **environment()}
    if processes.is_main_process:
        lm.tokenizer.model_max_length = max(lm.tokenizer.model_max_length, settings.lengths.target)
        write_up(out, summary, lm.tokenizer)
        log = read_log(out)
        write_card(out, model_card(summary, log), lambda: draw_losses(log, out, rows.row))
    return summary


def plan(settings: SmtSettings) -> Iterator[str]:
    """What `train` would do, after all its checks but that of the launcher; trains nothing.

    Raises:
        ValueError: as `train`.
    """
    lm = opened(settings)
    rows = rows_of(lm, settings)
    model, count = prepared(lm, settings)
    build(model, settings.optimizer, settings.trainer.steps)
    stages, steps = rows.schedule.stages, settings.trainer.steps
    yield f"{lm.name}, window {rows.row:,} tokens: {count}"
    yield from said(rows)
    yield f"{len(stages)} lengths from {stages[0]:,} to {stages[-1]:,} tokens in {steps:,} steps"
    fed = sum(len(row["input_ids"]) for row in rows[len(rows) - 1].values()) * rows.batch
    yield f"{fed:,} tokens a step are read at the last length, about {fed * steps:,} in all"


def opened(settings: SmtSettings, device: str | None = None) -> LM:
    """The model in fp32, its RoPE scaled if it is to be.

    Raises:
        ValueError: no such model, or nothing says how long it was trained.
    """
    lm = load_model(
        folder_of(settings.model.name),
        dtype="float32",
        device=device,
        attention=settings.trainer.attention,
        trained_length=settings.model.window,
        revision=settings.model.revision,
        trust_remote_code=None,  # a training has no option for it
    )
    if settings.model.name == DEMO:
        lm = replace(lm, name=DEMO)
    refuse_not_finite(lm.model, f"model {settings.model.name!r}")
    if settings.trainer.activation_checkpointing:
        hf.checkpoint_activations(lm.model)
    if lm.trained_length is None:
        raise ValueError(f"nothing says how long {lm.name} was trained: give model.window")
    if settings.model.rope is not None:
        scale_rope(lm, settings.model.rope, settings.lengths.target)
    return lm


def dtype_of(settings: ModelSettings) -> torch.dtype:
    """The dtype that a model's config says its weights have; float32, which holds all others, where it does not say."""
    config = load_config(folder_of(settings.name), revision=settings.revision)
    own = config.dtype or config.get_text_config(decoder=True).dtype
    return own if own in (torch.float32, torch.bfloat16, torch.float16) else torch.float32


def scale_rope(lm: LM, text: str, longest: int) -> None:
    """Gives the model the RoPE that the method `text` names, for good: in its config, so that it is saved with it.

    Raises:
        ValueError: no RoPE method, one that depends on the length, or a model whose RoPE is scaled already.
    """
    chosen = method(text)
    if not isinstance(chosen, Rope) or chosen.type == "dynamic":
        raise ValueError(f"model.rope = {text!r} must be rope:type=linear, ntk or yarn, with factor=...")
    theta, own = hf.plain_rope(lm.model, name=str(chosen))
    config = lm.model.config.get_text_config(decoder=True)
    original = chosen.original or lm.trained_length
    assert original is not None
    parameters = dict(config.rope_parameters)
    if chosen.type == "ntk":
        parameters["rope_theta"] = ntk(theta, 2 * len(own), chosen.factor)
    else:
        parameters |= {"rope_type": chosen.type, "factor": chosen.factor}
    if chosen.type == "yarn":
        parameters["original_max_position_embeddings"] = original
    config.max_position_embeddings = longest
    hf.set_rope(lm.model, parameters)


def rows_of(lm: LM, settings: SmtSettings, num_processes: int = 1) -> SparseRows:
    """What the training reads, sample by sample."""
    trainer, window = settings.trainer, lm.trained_length
    assert window is not None
    return SparseRows(
        load(settings.data.text, lm.tokenizer),
        draw_named(settings.smt.draw),
        schedule(settings.lengths, window, trainer.steps, trainer.seed),
        row=window,
        targets=settings.smt.targets or window // 2,
        batch=trainer.batch or trainer.micro_batch * num_processes,
        separator=lm.separator.ids if settings.data.separator else (),
        seed=trainer.seed,
        short=settings.data.short,
        mixed=settings.smt.mixed,
        first_target=settings.smt.first_target,
    )


def prepared(lm: LM, settings: SmtSettings) -> tuple[Any, Count]:
    """The model with what is trained chosen, looked over as it will be trained."""
    assert lm.trained_length is not None
    usable(lm.model, settings.lengths.target)  # says why, where also queries and keys are not found
    model, count = choose(lm.model, settings.trained)
    preflight(model, lm.model, lm.trained_length, settings.lengths.target)
    return model, count


def watching(lm: LM, settings: SmtSettings, out: Path) -> list[Measuring]:
    """What measures the model while it is trained.

    Perplexity of the same tokens behind more and more text: the lengths inside the window guard against forgetting
    what the model could, the others say what it learns. And a forgetting curve, up to the target.
    """
    watch, window, target = settings.watch, lm.trained_length, settings.lengths.target
    assert window is not None
    if watch.every == 0 or (watch.every is None and settings.trainer.engine == "fsdp2"):
        return []  # what is sharded cannot be measured in one process
    every = watch.every or max(1, -(-settings.trainer.steps // 4))
    lengths = watch.lengths
    if lengths is None:
        doubled = [window // 2 << i for i in range(target.bit_length()) if window // 2 << i < target]
        lengths = (*doubled, target)
    common: dict[str, Any] = {"text": watch.text, "every": every, "at_start": True, "trained_length": window}
    found: list[Measuring] = [
        PerplexityCallback(**common, lengths=lengths, repeats=watch.repeats, out=out / "perplexity")
    ]
    if watch.curve:
        longest = max(1, (target - CURVE_EXTRA) // 2)
        found.append(CurveCallback(**common, longest=longest, tokens=watch.tokens or 24 * target, out=out / "farspan"))
    return found


def said(rows: SparseRows) -> Iterator[str]:
    """What a user should know of the text before it is trained on."""
    about, longest = rows.summary(), max(rows.schedule.stages)
    if rows.short != "join":
        short = about["documents"] - about["long_enough"]
        fate = "left out" if rows.short == "skip" else f"left out below {rows.row:,}, used up to their length above"
        yield f"{about['documents']:,} documents, {short:,} shorter than {longest:,} tokens: {fate} at that length"
    if about["passes"] > 1:
        yield (
            f"the training reads {about['samples']:,} windows, and the text holds {about['windows']:,} of {longest:,} "
            f"tokens: each about {about['passes']:.1f} times"
        )
