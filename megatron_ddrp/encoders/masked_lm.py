"""Logits of masked pieces from a model of this project or from a Hugging Face masked LM.

Both compute logits for only one place per row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from megatron_ddrp.conversion.foreign_config import OWN_MODEL_TYPE
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.encoders.encoder import Encoder, NoMaskedLM, TrainedEncoder, load_encoder
from megatron_ddrp.model.bert import Bert

SAME_LOGITS = 1e-3
"""Largest difference between two computations of the same logits."""


def load_masked_lm(folder: Path, random_init: bool = False) -> Encoder:
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


def piece_logits(encoder: Encoder, seed: int, device: torch.device) -> PieceLogits:
    """Return the logits module of an encoder from `load_masked_lm`, in eval mode on the device.

    If the encoder was loaded with `random_init`, `seed` draws its weights.
    """
    module = encoder.module if encoder.rebuild is None else encoder.fresh(seed, device)
    model = cast(Any, module.to(device).eval()).model
    return (TrainedLogits if isinstance(model, Bert) else HuggingFaceLogits)(model)
