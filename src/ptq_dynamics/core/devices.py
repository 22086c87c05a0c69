"""Which device to compute on, and in which precision."""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Literal

import torch

from .errors import UserError

Precision = Literal["auto", "bf16", "fp32"]  # of matrix products


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


def precision(asked: Precision, device: torch.device | str) -> Literal["bf16", "fp32"]:
    """``auto`` is bf16 where the hardware multiplies it (AVX512-BF16, AMX, a GPU), else fp32.

    Where it does not, libraries emulate bf16, tens of times slower than float32.
    """
    if asked != "auto":
        return asked
    if torch.device(device).type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:  # torch has no public name for these
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if native else "fp32"


def product_speed(device: torch.device | str, of: Precision) -> float:
    """Floating-point operations per second of a 512 x 512 matrix product, measured in a blink."""
    dtype = torch.bfloat16 if precision(of, device) == "bf16" else torch.float32
    a = torch.ones(512, 512, dtype=dtype, device=device)
    (a @ a).sum().item()
    start, n = time.perf_counter(), 0
    while time.perf_counter() - start < 0.1:
        (a @ a).sum().item()
        n += 1
    return n * 2 * 512**3 / (time.perf_counter() - start)


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
