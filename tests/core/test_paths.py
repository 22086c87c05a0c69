from __future__ import annotations

import pytest

from ptq_dynamics.core import paths
from ptq_dynamics.core.errors import UserError


def test_the_root_is_found_upward_or_named(tmp_path, monkeypatch):
    monkeypatch.delenv("PTQ_DYNAMICS_ROOT", raising=False)
    (tmp_path / "dvc.yaml").write_text("")
    (tmp_path / "conf").mkdir()
    (tmp_path / "notebooks" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "notebooks" / "deep")
    assert paths.root() == tmp_path.resolve()
    monkeypatch.setenv("PTQ_DYNAMICS_ROOT", str(tmp_path / "conf"))
    assert paths.root() == (tmp_path / "conf").resolve()


def test_no_root_here(tmp_path, monkeypatch):
    monkeypatch.delenv("PTQ_DYNAMICS_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="run inside the repository or set PTQ_DYNAMICS_ROOT"):
        paths.root()


def test_everything_lies_under_the_root(tmp_path, monkeypatch):
    monkeypatch.setenv("PTQ_DYNAMICS_ROOT", str(tmp_path))
    made = [paths.params_file(), paths.corpus(), paths.runs("a"), paths.measurements("a"), paths.tables(),
            paths.figures(), paths.claims(), paths.executed(), paths.downloads(), paths.reference()]  # fmt: skip
    assert all(p.is_relative_to(tmp_path.resolve()) for p in made) and len(set(made)) == len(made)
    assert paths.relative(tmp_path / "data" / "x.csv") == "data/x.csv"
    assert paths.runs("a") != paths.runs("b")
