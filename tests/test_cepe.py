"""The CEPE model: equal to the authors' code, to its base until it is trained, and to itself in every mode."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from farspan import cepe
from farspan.cepe import surgery
from farspan.cepe.model import is_added

from cepe_models import added_parameters, authors_model, mixtral, some_ids, tiny_cepe, tiny_encoder
from tiny import CONFIGS, GPT, close, tiny_config, tiny_model

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {},
    "gemma3": {},
    "phi": {},
    "phi qk-norm": {"qk_layernorm": True},
    "phi3": {},
    "gpt2": {},
    "gpt_neox": {"use_parallel_residual": True},
    "gpt_neox sequential": {"use_parallel_residual": False},
    "gptj": {},
    "opt": {"dropout": 0.1},
    "bloom": {},
    "falcon": {},
    "falcon new": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon sequential": {"parallel_attn": False, "multi_query": False},
    "cohere": {},
    "cohere qk-norm": {"use_qk_norm": True},
    "olmo2": {},
    "stablelm": {},
    "stablelm qk-norm": {"qk_layernorm": True, "use_parallel_residual": True},
    "granite": {"residual_multiplier": 0.5, "attention_multiplier": 0.2},
    "smollm3": {},
    "nanochat": {},
    "modernbert": {},
}


def build(family: str, **how: Any) -> Any:
    return tiny_cepe(family.split()[0], **FAMILIES[family], **how)


def some_mask(rows: int = 2, chunks: int = 3, length: int = 8) -> Tensor:
    """A suffix, a whole chunk and a prefix are masked, unlike in the rows."""
    mask = torch.ones(rows, chunks, length, dtype=torch.long)
    mask[0, 0, 5:], mask[0, 1], mask[1, 2, :3] = 0, 0, 0
    return mask


def checkpoint_layers(model: Any) -> None:
    """By the name that this version of transformers has for it."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().abs().max())


@pytest.fixture
def authors(reference: dict[str, Tensor]) -> Any:
    return authors_model(reference).eval()


def left_padded(reference: dict[str, Tensor]) -> dict[str, Tensor]:
    mask = reference["in.dec_left"]
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    return {"input_ids": reference["in.x"], "attention_mask": mask, "position_ids": positions}


@pytest.mark.parametrize("mode", cepe.MODES)
def test_logits_and_encoder_states_are_those_of_the_authors(mode: Any, authors: Any, reference: Any) -> None:
    r = reference
    with torch.no_grad():
        assert apart(authors(input_ids=r["in.x"]).logits, r["mha.base.logits"]) < 2e-5
        whole = authors.encode_context(r["in.e"], mode=mode)
        assert apart(whole.states[0], r["mha.full.enc.0"]) < 2e-5
        right = authors.encode_context(r["in.e"], r["in.m_right"], mode=mode)
        left = authors.encode_context(r["in.e_left"], r["in.m_left"], mode=mode)
        for _ in range(2):  # also from what was kept
            assert apart(authors(input_ids=r["in.x"], context=whole).logits, r["mha.full.logits"]) < 2e-5
            assert apart(authors(input_ids=r["in.x"], context=right).logits, r["mha.right.logits"]) < 2e-5
            given = authors(**left_padded(r), context=left).logits - r["mha.left.logits"]
            assert float(given[r["in.dec_left"].bool()].abs().max()) < 2e-5


@pytest.mark.parametrize("mode", cepe.MODES)
@pytest.mark.parametrize("use_cache", [False, True])
def test_greedy_tokens_are_those_of_the_authors(mode: Any, use_cache: bool, authors: Any, reference: Any) -> None:
    context = authors.encode_context(reference["in.e_left"], reference["in.m_left"], mode=mode)
    given = authors.generate(
        reference["in.x"],
        attention_mask=reference["in.dec_left"],
        context=context,
        max_new_tokens=10,
        do_sample=False,
        use_cache=use_cache,
        eos_token_id=None,
    )
    assert torch.equal(given, reference[f"mha.gen.cache{int(use_cache)}"])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradients_are_those_of_the_authors(checkpointing: bool, authors: Any, reference: Any) -> None:
    if checkpointing:
        checkpoint_layers(authors)
    loss = authors.train()(
        input_ids=reference["in.x"],
        encoder_input_ids=reference["in.e"],
        encoder_attention_mask=reference["in.m_right"],
        labels=reference["in.labels"],
        use_cache=False,
    ).loss
    assert apart(loss, reference["mha.loss.ce"]) < 5e-6
    loss.backward()
    expected = {key[12:]: value for key, value in reference.items() if key.startswith("mha.grad.ce.")}
    given = {name: p.grad for name, p in authors.named_parameters() if p.grad is not None}
    assert given.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    assert max(apart(given[name], expected[name]) for name in expected) < 2e-5 * largest


