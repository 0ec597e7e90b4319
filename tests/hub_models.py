"""A Hub on the loopback interface for models: what uploading, listing and reading ranges ask for.

The real huggingface_hub talks to it with HF_ENDPOINT set, in a process of its own (it reads that when it
is imported) and with HF_HUB_DISABLE_XET=1: large files then go by the LFS protocol.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

REPO = r"(?P<repo>[^/]+/[^/]+)"
ROUTES = {  # the first that matches
    "create": re.compile(r"POST /api/repos/create"),
    "yaml": re.compile(r"POST /api/validate-yaml"),
    "branch": re.compile(rf"POST /api/models/{REPO}/branch/(?P<revision>[^/]+)"),
    "preupload": re.compile(rf"POST /api/models/{REPO}/preupload/(?P<revision>[^/]+)"),
    "batch": re.compile(rf"POST /{REPO}\.git/info/lfs/objects/batch"),
    "object": re.compile(r"PUT /lfs/(?P<oid>[0-9a-f]{64})"),
    "commit": re.compile(rf"POST /api/models/{REPO}/commit/(?P<revision>[^/]+)"),
    "tree": re.compile(rf"GET /api/models/{REPO}/tree/(?P<revision>[^/]+)"),
    "info": re.compile(rf"GET /api/models/{REPO}(?:/revision/(?P<revision>[^/]+))?"),
    "file": re.compile(rf"(?:GET|HEAD) /{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)"),
}
OPEN = {"tree", "info", "file", "object"}  # no token needed
Answer = tuple[int, bytes, dict[str, str]]


@dataclass
class ModelHub:
    """Repositories by id, each a dict from branch to files. Use as a context manager.

    Attributes:
        token: what a writer must show.
        stall_after: the object of this number (from 0) is received, and then nothing is answered.
        stalled: set when that has happened.
        damage: changes the bytes of a file as they are committed, as a broken Hub would.
        objects: what was uploaded, by SHA-256; received counts uploads of each.
        asked: method and path of every request.
        sent: how many bytes of each file were answered.
    """

    token: str
    repositories: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    stall_after: int | None = None
    stalled: Event = field(default_factory=Event)
    release: Event = field(default_factory=Event)
    counting: Any = field(default_factory=Lock)
    damage: Callable[[str, bytes], bytes] = lambda _, raw: raw
    objects: dict[str, bytes] = field(default_factory=dict)
    received: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> ModelHub:
        hub = self

        class Handler(_Handler):
            stand_in = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def commit(self, repo: str, revision: str) -> str:
        files = self.repositories[repo][revision]
        return hashlib.sha1("".join(f"{name}{blob(raw)}" for name, raw in sorted(files.items())).encode()).hexdigest()

    def branch(self, repo: str, revision: str) -> str | None:
        """The branch that a name or commit means."""
        branches = self.repositories[repo]
        return next((name for name in branches if revision in (name, self.commit(repo, name))), None)


def blob(raw: bytes) -> str:
    """Git's name for a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest()


def is_lfs(path: str) -> bool:
    """What the Hub's .gitattributes says, as far as it matters here."""
    return path.endswith((".safetensors", ".png")) or path == "tokenizer.json"


def _json(value: Any, status: int = 200) -> Answer:
    return status, json.dumps(value).encode(), {"Content-Type": "application/json"}


def _missing(code: str) -> Answer:
    return 404, b"", {"X-Error-Code": code}


