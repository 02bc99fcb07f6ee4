"""UTF-8 files: their text in blocks, their lines with numbers, and strings that UTF-8 cannot hold."""

import codecs
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

BLOCK = 1 << 20  # characters of a text that are read at once


class TextFile:
    """The text of a UTF-8 file, in blocks, without its byte-order mark and with `\\n` as the only line end.

    Raises, when it is read:
        ValueError: not UTF-8, or UTF-16 or UTF-32 without a byte-order mark, which is UTF-8 with NUL characters.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[str]:
        with _opened(self.path) as file:
            read = 0
            while block := file.read(BLOCK):
                if "\0" in block:
                    raise _with_nul(self.path, f"character {read + block.index(chr(0)):,}")
                read += len(block)
                yield block


def read_text(path: Path) -> str:
    """Return the text of a file, as `TextFile`."""
    return "".join(TextFile(path))


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of the text of a file, as `TextFile`, with their ends."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if "\0" in line:
                raise _with_nul(path, f"line {number:,}")
            yield line


def _with_nul(path: Path, place: str) -> ValueError:
    return ValueError(
        f"{path} is not UTF-8 text: got the character NUL in {place}, as in files in UTF-16 or UTF-32. Convert the "
        "file first, for instance with iconv -f UTF-16LE -t UTF-8, or remove the character"
    )


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    try:
        with path.open(encoding="utf-8-sig") as file:  # universal newlines
            yield file
    except UnicodeDecodeError as error:
        raise _not_utf8(path) from error


def _not_utf8(path: Path) -> ValueError:
    """Return the error for a file that is not UTF-8, which names its first wrong byte."""
    decoder, read = codecs.getincrementaldecoder("utf-8")(), 0
    with path.open("rb") as file:
        while True:
            data = file.read(BLOCK)
            read += len(data)
            try:
                decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                place, byte = read - len(error.object) + error.start, error.object[error.start]
                return ValueError(
                    f"{path} is not UTF-8 text: got the byte 0x{byte:02x} at place {place:,} ({error.reason}). Convert "
                    "the file first, for instance with iconv."
                )


def refuse_surrogates(text: str, where: str) -> None:
    """Raise ValueError if a text holds half of a surrogate pair, which JSON can contain: no tokenizer can read it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} holds {text[error.start]!a} at character {error.start:,}: half of a surrogate pair, expected "
            "characters. Remove it, or write the pair"
        ) from error
