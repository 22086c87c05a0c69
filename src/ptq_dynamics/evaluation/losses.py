"""Per-sequence cross-entropy, by one code path for base and quantized models."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
import transformers

from ..core import devices
from ..core.devices import Precision
from ..core.errors import UserError
from ..models import neox


@torch.no_grad()
def sequence_losses(
    model: transformers.PreTrainedModel,
    blocks: np.ndarray,
    *,
    precision: Precision = "auto",
    batch: int = 16,
    compiled: bool = False,
) -> np.ndarray:
    """Mean next-token cross-entropy of each block, in nats per token.

    GPTNeoX models go through the lean forward pass, any other through the model's own; the labels are the inputs
    shifted once, here. Losses are computed in float32 from the logits and averaged in float64.

    Args:
        blocks: token ids ``[n, length + 1]``; every block gives ``length`` predictions.
        precision: dtype of the matrix products; auto as ``core.devices.precision`` has it.
        batch: blocks at once.
        compiled: use ``torch.compile`` (lean pass only), worth it for many blocks.

    Returns:
        float64 ``[n]``.

    Raises:
        UserError: there is no block, or a loss is not finite.
    """
    if len(blocks) == 0:
        raise UserError("evaluation: no block of text; the set is shorter than one sequence")
    device = next(model.parameters()).device
    losses = _forward(model, devices.precision(precision, device), compiled)
    out = []
    for start in range(0, len(blocks), batch):
        chunk = blocks[start : start + batch]
        short = batch - len(chunk) if compiled and start else 0  # one compiled shape: fill up the last batch
        tokens = torch.from_numpy(np.concatenate([chunk, chunk[:1].repeat(short, 0)])).to(device)
        out.append(losses(tokens)[: len(chunk)].double().mean(1).cpu())
    result = torch.cat(out).numpy()
    if not np.isfinite(result).all():
        raise UserError(f"{model.config._name_or_path or 'model'}: the loss of a sequence is not finite")
    return result


def _forward(
    model: transformers.PreTrainedModel, precision: Precision, compiled: bool
) -> Callable[..., torch.Tensor]:
    """Token losses ``[batch, length]`` float32 as a function of tokens ``[batch, length + 1]``."""
    if neox.supports(model):
        params = {n: p.detach().float() for n, p in model.named_parameters()}
        low = {n: p.bfloat16() for n, p in params.items()} if precision == "bf16" else params
        shape = neox.Shape.of(model.config)
        lean = _lean(shape, compiled)
        rotation = functools.cache(shape.rotation)
        return lambda tokens: lean(params, low, tokens, rotation(tokens.shape[1] - 1, tokens.device))

    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    # copies, since the model itself is quantized later from the weights that it was loaded with
    low = {n: p.detach().to(dtype) for n, p in model.named_parameters()}

    def losses(tokens: torch.Tensor) -> torch.Tensor:
        out = torch.func.functional_call(model, low, tokens[:, :-1], {"use_cache": False})
        return token_losses(out.logits, tokens)

    return losses


@functools.cache
def _lean(shape: neox.Shape, compiled: bool) -> Callable[..., torch.Tensor]:
    # one function per architecture, so that a second checkpoint finds it compiled
    def losses(
        params: neox.Params, low: neox.Params, tokens: torch.Tensor, rotation: neox.Rotation
    ) -> torch.Tensor:
        return token_losses(neox.lean_logits(shape, params, tokens[:, :-1], low, rotation), tokens)

    return torch.compile(losses, dynamic=False) if compiled else losses


def token_losses(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats, float32 ``[batch, length]``, of logits at ``tokens`` ``[batch, length + 1]``, shifted once."""
    labels = tokens[:, 1:]
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view(
        labels.shape
    )
