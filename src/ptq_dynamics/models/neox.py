"""Pythia-style GPTNeoX: built as a transformers model, run by a lean forward pass over the same parameters.

There is one weight format, that of transformers. The lean pass exists for speed (benchmarks/training.py
measures it: mixed precision without autocast's bookkeeping, one compiled graph for loss and gradient,
no optimizer loop over small tensors) and is tested equal to transformers' logits.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import transformers
from pydantic import Field, model_validator

from ..core.config import config_dataclass

Params = Mapping[str, torch.Tensor]
Rotation = tuple[torch.Tensor, torch.Tensor]


@config_dataclass()
class ModelConfig:
    """A GPTNeoX decoder (Black et al. 2022; the sizes of Pythia, Biderman et al. 2023, and smaller)."""

    width: Annotated[int, Field(ge=8)]  # hidden size
    layers: Annotated[int, Field(ge=1)]
    heads: Annotated[int, Field(ge=1)]
    context: Annotated[int, Field(ge=8)]  # training sequence length, in tokens
    mlp_ratio: Annotated[int, Field(ge=1)] = 4
    rotary_fraction: Annotated[float, Field(ge=0, le=1)] = 0.25  # share of each head that is rotated
    init_std: Annotated[float, Field(gt=0)] = 0.02  # of all linear and embedding weights

    @model_validator(mode="after")
    def _divides(self) -> ModelConfig:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        head = self.width // self.heads
        if head % 2 and int(head * self.rotary_fraction) == head:
            raise ValueError(
                f"rotary_fraction {self.rotary_fraction} needs an even width per head, not {head}"
            )
        return self


def build(config: ModelConfig, vocab_size: int, seed: int) -> transformers.GPTNeoXForCausalLM:
    """A freshly initialised model in float32; the weights depend on ``config`` and ``seed`` alone."""
    hf = transformers.GPTNeoXConfig(
        vocab_size=vocab_size,
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=config.mlp_ratio * config.width,
        max_position_embeddings=config.context,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": config.rotary_fraction,
        },
        initializer_range=config.init_std,
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.GPTNeoXForCausalLM(hf).float()


def supports(model: torch.nn.Module) -> bool:
    """Whether the lean forward pass covers this model (else: use the model's own forward)."""
    c = getattr(model, "config", None)
    if not isinstance(model, transformers.GPTNeoXForCausalLM) or not isinstance(
        c, transformers.GPTNeoXConfig
    ):
        return False
    rope = c.rope_parameters or {}
    dropout = c.attention_dropout or c.hidden_dropout
    return (
        c.use_parallel_residual
        and c.attention_bias
        and c.hidden_act == "gelu"
        and not dropout
        and not c.tie_word_embeddings
        and rope.get("rope_type", "default") == "default"
    )


@dataclass(frozen=True)
class Shape:
    """What the lean pass needs to know of an architecture (hashable, so that compiled code is kept per shape)."""

    layers: int
    heads: int
    width: int
    rotated: int  # dims of each head that are rotated (an odd number counts as the next even one, as in transformers)
    theta: float
    norm_eps: float

    @classmethod
    def of(cls, config: transformers.GPTNeoXConfig) -> Shape:
        rope = config.rope_parameters or {}
        head = config.hidden_size // config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            width=config.hidden_size,
            rotated=int(head * rope.get("partial_rotary_factor", 0.25)),
            theta=float(rope.get("rope_theta", 10000.0)),
            norm_eps=config.layer_norm_eps,
        )

    def rotation(self, length: int, device: torch.device | str) -> Rotation:
        """Cosines and sines of rotary embeddings (Su et al. 2021, eq. 34), ``[length, 2 * heads * rotated / 2]``:
        those of queries and keys of all heads side by side."""
        f32 = {"device": device, "dtype": torch.float32}
        freq = self.theta ** -(torch.arange(0, self.rotated, 2, **f32) / max(self.rotated, 1))
        angle = torch.outer(torch.arange(length, **f32), freq).repeat(1, 2 * self.heads)
        return angle.cos(), angle.sin()


