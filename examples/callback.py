"""Measure how far back a model remembers while it is trained: on short rows it forgets."""

from importlib.resources import files
from itertools import islice

from transformers import Trainer, TrainingArguments, default_data_collator

import farspan
from farspan.report.training import memory_length
from farspan.text.documents import read_texts

WINDOW = 32  # tokens of a row
lm = farspan.load(files("farspan") / "assets" / "demo", dtype="float32", device="cpu")
text = "\n".join(islice(read_texts("builtin:train"), 20))
ids = lm.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
rows = [{"input_ids": ids[i : i + WINDOW], "labels": ids[i : i + WINDOW]} for i in range(0, len(ids) - WINDOW, WINDOW)]

callback = farspan.CurveCallback(every=10, tokens=7_000, at_start=True)
trainer = Trainer(
    lm.model,
    TrainingArguments("runs/callback", max_steps=20, learning_rate=1e-3, use_cpu=True, save_strategy="no"),
    train_dataset=rows,
    data_collator=default_data_collator,
    processing_class=lm.tokenizer,
)
callback.attach(trainer)
trainer.train()

for entry in trainer.state.log_history:
    if "farspan/span" in entry:
        half_life, span = memory_length(entry, "half_life"), memory_length(entry, "span")
        print(f"step {entry['step']}: half-life {half_life}, span {span} tokens")
print(f"picture: {callback.folder / 'training.png'}")
