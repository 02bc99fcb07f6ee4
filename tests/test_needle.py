"""Needles: what is hidden where, and scores against plain forwards over everything."""

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_servers import Fake, serving
from test_cli import farspan, last_line, refused
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from farspan.ask import template
from farspan.lm import LM, wrap
from farspan.measuring.grid import measure
from farspan.reader import Scores
from farspan.reader.served import served
from farspan.record import Row, read_rows
from farspan.report.depths import DepthReport
from farspan.report.kinds import MEMBERS
from farspan.report.runs import Group, Member, Source, grouped, read_sources
from farspan.stats import holm
from farspan.tasks import task
from farspan.tasks.needle import KINDS, BoundNeedle, _mentions
from farspan.text.corpora import Corpus, load

import tiny
from naive import greedy_until, nats_after
from tiny import PlannedAndFed, blank_first_tokenizer, tiny_model

Make = Callable[..., BoundNeedle]
LENGTHS = (640, 900)
CHAT = "<s>{% for message in messages %}user: {{ message.content }}\n{% endfor %}bot:"
SMALL: dict[str, dict[str, Any]] = {  # settings with few needles, since the tokenizer has nearly a token a letter
    "single": {},
    "multikey": {"distractors": 1},
    "multivalue": {"answers": 2},
    "tracking": {"hops": 2},
}


