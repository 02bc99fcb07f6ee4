"""The parameters that are trained: query and key projections only (Sparse Memory Training, section 3.3), all, LoRA, or
those of given names.

RoPE rotates queries and keys. The biases of their projections and the norms after these belong to them. Where a family
keeps queries, keys and values in one matrix, it is trained in two parts, one of which is frozen: a masked gradient
is not enough, as weight decay changes weights without a gradient.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any, Literal

import torch
from jaxtyping import Int
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

from farspan import hf
from farspan.extras import optional_import
from farspan.train.config import Settings

PROJECTIONS = ("q_proj", "k_proj")
NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")
LORA = ("rank", "alpha", "dropout", "modules")
FUSED = ("query_key_value", "qkv_proj", "c_attn", "Wqkv", "W_pack", "att_proj", "qkv")


class TrainedSettings(Settings):
    """[trained]: the parameters to train."""

    what: Literal["qk", "all", "lora", "patterns"] = "qk"
    norms: bool = True  # with `qk`, also the norms of queries and keys
    heads: tuple[str, ...] = ()  # with `qk`, only these, each LAYER.HEAD from 0, with the keys that they read
    patterns: tuple[str, ...] = ()  # names of parameters, * matches any text
    rank: int = Field(16, gt=0)  # of LoRA
    alpha: float = Field(32.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    modules: tuple[str, ...] = PROJECTIONS  # that LoRA is added to

    @model_validator(mode="after")
    def _of_what(self) -> "TrainedSettings":
        for what, names in {"qk": ("norms", "heads"), "patterns": ("patterns",), "lora": LORA}.items():
            if self.what != what:
                self.refuse_unused(names, f"what = {self.what!r}", f'what = "{what}"')
        return self


@dataclass(frozen=True)
class Count:
    """Numbers of trained and of all parameters."""

    trained: int
    total: int

    @classmethod
    def of(cls, model: nn.Module, total: int | None = None) -> "Count":
        """Count the parameters of a model; `total`: of the model without LoRA's."""
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        return cls(trained, sum(p.numel() for p in model.parameters()) if total is None else total)

    def __str__(self) -> str:
        return f"{self.trained:,} of {self.total:,} parameters are trained ({self.trained / self.total:.2%})"


def choose(model: Any, settings: TrainedSettings) -> tuple[Any, Count]:
    """Freeze all parameters of `model` but the chosen ones; return the model to train, and the count.

    With LoRA it is another object, a wrapper of `model`. `plain` removes the changes again.

    Raises:
        ValueError: no such parameters, a family whose queries and keys cannot be separated, or modules that LoRA cannot
            be added to.
    """
    total = sum(p.numel() for p in model.parameters())
    if settings.what == "lora":
        peft = optional_import("peft", "lora")
        _refuse_modules(model, settings.modules)
        lora = peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=settings.dropout,
            target_modules=list(settings.modules),
            task_type="CAUSAL_LM",
        )
        model = peft.get_peft_model(model, lora)
    else:
        model.requires_grad_(settings.what == "all")
        if settings.what == "qk":
            if "heads" in settings.model_fields_set and not settings.heads:
                raise ValueError(
                    "trained.heads is empty: leave it out to train all queries and keys, or give LAYER.HEAD"
                )
            _train_queries_and_keys(model, norms=settings.norms and not settings.heads, heads=settings.heads)
        elif settings.what == "patterns":
            _train_named(model, settings.patterns)
    return model, Count.of(model, total)


def _refuse_modules(model: nn.Module, modules: Sequence[str]) -> None:
    """Raise ValueError for names of modules that LoRA cannot be added to: names that no module with a weight has, which
    PEFT leaves out without an error beside others; or a module, such as a tied `lm_head`, whose weight another one
    uses: in training LoRA changes the one module alone, but once it is merged into the weight both."""
    used = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    weights = {name: [*module.parameters(recurse=False)] for name, module in model.named_modules()}
    for one in modules or ("",):
        found = {name: own for name, own in weights.items() if one and own and f".{name}".endswith(f".{one}")}
        if not found:
            known = sorted({name.rpartition(".")[2] for name, own in weights.items() if any(p.dim() > 1 for p in own)})
            wrong = f"{one!r} is not the name of a module with a weight" if one else "got no names"
            raise ValueError(f"trained.modules: {wrong}; names in {type(model).__name__} are {', '.join(known)}")
        for name, own in found.items():
            if any(used[id(p)] > 1 for p in own):
                raise ValueError(
                    f"trained.modules: {name} uses the same weight as another module, which merging LoRA into it would "
                    'change too: leave it out, or train the weight itself, trained.what = "patterns"'
                )


def plain(model: Any) -> Any:
    """Return the model as transformers knows it: matrices whole again, LoRA merged into the weights."""
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()
    for module in list(model.modules()):
        for name in list(getattr(module, "parametrizations", ())):
            if isinstance(module.parametrizations[name][0], TrainedRows):
                parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    return model


