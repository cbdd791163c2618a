"""Three measures of encoders: the probe of directions, the space of hidden states, and throughput."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from megatron_ddrp.config import load_plugin
from megatron_ddrp.config.registry import plugin_files
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.data.batches.samples import NUM_SPECIAL_TOKENS
from megatron_ddrp.data.tokenizers.tokenizer import Tokenizer
from megatron_ddrp.encoders.encoder import LoadedEncoder, load_encoder
from megatron_ddrp.encoders.huggingface import LayerStates, layer_states
from megatron_ddrp.errors import UserError, lacks_memory
from megatron_ddrp.lab.analysis.figures import layer_logits
from megatron_ddrp.lab.analysis.session import Snapshot
from megatron_ddrp.model import Encoder
from megatron_ddrp.model.embeddings import SMALLEST_NORM, document_mask, token_cosine
from megatron_ddrp.run.loop import peak_resident_bytes, reset_peak_resident_bytes, return_freed_memory

REACH = 8
"""Largest distance k in tokens."""
RIDGE = 1e-8
"""Ridge as a share of the sum of the heads' mean d²."""
PROBE_PASSES = 2
"""Number of times that `measure_probe` reads the sentences."""


@dataclass(frozen=True)
class Probe:
    """Accuracies, in [0, 1], of readouts that tell the right-hand key from the left-hand one by the heads' logits.

    Token i of a sentence has text k places to its right and k places to its left. Each head gives one number,

        d[i,k] = A[i, i+k] − A[i, i−k],

    where A are the attention logits. A linear readout without an intercept names the right-hand key if w·d > 0; w·d = 0
    counts as half. Its weights are Fisher's discriminant between d and −d ("The use of multiple measurements in
    taxonomic problems", 1936),

        w = (S + ridge)⁻¹ m,

    with the mean m and the covariance S of d over every other sentence. The accuracy is counted on the remaining
    sentences. Chance is 0.5. The normalisation of a row cancels in d, so log-probabilities would give the same d.

    An accuracy is None where no pair of keys exists.
    """

    accuracy: float
    """Mean of `by_distance`."""
    error: float | None
    """Standard error of `accuracy` over the sentences, for fixed weights; None with one sentence."""
    by_layer: list[float | None]
    """Mean over k of the accuracy from the heads of one layer."""
    by_distance: list[float | None]
    """Accuracy from the heads of all layers for k = 1 … `REACH`."""


def measure_probe(model: Encoder, batches: Callable[[], Iterable[Batch]]) -> Probe:
    """Fit the readouts on every other sentence and score them on the rest.

    `batches` is called twice and must give the same batches, of sentences `[CLS] text [SEP]` on the model's device.
    Raises `UserError` if the sentences are too few or too short.
    """
    readouts, fitted = _fit(model, _every_other(batches(), 0))
    hits, pairs = _score(model, _every_other(batches(), 1), readouts)
    scored = pairs.sum(0)  # [k]
    windows = torch.tensor([model.config.window(layer) or REACH for layer in range(model.config.num_layers)])
    attended = torch.arange(1, 1 + REACH) <= windows[:, None]  # [layers, k]
    known = torch.cat([attended.any(0, keepdim=True), attended]) & (fitted > 0) & (scored > 0)  # [1 + layers, k]
    if not known.any():
        raise UserError(
            "the sentences are too few or too short to probe left and right: give a larger --sentences or --max-length"
        )
    accuracies = (hits.sum(0) / scored).masked_fill(~known, math.nan)
    by_distance, by_layer = accuracies[0], accuracies[1:].nanmean(1)
    error = _standard_error(((hits[:, 0] - by_distance * pairs) / scored)[:, known[0]].mean(1))
    return Probe(by_distance.nanmean().item(), error, _listed(by_layer), _listed(by_distance))


