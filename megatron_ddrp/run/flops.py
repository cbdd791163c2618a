"""Floating-point operations (FLOP) of a training step in closed form, the time of a step, and the profile of one.

    linear      6 · weights of the layers' linear maps                    per token
    attention   12 · S · D · layers                                       QKᵀ and the product with V
    tables      6 · min(rows, 2S − 1) · D · layers                        Q·T^q, and the same for K·T^k
    local       12 · min(S, 2w + 1) · D and 6 · min(rows, 2w + 1) · D     the same in a layer with a window of w
    causal      half of the attention and of the tables                   in a causal phase
    head        6 · masked share · (D · D + D · vocabulary)               the vocabulary is padded to a multiple of 128

A multiplication with an addition is 2 FLOP, and the backward pass takes twice the forward pass: 2 · (1 + 2) = 6. D is
the hidden size, S the length of the row. Every position of a row counts, padding included, and every pair of a packed
row, as in dense products; in a local layer only the pairs within its window. Not counted: element-wise work, recomputed
activations, TCD and HCD, notes, and the products of an encoding once per micro-batch (TUPE's B, DeBERTa's projected
tables: 0.1 % of a base model at 32 x 512).
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from megatron_ddrp.config import Config, ModelConfig
from megatron_ddrp.data.atomic import write_text
from megatron_ddrp.data.batches.batch import Batch
from megatron_ddrp.engine.layout import Setup
from megatron_ddrp.model.heads import EnhancedMaskDecoder
from megatron_ddrp.model.positions.contract import PositionEncoding
from megatron_ddrp.objectives.contract import make_objective
from megatron_ddrp.parallel.process_group import gather_objects
from megatron_ddrp.run.devices import SHARE, Device, device_named

TRAINING = 6
"""FLOP of the forward and backward pass per weight and token."""


@dataclass(frozen=True)
class TokenFlop:
    """FLOP of the forward and backward pass per token of a row, by part of the model."""

    linear: float = 0.0
    attention: float = 0.0
    tables: float = 0.0
    """FLOP of the products of queries and keys with the encoding's tables."""
    head: float = 0.0
    mask_decoder: float = 0.0
    """FLOP of DeBERTa's enhanced mask decoder."""
    generator: float = 0.0
    """FLOP of a generator, including its head."""

    @property
    def total(self) -> float:
        return sum(astuple(self))


def flop_per_token(config: Config, length: int | None = None, causal: float | None = None) -> TokenFlop:
    """Return the FLOP per token of rows of `length` tokens, by default `--seq-length`.

    A share `causal` of the steps, by default that of the run, predicts every token from those before it. A changing
    masking rate counts with its mean. With the mask decoder and masked LM as the only term, the backward pass begins in
    the last layer's input.
    """
    model, objective = config.model, config.objective
    length, width = length or model.seq_length, model.embedding_width
    causal = objective.causal_share if causal is None else causal
    share = causal + (1 - causal) * objective.mask_rates.mean
    small = objective.generator_config(model)
    if small is not None:
        applied = small.num_layers - small.decodes_masks  # only the decoder applies the last layer
        generator = sum(_layers(small, length, applied)) + sum(_masked_lm(small, width, share, length))
        generator += TRAINING * width * small.hidden_size * (small.embedding_size is not None)  # the projection
        head = TRAINING * (model.hidden_size**2 + model.hidden_size)
        return TokenFlop(*_layers(model, length, model.num_layers), head, generator=generator)
    alone = not any(term.weight for term in make_objective(objective).terms if term.name != "lm_loss")
    layers = model.num_layers - (2 / 3 if alone and model.decodes_masks else 0)
    linear, *of_pairs = _layers(model, length, layers)
    linear += TRAINING * width * model.hidden_size * (model.embedding_size is not None)  # the projection
    attention, tables = (part * (1 - causal / 2) for part in of_pairs)
    return TokenFlop(linear, attention, tables, *_masked_lm(model, width, share, length))


def flop_of_rows(config: Config, shapes: Iterable[tuple[int, int]], causal: float | None = None) -> float:
    """Return the FLOP of micro-batches with the shapes `(rows, length)`; `causal` as in `flop_per_token`."""
    tokens = Counter[int]()
    for rows, length in shapes:
        tokens[length] += rows * length
    return sum(count * flop_per_token(config, length, causal).total for length, count in tokens.items())


def flop_of_step(setup: Setup, micro_batches: Iterable[Batch]) -> float:
    """Return the FLOP of a step over all ranks, from the micro-batches of this one.

    The loader gives all data-parallel ranks rows of about the same length.
    """
    shapes = (batch.input_ids.shape for batch in micro_batches)
    return flop_of_rows(setup.config, shapes, float(setup.causal)) * setup.ranks.data_size


