"""Pre-training of CEPE's encoder by masked-language modelling (Yen et al. 2024, arXiv 2402.16617, appendix A.1).

    loss = mean over masked tokens of -log p(token | the rest of the row)
    logits = E · norm(silu(W h + b)) + c            E: the encoder's own embeddings

The encoder has Llama blocks with bidirectional attention; its vocabulary is the decoder's and [MASK]. 30 % of the
tokens, special ones excepted, are replaced by [MASK]. The head runs on masked tokens only, in blocks. Only the encoder
is saved.
"""

import json
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from torch.utils.data import Dataset

from farspan import hf
from farspan.cepe.checkpoint import check_tokenizers, tokenizer_in
from farspan.cepe.encoder import load as load_encoder
from farspan.cepe.encoder import window_of
from farspan.lm import choose_separator
from farspan.loading import load_tokenizer
from farspan.loading.places import folder_of
from farspan.text.corpora import Corpus
from farspan.train import engines
from farspan.train.batches import PackedRows, read_corpus, read_held_out
from farspan.train.blocks import NOT_A_TARGET, summed_nats
from farspan.train.config import Settings
from farspan.train.finite import refuse_not_finite
from farspan.train.lm import Data
from farspan.train.optimizer import OptimizerSettings
from farspan.train.progress import TrainingWatch
from farspan.train.settings import PretrainingSettings, TrainingSettings
from farspan.train.trained import Count
from farspan.train.trainer import (
    record_settings,
    run,
    save_whole,
    training,
    write_up,
)

MASK = "[MASK]"


class EncoderSettings(Settings):
    """[encoder]: the shape of a Llama; default the 435 M parameters of the paper."""

    hidden: int = Field(1024, gt=0)
    feed_forward: int = Field(4096, gt=0)
    layers: int = Field(24, gt=0)
    heads: int = Field(16, gt=0)
    rope_theta: float = Field(10_000.0, gt=0)
    start: str | None = None  # a causal model to begin with, made bidirectional; `layers` is then how many to keep


