"""The chat template and the stop tokens in the identity of a model."""

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

import farspan
from farspan.measuring.again import measure_again, read_baseline
from farspan.record import read_rows

from tiny import CODE, refused, saved


@pytest.mark.parametrize("begins", [None, "{{ messages[0]['content'] }} is asked:"])
def test_a_run_is_not_continued_with_another_chat_template(
    begins: str | None, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    def save(template: str | None) -> None:
        mine = deepcopy(tokenizer)
        mine.chat_template = template
        mine.save_pretrained(tmp_path / "model")

    saved(tmp_path / "model", tokenizer)
    save(begins)
    what: dict[str, Any] = {"text": CODE, "lengths": (640,), "repeats": 1}
    tasks = {name: f"needle:depths=0.5,ask={name}" for name in ("generated", "forced")}
    tasks["generated"] += ",new_tokens=12"
    before = {
        name: farspan.measure(str(tmp_path / "model"), tasks=task, **what, out=tmp_path / name).rows
        for name, task in tasks.items()
    }
    (tmp_path / "model" / "chat_template.jinja").unlink(missing_ok=True)
    save("Q: {{ messages[0]['content'] }} A:")
    with refused("the chat template of .*model has changed since this run started: .* choose another folder"):
        farspan.measure(str(tmp_path / "model"), tasks=tasks["generated"], **what, out=tmp_path / "generated")
    assert read_rows(tmp_path / "generated") == before["generated"]
    again = farspan.measure(str(tmp_path / "model"), tasks=tasks["forced"], **what, out=tmp_path / "forced")
    assert again.rows == before["forced"]  # its prompts do not use the template
    with refused("has another chat template than the baseline .*: the prompts of needle.* Give the model the template"):
        measure_again(read_baseline(tmp_path / "generated"), str(tmp_path / "model"), out=tmp_path / "checked")
    assert not (tmp_path / "checked").exists()
    measure_again(read_baseline(tmp_path / "forced"), str(tmp_path / "model"), out=tmp_path / "checked")
    header = json.loads((tmp_path / "generated" / "run.json").read_text())
    del header["models"][str(tmp_path / "model")]["chat"]  # as in runs of an older version
    (tmp_path / "generated" / "run.json").write_text(json.dumps(header))
    farspan.measure(str(tmp_path / "model"), tasks=tasks["generated"], **what, out=tmp_path / "generated")


def test_a_run_is_not_continued_with_other_stop_tokens(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", tokenizer)
    what: dict[str, Any] = {"text": CODE, "lengths": (640,), "repeats": 1}
    tasks = {name: f"needle:depths=0.5,ask={name}" for name in ("generated", "forced")}
    tasks["generated"] += ",new_tokens=12"
    for name, task in tasks.items():
        farspan.measure(str(folder), tasks=task, **what, out=tmp_path / name)
    (header,) = json.loads((tmp_path / "generated" / "run.json").read_text())["models"].values()
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [3, 4]}))
    ends = re.escape(str(header["stop_tokens"]))
    with refused(rf"the tokens that end an answer of .*model have changed .*: they were {ends}, now \[3, 4\]"):
        farspan.measure(str(folder), tasks=tasks["generated"], **what, out=tmp_path / "generated")
    farspan.measure(str(folder), tasks=tasks["forced"], **what, out=tmp_path / "forced")
