"""BERT-class encoder with decoupled directional relative positions (DDRP), for transformers ≥ 4.45.

    A[i,j] = Q_i · (K_j + D[ρ(i,j)] ⊙ K^rd[δ(i,j)]) / √d        i = query, j = key
    ρ = 0, 1, 2 for i = j, i < j, i > j;    δ = |clip(i − j, −(r_s−1), r_s−1)|

"Better Pre-Training by Reducing Representation Confusion", eq. 9–12. This file travels inside every exported folder
and is loaded by `trust_remote_code=True`, so it imports torch and transformers alone. Weights are named as in training.
The output matrix of the masked-LM head is the token embedding itself; it is no weight of its own.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput, SequenceClassifierOutput


class DdrpConfig(PretrainedConfig):
    """Sizes under BERT's names, and where positions and LayerNorms stand."""

    model_type = "megatron_ddrp"

    def __init__(
        self,
        vocab_size: int = 30522,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        intermediate_size: int = 3072,
        hidden_dropout_prob: float = 0.1,
        attention_probs_dropout_prob: float = 0.1,
        max_position_embeddings: int = 512,
        type_vocab_size: int = 2,
        initializer_range: float = 0.02,
        layer_norm_eps: float = 1e-12,
        layernorm_position: str = "post",
        position_encoding: str = "ddrp",
        relative_distance: int = 64,
        relative_table: str = "shared",
        pad_token_id: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.pad_token_id = pad_token_id
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.hidden_dropout_prob = hidden_dropout_prob
        self.attention_probs_dropout_prob = attention_probs_dropout_prob
        self.max_position_embeddings = max_position_embeddings
        self.type_vocab_size = type_vocab_size
        self.initializer_range = initializer_range
        self.layer_norm_eps = layer_norm_eps
        self.layernorm_position = layernorm_position
        self.position_encoding = position_encoding
        self.relative_distance = relative_distance
        self.relative_table = relative_table


def layer_norm(config: DdrpConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


class RelativeTable(nn.Module):
    """`direction` is D, `distance` is K^rd; the heads share both."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__()
        head_dim = config.hidden_size // config.num_attention_heads
        self.direction = nn.Parameter(torch.zeros(3, head_dim))
        self.distance = nn.Parameter(torch.zeros(config.relative_distance, head_dim))

    def forward(self) -> Tensor:
        """`[2·r_s − 1, head_dim]`: row c + r_s − 1 serves the clipped offset c = i − j."""
        reach = self.distance.shape[0] - 1
        offset = torch.arange(-reach, reach + 1, device=self.distance.device)
        direction = torch.where(offset < 0, 1, torch.where(offset > 0, 2, 0))
        return self.direction[direction] * self.distance[offset.abs()]


class Embeddings(nn.Module):
    """Token, segment and (without a relative table) position embeddings, then LayerNorm."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.hidden_size)
        self.segment = nn.Embedding(config.type_vocab_size, config.hidden_size)
        is_absolute = config.position_encoding == "absolute"
        shares_table = not is_absolute and config.relative_table == "shared"
        self.absolute = nn.Embedding(config.max_position_embeddings, config.hidden_size) if is_absolute else None
        self.position = RelativeTable(config) if shares_table else None
        self.norm = layer_norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        """int64 `[batch, seq]` each → `[batch, seq, hidden]`."""
        hidden = self.token(input_ids) + self.segment(token_type_ids)
        if self.absolute is not None:
            seq, longest = input_ids.shape[1], self.absolute.num_embeddings
            if seq > longest:
                raise ValueError(f"the input has {seq} tokens, the model knows {longest} positions: cut the text")
            hidden = hidden + self.absolute.weight[:seq]
        return self.dropout(self.norm(hidden))


class SelfAttention(nn.Module):
    """Attention whose logits take one product per query and table row, spread over the pairs by their offset."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def forward(self, hidden: Tensor, allowed: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
        """`[batch, seq, hidden]` → the same, and the probabilities `[batch, heads, seq, seq]`."""
        batch, seq, _ = hidden.shape

        def split(x: Tensor) -> Tensor:
            return x.view(batch, seq, -1, self.head_dim).transpose(1, 2)  # [batch, heads, seq, head_dim]

        query, key, value = split(self.query(hidden)), split(self.key(hidden)), split(self.value(hidden))
        logits = query @ key.transpose(-1, -2)  # [batch, heads, seq, seq]
        if table is not None:
            reach = table.shape[0] // 2
            position = torch.arange(seq, device=hidden.device)
            row = (position[:, None] - position[None, :]).clamp(-reach, reach) + reach  # [seq, seq]
            logits = logits + (query @ table.T).gather(-1, row.expand_as(logits))
        logits = (logits * self.head_dim**-0.5).masked_fill(~allowed, torch.finfo(logits.dtype).min)
        probabilities = logits.softmax(-1, dtype=torch.float32).to(value.dtype)
        context = self.dropout(probabilities) @ value  # [batch, heads, seq, head_dim]
        return self.output(context.transpose(1, 2).reshape(batch, seq, -1)), probabilities


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
        owns_table = config.position_encoding != "absolute" and config.relative_table == "per-layer"
        self.position = RelativeTable(config) if owns_table else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden: Tensor, allowed: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
        table = table if self.position is None else self.position()
        if self.normalises_before:
            context, probabilities = self.attention(self.attention_norm(hidden), allowed, table)
            hidden = hidden + self.dropout(context)
            return hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden))), probabilities
        context, probabilities = self.attention(hidden, allowed, table)
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


class DdrpPreTrainedModel(PreTrainedModel):
    """Initialisation and loading for all heads."""

    config_class = DdrpConfig
    base_model_prefix = "encoder"

    def _init_weights(self, module: nn.Module) -> None:
        """BERT's; through `nn.init`, which leaves loaded weights alone under `from_pretrained`."""
        std = self.config.initializer_range
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, RelativeTable):
            nn.init.normal_(module.direction, std=std)
            nn.init.normal_(module.distance, std=std)
        if isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
        if isinstance(module, (nn.Linear, nn.LayerNorm, MaskedLMHead)):
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
        valid = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        allowed = valid.bool()[:, None, None, :]  # [batch, 1, 1, seq]
        hidden = self.embeddings(input_ids, segments)
        table = None if self.embeddings.position is None else self.embeddings.position()
        states, maps = [hidden], []
        for layer in self.layers:
            hidden, probabilities = layer(hidden, allowed, table)
            states.append(hidden)
            maps.append(probabilities)
        if self.final_norm is not None:
            hidden = states[-1] = self.final_norm(hidden)
        wants_maps = self.config.output_attentions if output_attentions is None else output_attentions
        wants_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        output = BaseModelOutput(
            last_hidden_state=hidden,
            hidden_states=tuple(states) if wants_states else None,
            attentions=tuple(maps) if wants_maps else None,
        )
        return output.to_tuple() if return_dict is False else output


class DdrpForMaskedLM(DdrpPreTrainedModel):
    """The encoder with the head it was trained with."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__(config)
        self.encoder = DdrpModel(config)
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
        encoded = self.encoder(input_ids, attention_mask, token_type_ids, output_attentions, output_hidden_states)
        logits = self.head(encoded.last_hidden_state, self.encoder.embeddings.token.weight)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        output = MaskedLMOutput(
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
