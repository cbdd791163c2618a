"""Arguments of Python users: texts as rows of pieces, numbers of layers, and hidden states as one vector per text."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch
from torch import Tensor

from megatron_ddrp.data.preprocess.python_texts import refuse_no_list
from megatron_ddrp.encoders.encoder import Encoder
from megatron_ddrp.encoders.rows import Encoded, RowWriter, text_row, whole_length
from megatron_ddrp.errors import UserError

Text: TypeAlias = str | tuple[str, str]
"""One text, or a pair."""
SHORTEST = 5
"""Smallest limit on a row: [CLS], a pair with two [SEP] between its texts, and [SEP] leave no piece in less."""
POOLINGS = ("mean", "cls", "max")


def rows_of(encoder: Encoder, texts: Text | Sequence[Text], max_length: int | None) -> tuple[Encoded, bool]:
    """Return the rows of the texts, cut to `max_length` pieces, and whether it is a single text.

    Warns the caller's caller when texts were cut or have no known piece. Raises `UserError` for anything but texts.
    """
    is_one = isinstance(texts, (str, tuple))
    refuse_no_list(texts, "a string, a tuple of two strings for a pair, or a list of these")
    sides = [_sides(text, place) for place, text in enumerate([texts] if is_one else texts)]
    longest = encoder.max_length if max_length is None else max_length
    if not (_is_whole(longest) and SHORTEST <= longest <= encoder.max_length):
        raise UserError(
            f"max_length={longest!r:.60}: expected {SHORTEST} to {encoder.max_length}, which the encoder knows"
        )
    form, writer, lengths = encoder.tokenizer.rows, RowWriter(encoder.tokenizer.pad_id), []
    num_unknown, unknown = 0, encoder.tokenizer.unk_id
    pieces = iter(encoder.tokenizer.encode_batch([side for row in sides for side in row]))
    for row in sides:
        own = [next(pieces) for _ in row]
        lengths.append(whole_length(own, form))
        num_unknown += any(own) and all(piece == unknown for side in own for piece in side)
        writer.add(*text_row(own, form, longest)[:2])
    if cut := sum(length > longest for length in lengths):
        warnings.warn(
            f"{cut} of {len(lengths)} texts had more than {longest} pieces and were cut (the longest has "
            f"{max(lengths)}); split long texts to keep all of them",
            stacklevel=3,
        )
    if num_unknown:
        warnings.warn(
            f"{num_unknown} of {len(lengths)} texts had no piece but {encoder.tokenizer.pieces[unknown]}: the "
            "vocabulary knows nothing in them; use an encoder of their language",
            stacklevel=3,
        )
    return writer.rows(np.zeros(len(sides))), is_one


def _sides(text: Any, place: int) -> tuple[str, ...]:
    """Return a text as one string or two."""
    sides = text if isinstance(text, tuple) and len(text) == 2 else (text,)
    if all(isinstance(side, str) for side in sides):
        return sides
    raise UserError(f"texts[{place}] is {text!r:.60}: expected a string, or a tuple of two strings for a pair")


def _is_whole(value: Any) -> TypeGuard[int]:
    """Return whether an argument is a whole number, of Python or of numpy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_count(name: str, value: Any) -> None:
    """Raise `UserError` unless the argument `name` is a whole number of at least 1."""
    if not (_is_whole(value) and value >= 1):
        raise UserError(f"{name}={value!r:.60}: expected a whole number of at least 1")


def layer_number(layer: Any, num_layers: int) -> list[int] | None:
    """Return the layers of `layer_numbers` for a single one. Raises `UserError` unless it is one number or None."""
    if layer is not None and not _is_whole(layer):
        raise UserError(f"layer={layer!r:.60}: expected one number from 0 to {num_layers}, or -1 for the last layer")
    return layer_numbers(layer, num_layers, "layer")[0]


def layer_numbers(layers: Any, num_layers: int, name: str = "layers") -> tuple[list[int] | None, bool]:
    """Return the layers counted from 0, None for the last alone, and whether the result has an axis of layers.

    Raises `UserError` for the argument `name` if it has none of the forms that `TextEncoder.encode` takes.
    """
    if layers is None:
        return None, False
    count, is_one = num_layers + 1, _is_whole(layers)
    if isinstance(layers, str) and layers == "all":
        return list(range(count)), True
    wanted = [layers] if is_one else list(layers) if isinstance(layers, Iterable) else []
    if not wanted or not all(_is_whole(number) and -count <= number < count for number in wanted):
        expected = f"numbers from 0 to {count - 1} (or -1 for the last)"
        raise UserError(f"{name}={layers!r:.60}: expected {expected}" + ', at least one, or "all"' * (name == "layers"))
    return [int(number) % count for number in wanted], not is_one


def pool_rows(states: Tensor, lengths: Tensor, how: str) -> Tensor:
    """Return one vector per row, `[rows, hidden]`, of states `[rows, seq, hidden]` of rows of `lengths` pieces.

    `how` is one of `POOLINGS`.
    """
    if how == "cls":
        return states[:, 0]
    is_piece = (torch.arange(states.shape[1], device=states.device) < lengths[:, None]).unsqueeze(-1)  # [rows, seq, 1]
    if how == "max":
        return states.masked_fill(~is_piece, -torch.inf).amax(1)
    return (states * is_piece).sum(1) / lengths[:, None]
