"""The encoder as a list of stages: embeddings, layer × L, head. One definition for every layout.

One process runs the list in order; a pipeline is given the same list. Nothing here knows of ranks.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_ddrp.config import ModelConfig, encoding_class
from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.model.embeddings import Embeddings
from megatron_ddrp.model.encoder import EncoderLayer
from megatron_ddrp.model.heads import DecodingStage, EnhancedMaskDecoder, MaskedLMHead, ReplacedTokenHead
from megatron_ddrp.model.notes import NoteInputs
from megatron_ddrp.model.stages import Draws, StageState


class Encoder(nn.Module):
    """Embeddings and layers, which every model here has, and what runs its stages. A subclass adds `head`."""

    head: MaskedLMHead | ReplacedTokenHead

    def __init__(self, config: ModelConfig, checkpoint_activations: bool = False, notes_mix: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_activations = checkpoint_activations
        self.embeddings = Embeddings(config, notes_mix)
        self.layers = nn.ModuleList(EncoderLayer(config, number) for number in range(config.num_layers))
        self.mask_decoder: EnhancedMaskDecoder | None = None  # on the class, this would hide a subclass's module

    def _initialise(self, module: nn.Module) -> None:
        """BERT's: normal(0, `init_method_std`) matrices, zero biases, unit LayerNorms. Encodings draw their own."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(std=self.config.init_method_std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.zero_()

    def stages(self) -> list[nn.Module]:
        """The model as stages, each mapping a tuple of tensors to the next one's."""
        raise AssertionError(f"{type(self).__name__} does not say its stages")

    def forward(self, batch: Batch, draws: Draws, notes: NoteInputs | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Sums over this micro-batch of −log p (LM), TCD and HCD, `[3]`, and what else the objective adds.

        The caller divides by the global counts. With `notes` also the notes taken, `[occurrences, hidden]`.
        """
        tensors = first_tensors(batch, draws, notes)
        for stage in self.stages():
            tensors = run_stage(stage, tensors, self.checkpoint_activations)
        return tensors  # type: ignore[return-value]

    def encode(self, input_ids: Tensor, segment_ids: Tensor, document_ids: Tensor, position_ids: Tensor) -> Tensor:
        """The last hidden states, `[batch, seq, hidden]`; all arguments int64 `[batch, seq]`, see `Batch`."""
        draws = Draws.none(len(input_ids), self.config.num_layers, input_ids.device)
        nothing_to_predict = draws.token_mask[:, 0]
        batch = Batch(input_ids, nothing_to_predict, document_ids, position_ids, segment_ids, document_ids)
        tensors = first_tensors(batch, draws)
        for stage in (self.embeddings, *self.layers):
            tensors = run_stage(stage, tensors, self.checkpoint_activations)
        return self.head.last_hidden(StageState.unpack(tensors).hidden)


class Bert(Encoder):
    """A BERT-class encoder with its masked-LM head. Call it for loss sums, `encode` for hidden states."""

    head: MaskedLMHead

    def __init__(self, config: ModelConfig, checkpoint_activations: bool = False, notes_mix: float = 0.0) -> None:
        super().__init__(config, checkpoint_activations, notes_mix)
        self.head = MaskedLMHead(config, self.embeddings.token)
        self.mask_decoder = EnhancedMaskDecoder(config) if decodes_masks(config) else None
        self.apply(self._initialise)

    def stages(self) -> list[nn.Module]:
        if self.mask_decoder is None:
            return [self.embeddings, *self.layers, self.head]
        *first, last = self.layers
        return [self.embeddings, *first, DecodingStage(last, self.mask_decoder, self.head)]

    def predict(self, batch: Batch) -> Tensor:
        """Vocabulary logits where the labels are not `IGNORED_LABEL`, as in training: with the mask decoder if any.

        → `[num_predicted, vocab_size]`, in the order of the labels.
        """
        draws = Draws.none(len(batch.input_ids), self.config.num_layers, batch.input_ids.device)
        tensors = first_tensors(batch, draws)
        *first, last = self.layers
        for stage in (self.embeddings, *first):
            tensors = stage(tensors)
        if self.mask_decoder is not None:
            predicted = self.mask_decoder(tensors, last)
        else:
            predicted = StageState.unpack(last(tensors)).hidden[batch.labels != IGNORED_LABEL]
        return self.logits(self.head.last_hidden(predicted))

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits of last hidden states: `[.., hidden]` → `[.., vocab_size]`, padding cut off."""
        return self.head.logits(hidden)[..., : self.config.vocab_size]


def decodes_masks(config: ModelConfig) -> bool:
    """Return whether a masked LM of this configuration has the enhanced mask decoder."""
    if config.deberta_emd is None:
        return encoding_class(config.position_encoding).decodes_absolute
    return config.deberta_emd


def run_stage(stage: nn.Module, tensors: tuple[Tensor, ...], recompute: bool = False) -> tuple[Tensor, ...]:
    """One stage of the model; with `recompute` a layer keeps nothing for its backward pass but what entered it."""
    if recompute and stage.training and isinstance(stage, (EncoderLayer, DecodingStage)):
        return checkpoint(stage, tensors, use_reentrant=False)  # type: ignore[return-value]
    return stage(tensors)


def first_tensors(batch: Batch, draws: Draws, notes: NoteInputs | None = None) -> tuple[Tensor, ...]:
    """What the first stage takes: ids, draws, ELECTRA's sample keys if any, notes if any."""
    ids = (batch.input_ids, batch.segment_ids, batch.document_ids, batch.position_ids)
    keys = () if draws.sample_keys is None else (draws.sample_keys,)
    taken = () if notes is None else notes.integers()
    return (*ids, batch.labels, draws.token_mask, draws.heads, *keys, *taken)
