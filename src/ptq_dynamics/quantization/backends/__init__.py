"""Other tools' quantizers behind the same call: what a tool makes of a model's weights, dequantized.

Some install beside us, as extras of ``pyproject.toml``; some cannot and run as subprocesses in an environment of their
own, pinned under ``environments/``. Nothing is imported before a tool is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...core import provenance
from ...core.errors import UserError
from ..spec import OWN, QuantSpec

#: Module that serves each method.
MODULES = {
    "gptqmodel": "subprocesses",
    "awq": "subprocesses",
    "nf4": "bnb",
    "fp4": "bnb",
    "int8": "bnb",
    "torchao": "torchao",
    "auto-gptq": "subprocesses",
    "llmcompressor": "subprocesses",
}


def quantized_weights(
    model: torch.nn.Module, names: Sequence[str], calibration: Tensor | None, spec: QuantSpec
) -> Mapping[str, Tensor]:
    """The weights that the tool of ``spec.method`` gives the named linear layers; ``model`` stays as it is.

    Args:
        names: dotted names of the linear layers inside the blocks.
        calibration: token ids int64 [sequences, T]; None where the method needs none.

    Returns:
        By name, dequantized [rows, columns].

    Raises:
        UserError: the tool is not installed, or it cannot do what ``spec`` asks for; one line.
    """
    if lacking := missing(spec.method):
        raise UserError(lacking)
    return _module(spec.method).quantized_weights(model, names, calibration, spec)


def missing(method: str) -> str | None:
    """One line that names the tool of a method and how to install it; None where it is there."""
    return None if method in OWN else _module(method).missing(method)


def identity(method: str) -> dict[str, Any]:
    """What joins the key of a row by another tool: its version and our code that drives it; empty for our own."""
    if method in OWN:
        return {}
    code = provenance.fingerprint(__name__, f"{__name__}.{MODULES[method]}")
    return {"tool": _module(method).version(method), "backend": code}


def _module(method: str) -> Any:
    return importlib.import_module(f"{__name__}.{MODULES[method]}")
