from __future__ import annotations

import pytest
import torch
import toy

from ptq_dynamics.core import paths
from ptq_dynamics.core.errors import UserError
from ptq_dynamics.models.neox import build
from ptq_dynamics.training import loop, study
from ptq_dynamics.training.schedule import lr_at, phase_at
from ptq_dynamics.training.study import Member, Study, expand
from ptq_dynamics.trajectories import checkpoints

TRUNK, COOLDOWN = toy.STUDY["members"]["trunk"], toy.STUDY["members"]["cooldown"]


def make(members=None, **changes):
    return toy.config(Study, toy.STUDY, members=members or toy.STUDY["members"], **changes)


def runs(members=None, **changes):
    return expand(make(members, **changes))


def keys(found):
    return {r.name: loop.run_key(r.config, "text") for r in found}


def test_trunks_and_branches_by_hand():
    found = runs()
    assert [r.name for r in found] == [
        "trunk-seed0", "trunk-seed1",
        "trunk-cooldown-0.00192M-seed0", "trunk-cooldown-0.00384M-seed0",
        "trunk-cooldown-0.00192M-seed1", "trunk-cooldown-0.00384M-seed1",
    ]  # fmt: skip
    trunk, branch = found[0].config, found[3].config
    assert trunk.checkpoint_steps == trunk.state_steps == (30, 60) and trunk.seed == 0
    assert (found[3].branch_step, branch.schedule.steps, branch.schedule.decay_steps) == (60, 90, 30)
    assert branch.checkpoint_steps == (90,) and branch.parent == "trunk-seed0" and not branch.state_steps
    assert found[3].labels() == {
        "run": "trunk-cooldown-0.00384M-seed0", "member": "cooldown", "seed": 0, "shape": "wsd", "peak_lr": 0.01,
        "weight_decay": 0.1, "cooldown": "linear", "decay_tokens": 1920, "final_fraction": 0.0, "sequences": 4,
        "branch_tokens": 3840, "run_tokens": 5760, "width": 16, "parent": "trunk-seed0",
        "data_seed": 0,
    }  # fmt: skip


def test_branches_follow_their_trunk_and_then_decay_to_nothing():
    found = {r.name: r for r in runs()}
    for run in found.values():
        if run.config.parent:
            s, t, begin = run.config.schedule, found[run.config.parent].config.schedule, run.branch_step
            assert [lr_at(s, i) for i in range(begin)] == [lr_at(t, i) for i in range(begin)]
            assert lr_at(s, begin) < lr_at(s, begin - 1) and lr_at(s, s.steps) == 0.0
            assert phase_at(s, s.steps) == "decay"


def test_every_combination_for_every_seed():
    found = runs({"sweep": {"tokens": [3840, 7680], "peak_lr": [0.001, 0.03], "weight_decay": [0.0, 0.5]}})
    assert len(found) == 2 * 2 * 2 * 2 == len({r.name for r in found}) == len(set(keys(found).values()))
    assert "sweep-0.00384M-lr0.03-wd0.5-seed1" in {r.name for r in found}
    told = {
        (r.config.schedule.steps, r.config.schedule.peak_lr, r.config.optimizer.weight_decay) for r in found
    }
    assert told == {(s, lr, wd) for s in (60, 120) for lr in (0.001, 0.03) for wd in (0.0, 0.5)}


def test_checkpoints_on_the_grid_denser_in_the_decay():
    members = {"a": {"shape": "wsd", "tokens": 6400, "peak_lr": 0.1, "decay_fraction": 0.2}}
    (run,) = runs(members, seeds=[0], decay_checkpoints=4)
    assert run.config.checkpoint_steps == (
        30,
        60,
        80,
        85,
        90,
        95,
        100,
    )  # grid, start of the decay, four in it
    for shape in ("cosine", "linear", "constant"):
        (run,) = runs({"a": {"shape": shape, "tokens": 6400, "peak_lr": 0.1}}, seeds=[0])
        assert run.config.checkpoint_steps == (30, 60, 90, 100)
    (run,) = runs({"a": {"tokens": 640, "peak_lr": 0.1}}, seeds=[0])
    assert run.config.checkpoint_steps[-1] == 10  # shorter than the grid: its end all the same


