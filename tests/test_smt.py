"""`farspan train smt` as a whole: it learns, stops and continues, keeps what it must, and its folder is a model."""

import json
import math
import runpy
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import farspan
from farspan.cli import app
from farspan.methods import method
from farspan.methods.rope import scaled, truncated
from farspan.record import environment
from farspan.report import training
from farspan.report.training import draw_smt_losses, last_of_each_length
from farspan.train import engines
from farspan.train.config import read_config
from farspan.train.progress import TrainingWatch
from farspan.train.smt import SmtSettings, notes_on_rope, opened, rows_of, scale_rope, train
from farspan.train.temperature import check_scaling
from farspan.train.terms_trainer import TermsTrainer
from farspan.train.trainer import read_log

import tiny
from tiny import assert_same_weights, close, nats_by, open_lm, refused, saved, some_ids, tiny_model, weights

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SENTENCE = "The quick brown fox jumps over the lazy dog, and what number {} thinks of it nobody has asked. "
LINES = """
out = "?"
[model]
name = "?"
window = 32
[data]
text = "?"
[lengths]
target = 128
[optimizer]
lr = 1e-2
warmup_steps = 1
[trainer]
steps = 12
batch = 2
micro_batch = 2
bf16 = false
dtype = "float32"
log_every = 2
save_every = 4
[watch]
every = 0
"""
Make = Callable[..., SmtSettings]


@pytest.fixture
def settings(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Make:
    """A training of a second: `settings("name", "table.key=value", ...)`, in the folder of that name."""
    saved(tmp_path / "model", tokenizer)
    for number in range(3):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / f"{number}.txt").write_text("".join(SENTENCE.format(number * i) for i in range(12)))
    (tmp_path / "a.toml").write_text(LINES)
    common = [f"model.name={tmp_path / 'model'}", f"data.text={tmp_path / 'text'}"]

    def made(out: str, *overrides: str) -> SmtSettings:
        return read_config(tmp_path / "a.toml", SmtSettings, [f"out={tmp_path / out}", *common, *overrides])

    return made


def losses(settings: SmtSettings) -> list[tuple[int, float]]:
    log = read_log(Path(settings.out))
    return [(entry["step"], entry["loss"]) for entry in log if "loss" in entry]


def test_training_lowers_both_losses_and_moves_queries_and_keys_alone(settings: Make, tmp_path: Path) -> None:
    chosen = settings("a", "trainer.steps=24")
    train(chosen)
    log = read_log(tmp_path / "a")
    log = [entry for entry in log if "loss" in entry]
    for term in ("loss_sparse", "loss_window"):
        assert log[-1][term] < log[0][term] - 0.2
    assert all(entry["loss"] == pytest.approx(entry["loss_sparse"] + entry["loss_window"], abs=1e-3) for entry in log)
    assert (log[0]["length"], log[-1]["length"]) == (48, 128)
    before, after = load_file(tmp_path / "model" / "model.safetensors"), weights(chosen)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "q_proj" in name or "k_proj" in name}


def test_beta_weighs_the_window(settings: Make) -> None:
    found = []
    for beta in (1.0, 0.0):
        chosen = settings(f"{beta}", f"smt.beta={beta}", "trainer.steps=2", "optimizer.lr=1e-9", "lengths.mode=fixed")
        train(chosen)
        entry = read_log(Path(chosen.out))[0]
        found.append(entry)
    assert found[0]["loss"] == pytest.approx(found[0]["loss_sparse"] + found[0]["loss_window"], abs=1e-3)
    assert found[1]["loss"] == pytest.approx(found[1]["loss_sparse"], abs=1e-3)


@pytest.mark.parametrize("mixed", ["alternate", "off"])
def test_the_window_can_be_read_in_turns_or_not_at_all(settings: Make, mixed: str) -> None:
    chosen = settings("a", f"smt.mixed={mixed}", "trainer.steps=6", "lengths.by=48")
    train(chosen)
    entry = read_log(Path(chosen.out))[0]
    assert ("loss_window" in entry, "loss_sparse" in entry) == (mixed == "alternate", True)


