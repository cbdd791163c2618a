"""Embeddings, and the mean pairwise cosines of tokens and heads.

The cosines are MTH's terms TCD (eq. 17) and HCD (eq. 18), and the measures f(S) and f(H). TCD is the mean cosine of the
last hidden states of n′ sampled tokens, or, ours, the mean squared cosine. HCD is the mean cosine of the pre-softmax
logits of m′ sampled heads, averaged over layers. Closed forms give the means over pairs exactly, without a pairwise
matrix:

    Σ_{i<j} cos(h_i, h_j) = (‖Σ_i ĥ_i‖² − n)/2,  ĥ the unit vectors;
    Σ_{i<j} cos²(h_i, h_j) = (‖ĤᵀĤ‖² − n)/2,  Ĥ the matrix of the ĥ_i, hidden×hidden;
    ⟨A¹,A²⟩ = ⟨Q¹ᵀQ², K¹ᵀK²⟩ for content-only heads, d×d matrices, padded rows zeroed.

A flattened head is the vector of its valid×valid logits; in local layers, of those within the window. Padding never
enters.

Open reading: HCD compares all learned terms of the logits, including TUPE's bias B, although all layers share one B:
the paper makes no exception in its "attention weights".
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.errors import UserError
from megatron_ddrp.model.fused import Norm
from megatron_ddrp.model.stages import Inputs, State, blend, wide

SMALLEST_NORM = 1e-12
"""Norm below which a vector counts as zero; its cosine with any vector is then 0."""


def document_mask(document_ids: Tensor, num_documents: int) -> Tensor:
    """Mark the tokens of each document: `document_ids` `[batch, seq]` → bool `[batch, num_documents, seq]`."""
    return document_ids.unsqueeze(1) == torch.arange(1, num_documents + 1, device=document_ids.device).unsqueeze(-1)


def token_cosine(hidden: Tensor, token_mask: Tensor, squared: bool = False) -> Tensor:
    """Return the mean pairwise cosine of the marked tokens of each document (eq. 17), or 0 if there are fewer than two.

    `hidden` `[batch, seq, hidden]`, `token_mask` `[batch, documents, seq]` → fp32 (or fp64) `[batch, documents]`.

    With `squared` it is the mean squared cosine. For n tokens in d dimensions that is at least (n − d)/(d(n − 1))
    (Welch, 1974), and only vectors spread evenly over all dimensions have so little. Two opposite poles have 1, the
    most, whereas their mean cosine is the least. It needs one hidden×hidden buffer per document.
    """
    hidden = wide(hidden)
    weights = token_mask * _inverse_root(hidden.pow(2).sum(-1)).unsqueeze(1)  # [batch, documents, seq]
    if squared:
        marked = hidden.unsqueeze(1) * weights.unsqueeze(-1)  # [batch, documents, seq, hidden], unit vectors or 0
        total = _SelfProduct.apply(marked).flatten(2)  # [batch, documents, hidden·hidden]
    else:  # Σ_i ĥ_i is a product with the inverse norms, so unit vectors are never stored
        total = torch.bmm(weights, hidden)  # [batch, documents, hidden]
    count = token_mask.sum(-1).to(hidden.dtype)  # [batch, documents]
    pairs = count * (count - 1)
    return torch.where(pairs > 0, (total.pow(2).sum(-1) - count) / pairs.clamp_min(1), 0.0)


def cosine_of_gram(gram: Tensor) -> Tensor:
    """Return the mean pairwise cosine of m′ heads from their inner products: `[.., m′, m′]` → `[..]`."""
    norms = gram.diagonal(dim1=-2, dim2=-1).clamp_min(SMALLEST_NORM**2).sqrt()  # [.., m′]
    cosines = gram / (norms.unsqueeze(-1) * norms.unsqueeze(-2))
    return (cosines.sum((-2, -1)) - cosines.diagonal(dim1=-2, dim2=-1).sum(-1)) / num_ordered_pairs(gram.shape[-1])


def num_ordered_pairs(num_heads: int) -> int:
    """Return m′·(m′ − 1)."""
    return num_heads * (num_heads - 1)


class _SelfProduct(torch.autograd.Function):
    """xᵀx, `[.., seq, n]` → `[.., n, n]`. Its gradient takes one product instead of one for each of the two x."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.transpose(-1, -2) @ x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return x @ (gradient + gradient.transpose(-1, -2))


