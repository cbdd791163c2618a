"""BERT-class encoder with any of megatron_ddrp's position encodings, for transformers ≥ 4.45.

"Better Pre-Training by Reducing Representation Confusion" and the encodings that it compares. This file is copied into
every exported folder that needs its own code, with configuration_ddrp.py (the sizes), layers_ddrp.py, heads_ddrp.py and
the training files that compute positions. `megatron_ddrp/conversion/model_code.py` writes them and
`trust_remote_code=True` loads them, so they import only torch, transformers and one another. Weights have the names of
training. The output matrix of the masked-LM head is the token embedding and is not stored separately.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    ModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from megatron_ddrp.config.registry import encoding_class
from megatron_ddrp.conversion.configuration_ddrp import DdrpConfig
from megatron_ddrp.conversion.heads_ddrp import (
    MaskDecoder,
    MaskedLMHead,
    Pooler,
    classification_loss,
    classifier_dropout,
    replaced_token_head,
    span_loss,
    stack_spans,
)
from megatron_ddrp.conversion.layers_ddrp import Embeddings, EncoderLayer, PassInputs, draw_positions, norm
from megatron_ddrp.model.positions.contract import LayerPositions, PositionEncoding


class DdrpPreTrainedModel(PreTrainedModel):
    """Base of all heads: initialisation and loading."""

    config: DdrpConfig
    config_class = DdrpConfig
    base_model_prefix = "encoder"

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise as BERT does, with `nn.init`, which does not overwrite loaded weights in `from_pretrained`."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            nn.init.ones_(module.weight)
        if isinstance(module, (nn.Linear, nn.LayerNorm, MaskedLMHead)) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, (PositionEncoding, LayerPositions)):
            draw_positions(module, self.config)


class DdrpModel(DdrpPreTrainedModel):
    """The encoder without a head."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__(config)
        encoding = encoding_class(config.position_encoding)
        self.embeddings = Embeddings(config, encoding)
        self.layers = nn.ModuleList(EncoderLayer(config, encoding, i) for i in range(config.num_hidden_layers))
        self.final_norm = norm(config) if config.layernorm_position == "pre" else None
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.token

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.token = value  # type: ignore[assignment]

    def pass_inputs(self, hidden: Tensor, attention_mask: Tensor | None) -> PassInputs:
        """Return the inputs that all layers read; `hidden` `[batch, seq, hidden]` provides shape and device."""
        mask = hidden.new_ones(hidden.shape[:2]) if attention_mask is None else attention_mask
        position_ids = torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape[:2])
        shared = () if self.embeddings.position is None else self.embeddings.position(position_ids)
        return PassInputs(mask.bool()[:, None, None, :], position_ids, shared)

    def normalise(self, hidden: Tensor) -> Tensor:
        """Return the last hidden states; a pre-LayerNorm model normalises them once more."""
        return hidden if self.final_norm is None else self.final_norm(hidden)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutput | tuple:
        """Encode int64 `input_ids`, `token_type_ids` and `attention_mask` (0 = padding), each `[batch, seq]`."""
        segments = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        hidden = self.embeddings(input_ids, segments)
        inputs, states, maps = self.pass_inputs(hidden, attention_mask), [hidden], []
        for layer in self.layers:
            hidden, probabilities = layer(hidden, inputs)
            states.append(hidden)
            maps.append(probabilities)
        hidden = states[-1] = self.normalise(hidden)
        wants_maps = self.config.output_attentions if output_attentions is None else output_attentions
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        output = BaseModelOutput(
            last_hidden_state=hidden,
            hidden_states=tuple(states) if wants_states else None,
            attentions=tuple(maps) if wants_maps else None,
        )
        return output.to_tuple() if return_dict is False else output


class DdrpHeadModel(DdrpPreTrainedModel):
    """The encoder with a head. A subclass defines `score` and the class of its output, and may define another loss."""

    output_class: type[ModelOutput]
    score: Callable[..., Tensor]

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__(config)
        self.encoder = DdrpModel(config)
        self.mask_decoder: MaskDecoder | None = None

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Compute scores; inputs as in `DdrpModel`. With `labels`, in the form that the class describes, add a loss."""
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        keeps_states = wants_states or self.mask_decoder is not None
        encoded = self.encoder(input_ids, attention_mask, token_type_ids, output_attentions, keeps_states)
        logits = self.score(encoded, attention_mask)
        output = self.output_class(
            loss=None if labels is None else self.loss(logits, labels, attention_mask),
            **self.named(logits),
            hidden_states=encoded.hidden_states if wants_states else None,
            attentions=encoded.attentions,
        )
        return output.to_tuple() if return_dict is False else output

    def named(self, logits: Tensor) -> dict[str, Tensor]:
        """Return the scores under their names in the output."""
        return {"logits": logits}

    def loss(self, logits: Tensor, labels: Tensor, _: Tensor | None) -> Tensor:
        """Return the mean cross entropy over tokens; tokens with label −100 are ignored."""
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class DdrpForMaskedLM(DdrpHeadModel):
    """The encoder with the masked-LM head that it was trained with, and with the mask decoder if it has one.

    `labels` `[batch, seq]`: the piece to predict, or −100 to ignore a token; the loss is the mean over the predicted.
    """

    output_class = MaskedLMOutput

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__(config)
        self.mask_decoder = MaskDecoder(config) if config.deberta_emd else None
        self.head = MaskedLMHead(config)
        self.post_init()

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:  # type: ignore[override]
        """Resize the token embedding and the head's bias; new pieces start with bias 0."""
        embedding = super().resize_token_embeddings(*args, **kwargs)
        added = embedding.num_embeddings - len(self.head.bias)
        self.head.bias = nn.Parameter(F.pad(self.head.bias.data, (0, added)))
        return embedding

    def score(self, encoded: Any, attention_mask: Tensor | None) -> Tensor:
        """Return logits `[batch, seq, vocab]`."""
        hidden = encoded.last_hidden_state
        if self.mask_decoder is not None:
            hidden = self.mask_decoder(encoded.hidden_states[-2], self.encoder, attention_mask)
        return self.head(hidden, self.encoder.embeddings.token.weight)


