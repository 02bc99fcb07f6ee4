"""Training of CEPE: encoder and cross-attention for a frozen decoder (Yen et al. 2024, arXiv 2402.16617).

    loss = mean over the decoder's tokens of -log p(x_t | Φ, x_<t)        Φ: the chunks, see `documents`

There are two stages (sections 2.3 and A.2). In the warm-up the chunks are the decoder's own tokens, so that the
cross-attention learns to find and copy them. In the main stage they are the text before the decoder's tokens. Encoder
and cross-attention are trained, in fp32; the decoder is frozen, in any precision, and its dropout is off. Checkpoints
hold the trained weights, the saved model all added ones, as an adapter of the decoder.

Each ablation of tables 5, 11 and 12 is one field: `data.mixture` (filter only, cat only, RetDoc),
`model.train_encoder`, `model.random_encoder`, `model.warmed_up` (empty: "w/o Warmup", "No Copy Init"). Two fields are
not in the paper: `model.initial`, and `model.order`, the order of the chunks (`farspan.cepe.order`), which a main stage
can add to the model of its warm-up.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor, nn
from torch.utils.data import default_collate

from farspan import cepe, hf
from farspan.callback import MeasuringCallback
from farspan.cepe import surgery
from farspan.cepe.config import order_of
from farspan.cepe.encoder import window_of
from farspan.cepe.order import RANGE, Order
from farspan.lm import LM, fingerprint
from farspan.loading import load_config
from farspan.loading.places import folder_of
from farspan.methods.cepe import Cepe
from farspan.record import environment
from farspan.report.training import draw_cepe_losses
from farspan.text.retrieval import open_index
from farspan.train import engines
from farspan.train.batches import read_corpus
from farspan.train.cards import cepe_card
from farspan.train.config import Settings
from farspan.train.documents import DocumentRows, DocumentSettings
from farspan.train.finite import refuse_not_finite
from farspan.train.mlm import MlmOptimizer
from farspan.train.objective import last_hidden, mean_nats
from farspan.train.progress import TrainingWatch
from farspan.train.settings import RunSettings
from farspan.train.trained import Count
from farspan.train.trainer import load_finite, read_log, record_settings, run, training, write_up
from farspan.train.watching import WatchedSettings, WatchSettings, measures_training_text, measuring

RANDOM_STD = 0.02  # of the weights under model.initial = "random"
# settings that a warm-up decides, and their fields in its config
OF_A_WARM_UP = {"layers": "num_cross_attn_layers", "states": "num_cross_attn_hidden_states", "order": "cepe_order",
                "order_layers": "cepe_order_layers", "order_range": "cepe_order_range"}  # fmt: skip
COPIES = 0.5  # a warm-up has learned to copy if its last loss is below this share of its first


class CepeModelSettings(Settings):
    """[model]: the decoder, and the encoder and cross-attention that are added to it."""

    name: str  # the decoder: a folder or hub id, or `demo`, the embedded one
    encoder: str | None = None  # a folder, such as one of `farspan train mlm`, or hub id; `demo`: the embedded model's
    warmed_up: str | None = None  # the folder of a warm-up, which has an encoder; empty: none
    encoder_layers: int | None = Field(None, gt=0)  # number of the first layers of `encoder` to use; default all
    random_encoder: bool = False  # random weights in the shape of `encoder`; weights of `warmed_up` are then not used
    train_encoder: bool = True  # false: the encoder is frozen too
    initial: Literal["copied", "random", "zero"] = "copied"  # q, k, v; copied: of self-attention; zero never learns
    layers: int | None = Field(None, gt=0)  # number of the last layers that get cross-attention; default all
    states: int = Field(1, gt=0)  # 1: all read the encoder's last states; else each those of a different layer
    order: Order | None = None  # of the context: none, position or age; default that of `warmed_up`, or none
    order_layers: int | None = Field(None, gt=0)  # number of the last layers that read the order; default all
    order_range: int = Field(RANGE, gt=0)  # tokens of the longest context; offsets sampled in training reach it
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of the decoder
    revision: str | None = None

    @field_validator("warmed_up", "encoder")
    @classmethod
    def _or_none(cls, name: str | None) -> str | None:
        return name or None


class CepeOptimizer(MlmOptimizer):
    """[optimizer], appendix A.2: that of `train mlm` with a learning rate of 3e-4."""

    lr: float = Field(3e-4, gt=0)


class CepeTrainer(RunSettings):
    """[trainer], appendix A.2: 20,000 steps of 128 windows."""

    steps: int = Field(20_000, gt=0)
    batch: int | None = Field(128, gt=0)
    dtype: Literal["float32", "bfloat16"] = "float32"


class CepeWatchSettings(WatchSettings):
    """[watch]: that of other trainings, with 8 windows."""

    repeats: int = Field(8, gt=1)


class CepeSettings(WatchedSettings):
    """The whole config of `farspan train cepe`."""

    stage: Literal["warmup", "main"] = "main"
    model: CepeModelSettings
    data: DocumentSettings
    optimizer: CepeOptimizer = CepeOptimizer()
    trainer: CepeTrainer = CepeTrainer()
    watch: CepeWatchSettings = CepeWatchSettings()

    @field_validator("data")
    @classmethod
    def _of_stage(cls, data: DocumentSettings, given: ValidationInfo) -> DocumentSettings:
        if given.data.get("stage") == "warmup":
            data.noise.refuse_unused(("rate", "whole"), "stage = 'warmup'", 'stage = "main"', "noise.")
        return data


@training
def train(settings: CepeSettings, watch: TrainingWatch) -> dict[str, Any]:
    """Train, and save encoder, cross-attention and order. See `farspan.train.trainer.training`.

    Raises:
        ValueError: impossible settings, models that do not fit together, texts that are too short, or `out` holds
            another training.
    """
    lm = opened(settings)
    rows = prepare(settings, lm, watch)
    objective = {"terms": terms, "weights": {"nats": 1.0}, "predicted": lambda batch: {"nats": batch["labels"][:, 1:]}}
    summary = fit(settings, lm, rows, watch, rows.inputs, **objective)
    if settings.stage == "warmup" and engines.is_first_process():
        first, last = next(entry["loss"] for entry in read_log(Path(settings.out)) if "loss" in entry), summary["loss"]
        if last > COPIES * first:
            watch.notice(
                f"the warm-up has not learned to copy yet: {last:.2f} nats per token, {first:.2f} when it began; "
                "give more trainer.steps before the main stage"
            )
    return summary


def prepare(settings: CepeSettings, lm: LM, watch: TrainingWatch) -> DocumentRows:
    """Check that model and texts fit the settings, freeze the encoder if it is not trained, and return the samples.

    Raises:
        ValueError: as `train`.
    """
    data, trainer, model = settings.data, settings.trainer, lm.model
    warms_up = settings.stage == "warmup"
    if lm.trained_length is not None and data.decoder + len(lm.separator.ids) * data.separator > lm.trained_length:
        raise ValueError(
            f"data.decoder = {data.decoder:,} tokens, and a separator with data.separator, exceed the trained length "
            f"of {lm.name}, {lm.trained_length:,} tokens: give fewer"
        )
    if (limit := window_of(model.encoder)) is not None and data.chunk > limit:
        raise ValueError(f"data.chunk = {data.chunk:,} tokens exceed the encoder's window of {limit:,}: give fewer")
    longest = 0 if model.context_order is None else model.context_order.longest
    if longest and data.chunks * data.chunk > longest:
        raise ValueError(
            f"data.chunks x data.chunk = {data.chunks * data.chunk:,} tokens are beyond the order's range of "
            f"{longest:,}: give fewer, or a larger model.order_range"
        )
    with engines.processes().main_process_first():
        record_settings(settings, watch)
        rows = DocumentRows(
            read_corpus(data.text, lm.tokenizer, watch.notice),
            data,
            samples=trainer.steps * trainer.rows_per_step,
            separator=lm.separator.ids,
            seed=trainer.seed,
            copies=warms_up,
            noise=None if warms_up else data.noise,
            index=open_index(data.index) if data.index else None,
            tokenizer=lm.tokenizer,
            longest=longest,
        )
    model.encoder.requires_grad_(settings.model.train_encoder)
    if trainer.activation_checkpointing:
        hf.checkpoint_activations(model)
    if settings.model.random_encoder and settings.model.warmed_up:
        watch.notice("model.random_encoder: the weights of model.warmed_up are not used")
    elif settings.model.warmed_up and settings.model.encoder:
        watch.notice("model.encoder: it is not used, as model.warmed_up has an encoder")
    watch.notice(f"{lm.name}: {Count.of(model)}")
    if "filter" in rows.kinds:
        watch.notice(
            f"{len(rows.long):,} of {rows.corpus.num_documents:,} documents have {rows.window:,} tokens; the "
            f"training reads {len(rows):,} windows"
        )
    return rows


def opened(settings: CepeSettings, device: str | None = None) -> LM:
    """Load the decoder, and add an encoder and cross-attention in fp32, new or from the warm-up.

    Args:
        device: of the decoder; default as `farspan.load`.

    Raises:
        ValueError: models that cannot be loaded or do not fit together, or no encoder is named.
    """
    chosen = settings.model
    options: dict[str, Any] = {"dtype": chosen.dtype, "revision": chosen.revision, "device": device}
    lm = load_finite(chosen.name, "decoder", settings.trainer, **options)
    model = _warmed_up(chosen, lm) if chosen.warmed_up and not chosen.random_encoder else _new(chosen, lm)
    if chosen.order is not None and order_of(model.config) == "none":
        model.add_order(chosen.order, layers=chosen.order_layers, longest=chosen.order_range)
    for field in ("order_layers", "order_range"):
        if field in chosen.model_fields_set and order_of(model.config) == "none":
            raise ValueError(f"model.{field} = {getattr(chosen, field)} needs model.order: give position or age")
    return replace(lm, model=model)


def _warmed_up(chosen: CepeModelSettings, lm: LM) -> Any:
    """Return the decoder with what its warm-up trained. Settings that differ from those of the warm-up are refused."""
    assert chosen.warmed_up is not None
    if chosen.initial != "copied":
        raise ValueError(f'model.initial = "{chosen.initial}" needs new cross-attention: leave out model.warmed_up')
    if not Path(chosen.warmed_up).is_dir():
        raise ValueError(
            f"model.warmed_up = {chosen.warmed_up!r} is not a folder. Train it first with a config of "
            'stage = "warmup", such as `farspan train cepe cepe-warmup-demo`, or leave it out: --set model.warmed_up='
        )
    model = cepe.from_pretrained(chosen.warmed_up, base=lm.model, dtype=torch.float32)
    before = {field: getattr(model.config, its, None) for field, its in OF_A_WARM_UP.items()}  # None: has no order
    before["encoder_layers"] = model.encoder.config.num_hidden_layers
    for field, has in before.items():
        given = getattr(chosen, field)
        if has is not None and field in chosen.model_fields_set and given not in (None, has):
            raise ValueError(
                f"model.{field} = {json.dumps(given)}, but {chosen.warmed_up} was warmed up with {json.dumps(has)}: "
                "leave it out"
            )
    refuse_not_finite(model, f"model.warmed_up = {chosen.warmed_up!r}")
    return model


def _new(chosen: CepeModelSettings, lm: LM) -> Any:
    """Return the decoder with `model.encoder` and a new cross-attention."""
    if chosen.encoder is None:
        raise ValueError(
            "no encoder: give model.encoder, a folder of farspan train mlm or another bidirectional encoder with the "
            "decoder's tokenizer, or model.warmed_up"
        )
    config = load_config(folder_of(chosen.encoder), what="encoder")
    has = chosen.encoder_layers or getattr(config, "num_hidden_layers", None)
    if has is not None and chosen.states > has:
        raise ValueError(
            f"model.states = {chosen.states} is more than the layers of encoder {chosen.encoder!r}, at most {has}"
        )
    model = cepe.from_base(
        lm.model,
        config if chosen.random_encoder else folder_of(chosen.encoder),
        num_cross_attn_layers=chosen.layers,
        num_cross_attn_hidden_states=chosen.states,
        encoder_layers=chosen.encoder_layers,
        dtype=torch.float32,
        tokenizer=lm.tokenizer,
    )
    refuse_not_finite(model.encoder, f"encoder {chosen.encoder!r}")
    for cross in model.cross_attentions() if chosen.initial != "copied" else ():
        for projection in (cross.q_proj, cross.k_proj, cross.v_proj):
            std = RANDOM_STD if chosen.initial == "random" else 0.0
            nn.init.normal_(projection.weight, std=std)
    return model


def terms(model: Any, core: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `nats`, the mean of -log p over the decoder's predicted tokens."""
    hidden, output = decoded(model, core, batch)
    return {"nats": mean_nats(core, hidden, output, batch["labels"])}


