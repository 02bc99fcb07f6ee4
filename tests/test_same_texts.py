"""The texts of a run: the same for all its models, also where their longest lengths differ; windows over documents."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from farspan.lm import LM, position_limit_of, trained_length_of
from farspan.measuring.again import refuse_difference
from farspan.measuring.grid import measure, plans
from farspan.measuring.loader import Load
from farspan.measuring.loop import Watch
from farspan.measuring.one_model import crossings
from farspan.measuring.setups import Setup, grid, possible_lengths
from farspan.record import Row, read_examples
from farspan.report.notices import unfinished
from farspan.report.runs import read_run
from farspan.text.corpora import Corpus

from tiny import configure, open_lm, refused, tiny_model
from toys import attention_of, curve_of, perplexity_of, toy_lm

TASKS = (
    "perplexity",
    "perplexity:targets=last",
    "perplexity:targets=all",
    "longppl",
    "mentions:distance=64,target_tokens=64",
    "needle:depths=0.5",
    "own:tests=recall",
    "attention:bin=64",
    "curve",
    "curve:protocol=probe,warmup=8,scored=8",
)
TEXT = "builtin:held-out"


def model(tokenizer: PreTrainedTokenizerFast, name: str, trained: int, limit: int | None = None) -> LM:
    lm = open_lm("llama", tokenizer)
    about = lm.identity | {"name": name, "trained_length": trained}
    return replace(lm, name=name, trained_length=trained, position_limit=limit, identity=about)


def setups(models: list[LM], task: str, lengths: Any, text: str = TEXT, **options: Any) -> list[Setup]:
    what = grid(models, [task], text=text, lengths=lengths, repeats=2, **options)
    return [one for lm in models for one in what.setups(lm, Watch())]


def ids(lm: LM, one: Setup) -> dict[int, set[str]]:
    """The examples at each length."""
    found: dict[int, set[str]] = {}
    for example in one.examples(lm, 0):
        for length in example.lengths:
            found.setdefault(length, set()).add(example.id)
    return found


def assert_same(models: list[LM], given: list[Setup]) -> None:
    (longer, shorter), lengths = (ids(*pair) for pair in zip(models, given, strict=True)), given[1].lengths
    assert longer.keys() != shorter.keys() == set(lengths or ())
    assert all(longer[length] == shorter[length] for length in longer.keys() & shorter.keys())


@pytest.mark.parametrize("task", TASKS)
def test_a_model_with_a_table_of_positions_reads_the_texts_of_one_without(
    task: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    limit = 600 if task.startswith("attention") else 1030  # default lengths of attention end at the trained length
    models = [model(tokenizer, "long", 1024), model(tokenizer, "short", 1024, limit=limit)]
    given = setups(models, task, None)
    assert given[1].lengths == (given[0].lengths or ())[: len(given[1].lengths or ())] != given[0].lengths
    assert_same(models, given)
    # alone it reads what it did before, as do models whose longest length is the same
    (alone,) = setups(models[1:], task, None)
    twice = setups([models[1], model(tokenizer, "other", 1024, limit=limit)], task, None)
    own = [example.id for example in alone.bound.examples(models[1], alone.lengths or (), 2, 0)]
    for one in (alone, *twice):
        assert [example.id for example in one.examples(models[1], 0)] == own
    # and with lengths that all models can read
    for one, lm in zip(setups(models, task, alone.lengths), models, strict=True):
        assert [example.id for example in one.examples(lm, 0)] == own


@pytest.mark.parametrize(("trained", "limit"), [(512, None), (1024, 600)])
@pytest.mark.parametrize("task", ["perplexity", "perplexity:targets=last", "recall"])
def test_models_read_the_same_texts_at_automatic_lengths(
    task: str, trained: int, limit: int | None, tokenizer: PreTrainedTokenizerFast
) -> None:
    models = [model(tokenizer, "long", 1024), model(tokenizer, "short", trained, limit)]
    given = setups(models, task, "auto")
    if task != "recall":
        assert_same(models, given)
    texts = [[example.payload for example in one.examples(lm, 0)] for lm, one in zip(models, given, strict=True)]
    for one, other in zip(*texts, strict=True):
        both = (getattr(text, "target", text).tolist() for text in (one, other))
        assert next(both) == next(both)


@pytest.mark.parametrize(("trained", "limit"), [(256, None), (1024, 600)])
def test_adaptive_curves_of_models_sample_the_same_texts(
    trained: int, limit: int | None, tokenizer: PreTrainedTokenizerFast
) -> None:
    models = [model(tokenizer, "long", 1024), model(tokenizer, "short", trained, limit)]
    texts = [
        [example.payload.target.tolist() for example in one.first_round.examples(lm, 0)]
        for lm, one in zip(models, setups(models, "curve", "auto"), strict=True)
    ]
    assert texts[0] == texts[1]


def test_lengths_that_a_text_is_too_short_for_are_left_out_for_all_models(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog " * 300)
    models = [model(tokenizer, "long", 1024), model(tokenizer, "short", 1024, limit=600)]
    given = setups(models, "perplexity:targets=last", None, str(file), refusals=True)
    kept = [possible_lengths(lm, one, 0) for lm, one in zip(models, given, strict=True)]
    assert [(one.lengths, tuple(reasons)) for one, reasons in kept] == [((256, 512, 1024), (2048,)), ((256, 512), ())]
    assert_same(models, [one for one, _ in kept])


def test_rows_plans_and_maps_of_models_with_other_longest_lengths(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    models = [model(tokenizer, "long", 64), model(tokenizer, "short", 64, limit=40)]
    what: dict[str, Any] = {"tasks": ["perplexity", "attention"], "repeats": 2, "text": TEXT}
    rows = measure(models, out=tmp_path / "run", **what).rows
    assert {row.status for row in rows} == {"ok"}
    for lm, longest in zip(models, (64, 32), strict=True):
        mine = [row for row in rows if row.model == lm.name and row.task == "attention"]
        assert {row.length for row in mine if "map" in row.scores} == {longest} == {max(row.length for row in mine)}
    targets = [{row.scores["target"] for row in rows if row.model == lm.name and row.task == "perplexity"}
               for lm in models]  # fmt: skip
    assert targets[0] == targets[1]
    assert len(targets[0]) == 2
    assert unfinished(read_run(tmp_path / "run")) == ""
    tasks = what.pop("tasks")
    found = plans(models, "full", grid(models, tasks, **what), out=tmp_path / "run")
    assert [one.cost.num_examples for one in found if not isinstance(one.cost, str)] == [0] * 4


def test_a_continued_run_has_one_set_of_texts(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Default lengths follow from all models: with a longer one, the texts of the models before would be others."""
    first, longer = model(tokenizer, "first", 32), model(tokenizer, "longer", 64)
    longer.identity["fingerprint"] = "other"
    alike = model(tokenizer, "alike", 32, limit=60)
    what: dict[str, Any] = {"tasks": "attention:bin=8", "repeats": 2, "text": TEXT, "out": tmp_path / "run"}
    before = len(measure(first, **what).rows)
    # with the others, before them, or alone
    for models in ([first, longer], [longer, first], [longer]):
        with refused(
            "sampled for lengths of 16 to 32 tokens; with the models named now, they would be sampled for 16 to 64"
        ):
            measure(models, **what)
        planned = grid(models, "attention:bin=8", repeats=2, text=TEXT)
        with refused("Measure all models into another folder"):
            list(plans(models, "full", planned, out=tmp_path / "run"))
    assert len(read_run(tmp_path / "run").rows) == before
    assert len(measure([first, alike], **what).rows) == 2 * before
    assert len(measure(alike, **what).rows) == 2 * before
    given: dict[str, Any] = what | {"out": tmp_path / "given", "lengths": (16, 32)}
    measure(first, **given)
    assert len(measure([first, longer], **given).rows) == 8


