"""The measurement table: one row per (checkpoint, quantizer), written one by one, computed only when missing."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import Field

from ..core import devices, fanout, paths, progress, provenance
from ..core.config import asdict, config_dataclass, digest
from ..core.devices import Precision
from ..core.errors import UserError
from ..core.files import atomic_file, read_json, sweep, write_text
from ..corpus.tokens import TokenSet
from ..models import neox
from ..quantization import backends
from ..quantization.quantizer import quantize, restore, snapshot
from ..quantization.spec import QuantSpec
from ..training.study import Study, expand, training_curves, trajectory
from ..trajectories import checkpoints
from ..trajectories.checkpoints import Checkpoint
from .intervals import paired_bootstrap
from .losses import sequence_losses
from .streaming import stream_measure

NUMERICS = (
    "ptq_dynamics.models.neox",
    "ptq_dynamics.quantization",
    "ptq_dynamics.evaluation.losses",
    "ptq_dynamics.corpus.tokens",
)


@config_dataclass()
class EvaluationText:
    """Held-out text, in blocks of ``length`` predictions from the start of the set."""

    set: str = "validation"
    tokens: Annotated[int, Field(ge=1)]
    length: Annotated[int, Field(ge=1)]


@config_dataclass()
class CalibrationText:
    """Windows drawn at random, without overlap, from a set kept apart from training and evaluation."""

    set: str = "calibration"
    sequences: Annotated[int, Field(ge=1)]
    length: Annotated[int, Field(ge=1)]
    seed: Annotated[int, Field(ge=0)] = 0


@config_dataclass()
class MeasureConfig:
    """How every checkpoint of a trajectory is measured."""

    evaluation: EvaluationText
    calibration: CalibrationText
    quantizers: Annotated[tuple[QuantSpec, ...], Field(min_length=1)]
    precision: Precision = "auto"  # of the matrix products of every evaluation, base and quantized alike
    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:1"
    compile: bool = True  # torch.compile where a compiler is found
    streaming: Literal["auto", "always", "never"] = (
        "auto"  # block by block; auto: what does not fit the memory
    )
    also: dict[str, tuple[QuantSpec, ...]] | None = None  # further quantizers, by study

    @property
    def compute_dtype(self) -> str:
        """The precision that is used here: fp32 or bf16."""
        return devices.precision(self.precision, devices.pick(self.device))

    def of(self, study: str) -> MeasureConfig:
        """The configuration for one study."""
        more = (self.also or {}).get(study, ())
        return dataclasses.replace(self, quantizers=self.quantizers + more, also=None)


def row_key(
    checkpoint: Checkpoint, spec: QuantSpec | None, config: MeasureConfig, texts: Mapping[str, str],
    streamed: bool = False,
) -> str:  # fmt: skip
    """Hash of all that decides a row: weights, quantizer, both texts, dtype, code and library versions.

    Args:
        spec: None for the full-precision row.
        texts: content hashes of the ``evaluation`` and ``calibration`` sets.
        streamed: whether it is measured block by block, which rounds differently for GPTNeoX.
    """
    calibrated = spec is not None and spec.calibrated
    path = {"streaming": provenance.fingerprint("ptq_dynamics.evaluation.streaming")} if streamed else {}
    return digest(
        (path | backends.identity(spec.method) if spec else path)
        | {
            "weights": checkpoint.weights_id,
            "spec": asdict(spec) if spec else None,
            "evaluation": asdict(config.evaluation) | {"id": texts["evaluation"]},
            "calibration": asdict(config.calibration) | {"id": texts["calibration"]} if calibrated else None,
            "precision": config.compute_dtype,
            "code": provenance.fingerprint(*NUMERICS),
            "versions": {k: v for k, v in provenance.versions().items() if k in ("torch", "transformers")},
        },
        length=16,
    )


def measure_checkpoint(
    checkpoint: Checkpoint, config: MeasureConfig, corpus: Path, rows: Path, lenders: Sequence[Path] = (),
    name: str = "",
) -> list[str]:  # fmt: skip
    """Measure one checkpoint with every quantizer, computing what ``rows`` lacks; keys of all its rows.

    ``name`` is for the progress display. The base model and its quantized versions share one load, one dtype, the same tokens and the same code path.
    """
    evaluation = TokenSet.open(corpus, config.evaluation.set)
    calibration = TokenSet.open(corpus, config.calibration.set)
    texts = {"evaluation": evaluation.id, "calibration": calibration.id}
    streamed = is_streamed(checkpoint, config)
    keys = {spec: row_key(checkpoint, spec, config, texts, streamed) for spec in (None, *config.quantizers)}
    missing = [spec for spec, key in keys.items() if not _there(rows, key, lenders)]
    if missing:
        _measure_missing(missing, keys, checkpoint, config, evaluation, calibration, rows, streamed)
    progress.report(name or checkpoint.weights_id, 1, resumed=not missing, final=True)
    return list(keys.values())


def _there(rows: Path, key: str, lenders: Sequence[Path]) -> bool:
    """Whether a row is there, or can be copied from others who have measured the same weights in the same way."""
    name = f"{key}.parquet"
    if read_row(rows / name) is not None:
        return True
    for lender in lenders:
        if read_row(lender / name) is not None:
            with atomic_file(rows / name) as tmp:
                shutil.copy(lender / name, tmp)
            return True
    return False


def is_streamed(checkpoint: Checkpoint, config: MeasureConfig) -> bool:
    """Whether a checkpoint is measured block by block: twice its weights in float32 do not fit the device's memory."""
    if config.streaming != "auto":
        return config.streaming == "always"
    stored = read_json(checkpoint.path / "config.json", hint="not a checkpoint of transformers")
    halved = (stored.get("dtype") or stored.get("torch_dtype")) in ("bfloat16", "float16")
    files = [f for f in checkpoint.path.glob("*.safetensors") if f.name != checkpoints.STATE]
    size = sum(f.stat().st_size for f in files) * (2 if halved else 1)
    device = devices.pick(config.device)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = psutil.virtual_memory().total
    return 2 * size > 0.8 * memory


