"""ELECTRA, DeBERTaV3's variant of it, and the dictionary of rare words of Taking Notes on the Fly.

    ReplacedTokenDetection   loss = MLM(generator) + 50 · RTD(discriminator)
    DisentangledDetection    loss = MLM(generator) + λ · RTD(discriminator),  E_D = sg(E_G) + E_Δ
    NoteDictionary           input at a rare word's pieces = (1 − λ)(token + position) + λ · NoteDict(w)

The classes have the sources and our departures. `model/bert.py` has the models, `model/heads.py` the formulas of
sampling and detection.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from megatron_ddrp.config import ModelConfig, ObjectiveConfig
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.word_counts import Occurrences, RareWords, find_occurrences
from megatron_ddrp.model.bert import (
    Discriminator,
    Electra,
    Generator,
    GeneratorEmbeddings,
    OfGenerator,
    SampleKeys,
    generator_config,
)
from megatron_ddrp.model.embeddings import Embeddings
from megatron_ddrp.model.heads import ContextualReplacedTokenHead, rtd_sums
from megatron_ddrp.model.stages import DTYPES, End, Judge, NoteInputs
from megatron_ddrp.objectives.contract import Objective, Rate, Term, sample_keys


class ReplacedTokenDetection(Objective):
    """The generator's masked LM and the discriminator's detection of replaced tokens: ELECTRA.

        loss = MLM(generator) + 50 · RTD(discriminator)        (Clark et al., arXiv:2003.10555)

    `--rtd-weight` replaces the 50.
    """

    mask_share, random_share = 0.85, 0.0
    rates = (
        Rate("generator_accuracy", of="generator_correct", per="predicted"),
        Rate("rtd_accuracy", of="rtd_correct", per="tokens", label="rtd accuracy"),
        Rate("rtd_recall", of="replaced_found", per="replaced", label="recall"),
        Rate("replaced_share", of="replaced", per="tokens"),
    )
    generates = True
    exported = "replaced-token"
    left_out = (*Objective.left_out, "generator.")
    travelling = (SampleKeys, OfGenerator)

    @property
    def terms(self) -> tuple[Term, ...]:
        return (*super().terms, Term("rtd_loss", "tokens", "rtd", self.config.rtd_weight or 0.0))

    def build(self, config: ModelConfig, checkpoint_activations: bool = False) -> Discriminator:
        return Electra(config, self.config, self, checkpoint_activations)

    def generator_config(self, config: ModelConfig) -> ModelConfig:
        return generator_config(config, self.config)

    def draw_own(self, batch: Batch, seed: int, step: int) -> SampleKeys:
        return SampleKeys(sample_keys(batch.sequence_ids, batch.position_ids, seed, step))

    def own_sums(self, end: End) -> dict[str, Tensor]:
        generator = end.state.own
        inputs = end.state.inputs
        logits = end.head.logits(end.hidden, inputs.layout.runs)
        loss, correct, replaced, found = rtd_sums(logits, inputs.batch.labels)
        return {
            "lm_loss": generator.lm,
            "generator_correct": generator.correct,
            "rtd_loss": loss,
            "rtd_correct": correct,
            "replaced": replaced,
            "replaced_found": found,
        }


class DisentangledEmbeddings(Embeddings):
    """The discriminator's embeddings, E_G + E_Δ. They send no gradient to E_G."""

    tables = ("token", "difference")

    def __init__(self, config: ModelConfig, notes_share: float = 0.0, shared: Embeddings | None = None) -> None:
        super().__init__(config, notes_share, shared)
        self.difference: nn.Embedding | None = nn.Embedding(self.token.num_embeddings, self.token.embedding_dim)

    def look_up(self, input_ids: Tensor) -> Tensor:
        if self.difference is None:
            return self.token(input_ids)
        return self.token(input_ids).detach() + self.difference(input_ids)

    @torch.no_grad()
    def merge(self) -> None:
        """Merge both tables into one, E_G + E_Δ, in place. It then trains as one; the generator keeps E_G."""
        if self.difference is not None:
            merged = self.token.weight + self.difference.weight
            self.token, self.difference = nn.Embedding.from_pretrained(merged, freeze=False), None


class DisentangledElectra(Discriminator):
    """A discriminator whose token embedding is its generator's plus a learned difference."""

    embeddings: DisentangledEmbeddings
    embeddings_class = DisentangledEmbeddings

    def __init__(self, config: ModelConfig, objective: Judge, checkpoint_activations: bool = False) -> None:
        super().__init__(config, objective, checkpoint_activations)
        self.head = ContextualReplacedTokenHead(config, objective)
        shallow = half_as_deep(config)
        embeddings = GeneratorEmbeddings(shallow, objective.notes_share)
        embeddings.token = self.embeddings.token
        self.generator = Generator(shallow, embeddings, objective)
        self.initialise()
        assert self.embeddings.difference is not None
        nn.init.zeros_(self.embeddings.difference.weight)

    def merge_embeddings(self) -> None:
        self.embeddings.merge()


