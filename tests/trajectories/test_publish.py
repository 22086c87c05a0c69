"""A local Hub that the real client reads without a network."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub
import pytest
import toy
import transformers

from ptq_dynamics.core.config import load, read_yaml
from ptq_dynamics.core.errors import UserError
from ptq_dynamics.models import neox
from ptq_dynamics.training.schedule import lr_at
from ptq_dynamics.training.study import Study, expand
from ptq_dynamics.trajectories import checkpoints, families, hub
from ptq_dynamics.trajectories.publish import publish

ROOT = Path(__file__).parents[2]
REPO = "owner/run"


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory) -> dict[str, Path]:
    """Two checkpoints by name, the first with optimizer state; read only."""
    folder = tmp_path_factory.mktemp("run")
    for i in (1, 2):
        model = neox.build(toy.model_config(init_std=0.3), vocab_size=300, seed=i)
        state = {n: p.detach().clone() for n, p in model.named_parameters()} if i == 1 else None
        checkpoints.save(
            folder / f"step-{i}", model, corpus / "tokenizer", tokens=64 * i, step=i, lr=0.01, phase="stable",
            parent=None, key="k", state=state,
        )  # fmt: skip
    return {p.name: p for p in sorted(folder.iterdir())}


def everything(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_real_client_reads_it_offline(run, tmp_path):
    commits = publish(run, REPO, tmp_path)
    for name, folder in run.items():
        got = Path(
            huggingface_hub.snapshot_download(REPO, revision=name, cache_dir=tmp_path, local_files_only=True)
        )
        assert got.name == commits[name]
        assert (got / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            REPO, revision=name, cache_dir=tmp_path, local_files_only=True
        )
        assert type(model).__name__ == "GPTNeoXForCausalLM"
        transformers.AutoTokenizer.from_pretrained(
            REPO, revision=name, cache_dir=tmp_path, local_files_only=True
        )
    known = huggingface_hub.scan_cache_dir(tmp_path)
    assert not known.warnings and {r for v in list(known.repos)[0].revisions for r in v.refs} == set(run)


def test_our_own_path_reads_it_and_the_checkpoints_are_whole(run, tmp_path):
    publish(run, REPO, tmp_path)
    plan = hub.resolve(REPO, list(run), cache=tmp_path, offline=True)
    found = {r.name: folder for r, folder in hub.fetch(plan, progress=False, say=lambda _: None)}
    for name, folder in found.items():
        own = checkpoints.verify(folder)  # without the optimizer state, and it does not claim to have it
        assert own.weights_id == checkpoints.read(run[name]).weights_id == hub.weights_id(folder)
        assert not (folder / checkpoints.STATE).exists() and not folder.is_symlink()


def test_again_changes_nothing_and_what_is_no_longer_named_goes(run, tmp_path):
    first = publish(run, REPO, tmp_path)
    before = everything(tmp_path)
    assert publish(run, REPO, tmp_path) == first and everything(tmp_path) == before
    one = {"step-2": run["step-2"]}
    assert publish(one, REPO, tmp_path) == {"step-2": first["step-2"]}
    left = everything(tmp_path)
    assert left == {
        k: v for k, v in before.items() if first["step-1"] not in k and not k.endswith("refs/step-1")
    }


def test_two_names_of_one_checkpoint_share_a_commit(run, tmp_path):
    commits = publish(run | {"main": run["step-2"]}, REPO, tmp_path)
    assert commits["main"] == commits["step-2"] != commits["step-1"]
    assert {r.name for r in hub.resolve(REPO, cache=tmp_path, offline=True).revisions} == {*run, "main"}


def test_other_weights_under_a_name_are_another_commit(run, tmp_path):
    first = publish({"main": run["step-1"]}, REPO, tmp_path)
    second = publish({"main": run["step-2"]}, REPO, tmp_path)
    assert first != second
    assert [p.name for p in (tmp_path / "models--owner--run" / "snapshots").iterdir()] == [second["main"]]


def test_bad_input(run, tmp_path):
    with pytest.raises(UserError, match="nothing to publish"):
        publish({}, REPO, tmp_path)
    shutil.copytree(run["step-1"], tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").unlink()
    with pytest.raises(UserError, match="broken: cannot be published, it holds no weights"):
        publish({"x": tmp_path / "broken"}, REPO, tmp_path / "hub")


def test_the_facts_on_mini_are_those_of_the_default_study():
    """Steps, tokens and learning rates of families.yaml against the schedule that trains the run."""
    study = load(Study, read_yaml(ROOT / "params.yaml")["studies"]["token_budgets"], "params.yaml")
    runs = expand(study)
    trunk = next(r for r in runs if r.config.parent is None and r.config.seed == 0)
    last = max((r for r in runs if r.config.parent == trunk.name), key=lambda r: r.branch_step)
    family = families.load_families(ROOT / "data" / "reference" / "families.yaml")["mini"]
    measured = [r for r in families.rows(family) if r.name != family.final.name]
    assert {r.step for r in measured} == {*trunk.measured_steps, *last.measured_steps}
    assert family.stages["pretrain"].last_step == last.measured_steps[-1]
    for r in measured:
        config = trunk.config if r.step <= trunk.measured_steps[-1] else last.config
        assert r.tokens == r.step * config.tokens_per_step
        # ours is the rate of the last update, the family's that of the next
        assert r.lr == pytest.approx(lr_at(config.schedule, r.step - 1), abs=2e-5)
