"""Quantize the linear layers inside a causal language model's blocks, in place and dequantized.

The model keeps its class and its forward path; only numbers change. Embeddings, norms, biases and the head
stay as they are. GPTQ goes block by block: the inputs of a block come from the blocks before it, quantized.

    >>> before = snapshot(model)
    >>> for bits in (3, 4):
    ...     result = quantize(model, ids, QuantSpec(bits=bits, group_size=64))
    ...     ...  # evaluate the model
    ...     restore(model, before)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import UserError
from . import backends
from .gptq import Hessian, gptq, reconstruction_error
from .grid import round_to_nearest
from .spec import OWN, QuantSpec


@dataclass(frozen=True)
class LayerReport:
    """What quantization did to one linear layer (measured on the weights as written, in the model's dtype)."""

    name: str
    shape: tuple[int, int]  # output rows, input columns
    weight_error: float  # ‖ΔW‖, Frobenius
    relative_weight_error: float  # ‖ΔW‖ / ‖W‖
    reconstruction_error: float | None  # tr(ΔW H ΔWᵀ) / tr(W H Wᵀ); None without calibration
    damping: float | None  # as used, after any growth


@dataclass(frozen=True)
class Quantized:
    """What was done to the model."""

    spec: QuantSpec
    layers: tuple[LayerReport, ...]
    seconds: float

    @property
    def names(self) -> tuple[str, ...]:
        """Dotted names of the linear layers touched, in the order of the model."""
        return tuple(layer.name for layer in self.layers)

    @property
    def parameters(self) -> int:
        """Number of weights quantized."""
        return sum(layer.shape[0] * layer.shape[1] for layer in self.layers)

    @property
    def weight_error(self) -> float:
        """‖δ‖ over all quantized weights together."""
        return sum(layer.weight_error**2 for layer in self.layers) ** 0.5


@dataclass(frozen=True)
class Batch:
    """Some sequences on their way through the blocks."""

    rows: slice
    keep: Tensor | None  # bool [sequences, T], False at padding; None without padding
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]]  # per block: what it gets beside hidden states


def quantize(
    model: nn.Module,
    calibration: Tensor | None,
    spec: QuantSpec,
    *,
    attention_mask: Tensor | None = None,
    batch_size: int | None = None,
) -> Quantized:
    """Quantize ``model`` in place.

    Args:
        model: any decoder of transformers, float32 or bfloat16, on any device.
        calibration: token ids [sequences, T], integers; None where the method needs none (``spec.calibrated``).
        attention_mask: [sequences, T], 1 or True at tokens and 0 or False at padding (either side). Padding
            neither counts in the Hessian nor changes what the tokens see. For our own methods.
        batch_size: sequences per forward pass; changes memory and speed only (and the last bits). Default: as
            many as hold 2,048 tokens on a CPU, where activations then stay in its cache, and 16,384 on a GPU.

    Raises:
        UserError: before anything is written, for a model without blocks of linear layers, weights that are
            not finite, calibration that is empty, out of vocabulary or too long; after some blocks have been
            written (take a ``snapshot`` first to be safe), for inputs that are not finite or a Hessian that
            stays singular; for another tool's method, that its extra or environment is not installed.
    """
    start = time.perf_counter()
    prefix, blocks = decoder_blocks(model)
    _check_weights(block_linears(model))
    if spec.method not in OWN:
        ids, _ = check_calibration(model, calibration, None, None) if spec.calibrated else (None, None)
        with eval_mode(model):
            weights = backends.quantized_weights(model, list(block_linears(model)), ids, spec)
        reports = [
            write_layer(name, linear, weights[name], None, None)
            for name, linear in block_linears(model).items()
        ]
        return Quantized(spec=spec, layers=tuple(reports), seconds=time.perf_counter() - start)
    if spec.method == "rtn":
        reports = [
            write_layer(name, linear, round_to_nearest(linear.weight, spec).dequantize(), None, None)
            for name, linear in block_linears(model).items()
        ]
        return Quantized(spec=spec, layers=tuple(reports), seconds=time.perf_counter() - start)

    ids, mask = check_calibration(model, calibration, attention_mask, batch_size)
    reports = []
    if batch_size is None:
        tokens = 2048 if model.get_input_embeddings().weight.device.type == "cpu" else 16384
        batch_size = max(1, tokens // ids.shape[1])
    with eval_mode(model):
        hidden, batches = embed(model, blocks, ids, mask, batch_size)
        for index, block in enumerate(blocks):
            reports += quantize_block(
                block, hidden, batches, index, spec, name=f"{prefix}.{index}", advance=index + 1 < len(blocks)
            )
    return Quantized(spec=spec, layers=tuple(reports), seconds=time.perf_counter() - start)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the weights that ``quantize`` changes, by layer name."""
    return {name: linear.weight.detach().clone() for name, linear in block_linears(model).items()}


def restore(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Put a ``snapshot`` back, in place."""
    linears = block_linears(model)
    with torch.no_grad():
        for name, weight in weights.items():
            linears[name].weight.copy_(weight)


def decoder_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of decoder blocks and its dotted name: the outermost ``ModuleList`` with most linear weights.

    Raises:
        UserError: there is none.
    """
    found: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside_another = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and not inside_another and any(linears_of(module)):
            found[name] = module
    if not found:
        raise UserError(
            f"{type(model).__name__}: no list of blocks with linear layers inside; "
            "give a decoder-only language model of transformers"
        )
    size = {name: sum(w.weight.numel() for _, w in linears_of(blocks)) for name, blocks in found.items()}
    name = max(size, key=size.__getitem__)
    return name, found[name]


def block_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers inside the decoder blocks, by dotted name, in the model's order."""
    prefix, blocks = decoder_blocks(model)
    return {f"{prefix}.{name}": linear for name, linear in linears_of(blocks)}


@torch.no_grad()
def embed(
    model: nn.Module, blocks: nn.ModuleList, ids: Tensor, mask: Tensor | None, batch_size: int
) -> tuple[Tensor, list[Batch]]:
    """Run the model with its blocks short-circuited: what enters the first block, what else each block gets.

    The blocks' own weights are not used, so they need not be in memory. Blocks may differ in their arguments
    (sliding and full attention).

    Returns:
        Hidden states [sequences, T, width] in the model's dtype, and the batches.
    """
    base = getattr(model, "base_model", model)
    device = model.get_input_embeddings().weight.device
    hidden, batches = [], []
    for first in range(0, len(ids), batch_size):
        rows = slice(first, min(first + batch_size, len(ids)))
        inputs = {"input_ids": ids[rows].to(device)}
        keep = None if mask is None else mask[rows].to(device)
        if keep is not None:
            # positions count tokens, not padding, so that padding on the left moves nothing
            inputs["attention_mask"] = keep.long()
            inputs["position_ids"] = (keep.long().cumsum(1) - 1).clamp(min=0)
        seen: list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]] = []
        with _short_circuit(blocks, seen):
            with suppress(_Enough):
                base(**inputs, use_cache=False)
        hidden.append(seen[0][0])
        batches.append(Batch(rows=rows, keep=keep, arguments=[(args, kwargs) for _, args, kwargs in seen]))
    return torch.cat(hidden), batches


