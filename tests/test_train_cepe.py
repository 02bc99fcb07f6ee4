"""CEPE's training: windows and noise, what moves and what does not, stages, the same losses after a kill."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_cli import farspan as cli
from test_train import numbered
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback
from transformers.integrations import integration_utils

import farspan
from farspan.cepe.saving import ADAPTER
from farspan.lm import fingerprint
from farspan.measuring import trackers
from farspan.report.training import draw_cepe_losses, draw_smt_losses
from farspan.text import encoders, retrieval
from farspan.text.corpora import Corpus, load
from farspan.text.retrieval import open_index
from farspan.train.batches import View
from farspan.train.cards import cepe_card
from farspan.train.cepe import CepeSettings, decoded, opened, prepare, terms, train
from farspan.train.config import read_config
from farspan.train.distill import DistillSettings, store, teacher_of
from farspan.train.distill import train as distil
from farspan.train.documents import DocumentRows, DocumentSettings, NoiseSettings, noise
from farspan.train.progress import TrainingWatch
from farspan.train.trainer import read_log

from cepe_models import added_parameters, tiny_encoder
from tiny import assert_same_weights, close, configure, saved, tiny_model, weights

Make = Callable[..., Any]
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "mu", "nu"]


# windows


def windows(corpus: Corpus, *, samples: int = 60, seed: int = 0, **changes: Any) -> DocumentRows:
    how = {"copies": changes.pop("copies", False), "noise": changes.pop("noise", None)}
    how["longest"] = changes.pop("longest", 0)
    data = {"text": "t", "decoder": 6, "chunks": 3, "chunk": 4, "separator": False, "mixture": {"cat": 1.0}} | changes
    return DocumentRows(
        corpus, DocumentSettings.model_validate(data), samples=samples, separator=(0,), seed=seed, **how
    )


def flat(row: dict[str, Tensor]) -> list[int]:
    return [*row["context_input_ids"].flatten().tolist(), *row["input_ids"].tolist()]


def test_filter_windows_lie_inside_one_document_of_enough_tokens() -> None:
    corpus = numbered(10, 40, 17, 18, 3)  # windows have 18 tokens
    rows = windows(corpus, mixture={"filter": 1.0}, samples=300)
    begins = set()
    for row in map(rows.__getitem__, range(300)):
        tokens = flat(row)
        assert tokens == list(range(tokens[0], tokens[0] + 18))
        begins.add(tokens[0])
    assert begins == {*range(11, 11 + 23), 68}  # every place in the second document, the one in the fourth


def test_cat_windows_go_on_over_documents_with_a_separator_between() -> None:
    corpus = numbered(7, 5, 9, 30)
    rows = windows(corpus, samples=200)
    order = rows.stream.order.tolist()
    stream = [t for document in order for t in (0, *corpus.document(document).tolist())]
    seen = {tuple(flat(rows[i])) for i in range(200)}
    possible = {tuple(stream[i : i + 18]) for i in range(len(stream) - 17)}
    assert seen <= possible
    assert len(seen) > 0.8 * len(possible)
    assert any(0 in tokens for tokens in seen)


def test_a_text_of_one_window_is_that_window() -> None:
    assert flat(windows(numbered(41), chunks=9)[0]) == [0, *range(1, 42)]


def test_a_view_reads_what_a_joined_text_holds() -> None:
    corpus = numbered(3, 1, 8, 2)
    view = View(corpus, np.array([2, 0, 3, 1]), (0, 99))
    stream = [t for document in (2, 0, 3, 1) for t in (0, 99, *corpus.document(document).tolist())]
    assert len(view) == len(stream)
    for begin in range(len(stream)):
        for length in range(1, len(stream) - begin + 1):
            tokens, _ = view.read(begin, length)
            assert tokens.tolist() == stream[begin : begin + length]


def test_the_mixture_is_that_of_the_weights() -> None:
    corpus = numbered(*[5] * 40, 400)
    rows = windows(corpus, mixture={"filter": 2 / 3, "cat": 1 / 3}, samples=900)
    concatenated = sum(0 in flat(rows[i]) for i in range(900))
    # of the windows of `cat`, those in the long document have no separator
    chance = np.mean([0 in flat(windows(corpus, samples=900)[i]) for i in range(900)])
    assert concatenated / 900 == pytest.approx(chance / 3, abs=0.05)


def test_the_end_goes_to_the_decoder_and_what_stands_before_to_the_encoder() -> None:
    row = windows(numbered(40), separator=True)[0]
    tokens = row["context_input_ids"].flatten().tolist()
    assert row["input_ids"].tolist() == [0, *range(tokens[-1] + 1, tokens[-1] + 7)]
    assert row["labels"].tolist() == [-100, *row["input_ids"][1:].tolist()]
    assert row["context_input_ids"].shape == (3, 4)


def test_the_warm_up_gives_both_the_same_tokens() -> None:
    row = windows(numbered(40), copies=True, decoder=12, separator=True)[0]
    assert row["context_input_ids"].flatten().tolist() == row["input_ids"][1:].tolist()


def test_a_sample_depends_on_seed_and_index_alone() -> None:
    corpus, how = numbered(50, 60, 9), {"noise": NoiseSettings(), "mixture": {"filter": 0.5, "cat": 0.5}}
    one, other = windows(corpus, **how), windows(corpus, samples=30, **how)
    backwards = [other[i] for i in reversed(range(30))][::-1]
    for name in one[0]:
        assert all(torch.equal(one[i][name], backwards[i][name]) for i in range(30))
    assert any(flat(one[i]) != flat(windows(corpus, seed=1, **how)[i]) for i in range(5))


def test_noise_masks_three_tenths_of_chunks_a_tenth_of_these_whole() -> None:
    rng = np.random.default_rng(0)
    seen = noise(40_000, 20, NoiseSettings(), rng)
    masked = ~seen.all(1)
    assert masked.mean() == pytest.approx(0.3, abs=0.01)
    whole = ~seen.any(1)
    assert whole.sum() / masked.sum() == pytest.approx(0.1 + 0.9 / 20, abs=0.01)  # a suffix of all tokens is whole too
    lengths = (~seen[masked]).sum(1)
    assert set(lengths) == set(range(1, 21))
    assert (np.diff(seen.astype(int), axis=1) <= 0).all()  # a suffix: never seen again


def test_noise_of_nothing_and_of_everything() -> None:
    rng = np.random.default_rng(0)
    assert noise(50, 4, NoiseSettings(rate=0), rng).all()
    assert not noise(50, 4, NoiseSettings(rate=1, whole=1), rng).any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixture": {"filter": 1.0}, "chunks": 9}, r"no document of 42 tokens, its longest has 40.*cat = 1\.0"),
        ({"chunks": 30}, r"has 41 tokens, less than a window of 126"),
        ({"copies": True}, r"3 x 4 = 12 must be data\.decoder = 6"),
        ({"mixture": {"filter": 0.5, "cat": 0.3}}, r"filter 0\.5 \+ cat 0\.3 sum to 0\.8; give weights .* sum to 1"),
        ({"mixture": {}}, r"\(none\) sum to 0"),
        ({"mixture": {"cat": math.nan}}, "finite number"),
        (
            {"mixture": {"retrieved": 1.0}, "index": "i", "query": 2, "copies": True, "decoder": 12},
            "copies the decoder's tokens, not passages",
        ),
        ({"mixture": {"filter": 1.5, "cat": -0.5}}, "sum to 1"),
        ({"mixture": {"fliter": 1.0}}, "'filter', 'cat', 'retrieved' or 'copied'"),
        ({"mixture": {"retrieved": 1.0}}, r"no index: give data\.index"),
        ({"mixture": {"retrieved": 1.0}, "index": "i", "query": 6}, "leaves no tokens"),
    ],
)
def test_impossible_windows_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        windows(numbered(40), **changes)


def test_a_shuffled_text_is_refused() -> None:
    with pytest.raises(ValueError, match="is shuffled: training needs its own order"):
        windows(replace(numbered(40), shuffled=True))


class Passages:
    """An index whose passages are numbers, best where they are near the query's first."""

    documents = np.array([0, 0, 1, 2])

    def __len__(self) -> int:
        return 4

    def passage(self, number: int) -> str:
        return " ".join(str(100 * number + i) for i in range(6))

    def search(self, queries: list[str], count: int) -> tuple[np.ndarray, np.ndarray]:
        self.asked = queries
        return np.array([[1, 3, 2, 0]])[:, :count], np.zeros((1, count))


