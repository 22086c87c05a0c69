"""Checkpoints of a Hugging Face repository, revision by revision.

    plan = resolve("EleutherAI/pythia-70m", ["step1000", "step143000"])
    print(plan.describe())
    for revision, folder in fetch(plan, delete_after=True):
        model = AutoModelForCausalLM.from_pretrained(folder)

Files go to the client's own cache, so what is there already is not fetched again. huggingface_hub retries
listings (408, 429, 5xx, Retry-After) and, for small files, what it needs to. Large files are streamed here,
because the client (2.4) drops up to 10 MB of a body that is cut, deletes its partial file when a call fails, so
that a later process starts anew, does not retry 5xx on bodies, and checks sizes but not SHA-256. It does not
retry the list of refs either.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import json
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import huggingface_hub
from filelock import FileLock
from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url, scan_cache_dir
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status
from tqdm import tqdm

from ..core.errors import UserError
from ..core.files import sha256_file

T = TypeVar("T")

_RETRIED = (408, 429, 500, 502, 503, 504)
_HTTP_ERROR = HfHubHTTPError.__bases__[0]  # HTTPError of whichever httpx the client is built on
_LONGEST_WAIT = 600.0  # s; a server that asks for more is not waited for
_RESET = re.compile(r"t=\d+")  # of the Hub's RateLimit header: "api";r=0;t=55
_COMMIT = re.compile(r"[0-9a-f]{40}")

# in the order in which transformers looks for them: one file, its sharded form, then pickles
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
TOKENIZER_FILES = re.compile(
    r"tokenizer\.json|tokenizer\.model|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.json|vocab\.txt|merges\.txt|chat_template\.(jinja|json)"
)


@dataclass(frozen=True)
class File:
    path: str
    size: int  # bytes
    sha256: str | None  # of large (LFS) files
    cached: bool


@dataclass(frozen=True)
class Revision:
    """A revision that exists, with the files that will be loaded."""

    name: str
    commit: str
    files: tuple[File, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(f.size for f in self.files)

    @property
    def to_download(self) -> int:
        """Bytes that are not in the cache yet."""
        return sum(f.size for f in self.files if not f.cached)


@dataclass(frozen=True)
class Skipped:
    """A revision that was left out, and why; ``str()`` of it is one line."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"skipped {self.name}: {self.reason}"


@dataclass(frozen=True)
class Plan:
    """What ``fetch`` will do."""

    repo: str
    revisions: tuple[Revision, ...]
    skipped: tuple[Skipped, ...]
    cache: Path
    endpoint: str
    offline: bool
    remote_code: bool
    token: str | None = field(default=None, repr=False)

    def disk_need(self, delete_after: bool = False) -> int:
        """Bytes that the disk must have free: one revision's, if each is deleted after use, else all."""
        needs = [r.to_download for r in self.revisions] or [0]
        return max(needs) if delete_after else sum(needs)

    def describe(self, delete_after: bool = False) -> str:
        """One line: how many revisions, how much to download, how much disk."""
        total = sum(r.to_download for r in self.revisions)
        return (
            f"{self.repo}: {len(self.revisions)} revisions ({len(self.skipped)} skipped), {_gb(total)} to download, "
            f"{_gb(self.disk_need(delete_after))} of disk needed in {self.cache} ({_gb(_free(self.cache))} free)"
        )


