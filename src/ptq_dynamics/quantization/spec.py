"""What to quantize to: one frozen configuration, the key of a measurement."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, model_validator

from ..core.config import config_dataclass


def _bits(value: int) -> int:
    if not 2 <= value <= 8:
        raise ValueError(f"must be 2 to 8, got {value}")
    return value


def _group_size(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError(f"must be -1 (one group per row) or at least 1, got {value}")
    return value


def _damping(value: float) -> float:
    if not 0 < value <= 1:
        raise ValueError(f"must be above 0 and at most 1 (a fraction of the mean diagonal), got {value}")
    return value


def _block_size(value: int) -> int:
    if value < 1:
        raise ValueError(f"must be at least 1, got {value}")
    return value


OWN = ("rtn", "gptq")
BLOCKWISE = {"nf4": 4, "fp4": 4, "int8": 8}  # data types of bitsandbytes and their width; no calibration


@config_dataclass
class QuantSpec:
    """Method and grid. ``damping`` and the fields after it are GPTQ's; the others ignore them.

    ``rtn`` and ``gptq`` are ours. The rest are other tools' (``quantization.backends``): ``gptqmodel``, ``auto-gptq``
    and ``llmcompressor`` run GPTQ, ``awq`` is gptqmodel's, ``nf4``, ``fp4`` and ``int8`` are bitsandbytes', ``torchao``
    rounds to nearest.
    """

    method: Literal[
        "rtn", "gptq", "gptqmodel", "auto-gptq", "llmcompressor", "awq", "nf4", "fp4", "int8", "torchao"
    ] = "gptq"
    bits: Annotated[int, AfterValidator(_bits)] = 4
    group_size: Annotated[int, AfterValidator(_group_size)] = 128  # input columns per scale; -1: whole row
    symmetric: bool = True
    rotation: Literal["none", "hadamard"] = (
        "none"  # of the input columns, before and undone after (ours only)
    )
    damping: Annotated[float, AfterValidator(_damping)] = 0.01  # fraction of the Hessian's mean diagonal
    act_order: bool = False  # quantize columns by descending Hessian diagonal
    block_size: Annotated[int, AfterValidator(_block_size)] = 128  # lazy updates; changes speed, not results
    true_sequential: bool = False  # later linears of a block see the earlier ones quantized
    precision: Literal["float32", "float64"] = "float32"  # of the Hessian and its factor

    @model_validator(mode="after")
    def _tool_can(self) -> QuantSpec:
        if self.bits != (bits := BLOCKWISE.get(self.method, self.bits)):
            raise ValueError(f"{self.method} has {bits} bits, not {self.bits}")
        if self.rotation != "none" and self.method not in OWN:
            raise ValueError(f"rotation goes with {' and '.join(OWN)}, not with {self.method}")
        return self

    @property
    def calibrated(self) -> bool:
        """Whether the method looks at calibration text."""
        return self.method not in ("rtn", "torchao", *BLOCKWISE)

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.precision)

    @property
    def label(self) -> str:
        """Short name for legends: ``gptq-4bit-g64``, plus whatever differs from the defaults."""
        parts = [self.method, f"{self.bits}bit", "row" if self.group_size == -1 else f"g{self.group_size}"]
        if not self.symmetric:
            parts.append("asym")
        if self.rotation != "none":
            parts.append(self.rotation)
        if self.calibrated and self.method != "awq":
            parts += ["act"] * self.act_order + ["seq"] * self.true_sequential
            if self.damping != 0.01:
                parts.append(f"damp{self.damping:g}")
        if self.precision != "float32":
            parts.append(self.precision)
        return "-".join(parts)
