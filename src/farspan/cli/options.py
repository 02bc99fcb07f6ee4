"""What commands share: their options, how errors are said, how a model is loaded."""

import errno
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from farspan.cli import stopping
from farspan.terminal import Terminal

if TYPE_CHECKING:
    from farspan.lm import Load

err = Terminal(stderr=True)
LARGEST = 10**12  # tokens, as in farspan.lengths, whose numpy takes long to import
LONGEST = 1000  # characters of an error


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Spacing(StrEnum):
    linear = "linear"
    log = "log"


Models = Annotated[list[str], typer.Argument(metavar="MODEL...", help="Folders or hub ids of causal models.")]
Methods = Annotated[list[str] | None, typer.Option("--method", help="How the model reads, default full; repeatable.")]
Text = Annotated[str, typer.Option(help="FILE, FOLDER, org/name, builtin, builtin:held-out or random.")]
TargetTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--target-text", help="Text to be copied; default --text. `shuffled`: --text in shuffled order. Repeatable."
    ),
]
PrefixTexts = Annotated[
    list[str] | None,
    typer.Option("--prefix-text", help="Irrelevant text of the control; default the protocol's own. Repeatable."),
]
Warmup = Annotated[
    int | None,
    typer.Option(min=0, max=LARGEST, help="Tokens of a probe that are fed first; default 128, beyond 8,192 512."),
]
Scored = Annotated[
    int | None,
    typer.Option(min=1, max=LARGEST, help="Tokens of a probe that are scored; default 256, beyond 8,192 1,024."),
]
Seed = Annotated[int, typer.Option(min=0, help="Random seed for choosing texts.")]
Points = Annotated[int | None, typer.Option(min=1, max=10_000, help="Lengths in a range A:B, default 16.")]
Out = Annotated[Path | None, typer.Option(help="Run folder; default: one under runs/.")]
Attention = Annotated[str | None, typer.Option(help="Attention implementation of transformers.")]
Chunk = Annotated[int | None, typer.Option(min=1, help="Tokens of one forward.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON last.")]


@dataclass(frozen=True)
class Loading:
    """Options: how models are loaded."""

    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps.")] = None
    device_map: Annotated[str | None, typer.Option(help="`auto` spreads a model over accelerators.")] = None
    dtype: Annotated[Dtype, typer.Option(help="auto: the checkpoint's own.")] = Dtype.auto
    trained_length: Annotated[
        int | None, typer.Option(min=1, max=LARGEST, help="Tokens; overrides the model's config.")
    ] = None
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that comes with the model.")] = False
    allow_pickle: Annotated[bool, typer.Option(help="Also read .bin weights, which can run code.")] = False

    def loader(self, attention: str | None = None) -> "Load":
        """What loads them, with this attention implementation."""
        from farspan.lm import Load

        if self.device is not None and self.device_map is not None:
            raise ValueError("--device and --device-map contradict each other: give one")
        options: dict[str, Any] = {
            "revision": self.revision,
            "trust_remote_code": self.trust_remote_code,
            "allow_pickle": self.allow_pickle,
        }
        if self.device_map is not None:
            options["device_map"] = self.device_map
        return Load(self.dtype.value, self.device, attention, self.trained_length, options)


@dataclass(frozen=True)
class Running:
    """Options: how a measurement is carried out."""

    batch: Annotated[int | None, typer.Option(min=1, help="Repeats read at once; default what fits.")] = None
    chunk: Chunk = None
    plan: Annotated[bool, typer.Option("--plan", help="Say tokens, FLOPs, memory and time; measure nothing.")] = False
    as_json: AsJson = False

    @property
    def kept(self) -> str:
        """What stays of the work where it is stopped."""
        return "" if self.plan else ROWS_KEPT


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """A command as typer wants it: a parameter that is a dataclass becomes an option for each of its fields."""
    groups: dict[str, Any] = {}
    flat: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation):
            groups[name] = parameter.annotation
            flat += inspect.signature(parameter.annotation).parameters.values()
        else:
            flat.append(parameter)

    @wraps(command)
    def called(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    by_name = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in flat]
    called.__signature__ = inspect.Signature(by_name)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return called


ROWS_KEPT = "the rows measured so far are kept, and the same command continues from there"
CHECKPOINT_KEPT = "the same command continues from the last checkpoint"


@contextmanager
def said(kept: str = "") -> Iterator[None]:
    """Errors that a user can correct become one line. `kept`: what stays of the work where it is stopped."""
    try:
        yield
    except KeyboardInterrupt as error:
        err.print_line(stopping.line(kept))
        raise typer.Exit(stopping.exit_code()) from error
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        message = str(error)
        if isinstance(error, OSError) and error.filename is not None and error.strerror:
            message = f"{error.filename}: {error.strerror}"
            if error.errno == errno.ENOSPC and "make room" not in message:
                message += ". Make room and repeat the command"
            elif error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EROFS, errno.ENAMETOOLONG):
                message += ". Choose another file or folder"
        if isinstance(error, RuntimeError | MemoryError):
            from farspan.hf.device import is_out_of_memory

            if not is_out_of_memory(error):
                raise
            first = message.partition("\n")[0]
            message = f"out of memory: {first}; try --dtype bfloat16, --device-map auto or another --device"
        if os.environ.get("FARSPAN_DEBUG"):
            raise
        line = " ".join(f"error: {message}".splitlines())
        if len(line) > LONGEST:  # what is wrong comes first, and what to do last
            line = f"{line[: LONGEST * 2 // 3]} … {line[-LONGEST // 3 :]}"
        err.print_line(line, style="red")
        raise typer.Exit(2) from error


def chosen_lengths(
    lengths: str, points: int | None, spacing: Spacing | None, default: Spacing, *, zero: bool = False
) -> tuple[int, ...] | None:
    """Return the lengths that --lengths, --points and --spacing give; None for `auto`. `zero`: a list may begin with 0,
    the control of tasks that count passages or demonstrations."""
    from farspan.lengths import DEFAULT_POINTS, parse_lengths

    if (points or spacing) and ":" not in lengths:
        raise ValueError("--points and --spacing belong to a range, such as --lengths 512:16384")
    if lengths == "auto":
        return None
    spaced: Literal["linear", "log"] = "log" if (spacing or default) is Spacing.log else "linear"
    first, comma, rest = lengths.partition(",")
    if zero and first.strip() == "0":
        if rest.strip() == "auto":
            raise ValueError(f"lengths {lengths!r} mix numbers and auto: give one of the two")
        return (0, *(parse_lengths(rest, points or DEFAULT_POINTS, spaced) if comma else ()))
    return parse_lengths(lengths, points or DEFAULT_POINTS, spaced)
