"""A search of RoPE frequencies: candidates, their numbers, kills, and what it refuses."""

import json
import math
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import farspan
from farspan.cli import app
from farspan.hf import Stream, plain_rope
from farspan.lm import LM, load
from farspan.measuring import calibration
from farspan.measuring.loop import Watch
from farspan.measuring.plan import Plan
from farspan.measuring.search import KNOTS, NOT_FINITE, RopeSearch, Space, _Search, cma_es, loss
from farspan.methods import method
from farspan.record import read_rows
from farspan.report.search import Searched, Tried, print_search, search_figure
from farspan.stats.forgetting_curves import curve, memory_index
from farspan.tasks.curve import Curve
from farspan.terminal import Terminal

from tiny import nats_by, nats_of, open_lm, same, saved, some_ids, tiny_model

WINDOW = 48  # tokens, of the tiny models here
SMALL: dict[str, Any] = {"lengths": (12, 60), "repeats": 3, "warmup": 2, "scored": 4, "evaluations": 4, "max_nats": 9.0}


pytestmark = pytest.mark.usefixtures("text_file")


@pytest.fixture
def lm(tokenizer: PreTrainedTokenizerFast) -> LM:
    return open_lm("llama", tokenizer, max_position_embeddings=WINDOW)


def searching(**changes: Any) -> RopeSearch:
    return RopeSearch(**{"text": "text.txt", "out": "run"} | SMALL | changes)


def searched(lm: LM, watch: Watch | None = None, **changes: Any) -> Searched:
    return searching(**changes).run(lm, watch=watch)


def numbers(found: Searched) -> list[Any]:
    return [(one.number, one.by_length, one.nats, one.increase) for one in (found.own, found.yarn, *found.tried)]


def factors(folder: Path | str) -> list[str]:
    return [file.read_text() for file in sorted(Path(folder, "candidates").iterdir())]


# numbers


@pytest.mark.parametrize("shape", ["yarn", "factors"])
def test_a_candidate_has_the_numbers_that_measure_gives_its_method(shape: str, lm: LM) -> None:
    found = searched(lm, shape=shape)
    one = found.tried[2]
    what = Curve("probe", warmup=2, scored=4)
    common: dict[str, Any] = {"text": "text.txt", "repeats": 3}
    for how, tried in (("full", found.own), ("rope:type=yarn,factor=4", found.yarn), (one.method, one)):
        rows = farspan.measure([lm], [how], [what], lengths=(12, 60), out=f"curve-{tried.number}-{how[:6]}", **common)
        assert tried.by_length == tuple(memory_index(curve(rows.rows)))
        inside = farspan.measure([lm], [how], ["perplexity:targets=all"], lengths=(WINDOW,), **common).rows
        assert tried.nats == pytest.approx(np.mean([row.scores["nats"] for row in inside]), abs=1e-6)
    assert one.nats is not None
    assert found.own.nats is not None
    assert one.increase == one.nats - found.own.nats
    assert len({one.nats for one in found.tried}) > 2


