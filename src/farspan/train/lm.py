"""Pre-training of a small Llama, tokenizer included; Llama-83M of the Forgetting Curve paper (appendix D.1) is one."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field, ValidationInfo
from torch.utils.data import Dataset

from farspan import hf
from farspan.callback import MeasuringCallback
from farspan.lm import fingerprint
from farspan.loading import load_tokenizer
from farspan.loading.places import folder_of
from farspan.methods import method
from farspan.methods.full import Full
from farspan.text.corpora import Corpus
from farspan.text.documents import read_texts
from farspan.train import engines
from farspan.train.batches import PackedRows, read_corpus, read_held_out, train_tokenizer
from farspan.train.cards import recurrence_card
from farspan.train.config import Settings
from farspan.train.optimizer import OptimizerSettings
from farspan.train.progress import TrainingWatch
from farspan.train.recurrence import ConsecutiveRows, Recurrence, RecurrenceSettings, reading, refuse_unfit
from farspan.train.settings import PretrainingSettings
from farspan.train.trained import Count
from farspan.train.trainer import load_finite, record_settings, run, training, write_up
from farspan.train.watching import WatchedSettings, WatchSettings, measures_training_text, measuring


class LlamaSettings(Settings):
    """[model]: the shape of a new Llama, or a Llama to train further."""

    start: str | None = None  # a Llama to train further: a folder, hub id or `demo`; its shape and tokenizer are used
    hidden: int = Field(512, gt=0)
    feed_forward: int = Field(2048, gt=0)
    layers: int = Field(12, gt=0)
    heads: int = Field(8, gt=0)
    head_dim: int | None = Field(None, gt=0)  # default hidden / heads
    key_value_heads: int = Field(8, gt=0)
    tied: bool = False  # input and output embeddings are one matrix
    rope_theta: float = Field(10_000.0, gt=0)


class TokenizerSettings(Settings):
    """[tokenizer]: an existing one, or one trained on the text."""

    folder: str | None = None  # a folder or hub id of an existing one; default: train one on the text
    vocabulary: int = Field(32_000, gt=0)  # entries of the one to train


class DataSettings(Settings):
    """[data]: texts, see `farspan.text.documents`."""

    text: str
    held_out: str | None = None  # a text that is not trained on, whose loss is logged; empty: none


def _evaluated(data: DataSettings, given: ValidationInfo) -> DataSettings:
    if "held_out" not in data.model_fields_set and (trainer := given.data.get("trainer")):  # a given "" turns it off
        trainer.refuse_unused(("evaluate_every",), "no held-out text", "data.held_out", "trainer.")
    return data


Data = Annotated[DataSettings, AfterValidator(_evaluated)]  # of a pre-training


class LmWatchSettings(WatchSettings):
    """[watch]: by default nothing is measured."""

    every: int = Field(0, ge=0)  # steps; 0: never


class LmSettings(WatchedSettings):
    """The whole config of `farspan train lm`."""

    data: Data
    tokenizer: TokenizerSettings = TokenizerSettings()
    model: LlamaSettings = LlamaSettings()
    recurrence: RecurrenceSettings | None = None  # default: rows are independent
    optimizer: OptimizerSettings = OptimizerSettings()
    trainer: PretrainingSettings
    watch: LmWatchSettings = LmWatchSettings()


@training
def train(settings: LmSettings, watch: TrainingWatch) -> dict[str, Any]:
    """Train, and save model and tokenizer. See `farspan.train.trainer.training`.

    Raises:
        ValueError: impossible settings, a text shorter than one row, or `out` holds another training.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    trainer, out, start = settings.trainer, Path(settings.out), settings.model.start
    shape = llama_shape(settings.model)
    refuse_two_shapes(settings)
    if trainer.engine == "fsdp2" and not torch.cuda.is_available():
        raise ValueError('trainer.engine = "fsdp2" of `train lm` needs GPUs: use "ddp"')
    if settings.recurrence is not None:
        refuse_unfit(trainer)
    source = settings.tokenizer.folder or (str(out) if start is None else folder_of(start))
    with engines.processes().main_process_first():  # the other processes then use the files that it has written
        record_settings(settings, watch)
        with TemporaryDirectory() as place:
            if source == str(out) and not (out / "tokenizer.json").exists():
                vocabulary, source = settings.tokenizer.vocabulary, place if watch.plan else source
                watch.notice(f"text {settings.data.text!r}: training a tokenizer of {vocabulary:,} entries")
                train_tokenizer(read_texts(settings.data.text), vocabulary, Path(source))
            tokenizer = load_tokenizer(source, what="tokenizer")
        text = read_corpus(settings.data.text, tokenizer, watch.notice)
        held_out = read_held_out(settings.data.held_out, text, tokenizer, watch.notice)
    separator = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if separator is None:
        raise ValueError(
            f"tokenizer {source} has neither a beginning- nor an end-of-text token to put between documents: use "
            "another tokenizer.folder"
        )

    def rows(corpus: Corpus, num: int, steps: int | None) -> Dataset[Any]:
        if settings.recurrence is None:
            return PackedRows(corpus, trainer.window, (separator,), trainer.seed)
        return ConsecutiveRows(corpus, trainer.window, num, (separator,), trainer.seed, steps)

    memory = settings.recurrence.memory if settings.recurrence else 0

    def new() -> Any:
        if start is not None:
            return started(start, trainer, trainer.window + memory)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            max_position_embeddings=trainer.window + memory,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            **shape,
        )
        return LlamaForCausalLM._from_config(config, attn_implementation=trainer.attention)

    model = new()
    base = None if start is None else fingerprint(model)
    inputs = {} if start is None else {"base_config": json.dumps(hf.scoring_fields(model.config))}
    if trainer.activation_checkpointing:
        hf.checkpoint_activations(model)
    read = rows(text, trainer.rows_per_step, trainer.steps)
    judged = rows(held_out, trainer.micro_batch, None) if held_out else None
    watch.notice(f"{settings.out}: {Count.of(model)}")
    options: dict[str, Any] = {"row": trainer.window, "inputs": inputs}
    if settings.recurrence is not None:
        recurrence = Recurrence(memory)
        options |= {"terms": recurrence, "weights": {"lm": 1.0}, "state": recurrence}
    watched = watching(settings, tokenizer, model.config.max_position_embeddings)
    measures_training_text(watched, text, tokenizer, watch.notice)
    summary = run(model, read, settings, watch, held_out=judged, callbacks=watched, again=new, base=base, **options)
    if settings.recurrence is None:
        return write_up(settings, summary, tokenizer)
    summary["reading"] = reading(memory, trainer.window)
    watch.notice(f"to read it as it was trained: --method {summary['reading']}")
    return write_up(settings, summary, tokenizer, recurrence_card)


