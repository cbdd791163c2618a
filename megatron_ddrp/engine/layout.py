"""The setup of a run, the file of `--deepspeed_config`, and our layouts in DeepSpeed's terms.

DeepSpeed's own models check the file, and its settings are laid over the flags. A layout becomes DeepSpeed's by its
grid of ranks, its pipeline, and gradient norms over all ranks.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ddrp.config import Config, ParallelConfig, concerns
from megatron_ddrp.config.reading import options_of
from megatron_ddrp.config.translation import (
    FLAGS,
    NEEDS_CPU_ADAM,
    check_against,
    check_names,
    decisions,
    load_file,
    refuse_contradiction,
    refuse_file,
)
from megatron_ddrp.data.batches.loader import count_micro_batches
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.model import Encoder
from megatron_ddrp.model.graphs import uses_graphs
from megatron_ddrp.model.stages import ModelOutput
from megatron_ddrp.objectives.contract import Objective, make_objective
from megatron_ddrp.parallel.pipeline import Courier, MailOfRanks, PipelinePart, split_stages, whole_name
from megatron_ddrp.parallel.process_group import Ranks, sum_over_ranks

LOWEST_DEEPSPEED = "0.19.8"
"""Lowest version that sums gradients rightly in every layout; pyproject.toml has the same."""

NEVER = 2**62
"""`steps_per_print` of a run whose file gives none: DeepSpeed prints no lines of its own."""


@dataclass(frozen=True)
class Setup:
    """A configuration on its ranks, with all that follows from both alone, computed once and handed on."""

    config: Config
    ranks: Ranks
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    """Settings of `--deepspeed_config`, checked, without the optimizer, which we build; empty without a file."""
    causal: bool = False
    """True for the steps of the causal phase."""

    @classmethod
    def of(cls, config: Config, ranks: Ranks) -> Setup:
        """Return the setup with the settings of the DeepSpeed file. Raises `UserError` for what a run cannot use."""
        return cls(config, ranks, settings_without_optimizer(config, read_settings(config.parallel, ranks.device.type)))

    @classmethod
    def planned(cls, config: Config, world_size: int, device_type: str) -> Setup:
        """Return the setup of the first of `world_size` ranks that need not be here. Raises `UserError` as `of`."""
        parallel = config.parallel
        ranks = Ranks(
            *(0, world_size, torch.device(device_type)),
            data_size=parallel.data_parallel_size(world_size),
            tensor_size=parallel.tensor_model_parallel_size,
            pipeline_size=parallel.pipeline_model_parallel_size,
        )
        return cls.of(config, ranks)

    def replace(self, **changes: dict[str, Any]) -> Setup:
        """Return the setup with some settings changed, as `Config.replace`; the DeepSpeed file is not read again."""
        return replace(self, config=self.config.replace(**changes))

    def at(self, step: int) -> Setup:
        """Return the setup of step 1, 2, …: this one, or that of the causal phase."""
        in_phase = 0 < step <= self.config.objective.causal_steps(self.config.training.train_iters)
        return replace(self, causal=True) if in_phase else self

    @cached_property
    def objective(self) -> Objective:
        """Objective of training. Raises `UserError` if its class contradicts itself."""
        made = make_objective(self.config.objective)
        return made.causal if self.causal else made

    @cached_property
    def num_micro_batches(self) -> int:
        """Micro-batches of a rank per step. Raises `UserError` if the batch sizes and the ranks do not divide."""
        training = self.config.training
        return count_micro_batches(training.global_batch_size, training.micro_batch_size, self.ranks.data_size)

    @cached_property
    def uses_graphs(self) -> bool:
        """True if the run replays its layers as CUDA graphs."""
        return uses_graphs(self.config, self.ranks.device)


def read_settings(config: ParallelConfig, device_type: str) -> dict[str, Any]:
    """Return the settings of the file; none without one. Raise `UserError` for what DeepSpeed or we cannot use.

    An old DeepSpeed is refused also without a file.

    `device_type` is that of the run, `cuda` or `cpu`.
    """
    refuse_old_deepspeed()
    path = config.deepspeed_config
    if not path:
        return {}
    loaded = load_file(path)
    _refuse_for_run(path, loaded, config.zero_stage, device_type)
    import_quietly()
    _check_models(path, loaded, config.zero_stage)
    _check_plain_sections(path, loaded)
    sums = loaded.get("data_types")
    in_fp32 = isinstance(sums, dict) and sums.get("grad_accum_dtype") == "fp32"
    if in_fp32 and config.pipeline_model_parallel_size > 1 and offloads(config, loaded):
        refuse_file(
            path, "data_types.grad_accum_dtype: an offloaded pipeline would lose gradients in fp32; leave it out"
        )
    for name, stages in (("offload_optimizer", (1, 2, 3)), ("offload_param", (3,))):
        if offload_device(loaded.get("zero_optimization"), name) != "none" and config.zero_stage not in stages:
            allowed = " or ".join(map(str, stages))
            refuse_file(path, f"zero_optimization.{name} needs --zero-stage {allowed}, not {config.zero_stage}")
    return loaded


def offload_device(zero: Mapping[str, Any] | None, name: str = "offload_optimizer") -> str:
    """Return where `zero_optimization` puts the optimizer's state, or parameters: "none", "cpu" or "nvme"."""
    section = zero.get(name) if isinstance(zero, Mapping) else None
    return section.get("device", "none") if isinstance(section, Mapping) else "none"


