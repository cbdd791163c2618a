"""fp32 weights and Adam's moments of one parameter at a time, whole, whatever ZeRO shards and in whatever precision.

ZeRO 0 keeps them with the parameter, ZeRO 1 and 2 in flat fp32 partitions, ZeRO 3 in one partition a parameter. All
functions are collective calls: every rank gives the same parameters in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ddrp.checkpoint.state import SCALER_FIELDS

MOMENTS = ("exp_avg", "exp_avg_sq")


def read_whole(engine: Any, parameter: nn.Parameter, moment: str | None = None) -> Tensor:
    """The fp32 weight of a parameter, or one of its `MOMENTS`, as a whole that ZeRO may have sharded."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if engine.zero_optimization_stage() == 0:
        held = engine.optimizer.state[parameter][moment] if moment else parameter.detach().float()
    elif moment:
        held = safe_get_full_optimizer_state(parameter, moment)
    else:
        held = safe_get_full_fp32_param(parameter)
    return held.reshape(whole_shape(parameter))


def write_whole(engine: Any, parameter: nn.Parameter, value: Tensor, moment: str | None = None) -> None:
    """The inverse of `read_whole`; after the last parameter, `refresh_weights`."""
    from deepspeed.utils import (
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_optimizer_state,
    )

    stage = engine.zero_optimization_stage()
    if stage == 0:
        (engine.optimizer.state[parameter][moment] if moment else parameter.data).copy_(value)
        return
    if stage == 3:  # the last partition is padded: safe_set_full_* would reach beyond the value
        size = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
        begin = size * engine.optimizer._get_param_partition_rank(parameter)
        part = value.new_zeros(size)
        own = value.flatten()[begin : begin + size]
        part[: own.numel()] = own
        value = part
    if moment:
        (safe_set_local_optimizer_state if stage == 3 else safe_set_full_optimizer_state)(parameter, value, moment)
    else:
        (safe_set_local_fp32_param if stage == 3 else safe_set_full_fp32_param)(parameter, value)


def read_frozen(tensor: Tensor) -> Tensor:
    """Return a buffer, or a parameter that is not trained, as a whole that ZeRO 3 may have sharded."""
    with _gathered(tensor):
        return tensor.detach().clone()


def write_frozen(tensor: Tensor, value: Tensor) -> None:
    """Write the inverse of `read_frozen`; after the last tensor, `refresh_weights`."""
    with _gathered(tensor, modifier_rank=0):
        tensor.data.copy_(value)


def _gathered(tensor: Tensor, modifier_rank: int | None = None) -> contextlib.AbstractContextManager:
    """Hold a whole tensor that ZeRO 3 took apart; leave every other one as it is."""
    if not hasattr(tensor, "ds_id") or (modifier_rank is None and tensor.shape == whole_shape(tensor)):
        return contextlib.nullcontext()
    from deepspeed.zero import GatheredParameters

    return GatheredParameters([tensor], modifier_rank=modifier_rank)


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """A parameter's shape before ZeRO 3 took it apart."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def refresh_weights(engine: Any) -> None:
    """Carry fp32 weights into what the model computes with: their low-precision copies, or ZeRO 3's partitions."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        optimizer._partition_all_parameters()
        for number in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    elif stage:
        optimizer.update_lp_params()


def create_moments(engine: Any) -> None:
    """Have Adam's state there to be read and written. Before the first step: by one with a rate and gradients of 0."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if not any(_states(engine)):
        _take_empty_step(engine, optimizer, stage)
    if stage in (1, 2):  # DeepSpeed does so after the first parameter group's step, when the others have no state yet
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def _take_empty_step(engine: Any, optimizer: Any, stage: int) -> None:
    inner = optimizer.optimizer if stage else optimizer
    rates = [group["lr"] for group in inner.param_groups]
    for group in inner.param_groups:
        group["lr"] = 0.0
    if stage == 3:
        for number, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
            before = flat.grad  # under offload DeepSpeed keeps a buffer there, into which it copies gradients
            flat.grad = torch.zeros_like(flat)
            optimizer._optimizer_step(number)
            flat.grad = before
    else:
        _step_without_gradient(inner)
    for group, rate in zip(inner.param_groups, rates, strict=True):
        group["lr"] = rate
    set_step(engine, 0)


def _step_without_gradient(inner: Any) -> None:
    held = [parameter for group in inner.param_groups for parameter in group["params"]]
    before = [parameter.grad for parameter in held]
    for parameter in held:
        parameter.grad = torch.zeros_like(parameter)
    inner.step()
    for parameter, gradient in zip(held, before, strict=True):
        parameter.grad = gradient


def _states(engine: Any) -> Iterator[dict[str, Any]]:
    """Adam's state of each tensor that it steps on this rank."""
    inner = engine.optimizer.optimizer if engine.zero_optimization_stage() else engine.optimizer
    return (state for state in inner.state.values() if MOMENTS[0] in state)


def _groups(engine: Any) -> list[dict[str, Any]]:
    return [group for group in engine.optimizer.param_groups if "step" in group]  # where apex counts


def get_step(engine: Any) -> int:
    """Steps that Adam has taken; skipped ones do not count."""
    counts = [state["step"] for state in _states(engine) if "step" in state] + [g["step"] for g in _groups(engine)]
    return int(counts[0]) if counts else 0


def set_step(engine: Any, step: int) -> None:
    """The inverse of `get_step`."""
    for holder in (*_states(engine), *_groups(engine)):
        if isinstance(holder.get("step"), Tensor):
            holder["step"].fill_(step)
        elif "step" in holder:
            holder["step"] = step


def get_loss_scaler(engine: Any) -> dict[str, float] | None:
    """State of fp16's dynamic loss scale; None without one."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is None or not getattr(scaler, "dynamic", False):
        return None
    return {name: getattr(scaler, name) for name in SCALER_FIELDS}


def set_loss_scaler(engine: Any, state: dict[str, float] | None) -> None:
    """The inverse of `get_loss_scaler`; a run in another precision than the checkpoint's keeps its own."""
    if state is not None and get_loss_scaler(engine) is not None:
        for name in SCALER_FIELDS:
            setattr(engine.optimizer.loss_scaler, name, state[name])
