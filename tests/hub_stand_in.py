"""A Hub on the loopback interface: the routes that `datasets` and `huggingface_hub` ask for.

Point them at it with `HF_ENDPOINT` in a process of its own: both read it when they are imported.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import TracebackType
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

REPO = r"(?P<repo>[^/]+(?:/[^/]+)?)"
ROUTES = {  # the first that matches
    "tree": re.compile(rf"/api/datasets/{REPO}/tree/(?P<revision>[^/]+)(?:/(?P<path>.+))?"),
    "paths": re.compile(rf"/api/datasets/{REPO}/paths-info/(?P<revision>[^/]+)"),
    "file": re.compile(rf"/datasets/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)"),
    "info": re.compile(rf"/api/datasets/{REPO}(?:/revision/(?P<revision>[^/]+))?"),
}
Answer = tuple[int, bytes, dict[str, str]]  # status, body, headers


@dataclass
class HubStandIn:
    """Datasets by id, each a dict from path to bytes. Use as a context manager.

    Attributes:
        datasets: what is served; changing it changes the commits.
        backwards: list files in the opposite order.
        asked: the path of every request, in the order they came.
        reached: how far each file was read, in bytes, by `id/path`.
    """

    datasets: dict[str, dict[str, bytes]]
    backwards: bool = False
    asked: list[str] = field(default_factory=list)
    reached: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> HubStandIn:
        hub = self

        class Handler(_Handler):
            stand_in = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def commit(self, repo: str) -> str:
        text = "".join(f"{path}{blob(raw)}" for path, raw in sorted(self.datasets[repo].items()))
        return hashlib.sha1(text.encode()).hexdigest()

    def paths(self, repo: str) -> list[str]:
        return sorted(self.datasets[repo], reverse=self.backwards)


def blob(raw: bytes) -> str:
    """Git's name for a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest()


def _json(value: Any) -> Answer:
    return 200, json.dumps(value).encode(), {"Content-Type": "application/json"}


def _missing(code: str, headers: dict[str, str] | None = None) -> Answer:
    return 404, b"", (headers or {}) | {"X-Error-Code": code}


class _Handler(BaseHTTPRequestHandler):
    stand_in: HubStandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.stand_in.asked.append(f"{self.command} {self.path}")
        status, answer, headers = self._route(urlsplit(unquote(self.path)), body.decode())
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    def _route(self, address: SplitResult, body: str) -> Answer:
        matches = {name: pattern.fullmatch(address.path) for name, pattern in ROUTES.items()}
        name, match = next(((name, match) for name, match in matches.items() if match), ("", None))
        if match is None:
            return _missing("Unknown")
        repo, revision = match["repo"], match["revision"] or "main"
        if repo not in self.stand_in.datasets:
            return _missing("RepoNotFound")
        commit = self.stand_in.commit(repo)
        if revision not in ("main", commit):
            return _missing("RevisionNotFound")
        if name == "info":
            return _json(self._info(repo, commit))
        if name == "tree":
            return self._tree(repo, match["path"] or "", "recursive=true" in address.query.lower())
        if name == "paths":
            return self._paths_info(repo, body)
        return self._file(repo, match["path"], commit)

    def _info(self, repo: str, commit: str) -> dict[str, Any]:
        siblings = [{"rfilename": path} for path in self.stand_in.paths(repo)]
        return {
            "id": repo,
            "sha": commit,
            "siblings": siblings,
            "private": False,
            "gated": False,
            "disabled": False,
            "lastModified": "2026-01-01T00:00:00.000Z",
            "tags": [],
            "downloads": 0,
            "likes": 0,
        }

    def _entry(self, repo: str, path: str) -> dict[str, Any]:
        raw = self.stand_in.datasets[repo][path]
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(raw), "oid": blob(raw)}
        if path.endswith(".parquet"):
            entry["lfs"] = {"oid": hashlib.sha256(raw).hexdigest(), "size": len(raw), "pointerSize": 130}
        return entry

    def _tree(self, repo: str, folder: str, recursive: bool) -> Answer:
        prefix = f"{folder}/" if folder else ""
        entries: dict[str, dict[str, Any]] = {}
        for path in self.stand_in.paths(repo):
            if path.startswith(prefix):
                rest = path[len(prefix) :]
                if "/" in rest:
                    child = prefix + rest.split("/")[0]
                    entries[child] = {"type": "directory", "path": child, "size": 0, "oid": "0" * 40}
                if recursive or "/" not in rest:
                    entries[path] = self._entry(repo, path)
        if folder and not entries:
            return _missing("EntryNotFound")
        return _json(list(entries.values()))

    def _paths_info(self, repo: str, body: str) -> Answer:
        form = parse_qs(body)
        entries = []
        for path in form["paths"]:
            if path in self.stand_in.datasets[repo]:
                entries.append(self._entry(repo, path))
            elif any(name.startswith(f"{path}/") for name in self.stand_in.datasets[repo]):
                entries.append({"type": "directory", "path": path, "size": 0, "oid": "0" * 40})
        return _json(entries)

    def _file(self, repo: str, path: str, commit: str) -> Answer:
        raw = self.stand_in.datasets[repo].get(path)
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if raw is None:
            return _missing("EntryNotFound", headers)
        headers["ETag"] = f'"{blob(raw)}"'
        status, first, last = 200, 0, len(raw) - 1
        if span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            status, first, last = 206, int(span[1]), min(int(span[2] or last), last)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(raw)}"
        if self.command == "GET":
            name = f"{repo}/{path}"
            self.stand_in.reached[name] = max(self.stand_in.reached.get(name, 0), last + 1)
        return status, raw[first : last + 1], headers
