"""Any trajectory, measured: the error of quantization along it, and what an average of neighbours would give.

    result = measure_source(Request(source="runs/my-run", bits=(3, 4)), config, out)

What cannot be had or measured is told and left out; the rest goes on, and so does a run that was killed.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import psutil
from pydantic import Field

from ..core import devices, paths, progress, provenance
from ..core.config import asdict, config_dataclass, digest, load
from ..core.errors import UserError
from ..core.files import read_json, write_json
from ..quantization.spec import QuantSpec
from ..trajectories import averaging, hub, sources
from ..trajectories.checkpoints import Checkpoint
from ..trajectories.hub import Skipped
from ..trajectories.sources import Source
from .measure import MeasureConfig, measure, write_csv
from .texts import Texts, texts

GROUP = 128  # columns per scale, where the widths allow it
LEAST_GROUP = 16
NOTICED = 1e-3  # nats per token; a smaller difference of losses is not called one
REPORT = "report.json"


@config_dataclass()
class Request:
    """What is asked of a trajectory."""

    source: str
    revisions: tuple[str, ...] | None = None  # None: all that state a step
    bits: Annotated[tuple[int, ...], Field(min_length=1)] = (4, 3)
    method: Literal["gptq", "rtn"] = "gptq"
    group_size: int | None = None  # None: 128, or the largest that divides the model's widths
    window: Annotated[int, Field(ge=0)] = 5  # checkpoints in the average of neighbours; 0: none
    tokens_per_step: Annotated[int, Field(ge=1)] | None = None
    evaluation: str | None = None  # a plain text file; None: our corpus
    calibration: str | None = None
    tokens: Annotated[int, Field(ge=1)] | None = None  # of evaluation; None: as params.yaml says
    length: Annotated[int, Field(ge=8)] | None = None  # tokens per sequence
    delete: bool = False  # delete each revision of a hub repository after use
    workers: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True)
class Result:
    """A measured trajectory.

    Attributes:
        table: as ``measure`` returns it, with ``kind`` (checkpoint | average) and ``members`` of averages.
        axis: ``tokens``, or ``step`` where the source does not tell tokens.
        best: one per quantizer, see ``best``.
    """

    source: Source
    table: pd.DataFrame
    skipped: tuple[Skipped, ...]
    notes: tuple[str, ...]
    axis: str
    best: tuple[dict[str, Any], ...] = field(default=())


def request(**values: Any) -> Request:
    """A checked request; ``UserError`` in one line."""
    asked = load(Request, values, "trajectory")
    for b in asked.bits:
        _spec(asked, b, GROUP if asked.group_size is None else asked.group_size)
    if len(set(asked.bits)) < len(asked.bits):
        raise UserError(f"--bits {' '.join(map(str, asked.bits))}: a width is listed twice")
    for name, file in (("evaluation", asked.evaluation), ("calibration", asked.calibration)):
        if file is not None and not Path(file).is_file():
            raise UserError(f"--{name} {file}: no such file; name a plain text file")
    return asked


def open_request(asked: Request, **where: Any) -> Source:
    """The request's source."""
    return sources.open_source(asked.source, asked.revisions, tokens_per_step=asked.tokens_per_step, **where)


def output_folder(source: Source, asked: Request) -> Path:
    """``reports/trajectories/<name>``; ``UserError`` if it holds the results of another source."""
    out = paths.root() / "reports" / "trajectories" / source.name
    if (out / REPORT).is_file():
        before = read_json(out / REPORT, hint="delete the folder")["location"]
        if before != _location(source, asked):
            raise UserError(
                f"{paths.relative(out)}: holds the results of another source ({before}); give --out DIR"
            )
    return out


