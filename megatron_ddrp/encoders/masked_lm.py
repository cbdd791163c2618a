"""Texts of Python users as rows of pieces, hidden states as one vector per text, and logits of masked pieces.

Logits come from a model of this project or from a masked LM of transformers, for only one place per row.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor, nn

from megatron_ddrp.conversion.families.contract import OWN_MODEL_TYPE
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.preprocess.inputs import refuse_no_list
from megatron_ddrp.encoders.encoder import LoadedEncoder, NoMaskedLM, TrainedEncoder, load_encoder
from megatron_ddrp.encoders.rows import Encoded, RowWriter, text_row, whole_length
from megatron_ddrp.errors import UserError
from megatron_ddrp.model.bert import Bert

Text: TypeAlias = str | tuple[str, str]
"""One text, or a pair."""
SHORTEST = 5
"""Smallest limit on a row: [CLS], a pair with two [SEP] between its texts, and [SEP] leave no piece in less."""
POOLINGS = ("mean", "cls", "max")


def rows_of(encoder: LoadedEncoder, texts: Text | Sequence[Text], max_length: int | None) -> tuple[Encoded, bool]:
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


def layer_numbers(layers: Any, num_layers: int, one: bool = False) -> tuple[list[int] | None, bool]:
    """Return the layers counted from 0, None for the last alone, and whether the result has an axis of layers.

    Raises `UserError` if the argument has none of the forms that `TextEncoder.encode` takes, or with `one` if it is not
    a single layer.
    """
    if layers is None:
        return None, False
    count, is_one = num_layers + 1, _is_whole(layers)
    if isinstance(layers, str) and layers == "all" and not one:
        return list(range(count)), True
    wanted = [layers] if is_one else list(layers) if isinstance(layers, Iterable) and not one else []
    if not wanted or not all(_is_whole(number) and -count <= number < count for number in wanted):
        if one:
            raise UserError(f"layer={layers!r:.60}: expected one number from 0 to {num_layers}, or -1 for the last")
        expected = f"numbers from 0 to {num_layers} (or -1 for the last)"
        raise UserError(f'layers={layers!r:.60}: expected {expected}, at least one, or "all"')
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


SAME_LOGITS = 1e-3
"""Largest difference between two computations of the same logits."""


def load_masked_lm(folder: Path, random_init: bool = False) -> LoadedEncoder:
    """Load a training checkpoint or Hugging Face folder with its masked-LM head.

    Raises:
        UserError: as in `load_encoder`, and for a run that trained a discriminator (`NoMaskedLM`).
    """
    encoder = load_encoder(folder, random_init, masked_lm=True)
    if isinstance(encoder.module, TrainedEncoder) and not isinstance(encoder.module.model, Bert):
        raise NoMaskedLM(
            folder,
            "the run trained a discriminator, and its generator is another, narrower encoder; use a run with a "
            "masked-LM objective",
        )
    return encoder


class TrainedLogits(nn.Module):
    """Logits for one place per row, of a model of this project, through its mask decoder if it has one."""

    def __init__(self, model: Bert) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        """Return logits `[rows, vocab]` for `ids`, int64 `[rows, length]` unpadded, at `places`, int64 `[rows]`."""
        batch = Batch.of_texts(ids, torch.ones_like(ids))
        return self.model.predict(batch._replace(labels=batch.labels.scatter(1, places[:, None], 0)))


class HuggingFaceLogits(nn.Module):
    """Logits for one place per row, of a masked LM of transformers; its head gets the states of that place alone.

    Hooks cut the hidden states before the head. If the head of a model reads them from elsewhere, the logits of the
    first rows differ, and the model then computes the logits of all places. Only one thread may use the model.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.places: Tensor | None = None
        self.is_narrow: bool | None = None
        if model.config.model_type == OWN_MODEL_TYPE:  # a mask decoder may come before the head and needs all states
            model.head.register_forward_pre_hook(lambda _, given: (self._cut(given[0]), *given[1:]))
        else:
            model.base_model.register_forward_hook(self._cut_output)

    def _cut(self, hidden: Tensor) -> Tensor:
        """Cut hidden states `[rows, length, hidden]` to `[rows, 1, hidden]` while `places` is set."""
        if self.places is None:
            return hidden
        return hidden[torch.arange(len(hidden), device=hidden.device), self.places].unsqueeze(1)

    def _cut_output(self, _: nn.Module, __: Any, output: Any) -> Any:
        output["last_hidden_state"] = self._cut(output["last_hidden_state"])
        return output

    def _all_places(self, ids: Tensor, places: Tensor) -> Tensor:
        return self.model(ids).logits[torch.arange(len(ids), device=ids.device), places]

    def _one_place(self, ids: Tensor, places: Tensor) -> Tensor:
        self.places = places
        try:
            return self.model(ids).logits[:, 0]
        finally:
            self.places = None

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        """Return logits as `TrainedLogits` does."""
        if self.is_narrow is None:
            some, where = ids[:8], places[:8]
            difference = self._one_place(some, where) - self._all_places(some, where)
            self.is_narrow = bool(difference.abs().max() <= SAME_LOGITS)
        return self._one_place(ids, places) if self.is_narrow else self._all_places(ids, places)


PieceLogits: TypeAlias = TrainedLogits | HuggingFaceLogits


def piece_logits(encoder: LoadedEncoder, seed: int, device: torch.device) -> PieceLogits:
    """Return the logits module of an encoder from `load_masked_lm`, in eval mode on the device.

    If the encoder was loaded with `random_init`, `seed` draws its weights.
    """
    module = encoder.module if encoder.rebuild is None else encoder.fresh(seed, device)
    model = cast(Any, module.to(device).eval()).model
    return (TrainedLogits if isinstance(model, Bert) else HuggingFaceLogits)(model)
