"""Averages of real toy runs against a float64 oracle; what is averaged against hand counts."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
import toy
import transformers
from safetensors.torch import load_file, save_file

from ptq_dynamics.core.config import asdict, load
from ptq_dynamics.core.errors import UserError
from ptq_dynamics.core.files import sha256_file
from ptq_dynamics.corpus.tokens import TokenSet
from ptq_dynamics.evaluation import averages
from ptq_dynamics.evaluation.averages import AveragingConfig, Trajectory, choose
from ptq_dynamics.evaluation.measure import MeasureConfig
from ptq_dynamics.training.schedule import phase_at
from ptq_dynamics.training.study import Study, expand, pretrain
from ptq_dynamics.trajectories import averaging, checkpoints
from ptq_dynamics.trajectories.checkpoints import Checkpoint

STUDY = {  # 64 tokens an update; a checkpoint every 10 updates, measured every 30
    **toy.STUDY,
    "dense_tokens": 640,
    "decay_checkpoints": 3,
    "members": {
        "trunk": toy.STUDY["members"]["trunk"],
        "cooldown": {"branch_of": "trunk", "branch_at": [1920, 3840], "tokens": 960},
        "order": {"branch_of": "trunk", "branch_at": [1920], "tokens": 960, "data_seeds": [0, 1, 2]},
    },
}
CONFIG = {
    "study": "toy",
    "window": 2,
    "interval": 1,
    "windows": [2, 3],
    "intervals": [1, 2, 4],
    "ema_decays": [0.5],
    "soups_study": "toy",
    "soups_cooldown": "order",
}

MEASURE = {**toy.MEASURE, "also": {"averages": [{"method": "rtn", "bits": 2, "group_size": 16}]}}


def config(**changes) -> AveragingConfig:
    return load(AveragingConfig, {**CONFIG, **changes}, "params.yaml: averaging")


def stand_in(study: Study, member: str) -> list[Trajectory]:
    """The runs of a member with checkpoints that exist by name only."""
    found = []
    for run in (r for r in expand(study) if r.member == member):
        s, per_step = run.config.schedule, run.config.tokens_per_step
        at = {
            x: Checkpoint(f"step-{x:07d}", x * per_step, x, 0.1, phase_at(s, x), None, f"{run.name}/{x}")
            for x in run.config.checkpoint_steps
        }
        found.append(Trajectory(run, [at[x] for x in run.measured_steps], list(at.values())))
    return found


@pytest.fixture(scope="module")
def mini() -> dict[str, list[Trajectory]]:
    """Stand-ins with the grid of the default profile."""
    study = toy.config(
        Study,
        {
            "model": {**toy.MODEL, "context": 128},
            "seeds": [0, 1, 2],
            "sequences": 16,
            "warmup_tokens": 409_600,
            "checkpoint_tokens": 2_048_000,
            "dense_tokens": 512_000,
            "members": {
                "trunk": {"shape": "constant", "tokens": 20_480_000, "peak_lr": 0.01},
                "cooldown": {
                    "branch_of": "trunk", "branch_at": [8_192_000, 20_480_000], "tokens": 2_048_000
                },
                "order": {
                    "branch_of": "trunk", "branch_at": [8_192_000], "tokens": 2_048_000, "data_seeds": [0, 1, 2]
                },
            },
        },
    )  # fmt: skip
    return {m: stand_in(study, m) for m in ("trunk", "cooldown", "order")}


def test_the_default_grid_is_about_sixty_averages_at_the_right_places(mini):
    found = choose(
        AveragingConfig(study="toy", soups_study="toy"), mini["trunk"], mini["cooldown"], mini["order"]
    )
    table = pd.DataFrame([{**a.labels, "tokens": a.members[-1].tokens, "n": len(a.members)} for a in found])
    assert table.groupby(["purpose", "kind"]).size().to_dict() == {
        ("trajectory", "lawa"): 27,
        ("ablation", "lawa"): 21,
        ("ablation", "ema"): 3,
        ("decay", "lawa"): 3,
        ("soup", "soup"): 3,
        ("soup", "soup_of_lawas"): 3,
    }
    along = table.query("purpose == 'trajectory' and seed == 1")
    assert along["tokens"].tolist() == [2_048_000 * k for k in range(2, 11)]
    assert (along["interval_tokens"] == 512_000).all() and (along["n"] == 8).all()
    pairs = table.query("purpose == 'ablation' and kind == 'lawa' and seed == 0")
    # (8, 1) is the trajectory's last point; (16, 4) would need 61 of the 40 checkpoints
    assert sorted(zip(pairs["window"], pairs["interval"], strict=True)) == [
        (4, 1), (4, 2), (4, 4), (8, 2), (8, 4), (16, 1), (16, 2)
    ]  # fmt: skip
    assert (pairs["interval_tokens"] == 512_000 * pairs["interval"]).all()
    assert (table.query("kind in ('lawa', 'ema') and member == 'trunk'")["run_tokens"] == 20_480_000).all()
    decay = table.query("purpose == 'decay'")
    assert (decay["branch_tokens"] == 20_480_000).all() and decay["seed"].tolist() == [0, 1, 2]
    assert (table["n"] == table["ingredients"]).all() and not table.duplicated(["run", "tokens"]).any()


def test_which_checkpoints_by_hand(mini):
    trunk = mini["trunk"][0]
    at = averages.along(config(window=3, interval=2), trunk)
    assert [c.tokens / 512_000 for c in at[0].members] == [4, 6, 8]  # at 2.048M there are 4, and 5 are needed
    assert [c.tokens / 512_000 for c in at[-1].members] == [36, 38, 40]
    (soup, nested) = averages.soups(config(), averages.same_but_for_order(mini["order"])[0])
    assert [c.step for c in soup.members] == [5000, 5000, 5000] and len(
        {c.weights_id for c in soup.members}
    ) == 3
    assert [c.step for c in nested.members] == [4750, 5000] * 3 and nested.weights is None
    assert {c.weights_id.rpartition("/")[0] for c in nested.members} == {
        c.weights_id.rpartition("/")[0] for c in soup.members
    }
    assert len(averages.same_but_for_order(mini["order"])) == 3  # seeds
    assert len(averages.same_but_for_order(mini["cooldown"])) == 6


def test_a_checkpoint_of_the_warmup_is_never_averaged(mini):
    first = mini["trunk"][0]
    saved = [Checkpoint("step-0000100", 204_800, 100, 0.1, "warmup", None, "warm"), *first.saved]
    for a in averages.ablation(
        config(windows=[41], intervals=[1]), Trajectory(first.run, first.measured, saved)
    ):
        assert a.kind == "ema" and all(c.phase == "stable" for c in a.members)


def test_the_key_tells_weights_and_order_apart(mini):
    ema = averages.ablation(config(windows=[]), mini["trunk"][0])[0]
    other = averages.ablation(config(windows=[], ema_decays=[0.6]), mini["trunk"][0])[0]
    seed = averages.ablation(config(windows=[]), mini["trunk"][1])[0]
    assert len({ema.key, other.key, seed.key}) == 3
    assert ema.key == averages.ablation(config(windows=[]), mini["trunk"][0])[0].key


def test_what_cannot_be_averaged_is_told_in_one_line(mini):
    for changes, told in [
        ({"window": 50}, "averaging: run 'trunk-seed0': LAWA: window 50 at interval 1 needs 50 checkpoints, there are 40"),
        ({"decay_window": 5}, "LAWA: window 5 at interval 1 needs 5 checkpoints, there are 4"),
    ]:  # fmt: skip
        with pytest.raises(UserError) as e:
            choose(config(**changes), mini["trunk"], mini["cooldown"], mini["order"])
        assert told in str(e.value) and "\n" not in str(e.value)
    with pytest.raises(UserError) as e:
        choose(config(), mini["trunk"], mini["cooldown"], mini["cooldown"])
    assert "is alone; give studies.toy.members.cooldown more data_seeds" in str(e.value)
    with pytest.raises(UserError, match="key 'windows.0': .* 1"):
        config(windows=[0])
    with pytest.raises(UserError, match="unknown key 'window_'; did you mean 'window'"):
        config(window_=3)


# --- real runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shared_root):
    """A root with the toy study trained and its averages measured; read only."""
    root = tmp_path_factory.mktemp("averages") / "root"
    shutil.copytree(shared_root, root)
    with toy.working_in(root):
        pretrain("toy", toy.config(Study, STUDY), toy.MACHINE, 1)
    return root, measure(root)


def measure(root, **changes) -> pd.DataFrame:
    with toy.working_in(root):
        studies, measuring = {"toy": toy.config(Study, STUDY)}, toy.config(MeasureConfig, MEASURE)
        return averages.measure_averages(config(**changes), studies, measuring, workers=1)


@pytest.fixture
def copy(trained, tmp_path):
    """A root of the test's own, and the table that was measured there."""
    shutil.copytree(trained[0], tmp_path / "root")
    return tmp_path / "root", trained[1]


