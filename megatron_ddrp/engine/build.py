"""Build a DeepSpeed engine from a model, an optimizer and the configuration."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from megatron_ddrp.config import Config, ParallelConfig, encoding_class
from megatron_ddrp.config.registry import OPTIMIZERS
from megatron_ddrp.engine.deepspeed_file import (
    NEVER,
    adds_up_in_fp32,
    import_quietly,
    lay_over,
    offload_device,
    read_settings,
    settings_without_optimizer,
)
from megatron_ddrp.engine.layout import (
    GradientClipping,
    ModelParallelUnit,
    ZeroClipping,
    build_pipeline,
    forget_offloaded,
    mark_invalid,
)
from megatron_ddrp.engine.optimizer_state import check_deepspeed, check_moments
from megatron_ddrp.model import Encoder
from megatron_ddrp.model.graphs import ModelGraphs, uses_graphs
from megatron_ddrp.model.positions.contract import LayerPositions, PositionEncoding
from megatron_ddrp.objectives.contract import make_objective
from megatron_ddrp.parallel import process_group
from megatron_ddrp.parallel.process_group import Ranks
from megatron_ddrp.parallel.sequence_parallel import apply_sequence_parallel
from megatron_ddrp.parallel.sharding import local_parameters, name_parameters
from megatron_ddrp.parallel.tensor_parallel import apply_tensor_parallel

SMALLEST_BUCKET, LARGEST_BUCKET = 5_000_000, 500_000_000
"""Bounds, in elements, of DeepSpeed's reduce and gather buckets; the second is DeepSpeed's own default."""

OVERLAPPED_BUCKET = 32_000_000
"""Largest bucket, in elements, that is reduced during the backward pass: a token embedding of width 1,024 fits."""


def build_engine(model: Encoder, config: Config, ranks: Ranks, num_micro_batches: int) -> Any:
    """Return the DeepSpeed engine of this rank's part of a freshly initialised model; `model` is cut in place."""
    import_quietly()
    import deepspeed

    quiet_deepspeed()  # its import has set the level of its log

    if ranks.device.type == "cpu":
        # Otherwise DeepSpeed compiles a shared-memory helper: 40 s, a compiler, and a lock file if the build is killed.
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    apply_tensor_parallel(model, config.model.position_encoding, ranks)
    if config.parallel.cuts_sequence:
        apply_sequence_parallel(model, ranks)
    name_parameters(model)
    if config.training.bf16 and config.parallel.zero_stage == 0:
        model.compute_dtype = torch.bfloat16
    has_pipeline = ranks.pipeline_size > 1
    module: nn.Module = model
    if has_pipeline:
        travelling = make_objective(config.objective).travelling
        module = build_pipeline(model, travelling, config.parallel.checkpoint_activations, ranks)
    num_parameters = sum(parameter.numel() for parameter in local_parameters(module).values())
    settings = deepspeed_settings(config, num_micro_batches, ranks.data_size, num_parameters, ranks.device.type)
    chosen = OPTIMIZERS.find(config.optimizer.optimizer)
    moments, optimizer = chosen.moments_of(module), build_optimizer(module, config, ranks)
    with overlapped_accumulation(has_pipeline), contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints memory
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config=settings,
            mpu=ModelParallelUnit(ranks) if ranks.tensor_size > 1 and not has_pipeline else None,
            dist_init_required=False,
        )
    check_deepspeed(engine)
    if uses_graphs(config, ranks.device):
        model.graphs = ModelGraphs()
    engine.own_moments, engine.own_clipping = moments, None
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
    if not OPTIMIZERS.has_own(config.optimizer.optimizer):
        check_moments(engine, chosen)
    return engine


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


def quiet_deepspeed() -> None:
    """Hide DeepSpeed's log lines and warnings, which would break the progress line; its errors stay."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|deepspeed)\b")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(torch|deepspeed)\b")


def build_optimizer(model: nn.Module, config: Config, ranks: Ranks) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters; `names_without_decay` names those without weight decay."""
    named = [(name, parameter) for name, parameter in local_parameters(model).items() if parameter.requires_grad]
    spared = names_without_decay(model, config.model.position_encoding)
    groups = [
        {"params": [p for name, p in named if name not in spared], "weight_decay": config.optimizer.weight_decay},
        {"params": [p for name, p in named if name in spared], "weight_decay": 0.0},
    ]
    return OPTIMIZERS.find(config.optimizer.optimizer).build(groups, model, config, ranks)


