from __future__ import annotations

import hashlib
import json
import shutil

import pandas as pd
import pytest
import torch
import toy
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.core.files import read_json
from ptq_dynamics.corpus.tokens import TokenSet
from ptq_dynamics.models import neox
from ptq_dynamics.training import loop
from ptq_dynamics.training.loop import Machine, RunConfig, checkpoint_name, train
from ptq_dynamics.training.schedule import Schedule, lr_at
from ptq_dynamics.training.step import Learner, OptimizerConfig
from ptq_dynamics.trajectories import checkpoints


def run_config(steps=12, checkpoint_steps=(4, 8, 12), **changes):
    schedule = changes.pop("schedule", None) or Schedule(
        shape="wsd", peak_lr=0.01, steps=steps, warmup_steps=2, decay_steps=4
    )
    base = dict(model=toy.model_config(), optimizer=OptimizerConfig(), sequences=4, seed=0, precision="fp32")
    return RunConfig(**{**base, "schedule": schedule, "checkpoint_steps": checkpoint_steps, **changes})


def machine(**changes):
    return Machine(**{"device": "cpu", "compile": False, "log_every": 3, "resume_steps": 3, **changes})


def weights(folder):
    return hashlib.sha256((folder / checkpoints.WEIGHTS).read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def done(corpus, tmp_path_factory):
    """A finished run; read only."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    train(run_config(keep_state=True), folder, corpus, machine())
    return folder


def test_what_a_run_leaves(done, corpus):
    assert sorted(p.name for p in done.iterdir()) == [
        "metrics.csv", "run.json", "step-0000004", "step-0000008", "step-0000012",
    ]  # fmt: skip
    log = pd.read_csv(done / "metrics.csv")
    assert log["step"].tolist() == [3, 4, 6, 8, 9, 12]  # every third, and at checkpoints
    assert (log["tokens"] == 64 * log["step"]).all()
    assert log["lr"].tolist() == [lr_at(run_config().schedule, s - 1) for s in log["step"]]
    record = read_json(done / "run.json", hint="")
    assert record["tokens"] == 12 * 64 and record["corpus"] == TokenSet.open(corpus, "train").id
    assert record["parameters"] == sum(p.numel() for p in neox.build(toy.model_config(), 300, 0).parameters())
    assert {"torch", "transformers", "python"} <= record["versions"].keys() and record["hardware"][
        "cores"
    ] >= 1


def test_checkpoints_say_where_they_lie_and_load_anywhere(done):
    points = [checkpoints.verify(done / checkpoint_name(s)) for s in (4, 8, 12)]
    assert [(p.step, p.tokens, p.phase) for p in points] == [
        (4, 256, "stable"),
        (8, 512, "stable"),
        (12, 768, "decay"),
    ]
    assert points[-1].lr == lr_at(run_config().schedule, 11)
    model = AutoModelForCausalLM.from_pretrained(points[-1].path)
    text = AutoTokenizer.from_pretrained(points[-1].path)("The river keeps the stone", return_tensors="pt")
    assert (
        model(text["input_ids"]).logits.shape[-1]
        == len(AutoTokenizer.from_pretrained(points[-1].path))
        == 300
    )


def test_weights_and_log_by_a_loop_written_out_here(done, corpus):
    config, log = run_config(), pd.read_csv(done / "metrics.csv")
    model = neox.build(config.model, 300, seed=0)
    learner, text = Learner(model, config.optimizer, "fp32", compiled=False), TokenSet.open(corpus, "train")
    told = []
    for step in range(12):
        batch = torch.from_numpy(text.batch(0, step, 4, 16))
        told.append(learner.update(batch, lr_at(config.schedule, step), 4))
    saved = load_file(done / checkpoint_name(12) / checkpoints.WEIGHTS)
    assert all(torch.equal(p, saved[n]) for n, p in model.named_parameters())
    for i, (first, last) in enumerate([(0, 3), (3, 4), (4, 6), (6, 8), (8, 9), (9, 12)]):
        assert log["loss"][i] == pytest.approx(
            sum(x[0].item() for x in told[first:last]) / (last - first), rel=1e-6
        )
        assert log["grad_norm"][i] == pytest.approx(
            sum(x[1].item() for x in told[first:last]) / (last - first), rel=1e-6
        )
    state = load_file(done / checkpoint_name(12) / checkpoints.STATE)
    assert all(torch.equal(value, state[k]) for k, value in learner.state().items())


def test_training_learns(corpus, tmp_path):
    config = run_config(steps=80, checkpoint_steps=(80,))
    train(config, tmp_path / "run", corpus, machine(log_every=10))
    loss = pd.read_csv(tmp_path / "run/metrics.csv")["loss"]
    assert loss.iloc[-1] < loss.iloc[0] - 1.0  # from ln 300 = 5.7


def test_micro_batches_change_the_rounding_alone(done, corpus, tmp_path):
    train(run_config(keep_state=True), tmp_path / "run", corpus, machine(micro_batch=3))
    a, b = (load_file(f / checkpoint_name(12) / checkpoints.WEIGHTS) for f in (done, tmp_path / "run"))
    for name, value in a.items():
        if "query_key_value.bias" not in name:  # the keys' has no gradient but rounding
            torch.testing.assert_close(b[name], value, rtol=1e-3, atol=1e-4)


def test_a_finished_run_is_left_alone_and_swept(done, corpus, tmp_path):
    folder = shutil.copytree(done, tmp_path / "run")
    stamp = (folder / "run.json").stat().st_mtime_ns
    (folder / "resume").mkdir()
    (folder / ".tmp-abc").mkdir()
    (folder / ".tmp-def.csv").write_text("")
    train(run_config(keep_state=True), folder, corpus, machine())
    assert (folder / "run.json").stat().st_mtime_ns == stamp
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in done.iterdir())


def tear(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "checkpoint.json"])
@pytest.mark.parametrize(
    "damage", [tear, lambda p: p.unlink(), lambda p: p.write_bytes(bytes(p.stat().st_size))]
)
def test_a_torn_checkpoint_of_a_finished_run_is_redone(done, corpus, tmp_path, file, damage):
    folder = shutil.copytree(done, tmp_path / "run")
    damage(folder / checkpoint_name(8) / file)
    assert not loop.finished(folder, train_key(corpus), run_config(keep_state=True))
    train(run_config(keep_state=True), folder, corpus, machine())
    assert [weights(folder / checkpoint_name(s)) for s in (4, 8, 12)] == [
        weights(done / checkpoint_name(s)) for s in (4, 8, 12)
    ]


def train_key(corpus):
    return loop.run_key(run_config(keep_state=True), TokenSet.open(corpus, "train").id)


def interrupted(done, corpus, folder, monkeypatch, at):
    """A run that stopped before update ``at`` (0-based)."""
    real, left = Learner.update, iter(range(at))

    def update(self, *args):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return real(self, *args)

    with monkeypatch.context() as m:
        m.setattr(Learner, "update", update)
        with pytest.raises(KeyboardInterrupt):
            train(run_config(keep_state=True), folder, corpus, machine())
    return folder


@pytest.mark.parametrize("at", [0, 1, 3, 4, 7, 11])
def test_interrupted_anywhere_and_run_again(done, corpus, tmp_path, monkeypatch, at):
    folder = interrupted(done, corpus, tmp_path / "run", monkeypatch, at)
    train(run_config(keep_state=True), folder, corpus, machine())
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in done.iterdir())
    assert [weights(folder / checkpoint_name(s)) for s in (4, 8, 12)] == [
        weights(done / checkpoint_name(s)) for s in (4, 8, 12)
    ]
    columns = ["step", "tokens", "lr", "loss", "grad_norm"]
    pd.testing.assert_frame_equal(
        pd.read_csv(folder / "metrics.csv")[columns],
        pd.read_csv(done / "metrics.csv")[columns],
        check_exact=True,
    )


@pytest.mark.parametrize(
    "torn", ["resume/model.safetensors", "resume/optimizer.safetensors", "step-0000004/model.safetensors"]
)
def test_a_torn_save_is_not_resumed_from(done, corpus, tmp_path, monkeypatch, torn):
    folder = interrupted(done, corpus, tmp_path / "run", monkeypatch, 7)
    tear(folder / torn)
    train(run_config(keep_state=True), folder, corpus, machine())
    assert loop.finished(folder, train_key(corpus), run_config(keep_state=True))
    assert weights(folder / checkpoint_name(12)) == weights(done / checkpoint_name(12))


def test_the_save_of_another_configuration_is_not_resumed_from(done, corpus, tmp_path, monkeypatch):
    folder = interrupted(done, corpus, tmp_path / "run", monkeypatch, 7)
    other = run_config(seed=1)
    train(other, folder, corpus, machine())
    train(other, tmp_path / "straight", corpus, machine())
    assert weights(folder / checkpoint_name(12)) == weights(tmp_path / "straight" / checkpoint_name(12))
    assert weights(folder / checkpoint_name(12)) != weights(done / checkpoint_name(12))


def branch_config(**changes):
    schedule = Schedule(shape="wsd", peak_lr=0.01, steps=10, warmup_steps=2, decay_steps=2)
    return run_config(
        schedule=schedule,
        checkpoint_steps=(10,),
        **{"branch_step": 8, "parent": "run", "parent_key": "k", **changes},
    )


def test_a_branch_goes_on_from_weights_moments_and_data_of_its_parent(done, corpus, tmp_path):
    """Its parent decays over its last four updates, so that a branch at 8 whose schedule is the parent's is it."""
    same = run_config(branch_step=8, parent="run", checkpoint_steps=(12,))
    train(same, tmp_path / "branch", corpus, machine(), done)
    assert weights(tmp_path / "branch" / checkpoint_name(12)) == weights(done / checkpoint_name(12))
    log = pd.read_csv(tmp_path / "branch/metrics.csv")
    assert log["step"].tolist() == [9, 12] and log["tokens"].tolist() == [576, 768]
    point = checkpoints.read(tmp_path / "branch" / checkpoint_name(12))
    assert (point.step, point.tokens, point.phase) == (12, 768, "decay")
    assert json.loads((point.path / "checkpoint.json").read_text())["parent"] == "run"


def test_a_branch_without_its_parents_checkpoint(done, corpus, tmp_path):
    with pytest.raises(
        UserError, match="no such checkpoint to branch from; the parent saves step-0000004, step-0000008"
    ):
        train(branch_config(branch_step=7), tmp_path / "branch", corpus, machine(), done)
    folder = shutil.copytree(done, tmp_path / "run")
    tear(folder / checkpoint_name(8) / checkpoints.STATE)
    with pytest.raises(UserError, match="optimizer.safetensors: torn or changed checkpoint"):
        train(branch_config(), tmp_path / "branch", corpus, machine(), folder)


def test_a_branch_from_a_checkpoint_without_optimizer_state(corpus, tmp_path):
    train(run_config(), tmp_path / "run", corpus, machine())
    with pytest.raises(UserError, match="carries no optimizer state; branch from a checkpoint of a trunk"):
        train(branch_config(), tmp_path / "branch", corpus, machine(), tmp_path / "run")


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_divergence_names_step_rate_and_the_last_good_checkpoint(corpus, tmp_path, monkeypatch, what):
    real, calls = Learner.update, iter(range(100))

    def update(self, *args):
        loss, norm = real(self, *args)
        bad = next(calls) == 6
        return (
            (loss * float("nan"), norm)
            if bad and what == "loss"
            else (loss, norm * float("inf") if bad else norm)
        )

    monkeypatch.setattr(Learner, "update", update)
    with pytest.raises(UserError) as e:
        train(run_config(), tmp_path / "run", corpus, machine())
    told = str(e.value)
    assert "at step 7 with learning rate 0.01;" in told and "\n" not in told
    assert f"last good checkpoint: {tmp_path / 'run' / checkpoint_name(4)}. Lower peak_lr" in told
    assert not (tmp_path / "run" / checkpoint_name(8)).exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"checkpoint_steps": (4, 8)}, "checkpoint_steps must ascend"),
        ({"checkpoint_steps": (8, 4, 12)}, "checkpoint_steps must ascend"),
        ({"checkpoint_steps": (0, 12)}, "checkpoint_steps must ascend"),
        ({"checkpoint_steps": ()}, "checkpoint_steps must ascend"),
        ({"branch_step": 12}, "branch_step 12 is not before the end 12"),
    ],
)
def test_runs_that_make_no_sense(changes, says):
    with pytest.raises(ValueError, match=says):
        run_config(**changes)


def test_the_key_follows_everything_that_decides_weights(corpus):
    train_id = TokenSet.open(corpus, "train").id
    base = run_config()
    other = [
        run_config(seed=1),
        run_config(precision="bf16"),
        run_config(keep_state=True),
        run_config(parent_key="x"),
        run_config(schedule=Schedule(shape="wsd", peak_lr=0.02, steps=12, warmup_steps=2, decay_steps=4)),
        run_config(optimizer=OptimizerConfig(weight_decay=0.2)),
        run_config(model=toy.model_config(layers=2)),
        run_config(checkpoint_steps=(12,)),
    ]
    keys = {loop.run_key(c, train_id) for c in [base, *other]} | {loop.run_key(base, "another text")}
    assert len(keys) == len(other) + 2
    assert loop.run_key(run_config(), train_id) == loop.run_key(base, train_id)
