"""The dense reader against one plain forward, on every way of carrying a text that transformers has."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertLMHeadModel, RobertaConfig, RobertaForCausalLM

from farspan import hf, reader
from farspan.hf.attend import written
from farspan.hf.cache import BufferLayer
from farspan.hf.chunks import can_branch
from farspan.lm import LM, load, wrap
from farspan.measuring.loop import chunk_of
from farspan.methods import method
from farspan.reader import CachedMemory, DenseReader, NotFiniteError, dense_reader, self_check
from farspan.reader.dense_memory import PlainMemory

from cepe_models import tiny_cepe
from naive import naive_greedy
from tiny import CONFIGS, VOCABULARY, nats_by, open_lm, some_ids, tiny_model

CHUNKED = [
    "llama",
    "mistral",
    "qwen3",
    "gpt_neox",
    "gpt2",
    "opt",
    "gemma2",
    "mamba2",
    "rwkv",
    "falcon_h1",
    "granite_hybrid",
    "modernbert",
    "nanochat",
]
MISLED_BY_CHUNKS = ["mamba", "falcon_mamba", "recurrent_gemma", "jamba"]


def plain_scores(model: Any, text: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """nats and ranks of text[:, start:], from all logits of one forward."""
    with torch.no_grad():
        logits = model(input_ids=text, use_cache=False).logits.float()[:, start - 1 : -1]
    target = text[:, start:, None]
    of_target = logits.gather(-1, target)
    return -logits.log_softmax(-1).gather(-1, target)[..., 0], (logits > of_target).sum(-1)


def assert_equal(scores: reader.Scores, nats: Tensor, rank: Tensor) -> None:
    torch.testing.assert_close(scores.nats, nats, rtol=1e-4, atol=2e-4)
    # a rank may move by a place where two logits differ by rounding
    assert ((scores.rank - rank).abs() <= 1).all()
    assert (scores.rank == rank).float().mean() > 0.99


@pytest.mark.parametrize(
    ("device", "chunk", "expected"),
    [("cpu", 0, [1024] * 4), ("cuda", 0, [8192, 4096, 1024, 1024]), ("cuda", 64, [64] * 4)],
)
def test_a_gpu_reads_more_tokens_of_a_row_at_once_unless_a_batch_has_many_rows(
    device: str, chunk: int, expected: list[int], tokenizer: Any
) -> None:
    lm = replace(open_lm("llama", tokenizer), planned_device=torch.device(device))
    assert [chunk_of(DenseReader(lm, chunk=chunk), rows) for rows in (1, 2, 8, 100)] == expected
    lm.model.set_attn_implementation("eager")  # which holds the scores of all pairs
    assert chunk_of(DenseReader(lm, chunk=chunk), 1) == (chunk or 1024)


@pytest.mark.parametrize("architecture", CHUNKED)
def test_chunks_forks_and_batches_score_as_one_plain_forward_does(architecture: str, tokenizer: Any) -> None:
    lm = open_lm(architecture, tokenizer)
    dense = dense_reader(lm)
    assert dense.fallback is None
    dense.chunk = 17
    read, first, second = some_ids(2, 90), some_ids(2, 33, 1), some_ids(2, 71, 2)
    memory = dense.read(read[:, :50], read[:, 50:])
    assert_equal(memory.score(first), *plain_scores(lm.model, torch.cat([read, first], 1), 90))
    # the fork left nothing behind
    assert_equal(memory.score(second), *plain_scores(lm.model, torch.cat([read, second], 1), 90))
    memory.read(first)
    assert memory.num_seen == 123
    assert_equal(memory.score(second), *plain_scores(lm.model, torch.cat([read, first, second], 1), 123))


@pytest.mark.parametrize("architecture", MISLED_BY_CHUNKS)
def test_models_that_chunks_mislead_are_read_with_plain_forwards(architecture: str, tokenizer: Any) -> None:
    lm = open_lm(architecture, tokenizer)
    dense = dense_reader(lm)
    assert dense.fallback is not None
    assert "in chunks" in dense.fallback
    text = some_ids(2, 120)
    memory = dense.read(text[:, :80])
    assert isinstance(memory, PlainMemory)
    scores = memory.score(torch.cat([text[:, 80:], text[:, 80:]]), slice(10, 40))
    nats, rank = plain_scores(lm.model, text, 80)
    torch.testing.assert_close(scores.nats[:2], nats[:, 10:], rtol=1e-4, atol=2e-4)
    assert (scores.rank[2:] == rank[:, 10:]).float().mean() > 0.99


@pytest.mark.parametrize("text", ["full", "sinks:window=20,sinks=3"])
@pytest.mark.parametrize("is_known", [False, True])
def test_a_model_in_training_mode_is_read_without_dropout(is_known: bool, text: str, tokenizer: Any) -> None:
    lm, ids = wrap(tiny_model(attention_dropout=0.5), tokenizer, "tiny"), some_ids(1, 60)
    expected = nats_by(text, wrap(lm.model, tokenizer, "tiny"), ids)
    if is_known:
        nats_by(text, lm, ids)
    lm.model.train()  # as a Trainer leaves it
    assert torch.equal(nats_by(text, lm, ids), expected)
    assert all(module.training for module in lm.model.modules())


def test_the_self_check_catches_a_cache_that_forgets(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BufferLayer, "get_seq_length", lambda self: max(0, self.length - 1))
    assert self_check(lm) is not None


def test_the_self_check_catches_a_fork_that_leaves_something_behind(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = open_lm("mamba2", tokenizer)
    monkeypatch.setattr("farspan.hf.cache.cloned", lambda value: value)
    assert self_check(lm) is not None


def test_the_self_check_does_not_blame_the_head_for_rounding_that_depends_on_the_number_of_tokens(lm: LM) -> None:
    def rounded(module: Any, arguments: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * (1.0 if hidden.shape[1] == 32 else 1.5)

    handle = lm.model.model.norm.register_forward_hook(rounded)
    try:
        self_check(lm)  # raises ValueError for a head that is not the model's own
    finally:
        handle.remove()


def test_the_self_check_accepts_bf16(tokenizer: Any) -> None:
    lm = wrap(tiny_model().to(torch.bfloat16), tokenizer, "bf16")
    assert self_check(lm) is None


def test_the_self_check_falls_back_where_the_state_is_of_an_unknown_kind(
    lm: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farspan.hf.stream.STATE_NAMES", ("something_new",))
    assert "TypeError" in str(self_check(lm))


@pytest.mark.parametrize(
    ("place", "check"),
    [
        ("farspan.hf.stream.Stream.step", self_check),
        ("farspan.hf.stream.Stream.branch", can_branch),
        ("farspan.hf.probe.dense", lambda lm: hf.attention_layers(lm.model, name="topk")),
    ],
)
def test_a_check_that_runs_out_of_memory_does_not_judge_the_model(
    place: str, check: Callable[[LM], object], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: Any, **__: Any) -> None:
        raise RuntimeError("could not create a primitive")  # oneDNN's, which is no torch.OutOfMemoryError

    lm = wrap(tiny_model(), tokenizer, "tiny")
    monkeypatch.setattr(place, short)
    with pytest.raises(RuntimeError, match="could not create a primitive"):
        check(lm)


@pytest.mark.parametrize("chunk", [1, 2, 7, 1024])
def test_the_result_does_not_depend_on_the_chunk(chunk: int, lm: LM) -> None:
    text = some_ids(2, 60)
    scores = DenseReader(lm, chunk=chunk).read(text[:, :40]).score(text[:, 40:])
    assert_equal(scores, *plain_scores(lm.model, text, 40))


@pytest.mark.parametrize("keep", [slice(0, 1), slice(0, 0), slice(3, 9), slice(-4, None), slice(19, 20), None])
def test_only_the_positions_asked_for_are_scored(keep: slice | None, lm: LM) -> None:
    text = some_ids(2, 60)
    memory = DenseReader(lm, chunk=7).read(text[:, :40])
    everything = memory.score(text[:, 40:])
    part = memory.score(text[:, 40:], keep)
    torch.testing.assert_close(part.nats, everything.nats[:, keep or slice(None)])
    assert torch.equal(part.rank, everything.rank[:, keep or slice(None)])


def test_the_head_runs_on_no_more_positions_than_asked_for(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = hf.logits

    def counting(model: Any, hidden: Tensor, output: Any) -> Tensor:
        seen.append(hidden.shape[1])
        return original(model, hidden, output)

    memory = DenseReader(lm, chunk=16).read(some_ids(2, 40))
    monkeypatch.setattr(hf, "logits", counting)
    monkeypatch.setitem(reader.LOGITS_AT_ONCE, "cpu", VOCABULARY * 5)
    memory.score(some_ids(2, 50), slice(30, 50))
    assert sum(seen) == 20
    assert max(seen) == 4  # of the 16 of a chunk, at most 5 at once, in equal blocks


def test_rows_beyond_the_batch_go_round_the_memory_without_copying_its_keys(lm: LM) -> None:
    text = some_ids(2, 40)
    memory = DenseReader(lm, chunk=16).read(text)
    asked = some_ids(6, 20, 1)
    held = memory.num_bytes
    scores = memory.score(asked)
    for i in range(6):
        whole = torch.cat([text[i % 2], asked[i]])[None]
        assert_equal(reader.Scores(scores.nats[i : i + 1], scores.rank[i : i + 1]), *plain_scores(lm.model, whole, 40))
    assert memory.num_bytes <= 2 * held


def test_rows_of_a_window_that_counts_keys_are_scored_one_by_one(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    monkeypatch.setitem(CONFIGS, "gpt_neo", ("GPTNeo", shape | {"vocab_size": VOCABULARY, "intermediate_size": 64}))
    lm = open_lm("gpt_neo", tokenizer)
    text, asked = some_ids(1, 300), some_ids(8, 12, 1)  # its window is 256
    scores = DenseReader(lm).read(text).score(asked)
    for i in range(8):
        whole = torch.cat([text, asked[i : i + 1]], 1)
        assert_equal(reader.Scores(scores.nats[i : i + 1], scores.rank[i : i + 1]), *plain_scores(lm.model, whole, 300))


def test_padding_is_scored_as_nan_and_changes_nothing_before_it(lm: LM) -> None:
    text = some_ids(2, 60)
    padded = text[:, 40:].clone()
    padded[1, 12:] = -1
    memory = DenseReader(lm, chunk=7).read(text[:, :40])
    whole, part = memory.score(text[:, 40:]), memory.score(padded)
    assert part.nats[1, 12:].isnan().all()
    assert (part.rank[1, 12:] == -1).all()
    torch.testing.assert_close(part.nats[1, :12], whole.nats[1, :12])
    torch.testing.assert_close(part.nats[0], whole.nats[0])


def test_nan_logits_are_no_hits(lm: LM) -> None:
    lm.model.model.norm.weight.data.fill_(torch.nan)
    scores = DenseReader(lm).read(some_ids(1, 10)).score(some_ids(1, 10, 1))
    assert scores.nats.isnan().all()
    assert (scores.rank == -1).all()


def test_a_bf16_memory_agrees_with_one_forward_in_all_but_a_few_tokens(tokenizer: Any) -> None:
    lm = wrap(tiny_model().to(torch.bfloat16), tokenizer, "bf16")
    text = some_ids(4, 400)
    scores = DenseReader(lm, chunk=64).read(text[:, :100]).score(text[:, 100:])
    nats, _ = plain_scores(lm.model, text, 100)
    assert (scores.nats - nats).abs().mean() < 0.02


@pytest.mark.parametrize("architecture", ["llama", "mistral", "mamba2", "rwkv", "mamba"])
def test_generation_equals_plain_forwards_and_leaves_the_memory_as_it_was(architecture: str, tokenizer: Any) -> None:
    lm = open_lm(architecture, tokenizer)
    text = some_ids(2, 60)
    dense = dense_reader(lm)
    dense.chunk = 17
    memory = dense.read(text[:, :50])
    before = memory.score(text[:, 50:]).nats
    ours = memory.generate(text[:, 50:], 12)
    assert torch.equal(torch.stack(ours), naive_greedy(lm.model, text, 12))
    torch.testing.assert_close(memory.score(text[:, 50:]).nats, before)


def test_generation_stops_at_a_stop_token_and_not_before_its_minimum(lm: LM) -> None:
    text = some_ids(1, 30)
    memory = DenseReader(lm).read(text)
    free = memory.generate(text[:, :0], 8)[0]
    stop = int(free[3])
    first = free.tolist().index(stop)
    assert memory.generate(text[:, :0], 8, stop=[stop])[0].tolist() == free[:first].tolist()
    forced = memory.generate(text[:, :0], 8, stop=[stop], min_new_tokens=8)[0]
    assert len(forced) == 8
    assert stop not in forced


def test_sampling_is_repeatable_and_told_token_by_token(lm: LM) -> None:
    memory = DenseReader(lm).read(some_ids(2, 30))
    told: list[Tensor] = []
    some = memory.generate(some_ids(2, 3), 6, temperature=1.0, top_p=0.9, seed=1, on_token=told.append)
    again = memory.generate(some_ids(2, 3), 6, temperature=1.0, top_p=0.9, seed=1)
    other = memory.generate(some_ids(2, 3), 6, temperature=1.0, top_p=0.9, seed=2)
    assert torch.equal(torch.stack(some), torch.stack(again))
    assert not torch.equal(torch.stack(some), torch.stack(other))
    assert torch.equal(torch.stack(told, 1), torch.stack(some))


def test_a_sliding_window_keeps_no_more_keys_than_its_window(tokenizer: Any) -> None:
    memory = DenseReader(open_lm("mistral", tokenizer), chunk=16).read(some_ids(2, 200))
    assert memory.num_seen == 200
    assert memory.num_kept == 39  # the window of 40 counts the current token


def test_a_recurrent_memory_does_not_grow(tokenizer: Any) -> None:
    dense = DenseReader(open_lm("mamba2", tokenizer), chunk=16)
    short, long = dense.read(some_ids(1, 32)), dense.read(some_ids(1, 320))
    assert long.num_bytes == short.num_bytes
    assert long.num_kept == 0


def test_reading_copies_each_key_a_bounded_number_of_times(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = 0

    def counting(buffer: Tensor | None, states: Tensor, start: int, capacity: int) -> Tensor:
        nonlocal moved
        grown = written(buffer, states, start, capacity)
        moved += states.shape[-2] + (start if grown is not buffer else 0)
        return grown

    monkeypatch.setattr("farspan.hf.cache.written", counting)
    DenseReader(lm, chunk=1).read(some_ids(1, 500))
    layers_and_kinds = 4
    assert moved >= 500 * layers_and_kinds
    assert moved <= 7 * 500 * layers_and_kinds  # concatenation would move 250 times 500


def test_a_memory_holds_at_most_a_quarter_more_than_its_keys(lm: LM) -> None:
    memory = DenseReader(lm, chunk=10).read(some_ids(3, 400))
    keys = 3 * 400 * lm.key_bytes_per_token
    assert keys <= memory.num_bytes <= 1.26 * keys


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda reader: reader.read().score(some_ids(1, 4)), "the memory is empty"),
        (lambda reader: reader.read(some_ids(2, 4)).score(some_ids(3, 4)), "3 rows cannot be scored on a memory of 2"),
        (lambda reader: reader.read(some_ids(2, 4)).read(some_ids(3, 4)), "2 rows; 3"),
        (lambda reader: reader.read(torch.tensor([[5, -1]])), "without padding"),
        (
            lambda reader: reader.read(some_ids(1, 4)).generate(torch.tensor([[5, -1]]), 2),
            "generate continues rows without padding",
        ),
    ],
)
def test_other_rows_than_those_of_the_memory_and_padding_are_refused(
    ask: Callable[[DenseReader], Any], message: str, lm: LM
) -> None:
    with pytest.raises(ValueError, match=message):
        ask(DenseReader(lm))


def test_the_end_of_learned_positions_is_an_error_that_names_it(tokenizer: Any) -> None:
    memory = DenseReader(open_lm("gpt2", tokenizer)).read(some_ids(1, 500))
    memory.score(some_ids(1, 13))  # the last token is asked for, never fed
    with pytest.raises(ValueError, match="512 positions; 513"):
        memory.score(some_ids(1, 14))


@pytest.mark.parametrize("architecture", ["gemma2", "llama", "gpt2"])
def test_asking_leaves_the_model_as_it_was_also_after_an_error(architecture: str, tokenizer: Any) -> None:
    lm = open_lm(architecture, tokenizer)
    before = {name: value.clone() for name, value in lm.model.state_dict().items()}
    attributes = {name: set(vars(module)) for name, module in lm.model.named_modules()}
    memory = dense_reader(lm).read(some_ids(1, 20))
    handle = lm.model.get_output_embeddings().register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        memory.score(some_ids(1, 5))
    handle.remove()
    assert {name: set(vars(module)) for name, module in lm.model.named_modules()} == attributes
    assert all(torch.equal(value, before[name]) for name, value in lm.model.state_dict().items())


def test_a_forward_that_accelerate_has_put_in_place_is_put_back(lm: LM) -> None:
    decoder = lm.model.get_decoder()
    original = decoder.forward
    decoder.forward = lambda *args, **kwargs: original(*args, **kwargs)
    placed = decoder.forward
    DenseReader(lm).read(some_ids(1, 20)).score(some_ids(1, 5))
    assert decoder.forward is placed


def test_the_full_method_is_the_dense_reader_and_prints_as_it_parses(lm: LM) -> None:
    full = method("full")
    with full.on(lm) as opened:
        assert isinstance(opened.read(some_ids(1, 5)), CachedMemory)
    assert method(str(full)) == full


@pytest.mark.parametrize("text", ["sinkz", "full:window=3", ""])
def test_an_unknown_method_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"unknown; known are full|has no settings"):
        method(text)


def test_a_plain_memory_grows_and_refuses_as_a_cached_one(lm: LM) -> None:
    memory = PlainMemory(lm)
    memory.read(some_ids(2, 10))
    memory.read(some_ids(2, 5, 1))
    text = torch.cat([some_ids(2, 10), some_ids(2, 5, 1), some_ids(2, 7, 2)], 1)
    assert_equal(memory.score(text[:, 15:]), *plain_scores(lm.model, text, 15))
    assert (memory.num_seen, memory.num_kept) == (15, 15)
    with pytest.raises(ValueError, match="2 rows; 3"):
        memory.read(some_ids(3, 4))


def test_a_head_that_differs_from_the_models_own_is_refused(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farspan.hf.chunks.logits", lambda model, hidden, output: 2 * model.lm_head(hidden))
    with pytest.raises(ValueError, match="cannot be read yet"):
        self_check(lm)


def test_a_model_whose_predictions_depend_on_later_tokens_is_refused(tokenizer: Any) -> None:
    config = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    bert = BertConfig(**config, intermediate_size=64, initializer_range=0.3)
    with pytest.raises(ValueError, match="tiny-bert: its predictions depend on later tokens: not a causal model"):
        dense_reader(wrap(BertLMHeadModel(bert).eval(), tokenizer, "tiny-bert"))
    bert.is_decoder = True
    dense_reader(wrap(BertLMHeadModel(bert).eval(), tokenizer, "tiny-bert"))
    # whose head differs from the one that is run separately, too
    roberta = RobertaConfig(**config, intermediate_size=64, initializer_range=0.3, bos_token_id=0)
    with pytest.raises(ValueError, match="tiny-roberta: its predictions depend on later tokens: not a causal model"):
        dense_reader(wrap(RobertaForCausalLM(roberta).eval(), tokenizer, "tiny-roberta"))


def test_a_forward_that_fails_is_a_value_error_of_one_line(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **arguments: Any) -> Any:
        raise RuntimeError("bounds differ\n  and more")

    monkeypatch.setattr(lm.model, "forward", fails)
    with pytest.raises(
        ValueError, match=r"its own forward fails on a text of \d+ tokens or fewer: RuntimeError: bounds differ$"
    ):
        self_check(lm)


def test_the_position_limit_is_that_of_learned_positions_only() -> None:
    assert hf.position_limit(tiny_model("gpt2")) == 512
    assert hf.position_limit(tiny_model("opt")) == 512
    assert hf.position_limit(tiny_model("llama")) is None


def test_room_made_at_once_moves_no_key_twice(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = DenseReader(lm, chunk=16, capacity=400)
    memory = dense.read(some_ids(1, 10))
    buffers = [layer.key_buffer.data_ptr() for layer in memory.stream.state.layers]
    memory.read(some_ids(1, 390))
    assert [layer.key_buffer.data_ptr() for layer in memory.stream.state.layers] == buffers
    memory.read(some_ids(1, 20))  # more than was asked for is still taken in
    assert memory.num_kept == 420


def test_rope_that_turns_with_the_length_is_read_with_plain_forwards(tokenizer: Any) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    dense = dense_reader(open_lm("llama", tokenizer, rope_parameters=scaling, max_position_embeddings=64))
    assert "dynamic" in str(dense.fallback)
    text = some_ids(1, 200)
    scores = dense.read(text[:, :50]).score(text[:, 50:])
    with torch.no_grad():  # the last token is not fed: here it would turn all the others
        logits = dense.lm.model(input_ids=text[:, :-1], use_cache=False).logits[:, 49:]
    nats = -logits.log_softmax(-1).gather(-1, text[:, 50:, None])[..., 0]
    torch.testing.assert_close(scores.nats, nats, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("lengths", [(30, 6, 12, 0), (30, 29, 30, 30)])  # the second: padding is never fed
def test_with_rope_that_turns_with_the_length_padding_changes_no_scores(
    lengths: tuple[int, ...], tokenizer: Any
) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    dense = dense_reader(open_lm("llama", tokenizer, rope_parameters=scaling, max_position_embeddings=64))
    memory, rows = dense.read(some_ids(2, 60)), some_ids(4, 30, 1)
    for row, length in zip(rows, lengths, strict=True):
        row[length:] = -1
    scores = memory.score(rows)
    for i, length in enumerate(lengths):
        alone = memory.score(rows[i, :length].repeat(2, 1))  # each continues both texts
        torch.testing.assert_close(scores.nats[i, :length], alone.nats[i % 2])
        assert torch.equal(scores.rank[i, :length], alone.rank[i % 2])
        assert scores.nats[i, length:].isnan().all()


def test_an_answer_that_learned_positions_have_no_room_for_is_refused_before_it_begins(tokenizer: Any) -> None:
    memory = DenseReader(open_lm("gpt2", tokenizer)).read(some_ids(1, 500))
    told: list[Tensor] = []
    assert len(memory.generate(some_ids(1, 10), 3)[0]) == 3  # the last new token is never fed
    numbers = "512 positions: got 500 tokens read, 10 to continue and max_new_tokens = 4, expected at most 513 together"
    with pytest.raises(ValueError, match=f"{numbers}. Use max_new_tokens <= 3"):
        memory.generate(some_ids(1, 10), 4, on_token=told.append)
    with pytest.raises(ValueError, match="Give a shorter text"):
        memory.generate(some_ids(1, 13), 1, on_token=told.append)
    assert not told


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_with_dynamic_rope_scores_do_not_depend_on_earlier_texts(architecture: str, tokenizer: Any) -> None:
    scaling: dict[str, Any] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    if architecture == "gemma3":
        scaling = {"full_attention": scaling, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    dense = dense_reader(open_lm(architecture, tokenizer, rope_parameters=scaling, max_position_embeddings=64))
    texts = [some_ids(1, length) for length in (40, 64, 65, 80, 200)]  # of 64 tokens, transformers keeps earlier state
    ascending = [dense.read(text[:, :9]).score(text[:, 9:]).nats for text in texts]
    for text, nats in reversed(list(zip(texts, ascending, strict=True))):
        assert torch.equal(dense.read(text[:, :9]).score(text[:, 9:]).nats, nats)


@pytest.mark.parametrize("how", ["full", "replug:weights=uniform"])
def test_a_memory_whose_read_failed_halfway_refuses_to_be_used(
    how: str, lm: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with method(how).on(lm) as dense:
        dense.chunk = 20
        memory = dense.read(some_ids(1, 50))
        step, calls = hf.Stream.step, []

        def failing(self: hf.Stream, ids: Tensor) -> Tensor:
            calls.append(ids)
            if len(calls) == 2:
                raise torch.OutOfMemoryError("no memory")
            return step(self, ids)

        monkeypatch.setattr(hf.Stream, "step", failing)
        with pytest.raises(torch.OutOfMemoryError):
            memory.read(some_ids(1, 50))
        monkeypatch.undo()
        for use in (memory.read, memory.score):
            with pytest.raises(ValueError, match="read of this memory failed halfway"):
                use(some_ids(1, 5))


def test_of_equal_largest_logits_the_one_that_decoding_takes_is_the_hit(
    lm: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ties = torch.zeros(1, 1, VOCABULARY)
    ties[..., [3, 7]] = 2.0
    monkeypatch.setattr(hf, "logits", lambda model, hidden, output: ties.expand(*hidden.shape[:2], -1))
    memory = CachedMemory(lm, DenseReader(lm))
    memory.read(some_ids(1, 4))
    assert memory.score(torch.tensor([[3, 7, 3, 7, 0]])).rank.tolist() == [[0, 1, 0, 1, 2]]
    assert memory.generate(torch.tensor([[1]]), 2)[0].tolist() == [3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values_at_once", [1, 5 * VOCABULARY, 1 << 18])
def test_scores_equal_one_row_at_a_time_also_with_ties(
    values_at_once: int, dtype: torch.dtype, lm: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(reader.logits.VALUES_AT_ONCE, "cpu", values_at_once)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 4, (2, 40, VOCABULARY), generator=generator).to(dtype)  # the largest occurs often
    logits[:, 10:, :] += torch.randn(2, 30, VOCABULARY, generator=generator).to(dtype)
    logits[:, 20:25, 7:] = -torch.inf
    logits[0, 30], logits[1, 31, 5], logits[1, 32, 5] = torch.nan, torch.nan, torch.inf
    best = logits.argmax(-1)
    targets = torch.where(torch.rand(2, 40, generator=generator) < 0.5, best, best - 1).clamp_min(0)
    targets[:, ::7] = 0
    targets[1, 35:] = -1
    blocks = list(reader.logits.scored(lm, targets, lambda positions: logits[:, positions]))
    nats, rank = (torch.cat([getattr(block, name) for block in blocks], 1) for name in ("nats", "rank"))
    for row in range(2):
        for i, target in enumerate(targets[row].tolist()):
            one = logits[row, i].float()
            expected = torch.tensor(torch.nan) if target < 0 else one.logsumexp(-1) - one[target]
            torch.testing.assert_close(nats[row, i], expected, equal_nan=True)
            larger = int((one > one[target]).sum())
            hit = int(one.argmax()) == target
            assert rank[row, i] == (-1 if expected.isnan() else 0 if hit else max(1, larger))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_is_chosen_from_logits_that_are_not_finite(
    value: float, temperature: float, lm: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = dense_reader(lm).read(some_ids(1, 4))
    monkeypatch.setattr(hf, "logits", lambda model, hidden, output: torch.full((1, 1, VOCABULARY), value))
    with pytest.raises(NotFiniteError, match=r"logits that are not finite for new token 1"):
        memory.generate(some_ids(1, 3), 2, temperature=temperature)


def test_tokens_that_a_family_rules_out_do_not_stop_generation(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = dense_reader(lm).read(some_ids(1, 4))
    own = hf.logits

    def ruled_out(*given: Any) -> Tensor:
        logits = own(*given)
        logits[..., 5:] = -torch.inf
        return logits

    monkeypatch.setattr(hf, "logits", ruled_out)
    assert int(memory.generate(some_ids(1, 3), 4)[0].max()) < 5


@pytest.mark.parametrize("methods", [("full", "full"), ("full", "sinks:window=20,sinks=2")])
def test_threads_that_share_a_model_get_the_scores_of_one_thread(methods: tuple[str, str], lm: LM) -> None:
    """Each thread either scores what it would score alone or, where the other's method is on, is refused."""
    text, asked = some_ids(1, 60), some_ids(1, 20, 1)
    with method("full").on(lm) as alone:
        expected = {"full": alone.read(text).score(asked).nats}
    with method(methods[1]).on(lm) as alone:
        expected[methods[1]] = alone.read(text).score(asked).nats

    def scores(how: str) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for _ in range(25):
            nats = None
            with suppress(ValueError), method(how).on(lm) as one:
                nats = one.read(text).score(asked).nats
            found.append(nats)
        return found

    with ThreadPoolExecutor(2) as threads:
        each = list(threads.map(scores, methods))
    for how, found in zip(methods, each, strict=True):
        for nats in found:
            assert nats is None or torch.equal(nats, expected[how])
        if methods[0] == methods[1]:
            assert None not in found
    assert "forward" not in lm.model.get_decoder().__dict__


