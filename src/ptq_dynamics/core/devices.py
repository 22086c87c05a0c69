"""Which device to compute on."""

from __future__ import annotations

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
        raise UserError(f"device '{device}': this machine has {torch.cuda.device_count()} CUDA devices; use auto or cpu")
    return chosen
