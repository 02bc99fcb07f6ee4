"""Models: from a folder or the hub, who they are, and what is said when one cannot be had."""

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from fake_servers import closed_hub, use_hub
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from farspan import cepe, hf
from farspan.lm import LM, choose_separator, fingerprint, load, wrap
from farspan.loading import places
from farspan.measuring.loader import Load

from tiny import VOCABULARY, configure, refused, saved, tiny_config, tiny_model

pytestmark = pytest.mark.usefixtures("hub_offline")


def raising(error: BaseException, cause: Exception | None = None) -> Callable[..., None]:
    def raise_it(*_: object, **__: object) -> None:
        raise error from cause

    return raise_it


def without_special_tokens(**special: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({"\n": 0, "a": 1, "</s>": 2}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


# loading


def test_a_folder_is_loaded(folder: Path) -> None:
    lm = load(folder, device="cpu")
    expected = tiny_model().state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in lm.model.state_dict().items())
    assert not lm.model.training
    assert lm.name == str(folder)
    assert lm.vocabulary == VOCABULARY
    assert lm.tokenizer("the fox")["input_ids"]


def test_a_model_is_shown_in_one_line(folder: Path) -> None:
    parameters = sum(p.numel() for p in tiny_model().parameters())
    dtype = str(tiny_model().dtype).removeprefix("torch.")
    lm = load(folder, device="cpu", trained_length=1_024)
    assert repr(lm) == f"LM('{folder}', {parameters:,} parameters, {dtype}, cpu, trained length 1,024 tokens)"
    assert repr(load(folder, device="cpu", trained_length=1_024, weights=False)) == repr(lm)
    unknown = dict.fromkeys(lm.identity) | {"device": "http://127.0.0.1:8000"}
    assert repr(replace(lm, name="m", identity=unknown, trained_length=None)) == "LM('m', http://127.0.0.1:8000)"


def test_no_progress_bar_remains_of_loading(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logging = transformers.utils.logging
    was_enabled = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    try:
        load(folder, device="cpu")
    finally:
        if not was_enabled:
            logging.disable_progress_bar()
    written = capfd.readouterr().err
    assert "Loading weights" in written
    assert not written.rpartition("\r")[2].strip()
    assert "\n" not in written


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("weights", [True, False])
def test_the_dtype_is_the_checkpoints_own_unless_given_or_slow(
    fast: bool,
    weights: bool,
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(hf, "has_instructions", lambda device, dtype: fast or dtype == torch.float32)
    saved(tmp_path, tokenizer, tiny_model().to(torch.bfloat16))

    def dtype_of(**options: Any) -> torch.dtype:
        return load(tmp_path, device="cpu", weights=weights, **options).dtype

    assert dtype_of() == (torch.bfloat16 if fast else torch.float32)
    assert ("no instructions" in caplog.text) == (not fast)
    assert dtype_of(dtype="float32") == torch.float32
    assert dtype_of(dtype="bfloat16") == torch.bfloat16


def test_instructions_are_asked_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert hf.has_instructions(cpu, torch.float32)
    assert hf.has_instructions(torch.device("cuda"), torch.bfloat16)
    for answer in (True, False):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda answer=answer: answer)
        assert hf.has_instructions(cpu, torch.bfloat16) is answer


def test_the_attention_implementation_can_be_chosen(folder: Path) -> None:
    assert load(folder, device="cpu", attention="eager").identity["attention"] == "eager"


def test_the_real_tiny_model_of_the_shared_data_is_loaded(shared_data: Path) -> None:
    lm = load(shared_data / "models" / "stories260K", device="cpu")
    assert lm.identity["architecture"] == "LlamaForCausalLM"
    assert lm.separator.kind == "bos"
    assert len(lm.tokenizer) <= lm.vocabulary
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    ids = torch.tensor([[*lm.separator.ids, *lm.tokenizer(text, add_special_tokens=False)["input_ids"]]])
    with torch.no_grad():
        loss = lm.model(ids, labels=ids).loss.item()
    assert loss < 3.0  # nats a token; guessing blindly among its 512 would be 6.2


def test_bin_weights_are_read_only_when_allowed(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(tiny_model().state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"holds no safetensors weights; .*allow_pickle=True \(--allow-pickle\)"):
        load(folder, device="cpu")
    assert load(folder, device="cpu", allow_pickle=True).identity["fingerprint"] == fingerprint(tiny_model())


def test_a_model_already_placed_is_left_where_it_is(folder: Path) -> None:
    pytest.importorskip("accelerate")
    assert load(folder, device="no such device", device_map={"": "cpu"}).device.type == "cpu"


# what cannot be loaded


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./no/such/model", r"model '\./no/such/model' is neither a folder nor a hub id such as org/name"),
        ("farspan-tests/none", r"model 'farspan-tests/none' is neither .* cached, and HF_HUB_OFFLINE is set"),
    ],
)
def test_a_missing_model_is_refused_with_the_reason(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load(name)


def hub_error(kind: type[Any]) -> Exception:
    return kind("refused", response=SimpleNamespace(headers={}, request=None))


def test_a_gated_model_is_refused_with_the_way_in(monkeypatch: pytest.MonkeyPatch) -> None:
    error = raising(OSError("You are trying to access a gated repo."), hub_error(GatedRepoError))
    monkeypatch.setattr(transformers.PreTrainedConfig, "get_config_dict", error)
    with pytest.raises(ValueError, match=r"'org/gated' is gated on the hub: .*hf auth login.* HF_TOKEN"):
        load("org/gated")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A hub without models, and the statuses that it answers; the last is repeated."""
    statuses = [404]

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(statuses.pop(0) if len(statuses) > 1 else statuses[0])
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        use_hub(monkeypatch, f"http://127.0.0.1:{server.server_port}")
        yield statuses
        server.shutdown()


def test_a_model_the_hub_does_not_have_is_refused(hub: list[int]) -> None:
    with pytest.raises(ValueError, match=r"'org/none' is neither a folder nor on the hub"):
        load("org/none")


def test_a_hub_that_is_busy_is_requested_again(hub: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    hub[:] = [503, 503, 404]
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    with pytest.raises(ValueError, match=r"'org/none' is neither a folder nor on the hub"):
        load("org/none")
    assert hub == [404]


@pytest.mark.parametrize("given", [{}, {"gguf": "tiny.gguf"}])
def test_a_model_that_is_not_cached_is_refused_at_once_without_a_network(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = closed_hub(monkeypatch)
    said = rf"neither a folder nor cached, and {closed} cannot be reached: correct the name, or connect to the network$"
    with pytest.raises(ValueError, match=said):
        load("org/none", **given)


@pytest.fixture
def cached(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The hub id of a model in the hub's cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    place = tmp_path / "hub" / "models--org--tiny"
    shutil.copytree(folder, place / "snapshots" / ("1" * 40))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("1" * 40)
    return "org/tiny"


def test_a_cached_model_loads_at_once_without_a_network(cached: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed_hub(monkeypatch)
    assert load(cached, device="cpu").name == cached
    assert not constants.HF_HUB_OFFLINE


def test_with_local_files_only_nothing_is_connected_to(cached: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed_hub(monkeypatch)
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(f"socket.socket.{name}", lambda *_: pytest.fail("a connection"))
    assert load(cached, device="cpu", local_files_only=True).name == cached
    said = "'org/none' is neither a folder nor cached, and local_files_only=True is given: leave it out to download$"
    for given in ({}, {"gguf": "tiny.gguf"}):
        with pytest.raises(ValueError, match=said if not given else said.replace("none'", "none/tiny.gguf'")):
            load("org/none", local_files_only=True, **given)


def test_an_interrupt_while_a_model_loads_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.PreTrainedConfig, "get_config_dict", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        load("org/model")


@pytest.mark.parametrize("kind", [transformers.BertModel, transformers.BertForMaskedLM])
@pytest.mark.parametrize("weights", [True, False])
def test_an_encoder_is_refused_as_such(
    kind: Any, weights: bool, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    saved(tmp_path, tokenizer, kind(transformers.BertConfig(vocab_size=len(tokenizer), **sizes)))
    with pytest.raises(ValueError, match=r"it is an encoder \(model_type 'bert'\), expected a causal language model"):
        load(tmp_path, device="cpu", weights=weights)


def test_a_file_is_no_model(folder: Path) -> None:
    with pytest.raises(ValueError, match="is a file: give its folder"):
        load(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 3}, r"lacks 9 of its weights, such as 'model\.layers\.2\."),
        ({"num_hidden_layers": 1}, r"has 9 weights .* no place for, such as 'model\.layers\.1\..* is 1\)"),
        ({"intermediate_size": 32}, r"have other shapes than its config\.json defines"),
    ],
    ids=["missing", "further", "of other shapes"],
)
def test_weights_that_the_config_does_not_describe_are_refused(
    folder: Path, changes: dict[str, Any], said: str
) -> None:
    configure(folder, **changes)
    with pytest.raises(ValueError, match=said):
        load(folder, device="cpu")


def test_a_model_without_an_output_matrix_is_named_as_what_it_was_saved(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    classifier = transformers.LlamaForSequenceClassification(tiny_model().config)
    with pytest.raises(ValueError, match="saved as LlamaForSequenceClassification, and is read as LlamaForCausalLM"):
        load(saved(tmp_path, tokenizer, classifier), device="cpu")


def test_tied_weights_do_not_count_as_missing(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    saved(tmp_path, tokenizer, tiny_model(tie_word_embeddings=True))
    model = load(tmp_path, device="cpu").model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_download_that_stopped_halfway_is_refused(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match=r"damaged or incomplete .* download them again"):
        load(folder, device="cpu")


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no weights: expected model\.safetensors\. Copy the weights"):
        load(folder, device="cpu")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"comes without a tokenizer .* Save its tokenizer into the same folder"):
        load(tmp_path, device="cpu")


def test_a_config_in_place_of_its_folder_is_refused_before_the_model_is_loaded(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json' is a file: give its folder"):
        Load().trained(str(folder / "config.json"))


def test_a_tokenizer_larger_than_the_model_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=rf"the tokenizer has {len(tokenizer)} entries, model 'small' only 200"):
        wrap(tiny_model(vocab_size=200), tokenizer, "small")


def test_a_model_larger_than_its_tokenizer_is_taken(tokenizer: PreTrainedTokenizerFast) -> None:
    assert wrap(tiny_model(vocab_size=320), tokenizer, "padded").vocabulary == 320


# separators


@pytest.mark.parametrize(
    ("special", "kind", "token"),
    [({"bos_token": "a", "eos_token": "</s>"}, "bos", 1), ({"eos_token": "</s>"}, "eos", 2), ({}, "newline", 0)],
)
def test_the_separator_is_the_beginning_of_text_else_its_end_else_a_newline(
    special: dict[str, str], kind: str, token: int
) -> None:
    separator = choose_separator(without_special_tokens(**special))
    assert (separator.kind, separator.ids) == (kind, (token,))


# lengths


def test_the_trained_length_is_what_the_config_says(lm: LM) -> None:
    assert lm.trained_length == 512


def test_the_trained_length_can_be_given(folder: Path) -> None:
    lm = load(folder, device="cpu", trained_length=77)
    assert lm.trained_length == lm.identity["trained_length"] == 77
    assert lm.identity["config_trained_length"] == 512


def test_a_config_that_says_no_trained_length_gives_none(tokenizer: PreTrainedTokenizerFast) -> None:
    assert wrap(tiny_model("mamba"), tokenizer, "mamba").trained_length is None


@pytest.mark.parametrize("architecture", ["gpt2", "opt", "openai-gpt", "gptj", "codegen", "ctrl", "mpt"])
def test_positions_of_a_table_end(architecture: str, tokenizer: PreTrainedTokenizerFast) -> None:
    lm = wrap(tiny_model(architecture), tokenizer, architecture)
    assert lm.position_limit == 512
    assert lm.trained_length == 512
    with torch.no_grad():
        assert lm.model(torch.ones(1, 512, dtype=torch.long)).logits.isfinite().all()
        with pytest.raises((IndexError, RuntimeError)):
            lm.model(torch.ones(1, 513, dtype=torch.long))


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "mamba"])
def test_other_positions_do_not_end(architecture: str, tokenizer: PreTrainedTokenizerFast) -> None:
    assert wrap(tiny_model(architecture), tokenizer, architecture).position_limit is None


# identity


def test_the_identity_says_what_a_record_needs(lm: LM) -> None:
    identity = json.loads(json.dumps(lm.identity))
    assert identity == {
        "name": "tiny-llama",
        "revision": None,
        "architecture": "LlamaForCausalLM",
        "parameters": sum(p.numel() for p in tiny_model().parameters()),
        "dtype": "float32",
        "attention": "sdpa",
        "device": "cpu",
        "trained_length": 512,
        "config_trained_length": 512,
        "separator": {"kind": "bos", "ids": [0]},
        "tokenizer": identity["tokenizer"],
        "fingerprint": fingerprint(lm.model),
        "config": identity["config"],
    }
    assert identity["config"]["rope_parameters"] == {"rope_theta": 10_000.0, "rope_type": "default"}


def test_another_tokenizer_is_another_identity(lm: LM) -> None:
    tokenizer = copy.deepcopy(lm.tokenizer)
    tokenizer.bos_token = "the"
    tokenizer.add_special_tokens({"additional_special_tokens": ["qu"]})
    assert wrap(lm.model, tokenizer, "tiny-llama").identity["tokenizer"] != lm.identity["tokenizer"]


def test_a_model_has_the_same_fingerprint_each_time(folder: Path) -> None:
    assert load(folder, device="cpu").identity["fingerprint"] == fingerprint(tiny_model())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_value_of_any_weight_changes_the_fingerprint(dtype: torch.dtype) -> None:
    model = tiny_model().to(dtype)
    found = {fingerprint(model)}
    for weight in model.parameters():
        middle = weight.detach().view(-1)[weight.numel() // 2 : weight.numel() // 2 + 1]
        before = middle.clone()
        middle += 0.01
        found.add(fingerprint(model))
        middle.copy_(before)
    assert len(found) == 1 + len(list(model.parameters()))
    assert fingerprint(model) in found


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded_weights_change_the_fingerprint(where: str, tmp_path: Path) -> None:
    from accelerate import cpu_offload, disk_offload

    device, before = torch.device("cpu"), tiny_model()
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    expected = fingerprint(model)
    assert expected != fingerprint(before)
    if where == "cpu":
        cpu_offload(model, execution_device=device)
    else:
        disk_offload(model, str(tmp_path), execution_device=device)
    assert fingerprint(model) == expected


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("block", [1 << 25, 64])
def test_values_that_change_places_change_the_fingerprint(
    dim: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farspan.lm.BLOCK", block)
    model = tiny_model()
    weight = model.model.layers[0].mlp.up_proj.weight.data
    before = fingerprint(model)
    weight.copy_(weight.flip(dim))
    assert fingerprint(model) != before


@pytest.mark.parametrize("shape", [(), (3,), (3, 5), (2, 8), (2, 3, 4)])
def test_weights_of_any_shape_and_place_in_memory_have_a_fingerprint(shape: tuple[int, ...]) -> None:
    several = torch.arange(1 + torch.Size(shape).numel(), dtype=torch.bfloat16)
    module = torch.nn.Module()
    module.register_buffer("weight", several[1:].view(shape))
    found = fingerprint(module)
    module.weight = module.weight.clone()
    assert fingerprint(module) == found


def test_another_dtype_is_another_fingerprint() -> None:
    assert fingerprint(tiny_model().to(torch.bfloat16)) != fingerprint(tiny_model())


# weights and configs that do not belong together


def add_weights(folder: Path, *names: str) -> None:
    """Add weights of 32 numbers to those of a model."""
    weights = load_file(folder / "model.safetensors") | {name: torch.ones(32) for name in names}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_weights_of_biases_that_the_config_leaves_out_are_refused(folder: Path) -> None:
    add_weights(folder, "model.layers.0.self_attn.q_proj.bias")
    with pytest.raises(ValueError, match=r"has 1 weights .* such as 'model\.layers\.0\.self_attn\.q_proj\.bias'"):
        load(folder, device="cpu")


def test_a_part_that_a_text_model_does_without_is_named_once_and_recorded(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add_weights(folder, "vision_tower.a.weight", "model.vision_tower.b.weight", "multi_modal_projector.weight")
    lm = load(folder, device="cpu")
    assert lm.identity["left_out"] == {"vision_tower": 2, "multi_modal_projector": 1}
    assert [record.getMessage() for record in caplog.records] == [
        f"model '{folder}': weights that a text-only decoder does not use are left out: "
        "'multi_modal_projector' (1), 'vision_tower' (2)"
    ]


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.0.attention.bias"])
def test_buffers_that_are_computed_are_no_weights_without_a_place(folder: Path, name: str) -> None:
    add_weights(folder, name)
    assert "left_out" not in load(folder, device="cpu").identity


def test_layers_that_only_draft_tokens_are_left_out(folder: Path) -> None:
    configure(folder, num_hidden_layers=1, num_nextn_predict_layers=1)
    assert load(folder, device="cpu").identity["left_out"] == {"layers.1": 9}


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_hidden_layers", 0, "num_hidden_layers = 0, expected at least 1"),
        ("num_hidden_layers", -1, "num_hidden_layers = -1, expected at least 1"),
        ("num_attention_heads", 0, "num_attention_heads = 0, expected at least 1"),
        ("num_attention_heads", "x", "'num_attention_heads' expected int, got str"),
        ("max_position_embeddings", "long", "'max_position_embeddings' expected int, got str"),
        ("max_position_embeddings", 512.5, "'max_position_embeddings' expected int, got float"),
        ("max_position_embeddings", -5, "max_position_embeddings = -5, expected 2 to"),
        ("max_position_embeddings", 1, "max_position_embeddings = 1, expected 2 to"),
        ("max_position_embeddings", 10**30, r"max_position_embeddings = 10+, expected 2 to"),
        ("hidden_size", 65, r"hidden size \(65\) is not a multiple"),
        ("hidden_size", 0, "hidden_size = 0, expected at least 1"),
        ("dtype", "int99", "dtype = 'int99', expected one of torch"),
        ("dtype", [1], "config.json"),
        ("rope_parameters", {"rope_type": "nope", "rope_theta": 1e4}, "'nope' is not known"),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": "x"}, "config.json: TypeError"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": "x"}, "config.json: TypeError"),
        ("hidden_act", "nope", "'nope' is not known"),
        ("model_type", "t5", "is not a causal language model known to transformers .*Give another model, or"),
        ("model_type", "nope", "is not a causal language model known to transformers"),
        ("encoder_config", 5, "config.json"),
        ("sliding_window", "x", "sliding_window = 'x', expected a number of tokens"),
        ("layer_types", ["sliding_attention"] * 2, "has layers of sliding_attention .* without sliding_window"),
        (
            "rope_parameters",
            {"rope_type": "yarn", "rope_theta": 1e4, "factor": -1.0},
            "factor = -1.0 of RoPE, expected",
        ),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 0}, "rope_theta = 0 of RoPE"),
        ("quantization_config", "x", "quantization_config = 'x', expected an object whose quant_method"),
        ("quantization_config", {"quant_method": "nope"}, r"quant_method': 'nope'}, expected an object whose"),
        ("quantization_config", {"quant_method": []}, "expected an object whose quant_method transformers"),
    ],
)
def test_a_config_that_is_impossible_is_refused_in_one_line(folder: Path, field: str, value: object, said: str) -> None:
    configure(folder, do_cross_attention=field == "encoder_config", **{field: value})
    with pytest.raises(ValueError, match=said) as refused:
        load(folder, device="cpu")
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("config.json", '{"a": ', "config.json is damaged: expected JSON in UTF-8: Expecting value"),
        ("config.json", "[]", "config.json is damaged: expected a JSON object"),
        ("config.json", "[" * 100_000, "config.json is damaged: got values nested"),
        ("tokenizer.json", "{}", "has a tokenizer that cannot be loaded"),
        ("tokenizer.json", '{"version": {', "tokenizer.json is damaged: .* Expecting property name"),
        (
            "tokenizer.json",
            '{"version": "1.0", "added_tokens": [], "model": {}}',
            "has a tokenizer that cannot be loaded",
        ),
        (
            "tokenizer.json",
            '{"version": "1.0", "added_tokens": "x", "model": {}}',
            "transformers does not accept. Download them again",
        ),
        ("tokenizer_config.json", "[]", "tokenizer_config.json is damaged: expected a JSON object"),
        ("tokenizer_config.json", '{"bos_token": 5}', "has a tokenizer that cannot be loaded"),
        ("generation_config.json", "[]", "generation_config.json is damaged: expected a JSON object"),
    ],
)
def test_a_damaged_file_of_a_model_is_named(folder: Path, file: str, text: str, said: str) -> None:
    (folder / file).write_text(text)
    with pytest.raises(ValueError, match=said) as refused:
        load(folder, device="cpu")
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("device", ["meta", "hpu", "mps", "gpu", "nonsense"])
def test_a_device_that_cannot_compute_is_refused_in_one_short_line(folder: Path, device: str) -> None:
    if device == "mps" and torch.backends.mps.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match=rf"device '{device}' .*expected cpu, cuda") as refused:
        load(folder, device=device)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 350


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtpe": "bfloat16"}, "has no option 'dtpe', which was given to load: correct its name"),
        ({"attention": "nope"}, r"^attention 'nope' is unknown, expected one of eager, .*sdpa"),
        ({"device_map": "nope"}, r"^device 'nope' cannot be used"),
        ({"device_map": "meta"}, "device_map 'meta' holds no weights"),
        ({"device_map": {"": "meta"}}, "device_map 'meta' holds no weights"),
        ({"trained_length": 10**23}, r"the trained length is 10+, expected 1 to 1,000,000,000,000 tokens"),
        ({"device": "cuda:99"}, r"device 'cuda:99' cannot be used .*expected cpu"),
    ],
    ids=str,
)
def test_an_option_that_is_wrong_is_named(folder: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load(folder, **options)


# the decoder among other parts


def test_the_position_limit_is_not_that_of_a_vision_tower(tokenizer: PreTrainedTokenizerFast) -> None:
    text = tiny_config("gemma3", max_position_embeddings=131_072).to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 896, "patch_size": 14}  # 4,096 positions
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    lm = wrap(transformers.AutoModelForCausalLM.from_config(config), tokenizer, "tiny-gemma3")
    assert lm.trained_length == 131_072
    assert lm.position_limit is None


def test_the_position_limit_is_not_that_of_an_encoder() -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    encoder = transformers.BertModel(
        transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **shape)
    )
    assert hf.position_limit(cepe.from_base(tiny_model(), encoder)) is None
    assert hf.position_limit(cepe.from_base(tiny_model("gpt2"), encoder)) == 512


def test_attention_of_weights_that_are_not_finite_is_refused_with_the_reason(lm: LM) -> None:
    lm.model.get_input_embeddings().weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"hidden states are not finite .*weights are damaged"):
        hf.attention_layers(lm.model, name="watching attention")


def test_a_model_of_the_hub_records_its_commit(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    commit, repository = "a1" * 20, tmp_path / "models--org--tiny"
    for part in (tiny_model(), tokenizer):
        part.save_pretrained(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert load("org/tiny", cache_dir=str(tmp_path)).identity["revision"] == commit
    assert load(repository / "snapshots" / commit).identity["revision"] == commit


def test_a_revision_of_a_model_that_is_not_on_the_hub_is_refused(tmp_path: Path) -> None:
    for model in (tmp_path, "demo"):
        with pytest.raises(ValueError, match=f"model '{model}' has no revisions: got revision 'main'"):
            load(model, revision="main")


@pytest.mark.parametrize("weights", [True, False])
def test_config_tokenizer_and_weights_are_those_of_the_subfolder(
    weights: bool, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    root, long = tiny_model(max_position_embeddings=64), tiny_model(max_position_embeddings=4096, num_hidden_layers=1)
    root.save_pretrained(tmp_path)
    saved(tmp_path / "long", tokenizer, long)
    lm = load(tmp_path, device="cpu", subfolder="long", weights=weights)
    assert (lm.trained_length, lm.num_layers, len(lm.tokenizer)) == (4096, 1, len(tokenizer))
    assert Load(options={"subfolder": "long"}).trained(str(tmp_path)) == 4096
    with pytest.raises(ValueError, match=r"^folder '.*short' holds no model: it has no config.json"):
        load(tmp_path, subfolder="short")


def test_the_folder_of_an_adapter_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with refused(r"holds an adapter of PEFT, not a whole model\. Merge it into its base"):
        load(tmp_path, device="cpu")
    tiny_config("llama").save_pretrained(tmp_path)
    with refused(r"holds an adapter of PEFT, not a whole model\. Merge it into its base"):
        load(tmp_path)


def test_config_tokenizer_and_weights_are_found_in_the_same_cache(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    commit = "0123456789" * 4
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / commit
    saved(snapshot / "long", tokenizer)
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "main").write_text(commit)
    options = {"cache_dir": str(tmp_path), "subfolder": "long"}
    lm = load("org/tiny", device="cpu", **options)
    assert (lm.trained_length, len(lm.tokenizer)) == (512, len(tokenizer))
    assert Load(options=options).trained("org/tiny") == 512


def test_the_embedded_model_is_called_demo() -> None:
    lm = load("demo", device="cpu")
    assert (lm.name, lm.identity["name"], Load().trained("demo")) == ("demo", "demo", lm.trained_length)


# what measuring needs to know of a model


def test_a_model_reports_what_its_tokens_cost(lm: LM) -> None:
    assert lm.key_bytes_per_token == 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, dimension, bytes
    assert lm.num_bytes == sum(t.nbytes for t in (*lm.model.parameters(), *lm.model.buffers()))
    assert lm.flops(90, 20, 3) - lm.flops(90, 20, 0) == 2 * 32 * VOCABULARY * 3
    assert lm.flops(90, 20, 0) - 2 * lm.flops(0, 10, 0) == 4 * 2 * 32 * (20 * 110 - 2 * 10 * 10)


def test_the_stop_tokens_are_those_of_generation_and_of_the_tokenizer(lm: LM) -> None:
    lm.model.generation_config.eos_token_id = 7
    assert lm.stop_tokens == [0, 7]
    lm.model.generation_config.eos_token_id = [9, 8]
    assert lm.stop_tokens == [8, 9]


def test_a_folder_with_the_name_of_the_embedded_model_is_mentioned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    places._report_which.cache_clear()
    places.folder_of("demo")
    assert capsys.readouterr().err == ""
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.json").write_text("{}")
    assert places.folder_of("demo") == places.folder_of("demo") != "demo"
    assert capsys.readouterr().err.count("for the folder demo here, write ./demo") == 1
