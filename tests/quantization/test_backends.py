"""Other tools behind the quantizer call: what is refused, what a driver must leave, and the tools that are installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.quantization import backends
from ptq_dynamics.quantization.backends import bnb, subprocesses
from ptq_dynamics.quantization.quantizer import block_linears, quantize, restore, snapshot
from ptq_dynamics.quantization.spec import QuantSpec

TOOLS = ("gptqmodel", "bitsandbytes", "torchao")
IDS = torch.arange(64).view(4, 16) % 300
AWQ = QuantSpec(method="awq", group_size=16)


def installed(tool: str) -> bool:
    return importlib.util.find_spec(tool) is not None


def test_importing_us_imports_no_tool():
    code = (
        "import sys, ptq_dynamics.settings, ptq_dynamics.quantization.quantizer\n"
        f"print(sorted(set({TOOLS!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("nf4", "nf4 needs the extra bnb; install it with `make extras`"),
        ("awq", "awq needs the extra gptqmodel; install it with `make extras`"),
        ("torchao", "torchao needs the extra torchao; install it with `make extras`"),
        ("auto-gptq", "auto-gptq needs its own environment, environments/auto-gptq/.venv"),
    ],
)
def test_what_is_not_installed_is_one_line(model, tmp_path, monkeypatch, method, says):
    monkeypatch.setenv("PTQ_DYNAMICS_ROOT", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    before = snapshot(model)
    with pytest.raises(UserError) as e:
        quantize(model, IDS, QuantSpec(method=method, group_size=64))
    assert str(e.value).startswith(says) and "\n" not in str(e.value)
    assert all(torch.equal(w, before[n]) for n, w in snapshot(model).items())


def test_our_own_methods_need_nothing():
    assert backends.missing("gptq") is None and backends.identity("rtn") == {}


# --- the protocol, with a driver of our own ---

HALF = """
import json, pathlib, sys
from safetensors.torch import load_file, save_file
folder = pathlib.Path(sys.argv[1])
request = json.loads((folder / "request.json").read_text())
weights = load_file(folder / "source" / "model.safetensors")
assert load_file(folder / "calibration.safetensors")["ids"].shape == (4, 16)
save_file({n: weights[n + ".weight"] / 2 for n in request["names"]}, folder / "weights.safetensors")
(folder / "done.json").write_text(json.dumps({"seconds": [0.5] * request["repeat"], "versions": {}}))
"""


@pytest.fixture
def driven(tmp_path, monkeypatch):
    """Sets the text of the driver."""

    def by(text: str) -> Path:
        (tmp_path / "drive.py").write_text(text)
        return tmp_path / "drive.py"

    monkeypatch.setattr(subprocesses, "missing", lambda method: None)
    monkeypatch.setattr(subprocesses, "driver", lambda method: tmp_path / "drive.py")
    monkeypatch.setattr(subprocesses, "interpreter", lambda method: Path(sys.executable))
    return by


def test_a_driver_gives_the_weights_and_nothing_else_changes(model, driven):
    driven(HALF)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    kept = snapshot(model)
    try:
        done = quantize(model, IDS, AWQ)
        touched = {f"{n}.weight" for n in done.names}
        assert touched == {f"{n}.weight" for n in block_linears(model)}
        for n, p in model.named_parameters():
            assert torch.equal(p, before[n] / 2 if n in touched else before[n])
        assert done.layers[0].relative_weight_error == pytest.approx(0.5) and done.layers[0].damping is None
    finally:
        restore(model, kept)
    weights, told = subprocesses.run(model, list(block_linears(model)), IDS, AWQ, repeat=2)
    assert told["seconds"] == [0.5, 0.5] and len(weights) == len(kept)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("print('loading'); raise SystemExit('out of paper')", "the tool ended with status 1: out of paper"),
        ("", "no such file"),
        (
            HALF.replace('request["names"]', 'request["names"][1:]'),
            "gives no weight [48, 16] for gpt_neox.layers.0.",
        ),
        (HALF.replace("/ 2", "[:2]"), "gives no weight [48, 16] for gpt_neox.layers.0."),
    ],
)
def test_a_driver_that_fails_is_one_line_and_its_log_is_kept(model, driven, text, says):
    driven(text)
    with pytest.raises(UserError) as e:
        quantize(model, IDS, AWQ)
    told = str(e.value)
    assert says.lower() in told.lower() and "\n" not in told and told.startswith("awq: the tool ")
    log = Path(told.rsplit("(whole log: ", 1)[1].rstrip(")"))
    assert log.is_file()
    log.unlink()


def test_a_key_changes_with_the_driver(driven, monkeypatch):
    monkeypatch.setattr(subprocesses.importlib.metadata, "version", lambda tool: "1")
    driven(HALF)
    first = backends.identity("awq")
    driven(HALF + "# another\n")
    assert backends.identity("awq") != first
    driven(HALF)
    assert backends.identity("awq") == first and set(first) == {"tool", "backend"}


# --- the tools themselves, where they are installed ---


def nf4(weight: np.ndarray, block: int) -> np.ndarray:
    """NF4 by hand: the nearest of the 16 quantiles of QLoRA's appendix E, times the largest |w| of the block."""
    levels = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
              -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
              0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]  # fmt: skip
    flat = weight.reshape(-1, block)
    scale = np.abs(flat).max(1, keepdims=True)
    near = np.abs((flat / scale)[..., None] - np.array(levels)).argmin(-1)
    return (np.array(levels)[near] * scale).reshape(weight.shape)


