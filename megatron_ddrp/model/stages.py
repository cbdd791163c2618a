"""Types that travel between stages: `Inputs` → first → `State` → layers → `State` → last → `ModelOutput`.

All three are named tuples of tensors, Python numbers, named tuples, tuples and None. DeepSpeed's hooks and torch's
activation checkpointing look into these types only. One process passes them on in memory; `parallel/pipeline.py` alone
knows how they travel between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Name of a precision → dtype of torch."""


class Draws(NamedTuple):
    """Random choices of an objective for one micro-batch. Code reads their shapes, so it never waits for the device."""

    token_mask: Tensor
    """int64 `[batch, documents, seq]`: 1 at the tokens that TCD compares in each document of a row.
    `[batch, documents, 0]` switches TCD off."""
    heads: Tensor
    """int64 `[layers, m′]`: numbers of the heads that HCD compares, ascending; `[layers, 0]` switches HCD off."""
    own: Any = None
    """Result of the objective's `draw_own`, a named tuple of tensors, or None."""

    @property
    def num_documents(self) -> int:
        """Largest number of documents in a row."""
        return self.token_mask.shape[1]

    def with_documents(self, count: int) -> Draws:
        """Return the draws for rows of up to `count` documents; the added ones are empty."""
        rows, documents, compared = self.token_mask.shape
        empty = self.token_mask.new_zeros(rows, count - documents, compared)
        return self._replace(token_mask=torch.cat([self.token_mask, empty], dim=1))

    @classmethod
    def none(cls, batch_size: int, num_layers: int, device: torch.device | None = None) -> Draws:
        """Return draws that switch TCD and HCD off."""
        return cls(
            torch.empty(batch_size, 1, 0, dtype=torch.long, device=device),
            torch.empty(num_layers, 0, dtype=torch.long, device=device),
        )


class Layout(NamedTuple):
    """Places of a micro-batch's tokens. They are computed on the CPU, so no stage has to ask the device."""

    predicted: Tensor
    """int64 `[num_predicted]`: flat places `row · seq + column` of the predicted tokens, ascending."""
    queries: Tensor
    """int64 `[batch, most]`: columns of each row that the mask decoder computes: first the predicted tokens, then other
    columns as filling. `most` is the largest number of predicted tokens in a row."""
    answers: Tensor
    """int64 `[num_predicted]`: flat places in `queries` of the predicted tokens, in the order of `predicted`."""
    runs: Tensor
    """int32 `[runs + 1]`: flat places where a document or padding begins, ascending, then the number of places."""
    longest: int
    """Length of the longest run, in tokens."""
    full: bool
    """True if every row is one document without padding."""
    restarts: bool
    """True if a row restarts its positions after its first token, other than by the zeros of padding on its right."""
    causal: bool = False
    """True in a causal phase: no token attends to those that follow it, and each one predicts the next."""


