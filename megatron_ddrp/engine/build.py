"""The device of a run, with its checks and choices, and the DeepSpeed engine on it.

`check_device` refuses before the first step what the device cannot do, and `choices` names what the settings `auto`
became. `build_engine` cuts the model to this rank's part and gives it to DeepSpeed with an optimizer and the flags as
DeepSpeed's settings.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn

from megatron_ddrp.config import Config, ModelConfig
from megatron_ddrp.config.registry import OPTIMIZERS
from megatron_ddrp.engine.layout import (
    NEVER,
    GradientClipping,
    GradientSums,
    Setup,
    ZeroClipping,
    build_pipeline,
    forget_offloaded,
    import_quietly,
    lay_over,
    mark_invalid,
    model_parallel_unit,
    offloads,
)
from megatron_ddrp.engine.optimizer_state import check_deepspeed, check_moments
from megatron_ddrp.engine.optimizers import OF_TABLES
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.model import ENCODER_PARTS, Encoder
from megatron_ddrp.model.attention.backends import refusal, resolve_backend
from megatron_ddrp.model.attention.logits import Demand
from megatron_ddrp.model.fused import compiles, is_nvidia, why_not_compile
from megatron_ddrp.model.graphs import ModelGraphs, uses_graphs, why_not_graphs
from megatron_ddrp.model.positions.contract import LayerPositions, PositionEncoding
from megatron_ddrp.model.stages import DTYPES
from megatron_ddrp.parallel import process_group
from megatron_ddrp.parallel.pipeline import local_parameters, name_parameters
from megatron_ddrp.parallel.process_group import Ranks
from megatron_ddrp.parallel.tensor_parallel import apply_sequence_parallel, apply_tensor_parallel

NATIVE_BF16 = (8, 0)
"""Lowest compute capability with bfloat16 on NVIDIA's GPUs; `torch.cuda.is_bf16_supported()` counts emulation too."""


def precision_fault(precision: str, device: torch.device) -> str | None:
    """Return the reason why a device cannot train in "fp32", "bf16" or "fp16", or None if it can."""
    if precision == "fp16" and device.type == "cpu":
        import_quietly()
        from deepspeed.accelerator import get_accelerator

        if not get_accelerator().is_fp16_supported():
            return f"there is no GPU here, and this CPU does not compute in float16: {instead_of_fp16()}"
    if precision == "bf16" and is_nvidia(device):
        capability = torch.cuda.get_device_capability(device)
        if capability < NATIVE_BF16:
            name, (major, minor) = torch.cuda.get_device_name(device), capability
            return f"{name} has compute capability {major}.{minor} and only emulates bfloat16 (8.0 has it): use --fp16"
    return None


def instead_of_fp16() -> str:
    """Return the advice for a user who asks for fp16 on a CPU that lacks it."""
    if _multiplies_bf16_slowly():
        return "leave --fp16 out (without AVX-512 this CPU is many times slower in bf16 than in fp32)"
    return "use --bf16, or neither for fp32"


def _multiplies_bf16_slowly() -> bool:
    """Return whether this machine's CPU has AVX2 but no AVX-512."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def allow_tf32(allowed: bool, device: torch.device) -> None:
    """Let a GPU multiply fp32 matrices in TF32, unless `--no-tf32` is given. CPUs are unaffected."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if allowed else "highest")


def precision_remarks(config: Config, device: torch.device) -> list[str]:
    """Return a line if another precision is faster on this device, else nothing."""
    precision = config.training.precision
    if precision == "bf16" and device.type == "cpu" and _multiplies_bf16_slowly():
        return ["this CPU has no AVX-512, so torch multiplies bf16 matrices many times slower than fp32: omit --bf16"]
    if precision != "fp32" or not is_nvidia(device) or torch.cuda.get_device_capability(device) < NATIVE_BF16:
        return []
    how = "TF32" if config.training.tf32 else "fp32"
    name = torch.cuda.get_device_name(device)
    return [f"{name} computes in bfloat16: --bf16 is faster than {how} and halves the activations"]