def mean64(folders, weights=None) -> dict[str, torch.Tensor]:
    members = [load_file(f / "model.safetensors") for f in folders]
    weights = weights or [1 / len(members)] * len(members)
    return {k: sum(w * m[k].double() for w, m in zip(weights, members, strict=True)) for k in members[0]}


def test_the_averages_are_the_means_that_the_table_says(trained):
    root, table = trained
    runs = root / "data" / "runs" / "toy"
    branches = sorted(r.name for r in runs.iterdir() if "order" in r.name and r.name.endswith("seed1"))
    trunk = [runs / "trunk-seed1" / f"step-{10 * k:07d}" for k in range(1, 7)]
    (end,) = runs.glob("trunk-cooldown-*-seed1/step-0000075")  # 15 updates after the trunk's 60
    assert len(branches) == 3
    expected = {
        ("lawa", "trajectory", 1920): mean64(trunk[1:3]),
        ("lawa", "trajectory", 3840): mean64(trunk[4:6]),
        ("ema", "ablation", 3840): mean64(trunk, [1 / 32, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2]),
        ("lawa", "decay", 4800): mean64([end.with_name("step-0000070"), end]),
        ("soup", "soup", 2880): mean64([runs / b / "step-0000045" for b in branches]),
        ("soup_of_lawas", "soup", 2880): mean64(
            [runs / b / f"step-{s:07d}" for b in branches for s in (40, 45)]
        ),
    }
    base = table[(table["method"] == "none") & (table["seed"] == 1)]
    for (kind, purpose, tokens), oracle in expected.items():
        (row,) = base[
            (base["kind"] == kind) & (base["purpose"] == purpose) & (base["tokens"] == tokens)
        ].to_dict("records")
        found = load_file(root / "data" / "averages" / row["run"] / row["checkpoint"] / "model.safetensors")
        assert found.keys() == oracle.keys()
        for name, value in oracle.items():
            torch.testing.assert_close(found[name].double(), value, rtol=1e-6, atol=1e-7)
    assert len(base[base["purpose"] == "ablation"]) == 5  # (2, 2), (2, 4), (3, 1), (3, 2), EMA


