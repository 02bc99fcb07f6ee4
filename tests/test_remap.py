"""Self-Extend and dual chunk attention against their equations, pair by pair; what they refuse."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama import modeling_llama

from farspan import hf
from farspan.demo import embedded_model
from farspan.hf import attend, remap
from farspan.lm import LM
from farspan.methods import method
from farspan.methods.dca import Chunked
from farspan.methods.selfextend import Grouped
from farspan.text import corpora

from naive import by_pairs
from tiny import nats_by, nats_of, open_lm, same, some_ids

FIVE = ["llama", "qwen3", "gemma3", "gpt_neox", "mistral"]
Positions = Callable[[int, int], tuple[int, int]]


def grouped(group: int, window: int) -> Positions:
    return lambda i, j: (i, j) if i - j < window else (i // group + window - window // group, j // group)


def chunked(chunk: int, local: int) -> Positions:
    """As vLLM publishes it: keys at j mod chunk, and three kinds of queries."""

    def positions(i: int, j: int) -> tuple[int, int]:
        size, between = chunk + local, i // chunk - j // chunk
        query = [i % chunk, min(i % chunk + chunk, size), min(2 * chunk - 1, size)][min(between, 2)]
        return query, j % chunk

    return positions


CASES = [
    ("selfextend:group=3,window=14", grouped(3, 14)),
    ("selfextend:group=4,window=1", grouped(4, 1)),
    ("selfextend:group=5,window=33", grouped(5, 33)),
    ("dca:chunk=13,local=3", chunked(13, 3)),
    ("dca:chunk=7,local=0", chunked(7, 0)),
    ("dca:chunk=30,local=20", chunked(30, 20)),
]
EVERY = [(*case, "llama") for case in CASES] + [(*case, name) for case in CASES[::3] for name in FIVE[1:]]


@pytest.mark.parametrize(
    ("text", "positions", "architecture"), EVERY, ids=[f"{text}-{name}" for text, _, name in EVERY]
)
def test_every_pair_is_at_the_distance_of_the_equation(
    text: str, positions: Positions, architecture: str, tokenizer: Any
) -> None:
    lm, ids = open_lm(architecture, tokenizer), some_ids(1, 70)
    expected = nats_of(by_pairs(lm.model, ids, parts=positions), ids[0])
    for chunk in (9, 1024):
        same(nats_by(text, lm, ids, chunk)[0], expected)


def test_keys_rotated_for_tokens_that_were_dropped_are_not_used_again(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = some_ids(1, 110)
    start, *continuations = ids.split([30, 40, 40], 1)
    monkeypatch.setattr(remap, "SPARE", 3)
    with torch.no_grad(), method("selfextend:group=3,window=14").on(lm) as reader:
        memory = reader.read(start)
        for more in continuations:
            with memory.fork() as expect:
                for token in more.split(1, 1):
                    found = expect(token)
                assert all(count == 56 for _, count in memory.stream.reading.turned.values())
                assert len(memory.stream.reading.turned) == lm.model.config.num_hidden_layers
            assert memory.stream.reading.turned is None
            with reader.read(torch.cat([start, more[:, :-1]], 1)).fork() as expect:
                same(found, expect(more[:, -1:]))


@pytest.mark.parametrize(("text", "positions"), CASES[::2], ids=[text for text, _ in CASES[::2]])
def test_the_kernel_and_the_plain_scores_give_the_same(
    text: str, positions: Positions, lm: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = some_ids(1, 130)
    expected = nats_by(text, lm, ids, 1024)
    monkeypatch.setattr(remap, "FUSED_QUERIES", 16)  # of which several blocks make a chunk
    same(nats_by(text, lm, ids, 1024), expected)
    monkeypatch.setattr(remap, "takes", lambda *given: False)
    monkeypatch.setitem(attend.SCORES_AT_ONCE, "cpu", 4 * 32 * 130)
    sizes: list[int] = []
    original = attend.Call.scores

    def measured(self: attend.Call, query: Tensor, key: Tensor) -> Tensor:
        sizes.append(query.shape[3] * key.shape[2] * 4)
        return original(self, query, key)

    monkeypatch.setattr(attend.Call, "scores", measured)
    same(nats_by(text, lm, ids, 1024), expected)
    assert max(sizes) <= 4 * 32 * 130


def by_formula(call: attend.Call, positions: Positions) -> Tensor:
    """The attention of a call, query by query, each pair rotated to its positions, in float64."""
    out, missing = torch.zeros(call.query.shape, dtype=torch.float64), call.num_missing
    for t in range(call.query.shape[3]):
        i = call.start + t
        first = 0 if call.layer.window is None else i - call.layer.window + 1
        seen = list(range(max(missing, first), i + 1))
        held = [j - missing for j in seen]
        query = call.query[..., t, None, :].double().expand(*call.query.shape[:3], len(seen), -1)
        key, value = (x[:, :, None, held].double() for x in (call.key, call.value))
        if (inv_freq := call.layer.inv_freq) is not None:
            to = torch.tensor([positions(i, j) for j in seen])
            own = torch.tensor([(i, j) for j in seen])
            query = attend.turned(query, *(p[:, :1].double() * inv_freq for p in (own, to)))
            key = attend.turned(key, *(p[:, 1:].double() * inv_freq for p in (own, to)))
        weights = call.capped((query * key).sum(-1) * call.scale).softmax(-1)
        out[..., t, :] = (weights[..., None] * value).sum(-2)
    return out


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_attention_is_that_of_the_formula_under_windows_and_dropped_keys(
    seed: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of single tokens, of chunks shorter than the window, of all kinds of heads and with capped scores."""
    monkeypatch.setattr(remap, "FUSED_QUERIES", 8)
    monkeypatch.setattr(attend, "SMALLEST_BLOCK", 4)
    monkeypatch.setitem(attend.SCORES_AT_ONCE, "cpu", 3000)
    if not fused:
        monkeypatch.setattr(remap, "takes", lambda *given: False)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(40):
        start, time, window = rng.choice([0, 5, 40, 90]), rng.choice([1, 2, 7, 33]), rng.choice([None, 1, 3, 17, 64])
        kept = start if window is None else rng.choice([min(start, window - 1), start])
        batch, (heads, groups) = rng.choice([1, 2]), rng.choice([(1, 4), (2, 2), (3, 1)])
        key, value = torch.randn(2, batch, heads, kept + time, 8)
        layer = attend.Layer(0, rng.choice([attend.frequencies(100.0, 8), attend.frequencies(100.0, 4), None]), window)
        call = attend.Call(torch.randn(batch, heads, groups, time, 8), key, value, 0.4, rng.choice([None, 3.0]), layer,
                           start, None)  # fmt: skip
        group, near, chunk = rng.choice([1, 3, 8]), rng.choice([1, 5, 33]), rng.choice([1, 7, 30])
        local = rng.choice([0, chunk // 6, chunk - 1])
        with torch.no_grad():
            for given, expected in (
                (remap.in_place(call), lambda i, j: (i, j)),
                (remap.remapped(call, Grouped(group, near)), grouped(group, near)),
                (remap.remapped(call, Chunked(chunk, local)), chunked(chunk, local)),
            ):
                torch.testing.assert_close(given.double(), by_formula(call, expected), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("text", "parts"), [("temperature:original=7", 1), ("selfextend:group=3,window=14", 2), ("dca:chunk=30,local=5", 3)]
)
def test_a_single_token_attends_to_each_piece_in_one_call_of_the_kernel(
    text: str, parts: int, lm: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, own = [], remap.flash
    monkeypatch.setattr(remap, "flash", lambda *given, **how: calls.append(how) or own(*given, **how))
    ids = some_ids(1, 80)
    with method(text).on(lm) as reader:
        memory = reader.read(ids)
        calls.clear()
        memory.score(ids[:, :2])  # one token is fed
    assert len(calls) == parts * lm.num_layers
    assert not any(how["causal"] or how["mirrored"] for how in calls)


FOUR = torch.arange(2048)  # tokens, four trained lengths of the embedded model
DISTANCES, CHUNKS = FOUR[:, None] - FOUR, FOUR[:, None] // 384 - FOUR // 384
PROTOTYPES = {  # of each kind of pairs: the positions of queries and of keys, and which pairs
    "selfextend:group=8,window=256": [
        (FOUR, FOUR, (DISTANCES >= 0) & (DISTANCES < 256)),
        (FOUR // 8 + 256 - 256 // 8, FOUR // 8, DISTANCES >= 256),
    ],
    "dca:chunk=384,local=64": [
        (FOUR % 384, FOUR % 384, (CHUNKS == 0) & (DISTANCES >= 0)),
        ((FOUR % 384 + 384).clamp(max=448), FOUR % 384, CHUNKS == 1),
        (torch.full_like(FOUR, 448), FOUR % 384, CHUNKS > 1),
    ],
}


@pytest.mark.parametrize("text", PROTOTYPES)
def test_at_four_windows_it_predicts_what_the_published_algorithm_does(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedded model on two texts. The authors' code computes the scores of all pairs for each kind of positions,
    chooses among them, and takes one softmax. No token differs by more than 0.0001 nats, no mean by more than 0.000001.
    """
    lm = embedded_model()
    windows = corpora.load("builtin:held-out", lm.tokenizer).windows(len(FOUR), 2, seed=0)
    ids = torch.stack([torch.from_numpy(window).long() for window in windows])
    ours = nats_by(text, lm, ids, 1024)

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **options: Any) -> Any:
        scores = torch.full((*q.shape[:3], k.shape[2]), -torch.inf)
        for here, there, pairs in PROTOTYPES[text]:
            turned, keys = (rotated(x, *lm.model.model.rotary_emb(x, at[None])) for x, at in ((q, here), (k, there)))
            scores = torch.where(pairs, turned @ keys.mT * scaling, scores)
        return (scores.softmax(-1) @ v).transpose(1, 2), None

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", attend)
    lm.model.set_attn_implementation("eager")
    with torch.no_grad():  # at position 0 the model's own RoPE does nothing
        logits = lm.model(input_ids=ids, position_ids=torch.zeros_like(ids), use_cache=False).logits
    theirs = torch.stack([nats_of(*one) for one in zip(logits, ids, strict=True)])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + modeling_llama.rotate_half(x) * sin


@pytest.mark.parametrize("text", ["selfextend:group=2,window=256", "dca:chunk=384,local=64"])
def test_the_defaults_are_shares_of_the_trained_length(text: str, tokenizer: Any) -> None:
    lm, ids = open_lm("llama", tokenizer, max_position_embeddings=512), some_ids(1, 600)
    default = "selfextend:group=2" if "group" in text else "dca"
    assert torch.equal(nats_by(default, lm, ids, 256), nats_by(text, lm, ids, 256))


@pytest.mark.parametrize("text", ["selfextend:group=3,window=14", "dca:chunk=13,local=3"])
def test_it_goes_together_with_rope_and_temperature(text: str, lm: LM) -> None:
    ids, own = some_ids(1, 60), lm.model.model.rotary_emb.inv_freq
    positions = dict(CASES)[text]
    expected = by_pairs(lm.model, ids, parts=positions, inv_freq=own / 2, factor=lambda i: max(1.0, _log(i + 1, 7)))
    given = nats_by(f"rope:type=linear,factor=2+{text}+temperature:original=7", lm, ids)
    same(given[0], nats_of(expected, ids[0]))


def _log(x: int, base: int) -> float:
    return float(torch.tensor(x).log() / torch.tensor(base).log())


def test_a_text_that_the_group_does_not_cover_is_refused_with_one_that_does(tokenizer: Any) -> None:
    lm = open_lm("llama", tokenizer, max_position_embeddings=32)
    ids = some_ids(1, 200)
    with method("selfextend:group=2,window=12").on(lm) as reader:
        reader.read(ids[:, :52]).score(ids[:, 52:53])  # 12 + 20 · 2, and the last token is not fed
        with pytest.raises(ValueError, match=r"covers 52 tokens with the 32 .* and not 53; use group >= 3$"):
            reader.read(ids[:, :53])
    with method("selfextend:group=2,window=32").on(lm) as reader, pytest.raises(ValueError, match="a smaller window"):
        reader.read(ids[:, :33])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("selfextend:group=0", "selfextend: group: got 0, expected at least 1"),
        ("selfextend:group=2,window=0", "selfextend: window: got 0, expected at least 1"),
        ("selfextend", "needs group: write selfextend:group="),
        ("dca:chunk=0", "dca: chunk: got 0, expected at least 1"),
        ("dca:chunk=5,local=5", "local must be less than chunk"),
        ("dca:local=-1", "dca: local: got -1, expected at least 0"),
        ("dca+selfextend:group=2", "use one of them, with methods of the other kinds: RoPE, temperature, passages$"),
        ("dca+sinks:window=9", "both change how attention works"),
        ("rope:type=dynamic+dca", "both change how attention works"),
    ],
)
def test_settings_that_mean_nothing_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        method(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("selfextend:group=2,window=513", "window = 513 tokens is more than the 512 .* use window <= 512"),
        ("dca:chunk=500,local=20", r"chunk \+ local = 520 tokens is more than the 512 .* use chunk <= 492"),
        ("dca:local=400", r"chunk \+ local = 784 tokens .* use local <= 255 and a smaller chunk"),
        ("dca:local=255", "use chunk <= 257"),
    ],
)
def test_windows_larger_than_trained_are_refused(text: str, reason: str, lm: LM) -> None:
    with pytest.raises(ValueError, match=reason), method(text).on(lm):
        pass


@pytest.mark.parametrize("text", ["selfextend:group=2", "dca"])
def test_a_model_without_a_trained_length_needs_a_window(text: str, lm: LM) -> None:
    unknown = replace(lm, trained_length=None)
    with pytest.raises(ValueError, match=r"has no trained length\. Write"), method(text).on(unknown):
        pass


def test_queries_and_keys_that_turn_slowly_have_rope_in_bfloat16(tokenizer: Any) -> None:
    lm = open_lm("qwen2", tokenizer, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    frequencies = lm.model.model.rotary_emb.inv_freq
    for layer in lm.model.model.layers:  # most of their norm is in the pair of the lowest frequency
        for part in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            part.weight.data *= torch.tensor([0.01, 0.01, 0.01, 1.0] * 2).repeat(part.out_features // 8)[:, None]
    lm.model.to(torch.bfloat16)
    lm.model.model.rotary_emb._buffers["inv_freq"] = frequencies
    assert all(layer.inv_freq is frequencies for layer in hf.attention_layers(lm.model, name="dca"))