class DdrpForPreTraining(DdrpHeadModel):
    """ELECTRA's discriminator: it classifies each token of a text as original or replaced.

    `labels` `[batch, seq]`: 1 for replaced, 0 for original; the loss is the mean over all tokens but padding.
    """

    output_class = TokenClassifierOutput

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__(config)
        self.head = replaced_token_head(config)
        self.post_init()

    def score(self, encoded: Any, _: Tensor | None) -> Tensor:
        """Return logits `[batch, seq]`, positive for tokens that look replaced."""
        return self.head(encoded.last_hidden_state).squeeze(-1)

    def loss(self, logits: Tensor, labels: Tensor, attention_mask: Tensor | None) -> Tensor:
        valid = torch.ones_like(labels).bool() if attention_mask is None else attention_mask.bool()
        return F.binary_cross_entropy_with_logits(logits[valid], labels[valid].to(logits.dtype))


class DdrpForContextualPreTraining(DdrpForPreTraining):
    """DeBERTaV3's discriminator, whose head reads LN(h_[CLS] + h_t) at token t."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__(config)
        self.head = replaced_token_head(config, contextual=True)
        self.post_init()

    def score(self, encoded: Any, _: Tensor | None) -> Tensor:
        """Return logits `[batch, seq]`, positive for tokens that look replaced."""
        hidden = encoded.last_hidden_state
        return self.head(hidden[:, :1] + hidden).squeeze(-1)


class DdrpForTokenClassification(DdrpHeadModel):
    """The encoder with a classifier of every token, to be trained.

    `labels` `[batch, seq]`: the class, or −100 to ignore a token; the loss is the mean over the others.
    """

    output_class: type[ModelOutput] = TokenClassifierOutput

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__(config)
        self.num_labels: int = config.num_labels or 2
        self.dropout = nn.Dropout(classifier_dropout(config))
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    def score(self, encoded: Any, _: Tensor | None) -> Tensor:
        """Return logits `[batch, seq, num_labels]`."""
        return self.classifier(self.dropout(encoded.last_hidden_state))


class DdrpForSequenceClassification(DdrpForTokenClassification):
    """The encoder with BERT's pooler over [CLS] and a classifier of the text, to be trained.

    `labels` are `[batch]` classes or numbers, or `[batch, num_labels]`; `classification_loss` is the loss.
    """

    output_class = SequenceClassifierOutput

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__(config)
        self.pooler = Pooler(config.hidden_size)
        self.post_init()

    def score(self, encoded: Any, _: Tensor | None) -> Tensor:
        """Return logits `[batch, num_labels]`."""
        return self.classifier(self.dropout(self.pooler(encoded.last_hidden_state)))

    def loss(self, logits: Tensor, labels: Tensor, _: Tensor | None) -> Tensor:
        return classification_loss(self.config, logits, labels)


class DdrpForQuestionAnswering(DdrpHeadModel):
    """The encoder with two scores per token, as the first and as the last of an answer, to be trained."""

    output_class = QuestionAnsweringModelOutput

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Compute scores; inputs as in `DdrpModel`. With both positions, `[batch]`, add the loss of `span_loss`."""
        spans, wanted = stack_spans(start_positions, end_positions), (output_attentions, output_hidden_states)
        return super().forward(input_ids, attention_mask, token_type_ids, spans, *wanted, return_dict)

    def score(self, encoded: Any, _: Tensor | None) -> Tensor:
        """Return logits `[batch, seq, 2]`."""
        return self.qa_outputs(encoded.last_hidden_state)

    def loss(self, logits: Tensor, labels: Tensor, _: Tensor | None) -> Tensor:
        return span_loss(logits, labels)

    def named(self, logits: Tensor) -> dict[str, Tensor]:
        start, end = logits.unbind(-1)
        return {"start_logits": start.contiguous(), "end_logits": end.contiguous()}
