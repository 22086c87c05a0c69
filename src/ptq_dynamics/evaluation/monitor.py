"""A monitor for training: what quantization would cost now, every so many updates, on a small fixed batch.

It is a callable for any loop (``monitor(model, step, loss)``), gives itself as a callback to a transformers Trainer, and
runs over saved checkpoints as it would have run while they were trained. It warns when error and loss diverge: when
the error has grown although the loss has not. The model's weights, its training flags and torch's random numbers are
afterwards what they were.

    >>> monitor = QuantizationMonitor(tokens)  # int64 [sequences, length + 1], held out
    >>> train(config, folder, corpus, machine, watch=monitor)  # our loop
    >>> trainer.add_callback(monitor.callback(trainer))  # transformers
    >>> monitor.readings[-1]
    {'step': 4200, 'ce': 3.11, 'rtn-4bit-g128': 0.0052, 'rtn-3bit-g128': 0.024, ...}
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import transformers
from pydantic import Field
from torch import nn

from ..core import devices, fanout, paths, progress, provenance
from ..core.config import asdict, config_dataclass, digest
from ..core.devices import Precision
from ..core.errors import UserError
from ..core.files import read_json, sweep, write_json
from ..corpus.tokens import TokenSet
from ..quantization.quantizer import eval_mode, quantize, restore, snapshot
from ..quantization.spec import QuantSpec
from ..training.study import Run, Study, expand, trajectory
from ..trajectories import checkpoints
from ..trajectories.checkpoints import Checkpoint
from .losses import sequence_losses
from .measure import MeasureConfig, write_csv

NAME = "monitor"
NUMERICS = (
    "ptq_dynamics.models.neox",
    "ptq_dynamics.quantization",
    "ptq_dynamics.evaluation.losses",
    "ptq_dynamics.evaluation.monitor",
    "ptq_dynamics.corpus.tokens",
)
RTN = (QuantSpec(method="rtn", bits=4), QuantSpec(method="rtn", bits=3))
PREFIX = "quantization/"  # of the names under which a reading is logged

log = logging.getLogger(__name__)


class QuantizationMonitor:
    """The quantization error of a model in training, read every ``every`` updates.

    Args:
        tokens: held-out token ids, int64 ``[sequences, length + 1]``: the same at every reading, so that readings
            differ by the weights alone.
        quantizers: what to read the error of. Round to nearest costs one more evaluation each; GPTQ also its calibration.
        calibration: token ids ``[sequences, length]``, needed for GPTQ.
        every: updates between readings (in our loop a multiple of ``machine.log_every``, so that each finds its row).
        precision: dtype of the matrix products of every evaluation.
        ratio, window: of the warning, see ``diverging``.

    Attributes:
        readings: a dict each: step, loss (as handed in), ce (full precision, nats per token), the relative error
            CE(Ŵ)/CE(W) − 1 under the label of each quantizer, ``diverging`` (labels), seconds.

    Raises:
        UserError: no tokens, a quantizer without its calibration, or numbers that make no sense.
    """

    def __init__(
        self,
        tokens: torch.Tensor | np.ndarray,
        quantizers: Sequence[QuantSpec] = RTN,
        calibration: torch.Tensor | np.ndarray | None = None,
        *,
        every: int = 300,
        precision: Precision = "auto",
        ratio: float = 1.25,
        window: int = 8,
    ) -> None:
        given = torch.as_tensor(tokens).cpu()
        if given.ndim != 2 or 0 in given.shape or given.shape[1] < 2 or given.is_floating_point():
            raise UserError(
                f"monitor: needs integer token ids of shape [sequences, length + 1], got {given.dtype} {list(given.shape)}"
            )
        self.tokens = given.long().numpy()
        self.quantizers = tuple(quantizers)
        if calibration is None and (lacking := [q.label for q in self.quantizers if q.calibrated]):
            raise UserError(
                f"monitor: {lacking[0]} needs calibration tokens; hand them in or use round to nearest"
            )
        if not self.quantizers or every < 1 or window < 1 or not ratio > 0:
            raise UserError(
                f"monitor: needs a quantizer, every and window of at least 1 and a ratio above 0, got "
                f"{len(self.quantizers)}, {every}, {window}, {ratio:g}"
            )
        self.calibration = None if calibration is None else torch.as_tensor(calibration)
        self.every, self.precision, self.ratio, self.window = every, precision, ratio, window
        self.readings: list[dict[str, Any]] = []

    @classmethod
    def of(
        cls,
        corpus: Path,
        *,
        length: int,
        sequences: int = 32,
        set: str = "validation",
        quantizers: Sequence[QuantSpec] = RTN,
        **settings: Any,
    ) -> QuantizationMonitor:
        """A monitor that reads sequences spread evenly over a set of our corpus.

        Raises:
            UserError: no such set, or it is too short.
        """
        calibration = None
        if any(q.calibrated for q in quantizers):
            calibration = TokenSet.open(corpus, "calibration").calibration(sequences, length, 0)
        return cls(spread(TokenSet.open(corpus, set), sequences, length), quantizers, calibration, **settings)

    def __call__(
        self, model: nn.Module, step: int, loss: torch.Tensor | float | None = None
    ) -> dict[str, float]:
        """Read the error if ``step`` is due; what is to be logged, or nothing.

        Args:
            model: a decoder of transformers (of a wrapped one, what is inside the wrapper), in training or evaluation.
            step: updates done.
            loss: of the last batch, for the record.
        """
        if step % self.every:
            return {}
        start = time.perf_counter()
        reading: dict[str, Any] = {"step": step, "loss": None if loss is None else float(loss)}
        try:
            reading |= read_errors(model, self.tokens, self.quantizers, self.calibration, self.precision)
        except UserError as e:  # a monitor does not end the run that it watches
            log.warning("step %d: not read: %s", step, e)
            return {}
        before = self.readings[-1]["diverging"] if self.readings else ()
        reading["diverging"] = diverging([*self.readings, reading], self.labels, self.ratio, self.window)
        reading["seconds"] = time.perf_counter() - start
        self.readings.append(reading)
        for label in reading["diverging"]:
            if label not in before:
                log.warning("%s", self._told(label))
        logged = ("ce", *self.labels)
        return {PREFIX + k: reading[k] for k in logged} | {
            PREFIX + "diverging": float(bool(reading["diverging"]))
        }

    @property
    def labels(self) -> tuple[str, ...]:
        """The quantizers' short names."""
        return tuple(q.label for q in self.quantizers)

    @property
    def seconds(self) -> float:
        """What all readings took."""
        return sum(r["seconds"] for r in self.readings)

    def _told(self, label: str) -> str:
        *before, last = self.readings[-self.window - 1 :]
        then = statistics.median(r[label] for r in before)
        ce = statistics.median(r["ce"] for r in before)
        return (
            f"step {last['step']}: error under {label} is {100 * last[label]:.2f} %, {last[label] / then:.2f} times the "
            f"median of the last {len(before)} readings, while the loss went from {ce:.3f} to {last['ce']:.3f}: "
            "full precision gains what low bits will not keep"
        )

    def callback(self, trainer: transformers.Trainer) -> transformers.TrainerCallback:
        """A callback for ``trainer``, which logs each reading like its own metrics.

        It runs the whole model in the first process alone: not for training that shards the weights (FSDP, ZeRO-3).
        """
        monitor = self

        class Callback(transformers.TrainerCallback):  # made here: importing the class takes seconds
            def on_step_end(
                self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any
            ) -> None:
                if state.is_world_process_zero:
                    last = next((r["loss"] for r in reversed(state.log_history) if "loss" in r), None)
                    if metrics := monitor(model, state.global_step, last):
                        trainer.log(metrics)

        return Callback()


