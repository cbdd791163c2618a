"""BERT-class encoder with any of megatron_ddrp's position encodings, for transformers ≥ 4.45.

"Better Pre-Training by Reducing Representation Confusion" and the encodings that it compares. Three files travel inside
every exported folder and are loaded by `trust_remote_code=True`, so they import torch, transformers and one another
alone: configuration_ddrp.py (the sizes), modeling_positions.py (the encodings), and this one. Weights are named as in
training. The output matrix of the masked-LM head is the token embedding itself; it is no weight of its own.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from megatron_ddrp.conversion.configuration_ddrp import DdrpConfig
from megatron_ddrp.conversion.modeling_positions import (
    ENCODINGS,
    Deberta,
    Positions,
    PositionTerms,
    RelativeProjections,
    layer_norm,
    position_logits,
    split_heads,
)


def check_length(seq: int, longest: int) -> None:
    if seq > longest:
        raise ValueError(f"the input has {seq} tokens, the model knows {longest} positions: cut the text")


class Embeddings(nn.Module):
    """Token, segment and (where there are any) absolute position embeddings, then LayerNorm."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__()
        encoding, longest = ENCODINGS[config.position_encoding], config.max_position_embeddings
        self.token = nn.Embedding(config.vocab_size, config.hidden_size)
        self.segment = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.absolute = nn.Embedding(longest, config.hidden_size) if config.absolute_embedding else None
        self.position = encoding(config) if config.relative_table == "shared" else None
        self.longest = longest if encoding.limits_length or config.absolute_embedding else None
        self.norm = layer_norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        """int64 `[batch, seq]` each → `[batch, seq, hidden]`."""
        seq = input_ids.shape[1]
        if self.longest is not None:
            check_length(seq, self.longest)
        hidden = self.token(input_ids) + self.segment(token_type_ids)
        if self.absolute is not None:
            hidden = hidden + self.absolute.weight[:seq]
        return self.dropout(self.norm(hidden))


class SelfAttention(nn.Module):
    """Attention whose tables give one product per token and table row, spread over the pairs by their offset."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def forward(self, hidden: Tensor, source: Tensor, allowed: Tensor, terms: PositionTerms) -> tuple[Tensor, Tensor]:
        """Queries of `hidden`, keys and values of `source`, `[batch, seq, hidden]` each; also the probabilities."""
        query = split_heads(self.query(hidden), self.head_dim)  # [batch, heads, seq, head_dim]
        key, value = (split_heads(projection(source), self.head_dim) for projection in (self.key, self.value))
        logits = query @ key.transpose(-1, -2)  # [batch, heads, seq, seq]
        logits = position_logits(logits, query, key, terms).masked_fill(~allowed, torch.finfo(query.dtype).min)
        probabilities = logits.softmax(-1, dtype=torch.float32).to(value.dtype)
        context = self.dropout(probabilities) @ value  # [batch, heads, seq, head_dim]
        return self.output(context.transpose(1, 2).flatten(2)), probabilities


class FeedForward(nn.Module):
    """Two linear maps with an exact GELU between them."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__()
        self.input = nn.Linear(config.hidden_size, config.intermediate_size)
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output(F.gelu(self.input(hidden)))


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each with its residual; LayerNorm after each sum ("post") or before each block."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__()
        self.normalises_before = config.layernorm_position == "pre"
        self.attention = SelfAttention(config)
        self.attention_norm = layer_norm(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = layer_norm(config)
        encoding = ENCODINGS[config.position_encoding]
        self.position = encoding(config) if config.relative_table == "per-layer" else None
        self.layer_position = RelativeProjections(config) if encoding is Deberta else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, hidden: Tensor, allowed: Tensor, terms: PositionTerms | None, source: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`terms` are those that all layers share. Keys and values come from `source`, by default from `hidden`."""
        own = terms if self.position is None else self.position(hidden.shape[1])
        own = own if self.layer_position is None else self.layer_position(own)
        source = hidden if source is None else source
        if self.normalises_before:
            context, probabilities = self.attention(
                self.attention_norm(hidden), self.attention_norm(source), allowed, own
            )
            hidden = hidden + self.dropout(context)
            return hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden))), probabilities
        context, probabilities = self.attention(hidden, source, allowed, own)
        hidden = self.attention_norm(hidden + self.dropout(context))
        return self.feed_forward_norm(hidden + self.dropout(self.feed_forward(hidden))), probabilities


class MaskedLMHead(nn.Module):
    """Dense, GELU, LayerNorm, then the token embedding as the output matrix, plus a bias a piece."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = layer_norm(config)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden: Tensor, token_embedding: Tensor) -> Tensor:
        """`[.., hidden]`, `[vocab, hidden]` → `[.., vocab]`."""
        return F.linear(self.norm(F.gelu(self.dense(hidden))), token_embedding, self.bias)


class ReplacedTokenHead(nn.Module):
    """ELECTRA's judge of every token: dense, GELU, one logit."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[batch, seq, hidden]` → `[batch, seq]`, positive where a token looks replaced."""
        return self.output(F.gelu(self.dense(hidden))).squeeze(-1)


class MaskDecoder(nn.Module):
    """DeBERTa's enhanced mask decoder: absolute positions join just before the masked-LM head, for every token.

    The last layer is applied twice more, queries beginning as absolute embedding + H[L−1], keys and values of H[L−1].
    """

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__()
        self.absolute = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def forward(self, before: Tensor, encoder: "DdrpModel", attention_mask: Tensor | None) -> Tensor:
        """`before` is H[L−1] `[batch, seq, hidden]` → the same shape."""
        seq = before.shape[1]
        check_length(seq, self.absolute.num_embeddings)
        allowed, terms = allowed_keys(attention_mask, before), encoder.shared_terms(seq)
        states = before + self.absolute.weight[:seq]
        for _ in range(2):
            states, _ = encoder.layers[-1](states, allowed, terms, before)
        return encoder.normalise(states)


def allowed_keys(attention_mask: Tensor | None, like: Tensor) -> Tensor:
    """bool `[batch, 1, 1, seq]`, False at padding."""
    mask = like.new_ones(like.shape[:2]) if attention_mask is None else attention_mask
    return mask.bool()[:, None, None, :]


class DdrpPreTrainedModel(PreTrainedModel):
    """Initialisation and loading for all heads."""

    config_class = DdrpConfig
    base_model_prefix = "encoder"

    def _init_weights(self, module: nn.Module) -> None:
        """BERT's; through `nn.init`, which leaves loaded weights alone under `from_pretrained`."""
        std = self.config.initializer_range
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, Positions):
            for table in module.parameters(recurse=False):
                nn.init.normal_(table, std=std)
        if isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
        if isinstance(module, (nn.Linear, nn.LayerNorm, MaskedLMHead)) and module.bias is not None:
            nn.init.zeros_(module.bias)


