"""Host memory that a CUDA device copies to and from asynchronously. A leaf: knows memory and devices."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def pinned(memory: np.ndarray, device: torch.device) -> Iterator[None]:
    """On CUDA, locks host memory into place while the block runs, so that copies to and from it are asynchronous."""
    if device.type != "cuda":
        yield
        return
    cudart = torch.cuda.cudart()
    assert cudart is not None
    torch.cuda.check_error(cudart.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0))
    try:
        yield
    finally:
        torch.cuda.synchronize(device)
        torch.cuda.check_error(cudart.cudaHostUnregister(memory.ctypes.data))
