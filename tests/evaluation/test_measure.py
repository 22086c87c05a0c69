from __future__ import annotations

import dataclasses

import grimp
import numpy as np
import pandas as pd
import pytest
import torch
import toy
import transformers

from ptq_dynamics.core import provenance
from ptq_dynamics.core.errors import UserError
from ptq_dynamics.corpus.tokens import TokenSet
from ptq_dynamics.evaluation import measure as module
from ptq_dynamics.evaluation.measure import MeasureConfig, measure, measure_checkpoint, row_key
from ptq_dynamics.quantization.spec import QuantSpec
from ptq_dynamics.trajectories import checkpoints

TEXTS = {"evaluation": "e", "calibration": "c"}
SPEC = QuantSpec(bits=4, group_size=64)
PLACE = dict(tokens=640, step=10, lr=0.01, phase="stable", parent=None)


def config(**changes):
    return toy.config(MeasureConfig, toy.MEASURE, **changes)


@pytest.fixture(scope="module")
def point(model, corpus, tmp_path_factory):
    """A checkpoint to measure; read only."""
    return checkpoints.save(
        tmp_path_factory.mktemp("points") / "step-10", model, corpus / "tokenizer", **PLACE
    )


@pytest.fixture(scope="module")
def measured(point, corpus, tmp_path_factory):
    """Folder and table of an undisturbed measurement; read only."""
    folder = tmp_path_factory.mktemp("measured")
    return folder, measure("toy", {"run": [point]}, config(), corpus, folder, workers=1)


def test_the_table_and_what_it_must_agree_with(measured, point, model, corpus):
    folder, table = measured
    assert table["method"].tolist() == ["none", "gptq", "rtn"] and "losses" not in table
    assert set(table["run"]) == {"run"} and set(table["weights_id"]) == {point.weights_id}
    assert table["layers"].tolist()[1:] == [4, 4] and set(table["evaluation_tokens"]) == {512}
    full = pd.read_parquet(folder / "table.parquet")
    losses = np.stack(full["losses"])
    assert losses.shape == (3, 32)
    assert full["ce"].to_numpy() == pytest.approx(losses.mean(1))
    base = losses[0].mean()
    for i in (1, 2):
        row = full.iloc[i]
        assert row["ce_fp"] == pytest.approx(base)
        assert row["delta_ce"] == pytest.approx(losses[i].mean() - base)
        assert row["relative_error"] == pytest.approx(losses[i].mean() / base - 1)
        assert row["delta_ce_low"] < row["delta_ce"] < row["delta_ce_high"]
        assert row["relative_error_low"] < row["relative_error"] < row["relative_error_high"]
        assert 0 < row["relative_weight_error"] < 1
    assert full["calibration_sequences"].tolist()[1] == 8 and np.isnan(full["calibration_sequences"].iloc[2])
    assert full["calibration_id"].iloc[1] == TokenSet.open(corpus, "calibration").id
    assert set(full["evaluation_id"]) == {TokenSet.open(corpus, "validation").id}


def test_the_base_loss_is_transformers_own_on_the_same_tokens(point, corpus, tmp_path):
    table = measure("toy", {"run": [point]}, config(precision="fp32"), corpus, tmp_path, workers=1)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(point.path)
    blocks = torch.from_numpy(TokenSet.open(corpus, "validation").blocks(16, 512))
    with torch.no_grad():
        expected = loaded(blocks, labels=blocks).loss.item()
    assert table["ce"].iloc[0] == pytest.approx(expected, rel=1e-5)


def watch(monkeypatch):
    """Counts what is computed: evaluations and quantizations."""
    done = []
    for name in ("sequence_losses", "quantize"):
        real = getattr(module, name)

        def call(*args, _real=real, _name=name, **kwargs):
            done.append(_name if _name == "sequence_losses" else args[2].label)
            return _real(*args, **kwargs)

        monkeypatch.setattr(module, name, call)
    return done


