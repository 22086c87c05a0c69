from __future__ import annotations

import hashlib
import shutil

import pandas as pd
import pytest
import torch
import toy
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ptq_dynamics.core import devices
from ptq_dynamics.core.errors import UserError
from ptq_dynamics.core.files import read_json
from ptq_dynamics.corpus.tokens import TokenSet
from ptq_dynamics.models import neox
from ptq_dynamics.training import loop
from ptq_dynamics.training.loop import Machine, RunConfig, checkpoint_name, train
from ptq_dynamics.training.schedule import Schedule, lr_at
from ptq_dynamics.training.step import Learner, OptimizerConfig
from ptq_dynamics.trajectories import checkpoints

STATE = {"state_steps": (4, 8, 12)}


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
    train(run_config(**STATE), folder, corpus, machine())
    return folder


def test_what_a_run_leaves(done, corpus):
    assert sorted(p.name for p in done.iterdir()) == [
        "metrics.csv", "run.json", "step-0000004", "step-0000008", "step-0000012",
    ]  # fmt: skip
    log = pd.read_csv(done / "metrics.csv")
    assert log["step"].tolist() == [3, 6, 9, 12]  # every third
    assert (log["tokens"] == 64 * log["step"]).all()
    assert log["lr"].tolist() == [lr_at(run_config().schedule, s - 1) for s in log["step"]]
    record = read_json(done / "run.json", hint="")
    assert record["tokens"] == 12 * 64 and record["corpus"] == TokenSet.open(corpus, "train").id
    assert record["parameters"] == sum(p.numel() for p in neox.build(toy.model_config(), 300, 0).parameters())
    assert record["precision"] == "fp32"
    assert {"torch", "transformers", "python"} <= record["versions"].keys() and record["hardware"][
        "cores"
    ] >= 1


def test_automatic_precision_is_one_run_and_says_what_it_used(corpus, tmp_path):
    config = run_config(precision="auto")
    used = devices.precision("auto", "cpu")
    train(config, tmp_path / "auto", corpus, machine())
    train(run_config(precision=used), tmp_path / used, corpus, machine())
    assert read_json(tmp_path / "auto" / "run.json", hint="")["precision"] == used
    assert weights(tmp_path / "auto" / "step-0000012") == weights(tmp_path / used / "step-0000012")


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
    for i, (first, last) in enumerate([(0, 3), (3, 6), (6, 9), (9, 12)]):
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
    train(run_config(**STATE), tmp_path / "run", corpus, machine(micro_batch=3))
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
    train(run_config(**STATE), folder, corpus, machine())
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
    assert not is_finished(folder, corpus)
    train(run_config(**STATE), folder, corpus, machine())
    assert [weights(folder / checkpoint_name(s)) for s in (4, 8, 12)] == [
        weights(done / checkpoint_name(s)) for s in (4, 8, 12)
    ]


def is_finished(folder, corpus, config=None):
    """Whether nothing is left to be trained."""
    config, there = config or run_config(**STATE), loop.points(folder)
    wanted = {*config.checkpoint_steps, *(p.step for p in there)}
    keys = loop.prefix_keys(config, wanted, TokenSet.open(corpus, "train").id)
    found = loop.spared(config, keys, there)
    return found.start == config.schedule.steps and found.origin.path is None


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
            train(run_config(**STATE), folder, corpus, machine())
    return folder


@pytest.mark.parametrize("at", [0, 1, 3, 4, 7, 11])
def test_interrupted_anywhere_and_run_again(done, corpus, tmp_path, monkeypatch, at):
    folder = interrupted(done, corpus, tmp_path / "run", monkeypatch, at)
    train(run_config(**STATE), folder, corpus, machine())
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
    train(run_config(**STATE), folder, corpus, machine())
    assert is_finished(folder, corpus)
    assert weights(folder / checkpoint_name(12)) == weights(done / checkpoint_name(12))


def test_the_save_of_another_configuration_is_not_resumed_from(done, corpus, tmp_path, monkeypatch):
    folder = interrupted(done, corpus, tmp_path / "run", monkeypatch, 7)
    other = run_config(seed=1)
    train(other, folder, corpus, machine())
    train(other, tmp_path / "straight", corpus, machine())
    assert weights(folder / checkpoint_name(12)) == weights(tmp_path / "straight" / checkpoint_name(12))
    assert weights(folder / checkpoint_name(12)) != weights(done / checkpoint_name(12))


