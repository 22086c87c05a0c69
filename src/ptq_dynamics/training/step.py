"""What one update computes: mixed-precision gradient, clipping, AdamW. Everything here decides numbers.

Parameters live in two flat float32 vectors, matrices (decayed) and the rest (not decayed); the model's own parameters
are views into them. One compiled graph gives loss and both gradients, and the optimizer handles two tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import torch
import transformers
from pydantic import Field

from ..core import devices
from ..core.config import config_dataclass
from ..models import neox

Flat = tuple[torch.Tensor, torch.Tensor]  # (decayed, not decayed)


@config_dataclass()
class OptimizerConfig:
    """AdamW with decoupled weight decay on matrices only (Loshchilov & Hutter 2019)."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    clip: Annotated[float, Field(gt=0)] = 1.0  # global gradient norm


class Learner:
    """A model, its flat parameters, its optimizer and its compiled gradient.

    Args:
        model: float32 GPTNeoX; its parameters become views into the flat vectors (still saved by
            ``save_pretrained`` as usual).
        precision: dtype of the matrix products; parameters, norms, softmax and loss stay float32.
        compiled: use ``torch.compile`` (falls back to eager, with the same mathematics, where it is ``False``).
    """

    def __init__(
        self,
        model: transformers.GPTNeoXForCausalLM,
        config: OptimizerConfig,
        precision: Literal["bf16", "fp32"],
        compiled: bool,
    ) -> None:
        devices.keep_freed_memory()
        self.model, self.clip = model, config.clip
        self.rotation: neox.Rotation | None = None
        named = list(model.named_parameters())
        self.layout = tuple(
            tuple((n, p.shape) for n, p in named if (p.ndim >= 2) == decayed) for decayed in (True, False)
        )
        own = dict(named)
        self.flat: Flat = tuple(
            torch.cat([own[n].detach().flatten() for n, _ in part]).requires_grad_() for part in self.layout
        )
        with torch.no_grad():
            for name, view in self.views(self.flat).items():
                own[name].data = view.detach()
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [self.flat[0]], "weight_decay": config.weight_decay},
                {"params": [self.flat[1]], "weight_decay": 0.0},
            ],
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        grad = torch.func.grad_and_value(self._loss(precision), argnums=(0, 1))
        self.gradient: Callable[..., tuple[Flat, torch.Tensor]] = (
            torch.compile(grad, dynamic=False) if compiled else grad
        )

    def views(self, flat: Flat) -> dict[str, torch.Tensor]:
        """Parameters by name, as views into the flat vectors."""
        return {
            name: piece.view(shape)
            for part, vector in zip(self.layout, flat, strict=True)
            for (name, shape), piece in zip(part, vector.split([s.numel() for _, s in part]), strict=True)
        }

    def _loss(self, precision: str) -> Callable[..., torch.Tensor]:
        shape = neox.Shape.of(self.model.config)

        def loss(
            decayed: torch.Tensor, rest: torch.Tensor, tokens: torch.Tensor, rotation: neox.Rotation
        ) -> torch.Tensor:
            params = self.views((decayed, rest))
            low = self.views((decayed.bfloat16(), rest.bfloat16())) if precision == "bf16" else None
            return neox.cross_entropy(shape, params, tokens, low, rotation)

        return loss

    def update(self, tokens: torch.Tensor, lr: float, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One AdamW update on ``tokens`` ``[batch, length + 1]``; gradients accumulate over micro-batches.

        Returns:
            Mean loss in nats and gradient norm before clipping, both 0-d tensors on the device.
        """
        total: list[torch.Tensor] | None = None
        loss = torch.zeros((), device=tokens.device)
        if self.rotation is None or len(self.rotation[0]) != tokens.shape[1] - 1:
            self.rotation = neox.Shape.of(self.model.config).rotation(tokens.shape[1] - 1, tokens.device)
        for chunk in tokens.split(micro_batch):
            share = len(chunk) / len(tokens)
            with torch.no_grad():
                grads, value = self.gradient(*(f.detach() for f in self.flat), chunk, self.rotation)
            loss = loss + share * value
            scaled = [g if share == 1 else share * g for g in grads]
            total = scaled if total is None else [a + b for a, b in zip(total, scaled, strict=True)]
        for f, g in zip(self.flat, total, strict=True):
            f.grad = g
        norm = torch.nn.utils.clip_grad_norm_(self.flat, self.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return loss, norm

    def state(self) -> dict[str, torch.Tensor]:
        """Optimizer moments and update count, as tensors for a safetensors file."""
        out = {}
        for name, f in zip(("decayed", "rest"), self.flat, strict=True):
            for key, value in self.optimizer.state[f].items():
                out[f"{name}.{key}"] = value.detach().cpu().clone()
        return out

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what ``state`` returned."""
        for name, f in zip(("decayed", "rest"), self.flat, strict=True):
            entries = {k.split(".", 1)[1]: v for k, v in state.items() if k.startswith(name + ".")}
            self.optimizer.state[f] = {
                k: v.clone() if k == "step" else v.to(f.device).clone() for k, v in entries.items()
            }