def _layers(model: ModelConfig, length: int, layers: float) -> tuple[float, float, float]:
    """Return the FLOP per token of a number of layers: linear maps, attention, tables."""
    hidden = model.hidden_size
    linear = TRAINING * (4 * hidden**2 + model.ffn_maps * hidden * model.ffn_size)
    shares = [min(1.0, layers - number) for number in range(math.ceil(layers))]
    pairs = sum(share * _keys(model, length, number) for number, share in enumerate(shares))
    rows = sum(share * sum(_useful_rows(model, length, number)) for number, share in enumerate(shares))
    return layers * linear, 2 * TRAINING * pairs * hidden, TRAINING * rows * hidden


def _keys(model: ModelConfig, length: int, layer: int) -> int:
    """Return the number of keys that a query of a layer is multiplied with."""
    window = model.window(layer)
    return length if window is None else min(length, 2 * window + 1)


def _masked_lm(model: ModelConfig, width: int, share: float, length: int) -> tuple[float, float]:
    """Return the FLOP per token of the masked-LM head, whose embedding is `width` wide, and of the mask decoder.

    The decoder projects all keys and values once. Each application computes the masked share of the queries, and
    multiplies the table for the keys with all keys.
    """
    hidden = model.hidden_size
    head = TRAINING * share * (hidden * width + width * model.padded_vocab_size)
    if not model.decodes_masks:
        return head, 0.0
    last = model.num_layers - 1
    of_queries, of_keys = _useful_rows(model, length, last)
    by_query = 2 * hidden**2 + model.ffn_maps * hidden * model.ffn_size
    by_query += 2 * _keys(model, length, last) * hidden + of_queries * hidden
    once = 2 * hidden**2
    return head, TRAINING * (once + EnhancedMaskDecoder.APPLICATIONS * (share * by_query + of_keys * hidden))


def _useful_rows(model: ModelConfig, length: int, layer: int) -> tuple[int, int]:
    """Return the rows of T^q and of T^k that rows of `length` tokens can use in a layer; 0 without such a table."""
    window = model.window(layer)
    offsets = 2 * (length if window is None else min(length, window + 1)) - 1
    of_queries, of_keys = _table_rows(model.encoding, model, length)
    return min(of_queries, offsets), min(of_keys, offsets)


@cache
def _table_rows(encoding: type[PositionEncoding], model: ModelConfig, length: int) -> tuple[int, int]:
    """Return the number of rows of the encoding's T^q and T^k for rows of `length` tokens, 0 for a missing table."""
    row = torch.zeros(1, length, dtype=torch.long)
    with torch.device("meta"):
        maps = [nn.Linear(model.hidden_size, model.hidden_size) for _ in range(2)]
        tensors = encoding.layer_part(model).of_layer(encoding(model)(row), *maps)
    terms = encoding.terms(model, tensors)
    queries, keys = terms.query_table, terms.key_table
    return (0 if queries is None else queries.shape[1]), (0 if keys is None else keys.shape[1])


def peak_of_run(setup: Setup) -> float | None:
    """Return the FLOP/s of all ranks' devices together, assumed equal to this one; None if unknown."""
    of_device = peak_of_device(setup.config, setup.ranks.device)
    return None if of_device is None else of_device * setup.ranks.world_size


def peak_of_device(config: Config, device: torch.device) -> float | None:
    """Return the FLOP/s of `--peak-tflops`, otherwise of the device's row in `DEVICES`; None without either."""
    given, training = config.logging.peak_tflops, config.training
    if given is None and device.type == "cuda" and (row := device_named(torch.cuda.get_device_name(device))):
        given = row.tflops(training.precision, training.tf32)
    return None if given is None else given * 1e12


def step_seconds(config: Config, world_size: int, device: Device) -> float:
    """Return the estimated seconds of a step of the last phase; recomputed activations cost a third more.

    A step that nobody measured takes, on a device of any machine,

        seconds = FLOP of the global batch ÷ (ranks · peak · SHARE)

    Communication, the host's time and small micro-batches are not modelled: beside published recipes such a time is off
    by a factor of up to four, and mostly two (docs/lab/measurements.md). `megatron-ddrp plan` without `--device`
    measures instead.
    """
    peak = device.tflops(config.training.precision, tf32=True)
    assert peak is not None, device.name
    config = config.of_phase(config.last_phase)
    flop = flop_per_token(config).total * config.training.global_batch_size * config.model.seq_length
    recomputed = 4 / 3 if config.parallel.checkpoint_activations else 1.0
    return recomputed * flop / (world_size * peak * 1e12 * SHARE)


FOLDER = "profile"
"""Folder in the `--save` folder."""
WARM_UP, LENGTH = 10, 2
"""Number of a run's steps before the profile, and of steps in it, where no flag says so."""
LINE_OPERATIONS = 5
"""Number of operations in the line for people."""


