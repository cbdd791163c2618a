"""ELECTRA as stages: generator's embeddings and layers, the sampling stage, discriminator's layers and head.

    ids with [MASK] → generator → sampling → ids with replacements → discriminator → replaced or not

The discriminator is the encoder proper: its parameters have the names of a `Bert`'s, and `encode`, export and
fine-tuning use it alone. DeBERTaV3's variant (`objectives/rtd.py`) uses `Discriminator`, `Generator` and
`SamplingStage` too.

ELECTRA's generator, under `generator.`, has as many layers as the discriminator, max(1, round(heads · f)) heads (halves
round to even) of the same head size, feed-forward blocks of 4 × its width, and its own relative position parameters. As
in the original, the discriminator's token, segment and absolute position embeddings are summed, blended with notes and
normalised by the discriminator's LayerNorm at the discriminator's width, then projected to the generator's width. The
output matrix is the same token embedding. Older checkpoints, whose LayerNorm is not shared, have
`FormerGeneratorEmbeddings`.

Departure: f is 1/3 unless `--generator-size` is given. The original has 1/3 at base size only, and 1/4 in its small and
large models. With 16 heads, f = 1/3 gives 5 heads, 320 dimensions instead of 256.

The generator is a masked LM, so it has DeBERTa's mask decoder where a `Bert` would have it; the discriminator has none.
TCD, HCD and notes belong to the discriminator.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron_ddrp.config import ModelConfig, ObjectiveConfig
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.model.bert import Encoder, decodes_masks
from megatron_ddrp.model.embeddings import Embeddings, check_length
from megatron_ddrp.model.encoder import EncoderLayer
from megatron_ddrp.model.fused import Norm
from megatron_ddrp.model.heads import EnhancedMaskDecoder, MaskedLMHead, ReplacedTokenHead, replace_tokens, rtd_targets
from megatron_ddrp.model.stages import Inputs, Judge, State, blend


class SampleKeys(NamedTuple):
    """Random draws of ELECTRA's objective."""

    keys: Tensor
    """int64 `[batch, seq]`: keys of the Gumbel noise that draws each token's replacement."""


class OfGenerator(NamedTuple):
    """Sums of the generator's losses; the sampling stage leaves them for the last stage."""

    lm: Tensor
    """fp32 (or fp64) scalar: the sum of −log p over the labels."""
    correct: Tensor
    """Scalar of the same type: number of predicted tokens whose likeliest piece is the label."""


class Discriminator(Encoder):
    """An encoder with the generator trained beside it. `config` is the encoder's. Subclasses add head and generator."""

    head: ReplacedTokenHead
    generator: Generator

    def stages(self) -> list[nn.Module]:
        layers = list(self.generator.layers)
        if self.generator.mask_decoder is not None:
            layers.pop()  # the sampling stage applies it
        sampling = SamplingStage(self.generator, self.embeddings)
        return [self.generator.embeddings, *layers, sampling, *self.layers, self.head]


class Electra(Discriminator):
    """A discriminator and a narrow generator that share their embeddings."""

    def __init__(
        self, config: ModelConfig, settings: ObjectiveConfig, objective: Judge, checkpoint_activations: bool = False
    ) -> None:
        super().__init__(config, objective, checkpoint_activations)
        self.head = ReplacedTokenHead(config, objective)
        small = generator_config(config, settings)
        layout = GeneratorEmbeddings if settings.generator_embeddings == "shared" else FormerGeneratorEmbeddings
        self.generator = Generator(small, layout(small, settings.notes_share, self.embeddings), objective)
        self.initialise()


def generator_config(config: ModelConfig, settings: ObjectiveConfig) -> ModelConfig:
    """Return the configuration of ELECTRA's generator: fewer heads than the discriminator, of the same size each."""
    heads = settings.generator_heads(config.num_attention_heads)
    return replace(
        config,
        num_attention_heads=heads,
        hidden_size=heads * config.head_dim,
        embedding_size=config.embedding_width,
        attention_init="normal",
        ffn_hidden_size=None,
    )