def shuffle_text(batches: Iterable[Batch], seed: int) -> Iterator[Batch]:
    """Yield the batches with the text of each sentence in a random order; [CLS], [SEP] and padding keep their places.

    The order depends on the seed, the sentence's number and its length, not on the batches.
    """
    number = 0
    for batch in batches:
        order = torch.arange(batch.input_ids.shape[1]).repeat(len(batch.input_ids), 1)  # [batch, seq]
        for row, length in zip(order, batch.document_ids.sum(1).tolist(), strict=True):
            drawn = np.random.default_rng([seed, number]).permutation(length - NUM_SPECIAL_TOKENS)
            row[1 : length - 1] = 1 + torch.from_numpy(drawn)
            number += 1
        yield batch._replace(input_ids=batch.input_ids.gather(1, order.to(batch.input_ids.device)))


def differences(logits: Tensor, window: int | None) -> Tensor:
    """Return d, float64 `[batch, heads, k, seq]`, of logits `[batch, heads, seq, seq]`.

    d is 0 for k beyond the window, and where i + k or i − k lies outside the row.
    """
    seq = logits.shape[-1]
    found = logits.new_zeros(*logits.shape[:2], REACH, seq, dtype=torch.float64)
    for k in range(1, 1 + min(REACH, window or REACH, (seq - 1) // 2)):
        right, left = logits.diagonal(k, -2, -1)[..., k:], logits.diagonal(-k, -2, -1)[..., : seq - 2 * k]
        found[:, :, k - 1, k : seq - k] = right.double() - left.double()
    return found


def text_on_both_sides(lengths: Tensor, seq: int) -> Tensor:
    """Mark the tokens i for which i + k and i − k are text: `lengths` `[batch]` → bool `[batch, k, seq]`.

    A length counts [CLS], the first token, and [SEP], the last one.
    """
    place, k = torch.arange(seq, device=lengths.device), torch.arange(1, 1 + REACH, device=lengths.device)[:, None]
    return (place - k >= 1) & (place + k < lengths[:, None, None] - 1)


def _fit(model: Encoder, batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
    """Return the readouts w `[1 + layers, k, layers · heads]`, of all layers and of each, and the pairs per k `[k]`.

    w is 0 for heads of other layers. (M + ridge)⁻¹ m with M = S + m mᵀ has the direction of (S + ridge)⁻¹ m, and sums
    of d² do not cancel.
    """
    sizes = model.config
    own = torch.eye(sizes.num_layers, dtype=torch.float64).repeat_interleave(sizes.num_attention_heads, 1)
    members = torch.cat([torch.ones_like(own[:1]), own])  # [1 + layers, layers · heads]
    heads = members.shape[1]
    pairs, total, square = (torch.zeros(REACH, *sizes).double() for sizes in ((), (heads,), (heads, heads)))
    for d, counted in _measured(model, batches):
        flat = (d * counted[:, None]).permute(2, 1, 0, 3).flatten(2)  # [k, layers · heads, batch · seq]
        pairs += counted.sum((0, 2)).cpu()
        total += flat.sum(2).cpu()
        square += (flat @ flat.mT).cpu()
    mean = total / pairs.clamp_min(1)[:, None] * members[:, None]  # [1 + layers, k, layers · heads]
    square = square / pairs.clamp_min(1)[:, None, None] * members[:, None, :, None] * members[:, None, None]
    ridge = RIDGE * square.diagonal(dim1=-2, dim2=-1).sum(-1)  # [1 + layers, k]
    ridge = ridge.where(ridge > 0, 1.0)[..., None, None] * torch.eye(heads)
    return torch.linalg.solve(square + ridge, mean), pairs


def _score(model: Encoder, batches: Iterable[Batch], readouts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the right answers `[sentences, 1 + layers, k]` and the number of pairs `[sentences, k]`."""
    hits, pairs = [readouts.new_zeros(0, *readouts.shape[:2])], [readouts.new_zeros(0, REACH)]
    for d, counted in _measured(model, batches):
        answers = torch.einsum("bhki,gkh->bgki", d, readouts.to(d.device)).sign()
        hits.append(((1 + answers) / 2 * counted[:, None]).sum(-1).cpu())
        pairs.append(counted.sum(-1).cpu())
    return torch.cat(hits), torch.cat(pairs)


def _measured(model: Encoder, batches: Iterable[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield d of all layers `[batch, layers · heads, k, seq]` and the places that count, 0 or 1, `[batch, k, seq]`."""
    for batch in batches:
        d = torch.cat([differences(logits, window) for logits, window in layer_logits(model, batch)], 1)
        yield d, text_on_both_sides(batch.document_ids.sum(1), d.shape[-1]).to(d)


def _every_other(batches: Iterable[Batch], first: int) -> Iterator[Batch]:
    """Yield every other sentence, from sentence `first` on, 0 or 1."""
    for batch in batches:
        if len(batch.input_ids) > first:
            yield batch.map(itemgetter(slice(first, None, 2)))
        first = (first + len(batch.input_ids)) % 2


def _standard_error(parts: Tensor) -> float | None:
    """Return the standard error of a sum of independent parts `[sentences]` of mean 0; None for one part."""
    count = len(parts)
    return None if count < 2 else math.sqrt(parts.square().sum().item() * count / (count - 1))


def _listed(values: Tensor) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]


PASSES = 3
"""Number of passes of `measure_space` over the sentences."""


@dataclass(frozen=True)
class LayerSpace:
    """Geometry of one layer's hidden states: cosines of tokens, isotropy, effective rank. Undefined values are None.

        within    mean cosine of two tokens of one sentence; in the last layer, with [CLS] and [SEP], it is f(S)
        between   mean cosine of two tokens of different sentences (Ethayarajh, arXiv:1909.00512)
        centred   both cosines for x − μ, μ the mean of all tokens
        IsoScore  (tr(C)²/‖C‖²_F − 1)/(n − 1), C the covariance of the tokens, n the hidden size (Rudman et al.,
                  arXiv:2108.07344: their algorithm in closed form); 1 is isotropic, 0 is one direction
        effective rank  exp(−Σ p ln p), p the eigenvalues of C divided by their sum (Roy and Vetterli 2007)
        first component the largest p, the share of the variance along the first principal component, and the kurtosis
                  E[z⁴]/E[z²]² of the tokens' places z on it: 1 if all stand at two opposite poles, 3 for a normal cloud

    All pairs of tokens count; sums of unit vectors give their cosines without sampling. Sums are float64.
    """

    layer: int
    """0 for the embeddings."""
    hidden_size: int
    token_similarity: float
    """f(S) of this layer over all tokens of a sentence, including [CLS] and [SEP]."""
    head_similarity: float | None
    """This layer's term of f(H); None if the model does not give its attention logits."""
    cosine_within: float | None
    cosine_between: float | None
    centred_cosine_within: float | None
    centred_cosine_between: float | None
    isoscore: float | None
    effective_rank: float | None
    first_component: float | None
    first_component_kurtosis: float | None


@dataclass(frozen=True)
class Space:
    """Geometry of all layers of a model, the embeddings first, and the number of tokens measured."""

    layers: tuple[LayerSpace, ...]
    tokens: int
    """Number of text tokens, without [CLS], [SEP] and other special tokens."""


class CosineSums:
    """Float64 sums over sentences that give the mean cosines of all pairs of tokens, in closed form."""

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0  # [hidden], Σ of all unit vectors
        self.inside = self.within = 0.0
        self.tokens = self.same_sentence = self.sentences = 0

    def add(self, states: Tensor, text: Tensor) -> None:
        """Add a batch of states, float64 `[batch, seq, hidden]`. `text`, bool `[batch, seq]`, marks counted tokens."""
        units = F.normalize(states, dim=-1, eps=SMALLEST_NORM) * text.unsqueeze(-1)
        sums, counts = units.sum(1), text.sum(1)  # [batch, hidden], [batch]
        squares = sums.pow(2).sum(-1)  # [batch], the cosines of all ordered pairs, including each token with itself
        pairs = counts * (counts - 1)
        self.total = self.total + sums.sum(0)
        self.inside += float(squares.sum())
        means = (squares - units.pow(2).sum((1, 2))) / pairs.clamp_min(1)
        self.within += float(means[pairs > 0].sum())
        self.sentences += int((pairs > 0).sum())
        self.tokens += int(counts.sum())
        self.same_sentence += int(counts.pow(2).sum())

    @property
    def mean_within(self) -> float | None:
        """Mean over sentences of the mean cosine of two of their tokens; None if no sentence has two tokens."""
        return self.within / self.sentences if self.sentences else None

    @property
    def mean_between(self) -> float | None:
        """Mean cosine of two tokens of different sentences: (‖Σ x̂‖² − Σ_s ‖Σ_s x̂‖²)/(N² − Σ_s n_s²)."""
        pairs = self.tokens**2 - self.same_sentence
        return (float(torch.as_tensor(self.total).pow(2).sum()) - self.inside) / pairs if pairs else None


class _Layer:
    """Sums of one layer: `first`, `second` and `third` add a batch in the pass of that number."""

    def __init__(self) -> None:
        self.plain, self.centred = CosineSums(), CosineSums()
        self.sentences, self.f_s = 0, 0.0
        self.f_h: float | None = None
        self.sum: Tensor | float = 0.0  # [hidden]
        self.covariance: Tensor | float = 0.0  # [hidden, hidden], times the number of tokens
        self.fourth_powers = 0.0  # Σ z⁴, z the places of the tokens on the first principal component

    def first(self, state: LayerStates, batch: Batch, text: Tensor) -> None:
        hidden = state.hidden.double()
        self.sentences += len(text)
        self.plain.add(hidden, text)
        self.sum = self.sum + hidden[text].sum(0)
        self.f_s += float(token_cosine(hidden, document_mask(batch.document_ids, 1).long()).sum())
        if state.head_cosine is not None:
            self.f_h = (self.f_h or 0.0) + float(state.head_cosine)

    def second(self, state: LayerStates, batch: Batch, text: Tensor) -> None:
        centred = state.hidden.double() - self.sum / self.plain.tokens
        self.centred.add(centred, text)
        tokens = centred[text]  # [tokens, hidden]
        self.covariance = self.covariance + tokens.T @ tokens

    def third(self, state: LayerStates, batch: Batch, text: Tensor) -> None:
        places = (state.hidden.double()[text] - self.sum / self.plain.tokens) @ self.axes[:, -1]  # [tokens]
        self.fourth_powers += float(places.pow(4).sum())

    @cached_property
    def axes(self) -> Tensor:
        """Principal components `[hidden, hidden]`, one per column, the first component in the last one."""
        return torch.linalg.eigh(torch.as_tensor(self.covariance))[1]

    def result(self, number: int) -> LayerSpace:
        covariance = torch.as_tensor(self.covariance)
        largest = float(torch.linalg.eigvalsh(covariance)[-1])  # Σ z²
        return LayerSpace(
            number,
            len(covariance),
            self.f_s / self.sentences,
            None if self.f_h is None else self.f_h / self.sentences,
            self.plain.mean_within,
            self.plain.mean_between,
            self.centred.mean_within,
            self.centred.mean_between,
            isoscore(covariance),
            effective_rank(covariance),
            largest / float(covariance.trace()) if largest > 0 else None,
            self.plain.tokens * self.fourth_powers / largest**2 if largest > 0 else None,
        )


def measure_space(model: Any, batches: Callable[[], Iterable[Batch]], specials: Tensor) -> Space:
    """Return the geometry of a model's hidden states over batches of sentences on its device.

    `batches` is called three times and must give the same batches. `model` is an `Encoder` or an encoder of
    transformers. `specials`, int64 `[n]`, are the ids of special tokens such as [CLS]. Raises `UserError` for fewer
    than two tokens of text, and for states that are not finite.

    A second pass over the sentences subtracts the mean before anything is squared, so that a large common offset costs
    no precision; a third projects on the first principal component.
    """
    layers: dict[int, _Layer] = defaultdict(_Layer)

    def read(add: Callable[[_Layer, LayerStates, Batch, Tensor], None]) -> None:
        for batch in batches():
            text = (batch.document_ids > 0) & ~torch.isin(batch.input_ids, specials)  # [batch, seq]
            for number, state in enumerate(layer_states(model, batch)):
                add(layers[number], state, batch, text)

    read(_Layer.first)
    if not layers or layers[0].plain.tokens < 2:
        raise UserError("the sentences hold fewer than two tokens of text: give more sentences, or longer ones")
    read(_Layer.second)
    for number, layer in layers.items():
        if not torch.as_tensor(layer.covariance).isfinite().all():
            raise UserError(f"hidden states of layer {number} are not finite: use a checkpoint that has not diverged")
    read(_Layer.third)
    return Space(tuple(layer.result(number) for number, layer in layers.items()), layers[0].plain.tokens)


def isoscore(covariance: Tensor) -> float | None:
    """Return IsoScore of a covariance `[n, n]` of any scale; None for n = 1 and for zero variance."""
    n, squares = len(covariance), float(covariance.pow(2).sum())
    return (float(covariance.trace()) ** 2 / squares - 1) / (n - 1) if n > 1 and squares > 0 else None


def effective_rank(covariance: Tensor) -> float | None:
    """Return the effective rank, in [1, n], of a covariance `[n, n]` of any scale; None for zero variance."""
    eigenvalues = torch.linalg.eigvalsh(covariance).clamp_min(0.0)
    total = eigenvalues.sum()
    return float(torch.special.entr(eigenvalues / total).sum().exp()) if total > 0 else None


WARM_UP_LENGTH = 8


@dataclass(frozen=True)
class Setting:
    """Settings of a measurement, the same for all encoders."""

    device: torch.device
    tokens: int
    """Tokens per batch; a longer row makes a batch alone."""
    rounds: int
    bf16: bool
    seed: int

    def rows(self, length: int) -> int:
        """Return the number of rows per batch."""
        return max(1, self.tokens // length)

    def autocast(self) -> AbstractContextManager:
        """Return the context in which a forward pass runs."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else nullcontext()


@dataclass(frozen=True)
class Speed:
    """Times and memory of one encoder at one length."""

    length: int
    rows: int
    tokens_per_second: float
    """Median over the rounds."""
    lower_quartile: float
    upper_quartile: float
    memory_bytes: int | None
    """Peak during one forward pass minus the memory of the loaded encoder; None on a CPU without Linux's /proc."""


@dataclass(frozen=True)
class Timed:
    """An encoder and its measurements."""

    snapshot: Snapshot
    encoder: LoadedEncoder
    speeds: list[Speed] = field(default_factory=list)
    left_out: dict[int, str] = field(default_factory=dict)
    """Length → the reason why it was not measured."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the encoder's weights in memory."""
        return sum(parameter.nbytes for parameter in self.encoder.module.parameters())


def measure_throughput(
    snapshots: Sequence[Snapshot], lengths: Sequence[int], setting: Setting, advance: Callable[[], object]
) -> list[Timed]:
    """Measure each model at each length; leave out lengths beyond its positions or the memory.

    Call `advance` encoders × lengths × (rounds + 1) times in total, also for lengths that are left out.

    Every batch has about the same number of tokens in full rows: at length L it has tokens ÷ L rows of L tokens. The
    encoders take turns, in a random order in each round, so that a machine that slows down affects all of them. Memory
    is the peak during one forward pass minus the memory of the loaded encoder: on a GPU the peak of torch's allocator,
    on a CPU the peak resident size, measured in a fresh process per encoder and length.
    """
    timed = [Timed(snapshot, load_encoder(snapshot.path)) for snapshot in snapshots]
    for each in timed:
        each.encoder.module.eval().to(setting.device)
    order = np.random.default_rng(setting.seed)
    for length in lengths:
        memory = {}
        for number, each in enumerate(timed):
            if length > each.encoder.max_length:
                each.left_out[length] = f"it has positions for {each.encoder.max_length} tokens"
            else:
                try:
                    memory[number] = peak_memory(each, length, setting)
                except RuntimeError as error:
                    if isinstance(error, BrokenProcessPool):
                        reason = "the process that measured its memory was killed, probably for taking too much"
                    elif lacks_memory(error):
                        reason = "not enough memory; give a smaller --tokens"
                    else:
                        raise
                    each.left_out[length] = reason
            for _ in range(setting.rounds + 1 if length in each.left_out else 1):
                advance()
        seconds = _time_rounds([timed[number] for number in memory], length, setting, order, advance)
        for (number, peak), row in zip(memory.items(), seconds, strict=True):
            timed[number].speeds.append(_speed(length, setting.rows(length), row, peak))
    return timed


def peak_memory(timed: Timed, length: int, setting: Setting) -> int | None:
    """Return the peak memory of a forward pass in bytes, minus the memory of the loaded encoder.

    Raises `RuntimeError` if the memory is too small or the process that measures is killed.
    """
    if setting.device.type != "cuda":
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            plugins = plugin_files()
            return fresh.submit(_peak_in_this_process, timed.snapshot.path, length, setting, plugins).result()
    batch = full_batch(timed.encoder.tokenizer, setting.rows(length), length, setting)
    start = torch.cuda.memory_allocated(setting.device)
    torch.cuda.reset_peak_memory_stats(setting.device)
    _forward(timed.encoder, batch, setting)
    return torch.cuda.max_memory_allocated(setting.device) - start


def _peak_in_this_process(path: Path, length: int, setting: Setting, plugins: tuple[Path, ...]) -> int | None:
    return_freed_memory()
    for plugin in plugins:
        load_plugin(plugin)
    encoder = load_encoder(path)
    encoder.module.eval()
    _forward(encoder, full_batch(encoder.tokenizer, 1, min(WARM_UP_LENGTH, length), setting), setting)
    batch = full_batch(encoder.tokenizer, setting.rows(length), length, setting)
    start = reset_peak_resident_bytes()
    _forward(encoder, batch, setting)
    return None if start is None else max(0, peak_resident_bytes() - start)


def full_batch(tokenizer: Tokenizer, rows: int, length: int, setting: Setting) -> Batch:
    """Return a batch `[rows, length]` on the device: [CLS], random pieces, [SEP], no padding."""
    ordinary = np.setdiff1d(np.arange(tokenizer.vocab_size), tokenizer.special_ids)
    ids = np.random.default_rng(setting.seed).choice(ordinary, (rows, length))
    ids[:, 0], ids[:, -1] = tokenizer.cls_id, tokenizer.sep_id
    return Batch.of_texts(ids, np.ones_like(ids)).map(lambda array: torch.from_numpy(array).to(setting.device))


@torch.inference_mode()
def _forward(encoder: LoadedEncoder, batch: Batch, setting: Setting) -> None:
    with setting.autocast():
        encoder.module(batch)
    if setting.device.type == "cuda":
        torch.cuda.synchronize(setting.device)


def _time_rounds(
    timed: Sequence[Timed], length: int, setting: Setting, order: np.random.Generator, advance: Callable[[], object]
) -> NDArray[np.float64]:
    """Return the seconds of each forward pass, `[encoders, rounds]`, after one untimed pass per encoder."""
    batches = [full_batch(each.encoder.tokenizer, setting.rows(length), length, setting) for each in timed]
    for each, batch in zip(timed, batches, strict=True):
        _forward(each.encoder, batch, setting)
    seconds = np.zeros((len(timed), setting.rounds))
    for number in range(setting.rounds):
        for row in order.permutation(len(timed)):
            begin = time.perf_counter()
            _forward(timed[row].encoder, batches[row], setting)
            seconds[row, number] = time.perf_counter() - begin
            advance()
    return seconds


def _speed(length: int, rows: int, seconds: NDArray[np.float64], memory: int | None) -> Speed:
    """Return the speed: quartiles of tokens per second over the rounds. `seconds` is `[rounds]`."""
    low, median, high = np.percentile(rows * length / seconds, [25, 50, 75]).tolist()
    return Speed(length, rows, median, low, high, memory)
