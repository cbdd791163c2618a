"""Layers of an exported model; this file is copied into every exported folder, see modeling_ddrp.py."""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ddrp.conversion.configuration_ddrp import DdrpConfig
from megatron_ddrp.model.positions.contract import PositionEncoding, PositionTerms


def check_length(seq: int, longest: int) -> None:
    """Raise `ValueError` for an input that is longer than the learned positions."""
    if seq > longest:
        raise ValueError(f"the input has {seq} tokens, the model has {longest} positions: cut the text")


def norm(config: DdrpConfig, width: int | None = None) -> nn.Module:
    """Return a LayerNorm or RMSNorm of the width `width`, by default that of the hidden states."""
    width = width or config.hidden_size
    if config.norm == "rmsnorm":
        return nn.RMSNorm(width, eps=config.layer_norm_eps)
    return nn.LayerNorm(width, eps=config.layer_norm_eps, bias=config.biased_norms)


def activation(config: DdrpConfig) -> Callable[[Tensor], Tensor]:
    """Return the activation of feed-forward blocks and of the masked-LM head."""
    return F.silu if config.ffn == "swiglu" else F.gelu


def draw_positions(module: nn.Module, config: DdrpConfig) -> None:
    """Initialise an encoding's own weights and all its buffers as it does itself, except those loaded from a file."""
    own = chain(module.named_parameters(recurse=False), module.named_buffers())
    missing = {name: tensor for name, tensor in own if not getattr(tensor, "_is_hf_initialized", False)}
    fresh = type(module)(config) if missing else module
    drawn = dict(chain(fresh.named_parameters(recurse=False), fresh.named_buffers()))
    with torch.no_grad():
        for name, tensor in missing.items():
            tensor.copy_(drawn[name])


class PassInputs(NamedTuple):
    """Input of every layer in one forward pass, other than the hidden states."""

    allowed: Tensor
    """bool `[batch, 1, 1, seq]`, False at padding."""
    position_ids: Tensor
    """int64 `[batch, seq]`."""
    position: tuple[Tensor, ...]
    """Tensors of the encoding that all layers share; empty if each layer has its own encoding."""


class Embeddings(nn.Module):
    """Token, segment and absolute position embeddings (the last two are optional), then LayerNorm."""

    def __init__(self, config: DdrpConfig, encoding: type[PositionEncoding]) -> None:
        super().__init__()
        longest, width = config.max_position_embeddings, config.embedding_width
        self.token = nn.Embedding(config.vocab_size, width)
        self.segment = nn.Embedding(config.num_segments, width) if config.num_segments else None
        self.absolute = nn.Embedding(longest, width) if config.absolute_embedding else None
        self.position = encoding(config) if config.relative_table == "shared" else None
        self.longest = longest if encoding.limits_length or config.absolute_embedding else None
        self.norm = norm(config, width) if config.embedding_norm else nn.Identity()
        needs_map = width != config.hidden_size
        self.projection = nn.Linear(width, config.hidden_size, bias=config.bias) if needs_map else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor) -> Tensor:
        """Return the embeddings `[batch, seq, hidden]`; both arguments are int64 `[batch, seq]`."""
        seq = input_ids.shape[1]
        if self.longest is not None:
            check_length(seq, self.longest)
        hidden = self.token(input_ids)
        if self.segment is not None:
            hidden = hidden + self.segment(token_type_ids.clamp_max(self.segment.num_embeddings - 1))
        if self.absolute is not None:
            hidden = hidden + self.absolute.weight[:seq]
        hidden = self.dropout(self.norm(hidden))
        return hidden if self.projection is None else self.projection(hidden)


def attention_logits(query: Tensor, key: Tensor, terms: PositionTerms) -> Tensor:
    """Return the logits A `[batch, heads, seq, seq]` of `query` and `key` `[batch, heads, seq, head_dim]`.

        A[b,h,i,j] = ( Q_i·K_j + Q_i·T^q[h, r(i,j)] + K_j·T^k[h, r(i,j)] ) · scale + B[b,h,i,j] + v[h, r(i,j)]

    Training computes the same with strided views, which `torch.export` cannot trace; here r(i,j) is an index.
    """
    logits, terms = query @ key.transpose(-1, -2), terms.by_offset
    place = torch.arange(key.shape[2], device=key.device)
    row = (place[:, None] - place).clamp(terms.lowest, terms.highest) - terms.lowest  # r, [seq, seq]
    if terms.query_table is not None:
        logits = logits + (query @ terms.query_table.transpose(-1, -2)).gather(-1, row.expand_as(logits))
    if terms.key_table is not None:
        logits = logits + (terms.key_table @ key.transpose(-1, -2)).gather(-2, row.expand_as(logits))
    logits = logits * terms.scale
    if terms.bias is not None:
        logits = logits + terms.bias
    if terms.offset_bias is not None:
        logits = logits + terms.offset_bias[:, row]  # [1 or heads, seq, seq]
    return logits