def _measure_missing(
    missing: Sequence[QuantSpec | None], keys: Mapping[QuantSpec | None, str], checkpoint: Checkpoint,
    config: MeasureConfig, evaluation: TokenSet, calibration: TokenSet, rows: Path, streamed: bool,
) -> None:  # fmt: skip
    blocks = evaluation.blocks(config.evaluation.length, config.evaluation.tokens)
    if blocks.shape[0] * config.evaluation.length < config.evaluation.tokens - config.evaluation.length:
        have = blocks.shape[0] * config.evaluation.length
        raise UserError(
            f"params.yaml: evaluation.tokens asks for {config.evaluation.tokens}, but set "
            f"'{config.evaluation.set}' has {have}; lower it or add text"
        )
    calib = calibration.calibration(
        config.calibration.sequences, config.calibration.length, config.calibration.seed
    )
    base_row = read_row(rows / f"{keys[None]}.parquet")
    base = None if base_row is None else base_row["losses"]
    work = _streamed if streamed else _in_memory
    for spec, found in work(checkpoint, missing, base, torch.from_numpy(calib), blocks, config):
        losses, calibrated = found["losses"], spec is not None and spec.calibrated
        row = {
            **_place(checkpoint),
            "weights_id": checkpoint.weights_id,
            "parameters": found["parameters"],
            "compute_dtype": config.compute_dtype,
            "evaluation_set": config.evaluation.set,
            "evaluation_id": evaluation.id,
            "evaluation_tokens": blocks.shape[0] * config.evaluation.length,
            "versions": str(provenance.versions()),
        }
        if spec is None:
            base = losses
            row |= {"method": "none", "bits": None, "ce": float(losses.mean())}
        else:
            row |= {
                **asdict(spec),
                "calibration_set": config.calibration.set if calibrated else None,
                "calibration_id": calibration.id if calibrated else None,
                "calibration_sequences": config.calibration.sequences if calibrated else None,
                "ce": float(losses.mean()),
                "ce_fp": float(base.mean()),
                "weight_error": found["weight_error"],
                "relative_weight_error": found["relative_weight_error"],
                "layers": found["layers"],
                **_errors(base, losses),
            }
        _write_row(rows / f"{keys[spec]}.parquet", row | {"losses": losses, "seconds": found["seconds"]})


