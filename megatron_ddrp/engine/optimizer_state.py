"""Access to fp32 weights and the optimizer's moments under every ZeRO stage and precision.

One whole parameter is in memory at a time. ZeRO 0 keeps weights and moments with the parameter, ZeRO 1 and 2 in flat
fp32 partitions, ZeRO 3 in one partition per parameter. All functions are collective calls: every rank passes the same
parameters in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_ddrp.checkpoint.folder import SCALER_FIELDS
from megatron_ddrp.engine.optimizers import Optimizer
from megatron_ddrp.errors import UserError
from megatron_ddrp.parallel.pipeline import local_parameters

_FLAT = ("update_lp_params", "_hp_optimizer_states_linked", "_lazy_init_hp_params_optimizer_state")
_SHARDED = (
    *("fp16_groups", "fp32_partitioned_groups_flat", "persistent_parameters", "_get_param_partition_rank"),
    *("_optimizer_step", "_partition_all_parameters", "_reassign_or_swap_out_partitioned_parameters"),
)
USED_NAMES = {0: (), 1: _FLAT, 2: _FLAT, 3: _SHARDED}
"""ZeRO stage → names of DeepSpeed's optimizer that this file uses and that its documentation does not promise."""


def check_deepspeed(engine: Any) -> None:
    """Raise `UserError`, before the first step, if this DeepSpeed's optimizer lacks a name that checkpoints need."""
    missing = [name for name in USED_NAMES[engine.zero_optimization_stage()] if not hasattr(engine.optimizer, name)]
    if missing:
        import deepspeed

        raise UserError(
            f"DeepSpeed {deepspeed.__version__}: {type(engine.optimizer).__name__} has no {', '.join(missing)}, which "
            "checkpoints need: install the DeepSpeed of requirements-lock.txt, or give another --zero-stage"
        )


def check_moments(engine: Any, chosen: type[Optimizer]) -> None:
    """Raise `UserError`, before the first step, unless an optimizer keeps just what its class says, and starts at 0.

    Its state is created, as `create_moments` does.
    """
    create_moments(engine)
    states = ((tensor, state) for tensor, state in _inner_optimizer(engine).state.items() if state)
    for tensor, state in states:
        found = set(state) - {"step"}
        odd = (name for name in found if state[name].shape != tensor.shape or bool(state[name].any()))
        if wrong := sorted(found ^ set(chosen.moments)) or list(odd):
            raise UserError(
                f"--optimizer: {chosen.__name__}.moments is {chosen.moments}, but it keeps {', '.join(sorted(found))}, "
                f"and after a step with rate 0 and gradients of 0 {wrong[0]} is missing, more, not 0, or not of the "
                "weight's shape: name all tensors that a checkpoint must have, each of that shape and 0 at first"
            )


def read_whole(engine: Any, tensor: Tensor, moment: str | None) -> Tensor:
    """Return the whole fp32 weight of a parameter, or one of its moments, even if ZeRO has sharded it.

    Buffers and parameters that are not trained keep their dtype.
    """
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if not tensor.requires_grad:
        with _gather(tensor):
            return tensor.detach().clone()
    if engine.zero_optimization_stage() == 0:
        held = engine.optimizer.state[tensor][moment] if moment else tensor.detach().float()
    elif moment:
        held = safe_get_full_optimizer_state(tensor, moment)
    else:
        held = safe_get_full_fp32_param(tensor)
    return held.reshape(whole_shape(tensor))


def write_whole(engine: Any, tensor: Tensor, value: Tensor, moment: str | None) -> None:
    """Write a tensor that `read_whole` returns; after the last one, call `refresh_weights`."""
    from deepspeed import utils

    stage = engine.zero_optimization_stage()
    if not tensor.requires_grad:
        with _gather(tensor, modifier_rank=0):
            tensor.data.copy_(value)
        return
    if stage == 0:
        (engine.optimizer.state[tensor][moment] if moment else tensor.data).copy_(value)
        return
    if stage == 3:  # the last partition is padded, and safe_set_full_* would read past the value's end
        size = tensor.ds_tensor.ds_numel  # type: ignore[attr-defined]
        begin = size * engine.optimizer._get_param_partition_rank(tensor)
        part = value.new_zeros(size)
        own = value.flatten()[begin : begin + size]
        part[: own.numel()] = own
        value = part
    if moment:
        set_state = utils.safe_set_local_optimizer_state if stage == 3 else utils.safe_set_full_optimizer_state
        set_state(tensor, value, moment)
    else:
        (utils.safe_set_local_fp32_param if stage == 3 else utils.safe_set_full_fp32_param)(tensor, value)


