"""Replaced-token detection as in DeBERTaV3 (He et al., arXiv:2111.09543, section 3; released code).

    loss = MLM(generator) + λ · RTD(discriminator),  λ = `--rtd-weight`, 10 as in the released code
    E_D = sg(E_G) + E_Δ,  E_Δ starts at 0
    masked LM trains E_G and the generator;  replaced-token detection trains E_Δ and the discriminator only

sg stops the gradient. Training never adds the two tables: E_D of a token is the sum of two look-ups.
`embeddings.token` is E_G, to which the generator's masked-LM head is tied; `embeddings.difference` is E_Δ.
Checkpoints hold both. The selected pieces always become [MASK].

The generator has half as many layers as the discriminator, of the same width, and shares only E_G with it. Both
models use the stages of `model/electra.py`.

Departure: one backward pass and one optimizer step train both models. The released code by default steps the generator
first and the discriminator next. So our E_D uses E_G from before the step.
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
from megatron_ddrp.objectives.electra import ReplacedTokenDetection


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
    """ELECTRA's two losses, for models that share an embedding without training it in two directions."""

    mask_share, random_share = 1.0, 0.0
    rtd_weight = 10.0
    exported = "contextual-replaced-token"

    def build(self, config: ModelConfig, checkpoint_activations: bool = False) -> Discriminator:
        return DisentangledElectra(config, self, checkpoint_activations)

    def generator_config(self, config: ModelConfig) -> ModelConfig:
        return half_as_deep(config)
