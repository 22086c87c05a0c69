"""A checkpoint: a Hugging Face folder anyone can load, plus ``checkpoint.json`` with where on the run it lies."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ..core.errors import UserError
from ..core.files import atomic_dir, read_json, sha256_file, write_json

META = "checkpoint.json"
WEIGHTS = "model.safetensors"
STATE = "optimizer.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """One point of a trajectory, on this machine's disk.

    Attributes:
        name: folder or revision name.
        tokens: training tokens seen, those of the parent included; None where the source does not say.
        step: updates done, those of the parent included; None where the source does not say.
        lr: learning rate of the last update; None where the source does not say.
        phase: ``warmup``, ``stable``, ``decay`` or ``average``.
        path: folder that ``AutoModelForCausalLM.from_pretrained`` loads.
        weights_id: SHA-256 over the weight files; measurements are keyed by it.
    """

    name: str
    tokens: int | None
    step: int | None
    lr: float | None
    phase: str
    path: Path
    weights_id: str


def save(
    folder: Path,
    model: transformers.PreTrainedModel,
    tokenizer_folder: Path,
    *,
    tokens: int,
    step: int,
    lr: float,
    phase: str,
    parent: str | None = None,
    key: str = "",
    state: Mapping[str, torch.Tensor] | None = None,
    texts: Mapping[str, str] | None = None,
) -> Checkpoint:
    """Write a checkpoint whole or not at all.

    Args:
        key: hash of all that decides these weights (``training.loop.prefix_keys``).
        state: the optimizer's, where a branch or resume needs it.
        texts: further text files of the folder, by name.
    """
    folder = Path(folder)
    with atomic_dir(folder) as tmp:
        model.config.save_pretrained(tmp)
        tensors = {n: p.detach().cpu().contiguous().clone() for n, p in model.named_parameters()}
        save_file(tensors, tmp / WEIGHTS, metadata={"format": "pt"})
        if state is not None:
            save_file(dict(state), tmp / STATE)
        for f in sorted(Path(tokenizer_folder).iterdir()):
            shutil.copy(f, tmp / f.name)
        for name, text in (texts or {}).items():
            (tmp / name).write_text(text, encoding="utf-8")
        meta = {
            "step": step,
            "tokens": tokens,
            "lr": lr,
            "phase": phase,
            "parent": parent,
            "key": key,
            "weights_sha256": sha256_file(tmp / WEIGHTS),
            "state_sha256": sha256_file(tmp / STATE) if state is not None else None,
        }
        write_json(tmp / META, meta)
    return read(folder)


def read(folder: Path) -> Checkpoint:
    """Describe the checkpoint in ``folder`` (one of ours).

    Raises:
        UserError: not a checkpoint, or its description is broken.
    """
    folder = Path(folder)
    meta = read_meta(folder)
    try:
        keep = {f.name: meta[f.name] for f in dataclasses.fields(Checkpoint) if f.name in meta}
        return Checkpoint(name=folder.name, path=folder, weights_id=meta["weights_sha256"], **keep)
    except (KeyError, TypeError):
        raise UserError(
            f"{folder / META}: fields are missing; delete the folder and run pretrain again"
        ) from None


def verify(folder: Path) -> Checkpoint:
    """``read``, and check the weights (and optimizer state) against their recorded hashes.

    Raises:
        UserError: a file is missing, cut short or changed; the line names it and the fix.
    """
    meta = read_meta(folder)
    for name, key in ((WEIGHTS, "weights_sha256"), (STATE, "state_sha256")):
        if meta.get(key) is None:
            continue
        path = Path(folder) / name
        if not path.is_file() or sha256_file(path) != meta[key]:
            raise UserError(f"{path}: torn or changed checkpoint; delete its folder and run pretrain again")
    return read(folder)


def copy(source: Path, folder: Path) -> None:
    """Copy a checkpoint, whole or not at all; without what only a restart needs."""
    keep = {p.name for p in Path(source).iterdir()} - {STATE}
    with atomic_dir(Path(folder)) as tmp:
        for name in sorted(keep):
            shutil.copy(Path(source) / name, tmp / name)
        write_json(tmp / META, read_meta(source) | {"state_sha256": None})


def is_whole(folder: Path) -> bool:
    """Whether ``verify`` passes."""
    try:
        verify(folder)
    except UserError:
        return False
    return True


def load_model(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """The one loader, for base and quantized alike: evaluation mode, no gradients, the dtype that is asked for.

    Raises:
        UserError: the folder does not load, a parameter is missing or not finite.
    """
    transformers.utils.logging.disable_progress_bar()  # a checkpoint loads in a blink; studies have a bar of their own
    try:
        model, told = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint.path, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as e:
        first = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise UserError(f"{checkpoint.path}: cannot be loaded as a causal language model ({first})") from e
    if absent := sorted(told["missing_keys"]):  # transformers would go on with random numbers in their place
        raise UserError(
            f"{checkpoint.path}: the weights lack parameter '{absent[0]}'; the checkpoint is unusable"
        )
    for name, p in model.named_parameters():
        if not torch.isfinite(p).all():
            raise UserError(
                f"{checkpoint.path}: parameter '{name}' is not finite; the checkpoint is unusable"
            )
    return model.eval().requires_grad_(False)


def load_weights(model: torch.nn.Module, folder: Path) -> None:
    """Copy the weights of one of our checkpoints into ``model`` in place (views stay views)."""
    verify(folder)
    own = dict(model.named_parameters())
    saved = load_file(Path(folder) / WEIGHTS)
    if own.keys() != saved.keys() or any(own[n].shape != saved[n].shape for n in own):
        raise UserError(f"{folder}: was made with another model configuration; name another parent")
    with torch.no_grad():
        for name, value in saved.items():
            own[name].copy_(value)


def load_state(folder: Path) -> dict[str, torch.Tensor]:
    """Optimizer state of a checkpoint that carries one.

    Raises:
        UserError: it carries none, so it cannot be resumed or branched from.
    """
    verify(folder)
    if not (Path(folder) / STATE).is_file():
        raise UserError(f"{folder}: carries no optimizer state; branch from a checkpoint of a trunk")
    return load_file(Path(folder) / STATE)


def read_meta(folder: Path) -> dict[str, Any]:
    """``checkpoint.json`` as written.

    Raises:
        UserError: there is none, or it is broken.
    """
    return read_json(
        Path(folder) / META, hint="not a whole checkpoint: delete the folder and run pretrain again"
    )
