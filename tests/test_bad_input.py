"""Bad input and a bad environment: each one clear line that names what and the fix, and nothing lost."""

from __future__ import annotations

import contextlib
import copy
import io
import re
import shutil
import subprocess

import pytest
import toy
from ruamel.yaml import YAML

from ptq_dynamics import cli
from ptq_dynamics.core import paths
from ptq_dynamics.core.config import load
from ptq_dynamics.core.errors import UserError
from ptq_dynamics.corpus.build import CorpusConfig, build
from ptq_dynamics.corpus.tokens import TokenSet
from ptq_dynamics.evaluation.measure import MeasureConfig, measure
from ptq_dynamics.training import study as studies
from ptq_dynamics.training.loop import Machine
from ptq_dynamics.training.study import Study, pretrain, trajectory
from ptq_dynamics.trajectories import checkpoints

PARAMS = {
    "profile": "toy",
    "workers": 1,
    "machine": {"device": "cpu", "compile": False, "log_every": 5},
    "corpus": toy.CORPUS,
    "studies": {"toy": toy.STUDY},
    "measure": toy.MEASURE,
}


def one_line(error) -> str:
    told = str(error.value)
    assert told and "\n" not in told and "Traceback" not in told
    return told


# --- params.yaml, through the command line


def changed(path: str, value: object) -> str:
    """params.yaml with the key at ``path`` (dots between) set to ``value``."""
    data = copy.deepcopy(PARAMS)
    *way, last = path.split(".")
    at = data
    for part in way:
        at = at[int(part) if isinstance(at, list) else part]
    at[int(last) if isinstance(at, list) else last] = value
    out = io.StringIO()
    YAML().dump(data, out)
    return out.getvalue()


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("wrokers", 2, "unknown key 'wrokers'; did you mean 'workers'?"),
        ("studies.toy.seedz", [1], "unknown key 'studies.toy.seedz'; did you mean 'seeds'?"),
        ("studies.toy.members.trunk.peaklr", 0.1, "unknown key 'studies.toy.members.trunk.peaklr'; did you mean 'peak_lr'?"),
        ("measure.quantizers.0.group", 64, "unknown key 'measure.quantizers.0.group'; did you mean 'group_size'?"),
        ("studies.toy.sequences", "four", "key 'studies.toy.sequences': Input should be a valid integer, got 'four'"),
        ("studies.toy.seeds", 0, "key 'studies.toy.seeds': Input should be a valid array, got 0"),
        ("measure.quantizers.0.bits", 1, "key 'measure.quantizers.0.bits': must be 2 to 8, got 1"),
        ("measure.quantizers.0.group_size", 0,
         "key 'measure.quantizers.0.group_size': must be -1 (one group per row) or at least 1, got 0"),
        ("measure.quantizers.0.method", "gtpq", "key 'measure.quantizers.0.method': Input should be 'rtn', 'gptq', 'gptqmodel', "),
        ("measure.precision", "fp16", "key 'measure.precision': Input should be 'auto', 'bf16' or 'fp32', got 'fp16'"),
        ("studies.toy.members.trunk.shape", "triangle",
         "key 'studies.toy.members.trunk.shape': Input should be 'constant', 'wsd', 'cosine' or 'linear', got 'triangle'"),
        ("studies.toy.members.trunk.cooldown", "sqrt",
         "key 'studies.toy.members.trunk.cooldown': Input should be 'linear', '1-sqrt' or 'cosine', got 'sqrt'"),
        ("studies.toy.members.trunk.peak_lr", -0.1, "key 'studies.toy.members.trunk.peak_lr': Input should be greater than 0"),
        ("studies.toy.members.trunk.peak_lr", [0.1, 0], "key 'studies.toy.members.trunk.peak_lr.1': Input should be greater than 0"),
        ("studies.toy.members.trunk.peak_lr", float("nan"), "key 'studies.toy.members.trunk.peak_lr': Input should be a finite"),
        ("studies.toy.members.trunk.peak_lr", float("inf"), "key 'studies.toy.members.trunk.peak_lr': Input should be a finite"),
        ("studies.toy.model.heads", 3, "key 'studies.toy.model': width 16 is not a multiple of heads 3"),
        ("corpus.splits.validation", 0.9, "key 'corpus.splits.validation': Input should be less than 0.5, got 0.9"),
        ("workers", 0, "key 'workers': Input should be greater than or equal to 1, got 0"),
    ],
)  # fmt: skip
def test_params(tmp_path, monkeypatch, capsys, path, value, says):
    monkeypatch.setenv("PTQ_DYNAMICS_ROOT", str(tmp_path))
    (tmp_path / "conf").mkdir()
    (tmp_path / "params.yaml").write_text(changed(path, value))
    with pytest.raises(SystemExit) as stop:
        cli.main(["check"])
    told = capsys.readouterr()
    assert stop.value.code == 2 and told.out == ""
    assert told.err.startswith(f"ptq-dynamics: params.yaml: {says}") and told.err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "says"), [(None, "no such file"), ("workers: [1", "not valid YAML"), ("", "an object, got None")]
)
def test_params_that_are_not_there_or_no_yaml(tmp_path, monkeypatch, capsys, text, says):
    monkeypatch.setenv("PTQ_DYNAMICS_ROOT", str(tmp_path))
    (tmp_path / "conf").mkdir()
    if text is not None:
        (tmp_path / "params.yaml").write_text(text)
    with pytest.raises(SystemExit) as stop:
        cli.main(["check"])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and "params.yaml" in err and says in err and err.count("\n") == 1


