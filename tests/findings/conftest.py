from __future__ import annotations

from pathlib import Path

import pytest
import synthetic


@pytest.fixture
def rules_root(tmp_path, monkeypatch) -> Path:
    """A root with this repository's rules and the paper's numbers, and no tables."""
    synthetic.write(tmp_path)
    monkeypatch.setenv("PTQ_DYNAMICS_ROOT", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="session")
def tables_root(tmp_path_factory) -> Path:
    """A root with synthetic tables of all studies, three seeds; read only but for reports that no test reads."""
    root = tmp_path_factory.mktemp("tables")
    synthetic.write(root, **synthetic.studies())
    return root


@pytest.fixture
def one_seed_root(tmp_path, monkeypatch) -> Path:
    """A root with tables as a toy profile makes them: one seed, few values, some errors below 0."""
    synthetic.write(tmp_path, **synthetic.toy_studies())
    monkeypatch.setenv("PTQ_DYNAMICS_ROOT", str(tmp_path))
    return tmp_path