def read_errors(
    model: nn.Module,
    tokens: np.ndarray,
    quantizers: Sequence[QuantSpec],
    calibration: torch.Tensor | None,
    precision: Precision,
) -> dict[str, float]:
    """Cross-entropy (``ce``, nats per token) and relative errors by label; the model is left as it was, bit for bit.

    Raises:
        UserError: a weight or loss is not finite, or text or calibration does not suit the model.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise UserError(
            f"a token id is outside the model's vocabulary of {vocabulary}; use the tokenizer of this model"
        )
    with eval_mode(model):
        base = float(sequence_losses(model, tokens, precision=precision).mean())
        found = {"ce": base}
        before = snapshot(model)
        try:
            for spec in quantizers:
                quantize(model, calibration if spec.calibrated else None, spec)
                found[spec.label] = (
                    float(sequence_losses(model, tokens, precision=precision).mean()) / base - 1
                )
                restore(model, before)
        except BaseException:
            restore(model, before)
            raise
    return found


def diverging(
    readings: Sequence[Mapping[str, Any]], labels: Sequence[str], ratio: float, window: int
) -> tuple[str, ...]:
    """The quantizers under which error and loss diverge at the last of ``readings``.

    They do when the error is at least ``ratio`` times the median of the ``window`` readings before, and full-precision
    loss on the same batch is no higher than its median over these. Medians, since a single reading on a small batch is
    noisy; a window that is not full yet tells nothing (early on every error grows while the loss falls). The default
    ratio is the least rise that C2 calls sharp.
    """
    *before, last = readings[-window - 1 :]
    if len(before) < window or last["ce"] > statistics.median(r["ce"] for r in before):
        return ()
    usual = {label: statistics.median(r[label] for r in before) for label in labels}
    return tuple(k for k in labels if usual[k] > 0 and last[k] >= ratio * usual[k])


def spread(tokens: TokenSet, sequences: int, length: int) -> np.ndarray:
    """Evaluation blocks spread evenly over a set, int64 ``[sequences, length + 1]``.

    Raises:
        UserError: the set has fewer.
    """
    blocks = tokens.blocks(length)
    if len(blocks) < sequences:
        raise UserError(
            f"monitor: set '{tokens.name}' has {len(blocks)} sequences of {length} tokens, {sequences} asked for; lower "
            "`sequences` or the length"
        )
    return blocks[np.linspace(0, len(blocks) - 1, sequences).round().astype(int)]


# --- over saved checkpoints ---


@config_dataclass()
class MonitorConfig:
    """The monitor over the saved checkpoints of a study: a run at constant LR and the cooldowns that branch from it."""

    study: str
    trunk: str = "trunk"  # member
    cooldown: str = "cooldown"  # member of its branches
    sequences: Annotated[int, Field(ge=1)] = (
        32  # read at each checkpoint, of the length and set that are measured
    )
    quantizers: Annotated[tuple[QuantSpec, ...], Field(min_length=1)] = RTN
    ratio: Annotated[float, Field(gt=0)] = 1.25
    window: Annotated[int, Field(ge=1)] = 8


def replay_run(
    points: Sequence[Checkpoint], config: MonitorConfig, measuring: MeasureConfig, corpus: Path, folder: Path
) -> list[dict[str, Any]]:
    """A reading of each checkpoint of a run; ``folder`` keeps one file each, which is taken where nothing has changed."""
    text, length = TokenSet.open(corpus, measuring.evaluation.set), measuring.evaluation.length
    tokens, calib = spread(text, config.sequences, length), None
    of: dict[str, Any] = {
        "sequences": config.sequences,
        "quantizers": [asdict(q) for q in config.quantizers],
        "length": length,
        "precision": measuring.compute_dtype,
        "text": text.id,
        "code": provenance.fingerprint(*NUMERICS),
        "versions": {k: v for k, v in provenance.versions().items() if k in ("torch", "transformers")},
    }
    if any(q.calibrated for q in config.quantizers):  # as many sequences again
        calibration, seed = TokenSet.open(corpus, measuring.calibration.set), measuring.calibration.seed
        calib = torch.from_numpy(calibration.calibration(config.sequences, length, seed))
        of["calibration"] = [calibration.id, seed]
    device = devices.pick(measuring.device)
    found = []
    for i, c in enumerate(points):
        file = folder / f"{digest(of | {'weights': c.weights_id}, length=16)}.json"
        errors = _kept(file)
        resumed = errors is not None
        if errors is None:
            model = checkpoints.load_model(c).to(device)
            errors = read_errors(model, tokens, config.quantizers, calib, measuring.precision)
            write_json(file, errors)
        found.append({"checkpoint": c.name, "step": c.step, "tokens": c.tokens, "lr": c.lr, "phase": c.phase} | errors)  # fmt: skip
        progress.report(points[0].path.parent.name, i + 1, resumed=resumed, final=i + 1 == len(points))
    return found


def _kept(file: Path) -> dict[str, float] | None:
    try:
        return read_json(file, hint="it is computed anew")
    except UserError:
        return None


def replay(config: MonitorConfig, study: Study, measuring: MeasureConfig, workers: int) -> pd.DataFrame:
    """Read every saved checkpoint of the trunks and their cooldowns; writes ``reports/tables/monitor.csv``.

    One row per checkpoint: the run's labels and ``study``, ``ce``, the relative error under each quantizer's label,
    ``diverging``, the labels under which error and loss part with all readings of the run and of what it branched from
    behind it, and ``warned``, those of them that did not at the reading before: the monitor warns once.

    Raises:
        UserError: no such member, a cooldown of another trunk, or a checkpoint is missing or torn.
    """
    runs = {r.name: r for r in expand(study) if r.member in (config.trunk, config.cooldown)}
    if lacking := {config.trunk, config.cooldown} - {r.member for r in runs.values()}:
        raise UserError(f"params.yaml: monitor: study '{config.study}' has no member '{min(lacking)}'")
    points = {n: trajectory(config.study, r, dense=True) for n, r in runs.items()}
    folder, corpus = paths.measurements(NAME), paths.corpus()
    sweep(folder / "rows")
    with progress.watched():
        total = sum(map(len, points.values()))
        progress.announce(f"monitor: {total} checkpoints", total, "ckpt")
        tasks = [
            fanout.Task(
                key=n,
                function=replay_run,
                args=(cs, config, measuring, corpus, folder / "rows"),
                log=folder / f"{n}.error.txt",
            )
            for n, cs in points.items()
        ]
        readings = fanout.run(tasks, workers)
    table = judged(runs, readings, config)
    write_csv(table, paths.tables() / f"{NAME}.csv")
    return table


def judged(
    runs: Mapping[str, Run], readings: Mapping[str, Sequence[Mapping[str, Any]]], config: MonitorConfig
) -> pd.DataFrame:
    """Readings as a table, each with what it would have warned of."""
    labels = [q.label for q in config.quantizers]
    rows = []
    for name, run in runs.items():
        before: list[Mapping[str, Any]] = []
        if parent := run.config.parent:
            if parent not in readings:
                raise UserError(
                    f"params.yaml: monitor.trunk: '{name}' branches from '{parent}', not from a '{config.trunk}'"
                )
            before = [r for r in readings[parent] if r["step"] <= run.branch_step]
        path = [*before, *readings[name]]
        told = [diverging(path[: i + 1], labels, config.ratio, config.window) for i in range(len(path))]
        for i in range(len(before), len(path)):
            new = [label for label in told[i] if i == 0 or label not in told[i - 1]]
            rows.append(
                run.labels()
                | {"study": config.study}
                | path[i]
                | {"diverging": " ".join(told[i]), "warned": " ".join(new)}
            )
    return pd.DataFrame(rows)
