"""What is trained: exactly queries and keys, whatever matrix they are in, and nothing that stands still moves."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_smt_objective import batch
from torch import Tensor

from farspan.train.objective import terms
from farspan.train.optimizer import OptimizerSettings, build
from farspan.train.trained import NORMS, TrainedSettings, choose, plain
from farspan.train.trainer import save_whole

from tiny import refused, tiny_config, tiny_model

SEPARATE = ["llama", "qwen2", "qwen3", "gemma3", "hunyuan", "olmo2", "opt", "phi", "stablelm"]
NORMALISED = ["qwen3", "gemma3", "hunyuan", "olmo2"]
FUSED = {"gpt_neox": "query_key_value", "phi3": "qkv_proj", "gpt2": "c_attn"}


def steps(model: Any, count: int = 3) -> None:
    optimizer, _ = build(
        model, OptimizerSettings(lr=1e-2, weight_decay=0.1, warmup_steps=0, decay_fraction=0), num_steps=count
    )
    for _ in range(count):
        optimizer.zero_grad()
        sum(terms(model, model, batch()).values()).backward()
        optimizer.step()


def weights(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def attended(model: Any) -> Tensor:
    model.set_attn_implementation("eager")
    ids = torch.arange(1, 20)[None]
    return model(ids, output_attentions=True).attentions[0]


def test_llama_2_7b_trains_the_sixth_that_the_paper_says() -> None:
    # the paper rounds to 13 %
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=32_000,
                hidden_size=4096,
                intermediate_size=11_008,
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=32,
            )
        )
    _, count = choose(model, TrainedSettings())
    assert str(count) == "1,073,741,824 of 6,738,415,616 parameters are trained (15.93%)"


@pytest.mark.parametrize("family", [*SEPARATE, *FUSED])
def test_queries_and_keys_alone_move(family: str) -> None:
    model = tiny_model(family)
    before = weights(model)
    attention = attended(model)
    choose(model, TrainedSettings())
    torch.testing.assert_close(attended(model), attention, rtol=0, atol=0)
    steps(model)
    after = weights(plain(model))
    assert after.keys() == before.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    leaves = {name.split(".")[-2] for name in moved}
    assert leaves <= {"q_proj", "k_proj", *NORMS, FUSED.get(family)}
    assert (leaves & set(NORMS) != set()) == (family in NORMALISED)
    layers = 2
    for leaf in leaves:
        assert len([name for name in moved if name.endswith(f"{leaf}.weight")]) == layers


@pytest.mark.parametrize("family", FUSED)
def test_of_a_matrix_of_three_the_values_keep_their_bits(family: str) -> None:
    model = tiny_model(family)
    before = weights(model)
    choose(model, TrainedSettings())
    steps(model)
    after = weights(plain(model))
    for name in before:
        if FUSED[family] not in name:
            continue
        old, new = (part[name].T if family == "gpt2" and "weight" in name else part[name] for part in (before, after))
        same = (old == new).reshape(len(old), -1).all(1)
        assert same.tolist() == [not trained for trained in trained_rows(family, len(old))]


def trained_rows(family: str, size: int) -> list[bool]:
    if family == "gpt_neox":  # 4 heads of 8: queries, keys, values
        return ([True] * 16 + [False] * 8) * 4
    values = 16 if family == "phi3" else 32  # phi3: 2 heads of 8
    return [True] * (size - values) + [False] * values


@pytest.mark.parametrize("family", FUSED)
def test_the_rows_that_stand_still_are_those_that_attention_does_not_see(family: str) -> None:
    model = tiny_model(family)
    attention = attended(model)
    choose(model, TrainedSettings())
    first = next(m for name, m in model.named_modules() if name.endswith(FUSED[family]))
    with torch.no_grad():
        first.parametrizations.weight.original1.add_(0.5)
    torch.testing.assert_close(attended(model), attention, rtol=0, atol=1e-7)
    with torch.no_grad():
        first.parametrizations.weight.original0.mul_(2)
    assert (attended(model) - attention).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama", *FUSED])
def test_a_trained_model_opens_in_plain_transformers(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    choose(model, TrainedSettings())
    steps(model, 1)
    ids = torch.arange(1, 20)[None]
    expected = model(ids).logits
    plain(model).save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == tiny_model(family).state_dict().keys()
    torch.testing.assert_close(loaded(ids).logits, expected, rtol=0, atol=1e-6)


def test_weights_that_transformers_keeps_in_float32_are_not_rounded_when_a_model_is_saved(tmp_path: Path) -> None:
    model = tiny_model("deepseek_v3", first_k_dense_replace=0)
    kept = {name: value for name, value in model.state_dict().items() if name.endswith("e_score_correction_bias")}
    for value in kept.values():
        value.normal_()
    kept = {name: value.clone() for name, value in kept.items()}
    save_whole(model, torch.bfloat16, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert {name for name, value in found.items() if value.dtype != torch.bfloat16} == set(kept) != set()
    for name, value in kept.items():
        assert torch.equal(found[name], value)


def test_muon_has_no_need_of_other_parameters_than_matrices() -> None:
    model, _ = choose(tiny_model(), TrainedSettings())
    optimizer, _ = build(model, OptimizerSettings(name="muon", warmup_steps=0), 2)
    assert len(optimizer.param_groups) == 1


def test_norms_of_queries_and_keys_can_stand_still() -> None:
    model = tiny_model("qwen3")
    choose(model, TrainedSettings(norms=False))
    assert {name.split(".")[-2] for name, p in model.named_parameters() if p.requires_grad} == {"q_proj", "k_proj"}


@pytest.mark.parametrize("family", ["llama", "opt"])  # keys shared by heads; biases
def test_single_heads_can_be_trained(family: str) -> None:
    model = tiny_model(family)
    before, config = weights(model), model.config
    keys = getattr(config, "num_key_value_heads", config.num_attention_heads)
    last = config.num_attention_heads - 1
    choose(model, TrainedSettings(heads=(f"1.{last}",)))
    steps(model)
    after = weights(plain(model))
    for name, value in before.items():
        moved = (after[name] != value).reshape(len(value), -1).any(1)
        heads = {"q_proj": config.num_attention_heads, "k_proj": keys}.get(name.split(".")[-2], 0)
        if not heads or "layers.1." not in name:
            assert not moved.any(), name
            continue
        size = len(value) // heads
        assert not moved[:-size].any(), name
        assert moved[-size:].any() or name.endswith("k_proj.bias")  # that adds the same to all scores of a query


def test_everything_can_be_trained() -> None:
    model = tiny_model()
    _, count = choose(model, TrainedSettings(what="all"))
    assert count.trained == count.total == sum(p.numel() for p in model.parameters())


def test_parameters_can_be_named() -> None:
    model = tiny_model()
    choose(model, TrainedSettings(what="patterns", patterns=("*.v_proj.weight", "model.norm.*")))
    named = {name for name, p in model.named_parameters() if p.requires_grad}
    assert named == {*(f"model.layers.{i}.self_attn.v_proj.weight" for i in range(2)), "model.norm.weight"}


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (
            "llama",
            {"what": "patterns", "patterns": ("*.query.*",)},
            r"'\*\.query\.\*' matches no parameter; names are, for example,",
        ),
        ("llama", {"what": "patterns"}, "trained.patterns is empty"),
        ("llama", {"heads": ()}, "trained.heads is empty: leave it out to train all .*, or give LAYER.HEAD"),
        ("llama", {"heads": ("0.9",)}, r"the model has no head '0.9'; expected LAYER.HEAD, from 0.0 to 1\.\d"),
        ("llama", {"heads": ("3",)}, "the model has no head '3'"),
        ("gpt2", {"heads": ("0.0",)}, "trained.heads needs projections q_proj and k_proj, and GPT2LMHeadModel"),
        ("falcon", {}, "in one matrix of falcon is unknown"),
        (
            "jamba",
            {},
            "queries and keys of JambaForCausalLM are not found as q_proj and k_proj in each of its 2 layers",
        ),
    ],
)
def test_what_cannot_be_found_is_refused(family: str, settings: dict[str, Any], message: str) -> None:
    with refused(message):
        choose(tiny_model(family), TrainedSettings(**settings))


def test_latent_attention_has_no_keys_to_be_told_apart() -> None:
    config = transformers.DeepseekV3Config(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
        first_k_dense_replace=1, pad_token_id=0,
    )  # fmt: skip
    with pytest.raises(ValueError, match="name the parameters to train"):
        choose(transformers.DeepseekV3ForCausalLM(config), TrainedSettings())


def test_lora_is_added_to_the_weights_it_stands_beside() -> None:
    pytest.importorskip("peft")
    model = tiny_model()
    before = weights(model)
    wrapped, count = choose(model, TrainedSettings(what="lora", rank=2))
    assert count.trained == 2 * 2 * (2 * 32 + 32 + 16)
    optimizer, _ = build(wrapped, OptimizerSettings(lr=1e-2, warmup_steps=0, decay_fraction=0), 2)
    for _ in range(2):
        optimizer.zero_grad()
        sum(terms(wrapped, model, batch()).values()).backward()
        optimizer.step()
    ids = torch.arange(1, 20)[None]
    expected = wrapped(ids).logits
    merged = plain(wrapped)
    torch.testing.assert_close(merged(ids).logits, expected, rtol=0, atol=1e-4)
    moved = {name.split(".")[-2] for name, value in weights(merged).items() if not torch.equal(value, before[name])}
    assert moved == {"q_proj", "k_proj"}


def test_lora_is_not_added_to_a_weight_of_two_modules() -> None:
    pytest.importorskip("peft")
    how = TrainedSettings(what="lora", rank=2, modules=("q_proj", "lm_head"))
    with pytest.raises(ValueError, match=r"trained\.modules: lm_head uses the same weight as another module"):
        choose(tiny_model(tie_word_embeddings=True), how)
    choose(tiny_model(tie_word_embeddings=False), how)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (
            ("q_proj", "kproj"),
            r"'kproj' is not the name of a module with a weight; names in LlamaForCausalLM are d",
        ),
        (("self_attn",), r"'self_attn' is not the name of a module with a weight; .*, q_proj, up_proj, v_proj$"),
        ((), "got no names; names in LlamaForCausalLM are down_proj"),
    ],
)
def test_a_module_for_lora_that_the_model_does_not_have_is_refused(modules: tuple[str, ...], message: str) -> None:
    pytest.importorskip("peft")
    with refused(rf"trained\.modules: {message}"):
        choose(tiny_model(), TrainedSettings(what="lora", modules=modules))
    choose(tiny_model(), TrainedSettings(what="lora", modules=("0.self_attn.q_proj", "k_proj")))


def test_lora_without_peft_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ValueError, match=r"this needs the package peft: pip install 'farspan\[lora\]'"):
        choose(tiny_model(), TrainedSettings(what="lora"))


def test_the_tiny_layouts_are_those_of_the_families() -> None:
    assert tiny_config("gpt_neox").hidden_size // tiny_config("gpt_neox").num_attention_heads == 8
    assert tiny_config("phi3").num_key_value_heads == 2