def test_weight_decay_is_the_members_or_else_the_studys():
    optimizer = {"weight_decay": 0.3, "beta2": 0.99}
    told = {
        r.name: r.config.optimizer
        for r in runs({"a": TRUNK, "b": {**TRUNK, "weight_decay": 0.0}}, optimizer=optimizer)
    }
    assert {told[n].weight_decay for n in ("a-seed0", "a-seed1")} == {0.3}
    assert {told[n].weight_decay for n in ("b-seed0", "b-seed1")} == {0.0}
    assert {o.beta2 for o in told.values()} == {0.99}


def test_cooldown_shapes_of_branches_have_names_of_their_own():
    found = runs(
        {"trunk": TRUNK, "cooldown": {**COOLDOWN, "branch_at": [3840], "cooldown": ["linear", "1-sqrt"]}},
        seeds=[0],
    )
    assert [r.name for r in found[1:]] == [
        "trunk-cooldown-0.00384M-linear-seed0",
        "trunk-cooldown-0.00384M-1-sqrt-seed0",
    ]
    assert [r.config.schedule.cooldown for r in found[1:]] == ["linear", "1-sqrt"]


def test_order_of_members_does_not_matter():
    members = toy.STUDY["members"]
    assert keys(runs(dict(reversed(members.items())))) == keys(runs())


def test_a_seed_more_leaves_all_other_keys():
    before, after = keys(runs()), keys(runs(seeds=[0, 1, 2]))
    assert len(after) == 9 and {k: after[k] for k in before} == before


def test_a_changed_trunk_changes_its_branches():
    before, after = keys(runs()), keys(runs({"trunk": {**TRUNK, "peak_lr": 0.02}, "cooldown": COOLDOWN}))
    assert before.keys() == after.keys() and all(before[k] != after[k] for k in before)


def test_other_branches_leave_the_trunk():
    more = keys(runs({"trunk": TRUNK, "cooldown": {**COOLDOWN, "branch_at": [3840], "tokens": 640}}))
    before = keys(runs())
    assert more["trunk-seed0"] == before["trunk-seed0"]
    assert more["trunk-cooldown-0.00384M-seed0"] != before["trunk-cooldown-0.00384M-seed0"]
    moved = keys(runs({"trunk": TRUNK, "cooldown": COOLDOWN, "other": {**COOLDOWN, "tokens": 640}}))
    assert {k: moved[k] for k in before} == before


