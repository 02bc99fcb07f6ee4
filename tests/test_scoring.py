"""Scorers of answers in words, against numbers worked out by hand and, where they are installed, the packages."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from farspan.tasks import scoring
from farspan.tasks.scoring import choice, exact_match, f1, longbench, rouge

FOX = "The quick brown fox jumps over the lazy dog"
DOG = "The quick brown dog jumps on the log."


@pytest.mark.parametrize(
    ("prediction", "references", "score"),
    [
        ("The Eiffel Tower!", ["eiffel tower"], 1.0),
        ("  an  Eiffel\ttower ", ["x", "Eiffel tower"], 1.0),
        ("Eiffel", ["Eiffel tower"], 0.0),
        ("U.S.A.", ["usa"], 1.0),
        ("another", ["other"], 0.0),  # articles are whole words
        ("", ["Paris"], 0.0),
        ("yes", ["Yes."], 1.0),
        ("no", ["yes", "unanswerable"], 0.0),
        ("Unanswerable", ["unanswerable"], 1.0),
        ("naïve café", ["Naïve  Café"], 1.0),
        ("the cat sat", ["cat"], 0.0),
        ("1,000", ["1000"], 1.0),
        ("well-known", ["wellknown"], 1.0),  # punctuation goes, nothing comes in its place
        ("A", ["A"], 1.0),  # an article that is all there is
        ("", ["A"], 0.0),
        ("the", ["A"], 0.0),
        ("the", ["The The"], 0.0),
        ("The The", ["the the"], 1.0),
        ("", ["..."], 0.0),  # punctuation alone is compared as it is written
        ("?", ["..."], 0.0),
        ("...", ["..."], 1.0),
        ("", ["", "cat"], 0.0),
    ],
)
def test_an_exact_match_is_of_normalised_words(prediction: str, references: list[str], score: float) -> None:
    assert exact_match(prediction, references) == score


@pytest.mark.parametrize(
    ("prediction", "references", "score"),
    [
        ("the cat sat", ["a cat sat down"], 2 * (2 / 2) * (2 / 3) / (2 / 2 + 2 / 3)),
        ("cat cat", ["cat"], 2 * (1 / 2) * 1 / (1 / 2 + 1)),  # a word counts as often as it is there
        ("red", ["blue", "dark red"], 2 / 3),
        ("", ["red"], 0.0),
        ("...", ["red"], 0.0),
        ("yes", ["yes"], 1.0),
        ("unanswerable.", ["Unanswerable"], 1.0),
    ],
)
def test_f1_is_of_shared_normalised_words(prediction: str, references: list[str], score: float) -> None:
    assert f1(prediction, references) == pytest.approx(score, abs=1e-12)


def test_rouge_of_the_packages_own_example() -> None:
    found = rouge(DOG, [FOX])
    assert found["rouge1"] == pytest.approx(2 * 0.75 * (6 / 9) / (0.75 + 6 / 9), abs=1e-12)  # 6 of 8, 6 of 9
    assert found["rouge2"] == pytest.approx(2 * 2 / (7 + 8), abs=1e-12)  # the quick, quick brown
    assert found["rougeL"] == pytest.approx(2 * 0.625 * (5 / 9) / (0.625 + 5 / 9), abs=1e-12)


def test_rouge_takes_the_best_reference_for_each_of_its_numbers() -> None:
    found = rouge("a b c d", ["d c b a", "a b x y"])
    assert found == {"rouge1": 1.0, "rouge2": pytest.approx(1 / 3), "rougeL": 0.5}


def test_rouge_of_nothing_is_nothing() -> None:
    assert rouge("", ["some words"]) == rouge("?!", ["some words"]) == {"rouge1": 0.0, "rouge2": 0.0, "rougeL": 0.0}


@pytest.mark.parametrize(
    ("prediction", "letter"),
    [
        ("A", "A"), (" A", "A"), ("(A)", "A"), ("B.", "B"), ("C) because", "C"), ("D\nand", "D"), ("(B) blue", "B"),
        ("A man", None), ("", None), ("Because", None), ("E", None), ("the sea", "C"), ("Sea!", "C"), ("b", None),
    ],
)  # fmt: skip
def test_a_choice_is_its_letter_or_its_whole_text(prediction: str, letter: str | None) -> None:
    assert choice(prediction, ["red", "blue", "the sea", "a"]) == letter


def test_nothing_is_judged_without_a_reference() -> None:
    for judge in (exact_match, f1, rouge, lambda *given: longbench("F1", *given)):
        for references in ([], [""], [" \n"]):
            with pytest.raises(ValueError, match="expected at least one that is not blank"):
                judge("something", references)


CLASSES = ["Color", "Food", "Food and drink"]


@pytest.mark.parametrize(
    ("name", "prediction", "references", "score"),
    [
        ("F1", "the cat sat", ["a cat sat down"], 0.8),
        ("accuracy", "it is Color", ["Color"], 1.0),
        ("accuracy", "Color or Food", ["Color"], 0.5),
        ("accuracy", "Food and drink", ["Food and drink"], 1.0),  # "Food" is part of the right one
        ("accuracy", "Food and drink", ["Food"], 0.5),
        ("accuracy", "color", ["Color"], 0.0),
        ("accuracy", "", ["Color"], 0.0),
        ("count", "There are 7.", ["7"], 1.0),
        ("count", "7 or 8", ["7"], 0.5),
        ("count", "17", ["7"], 0.0),
        ("count", "", ["7"], 0.0),
        ("retrieval", "Paragraph 12, not 3", ["Paragraph 12"], 0.5),
        ("retrieval", "12", ["Paragraph 12"], 1.0),
        ("retrieval (zh)", "段落3", ["段落3"], 1.0),
        ("retrieval (zh)", "没有", ["段落3"], 0.0),
        ("edit similarity", "\n# first\n```\nx = 1\ny = 2", ["x = 1"], 1.0),
        ("edit similarity", "abcd", ["bcde"], 0.75),
        ("edit similarity", "abc", ["abd"], 0.67),  # in whole percent
        ("edit similarity", "# only", ["x"], 0.0),
    ],
)
def test_longbench_judges_as_it_does(name: str, prediction: str, references: list[str], score: float) -> None:
    assert longbench(name, prediction, references, CLASSES) == pytest.approx(score, abs=1e-12)


def test_longbench_takes_the_best_reference() -> None:
    assert longbench("count", "3", ["5", "3"]) == 1.0
    assert longbench("F1", "x y", ["", "x y"]) == 1.0  # a blank one among others


def test_chinese_words_lose_their_punctuation_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = SimpleNamespace(cut=lambda text, cut_all: iter(text))
    monkeypatch.setattr(scoring, "optional_import", lambda module, extra: letters)
    assert longbench("F1 (zh)", "北京。", ["北 京"]) == 1.0
    assert longbench("F1 (zh)", "北，京！大", ["北京"]) == pytest.approx(0.8)
    assert longbench("F1 (zh)", "", ["北京"]) == 0.0


@pytest.mark.parametrize(("name", "module"), [("ROUGE-L", "rouge"), ("F1 (zh)", "jieba"), ("ROUGE-L (zh)", "jieba")])
def test_what_is_not_installed_is_named_with_its_extra(name: str, module: str) -> None:
    if importlib.util.find_spec(module):
        pytest.skip(f"{module} is installed")
    with pytest.raises(ValueError, match=rf"{module}: pip install 'farspan\[tasks\]'"):
        longbench(name, "好", ["好"])


def test_the_other_rouge_counts_each_word_once_and_splits_at_full_stops() -> None:
    pytest.importorskip("rouge")
    # 4 of 5 different words on each side, where rouge-score has 5 of 6
    score = longbench("ROUGE-L", "the cat sat on the mat", ["the cat lay on the mat"])
    assert score == pytest.approx(0.8, abs=1e-6)
    assert rouge("the cat sat on the mat", ["the cat lay on the mat"])["rougeL"] == pytest.approx(5 / 6)
    assert longbench("ROUGE-L", "", ["words"]) == longbench("ROUGE-L", "...", ["words"]) == 0.0


def test_the_other_rouge_counts_as_zero_where_its_package_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, *given: Any) -> Any:
        raise ValueError("Hypothesis is empty.")

    package = SimpleNamespace(Rouge=type("Rouge", (), {"__init__": lambda self, metrics: None, "get_scores": fails}))
    monkeypatch.setattr(scoring, "optional_import", lambda module, extra: package)
    assert longbench("ROUGE-L", "", ["words"]) == 0.0


def test_chinese_rouge_is_of_words() -> None:
    pytest.importorskip("rouge")
    pytest.importorskip("jieba")
    assert longbench("ROUGE-L (zh)", "我来到北京清华大学", ["我来到北京清华大学"]) == pytest.approx(1.0, abs=1e-6)
    assert longbench("F1 (zh)", "我来到北京", ["我来到北京。"]) == 1.0
