"""BERT-class encoder with any of megatron_ddrp's position encodings, for transformers ≥ 4.45.

"Better Pre-Training by Reducing Representation Confusion" and the encodings that it compares. This file travels inside
every exported folder that needs code of its own, with configuration_ddrp.py (the sizes) and the files of training that
compute positions and attention logits; `megatron_ddrp/conversion/model_code.py` puts them there. They are loaded by
`trust_remote_code=True`, so they import torch, transformers and one another alone. Weights are named as in training.
The output matrix of the masked-LM head is the token embedding itself; it is no weight of its own.
"""

from collections import OrderedDict
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    ModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from megatron_ddrp.config.registry import encoding_class
from megatron_ddrp.conversion.configuration_ddrp import DdrpConfig
from megatron_ddrp.conversion.layers_ddrp import Embeddings, EncoderLayer, PassInputs, check_length, norm
from megatron_ddrp.model.positions.contract import LayerPositions, PositionEncoding


class MaskedLMHead(nn.Module):
    """Dense, GELU, LayerNorm, then the token embedding as the output matrix, plus a bias per piece."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.embedding_width, bias=config.bias)
        self.norm = norm(config, config.embedding_width)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden: Tensor, token_embedding: Tensor) -> Tensor:
        """Map `[.., hidden]`, with the embedding `[vocab, embedding]`, to `[.., vocab]`."""
        return F.linear(self.norm(F.gelu(self.dense(hidden))), token_embedding, self.bias)


class MaskDecoder(nn.Module):
    """DeBERTa's enhanced mask decoder: absolute positions join just before the masked-LM head, for every token.

    The last layer is applied twice more, queries beginning as absolute embedding + H[L−1], keys and values of H[L−1].
    """

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__()
        self.absolute = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def forward(self, before: Tensor, encoder: "DdrpModel", attention_mask: Tensor | None) -> Tensor:
        """Map `before` = H[L−1], `[batch, seq, hidden]`, to decoded states of the same shape."""
        seq = before.shape[1]
        check_length(seq, self.absolute.num_embeddings)
        inputs, states = encoder.pass_inputs(before, attention_mask), before + self.absolute.weight[:seq]
        for _ in range(2):
            states, _ = encoder.layers[-1](states, inputs, before)
        return encoder.normalise(states)


class DdrpPreTrainedModel(PreTrainedModel):
    """Initialisation and loading for all heads."""

    config_class = DdrpConfig
    base_model_prefix = "encoder"

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise as BERT does, through `nn.init`, which leaves loaded weights alone under `from_pretrained`."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            nn.init.ones_(module.weight)
        if isinstance(module, (nn.Linear, nn.LayerNorm, MaskedLMHead)) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, (PositionEncoding, LayerPositions)):
            self._init_positions(module)

    def _init_positions(self, module: nn.Module) -> None:
        """Initialise an encoding's own weights and all its buffers, as far as no file held them, as it does itself."""
        own = chain(module.named_parameters(recurse=False), module.named_buffers())
        missing = {name: tensor for name, tensor in own if not getattr(tensor, "_is_hf_initialized", False)}
        fresh = type(module)(self.config) if missing else module
        drawn = dict(chain(fresh.named_parameters(recurse=False), fresh.named_buffers()))
        with torch.no_grad():
            for name, tensor in missing.items():
                tensor.copy_(drawn[name])