@torch.no_grad()
def quantize_block(
    block: nn.Module,
    hidden: Tensor,
    batches: list[Batch],
    index: int,
    spec: QuantSpec,
    *,
    name: str,
    advance: bool = True,
) -> list[LayerReport]:
    """Quantize one block by GPTQ, given its inputs; no other block need be in memory.

    Args:
        block: in evaluation mode.
        hidden: inputs of the block, [sequences, T, width]; with ``advance``, overwritten with the quantized
            block's outputs.
        batches: as from ``embed``. index: the block's place in the model. name: its dotted name.
    """
    linears = dict(linears_of(block))
    reports: dict[str, LayerReport] = {}
    todo = [list(linears)]
    while todo:
        inputs = _capture(block, hidden, batches, index, {n: linears[n] for n in todo.pop()}, spec, name)
        if spec.true_sequential:
            # layers that share inputs go together; the rest see them quantized in another pass
            later = [n for names, _ in inputs[1:] for n in names]
            inputs = inputs[:1]
            todo += [later] if later else []
        for names, hessian in inputs:
            stacked = torch.cat([linears[n].weight for n in names])
            H = hessian.value()
            result, damping = gptq(stacked, H, spec, name=f"{name}.{names[0]}")
            parts = result.dequantize().split([linears[n].out_features for n in names])
            for n, weight in zip(names, parts, strict=True):
                reports[n] = write_layer(f"{name}.{n}", linears[n], weight, H, damping)
    if advance:
        for batch in batches:
            hidden[batch.rows] = _run(block, hidden, batch, index)
    return [reports[n] for n in linears]


def _capture(
    block: nn.Module,
    hidden: Tensor,
    batches: list[Batch],
    index: int,
    linears: dict[str, nn.Linear],
    spec: QuantSpec,
    block_name: str,
) -> list[tuple[list[str], Hessian]]:
    """Hessians of the named layers' inputs in the order of their use; layers fed the same tensor share one."""
    shared: list[tuple[list[str], Hessian]] = []
    leads: dict[str, Hessian | None] = {}  # None: counted by the layer before it that has the same input
    met: list[
        tuple[Tensor, int | None, list[str]]
    ] = []  # in the current batch: input, its version, who shares it
    batch = batches[0]

    def meet(name: str, x: Tensor) -> None:
        version = None if x.is_inference() else x._version
        for tensor, its_version, names in met:
            if tensor is x and its_version == version:
                names.append(name)
                leads[name] = None
                return
        leads[name] = Hessian(x.shape[-1], dtype=spec.dtype, device=x.device)
        shared.append(([name], leads[name]))
        met.append((x, version, shared[-1][0]))

    def count(name: str, x: Tensor) -> None:
        complete = len(leads) == len(linears)
        if name not in leads:
            meet(name, x)
        hessian = leads[name]
        if hessian is not None:
            tokens = x.flatten(0, -2)
            if batch.keep is not None:
                if len(tokens) != batch.keep.numel():
                    raise UserError(
                        f"{block_name}.{name}: its inputs {tuple(x.shape)} do not follow the sequences, so "
                        "padding cannot be left out; give calibration sequences of equal length"
                    )
                tokens = tokens[batch.keep.flatten()]
            hessian.add(tokens)
        if complete and hessian is shared[-1][1]:
            raise _Enough  # nothing after this layer is wanted

    hooks = [
        linear.register_forward_pre_hook(lambda _, args, n=n: count(n, args[0]))
        for n, linear in linears.items()
    ]
    try:
        for batch in batches:  # noqa: B007 (the hooks read it)
            with suppress(_Enough):
                _run(block, hidden, batch, index)
            met.clear()
    finally:
        for hook in hooks:
            hook.remove()
    for n in linears:
        if n not in leads:
            raise UserError(
                f"{block_name}.{n}: no calibration token reaches this layer; give more calibration text"
            )
    return shared


