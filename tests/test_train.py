"""Pre-training: its config, optimizer, rows, and that a training stopped and repeated ends as if it was not."""

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerState

import farspan
import farspan.train.lm
from farspan.report import progress
from farspan.terminal import Terminal
from farspan.text.corpora import Corpus, load
from farspan.train import checkpoint, engines
from farspan.train.batches import PackedRows, train_tokenizer
from farspan.train.cepe import CepeSettings
from farspan.train.checkpoint_trainer import CheckpointTrainer
from farspan.train.config import RECIPES, read_config, settings_of
from farspan.train.distill import DistillSettings
from farspan.train.lm import LmSettings, train
from farspan.train.mlm import MlmSettings
from farspan.train.optimizer import Muon, OptimizerSettings, Together, build, warmup_and_decay
from farspan.train.progress import Steps, TrainingWatch
from farspan.train.settings import PretrainingSettings
from farspan.train.smt import SmtSettings
from farspan.train.trainer import read_log

from tiny import assert_same_weights, interrupted, tiny_config, tiny_model, weights

Make = Callable[..., LmSettings]
CONFIGS = Path(__file__).resolve().parents[1] / "configs"
TEXT = "The quick brown fox jumps over the lazy dog, and what the dog thinks of it nobody has asked. " * 40


# the config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "a.toml"
    path.write_text('out = "o"\n[data]\ntext = "t"\n[model]\nhidden = 64\n[trainer]\nsteps = 10\n')
    return path


def test_a_config_is_read_with_its_defaults(config: Path) -> None:
    settings = read_config(config, LmSettings)
    assert (settings.data.text, settings.model.hidden, settings.model.layers) == ("t", 64, 12)


def test_every_field_can_be_overridden(config: Path) -> None:
    overrides = ["trainer.steps = 7", "optimizer.betas=[0.8, 0.9]", "optimizer.lr=2e-3", "data.text=my folder"]
    settings = read_config(config, LmSettings, overrides)
    assert (settings.trainer.steps, settings.optimizer.betas) == (7, (0.8, 0.9))
    assert (settings.optimizer.lr, settings.data.text) == (2e-3, "my folder")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.hiden=3", r"model\.hiden: unknown key .*did you mean 'hidden'"),
        ("modle.hidden=3", r"modle: unknown key .*did you mean 'model'"),
        ("steps=3", r"steps: unknown key \(did you mean trainer\.steps\?\)"),
        ("trainer.steps=many", r"trainer\.steps: got 'many', expected a whole number above 0$"),
        ("trainer.steps=0", r"trainer\.steps: got 0, expected a whole number above 0$"),
        ("trainer.attention=fast", r"trainer\.attention: .*'sdpa'"),
        ("model=3", r"model: got 3, expected a table$"),
        ("trainer.seed=-1", r"trainer\.seed: got -1, expected a whole number at least 0$"),
        (
            "watch.lengths=[64, 1]",
            r"watch\.lengths: got \[64, 1\], expected a list of one or more whole numbers above 1$",
        ),
        ("trainer.evaluate_every=3", r"trainer\.evaluate_every = 3 has no effect with no held-out text"),
        ("out.deeper=3", r"out is a value, not a table"),
        ("trainer.steps", r"not of the form table\.key=value"),
    ],
)
def test_an_impossible_override_is_named(config: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(config, LmSettings, [override])


@pytest.mark.parametrize("held_out", ["b", ""])
def test_a_held_out_text_is_evaluated_as_often_as_given_or_turned_off(config: Path, held_out: str) -> None:
    settings = read_config(config, LmSettings, ["trainer.evaluate_every=3", f"data.held_out={held_out}"])
    assert settings.trainer.evaluate_every == 3


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.toml does not exist"):
        read_config(tmp_path / "none.toml", LmSettings)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"out = 'o'\n[trainer]\nsteps = 1\n", "data: missing, expected a value"),
        (b"[trainer]\nstepps = 3\n", r"a\.toml: .*trainer\.stepps: unknown key \(did you mean 'steps'\?\)"),
        (b"steps = " + b"9" * 5000, r"a\.toml is not TOML: got an integer of more than 4,300 digits"),
        (b"out = '\xff'\n", r"a\.toml is not UTF-8 .*at byte 7"),
        (b"steps: 3\n", r"a\.toml is not TOML: .*line 1"),
    ],
    ids=["missing key", "unknown key", "integer of 5,000 digits", "not UTF-8", "not TOML"],
)
def test_what_is_wrong_in_a_config_is_named(config: Path, content: bytes, named: str) -> None:
    config.write_bytes(content)
    with pytest.raises(ValueError, match=named):
        read_config(config, LmSettings)


