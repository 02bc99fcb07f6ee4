"""Sparse Memory Training: extend the context of any causal model by steps whose cost does not grow with it.

Sparse Memory Training for Long-Sequence Modeling, section 3 and appendices B.1 and D. The end of a long document is
the target, the rest is memory. Few tokens of the memory are sampled, fewer the further away (`draws`), and keep their
positions in a row of the window's length, so that a step costs the same for any length of the document. The loss is
that of the target, plus that of the ordinary window (`objective`); only queries and keys are trained (`trained`);
documents grow during the training (`schedule`). There is no public code. Ours uses Algorithm 1 where the paper
contradicts it, means instead of sums, and first checks for conditions under which it would be silently wrong
(`preflight`).
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from pydantic import Field, field_validator, model_validator

from farspan import hf
from farspan.callback import MeasuringCallback
from farspan.lm import LM
from farspan.loading import load_config, stored_dtype
from farspan.loading.places import folder_of
from farspan.methods import method
from farspan.methods.full import Full
from farspan.methods.rope import Rope, ntk, truncated
from farspan.record import environment
from farspan.report.training import draw_smt_losses
from farspan.text.corpora import Corpus
from farspan.train import engines
from farspan.train.batches import read_corpus
from farspan.train.cards import smt_card
from farspan.train.config import Settings
from farspan.train.draws import MEMORIES, Recurrences, draw_named
from farspan.train.mining import Pairs, mined
from farspan.train.objective import terms
from farspan.train.optimizer import OptimizerSettings
from farspan.train.preflight import preflight, usable
from farspan.train.progress import Notice, TrainingWatch
from farspan.train.schedule import LengthSettings, Schedule, schedule
from farspan.train.settings import RunSettings
from farspan.train.temperature import PARAMETER, check_scaling, learns_scales, save_scales, scale_queries
from farspan.train.trained import Count, TrainedSettings, choose, plain
from farspan.train.trainer import load_finite, record_settings, run, save_whole, training, write_up
from farspan.train.watching import WatchedSettings, measures_training_text, measuring
from farspan.train.windows import FirstTarget, Mixed, Short, SparseRows, collated


class SmtModelSettings(Settings):
    """[model]: the model to extend."""

    name: str  # a folder or hub id, or `demo`, the embedded one
    window: int | None = Field(None, gt=3)  # tokens of a row; default the trained length
    rope: str | None = None  # such as rope:type=yarn,factor=8; stays in the trained model
    # train under the method `temperature`, under which the model is then read; learned: with a scale for each head
    temperature: bool | Literal["learned"] = False
    revision: str | None = None

    @field_validator("temperature", mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        if type(value) is not bool and value != "learned":
            raise ValueError('expected true, false or "learned"')
        return value


class SmtDataSettings(Settings):
    """[data]: texts, see `farspan.text.documents`."""

    text: str  # documents, longer than lengths.target where they can be
    short: Short = "skip"  # how shorter ones are used
    separator: bool = True  # put the tokenizer's beginning of text before a document, as at inference


class SparseSettings(Settings):
    """[smt]: rows and objective."""

    draw: str = "sparse"
    targets: int | None = Field(None, gt=0)  # tokens; default half a window
    beta: float = Field(1.0, ge=0)  # weight of the ordinary window
    mixed: Mixed = "concat"
    first_target: FirstTarget = "auto"

    @model_validator(mode="after")
    def _of_draw(self) -> "SparseSettings":
        if self.draw.partition(":")[0] not in MEMORIES:
            given = ("targets", "first_target") if self.first_target == "mask" else ("targets",)
            self.refuse_unused(given, f"draw = {self.draw!r}", f"a draw with targets: {', '.join(MEMORIES)}")
        if self.mixed == "off":
            self.refuse_unused(("beta",), "mixed = 'off'", 'mixed = "concat" or "alternate"')
        return self


class SmtOptimizer(OptimizerSettings):
    """[optimizer], table 8 and appendix D.2: AdamW at 1e-5, warm-up, no decay of the rate."""

    lr: float = Field(1e-5, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(0.0, ge=0)
    decay_fraction: float = Field(0.0, ge=0, le=1)


class SmtTrainer(RunSettings):
    """[trainer]: batch 1."""

    log_every: int = Field(10, gt=0)


class SmtSettings(WatchedSettings):
    """The whole config of `farspan train smt`."""

    model: SmtModelSettings
    data: SmtDataSettings
    lengths: LengthSettings
    smt: SparseSettings = SparseSettings()
    trained: TrainedSettings = TrainedSettings()
    optimizer: SmtOptimizer = SmtOptimizer()
    trainer: SmtTrainer


@training
def train(settings: SmtSettings, watch: TrainingWatch) -> dict[str, Any]:
    """Train as `training`, and save model and tokenizer.

    Raises:
        ValueError: impossible settings, a model that cannot be trained so, documents that are all too short, another
            engine in use than requested, or `out` holds another training.
    """
    lm = opened(settings)
    before = lm.trained_length
    assert before is not None
    longest = max(before, settings.lengths.target)
    with engines.processes().main_process_first():
        record_settings(settings, watch, lengths_of(lm, settings))
        rows = rows_of(lm, settings, None if watch.plan else Path(settings.out), watch.notice)
    model, count = prepared(lm, settings)
    planned = planned_lengths(rows) if watch.plan else ()
    scaled = notes_on_rope(settings, before)
    for line in (f"{lm.name}, window {rows.row:,} tokens: {count}", *scaled, *notes_on(rows), *planned):
        watch.notice(line)
    if settings.trainer.engine == "fsdp2":
        engines.shard(lm.model, engines.layers_of(lm.model))

    def save(model: Any, dtype: torch.dtype, folder: Path) -> None:
        model = plain(model)
        save_scales(model, before, folder)
        hf.set_context(model, longest)
        save_whole(model, dtype, folder)

    callbacks = watching(lm, settings)
    of_training = measures_training_text(callbacks, rows.text, lm.tokenizer, watch.notice)
    summary = run(
        model,
        rows,
        settings,
        watch,
        callbacks=callbacks,
        save=save,
        again=lambda: choose(opened(settings, "cpu").model, settings.trained)[0],
        base=lm.identity["fingerprint"],
        inputs={"base_config": json.dumps(lm.identity["config"])},
        base_dtype=dtype_of(settings.model),
        processing_class=lm.tokenizer,
        data_collator=collated,
        core=lm.model,
        terms=terms,
        predicted=lambda batch: {name: rows["labels"][:, 1:] for name, rows in batch.items()},
        weights={"sparse": 1.0, "window": settings.smt.beta},
        notes=lambda step: {"length": rows.schedule.at(step - 1)},
    )
    summary |= {"trained": count.trained, "parameters": count.total, "window": rows.row, "text": rows.summary()}
    summary |= {"from": lm.identity, "measured_on_training_text": of_training}
    lm.tokenizer.model_max_length = max(lm.tokenizer.model_max_length, longest)
    draw = partial(draw_smt_losses, window=rows.row, returns=rows.schedule.cover and settings.trainer.log_every > 1)
    return write_up(settings, summary | environment(), lm.tokenizer, smt_card, draw)


def planned_lengths(rows: SparseRows) -> Iterator[str]:
    """Yield lines about the lengths of a training that is planned, and the tokens that are read."""
    stages, steps = rows.schedule.stages, rows.schedule.steps
    yield f"{len(stages)} lengths from {stages[0]:,} to {stages[-1]:,} tokens in {steps:,} steps"
    kinds = [(rows.schedule.at(step), step % 2) for step in range(steps)]  # every second step can read another row
    examples = {kind: rows[kinds.index(kind) * rows.batch] for kind in {*kinds}}
    fed = {kind: rows.batch * sum(len(row["input_ids"]) for row in one.values()) for kind, one in examples.items()}
    whole = sum(fed[kind] for kind in kinds)
    yield f"at most {max(fed.values()):,} tokens a step are read, about {whole:,} in all"


def opened(settings: SmtSettings, device: str | None = None) -> LM:
    """Load the model in fp32, with its RoPE scaled if `model.rope` is given.

    Raises:
        ValueError: no such model, or one whose trained length is unknown.
    """
    chosen = settings.model
    options: dict[str, Any] = {"revision": chosen.revision, "device": device}
    lm = load_finite(chosen.name, "model", settings.trainer, dtype="float32", **options)
    if settings.trainer.activation_checkpointing:
        hf.checkpoint_activations(lm.model)
    trained = lm.trained_length or chosen.window
    if trained is None:
        raise ValueError(f"the trained length of {lm.name} is unknown: give model.window")
    lm = replace(lm, trained_length=trained)
    if chosen.temperature and settings.trained.what == "lora":
        raise ValueError(
            'model.temperature does not scale what LoRA adds to queries: leave it out, or give trained.what = "qk"'
        )
    if chosen.temperature and settings.lengths.target <= trained:
        raise ValueError(
            f"model.temperature has no effect up to the trained length of {trained:,} tokens: leave it out, or give "
            "lengths.target above it"
        )
    if chosen.temperature:
        check_scaling(lm)
        scale_queries(lm.model, trained, learned=chosen.temperature == "learned")
    if chosen.rope is not None:
        scale_rope(lm, chosen.rope, settings.lengths.target)
    return lm


def dtype_of(settings: SmtModelSettings) -> torch.dtype:
    """Return the dtype of a model's weights by its config; float32, which holds all others, where it has none."""
    own = stored_dtype(load_config(folder_of(settings.name), revision=settings.revision))
    return own if own in (torch.float32, torch.bfloat16, torch.float16) else torch.float32