class StepProfile:
    """Profiler of some steps, on the ranks of the first replica: the others do the same with other text.

    Without `--profile` it does nothing.

    The profile has the time of every operation, as a table and as a trace.
    """

    def __init__(self, setup: Setup, steps_done: int) -> None:
        """Choose the steps for a run that continues after `steps_done` steps."""
        config, logging = setup.config, setup.config.logging
        self.start = steps_done + WARM_UP if logging.profile_step_start is None else logging.profile_step_start
        """Number of the step after which the profile begins."""
        self.end = self.start + LENGTH if logging.profile_step_end is None else logging.profile_step_end
        """Number of its last step."""
        self.refusal: list[str] = []
        """A line that says why there will be no profile, if one was asked for."""
        steps = config.training.train_iters
        if logging.profile and not steps_done <= self.start < self.end <= steps:
            self.refusal = [
                f"no profile: steps {self.start + 1:,} to {self.end:,} are not among those of this run, "
                f"{steps_done + 1:,} to {steps:,}; set --profile-step-start and --profile-step-end"
            ]
        self._pending = logging.profile and not self.refusal
        self._folder = Path(config.checkpoint.save or "") / FOLDER
        self._ranks = setup.ranks
        self._profiler: Any = None
        self._began = 0.0

    def is_bound(self, step: int) -> bool:
        """Return whether the profile begins or ends after this step; the next one must not be launched before."""
        return self._pending and step in (self.start, self.end)

    def begin(self, step: int) -> None:
        """Start the profiler if `step`, which is about to be launched, is the first of the profile."""
        if not self._pending or step != self.start + 1 or self._ranks.data_rank != 0:
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it reports its own stages otherwise
        gpu = [ProfilerActivity.CUDA] * (self._ranks.device.type == "cuda")
        self._profiler = profile(activities=[ProfilerActivity.CPU, *gpu])
        self._profiler.start()
        self._began = time.perf_counter()

    def finish(self, step: int) -> list[str]:
        """Write the profile if `step` was its last one; return a line of every rank that profiles.

        A collective call after that step. A profile that cannot be written is reported, and the run continues.
        """
        if not self._pending or step != self.end:
            return []
        seconds = (time.perf_counter() - self._began) / (self.end - self.start)
        profiler = self._stop()
        try:
            own = self._write(profiler, seconds) if profiler else None
        except OSError as error:
            own = f"profile of rank {self._ranks.rank} not written: {error}"
        return [line for line in gather_objects(own) if line is not None]

    def stop_early(self, step: int) -> list[str]:
        """End a profile that is not finished, for a run that stops after `step`; return a line about it."""
        if not self._pending:
            return []
        self._stop()
        return [f"no profile: the run stopped after step {step:,}, before step {self.end:,} (--profile-step-end)"]

    def _stop(self) -> Any:
        """Stop the profiler and return it; None on a rank without one."""
        self._pending, profiler, self._profiler = False, self._profiler, None
        if profiler:
            profiler.stop()
        return profiler

    def _write(self, profiler: Any, seconds: float) -> str:
        """Write table and trace; return a line about them. `seconds` is the time of a step under the profiler."""
        on_gpu = self._ranks.device.type == "cuda"
        operations = profiler.key_averages()
        path = self._folder / f"steps-{self.start + 1}-{self.end}-rank-{self._ranks.rank}"
        self._folder.mkdir(exist_ok=True)
        order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        table = operations.table(sort_by=order, row_limit=-1, max_name_column_width=80)
        write_text(path.with_suffix(".txt"), table)
        profiler.export_chrome_trace(f"{path}.json.gz")
        shares = ", ".join(f"{name:.60} {share:.0%}" for name, share in shares_of(operations, on_gpu)[:LINE_OPERATIONS])
        steps = f"steps {self.start + 1} to {self.end} on rank {self._ranks.rank}"
        files = f"{path}.txt has all, ui.perfetto.dev shows {path.name}.json.gz"
        return f"profile of {steps}, {seconds:.3f} s per step with the profiler: {shares}; {files}"


def shares_of(operations: Any, on_gpu: bool) -> list[tuple[str, float]]:
    """Return (name, share of the time) of torch's averaged operations, the longest first: kernels on a GPU.

    There an operation of the host has the time of the kernels that it launched too, which would count twice; a named
    range has the time of all inside.
    """
    if on_gpu:
        kernels = [item for item in operations if item.device_type != DeviceType.CPU and not item.is_user_annotation]
        times = [(item.key, float(item.self_device_time_total)) for item in kernels]
    else:
        times = [(item.key, float(item.self_cpu_time_total)) for item in operations]
    total = sum(time for _, time in times) or 1.0
    return sorted(((name, time / total) for name, time in times), key=lambda pair: -pair[1])
