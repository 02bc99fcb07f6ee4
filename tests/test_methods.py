"""Each method against its naive twin and the original algorithms; what they refuse, and why."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from farspan import hf
from farspan.hf import attend as attention
from farspan.lm import LM, load, wrap
from farspan.methods import SPELLINGS, method
from farspan.methods.rope import ntk, scaled
from farspan.methods.topk import largest
from farspan.text import encoders, retrieval

from naive import naive_llama, snapkv, streaming
from tiny import (
    COMMON,
    CONFIGS,
    FACTORS,
    PHIMOE,
    close,
    nats_by,
    nats_of,
    open_lm,
    refused,
    same,
    saved,
    some_ids,
    tiny_model,
)

FAMILIES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma",
    "gpt_neox",
    "olmo2",
    "stablelm",
    "smollm3",
    "gemma2",
    "gemma3",
    "phi",
    "granite",
]


W, S = 14, 3


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("how", ["sinks", "lambda_mask"])
def test_sinks_are_streaming_llm_and_the_lambda_mask_is_lm_infinite_token_by_token(
    how: str, architecture: str, tokenizer: Any
) -> None:
    lm, ids = open_lm(architecture, tokenizer), some_ids(1, 32)
    expected = nats_of(streaming(lm.model, ids, W, S, ceiling=how == "lambda_mask"), ids[0])
    close(nats_by(f"{how}:window={W},sinks={S}", lm, ids)[0], expected)


@pytest.mark.parametrize("architecture", ["llama", "phi3", "gemma2"])
def test_a_stride_is_the_cache_trimmed_every_so_many_tokens(architecture: str, tokenizer: Any) -> None:
    lm, ids = open_lm(architecture, tokenizer), some_ids(1, 61)
    expected = nats_of(streaming(lm.model, ids, W, S, stride=11), ids[0])
    close(nats_by(f"sinks:window={W},sinks={S},stride=11", lm, ids)[0], expected)


@pytest.mark.parametrize("stride", [5, 6, 8])
def test_with_a_stride_no_layer_sees_beyond_its_own_window(stride: int, tokenizer: Any) -> None:
    """The layers' window is 40, and queries of the method see up to 36 + stride - 1 near tokens."""
    lm, ids = open_lm("mistral", tokenizer), some_ids(1, 90)
    given, own = nats_by(f"sinks:window=36,sinks=3,stride={stride}", lm, ids), nats_by("full", lm, ids)
    assert bool((given - own).abs().max() < 1e-4) == (36 + stride - 1 > 40)


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (1, 5), (2, 1), (17, 0), (17, 5)])
def test_sinks_and_the_lambda_mask_are_their_equations(window: int, sinks: int, lm: LM) -> None:
    ids = some_ids(1, 50)

    def visible(i: int, j: int) -> bool:
        return j < sinks or i - window < j

    def in_cache(i: int, j: int) -> int:
        return i - j if i - window < j else min(i, sinks + window - 1) - j

    expected = naive_llama(lm.model, ids[0].tolist(), visible, in_cache)
    close(nats_by(f"sinks:window={window},sinks={sinks}", lm, ids)[0], nats_of(expected, ids[0]))
    expected = naive_llama(lm.model, ids[0].tolist(), visible, lambda i, j: min(i - j, window))
    close(nats_by(f"lambda_mask:window={window},sinks={sinks}", lm, ids)[0], nats_of(expected, ids[0]))


@pytest.mark.parametrize("k", [1, 4, 20])
def test_top_k_is_its_equation(k: int, lm: LM) -> None:
    ids = some_ids(1, 50)
    expected = naive_llama(lm.model, ids[0].tolist(), lambda i, j: True, lambda i, j: i - j, largest=k)
    close(nats_by(f"topk:k={k}", lm, ids)[0], nats_of(expected, ids[0]))


@pytest.mark.parametrize("factor", [1, 3])
def test_dynamic_rope_turns_all_keys_by_the_length_so_far(factor: int, lm: LM) -> None:
    ids, original = some_ids(1, 50), 20

    def by_length(i: int) -> Tensor:
        scale = max(1.0, factor * (i + 1) / original - (factor - 1))
        return 1.0 / (10_000.0 * scale ** (8 / 6)) ** (torch.arange(0, 8, 2) / 8)

    expected = naive_llama(lm.model, ids[0].tolist(), lambda i, j: True, lambda i, j: i - j, inv_freq=by_length)
    close(nats_by(f"rope:type=dynamic,factor={factor},original={original}", lm, ids)[0], nats_of(expected, ids[0]))


