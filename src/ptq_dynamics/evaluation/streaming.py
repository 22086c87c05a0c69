"""Measure and quantize a checkpoint larger than memory: the weights of one decoder block at a time.

The model is built without weights. Its embeddings turn the calibration and evaluation tokens into hidden states;
then each block in turn is read from the safetensors files, run on the evaluation tokens, quantized, run again, and
dropped; its outputs are the next block's inputs. Final norm and head come last and give the losses. Between blocks
only activations live, in main memory or (``spill``) in memory-mapped files:

    (GPTQ quantizers × calibration tokens + (1 + quantizers) × evaluation tokens) × width

numbers. So the device holds one block, the working set of its GPTQ, and a batch of activations.

What comes out is what ``load_model``, ``quantize`` and ``sequence_losses`` give in memory: the same quantized
weights bit for bit, and the same losses bit for bit wherever ``sequence_losses`` uses the model's own forward pass.
GPTNeoX models go through the lean pass there and through their own here. The two differ by rounding: some 1e-7 of a
loss in float32, some 1e-3 of one sequence's loss in bfloat16, where the lean pass keeps norms and the residual
stream in float32. So measure all checkpoints of a GPTNeoX trajectory one way or the other.
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import transformers
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..core import devices
from ..core.config import asdict
from ..core.devices import Precision
from ..core.errors import UserError
from ..core.files import TMP_MARK, atomic_dir, read_json, write_json
from ..quantization.grid import round_to_nearest
from ..quantization.quantizer import (
    Batch,
    LayerReport,
    Quantized,
    check_calibration,
    decoder_blocks,
    embed,
    linears_of,
    quantize_block,
    write_layer,
)
from ..quantization.spec import OWN, QuantSpec
from ..trajectories.hub import TOKENIZER_FILES
from .losses import token_losses

RECIPE = "quantization.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Streamed:
    """What one pass over a checkpoint gave.

    Attributes:
        losses: of the full-precision model, per sequence, float64 [n], nats per token; None without evaluation.
        quantized_losses: the same of each quantized model; empty without evaluation.
        quantized: what was done to the layers, as from ``quantize``.
        parameters: of the model, tied ones once.
        weight_norm: ‖W‖ over all weights that get quantized, before.
    """

    losses: np.ndarray | None
    quantized_losses: dict[QuantSpec, np.ndarray]
    quantized: dict[QuantSpec, Quantized]
    parameters: int
    weight_norm: float


@dataclass
class _Stream:
    """One model, full precision (no spec) or quantized, on its way through the blocks."""

    spec: QuantSpec | None
    calibration: Tensor | None = None  # hidden states [sequences, T, width], for GPTQ only
    evaluation: Tensor | None = None  # hidden states [n, length, width]
    reports: list[LayerReport] = field(default_factory=list)
    seconds: float = 0.0  # spent on quantization


@torch.no_grad()
def stream_measure(
    folder: Path,
    specs: Sequence[QuantSpec],
    *,
    calibration: Tensor | None = None,
    attention_mask: Tensor | None = None,
    evaluation: np.ndarray | None = None,
    precision: Precision = "auto",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    batch_size: int | None = None,
    batch: int = 16,
    spill: Path | None = None,
    save: Mapping[QuantSpec, Path] | None = None,
) -> Streamed:
    """Losses of a checkpoint and of its quantized versions, with the weights of one block in memory at a time.

    Args:
        folder: a Hugging Face folder with safetensors, sharded or not, of any decoder that ``quantize`` takes.
        specs: quantizers, each once.
        calibration, attention_mask, batch_size: as for ``quantize``.
        evaluation: token ids [n, length + 1], as for ``sequence_losses``; None measures no loss.
        precision, batch: as for ``sequence_losses``: dtype of the evaluation's products, sequences at once.
        dtype: in which weights are held and quantized, as for ``load_model``.
        device: where the block at work lies.
        spill: folder for the activations, as temporary memory-mapped files; None keeps them in main memory.
        save: where to write which quantized model, as a normal checkpoint folder in ``dtype`` with a shard per
            block; tensors keep the names that they have in ``folder``.

    Raises:
        UserError: before any work, if the folder is no checkpoint of safetensors, a tensor is missing or of the
            wrong shape, the model does not split into blocks, or the texts do not fit it; later, if a weight or a
            loss is not finite. No folder of ``save`` is written then.
    """
    folder, device = Path(folder), torch.device(device)
    specs = list(dict.fromkeys(specs))
    if stray := [spec for spec in save or {} if spec not in specs]:
        raise UserError(f"save: {stray[0].label} is not among the quantizers; add it to them")
    if foreign := [spec for spec in specs if spec.method not in OWN]:
        raise UserError(
            f"{folder}: {foreign[0].method} needs the whole model in memory; leave it out or set streaming: never"
        )
    model = _skeleton(folder, dtype, device)
    prefix, blocks = _split(folder, model)
    weights = _Weights(folder, model)
    calibrated = [spec for spec in specs if spec.calibrated]
    if calibrated:
        ids, mask = check_calibration(model, calibration, attention_mask, batch_size)
        batch_size = batch_size or max(1, (2048 if device.type == "cpu" else 16384) // ids.shape[1])
    if evaluation is not None:
        evaluation = _check_evaluation(model, evaluation)
    low = torch.bfloat16 if devices.precision(precision, device) == "bf16" else torch.float32
    streams = [_Stream(spec) for spec in ([] if evaluation is None else [None]) + specs]
    stem = [n for n in weights.names if not n.startswith(f"{prefix}.")]
    squares: list[Tensor] = []
    losses: dict[QuantSpec | None, np.ndarray] = {}

    with ExitStack() as stack:
        stack.enter_context(_freed_memory_returned())
        out = {spec: stack.enter_context(atomic_dir(path)) for spec, path in (save or {}).items()}
        store = _Store(Path(stack.enter_context(_temporary(Path(spill)))) if spill else None)
        enter = [n for n in stem if n not in _inside(model, model.get_output_embeddings())]
        calibration_batches: list[Batch] = []
        if calibrated:
            weights.fill(enter, device)
            hidden, calibration_batches = _embed(folder, model, blocks, ids, mask, batch_size, store)
            for stream in (s for s in streams if s.spec in calibrated):
                stream.calibration = hidden if stream.spec == calibrated[-1] else store.copy(hidden)
        if evaluation is not None:
            weights.fill(enter, device, low)
            inputs = torch.from_numpy(evaluation[:, :-1])
            hidden, evaluation_batches = _embed(folder, model, blocks, inputs, None, batch, store)
            for stream in streams:
                stream.evaluation = hidden if stream is streams[-1] else store.copy(hidden)
        hidden = None
        weights.drop(stem)

        for index, block in enumerate(blocks):
            name = f"{prefix}.{index}"
            own = [n for n in weights.names if n.startswith(f"{name}.")]
            weights.fill(own, device)
            squares += [linear.weight.double().square().sum() for _, linear in linears_of(block)]
            for stream in streams:
                if stream.spec is not None:
                    last = index + 1 == len(blocks)
                    _quantize(block, stream, calibration_batches, index, name, last)
                if stream.spec in out:
                    weights.save(own, out[stream.spec] / _shard(index + 1, len(blocks)))
                if stream.evaluation is not None:
                    _advance(block, stream.evaluation, evaluation_batches, index, low)
                if stream.spec is not None and stream is not streams[-1]:
                    weights.fill(own, device)  # the next quantizer starts from the original
            weights.drop(own)

        for stream in streams:
            stream.calibration = None
        if evaluation is not None:
            leave = [n for n in stem if n not in _inside(model, model.get_input_embeddings())]
            weights.fill(leave, device, low)
            for stream in streams:
                losses[stream.spec] = _losses(folder, model, blocks, stream.evaluation, evaluation, batch)
                stream.evaluation = None
            weights.drop(stem)
        if out:
            weights.fill(stem, device)
            for spec, tmp in out.items():
                weights.save(stem, tmp / _shard(0, len(blocks)))
                _save_rest(folder, tmp, model, weights, prefix, len(blocks))
                write_json(tmp / RECIPE, {"source": folder.name, "spec": asdict(spec)})
    return Streamed(
        losses=losses.pop(None, None),
        quantized_losses=losses,
        quantized={s.spec: Quantized(s.spec, tuple(s.reports), s.seconds) for s in streams if s.spec},
        parameters=weights.parameters,
        weight_norm=float(sum(squares)) ** 0.5,
    )


# --- the model without weights, and its weights on disk ---


def _skeleton(folder: Path, dtype: torch.dtype, device: torch.device) -> transformers.PreTrainedModel:
    """The model with parameters on the meta device and real buffers, in evaluation mode."""
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        if getattr(config, "quantization_config", None) is not None:
            raise UserError(f"{folder}: its weights are quantized already; name the original checkpoint")
        with init_empty_weights(include_buffers=False):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=False
            )
    except (OSError, ValueError, KeyError) as e:
        first = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise UserError(f"{folder}: cannot be built as a causal language model ({first})") from e
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return model.eval().requires_grad_(False)


def _split(folder: Path, model: transformers.PreTrainedModel) -> tuple[str, nn.ModuleList]:
    try:
        prefix, blocks = decoder_blocks(model)
    except UserError as e:
        raise UserError(f"{folder}: cannot be streamed block by block; {e}") from None
    for pair in model.all_tied_weights_keys.items():
        if any(name.startswith(f"{prefix}.") for name in pair):
            raise UserError(
                f"{folder}: cannot be streamed block by block; {type(model).__name__} ties {pair[0]} to {pair[1]}"
            )
    return prefix, blocks


class _Weights:
    """The tensors of a checkpoint folder under the model's names, read from the files when asked for.

    Attributes:
        meta: shape and dtype of each parameter and saved buffer, by name (tensors without memory).
        stored: file that holds it, and its name there. Old checkpoints are read under new names as transformers does.
        tied: names that share another one's tensor.

    Raises:
        UserError: a file is missing or unreadable, a tensor is missing or has another shape.
    """

    def __init__(self, folder: Path, model: transformers.PreTrainedModel) -> None:
        self.folder, self.model = folder, model
        self.meta = {n: t.detach().to("meta") for n, t in model.state_dict(keep_vars=True).items()}
        self.stored: dict[str, tuple[Path, str]] = {}
        self.tied: dict[str, str] = {}
        self._find(_weight_files(folder))
        for target, source in model.all_tied_weights_keys.items():
            if source not in self.stored and target in self.stored:
                self.stored[source] = self.stored[target]
            # transformers does not tie tensors that are both there and differ
            if target not in self.stored or torch.equal(self._read(target), self._read(source)):
                self.tied[target] = source
        if absent := sorted(self.tied.get(n, n) for n in self.meta if self.tied.get(n, n) not in self.stored):
            raise UserError(f"{folder}: the weights lack parameter '{absent[0]}'; the checkpoint is unusable")

    def _find(self, files: Iterable[Path]) -> None:
        # a second to import, and nothing else here needs them
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key

        conversions = get_model_conversion_mapping(self.model)
        renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        others = [c for c in conversions if not isinstance(c, WeightRenaming)]
        base = self.model.base_model_prefix
        for file in files:
            with _opened(file) as handle:
                for key in handle.keys():
                    name, converted = rename_source_key(key, renamings, others, base, self.meta)
                    if name not in self.meta and key in self.meta:
                        name, converted = key, None
                    if converted is not None:
                        raise UserError(
                            f"{file}: transformers builds '{name}' from several stored tensors ('{key}'), which "
                            "cannot be streamed; load the model and save it again in the new layout, or measure it "
                            "in memory"
                        )
                    if name not in self.meta:
                        continue  # such as rotary frequencies, which old checkpoints hold
                    found, shape = tuple(handle.get_slice(key).get_shape()), tuple(self.meta[name].shape)
                    if found != shape:
                        raise UserError(
                            f"{file}: '{key}' has shape {found}, but the model of config.json needs {shape}; "
                            "fetch the checkpoint again"
                        )
                    self.stored[name] = (file, key)

    @property
    def names(self) -> list[str]:
        return list(self.meta)

    @property
    def parameters(self) -> int:
        """Their number, tied ones once, buffers not counted."""
        ours = {n for n, _ in self.model.named_parameters(remove_duplicate=False)} - self.tied.keys()
        return sum(self.meta[n].numel() for n in ours)

    def fill(self, names: Iterable[str], device: torch.device, cast: torch.dtype | None = None) -> None:
        """Put tensors into the model: in their dtype there, parameters then in ``cast``."""
        done: dict[str, Tensor] = {}
        for name in names:
            first = self.tied.get(name, name)
            owner, leaf = self._place(name)
            if leaf in owner._buffers:
                owner._buffers[leaf] = self._read(first).to(device)
                continue
            if first not in done:
                value = self._read(first).to(device)
                if not torch.isfinite(value).all():
                    raise UserError(
                        f"{self.folder}: parameter '{first}' is not finite; the checkpoint is unusable"
                    )
                done[first] = nn.Parameter(value.to(cast or value.dtype), requires_grad=False)
            owner._parameters[leaf] = done[first]

    def drop(self, names: Iterable[str]) -> None:
        """Let go of parameters; buffers are small and stay."""
        for name in names:
            owner, leaf = self._place(name)
            if leaf in owner._parameters:
                owner._parameters[leaf] = nn.Parameter(self.meta[name], requires_grad=False)

    def save(self, names: Iterable[str], path: Path) -> None:
        """Write what the model holds now, each tied tensor once, under the names of the source."""
        tensors = {}
        for name in names:
            if name not in self.tied:
                owner, leaf = self._place(name)
                tensors[self.stored[name][1]] = getattr(owner, leaf).detach().cpu().contiguous()
        save_file(tensors, path, metadata={"format": "pt"})

    def _place(self, name: str) -> tuple[nn.Module, str]:
        owner, _, leaf = name.rpartition(".")
        return self.model.get_submodule(owner), leaf

    def _read(self, name: str) -> Tensor:
        """A copy of one tensor; its file is closed again, so that none of it stays mapped."""
        file, key = self.stored[name]
        with _opened(file) as handle:
            return handle.get_tensor(key).to(self.meta[name].dtype, copy=True)


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        raise UserError(
            f"{folder}: holds no safetensors weights, from which blocks are read; "
            "load the checkpoint once and save it with save_pretrained"
        )
    try:
        index = read_json(folder / INDEX, hint="fetch the checkpoint again")
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{folder / INDEX}: names no weight files; fetch the checkpoint again") from None
    for file in files:
        if not file.is_file():
            raise UserError(f"{file}: no such file, but {INDEX} names it; fetch the checkpoint again")
    return files


@contextmanager
def _opened(file: Path) -> Iterator[safe_open]:
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except SafetensorError as e:
        raise UserError(
            f"{file}: not a readable safetensors file ({e}); fetch the checkpoint again"
        ) from None


def _inside(model: nn.Module, module: nn.Module | None) -> set[str]:
    """Dotted names of a module's own parameters."""
    return {f"{n}.{leaf}" for n, m in model.named_modules() if m is module for leaf in m._parameters}