def _run(block: nn.Module, hidden: Tensor, batch: Batch, index: int) -> Tensor:
    args, kwargs = batch.arguments[index]
    device = next(block.parameters()).device  # hidden states of a large model may lie elsewhere
    out = block(hidden[batch.rows].to(device), *args, **kwargs)
    out = out[0] if isinstance(out, tuple) else out
    # a padding position may come out as NaN (it attends to nothing), and 0 · NaN would spread
    return out if batch.keep is None else out.masked_fill(~batch.keep[..., None], 0)


def write_layer(
    name: str, linear: nn.Linear, quantized: Tensor, hessian: Tensor | None, damping: float | None
) -> LayerReport:
    """Overwrite the layer's weight and say how far it moved."""
    with torch.no_grad():
        before = linear.weight.detach().clone()
        linear.weight.copy_(quantized)
        after = linear.weight.detach()
        delta = torch.linalg.vector_norm(after.double() - before.double()).item()
        norm = torch.linalg.vector_norm(before.double()).item()
        loss = None if hessian is None else reconstruction_error(before, after, hessian).item()
    return LayerReport(
        name=name,
        shape=(linear.out_features, linear.in_features),
        weight_error=delta,
        relative_weight_error=delta / norm if norm else 0.0,
        reconstruction_error=loss,
        damping=damping,
    )


def linears_of(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers inside a module, with their dotted names."""
    return ((name, m) for name, m in module.named_modules() if isinstance(m, nn.Linear))


def _check_weights(linears: dict[str, nn.Linear]) -> None:
    for name, linear in linears.items():
        if not linear.weight.is_floating_point():
            raise UserError(
                f"{name}: weights are {linear.weight.dtype}, already quantized; load the original model"
            )
        if not torch.isfinite(linear.weight).all():
            raise UserError(f"{name}: weights are not finite; the checkpoint is broken, load another one")


def check_calibration(
    model: nn.Module, ids: Tensor | None, mask: Tensor | None, batch_size: int | None
) -> tuple[Tensor, Tensor | None]:
    """Ids as int64, and the mask as bool or None where it hides nothing."""
    if batch_size is not None and batch_size < 1:
        raise UserError(f"batch_size: must be at least 1, got {batch_size}")
    if ids is None:
        raise UserError("calibration: GPTQ needs token ids of shape [sequences, length], got none")
    if ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise UserError(
            f"calibration: needs integer token ids of shape [sequences, length], got {ids.dtype} {tuple(ids.shape)}"
        )
    if 0 in ids.shape:
        raise UserError(f"calibration: no whole sequence in it (shape {tuple(ids.shape)}); give more text")
    vocabulary = model.get_input_embeddings().num_embeddings
    low, high = ids.min().item(), ids.max().item()
    if low < 0 or high >= vocabulary:
        bad = low if low < 0 else high
        raise UserError(
            f"calibration: token id {bad} is outside the model's vocabulary of {vocabulary}; "
            "use the tokenizer of this model"
        )
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit is not None and ids.shape[1] > limit:
        raise UserError(
            f"calibration: sequences of {ids.shape[1]} tokens, but the model's context is {limit}; cut them shorter"
        )
    if mask is None:
        return ids.long(), None
    if mask.shape != ids.shape:
        raise UserError(f"attention_mask: shape {tuple(mask.shape)} differs from the ids' {tuple(ids.shape)}")
    mask = mask.bool()
    empty = (~mask.any(dim=1)).nonzero().flatten()
    if len(empty):
        raise UserError(f"attention_mask: sequence {empty[0].item()} is all padding; leave it out")
    return ids.long(), None if mask.all() else mask


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """No dropout; each module's own training flag comes back."""
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, flag in training:
            module.training = flag


class _Enough(Exception):
    """Ends a forward pass once it has shown what was wanted."""


@contextmanager
def _short_circuit(blocks: Iterable[nn.Module], seen: list[Any]) -> Iterator[None]:
    """Blocks note their arguments and pass hidden states through; the last one ends the forward pass."""
    blocks = list(blocks)

    def note(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append((hidden_states, args, kwargs))
        if len(seen) == len(blocks):
            raise _Enough
        return hidden_states

    for block in blocks:
        block.forward = note
    try:
        yield
    finally:
        for block in blocks:
            del block.forward
