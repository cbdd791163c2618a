"""Numbers on their way from the device to the host, read when they are needed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor in host memory. Making it does not wait for a GPU; reading it waits for the copy alone."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.detach().to("cpu", non_blocking=True)  # pinned, where it comes from a GPU
        self._arrived = None
        if tensor.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> np.ndarray:
        """Return the numbers."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy.numpy()