@pytest.mark.parametrize(("bound", "best"), [(0.0, 1), (0.05, 3), (0.1, 0), (0.3, 2), (-1.0, None)])
def test_the_best_is_the_candidate_within_the_bound_that_remembers_most(
    bound: float, best: int | None, lm: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, cost = (0.8, 0.1, 0.9, 0.5, 0.3), (0.06, 0.0, 0.2, 0.04, 0.05)  # of YaRN, then of the candidates
    low = 2.0 * (bound < 0)  # nothing is within

    def measured(self: Any, number: int, how: Any, own_nats: float | None) -> Tried:
        extra = 0.0 if own_nats is None else cost[number] + low
        return Tried(number, str(how), (memory[number],), 3.0 + extra, extra)

    monkeypatch.setattr(_Search, "_measured", measured)
    found = searched(lm, max_nats=abs(bound))
    assert (found.best and found.best.number) == best
    if best is None:
        assert found.file is None
        assert found.nearest.number == 1
        return
    assert found.file is not None
    held = json.loads(found.file.read_text())
    place = Path(f"run/candidates/{best:04}.json")
    assert held == (json.loads(place.read_text()) if best else Space("yarn", 10_000.0, 4, WINDOW, 4.0).untrained())


def test_candidates_within_the_bound_come_before_those_beyond_it() -> None:
    def one(memory: float, increase: float | None) -> Tried:
        return Tried(1, "m", None if increase is None else (memory,), increase, increase)

    ordered = [one(0.9, 0.01), one(0.3, -0.5), one(-1.0, 0.05), one(0.99, 0.06), one(0.2, 3.0), one(0.0, None)]
    losses = [loss(one, 0.05) for one in ordered]
    assert losses == sorted(losses)
    assert len(set(losses)) == len(losses)
    assert losses[-1] == NOT_FINITE


# candidates


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox"])
def test_the_search_begins_at_yarn(architecture: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    lm, ids = open_lm(architecture, tokenizer), some_ids(1, 60)
    theta, own = plain_rope(lm.model, name="test")
    space = Space("yarn", theta, len(own), 512, 8.0)
    expected = nats_by("rope:type=yarn,factor=8", lm, ids)
    for name, held in (("start", space.parameters(space.start)), ("untrained", space.untrained())):
        (tmp_path / name).write_text(json.dumps(held))
        same(nats_by(f"rope:type=factors,file={tmp_path / name}", lm, ids), expected)


@pytest.mark.parametrize("pairs", [2, 8, 64])
def test_factors_never_fall_and_are_bounded(pairs: int) -> None:
    space = Space("factors", 10_000.0, pairs, 512, 4.0)
    count = min(KNOTS, pairs)
    assert len(space.start) == count + 1
    rng = np.random.default_rng(0)
    for point in [space.start, np.zeros(count + 1), np.ones(count + 1), *rng.random((20, count + 1))]:
        held = np.array(space.parameters(point)["long_factor"])
        assert len(held) == pairs
        assert (np.diff(held) >= 0).all()
        assert held[0] >= 1
        assert held[-1] <= 8 * (1 + 1e-6)
    of_yarn = np.array(space.untrained()["long_factor"])
    knots = np.linspace(0, pairs - 1, count).round().astype(int)
    np.testing.assert_allclose(np.array(space.parameters(space.start)["long_factor"])[knots], of_yarn[knots], rtol=1e-5)


def test_transformers_makes_the_same_of_a_file(lm: LM, tmp_path: Path) -> None:
    space = Space("factors", 10_000.0, 4, WINDOW, 4.0)
    held = space.parameters(np.array([0.1, 0.3, 0.2, 0.9, 0.7]))
    (tmp_path / "f.json").write_text(json.dumps(held))
    theirs = tiny_model("llama", rope_parameters=held, max_position_embeddings=4 * WINDOW)
    for length in (30, 60):  # also beyond the trained length, where transformers takes other factors
        ids = some_ids(1, length)
        with torch.no_grad():
            expected = nats_of(theirs(input_ids=ids).logits[0], ids[0])
        same(nats_by(f"rope:type=factors,file={tmp_path}/f.json", lm, ids)[0], expected)


def test_the_optimiser_has_random_numbers_of_its_own() -> None:
    np.random.seed(3)
    before = np.random.get_state()[1].tolist()  # type: ignore[index]
    first = cma_es(np.full(3, 0.5), 1).ask()
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index]
    np.random.random()
    np.testing.assert_array_equal(first, cma_es(np.full(3, 0.5), 1).ask())
    assert not np.array_equal(first, cma_es(np.full(3, 0.5), 2).ask())
    assert all(((point >= 0) & (point <= 1)).all() for point in first)


# resuming


class Killed(BaseException):
    pass


@pytest.mark.parametrize("rows", [2, 29])
def test_a_killed_search_ends_with_the_same_candidates(rows: int, lm: LM) -> None:
    whole = searched(lm, out="whole")

    def stop(row: Any, done: int, total: int) -> None:
        if len(read_rows("run")) == rows:
            raise Killed

    with pytest.raises(Killed):
        searched(lm, watch=Watch(row=stop))
    before = Path("run/rows.jsonl").read_bytes()
    again = searched(lm)
    assert Path("run/rows.jsonl").read_bytes().startswith(before)
    assert numbers(again) == numbers(whole)
    assert factors("run") == factors("whole")
    assert len(read_rows("run")) == len({row.key for row in read_rows("run")}) == 6 * (3 + 6)


def test_more_evaluations_continue_a_search(lm: LM) -> None:
    whole = searched(lm, out="whole")
    first = searched(lm, evaluations=2)
    assert numbers(first) == numbers(whole)[:4]
    assert numbers(searched(lm)) == numbers(whole)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"factor": 8.0}, "search.factor was 4.0, now 8.0"),
        ({"shape": "factors"}, "search.shape was 'yarn', now 'factors'"),
        ({"max_nats": 0.5}, "search.max_nats was 9.0, now 0.5"),
        ({"seed": 1}, "seed was 0, now 1"),
        ({"lengths": (60,)}, "lengths was"),
        ({"scored": 5}, "tasks was"),
    ],
)
def test_a_folder_with_other_settings_is_refused(changes: dict[str, Any], reason: str, lm: LM) -> None:
    searched(lm, evaluations=1)
    with pytest.raises(ValueError, match=reason):
        searched(lm, evaluations=1, **changes)


