"""Folders, repositories and families as one kind of thing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import toy
from hub_server import Hub

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.models import neox
from ptq_dynamics.trajectories import checkpoints, hub, sources
from ptq_dynamics.trajectories.publish import publish
from ptq_dynamics.trajectories.sources import obtain, open_source, phases

FAMILIES = Path(__file__).parents[2] / "data" / "reference" / "families.yaml"


@pytest.fixture(scope="module")
def ours(corpus, tmp_path_factory) -> Path:
    """A run of ours: step-0000010 to step-0000030, the last in the decay; read only."""
    folder = tmp_path_factory.mktemp("ours") / "my-run"
    for i, (lr, phase) in enumerate([(0.01, "stable"), (0.01, "stable"), (0.002, "decay")], 1):
        model = neox.build(toy.model_config(init_std=0.3), vocab_size=300, seed=i)
        checkpoints.save(
            folder / f"step-{10 * i:07d}", model, corpus / "tokenizer", tokens=640 * i, step=10 * i, lr=lr,
            phase=phase, parent=None, key="k",
        )  # fmt: skip
    return folder


@pytest.fixture
def plain(ours, tmp_path):
    """Makes a folder of plain Hugging Face checkpoints with these names."""

    def make(*names: str, folder: str = "plain") -> Path:
        for name, source in zip(names, sorted(ours.iterdir()) * 2, strict=False):
            shutil.copytree(source, tmp_path / folder / name)
            (tmp_path / folder / name / checkpoints.META).unlink()
        return tmp_path / folder

    return make


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """A root with the facts on families."""
    (tmp_path / "root" / "data" / "reference").mkdir(parents=True)
    shutil.copy(FAMILIES, tmp_path / "root" / "data" / "reference")
    monkeypatch.setenv("PTQ_DYNAMICS_ROOT", str(tmp_path / "root"))
    return tmp_path / "root"


def listed(source) -> list[tuple]:
    return [(i.name, i.step, i.tokens) for i in source.items]


def one_line(call, *args, **kwargs) -> str:
    with pytest.raises(UserError) as e:
        call(*args, **kwargs)
    assert "\n" not in str(e.value)
    return str(e.value)


# --- folders


def test_our_own_checkpoints_say_where_they_lie(ours):
    source = open_source(str(ours))
    assert (source.name, source.kind, source.skipped) == ("my-run", "folder", ())
    assert listed(source) == [(f"step-{10 * i:07d}", 10 * i, 640 * i) for i in (1, 2, 3)]
    found = list(obtain(source))
    assert [(c.lr, c.phase) for c in found] == [(0.01, "stable"), (0.01, "stable"), (0.002, "decay")]
    assert [c.weights_id for c in found] == [checkpoints.read(c.path).weights_id for c in found]


@pytest.mark.parametrize(
    "names",
    [
        ("step200", "step1000", "step30"),
        ("checkpoint-200", "checkpoint-1000", "checkpoint-30"),
        ("global_step200", "global_step1000", "global_step30"),
        ("iter_0000200", "iter_0001000", "iter_0000030"),
    ],
)
def test_steps_are_read_off_names_in_order_of_number(plain, names):
    folder = plain(*names)
    source = open_source(str(folder))
    assert [(i.step, i.tokens, i.phase) for i in source.items] == [
        (s, None, "unknown") for s in (30, 200, 1000)
    ]
    again = open_source(str(folder), tokens_per_step=2048)
    assert [i.tokens for i in again.items] == [30 * 2048, 200 * 2048, 1000 * 2048]
    assert [c.step for c in obtain(source)] == [30, 200, 1000]


def test_tokens_in_a_name_count_and_an_exact_product_goes_before_them(plain):
    folder = plain("step1000-tokens2B", "step2000-tokens4B")
    assert [i.tokens for i in open_source(str(folder)).items] == [2 * 10**9, 4 * 10**9]
    exact = open_source(str(folder), tokens_per_step=2_097_152)
    assert [i.tokens for i in exact.items] == [2_097_152_000, 4_194_304_000]


def test_what_the_trainer_of_transformers_logs_is_used(plain):
    folder = plain("checkpoint-1", "checkpoint-2", "checkpoint-3")
    for i, lr in enumerate((0.001, 0.001, 0.0), 1):
        log = [{"learning_rate": 1.0, "step": 0}, {"learning_rate": lr, "step": i}, {"eval_loss": 3.0}]
        state = {"global_step": 100 * i, "num_input_tokens_seen": 5000 * i, "log_history": log}
        (folder / f"checkpoint-{i}" / "trainer_state.json").write_text(json.dumps(state))
    items = open_source(str(folder)).items
    assert [(i.step, i.tokens, i.lr) for i in items] == [
        (100, 5000, 0.001),
        (200, 10000, 0.001),
        (300, 15000, 0.0),
    ]
    assert [i.phase for i in items] == ["stable", "stable", "decay"]


def test_phases_follow_the_rate():
    assert phases([1e-4, 1e-3, 1e-3, 5e-4]) == ["warmup", "stable", "stable", "decay"]
    assert phases([1e-3, None]) == ["unknown"] * 2 and phases([1e-3]) == ["unknown"]


def test_broken_ones_are_told_and_the_rest_goes_on(plain):
    folder = plain("step1", "step2", "step3", "final")
    whole = (folder / "step2" / "model.safetensors").read_bytes()
    (folder / "step2" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    (folder / "step3" / "model.safetensors").unlink()
    told = []
    source = open_source(str(folder))
    assert [c.name for c in obtain(source, report=told.append)] == ["step1"]
    assert {s.name: s.reason.split(";")[0].split(" (")[0] for s in told} == {
        "final": "its name states no step",
        "step2": "model.safetensors: cut short or broken",
        "step3": "holds no weights",
    }


def test_weights_that_checkpoint_json_does_not_name_are_skipped(ours, tmp_path):
    shutil.copytree(ours, tmp_path / "run")
    first, second, _ = sorted((tmp_path / "run").iterdir())
    shutil.copy(second / "model.safetensors", first / "model.safetensors")
    told = []
    assert len(list(obtain(open_source(str(tmp_path / "run")), report=told.append))) == 2
    assert "its weights are not those that checkpoint.json names" in told[0].reason


def test_bad_folders(ours, plain, tmp_path, repository):
    assert "no checkpoints in this folder; its sub-folders" in one_line(open_source, str(repository))
    assert "did you mean" in (said := one_line(open_source, str(ours.parent))) and "my-run" in said
    assert "is one checkpoint; name the folder" in one_line(open_source, str(ours / "step-0000010"))
    assert "no such folder" in one_line(open_source, str(tmp_path / "nowhere"))
    assert "no such folder" in one_line(open_source, "./nowhere")
    said = one_line(open_source, str(ours), ["step-0000011"])
    assert "no such checkpoint" in said and "nearest is 'step-0000010'" in said
    source = open_source(str(ours), ["step-0000010", "step-0000021"])
    assert len(source.items) == 1 and "nearest is 'step-0000020'" in source.skipped[0].reason


def test_a_folder_of_different_models_is_refused(plain, ours):
    folder = plain("step1", "step2", "step3")
    file = folder / "step2" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_size": 32}))
    assert (
        "step2: hidden_size is 32, not 16 as in step1; a trajectory is checkpoints of one model"
        in one_line(open_source, str(folder))
    )


def test_unknown_sources(repository):
    said = one_line(open_source, "olmo2_1B")
    assert "unknown source 'olmo2_1B'; did you mean 'olmo2_1b'?" in said and "owner/name" in said
    assert "not a repository name" in one_line(open_source, "lab/to y")
    assert "transformers" in one_line(open_source, "opensci_1p7b")  # does not load under ours


# --- the Hub


@pytest.fixture(scope="module")
def server():
    with Hub() as server:
        yield server


def test_a_repository_is_its_branches_that_state_a_step(server, ours, tmp_path, repository):
    for folder in sorted(ours.iterdir()):
        server.publish("lab/toy", folder.name.replace("step-", "step"), folder)
    server.publish("lab/toy", "main", {"README.md": b"toy"})
    where = {"endpoint": server.url, "cache": tmp_path / "cache", "offline": False}
    source = open_source("lab/toy", **where)
    assert not server.bodies() and source.items[0].to_download == source.items[0].size > 0
    assert [(i.name, i.step) for i in source.items] == [(f"step{10 * i:07d}", 10 * i) for i in (1, 2, 3)]
    found = list(obtain(source.only(["step0000020"]), say=lambda _: None))
    assert [(c.name, c.step, c.tokens, c.lr) for c in found] == [
        ("step0000020", 20, 1280, 0.01)
    ]  # as it says itself
    assert len(server.bodies("model.safetensors")) == 1
    said = one_line(open_source, "lab/toy", ["step0000021"], **where)
    assert "no usable revision" in said and "nearest is 'step0000020'" in said
    server.publish("lab/empty", "main", {"README.md": b"toy"})
    assert "states a step (main)" in one_line(open_source, "lab/empty", **where)
    assert "no such model" in one_line(open_source, "lab/none", **where)


def test_another_model_in_a_repository_is_skipped(server, ours, tmp_path, repository):
    first = sorted(ours.iterdir())[0]
    files = {p.name: p.read_bytes() for p in first.iterdir()}
    del files[checkpoints.META]
    server.publish("lab/mixed", "step1", files)
    other = json.loads(files["config.json"]) | {"num_hidden_layers": 7}
    server.publish("lab/mixed", "step2", files | {"config.json": json.dumps(other).encode()})
    source = open_source("lab/mixed", endpoint=server.url, cache=tmp_path / "cache", offline=False)
    told = []
    assert [c.name for c in obtain(source, report=told.append, say=lambda _: None)] == ["step1"]
    assert told[0].reason == "num_hidden_layers is 7, not 1 as in step1; it is another model"


def test_the_local_family_needs_no_network(ours, repository, monkeypatch):
    assert "run `dvc repro publish`" in one_line(open_source, "mini")
    folders = {p.name: p for p in ours.iterdir()}
    folders["main"] = folders["step-0000030"]
    publish(folders, "ptq-dynamics/mini", repository / "data" / "hub")
    monkeypatch.setattr(hub, "_remote_refs", None)
    monkeypatch.setattr(hub, "_remote_files", None)
    source = open_source("mini")
    assert source.family == "mini" and source.title.startswith("mini (ours")
    # the published run is not the default profile's: each checkpoint says itself where it lies
    assert [(c.step, c.tokens, c.lr, c.phase) for c in obtain(source, say=lambda _: None)] == [
        (10, 640, 0.01, "stable"), (20, 1280, 0.01, "stable"), (30, 1920, 0.002, "decay"),
    ]  # fmt: skip
    assert open_source("ptq-dynamics/mini").family == "mini"


def test_a_family_takes_its_facts_from_the_table_and_the_names_from_the_repository(
    server, ours, tmp_path, repository
):
    first = sorted(ours.iterdir())[0]
    files = {p.name: p.read_bytes() for p in first.iterdir() if p.name != checkpoints.META}
    for name in ("step1000", "step2000", "step8000"):
        server.publish("EleutherAI/pythia-70m", name, files)
    where = {"endpoint": server.url, "cache": tmp_path / "cache", "offline": False}
    source = open_source("pythia_70m", ["step1000", "step8001", "step8000"], **where)
    assert listed(source) == [("step1000", 1000, 2_097_152_000), ("step8000", 8000, 16_777_216_000)]
    assert source.items[0].phase == "warmup" and source.items[1].lr == pytest.approx(9.953e-4, rel=1e-3)
    assert [s.name for s in source.skipped] == ["step8001"] and "'step8000'" in source.skipped[0].reason
    whole = open_source("EleutherAI/pythia-70m", **where)  # the same family by its repository
    assert whole.family == "pythia_70m" and len(whole.items) == 3
    assert "step16000" in {s.name for s in whole.skipped}  # listed, not there


def test_only_keeps_order_and_drops_what_was_skipped(ours):
    source = open_source(str(ours), ["step-0000030", "step-0000010", "step-9"])
    part = source.only(["step-0000030", "step-0000010"])
    assert [i.name for i in part.items] == ["step-0000010", "step-0000030"] and part.skipped == ()
    assert sources.open_source(str(ours)).plan is None
