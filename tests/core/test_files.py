from __future__ import annotations

import errno
import hashlib
import json
import os

import pytest

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.core.files import (
    atomic_dir,
    atomic_file,
    read_json,
    sha256_file,
    sweep,
    write_json,
    write_text,
)


def test_a_file_takes_its_place_at_the_end(tmp_path):
    target = tmp_path / "new" / "a.txt"
    with atomic_file(target) as tmp:
        tmp.write_text("whole")
        assert not target.exists() and tmp.parent == target.parent and tmp.suffix == ".txt"
    assert target.read_text() == "whole" and os.listdir(target.parent) == ["a.txt"]


def test_a_folder_takes_its_place_at_the_end_and_keeps_nothing_of_the_former(tmp_path):
    target = tmp_path / "a"
    for name in ("first", "second"):
        with atomic_dir(target) as tmp:
            (tmp / name).write_text(name)
            assert not (target / name).exists()
    assert os.listdir(target) == ["second"] and os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("make", [atomic_file, atomic_dir])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, UserError])
def test_what_was_there_stays_when_the_block_fails(tmp_path, make, error):
    target = tmp_path / "a"
    with make(target) as tmp:
        (tmp if make is atomic_file else tmp / "f").write_text("old")
    with pytest.raises(error), make(target) as tmp:
        (tmp if make is atomic_file else tmp / "f").write_text("new")
        raise error("stopped")
    assert (target if make is atomic_file else target / "f").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_permissions_are_those_of_an_ordinary_file(tmp_path):
    with atomic_file(tmp_path / "a") as tmp:
        tmp.write_text("")
    (tmp_path / "b").write_text("")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode
    with atomic_dir(tmp_path / "c"):
        pass
    (tmp_path / "d").mkdir()
    assert (tmp_path / "c").stat().st_mode == (tmp_path / "d").stat().st_mode


class Wrapped(Exception):
    """As safetensors tells it."""


@pytest.mark.parametrize("make", [atomic_file, atomic_dir])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        OSError("Write failed: No space left on device"),
        Wrapped("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_in_one_line(tmp_path, make, error):
    with pytest.raises(UserError) as e, make(tmp_path / "a"):
        raise error
    assert str(e.value) == (
        f"{tmp_path / 'a'}: no space left on the device; free some and run the same command again "
        "(finished work is kept)"
    )
    assert os.listdir(tmp_path) == []


def test_a_folder_that_may_not_be_written(tmp_path):
    with pytest.raises(
        UserError, match="a: cannot be written .Read-only file system.; check its permissions"
    ):
        with atomic_file(tmp_path / "a"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_other_errors_are_ours_and_keep_their_traceback(tmp_path):
    with pytest.raises(IsADirectoryError), atomic_file(tmp_path / "a"):
        raise IsADirectoryError(errno.EISDIR, "x")


def test_sweep_takes_leftovers_alone(tmp_path):
    (tmp_path / ".tmp-abc").mkdir()
    (tmp_path / ".tmp-abc" / "f").write_text("")
    (tmp_path / ".tmp-x.csv").write_text("")
    (tmp_path / "kept.csv").write_text("")
    (tmp_path / "folder").mkdir()
    sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["folder", "kept.csv"]
    sweep(tmp_path / "nowhere")


def test_json_there_and_back(tmp_path):
    write_json(tmp_path / "a.json", {"b": [1, 2.5, None, "ä"]})
    assert read_json(tmp_path / "a.json", hint="") == {"b": [1, 2.5, None, "ä"]}
    with pytest.raises(ValueError):
        write_json(tmp_path / "a.json", {"b": float("nan")})
    assert json.loads((tmp_path / "a.json").read_text())["b"][0] == 1


@pytest.mark.parametrize("data", [None, b"", b"{", b"\xff\xfe"])
def test_json_that_cannot_be_read(tmp_path, data):
    file = tmp_path / "a.json"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(UserError) as e:
        read_json(file, hint="do this instead")
    assert str(e.value).startswith(f"{file}: ") and str(e.value).endswith("; do this instead")
    assert "\n" not in str(e.value)


def test_sha256(tmp_path):
    data = b"x" * 3_000_000
    (tmp_path / "a").write_bytes(data)
    assert sha256_file(tmp_path / "a") == hashlib.sha256(data).hexdigest()


def test_text_is_utf8_whatever_the_locale(tmp_path):
    write_text(tmp_path / "a", "Ŵ")
    assert (tmp_path / "a").read_bytes() == "Ŵ".encode()