# --- activations ---


class _Store:
    """Makes tensors in main memory, or in files under ``folder`` that vanish with it."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.count = 0

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self.folder is None:
            return torch.empty(tuple(shape), dtype=dtype)
        path, numel = self.folder / str(self.count), math.prod(shape)
        self.count += 1
        try:
            with open(path, "wb") as f:
                if hasattr(os, "posix_fallocate"):  # a full disk is told now, not by a signal later
                    os.posix_fallocate(f.fileno(), 0, max(1, numel * dtype.itemsize))
        except OSError as e:
            raise UserError(
                f"{self.folder.parent}: no room for {numel * dtype.itemsize / 1e9:.1f} GB of activations "
                f"({e.strerror}); name another folder, or use fewer quantizers or tokens"
            ) from e
        return torch.from_file(str(path), shared=True, size=numel, dtype=dtype).view(tuple(shape))

    def copy(self, tensor: Tensor) -> Tensor:
        return self.new(tensor.shape, tensor.dtype).copy_(tensor)


def _temporary(spill: Path) -> tempfile.TemporaryDirectory[str]:
    """(To be entered; gives the folder's name.)"""
    spill.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix=TMP_MARK, dir=spill)


def _embed(
    folder: Path, model: nn.Module, blocks: nn.ModuleList, ids: Tensor, mask: Tensor | None, size: int, store: _Store
) -> tuple[Tensor, list[Batch]]:  # fmt: skip
    """As ``embed``, with the hidden states of all batches in the store."""
    hidden, batches = None, []
    for first in range(0, len(ids), size):
        rows = slice(first, min(first + size, len(ids)))
        states, (batch,) = embed(model, blocks, ids[rows], None if mask is None else mask[rows], size)
        if len(batch.arguments) != len(blocks):
            raise UserError(
                f"{folder}: cannot be streamed block by block; {type(model).__name__} does not run its blocks one "
                "after the other"
            )
        if hidden is None:
            hidden = store.new((len(ids), *states.shape[1:]), states.dtype)
        hidden[rows] = states
        batches.append(replace(batch, rows=rows))
    return hidden, batches