@pytest.fixture
def text(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    words = ["Foxel", "dogar", "Overing", "lazyton", "Quickwick", "browny", "and", "the"]
    (tmp_path / "hay.txt").write_text(" ".join(" ".join(rng.choice(words, 9)) + "." for _ in range(300)))
    return str(tmp_path / "hay.txt")


@pytest.fixture
def bound(lm: LM, text: str) -> Make:
    def build(kind: str = "single", **changes: Any) -> BoundNeedle:
        given: dict[str, Any] = {"depths": (0.0, 1.0), **SMALL[kind], **changes}
        return BoundNeedle(kind=kind, **given, text=load(text, lm.tokenizer))

    return build


measured = partial(tiny.measured, lengths=LENGTHS, repeats=2, chunk=97)


# what is hidden where


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("together", [True, False])
def test_a_prompt_has_its_length_and_the_needles_of_its_depth(kind: str, together: bool, lm: LM, bound: Make) -> None:
    task = bound(kind, together=together, depths=(0.0, 0.5, 1.0) if kind == "single" else (0.0, 1.0))
    for example in task.examples(lm, LENGTHS, 2, 0):
        prompt = example.payload
        asked = max(len(query.ids) + len(query.answer) for query in prompt.queries)
        for length in LENGTHS:
            for which, query in enumerate(prompt.queries):
                tokens, begin = task.context(lm, example, length, which)
                assert len(prompt.head) + len(tokens) + asked == length
                shown = lm.tokenizer.decode(tokens.tolist())
                own, others = (
                    {answer for one in prompt.queries for answer in one.answers if (one is query) == mine}
                    for mine in (True, False)
                )
                there = {word for word in re.findall(r"\w+", shown) if word in own | others}
                assert there == (own | others if together else own)
                assert tokens[begin:][: len(query.facts[0].ids)].tolist() == query.facts[0].ids.tolist()
                inside, needles = len(tokens) - len(prompt.description), sum(len(fact.ids) for fact in query.facts)
                early, late = begin - len(prompt.description), inside - begin + len(prompt.description) - needles
                if example.depths[which] == 0:
                    assert early == 0
                elif example.depths[which] == 1 and kind == "single":
                    assert late <= 16
                elif kind == "single":
                    assert abs(early - late) <= 2 * 60  # the needles of the other depths, and the way to a word


def test_several_needles_of_a_depth_are_spread_in_order(lm: LM, bound: Make) -> None:
    (example,) = bound("tracking", depths=(0.0, 0.5, 1.0), spread=0.3).examples(lm, (2000,), 1, 0)
    depths = [[fact.depth for fact in query.facts] for query in example.payload.queries]
    assert np.allclose(depths, [[0, 0.15, 0.3], [0.35, 0.5, 0.65], [0.7, 0.85, 1]])
    for query in example.payload.queries:
        value, *names = re.findall(r"[A-Z]{5}|\d{7}", query.question + " ".join(query.answers))
        chain = [lm.tokenizer.decode(fact.ids.tolist()).strip() for fact in query.facts]
        links = [f"VAR {later} = VAR {one}" for one, later in pairwise(names)]
        assert chain == [f"VAR {names[0]} = {value}", *links]


def test_kinds_ask_for_what_is_hidden(lm: LM, bound: Make) -> None:
    counts = {"single": 1, "multikey": 1, "multivalue": 2, "tracking": 3}
    for kind, count in counts.items():
        (example,) = bound(kind).examples(lm, LENGTHS, 1, 0)
        prompt = example.payload
        assert len(prompt.others) == (kind == "multikey")
        for query in prompt.queries:
            assert len(query.answers) == len(query.spans) == len(query.facts) == count
            texts = [lm.tokenizer.decode(query.answer[first:last].tolist()) for first, last in query.spans]
            assert texts == [f" {answer}" for answer in query.answers]
            hidden = "".join(lm.tokenizer.decode(fact.ids.tolist()) for fact in query.facts)
            assert all(answer in hidden for answer in query.answers)
            key = query.question.split()[-1].rstrip("?")
            assert key in hidden
            assert lm.tokenizer.decode(query.answer.tolist()) == " " + ", ".join(query.answers)


def test_forms_are_words_or_numbers_of_the_given_digits(lm: LM, bound: Make) -> None:
    forms = {"words": r"[a-z]+-[a-z]+", "numbers": r"\d{4}"}
    for keys, key in forms.items():
        for values, value in forms.items():
            digits = None if keys == values == "words" else 4
            (example,) = bound(keys=keys, values=values, digits=digits).examples(lm, LENGTHS, 1, 0)
            for query in example.payload.queries:
                assert re.fullmatch(rf"What is the magic (word|number) of {key}\?", query.question)
                assert re.fullmatch(value, query.answers[0])
    assert bound().examples(lm, LENGTHS, 2, 0)[0].id == bound().examples(lm, LENGTHS, 1, 0)[0].id
    assert bound().examples(lm, LENGTHS, 1, 0)[0].id != bound().examples(lm, LENGTHS, 1, 1)[0].id


# scores


@pytest.mark.parametrize(
    ("kind", "architecture", "together"),
    [
        *((kind, "llama", kind in ("single", "multivalue")) for kind in KINDS),
        ("tracking", "llama", True),
        ("multivalue", "mamba", False),
    ],
)
def test_forced_scores_equal_one_forward_over_everything(
    kind: str, architecture: str, together: bool, tokenizer: PreTrainedTokenizerFast, bound: Make, tmp_path: Path
) -> None:
    lm, task = wrap(tiny_model(architecture), tokenizer, "tiny"), bound(kind, together=together)
    rows = measured(tmp_path / "run", lm, task)
    examples = {example.id: example for example in task.examples(lm, LENGTHS, 2, 0)}
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        example = examples[row.example]
        which = example.depths.index(row.depth)
        query = example.payload.queries[which]
        before = [*lm.separator.ids, *task.context(lm, example, row.length, which)[0], *query.ids]
        nats, hits = nats_after(lm.model, before, query.answer)
        scored = [place for span in query.spans for place in range(*span)]
        right = [bool(hits[first:last].all()) for first, last in query.spans]
        assert row.scores["nats"] == pytest.approx(float(nats[scored].sum()), rel=1e-4)
        assert row.scores["token_hits"] == hits[scored].double().mean()
        assert row.scores["right"] == np.mean(right)
        assert row.scores.get("exact") == (float(all(right)) if len(right) > 1 else None)
        assert row.scores["context"] == len(before)
        assert row.scores["answers"] == list(query.answers)


def test_a_prompt_does_not_depend_on_the_day(lm: LM, bound: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates such as Llama 3's write the date; another one would make other examples, and a run would have both."""
    monkeypatch.setattr(lm.tokenizer, "chat_template", 'today is {{ strftime_now("%d %b %Y") }}\n' + CHAT)
    [example] = bound(ask="generated").examples(lm, (640,), 1, 0)
    assert lm.tokenizer.decode(example.payload.head.tolist()).startswith("today is 26 Jul 2024\n")
    assert template(lm)[0].startswith(f"today is {datetime.now():%d %b %Y}\n")  # a question of the user


@pytest.mark.parametrize(("end", "begun"), [("bot:\n", "bot:\nThe magic"), ("[/bot]", "[/bot] The magic")])
def test_an_answer_begins_after_the_template_as_the_model_writes_it(end: str, begun: str, text: str) -> None:
    lm = wrap(tiny_model(), blank_first_tokenizer(map(chr, (10, *range(33, 127)))), "tiny")
    lm.tokenizer.chat_template = f"{{{{ messages[0].content }}}}{{{{ {end!r} }}}}"
    needle = BoundNeedle(ask="generated", depths=(0.5,), text=load(text, lm.tokenizer))
    [example] = needle.examples(lm, (2000,), 1, 0)
    assert begun in lm.tokenizer.decode(example.payload.queries[0].ids)


@pytest.mark.parametrize("chat", [None, CHAT])
def test_generated_answers_equal_plain_greedy_decoding(
    chat: str | None, lm: LM, bound: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm.tokenizer, "chat_template", chat)
    task = bound(ask="generated", new_tokens=12)
    rows = measured(tmp_path / "run", lm, task, lengths=(640,))
    examples = {example.id: example for example in task.examples(lm, (640,), 2, 0)}
    assert len(rows) == 2 * 2
    for row in rows:
        example = examples[row.example]
        query = example.payload.queries[example.depths.index(row.depth)]
        ids = [*example.payload.head, *task.context(lm, example, 640, 0)[0], *query.ids]
        shown = lm.tokenizer.decode([int(one) for one in ids])
        if chat:
            before, _, after = template(lm)
            assert shown.startswith(before)
            key = query.question.split()[-1].rstrip("?")
            assert shown.endswith(f"{query.question}{after}The magic number of {key} is")
        else:
            assert "user:" not in shown
        new = greedy_until(lm.model, ids, 12, lm.stop_tokens)
        assert row.scores["prediction"] == lm.tokenizer.decode(new, skip_special_tokens=True)
        assert row.scores["new"] == len(new)


class Finding:
    """A reader that finds the answers in its last `reach` tokens, and generates all numbers there."""

    def __init__(self, lm: LM, reach: int) -> None:
        self.lm, self.reach, self.num_read = lm, reach, 0

    def read(self, *passages: torch.Tensor, head: torch.Tensor) -> "FindingMemory":
        self.num_read += 1
        return FindingMemory(self.lm, torch.cat([head[0], *(ids[0] for ids in passages)]).tolist()[-self.reach :])


class FindingMemory:
    num_encoded = 0

    def __init__(self, lm: LM, known: list[int]) -> None:
        self.lm, self.text, self.num_seen, self.num_kept = lm, lm.tokenizer.decode(known), len(known), len(known)

    def score(self, ids: torch.Tensor, keep: slice) -> Scores:
        answers = self.lm.tokenizer.decode(ids[0, keep].tolist())
        rank = torch.ones(1, len(ids[0, keep]), dtype=torch.long)
        known = [answer in self.text for answer in answers.split(", ")]
        ends = np.cumsum([len(self.lm.tokenizer(part)["input_ids"]) for part in re.findall(r",|[^,]+", answers)])
        for place, right in enumerate(known):
            rank[0, 0 if place == 0 else ends[2 * place - 1] : ends[2 * place]] = int(not right)
        return Scores(rank.float() + 0.5, rank)

    def generate(self, ids: torch.Tensor, new: int, *, stop: list[int]) -> list[torch.Tensor]:
        found = " ".join(re.findall(r"\d{7}", self.text))
        return [torch.tensor(self.lm.tokenizer(found)["input_ids"])]


def results(bound: BoundNeedle, reader: Finding, length: int) -> dict[float, list[dict[str, Any]]]:
    found: dict[float, list[dict[str, Any]]] = {depth: [] for depth in bound.depths}
    examples = bound.examples(reader.lm, (length,), 3, 0)
    order = []
    for result in bound.run(reader, examples):  # type: ignore[arg-type]
        found[result.depth].append(result.scores)
        order.append((result.depth, result.example.repeat))
    assert order == [(depth, repeat) for depth in bound.depths for repeat in range(3)]
    return found


def test_only_needles_within_reach_are_found(lm: LM, bound: Make) -> None:
    found = results(bound(depths=(0.0, 0.5, 1.0)), Finding(lm, 400), 900)
    assert {depth: [one["right"] for one in ones] for depth, ones in found.items()} == {
        0.0: [0.0] * 3,
        0.5: [1.0] * 3,
        1.0: [1.0] * 3,
    }
    for depth, ones in found.items():
        assert all((one["distance"] > 400) == (depth == 0.0) for one in ones)


def test_answers_count_each_and_together(lm: LM, bound: Make) -> None:
    # 4 values from the middle of the hay on; the last tokens have some of them
    for reach, shares in ((2000, {1.0}), (300, {0.25, 0.5, 0.75})):
        (ones,) = results(bound("multivalue", answers=4, depths=(1.0,), spread=0.5), Finding(lm, reach), 1200).values()
        assert {one["right"] for one in ones} <= shares
        assert {one["exact"] for one in ones} == {float(shares == {1.0})}


def test_needles_of_other_depths_in_the_output_are_counted(lm: LM, bound: Make) -> None:
    for together, others in ((True, 2), (False, 0)):
        asked = bound(ask="generated", depths=(0.0, 0.5, 1.0), together=together)
        for ones in results(asked, Finding(lm, 2000), 900).values():
            assert [(one["right"], one["others"]) for one in ones] == [(1.0, others)] * 3


def test_an_answer_inside_a_longer_number_is_not_found() -> None:
    assert _mentions("It is 1234567.", "1234567")
    assert _mentions("quiet-River!", "quiet-river")
    assert not _mentions("It is 12345678.", "1234567")
    assert not _mentions("XABCDE", "ABCDE")


def test_all_depths_of_a_length_share_one_reading(lm: LM, bound: Make) -> None:
    for together, readings in ((True, 1), (False, 3)):
        reader = Finding(lm, 900)
        results(bound(depths=(0.0, 0.5, 1.0), together=together), reader, 900)
        assert reader.num_read == 3 * readings  # of three repeats


def test_without_others_the_text_is_the_same_but_for_the_needles(lm: LM, bound: Make) -> None:
    """One depth has the same prompt in both ways."""
    one, other = (bound(depths=(0.5,), together=together) for together in (True, False))
    for first, second in zip(one.examples(lm, LENGTHS, 2, 0), other.examples(lm, LENGTHS, 2, 0), strict=True):
        for length in LENGTHS:
            given, alone = one.context(lm, first, length, 0), other.context(lm, second, length, 0)
            assert (given[0].tolist(), given[1]) == (alone[0].tolist(), alone[1])


def test_numbers_that_are_not_finite_are_a_row(lm: LM, bound: Make, tmp_path: Path) -> None:
    lm.model.lm_head.weight.data.fill_(torch.nan)
    for ask in ("forced", "generated"):
        rows = measured(tmp_path / ask, lm, bound(ask=ask), lengths=(640,), repeats=1)
        assert [row.status for row in rows] == ["nan", "nan"]
        assert all("right" not in row.scores for row in rows)


@pytest.mark.parametrize("ask", ["forced", "generated"])
@pytest.mark.parametrize("together", [True, False])
def test_a_plan_counts_the_tokens_that_are_fed(
    ask: str, together: bool, lm: LM, bound: Make, planned_and_fed: PlannedAndFed, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = bound("tracking", ask=ask, together=together)
    task = replace(task, new_tokens=30) if ask == "generated" else task
    monkeypatch.setattr(type(lm), "stop_tokens", [])
    planned, fed = planned_and_fed(task, lm, lengths=LENGTHS, repeats=1)
    assert planned == fed


# what is refused


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("kind=singel", "kind = 'singel' is unknown; known are single, multikey, multivalue, tracking .did you mean"),
        ("ask=nicely", "ask = 'nicely' is unknown"),
        ("depths=0+1.5", "depth 1.5 is outside the text: expected 0, its beginning, to 1, its end"),
        ("depths=-0.5", "depth -0.5 is outside the text"),
        ("depths=0+nan", "depth nan is outside the text"),
        ("depths=0.5+0.5", "depths = 0.5.0.5: got a depth twice"),
        ("depths=0+a", "setting depths of task 'needle' must be a number"),
        ("hops=3", "hops has no effect on kind=single: leave it out, or use kind=tracking"),
        ("kind=tracking,keys=words", "keys has no effect on kind=tracking"),
        ("kind=single,distractors=2", "use kind=multikey or kind=multivalue or kind=tracking"),
        ("kind=multikey,distractors=0", "multikey needs at least 1; use kind=single"),
        ("kind=multivalue,answers=1", "answers: got 1, expected 2 to 100"),
        ("kind=multivalue,spread=2", "spread: got 2, expected 0 to 1"),
        ("kind=multivalue,spread=1", "spread = 1 leaves no depths to choose"),
        ("digits=0", "digits: got 0, expected 1 to 15"),
        ("values=words,digits=3", "digits has no effect"),
        ("values=letters", "values = 'letters' is unknown; known are words, numbers"),
        ("new_tokens=9", "new_tokens has no effect on ask=forced"),
        ("depth=0", "has no setting 'depth' .did you mean 'depths'"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        task(f"needle:{wrong}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "lengths", "said"),
    [
        ({}, (300, 900), r"300 tokens is too short: needles and question take \d+, more than three quarters"),
        ({"digits": 1, "depths": tuple(i / 10 for i in range(10))}, (3000,), "10 different numbers .* makes 9"),
        ({"ask": "generated", "new_tokens": 3}, (900,), "new_tokens = 3; the right answers have up to"),
        ({}, (90_000,), "give a text of at least 90,000 tokens"),
    ],
)
def test_needles_that_do_not_fit_are_refused(
    changes: dict[str, Any], lengths: tuple[int, ...], said: str, lm: LM, bound: Make
) -> None:
    with pytest.raises(ValueError, match=said) as error:
        bound(**changes).examples(lm, lengths, 1, 0)
    assert "\n" not in str(error.value)


def test_the_length_that_a_refusal_names_is_enough_for_all_examples(lm: LM, bound: Make) -> None:
    with pytest.raises(ValueError, match="too short") as error:
        bound().examples(lm, (100,), 1, 0)
    least = int(re.findall(r"from (\d+) on", str(error.value))[0])
    for seed in range(20):
        bound().examples(lm, (least,), 8, seed)
    with pytest.raises(ValueError, match="too short"):
        bound().examples(lm, (least - 64,), 1, 0)


def words_alone(*known: str) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, all others unknown."""
    whole = Tokenizer(models.WordLevel({word: i for i, word in enumerate(("<unk>", "<s>", *known))}, unk_token="<unk>"))
    whole.pre_tokenizer = pre_tokenizers.Whitespace()
    whole.normalizer = normalizers.Lowercase()
    return PreTrainedTokenizerFast(tokenizer_object=whole, unk_token="<unk>", bos_token="<s>")


@pytest.mark.parametrize(
    ("kind", "known", "said"),
    [
        ("single", (), r"keys of form words do not tokenise apart: '\w+-\w+' and .* choose keys=numbers"),
        ("tracking", (), "variables do not tokenise apart"),
    ],
)
def test_needles_that_are_the_same_tokens_are_refused(kind: str, known: tuple[str, ...], said: str) -> None:
    lm = wrap(tiny_model(), words_alone(*known), "words")
    hay = Corpus("hay", "hay", np.zeros(4000, np.int64), np.array([0, 4000]))
    with pytest.raises(ValueError, match=said) as error:
        BoundNeedle(kind=kind, text=hay).examples(lm, (1000,), 1, 0)
    assert "\n" not in str(error.value)


def test_an_answer_that_merges_with_the_comma_is_refused() -> None:
    tokens = ["<unk>", "<s>", *map(chr, range(32, 127)), "\n", *(f"{digit}," for digit in range(10))]
    merges = [(str(digit), ",") for digit in range(10)]
    merging = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, unk_token="<unk>"))
    lm = wrap(
        tiny_model(), PreTrainedTokenizerFast(tokenizer_object=merging, unk_token="<unk>", bos_token="<s>"), "merging"
    )
    hay = Corpus("hay", "hay", np.full(4000, 5), np.array([0, 4000]))
    BoundNeedle(text=hay).examples(lm, (2000,), 1, 0)
    with pytest.raises(ValueError, match=r"answer '\d+' does not tokenise apart from the text around it"):
        BoundNeedle(kind="multivalue", text=hay).examples(lm, (4000,), 1, 0)


# everywhere


@pytest.mark.parametrize("engine", ["vLLM", "llama-server"])
@pytest.mark.parametrize("ask", ["forced", "generated"])
def test_a_served_model_has_the_same_answers(engine: str, ask: str, lm: LM, text: str, tmp_path: Path) -> None:
    lm.tokenizer.save_pretrained(tmp_path / "tokenizer")
    spec = f"needle:ask={ask},depths=0.5" + (",new_tokens=9" if ask == "generated" else "")
    options: dict[str, Any] = {"text": text, "lengths": (500,), "repeats": 2}
    here = measure([lm], ["full"], [spec], out=tmp_path / "here", **options).rows
    with serving(Fake(engine, lm, limit=600)) as url:
        there = served(url, tokenizer=str(tmp_path / "tokenizer"))
        found = measure([there], ["full"], [spec], out=tmp_path / "there", **options).rows
    assert [row.status for row in found] == ["ok", "ok"]
    for name in ("right", "token_hits", "prediction", "context"):
        assert [row.scores.get(name) for row in found] == [row.scores.get(name) for row in here]


def test_commands_measure_compare_resume_and_report(
    lm: LM, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for saved in (lm.model, lm.tokenizer):
        saved.save_pretrained("tiny")
    spec = "needle:depths=0+1"
    common = (spec, "tiny", "--text", text, "--lengths", "500,640", "--repeats", 3, "--device", "cpu")
    planned = farspan("task", *common, "--plan")
    assert planned.exit_code == 0
    assert "tokens" in planned.output
    first = farspan("task", *common, "--out", "run")
    assert "by depth: right answers of tiny" in first.output
    assert (Path("run") / "map.png").exists()
    summary = last_line(farspan("task", *common, "--out", "run", "--json"))
    assert summary["task"] == "needle:kind=single,ask=forced,depths=0+1"
    assert [(one["length"], one["num_examples"]) for one in summary["results"]] == [(500, 6), (640, 6)]
    before = read_rows(Path("run"))
    lines = (Path("run") / "rows.jsonl").read_text().splitlines()
    (Path("run") / "rows.jsonl").write_text("\n".join(lines[:5]) + "\n")
    assert farspan("task", *common, "--out", "run").exit_code == 0
    assert [(row.key, row.scores) for row in before] == [(row.key, row.scores) for row in read_rows(Path("run"))]
    compared = last_line(farspan("compare", "tiny", "--task", spec, *common[2:], "--no-cost", "--json"))
    assert [(cell["length"], cell["n"]) for cell in compared["cells"]] == [(500, 6), (640, 6)]
    assert farspan("report", "run", "--out", "page").exit_code == 0
    shown = Path("page/report.md").read_text()
    assert "| depth | 500 | 640 |" in shown
    assert len(Path("page/depths.csv").read_text().splitlines()) == 1 + 2 * 2
    assert "depth 2 is outside" in refused(farspan("task", "needle:depths=2", "tiny"))


def test_p_is_corrected_over_all_cells_of_a_map(tmp_path: Path) -> None:
    rng, source = np.random.default_rng(0), Source("", tmp_path, {"models": {}}, [])
    about = {"score": "right", "name": "right answers", "higher_is_better": True, "exp": False, "graded": True}

    def member(method: str) -> Member:
        where = [(length, depth, i) for length in (500, 640) for depth in (0.0, 1.0) for i in range(4)]
        rows = [
            Row("m", method, "needle", 1, {}, length, i, 0, f"{i}", depth=depth, scores={"right": rng.random()})
            for length, depth, i in where
        ]
        return Member(source, "m", method, rows)

    entry = {"task": "needle", "unit": "tokens", "quality": about}
    group = Group("needle", "needle", "", 1, entry, [member("full"), member("sinks")])
    ((_, other),) = DepthReport([group], tmp_path).by_depth.values()
    cells = [cell for some in other.values() for cell in some]
    assert [cell.p_holm for cell in cells] == holm([cell.p for cell in cells])


def test_a_refused_length_moves_no_number_of_a_table_by_depth(tmp_path: Path) -> None:
    at = [(length, depth, i) for length in (500, 640) for depth in (0.0, 1.0) for i in range(4)]
    rows = [
        Row("m", "full", "needle", 1, {}, length, i, 0, f"{i}", depth=depth, scores={"right": float(length == 640)})
        for length, depth, i in at
    ]
    rows.append(Row("m", "full", "needle", 1, {}, 16, 0, 0, "needle refused", status="refused", reason="too short"))
    about = {"score": "right", "name": "right answers", "higher_is_better": True, "exp": False, "graded": False}
    member = Member(Source("", tmp_path, {"models": {}}, rows), "m", "full", rows)
    group = Group("needle", "needle", "", 1, {"task": "needle", "unit": "tokens", "quality": about}, [member])
    section = DepthReport([group], tmp_path).section(group, 1)
    ((first, second),) = (table["lines"] for table in section["tables"])
    assert section["tables"][0]["head"] == ["depth", "16", "500", "640"]
    assert first[:2] == ["0", "refused"]
    assert second[:2] == ["1", "refused"]
    assert [line[2:] for line in (first, second)] == [["0.000 [0.000, 0.490]", "1.000 [0.510, 1.000]"]] * 2
    (map,) = section["figures"][0]["data"]
    assert (map["x"], map["z"]) == (["16", "500", "640"], [[None, 0.0, 1.0]] * 2)


def test_a_map_has_the_means_of_its_rows(lm: LM, text: str, tmp_path: Path) -> None:
    measure([lm], ["full"], ["needle:depths=0+1"], text=text, lengths=(500, 640), repeats=3, out=tmp_path / "run")
    rows = read_rows(tmp_path / "run")
    changed = [replace(row, scores=row.scores | {"right": float(number % 5 == 0)}) for number, row in enumerate(rows)]
    (source,) = read_sources([tmp_path / "run"])
    groups = grouped([replace(source, rows=changed)], MEMBERS)
    report = DepthReport(groups, tmp_path)
    ((one,),) = report.by_depth.values()
    for depth, cells in one.items():
        for cell in cells:
            mine = [row.scores["right"] for row in changed if (row.depth, row.length) == (depth, cell.length)]
            assert (cell.n, cell.value) == (3, np.mean(mine))
    figure = report.section(groups[0], 1)["figures"][0]
    assert figure["data"][0]["x"] == ["500", "640"]
    assert figure["data"][0]["y"] == ["0", "1"]
    assert figure["data"][0]["z"] == [[pytest.approx(cell.value, abs=1e-5) for cell in cells] for cells in one.values()]
    assert len({cell.value for cells in one.values() for cell in cells}) > 1
    assert "depth 1" in figure["data"][0]["text"][1][0]
