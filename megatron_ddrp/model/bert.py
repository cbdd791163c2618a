"""The encoder as a list of stages: embeddings, layer × L, head; and ELECTRA's two models as such a list.

One process runs the list in order; a pipeline cuts the same list into parts. The definition serves every layout:
nothing here knows about ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from megatron_ddrp.config import ModelConfig, ObjectiveConfig
from megatron_ddrp.data.batches.batch import IGNORED_LABEL, Batch
from megatron_ddrp.model.embeddings import Embeddings
from megatron_ddrp.model.encoder import EncoderLayer, start_at_offsets
from megatron_ddrp.model.graphs import ModelGraphs
from megatron_ddrp.model.heads import (
    DecodingStage,
    EnhancedMaskDecoder,
    Head,
    MaskedLMHead,
    ReplacedTokenHead,
    replace_tokens,
    rtd_targets,
)
from megatron_ddrp.model.positions import LayerPositions, PositionEncoding
from megatron_ddrp.model.stages import (
    Draws,
    Inputs,
    Judge,
    Layout,
    ModelOutput,
    NoteInputs,
    State,
    layout_of,
    run_stage,
)

ENCODER_PARTS = ("embeddings.", "layers.", "head.final_norm.")
"""Prefixes of the names of weights that affect hidden states."""


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
        """Initialise all weights; a subclass calls this when it has its modules.

        A module of a plug-in with a method `own_start` is asked last, so that its own weights begin as it wants.
        """
        self.apply(self._draw)
        for module in self.modules():
            getattr(module, "own_start", lambda: None)()
        if self.config.attention_init == "offsets":
            assert self.embeddings.absolute is not None, "the configuration refuses it"
            start_at_offsets(self.embeddings.absolute, self.layers, self.config)  # type: ignore[arg-type]

    def _draw(self, module: nn.Module) -> None:
        """Draw matrices from normal(0, `init_method_std`) and zero biases, as BERT does; tables draw their own."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(std=self.config.init_method_std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.zero_()

    def stages(self) -> list[nn.Module]:
        """Return the list of stages: `Inputs` → `State`, then `State` → `State`, last `State` → `ModelOutput`."""
        raise AssertionError(f"{type(self).__name__} does not say its stages")

    def forward(
        self, batch: Batch, draws: Draws, notes: NoteInputs | None = None, layout: Layout | None = None
    ) -> ModelOutput:
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
        self.mask_decoder = EnhancedMaskDecoder(config) if config.decodes_masks else None
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


def run_stages(
    stages: Iterable[nn.Module],
    given: Inputs | State,
    recompute: bool = False,
    graphs: ModelGraphs | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Any:
    """Run consecutive stages and return the last one's output: a `State`, or the model's `ModelOutput`.

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
    return settings.chosen(settings).build(config, checkpoint_activations)


def on_meta_device(config: ModelConfig, objective: ObjectiveConfig | None = None) -> Encoder:
    """Return the model on torch's meta device: it has shapes and takes no memory."""
    with torch.device("meta"), _WithoutDraws():
        return build_model(config, objective=objective)


class _WithoutDraws(TorchFunctionMode):
    """Mode without random weights: on the meta device to draw nothing takes as long as all else."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if function in (Tensor.normal_, Tensor.uniform_) else function(*args, **(kwargs or {}))


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
    """An encoder with the generator trained beside it. `config` is the encoder's. Subclasses add head and generator.

    The stages are the generator's embeddings and layers, the sampling stage, and the discriminator's layers and head:

        ids with [MASK] → generator → sampling → ids with replacements → discriminator → replaced or not

    The discriminator is the encoder proper: its parameters have the names of a `Bert`'s, and `encode`, export and
    fine-tuning use it alone. DeBERTaV3's variant is in `objectives/electra.py`.

    The generator is a masked LM, so it has DeBERTa's mask decoder where a `Bert` would have it; the discriminator has
    none. TCD, HCD and notes belong to the discriminator.
    """

    head: ReplacedTokenHead
    generator: Generator

    def stages(self) -> list[nn.Module]:
        layers = list(self.generator.layers)
        if self.generator.mask_decoder is not None:
            layers.pop()  # the sampling stage applies it
        sampling = SamplingStage(self.generator, self.embeddings)
        return [self.generator.embeddings, *layers, sampling, *self.layers, self.head]


class Electra(Discriminator):
    """A discriminator and a narrow generator that share their embeddings (Clark et al., arXiv:2003.10555).

    The generator, under `generator.`, has as many layers as the discriminator, max(1, round(heads · f)) heads (halves
    round to even) of the same head size, feed-forward blocks of 4 × its width, and its own relative position
    parameters. As in the original, the discriminator's token, segment and absolute position embeddings are summed,
    blended with notes and normalised by the discriminator's LayerNorm at the discriminator's width, then projected to
    the generator's width. The output matrix is the same token embedding.

    Departure: f is 1/3 unless `--generator-size` is given. The original has 1/3 at base size only, and 1/4 in its small
    and large models. With 16 heads, f = 1/3 gives 5 heads, 320 dimensions instead of 256.
    """

    def __init__(
        self, config: ModelConfig, settings: ObjectiveConfig, objective: Judge, checkpoint_activations: bool = False
    ) -> None:
        super().__init__(config, objective, checkpoint_activations)
        self.head = ReplacedTokenHead(config, objective)
        small = generator_config(config, settings)
        embeddings = GeneratorEmbeddings(small, settings.notes_share, self.embeddings)
        self.generator = Generator(small, embeddings, objective)
        self.initialise()


def generator_config(config: ModelConfig, settings: ObjectiveConfig) -> ModelConfig:
    """Return the configuration of ELECTRA's generator: fewer heads than the discriminator, of the same size each."""
    heads = max(1, round(config.num_attention_heads * settings.generator_size))  # halves to even
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
        self.mask_decoder = EnhancedMaskDecoder(config) if config.decodes_masks else None


class GeneratorEmbeddings(Embeddings):
    """The generator's first stage. HCD, like TCD, belongs to the discriminator, so the generator compares no heads."""

    def forward(self, inputs: Inputs) -> State:
        state = super().forward(inputs)
        return state._replace(heads=state.heads[:, :0])


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
        if self.decoder is None:
            predicted = state.hidden.flatten(0, 1).index_select(0, places)
        else:
            predicted = self.decoder(state, self.last_layer)
        logits = head.logits(head.last_hidden(predicted))  # [num_predicted, vocab]
        sampled = head.sample(logits, state.inputs.draws.own.keys.flatten().index_select(0, places))
        originals = torch.where(batch.labels == IGNORED_LABEL, batch.input_ids, batch.labels)
        replaced = replace_tokens(originals, places, sampled)
        targets = rtd_targets(replaced, originals, batch.document_ids)
        correct = (head.best(logits) == labels).sum()
        sums = OfGenerator(*(x.to(state.head_cosine.dtype) for x in (head.lm_sum(logits, labels), correct)))
        inputs = state.inputs._replace(batch=batch._replace(input_ids=replaced, labels=targets))
        return self.embeddings(inputs)._replace(own=sums)