@pytest.mark.parametrize("family", FAMILIES)
def test_until_it_is_trained_it_says_exactly_what_its_base_says(family: str) -> None:
    base = mixtral() if family == "mixtral" else tiny_model(family.split()[0], **FAMILIES[family])
    ids, context = some_ids(2, 12), some_ids(2, 3, 8, seed=1)
    with torch.no_grad():
        expected = base(input_ids=ids).logits
        model = cepe.from_base(base, tiny_encoder())
        assert torch.equal(model(input_ids=ids).logits, expected)
        for mode in cepe.MODES:
            read = model.encode_context(context, some_mask(), mode=mode)
            assert torch.equal(model(input_ids=ids, context=read).logits, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_mode_gives_the_same_and_a_context_matters(family: str) -> None:
    model, ids, context = build(family), some_ids(2, 12), some_ids(2, 3, 8, seed=1)
    for mask in (None, some_mask()):
        with torch.no_grad():
            expected = model(input_ids=ids, context=model.encode_context(context, mask, mode="recompute")).logits
            for mode in cepe.MODES:
                read = model.encode_context(context, mask, mode=mode)
                for _ in range(2):
                    torch.testing.assert_close(
                        model(input_ids=ids, context=read).logits, expected, rtol=2e-5, atol=2e-5
                    )
            assert apart(expected, model(input_ids=ids).logits) > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_a_cache_equals_generation_without(family: str) -> None:
    model, ids, context = build(family), some_ids(2, 9), some_ids(2, 3, 8, seed=1)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    how = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    for beams in (1, 3):
        expected = model.generate(
            ids, use_cache=False, num_beams=beams, context_input_ids=context, context_attention_mask=some_mask(), **how
        )
        assert not torch.equal(expected, model.generate(ids, num_beams=beams, **how))
        for mode in cepe.MODES:
            read = model.encode_context(context, some_mask(), mode=mode)
            assert torch.equal(model.generate(ids, num_beams=beams, context=read, **how), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_reach_what_was_added_and_nothing_else(family: str) -> None:
    model, ids, context = build(family).train(), some_ids(2, 12), some_ids(2, 3, 8, seed=1)
    gradients = []
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            checkpoint_layers(model)
        loss = 0.0
        for seed in (0, 1):  # two forwards before one backward
            loss = loss + model(
                input_ids=ids, context_input_ids=context.roll(seed, 1), context_attention_mask=some_mask(),
                labels=ids.roll(seed, 1), use_cache=False,
            ).loss  # fmt: skip
        loss.backward()
        given = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert given.keys() == {name for name, _ in model.named_parameters() if is_added(name)}
        gradients.append(given)
    for name, value in gradients[0].items():
        assert value.abs().max() > 0 or "embed_tokens" in name
        assert torch.equal(gradients[1][name], value)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_query_is_residual_stream_and_attention_and_the_context_joins_it_once(family: str) -> None:
    model, ids = build(family), some_ids(2, 5)
    layer = surgery.layers_of(model)[1]
    seen: dict[str, Any] = {}
    layer.register_forward_hook(lambda _, args, out: seen.update(out=out[0] if isinstance(out, tuple) else out))
    layer.register_forward_pre_hook(lambda _, args: seen.update(into=args[0]))

    def run(shift: float) -> tuple[Tensor, Tensor]:
        class Constant(torch.nn.Module):
            def forward(self, hidden: Tensor, context: Any) -> Tensor:
                seen["query"] = hidden
                return torch.full_like(hidden, shift)

        layer.cross_attn = Constant()
        with torch.no_grad():
            model(input_ids=ids, context=model.encode_context(some_ids(2, 1, 8)))
        return seen["query"], seen["out"]

    query, out = run(0.0)
    # a feed-forward that says nothing leaves the stream: its last matrix is zeroed
    for name, parameter in layer.named_parameters():
        if any(
            part in name for part in ("down_proj", "mlp.c_proj", "fc2", "fc_out", "dense_4h_to_h", "mlp.w2", "mlp.Wo")
        ):
            parameter.data.zero_()
        if "mlp.experts" in name:
            parameter.data.zero_()
    query, out = run(0.0)
    close(query, out)
    assert apart(run(0.7)[1], query + 0.7) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gpt2"])  # without and with a bias of values
def test_a_context_without_a_token_adds_exactly_zero(family: str) -> None:
    model, ids, context = build(family), some_ids(2, 12), some_ids(2, 3, 8, seed=1)
    with torch.no_grad():
        alone = model(input_ids=ids).logits
        nothing = torch.zeros_like(context)
        assert torch.equal(
            model(input_ids=ids, context_input_ids=context, context_attention_mask=nothing).logits, alone
        )
        mask = some_mask()
        mask[1] = 0
        for mode in cepe.MODES:
            logits = model(input_ids=ids, context=model.encode_context(context, mask, mode=mode)).logits
            assert torch.equal(logits[1], alone[1])
            assert apart(logits[0], alone[0]) > 0.01
    loss = model.train()(
        input_ids=ids, context_input_ids=context, context_attention_mask=nothing, labels=ids
    ).loss  # with gradients of zero, so that a step of training goes on
    loss.backward()
    assert apart(loss, model(input_ids=ids, labels=ids).loss) == 0
    assert all(float(p.grad.abs().max()) == 0 for _, p in added_parameters(model) if p.grad is not None)


def test_masked_tokens_are_dropped_and_chunks_have_no_order() -> None:
    model, ids, context, mask = build("llama"), some_ids(2, 12), some_ids(2, 3, 8, seed=1), some_mask()
    with torch.no_grad():
        read = model.encode_context(context, mask)
        assert read.num_tokens == int(mask.flatten(1).sum(1).max())
        given = model(input_ids=ids, context=read).logits
        noise = torch.where(mask.bool(), context, some_ids(2, 3, 8, seed=5))
        assert torch.equal(model(input_ids=ids, context_input_ids=noise, context_attention_mask=mask).logits, given)
        close(
            model(input_ids=ids, context_input_ids=context.flip(1), context_attention_mask=mask.flip(1)).logits, given
        )


def test_encoding_in_small_batches_is_encoding_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, context = build("llama"), some_ids(2, 3, 8, seed=1)
    with torch.no_grad():
        expected = model.encode_context(context, some_mask())
        monkeypatch.setattr("farspan.cepe.encoder.TOKENS_AT_ONCE", 8)
        sizes = []
        hook = model.encoder.register_forward_hook(lambda _, args, out: sizes.append(len(out[0])))
        given = model.encode_context(context, some_mask())
        hook.remove()
    assert sizes == [1] * 5  # the chunk that is masked is not encoded
    close(given.states[0][given.mask], expected.states[0][expected.mask])


def test_one_context_serves_many_prompts() -> None:
    model, ids, context = build("qwen2"), some_ids(6, 12), some_ids(2, 3, 8, seed=1)
    with torch.no_grad():
        for mode in cepe.MODES:
            read = model.encode_context(context, some_mask(), mode=mode)
            together = model(input_ids=ids, context=read).logits
            repeated = model.encode_context(context.repeat_interleave(3, 0), some_mask().repeat_interleave(3, 0))
            close(together, model(input_ids=ids, context=repeated).logits)


def test_auto_keeps_keys_and_values_only_within_its_budget() -> None:
    model, ids, context = build("llama"), some_ids(2, 100), some_ids(2, 3, 8, seed=1)
    with torch.no_grad():
        poor = model.encode_context(context, budget=100)
        rich = model.encode_context(context)
        bare = poor.num_bytes
        model(input_ids=ids, context=poor)
        model(input_ids=ids, context=rich)
    assert poor.num_bytes == bare == context.numel() * 16 * 4
    assert rich.num_bytes == bare + context.numel() * 2 * 2 * 16 * 4  # layers, keys and values, 2 heads of 8


def test_sampling_depends_on_the_seed_alone() -> None:
    model, ids, context = build("llama"), some_ids(2, 5), some_ids(2, 3, 8, seed=1)

    def sampled(mode: Any) -> Tensor:
        torch.manual_seed(3)
        return model.generate(
            ids,
            context=model.encode_context(context, mode=mode),
            max_new_tokens=8,
            do_sample=True,
            num_return_sequences=2,
        )

    assert all(torch.equal(sampled(mode), sampled("recompute")) for mode in cepe.MODES)


def test_left_padding_changes_nothing() -> None:
    model, ids, context = build("llama"), some_ids(2, 9), some_ids(2, 3, 8, seed=1)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    how = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    together = model.generate(ids, attention_mask=mask, context_input_ids=context, **how)
    alone = model.generate(ids[:1, 4:], attention_mask=mask[:1, 4:], context_input_ids=context[:1], **how)
    assert torch.equal(together[0, 9:], alone[0, 5:])


def test_states_of_their_own_for_each_layer_are_counted_from_the_last() -> None:
    model = cepe.from_base(tiny_model("llama"), tiny_encoder(), num_cross_attn_hidden_states=2)
    context = some_ids(2, 3, 8)
    with torch.no_grad():
        read = model.encode_context(context)
        flat = model.encoder(context.view(6, 8), output_hidden_states=True)
    assert len(read.states) == 2
    close(read.of_layer(1), flat.last_hidden_state.view(2, 24, 16))
    close(read.of_layer(2), flat.hidden_states[1].view(2, 24, 16))


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2"])
def test_an_encoder_of_the_first_layers_of_a_decoder(architecture: str, tmp_path: Path) -> None:
    decoder = tiny_model(architecture)
    decoder.save_pretrained(tmp_path / "encoder")
    model = cepe.from_base(tiny_model(), tmp_path / "encoder", encoder_layers=1).eval()
    ids = some_ids(2, 1, 9)
    with torch.no_grad():
        whole = cepe.from_base(tiny_model(), tmp_path / "encoder").encoder.eval()
        between = whole(input_ids=ids[:, 0], output_hidden_states=True).hidden_states[1]
        norm = whole.ln_f if architecture == "gpt2" else whole.norm
        close(model.encode_context(ids).states[0], norm(between))
        model.save_pretrained(tmp_path / "whole")
        again = cepe.from_pretrained(tmp_path / "whole")
        close(again.encode_context(ids).states[0], norm(between))
    with pytest.raises(ValueError, match="3 layers of an encoder with 2: give 1 to 2"):
        cepe.from_base(tiny_model(), tiny_encoder(), encoder_layers=3)


def test_what_a_context_keeps_without_gradients_is_not_used_with_them() -> None:
    model, kept = tiny_cepe("qwen3"), []
    for warm in (False, True):
        context = model.encode_context(some_ids(1, 2, 8), mode="absorb")
        if warm:
            with torch.no_grad():
                model(input_ids=some_ids(1, 6), context=context)
        model.zero_grad()
        model(input_ids=some_ids(1, 6), context=context).logits.square().mean().backward()
        kept.append([cross.k_proj.weight.grad.clone() for cross in model.cross_attentions()])
    for fresh, used in zip(*kept, strict=True):
        close(used, fresh)


def test_only_the_last_layers_read_the_context() -> None:
    model = cepe.from_base(tiny_model("llama"), tiny_encoder(), num_cross_attn_layers=1)
    assert [hasattr(layer, "cross_attn") for layer in surgery.layers_of(model)] == [False, True]


def test_wider_encoders_give_zero_columns() -> None:
    base = tiny_model("llama")
    model = cepe.from_base(base, tiny_encoder(hidden_size=48))
    weight = model.model.layers[0].cross_attn.k_proj.weight
    assert torch.equal(weight[:, :32], model.model.layers[0].self_attn.k_proj.weight)
    assert not weight[:, 32:].any()


def test_dropout_of_the_base_stays_off_in_training() -> None:
    for family in ("opt", "gpt2", "falcon"):
        changes = {"opt": {"dropout": 0.5}, "gpt2": {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}}
        changes["falcon"] = {"hidden_dropout": 0.5, "attention_dropout": 0.5}
        model, ids, context = tiny_cepe(family, **changes[family]), some_ids(2, 12), some_ids(2, 3, 8, seed=1)
        quiet = model(input_ids=ids, context_input_ids=context).logits
        torch.testing.assert_close(model.train()(input_ids=ids, context_input_ids=context).logits, quiet)
        assert model.training
        assert surgery.layers_of(model)[0].training


def test_a_base_in_bfloat16_takes_additions_in_float32() -> None:
    base = tiny_model("llama").bfloat16()
    ids, context = some_ids(2, 12), some_ids(2, 3, 8, seed=1)
    with torch.no_grad():
        expected = base(input_ids=ids).logits
    model = cepe.from_base(base, tiny_encoder(), dtype=torch.float32)
    assert {p.dtype for _, p in added_parameters(model)} == {torch.float32}
    out = model.train()(input_ids=ids, context_input_ids=context, labels=ids)
    assert torch.equal(out.logits, expected)
    out.loss.backward()
    assert model.model.layers[0].cross_attn.o_proj.weight.grad.abs().max() > 0


def test_a_copy_reads_with_its_own_weights() -> None:
    model, ids, context = build("llama"), some_ids(2, 12), some_ids(2, 3, 8, seed=1)
    other = deepcopy(model)
    with torch.no_grad():
        before = model(input_ids=ids, context_input_ids=context).logits
        for cross in other.cross_attentions():
            cross.o_proj.weight.zero_()
        assert torch.equal(model(input_ids=ids, context_input_ids=context).logits, before)
        assert torch.equal(other(input_ids=ids, context_input_ids=context).logits, model(input_ids=ids).logits)


@pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning")  # of torch, on Python 3.13.0
def test_a_compiled_model_gives_the_same() -> None:
    model, ids, context = build("llama"), some_ids(2, 12), some_ids(2, 3, 8, seed=1)
    with torch.no_grad():
        read = model.encode_context(context, mode="recompute")
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        close(compiled(input_ids=ids, context=read).logits, model(input_ids=ids, context=read).logits)
        close(compiled(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_forward_that_fails_leaves_no_context_behind() -> None:
    model, ids, context = build("llama"), some_ids(2, 12), some_ids(2, 3, 8, seed=1)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        handle = model.lm_head.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(input_ids=ids, context_input_ids=context)
        handle.remove()
        assert torch.equal(model(input_ids=ids).logits, expected)


@pytest.mark.parametrize(
    "more",
    [
        {"context_offset": 8},
        {"context_attention_mask": torch.ones(1, 2, 8)},
        {"context_padding_mask": torch.ones(1, 2, 8)},
    ],
)
def test_a_mask_and_an_offset_without_ids_of_a_context_are_refused(more: dict[str, Any]) -> None:
    model, ids = tiny_cepe(), some_ids(1, 5)
    for given in ({}, {"context": model.encode_context(some_ids(1, 2, 8))}):
        with pytest.raises(ValueError, match="are for context_input_ids"):
            model(input_ids=ids, **given, **more)


@pytest.mark.parametrize("multi_query", [True, False])
def test_copied_queries_keys_and_values_are_those_of_the_attention(
    multi_query: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONFIGS, "gpt_bigcode", ("GPTBigCode", GPT | {"multi_query": multi_query}))
    given, ids = {}, torch.tensor([[5]])

    def attend(module: Any, *parts: Tensor, **options: Any) -> Any:
        given[module.layer_idx] = [part[0, :, 0] for part in parts[:3]]  # [heads, dim] of the one token
        return torch.zeros_like(parts[0]).transpose(1, 2), None

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "kept", attend)
    tiny_model("gpt_bigcode", attn_implementation="kept")(input_ids=ids)
    model, stream = cepe.from_base(tiny_model("gpt_bigcode"), tiny_encoder(hidden_size=32)), {}
    first = model.transformer.h[0]
    first.ln_1.register_forward_hook(lambda module, args, output: stream.update(normed=output))
    model(input_ids=ids)
    cross = first.cross_attn
    for projection, expected in zip((cross.q_proj, cross.k_proj, cross.v_proj), given[0], strict=True):
        close(projection(stream["normed"]).view(-1, 8), expected)


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("moshi", "its q_proj is a MoshiLinear, expected a linear layer"),
        ("gemma3n", "residual stream has shape .4, "),
        ("codegen", "the layout of its queries, keys and values in one matrix is unknown for models of type codegen"),
        ("mimo", "its values have 16 dimensions per head, its keys 8, expected as many"),
    ],
)
def test_a_decoder_whose_layers_cannot_be_extended_is_refused_in_words(family: str, said: str) -> None:
    common = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    common |= {"num_key_value_heads": 2}
    kinds = ["sliding_attention", "full_attention"]
    gemma = {"intermediate_size": [64, 64], "layer_types": kinds, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
    gemma |= {"vocab_size_per_layer_input": 300, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0]}
    config = {
        "moshi": lambda: transformers.MoshiConfig(**common, ffn_dim=64),
        "gemma3n": lambda: transformers.Gemma3nTextConfig(**common, **gemma, sliding_window=40),
        "codegen": lambda: tiny_config("codegen"),
        "mimo": lambda: transformers.MiMoV2FlashConfig(**common, v_head_dim=16, n_routed_experts=4, layer_types=kinds),
    }[family]()
    with pytest.raises(ValueError, match=f"cannot be extended: .*{said}"):
        cepe.from_base(transformers.AutoModelForCausalLM.from_config(config), tiny_encoder())
