"""Learned scales of log-n scaling: the method against a naive twin, their gradients, and a training that saves them."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_smt import Make, settings  # noqa: F401
from test_temperature import log_n
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface

import farspan
from farspan import doctor
from farspan.lm import LM, wrap
from farspan.methods import method
from farspan.train.smt import train
from farspan.train.temperature import PARAMETER, save_scales, scale_queries
from farspan.train.trained import plain

from naive import by_pairs
from tiny import interrupted, nats_by, nats_of, open_lm, same, saved, some_ids, tiny_model

SOME = [[0.0, 1.0, 2.5, -1.0], [0.5, 3.0, 1.5, 1.0]]  # of two layers of four heads
ONES = [[1.0] * 4] * 2


@pytest.fixture
def file(tmp_path: Path) -> Callable[[Any], Path]:
    """Writes scales into a file."""

    def written(scales: Any, original: Any = 7) -> Path:
        path = tmp_path / "scales.json"
        path.write_text(json.dumps({"original": original, "scales": scales}))
        return path

    return written


class OnCpu(TorchDispatchMode):
    """Counts operations on tensors in the CPU's memory."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(isinstance(one, Tensor) and one.device.type == "cpu" for one in args)
        return function(*args, **(kwargs or {}))


def test_scales_are_copied_to_the_models_device_once_and_not_in_every_layer(file: Any, tokenizer: Any) -> None:
    # planned, since a model on the meta device cannot be run, as the check of a reader would
    lm = replace(wrap(tiny_model().to("meta"), tokenizer, "tiny"), planned_device=torch.device("meta"))
    with method(f"temperature:scales={file(SOME)}").on(lm) as reader, OnCpu() as copies:
        reader.attention.factor(torch.arange(3, device="meta"), 0)
    assert copies.count == 0


def scaled_weights(scales: list[list[float]], original: int) -> Callable[[int, list[int], Tensor], Tensor]:
    """Weights of scores for `by_pairs`, which goes through layer after layer and in each through all queries."""
    layer = -1

    def weights(i: int, seen: list[int], scores: Tensor) -> Tensor:
        nonlocal layer
        layer += i == 0
        factors = [log_n(i, original) ** s for s in scales[layer]]
        return torch.stack([(f * row).softmax(-1) for f, row in zip(factors, scores, strict=True)])

    return weights


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt_neox", "mistral"])
def test_each_head_has_an_exponent_of_its_own(architecture: str, tokenizer: Any, file: Any) -> None:
    lm, ids = open_lm(architecture, tokenizer), some_ids(1, 60)
    expected = by_pairs(lm.model, ids, weights=scaled_weights(SOME, 7))
    same(nats_by(f"temperature:scales={file(SOME)}", lm, ids)[0], nats_of(expected, ids[0]))


def test_at_a_scale_of_one_it_is_plain_log_n_and_at_zero_nothing(lm: LM, file: Any) -> None:
    ids = some_ids(2, 60)
    plainly = nats_by("temperature:original=7", lm, ids)
    same(nats_by(f"temperature:scales={file(ONES)}", lm, ids), plainly)
    same(nats_by(f"temperature:scales={file([[0.0] * 4] * 2)}", lm, ids), nats_by("full", lm, ids))
    given = nats_by(f"temperature:original=5,scales={file(ONES)}", lm, ids)  # the setting wins over the file
    same(given, nats_by("temperature:original=5", lm, ids))


@pytest.mark.parametrize("other", ["", "rope:type=linear,factor=2+sinks:window=20,sinks=3+"])
def test_the_doctor_passes_scales_from_a_file(other: str, lm: LM, file: Any) -> None:
    text = "the quick brown fox jumps over the lazy dog, and 31 foxes 41 dogs; " * 20
    checks = doctor.diagnose(lm, method(f"{other}temperature:scales={file(SOME)}"), text)
    assert not [check for check in checks if check.passed is False]
    assert all(check.passed for check in checks if check.name in ("no-op", "at work", "cuts", "causality"))


