"""The calculated cost of CEPE is that of the models themselves, and of the published ones."""

import torch
import transformers

from farspan.cepe.cost import Sizes, memory, parameters, prefill_flops

from cepe_models import some_ids, tiny_cepe

LARGE, SMALL = Sizes(4096, 4096, 4096, 11008, 32, 32000), Sizes(1024, 1024, 1024, 4096, 24, 32001)


def test_parameters_are_those_of_the_published_model() -> None:
    assert parameters(LARGE) == 6_738_415_616
    assert parameters(LARGE, SMALL) == 8_516_196_352  # 34.06 GB in float32, as its files


def test_parameters_are_those_of_a_model() -> None:
    model = tiny_cepe(tie_word_embeddings=False)
    sizes = Sizes.of(model.config), Sizes.of(model.encoder.config)
    assert parameters(*sizes) == sum(p.numel() for p in model.parameters())


def test_memory_in_parts_is_what_a_reading_holds() -> None:
    model = tiny_cepe()
    with torch.no_grad():
        context = model.encode_context(some_ids(2, 5, 8), mode="absorb")
        past = model(input_ids=some_ids(2, 12), context=context).past_key_values
    parts = memory(
        Sizes.of(model.config), Sizes.of(model.encoder.config), weights=7, context=40, tokens=12, rows=2, itemsize=4
    )
    assert parts["context_states"] == context.num_bytes
    assert parts["keys_and_values"] == sum(layer.keys.nbytes + layer.values.nbytes for layer in past.layers)
    assert sum(parts.values()) == 7 + parts["context_states"] + parts["keys_and_values"] + parts["activations"]


def test_memory_at_7b_is_below_what_the_paper_measured_and_states_are_a_256th_of_keys_and_values() -> None:
    weights = 2 * parameters(LARGE, SMALL)
    for total, tokens, measured in ((4096, 2048, 19.8), (8192, 4096, 22.6), (32768, 4096, 25.6), (131072, 4096, 38.6)):
        parts = memory(LARGE, SMALL, weights=weights, context=total - tokens, tokens=tokens)
        assert 17e9 < sum(parts.values()) < measured * 1e9
        further = memory(LARGE, SMALL, weights=weights, context=total - tokens + 1, tokens=tokens)
        alone = [memory(LARGE, None, weights=0, context=0, tokens=n) for n in (total, total + 1)]
        assert (alone[1]["keys_and_values"] - alone[0]["keys_and_values"]) == 256 * (
            further["context_states"] - parts["context_states"]
        )


def test_operations_are_those_that_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.set_attn_implementation("eager")  # of which every multiplication is counted, above the diagonal as well
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.ones(1, 128, dtype=torch.long), logits_to_keep=1)
    above = 2 * 4 * 64 * 128 * 127 / 2
    given = prefill_flops(Sizes.of(config), None, context=0, tokens=128)
    assert abs(given + above - counter.get_total_flops()) < 0.01 * given
