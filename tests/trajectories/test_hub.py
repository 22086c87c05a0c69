"""Hub loading: the real huggingface_hub client against a Hub on loopback, with faults."""

from __future__ import annotations

import hashlib
import json
import time

import pytest
import torch
import transformers
from hub_server import Hub, is_lfs
from safetensors.torch import save_file

from ptq_dynamics.core.errors import UserError
from ptq_dynamics.trajectories import hub
from ptq_dynamics.trajectories.hub import fetch, nearest, needed_files, resolve, step_and_tokens, weights_id

torch.set_num_threads(1)

REPO = "lab/toy"
STEPS = [f"step{1000 * k}-tokens{k}B" for k in range(1, 6)]
TINY = dict(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
ARCHITECTURES = ["GPTNeoX", "Llama", "Olmo2", "SmolLM3", "Apertus"]


@pytest.fixture(autouse=True)
def sleeps(monkeypatch):
    """Waits are recorded, not waited for."""
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    return waited


@pytest.fixture(scope="module")
def published():
    """One server for the module; each test takes a repository of its own."""
    with Hub() as server:
        yield server


@pytest.fixture
def server(published):
    published.repos.clear(), published.faults.clear(), published.log.clear(), published.gated.clear()
    published.cdn = False
    return published


def model_files(seed: int, *, size: int = 50_000) -> dict[str, bytes]:
    """A revision as the Hub holds it: weights, config, tokenizer, and much that loading does not need."""
    g = torch.Generator().manual_seed(seed)
    weights = torch.randint(0, 255, (size,), generator=g, dtype=torch.uint8).numpy().tobytes()
    return {
        "config.json": json.dumps({"model_type": "gpt_neox"}).encode(),
        "model.safetensors": weights,
        "pytorch_model.bin": b"\0" * 4096,
        "optimizer.pt": b"\0" * 4096,
        "tokenizer.json": b"{}",
        "README.md": b"# toy",
        ".gitattributes": b"*.bin lfs",
        "onnx/model.safetensors": b"\0" * 4096,
        "modeling_toy.py": b"raise SystemExit",
    }


def publish(server: Hub, names=STEPS) -> None:
    for k, name in enumerate(names):
        server.publish(REPO, name, model_files(k))


def run(server, tmp_path, names, *, plan=None, **options):
    """Fetch; returns {revision: weights as loaded}, [skipped]."""
    skipped = []
    plan = plan or resolve(REPO, names, endpoint=server.url, cache=tmp_path)
    got = {}
    for revision, folder in fetch(plan, progress=False, report=skipped.append, say=lambda _: None, **options):
        got[revision.name] = (folder / "model.safetensors").read_bytes()
    return got, skipped


def test_six_revisions_one_missing_one_torn_one_rate_limited(server, tmp_path, sleeps):
    publish(server)
    commits = server.repos[REPO]
    server.fail(rf"GET .*{commits[STEPS[1]]}/model.safetensors", cut_at=20_000)
    server.fail(
        rf"GET .*{commits[STEPS[3]]}/model.safetensors", status=429, times=2, headers={"Retry-After": "7"}
    )

    got, skipped = run(server, tmp_path, [*STEPS[:2], "step2500-tokens2B", *STEPS[2:]])

    assert list(got) == STEPS
    assert all(got[name] == model_files(k)["model.safetensors"] for k, name in enumerate(STEPS))
    assert [s.name for s in skipped] == ["step2500-tokens2B"]
    assert "no such revision" in skipped[0].reason and "step2000-tokens2B" in skipped[0].reason
    assert server.sent("model.safetensors") == 5 * 50_000  # no byte twice, although one body was cut
    assert [r.start for r in server.bodies("model.safetensors")] == [0, 0, 20_000, 0, 0, 0]
    assert sum(w >= 7 for w in sleeps) == 2
    per_file = [r.path for r in server.bodies() if r.start == 0]
    assert len(per_file) == len(set(per_file))
    before = len(server.bodies())
    again, _ = run(server, tmp_path, STEPS)
    assert again == got and len(server.bodies()) == before


def test_names_are_checked_and_sizes_told_before_anything_is_downloaded(server, tmp_path):
    publish(server)
    plan = resolve(REPO, ["stepp1000", *STEPS[:2]], endpoint=server.url, cache=tmp_path, tokenizer=True)
    assert not server.bodies()
    assert [s.name for s in plan.skipped] == ["stepp1000"]
    one = 50_000 + len(model_files(0)["config.json"]) + len(b"{}")
    assert (plan.disk_need(), plan.disk_need(delete_after=True)) == (2 * one, one)
    assert "2 revisions (1 skipped)" in plan.describe() and "0.1 MB to download" in plan.describe()
    with pytest.raises(UserError, match="no usable revision.*nearest is 'step1000-tokens1B'") as e:
        resolve(REPO, ["step999-tokens1B"], endpoint=server.url, cache=tmp_path)
    assert "\n" not in str(e.value)
    assert [r.name for r in resolve(REPO, endpoint=server.url, cache=tmp_path).revisions] == STEPS


def test_only_needed_files_are_downloaded(server, tmp_path):
    publish(server, STEPS[:1])
    run(server, tmp_path, STEPS[:1])
    assert {r.path.split("/")[-1] for r in server.bodies()} == {"config.json", "model.safetensors"}


def test_shards_follow_the_index(server, tmp_path):
    files = model_files(0)
    del files["model.safetensors"]
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    shards = {name: bytes([k]) * 3000 for k, name in enumerate(index["weight_map"].values())}
    server.publish(
        REPO, "whole", {**files, **shards, "model.safetensors.index.json": json.dumps(index).encode()}
    )
    del shards["model-00002-of-00002.safetensors"]
    server.publish(
        REPO, "torn", {**files, **shards, "model.safetensors.index.json": json.dumps(index).encode()}
    )
    plan = resolve(REPO, ["whole", "torn"], endpoint=server.url, cache=tmp_path)
    assert str(plan.skipped[0]) == "skipped torn: holds 1 of 2 shards of model.safetensors.index.json"
    ((_, folder),) = fetch(plan, progress=False, report=lambda s: None, say=lambda s: None)
    assert (folder / "model-00002-of-00002.safetensors").read_bytes() == b"\1" * 3000


@pytest.mark.parametrize("cdn", [False, True])
def test_a_later_process_goes_on_where_a_broken_download_stopped(server, tmp_path, cdn):
    server.cdn = cdn
    publish(server, STEPS[:2])
    # the first attempt is cut, and so is the way back: the revision fails with 12,345 bytes on disk
    weights = r"GET /cdn/" if cdn else rf"GET .*{server.repos[REPO][STEPS[0]]}/model.safetensors"
    server.fail(weights, cut_at=12_345)
    server.fail(weights, status=403)
    got, skipped = run(server, tmp_path, STEPS[:2])
    assert list(got) == STEPS[1:2] and skipped[0].name == STEPS[0] and "403" in skipped[0].reason
    got, skipped = run(server, tmp_path, STEPS[:2])
    assert got[STEPS[0]] == model_files(0)["model.safetensors"] and not skipped
    large = server.bodies() if cdn else server.bodies("model.safetensors")
    assert [r.start for r in large if r.sent > 1000] == [0, 0, 12_345]
    assert sum(r.sent for r in large if r.sent > 1000) == 100_000


def test_a_line_that_breaks_often_but_moves_on_gets_there(server, tmp_path):
    publish(server, STEPS[:1])
    server.fail("GET .*model.safetensors", cut_at=4_000, times=9)
    got, skipped = run(server, tmp_path, STEPS[:1])
    assert got[STEPS[0]] == model_files(0)["model.safetensors"] and not skipped
    assert [r.start for r in server.bodies("model.safetensors")] == [4_000 * k for k in range(10)]


def test_the_hubs_own_rate_limit_header_is_obeyed(server, tmp_path, sleeps):
    publish(server, STEPS[:1])
    server.fail("GET .*/refs", status=429, headers={"RateLimit": '"api";r=0;t=41'})
    resolve(REPO, STEPS[:1], endpoint=server.url, cache=tmp_path)
    assert sleeps == [42]
    server.fail("GET .*/refs", status=429, headers={"Retry-After": "86400"})
    with pytest.raises(UserError, match="429"):
        resolve(REPO, STEPS[:1], endpoint=server.url, cache=tmp_path)


def test_wrong_bytes_are_found_by_their_hash_and_fetched_anew(server, tmp_path):
    publish(server, STEPS[:1])
    plan = resolve(REPO, STEPS[:1], endpoint=server.url, cache=tmp_path)
    (weights,) = [f for f in plan.revisions[0].files if f.sha256]
    part = tmp_path / "models--lab--toy" / "blobs" / f"{weights.sha256}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * weights.size)
    got, _ = run(server, tmp_path, None, plan=plan)
    assert got[STEPS[0]] == model_files(0)["model.safetensors"]


@pytest.mark.parametrize(
    "where", ["GET .*/refs", "GET .*/tree/", "HEAD .*config.json", "GET .*config.json", "GET .*safetensors"]
)
@pytest.mark.parametrize("status", [429, 503])
def test_every_request_survives_two_transient_faults(server, tmp_path, where, status, sleeps):
    publish(server, STEPS[:1])
    server.fail(where, status=status, times=2, headers={"Retry-After": "11"})
    got, skipped = run(server, tmp_path, STEPS[:1])
    assert list(got) == STEPS[:1] and not skipped
    assert sleeps and any(w >= 11 for w in sleeps)


def test_one_dead_revision_does_not_stop_the_rest(server, tmp_path):
    publish(server, STEPS[:3])
    server.fail(rf"GET .*{server.repos[REPO][STEPS[1]]}/model.safetensors", status=500, times=1000)
    got, skipped = run(server, tmp_path, STEPS[:3])
    assert list(got) == [STEPS[0], STEPS[2]]
    assert [s.name for s in skipped] == [STEPS[1]] and "500" in skipped[0].reason
    assert "\n" not in str(skipped[0])


def test_delete_after_frees_what_was_downloaded_and_keeps_what_was_there(server, tmp_path):
    publish(server, STEPS[:3])
    run(server, tmp_path, STEPS[:1])
    plan = resolve(REPO, STEPS[:3], endpoint=server.url, cache=tmp_path)
    seen = []
    for _, folder in fetch(plan, delete_after=True, progress=False, say=lambda s: None):
        assert (folder / "model.safetensors").exists()
        assert [f.exists() for f in seen[1:]] == [False] * len(seen[1:])
        seen.append(folder)
    assert [f.exists() for f in seen] == [True, False, False]
    blobs = [p for p in (tmp_path / "models--lab--toy" / "blobs").iterdir() if p.stat().st_size == 50_000]
    assert len(blobs) == 1


def test_offline_work_from_the_cache(server, tmp_path):
    publish(server, STEPS[:3])
    online, _ = run(server, tmp_path, STEPS[:2])
    before = len(server.log)
    plan = resolve(REPO, STEPS[:3], cache=tmp_path, endpoint=server.url, offline=True)
    assert [s.name for s in plan.skipped] == [STEPS[2]] and "in the cache" in plan.skipped[0].reason
    got, _ = run(server, tmp_path, None, plan=plan)
    assert got == online and len(server.log) == before
    with pytest.raises(UserError, match="lab/other: nothing of it in .*run once online"):
        resolve("lab/other", ["a"], cache=tmp_path, offline=True)


def test_gated_missing_and_unreachable_repositories_are_told_in_one_line(server, tmp_path):
    publish(server, STEPS[:1])
    with pytest.raises(UserError, match="lab/none: no such model on .*log in") as missing:
        resolve("lab/none", STEPS, endpoint=server.url, cache=tmp_path)
    server.gated.add(REPO)
    with pytest.raises(UserError, match="lab/toy: gated; accept its terms on .*/lab/toy") as gated:
        run(server, tmp_path, STEPS[:1])
    with pytest.raises(
        UserError, match="cannot list its revisions on http://127.0.0.1:9 .*HF_HUB_OFFLINE"
    ) as dead:
        resolve(REPO, STEPS, endpoint="http://127.0.0.1:9", cache=tmp_path)
    with pytest.raises(UserError, match="a/b/c: not a repository name"):
        resolve("a/b/c", STEPS, endpoint=server.url, cache=tmp_path)
    assert not any("\n" in str(e.value) for e in (missing, gated, dead))


def test_code_of_a_repository_is_not_trusted_by_default(server, tmp_path):
    config = {"model_type": "opensci", "auto_map": {"AutoModelForCausalLM": "modeling_toy.Toy"}}
    server.publish(REPO, "iter_0001000", {**model_files(0), "config.json": json.dumps(config).encode()})
    with pytest.raises(UserError, match="'opensci' needs the repository's own code"):
        run(server, tmp_path, ["iter_0001000"])
    assert not server.bodies("model.safetensors") and not server.bodies(".py")
    plan = resolve(REPO, ["iter_0001000"], endpoint=server.url, cache=tmp_path, remote_code=True)
    got, _ = run(server, tmp_path, None, plan=plan)
    assert list(got) == ["iter_0001000"] and server.bodies("modeling_toy.py")


def test_a_disk_too_small_is_told_before_the_download(server, tmp_path, monkeypatch):
    publish(server, STEPS[:3])
    monkeypatch.setattr(hub, "_free", lambda folder: 60_000)
    with pytest.raises(UserError, match=r"needs 0\.2 MB.*0\.1 MB are free; delete each after use"):
        run(server, tmp_path, STEPS[:3])
    assert not server.bodies()
    got, _ = run(server, tmp_path, STEPS[:3], delete_after=True)
    assert list(got) == STEPS[:3]


def tiny(architecture: str, seed: int) -> transformers.PreTrainedModel:
    config = getattr(transformers, f"{architecture}Config")(**TINY)
    torch.manual_seed(seed)
    return getattr(transformers, f"{architecture}ForCausalLM")(config).eval()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_revisions_of_each_architecture_load_as_published(server, tmp_path, architecture):
    models = {name: tiny(architecture, seed) for seed, name in enumerate(["step1", "step2"])}
    for k, (name, model) in enumerate(models.items()):
        # the second one in shards, as large models are
        model.save_pretrained(tmp_path / name, max_shard_size="4KB" if k else "1GB")
        server.publish(REPO, name, tmp_path / name)
    plan = resolve(REPO, ["step1", "step2"], endpoint=server.url, cache=tmp_path / "cache")
    ids = torch.arange(24).reshape(2, 12)
    loss = {}
    for revision, folder in fetch(plan, progress=False, say=lambda s: None):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            assert torch.equal(loaded(ids).logits, models[revision.name](ids).logits)
            loss[revision.name] = loaded(ids, labels=ids).loss.item()
    assert loss["step1"] != loss["step2"]


def test_weights_are_named_by_their_bytes_wherever_they_lie(server, tmp_path):
    publish(server, STEPS[:1])
    plan = resolve(REPO, STEPS[:1], endpoint=server.url, cache=tmp_path)
    ((_, folder),) = fetch(plan, progress=False, say=lambda s: None)
    weights = model_files(0)["model.safetensors"]
    assert weights_id(folder) == hashlib.sha256(weights).hexdigest()
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text("{}")
    (plain / "model.safetensors").write_bytes(weights)
    assert weights_id(plain) == weights_id(folder)


def test_needed_files_prefer_safetensors_and_take_one_format():
    both = ["config.json", "model.safetensors", "pytorch_model.bin", "tokenizer.json", "a/config.json"]
    assert needed_files(both) == ["config.json", "model.safetensors"]
    assert needed_files(both, tokenizer=True)[-1] == "tokenizer.json"
    pickles = ["config.json", "pytorch_model.bin.index.json"]
    pickles += [f"pytorch_model-0000{k}-of-00002.bin" for k in (1, 2)]
    assert needed_files(pickles) == pickles
    with pytest.raises(ValueError, match="no config.json"):
        needed_files(["model.safetensors"])
    with pytest.raises(ValueError, match="no weights"):
        needed_files(["config.json", "README.md"])


def test_nearest_goes_by_the_numbers_of_a_name():
    known = ["main", "stage1-step9000-tokens19B", "stage1-step40000-tokens84B", "stage2-step40000-tokens9B"]
    assert nearest("stage1-step39000-tokens82B", known) == "stage1-step40000-tokens84B"
    assert nearest("mian", known) == "main"
    assert nearest("xyz", known) is None


def test_steps_and_tokens_are_read_from_names():
    assert step_and_tokens("stage1-step40000-tokens84B") == (40000, 84 * 10**9)
    assert step_and_tokens("step2627139-tokens15T") == (2627139, 15 * 10**12)
    assert step_and_tokens("lc-4k-to-32k-step-4000") == (4000, None)
    assert step_and_tokens("iter_0058000") == (58000, None)
    assert step_and_tokens("main") == (None, None)


def test_the_server_marks_only_large_weights_as_lfs(tmp_path):
    save_file({"a": torch.zeros(1000)}, tmp_path / "m.safetensors")
    assert is_lfs("m.safetensors", (tmp_path / "m.safetensors").read_bytes())
    assert not is_lfs("config.json", b"x" * 9999)
