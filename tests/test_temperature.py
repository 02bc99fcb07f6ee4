"""Log-n scaling against its equation, alone and within other methods."""

import math
from typing import Any

import pytest
import torch

from farspan.lm import LM
from farspan.methods import method

from naive import by_pairs, snapkv
from tiny import nats_by, nats_of, open_lm, same, some_ids

FIVE = ["llama", "qwen3", "gemma3", "gpt_neox", "mistral"]


def log_n(i: int, n: int) -> float:
    return max(1.0, math.log(i + 1) / math.log(n))


@pytest.mark.parametrize("architecture", FIVE)
def test_queries_are_multiplied_by_the_log_of_their_number_of_tokens(architecture: str, tokenizer: Any) -> None:
    lm, ids = open_lm(architecture, tokenizer), some_ids(1, 60)
    expected = by_pairs(lm.model, ids, factor=lambda i: log_n(i, 7))
    same(nats_by("temperature:original=7", lm, ids)[0], nats_of(expected, ids[0]))


@pytest.mark.parametrize("architecture", FIVE)
def test_the_twin_without_changes_is_the_model(architecture: str, tokenizer: Any) -> None:
    lm, ids = open_lm(architecture, tokenizer), some_ids(1, 60)
    with torch.no_grad():
        same(by_pairs(lm.model, ids), lm.model(input_ids=ids).logits[0])


def test_the_trained_length_is_the_default_also_where_rope_is_scaled(tokenizer: Any) -> None:
    lm, ids = open_lm("llama", tokenizer, max_position_embeddings=24), some_ids(1, 60)
    same(nats_by("temperature", lm, ids), nats_by("temperature:original=24", lm, ids))
    scaled = [nats_by(f"rope:type=linear,factor=4+temperature{own}", lm, ids) for own in ("", ":original=24")]
    same(*scaled)
    assert (scaled[0] - nats_by("rope:type=linear,factor=4", lm, ids)).abs().max() > 0.01


@pytest.mark.parametrize(
    ("inner", "distance"), [("lambda_mask:window=9,sinks=60", lambda i, j: (i, max(j, i - 9))), ("topk:k=60", None)]
)
def test_it_scales_the_scores_that_another_method_computes(inner: str, distance: Any, lm: LM) -> None:
    ids = some_ids(1, 60)
    parts = {} if distance is None else {"parts": distance}
    expected = by_pairs(lm.model, ids, factor=lambda i: log_n(i, 7), **parts)
    same(nats_by(f"{inner}+temperature:original=7", lm, ids)[0], nats_of(expected, ids[0]))


def test_methods_that_evict_take_votes_of_scaled_queries(tokenizer: Any) -> None:
    lm, ids, read = open_lm("llama", tokenizer, attn_implementation="eager"), some_ids(1, 60), 50
    settings = {"capacity": 17, "window": 5, "kernel": 3, "pool": "max"}
    with method("snapkv:capacity=17,window=5,kernel=3+temperature:original=2").on(lm) as reader:
        memory = reader.read(ids[:, :read])
        memory.score(ids[:, read:])
        chosen = {layer: kept[0].tolist() for layer, kept in memory.stream.reading.positions.items()}
    _, plain = snapkv(lm.model, ids, read, **settings)
    for layer in lm.model.model.layers:  # a constant factor, which is log_n only at the last queries, about
        layer.self_attn.scaling *= math.log(read - 2) / math.log(2)
    _, sharper = snapkv(lm.model, ids, read, **settings)
    assert sharper[0] == chosen[0] != plain[0]


@pytest.mark.parametrize("length", [0, 1])
def test_a_length_without_a_log_to_divide_by_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"temperature: original: got {length}, expected 2 to 2,147,483,647"):
        method(f"temperature:original={length}")


def test_a_model_without_a_trained_length_needs_one(lm: LM) -> None:
    lm.identity["trained_length"] = None
    with pytest.raises(ValueError, match="Write original=TOKENS"), method("temperature").on(lm):
        pass


def test_two_temperatures_are_refused_with_what_goes_together() -> None:
    with pytest.raises(ValueError, match=r"both change how temperature works; .* RoPE, attention, passages$"):
        method("temperature+temperature:original=5")
