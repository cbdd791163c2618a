"""Settings of training: steps and precision, optimizer, layout over ranks, and what changes with the optimizer step.

Masking rate and row length are pure functions of the step, so that resuming needs no stored state.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from megatron_ddrp.config.reading import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    WAVELENGTH_BASE,
    Number,
    Section,
    as_tuple,
    as_words,
    check_range,
    flag,
    option,
    own_numbers,
    refuse,
)
from megatron_ddrp.config.registry import OPTIMIZERS, SCHEDULES
from megatron_ddrp.errors import UserError

HEAD_ITERS, HEAD_LR = 200, 1e-3
"""Steps, and lowest learning rate, in which a new head learns while its encoder rests."""

LENGTHS = "[3, 2147483648)"
"""Range of a phase's row length: at least [CLS], one token and [SEP]."""


class MaskRates(NamedTuple):
    """Masking rate of a run, which changes from `start` to `end` in equal steps."""

    start: float
    end: float

    @classmethod
    def parse(cls, value: Any) -> MaskRates:
        """Return the rates of a number, or of the text START:END. Raises `UserError`."""
        words = value.split(":") if isinstance(value, str) else [value]
        rates: list[Any] = []
        with contextlib.suppress(ValueError):
            rates = [float(word) if isinstance(word, str) else word for word in words]
        if len(rates) not in (1, 2):
            refuse(f"--mask-prob is {value}: it must be one share in (0, 1), such as 0.15, or two, such as 0.3:0.15")
        for rate in rates:
            check_range("mask_prob", rate, "(0, 1)")
        return cls(rates[0], rates[-1])

    @property
    def written(self) -> float | str:
        """Rates as written for `--mask-prob`: one number if they are equal."""
        return self.start if self.start == self.end else f"{self.start}:{self.end}"

    @property
    def mean(self) -> float:
        """Mean masking rate over the run."""
        return (self.start + self.end) / 2

    def at(self, steps_done: int, total_steps: int) -> float:
        """Return the rate of the step that follows `steps_done` steps of a run of `total_steps`."""
        return self.start + (self.end - self.start) * min(1.0, steps_done / total_steps)


def read_rates(value: Any, place: Any) -> Any:
    """Return the value of `--mask-prob` at a place in YAML (`reading.Place`). Raises `UserError` with the place."""
    try:
        return MaskRates.parse(value).written
    except UserError as error:
        raise place.error(str(error)) from None


class LengthPhase(NamedTuple):
    """Part of a run whose rows have one length."""

    seq_length: int
    share: float
    """The share of all steps after which the phase ends; after 1 no other phase has a step."""
    rope_theta: float | None = None
    """Base of the rotary wavelengths; None for `--rope-theta`."""

    @classmethod
    def parse(cls, text: str) -> LengthPhase:
        """Return the phase of LENGTH:END or LENGTH:END:THETA. Raises `UserError`."""
        words = text.split(":")
        try:
            phase = cls(int(words[0]), *map(float, words[1:]))
        except (TypeError, ValueError):
            refuse(
                f"--seq-length-phases {text}: expected LENGTH:END, such as 128:0.9 for rows of 128 tokens over the "
                "first 90 % of the steps, or LENGTH:END:THETA (quote it in YAML, which reads 128:0.9 as a time)"
            )
        check_range("seq_length_phases", phase.seq_length, LENGTHS)
        check_range("seq_length_phases", phase.share, "(0, 1]")
        if phase.rope_theta is not None:
            check_range("seq_length_phases", phase.rope_theta, WAVELENGTH_BASE)
        return phase

    def last_step(self, total_steps: int) -> int:
        """Return the number of the phase's last step, 1 … `total_steps`."""
        return round(self.share * total_steps)


def parse_phases(words: Sequence[str], seq_length: int) -> tuple[LengthPhase, ...]:
    """Return the phases of a run, the last of which has rows of `seq_length` tokens. Raises `UserError`.

    The last has no step if the one before it ends with the run.
    """
    phases = (*map(LengthPhase.parse, words), LengthPhase(seq_length, 1.0))
    for word, before, after in zip(words, phases, phases[1:], strict=False):
        ends_in_order = before.share < after.share or after is phases[-1]
        if before.seq_length >= after.seq_length or not ends_in_order:
            refuse(
                f"--seq-length-phases {word}: the next phase has {after.seq_length} tokens and ends at "
                f"{after.share:g}: give phases in order, of growing lengths below --seq-length {seq_length} and "
                "growing ends, at most 1"
            )
    return phases