def test_in_one_layer_dynamic_rope_gives_the_last_token_what_transformers_gives_it(tokenizer: Any) -> None:
    ids = some_ids(1, 50)
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    changes: dict[str, Any] = {"num_hidden_layers": 1, "max_position_embeddings": 20}
    theirs = tiny_model("llama", rope_parameters=scaling, **changes)
    with torch.no_grad():
        expected = -theirs(input_ids=ids[:, :-1], use_cache=False).logits[0, -1].log_softmax(-1)[ids[0, -1]]
    lm = open_lm("llama", tokenizer, **changes)
    close(nats_by("rope:type=dynamic,factor=2", lm, ids)[0, -1], expected)


@pytest.mark.parametrize("architecture", [*FAMILIES[:-4], "gemma3", "phi", "granite"])
@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn"])
def test_scaled_rope_is_what_transformers_makes_of_it(kind: str, architecture: str, tokenizer: Any) -> None:
    if architecture == "phi3" and kind != "ntk":
        pytest.skip("transformers knows no scaling of Phi3 but LongRoPE")
    lm, ids = open_lm(architecture, tokenizer), some_ids(1, 60)
    given = dict(lm.model.config.rope_parameters)
    parameters = dict(given.get("full_attention", given))  # layers with a sliding window keep theirs
    dim = 2 * next(values.numel() for name, values in lm.model.named_buffers() if name.endswith("inv_freq"))
    if kind == "ntk":
        parameters["rope_theta"] = ntk(parameters["rope_theta"], dim, 3.0)
    else:
        parameters |= {"rope_type": kind, "factor": 3.0, "original_max_position_embeddings": 512}
    if "full_attention" in given:
        parameters = given | {"full_attention": parameters}
    theirs = tiny_model(architecture, rope_parameters=parameters, max_position_embeddings=1536)
    with torch.no_grad():
        expected = nats_of(theirs(input_ids=ids).logits[0], ids[0])
    close(nats_by(f"rope:type={kind},factor=3", lm, ids)[0], expected)


def test_scaled_frequencies_are_as_published() -> None:
    theta, dim = 10_000.0, 128
    own = attention.frequencies(theta, dim)
    longer, _ = scaled("ntk", theta, dim, 4.0, 4096)
    assert longer[0] == own[0]  # high frequencies stay, the lowest is interpolated
    assert math.isclose(longer[-1], own[-1] / 4, rel_tol=1e-5)
    yarn, scale = scaled("yarn", theta, dim, 4.0, 4096)
    turns = 4096 * own / (2 * math.pi)
    torch.testing.assert_close(yarn[turns > 40], own[turns > 40])
    torch.testing.assert_close(yarn[turns < 0.8], own[turns < 0.8] / 4)
    assert math.isclose(scale, 0.1 * math.log(4) + 1)


def test_rope_lengthens_what_the_model_was_trained_for(lm: LM) -> None:
    with pytest.raises(ValueError, match=r"needs 604 positions, more than the 512 .* use window <= 508"):
        method("sinks:window=600").on(lm).__enter__()
    with method("rope:type=yarn,factor=2+sinks:window=600").on(lm) as reader:
        assert reader.lm.trained_length == 1024


@pytest.mark.parametrize("k", [1, 3, 6, 7])
def test_exactly_k_scores_are_kept_also_of_equal_ones(k: int) -> None:
    scores = torch.tensor([[0.0, 2, 2, 2, 1, 2, 2], [1, 1, 1, 1, 1, 1, 1], [6, 5, 4, 3, 2, 1, 0]])
    kept = largest(scores.clone(), k).isfinite()
    assert (kept.sum(-1) == k).all()
    assert kept[1, :k].all()  # the earliest of equal ones
    assert scores[0][kept[0]].sum() == scores[0].topk(k).values.sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_k_takes_the_same_with_and_without_numpy(dtype: torch.dtype) -> None:
    scores = torch.randn(4, 5, 90, generator=torch.Generator().manual_seed(0)).to(dtype)
    kept = largest(scores.clone(), 20).isfinite()
    assert (kept.sum(-1) == 20).all()
    lowest = scores.masked_fill(~kept, torch.inf).amin(-1)
    assert (lowest >= scores.masked_fill(kept, -torch.inf).amax(-1)).all()


