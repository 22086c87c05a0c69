"""Curvature along real toy runs, against float64 autograd through transformers' own forward pass."""

from __future__ import annotations

import json
import math
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
from ptq_dynamics.curvature import along, point
from ptq_dynamics.curvature.along import CurvatureConfig, choose, compute
from ptq_dynamics.curvature.point import Basin, Plane, Step, Top
from ptq_dynamics.evaluation.measure import MeasureConfig
from ptq_dynamics.quantization.grid import round_to_nearest
from ptq_dynamics.quantization.spec import QuantSpec
from ptq_dynamics.training.study import Study, expand, trajectory

GPTQ, RTN = ({"method": m, "bits": b, "group_size": 16} for m, b in (("gptq", 3), ("rtn", 4)))
CONFIG = {
    "text": {"tokens": 512, "length": 16},
    "tolerance": 1e-3,
    "max_steps": 60,
    "studies": {"toy": {"points": "all", "top_eigenvalue": True, "quantizers": [GPTQ, RTN]}, "twin": {}},
    "slices": {"study": "toy", "resolution": 5, "margin": 0.25},
}
MATRICES = ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")


def config(**changes) -> CurvatureConfig:
    return load(CurvatureConfig, {**CONFIG, **changes}, "params.yaml: curvature")


def run(root, **changes) -> dict[str, pd.DataFrame]:
    with toy.working_in(root):
        study, measuring = toy.config(Study, toy.STUDY), toy.config(MeasureConfig, toy.MEASURE)
        return compute(config(**changes), {"toy": study, "twin": study}, measuring, workers=1)


@pytest.fixture(scope="module")
def computed(tmp_path_factory, finished_root):
    """A root with the toy study, the same study under a second name, and the curvature of both; read only."""
    root = tmp_path_factory.mktemp("curvature") / "root"
    shutil.copytree(finished_root, root)
    shutil.copytree(root / "data" / "runs" / "toy", root / "data" / "runs" / "twin")
    return root, run(root)


@pytest.fixture
def copy(computed, tmp_path):
    shutil.copytree(computed[0], tmp_path / "root")
    return tmp_path / "root"


# --- oracles: transformers' model in float64