def offloads(config: ParallelConfig, from_file: Mapping[str, Any]) -> bool:
    """Return whether the optimizer's state is offloaded, by flag or by a DeepSpeed file's settings.

    In an offloaded pipeline DeepSpeed cannot add up bf16 gradients in fp32: it would leave out the tied weights'
    gradients of other stages.
    """
    return config.offload_optimizer != "none" or offload_device(from_file.get("zero_optimization")) != "none"


def settings_without_optimizer(config: Config, from_file: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's settings without its optimizer, which we build.

    Raises `UserError` where the optimizer's numbers are not those of the configuration.
    """
    path = str(config.parallel.deepspeed_config)
    adam = {"optimizer": from_file["optimizer"]} if "optimizer" in from_file else {}
    resolved = {name: value for concern in config.to_dict().values() for name, value in concern.items()}
    check_against(path, decisions(path, adam, options_of(*concerns().values())), resolved)
    return {key: value for key, value in from_file.items() if key != "optimizer"}


def deepspeed_version() -> str:
    """Return the version of the installed DeepSpeed, without importing it."""
    return importlib.metadata.version("deepspeed")


def refuse_old_deepspeed() -> None:
    """Raise `UserError` for a DeepSpeed that sums gradients wrongly, even if pip was told to install it."""
    found, lowest = (re.findall(r"\d+", version)[:3] for version in (deepspeed_version(), LOWEST_DEEPSPEED))
    if list(map(int, found)) < list(map(int, lowest)):
        raise UserError(
            f"DeepSpeed {deepspeed_version()} loses gradients in some layouts: pip install "
            f"'deepspeed>={LOWEST_DEEPSPEED}'",
            WRONG_ARGUMENTS,
        )


def import_quietly() -> None:
    """Import DeepSpeed; on a machine without a GPU, suppress its warning about that."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed  # noqa: F401


def lay_over(below: dict[str, Any], above: Mapping[str, Any], path: str, prefix: str = "") -> dict[str, Any]:
    """Merge nested settings; `above` wins, except that it must equal what a flag decides (`FLAGS`)."""
    merged = dict(below)
    for key, value in above.items():
        name = prefix + key
        if value == "auto":
            continue
        if name in FLAGS and value != below.get(key):
            refuse_contradiction(path, name, value, below.get(key), FLAGS[name])
        nested = isinstance(value, dict) and isinstance(below.get(key), dict)
        merged[key] = lay_over(below[key], value, path, name + ".") if nested else value
    return merged


def _refuse_for_run(path: str, settings: Mapping[str, Any], zero_stage: int, device_type: str) -> None:
    """Refuse what would end the run in a traceback of DeepSpeed's, always or at this ZeRO stage or on this device."""
    zero = settings.get("zero_optimization")
    zero = zero if isinstance(zero, Mapping) else {}
    if zero.get("zenflow"):
        refuse_file(path, f"zero_optimization.zenflow: {NEEDS_CPU_ADAM}")
    divides = (
        settings.get("gradient_predivide_factor", 1) not in (1, "auto") or settings.get("prescale_gradients") is True
    )
    if zero_stage >= 2 and divides:
        refuse_file(path, "gradient_predivide_factor and prescale_gradients need --zero-stage 0 or 1: leave them out")
    quantized = [name for name, value in zero.items() if name.startswith("zero_quantized_") and value is True]
    if quantized and device_type == "cpu":
        refuse_file(path, f"zero_optimization.{quantized[0]} is True: its kernels need a GPU; leave it out")


def _check_models(path: str, settings: dict[str, Any], zero_stage: int) -> None:
    """Check the sections that DeepSpeed describes by models: names and values, nested ones too.

    Some values depend on the ZeRO stage: the file's, or `zero_stage` if the file sets none.
    """
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import DeepSpeedMonitorConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "comms_logger": CommsLoggerConfig,
        **{name: field.annotation for name, field in DeepSpeedMonitorConfig.model_fields.items()},
    }
    for section, values in settings.items():
        if section not in models or values == "auto":
            continue
        if not isinstance(values, dict):
            refuse_file(path, f"{section} is {values!r}: expected a JSON object")
        has_no_stage = section == "zero_optimization" and values.get("stage", "auto") == "auto"
        try:
            models[section](**values | ({"stage": zero_stage} if has_no_stage else {}))
        except ValidationError as error:
            first = error.errors()[0]
            if not first["loc"]:  # about the section as a whole
                refuse_file(path, f"{section}: {first['msg'].removeprefix('Value error, ')}; change it or leave it out")
            *inside, name = (str(part) for part in first["loc"])
            where = ".".join([section, *inside]) + "."
            if first["type"] == "extra_forbidden":
                fields = _model_inside(models[section], inside).model_fields.items()
                check_names(path, [name], [each for key, one in fields for each in (key, one.alias) if each], where)
            refuse_file(path, f"{where}{name} is {first['input']!r}: {first['msg']}")
        except (TypeError, ValueError, AssertionError) as error:
            refuse_file(path, f"{section}: {error}")


