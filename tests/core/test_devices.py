from __future__ import annotations

import pytest
import torch

from ptq_dynamics.core import devices
from ptq_dynamics.core.errors import UserError


def test_devices_by_name(monkeypatch):
    assert devices.pick("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.pick("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert devices.pick("auto") == torch.device("cuda")


def test_devices_that_are_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert devices.pick("cuda:0") == torch.device("cuda:0")
    with pytest.raises(UserError, match="device 'cuda:1': this machine has 1 CUDA devices; use auto or cpu"):
        devices.pick("cuda:1")
    with pytest.raises(UserError, match="device 'gpu': unknown; use auto, cpu, cuda or cuda:N"):
        devices.pick("gpu")