def test_a_run_of_an_older_farspan_is_continued_where_its_texts_are_the_same(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    models = [model(tokenizer, "long", 64), model(tokenizer, "short", 64, limit=40)]
    what: dict[str, Any] = {"tasks": "attention:bin=8", "repeats": 2, "text": TEXT, "out": tmp_path / "run"}

    def forget() -> None:
        path = tmp_path / "run" / "run.json"
        header = json.loads(path.read_text())
        for about in header["models"].values():
            del about["lengths"], about["sampled"]
        path.write_text(json.dumps(header))

    measure(models[1], **what)
    forget()
    measure(models[1], **what)
    assert "sampled" in json.loads((tmp_path / "run" / "run.json").read_text())["models"]["short"]
    forget()
    with refused(
        "sampled for lengths of 16 to 32 tokens; with the models named now, they would be sampled for 16 to 64"
    ):
        measure(models, **what)


def test_a_baseline_beside_a_longer_model_cannot_be_repeated_alone(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    models = [model(tokenizer, "long", 64), model(tokenizer, "short", 64, limit=40)]
    measure(models, tasks="attention", repeats=2, text=TEXT, out=tmp_path / "run")
    source = read_run(tmp_path / "run")
    for lm, fails in zip(models, (False, True), strict=True):
        alone = replace(source, header=source.header | {"models": {lm.name: source.header["models"][lm.name]}})
        if not fails:
            refuse_difference(alone, lm, Load())
            continue
        with refused("were sampled for lengths of 16 to 64 tokens, those of short alone would be sampled for 16 to 32"):
            refuse_difference(alone, lm, Load())


def test_the_limit_of_positions_is_known_without_weights(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    for name, changes, limit in (("llama", {}, None), ("gpt2", {"n_positions": 48}, 48)):
        tiny_model(name, **changes).save_pretrained(tmp_path / name)
        (tmp_path / name / "model.safetensors").unlink()
        assert position_limit_of(tmp_path / name) == limit
        assert Load().limit(str(tmp_path / name)) == limit
    assert trained_length_of(tmp_path / "gpt2") == 48
    configure(tmp_path / "llama", hidden_size=30, head_dim=None, num_attention_heads=7)
    assert Load().limit(str(tmp_path / "llama")) is None  # it cannot be built


@pytest.mark.parametrize(
    ("tasks", "lengths", "tokens"),
    [(["perplexity", "curve"], (16, 48), 48), ("own:tests=recall", (80,), 160), ("attention", (64,), 63),
     ("curve", "auto", 63)],
)  # fmt: skip
def test_windows_over_several_documents_are_reported_once(
    tasks: Any, lengths: Any, tokens: int, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    models = [model(tokenizer, "one", 64), model(tokenizer, "other", 64)]
    line = f"2 of 2 windows of {tokens} tokens hold the end of a document"
    for words, reported in ((1, True), (200, False)):
        text, said = 60 * [f"the quick brown fox jumps over the lazy dog {words * 'and the cat '}"], list[str]()
        what: dict[str, Any] = {"text": text, "lengths": lengths, "repeats": 2, "watch": Watch(notice=said.append)}
        measure(models, tasks=tasks, out=tmp_path / f"{words}", **what)
        assert [line in one for one in said if "end of a document" in one] == [True] * reported


def test_windows_in_copies_of_a_document_are_reported() -> None:
    text = Corpus("copied", "hash", np.tile(np.arange(50), 3), np.arange(0, 151, 50))
    (line,) = crossings([Setup(perplexity_of(text, target_tokens=4), "what", (20,), 3)], toy_lm(), 0)
    assert line.startswith("text 'copied': 2 of 3 windows of 20 tokens are from documents that repeat the document of")


def test_the_documents_of_a_shuffled_text_are_not_reported() -> None:
    text = Corpus("counted", "hash", np.arange(100), np.arange(0, 101, 10), shuffled=True)
    assert list(crossings([Setup(perplexity_of(text, target_tokens=4), "what", (20,), 4)], toy_lm(), 0)) == []


@pytest.mark.parametrize(("sizes", "count", "reported"), [((103, 97), 20, False), ((53, 47), 10, True)])
def test_windows_over_several_documents_are_reported_from_a_tenth_on(
    sizes: tuple[int, ...], count: int, reported: bool
) -> None:
    text = Corpus("counted", "hash", np.arange(sum(sizes)), np.concatenate([[0], np.cumsum(sizes)]))
    for bound, length in (
        (perplexity_of(text, target_tokens=4), 10),
        (attention_of(text, 4, sinks=1), 11),
        (curve_of(text), 10),
    ):
        lines = list(crossings([Setup(bound, "what", (length,), count)], toy_lm(), 0))
        assert (
            lines
            == [
                f"text 'counted': 1 of {count} windows of 10 tokens hold the end of a document, so a gain from a long "
                "context may mean less. Give longer documents, or smaller lengths"
            ]
            * reported
        )


@pytest.mark.parametrize("task", [*TASKS, "passkey:depths=2", "cost"])
def test_more_repeats_and_lengths_keep_the_examples_before(task: str, tokenizer: PreTrainedTokenizerFast) -> None:
    lm = model(tokenizer, "one", 1024)
    (one,) = setups([lm], task, (512, 700), TEXT if task in TASKS else "builtin")
    few, more = (replace(one, repeats=count).examples(lm, 0) for count in (4, 8))
    longer = replace(one, repeats=4, lengths=(512, 600, 700)).examples(lm, 0)
    assert [example.id for example in few] == [example.id for example in more[:4]]
    assert [example.id for example in few] == [example.id for example in longer]
    places = [(example.repeat, length, depth) for example in more for length in example.lengths
              for depth in example.depths]  # fmt: skip
    assert len(places) == len(set(places))  # of which a run keeps the last row


@pytest.mark.parametrize(("tokens", "again"), [(1000, 1), (28, 3)])
def test_a_run_continued_with_more_repeats_has_the_rows_of_one_run(
    tokens: int, again: int, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """A repeat alone in its ring has another's target then; texts too short for windows of their own are joined."""
    lm = model(tokenizer, "one", 64)
    text = [" ".join(str(number * 7919 % 997) for number in range(n, n + tokens)) for n in range(0, 5 * tokens, tokens)]
    how: dict[str, Any] = {"tasks": ["curve:protocol=probe,warmup=4,scored=8"], "text": text, "lengths": (16, 64)}
    folder = tmp_path / "run"
    before = measure(lm, out=folder, repeats=3, **how).rows
    planned = plans([lm], "full", grid([lm], repeats=6, **how), out=folder)
    assert [one.cost.num_examples for one in planned if not isinstance(one.cost, str)] == [6 - 3 + again]
    grown = measure(lm, out=folder, repeats=6, **how).rows

    def about(rows: list[Row]) -> list[tuple[Any, ...]]:
        return sorted((row.example, row.length, row.repeat, row.scores["copy_hits"]) for row in rows)

    assert about(grown) == about(measure(lm, out=tmp_path / "at-once", repeats=6, **how).rows)
    assert read_examples(folder) == read_examples(tmp_path / "at-once")
    assert len({row.example for row in grown} & {row.example for row in before}) == 3 - again
    assert about(read_run(folder).rows) == about(grown)
    assert unfinished(read_run(folder)) == ""
    with refused("windows of 64; 600 are needed"):
        measure(lm, out=folder, repeats=600, **how)
    assert len(measure(lm, out=folder, repeats=6, **how).rows) == len(grown)  # which a refused command leaves possible
    with refused("repeats was 6, now 3"):
        measure(lm, out=folder, repeats=3, **how)
    how["lengths"] = (8, 16, 32, 64)
    longer = measure(lm, out=folder, repeats=6, **how).rows
    assert longer[: len(grown)] == grown
    assert about(longer) == about(measure(lm, out=tmp_path / "all-lengths", repeats=6, **how).rows)


@pytest.mark.parametrize("is_same_tokenizer", [True, False])
def test_a_text_that_has_changed_between_the_models_of_a_run_is_refused(
    is_same_tokenizer: bool, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    text, folder = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("the quick brown fox jumps over the lazy dog " * 100)
    models = [model(tokenizer, name, 64) for name in ("first", "other")]
    if not is_same_tokenizer:
        models[1].identity["tokenizer"] = "other"
    what: dict[str, Any] = {"tasks": "perplexity", "lengths": (16, 32), "repeats": 2, "text": str(text)}
    before = len(measure(models[0], out=folder, **what).rows)
    text.write_text("the quick brown fox jumps over the lazy cat " * 100)  # as many characters
    for some in (models, models[::-1], models[1:]):
        with refused(f"the text '{text}' has changed since first was measured: its hash was .* Restore it to continue"):
            measure(some, out=folder, **what)
        with refused("has changed since first was measured"):
            list(plans(some, "full", grid(some, **what), out=folder))
    assert len(read_run(folder).rows) == before
    text.write_text("the quick brown fox jumps over the lazy dog " * 100)
    assert len(measure(models, out=folder, **what).rows) == 2 * before


def test_a_run_without_the_contents_of_its_texts_is_continued(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    text, path = tmp_path / "text.txt", tmp_path / "run" / "run.json"
    text.write_text("the quick brown fox jumps over the lazy dog " * 100)
    first, other = (model(tokenizer, name, 64) for name in ("first", "other"))
    other.identity["tokenizer"] = "other"
    what: dict[str, Any] = {"lengths": (16, 32), "repeats": 2, "text": str(text), "out": tmp_path / "run"}
    rows = measure(first, **what).rows
    header = json.loads(path.read_text())
    contents = header["models"]["first"].pop("contents")  # as an older farspan
    path.write_text(json.dumps(header))
    assert len(measure(other, **what).rows) == 2 * len(rows)
    assert len(measure(first, **what).rows) == 2 * len(rows)
    assert [one["contents"] for one in json.loads(path.read_text())["models"].values()] == [contents, contents]


def test_data_that_has_changed_between_the_models_of_a_run_is_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    file = tmp_path / "questions.jsonl"
    first, other = (model(tokenizer, name, 512) for name in ("first", "other"))
    other.identity["tokenizer"] = "other"
    what: dict[str, Any] = {"tasks": f"qa:data={file},shots=0", "lengths": (1,), "repeats": 1, "out": tmp_path / "run"}
    for answer, lm in (("fox", first), ("dog", other)):
        one = {"question": "who", "answers": [answer], "ctxs": [{"text": "the quick brown fox"}]}
        file.write_text(json.dumps(one) + "\n")
        if answer == "fox":
            measure(lm, **what)
            continue
        with refused(f"the data '{file}' has changed since first was measured"):
            measure(lm, **what)