def _gather(tensor: Tensor, modifier_rank: int | None = None) -> contextlib.AbstractContextManager:
    """Gather a tensor that ZeRO 3 has sharded, for the context; leave every other tensor unchanged."""
    if not hasattr(tensor, "ds_id") or (modifier_rank is None and tensor.shape == whole_shape(tensor)):
        return contextlib.nullcontext()
    from deepspeed.zero import GatheredParameters

    return GatheredParameters([tensor], modifier_rank=modifier_rank)


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return a parameter's shape before ZeRO 3 sharded it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def refresh_weights(engine: Any) -> None:
    """Copy fp32 weights into the tensors of the model: low-precision copies, or ZeRO 3's partitions."""
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
    """Create the optimizer's state if no step was taken yet, by a step with learning rate 0 and gradients of 0."""
    optimizer, inner, stage = engine.optimizer, _inner_optimizer(engine), engine.zero_optimization_stage()
    if not any(_states(engine)):
        if stage == 3:
            flats = optimizer.fp32_partitioned_groups_flat
            with _nothing_to_learn(inner, flats):
                for number in range(len(flats)):
                    optimizer._optimizer_step(number)
        else:
            with _nothing_to_learn(inner, [tensor for group in inner.param_groups for tensor in group["params"]]):
                inner.step()
        set_step(engine, 0)
    if stage in (1, 2):  # DeepSpeed links after the first group's step, when the other groups have no state yet
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def forget_moments(engine: Any) -> None:
    """Set all moments, and the number of steps that the optimizer has counted, to 0, as before the first step."""
    create_moments(engine)
    for name, tensor in local_parameters(engine.module).items():
        for moment in engine.own_moments.get(name, ()):
            write_whole(engine, tensor, torch.zeros(whole_shape(tensor), device=tensor.device), moment)
    set_step(engine, 0)


@contextlib.contextmanager
def _nothing_to_learn(inner: Any, tensors: list[Tensor]) -> Iterator[None]:
    """Set the learning rates and the gradients of `tensors` to 0, and restore them at the end.

    With offload, ZeRO 3 uses buffers as gradients and copies into them.
    """
    kept, gradients = [dict(group) for group in inner.param_groups], [tensor.grad for tensor in tensors]
    for group in inner.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    for tensor in tensors:
        tensor.grad = torch.zeros_like(tensor)
    yield
    for group, before in zip(inner.param_groups, kept, strict=True):
        group.update(before)
    for tensor, gradient in zip(tensors, gradients, strict=True):
        tensor.grad = gradient


def _inner_optimizer(engine: Any) -> Any:
    """Return the optimizer that steps, which ZeRO wraps."""
    return engine.optimizer.optimizer if engine.zero_optimization_stage() else engine.optimizer


def _states(engine: Any) -> Iterator[dict[str, Any]]:
    """Yield the optimizer's state of each tensor that it steps on this rank."""
    return filter(None, _inner_optimizer(engine).state.values())


def get_step(engine: Any) -> int:
    """Return the number of steps that the optimizer has counted, without skipped ones; 0 if it does not count."""
    return next((int(state["step"]) for state in _states(engine) if "step" in state), 0)


def set_step(engine: Any, step: int) -> None:
    """Set the number of steps that the optimizer has counted."""
    for state in _states(engine):
        if "step" in state:
            state["step"] = state["step"].fill_(step) if isinstance(state["step"], Tensor) else step


def get_loss_scaler(engine: Any) -> dict[str, float] | None:
    """Return the state of fp16's dynamic loss scale, or None without one."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is None or not getattr(scaler, "dynamic", False):
        return None
    return {name: getattr(scaler, name) for name in SCALER_FIELDS}


def set_loss_scaler(engine: Any, state: dict[str, float] | None) -> None:
    """Restore the loss scale; a run without a dynamic one ignores `state`."""
    if state is not None and get_loss_scaler(engine) is not None:
        for name in SCALER_FIELDS:
            setattr(engine.optimizer.loss_scaler, name, state[name])