class Oracle:
    def __init__(self, root, row) -> None:
        self.folder = root / "data" / "runs" / "toy" / row["run"] / f"step-{row['step']:07d}"
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float64, attn_implementation="eager"
        ).eval()
        blocks = TokenSet.open(root / "data" / "corpus", "validation").blocks(16, 512)
        self.blocks = torch.from_numpy(blocks)
        self.parameters = dict(self.model.named_parameters())
        self.theta = {n: p.detach().clone() for n, p in self.parameters.items()}

    def loss(self) -> torch.Tensor:
        logits = self.model(self.blocks[:, :-1]).logits  # transformers' own loss is taken in float32
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.blocks[:, 1:].flatten())

    def at(self, delta: dict[str, torch.Tensor], t: float = 1.0) -> float:
        """Loss at θ + tδ."""
        with torch.no_grad():
            for n, p in self.parameters.items():
                p.copy_(self.theta[n] + t * delta[n] if n in delta else self.theta[n])
            value = self.loss().item()
            for n, p in self.parameters.items():
                p.copy_(self.theta[n])
        return value

    def product(self, v: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """H v by double backward."""
        ps = list(self.parameters.values())
        grads = torch.autograd.grad(self.loss(), ps, create_graph=True)
        dot = sum((g * v[n]).sum() for n, g in zip(self.parameters, grads, strict=True))
        return dict(zip(self.parameters, torch.autograd.grad(dot, ps), strict=True))

    @property
    def matrices(self) -> list[str]:
        return [n for n in self.parameters if n.endswith(tuple(f"{m}.weight" for m in MATRICES))]


def difference(oracle: Oracle, other) -> dict[str, torch.Tensor]:
    weights = load_file(other / "model.safetensors")
    return {n: weights[n].double() - oracle.theta[n] for n in oracle.theta}


def row_of(table: pd.DataFrame, **where) -> dict:
    for k, v in where.items():
        table = table[table[k] == v]
    (found,) = table.to_dict("records")
    return found


def norm2(delta: dict[str, torch.Tensor]) -> float:
    return float(sum(d.square().sum() for d in delta.values()))


def test_trace_and_top_eigenvalue_against_autograd_in_float64(computed) -> None:
    root, tables = computed
    table = tables["curvature-toy"]
    row = row_of(table, run="trunk-seed1", tokens=3840)
    oracle = Oracle(root, row)
    assert row["loss"] == pytest.approx(oracle.at({}), rel=1e-5)
    loss = oracle.loss()
    grads = torch.autograd.grad(loss, list(oracle.parameters.values()))
    assert row["gradient_norm"] == pytest.approx(math.sqrt(sum(g.square().sum() for g in grads)), rel=1e-4)
    g = torch.Generator().manual_seed(5)
    whole, some = [], []
    for _ in range(100):
        z = {n: (torch.randint(0, 2, p.shape, generator=g) * 2 - 1).double() for n, p in oracle.theta.items()}
        hz = oracle.product(z)
        parts = {n: float((z[n] * hz[n]).sum()) for n in z}
        whole.append(sum(parts.values()))
        some.append(sum(parts[n] for n in oracle.matrices))
    for name, samples in (("trace", whole), ("trace_quantized", some)):
        error = math.hypot(row[f"{name}_se"], np.std(samples, ddof=1) / 10)
        assert abs(row[name] - np.mean(samples)) < 4 * error
        assert 0 < row[f"{name}_se"] < 0.5 * abs(row[name])
    v = {n: torch.randn(p.shape, generator=g, dtype=torch.float64) for n, p in oracle.theta.items()}
    for _ in range(60):  # power iteration: the largest eigenvalue is the largest in absolute value here
        scale = math.sqrt(norm2(v))
        v = oracle.product({n: x / scale for n, x in v.items()})
    top = math.sqrt(norm2(v))
    assert row["top_eigenvalue"] == pytest.approx(top, rel=2e-3)
    assert row["top_converged"] and row["top_residual"] <= 1e-3 * top


@pytest.mark.parametrize("at", [("trunk-seed0", 3840), ("trunk-cooldown-0.00192M-seed1", 3840)])
def test_expansions_against_autograd_in_float64(computed, at) -> None:
    root, tables = computed
    table = tables["expansion-toy"]
    table = table[(table["run"] == at[0]) & (table["tokens"] == at[1])]
    row = row_of(table, method="rtn")
    oracle = Oracle(root, row)
    spec = QuantSpec(method="rtn", bits=4, group_size=16)
    delta = {}
    for n in oracle.matrices:
        quantized = round_to_nearest(oracle.theta[n].float(), spec).dequantize().float()
        delta[n] = quantized.double() - oracle.theta[n]
    check(oracle, row, delta)
    assert row["weight_norm2"] == pytest.approx(norm2({n: oracle.theta[n] for n in oracle.matrices}))
    # of a branch's first checkpoint, the one before is where it begins
    back = row_of(table, method="previous")
    check(
        oracle,
        back,
        difference(oracle, root / "data" / "runs" / "toy" / f"trunk-seed{at[0][-1]}" / "step-0000030"),
    )
    assert back["step_tokens"] == 1920


def check(oracle: Oracle, row: dict, delta: dict[str, torch.Tensor]) -> None:
    whole = {n: delta.get(n, torch.zeros_like(p)) for n, p in oracle.theta.items()}
    hd = oracle.product(whole)
    quadratic = 0.5 * float(sum((whole[n] * hd[n]).sum() for n in whole))
    grads = dict(
        zip(whole, torch.autograd.grad(oracle.loss(), list(oracle.parameters.values())), strict=True)
    )
    linear = float(sum((whole[n] * grads[n]).sum() for n in whole))
    true = oracle.at(delta) - oracle.at({})
    scale = abs(linear) + abs(quadratic)
    assert row["norm2"] == pytest.approx(norm2(delta), rel=1e-4)
    assert row["linear"] == pytest.approx(linear, rel=1e-3, abs=1e-3 * scale)
    assert row["quadratic"] == pytest.approx(quadratic, rel=1e-3, abs=1e-3 * scale)
    assert row["rayleigh"] == pytest.approx(2 * quadratic / norm2(delta), rel=2e-3, abs=1e-3 * scale)
    assert row["true"] == pytest.approx(true, rel=2e-3, abs=2e-6)


def test_the_gptq_step_is_the_one_that_was_measured(computed) -> None:
    root, tables = computed
    measured = pd.read_parquet(root / "data" / "measurements" / "toy" / "table.parquet")
    both = tables["expansion-toy"].merge(measured, on=["run", "tokens", "method", "bits"])
    assert len(both) == 2 * 8  # two quantizers, eight checkpoints
    assert np.sqrt(both["norm2"]).to_numpy() == pytest.approx(both["weight_error"].to_numpy(), rel=1e-4)


def test_scales_by_hand() -> None:
    w = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.25, 3.0]])
    found = point.scales([w, torch.full((1, 2), -4.0)], group_size=2)
    assert found["quantized_parameters"] == 8 and found["weight_norm"] ** 2 == pytest.approx(14.3125 + 32)
    assert found["weight_scale"] == pytest.approx((2 + 0.5 + 0.25 + 3 + 4) / 5)
    assert found["weight_rms"] == pytest.approx(math.sqrt(46.3125 / 8))
    assert point.scales([w], group_size=-1)["weight_scale"] == pytest.approx(2.5)