def test_a_reader_of_another_method_is_refused_while_one_is_on(lm: LM) -> None:
    plain = dense_reader(lm)
    memory = plain.read(some_ids(1, 10))
    for how in ("sinks:window=20,sinks=2", "rope:type=linear,factor=2"):
        with method(how).on(lm), pytest.raises(ValueError, match=rf"{how} is on for this model: read with its reader"):
            memory.score(some_ids(1, 5))
    memory.score(some_ids(1, 5))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"temperature": -1.0}, "temperature: got -1"),
        ({"temperature": 1e-320}, r"expected 0 \(the likeliest token\) or a finite number from 0\.001 on"),
        ({"temperature": float("nan")}, "temperature: got nan"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p: got 0, expected a share"),
        ({"top_p": 2.0}, "above 0 and at most 1"),
        ({"top_p": float("nan")}, "top_p: got nan"),
        ({"seed": 2**64}, rf"seed: got {2**64}, expected a number from -2\*\*63 to 2\*\*64 - 1"),
        ({"seed": -(2**63) - 1}, rf"seed: got {-(2**63) - 1}, expected a number"),
    ],
)
def test_settings_that_no_token_can_be_sampled_with_are_refused(how: dict[str, Any], message: str, lm: LM) -> None:
    with pytest.raises(ValueError, match=message):
        dense_reader(lm).read(some_ids(1, 4)).generate(some_ids(1, 3), 2, **how)


