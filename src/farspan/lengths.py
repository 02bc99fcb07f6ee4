"""Parse lengths and depths, and make grids of lengths."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

AUTHORS_POINTS = 32
AUTHORS_SHORTEST = 8
DEFAULT_POINTS = 16
LARGEST = 10**12  # tokens
MOST_DEPTHS = 1000
Spacing = Literal["linear", "log"]


def authors_lengths(longest: int) -> tuple[int, ...]:
    """Return the grid of the authors' script, as their Table 3 used it: linspace(8, longest, 32)."""
    return spaced_lengths(AUTHORS_SHORTEST, longest, AUTHORS_POINTS)


def spaced_lengths(shortest: int, longest: int, points: int, spacing: Spacing = "linear") -> tuple[int, ...]:
    """Return `points` lengths from the shortest to the longest, rounded down, without repetitions.

    Raises:
        ValueError: an impossible range.
    """
    if not 0 < shortest <= longest:
        raise ValueError(f"lengths: got {shortest}:{longest}, expected A:B with 0 < A <= B (--lengths)")
    check_lengths((longest,))
    if points < 1:
        raise ValueError(f"points = {points}; at least 1 is needed")
    space = np.geomspace if spacing == "log" else np.linspace
    # the last bits of geomspace must not lose the end of the range
    values = [math.floor(value + 1e-9) for value in space(shortest, longest, points)]
    return tuple(sorted(set(values)))


def doubled_lengths(first: int, trained: Sequence[int]) -> tuple[int, ...]:
    """Return a length and its doublings up to twice the largest trained length; at least the length itself."""
    return tuple(first << i for i in range(max(1, (2 * max(trained) // first).bit_length())))


def parse_lengths(text: str, points: int, spacing: Spacing) -> tuple[int, ...]:
    """Return lengths from the text of an option: `512,1024,2048`, or `512:16384` with points and spacing.

    Raises:
        ValueError: not numbers, not ascending, not positive.
    """
    try:
        numbers = tuple(int(part) for part in text.split(":" if ":" in text else ","))
        if ":" in text and len(numbers) != 2:
            raise ValueError
    except ValueError as error:
        raise ValueError(
            f"lengths: got {text!r}, expected numbers like 512,1024,2048, a range like 512:16384, or auto"
        ) from error
    if ":" in text:
        return spaced_lengths(numbers[0], numbers[1], points, spacing)
    check_lengths(numbers)
    return numbers


def check_lengths(lengths: Sequence[int]) -> None:
    """Raise ValueError unless the lengths are positive and ascend."""
    if not lengths:
        raise ValueError("lengths: got none, expected one or more (--lengths)")
    if any(length <= 0 for length in lengths):
        raise ValueError(f"lengths: got {list(lengths)}, expected numbers of tokens from 1 on")
    if max(lengths) > LARGEST:
        raise ValueError(f"lengths: got {max(lengths)}, expected at most {LARGEST:,} tokens. Give smaller --lengths")
    if any(a >= b for a, b in pairwise(lengths)):
        raise ValueError(
            f"lengths {list(lengths)} must ascend, each once: write {','.join(map(str, sorted(set(lengths))))}"
        )


def parse_depths(text: str) -> tuple[float, ...]:
    """Return depths from the text of an option: `5`, evenly spaced from 0 to 1, or `0,0.5,1`.

    Raises:
        ValueError: not numbers, or as `refuse_depths`.
    """
    try:
        if text.isdecimal():
            if not 2 <= int(text) <= MOST_DEPTHS:
                raise ValueError
            return tuple(float(depth) for depth in np.linspace(0, 1, int(text)).round(6))
        depths = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(
            f"depths: got {text!r}, expected their number from 2 to {MOST_DEPTHS:,}, like 5, or a list like 0,0.5,1"
        ) from error
    refuse_depths(depths)
    return depths


def refuse_depths(depths: Sequence[float]) -> None:
    """Raise ValueError unless depths ascend from 0 to at most 1."""
    if not depths or depths[0] != 0 or depths[-1] > 1 or not all(a < b for a, b in pairwise(depths)):
        raise ValueError(
            f"depths: got {list(depths)}, expected ascending numbers from 0, the beginning of the text, which gives "
            "the curve, to at most 1, its end"
        )