def _model_inside(model: Any, names: Iterable[str]) -> Any:
    """Return the model of a nested section, such as `offload_optimizer` of `zero_optimization`."""
    for name in names:
        found = next(f for key, f in model.model_fields.items() if name in (key, f.alias))
        choices = typing.get_args(found.annotation) or (found.annotation,)
        model = next(choice for choice in choices if hasattr(choice, "model_fields"))
    return model


def _check_plain_sections(path: str, settings: dict[str, Any]) -> None:
    """Check the names inside of sections for which DeepSpeed has no model, by its defaults for them."""
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.runtime.activation_checkpointing.config import DeepSpeedActivationCheckpointingConfig
    from deepspeed.runtime.config import get_pipeline_config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

    known = {
        "activation_checkpointing": vars(DeepSpeedActivationCheckpointingConfig({})),
        "flops_profiler": vars(DeepSpeedFlopsProfilerConfig({})),
        "aio": AIO_DEFAULT_DICT,
        # The pipeline engine reads the last one from the same section, without a default of its own.
        "pipeline": [*get_pipeline_config({}), "use_reentrant"],
    }
    for section, names in known.items():
        if isinstance(settings.get(section), dict):
            check_names(path, settings[section], names, section + ".")


def model_parallel_unit(ranks: Ranks) -> Any:
    """Return the grid of ranks in DeepSpeed's interface, for layouts without a pipeline (pipelines have their own)."""
    of_tensor = {"rank": ranks.tensor_rank, "world_size": ranks.tensor_size, "group": ranks.tensor_group}
    of_data = {"rank": ranks.data_rank, "world_size": ranks.data_size, "group": ranks.data_group}
    axes = {"model": of_tensor, "tensor_model": of_tensor, "data": of_data}
    answers = {f"get_{axis}_parallel_{what}": value for axis, place in axes.items() for what, value in place.items()}
    return SimpleNamespace(**{name: partial(lambda value: value, value) for name, value in answers.items()})


