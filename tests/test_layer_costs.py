"""The cost of attention from a config alone, against torch's count of operations and the bytes of a real cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers.distributed import DistributedConfig
from typer.testing import CliRunner

from farspan import hf
from farspan.cli import app
from farspan.hf.parallel import check_divides
from farspan.lm import wrap
from farspan.reader import DenseReader

from tiny import COMMON, CONFIGS, DIFFLLAMA, EXPERTS, MLA, PLAIN, VOCABULARY, saved, some_ids, tiny_config, tiny_model

DENSE = {"first_k_dense_replace": 2}
INDEXER = {"index_n_heads": 3, "index_head_dim": 8, "index_topk": 256}
LONGCAT = {"expert_ffn_hidden_size": 16, "moe_topk": 2, "zero_expert_num": 1, "n_routed_experts": 4, "num_layers": 1}
LATENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("DeepseekV2", MLA | EXPERTS | DENSE),
    "deepseek_v3": ("DeepseekV3", MLA | EXPERTS | DENSE),
    "glm4_moe_lite": ("Glm4MoeLite", MLA | EXPERTS | DENSE),
    "minicpm3": ("MiniCPM3", MLA),
    "axk1": ("AXK1", MLA | EXPERTS | DENSE),
    "youtu": ("Youtu", MLA),
    "longcat_flash": ("LongcatFlash", MLA | LONGCAT),
    "bailing_hybrid": ("BailingHybrid", MLA | {"layer_types": ["linear_attention", "full_attention"]}),
    "deepseek_v32": ("DeepseekV32", MLA | EXPERTS | DENSE | INDEXER),
    "glm_moe_dsa": ("GlmMoeDsa", MLA | EXPERTS | DENSE | INDEXER),
    "axk2": ("AXK2", MLA | EXPERTS | DENSE | INDEXER),
    "hy_v4": ("HYV4", MLA | EXPERTS | DENSE | INDEXER | {"indexer_types": ["full", "shared"]}),
}
SHARED: dict[str, Any] = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
SHARED |= {"layer_types": ["sliding_attention", "full_attention"] * 2}


def model_of(family: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, config in (LATENTS | OTHERS).items():
        monkeypatch.setitem(CONFIGS, name, config)
    model = tiny_model(family, attn_implementation="eager", **changes)  # of which torch counts every product
    return model.requires_grad_(False)


def counted(model: Any, length: int) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=some_ids(1, length), use_cache=False)
    return int(counter.get_total_flops())


JETMOE = PLAIN | {"num_key_value_heads": 2, "kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
GEMMA = {"sliding_window": 512}
FAMILIES = [("llama", {}), ("jetmoe", {}), ("gemma4", GEMMA), ("gemma4", SHARED | GEMMA), ("falcon", {}), ("mimo", {})]
FAMILIES += [(name, {}) for name in ("diffllama", "hrm_text", "inkling", "laguna", "minimax_m3")]
MIXED = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 512}
MIMO = COMMON | EXPERTS | MIXED | {"head_dim": 8, "v_head_dim": 6, "mlp_layer_types": ["dense"] * 2}
MINIMAX = COMMON | {"head_dim": 32, "rotary_dim": 32, "layer_types": ["full_attention", "minimax_m3_sparse"]}
MINIMAX |= {"index_n_heads": 2, "index_head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
INKLING = COMMON | EXPERTS | {"head_dim": 8, "swa_head_dim": 12, "swa_num_attention_heads": 2, "d_rel": 2}
INKLING |= {"swa_num_key_value_heads": 1, "sliding_window_size": 512, "layer_types": ["hybrid", "hybrid_sliding"]}
LAGUNA = COMMON | {"head_dim": 8, "num_attention_heads_per_layer": [4, 8], "num_experts": 4, "num_experts_per_tok": 2}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
SEEING = {"text_config": CONFIGS["gemma3"][1], "vision_config": VISION, "mm_tokens_per_image": 4}
NEMOTRON = COMMON | EXPERTS | {"layer_types": ["mlp", "full_attention", "linear_attention", "moe"], "head_dim": 8}
NEMOTRON |= {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1}
GEMMA_MOE = {"enable_moe_block": True, "num_experts": 16, "top_k_experts": 2, "moe_intermediate_size": 32}
DBRX: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 512}
DBRX |= {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}}
DBRX |= {"ffn_config": {"hidden_size": 32, "ffn_hidden_size": 32, "moe_num_experts": 16, "moe_top_k": 2}}
ZAMBA = {"num_hidden_layers": 4, "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_ngroups": 1}
DEEPSEEK_V4 = COMMON | {"head_dim": 16, "num_key_value_heads": 1, "q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2}
DEEPSEEK_V4 |= {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 3}
DEEPSEEK_V4 |= {"index_n_heads": 3, "index_head_dim": 8, "index_topk": 256, "sliding_window": 512, "hc_mult": 2}
DEEPSEEK_V4 |= {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}}
DEEPSEEK_V4 |= {"layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"]}
FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "jetmoe": ("JetMoe", JETMOE), "mimo": ("MiMoV2Flash", MIMO), "nemotron_h": ("NemotronH", NEMOTRON),
    "gemma4_moe": ("Gemma4Text", CONFIGS["gemma4"][1] | GEMMA | GEMMA_MOE),
    "aria": ("AriaText", COMMON | {"moe_num_experts": 16, "moe_topk": 2, "head_dim": 8}),
    "dbrx": ("Dbrx", DBRX),
    "zamba2": ("Zamba2", PLAIN | {"num_mem_blocks": 1, "layers_block_type": ["mamba", "hybrid"] * 2} | ZAMBA),
    "diffllama": DIFFLLAMA, "hrm_text": ("HrmText", PLAIN | {"head_dim": 8}), "inkling": ("InklingText", INKLING),
    "laguna": ("Laguna", LAGUNA), "minimax_m3": ("MiniMaxM3VLText", MINIMAX), "gemma3_vision": ("Gemma3", SEEING),
    "deepseek_v4": ("DeepseekV4", DEEPSEEK_V4),
    "hunyuan_moe": ("HunYuanMoEV1", COMMON | {"num_experts": 16, "moe_topk": [2, 2], "head_dim": 8}),
}  # fmt: skip


@pytest.mark.parametrize(("family", "changes"), [*FAMILIES, *((name, {}) for name in (*LATENTS, "deepseek_v4"))])
def test_operations_per_pair_are_those_that_torch_counts(
    family: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(family, changes, monkeypatch)
    per_pair = (counted(model, 256) - 2 * counted(model, 128)) / (256**2 - 2 * 128**2)  # the share that is quadratic
    assert sum(hf.flops(model)[1].values()) == pytest.approx(per_pair, rel=5e-3)


@pytest.mark.parametrize(
    ("family", "changes"), [*FAMILIES, ("falcon", FALCON), ("nemotron_h", {}), *((name, {}) for name in LATENTS)]
)
def test_bytes_of_keys_are_those_that_the_cache_holds(
    family: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, held = model_of(family, changes, monkeypatch), []
    for length in (20, 40):
        stream = hf.Stream(model, length)
        with torch.no_grad():
            stream.step(some_ids(1, length))
        held.append(stream.num_bytes)
    assert sum(hf.key_bytes_by_window(model).values()) == (held[1] - held[0]) / 20  # without states of a fixed size


def test_compressed_keys_count_once_for_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model, held = model_of("deepseek_v4", {}, monkeypatch), []
    for chunks in (4, 8):  # of the tokens of one compressed key, so that nothing waits for more of them
        stream = hf.Stream(model, 16 * chunks)
        with torch.no_grad():
            for chunk in some_ids(1, 16 * chunks).split(16, dim=1):
                stream.step(chunk)
        held.append(stream.num_bytes)
    assert sum(hf.key_bytes_by_window(model).values()) == (held[1] - held[0]) / 64


EXACT = ["llama", "jetmoe", "gemma4_moe", "aria", "dbrx", "hunyuan_moe", "llama4", "hrm_text", "gemma3_vision"]


@pytest.mark.parametrize("family", EXACT)
def test_operations_per_token_are_those_that_torch_counts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(family, {"experts_implementation": "eager"}, monkeypatch)
    per_token = (4 * counted(model, 128) - counted(model, 256)) / 256  # the share that is linear
    body, _, head = hf.flops(model)
    assert body + head == pytest.approx(per_token, rel=0.02)  # norms and routers are not exact


def test_experts_without_weights_lower_the_share_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[dict[str, Any]] = [{"zero_expert_num": idle, "expert_ffn_hidden_size": 64} for idle in (0, 4)]
    none, half = (model_of("longcat_flash", change, monkeypatch) for change in changes)
    weights = sum(p.numel() for name, p in none.named_parameters() if ".experts." in name)  # of 4, 2 are used
    fewer = hf.flops(none)[0] - hf.flops(half)[0]
    assert fewer == pytest.approx(2 * weights * (2 / 4 - 2 / 8), rel=0.05)  # the router is larger


def test_weights_that_layers_share_count_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = model_of("zamba2", {}, monkeypatch)
    every = sum(p.numel() for layer in layers.model.layers for p in layer.parameters())
    assert hf.flops(layers)[0] == pytest.approx(2 * every, rel=0.01)


def test_layers_of_several_shapes_each_have_their_own_cost() -> None:
    model = tiny_model("gemma4")  # 4 heads: two layers of 2 key heads of 8, one of 1 key head of 16
    assert hf.heads_of(model.config) == (4, 8)
    assert hf.key_bytes_by_window(model) == {40: 2 * 2 * 2 * 8 * 4, None: 2 * 16 * 4}
    assert hf.flops(model)[1] == {40: 2 * 4 * 4 * 8, None: 4 * 4 * 16}


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "gemma4", "gpt_oss"])
def test_layers_with_a_window_hold_no_more_keys_than_it(family: str, tokenizer: Any) -> None:
    lm = wrap(tiny_model(family), tokenizer, family)  # windows of 40 tokens
    for num_tokens in (40, 200):
        memory = DenseReader(lm, chunk=20).read(some_ids(1, num_tokens))
        assert lm.key_bytes(num_tokens, 20) == pytest.approx(memory.num_bytes, rel=0.26)  # spare room for later keys


@pytest.mark.parametrize("options", [(), ("--plan",)], ids=["measured", "planned"])
def test_gemma_4_is_measured_and_planned(options: tuple[str, ...], tokenizer: Any, tmp_path: Path) -> None:
    saved(tmp_path / "gemma4", tokenizer, tiny_model("gemma4"))
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 40)
    arguments = ["curve", str(tmp_path / "gemma4"), "--lengths", "16,32", "--text", str(text), "--repeats", "2"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "run"), *options])
    assert done.exit_code == 0, done.output


def test_a_model_whose_global_layers_have_fewer_key_heads_is_not_divided_by_more() -> None:
    with pytest.raises(ValueError, match="4 heads and 1 key-value heads, which 2 devices cannot divide evenly"):
        check_divides(tiny_config("gemma4"), DistributedConfig(tp_size=2), "mine")
