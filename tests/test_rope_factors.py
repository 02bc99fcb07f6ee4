"""Truncated RoPE and factors from a file against the model with those frequencies, pair by pair."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from farspan import doctor
from farspan.lm import LM
from farspan.methods import method
from farspan.methods.rope import Rope

from naive import by_pairs
from tiny import nats_by, nats_of, open_lm, refused, same, some_ids, tiny_model

FIVE = ["llama", "qwen3", "gemma3", "gpt_neox", "mistral"]
FACTORS = [1.0, 1.25, 3.0, 8.0]
LONGER, ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"


def own_frequencies(lm: LM) -> Tensor:
    return next(value for name, value in lm.model.named_buffers() if name.endswith("inv_freq")).clone()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "factors.json").write_text(json.dumps(FACTORS))
    return tmp_path / "factors.json"


@pytest.mark.parametrize("architecture", FIVE)
def test_truncated_pairs_carry_no_position(architecture: str, tokenizer: Any) -> None:
    lm, ids = open_lm(architecture, tokenizer), some_ids(1, 60)
    inv_freq = own_frequencies(lm)
    for original, turns, cut in ((512, 1.0, 2), (100, 0.9, 3), (512, 0.0, 4)):
        left = torch.tensor([0.0 if original * f / (2 * math.pi) < turns else float(f) for f in inv_freq])
        if architecture == "llama":
            assert int((left > 0).sum()) == {2: 2, 3: 2, 4: 4}[cut]
        expected = nats_of(by_pairs(lm.model, ids, inv_freq=left), ids[0])
        same(nats_by(f"rope:type=truncated,original={original},turns={turns}", lm, ids)[0], expected)


@pytest.mark.parametrize("architecture", FIVE)
def test_factors_divide_the_frequencies_pair_by_pair(architecture: str, tokenizer: Any, tmp_path: Path) -> None:
    lm, ids = open_lm(architecture, tokenizer), some_ids(1, 60)
    inv_freq = own_frequencies(lm)
    factors = FACTORS[: len(inv_freq)]
    (tmp_path / "f.json").write_text(json.dumps(factors))
    for factor in (1, 4):
        scale = math.sqrt(1 + math.log(factor) / math.log(512))
        expected = by_pairs(lm.model, ids, inv_freq=inv_freq / torch.tensor(factors), rotary_scale=scale)
        text = f"rope:type=factors,factor={factor},file={tmp_path}/f.json"
        same(nats_by(text, lm, ids)[0], nats_of(expected, ids[0]))
        with method(text).on(lm) as reader:
            assert reader.lm.trained_length == 512 * factor


def test_a_config_with_longrope_gives_what_transformers_makes_of_it(tokenizer: Any, tmp_path: Path) -> None:
    parameters = {"rope_type": "longrope", "long_factor": FACTORS, "short_factor": [1.0] * 4, "rope_theta": 10_000.0}
    parameters |= {"original_max_position_embeddings": 40, "factor": 16.0}
    theirs = tiny_model("llama", rope_parameters=parameters, max_position_embeddings=640)
    theirs.config.save_pretrained(tmp_path)
    lm, ids = open_lm("llama", tokenizer, max_position_embeddings=40), some_ids(1, 60)
    with torch.no_grad():
        expected = nats_of(theirs(input_ids=ids).logits[0], ids[0])
    same(nats_by(f"rope:type=factors,factor=16,file={tmp_path}/config.json", lm, ids)[0], expected)
    own = json.loads((tmp_path / "config.json").read_text())["rope_parameters"] | {"attention_factor": 1.5}
    (tmp_path / "own.json").write_text(json.dumps(own))
    expected = by_pairs(lm.model, ids, inv_freq=own_frequencies(lm) / torch.tensor(FACTORS), rotary_scale=1.5)
    same(nats_by(f"rope:type=factors,factor=16,file={tmp_path}/own.json", lm, ids)[0], nats_of(expected, ids[0]))


@pytest.mark.parametrize("other", ["", "+sinks:window=20,sinks=3+temperature:original=20"])
def test_the_doctor_passes_factors_from_a_file(other: str, file: Path, lm: LM) -> None:
    text = "the quick brown fox jumps over the lazy dog, and 31 foxes 41 dogs; " * 20
    checks = doctor.diagnose(lm, method(f"rope:type=factors,factor=4,file={file}{other}"), text)
    assert not [check for check in checks if check.passed is False]
    assert all(check.passed for check in checks if check.name in ("no-op", "at work", "cuts", "rope", "causality"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ([1.0, 2.0], "factors of another model: got factors = 2, expected 4 for"),
        ({"long_factor": FACTORS, "rope_theta": 5e5}, "another model: got rope_theta = 500000, expected 10000 for"),
        ({"long_factor": FACTORS, "original_max_position_embeddings": 99}, "got original length = 99, expected 512"),
        ([1.0, 2.0, 0.0, 4.0], r"f\.json: factor of pair 2: got 0.0, expected a number from 1.2e-38 to 3.4e\+38"),
        ([1.0, 2.0, True, 4.0], "factor of pair 2: got True"),
        ([1e60, 2.0, 3.0, 4.0], r"factor of pair 0: got 1e\+60"),
        ([1e-60, 2.0, 3.0, 4.0], "factor of pair 0: got 1e-60"),
        ([10**400, 2.0, 3.0, 4.0], r"factor of pair 0: got 10+\.\.\.0+, expected"),
        ([1.0, 2.0, 3.0, math.nan], "factor of pair 3: got nan"),
        ([1.0, 2.0, 3.0, math.inf], "factor of pair 3: got inf"),
        ({"long_factor": FACTORS, "attention_factor": 0}, r"f\.json: attention_factor: got 0, expected a number"),
        ({"long_factor": FACTORS, "attention_factor": [1]}, r"attention_factor: got \[1\], expected a number"),
        ({"long_factor": FACTORS, "attention_factor": math.nan}, "attention_factor: got nan"),
        ({"long_factor": FACTORS, "rope_theta": "x"}, "rope_theta: got 'x', expected a number"),
        ({"long_factor": FACTORS, ORIGINAL: [1]}, r"got \[1\], expected a whole number from 1 to 2,147,483,647"),
        ({"long_factor": FACTORS, ORIGINAL: 0}, f"{ORIGINAL}: got 0, expected a whole number"),
        ({"long_factor": FACTORS, ORIGINAL: True}, f"{ORIGINAL}: got True"),
        ({"long_factor": FACTORS, ORIGINAL: 2**31}, f"{ORIGINAL}: got 2147483648"),
        ({"rope_scaling": {"long_factor": FACTORS}, LONGER: 2048, ORIGINAL: -5}, f"{ORIGINAL}: got -5"),
        ({"rope_scaling": {"long_factor": FACTORS}, LONGER: 10**400, ORIGINAL: 512}, f"{LONGER}: got 10+"),
        ([], "has no factors: expected a JSON list of positive numbers"),
        ({"rope_parameters": {"factor": 4}}, "has no factors"),
        (7, "has no factors"),
    ],
)
def test_factors_of_another_model_and_files_without_any_are_refused(
    content: Any, reason: str, lm: LM, tmp_path: Path
) -> None:
    (tmp_path / "f.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=reason), method(f"rope:type=factors,factor=4,file={tmp_path}/f.json").on(lm):
        pass


def test_the_factor_of_a_config_without_one_is_the_ratio_of_its_lengths(lm: LM, tmp_path: Path) -> None:
    config = {"rope_scaling": {"long_factor": FACTORS}, "max_position_embeddings": 2048}
    original = {"original_max_position_embeddings": 512}
    within = config | {"rope_scaling": {"long_factor": FACTORS} | original}
    (tmp_path / "of_another.json").write_text(json.dumps(config | {"original_max_position_embeddings": 256}))
    for content in (config | original, within):
        (tmp_path / "f.json").write_text(json.dumps(content))
        found = method(f"rope:type=factors,file={tmp_path}/f.json").frequencies(lm)
        assert found is not None
        assert found[1] == math.sqrt(1 + math.log(4) / math.log(512))
    with pytest.raises(ValueError, match="another model: got original length = 256, expected 512"):
        method(f"rope:type=factors,file={tmp_path}/of_another.json").frequencies(lm)


@pytest.mark.parametrize("content", [FACTORS, {"long_factor": FACTORS}, {"long_factor": FACTORS, "factor": None}])
def test_factors_without_a_factor_are_refused(content: Any, lm: LM, tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text(json.dumps(content))
    how = method(f"rope:type=factors,file={tmp_path}/f.json")
    with refused(r"needs a factor, and .*f\.json has none: write for example rope:type=factors,factor=4,"), how.on(lm):
        pass
    with pytest.raises(ValueError, match="needs a factor"):
        how.extended(512)
    assert method(f"rope:type=factors,factor=4,file={tmp_path}/f.json").extended(512) == 2048


@pytest.mark.parametrize("factor", [0, 0.5, math.nan, "4", True])
def test_a_factor_out_of_range_in_a_file_is_refused(factor: Any, lm: LM, tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text(json.dumps({"long_factor": FACTORS, "factor": factor}))
    with (
        refused(r"f\.json: factor: got .*, expected a number from 1 to 1e\+06"),
        method(f"rope:type=factors,file={tmp_path}/f.json").on(lm),
    ):
        pass


def test_null_in_a_file_of_factors_counts_as_left_out(lm: LM, tmp_path: Path) -> None:
    null = dict.fromkeys(("factor", "rope_theta", "original_max_position_embeddings", "attention_factor"))
    lengths = {"max_position_embeddings": 2048, "original_max_position_embeddings": 512}
    for content, more in (
        ({"long_factor": FACTORS} | null, "factor=4,"),
        (lengths | {"rope_scaling": {"long_factor": FACTORS} | null}, ""),
    ):
        (tmp_path / "f.json").write_text(json.dumps(content))
        found = method(f"rope:type=factors,{more}file={tmp_path}/f.json").frequencies(lm)
        assert found is not None
        assert found[1] == math.sqrt(1 + math.log(4) / math.log(512))


def test_the_factor_is_that_of_the_file(lm: LM, tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text(json.dumps({"long_factor": FACTORS, "factor": 4.0}))
    own, given = (method(f"rope:type=factors,{more}file={tmp_path}/f.json") for more in ("", "factor=4,"))
    assert isinstance(own, Rope)
    assert isinstance(given, Rope)
    found, expected = own.frequencies(lm), given.frequencies(lm)
    assert found is not None
    assert expected is not None
    assert found[1] == expected[1] > 1
    assert own.extended(512) == given.extended(512) == 2048
    with (
        pytest.raises(ValueError, match="another model: got factor = 4, expected 2"),
        method(f"rope:type=factors,factor=2,file={tmp_path}/f.json").on(lm),
    ):
        pass


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("rope:type=factors", r"rope:type=factors needs a file: write file=FACTORS\.json"),
        ("rope:type=yarn,factor=2,file=f.json", "file belongs to rope:type=factors: leave it out"),
        ("rope:type=yarn,factor=2,turns=2", "turns belongs to rope:type=truncated"),
        ("rope:type=truncated,factor=2", "truncated RoPE has no factor"),
        ("rope:type=truncated,original=" + "9" * 400, "rope: original: got 9+, expected 1 to 2,147,483,647"),
        ("rope:type=truncated,turns=-1", "rope: turns: got -1, expected at least 0"),
        ("rope:type=truncated,turns=nan", "rope: turns: got nan, expected at least 0"),
        ("rope:type=truncated,turns=inf", "rope: turns: got inf, expected at least 0"),
        ("rope:type=factors,file=f.json+rope:type=truncated", "both change how RoPE works"),
    ],
)
def test_settings_of_another_type_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        method(text)


def test_a_file_that_is_not_there_is_named(lm: LM) -> None:
    with (
        pytest.raises(ValueError, match=r"'/no/f\.json' does not exist"),
        method("rope:type=factors,file=/no/f.json").on(lm),
    ):
        pass