class Generator(nn.Module):
    """A small masked LM that shares at least its token embedding with another encoder."""

    def __init__(self, config: ModelConfig, embeddings: GeneratorEmbeddings, objective: Judge) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.layers = nn.ModuleList(EncoderLayer(config, number) for number in range(config.num_layers))
        self.head = MaskedLMHead(config, embeddings.token, objective)
        self.head.own = None  # the objective's modules are the discriminator's
        self.mask_decoder = EnhancedMaskDecoder(config) if decodes_masks(config) else None


class GeneratorEmbeddings(Embeddings):
    """The generator's first stage. HCD, like TCD, belongs to the discriminator, so the generator compares no heads."""

    def forward(self, inputs: Inputs) -> State:
        state = super().forward(inputs)
        return state._replace(heads=state.heads[:, :0])


class FormerGeneratorEmbeddings(GeneratorEmbeddings):
    """Embeddings of generators in older checkpoints, with absolute positions and LayerNorm of their own.

    They share only token and segment embeddings with the discriminator. The sum of these two, and each note, is
    projected first; positions, notes and LayerNorm then act at the generator's width.
    """

    def __init__(self, config: ModelConfig, notes_share: float, shared: Embeddings) -> None:
        super().__init__(config, notes_share, shared)
        if shared.absolute is not None:
            self.absolute = nn.Embedding(config.seq_length, config.hidden_size)
        self.norm = Norm(config.hidden_size, config)

    def embed(self, inputs: Inputs) -> Tensor:
        assert self.projection is not None
        batch, notes = inputs.batch, inputs.notes
        if self.longest is not None:
            check_length(batch.input_ids.shape[1], self.longest)
        hidden = self.projection(self.tokens(batch))
        if self.absolute is not None:
            hidden = hidden + self.absolute(batch.position_ids)
        if notes is not None:
            hidden = blend(hidden, notes.places, self.projection(notes.vectors.to(hidden.dtype)), self.notes_share)
        return self.dropout(self.norm(hidden))


class SamplingStage(nn.Module):
    """The generator's end and the discriminator's beginning: masked LM, replacements, embeddings.

    It has no parameters of its own: it uses the generator's and the discriminator's embeddings.
    """

    def __init__(self, generator: Generator, embeddings: Embeddings) -> None:
        super().__init__()
        self.generator_head, self.embeddings = generator.head, embeddings
        self.decoder = generator.mask_decoder
        self.last_layer = None if self.decoder is None else generator.layers[-1]

    def forward(self, state: State) -> State:
        """Return the input state of the discriminator's first layer, with RTD's targets as labels.

        `state` is the output of the generator's last layer, or of the layer before it if there is a mask decoder.
        """
        head, batch = self.generator_head, state.inputs.batch
        places, labels = state.inputs.layout.predicted, state.inputs.predicted_labels  # [num_predicted] each
        logits = head.logits(self._predicted_hidden(state, places))  # [num_predicted, vocab]
        sampled = head.sample(logits, state.inputs.draws.own.keys.flatten().index_select(0, places))
        originals = torch.where(batch.labels == IGNORED_LABEL, batch.input_ids, batch.labels)
        replaced = replace_tokens(originals, places, sampled)
        targets = rtd_targets(replaced, originals, batch.document_ids)
        correct = (head.best(logits) == labels).sum()
        sums = OfGenerator(*(x.to(state.head_cosine.dtype) for x in (head.lm_sum(logits, labels), correct)))
        inputs = state.inputs._replace(batch=batch._replace(input_ids=replaced, labels=targets))
        return self.embeddings(inputs)._replace(own=sums)

    def _predicted_hidden(self, state: State, places: Tensor) -> Tensor:
        """Return the hidden states of the predicted tokens, `[num_predicted, width]`, in the order of the labels."""
        if self.decoder is None:
            hidden = state.hidden.flatten(0, 1).index_select(0, places)
        else:
            hidden = self.decoder(state, self.last_layer)
        return self.generator_head.last_hidden(hidden)
