"""Pre-training of a small Llama, tokenizer included; Llama-83M of the Forgetting Curve paper (appendix D.1) is one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from farspan import hf
from farspan.corpus import Corpus, load, read_texts
from farspan.loading import load_tokenizer
from farspan.train import engines
from farspan.train.batches import PackedRows, train_tokenizer
from farspan.train.config import Out, Settings, in_its_folder, refuse_other_settings
from farspan.train.optimizer import OptimizerSettings
from farspan.train.trainer import TrainerSettings, refuse_impossible, run, write_up


class ModelSettings(Settings):
    """[model]: the shape of a Llama."""

    hidden: int = Field(512, gt=0)
    feed_forward: int = Field(2048, gt=0)
    layers: int = Field(12, gt=0)
    heads: int = Field(8, gt=0)
    head_dim: int | None = Field(None, gt=0)  # None: hidden / heads
    key_value_heads: int = Field(8, gt=0)
    tied: bool = False  # input and output embeddings are one matrix
    rope_theta: float = Field(10_000.0, gt=0)


class TokenizerSettings(Settings):
    """[tokenizer]: an existing one (`folder`, or a hub id), or one trained on the text."""

    folder: str | None = None
    vocabulary: int = Field(32_000, gt=0)


class DataSettings(Settings):
    """[data]: texts, named as everywhere (see `farspan.corpus`)."""

    text: str
    held_out: str | None = None  # its loss is reported


class LmSettings(Settings):
    """The whole config of `farspan train lm`."""

    out: Out
    data: DataSettings
    tokenizer: TokenizerSettings = TokenizerSettings()
    model: ModelSettings = ModelSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    trainer: TrainerSettings


@in_its_folder
def train(settings: LmSettings, notice: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Trains, or continues a training that was stopped, and saves model and tokenizer in `settings.out`.

    Returns what `training.json` in that folder holds: parameters, tokens, losses, seconds and the settings. `notice` is
    called with each line that a user should read.

    Raises:
        ValueError: impossible settings, a text that does not hold one row, or `out` holds another training.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    model_settings, length = settings.model, settings.trainer.window
    if model_settings.heads % model_settings.key_value_heads:
        raise ValueError(
            f"model.heads = {model_settings.heads} must be a multiple of model.key_value_heads = "
            f"{model_settings.key_value_heads}"
        )
    if model_settings.head_dim is None and model_settings.hidden % model_settings.heads:
        raise ValueError(
            f"model.hidden = {model_settings.hidden} must be a multiple of model.heads = {model_settings.heads}, or "
            "give model.head_dim"
        )
    head_dim = model_settings.head_dim or model_settings.hidden // model_settings.heads
    if head_dim % 2:
        raise ValueError(
            f"heads of {head_dim} dimensions (model.head_dim, or model.hidden / model.heads) are odd; rotary positions "
            "turn pairs of dimensions, so use an even one"
        )
    if settings.trainer.engine == "fsdp2" and not torch.cuda.is_available():
        raise ValueError('trainer.engine = "fsdp2" of `train lm` needs GPUs: use "ddp"')
    refuse_impossible(settings.trainer, settings.optimizer)
    processes = engines.processes()
    out = Path(settings.out)
    source = settings.tokenizer.folder or str(out)
    with processes.main_process_first():  # the others find what it has written
        refuse_other_settings(out, settings)
        if not settings.tokenizer.folder and not (out / "tokenizer.json").exists():
            train_tokenizer(read_texts(settings.data.text), settings.tokenizer.vocabulary, out)
        tokenizer = load_tokenizer(source, what="tokenizer")
        text = load(settings.data.text, tokenizer)
        held_out = load(settings.data.held_out, tokenizer) if settings.data.held_out else None
    separator = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if separator is None:
        raise ValueError(
            f"tokenizer {source} has neither a beginning- nor an end-of-text token to put between documents"
        )

    def rows(corpus: Corpus) -> PackedRows:
        return PackedRows(corpus, length, (separator,), settings.trainer.seed)

    set_seed(settings.trainer.seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=model_settings.hidden,
        intermediate_size=model_settings.feed_forward,
        num_hidden_layers=model_settings.layers,
        num_attention_heads=model_settings.heads,
        head_dim=head_dim,
        num_key_value_heads=model_settings.key_value_heads,
        max_position_embeddings=length,
        rope_parameters={"rope_type": "default", "rope_theta": model_settings.rope_theta},
        tie_word_embeddings=model_settings.tied,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )

    def new() -> Any:
        return LlamaForCausalLM._from_config(config, attn_implementation=settings.trainer.attention)

    model = new()
    if settings.trainer.activation_checkpointing:
        hf.checkpoint_activations(model)
    summary = run(
        model,
        rows(text),
        rows(held_out) if held_out else None,
        settings.optimizer,
        settings.trainer,
        out,
        again=new,
        notice=notice,
        arguments={
            "torch_compile": settings.trainer.compile,
            "eval_strategy": "steps" if held_out else "no",
            "eval_steps": settings.trainer.evaluate_every,
        },
    )
    summary["tokens"] = summary.pop("rows") * length
    summary["settings"] = settings.model_dump(mode="json")
    if processes.is_main_process:
        write_up(out, summary, tokenizer)
    return summary