class TrainedRows(nn.Module):
    """A parametrization of one parameter as two: its trained rows (of dimension `dim`), and the others."""

    rows: Tensor
    others: Tensor
    order: Tensor

    def __init__(self, rows: Int[Tensor, "trained"], size: int, dim: int) -> None:
        super().__init__()
        trained = torch.zeros(size, dtype=torch.bool, device=rows.device)
        trained[rows] = True
        everything = torch.arange(size, device=rows.device)
        both = everything[trained], everything[~trained]
        self.dim = dim
        self.register_buffer("rows", both[0], persistent=False)
        self.register_buffer("others", both[1], persistent=False)
        self.register_buffer("order", torch.cat(both).argsort(), persistent=False)

    def forward(self, trained: Tensor, others: Tensor) -> Tensor:
        return torch.cat([trained, others], self.dim).index_select(self.dim, self.order)

    def right_inverse(self, whole: Tensor) -> tuple[Tensor, Tensor]:
        return whole.index_select(self.dim, self.rows), whole.index_select(self.dim, self.others)


def _train_queries_and_keys(model: Any, *, norms: bool, heads: Sequence[str]) -> None:
    decoder, family = hf.decoder_of(model), type(model).__name__
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    named = [(name.rpartition(".")[2], module) for name, module in decoder.named_modules()]
    kinds = [sum(leaf == kind for leaf, _ in named) for kind in PROJECTIONS]
    for leaf, module in named:
        if norms and leaf in NORMS:
            module.requires_grad_(True)
    if heads:
        if kinds != [layers, layers]:
            raise ValueError(f"trained.heads needs projections {' and '.join(PROJECTIONS)}, and {family} has others")
        projections = [[module for leaf, module in named if leaf == kind] for kind in PROJECTIONS]
        _train_heads(model.config.get_text_config(decoder=True), projections, heads)
        return
    if kinds == [layers, layers]:
        for leaf, module in named:
            if leaf in PROJECTIONS:
                module.requires_grad_(True)
        return
    fused = [module for leaf, module in named if leaf in FUSED]
    if any(kinds) or len(fused) != layers:
        raise ValueError(
            f"queries and keys of {family} are not found as {' and '.join(PROJECTIONS)} in each of its {layers} "
            'layers: name the parameters to train, trained.what = "patterns"'
        )
    for module in fused:
        for name, parameter in list(module.named_parameters(recurse=False)):
            dim = 1 if isinstance(module, Conv1D) and parameter.dim() == 2 else 0
            _train_rows(module, name, _query_key_rows(model.config, parameter.shape[dim]), dim)


def _train_rows(module: nn.Module, name: str, rows: Int[Tensor, "trained"], dim: int) -> None:
    """Train these rows (of dimension `dim`) of a parameter, and no others."""
    parameter = getattr(module, name)
    parametrize.register_parametrization(
        module, name, TrainedRows(rows.to(parameter.device), parameter.shape[dim], dim)
    )
    parts: Any = module.parametrizations
    parts[name].original0.requires_grad_(True)
    parts[name].original1.requires_grad_(False)


def _train_heads(config: Any, projections: Sequence[Sequence[nn.Module]], heads: Sequence[str]) -> None:
    """Train the queries of these heads and the keys that they read.

    Args:
        projections: of the queries of each layer, and of the keys.
    """
    layers, queries = len(projections[0]), config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or queries
    chosen: dict[int, set[int]] = {}
    for text in heads:
        given, dot, head = text.partition(".")
        if not (dot and given.isdecimal() and head.isdecimal() and int(given) < layers and int(head) < queries):
            raise ValueError(
                f"trained.heads: the model has no head {text!r}; expected LAYER.HEAD, from 0.0 to "
                f"{layers - 1}.{queries - 1}"
            )
        chosen.setdefault(int(given), set()).add(int(head))
    for layer, those in chosen.items():
        read = {head * keys // queries for head in those}
        for module, count, wanted in ((projections[0][layer], queries, those), (projections[1][layer], keys, read)):
            for name, parameter in list(module.named_parameters(recurse=False)):
                size = parameter.shape[0] // count
                rows = torch.cat([torch.arange(head * size, (head + 1) * size) for head in sorted(wanted)])
                if len(rows) < parameter.shape[0]:
                    _train_rows(module, name, rows, 0)
                else:
                    parameter.requires_grad_(True)


def _query_key_rows(config: Any, size: int) -> Int[Tensor, "rows"]:
    """Return the rows of a matrix of queries, keys and values that are queries and keys."""
    heads, dim = hf.heads_of(config)
    rows = torch.arange(size)
    if config.model_type == "gpt_neox":  # head by head: its queries, its keys, its values
        return rows[rows % (3 * dim) < 2 * dim]
    if config.model_type == "phi3":  # all queries, all keys, all values
        return rows[: heads * dim + config.num_key_value_heads * dim]
    if config.model_type == "gpt2":
        return rows[: size * 2 // 3]
    raise ValueError(
        f"the layout of queries, keys and values in one matrix of {config.model_type} is unknown: name the parameters "
        'to train, trained.what = "patterns"'
    )


def _train_named(model: Any, patterns: tuple[str, ...]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in model.named_parameters()):
            raise ValueError(
                f"trained.patterns: {pattern!r} matches no parameter; names are, for example, {_some(model)}"
            )
    if not patterns:
        raise ValueError(f"trained.patterns is empty: give names of parameters, such as {_some(model)}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in patterns))


def _some(model: Any) -> str:
    return ", ".join(islice((name for name, p in model.named_parameters() if p.dim() > 1), 3))
