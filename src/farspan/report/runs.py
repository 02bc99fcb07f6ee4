"""Runs read from disk, and their rows grouped by task: the input of every table and figure."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from farspan.files import expanded
from farspan.record import CONTENTS, DEFAULT_REPEATS, OF_TOKENS, TEXTS, Row, by_key, latest, read_header, read_rows
from farspan.report.header import COST, LABELS, current_header, methods_of, rows_of
from farspan.specs import check_known
from farspan.stats import version_label

RUNS_NAMED = 5  # in an error


@dataclass(frozen=True)
class Source:
    """A run that was read."""

    name: str  # distinguishes it from the other runs of the report
    folder: Path
    header: dict[str, Any]  # run.json in the current form
    rows: list[Row]  # the last of each measurement

    @classmethod
    def of(cls, name: str, folder: str | Path, header: Mapping[str, Any], rows: Iterable[Row]) -> "Source":
        """Return a source whose header has the current form, whatever version of farspan wrote it."""
        last = _without_old_refusals(latest(rows), header["settings"])
        return cls(name, Path(folder), current_header(header, last), last)

    @property
    def is_comparison(self) -> bool:
        """Whether `farspan compare` measured the run: its lines are compared with the first."""
        return bool(self.header["settings"].get("compared"))


def _without_old_refusals(rows: list[Row], settings: Mapping[str, Any]) -> list[Row]:
    """Return rows without the refusals of methods, lengths or repeats that a later command left out."""
    if all(row.status != "refused" for row in rows):
        return rows
    methods, lengths = settings.get("methods", ()), settings.get("lengths")
    each = (row for row in rows if not row.of_all)
    repeats = by_key(((row.model, row.method, row.measurement, row.length), row.repeat) for row in each)

    def holds(row: Row) -> bool:
        if methods and row.method not in methods:
            return False
        if not isinstance(lengths, list) or row.task == COST:  # lengths that were not given
            return True
        found = repeats.get((row.model, row.method, row.measurement, row.length), ())
        return row.length in lengths and len({*found}) < (settings.get("repeats") or DEFAULT_REPEATS)

    return [row for row in rows if row.status != "refused" or holds(row)]


@dataclass(frozen=True)
class Member:
    """One model under one method in one run, with its rows of one task. Classes derived for a task compute their
    numbers once, when they are first read."""

    source: Source
    model: str
    method: str
    rows: list[Row]
    name: str = ""  # distinguishes it from the other members of its group, or of its table
    what: str = ""  # title of its group

    @property
    def whose(self) -> tuple[str, str, str]:
        """The names of run, model and method."""
        return self.source.name, self.model, self.method

    @property
    def about_model(self) -> dict[str, Any]:
        """The entry of the model in run.json."""
        return dict(self.source.header["models"].get(self.model, {}))

    @property
    def trained_length(self) -> int | None:
        """Tokens of the whole context that the model was trained on."""
        length = self.about_model.get("trained_length")
        return None if length is None else int(length)

    @property
    def trained_at(self) -> float | None:
        """The length of the task at which the whole context is as long as the trained one; None where unknown."""
        return self.trained_length

    @property
    def good(self) -> list[Row]:
        """The rows that were measured."""
        return [row for row in self.rows if row.status == "ok"]

    @property
    def failures(self) -> dict[int, str]:
        """The status of the rows that failed, by length."""
        return {row.length: row.status for row in self.rows if row.status != "ok"}

    @cached_property
    def rows_at(self) -> dict[int, list[Row]]:
        """The rows by length."""
        return by_key((row.length, row) for row in self.rows)

    @property
    def lengths(self) -> list[int]:
        """All lengths, ascending."""
        return sorted(self.rows_at)

    def values(self, score: str) -> np.ndarray:
        """Return a score by [repeats, lengths]; NaN where a row failed."""
        repeats = {repeat: line for line, repeat in enumerate(sorted({row.repeat for row in self.rows}))}
        lengths = {length: column for column, length in enumerate(self.lengths)}
        values = np.full((len(repeats), len(lengths)), np.nan)
        for row in self.good:
            values[repeats[row.repeat], lengths[row.length]] = row.scores[score]
        return values


M = TypeVar("M", bound=Member)


@dataclass(frozen=True, eq=False)
class Group:
    """Members whose numbers are comparable: the same task with the same settings, texts and version."""

    task: str  # of its rows
    spec: str  # as the task is spelled
    title: str
    version: int
    entry: Mapping[str, Any]  # of `settings.tasks`: unit, quality and details
    members: list[Member]


def read_sources(folders: Sequence[str | Path], notice: Callable[[str], None] = lambda line: None) -> list[Source]:
    """Read runs; a folder named twice is read once. Runs without rows, empty folders and folders that only hold folders
    of runs (`runs/*` matches them too) are skipped, each with a notice.

    Raises:
        ValueError: no folder, a folder with something other than a run, or no run with rows.
    """
    if not folders:
        raise ValueError("no run was given: name one or more run folders")
    given: dict[Path, Path] = {}
    for folder in map(expanded, folders):
        given.setdefault(folder.resolve(), folder)
    found = []
    for path, name in zip(given.values(), _endings([*given]), strict=True):
        if not (path / "run.json").exists() and any(path.glob("*/run.json")):
            notice(f"{path} is left out: its runs are in folders of their own. Name them: {path}/*")
            continue
        if path.is_dir() and not any(path.iterdir()):
            notice(f"{path} is left out: the folder is empty")
            continue
        _check_run(path)
        header, rows = read_header(path), read_rows(path)
        if rows:
            found.append(Source.of(name, path, header, rows))
        else:
            notice(f"{path} is left out: it holds no rows yet")
    if not found:
        raise ValueError(
            f"{', '.join(map(str, given.values()))}: no run holds rows yet. Repeat the command of a run, or name others"
        )
    return found


def _check_run(path: Path) -> None:
    """Raise ValueError unless a path is a run folder."""
    if (path / "run.json").exists():
        return
    beside = sorted(str(one.parent) for one in path.parent.glob("*/run.json"))
    known = f"; beside it are {', '.join(beside[:RUNS_NAMED])}{', ...' * (len(beside) > RUNS_NAMED)}" if beside else ""
    found = (
        "a folder without run.json" if path.is_dir() else "a file" if path.exists() else "a path that does not exist"
    )
    fix = f"the --out of a command such as `farspan curve` or `farspan compare`{known}"
    fix = str(path.parent) if (path.parent / "run.json").exists() else fix
    raise ValueError(f"{path} holds no run: got {found}, expected a run folder, which contains run.json. Give {fix}")


def read_run(run: str | Path, model: str | None = None) -> Source:
    """Read a run, or its part of one model.

    Raises:
        ValueError: no run, a run without rows, or no such model in it.
    """
    path = expanded(run)
    _check_run(path)
    header, rows = read_header(path), read_rows(path)
    if not rows:
        raise ValueError(no_rows(path))
    source = Source.of(path.resolve().name, path, header, rows)
    if model is None:
        return source
    check_known(f"{run}: model", model, list(dict.fromkeys(row.model for row in source.rows)))
    return of_model(source, model)


def no_rows(run: Path) -> str:
    """Return what is wrong with a run without any row, and how to mend it."""
    return f"{run} holds no rows yet: repeat the command that made it"


def of_model(source: Source, model: str) -> Source:
    """Return one model's part of a run."""
    models = {name: about for name, about in source.header["models"].items() if name == model}
    rows = [row for row in source.rows if row.model == model]
    return replace(source, header=source.header | {"models": models}, rows=rows)


