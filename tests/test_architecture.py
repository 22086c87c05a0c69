"""Imports go one way, notebooks are clean, DVC stages depend on the code they run, and files are fit for publishing."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import grimp
import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "ptq_dynamics"
SOURCE = f"src/{PACKAGE}"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES = 5 * 2**20

# The machinery that runs a notebook, and the package's version: neither decides what a notebook computes.
MACHINERY = {f"{PACKAGE}{m}" for m in ("", ".__main__", ".cli", ".settings", ".core.notebooks")}


def test_imports_go_one_way() -> None:
    command = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 kept, 0 broken" in done.stdout


# --- notebooks


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_clean_and_has_one_parameters_cell(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert not [c.outputs for c in code if c.outputs]
    assert not [c.execution_count for c in code if c.execution_count is not None]
    tagged = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    assert [c.cell_type for c in tagged] == ["code"]


# --- stages


@dataclass(frozen=True)
class Stage:
    name: str  # as DVC addresses it, such as pretrain@token_budgets
    command: str
    deps: tuple[str, ...]  # relative to the root

    @property
    def notebooks(self) -> list[str]:
        return [d for d in self.deps if d.startswith("notebooks/") and d.endswith(".ipynb")]


@functools.cache
def stages() -> tuple[Stage, ...]:
    """All stages of dvc.yaml as DVC itself expands them (foreach, matrix, templates)."""
    from dvc.dependency.param import ParamsDependency
    from dvc.repo import Repo

    with Repo(str(ROOT)) as repo:
        return tuple(
            Stage(
                name=s.name,
                command=str(s.cmd),
                deps=tuple(
                    Path(d.fs_path).relative_to(ROOT).as_posix()
                    for d in s.deps
                    if not isinstance(d, ParamsDependency)
                ),
            )
            for s in repo.index.stages
        )


@functools.cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(PACKAGE, cache_dir=None)


def imports(code: str) -> set[str]:
    """Modules of this package that ``code`` imports, at any depth of nesting."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for a in node.names:
                inner = f"{node.module}.{a.name}"
                found.add(inner if inner in graph().modules else node.module or "")
    return {m for m in found if m.split(".")[0] == PACKAGE}


def notebook_code(path: Path) -> str:
    """A notebook's code cells as one module, without the lines that only IPython reads."""
    cells = [c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    return "\n".join(
        line for cell in cells for line in cell.splitlines() if line.lstrip()[:1] not in ("%", "!")
    )


def closure(modules: Iterable[str]) -> set[str]:
    """``modules`` and all that they import inside the package, the machinery left out."""
    found: set[str] = set()
    todo = [m for m in modules if m not in MACHINERY]
    while todo:
        module = todo.pop()
        if module not in found:
            found.add(module)
            todo += [m for m in graph().find_modules_directly_imported_by(module) if m not in MACHINERY]
    return found


def source_file(module: str) -> str:
    """Path of ``module`` relative to the root."""
    path = Path("src", *module.split("."))
    return (path / "__init__.py" if (ROOT / path).is_dir() else path.with_suffix(".py")).as_posix()


def covers(dep: str, file: str) -> bool:
    return PurePosixPath(file).is_relative_to(dep)


def uncovered(deps: Iterable[str], modules: Iterable[str]) -> set[str]:
    """Files of ``modules`` and of what they import that no dep covers."""
    deps = tuple(deps)
    files = {source_file(m) for m in closure(modules)}
    assert all((ROOT / f).is_file() for f in files)
    return {f for f in files if not any(covers(d, f) for d in deps)}


def test_closure_follows_imports_inside_functions_and_through_packages() -> None:
    # study imports corpus.tokens only inside a function
    assert {f"{PACKAGE}.corpus.tokens", f"{PACKAGE}.core.files"} <= closure([f"{PACKAGE}.training.study"])
    assert imports("def f():\n    from ptq_dynamics.training import study\n    import torch") == {
        f"{PACKAGE}.training.study"
    }
    assert uncovered([f"{SOURCE}/core"], [f"{PACKAGE}.core.config"]) == set()
    assert f"{SOURCE}/core/errors.py" in uncovered([f"{SOURCE}/core/config.py"], [f"{PACKAGE}.core.config"])


def test_every_stage_covers_what_its_notebook_imports() -> None:
    assert any(s.notebooks for s in stages())
    lacking = {}
    for stage in stages():
        if f"-m {PACKAGE} run " in stage.command:
            (notebook,) = stage.notebooks
            assert f" {Path(notebook).stem}" in stage.command
            modules = imports(notebook_code(ROOT / notebook))
            assert uncovered((), modules), f"{stage.name}: {notebook} imports nothing of {PACKAGE}"
            if missing := uncovered(stage.deps, modules):
                lacking[stage.name] = sorted(missing)
    assert lacking == {}, "add to the stage's deps in dvc.yaml"


def test_editing_a_finding_neither_trains_nor_measures() -> None:
    expensive = [s for s in stages() if s.name.split("@")[0] in ("pretrain", "measure")]
    assert {s.name.split("@")[0] for s in expensive} == {"pretrain", "measure"}
    findings = f"{SOURCE}/findings"
    for stage in expensive:
        assert not [d for d in stage.deps if covers(d, findings) or covers(findings, d)], stage.name


def test_every_path_that_a_stage_depends_on_in_git_exists() -> None:
    for stage in stages():
        for dep in stage.deps:
            if dep.startswith(("src/", "notebooks/", "conf/", "data/reference/")):
                assert (ROOT / dep).exists(), f"{stage.name}: {dep}"


# --- files


@functools.cache
def tracked() -> tuple[Path, ...]:
    """What git has or would add; without git (an unpacked archive) all but what the pipeline and tools write."""
    if not (ROOT / ".git").exists():
        written = {"data/corpus", "data/runs", "data/measurements", "data/averages", "data/hub", "data/downloads",
                   "reports/notebooks", "reports/trajectories", ".venv", ".dvc"}  # fmt: skip
        skip = [ROOT / w for w in written]
        files = [p for p in ROOT.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        return tuple(p for p in files if not any(p.is_relative_to(s) for s in skip))
    # files about to be added count too
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(ROOT / p for p in out.split("\0") if p and (ROOT / p).is_file())


def test_no_file_is_large() -> None:
    assert [p for p in tracked() if p.stat().st_size > MAX_BYTES] == []


def test_no_file_names_a_path_of_a_machine_or_a_registry() -> None:
    # spelled in halves, so that this file passes too
    marks = ["/" + "work/", "/" + "root/", "/" + "home/", "pypi" + ".org", "pythonhosted" + ".org"]
    marks += [
        "download.pytorch" + ".org",
        "registry.npmjs" + ".org",
        "deb.debian" + ".org",
        "anaconda" + ".com",
    ]
    marks += ["anaconda" + ".org"]
    found = {f"{p.relative_to(ROOT)}: {m}" for p in tracked() for m in marks if m.encode() in p.read_bytes()}
    assert found == set()


def test_importing_a_stage_does_not_load_the_models_of_transformers() -> None:
    """They take seconds, and each stage's own process only hands work to others."""
    code = (
        "import sys, ptq_dynamics.settings, ptq_dynamics.evaluation.wild, ptq_dynamics.cli\n"
        "print([m for m in ('transformers.modeling_utils', 'torch._dynamo') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
