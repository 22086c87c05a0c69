"""pyproject.toml, requirements.lock, environment.yml and the Makefile say the same."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCK = [
    line
    for line in (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
ENVIRONMENT = YAML(typ="safe", pure=True).load((ROOT / "environment.yml").read_text(encoding="utf-8"))
DEPENDENCIES = [Requirement(d) for d in PROJECT["dependencies"]]
DEV = [Requirement(d) for d in PROJECT["optional-dependencies"]["dev"]]
OWNERS = ["jupyterlab", "papermill", "torch", "transformers", "lm-eval", "seaborn", "dvc", "nbconvert"]


def pins() -> dict[tuple[str, str], str]:
    """Version by (name, marker)."""
    found = {}
    for line in LOCK:
        requirement = Requirement(line)
        (only,) = requirement.specifier
        assert only.operator == "=="
        found[canonicalize_name(requirement.name), str(requirement.marker or "")] = only.version
    return found


def pip_lines() -> list[str]:
    (section,) = [d["pip"] for d in ENVIRONMENT["dependencies"] if isinstance(d, dict)]
    return section


def test_lock_lines_are_plain_pins() -> None:
    # no hash, no local version such as +cpu, no URL, no option: the same file serves every platform
    plain = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+(; python_version [<>]=? '3\.\d+')?")
    assert [line for line in LOCK if not plain.fullmatch(line)] == []


def test_lock_has_no_package_twice_and_none_of_one_platform() -> None:
    names = [name for name, _ in pins()]
    assert len(LOCK) == len(pins()) > 100
    assert "ptq-dynamics" not in names
    assert "torchvision" not in names  # the registry's build breaks `import transformers` beside a CPU torch
    assert not [n for n in names if n.startswith(("nvidia-", "cuda-")) or n == "triton"]


@pytest.mark.parametrize("requirement", DEPENDENCIES + DEV, ids=str)
def test_every_dependency_is_locked(requirement: Requirement) -> None:
    key = canonicalize_name(requirement.name), str(requirement.marker or "")
    assert requirement.specifier.contains(pins()[key])


def test_conda_lists_the_same_dependencies() -> None:
    (python,) = [d for d in ENVIRONMENT["dependencies"] if str(d).startswith("python=")]
    version = python.removeprefix("python=")
    assert SpecifierSet(PROJECT["requires-python"]).contains(version)
    applies = [d for d in DEPENDENCIES if d.marker is None or d.marker.evaluate({"python_version": version})]
    listed = [Requirement(line) for line in pip_lines() if not line.startswith("-")]
    assert [(canonicalize_name(d.name), d.specifier) for d in listed] == [
        (canonicalize_name(d.name), d.specifier) for d in applies
    ]
    # the rest of the lock, then the package with its tests' tools
    assert [line for line in pip_lines() if line.startswith("-")] == ["-c requirements.lock", "-e .[dev]"]


@pytest.mark.parametrize("name", OWNERS)
def test_owners_package_is_a_direct_dependency(name: str) -> None:
    exact = {canonicalize_name(d.name): d.specifier for d in DEPENDENCIES}[name]
    assert [s.operator for s in exact] == ["=="]
    assert any(line.startswith(f"{name}==") for line in pip_lines())


def run_make(target: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, folder / name)
    # these tests may themselves run below `make test`
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON")}
    command = ["make", target, *(f"{k}={v}" for k, v in variables.items())]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)


def fake_python(folder: Path, version: tuple[int, int]) -> Path:
    """An interpreter that evaluates the Makefile's condition as Python ``version`` would, and makes no environment."""
    fake = folder / "python"
    fake.write_text(
        f"""#!/bin/sh
case "$1" in
-c) exec python3 -c "import sys; sys.version_info = {version}; exec(sys.argv[1])" "$2" ;;
--version) echo "Python {version[0]}.{version[1]}" ;;
*) exit 9 ;;
esac
"""
    )
    fake.chmod(0o755)
    return fake


@pytest.mark.parametrize("version", [(2, 7), (3, 9), (3, 10), (3, 11), (3, 12), (3, 13), (3, 14), (3, 15)])
def test_make_admits_the_pythons_that_the_package_admits(tmp_path: Path, version: tuple[int, int]) -> None:
    done = run_make("reproduce", tmp_path, PYTHON=str(fake_python(tmp_path, version)))
    assert done.returncode != 0
    admitted = SpecifierSet(PROJECT["requires-python"]).contains("{}.{}".format(*version))
    assert admitted == done.stdout.startswith("building .venv with Python {}.{} ".format(*version))
    if not admitted:
        told = [line for line in done.stderr.splitlines() if "*** " not in line]  # make's own last line
        assert len(told) == 1 and "no Python 3.11 to 3.14" in told[0] and "PYTHON=" in told[0]
    assert not (tmp_path / ".venv").exists()


def test_make_names_a_python_that_is_not_there(tmp_path: Path) -> None:
    done = run_make("test", tmp_path, PYTHON="no-such-python")
    assert done.returncode != 0
    assert "no-such-python" in done.stderr


def test_readme_and_ci_use_the_makefiles_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"`make ([a-z-]+)", readme)) | set(re.findall(r"^make ([a-z-]+)", readme, re.M))
    assert {"reproduce", "test"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.M), target
    ci = ROOT / ".ci" / "run"
    assert os.access(ci, os.X_OK)
    assert "make test" in ci.read_text(encoding="utf-8").splitlines()