def grouped(sources: Sequence[Source], kinds: Mapping[str, type[Member]] | None = None) -> list[Group]:
    """Return the tasks of some runs with the members that were measured on each, in the order of the runs.

    Args:
        kinds: the class of the members of a task; default Member.
    """
    alike: dict[tuple[Any, ...], list[tuple[_Texts, Group]]] = {}
    for source in sources:
        for key, read, group in _tasks(source, kinds or {}):
            known = alike.setdefault(key, [])
            for other, same in known:
                if read.is_same(other) and same.members[0].source is not source:
                    other.hashes.update(read.hashes)
                    other.contents.update(read.contents)
                    same.members.extend(group.members)
                    break
            else:
                known.append((read, group))
    return _titled([one for some in alike.values() for one in some])


def _comparable(group: Group) -> Mapping[str, Any]:
    """Return the entry of a group. The quality of curves that were measured at different depths, such as in several
    runs, is that of their common `depths`: means over other depths are other numbers."""
    if group.task != "curve":
        return group.entry
    # a length that was refused or had no time has one row, at depth 0
    measured = [{row.depth for row in one.rows if row.status not in ("refused", "budget")} for one in group.members]
    every = [depths for depths in measured if depths]
    if len(set(map(frozenset, every))) < 2:
        return group.entry
    common = sorted(set.intersection(*every))
    quality = group.entry["quality"]
    about = f"{'mean over depths' if len(common) > 1 else 'depth'} {', '.join(f'{depth:g}' for depth in common)}"
    name = f"{quality['name'].partition(' (')[0]} ({about})"
    return {**group.entry, "quality": quality | {"name": name}, "depths": common}