def names_without_decay(model: nn.Module, encoding: str) -> set[str]:
    """Return the names of the parameters without weight decay: by name, and those of norms and gains by their modules.

    A plug-in gives its norms any names, and a part of a layer has gains of its own.
    """
    spared: set[int] = set()
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            spared.update(id(parameter) for parameter in module.parameters(recurse=False))
        elif isinstance(module, (PositionEncoding, LayerPositions)):
            spared.update(id(parameter) for name, parameter in module.named_parameters() if name in module.gains)
    named = local_parameters(model).items()
    return {name for name, parameter in named if id(parameter) in spared or not decays(name, encoding)}


def decays(parameter_name: str, position_encoding: str) -> bool:
    """Return whether weight decay acts on a parameter by its name: not on biases, norms and an encoding's gains."""
    gains = tuple(f".position.{gain}" for gain in encoding_class(position_encoding).gains)
    return not (parameter_name.endswith((".bias", *gains)) or "norm." in parameter_name)


def deepspeed_settings(
    config: Config, num_micro_batches: int, data_size: int, num_parameters: int, device_type: str
) -> dict[str, Any]:
    """Return the flags as DeepSpeed's JSON settings, overridden by `--deepspeed_config`.

    `num_parameters` counts this rank's parameters, `data_size` the data-parallel ranks. DeepSpeed allocates a whole
    bucket even for a small model, so buckets are at most as large as the model. GPUs reduce smaller buckets, two in
    turn, during the backward pass. CPUs would do both on the same cores, and DeepSpeed's pipelines cannot overlap them.
    One rank has nothing to overlap. DeepSpeed would wait for the device to measure its throughput, to overlap
    reductions, to check gradients and to clip them; where the device can do it, nothing waits.
    """
    parallel, training = config.parallel, config.training
    bucket = max(SMALLEST_BUCKET, min(LARGEST_BUCKET, num_parameters + num_parameters % 2))  # DeepSpeed needs it even
    overlaps = device_type != "cpu" and parallel.pipeline_model_parallel_size == 1
    zero: dict[str, Any] = {
        "stage": parallel.zero_stage,
        "overlap_comm": (overlaps and data_size > 1) or parallel.zero_stage == 3,
        "contiguous_gradients": True,
        "reduce_bucket_size": min(bucket, OVERLAPPED_BUCKET) if overlaps else bucket,
        "allgather_bucket_size": bucket,
    }
    if parallel.offload_optimizer != "none":
        zero["offload_optimizer"] = {"device": parallel.offload_optimizer}
    settings: dict[str, Any] = {
        "train_batch_size": training.micro_batch_size * num_micro_batches * data_size,
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        "gradient_accumulation_steps": num_micro_batches,
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
    from_file = settings_without_optimizer(config, read_settings(parallel, device_type))
    if training.bf16 and adds_up_in_fp32(parallel, from_file):
        settings |= {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
    if clips_on_device(training.bf16, parallel, from_file):
        settings["bf16"]["check_grad_overflow"] = False
    settings = lay_over(settings, from_file, str(parallel.deepspeed_config))
    if parallel.zero_stage == 0:
        settings["bf16"]["enabled"] = False  # to DeepSpeed the run is in fp32, see `Encoder.compute_dtype`
    if parallel.zero_stage == 0 or not settings["bf16"].get("check_grad_overflow", True):
        settings["gradient_clipping"] = 0.0  # `GradientClipping` or `ZeroClipping` clips instead
    return settings


def clips_on_device(bf16: bool, parallel: ParallelConfig, from_file: Mapping[str, Any]) -> bool:
    """Return whether `ZeroClipping` can replace DeepSpeed's check of gradients: bf16 at ZeRO 1 and 2 on the device."""
    offloads = parallel.offload_optimizer != "none" or offload_device(from_file.get("zero_optimization")) != "none"
    has_zero = parallel.zero_stage in (1, 2) and parallel.pipeline_model_parallel_size == 1
    return bf16 and has_zero and not offloads


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