def resolve(
    repo: str,
    revisions: Sequence[str] | None = None,
    *,
    tokenizer: bool = False,
    remote_code: bool = False,
    endpoint: str | None = None,
    cache: Path | None = None,
    offline: bool | None = None,
    token: str | None = None,
    refs: Mapping[str, str] | None = None,
) -> Plan:
    """Check revision names against the repository's refs and list what would be downloaded. Downloads nothing.

    Args:
        repo: ``owner/name``.
        revisions: branch or tag names or full commit hashes; None takes every branch.
        tokenizer: list the tokenizer's files too.
        remote_code: the repository's Python files may be fetched and used; only for families that say why.
        endpoint: URL of the Hub (default: ``HF_ENDPOINT`` or the public one).
        cache: folder (default: ``HF_HUB_CACHE``, the one shared with transformers).
        offline: use the cache only (default: ``HF_HUB_OFFLINE``).
        refs: from ``list_refs``, if asked for already.

    A revision that does not exist, or holds no weights, is in ``plan.skipped`` with the nearest name.

    Raises:
        UserError: repository missing, gated or unreachable, or none of the revisions usable.
    """
    cache, offline, endpoint = _where(cache, offline, endpoint)
    api = HfApi(endpoint=endpoint, token=token)
    refs = refs or list_refs(repo, endpoint=endpoint, cache=cache, offline=offline, token=token)
    names = sorted(refs, key=_natural) if revisions is None else list(dict.fromkeys(revisions))

    found, skipped = [], []
    for name in names:
        commit = refs.get(name) or (name if _COMMIT.fullmatch(name) else None)
        if commit is None:
            near = nearest(name, refs)
            where = f"the cache of {repo}" if offline else repo
            skipped.append(
                Skipped(name, f"no such revision in {where}" + (f"; nearest is '{near}'" if near else ""))
            )
            continue
        try:
            listed = (
                _cached_files(cache, repo, commit) if offline else _remote_files(api, cache, repo, commit)
            )
            keep = needed_files([f.path for f in listed], tokenizer=tokenizer, remote_code=remote_code)
            found.append(Revision(name, commit, tuple(f for f in listed if f.path in keep)))
        except (UserError, ValueError) as e:
            skipped.append(Skipped(name, f"{e}; run once online" if offline else str(e)))
        except (HfHubHTTPError, _HTTP_ERROR, OSError) as e:
            _raise_if_hopeless(e, repo, endpoint)
            skipped.append(Skipped(name, _one_line(e)))
    if not found:
        told = (
            f" ({skipped[0]}{f', and {len(skipped) - 1} more' if len(skipped) > 1 else ''})"
            if skipped
            else ""
        )
        raise UserError(f"{repo}: no usable revision{told}; name others")
    return Plan(repo, tuple(found), tuple(skipped), cache, endpoint, offline, remote_code, token)


def list_refs(
    repo: str,
    *,
    endpoint: str | None = None,
    cache: Path | None = None,
    offline: bool | None = None,
    token: str | None = None,
) -> dict[str, str]:
    """Branches and tags of a repository to commits (offline: those in the cache). Arguments as in ``resolve``.

    Raises:
        UserError: repository missing, gated or unreachable.
    """
    cache, offline, endpoint = _where(cache, offline, endpoint)
    return _cached_refs(cache, repo) if offline else _remote_refs(HfApi(endpoint=endpoint, token=token), repo)


def fetch_tokenizer(plan: Plan, repo: str) -> Path:
    """The tokenizer of another repository than the plan's (its main branch), as a folder in the same cache.

    Raises:
        UserError: no such repository, or it holds no tokenizer.
    """
    where = {"endpoint": plan.endpoint, "cache": plan.cache, "offline": plan.offline, "token": plan.token}
    refs = list_refs(repo, **where)
    commit = refs.get("main") or next(iter(refs.values()))
    api = HfApi(endpoint=plan.endpoint, token=plan.token)
    try:
        listed = (
            _cached_files(plan.cache, repo, commit)
            if plan.offline
            else _remote_files(api, plan.cache, repo, commit)
        )
        files = [f.path for f in listed if TOKENIZER_FILES.fullmatch(f.path)]
        if not files:
            raise UserError(f"{repo}: holds no tokenizer; name another repository")
        for path in files if not plan.offline else ():
            _retry(
                lambda path=path: hf_hub_download(
                    repo, path, revision=commit, cache_dir=plan.cache, endpoint=plan.endpoint,
                    token=plan.token, tqdm_class=_Quiet,
                ),
                tries=3,
            )  # fmt: skip
    except (HfHubHTTPError, _HTTP_ERROR, OSError) as e:
        _raise_if_hopeless(e, repo, plan.endpoint)
        raise UserError(f"{repo}: its tokenizer cannot be fetched ({_one_line(e)}); try again later") from e
    return _folder(plan.cache, repo) / "snapshots" / commit