@pytest.mark.parametrize("draw", ["uniform", "spans:span=4", "pose", "skip", "random", "full"])
def test_every_draw_trains(settings: Make, draw: str) -> None:
    summary = train(settings("a", f"smt.draw={draw}", "trainer.steps=6", "lengths.by=48"))
    assert math.isfinite(summary["loss"])


@pytest.mark.parametrize("draw", ["sparse", "full"])
def test_a_batch_in_pieces_trains_as_the_whole(settings: Make, tmp_path: Path, draw: str) -> None:
    """Also where its rows differ in their number of targets."""
    for number in range(9):
        (tmp_path / "text" / f"short{number}.txt").write_text("once more, " * 6 + str(number))
    how = f"smt.draw={draw}", "data.short=use", "lengths.mode=fixed", "trainer.batch=4", "optimizer.clip=1000"
    one, other = (settings(f"{n}", f"trainer.micro_batch={n}", *how) for n in (1, 4))
    train(one)
    train(other)
    for (step, a), (_, b) in zip(losses(one), losses(other), strict=True):
        assert a == pytest.approx(b, rel=1e-4), step
    after = weights(other)
    for name, weight in weights(one).items():
        torch.testing.assert_close(weight, after[name], rtol=0, atol=2e-4)


def test_a_batch_in_pieces_with_less_than_a_label_each_trains_as_the_whole(settings: Make) -> None:
    how = "smt.targets=1", "smt.mixed=off", "lengths.mode=fixed", "trainer.batch=4", "trainer.log_every=1"
    one, whole = (settings(f"{n}", f"trainer.micro_batch={n}", *how, "trainer.steps=4") for n in (1, 4))
    train(one)
    train(whole)
    assert [loss for _, loss in losses(one)] == pytest.approx([loss for _, loss in losses(whole)], rel=1e-4)