class _Handler(BaseHTTPRequestHandler):
    stand_in: ModelHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def _answer(self) -> None:
        hub = self.stand_in
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        hub.asked.append(f"{self.command} {path}")
        status, answer, headers = self._route(path, body)
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer)
        except OSError:
            pass  # the client is gone

    def _route(self, path: str, body: bytes) -> Answer:
        hub, request = self.stand_in, f"{self.command} {path}"
        name, match = next(((n, m) for n, pattern in ROUTES.items() if (m := pattern.fullmatch(request))), ("", None))
        if match is None:
            return _missing("Unknown")
        if name not in OPEN and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return 401, b'{"error": "Invalid credentials"}', {}
        found = match.groupdict()
        if name == "create":
            return self._create(json.loads(body))
        if name == "yaml":
            return _json({"errors": [], "warnings": []})
        if name == "object":
            return self._object(found["oid"], body)
        repo = found["repo"]
        if repo not in hub.repositories:
            return _missing("RepoNotFound")
        if name == "branch":
            branches = hub.repositories[repo]
            if found["revision"] in branches:
                return 409, b"", {}
            branches[found["revision"]] = dict(branches["main"])
            return _json({})
        if name == "batch":
            return self._batch(json.loads(body))
        revision = hub.branch(repo, found["revision"] or "main")
        if revision is None:
            return _missing("RevisionNotFound")
        files = hub.repositories[repo][revision]
        if name == "info":
            siblings = [{"rfilename": path} for path in files]
            return _json({"id": repo, "sha": hub.commit(repo, revision), "siblings": siblings, "private": False})
        if name == "preupload":
            modes = [(f["path"], "lfs" if is_lfs(f["path"]) else "regular") for f in json.loads(body)["files"]]
            return _json({"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes]})
        if name == "tree":
            return _json([_entry(path, raw) for path, raw in sorted(files.items())])
        if name == "commit":
            return self._commit(repo, revision, files, body)
        return self._file(f"{repo}/{found['path']}", files.get(found["path"]), hub.commit(repo, revision))

    def _create(self, asked: dict[str, Any]) -> Answer:
        hub = self.stand_in
        repo = f"{asked['organization']}/{asked['name']}"
        if repo in hub.repositories:
            return _json({"error": "exists", "url": f"{hub.endpoint}/{repo}"}, 409)
        hub.repositories[repo] = {"main": {".gitattributes": b"*.safetensors filter=lfs\n"}}
        hub.private[repo] = asked.get("visibility") == "private" or bool(asked.get("private"))
        return _json({"url": f"{hub.endpoint}/{repo}", "name": repo})

    def _batch(self, asked: dict[str, Any]) -> Answer:
        hub, objects = self.stand_in, []
        for item in asked["objects"]:
            actions = {} if item["oid"] in hub.objects else {"upload": {"href": f"{hub.endpoint}/lfs/{item['oid']}"}}
            objects.append(item | ({"actions": actions} if actions else {}))
        return _json({"transfer": "basic", "objects": objects})

    def _object(self, oid: str, body: bytes) -> Answer:
        hub = self.stand_in
        with hub.counting:  # several objects come at a time, and just so many are to be received
            full = hub.stall_after is not None and len(hub.received) >= hub.stall_after
            good = hashlib.sha256(body).hexdigest() == oid
            if good and not full:
                hub.objects[oid] = body
                hub.received.append(oid)
        if full:
            hub.stalled.set()
            hub.release.wait(600)
            return 503, b"", {}
        return (200 if good else 400), b"", {}

    def _commit(self, repo: str, revision: str, files: dict[str, bytes], body: bytes) -> Answer:
        hub = self.stand_in
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = hub.damage(value["path"], base64.b64decode(value["content"]))
            elif item["key"] == "lfsFile":
                files[value["path"]] = hub.damage(value["path"], hub.objects[value["oid"]])
        commit = hub.commit(repo, revision)
        return _json({"commitUrl": f"{hub.endpoint}/{repo}/commit/{commit}", "commitOid": commit})

    def _file(self, name: str, raw: bytes | None, commit: str) -> Answer:
        if raw is None:
            return _missing("EntryNotFound")
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes", "ETag": f'"{blob(raw)}"'}
        status, first, last = 200, 0, len(raw) - 1
        if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            status, first, last = 206, int(span[1]), min(int(span[2] or last), last)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(raw)}"
        if self.command == "GET":
            self.stand_in.sent[name] = self.stand_in.sent.get(name, 0) + last + 1 - first
        return status, raw[first : last + 1], headers


def _entry(path: str, raw: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(raw), "oid": blob(raw)}
    if is_lfs(path):
        entry["lfs"] = {"oid": hashlib.sha256(raw).hexdigest(), "size": len(raw), "pointerSize": 130}
    return entry