@pytest.mark.parametrize(
    ("members", "changes", "says"),
    [
        ({"trunk": TRUNK, "cool": {**COOLDOWN, "branch_of": "trnk"}}, {},
         "member 'cool': branch_of names 'trnk'; members that can be branched from: trunk"),
        ({"trunk": TRUNK, "a": COOLDOWN, "b": {**COOLDOWN, "branch_of": "a"}}, {},
         "member 'b': branch_of names 'a'; members that can be branched from: trunk"),
        ({"trunk": TRUNK, "cool": {**COOLDOWN, "branch_at": [1920, 2560]}}, {},
         "member 'cool': branch_at 2560 is no checkpoint of 'trunk-seed0'; its tokens: 1920, 3840"),
        ({"trunk": TRUNK, "cool": {**COOLDOWN, "branch_at": [1920, 1920]}}, {},
         "member 'cool': branch_at: 1920 is listed twice"),
        ({"trunk": TRUNK, "cool": {**COOLDOWN, "branch_at": [1920]}}, {"warmup_tokens": 1920},
         "member 'cool': branch_at 1920 lies in the warmup of 'trunk-seed0'"),
        ({"trunk": {**TRUNK, "shape": "cosine"}, "cool": {**COOLDOWN, "branch_at": [1920]}}, {},
         "member 'cool': branch_at 1920 lies in the decay of 'trunk-seed0'"),
        ({"trunk": TRUNK, "cool": {**COOLDOWN, "peak_lr": 0.1}}, {}, "takes peak_lr, weight_decay, sequences and shape from its parent"),
        ({"trunk": TRUNK, "cool": {**COOLDOWN, "weight_decay": 0.3}}, {}, "takes peak_lr, weight_decay, sequences and shape from"),
        ({"trunk": TRUNK, "cool": {**COOLDOWN, "shape": "cosine"}}, {}, "takes peak_lr, weight_decay, sequences and shape from"),
        ({"trunk": TRUNK, "cool": {**COOLDOWN, "branch_at": []}}, {}, "a branch needs one value of tokens and a list branch_at"),
        ({"trunk": TRUNK, "cool": {**COOLDOWN, "tokens": [64, 128]}}, {}, "a branch needs one value of tokens"),
        ({"a": {**TRUNK, "peak_lr": [0.1, 0.2, 0.1]}}, {}, "member 'a': peak_lr: 0.1 is listed twice"),
        ({"a": {**TRUNK, "tokens": [3840, 3840]}}, {}, "member 'a': tokens: 3840 is listed twice"),
        ({"a": TRUNK}, {"seeds": [0, 1, 0]}, "seeds: 0 is listed twice"),
        ({"a": {"peak_lr": 0.1}}, {}, "member 'a': a run that is no branch needs tokens and peak_lr"),
        ({"a": {"tokens": 640}}, {}, "member 'a': a run that is no branch needs tokens and peak_lr"),
        ({"a": {**TRUNK, "tokens": 640}}, {"warmup_tokens": 640}, "member 'a': tokens 640 is no longer than warmup_tokens 640"),
        ({"a": {**TRUNK, "tokens": [12345678, 12345679]}}, {}, "members: two runs would be called 'a-12.3457M-seed0'; rename a member or give"),
        ({"trunk": TRUNK, "cooldown": COOLDOWN, "trunk-cooldown": {**TRUNK, "tokens": [1920, 3840]}}, {},
         "members: two runs would be called 'trunk-cooldown-0.00192M-seed0'"),
    ],
)  # fmt: skip
def test_studies_that_make_no_sense(members, changes, says):
    with pytest.raises(UserError) as e:
        runs(members, **changes)
    assert says in str(e.value) and "\n" not in str(e.value)


def test_members_need_no_more_than_they_say():
    assert Member(tokens=64, peak_lr=0.1) == Member(
        shape="wsd", tokens=64, peak_lr=0.1, weight_decay=None, cooldown="linear", decay_fraction=0.2,
        final_fraction=0.0, branch_of=None, branch_at=(),
    )  # fmt: skip


def test_a_trajectory_in_order_of_tokens_and_a_torn_one_named(finished_root, tmp_path, monkeypatch):
    monkeypatch.setenv("PTQ_DYNAMICS_ROOT", str(finished_root))
    trunk = expand(make())[0]
    points = study.trajectory("toy", trunk)
    assert [p.tokens for p in points] == [1920, 3840] and [p.phase for p in points] == ["stable", "stable"]
    whole = {f.name: f.read_bytes() for f in points[0].path.iterdir()}
    monkeypatch.setenv("PTQ_DYNAMICS_ROOT", str(tmp_path))
    for point in points:
        folder = paths.runs("toy") / "trunk-seed0" / point.name
        folder.mkdir(parents=True)
        for name, data in whole.items():
            (folder / name).write_bytes(data)
    study.trajectory("toy", trunk)
    (folder / checkpoints.WEIGHTS).write_bytes(whole[checkpoints.WEIGHTS][:-1])
    with pytest.raises(
        UserError, match="step-0000060/model.safetensors: torn or changed checkpoint; delete its folder"
    ):
        study.trajectory("toy", trunk)


