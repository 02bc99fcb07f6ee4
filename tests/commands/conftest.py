"""The files and the server that pages name: models, texts and data sets for their commands, all small."""

import argparse
import csv
import inspect
import json
import shutil
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_servers import MODEL as SERVED
from fake_servers import Fake, serving
from test_gguf import write_gguf
from test_longbench2 import question
from test_qa import PEOPLE
from transformers import BertConfig, BertModel

import farspan
from farspan.loading.places import place_of

from pages import ROOT
from tiny import tiny_model, tiny_tokenizer, write_lines

DEMO = Path(place_of("demo"))
MODELS = ("MODEL", "MODEL_A", "MODEL_B", "BIG_MODEL", "SMOLLM2", "TRAINED", "ID", "FOLDER", SERVED)
INTENTS = {"card_arrival": "When will my card be here?", "lost_card": "I cannot find my card.", "limit": "How much?"}


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A folder with all files that pages name and that none of their commands writes. Placeholders are names too."""
    folder = tmp_path_factory.mktemp("files")
    for name in MODELS:
        configured(folder / name)
    configured(folder / "models" / "llama-xl-83m", max_position_embeddings=2048)
    seventy = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
               "num_key_value_heads": 8, "max_position_embeddings": 32768, "vocab_size": 128256,
               "tie_word_embeddings": False, "dtype": "bfloat16"}  # fmt: skip
    configured(folder / "llama-70b", **seventy)
    write_gguf(folder / "model.gguf", tiny_model(), tokenizer)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    encoder = folder / "facebook" / "contriever"
    BertModel(BertConfig(vocab_size=len(tokenizer), **small)).save_pretrained(encoder)
    padded = tiny_tokenizer()
    padded.pad_token = padded.eos_token
    padded.save_pretrained(encoder)
    for texts in ("books", "FOLDER"):
        (folder / texts).mkdir(exist_ok=True)
        for module in (argparse, inspect, typing):
            shutil.copyfile(str(module.__file__), folder / texts / f"{module.__name__}.txt")
    shutil.copyfile(argparse.__file__, folder / "A")
    shutil.copyfile(inspect.__file__, folder / "B")
    (folder / "book.txt").write_text("Ada was there, and so was Grace. " * 10)
    for split in ("train", "test"):
        with (folder / "FOLDER" / f"{split}.csv").open("w") as file:
            rows = csv.writer(file)
            rows.writerow(["text", "category", "utterance", "intent"])
            rows.writerows(
                [f"{n}: {text}", name, f"{n}: {text}", name] for n in range(20) for name, text in INTENTS.items()
            )
    passages = [{"title": f"{name} {n}", "text": f"{name} has {n} dogs."} for name in PEOPLE for n in range(2)]
    write_lines(
        folder / "nq.jsonl", [{"question": f"who is {name}", "answers": [name], "ctxs": passages} for name in PEOPLE]
    )
    (folder / "data.json").write_text(json.dumps([question(i) for i in range(12)]))
    shutil.copyfile(ROOT / "tests" / "data" / "llama3_8b_forgetting_curve.json", folder / "results.json")
    (folder / "configs").symlink_to(ROOT / "configs")
    farspan.curve("demo", text=str(folder / "books"), lengths=(64, 128, 256, 511), repeats=12, out=folder / "RUN")
    for name in ("BASELINE_RUN", "base", "baselines/memory"):
        shutil.copytree(folder / "RUN", folder / name)
    return folder


def configured(folder: Path, **changes: Any) -> None:
    """Copy the embedded model, with another config."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.md", "*.jsonl", "training.json"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of a server with the embedded model, which takes longer texts than the model was trained on."""
    lm = farspan.load("demo")
    with serving(Fake("vLLM", lm, limit=2048)) as url:
        yield url
