"""The method cepe: what stands where, and what the contract of methods means for it.

Of the contract's tests (test_contract.py) these do not apply to it: that the model called by itself gives the same (it
needs to be told its context), and a bound on what is kept (it keeps all, but little of each token). The order of what
lies far back does not matter: chunks are a set. That cuts do not matter holds for reading; what is asked at once has
its place in the decoder's window, so beyond the window asking in parts is asking something else.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from farspan.cepe import MODES, from_base
from farspan.cepe.cost import Sizes, parameters
from farspan.lm import LM, wrap
from farspan.methods import method
from farspan.reader import Memory, Reader

from cepe_models import some_ids, tiny_cepe, tiny_encoder
from tiny import close, saved, tiny_model

ARCHITECTURES = ["llama", "gpt_neox", "gemma2", "gpt2"]
TEXT = "cepe:chunk=8,decoder_window=32"
READ, ASKED = 70, 12  # tokens


_LMS: dict[str, LM] = {}


@pytest.fixture
def open_lm(tokenizer: PreTrainedTokenizerFast) -> Any:
    def build(architecture: str) -> LM:
        if architecture not in _LMS:
            changes = {"n_positions": 40} if architecture == "gpt2" else {}
            _LMS[architecture] = wrap(tiny_cepe(architecture, **changes), tokenizer, f"tiny-{architecture}")
        return _LMS[architecture]

    return build


@pytest.fixture
def lm(open_lm: Any) -> LM:
    return open_lm("llama")


def by_hand(lm: LM, context: Tensor | None, decoder: Tensor, asked: Tensor) -> Tensor:
    """Nats of what is asked behind `decoder`, with a context [batch, chunks, length], in one forward of the model."""
    with torch.no_grad():
        out = lm.model(input_ids=torch.cat([decoder, asked], 1), context_input_ids=context, use_cache=False)
    logits = out.logits[:, decoder.shape[1] - 1 : -1]
    return -logits.log_softmax(-1).gather(-1, asked[..., None])[..., 0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("read", "chunks"), [(20, 0), (21, 1), (28, 1), (29, 2), (70, 7)])
def test_the_end_of_a_document_stands_in_the_decoder(architecture: str, read: int, chunks: int, open_lm: Any) -> None:
    lm, ids = open_lm(architecture), some_ids(2, read + ASKED)
    context = ids[:, : chunks * 8].reshape(2, chunks, 8) if chunks else None
    expected = by_hand(lm, context, ids[:, chunks * 8 : read], ids[:, read:])
    with method(TEXT).on(lm) as reader:
        close(reader.read(ids[:, :read]).score(ids[:, read:]).nats, expected)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_plan_counts_the_layers_that_read_the_context_and_their_states(
    layers: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    several = {"num_cross_attn_layers": layers, "num_cross_attn_hidden_states": 2}
    model = from_base(tiny_model("llama"), tiny_encoder(), **several).eval()
    lm, ids = wrap(model, tokenizer, "tiny"), some_ids(2, READ)
    assert parameters(Sizes.of(model.config), Sizes.of(model.encoder.config)) == sum(
        one.numel() for one in model.parameters()
    )
    with method(TEXT).on(lm) as reader:
        memory = reader.read(ids)
        memory.score(ids[:, :2])
        states = sum(one.nbytes for one in memory.states)
        needed = reader.bytes_needed(2, READ)
        assert needed is not None
        assert needed["context_states"] == states * (READ - 32) // 40  # tokens beyond the window; in five whole chunks


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_more_chunks_than_trained_sharpen_the_cross_attention(architecture: str, mode: str, open_lm: Any) -> None:
    lm, ids = open_lm(architecture), some_ids(2, READ + ASKED)
    with method(f"{TEXT},mode={mode},trained_chunks=3").on(lm) as reader:
        given = reader.read(ids[:, :READ]).score(ids[:, READ:]).nats
        inside = reader.read(ids[:, :45]).score(ids[:, 45:57]).nats  # 4 chunks
    crosses = lm.model.cross_attentions()
    before = [(cross.q_proj.weight.clone(), cross.q_proj.bias) for cross in crosses]
    with torch.no_grad():
        for chunks, read, found in ((7, READ, given), (4, 45, inside)):
            for cross, (weight, bias) in zip(crosses, before, strict=True):
                cross.q_proj.weight.copy_(weight * math.log(chunks) / math.log(3))
                cross.q_proj.bias = bias if bias is None else torch.nn.Parameter(bias * math.log(chunks) / math.log(3))
            context, asked = ids[:, : chunks * 8].reshape(2, chunks, 8), ids[:, read : read + ASKED]
            close(found, by_hand(lm, context, ids[:, chunks * 8 : read], asked))
        for cross, (weight, bias) in zip(crosses, before, strict=True):
            cross.q_proj.weight.copy_(weight)
            cross.q_proj.bias = bias


def test_fewer_chunks_than_trained_are_read_as_before(lm: LM) -> None:
    ids = some_ids(2, READ + ASKED)
    both = []
    for text in (TEXT, TEXT + ",trained_chunks=7"):
        with method(text).on(lm) as reader:
            both.append(reader.read(ids[:, :READ]).score(ids[:, READ:]).nats)
    assert torch.equal(*both)
    with pytest.raises(ValueError, match="trained_chunks: got 1, expected at least 2"):
        method(TEXT + ",trained_chunks=1")


def test_head_and_question_count_in_the_window(lm: LM) -> None:
    ids, head = some_ids(2, 30 + ASKED), some_ids(2, 5, seed=3)
    decoder = torch.cat([head, ids[:, 16:30]], 1)  # 5 + 30 + 12 tokens are 15 more than the window
    with method(TEXT).on(lm) as reader:
        given = reader.read(ids[:, :30], head=head).score(ids[:, 30:]).nats
    close(given, by_hand(lm, ids[:, :16].reshape(2, 2, 8), decoder, ids[:, 30:]))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_makes_no_difference_in_which_pieces_a_document_is_read(architecture: str, open_lm: Any) -> None:
    lm, ids = open_lm(architecture), some_ids(2, READ + ASKED)
    with method(TEXT).on(lm) as reader:
        once = reader.read(ids[:, :READ]).score(ids[:, READ:]).nats
        for pieces, chunk in (
            ([1] * READ, 7),
            ([11, 22, 37], 1),
            ([11, 22, 37], 7),
            ([0, 69, 1], 7),
            ([0, 69, 1], 1024),
        ):
            reader.chunk = chunk
            memory = reader.read(ids[:, : pieces[0]])
            done = pieces[0]
            for piece in pieces[1:]:
                if done % 3 == 1:  # asking in between leaves no trace either
                    memory.score(ids[:, done : done + 5])
                memory.read(ids[:, done : done + piece])
                done += piece
            close(memory.score(ids[:, READ:]).nats, once)


def test_what_does_not_fit_is_scored_in_parts_of_half_a_window(lm: LM) -> None:
    ids = some_ids(2, 100)
    with method(TEXT).on(lm) as reader:
        memory = reader.read(ids[:, :10])
        given = memory.score(ids[:, 10:]).nats
        parts = [reader.read(ids[:, :at]).score(ids[:, at : at + 16]).nats for at in range(10, 100, 16)]
        close(given, torch.cat(parts, 1))
        close(memory.score(ids[:, 10:], slice(50, 60)).nats, given[:, 50:60])
        assert memory.num_seen == 10
        other = some_ids(2, 90, seed=4)
        both = memory.score(torch.cat([ids[:, 10:], other])).nats
        close(both[:2], given)
        close(both[2:], memory.score(other).nats)
        padded = torch.cat([ids[:, 10:60], torch.full((2, 40), -1)], 1)
        close(memory.score(padded).nats[:, :50], given[:, :50])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_with_everything_in_the_decoder_it_is_the_base(architecture: str, open_lm: Any) -> None:
    lm, ids = open_lm(architecture), some_ids(2, 38)
    with method("cepe:chunk=8,decoder_window=38").on(lm) as reader:
        given = reader.read(ids[:, :26]).score(ids[:, 26:]).nats
    with method("full").on(lm) as reader:
        expected = reader.read(ids[:, :26]).score(ids[:, 26:]).nats
    close(given, expected)
    with method("cepe:chunk=8,decoder_window=30").on(lm) as reader:
        assert (reader.read(ids[:, :26]).score(ids[:, 26:]).nats - expected).abs().max() > 0.01


def test_several_passages_are_encoded_each_by_itself(lm: LM) -> None:
    head, asked = some_ids(2, 3, seed=3), some_ids(2, ASKED, seed=4)
    passages = [some_ids(2, 8, seed=5), some_ids(2, 8, seed=6), some_ids(2, 13, seed=7), some_ids(2, 4, seed=8)]
    with method(TEXT).on(lm) as reader:
        memory = reader.read(*passages, head=head)
        given = memory.score(asked).nats
        assert memory.num_seen == 36
    whole, mask = torch.zeros(2, 5, 8, dtype=torch.long), torch.zeros(2, 5, 8, dtype=torch.long)
    cut = (passages[0], passages[1], passages[2][:, :8], passages[2][:, 8:], passages[3])
    for i, part in enumerate(cut):
        whole[:, i, : part.shape[1]], mask[:, i, : part.shape[1]] = part, 1
    context = lm.model.encode_context(whole, mask)
    with torch.no_grad():
        logits = lm.model(input_ids=torch.cat([head, asked], 1), context=context).logits[:, 2:-1]
    close(given, -logits.log_softmax(-1).gather(-1, asked[..., None])[..., 0])
    with method(TEXT).on(lm) as reader:
        close(reader.read(*reversed(passages), head=head).score(asked).nats, given)  # a set


def test_the_first_passages_can_stand_in_the_decoder(lm: LM) -> None:
    head, asked = some_ids(2, 3, seed=3), some_ids(2, ASKED, seed=4)
    first, second, third = (some_ids(2, 8, seed=seed) for seed in (5, 6, 7))
    expected = by_hand(lm, torch.stack([second, third], 1), torch.cat([head, first], 1), asked)
    with method(TEXT + ",decoder_passages=1").on(lm) as reader:
        memory = reader.read(first, second, third, head=head)
        close(memory.score(asked).nats, expected)
        close(reader.read(third, second, first, head=head).score(asked).nats, by_hand(
            lm, torch.stack([second, first], 1), torch.cat([head, third], 1), asked
        ))  # fmt: skip
        question = some_ids(2, 4, seed=9)
        memory.read(question)  # goes to the decoder's side
        expected = by_hand(lm, torch.stack([second, third], 1), torch.cat([head, first, question], 1), asked)
        close(memory.score(asked).nats, expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_generation_takes_what_scoring_ranks_first(architecture: str, open_lm: Any) -> None:
    lm, ids = open_lm(architecture), some_ids(2, READ)
    with method(TEXT).on(lm) as reader:
        memory = reader.read(ids[:, :60])
        before = memory.score(ids[:, 60:]).nats
        new = memory.generate(ids[:, 60:], 6, stop=())
        assert [len(row) for row in new] == [6, 6]
        assert torch.equal(memory.score(ids[:, 60:]).nats, before)
        asked = torch.cat([ids[:, 60:], torch.stack(new)], 1)
        assert (memory.score(asked, slice(10, None)).rank == 0).all()
        if architecture == "llama":
            chunks = -(-(60 + 16 - 32) // 8)
            own = lm.model.generate(
                ids[:, chunks * 8 :], attention_mask=torch.ones_like(ids[:, chunks * 8 :]), max_new_tokens=6,
                do_sample=False, eos_token_id=None, context_input_ids=ids[:, : chunks * 8].reshape(2, chunks, 8),
            )  # fmt: skip
            assert torch.equal(own[:, -6:], torch.stack(new))


@pytest.mark.parametrize("mode", ["cache", "recompute", "absorb"])
def test_every_mode_gives_the_same(mode: str, lm: LM) -> None:
    ids = some_ids(2, READ + ASKED)
    with method(TEXT).on(lm) as reader:
        expected = reader.read(ids[:, :READ]).score(ids[:, READ:]).nats
    with method(f"{TEXT},mode={mode}").on(lm) as reader:
        close(reader.read(ids[:, :READ]).score(ids[:, READ:]).nats, expected)


def test_it_remembers_what_lies_far_back(lm: LM) -> None:
    ids = some_ids(2, READ + ASKED)
    other = ids.clone()
    other[:, 3] = (other[:, 3] + 1).clamp_max(299)
    with method(TEXT).on(lm) as reader:
        given, changed = (reader.read(x[:, :READ]).score(x[:, READ:]).nats for x in (ids, other))
    assert (changed - given).abs().min() > 0


def test_a_token_far_back_takes_the_width_of_the_encoder(lm: LM) -> None:
    with method(TEXT + ",mode=absorb").on(lm) as reader:
        bytes_of = []
        for length in (80, 160):
            ids = some_ids(2, length)
            reader.capacity = length
            memory = reader.read(ids)
            memory.score(ids[:, :ASKED])
            bytes_of.append(memory.num_bytes)
    assert bytes_of[1] - bytes_of[0] == 2 * 80 * (16 * 4 + 8)  # states in float32, and the ids


def test_it_keeps_the_protocols(lm: LM) -> None:
    with method(TEXT).on(lm) as reader:
        assert isinstance(reader, Reader)
        assert isinstance(reader.read(some_ids(1, 3)), Memory)


@pytest.mark.parametrize("text", ["cepe", TEXT, "cepe:decoder_passages=10,mode=absorb"])
def test_it_prints_itself_so_that_it_parses_back(text: str) -> None:
    assert method(str(method(text))) == method(text)
    assert str(method(text)) == text


def test_defaults_follow_the_model(open_lm: Any) -> None:
    lm = open_lm("llama")  # trained on 512 tokens, an encoder of 16
    with method("cepe").on(lm) as reader:
        assert (reader.window, reader.size) == (256, 16)


def test_what_cannot_be_read_is_refused(lm: LM, open_lm: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    from tiny import tiny_model

    def opened(text: str, lm: LM) -> None:
        with method(text).on(lm):
            pass

    for text, message in (
        ("cepe:chunk=17", "chunk = 17 is longer than the encoder's window; use chunk <= 16"),
        ("cepe:chunk=8,decoder_window=8", "fills decoder_window = 8"),
        ("cepe:mode=cach", "did you mean 'cache'"),
        ("cepe:chunk=0", "chunk: got 0, expected at least 1"),
        ("cepe+topk:k=3", "cannot be composed"),
    ):
        with pytest.raises(ValueError, match=message):
            opened(text, lm)
    with pytest.raises(ValueError, match="plain has none: give a CEPE model"):
        opened("cepe", wrap(tiny_model(), tokenizer, "plain"))
    with pytest.raises(ValueError, match="more than the 40 positions"):
        opened("cepe:decoder_window=50", open_lm("gpt2"))
    with method(TEXT).on(lm) as reader:
        with pytest.raises(ValueError, match="a head of 24 tokens is too long"):
            reader.read(some_ids(1, 50), head=some_ids(1, 24))
        with pytest.raises(ValueError, match="the memory is empty"):
            reader.read().score(some_ids(1, 3))
        with pytest.raises(ValueError, match="nothing predicts the first token"):
            reader.read(some_ids(1, 8), some_ids(1, 8)).score(some_ids(1, 3))
        with pytest.raises(ValueError, match="40 tokens at once do not fit into the decoder's window of 32"):
            reader.read(some_ids(1, 50)).generate(some_ids(1, 10), 30)
        with pytest.raises(ValueError, match="without padding"):
            reader.read(torch.tensor([[3, -1]]))


def test_measures_run_on_a_folder(tmp_path: Path, lm: LM, tokenizer: PreTrainedTokenizerFast) -> None:
    from farspan.measuring.grid import measure
    from farspan.measuring.loader import Load

    saved(tmp_path / "model", tokenizer, lm.model)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog and the dog sleeps on " * 200)
    load, methods = Load(device="cpu"), ["full", TEXT]
    what = {"text": str(text), "lengths": (24, 96), "repeats": 2, "loader": load}
    tasks = ["perplexity:target_tokens=8"]
    rows = measure([str(tmp_path / "model")], methods, tasks, out=tmp_path / "ppl", **what).rows
    assert {(row.method, row.length, row.status) for row in rows} == {(m, n, "ok") for m in methods for n in (24, 96)}
    by = {(row.method, row.length, row.repeat): row.scores for row in rows}
    assert by["full", 24, 0]["nats"] == pytest.approx(by[TEXT, 24, 0]["nats"], rel=1e-4)
    assert by["full", 96, 0]["nats"] != pytest.approx(by[TEXT, 96, 0]["nats"], rel=1e-4)
    rows = measure([str(tmp_path / "model")], methods, ["curve"], out=tmp_path / "curve", **what).rows
    assert {row.status for row in rows} == {"ok"}


def test_a_plan_says_what_the_parts_of_memory_take(lm: LM, tmp_path: Path) -> None:
    from farspan.measuring.grid import plans
    from farspan.measuring.setups import grid

    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog and the dog sleeps on " * 200)
    what = grid([lm], ["perplexity:target_tokens=8"], text=str(text), lengths=(96, 192), repeats=2)
    planned = [one.cost for one in plans([lm], ["full", TEXT], what)]
    assert planned[0].parts is None
    parts = planned[1].parts
    assert parts["weights"] == sum(p.nbytes for p in lm.model.parameters())
    assert parts["context_states"] == 2 * (192 - 32) * 16 * 4  # rows, tokens outside the window, width, float32
    assert planned[1].flops < planned[0].flops
