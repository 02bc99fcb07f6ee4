"""UTF-8 files: their text in blocks, their lines with numbers, and strings that UTF-8 cannot hold."""

import codecs
import io
from collections.abc import Iterator
from pathlib import Path

BLOCK = 1 << 20  # bytes of a file that are read at once


class TextFile:
    """The text of a file, in blocks: UTF-8 without its byte-order mark, with `\\n` at the end of each line.

    Raises, when it is read:
        ValueError: not UTF-8.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[str]:
        decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")(), translate=True)
        read, first = 0, True
        with self.path.open("rb") as file:
            while True:
                data = file.read(BLOCK)
                read += len(data)
                try:
                    text = decoder.decode(data, final=not data)
                except UnicodeDecodeError as error:
                    raise _not_utf8(self.path, read - len(error.object), error) from error
                if first and text:
                    text, first = text.removeprefix("\ufeff"), False
                if text:
                    yield text
                if not data:
                    return


def read_text(path: Path) -> str:
    """Return the text of a file, as `TextFile`."""
    return "".join(TextFile(path))


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a UTF-8 file that are not blank, with their numbers from 1.

    Raises:
        ValueError: not UTF-8.
    """
    number = start = 0
    with path.open("rb") as file:
        for data in file:
            try:
                text = data.decode()
            except UnicodeDecodeError as error:
                raise _not_utf8(path, start, error) from error
            start += len(data)
            if not number:
                text = text.removeprefix("\ufeff")
            for line in text.removesuffix("\n").removesuffix("\r").split("\r"):
                number += 1
                if line.strip():
                    yield number, line


def _not_utf8(path: Path, start: int, error: UnicodeDecodeError) -> ValueError:
    place, byte = start + error.start, error.object[error.start]
    return ValueError(
        f"{path} is not UTF-8 text: got the byte 0x{byte:02x} at place {place:,} ({error.reason}). Convert the file "
        "first, for instance with iconv."
    )


def refuse_surrogates(text: str, where: str) -> None:
    """Raise ValueError if a text holds half of a surrogate pair, as JSON may spell it: no tokenizer can read it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} holds {text[error.start]!a} at character {error.start:,}: half of a surrogate pair, expected "
            "characters. Remove it, or write the pair"
        ) from error