def lean_logits(
    shape: Shape,
    params: Params,
    ids: torch.Tensor,
    compute: Params | None = None,
    rotation: Rotation | None = None,
) -> torch.Tensor:
    """Next-token logits of GPTNeoX with parallel residuals, written for speed.

    Args:
        params: parameters by their transformers names; embeddings and norms are read from here.
        ids: token ids, int64 ``[batch, length]``.
        compute: the same parameters in the dtype of the matrix products (such as bfloat16); default ``params``.
        rotation: ``shape.rotation(length)``; hand it in to keep it out of a compiled graph.

    Returns:
        Logits ``[batch, length, vocab]`` in the dtype of ``compute``; norms, softmax, rotation and the residual
        stream are float32 when ``params`` is.
    """
    low = params if compute is None else compute
    b, t = ids.shape
    heads, width = shape.heads, shape.width
    hd, half = width // heads, (shape.rotated + 1) // 2
    rotated = 2 * half
    cos, sin = rotation or shape.rotation(t, ids.device)
    dtype = low["gpt_neox.embed_in.weight"].dtype

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, low[name + ".weight"], low[name + ".bias"])

    def after_norm(norm: str, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        # W(g∘x + b) + c = (W diag g) x + (W b + c): both branches of a block then read one normalised x, by one product
        w, gain, shift = params[name + ".weight"], params[norm + ".weight"], params[norm + ".bias"]
        return w * gain, (w * shift).sum(1) + params[name + ".bias"]

    def by_half(w: torch.Tensor) -> torch.Tensor:
        # Rows come as (head, q|k|v, dim). Put the halves that rotate into each other side by side for all heads,
        # so that the rotation is plain arithmetic on contiguous memory. q·k does not see the order of dims.
        w = w.view(heads, 3, hd, *w.shape[1:]).transpose(0, 1)
        qk = w[:2]
        parts = (qk[:, :, :half], qk[:, :, half:rotated], qk[:, :, rotated:])
        return torch.cat([p.flatten(0, 2) for p in parts] + [w[2].flatten(0, 1)])

    h = F.embedding(ids, params["gpt_neox.embed_in.weight"])
    for i in range(shape.layers):
        at = f"gpt_neox.layers.{i}."
        qkv, qkv_bias = after_norm(at + "input_layernorm", at + "attention.query_key_value")
        up, up_bias = after_norm(at + "post_attention_layernorm", at + "mlp.dense_h_to_4h")
        x = F.layer_norm(h, (width,), eps=shape.norm_eps).to(dtype)
        y = F.linear(
            x, torch.cat([by_half(qkv), up]).to(dtype), torch.cat([by_half(qkv_bias), up_bias]).to(dtype)
        )
        n = 2 * heads * half
        x1, x2, rest, v, u = y.split([n, n, 2 * width - 2 * n, width, len(up)], -1)
        r1, r2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
        qk = torch.cat([p.to(dtype).view(b, t, 2 * heads, -1) for p in (r1, r2, rest)], -1)
        q, k = qk[:, :, :heads].transpose(1, 2), qk[:, :, heads:].transpose(1, 2)
        a = _attention(q, k, v.view(b, t, heads, hd).transpose(1, 2))
        a = linear(a.transpose(1, 2).reshape(b, t, width), at + "attention.dense")
        h = h + a + linear(F.gelu(u), at + "mlp.dense_4h_to_h")
    final = "gpt_neox.final_layer_norm"
    x = F.layer_norm(h, (width,), params[final + ".weight"], params[final + ".bias"], shape.norm_eps)
    return F.linear(x.to(dtype), low[head_name(params)])


def head_name(params: Params) -> str:
    """Name of the output matrix: ``embed_out`` before transformers 5, ``lm_head`` since."""
    return "lm_head.weight" if "lm_head.weight" in params else "embed_out.weight"


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention ``[batch, heads, length, head dim]``."""
    if q.device.type == "cuda":
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    # On a CPU the backward of the fused kernel costs more than the plain products. The first half of the queries
    # sees no key of the second half: a quarter of the square is never computed.
    q = q * q.shape[-1] ** -0.5
    t = q.shape[2]
    out = []
    for begin, end in ((0, t // 2), (t // 2, t)):
        future = torch.full((end - begin, end), -math.inf, device=q.device).triu(1 + begin)
        scores = (q[:, :, begin:end] @ k[:, :, :end].transpose(-1, -2)).float() + future
        out.append(scores.softmax(-1).to(v.dtype) @ v[:, :, :end])
    return torch.cat(out, 2)


def cross_entropy(
    shape: Shape,
    params: Params,
    tokens: torch.Tensor,
    compute: Params | None = None,
    rotation: Rotation | None = None,
) -> torch.Tensor:
    """Mean next-token cross-entropy in nats of ``tokens`` ``[batch, length + 1]``: labels are shifted once, here.

    Its gradient has no gradient of its own (see ``_CrossEntropy``).
    """
    logits = lean_logits(shape, params, tokens[:, :-1], compute, rotation)
    return _CrossEntropy.apply(logits.flatten(0, 1), tokens[:, 1:].flatten())[0]


class _CrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of logits ``[n, vocab]`` that computes its gradient, softmax - onehot, on the way forward,
    so that the largest activation is read once and kept in the dtype of the matrix products."""

    @staticmethod
    def forward(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = logits.float()
        log_sum = torch.logsumexp(z, -1, keepdim=True)
        own = z.gather(1, labels[:, None])
        ids = torch.arange(z.shape[-1], device=z.device, dtype=torch.int32)
        mine = (
            ids[None] == labels[:, None].int()
        )  # int32: as wide as the logits, so that it vectorises with them
        softmax = (z - (log_sum + math.log(len(z)))).exp()  # divided by n already
        return (log_sum - own).mean(), torch.where(mine, softmax - 1 / len(z), softmax).to(logits.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, d_loss: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return d_loss.to(gradient.dtype) * gradient, None


def can_compile() -> bool:
    """Whether ``torch.compile`` has what it needs: a C++ compiler on the CPU, Triton on CUDA."""
    if torch.cuda.is_available():
        return True
    return shutil.which(os.environ.get("CXX", "g++")) is not None or shutil.which("clang++") is not None
