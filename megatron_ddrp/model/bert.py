"""The encoder as a list of stages: embeddings, layer × L, head. One definition for every layout.

One process runs the list in order; a pipeline cuts the same list into parts. Nothing here knows about ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_ddrp.config import ModelConfig, ObjectiveConfig, encoding_class, objective_class
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.model.embeddings import Embeddings
from megatron_ddrp.model.encoder import EncoderLayer
from megatron_ddrp.model.graphs import ModelGraphs
from megatron_ddrp.model.heads import DecodingStage, EnhancedMaskDecoder, Head, MaskedLMHead
from megatron_ddrp.model.offsets import start_at_offsets
from megatron_ddrp.model.positions import LayerPositions, PositionEncoding
from megatron_ddrp.model.stages import Draws, Inputs, Judge, Layout, NoteInputs, Output, State, layout_of, run_stage


class Encoder(nn.Module):
    """Embeddings and layers, which every model has, and the loop over its stages. A subclass adds `head`."""

    head: Head
    embeddings_class: type[Embeddings] = Embeddings
    graphs: ModelGraphs | None = None
    """CUDA graphs of the layers, in training with them."""
    compute_dtype: torch.dtype | None = None
    """Type of the copies of its fp32 weights that a stage computes with; None: with the weights themselves."""

    def __init__(self, config: ModelConfig, objective: Judge, checkpoint_activations: bool = False) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_activations = checkpoint_activations
        self.embeddings = self.embeddings_class(config, objective.notes_share)
        judge = objective if objective.looks_inside else None
        self.layers = nn.ModuleList(EncoderLayer(config, number, judge) for number in range(config.num_layers))
        self.mask_decoder: EnhancedMaskDecoder | None = None  # on the class, this would hide a subclass's module

    def initialise(self) -> None:
        """Initialise all weights; a subclass calls this when it has its modules."""
        self.apply(self._draw)
        if self.config.attention_init == "offsets":
            assert self.embeddings.absolute is not None, "the configuration refuses it"
            start_at_offsets(self.embeddings.absolute, self.layers, self.config)  # type: ignore[arg-type]

    def _draw(self, module: nn.Module) -> None:
        """Draw matrices from normal(0, `init_method_std`) and zero biases, as BERT does. Encodings draw their own."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(std=self.config.init_method_std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.zero_()

    def stages(self) -> list[nn.Module]:
        """Return the model as a list of stages: `Inputs` → `State`, then `State` → `State`, last `State` → `Output`."""
        raise AssertionError(f"{type(self).__name__} does not say its stages")

    def forward(
        self, batch: Batch, draws: Draws, notes: NoteInputs | None = None, layout: Layout | None = None
    ) -> Output:
        """Return the sums of the objective over this micro-batch; the caller divides them by the global counts.

        Without `layout` the CPU waits for the batch's device to compute it.
        """
        inputs = Inputs(batch, draws, notes, layout or layout_of(batch))
        return run_stages(self.stages(), inputs, self.checkpoint_activations, self.graphs, self.compute_dtype)

    def encode(self, input_ids: Tensor, segment_ids: Tensor, document_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return the last hidden states, `[batch, seq, hidden]`; arguments: int64 `[batch, seq]`, see `Batch`."""
        draws = Draws.none(len(input_ids), self.config.num_layers, input_ids.device)
        nothing_to_predict = draws.token_mask[:, 0]
        batch = Batch(input_ids, nothing_to_predict, document_ids, position_ids, segment_ids, document_ids)
        stages = (self.embeddings, *self.layers)
        state: State = run_stages(stages, Inputs.of(batch, draws), self.checkpoint_activations)
        return self.head.last_hidden(state.hidden)

    def merge_embeddings(self) -> None:
        """Merge token embeddings that are trained in two parts into one table, in place, for export and fine-tuning.

        Most models have one table, so the base class does nothing. `encode` returns the same before and after.
        """


class Bert(Encoder):
    """A BERT-class encoder with its masked-LM head. Call it for sums of losses, and `encode` for hidden states."""

    head: MaskedLMHead

    def __init__(self, config: ModelConfig, objective: Judge, checkpoint_activations: bool = False) -> None:
        super().__init__(config, objective, checkpoint_activations)
        self.head = MaskedLMHead(config, self.embeddings.token, objective)
        self.mask_decoder = EnhancedMaskDecoder(config) if decodes_masks(config) else None
        self.initialise()

    def stages(self) -> list[nn.Module]:
        if self.mask_decoder is None:
            return [self.embeddings, *self.layers, self.head]
        *first, last = self.layers
        return [self.embeddings, *first, DecodingStage(last, self.mask_decoder, self.head)]

    def predict(self, batch: Batch) -> Tensor:
        """Return the vocabulary logits of the predicted tokens, `[num_predicted, vocab_size]`, in the labels' order.

        Uses the mask decoder if the model has one, as training does.
        """
        draws = Draws.none(len(batch.input_ids), self.config.num_layers, batch.input_ids.device)
        *first, last = self.layers
        state: State = run_stages((self.embeddings, *first), Inputs.of(batch, draws))
        if self.mask_decoder is not None:
            predicted = self.mask_decoder(state, last)
        else:  # only the predicted tokens need the last layer's output
            assert isinstance(last, EncoderLayer)
            layout = state.inputs.layout
            queries = state.hidden.gather(1, layout.queries.unsqueeze(-1).expand(-1, -1, state.hidden.shape[-1]))
            decoded = last.decode(queries, layout.queries, state, times=1)  # [batch, most, hidden]
            predicted = decoded.flatten(0, 1).index_select(0, layout.answers)
        return self.logits(self.head.last_hidden(predicted))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return vocabulary logits of last hidden states: `[.., hidden]` → `[.., vocab_size]`, without padding."""
        return self.head.logits(hidden)[..., : self.config.vocab_size]


def decodes_masks(config: ModelConfig) -> bool:
    """Return whether a masked LM of this configuration has the enhanced mask decoder."""
    if config.deberta_emd is None:
        return encoding_class(config.position_encoding).decodes_absolute
    return config.deberta_emd


def run_stages(
    stages: Iterable[nn.Module],
    given: Inputs | State,
    recompute: bool = False,
    graphs: ModelGraphs | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Any:
    """Run consecutive stages and return the last one's output: a `State`, or the model's `Output`.

    With `recompute` a layer keeps only its input for the backward pass. With `graphs` layers are replayed by them.
    `compute_dtype` is the `Encoder`'s.
    """
    passed: Any = given
    for are_layers, some in itertools.groupby(stages, lambda stage: isinstance(stage, EncoderLayer)):
        if are_layers and graphs is not None:
            passed = graphs.run(list(some), passed, compute_dtype)  # type: ignore[arg-type]
            continue
        for stage in some:
            if recompute and stage.training and isinstance(stage, (EncoderLayer, DecodingStage)):
                passed = checkpoint(run_stage, stage, passed, compute_dtype, use_reentrant=False)
            else:
                passed = run_stage(stage, passed, compute_dtype)
    return passed


def build_model(
    config: ModelConfig, checkpoint_activations: bool = False, objective: ObjectiveConfig | None = None
) -> Encoder:
    """Return a freshly initialised model on the CPU, without DeepSpeed. Its weights come from torch's random state.

    The objective decides which model class is built; without one it is masked LM.
    """
    settings = objective or ObjectiveConfig(objective="mlm")
    return objective_class(settings.objective)(settings).build(config, checkpoint_activations)


def on_meta_device(config: ModelConfig, objective: ObjectiveConfig | None = None) -> Encoder:
    """Return the model on torch's meta device: it has shapes and takes no memory."""
    with torch.device("meta"):
        return build_model(config, objective=objective)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the number of all parameters, without the vocabulary's padding, and of the position encoding's."""
    position = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, (PositionEncoding, LayerPositions, EnhancedMaskDecoder))
        for parameter in module.parameters()
    }
    position |= {
        id(module.absolute.weight)
        for module in model.modules()
        if isinstance(module, Embeddings) and module.absolute is not None
    }
    sizes = {id(parameter): parameter.numel() for parameter in model.parameters()}
    padding = 0
    if isinstance(model, Encoder):
        rows = model.config.padded_vocab_size - model.config.vocab_size
        tables = (getattr(model.embeddings, name) for name in model.embeddings.tables)
        padding = rows * (sum(table.embedding_dim for table in tables) + 1)
    return sum(sizes.values()) - padding, sum(size for key, size in sizes.items() if key in position)
