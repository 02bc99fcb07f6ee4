"""Tiny models of random weights, one for each way of reading that transformers has, what they score, a tokenizer."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from farspan.lm import LM, wrap
from farspan.measuring.loop import measure_cell
from farspan.methods import Method, method
from farspan.record import Row, Run

VOCABULARY = 300
CODE = argparse.__file__  # a text such as the embedded model has learned, which takes no time to read


def tiny_model(architecture: str = "llama", **changes: object) -> torch.nn.Module:
    """A two-layer model of random weights, large enough that its choices differ from token to token."""
    torch.manual_seed(0)
    config = tiny_config(architecture, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
        for name, parameter in model.named_parameters():
            if name.endswith("k_norm.weight"):  # with equal weights all keys have one norm
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def hit_prone(model: Any) -> Any:
    """The head prefers the few tokens of texts such as `toys.few_tokens`."""
    with torch.no_grad():
        model.get_output_embeddings().weight[12:] *= 0.05
    return model


def open_lm(architecture: str, tokenizer: Any, **changes: object) -> LM:
    return wrap(tiny_model(architecture, **changes), tokenizer, f"tiny-{architecture}")


def saved(folder: Path, tokenizer: Any) -> Path:
    """A tiny Llama with its tokenizer in a folder, as `save_pretrained` leaves them."""
    tiny_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


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


def same(given: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-5)


def close(given: Tensor, expected: Tensor) -> None:
    """As `same`, but larger numbers may differ by more."""
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)


def tiny_config(architecture: str, **changes: object) -> transformers.PreTrainedConfig:
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    mamba = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16, "mamba_n_groups": 1}
    linear = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}
    match architecture:
        case "llama":
            config = transformers.LlamaConfig, common
        case "mistral":
            config = transformers.MistralConfig, common | {"sliding_window": 40}
        case "qwen3":
            config = transformers.Qwen3Config, common | {"head_dim": 8}
        case "qwen2":
            config = transformers.Qwen2Config, common
        case "phi" | "granite":
            kinds = {"phi": transformers.PhiConfig, "granite": transformers.GraniteConfig}
            config = kinds[architecture], common
        case "phi3":  # partial rotary
            partial = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
            config = transformers.Phi3Config, common | {"rope_parameters": partial, "sliding_window": None}
        case "gemma":
            config = transformers.GemmaConfig, common | {"head_dim": 8}
        case "modernbert":  # its output matrix is called decoder
            config = transformers.ModernBertDecoderConfig, common | {"local_attention": 40}
            config = config[0], {k: v for k, v in config[1].items() if k != "num_key_value_heads"}
        case "nanochat":  # norms without weights
            config = transformers.NanoChatConfig, common
        case "olmo2":
            config = transformers.Olmo2Config, common
        case "stablelm":  # partial rotary
            config = transformers.StableLmConfig, common
        case "smollm3":  # layers without RoPE
            config = transformers.SmolLM3Config, common | {"no_rope_layers": [1, 0]}
        case "glm":  # interleaved
            config = transformers.GlmConfig, common | {"head_dim": 8}
        case "cohere":  # interleaved
            config = transformers.CohereConfig, common
        case "gpt_oss":  # attention with weight of its own for nothing
            config = transformers.GptOssConfig, common | {"head_dim": 8, "num_local_experts": 2, "sliding_window": 40}
            config = config[0], config[1] | {"num_experts_per_tok": 1}
        case "gemma3":  # several RoPEs
            config = transformers.Gemma3TextConfig, common | {"head_dim": 8, "sliding_window": 40}
            config = config[0], config[1] | {"layer_types": ["sliding_attention", "full_attention"]}
        case "llama4":  # chunked attention
            config = transformers.Llama4TextConfig, common | {"head_dim": 8, "intermediate_size_mlp": 64}
            config = config[0], config[1] | {"num_local_experts": 2, "attention_chunk_size": 40}
        case "bloom":  # ALiBi
            config = transformers.BloomConfig, {"hidden_size": 32, "n_layer": 2, "n_head": 4}
            config = config[0], config[1] | {"vocab_size": VOCABULARY}
        case "gptj":
            config = transformers.GPTJConfig, {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}
            config = config[0], config[1] | {"vocab_size": VOCABULARY, "n_positions": 512}
        case "codegen":
            config = transformers.CodeGenConfig, {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}
            config = config[0], config[1] | {"vocab_size": VOCABULARY, "n_positions": 512}
        case "openai-gpt":
            config = transformers.OpenAIGPTConfig, {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
            config = config[0], config[1] | {"vocab_size": VOCABULARY}
        case "ctrl":
            config = transformers.CTRLConfig, {"n_embd": 32, "dff": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
            config = config[0], config[1] | {"vocab_size": VOCABULARY}
        case "mpt":  # ALiBi of limited length
            config = transformers.MptConfig, {"d_model": 32, "n_layers": 2, "n_heads": 4}
            config = config[0], config[1] | {"vocab_size": VOCABULARY, "max_seq_len": 512}
        case "falcon":
            config = transformers.FalconConfig, {k: v for k, v in common.items() if k != "num_key_value_heads"}
            config = config[0], config[1] | {"alibi": False, "multi_query": True}
        case "gpt_neox":  # partial rotary
            partial = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
            config = transformers.GPTNeoXConfig, common | {"rope_parameters": partial}
            config = config[0], {k: v for k, v in config[1].items() if k != "num_key_value_heads"}
        case "gpt2":
            config = transformers.GPT2Config, {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
            config = config[0], config[1] | {"vocab_size": VOCABULARY}
        case "opt":
            config = transformers.OPTConfig, {"ffn_dim": 64, "word_embed_proj_dim": 32, **common}
            config = (
                config[0],
                {k: v for k, v in config[1].items() if k not in ("intermediate_size", "num_key_value_heads")},
            )
        case "gemma2":
            config = (
                transformers.Gemma2Config,
                common | {"head_dim": 8, "sliding_window": 40, "query_pre_attn_scalar": 8},
            )
        case "mamba2":
            config = (
                transformers.Mamba2Config,
                linear | {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 1, "chunk_size": 16},
            )
        case "mamba":
            config = transformers.MambaConfig, linear | {"state_size": 8}
        case "falcon_mamba":
            config = transformers.FalconMambaConfig, linear | {"state_size": 8}
        case "recurrent_gemma":
            config = (
                transformers.RecurrentGemmaConfig,
                common
                | {"num_hidden_layers": 3, "num_key_value_heads": 1, "lru_width": 32, "attention_window_size": 40},
            )
            config = config[0], {k: v for k, v in config[1].items() if k != "max_position_embeddings"}
        case "jamba":
            config = (
                transformers.JambaConfig,
                common
                | {
                    "use_mamba_kernels": False,
                    "mamba_d_state": 8,
                    "num_experts": 2,
                    "attn_layer_period": 2,
                    "attn_layer_offset": 1,
                },
            )
        case "rwkv":
            config = transformers.RwkvConfig, linear | {"context_length": 512}
        case "falcon_h1":
            config = transformers.FalconH1Config, common | mamba | {"mamba_d_ssm": 64}
        case "granite_hybrid":
            config = (
                transformers.GraniteMoeHybridConfig,
                common
                | mamba
                | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32, "num_local_experts": 0},
            )
        case _:
            raise AssertionError(architecture)
    return config[0](**(config[1] | ids | changes))


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


def configure(folder: Path, **changes: object) -> None:
    """Changes fields of a model folder's config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
