"""Any trajectory, measured: rows, averages of neighbours, text for other tokenizers, faults."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pandas as pd
import pytest
import tokenizers
import torch
import toy
import transformers
from hub_server import Hub

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.corpus.build import save_tokenizer, train_tokenizer
from ptq_dynamics.corpus.tokens import TokenSet
from ptq_dynamics.evaluation import measure as measuring
from ptq_dynamics.evaluation import wild
from ptq_dynamics.evaluation.measure import MeasureConfig, measure
from ptq_dynamics.evaluation.texts import texts
from ptq_dynamics.models import neox
from ptq_dynamics.training.study import Study, expand, trajectory
from ptq_dynamics.trajectories import averaging, checkpoints
from ptq_dynamics.trajectories.publish import publish
from ptq_dynamics.trajectories.sources import open_source

ROOT = Path(__file__).parents[2]


def config(**changes) -> MeasureConfig:
    return toy.config(MeasureConfig, toy.MEASURE, **changes)


@pytest.fixture(scope="module")
def ours(corpus, tmp_path_factory) -> Path:
    """Four checkpoints along a line between two models, the third in the middle of the rest; read only."""
    folder = tmp_path_factory.mktemp("ours") / "my-run"
    start, end = (neox.build(toy.model_config(init_std=0.3), vocab_size=300, seed=s) for s in (1, 2))
    for i in range(4):
        model = neox.build(toy.model_config(), vocab_size=300, seed=0)
        with torch.no_grad():
            for p, a, b in zip(model.parameters(), start.parameters(), end.parameters(), strict=True):
                p.copy_(a + (b - a) * i / 3)
        checkpoints.save(
            folder / f"step-{10 * (i + 1):07d}", model, corpus / "tokenizer", tokens=640 * (i + 1),
            step=10 * (i + 1), lr=0.01 if i < 3 else 0.0, phase="stable" if i < 3 else "decay", parent=None, key="k",
        )  # fmt: skip
    return folder


@pytest.fixture
def facts(root) -> Path:
    """A root with the corpus and the facts on families."""
    (root / "data" / "reference").mkdir()
    shutil.copy(ROOT / "data" / "reference" / "families.yaml", root / "data" / "reference")
    return root


def ask(source, **more) -> wild.Request:
    return wild.request(source=str(source), **{"bits": [4, 3], "window": 3} | more)


def quantized(table: pd.DataFrame, bits: int) -> pd.DataFrame:
    return table[table["bits"] == bits].set_index("checkpoint")


def test_a_folder_is_measured_and_so_are_the_averages_around_the_best(ours, facts, corpus, tmp_path):
    result = wild.measure_source(ask(ours), config(), tmp_path / "out")
    points = result.table[result.table["kind"] == "checkpoint"]
    assert len(points) == 4 * 3 and result.axis == "tokens" and not result.skipped
    assert set(points["group_size"].dropna()) == {16}  # 64 and 16 wide
    assert result.notes == ("group size 16: the largest up to 128 that divides the widths 16, 64",)
    # the same rows as measuring them as a study does, and the average as its definition says
    same = dataclasses.replace(
        config(),
        quantizers=tuple(wild._spec(ask(ours), b, 16) for b in (4, 3)),
    )
    own = [checkpoints.read(p) for p in sorted(ours.iterdir())]
    expected = measure("x", {"my-run": own}, same, corpus, tmp_path / "elsewhere", workers=1)
    assert points["ce"].tolist() == expected["ce"].tolist()
    for b in result.best:
        rows = quantized(points, b["bits"])
        assert b["checkpoint"] == rows["ce"].idxmin() and b["ce"] == rows["ce"].min()
        assert b["checkpoint"] in b["members"] and len(b["members"]) == 3
        mean = averaging.average([ours / m for m in b["members"]], tmp_path / f"mean-{b['bits']}")
        (again,) = (
            r["ce"]
            for r in measure("x", {"m": [checkpoints.read(mean)]}, same, corpus, tmp_path / "m", 1).to_dict(
                "records"
            )
            if r["bits"] == b["bits"]
        )
        assert b["average"] == pytest.approx(again, abs=1e-9)
    report = wild.read_report(tmp_path / "out")
    assert report["checkpoints"] == 4 and report["skipped"] == [] and len(report["words"]) == 2
    first = result.best[0]
    assert (
        f"At 4 bit (GPTQ), the lowest loss is that of {first['checkpoint']}: {first['ce']:.4f}"
        in report["words"][0]
    )
    assert f"gives {first['average']:.4f}" in report["words"][0]
    csv = pd.read_csv(tmp_path / "out" / "table.csv")
    assert len(csv) == len(result.table) and csv["ce"].tolist() == pytest.approx(
        result.table["ce"].tolist(), rel=1e-6
    )


def test_again_computes_nothing_and_one_more_bit_width_only_itself(ours, facts, tmp_path, monkeypatch):
    first = wild.measure_source(ask(ours, method="rtn"), config(), tmp_path / "out")
    done = []
    real = measuring.quantize
    monkeypatch.setattr(measuring, "quantize", lambda *a: done.append(a[2].bits) or real(*a))
    again = wild.measure_source(ask(ours, method="rtn"), config(), tmp_path / "out")
    assert done == [] and again.table["ce"].tolist() == first.table["ce"].tolist()
    wild.measure_source(ask(ours, method="rtn", bits=[4, 2], window=0), config(), tmp_path / "out")
    assert done == [2] * 4


def test_a_run_that_was_stopped_goes_on(ours, facts, tmp_path, monkeypatch):
    done = []
    real = measuring.quantize

    def quantize(*args):
        if len(done) == 2:
            done.append("stopped")
            raise KeyboardInterrupt
        done.append(args[2].bits)
        return real(*args)

    monkeypatch.setattr(measuring, "quantize", quantize)
    asked = ask(ours, method="rtn", bits=[3], window=0)
    with pytest.raises(KeyboardInterrupt):
        wild.measure_source(asked, config(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert len(wild.measure_source(asked, config(), tmp_path / "out").table) == 8
    assert done == [3, 3, "stopped", 3, 3]


def test_revisions_are_deleted_after_use_and_the_averages_are_made_all_the_same(ours, facts, tmp_path):
    with Hub() as server:
        for p in ours.iterdir():
            server.publish("lab/toy", p.name, p)
        where = {"endpoint": server.url, "offline": False}
        asked = ask("lab/toy", method="rtn", bits=[3], window=2)
        kept = wild.measure_source(asked, config(), tmp_path / "a", cache=tmp_path / "kept", **where)
        assert len(server.bodies("model.safetensors")) == 4
        shutil.rmtree(facts / "data" / "measurements")
        asked = dataclasses.replace(asked, delete=True)
        gone = wild.measure_source(asked, config(), tmp_path / "b", cache=tmp_path / "gone", **where)
    assert len(server.bodies("model.safetensors")) == 4 + 4 + 2  # the two that are averaged come twice
    assert not list((tmp_path / "gone").rglob("model.safetensors"))
    assert len(list((tmp_path / "kept").rglob("model.safetensors"))) == 4
    assert gone.table["ce"].tolist() == kept.table["ce"].tolist() and gone.best == kept.best


def test_what_cannot_be_measured_is_told_and_the_rest_goes_on(ours, facts, tmp_path):
    shutil.copytree(ours, tmp_path / "run")
    second, third = sorted((tmp_path / "run").iterdir())[1:3]
    (second / "model.safetensors").write_bytes(b"\0" * 100)
    model = checkpoints.load_model(checkpoints.read(third))
    with torch.no_grad():
        next(model.parameters())[0, 0] = float("nan")
    model.save_pretrained(third)
    (third / checkpoints.META).unlink()  # a plain folder: whole, but its weights are no numbers
    result = wild.measure_source(ask(tmp_path / "run", method="rtn", bits=[3]), config(), tmp_path / "out")
    told = {s.name: s.reason for s in result.skipped}
    assert set(told) == {second.name, third.name}
    assert "cut short or broken" in told[second.name] and "is not finite" in told[third.name]
    assert set(result.table.query("kind == 'checkpoint'")["checkpoint"]) == {"step-0000010", "step-0000040"}
    assert result.best[0]["members"] == ["step-0000010", "step-0000040"] and "average" in result.best[0]


def test_the_published_family_gives_the_rows_of_the_study(finished_root, facts):
    """Our own trajectory through the path of any public one: same weights, same numbers."""
    shutil.copytree(finished_root / "data" / "runs", facts / "data" / "runs")
    runs = expand(toy.config(Study, toy.STUDY))
    trunk = next(r for r in runs if r.config.parent is None)
    last = [r for r in runs if r.config.parent == trunk.name][-1]
    with toy.working_in(facts):
        folders = {c.name: c.path for r in (trunk, last) for c in trajectory("toy", r)}
    publish(folders, "ptq-dynamics/mini", facts / "data" / "hub")
    result = wild.measure_source(ask("mini", bits=[3]), config())
    study = pd.read_parquet(finished_root / "data" / "measurements" / "toy" / "table.parquet")
    study = study[(study["method"] != "rtn")].set_index(["weights_id", "method"])
    points = result.table[result.table["kind"] == "checkpoint"]
    assert len(points) == 2 * len(folders) == 6
    compared = ["ce", "ce_fp", "relative_error", "tokens", "step", "lr", "phase"]
    for r in points.to_dict("records"):
        same = study.loc[(r["weights_id"], r["method"])]
        same = same.iloc[0] if isinstance(same, pd.DataFrame) else same
        for c in compared:
            assert r[c] == same[c] or (pd.isna(r[c]) and pd.isna(same[c])), c
    assert (facts / "reports" / "tables" / "wild" / "mini.csv").is_file()
    assert (facts / "reports" / "trajectories" / "mini" / "table.csv").is_file()


def test_a_trajectory_that_tells_steps_only(ours, facts, tmp_path):
    for i, p in enumerate(sorted(ours.iterdir()), 1):
        shutil.copytree(p, tmp_path / "plain" / f"checkpoint-{i}")
        (tmp_path / "plain" / f"checkpoint-{i}" / checkpoints.META).unlink()
    result = wild.measure_source(ask(tmp_path / "plain", method="rtn", bits=[3]), config(), tmp_path / "out")
    assert result.axis == "step" and result.table["tokens"].isna().all()
    assert wild.read_report(tmp_path / "out")["axis"] == "step"


# --- small functions


def test_neighbours():
    names = list("abcdef")
    assert wild.neighbours(names, "c", 3) == ["b", "c", "d"]
    assert wild.neighbours(names, "a", 3) == ["a", "b", "c"]
    assert wild.neighbours(names, "f", 4) == ["c", "d", "e", "f"]
    assert wild.neighbours(names, "b", 9) == names


@pytest.mark.parametrize(
    ("widths", "group"), [([2048, 8192], 128), ([64, 256], 64), ([960, 2560], 80), ([30, 70], 128)]
)
def test_group_size(widths, group):
    found = wild.fitting_group(widths)
    best = max(d for d in range(1, 129) if all(w % d == 0 for w in widths))
    assert found == (best if best >= 16 else 128)
    assert found == group


def test_dry_run_tells_sizes_disk_and_time_and_measures_nothing(ours, facts):
    asked = ask(ours)
    lines = wild.estimate(open_source(str(ours)), asked, config())
    text = "\n".join(lines)
    assert lines[0] == "my-run: 4 checkpoints, 0 skipped"
    assert "step-0000010" in lines[1] and "640 tokens" in lines[1] and "MB" in lines[1]
    assert "nothing to download" in text and "time: about" in text and "GFLOP/s" in text
    assert not (facts / "data" / "measurements").exists()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"bits": [4, 1]}, "must be 2 to 8, got 1"),
        ({"bits": [3, 3]}, "a width is listed twice"),
        ({"bits": []}, "key 'bits'"),
        ({"group_size": 0}, "must be -1"),
        ({"method": "gptqq"}, "'gptq' or 'rtn'"),
        ({"calibration": "nowhere.txt"}, "--calibration nowhere.txt: no such file"),
        ({"windows": 3}, "unknown key 'windows'; did you mean 'window'?"),
    ],
)
def test_bad_requests(values, says):
    with pytest.raises(UserError) as e:
        ask("x", **values)
    assert says in str(e.value) and "\n" not in str(e.value)


def test_results_of_another_source_are_not_overwritten(ours, facts, tmp_path):
    asked = ask(ours, method="rtn", bits=[3], window=0)
    wild.measure_source(asked, config())
    wild.measure_source(asked, config())
    shutil.copytree(ours, tmp_path / "my-run")
    with pytest.raises(UserError, match="holds the results of another source .*; give --out DIR"):
        wild.measure_source(ask(tmp_path / "my-run"), config())


# --- averages on request


def test_average_of_the_last(ours, tmp_path):
    source = open_source(str(ours))
    names = [i.name for i in source.items]
    assert wild.write_average(source, tmp_path / "a", 2) == names[2:]
    assert wild.write_average(source, tmp_path / "b", 2, interval=2, last="step-0000030") == [
        names[0],
        names[2],
    ]
    for last in ("30", "1920", "1.92K"):
        assert wild.write_average(source, tmp_path / "c", 2, last=last) == names[1:3]
    merged = checkpoints.load_model(checkpoints.read(tmp_path / "c"))
    members = [checkpoints.load_model(checkpoints.read(ours / n)) for n in names[1:3]]
    for p, a, b in zip(merged.parameters(), *(m.parameters() for m in members), strict=True):
        torch.testing.assert_close(p, ((a.double() + b.double()) / 2).float(), rtol=1e-6, atol=1e-7)


def test_average_bad_input(ours, tmp_path):
    source = open_source(str(ours))
    with pytest.raises(UserError, match="window 9 at interval 1 needs 9 checkpoints, there are 4"):
        wild.write_average(source, tmp_path / "a", 9)
    with pytest.raises(
        UserError, match="--last 31: no checkpoint of this name, step or tokens; nearest is '30'"
    ):
        wild.write_average(source, tmp_path / "a", 2, last="31")
    (tmp_path / "full").mkdir()
    with pytest.raises(UserError, match="exists and is no average"):
        wild.write_average(source, tmp_path / "full", 2)


# --- text


@pytest.fixture(scope="module")
def other_tokenizer(shared_root, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    read = [p.read_text() for p in (shared_root / "text" / "own").glob("*.txt")]
    save_tokenizer(train_tokenizer(read, 350), folder)
    return folder


def test_our_tokenizer_takes_our_corpus(root, corpus, tmp_path):
    found = texts(corpus / "tokenizer", 16, config(), tmp_path)
    assert found.corpus == root / "data" / "corpus" and found.notes == ()
    assert (found.evaluation, found.calibration) == (config().evaluation, config().calibration)


def test_another_tokenizer_takes_the_same_text_anew(root, corpus, other_tokenizer, tmp_path):
    found = texts(other_tokenizer, 32, config(), tmp_path)
    assert found.evaluation.length == 32 and "own tokenizer (350 tokens)" in found.notes[0]
    new, old = TokenSet.open(found.corpus, "evaluation"), TokenSet.open(corpus, "validation")
    a = tokenizers.Tokenizer.from_file(str(other_tokenizer / "tokenizer.json"))
    b = tokenizers.Tokenizer.from_file(str(corpus / "tokenizer" / "tokenizer.json"))
    assert a.decode(new.tokens.tolist()) == b.decode(old.tokens.tolist()) and len(new.tokens) != len(
        old.tokens
    )
    assert len(new.documents) == len(old.documents)
    assert texts(other_tokenizer, 32, config(), tmp_path).corpus == found.corpus


def test_files_are_taken_and_amounts_fit_what_there_is(root, other_tokenizer, tmp_path):
    for name in ("e", "c"):
        (tmp_path / name).write_text(
            "The river keeps the stone under the bridge.\n" * (20 if name == "e" else 8)
        )
    files = {"evaluation": tmp_path / "e", "calibration": tmp_path / "c"}
    found = texts(other_tokenizer, 16, config(), tmp_path / "w", **files)
    have = len(TokenSet.open(found.corpus, "evaluation").tokens)
    assert found.evaluation.tokens == min(512, (have - 1) // 16 * 16) and found.calibration.sequences <= 8
    assert "own tokenizer" in found.notes[0] and "evaluation tokens (512 asked for)" in found.notes[1]
    same = transformers.AutoTokenizer.from_pretrained(other_tokenizer)(files["evaluation"].read_text())[
        "input_ids"
    ]
    assert TokenSet.open(found.corpus, "evaluation").tokens[: len(same)].tolist() == same


def test_bad_text(root, corpus, other_tokenizer, tmp_path):
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "short").write_text("a river")
    for file, says in (
        ("empty", "holds no text"),
        ("binary", "not plain text"),
        ("short", "too little text"),
    ):
        with pytest.raises(UserError, match=says):
            texts(other_tokenizer, 16, config(), tmp_path / "w", evaluation=tmp_path / file)
    with pytest.raises(UserError, match="no tokenizer beside the checkpoints"):
        texts(None, 16, config(), tmp_path / "w")
    shutil.rmtree(root / "data" / "corpus")
    with pytest.raises(UserError, match="give --evaluation FILE and --calibration FILE"):
        texts(other_tokenizer, 16, config(), tmp_path / "w")
