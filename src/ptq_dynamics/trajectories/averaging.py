"""Averages of checkpoints: LAWA, EMA, soups. Folders in, a folder out; never more than about two models in memory.

Every average here is a weighted mean of stored checkpoints, so each kind is a list of weights and one streaming
pass does the rest: a group of tensors at a time is summed over the members in float32 (or float64). Nested
averages (a soup of LAWAs) are flattened into one list of weights: no rounding in between.

    lawa([run / "step1000", run / "step2000", …], out, window=5)
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..core.errors import UserError
from ..core.files import atomic_dir, sha256_file, write_json
from .checkpoints import META, WEIGHTS, read
from .hub import TOKENIZER_FILES

# Summed before the next group is read: beside the result, its part of one open file stays in memory.
GROUP_BYTES = 2**24
RECIPE = "average.json"

# differ between checkpoints of one run without meaning anything for the weights
_LOOSE_KEYS = {
    "transformers_version",
    "_name_or_path",
    "use_cache",
    "dtype",
    "torch_dtype",
    "_commit_hash",
    "pad_token_id",
}
_HEADS = ("lm_head.weight", "embed_out.weight")
_COPIED = re.compile(r"config\.json|generation_config\.json|.*\.py")


# --- which checkpoints, with which weights ---


def lawa_indices(n: int, window: int, interval: int = 1) -> list[int]:
    """Indices of the ``window`` latest of ``n`` checkpoints, each ``interval`` apart, in training order.

    >>> lawa_indices(10, window=3, interval=2)
    [5, 7, 9]

    Raises:
        UserError: not that many checkpoints, or a number below 1.
    """
    if window < 1 or interval < 1:
        raise UserError(f"LAWA: window {window} and interval {interval} must be at least 1")
    need = (window - 1) * interval + 1
    if n < need:
        raise UserError(
            f"LAWA: window {window} at interval {interval} needs {need} checkpoints, there are {n}"
        )
    return list(range(n - need, n, interval))


def ema_weights(n: int, decay: float) -> list[float]:
    """Weights of an exponential moving average over ``n`` checkpoints, started at the first one.

    θ̄₀ = θ₀, θ̄ₖ = decay · θ̄ₖ₋₁ + (1 − decay) · θₖ, written out; they sum to one.

    Raises:
        UserError: no checkpoint, or decay outside [0, 1).
    """
    if n < 1 or not 0 <= decay < 1:
        raise UserError(f"EMA: needs a checkpoint and a decay in [0, 1), got {n} and {decay}")
    return [decay ** (n - 1)] + [(1 - decay) * decay ** (n - 1 - k) for k in range(1, n)]


# --- averages of folders ---


def lawa(folders: Sequence[Path], out: Path, *, window: int, interval: int = 1, **options: Any) -> Path:
    """Latest-weight average (Kaddour 2022): uniform mean of ``window`` checkpoints ``interval`` apart.

    Args:
        folders: checkpoints of one run in training order; the average ends at the last.
        options: of ``average``.
    """
    members = [folders[i] for i in lawa_indices(len(folders), window, interval)]
    return average(members, out, kind="lawa", details={"window": window, "interval": interval}, **options)


def ema(folders: Sequence[Path], out: Path, *, decay: float, **options: Any) -> Path:
    """Exponential moving average over checkpoints in training order; ``decay`` is per checkpoint, not per step."""
    weights = ema_weights(len(folders), decay)
    return average(folders, out, weights=weights, kind="ema", details={"decay": decay}, **options)


def soup(
    folders: Sequence[Path], out: Path, *, weights: Sequence[float] | None = None, **options: Any
) -> Path:
    """Model soup (Wortsman et al. 2022): uniform or weighted mean of the ends of several runs."""
    return average(folders, out, weights=weights, kind="soup", **options)


def soup_of_lawas(
    runs: Sequence[Sequence[Path]],
    out: Path,
    *,
    window: int,
    interval: int = 1,
    weights: Sequence[float] | None = None,
    **options: Any,
) -> Path:
    """Soup whose ingredients are LAWAs, one per run."""
    if not runs:
        raise UserError(f"{out}: an average needs at least one run")
    per_run = _normalized(weights, len(runs), out)
    picked = [[run[i] for i in lawa_indices(len(run), window, interval)] for run in runs]
    members = [m for group in picked for m in group]
    flat = [w / len(group) for w, group in zip(per_run, picked, strict=True) for _ in group]
    details = {"window": window, "interval": interval, "runs": len(runs)}
    return average(members, out, weights=flat, kind="soup of LAWAs", details=details, **options)


def average(
    folders: Sequence[Path],
    out: Path,
    *,
    weights: Sequence[float] | None = None,
    kind: str = "mean",
    details: dict[str, Any] | None = None,
    accumulate: torch.dtype = torch.float32,
    dtype: torch.dtype | None = None,
) -> Path:
    """Weighted mean of checkpoint folders, written as a normal checkpoint folder with its recipe in it.

    Each stored tensor is averaged once, so a tied embedding stays tied; integer and boolean tensors are
    taken from the last member, as are config, tokenizer and the layout of the weight files. Where that member
    is one of our own checkpoints, so is the average (phase ``average``, tokens and step of that member).

    Args:
        folders: checkpoints (safetensors or .bin, sharded or not) of one architecture.
        weights: one per folder, scaled to sum to one; None is uniform.
        accumulate: ``torch.float32`` or ``torch.float64``.
        dtype: of the written floating-point tensors; None keeps the members' own.

    Raises:
        UserError: members differ in architecture, tensors, shapes or dtypes (told by name), weights do not
            fit, or a folder holds no checkpoint.
    """
    folders = [Path(f) for f in folders]
    out = Path(out)
    if not folders:
        raise UserError(f"{out}: an average needs at least one checkpoint")
    if accumulate not in (torch.float32, torch.float64):
        raise UserError(f"{out}: accumulate in torch.float32 or torch.float64, not {accumulate}")
    if out.resolve() in {f.resolve() for f in folders}:
        raise UserError(f"{out}: is one of the averaged checkpoints; write the average elsewhere")
    uniform = weights is None
    scale = _normalized(weights, len(folders), out)
    configs = [_config(f) for f in folders]
    _check_configs(folders, configs)
    layouts = [_layout(f, bool(c.get("tie_word_embeddings"))) for f, c in zip(folders, configs, strict=True)]
    _check_tensors(folders, layouts)

    last = layouts[-1]
    files = sorted({file for file, _, _ in last.values()})
    names = {file: _written_name(file, len(files)) for file in files}
    total = 0
    with atomic_dir(out) as tmp:
        for file in files:
            tensors: dict[str, torch.Tensor] = {}
            for group in _groups({n: v for n, v in last.items() if v[0] == file}, accumulate):
                # equal weights are applied after the sum: fewer roundings
                sums = _sum(folders, layouts, group, None if uniform else scale, accumulate)
                for name in group:
                    value = sums.pop(name)
                    if value.is_floating_point():
                        if uniform:
                            value /= len(folders)
                        value = value.to(dtype or last[name][2])
                    tensors[name] = value
                    total += value.numel() * value.element_size()
            save_file(tensors, tmp / names[file], metadata={"format": "pt"})
        if len(files) > 1:
            weight_map = {name: names[file] for name, (file, _, _) in sorted(last.items())}
            write_json(
                tmp / "model.safetensors.index.json",
                {"metadata": {"total_size": total}, "weight_map": weight_map},
            )
        _copy_rest(folders[-1], tmp, dtype)
        _describe(folders[-1], tmp)
        write_json(
            tmp / RECIPE,
            {
                "kind": kind,
                **(details or {}),
                "members": [f.name for f in folders],
                "weights": scale,
                "accumulate": str(accumulate).removeprefix("torch."),
            },
        )
    return out


def _normalized(weights: Sequence[float] | None, n: int, out: Path) -> list[float]:
    if weights is None:
        return [1 / n] * n
    if len(weights) != n:
        raise UserError(f"{out}: {len(weights)} weights for {n} checkpoints; give one each")
    total = sum(weights)
    if not (0 < total < float("inf")) or min(weights) < 0:
        raise UserError(f"{out}: weights must not be negative and must not all be zero, got {list(weights)}")
    return [w / total for w in weights]


# --- reading ---

Layout = dict[str, tuple[str, tuple[int, ...], torch.dtype]]  # tensor name -> file, shape, dtype


def _layout(folder: Path, tied: bool) -> Layout:
    """Where a checkpoint's tensors lie, each tied tensor once."""
    found: Layout = {}
    for file in _weight_files(folder):
        with _opened(folder / file) as tensors:
            for name in tensors.keys():
                shape, dtype = tensors.describe(name)
                found[name] = (file, shape, dtype)
    for head in _HEADS if tied else ():
        # a tied head that is stored all the same is the embedding a second time
        if head in found and any(
            n != head and "embed" in n and v[1:] == found[head][1:] for n, v in found.items()
        ):
            del found[head]
    return found