class DdrpModel(DdrpPreTrainedModel):
    """The encoder, without a head."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_hidden_layers))
        self.final_norm = layer_norm(config) if config.layernorm_position == "pre" else None
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings.token

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embeddings.token = value  # type: ignore[assignment]

    def shared_terms(self, seq: int) -> PositionTerms | None:
        """What all layers share of the positions; None where each has its own table."""
        return None if self.embeddings.position is None else self.embeddings.position(seq)

    def normalise(self, hidden: Tensor) -> Tensor:
        """The last hidden states: normalised once more in a pre-LayerNorm model."""
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
        """`input_ids`, `token_type_ids` int64 and `attention_mask` (1 = token, 0 = padding), each `[batch, seq]`."""
        segments = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        hidden = self.embeddings(input_ids, segments)
        allowed, terms = allowed_keys(attention_mask, hidden), self.shared_terms(input_ids.shape[1])
        states, maps = [hidden], []
        for layer in self.layers:
            hidden, probabilities = layer(hidden, allowed, terms)
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


class DdrpForMaskedLM(DdrpPreTrainedModel):
    """The encoder with the head, and where there is one the mask decoder, that it was trained with."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__(config)
        self.encoder = DdrpModel(config)
        self.mask_decoder = MaskDecoder(config) if config.deberta_emd else None
        self.head = MaskedLMHead(config)
        self.post_init()

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:  # type: ignore[override]
        """Also fits the head's bias; new pieces begin with bias 0."""
        embedding = super().resize_token_embeddings(*args, **kwargs)
        added = embedding.num_embeddings - len(self.head.bias)
        self.head.bias = nn.Parameter(F.pad(self.head.bias.data, (0, added)))
        return embedding

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> MaskedLMOutput | tuple:
        """`labels` `[batch, seq]`: the piece to predict, −100 where none; the loss is the mean over the predicted."""
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        keeps_states = wants_states or self.mask_decoder is not None
        encoded = self.encoder(input_ids, attention_mask, token_type_ids, output_attentions, keeps_states)
        hidden = encoded.last_hidden_state
        if self.mask_decoder is not None:
            hidden = self.mask_decoder(encoded.hidden_states[-2], self.encoder, attention_mask)
        logits = self.head(hidden, self.encoder.embeddings.token.weight)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        states = encoded.hidden_states if wants_states else None
        output = MaskedLMOutput(loss=loss, logits=logits, hidden_states=states, attentions=encoded.attentions)
        return output.to_tuple() if return_dict is False else output


class DdrpForPreTraining(DdrpPreTrainedModel):
    """An ELECTRA discriminator: which tokens of a text were replaced."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__(config)
        self.encoder = DdrpModel(config)
        self.head = ReplacedTokenHead(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> TokenClassifierOutput | tuple:
        """`labels` `[batch, seq]`: 1 where replaced, 0 where original; the loss is the mean over all but padding."""
        encoded = self.encoder(input_ids, attention_mask, token_type_ids, output_attentions, output_hidden_states)
        logits = self.head(encoded.last_hidden_state)
        loss = None
        if labels is not None:
            valid = torch.ones_like(labels) if attention_mask is None else attention_mask
            loss = F.binary_cross_entropy_with_logits(logits[valid.bool()], labels[valid.bool()].to(logits.dtype))
        output = TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=encoded.hidden_states, attentions=encoded.attentions
        )
        return output.to_tuple() if return_dict is False else output


class DdrpForSequenceClassification(DdrpPreTrainedModel):
    """The encoder with a pooler over [CLS] and a classifier, both to be trained."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__(config)
        self.num_labels: int = config.num_labels or 2
        self.encoder = DdrpModel(config)
        self.pooler = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Squared error for one label or `regression`, else cross entropy over classes or over independent labels."""
        kind = self.config.problem_type
        if kind == "regression" or (kind is None and self.num_labels == 1):
            return F.mse_loss(logits.flatten(), labels.flatten().to(logits.dtype))
        if kind == "multi_label_classification":
            return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
        return F.cross_entropy(logits, labels.flatten())

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> SequenceClassifierOutput | tuple:
        """`labels` `[batch]` classes or numbers, or `[batch, num_labels]`; logits `[batch, num_labels]`."""
        encoded = self.encoder(input_ids, attention_mask, token_type_ids, output_attentions, output_hidden_states)
        pooled = torch.tanh(self.pooler(encoded.last_hidden_state[:, 0]))  # [batch, hidden]
        logits = self.classifier(self.dropout(pooled))
        output = SequenceClassifierOutput(
            loss=None if labels is None else self.loss(logits, labels),
            logits=logits,
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )
        return output.to_tuple() if return_dict is False else output