def _quantize(
    block: nn.Module, stream: _Stream, batches: list[Batch], index: int, name: str, last: bool
) -> None:  # fmt: skip
    """Quantize one block in place; its quantized outputs become the stream's calibration."""
    start = time.perf_counter()
    if stream.calibration is None:
        stream.reports += [
            write_layer(
                f"{name}.{n}", linear, round_to_nearest(linear.weight, stream.spec).dequantize(), None, None
            )
            for n, linear in linears_of(block)
        ]
    else:
        stream.reports += quantize_block(
            block, stream.calibration, batches, index, stream.spec, name=name, advance=not last
        )
    stream.seconds += time.perf_counter() - start


def _advance(block: nn.Module, hidden: Tensor, batches: list[Batch], index: int, dtype: torch.dtype) -> None:
    """Overwrite hidden states with the block's outputs, its parameters taken in ``dtype``."""
    low = {n: p.to(dtype) for n, p in block.named_parameters()}
    for batch in batches:
        args, kwargs = batch.arguments[index]
        states = hidden[batch.rows].to(next(iter(low.values())).device)
        out = torch.func.functional_call(block, low, (states, *args), kwargs)
        hidden[batch.rows] = out[0] if isinstance(out, tuple) else out


def _losses(
    folder: Path, model: transformers.PreTrainedModel, blocks: nn.ModuleList, hidden: Tensor, evaluation: np.ndarray, batch: int
) -> np.ndarray:  # fmt: skip
    """Mean loss of each sequence from the last block's outputs, by the model's own forward pass around its blocks."""
    device = model.get_output_embeddings().weight.device
    states: Tensor
    for block in blocks:
        block.forward = lambda *_, **__: states
    out = []
    for start in range(0, len(hidden), batch):
        states = hidden[start : start + batch].to(device)
        tokens = torch.from_numpy(evaluation[start : start + batch]).to(device)
        logits = model(inputs_embeds=states, use_cache=False).logits
        out.append(token_losses(logits, tokens).double().mean(1).cpu())
    for block in blocks:
        del block.forward
    result = torch.cat(out).numpy()
    if not np.isfinite(result).all():
        raise UserError(f"{folder}: the loss of a sequence is not finite")
    return result