def measure_source(asked: Request, config: MeasureConfig, out: Path | None = None, **where: Any) -> Result:
    """Measure every checkpoint of a source and the averages of neighbours; writes ``table.csv`` and ``report.json``.

    Finished rows are kept under ``data/measurements/wild-<name>``. The table of a family goes to
    ``reports/tables/wild/<family>.csv`` too.

    Args:
        config: amounts of text, precision and device; its quantizers are replaced by those asked for.
        out: folder of the results (default: ``output_folder``).
        where: of ``sources.open_source``.

    Raises:
        UserError: not a source, no text, or nothing could be measured.
    """
    source = open_request(asked, **where)
    out = out or output_folder(source, asked)
    work = paths.measurements(f"wild-{source.name}")
    skipped: list[Skipped] = []
    with progress.watched():
        trial = _Trial(asked, config, source, work, skipped)
        table = trial.points()
        best = trial.best(table)
        averages = trial.averages(table, best)
    table = pd.concat([table, averages], ignore_index=True) if len(averages) else table
    axis = "tokens" if table["tokens"].notna().all() else "step"
    best = [b | _gain(b, averages) for b in best]
    result = Result(source, table, tuple(skipped), tuple(trial.notes), axis, tuple(best))
    _write(result, asked, out)
    return result


