"""Score text answers as each benchmark does. Scores are from 0 to 1, for the best reference. References
that are all blank are a ValueError.

exact_match, f1   of normalised words: lower case, no punctuation, no articles (Rajpurkar et al. 2016, SQuAD 1.1)
rouge             F1 of shared words, word pairs and the longest common subsequence (Lin 2004), by the package
                  rouge-score without stemming, as in SCROLLS (Shaham et al. 2022)
choice            the letter of a multiple-choice question (QuALITY)
LONGBENCH         the scorers of LongBench (Bai et al. 2024, arXiv 2308.14508, table 1), among them the ROUGE of another
                  package, which splits at full stops, counts each word once, and joins the parts

Ours differ from CEPE's evaluation script: ROUGE does not stem; a reference that is only an article ("A") keeps it,
since an empty result would equal any empty answer.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from functools import partial
from typing import Any

from farspan.extras import optional_import

ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
ROUGES = ("rouge1", "rouge2", "rougeL")
# the punctuation that LongBench removes from Chinese words, besides ASCII's
CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」"
    "『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
NO_CHINESE_PUNCTUATION = str.maketrans("", "", string.punctuation + CHINESE_PUNCTUATION)
LEFT_OUT_OF_CODE = ("`", "#", "//")  # a line with one of these is a comment or a fence


def normalised(text: str) -> str:
    """Return a text in lower case, without punctuation and extra spaces, and without articles unless it has no other
    words."""
    words = text.lower().translate(NO_PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", words).split()) or " ".join(words.split())


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """Return 1 if the normalised prediction equals a normalised reference, else 0.

    A text of punctuation alone is not normalised, since the empty result would equal an empty answer. An empty
    reference among others equals no prediction.
    """

    def key(text: str) -> str:
        return normalised(text) or " ".join(text.split())

    return float(key(prediction) in {key(reference) for reference in _some(references)} - {""})


def f1(prediction: str, references: Sequence[str]) -> float:
    """Return F1 of the normalised words that prediction and reference share."""
    return longbench("F1", prediction, references)


def rouge(prediction: str, references: Sequence[str]) -> dict[str, float]:
    """Return F1 of ROUGE-1, ROUGE-2 and ROUGE-L, each for its best reference. Needs the extra `tasks`."""
    package = optional_import("rouge_score.rouge_scorer", "tasks")
    scorer = package.RougeScorer(ROUGES, use_stemmer=False)
    each = [scorer.score(reference, prediction) for reference in _some(references)]
    return {name: max(float(scores[name].fmeasure) for scores in each) for name in ROUGES}


def choice(prediction: str, options: Sequence[str]) -> str | None:
    """Return the letter, A for the first, of the option that a prediction names; None if it names none.

    It names an option by beginning with its capital letter, with or without a bracket, before punctuation or the end,
    or by equalling the option's text (normalised)."""
    letters = string.ascii_uppercase[: len(options)]
    if found := re.match(rf"\W*([{letters}])\s*(?:[).:,;\n]|$)", prediction):
        return found[1]
    answer = normalised(prediction)
    meant = (letter for letter, option in zip(letters, options, strict=True) if answer and answer == normalised(option))
    return next(meant, None)


def _some(references: Sequence[str]) -> Sequence[str]:
    if not any(reference.strip() for reference in references):
        raise ValueError(f"references: got {list(references)}, expected at least one that is not blank")
    return references


def _f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    shared = sum((Counter(prediction) & Counter(reference)).values())
    return 2 * shared / (len(prediction) + len(reference)) if shared else 0.0


# the scorers of LongBench: each takes a prediction, one reference and the names of the classes


def _code_similarity(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """Return the similarity of the prediction's first line of code and the reference, rounded to 0.01."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in LEFT_OUT_OF_CODE)), "")
    return round(100 * SequenceMatcher(None, line, reference).ratio()) / 100


def _classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """Return 1 / n if n classes are named and the right one is among them, else 0.

    As in the benchmark, classes whose name is part of the right one's are removed from the list during the loop over
    it, so the class after a removed one is not tested and may stay."""
    named = [name for name in classes if name in prediction]
    for name in named:
        if name in reference and name != reference:
            named.remove(name)
    return 1 / len(named) if reference in named else 0.0


def _numbers(prediction: str, reference: str, classes: Sequence[str], *, marker: str) -> float:
    """Return the share of the prediction's numbers that equal the one after the marker in the reference."""
    wanted = re.search(marker + r"(\d+)", reference)
    if wanted is None:
        raise ValueError(f"reference {reference!r} has no number after {marker!r}")
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(wanted[1]) / len(numbers) if numbers else 0.0


def _word_f1(prediction: str, reference: str, classes: Sequence[str]) -> float:
    return _f1(normalised(prediction).split(), normalised(reference).split())


def _chinese_f1(prediction: str, reference: str, classes: Sequence[str]) -> float:
    def words(text: str) -> list[str]:
        cleaned = ("".join(word.lower().translate(NO_CHINESE_PUNCTUATION).split()) for word in _chinese_words(text))
        return [word for word in cleaned if word]

    return _f1(words(prediction), words(reference))


def _joined_rouge(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """Return F1 of ROUGE-L by the package `rouge`; 0 if it raises an error, such as for an empty text, as in the
    benchmark."""
    scorer = optional_import("rouge", "tasks").Rouge(metrics=["rouge-l"])
    try:
        return float(scorer.get_scores(prediction, reference)[0]["rouge-l"]["f"])
    except (ValueError, RecursionError):
        return 0.0


def _chinese_rouge(prediction: str, reference: str, classes: Sequence[str]) -> float:
    return _joined_rouge(" ".join(_chinese_words(prediction)), " ".join(_chinese_words(reference)), classes)


def _chinese_words(text: str) -> list[str]:
    words: Any = optional_import("jieba", "tasks").cut(text, cut_all=False)
    return list(words)


LONGBENCH: dict[str, Callable[[str, str, Sequence[str]], float]] = {
    "F1": _word_f1,
    "F1 (zh)": _chinese_f1,
    "ROUGE-L": _joined_rouge,
    "ROUGE-L (zh)": _chinese_rouge,
    "accuracy": _classification,
    "count": partial(_numbers, marker=""),
    "retrieval": partial(_numbers, marker="Paragraph "),
    "retrieval (zh)": partial(_numbers, marker="段落"),
    "edit similarity": _code_similarity,
}


NEEDED = {"F1 (zh)": ("jieba",), "ROUGE-L": ("rouge",), "ROUGE-L (zh)": ("rouge", "jieba")}  # packages of an extra


def check_installed(name: str) -> None:
    """Raise ValueError if LongBench's metric `name` needs a package that is not installed."""
    for module in NEEDED.get(name, ()):
        optional_import(module, "tasks")


def longbench(name: str, prediction: str, references: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Return the score of the best reference under LongBench's metric `name`, a key of LONGBENCH."""
    return max(LONGBENCH[name](prediction, reference, classes) for reference in _some(references))
