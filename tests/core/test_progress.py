from __future__ import annotations

import json
import os

from ptq_dynamics.core import progress


def lines(path):
    return [json.loads(x) for x in path.read_text().splitlines()]


def test_reports_go_to_the_file_at_most_once_a_second_the_last_always(tmp_path, monkeypatch):
    file = tmp_path / "p"
    monkeypatch.setenv(progress.ENV, str(file))
    now = iter([10.0, 10.2, 11.1, 11.2])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    progress._last.clear()
    progress.announce("train", 100, "tok")
    for done in (10, 20, 30):
        progress.report("a", done)
    progress.report("a", 40, final=True)
    assert [x.get("done") for x in lines(file)] == [None, 10, 30, 40]
    assert lines(file)[0] == {"title": "train", "total": 100, "unit": "tok"}


def test_a_bar_over_all_members(capsys, monkeypatch):
    monkeypatch.delenv(progress.ENV, raising=False)
    with progress.watched(interval=0.01):
        file = os.environ[progress.ENV]
        with progress.watched():  # nested: the outermost draws
            assert os.environ[progress.ENV] == file
        progress.announce("train toy: 2 runs", 200, "tok")
        progress.report("a", 100, resumed=True)
        progress.report("b", 40, final=True)
        progress.report("b", 100, final=True)
        progress.say("a: goes on from step 3")
    told = capsys.readouterr().err
    assert "train toy: 2 runs: 100%" in told and "200/200" in told and "a: goes on from step 3" in told
    assert progress.ENV not in os.environ and not os.path.exists(file)


def test_outside_a_watch_only_what_is_said_is_printed(capsys, monkeypatch):
    monkeypatch.delenv(progress.ENV, raising=False)
    progress.announce("x", 1, "y")
    progress.report("a", 1, final=True)
    progress.say("told")
    assert capsys.readouterr().err == "told\n"
