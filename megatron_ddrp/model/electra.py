"""ELECTRA as stages: generator's embeddings and layers, the sampling stage, discriminator's layers and head.

    ids with [MASK] → generator → sampling → ids with replacements → discriminator → replaced or not

The discriminator is the encoder proper: it bears the names of a `Bert`'s, and is what `encode`, export and fine-tuning
see. The generator, under `generator.`, is as deep, has max(1, round(heads · f)) heads of the discriminator's head size
(halves round to even), feed-forward blocks of 4 × its width, and relative position parameters of its own. As in the
original, the discriminator's token, segment and absolute position embeddings are summed, blended with notes and
normalised by the discriminator's LayerNorm, at its width, then projected to the generator's; the output matrix is that
token embedding too. Checkpoints from before the LayerNorm was shared have `FormerGeneratorEmbeddings`.

Departure: f is 1/3 unless `--generator-size` says otherwise, the original's only at base size; its small and large have
1/4. Of 16 heads that gives 5, 320 dimensions instead of 256.

The generator is a masked LM and so has DeBERTa's mask decoder where a `Bert` would; the discriminator has none. TCD,
HCD and notes belong to the discriminator.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron_ddrp.config import ModelConfig, ObjectiveConfig
from megatron_ddrp.data.batches.batch import IGNORED_LABEL
from megatron_ddrp.model import replacing
from megatron_ddrp.model.bert import Encoder, decodes_masks
from megatron_ddrp.model.embeddings import Embeddings, check_length
from megatron_ddrp.model.encoder import EncoderLayer
from megatron_ddrp.model.heads import EnhancedMaskDecoder, MaskedLMHead, ReplacedTokenHead, predicted_places
from megatron_ddrp.model.notes import NoteInputs, blend
from megatron_ddrp.model.stages import GENERATOR_CORRECT, LM, NUM_ELECTRA_SUMS, StageState


class Electra(Encoder):
    """A discriminator with the generator that is trained beside it. Call it for the sums `[8]`."""

    head: ReplacedTokenHead

    def __init__(
        self,
        config: ModelConfig,
        objective: ObjectiveConfig,
        checkpoint_activations: bool = False,
    ) -> None:
        super().__init__(config, checkpoint_activations, objective.notes_share)
        self.head = ReplacedTokenHead(config)
        self.generator = Generator(generator_config(config, objective), objective, self.embeddings)
        self.apply(self._initialise)

    def stages(self) -> list[nn.Module]:
        layers = list(self.generator.layers)
        if self.generator.mask_decoder is not None:
            layers.pop()  # the sampling stage applies it
        sampling = SamplingStage(self.generator, self.embeddings)
        return [self.generator.embeddings, *layers, sampling, *self.layers, self.head]


def generator_config(config: ModelConfig, objective: ObjectiveConfig) -> ModelConfig:
    """The generator's configuration: some of the discriminator's heads, each as wide as there."""
    heads = objective.generator_heads(config.num_attention_heads)
    return replace(
        config,
        num_attention_heads=heads,
        hidden_size=heads * config.head_dim,
        ffn_hidden_size=4 * heads * config.head_dim,
    )


class Generator(nn.Module):
    """A small masked LM over the embeddings of another encoder."""

    def __init__(self, config: ModelConfig, objective: ObjectiveConfig, shared: Embeddings) -> None:
        super().__init__()
        layout = GeneratorEmbeddings if objective.generator_embeddings == "shared" else FormerGeneratorEmbeddings
        self.embeddings = layout(config, objective.notes_share, shared)
        self.layers = nn.ModuleList(EncoderLayer(config, number) for number in range(config.num_layers))
        self.head = MaskedLMHead(config, shared.token)
        self.mask_decoder = EnhancedMaskDecoder(config) if decodes_masks(config) else None


class GeneratorEmbeddings(Embeddings):
    """The first stage. The discriminator's draws and notes are carried along, the generator's own being none."""

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What `first_tensors` gives → packed `StageState`."""
        input_ids, segment_ids, document_ids, position_ids, labels, token_mask, heads, keys, *notes = tensors
        hidden = self.embed(input_ids, segment_ids, position_ids, NoteInputs.from_integers(*notes) if notes else None)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return StageState(
            hidden,
            torch.zeros(NUM_ELECTRA_SUMS, dtype=dtype, device=hidden.device),
            self.shared_positions(position_ids),
            document_ids,
            position_ids,
            labels,
            token_mask[..., :0],
            heads[:, :0],
            (input_ids, segment_ids, token_mask, heads, keys, *notes),
        ).pack()