def fetch(
    plan: Plan,
    *,
    delete_after: bool = False,
    progress: bool = True,
    report: Callable[[Skipped], None] | None = None,
    say: Callable[[str], None] | None = None,
    workers: int = 4,
) -> Iterator[tuple[Revision, Path]]:
    """Download the plan's revisions one by one and yield each with its folder.

    A revision that fails is reported and skipped, the rest goes on.

    Args:
        delete_after: remove each revision from the cache when the next one is asked for, unless it was there before.
        progress: show one bar over all bytes (on a terminal).
        report: called with every skipped revision, those of the plan first (default: a line on stderr).
        say: called with the plan's one-line description before anything is downloaded (default: stderr).
        workers: files downloaded at once.

    Raises:
        UserError: the disk is too small or fills up, the repository is gated or gone, or no revision came through.
    """
    report = report or (lambda s: print(s, file=sys.stderr))
    say = say or (lambda line: print(line, file=sys.stderr))
    for s in plan.skipped:
        report(s)
    say(plan.describe(delete_after))
    _check_disk(plan, delete_after)

    done, last = 0, None
    total = sum(r.to_download for r in plan.revisions)
    with tqdm(total=total, unit="B", unit_scale=True, disable=None if progress else True) as bar:
        for number, revision in enumerate(plan.revisions, 1):
            bar.set_description(f"{number}/{len(plan.revisions)} {revision.name}")
            try:
                folder = _download(plan, revision, bar, workers)
            except UserError as e:
                last = Skipped(revision.name, str(e))
            except OSError as e:  # HfHubHTTPError is one
                _raise_if_hopeless(e, plan.repo, plan.endpoint)
                last = Skipped(revision.name, _one_line(e))
            except _HTTP_ERROR as e:
                last = Skipped(revision.name, _one_line(e))
            else:
                done += 1
                was_there = revision.to_download == 0
                try:
                    yield revision, folder
                finally:
                    if delete_after and not was_there and not plan.offline:
                        scan_cache_dir(plan.cache).delete_revisions(revision.commit).execute()
                continue
            report(last)
    if not done:
        raise UserError(f"{plan.repo}: no revision came through ({last})")


def forget(plan: Plan) -> None:
    """Delete the plan's revisions from the cache, save those that were there when it was made."""
    ours = {r.commit for r in plan.revisions if r.to_download}
    cached = {r.commit_hash for repo in scan_cache_dir(plan.cache).repos for r in repo.revisions}
    if ours & cached and not plan.offline:
        scan_cache_dir(plan.cache).delete_revisions(*(ours & cached)).execute()


def needed_files(paths: Iterable[str], *, tokenizer: bool = False, remote_code: bool = False) -> list[str]:
    """The files of a repository that loading it takes: weights in one format only, config, tokenizer if asked.

    Raises:
        ValueError: no config.json, no weights, or an incomplete set of shards.
    """
    top = sorted(p for p in paths if "/" not in p)
    if "config.json" not in top:
        raise ValueError("holds no config.json")
    kind = next((w for w in _WEIGHTS if w in top), None)
    if kind is None:
        raise ValueError("holds no weights (model.safetensors or pytorch_model.bin)")
    # checkpoint.json: a few bytes that say where on its run one of our own checkpoints lies
    keep = ["config.json", kind] + [p for p in ("generation_config.json", "checkpoint.json") if p in top]
    if kind.endswith(".index.json"):
        stem, suffix = kind.removesuffix(".index.json").rsplit(".", 1)
        shard = re.compile(rf"{stem}-(\d+)-of-(\d+)\.{suffix}")
        shards = [(p, m) for p in top if (m := shard.fullmatch(p))]
        total = int(shards[0][1][2]) if shards else None
        if len(shards) != total:
            raise ValueError(f"holds {len(shards)} of {total or 'the'} shards of {kind}")
        keep += [p for p, _ in shards]
    if tokenizer:
        keep += [p for p in top if TOKENIZER_FILES.fullmatch(p)]
    if remote_code:
        keep += [p for p in top if p.endswith(".py")]
    return keep