def test_a_negative_number_of_new_tokens_is_refused(lm: LM) -> None:
    memory = dense_reader(lm).read(some_ids(1, 4))
    assert memory.generate(some_ids(1, 3), 0)[0].tolist() == []
    with pytest.raises(ValueError, match="max_new_tokens: got -3, expected a number of tokens from 0 on"):
        memory.generate(some_ids(1, 3), -3)


@pytest.mark.parametrize("how", ["full", "cepe", "replug:piece=3,tail=2"])
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[5, 7, VOCABULARY]], rf"ids: got {VOCABULARY}, expected ids below {VOCABULARY}, the vocabulary of tiny"),
        ([], r"ids: got 0 rows, expected at least 1"),
        ([[5, -1, 6, 7]], r"ids: got padding \(-1\) before a token of its row"),
    ],
)
def test_ids_that_are_no_rows_of_tokens_are_refused(
    ids: list[list[int]], message: str, how: str, tokenizer: Any
) -> None:
    model = tiny_cepe() if how == "cepe" else tiny_model("llama")
    given = torch.tensor(ids, dtype=torch.long).reshape(len(ids), len(ids[0]) if ids else 4)
    with method(how).on(wrap(model, tokenizer, "tiny")) as reader:
        memory = reader.read(some_ids(1, 8))
        reads = () if -1 in given else (reader.read, memory.read)  # which take no padding at all
        for call in (*reads, memory.score, lambda ids: memory.generate(ids, 2)):
            with pytest.raises(ValueError, match=message):
                call(given)
        assert memory.score(torch.tensor([[5, 6, -1, -1]])).nats.isnan().sum() == 2


def test_models_with_capped_scores_are_read_by_eager_attention(tokenizer: Any, tmp_path: Path) -> None:
    for part in (tiny_model("gemma2"), tokenizer):
        part.save_pretrained(tmp_path)
    assert load(tmp_path).identity["attention"] == "eager"