def content_gram(query: Tensor, key: Tensor, documents: Tensor, scale: float) -> Tensor:
    """Return the inner products of content-only heads, scale² · ⟨QᵃᵀQᵇ, KᵃᵀKᵇ⟩ over the tokens of each document.

    `query`, `key` `[batch, m′, seq, head_dim]`, `documents` bool `[batch, documents, seq]` →
    `[batch, documents, m′, m′]`.
    """
    num_heads, head_dim = query.shape[1], query.shape[3]

    def feature_products(x: Tensor) -> Tensor:
        flat = x.transpose(1, 2).flatten(2).unsqueeze(1) * documents.unsqueeze(-1)  # [batch, documents, seq, m′·d]
        products = _SelfProduct.apply(flat)  # [batch, documents, m′·d, m′·d]
        return products.unflatten(-1, (num_heads, head_dim)).unflatten(-3, (num_heads, head_dim))

    return (feature_products(query) * feature_products(key)).sum((-3, -1)) * scale**2


def content_cosine_of_all(query: Tensor, key: Tensor, documents: Tensor) -> Tensor:
    """Return the mean pairwise cosine of *all* content-only heads, `[batch, documents]`. One S×S buffer per row."""
    return cosine_of_total(content_total(query, key, documents), documents, query.shape[1])


def content_total(query: Tensor, key: Tensor, documents: Tensor) -> Tensor:
    """Return Σ_a A_a/‖A_a‖ of content-only heads: `query`, `key` `[batch, heads, seq, d]` → `[batch, seq, seq]`."""
    weights = documents[:, :, None, :, None].to(query.dtype)  # [batch, documents, 1, seq, 1]

    def feature_products(x: Tensor) -> Tensor:
        return x.unsqueeze(1).transpose(-1, -2) @ (x.unsqueeze(1) * weights)  # [batch, documents, heads, d, d]

    squares = (feature_products(query) * feature_products(key)).sum((-2, -1))  # [batch, documents, heads] ‖A_a‖²
    unit = query * _by_row(_inverse_root(squares), documents).unsqueeze(-1)
    total = unit.transpose(1, 2).flatten(2) @ key.transpose(1, 2).flatten(2).transpose(1, 2)  # [batch, seq, seq]
    allowed = (documents.unsqueeze(-1) & documents.unsqueeze(-2)).any(1)  # [batch, seq, seq]
    return total.masked_fill(~allowed, 0.0)


def logits_cosine(logits: Tensor, allowed: Tensor, documents: Tensor) -> Tensor:
    """Return the mean pairwise cosine of heads from their logits, over the allowed pairs of each document.

    `logits` `[batch, m′, seq, seq]`, `allowed` bool `[batch, 1, seq, seq]`, `documents` bool `[batch, documents, seq]`
    → `[batch, documents]`. Needs one S×S buffer per row.
    """
    return cosine_of_total(logits_total(logits, allowed, documents), documents, logits.shape[1])


def logits_total(logits: Tensor, allowed: Tensor, documents: Tensor) -> Tensor:
    """Return Σ_a A_a/‖A_a‖ over the heads of `logits`, `[batch, seq, seq]`; arguments as in `logits_cosine`."""
    logits = logits.masked_fill(~allowed, 0.0)
    squares = torch.einsum("bhi,bki->bkh", logits.pow(2).sum(-1), documents.to(logits.dtype))  # [batch, documents, m′]
    return (logits * _by_row(_inverse_root(squares), documents).unsqueeze(-1)).sum(1)


def _inverse_root(squares: Tensor) -> Tensor:
    return squares.clamp_min(SMALLEST_NORM**2).rsqrt()


def _by_row(per_document: Tensor, documents: Tensor) -> Tensor:
    """Give each token its document's value, and padding 0: `[batch, documents, heads]` → `[batch, heads, seq]`."""
    return torch.einsum("bkh,bki->bhi", per_document, documents.to(per_document.dtype))