def test_an_edited_candidate_is_refused(lm: LM) -> None:
    searched(lm, evaluations=1)
    file = Path("run/candidates/0001.json")
    held = json.loads(file.read_text())
    for changed in (held | {"attention_factor": 2.0}, held | {"long_factor": ["a"] * 4}, [1.0]):
        file.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=r"0001\.json holds other factors than the optimiser proposes"):
            searched(lm, evaluations=1)


# plans


def planned(search: RopeSearch, lm: LM | str, **options: Any) -> list[Plan]:
    costs = [one.cost for one in search.plan(lm, **options)]
    assert all(isinstance(one, Plan) for one in costs)
    return costs  # type: ignore[return-value]


def test_a_plan_counts_the_tokens_that_the_search_reads() -> None:
    lm, fed = load("demo", device="cpu"), 0
    search = searching(lengths=(16, 600), evaluations=2)
    memory, inside = planned(search, lm)  # it also checks that the model can be read in chunks

    def count(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal fed
        if "forward" not in vars(module):  # while the head runs
            fed += kwargs["input_ids"].numel()

    handle = lm.model.get_decoder().register_forward_pre_hook(count, with_kwargs=True)
    search.run(lm)
    handle.remove()
    assert fed == memory.tokens + inside.tokens
    assert memory.num_examples == inside.num_examples == 3 * (2 + 2)  # its own RoPE, YaRN, two candidates
    assert inside.tokens == 4 * 3 * 512
    assert memory.longest > 600


def test_a_plan_leaves_out_what_the_run_already_has(lm: LM) -> None:
    whole = planned(searching(), lm)
    searched(lm, evaluations=2)
    assert [(one.num_examples, one.tokens, one.num_done) for one in planned(searching(evaluations=2), lm)] == [
        (0, 0, 24), (0, 0, 12)  # at two lengths, and at one
    ]  # fmt: skip
    left = planned(searching(), lm)
    assert [3 * one.tokens for one in left] == [one.tokens for one in whole]
    rows = Path("run/rows.jsonl").read_text().splitlines(keepends=True)
    Path("run/rows.jsonl").write_text("".join(rows[:-1]))  # one of the last candidate's windows
    memory, inside = planned(searching(), lm)
    assert (memory, inside.tokens) == (left[0], left[1].tokens + WINDOW)
    with pytest.raises(ValueError, match=r"search\.factor was 4\.0, now 8\.0"):
        planned(searching(factor=8.0), lm)


def test_a_calibrated_plan_has_the_time_of_the_search(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    done, step = 0.0, Stream.step

    def working(self: Stream, ids: torch.Tensor) -> torch.Tensor:
        nonlocal done
        done += 1e-9 * ids.shape[0] * lm.flops(self.num_seen, ids.shape[1], 0) + 0.001
        return step(self, ids)

    planned(searching(), lm)  # the check of chunks is not part of it
    monkeypatch.setattr(Stream, "step", working)
    monkeypatch.setattr(calibration, "clock", lambda: done)
    costs = planned(searching(), lm, calibrate=True)
    done = 0.0
    searched(lm)
    assert sum(one.seconds or 0.0 for one in costs) == pytest.approx(done, rel=0.03)


# refusals


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"shape": "spiral"}, "shape 'spiral' is unknown; known are yarn, factors"),
        ({"factor": 1.0}, "factor: got 1, expected more than 1"),
        ({"factor": math.nan}, "factor: got nan, expected more than 1"),
        ({"factor": math.inf}, "factor: got inf, expected more than 1"),
        ({"evaluations": 0}, "evaluations: got 0, expected at least 1"),
        ({"max_nats": -0.1}, "max_nats: got -0.1, expected nats per token, 0 or more"),
        ({"max_nats": math.nan}, "max_nats: got nan"),
        ({"out": "a,b"}, "a method cannot name a file there"),
        ({"lengths": ()}, "lengths: got none"),
        ({"lengths": (100, 60)}, r"lengths \[100, 60\] must ascend, each once: write 60,100"),
        ({"lengths": (8, 16)}, "lengths to 16 tokens are inside the window: .* is 24 of its 48 tokens"),
        ({"lengths": (60, 5000)}, "text 'text.txt' has"),
        ({"repeats": 1}, "repeats: got 1, expected at least 2"),
        ({"warmup": 50, "scored": 50}, "is longer than the longest text, 60 tokens"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], reason: str, lm: LM) -> None:
    with pytest.raises(ValueError, match=reason):
        searched(lm, **changes)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("gpt2", "farspan search rope changes RoPE frequencies, and .* has none that can be changed"),
        ("gpt_oss", "scaled already"),
    ],
)
def test_models_whose_rope_cannot_be_searched_are_refused(
    architecture: str, reason: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ValueError, match=reason):
        searched(open_lm(architecture, tokenizer))


