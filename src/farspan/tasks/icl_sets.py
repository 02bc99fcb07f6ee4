"""Read eleven classification sets for in-context learning (sources, prompts, columns), and generate another.

Prompts are those of CEPE's script, after Ratner et al. 2023, arXiv 2212.10947. Their words for the classes are used if
a set's own names are not words; otherwise class names are those of the set's label column.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from farspan.files import expanded
from farspan.tasks.needle_words import ADJECTIVES, NOUNS
from farspan.tasks.values import text_of
from farspan.text.tables import Table, find_table, hub_table

COPY = "copy"  # the set that is generated
COPY_QUESTION = "Input: {}\nOutput:"
COPY_OUTPUTS = ("alpha", "beta", "gamma", "delta", "kappa", "lambda", "sigma", "omega")
SPLIT_SEED = 42  # for sets without splits: a quarter are questions


@dataclass(frozen=True)
class Labelled:
    """A text and the index of its class."""

    text: str
    label: int


@dataclass(frozen=True)
class IclSet:
    """One classification set: its source, prompt and columns."""

    hub: str
    question: str  # as in `Question: {}\nType:`
    scoring: str = "plain"  # CEPE's table 8
    config: str | None = None
    converted: bool = False  # the hub has it as a script
    splits: tuple[str, str] = ("train", "test")  # of demonstrations, of questions; the same: a quarter are questions
    text: tuple[str, ...] = ("text",)  # columns; the first that exists is used
    label: tuple[str, ...] = ("label",)
    names: tuple[str, ...] = ()  # of the classes in the data, in order; (): from the data
    options: tuple[str, ...] = ()  # the classes as a model scores them; (): names, _ as a space
    lines: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # files of "label text" lines for the two splits
    encoding: str = "utf-8"  # of these


TREC: dict[str, dict[str, str]] = {  # class -> subclass -> its option
    "ABBR": {"": "abbreviation", "abb": "abbreviation", "exp": "expansion"},
    "ENTY": {
        "": "entity", "animal": "animal", "body": "body", "color": "color", "cremat": "creation",
        "currency": "currency", "dismed": "disease", "event": "event", "food": "food", "instru": "instrument",
        "lang": "language", "letter": "letter", "other": "other", "plant": "plant", "product": "product",
        "religion": "religion", "sport": "sport", "substance": "substance", "symbol": "symbol",
        "techmeth": "technique", "termeq": "term", "veh": "vehicle", "word": "word",
    },
    "DESC": {"": "description", "def": "definition", "desc": "description", "manner": "manner", "reason": "reason"},
    "HUM": {"": "human", "gr": "group", "ind": "individual", "title": "title", "desc": "description"},
    "LOC": {
        "": "location", "city": "city", "country": "country", "mount": "mountain", "other": "other", "state": "state",
    },
    "NUM": {
        "": "numeric", "code": "code", "count": "count", "date": "date", "dist": "distance", "money": "money",
        "ord": "order", "other": "other", "period": "period", "perc": "percent", "speed": "speed",
        "temp": "temperature", "volsize": "size", "weight": "weight",
    },
}  # fmt: skip
TREC_FINE = {
    f"{coarse}:{fine}": f"{what['']} {name}" for coarse, what in TREC.items() for fine, name in what.items() if fine
}
OF_TREC = IclSet(
    hub="CogComp/trec",
    converted=True,
    question="Question: {}\nType:",
    lines=(("raw_TREC.train", "train_5500.label"), ("raw_TREC.test", "TREC_10.label")),
    encoding="iso-8859-1",
)

SETS = {
    "sst2": IclSet(
        hub="stanfordnlp/sst2",
        question="Sentence: {}\nSentiment:",
        scoring="calibrated",
        splits=("train", "validation"),
        text=("sentence", "text"),
        names=("negative", "positive"),
        lines=(("stsa.binary.train",), ("stsa.binary.dev",)),
    ),
    "mr": IclSet(
        hub="cornell-movie-review-data/rotten_tomatoes",
        question="Review: {}\nSentiment:",
        names=("neg", "pos"),
        options=("negative", "positive"),
    ),
    "ag_news": IclSet(
        hub="fancyzhx/ag_news",
        question="Article: {}\nTopic:",
        names=("World", "Sports", "Business", "Sci/Tech"),
    ),
    "sst5": IclSet(
        hub="SetFit/sst5",
        question="Sentence: {}\nSentiment:",
        scoring="calibrated",
        splits=("train", "validation"),
        names=("very negative", "negative", "neutral", "positive", "very positive"),
        options=("terrible", "bad", "okay", "good", "great"),
    ),
    "trec_coarse": replace(
        OF_TREC,
        label=("coarse_label",),
        names=tuple(TREC),
        options=tuple(what[""] for what in TREC.values()),
    ),
    "trec_fine": replace(
        OF_TREC,
        label=("fine_label",),
        names=tuple(TREC_FINE),
        options=tuple(TREC_FINE.values()),
    ),
    "dbpedia": IclSet(
        hub="fancyzhx/dbpedia_14",
        question="Input: {}\nType:",
        scoring="both",
        text=("content",),
        names=(
            "Company", "EducationalInstitution", "Artist", "Athlete", "OfficeHolder", "MeanOfTransportation",
            "Building", "NaturalPlace", "Village", "Animal", "Plant", "Album", "Film", "WrittenWork",
        ),
        options=(
            "Company", "School", "Artist", "Athlete", "Politics", "Transportation",
            "Building", "Nature", "Village", "Animal", "Plant", "Album", "Film", "Book",
        ),
    ),
    "nlu_scenario": IclSet(
        hub="xingkunliuxtracta/nlu_evaluation_data",
        converted=True,
        question="Utterance: {}\nScenario:",
        scoring="both",
        splits=("train", "train"),
        label=("scenario",),
    ),
    "nlu_intent": IclSet(
        hub="xingkunliuxtracta/nlu_evaluation_data",
        converted=True,
        question="Utterance: {}\nIntent:",
        splits=("train", "train"),
    ),
    "banking77": IclSet(
        hub="legacy-datasets/banking77",
        question="Query: {}\nIntent:",
        label=("label", "category"),
    ),
    "clinic150": IclSet(
        hub="clinc/clinc_oos",
        config="plus",
        question="Utterance: {}\nIntent:",
        splits=("train", "validation"),
        label=("intent",),
    ),
}  # fmt: skip


def load_set(name: str, data: str | None) -> tuple[tuple[str, ...], tuple[Labelled, ...], tuple[Labelled, ...]]:
    """Return the options, demonstrations and questions of a set.

    Raises:
        ValueError: files, columns or class names are missing or are not the set's.
    """
    known = SETS[name]
    tables = [_split(known, data, which) for which in range(len({*known.splits}))]
    columns = [(table.column(*known.text), table.column(*known.label)) for table in tables]
    names = list(known.names) or _names(tables, [label for _, label in columns])
    pools = [_labelled(table, *both, names) for table, both in zip(tables, columns, strict=True)]
    if len(pools) == 1:
        order = np.random.default_rng(SPLIT_SEED).permutation(len(pools[0]))
        num_questions = len(order) // 4
        pools = [tuple(pools[0][i] for i in order[num_questions:]), tuple(pools[0][i] for i in order[:num_questions])]
    options = known.options or tuple(each.replace("_", " ") for each in names)
    return options, pools[0], pools[1]


def copy_set() -> tuple[tuple[str, ...], tuple[Labelled, ...]]:
    """Return the options and the pairs of the set `copy`: two words and one of eight outputs, at random."""
    inputs = [f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS]
    labels = np.random.default_rng(SPLIT_SEED).permutation(len(inputs)) % len(COPY_OUTPUTS)
    return COPY_OUTPUTS, tuple(Labelled(text, int(label)) for text, label in zip(inputs, labels, strict=True))


def load_own(data: str, text: str, label: str) -> tuple[tuple[str, ...], tuple[Labelled, ...], tuple[Labelled, ...]]:
    """Return the options, demonstrations and questions of a data set of the user's own.

    Args:
        data: a folder with a split for the demonstrations (train) and one for the questions (test, else validation).
        text, label: columns of both. Classes are words; numbers only if parquet files name them.

    Raises:
        ValueError: files or columns that are missing, a row without a text or a class, fewer than two classes, or two
            classes with the same option.
    """
    tables = [find_table(data, ("train",)), find_table(data, ("test", "validation"))]
    for table in tables:
        table.column(text)
        table.column(label)
    names = _names(tables, [label, label])
    options = tuple(each.replace("_", " ").strip() for each in names)
    if len(options) < 2:
        raise ValueError(f"{tables[0].name}: column {label!r} holds one class, {names[0]!r}; at least two are needed")
    for place, option in enumerate(options):
        if option in options[:place]:
            both = names[options.index(option)], names[place]
            raise ValueError(f"classes {both[0]!r} and {both[1]!r} of {tables[0].name} are both scored as {option!r}")
    demonstrations, questions = (_labelled(table, text, label, names) for table in tables)
    return options, demonstrations, questions


def own_question(text: str, label: str) -> str:
    """Return the prompt of a data set of the user's own: the columns' names before the text and the class."""
    before, after = (
        " ".join(name.replace("_", " ").split()).capitalize().replace("{", "{{").replace("}", "}}")
        for name in (text, label)
    )
    return f"{before}: {{}}\n{after}:"


def _labelled(table: Table, text: str, label: str, names: Sequence[str]) -> tuple[Labelled, ...]:
    return tuple(
        Labelled(_text(where, row[text]), _class(where, label, table.names.get(label, names), names, row[label]))
        for where, row in table.each
    )


def _split(known: IclSet, data: str | None, which: int) -> Table:
    if data is None:
        return hub_table(known.hub, known.config, known.splits[which], converted=known.converted)
    folder = expanded(data)
    for file in known.lines[which]:
        if (folder / file).is_file():
            return _labelled_lines(folder / file, known)
    return find_table(folder, [known.splits[which]])


def _labelled_lines(path: Path, known: IclSet) -> Table:
    """Read a file of lines, each a label, a space and a text."""
    rows = []
    for line in path.read_text(known.encoding).split("\n"):
        if line.strip():
            label, _, text = line.strip().partition(" ")
            # TREC's labels are COARSE:fine
            label = label if label in known.names else label.partition(":")[0]
            rows.append({known.text[0]: text, known.label[0]: int(label) if label.isdigit() else label})
    return Table(str(path), rows)


def _names(tables: Sequence[Table], columns: Sequence[str]) -> list[str]:
    """Return the classes' names: the data set's own for the column, else its words, sorted."""
    for table, column in zip(tables, columns, strict=True):
        if column in table.names:
            return table.names[column]
    words: set[str] = set()
    for table, column in zip(tables, columns, strict=True):
        for place, row in table.each:
            word, where = row[column], f"{place}, column {column!r}"
            if not isinstance(word, str) or not word.strip() or word.strip().lstrip("-").isdecimal():
                raise ValueError(
                    f"{where}: got {word!r:.60}, expected the name of a class in words. Numbers are read only from "
                    "parquet files that hold their names, as the hub's do"
                )
            words.add(text_of(word, where))
    return sorted(words)


def _text(where: str, value: Any) -> str:
    text = text_of(value, where).strip()
    if not text:
        raise ValueError(f"{where}: got {value!r:.60}, expected text")
    return text


def _class(where: str, column: str, own: Sequence[str], names: Sequence[str], value: Any) -> int:
    """Return the index of a class among `names`, given by its name or by its number among the data's `own` names."""
    number = str(value).isdecimal() and int(value) < len(own)
    name = own[int(value)] if number and value not in names else value
    if name not in names:
        few = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise ValueError(
            f"{where}, column {column!r}: got class {name!r:.60}, expected 0 to {len(names) - 1}, or {few}"
        )
    return names.index(name)