def count_updates(monkeypatch):
    """The number of updates made from now on, as a list that grows."""
    real, made = Learner.update, []

    def update(self, *args):
        made.append(1)
        return real(self, *args)

    monkeypatch.setattr(Learner, "update", update)
    return made


LENT = [  # configuration, updates that are left to make when the run of ``done`` lends what it has
    (dict(schedule=Schedule(shape="constant", peak_lr=0.01, steps=12, warmup_steps=2)), 4),
    (dict(schedule=Schedule(shape="wsd", peak_lr=0.01, steps=9, warmup_steps=2, decay_steps=1), checkpoint_steps=(9,)), 1),
    (dict(schedule=Schedule(shape="wsd", peak_lr=0.01, steps=7, warmup_steps=2, decay_steps=2), checkpoint_steps=(4, 7)), 3),
    (dict(checkpoint_steps=(8, 12)), 0),
    (dict(checkpoint_steps=(6, 12)), 8),  # nobody has its checkpoint at 6
    (dict(reorder=(8, 3), checkpoint_steps=(12,)), 4),
    (dict(reorder=(6, 3), checkpoint_steps=(12,)), 8),
    (dict(schedule=Schedule(shape="constant", peak_lr=0.01, steps=12, warmup_steps=1)), 12),
    (dict(schedule=Schedule(shape="constant", peak_lr=0.02, steps=12, warmup_steps=2)), 12),
    (dict(seed=1), 12),
    (dict(optimizer=OptimizerConfig(weight_decay=0.2)), 12),
    (dict(sequences=2), 12),
    (dict(precision="bf16"), 12),
    (dict(model=toy.model_config(layers=2)), 12),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "left"), LENT)
def test_what_another_run_shares_is_taken_from_it_and_the_result_is_the_same(
    done, corpus, tmp_path, monkeypatch, changes, left
):
    config = run_config(**changes)
    train(config, tmp_path / "alone", corpus, machine())
    made = count_updates(monkeypatch)
    key = train(config, tmp_path / "run", corpus, machine(), [done])
    assert len(made) == left and key == loop.run_key(config, TokenSet.open(corpus, "train").id)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == sorted(
        p.name for p in (tmp_path / "alone").iterdir()
    )
    for step in config.checkpoint_steps:
        a, b = (checkpoints.verify(tmp_path / f / checkpoint_name(step)) for f in ("run", "alone"))
        assert weights(a.path) == weights(b.path) and (a.tokens, a.lr, a.phase) == (b.tokens, b.lr, b.phase)
    logs = [pd.read_csv(tmp_path / f / "metrics.csv").drop(columns="seconds") for f in ("run", "alone")]
    pd.testing.assert_frame_equal(*logs, check_exact=True)
    assert is_finished(tmp_path / "run", corpus, config)


def test_a_longer_run_goes_on_from_the_end_of_a_shorter_one(corpus, tmp_path, monkeypatch):
    """Twelve is no multiple of the rows of the log: the row that the end cut short is made whole."""
    short = run_config(
        schedule=Schedule(shape="constant", peak_lr=0.01, steps=10), checkpoint_steps=(10,), state_steps=(10,)
    )
    longer = run_config(
        schedule=Schedule(shape="constant", peak_lr=0.01, steps=14), checkpoint_steps=(10, 14)
    )
    train(short, tmp_path / "short", corpus, machine())
    assert pd.read_csv(tmp_path / "short/metrics.csv")["step"].tolist() == [3, 6, 9, 10]
    train(longer, tmp_path / "alone", corpus, machine())
    made = count_updates(monkeypatch)
    train(longer, tmp_path / "run", corpus, machine(), [tmp_path / "short"])
    assert len(made) == 4
    logs = [pd.read_csv(tmp_path / f / "metrics.csv").drop(columns="seconds") for f in ("run", "alone")]
    assert logs[0]["step"].tolist() == [3, 6, 9, 12, 14]
    pd.testing.assert_frame_equal(*logs, check_exact=True)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "checkpoint.json"])
