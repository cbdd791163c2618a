"""One Transformer layer: attention, feed-forward, residuals; LayerNorm after each block (BERT) or before it.

`start_at_offsets` begins attention at neighbours (`--attention-init offsets`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ddrp.config import ModelConfig
from megatron_ddrp.model.attention.backends import attend_from, backend_function, reads_runs, resolve_backend
from megatron_ddrp.model.attention.logits import Attended, Attending, Demand, attention_logits
from megatron_ddrp.model.fused import (
    GeluLinear,
    ResidualNorm,
    add,
    compiles,
    gated_gelu,
    gated_silu,
    maps_of,
    run_compiled,
)
from megatron_ddrp.model.positions import PositionTerms
from megatron_ddrp.model.positions.contract import reached_offsets
from megatron_ddrp.model.stages import Judge, Layout, State

Rotate = Callable[[Tensor, Tensor], Tensor]
"""Type of `LayerPositions.rotate`: states and position ids → rotated states."""


class Projecting(nn.Module):
    """Base of the blocks in which several linear maps read the same hidden states."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.compile_setting = config.compile

    def project(self, hidden: Tensor, *maps: nn.Linear) -> tuple[Tensor, ...]:
        """Return `hidden` `[.., hidden]` for later readers, and the outputs of `maps`."""
        if compiles(self.compile_setting, hidden.device):
            return maps_of(hidden, maps)
        return (hidden, *(each(hidden) for each in maps))