def files(folder):
    return {p.name: p.stat().st_mtime_ns for p in (folder / "rows").iterdir()}


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("damage", ["gone", "cut", "empty", "text"])
def test_only_a_missing_or_unreadable_row_is_computed_again(
    measured, point, corpus, tmp_path, monkeypatch, lost, damage
):
    folder, table = measured
    rows = tmp_path / "rows"
    rows.mkdir()
    for p in (folder / "rows").iterdir():
        (rows / p.name).write_bytes(p.read_bytes())
    path = rows / f"{table['key'][lost]}.parquet"
    data = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "text": b"not a table"}[damage])
    before, done = files(tmp_path), watch(monkeypatch)
    again = measure("toy", {"run": [point]}, config(), corpus, tmp_path, workers=1)
    assert (
        done
        == [["sequence_losses"], ["gptq-3bit-g16", "sequence_losses"], ["rtn-4bit-g16", "sequence_losses"]][
            lost
        ]
    )
    changed = {n for n, t in files(tmp_path).items() if before.get(n) != t}
    assert changed == {path.name}
    pd.testing.assert_frame_equal(
        again.drop(columns="seconds"), table.drop(columns="seconds"), check_exact=True
    )


def test_nothing_missing_nothing_loaded(measured, point, corpus, monkeypatch):
    folder, table = measured

    def fail(*args):
        raise AssertionError("loaded")

    monkeypatch.setattr(checkpoints, "load_model", fail)
    again = measure("toy", {"run": [point]}, config(), corpus, folder, workers=1)
    pd.testing.assert_frame_equal(again, table)


def test_a_quantizer_more_computes_its_row_alone(measured, point, corpus, tmp_path, monkeypatch):
    folder, table = measured
    (tmp_path / "rows").mkdir()
    for p in (folder / "rows").iterdir():
        (tmp_path / "rows" / p.name).write_bytes(p.read_bytes())
    done = watch(monkeypatch)
    more = [*toy.MEASURE["quantizers"], {"method": "rtn", "bits": 2, "group_size": 16}]
    again = measure("toy", {"run": [point]}, config(quantizers=more), corpus, tmp_path, workers=1)
    assert done == ["rtn-2bit-g16", "sequence_losses"] and len(again) == 4
    assert again["relative_weight_error"].iloc[3] > 2 * again["relative_weight_error"].iloc[2]


@pytest.fixture(scope="module", params=["neox", "llama"])
def any_point(request, point, corpus, tmp_path_factory):
    """A checkpoint of an architecture with a lean forward pass, and of one without; read only."""
    if request.param == "neox":
        return point
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=0.3,
    ))  # fmt: skip
    return checkpoints.save(tmp_path_factory.mktemp("llama") / "c", made, corpus / "tokenizer", **PLACE)


def test_a_quantized_row_does_not_depend_on_whether_the_base_is_measured_with_it(any_point, corpus, tmp_path):
    point = any_point
    whole = measure("toy", {"run": [point]}, config(), corpus, tmp_path / "m", workers=1)
    (tmp_path / "m" / "rows" / f"{whole['key'][1]}.parquet").unlink()
    again = measure("toy", {"run": [point]}, config(), corpus, tmp_path / "m", workers=1)
    pd.testing.assert_frame_equal(
        again.drop(columns="seconds"), whole.drop(columns="seconds"), check_exact=True
    )


def test_equal_weights_at_two_places_keep_their_places(measured, point, model, corpus, tmp_path):
    """Rows are found by weights; where they lie on a run comes from the trajectory that is asked for."""
    main = dataclasses.replace(point, name="main", tokens=1280, step=None, lr=None, phase="average")
    table = measure("toy", {"a": [point], "b": [main]}, config(), corpus, tmp_path, workers=1)
    b = table[table["run"] == "b"]
    assert set(b["checkpoint"]) == {"main"} and set(b["tokens"]) == {1280} and set(b["phase"]) == {"average"}
    assert b["step"].isna().all() and b["lr"].isna().all()
    assert set(table[table["run"] == "a"]["checkpoint"]) == {"step-10"}
    assert len(files(tmp_path)) == 3