def test_the_table_holds_every_average_with_every_quantizer(trained):
    root, table = trained
    methods = [(m, b) for m, b in zip(table["method"], table["bits"].fillna(0), strict=True)]
    assert {m: methods.count(m) for m in methods} == dict.fromkeys(
        [("none", 0), ("gptq", 3), ("rtn", 4), ("rtn", 2)], 20
    )
    assert (table["phase"] == "average").all() and table["lr"].isna().all()
    written = pd.read_csv(root / "reports" / "tables" / "measurements-averages.csv")
    assert len(written) == len(table) and "losses" not in written and "versions" not in written
    assert written["relative_error"].to_numpy() == pytest.approx(
        table["relative_error"].to_numpy(dtype=float), rel=1e-6, nan_ok=True
    )
    recipe = json.loads(next((root / "data" / "averages").rglob("soup-linear*/*/average.json")).read_text())
    assert recipe["kind"] == "soup" and len(set(recipe["of"])) == 3 and recipe["purpose"] == "soup"


def test_a_measured_loss_is_transformers_own_of_the_averaged_checkpoint(trained):
    root, table = trained
    row = table.query("kind == 'soup' and method == 'none' and seed == 0").iloc[0]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        root / "data" / "averages" / row["run"] / row["checkpoint"]
    )
    blocks = torch.from_numpy(TokenSet.open(root / "data" / "corpus", "validation").blocks(16, 512))
    with torch.no_grad():
        expected = loaded(blocks, labels=blocks).loss.item()
    assert row["ce"] == pytest.approx(expected, rel=2e-3)  # measured in bf16


