"""What is computed at one checkpoint: trace, top eigenvalue, weight scales, expansions of the loss, planes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import transformers
from pydantic import Field

from ..core import devices, progress, provenance
from ..core.config import asdict, config_dataclass, digest
from ..core.errors import UserError
from ..core.files import read_json, write_json
from ..corpus.tokens import TokenSet
from ..evaluation.measure import CalibrationText, EvaluationText
from ..quantization.quantizer import block_linears, quantize, restore, snapshot
from ..quantization.spec import QuantSpec
from ..trajectories import checkpoints
from ..trajectories.checkpoints import Checkpoint
from .expansion import Expansion, expand_all
from .lanczos import top_eigenvalues
from .operator import Hessian, quantized_names
from .slices import plane
from .trace import trace

NUMERICS = (
    *(
        f"ptq_dynamics.curvature.{m}"
        for m in ("operator", "trace", "lanczos", "expansion", "slices", "pearlmutter", "point")
    ),
    "ptq_dynamics.models.neox",
    "ptq_dynamics.quantization",
    "ptq_dynamics.corpus.tokens",
)


@config_dataclass()
class Numerics:
    """How curvature is computed, the same at every checkpoint."""

    text: EvaluationText  # the tokens that loss, gradient and Hessian are taken on
    calibration: CalibrationText  # of GPTQ
    group_size: int  # of the groups whose largest weight is told
    probes: Annotated[int, Field(ge=10)] = 10  # of the trace
    tolerance: Annotated[float, Field(gt=0)] = 0.01  # of the top eigenvalue, relative
    max_steps: Annotated[int, Field(ge=1)] = 40  # of Lanczos
    device: str = "auto"


# --- what can be asked of a checkpoint; a QuantSpec asks for the expansion along its quantization step ---


@dataclass(frozen=True)
class Basin:
    """Loss, gradient norm, trace over all parameters and over the quantized matrices, scale of those matrices."""


@dataclass(frozen=True)
class Top:
    """The largest eigenvalue."""


@dataclass(frozen=True)
class Step:
    """The expansion along the way back to an earlier checkpoint."""

    previous: Checkpoint


@dataclass(frozen=True)
class Plane:
    """The loss on the plane through a checkpoint (the origin), an earlier one (on the x axis) and the quantized one."""

    previous: Checkpoint
    spec: QuantSpec
    resolution: int
    margin: float


Ask = Basin | Top | QuantSpec | Step | Plane


def key(checkpoint: Checkpoint, ask: Ask, config: Numerics, texts: Mapping[str, str]) -> str:
    """Hash of all that decides an answer: weights, what is asked, text, code and library versions.

    Args:
        texts: content hashes of the ``text`` and ``calibration`` sets.
    """
    of: dict[str, Any] = {"ask": type(ask).__name__}
    spec = ask if isinstance(ask, QuantSpec) else getattr(ask, "spec", None)
    if isinstance(ask, Basin):
        of |= {"probes": config.probes, "group_size": config.group_size}
    if isinstance(ask, Top):
        of |= {"tolerance": config.tolerance, "max_steps": config.max_steps}
    if isinstance(ask, Plane):
        of |= {"resolution": ask.resolution, "margin": ask.margin}
    if isinstance(ask, Step | Plane):
        of["previous"] = ask.previous.weights_id
    if spec is not None:
        of["spec"] = asdict(spec)
        if spec.calibrated:
            of["calibration"] = asdict(config.calibration) | {"id": texts["calibration"]}
    of |= {
        "weights": checkpoint.weights_id,
        "text": asdict(config.text) | {"id": texts["text"]},
        "code": provenance.fingerprint(*NUMERICS),
        "versions": {k: v for k, v in provenance.versions().items() if k in ("torch", "transformers")},
    }
    return digest(of, length=16)


def read(path: Path) -> dict[str, Any] | None:
    """An answer as written; None where it is missing or unreadable (then it is computed anew)."""
    try:
        return read_json(path, hint="it is computed anew")
    except UserError:
        return None


def examine(
    checkpoint: Checkpoint, asks: Sequence[Ask], config: Numerics, corpus: Path, rows: Path
) -> dict[Ask, str]:
    """Answer what ``rows`` lacks of ``asks``, one file each; the name of each answer's file.

    Raises:
        UserError: the text is too short, a checkpoint is unusable, a plane is degenerate.
    """
    text, calibration = TokenSet.open(corpus, config.text.set), TokenSet.open(corpus, config.calibration.set)
    texts = {"text": text.id, "calibration": calibration.id}
    files = {a: f"{key(checkpoint, a, config, texts)}.json" for a in asks}
    missing = [a for a in asks if read(rows / files[a]) is None]
    if missing:
        for ask, answer in _answers(checkpoint, missing, config, text, calibration):
            write_json(rows / files[ask], {k: _plain(v) for k, v in answer.items()})
    progress.report(checkpoint.weights_id, 1, resumed=not missing, final=True)
    return files


def _answers(
    checkpoint: Checkpoint, asks: Sequence[Ask], config: Numerics, text: TokenSet, calibration: TokenSet
) -> Iterable[tuple[Ask, dict[str, Any]]]:
    blocks = text.blocks(config.text.length, config.text.tokens)
    if (have := len(blocks) * config.text.length) + config.text.length <= config.text.tokens:
        raise UserError(
            f"params.yaml: curvature.text.tokens asks for {config.text.tokens}, but set '{text.name}' has {have}; "
            "lower it or add text"
        )
    device = devices.pick(config.device)
    model = checkpoints.load_model(checkpoint).to(device)
    h = Hessian(model, blocks)

    @functools.cache
    def quantized(spec: QuantSpec) -> torch.Tensor:
        before = snapshot(model)
        calib = calibration.calibration(
            config.calibration.sequences, config.calibration.length, config.calibration.seed
        )
        quantize(model, torch.from_numpy(calib).to(device) if spec.calibrated else None, spec)
        there = h.flat(model)
        restore(model, before)
        return there

    @functools.cache
    def other(c: Checkpoint) -> torch.Tensor:
        return h.flat(checkpoints.load_model(c).to(device))

    if expanded := [a for a in asks if isinstance(a, QuantSpec | Step)]:
        ends = [quantized(a) if isinstance(a, QuantSpec) else other(a.previous) for a in expanded]
        for ask, e in zip(expanded, expand_all(h, [end - h.theta for end in ends]), strict=True):
            yield ask, _terms(e)
    for ask in asks:
        if isinstance(ask, Basin):
            yield ask, _basin(h, model, config)
        elif isinstance(ask, Top):
            (top,) = top_eigenvalues(h, 1, tolerance=config.tolerance, max_steps=config.max_steps)
            yield (
                ask,
                {
                    "top_eigenvalue": top.value,
                    "top_residual": top.residual,
                    "top_converged": bool(top.converged),
                    "top_steps": top.steps,
                },
            )
        elif isinstance(ask, Plane):
            points = (h.theta, other(ask.previous), quantized(ask.spec))
            try:
                s = plane(h, *points, resolution=ask.resolution, margin=ask.margin)
            except UserError as e:
                raise UserError(f"{checkpoint.path} with {ask.previous.path}: {e}") from None
            yield (
                ask,
                {k: getattr(s, k).tolist() for k in ("x", "y", "loss", "points")}
                | {"losses": list(s.losses)},
            )


def _terms(e: Expansion) -> dict[str, float]:
    return {k: getattr(e, k) for k in ("linear", "quadratic", "true", "norm2", "rayleigh")}


def _basin(h: Hessian, model: transformers.PreTrainedModel, config: Numerics) -> dict[str, float]:
    found = trace(h, probes=config.probes, seed=0)
    of_quantized = found.over(quantized_names(model))
    return {
        "loss": h.loss(),
        "gradient_norm": float(h.gradient().double().norm()),
        "trace": found.value,
        "trace_se": found.standard_error,
        "trace_quantized": of_quantized[0],
        "trace_quantized_se": of_quantized[1],
        "probes": found.probes,
        "parameters": h.size,
        **scales([m.weight for m in block_linears(model).values()], config.group_size),
    }


def scales(matrices: Sequence[torch.Tensor], group_size: int) -> dict[str, float]:
    """How large the quantized matrices are: number of weights, norm, root mean square, mean of the groups' largest |w|.

    The grid step of b bits is 2/(2^b − 1) of a group's largest |w| (``quantization.grid``), so ``weight_scale`` times
    that is the mean step.

    Args:
        matrices: each [rows, columns]. group_size: columns to a group, as in ``QuantSpec``.
    """
    n = sum(w.numel() for w in matrices)
    norm = math.sqrt(sum(float(w.double().square().sum()) for w in matrices))
    largest = [
        group.abs().amax(dim=1)
        for w in matrices
        for group in w.double().split(w.shape[1] if group_size == -1 else group_size, dim=1)
    ]
    return {
        "quantized_parameters": n,
        "weight_norm": norm,
        "weight_rms": norm / math.sqrt(n),
        "weight_scale": float(torch.cat(largest).mean()),
    }


def _plain(value: Any) -> Any:
    """Numbers as JSON has them: no NaN, no types of numpy or torch."""
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value
