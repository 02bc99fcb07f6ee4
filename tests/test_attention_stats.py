"""Attention statistics: against transformers' own weights, against numbers made by hand, and what the command says."""

import json
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_cli import done, farspan, last_line, refused
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from farspan import hf
from farspan.hf import attend as maths
from farspan.hf.probe import See
from farspan.lm import DEFAULT_TRAINED_LENGTH, LM, load, wrap
from farspan.measuring.grid import measure
from farspan.measuring.setups import grid
from farspan.methods import method
from farspan.record import Row, read_rows
from farspan.report import attention as report
from farspan.tasks.attention import Attention, BoundAttention, packed, powers, shares, spread
from farspan.text import corpora
from farspan.text.corpora import Corpus

import tiny
from tiny import CONFIGS, DIFFLLAMA, PlannedAndFed, saved, tiny_model
from toys import attention_of

ARCHITECTURES = ["llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_neox", "phi3", "smollm3", "cohere"]
LENGTHS = (20, 64, 100)
BIN, SINKS = 16, 5


def some_text(documents: int = 4, length: int = 150) -> Corpus:
    tokens = np.random.default_rng(0).integers(1, 300, documents * length)
    return Corpus("some", "some", tokens, np.arange(documents + 1) * length)


looked_at = partial(tiny.measured, lengths=LENGTHS, repeats=2, batch=2, chunk=23)


def eager(lm: LM, ids: list[int]) -> Tensor:
    """The model's own weights [layers, heads, queries, keys] of one plain forward."""
    own = lm.model.config._attn_implementation
    lm.model.set_attn_implementation("eager")
    with torch.no_grad():
        found = lm.model(input_ids=torch.tensor([ids]), use_cache=False, output_attentions=True).attentions
    lm.model.set_attn_implementation(own)
    return torch.stack(found)[:, 0].double()