@pytest.mark.parametrize(
    ("scales", "original", "reason"),
    [
        (SOME[:1], 7, "scales of another model: got 1 layers of 4 heads, expected 2 of 4 for"),
        ([row[:3] for row in SOME], 7, "got 2 layers of 3 heads, expected 2 of 4 for"),
        ([SOME[0], SOME[1][:3]], 7, "has no scales: expected an object"),
        (
            [SOME[0], [1.0, math.nan, 1.0, 1.0]],
            7,
            r"\.json: scale of head 1 of layer 1: got nan, expected a number from -100",
        ),
        ([SOME[0], [1.0, 1e60, 1.0, 1.0]], 7, r"head 1 of layer 1: got 1e\+60"),
        ([SOME[0], [1.0, 10**400, 1.0, 1.0]], 7, "head 1 of layer 1: got 10+"),
        ([SOME[0], [1.0, math.inf, 1.0, 1.0]], 7, "head 1 of layer 1: got inf"),
        ([SOME[0], [1.0, True, 1.0, 1.0]], 7, "head 1 of layer 1: got True"),
        ([], 7, "has no scales"),
        ([[], []], 7, "has no scales"),
        ({}, 7, "has no scales"),
        (SOME, None, "original: got None, expected a whole number from 2 to 2,147,483,647"),
        (SOME, 1, "original: got 1, expected"),
        (SOME, True, "original: got True"),
        (SOME, 2**31, "original: got 2147483648"),
    ],
)
def test_files_without_scales_of_this_model_are_refused(
    scales: Any, original: Any, reason: str, lm: LM, file: Any
) -> None:
    with pytest.raises(ValueError, match=reason), method(f"temperature:scales={file(scales, original)}").on(lm):
        pass


def test_a_file_that_is_not_there_is_named(lm: LM, tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"log_n_scales\.json' do not exist: give the folder of a model trained"),
        method(f"temperature:scales={tmp_path}").on(lm),
    ):
        pass


