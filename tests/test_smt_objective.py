"""The loss of Sparse Memory Training against equations 2 and 3 spelled out, and what is looked for before it."""

from typing import Any

import pytest
import torch
from torch import Tensor

import farspan.train.objective
from farspan import reader
from farspan.train.objective import NOT_A_TARGET, decoded, terms
from farspan.train.preflight import memory_effect, preflight

from tiny import VOCABULARY, close, tiny_model

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_neox", "phi3", "granite", "cohere", "gpt2"]
MEMORY = [0, 4, 10, 11, 30, 31, 32, 57]
POSITIONS = [*MEMORY, *range(90, 98)]


def rows(positions: list[int], predicted: int, seed: int = 0, batch: int = 2) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCABULARY, (batch, len(positions)), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, : len(positions) - predicted] = NOT_A_TARGET
    return {"input_ids": ids, "position_ids": torch.tensor([positions] * batch), "labels": labels}


def batch() -> dict[str, dict[str, Tensor]]:
    return {"sparse": rows(POSITIONS, 8), "window": rows(list(range(16)), 15, seed=1)}


def naive_term(model: Any, given: dict[str, Tensor]) -> Tensor:
    """Equation 2 for each row alone: an explicit mask by position, all logits, a sum over predicted tokens."""
    nats: list[Tensor] = []
    windows = window_by_layer(model)
    for ids, positions, labels in zip(given["input_ids"], given["position_ids"], given["labels"], strict=True):
        distance = positions[:, None] - positions[None, :]
        masks = {}
        for kind, window in windows.items():
            hidden = (distance < 0) | (distance >= (window or 10**9))
            masks[kind] = torch.zeros(hidden.shape).masked_fill(hidden, -1e9)[None, None]
        mask: Any = masks if len(masks) > 1 else next(iter(masks.values()))
        logits = model(
            input_ids=ids[None], position_ids=positions[None], attention_mask=mask, use_cache=False
        ).logits[0]  # fmt: skip
        for t in range(1, len(ids)):
            if labels[t] != NOT_A_TARGET:
                nats.append(-logits[t - 1].log_softmax(-1)[labels[t]])
    return torch.stack(nats).mean()


def window_by_layer(model: Any) -> dict[str, int | None]:
    config = model.config
    if config.model_type == "mistral":
        return {"sliding_attention": config.sliding_window}
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return {kind: config.sliding_window if kind == "sliding_attention" else None for kind in kinds}


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_objective_is_equations_2_and_3(family: str, attention: str) -> None:
    model = tiny_model(family)
    if attention == "sdpa" and not model._supports_sdpa:
        pytest.skip("this family has no such attention")
    model.set_attn_implementation(attention)
    found = terms(model, model, batch())
    (found["sparse"] + 0.5 * found["window"]).backward()
    ours = gradients(model)
    expected = {name: naive_term(model, given) for name, given in batch().items()}
    (expected["sparse"] + 0.5 * expected["window"]).backward()
    theirs = gradients(model)
    for name in ("sparse", "window"):
        close(found[name], expected[name])
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5)


def test_groups_of_different_lengths_are_read_one_by_one() -> None:
    model = tiny_model()
    given = {"sparse": rows(POSITIONS, 8), "window": rows(list(range(11)), 10, seed=1)}
    found = terms(model, model, given)
    for name in given:
        close(found[name], naive_term(model, given[name]))


def test_groups_of_one_length_are_read_together() -> None:
    model = tiny_model()
    fed: list[int] = []
    model.model.register_forward_hook(lambda module, given, output: fed.append(len(output[0])))
    terms(model, model, {name: rows | {} for name, rows in batch().items()})
    assert fed[0] == 4
    assert fed.count(4) == 1


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
def test_the_head_in_blocks_is_the_head(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)
    found = terms(model, model, batch())
    sum(found.values()).backward()
    whole = gradients(model)
    monkeypatch.setitem(reader.LOGITS_AT_ONCE, "cpu", 5 * VOCABULARY)
    most: list[int] = []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda module, given, output: most.append(output[..., 0].numel()))
    blocks = terms(model, model, batch())
    sum(blocks.values()).backward()
    in_blocks = gradients(model)
    assert max(most) <= 5
    for name in found:
        torch.testing.assert_close(blocks[name], found[name], rtol=1e-5, atol=1e-6)
    for name in whole:
        torch.testing.assert_close(in_blocks[name], whole[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
def test_a_sharded_model_has_the_same_objective(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)
    found = terms(model, model, batch())
    monkeypatch.setattr(farspan.train.objective, "sharded", lambda core: True)
    fed: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda m, g, output: fed.append(output[..., 0].numel()))
    in_one = terms(model, model, batch())
    assert fed == [2 * 8 + 2 * 15]
    for name in found:
        torch.testing.assert_close(in_one[name], found[name], rtol=1e-5, atol=1e-6)


def test_only_predicted_tokens_reach_the_head() -> None:
    model = tiny_model()
    fed: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda m, g, output: fed.append(output[..., 0].numel()))
    terms(model, model, {"sparse": rows(POSITIONS, 8)})
    assert fed == [2, 16]  # the last token of each row, which the forward asks for; 2 rows of 8 targets


