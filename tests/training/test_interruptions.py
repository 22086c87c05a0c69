"""``kill -9`` in the middle of training and measuring, then the same command: all as in an undisturbed run."""

from __future__ import annotations

import signal

import psutil
import toy

from ptq_dynamics.trajectories import checkpoints

UPDATE = "ptq_dynamics.training.step.Learner.update"
RENAME = "ptq_dynamics.core.files.os.replace"  # twice per checkpoint: its description, then the folder
WRITE_ROW = "ptq_dynamics.evaluation.measure._write_row"


def leftovers(folder):
    return [p for p in folder.rglob(".tmp-*")]


def test_killed_again_and_again_alone(root, finished_root):
    runs, rows = root / "data/runs/toy", root / "data/measurements/toy"
    trunk, branch = runs / "trunk-seed0", runs / "trunk-cooldown-0.00192M-seed0"

    assert toy.run_until(root, UPDATE, 23) == -signal.SIGKILL
    assert checkpoints.read(trunk / "resume").step == 20 and not (trunk / "run.json").exists()

    # goes on from 20; saves at 25; dies with the checkpoint of step 30 written but not renamed
    assert toy.run_until(root, RENAME, 4) == -signal.SIGKILL
    assert checkpoints.read(trunk / "resume").step == 25 and not (trunk / "step-0000030").exists()
    assert leftovers(trunk)

    # dies with the old save of step 30 deleted and the new one not yet in its place
    assert toy.run_until(root, RENAME, 6) == -signal.SIGKILL
    assert not (trunk / "resume").exists() and (trunk / "step-0000030").exists()

    assert (
        toy.run_until(root, UPDATE, 103) == -signal.SIGKILL
    )  # from the checkpoint of 30: two trunks, then a branch
    assert checkpoints.read(branch / "resume").step == 30 + 10
    kept = (trunk / "run.json").stat().st_mtime_ns

    assert toy.run_until(root, WRITE_ROW, 5) == -signal.SIGKILL
    assert len(list((rows / "rows").iterdir())) == 4 and not (rows / "table.parquet").exists()

    assert toy.run_until(root) == 0
    assert (trunk / "run.json").stat().st_mtime_ns == kept  # what was finished was not run again
    assert toy.results(root) == toy.results(finished_root)


def descendants(process):
    return psutil.Process(process.pid).children(recursive=True)


def test_two_workers_killed_with_their_command_and_one_by_its_pid(root, finished_root):
    runs = root / "data/runs/toy"
    first = toy.process(toy.pretrain_with_two_workers, root)
    toy.wait_for(root, "runs/toy/trunk-seed*/resume/checkpoint.json", first.is_alive)
    children = descendants(first)
    first.kill()
    first.join()
    # none goes on writing behind the back of the next command
    assert psutil.wait_procs(children, timeout=30)[1] == []
    assert not list(runs.glob("*/run.json"))

    second = toy.process(toy.pretrain_with_two_workers, root)
    toy.wait_for(root, "runs/toy/trunk-cooldown-*/resume/checkpoint.json", second.is_alive)
    parents = {p.ppid() for p in descendants(second)}
    workers = [
        p for p in descendants(second) if p.pid not in parents and "forkserver" in " ".join(p.cmdline())
    ]
    assert len(workers) == 2
    workers[0].kill()
    second.join(90)
    assert second.exitcode == 0
    expected = {k: v for k, v in toy.results(finished_root).items() if k not in ("rows", "table")}
    assert toy.results(root) == expected