def test_a_model_divided_among_processes_is_refused(lm: LM, file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farspan.hf.num_parts", lambda model: 2)
    with (
        pytest.raises(ValueError, match=r"the heads of .* are divided among 2 processes: use one"),
        method(f"temperature:scales={file(SOME)}").on(lm),
    ):
        pass


# training


def naive_logits(model: Any, ids: Tensor, positions: Tensor, scales: Tensor, original: int) -> Tensor:
    """Logits of a Llama whose queries are multiplied head by head, with gradients of the scales."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        out, group = torch.zeros_like(q), q.shape[1] // k.shape[1]
        for head in range(q.shape[1]):
            for i in range(q.shape[2]):
                factor = log_n(int(positions[0, i]), original) ** scales[module.layer_idx, head]
                keys, values = (x[:, head // group, : i + 1] for x in (k, v))
                scores = factor * (q[:, head, i, None] * keys).sum(-1) * q.shape[-1] ** -0.5
                out[:, head, i] = (scores.softmax(-1)[..., None] * values).sum(1)
        return out.transpose(1, 2), None

    AttentionInterface.register("head_by_head", attend)
    AttentionMaskInterface.register("head_by_head", lambda *args, **options: None)
    try:
        model.set_attn_implementation("head_by_head")
        return model(input_ids=ids, position_ids=positions, use_cache=False).logits
    finally:
        model.set_attn_implementation("sdpa")
        del AttentionInterface._global_mapping["head_by_head"], AttentionMaskInterface._global_mapping["head_by_head"]


def test_gradients_of_the_scales_are_those_of_the_naive_twin() -> None:
    ids, positions = some_ids(1, 40), torch.arange(3, 43)[None]
    scales = torch.tensor(SOME, requires_grad=True)
    nats_of(naive_logits(tiny_model(), ids, positions, scales, 7)[0], ids[0]).sum().backward()
    model = tiny_model()
    scale_queries(model, 7, learned=True)
    parameters = [value for name, value in model.named_parameters() if name.endswith(PARAMETER)]
    with torch.no_grad():
        for value, row in zip(parameters, SOME, strict=True):
            assert value.tolist() == [1.0] * 4
            value.copy_(torch.tensor(row))
    nats_of(model(input_ids=ids, position_ids=positions).logits[0], ids[0]).sum().backward()
    found = torch.stack([value.grad for value in parameters])
    assert scales.grad is not None
    assert scales.grad.abs().min() > 1e-4
    torch.testing.assert_close(found, scales.grad, rtol=1e-3, atol=1e-5)


@pytest.fixture
def short(tmp_path: Path, tokenizer: Any, settings: Make) -> Make:  # noqa: F811
    """Trainings of a model whose trained length is 24 tokens, so that most queries are scaled."""
    tiny_model(max_position_embeddings=24).save_pretrained(tmp_path / "model")
    return settings


def test_a_trained_model_computes_under_the_method_what_it_did_in_training(
    short: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, ids = {}, some_ids(1, 90)

    def kept(model: Any) -> Any:
        with torch.no_grad():
            seen["nats"] = nats_of(model.eval()(input_ids=ids).logits[0], ids[0])
        return plain(model)

    monkeypatch.setattr("farspan.train.smt.plain", kept)
    summary = train(short("a", "model.temperature=learned"))
    assert summary["trained"] == 3072 + 8
    scales = json.loads((tmp_path / "a" / "log_n_scales.json").read_text())
    assert scales["original"] == 24
    assert all(0.001 < abs(one - 1) < 0.2 for row in scales["scales"] for one in row)
    lm = farspan.load(tmp_path / "a", device="cpu")
    assert lm.trained_length == 128
    same(nats_by(f"temperature:scales={tmp_path / 'a'}", lm, ids)[0], seen["nats"])
    assert (nats_by("full", lm, ids)[0] - seen["nats"]).abs().max() > 0.01
    assert not [name for name in lm.model.state_dict() if PARAMETER in name]
    assert "`--method temperature:scales=THIS_FOLDER`" in (tmp_path / "a" / "README.md").read_text()


def test_the_card_of_a_model_trained_with_plain_log_n_names_the_method(short: Make, tmp_path: Path) -> None:
    train(short("a", "model.temperature=true", "trainer.steps=6", "lengths.by=48"))
    assert "`--method temperature:original=24`" in (tmp_path / "a" / "README.md").read_text()
    assert not (tmp_path / "a" / "log_n_scales.json").exists()


def test_a_stopped_training_of_scales_ends_with_the_same(short: Make, counted: list[int], tmp_path: Path) -> None:
    train(short("whole", "model.temperature=learned"))
    with interrupted(counted, 7):
        train(short("stopped", "model.temperature=learned"))
    train(short("stopped", "model.temperature=learned"))
    whole, stopped = (tmp_path / name / "log_n_scales.json" for name in ("whole", "stopped"))
    assert (counted[0], whole.read_text()) == (8, stopped.read_text())


def test_of_chosen_heads_only_their_scales_are_trained(short: Make, tmp_path: Path) -> None:
    train(short("a", "model.temperature=learned", 'trained.heads=["1.2"]'))
    scales = json.loads((tmp_path / "a" / "log_n_scales.json").read_text())["scales"]
    assert [[one != 1.0 for one in row] for row in scales] == [[False] * 4, [False, False, True, False]]


def test_a_model_without_scales_has_no_file(tmp_path: Path, tokenizer: Any) -> None:
    save_scales(tiny_model(), 7, saved(tmp_path / "plain", tokenizer))
    assert not (tmp_path / "plain" / "log_n_scales.json").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.temperature=maybe"], 'model.temperature: got .maybe., expected true, false or "learned"'),
        (["model.temperature=1"], 'expected true, false or "learned"'),
        (["model.temperature=learned", "trained.what=lora"], "does not scale what LoRA adds to queries"),
        (["model.temperature=true", "trained.what=lora"], "does not scale what LoRA adds to queries"),
    ],
)
def test_what_cannot_be_learned_is_refused(short: Make, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(short("a", *overrides))
