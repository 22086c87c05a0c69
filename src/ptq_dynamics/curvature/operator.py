"""The Hessian of a language model's loss on fixed tokens, as an operator on flat vectors.

>>> h = Hessian(model, tokens, names=quantized_names(model))
>>> h @ v                                     # H v
>>> delta = h.flat(quantized_model) - h.theta  # a step in weight space
>>> h.gradient() @ delta + 0.5 * delta @ (h @ delta)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from ..core.errors import UserError
from ..models import neox
from ..quantization.quantizer import block_linears, eval_mode
from .pearlmutter import Pass

Precision = Literal["fp32", "fp64"]
TOKENS_PER_PASS = {
    "cpu": 2048,
    "cuda": 16384,
}  # a CPU's cache holds the activations of so many, measured at width 64
KEEP_BYTES = (
    2**31
)  # what may be held between products; beyond it forward and backward passes run again for each


class SupportsMatmul(Protocol):
    """A symmetric operator: what ``trace`` and ``lanczos`` need.

    ``layout`` (name -> slice of a vector), ``device`` and ``dtype`` are read where they exist; without them there is
    one part named ``all``, on the CPU, in float32.
    """

    size: int

    def __matmul__(self, v: Tensor) -> Tensor:
        """The product with ``v``, [size] or [size, k]."""


def layout_of(h: SupportsMatmul) -> dict[str, slice]:
    """The named parts of an operator's vectors."""
    return getattr(h, "layout", None) or {"all": slice(0, h.size)}


def like(h: SupportsMatmul) -> dict[str, Any]:
    """Where, and in which dtype, an operator takes its vectors: arguments of a tensor's constructor."""
    return {"device": getattr(h, "device", "cpu"), "dtype": getattr(h, "dtype", torch.float32)}