def naive(weights: Tensor, sinks: int) -> dict[str, Any]:
    """The statistics of one query and head, weights [keys], one key after the other."""
    length = len(weights)
    own = [float(weight) for weight in weights]
    seen = [position for position in range(length) if own[position] > 0]
    found: dict[str, Any] = {"sinks": sum(own[:sinks])}
    for part, first in (("all", 0), ("rest", sinks)):
        total = sum(own[first:])
        left = {length - 1 - p: own[p] / total for p in range(first, length)}  # by distance
        heavy = sorted(left.values(), reverse=True)
        visible = len([p for p in seen if p >= first])
        bins = [0.0] * -(-length // BIN)
        for distance, weight in left.items():
            bins[distance // BIN] += weight
        ends = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n < length] + [length]
        found[part] = {
            "distance": [sum(weight for distance, weight in left.items() if distance < end) for end in ends],
            "bins": bins,
            "rank": [sum(heavy[:end]) for end in ends],
            "pareto": sum(heavy[: (visible + 3) // 4]),
        }
    return found


def largest_difference(row: Row, weights: Tensor, sinks: int = SINKS) -> float:
    """Between a row and the naive statistics of the model's own weights [layers, heads, queries, keys]."""
    apart = [0.0]
    for layer, head in product(range(weights.shape[0]), range(weights.shape[1])):
        expected = naive(weights[layer, head, row.length - 1, : row.length], sinks)
        apart.append(abs(row.scores["sinks"][layer][head] - expected["sinks"]))
        for part in ("all", "rest"):
            for pick, values in expected[part].items():
                given = row.scores[part][pick][layer][head]
                apart.append(float(np.abs(np.subtract(given, values)).max()))
    return max(apart)


def ids_of(task: BoundAttention, lm: LM, repeats: int, lengths: tuple[int, ...] = LENGTHS) -> dict[str, list[int]]:
    return {e.id: [*lm.separator.ids, *e.payload.tolist()] for e in task.examples(lm, lengths, repeats, 0)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_shares_and_map_equal_those_of_the_models_own_weights(
    architecture: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    lm = wrap(tiny_model(architecture), tokenizer, "tiny")
    task = attention_of(some_text(), BIN, SINKS, map_bins=7)
    rows = looked_at(tmp_path, lm, task)
    assert {(row.length, row.repeat, row.status) for row in rows} == {(n, r, "ok") for n in LENGTHS for r in (0, 1)}
    ids = ids_of(task, lm, 2)
    for row in rows:
        weights = eager(lm, ids[row.example])
        assert weights[:, :, row.length - 1].max(-1).values.mean() < 0.95  # or equality would say nothing
        assert largest_difference(row, weights) <= 1e-6
        if row.length == 100:
            whole = weights.mean((0, 1))
            bins = torch.arange(100) // 15  # at most 7 bins
            expected = torch.zeros(7, 7, dtype=torch.float64)
            for query, key in product(range(7), range(7)):
                expected[query, key] = whole[bins == query][:, bins == key].sum(-1).mean()
            assert np.abs(report.unpacked(row.scores["map"]) - expected.numpy()).max() <= 1e-6
        else:
            assert "map" not in row.scores


def test_shares_equal_those_of_a_real_models_own_weights_on_a_real_book(shared_data: Path, tmp_path: Path) -> None:
    lm = load(shared_data / "models" / "stories260K", dtype="float32", device="cpu")
    lm.model.double()  # in float32 the model's own weights are 6e-6 from these
    book = corpora.load(str(shared_data / "books" / "great_gatsby.txt"), lm.tokenizer)
    task = attention_of(book, BIN, SINKS)
    rows = looked_at(tmp_path, lm, task, lengths=(64, 500), repeats=1, chunk=200)
    ids = ids_of(task, lm, 1, (64, 500))
    assert max(largest_difference(row, eager(lm, ids[row.example])) for row in rows) <= 1e-6


def test_numbers_do_not_depend_on_chunk_batch_or_the_size_of_blocks(
    lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = attention_of(some_text(), BIN, SINKS, map_bins=7)
    (first, second), *others = (
        looked_at(tmp_path / str(i), lm, task, lengths=(40,), **way)
        for i, way in enumerate([{"chunk": 1024, "batch": 1}, {"chunk": 7, "batch": 2}, {"chunk": 1, "batch": 1}])
    )
    rows_at_once: list[int] = []
    monkeypatch.setattr(maths, "SCORES_AT_ONCE", {"cpu": 1})
    watch = hf.watch_attention

    def counted(lm: LM, layers: Any, queries: Any, see: See) -> Any:
        def noting(layer: int, queries: Tensor, keys: Tensor, scores: Tensor) -> None:
            rows_at_once.append(scores.shape[2])
            see(layer, queries, keys, scores)

        return watch(lm, layers, queries, noting)

    monkeypatch.setattr(hf, "watch_attention", counted)
    others.append(looked_at(tmp_path / "blocks", lm, task, lengths=(40,), chunk=1024))
    assert set(rows_at_once) == {16, 40 % 16}  # never [time, time]
    for rows in others:
        for one, other in zip((first, second), sorted(rows, key=lambda row: row.repeat), strict=True):
            assert one.key == other.key
            for part, pick in product(("all", "rest"), ("distance", "bins", "rank", "pareto")):
                assert np.allclose(one.scores[part][pick], other.scores[part][pick], atol=2e-6)
            maps = [report.unpacked(row.scores["map"]) for row in (one, other)]
            assert np.allclose(*maps, atol=1e-6)


def test_a_reading_that_goes_on_gives_what_a_reading_of_one_length_gives(lm: LM, tmp_path: Path) -> None:
    task = attention_of(some_text(), BIN, SINKS)
    looked_at(tmp_path, lm, task)
    path = tmp_path / "rows.jsonl"
    whole = {row.key: row.scores for row in read_rows(tmp_path)}
    lines = path.read_text().splitlines(keepends=True)
    for kept in (lambda length: length != 100, lambda length: length == 100):
        path.write_text("".join(line for line in lines if kept(json.loads(line)["length"])))
        again = {row.key: row.scores for row in looked_at(tmp_path, lm, task)}
        assert again.keys() == whole.keys()
        for key, scores in again.items():
            assert ("map" in scores) == ("map" in whole[key])
            assert np.allclose(scores["all"]["rank"], whole[key]["all"]["rank"], atol=2e-6)


def test_models_that_chunks_mislead_are_watched_in_plain_forwards(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    lm = wrap(tiny_model(rope_parameters=rope, max_position_embeddings=40), tokenizer, "dynamic")
    task = attention_of(some_text(), BIN, SINKS)
    rows = looked_at(tmp_path, lm, task, repeats=1)
    ids = ids_of(task, lm, 1)
    for row in rows:
        weights = eager(lm, ids[row.example][: row.length])  # by the rotation of this length
        assert largest_difference(row, weights) <= 1e-6
    assert rows[-1].length == 100
    assert report.unpacked(rows[-1].scores["map"]).sum(-1) == pytest.approx(np.ones(100), abs=1e-6)


# by hand


def test_shares_of_weights_made_by_hand() -> None:
    weights = torch.tensor([[[0.4, 0.0, 0.1, 0.0, 0.3, 0.05, 0.05, 0.1]]], dtype=torch.float64)
    found = shares(weights, 3, 8)
    expected = {"distance": [0.1, 0.15, 0.5, 1.0], "bins": [0.2, 0.4, 0.4], "rank": [0.4, 0.7, 0.9, 1.0], "pareto": 0.7}
    for pick, values in expected.items():
        assert found[pick][0, 0].tolist() == pytest.approx(values)
    assert powers(8) == [1, 2, 4, 8]
    assert powers(9) == [1, 2, 4, 8, 9]
    assert powers(1) == [1]


def test_distances_behind_a_window_hold_nothing() -> None:
    found = shares(torch.tensor([[[0.25, 0.25, 0.5]]], dtype=torch.float64), 2, 9)
    assert found["distance"][0, 0].tolist() == pytest.approx([0.5, 0.75, 1, 1, 1])
    assert found["bins"][0, 0].tolist() == pytest.approx([0.75, 0.25, 0, 0, 0])
    assert found["pareto"][0, 0] == 0.5  # a quarter of three keys is one


def test_what_sinks_leave_is_told_apart_where_they_hold_everything() -> None:
    scores = torch.tensor([[[900.0, 0.0, 0.0, 1.0]]], dtype=torch.float64)
    found = spread(scores, 0, 1, 2, 4)
    assert found["sinks"].item() == 1
    assert found["rest"]["distance"][0, 0].tolist() == pytest.approx([np.e / (2 + np.e), (1 + np.e) / (2 + np.e), 1.0])
    assert spread(scores[..., 1:], 1, 1, 2, 4)["sinks"].item() == 0  # the window begins behind them


def test_a_map_survives_its_row() -> None:
    map = np.tril(np.random.default_rng(0).random((9, 9))).astype(np.float32)
    assert np.array_equal(report.unpacked(packed(map)), map)


# what is refused, and what is left behind


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        ("gpt_oss", "GptOssForCausalLM: its attention is more than queries, keys and values"),
        ("bloom", "BloomForCausalLM: its attention does not go through"),
        ("falcon", "FalconForCausalLM: its attention does not go through"),
        ("gptj", "GPTJForCausalLM: its attention does not go through"),
        ("mamba2", "Mamba2ForCausalLM, which has layers of"),
        ("falcon_h1", "FalconH1ForCausalLM, which has layers of"),
        ("llama4", "Llama4ForCausalLM, which has layers of chunked_attention"),
        ("diffllama", "DiffLlamaForCausalLM: its weights are differences of several softmaxes"),
    ],
)
def test_attention_that_is_not_a_softmax_over_keys_is_refused_by_name(
    architecture: str, said: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONFIGS, "diffllama", DIFFLLAMA)
    lm = wrap(tiny_model(architecture), tokenizer, "tiny")
    with pytest.raises(ValueError, match=f"watching attention cannot be used with {said}"):
        looked_at(tmp_path, lm, attention_of(some_text(), BIN, SINKS))


@pytest.mark.parametrize(
    "how", ["sinks:window=25,sinks=2", "topk:k=4", "rope:type=dynamic,original=40", "replug:piece=30"]
)
def test_methods_with_attention_of_their_own_or_several_passes_are_refused(how: str, lm: LM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tiny-llama reads the text as one sequence, and this method"):
        looked_at(tmp_path, lm, attention_of(some_text(), BIN, SINKS), how=how)


def test_attention_that_a_method_has_taken_over_cannot_be_watched(lm: LM) -> None:
    taken_over = "watching attention cannot be put on a model whose attention another method has replaced"
    with (
        method("topk:k=4").on(lm),
        pytest.raises(ValueError, match=taken_over),
        hf.watch_attention(lm, None, None, print),
    ):
        pass


def test_rope_methods_are_looked_at(lm: LM, tmp_path: Path) -> None:
    task = attention_of(some_text(), BIN, SINKS)
    full, scaled = (
        looked_at(tmp_path / str(i), lm, task, how=how)[-1].scores["all"]["distance"]
        for i, how in enumerate(("full", "rope:type=ntk,factor=4"))
    )
    assert np.abs(np.subtract(full, scaled)).max() > 1e-3


def test_watching_leaves_no_trace_also_after_an_error(lm: LM) -> None:
    ids = torch.arange(1, 41)[None]
    before, own = lm.model(input_ids=ids).logits, lm.model.config._attn_implementation

    def breaks(*_: Any) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"), hf.watch_attention(lm, [0], None, breaks):
        lm.model(input_ids=ids)
    assert lm.model.config._attn_implementation == own
    assert torch.equal(lm.model(input_ids=ids).logits, before)


def test_only_the_layers_and_queries_asked_for_are_shown(lm: LM, tmp_path: Path) -> None:
    shown: list[tuple[int, list[int], list[int]]] = []
    weights = eager(lm, list(range(1, 13)))[1]

    def see(layer: int, queries: Tensor, keys: Tensor, scores: Tensor) -> None:
        shown.append((layer, queries.tolist(), keys.tolist()))
        assert (scores[0].softmax(-1) - weights[:, queries][..., keys]).abs().max() <= 1e-6

    with torch.no_grad(), hf.watch_attention(lm, [-1], {11, 3, 8}, see):
        stream = hf.Stream(lm.model)
        for part in torch.arange(1, 13)[None].split(6, 1):
            stream.step(part)
    assert shown == [(1, [3], list(range(6))), (1, [8, 11], list(range(12)))]
    with pytest.raises(ValueError, match="tiny-llama has no attention layer 2: its layers are 0 to 1"):
        looked_at(tmp_path, lm, attention_of(some_text(), BIN, SINKS, layers=(0, 2)))
    rows = looked_at(tmp_path / "last", lm, attention_of(some_text(), BIN, SINKS, layers=(-1,)))
    every = looked_at(tmp_path / "all", lm, attention_of(some_text(), BIN, SINKS))
    assert rows[0].scores["layers"] == [1]
    assert rows[0].scores["all"]["rank"] == every[0].scores["all"]["rank"][1:]


def test_weights_that_are_no_numbers_are_rows_that_name_the_layer(lm: LM, tmp_path: Path) -> None:
    text = some_text()
    text.tokens[:75] = 2  # in one document only
    text.tokens[75:][text.tokens[75:] == 2] = 3
    lm.model.model.embed_tokens.weight.data[2] = torch.nan
    rows = looked_at(tmp_path, lm, attention_of(text, BIN, 0), repeats=4)
    broken = [row for row in rows if row.status == "nan"]
    assert {row.reason for row in broken if row.length == 100} == {
        "at 100 tokens layer 0 has attention weights that are not numbers"
    }
    assert len({row.repeat for row in broken}) == 1  # the others went on
    (one,) = report.series(rows)
    assert one.at[-1].shares["all"]["pareto"].shape == (3, 2, 4)
    assert one.failures[100] == "nan"


def test_intervals_of_shares_are_within_0_and_1() -> None:
    """Means of 2 repeats that differ by 0.1 have intervals of ±0.64."""
    sinks, bins = np.array([0.0, 0.1]), np.array([1.0, 0.9])
    one = {"bins": bins[:, None, None, None], "pareto": bins[:, None, None]}
    at = report.At(64, [64], [64], sinks[:, None, None], {"all": one, "rest": one}, None)
    found = at.as_data()
    assert (found["pareto"], found["pareto_low"], found["pareto_high"]) == (0.95, pytest.approx(0.314690), 1.0)
    assert (found["sinks"], found["sinks_low"], found["sinks_high"]) == (0.05, 0.0, pytest.approx(0.685310))
    shown = [report._short(values) for values in at.headline().values()]
    assert (shown[0], shown[2]) == ("0.950\n[0.315, 1.000]", "0.050\n[0.000, 0.685]")
    assert report._short(bins[:1]) == "1.000"  # one repeat has no interval


def test_the_last_position_is_used_and_what_is_beyond_is_a_row(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    lm = wrap(tiny_model("gpt2", n_positions=64), tokenizer, "tiny-gpt2")
    rows = looked_at(tmp_path, lm, attention_of(some_text(), BIN, SINKS), lengths=(32, 64, 65), chunk=1024)
    assert {(row.length, row.status) for row in rows} == {(32, "ok"), (64, "ok"), (65, "too_long")}


def test_the_tokens_of_a_plan_are_those_that_are_fed(lm: LM, planned_and_fed: PlannedAndFed) -> None:
    task = attention_of(some_text(), BIN, SINKS)
    assert planned_and_fed(task, lm, lengths=LENGTHS, repeats=2, batch=2) == (200, 200)


@pytest.mark.parametrize(
    ("trained", "sinks", "lengths", "bin"),
    [
        ([4096], 8, (512, 1024, 2048, 4096), 1024),
        ([512, 2048], 8, (256, 512, 1024, 2048), 512),
        ([131_072], 8, (1024, 2048, 4096, 8192), 1024),
        ([64], 8, (16, 32, 64), 16),
        ([None], 0, (256, 512, 1024, 2048), 512),
    ],
)
def test_lengths_are_parts_of_the_longest_trained_length(
    trained: list[int | None], sinks: int, lengths: tuple[int, ...], bin: int
) -> None:
    task = Attention(sinks=sinks)
    chosen = task.lengths([length or DEFAULT_TRAINED_LENGTH for length in trained])
    assert (chosen, task.resolved(chosen, ()).bin) == (lengths, bin)
    assert Attention(bin=7).resolved((40, 32_768), ()).bin == 7


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lengths": (0, 4)}, "expected numbers of tokens from 1 on"),
        ({"repeats": 0}, "repeats: got 0, expected a whole number, at least 1"),
        ({"bin": -1}, "bin: got -1, expected 1 to 1,000,000,000,000"),
        ({"map_bins": 513}, "map_bins: got 513, expected 0 to 512"),
        ({"sinks": -1}, "sinks: got -1, expected at least 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any], said: str) -> None:
    what = {key: options.pop(key) for key in ("lengths", "repeats") if key in options}
    with pytest.raises(ValueError, match=said):
        grid([], [Attention(**options)], **what)


def test_lengths_without_a_key_beside_the_sinks_are_refused(lm: LM) -> None:
    with pytest.raises(ValueError, match=r"a length of 5 leaves no key beside 5 sinks and a separator of 1: give leng"):
        attention_of(some_text(), BIN, SINKS).examples(lm, (5, 100), 1, 0)
    assert attention_of(some_text(), BIN, SINKS).examples(lm, (6, 100), 1, 0)


# several models and methods, the pictures, the command


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, model in (("before", tiny_model()), ("after", tiny_model(rms_norm_eps=0.5, max_position_embeddings=64))):
        saved(folder / name, tokenizer, model)
    return folder


def attention(*arguments: object) -> Any:
    """A small measurement into run/, whose options later ones override."""
    small = ("--text", "text.txt", "--lengths", "16,32,64", "--repeats", 2, "--device", "cpu", "--out", "run")
    return farspan("attention", *small, *arguments)


@pytest.mark.usefixtures("text_file", "drawn")
def test_two_models_are_looked_at_side_by_side_and_drawn(models: Path) -> None:
    result = done(attention(models / "before", models / "after", "--json"))
    assert len(result.stdout.splitlines()) == 1
    summary = last_line(result)
    before, after = summary["attention"]
    assert [at["length"] for at in before["lengths"]] == [16, 32, 64]
    rows = [row for row in read_rows("run") if row.model.endswith("before") and row.length == 64]
    texts = {
        model: {row.example for row in read_rows("run") if row.model.endswith(model)} for model in ("before", "after")
    }
    assert texts["before"] == texts["after"]  # the same examples
    heads = np.mean([row.scores["all"]["pareto"] for row in rows], 0)
    last = before["lengths"][-1]
    assert np.allclose(last["by_head"]["all"]["pareto"], heads, atol=1e-6)
    assert last["pareto"] == pytest.approx(heads.mean(), abs=1e-6)
    assert last["pareto_low"] < last["pareto"] < last["pareto_high"]
    assert last["pareto"] != after["lengths"][-1]["pareto"]
    assert last["ends"] == [1, 2, 4, 8, 16, 32, 64]
    assert {Path(path).name for path in summary["pictures"]} == {
        f"{name}.{ending}" for name in ("attention", "attention-heads", "attention-map") for ending in ("png", "svg")
    }
    for path in summary["pictures"]:
        assert Path(path).stat().st_size > 5000
    assert max(map(len, Path("run/rows.jsonl").read_text().splitlines())) < 50_000


@pytest.mark.usefixtures("text_file")
def test_a_command_that_is_repeated_measures_nothing_twice(models: Path) -> None:
    options = ("--map-bins", 0, "--layers", "0,-1", "--sinks", 2, "--bin", 8)
    first = attention(models / "before", *options)
    assert "heaviest quarter: of the keys that the query sees" in " ".join(first.output.split())
    quarter, near, without = "heaviest quarter", "nearest 8 tokens", "without sinks"
    heads = [quarter, f"{quarter} {without}", "first 2 tokens (sinks)", near, f"{near} {without}"]
    assert report.series(read_rows("run"))[0].heads == heads
    assert not Path("run/attention-map.png").exists()
    rows = Path("run/rows.jsonl").read_bytes()
    assert attention(models / "before", *options).exit_code == 0
    assert Path("run/rows.jsonl").read_bytes() == rows
    assert "sinks=2,bin=8,map_bins=0', now" in refused(attention(models / "before"))


@pytest.mark.usefixtures("text_file")
def test_a_plan_says_what_it_costs_and_runs_nothing(models: Path) -> None:
    result = attention(models / "before", "--plan", "--json")
    (cell,) = last_line(result)["plans"]
    assert cell["tokens"] == 2 * 64
    assert cell["seconds"] is None
    assert not Path("run").exists()


@pytest.mark.usefixtures("text_file")
def test_what_a_user_can_mend_is_said_in_a_line(models: Path) -> None:
    assert "layers: got 'first', expected all, or numbers as 0,5,-1" in refused(
        attention(models / "before", "--layers", "first")
    )
    for more in ([], ["--plan"]):
        said = refused(attention(models / "before", "--method", "topk:k=3", *more))
        assert "this method replaces its attention" in said


@pytest.mark.usefixtures("text_file")
def test_failed_rows_end_the_command_with_an_error(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    short = saved(tmp_path / "short", tokenizer, tiny_model("gpt2", n_positions=32))
    result = attention(short, "--json")
    assert result.exit_code == 1
    summary = last_line(result)
    assert summary["failed_rows"] == 2
    assert summary["attention"][0]["failed"] == {"64": "too_long"}
    assert len(summary["pictures"]) == 4  # the map would have been of the longest


def test_one_run_holds_models_that_are_in_memory(lm: LM, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox " * 200)
    options = {"text": str(tmp_path / "text.txt"), "lengths": (16, 64), "repeats": 2, "out": tmp_path / "run"}
    rows = measure([lm], ["full"], ["attention"], **options).rows
    assert len(rows) == 4
    assert measure([lm], ["full"], ["attention"], **options).rows == rows
    assert SimpleNamespace(**rows[0].settings).layers is None
