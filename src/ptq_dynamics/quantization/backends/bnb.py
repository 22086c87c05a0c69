"""bitsandbytes: NF4 and FP4 (Dettmers et al. 2023, arXiv:2305.14314) and INT8 (Dettmers et al. 2022, arXiv:2208.07339)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...core.errors import UserError
from ..spec import QuantSpec

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # weights to a scale, along rows


def missing(method: str) -> str | None:
    """One line where bitsandbytes is not installed."""
    if importlib.util.find_spec("bitsandbytes"):
        return None
    return f"{method} needs the extra bnb; install it with `make extras`, or `pip install -e '.[bnb]'`"


def version(method: str) -> str:
    """Of the package."""
    return f"bitsandbytes {importlib.metadata.version('bitsandbytes')}"


def quantized_weights(
    model: torch.nn.Module, names: Sequence[str], calibration: Tensor | None, spec: QuantSpec
) -> Mapping[str, Tensor]:
    """As ``backends.quantized_weights``. INT8 has one scale per row, whatever the group size, and no outlier columns held
    back; it goes through float16, as in ``Linear8bitLt``."""
    from bitsandbytes import functional as bnb

    if spec.method != "int8" and spec.group_size not in BLOCKS:
        known = ", ".join(str(b) for b in BLOCKS)
        raise UserError(
            f"{spec.method}: group_size must be a block size of bitsandbytes ({known}), got {spec.group_size}"
        )
    found = {}
    for name in names:
        weight = model.get_submodule(name).weight.detach().float().contiguous()
        if spec.method == "int8":
            codes, scale, _ = bnb.int8_vectorwise_quant(weight.half())
            found[name] = codes.float() * scale.float()[:, None] / 127
        else:
            codes, state = bnb.quantize_4bit(weight, blocksize=spec.group_size, quant_type=spec.method)
            found[name] = bnb.dequantize_4bit(codes, state)
    return found