@contextmanager
def _freed_memory_returned() -> Iterator[None]:
    """Have glibc map tensors of a megabyte and more one by one (elsewhere: nothing), so that each goes when freed.

    Otherwise much of what one block's GPTQ has freed would still count when the next one's peak comes. The price is
    page faults. Afterwards the thresholds are those that glibc itself settles at with large tensors.
    """

    def thresholds(mmap: int, trim: int) -> None:
        if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
            libc.mallopt(-3, mmap)  # M_MMAP_THRESHOLD
            libc.mallopt(-1, trim)  # M_TRIM_THRESHOLD

    thresholds(2**20, 2**20)
    try:
        yield
    finally:
        thresholds(2**25, 2**26)


def _check_evaluation(model: transformers.PreTrainedModel, evaluation: np.ndarray) -> np.ndarray:
    if len(evaluation) == 0:
        raise UserError("evaluation: no block of text; the set is shorter than one sequence")
    vocabulary = model.get_input_embeddings().num_embeddings
    low, high = int(evaluation.min()), int(evaluation.max())
    if low < 0 or high >= vocabulary:
        raise UserError(
            f"evaluation: token id {low if low < 0 else high} is outside the model's vocabulary of {vocabulary}; "
            "use the tokenizer of this model"
        )
    return np.asarray(evaluation, dtype=np.int64)


# --- the quantized model as a checkpoint ---


def _shard(index: int, blocks: int) -> str:
    """File name: 0 is what lies outside the blocks, then a file per block."""
    return f"model-{index + 1:05d}-of-{blocks + 1:05d}.safetensors"


def _save_rest(
    folder: Path, out: Path, model: transformers.PreTrainedModel, weights: _Weights, prefix: str, blocks: int
) -> None:
    """Index of the shards, configuration, and the source's tokenizer."""
    ours = {n: t for n, t in weights.meta.items() if n not in weights.tied}

    def shard(name: str) -> str:
        inside = name.startswith(f"{prefix}.")
        return _shard(int(name[len(prefix) + 1 :].split(".")[0]) + 1 if inside else 0, blocks)

    write_json(
        out / INDEX,
        {
            "metadata": {"total_size": sum(t.numel() * t.element_size() for t in ours.values())},
            "weight_map": {weights.stored[n][1]: shard(n) for n in ours},
        },
    )
    model.config.save_pretrained(out)
    for path in folder.iterdir():
        if TOKENIZER_FILES.fullmatch(path.name) or path.name == "generation_config.json":
            shutil.copyfile(path, out / path.name)