class DdrpModel(DdrpPreTrainedModel):
    """The encoder, without a head."""

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
        """Return what all layers read; `hidden` `[batch, seq, hidden]` gives shape and device."""
        mask = hidden.new_ones(hidden.shape[:2]) if attention_mask is None else attention_mask
        position_ids = torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape[:2])
        shared = () if self.embeddings.position is None else self.embeddings.position(position_ids)
        return PassInputs(mask.bool()[:, None, None, :], position_ids, shared)

    def normalise(self, hidden: Tensor) -> Tensor:
        """Return the last hidden states: normalised once more in a pre-LayerNorm model."""
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
    """The encoder under a head: a subclass has `score`, `loss` and the class of its output."""

    output_class: type[ModelOutput]
    score: Callable[..., Tensor]
    loss: Callable[..., Tensor]

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
        """Score inputs as `DdrpModel` takes them; `labels`, in the form that the class names, add a loss."""
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        keeps_states = wants_states or self.mask_decoder is not None
        encoded = self.encoder(input_ids, attention_mask, token_type_ids, output_attentions, keeps_states)
        logits = self.score(encoded, attention_mask)
        output = self.output_class(
            loss=None if labels is None else self.loss(logits, labels, attention_mask),
            logits=logits,
            hidden_states=encoded.hidden_states if wants_states else None,
            attentions=encoded.attentions,
        )
        return output.to_tuple() if return_dict is False else output


class DdrpForMaskedLM(DdrpHeadModel):
    """The encoder with the head, and where there is one the mask decoder, that it was trained with.

    `labels` `[batch, seq]`: the piece to predict, −100 where none; the loss is the mean over the predicted.
    """

    output_class = MaskedLMOutput

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__(config)
        self.mask_decoder = MaskDecoder(config) if config.deberta_emd else None
        self.head = MaskedLMHead(config)
        self.post_init()

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:  # type: ignore[override]
        """Resize the head's bias as well; new pieces begin with bias 0."""
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

    def loss(self, logits: Tensor, labels: Tensor, _: Tensor | None) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class DdrpForPreTraining(DdrpHeadModel):
    """An ELECTRA discriminator: which tokens of a text were replaced.

    `labels` `[batch, seq]`: 1 where replaced, 0 where original; the loss is the mean over all but padding.
    """

    output_class = TokenClassifierOutput

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__(config)
        dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)
        output = nn.Linear(config.hidden_size, 1)
        self.head = nn.Sequential(OrderedDict(dense=dense, activation=nn.GELU(), output=output))
        self.post_init()

    def score(self, encoded: Any, _: Tensor | None) -> Tensor:
        """Return logits `[batch, seq]`, positive where a token looks replaced."""
        return self.head(encoded.last_hidden_state).squeeze(-1)

    def loss(self, logits: Tensor, labels: Tensor, attention_mask: Tensor | None) -> Tensor:
        valid = torch.ones_like(labels).bool() if attention_mask is None else attention_mask.bool()
        return F.binary_cross_entropy_with_logits(logits[valid], labels[valid].to(logits.dtype))


class DdrpForContextualPreTraining(DdrpForPreTraining):
    """DeBERTaV3's discriminator, whose head reads LN(h_[CLS] + h_t) at token t."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__(config)
        self.head = nn.Sequential(OrderedDict([("norm", norm(config)), *self.head.named_children()]))
        self.post_init()

    def score(self, encoded: Any, _: Tensor | None) -> Tensor:
        """Return logits `[batch, seq]`, positive where a token looks replaced."""
        hidden = encoded.last_hidden_state
        return self.head(hidden[:, :1] + hidden).squeeze(-1)


class DdrpForSequenceClassification(DdrpHeadModel):
    """The encoder with a pooler over [CLS] and a classifier, both to be trained.

    `labels` are `[batch]` classes or numbers, or `[batch, num_labels]`.
    """

    output_class = SequenceClassifierOutput

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__(config)
        self.num_labels: int = config.num_labels or 2
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    def score(self, encoded: Any, _: Tensor | None) -> Tensor:
        """Return logits `[batch, num_labels]`."""
        pooled = torch.tanh(self.pooler(encoded.last_hidden_state[:, 0]))  # [batch, hidden]
        return self.classifier(self.dropout(pooled))

    def loss(self, logits: Tensor, labels: Tensor, _: Tensor | None) -> Tensor:
        """Return squared error for one label or `regression`, else cross entropy over classes or independent labels."""
        kind = self.config.problem_type
        if kind == "regression" or (kind is None and self.num_labels == 1):
            return F.mse_loss(logits.flatten(), labels.flatten().to(logits.dtype))
        if kind == "multi_label_classification":
            return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
        return F.cross_entropy(logits, labels.flatten())
