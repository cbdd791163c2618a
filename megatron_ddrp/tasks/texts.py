"""Texts of Python users as rows of pieces, and hidden states of such rows as one vector per text."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from megatron_ddrp.errors import UserError
from megatron_ddrp.tasks.encoder import Encoder
from megatron_ddrp.tasks.finetune.rows import Encoded, RowWriter, text_row

Text: TypeAlias = str | tuple[str, str]
"""One text, or a pair."""
SHORTEST = 5
"""Smallest limit on a row: [CLS], a pair with two [SEP] between its texts, and [SEP] leave no piece in less."""
POOLINGS = ("mean", "cls", "max")


def rows_of(encoder: Encoder, texts: Text | Sequence[Text], max_length: int | None) -> tuple[Encoded, bool]:
    """Return the rows of the texts, cut to `max_length` pieces, and whether it is a single text.

    Warns the caller's caller when texts were cut. Raises `UserError` for anything but texts.
    """
    is_one = isinstance(texts, (str, tuple))
    sides = [_sides(text, place) for place, text in enumerate([texts] if is_one else texts)]
    longest = encoder.max_length if max_length is None else max_length
    if not SHORTEST <= longest <= encoder.max_length:
        raise UserError(f"max_length={longest}: expected {SHORTEST} to {encoder.max_length}, which the encoder knows")
    separators, writer, lengths = encoder.pair_separators, RowWriter(encoder.tokenizer.pad_id), []
    pieces = iter(encoder.tokenizer.encode_batch([side for row in sides for side in row]))
    for row in sides:
        own = [next(pieces) for _ in row]
        lengths.append(sum(map(len, own)) + (2 if len(own) == 1 else 2 + separators))
        writer.add(*text_row(own, encoder.tokenizer, longest, separators))
    if cut := sum(length > longest for length in lengths):
        warnings.warn(
            f"{cut} of {len(lengths)} texts had more than {longest} pieces and were cut (the longest has "
            f"{max(lengths)}); split long texts to keep all of them",
            stacklevel=3,
        )
    return writer.rows(np.zeros(len(sides))), is_one


def _sides(text: Any, place: int) -> tuple[str, ...]:
    """Return a text as one string or two."""
    sides = text if isinstance(text, tuple) and len(text) == 2 else (text,)
    if all(isinstance(side, str) for side in sides):
        return sides
    raise UserError(f"texts[{place}] is {text!r:.60}: expected a string, or a tuple of two strings for a pair")


def pooled(states: Tensor, lengths: Tensor, how: str) -> Tensor:
    """Return one vector per row, `[rows, hidden]`, of states `[rows, seq, hidden]` of rows of `lengths` pieces.

    `how` is one of `POOLINGS`.
    """
    if how == "cls":
        return states[:, 0]
    is_piece = (torch.arange(states.shape[1], device=states.device) < lengths[:, None]).unsqueeze(-1)  # [rows, seq, 1]
    if how == "max":
        return states.masked_fill(~is_piece, -torch.inf).amax(1)
    return (states * is_piece).sum(1) / lengths[:, None]