def layout_of(batch: Batch, causal: bool = False) -> Layout:
    """Return the layout of a batch of numpy arrays, on the CPU, or of tensors, on their device.

    A batch of tensors makes the CPU wait for the device that holds it.
    """
    fields = (batch.labels, batch.document_ids, batch.position_ids)
    labels, documents, positions = (f.cpu().numpy() if isinstance(f, Tensor) else f for f in fields)
    predicted = labels != IGNORED_LABEL  # [batch, seq]
    counts = predicted.sum(axis=1)
    most = int(counts.max(initial=0))
    begins = np.ones(documents.shape, dtype=bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    runs = np.append(np.flatnonzero(begins), documents.size)

    def tensor(array: np.ndarray) -> Tensor:
        made = torch.from_numpy(np.ascontiguousarray(array))
        return made.to(batch.labels.device) if isinstance(batch.labels, Tensor) else made

    return Layout(
        predicted=tensor(np.flatnonzero(predicted)),
        queries=tensor((~predicted).argsort(axis=1, kind="stable")[:, :most]),
        answers=tensor(np.flatnonzero(np.arange(most) < counts[:, None])),
        runs=tensor(runs.astype(np.int32)),
        longest=int(np.diff(runs).max(initial=0)),
        full=bool((documents == 1).all()),
        restarts=bool(((positions != np.arange(positions.shape[1])) & (positions != 0)).any()),
        causal=causal,
    )


class Inputs(NamedTuple):
    """Input of the first stage: one micro-batch."""

    batch: Batch
    draws: Draws
    notes: NoteInputs | None
    layout: Layout
    """Layout of the batch before any stage replaces its ids and labels."""

    @classmethod
    def of(cls, batch: Batch, draws: Draws, notes: NoteInputs | None = None) -> Inputs:
        """Return the inputs with the layout of `batch`. Waits for the device of `batch`; see `layout_of`."""
        return cls(batch, draws, notes, layout_of(batch))

    @property
    def predicted_labels(self) -> Tensor:
        """Labels of the predicted tokens, int64 `[num_predicted]`; valid until a stage replaces the labels."""
        return self.batch.labels.flatten().index_select(0, self.layout.predicted)


class State(NamedTuple):
    """Input and output of every encoder layer."""

    inputs: Inputs
    """The micro-batch; ELECTRA's sampling stage puts replaced ids and new labels here."""
    hidden: Tensor
    """`[batch, seq, hidden]`; `[batch, ⌈seq / ranks⌉, hidden]` between the cut regions of sequence parallelism."""
    position: tuple[Tensor, ...]
    """Tensors of the position encoding; empty if every layer has an encoding of its own."""
    heads: Tensor
    """int64 `[layers, m′]`: heads that HCD compares in each layer; `[layers, 0]` in ELECTRA's generator."""
    counted: Tensor
    """fp32 `[batch, documents]`: 1 for documents of at least two tokens, which HCD counts, else 0."""
    head_cosine: Tensor
    """fp32 (or fp64) scalar: HCD's cosine summed over documents and over the layers so far."""
    own: Any = None
    """Named tuple of tensors that earlier stages or layers leave for the objective's sums, or None."""

    @property
    def learned(self) -> list[Tensor]:
        """Tensors that a layer reads and that may have gradients: hidden states, HCD's cosine, positions."""
        return [self.hidden, self.head_cosine, *self.position]

    def with_learned(self, tensors: Sequence[Tensor]) -> State:
        """Return a state with other tensors of `learned`."""
        hidden, cosine, *position = tensors
        return self._replace(hidden=hidden, head_cosine=cosine, position=tuple(position))


LEARNED = ("hidden", "position", "head_cosine", "own")
"""Fields of `State` whose floating-point tensors receive gradients."""


class ModelOutput(NamedTuple):
    """Output of the last stage."""

    sums: Tensor
    """fp32 (or fp64) `[n]`: sums over the micro-batch, in the order of the objective's `sum_names`."""
    notes: Tensor | None = None
    """`[occurrences, hidden]`: new notes of rare words, see `objectives/electra.py`."""


class End(NamedTuple):
    """Input of an objective's sums in the last stage."""

    state: State
    hidden: Tensor
    """`[batch, seq, hidden]`: the last hidden states, after the final LayerNorm of a pre-LN model."""
    head: Any
    """The model's head, a module of `model/heads.py`."""
    predicted: Tensor | None = None
    """`[num_predicted, hidden]`: hidden states of the predicted tokens, in the order of the labels."""


class Judge(Protocol):
    """The part of an objective that a model calls (`objectives/contract.py`)."""

    @property
    def notes_share(self) -> float:
        """λ of Taking Notes: the share of a note in the input; 0 without notes."""

    @property
    def looks_inside(self) -> bool:
        """True if layers must call `look_inside`."""

    def modules(self, hidden_size: int) -> nn.Module | None:
        """Return the objective's own modules, or None."""

    def look_inside(self, state: State, attended: Any) -> Any:
        """Return the next state's `own`, computed from a layer's input state and its `Attended`."""

    def output(self, end: End) -> ModelOutput:
        """Return the sums of the objective's terms and rates, and the new notes."""


class NoteInputs(NamedTuple):
    """Notes that a micro-batch reads, and the windows from which new notes are made.

    With `blend` and `window_means` they are the model's part of Taking Notes on the Fly (Wu et al., arXiv:2008.01466).
    `objectives/electra.py` has the formula and keeps the dictionary.
    """

    places: Tensor
    """int64 `[m]`: flat places `row · seq + column` of the pieces that read a note."""
    vectors: Tensor
    """fp32 `[m, hidden]`: the note that each piece reads."""
    windows: Tensor
    """int64 `[occurrences, widest]`: flat places of the tokens in each rare word's window; −1 is filling."""


def wide(x: Tensor) -> Tensor:
    """Return `x` in fp32, or unchanged if its type is as wide or wider."""
    return x.float() if x.dtype.itemsize < 4 else x


def blend(hidden: Tensor, places: Tensor, vectors: Tensor, mix: float) -> Tensor:
    """Return `hidden` `[batch, seq, hidden]` with (1 − mix)·x + mix·note at the flat `places` `[m]`.

    `vectors` `[m, hidden]` are the notes. Computed as x + mix·(note − x), so that mix = 0 changes no bit.
    """
    flat = hidden.flatten(0, 1)
    towards = mix * (vectors.to(hidden.dtype) - flat.index_select(0, places))
    return flat.index_add(0, places, towards).view_as(hidden)


def window_means(hidden: Tensor, windows: Tensor) -> Tensor:
    """Return new notes, fp32 (or fp64) `[n, hidden]`, detached: means of `hidden` `[batch, seq, hidden]` per window.

    `windows` int64 `[n, widest]`, see `NoteInputs`.
    """
    hidden, inside = hidden.detach().flatten(0, 1), windows >= 0
    states = hidden[windows.clamp_min(0)]  # [n, widest, hidden]
    return wide(states).masked_fill(~inside.unsqueeze(-1), 0.0).sum(1) / inside.sum(1, keepdim=True)


def copies_of_weights(stage: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters in the memory of a stage's own, without their hooks.

    DeepSpeed's hooks hold nodes that take the weights' gradients on its first stream, which no capture may reach.
    """
    return {name: nn.Parameter(p.detach(), p.requires_grad) for name, p in stage.named_parameters()}


def run_stage(
    stage: nn.Module, given: Any, compute_dtype: torch.dtype | None, weights: Mapping[str, Tensor] | None = None
) -> Any:
    """Run a stage or a whole model, with `compute_dtype` on copies of its weights in that type.

    `weights` take the place of its own. Gradients reach the weights through the copies, in the weights' own type.
    """
    if compute_dtype is None and weights is None:
        return stage(given)
    used: dict[str, Tensor] = dict(stage.named_parameters() if weights is None else weights)
    if compute_dtype is not None:
        used = {name: weight.to(compute_dtype) for name, weight in used.items()}
    return functional_call(stage, used, (given,))