@pytest.mark.parametrize(
    ("recipe", "override", "named"),
    [
        ("smt", "trainer.steps=abc", "trainer.steps: got 'abc', expected a whole number above 0"),
        ("smt", "trainer.steps=1.5", "trainer.steps: got 1.5, expected a whole number above 0"),
        ("smt", "trainer.seed=-1", "trainer.seed: got -1, expected a whole number at least 0"),
        ("smt", "optimizer.lr=fast", "optimizer.lr: got 'fast', expected a number above 0"),
        (
            "smt",
            "optimizer.decay_fraction=2",
            "optimizer.decay_fraction: got 2, expected a number at least 0 and at most",
        ),
        ("smt", "optimizer.betas=[1]", "optimizer.betas: got [1], expected a list of 2 numbers"),
        ("smt", "optimizer.warmup_steps=[]", "optimizer.warmup_steps: got [], expected a number at least 0"),
        ("smt", "trainer.bf16=3", "trainer.bf16: got 3, expected true, false or 'auto'"),
        ("smt", "watch.curve=maybe", "watch.curve: got 'maybe', expected true or false"),
        ("smt", "data.text=3", "data.text: got 3, expected text"),
        ("smt", "lengths.mode=false", "lengths.mode: got false, expected 'progressive', 'cover' or 'fixed'"),
        ("smt", "watch.lengths=5", "watch.lengths: got 5, expected a list of one or more whole numbers"),
        ("smt", "watch.lengths=[]", "watch.lengths: got [], expected a list of one or more whole numbers"),
        (
            "smt",
            'watch.lengths=["a", "b"]',
            "watch.lengths: got ['a', 'b'], expected a list of one or more whole numbers",
        ),
        ("smt", "trainer.report_to=wandb", "trainer.report_to: got 'wandb', expected a list of texts"),
        ("smt", "watch=3", "watch: got 3, expected a table"),
        ("smt", "model.temperature=3", 'model.temperature: got 3, expected true, false or "learned"'),
        ("cepe", "data.mixture={ all = 1 }", "data.mixture: got {'all': 1}, expected a table of numbers with keys '"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_the_allowed_ones(recipe: str, override: str, named: str) -> None:
    with pytest.raises(ValueError, match=rf"^config {recipe}-demo: {re.escape(named)}[^;]*$"):
        read_config(f"{recipe}-demo", settings_of(recipe), [override])


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_committed_config_is_valid_and_can_be_tried_in_a_few_steps(path: Path) -> None:
    recipe = next((one for one in RECIPES if path.stem.startswith(one)), "lm")
    settings: Any = read_config(path, settings_of(recipe), ["trainer.steps=24"])
    warmup_and_decay(settings.optimizer, settings.trainer.steps)
    if recipe != "smt":
        with pytest.raises(ValueError, match=f"is of the recipe {recipe}: use farspan train {recipe} {path}$"):
            read_config(path, SmtSettings, ["trainer.window=24"])
    if recipe == "cepe":  # whose keys a distillation has too
        with pytest.raises(ValueError, match=f"is of the recipe cepe: use farspan train cepe {path}$"):
            read_config(path, DistillSettings)
        with pytest.raises(ValueError, match=r"trainer.steps: got 0, expected a whole number above 0$"):
            read_config(path, DistillSettings, ["distill.kl=1", "trainer.steps=0"])


def test_a_wrong_key_beside_right_ones_is_not_taken_for_another_recipe(config: Path) -> None:
    for override in ("trainer.text=a", "decoder=a"):  # the second is a key of mlm, which has no model.hidden
        with pytest.raises(ValueError, match="unknown key"):
            read_config(config, LmSettings, [override])


@pytest.mark.parametrize(
    ("name", "kind", "steps"),
    [("demo", LmSettings, 100), ("mlm-demo", MlmSettings, 50), ("cepe-warmup-demo", CepeSettings, 10),
     ("cepe-demo", CepeSettings, 15), ("cepe-order-demo", CepeSettings, 10), ("distill-demo", DistillSettings, 15),
     ("smt-demo", SmtSettings, 50), ("smt-llama-2-7b", SmtSettings, 100), ("cepe-smollm2", CepeSettings, 10)],
)  # fmt: skip
def test_a_committed_config_warms_up_over_the_steps_of_its_recorded_training(name: str, kind: Any, steps: int) -> None:
    settings = read_config(CONFIGS / f"{name}.toml", kind)
    assert warmup_and_decay(settings.optimizer, settings.trainer.steps)[0] == steps


def test_llama_83m_is_trained_as_in_the_paper() -> None:
    settings = read_config(CONFIGS / "llama-83m.toml", LmSettings)
    shape = {"hidden": 512, "feed_forward": 2048, "layers": 12, "heads": 8, "key_value_heads": 8, "tied": False}
    optimizer = {"name": "adamw", "lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}
    assert settings.model.model_dump().items() >= shape.items()
    assert settings.optimizer.model_dump().items() >= optimizer.items()
    assert (settings.trainer.window, settings.trainer.batch, settings.tokenizer.vocabulary) == (1024, 256, 32_000)


def test_llama_83m_has_83_million_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = Tokenizer(models.WordLevel({"<s>": 0} | {f"w{i}": i for i in range(1, 32_000)}, unk_token="w1"))
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>").save_pretrained(tmp_path)
    (tmp_path / "a.txt").write_text("w2 " * 3000)
    overrides = [f"out={tmp_path / 'out'}", f"tokenizer={{folder={str(tmp_path)!r}}}", "trainer.window=2"]
    overrides += [f"data.{name}={tmp_path / 'a.txt'}" for name in ("text", "held_out")]
    made: list[Any] = []
    monkeypatch.setattr(farspan.train.lm, "run", lambda model, *others, **named: made.append(model) or {"rows": 0})
    with torch.device("meta"):
        train(read_config(CONFIGS / "llama-83m.toml", LmSettings, overrides))
    # untied embeddings, attention, feed-forward, norms
    parameters = 2 * 32_000 * 512 + 12 * (4 * 512 * 512 + 3 * 512 * 2048 + 2 * 512) + 512
    assert sum(p.numel() for p in made[0].parameters()) == parameters
    assert round(parameters / 1e6) == 83


# optimizer and schedule


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config("llama", **changes))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_rate_warms_up_stays_and_decays_to_zero(name: str) -> None:
    settings = OptimizerSettings(name=name, lr=0.5, warmup_steps=10, decay_fraction=0.2)
    optimizer, schedule = build(tiny_llama(), settings, 100)
    rates = []
    for _ in range(101):
        assert len({group["lr"] for group in optimizer.param_groups}) == 1
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[0] == 0
    assert rates[5] == pytest.approx(0.25)
    assert rates[10:81] == [0.5] * 71
    assert rates[90] == pytest.approx(0.25)
    assert rates[100] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("family", "changes", "deepest"),
    [
        ("llama", {}, 2),
        ("llama", {"tie_word_embeddings": True}, 2),
        ("gpt_oss", {}, 3),  # of experts
        ("cohere", {"use_qk_norm": True}, 2),
    ],
)
def test_matrices_decay_and_embeddings_and_norms_and_biases_of_each_layer_head_or_expert_do_not(
    family: str, changes: dict[str, Any], deepest: int, name: str
) -> None:
    model = tiny_model(family, **changes)
    optimizer, _ = build(model, OptimizerSettings(name=name, weight_decay=0.1), 200)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    assert max(parameter.ndim for parameter in model.parameters()) == deepest
    for parameter_name, parameter in model.named_parameters():
        spared = any(part in parameter_name for part in ("norm", "embed", "lm_head", "bias", "sinks"))
        assert decay[id(parameter)] == (0.0 if spared else 0.1), parameter_name


def test_muon_turns_the_matrices_and_adamw_the_rest() -> None:
    model = tiny_llama()
    optimizer, _ = build(model, OptimizerSettings(name="muon"), 200)
    muon, adamw = optimizer.parts
    assert (type(muon), type(adamw)) == (Muon, torch.optim.AdamW)
    matrices = {id(p) for layer in model.model.layers for p in layer.parameters() if p.ndim == 2}
    assert {id(p) for group in muon.param_groups for p in group["params"]} == matrices


def test_muon_in_float32_steps_as_torchs_in_bfloat16() -> None:
    for shape in ((16, 48), (48, 16)):
        weights = [torch.nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(0))) for _ in "ab"]
        settings = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
        optimizers = [kind([w], **settings) for kind, w in zip((Muon, torch.optim.Muon), weights, strict=True)]
        for step in range(5):
            for weight, optimizer in zip(weights, optimizers, strict=True):
                weight.grad = torch.randn(*shape, generator=torch.Generator().manual_seed(step))
                optimizer.step()
        torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0.02)  # steps of 0.1 · 0.2 · √48 in all


