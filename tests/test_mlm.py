"""The encoder's pre-training: head and loss equal to the authors', rows and masks, an encoder that cepe takes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_train import numbered
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, LlamaConfig, LlamaModel, PreTrainedTokenizerFast

from farspan import cepe, reader
from farspan.cepe.config import encoder_config
from farspan.train.batches import train_tokenizer
from farspan.train.config import read_config
from farspan.train.mlm import EncoderSettings, MaskedLM, MaskedRows, MlmSettings, new_encoder, train
from farspan.train.trainer import read_log

from cepe_models import authors_settings
from tiny import assert_same_weights, configure, interrupted, saved, tiny_model

Make = Callable[..., MlmSettings]
CONFIGS = Path(__file__).resolve().parents[1] / "configs"
TEXT = "The quick brown fox jumps over the lazy dog, and what the dog thinks of it nobody has asked. " * 40


# head and loss


@pytest.fixture
def authors(reference: dict[str, Tensor]) -> MaskedLM:
    config = LlamaConfig(**authors_settings()["encoder"])
    model = MaskedLM(LlamaModel(encoder_config(config.to_dict()))).eval()
    state = {key[7:]: value for key, value in reference.items() if key.startswith("mlm.sd.")}
    assert torch.equal(state.pop("lm_head.weight"), state["model.embed_tokens.weight"])
    assert torch.equal(state.pop("lm_head.bias"), state["lm_bias"])
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("tokens_at_once", [1000, 2])
def test_logits_and_loss_are_those_of_the_authors(
    authors: MaskedLM, reference: Any, tokens_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(reader.LOGITS_AT_ONCE, "cpu", tokens_at_once * 98)
    ids, mask, labels = (reference[f"mlm.in.{name}"] for name in ("ids", "mask", "labels"))
    with torch.no_grad():
        hidden = authors.model(input_ids=ids, attention_mask=mask).last_hidden_state
        seen = mask.bool()
        assert float((authors.logits(hidden)[seen] - reference["mlm.logits"][seen]).abs().max()) < 2e-5
        assert float(abs(authors(ids, labels, mask) - reference["mlm.loss"])) < 5e-6


@pytest.mark.parametrize("tokens_at_once", [1000, 2])
def test_gradients_are_those_of_one_cross_entropy_over_all_logits(
    authors: MaskedLM, reference: Any, tokens_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, labels = reference["mlm.in.ids"], reference["mlm.in.labels"]
    logits = authors.logits(authors.model(input_ids=ids).last_hidden_state)
    naive = torch.autograd.grad(cross_entropy(logits.flatten(0, 1), labels.flatten()), list(authors.parameters()))
    monkeypatch.setitem(reader.LOGITS_AT_ONCE, "cpu", tokens_at_once * 98)
    given = torch.autograd.grad(authors(ids, labels), list(authors.parameters()))
    for one, other in zip(given, naive, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_batch_without_a_masked_token_has_a_loss_of_zero(authors: MaskedLM, reference: Any) -> None:
    ids = reference["mlm.in.ids"]
    assert authors(ids, torch.full_like(ids, -100)).item() == 0


# rows


def rows(**changes: Any) -> MaskedRows:
    how = {"separator": (0,), "special": (0, 7), "mask": 5000, "rate": 0.3, "seed": 0, "samples": 400} | changes
    return MaskedRows(numbered(400, 300, 500), 20, **how)


def test_the_head_in_bf16_warns_of_nothing_and_has_nearly_the_same_logits(authors: MaskedLM, reference: Any) -> None:
    """torch warns of a norm whose input is bf16 beside weights in fp32; warnings are errors here."""
    hidden = torch.randn(5, authors.model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        found = authors.logits(hidden)
    torch.testing.assert_close(found.float(), authors.logits(hidden), rtol=0.05, atol=0.05)


def test_masked_tokens_are_those_that_are_asked_and_no_others() -> None:
    for row in map(rows().__getitem__, range(50)):
        masked = row["labels"] != -100
        assert torch.equal(masked, row["input_ids"] == 5000)
        assert (row["labels"][masked] < 5000).all()


def test_three_tenths_are_masked() -> None:
    share = np.mean([(rows()[i]["labels"] != -100).float().mean().item() for i in range(400)])
    assert share == pytest.approx(0.3, abs=0.02)


def test_special_tokens_are_never_masked() -> None:
    labels = torch.stack([rows(rate=0.9)[i]["labels"] for i in range(400)])
    assert not torch.isin(labels, torch.tensor([0, 7])).any()
    assert (labels == 8).any()


def test_a_row_is_read_again_only_when_all_were_and_then_with_another_mask() -> None:
    made = rows()
    count = len(made.rows)

    def whole(row: dict[str, Tensor]) -> tuple[int, ...]:
        return tuple(torch.where(row["labels"] == -100, row["input_ids"], row["labels"]).tolist())

    first, second = ([whole(made[i]) for i in range(n * count, (n + 1) * count)] for n in (0, 1))
    assert len(set(first)) == count
    assert set(first) == set(second)
    assert first != second
    again = {whole(made[i]): made[i]["input_ids"].tolist() for i in range(count)}
    assert any(again[whole(made[i])] != made[i]["input_ids"].tolist() for i in range(count, 2 * count))


def test_a_sample_depends_on_seed_and_index_alone() -> None:
    one, other = rows(), rows()
    backwards = [other[i] for i in reversed(range(60))][::-1]
    assert all(torch.equal(one[i]["input_ids"], backwards[i]["input_ids"]) for i in range(60))
    assert any(not torch.equal(one[i]["input_ids"], rows(seed=1)[i]["input_ids"]) for i in range(3))


# training


@pytest.fixture
def settings(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Make:
    """A training of a second: `settings("name", "table.key=value", ...)`, in the folder of that name."""
    (tmp_path / "a.txt").write_text(TEXT)
    tokenizer.save_pretrained(tmp_path / "decoder")
    lines = ['out = "?"', f"decoder = {str(tmp_path / 'decoder')!r}", "[data]", f"text = {str(tmp_path / 'a.txt')!r}"]
    lines += ["[encoder]", "hidden = 32", "feed_forward = 64", "layers = 2", "heads = 2"]
    lines += ["[optimizer]", "lr = 1e-2", "warmup_steps = 1", "decay_fraction = 0.5", "[trainer]", "steps = 12"]
    lines += ["window = 32", "batch = 8", "micro_batch = 4", "bf16 = false", "log_every = 2", "save_every = 4"]
    path = tmp_path / "a.toml"
    path.write_text("\n".join(lines))
    return lambda out, *overrides: read_config(path, MlmSettings, [f"out={tmp_path / out}", *overrides])


def test_training_lowers_the_loss(settings: Make) -> None:
    chosen = settings("a", "trainer.steps=40", f"data.held_out={settings('b').data.text}")
    summary = train(chosen)
    log = read_log(Path(chosen.out))
    assert log[0]["loss"] > 5
    assert summary["loss"] < 4
    assert summary["held_out_loss"] < 4.5


def test_the_held_out_loss_is_a_mean_over_masked_tokens(settings: Make) -> None:
    """Not over batches: it does not depend on their size."""
    text = settings("a").data.text
    found = [
        train(settings(f"{n}", f"data.held_out={text}", f"trainer.micro_batch={n}", "trainer.steps=1"))["held_out_loss"]
        for n in (1, 8)
    ]
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def test_what_is_logged_is_of_training_alone(settings: Make) -> None:
    chosen = settings("a", f"data.held_out={settings('b').data.text}", "trainer.evaluate_every=1", "trainer.steps=4")
    train(chosen)
    log = read_log(Path(chosen.out))
    terms = [(entry["loss"], entry["loss_masked"]) for entry in log if "loss" in entry]
    assert len(terms) == 2
    assert all(one == pytest.approx(other, abs=2e-4) for one, other in terms)


def test_what_is_saved_is_an_encoder_that_cepe_takes(settings: Make) -> None:
    chosen = settings("a", "trainer.steps=2")
    train(chosen)
    tokenizer = AutoTokenizer.from_pretrained(chosen.out)
    decoder = AutoTokenizer.from_pretrained(chosen.decoder)
    assert (tokenizer.mask_token, tokenizer.mask_token_id) == ("[MASK]", len(decoder))
    assert tokenizer.model_max_length == 32
    model = cepe.from_base(tiny_model(), chosen.out, tokenizer=decoder)
    assert (model.encoder.config.vocab_size, model.encoder.config.max_position_embeddings) == (len(decoder) + 1, 32)
    state = load_file(Path(chosen.out) / "model.safetensors")
    assert not any(name.startswith("lm_") for name in state)
    assert torch.equal(model.encoder.norm.weight, state["norm.weight"])


def test_activations_are_computed_again_where_they_are_not_kept(
    settings: Make, trained_computing_again: Callable[..., None]
) -> None:
    trained_computing_again(train, settings, lambda s: load_file(Path(s.out) / "model.safetensors"))


def test_a_step_is_one_mean_however_it_is_cut(settings: Make) -> None:
    one, other = settings("one", "trainer.micro_batch=8"), settings("other", "trainer.micro_batch=2")
    train(one)
    train(other)
    a, b = (load_file(Path(s.out) / "model.safetensors") for s in (one, other))
    for name, weight in a.items():
        torch.testing.assert_close(b[name], weight, rtol=1e-3, atol=1e-4)


def test_an_encoder_is_trained_looking_both_ways(settings: Make, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    for chosen in (settings("a").encoder, EncoderSettings(start=str(tmp_path / "model"))):
        encoder = new_encoder(chosen, 300, 32, "sdpa").eval()
        ids = torch.arange(20)[None]
        one, other = (
            encoder(input_ids=given).last_hidden_state
            for given in (ids, ids.clone().index_fill_(1, torch.tensor([19]), 0))
        )
        assert not torch.allclose(one[0, 0], other[0, 0])


def test_an_encoder_can_begin_with_the_blocks_of_a_decoder(
    settings: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    decoder = tiny_model()
    for folder in ("decoder", "model"):
        saved(tmp_path / folder, tokenizer, decoder)
    chosen = settings("a", f"encoder={{start={str(tmp_path / 'model')!r}}}", "trainer.steps=1", "optimizer.lr=1e-9")
    train(chosen)
    state = load_file(Path(chosen.out) / "model.safetensors")
    given = dict(decoder.model.named_parameters())
    assert state["embed_tokens.weight"].shape == (len(tokenizer) + 1, 32)
    assert torch.allclose(state["layers.1.mlp.up_proj.weight"], given["layers.1.mlp.up_proj.weight"], atol=1e-6)
    cepe.from_base(tiny_model(), chosen.out)  # refuses what does not look both ways
    chosen = settings("b", f"encoder={{layers=1, start={str(tmp_path / 'model')!r}}}", "trainer.steps=1")
    train(chosen)
    assert not any("layers.1." in name for name in load_file(Path(chosen.out) / "model.safetensors"))


def test_a_training_is_not_continued_from_a_model_to_begin_with_of_another_config(
    settings: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    saved(tmp_path / "model", tokenizer)
    chosen = settings("a", f"encoder={{start={str(tmp_path / 'model')!r}}}", "trainer.steps=2")
    train(chosen)
    train(chosen)  # saves the encoder again
    configure(tmp_path / "model", rms_norm_eps=0.5)
    with pytest.raises(ValueError, match=r"config of the model that is trained has changed .* began: rms_norm"):
        train(chosen)


def test_an_encoder_can_begin_with_an_opt_whose_config_has_no_initializer_range(
    settings: Make, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    saved(tmp_path / "opt", tokenizer, tiny_model("opt"))
    chosen = settings("a", f"encoder={{start={str(tmp_path / 'opt')!r}}}", "trainer.steps=1")
    train(chosen)
    cepe.from_base(tiny_model(), chosen.out)  # refuses what does not look both ways


def test_the_shape_of_a_new_encoder_is_refused_beside_a_decoder_to_begin_with(settings: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"own shape: leave out encoder\.feed_forward, encoder\.heads, enc"):
        train(chosen := settings("a", f"encoder.start={tmp_path}"))
    assert not Path(chosen.out).exists()


def test_an_encoder_to_begin_with_of_another_tokenizer_is_refused(settings: Make, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    train_tokenizer([TEXT], 270, tmp_path / "model")
    with pytest.raises(ValueError, match=r"different tokenizers: token .* in the decoder's and .* in the encoder's"):
        train(chosen := settings("a", f"encoder={{start={str(tmp_path / 'model')!r}}}"))
    assert not Path(chosen.out).exists()


def test_an_encoder_begun_with_a_decoder_has_the_window_and_the_attention_of_its_training(tmp_path: Path) -> None:
    for architecture in ("llama", "gpt2"):
        tiny_model(architecture).save_pretrained(tmp_path / architecture)
    encoder = new_encoder(EncoderSettings(start=str(tmp_path / "llama")), 300, 600, "eager")
    assert (encoder.config.max_position_embeddings, encoder.config._attn_implementation) == (600, "eager")
    with pytest.raises(ValueError, match=r"trainer\.window = 600 exceeds the 512 positions of encoder\.start"):
        new_encoder(EncoderSettings(start=str(tmp_path / "gpt2")), 300, 600)


def test_a_training_stopped_and_repeated_ends_with_the_same_weights(settings: Make, counted: list[int]) -> None:
    whole, stopped = settings("whole"), settings("stopped")
    train(whole)
    with interrupted(counted, 13):  # in step 7; a checkpoint was saved after step 4
        train(stopped)
    train(stopped)
    assert_same_weights(stopped, whole)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["encoder.heads=3"], r"encoder\.hidden = 32 must be an even multiple of encoder\.heads = 3"),
        (["trainer.window=100000"], "less than one row of 100,000"),
        (["trainer.evaluate_every=3"], r"trainer\.evaluate_every = 3 has no effect with no held-out text"),
        (["decoder=nowhere"], r"decoder 'nowhere' is neither a folder nor cached"),
        (["trainer.batch=3"], r"trainer\.batch = 3 is not a multiple of trainer\.micro_batch x processes = 4"),
    ],
)
def test_impossible_settings_are_refused_and_do_not_take_the_folder(
    settings: Make, overrides: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train(settings("a", *overrides))
    assert train(settings("a", "trainer.steps=2"))["loss"] > 0


def test_the_default_is_the_paper() -> None:
    settings = read_config(CONFIGS / "mlm.toml", MlmSettings)
    assert settings.encoder == EncoderSettings() == MlmSettings.model_fields["encoder"].default
    assert (settings.mask_rate, settings.trainer.window, settings.trainer.batch, settings.trainer.steps) == (
        0.3, 512, 2048, 100_000,
    )  # fmt: skip
    with torch.device("meta"):
        encoder = new_encoder(settings.encoder, 32_001, 512)
    assert sum(p.numel() for p in encoder.parameters()) == 435_472_384
