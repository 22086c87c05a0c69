"""Which device to compute on."""

from __future__ import annotations

import ctypes
import sys

import torch

from .errors import UserError


def pick(device: str) -> torch.device:
    """``auto`` is the first CUDA device, or the CPU where there is none; any other name is taken as it is.

    Raises:
        UserError: a CUDA device that this machine does not have, or no device's name.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise UserError(f"device '{device}': unknown; use auto, cpu, cuda or cuda:N") from None
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device '{device}': this machine has {torch.cuda.device_count()} CUDA devices; use auto or cpu"
        )
    return chosen


def keep_freed_memory() -> None:
    """Have glibc keep large freed blocks for the next request (elsewhere: nothing).

    A training step allocates the same megabytes again and again. By default each block goes back to the kernel and
    returns page by page, which a small model's step on a CPU feels (benchmarks/training.py measures it both ways).
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
            libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