def test_slices_pass_through_the_three_models(computed) -> None:
    root, tables = computed
    s = tables["slices"]
    assert s.groupby(["run", "method", "bits"]).size().to_dict() == {
        ("trunk-cooldown-0.00384M-seed0", "gptq", 3): 28,
        ("trunk-cooldown-0.00384M-seed0", "rtn", 4): 28,
    }
    at = {"run": "trunk-cooldown-0.00384M-seed0", "tokens": 5760}
    end = row_of(tables["curvature-toy"], **at)
    oracle = Oracle(root, end)
    for method in ("gptq", "rtn"):
        named = s[(s["method"] == method) & (s["kind"] != "grid")].set_index("kind")
        step = row_of(tables["expansion-toy"], **at, method=method)
        back = row_of(tables["expansion-toy"], **at, method="previous")
        assert named.loc["checkpoint", ["x", "y"]].tolist() == pytest.approx([0, 0], abs=1e-5)
        assert named.loc["previous", ["x", "y"]].tolist() == pytest.approx(
            [back["norm2"] ** 0.5, 0], rel=1e-4, abs=1e-4
        )
        assert math.hypot(*named.loc["quantized", ["x", "y"]]) == pytest.approx(
            step["norm2"] ** 0.5, rel=1e-3
        )
        assert named.loc["checkpoint", "loss"] == pytest.approx(oracle.at({}), rel=1e-5)
        assert named.loc["quantized", "loss"] - named.loc["checkpoint", "loss"] == pytest.approx(
            step["true"], abs=3e-6
        )
        grid = s[(s["method"] == method) & (s["kind"] == "grid")]
        spans = [np.ptp(grid[c]) for c in "xy"]
        assert spans[0] == pytest.approx(spans[1], rel=1e-5)  # equal scales
    # a point of the grid, rebuilt from the checkpoints on disk
    near = grid.iloc[7]
    v = difference(oracle, root / "data" / "runs" / "toy" / "trunk-seed0" / "step-0000060")
    length = math.sqrt(norm2(v))
    on_axis = oracle.at(v, near["x"] / length)
    line = grid[np.isclose(grid["y"], 0, atol=1e-6)]
    if len(line):
        assert line[line["x"] == near["x"]]["loss"].iloc[0] == pytest.approx(on_axis, rel=1e-5)


def test_a_second_run_computes_nothing(copy, computed, monkeypatch) -> None:
    def fail(*args, **kwargs):
        raise AssertionError("computed")

    monkeypatch.setattr(point, "Hessian", fail)
    files = sorted((copy / "reports" / "tables").glob("*.csv"))
    before = {f.name: f.read_bytes() for f in files}
    assert {"curvature-toy.csv", "curvature-twin.csv", "expansion-toy.csv", "slices.csv"} <= set(before)
    for name, table in run(copy).items():
        pd.testing.assert_frame_equal(table, computed[1][name])
    assert {f.name: f.read_bytes() for f in files} == before


def test_runs_that_share_weights_share_the_work(computed) -> None:
    root, tables = computed
    # 8 checkpoints, each with basin, top eigenvalue, two quantizers; 6 have one before them; one run has two planes
    assert len(list((root / "data" / "measurements" / "curvature" / "rows").iterdir())) == 8 * 4 + 6 + 2
    twin, toys = tables["curvature-twin"], tables["curvature-toy"]
    assert len(twin) == 6 and (twin["tokens"] == twin["run_tokens"]).all() and "top_eigenvalue" not in twin
    both = twin.merge(toys, on=["run", "tokens"])
    assert (both["trace_x"] == both["trace_y"]).all() and len(both) == 6


def test_what_is_missing_or_torn_is_computed_again(copy, monkeypatch) -> None:
    rows = copy / "data" / "measurements" / "curvature" / "rows"
    torn, gone = sorted(rows.iterdir())[:2]
    kept = torn.read_bytes(), gone.read_bytes()
    torn.write_bytes(kept[0][:-9])
    gone.unlink()
    run(copy)
    for file, old in zip((torn, gone), kept, strict=True):
        assert json.loads(file.read_text()).keys() == json.loads(old).keys()


