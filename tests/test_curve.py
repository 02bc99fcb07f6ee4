"""The task `curve` against a naive twin of the authors' procedure, and against readers whose curve is known."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from farspan import stats
from farspan.lm import LM, load, wrap
from farspan.methods import Method, method
from farspan.record import Row
from farspan.tasks import task as parsed
from farspan.tasks.curve import BoundCurve, Curve, overlap
from farspan.tasks.recall import Recall
from farspan.text import corpora
from farspan.text.corpora import Corpus

import tiny
from naive import naive_half
from tiny import examples, hit_prone, tiny_model
from toys import ToyMethod, copier, counting_text, curve_of, every, toy_lm

ARCHITECTURES = ["llama", "mistral", "qwen3", "gpt_neox", "gpt2", "gemma2", "mamba2", "rwkv", "falcon_h1", "mamba"]
LENGTHS = (5, 24, 60, 101)
TIE = 1e-5  # logits


def repetitive_text(seed: int = 0, num_documents: int = 6, length: int = 400) -> Corpus:
    """Few different tokens, so that a model of random weights hits some of them."""
    tokens = np.random.default_rng(seed).integers(1, 12, num_documents * length)
    return Corpus(f"repetitive-{seed}", f"r{seed}", tokens, np.arange(num_documents + 1) * length)


run_curve = partial(tiny.measured, lengths=LENGTHS, repeats=3, batch=2)


def assert_equals_the_naive_twin(
    rows: list[Row], lm: LM, task: BoundCurve, lengths: tuple[int, ...], repeats: int
) -> float:
    """Every hit token for token, ties aside; returns the share of hits."""
    examples = {example.id: example for example in task.examples(lm, lengths, repeats, 0)}
    separator = task.separator(lm)
    end = (2,) if task.compat else ()
    compared = hit = 0
    for row in rows:
        texts = examples[row.example].payload
        start, warmup, scored = task.slice_at(row.length, row.depth)
        target, asked = texts.target[: row.length], texts.target[start : start + warmup + scored]
        if texts.prefix is not None:
            halves = {"copy": (target, asked), "control": (texts.prefix[: row.length], asked)}
        else:
            assert texts.other is not None
            halves = {"copy": (target, asked), "control": (target, texts.other[start : start + warmup + scored])}
        for name, (first, second) in halves.items():
            hits, nats, margins = naive_half(lm.model, separator, first.tolist(), second.tolist(), end, scored)
            ours = torch.from_numpy(stats.unpacked(row.scores[f"{name}_hits"], row.scores["scored"]).astype(bool))
            clear = margins > TIE
            assert torch.equal(ours[clear], hits[clear])
            assert row.scores[f"{name}_nats"] == pytest.approx(float(nats.mean()), rel=1e-3)
            assert row.scores[name] == pytest.approx(float(ours.float().mean()))
            compared += int(clear.sum())
            hit += int(hits.sum())
    assert compared > 0.98 * sum(2 * row.scores["scored"] for row in rows)
    return hit / compared


PROBES = {"warmup": 10, "scored": 15}


@pytest.mark.parametrize(
    ("architecture", "protocol"),
    [
        *((name, "nested") for name in ARCHITECTURES),
        *((name, protocol) for name in ("llama", "gpt2", "mamba2", "mamba") for protocol in ("paper", "probe")),
    ],
)
def test_hits_equal_the_naive_twin_token_for_token(
    architecture: str, protocol: Any, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    lm = wrap(hit_prone(tiny_model(architecture)), tokenizer, "tiny")
    task = curve_of(repetitive_text(), protocol=protocol, **PROBES)
    rows = run_curve(tmp_path, lm, task, method("full"), chunk=23)
    assert len(rows) == 12
    share = assert_equals_the_naive_twin(rows, lm, task, LENGTHS, 3)
    assert 0.02 < share < 0.98  # otherwise equality would say nothing


def test_hits_equal_the_naive_twin_with_an_irrelevant_text_of_its_own(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    lm = wrap(hit_prone(tiny_model()), tokenizer, "tiny")
    task = curve_of(repetitive_text(), prefix=repetitive_text(1))
    rows = run_curve(tmp_path, lm, task, method("full"), chunk=23)
    assert_equals_the_naive_twin(rows, lm, task, LENGTHS, 3)


def test_hits_at_every_depth_equal_the_naive_twin(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    lm = wrap(hit_prone(tiny_model()), tokenizer, "tiny")
    task = curve_of(repetitive_text(), protocol="probe", depths=(0.0, 0.3, 1.0), **PROBES)
    rows = run_curve(tmp_path, lm, task, method("full"), lengths=(26, 60, 101), chunk=23)
    assert {(row.length, row.depth) for row in rows} == {(n, d) for n in (26, 60, 101) for d in (0.0, 0.3, 1.0)}
    assert_equals_the_naive_twin(rows, lm, task, (26, 60, 101), 3)


@pytest.mark.parametrize("tail", [0, 15])
def test_each_piece_of_the_text_comes_before_the_copy_alone(
    tail: int, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    lm = wrap(hit_prone(tiny_model()), tokenizer, "tiny")
    task = curve_of(repetitive_text(), protocol="probe", **PROBES)
    rows = run_curve(tmp_path, lm, task, method(f"replug:piece=20,tail={tail}"), lengths=(60, 101), repeats=2)
    examples = {example.id: example for example in task.examples(lm, (60, 101), 2, 0)}
    separator = task.separator(lm)
    for row in rows:
        target = examples[row.example].payload.target
        text, asked = target[: row.length].tolist(), target[: PROBES["warmup"] + PROBES["scored"]].tolist()
        rest, end = text[: row.length - tail], text[row.length - tail :]
        first = len(rest) % 20
        pieces = [rest[:first]] * (first > 0) + [rest[i : i + 20] for i in range(first, len(rest), 20)]
        nats = [naive_half(lm.model, separator, piece + end, asked, (), PROBES["scored"])[1] for piece in pieces]
        mixed = -(torch.stack(nats).neg().exp().mean(0)).log()
        assert row.scores["copy_nats"] == pytest.approx(float(mixed.mean()), rel=1e-4)


@pytest.mark.parametrize("how", examples(), ids=str)
def test_every_method_is_given_the_whole_text(how: Method, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    lm = wrap(hit_prone(tiny_model()), tokenizer, "tiny")
    task = curve_of(repetitive_text(), protocol="probe", **PROBES)
    rows = run_curve(tmp_path, lm, task, how, lengths=(60, 101), repeats=2)
    texts = {example.id: example.payload.target for example in task.examples(lm, (60, 101), 2, 0)}
    head = torch.tensor([task.separator(lm)])
    for row in rows:
        target = torch.from_numpy(texts[row.example]).long()[None]
        asked = torch.cat([head, target[:, : PROBES["warmup"] + PROBES["scored"]]], 1)
        with how.on(lm) as reader:
            nats = reader.read(target[:, : row.length], head=head).score(asked).nats[0, -PROBES["scored"] :]
        assert row.scores["copy_nats"] == pytest.approx(float(nats.mean()), rel=1e-4)


def test_hits_equal_the_naive_twin_on_a_real_model(shared_data: Path, tmp_path: Path) -> None:
    lm = load(shared_data / "models" / "stories260K", dtype="float32")
    task = curve_of(corpora.load(str(shared_data / "books" / "great_gatsby.txt"), lm.tokenizer))
    rows = run_curve(tmp_path, lm, task, method("full"), lengths=(32, 150, 300), repeats=2, chunk=100)
    assert assert_equals_the_naive_twin(rows, lm, task, (32, 150, 300), 2) > 0.1


def test_bf16_accuracies_are_within_half_a_point_of_the_naive_twin(shared_data: Path, tmp_path: Path) -> None:
    lm = load(shared_data / "models" / "stories260K", dtype="bfloat16")
    task = curve_of(corpora.load(str(shared_data / "books" / "great_gatsby.txt"), lm.tokenizer))
    rows = run_curve(tmp_path, lm, task, method("full"), lengths=(200, 400), repeats=4, chunk=100)
    examples = {example.id: example for example in task.examples(lm, (200, 400), 4, 0)}
    for length in (200, 400):
        ours, theirs = [], []
        for row in (row for row in rows if row.length == length):
            target = examples[row.example].payload.target[:length].tolist()
            ours.append(row.scores["copy"])
            theirs.append(float(naive_half(lm.model, task.separator(lm), target, target)[0].float().mean()))
        assert abs(np.mean(ours) - np.mean(theirs)) <= 0.005


def test_the_authors_ids_stand_where_their_script_writes_them(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    lm = wrap(hit_prone(tiny_model()), tokenizer, "tiny")
    task = curve_of(repetitive_text(), protocol="paper", compat=True)
    assert task.separator(lm) == (1,)
    rows = run_curve(tmp_path, lm, task, method("full"))
    # the twin feeds their last id 2 as well: nothing that is scored depends on it
    assert_equals_the_naive_twin(rows, lm, task, LENGTHS, 3)


def test_the_papers_protocol_draws_fresh_targets_and_ends_of_the_text_as_irrelevant() -> None:
    text, lm = counting_text(), toy_lm()
    examples = curve_of(text, protocol="paper").examples(lm, (10, 20), 4, seed=3)
    stream = corpora.join((text.document(i) for i in range(text.num_documents)), (0,))
    assert len(examples) == 8
    for example in examples:
        (length,) = example.lengths
        assert np.array_equal(example.payload.prefix, stream[-length:])
        start = int(np.flatnonzero(stream == example.payload.target[0])[0])
        assert start <= len(stream) - 3 * length
    assert len({example.payload.target.tobytes() for example in examples}) == 8


def test_half_of_an_odd_length_is_rounded_up(tmp_path: Path) -> None:
    rows = run_curve(tmp_path, toy_lm(), curve_of(counting_text()), ToyMethod(copier(10**6)), lengths=(7,))
    assert rows[0].scores["scored"] == 4


def test_nested_lengths_are_prefixes_and_controls_go_round_the_targets() -> None:
    examples = curve_of(counting_text()).examples(toy_lm(), (10, 20), 3, seed=0)
    targets = [example.payload.target for example in examples]
    for i, example in enumerate(examples):
        assert np.array_equal(example.payload.other, targets[i - 1])
        assert example.payload.other_repeat == (i - 1) % 3


def test_nested_needs_another_target_for_its_control() -> None:
    with pytest.raises(ValueError, match="repeats: got 1, expected at least 2"):
        curve_of(counting_text()).examples(toy_lm(), (10,), 1, seed=0)


def test_a_text_too_short_for_the_papers_protocol_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match="needs 3,000 of it for a length of 1,000"):
        curve_of(counting_text(2, 400), protocol="paper").examples(toy_lm(), (1000,), 2, seed=0)


def test_shuffled_text_belongs_to_nested() -> None:
    shuffled = Corpus("s", "s", counting_text().tokens, counting_text().starts, shuffled=True)
    with pytest.raises(ValueError, match="--protocol nested"):
        curve_of(shuffled, protocol="paper").examples(toy_lm(), (10,), 2, seed=0)


@pytest.mark.parametrize("protocol", ["nested", "paper"])
def test_a_perfect_copier_to_a_distance_has_exactly_its_memory_lengths(protocol: Any, tmp_path: Path) -> None:
    # the copied token is one separator and L tokens back: 120 is the last length within a distance of 121
    text = counting_text() if protocol == "nested" else counting_text(1, 5000)  # the paper's has documents joined
    lengths = (70, 100, 120, 130, 200)
    rows = run_curve(tmp_path, toy_lm(), curve_of(text, protocol=protocol), ToyMethod(copier(121)), lengths=lengths)
    s = stats.summarise(stats.curve(rows))
    assert s.paper_fine.value == s.paper_coarse.value == 120
    assert not s.paper_fine.censored
    assert s.fine.value == pytest.approx(120 + 0.01 * 10)  # between 120 and 130 the copy falls from 1 to 0
    assert s.half_life.value == pytest.approx(125)
    assert s.reach.value == pytest.approx(129.5)
    assert (s.half_life.low, s.half_life.high) == (120, 130)  # between the two nothing was measured
    assert s.span.value == pytest.approx(120 + 5)


def test_a_copier_without_end_is_censored(tmp_path: Path) -> None:
    rows = run_curve(tmp_path, toy_lm(), curve_of(counting_text()), ToyMethod(copier(10**6)), lengths=(70, 100, 200))
    s = stats.summarise(stats.curve(rows))
    for length in (s.fine, s.coarse, s.half_life, s.reach, s.paper_fine):
        assert (length.value, length.censored) == (200, True)
        assert length.reason == "the longest length measured"
    assert str(s.half_life) == ">200 [200, >200]"


def test_a_reader_that_recalls_every_fifth_token_reaches_far_but_has_no_half_life(tmp_path: Path) -> None:
    rows = run_curve(tmp_path, toy_lm(), curve_of(counting_text()), ToyMethod(every(5)), lengths=(100, 200, 300))
    curve = stats.curve(rows)
    assert np.allclose(curve.copy, 0.2)
    assert np.allclose(curve.control, 0.0)
    s = stats.summarise(curve)
    assert (s.fine.value, s.half_life.value) == (0, 0)
    assert s.half_life.high == 100
    assert (s.reach.value, s.reach.censored) == (300, True)
    assert s.span.value == pytest.approx(60)


@pytest.mark.parametrize("length", [2, 3, 20, 24])
def test_a_short_probe_asks_what_nested_asks(length: int) -> None:
    nested, probe = (curve_of(counting_text(), protocol=p, **PROBES) for p in ("nested", "probe"))
    start, warmup, scored = probe.slice_at(length, 0.0)
    assert (start, warmup, scored) == (0, length // 2, length // 2)
    if length % 2 == 0:
        assert probe.slice_at(length, 0.0) == nested.slice_at(length, 0.0)


def test_a_probe_reaches_nearly_the_whole_window() -> None:
    nested, probe = (curve_of(counting_text(), protocol=p) for p in ("nested", "probe"))
    assert nested.largest_length(toy_lm(), 4096) == 2047
    assert probe.largest_length(toy_lm(), 4096) == 4096 - 128 - 256 - 2
    for task in (nested, probe):
        for context in (7, 100, 700, 771, 4096):
            longest = task.largest_length(toy_lm(), context)
            assert task.num_tokens(toy_lm(), None, longest) <= context


def test_depths_move_the_slice_from_the_beginning_to_the_end() -> None:
    task = curve_of(counting_text(), protocol="probe", **PROBES)
    assert [task.slice_at(125, depth)[0] for depth in (0.0, 0.5, 1.0)] == [0, 50, 100]


@pytest.mark.parametrize(("length", "probe"), [(300, (16, 32)), (400, (32, 64)), (767, (32, 64)), (768, (128, 256))])
def test_a_probe_of_recall_leaves_room_for_other_distances(length: int, probe: tuple[int, int]) -> None:
    found = Recall().resolved((length,), (512,))
    assert (found.warmup, found.scored) == probe
    assert Recall(warmup=64, scored=128).resolved((length,), (512,)).scored == 128


def test_recall_follows_distance_where_memory_does(tmp_path: Path) -> None:
    task = curve_of(counting_text(), protocol="probe", depths=(0.0, 0.25, 0.5, 0.75, 1.0), **PROBES)
    rows = run_curve(tmp_path, toy_lm(), task, ToyMethod(copier(121)), lengths=(100, 225))
    for row in rows:
        assert row.scores["distance"] == row.length + 1 - task.slice_at(row.length, row.depth)[0]
        assert row.scores["copy"] == float(row.scores["distance"] <= 121)
        assert row.scores["context"] == row.length + 27
    found = stats.memory_map(rows)
    assert found.memory_index.tolist() == [[1] * 5, [0, 0, 0, 1, 1]]
    assert stats.curve(rows).lengths.tolist() == [100, 225]  # of depth 0 alone


def test_a_killed_map_goes_on_at_the_depth_it_lacks(tmp_path: Path) -> None:
    task = curve_of(counting_text(), protocol="probe", depths=(0.0, 0.5, 1.0), **PROBES)
    whole = run_curve(tmp_path, toy_lm(), task, ToyMethod(copier(121)), lengths=(100, 225))
    file = tmp_path / "rows.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:4]))
    again = run_curve(tmp_path, toy_lm(), task, ToyMethod(copier(121)), lengths=(100, 225))
    assert {(r.key, r.scores["copy"]) for r in again} == {(r.key, r.scores["copy"]) for r in whole}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"depths": (0.0, 1.5)}, "to at most 1, its end"),
        ({"depths": (0.5, 1.0)}, "expected ascending numbers from 0"),
        ({"depths": ()}, "depths: got \\[\\], expected"),
        ({"depths": (0.0, 1.0), "protocol": "nested"}, "need --protocol probe"),
        ({"scored": 0}, "scored: got 0, expected at least 1"),
    ],
)
def test_probes_that_cannot_be_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        curve_of(counting_text(), **({"protocol": "probe"} | given))


def test_a_probe_is_smaller_only_where_it_does_not_fit_into_the_shortest_length() -> None:
    for given, expected in (({}, (16, 32)), ({"scored": 16}, (128, 16)), ({"scored": 90}, (16, 90))):
        task = Curve(protocol="probe", depths=(0.0, 1.0), **given).resolved((200, 400), (512,))
        assert (task.warmup, task.scored) == expected


def test_depths_need_lengths_with_room_for_them() -> None:
    task = curve_of(counting_text(), protocol="probe", depths=(0.0, 1.0), **PROBES)
    with pytest.raises(ValueError, match="lengths up to 25 tokens"):
        task.examples(toy_lm(), (25, 100), 2, seed=0)


@pytest.mark.parametrize("repeats", range(2, 14))
def test_rings_of_four_give_every_target_one_control_and_keep_it(repeats: int) -> None:
    task = curve_of(counting_text(20))
    examples = task.examples(toy_lm(), (10,), repeats, seed=0)
    lent = [int(example.payload.other_repeat) for example in examples]
    assert sorted(lent) == list(range(repeats))
    assert all(other != example.repeat for other, example in zip(lent, examples, strict=True))
    if repeats % 4 == 0:
        more = task.examples(toy_lm(), (10,), repeats + 4, seed=0)
        assert [example.id for example in more[:repeats]] == [example.id for example in examples]


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("curve", "protocol"),
        ("curve:protocol=probe", "warmup and scored"),
        ("recall", "warmup and scored"),
        ("perplexity", "target_tokens"),
        ("longppl:short=20", "block and target_tokens"),
        ("attention", "bin"),
    ],
)
def test_a_task_with_open_settings_is_not_bound(spec: str, named: str, lm: LM) -> None:
    with pytest.raises(ValueError, match=rf"got no {named}, .* or bind task.resolved\(lengths, trained\)"):
        parsed(spec).on(lm, "random")
    assert parsed(spec).resolved((100, 8000), (512,)).on(lm, "random").settings


def test_the_protocol_follows_from_the_longest_length(lm: LM) -> None:
    assert Curve().resolved((100, 8000), (512,)).on(lm, "random").settings["protocol"] == "probe"


@pytest.mark.parametrize(("text", "kept"), [("shuffled", True), ("random", False)])
def test_other_targets_are_chosen_by_name(text: str, kept: bool, lm: LM, tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_text("the quick brown fox " * 400)
    task = Curve("nested", target_text=text).on(lm, str(file))
    plain = Curve("nested").on(lm, str(file))
    ours, theirs = task.target.windows(50, 2, 0), plain.target.windows(50, 2, 0)
    assert (sorted(ours[0]) == sorted(theirs[0])) is kept
    assert not np.array_equal(ours[0], theirs[0])


def test_an_irrelevant_text_from_the_same_corpus_never_overlaps_its_target() -> None:
    text = counting_text(3, 1000)
    examples = curve_of(text, prefix=text).examples(toy_lm(), (200,), 5, seed=0)
    for example in examples:
        assert not set(example.payload.target) & set(example.payload.prefix)


def shuffled(text: Corpus) -> Corpus:
    return replace(text, name=f"shuffled:{text.name}", hash="other", shuffled=True, ordered_hash=text.hash)


def test_a_text_and_itself_shuffled_are_the_texts_that_rows_name() -> None:
    text = counting_text(3, 1000)
    for target, prefix in ((text, shuffled(text)), (shuffled(text), text), (shuffled(text), shuffled(text))):
        task = curve_of(target, prefix=prefix)
        assert (task.settings["target_hash"] == task.settings["prefix_hash"]) == (target.shuffled == prefix.shuffled)
        for example in task.examples(toy_lm(), (200,), 5, seed=0):
            drawn = {"target": target, "prefix": prefix}
            for name, of in drawn.items():
                in_order = bool((np.diff(getattr(example.payload, name)) == 1).all())
                assert in_order is not of.shuffled, (target.name, prefix.name, name)
            assert not set(example.payload.target) & set(example.payload.prefix)


def test_examples_of_ordinary_texts_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundCurve, "version", 2)  # under which they were recorded; later versions draw the same texts
    text, other = counting_text(3, 1000), repetitive_text()
    ids = {
        "plain": curve_of(text),
        "same": curve_of(text, prefix=text),
        "other": curve_of(text, prefix=other),
        "shuffled": curve_of(replace(text, shuffled=True)),
        "both shuffled": curve_of(shuffled(text), prefix=shuffled(text)),
    }
    found = {name: task.examples(toy_lm(), (50, 200), 3, seed=1)[2].id for name, task in ids.items()}
    assert found == {
        "plain": "139d2f889d54cc41",
        "same": "d79e59b4c1513306",
        "other": "72b7f64bdb151093",
        "shuffled": "637c921b79fa5b8e",
        "both shuffled": "6f535c159b817131",
    }


@pytest.mark.parametrize("prefix", [None, "other"])
def test_a_control_that_reads_its_target_is_reported(prefix: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    document = np.random.default_rng(0).integers(1, 1000, 400)
    fresh = np.random.default_rng(1).integers(1, 1000, 400)
    twice = Corpus("twice", f"twice {prefix}", np.concatenate([document, document]), np.array([0, 400, 800]))
    once = Corpus("once", f"once {prefix}", np.concatenate([document, fresh]), np.array([0, 400, 800]))
    curve_of(once, prefix and Corpus("fresh", "fresh", np.arange(5000), np.array([0, 5000]))).examples(
        toy_lm(), (300,), 2, seed=0
    )
    assert capsys.readouterr().err == ""
    task = curve_of(once, twice) if prefix else curve_of(twice)
    task.examples(toy_lm(), (300,), 2, seed=0)
    task.examples(toy_lm(), (300,), 2, seed=0)
    said = capsys.readouterr().err
    assert "holds most of its target, so its control is a copy" in said
    assert said.count("\n") == 1


def test_overlap_is_the_share_of_runs_that_were_read() -> None:
    ids = np.random.default_rng(0).integers(0, 1000, 500)
    assert overlap(ids, ids[100:300]) == 1
    assert overlap(ids[:250], ids) == pytest.approx(219 / 469)
    assert overlap(ids[:200], ids[200:]) == 0
    assert overlap(ids[:10], ids[3:9]) == 1
    assert overlap(ids[:0], ids) == 0