def test_two_workers_give_the_same_table(measured, point, model, corpus, tmp_path, forked_workers):
    """And what a killed process left is swept."""
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / ".tmp-x.parquet").write_bytes(b"")
    other = checkpoints.save(tmp_path / "step-20", model, corpus / "tokenizer", **{**PLACE, "step": 20})
    two = measure("toy", {"run": [point], "other": [other]}, config(), corpus, tmp_path, workers=2)
    expected = measured[1].drop(columns="seconds")
    pd.testing.assert_frame_equal(
        two[two["run"] == "run"].drop(columns="seconds"), expected, check_exact=True, check_dtype=False
    )
    assert not list((tmp_path / "rows").glob(".tmp-*"))


# --- keys


def key(spec=SPEC, texts=None, weights="w", **changes):
    point = checkpoints.Checkpoint("c", 1, 1, 0.1, "stable", None, weights)
    return row_key(point, spec, config(**changes), {**TEXTS, **(texts or {})})


def text(section, **changes):
    return {section: {**toy.MEASURE[section], **changes}}


@pytest.mark.parametrize(
    "change",
    [
        {"weights": "other"},
        {"spec": None},
        {"spec": dataclasses.replace(SPEC, bits=3)},
        {"spec": dataclasses.replace(SPEC, group_size=32)},
        {"spec": dataclasses.replace(SPEC, method="rtn")},
        {"spec": dataclasses.replace(SPEC, damping=0.05)},
        {"spec": dataclasses.replace(SPEC, symmetric=False)},
        {"spec": dataclasses.replace(SPEC, act_order=True)},
        {"spec": dataclasses.replace(SPEC, true_sequential=True)},
        {"spec": dataclasses.replace(SPEC, precision="float64")},
        {"precision": "fp32" if config().compute_dtype == "bf16" else "bf16"},
        {"texts": {"evaluation": "other"}},
        {"texts": {"calibration": "other"}},
        text("evaluation", tokens=1024),
        text("evaluation", length=8),
        text("evaluation", set="evaluation"),
        text("calibration", sequences=4),
        text("calibration", length=8),
        text("calibration", seed=1),
        text("calibration", set="calibration-in-domain"),
    ],
)
def test_whatever_decides_a_row_is_in_its_key(change):
    assert key(**change) != key()


def test_versions_and_code_are_in_the_key(monkeypatch):
    before = key()
    with monkeypatch.context() as m:
        m.setattr(provenance, "versions", lambda: {"torch": "9", "transformers": "5.24.0"})
        assert key() != before
    with monkeypatch.context() as m:
        m.setattr(provenance, "fingerprint", lambda *modules: "other")
        assert key() != before
    assert key() == before


def test_what_does_not_decide_a_row_is_not(monkeypatch):
    assert key(compile=True, device="auto") == key()
    assert key(precision="auto") == key(
        precision=config().compute_dtype
    )  # what is used, not how it was asked for
    assert key(quantizers=[{"bits": 8}]) == key()  # each row has its own
    assert key(spec=None, texts={"calibration": "other"}, **text("calibration", seed=1)) == key(spec=None)
    rtn = dataclasses.replace(SPEC, method="rtn")
    assert key(rtn, **text("calibration", seed=1)) == key(rtn)


def test_the_fingerprint_covers_everything_that_computes_a_row():
    """Every module of ours that measuring imports is in it, save those that only move things about."""
    graph = grimp.build_graph("ptq_dynamics")
    made_by = ("quantization.quantizer", "evaluation.losses", "corpus.tokens")
    found = {f"ptq_dynamics.{m}" for m in made_by}
    found |= {m for start in list(found) for m in graph.find_upstream_modules(start)}
    uncovered = {m for m in found if not any(m == n or m.startswith(n + ".") for n in module.NUMERICS)}
    uncovered -= {"ptq_dynamics"}  # the version
    assert len(found) > 5 and all(m.startswith("ptq_dynamics.core") for m in uncovered), uncovered


