"""What is attacked: tiny models, texts, data, runs and trainings in one folder, made once in a forked child.

models/llama, models/gpt2 (64 positions), models/encoder, models/cepe, models/bert (no causal model)
text.txt, docs/*.txt, text.jsonl, text.parquet, nq.jsonl, icl/, index/, authors.json
smt.toml, lm.toml, mlm.toml, cepe.toml, distill.toml
"""

import json
import random
from pathlib import Path
from typing import Any

WORDS = "the quick brown fox jumps over lazy dog river stone cloud winter summer garden window letter paper music"
TRAINER = """[trainer]
steps = 4
batch = 2
micro_batch = 2
bf16 = false
dtype = "float32"
log_every = 1
save_every = 2
"""
WATCH = '[watch]\nevery = 0\ntext = "text.txt"\n'
CONFIGS = {
    "smt": """out = "out"
[model]
name = "models/llama"
window = 32
[data]
text = "docs"
[lengths]
target = 64
[optimizer]
lr = 1e-2
warmup_steps = 1
"""
    + TRAINER
    + WATCH,
    "lm": """out = "out"
[data]
text = "docs"
[tokenizer]
vocabulary = 300
[model]
hidden = 16
feed_forward = 16
layers = 1
heads = 2
key_value_heads = 2
[optimizer]
warmup_steps = 1
"""
    + TRAINER
    + "window = 16\n",
    "mlm": """out = "out"
decoder = "models/llama"
[data]
text = "docs"
[encoder]
hidden = 16
feed_forward = 16
layers = 1
heads = 2
[optimizer]
warmup_steps = 1
decay_fraction = 0.5
"""
    + TRAINER
    + "window = 16\n",
    "cepe": """out = "out"
[model]
name = "models/llama"
encoder = "models/encoder"
dtype = "float32"
[data]
text = "docs"
decoder = 24
chunks = 3
chunk = 8
[optimizer]
warmup_steps = 1
decay_fraction = 0.5
"""
    + TRAINER
    + WATCH,
}
CONFIGS["distill"] = CONFIGS["cepe"] + "\n[distill]\n"


def sentence(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS.split()) for _ in range(9)).capitalize() + f" {rng.randrange(1000)}."


def prose(seed: int, sentences: int) -> str:
    rng = random.Random(seed)
    return " ".join(sentence(rng) for _ in range(sentences))


def build(place: str) -> None:
    """Makes the stage in the folder `place`."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import transformers

    from cepe_models import tiny_cepe, tiny_encoder
    from tiny import saved, tiny_model, tiny_tokenizer, write_lines

    folder = Path(place)
    tokenizer = tiny_tokenizer()
    models: dict[str, Any] = {
        "llama": tiny_model(),
        "half": tiny_model().bfloat16(),
        "gpt2": tiny_model("gpt2", n_positions=64),
        "encoder": tiny_encoder(),
        "cepe": tiny_cepe(),
        "bert": transformers.BertForMaskedLM(
            transformers.BertConfig(
                vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
            )
        ),
        "t5": transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=300, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ),
    }
    for name, model in models.items():
        saved(folder / "models" / name, tokenizer, model)

    (folder / "text.txt").write_text(prose(0, 60))
    (folder / "docs").mkdir()
    for i in range(4):
        (folder / "docs" / f"{i}.txt").write_text(prose(i + 1, 60))
    texts = [prose(i + 10, 20) for i in range(4)]
    write_lines(folder / "text.jsonl", [{"text": text} for text in texts])
    pq.write_table(pa.table({"text": texts}), folder / "text.parquet")
    names = [f"{first} {last}" for first in ("Ann", "Bob", "Cid") for last in ("Fox", "Stone", "River", "Winter")]
    questions = [
        {
            "question": f"who is {name}",
            "answers": [name],
            "ctxs": [{"title": name, "text": prose(i * 7 + k, 2), "score": 3.0 - k} for k in range(4)],
        }
        for i, name in enumerate(names)
    ]
    write_lines(folder / "nq.jsonl", questions)
    for split, count in (("train", 40), ("test", 12)):
        lines = [{"text": prose(i + (500 if split == "test" else 0), 1), "label": i % 2} for i in range(count)]
        write_lines(folder / "icl" / f"{split}.jsonl", lines)
    rng = np.random.default_rng(0)
    accuracies = {"copy_accs": (0.7, 0.9), "lm_accs": (0.3, 0.4)}
    points = [
        {"length": length} | {name: rng.uniform(*ends, 10).tolist() for name, ends in accuracies.items()}
        for length in (64, 128, 256)
    ]
    (folder / "authors.json").write_text(json.dumps(points))
    for name, text in CONFIGS.items():
        (folder / f"{name}.toml").write_text(text)
