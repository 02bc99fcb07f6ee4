"""The text that comes with Python: the files of its library, and the topics of its help.

A twentieth of it is held out, chosen by a hash of each file's path. The part `held-out` is read from a copy that comes
with farspan, of Python 3.11.7, so that measurements on it do not depend on the version of Python. The whole text and
the part `train` are read from the Python that runs. `packaging/held_out.py` makes the copy; its licence is beside it.
"""

import gzip
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path, PurePosixPath

from farspan.files import parse_json

MIN_CHARACTERS = 200
COPY = "assets/library/held-out.json.gz"
TOPICS = "topics/"  # the beginning of the places of topics
IN_NO_TEXT = frozenset({"site-packages", "__pycache__"})  # folders of the library that are not read
TESTS = frozenset({"test", "tests", "idle_test"})


def builtin_texts(part: str = "") -> Iterator[str]:
    """Yield the .py files of Python's library except tests, and the topics of its help, in the order of their places.

    Part `train` is all that is not `held-out`. Parts `train+tests` and `held-out+tests` also have the library's own
    tests, .txt and .rst files; some Python installations lack the tests, and `train+tests` then has fewer texts. Texts
    of fewer than 200 characters and exact duplicates are left out.

    Raises:
        ValueError: an unknown part.
    """
    name, plus, tests = part.partition("+")
    if name not in ("", "train", "held-out") or tests != ("tests" if plus else "") or part == "+tests":
        raise ValueError(
            f"text 'builtin:{part}' is unknown: use builtin, builtin:train or builtin:held-out, the last two also "
            "with +tests"
        )

    def wanted(place: str) -> bool:
        return (tests or not _of_tests(place)) and (not name or is_held_out(place) == (name == "held-out"))

    # a file of `train` that is a copy of a held-out one is left out
    seen = set(builtin_texts(part.replace("train", "held-out"))) if name == "train" else set()
    for place, text in copied() if name == "held-out" else installed(wanted):
        if wanted(place) and len(text) >= MIN_CHARACTERS and text not in seen:
            seen.add(text)
            yield text


def is_held_out(place: str) -> bool:
    """Return whether the file or topic at a place is in the part `held-out`."""
    return int(hashlib.sha256(place.encode()).hexdigest(), 16) % 20 == 0


def _of_tests(place: str) -> bool:
    """Return whether the file at a place is only in the parts with tests."""
    is_topic = place.startswith(TOPICS)
    return not is_topic and (not place.endswith(".py") or not TESTS.isdisjoint(PurePosixPath(place).parent.parts))


def copied() -> Iterator[tuple[str, str]]:
    """Yield place and text of each held-out file in the copy that comes with farspan, in the order of their places."""
    packed = resources.files("farspan").joinpath(COPY).read_bytes()
    yield from sorted(parse_json(gzip.decompress(packed), COPY)["files"].items())


def installed(wanted: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """Yield place and text of each wanted file and topic of the Python that runs, in the order of their places."""
    from pydoc_data.topics import topics

    library = sysconfig.get_path("stdlib")
    places: dict[str, Path | None] = {f"{TOPICS}{topic}": None for topic in topics}
    for folder, folders, names in os.walk(library):
        folders[:] = set(folders) - IN_NO_TEXT
        for file in (Path(folder, name) for name in names if name.endswith((".py", ".txt", ".rst"))):
            places[file.relative_to(library).as_posix()] = file
    places.pop("pydoc_data/topics.py", None)  # the topics
    for place, path in sorted(places.items()):
        if wanted(place):
            try:
                yield place, topics[place.removeprefix(TOPICS)] if path is None else path.read_text("utf-8")
            except UnicodeDecodeError:
                continue  # a few of the library's test files are in other encodings on purpose