# --- bad input


def test_more_evaluation_text_than_there_is(point, corpus, tmp_path):
    with pytest.raises(UserError) as e:
        measure(
            "toy", {"run": [point]}, config(**text("evaluation", tokens=10**6)), corpus, tmp_path, workers=1
        )
    assert "evaluation.tokens asks for 1000000, but set 'validation' has" in str(e.value)


def test_a_failing_checkpoint_does_not_stop_the_others(measured, point, corpus, tmp_path):
    gone = dataclasses.replace(point, name="gone", path=tmp_path / "nowhere", weights_id="x")
    with pytest.raises(
        UserError, match="1 of 2 members failed .1 finished and are kept.: run/gone: .*nowhere"
    ):
        measure("toy", {"run": [gone, point]}, config(), corpus, tmp_path, workers=1)
    assert len(files(tmp_path)) == 3


def test_csv_for_git(measured, tmp_path):
    module.write_csv(measured[1].assign(other_id=None), tmp_path / "t.csv")
    back = pd.read_csv(tmp_path / "t.csv")
    assert len(back) == 3 and back["relative_error"].to_numpy()[1:] == pytest.approx(
        measured[1]["relative_error"].to_numpy(dtype=float)[1:], rel=1e-6
    )
    assert (back["weights_id"].str.len() == 12).all()


def test_measure_checkpoint_returns_its_keys_in_order(measured, point, corpus):
    folder, table = measured
    assert measure_checkpoint(point, config(), corpus, folder / "rows") == table["key"].tolist()


def test_a_row_that_others_have_is_taken_from_them(corpus, point, tmp_path, monkeypatch):
    first = measure("toy", {"run": [point]}, config(), corpus, tmp_path / "one", workers=1)
    done = watch(monkeypatch)
    again = measure(
        "toy", {"other": [point]}, config(), corpus, tmp_path / "two", workers=1, lenders=[tmp_path / "one"]
    )
    assert done == []
    pd.testing.assert_frame_equal(again.drop(columns="run"), first.drop(columns="run"))
    assert files(tmp_path / "one").keys() == files(tmp_path / "two").keys()


def test_further_quantizers_of_one_study():
    more = {"method": "rtn", "bits": 2, "group_size": 16}
    told = config(also={"toy": [more]})
    assert [q.bits for q in told.of("toy").quantizers] == [3, 4, 2]
    assert told.of("another") == config()


def test_block_by_block_gives_the_rows_of_the_whole_model(any_point, corpus, tmp_path, monkeypatch):
    done = watch(monkeypatch)
    whole, blockwise = (
        measure("toy", {"run": [any_point]}, config(streaming=s), corpus, tmp_path / s, workers=1)
        for s in ("never", "always")
    )
    assert len(done) == 5  # the whole model alone: three evaluations, two quantizers
    assert set(whole["key"]).isdisjoint(blockwise["key"])
    columns = [c for c in whole if c not in ("key", "seconds", "versions")]
    # GPTNeoX has a forward pass of its own in memory, which keeps more in float32
    neox = "gpt_neox" in (any_point.path / "config.json").read_text()
    exact = dict(rtol=2e-3, atol=2e-3) if neox else dict(rtol=0, atol=0)
    pd.testing.assert_frame_equal(blockwise[columns], whole[columns], **exact)


def test_what_does_not_fit_is_measured_block_by_block(point, monkeypatch):
    memory = type("Memory", (), {"total": 10**12})
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: memory)
    assert not module.is_streamed(point, config())
    size = (point.path / checkpoints.WEIGHTS).stat().st_size
    memory.total = 3 * size
    (point.path / checkpoints.STATE).write_bytes(bytes(size))  # the optimizer's is not loaded
    assert not module.is_streamed(point, config())
    (point.path / checkpoints.STATE).unlink()
    memory.total = 2 * size  # twice the float32 weights are more than 80 % of it
    assert module.is_streamed(point, config()) and not module.is_streamed(point, config(streaming="never"))
