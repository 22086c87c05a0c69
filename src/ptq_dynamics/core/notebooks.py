"""Run a notebook with papermill: unknown parameters are errors, our own errors are one line, progress is shown."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import paths, progress
from .config import one_of
from .errors import UserError
from .files import atomic_file


def run(name: str, out: Path, parameters: Mapping[str, Any]) -> None:
    """Execute ``notebooks/<name>.ipynb`` into ``out``.

    Args:
        parameters: values for the cell tagged ``parameters``; each must be defined there.

    Raises:
        UserError: no such notebook, an unknown parameter, or the notebook stopped with a ``UserError``; the
            notebook as far as it came lies beside ``out`` with the ending ``.failed.ipynb``.
    """
    # jsonschema would compile the grammar of internationalized URIs, a second for what no notebook has
    sys.modules.setdefault("rfc3987_syntax", None)
    import papermill
    from papermill.exceptions import PapermillExecutionError
    from traitlets.config import Config

    folder = paths.notebooks()
    one_of(name, {p.stem for p in folder.glob("*.ipynb")}, "notebook")
    source = folder / f"{name}.ipynb"
    known = papermill.inspect_notebook(str(source))
    for key in parameters:
        try:
            one_of(key, known, "parameter")
        except UserError as e:
            raise UserError(f"{source.name}: {e}") from None
    logging.getLogger("papermill").setLevel(logging.WARNING)
    os.environ.setdefault("PTQ_DYNAMICS_ROOT", str(paths.root()))
    failed = out.with_suffix(".failed.ipynb")
    with progress.watched(), atomic_file(out) as tmp:
        try:
            papermill.execute_notebook(
                str(source), str(tmp), dict(parameters), kernel_name="python3", progress_bar=False,
                cwd=str(paths.root()), log_output=False,
                # sockets in the file system, not TCP ports that others on the machine can read
                config=Config(KernelManager={"transport": "ipc"}),
            )  # fmt: skip
        except PapermillExecutionError as e:
            failed.write_bytes(tmp.read_bytes())
            if e.ename == "UserError":
                raise UserError(e.evalue) from None
            raise
    failed.unlink(missing_ok=True)
