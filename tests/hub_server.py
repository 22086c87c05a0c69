"""A Hugging Face Hub on loopback for tests: the HTTP API that the real client speaks, over published folders.

    with Hub() as hub:
        hub.publish("lab/toy", "step10", folder)
        hub.fail(r"GET .*/model.safetensors", status=429, times=2, headers={"Retry-After": "0"})
        resolve("lab/toy", endpoint=hub.url, ...)
        assert hub.sent("model.safetensors") == size

It serves from daemon threads, refuses requests after ``limit`` of them, and stops at the end of the block
or after ``lifetime`` seconds, whichever comes first.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

LFS_FROM = 1024  # bytes; larger binary files get LFS metadata, as on the Hub
PAGE = 4  # entries of a tree listing per page, small so that paging is exercised


@dataclass
class Fault:
    pattern: str  # matched against "METHOD /path"
    times: int
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut_at: int | None = None  # send this many bytes of the body, then close the connection


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    status: int
    start: int  # first byte of the file that was asked for
    sent: int  # bytes of the body that were sent


class Hub:
    """See the module's docstring. ``log`` holds every request answered."""

    def __init__(self, *, cdn: bool = False, lifetime: float = 300.0, limit: int = 10_000) -> None:
        self.repos: dict[str, dict[str, str]] = {}  # repo -> revision -> commit
        self.trees: dict[str, dict[str, bytes]] = {}  # commit -> path -> content
        self.gated: set[str] = set()
        self.faults: list[Fault] = []
        self.log: list[Request] = []
        self.cdn = cdn  # answer large files by a redirect to another host name, as the Hub does
        self.limit = limit
        self.lock = threading.Lock()
        hub = self

        class Handler(_Handler):
            def __init__(self, *args) -> None:
                self.hub = hub
                super().__init__(*args)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.timer = threading.Timer(lifetime, self.close)
        self.timer.daemon = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> Hub:
        self.thread.start()
        self.timer.start()
        return self

    def __exit__(self, *exc) -> None:
        self.timer.cancel()
        self.close()
        self.thread.join(5)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()  # from now on connections are refused, nobody waits

    def publish(self, repo: str, revision: str, content: Path | dict[str, bytes]) -> str:
        """Publish a folder (or a mapping of paths to bytes) as a branch; returns its commit."""
        if isinstance(content, Path):
            content = {
                p.relative_to(content).as_posix(): p.read_bytes() for p in content.rglob("*") if p.is_file()
            }
        h = hashlib.sha1(f"{repo}@{revision}".encode())
        for path in sorted(content):
            h.update(path.encode() + hashlib.sha1(content[path]).digest())
        self.trees[h.hexdigest()] = dict(content)
        self.repos.setdefault(repo, {})[revision] = h.hexdigest()
        return h.hexdigest()

    def fail(
        self, pattern: str, *, times: int = 1, status: int | None = None, cut_at: int | None = None, **more
    ) -> None:
        """Answer the next ``times`` requests that match ``pattern`` with ``status``, or cut their body."""
        self.faults.append(Fault(pattern, times, status, more.get("headers", {}), cut_at))

    def bodies(self, path_end: str = "") -> list[Request]:
        """Requests that sent (part of) a file whose path ends so."""
        files = (
            r for r in self.log if r.method == "GET" and ("/resolve/" in r.path or r.path.startswith("/cdn/"))
        )
        return [r for r in files if r.sent and r.status < 300 and r.path.endswith(path_end)]

    def sent(self, path_end: str = "") -> int:
        """Bytes of files sent in all."""
        return sum(r.sent for r in self.bodies(path_end))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 20
    disable_nagle_algorithm = True
    wbufsize = -1  # headers and body in one segment: no wait for a delayed acknowledgement
    hub: Hub

    def log_message(self, *args) -> None: ...

    def do_GET(self) -> None:
        self.answer()

    def do_HEAD(self) -> None:
        self.answer()

    def answer(self) -> None:
        self.path_only = unquote(urlsplit(self.path).path)
        fault = self.next_fault()
        if fault and fault.status:
            return self.reply(fault.status, b"injected", {**fault.headers})
        parts = urlsplit(self.path).path.split("/")[1:]
        if parts[0] == "cdn":
            return self.blob(parts[1], fault)
        if parts[:2] == ["api", "models"]:
            return self.api("/".join(parts[2:4]), [unquote(p) for p in parts[4:]])
        if len(parts) >= 5 and parts[2] == "resolve":
            return self.file("/".join(parts[:2]), unquote(parts[3]), unquote("/".join(parts[4:])), fault)
        self.refuse("EntryNotFound", 404)

    def next_fault(self) -> Fault | None:
        with self.hub.lock:
            if len(self.hub.log) >= self.hub.limit:
                return Fault("", 1, status=410)
            for fault in self.hub.faults:
                if fault.times > 0 and re.search(fault.pattern, f"{self.command} {self.path_only}"):
                    fault.times -= 1
                    return fault
        return None

    def api(self, repo: str, rest: list[str]) -> None:
        if repo not in self.hub.repos:
            return self.refuse("RepoNotFound", 401)  # what the Hub answers to strangers
        refs = self.hub.repos[repo]
        if rest == ["refs"]:
            branches = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c} for n, c in refs.items()]
            return self.json({"branches": branches, "tags": [], "converts": []})
        revision = rest[1] if len(rest) > 1 else "main"
        commit = self.commit(repo, revision)
        if commit is None:
            return self.refuse("RevisionNotFound", 404)
        tree = self.hub.trees[commit]
        if not rest or rest[0] == "revision":
            return self.json(
                {"id": repo, "sha": commit, "siblings": [{"rfilename": p} for p in tree], "tags": []}
            )
        if rest[0] == "tree":
            query = parse_qs(urlsplit(self.path).query)
            first = int(query.get("cursor", ["0"])[0])
            entries = [self.entry(p, tree[p]) for p in sorted(tree)]
            more = {}
            if first + PAGE < len(entries):
                plain = self.path.split("&cursor=")[0]
                more["Link"] = f'<{self.hub.url}{plain}&cursor={first + PAGE}>; rel="next"'
            return self.json(entries[first : first + PAGE], more)
        self.refuse("EntryNotFound", 404)

    def commit(self, repo: str, revision: str) -> str | None:
        refs = self.hub.repos[repo]
        return refs.get(revision) or (revision if revision in refs.values() else None)

    @staticmethod
    def entry(path: str, data: bytes) -> dict:
        oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        found = {"type": "file", "path": path, "size": len(data), "oid": oid}
        if is_lfs(path, data):
            found["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return found

    def file(self, repo: str, revision: str, path: str, fault: Fault | None) -> None:
        if repo not in self.hub.repos:
            return self.refuse("RepoNotFound", 401)
        if repo in self.hub.gated:
            return self.refuse("GatedRepo", 403)
        commit = self.commit(repo, revision)
        if commit is None:
            return self.refuse("RevisionNotFound", 404)
        tree = self.hub.trees[commit]
        if path not in tree:
            return self.refuse("EntryNotFound", 404, {"X-Repo-Commit": commit})
        data = tree[path]
        entry = self.entry(path, data)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{entry["oid"]}"', "Accept-Ranges": "bytes"}
        if "lfs" in entry:
            sha = entry["lfs"]["oid"]
            headers |= {"X-Linked-Etag": f'"{sha}"', "X-Linked-Size": str(len(data)), "ETag": f'"{sha}"'}
            if self.hub.cdn:
                where = f"http://localhost:{self.hub.server.server_port}/cdn/{sha}"
                return self.reply(302, b"", {**headers, "Location": where})
        self.body(data, headers, fault)

    def blob(self, sha: str, fault: Fault | None) -> None:
        for tree in self.hub.trees.values():
            for data in tree.values():
                if hashlib.sha256(data).hexdigest() == sha:
                    return self.body(data, {"Accept-Ranges": "bytes"}, fault)
        self.refuse("EntryNotFound", 404)

    def body(self, data: bytes, headers: dict[str, str], fault: Fault | None) -> None:
        start = 0
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start = int(asked[1])
            if start >= len(data):
                return self.reply(416, b"", {**headers, "Content-Range": f"bytes */{len(data)}"})
            headers = {**headers, "Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        cut = fault.cut_at if fault else None
        self.reply(206 if asked else 200, data[start:], headers, start=start, cut_at=cut)

    def json(self, data: object, headers: dict[str, str] | None = None) -> None:
        self.reply(200, json.dumps(data).encode(), {"Content-Type": "application/json", **(headers or {})})

    def refuse(self, code: str, status: int, headers: dict[str, str] | None = None) -> None:
        self.reply(status, b"", {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})})

    def reply(
        self, status: int, body: bytes, headers: dict[str, str], *, start: int = 0, cut_at: int | None = None
    ) -> None:
        sent = 0 if self.command == "HEAD" else len(body) if cut_at is None else min(cut_at, len(body))
        with self.hub.lock:
            self.hub.log.append(Request(self.command, self.path_only, status, start, sent))
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if sent:
            self.wfile.write(body[:sent])
        if cut_at is not None and self.command != "HEAD":
            self.wfile.flush()
            self.close_connection = True


def is_lfs(path: str, data: bytes) -> bool:
    return path.endswith((".safetensors", ".bin", ".model")) and len(data) >= LFS_FROM
