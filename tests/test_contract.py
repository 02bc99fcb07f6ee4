"""What every method promises, on every method and several architectures."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from farspan.lm import LM, wrap
from farspan.methods import METHODS, Composed, Method, method
from farspan.methods.base import ATTENTION, PASSAGES, ROPE, TEMPERATURE
from farspan.methods.rope import TYPES, Rope

from cepe_models import tiny_cepe
from tiny import COMMON, CONFIGS, EXAMPLES, close, examples, some_ids, tiny_model

# plain; own window; partial RoPE; without RoPE; own window in some layers; the same with two RoPEs
ARCHITECTURES = ["llama", "mistral", "gpt_neox", "smollm3", "gemma2", "gemma3"]
OTHERS = ["qwen2", "qwen3", "phi3", "gemma", "olmo2", "stablelm"]
READ, ASKED = 52, 18  # tokens
FULL = method("full")


SETTINGS = examples()
FEW = list({type(one): one for one in reversed(SETTINGS) if {*one.changes} & {ATTENTION, TEMPERATURE}}.values())


def composed() -> Iterator[Method]:
    """Each method of attention with one of RoPE and one of temperature, every other one with one of passages as well;
    and each of temperature with one of RoPE."""
    ropes, attentions, temperatures, passages = (
        [one for one in SETTINGS if one.changes == (what,)] for what in (ROPE, ATTENTION, TEMPERATURE, PASSAGES)
    )
    for number, one in enumerate(one for one in FEW if one in attentions):
        yield Composed((ropes[number % len(ropes)], one, *temperatures[: number // 2 % 2], *passages[: number % 2]))
    for number, one in enumerate(temperatures):
        yield Composed((ropes[number % len(ropes)], one))


COMPOSED = list(composed())
ALL = SETTINGS + COMPOSED
NEUTRAL = list(dict.fromkeys(one for how in ALL if (one := how.neutral(100)) not in (None, how)))
MOST = {"llama": ALL, "gemma2": FEW + COMPOSED, "gemma3": SETTINGS}
EVERYWHERE = [(how, a) for a in ARCHITECTURES for how in MOST.get(a, FEW)]
SOME = len(OTHERS) // 2  # each method on two of the others, each of them with several methods
AND_OTHERS = EVERYWHERE + [(how, a) for i, a in enumerate(OTHERS) for how in FEW[i % SOME :: SOME]]
NEUTRAL_EVERYWHERE = [(how, a) for a in ARCHITECTURES for how in NEUTRAL]
NEUTRAL_EVERYWHERE += [(how, a) for i, a in enumerate(OTHERS) for how in NEUTRAL[i % SOME :: SOME]]
OTHERWISE = [(how, a) for a in ("llama", "gpt_neox", "smollm3") for how in ALL if how.neutral(1) != how]
OTHERWISE = [(how, a) for how, a in OTHERWISE if not (how.files and a == "gpt_neox")]  # factors are of other models
IN_MODEL = [(how, architecture) for how, architecture in AND_OTHERS if how.in_model]
FORGETFUL = [how for how in ALL if how.reach is not None and how.in_model]
BOUNDED = [how for how in ALL if how.kept_to_answer(4000) == how.kept_to_answer(400)]
# cepe, on decoders with an encoder; that of GPT-2 has fewer positions than the text
CEPE = [(method("cepe:chunk=8,decoder_window=32"), f"cepe {a}") for a in ("llama", "gpt_neox", "gemma2", "gpt2")]

_LMS: dict[str, LM] = {}


@pytest.fixture
def open_lm(tokenizer: Any) -> Any:
    """Models are built once; that methods leave them as they were is tested first."""

    def build(architecture: str) -> LM:
        if architecture not in _LMS:
            decoder = architecture.removeprefix("cepe ")
            changes = {"n_positions": 40} if architecture == "cepe gpt2" else {}
            model = tiny_model(decoder) if decoder == architecture else tiny_cepe(decoder, **changes)
            _LMS[architecture] = wrap(model, tokenizer, f"tiny-{architecture}")
        return _LMS[architecture]

    return build


USUAL = some_ids(2, READ + ASKED)


def nats(how: Method, lm: LM, ids: Tensor, chunk: int = 1024) -> Tensor:
    with how.on(lm) as reader:
        reader.chunk = chunk
        return reader.read(ids[:, :READ]).score(ids[:, READ:]).nats


_USUAL: dict[tuple[Method, str], Tensor] = {}


def usual_nats(how: Method, lm: LM) -> Tensor:
    """Those of `USUAL`, read once for all tests."""
    if (how, lm.name) not in _USUAL:
        _USUAL[how, lm.name] = nats(how, lm, USUAL)
    return _USUAL[how, lm.name]


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


@pytest.mark.parametrize(("how", "architecture"), EVERYWHERE + CEPE, ids=str)
def test_the_model_is_left_bit_identical_also_after_an_error(how: Method, architecture: str, open_lm: Any) -> None:
    lm, ids = open_lm(architecture), USUAL
    with torch.no_grad():
        before, logits = list(state(lm)), lm.model(input_ids=ids[:, : lm.position_limit]).logits
    nats(how, lm, ids)
    assert_unchanged(before, lm)
    with pytest.raises(ZeroDivisionError), how.on(lm) as reader:
        reader.read(ids[:, :READ]).generate(ids[:, READ:], 2, on_token=lambda _: 1 / 0)
    assert_unchanged(before, lm)
    with torch.no_grad():
        assert torch.equal(lm.model(input_ids=ids[:, : lm.position_limit]).logits, logits)


@pytest.mark.parametrize(("how", "architecture"), NEUTRAL_EVERYWHERE, ids=str)
def test_at_its_neutral_setting_it_equals_full(how: Method, architecture: str, open_lm: Any) -> None:
    lm = open_lm(architecture)
    close(nats(how, lm, USUAL, chunk=32), usual_nats(FULL, lm))


@pytest.mark.parametrize(("how", "architecture"), OTHERWISE, ids=str)
def test_at_any_other_setting_it_does_not(how: Method, architecture: str, open_lm: Any) -> None:
    lm = open_lm(architecture)
    assert (usual_nats(how, lm) - usual_nats(FULL, lm)).abs().max() > 0.01


@pytest.mark.parametrize(("how", "architecture"), AND_OTHERS, ids=str)
def test_the_result_does_not_depend_on_how_the_text_is_cut(how: Method, architecture: str, open_lm: Any) -> None:
    lm, ids = open_lm(architecture), USUAL
    once = usual_nats(how, lm)
    for chunk in (1, 7, 33) if architecture == "llama" and how in FEW else (7,):
        close(nats(how, lm, ids, chunk), once)
    with how.on(lm) as reader:
        reader.chunk = 9
        if reader.incremental:
            memory = reader.read(ids[:, :11], ids[:, 11:30], head=ids[:, :0])
            memory.read(ids[:, 30:31])
            memory.read(ids[:, 31:READ])
            assert memory.num_seen == READ
            close(memory.score(ids[:, READ:]).nats, once)
        as_it_reads = reader.read(ids[:, :READ])
        for i in range(0, ASKED if how.scores_as_it_reads else 0, 3):
            close(as_it_reads.score(ids[:, READ + i : READ + i + 1]).nats, once[:, i : i + 1])
            as_it_reads.read(ids[:, READ + i : READ + i + 3])


@pytest.mark.parametrize(("how", "architecture"), IN_MODEL, ids=str)
def test_one_pass_of_the_model_itself_gives_the_same(how: Method, architecture: str, open_lm: Any) -> None:
    lm, ids = open_lm(architecture), USUAL
    ours = usual_nats(how, lm)
    with how.on(lm), torch.no_grad():
        for cached in (False, True):
            logits = lm.model(input_ids=ids, use_cache=cached).logits[:, READ - 1 : -1].float()
            close(-logits.log_softmax(-1).gather(-1, ids[:, READ:, None])[..., 0], ours)


@pytest.mark.parametrize(("how", "architecture"), AND_OTHERS, ids=str)
def test_generation_takes_what_scoring_ranks_first(how: Method, architecture: str, open_lm: Any) -> None:
    lm, ids = open_lm(architecture), some_ids(2, READ)
    with how.on(lm) as reader:
        reader.chunk = 16
        memory = reader.read(ids[:, : READ - 10])
        before = memory.score(ids[:, READ - 10 :]).nats
        new = torch.stack(memory.generate(ids[:, READ - 10 :], 8))
        assert torch.equal(memory.score(ids[:, READ - 10 :]).nats, before)
        assert (memory.score(torch.cat([ids[:, READ - 10 :], new], 1), slice(10, None)).rank == 0).all()
        if how.in_model:
            ones = torch.ones_like(ids)  # a cache without the model's own window, of which methods may need more
            own = lm.model.generate(
                ids, attention_mask=ones, max_new_tokens=8, do_sample=False, past_key_values=DynamicCache()
            )
            for given, expected in zip(new.tolist(), own[:, READ:].tolist(), strict=True):
                until_it_stops = len(given) if 0 not in given else given.index(0) + 1
                assert expected[:until_it_stops] == given[:until_it_stops]


@pytest.mark.parametrize(("how", "architecture"), EVERYWHERE + CEPE, ids=str)
def test_nothing_is_known_before_its_time(how: Method, architecture: str, open_lm: Any) -> None:
    lm, other = open_lm(architecture), USUAL.clone()
    other[:, READ + 10 :] = some_ids(2, ASKED - 10, 1)
    given, changed = usual_nats(how, lm), nats(how, lm, other)
    close(changed[:, :10], given[:, :10])
    assert (changed[:, 11:] - given[:, 11:]).abs().min() > 0


@pytest.mark.parametrize(("how", "architecture"), EVERYWHERE + CEPE, ids=str)
def test_rows_do_not_see_each_other(how: Method, architecture: str, open_lm: Any) -> None:
    lm = open_lm(architecture)
    for row in range(2):
        close(nats(how, lm, USUAL[row : row + 1]), usual_nats(how, lm)[row : row + 1])


@pytest.mark.parametrize(("how", "architecture"), EVERYWHERE + CEPE, ids=str)
def test_scoring_leaves_the_memory_as_it_was_for_any_multiple_of_its_rows(
    how: Method, architecture: str, open_lm: Any
) -> None:
    lm, ids = open_lm(architecture), some_ids(2, READ)
    asked = some_ids(6, ASKED, 1)
    with how.on(lm) as reader:
        reader.chunk = 9
        memory = reader.read(ids)
        held = memory.num_kept
        first = memory.score(asked).nats
        kept = min(held, how.kept_to_answer(READ) + memory.num_encoded)
        close(memory.score(asked[2:4]).nats, first[2:4])
        memory.score(asked[:2, :3])  # fewer, so that cepe has another part in the encoder
        handle = lm.model.get_output_embeddings().register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            memory.score(asked)
        handle.remove()
        close(memory.score(asked).nats, first)
        assert (memory.num_seen, memory.num_kept) == (READ, kept)


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
@pytest.mark.parametrize("how", BOUNDED, ids=str)
def test_it_keeps_no_more_than_it_promises_however_long_the_text(how: Method, architecture: str, open_lm: Any) -> None:
    lm, ids = open_lm(architecture), some_ids(2, 401)
    with how.on(lm) as reader:
        for chunk, lengths in ((1, (30, 31)), (50, (97, 199, 200)), (1024, (391, 399, 400))):
            reader.chunk = chunk
            kept = []
            for length in lengths:
                memory = reader.read(ids[:, :length])
                memory.score(ids[:, length : length + 1])  # some drop keys at the first question
                kept.append(memory.num_kept)
                keys = 2 * memory.num_kept * lm.key_bytes_per_token
                assert keys <= memory.num_bytes <= 1.25 * keys + 16 * length  # 16: of both rows' ids, which may be held
                assert memory.num_kept <= how.kept_to_answer(length)
            assert max(kept) == how.kept_to_answer(max(lengths))
            assert max(kept) - min(kept) <= 7  # a window may move in steps


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("how", FORGETFUL, ids=str)
def test_it_forgets_what_it_promises_to_forget(how: Method, architecture: str, open_lm: Any) -> None:
    assert how.reach is not None
    reach = 2 * (how.reach - 1)  # of two layers
    read = how.first + 11 + reach
    lm, ids = open_lm(architecture), some_ids(1, read + ASKED)
    forgotten, remembered = ids.clone(), ids.clone()
    forgotten[:, how.first : read - reach] = some_ids(1, 11, 1)
    remembered[:, read - reach : read] = some_ids(1, reach, 1)
    with how.on(lm) as reader:
        given, other, far = (reader.read(x[:, :read]).score(x[:, read:]).nats for x in (ids, forgotten, remembered))
    # the first tokens read only each other, so tokens between them and the window are gone
    close(other[:, 1:], given[:, 1:])
    assert (far - given).abs().max() > 0.01


def test_a_method_that_changes_rope_is_refused_where_layers_have_a_theta_each(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONFIGS, "granite_swa", ("GraniteSWA", COMMON | {"layer_types": ["full_attention"] * 2}))
    lm = wrap(tiny_model("granite_swa", layer_rope_theta=[1e4, 1e6]), tokenizer, "granite-swa")
    several = r"changes one RoPE, and GraniteSWAForCausalLM has several .2 sets of frequencies.: leave RoPE unchanged"
    with pytest.raises(ValueError, match=several), method("rope:type=yarn,factor=4").on(lm):
        pass


@pytest.mark.parametrize(("how", "architecture"), IN_MODEL, ids=str)
def test_a_left_padded_batch_equals_its_rows_or_is_refused(how: Method, architecture: str, open_lm: Any) -> None:
    lm, ids = open_lm(architecture), some_ids(2, 60)
    padded, mask = ids.clone(), torch.ones_like(ids)
    padded[0, :13], mask[0, :13] = 0, 0
    with how.on(lm), torch.no_grad():
        alone = [lm.model(input_ids=ids[:1, 13:]).logits[0], lm.model(input_ids=ids[1:]).logits[0]]
        try:
            together = lm.model(input_ids=padded, attention_mask=mask).logits
        except ValueError as error:
            assert "one length" in str(error)  # noqa: PT017
        else:
            torch.testing.assert_close(together[0, 13:], alone[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(together[1], alone[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("how", "architecture"), [*((how, "llama") for how in ALL if {*how.changes} - {PASSAGES}), CEPE[0]], ids=str
)
def test_a_memory_cannot_be_used_outside_of_its_method(how: Method, architecture: str, open_lm: Any) -> None:
    lm, ids = open_lm(architecture), some_ids(1, READ)
    with how.on(lm) as reader:
        memory = reader.read(ids)
    with pytest.raises(ValueError, match="no longer on"):
        memory.score(ids[:, :3])
    with pytest.raises(ValueError, match="no longer on"):
        memory.read(ids[:, :3])


@pytest.mark.parametrize("how", [*ALL, *NEUTRAL], ids=str)
def test_it_prints_itself_so_that_it_parses_back(how: Method) -> None:
    assert method(str(how)) == how
    assert str(method(str(how))) == str(how)


def test_every_method_is_in_the_contract() -> None:
    # cepe, which needs a model of its own, has more tests of its own: test_cepe_method.py
    assert EXAMPLES.keys() | {"cepe"} == set(METHODS)
    assert {one.type for one in SETTINGS if isinstance(one, Rope)} == set(TYPES)
    assert all(texts and {type(method(text)) for text in texts} == {METHODS[name]} for name, texts in EXAMPLES.items())
