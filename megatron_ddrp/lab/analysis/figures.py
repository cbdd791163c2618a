"""Measures of attention and similarity, and the figures of all analyses.

Attention above the diagonal of a map looks to the right, attention below it to the left.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.encoders.huggingface import layer_states
from megatron_ddrp.errors import UserError
from megatron_ddrp.model import Encoder
from megatron_ddrp.model.attention.backends import probabilities
from megatron_ddrp.model.attention.logits import allowed_pairs
from megatron_ddrp.model.embeddings import document_mask, token_cosine
from megatron_ddrp.model.encoder import EncoderLayer
from megatron_ddrp.model.stages import Draws, Inputs, State
from megatron_ddrp.pages import plotting
from megatron_ddrp.tasks.statistics import HEAD_SIMILARITY, SPACE, TOKEN_SIMILARITY


def layer_maps(model: Encoder, batch: Batch) -> Iterator[Tensor]:
    """Yield the attention probabilities of each layer, `[batch, heads, seq, seq]`.

    They are 0 in the rows and columns of padding, and outside the window of a local layer.
    """
    for logits, window in layer_logits(model, batch):
        allowed = allowed_pairs(batch.document_ids, window)
        yield probabilities(logits, allowed, dropout=0.0).masked_fill(~allowed, 0.0)


@torch.no_grad()
def layer_logits(model: Encoder, batch: Batch) -> Iterator[tuple[Tensor, int | None]]:
    """Yield the attention logits of each layer, `[batch, heads, seq, seq]`, and its window in tokens.

    The logits have values at padding and outside the window too; the window of a layer without one is None.
    """
    state = _first_state(model, batch)
    for layer in model.layers:
        assert isinstance(layer, EncoderLayer)
        yield layer.logits(state), layer.attention.window
        state = layer(state)


def sides(maps: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums above and below the diagonal, divided by the sentence's length, `[batch, heads]` each.

    `maps` is `[batch, heads, seq, seq]` with 0 for padding, `lengths` `[batch]`.

    The triangles exclude the diagonal; [CLS] and [SEP] count like other tokens.
    """
    n = lengths[:, None].to(maps.dtype)
    return maps.triu(1).sum((-2, -1)) / n, maps.tril(-1).sum((-2, -1)) / n


