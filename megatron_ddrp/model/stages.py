"""What travels from stage to stage: `Inputs` → first stage → `State` → layers → `State` → last stage → `Output`.

All three are named tuples of tensors, Python numbers, named tuples, tuples and None: DeepSpeed's hooks and torch's
recomputation look into these and into nothing else. One process hands them on in memory; `parallel/pipeline.py` alone
knows how they travel between ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.model.notes import NoteInputs


class Draws(NamedTuple):
    """The random choices of an objective for one micro-batch. Their shapes say what there is to do, without a sync."""

    token_mask: Tensor
    """int64 `[batch, documents, seq]`: 1 at the tokens of TCD, by the documents of a row; `[batch, documents, 0]`
    switches TCD off."""
    heads: Tensor
    """int64 `[layers, m′]`: HCD's head numbers, ascending; `[layers, 0]` switches HCD off."""
    own: Any = None
    """A named tuple of tensors, the objective's `draw_own`, or None."""

    @property
    def num_documents(self) -> int:
        """The largest number of documents in a row."""
        return self.token_mask.shape[1]

    @classmethod
    def none(cls, batch_size: int, num_layers: int, device: torch.device | None = None) -> Draws:
        """Return draws that switch both terms off."""
        return cls(
            torch.empty(batch_size, 1, 0, dtype=torch.long, device=device),
            torch.empty(num_layers, 0, dtype=torch.long, device=device),
        )


class Layout(NamedTuple):
    """Where a micro-batch has its tokens. It is known on the CPU, so that no stage asks the device for it."""

    predicted: Tensor
    """int64 `[num_predicted]`: flat places `row · seq + column` of the tokens to predict, ascending."""
    queries: Tensor
    """int64 `[batch, most]`: columns that the mask decoder asks in each row: those to predict, then others to fill up.
    `most` is the largest number of tokens to predict in a row."""
    answers: Tensor
    """int64 `[num_predicted]`: flat places in `queries` of the tokens to predict, in the order of `predicted`."""
    runs: Tensor
    """int32 `[runs + 1]`: flat places where a document, or padding, begins, ascending; last the number of places."""
    longest: int
    """Places of the longest run."""
    full: bool
    """Whether every row is one document without padding."""
    restarts: bool
    """Whether a row counts positions anew after its first token, other than by the zeros of padding on its right."""


def layout_of(batch: Batch) -> Layout:
    """Return the layout of a batch of numpy arrays, on the CPU, or of tensors, on their device.

    Waits for the device that holds a batch of tensors.
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
    )


class Inputs(NamedTuple):
    """One micro-batch, as the first stage takes it."""

    batch: Batch
    draws: Draws
    notes: NoteInputs | None
    layout: Layout
    """The layout of the batch as it came, whatever a stage does to ids and labels later."""

    @classmethod
    def of(cls, batch: Batch, draws: Draws, notes: NoteInputs | None = None) -> Inputs:
        """Return the inputs with the layout of `batch`; waits for its device, see `layout_of`."""
        return cls(batch, draws, notes, layout_of(batch))

    @property
    def predicted_labels(self) -> Tensor:
        """Labels of the tokens to predict, int64 `[num_predicted]`; valid until a stage replaces the labels."""
        return self.batch.labels.flatten().index_select(0, self.layout.predicted)


class State(NamedTuple):
    """What every encoder layer reads and returns."""

    inputs: Inputs
    """The micro-batch; ELECTRA's sampling stage puts replaced ids and new labels here."""
    hidden: Tensor
    """`[batch, seq, hidden]`; `[batch, ⌈seq / ranks⌉, hidden]` between the cut regions of sequence parallelism."""
    position: tuple[Tensor, ...]
    """The position encoding's tensors; empty where every layer has an encoding of its own."""
    heads: Tensor
    """int64 `[layers, m′]`: HCD's heads in the layers that follow; `[layers, 0]` in ELECTRA's generator."""
    counted: Tensor
    """fp32 `[batch, documents]`: 1 for the documents that HCD counts, those with two tokens or more, else 0."""
    head_cosine: Tensor
    """fp32 (or fp64) scalar: HCD summed over documents and layers, as far as the layers have come."""
    own: Any = None
    """A named tuple of tensors that earlier stages or layers leave for the objective's sums, or None."""


LEARNED = ("hidden", "position", "head_cosine", "own")
"""Fields of `State` whose floating-point tensors receive gradients."""


class Output(NamedTuple):
    """What the last stage returns."""

    sums: Tensor
    """fp32 (or fp64) `[n]`: sums over the micro-batch, in the order of the objective's `sum_names`."""
    notes: Tensor | None = None
    """`[occurrences, hidden]`: the notes taken, see `objectives/notes.py`."""


class End(NamedTuple):
    """What an objective makes its sums of, in the last stage."""

    state: State
    hidden: Tensor
    """`[batch, seq, hidden]`: the last hidden states, after the final LayerNorm of a pre-LN model."""
    head: Any
    """The model's head, a module of `model/heads.py`."""
    predicted: Tensor | None = None
    """`[num_predicted, hidden]`: hidden states where masked LM predicts, in the order of the labels."""


class Judge(Protocol):
    """The part of an objective that a model calls (`objectives/contract.py`)."""

    @property
    def notes_share(self) -> float:
        """λ of Taking Notes: the share of a note in the input; 0 without notes."""

    @property
    def looks_inside(self) -> bool:
        """Whether layers are to call `look_inside`."""

    def modules(self, hidden_size: int) -> nn.Module | None:
        """Return the objective's own modules, or None."""

    def look_inside(self, state: State, attended: Any) -> Any:
        """Return the `own` of the next state, from what entered a layer and its `Attended`."""

    def output(self, end: End) -> Output:
        """Return the sums of the objective's terms and rates, and the notes taken."""