def test_curves_keep_the_last_step_and_average_between(finished_root, monkeypatch):
    monkeypatch.setenv("PTQ_DYNAMICS_ROOT", str(finished_root))
    found = expand(make())
    full, thin = (
        study.training_curves("toy", found, points=100),
        study.training_curves("toy", found, points=3),
    )
    for run in found:
        a, b = full[full["run"] == run.name], thin[thin["run"] == run.name]
        assert b["step"].iloc[-1] == a["step"].iloc[-1] == run.config.schedule.steps
        assert 3 <= len(b) < len(a) == (run.config.schedule.steps - run.branch_step) // 5
        every = len(a) // 3
        assert b["loss"].iloc[-1] == pytest.approx(a["loss"].iloc[-every:].mean())
        assert a["step"].is_monotonic_increasing and b["step"].is_monotonic_increasing


def test_the_lab_record(finished_root, monkeypatch):
    monkeypatch.setenv("PTQ_DYNAMICS_ROOT", str(finished_root))
    table = study.pretrain("toy", make(), toy.MACHINE, workers=1)  # all finished: reads
    assert len(table) == 6 and table["compiled"].eq(False).all()
    model = build(toy.model_config(), 300, 0)
    assert set(table["parameters"]) == {sum(p.numel() for p in model.parameters())}
    assert table["final_loss"].lt(torch.tensor(300.0).log().item()).all()


def test_a_member_with_its_own_batch_and_its_branches():
    found = {r.name: r.config for r in runs({"trunk": {**TRUNK, "sequences": 8}, "cooldown": COOLDOWN})}
    trunk, branch = found["trunk-seed0"], found["trunk-cooldown-0.00384M-seed0"]
    assert (trunk.sequences, trunk.schedule.steps) == (8, 30)  # twice the batch, half the updates
    assert (branch.sequences, branch.schedule.steps, branch.schedule.decay_steps) == (8, 45, 15)


def test_a_longer_list_renames_nothing():
    short = {r.name for r in runs({"a": {**TRUNK, "peak_lr": [0.1]}})}
    assert short == {"a-lr0.1-seed0", "a-lr0.1-seed1"}
    assert short < {r.name for r in runs({"a": {**TRUNK, "peak_lr": [0.1, 0.2]}})}


def test_branches_that_differ_in_the_order_of_their_data():
    found = runs(
        {"trunk": TRUNK, "cooldown": {**COOLDOWN, "branch_at": [3840], "data_seeds": [0, 7]}}, seeds=[1]
    )
    assert [r.name for r in found[1:]] == [
        "trunk-cooldown-0.00384M-order0-seed1",
        "trunk-cooldown-0.00384M-order7-seed1",
    ]
    assert [r.config.reorder for r in found[1:]] == [(60, 0), (60, 7)] and found[0].config.reorder is None
    assert [r.labels()["data_seed"] for r in found] == [1, 0, 7] and {r.config.seed for r in found} == {1}


def test_a_dense_grid_is_kept_in_the_stable_phase_and_not_measured():
    members = {
        "trunk": TRUNK,
        "cooldown": {**COOLDOWN, "branch_at": [3840]},
        "wsd": {"tokens": 6400, "peak_lr": 0.02},
    }
    found = {r.member: r for r in runs(members, seeds=[0], dense_tokens=640)}
    assert found["trunk"].config.checkpoint_steps == (10, 20, 30, 40, 50, 60)
    assert found["trunk"].measured_steps == found["trunk"].config.state_steps == (30, 60)
    assert found["cooldown"].config.checkpoint_steps == found["cooldown"].measured_steps == (90,)
    assert found["wsd"].config.checkpoint_steps == (10, 20, 30, 40, 50, 60, 70, 80, 100)
    assert found["wsd"].measured_steps == (30, 60, 80, 100) and found["wsd"].config.state_steps == (
        30,
        60,
        80,
    )


