"""Long-document understanding: six sets of ZeroSCROLLS, the document before the instruction.

    [before: "Report:\\n"][document]\\n\\n[instruction, with line ends][question]

Shaham et al. 2023, arXiv 2305.14196, as in Yen et al. 2024 (CEPE), arXiv 2402.16617, section 6, appendix C.3, table 4:
their validation sets are those of SCROLLS (Shaham et al. 2022), their templates ZeroSCROLLS' with the document first,
without a chat template. Questions are answered greedily in one line of at most 50 tokens. Summaries have at most 1,024
tokens, those of QMSum and SummScreenFD greedy, those of GovReport sampled (temperature 1, top-p 0.95, at least 10
tokens). Scored by F1 (NarrativeQA, Qasper), accuracy of the letter (QuALITY) and ROUGE-L. ROUGE-1 and ROUGE-2 are also
recorded; SCROLLS takes the geometric mean of the three over a set.

Ours differ from the authors' script: examples are sampled, not the first of the file; a question is scored once, with
all its references (SCROLLS repeats it for each); the letter of QuALITY is that of the equal option, not of the first
that contains the answer, and an "A" is not removed as an article; ROUGE does not stem; no document is cut unless
`truncate` is set.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from farspan.lm import LM
from farspan.specs import choice, limited
from farspan.tasks import scoring
from farspan.tasks.base import Quality
from farspan.tasks.documents import TRUNCATE, Answering, BoundDocuments, DocumentTask, Item
from farspan.tasks.values import inside, rows_of, text_of, texts_of
from farspan.text.tables import Table, hub_table, read_table

QUESTION = Answering(new_tokens=50, one_line=True)
SUMMARY = Answering(new_tokens=1024)
SAMPLED = Answering(new_tokens=1024, min_new_tokens=10, temperature=1.0, top_p=0.95)
CHOICES = re.compile(r"(?P<question>.*?)\s*\(A\)(.*?)\(B\)(.*?)\(C\)(.*?)\(D\)(.*?)\n\n(?P<story>.*)", re.DOTALL)
LETTERS = "ABCD"


@dataclass(frozen=True)
class ScrollsSet:
    """One set: its source, its prompt, and the scoring of its answers."""

    config: str  # its name in tau/scrolls on the hub
    before: str  # before the document
    instruction: str  # with the line ends after it
    question: str  # a template of {question}, or of {question} and {options}; a summary has neither
    noun: str  # names the document in the note that replaces its omitted end
    answering: Answering
    quality: str  # the metric, as tables name it


SETS = {
    "narrativeqa": ScrollsSet(
        config="narrative_qa",
        before="Story:\n",
        instruction="You are given a story, which can be either a novel or a movie script, and a question. Answer the "
        "question as concisely as you can, using a single phrase if possible.\n\n",
        question="Question:\n{question}\n\nAnswer:\n",
        noun="story",
        answering=QUESTION,
        quality="F1",
    ),
    "qasper": ScrollsSet(
        config="qasper",
        before="Article:\n",
        instruction="You are given a scientific article and a question. Answer the question as concisely as you can, "
        "using a single phrase or sentence if possible. If the question cannot be answered based on the information "
        'in the article, write "unanswerable". If the question is a yes/no question, answer "yes", "no", or '
        '"unanswerable".\n\n',
        question="Question:\n{question}\n\nAnswer:\n",
        noun="article",
        answering=QUESTION,
        quality="F1",
    ),
    "quality": ScrollsSet(
        config="quality",
        before="Story:\n",
        instruction="You are provided a story and a multiple-choice question with 4 possible answers (marked by A, B, "
        "C, D). Choose the best answer by writing its corresponding letter (either A, B, C, or D).\n\n",
        question="Question and Possible Answers:\n{question}\n\n{options}\n\nAnswer:",
        noun="story",
        answering=QUESTION,
        quality="accuracy",
    ),
    "govreport": ScrollsSet(
        config="gov_report",
        before="Report:\n",
        instruction="Instruction: You are given a report by a government agency. Write a one-page summary of the "
        "report.\n",
        question="Summary:\n",
        noun="report",
        answering=SAMPLED,
        quality="ROUGE-L",
    ),
    "summ_screen_fd": ScrollsSet(
        config="summ_screen_fd",
        before="Episode Script:\n",
        instruction="You are given a script of a TV episode. Summarize the episode in a paragraph.\n\n",
        question="Summary:\n",
        noun="episode script",
        answering=SUMMARY,
        quality="ROUGE-L",
    ),
    "qmsum": ScrollsSet(
        config="qmsum",
        before="Transcript:\n",
        instruction="You are given a meeting transcript and a query containing a question or instruction. Answer the "
        "query in one or more sentences.\n\n",
        question="Query:\n{question}\n\nAnswer:\n",
        noun="transcript",
        answering=SUMMARY,
        quality="ROUGE-L",
    ),
}


@dataclass(frozen=True)
class ZeroScrolls(DocumentTask):
    """One set of ZeroSCROLLS, `zeroscrolls:set=qmsum,data=FILE,truncate=beginning`."""

    set: str = choice(SETS)
    data: str | None = None  # a file, or a folder with validation.SUFFIX; None: tau/scrolls from the hub
    truncate: str = choice(TRUNCATE, "none")  # the part of a long document to leave out
    new_tokens: int | None = limited(None, 1)  # at most; None: 50 for questions, 1,024 for summaries

    name: ClassVar[str] = "zeroscrolls"

    @property
    def quality(self) -> Quality:
        name = SETS[self.set].quality
        return Quality("score", name, higher_is_better=True, graded=name != "accuracy")

    def on(self, lm: LM, text: str) -> "BoundZeroScrolls":
        known = SETS[self.set]
        how = known.answering if self.new_tokens is None else replace(known.answering, new_tokens=self.new_tokens)
        omitted = f"... [The rest of the {known.noun} is omitted]"
        return BoundZeroScrolls(self.set, tuple(load_items(self.set, self.data)), how, self.truncate, omitted)


class BoundZeroScrolls(BoundDocuments):
    """One set of ZeroSCROLLS with its documents."""

    task: ClassVar[str] = "zeroscrolls"
    version: ClassVar[int] = 1

    def judged(self, prediction: str, item: Item) -> dict[str, float]:
        match SETS[self.set].quality:
            case "accuracy":
                return {"score": float(scoring.choice(prediction, item.options) in item.references)}
            case "F1":
                return {"score": scoring.f1(prediction, item.references)}
            case _:
                each = scoring.rouge(prediction, item.references)
                return {"score": each["rougeL"], **each}


def load_items(name: str, data: str | None) -> list[Item]:
    """Return the questions of a set. The data has the columns of SCROLLS, or those of the set's own publication.

    Raises:
        ValueError: no such data, or other columns or values.
    """
    known = SETS[name]
    if data is None:
        table = hub_table("tau/scrolls", known.config, "validation", converted=True)
    else:
        table = read_table(data, ("validation", known.config))
    own = {"narrativeqa": _narrativeqa, "govreport": _govreport, "qmsum": _qmsum}
    there = table.rows[0].keys()
    if name in own and "input" not in there:
        return list(own[name](known, table))
    return list(_scrolls(name, known, table))


def _item(
    known: ScrollsSet, name: str, document: str, question: str, references: Sequence[str], options: str = ""
) -> Item:
    query = known.question.replace("{options}", options).replace("{question}", question)
    choices = tuple(line[4:] for line in options.split("\n")) if options else ()
    return Item(name, known.before, document.strip(), f"\n\n{known.instruction}{query}", tuple(references), choices)


def _scrolls(name: str, known: ScrollsSet, table: Table) -> Iterator[Item]:
    """Yield items from SCROLLS: question, empty line and document in "input"; a row for each reference, in "output"."""
    id_, input_, output = table.column("id"), table.column("input"), table.column("output")
    rows: dict[str, list[tuple[str, str]]] = {}  # by example: its input, and a reference
    for where, row in table.each:
        text = text_of(row[input_], f"{where}, column {input_!r}")
        one = text, text_of(row[output] or "", f"{where}, column {output!r}")
        rows.setdefault(str(row[id_]), []).append(one)
    for key, same in rows.items():
        text, references = same[0][0], [reference for _, reference in same]
        if any(one != text for one, _ in same):
            raise ValueError(
                f"{table.name}: rows with the id {key} have different inputs. Give each question its own id"
            )
        if name == "quality":
            yield _choice(known, key, text, references)
        elif "{question}" in known.question:
            question, empty, document = text.partition("\n\n")
            if not empty:
                raise ValueError(f"{table.name}: the input of {key} has no empty line between question and document")
            yield _item(known, key, document, question.strip(), references)
        else:
            yield _item(known, key, text, "", references)


def _choice(known: ScrollsSet, key: str, text: str, references: Sequence[str]) -> Item:
    found = CHOICES.fullmatch(text)
    if found is None:
        raise ValueError(f"the input of {key} has no four options marked (A) to (D)")
    options = [" ".join(option.split()) for option in found.groups()[1:5]]
    answers = [" ".join(reference.split()) for reference in references]
    gold = [letter for letter, option in zip(LETTERS, options, strict=True) if option in answers]
    if any(reference.strip() for reference in references) and not gold:
        raise ValueError(f"the answer of {key}, {references[0]!r}, is none of its options {options}")
    marked = "\n".join(f"({letter}) {option}" for letter, option in zip(LETTERS, options, strict=True))
    return _item(known, key, found["story"], found["question"].strip(), gold, marked)


def _narrativeqa(known: ScrollsSet, table: Table) -> Iterator[Item]:
    """Yield items from the set's own form: document.text, question.text, answers with a text each."""
    document, question, answers = table.column("document"), table.column("question"), table.column("answers")
    for number, (place, row) in enumerate(table.each):
        texts = {}
        for column in (document, question):
            where = f"{place}, column {column!r}"
            texts[column] = text_of(inside(row[column], where, "text"), where)
        where = f"{place}, column {answers!r}"
        references = texts_of([inside(one, where, "text") for one in rows_of(row[answers], where)], where)
        yield _item(known, f"row {number}", texts[document], texts[question], references)


