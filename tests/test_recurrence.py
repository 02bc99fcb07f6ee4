"""Segment-level recurrence: rows that continue, their memory against a naive twin, trainings stopped and repeated."""

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_train import of_a_second
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, AttentionMaskInterface

import farspan
from farspan.stats import MeasuredCurve
from farspan.text.corpora import Corpus, load
from farspan.train.config import read_config
from farspan.train.lm import LmSettings, train
from farspan.train.progress import TrainingWatch
from farspan.train.recurrence import ConsecutiveRows, Recurrence, reading
from farspan.train.trainer import read_log

import tiny
from naive import naive_llama
from tiny import assert_same_weights, configure, nats_by, nats_of, open_lm, refused, same, saved, some_ids, tiny_model

Make = Callable[..., LmSettings]
CONFIGS = Path(__file__).resolve().parents[1] / "configs"
WORDS = [
    "The",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog,",
    "and",
    "what",
    "it",
    "thinks",
    "nobody",
]
TEXT = " ".join(np.random.default_rng(0).choice(WORDS, 800))
SEGMENT = 6
MEMORIES = [0, 4, 6, 15]  # none, shorter than a segment, one, more


# rows


def numbered(size: int) -> Corpus:
    """One document whose tokens count from 1."""
    return Corpus("numbers", "hash", np.arange(1, size + 1, dtype=np.int32), np.array([0, size]))


def test_each_row_continues_that_of_the_step_before() -> None:
    rows = ConsecutiveRows(numbered(299), 10, 3, (0,), seed=0, steps=7)
    samples = [rows[i] for i in range(len(rows))]
    for step in range(7):
        for row in range(3):
            sample, first = samples[step * 3 + row], row * 100 + step * 10
            assert sample["input_ids"].tolist() == list(range(first, first + 10))
            assert sample["labels"].tolist() == list(range(first + 1, first + 11))
            assert (int(sample["row"]), bool(sample["begins"])) == (row, step == 0)


def test_after_its_end_the_text_is_read_from_its_beginning() -> None:
    rows = ConsecutiveRows(numbered(24), 10, 1, (0,), seed=0, steps=3)
    assert rows[2]["input_ids"].tolist() == [20, 21, 22, 23, 24, 0, 1, 2, 3, 4]
    assert rows[2]["labels"].tolist() == [21, 22, 23, 24, 0, 1, 2, 3, 4, 5]


def test_one_pass_reads_no_token_twice() -> None:
    rows = ConsecutiveRows(numbered(65), 10, 2, (0,), seed=0)
    read = torch.cat([rows[i]["input_ids"] for i in range(len(rows))])
    assert sorted(read.tolist()) == [*range(30), *range(33, 63)]


def test_llama_xl_is_llama_83m_with_a_memory_of_one_row() -> None:
    plain, recurrent = (read_config(CONFIGS / f"{name}.toml", LmSettings) for name in ("llama-83m", "llama-xl-83m"))
    assert recurrent.recurrence is not None
    assert recurrent.recurrence.memory == recurrent.trainer.window == 1024
    assert (recurrent.model, recurrent.optimizer) == (plain.model, plain.optimizer)
    others = {"save_every"}
    assert recurrent.trainer.model_dump(exclude=others) == plain.trainer.model_dump(exclude=others)


# the memory


