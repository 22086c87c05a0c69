"""A model small enough for its whole Hessian, and that Hessian by autograd in float64 through transformers."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from ptq_dynamics.models import neox

CONFIG = neox.ModelConfig(width=8, layers=2, heads=2, context=8, mlp_ratio=2, rotary_fraction=0.5)
VOCAB = 11


def randomise(model, scale=0.3):
    """Every parameter away from its special initial value (zero biases, unit gains)."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(scale * torch.randn(p.shape, generator=generator))
    return model.eval().requires_grad_(False)


def small_model():
    return randomise(neox.build(CONFIG, VOCAB, seed=0))


def small_tokens():
    return torch.randint(VOCAB, (5, 9), generator=torch.Generator().manual_seed(2))


def _attention(module, query, key, value, attention_mask, scaling, **kwargs):
    # transformers' eager attention takes its softmax in float32 whatever the model's dtype
    scores = query @ key.mT * scaling
    future = torch.full(scores.shape[-2:], -math.inf, dtype=scores.dtype).triu(1)
    return (((scores + future).softmax(-1) @ value).transpose(1, 2), None)


def plain_loss(model, tokens):
    """The loss as a function of the parameters, through the model's own forward in float64, and the parameters."""
    AttentionInterface.register("float64", _attention)
    model = copy.deepcopy(model).double()
    model.set_attn_implementation("float64")
    params = {n: p.detach() for n, p in model.named_parameters()}

    def loss(flat):
        parts = flat.split([p.numel() for p in params.values()])
        named = {n: v.view(p.shape) for (n, p), v in zip(params.items(), parts, strict=True)}
        logits = torch.func.functional_call(model, named, tokens[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return loss, torch.cat([p.flatten() for p in params.values()])


def derivatives(model, tokens):
    """Loss, gradient and the dense Hessian, float64, by autograd twice."""
    loss, theta = plain_loss(model, tokens)
    theta.requires_grad_(True)
    value = loss(theta)
    (gradient,) = torch.autograd.grad(value, theta, create_graph=True)
    eye = torch.eye(len(theta), dtype=torch.float64)
    (hessian,) = torch.autograd.grad(gradient, theta, eye, is_grads_batched=True)
    return value.item(), gradient.detach(), hessian


class Matrix:
    """A dense symmetric matrix as an operator."""

    dtype = torch.float64

    def __init__(self, matrix, layout=None):
        self.matrix, self.size, self.layout = matrix.double(), len(matrix), layout
        self.products = 0

    def __matmul__(self, v):
        self.products += 1 if v.ndim == 1 else v.shape[1]
        return self.matrix @ v