def test_good_params_pass(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PTQ_DYNAMICS_ROOT", str(tmp_path))
    (tmp_path / "conf").mkdir()
    (tmp_path / "params.yaml").write_text(changed("workers", 2))
    cli.main(["check"])
    assert "valid" in capsys.readouterr().out


# --- text


def corpus_with(**own):
    first, *rest = toy.CORPUS["sources"]
    return load(CorpusConfig, {**toy.CORPUS, "sources": [{**first, **own}, *rest]}, "params.yaml: corpus")


@pytest.mark.parametrize(
    ("own", "says"),
    [
        ({"files": ["text/nowhere/*.txt"]}, "corpus source 'own': no file matches 'text/nowhere/*.txt'"),
        ({"files": ["text/empty.txt"]}, "corpus source 'own': no paragraph of at least 20 characters"),
        ({"files": ["text/latin.txt"]}, "text/latin.txt: not UTF-8 (byte 4); convert the file to UTF-8"),
    ],
)
def test_text_that_makes_no_corpus(root, own, says):
    (root / "text" / "empty.txt").write_text(" \n\n")
    (root / "text" / "latin.txt").write_bytes("The é river keeps the stone".encode("latin-1"))
    before = (root / "data/corpus/corpus.json").read_bytes()
    with pytest.raises(UserError) as e:
        build(corpus_with(**own))
    assert says in one_line(e)
    assert (root / "data/corpus/corpus.json").read_bytes() == before  # what was built stays
    assert TokenSet.open(paths.corpus(), "train").vocab_size == 300


def one_bit(data: bytes) -> bytes:
    return data[:9] + bytes([data[9] ^ 1]) + data[10:]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-10]), "train.bin: {short} bytes instead of {size}, the file is cut or stale; run"),
        (lambda p: p.write_bytes(one_bit(p.read_bytes())), "train.bin: its contents differ from the SHA-256 in corpus.json; run"),
        (lambda p: p.unlink(), "train.bin: no such file; run the corpus stage again"),
    ],
)  # fmt: skip
def test_a_corrupted_shard_stops_training(root, damage, says):
    shard = root / "data/corpus/train.bin"
    size = shard.stat().st_size
    damage(shard)
    with pytest.raises(UserError) as e:
        pretrain("toy", toy.config(Study, toy.STUDY), toy.MACHINE, 1)
    assert says.format(size=size, short=size - 10) in one_line(e)
    assert not (root / "data/runs").exists()


def test_no_corpus_at_all(tmp_path, monkeypatch):
    monkeypatch.setenv("PTQ_DYNAMICS_ROOT", str(tmp_path))
    with pytest.raises(UserError) as e:
        pretrain("toy", toy.config(Study, toy.STUDY), toy.MACHINE, 1)
    assert "corpus.json: no such file; run the corpus stage again" in one_line(e)


# --- checkpoints and measuring


def trunk(seeds=(0,), **member):
    member = {**toy.STUDY["members"]["trunk"], "tokens": 1280, **member}
    return toy.config(Study, toy.STUDY, seeds=list(seeds), members={"trunk": member}, checkpoint_tokens=640)


def trained(root) -> checkpoints.Checkpoint:
    """A trunk of two checkpoints under ``root``; its last."""
    pretrain("toy", trunk(), toy.MACHINE, 1)
    return trajectory("toy", studies.expand(trunk())[0])[-1]


def test_a_torn_checkpoint_stops_measuring_and_pretrain_mends_it(root):
    point = trained(root)
    weights = point.path / checkpoints.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:1000])
    run = studies.expand(trunk())[0]
    with pytest.raises(UserError) as e:
        trajectory("toy", run)
    assert one_line(e) == f"{weights}: torn or changed checkpoint; delete its folder and run pretrain again"
    assert trained(root).weights_id == point.weights_id


