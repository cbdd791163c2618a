"""The layout for DeepSpeed: the grid of ranks, the pipeline, and gradient norms over all ranks."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ddrp.model import Encoder
from megatron_ddrp.model.stages import Output
from megatron_ddrp.parallel.pipeline import Courier, MailOfRanks, PipelinePart, split_stages
from megatron_ddrp.parallel.process_group import Ranks, sum_over_ranks
from megatron_ddrp.parallel.sharding import whole_name


class ModelParallelUnit:
    """The grid of ranks through DeepSpeed's interface, for layouts without a pipeline (pipelines have their own)."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def get_model_parallel_rank(self) -> int:
        return self.ranks.tensor_rank

    def get_model_parallel_world_size(self) -> int:
        return self.ranks.tensor_size

    def get_model_parallel_group(self) -> Any:
        return self.ranks.tensor_group

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_data_parallel_rank(self) -> int:
        return self.ranks.data_rank

    def get_data_parallel_world_size(self) -> int:
        return self.ranks.data_size

    def get_data_parallel_group(self) -> Any:
        return self.ranks.data_group


class WeightedLoss:
    """Function from a model's output to the loss, the weighted sum of its sums; it also collects sums and notes.

    Attributes:
        sums: sums over all micro-batches so far.
        notes: new notes of each micro-batch, if the model makes any.
    """

    def __init__(self, weights: Tensor) -> None:
        self.weights, self.sums = weights, torch.zeros_like(weights)
        self.notes: list[Tensor] = []

    def __call__(self, output: Output, _labels: Tensor | None = None) -> Tensor:
        """Return the loss. DeepSpeed's pipelines also pass labels; ours travel inside the inputs."""
        if output.notes is not None:
            self.notes.append(output.notes)
        self.sums += output.sums.detach()
        return spread_nonfinite((output.sums * self.weights).sum())


def spread_nonfinite(loss: Tensor) -> Tensor:
    """Return `loss`; if it is not finite, so are its gradients (an infinite loss can have finite ones).

    The gradient norm is equal on all ranks, so every rank then skips the step (`engine/nonfinite.py`).
    """
    return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)


def build_pipeline(model: Encoder, travelling: tuple[type, ...], recompute: bool, ranks: Ranks) -> Any:
    """Return this rank's part of the model as DeepSpeed's `PipelineModule`, in which each of our parts is one layer."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    all_parts = [nn.ModuleList(part) for part in split_stages(model.stages(), ranks.pipeline_size)]
    held = [{str(whole_name(weight)): name for name, weight in part.named_parameters()} for part in all_parts]
    tied = sorted(name for name, parts in _holders(held).items() if len(parts) > 1)
    place, last = ranks.pipeline_rank, ranks.pipeline_size - 1
    courier = Courier(travelling, MailOfRanks(ranks))
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
        copied = whole_name(parameter) in tied and min(_holders(held)[str(whole_name(parameter))]) < place
        parameter.ds_pipe_replicated = copied  # type: ignore[attr-defined]
    return module


def _holders(held: list[dict[str, str]]) -> dict[str, list[int]]:
    """Return parameter → numbers of the parts that hold it, from each part's names."""
    names = {name for part in held for name in part}
    return {name: [number for number, part in enumerate(held) if name in part] for name in names}


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
