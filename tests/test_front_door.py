"""`ptq-dynamics trajectory` and `average` as a person calls them: notebook, page, faults, exit status."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
import toy
from hub_server import Hub
from ruamel.yaml import YAML

from ptq_dynamics import cli
from ptq_dynamics.models import neox
from ptq_dynamics.trajectories import checkpoints, hub

ROOT = Path(__file__).parents[1]
STEPS = [f"step{1000 * k}" for k in range(1, 6)]


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory) -> Path:
    """Five plain Hugging Face checkpoints of a toy model; read only."""
    folder = tmp_path_factory.mktemp("plain") / "my-run"
    for i, name in enumerate(STEPS):
        model = neox.build(toy.model_config(init_std=0.3), vocab_size=300, seed=i)
        checkpoints.save(
            folder / name,
            model,
            corpus / "tokenizer",
            tokens=1,
            step=1,
            lr=0.1,
            phase="stable",
            parent=None,
            key="k",
        )
        (folder / name / checkpoints.META).unlink()
    return folder


@pytest.fixture
def project(root, monkeypatch) -> Path:
    """A root that the command works in."""
    for name in ("conf", "notebooks", "data/reference"):
        shutil.copytree(ROOT / name, root / name)
    params = {
        "profile": "toy", "workers": 1, "machine": {"device": "cpu", "compile": False}, "corpus": toy.CORPUS,
        "studies": {"toy": toy.STUDY}, "measure": toy.MEASURE, "verdicts": False,
    }  # fmt: skip
    extra = YAML(typ="safe").load((ROOT / "params.yaml").read_text())
    with open(root / "params.yaml", "w") as f:
        YAML().dump(params | {k: v for k, v in extra.items() if k not in params}, f)
    monkeypatch.chdir(root)
    return root


def call(capfd, *argv: str) -> tuple[int, str, list[str]]:
    """Exit status, what it printed, and the lines of its own on stderr."""
    status = 0
    try:
        cli.main(list(argv))
    except SystemExit as stop:
        status = stop.code or 0
    out, err = capfd.readouterr()
    assert "Traceback" not in err
    return status, out, [line for line in err.splitlines() if line.startswith(("ptq-dynamics:", "skipped"))]


def test_a_folder_gives_table_figure_and_page(project, run, capfd):
    status, out, err = call(
        capfd, "trajectory", str(run), "--bits", "3", "--method", "rtn", "--window", "3", "--tokens-per-step", "64",
    )  # fmt: skip
    assert (status, err) == (0, [])
    folder = project / "reports" / "trajectories" / "my-run"
    assert {p.name for p in folder.iterdir()} == {
        "index.html", "table.csv", "figure.png", "figure.pdf", "trajectory.ipynb", "report.json",
    }  # fmt: skip
    table = pd.read_csv(folder / "table.csv")
    points = table[(table["kind"] == "checkpoint") & (table["bits"] == 3)]
    assert points["tokens"].tolist() == [64000 * k for k in range(1, 6)]
    best, mean = points.loc[points["ce"].idxmin()], table[(table["kind"] == "average") & (table["bits"] == 3)]
    html = (folder / "index.html").read_text()
    for text in (out, html):
        assert f"the lowest loss is that of {best['checkpoint']}: {best['ce']:.4f}" in text
        assert f"Averaging 3 neighbours ({mean['members'].item().split()[0]} to" in text
        assert f"gives {mean['ce'].item():.4f}" in text
    assert "5 checkpoints measured: reports/trajectories/my-run/index.html" in out
    # self-contained, no code, nothing that libraries printed, pictures described
    assert "<script" not in html and not re.search(r'(src|href)="https?:', html) and "import " not in html
    assert "data:image/png;base64" in html and 'alt="Error of quantization along my-run' in html
    assert "output_stderr" not in html and '<html lang="en">' in html


def test_a_hub_with_faults(project, run, tmp_path, monkeypatch, capfd):
    """Six revisions: one is missing, one is cut mid-download, one answers 429 twice. Five rows, one told, status 3."""
    cache = tmp_path / "cache"
    with Hub() as server:
        commits = {name: server.publish("lab/toy", name, run / name) for name in STEPS}
        size = (run / STEPS[0] / "model.safetensors").stat().st_size
        server.fail(rf"GET .*{commits[STEPS[1]]}/model.safetensors", cut_at=size // 2)
        server.fail(
            rf"GET .*{commits[STEPS[3]]}/model.safetensors", status=429, times=2, headers={"Retry-After": "0"}
        )
        for name, value in (
            ("HF_ENDPOINT", server.url),
            ("HF_HUB_CACHE", str(cache)),
            ("HF_HUB_OFFLINE", "0"),
        ):
            monkeypatch.setenv(name, value)  # for the notebook's kernel
        monkeypatch.setattr(hub.constants, "ENDPOINT", server.url)
        monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(cache))
        options = ["--bits", "3", "--method", "rtn", "--window", "2"]
        names = [*STEPS[:2], "step2500", *STEPS[2:]]

        status, out, err = call(capfd, "trajectory", "lab/toy", "--revisions", *names, "--dry-run")
        assert status == 3 and not server.bodies() and not cache.exists()
        assert "5 checkpoints, 1 skipped" in out and "to download" in out and "of disk needed" in out

        status, out, err = call(capfd, "trajectory", "lab/toy", "--revisions", *names, *options)
        assert status == 3
        assert err == [
            "skipped step2500: no such revision in lab/toy; nearest is 'step2000'",
            "ptq-dynamics: 1 left out, told above and on the page",
        ]
        folder = project / "reports" / "trajectories" / "lab-toy"
        table = pd.read_csv(folder / "table.csv")
        assert table[(table["kind"] == "checkpoint") & (table["bits"] == 3)]["checkpoint"].tolist() == STEPS
        assert table["tokens"].isna().all()  # the source tells steps only
        assert server.sent("model.safetensors") == 5 * size  # no byte twice, although one body was cut
        assert [r.start for r in server.bodies("model.safetensors")].count(size // 2) == 1
        whole = [r.path for r in server.bodies() if r.start == 0]
        assert len(whole) == len(set(whole))
        html = (folder / "index.html").read_text()
        assert "1 left out" in html and "step2500: no such revision in lab/toy" in html


def test_average_from_the_command_line(project, run, tmp_path, capfd):
    status, out, err = call(capfd, "average", str(run), "--window", "2", "--last", "4000")
    assert (status, err) == (0, []) and "my-run-4000-lawa2: average of step3000, step4000" in out
    merged = checkpoints.load_model(
        checkpoints.Checkpoint("m", None, None, None, "average", project / "my-run-4000-lawa2", "x")
    )
    assert type(merged).__name__ == "GPTNeoXForCausalLM"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["trajectory", "olmo2_1B"], "unknown source 'olmo2_1B'; did you mean 'olmo2_1b'?"),
        (["trajectory", "conf"], "no checkpoints in this folder"),
        (["trajectory", "RUN", "--revisions", "step1001"], "nearest is 'step1000'"),
        (["trajectory", "RUN", "--bits", "1"], "must be 2 to 8, got 1"),
        (["trajectory", "MIXED"], "step2000: hidden_size is 32, not 16 as in step1000"),
        (["trajectory", "RUN", "--calibration", "nowhere.txt"], "nowhere.txt: no such file"),
        (["average", "RUN", "--window", "6"], "needs 6 checkpoints, there are 5"),
        (["average", "RUN", "--last", "4100"], "nearest is '4000'"),
        (["average", "nowhere/at/all"], "no such folder"),
    ],
)
def test_bad_input_is_one_line(project, run, tmp_path, capfd, argv, says):
    if "MIXED" in argv:
        shutil.copytree(run, tmp_path / "mixed")
        file = tmp_path / "mixed" / "step2000" / "config.json"
        file.write_text(file.read_text().replace('"hidden_size": 16', '"hidden_size": 32'))
    argv = [{"RUN": str(run), "MIXED": str(tmp_path / "mixed")}.get(a, a) for a in argv]
    status, out, err = call(capfd, *argv)
    assert status == 2 and out == "" and len(err) == 1 and says in err[0]
    assert not (project / "reports").exists()