@pytest.mark.skipif(not installed("bitsandbytes"), reason="wants the extra bnb")
def test_nf4_is_the_nearest_level_and_int8_the_nearest_of_255(model):
    names = list(block_linears(model))
    found = bnb.quantized_weights(model, names, None, QuantSpec(method="nf4", group_size=32))
    int8 = bnb.quantized_weights(model, names, None, QuantSpec(method="int8", bits=8))
    for n in names:
        w = model.get_submodule(n).weight.detach().double().numpy()
        assert (np.abs(found[n].numpy() - nf4(w, 32)) < 1e-5).mean() > 0.999  # a tie may fall otherwise
        step = np.abs(w).max(1, keepdims=True) / 127
        assert (np.abs(int8[n].numpy() - w) <= 0.51 * step + 1e-3 * np.abs(w)).all()
    with pytest.raises(
        UserError, match="nf4: group_size must be a block size of bitsandbytes .32, 64, .*got 48"
    ):
        bnb.quantized_weights(model, names, None, QuantSpec(method="nf4", group_size=48))


@pytest.mark.skipif(not installed("torchao"), reason="wants the extra torchao")
def test_torchao_rounds_as_we_do(model):
    from ptq_dynamics.quantization.backends import torchao

    spec = QuantSpec(method="torchao", group_size=16)
    found = torchao.quantized_weights(model, list(block_linears(model)), None, spec)
    for name, weight in found.items():
        own = model.get_submodule(name).weight.detach()
        step = own.view(len(own), -1, 16).abs().amax(-1).repeat_interleave(16, 1) / 7.5
        assert ((weight - own).abs() <= 0.55 * step + 1e-6).all()


@pytest.mark.skipif(not installed("gptqmodel"), reason="wants the extra gptqmodel")
@pytest.mark.timeout(600)
def test_gptqmodel_agrees_with_us(model):
    before, errors = snapshot(model), {}
    ids = torch.randint(0, 300, (32, 16), generator=torch.Generator().manual_seed(0))
    spec = QuantSpec(bits=4, group_size=16)
    for method in ("gptq", "gptqmodel", "rtn"):
        errors[method] = quantize(model, ids, dataclasses.replace(spec, method=method)).weight_error
        restore(model, before)
    assert errors["gptqmodel"] == pytest.approx(errors["gptq"], rel=0.05)
    assert abs(errors["rtn"] - errors["gptq"]) > 0.02 * errors["gptq"]
