from __future__ import annotations

import os
import signal
import time

import pytest

from ptq_dynamics.core import fanout
from ptq_dynamics.core.errors import UserError
from ptq_dynamics.core.fanout import Task, side_by_side


def work(folder, name, value):
    """Notes that it ran; fails, or dies so often, as told by ``value``."""
    with open(folder / f"{name}.ran", "a") as f:
        f.write(f"{os.getpid()}\n")
    if value == "user error":
        raise UserError(f"{name}: bad input; mend it")
    if value == "bug":
        raise ZeroDivisionError("of ours")
    if value == "slow":
        time.sleep(0.1)
    deaths = {"dies once": 1, "dies always": 99}.get(value, 0)
    if len((folder / f"{name}.ran").read_text().splitlines()) <= deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def tasks(folder, **members):
    """A task per member: its value, or (value, after)."""
    out = []
    for name, value in members.items():
        value, after = value if isinstance(value, tuple) else (value, ())
        out.append(Task(name, work, (folder, name, value), folder / f"{name}.error.txt", after, 0.1))
    return out


@pytest.fixture(params=[1, 2])
def workers(request, forked_workers):
    return request.param


def test_results_by_key_and_parents_first(tmp_path, workers):
    made = tasks(tmp_path, a=1, b=2, c=(3, ("a",)), d=(4, ("c", "b")))
    assert fanout.run(made, workers) == {"a": 1, "b": 2, "c": 3, "d": 4}
    times = {n: (tmp_path / f"{n}.ran").stat().st_mtime_ns for n in "abcd"}
    assert times["a"] < times["c"] < times["d"] and times["b"] < times["d"]


def test_failures_are_named_the_others_finish_and_dependents_do_not_run(tmp_path, workers):
    made = tasks(
        tmp_path,
        a="user error",
        b="bug",
        good=5,
        child=(6, ("b",)),
        grandchild=(7, ("child",)),
        other=(8, ("good",)),
    )
    with pytest.raises(UserError) as e:
        fanout.run(made, workers)
    told = str(e.value)
    assert "\n" not in told and told.startswith("4 of 6 members failed (2 finished and are kept): ")
    assert "a: a: bad input; mend it" in told
    assert f"b: ZeroDivisionError: of ours (traceback in {tmp_path / 'b.error.txt'})" in told
    assert told.count("not run, since what it starts from failed") == 2
    assert sorted(p.stem for p in tmp_path.glob("*.ran")) == ["a", "b", "good", "other"]
    log = (tmp_path / "b.error.txt").read_text()
    assert "Traceback" in log and "ZeroDivisionError: of ours" in log
    assert not (tmp_path / "a.error.txt").exists()  # the line says it all


def test_a_log_of_a_failure_since_mended_goes(tmp_path):
    (tmp_path / "a.error.txt").write_text("Traceback")
    fanout.run(tasks(tmp_path, a=1), 1)
    assert not (tmp_path / "a.error.txt").exists()


def test_a_worker_that_dies_is_replaced(tmp_path, forked_workers):
    assert fanout.run(tasks(tmp_path, once="dies once", good=1), 2) == {"once": "dies once", "good": 1}
    assert len(set((tmp_path / "once.ran").read_text().splitlines())) == 2  # another process


def test_a_member_that_always_kills_its_worker_is_named_and_blamed_alone(tmp_path, forked_workers):
    with pytest.raises(UserError) as e:
        fanout.run(
            tasks(tmp_path, always="dies always", **dict.fromkeys("abcdef", "slow"), child=(5, ("always",))),
            2,
        )
    told = str(e.value)
    assert told.startswith(
        "2 of 8 members failed (6 finished and are kept): always: its worker died three times"
    )
    assert told.endswith("child: not run, since what it starts from failed")


def test_no_task_no_work():
    assert fanout.run([], 4) == {}


@pytest.mark.parametrize(
    ("needs", "workers", "memory", "expected"),
    [
        ([1, 1, 1, 1], 2, 100, 2),  # as asked for
        ([1, 1], 8, 100, 2),  # not more than tasks
        ([1.5] * 8, 8, 3.2, 2),  # as many as fit
        ([0.1, 2, 0.1, 0.1], 4, 4.5, 2),  # of the largest
        ([8] * 4, 4, 3.2, 1),  # one has to run, whatever it needs
    ],
)
def test_no_more_side_by_side_than_fit_the_machine(needs, workers, memory, expected):
    made = [Task(str(i), work, (), None, memory_gib=n) for i, n in enumerate(needs)]
    assert side_by_side(made, workers, memory) == expected
