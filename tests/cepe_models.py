"""Tiny CEPE models of random weights, whose contexts change what they say, and that of the authors' numbers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from farspan import cepe
from farspan.cepe.model import cepe_class
from farspan.cepe.saving import is_added

from tiny import VOCABULARY, tiny_model

ENCODER_WINDOW = 16  # tokens


def added_parameters(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Names and parameters of encoder, cross-attention and order."""
    return ((name, parameter) for name, parameter in model.named_parameters() if is_added(name))


def tiny_encoder(**changes: Any) -> torch.nn.Module:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": VOCABULARY + 1,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": ENCODER_WINDOW,
            "pad_token_id": 0,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
        | changes
    )
    encoder = transformers.LlamaModel(config).eval()
    with torch.no_grad():
        for parameter in encoder.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return encoder


def tiny_cepe(architecture: str = "llama", *, trained: bool = True, **changes: Any) -> Any:
    """With `trained`, an output projection that is not zero, so that a context says something."""
    base = mixtral() if architecture == "mixtral" else tiny_model(architecture, **changes)
    model = cepe.from_base(base, tiny_encoder()).eval()
    return train_a_little(model) if trained else model


@torch.no_grad()
def train_a_little(model: Any) -> Any:
    torch.manual_seed(2)
    for cross in model.cross_attentions():
        torch.nn.init.normal_(cross.o_proj.weight, std=0.7)
        for norm in (cross.q_norm, cross.k_norm):  # of weights that differ, so that each of them matters
            for parameter in norm.parameters() if norm is not None else ():
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for bias in (cross.q_proj.bias, cross.v_proj.bias, cross.k_proj.bias):
            if bias is not None:
                torch.nn.init.normal_(bias, std=0.3)
    return model


def mixtral() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=3, max_position_embeddings=512, sliding_window=None,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def authors_settings() -> dict[str, Any]:
    """The settings of the models that the authors' code made for the fixture `reference`."""
    return json.loads((Path(__file__).parent / "data" / "cepe_reference.json").read_text())


def authors_model(reference: dict[str, Tensor]) -> Any:
    """The model whose numbers the authors' code gave."""
    given = authors_settings()
    config = LlamaConfig(**given["decoder"], **given["extra"], encoder_config=given["encoder"])
    model = cepe_class(LlamaForCausalLM)(config)
    model.load_state_dict({key[7:]: value for key, value in reference.items() if key.startswith("mha.sd.")})
    return model


def some_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))
