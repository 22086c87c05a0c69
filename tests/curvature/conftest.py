from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import exact  # noqa: E402


@pytest.fixture(scope="session")
def small():
    """(model, tokens) with 1,000 parameters or so; read only."""
    return exact.small_model(), exact.small_tokens()


@pytest.fixture(scope="session")
def truth(small):
    """Loss, gradient [size] and Hessian [size, size] of ``small``, float64; read only."""
    return exact.derivatives(*small)