def weights_id(folder: Path) -> str:
    """What names the weights in ``folder``: SHA-256 of the one weight file, or over those of all shards in order.

    Files in the Hub's cache are named by their SHA-256 already, so they are not read.
    """
    names = needed_files(p.name for p in folder.iterdir())
    hashes = []
    for name in sorted(n for n in names if n.endswith((".safetensors", ".bin"))):
        real = (folder / name).resolve()
        hashes.append(real.name if re.fullmatch(r"[0-9a-f]{64}", real.name) else sha256_file(real))
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like ``name``: same words and the nearest numbers, else the most similar text."""
    known = list(known)
    alike = [k for k in known if _words(k) == _words(name)]
    if alike:
        want = _numbers(name)
        return min(alike, key=lambda k: [abs(a - b) for a, b in zip(_numbers(k), want, strict=True)])
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.4)), None)


def step_and_tokens(name: str) -> tuple[int | None, int | None]:
    """Step and tokens that a revision name states, as in ``step1000-tokens84B`` or ``iter_0001000``; None if it does not."""
    step = re.search(r"(?:step|iter|iteration|ckpt|checkpoint)[-_]?(?:step[-_]?)?(\d+)", name, re.IGNORECASE)
    tokens = re.search(r"tokens?[-_]?(\d+(?:\.\d+)?)([MBT])", name, re.IGNORECASE)
    unit = {"M": 10**6, "B": 10**9, "T": 10**12}
    return (
        int(step[1]) if step else None,
        round(float(tokens[1]) * unit[tokens[2].upper()]) if tokens else None,
    )


# --- what is there ---


def _where(cache: Path | None, offline: bool | None, endpoint: str | None) -> tuple[Path, bool, str]:
    """The client's defaults for what is not given."""
    return (
        Path(cache or constants.HF_HUB_CACHE).expanduser().resolve(),
        constants.HF_HUB_OFFLINE if offline is None else offline,
        (endpoint or constants.ENDPOINT).rstrip("/"),
    )


def _remote_refs(api: HfApi, repo: str) -> dict[str, str]:
    """Branch and tag names to commits."""
    try:
        refs = _retry(lambda: api.list_repo_refs(repo))
    except (HfHubHTTPError, HFValidationError, _HTTP_ERROR, OSError) as e:
        _raise_if_hopeless(e, repo, api.endpoint)
        raise UserError(
            f"{repo}: cannot list its revisions on {api.endpoint} ({_one_line(e)}); check the network, "
            "or set HF_HUB_OFFLINE=1 to work from the cache"
        ) from e
    return {r.name: r.target_commit for r in [*refs.tags, *refs.branches]}


def _remote_files(api: HfApi, cache: Path, repo: str, commit: str) -> list[File]:
    tree = _retry(lambda: list(api.list_repo_tree(repo, revision=commit)))
    snapshot = _folder(cache, repo) / "snapshots" / commit
    return [
        File(f.path, f.size, f.lfs.sha256 if f.lfs else None, (snapshot / f.path).exists())
        for f in tree
        if isinstance(f, RepoFile)
    ]


def _cached_refs(cache: Path, repo: str) -> dict[str, str]:
    base = _folder(cache, repo) / "refs"
    refs = {p.relative_to(base).as_posix(): p.read_text().strip() for p in base.rglob("*") if p.is_file()}
    if not refs:
        raise UserError(
            f"{repo}: nothing of it in {cache}, and the network is not to be used; run once online"
        )
    return refs


def _cached_files(cache: Path, repo: str, commit: str) -> list[File]:
    snapshot = _folder(cache, repo) / "snapshots" / commit
    paths = [p for p in snapshot.rglob("*") if p.is_file()]
    if not paths:
        raise UserError("not in the cache")
    return [File(p.relative_to(snapshot).as_posix(), p.stat().st_size, None, True) for p in paths]