def test_a_second_run_averages_and_measures_nothing(copy, monkeypatch):
    root, table = copy

    def fail(*args, **kwargs):
        raise AssertionError("computed")

    monkeypatch.setattr(averaging, "average", fail)
    monkeypatch.setattr(checkpoints, "load_model", fail)
    before = (root / "reports" / "tables" / "measurements-averages.csv").read_bytes()
    pd.testing.assert_frame_equal(measure(root), table)
    assert (root / "reports" / "tables" / "measurements-averages.csv").read_bytes() == before


def test_only_what_is_torn_or_made_of_other_weights_is_averaged_again(copy, monkeypatch):
    root, table = copy
    base = root / "data" / "averages"
    done = []
    real = averaging.average
    monkeypatch.setattr(
        averaging, "average", lambda m, out, **o: done.append(out.relative_to(base)) or real(m, out, **o)
    )
    torn = next(base.glob("ema-*seed0/*/model.safetensors"))
    whole = torn.read_bytes()
    torn.write_bytes(whole[:-9])
    pd.testing.assert_frame_equal(measure(root), table)
    assert done == [torn.parent.relative_to(base)] and torn.read_bytes() == whole
    done.clear()
    # another first dense checkpoint: only the EMA reaches back to it, and LAWA (3, 2) does not
    first = root / "data" / "runs" / "toy" / "trunk-seed1" / "step-0000010"
    weights = {k: v * 1.5 for k, v in load_file(first / "model.safetensors").items()}
    save_file(weights, first / "model.safetensors", metadata={"format": "pt"})
    meta = json.loads((first / "checkpoint.json").read_text())
    meta["weights_sha256"] = sha256_file(first / "model.safetensors")
    (first / "checkpoint.json").write_text(json.dumps(meta))
    again = measure(root)
    assert [d.parts[0] for d in done] == ["ema-0.5-trunk-seed1"]
    changed = again["ce"].to_numpy() != table["ce"].to_numpy()
    assert set(again["run"][changed]) == {"ema-0.5-trunk-seed1"}
    assert np.array_equal(again["run"], table["run"])


@pytest.mark.parametrize("lost", ["folder", "weights"])
def test_one_missing_ingredient_is_named_in_one_line(copy, lost):
    root, _ = copy
    gone = root / "data" / "runs" / "toy" / "trunk-seed0" / "step-0000020"
    shutil.rmtree(gone) if lost == "folder" else (gone / "model.safetensors").unlink()
    with pytest.raises(UserError) as e:
        measure(root)
    assert str(gone) in str(e.value) and "run pretrain again" in str(e.value) and "\n" not in str(e.value)


def test_an_unknown_member_is_told_with_the_nearest(copy):
    with pytest.raises(UserError, match="unknown member of study 'toy' 'ordre'; did you mean 'order'"):
        measure(copy[0], soups_cooldown="ordre")


def test_the_configuration_survives_a_round_trip():
    assert load(AveragingConfig, asdict(config()), "x") == config()