class MlmOptimizer(OptimizerSettings):
    """[optimizer]: AdamW with a learning rate of 1e-3, a warm-up of 4 % of the steps, then a cosine decay to zero."""

    lr: float = Field(1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int | float = Field(0.04, ge=0)
    decay_fraction: float = Field(0.96, ge=0, le=1)
    decay: Literal["linear", "cosine"] = "cosine"


class MlmTrainer(PretrainingSettings):
    """[trainer], appendix A.1: 100,000 steps of 2,048 rows of 512 tokens."""

    steps: int = Field(100_000, gt=0)
    window: int = Field(512, gt=1)  # tokens of a row, and at least of the encoder's longest chunk
    batch: int | None = Field(2048, gt=0)
    micro_batch: int = Field(16, gt=0)
    dtype: Literal["float32", "bfloat16"] = "float32"


class MlmSettings(TrainingSettings):
    """The whole config of `farspan train mlm`."""

    decoder: str  # its tokenizer is used: a folder or hub id, or `demo`, the embedded one
    data: Data
    encoder: EncoderSettings = EncoderSettings()
    mask_rate: float = Field(0.3, gt=0, lt=1)
    optimizer: MlmOptimizer = MlmOptimizer()
    trainer: MlmTrainer = MlmTrainer()


class MaskedLM(nn.Module):
    """An encoder with the head of a masked-language model. Parameters have the names of the authors' checkpoints, but
    their `lm_head.weight` is here the embeddings, and their `lm_head.bias` is `lm_bias`."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        hidden, vocabulary = encoder.config.hidden_size, encoder.config.vocab_size
        self.model = encoder
        self.lm_dense = nn.Linear(hidden, hidden)
        nn.init.normal_(self.lm_dense.weight, std=getattr(encoder.config, "initializer_range", 0.02))  # OPT has none
        nn.init.zeros_(self.lm_dense.bias)
        self.lm_layer_norm = nn.RMSNorm(hidden, eps=getattr(encoder.config, "rms_norm_eps", 1e-6))
        self.lm_bias = nn.Parameter(torch.zeros(vocabulary))

    def logits(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens vocabulary"]:
        # in the dtype of the norm's weight, as torch warns of another one, such as bf16 under autocast
        hidden = self.lm_layer_norm(silu(self.lm_dense(hidden)).to(self.lm_layer_norm.weight.dtype))
        return linear(hidden, self.model.get_input_embeddings().weight, self.lm_bias)

    def forward(
        self,
        input_ids: Int[Tensor, "batch time"],
        labels: Int[Tensor, "batch time"],
        attention_mask: Int[Tensor, "batch time"] | None = None,
    ) -> Float[Tensor, ""]:
        """Return the mean of -log p(label) over the tokens that have a label, in nats and fp32; 0 if none has."""
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        wanted = labels != NOT_A_TARGET
        total = summed_nats(self.logits, len(self.lm_bias), hidden[wanted], labels[wanted])
        return total / wanted.sum().clamp_min(1)


class MaskedRows(Dataset[dict[str, Tensor]]):
    """Rows with tokens replaced by [MASK]: a pure function of seed and index. Each pass reads all rows once, in another
    order and with other tokens masked.

    Args:
        length: tokens of a row.
        separator: token ids before each document.
        special: token ids that are never masked.
        mask: the id of [MASK].
        rate: the probability that a token, special ones excepted, is masked.
        samples: the number of rows; default one pass.
    """

    def __init__(
        self,
        corpus: Corpus,
        length: int,
        *,
        separator: tuple[int, ...],
        special: tuple[int, ...],
        mask: int,
        rate: float,
        seed: int,
        samples: int | None = None,
    ) -> None:
        self.corpus, self.rows = corpus, PackedRows(corpus, length, separator, seed)
        self.special, self.mask, self.rate, self.seed = np.asarray(special, np.int64), mask, rate, seed
        self.samples = len(self.rows) if samples is None else samples
        self._order: tuple[int, np.ndarray] = -1, np.empty(0)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        which, place = divmod(index, len(self.rows))
        if self._order[0] != which:
            self._order = which, np.random.default_rng((self.seed, which, 0)).permutation(len(self.rows))
        row = self.rows[int(self._order[1][place])]["input_ids"].numpy()
        masked = np.random.default_rng((self.seed, index, 1)).random(len(row)) < self.rate
        masked &= ~np.isin(row, self.special)
        return {
            "input_ids": torch.from_numpy(np.where(masked, self.mask, row)),
            "labels": torch.from_numpy(np.where(masked, row, NOT_A_TARGET)),
        }


def new_encoder(settings: EncoderSettings, vocabulary: int, window: int, attention: str | None = None) -> Any:
    """Return an encoder with random weights, or with the weights of `settings.start`.

    Args:
        vocabulary: the number of token ids.
        window: tokens of the longest chunk; a longer window of `settings.start` is kept.
        attention: the attention kernel of transformers; default sdpa if the model supports it.

    Raises:
        ValueError: `hidden` is not an even multiple of `heads`; or a model that cannot be loaded, has fewer learned
            positions than `window`, or cannot be made bidirectional.
    """
    from transformers import LlamaConfig, LlamaModel

    if settings.start is not None:
        layers = settings.layers if "layers" in settings.model_fields_set else None
        encoder = load_encoder(folder_of(settings.start), dtype=torch.float32, layers=layers)
        refuse_not_finite(encoder, f"encoder.start = {settings.start!r}")
        if (limit := hf.position_limit(encoder)) is not None and limit < window:
            raise ValueError(
                f"trainer.window = {window:,} exceeds the {limit:,} positions of encoder.start = {settings.start!r}: "
                "lower it, or use a model with RoPE"
            )
        encoder.config.max_position_embeddings = max(window, window_of(encoder) or 0)
        encoder.resize_token_embeddings(vocabulary)
        if attention is not None:
            encoder.set_attn_implementation(attention)
        return encoder
    if settings.hidden % settings.heads or settings.hidden // settings.heads % 2:
        raise ValueError(
            f"encoder.hidden = {settings.hidden} must be an even multiple of encoder.heads = {settings.heads}"
        )
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=settings.hidden,
        intermediate_size=settings.feed_forward,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        max_position_embeddings=window,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        tie_word_embeddings=True,
        pad_token_id=None,
    )
    config.is_causal, config.use_cache = False, False  # bidirectional attention
    return LlamaModel._from_config(config, attn_implementation=attention)


def refuse_two_shapes(settings: EncoderSettings) -> None:
    """Raise ValueError for settings of a new encoder together with `start`; `layers` is allowed."""
    both = [f"encoder.{name}" for name in sorted(settings.model_fields_set - {"start", "layers"})]
    if settings.start is not None and both:
        raise ValueError(
            f"encoder.start = {settings.start!r} has its own shape: leave out {', '.join(both)} "
            f"(--set \"encoder={{start='{settings.start}'}}\" replaces the whole table)"
        )


@training
def train(settings: MlmSettings, watch: TrainingWatch) -> dict[str, Any]:
    """Train, and save encoder and tokenizer. See `farspan.train.trainer.training`.

    Raises:
        ValueError: impossible settings, a tokenizer that cannot be loaded or differs from that of `encoder.start`, a
            text shorter than one row, another engine in use than requested, or `out` holds another training.
    """
    trainer = settings.trainer
    refuse_two_shapes(settings.encoder)
    tokenizer = load_tokenizer(folder_of(settings.decoder), what="decoder")
    start = settings.encoder.start
    if start is not None and (of_start := tokenizer_in(folder_of(start), None, None)) is not None:
        check_tokenizers(tokenizer, of_start)
    separator, special = choose_separator(tokenizer).ids, tuple(tokenizer.all_special_ids)
    with engines.processes().main_process_first():
        record_settings(settings, watch)
        text = read_corpus(settings.data.text, tokenizer, watch.notice)
        held_out = read_held_out(settings.data.held_out, text, tokenizer, watch.notice)
    if tokenizer.mask_token is None:
        tokenizer.add_special_tokens({"mask_token": MASK})

    def rows(corpus: Corpus, samples: int | None) -> MaskedRows:
        return MaskedRows(
            corpus,
            trainer.window,
            separator=separator,
            special=special,
            mask=tokenizer.mask_token_id,
            rate=settings.mask_rate,
            seed=trainer.seed,
            samples=samples,
        )

    def new() -> MaskedLM:
        return MaskedLM(new_encoder(settings.encoder, len(tokenizer), trainer.window, trainer.attention))

    model = new()
    # a continued training has the weights of its checkpoint, but the config of `start`
    inputs = {} if start is None else {"base_config": json.dumps(hf.scoring_fields(model.model.config))}
    if trainer.activation_checkpointing:
        hf.checkpoint_activations(model.model)
    if trainer.engine == "fsdp2":
        engines.shard(model, engines.layers_of(model.model))
    watch.notice(f"{settings.out}: {Count.of(model)}")
    summary = run(
        model,
        rows(text, trainer.steps * trainer.rows_per_step),
        settings,
        watch,
        held_out=rows(held_out, None) if held_out else None,
        save=lambda model, dtype, folder: save_whole(model.model, dtype, folder),
        again=new,
        row=trainer.window,
        inputs=inputs,
        terms=lambda model, core, batch: {"masked": model(**batch)},
        predicted=lambda batch: {"masked": batch["labels"]},
        weights={"masked": 1.0},
    )
    tokenizer.model_max_length = trainer.window
    return write_up(settings, summary, tokenizer)