def test_what_is_torn_is_not_taken(done, corpus, tmp_path, monkeypatch, file):
    lender = shutil.copytree(done, tmp_path / "lender")
    tear(lender / checkpoint_name(8) / file)
    made = count_updates(monkeypatch)
    config = run_config(schedule=Schedule(shape="constant", peak_lr=0.01, steps=12, warmup_steps=2))
    train(config, tmp_path / "run", corpus, machine(), [lender])
    assert len(made) == 8  # from step 4


def test_one_checkpoint_more_is_made_from_the_nearest_before_it(done, corpus, tmp_path, monkeypatch):
    folder = shutil.copytree(done, tmp_path / "run")
    made = count_updates(monkeypatch)
    train(run_config(checkpoint_steps=(4, 8, 10, 12), state_steps=(4, 8, 12)), folder, corpus, machine())
    assert len(made) == 4
    assert weights(folder / checkpoint_name(12)) == weights(done / checkpoint_name(12))


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
        ({"state_steps": (5,)}, "state_steps must be among checkpoint_steps"),
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
        run_config(reorder=(11, 1)),
        run_config(schedule=Schedule(shape="wsd", peak_lr=0.02, steps=12, warmup_steps=2, decay_steps=4)),
        run_config(schedule=Schedule(shape="wsd", peak_lr=0.01, steps=12, warmup_steps=2, decay_steps=3)),
        run_config(optimizer=OptimizerConfig(weight_decay=0.2)),
        run_config(model=toy.model_config(layers=2)),
        run_config(sequences=5),
    ]
    keys = {loop.run_key(c, train_id) for c in [base, *other]} | {loop.run_key(base, "another text")}
    assert len(keys) == len(other) + 2
    same = [
        run_config(**STATE),
        run_config(checkpoint_steps=(12,)),
        run_config(parent="x"),
        run_config(reorder=(12, 1)),
    ]
    assert {loop.run_key(c, train_id) for c in same} == {loop.run_key(base, train_id)}


def test_the_hash_of_a_beginning_is_shared_up_to_where_runs_part(corpus):
    schedules = [
        Schedule(shape="constant", peak_lr=0.01, steps=20, warmup_steps=2),
        Schedule(shape="wsd", peak_lr=0.01, steps=12, warmup_steps=2, decay_steps=4),
    ]
    trunk, branch = (
        loop.prefix_keys(run_config(schedule=s, checkpoint_steps=(s.steps,)), range(30), "text")
        for s in schedules
    )
    assert list(trunk) == list(range(21)) and list(branch) == list(range(13))
    assert [s for s in branch if branch[s] == trunk[s]] == list(
        range(9)
    )  # update 8, the ninth, is the first to differ
    assert len(set(trunk.values())) == 21


def test_what_watches_a_run_is_logged_and_changes_nothing(done, corpus, tmp_path):
    from ptq_dynamics.evaluation.monitor import QuantizationMonitor
    from ptq_dynamics.quantization.spec import QuantSpec

    spec = QuantSpec(method="rtn", bits=3, group_size=16)
    monitor = QuantizationMonitor.of(corpus, length=16, sequences=3, quantizers=[spec], every=6)
    train(run_config(**STATE), tmp_path, corpus, machine(), watch=monitor)
    for step in (4, 8, 12):
        assert weights(tmp_path / checkpoint_name(step)) == weights(done / checkpoint_name(step))
    log = pd.read_csv(tmp_path / "metrics.csv").set_index("step")
    assert log.loc[[3, 9], "quantization/ce"].isna().all()
    for reading in monitor.readings:
        row = log.loc[reading["step"]]
        assert row["quantization/ce"] == pytest.approx(reading["ce"])
        assert row[f"quantization/{spec.label}"] == pytest.approx(reading[spec.label])
    assert [r["step"] for r in monitor.readings] == [6, 12]
    plain = pd.read_csv(done / "metrics.csv").set_index("step")
    assert (log[["loss", "lr", "grad_norm"]] == plain[["loss", "lr", "grad_norm"]]).all(axis=None)
