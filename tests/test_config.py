"""The fields of configs in the identity of a model, and what an edit of a config or of weights does to a run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3Config, PreTrainedTokenizerFast

import farspan
from farspan import hf
from farspan.lm import LM, load, wrap
from farspan.measuring.again import measure_again, read_baseline
from farspan.record import changed_fields, read_rows
from farspan.report.exports import export
from farspan.report.notices import same_weights
from farspan.report.page import write_report
from farspan.report.runs import read_run
from farspan.train.checkpoint import refuse_other_inputs
from farspan.train.config import read_config
from farspan.train.smt import SmtSettings

from tiny import CODE, CONFIGS, configure, refused, saved, tiny_model

WHAT: dict[str, Any] = {"tasks": "perplexity:target_tokens=16", "text": CODE, "lengths": (32, 64), "repeats": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "rope_parameters.rope_theta was 10000.0, now 1000000.0",
        ),
        ({"rope_parameters": YARN}, "rope_parameters.factor was None, now 4.0"),
        ({"rms_norm_eps": 0.5}, "rms_norm_eps was 1e-06, now 0.5"),
        ({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}, "head_dim was 8, now 4; num_attention"),
        ({"hidden_act": "relu"}, "hidden_act was 'silu', now 'relu'"),
    ],
)
def test_a_run_of_a_folder_is_not_continued_with_another_config(
    change: dict[str, Any], named: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    folder, run = saved(tmp_path / "model", tokenizer), tmp_path / "run"
    measured = farspan.measure(str(folder), **WHAT, out=run)
    files = (run / "run.json").read_text(), (run / "rows.jsonl").read_text()
    configure(folder, **change)
    with refused(f"run: the config of .*model has changed since this run started: {named}.*choose another folder"):
        farspan.measure(str(folder), **WHAT, out=run)
    with refused(named):
        farspan.measure(str(folder), "topk:k=6", **WHAT, out=run)
    assert read_rows(run) == measured.rows
    assert json.loads((run / "run.json").read_text())["models"] == json.loads(files[0])["models"]
    assert (run / "rows.jsonl").read_text() == files[1]


def test_a_run_that_recorded_no_config_is_continued(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    folder, run = saved(tmp_path / "model", tokenizer), tmp_path / "run"
    farspan.measure(str(folder), **WHAT, out=run)
    header = json.loads((run / "run.json").read_text())
    del header["models"][str(folder)]["config"]
    (run / "run.json").write_text(json.dumps(header))
    assert len(farspan.measure(str(folder), ["full", "topk:k=6"], **WHAT, out=run).rows) == 8
    assert "config" not in json.loads((run / "run.json").read_text())["models"][str(folder)]


def test_fields_without_effect_on_scores_may_change(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    folder, run = saved(tmp_path / "model", tokenizer), tmp_path / "run"
    farspan.measure(str(folder), **WHAT, out=run)
    configure(folder, use_cache=False, pad_token_id=3, id2label={"0": "a"}, attention_dropout=0.5, architectures=None,
              transformers_version="5.99", temperature=0.5, initializer_range=1.0, a_new_field=1)  # fmt: skip
    assert len(farspan.measure(str(folder), **WHAT, out=run).rows) == 4


def test_check_does_not_repeat_the_rows_of_another_config(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    folder, run = saved(tmp_path / "model", tokenizer), tmp_path / "run"
    farspan.measure(str(folder), **WHAT, out=tmp_path / "baseline")
    baseline = read_baseline(tmp_path / "baseline")
    measure_again(baseline, str(folder), out=run)
    configure(folder, rms_norm_eps=0.5)
    with refused("rms_norm_eps was 1e-06, now 0.5"):
        measure_again(baseline, str(folder), out=run)
    assert measure_again(baseline, str(folder), out=tmp_path / "new").rows != baseline.rows


@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_fields_are_the_same_however_a_model_is_loaded(
    architecture: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    model = tiny_model(architecture)
    found = hf.scoring_fields(model.config)
    assert len(found) > 5
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    saved(tmp_path, tokenizer, model)
    for options in ({}, {"dtype": "bfloat16"}, {"attention": "eager"}, {"weights": False}):
        assert load(tmp_path, device="cpu", **options).identity["config"] == found


def test_the_fields_of_a_multimodal_model_are_those_of_its_text_decoder() -> None:
    config = Gemma3Config(text_config={"hidden_size": 32}, vision_config={"hidden_size": 64})
    found = hf.scoring_fields(config)
    assert found["hidden_size"] == 32
    assert not [name for name in found if "vision" in name]


def test_fields_that_only_one_version_has_are_not_compared() -> None:
    assert changed_fields({"a": 1, "b": 2}, {"b": 2, "new": None}) == ""
    assert changed_fields(None, {"a": 1}) == changed_fields({}, {"a": 1}) == ""
    assert changed_fields({"a": 1, "b": 2, "c": 3, "d": 4}, {"a": 2, "b": 3, "c": 4, "d": 5}) == (
        "a was 1, now 2; b was 2, now 3; c was 3, now 4; and 1 more"
    )


def test_a_long_list_is_one_value() -> None:
    kinds = ["full_attention"] * 20
    found = hf.scoring_fields(tiny_model("qwen3", num_hidden_layers=20, layer_types=kinds).config)["layer_types"]
    assert found.startswith("20 values, hash ")


def test_a_loaded_model_that_was_trained_since_does_not_repeat_its_rows(lm: LM, tmp_path: Path) -> None:
    mine = wrap(tiny_model(), lm.tokenizer, "mine")
    farspan.measure(mine, **WHAT, out=tmp_path / "run")
    before = mine.identity["fingerprint"]
    farspan.measure(mine, **WHAT, out=tmp_path / "run")
    mine.model.model.layers[0].mlp.up_proj.weight.data.mul_(0.5)
    with refused("fingerprint was"):
        farspan.measure(mine, **WHAT, out=tmp_path / "run")
    farspan.measure(mine, **WHAT, out=tmp_path / "new")
    recorded = json.loads((tmp_path / "new" / "run.json").read_text())["models"]["mine"]
    assert recorded["fingerprint"] == wrap(mine.model, lm.tokenizer, "mine").identity["fingerprint"] != before


def test_a_loaded_model_does_not_repeat_the_rows_of_other_adapters(lm: LM, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(tiny_model(), peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM"))
    mine = wrap(tuned.get_base_model(), lm.tokenizer, "mine")
    farspan.measure(mine, **WHAT, out=tmp_path / "run")
    with tuned.disable_adapter(), refused("fingerprint was"):
        farspan.measure(mine, **WHAT, out=tmp_path / "run")
    farspan.measure(mine, **WHAT, out=tmp_path / "run")
    with peft.helpers.rescale_adapter_scale(tuned, multiplier=0.5), refused("fingerprint was"):
        farspan.measure(mine, **WHAT, out=tmp_path / "run")


class Text:
    name, hash = "text", "1"


@pytest.mark.parametrize("which", ["base_config", "teacher_config"])
def test_a_training_does_not_continue_with_another_config(which: str, tmp_path: Path) -> None:
    def begun(config: dict[str, Any], *, continues: bool) -> dict[str, str]:
        given = {which: json.dumps(config), "index": "7"}
        return refuse_other_inputs(
            tmp_path, Text, "abc", given, continues=continues, finished=False, plan=False  # type: ignore[arg-type]
        )  # fmt: skip

    assert begun({"eps": 1.0, "old": 1}, continues=False) == {"index": "7"}
    assert begun({"eps": 1.0, "new": 1}, continues=True) == {"index": "7"}
    (tmp_path / which).write_text('{"eps": 1.0}')
    with refused("config of the .* has changed since the training in .* began: eps was 1.0, now 2.0"):
        begun({"eps": 2.0}, continues=True)
    (tmp_path / which).unlink()  # as in checkpoints of an older version
    begun({"eps": 2.0}, continues=True)


def test_folders_in_the_home_folder_are_found(lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    measured = farspan.measure(lm, **WHAT, out="~/run")
    assert measured.folder == tmp_path / "home" / "run"
    assert farspan.open_run("~/run").rows == measured.rows == read_rows("~/run")
    assert measured.save("~/drawn")
    measure_again(read_baseline("~/run"), lm, out="~/again")
    with refused("is the baseline itself"):
        measure_again(read_baseline("~/run"), lm, out="~/run")
    export("~/run", "csv", "~/exported")
    pytest.importorskip("plotly")
    write_report(["~/run"], Path("~/report"))
    assert {path.name for path in (tmp_path / "home").iterdir()} == {"run", "again", "exported", "report", "drawn"}
    training = read_config("smt-demo", SmtSettings, ["out=~/training"])
    assert training.out == str(tmp_path / "home" / "training")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_reports_name_the_configs_that_differ_under_the_same_weights(tmp_path: Path) -> None:
    farspan.measure("demo", **WHAT, out=tmp_path / "run")
    source = read_run(tmp_path / "run")
    about = source.header["models"]["demo"]

    def beside(**more: Any) -> str:
        both = {"demo": about, "copy": {**about, "config": about["config"] | more}}
        (line,) = same_weights([replace(source, header=source.header | {"models": both})])
        return line

    assert beside().endswith("they can differ only by how they were read")
    assert "only by their configs (rms_norm_eps was 1e-06, now 0.5) and by how they" in beside(rms_norm_eps=0.5)