def scale_rope(lm: LM, text: str, longest: int) -> None:
    """Scale the model's RoPE as the method `text` does, permanently: in its config, so that it is saved with it.

    Raises:
        ValueError: no RoPE method, one that depends on the length, a model whose RoPE is scaled already, or one that
            cannot have, or cannot be saved with, such a RoPE.
    """
    chosen = method(text)
    if not isinstance(chosen, Rope) or chosen.type not in ("linear", "ntk", "yarn", "truncated"):
        raise ValueError(
            f"model.rope = {text!r} is not supported: expected rope:type=linear, ntk or yarn, with factor=..., or "
            "rope:type=truncated"
        )
    theta, own = hf.plain_rope(lm.model, name=str(chosen))
    config = lm.model.config.get_text_config(decoder=True)
    original = chosen.original or lm.trained_length
    assert original is not None
    parameters = dict(hf.full_attention_rope(lm.model)[0])
    if chosen.type == "truncated":
        kept = int((truncated(theta, 2 * len(own), chosen.turns, original) > 0).sum())
        if kept == len(own):
            raise ValueError(f"{chosen}: every pair rotates {chosen.turns:g} times in {original:,} tokens: none is cut")
        # half a pair more, as transformers rounds down
        parameters |= {"rope_type": "proportional", "partial_rotary_factor": (kept + 0.5) / len(own)}
    elif chosen.type == "ntk":
        assert chosen.factor is not None
        parameters["rope_theta"] = ntk(theta, 2 * len(own), chosen.factor)
    else:
        parameters |= {"rope_type": chosen.type, "factor": chosen.factor}
    if chosen.type == "yarn":
        parameters["original_max_position_embeddings"] = original
    config.max_position_embeddings = longest
    pairs = {name: len(values) for name, values in hf.rope_frequencies(lm.model)}
    hf.set_rope(lm.model, parameters)
    if {name: len(values) for name, values in hf.rope_frequencies(lm.model)} != pairs:  # `proportional` has all pairs
        raise ValueError(
            f"{chosen}: {type(lm.model).__name__} rotates a part of each head, and a checkpoint of transformers cannot "
            "hold a RoPE with pairs cut from a part: use rope:type=linear, ntk or yarn"
        )
    try:
        config.validate_rope()  # as when the trained model is saved
    except ValueError as error:
        raise ValueError(
            f"{chosen}: {type(lm.model).__name__} cannot be saved with such a RoPE ({error}): use rope:type=ntk"
        ) from error


