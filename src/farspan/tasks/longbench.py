"""LongBench: perplexity on the texts of twelve sets, and answers to the questions of all twenty-one.

view=text       next-token perplexity and accuracy on the contexts of a set, by length: the view of Sparse Memory
                Training, tables 2, 3 and 10. We take its "accuracy" as next-token accuracy: vanilla LLaMA-2 falls
                to about 0.05 on every set, which no task score does.
view=answers    Bai et al. 2024, arXiv 2308.14508: their prompts, lengths of answers and scorers.

The benchmark removes the middle of a prompt that is too long; here a document is cut only if `truncate` is set
(truncate=middle is theirs, but cuts only the document, so that the question always stays). No chat template.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from farspan.files import expanded
from farspan.lm import LM
from farspan.specs import choice, closest, limited
from farspan.tasks import scoring
from farspan.tasks.base import Bound, Quality
from farspan.tasks.documents import TRUNCATE, Answering, BoundDocuments, DocumentTask, Item
from farspan.tasks.perplexity import BoundPerplexity, Perplexity
from farspan.tasks.values import text_of, texts_of
from farspan.text import corpora
from farspan.text.tables import find_table, read_table

VIEWS = ("text", "answers")


@dataclass(frozen=True)
class LongBenchSet:
    """One set: its prompt, the length of its answers, and their scorer."""

    prompt: str  # with {context} and {input}
    new_tokens: int
    scorer: str  # of scoring.LONGBENCH
    one_line: bool = False  # judged by its first line; generated to its end


PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words.\n\n"
    "The following are given passages.\n{context}\n\nAnswer the question based on the given passages. Only give me the "
    "answer and do not output any other words.\n\nQuestion: {input}\nAnswer:"
)
SETS = {
    "narrativeqa": LongBenchSet(
        "You are given a story, which can be either a novel or a movie script, and a question. Answer the question as "
        "concisely as you can, using a single phrase if possible. Do not provide any explanation.\n\nStory: {context}"
        "\n\nNow, answer the question based on the story as concisely as you can, using a single phrase if possible. "
        "Do not provide any explanation.\n\nQuestion: {input}\n\nAnswer:",
        128,
        "F1",
    ),
    "qasper": LongBenchSet(
        "You are given a scientific article and a question. Answer the question as concisely as you can, using a "
        "single phrase or sentence if possible. If the question cannot be answered based on the information in the "
        'article, write "unanswerable". If the question is a yes/no question, answer "yes", "no", or "unanswerable". '
        "Do not provide any explanation.\n\nArticle: {context}\n\n Answer the question based on the above article as "
        "concisely as you can, using a single phrase or sentence if possible. If the question cannot be answered based "
        'on the information in the article, write "unanswerable". If the question is a yes/no question, answer "yes", '
        '"no", or "unanswerable". Do not provide any explanation.\n\nQuestion: {input}\n\nAnswer:',
        128,
        "F1",
    ),
    "multifieldqa_en": LongBenchSet(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the "
        "above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:",
        64,
        "F1",
    ),
    "multifieldqa_zh": LongBenchSet(
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n现在请基于上面的文章回答下面的问题，只告诉我答案，"
        "不要输出任何其他字词。\n\n问题：{input}\n回答：",
        64,
        "F1 (zh)",
    ),
    "hotpotqa": LongBenchSet(PASSAGES, 32, "F1"),
    "2wikimqa": LongBenchSet(PASSAGES, 32, "F1"),
    "musique": LongBenchSet(PASSAGES, 32, "F1"),
    "dureader": LongBenchSet(
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n问题：{input}\n回答：",
        128,
        "ROUGE-L (zh)",
    ),
    "gov_report": LongBenchSet(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\nReport:\n{context}"
        "\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        "ROUGE-L",
    ),
    "qmsum": LongBenchSet(
        "You are given a meeting transcript and a query containing a question or instruction. Answer the query in one "
        "or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the query based on the above meeting transcript "
        "in one or more sentences.\n\nQuery: {input}\nAnswer:",
        512,
        "ROUGE-L",
    ),
    "multi_news": LongBenchSet(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\nNow, write "
        "a one-page summary of all the news.\n\nSummary:",
        512,
        "ROUGE-L",
    ),
    "vcsum": LongBenchSet(
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n会议总结：",
        512,
        "ROUGE-L (zh)",
    ),
    "trec": LongBenchSet(
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}",
        64,
        "accuracy",
        one_line=True,
    ),
    "triviaqa": LongBenchSet(
        "Answer the question based on the given passage. Only give me the answer and do not output any other words. "
        "The following are some examples.\n\n{context}\n\n{input}",
        32,
        "F1",
        one_line=True,
    ),
    "samsum": LongBenchSet(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}",
        128,
        "ROUGE-L",
        one_line=True,
    ),
    "lsht": LongBenchSet("请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}", 64, "accuracy", one_line=True),
    "passage_count": LongBenchSet(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
        "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final count of "
        "unique paragraphs after removing duplicates. The output format should only contain the number, such as 1, 2, "
        "3, and so on.\n\nThe final answer is: ",
        32,
        "count",
    ),
    "passage_retrieval_en": LongBenchSet(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph "
        'that the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer '
        "is: ",
        32,
        "retrieval",
    ),
    "passage_retrieval_zh": LongBenchSet(
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n下面是一个摘要\n\n"
        '{input}\n\n请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：',
        32,
        "retrieval (zh)",
    ),
    "lcc": LongBenchSet("Please complete the code given below. \n{context}Next line of code:\n", 64, "edit similarity"),
    "repobench-p": LongBenchSet(
        "Please complete the code given below. \n{context}{input}Next line of code:\n", 64, "edit similarity"
    ),
}
PAPER = (  # Sparse Memory Training's twelve, its table 10
    "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news",
    "trec", "triviaqa", "passage_count", "passage_retrieval_en", "lcc", "repobench-p",
)  # fmt: skip


@dataclass(frozen=True)
class LongBench(DocumentTask):
    """One set of LongBench, `longbench:set=hotpotqa,view=answers,data=FILE,truncate=middle`."""

    set: str  # one of SETS; view=text: one of PAPER
    view: str = choice(VIEWS, "text")
    data: str | None = None  # a file, or a folder with SET.jsonl
    truncate: str = choice(TRUNCATE, "none")  # the part of a long document to leave out, for view=answers
    new_tokens: int | None = limited(None, 1)  # at most, for view=answers; None: the benchmark's

    name: ClassVar[str] = "longbench"

    def __post_init__(self) -> None:
        known: Sequence[str] = PAPER if self.view == "text" else tuple(SETS)
        super().__post_init__()
        if self.set not in known:
            hint = " to view=text (view=answers has it)" if self.set in SETS else closest(self.set, known)
            raise ValueError(f"longbench set {self.set!r} is unknown{hint}; view={self.view} has {', '.join(known)}")
        if self.view == "text" and (self.truncate != "none" or self.new_tokens is not None):
            raise ValueError("truncate and new_tokens belong to view=answers; view=text reads windows of the texts")

    @property
    def quality(self) -> Quality:
        if self.view == "text":
            return Quality("nats", "perplexity", higher_is_better=False, exp=True)
        return Quality("score", SETS[self.set].scorer, higher_is_better=True, graded=True)

    @property
    def row_task(self) -> str:
        return BoundPerplexity.task if self.view == "text" else self.name

    def on(self, lm: LM, text: str) -> Bound[Any]:
        if self.data is None:
            raise ValueError(
                f"{self} needs data: on the hub LongBench exists only as a script, beside the data.zip of "
                "THUDM/LongBench: unpack that and give its folder (data=FOLDER)"
            )
        if self.view == "text":
            folder = expanded(self.data)
            file = folder / f"{self.set}.jsonl" if folder.is_dir() else folder
            if not file.is_file():
                raise ValueError(
                    f"data {self.data!r} is neither a file nor a folder with {self.set}.jsonl: give the unpacked "
                    "data.zip of THUDM/LongBench"
                )
            return BoundPerplexity(targets="all", text=corpora.load(f"{file}#context", lm.tokenizer))
        scoring.check_installed(SETS[self.set].scorer)
        how = Answering(SETS[self.set].new_tokens if self.new_tokens is None else self.new_tokens)
        return BoundLongBench(self.set, tuple(load_items(self.set, self.data)), how, self.truncate)

    def lengths(self, trained: Sequence[int]) -> tuple[int, ...]:
        """Return, for view=text, powers of two to twice the largest trained length; else the trained lengths."""
        if self.view == "answers":
            return super().lengths(trained)
        return Perplexity(targets="all").lengths(trained)


class BoundLongBench(BoundDocuments):
    """One set of LongBench with its documents, answered."""

    task: ClassVar[str] = "longbench"
    version: ClassVar[int] = 1

    def judged(self, prediction: str, item: Item) -> dict[str, float]:
        known = SETS[self.set]
        answer = prediction.lstrip("\n").split("\n")[0] if known.one_line else prediction
        return {"score": scoring.longbench(known.scorer, answer, item.references, item.options)}


def load_items(name: str, data: str) -> list[Item]:
    """Return the questions of a set, in the benchmark's form.

    Raises:
        ValueError: no such data, or data of another set.
    """
    table = find_table(data, [name]) if expanded(data).is_dir() else read_table(data)
    context, question, answers = table.column("context"), table.column("input"), table.column("answers")
    classes, id_ = table.column("all_classes"), table.column("_id")
    before, _, after = SETS[name].prompt.partition("{context}")
    items = []
    for where, row in table.each:
        dataset = str(row.get("dataset", name)).removesuffix("_e")
        if dataset != name:
            raise ValueError(f"{table.name} holds rows of {dataset!r}, not of {name!r}: give the file of that set")
        rest = after.replace("{input}", text_of(row[question], f"{where}, column {question!r}"))
        document = text_of(row[context], f"{where}, column {context!r}")
        references = texts_of(row[answers], f"{where}, column {answers!r}")
        named = texts_of(row[classes] or [], f"{where}, column {classes!r}")
        items.append(Item(str(row[id_]), before, document, rest, tuple(references), tuple(named)))
    return items