@pytest.mark.parametrize("text", ["sinks:window=20,sinks=3", "lambda_mask:window=20", "topk:k=9", "rope:type=dynamic"])
def test_blocks_of_queries_change_nothing_and_bound_the_scores(
    text: str, lm: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = some_ids(1, 130)
    whole = nats_by(text, lm, ids, chunk=1024)
    monkeypatch.setattr(attention, "takes", lambda *_: False)  # the fused kernel holds no scores
    monkeypatch.setitem(attention.SCORES_AT_ONCE, "cpu", 4 * 32 * 130)
    sizes: list[int] = []
    original = attention.Call.scores

    def measured(self: attention.Call, query: Tensor, key: Tensor) -> Tensor:
        scores = original(self, query, key)
        sizes.append(scores.numel())
        return scores

    monkeypatch.setattr(attention.Call, "scores", measured)
    close(nats_by(text, lm, ids, chunk=1024), whole)
    assert max(sizes) <= 4 * 32 * 130
    assert len(sizes) >= 2 * 130 / 32


def test_scores_far_from_the_beginning_are_as_exact_as_near_it(lm: LM) -> None:
    ids = some_ids(1, 60)
    inv_freq = lm.model.model.rotary_emb.inv_freq
    near, far = torch.arange(60), torch.arange(60) + 200_000
    x = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    there = attention.turned(x, torch.zeros(60, 4), attention.angles(far, inv_freq))
    back = attention.turned(there, attention.angles(far, inv_freq), attention.angles(near, inv_freq))
    expected = attention.turned(x, torch.zeros(60, 4), attention.angles(near, inv_freq))
    torch.testing.assert_close(back, expected, rtol=0, atol=2e-6)
    assert len(ids)


# what is refused

REFUSED = {
    "gpt2": "learned positions",
    "opt": "learned positions",
    "glm": "layout",
    "cohere": "layout",
    "gptj": "does not go through",
    "falcon": "does not go through",
    "bloom": "does not go through",
    "gpt_oss": "more than queries, keys and values",
    "llama4": "chunked_attention",
    "falcon_h1": "LinearAttentionAndFullAttentionLayer",
    "mamba2": "LinearAttentionLayer",
}


@pytest.mark.parametrize("architecture", REFUSED)
@pytest.mark.parametrize("text", ["sinks:window=20", "lambda_mask:window=20"])
def test_families_that_would_be_read_wrongly_are_refused_by_name(
    text: str, architecture: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farspan.reader.self_check", lambda lm: None)  # which some of them already fail
    lm = open_lm(architecture, tokenizer)
    before = lm.model.config._attn_implementation
    with pytest.raises(ValueError, match=REFUSED[architecture]) as error, method(text).on(lm):
        pass
    assert type(lm.model).__name__ in str(error.value)
    assert text in str(error.value)
    assert lm.model.config._attn_implementation == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("text", ["topk:k=1000", "sinks:window=20", "knorm:capacity=20", "temperature:original=10"])
def test_learned_weight_on_no_key_is_refused_however_small(text: str, dtype: torch.dtype, tokenizer: Any) -> None:
    """Without it, the hidden states of the probe differ by less than the tolerance of the dtype."""
    model = tiny_model("gpt_oss", attn_implementation="eager").to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.constant_(parameter, -8.0)
    with (
        refused("with GptOssForCausalLM: its attention is more than queries"),
        method(text).on(wrap(model, tokenizer, "")),
    ):
        pass


def test_a_family_with_a_mask_of_its_own_is_refused_by_name(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIGS, "doge", ("Doge", COMMON))
    for text in ("sinks:window=20", "topk:k=5", "knorm:capacity=20"):
        with (
            refused("with DogeForCausalLM: its attention is more than queries, keys and values"),
            method(text).on(open_lm("doge", tokenizer)),
        ):
            pass


@pytest.mark.parametrize("architecture", ["gpt2", "opt", "glm", "cohere"])
def test_top_k_needs_no_rope(architecture: str, tokenizer: Any) -> None:
    lm, ids = open_lm(architecture, tokenizer), some_ids(2, 60)
    close(nats_by("topk:k=60", lm, ids), nats_by("full", lm, ids))
    assert (nats_by("topk:k=5", lm, ids) - nats_by("full", lm, ids)).abs().max() > 0.01


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [("gpt2", "none that can be changed"), ("bloom", "none that"), ("gpt_oss", "scaled already")],
)
def test_rope_is_refused_where_it_cannot_be_changed(architecture: str, reason: str, tokenizer: Any) -> None:
    with (
        pytest.raises(ValueError, match=reason),
        method("rope:type=linear,factor=2").on(open_lm(architecture, tokenizer)),
    ):
        pass


@pytest.mark.parametrize(
    "text",
    ["linear,factor=4", "ntk,factor=4", "yarn,factor=4", "truncated,turns=8", f"factors,factor=4,file={FACTORS}"],
)
def test_rope_is_refused_where_the_model_ignores_its_frequencies(
    text: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PhiMoE computes its frequencies from its config at each forward."""
    monkeypatch.setitem(CONFIGS, "phimoe", ("Phimoe", PHIMOE))
    lm, ids = open_lm("phimoe", tokenizer), some_ids(1, 40)
    before, own = nats_by("full", lm, ids), lm.model.model.rotary_emb.inv_freq
    with refused("and PhimoeForCausalLM does not rotate by those that it is given"), method(f"rope:type={text}").on(lm):
        pass
    assert lm.model.model.rotary_emb.inv_freq is own
    same(nats_by("full", lm, ids), before)
    assert (nats_by("selfextend:group=3,window=14", lm, ids) - before).abs().max() > 0.01


@pytest.mark.parametrize("family", ["Cohere2", "Exaone4", "Flint"])
def test_rope_is_refused_where_only_layers_with_a_window_rotate(
    family: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ["sliding_attention", "full_attention"]
    monkeypatch.setitem(CONFIGS, "near", (family, COMMON | {"sliding_window": 40, "layer_types": kinds}))
    lm = open_lm("near", tokenizer)
    for text in ("yarn,factor=4", "dynamic,original=40"):
        with refused("has RoPE only in layers with a sliding window"), method(f"rope:type={text}").on(lm):
            pass
    kinds[1] = "sliding_attention"
    with method("rope:type=yarn,factor=4").on(open_lm("near", tokenizer)):
        pass


def test_a_scaled_rope_is_set_only_where_the_model_rotates_by_it(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONFIGS, "phimoe", ("Phimoe", PHIMOE))
    for wanted in ({"rope_type": "linear", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}):
        with refused(f"PhimoeForCausalLM cannot rotate by a RoPE of type {wanted['rope_type']}"):
            hf.set_rope(tiny_model("phimoe"), {"rope_theta": 10_000.0} | wanted)
    lm, ids = open_lm("phimoe", tokenizer), some_ids(1, 40)
    before = nats_by("full", lm, ids)
    hf.set_rope(lm.model, {"rope_type": "default", "rope_theta": 80_000.0})  # as by ntk, which it can
    saved(tmp_path, tokenizer, lm.model)
    given = nats_by("full", lm, ids)
    assert (given - before).abs().max() > 0.01
    same(nats_by("full", load(tmp_path), ids), given)


@pytest.mark.parametrize("architecture", ["llama", "cohere", "glm", "gpt_neox", "gemma3", "deepseek_v3"])
def test_frequencies_that_a_rotary_module_uses_are_recognised_in_any_layout(architecture: str) -> None:
    model = tiny_model(architecture)
    kind = hf.full_attention_rope(model)[1]
    (module,) = hf.rotary_modules(model)
    inv_freq = module._buffers["inv_freq" if kind is None else f"{kind}_inv_freq"]
    assert hf.rotation_error(module, (1, 4096), inv_freq, 1.0, kind) < 1e-6
    assert hf.rotation_error(module, (1, 4096), inv_freq, 1.1, kind) > 0.05
    assert hf.rotation_error(module, (1, 4096), inv_freq / 4, 1.0, kind) > 0.05
    assert hf.rotation_error(module, (1, 4096), inv_freq[:-1], 1.0, kind) == math.inf


def test_rope_of_half_precision_frequencies_is_put_right(tokenizer: Any) -> None:
    lm = wrap(tiny_model().to(torch.bfloat16), tokenizer, "bf16")
    rotary = lm.model.model.rotary_emb
    assert rotary.inv_freq.dtype == torch.bfloat16
    with method("rope:type=ntk,factor=2").on(lm):
        assert rotary.inv_freq.dtype == torch.float32
    assert rotary.inv_freq.dtype == torch.bfloat16


def test_a_model_that_chunks_mislead_is_refused_to_methods_that_read_in_chunks(tokenizer: Any) -> None:
    lm = open_lm("llama", tokenizer, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0})
    with pytest.raises(ValueError, match="reads in chunks, which tiny-llama cannot be"), method("topk:k=3").on(lm):
        pass


@pytest.mark.parametrize("text", ["sinks:window=20", "lambda_mask:window=20", "topk:k=9", "rope:type=dynamic"])
def test_bfloat16_differs_by_rounding_alone(text: str, tokenizer: Any) -> None:
    ids = some_ids(4, 200)
    exact = open_lm("llama", tokenizer)
    rounded = wrap(tiny_model().to(torch.bfloat16), tokenizer, "bf16")
    rounded.model.model.rotary_emb._buffers["inv_freq"] = exact.model.model.rotary_emb.inv_freq
    apart = (nats_by(text, rounded, ids, 64) - nats_by(text, exact, ids, 64)).abs().mean()
    of_full = (nats_by("full", rounded, ids, 64) - nats_by("full", exact, ids, 64)).abs().mean()
    assert apart < 2 * of_full + (0.1 if "topk" in text else 0.02)  # of nearly equal scores another may be kept


def test_two_methods_cannot_take_one_models_attention(lm: LM) -> None:
    with method("topk:k=3").on(lm), pytest.raises(ValueError, match="another method"), method("sinks:window=9").on(lm):
        pass
    with method("topk:k=3").on(lm):
        pass


def test_a_model_called_by_itself_is_refused_what_cannot_be_told_apart(tokenizer: Any) -> None:
    lm, ids = open_lm("mistral", tokenizer), some_ids(1, 60)
    ones = torch.ones(1, 1, 60, 60, dtype=torch.bool).tril()
    cache = transformers.DynamicCache(config=lm.model.config)  # with the model's own window
    with method("sinks:window=20").on(lm), torch.no_grad():
        with pytest.raises(ValueError, match="mask of its own"):
            lm.model(input_ids=ids, attention_mask=ones)
        with pytest.raises(ValueError, match="gaps"):
            lm.model(input_ids=ids, position_ids=torch.arange(60)[None] * 2)
        lm.model(input_ids=ids, past_key_values=cache)
        with pytest.raises(ValueError, match="holds all tokens and no empty slots"):
            lm.model(input_ids=ids[:, :1], past_key_values=cache)


# as text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sinkz:window=5", r"unknown; known are full, .* \(did you mean 'sinks'\?\)"),
        ("StreamingLLM", "unknown; for example write sinks$"),
        ("full+lm-infinite:window=5", "unknown; for example write lambda_mask$"),
        ("sinks:windw=5", r"no setting 'windw' \(did you mean 'window'\?\); it has window, sinks, stride"),
        ("topk", "needs k: write topk:k="),
        ("sinks:window", "'window' of method 'sinks' has no value: write window=VALUE"),
        ("sinks:window=5,window=6", "given twice"),
        ("sinks:window=many", "must be a whole number, not 'many'"),
        ("sinks:window=0", "sinks: window: got 0, expected at least 1"),
        ("sinks:window=4,sinks=-1", "sinks: sinks: got -1, expected at least 0"),
        ("lambda_mask:window=0", "lambda_mask: window: got 0, expected at least 1"),
        ("topk:k=0", "topk: k: got 0, expected at least 1"),
        ("rope:type=yran", r"unknown; known are linear, ntk, .*, factors \(did you mean 'yarn'\?\)"),
        ("rope:type=yarn,factor=0.5", "factor: got 0.5, expected 1 to 1,000,000"),
        ("rope:type=yarn,factor=x", "must be a number"),
        ("rope:type=yarn,original=0", "original: got 0, expected 1 to 2,147,483,647"),
        ("rope:factor=4", "'rope' needs type: write rope:type=..., one of linear, ntk, dynamic, yarn, truncated"),
        ("rope:type=yarn", "rope:type=yarn needs a factor, .* rope:type=yarn,factor=4 for texts 4 times as long"),
        ("rope:type=linear", "rope:type=linear needs a factor"),
        ("rope:type=ntk,original=64", "rope:type=ntk needs a factor"),
        ("rope:type=linear,factor=0", "factor: got .*, expected 1 to 1,000,000"),
        ("rope:type=yarn,factor=1e307", "factor: got .*, expected 1 to 1,000,000"),
        ("rope:type=ntk,factor=nan", "factor: got .*, expected 1 to 1,000,000"),
        ("replug:weights=bm52", r"unknown; .* \(did you mean 'bm25'\?\)"),
        ("replug:piece=0", "piece: got 0, expected at least 1"),
        ("replug:encoder=a/b", "encoder=a/b has no effect on replug weights=uniform: use weights=dense"),
        ("replug:weights=bm25,encoder=a/b", "encoder=a/b has no effect on replug weights=bm25"),
        ("sinks:window=5+topk:k=3", "both change how attention works"),
        ("rope:type=ntk,factor=2+rope:type=yarn,factor=2", "both change how RoPE works"),
        ("replug+replug", "both change how passages works"),
        ("snapkv:capacity=5,window=5", "a capacity larger than the window"),
        ("snapkv:capacity=50,kernel=4", "kernel must be odd"),
        ("snapkv:capacity=50,pool=maks", r"unknown; known are max, mean \(did you mean 'max'\?\)"),
        ("snapkv:capacity=50+topk:k=3", "both change how attention works"),
        ("full+topk:k=3", "cannot be composed with other"),
        ("rope:type=dynamic+sinks:window=5", "both change how attention works"),
        ("full:window=3", "has no settings"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        method(text)


@pytest.mark.parametrize("spelling", [one for one in SPELLINGS.values() if "FACTORS.json" not in one])
def test_what_a_name_of_the_literature_leads_to_is_a_method(spelling: str) -> None:
    assert str(method(spelling)).startswith(spelling)


def test_a_composition_is_written_from_the_inside_out() -> None:
    text = "rope:type=yarn,factor=4+sinks:window=2045,sinks=4"
    assert str(method(text)) == text
    assert method("sinks:window=2045+rope:factor=4,type=yarn") == method(text)
    assert str(method("sinks:window=2_045,stride=8")) == "sinks:window=2045,sinks=4,stride=8"


def test_the_lambda_mask_reaches_no_further_than_the_model_was_trained_for(lm: LM) -> None:
    with pytest.raises(ValueError, match=r"use window <= 512"), method("lambda_mask:window=513").on(lm):
        pass
    with pytest.raises(ValueError, match=r"use window <= 4"), method("sinks:window=9,stride=505").on(lm):
        pass


# RePlug


def by_hand(model: Any, passages: list[Tensor], ids: Tensor, weights: Tensor) -> Tensor:
    """log p of the tokens after each of ids [1, time], mixed over one plain forward per passage."""
    with torch.no_grad():
        each = [model(input_ids=torch.cat([p, ids], 1)).logits[0, -ids.shape[1] :].softmax(-1) for p in passages]
    return sum(w * p for w, p in zip(weights.tolist(), each, strict=True)).log()


def test_replug_mixes_one_plain_forward_per_passage(lm: LM) -> None:
    passages, ids = [some_ids(1, n, n) for n in (5, 17, 30)], some_ids(1, 20)
    weights = torch.tensor([1.0, 4.0, 5.0])
    expected = by_hand(lm.model, passages, ids, weights / 10)
    with method("replug").on(lm) as reader:
        reader.chunk = 6
        memory = reader.read(*passages, weights=weights)
        assert memory.num_seen == memory.num_kept == 52
        scores = memory.score(ids)
        close(scores.nats[0, 1:], -expected[:-1].gather(-1, ids[0, 1:, None])[:, 0])
        assert torch.equal(scores.rank[0, 1:], (expected[:-1] > expected[:-1].gather(-1, ids[0, 1:, None])).sum(-1))
        memory.read(ids)
        assert memory.generate(ids[:, :0], 1)[0] == expected[-1].argmax()


def test_replug_sets_the_head_before_every_passage(lm: LM) -> None:
    head, passages, ids = some_ids(1, 2, 9), [some_ids(1, 8, 1), some_ids(1, 8, 2)], some_ids(1, 12)
    expected = by_hand(lm.model, [torch.cat([head, p], 1) for p in passages], ids, torch.tensor([0.5, 0.5]))
    with method("replug").on(lm) as reader:
        memory = reader.read(*passages, head=head)
        assert memory.num_seen == 18
        close(memory.score(ids).nats[0, 1:], -expected[:-1].gather(-1, ids[0, 1:, None])[:, 0])


def test_a_long_document_is_cut_from_its_end_and_its_tail_stands_behind_every_piece(lm: LM) -> None:
    text = some_ids(1, 75)
    pieces = [text[:, :5], text[:, 5:25], text[:, 25:45]]
    expected = by_hand(lm.model, pieces, text[:, 45:], torch.full((3,), 1 / 3))
    with method("replug:piece=20,tail=15").on(lm) as reader:
        scores = reader.read(text[:, :60]).score(text[:, 60:])
    close(scores.nats[0], -expected[14:-1].gather(-1, text[0, 60:, None])[:, 0])


def test_replug_equals_the_reference(shared_data: Any) -> None:
    tensors = load_file(shared_data / "reference" / "cepe_reference.safetensors")
    config = json.loads((shared_data / "reference" / "cepe_reference.json").read_text())["decoder"]
    prefix = "replug.sd."
    weights = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    config |= {"num_hidden_layers": 2, "rms_norm_eps": 1e-6}  # not those of the model beside it
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
    model.load_state_dict(weights)
    lm = wrap(model, _Tokenizer(), "reference")
    ids, labels = tensors["replug.ids"], tensors["replug.labels"]
    start = int((labels[0, 0] != -100).nonzero()[0])
    passages = [ids[:, c, :start] for c in range(ids.shape[1])]
    with method("replug").on(lm) as reader:
        memory = reader.read(*passages, weights=tensors["replug.scores"].softmax(-1))
        nats = memory.score(ids[:, 0, start:]).nats
    # theirs are log-probabilities of the mixture, three times each, at the positions before
    theirs = tensors["replug.logits"][::3, start - 1 : -1].gather(-1, ids[:, 0, start:, None])
    torch.testing.assert_close(nats, -theirs[..., 0], rtol=0, atol=5e-6)
    torch.testing.assert_close(nats.mean(), tensors["replug.loss"][0], rtol=0, atol=5e-6)


class _Tokenizer(SimpleNamespace):
    """Enough of one for models that come without."""

    bos_token_id = 1

    def __len__(self) -> int:
        return 3

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) % 97 for character in text]}

    def get_vocab(self) -> dict[str, int]:
        return {}


def test_bm25_prefers_the_passage_with_the_querys_words() -> None:
    passages = ["the whale dives deep", "a garden with roses", "the whale and the white whale"]
    scores = retrieval.bm25("white whale", passages)
    assert scores[2] > scores[0] > scores[1] == 0
    assert retrieval.bm25("", passages) == [0.0, 0.0, 0.0]


def test_weights_by_words_follow_the_256_tokens_behind_the_passages(
    lm: LM, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, list[str]]] = []

    def bm25(query: str, passages: list[str]) -> list[float]:
        seen.append((query, list(passages)))
        return [float(i) for i in range(len(passages))]

    monkeypatch.setattr(retrieval, "bm25", bm25)
    passages, ids, later = [some_ids(1, 9, 1), some_ids(1, 9, 2)], some_ids(1, 300), some_ids(1, 12, 5)
    expected = by_hand(lm.model, passages, torch.cat([ids, later], 1), torch.tensor([0.0, 1.0]).softmax(-1))
    with method("replug:weights=bm25").on(lm) as reader:
        memory = reader.read(*passages)
        with pytest.raises(ValueError, match=r"here no text follows: got \d passages without a tail"):
            memory.score(later)
        memory.read(ids[:, :100])
        memory.read(ids[:, 100:])
        close(memory.score(later).nats[0], -expected[299:-1].gather(-1, later[0, :, None])[:, 0])
    assert len(seen) == 1
    query, texts = seen[0]
    assert query == tokenizer.decode(ids[0, :256].tolist())
    assert texts == [tokenizer.decode(p[0].tolist()) for p in passages]


def test_weights_by_vectors_are_inner_products(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = {"query": [1.0, 2.0], "a": [3.0, 0.0], "b": [0.0, 2.0]}

    def encode(texts: list[str], show_progress_bar: bool) -> list[list[float]]:
        return [vectors[text] for text in texts]

    encoder = SimpleNamespace(encode_query=encode, encode_document=encode)
    monkeypatch.setattr(encoders, "encoder_named", lambda name: encoder)
    assert retrieval.dense("query", ["a", "b"], "some/encoder") == [3.0, 4.0]


def test_an_encoder_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="encoder '/no/such/folder' is neither"):
        retrieval.dense("query", ["a"], "/no/such/folder")


@pytest.mark.parametrize(
    ("weights", "reason"), [([1.0], "do not fit 1 rows of 2"), ([1.0, -1.0], "do not fit"), ([0.0, 0.0], "all zero")]
)
def test_weights_that_mean_nothing_are_refused(weights: list[float], reason: str, lm: LM) -> None:
    with method("replug").on(lm) as reader, pytest.raises(ValueError, match=reason):
        reader.read(some_ids(1, 4), some_ids(1, 5), weights=torch.tensor(weights))


def test_an_empty_replug_memory_is_that_of_one_pass(lm: LM) -> None:
    ids = some_ids(2, 30)
    with method("replug").on(lm) as reader:
        memory = reader.read()
        memory.read(ids[:, :10])
        close(memory.score(ids[:, 10:]).nats, nats_by("full", lm, ids)[:, 9:])


# SnapKV

KV = {"capacity": 17, "window": 5}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_snapkv_is_the_keys_chosen_one_by_one_from_whole_attention_matrices(architecture: str, tokenizer: Any) -> None:
    lm, ids, read = open_lm(architecture, tokenizer, attn_implementation="eager"), some_ids(2, 60), 50
    for kernel, pool in ((3, "max"), (5, "mean")):
        each = [snapkv(lm.model, row[None], read, **KV, kernel=kernel, pool=pool) for row in ids]
        expected = torch.stack([nats_of(logits, row[read - 1 :]) for (logits, _), row in zip(each, ids, strict=True)])
        with method(f"snapkv:capacity=17,window=5,kernel={kernel},pool={pool}").on(lm) as reader:
            for chunk in (1024, 9):
                reader.chunk = chunk
                memory = reader.read(ids[:, :read])
                close(memory.score(ids[:, read:]).nats, expected)
                for layer, kept in memory.stream.reading.positions.items():
                    assert kept.tolist() == [chosen[layer] for _, chosen in each]
        assert memory.num_kept <= 39  # a window of the layer's own holds at most as many


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_reading_after_a_question_gives_what_reading_at_once_gives(architecture: str, tokenizer: Any) -> None:
    lm, ids = open_lm(architecture, tokenizer), some_ids(2, 80)
    with method("snapkv:capacity=17,window=5").on(lm) as reader:
        reader.chunk = 16
        memory = reader.read(ids[:, :30])
        assert memory.num_kept == 30
        first = memory.score(ids[:, 30:40]).nats
        assert memory.num_kept == 17
        assert torch.equal(memory.score(ids[:, 30:40]).nats, first)  # a question changes no later one
        memory.read(ids[:, 30:60])
        assert memory.num_seen == 60
        at_once = reader.read(ids[:, :60])
        assert torch.equal(memory.score(ids[:, 60:]).nats, at_once.score(ids[:, 60:]).nats)
        assert memory.num_kept == at_once.num_kept


def test_an_evicted_memory_holds_the_chosen_keys_and_the_text_alone(lm: LM) -> None:
    ids = some_ids(2, 400)
    with method("snapkv:capacity=20,window=5").on(lm) as reader:
        memory = reader.read(ids)
        assert memory.num_bytes > 400 * 2 * lm.key_bytes_per_token
        memory.score(ids[:, :1])
        positions = 2 * 2 * 2 * 20 * 4  # rows, layers, heads
        assert memory.num_bytes == 20 * 2 * lm.key_bytes_per_token + positions + 2 * 400 * 4


def test_a_choice_that_fails_leaves_a_memory_that_refuses_to_be_used(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    with method("snapkv:capacity=20,window=5").on(lm) as reader:
        memory = reader.read(some_ids(1, 40))
        monkeypatch.setattr(attention.Call, "scores", fails)
        with pytest.raises(torch.OutOfMemoryError):
            memory.score(some_ids(1, 3))
        monkeypatch.undo()
        with pytest.raises(ValueError, match="failed halfway"):
            memory.score(some_ids(1, 3))


def test_snapkv_within_rope_and_passages_evicts_each_pass(lm: LM) -> None:
    ids = some_ids(1, 60)
    with method("rope:type=ntk,factor=2+snapkv:capacity=8,window=3+replug:piece=20").on(lm) as reader:
        memory = reader.read(ids)
        memory.score(ids[:, :5])
        assert memory.num_kept == 3 * 8
