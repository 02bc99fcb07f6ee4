"""Tiny models of random weights, one for each way of reading that transformers has, what they score, a tokenizer."""

import argparse
import json
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

from farspan.lm import LM, wrap
from farspan.measuring.loop import measure_cell
from farspan.methods import Method, method
from farspan.record import Row, Run

VOCABULARY = 300
FACTORS = Path(__file__).parent / "data" / "rope_factors.json"  # of models whose RoPE has 4 pairs
CODE = argparse.__file__  # a text such as the embedded model has learned, which takes no time to read
PlannedAndFed = Callable[..., tuple[int, int]]  # of a task, a model and options of a measurement; see `shared`
# settings of every method that needs no model made for it; each but a neutral one changes the scores after a text of 50
# tokens
EXAMPLES = {
    "full": ("full",),
    "sinks": ("sinks:window=20,sinks=3", "sinks:window=20,sinks=3,stride=8"),
    "lambda_mask": ("lambda_mask:window=20,sinks=3",),
    "selfextend": ("selfextend:group=3,window=14",),
    "dca": ("dca:chunk=13,local=3",),
    "rope": (
        "rope:type=linear,factor=4",
        "rope:type=ntk,factor=4",
        "rope:type=yarn,factor=4,original=128",
        "rope:type=truncated,original=64",
        f"rope:type=factors,factor=4,file={FACTORS}",
        "rope:type=dynamic,original=40",
    ),
    "topk": ("topk:k=6",),
    "snapkv": ("snapkv:capacity=20,window=6,kernel=3", "snapkv:capacity=20,window=6,kernel=5,pool=mean"),
    "tova": ("tova:capacity=12", "tova:share=0.2"),
    "knorm": ("knorm:capacity=12", "knorm:share=0.2"),
    "temperature": ("temperature:original=10",),
    "replug": ("replug:piece=16",),
    "ape": ("ape:temperature=0.5,scale=0.8", "ape:piece=16"),
}
ONE_TOKEN = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
PLAIN = SMALL | {"intermediate_size": 64, "num_attention_heads": 4, "max_position_embeddings": 512}
COMMON = PLAIN | {"num_key_value_heads": 2}
PHIMOE = COMMON | {"num_local_experts": 2, "num_experts_per_tok": 1}  # whose RoPE ignores the frequencies it is given
DIFFLLAMA = "DiffLlama", COMMON | {"attention_dropout": 0.0}  # each layer attends twice, with the same queries
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16, "mamba_n_groups": 1}
HALF_ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}
LATENT = {"kv_lora_rank": 12, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 10}
MLA = PLAIN | LATENT | {"num_key_value_heads": 4, "head_dim": 4}  # multi-head latent attention
EXPERTS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# the name of a config's class in transformers, and its fields
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", COMMON),
    "mistral": ("Mistral", COMMON | {"sliding_window": 40}),
    "qwen3": ("Qwen3", COMMON | {"head_dim": 8}),
    "qwen2": ("Qwen2", COMMON),
    "phi": ("Phi", COMMON),
    "hunyuan": ("HunYuanDenseV1", COMMON | {"head_dim": 8}),  # queries and keys are normalised after RoPE
    "granite": ("Granite", COMMON),
    "phi3": ("Phi3", COMMON | HALF_ROTARY | {"sliding_window": None}),  # partial rotary
    "gemma": ("Gemma", COMMON | {"head_dim": 8}),
    "modernbert": ("ModernBertDecoder", PLAIN | {"local_attention": 40}),  # its output matrix is called decoder
    "nanochat": ("NanoChat", COMMON),  # norms without weights
    "olmo2": ("Olmo2", COMMON),
    "stablelm": ("StableLm", COMMON),  # partial rotary
    "smollm3": ("SmolLM3", COMMON | {"no_rope_layers": [1, 0]}),  # layers without RoPE
    "glm": ("Glm", COMMON | {"head_dim": 8}),  # interleaved
    "cohere": ("Cohere", COMMON),  # interleaved
    "gpt_oss": (  # attention with weight of its own for nothing
        "GptOss",
        COMMON | {"head_dim": 8, "num_local_experts": 2, "sliding_window": 40, "num_experts_per_tok": 1},
    ),
    "gemma3": (  # several RoPEs
        "Gemma3Text",
        COMMON | {"head_dim": 8, "sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gemma4": (  # heads of the global layers are larger
        "Gemma4Text",
        COMMON
        | {"head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
        | {"sliding_window": 40, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
        | {"num_hidden_layers": 3, "hidden_size_per_layer_input": 0},
    ),
    "deepseek_v3": ("DeepseekV3", MLA | EXPERTS),
    "llama4": (  # chunked attention
        "Llama4Text",
        COMMON | {"head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 40},
    ),
    "bloom": ("Bloom", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}),  # ALiBi
    "gptj": ("GPTJ", GPT | {"rotary_dim": 4}),
    "codegen": ("CodeGen", GPT | {"rotary_dim": 4}),
    "openai-gpt": ("OpenAIGPT", GPT),
    "ctrl": ("CTRL", GPT | {"dff": 64}),
    "mpt": (  # ALiBi of limited length
        "Mpt",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 512},
    ),
    "falcon": ("Falcon", PLAIN | {"alibi": False, "multi_query": True}),
    "gpt_neox": ("GPTNeoX", PLAIN | HALF_ROTARY),  # partial rotary
    "gpt2": ("GPT2", GPT),
    "opt": (
        "OPT",
        SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 32, "num_attention_heads": 4, "max_position_embeddings": 512},
    ),
    "gemma2": ("Gemma2", COMMON | {"head_dim": 8, "sliding_window": 40, "query_pre_attn_scalar": 8}),
    "mamba2": ("Mamba2", SMALL | {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 1, "chunk_size": 16}),
    "mamba": ("Mamba", SMALL | {"state_size": 8}),
    "falcon_mamba": ("FalconMamba", SMALL | {"state_size": 8}),
    "recurrent_gemma": (
        "RecurrentGemma",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
        | {"num_attention_heads": 4, "num_key_value_heads": 1, "lru_width": 32, "attention_window_size": 40},
    ),
    "jamba": (
        "Jamba",
        COMMON
        | {"use_mamba_kernels": False, "mamba_d_state": 8, "num_experts": 2}
        | {"attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    "rwkv": ("Rwkv", SMALL | {"context_length": 512}),
    "falcon_h1": ("FalconH1", COMMON | MAMBA | {"mamba_d_ssm": 64}),
    "granite_hybrid": (
        "GraniteMoeHybrid",
        COMMON
        | MAMBA
        | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32, "num_local_experts": 0},
    ),
}


def tiny_model(architecture: str = "llama", **changes: object) -> torch.nn.Module:
    """A two-layer model of random weights, large enough that its choices differ from token to token."""
    torch.manual_seed(0)
    config = tiny_config(architecture, **changes)
    # transformers 5.15 chooses sdpa for Gemma 2, which does not cap scores
    kernel = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
    model = transformers.AutoModelForCausalLM.from_config(config, **kernel).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
        for name, parameter in model.named_parameters():
            if name.endswith("k_norm.weight"):  # with equal weights all keys have one norm
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def examples() -> list[Method]:
    """The methods of EXAMPLES."""
    return [method(text) for texts in EXAMPLES.values() for text in texts]


def hit_prone(model: Any) -> Any:
    """The head prefers the few tokens of texts such as `toys.few_tokens`."""
    with torch.no_grad():
        model.get_output_embeddings().weight[12:] *= 0.05
    return model


def open_lm(architecture: str, tokenizer: Any, **changes: object) -> LM:
    return wrap(tiny_model(architecture, **changes), tokenizer, f"tiny-{architecture}")


def saved(folder: Path | str, tokenizer: Any, model: Any = None) -> Path:
    """A model, by default a tiny Llama, with its tokenizer in a folder, as `save_pretrained` leaves them."""
    (tiny_model() if model is None else model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def some_ids(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def nats_of(logits: Tensor, ids: Tensor) -> Tensor:
    """-log p of ids[1:] under logits [time, vocabulary]."""
    return -logits[:-1].float().log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def nats_by(text: str, lm: LM, ids: Tensor, chunk: int = 9) -> Tensor:
    """-log p of ids[:, 1:], read by a method."""
    with method(text).on(lm) as reader:
        reader.chunk = chunk
        return reader.read(ids[:, :1]).score(ids[:, 1:]).nats


def measured(folder: Path, lm: Any, what: Any, how: Method | str = "full", **options: Any) -> list[Row]:
    """All rows of one cell, whose run is this folder."""
    with Run.open(folder, {}) as run:
        return measure_cell(what, method(how) if isinstance(how, str) else how, lm, run, **options)


@contextmanager
def refused(message: str) -> Iterator[None]:
    """Expect a ValueError of one line that matches."""
    with pytest.raises(ValueError, match=message) as error:
        yield
    assert "\n" not in str(error.value)


@contextmanager
def interrupted(counted: list[int], at: int) -> Iterator[None]:
    """Press Ctrl-C at forward `at` of a training; afterwards forwards are counted from 0. `counted`: the fixture."""
    counted[:] = [0, at]
    with pytest.raises(KeyboardInterrupt):
        yield
    counted[:] = [0, -1]


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """A disk that is full once a file has `size` bytes: the write that reaches it is cut short, the next fails."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def same(given: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-5)


def close(given: Tensor, expected: Tensor) -> None:
    """As `same`, but larger numbers may differ by more."""
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)


def tiny_config(architecture: str, **changes: object) -> transformers.PreTrainedConfig:
    kind, fields = CONFIGS[architecture]
    return getattr(transformers, f"{kind}Config")(**(deepcopy(fields) | ONE_TOKEN | changes))


def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE of 300 entries, `<s>` = 0 as beginning and end of text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 20], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>")


def blank_first_tokenizer(words: Iterable[str]) -> transformers.PreTrainedTokenizerFast:
    """As of Llama 2 and Mistral: a blank before every text. At most 200 entries, of which none crosses a blank."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(special_tokens=["<unk>", "<s>"], vocab_size=200, show_progress=False)
    tokenizer.train_from_iterator([*words, "0123456789"], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def write_lines(path: Path, records: Iterable[object]) -> str:
    """Write a file of JSON lines, and its folder; return its name."""
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def weights(settings: Any, file: str = "model.safetensors") -> dict[str, Tensor]:
    """Return the weights that a training of these settings has saved."""
    return load_file(Path(settings.out) / file)


def assert_same_weights(one: Any, other: Any, file: str = "model.safetensors") -> None:
    """Check that two trainings have saved the same weights."""
    a, b = weights(one, file), weights(other, file)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def configure(folder: Path, **changes: object) -> None:
    """Changes fields of a model folder's config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