class WeightedLoss:
    """Function from a model's output to the loss, the weighted sum of its sums; it also collects sums and notes.

    Attributes:
        sums: sums over all micro-batches so far.
        notes: new notes of each micro-batch, if the model makes any.
    """

    def __init__(self, weights: Tensor) -> None:
        self.weights, self.sums = weights, torch.zeros_like(weights)
        self.notes: list[Tensor] = []

    def __call__(self, output: ModelOutput, _labels: Tensor | None = None) -> Tensor:
        """Return the loss. DeepSpeed's pipelines also pass labels; ours travel inside the inputs.

        If the loss is not finite, so are its gradients (an infinite loss can have finite ones). The gradient norm is
        equal on all ranks, so every rank then skips the step (`engine/nonfinite.py`).
        """
        if output.notes is not None:
            self.notes.append(output.notes)
        self.sums += output.sums.detach()
        loss = (output.sums * self.weights).sum()
        return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)


def build_pipeline(model: Encoder, setup: Setup) -> Any:
    """Return this rank's part of the model as DeepSpeed's `PipelineModule`, in which each of our parts is one layer."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    ranks, recompute = setup.ranks, setup.config.parallel.checkpoint_activations
    all_parts = [nn.ModuleList(part) for part in split_stages(model.stages(), ranks.pipeline_size)]
    held = [{str(whole_name(weight)): name for name, weight in part.named_parameters()} for part in all_parts]
    holders = {name: [number for number, names in enumerate(held) if name in names] for part in held for name in part}
    tied = sorted(name for name, parts in holders.items() if len(parts) > 1)
    place, last = ranks.pipeline_rank, ranks.pipeline_size - 1
    courier = Courier(setup.objective.travelling, MailOfRanks(ranks))
    make = (PipelinePart, all_parts[place], place == last, recompute, courier, model.compute_dtype)
    own_tied = [f"stages.{held[place][name]}" for name in tied if name in held[place]]
    layers = [  # DeepSpeed builds only the one of this rank
        TiedLayerSpec("tied", *make, tied_weight_attr=own_tied) if held[part].keys() & set(tied) else LayerSpec(*make)
        for part in range(ranks.pipeline_size)
    ]
    topology = PipeModelDataParallelTopology(
        num_pp=ranks.pipeline_size, num_mp=ranks.tensor_size, num_dp=ranks.data_size
    )
    with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints the layers
        module = PipelineModule(layers, topology=topology, partition_method="uniform", dynamic_shape=True)
    for parameter in module.parameters():
        # DeepSpeed treats a whole part that shares weights as a copy; only the shared weights are copies.
        copied = whole_name(parameter) in tied and min(holders[str(whole_name(parameter))]) < place
        parameter.ds_pipe_replicated = copied  # type: ignore[attr-defined]
    return module


def pipeline_part(engine: Any) -> PipelinePart:
    """Return this rank's part of a pipeline."""
    return engine.module.forward_funcs[0]


class GradientClipping:
    """Clipping of gradients by their norm over all ranks, before each optimizer step.

    For ZeRO 0, where DeepSpeed returns no norm and omits all but the first stage of a pipeline. If the norm is not
    finite, torch's fused AdamW changes nothing, as in ZeRO's own steps. All of it runs on the device.

    Attributes:
        norm: norm of the last step before clipping, a scalar on the device.
    """

    def __init__(self, module: nn.Module, largest: float, ranks: Ranks) -> None:
        """Keep the parameters; `largest` is the norm to clip to, 0 for no clipping."""
        self.parameters = list(module.parameters())
        self.largest, self.ranks = largest, ranks
        self.norm = torch.zeros(())

    def __call__(self, optimizer: Any, *_step: Any) -> None:
        counted = [p.grad for p in self.parameters if p.grad is not None and self._counts(p)]
        square = _square_sum(counted)
        if self.ranks.model_group is not None:
            sum_over_ranks(square, self.ranks.model_group)
        self.norm = square.sqrt()
        optimizer.found_inf = (~self.norm.isfinite()).float()
        if self.largest > 0:
            norm = self.norm.double()
            factor = torch.where(norm > self.largest, self.largest / (norm + 1e-6), 1.0).float()
            torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], factor)

    def _counts(self, parameter: nn.Parameter) -> bool:
        """Return whether this rank counts the parameter, so that each counts once.

        Every rank counts its parts of cut parameters; the first rank that holds a whole parameter counts it.
        """
        if getattr(parameter, "ds_pipe_replicated", False):
            return False
        return self.ranks.tensor_rank == 0 or getattr(parameter, "tensor_model_parallel", False)


