"""Publish checkpoints into a local Hub: the layout of the Hub client's own cache, which needs no server.

    publish({"step-0001000": folder, …}, "owner/name", Path("data/hub"))
    hub.resolve("owner/name", cache=Path("data/hub"), offline=True)

    data/hub/models--owner--name/refs/<revision>              the revision's commit
    data/hub/models--owner--name/snapshots/<commit>/<file>    its files

The client keeps files under ``blobs`` and links to them; where a file system has no links it writes them into the
snapshots, as is done here: DVC and copies to other machines keep such a folder as it is.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub.file_download import repo_folder_name

from ..core.errors import UserError
from ..core.files import atomic_dir, read_json, sha256_file, write_json, write_text
from .checkpoints import META
from .hub import needed_files


def publish(revisions: Mapping[str, Path], repo: str, cache: Path) -> dict[str, str]:
    """Copy checkpoint folders into ``cache`` as revisions of ``repo``; revisions that are no longer named go.

    Published are weights, configuration, tokenizer and ``checkpoint.json``, not the optimizer state. Equal folders give
    equal commits; what lies there already is kept.

    Args:
        revisions: checkpoint folders by revision name.
        repo: ``owner/name``.

    Returns:
        Commits by revision name.

    Raises:
        UserError: nothing to publish, or a folder that is no whole checkpoint.
    """
    if not revisions:
        raise UserError(f"{repo}: nothing to publish; name at least one checkpoint")
    base = Path(cache) / repo_folder_name(repo_id=repo, repo_type="model")
    commits = {}
    for name, folder in revisions.items():
        try:
            files = needed_files((p.name for p in Path(folder).iterdir()), tokenizer=True)
        except (ValueError, OSError) as e:
            raise UserError(f"{folder}: cannot be published, it {e}") from None
        h = hashlib.sha1(repo.encode())
        for file in sorted(files):
            h.update(f"{file} {sha256_file(Path(folder) / file)}\n".encode())
        commits[name] = h.hexdigest()
        snapshot = base / "snapshots" / commits[name]
        if not snapshot.is_dir():
            with atomic_dir(snapshot) as tmp:
                for file in files:
                    shutil.copyfile(Path(folder) / file, tmp / file)
                _without_state(tmp)
        write_text(base / "refs" / name, commits[name])
    for ref in (p for p in (base / "refs").rglob("*") if p.is_file()):
        if ref.relative_to(base / "refs").as_posix() not in commits:
            ref.unlink()
    for snapshot in (base / "snapshots").iterdir():
        if snapshot.name not in commits.values():
            shutil.rmtree(snapshot)
    return commits


def _without_state(folder: Path) -> None:
    """The optimizer state stays at home: ``checkpoint.json`` no longer names it."""
    if (folder / META).is_file():
        write_json(folder / META, read_json(folder / META, hint="publish again") | {"state_sha256": None})
