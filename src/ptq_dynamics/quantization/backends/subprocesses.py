"""Tools that run in a process of their own: GPTQ of gptqmodel, auto-gptq and llmcompressor, and gptqmodel's AWQ.

gptqmodel is an extra beside us; the other two want other versions of transformers and live in environments of their
own (``environments/<tool>/.venv``, built by ``make environments`` from pinned requirements). All are driven alike: a
folder with the model in float32, the calibration tokens and the request goes to a script of ``drivers/``, which imports
nothing of ours and leaves the weights that the tool gives, dequantized.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...core import paths
from ...core.config import asdict
from ...core.errors import UserError
from ...core.files import read_json, write_json
from ..spec import QuantSpec

TOOLS = {
    "gptqmodel": "gptqmodel",
    "awq": "gptqmodel",
    "auto-gptq": "auto-gptq",
    "llmcompressor": "llmcompressor",
}
THREADS = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


def missing(method: str) -> str | None:
    """One line where the tool is not installed."""
    tool = TOOLS[method]
    if tool == "gptqmodel":
        if importlib.util.find_spec("gptqmodel"):
            return None
        return f"{method} needs the extra gptqmodel; install it with `make extras`, or `pip install -e '.[gptqmodel]'`"
    if interpreter(method).is_file():
        return None
    return f"{method} needs its own environment, {paths.relative(interpreter(method).parents[1])}; build it with `make environments`"


def version(method: str) -> str:
    """The tool's version, and a hash of the script that drives it."""
    tool = TOOLS[method]
    code = hashlib.sha256(driver(method).read_bytes()).hexdigest()[:12]
    if tool == "gptqmodel":
        return f"gptqmodel {importlib.metadata.version('gptqmodel')} {code}"
    pins = hashlib.sha256((interpreter(method).parents[2] / "requirements.txt").read_bytes()).hexdigest()[:12]
    return f"{tool} {pins} {code}"


def interpreter(method: str) -> Path:
    """The Python that the tool is installed in."""
    tool = TOOLS[method]
    if tool == "gptqmodel":
        return Path(sys.executable)
    return paths.root() / "environments" / tool / ".venv" / "bin" / "python"


def driver(method: str) -> Path:
    """The script that runs the tool."""
    return Path(__file__).parent / "drivers" / f"drive_{TOOLS[method].replace('-', '_')}.py"


def quantized_weights(
    model: torch.nn.Module, names: Sequence[str], calibration: Tensor | None, spec: QuantSpec
) -> Mapping[str, Tensor]:
    """As ``backends.quantized_weights``."""
    return run(model, names, calibration, spec)[0]


def run(
    model: torch.nn.Module, names: Sequence[str], calibration: Tensor, spec: QuantSpec, repeat: int = 1
) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    """The weights, and what the driver tells: ``seconds`` of the tool's own call, once per repeat, and ``versions``.

    Raises:
        UserError: the tool refuses the request, fails or leaves something else; one line with its last words and
            where the whole log is kept.
    """
    with tempfile.TemporaryDirectory(prefix="ptq-tool-") as tmp:
        folder = Path(tmp)
        model.save_pretrained(folder / "source")
        ids = calibration.cpu().contiguous()
        with torch.inference_mode():  # for the driver to see that its tool reads the same function
            logits = model(calibration[:1]).logits.float().cpu().contiguous()
        save_file({"ids": ids, "logits": logits}, folder / "calibration.safetensors")
        write_json(folder / "request.json", {"spec": asdict(spec), "names": list(names), "repeat": repeat})
        with open(folder / "log.txt", "w", encoding="utf-8") as log:
            code = subprocess.run(
                [str(interpreter(spec.method)), str(driver(spec.method)), str(folder)],
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=folder, env=_environment(),
            ).returncode  # fmt: skip
        try:
            if code:
                raise UserError(f"ended with status {code}")
            weights = load_file(folder / "weights.safetensors")
            done = read_json(folder / "done.json", hint="the driver did not finish")
            for name in names:
                shape = model.get_submodule(name).weight.shape
                if name not in weights or weights[name].shape != shape:
                    raise UserError(f"gives no weight {list(shape)} for {name}")
        except (UserError, OSError, SafetensorError) as e:
            lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            kept = Path(tempfile.gettempdir()) / f"ptq-{spec.label}-{os.getpid()}.log"
            shutil.copy(folder / "log.txt", kept)
            last = f": {lines[-1][:200]}" if lines else ""
            raise UserError(f"{spec.method}: the tool {e}{last} (whole log: {kept})") from None
    return {name: weights[name] for name in names}, done


def _environment() -> dict[str, str]:
    """One thread, no hub, and nothing of our own Python path."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    # on two cores gptqmodel dies with fewer workers than this
    return kept | THREADS | {"HF_HUB_OFFLINE": "1", "GPTQMODEL_CPU_WORKERS": "2", "CUDA_VISIBLE_DEVICES": kept.get("CUDA_VISIBLE_DEVICES", "")}  # fmt: skip
