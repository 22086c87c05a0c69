from __future__ import annotations

from pathlib import Path

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


@pytest.mark.parametrize("flags", [(True, False), (False, True), (False, False)])
def test_automatic_precision_follows_the_hardware(monkeypatch, flags):
    for name, there in zip(("_is_avx512_bf16_supported", "_is_amx_tile_supported"), flags, strict=True):
        monkeypatch.setattr(torch.cpu, name, lambda there=there: there)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    assert devices.precision("auto", "cpu") == ("bf16" if any(flags) else "fp32")
    assert devices.precision("auto", torch.device("cuda")) == "fp32"  # emulated is not native
    assert [devices.precision(p, "cpu") for p in ("bf16", "fp32")] == ["bf16", "fp32"]


@pytest.mark.skipif(
    not Path("/proc/cpuinfo").exists(), reason="only Linux tells a processor's abilities like this"
)
def test_torchs_own_word_is_the_kernels():
    told = set(Path("/proc/cpuinfo").read_text().split())
    assert devices.precision("auto", "cpu") == ("bf16" if told & {"avx512_bf16", "amx_tile"} else "fp32")


def test_the_speed_of_a_product_is_that_of_its_dtype(monkeypatch):
    seen = []
    real = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *a, **k: seen.append(k["dtype"]) or real(*a, **k))
    assert devices.product_speed("cpu", "fp32") > 1e8
    assert devices.product_speed("cpu", "bf16") > 1e6
    assert seen == [torch.float32, torch.bfloat16]