def divide_heads(up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of the heads of group 1 and of group 2, int64 `[batch, heads // 2]` each.

    `up` and `down` are those of `sides`. Raises `UserError` for a model with one head.

    The division is even (section 5.3 and appendix C of the paper): for each sentence and layer, the half that looks
    most to the right is group 1, the half that looks most to the left group 2. With an odd number of heads, the middle
    one belongs to neither.
    """
    num_heads = up.shape[-1]
    if num_heads < 2:
        raise UserError("heads are divided into two groups, but this model has one head: use a model with two or more")
    order = (up - down).argsort(dim=-1, descending=True, stable=True)
    return order[:, : num_heads // 2], order[:, num_heads - num_heads // 2 :]


GROUPS = ("heads looking right", "heads looking left", "all heads")


@dataclass(frozen=True)
class AttentionMap:
    """A mean attention map and its shares to the right and to the left."""

    name: str
    map: NDArray[np.float64]
    """Mean probabilities `[seq, seq]`: query i, key j."""
    up: float
    """Share of the attention above the diagonal, the mean over sentences."""
    down: float
    """Share of the attention below the diagonal, the mean over sentences."""


def measure_maps(model: Encoder, batches: Iterable[Batch], layer: int, heads: Sequence[int] = ()) -> list[AttentionMap]:
    """Return the mean maps of `layer`: one per group of heads, or one per head if `heads` names some.

    Layers and heads are counted from 1. `batches` are on the model's device and hold sentences of one length.

    The groups look right, look left, or are all heads (figure 4 of the paper). Each sentence has its own division of
    the heads, as in Algorithm 1. All sentences have one length, so that the rows of a map sum to 1 and no pattern comes
    from lengths.
    """
    names = [f"head {head}" for head in heads] or list(GROUPS)
    totals, sums, count = np.zeros(()), np.zeros((len(names), 2)), 0
    for batch in batches:
        maps = next(m for number, m in enumerate(layer_maps(model, batch), 1) if number == layer)
        panels, up, down = choose_panels(maps, batch.document_ids.sum(1), heads)
        totals = totals + panels.double().sum(0).cpu().numpy()  # [panels, seq, seq]
        sums += torch.stack([up, down], -1).double().sum(0).cpu().numpy()
        count += len(batch.input_ids)
    return [AttentionMap(*row) for row in zip(names, totals / count, *(sums / count).T.tolist(), strict=True)]


def choose_panels(maps: Tensor, lengths: Tensor, heads: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return one map per sentence and panel, and its attention above and below the diagonal.

    `maps` are a layer's, `[batch, heads, seq, seq]`; the result is `[batch, panels, seq, seq]`, `[batch, panels]` and
    `[batch, panels]`.
    """
    up, down = sides(maps, lengths)
    if heads:
        chosen = torch.tensor(heads, device=maps.device) - 1
        return maps[:, chosen], up[:, chosen], down[:, chosen]
    right, left = divide_heads(up, down)
    everyone = torch.arange(maps.shape[1], device=maps.device).expand(len(maps), -1)
    rows = torch.arange(len(maps), device=maps.device)[:, None]

    def means(values: Tensor) -> Tensor:
        return torch.stack([values[rows, group].mean(1) for group in (right, left, everyone)], 1)

    return means(maps), means(up), means(down)


@dataclass(frozen=True)
class LayerTriangles:
    """Share of sentences with the effect in one layer, and the mean attention of both groups."""

    share: float
    """Share of the sentences that show the effect, in [0, 1]."""
    group_1_up: float
    """Mean over sentences of the attention of group 1 above the diagonal."""
    group_2_down: float
    """Mean over sentences of the attention of group 2 below the diagonal."""


def triangle_parts(maps: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return group 1's attention above the diagonal and group 2's below it, `[batch]` each.

    They are Algorithm 1's amp1_up and amp2_down. `maps` is `[batch, heads, seq, seq]` with 0 for padding.
    """
    up, down = sides(maps, lengths)
    right, left = divide_heads(up, down)
    return up.gather(1, right).mean(1), down.gather(1, left).mean(1)


def measure_triangles(model: Encoder, batches: Iterable[Batch], threshold: float) -> list[LayerTriangles]:
    """Run Algorithm 1 for every layer of a model over batches of sentences on its device.

    The algorithm (appendix C of the paper) gives the share of sentences whose heads show the up-down triangle effect. A
    sentence shows the effect in a layer if group 1's heads have on average at least `threshold` of their attention
    above the diagonal, and group 2's heads at least as much below it. Two departures from the printed algorithm: its
    loop never ends at a sentence without the effect, which here counts as a miss; and it divides by 64, the longest
    sentence, where we divide by the sentence's own length. The printed share is the last layer's.
    """
    sums, count = torch.zeros(model.config.num_layers, 3, dtype=torch.float64), 0  # hits, group 1 up, group 2 down
    for batch in batches:
        lengths = batch.document_ids.sum(1)
        for number, maps in enumerate(layer_maps(model, batch)):
            up, down = triangle_parts(maps, lengths)
            hits = (up >= threshold) & (down >= threshold)
            sums[number] += torch.stack([hits.double().sum(), up.double().sum(), down.double().sum()]).cpu()
        count += len(batch.input_ids)
    return [LayerTriangles(*row) for row in (sums / count).tolist()]


@dataclass(frozen=True)
class Similarity:
    """Means over sentences, each in [−1, 1]."""

    token_similarity: float
    """f(S), the mean cosine of two tokens of a sentence."""
    head_similarity_by_layer: tuple[float, ...]
    """Terms of f(H), from the first layer to the last."""
    sentences: int

    @property
    def head_similarity(self) -> float:
        """f(H), the mean cosine of two heads of a layer, averaged over layers."""
        return sum(self.head_similarity_by_layer) / len(self.head_similarity_by_layer)


def measure_similarity(model: Encoder, batches: Iterable[Batch]) -> Similarity:
    """Return f(S) and f(H) (eq. 15 and 16, figures 2 and 3a of the paper) of a model over batches on its device.

        f(S) = 2/(n(n−1)) Σ_{i<j} cos(h_i, h_j)              over the last hidden states of all n tokens
        f(H) = 2/(L m(m−1)) Σ_l Σ_{i<j} cos(a_i^l, a_j^l)    over the logits of all m heads of each of L layers

    They are TCD and HCD over all tokens and heads and share their closed forms, which compute no cosine of a single
    pair. Both are means over sentences; `a` is the pre-softmax logits, as in HCD.

    Raises `UserError` for a model with one head.
    """
    if model.config.num_attention_heads < 2:
        raise UserError("f(H) compares attention heads, but this model has one: use a model with two or more")
    tokens, heads, count = 0.0, torch.zeros(model.config.num_layers, dtype=torch.float64), 0
    for batch in batches:
        token_sum, head_sums = similarity_sums(model, batch)
        tokens += float(token_sum)
        heads += head_sums.double().cpu()
        count += len(batch.input_ids)
    return Similarity(tokens / count, tuple((heads / count).tolist()), count)


def similarity_sums(model: Encoder, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return sums over the sentences of a batch: of the mean cosine of tokens, and of heads per layer, `[layers]`."""
    by_layer = []
    for layer in layer_states(model, batch):
        if layer.head_cosine is not None:
            by_layer.append(layer.head_cosine)
    token_mask = document_mask(batch.document_ids, 1).long()  # [batch, 1, seq]
    return token_cosine(layer.hidden, token_mask).sum(), torch.stack(by_layer)


NEAR = 8
"""Number of distances of the first mean."""


@torch.no_grad()
def table_cosines(model: Encoder) -> list[float] | None:
    """Return the cosine of T^q[+k] and T^q[−k] for k = 1, 2, …, or None for an encoding without T^q.

    A cosine is the mean over the layers and, if the table belongs to single heads, over the heads. Only distances count
    that occur: below `seq_length`, and within the window of a local layer. `model` is in eval mode.

    Near 1, the two rows are parallel: this table cannot tell left from right, whatever the query.
    """
    nothing = torch.zeros(1, model.config.seq_length, dtype=torch.long, device=next(model.parameters()).device)
    state, longest = _first_state(model, Batch.of_texts(nothing, nothing + 1)), model.config.seq_length - 1
    by_layer = []
    for layer in model.layers:
        assert isinstance(layer, EncoderLayer)
        terms = layer.terms(state).within(min(layer.attention.window or longest, longest)).by_offset
        if terms.query_table is None:
            return None
        steps = torch.arange(1, min(-terms.lowest, terms.highest) + 1, device=terms.query_table.device)
        one, other = (terms.query_table[:, sign * steps - terms.lowest] for sign in (1, -1))  # [1 or heads, k, d]
        by_layer.append(torch.cosine_similarity(one.double(), other.double(), dim=-1).mean(0))
    return pad_sequence(by_layer, batch_first=True, padding_value=math.nan).nanmean(0).tolist()


def near_and_far(cosines: Sequence[float] | None) -> tuple[float | None, float | None]:
    """Return the means over k = 1 … `NEAR` and over all k; None without cosines."""
    return (statistics.fmean(cosines[:NEAR]), statistics.fmean(cosines)) if cosines else (None, None)


def _first_state(model: Encoder, batch: Batch) -> State:
    """Return the state before the first layer."""
    nothing = Draws.none(len(batch.input_ids), model.config.num_layers, batch.document_ids.device)
    return model.embeddings(Inputs.of(batch, nothing))


SPACE = {
    "token_similarity": TOKEN_SIMILARITY,
    "head_similarity": HEAD_SIMILARITY,
    **{key: name for name, key in SPACE.items()},
}
"""Key of a measure of hidden states in the JSON → its name in printed lines."""
DRAWN = {
    "token_similarity": "f(S): tokens of a sentence",
    "cosine_between": "cosine between sentences",
    "isoscore": "IsoScore",
    "effective_rank": "effective rank",
}
"""Key of a measure of hidden states that the figure shows → title of its panel; the JSON has all."""
LOOKS: dict[str, dict[str, str]] = {
    "probe": {"linestyle": "-"},
    "shuffled": {"linestyle": "--", "markerfacecolor": "white"},
}
"""Key of a measurement of the probe → style that sets it apart."""


def draw_similarity(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Draw f(S) and f(H) of runs over their steps, side by side. A model of unknown step becomes a horizontal line.

    `rows` are those of the JSON.
    """
    runs, panels = _by_run(rows), []
    styles = plotting.run_styles(runs)
    for key, title in (("token_similarity", "f(S): tokens"), ("head_similarity", "f(H): heads of a layer")):
        lines = [plotting.Line([(row["iteration"], row[key]) for row in own], styles[run]) for run, own in runs.items()]
        panels.append(plotting.Panel(lines, title, "training step", "mean cosine"))
    return plotting.draw_curves(panels, legend=styles)


def _by_run(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return run → its rows."""
    return {row["run"]: [other for other in rows if other["run"] == row["run"]] for row in rows}


def draw_triangles(shares: Mapping[str, Sequence[float]], threshold: float) -> Any:
    """Draw each model's share of sentences with the up-down triangle effect over its layers."""
    styles = plotting.run_styles(f"{run}: last layer {values[-1]:.2%}" for run, values in shares.items())
    points = [[(layer, 100 * share) for layer, share in enumerate(values, 1)] for values in shares.values()]
    title = f"Up-down triangle effect, threshold {threshold:g}"
    lines = [plotting.Line(own, style) for own, style in zip(points, styles.values(), strict=True)]
    return plotting.draw_curves(
        [plotting.Panel(lines, title, "layer", "share of sentences [%]")], size=(8, 4.4), legend=styles
    )


def draw_masked_places(rows: Sequence[Mapping[str, Any]], guesses: int) -> Any:
    """Draw the share of masked places whose piece is among the first guesses of each model, and of frequent pieces."""
    shares = {row["run"]: row["found"] / row["places"] for row in rows}
    shares["most frequent pieces"] = rows[0]["found_by_frequency"] / rows[0]["places"]
    figure, axis = plotting.figure_tools().subplots(figsize=(8, 1.6 + 0.5 * len(shares)))
    bars = axis.barh(list(shares), [100 * share for share in shares.values()], color=plotting.COLORS[0])
    axis.bar_label(bars, fmt="%.0f%%", padding=3)
    axis.invert_yaxis()
    axis.set(xlabel=f"masked piece among the first {guesses} [% of {rows[0]['places']} places]", xlim=(0, 105))
    return figure


def draw_direction(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Draw the probe's accuracy over the distance: per model a solid line for text, a dashed one for shuffled text."""
    styles = plotting.run_styles(row["run"] for row in rows)
    lines = [
        plotting.Line(
            [(at["distance"], at[key] and 100 * at[key]) for at in row["distances"]], styles[row["run"]] | look
        )
        for row in rows
        for key, look in LOOKS.items()
    ]
    panel = plotting.Panel(
        lines, "Left or right, told by attention", "distance of both keys [tokens]", "accuracy [%]", levels=[50]
    )
    grey = {"color": plotting.GREY, "marker": "o", "linewidth": 2}
    texts = {name: grey | look for name, look in zip(("text", "shuffled text"), LOOKS.values(), strict=True)}
    return plotting.draw_curves([panel], size=(8, 4.8), legend=styles | texts | {"chance": plotting.LEVEL})


def draw_space(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Draw the measures of `DRAWN` over the layers of each run's last checkpoint and, if a run has several, over steps.

    `rows` are those of the JSON. A model of unknown step is a horizontal line over the steps.
    """
    runs = _by_run(rows)
    styles = plotting.run_styles(runs)
    over_layers: list[plotting.Panel] = []
    over_steps: list[plotting.Panel] = []
    for key, title in DRAWN.items():
        layers = {run: [(layer["layer"], layer[key]) for layer in own[-1]["layers"]] for run, own in runs.items()}
        steps = {run: [(row["iteration"], row["layers"][-1][key]) for row in own] for run, own in runs.items()}
        for panels, points, x in (
            (over_layers, layers, "layer of the last checkpoint"),
            (over_steps, steps, "training step, last layer"),
        ):
            panels.append(plotting.Panel([plotting.Line(points[run], styles[run]) for run in runs], title, x))
    has_steps = any(len(own) > 1 for own in runs.values())
    return plotting.draw_curves(over_layers + over_steps * has_steps, len(DRAWN), (4.0, 3.8), styles)


def draw_throughput(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Draw tokens per second (with quartiles) and memory over the row length, one line per encoder."""
    styles, speeds, memory = plotting.run_styles(row["run"] for row in rows), [], []
    for row in rows:
        points = [
            (at["length"], at["tokens_per_second"], at["lower_quartile"], at["upper_quartile"]) for at in row["lengths"]
        ]
        speeds.append(plotting.Line(points, styles[row["run"]]))
        sizes = [(at["length"], at["memory_bytes"] / 2**20) for at in row["lengths"] if at["memory_bytes"]]
        memory.append(plotting.Line(sizes, styles[row["run"]]))
    x = "length of a row [tokens]"
    left = plotting.Panel(speeds, "Inference", x, "tokens per second")
    figure = plotting.draw_curves(
        [left, plotting.Panel(memory, "Peak above the loaded encoder", x, "memory [MiB]")], legend=styles
    )
    plt, ticks = plotting.figure_tools(), sorted({at["length"] for row in rows for at in row["lengths"]})
    for axis in (axis for axis in figure.axes if axis.lines):  # the memory may be unknown
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(ticks, labels=[str(tick) for tick in ticks])
        lowest, highest = axis.get_ylim()
        axis.yaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)) if highest > 8 * lowest else plt.MaxNLocator(6))
        axis.yaxis.set_major_formatter(lambda value, _: plotting.thousands(value))
        axis.minorticks_off()
    return figure


def draw_maps(maps: Sequence[AttentionMap], title: str) -> Any:
    """Draw mean attention maps side by side on one logarithmic colour scale."""
    figure, axes = plotting.panel_grid(len(maps), 4, (4.5, 5.0))
    from matplotlib.colors import LogNorm

    values = np.concatenate([panel.map.ravel() for panel in maps])
    positive = values[values > 0]
    lowest, highest = np.quantile(positive, (0.02, 0.998))  # a few cells, such as [SEP]'s column, exceed all others
    even = np.sqrt(lowest * highest)
    lowest, highest = min(lowest, even / 2), max(highest, even * 2)  # noise in a nearly even map stays pale
    scale = LogNorm(lowest, highest)
    for axis, panel in zip(axes, maps, strict=True):
        end = len(panel.map) + 0.5
        image = axis.imshow(panel.map, cmap="cividis", norm=scale, extent=(0.5, end, end, 0.5), interpolation="nearest")
        axis.set_title(f"{panel.name}\nright {panel.up:.0%}, left {panel.down:.0%}", fontsize=plotting.FONT_SIZE)
        axis.set(xlabel="key [token]", ylabel="query [token]")
    bar = figure.colorbar(image, ax=axes, label="mean attention probability", extend="both")
    ticks = np.geomspace(lowest, highest, 5)
    bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
    bar.minorticks_off()
    figure.suptitle(title, fontsize=plotting.FONT_SIZE)
    return figure