Found = Iterator[tuple[QuantSpec | None, dict[str, Any]]]  # quantizer (None: none) and what was measured


def _in_memory(
    checkpoint: Checkpoint, missing: Sequence[QuantSpec | None], base: np.ndarray | None, calibration: torch.Tensor,
    blocks: np.ndarray, config: MeasureConfig,
) -> Found:  # fmt: skip
    """Measure with the whole model in memory, full precision first and where it is missing."""
    device = devices.pick(config.device)
    model = checkpoints.load_model(checkpoint).to(device)
    compiled = config.compile and neox.can_compile()
    shared = {"parameters": sum(p.numel() for p in model.parameters())}

    def evaluate() -> np.ndarray:
        return sequence_losses(model, blocks, precision=config.precision, compiled=compiled)

    if base is None:
        start = time.perf_counter()
        yield None, shared | {"losses": evaluate(), "seconds": time.perf_counter() - start}
    before = snapshot(model)
    norm = _norm(before.values())
    for spec in missing:
        if spec is None:
            continue
        start = time.perf_counter()
        done = quantize(model, calibration.to(device) if spec.calibrated else None, spec)
        yield (
            spec,
            {
                **shared,
                "weight_error": done.weight_error,
                "relative_weight_error": done.weight_error / norm,
                "layers": len(done.names),
                "losses": evaluate(),
                "seconds": time.perf_counter() - start,
            },
        )
        restore(model, before)


def _streamed(
    checkpoint: Checkpoint, missing: Sequence[QuantSpec | None], base: np.ndarray | None, calibration: torch.Tensor,
    blocks: np.ndarray, config: MeasureConfig,
) -> Found:  # fmt: skip
    """Measure with one block of the model in memory at a time, all in one pass."""
    specs = [spec for spec in missing if spec is not None]
    done = stream_measure(
        checkpoint.path, specs, calibration=calibration, evaluation=blocks, precision=config.precision,
        device=devices.pick(config.device),
    )  # fmt: skip
    if base is None:
        yield None, {"parameters": done.parameters, "losses": done.losses, "seconds": 0.0}
    for spec in specs:
        quantized = done.quantized[spec]
        yield (
            spec,
            {
                "parameters": done.parameters,
                "weight_error": quantized.weight_error,
                "relative_weight_error": quantized.weight_error / done.weight_norm,
                "layers": len(quantized.names),
                "losses": done.quantized_losses[spec],
                "seconds": quantized.seconds,
            },
        )


def _place(checkpoint: Checkpoint) -> dict[str, Any]:
    """Where on its run a checkpoint lies."""
    c = checkpoint
    return {"checkpoint": c.name, "step": c.step, "tokens": c.tokens, "lr": c.lr, "phase": c.phase}


def _errors(base: np.ndarray, quantized: np.ndarray) -> dict[str, float]:
    relative = paired_bootstrap(base, quantized, lambda q, b: q / b - 1.0)
    gap = paired_bootstrap(base, quantized, lambda q, b: q - b)
    return {
        "delta_ce": gap.value,
        "delta_ce_low": gap.low,
        "delta_ce_high": gap.high,
        "relative_error": relative.value,
        "relative_error_low": relative.low,
        "relative_error_high": relative.high,
    }


def _norm(weights: Any) -> float:
    return float(sum(w.double().square().sum() for w in weights)) ** 0.5


def _write_row(path: Path, row: Mapping[str, Any]) -> None:
    with atomic_file(path) as tmp:
        pq.write_table(pa.Table.from_pylist([{**row, "losses": row["losses"].tolist()}]), tmp)


def read_row(path: Path) -> dict[str, Any] | None:
    """A row as written, its losses as an array; None where it is missing or unreadable (then it is redone)."""
    try:
        row = pq.read_table(path).to_pylist()[0]
        row["losses"] = np.asarray(row["losses"], dtype=np.float64)
        return row
    except (OSError, pa.ArrowException, IndexError, KeyError):
        return None