def test_a_missing_extra_is_named(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cma", None)
    with pytest.raises(ValueError, match=r"this needs the package cma: pip install 'farspan\[search\]'"):
        searched(lm)


def test_candidates_without_finite_numbers_are_not_chosen(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = Space.parameters
    monkeypatch.setattr(Space, "parameters", lambda self, point: parameters(self, point) | {"attention_factor": 1e30})
    found = searched(lm, evaluations=3)
    assert [one.increase for one in found.tried] == [None] * 3
    assert found.best is found.yarn
    assert found.nearest is found.yarn
    print_search(found, Terminal())
    search_figure(found)


# the command


def farspan_cli(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerFast) -> Path:
    saved("model", tokenizer, tiny_model(max_position_embeddings=WINDOW))
    return Path("model")


COMMAND = "--text text.txt --repeats 3 --warmup 2 --scored 4 --evaluations 4 --max-nats 9 --out run --device cpu"


# the embedded model copies; random weights do not
COPIES = f"search rope demo {COMMAND} --factor 2 --lengths 16,600"


def test_the_command_ends_with_a_comparison_that_works(drawn: None) -> None:
    done = farspan_cli(*COPIES.split())
    assert done.exit_code == 0, done.output
    assert re.search(r"evaluation \d/4: memory index|no candidate within the bound", done.output)
    assert Path("run/search.png").stat().st_size > 10_000
    *_, where, command = done.stdout.splitlines()
    assert where == "on windows of the same texts, which can overlap: give another --text:"  # as it searched text.txt
    words = shlex.split(command)
    assert words[:3] == ["farspan", "compare", "demo"]
    assert words[-2:] == ["--device", "cpu"]
    compared = farspan_cli(*words[1:], "--out", "compared", "--no-cost")
    assert compared.exit_code == 0, compared.output
    rows = read_rows("compared")
    assert {row.method for row in rows if row.status == "ok"} >= {
        "full", "rope:type=yarn,factor=2", str(method("rope:type=factors,file=run/factors.json")),
    }  # fmt: skip


def test_the_comparison_copies_the_same_text_and_probes_as_the_search() -> None:
    how = "--target-text", "shuffled", "--warmup", 2, "--scored", 9
    done = farspan_cli(*COPIES.split(), *how, "--json")
    words = shlex.split(json.loads(done.stdout)["command"])
    assert "curve:protocol=probe,target_text=shuffled,warmup=2,scored=9" in words
    compared = farspan_cli(*words[1:], "--out", "compared", "--no-cost")
    assert compared.exit_code == 0, compared.output


def test_json_is_one_line_alone_on_stdout() -> None:
    done = farspan_cli(*COPIES.split(), "--json")
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert (found["evaluations"], found["factors"], found["max_nats"]) == (4, "run/factors.json", 9.0)
    assert len(found["best"]["by_length"]) == len(found["lengths"]) == 2
    assert found["command"].startswith("farspan compare demo --method full")


def test_a_search_in_which_nothing_is_remembered_suggests_no_comparison(model: Path) -> None:
    done = farspan_cli("search", "rope", model, *COMMAND.split(), "--json")
    assert done.exit_code == 1
    assert "no candidate remembers anything at these lengths. Lower --factor or --lengths" in done.stderr
    found = json.loads(done.stdout)
    assert (found["best"]["by_length"], found["command"]) == ([0.0, 0.0, 0.0], None)


def test_a_search_without_a_candidate_within_the_bound_fails(model: Path) -> None:
    done = farspan_cli("search", "rope", model, *COMMAND.split(), "--max-nats", 0, "--lengths", "60", "--seed", 3)
    best = json.loads(farspan_cli("search", "rope", model, *COMMAND.split(), "--max-nats", 0, "--lengths", "60",
                                  "--seed", 3, "--json").stdout)["best"]  # fmt: skip
    assert (done.exit_code == 1) == (best is None)
    if best is None:
        assert "no candidate costs at most +0 nats inside the window: the nearest costs +" in done.stderr


def test_the_plan_of_the_command_needs_no_weights_and_makes_no_run(model: Path, lm: LM) -> None:
    (model / "model.safetensors").unlink()
    done = farspan_cli("search", "rope", model, *COMMAND.split(), "--plan", "--tflops", 0.5, "--json")
    assert done.exit_code == 0, done.output
    plans = json.loads(done.stdout)["plans"]
    assert [one["what"].partition(":")[0] for one in plans] == ["curve", "perplexity"]
    assert {one["method"] for one in plans} == {"farspan search rope"}
    assert [one["seconds"] for one in plans] == pytest.approx([one["flops"] / 0.5e12 for one in plans])
    assert [one["tokens"] for one in plans] == [one.tokens for one in planned(searching(lengths=None), lm)]
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--plan", "--tflops", "0"], "tflops: got 0, expected a positive number"),
        (["--plan", "--tflops", "1", "--calibrate"], "both give the time"),
        (["--calibrate"], "--calibrate belongs to --plan"),
        (["--plan", "--lengths", "8,16"], "are inside the window"),
        (["--plan", "--lengths", "60,5000"], "text 'text.txt' has"),
        (["--shape", "spiral"], "spiral"),
        (["--factor", "0.5"], "factor: got 0.5, expected more than 1"),
        (["--lengths", "8,16"], "are inside the window"),
        (["--max-nats", "x"], "max-nats"),
        (["--evaluations", "0"], "evaluations"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options: list[str], reason: str, model: Path) -> None:
    done = farspan_cli("search", "rope", model, *COMMAND.split(), *options)
    assert done.exit_code == 2
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]  # after transformers' progress
    assert last.startswith("error: ")
    assert reason in last


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [("gpt2", "changes RoPE frequencies, and GPT2LMHeadModel has none"), (None, "is a server, and this command needs")],
)
def test_a_plan_refuses_the_models_that_a_search_refuses(
    architecture: str | None, reason: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    if architecture is not None:
        saved("other", tokenizer, tiny_model(architecture))
    done = farspan_cli("search", "rope", "other" if architecture else "http://127.0.0.1:9", *COMMAND.split(), "--plan")
    assert done.exit_code == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert reason in last