def test_a_trained_folder_is_a_model_like_any_other(settings: Make, tmp_path: Path, drawn: None) -> None:
    chosen = settings("a", "trainer.steps=6", "lengths.by=48")
    summary = train(chosen)
    lm = farspan.load(chosen.out, device="cpu")
    assert (lm.trained_length, lm.model.config.use_cache) == (512, True)  # as before: the target is shorter
    plain = transformers.AutoModelForCausalLM.from_pretrained(chosen.out)
    assert plain.state_dict().keys() == tiny_model().state_dict().keys()
    card = (tmp_path / "a" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "# model, extended to 128 tokens" in card
    assert str(tmp_path) not in card
    record = json.loads((tmp_path / "a" / "training.json").read_text())
    assert record == json.loads(json.dumps(summary))
    assert {"settings", "packages", "git", "trained", "text", "from", "seconds", "rows"} <= record.keys()
    assert (record["rows"], record["trained"]) == (12, 2 * (32 * 32 + 16 * 32))
    assert (tmp_path / "a" / "losses.png").stat().st_size > 10_000


def test_a_model_trained_in_bf16_has_fp32_updates(settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[torch.dtype] = set()
    original = TermsTrainer.compute_loss

    def compute_loss(trainer: Any, model: Any, *others: Any, **named: Any) -> Tensor:
        seen.update(p.dtype for p in model.parameters())
        seen.update(s.dtype for state in trainer.optimizer.optimizer.state.values() for s in state.values())
        return original(trainer, model, *others, **named)

    monkeypatch.setattr(TermsTrainer, "compute_loss", compute_loss)
    chosen = settings("a", "trainer.bf16=true", "trainer.dtype=bfloat16", "trainer.steps=6", "lengths.by=48")
    train(chosen)
    assert seen == {torch.float32}
    assert {weight.dtype for weight in weights(chosen).values()} == {torch.bfloat16}


def test_activations_are_computed_again_where_they_are_not_kept(
    settings: Make, trained_computing_again: Callable[..., None]
) -> None:
    trained_computing_again(train, settings, weights)


def test_queries_of_rows_of_two_lengths_are_scaled_again_by_their_own_positions(
    settings: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    saved(tmp_path / "model", tokenizer, tiny_model(max_position_embeddings=32))  # beyond which queries are scaled
    found = []
    for again in ("false", "true"):
        how = "smt.draw=full", "model.temperature=learned", f"trainer.activation_checkpointing={again}"
        chosen = settings(again, *how, "model.window=32", "trainer.steps=6", "lengths.by=48")
        train(chosen)
        found.append([loss for _, loss in losses(chosen)])
    assert found[0] == pytest.approx(found[1])


def test_the_parameters_of_a_model_trained_by_lora_are_those_that_are_saved(settings: Make) -> None:
    chosen = settings("a", "trained.what=lora", "trainer.steps=6", "lengths.by=48")
    assert train(chosen)["parameters"] == sum(value.numel() for value in weights(chosen).values())


def test_workers_change_nothing(settings: Make) -> None:
    one, other = settings("one"), settings("other", "trainer.workers=2")
    train(one)
    train(other)
    assert_same_weights(one, other)


# RoPE


@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn"])
def test_scaled_rope_is_trained_with_and_stays_in_the_model(settings: Make, kind: str) -> None:
    chosen = settings("a", f"model.rope=rope:type={kind},factor=4", "trainer.steps=6", "lengths.by=48")
    inv_freq, scale = scaled(kind, 10_000.0, 8, 4.0, 512)
    rotary = opened(chosen).model.model.rotary_emb
    torch.testing.assert_close(rotary.inv_freq, inv_freq, rtol=1e-6, atol=0)
    assert rotary.attention_scaling == pytest.approx(scale)
    train(chosen)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(chosen.out).model.rotary_emb
    torch.testing.assert_close(loaded.inv_freq, inv_freq, rtol=1e-6, atol=0)
    assert loaded.attention_scaling == pytest.approx(scale)


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": None, "original_max_position_embeddings": 32}


def test_a_yarn_without_a_factor_keeps_its_frequencies_in_the_model(
    settings: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    chosen = settings("a", "trainer.steps=1", "lengths.mode=fixed")
    saved(tmp_path / "model", tokenizer, tiny_model(max_position_embeddings=64, rope_parameters=YARN))
    before = opened(chosen).model.model.rotary_emb
    train(chosen)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(chosen.out)
    assert loaded.config.max_position_embeddings == 128
    assert torch.equal(loaded.model.rotary_emb.inv_freq, before.inv_freq)
    assert loaded.model.rotary_emb.attention_scaling == before.attention_scaling > 1


def test_pairs_cut_from_rope_stay_cut_in_the_model(settings: Make) -> None:
    chosen = settings("a", "model.rope=rope:type=truncated,turns=4", "trainer.steps=6", "lengths.by=48")
    expected = truncated(10_000.0, 8, 4.0, 512)
    assert 0 < (expected == 0).sum() < len(expected)
    train(chosen)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(chosen.out).model.rotary_emb
    torch.testing.assert_close(loaded.inv_freq, expected, rtol=1e-6, atol=0)
    assert loaded.attention_scaling == 1.0


@pytest.mark.parametrize("family", ["gpt_neox", "glm", "phi"])
def test_pairs_are_not_cut_where_only_a_part_of_each_head_rotates(
    family: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ValueError, match=r"rotates a part of each head.*: use rope:type=linear, ntk or yarn"):
        scale_rope(open_lm(family, tokenizer), "rope:type=truncated,original=64", 2048)


@pytest.mark.parametrize("kind", ["linear,factor=4", "yarn,factor=4", "ntk,factor=4"])
def test_a_rope_that_the_model_cannot_be_saved_with_is_refused_before_the_training(
    kind: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    lm = open_lm("phi3", tokenizer)  # its config allows `default` and `longrope` alone
    with nullcontext() if kind.startswith("ntk") else pytest.raises(ValueError, match="cannot be saved with such a"):
        scale_rope(lm, f"rope:type={kind}", 2048)
        lm.model.save_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["linear,factor=4", "ntk,factor=4", "yarn,factor=4", "truncated,turns=4"])
def test_where_sliding_layers_have_a_rope_of_their_own_only_that_of_the_others_is_scaled(
    kind: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    lm, ids = open_lm("gemma3", tokenizer), some_ids(1, 90)
    before, expected = nats_by("full", lm, ids), nats_by(f"rope:type={kind}", lm, ids)
    sliding = lm.model.config.rope_parameters["sliding_attention"]
    scale_rope(lm, f"rope:type={kind}", 2048)
    close(nats_by("full", lm, ids), expected)
    assert (expected - before).abs().max() > 1e-3
    assert lm.model.config.rope_parameters["sliding_attention"] == sliding
    lm.model.save_pretrained(tmp_path)
    lm = replace(lm, model=transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    close(nats_by("full", lm, ids), expected)


def test_a_model_trained_with_temperature_computes_what_the_method_reads(settings: Make) -> None:
    longer = "lengths.target=1024"
    scaled_lm, plain_lm = (opened(settings("a", f"model.temperature={on}", longer)) for on in ("true", "false"))
    ids = torch.arange(3, 700)[None] % plain_lm.vocabulary
    with torch.no_grad():
        expected = scaled_lm.model(ids).logits
        without = plain_lm.model(ids).logits
    with method("temperature").on(plain_lm) as reader:
        memory = reader.read(ids[:, :1])
        found = memory.score(ids[:, 1:]).nats
    targets = -torch.log_softmax(expected[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.as_tensor(found[0]), targets, atol=1e-4, rtol=0)
    assert (expected - without)[:, :512].abs().max() < 1e-5 < (expected - without)[:, 600:].abs().max()


@pytest.mark.parametrize("on", ["true", "learned"])
def test_log_n_scaling_without_effect_is_refused(settings: Make, on: str) -> None:
    with pytest.raises(ValueError, match=r"model\.temperature has no effect up to the trained length of 512 tokens"):
        opened(settings("a", f"model.temperature={on}", "lengths.target=512"))


@pytest.mark.parametrize("family", ["qwen3", "gpt_neox", "opt", "hunyuan"])
def test_queries_that_cannot_be_scaled_are_refused(family: str, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="scales queries after their projection"):
        check_scaling(open_lm(family, tokenizer))


@pytest.mark.parametrize("family", ["llama", "phi", "cohere", "gemma2"])
def test_checked_models_are_left_as_they_were(family: str, tokenizer: PreTrainedTokenizerFast) -> None:
    lm, ids = open_lm(family, tokenizer), some_ids(1, 90)
    before = lm.model(ids).logits
    check_scaling(lm)
    assert torch.equal(lm.model(ids).logits, before)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.rope=rope:type=truncated,turns=0"], "every pair rotates 0 times in 512 tokens: none is cut"),
        (["model.rope=rope:type=dynamic"], "is not supported: expected rope:type=linear, ntk or yarn"),
        (["model.rope=sinks:window=20,sinks=4"], "is not supported: expected rope:type=linear, ntk or yarn"),
        (["trainer.batch=3"], r"trainer\.batch = 3 is not a multiple of trainer\.micro_batch x processes = 2"),
        (["lengths.target=100000"], "needs trainer.steps >= .*: got 12"),
        (["lengths.target=100000", "lengths.mode=fixed"], "no document of 100,000 tokens"),
        (["smt.draw=sparse:window=3"], "window = 3 cannot hold"),
        (["smt.draw=pose:chunks=40"], "40 chunks do not fit into a row of 32 tokens"),
        (["smt.draw=decoys:share=0.01"], "largest = 128 tokens do not fit into half a row of 32 tokens"),
        (["trainer.engine=ddp"], 'trainer.engine = "ddp" distributes a training over processes, but there is only one'),
        (["trainer.engine=fsdp2"], 'trainer.engine = "fsdp2" distributes a training over processes'),
        (["trained.what=patterns"], "trained.patterns is empty"),
    ],
)
def test_impossible_settings_are_refused_before_any_step(
    settings: Make, overrides: list[str], message: str, counted: list[int], tmp_path: Path
) -> None:
    with refused(message):
        train(settings("a", *overrides))
    assert counted[0] == 0
    assert not (tmp_path / "a" / "log.jsonl").exists()


def test_deepspeed_that_is_not_installed_is_named(settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ValueError, match="this needs the package deepspeed"):
        train(settings("a", "trainer.engine=deepspeed"))


@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed"])
def test_an_optimizer_of_whole_matrices_is_refused_where_they_are_cut(settings: Make, engine: str) -> None:
    with pytest.raises(ValueError, match=f"needs whole matrices, and {engine} splits them"):
        train(settings("a", f"trainer.engine={engine}", "optimizer.name=muon"))


def test_an_engine_that_is_not_in_use_ends_the_training(settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farspan.train.engines.refuse_unfit", lambda *given: None)  # as under a launcher
    monkeypatch.setattr("farspan.train.engines.shard", lambda *given: None)
    with pytest.raises(ValueError, match=r'trainer\.engine = "fsdp2" was requested, but single is in use'):
        train(settings("a", "trainer.engine=fsdp2"))


def test_another_stage_of_zero_is_another_engine() -> None:
    trainer = SimpleNamespace(model_wrapped=SimpleNamespace(zero_optimization_stage=lambda: 3))
    with pytest.raises(ValueError, match=r"was requested, but DeepSpeed ZeRO-3 is in use"):
        engines.refuse_other("deepspeed", trainer)
    with pytest.raises(ValueError, match=r"DeepSpeed ZeRO-3 is in use"):
        engines.refuse_other("auto", trainer)


def test_weights_that_deepspeed_has_rounded_are_not_saved_as_if_they_were_not() -> None:
    engines.refuse_rounding(True, torch.bfloat16)
    engines.refuse_rounding(False, torch.float32)
    with pytest.raises(ValueError, match="dtype of the saved weights is float32"):
        engines.refuse_rounding(True, torch.float32)


# stopped and repeated


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_training_stopped_and_repeated_ends_with_the_same_losses_and_weights(
    settings: Make, counted: list[int], family: str, tmp_path: Path
) -> None:
    tiny_model(family).save_pretrained(tmp_path / "model")
    whole, stopped = settings("whole"), settings("stopped")
    train(whole)
    with tiny.interrupted(counted, 7):  # in step 7; a checkpoint was saved after step 4
        train(stopped)
    train(stopped)
    assert counted[0] == 8
    assert losses(stopped) == losses(whole)
    assert_same_weights(stopped, whole)


def test_a_training_that_was_killed_continues_to_the_same_losses(
    settings: Make, counted: list[int], left_by_a_kill: Callable[..., None]
) -> None:
    whole, killed = settings("whole"), settings("killed")
    left_by_a_kill(TermsTrainer, "training_step", whole, killed, at=7)
    assert [one["first_step"] for one in train(whole)["sessions"]] == [1]
    assert sorted(path.name for path in Path(killed.out, "checkpoints").glob("checkpoint-*")) == ["checkpoint-4"]
    counted[0] = 0
    sessions = train(killed)["sessions"]
    assert counted[0] == 8
    assert [one.pop("first_step") for one in sessions] == [1, 5]
    assert sessions == [environment()] * 2
    assert losses(killed) == losses(whole)
    assert_same_weights(killed, whole)


def test_a_finished_training_that_is_repeated_keeps_what_it_recorded(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = "trainer.steps=6", "lengths.mode=fixed", "optimizer.decay_fraction=0"
    before = train(settings("a", *how))
    monkeypatch.setattr("farspan.train.smt.environment", lambda: {"threads": 99})
    again = train(settings("a", *how, "trainer.log_every=1"))
    assert again == before | {"settings": again["settings"]}
    assert again == json.loads((tmp_path / "a" / "training.json").read_text())
    assert again["settings"]["trainer"]["log_every"] == 1
    assert train(settings("a", *how, "trainer.steps=8"))["threads"] == 99


def test_a_training_is_not_continued_with_steps_that_would_have_changed_its_lengths(
    settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(done := settings("a", "trainer.steps=6", "lengths.by=48"))
    with monkeypatch.context() as patch:
        patch.setattr("farspan.train.smt.read_corpus", None)  # refused before the text is read
        with pytest.raises(
            ValueError, match=r"steps = 12 cannot continue .* 6 steps, since the lengths of documents depend"
        ):
            train(settings("a", "trainer.steps=12", "lengths.by=48"))
    assert json.loads((Path(done.out) / "settings.json").read_text())["trainer"]["steps"] == 6
    same = settings("b", "trainer.steps=6", "lengths.by=48", "lengths.every=2")
    train(same)
    assert train(settings("b", "trainer.steps=8", "lengths.by=48", "lengths.every=2"))["loss"] > 0


def test_a_folder_is_not_continued_with_other_settings(settings: Make) -> None:
    train(settings("a", "trainer.steps=6", "lengths.by=48"))
    with pytest.raises(ValueError, match=r"smt\.beta was 1\.0, now 0\.5"):
        train(settings("a", "trainer.steps=6", "lengths.by=48", "smt.beta=0.5"))


# what it says


def test_a_training_watches_itself_without_noticing(settings: Make, tmp_path: Path) -> None:
    held_out = tmp_path / "held-out.txt"
    held_out.write_text("".join(SENTENCE.format(f"{i} of {i * i}") for i in range(90)))
    watch = ["watch.every=6", f"watch.text={held_out}", "watch.repeats=2", "watch.tokens=6000"]
    unwatched, watched = settings("unwatched"), settings("watched", *watch)
    train(unwatched)
    train(watched)
    assert_same_weights(watched, unwatched)
    assert losses(watched) == losses(unwatched)
    log = read_log(tmp_path / "watched")
    measured = {entry["step"]: entry for entry in log if "farspan/perplexity_32" in entry}
    assert sorted(measured) == [0, 6, 12]
    names = {f"farspan/{what}_{n}" for what in ("perplexity", "accuracy") for n in (16, 32, 64, 128)}
    assert names <= measured[12].keys()
    assert [entry["step"] for entry in log if "farspan/half_life" in entry] == [0, 6, 12]
    rows = farspan.read_rows(tmp_path / "watched" / "perplexity")
    nats = [row.scores["nats"] for row in rows if (row.model, row.length) == ("step-12", 128)]
    assert len(nats) == 2
    assert measured[12]["farspan/perplexity_128"] == pytest.approx(math.exp(sum(nats) / 2), abs=1e-3)
    card = (tmp_path / "watched" / "README.md").read_text()
    assert f"\nHeld-out text ({held_out}), the same tokens" in card
    assert "| 128 |" in card
    assert max(row.length for row in farspan.read_rows(tmp_path / "watched" / "farspan")) == 56


@pytest.mark.parametrize("shuffled", ["", "shuffled:"])
def test_a_text_that_is_trained_on_is_not_called_held_out(settings: Make, tmp_path: Path, shuffled: str) -> None:
    (tmp_path / "copy").symlink_to(tmp_path / "text")
    text, lines = f"{shuffled}{tmp_path / 'copy'}", list[str]()
    watch = f"watch.text={text}", "watch.every=2", "watch.repeats=2", "watch.curve=false", "watch.lengths=[16,32]"
    chosen = settings("a", "trainer.steps=2", "lengths.mode=fixed", *watch)
    assert train(chosen, TrainingWatch(notice=lines.append))["measured_on_training_text"]
    assert f"watch.text = {text!r} is the text that is trained on: it is not measured on held-out text" in lines
    card = (tmp_path / "a" / "README.md").read_text()
    assert f"\nText of the training, in whole or in part ({text}), the same tokens" in card


@pytest.mark.parametrize("short", ["skip", "join"])
def test_documents_that_are_trained_on_are_not_called_held_out(settings: Make, tmp_path: Path, short: str) -> None:
    documents = [(tmp_path / "text" / "1.txt").read_text(), "A text that nothing else holds, as far as is known. " * 30]
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": one}) + "\n" for one in documents))
    lines = list[str]()
    watch = f"watch.text={other}", "watch.every=2", "watch.repeats=2", "watch.curve=false", "watch.lengths=[16,32]"
    chosen = settings("a", "trainer.steps=2", "lengths.mode=fixed", f"data.short={short}", *watch)
    assert train(chosen, TrainingWatch(notice=lines.append))["measured_on_training_text"]
    [line] = [line for line in lines if line.startswith(f"watch.text = '{other}'")]
    share = int(line.partition(" has ")[2].partition("%")[0])
    assert 20 < share < 80
    assert line.endswith("of its tokens in documents that are trained on: it is not measured on held-out text")


def test_the_losses_of_each_length_end_where_it_does(tmp_path: Path, drawn: None) -> None:
    log = [{"step": s, "length": n, "loss_sparse": math.log(p)} for s, n, p in [(1, 8, 9), (2, 8, 5), (3, 16, 4)]]
    assert last_of_each_length(log, "loss_sparse") == pytest.approx({8: 5, 16: 4})
    assert [path.name for path in draw_smt_losses(log, tmp_path, 8)] == ["losses.png", "losses.svg"]
    assert draw_smt_losses([{"step": 1, "loss": 3.0}], tmp_path, 8) == []


@pytest.mark.parametrize(("mode", "every", "by_length"), [("cover", 2, False), ("cover", 1, True), ("fixed", 2, True)])
def test_a_mean_over_steps_of_several_lengths_is_not_drawn_as_of_one(
    mode: str, every: int, by_length: bool, settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []

    def noted(rows: list[list[Any]], *given: Any, **how: Any) -> None:
        titles.extend(figure.title for figures in rows for figure in figures if figure is not None)

    monkeypatch.setattr(training, "draw_grid", noted)
    train(settings("a", f"lengths.mode={mode}", f"trainer.log_every={every}"))
    assert "Training perplexity" in titles
    assert ("Training perplexity at the end of each length" in titles) == by_length


def test_the_command_says_what_it_trains_and_ends_with_json(settings: Make, tmp_path: Path) -> None:
    chosen = settings("a")
    overrides = [f"out={chosen.out}", f"model.name={chosen.model.name}", f"data.text={chosen.data.text}"]
    options = [part for override in overrides for part in ("--set", override)]
    done = CliRunner().invoke(app, ["train", "smt", str(tmp_path / "a.toml"), *options, "--json"])
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["trained"] == 3072
    assert "3,072 of 37,792 parameters are trained (8.13%)" in done.stderr
    assert "each about" in done.stderr


def test_a_plan_says_what_would_be_trained_and_trains_nothing(settings: Make, tmp_path: Path) -> None:
    chosen = settings("a")
    overrides = [f"out={chosen.out}", f"model.name={chosen.model.name}", f"data.text={chosen.data.text}"]
    options = [part for override in overrides for part in ("--set", override)]
    done = CliRunner().invoke(app, ["train", "smt", str(tmp_path / "a.toml"), *options, "--plan", "--json"])
    assert done.exit_code == 0, done.output
    lines = json.loads(done.stdout.splitlines()[-1])["plan"]
    assert "6 lengths from 48 to 128 tokens in 12 steps" in lines
    assert "at most 128 tokens a step are read, about 1,536 in all" in lines
    assert not (tmp_path / "a").exists()
    warm = ["--set", "optimizer.warmup_steps=13", "--plan"]
    done = CliRunner().invoke(app, ["train", "smt", str(tmp_path / "a.toml"), *options, *warm])
    assert (done.exit_code, "optimizer.warmup_steps = 13 and a decay" in done.output) == (2, True)


@pytest.mark.parametrize(("factor", "named"), [(2, True), (8, False)])
def test_a_rope_that_is_scaled_to_fewer_tokens_than_the_target_is_named(factor: int, named: bool) -> None:
    chosen = SmtSettings.model_validate(
        {
            "out": "a",
            "model": {"name": "demo", "rope": f"rope:type=yarn,factor={factor}"},
            "data": {"text": "builtin"},
            "lengths": {"target": 4096},
            "trainer": {"steps": 20},
        }
    )
    lines = list(notes_on_rope(chosen, 512))
    assert len(lines) == named
    assert all("scales positions to 1,024 tokens" in one and "factor=8 covers" in one for one in lines)


@pytest.mark.parametrize("mixed", ["concat", "alternate"])
def test_a_plan_counts_the_tokens_of_all_lengths(settings: Make, mixed: str) -> None:
    chosen = settings("a", "smt.draw=full", f"smt.mixed={mixed}")
    samples = rows_of(opened(chosen), chosen)
    read = sum(len(row["input_ids"]) for number in range(len(samples)) for row in samples[number].values())
    lines: list[str] = []
    train(chosen, TrainingWatch(notice=lines.append, plan=True))
    assert any(f"about {read:,} in all" in line for line in lines)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (("trainer.batch=3", "trainer.micro_batch=2"), "is not a multiple of trainer.micro_batch"),
        (("trainer.report_to=['nonsense']",), "trainer.report_to"),
        (("watch.text=no-such-text.txt", "watch.every=2"), "no-such-text"),
    ],
)
def test_a_plan_refuses_what_the_training_refuses(settings: Make, change: tuple[str, ...], error: str) -> None:
    for plan in (True, False):
        with pytest.raises(ValueError, match=error):
            train(settings("a", *change), TrainingWatch(plan=plan))


def test_the_config_of_a_recipe_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    path = CONFIGS.parent / "benchmarks" / "smt_extend.py"
    monkeypatch.syspath_prepend(path.parent)  # as for a script that is run: its neighbours can be imported
    names = runpy.run_path(str(path))
    overrides = [*names["COMMON"], *names["RECIPES"]["yarn-repeat"], "out='?'", "trainer.steps=300"]
    expected = read_config(CONFIGS / "smt-demo.toml", SmtSettings, [*overrides, "optimizer.warmup_steps=0.1"])
    given = read_config(CONFIGS / "smt-memory.toml", SmtSettings, ["out='?'", "watch.every=0"])
    left_to_the_machine = {"attention": expected.trainer.attention, "save_every": expected.trainer.save_every}
    trainer = given.trainer.model_copy(update=left_to_the_machine)
    assert given.model_copy(update={"trainer": trainer}) == expected


def test_the_kept_rows_are_those_of_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = CONFIGS.parent / "benchmarks" / "smt_extend.py"
    monkeypatch.syspath_prepend(path.parent)
    names = runpy.run_path(str(path))
    page, found = path.with_suffix(".md").read_text(), names["recorded_models"]()
    lines = {line.split(" | ")[0]: line for table in names["perplexity_tables"](found) for line in table.splitlines()}
    for name in ("base", "smt", "smt + streaming", "yarn-repeat", "unmixed"):
        assert lines[f"| {name}"] in page.replace("**", ""), name
    names["against_yarn"](names["recorded_pairs"]())
    assert capsys.readouterr().out.strip() in page


@pytest.mark.parametrize("family", ["bloom", "mamba"])
def test_models_without_positions_are_refused_with_the_reason(settings: Make, family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="it has no argument position_ids, so a row cannot have gaps"):
        train(settings("a"))


def test_the_defaults_are_those_of_the_paper() -> None:
    paper = read_config(CONFIGS / "smt-llama-2-7b.toml", SmtSettings)
    assert (paper.optimizer.lr, paper.optimizer.name, paper.smt.beta, paper.trainer.micro_batch) == (
        1e-5,
        "adamw",
        1,
        1,
    )
    assert (paper.lengths.target, paper.lengths.every, paper.trainer.steps) == (65536, 1000, 30_000)
    assert (paper.trained.what, paper.smt.draw, paper.smt.mixed) == ("qk", "sparse", "concat")
    assert (paper.trainer.bf16, paper.trainer.engine, paper.trainer.micro_batch) == (True, "deepspeed", 1)


def test_rows_shorter_than_the_window_leave_the_trained_length_as_it_is(settings: Make) -> None:
    chosen = settings("a", "model.rope=rope:type=yarn,factor=2")
    lm = opened(chosen)
    assert lm.trained_length == 512
    assert lm.model.config.rope_parameters["original_max_position_embeddings"] == 512
    assert rows_of(lm, chosen).row == 32
