"""Two functions side by side, each on one thread: interleaved runs, the median ratio, and the file of results.

Import before torch: it limits the threads of the libraries.
"""

from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"

import argparse  # noqa: E402
import json  # noqa: E402
import multiprocessing  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from multiprocessing.connection import Connection  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from ruamel.yaml import YAML  # noqa: E402

from ptq_dynamics import settings  # noqa: E402
from ptq_dynamics.core import devices, provenance  # noqa: E402
from ptq_dynamics.core.config import load  # noqa: E402
from ptq_dynamics.core.files import write_json  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results.json"
os.environ["PTQ_DYNAMICS_ROOT"] = str(ROOT)
torch.set_num_threads(1)
PRECISION = devices.precision("auto", "cpu")

Make = Callable[..., Callable[[], object]]


def rounds(description: str, default: int) -> int:
    """``--rounds`` of the command line."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=default)
    return parser.parse_args().rounds


def mini() -> settings.Params:
    """The profile that the rates are quoted for, whatever params.yaml holds at the moment."""
    return load(settings.Params, YAML(typ="safe", pure=True).load(settings.compose("mini")), "conf/mini.yaml")


@dataclass(frozen=True)
class Comparison:
    """Seconds of one call, medians over the rounds; ratios above 1 mean that ours is faster."""

    ours: float
    peer: float
    ratio: float  # median of the rounds' ratios
    lowest: float
    highest: float
    first: tuple[object, object]  # what the first, untimed calls returned: ours, the peer's


def compare(make_ours: Make, make_peer: Make, args: tuple, rounds: int, calls: int = 1) -> Comparison:
    """Wall clock of two functions, taken in turns; the one that goes first alternates.

    Each lives in a process of its own, as its user would run it (neither sees the other's allocator, thread or
    compiler settings), and only one works at a time. Each is called twice before, untimed (compilation, caches).

    Args:
        make_ours: called once in its process with ``args``; returns the function to time.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for make in (make_ours, make_peer):
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, make, args), daemon=True)
        process.start()
        there.close()  # so that a process that dies is noticed here
        pipes.append(here)
        processes.append(process)
        here.send(None)
        here.poll(None)  # ready before the other starts
    first = tuple(pipe.recv() for pipe in pipes)
    seconds = []
    for i in range(rounds):
        took = {}
        for side in (0, 1) if i % 2 == 0 else (1, 0):
            pipes[side].send(calls)
            took[side] = pipes[side].recv()
        seconds.append((took[0], took[1]))
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.close()
        process.join()
    ratios = [p / o for o, p in seconds]
    return Comparison(
        ours=statistics.median(o for o, _ in seconds),
        peer=statistics.median(p for _, p in seconds),
        ratio=statistics.median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
        first=first,
    )


def _serve(pipe: Connection, make: Make, args: tuple) -> None:
    pipe.recv()
    function = make(*args)
    first = function()
    function()
    pipe.send(first)
    while True:
        try:
            calls = pipe.recv()
        except EOFError:
            return
        start = time.perf_counter()
        for _ in range(calls):
            function()
        pipe.send((time.perf_counter() - start) / calls)


def record(name: str, ours: float, peer: float, ratio: float, peer_name: str) -> None:
    """Put one comparison into results.json; an older one of the same name is replaced."""
    hardware = provenance.hardware()
    entry = {
        "name": name,
        "ours": float(f"{ours:.4g}"),
        "peer": float(f"{peer:.4g}"),
        "ratio": round(ratio, 2),
        "peer_name": peer_name,
        "machine": f"{hardware['processor']}, 1 thread of {hardware['cores']} cores; precision auto is {PRECISION}",
        "commit": _commit(),
    }
    old = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    rest = [e for e in old if e["name"] != name]
    write_json(RESULTS, sorted([*rest, entry], key=lambda e: e["name"]))


def _commit() -> str:
    """The checkout's commit; ``-dirty`` when tracked files other than results.json differ."""
    git = ["git", "-C", str(ROOT)]
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RESULTS.relative_to(ROOT)}"],
        capture_output=True, text=True,
    )  # fmt: skip
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    if changed.returncode or head.returncode:
        return "unknown"
    return head.stdout.strip() + ("-dirty" if changed.stdout else "")
