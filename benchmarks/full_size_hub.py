"""The Hub of full_size.py: a stand-in on the loopback interface that has a made checkpoint and keeps what is uploaded.

Its state is in a folder, so a Hub that begins anew there goes on at the same address. An upload is kept in pieces by
content, the first of them a safetensors file's header: shards that differ in names alone take the room of one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import numpy as np
from hub_stand_in import ROUTES, HubStandIn
from made_checkpoint import MadeCheckpoint

from quantizers.system.errors import InputError
from quantizers.system.files import write_json
from quantizers.system.formatting import size
from quantizers.system.shipped import shipped_model

TOKEN = "hf_" + "oneThatNobodyHas" * 2
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")  # of the tiny model: 2,048 tokens
PIECE = 1 << 24  # bytes of an upload that are kept together


@dataclass(frozen=True)
class Upload:
    """A large file that was uploaded: its pieces are files, named by their SHA-256 and shared with other uploads."""

    folder: Path
    sha256: str
    pieces: list[tuple[str, int]]

    def __len__(self) -> int:
        return sum(length for _, length in self.pieces)

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(len(self))
        made, at = bytearray(), 0
        for name, length in self.pieces:
            first, last = max(start - at, 0), min(stop - at, length)
            if first < last:
                with (self.folder / name).open("rb") as stream:
                    stream.seek(first)
                    made += stream.read(last - first)
            at += length
        return bytes(made)


def kept(folder: Path, received: Iterator[bytes]) -> Upload:
    """Write an upload's pieces, but for those that are there. A safetensors file is cut behind its header first."""
    folder.mkdir(parents=True, exist_ok=True)
    whole, pieces, left = hashlib.sha256(), list[tuple[str, int]](), bytearray()

    def keep(count: int) -> None:
        piece = bytes(left[:count])
        del left[:count]
        name = hashlib.sha256(piece).hexdigest()
        if not (folder / name).exists():
            unfinished = folder / f"{name}.part"
            unfinished.write_bytes(piece)
            unfinished.replace(folder / name)
        pieces.append((name, len(piece)))

    for block in received:
        whole.update(block)
        left += block
        header = 8 + int.from_bytes(left[:8], "little")
        if not pieces and header <= min(len(left), PIECE):
            keep(header)
        while len(left) >= PIECE:
            keep(PIECE)
    if left:
        keep(len(left))
    return Upload(folder, whole.hexdigest(), pieces)


class Hub:
    """A Hub with a state in a folder. Use as a context manager.

    Attributes:
        figures: of all its times together, `requests` by kind and bytes of large files that were `received`; what else
            a caller puts there is kept with them.
    """

    def __init__(self, folder: Path, source: str, checkpoint: MadeCheckpoint) -> None:
        self._folder, self._file, self._source = folder, folder / "hub.json", source
        state = json.loads(self._file.read_text()) if self._file.exists() else {}
        self._config = checkpoint.config
        if state.get("config", self._config) != self._config:
            raise InputError(folder, "holds a run of another model, or of other sizes", "give another --folder")
        self.figures: dict[str, Any] = state.get("figures", {})
        self._shards = checkpoint.shards
        self._hash(state.get("hashes", {}))
        hub = HubStandIn(TOKEN, gather=self._gather, after=self._after, port=state.get("port", 0))
        tokenizer = {name: (_tiny() / name).read_bytes() for name in TOKENIZER}
        hub.repositories[source] = {"main": {**checkpoint.shards, **checkpoint.files, **tokenizer}}
        uploads = {oid: Upload(self._pieces, oid, pieces) for oid, pieces in state.get("objects", {}).items()}
        hub.objects.update(uploads)
        for repo, files in state.get("repositories", {}).items():
            hub.repositories[repo] = {"main": {name: self._content(entry, uploads) for name, entry in files.items()}}
        hub.private.update(state.get("private", {}))
        commit_of, commit = hub.commit, hub.commit(source)  # whose files do not change, and are many bytes
        hub.commit = lambda repo, branch="main": commit if repo == source else commit_of(repo, branch)
        self.stand_in = hub

    def __enter__(self) -> Hub:
        self.stand_in.__enter__()
        self.stand_in.port = int(self.stand_in.endpoint.rpartition(":")[2])
        self.save()
        return self

    def __exit__(self, *_: object) -> None:
        self.save()
        self.stand_in.__exit__()

    @property
    def _pieces(self) -> Path:
        return self._folder / "pieces"

    def digests(self, repo: str) -> list[str]:
        """SHA-256 of the shards of a repository that was uploaded, in the order of their names."""
        files = self.stand_in.repositories[repo]["main"]
        return [files[name].sha256 for name in sorted(files) if name.endswith(".safetensors")]

    def read(self) -> np.ndarray:
        """Bytes that were sent so far, of the source and of all else."""
        with self.stand_in.counting:
            of_source = sum(count for name, count in self.stand_in.sent.items() if name.startswith(f"{self._source}/"))
            return np.array([of_source, sum(self.stand_in.sent.values()) - of_source])

    def _hash(self, known: Mapping[str, str]) -> None:
        for name, shard in self._shards.items():
            shard.sha256 = known.get(name, "")
        missing = [shard for shard in self._shards.values() if not shard.sha256]
        if missing:
            print(f"hashing {size(sum(map(len, missing)))} of the source, once", file=sys.stderr, flush=True)
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for shard, digest in zip(missing, threads.map(lambda shard: shard.hash(), missing), strict=True):
                shard.sha256 = digest

    def _gather(self, request: str, received: Iterator[bytes]) -> Any:
        if not request.startswith("PUT /lfs/"):
            return b"".join(received)
        upload = kept(self._pieces, received)
        with self.stand_in.counting:
            self.figures["received"] = self.figures.get("received", 0) + len(upload)
        return upload

    def _after(self, request: str) -> None:
        kind = next((name for name, pattern in ROUTES.items() if pattern.fullmatch(request)), request)
        with self.stand_in.counting:
            requests = self.figures.setdefault("requests", {})
            requests[kind] = requests.get(kind, 0) + 1
        if kind in ("create", "commit", "settings", "object"):
            self.save()

    def _content(self, entry: str, uploads: Mapping[str, Upload]) -> Any:
        kind, _, value = entry.partition(":")
        return uploads[value] if kind == "lfs" else base64.b64decode(value)

    def save(self) -> None:
        """Write the state."""
        hub = self.stand_in
        with hub.counting:
            state = {
                "config": self._config,
                "port": hub.port,
                "hashes": {name: shard.sha256 for name, shard in self._shards.items()},
                "objects": {oid: upload.pieces for oid, upload in hub.objects.items()},
                "repositories": {
                    repo: {name: _entry(content) for name, content in branches["main"].items()}
                    for repo, branches in hub.repositories.items()
                    if repo != self._source
                },
                "private": hub.private,
                "figures": self.figures,
            }
            write_json(self._file, state)


def _entry(content: Any) -> str:
    return f"bytes:{base64.b64encode(content).decode()}" if isinstance(content, bytes) else f"lfs:{content.sha256}"


def _tiny() -> Path:
    folder = shipped_model("tiny-minimax-m2")
    assert folder is not None
    return folder