def test_a_frozen_parameter_is_not_trained() -> None:
    model = tiny_llama()
    model.model.embed_tokens.requires_grad_(False)
    optimizer, _ = build(model, OptimizerSettings(), 200)
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert id(model.model.embed_tokens.weight) not in trained


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))


def parts(model: nn.Sequential) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    matrices, biases = ([p for p in model.parameters() if p.ndim == n] for n in (2, 1))
    return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(biases, lr=0.01)


def step(model: nn.Sequential, seed: int, *optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_optimizers_together_step_as_each_by_hand() -> None:
    by_hand, together = two_layers(), two_layers()
    separate, joined = parts(by_hand), Together(*parts(together))
    for seed in range(3):
        step(by_hand, seed, *separate)
        step(together, seed, joined)
    assert same(by_hand, together)
    assert not same(together, two_layers())


def test_optimizers_together_continue_from_their_saved_state(tmp_path: Path) -> None:
    model = two_layers()
    before = Together(*parts(model))
    step(model, 0, before)
    before.param_groups[0]["lr"] = 0.03
    torch.save([before.state_dict(), model.state_dict()], tmp_path / "state.pt")
    state, weights = torch.load(tmp_path / "state.pt", weights_only=True)

    again = two_layers()
    again.load_state_dict(weights)
    after = Together(*parts(again))
    after.load_state_dict(state)
    for seed in (1, 2):
        step(model, seed, before)
        step(again, seed, after)
    assert same(model, again)


def test_a_rate_set_after_loading_reaches_the_part() -> None:
    model = two_layers()
    optimizer = Together(*parts(model))
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    step(model, 0, optimizer)
    assert same(model, two_layers())


# rows and tokenizer


def numbered(*sizes: int) -> Corpus:
    """Documents of these sizes whose tokens count from 1 through all of them."""
    starts = np.cumsum([0, *sizes])
    return Corpus("numbers", "hash", np.arange(1, starts[-1] + 1, dtype=np.int32), starts)


def flat(rows: PackedRows) -> list[int]:
    return torch.cat([rows[i]["input_ids"] for i in range(len(rows))]).tolist()


def test_each_document_stands_whole_behind_a_separator() -> None:
    corpus = numbered(3, 5, 4)
    rows = PackedRows(corpus, 5, (0,), seed=0)
    documents = " ".join(map(str, flat(rows))).removeprefix("0 ").split(" 0 ")
    assert len(rows) == (12 + 3) // 5
    assert sorted(documents) == sorted(" ".join(map(str, corpus.document(i))) for i in range(3))


def test_only_the_tail_that_fills_no_row_is_lost() -> None:
    rows = PackedRows(numbered(30, 50, 47), 8, (0,), seed=0)
    assert len(rows) == (127 + 3) // 8
    assert len({token for token in flat(rows) if token}) >= 127 - 7


def test_documents_come_in_an_order_of_the_seed() -> None:
    orders = [flat(PackedRows(numbered(*[4] * 20), 10, (0,), seed=seed)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_labels_are_the_inputs() -> None:
    row = PackedRows(numbered(9), 5, (0,), seed=0)[0]
    assert row["labels"].tolist() == row["input_ids"].tolist() == [0, 1, 2, 3, 4]


def test_a_text_shorter_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="text 'numbers' has 10 tokens, less than one row of 11"):
        PackedRows(numbered(9), 11, (0,), seed=0)


def test_a_shuffled_text_is_refused() -> None:
    with pytest.raises(ValueError, match="text 'numbers' is shuffled: training needs its own order"):
        PackedRows(replace(numbered(9), shuffled=True), 5, (0,), seed=0)


def test_a_tokenizer_trained_on_a_text_gives_it_back(tmp_path: Path) -> None:
    train_tokenizer([TEXT], 280, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(TEXT + "ünseen ✓", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == TEXT + "ünseen ✓"
    assert len(ids) < len(TEXT)
    assert (len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id) == (280, 0, 0)


def test_a_vocabulary_that_does_not_hold_every_byte_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.vocabulary = 256 is too small; use more than 256"):
        train_tokenizer([TEXT], 256, tmp_path)


# training


def of_a_second(folder: Path, text: str) -> Make:
    """A training of a second: `settings("name", "table.key=value", ...)`, in the folder of that name."""
    (folder / "a.txt").write_text(text)
    lines = ['out = "?"', "[data]", f"text = {str(folder / 'a.txt')!r}", "[tokenizer]", "vocabulary = 300"]
    lines += ["[model]", "hidden = 32", "feed_forward = 64", "layers = 2", "heads = 2", "key_value_heads = 1"]
    lines += ["[optimizer]", "lr = 1e-2", "warmup_steps = 1", "[trainer]", "steps = 12", "window = 64", "batch = 4"]
    lines += ["micro_batch = 2", "bf16 = false", 'dtype = "float32"', "log_every = 2", "save_every = 4"]
    path = folder / "a.toml"
    path.write_text("\n".join(lines))
    return lambda out, *overrides: read_config(path, LmSettings, [f"out={folder / out}", *overrides])


@pytest.fixture
def settings(tmp_path: Path) -> Make:
    return of_a_second(tmp_path, TEXT)


def test_a_gpu_that_only_emulates_bf16_trains_in_fp32(settings: Make, monkeypatch: Any) -> None:
    trainer = settings("a", "trainer.bf16=auto").trainer
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for major in (7, 8):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, m=major: SimpleNamespace(major=m))
        assert trainer.uses_bf16 == (major == 8)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_training_lowers_the_loss(settings: Make, name: str) -> None:
    chosen = settings("a", f"optimizer.name={name}")
    summary = train(chosen)
    log = read_log(Path(chosen.out))
    assert log[0]["loss"] > 5
    assert summary["loss"] < log[0]["loss"] - 2


def test_a_trained_folder_opens_as_a_model(settings: Make) -> None:
    chosen = settings("a", "trainer.steps=1")
    summary = train(chosen)
    lm = farspan.load(chosen.out, device="cpu")
    assert (lm.trained_length, lm.vocabulary, lm.separator.ids) == (64, len(lm.tokenizer), (0,))
    assert lm.identity["parameters"] == summary["parameters"]


def test_a_training_says_what_it_did(settings: Make) -> None:
    chosen = settings("a", "trainer.steps=3")
    summary = train(chosen)
    assert summary["tokens"] == 3 * 4 * 64
    assert summary["settings"]["trainer"]["steps"] == 3
    assert json.loads((Path(chosen.out) / "training.json").read_text()) == summary


def test_a_training_prints_its_steps_losses_and_time_left_and_no_dicts(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY", 0.0)
    (tmp_path / "b.txt").write_text(TEXT[: len(TEXT) // 3])
    chosen = settings("a", "trainer.steps=4", "trainer.log_every=1", f"data.held_out={tmp_path / 'b.txt'}")
    printed = io.StringIO()
    with progress.Display(Terminal(file=printed)) as display:
        train(chosen, TrainingWatch(display.start, display.step, display.notice))
    text, held_out = f"text {chosen.data.text!r}", f"text {chosen.data.held_out!r}"
    begin, lines = printed.getvalue().splitlines()[:7], printed.getvalue().splitlines()[7:]
    assert [re.sub(r"[\d,]+ tokens", "# tokens", line) for line in begin] == [
        f"{text}: training a tokenizer of 300 entries",
        f"{text}: reading and tokenising",
        f"{text}: # tokens",
        f"{held_out}: reading and tokenising",
        f"{held_out}: # tokens",
        f"{chosen.out}: 37,792 of 37,792 parameters are trained (100.00%)",
        "training steps 1 to 4",
    ]
    assert [line.partition(",")[0] for line in lines[:-1]] == [f"training steps: {n}/4" for n in (1, 2, 3, 4)]
    assert re.fullmatch(r"training steps: 3/4, loss \d\.\d{3}, 0:00:\d\d left", lines[2])
    assert re.fullmatch(r"step 4: held-out loss \d\.\d{3} nats per token", lines[-1])
    assert capsys.readouterr().out == ""


def test_a_loss_of_several_parts_and_a_measurement_are_reported_in_words() -> None:
    lines: list[str] = []
    steps, state = Steps(TrainingWatch(notice=lines.append)), TrainerState(global_step=1_500)
    for logs in (
        {"loss": 4.5012, "loss_sparse": 2.5112, "loss_window": 1.99, "grad_norm": 1.8},
        {"farspan/perplexity_256": 8.6981, "farspan/accuracy_256": 0.5352, "farspan/perplexity_1024": 28.561},
        {"farspan/half_life": 307.1, "farspan/span": 1366.7, "farspan/seconds": 8.2},
        {"farspan/half_life": 52.0, "farspan/half_life_censored": 1.0, "farspan/span": 48.2},
        {"train_runtime": 3.2, "train_loss": 4.1},
    ):
        steps.on_log(None, state, None, logs)
    assert steps.loss == "loss 4.501 (weighted sum of sparse 2.511 and window 1.990)"
    steps.on_log(None, state, None, {"loss": 1.297, "loss_window": 2.594})  # smt.mixed = "alternate", smt.beta = 0.5
    assert steps.loss == "loss 2.594"
    assert lines == [
        "step 1,500: perplexity 8.698 at 256, 28.56 at 1,024 tokens",
        "step 1,500: half-life 307, span 1,367 tokens",
        "step 1,500: half-life >52, span 48 tokens",
    ]


def test_tokens_are_those_that_were_read(settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    read, original = [0], transformers.Trainer.training_step

    def training_step(trainer: Any, model: nn.Module, inputs: dict[str, Tensor], *others: Any) -> Tensor:
        read[0] += inputs["input_ids"].numel()
        return original(trainer, model, inputs, *others)

    monkeypatch.setattr(transformers.Trainer, "training_step", training_step)
    # the text's rows are no multiple of a batch: an epoch's last step is smaller
    assert train(settings("a", "trainer.batch=8", "trainer.steps=9"))["tokens"] == read[0] < 9 * 8 * 64


def test_one_process_trains_its_batch_on_one_gpu_whatever_their_number(
    settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would give each GPU a micro-batch (DataParallel)."""
    setup = transformers.TrainingArguments.__dict__["_setup_devices"].func

    def with_two(arguments: transformers.TrainingArguments) -> torch.device:
        device: torch.device = setup(arguments)
        arguments._n_gpu = 2
        return device

    (two := cached_property(with_two)).__set_name__(transformers.TrainingArguments, "_setup_devices")
    monkeypatch.setattr(transformers.TrainingArguments, "_setup_devices", two)
    sizes, original, lines = [], CheckpointTrainer.training_step, list[str]()

    def training_step(trainer: Any, model: nn.Module, inputs: dict[str, Tensor], *others: Any) -> Tensor:
        sizes.append(len(inputs["input_ids"]))
        return original(trainer, model, inputs, *others)

    monkeypatch.setattr(CheckpointTrainer, "training_step", training_step)
    train(settings("a", "trainer.steps=3"), TrainingWatch(notice=lines.append))
    assert sizes == [2] * 6
    assert any("one of the 2 GPUs" in line and "torchrun --nproc-per-node=2" in line for line in lines)

    monkeypatch.setattr(engines, "use_one_gpu", lambda *given: None)
    with pytest.raises(ValueError, match="DataParallel is in use"):
        train(settings("b", "trainer.steps=3"))


@pytest.mark.parametrize(
    ("others", "how"),
    [([], "is the text that is trained on"), ([TEXT + "?"], "has 50% of its tokens in documents that are trained on")],
)
def test_a_held_out_text_that_is_trained_on_is_named(
    settings: Make, tmp_path: Path, others: list[str], how: str
) -> None:
    lines: list[str] = []
    chosen = settings("a", "trainer.steps=1", f"data.held_out={tmp_path / 'copy.jsonl'}")
    documents = [Path(chosen.data.text).read_text(), *others]
    (tmp_path / "copy.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in documents))
    train(chosen, TrainingWatch(notice=lines.append))
    named = f"data.held_out = {chosen.data.held_out!r} {how}"
    assert [line.partition(":")[0] for line in lines].count(named) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_measurements_of_weights_that_are_rounded_when_they_are_saved_are_named(
    settings: Make, tmp_path: Path, dtype: str
) -> None:
    lines: list[str] = []
    (tmp_path / "b.txt").write_text(TEXT[::-1])
    chosen = settings("a", "trainer.steps=1", f"trainer.dtype={dtype}", f"data.held_out={tmp_path / 'b.txt'}")
    train(chosen, TrainingWatch(notice=lines.append))
    named = [line for line in lines if line.endswith(" (weights in training; saved ones are rounded to bfloat16)")]
    assert [line.partition(":")[0] for line in named] == (["step 1"] if dtype == "bfloat16" else [])


def test_the_held_out_loss_is_that_of_the_saved_model_and_is_computed_once(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated, original = [], transformers.Trainer.evaluate

    def evaluate(trainer: Any, *args: Any, **options: Any) -> dict[str, float]:
        evaluated.append(trainer.state.global_step)
        return original(trainer, *args, **options)

    monkeypatch.setattr(transformers.Trainer, "evaluate", evaluate)
    (tmp_path / "b.txt").write_text(TEXT[: len(TEXT) // 3])
    chosen = settings("a", "trainer.steps=4", f"data.held_out={tmp_path / 'b.txt'}", "trainer.evaluate_every=3")
    summary = train(chosen)
    assert evaluated == [3, 4]
    lm = farspan.load(chosen.out, device="cpu")
    rows = PackedRows(load(chosen.data.held_out, lm.tokenizer), 64, (0,), 0)
    with torch.no_grad():
        losses = [lm.model(rows[i]["input_ids"][None], labels=rows[i]["labels"][None]).loss for i in range(len(rows))]
    assert summary["held_out_loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "how"),
    [((), "full"), (("recurrence.memory=24", "trainer.window=32"), "sinks:window=25,sinks=0,stride=32")],
    ids=("rows", "recurrence"),
)
def test_a_training_measures_itself_as_it_is_read(
    settings: Make, tmp_path: Path, changes: tuple[str, ...], how: str
) -> None:
    (tmp_path / "b.txt").write_text(TEXT[::-1])
    watch = [f"watch.text={tmp_path / 'b.txt'}", "watch.every=6", "watch.repeats=2", "watch.tokens=9000"]
    unwatched, watched = settings("unwatched", *changes), settings("watched", *changes, *watch)
    summary = train(unwatched)
    assert train(watched)["loss"] == summary["loss"]
    assert_same_weights(watched, unwatched)
    trained = watched.trainer.window + (24 if changes else 0)
    rows = farspan.read_rows(Path(watched.out) / "perplexity")
    assert {(row.model, row.method, row.length) for row in rows} == {
        (f"step-{step}", how, length) for step in (0, 6, 12) for length in (trained // 2, trained, 2 * trained)
    }
    curve = farspan.read_rows(Path(watched.out) / "farspan")
    assert {row.method for row in curve} == {how}
    assert trained < max(row.scores["context"] for row in curve) <= 2 * trained
    assert '"farspan/half_life"' in (Path(watched.out) / "log.jsonl").read_text()


def test_a_training_refused_after_its_tokenizer_keeps_only_that(settings: Make) -> None:
    with pytest.raises(ValueError, match="nowhere"):
        train(settings("a", "data.held_out=nowhere.txt"))
    with pytest.raises(ValueError, match=r"tokenizer\.vocabulary was 300, now 320\."):
        train(settings("a", "tokenizer.vocabulary=320"))
    assert train(settings("a", "trainer.steps=1", "model.hidden=48"))["loss"] > 0


def test_a_folder_of_an_older_version_is_continued(settings: Make) -> None:
    train(settings("a", "trainer.steps=4"))
    file = Path(settings("a").out) / "settings.json"
    older = json.loads(file.read_text())
    del older["watch"], older["model"]["tied"]
    file.write_text(json.dumps(older))
    with pytest.raises(ValueError, match=r"made with other settings: model\.hidden was 32, now 48\."):
        train(settings("a", "model.hidden=48"))
    assert train(settings("a", "trainer.steps=6"))["settings"]["trainer"]["steps"] == 6


def test_a_batch_in_pieces_trains_as_the_whole(settings: Make) -> None:
    losses = [train(settings(f"{n}", f"trainer.micro_batch={n}", "trainer.steps=6"))["loss"] for n in (1, 4)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_model_trained_in_bf16_is_saved_in_bf16(settings: Make) -> None:
    chosen = settings("a", "trainer.steps=2", "trainer.bf16=true", "trainer.dtype=bfloat16")
    train(chosen)
    assert {weight.dtype for weight in weights(chosen).values()} == {torch.bfloat16}


def test_heads_may_be_wider_than_their_share(settings: Make) -> None:
    chosen = settings("a", "trainer.steps=1", "model.head_dim=24")
    train(chosen)
    queries = [tensor for name, tensor in weights(chosen).items() if "q_proj" in name]
    assert {tuple(tensor.shape) for tensor in queries} == {(2 * 24, 32)}
    assert farspan.load(chosen.out, device="cpu").model.config.head_dim == 24


def test_an_existing_tokenizer_is_used(settings: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    chosen = settings("a", "trainer.steps=1", f"tokenizer={{folder={str(tmp_path / 'tokenizer')!r}}}")
    train(chosen)
    assert farspan.load(chosen.out, device="cpu").tokenizer.get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.heads=3"], r"model\.hidden = 32 must be a multiple of model\.heads = 3"),
        (
            ["model.heads=4", "model.key_value_heads=3"],
            r"model\.heads = 4 must be a multiple of model\.key_value_heads = 3",
        ),
        (["model.hidden=18", "model.heads=6", "model.key_value_heads=6"], "heads have 3 dimensions .* even number"),
        (["model.head_dim=7"], "heads have 7 dimensions .* even number"),
        (["trainer.batch=5"], r"trainer\.batch = 5 is not a multiple of trainer\.micro_batch x processes = 2"),
        (["trainer.window=100000"], "less than one row of 100,000"),
        (["tokenizer.vocabulary=100"], r"tokenizer\.vocabulary = 100 is too small"),
        (["tokenizer.folder=a"], r"tokenizer\.folder = 'a' has its own vocabulary: leave out tokenizer\.vocabulary"),
    ],
)
def test_impossible_settings_are_refused(settings: Make, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(settings("a", *overrides))


# stopped and repeated


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_training_stopped_and_repeated_ends_with_the_same_weights(
    settings: Make, counted: list[int], name: str
) -> None:
    whole, stopped = (settings(out, f"optimizer.name={name}") for out in ("whole", "stopped"))
    whole_summary, forwards = train(whole), counted[0]
    with interrupted(counted, 13):  # in step 7; a checkpoint was saved after step 4, 8 forwards
        train(stopped)
    summary = train(stopped)
    assert counted[0] == forwards - 8
    assert summary["loss"] == whole_summary["loss"]
    assert_same_weights(stopped, whole)


def test_a_training_does_not_continue_on_a_text_that_has_changed(settings: Make) -> None:
    done, more = settings("a", "trainer.steps=4"), settings("a", "trainer.steps=6")
    train(done)
    text = Path(done.data.text)
    before = text.read_text()
    text.write_text(before + "one more line")
    assert train(done)["loss"] > 0  # nothing is left to train
    with pytest.raises(ValueError, match=r"a\.txt.* has changed since the training in .*/a began"):
        train(more)
    text.write_text(before)
    train(more)


def test_a_training_does_not_continue_with_a_held_out_text_that_has_changed(settings: Make, tmp_path: Path) -> None:
    text = tmp_path / "held-out.txt"
    done, more = (settings("a", f"trainer.steps={steps}", f"data.held_out={text}") for steps in (4, 6))
    before = Path(done.data.text).read_text()[::-1]
    text.write_text(before)
    train(done)
    text.write_text(before + "one more line")
    with pytest.raises(ValueError, match=r"the held_out has changed since the training in .*/a began"):
        train(more)
    text.write_text(before)
    (Path(done.out) / "checkpoints" / "held_out").unlink()  # as an older farspan
    train(more)


def test_a_training_killed_while_it_saves_continues_from_the_checkpoint_before(
    settings: Make, counted: list[int], left_by_a_kill: Callable[..., None]
) -> None:
    whole, killed = settings("whole"), settings("killed")
    left_by_a_kill(transformers.Trainer, "save_model", whole, killed, at=2)
    train(whole)
    forwards = counted[0]
    half = Path(killed.out) / "checkpoints" / "checkpoint-8"
    assert (half / "model.safetensors").exists()
    assert not (half / "optimizer.pt").exists()
    counted[:] = [0, -1]
    train(killed)
    assert counted[0] == forwards - 8
    assert_same_weights(killed, whole)


def test_a_training_that_is_done_and_repeated_changes_nothing(settings: Make, counted: list[int]) -> None:
    chosen = settings("a", "trainer.steps=4", "optimizer.decay_fraction=0")
    lines: list[str] = []
    watch = TrainingWatch(notice=lines.append)
    first, before = train(chosen, watch), weights(chosen)
    assert lines.pop() == "training steps 1 to 4"
    counted[0] = 0
    again = train(chosen, watch)
    assert lines[-1:] == [f"already finished: 4 steps. Nothing is trained; the model is saved again in {chosen.out}"]
    assert counted[0] == 0
    assert again["loss"] == first["loss"]
    assert all(torch.equal(weight, before[name]) for name, weight in weights(chosen).items())


def test_a_continued_training_logs_and_evaluates_as_often_as_it_now_says(settings: Make, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text(TEXT[::-1])
    how = f"data.held_out={tmp_path / 'b.txt'}", "optimizer.decay_fraction=0"
    train(settings("a", *how, "trainer.steps=4", "trainer.evaluate_every=4"))
    chosen = settings("a", *how, "trainer.steps=7", *(f"trainer.{of}_every=1" for of in ("log", "save", "evaluate")))
    train(chosen)
    log = read_log(Path(chosen.out))
    assert [entry["step"] for entry in log if "loss" in entry] == [2, 4, 5, 6, 7]
    assert [entry["step"] for entry in log if "eval_loss" in entry] == [4, 5, 6, 7]


def test_a_longer_training_of_the_same_rates_continues_as_if_it_had_been_so_long(settings: Make) -> None:
    same = "optimizer.decay_fraction=0", "trainer.log_every=1"
    train(settings("a", "trainer.steps=4", *same))
    more, whole = (settings(out, "trainer.steps=8", *same) for out in ("a", "whole"))
    assert train(more)["loss"] == train(whole)["loss"]
    assert_same_weights(more, whole)
    assert rates_logged(more) == rates_logged(whole)


def rates_logged(settings: LmSettings) -> dict[int, float]:
    return {entry["step"]: entry["learning_rate"] for entry in read_log(Path(settings.out)) if "loss" in entry}


@pytest.mark.parametrize(
    ("stopped_at", "now", "schedule"),
    [(4, 8, "decay_fraction=0.5"), (4, 8, "warmup_steps=0.5"), (12, 10, "decay_fraction=0.9")],
)
def test_a_training_is_not_continued_with_steps_that_would_have_changed_its_rates(
    settings: Make, counted: list[int], stopped_at: int, now: int, schedule: str
) -> None:
    chosen = settings("a", f"trainer.steps={stopped_at}", f"optimizer.{schedule}")
    if now < stopped_at:
        with interrupted(counted, 13):  # in step 7; a checkpoint was saved after step 4
            train(chosen)
    else:
        train(chosen)
    refused = (
        rf"steps = {now} cannot continue .*checkpoint-4.* a training of {stopped_at} steps, since the learning rates "
    )
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"{refused}depend on .*: use trainer\.steps = {stopped_at}, or another"):
            train(settings("a", f"trainer.steps={now}", f"optimizer.{schedule}"))
    assert json.loads((Path(chosen.out) / "settings.json").read_text())["trainer"]["steps"] == stopped_at
    assert train(chosen)["loss"] > 0


def test_seconds_are_those_of_all_sessions(settings: Make, counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(perf_counter=lambda: 10.0 * counted[0]))
    whole, stopped = settings("whole"), settings("stopped")
    assert train(whole)["seconds"] == (seconds := 10 * counted[0])
    counted[:] = [0, 13]  # in step 7; a checkpoint was saved after step 4
    with pytest.raises(KeyboardInterrupt):
        train(stopped)
    counted[1] = -1
    assert train(stopped)["seconds"] == seconds
    assert train(stopped)["seconds"] == seconds  # nothing is left to train


def test_another_seed_gives_other_weights(settings: Make) -> None:
    one, other = settings("a", "trainer.steps=1"), settings("b", "trainer.steps=1", "trainer.seed=1")
    train(one)
    train(other)
    assert any(not torch.equal(weights(one)[name], weight) for name, weight in weights(other).items())


def test_a_gradient_is_cut_and_rows_have_a_window() -> None:
    with pytest.raises(ValueError, match="clip"):
        OptimizerSettings(clip=0)
    with pytest.raises(ValueError, match="window"):
        PretrainingSettings(steps=1, window=1)


@pytest.mark.parametrize(
    ("warmup", "decay", "message"),
    [
        (100, 0.2, r"optimizer\.warmup_steps = 100 and a decay over 4 steps do not fit.* <= 16, .*warmup_steps=0\.08"),
        (0.9, 0.2, r"optimizer\.warmup_steps = 0\.9 and a decay over 4 steps do not fit"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(warmup: float, decay: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(torch.nn.Linear(2, 2), OptimizerSettings(warmup_steps=warmup, decay_fraction=decay), 20)


@pytest.mark.parametrize("shares", [(0.04, 0.96), (0.5, 0.5), (0.055, 0.3), (0, 1)])
def test_a_warm_up_and_a_decay_as_shares_fit_into_any_number_of_steps(shares: tuple[float, float]) -> None:
    settings = OptimizerSettings(warmup_steps=shares[0], decay_fraction=shares[1])
    for steps in range(1, 60):
        warmup, decay = warmup_and_decay(settings, steps)
        assert warmup == round(steps * shares[0])
        assert warmup + decay <= steps
        assert abs(decay - steps * shares[1]) <= 1


def test_a_warm_up_is_recorded_as_it_is_given_and_of_whole_steps(config: Path) -> None:
    for given in ("0.25", "7"):
        settings = read_config(config, LmSettings, [f"optimizer.warmup_steps={given}"])
        assert json.dumps(settings.model_dump(mode="json")["optimizer"]["warmup_steps"]) == given
    with pytest.raises(
        ValueError, match=r"optimizer\.warmup_steps: got 2\.5, expected a whole number of steps, or a share"
    ):
        read_config(config, LmSettings, ["optimizer.warmup_steps=2.5"])


def test_activations_are_computed_again_where_they_are_not_kept(
    settings: Any, trained_computing_again: Callable[..., None]
) -> None:
    trained_computing_again(train, settings, weights)


def test_a_training_shorter_than_an_interval_of_its_log_has_a_loss(settings: Any) -> None:
    chosen = settings("a", "trainer.steps=3", "trainer.log_every=50", "trainer.save_every=2")
    summary = train(chosen)
    log = read_log(Path(chosen.out))
    found = {entry["step"]: entry["loss"] for entry in log if "loss" in entry}
    assert list(found) == [2, 3]
    assert summary["loss"] == found[3]


def test_a_folder_is_not_continued_with_other_settings(settings: Any) -> None:
    train(settings("a", "trainer.steps=4"))
    with pytest.raises(
        ValueError, match=r"holds another training, made with other settings: optimizer\.lr was 0\.01, now 0\.02"
    ):
        train(settings("a", "trainer.steps=4", "optimizer.lr=0.02"))