RECURRENCES = "recurrences.json"  # in the folder of a training


def lengths_of(lm: LM, settings: SmtSettings) -> Schedule:
    """Return the length of the documents at each step."""
    return schedule(settings.lengths, row_of(lm, settings), settings.trainer.steps, settings.trainer.seed)


def row_of(lm: LM, settings: SmtSettings) -> int:
    """Return the tokens of a row, by default the trained length."""
    row = settings.model.window or lm.trained_length
    assert row is not None
    return row


def rows_of(lm: LM, settings: SmtSettings, out: Path | None = None, notice: Notice = lambda line: None) -> SparseRows:
    """Return the samples of the training.

    Args:
        out: the folder of the training, in which the mentions of the draw `recurrences` are stored; None: nowhere.
        notice: called with lines about the reading of the text.
    """
    trainer, row = settings.trainer, row_of(lm, settings)
    chosen, separator = draw_named(settings.smt.draw), lm.separator.ids if settings.data.separator else ()

    def mine(corpus: Corpus) -> Pairs:
        assert isinstance(chosen, Recurrences)
        longest = lm.trained_length if settings.model.rope is None else settings.lengths.target
        assert longest is not None
        how: dict[str, Any] = {"row": row, "longest": longest, "head": len(separator), "seed": trainer.seed}
        file = None if out is None else out / RECURRENCES
        return mined(lm, corpus, chosen, **how, file=file, notice=notice)

    return SparseRows(
        read_corpus(settings.data.text, lm.tokenizer, notice),
        chosen,
        lengths_of(lm, settings),
        row=row,
        targets=settings.smt.targets or row // 2,
        batch=trainer.rows_per_step,
        separator=separator,
        seed=trainer.seed,
        short=settings.data.short,
        mixed=settings.smt.mixed,
        first_target=settings.smt.first_target,
        mine=mine,
    )


