"""`dvc repro` itself, on a copy of the repository with toy sizes: what runs, what is skipped, what is rebuilt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import toy
from ruamel.yaml import YAML

REPOSITORY = Path(__file__).parent.parent
WSD = {"wsd": {"tokens": [640, 1280], "peak_lr": 0.01}}
COSINE = {"cosine": {"shape": "cosine", "tokens": [640, 1280], "peak_lr": 0.01}}
STUDIES = {  # members of every study that has stages; 64 tokens an update
    "token_budgets": toy.STUDY["members"],
    "peak_lr": {"wsd": {"tokens": [640, 1280], "peak_lr": [0.002, 0.01]}},
    "schedules": WSD | COSINE,
    "schedules_small": WSD | COSINE,
    "weight_decay": {"wsd": {"tokens": 1280, "peak_lr": 0.01, "weight_decay": [0.01, 0.1]}},
    "cooldowns": {"linear": {"tokens": 1280, "peak_lr": 0.01}, "final_10": {"tokens": 1280, "peak_lr": 0.01, "final_fraction": 0.1}},
    "soups": toy.STUDY["members"] | {"cooldown": {**toy.STUDY["members"]["cooldown"], "data_seeds": [0, 1]}},
}  # fmt: skip
QUANTIZERS = [{"method": "gptq", "bits": b, "group_size": 16} for b in (4, 3)]
CURVATURE = {
    "text": {"tokens": 256, "length": 16},
    "max_steps": 8,
    "studies": {name: {} for name in STUDIES if name != "soups"}
    | {"token_budgets": {"points": "all", "top_eigenvalue": True, "quantizers": QUANTIZERS}, "peak_lr": {"quantizers": QUANTIZERS}},
    "slices": {"study": "peak_lr", "resolution": 3},
}  # fmt: skip
FINDINGS = ["token_budgets", "peak_lr", "schedules", "weight_decay", "cooldowns", "averaging", "wild", "curvature", "expansion", "prediction",
            "monitor", "quantizers", "options", "downstream"]  # fmt: skip
STAGES = {
    "corpus",
    *(f"{kind}@{study}" for kind in ("pretrain", "measure") for study in STUDIES),
    *(f"finding_{name}" for name in FINDINGS),
    *("average", "publish", "wild@mini", "curvature", "monitor", "quantizers", "options", "downstream"),
    "claims",
}


def environment(root: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PTQ_", "GIT_"))}
    # users have bytecode beside the sources, and stages depend on folders
    clean.pop("PYTHONDONTWRITEBYTECODE", None)
    names = ("AUTHOR_NAME", "AUTHOR_EMAIL", "COMMITTER_NAME", "COMMITTER_EMAIL")
    return clean | {"PATH": path, "PYTHONPATH": str(root / "src"), "DVC_NO_ANALYTICS": "1", "OMP_NUM_THREADS": "1"} | {
        f"GIT_{n}": "test" for n in names
    }  # fmt: skip


def call(root: Path, *command: str, code: int = 0) -> str:
    done = subprocess.run(
        command, cwd=root, env=environment(root), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def repro(root: Path, *options: str, code: int = 0) -> set[str]:
    """Stages that `dvc repro` ran."""
    out = call(root, "dvc", "repro", *options, code=code)
    return {line.split("'")[1] for line in out.splitlines() if line.startswith("Running stage")}


def params(root: Path, **changes: dict[str, object]) -> None:
    """Toy sizes for every study, with ``changes`` by study."""
    studies = {
        name: {**toy.STUDY, "seeds": [0], "checkpoint_tokens": 1280, "members": members}
        for name, members in STUDIES.items()
    }
    for name in ("token_budgets", "soups"):
        studies[name]["checkpoint_tokens"] = 1920
    studies["schedules_small"]["model"] = toy.MODEL | {"width": 8}
    for name, change in changes.items():
        studies[name] |= change
    data = {
        "profile": "toy",
        "workers": 1,
        "machine": {"device": "cpu", "compile": False},
        "corpus": toy.CORPUS,
        "studies": studies,
        "measure": toy.MEASURE | {"quantizers": QUANTIZERS},
        "averaging": {
            "study": "token_budgets",
            "soups_study": "soups",
            "window": 2,
            "windows": [2],
            "intervals": [1],
            "decay_window": 1,
        },
        "curvature": CURVATURE,
        "monitor": {"study": "token_budgets", "sequences": 4, "window": 1, "quantizers": QUANTIZERS},
        "quantizers": {
            "studies": ["token_budgets", "peak_lr"],
            "quantizers": [
                {"method": "rtn", "bits": 4, "group_size": 16},
                {"method": "gptq", "bits": 4, "group_size": 16, "rotation": "hadamard"},
                {"method": "nf4", "bits": 4, "group_size": 64},
            ],
        },
        "options": {
            "study": "token_budgets",
            "base": {"bits": 3, "group_size": 16},
            "quantizers": {"act order": {"bits": 3, "group_size": 16, "act_order": True}},
            "calibrations": {"seed 1": {"sequences": 8, "length": 16, "seed": 1}},
        },
        "downstream": {
            "study": "token_budgets",
            "quantizers": QUANTIZERS,
            "cloze": {"items": 10, "context": 8, "continuation": 4},
        },
        "verdicts": False,
    }
    with open(root / "params.yaml", "w") as f:
        YAML().dump(data, f)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Path:
    """A copy of what git tracks, committed anew, after one whole `dvc repro`."""
    root = tmp_path_factory.mktemp("pipeline") / "repository"
    root.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.split("\0"):
        if (
            name
            and not name.startswith(("tests/", "reports/"))
            and name != "dvc.lock"
            and (REPOSITORY / name).is_file()
        ):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes((REPOSITORY / name).read_bytes())
    toy.write_text(root)
    params(root)
    call(root, "git", "init", "-q")
    assert repro(root) == STAGES
    call(root, "git", "add", "-A")
    call(root, "git", "commit", "-qm", "results")
    return root


def test_everything_is_written(pipeline):
    told = json.loads((pipeline / "reports/claims.json").read_text())
    assert [e["id"] for e in told] == [*(f"C{i}" for i in range(1, 16)), "P1", "P2", "P3", "P4"]
    for finding in FINDINGS:
        for name in (f"figures/{finding}.png", f"figures/{finding}.pdf", f"tables/{finding}.csv"):
            assert (
                pipeline / "reports" / name
            ).stat().st_size > 50  # one seed predicts nothing: names of columns
        executed = json.loads((pipeline / f"reports/notebooks/finding_{finding}.ipynb").read_text())
        assert any(c.get("outputs") for c in executed["cells"])
    assert (
        call(pipeline, "git", "status", "--porcelain") == ""
    )  # what is large or changes by itself is ignored


def test_second_run_does_nothing(pipeline):
    assert repro(pipeline) == set()


def test_touching_a_finding_reruns_it_alone(pipeline):
    file = pipeline / "src/ptq_dynamics/findings/token_budgets.py"
    file.write_text(file.read_text() + "\n# touched\n")
    assert repro(pipeline) == {"finding_token_budgets"}


TWO_SEEDS = {"soups": {"seeds": [0, 5]}}  # from the first test that asks for them on


def test_one_more_seed_trains_that_seed_alone(pipeline):
    runs = pipeline / "data/runs/soups"
    rows = pipeline / "data/measurements/soups/rows"
    before = {p: p.stat().st_mtime_ns for folder in (runs, rows) for p in folder.rglob("*") if p.is_file()}
    params(pipeline, **TWO_SEEDS)
    assert repro(pipeline) == {"pretrain@soups", "measure@soups", "average", "finding_averaging", "claims"}
    after = {p: p.stat().st_mtime_ns for folder in (runs, rows) for p in folder.rglob("*") if p.is_file()}
    assert {p: after[p] for p in before} == before
    new = {p.relative_to(runs).parts[0] for p in set(after) - set(before) if runs in p.parents}
    assert len(new) == 5 and all(
        n.endswith("-seed5") for n in new
    )  # a trunk, two branches in two orders of data


def test_one_lr_more_runs_its_seeds_and_the_finding_and_one_less_trains_nothing(pipeline):
    runs, table = pipeline / "data/runs/peak_lr", pipeline / "reports/tables/measurements-peak_lr.csv"
    before = {p: p.stat().st_mtime_ns for p in runs.rglob("*") if p.is_file()}
    drawn = {
        p: (pipeline / p).read_bytes() for p in ("reports/figures/peak_lr.png", "reports/tables/peak_lr.csv")
    }
    readers = (
        "peak_lr", "weight_decay", "curvature", "expansion", "prediction", "monitor", "quantizers",
    )  # fmt: skip
    touched = {
        "pretrain@peak_lr",
        "measure@peak_lr",
        "curvature",
        "quantizers",
        *(f"finding_{r}" for r in readers),
        "claims",
    }
    grid = [0.002, 0.01, 0.03]
    members = {"wsd": {**STUDIES["peak_lr"]["wsd"], "peak_lr": grid}}
    params(pipeline, **TWO_SEEDS, peak_lr={"members": members})
    assert repro(pipeline) == touched
    after = {p: p.stat().st_mtime_ns for p in runs.rglob("*") if p.is_file()}
    assert {p: after[p] for p in before} == before
    assert {p.relative_to(runs).parts[0] for p in set(after) - set(before)} == {
        "wsd-640-lr0.03-seed0", "wsd-0.00128M-lr0.03-seed0",
    }  # fmt: skip
    assert set(pd.read_csv(table)["peak_lr"]) == set(grid)
    params(pipeline, **TWO_SEEDS)
    assert repro(pipeline) <= touched
    assert {p: p.stat().st_mtime_ns for p in runs.rglob("*") if p.is_file()} == after
    assert {p: (pipeline / p).read_bytes() for p in drawn} == drawn


def test_clone_without_checkpoints_rebuilds_from_tables(pipeline, tmp_path):
    call(pipeline, "git", "add", "-A")
    call(pipeline, "git", "commit", "-qm", "two seeds", "--allow-empty")
    clone = tmp_path / "clone"
    call(pipeline, "git", "clone", "-q", str(pipeline), str(clone))
    assert not (clone / "data/runs").exists()
    figure = clone / "reports/figures/token_budgets.png"
    drawn = figure.read_bytes()
    figure.unlink()
    file = clone / "src/ptq_dynamics/findings/token_budgets.py"
    file.write_text(file.read_text() + "\n# touched in the clone\n")
    assert repro(clone, "--allow-missing") == {"finding_token_budgets"}
    assert figure.read_bytes() == drawn


def test_unknown_parameter_of_a_notebook_is_an_error(pipeline):
    out = call(pipeline, sys.executable, "-m", "ptq_dynamics", "run", "claims", "-p", "findins=[]", code=2)
    assert out.strip().splitlines()[-1].startswith("ptq-dynamics: claims.ipynb: unknown parameter 'findins'")
    assert "did you mean 'findings'?" in out


def test_misspelled_key_stops_before_any_work(pipeline):
    text = (pipeline / "params.yaml").read_text()
    try:
        (pipeline / "params.yaml").write_text(text.replace("workers:", "wokers:"))
        out = call(pipeline, sys.executable, "-m", "ptq_dynamics", "run", "claims", code=2)
    finally:
        (pipeline / "params.yaml").write_text(text)
    (line,) = out.strip().splitlines()
    assert line.startswith("ptq-dynamics: params.yaml: unknown key 'wokers'; did you mean 'workers'?")


def test_params_are_checked_whole_once_and_not_again_by_every_stage(pipeline):
    code = "import sys; from ptq_dynamics.cli import main; main(['run', 'claims']); print('torch' in sys.modules)"
    call(pipeline, sys.executable, "-m", "ptq_dynamics", "run", "claims")
    assert call(pipeline, sys.executable, "-c", code).endswith("False\n")
    text = (pipeline / "params.yaml").read_text()
    try:
        (pipeline / "params.yaml").write_text(text + "\n# touched\n")
        assert call(pipeline, sys.executable, "-c", code).endswith("True\n")
    finally:
        (pipeline / "params.yaml").write_text(text)


def test_committed_params_are_the_mini_profile(pipeline):
    (pipeline / "params.yaml").rename(pipeline / "params.kept.yaml")
    try:
        call(pipeline, sys.executable, "-m", "ptq_dynamics", "profile", "mini")
        assert (pipeline / "params.yaml").read_text() == (REPOSITORY / "params.yaml").read_text()
    finally:
        (pipeline / "params.kept.yaml").rename(pipeline / "params.yaml")