def _weight_files(folder: Path) -> list[str]:
    for single in ("model.safetensors", "pytorch_model.bin"):
        if (folder / single).is_file():
            return [single]
        index = folder / f"{single}.index.json"
        if index.is_file():
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            for file in files:
                if not (folder / file).is_file():
                    raise UserError(
                        f"{folder / file}: no such file, but {index.name} names it; fetch the checkpoint again"
                    )
            return files
    raise UserError(
        f"{folder}: holds no weights (model.safetensors or pytorch_model.bin); name a checkpoint folder"
    )


class _Safetensors:
    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def keys(self) -> list[str]:
        return list(self.handle.keys())

    def describe(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        part = self.handle.get_slice(name)
        return tuple(part.get_shape()), _DTYPES[part.get_dtype()]

    def get(self, name: str) -> torch.Tensor:
        return self.handle.get_tensor(name)


class _Pickle:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def keys(self) -> list[str]:
        return list(self.tensors)

    def describe(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return tuple(self.tensors[name].shape), self.tensors[name].dtype

    def get(self, name: str) -> torch.Tensor:
        return self.tensors[name]


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip


@contextmanager
def _opened(path: Path) -> Iterator[_Safetensors | _Pickle]:
    """A weight file's tensors, mapped into memory and read one by one."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as handle:
                yield _Safetensors(handle)
        else:
            yield _Pickle(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
    except SafetensorError as e:
        raise UserError(
            f"{path}: not a readable safetensors file ({e}); fetch or write the checkpoint again"
        ) from e


def _config(folder: Path) -> dict[str, Any]:
    """The configuration with its defaults filled in; as it stands where transformers does not know the type."""
    from transformers import AutoConfig

    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file; name a checkpoint folder")
    try:
        return AutoConfig.from_pretrained(folder).to_dict()
    except (ValueError, OSError, KeyError):
        return json.loads(path.read_text(encoding="utf-8"))


def _check_configs(folders: list[Path], configs: list[dict[str, Any]]) -> None:
    first = configs[0]
    for folder, other in zip(folders[1:], configs[1:], strict=True):
        for key in sorted((first.keys() | other.keys()) - _LOOSE_KEYS):
            if first.get(key) != other.get(key):
                raise UserError(
                    f"cannot average {folders[0]} and {folder}: {key} is {first.get(key)!r} in one, "
                    f"{other.get(key)!r} in the other"
                )


def _check_tensors(folders: list[Path], layouts: list[Layout]) -> None:
    first = layouts[0]
    for folder, layout in zip(folders[1:], layouts[1:], strict=True):
        pair = f"cannot average {folders[0]} and {folder}"
        if only := sorted(first.keys() ^ layout.keys()):
            where = folders[0] if only[0] in first else folder
            raise UserError(f"{pair}: tensor {only[0]} is in {where.name} only")
        for name, (_, shape, dtype) in layout.items():
            if shape != first[name][1]:
                raise UserError(
                    f"{pair}: {name} has shape {list(first[name][1])} in one, {list(shape)} in the other"
                )
            if dtype != first[name][2]:
                raise UserError(
                    f"{pair}: {name} is {first[name][2]} in one, {dtype} in the other; convert one of them first"
                )


# --- summing and writing ---


def _groups(part: Layout, accumulate: torch.dtype) -> Iterator[list[str]]:
    """Names in groups whose accumulators fit into ``GROUP_BYTES`` (a larger tensor is a group of its own)."""
    group: list[str] = []
    size = 0
    for name, (_, shape, _) in part.items():
        more = torch.Size(shape).numel() * accumulate.itemsize
        if group and size + more > GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += more
    if group:
        yield group


def _sum(
    folders: list[Path],
    layouts: list[Layout],
    group: list[str],
    scale: list[float] | None,
    accumulate: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Σ scaleᵢ · θᵢ of the group's tensors (Σ θᵢ without a scale); tensors of integers as in the last folder."""
    sums: dict[str, torch.Tensor] = {}
    for i, (folder, layout) in enumerate(zip(folders, layouts, strict=True)):
        for file in sorted({layout[name][0] for name in group}):
            with _opened(folder / file) as tensors:
                for name in (n for n in group if layout[n][0] == file):
                    value = tensors.get(name)
                    if not value.is_floating_point():
                        sums[name] = value.clone()
                    elif name not in sums:
                        sums[name] = value.to(accumulate, copy=True).mul_(1.0 if scale is None else scale[i])
                    else:
                        sums[name].add_(value, alpha=1.0 if scale is None else scale[i])
    return sums


def _written_name(file: str, count: int) -> str:
    if count == 1:
        return "model.safetensors"
    return file.replace("pytorch_model", "model").replace(".bin", ".safetensors")


def _copy_rest(folder: Path, out: Path, dtype: torch.dtype | None) -> None:
    """Config, tokenizer and the model's own code, if any: what belongs to the model, not to one checkpoint."""
    for path in folder.iterdir():
        if _COPIED.fullmatch(path.name) or TOKENIZER_FILES.fullmatch(path.name):
            shutil.copyfile(path, out / path.name)
    if dtype is not None:
        path = out / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
        write_json(path, config)


def _describe(folder: Path, out: Path) -> None:
    """The average's own ``checkpoint.json``, if its last member has one."""
    if (folder / META).is_file() and (out / WEIGHTS).is_file():
        last = read(folder)
        meta = {"step": last.step, "tokens": last.tokens, "lr": None, "phase": "average", "parent": None}
        write_json(out / META, {**meta, "weights_sha256": sha256_file(out / WEIGHTS), "state_sha256": None})
