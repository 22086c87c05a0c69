"""One study with two workers against the same study with one: wall clock of the whole of `pretrain`, its start included.

The study: two seeds of the mini profile's weight_decay, 8 runs of 4.1M tokens, trained anew in a folder of its own, by a
process of its own, compiled code from a warm cache. Starting up (imports, the cluster, tracing the compiled
step) takes as long whatever the study, so studies of a few small runs gain less. Needs the corpus
(`dvc repro corpus`) and both cores.

    python benchmarks/fanout.py [--rounds 1]
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common

from ptq_dynamics.training.study import pretrain

TOKENS, WARM_UP = 4_096_000, 409_600  # to a run: the study's own, and what fills the cache of compiled code


def train(root: str, workers: int, tokens: int) -> None:
    """The study, under ``root``, with runs of ``tokens``."""
    known = common.mini()
    os.environ["PTQ_DYNAMICS_ROOT"] = root
    study = known.studies["weight_decay"]
    members = {name: dataclasses.replace(m, tokens=tokens) for name, m in study.members.items()}
    study = dataclasses.replace(study, seeds=study.seeds[:2], members=members)
    pretrain("fanout", study, known.machine, workers)


def seconds(workers: int, tokens: int = TOKENS) -> float:
    """Wall clock of ``train`` in a fresh folder and process."""
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "data").mkdir()
        (Path(root) / "data" / "corpus").symlink_to(common.ROOT / "data" / "corpus")
        command = [sys.executable, __file__, "--train", root, str(workers), str(tokens)]
        start = time.perf_counter()
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        return time.perf_counter() - start


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(given.train[0], *map(int, given.train[1:]))
        sys.exit()
    seconds(2, WARM_UP)
    rounds = [{n: seconds(n) for n in ((2, 1) if i % 2 else (1, 2))} for i in range(given.rounds)]
    ratios = [r[1] / r[2] for r in rounds]
    print(f"one worker over two: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    common.record(
        "pretraining eight runs of the study weight_decay, seconds, two workers", statistics.median(r[2] for r in rounds),
        statistics.median(r[1] for r in rounds), statistics.median(ratios), "one worker",
    )  # fmt: skip