@dataclass(frozen=True)
class _Texts:
    """The texts of a task in one run: their names, and their hashes."""

    names: tuple[str | None, ...]
    hashes: dict[str, tuple[str | None, ...]]  # of tokens, by the tokenizer of the models
    contents: dict[int, str]  # of documents, by place among the names; older runs have none

    def is_same(self, other: "_Texts") -> bool:
        """Return whether two runs have read the same texts: by their tokens, else by their documents, else by name."""
        if shared := self.hashes.keys() & other.hashes.keys():
            return all(self.hashes[one] == other.hashes[one] for one in shared)
        known = self.contents.keys() & other.contents.keys()
        mine, others = (
            [one.contents[at] if at in known else name for at, name in enumerate(one.names)] for one in (self, other)
        )
        return mine == others


def _texts(members: Sequence[Member]) -> _Texts:
    """Return the texts that members of one run and task were measured on."""
    read = [(one.about_model.get("tokenizer"), one.rows[0].settings) for one in members if one.rows]
    each = ((tokenizer, tuple(map(settings.get, OF_TOKENS.values()))) for tokenizer, settings in read)
    hashes = {tokenizer: some for tokenizer, some in each if tokenizer and any(some)}
    names = _names(read[0][1])
    known = {name: hashed for one in members for name, hashed in one.about_model.get(CONTENTS, {}).items()}
    return _Texts(names, hashes, {at: known[name] for at, name in enumerate(names) if name in known})


def _tasks(source: Source, kinds: Mapping[str, type[Member]]) -> Iterator[tuple[tuple[Any, ...], _Texts, Group]]:
    """Yield each measured task of a run: a key that is the same for comparable tasks of other runs, unless their texts
    differ; its texts; and its group."""
    by_spec, methods = rows_of(source.header, source.rows), methods_of(source.header, source.rows)
    tasks = source.header["settings"]["tasks"]
    labels = {spec: _label(entry, spec, by_spec) for spec, entry in tasks.items()}
    for spec, entry in tasks.items():
        task, kind = entry["task"], kinds.get(entry["task"], Member)
        members = [
            kind(source, model, method, by_spec.get((spec, model, method), []))
            for model, about in source.header["models"].items()
            if spec in about.get("tasks", {})
            for method in methods
        ]
        members = [one for one in members if one.rows or one is members[0]]  # the first is the baseline
        if (row := next((row for one in members for row in one.rows), None)) is None:
            continue
        label, texts = labels[spec]
        title = spec if [*labels.values()].count(labels[spec]) > 1 else label
        texts = "" if task in LABELS else texts  # paths, which can differ where the texts are the same
        # rows of a curve hold what any of its versions judged it by
        score = "" if task == "curve" else entry["quality"]["score"]
        key = task, title, texts, row.version, entry["unit"], score
        yield key, _texts(members), Group(task, spec, title, row.version, entry, members)


def _titled(found: Sequence[tuple[_Texts, Group]]) -> list[Group]:
    """Return groups with titles that distinguish them: by whole paths, versions or hashes of texts where needed."""
    titles = [group.title for _, group in found]
    wholes = [_whole(group) if titles.count(group.title) > 1 else group.title for _, group in found]
    groups = []
    for (read, group), whole in zip(found, wholes, strict=True):
        alike = [other for (_, other), title in zip(found, wholes, strict=True) if title == whole]
        title = whole + (version_label(group.version) if len({one.version for one in alike}) > 1 else "")
        if [one.version for one in alike].count(group.version) > 1:
            title += f" ({', '.join(str(one) for some in read.hashes.values() for one in some if one)})"
        groups.append(replace(group, title=title, entry=_comparable(group), members=_named(group.members, title)))
    return groups


def _names(settings: Mapping[str, Any]) -> tuple[str | None, ...]:
    return tuple(map(settings.get, TEXTS))