def test_the_key_tells_apart_what_decides_an_answer(computed) -> None:
    root, _ = computed
    with toy.working_in(root):
        study, measuring = toy.config(Study, toy.STUDY), toy.config(MeasureConfig, toy.MEASURE)
        runs = {r: trajectory("toy", r) for r in expand(study)}
        a, b = next(iter(runs.values()))
    texts = {"text": "t", "calibration": "c"}
    spec, other = QuantSpec(bits=4, group_size=16), QuantSpec(method="rtn", bits=4, group_size=16)
    asks = [
        Basin(),
        Top(),
        spec,
        other,
        Step(a),
        Plane(a, spec, 5, 0.25),
        Plane(a, spec, 7, 0.25),
        Plane(a, other, 5, 0.25),
    ]

    def keys(c=b, texts=texts, **changes) -> list[str]:
        return [point.key(c, ask, config(**changes).numerics(measuring), texts) for ask in asks]

    base = keys()
    assert len(set(base)) == len(asks) and base == keys()
    assert not set(base) & set(keys(a)) and not set(base) & set(keys(texts=texts | {"text": "u"}))

    def changed(now: list[str]) -> list[int]:
        return [i for i, (x, y) in enumerate(zip(base, now, strict=True)) if x != y]

    assert changed(keys(probes=12)) == [0]
    assert changed(keys(tolerance=0.1)) == [1]
    assert changed(keys(texts=texts | {"calibration": "d"})) == [2, 5, 6]


def test_where_curvature_is_asked_for(computed) -> None:
    root, _ = computed
    with toy.working_in(root):
        study = toy.config(Study, toy.STUDY)
        runs = {r: trajectory("toy", r) for r in expand(study)}
    points = choose(config(), {"toy": runs, "twin": runs})
    toys = [p for p in points if p.study == "toy"]
    assert len(toys) == 8 and len(points) == 14
    for p in toys:
        expected = None
        if p.run.branch_step:
            expected = f"trunk-seed{p.run.config.seed}/step-{p.run.branch_step:07d}"
        elif p.checkpoint.step == 60:
            expected = f"{p.run.name}/step-0000030"
        before = p.previous and f"{p.previous.path.parent.name}/{p.previous.path.name}"
        assert before == expected and any(isinstance(a, Step) for a in p.asks) == (expected is not None)
    assert all(p.asks == (Basin(),) for p in points if p.study == "twin")


# --- bad input: one line


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"slices": {"study": "twin"}}, "curvature.slices: curvature.studies.twin names no quantizers; add some"),
        ({"slices": {"study": "toi"}}, "unknown study of curvature.slices 'toi'; did you mean 'toy'"),
        ({"text": {"tokens": 10**7, "length": 16}}, "curvature.text.tokens asks for 10000000, but set 'validation' has"),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_is_told_in_one_line(copy, changes, told) -> None:
    with pytest.raises(UserError) as e:
        run(copy, **changes)
    assert told in str(e.value) and "\n" not in str(e.value)


def test_a_configuration_is_checked() -> None:
    with pytest.raises(UserError, match="key 'probes': .* 10, got 0"):
        config(probes=0)
    with pytest.raises(UserError, match="unknown key 'probe'; did you mean 'probes'"):
        config(probe=12)
    assert load(CurvatureConfig, asdict(config()), "x") == config()


def rewrite(folder, change) -> None:
    """Change a checkpoint's weights and their recorded hash."""
    weights = change(load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    meta = json.loads((folder / "checkpoint.json").read_text())
    meta["weights_sha256"] = sha256_file(folder / "model.safetensors")
    (folder / "checkpoint.json").write_text(json.dumps(meta))


def test_weights_that_are_not_finite_are_told(copy) -> None:
    folder = copy / "data" / "runs" / "toy" / "trunk-seed0" / "step-0000060"
    name = "gpt_neox.final_layer_norm.bias"
    rewrite(folder, lambda w: {**w, name: torch.full_like(w[name], math.nan)})
    with pytest.raises(UserError, match=f"parameter '{name}' is not finite") as e:
        run(copy)
    assert "\n" not in str(e.value)


def test_a_plane_through_equal_checkpoints_is_told(copy) -> None:
    runs = copy / "data" / "runs" / "toy"
    weights = load_file(runs / "trunk-seed0" / "step-0000060" / "model.safetensors")
    rewrite(runs / "trunk-cooldown-0.00384M-seed0" / "step-0000090", lambda _: weights)
    with pytest.raises(UserError) as e:
        run(copy)
    # equal weights share their work, so the first place that they lie at is named
    assert "toy/trunk-seed0/step-0000060: slice: the first and second points are the same weights" in str(
        e.value
    )
    assert "\n" not in str(e.value)


def test_tables_are_small_and_name_their_units(computed) -> None:
    root, tables = computed
    written = pd.read_csv(root / "reports" / "tables" / "curvature-toy.csv")
    wanted = "run tokens seed peak_lr phase trace trace_se trace_quantized trace_quantized_se top_eigenvalue weight_rms"
    assert set(wanted.split()) <= set(written.columns) and len(written) == 8
    assert (written["weights_id"].str.len() == 12).all()
    assert along.compute.__doc__ and "nats per token" in along.compute.__doc__
