"""One place for paths. Everything lies under the repository root; no path of any machine is written down."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import UserError


def root() -> Path:
    """The repository root: ``$PTQ_DYNAMICS_ROOT``, or the nearest folder upward that holds dvc.yaml and conf/.

    Raises:
        UserError: there is none.
    """
    if env := os.environ.get("PTQ_DYNAMICS_ROOT"):
        return Path(env).resolve()
    here = Path.cwd().resolve()
    for folder in (here, *here.parents):
        if (folder / "dvc.yaml").is_file() and (folder / "conf").is_dir():
            return folder
    raise UserError(
        f"{here}: no dvc.yaml and conf/ here or above; run inside the repository or set PTQ_DYNAMICS_ROOT"
    )


def params_file() -> Path:
    return root() / "params.yaml"


def conf() -> Path:
    return root() / "conf"


def downloads() -> Path:
    """Package files as fetched, checked by SHA-256; safe to delete."""
    return root() / "data" / "downloads"


def corpus() -> Path:
    return root() / "data" / "corpus"


def runs(study: str) -> Path:
    """One folder per run of a study."""
    return root() / "data" / "runs" / study


def measurements(study: str) -> Path:
    """One row file per (checkpoint, quantizer), and the table made of them."""
    return root() / "data" / "measurements" / study


def reference() -> Path:
    """The paper's own numbers and the facts on public families (in git)."""
    return root() / "data" / "reference"


def tables() -> Path:
    return root() / "reports" / "tables"


def figures() -> Path:
    return root() / "reports" / "figures"


def claims() -> Path:
    """One file of judged claims per finding."""
    return root() / "reports" / "claims"


def metrics() -> Path:
    """Key numbers per finding, for ``dvc metrics``."""
    return root() / "reports" / "metrics"


def notebooks() -> Path:
    return root() / "notebooks"


def executed() -> Path:
    """Executed notebooks: outputs of the pipeline, not in git."""
    return root() / "reports" / "notebooks"


def relative(path: Path) -> str:
    """``path`` relative to the root, with forward slashes, for tables and reports."""
    return Path(path).resolve().relative_to(root()).as_posix()