def _whole(group: Group) -> str:
    """Return the title of a group with the paths of its texts whole."""
    settings = next(one.rows[0].settings for one in group.members if one.rows)
    named = LABELS.get(group.task)
    return named(settings, whole=True) if named and named(settings) == group.title else group.title


def renamed(groups: Sequence[Group], kind: type[M]) -> list[M]:
    """Return the members of some groups that have rows and are of a class, with names for one table or picture."""
    members = [one for group in groups for one in group.members if isinstance(one, kind) and one.rows]
    names = names_of([(one.model, one.method, one.what) for one in members])
    return [replace(one, name=name) for one, name in zip(members, names, strict=True)]


def groups_of_rows(
    rows: Iterable[Row], task: str, kind: type[Member], models: Mapping[str, Mapping[str, Any]] | None = None
) -> list[Group]:
    """Return the groups of one task among rows without a run.

    Args:
        kind: the class of their members.
        models: as run.json records them.
    """
    mine = (row for row in rows if row.task == task)
    return grouped([Source.of("", "", {"settings": {}, "models": models or {}}, mine)], {task: kind})


def _label(
    entry: Mapping[str, Any], spec: str, by_spec: Mapping[tuple[str, str, str], Sequence[Row]]
) -> tuple[str, str]:
    """Return the title of a task, and what distinguishes texts and data of the same name."""
    settings = next((rows[0].settings for (name, _, _), rows in by_spec.items() if name == spec), None)
    if settings is None:
        return spec, ""
    if entry["task"] in LABELS:
        return LABELS[entry["task"]](settings), str(_names(settings))
    return spec, str([settings.get(name) for name in ("text", "text_hash", "data_hash", "index_hash", "keys_hash")])


def cost_rows(source: Source) -> dict[tuple[str, str, int], list[Row]]:
    """Return the rows that hold costs, by model, method and length."""
    return by_key(((row.model, row.method, row.length), row) for row in source.rows if row.task == COST)


def short_names(models: Iterable[str]) -> dict[str, str]:
    """Return the last part of each model's name, or all whole names where last parts are the same."""
    short = {model: model.rstrip("/").rpartition("/")[2] for model in models}
    return short if len(set(short.values())) == len(short) else {model: model for model in short}


def names_of(keys: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return a name for each different (model, method, what): by the parts that differ, or by model where none does."""
    several = [len({key[part] for key in keys}) > 1 for part in range(3)]
    short = short_names(model for model, _, _ in keys)
    words = differences_of([what for _, _, what in keys])
    names = []
    for model, method, what in keys:
        parts = [short[model]] if several[0] or not any(several) else []
        parts += [words[what]] if several[2] else []
        parts += [method] if several[1] else []
        names.append(" ".join(parts))
    return names


def differences_of(titles: Iterable[str]) -> dict[str, str]:
    """Return what distinguishes each of some titles: the parts between commas that are not the same in all. A text and
    its shuffled tokens, such as books and shuffled:books, are called natural and shuffled text."""
    parts = {title: title.split(", ") for title in titles}
    if len({len(one) for one in parts.values()}) == 1:
        differ = [len(set(column)) > 1 for column in zip(*parts.values(), strict=True)]
        parts = {title: list(compress(one, differ)) for title, one in parts.items()}
    names = {title: ", ".join(one) for title, one in parts.items()}
    texts = {name.removeprefix("shuffled:") for name in names.values()}
    if len(texts) == 1 and len(set(names.values())) == 2 and texts != {"random"}:
        return {
            title: f"{'shuffled' if name.startswith('shuffled:') else 'natural'} text" for title, name in names.items()
        }
    return names


def _named(members: Sequence[Member], what: str) -> list[Member]:
    """Return the members of a group with its title and with names: by model, by method if there are several, and by run
    if several runs measured the same."""
    short = short_names(one.model for one in members)
    several = len({one.method for one in members}) > 1
    who = [(one.model, one.method) for one in members]
    named = []
    for one in members:
        parts = [short[one.model]]
        parts += [one.method] if several else []
        parts += [f"({one.source.name})"] if who.count((one.model, one.method)) > 1 else []
        named.append(replace(one, name=" ".join(parts), what=what))
    return named


def _endings(paths: Sequence[Path]) -> list[str]:
    """Return the shortest endings by which these different paths differ."""
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names
