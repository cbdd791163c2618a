"""The device of a process, and whether this build of torch has code for a GPU."""

from __future__ import annotations

import re

import torch

from megatron_ddrp.errors import WRONG_ARGUMENTS, UserError
from megatron_ddrp.model.fused import is_nvidia


def named_device(device: str | torch.device | None = None, label: str = "") -> torch.device:
    """Return the device of an argument, by default the GPU if torch sees one, else the CPU.

    Raises `UserError`, which begins with `label`, if torch does not know, see or have code for it.
    """
    count, advice = torch.cuda.device_count(), "leave it out, or give cpu"
    try:
        chosen = torch.device(("cuda" if count else "cpu") if device is None else device)
    except (RuntimeError, TypeError):
        wanted = "expected cpu, cuda, or cuda:N for the GPU with number N"
        raise UserError(f"{label}: {wanted}", WRONG_ARGUMENTS) from None
    if chosen.type == "cuda" and (chosen.index or 0) >= count:
        raise UserError(f"{label}: torch sees {count or 'no'} GPU{'s' * (count > 1)} here; {advice}", WRONG_ARGUMENTS)
    try:
        torch.zeros(1, device=usable(chosen)).item()  # fails on "meta", which holds no numbers
    except (RuntimeError, AssertionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{label}: torch cannot compute on it here; {advice} ({reason})", WRONG_ARGUMENTS) from None
    return chosen


def usable(device: torch.device) -> torch.device:
    """Return `device`. Raises `UserError` if it is a GPU that this build of torch has no code for."""
    if fault := missing_code(device):
        error = UserError(f"{fault}, or set CUDA_VISIBLE_DEVICES= to use the CPU")
        gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
        error.agreed = len(gpus) > 1 and all(map(missing_code, gpus))  # then all ranks of this host raise it
        raise error
    return device


def missing_code(device: torch.device) -> str | None:
    """Return a line about a GPU of NVIDIA's for which torch has no code, with the build that has it; None otherwise.

    Builds with CUDA 13 have code for 7.5 and newer, those with CUDA 12.6, which torch 2.15 ended, for 5.0 to 9.0.
    """
    built = torch.cuda.get_arch_list() if is_nvidia(device) else []
    if not built or any(_runs_on(torch.cuda.get_device_capability(device), target) for target in built):
        return None
    capability = torch.cuda.get_device_capability(device)
    old = "torch==2.13.0+cu126 --index-url https://download.pytorch.org/whl/cu126"
    return (
        f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, and torch "
        f"{torch.__version__} has code for {', '.join(built)} only: pip install "
        f"{'--upgrade torch' if capability >= (7, 5) else old}"
    )


def _runs_on(capability: tuple[int, int], target: str) -> bool:
    """Return whether code that was compiled for `target` runs on a GPU.

    sm_80 runs on 8.0 and 8.6, compute_80 also on all later ones; with "f" both run on the later minor numbers alone,
    with "a" on no other GPU (NVIDIA, CUDA C++ Programming Guide, "Compute capabilities").
    """
    own = divmod(int(re.sub(r"\D", "", target) or 0), 10)
    runs_later = capability[0] == own[0] or (target.startswith("compute_") and not target.endswith("f"))
    return capability == own or (capability > own and runs_later and not target.endswith("a"))