def without_mask(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    return model.model(input_ids=ids, position_ids=positions, use_cache=False)[0]


def test_transformers_cuts_attention_at_gaps_where_no_mask_is_given() -> None:
    # should this fail one day, the trap is gone, and the mask is merely no longer needed
    model, given = tiny_model(), rows(POSITIONS, 8)
    ours, _ = decoded(model, model, given["input_ids"], given["position_ids"])
    cut = without_mask(model, given["input_ids"], given["position_ids"])
    assert (ours - cut).abs().max() > 0.01


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_memory_token_acts_on_the_target(checkpointing: bool) -> None:
    model, given = tiny_model().train(), rows(POSITIONS, 8, batch=1)
    if checkpointing:
        farspan.hf.checkpoint_activations(model)
    effect = memory_effect(model, model, given["input_ids"], given["position_ids"], len(MEMORY))
    assert effect.shape == (len(MEMORY),)
    assert (effect > 0).all()


# before a training


@pytest.mark.parametrize("family", [*FAMILIES, "olmo2", "stablelm", "smollm3", "glm", "gpt_oss", "phi", "ctrl"])
def test_what_can_be_trained_passes_the_preflight(family: str) -> None:
    model = tiny_model(family)
    preflight(model, model, 64, 400)
    assert not model.training
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_model_whose_attention_is_cut_is_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farspan.hf, "gapped_mask", lambda model, positions: None)
    model = tiny_model(family)
    with pytest.raises(ValueError, match="attention is cut somewhere"):
        preflight(model, model, 64, 400)


def test_cut_attention_is_also_seen_by_the_missing_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farspan.hf, "gapped_mask", lambda model, positions: None)
    monkeypatch.setattr(
        farspan.train.preflight, "_under_explicit_mask", lambda core, ids, p: without_mask(core, ids, p)
    )
    model = tiny_model()
    with pytest.raises(ValueError, match=r"memory tokens have no effect on the target"):
        preflight(model, model, 64, 400)


def test_windows_that_count_rows_instead_of_positions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farspan.hf, "gapped_mask", lambda model, positions: torch.ones_like(positions))
    model = tiny_model("mistral", sliding_window=8)
    with pytest.raises(ValueError, match="sliding windows are not counted in positions"):
        preflight(model, model, 64, 400)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("bloom", {}, "BloomForCausalLM: it has no argument position_ids"),
        ("mamba", {}, "MambaForCausalLM: it has no argument position_ids"),
        ("falcon", {"alibi": True}, "does not use its positions"),
        ("gpt2", {"n_positions": 128}, "to 400 tokens: it has learned positions, a table of 128"),
        ("opt", {"max_position_embeddings": 128}, "learned positions, a table of 128"),
        ("openai-gpt", {}, "OpenAIGPTLMHeadModel: its attention takes no explicit mask"),
        ("llama4", {}, "has layers of chunked_attention"),
        ("jamba", {}, "Sparse Memory Training cannot train JambaForCausalLM"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "its dynamic RoPE depends on the largest position",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_reason(family: str, changes: dict[str, Any], message: str) -> None:
    model = tiny_model(family, **changes)
    with pytest.raises(ValueError, match=message):
        preflight(model, model, 64, 400)


def test_rope_in_16_bits_is_refused() -> None:
    model = tiny_model().bfloat16()
    with pytest.raises(ValueError, match="its RoPE frequencies are bfloat16"):
        preflight(model, model, 64, 400)