def half_as_deep(config: ModelConfig) -> ModelConfig:
    """Return the generator's configuration: half as many layers, rounded down, at least one."""
    return replace(config, num_layers=max(1, config.num_layers // 2))


class DisentangledDetection(ReplacedTokenDetection):
    """ELECTRA's two losses, for models that share an embedding without training it in two directions: DeBERTaV3.

        loss = MLM(generator) + λ · RTD(discriminator),  λ = `--rtd-weight`, 10 as in the released code
        E_D = sg(E_G) + E_Δ,  E_Δ starts at 0
        masked LM trains E_G and the generator;  replaced-token detection trains E_Δ and the discriminator only

    (He et al., arXiv:2111.09543, section 3; released code.) sg stops the gradient. Training never adds the two tables:
    E_D of a token is the sum of two look-ups. `embeddings.token` is E_G, to which the generator's masked-LM head is
    tied; `embeddings.difference` is E_Δ. Checkpoints hold both. The selected pieces always become [MASK].

    The generator has half as many layers as the discriminator, of the same width, and shares only E_G with it.

    Departure: one backward pass and one optimizer step train both models. The released code by default steps the
    generator first and the discriminator next. So our E_D uses E_G from before the step.
    """

    mask_share, random_share = 1.0, 0.0
    rtd_weight = 10.0
    exported = "contextual-replaced-token"

    def build(self, config: ModelConfig, checkpoint_activations: bool = False) -> Discriminator:
        return DisentangledElectra(config, self, checkpoint_activations)

    def generator_config(self, config: ModelConfig) -> ModelConfig:
        return half_as_deep(config)


def window_places(windows: np.ndarray) -> np.ndarray:
    """Return `NoteInputs.windows`, int64 `[n, widest]`, from the begin and end of each window, int64 `[n, 2]`."""
    begin, end = windows[:, :1], windows[:, 1:]
    places = begin + np.arange((end - begin).max(initial=0))
    return np.where(places < end, places, -1)


class NoteDictionary:
    """Notes of rare words, contexts in which they occurred: Taking Notes on the Fly (Wu et al., arXiv:2008.01466).

        input at a rare word's pieces:   (1 − λ)(token + position) + λ · NoteDict(w)
        note of an occurrence:           mean of the last hidden states from k tokens before the word to k after it
        after the step:                  NoteDict(w) ← (1 − γ) NoteDict(w) + γ · (mean note of w in the global batch)

    Departure: a word's first note is stored unblended, and before it λ acts as 0. Random vectors, blended from the
    first note on, would put noise into the input.

    Where the paper is silent: a window ends with its sequence, including [CLS] and [SEP], and the mean divides by the
    true number of tokens. A note is read only if no piece of its word is selected for masking, since the note would
    reveal the label. Under ELECTRA the discriminator's hidden states make the notes; generator and discriminator read
    them at the same places. No gradient enters a note.

    The dictionary is in host memory, not on a GPU and not among the parameters, because a step uses only a few hundred
    of its rows. Every process holds the same copy, because every process applies the same update. `objective` gives λ,
    γ, k and the dtype.

    Attributes:
        words: the rare words, numbered from 1.
        notes: `[words, hidden]` in the chosen dtype; rows of words not met yet are 0 and take no memory.
        met: bool `[words]`, True for words that have a note.
    """

    def __init__(self, words: RareWords, hidden_size: int, objective: ObjectiveConfig) -> None:
        self.words = words
        self.notes = torch.zeros(len(words), hidden_size, dtype=DTYPES[objective.notes_dtype])
        self.met = torch.zeros(len(words), dtype=torch.bool)
        self.decay, self.window = objective.notes_decay, objective.notes_window

    @property
    def size_bytes(self) -> int:
        """Memory of the notes when every word has been met."""
        return self.notes.nbytes

    def inputs(self, batch: Batch) -> tuple[NoteInputs, Occurrences]:
        """Return the model's note inputs for a micro-batch of numpy arrays, and the occurrences for new notes."""
        found = find_occurrences(batch, self.window)
        words = torch.from_numpy(found.read_words) - 1  # [m]
        known = self.met[words]
        places = torch.from_numpy(found.read_places)[known]
        vectors = self.notes[words[known]].float()
        return NoteInputs(places, vectors, torch.from_numpy(window_places(found.windows))), found

    def update(self, occurrences: np.ndarray, notes: np.ndarray | Tensor) -> None:
        """Add all notes `[n, hidden]` of a global batch; `occurrences` int64 `[n, 3]`: word, sequence, position.

        Rows may come in any order: they are sorted by (word, sequence, position) and summed in double precision, so
        every layout gets the same dictionary. Notes that are not finite, from a step that overflowed, are left out.
        """
        notes = torch.as_tensor(notes)
        finite = np.flatnonzero(notes.isfinite().all(-1).numpy())
        if not len(finite):
            return
        order = finite[np.lexsort(occurrences[finite, ::-1].T)]
        unique, row = np.unique(occurrences[order, 0], return_inverse=True)
        sums = torch.zeros(len(unique), notes.shape[1], dtype=torch.float64)
        sums.index_add_(0, torch.from_numpy(row), notes[torch.from_numpy(order)].double())
        means = sums / torch.from_numpy(np.bincount(row)).unsqueeze(-1)
        index = torch.from_numpy(unique) - 1
        old = self.notes[index].double()
        share = torch.where(self.met[index], self.decay, 1.0).double().unsqueeze(-1)  # a first note enters whole
        self.notes[index] = ((1 - share) * old + share * means).to(self.notes.dtype)
        self.met[index] = True
