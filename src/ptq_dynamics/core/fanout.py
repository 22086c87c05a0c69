"""Members of a study side by side over Dask: kept when finished, named when failed, retried when a worker dies."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import progress
from .errors import UserError
from .files import write_text


@dataclass(frozen=True)
class Task:
    """One member: ``function(*args)`` in a worker, after the tasks named in ``after`` have succeeded.

    Attributes:
        key: unique readable name.
        memory_gib: what it needs at its peak; no more members run at once than fit the machine.
        log: where its traceback goes if it fails.
    """

    key: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    log: Path
    after: tuple[str, ...] = ()
    memory_gib: float = 1.0


@dataclass(frozen=True)
class _Outcome:
    value: Any = None
    error: str | None = None


def run(tasks: Sequence[Task], workers: int) -> dict[str, Any]:
    """Run ``tasks`` (parents before children) on ``workers`` one-thread processes; results by key.

    A worker that dies (killed, out of memory) is replaced and its task starts again, up to twice; tasks resume from
    what they saved. A task that fails does not stop the others, save those that come after it.

    Raises:
        UserError: at the end, when members failed; one line that names each with its log.
    """
    if not tasks:
        return {}
    with progress.watched():
        outcomes = _local(tasks) if workers == 1 else _dask(tasks, workers)
    failed = {k: o.error for k, o in outcomes.items() if o.error is not None}
    if failed:
        rest = len(outcomes) - len(failed)
        raise UserError(f"{len(failed)} of {len(outcomes)} members failed ({rest} finished and are kept): " + "; ".join(
            f"{k}: {e}" for k, e in failed.items()))  # fmt: skip
    return {k: o.value for k, o in outcomes.items()}


def _local(tasks: Sequence[Task]) -> dict[str, _Outcome]:
    outcomes: dict[str, _Outcome] = {}
    for t in tasks:
        outcomes[t.key] = _guarded(t, *(outcomes[k] for k in t.after))
    return outcomes


def _dask(tasks: Sequence[Task], workers: int) -> dict[str, _Outcome]:
    import dask
    from distributed import Client, LocalCluster

    env = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")}
    if path := os.environ.get(progress.ENV):
        env[progress.ENV] = path
    quiet = logging.getLogger("distributed").level
    settings = {
        "distributed.scheduler.allowed-failures": 2,
        "distributed.nanny.pre-spawn-environ": env,
        "distributed.comm.timeouts.tcp": "120s",
        "distributed.scheduler.worker-ttl": None,
        "distributed.worker.daemon": False,
        # what feeds a dashboard that is off: a look at every thread each 10 ms, a tick each 20 ms in every process (with
        # the tick two workers train 5 % slower)
        "distributed.worker.profile.enabled": False,
        "distributed.admin.tick.interval": "2s",
        "distributed.admin.system-monitor.interval": "10s",
    }
    n = side_by_side(tasks, workers, _memory_gib())
    with dask.config.set(settings):
        for name in ("distributed", "distributed.nanny", "distributed.scheduler", "distributed.worker"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        cluster = LocalCluster(
            n_workers=n, threads_per_worker=1, processes=True, memory_limit=None, dashboard_address=None
        )  # fmt: skip
        with cluster, Client(cluster) as client:
            outcomes = _feed(client, tasks, n)
        logging.getLogger("distributed").setLevel(quiet)
    return {t.key: outcomes[t.key] for t in tasks}


def _feed(client: Any, tasks: Sequence[Task], n: int) -> dict[str, _Outcome]:
    """Keep ``n`` tasks under way, one per worker: Dask blames a worker's death on all that it was given."""
    from distributed import KilledWorker, wait

    outcomes: dict[str, _Outcome] = {}
    waiting, running = list(tasks), {}
    while waiting or running:
        for t in [t for t in waiting if all(k in outcomes for k in t.after)][: n - len(running)]:
            waiting.remove(t)
            before = (outcomes[k] for k in t.after)
            running[client.submit(_guarded, t, *before, key=t.key, retries=0, pure=False)] = t
        wait(list(running), return_when="FIRST_COMPLETED")
        for future in [f for f in running if f.done()]:
            t = running.pop(future)
            try:
                outcomes[t.key] = future.result()
            except KilledWorker:
                outcomes[t.key] = _Outcome(error="its worker died three times (out of memory?)")
    return outcomes


def _guarded(task: Task, *before: _Outcome) -> _Outcome:
    """Run one task; what it raises becomes a value, so that the others go on."""
    if any(b.error for b in before):
        return _Outcome(error="not run, since what it starts from failed")
    task.log.unlink(missing_ok=True)  # of a failure since mended
    try:
        return _Outcome(value=task.function(*task.args))
    except UserError as e:
        return _Outcome(error=str(e))
    except Exception as e:
        write_text(task.log, traceback.format_exc())
        return _Outcome(error=f"{type(e).__name__}: {e} (traceback in {task.log})")


def side_by_side(tasks: Sequence[Task], workers: int, memory_gib: float) -> int:
    """How many workers: not more than asked for, than there are tasks, or than fit ``memory_gib`` with the largest."""
    fit = int(memory_gib / max(t.memory_gib for t in tasks))
    return max(1, min(workers, len(tasks), fit))


def _memory_gib() -> float:
    import psutil

    return psutil.virtual_memory().total / 2**30 * 0.8
