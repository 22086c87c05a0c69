"""The monitor on real tiny models: what it reads against an independent oracle, and that it leaves no trace."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math

import numpy as np
import pandas as pd
import pytest
import torch
import toy
from transformers import GPTNeoXForCausalLM, Trainer, TrainingArguments

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.corpus.tokens import TokenSet
from ptq_dynamics.evaluation import monitor as monitoring
from ptq_dynamics.evaluation.measure import MeasureConfig
from ptq_dynamics.evaluation.monitor import MonitorConfig, QuantizationMonitor, diverging
from ptq_dynamics.models import neox
from ptq_dynamics.quantization.spec import QuantSpec
from ptq_dynamics.training.step import Learner, OptimizerConfig
from ptq_dynamics.training.study import Study, expand, trajectory

RTN = (QuantSpec(method="rtn", bits=4, group_size=8), QuantSpec(method="rtn", bits=3, group_size=8))
GPTQ = QuantSpec(method="gptq", bits=3, group_size=8)
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(300, size=(6, 17))
CALIBRATION = RNG.integers(300, size=(4, 16))


def build() -> GPTNeoXForCausalLM:
    return neox.build(toy.model_config(init_std=0.3), vocab_size=300, seed=0)


def rounded(w: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Symmetric round to nearest of each row's groups, as the formula has it."""
    out = w.double().clone()
    for begin in range(0, w.shape[1], group):
        part = out[:, begin : begin + group]
        scale = 2 * part.abs().amax(1, keepdim=True) / (2**bits - 1)
        scale = scale * (1 - 1e-15)  # so that -max rounds down whatever the last bit
        out[:, begin : begin + group] = (
            torch.clamp(torch.round(part / scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scale
        )
    return out


@torch.no_grad()
def plain_loss(model: GPTNeoXForCausalLM) -> float:
    """Cross-entropy through transformers' own forward and loss, float64."""
    ids = torch.as_tensor(TOKENS)
    logits = copy.deepcopy(model).double().eval()(ids[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()


def test_readings_against_transformers_and_rounding_by_hand() -> None:
    model = build()
    monitor = QuantizationMonitor(TOKENS, RTN, every=1, precision="fp32")
    monitor(model, 1)
    (reading,) = monitor.readings
    base = plain_loss(model)
    assert reading["ce"] == pytest.approx(base, rel=1e-6)
    for spec in RTN:
        other = copy.deepcopy(model)
        with torch.no_grad():
            for name, p in other.named_parameters():
                if p.ndim == 2 and ".layers." in name:
                    p.copy_(rounded(p, spec.bits, spec.group_size))
        assert reading[spec.label] == pytest.approx(plain_loss(other) / base - 1, rel=1e-3, abs=1e-7)
        assert abs(reading[spec.label]) > 1e-4


def train(
    monitor: QuantizationMonitor | None, updates: int = 4
) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """Weights after some updates by our learner, with a random draw between them, as dropout would make."""
    torch.manual_seed(1)
    model = build().train()
    learner = Learner(model, OptimizerConfig(), "bf16", compiled=False)
    logged = []
    for step in range(1, updates + 1):
        batch = torch.randint(300, (4, 17))
        loss, _ = learner.update(batch, 0.01, 4)
        if monitor is not None:
            logged.append(monitor(model, step, loss))
            assert all(m.training for m in model.modules())
    return {n: p.detach().clone() for n, p in model.named_parameters()}, logged


@pytest.mark.parametrize(
    "quantizers", [RTN, (GPTQ,), (*RTN, GPTQ)], ids=lambda q: "+".join(s.label for s in q)
)
def test_training_is_the_same_bit_for_bit_with_and_without_it(quantizers) -> None:
    alone, _ = train(None)
    monitor = QuantizationMonitor(TOKENS, quantizers, CALIBRATION, every=2)
    watched, logged = train(monitor)
    assert alone.keys() == watched.keys() and all(torch.equal(alone[n], watched[n]) for n in alone)
    assert [r["step"] for r in monitor.readings] == [2, 4] and logged[0] == {} == logged[2]
    names = {"quantization/ce", "quantization/diverging", *(f"quantization/{q.label}" for q in quantizers)}
    assert logged[1].keys() == names
    assert all(math.isfinite(v) for v in logged[1].values())
    assert monitor.readings[0]["loss"] > 0 and monitor.seconds > 0


def test_weights_flags_gradients_and_random_numbers_stay_what_they_were() -> None:
    model = build().train()
    model.gpt_neox.layers[0].eval()  # a flag of its own
    model(torch.as_tensor(TOKENS), labels=torch.as_tensor(TOKENS)).loss.backward()
    before = {n: (p.detach().clone(), p.grad.clone(), p.data_ptr()) for n, p in model.named_parameters()}
    flags = [m.training for m in model.modules()]
    torch.manual_seed(5)
    np.random.seed(5)
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    QuantizationMonitor(TOKENS, (*RTN, GPTQ), CALIBRATION, every=1)(model, 1)
    assert torch.equal(torch.get_rng_state(), states[0]) and (np.random.get_state()[1] == states[1]).all()
    assert [m.training for m in model.modules()] == flags
    for n, p in model.named_parameters():
        weight, grad, place = before[n]
        assert (
            torch.equal(p, weight) and torch.equal(p.grad, grad) and p.data_ptr() == place and p.requires_grad
        )


def test_a_quantizer_that_fails_halfway_leaves_the_weights_and_the_run_alone(monkeypatch, caplog) -> None:
    model = build()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}

    def spoil(model, calibration, spec):
        with torch.no_grad():
            model.gpt_neox.layers[0].mlp.dense_h_to_4h.weight.zero_()
        raise UserError("the Hessian stays singular")

    monkeypatch.setattr(monitoring, "quantize", spoil)
    monitor = QuantizationMonitor(TOKENS, RTN, every=1)
    assert monitor(model, 7) == {} and monitor.readings == []
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert "step 7: not read: the Hessian stays singular" in caplog.text


def test_tokens_of_another_vocabulary_are_told_and_end_no_run(caplog) -> None:
    assert QuantizationMonitor(TOKENS + 200, RTN, every=1)(build(), 3) == {}
    assert "step 3: not read" in caplog.text and "vocabulary of 300" in caplog.text
    assert QuantizationMonitor(torch.as_tensor(TOKENS, dtype=torch.int32), RTN, every=1)(build(), 3)


def test_weights_that_are_not_finite_are_told(caplog) -> None:
    model = build()
    with torch.no_grad():
        model.gpt_neox.layers[0].attention.dense.weight[0, 0] = math.nan
    assert QuantizationMonitor(TOKENS, RTN, every=1)(model, 3) == {}
    assert "step 3: not read" in caplog.text and "not finite" in caplog.text


# --- the warning


def path(errors, losses) -> list[dict]:
    return [{"ce": c, "q": e} for e, c in zip(errors, losses, strict=True)]


FLAT = [0.02, 0.021, 0.019, 0.02]


@pytest.mark.parametrize(
    ("errors", "losses", "told"),
    [
        ([*FLAT, 0.025], [3.2, 3.2, 3.2, 3.2, 3.0], True),  # exactly 1.25 times the median, loss falls
        ([*FLAT, 0.0249], [3.2, 3.2, 3.2, 3.2, 3.0], False),
        (
            [*FLAT, 0.05],
            [3.2, 3.2, 3.2, 3.2, 3.3],
            False,
        ),  # the loss rises too: the run is in trouble, not diverging
        ([*FLAT, 0.05], [3.2, 3.2, 3.2, 3.2, 3.2], True),
        ([0.02, 0.02, 0.02, 0.05], [3.2, 3.2, 3.2, 3.0], False),  # the window is not full
        ([0.0, 0.0, 0.0, 0.0, 0.05], [3.2, 3.2, 3.2, 3.2, 3.0], False),  # no ratio
        ([0.001, *FLAT, 0.02], [3.2] * 6, False),  # what lies before the window does not count
    ],
)
def test_the_rule_of_the_warning(errors, losses, told) -> None:
    assert diverging(path(errors, losses), ["q"], ratio=1.25, window=4) == (("q",) if told else ())


def test_it_warns_once_for_each_time_that_error_and_loss_part(monkeypatch, caplog) -> None:
    errors = iter([0.02, 0.02, 0.02, 0.03, 0.04, 0.02, 0.02, 0.02, 0.05])
    monkeypatch.setattr(
        monitoring, "read_errors", lambda *_: {"ce": 3.0, RTN[0].label: next(errors), RTN[1].label: 0.1}
    )
    monitor = QuantizationMonitor(TOKENS, RTN, every=10, window=3)
    with caplog.at_level(logging.WARNING):
        logged = [monitor(None, step) for step in range(10, 100, 10)]
    assert [bool(r["quantization/diverging"]) for r in logged] == [False] * 3 + [True] * 2 + [False] * 3 + [
        True
    ]
    assert [r.message.split(":")[0] for r in caplog.records] == ["step 40", "step 90"]
    assert "3.00 %, 1.50 times the median of the last 3 readings" in caplog.records[0].message


# --- transformers


class Text(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.as_tensor(np.random.default_rng(i).integers(300, size=16))
        return {"input_ids": ids, "labels": ids}


def fit(folder, monitor: QuantizationMonitor | None) -> tuple[dict[str, torch.Tensor], Trainer]:
    model = build()
    model.config.hidden_dropout = 0.0
    for (
        layer
    ) in model.gpt_neox.layers:  # dropout in training: the lean pass does not cover it, random numbers matter
        layer.post_mlp_dropout = torch.nn.Dropout(0.2)
    model.config.hidden_dropout = 0.2
    arguments = TrainingArguments(
        output_dir=folder, max_steps=6, per_device_train_batch_size=4, learning_rate=0.01, logging_steps=2,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, seed=3,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Text())
    if monitor is not None:
        trainer.add_callback(monitor.callback(trainer))
    trainer.train()
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}, trainer


def test_a_transformers_trainer_logs_it_like_its_own_metrics_and_trains_the_same(tmp_path) -> None:
    monitor = QuantizationMonitor(TOKENS, (RTN[1], GPTQ), CALIBRATION, every=3)
    watched, trainer = fit(tmp_path / "watched", monitor)
    alone, _ = fit(tmp_path / "alone", None)
    assert all(torch.equal(alone[n], watched[n]) for n in alone)
    logged = [r for r in trainer.state.log_history if "quantization/ce" in r]
    assert [r["step"] for r in logged] == [3, 6] == [r["step"] for r in monitor.readings]
    assert logged[0][f"quantization/{GPTQ.label}"] == monitor.readings[0][GPTQ.label]
    assert monitor.readings[1]["loss"] == next(
        r["loss"] for r in trainer.state.log_history if r.get("step") == 4 and "loss" in r
    )


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tokens": TOKENS[0]}, "shape"),
        ({"tokens": TOKENS[:, :1]}, "shape"),
        ({"tokens": TOKENS[:0]}, "shape"),
        ({"tokens": TOKENS / 2}, "integer token ids"),
        ({"tokens": TOKENS, "quantizers": [GPTQ]}, "gptq-3bit-g8 needs calibration tokens"),
        ({"tokens": TOKENS, "quantizers": []}, "needs a quantizer"),
        ({"tokens": TOKENS, "every": 0}, "every"),
        ({"tokens": TOKENS, "ratio": math.nan}, "ratio"),
    ],
)
def test_bad_input_is_one_line(arguments, words) -> None:
    with pytest.raises(UserError, match=words) as told:
        QuantizationMonitor(**arguments)
    assert "\n" not in str(told.value)


def test_tokens_of_a_corpus_are_spread_evenly(corpus) -> None:
    monitor = QuantizationMonitor.of(corpus, length=16, sequences=5, quantizers=(*RTN, GPTQ))
    blocks = TokenSet.open(corpus, "validation").blocks(16)
    assert (monitor.tokens == blocks[[round(i * (len(blocks) - 1) / 4) for i in range(5)]]).all()
    assert monitor.calibration.shape == (5, 16)
    with pytest.raises(UserError, match="100000 asked for"):
        QuantizationMonitor.of(corpus, length=16, sequences=100_000)


# --- over saved checkpoints


MONITOR = {
    "study": "toy",
    "sequences": 4,
    "quantizers": [{"method": "rtn", "bits": 3, "group_size": 8}],
    "window": 1,
}


def configs(**changes) -> tuple[MonitorConfig, Study, MeasureConfig]:
    return (
        toy.config(MonitorConfig, MONITOR, **changes),
        toy.config(Study, toy.STUDY),
        toy.config(MeasureConfig, toy.MEASURE, precision="fp32"),
    )


def test_saved_checkpoints_are_read_as_they_would_have_been_in_training(own_root) -> None:
    table = monitoring.replay(*configs(), 1)
    study = toy.config(Study, toy.STUDY)
    saved = [(r.name, c.tokens) for r in expand(study) for c in trajectory("toy", r, dense=True)]
    assert list(zip(table["run"], table["tokens"], strict=True)) == saved
    spec = QuantSpec(method="rtn", bits=3, group_size=8)
    monitor = QuantizationMonitor.of(
        own_root / "data" / "corpus", length=16, sequences=4, quantizers=[spec], every=1, precision="fp32", window=1
    )  # fmt: skip
    run = next(r for r in expand(study) if r.member == "cooldown" and r.branch_step == 60)
    parent = next(r for r in expand(study) if r.name == run.config.parent)
    for c in [*trajectory("toy", parent), *trajectory("toy", run)]:
        monitor(GPTNeoXForCausalLM.from_pretrained(c.path, dtype=torch.float32), c.step)
    rows = pd.concat([table[table["run"] == parent.name], table[table["run"] == run.name]])
    for row, reading in zip(rows.to_dict("records"), monitor.readings, strict=True):
        assert row["step"] == reading["step"]
        assert (row["ce"], row[spec.label]) == pytest.approx((reading["ce"], reading[spec.label]), rel=1e-6)
        assert row["diverging"] == " ".join(reading["diverging"])
    told = [set(d.split()) for d in rows["diverging"]]
    assert [set(w.split()) for w in rows["warned"]] == [
        now - before for before, now in zip([set(), *told], told, strict=False)
    ]
    written = pd.read_csv(own_root / "reports" / "tables" / "monitor.csv")
    assert written[spec.label].to_numpy() == pytest.approx(table[spec.label].to_numpy(), rel=1e-6)


def test_what_was_read_is_kept_while_it_holds(own_root, monkeypatch) -> None:
    calls = []
    real = monitoring.read_errors
    monkeypatch.setattr(monitoring, "read_errors", lambda *a: calls.append(1) or real(*a))
    first = monitoring.replay(*configs(sequences=3), 1)
    made = len(calls)
    assert made == len(first)
    pd.testing.assert_frame_equal(monitoring.replay(*configs(sequences=3), 1), first)
    assert len(calls) == made
    file = next((own_root / "data" / "measurements" / "monitor" / "rows").glob("*.json"))
    file.write_text("{torn")
    pd.testing.assert_frame_equal(monitoring.replay(*configs(sequences=3), 1), first)
    assert len(calls) == made + 1
    monitoring.replay(*configs(sequences=3, window=2, ratio=3.0), 1)  # how it warns decides no reading
    assert len(calls) == made + 1
    monitoring.replay(*configs(sequences=2), 1)
    assert len(calls) == 2 * made + 1


@pytest.mark.parametrize(("method", "again"), [("rtn", False), ("gptq", True)])
def test_another_calibration_is_another_reading_of_gptq_alone(own_root, monkeypatch, method, again) -> None:
    calls = []
    real = monitoring.read_errors
    monkeypatch.setattr(monitoring, "read_errors", lambda *a: calls.append(1) or real(*a))
    config, study, measuring = configs(quantizers=[{"method": method, "bits": 3, "group_size": 8}])
    monitoring.replay(config, study, measuring, 1)
    made = len(calls)
    other = dataclasses.replace(measuring, calibration=dataclasses.replace(measuring.calibration, seed=9))
    monitoring.replay(config, study, other, 1)
    assert len(calls) == (2 * made if again else made)


def test_a_member_that_is_not_there_is_one_line(own_root) -> None:
    with pytest.raises(UserError, match="study 'toy' has no member 'stem'"):
        monitoring.replay(*configs(trunk="stem"), 1)