class SelfAttention(nn.Module):
    """Attention with the position terms of one layer."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.query = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)
        self.key = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias and config.key_bias)
        self.value = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)
        self.output = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def forward(
        self, hidden: Tensor, source: Tensor, allowed: Tensor, terms: PositionTerms, rotate: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Attend with queries from `hidden` to keys and values from `source`, `[batch, seq, hidden]` each.

        Return hidden states of the same shape and the probabilities `[batch, heads, seq, seq]`.
        """
        query, key = rotate(self.split(self.query(hidden))), rotate(self.split(self.key(source)))
        logits = attention_logits(query, key, terms).masked_fill(~allowed, torch.finfo(query.dtype).min)
        value = self.split(self.value(source))
        probabilities = logits.softmax(-1, dtype=torch.float32).to(value.dtype)
        context = self.dropout(probabilities) @ value  # [batch, heads, seq, head_dim]
        return self.output(context.transpose(1, 2).flatten(2)), probabilities

    def split(self, projected: Tensor) -> Tensor:
        """Return `[batch, seq, hidden]` as `[batch, heads, seq, head_dim]`."""
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear maps with an exact GELU in between; a third multiplies the first in GEGLU and SwiGLU."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__()
        outside, inside = config.hidden_size, config.intermediate_size
        self.input = nn.Linear(outside, inside, bias=config.bias)
        self.gate = nn.Linear(outside, inside, bias=config.bias) if config.ffn != "gelu" else None
        self.activation = activation(config)
        self.output = nn.Linear(inside, outside, bias=config.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        expanded = self.activation(self.input(hidden))
        return self.output(expanded if self.gate is None else expanded * self.gate(hidden))


class EncoderLayer(nn.Module):
    """Attention and feed-forward, each with a residual; a norm after each sum ("post") or before each block ("pre")."""

    def __init__(self, config: DdrpConfig, encoding: type[PositionEncoding], number: int) -> None:
        super().__init__()
        self.config = config
        self.norm_before = config.layernorm_position == "pre"
        self.attention = SelfAttention(config)
        self.attention_norm = norm(config) if number > 0 or config.first_norm else nn.Identity()
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = norm(config)
        self.position = encoding(config) if config.relative_table == "per-layer" else None
        self.layer_position = encoding.layer_part(config)
        self.window = config.window(number)
        self.layer_position.is_local = self.window is not None
        self.name_terms = encoding.terms
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden: Tensor, inputs: PassInputs, source: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the next hidden states and the attention probabilities; keys come from `source`, else `hidden`."""
        position = inputs.position if self.position is None else self.position(inputs.position_ids)
        tensors = self.layer_position.of_layer(position, self.attention.query, self.attention.key)
        terms = self.name_terms(self.config, tensors)
        rotate = partial(self.layer_position.rotate, position_ids=inputs.position_ids)
        sides = (hidden, hidden if source is None else source)
        queries, keys = (self.attention_norm(states) if self.norm_before else states for states in sides)
        attended, probabilities = self.attention(queries, keys, self._within_window(inputs.allowed), terms, rotate)
        hidden = hidden + self.dropout(attended)
        hidden = hidden if self.norm_before else self.attention_norm(hidden)
        expanded = self.feed_forward(self.feed_forward_norm(hidden) if self.norm_before else hidden)
        hidden = hidden + self.dropout(expanded)
        return hidden if self.norm_before else self.feed_forward_norm(hidden), probabilities

    def _within_window(self, allowed: Tensor) -> Tensor:
        """Return the allowed pairs, bool `[batch, 1, 1, seq]`, or `[batch, 1, seq, seq]` in a layer with a window."""
        if self.window is None:
            return allowed
        place = torch.arange(allowed.shape[-1], device=allowed.device)
        return allowed & ((place[:, None] - place).abs() <= self.window)
