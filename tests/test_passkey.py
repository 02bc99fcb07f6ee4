"""Passkey retrieval: where the number is hidden, and scores against one plain forward over everything."""

import re
from pathlib import Path

import numpy as np
import pytest
from test_cli import farspan, last_line, refused
from transformers import PreTrainedTokenizerFast

from farspan.lm import LM, wrap
from farspan.tasks import task
from farspan.tasks.passkey import BoundPasskey, Passkey

from naive import nats_after
from tiny import PlannedAndFed, blank_first_tokenizer, measured, tiny_model

LENGTHS = (300, 420)


def test_the_prompt_has_its_length_and_hides_the_number_at_its_depth(lm: LM) -> None:
    for example in BoundPasskey(depths=3).examples(lm, LENGTHS, 3, 0):
        prompt = example.payload
        assert example.depths == (0.0, 0.5, 1.0)
        for length in LENGTHS:
            begins = []
            for depth in example.depths:
                context = prompt.context(length, depth).tolist()
                assert len(context) + len(prompt.question) == length
                key = prompt.key.tolist()
                places = [i for i in range(len(context)) if context[i : i + len(key)] == key]
                assert len(places) == 1
                begins += places
            filler = length - prompt.fixed
            assert begins[0] == len(prompt.description)
            assert abs(begins[1] - begins[0] - filler / 2) <= len(prompt.filler)
            assert begins[0] + filler - begins[2] < len(prompt.filler)
            number = lm.tokenizer.decode(prompt.answer.tolist())
            assert lm.tokenizer.decode(prompt.key.tolist()).count(number.strip()) == 2


def test_the_question_begins_a_line_at_every_length(lm: LM) -> None:
    prompt = BoundPasskey().examples(lm, LENGTHS, 1, 0)[0].payload
    for length in range(prompt.fixed, prompt.fixed + len(prompt.filler) + 1):
        context = prompt.context(length, 1.0)
        assert len(context) + len(prompt.question) == length
        assert lm.tokenizer.decode(context.tolist()).endswith("\n")


@pytest.mark.parametrize("name", ["passkey", "needle:depths=0.5", "own"])
def test_prompts_have_no_blank_at_the_beginning_of_a_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("they were near that river every other evening. " * 200)
    lm = wrap(tiny_model(), blank_first_tokenizer(map(chr, (10, *range(33, 127)))), "tiny")
    bound = task(name).on(lm, str(tmp_path / "text.txt"))
    parts, _ = bound.parts(lm, bound.examples(lm, (3000,), 1, 0)[0], 3000) or ([], 0)
    text = lm.tokenizer.decode(np.concatenate([ids for _, ids in parts]))
    assert len(re.findall(r"\n[A-Z]", text)) >= 2
    assert not re.search(r" \n|\n [A-Z]", text)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mamba"])
def test_scores_equal_one_forward_over_everything(
    architecture: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    lm, task = wrap(tiny_model(architecture), tokenizer, "tiny"), BoundPasskey(depths=2)
    examples = {example.id: example.payload for example in task.examples(lm, LENGTHS, 2, 0)}
    rows = measured(tmp_path / "run", lm, task, lengths=LENGTHS, repeats=2, chunk=97)
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        prompt = examples[row.example]
        before = [*lm.separator.ids, *prompt.context(row.length, row.depth), *prompt.question]
        nats, hits = nats_after(lm.model, before, prompt.answer)
        assert row.scores["nats"] == pytest.approx(float(nats.sum()), rel=1e-4)
        assert (row.scores["digits"], row.scores["right"]) == (float(hits.float().mean()), float(hits.all()))


def test_a_plan_counts_the_tokens_that_are_fed(lm: LM, planned_and_fed: PlannedAndFed) -> None:
    planned, fed = planned_and_fed(BoundPasskey(depths=2), lm, lengths=LENGTHS, repeats=1)
    assert planned == fed


def test_lengths_without_room_are_refused(lm: LM) -> None:
    with pytest.raises(ValueError, match="a length of 20 tokens is too short"):
        BoundPasskey().examples(lm, (20, 300), 1, 0)


@pytest.mark.parametrize("wrong", [{"depths": 0}, {"digits": 0}, {"digits": 16}])
def test_settings_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: got"):
        Passkey(**wrong)


def test_the_command_measures_and_compares(lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for saved in (lm.model, lm.tokenizer):
        saved.save_pretrained("tiny")
    common = ("passkey:depths=2", "tiny", "--lengths", "300", "--repeats", 2, "--device", "cpu")
    summary = last_line(farspan("task", *common, "--json"))
    assert summary["task"] == "passkey:depths=2,digits=5"
    assert [(one["length"], one["num_examples"]) for one in summary["results"]] == [
        (300, 2)
    ]  # both depths have one number
    compared = last_line(farspan("compare", "tiny", "--task", *common[:1], *common[2:], "--no-cost", "--json"))
    assert [(cell["task"], cell["n"]) for cell in compared["cells"]] == [("passkey:depths=2,digits=5", 2)]
    assert "did you mean 'depths'" in refused(farspan("task", "passkey:depth=3", "tiny"))
