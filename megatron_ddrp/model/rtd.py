"""Replaced-token detection with gradient-disentangled embedding sharing (DeBERTaV3, arXiv:2111.09543, section 3).

    E_D = sg(E_G) + E_Δ,  E_Δ = 0 at first
    masked LM teaches E_G and the generator;  replaced-token detection teaches E_Δ and the discriminator alone

sg stops the gradient. The sum of the tables is not made in training: E_D of a token is the sum of two look-ups.
`embeddings.token` is E_G, to which the generator's masked-LM head is tied, `embeddings.difference` is E_Δ; checkpoints
hold both.

The generator has half the layers, each as wide as the discriminator's, and everything but E_G of its own. Both models
are `model/electra.py`'s stages.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.model.electra import Discriminator, Generator, GeneratorEmbeddings
from megatron_ddrp.model.embeddings import Embeddings
from megatron_ddrp.model.heads import ContextualReplacedTokenHead
from megatron_ddrp.model.stages import Judge


class DisentangledEmbeddings(Embeddings):
    """The discriminator's embeddings, whose tokens are E_G + E_Δ. No gradient reaches E_G from here."""

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
        """Make one table, E_G + E_Δ, of the two, in place; the generator keeps E_G. It learns as one from then on."""
        if self.difference is not None:
            merged = self.token.weight + self.difference.weight
            self.token, self.difference = nn.Embedding.from_pretrained(merged, freeze=False), None


class DisentangledElectra(Discriminator):
    """A discriminator whose token embedding is its generator's and a difference of its own."""

    embeddings: DisentangledEmbeddings
    embeddings_class = DisentangledEmbeddings

    def __init__(self, config: ModelConfig, objective: Judge, checkpoint_activations: bool = False) -> None:
        super().__init__(config, objective, checkpoint_activations)
        self.head = ContextualReplacedTokenHead(config, objective)
        shallow = half_as_deep(config)
        embeddings = GeneratorEmbeddings(shallow, objective.notes_share)
        embeddings.token = self.embeddings.token
        self.generator = Generator(shallow, embeddings, objective)
        self.apply(self._initialise)
        assert self.embeddings.difference is not None
        nn.init.zeros_(self.embeddings.difference.weight)

    def merge_embeddings(self) -> None:
        self.embeddings.merge()


def half_as_deep(config: ModelConfig) -> ModelConfig:
    """Return the configuration of the generator: half of the layers, rounded down, at least one."""
    return replace(config, num_layers=max(1, config.num_layers // 2))