def quantized_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the matrices that quantization changes: the weights of the linear layers inside the blocks."""
    return tuple(f"{name}.weight" for name in block_linears(model))


class Hessian:
    """Hessian H of the mean next-token cross-entropy L (nats per token) on fixed tokens at θ, the model's weights.

    Weights are copied: the model may be quantized or changed afterwards. GPTNeoX goes through closed-form products
    (``pearlmutter``), any other architecture through autograd and its own forward pass with eager attention, the
    only kind that has a second derivative everywhere (a warning tells of the switch).

    Args:
        model: a causal language model of transformers, on any device; used in evaluation mode.
        tokens: token ids [n, length + 1], integers; labels are the inputs shifted once, here.
        names: the parameters that H is taken by, in this order; the rest of the model is constant. Default: all.
            ``quantized_names(model)`` are those that quantization changes.
        precision: of weights, activations and products.
        micro_batch: sequences per pass; changes memory, speed and the last bits only. Default: as many as hold
            2,048 tokens on a CPU and 16,384 on a GPU.

    Attributes:
        layout: parameter name -> its part of a flat vector. size: length of a flat vector. theta: θ, [size].

    Raises:
        UserError: no tokens, ids out of the vocabulary, sequences longer than the context, an unknown name,
            a weight that is not finite.
    """

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        tokens: Tensor | np.ndarray,
        *,
        names: Sequence[str] | None = None,
        precision: Precision = "fp32",
        micro_batch: int | None = None,
    ) -> None:
        own = dict(model.named_parameters())
        self.names = tuple(own) if names is None else tuple(names)
        if unknown := [n for n in self.names if n not in own]:
            raise UserError(
                f"curvature: the model has no parameter '{unknown[0]}'; see model.named_parameters()"
            )
        if not self.names or len(set(self.names)) < len(self.names):
            raise UserError("curvature: names must be at least one parameter, each once")
        if precision not in ("fp32", "fp64"):
            raise UserError(f"curvature: precision '{precision}' is unknown; use fp32 or fp64")
        if micro_batch is not None and micro_batch < 1:
            raise UserError(f"curvature: micro_batch must be at least 1, got {micro_batch}")
        self.device = next(model.parameters()).device
        self.dtype = torch.float64 if precision == "fp64" else torch.float32
        self.tokens = _check_tokens(tokens, model).to(self.device)
        length = self.tokens.shape[1] - 1
        per_pass = TOKENS_PER_PASS.get(self.device.type, TOKENS_PER_PASS["cpu"])
        self.micro_batch = micro_batch or max(1, per_pass // length)
        self.layout, start = {}, 0
        for name in self.names:
            self.layout[name] = slice(start, start := start + own[name].numel())
        self.size = start
        self._shapes = {n: p.shape for n, p in own.items()}
        self._model = model
        self._lean = neox.Shape.of(model.config) if neox.supports(model) else None
        self.set_weights(model)

    def set_weights(self, weights: nn.Module | Mapping[str, Tensor]) -> None:
        """Move θ to other weights of the same architecture (all parameters, not only ``names``)."""
        own = self._checked(weights, self._shapes)
        self._params = {n: own[n].detach().to(self.device, self.dtype, copy=True) for n in self._shapes}
        self.theta = self.flat(self._params)
        self._records: list[Any] | None = None

    # -- flat vectors ----------------------------------------------------------------------------------------

    def flat(self, weights: nn.Module | Mapping[str, Tensor]) -> Tensor:
        """[size] from tensors by parameter name, or from a model's parameters.

        Raises:
            UserError: one is missing, of another shape, or not finite.
        """
        own = self._checked(weights, {n: self._shapes[n] for n in self.names})
        return torch.cat([own[n].detach().to(self.device, self.dtype).flatten() for n in self.names])

    def named(self, v: Tensor) -> dict[str, Tensor]:
        """Views of a flat vector [size] (or of the rows of [k, size]) in the parameters' shapes."""
        return {n: v[..., s].view(*v.shape[:-1], *self._shapes[n]) for n, s in self.layout.items()}

    def _checked(
        self, weights: nn.Module | Mapping[str, Tensor], shapes: Mapping[str, torch.Size]
    ) -> Mapping[str, Tensor]:
        own = dict(weights.named_parameters()) if isinstance(weights, nn.Module) else weights
        for name, shape in shapes.items():
            if name not in own:
                raise UserError(
                    f"curvature: parameter '{name}' is missing; give weights of the same architecture"
                )
            if own[name].shape != shape:
                raise UserError(
                    f"curvature: parameter '{name}' has shape {list(own[name].shape)}, expected {list(shape)}; "
                    "give weights of the same architecture"
                )
            if not torch.isfinite(own[name]).all():
                raise UserError(f"curvature: parameter '{name}' is not finite; the weights are unusable")
        return own

    def _vector(self, v: Tensor, what: str) -> Tensor:
        if v.ndim not in (1, 2) or v.shape[0] != self.size:
            raise UserError(
                f"curvature: {what} has shape {list(v.shape)}, expected [{self.size}] (see Hessian.flat)"
            )
        return v.to(self.device, self.dtype)

    # -- loss and derivatives --------------------------------------------------------------------------------

    @torch.no_grad()
    def loss(self, shift: Tensor | None = None) -> float:
        """L(θ), or L(θ + shift), nats per token; token losses are averaged in float64."""
        params = self._params
        if shift is not None:
            params = params | self.named(self.theta + self._vector(shift, "shift"))
        run = self._pass(params)
        with self._forward_mode():
            total = sum(run.losses(chunk).double().sum() for chunk in self.tokens.split(self.micro_batch))
        loss = float(total) / self._predictions
        if not math.isfinite(loss):
            raise UserError("curvature: the loss is not finite at these weights")
        return loss

    @torch.no_grad()
    def gradient(self) -> Tensor:
        """∇L(θ), [size]."""
        return sum(self._join(record.gradient) for record in self._each_record())

    @torch.no_grad()
    def __matmul__(self, v: Tensor) -> Tensor:
        """H v for [size], or H V for [size, k].

        Vectors share each batch's forward and backward pass. On a GPU they also go through it together (memory grows
        with k); on a CPU one by one, which is as fast.

        Raises:
            UserError: ``v`` has another length, or the product is not finite.
        """
        columns = self._vector(v, "the vector").reshape(self.size, -1).T.contiguous()
        out = torch.zeros_like(columns)
        for record in self._each_record():
            if self.device.type == "cpu":
                for row, column in zip(out, columns, strict=True):
                    row += self._product(record, column)
            else:
                out += torch.vmap(lambda column, record=record: self._product(record, column))(columns)
        if not torch.isfinite(out).all():
            raise UserError("curvature: a product with the Hessian is not finite at these weights")
        return out.T.reshape(v.shape)

    def _product(self, record: Any, v: Tensor) -> Tensor:
        return self._join(self._here.product(record, self.named(v)))

    def _join(self, named: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([named[n].flatten() for n in self.names])

    @property
    def _predictions(self) -> int:
        return self.tokens[:, 1:].numel()

    def _pass(self, params: Mapping[str, Tensor]) -> Pass | Autograd:
        if self._lean is not None:
            return Pass(self._lean, params, self.names)
        return Autograd(self._model, params, self.names)

    def _each_record(self) -> Iterator[Any]:
        """What each micro-batch leaves behind at θ; held in memory while it fits."""
        if self._records is not None:
            yield from self._records
            return
        self._here, held, kept = self._pass(self._params), 0, []
        with self._forward_mode():
            for chunk in self.tokens.split(self.micro_batch):
                record = self._here.record(chunk, 1.0 / self._predictions)
                held += record.nbytes
                if held <= KEEP_BYTES:
                    kept.append(record)
                else:
                    kept.clear()
                yield record
        if held <= KEEP_BYTES:
            self._records = kept

    @contextmanager
    def _forward_mode(self) -> Iterator[None]:
        """The model's own forward pass without dropout and with attention that has a second derivative."""
        if self._lean is not None:
            yield
            return
        attention = self._model.config._attn_implementation
        if attention != "eager":
            warnings.warn(
                f"curvature: attention '{attention}' has no second derivative everywhere; computed with 'eager'",
                stacklevel=4,
            )
            self._model.set_attn_implementation("eager")
        try:
            with eval_mode(self._model):
                yield
        finally:
            if attention != "eager":
                self._model.set_attn_implementation(attention)


@dataclass
class AutogradRecord:
    """Forward and backward pass of one batch, kept by autograd for further derivatives."""

    gradient: dict[str, Tensor]
    pull: Any
    nbytes: float = math.inf  # the graph's memory is not known, so records are made anew for each call


class Autograd:
    """As ``pearlmutter.Pass``, for any architecture: reverse over reverse through the model's own forward pass."""

    def __init__(
        self, model: transformers.PreTrainedModel, params: Mapping[str, Tensor], names: tuple[str, ...]
    ) -> None:
        self.model, self.params, self.names = model, params, names

    def losses(self, tokens: Tensor) -> Tensor:
        """Cross-entropy of each next token, nats, [batch · length]."""
        return self._losses(self.params, tokens)

    def record(self, tokens: Tensor, share: float) -> AutogradRecord:
        """Forward and backward pass of ``tokens`` [batch, length + 1]; ``share``: weight of one prediction."""

        def loss(moving: dict[str, Tensor]) -> Tensor:
            return self._losses({**self.params, **moving}, tokens).sum() * share

        with torch.enable_grad():
            gradient, pull = torch.func.vjp(torch.func.grad(loss), {n: self.params[n] for n in self.names})
        return AutogradRecord({n: g.detach() for n, g in gradient.items()}, pull)

    def product(self, record: AutogradRecord, v: dict[str, Tensor]) -> dict[str, Tensor]:
        """This batch's part of H v."""
        with torch.enable_grad():
            return record.pull(v)[0]

    def _losses(self, params: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
        out = torch.func.functional_call(self.model, dict(params), tokens[:, :-1], {"use_cache": False})
        logits = out.logits.to(next(iter(params.values())).dtype)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")


def _check_tokens(tokens: Tensor | np.ndarray, model: transformers.PreTrainedModel) -> Tensor:
    tokens = torch.as_tensor(tokens)
    if tokens.ndim != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise UserError(
            f"curvature: needs integer token ids of shape [n, length + 1], got {tokens.dtype} {list(tokens.shape)}"
        )
    if tokens.shape[0] < 1 or tokens.shape[1] < 2:
        raise UserError(
            f"curvature: no next token to predict (tokens of shape {list(tokens.shape)}); give more text"
        )
    vocabulary = model.get_input_embeddings().num_embeddings
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocabulary:
        raise UserError(
            f"curvature: token id {low if low < 0 else high} is outside the model's vocabulary of {vocabulary}; "
            "use the tokenizer of this model"
        )
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and tokens.shape[1] - 1 > limit:
        raise UserError(
            f"curvature: sequences of {tokens.shape[1] - 1} tokens, but the model's context is {limit}; cut them shorter"
        )
    return tokens.long()