def check_device(config: Config, device: torch.device) -> None:
    """Refuse a precision, an attention backend, a compilation, graphs or replays that a device does not support."""
    no_graphs = why_not_graphs(config, device) if config.parallel.cuda_graphs == "on" else None
    precision, backend = config.training.precision, config.model.attention_backend
    faults = {
        f"--{precision}": precision_fault(precision, device),
        f"--attention-backend {backend}": refusal(
            backend, attention_demand(config.model, config.training.precision, device)
        ),
        "--compile on": why_not_compile(device) if config.model.compile == "on" else None,
        "--cuda-graphs on": no_graphs and f"{no_graphs}; use --cuda-graphs off",
        f"--replay-interval {config.training.replay_interval}": why_no_replay(config, device),
    }
    for flag, fault in faults.items():
        if fault:
            raise UserError(f"{flag}: {fault}", WRONG_ARGUMENTS)


def why_no_replay(config: Config, device: torch.device) -> str | None:
    """Return the reason why two passes over one micro-batch may differ on a device, or None, also without replays."""
    if config.training.replay_interval is None or device.type == "cpu" or uses_graphs(config, device):
        return None
    reason = why_not_graphs(config, device) or "--cuda-graphs off"
    return f"on GPUs only passes by CUDA graphs are compared, and this run has none ({reason}); leave it out"


def attention_demand(model: ModelConfig, precision: str, device: torch.device) -> Demand:
    """Return a run's requirements for an attention backend."""
    return Demand(device, DTYPES[precision], model.attention_dropout, model.head_dim)


def choices(config: Config, device: torch.device) -> str:
    """Return the attention backend with the reason for it, how layers are launched, and the precision."""
    model, demand = config.model, attention_demand(config.model, config.training.precision, device)
    windows = {model.window(layer) for layer in range(model.num_layers)} - {None}
    demands = [("", demand), *((", in local layers ", demand._replace(window=window)) for window in windows)]
    demands += [(", in the causal phase ", demand._replace(causal=True))] * bool(config.objective.causal_share)
    places: dict[str, str] = {}
    for place, each in demands:
        backend, why = resolve_backend(model.attention_backend, each, model.encoding.in_logits)
        places.setdefault(f"{backend} attention ({why})", place)
    attention = "".join(place + text for text, place in places.items())
    layers = "compiled layers, " if compiles(model.compile, device) else ""
    graphs = "CUDA graphs of layers, " if uses_graphs(config, device) else ""
    return f"{attention}, {layers}{graphs}{config.training.precision}"


def other_choices(texts: Sequence[str]) -> list[str]:
    """Return a line for each result of `choices` that is not rank 0's, with its ranks; `texts` has one per rank."""
    lines = []
    for text in [text for text in dict.fromkeys(texts) if text != texts[0]]:
        ranks = [rank for rank, own in enumerate(texts) if own == text]
        runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
        named = ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
        lines.append(f"rank{'s' * (len(ranks) > 1)} {named}: {text}")
    return lines


def missing_graphs(config: Config, device: torch.device) -> tuple[str, ...]:
    """Return a line about the setting for which `--cuda-graphs auto` is off on a GPU of NVIDIA's, or nothing."""
    could = is_nvidia(device) and config.parallel.cuda_graphs == "auto"
    reason = why_not_graphs(config, device) if could else None
    return (f"--cuda-graphs auto: off, {reason}",) if reason else ()


def rows_for(config: Config, device: torch.device) -> str:
    """Return the use of a run's rows, for `Corpus.loader`."""
    return f"{device.type} graphs" if uses_graphs(config, device) else device.type


def unused_devices(world_size: int) -> tuple[str, ...]:
    """Return a line about the other GPUs where one process runs on a machine with several; nothing otherwise."""
    count = torch.cuda.device_count()
    if world_size > 1 or count < 2:
        return ()
    return (f"1 of {count} GPUs used; to use all: deepspeed --module megatron_ddrp pretrain … with the same flags",)


