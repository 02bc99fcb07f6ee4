"""The order of CEPE's context: zero at first, equal to its naive twin in every mode, kept by checkpoints, read by the
method, trained with offsets, and refused where a model or a context does not have it."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_train import numbered
from test_train_cepe import added, settings, windows  # noqa: F401  (the fixture)
from torch import Tensor
from torch.utils.data import default_collate
from transformers import PreTrainedTokenizerFast

import farspan
from farspan import cepe
from farspan.cepe.config import order_of
from farspan.cepe.order import ContextOrder
from farspan.lm import LM, wrap
from farspan.methods import method
from farspan.train.cepe import opened, prepare, terms, train
from farspan.train.documents import DocumentRows, DocumentSettings, NoiseSettings
from farspan.train.progress import TrainingWatch

from cepe_models import added_parameters, some_ids, tiny_cepe, tiny_encoder
from tiny import refused, tiny_model

KINDS = ["position", "age"]
LONGEST = 200  # tokens
TEXT = "cepe:chunk=8,decoder_window=32"


def ordered(kind: str, *, architecture: str = "llama", trained: bool = True, **how: Any) -> Any:
    """A tiny model whose order has random weights."""
    model = tiny_cepe(architecture)
    model.add_order(kind, **({"longest": LONGEST} | how))
    if trained:
        torch.manual_seed(3)
        for weight in model.context_order.parameters():
            torch.nn.init.normal_(weight, std=0.5)
    return model


def naive(order: ContextOrder, distance: int, chunk: int) -> Tensor:
    """The vector of one token, computed alone from the equations of the module."""
    if order.kind == "position":
        half = order.position.in_features // 2
        angles = [distance * order.longest ** (-i / half) for i in range(half)]
        return order.position.weight @ torch.tensor([*map(math.sin, angles), *map(math.cos, angles)])
    age = math.ceil(distance / chunk)
    whole = int(math.log2(age))
    share = math.log2(age) - whole
    return (1 - share) * order.age.weight[whole] + share * order.age.weight[whole + 1]


def mask_of(rows: int, chunks: int, length: int) -> Tensor:
    mask = torch.ones(rows, chunks, length, dtype=torch.long)
    mask[0, 0, 5:] = 0
    mask[1, 1] = 0
    return mask


@pytest.mark.parametrize("kind", KINDS)
def test_the_added_vectors_are_those_of_the_naive_twin(kind: str) -> None:
    order = ordered(kind).context_order
    states = torch.randn(2, 24, 16)
    distances = torch.stack([torch.arange(24, 0, -1), torch.arange(24, 0, -1) + 176])
    (given,) = order((states,), distances, 8)
    for row in range(2):
        for token in range(24):
            expected = states[row, token] + naive(order, int(distances[row, token]), 8)
            torch.testing.assert_close(given[row, token], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_untrained_order_changes_no_logit(kind: str) -> None:
    plain, model = tiny_cepe(), ordered(kind, trained=False)
    ids, context, mask = some_ids(2, 12), some_ids(2, 3, 8, seed=1), mask_of(2, 3, 8)
    with torch.no_grad():
        for offset in (0, 100):
            read = {"context_input_ids": context, "context_attention_mask": mask}
            given = model(input_ids=ids, **read, context_offset=torch.full((2,), offset)).logits
            assert torch.equal(given, plain(input_ids=ids, **read).logits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("padded", [True, False])
def test_each_mode_reads_the_states_with_order_and_tokens_count_but_not_padding(
    kind: str, layers: int, padded: bool
) -> None:
    """Also that only the last layers read them: the twin adds the vectors by hand to the states of each layer."""
    model, plain = ordered(kind, layers=layers), tiny_cepe()
    ids, context, mask = some_ids(2, 12), some_ids(2, 3, 8, seed=1), mask_of(2, 3, 8)
    padding, offset = None if padded else torch.ones_like(mask), torch.tensor([0, 16])
    with torch.no_grad():
        states = plain.encode_context(context, mask).states[0]
        added = torch.zeros_like(states)
        for row in range(2):
            seen = [t for t in range(24) if mask[row].flatten()[t]]
            for place, token in enumerate(seen):
                distance = len(seen) - place if padded else 24 - token
                added[row, place] = naive(model.context_order, distance + int(offset[row]), 8)
        expected = plain.encode_context(context, mask)
        expected.states = (states,) * (2 - layers) + (states + added,) * layers
        expected = plain(input_ids=ids, context=expected).logits
        without = plain(input_ids=ids, context=plain.encode_context(context, mask)).logits
        assert (expected - without).abs().max() > 0.01
        for mode in cepe.MODES:
            read = model.encode_context(context, mask, padding_mask=padding, offset=offset, mode=mode)
            torch.testing.assert_close(model(input_ids=ids, context=read).logits, expected, rtol=2e-4, atol=2e-4)
            if layers == 1:
                assert read.num_bytes < 2.5 * states.nbytes + 100_000


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_naive_twin(kind: str) -> None:
    model, ids, context = ordered(kind).train(), some_ids(1, 9), some_ids(1, 3, 8, seed=1)
    weight = next(model.context_order.parameters())

    def gradient(read: Any) -> Tensor:
        model.zero_grad()
        model(input_ids=ids, labels=ids, context=read).loss.backward()
        return weight.grad.clone()

    given = gradient(model.encode_context(context, offset=40))
    order, model.context_order = model.context_order, None
    read = model.encode_context(context)
    model.context_order = order
    twin = torch.stack([naive(order, 24 - t + 40, 8) for t in range(24)])
    read.states = tuple(states + twin for states in read.states)
    assert given.abs().max() > 1e-4
    torch.testing.assert_close(given, gradient(read), rtol=1e-3, atol=1e-5)


def test_an_entirely_masked_context_gives_the_order_a_gradient_of_zero() -> None:
    model, context = ordered("position").train(), some_ids(2, 3, 8, seed=1)
    read = model.encode_context(context, torch.zeros_like(context))
    model(input_ids=some_ids(2, 9), context=read).logits.sum().backward()
    assert (model.context_order.position.weight.grad == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_shuffled_chunks_are_read_as_others_and_without_order_as_the_same(kind: str) -> None:
    ids, context = some_ids(1, 12), some_ids(1, 4, 8, seed=1)
    with torch.no_grad():
        for model, least, most in ((ordered(kind), 1e-3, math.inf), (tiny_cepe(), 0, 1e-4)):
            one, other = (model(input_ids=ids, context_input_ids=c).logits for c in (context, context[:, [2, 0, 3, 1]]))
            assert least <= (one - other).abs().max() <= most


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adapter_only", [False, True])
def test_order_is_saved_and_loaded(kind: str, adapter_only: bool, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "base")
    model = cepe.from_base(tmp_path / "base", tiny_encoder())
    model.add_order(kind, layers=1, longest=LONGEST)
    torch.nn.init.normal_(next(model.context_order.parameters()))
    model.save_pretrained(tmp_path / "saved", adapter_only=adapter_only)
    again = cepe.from_pretrained(tmp_path / "saved")
    assert (order_of(again.config), again.context_order.layers, again.context_order.longest) == (kind, 1, LONGEST)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    assert {name for name, _ in added_parameters(again)} >= {f"context_order.{kind}.weight"}
    assert all(p.requires_grad for p in again.context_order.parameters())


def test_a_model_without_order_has_the_fields_and_weights_of_before(tmp_path: Path) -> None:
    model = tiny_cepe()
    model.save_pretrained(tmp_path)
    assert not [name for name in json.loads((tmp_path / "config.json").read_text()) if "order" in name]
    assert not [name for name in model.state_dict() if "order" in name]
    assert order_of(cepe.from_pretrained(tmp_path).config) == "none"


def test_a_checkpoint_whose_order_has_no_weights_is_refused(tmp_path: Path) -> None:
    tiny_cepe().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    order = {"cepe_order": "position", "cepe_order_layers": 2, "cepe_order_range": LONGEST}
    file.write_text(json.dumps(json.loads(file.read_text()) | order))
    with refused(r"context_order\.position\.weight"):
        cepe.from_pretrained(tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"cepe_order": "distance"}))
    with refused("none, position"):
        cepe.from_pretrained(tmp_path)


# the method


@pytest.fixture
def lm(tokenizer: PreTrainedTokenizerFast) -> LM:
    return wrap(ordered("position"), tokenizer, "ordered")


def test_the_method_counts_distances_back_from_the_decoder(lm: LM) -> None:
    """Also after its document has grown, by which the same chunks are farther away."""
    ids = some_ids(2, 100)
    with method(TEXT).on(lm) as reader, torch.no_grad():
        memory = reader.read(ids[:, :40])
        memory.score(ids[:, 40:48])
        memory.read(ids[:, 40:70])
        given = memory.score(ids[:, 70:82]).nats
        context = ids[:, :56].reshape(2, 7, 8)
        logits = lm.model(input_ids=ids[:, 56:82], context_input_ids=context, use_cache=False).logits[:, 13:-1]
        expected = -logits.log_softmax(-1).gather(-1, ids[:, 70:82, None])[..., 0]
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)


def test_the_method_can_leave_the_order_out(lm: LM, tokenizer: PreTrainedTokenizerFast) -> None:
    ids, found = some_ids(2, 82), {}
    for name, model in (("ordered", lm), ("plain", wrap(tiny_cepe(), tokenizer, "plain"))):
        for how in ("", ",order=none"):
            with method(TEXT + how).on(model) as reader:
                found[name + how] = reader.read(ids[:, :70]).score(ids[:, 70:]).nats
    assert torch.equal(found["ordered,order=none"], found["plain,order=none"])
    assert torch.equal(found["plain,order=none"], found["plain"])
    assert not torch.equal(found["ordered"], found["plain"])


def test_an_order_that_a_model_does_not_have_is_refused(lm: LM, tokenizer: PreTrainedTokenizerFast) -> None:
    with refused(r"ordered has no weights for order by age, its order is position"):
        method(f"{TEXT},order=age").on(lm).__enter__()
    with refused(r"plain has no weights for order by position, its order is none"):
        method(f"{TEXT},order=position").on(wrap(tiny_cepe(), tokenizer, "plain")).__enter__()
    with refused("order = .* is unknown"):
        method(f"{TEXT},order=distance")


def test_a_context_beyond_the_range_is_refused_before_it_is_read(lm: LM) -> None:
    ids = some_ids(1, LONGEST + 60)
    with method(TEXT).on(lm) as reader:
        memory = reader.read(ids)
        lm.model.encoder.forward = lambda *args, **kwargs: pytest.fail("the encoder read")
        with refused(r"a context of 240 tokens, .* exceeds the range of .* order, 200 tokens"):
            memory.score(ids[:, :8])
        del lm.model.encoder.forward
    with refused("a context of 201 tokens"):
        lm.model.encode_context(ids[:, :96].reshape(1, 12, 8), offset=105)


# training


def test_a_training_begins_with_the_warm_ups_model_and_moves_the_order(settings: Callable[..., Any]) -> None:  # noqa: F811
    warm = settings("warm", "stage=warmup", "trainer.steps=4")
    train(warm)
    plain = settings("plain", f"model.warmed_up={warm.out}", "trainer.steps=4")
    for kind in KINDS:
        chosen = settings(kind, f"model.warmed_up={warm.out}", f"model.order={kind}", "trainer.steps=4")
        lm, before = opened(chosen), opened(plain)
        rows, same = (prepare(s, m, TrainingWatch()) for s, m in ((chosen, lm), (plain, before)))
        batch, unordered = (default_collate([r[i] for i in range(4)]) for r in (rows, same))
        assert all(torch.equal(batch[name], tensor) for name, tensor in unordered.items())
        assert batch.keys() - unordered.keys() == {"context_offset", "context_padding_mask"}
        with torch.no_grad():
            one, other = terms(lm.model, lm.model, batch), terms(before.model, before.model, unordered)
        assert torch.equal(one["nats"], other["nats"])
        train(chosen)
        assert added(chosen)[f"context_order.{kind}.weight"].any()
        assert order_of(farspan.load(chosen.out, device="cpu").model.config) == kind


class Passages:
    """An index of passages of 1, 2, ... 7 tokens, the best of which depend on the query."""

    documents = np.full(7, -1)

    def __len__(self) -> int:
        return 7

    def passage(self, number: int) -> str:
        return " ".join(str(40 * number + i + 1) for i in range(number + 1))

    def search(self, queries: list[str], count: int) -> tuple[np.ndarray, np.ndarray]:
        order = np.random.default_rng(len(queries[0])).permutation(7)[None, :count]
        return order, np.zeros(order.shape)


class Numbers:
    """A tokenizer of numbers."""

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}


def retrieved(*, chunks: int, longest: int, noise: NoiseSettings | None = None) -> DocumentRows:
    """Windows after the passages that match them best, in chunks of 6 tokens."""
    data = DocumentSettings(
        text="t", decoder=12, chunks=chunks, chunk=6, mixture={"retrieved": 1.0}, index="i", query=4
    )
    more: Any = {"index": Passages(), "tokenizer": Numbers(), "noise": noise, "longest": longest}
    return DocumentRows(numbered(299), data, samples=8, separator=(0,), seed=0, **more)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", [4, 8])  # 8: more than there are passages, so that one is empty
def test_training_and_method_read_passages_of_any_length_at_the_same_distances(
    kind: str, chunks: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    lm = wrap(ordered(kind), tokenizer, "ordered")
    rows, lengths = retrieved(chunks=chunks, longest=chunks * 6), set()
    with method("cepe:chunk=6,decoder_window=32").on(lm) as reader, torch.no_grad():
        for row in map(rows.__getitem__, range(8)):
            given = terms(lm.model, lm.model, default_collate([row]))["nats"]
            pairs = zip(row["context_input_ids"], row["context_attention_mask"], strict=True)
            passages = [ids[None, : int(seen.sum())] for ids, seen in pairs if seen.any()]
            lengths |= {passage.shape[1] for passage in passages}
            memory = reader.read(*passages, head=row["input_ids"][None, :5])  # separator and query
            torch.testing.assert_close(given, memory.score(row["input_ids"][None, 5:]).nats.mean())
    assert lengths == {1, 2, 3, 4, 5, 6}
    hidden = retrieved(chunks=chunks, longest=chunks * 6, noise=NoiseSettings(rate=1.0))
    assert all(torch.equal(hidden[i]["context_padding_mask"], rows[i]["context_padding_mask"]) for i in range(8))
    assert any(
        not torch.equal(hidden[i]["context_attention_mask"], rows[i]["context_attention_mask"]) for i in range(8)
    )


def test_offsets_are_whole_chunks_up_to_the_range_as_often_in_each_octave() -> None:
    rows = windows(numbered(400), longest=4096, chunk=4, chunks=3, samples=2000)
    offsets = torch.tensor([int(rows[i]["context_offset"]) for i in range(2000)])
    assert (offsets % 4 == 0).all()
    assert offsets.max() <= 4096 - 12
    assert (offsets == 0).float().mean() == pytest.approx(1 / math.log2(1022), abs=0.02)
    assert (offsets >= 2048).float().mean() == pytest.approx(1 / math.log2(1022), abs=0.02)
    assert [int(rows[i]["context_offset"]) for i in range(9)] == offsets[:9].tolist()


def test_offsets_reach_the_range() -> None:
    rows = windows(numbered(400), longest=20, chunk=4, chunks=3, samples=60)
    assert {int(rows[i]["context_offset"]) for i in range(60)} == {0, 4, 8}


def test_copied_samples_are_a_slice_of_their_context() -> None:
    corpus = numbered(400)
    rows = windows(corpus, mixture={"copied": 1.0}, samples=200)
    begins = set()
    for row in map(rows.__getitem__, range(200)):
        context, decoder = row["context_input_ids"].flatten().tolist(), row["input_ids"].tolist()
        begins.add(begin := context.index(decoder[0]))
        assert context[begin : begin + 6] == decoder
    assert begins == set(range(7))
    with pytest.raises(ValueError, match=r"`copied`: data\.decoder = 13 tokens must be at most .* 12"):
        windows(corpus, mixture={"copied": 1.0}, decoder=13)


def test_orders_that_cannot_be_trained_are_refused(settings: Callable[..., Any]) -> None:  # noqa: F811
    with refused(r"model\.order"):
        settings("a", "model.order=distance")
    chosen = settings("a", "model.order=position", "model.order_range=20")
    with refused(r"data\.chunks x data\.chunk = 24 tokens are beyond the order's range of 20"):
        train(chosen)
    with refused("3 layers with order: expected 1 to 2"):
        opened(settings("b", "model.order=age", "model.order_layers=3"))
    warm = settings("warm", "stage=warmup", "model.order=age", "trainer.steps=2", "optimizer.decay_fraction=0")
    train(warm)
    with refused(r'model\.order = "position", but .* was warmed up with "age"'):
        opened(settings("c", f"model.warmed_up={warm.out}", "model.order=position"))
    assert order_of(opened(settings("d", f"model.warmed_up={warm.out}")).model.config) == "age"
    for override, message in (
        ("order_range=300", "= 300, but .* with 131072"),
        ("order_layers=1", "with 2"),
        ("encoder_layers=1", "with 2"),
    ):
        with refused(message):
            opened(settings("e", f"model.warmed_up={warm.out}", f"model.{override}"))
    for field in ("order_layers", "order_range"):
        with refused(rf"model\.{field} = 100 needs model\.order"):
            opened(settings("f", f"model.{field}=100"))
    short = settings("short", "stage=warmup", "model.order=age", "model.order_range=100", "trainer.steps=2",
                     "optimizer.decay_fraction=0")  # fmt: skip
    train(short)
    with refused(r"model\.order_range = 131072, but .* with 100"):  # the default, but given
        opened(settings("g", f"model.warmed_up={short.out}", "model.order_range=131072"))