def cosine_of_total(total: Tensor, documents: Tensor, num_heads: int) -> Tensor:
    """Return (‖Σ_a A_a/‖A_a‖‖² − m)/(m(m − 1)) per document; `total` is Σ_a A_a/‖A_a‖, `[batch, seq, seq]`."""
    squares = torch.einsum("bi,bki->bk", total.pow(2).sum(-1), documents.to(total.dtype))
    return (squares - num_heads) / num_ordered_pairs(num_heads)


def check_length(length: int, longest: int) -> None:
    """Raise `UserError` for rows longer than the model's positions."""
    if length > longest:
        raise UserError(
            f"rows of {length} tokens: this model has positions for --seq-length {longest} only; shorten them, or "
            "train a relative encoding"
        )


class Embeddings(nn.Module):
    """First stage, `Inputs` → `State`: embeds the ids and computes the position tensors that all layers share.

    The embeddings of tokens, segments and absolute positions (the last two are optional) are added, then normalised
    unless `--no-embedding-norm` says otherwise.
    Embeddings narrower or wider than the hidden states (`--embedding-size`) are projected after their norm, as in
    ELECTRA. `shared` serves ELECTRA's generator: it lends token, segment and absolute embeddings and their norm, and
    the result is projected to the generator's hidden size.
    """

    tables: tuple[str, ...] = ("token",)
    """Names of the embeddings with one row per piece of the vocabulary."""

    def __init__(self, config: ModelConfig, notes_share: float = 0.0, shared: Embeddings | None = None) -> None:
        super().__init__()
        self.config, self.notes_share = config, notes_share
        width = config.embedding_width
        if shared is None:
            self.token = nn.Embedding(config.padded_vocab_size, width)
            self.segment = nn.Embedding(config.num_segments, width) if config.num_segments else None
        else:
            self.token, self.segment, width = shared.token, shared.segment, shared.token.embedding_dim
        self.projection: nn.Module | None = None
        if shared is not None or width != config.hidden_size:
            self.projection = nn.Linear(width, config.hidden_size, bias=config.bias)
        encoding = config.encoding(config)
        adds_absolute = config.adds_absolute_embedding
        self.longest = config.seq_length if encoding.limits_length or adds_absolute else None
        if shared is None:
            self.absolute = nn.Embedding(config.seq_length, width) if adds_absolute else None
        else:
            self.absolute = shared.absolute
        self.position = encoding if config.relative_table == "shared" else None
        own = Norm(width, config) if config.embedding_norm else nn.Identity()
        self.norm: nn.Module = own if shared is None else shared.norm
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, inputs: Inputs) -> State:
        """Return the input state of the first layer."""
        hidden = self.embed(inputs)
        nothing = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        position: tuple[Tensor, ...] = ()
        if self.position is not None:
            position = self.position.of_rows(inputs.batch.position_ids, inputs.layout.restarts)
        lengths = document_mask(inputs.batch.document_ids, inputs.draws.num_documents).sum(-1)  # [batch, documents]
        return State(inputs, hidden, position, inputs.draws.heads, (lengths >= 2).float(), nothing)

    def look_up(self, input_ids: Tensor) -> Tensor:
        """Return the token embeddings: int64 `[batch, seq]` → `[batch, seq, hidden]`."""
        return self.token(input_ids)

    def embed(self, inputs: Inputs) -> Tensor:
        """Return `[batch, seq, hidden]`: the sum of the embeddings, blended with notes, then normalised."""
        batch, notes = inputs.batch, inputs.notes
        if self.longest is not None:
            check_length(batch.input_ids.shape[1], self.longest)
        hidden = self.tokens(batch)
        if self.absolute is not None:
            hidden = hidden + self.absolute(batch.position_ids)
        if notes is not None:
            hidden = blend(hidden, notes.places, notes.vectors.to(hidden.dtype), self.notes_share)
        hidden = self.dropout(self.norm(hidden))
        return hidden if self.projection is None else self.projection(hidden)

    def tokens(self, batch: Batch) -> Tensor:
        """Return the sum of token and segment embeddings, `[batch, seq, width]`."""
        tokens = self.look_up(batch.input_ids)
        if self.segment is None:
            return tokens
        segments = batch.segment_ids if self.segment.num_embeddings > 1 else torch.zeros_like(batch.segment_ids)
        return tokens + self.segment(segments)
