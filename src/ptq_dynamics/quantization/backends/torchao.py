"""torchao: weight-only round to nearest at any width, symmetric or not (``IntxWeightOnlyConfig``)."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ...core.errors import UserError
from ..spec import QuantSpec


def missing(method: str) -> str | None:
    """One line where torchao is not installed."""
    if importlib.util.find_spec("torchao"):
        return None
    return (
        f"{method} needs the extra torchao; install it with `make extras`, or `pip install -e '.[torchao]'`"
    )


def version(method: str) -> str:
    """Of the package."""
    return f"torchao {importlib.metadata.version('torchao')}"


def quantized_weights(
    model: torch.nn.Module, names: Sequence[str], calibration: Tensor | None, spec: QuantSpec
) -> Mapping[str, Tensor]:
    """As ``backends.quantized_weights``."""
    from torchao.quantization import IntxWeightOnlyConfig, MappingType, PerAxis, PerGroup, quantize_

    config = IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, f"int{spec.bits}"),
        granularity=PerAxis(0) if spec.group_size == -1 else PerGroup(spec.group_size),
        mapping_type=MappingType.SYMMETRIC if spec.symmetric else MappingType.ASYMMETRIC,
    )
    found = {}
    for name in names:
        linear = nn.Sequential(copy.deepcopy(model.get_submodule(name)).float())
        columns = linear[0].in_features
        if spec.group_size != -1 and columns % spec.group_size:
            raise UserError(
                f"torchao: {name}: group_size {spec.group_size} does not divide its {columns} columns"
            )
        quantize_(linear, config)
        found[name] = linear[0].weight.dequantize().detach()
    return found
