"""Hessian-vector products: ours against double backward (as pyhessian does it) and against curvlinops.

Same model, same tokens, float32, one thread each, in turns. Both peers get our lean forward pass, which is faster than
transformers' own, so what is compared is the way to differentiate twice. curvlinops is timed with one vector at a time
and with eight to a pass; where it is not installed it is left out (its dependencies are light but for torchvision,
which breaks transformers: pip install --no-deps curvlinops-for-pytorch backpack-for-pytorch einconv unfoldNd).
Weights and text are random: speed does not depend on them. Prints and records products per second; what does not
depend on the vector is computed once, outside the timing on our side, where it lies in use too.

    python benchmarks/curvature.py [--rounds 9]
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib.metadata import version

import common
import torch
import torch.nn.functional as F

from ptq_dynamics.core import devices
from ptq_dynamics.curvature.operator import Hessian
from ptq_dynamics.models import neox
from ptq_dynamics.models.neox import ModelConfig

SEQUENCES = 16
Arguments = tuple[ModelConfig, int, int]  # architecture, vocabulary, vectors


def task(
    config: ModelConfig, vocab_size: int, vectors: int
) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """Model, tokens ``[sequences, context + 1]`` and vectors ``[size, k]``, the same on both sides."""
    devices.keep_freed_memory()
    model = neox.build(config, vocab_size, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    tokens = torch.randint(vocab_size, (SEQUENCES, config.context + 1), generator=generator)
    size = sum(p.numel() for p in model.parameters())
    return model, tokens, torch.randn(size, vectors, generator=generator)


def ours(*args: object) -> Callable[[], list[float]]:
    """Our operator; returns the norms of the products."""
    model, tokens, v = task(*args)
    h = Hessian(model, tokens)
    return lambda: (h @ v).norm(dim=0).tolist()


def double_backward(*args: object) -> Callable[[], list[float]]:
    """Gradient with a graph, then the gradient of its product with each vector."""
    model, tokens, v = task(*args)
    shape, params = neox.Shape.of(model.config), dict(model.named_parameters())
    columns = [
        [
            part.view(p.shape)
            for part, p in zip(c.split([p.numel() for p in params.values()]), params.values(), strict=True)
        ]
        for c in v.T.contiguous()
    ]

    def products() -> list[float]:
        norms = []
        for column in columns:
            logits = neox.lean_logits(shape, params, tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            gradient = torch.autograd.grad(loss, list(params.values()), create_graph=True)
            product = torch.autograd.grad(gradient, list(params.values()), column)
            norms.append(torch.cat([p.flatten() for p in product]).norm().item())
        return norms

    return products


class Logits(torch.nn.Module):
    """The lean forward pass as a module, one row a prediction."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.shape = model, neox.Shape.of(model.config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return neox.lean_logits(self.shape, dict(self.model.named_parameters()), ids).flatten(0, 1)


def curvlinops(*args: object) -> Callable[[], list[float]]:
    """curvlinops' operator on one batch, all vectors in one product."""
    from curvlinops import HessianLinearOperator

    model, tokens, v = task(*args)
    module = Logits(model)
    h = HessianLinearOperator(
        module, torch.nn.CrossEntropyLoss(), list(module.parameters()), [(tokens[:, :-1], tokens[:, 1:].flatten())],
        num_data=len(tokens), check_deterministic=False,
    )  # fmt: skip
    return lambda: (h @ v).norm(dim=0).tolist()


def main() -> None:
    rounds = common.rounds(__doc__, 9)
    params = common.mini()
    config, vocab_size = params.studies["token_budgets"].model, params.corpus.vocab_size
    peers = [
        (
            "double backward",
            double_backward,
            1,
            f"torch {version('torch').split('+')[0]} autograd, our forward pass",
        )
    ]
    if importlib.util.find_spec("curvlinops"):
        name = f"curvlinops {version('curvlinops-for-pytorch')}, our forward pass"
        peers += [
            ("curvlinops", curvlinops, 1, name),
            ("curvlinops, 8 vectors to a pass", curvlinops, 8, name),
        ]
    else:
        print("curvlinops is not installed: left out")
    for label, peer, vectors, peer_name in peers:
        result = common.compare(ours, peer, (config, vocab_size, vectors), rounds)
        # 1 %: curvlinops 3.0.1 loses some tenths of a per cent in layer norms (tests/curvature/test_peers.py)
        if not torch.allclose(*(torch.tensor(side) for side in result.first), rtol=1e-2):
            raise SystemExit(f"the two sides multiply by different matrices: {result.first}")
        name = f"Hessian-vector products/s, width {config.width}, {config.layers} layers, against {label}"
        print(
            f"{name}: {vectors / result.ours:.2f} against {vectors / result.peer:.2f}, ratio {result.ratio:.2f} "
            f"({result.lowest:.2f} to {result.highest:.2f})",
            flush=True,
        )
        common.record(name, vectors / result.ours, vectors / result.peer, result.ratio, peer_name)


if __name__ == "__main__":
    main()