def _folder(cache: Path, repo: str) -> Path:
    return cache / repo_folder_name(repo_id=repo, repo_type="model")


# --- downloading ---


def _download(plan: Plan, revision: Revision, bar: tqdm, workers: int) -> Path:
    """All files of a revision into the cache; returns its snapshot folder.

    Small files come first: a model that cannot be loaded is found out before its weights are downloaded.
    """
    snapshot = _folder(plan.cache, plan.repo) / "snapshots" / revision.commit
    if plan.offline:
        _check_config(plan, snapshot / "config.json")
        _check_index(snapshot)
        return snapshot

    lock, stop = threading.Lock(), threading.Event()

    def advance(n: int) -> None:
        if stop.is_set():  # Ctrl-C, or another file failed: what arrived so far stays for the next attempt
            raise InterruptedError("stopped")
        with lock:
            bar.update(n)

    large = [f for f in revision.files if f.sha256 and f.path != "config.json"]
    for f in revision.files:
        if f not in large:
            _hub_file(plan, f.path, revision.commit)
            advance(0 if f.cached else f.size)
    _check_config(plan, snapshot / "config.json")
    with ThreadPoolExecutor(workers) as pool:
        try:
            list(pool.map(lambda f: _large_file(plan, revision, f, advance), large))
        except BaseException:
            stop.set()
            raise
    if revision.name != revision.commit:
        _hub_file(plan, "config.json", revision.name)  # by name: writes the ref that offline work goes by
    _check_index(snapshot)
    return snapshot


def _hub_file(plan: Plan, path: str, revision: str) -> None:
    """One file by the client's own means; it asks nothing of the network if the commit's file is cached."""

    def call() -> str:
        return hf_hub_download(
            plan.repo,
            path,
            revision=revision,
            cache_dir=plan.cache,
            endpoint=plan.endpoint,
            token=plan.token,
            tqdm_class=_Quiet,
        )

    _retry(call, tries=3)  # the client has tried several times itself


def _large_file(plan: Plan, revision: Revision, file: File, advance: Callable[[int], None]) -> None:
    """Fetch one LFS file as the cache's blob, going on where an earlier attempt or process was cut off."""
    if file.cached:
        return
    folder = _folder(plan.cache, plan.repo)
    blob = folder / "blobs" / file.sha256
    part = blob.with_suffix(".part")
    lock = plan.cache / ".locks" / folder.name / f"{file.sha256}.part.lock"
    for parent in (blob.parent, lock.parent):
        parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):
        if blob.exists():  # another revision has the same file
            advance(file.size)
        else:
            advance(_size(part))
            _retry(lambda: _resume(plan, revision, file, part, advance), progress=lambda: _size(part))
            part.replace(blob)
    _hub_file(plan, file.path, revision.commit)  # links the blob into the snapshot


def _resume(plan: Plan, revision: Revision, file: File, part: Path, advance: Callable[[int], None]) -> None:
    url = hf_hub_url(plan.repo, file.path, revision=revision.commit, endpoint=plan.endpoint)
    headers = {**build_hf_headers(token=plan.token), "Accept-Encoding": "identity"}
    with open(part, "ab") as f:
        start = f.tell()
        if start < file.size:
            if start:
                headers["Range"] = f"bytes={start}-"
            timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
            with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
                hf_raise_for_status(response)
                if start and response.status_code != 206:  # the server does not do ranges
                    f.truncate(0)
                    advance(-start)
                for chunk in response.iter_bytes():
                    f.write(chunk)
                    advance(len(chunk))
    size = part.stat().st_size
    if size < file.size:
        raise _TornError(f"{file.path}: ended after {size} of {file.size} bytes")
    if size > file.size or sha256_file(part) != file.sha256:
        part.unlink()
        advance(-size)
        raise _TornError(f"{file.path}: the downloaded bytes do not match the file's SHA-256")


class _TornError(OSError):
    """A body that arrived whole but wrong; worth another try."""


