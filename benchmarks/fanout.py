"""One study with two workers against the same study with one: wall clock of the whole of `pretrain`, its start included.

The study: four seeds of the mini profile's model, 4.1M tokens each. Every run is trained anew in a folder of its own, by
a process of its own, compiled code from a warm cache. Needs the corpus (`dvc repro corpus`) and both cores.

    python benchmarks/fanout.py [--rounds 3]
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

from ptq_dynamics.training.study import Member, pretrain

TOKENS = 4_096_000


def train(root: str, workers: int) -> None:
    """The study, under ``root``."""
    known = common.mini()
    os.environ["PTQ_DYNAMICS_ROOT"] = root
    study = dataclasses.replace(
        known.studies["token_budgets"], seeds=(0, 1, 2, 3), checkpoint_tokens=TOKENS, dense_tokens=None,
        members={"trunk": Member(shape="constant", tokens=TOKENS, peak_lr=0.01)},
    )  # fmt: skip
    pretrain("fanout", study, known.machine, workers)


def seconds(workers: int) -> float:
    """Wall clock of ``train(workers)`` in a fresh folder and process."""
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "data").mkdir()
        (Path(root) / "data" / "corpus").symlink_to(common.ROOT / "data" / "corpus")
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, __file__, "--train", root, str(workers)], check=True, stderr=subprocess.DEVNULL
        )
        return time.perf_counter() - start


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(given.train[0], int(given.train[1]))
        sys.exit()
    seconds(2)  # fills the cache of compiled code
    rounds = [{n: seconds(n) for n in ((2, 1) if i % 2 else (1, 2))} for i in range(given.rounds)]
    ratios = [r[1] / r[2] for r in rounds]
    print(f"one worker over two: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    common.record(
        "pretraining a study of four runs, seconds, two workers", statistics.median(r[2] for r in rounds),
        statistics.median(r[1] for r in rounds), statistics.median(ratios), "one worker",
    )  # fmt: skip