@pytest.mark.parametrize(
    ("section", "change", "says"),
    [
        (
            "calibration",
            {"length": 10**6},
            "at most 0 calibration sequences of 1000000, 8 asked for; ask for",
        ),
        ("calibration", {"sequences": 10**6}, "calibration sequences of 16, 1000000 asked for"),
        (
            "calibration",
            {"set": "c4"},
            "no set 'c4' in this corpus; it has train, validation, calibration-in-domain, calibration",
        ),
        ("evaluation", {"tokens": 10}, "max_tokens 10 is less than one block of 16"),
        ("evaluation", {"length": 10**6}, "too few for one sequence of 1000000"),
        ("evaluation", {"tokens": 10**9}, "evaluation.tokens asks for 1000000000, but set 'validation' has"),
        ("evaluation", {"set": "validaton"}, "no set 'validaton' in this corpus"),
    ],
)
def test_texts_that_cannot_be_measured_with(root, finished_root, section, change, says):
    point = checkpoints.verify(finished_root / "data/runs/toy/trunk-seed0/step-0000060")
    config = toy.config(MeasureConfig, toy.MEASURE, **{section: {**toy.MEASURE[section], **change}})
    with pytest.raises(UserError) as e:
        measure("toy", {"trunk": [point]}, config, paths.corpus(), paths.measurements("toy"), 1)
    assert says in one_line(e) and "trunk/step-0000060" in one_line(e)
    assert not list((root / "data").glob("measurements/toy/rows/*"))


# --- training


@pytest.mark.parametrize("peak_lr", [1e20, 1e30, 1e38])
def test_a_learning_rate_that_diverges(root, peak_lr):
    with pytest.raises(UserError) as e:
        pretrain("toy", trunk(peak_lr=peak_lr, tokens=6400), toy.MACHINE, 1)
    told = one_line(e)
    assert told.startswith("1 of 1 members failed (0 finished and are kept): trunk-seed0: ")
    # the second of five updates that warm up: the first used the initial weights
    assert f"at step 2 with learning rate {peak_lr / 3:.3g}; last good checkpoint: none. " in told
    assert told.endswith("Lower peak_lr or lengthen the warmup")


def test_divergence_leaves_the_other_members(root):
    study = trunk(peak_lr=[0.01, 1e25], tokens=6400)
    with pytest.raises(UserError) as e:
        pretrain("toy", study, toy.MACHINE, 1)
    assert one_line(e).startswith("1 of 2 members failed (1 finished and are kept): trunk-lr1e+25-seed0: ")
    run = next(r for r in studies.expand(study) if "0.01" in r.name)
    assert len(trajectory("toy", run)) == 10


def test_studies_are_refused_before_anything_is_trained(root):
    study = trunk(peak_lr=[0.01, 0.01])
    with pytest.raises(UserError) as e:
        pretrain("toy", study, toy.MACHINE, 1)
    assert one_line(e) == "member 'trunk': peak_lr: 0.01 is listed twice"
    assert not (root / "data/runs").exists()


@contextlib.contextmanager
def file_system(folder, size):
    """A file system of that size at ``folder``; gives a function that makes it larger. Mounting takes root."""
    folder.mkdir()

    def mount(options):
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        return shutil.which("mount") and subprocess.run(command, capture_output=True).returncode == 0

    if not mount(f"size={size}"):
        pytest.skip("may not mount a file system here")
    try:
        yield lambda: mount("remount,size=50m")
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def small_disk(root):
    with file_system(root / "data/runs", "1500k") as grow:
        yield grow


@pytest.mark.parametrize("workers", [1, 2])
def test_no_space_left_in_training(root, small_disk, workers, forked_workers):
    small = trained(root)
    machine = Machine(device="cpu", compile=False, log_every=2, resume_steps=2)
    large = toy.config(Study, toy.STUDY, checkpoint_tokens=128)
    with pytest.raises(UserError) as e:
        pretrain("large", large, machine, workers)
    told = one_line(e)
    assert (
        "no space left on the device; free some and run the same command again (finished work is kept)"
        in told
    )
    assert re.search(r"(trunk-seed\d): .*data/runs/large/\1/", told)  # whichever of two filled it
    assert checkpoints.verify(small.path) == small  # what was there stays
    kept = list((root / "data/runs/large").glob("*/step-*"))
    assert kept and all(checkpoints.is_whole(p) for p in kept)  # and whole
    assert not list((root / "data/runs").rglob(".tmp-*"))
    small_disk()
    pretrain("large", large, machine, workers)
    assert all(checkpoints.is_whole(p) for p in (root / "data/runs/large").glob("*/step-*"))


def test_no_space_left_in_measuring(root, finished_root):
    folder = root / "data/measurements"
    with file_system(folder, "48k"):
        found = {
            n: [checkpoints.verify(p) for p in sorted((finished_root / "data/runs/toy" / n).glob("step-*"))]
            for n in ("trunk-seed0", "trunk-seed1")
        }
        with pytest.raises(UserError) as e:
            measure("toy", found, toy.config(MeasureConfig, toy.MEASURE), paths.corpus(), folder / "toy", 1)
        assert "no space left on the device; free some and run the same command again" in one_line(e)
        assert not list(folder.rglob(".tmp-*"))
