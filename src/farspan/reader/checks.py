"""Checks of the ids that a memory is given, before torch fails on them with errors of its own."""

import torch
from torch import Tensor

from farspan.lm import LM


def check_ids(lm: LM, ids: Tensor) -> None:
    """Raise ValueError unless ids are rows of tokens of the model, with padding (-1) on the right only.

    Values are checked only where they are in the CPU's memory: elsewhere that would wait for the device.
    """
    if ids.dim() != 2 or ids.dtype != torch.long:
        raise ValueError(f"ids must be int64 of shape [batch, time], not {ids.dtype} {tuple(ids.shape)}")
    if len(ids) == 0:
        raise ValueError("ids: got 0 rows, expected at least 1. Leave out the call if there is nothing to read")
    if ids.device.type != "cpu" or ids.numel() == 0:
        return
    least, most = (int(one) for one in ids.aminmax())
    if most >= lm.vocabulary:
        raise ValueError(
            f"ids: got {most}, expected ids below {lm.vocabulary:,}, the vocabulary of {lm.name}. Tokenise the text "
            "with the model's own tokenizer"
        )
    if least < 0 and bool(((ids[:, :-1] < 0) & (ids[:, 1:] >= 0)).any()):
        raise ValueError("ids: got padding (-1) before a token of its row, expected padding on the right only. Move it")


def check_positions(lm: LM, tokens: int) -> None:
    """Raise ValueError if a text of `tokens` exceeds the model's learned positions."""
    if lm.position_limit is not None and tokens > lm.position_limit:
        raise ValueError(
            f"{lm.name} has {lm.position_limit:,} positions; {tokens:,} tokens do not fit. Give a shorter text"
        )


def check_new_tokens(lm: LM, read: int, more: int, max_new_tokens: int) -> None:
    """Raise ValueError for a negative number of new tokens, or if positions are missing for them after `read` and
    `more` tokens."""
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens: got {max_new_tokens}, expected a number of tokens from 0 on")
    limit = lm.position_limit
    if limit is not None and read + more + max(max_new_tokens, 1) - 1 > limit:  # the last new token is never fed
        most = limit - read - more + 1
        raise ValueError(
            f"{lm.name} has {limit:,} positions: got {read:,} tokens read, {more:,} to continue and max_new_tokens = "
            f"{max_new_tokens:,}, expected at most {limit + 1:,} together. "
            + (f"Use max_new_tokens <= {most:,}, or a shorter text" if most > 0 else "Give a shorter text")
        )