def decoded(model: Any, core: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Any]:
    """Return the decoder's last hidden states, [batch, time, hidden], and its output object, which holds them."""
    names = ("input_ids", "context_input_ids", "context_attention_mask", "context_padding_mask", "context_offset")
    inputs = {name: batch[name] for name in names if name in batch}
    return last_hidden(model, core, **inputs, use_cache=False)


def fit(
    settings: CepeSettings, lm: LM, rows: Any, watch: TrainingWatch, inputs: Mapping[str, str], **objective: Any
) -> dict[str, Any]:
    """Run a prepared training, write its folder, and return the content of training.json.

    Args:
        inputs: hashes of what the steps read beside the text, by name.
        objective: the arguments `terms`, `weights` and `predicted` of TermsTrainer.
    """
    data, count, base = settings.data, Count.of(lm.model), str(lm.identity["fingerprint"])
    if not settings.model.train_encoder:  # its weights are in no checkpoint
        base += fingerprint(lm.model.encoder)
    if not settings.model.random_encoder:
        parts = [lm.model.encoder, *(lm.model.cross_attentions() if settings.model.warmed_up else ())]
        name = "warmed_up" if settings.model.warmed_up else "encoder"
        inputs = {**inputs, name: fingerprint(nn.ModuleList(parts))}
    inputs = {**inputs, "base_config": json.dumps(lm.identity["config"])}

    def save(model: Any, dtype: torch.dtype, folder: Path) -> None:
        for part in model.added_modules():
            part.to(dtype)
        model.save_pretrained(folder, adapter_only=True)

    if settings.trainer.engine == "fsdp2":
        shard(lm.model)
    callbacks = watching(lm, settings)
    of_training = measures_training_text(callbacks, rows.corpus, lm.tokenizer, watch.notice)
    summary = run(
        lm.model,
        rows,
        settings,
        watch,
        callbacks=callbacks,
        save=save,
        again=lambda: opened(settings, "cpu").model,
        row=data.decoder + (data.chunks * data.chunk if settings.stage == "main" else 0),
        base=base,
        inputs=inputs,
        processing_class=lm.tokenizer,
        data_collator=default_collate,
        **objective,
    )
    summary["measured_on_training_text"] = of_training
    summary |= {"trained": count.trained, "stage": settings.stage, "from": lm.identity} | environment()
    draw = partial(draw_cepe_losses, window=data.decoder)
    return write_up(settings, summary, lm.tokenizer, cepe_card, draw)


def shard(model: Any) -> None:
    """Shard the model over the processes. Parameters that are gathered together must have one dtype, so encoder and
    cross-attention (fp32) are separate from the decoder's layers (possibly bf16). Embeddings and head of the decoder
    stay whole: they have no gradients to share, and the head runs after the model, in blocks."""
    layers = surgery.layers_of(model)
    parts = (*engines.layers_of(model.encoder), *model.added_modules(), *layers)
    spread = {id(parameter) for part in parts for parameter in part.parameters()}
    engines.shard(model, parts, {p for p in model.parameters() if id(p) not in spread})


def watching(lm: LM, settings: CepeSettings) -> list[MeasuringCallback]:
    """Return the callbacks that measure the model in training: the perplexity of the same tokens without context (at
    the length that the decoder holds) and with half and all of it, and a small forgetting curve."""
    data = settings.data
    window = data.decoder + len(lm.separator.ids)
    longest = data.decoder + data.chunks * data.chunk
    lengths = data.decoder, (data.decoder + longest) // 2, longest
    method = Cepe(chunk=data.chunk, decoder_window=window)
    return measuring(settings, method, trained_length=window, lengths=lengths, longest=longest)