SMALLEST_BUCKET, LARGEST_BUCKET = 5_000_000, 500_000_000
"""Bounds, in elements, of DeepSpeed's reduce and gather buckets; the second is DeepSpeed's own default."""

OVERLAPPED_BUCKET = 32_000_000
"""Largest bucket, in elements, that is reduced during the backward pass: a token embedding of width 1,024 fits."""


def build_engine(model: Encoder, setup: Setup) -> Any:
    """Return the DeepSpeed engine of this rank's part of a freshly initialised model; `model` is cut in place."""
    import_quietly()
    import deepspeed

    config, ranks = setup.config, setup.ranks
    # DeepSpeed's log lines and warnings would break the progress line; its import has set the level of its log.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    for category in (FutureWarning, UserWarning):
        warnings.filterwarnings("ignore", category=category, module=r"(torch|deepspeed)\b")
    if ranks.device.type == "cpu":
        # Otherwise DeepSpeed compiles a shared-memory helper: 40 s, a compiler, and a lock file if the build is killed.
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    import_muon()
    deepspeed.init_distributed()
    deepspeed.utils.groups.mpu = None  # of an earlier engine of this process
    apply_tensor_parallel(model, ranks)
    if config.parallel.cuts_sequence:
        apply_sequence_parallel(model, ranks)
    name_parameters(model)
    if config.training.bf16 and config.parallel.zero_stage == 0:
        model.compute_dtype = torch.bfloat16
    has_pipeline = ranks.pipeline_size > 1
    module: nn.Module = model
    if has_pipeline:
        module = build_pipeline(model, setup)
    num_parameters = sum(parameter.numel() for parameter in local_parameters(module).values())
    settings = deepspeed_settings(setup, num_parameters)
    chosen = config.optimizer.chosen
    moments, optimizer = chosen.moments_of(module), build_optimizer(module, config, ranks)
    rests = ENCODER_PARTS if config.training.new_head_iters else ()
    encoder = [parameter for name, parameter in local_parameters(module).items() if name.startswith(rests)]
    resting = [parameter.register_hook(lambda gradient: gradient * 0) for parameter in encoder]  # which keeps nan
    with overlapped_accumulation(has_pipeline), contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints memory
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config=settings,
            mpu=model_parallel_unit(ranks) if ranks.tensor_size > 1 and not has_pipeline else None,
            dist_init_required=False,
        )
    check_deepspeed(engine)
    if setup.uses_graphs:
        model.graphs = ModelGraphs(sums=GradientSums.of(engine))
    engine.own_moments, engine.own_clipping, engine.resting = moments, None, resting
    if config.parallel.zero_stage == 0:
        engine.own_clipping = GradientClipping(module, config.optimizer.clip_grad, ranks)
        optimizer.register_step_pre_hook(engine.own_clipping)
    else:
        zero: Any = sys.modules[type(engine.optimizer).__module__]
        zero.mask_nan_or_inf_with_val_inplace = mark_invalid
        if getattr(engine.optimizer, "cpu_offload", False):
            forget_offloaded(engine.optimizer)
        if not settings["bf16"].get("check_grad_overflow", True):
            optimizer.register_step_pre_hook(ZeroClipping(engine.optimizer, config.optimizer.clip_grad))
    if config.training.fp16:
        grow_scale_after_steps(engine.optimizer)
    if not OPTIMIZERS.has_own(config.optimizer.optimizer):
        check_moments(engine, chosen)
    return engine


def grow_scale_after_steps(optimizer: Any) -> None:
    """Let fp16's dynamic loss scale grow behind a step; DeepSpeed divides the gradients of the step by the grown scale.

    At the smallest scale DeepSpeed would end the run, where `nonfinite.py` counts the step.
    """
    update, step = optimizer._update_scale, optimizer.step

    def step_and_grow(*arguments: Any, **named: Any) -> None:
        step(*arguments, **named)
        if not optimizer.overflow:
            update(False)

    optimizer._update_scale = lambda overflow: update(True) if overflow else None
    optimizer.step = step_and_grow
    optimizer.loss_scaler.raise_error_at_min_scale = False