def measure(
    title: str,
    trajectories: Mapping[str, Sequence[Checkpoint]],
    config: MeasureConfig,
    corpus: Path,
    folder: Path,
    workers: int,
    lenders: Sequence[Path] = (),
) -> pd.DataFrame:
    """Measure every checkpoint of every trajectory; the tidy table, one row per (run, checkpoint, quantizer).

    Args:
        trajectories: checkpoints by run name, wherever they came from.
        folder: keeps ``rows/`` (one file per row) and the finished ``table.parquet`` with per-sequence losses.
        lenders: folders of other measurements, whose rows are taken where they are the same.

    Returns:
        The table without per-sequence losses, full-precision rows (``method`` "none") included.
    """
    found = measure_variants(title, trajectories, {"": config}, corpus, folder, workers, lenders)
    return found.drop(columns="variant")


def measure_variants(
    title: str,
    trajectories: Mapping[str, Sequence[Checkpoint]],
    configs: Mapping[str, MeasureConfig],
    corpus: Path,
    folder: Path,
    workers: int,
    lenders: Sequence[Path] = (),
) -> pd.DataFrame:
    """``measure`` with several configurations side by side; their names are the column ``variant``."""
    points = [(run, c) for run, cs in trajectories.items() for c in cs]
    distinct = {c.weights_id: (run, c) for run, c in reversed(points)}  # runs may share their beginning
    rows = folder / "rows"
    sweep(rows)
    sweep(folder)

    def name(variant: str, run: str, c: Checkpoint) -> str:
        return "/".join([*([variant] if variant else []), run, c.name])

    with progress.watched():
        progress.announce(
            f"measure {title}: {len(distinct)} checkpoints", len(distinct) * len(configs), "ckpt"
        )
        keys = fanout.run(
            [
                fanout.Task(
                    key=name(variant, run, c),
                    function=measure_checkpoint,
                    args=(c, config, corpus, rows, [f / "rows" for f in lenders], name(variant, run, c)),
                    log=folder / f"{name(variant, run, c).replace('/', '-')}.error.txt",
                    memory_gib=1.5,
                )
                for run, c in distinct.values()
                for variant, config in configs.items()
            ],
            workers,
        )
    records = []
    for variant in configs:
        for run, c in points:
            for key in keys[name(variant, *distinct[c.weights_id])]:
                row = read_row(rows / f"{key}.parquet")
                if row is None:
                    raise UserError(
                        f"{rows / key}.parquet: a row vanished while measuring; run the same command again"
                    )
                # equal weights share a row, wherever they lie
                records.append({"variant": variant, "run": run, "key": key} | row | _place(c))
    table = pd.DataFrame(records)
    with atomic_file(folder / "table.parquet") as tmp:
        table.to_parquet(tmp, index=False)
    return table.drop(columns="losses")


def measure_study(name: str, study: Study, config: MeasureConfig, workers: int) -> pd.DataFrame:
    """Measure every run of a finished study; writes its tables for git and returns the measurements.

    Writes ``reports/tables/measurements-<name>.csv`` (one row per checkpoint and quantizer, with the run's labels)
    and ``reports/tables/training-<name>.csv`` (loss and learning rate along each run, thinned).
    """
    corpus = paths.corpus()
    runs = expand(study)
    found = {r.name: trajectory(name, r) for r in runs}
    folder = paths.measurements(name)
    others = [f for f in sorted(folder.parent.glob("*")) if f != folder]
    table = measure(name, found, config.of(name), corpus, folder, workers, others)
    labels = pd.DataFrame([r.labels() for r in runs])
    table = labels.merge(table.drop(columns=["versions", "key"]), on="run")
    write_csv(table, paths.tables() / f"measurements-{name}.csv")
    write_csv(training_curves(name, runs, points=100), paths.tables() / f"training-{name}.csv")
    return table


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """A table small enough for git: 7 significant digits, one row per line, hashes shortened."""
    ids = [c for c in table.columns if c.endswith("_id")]
    short = {c: table[c].map(lambda id: id[:12], na_action="ignore") for c in ids}
    write_text(path, table.assign(**short).to_csv(index=False, float_format="%.7g"))