def prepared(lm: LM, settings: SmtSettings) -> tuple[Any, Count]:
    """Choose the trained parameters, and check the model as it will be trained."""
    usable(lm.model, settings.lengths.target)  # first, as it names the reason where queries and keys are not found
    model, count = choose(lm.model, settings.trained)
    if settings.model.temperature == "learned" and not learns_scales(model):
        raise ValueError(
            f'model.temperature = "learned" trains exponents that trained.patterns leaves out: add "*{PARAMETER}" to it'
        )
    preflight(model, lm.model, row_of(lm, settings), settings.lengths.target)
    return model, count


def watching(lm: LM, settings: SmtSettings) -> list[MeasuringCallback]:
    """Return the callbacks that measure the model in training.

    Perplexity of the same tokens after more and more text: the lengths inside the window show what the training costs,
    the others what it gains. And a forgetting curve, up to the target.
    """
    target, trained = settings.lengths.target, lm.trained_length
    assert trained is not None
    row = row_of(lm, settings)
    doubled = [row // 2 << i for i in range(target.bit_length()) if row // 2 << i < target]
    return measuring(settings, Full(), trained_length=trained, lengths=(*doubled, target), longest=target)


def notes_on_rope(settings: SmtSettings, trained: int) -> Iterator[str]:
    """Yield a line about a RoPE that is scaled to fewer tokens than the target."""
    given, target = settings.model.rope, settings.lengths.target
    if given is None or (chosen := cast(Rope, method(given))).type == "truncated":
        return
    original, reach = chosen.original or trained, chosen.extended(trained)
    if reach is not None and reach < target:
        yield (
            f"{chosen} scales positions to {reach:,} tokens, and lengths.target is {target:,}: the training must teach "
            f"the positions beyond {reach:,}; factor={-(-target // original)} covers the target"
        )


def notes_on(rows: SparseRows) -> Iterator[str]:
    """Yield lines for the user about the text, before the training."""
    about, longest = rows.summary(), max(rows.schedule.stages)
    if rows.short != "join":
        short = about["documents"] - about["long_enough"]
        fate = "left out" if rows.short == "skip" else f"left out below {rows.row:,}, used up to their length above"
        line = f"{short:,} of {about['documents']:,} documents are shorter than {longest:,} tokens"
        yield f"{line}: {fate}" if short else line
    if rows.pairs is not None:
        yield f"{len(rows.pairs):,} mentions found that need a long context"
    if about["passes"] > 1:
        yield (
            f"the training reads {about['samples']:,} windows, and the text holds {about['windows']:,} of {longest:,} "
            f"tokens: each about {about['passes']:.1f} times"
        )