class SelfAttention(Projecting):
    """Projections around the attention function. The weights' shapes determine the number of heads.

    Tensor parallelism leaves only some of a layer's heads in this module and overrides `project`, `own_randomness`,
    `cosine_apart` and `mean_of_heads`. `judge` is the objective if it looks inside attention.
    """

    def __init__(self, config: ModelConfig, window: int | None = None, judge: Judge | None = None) -> None:
        super().__init__(config)
        self.head_dim, self.window, self.judge = config.head_dim, window, judge
        self.dropout, self.backend = config.attention_dropout, config.attention_backend
        self.encoding = config.encoding
        self.query = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)
        self.key = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias and config.key_bias)
        self.value = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)
        self.output = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)

    def own_randomness(self) -> AbstractContextManager:
        """Return the context in which dropout draws for this module's heads."""
        return nullcontext()

    def cosine_apart(self, attending: Attending) -> Tensor | None:
        """Return HCD's cosine, summed over the documents, if it needs heads of other modules.

        None leaves the cosine to the backend, which has the logits already.
        """
        return None

    def mean_of_heads(self, x: Tensor) -> Tensor:
        """Return the mean over all heads of the layer: `[batch, heads, ..]` → `[batch, ..]`."""
        return x.mean(1)

    def split(self, projected: Tensor) -> Tensor:
        """Return `[batch, seq, hidden]` → `[batch, heads, seq, head_dim]`."""
        return projected.view(*projected.shape[:2], projected.shape[-1] // self.head_dim, self.head_dim).transpose(1, 2)

    def merge(self, context: Tensor) -> Tensor:
        """Invert `split` and project: `[batch, heads, seq, head_dim]` → `[batch, seq, hidden]`."""
        return self.output(context.transpose(1, 2).flatten(2))

    def demand(self, hidden: Tensor, layout: Layout) -> Demand:
        """Return the requirements for a backend; `hidden` has the type and the device of the hidden states."""
        return Demand(hidden.device, hidden.dtype, self.dropout, self.head_dim, self.window, layout.causal)

    def reads_runs(self, hidden: Tensor, layout: Layout) -> bool:
        """Return whether `Layout.runs` is read, whose size differs between micro-batches."""
        return reads_runs(self.backend, self.demand(hidden, layout), self.encoding.in_logits, layout.full)

    def forward(
        self, hidden: Tensor, terms: PositionTerms, rotate: Rotate, state: State, layer: int
    ) -> tuple[Tensor, Tensor, Tensor | None, Any]:
        """Return (`hidden` for later readers, attention's contribution to it, HCD's cosine, the next state's `own`).

        `hidden` and the contribution are `[batch, seq, hidden]`; the cosine is summed over documents, None without HCD.
        """
        inputs = state.inputs
        layout, demand = inputs.layout, self.demand(hidden, inputs.layout)
        backend, _ = resolve_backend(self.backend, demand, self.encoding.in_logits, layout.full)
        hidden, *projected = self.project(hidden, self.query, self.key, self.value)
        query, key, value = map(self.split, projected)
        batch, dropout = inputs.batch, self.dropout if self.training else 0.0
        query, key = rotate(query, batch.position_ids), rotate(key, batch.position_ids)
        heads = state.heads[layer]
        rows = (batch.document_ids, heads, dropout, state.counted, layout, self.window, layout.causal)
        terms = terms if demand.whole else terms.within(self.window, layout.causal)
        attending = Attending(query, key, value, terms, *rows)
        apart = self.cosine_apart(attending) if len(heads) else None
        if apart is not None:
            attending = attending._replace(heads=heads[:0])
        with self.own_randomness():
            context, cosine = backend_function(backend)(attending)
        own = state.own
        if self.judge is not None:
            own = self.judge.look_inside(state, Attended(attending, context, self.mean_of_heads))
        return hidden, self.merge(context), cosine if apart is None else apart, own


class FeedForward(Projecting):
    """Two linear maps with an exact GELU in between; a third multiplies the first in GEGLU and SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        is_gated = config.ffn != "gelu"
        self.join = gated_silu if config.ffn == "swiglu" else gated_gelu
        first = nn.Linear if is_gated else GeluLinear
        self.input = first(config.hidden_size, config.ffn_size, bias=config.bias)
        self.gate = nn.Linear(config.hidden_size, config.ffn_size, bias=config.bias) if is_gated else None
        self.output = nn.Linear(config.ffn_size, config.hidden_size, bias=config.bias)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return `hidden` `[.., hidden]` for later readers, and the block's contribution to it."""
        is_compiled = compiles(self.compile_setting, hidden.device)
        if self.gate is not None:
            hidden, *parts = self.project(hidden, self.input, self.gate)
            expanded = run_compiled(self.join, tuple(parts)) if is_compiled else self.join(*parts)
        elif isinstance(self.input, GeluLinear) and is_compiled:
            hidden, expanded = self.input(hidden, gelu=True)
        else:
            expanded = F.gelu(self.input(hidden))
        return hidden, self.output(expanded)


class EncoderLayer(nn.Module):
    """One layer: `State` → `State`. Adds this layer's HCD to `head_cosine`."""

    def __init__(self, config: ModelConfig, number: int, judge: Judge | None = None) -> None:
        super().__init__()
        self.config, self.number = config, number
        self.attention = SelfAttention(config, config.window(number), judge)
        self.norm_before = config.layernorm_position == "pre"
        has_norm = number > 0 or config.first_norm
        self.attention_norm = ResidualNorm(config) if has_norm else nn.Identity()
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = ResidualNorm(config)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.position = config.encoding(config) if config.relative_table == "per-layer" else None
        self.layer_position = config.encoding.layer_part(config)
        self.layer_position.is_local = self.attention.window is not None
        self.name_terms = config.encoding.terms

    def forward(self, state: State) -> State:
        source, rotate = self._attention_input(state.hidden), self.layer_position.rotate
        source, attended, cosine, own = self.attention(source, self.terms(state), rotate, state, self.number)
        state = state._replace(hidden=self._join(state.hidden if self.norm_before else source, attended), own=own)
        if cosine is not None:
            state = state._replace(head_cosine=state.head_cosine + cosine.to(state.head_cosine.dtype))
        return state

    def decode(self, queries: Tensor, places: Tensor, state: State, times: int) -> Tensor:
        """Apply this layer `times` times to queries at some places; keys and values stay those of `state`.

        `queries` `[batch, m, hidden]`, `places` int64 `[batch, m]` → `[batch, m, hidden]`.
        """
        attention, terms = self.attention, self.terms(state)
        batch, source = state.inputs.batch, self._attention_input(state.hidden)
        _, *projected = attention.project(source, attention.key, attention.value)
        key, value = map(attention.split, projected)
        rotate, own_places = self.layer_position.rotate, batch.position_ids.gather(1, places)
        key = rotate(key, batch.position_ids)
        for _ in range(times):
            source, query = attention.project(self._attention_input(queries), attention.query)
            query = rotate(attention.split(query), own_places)
            dropout = attention.dropout if self.training else 0.0
            with attention.own_randomness():
                reached = reached_offsets(attention.window, state.inputs.layout.causal)
                context = attend_from(query, key, value, terms, places, batch.document_ids, dropout, reached)
            queries = self._join(queries if self.norm_before else source, attention.merge(context))
        return queries

    def logits(self, state: State) -> Tensor:
        """Return this layer's attention logits A before the padding mask, `[batch, heads, seq, seq]`, for analyses."""
        attention = self.attention
        source = self._attention_input(state.hidden)
        _, *projected = attention.project(source, attention.query, attention.key)
        query, key = map(attention.split, projected)
        rotate = self.layer_position.rotate
        query, key = rotate(query, state.inputs.batch.position_ids), rotate(key, state.inputs.batch.position_ids)
        return attention_logits(query, key, self.terms(state))

    def terms(self, state: State) -> PositionTerms:
        """Return the position terms of this layer."""
        inputs, position = state.inputs, state.position
        if self.position is not None:
            position = self.position.of_rows(inputs.batch.position_ids, inputs.layout.restarts)
        tensors = self.layer_position.of_layer(position, self.attention.query, self.attention.key)
        return self.name_terms(self.config, tensors)

    def runs_compiled(self, hidden: Tensor) -> bool:
        """Return whether dropout, residual sums and LayerNorms run as compiled regions."""
        return compiles(self.config.compile, hidden.device)

    def _attention_input(self, hidden: Tensor) -> Tensor:
        return self.attention_norm(hidden) if self.norm_before else hidden

    def _join(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Add attention and feed-forward to the residual stream; the configuration decides where LayerNorms go."""
        if self.runs_compiled(hidden):
            return self._join_compiled(hidden, attended)
        hidden = hidden + self.dropout(attended)
        hidden = hidden if self.norm_before else self.attention_norm(hidden)
        _, expanded = self.feed_forward(self.feed_forward_norm(hidden) if self.norm_before else hidden)
        hidden = hidden + self.dropout(expanded)
        return hidden if self.norm_before else self.feed_forward_norm(hidden)

    def _join_compiled(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Compute `_join` with the compiled regions of `model/fused.py`."""
        dropout = self.dropout.p if self.training else 0.0
        if self.norm_before:
            hidden, normed = self.feed_forward_norm(hidden, attended, dropout)
            _, expanded = self.feed_forward(normed)
            return run_compiled(add, (hidden, expanded), dropout)
        hidden, expanded = self.feed_forward(self.attention_norm(hidden, attended, dropout))
        return self.feed_forward_norm(hidden, expanded, dropout)


GAIN = 1.5
"""g. Half of it is too little: random terms then hide the maximum."""


@torch.no_grad()
def start_at_offsets(positions: nn.Embedding, layers: Iterable[EncoderLayer], config: ModelConfig) -> None:
    """Set the table of positions, and add the maps that read it to the queries and keys of every layer.

    This is `--attention-init offsets` (ours): each head starts with attention to one place beside its own. From random
    weights, absolute positions need tens of millions of tokens before attention uses them (docs/lab/plateau.md). A
    shift of sinusoids is a linear map (Vaswani et al., arXiv:1706.03762, section 3.5), so projections can begin with
    it:

        p_i[2k], p_i[2k+1] = √2·σ·sin(ω_k i + k), √2·σ·cos(ω_k i + k),    ω_k = π/10^((k + ½)/(D/2)),  0 ≤ k < D/2
        W^K ← W^K + g·P_h        W^Q ← W^Q + g·R_h P_h        so Q_i·K_j ∝ Σ_k cos(ω_k (i + o_h − j)) + random terms

    P_h picks the pairs k = h, h + H, h + 2H, … for head h of H, and R_h turns each by ω_k·o_h, so that the head attends
    to j = i + o_h, with o = −1, 1, −2, 2, −3, … Wavelengths from 2 to 20 places make this maximum one place wide. W^K
    and W^Q on the right are the random ones, σ is `init_method_std`; the phase k keeps the LayerNorm of the sums even.
    Everything is trained as usual. Other starts with a structure set the mean of W^Q(W^K)ᵀ (mimetic initialisation,
    Trockman and Kolter, arXiv:2305.09828).
    """
    places, width = positions.weight.shape
    number = torch.arange(width // 2, device=positions.weight.device)
    frequencies = math.pi * 10 ** (-(number + 0.5) / (width // 2))  # [width/2]
    angles = torch.arange(places, device=number.device).unsqueeze(1) * frequencies + number  # [places, width/2]
    waves = torch.stack((angles.sin(), angles.cos()), -1).flatten(1)  # [places, width], but for an odd last column
    positions.weight[:, : waves.shape[1]] = math.sqrt(2) * config.init_method_std * waves
    shifts = [(head // 2 + 1) * (1 if head % 2 else -1) for head in range(config.num_attention_heads)]  # −1, 1, −2, …
    key, query = (GAIN * shifted_pairs(frequencies, some, config) for some in ([0] * len(shifts), shifts))
    for layer in layers:
        layer.attention.key.weight += key
        layer.attention.query.weight += query


def shifted_pairs(frequencies: Tensor, shifts: Sequence[int], config: ModelConfig) -> Tensor:
    """Return the map from p_i to the pairs of every head h in p_{i + shifts[h]}: `[hidden, hidden]`."""
    result = torch.zeros(config.hidden_size, config.hidden_size, device=frequencies.device)
    for head, shift in enumerate(shifts):
        pair = torch.arange(len(frequencies), device=result.device)[head :: len(shifts)][: config.head_dim // 2]
        sine, cosine = 2 * pair, 2 * pair + 1
        row = head * config.head_dim + 2 * torch.arange(len(pair), device=result.device)
        turn = frequencies[pair] * shift
        result[row, sine], result[row, cosine] = turn.cos(), turn.sin()
        result[row + 1, sine], result[row + 1, cosine] = -turn.sin(), turn.cos()
    return result