def phase_at(phases: Sequence[LengthPhase], steps_done: int, total_steps: int) -> LengthPhase:
    """Return the phase of the step that follows `steps_done` steps of a run of `total_steps`."""
    return next((phase for phase in phases[:-1] if steps_done < phase.last_step(total_steps)), phases[-1])


@dataclass(frozen=True)
class TrainingConfig(Section):
    """Training"""

    micro_batch_size: int = option(8, "sequences that a rank processes at once", within=COUNT)
    global_batch_size: int = option(256, "sequences per optimizer step, over all ranks", within=COUNT)
    train_iters: int = option(1_000_000, "optimizer steps of the whole run", within=COUNT)
    seq_length_phases: tuple[str, ...] = option(
        (),
        "shorter rows first: with 128:0.9 the first 90 % of the steps have rows of up to 128 tokens, as in BERT "
        "(arXiv:1810.04805, appendix A.2), and the rest rows of --seq-length; GPT-BERT has three phases, "
        "128:0.7 256:0.9 (arXiv:2410.24159). A third number is --rope-theta of the phase, which changes in one step as "
        "in ModernBERT: 1024:0.9:10000 (arXiv:2412.13663). Every phase has --global-batch-size sequences per step; "
        "validation always has rows as long as the last step's. 128:1 trains a model for --seq-length on rows of 128 "
        "alone (default: one phase)",
        nargs="+",
        metavar="LENGTH:END[:THETA]",
    )
    new_head_iters: int | None = option(
        None,
        f"first steps in which the encoder rests and only the head learns, at --lr or {HEAD_LR:g} if that is more: a "
        "random head's gradients would undo what the encoder knows. --lr-decay-style and warm-up begin after them "
        f"(default: {HEAD_ITERS}, or a fifth of --train-iters if that is less, if --load is an import whose folder had "
        "no head, else 0)",
        within="[0, 2147483648)",
        metavar="N",
    )
    seed: int = option(1234, "seed of initialisation, data order, masks, samples and dropout", within=SEED)
    bf16: bool = option(False, "train in bfloat16 with fp32 master weights")
    fp16: bool = option(False, "train in float16 with dynamic loss scaling")
    tf32: bool = option(
        True,
        "compute products of fp32 matrices in TF32 on GPUs that have it: several times the speed, at a precision "
        "between bf16's and fp32's; --no-tf32 keeps fp32",
    )
    num_threads: int | None = option(None, "CPU threads per rank (default: torch's own choice)", within="[1, 65536]")
    max_skipped_steps: int = option(
        10,
        "stop after this many steps in a row whose loss or gradients are not finite, or that --replay-interval drops; "
        "such a step changes no weight",
        within=COUNT,
    )
    replay_interval: int | None = option(
        None,
        "compute one micro-batch of every N-th step again on each rank, with the same draws, and compare the bits of "
        "loss and gradients: if a rank computes wrong, it is named and all ranks drop the step. Weights that several "
        "ranks hold are compared too; a difference ends the run. Costs about one micro-batch per replay; needs CPUs or "
        "CUDA graphs (default: no replay)",
        within=COUNT,
        metavar="N",
    )
    gradient_proof: bool = option(
        True,
        "in the first step of a run, and of a resumed one, compare the gradients that DeepSpeed steps with with the "
        "sums of what the backward passes gave, for one parameter of each kind, and end the run if they differ by more "
        "than rounding; --no-gradient-proof trains on with them",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "seq_length_phases", as_tuple(self.seq_length_phases))
        if self.bf16 and self.fp16:
            refuse("--bf16 and --fp16 exclude each other: give one of them")

    @property
    def precision(self) -> str:
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """Optimizer"""

    optimizer: str = option(
        "adamw",
        "adamw, or muon: orthogonalised updates for the matrices of the layers and of position projections, AdamW for "
        "all other parameters, with one --lr and --weight-decay for both (with the step size of "
        "Moonlight, arXiv:2502.16982); needs --zero-stage 0",
        choices=OPTIMIZERS,
    )
    optimizer_options: tuple[str, ...] = option(
        (),
        "the optimizer's own numbers: muon has scale, the size of its updates at a rate of 1 (default: scale=0.2, "
        "AdamW's size; for a plug-in what it declares)",
        nargs="+",
        metavar="NAME=NUMBER",
    )
    lr: float = option(1e-4, "peak learning rate", within=NOT_NEGATIVE)
    min_lr: float = option(0.0, "learning rate at the end of the decay", within=NOT_NEGATIVE)
    lr_decay_style: str = option(
        "linear",
        "shape of the decay after the warm-up; wsd holds the peak and decays over the last --lr-wsd-decay-iters "
        "(warm-up, stable, decay: MiniCPM, arXiv:2404.06395), so that a decay can start from any checkpoint of a "
        "stable run: --load RUN/iter_N --save BRANCH and --train-iters N + decay",
        choices=SCHEDULES,
    )
    lr_wsd_decay_iters: int | None = option(
        None,
        "steps of wsd's decay, the last ones up to --lr-decay-iters, or else --train-iters (default: the last tenth of "
        "the steps after the warm-up)",
        within=COUNT,
    )
    lr_wsd_decay_style: str = option(
        "linear",
        "shape of wsd's decay: linear, or minus_sqrt, 1 - sqrt(finished share of the decay), as in ModernBERT "
        "(arXiv:2412.13663) and Ettin (arXiv:2507.11412)",
        choices=("linear", "minus_sqrt"),
    )
    lr_decay_iters: int | None = option(
        None,
        "step at which the decay reaches --min-lr, which later steps keep; --lr-warmup-fraction is a share of it "
        "(default: --train-iters)",
        within=COUNT,
    )
    lr_warmup_fraction: float = option(
        0.01,
        "share of --lr-decay-iters, or else of --train-iters, over which the rate rises linearly",
        within="[0, 1]",
    )
    lr_warmup_iters: int | None = option(
        None,
        "steps over which the rate rises, independent of --train-iters (default: by --lr-warmup-fraction)",
        within="[0, 2147483648)",
    )
    weight_decay: float = option(0.01, "decoupled decay; not on biases and LayerNorms", within=NOT_NEGATIVE)
    adam_beta1: float = option(0.9, "decay of the first moment", within="[0, 1)")
    adam_beta2: float = option(0.999, "decay of the second moment", within="[0, 1)")
    adam_eps: float = option(1e-6, "number added to the root of the second moment", within=POSITIVE)
    clip_grad: float = option(1.0, "largest global gradient norm; 0 = no clipping", within=NOT_NEGATIVE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_lr > self.lr:
            refuse(f"--min-lr {self.min_lr} is above --lr {self.lr}: give a --min-lr of at most --lr")
        reads_wsd = self.lr_decay_style == "wsd" or not SCHEDULES.has_own(self.lr_decay_style)
        for name, default in (("lr_wsd_decay_iters", None), ("lr_wsd_decay_style", "linear")):
            if getattr(self, name) != default and not reads_wsd:
                refuse(
                    f"{flag(name)} {getattr(self, name)} with --lr-decay-style {self.lr_decay_style}: it needs "
                    "--lr-decay-style wsd"
                )

        object.__setattr__(self, "optimizer_options", as_tuple(self.optimizer_options))
        if self.optimizer in OPTIMIZERS:  # settings of a run with a plug-in load without the plug-in
            numbers = self.numbers(self.chosen.options)
            object.__setattr__(self, "optimizer_options", as_words(numbers))

    @property
    def chosen(self) -> Any:
        """Class of the optimizer, an `Optimizer`. Raises `NotRegistered` for an unknown name."""
        return OPTIMIZERS.find(self.optimizer)

    def numbers(self, declared: Mapping[str, Number]) -> dict[str, float]:
        """Return the numbers that an optimizer declares, with `--optimizer-options` in place of their defaults."""
        return own_numbers(f"--optimizer {self.optimizer}", "optimizer_options", self.optimizer_options, declared)

    def decay_steps(self, total_steps: int) -> int:
        """Return the step at which the decay of a run of `total_steps` reaches `min_lr`."""
        return total_steps if self.lr_decay_iters is None else self.lr_decay_iters

    def warmup_steps(self, total_steps: int) -> int:
        """Return the number of warm-up steps of a run of `total_steps`."""
        if self.lr_warmup_iters is not None:
            return self.lr_warmup_iters
        share = Fraction(str(self.lr_warmup_fraction))  # as written: 0.07 of 100 steps are 7, in floats a little more
        return math.ceil(share * self.decay_steps(total_steps))


@dataclass(frozen=True)
class ParallelConfig(Section):
    """Scale"""

    tensor_model_parallel_size: int = option(
        1, "ranks that divide every layer: attention heads, feed-forward width and vocabulary", within=COUNT
    )
    pipeline_model_parallel_size: int = option(
        1, "ranks that divide the list of layers; each layer is whole on one rank", within=COUNT
    )
    sequence_parallel: bool = option(
        False,
        "tensor-parallel ranks also divide the tokens of each row for LayerNorms, dropout and residual sums: saves "
        "memory; ignored with --tensor-model-parallel-size 1",
    )
    zero_stage: int = option(
        1, "tensors that ZeRO shards: 0 none, 1 optimizer, 2 + gradients, 3 + parameters", choices=(0, 1, 2, 3)
    )
    deepspeed_config: str | None = option(
        None,
        "DeepSpeed's JSON; it decides stage, precision, batch sizes, Adam's numbers, clipping and offload where no "
        "flag and no --config does",
        metavar="FILE",
    )
    decided_by_deepspeed_config: tuple[str, ...] = ()
    """Settings that the file decided, by name: the record of who decided what in config.json."""
    offload_optimizer: str = option(
        "none",
        "cpu keeps ZeRO's optimizer state in host memory and computes the update there, to save memory of the GPU",
        choices=("none", "cpu"),
    )
    checkpoint_activations: bool = option(
        False, "recompute each layer in the backward pass: less memory, a third slower"
    )
    cuda_graphs: str = option(
        "auto",
        "replay the kernels of each layer as CUDA graphs, where the CPU cannot launch them as fast as the GPU runs "
        "them: auto does so if layout and objective allow it; rows then have lengths of multiples of 64",
        choices=("auto", "on", "off"),
    )
    distributed_timeout_minutes: float = option(
        10.0, "minutes that a rank waits for the others before it gives up", within="(0, 1000000]"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "decided_by_deepspeed_config", tuple(self.decided_by_deepspeed_config))
        if self.offload_optimizer != "none" and self.zero_stage == 0:
            refuse(
                "--offload-optimizer cpu with --zero-stage 0: offloading needs ZeRO, so use --zero-stage 1 or higher"
            )
        if self.pipeline_model_parallel_size > 1 and self.zero_stage > 1:
            refuse(
                f"--pipeline-model-parallel-size {self.pipeline_model_parallel_size} with --zero-stage "
                f"{self.zero_stage}: DeepSpeed's pipelines need --zero-stage 0 or 1"
            )

    @property
    def cuts_sequence(self) -> bool:
        """True if `--sequence-parallel` acts; as in Megatron it does not if one rank has whole layers."""
        return self.sequence_parallel and self.tensor_model_parallel_size > 1

    @property
    def sequence_note(self) -> str:
        """Words about sequence parallelism for the line about the layout; empty without it."""
        if self.sequence_parallel and not self.cuts_sequence:
            return ", --sequence-parallel ignored: it needs --tensor-model-parallel-size 2 or more"
        return ", sequence-parallel" if self.cuts_sequence else ""

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of data-parallel ranks; refuse a `world_size` that the other two axes do not divide."""
        tensor, pipeline = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        if world_size % (tensor * pipeline):
            refuse(
                f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline} = "
                f"{tensor * pipeline} does not divide the number of ranks, {world_size}: start a multiple of it, or "
                "choose sizes whose product divides them"
            )
        return world_size // (tensor * pipeline)