def release(engine: Any) -> None:
    """Free an engine's memory, which hooks on gradients hold in circles of references; ZeRO 3 keeps more in others."""
    with contextlib.suppress(RuntimeError):  # a device that failed cannot be waited for
        engine.destroy()
    if engine.zero_optimization_stage() == 3:
        engine.basic_optimizer.state.clear()
        engine.basic_optimizer.param_groups.clear()
        vars(engine.optimizer).clear()
        for parameter in engine.module.parameters():
            vars(parameter).clear()
            parameter.data = parameter.data.new_empty(0)


def leave_groups() -> None:
    """Leave the process group, if there is one, and let DeepSpeed forget its own, which its next engine would use."""
    theirs: Any = sys.modules.get("deepspeed.comm.comm")  # not loaded: no engine was built
    if theirs is not None and theirs.cdb is not None:
        theirs.destroy_process_group()
        theirs.cdb = None
    process_group.leave()


def build_optimizer(model: nn.Module, config: Config, ranks: Ranks) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters; `names_without_decay` names those without weight decay.

    The tables of position encodings have a group of their own if there is a causal phase, which reads only some of
    their entries: the others must stay as they are.
    """
    named = [(name, parameter) for name, parameter in local_parameters(model).items() if parameter.requires_grad]
    spared, decay = names_without_decay(model), config.optimizer.weight_decay
    encodings = [m for m in model.modules() if isinstance(m, PositionEncoding) and config.objective.causal_share]
    tables = {id(parameter) for encoding in encodings for parameter in encoding.parameters(recurse=False)}
    decaying = [p for name, p in named if name not in spared]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in decaying if id(p) not in tables], "weight_decay": decay},
        {"params": [p for name, p in named if name in spared], "weight_decay": 0.0},
    ]
    if config.objective.causal_share:  # ZeRO waits for as many groups on every stage of a pipeline
        alone = [p for p in decaying if id(p) in tables]
        groups.append({"params": alone or [groups[0]["params"].pop()], "weight_decay": decay, OF_TABLES: bool(alone)})
    return config.optimizer.chosen.build(groups, model, config, ranks)


def names_without_decay(model: nn.Module) -> set[str]:
    """Return the names of the parameters without weight decay: biases, and those of norms and gains.

    Biases are known by their names, norms also by their modules, since a plug-in gives its norms any names.
    """
    spared: set[int] = set()
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            spared.update(id(parameter) for parameter in module.parameters(recurse=False))
        elif isinstance(module, (PositionEncoding, LayerPositions)):
            spared.update(id(parameter) for name, parameter in module.named_parameters() if name in module.gains)
    return {
        name
        for name, parameter in local_parameters(model).items()
        if id(parameter) in spared or name.endswith(".bias") or "norm." in name
    }


def import_muon() -> None:
    """Import DeepSpeed's own Muon, as every engine with ZeRO does, without compiling it.

    No engine of ours uses it, and torch's compiler, which it loads, takes a sixth of the start of a run.
    """
    with contextlib.suppress(ImportError, AttributeError):  # of a DeepSpeed without it
        from deepspeed.runtime import compiler

        compiled, compiler.compile = compiler.compile, lambda **_: lambda function: function
        try:
            importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
        finally:
            compiler.compile = compiled


def deepspeed_settings(setup: Setup, num_parameters: int) -> dict[str, Any]:
    """Return the flags as DeepSpeed's JSON settings, overridden by `--deepspeed_config`.

    `num_parameters` counts this rank's parameters. DeepSpeed allocates a whole bucket even for a small model, so
    buckets are at most as large as the model. GPUs reduce smaller buckets, two in turn, during the backward pass. CPUs
    would do both on the same cores, and DeepSpeed's pipelines cannot overlap them. One rank has nothing to overlap.
    Ranks with CUDA graphs reduce after the pass, in the order of the parameters: during it DeepSpeed fills buckets in
    the order in which gradients come, which a replay changes, and a rank replays where another may not.

    DeepSpeed would wait for the device to measure its throughput, to overlap reductions, to check gradients and to clip
    them; where the device can do it, nothing waits.
    """
    config, data_size, from_file = setup.config, setup.ranks.data_size, setup.deepspeed
    parallel, training = config.parallel, config.training
    bucket = max(SMALLEST_BUCKET, min(LARGEST_BUCKET, num_parameters + num_parameters % 2))  # DeepSpeed needs it even
    overlaps = setup.ranks.device.type != "cpu" and parallel.pipeline_model_parallel_size == 1
    zero: dict[str, Any] = {
        "stage": parallel.zero_stage,
        "overlap_comm": (overlaps and data_size > 1 and not setup.uses_graphs) or parallel.zero_stage == 3,
        "contiguous_gradients": True,
        "reduce_bucket_size": min(bucket, OVERLAPPED_BUCKET) if overlaps else bucket,
        "allgather_bucket_size": bucket,
    }
    if parallel.offload_optimizer != "none":
        zero["offload_optimizer"] = {"device": parallel.offload_optimizer}
    settings: dict[str, Any] = {
        "train_batch_size": training.micro_batch_size * setup.num_micro_batches * data_size,
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        "gradient_accumulation_steps": setup.num_micro_batches,
        "gradient_clipping": config.optimizer.clip_grad,
        "zero_optimization": zero,
        "bf16": {"enabled": training.bf16, "immediate_grad_update": True},
        "fp16": {"enabled": training.fp16},
        "zero_allow_untested_optimizer": True,
        # torch's fused AdamW steps offloaded state; DeepSpeed's own would need compiling and rounds differently.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": NEVER,
        "timers": {"throughput": {"enabled": False}},  # it waits for the device twice per micro-batch
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
    }
    has_pipeline, is_offloaded = parallel.pipeline_model_parallel_size > 1, offloads(parallel, from_file)
    if training.bf16 and not (has_pipeline and is_offloaded):
        settings |= {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
    if training.bf16 and parallel.zero_stage in (1, 2) and not has_pipeline and not is_offloaded:
        settings["bf16"]["check_grad_overflow"] = False  # `ZeroClipping` checks on the device
    settings = lay_over(settings, from_file, str(parallel.deepspeed_config))
    if setup.uses_graphs and data_size > 1 and parallel.zero_stage and settings["zero_optimization"]["overlap_comm"]:
        fault = "overlap_comm beside CUDA graphs would sum gradients of different parameters; give --cuda-graphs off"
        raise UserError(f"--deepspeed_config {parallel.deepspeed_config}: {fault}, or leave it out", WRONG_ARGUMENTS)
    if parallel.zero_stage == 0:
        settings["bf16"]["enabled"] = False  # to DeepSpeed the run is in fp32, see `Encoder.compute_dtype`
    if parallel.zero_stage == 0 or not settings["bf16"].get("check_grad_overflow", True):
        settings["gradient_clipping"] = 0.0  # `GradientClipping` or `ZeroClipping` clips instead
    return settings


@contextlib.contextmanager
def overlapped_accumulation(has_pipeline: bool) -> Iterator[None]:
    """Make DeepSpeed's ZeRO optimizer sum bf16 gradients in fp32 at stage 1, as it does with offload.

    Otherwise DeepSpeed uses its `BF16_Optimizer`, which reduces all gradients at once after the last backward pass and
    keeps both copies of them. DeepSpeed's pipelines, which overlap nothing, need that optimizer for tied weights.
    """
    if has_pipeline:
        yield
        return
    from deepspeed.runtime.engine import BFLOAT16, ZERO_OPTIMIZATION, DeepSpeedEngine

    choose = DeepSpeedEngine._do_optimizer_sanity_check

    def choose_zero(engine: Any, optimizer: Any) -> Any:
        chosen = choose(engine, optimizer)
        return ZERO_OPTIMIZATION if chosen == BFLOAT16 else chosen

    DeepSpeedEngine._do_optimizer_sanity_check = choose_zero
    try:
        yield
    finally:
        DeepSpeedEngine._do_optimizer_sanity_check = choose