class Numbers:
    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        # a text that spells <s> has no special token
        assert options == {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        return {"input_ids": [int(word) for word in text.split()]}


def test_retrieved_chunks_are_the_best_passages_of_other_documents() -> None:
    corpus, index = numbered(60, 2, 2), Passages()
    data = DocumentSettings(text="t", decoder=6, chunks=3, chunk=4, mixture={"retrieved": 1.0}, index="i", query=2)
    rows = DocumentRows(
        corpus, data, samples=50, separator=(0,), seed=0, index=index, tokenizer=Numbers()  # type: ignore[arg-type]
    )  # fmt: skip
    inside = next(row for row in map(rows.__getitem__, range(50)) if row["input_ids"][-6:].ne(0).all())
    ids = inside["input_ids"]
    assert index.asked  # the query is the first of the decoder's tokens
    assert [int(i) for i in ids[:1]] == [0]
    assert inside["context_input_ids"].tolist() == [[300, 301, 302, 303], [200, 201, 202, 203], [0, 0, 0, 0]]
    assert inside["context_attention_mask"].tolist() == [[1] * 4, [1] * 4, [0] * 4]
    assert inside["labels"].tolist() == [-100, -100, -100, *ids[3:].tolist()]


def test_no_retrieved_chunk_is_of_a_copy_of_the_document() -> None:
    corpus, index = numbered(60, 2, 60), Passages()
    tokens = np.concatenate([corpus.tokens[:62], corpus.tokens[:60]])  # the last document is the first again
    data = DocumentSettings(text="t", decoder=6, chunks=3, chunk=4, mixture={"retrieved": 1.0}, index="i", query=2)
    rows = DocumentRows(
        replace(corpus, tokens=tokens), data, samples=50, separator=(0,), seed=0, index=index,
        tokenizer=Numbers(),  # type: ignore[arg-type]
    )  # fmt: skip
    inside = [row for row in map(rows.__getitem__, range(50)) if row["input_ids"][-6:].ne(0).all()]
    assert {str(row["context_input_ids"].tolist()) for row in inside} == {
        str([[200, 201, 202, 203], [0, 0, 0, 0], [0, 0, 0, 0]])
    }


TOPICS = ("river", "castle", "engine", "garden", "violin")


@pytest.fixture
def topical(tmp_path: Path) -> Path:
    """Ten documents, two of each topic."""
    rng = np.random.default_rng(0)
    lines = [" ".join([topic, rng.choice(WORDS)][i % 2] for i in range(400)) for topic in TOPICS * 2]
    (tmp_path / "topical.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    return tmp_path / "topical.jsonl"


@pytest.mark.parametrize("kind", ["bm25", "dense"])
def test_passages_of_an_index_are_those_on_the_same_topic(
    kind: str,
    settings: Make,
    tmp_path: Path,
    topical: Path,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the command that makes the index to the one that trains on it."""

    def encode(texts: list[str], show_progress_bar: bool) -> np.ndarray:
        return np.array([[text.count(topic) for topic in TOPICS] for text in texts], np.float32)

    both = SimpleNamespace(encode_query=encode, encode_document=encode)
    monkeypatch.setattr(encoders, "encoder_named", lambda name: both)
    made = cli("index", "--text", topical, "--out", tmp_path / "index", "--kind", kind,
               "--passage-tokens", 16, "--tokenizer", tmp_path / "decoder")  # fmt: skip
    assert "passages of 10 documents" in made.stdout
    retrieved = [
        "data.chunk=16",
        "data.mixture={ retrieved = 1.0 }",
        f"data.index={tmp_path / 'index'}",
        "data.query=20",
    ]
    chosen = settings("a", f"data.text={topical}", *retrieved, "trainer.steps=2")
    options = [part for one in (f"out={chosen.out}", f"data.text={topical}", *retrieved, "trainer.steps=2")
               for part in ("--set", one)]  # fmt: skip
    done = cli("train", "cepe", tmp_path / "a.toml", *options)
    assert done.exit_code == 0, done.output
    corpus = load(str(topical), tokenizer)
    rows = DocumentRows(corpus, chosen.data, samples=30, separator=(0,), seed=0,
                        index=open_index(tmp_path / "index"), tokenizer=tokenizer)  # fmt: skip
    fitting = []
    for row in map(rows.__getitem__, range(30)):
        query = tokenizer.decode(row["input_ids"][1:21])
        assert row["labels"][:21].eq(-100).all()
        assert row["labels"][21:].eq(row["input_ids"][21:]).all()
        passages = [tokenizer.decode(chunk[seen.bool()]) for chunk, seen in
                    zip(row["context_input_ids"], row["context_attention_mask"], strict=True)]  # fmt: skip
        fitting += [any(topic in passage for passage in passages) for topic in TOPICS if topic in query]
        assert all(passages)
    assert len(fitting) > 15
    assert np.mean(fitting) > 0.8  # by chance, a half


# training


@pytest.fixture
def settings(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Make:
    """A training of a second: `settings("name", "table.key=value", ..., kind=...)`, in the folder of that name."""
    rng = np.random.default_rng(0)
    lines = [json.dumps({"text": " ".join(rng.choice(WORDS, 300))}) for _ in range(6)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    saved(tmp_path / "decoder", tokenizer)
    tiny_encoder(max_position_embeddings=16).save_pretrained(tmp_path / "encoder")
    text = str(tmp_path / "a.jsonl")
    config = ['out = "?"', "[model]", f"name = {str(tmp_path / 'decoder')!r}"]
    config += [f"encoder = {str(tmp_path / 'encoder')!r}", 'dtype = "float32"']
    config += ["[data]", f"text = {text!r}", "decoder = 24", "chunks = 3", "chunk = 8"]
    config += ["[optimizer]", "lr = 1e-2", "warmup_steps = 1", "decay_fraction = 0.5", "[trainer]", "steps = 12"]
    config += ["batch = 4", "micro_batch = 2", "bf16 = false", "log_every = 2", "save_every = 4"]
    config += ["[watch]", "every = 0", f"text = {text!r}"]
    path = tmp_path / "a.toml"
    path.write_text("\n".join(config))

    def made(out: str, *overrides: str, kind: Any = CepeSettings) -> Any:
        its = ["distill={}"] if kind is DistillSettings else []
        return read_config(path, kind, [f"out={tmp_path / out}", *its, *overrides])

    return made


def ready(settings: CepeSettings) -> tuple[farspan.LM, DocumentRows]:
    lm = opened(settings)
    return lm, prepare(settings, lm, TrainingWatch())


added = partial(weights, file=ADAPTER)
assert_same = partial(assert_same_weights, file=ADAPTER)


def log(settings: CepeSettings) -> list[dict[str, Any]]:
    return read_log(Path(settings.out))


def test_the_warm_up_learns_to_copy(settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farspan.train.cepe.COPIES", 0.8)
    said: list[str] = []
    chosen = settings("a", "stage=warmup", "trainer.steps=80", "trainer.batch=8", "trainer.micro_batch=8")
    train(chosen, TrainingWatch(notice=said.append))
    assert "has not learned to copy yet" not in said[-1]
    lm, rows = farspan.load(chosen.out, device="cpu"), ready(chosen)[1]
    batch = default_collate([rows[i] for i in range(16)])
    assert torch.equal(batch["context_input_ids"].flatten(1), batch["input_ids"][:, 1:])
    hidden = batch | {"context_attention_mask": torch.zeros_like(batch["context_attention_mask"])}
    with torch.no_grad():
        seen, unseen = (float(terms(lm.model, lm.model, given)["nats"]) for given in (batch, hidden))
    assert seen < unseen - 0.5


def test_a_warm_up_that_has_not_learned_to_copy_says_so(settings: Make) -> None:
    said: list[str] = []
    train(settings("a", "stage=warmup", "trainer.steps=2"), TrainingWatch(notice=said.append))
    assert "has not learned to copy yet" in said[-1]


def test_the_loss_is_that_of_the_models_own_forward(settings: Make) -> None:
    lm = opened(settings("a"))
    with torch.no_grad():
        for cross in lm.model.cross_attentions():
            torch.nn.init.normal_(cross.o_proj.weight, std=0.3)
    ids = torch.randint(1, 290, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = {
        "input_ids": ids,
        "labels": ids.clone().index_fill_(1, torch.arange(4), -100),
        "context_input_ids": torch.randint(1, 290, (2, 2, 5), generator=torch.Generator().manual_seed(1)),
        "context_attention_mask": torch.tensor([[[1] * 5, [0] * 5], [[1] * 5, [1, 1, 1, 0, 0]]]),
    }
    given = terms(lm.model, lm.model, batch)["nats"]
    expected = lm.model(**batch).loss
    close(given, expected)
    trained = [p for p in lm.model.parameters() if p.requires_grad]
    for one, other in zip(*(torch.autograd.grad(loss, trained) for loss in (given, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_the_decoder_stays_as_it_is_and_what_is_added_moves(settings: Make) -> None:
    chosen = settings("a", "trainer.steps=4")
    train(chosen)
    base, lm = tiny_model().state_dict(), farspan.load(chosen.out, device="cpu")
    assert json.loads((Path(chosen.out) / "config.json").read_text())["use_cache"]  # which the Trainer turns off
    state = lm.model.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in base.items())
    before = opened(settings("b")).model.state_dict()
    still = [name for name, weight in added(chosen).items() if torch.equal(weight, before[name])]
    assert still in ([], ["encoder.embed_tokens.weight"])


def test_activations_are_computed_again_where_they_are_not_kept(
    settings: Make, trained_computing_again: Callable[..., None]
) -> None:
    trained_computing_again(train, settings, added)


def test_checkpoints_hold_only_what_is_trained(settings: Make) -> None:
    for out, overrides in (("a", ()), ("b", ("model.train_encoder=false",))):
        chosen = settings(out, "trainer.steps=4", *overrides)
        train(chosen)
        kept = load_file(Path(chosen.out) / "checkpoints" / "checkpoint-4" / "model.safetensors")
        model = opened(chosen).model
        expected = {name for name, _ in added_parameters(model) if out == "a" or "cross_attn" in name}
        assert kept.keys() == expected


def test_trained_weights_are_fp32_over_a_decoder_in_bf16(settings: Make) -> None:
    chosen = settings("a", "trainer.steps=2", "model.dtype=bfloat16")
    train(chosen)
    lm = opened(chosen)
    assert {p.dtype for _, p in added_parameters(lm.model)} == {torch.float32}
    assert lm.model.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert {weight.dtype for weight in added(chosen).values()} == {torch.float32}
    rounded = settings("b", "trainer.steps=2", "trainer.dtype=bfloat16")
    train(rounded)
    assert {weight.dtype for weight in added(rounded).values()} == {torch.bfloat16}
    main = opened(settings("main", f"model.warmed_up={rounded.out}")).model
    assert {p.dtype for _, p in added_parameters(main)} == {torch.float32}


def test_the_main_stage_begins_with_what_the_warm_up_left(settings: Make) -> None:
    warm = settings("warm", "stage=warmup", "trainer.steps=4")
    train(warm)
    state = opened(settings("main", f"model.warmed_up={warm.out}")).model.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in added(warm).items())
    with pytest.raises(ValueError, match=r"model\.layers = 1, but .* was warmed up with 2: leave it out"):
        opened(settings("main", f"model.warmed_up={warm.out}", "model.layers=1"))
    without = opened(settings("main", "model.warmed_up=")).model
    assert all((cross.o_proj.weight == 0).all() for cross in without.cross_attentions())


def test_the_main_stage_hides_parts_of_chunks_and_the_warm_up_none(settings: Make) -> None:
    def seen(*overrides: str) -> float:
        rows = ready(settings("a", *overrides))[1]
        return float(torch.stack([rows[i]["context_attention_mask"] for i in range(40)]).float().mean())

    assert seen("stage=warmup") == 1
    assert seen("data.noise.rate=0.0") == 1
    assert seen("data.noise.rate=1.0", "data.noise.whole=1.0") == 0
    assert 0.7 < seen() < 0.95  # 1 - 0.3 · (0.1 + 0.9 · 9/16)


def test_a_training_is_of_its_seed(settings: Make) -> None:
    one, same, other = (ready(settings("a", f"trainer.seed={s}"))[1][0] for s in (1, 1, 2))
    assert torch.equal(one["input_ids"], same["input_ids"])
    assert not torch.equal(one["input_ids"], other["input_ids"])


def test_a_random_encoder_has_nothing_of_the_warm_up(settings: Make) -> None:
    warm = settings("warm", "stage=warmup", "trainer.steps=4")
    train(warm)
    model = opened(settings("main", f"model.warmed_up={warm.out}", "model.random_encoder=true")).model
    assert all((cross.o_proj.weight == 0).all() for cross in model.cross_attentions())
    name = "encoder.layers.0.mlp.up_proj.weight"
    assert not torch.equal(model.state_dict()[name], added(warm)[name])


def test_each_ablation_is_a_field(settings: Make) -> None:
    def weights(*overrides: str) -> dict[str, Tensor]:
        return opened(settings("a", *overrides)).model.state_dict()

    plain, q = weights(), "model.layers.0.cross_attn.q_proj.weight"
    assert torch.equal(plain[q], plain["model.layers.0.self_attn.q_proj.weight"])
    assert (weights("model.initial=zero")[q] == 0).all()
    assert float(weights("model.initial=random")[q].std()) == pytest.approx(0.02, rel=0.1)
    encoder = "encoder.layers.0.mlp.up_proj.weight"
    assert not torch.equal(plain[encoder], weights("model.random_encoder=true")[encoder])
    frozen = settings("frozen", "model.train_encoder=false", "trainer.steps=2")
    train(frozen)
    assert torch.equal(added(frozen)[encoder], plain[encoder])


def test_an_encoder_beside_that_of_a_warm_up_is_named(settings: Make, tmp_path: Path) -> None:
    """Some configs have both, so that `model.warmed_up=` is all that an ablation changes."""
    train(settings("warm", "stage=warmup", "trainer.steps=2"))
    lines: list[str] = []
    for chosen in (settings("a"), settings("a", f"model.warmed_up={tmp_path / 'warm'}")):
        prepare(chosen, opened(chosen), TrainingWatch(notice=lines.append))
    assert lines.count("model.encoder: it is not used, as model.warmed_up has an encoder") == 1


def test_layers_and_states_are_chosen(settings: Make) -> None:
    config = opened(settings("a", "model.layers=1", "model.states=1")).model.config
    assert (config.num_cross_attn_layers, config.num_cross_attn_hidden_states) == (1, 1)
    config = opened(settings("a", "model.layers=2", "model.states=2")).model.config
    assert (config.num_cross_attn_layers, config.num_cross_attn_hidden_states) == (2, 2)


def test_a_training_is_not_continued_beside_another_frozen_encoder(settings: Make, tmp_path: Path) -> None:
    """Its weights are in no checkpoint; those of a trained encoder are."""
    for frozen in (False, True):
        how = f"model.train_encoder={'false' if frozen else 'true'}", "optimizer.decay_fraction=0"
        train(settings(f"{frozen}", *how, "trainer.steps=2"))
        longer = settings(f"{frozen}", *how, "trainer.steps=4")
        encoder = tiny_encoder(max_position_embeddings=16)
        encoder.get_input_embeddings().weight.data += 1
        encoder.save_pretrained(tmp_path / "encoder")
        if frozen:
            with pytest.raises(ValueError, match=r"the model that is trained has changed since the training"):
                train(longer)
            continue
        train(longer)
        tiny_encoder(max_position_embeddings=16).save_pretrained(tmp_path / "encoder")


@pytest.mark.parametrize("changed", ["index", "teacher"])
def test_a_training_is_not_continued_with_another_index_or_teacher(
    settings: Make, tmp_path: Path, topical: Path, changed: str
) -> None:
    def index(words: int) -> str:
        return str(retrieval.build(str(topical), tmp_path / "index", words=words))

    def teacher(std: float) -> None:
        shutil.copytree(tmp_path / "decoder", tmp_path / "teacher", dirs_exist_ok=True)
        model = tiny_model()
        model.lm_head.weight.data += std
        model.save_pretrained(tmp_path / "teacher")

    how: tuple[str, ...] = "optimizer.decay_fraction=0", "trainer.save_every=1"
    if changed == "index":
        how += "data.mixture={ retrieved = 1.0 }", f"data.index={tmp_path / 'index'}", "data.query=8"
        kind, run, change = CepeSettings, train, index
    else:
        how += f"distill.teacher={tmp_path / 'teacher'}", "distill.stored=false"
        kind, run, change = DistillSettings, distil, teacher
    change(8)
    before = run(settings("a", *how, "trainer.steps=2", kind=kind))
    assert run(settings("a", *how, "trainer.steps=3", kind=kind))[changed] == before[changed]
    shutil.rmtree(tmp_path / changed)
    change(9)
    with pytest.raises(
        ValueError, match=f"the {changed} has changed since the training in .* expected {before[changed]}"
    ):
        run(settings("a", *how, "trainer.steps=4", kind=kind))


def test_a_training_is_not_continued_with_another_config_of_the_teacher(settings: Make, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "decoder", tmp_path / "teacher")
    how = f"distill.teacher={tmp_path / 'teacher'}", "distill.stored=false", "optimizer.decay_fraction=0"
    distil(settings("a", *how, "trainer.steps=2", kind=DistillSettings))
    configure(tmp_path / "teacher", rms_norm_eps=0.5)
    with pytest.raises(ValueError, match=r"the config of the teacher has changed since .* began: rms_norm_eps was"):
        distil(settings("a", *how, "trainer.steps=3", kind=DistillSettings))


def test_a_training_records_the_weights_that_it_began_with(settings: Make, tmp_path: Path) -> None:
    warm_up = train(settings("warm", "stage=warmup", "trainer.steps=2"))
    assert warm_up["encoder"] == fingerprint(nn.ModuleList([tiny_encoder(max_position_embeddings=16)]))
    how = f"model.warmed_up={tmp_path / 'warm'}", "optimizer.decay_fraction=0"
    before = train(settings("a", *how, "trainer.steps=2"))
    assert json.loads((tmp_path / "a" / "training.json").read_text())["warmed_up"] == before["warmed_up"]
    train(settings("warm", "stage=warmup", "trainer.steps=2", "trainer.seed=1", f"out={tmp_path / 'other'}"))
    shutil.copy(tmp_path / "other" / ADAPTER, tmp_path / "warm" / ADAPTER)
    assert train(settings("a", *how, "trainer.steps=4"))["warmed_up"] == before["warmed_up"]
    assert train(settings("b", *how, "trainer.steps=2"))["warmed_up"] != before["warmed_up"]


def test_zero_queries_keys_and_values_never_learn(settings: Make) -> None:
    """With an output projection of zero as well, every gradient is zero: the ablation is the base."""
    lm = opened(settings("a", "model.initial=zero"))
    row = DocumentRows(
        numbered(100), settings("a").data, samples=1, separator=lm.separator.ids, seed=0
    )[0]  # fmt: skip
    loss = terms(lm.model, lm.model, {name: tensor[None] for name, tensor in row.items()})["nats"]
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for _, p in added_parameters(lm.model))


def test_without_a_chunk_in_sight_a_batch_is_read_as_by_the_decoder(settings: Make) -> None:
    lm = opened(settings("a"))
    ids = torch.randint(1, 290, (2, 9), generator=torch.Generator().manual_seed(0))
    chunks = torch.ones(2, 3, 4, dtype=torch.long)
    batch = {"input_ids": ids, "context_input_ids": chunks, "context_attention_mask": torch.zeros_like(chunks)}
    hidden, _ = decoded(lm.model, lm.model, batch)
    assert torch.equal(hidden, lm.model.model(input_ids=ids).last_hidden_state)
    hidden.sum().backward()  # all that is trained has a gradient, or data parallelism would wait for it
    assert all(p.grad is not None for name, p in added_parameters(lm.model) if "embed" not in name)


def test_a_training_killed_and_repeated_has_the_same_losses_and_weights(
    settings: Make, left_by_a_kill: Callable[..., None]
) -> None:
    whole, killed = settings("whole"), settings("killed")
    left_by_a_kill(Trainer, "training_step", whole, killed, at=13)  # in step 7; a checkpoint was saved after step 4
    train(whole)
    assert (Path(killed.out) / "checkpoints" / "checkpoint-4").is_dir()
    assert not (Path(killed.out) / "cepe_adapter.safetensors").exists()
    train(killed)
    losses = [[(e["step"], e["loss"]) for e in log(one) if "loss" in e] for one in (whole, killed)]
    assert losses[0] == losses[1]
    assert_same(whole, killed)


def test_a_checkpoint_that_lacks_what_is_trained_is_refused(settings: Make) -> None:
    train(settings("a", "trainer.steps=4", "optimizer.decay_fraction=0"))
    longer = settings("a", "trainer.steps=8", "optimizer.decay_fraction=0")
    file = Path(longer.out) / "checkpoints" / "checkpoint-4" / "model.safetensors"
    state = load_file(file)
    state.pop("encoder.norm.weight")
    save_file(state, file)
    with pytest.raises(ValueError, match=r"of another training: encoder\.norm\.weight and 0 other weights differ"):
        train(longer)


def test_a_training_watches_itself(settings: Make, drawn: None) -> None:
    chosen = settings("a", "trainer.steps=4", "watch.every=2", "watch.repeats=2", "watch.curve=false")
    train(chosen)
    measured = [entry for entry in log(chosen) if "farspan/perplexity_24" in entry]
    assert [entry["step"] for entry in measured] == [0, 2, 4]
    # without context it is the decoder, which does not change; with context it is the decoder before the first step
    assert len({entry["farspan/perplexity_24"] for entry in measured}) == 1
    assert measured[0]["farspan/perplexity_48"] == pytest.approx(measured[0]["farspan/perplexity_24"], rel=0.2)
    card = (Path(chosen.out) / "README.md").read_text()
    assert f"| 48 | {measured[0]['farspan/perplexity_48']:.4g} | {measured[-1]['farspan/perplexity_48']:.4g} |" in card
    assert "cepe:chunk=8,decoder_window=25" in card
    assert (Path(chosen.out) / "losses.svg").stat().st_size


ENCODER = "an encoder and cross-attention, 5 parameters, were trained beside decoder"


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ((), (ENCODER, "24 tokens in the decoder after\n3 chunks of 8")),
        (("model.train_encoder=false",), ("cross-attention, 5 parameters, was trained between a frozen encoder and",)),
        (("stage=warmup",), (ENCODER, "24 tokens in the decoder and the same tokens as\n3 chunks", "in this warm-up.")),
        (("model.warmed_up=w", "data.mixture={ copied = 1.0 }"), ("context in its warm-up and in a share of its",)),
        (("model.warmed_up=w", "model.random_encoder=true"), ()),
    ],
)  # fmt: skip
def test_a_card_says_what_was_trained_and_whether_to_copy(
    settings: Make, changes: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    chosen = settings("a", *changes)
    summary = {"settings": chosen.model_dump(mode="json"), "stage": chosen.stage, "trained": 5, "rows": 48}
    card = cepe_card(summary | {"from": {"separator": {"ids": [0]}}}, [])
    assert all(part in card for part in parts)
    assert ("do not compare this model's forgetting curve" in card) == any("warm-up" in part for part in parts)


def test_a_card_names_the_index_of_its_passages_and_its_teacher(settings: Make) -> None:
    mixture = "data.mixture={retrieved=0.25,cat=0.75}", "data.index=indexes/mine", "data.query=8"
    chosen = settings("a", *mixture)
    summary = {"stage": "main", "trained": 5, "rows": 48, "from": {"separator": {"ids": [0]}}}
    card = cepe_card(summary | {"settings": chosen.model_dump(mode="json")}, [])
    assert (
        "In 25% of the windows the chunks were instead the passages of the index `mine` that match the first 8" in card
    )
    for teacher, named in ((), "decoder"), (("distill.teacher=some/larger",), "some/larger"):
        chosen = settings("b", *teacher, kind=DistillSettings)
        card = cepe_card(summary | {"settings": chosen.model_dump(mode="json")}, [])
        assert f"It learned from the distributions of {named}, which read chunks" in card
        assert "index" not in card
    chosen = settings("b", "distill.kl=0", kind=DistillSettings)
    assert "distributions" not in cepe_card(summary | {"settings": chosen.model_dump(mode="json")}, [])


def test_what_is_measured_is_reported(settings: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: dict[int, set[str]] = {}
    shown: list[tuple[str, int]] = []

    class Reporter(TrainerCallback):
        tb_writer = SimpleNamespace(add_image=lambda name, image, step, dataformats: shown.append((name, step)))

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            told.setdefault(state.global_step, set()).update(logs)

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tensorboard", Reporter)
    monkeypatch.setattr(trackers, "refuse_missing", lambda names: None)
    monkeypatch.setattr(trackers, "as_pixels", lambda figure: np.zeros((2, 3, 3), np.uint8))
    train(settings("a", "trainer.steps=4", "watch.every=2", "watch.repeats=2", 'trainer.report_to=["tensorboard"]'))
    assert list(told) == [0, 2, 4]
    assert all(
        {"farspan/perplexity_24", "farspan/perplexity_48", "farspan/half_life", "farspan/reach"} <= found
        and any(name.startswith("farspan/copied_beyond_guessing_") for name in found)
        for found in told.values()
    )
    assert shown == [(f"train/farspan/{task}", step) for step in (0, 2, 4) for task in ("perplexity", "curve")]
    assert {"loss", "loss_nats"} <= told[2]
    assert "Forgetting curve, half-life in tokens, step 0, step 4: " in (tmp_path / "a" / "README.md").read_text()


def test_none_and_all_are_names_of_reporters(settings: Make) -> None:
    for name in ("none", "all"):
        assert train(settings(name, "trainer.steps=2", f'trainer.report_to=["{name}"]'))["loss"] > 0


@pytest.mark.usefixtures("drawn")
def test_a_single_loss_is_drawn_as_a_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr("farspan.report.picture.saved", lambda figure, *place: figures.append(figure) or [])
    one = {"step": 4, "loss": 2.0, "loss_sparse": 2.0, "loss_window": 2.0, "length": 32}
    for log in ([one], [one, one | {"step": 8}]):
        draw_cepe_losses(log, tmp_path, 32)
        draw_smt_losses(log, tmp_path, 32)
    markers = [figure.axes[0].lines[0].get_marker() for figure in figures]
    assert markers == ["o"] * 4


def test_a_watch_that_is_refused_does_not_take_the_folder(settings: Make) -> None:
    with pytest.raises(ValueError, match="tokens = 10 are too few"):
        train(settings("a", "watch.every=2", "watch.tokens=10"))
    assert train(settings("a", "trainer.steps=2"))["loss"] > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.batch=3"], r"trainer\.batch = 3 is not a multiple"),
        (["optimizer.warmup_steps=10"], r"do not fit into trainer\.steps = 12"),
        (['trainer.report_to=["wandb"]'], r"trainer\.report_to = \['wandb'\]: .*install"),
        (['trainer.report_to=["papyrus"]'], "papyrus is not supported, only"),
    ],
)
def test_what_can_be_refused_is_refused_before_a_teacher_is_asked(
    settings: Make, overrides: list[str], message: str
) -> None:
    said: list[str] = []
    with pytest.raises(ValueError, match=message):
        distil(settings("a", *overrides, kind=DistillSettings), TrainingWatch(notice=said.append))
    assert not said


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.encoder="], r"no encoder: give model\.encoder"),
        (["data.decoder=512"], r"data\.decoder = 512 tokens, and a separator .* 512 tokens"),
        (["model.warmed_up=a", "model.initial=zero"], r'model\.initial = "zero" needs new cross-attention'),
        (["model.warmed_up=nowhere"], r"model\.warmed_up = 'nowhere' is not a folder.*stage = \"warmup\""),
        (["data.chunk=17"], r"data\.chunk = 17 tokens exceed the encoder's window of 16"),
        (["data.chunks=300"], "no document of 2,424 tokens"),
        (["stage=warmup", "data.chunks=2"], r"2 x 8 = 16 must be data\.decoder = 24"),
        (["trainer.engine=fsdp2"], "distributes a training over processes, but there is only one"),
    ],
)
def test_impossible_settings_are_refused(settings: Make, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(settings("a", *overrides))


def test_a_field_that_does_not_exist_is_named_with_the_closest(settings: Make) -> None:
    with pytest.raises(ValueError, match=r"model\.train_encodr: .*did you mean 'train_encoder'"):
        settings("a", "model.train_encodr=false")
    with pytest.raises(ValueError, match=r"data\.noise\.rte: .*did you mean 'rate'"):
        settings("a", "data.noise.rte=1")
    with pytest.raises(
        ValueError, match=r"data\.mixture: got \{'fliter': 1\.0\}, .* 'filter', 'cat', 'retrieved' or 'copied'"
    ):
        settings("a", "data.mixture={ fliter = 1.0 }")


# distillation


def test_distillation_brings_the_student_to_its_teacher(settings: Make) -> None:
    chosen = settings("a", "distill.ce=0", "trainer.steps=40", "distill.variant=rest", kind=DistillSettings)
    distil(chosen)
    divergences = [entry["loss_kl"] for entry in log(chosen) if "loss_kl" in entry]
    assert divergences[-1] < 0.9 * divergences[0]


def test_a_teacher_asked_once_teaches_as_one_asked_at_each_step(settings: Make) -> None:
    stored, online = (settings(f"{s}", f"distill.stored={s}", "trainer.steps=6", kind=DistillSettings)
                      for s in ("true", "false"))  # fmt: skip
    summaries = distil(stored), distil(online)
    assert summaries[0]["loss"] == summaries[1]["loss"]
    assert_same(stored, online)


def test_a_teacher_that_was_stopped_goes_on(settings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from farspan.train import distill

    whole, stopped = (settings(out, "trainer.steps=6", kind=DistillSettings) for out in ("whole", "stopped"))
    monkeypatch.setattr(distill, "SAMPLES_AT_ONCE", 4)
    monkeypatch.setattr(distill, "BATCHES_A_SAVE", 1)
    distil(whole)
    asked, original = [0], distill.Teacher.of

    def of(self: Any, batch: Any) -> Any:
        asked[0] += 1
        if asked[0] == 4:
            raise KeyboardInterrupt
        return original(self, batch)

    monkeypatch.setattr(distill.Teacher, "of", of)
    with pytest.raises(KeyboardInterrupt):
        distil(stopped)
    distil(stopped)
    assert asked[0] == 7  # six batches, one of them asked again
    assert_same(whole, stopped)


def test_a_teacher_is_asked_of_more_samples_for_a_longer_training(
    settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def taught(steps: int, out: str, *overrides: str) -> Any:
        chosen = settings("a", f"trainer.steps={steps}", *overrides, kind=DistillSettings)
        lm = opened(chosen)
        rows = prepare(chosen, lm, TrainingWatch(notice=said.append))
        return store(teacher_of(chosen, rows, lm), rows, tmp_path / out, TrainingWatch(notice=said.append))

    whole = taught(8, "whole")
    taught(4, "grown")
    said.clear()
    grown = taught(8, "grown")
    assert any("reads 16 windows once" in line for line in said)  # four steps of four
    for one, other in zip(map(whole.__getitem__, range(32)), map(grown.__getitem__, range(32)), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    taught(4, "grown")  # fewer are there as well
    with pytest.raises(ValueError, match="holds a teacher's distributions of other samples"):
        taught(8, "grown", "data.chunks=2")
    (tmp_path / "a.jsonl").write_text((tmp_path / "a.jsonl").read_text().replace("alpha", "omega"))
    with pytest.raises(ValueError, match="holds a teacher's distributions of other samples"):
        taught(8, "grown")


def test_a_teacher_does_not_read_for_a_longer_training_that_is_refused(settings: Make) -> None:
    distil(chosen := settings("a", "trainer.steps=4", kind=DistillSettings))
    before = (Path(chosen.out) / "teacher" / "done.json").read_text()
    with pytest.raises(ValueError, match="since the learning rates depend on the number of steps"):
        distil(settings("a", "trainer.steps=8", kind=DistillSettings))
    assert (Path(chosen.out) / "teacher" / "done.json").read_text() == before


@pytest.mark.parametrize("half", ["log_probs.npy", "index.npy", "done.json"])
def test_half_of_what_a_teacher_said_is_named(settings: Make, half: str) -> None:
    chosen = settings("a", "trainer.steps=4", kind=DistillSettings)
    distil(chosen)
    file = Path(chosen.out) / "teacher" / half
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"teacher is damaged .*Delete it"):
        distil(chosen)


def test_the_loss_weighs_cross_entropy_and_divergence_as_it_is_told(settings: Make) -> None:
    chosen = settings("a", "distill.ce=0.5", "distill.kl=3", "trainer.steps=3", "trainer.log_every=1",
                      "optimizer.decay_fraction=0", kind=DistillSettings)  # fmt: skip
    distil(chosen)
    for entry in log(chosen)[:3]:
        assert entry["loss"] == pytest.approx(0.5 * entry["loss_ce"] + 3 * entry["loss_kl"], abs=1e-3)


class Unlabelled(Dataset[dict[str, Tensor]]):
    """Rows whose first decoder tokens have no label, a different number in each row, as after retrieved passages."""

    def __init__(self, rows: Any) -> None:
        self.rows, self.corpus, self.inputs = rows, rows.corpus, rows.inputs

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        row["labels"][: 5 * index] = -100
        return row


def test_each_part_of_a_distillation_is_one_mean_over_a_step_however_it_is_cut(
    settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ce` over its labels, `kl` over all positions: losses and gradients, where rows differ in their labels."""
    found: dict[str, dict[str, Tensor]] = {}

    def keep(self: Any, args: Any, *_: Any, model: Any, **__: Any) -> None:
        found[Path(args.output_dir).parent.name] = {
            n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad
        }

    monkeypatch.setattr("farspan.train.progress.Steps.on_pre_optimizer_step", keep, raising=False)
    monkeypatch.setattr("farspan.train.distill.prepare", lambda *given: Unlabelled(prepare(*given)))
    monkeypatch.setattr("farspan.train.distill.teacher_of", lambda s, rows, lm: teacher_of(s, rows.rows, lm))
    how = "trainer.steps=1", "trainer.log_every=1", "optimizer.clip=1e9", "distill.stored=false", "distill.variant=rest"
    cuts = [settings(f"{n}", f"trainer.micro_batch={n}", *how, kind=DistillSettings) for n in (1, 2, 4)]
    parts = [distil(one)["losses"] for one in cuts]
    assert parts[0] == pytest.approx(parts[2], abs=2e-4)
    assert parts[1] == pytest.approx(parts[2], abs=2e-4)
    for cut in ("1", "2"):
        for name, gradient in found["4"].items():
            torch.testing.assert_close(found[cut][name], gradient, rtol=1e-4, atol=1e-6)


def test_without_a_divergence_distillation_is_the_main_stage(settings: Make) -> None:
    plain = settings("plain", "trainer.steps=4")
    alone = settings("alone", "trainer.steps=4", "distill.kl=0", "distill.teacher=unread", kind=DistillSettings)
    said: list[str] = []
    train(plain)
    distil(alone, TrainingWatch(notice=said.append))
    assert any("distill.teacher and its settings are not used" in line for line in said)
    losses = [[entry["loss"] for entry in log(one) if "loss" in entry] for one in (plain, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_teacher_of_another_vocabulary_or_of_a_shorter_window_is_refused(
    settings: Make, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    saved(tmp_path / "other", tokenizer, tiny_model(vocab_size=310))
    with pytest.raises(ValueError, match=r"another vocabulary \(310 tokens\) than the decoder .* \(300\)"):
        distil(settings("a", f"distill.teacher={tmp_path / 'other'}", "data.text=unread", kind=DistillSettings))
    with pytest.raises(ValueError, match=r"585 tokens are more than the 512 it was trained on"):
        distil(settings("a", "data.chunks=70", kind=DistillSettings))
    with pytest.raises(ValueError, match="run the warm-up with farspan train cepe"):
        distil(settings("a", "stage=warmup", kind=DistillSettings))


def test_a_teacher_whose_tokenizer_reads_otherwise_is_refused(
    settings: Make, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    saved(tmp_path / "other", tokenizer)
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": {"type": "Lowercase"}}))
    with pytest.raises(ValueError, match="another vocabulary"):
        distil(settings("a", f"distill.teacher={tmp_path / 'other'}", kind=DistillSettings))


def test_windows_that_no_teacher_could_read_are_refused(settings: Make) -> None:
    chosen = settings("a", kind=DistillSettings)
    lm, rows = ready(chosen)
    retrieved = ["data.mixture={ retrieved = 1.0 }", "data.index=i", "data.query=8"]
    with pytest.raises(ValueError, match="leave out `retrieved`"):
        teacher_of(settings("a", *retrieved, kind=DistillSettings), rows, lm)
    rows.before = np.array([0, 0])
    with pytest.raises(ValueError, match=r"use data\.separator = false"):
        teacher_of(chosen, rows, lm)


def test_a_distribution_leaves_a_remainder(settings: Make) -> None:
    chosen = settings("a", "distill.top=1000", kind=DistillSettings)
    lm, rows = ready(chosen)
    assert teacher_of(chosen, rows, lm).top == 299  # of 300
