"""The file of `--deepspeed_config`, checked by DeepSpeed's own models and laid over the flags."""

from __future__ import annotations

import importlib.metadata
import os
import re
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megatron_ddrp.config import Config, ParallelConfig, concerns
from megatron_ddrp.config.deepspeed_values import (
    FLAGS,
    NEEDS_CPU_ADAM,
    check_against,
    check_names,
    decisions,
    load_file,
    refuse_contradiction,
    refuse_file,
)
from megatron_ddrp.config.reading import options_of
from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError

LOWEST_DEEPSPEED = "0.19.8"
"""Lowest version that sums gradients rightly in every layout; pyproject.toml has the same."""

NEVER = 2**62
"""`steps_per_print` of a run whose file gives none: DeepSpeed prints no lines of its own."""


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
    if isinstance(sums, dict) and sums.get("grad_accum_dtype") == "fp32" and not adds_up_in_fp32(config, loaded):
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


def adds_up_in_fp32(config: ParallelConfig, from_file: Mapping[str, Any]) -> bool:
    """Return whether DeepSpeed can add up bf16 gradients in fp32 in this layout.

    Offloaded, its pipelines would leave out the tied weights' gradients of other stages.
    """
    offloads = config.offload_optimizer != "none" or offload_device(from_file.get("zero_optimization")) != "none"
    return config.pipeline_model_parallel_size == 1 or not offloads


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


def lay_over(below: dict[str, Any], above: dict[str, Any], path: str, prefix: str = "") -> dict[str, Any]:
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
    if zero_stage == 3 and settings.get("gradient_predivide_factor", 1) not in (1, "auto"):
        refuse_file(path, "gradient_predivide_factor does not work with --zero-stage 3: leave it out")
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
                check_names(path, [name], _field_names(_model_inside(models[section], inside)), where)
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


def _field_names(model: Any) -> list[str]:
    return [name for key, field in model.model_fields.items() for name in (key, field.alias) if name]


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