def watching(settings: LmSettings, tokenizer: Any, trained: int) -> list[MeasuringCallback]:
    """Return the callbacks that measure the model in training, which reads as it is trained: perplexity of the same
    tokens at half, once and twice the trained context, and a forgetting curve up to twice the trained context.

    Args:
        trained: tokens of the trained context: a row and the memory before it.
    """
    return measuring(
        settings,
        Full() if settings.recurrence is None else method(reading(settings.recurrence.memory, settings.trainer.window)),
        tokenizer=tokenizer,
        trained_length=trained,
        lengths=(max(2, trained // 2), trained, 2 * trained),
        longest=2 * trained,
    )


def refuse_two_shapes(settings: LmSettings) -> None:
    """Raise ValueError for settings of a new model or tokenizer together with `model.start`, or of a new tokenizer
    together with `tokenizer.folder`."""
    if settings.model.start is None:
        folder = settings.tokenizer.folder
        if folder and "vocabulary" in settings.tokenizer.model_fields_set:
            raise ValueError(
                f"tokenizer.folder = {folder!r} has its own vocabulary: leave out tokenizer.vocabulary "
                f"(--set \"tokenizer={{folder='{folder}'}}\" replaces the whole table)"
            )
        return
    both = [f"model.{name}" for name in sorted(settings.model.model_fields_set - {"start"})]
    both += [f"tokenizer.{name}" for name in sorted(settings.tokenizer.model_fields_set)]
    if both:
        raise ValueError(
            f"model.start = {settings.model.start!r} has its own shape and tokenizer: leave out {', '.join(both)}"
        )


def started(name: str, trainer: PretrainingSettings, positions: int) -> Any:
    """Load the Llama to train further, in fp32.

    Args:
        positions: tokens of the trained context. A smaller `max_position_embeddings` is raised to it.

    Raises:
        ValueError: the model cannot be loaded, is not a Llama, or has a RoPE that depends on the length of a text.
    """
    from transformers import LlamaForCausalLM

    model = load_finite(name, "model", trainer, dtype="float32").model
    if not isinstance(model, LlamaForCausalLM):
        raise ValueError(f"model.start = {name!r} is a {type(model).__name__}: expected a LlamaForCausalLM")
    if kind := hf.length_dependent_rope(model):
        raise ValueError(
            f"the RoPE of model.start = {name!r} depends on the length of a text ({kind}): use another model"
        )
    hf.set_context(model, max(positions, model.config.max_position_embeddings))
    return model


def llama_shape(settings: LlamaSettings) -> dict[str, Any]:
    """Return the arguments of LlamaConfig for a shape.

    Raises:
        ValueError: `heads` is not a multiple of `key_value_heads`, `hidden` not a multiple of `heads`, or the number of
            dimensions of a head is odd.
    """
    if settings.heads % settings.key_value_heads:
        raise ValueError(
            f"model.heads = {settings.heads} must be a multiple of model.key_value_heads = {settings.key_value_heads}"
        )
    if settings.head_dim is None and settings.hidden % settings.heads:
        raise ValueError(
            f"model.hidden = {settings.hidden} must be a multiple of model.heads = {settings.heads}, or give "
            "model.head_dim"
        )
    head_dim = settings.head_dim or settings.hidden // settings.heads
    if head_dim % 2:
        raise ValueError(
            f"heads have {head_dim} dimensions (model.head_dim, or model.hidden / model.heads): expected an even "
            "number, since RoPE rotates pairs of dimensions"
        )
    return {
        "hidden_size": settings.hidden,
        "intermediate_size": settings.feed_forward,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "head_dim": head_dim,
        "num_key_value_heads": settings.key_value_heads,
        "rope_parameters": {"rope_type": "default", "rope_theta": settings.rope_theta},
        "tie_word_embeddings": settings.tied,
    }
