from __future__ import annotations

import os

# before torch: its threads would change the last bits, and two cores are shared
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
    os.environ[_name] = "1"

import shutil  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
import toy  # noqa: E402
from hypothesis import settings  # noqa: E402

torch.set_num_threads(1)
settings.register_profile("same every time", derandomize=True, deadline=None)
settings.load_profile("same every time")


@pytest.fixture(scope="session")
def shared_root(tmp_path_factory) -> Path:
    """A root with text and a corpus; read only."""
    return toy.write_root(tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="session")
def corpus(shared_root) -> Path:
    """The toy corpus, built from text files by the real corpus code; read only."""
    return shared_root / "data" / "corpus"


@pytest.fixture
def root(tmp_path, shared_root, monkeypatch) -> Path:
    """A root of the test's own, with the toy corpus."""
    shutil.copytree(shared_root, tmp_path / "root")
    monkeypatch.setenv("PTQ_DYNAMICS_ROOT", str(tmp_path / "root"))
    return tmp_path / "root"


@pytest.fixture(scope="session")
def finished_root(tmp_path_factory, shared_root) -> Path:
    """A root with the toy study trained and measured in this process, undisturbed; read only."""
    folder = tmp_path_factory.mktemp("finished") / "root"
    shutil.copytree(shared_root, folder)
    toy.run_study(folder, workers=1)
    return folder


@pytest.fixture
def own_root(finished_root, tmp_path, monkeypatch) -> Path:
    """A root of the test's own with the toy study trained and measured."""
    shutil.copytree(finished_root, tmp_path / "own")
    monkeypatch.setenv("PTQ_DYNAMICS_ROOT", str(tmp_path / "own"))
    return tmp_path / "own"


@pytest.fixture(scope="session")
def model():
    """A tiny GPTNeoX with weights large enough that its logits differ by token; read only."""
    from ptq_dynamics.models import neox

    return neox.build(toy.model_config(init_std=0.3), vocab_size=300, seed=0).eval()


@pytest.fixture
def forked_workers():
    """Dask workers come from a server that has the imports behind it: the same workers, seconds earlier."""
    with toy.forked_workers():
        yield