SHARED = {  # decays begin at 1920 and 3840 tokens, on the grid
    "wsd": {"tokens": [2400, 4800], "peak_lr": [0.01, 0.02]},
    "constant": {"shape": "constant", "tokens": 3840, "peak_lr": 0.01},
    "cosine": {"shape": "cosine", "tokens": 4800, "peak_lr": 0.01},
}


def test_a_plan_shares_what_runs_have_in_common(tmp_path):
    steps = {s.run.name: s for s in study.plan(runs(SHARED, seeds=[0]), tmp_path / "toy", "text")}
    assert {n: (s.start, s.after) for n, s in steps.items()} == {
        "wsd-0.0048M-lr0.01-seed0": (0, ()),
        "wsd-0.0048M-lr0.02-seed0": (0, ()),
        "cosine-seed0": (0, ()),
        "constant-seed0": (60, ("wsd-0.0048M-lr0.01-seed0",)),
        "wsd-0.0024M-lr0.01-seed0": (30, ("wsd-0.0048M-lr0.01-seed0",)),
        "wsd-0.0024M-lr0.02-seed0": (30, ("wsd-0.0048M-lr0.02-seed0",)),
    }
    assert all(s.lenders == tuple(tmp_path / "toy" / n for n in s.after) for s in steps.values())
    order = list(steps)
    assert all(order.index(n) < order.index(s.run.name) for s in steps.values() for n in s.after)


def trained(monkeypatch):
    """Names of the runs that make updates, with how many, from now on."""
    real, made = loop.Learner.update, {}
    inside = loop.train

    def train(config, folder, *rest):
        def update(self, *args):
            made[folder.name] = made.get(folder.name, 0) + 1
            return real(self, *args)

        monkeypatch.setattr(loop.Learner, "update", update)
        return inside(config, folder, *rest)

    monkeypatch.setattr(loop, "train", train)
    return made


def test_another_study_takes_over_what_it_shares_and_trains_the_rest(root, monkeypatch):
    members = {
        "trunk": {**TRUNK, "tokens": 5760},
        "cooldown": {**COOLDOWN, "branch_at": [3840], "tokens": 960},
    }
    study.pretrain("one", make(seeds=[0]), toy.MACHINE, workers=1)
    made = trained(monkeypatch)
    two = make(members, seeds=[0])
    study.pretrain("two", two, toy.MACHINE, workers=1)
    # a trunk that goes on where the first one ends; a cooldown half as long
    assert made == {"trunk-seed0": 30, "trunk-cooldown-0.00384M-seed0": 15}
    shared = {p.weights_id for r in expand(make(seeds=[0])) for p in study.trajectory("one", r)}
    assert [p.weights_id in shared for p in study.trajectory("two", expand(two)[0])] == [True, True, False]


def test_one_value_more_trains_its_runs_alone_and_one_less_none(root, monkeypatch):
    sweep = {"a": {"tokens": 1920, "peak_lr": [0.01, 0.02]}}
    more = {"a": {"tokens": 1920, "peak_lr": [0.01, 0.02, 0.05]}}
    study.pretrain("sweep", make(sweep), toy.MACHINE, workers=1)
    made = trained(monkeypatch)
    assert len(study.pretrain("sweep", make(more), toy.MACHINE, workers=1)) == 6
    assert made == {"a-lr0.05-seed0": 30, "a-lr0.05-seed1": 30}
    assert len(study.pretrain("sweep", make(sweep), toy.MACHINE, workers=1)) == 4
    assert len(study.pretrain("sweep", make(more), toy.MACHINE, workers=1)) == 6
    assert sum(made.values()) == 60


def test_a_member_with_its_own_grid():
    members = {
        "a": TRUNK,
        "b": {**TRUNK, "checkpoint_tokens": 1280},
        "c": {**TRUNK, "checkpoint_tokens": 10**9},
    }
    steps = {r.member: r.measured_steps for r in runs(members, seeds=[0])}
    assert steps == {"a": (30, 60), "b": (20, 40, 60), "c": (60,)}
