"""Heads of an exported model; this file is copied into every exported folder, see modeling_ddrp.py.

The heads for fine-tuning compute the same outputs and losses as BERT's in transformers.
"""

from collections import OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ddrp.conversion.configuration_ddrp import DdrpConfig
from megatron_ddrp.conversion.layers_ddrp import activation, check_length, norm


class MaskedLMHead(nn.Module):
    """Dense, GELU, LayerNorm, then the token embedding as the output matrix, plus a bias per piece."""

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.embedding_width, bias=config.biased_norms)
        self.activation = activation(config)
        self.norm = norm(config, config.embedding_width)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden: Tensor, token_embedding: Tensor) -> Tensor:
        """Map `[.., hidden]` to `[.., vocab]`; `token_embedding` is `[vocab, embedding]`."""
        return F.linear(self.norm(self.activation(self.dense(hidden))), token_embedding, self.bias)


class MaskDecoder(nn.Module):
    """DeBERTa's enhanced mask decoder: adds absolute positions just before the masked-LM head, for every token.

    It applies the last layer twice more. The first queries are absolute embedding + H[L−1]; keys and values come from
    H[L−1].
    """

    def __init__(self, config: DdrpConfig) -> None:
        super().__init__()
        self.absolute = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def forward(self, before: Tensor, encoder: Any, attention_mask: Tensor | None) -> Tensor:
        """Map `before` = H[L−1], `[batch, seq, hidden]`, to decoded states of the same shape."""
        seq = before.shape[1]
        check_length(seq, self.absolute.num_embeddings)
        inputs, states = encoder.pass_inputs(before, attention_mask), before + self.absolute.weight[:seq]
        for _ in range(2):
            states, _ = encoder.layers[-1](states, inputs, before)
        return encoder.normalise(states)


def replaced_token_head(config: DdrpConfig, contextual: bool = False) -> nn.Sequential:
    """Return a discriminator's head, `[.., hidden]` → `[.., 1]`: dense, GELU, linear, after a norm if contextual."""
    parts = OrderedDict({"norm": norm(config)} if contextual else {})
    parts["dense"] = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)
    parts |= {"activation": nn.GELU(), "output": nn.Linear(config.hidden_size, 1)}
    return nn.Sequential(parts)


class Pooler(nn.Module):
    """BERT's pooler: dense and tanh on the first token."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[batch, seq, hidden]` to `[batch, hidden]`."""
        return torch.tanh(self.dense(hidden[:, 0]))


class TaskHead(nn.Module):
    """Head that fine-tuning adds: the pooler if `is_pooled`, dropout, and a linear layer named `output`.

    The layers have the names of the exported classes, so that a trained head is saved as it is.
    """

    def __init__(self, hidden_size: int, num_outputs: int, is_pooled: bool, dropout: float, output: str) -> None:
        super().__init__()
        self.pooler = Pooler(hidden_size) if is_pooled else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.add_module(output, nn.Linear(hidden_size, num_outputs))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[batch, seq, hidden]` to `[batch, outputs]` if pooled, else to `[batch, seq, outputs]`."""
        for layer in self.children():
            hidden = layer(hidden)
        return hidden


def classifier_dropout(config: DdrpConfig) -> float:
    """Return the dropout rate before a classifier; by default that of the hidden states."""
    return config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout


def classification_loss(config: DdrpConfig, logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of logits `[batch, num_labels]` by `problem_type`: squared error or (binary) cross entropy.

    If config.json names no type, the labels decide, and `config` stores the result: one label is a regression, integers
    are classes, other labels are one yes or no per class.
    """
    if config.problem_type is None and config.num_labels == 1:
        config.problem_type = "regression"
    elif config.problem_type is None:
        is_class = labels.dtype in (torch.int, torch.long)
        config.problem_type = "single_label_classification" if is_class else "multi_label_classification"
    if config.problem_type == "single_label_classification":
        return F.cross_entropy(logits, labels.flatten())
    labels = labels.to(logits.dtype).view_as(logits)
    if config.problem_type == "regression":
        return F.mse_loss(logits, labels)
    return F.binary_cross_entropy_with_logits(logits, labels)


def stack_spans(start: Tensor | None, end: Tensor | None) -> Tensor | None:
    """Return positions `[batch]` or `[batch, 1]` as one tensor `[batch, 2]`, or None if one of them is missing."""
    return None if start is None or end is None else torch.stack([start.flatten(), end.flatten()], dim=-1)


def span_loss(logits: Tensor, spans: Tensor) -> Tensor:
    """Return the mean cross entropy of the first and the last token of the answer.

    `logits` are `[batch, seq, 2]`, `spans` int64 `[batch, 2]`; positions after the last token are ignored.
    """
    behind = logits.shape[1]
    losses = [
        F.cross_entropy(logits[..., side], spans[:, side].clamp(0, behind), ignore_index=behind) for side in (0, 1)
    ]
    return (losses[0] + losses[1]) / 2
