"""What every method promises, on every method and several architectures."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from farspan import hf
from farspan.lm import LM, wrap
from farspan.methods import METHODS, method
from farspan.reader import Memory

from tiny import VOCABULARY, tiny_model

ARCHITECTURES = ["llama", "mistral", "gpt_neox", "smollm3", "gemma2"]  # plain; own window; partial; without RoPE; both
OTHERS = ["qwen2", "qwen3", "phi3", "gemma", "olmo2", "stablelm"]
ALL = [
    "full",
    "sinks:window=20,sinks=3",
    "sinks:window=20,sinks=3,stride=8",
    "lambda_mask:window=20,sinks=3",
    "rope:type=linear,factor=4",
    "rope:type=ntk,factor=4",
    "rope:type=yarn,factor=4,original=64",
    "rope:type=dynamic,original=40",
    "topk:k=6",
    "replug:piece=16",
    "rope:type=yarn,factor=4,original=64+sinks:window=20,sinks=3",
    "rope:type=ntk,factor=2+topk:k=6+replug:piece=30",
]
FEW = ["sinks:window=20,sinks=3", "lambda_mask:window=20,sinks=3", "rope:type=dynamic,original=40", "topk:k=6"]
NEUTRAL = [
    "sinks:window=100,sinks=3",
    "sinks:window=100,sinks=3,stride=8",
    "lambda_mask:window=100,sinks=3",
    "rope:type=linear,factor=1",
    "rope:type=ntk,factor=1",
    "rope:type=yarn,factor=1",
    "rope:type=dynamic,original=100",
    "topk:k=100",
    "replug",
    "replug:weights=bm25,piece=100",
    "rope:type=yarn,factor=1+lambda_mask:window=100,sinks=3+replug",
]
READ, ASKED = 52, 18  # tokens
EVERYWHERE = [(t, a) for a in ARCHITECTURES for t in (ALL if a in ("llama", "gemma2") else FEW)]
AND_OTHERS = EVERYWHERE + [(text, architecture) for text in FEW for architecture in OTHERS]
NEUTRAL_EVERYWHERE = [(t, a) for a in ARCHITECTURES + OTHERS for t in (NEUTRAL if a in ARCHITECTURES else NEUTRAL[::2])]

_LMS: dict[str, LM] = {}


@pytest.fixture
def open_lm(tokenizer: Any) -> Any:
    """Models are built once; that methods leave them as they were is tested first."""

    def build(architecture: str) -> LM:
        if architecture not in _LMS:
            _LMS[architecture] = wrap(tiny_model(architecture), tokenizer, f"tiny-{architecture}")
        return _LMS[architecture]

    return build


def some_ids(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def same(given: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)


def nats(text: str, lm: LM, ids: Tensor, chunk: int = 1024) -> Tensor:
    with method(text).on(lm) as reader:
        reader.chunk = chunk
        return reader.read(ids[:, :READ]).score(ids[:, READ:]).nats


def state(lm: LM) -> Iterator[Any]:
    """All that a method might leave behind."""
    for name, module in lm.model.named_modules():
        for kind in (module._parameters, module._buffers):
            yield from ((name, key, id(value), value) for key, value in kind.items() if value is not None)
        plain = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str)}
        yield name, sorted(vars(module)), plain
    yield deepcopy(lm.model.config.to_dict())
    yield lm.model.config._attn_implementation
    yield sorted(AttentionInterface._global_mapping), sorted(AttentionMaskInterface._global_mapping)


def assert_unchanged(before: list[Any], lm: LM) -> None:
    for old, new in zip(before, state(lm), strict=True):
        if isinstance(old, tuple) and isinstance(old[-1], Tensor):
            assert old[:-1] == new[:-1]
            assert torch.equal(old[-1], new[-1])
        else:
            assert old == new


@pytest.mark.parametrize(("text", "architecture"), EVERYWHERE)
def test_the_model_is_left_bit_identical_also_after_an_error(text: str, architecture: str, open_lm: Any) -> None:
    lm = open_lm(architecture)
    ids = some_ids(2, READ + ASKED)
    with torch.no_grad():
        before, logits = list(state(lm)), lm.model(input_ids=ids).logits
    nats(text, lm, ids)
    assert_unchanged(before, lm)
    with pytest.raises(ZeroDivisionError), method(text).on(lm) as reader:
        reader.read(ids[:, :READ]).generate(ids[:, READ:], 2, on_token=lambda _: 1 / 0)
    assert_unchanged(before, lm)
    with torch.no_grad():
        assert torch.equal(lm.model(input_ids=ids).logits, logits)


@pytest.mark.parametrize(("text", "architecture"), NEUTRAL_EVERYWHERE)
def test_at_its_neutral_setting_it_equals_full(text: str, architecture: str, open_lm: Any) -> None:
    lm, ids = open_lm(architecture), some_ids(2, READ + ASKED)
    same(nats(text, lm, ids, chunk=32), nats("full", lm, ids))


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "smollm3"])
@pytest.mark.parametrize("text", [text for text in ALL if text != "full"])
def test_at_any_other_setting_it_does_not(text: str, architecture: str, open_lm: Any) -> None:
    lm, ids = open_lm(architecture), some_ids(2, READ + ASKED)
    assert (nats(text, lm, ids) - nats("full", lm, ids)).abs().max() > 0.01


@pytest.mark.parametrize(("text", "architecture"), AND_OTHERS)
def test_the_result_does_not_depend_on_how_the_text_is_cut(text: str, architecture: str, open_lm: Any) -> None:
    lm, ids = open_lm(architecture), some_ids(2, READ + ASKED)
    once = nats(text, lm, ids)
    for chunk in (1, 7, 33):
        same(nats(text, lm, ids, chunk), once)
    with method(text).on(lm) as reader:
        reader.chunk = 9
        if "replug" not in text:  # what is read later stands behind all of its passages
            memory = reader.read(ids[:, :11], ids[:, 11:30], head=ids[:, :0])
            memory.read(ids[:, 30:31])
            memory.read(ids[:, 31:READ])
            assert memory.num_seen == READ
            same(memory.score(ids[:, READ:]).nats, once)
        one_by_one = reader.read(ids[:, :READ])
        for i in range(ASKED):
            same(one_by_one.score(ids[:, READ + i : READ + i + 1]).nats, once[:, i : i + 1])
            one_by_one.read(ids[:, READ + i : READ + i + 1])


@pytest.mark.parametrize(("text", "architecture"), [(t, a) for t, a in AND_OTHERS if "replug" not in t])
def test_one_pass_of_the_model_itself_gives_the_same(text: str, architecture: str, open_lm: Any) -> None:
    lm, ids = open_lm(architecture), some_ids(2, READ + ASKED)
    ours = nats(text, lm, ids)
    with method(text).on(lm), torch.no_grad():
        for cached in (False, True):
            logits = lm.model(input_ids=ids, use_cache=cached).logits[:, READ - 1 : -1].float()
            same(-logits.log_softmax(-1).gather(-1, ids[:, READ:, None])[..., 0], ours)


@pytest.mark.parametrize(("text", "architecture"), AND_OTHERS)
def test_generation_takes_what_scoring_ranks_first(text: str, architecture: str, open_lm: Any) -> None:
    lm, ids = open_lm(architecture), some_ids(2, READ)
    with method(text).on(lm) as reader:
        reader.chunk = 16
        memory = reader.read(ids[:, : READ - 10])
        before = memory.score(ids[:, READ - 10 :]).nats
        new = torch.stack(memory.generate(ids[:, READ - 10 :], 8))
        assert torch.equal(memory.score(ids[:, READ - 10 :]).nats, before)
        assert (memory.score(torch.cat([ids[:, READ - 10 :], new], 1), slice(10, None)).rank == 0).all()
        if "replug" not in text:
            ones = torch.ones_like(ids)  # a cache without the model's own window, of which methods may need more
            own = lm.model.generate(
                ids, attention_mask=ones, max_new_tokens=8, do_sample=False, past_key_values=DynamicCache()
            )
            for given, expected in zip(new.tolist(), own[:, READ:].tolist(), strict=True):
                until_it_stops = len(given) if 0 not in given else given.index(0) + 1
                assert expected[:until_it_stops] == given[:until_it_stops]


@pytest.mark.parametrize(("text", "architecture"), EVERYWHERE)
def test_nothing_is_known_before_its_time(text: str, architecture: str, open_lm: Any) -> None:
    lm, ids = open_lm(architecture), some_ids(2, READ + ASKED)
    other = ids.clone()
    other[:, READ + 10 :] = some_ids(2, ASKED - 10, 1)
    given, changed = nats(text, lm, ids), nats(text, lm, other)
    same(changed[:, :10], given[:, :10])
    assert (changed[:, 11:] - given[:, 11:]).abs().min() > 0


@pytest.mark.parametrize(("text", "architecture"), EVERYWHERE)
def test_rows_do_not_see_each_other(text: str, architecture: str, open_lm: Any) -> None:
    lm, ids = open_lm(architecture), some_ids(3, READ + ASKED)
    together = nats(text, lm, ids)
    for row in range(3):
        same(nats(text, lm, ids[row : row + 1]), together[row : row + 1])


@pytest.mark.parametrize(("text", "architecture"), EVERYWHERE)
def test_scoring_leaves_the_memory_as_it_was_for_any_multiple_of_its_rows(
    text: str, architecture: str, open_lm: Any
) -> None:
    lm, ids = open_lm(architecture), some_ids(2, READ)
    asked = some_ids(6, ASKED, 1)
    with method(text).on(lm) as reader:
        reader.chunk = 9
        memory = reader.read(ids)
        kept = memory.num_kept
        first = memory.score(asked).nats
        same(memory.score(asked[2:4]).nats, first[2:4])
        handle = lm.model.get_output_embeddings().register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            memory.score(asked)
        handle.remove()
        same(memory.score(asked).nats, first)
        assert (memory.num_seen, memory.num_kept) == (READ, kept)


def held(memory: Memory, lm: LM) -> float:
    """Tokens whose keys and values fit into what the memory says it holds."""
    return memory.num_bytes / (2 * hf.key_bytes_per_token(lm.model))


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "phi3"])
@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("sinks:window=20,sinks=3", 22),
        ("sinks:window=20,sinks=0", 19),
        ("sinks:window=20,sinks=3,stride=8", 29),
        ("lambda_mask:window=20,sinks=3", 22),
        ("rope:type=yarn,factor=4,original=64+sinks:window=20,sinks=3", 22),
    ],
)
def test_it_keeps_no_more_than_it_says_however_long_the_text(
    text: str, most: int, architecture: str, open_lm: Any
) -> None:
    lm, ids = open_lm(architecture), some_ids(2, 400)
    with method(text).on(lm) as reader:
        for chunk, lengths in ((1, (30, 31)), (50, (97, 199, 200)), (1024, (391, 399, 400))):
            reader.chunk = chunk
            kept = []
            for length in lengths:
                memory = reader.read(ids[:, :length])
                kept.append(memory.num_kept)
                assert held(memory, lm) == memory.num_kept
            assert max(kept) == most
            assert most - min(kept) <= 7  # a stride keeps what its steps have still to see


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("text", ["sinks:window=20,sinks=3", "lambda_mask:window=20,sinks=3"])
def test_it_forgets_what_it_says_it_forgets(text: str, architecture: str, open_lm: Any) -> None:
    lm, ids = open_lm(architecture), some_ids(1, READ + ASKED)
    forgotten, remembered = ids.clone(), ids.clone()
    forgotten[:, 3 : READ - 2 * 19] = some_ids(1, READ - 2 * 19 - 3, 1)  # two layers, each 19 tokens further back
    remembered[:, READ - 2 * 19 : READ] = some_ids(1, 2 * 19, 1)
    given = nats(text, lm, ids)
    # the sinks read only each other, so what stands between them and the window is gone
    same(nats(text, lm, forgotten)[:, 1:], given[:, 1:])
    assert (nats(text, lm, remembered) - given).abs().max() > 0.01


@pytest.mark.parametrize(("text", "architecture"), [(t, a) for t, a in AND_OTHERS if "replug" not in t])
def test_a_left_padded_batch_equals_its_rows_or_is_refused(text: str, architecture: str, open_lm: Any) -> None:
    lm, ids = open_lm(architecture), some_ids(2, 60)
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[0, :13], mask[0, :13] = 0, 0
    with method(text).on(lm), torch.no_grad():
        alone = [lm.model(input_ids=ids[:1, 13:]).logits[0], lm.model(input_ids=ids[1:]).logits[0]]
        try:
            together = lm.model(input_ids=padded, attention_mask=mask).logits
        except ValueError as error:
            assert "one length" in str(error)  # noqa: PT017
            assert text.split(":")[0] not in ("full", "topk")
        else:
            torch.testing.assert_close(together[0, 13:], alone[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(together[1], alone[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("text", [text for text in ALL if text != "full" and not text.startswith("replug")])
def test_what_was_read_cannot_be_used_outside(text: str, open_lm: Any) -> None:
    lm, ids = open_lm("llama"), some_ids(1, READ)
    with method(text).on(lm) as reader:
        memory = reader.read(ids)
    with pytest.raises(ValueError, match="no longer on"):
        memory.score(ids[:, :3])
    with pytest.raises(ValueError, match="no longer on"):
        memory.read(ids[:, :3])


@pytest.mark.parametrize("text", [*ALL, *NEUTRAL, "replug:weights=dense,piece=256,tail=3840,encoder=some/encoder"])
def test_it_prints_itself_so_that_it_parses_back(text: str) -> None:
    assert method(str(method(text))) == method(text)
    assert str(method(str(method(text)))) == str(method(text))


def test_every_method_is_in_the_contract() -> None:
    # cepe needs a model of its own: test_cepe_method.py
    assert {text.partition(":")[0] for part in ALL for text in part.split("+")} == set(METHODS) - {"cepe"}
