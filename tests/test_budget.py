"""TOVA and Knorm against keys chosen one by one; budgets as a number and as a share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from farspan.lm import LM, load, wrap
from farspan.methods import method
from farspan.methods.knorm import Knorm

import naive
from tiny import COMMON, CONFIGS, DIFFLLAMA, nats_of, refused, saved, some_ids, tiny_config, tiny_model

FIVE = ["llama", "qwen3", "gemma3", "gpt_neox", "mistral"]
READ, TIME = 50, 60


@pytest.mark.parametrize("architecture", FIVE)
@pytest.mark.parametrize(("name", "twin"), [("tova", naive.tova), ("knorm", naive.knorm)])
def test_it_keeps_the_keys_chosen_one_by_one(
    name: str, twin: Callable[..., Any], architecture: str, tokenizer: Any
) -> None:
    lm = wrap(tiny_model(architecture, attn_implementation="eager"), tokenizer, architecture)
    ids = some_ids(2, TIME)
    for budget, capacity in (("capacity=17", 17), ("share=0.21", 11), ("capacity=1", 1)):
        each = [twin(lm.model, row[None], READ, capacity) for row in ids]
        expected = torch.stack([nats_of(logits, row[READ - 1 :]) for (logits, _), row in zip(each, ids, strict=True)])
        with method(f"{name}:{budget}").on(lm) as reader:
            for chunk in (1024, 9):
                reader.chunk = chunk
                memory = reader.read(ids[:, :READ])
                torch.testing.assert_close(memory.score(ids[:, READ:]).nats, expected, rtol=0, atol=1e-5)
                for layer, kept in memory.stream.reading.positions.items():
                    whole = [[*heads[layer] * (kept.shape[1] // len(heads[layer]))] for _, heads in each]
                    assert kept.tolist() == whole
        assert memory.num_kept == capacity


def test_a_share_is_rounded_up_as_written() -> None:
    for percent in range(1, 101):
        how = method(f"tova:share={percent / 100}")
        for num_tokens in (1, 99, 100, 1000, 32_768):
            assert how.kept_to_answer(num_tokens) == -(-percent * num_tokens // 100)


def test_a_share_grows_with_the_text(lm: LM) -> None:
    ids = some_ids(1, 120)
    with method("knorm:share=0.21").on(lm) as reader:
        for length, kept in ((10, 3), (50, 11), (119, 25)):
            memory = reader.read(ids[:, :length])
            memory.score(ids[:, length : length + 1])
            assert memory.num_kept == kept == method("knorm:share=0.21").kept_to_answer(length)


def test_an_eviction_frees_the_keys_of_a_layer_before_those_of_the_next_are_copied(
    lm: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that reading with all keys is what needs the most memory, as plans assume."""
    held, choose = list[int](), Knorm.choose

    def watched(self: Knorm, call: Any) -> Any:
        held.append(memory.num_bytes)
        return choose(self, call)

    monkeypatch.setattr(Knorm, "choose", watched)
    with method("knorm:share=0.5").on(lm) as reader:
        memory: Any = reader.read(some_ids(1, 400))
        memory.score(some_ids(1, 2))
    assert held[1] < 0.8 * held[0]  # of two layers


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tova", "tova needs one budget of keys: write tova:capacity=KEYS, or tova:share=0.25 of the text"),
        ("knorm:capacity=5,share=0.5", "knorm needs one budget"),
        ("tova:capacity=0", "tova: capacity: got 0, expected at least 1"),
        ("knorm:share=0", "share must be above 0 and at most 1"),
        ("knorm:share=1.1", "share must be above 0 and at most 1"),
        ("knorm:share=nan", "share must be above 0 and at most 1"),
        ("tova:share=0.5+knorm:share=0.5", "both change how attention works"),
    ],
)
def test_a_budget_that_keeps_nothing_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        method(text)


JETMOE = COMMON | {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}


@pytest.mark.parametrize("text", ["knorm:capacity=20", "tova:share=0.5", "snapkv:capacity=20,window=6"])
@pytest.mark.parametrize(
    ("architecture", "held"),
    [
        ("deepseek_v3", "a compressed latent instead of keys"),
        ("jetmoe", "other keys or values than"),
        ("diffllama", "other keys or values than"),  # its layers attend twice, with the values of other heads
    ],
)
def test_a_model_whose_cache_holds_no_keys_to_choose_from_is_refused(
    architecture: str, held: str, text: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONFIGS, "jetmoe", ("JetMoe", JETMOE))
    monkeypatch.setitem(CONFIGS, "diffllama", DIFFLLAMA)
    lm = wrap(tiny_model(architecture), tokenizer, architecture)
    with refused(f"{text} cannot be used with {type(lm.model).__name__}: its cache holds {held}"), method(text).on(lm):
        pass
    with method("topk:k=5").on(lm) as reader:  # keeps every key
        assert reader.read(some_ids(1, 20)).num_kept == 20


def test_a_plan_without_weights_refuses_a_latent_too(tokenizer: Any, tmp_path: Path) -> None:
    saved(tmp_path, tokenizer, tiny_config("deepseek_v3"))
    lm = load(tmp_path, weights=False)
    with refused("its cache holds a compressed latent instead of keys"), method("knorm:capacity=20").on(lm):
        pass
