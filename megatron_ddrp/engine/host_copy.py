"""Copies of tensors from the device to the host, read when they are needed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor in host memory. Creating it does not wait for a GPU; reading it waits for the copy only."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.detach().to("cpu", non_blocking=True)  # pinned memory if it comes from a GPU
        self._arrived = None
        if tensor.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> np.ndarray:
        """Return the values, as soon as they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy.numpy()
