"""The files of one commit of a model on the Hub: headers, and any range of bytes, without the disk.

Requests go through huggingface_hub's own retries of a lost connection, a 429 and a 5xx; long work then waits for the
Hub, see `hub_client.retried`.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from quantizers.system import hub_client
from quantizers.system.errors import CheckpointError
from quantizers.system.thread_map import thread_map

from .safetensors_header import MAX_HEADER, TensorInfo, header_length, parse_header

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile, RepoFolder

PATIENCE = 60.0  # seconds to wait for the next bytes of an answer


@dataclass(frozen=True)
class HubFile:
    """A file of a commit."""

    name: str
    size: int  # bytes
    sha256: str | None  # of a file that the Hub stores as LFS or Xet
    blob: str  # git's id, the SHA-1 of any other

    @property
    def digest(self) -> str:
        """Expected digest from `hasher`, hexadecimal."""
        return self.sha256 or self.blob

    def hasher(self) -> hashlib._Hash:
        """A new hash, to be fed with all bytes of the file."""
        if self.sha256:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)


@dataclass
class HubFiles:
    """The files of one commit."""

    model: str
    commit: str  # 40 hexadecimal digits
    files: dict[str, HubFile] = field(repr=False)  # by their names in the repository
    begun: dict[str, bytes] = field(default_factory=dict, repr=False)  # of a file, to the end of its header
    fetched: int = 0  # bytes received so far, by all threads
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def range(self, name: str, start: int, end: int) -> bytes:
        """Bytes `start` to `end` of a file.

        Raises:
            CheckpointError: the file or its commit is gone, access is refused, or what answers serves no ranges.
            HubUnavailable: the Hub does not answer, also after the library's retries.
        """
        if start == end:
            return b""
        from huggingface_hub import hf_raise_for_status

        with hub_client.hub_errors(self.model, name, self.commit):
            answer = hub_client.range_answer(self.model, name, self.commit, start, end, timeout=PATIENCE, retries=True)
            hf_raise_for_status(answer)
        if answer.status_code != 206 or len(answer.content) != end - start:
            raise CheckpointError(
                f"{self.model}: {name}",
                f"asked for {end - start:,} bytes, got {len(answer.content):,}: what answers there serves no ranges",
                "leave --stream out",
            )
        with self._lock:
            self.fetched += end - start
        return answer.content

    def header(self, file: Path) -> dict[str, TensorInfo]:
        """The tensors of a safetensors file, as `read_header`; `file` is where it would lie in a folder."""
        name, length = file.name, self.files[file.name].size
        begun = self.range(name, 0, min(8, length))
        end = min(8 + header_length(begun), length, 8 + MAX_HEADER)
        self.begun[name] = begun + self.range(name, len(begun), end)
        return parse_header(file, length, self.begun[name])

    def read_into(
        self, wanted: Iterable[tuple[TensorInfo, memoryview]], stop: Event | None = None
    ) -> Iterator[TensorInfo]:
        """As `reader.read_into`; neighbours in a file come in one request. `wanted` ends once `stop` is set."""
        for done in thread_map(self._fill, _requests(wanted)):
            yield from done

    def _fill(self, request: _Request) -> list[TensorInfo]:
        raw, at = memoryview(self.range(request.file.name, request.start, request.end)), 0
        for view in request.views:
            view[:] = raw[at : at + len(view)]
            at += len(view)
        return request.complete

    def release(self, infos: Iterable[TensorInfo]) -> None:
        """Nothing is kept."""


@dataclass
class _Request:
    """Consecutive bytes of a file, the memory that they fill, and the tensors that are complete with them."""

    file: Path
    start: int
    end: int
    views: list[memoryview] = field(default_factory=list)
    complete: list[TensorInfo] = field(default_factory=list)


def _requests(wanted: Iterable[tuple[TensorInfo, memoryview]]) -> Iterator[_Request]:
    """Group tensors into requests: adjacent tensors together, large ones in pieces."""
    request: _Request | None = None
    most = hub_client.PIECE
    for info, view in wanted:
        for at in range(0, max(info.size, 1), most):
            piece = view[at : at + most]
            start, end = info.start + at, info.start + at + len(piece)
            if request and ((request.file, request.end) != (info.file, start) or end - request.start > most):
                yield request
                request = None
            request = request or _Request(info.file, start, start)
            request.end = end
            request.views.append(piece)
            if end == info.end:
                request.complete.append(info)
    if request:
        yield request


def files_of(model: str, revision: str) -> tuple[str, dict[str, HubFile]]:
    """The commit that a branch, tag or commit is now, and its files; the library's exceptions pass through."""
    from huggingface_hub import HfApi

    api = HfApi()
    commit = api.model_info(model, revision=revision).sha or revision
    return commit, by_name(api.list_repo_tree(model, revision=commit, recursive=True))


def by_name(entries: Iterable[RepoFile | RepoFolder]) -> dict[str, HubFile]:
    """Files by their names in the repository, from the library's answer; without the folders."""
    from huggingface_hub.hf_api import RepoFile

    files = (entry for entry in entries if isinstance(entry, RepoFile))
    return {
        file.path: HubFile(file.path, file.size, file.lfs.sha256 if file.lfs else None, file.blob_id) for file in files
    }
