"""What made a number: library versions, hardware, commit, and a fingerprint of the code that computes it."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import platform
import subprocess
from pathlib import Path
from typing import Any

LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python, this package and the libraries that numbers depend on (local tags dropped)."""
    from .. import __version__

    found = {name: importlib.metadata.version(name).split("+")[0] for name in LIBRARIES}
    return {"python": platform.python_version(), "ptq-dynamics": __version__, **found}


@functools.cache
def fingerprint(*modules: str) -> str:
    """Hash of the named modules' (or packages') code without comments, docstrings and layout.

    Keys of finished work carry it, so that editing an algorithm never serves stale numbers while editing
    a docstring recomputes nothing.

    Args:
        modules: dotted names, such as ``"ptq_dynamics.quantization"`` (a package covers its modules).
    """
    h = hashlib.sha256()
    for name in sorted(modules):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(name)
        origin = Path(spec.origin)
        files = sorted(origin.parent.glob("*.py")) if spec.submodule_search_locations else [origin]
        for file in files:
            tree = ast.parse(file.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                body = getattr(node, "body", None)
                if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
                    if isinstance(body[0].value, ast.Constant) and isinstance(body[0].value.value, str):
                        body[:1] = [] if len(body) > 1 else [ast.Pass()]
            h.update(f"{name}/{file.name}\n{ast.dump(tree)}\n".encode())
    return h.hexdigest()[:12]


def hardware() -> dict[str, Any]:
    """Processor, cores, memory (GiB) and accelerator, for a run's lab record (never part of a key)."""
    import psutil
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "processor": _cpu_name(),
        "cores": psutil.cpu_count(logical=True),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": gpu,
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit(root: Path) -> str:
    """The checkout's commit, with ``-dirty`` when tracked files differ; ``unknown`` outside git."""
    try:
        out = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return out.stdout.strip()
