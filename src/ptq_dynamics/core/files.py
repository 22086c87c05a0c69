"""Files that are whole or absent: write to a temporary name, sync, rename."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import UserError

TMP_MARK = ".tmp-"  # whatever carries it is a leftover of a killed process and may be deleted


@contextmanager
def _told(target: Path) -> Iterator[None]:
    """Turn "disk full" and "not permitted" into one line that names the file and the fix."""
    try:
        yield
    except OSError as e:
        # safetensors and pyarrow wrap the errno into their own message
        full = e.errno in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(e)
        if full:
            raise UserError(
                f"{target}: no space left on the device; free some and run the same command again "
                "(finished work is kept)"
            ) from e
        if e.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise UserError(f"{target}: cannot be written ({e.strerror}); check its permissions") from e
        raise
    except Exception as e:
        if "No space left" in str(e):
            raise UserError(
                f"{target}: no space left on the device; free some and run the same command again "
                "(finished work is kept)"
            ) from e
        raise


@contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``target`` that takes its place when the block ends well.

    Raises:
        UserError: the disk is full or the folder cannot be written.
    """
    target = Path(target)
    with _told(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix=TMP_MARK, suffix=target.suffix, dir=target.parent)
        os.close(fd)
        tmp = Path(name)
        try:
            yield tmp
            with open(tmp, "rb") as f:
                os.fsync(f.fileno())
            os.chmod(tmp, 0o666 & ~_umask())
            os.replace(tmp, target)
        finally:
            tmp.unlink(missing_ok=True)


@contextmanager
def atomic_dir(target: Path) -> Iterator[Path]:
    """Yield a temporary folder beside ``target`` that takes its place (replacing it) at the end."""
    target = Path(target)
    with _told(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        tmp = Path(tempfile.mkdtemp(prefix=TMP_MARK, dir=target.parent))
        try:
            yield tmp
            for p in tmp.rglob("*"):
                if p.is_file():
                    with open(p, "rb") as f:
                        os.fsync(f.fileno())
            os.chmod(tmp, 0o777 & ~_umask())
            if target.exists():
                shutil.rmtree(target)
            os.replace(tmp, target)
        finally:
            shutil.rmtree(tmp, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sweep(folder: Path) -> None:
    """Delete what killed processes left in ``folder``; only for a folder that no other process writes to."""
    for leftover in Path(folder).glob(TMP_MARK + "*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, as hex."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def write_text(path: Path, text: str) -> None:
    """Write ``text`` atomically as UTF-8."""
    with atomic_file(path) as tmp:
        tmp.write_text(text, encoding="utf-8")


def write_json(path: Path, data: Any) -> None:
    """Write ``data`` as indented JSON, atomically; NaN and infinities are refused (``ValueError``)."""
    write_text(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


def read_json(path: Path, *, hint: str) -> Any:
    """Read JSON; a missing or broken file raises ``UserError`` that ends with ``hint`` (the fix)."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {hint}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: not valid JSON ({e}); {hint}") from None