def best(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Per quantizer, most bits first: the checkpoint with the lowest quantized loss, as ``method``, ``bits``,
    ``checkpoint``, ``ce``, ``ce_fp`` (nats per token) and ``relative_error``."""
    rows = table[(table["method"] != "none") & (table["kind"] == "checkpoint")]
    found = []
    for (method, bits), group in rows.groupby(["method", "bits"]):
        r = group.loc[group["ce"].idxmin()]
        keep = {k: float(r[k]) for k in ("ce", "ce_fp", "relative_error")}
        found.append({"method": str(method), "bits": int(bits), "checkpoint": str(r["checkpoint"]), **keep})
    return sorted(found, key=lambda b: -b["bits"])


def neighbours(names: Sequence[str], name: str, window: int) -> list[str]:
    """The ``window`` names around ``name``, itself in the middle as far as the ends allow.

    >>> neighbours(["a", "b", "c", "d"], "d", 3)
    ['b', 'c', 'd']
    """
    window = min(window, len(names))
    start = min(max(list(names).index(name) - window // 2, 0), len(names) - window)
    return list(names[start : start + window])


def fitting_group(widths: Sequence[int], wanted: int = GROUP) -> int:
    """The largest group size up to ``wanted`` that divides all ``widths`` (input columns of the linear layers);
    ``wanted`` where that would be below 16, as the last group of a row may be shorter."""
    common = math.gcd(*widths)
    fit = max(d for d in range(1, wanted + 1) if common % d == 0)
    return fit if fit >= LEAST_GROUP else wanted


def words(result: Result) -> list[str]:
    """What the trajectory says to a practitioner, one sentence per bit width."""
    found = result.best
    told = []
    for b in found:
        name = f"{b['bits']} bit ({b['method'].upper()})"
        text = (
            f"At {name}, the lowest loss is that of {b['checkpoint']}: {b['ce']:.4f} nats per token, "
            f"{100 * b['relative_error']:.2f} % above its full-precision loss ({b['ce_fp']:.4f})."
        )
        if "average" in b:
            change, members = b["average"] - b["ce"], b["members"]
            text += f" Averaging {len(members)} neighbours ({members[0]} to {members[-1]}) gives {b['average']:.4f}, "
            if abs(change) < NOTICED:
                text += "about the same."
            else:
                text += f"{abs(change):.4f} {'lower: worth it' if change < 0 else 'higher: no gain'}."
        told.append(text)
    return told


def estimate(source: Source, asked: Request, config: MeasureConfig) -> list[str]:
    """What measuring would take: revisions and sizes, disk, and time, in lines. Downloads nothing."""
    size = max(i.size for i in source.items)
    lines = [f"{source.title}: {len(source.items)} checkpoints, {len(source.skipped)} skipped"]
    for i in source.items:
        place = [f"step {i.step:,}"] if i.step is not None else []
        place += [f"{i.tokens:,} tokens"] if i.tokens is not None else []
        place += [f"LR {i.lr:.3g}"] if i.lr is not None else []
        lines.append(f"  {i.name}  {_mb(i.size)}" + (f"  ({', '.join(place)})" if place else ""))
    lines += [f"  {s}" for s in source.skipped]
    if source.plan is not None:
        lines.append(source.plan.describe(asked.delete))
        if asked.delete and asked.window > 1:
            lines.append(
                f"disk: {asked.window} checkpoints at once for each average of neighbours, downloaded again"
            )
    else:
        lines.append(f"disk: nothing to download; {_mb(size)} for each average of neighbours")
    tokens = asked.tokens or config.evaluation.tokens
    calibrated = config.calibration.sequences * config.calibration.length * (asked.method == "gptq")
    # 2 operations per weight and token; calibration passes through every block twice and makes Hessians
    operations = 2 * size / 2 * (tokens * (1 + len(asked.bits)) + 3 * calibrated * len(asked.bits))
    count = len(source.items) + (len(asked.bits) if asked.window > 1 else 0)
    speed = devices.product_speed(devices.pick(config.device), config.precision)
    lines.append(
        f"time: about {_duration(count * operations / speed + 2 * count)} on {config.device}, from the size of the weights "
        f"(as if two bytes each), {tokens:,} evaluation tokens and the speed of a matrix product measured just now "
        f"({speed / 1e9:.0f} GFLOP/s, one process); good to a factor of three, downloads not counted"
    )
    need = 4 * size / 2**30
    if need > 0.8 * psutil.virtual_memory().total / 2**30:
        lines.append(
            f"memory: about {need:.0f} GiB for a whole model, more than this machine has: block by block instead"
        )
    return lines


def write_average(
    source: Source, out: Path, window: int, interval: int = 1, last: str | None = None
) -> list[str]:
    """LAWA of a source's checkpoints, written to ``out`` as a normal checkpoint with its recipe.

    Args:
        last: the newest member: a checkpoint's name, its step, or its tokens (``20480000``, ``20.48M``, ``5B``);
            None is the source's last.

    Returns:
        The names of the members in order.

    Raises:
        UserError: too few checkpoints, an unknown ``last``, or an ``out`` that holds something else.
    """
    if out.exists() and not (out / averaging.RECIPE).is_file():
        raise UserError(f"{out}: exists and is no average; give another --out")
    items = source.items[: _last(source, last) + 1]
    members = [items[i].name for i in averaging.lawa_indices(len(items), window, interval)]
    missing: list[Skipped] = []
    found = {c.name: c for c in sources.obtain(source.only(members), report=missing.append)}
    if missing:
        raise UserError(f"no average: {missing[0]}")
    averaging.average(
        [found[m].path for m in members], out, kind="lawa", details={"window": window, "interval": interval}
    )
    return members


# --- one measurement of a trajectory ---


class _Trial:
    """State of ``measure_source``: the text and quantizers chosen on the first checkpoint, what was skipped."""

    def __init__(
        self, asked: Request, config: MeasureConfig, source: Source, work: Path, skipped: list[Skipped]
    ) -> None:
        self.asked, self.base, self.source, self.work, self.skipped = asked, config, source, work, skipped
        self.config: MeasureConfig | None = None
        self.texts: Texts | None = None
        self.notes: list[str] = []
        self.names: list[str] = []  # of the measured checkpoints, in order

    def skip(self, s: Skipped) -> None:
        self.skipped.append(s)
        progress.say(str(s))

    def points(self) -> pd.DataFrame:
        """The rows of all checkpoints."""
        delete = self.asked.delete and self.source.plan is not None
        parts, ready = [], []
        coming = sources.obtain(self.source, delete_after=delete, report=self.skip, say=progress.say)
        for c in coming:
            self.prepare(c)
            if delete:  # measured before it goes
                parts.append(self.measured(self.source.name, [c]))
            else:
                ready.append(c)
        if ready:
            parts.append(self.measured(self.source.name, ready))
        parts = [p for p in parts if len(p)]
        if not parts:
            raise UserError(f"{self.source.title}: nothing could be measured ({self.skipped[-1]})")
        table = pd.concat(parts, ignore_index=True).assign(kind="checkpoint", members=None)
        done = set(table["checkpoint"])
        self.names = [i.name for i in self.source.items if i.name in done]
        return table

    def best(self, table: pd.DataFrame) -> list[dict[str, Any]]:
        found = best(table)
        if self.asked.window > 1 and len(self.names) > 1:
            found = [
                b | {"members": neighbours(self.names, b["checkpoint"], self.asked.window)} for b in found
            ]
        return found

    def averages(self, table: pd.DataFrame, found: list[dict[str, Any]]) -> pd.DataFrame:
        """The rows of the averages around the best checkpoints."""
        wanted = list(dict.fromkeys(tuple(b["members"]) for b in found if "members" in b))
        if not wanted:
            return pd.DataFrame()
        parts = []
        every = sorted({m for members in wanted for m in members}, key=self.names.index)
        part = self.source.only(every)  # where they were deleted after use, they are fetched once more
        try:
            here = {c.name: c for c in sources.obtain(part, report=self.skip, say=lambda _: None)}
        except UserError as e:
            self.skip(Skipped("averages of neighbours", str(e)))
            return pd.DataFrame()
        for members in wanted:
            if any(m not in here for m in members):
                continue
            try:
                c = self.average([here[m] for m in members])
            except UserError as e:
                self.skip(Skipped(f"average of {members[0]} to {members[-1]}", str(e)))
                continue
            rows = self.measured("average", [c])
            parts.append(rows.assign(kind="average", members=" ".join(members)))
            if self.asked.delete:
                shutil.rmtree(c.path)
        if self.asked.delete and part.plan is not None:
            hub.forget(part.plan)
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()

    def average(self, members: list[Checkpoint]) -> Checkpoint:
        """The mean of ``members`` as a checkpoint in the work folder, made once."""
        out = self.work / "averages" / digest([c.weights_id for c in members])
        if not (out / averaging.RECIPE).is_file():
            averaging.average([c.path for c in members], out, kind="average of neighbours")
        last = members[-1]
        return Checkpoint(
            f"average-{last.name}-{len(members)}",
            last.tokens,
            last.step,
            None,
            "average",
            out,
            hub.weights_id(out),
        )

    def measured(self, run: str, points: list[Checkpoint]) -> pd.DataFrame:
        """The rows of ``points``; one that fails is skipped."""
        workers = self.workers(points)
        args = (self.config, self.texts.corpus, self.work)
        try:
            return measure(self.source.title, {run: points}, *args, workers)
        except UserError:
            pass  # some failed: the finished rows are kept, so one by one costs only the failing ones again
        parts = []
        for c in points:
            try:
                parts.append(measure(self.source.title, {run: [c]}, *args, 1))
            except UserError as e:
                self.skip(Skipped(c.name, str(e).partition(f"{run}/{c.name}: ")[2] or str(e)))
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()

    def workers(self, points: list[Checkpoint]) -> int:
        """As many as were asked for and fit the memory, with three copies of the weights in float32 each."""
        size = max(i.size for i in self.source.items)
        fit = int(0.8 * psutil.virtual_memory().total / (1.5 * 2**30 + 6 * size))
        return max(1, min(self.asked.workers or 1, fit, len(points)))

    def prepare(self, c: Checkpoint) -> None:
        """Choose text and quantizers on the first checkpoint."""
        if self.config is not None:
            return
        model = json.loads((c.path / "config.json").read_text(encoding="utf-8"))
        base = self.base
        if self.asked.tokens:
            base = replace(base, evaluation=replace(base.evaluation, tokens=self.asked.tokens))
        self.texts = texts(
            self.tokenizer(c), model.get("max_position_embeddings") or base.evaluation.length, base, self.work,
            evaluation=Path(self.asked.evaluation) if self.asked.evaluation else None,
            calibration=Path(self.asked.calibration) if self.asked.calibration else None,
            length=self.asked.length,
        )  # fmt: skip
        widths = _widths(model)
        group = fitting_group(widths) if self.asked.group_size is None else self.asked.group_size
        if self.asked.group_size is None and group != GROUP:
            self.notes.append(
                f"group size {group}: the largest up to {GROUP} that divides the widths {', '.join(map(str, widths))}"
            )
        self.notes += self.texts.notes
        self.config = replace(
            base,
            evaluation=self.texts.evaluation,
            calibration=self.texts.calibration,
            quantizers=tuple(_spec(self.asked, b, group) for b in self.asked.bits),
        )

    def tokenizer(self, c: Checkpoint) -> Path | None:
        """A folder with the tokenizer: the checkpoint's, the one above it, or the family's own."""
        if self.source.tokenizer is not None:
            return hub.fetch_tokenizer(self.source.plan, self.source.tokenizer)
        for folder in (c.path, self.source.folder):
            if folder is not None and any(hub.TOKENIZER_FILES.fullmatch(p.name) for p in folder.iterdir()):
                return folder
        return None


def _spec(asked: Request, bits: int, group: int) -> QuantSpec:
    return load(QuantSpec, {"method": asked.method, "bits": bits, "group_size": group}, "quantizer")


def _widths(model: dict[str, Any]) -> list[int]:
    """Input columns of the linear layers in the blocks, from a model's configuration."""
    width = model["hidden_size"]
    heads = (model.get("head_dim") or width // model["num_attention_heads"]) * model["num_attention_heads"]
    return sorted({width, heads, model.get("intermediate_size") or 4 * width})


def _gain(b: dict[str, Any], averages: pd.DataFrame) -> dict[str, float]:
    """The quantized loss of the average around a best checkpoint."""
    if "members" not in b or averages.empty:
        return {}
    same = (averages["members"] == " ".join(b["members"])) & (averages["bits"] == b["bits"])
    rows = averages[same & (averages["method"] == b["method"])]
    if rows.empty:
        return {}
    keys = {"average": "ce", "average_fp": "ce_fp", "average_error": "relative_error"}
    return {k: float(rows[v].iloc[0]) for k, v in keys.items()}


def _write(result: Result, asked: Request, out: Path) -> None:
    table = result.table.drop(columns=[c for c in ("versions", "key") if c in result.table])
    write_csv(table, out / "table.csv")
    if result.source.family is not None:
        write_csv(table, paths.tables() / "wild" / f"{result.source.family}.csv")
    checked = table[table["kind"] == "checkpoint"]["checkpoint"].nunique()
    write_json(
        out / REPORT,
        {
            "location": _location(result.source, asked),
            "title": result.source.title,
            "family": result.source.family,
            "checkpoints": checked,
            "skipped": [str(s) for s in result.skipped],
            "notes": list(result.notes),
            "caveats": list(result.source.caveats),
            "axis": result.axis,
            "words": words(result),
            "best": list(result.best),
            "request": asdict(asked),
            "versions": provenance.versions(),
        },
    )


def _location(source: Source, asked: Request) -> str:
    if source.folder is None:
        return source.plan.repo
    folder = source.folder.resolve()
    return folder.relative_to(paths.root()).as_posix() if folder.is_relative_to(paths.root()) else str(folder)


def _last(source: Source, last: str | None) -> int:
    """Index of the newest member of an average."""
    if last is None:
        return len(source.items) - 1
    names = [i.name for i in source.items]
    if last in names:
        return names.index(last)
    number = _number(last)
    for i, item in enumerate(source.items):
        if number is not None and number in (item.step, item.tokens):
            return i
    known = sorted({str(i.step) for i in source.items if i.step is not None}, key=int)
    near = hub.nearest(last, [*names, *known])
    raise UserError(
        f"--last {last}: no checkpoint of this name, step or tokens"
        + (f"; nearest is '{near}'" if near else "")
    )


def _number(text: str) -> int | None:
    """``20480000`` or ``20.48M``."""
    unit = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}.get(text[-1:].upper(), 1)
    try:
        return round(float(text.rstrip("kKmMbBtT").replace("_", "").replace(",", "")) * unit)
    except ValueError:
        return None


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _mb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.2f} MB"


def read_report(out: Path) -> dict[str, Any]:
    """What ``measure_source`` left in ``out``."""
    return read_json(out / REPORT, hint="measure the trajectory first")