class FormerGeneratorEmbeddings(GeneratorEmbeddings):
    """Embeddings of generators in older checkpoints: absolute positions and LayerNorm are their own.

    Only token and segment embeddings are the discriminator's. Their sum, and each note, is projected first; the rest
    happens at the generator's width.
    """

    def __init__(self, config: ModelConfig, notes_mix: float, shared: Embeddings) -> None:
        super().__init__(config, notes_mix, shared)
        if shared.absolute is not None:
            self.absolute = nn.Embedding(config.seq_length, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)

    def embed(
        self, input_ids: Tensor, segment_ids: Tensor, position_ids: Tensor, notes: NoteInputs | None = None
    ) -> Tensor:
        assert self.projection is not None
        if self.longest is not None:
            check_length(input_ids.shape[1], self.longest)
        hidden = self.projection(self.token(input_ids) + self.segment(segment_ids))
        if self.absolute is not None:
            hidden = hidden + self.absolute(position_ids)
        if notes is not None:
            hidden = blend(hidden, notes.places, self.projection(notes.vectors.to(hidden.dtype)), self.notes_mix)
        return self.dropout(self.norm(hidden))


class SamplingStage(nn.Module):
    """The generator's end and the discriminator's beginning: masked LM, replacements, embeddings.

    Has no parameter of its own: they are the generator's and those of the discriminator's embeddings.
    """

    def __init__(self, generator: Generator, embeddings: Embeddings) -> None:
        super().__init__()
        self.generator_head, self.embeddings = generator.head, embeddings
        self.decoder = generator.mask_decoder
        self.last_layer = None if self.decoder is None else generator.layers[-1]

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The generator's packed `StageState`, its last or (with a mask decoder) its last but one → the first one of
        the discriminator, whose labels are RTD's targets."""
        state = StageState.unpack(tensors)
        input_ids, segment_ids, token_mask, heads, keys, *notes = state.carried
        places = predicted_places(state.labels)  # [num_predicted]
        labels = state.labels.flatten().index_select(0, places)
        logits = self.generator_head.logits(self._predicted_hidden(tensors, state, places))  # [num_predicted, vocab]
        sampled = self.generator_head.sample(logits, keys.flatten().index_select(0, places))
        originals = torch.where(state.labels == IGNORED_LABEL, input_ids, state.labels)
        replaced = replacing.replace(originals, places, sampled)
        sums = list(state.losses.unbind())
        sums[LM] = self.generator_head.lm_sum(logits, labels).to(state.losses.dtype)
        sums[GENERATOR_CORRECT] = (self.generator_head.best(logits) == labels).sum().to(state.losses.dtype)
        reads = NoteInputs.from_integers(*notes) if notes else None
        return StageState(
            self.embeddings.embed(replaced, segment_ids, state.position_ids, reads),
            torch.stack(sums),
            self.embeddings.shared_positions(state.position_ids),
            state.document_ids,
            state.position_ids,
            replacing.rtd_targets(replaced, originals, state.document_ids),
            token_mask,
            heads,
            () if reads is None else (reads.windows,),
        ).pack()

    def _predicted_hidden(self, tensors: tuple[Tensor, ...], state: StageState, places: Tensor) -> Tensor:
        """`[num_predicted, width]`, in the order of the labels."""
        if self.decoder is None:
            hidden = state.hidden.flatten(0, 1).index_select(0, places)
        else:
            hidden = self.decoder(tensors, self.last_layer)
        return self.generator_head.last_hidden(hidden)