def segments(model: Any, ids: Tensor, segment: int, memory: int) -> Tensor:
    """Logits [batch, time, vocabulary] of one forward over all segments, whose keys and values have no gradient for the
    segments after them."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
        group, parts = q.shape[1] // k.shape[1], []
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        for start in range(0, q.shape[2], segment):
            before, own = slice(max(0, start - memory), start), slice(start, start + segment)
            keys, values = (torch.cat([x[:, :, before].detach(), x[:, :, own]], 2) for x in (k, v))
            scores = q[:, :, own] @ keys.transpose(2, 3) * q.shape[-1] ** -0.5
            later = torch.ones(scores.shape[-2:]).triu(1 + start - before.start)
            parts.append(scores.masked_fill(later.bool(), -torch.inf).softmax(-1) @ values)
        return torch.cat(parts, 2).transpose(1, 2), None

    AttentionInterface.register("segments", attend)
    AttentionMaskInterface.register("segments", lambda *args, **options: None)
    own = model.config._attn_implementation
    try:
        model.set_attn_implementation("segments")
        return model(input_ids=ids, use_cache=False).logits
    finally:
        model.set_attn_implementation(own)
        del AttentionInterface._global_mapping["segments"], AttentionMaskInterface._global_mapping["segments"]


def consecutive(ids: Tensor, segment: int = SEGMENT) -> Iterator[dict[str, Tensor]]:
    """The batches of a training on rows [batch, time + 1]."""
    for start in range(0, ids.shape[1] - 1, segment):
        yield {
            "input_ids": ids[:, start : start + segment],
            "labels": ids[:, start + 1 : start + segment + 1].contiguous(),
            "row": torch.arange(len(ids)),
            "begins": torch.full((len(ids),), start == 0),
        }


@pytest.mark.parametrize("memory", MEMORIES)
def test_losses_and_gradients_are_those_of_a_naive_twin(memory: int) -> None:
    ids = some_ids(2, 5 * SEGMENT + 1)
    ours, twin = tiny_model().train(), tiny_model().train()
    terms = Recurrence(memory)
    losses = [terms(ours, ours, batch)["lm"] for batch in consecutive(ids)]
    torch.stack(losses).sum().backward()

    logits = segments(twin, ids[:, :-1], SEGMENT, memory)
    of_each = [
        cross_entropy(
            logits[:, start : start + SEGMENT].flatten(0, 1), ids[:, start + 1 : start + SEGMENT + 1].flatten()
        )
        for start in range(0, 5 * SEGMENT, SEGMENT)
    ]
    torch.stack(of_each).sum().backward()
    same(torch.stack(losses).detach(), torch.stack(of_each).detach())
    for (name, one), other in zip(ours.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("memory", MEMORIES)
def test_the_method_reads_as_the_training_does(memory: int, tokenizer: Any) -> None:
    lm, ids = open_lm("llama", tokenizer), some_ids(1, 5 * SEGMENT + 1)
    terms = Recurrence(memory)
    with torch.no_grad():
        losses = torch.stack([terms(lm.model, lm.model, batch)["lm"] for batch in consecutive(ids)])
    nats = nats_by(reading(memory, SEGMENT), lm, ids)
    same(nats.view(5, SEGMENT).mean(1), losses)

    def visible(i: int, j: int) -> bool:
        return j >= i // SEGMENT * SEGMENT - memory

    same(nats[0], nats_of(naive_llama(lm.model, ids[0].tolist(), visible, lambda i, j: i - j), ids[0]))


def test_an_evaluation_leaves_the_memory_of_the_training_as_it_is() -> None:
    model, terms = tiny_model(), Recurrence(SEGMENT)
    for batch in consecutive(some_ids(2, SEGMENT + 1)):
        terms(model.train(), model, batch)
    before = [tensor.clone() for pair in terms.carried["0"] for tensor in pair]
    for batch in consecutive(some_ids(2, 2 * SEGMENT + 1, 1)):
        terms(model.eval(), model, batch)
    assert all(torch.equal(a, b) for a, b in zip(before, sum(terms.carried["0"], ()), strict=True))


# trainings


@pytest.fixture
def settings(tmp_path: Path) -> Make:
    """A training of a second with recurrence."""
    made = of_a_second(tmp_path, TEXT)
    return lambda out, *overrides: made(out, "recurrence.memory=24", "trainer.window=16", *overrides)


def test_training_lowers_the_loss_and_the_folder_is_read_as_it_was_trained(settings: Make) -> None:
    chosen, said = settings("a"), list[str]()
    summary = train(chosen, TrainingWatch(notice=said.append))
    log = read_log(Path(chosen.out))
    assert summary["loss"] < log[0]["loss"] - 2
    assert summary["tokens"] == 12 * 4 * 16
    how = "sinks:window=25,sinks=0,stride=16"
    assert summary["reading"] == how
    assert f"--method {how}" in (Path(chosen.out) / "README.md").read_text()
    assert any(how in line for line in said)
    lm = farspan.load(chosen.out, device="cpu")
    assert lm.trained_length == 24 + 16
    nats_by(how, lm, some_ids(1, 60))  # not refused


def test_the_held_out_loss_is_that_of_the_method(settings: Make, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text(TEXT[::-1][: len(TEXT) // 12])
    chosen = settings("a", f"data.held_out={tmp_path / 'b.txt'}", "trainer.micro_batch=1", "trainer.evaluate_every=5")
    summary = train(chosen)
    lm = farspan.load(chosen.out, device="cpu")
    rows = ConsecutiveRows(load(chosen.data.held_out, lm.tokenizer), 16, 1, (0,), 0)
    ids = torch.cat([*(rows[i]["input_ids"] for i in range(len(rows))), rows[len(rows) - 1]["labels"][-1:]])
    nats = nats_by(summary["reading"], lm, ids[None])
    assert summary["held_out_loss"] == pytest.approx(float(nats.mean()), rel=1e-4)


def test_the_memory_changes_the_training_from_the_second_step_on(settings: Make) -> None:
    losses = []
    for memory in (0, 24):
        train(chosen := settings(f"{memory}", f"recurrence.memory={memory}", "trainer.steps=2", "trainer.log_every=1"))
        log = read_log(Path(chosen.out))
        losses.append([entry["loss"] for entry in log if "loss" in entry])
    assert losses[0][0] == losses[1][0]
    assert losses[0][1] != losses[1][1]


def test_a_batch_in_pieces_trains_as_the_whole(settings: Make) -> None:
    losses = [train(settings(f"{n}", f"trainer.micro_batch={n}", "trainer.steps=6"))["loss"] for n in (1, 4)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.fixture
def further(settings: Make, tmp_path: Path) -> Make:
    """A training that goes on with the model of another one: `further("name", "table.key=value", ...)`."""
    train(first := settings("first", "trainer.steps=2"))
    lines = ['out = "?"', "[data]", f"text = {str(tmp_path / 'a.txt')!r}", "[model]", f"start = {first.out!r}"]
    lines += ["[optimizer]", "lr = 1e-4", "warmup_steps = 0", "[trainer]", "steps = 2", "window = 32", "batch = 2"]
    lines += ["micro_batch = 2", "bf16 = false", 'dtype = "float32"', "log_every = 1"]
    (tmp_path / "b.toml").write_text("\n".join(lines))
    return lambda out, *overrides: read_config(tmp_path / "b.toml", LmSettings, [f"out={tmp_path / out}", *overrides])


def test_a_model_is_trained_further_with_its_tokenizer(further: Make) -> None:
    chosen = further("a", "recurrence.memory=64")
    train(chosen)
    first, now = (farspan.load(folder, device="cpu") for folder in (chosen.model.start, chosen.out))
    assert now.tokenizer.get_vocab() == first.tokenizer.get_vocab()
    assert (first.trained_length, now.trained_length) == (40, 96)
    pairs = list(zip(first.model.parameters(), now.model.parameters(), strict=True))
    assert all(0 < (a - b).abs().max() < 1e-2 for a, b in pairs)


def test_a_yarn_without_a_factor_is_trained_further_with_its_frequencies(
    further: Make, tokenizer: Any, tmp_path: Path
) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": None, "original_max_position_embeddings": 20}
    saved(tmp_path / "other", tokenizer, tiny_model(max_position_embeddings=40, rope_parameters=rope))
    chosen = further("a", f"model.start={tmp_path / 'other'}", "recurrence.memory=64")
    train(chosen)
    first, now = (farspan.load(folder, device="cpu") for folder in (chosen.model.start, chosen.out))
    assert (first.trained_length, now.trained_length) == (40, 96)
    one, other = (lm.model.model.rotary_emb for lm in (first, now))
    assert torch.equal(one.inv_freq, other.inv_freq)
    assert one.attention_scaling == other.attention_scaling > 1


def test_a_training_does_not_continue_from_a_base_model_that_has_changed(further: Make) -> None:
    rates = ("optimizer.decay_fraction=0",)  # constant, so that the training can be prolonged
    done, more = (further("a", f"trainer.steps={steps}", *rates) for steps in (2, 4))
    train(done)
    file = Path(str(done.model.start)) / "model.safetensors"
    weights = load_file(file)
    save_file({name: weight + 1 for name, weight in weights.items()}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"the model that is trained has changed since the training in .*/a began"):
        train(more)
    (Path(done.out) / "checkpoints" / "base").unlink()  # as checkpoints of an older farspan
    configure(file.parent, rms_norm_eps=0.5)
    with pytest.raises(ValueError, match=r"config of the model that is trained has changed .* began: rms_norm"):
        train(more)
    (Path(done.out) / "checkpoints" / "base_config").unlink()
    train(more)


def test_a_training_further_stopped_and_repeated_ends_with_the_same_weights(further: Make, counted: list[int]) -> None:
    whole, stopped = (further(out, "trainer.steps=4", "trainer.save_every=2") for out in ("whole", "stopped"))
    train(whole)
    with tiny.interrupted(counted, 4):
        train(stopped)
    train(stopped)
    assert counted[0] == 2
    assert_same_weights(stopped, whole)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.hidden=64", "tokenizer.vocabulary=300"], r"leave out model\.hidden, tokenizer\.vocabulary"),
        (["model.start=nothing/here"], "nothing/here"),
    ],
)
def test_a_start_that_cannot_be_used_is_refused(further: Make, overrides: list[str], message: str) -> None:
    with refused(message):
        train(further("a", *overrides))


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("gpt_neox", {}, "is a GPTNeoXForCausalLM: expected a LlamaForCausalLM"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "depends on the length",
        ),
    ],
)
def test_a_start_of_another_kind_is_refused(
    further: Make, architecture: str, changes: Any, message: str, tokenizer: Any, tmp_path: Path
) -> None:
    saved(tmp_path / "other", tokenizer, tiny_model(architecture, **changes))
    with pytest.raises(ValueError, match=message):
        train(further("a", f"model.start={tmp_path / 'other'}"))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_training_stopped_and_repeated_ends_with_the_same_weights(
    settings: Make, workers: int, counted: list[int]
) -> None:
    whole, stopped = (settings(out, f"trainer.workers={workers}") for out in ("whole", "stopped"))
    train(whole)
    with tiny.interrupted(counted, 13):  # in step 7; a checkpoint was saved after step 4, 8 forwards
        train(stopped)
    train(stopped)
    assert counted[0] == 2 * 12 - 8
    assert_same_weights(stopped, whole)


def test_a_checkpoint_without_its_memory_is_named(settings: Make) -> None:
    chosen = settings("a", "trainer.steps=4")
    train(chosen)
    file = Path(chosen.out) / "checkpoints" / "checkpoint-4" / "carried.pt"
    file.unlink()
    with pytest.raises(ValueError, match=r"checkpoint-4.carried\.pt is damaged.*Delete the folder"):
        train(settings("a", "trainer.steps=8"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.activation_checkpointing=true"], r"activation_checkpointing = true keeps no keys for the memory"),
        (["trainer.window=500"], r"has \d,\d+ tokens, and 4 consecutive rows of 500 need more than 2,000"),
        (["trainer.engine=ddp"], "there is only one"),
    ],
)
def test_impossible_settings_are_refused_before_the_first_step(
    settings: Make, overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.Trainer, "training_step", lambda *_: 1 / 0)
    with refused(message):
        train(settings("a", *overrides))


def test_a_shuffled_text_is_refused(settings: Make, tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    text = f"data.text=shuffled:{tmp_path / 'a.txt'}"
    with pytest.raises(ValueError, match="is shuffled: training needs its own order"):
        train(settings("a", text, f"tokenizer={{folder={str(tmp_path / 'tokenizer')!r}}}"))


@pytest.mark.parametrize("memory", ["-1", "true", "many"])
def test_an_impossible_memory_is_named(settings: Make, memory: str) -> None:
    with pytest.raises(ValueError, match=r"recurrence\.memory: "):
        settings("a", f"recurrence.memory={memory}")


def test_several_processes_are_refused(settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"trains in one process.*1 processes and 2 GPUs"):
        train(settings("a"))


# benchmarks/llama_xl.py

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
llama_xl: Any = importlib.import_module("llama_xl")


def test_a_ratio_has_the_degrees_of_freedom_of_the_texts_that_were_measured() -> None:
    lengths, texts = np.array([64, 128, 256]), np.full((4, 3), "text")
    rng = np.random.default_rng(0)
    control = np.full((4, 3), 0.1)
    few = [
        MeasuredCurve(lengths, lengths, high + rng.uniform(0, 0.2, (4, 3)), control, {}, lengths, texts)
        for high in (0.5, 0.6)
    ]
    more = np.full((9, 3), np.nan)  # texts of which only a half was measured
    with_halves = [
        replace(
            one,
            copy=np.concatenate([one.copy, more]),
            control=np.concatenate([control, more]),
            targets=np.full((13, 3), "text"),
        )
        for one in few
    ]
    found, expected = (np.log(llama_xl.ratio([a], [b], "span")) for a, b in (with_halves, few))
    assert found[0] == pytest.approx(expected[0])
    assert found[2] - found[1] == pytest.approx(expected[2] - expected[1], rel=0.05)


def test_the_tables_of_the_page_are_those_of_the_recorded_rows() -> None:
    """After new rows: python benchmarks/llama_xl.py --record."""
    found, seeds = llama_xl.found_in(llama_xl.ROWS)
    assert seeds == 3
    assert llama_xl.page(found) == llama_xl.PAGE.read_text()


def test_the_recorded_rows_meet_every_bound() -> None:
    assert llama_xl.judged(*llama_xl.found_in(llama_xl.ROWS))[1] == []