class _Quiet(huggingface_hub.utils.tqdm):
    """The client's bars of single files, not drawn: ours shows all bytes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})


def _check_config(plan: Plan, path: Path) -> None:
    """Refuse a model that only its repository's own code could load, unless that code is trusted."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = json.loads(path.read_text(encoding="utf-8"))
    if "auto_map" in config and config.get("model_type") not in CONFIG_MAPPING and not plan.remote_code:
        raise UserError(
            f"'{config.get('model_type')}' needs the repository's own code, which is not trusted unless the family "
            "says why (remote_code)"
        )


def _check_index(snapshot: Path) -> None:
    """Every file that the weight index names must be there."""
    for index in snapshot.glob("*.index.json"):
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if missing := sorted(n for n in names if not (snapshot / n).exists()):
            raise UserError(f"{index.name} names '{missing[0]}', which is not among the downloaded files")


def _retry(call: Callable[[], T], tries: int = 5, progress: Callable[[], int] = lambda: 0) -> T:
    """``call()``, again after transient faults: waits as long as the server asks, else 1, 2, 4, … s.

    A try that moved ``progress()`` forward does not count against ``tries``.
    """
    attempt, reached = 0, progress()
    while True:
        try:
            return call()
        except (OSError, _HTTP_ERROR) as e:
            now = progress()
            attempt, reached = (0, now) if now > reached else (attempt, reached)
            wait = _wait(e, attempt)
            if wait is None or attempt == tries - 1:
                raise
        time.sleep(wait)
        attempt += 1


def _wait(e: BaseException, attempt: int) -> float | None:
    """Seconds to wait before the next try; None if another would not help."""
    if isinstance(e, HfHubHTTPError):
        if e.response.status_code not in _RETRIED:
            return None
        headers = e.response.headers
        if asked := re.match(r"\d+$", headers.get("Retry-After", "")) or _RESET.search(
            headers.get("RateLimit", "")
        ):
            seconds = float(asked[0].removeprefix("t="))
            return seconds + 1 if seconds <= _LONGEST_WAIT else None
        return 2.0**attempt
    if isinstance(e, (_HTTP_ERROR, _TornError)) or "Consistency check failed" in str(e):
        return 2.0**attempt
    return _wait(e.__cause__, attempt) if e.__cause__ is not None else None


# --- telling ---


def _raise_if_hopeless(e: BaseException, repo: str, endpoint: str) -> None:
    """Faults that every further revision would meet too become a ``UserError`` at once."""
    chain = [e]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    for c in chain:
        if isinstance(c, GatedRepoError):
            raise UserError(
                f"{repo}: gated; accept its terms on {endpoint}/{repo} and log in with 'hf auth login'"
            ) from e
        if isinstance(c, RepositoryNotFoundError):
            raise UserError(
                f"{repo}: no such model on {endpoint}, or it is private; check the name or log in with 'hf auth login'"
            ) from e
        if isinstance(c, HFValidationError):
            raise UserError(f"{repo}: not a repository name; it reads owner/name") from e
        if isinstance(c, OSError) and c.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"{repo}: the disk is full; free some, or delete each revision after use, and run the same command again"
            ) from e


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _check_disk(plan: Plan, delete_after: bool) -> None:
    need, free = plan.disk_need(delete_after), _free(plan.cache)
    if need > free:
        fix = (
            "name fewer revisions"
            if delete_after
            else f"delete each after use (needs {_gb(plan.disk_need(True))})"
        )
        raise UserError(
            f"{plan.repo}: needs {_gb(need)} in {plan.cache}, {_gb(free)} are free; {fix} or set HF_HUB_CACHE"
        )


def _free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _one_line(e: BaseException) -> str:
    lines = [line.strip() for line in str(e).splitlines() if line.strip()]
    cause = (
        f" <- {_one_line(e.__cause__)}"
        if e.__cause__ is not None and not isinstance(e, HfHubHTTPError)
        else ""
    )
    return f"{type(e).__name__}: {lines[0] if lines else ''}{cause}"


def _words(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _numbers(name: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", name)]


def _natural(name: str) -> tuple[str, list[int]]:
    return _words(name), _numbers(name)