def _govreport(known: ScrollsSet, table: Table) -> Iterator[Item]:
    """Yield items from the form of ccdv/govreport-summarization."""
    report, summary = table.column("report"), table.column("summary")
    for number, (where, row) in enumerate(table.each):
        texts = [text_of(row[column] or "", f"{where}, column {column!r}") for column in (report, summary)]
        yield _item(known, f"row {number}", texts[0], "", [texts[1]])


def _qmsum(known: ScrollsSet, table: Table) -> Iterator[Item]:
    """Yield items from the form of Yale-LILY/QMSum: a meeting per row, with general and specific queries."""
    meeting = table.column("meeting_transcripts")
    kinds = table.column("general_query_list"), table.column("specific_query_list")
    for number, (place, row) in enumerate(table.each):
        where = f"{place}, column {meeting!r}"
        turns = rows_of(row[meeting], where)
        transcript = "\n".join(f"{_field(one, 'speaker', where)}: {_field(one, 'content', where)}" for one in turns)
        for kind in kinds:
            where = f"{place}, column {kind!r}"
            for index, query in enumerate(rows_of(row[kind], where)):
                name = f"meeting {number}, {kind.partition('_')[0]} query {index}"
                yield _item(known, name, transcript, _field(query, "query", where), [_field(query, "answer", where)])


def _field(one: Any, key: str, where: str) -> str:
    return text_of(inside(one, where, key), f"{where}, {key!r}")