class ZeroClipping:
    """Clipping of ZeRO's own gradients before each of its optimizer steps, for bf16 at ZeRO 1 and 2.

    DeepSpeed reads the norm on the host to check and to clip. This hook has the same effect to the last bit, on the
    device: if the norm is not finite, torch's fused AdamW changes nothing.
    """

    def __init__(self, zero: Any, largest: float) -> None:
        """Keep DeepSpeed's ZeRO optimizer `zero`; `largest` is the norm to clip to, 0 for no clipping."""
        self.zero, self.largest = zero, largest

    def __call__(self, optimizer: Any, *_step: Any) -> None:
        gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        # Over all ranks; inf if any gradient is not finite, and a number before the first step.
        norm = torch.as_tensor(self.zero._global_grad_norm, device=gradients[0].device)
        optimizer.found_inf = (~norm.isfinite()).float()
        if self.largest > 0:
            torch._foreach_mul_(gradients, 1.0 / ((norm + 1e-6) / self.largest).clamp(min=1.0))


class GradientSums:
    """Sums of the gradients of a step's micro-batches, in the tensors where DeepSpeed keeps them.

    CUDA graphs add the gradients of all micro-batches but a step's last one. Through autograd each gradient would be
    copied and converted to the type of the sums once more, in a hook per parameter, with the same result to the bit.
    """

    def __init__(self, engine: Any, attribute: str, dtype: torch.dtype) -> None:
        """Keep the name of the parameters' attribute that has the sums, and their type."""
        self.engine, self.attribute, self.dtype = engine, attribute, dtype

    @classmethod
    def of(cls, engine: Any) -> GradientSums | None:
        """Return the sums of an engine, or None if it takes each micro-batch's gradients as they come.

        It does so at ZeRO 2, which reduces them, under offload, and where its sums have the type of the weights.
        """
        zero = engine.optimizer
        if engine.zero_optimization_stage() == 0:
            return cls(engine, "grad", torch.float32)  # that of the weights
        if getattr(zero, "use_grad_accum_attribute", False) and not zero.cpu_offload:
            return cls(engine, "grad_accum", zero.gradient_accumulation_dtype)
        return None

    @property
    def are_open(self) -> bool:
        """True for all micro-batches but a step's last one, in whose backward pass DeepSpeed reduces the sums."""
        return not self.engine.is_gradient_accumulation_boundary()

    def add(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of some parameters, after the parameters' own hooks; None is a gradient of 0."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is None:
                continue
            for hook in (parameter._backward_hooks or {}).values():
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            total = getattr(parameter, self.attribute)
            if total is None:
                setattr(parameter, self.attribute, gradient.to(self.dtype, copy=True))
            else:
                total.add_(gradient)


def mark_invalid(norm: Tensor, device: object = None, val: float = -1.0) -> None:
    """Set a norm to `val` if it is not finite.

    It has the arguments and effect of DeepSpeed's `mask_nan_or_inf_with_val_inplace`, which waits for the device twice.
    """
    norm.copy_(torch.where(norm.isfinite(), norm, val))


def forget_offloaded(zero: Any) -> None:
    """Let ZeRO 1 and 2 with offload drop a skipped step's gradients, which DeepSpeed would add to the next step's."""
    reset = zero.reset_cpu_buffers

    def reset_all() -> None:
        reset()
        zero.averaged_gradients = dict.fromkeys(zero.averaged_gradients)

    zero.reset_cpu_buffers = reset_all


def _square_sum(gradients: list[Tensor]) -> Tensor:
    """Return the sum of all squares, an fp32 scalar. On GPUs it takes few launches.

    CPUs sum differently: their norm adds a million fp32 numbers in one row and is off by 1e-5.
    """
    if gradients[0].device.type == "cpu":
        return torch.stack([gradient.float().pow(2).sum() for gradient in gradients]).sum()
    return torch.stack(torch._foreach_norm(gradients)).float().square().sum()
