"""CEPE models are written and read in the authors' layout; adapters hold what was added, and refuse another base."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, PreTrainedTokenizerFast

import farspan
from farspan import cepe
from farspan.cepe.saving import is_added
from farspan.loading import own_module

from cepe_models import added_parameters, authors_settings, some_ids, tiny_cepe, tiny_encoder, train_a_little
from tiny import saved, tiny_model

OLD = {
    "num_beams": 1,
    "top_k": 50,
    "repetition_penalty": 1.0,
    "is_encoder": True,
    "is_decoder": False,
}  # 4.34 wrote these


def write_official(folder: Path, reference: dict[str, Tensor], kind: str) -> Path:
    """A folder as the authors' class writes it: flat fields, an encoder's config full of other things, shards."""
    folder.mkdir()
    given = authors_settings()
    encoder = (
        given["encoder"] | OLD | {"model_type": "llama", "_name_or_path": "mlm_config.json", "torch_dtype": "float32"}
    )
    config = (
        given["decoder"] | given["extra"] | {"model_type": "llama", "encoder_config": encoder, "rope_theta": 10000.0}
    )
    config |= {"architectures": ["LlamaForCausalContextLM"], "pretraining_tp": 1, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    weights = {key[7:]: value for key, value in reference.items() if key.startswith("mha.sd.")}
    if kind == "safetensors":
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(weights)
    files = {name: f"pytorch_model-0000{1 + i * 3 // len(names)}-of-00003.bin" for i, name in enumerate(names)}
    for file in set(files.values()):
        torch.save({name: weights[name] for name in names if files[name] == file}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_the_authors_checkpoints_load(kind: str, tmp_path: Path, reference: dict[str, Tensor]) -> None:
    folder = write_official(tmp_path / "official", reference, kind)
    model = cepe.from_pretrained(folder, allow_pickle=kind == "bin")
    with torch.no_grad():
        given = model(input_ids=reference["in.x"], context_input_ids=reference["in.e"]).logits
    assert float((given - reference["mha.full.logits"]).abs().max()) < 2e-5
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {n for n, _ in added_parameters(model)}
    model.save_pretrained(tmp_path / "again")
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert saved.keys() == {key[7:] for key in reference if key.startswith("mha.sd.")}
    assert json.loads((tmp_path / "again" / "config.json").read_text())["architectures"] == ["LlamaForCausalContextLM"]


def test_weights_that_are_missing_or_have_no_place_are_named(tmp_path: Path, reference: dict[str, Tensor]) -> None:
    folder = write_official(tmp_path / "official", reference, "safetensors")
    weights = load_file(folder / "model.safetensors")
    spare = weights.pop("model.layers.1.cross_attn.o_proj.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 of its weights, such as 'model.layers.1.cross_attn.o_proj"):
        cepe.from_pretrained(folder)
    weights |= {"model.layers.1.cross_attn.o_proj.weight": spare, "model.layers.1.cross_attn.gate": spare[:1].clone()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"has 1 weights .* no place for, such as 'model.layers.1.cross_attn.gate"):
        cepe.from_pretrained(folder)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral", "falcon", "qwen3", "opt", "bloom"])
def test_what_is_saved_loads_bit_for_bit(architecture: str, tmp_path: Path) -> None:
    model = tiny_cepe(architecture)
    model.save_pretrained(tmp_path)
    again = cepe.from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    ids, context = some_ids(2, 12), some_ids(2, 3, 8, seed=1)
    with torch.no_grad():
        expected = model(input_ids=ids, context_input_ids=context).logits
        assert torch.equal(again(input_ids=ids, context_input_ids=context).logits, expected)


def saved_base(folder: Path, seed: int = 0) -> Path:
    base = tiny_model("llama")
    if seed:
        torch.nn.init.normal_(base.model.layers[1].self_attn.q_proj.weight)
    base.save_pretrained(folder)
    return folder


def test_an_adapter_holds_what_was_added_and_finds_its_base(tmp_path: Path) -> None:
    base = saved_base(tmp_path / "base")
    model = train_a_little(cepe.from_base(base, tiny_encoder()))
    model.save_pretrained(tmp_path / "adapter", adapter_only=True)
    tensors = load_file(tmp_path / "adapter" / "cepe_adapter.safetensors")
    assert tensors.keys() == {name for name, _ in added_parameters(model)}
    assert all(is_added(name) for name in tensors)
    again = cepe.from_pretrained(tmp_path / "adapter")
    below = cepe.from_pretrained(tmp_path, subfolder="adapter").state_dict()
    assert all(torch.equal(value, below[name]) for name, value in again.state_dict().items())
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    moved = base.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"give base=, or correct cepe_base in config\.json"):
        cepe.from_pretrained(tmp_path / "adapter")
    given = cepe.from_pretrained(tmp_path / "adapter", base=moved, dtype=torch.bfloat16)  # the same base in less
    assert given.dtype == torch.bfloat16
    given.save_pretrained(tmp_path / "whole")
    assert cepe.from_pretrained(tmp_path / "whole").dtype == torch.bfloat16


@pytest.mark.parametrize("adapter_only", [False, True])
def test_a_dtype_given_as_text_is_that_of_all_weights(adapter_only: bool, tmp_path: Path) -> None:
    model = cepe.from_base(saved_base(tmp_path / "base"), tiny_encoder())
    model.save_pretrained(tmp_path / "saved", adapter_only=adapter_only)
    model = cepe.from_pretrained(tmp_path / "saved", dtype="bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_an_adapter_refuses_another_base_and_names_both(tmp_path: Path) -> None:
    model = cepe.from_base(saved_base(tmp_path / "base"), tiny_encoder())
    model.save_pretrained(tmp_path / "adapter", adapter_only=True)
    other = saved_base(tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match=rf"made for {tmp_path / 'base'}, not for {other}: their weights differ"):
        cepe.from_pretrained(tmp_path / "adapter", base=other)


def test_an_adapter_refuses_a_base_of_which_one_row_differs_unless_an_older_version_wrote_it(tmp_path: Path) -> None:
    model = cepe.from_base(saved_base(tmp_path / "base"), tiny_encoder())
    model.save_pretrained(tmp_path / "adapter", adapter_only=True)
    other = tiny_model("llama")
    other.model.layers[1].self_attn.q_proj.weight.data[17] += 1
    with pytest.raises(ValueError, match="their weights differ"):
        cepe.from_pretrained(tmp_path / "adapter", base=other)
    file = tmp_path / "adapter" / "config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "cepe_weights_by_row"}))
    cepe.from_pretrained(tmp_path / "adapter", base=other)
    with pytest.raises(ValueError, match="their weights differ"):
        cepe.from_pretrained(tmp_path / "adapter", base=str(saved_base(tmp_path / "other", seed=1)))


def test_an_adapter_refuses_a_base_whose_config_changed(tmp_path: Path) -> None:
    model = cepe.from_base(saved_base(tmp_path / "base"), tiny_encoder())
    model.save_pretrained(tmp_path / "adapter", adapter_only=True)
    file = tmp_path / "base" / "config.json"
    given = json.loads(file.read_text())
    file.write_text(json.dumps(given | {"use_cache": False, "bos_token_id": 1}))  # these change no score
    cepe.from_pretrained(tmp_path / "adapter")
    file.write_text(json.dumps(given | {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}))
    with pytest.raises(ValueError, match=r"rope_parameters\.rope_theta was 10000\.0, now 50\.0\. Restore"):
        cepe.from_pretrained(tmp_path / "adapter")


@pytest.mark.parametrize("adapter_only", [False, True])
def test_additions_in_float32_over_a_base_in_bfloat16_stay_so(adapter_only: bool, tmp_path: Path) -> None:
    tiny_model("llama").bfloat16().save_pretrained(tmp_path / "base")
    model = train_a_little(cepe.from_base(tmp_path / "base", tiny_encoder(), dtype=torch.float32))
    model.save_pretrained(tmp_path / "saved", adapter_only=adapter_only)
    again = cepe.from_pretrained(tmp_path / "saved")
    for name, value in model.state_dict().items():
        assert again.state_dict()[name].dtype == value.dtype == (torch.float32 if is_added(name) else torch.bfloat16)
        assert torch.equal(again.state_dict()[name], value)


def test_nothing_is_written_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_cepe()
    model.save_pretrained(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for cross in model.cross_attentions():
        cross.o_proj.weight.data.zero_()

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("No space left on device")

    for name in ("farspan.cepe.saving.save_file", "transformers.modeling_utils.safe_save_file"):
        monkeypatch.setattr(name, full)
    for adapter_only in (True, False):
        with pytest.raises(OSError, match="No space"):
            model.save_pretrained(tmp_path, adapter_only=adapter_only)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_an_adapter_takes_the_place_of_a_whole_model(tmp_path: Path) -> None:
    model = cepe.from_base(saved_base(tmp_path / "base"), tiny_encoder())
    model.save_pretrained(tmp_path / "saved")
    model.save_pretrained(tmp_path / "saved", adapter_only=True)
    assert {file.name for file in (tmp_path / "saved").glob("*.safetensors")} == {"cepe_adapter.safetensors"}
    cepe.from_pretrained(tmp_path / "saved")


def test_a_folder_loads_as_any_model_does(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny_cepe()
    saved(tmp_path, tokenizer, model)
    lm = farspan.load(tmp_path, device="cpu")
    assert isinstance(lm.model, cepe.CepeModel)
    assert not lm.model.training
    assert lm.identity["architecture"] == "LlamaForCausalContextLM"
    assert lm.trained_length == 512


def test_pickled_weights_are_allowed_first(
    tmp_path: Path, reference: dict[str, Tensor], tokenizer: PreTrainedTokenizerFast
) -> None:
    folder = write_official(tmp_path / "official", reference, "bin")
    with pytest.raises(ValueError, match="--allow-pickle"):
        farspan.load(folder, device="cpu")


def test_what_is_no_cepe_model_is_refused(tmp_path: Path, reference: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="is not a CEPE model"):
        cepe.from_pretrained(saved_base(tmp_path / "base"))
    with pytest.raises(ValueError, match="neither a folder nor a hub id"):
        cepe.from_pretrained(tmp_path / "nothing")
    folder = write_official(tmp_path / "official", reference, "safetensors")
    for field, value in (("encode_mode", "with_query-8"), ("encoder_is_model", True)):
        config = json.loads((folder / "config.json").read_text())
        (tmp_path / field).mkdir()
        (tmp_path / field / "config.json").write_text(json.dumps(config | {field: value}))
        with pytest.raises(ValueError, match=f"{field} = .* is not supported"):
            cepe.from_pretrained(tmp_path / field)


def renumbered(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same tokens, two of them with each other's numbers."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    from tokenizers import Tokenizer

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), bos_token="<s>")


def test_tokenizers_that_disagree_are_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    saved_base(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    saved(tmp_path / "encoder", tokenizer, tiny_encoder())
    cepe.from_base(tmp_path / "base", tmp_path / "encoder")
    renumbered(tokenizer).save_pretrained(tmp_path / "encoder")
    with pytest.raises(ValueError, match=r"different tokenizers: token '[ab]' has id"):
        cepe.from_base(tmp_path / "base", tmp_path / "encoder")


def test_the_body_of_a_masked_language_model_is_an_encoder(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    masked = BertForMaskedLM(BertConfig(vocab_size=300, max_position_embeddings=32, **shape))
    masked.save_pretrained(tmp_path / "bert")  # without the pooler that its body would have by itself
    model = cepe.from_base(tiny_model(), tmp_path / "bert")
    state = model.encoder.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in masked.bert.state_dict().items())
    broken = load_file(tmp_path / "bert" / "model.safetensors")
    broken.pop("bert.encoder.layer.0.output.dense.weight")
    save_file(broken, tmp_path / "bert" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 of its weights, such as 'encoder\.layer\.0\.output\.dense\.weight"):
        cepe.from_base(tiny_model(), tmp_path / "bert")


def test_an_encoder_has_to_look_both_ways() -> None:
    with pytest.raises(ValueError, match="is causal, not bidirectional"):
        cepe.from_base(tiny_model("llama"), tiny_model("mamba"))


def test_a_masked_language_model_gives_its_body(tmp_path: Path, reference: dict[str, Tensor]) -> None:
    """Its keys are `model.*`; its head has no place here."""
    given = authors_settings()
    LlamaConfig(**given["encoder"]).save_pretrained(tmp_path)
    weights = {key[7:]: value.clone() for key, value in reference.items() if key.startswith("mlm.sd.")}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    encoder = cepe.from_base(tiny_model("llama", vocab_size=97), tmp_path).encoder
    for name, value in encoder.state_dict().items():
        assert torch.equal(value, weights[f"model.{name}"])


def test_models_that_cannot_be_extended_say_where(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"layer 0 of Mamba.* \(MambaBlock\) cannot be extended: it has no self-attention"
    ):
        cepe.from_base(tiny_model("mamba"), tiny_encoder())
    base = tiny_model("opt", do_layer_norm_before=False)  # a norm stands behind the residual stream
    with pytest.raises(
        ValueError, match=r"layer 0 of .*OPTDecoderLayer\) cannot be extended: .* reach the layer's output"
    ):
        cepe.from_base(base, tiny_encoder())
    with pytest.raises(ValueError, match="num_cross_attn_layers = 3; the decoder has 2 layers"):
        cepe.from_base(tiny_model(), tiny_encoder(), num_cross_attn_layers=3)
    one = tiny_encoder(num_hidden_layers=1)
    with pytest.raises(ValueError, match="the encoder has 2"):
        cepe.from_base(tiny_model(num_hidden_layers=3), one, num_cross_attn_hidden_states=3)
    with pytest.raises(ValueError, match="is a CEPE model already"):
        cepe.from_base(tiny_cepe(), tiny_encoder())


def test_a_base_that_is_refused_is_what_it_was() -> None:
    base = tiny_model("mamba")
    kind, names = type(base), list(base.state_dict())
    with pytest.raises(ValueError, match="cannot be extended"):
        cepe.from_base(base, tiny_encoder())
    assert type(base) is kind
    assert list(base.state_dict()) == names
    assert own_module(base.config) is None


def test_contexts_that_cannot_be_read_say_why() -> None:
    model, ids = tiny_cepe(), some_ids(2, 5)
    for wrong, message in (
        (some_ids(2, 8), r"shape \(2, 8\): expected \[batch, chunks, length\]"),
        (some_ids(2, 0, 8), "the context is empty"),
        (some_ids(2, 3, 17), "17 tokens are longer than the encoder's window of 16"),
        (some_ids(2, 3, 8) + 400, "the encoder has 301 tokens"),
        (some_ids(2, 3, 8).to("meta"), "the context is on meta, the encoder on cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            model(input_ids=ids, context_input_ids=wrong)
    with pytest.raises(ValueError, match="give one shape"):
        model.encode_context(some_ids(2, 3, 8), torch.ones(2, 8))
    with pytest.raises(ValueError, match="the mask of a context has shape"):
        model.encode_context(some_ids(2, 3, 8), padding_mask=torch.ones(2, 8))
    with pytest.raises(ValueError, match="mode of a context 'cach' is unknown"):
        model.encode_context(some_ids(2, 3, 8), mode="cach")
    with torch.no_grad():
        context = model.encode_context(some_ids(2, 3, 8))
        with pytest.raises(ValueError, match="the context is on meta, the model on cpu"):
            model(input_ids=ids, context=context.to("meta"))
        with pytest.raises(ValueError, match="3 rows cannot read a context of 2 rows"):
            model(input_ids=some_ids(3, 5), context=context)
        with pytest.raises(ValueError, match="not several"):
            model(input_ids=ids, context=context, encoder_input_ids=some_ids(2, 3, 8))
        wide = cepe.from_base(tiny_model(), tiny_encoder(hidden_size=8, num_attention_heads=1))
        with pytest.raises(ValueError, match="states of width 16, this model's encoder gives 8"):
            wide(input_ids=ids, context=context)


def test_a_quantised_base_without_its_library_is_refused(tmp_path: Path) -> None:
    saved_base(tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"base cannot be loaded: .*bitsandbytes"):
        cepe.from_base(tmp_path / "base", tiny_encoder())


@pytest.mark.parametrize("mode", cepe.MODES)
def test_layers_can_be_offloaded(mode: Any, tmp_path: Path) -> None:
    model = tiny_cepe()
    model.save_pretrained(tmp_path / "model")
    here = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head", "encoder")
    where = dict.fromkeys(here, "cpu") | {"model.layers.1": "disk"}
    spread = cepe.from_pretrained(tmp_path / "model", device_map=where, offload_folder=tmp_path / "offloaded")
    ids, context = some_ids(2, 12), some_ids(2, 3, 8, seed=1)
    expected = model.generate(ids, context_input_ids=context, max_new_tokens=4, do_sample=False)
    given = spread.generate(ids, context=spread.encode_context(context, mode=mode), max_new_tokens=4, do_sample=False)
    assert torch.equal(given, expected)


def test_a_base_with_hooks_of_accelerate_can_be_extended() -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    ids, context = some_ids(2, 12), some_ids(2, 3, 8, seed=1)
    model = train_a_little(cepe.from_base(tiny_model(), tiny_encoder()))
    base = tiny_model()
    for layer in base.model.layers:
        add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    spread = train_a_little(cepe.from_base(base, tiny_encoder()))
    with torch.no_grad():
        expected = model(input_ids=ids, context_input_ids=context).logits
        assert torch.equal(spread(input_ids=ids, context_input_ids=context).logits, expected)
