"""The files of one commit of a model on the Hub: headers, and any range of bytes, without the disk.

Requests go through huggingface_hub's own retries of a lost connection, a 429 and a 5xx, with the token of its login;
long work then waits for the Hub, see `retried`.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, TypeVar

from quantizers.system.errors import CheckpointError, HubUnavailable, first_line
from quantizers.system.thread_map import thread_map

from .safetensors_header import MAX_HEADER, TensorInfo, header_length, parse_header

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile, RepoFolder

PIECE = 1 << 26  # bytes of one request, at most
AGAIN = "give the same command again, which resumes"
PATIENCE = 60.0  # seconds to wait for the next bytes of an answer
PAUSES = (10.0, 60.0, 300.0, 900.0, 1800.0)  # seconds before a request is tried again that the library has given up
LATER = (408, 409, 412, 429)  # statuses below 500 with which it may succeed then
Result = TypeVar("Result")
TOKEN = "log in with `hf auth login`, or set HF_TOKEN"


@dataclass(frozen=True)
class HubFile:
    """A file of a commit."""

    name: str
    size: int  # bytes
    sha256: str | None  # of a file that the Hub stores as LFS or Xet
    blob: str  # git's id, the SHA-1 of any other

    @property
    def digest(self) -> str:
        """What `hasher` must arrive at, hexadecimal."""
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
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

        with hub_errors(self.model, name, self.commit):
            headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
            url = hf_hub_url(self.model, name, revision=self.commit)
            answer = http_backoff("GET", url, headers=headers, timeout=PATIENCE)
            hf_raise_for_status(answer)
        if answer.status_code != 206 or len(answer.content) != end - start:
            raise CheckpointError(
                f"{self.model}: {name}: asked for {end - start:,} bytes, got {len(answer.content):,}: what answers "
                "there serves no ranges; leave --stream out"
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
    """What to ask for: tensors next to each other together, large ones in pieces."""
    request: _Request | None = None
    for info, view in wanted:
        for at in range(0, max(info.size, 1), PIECE):
            part = view[at : at + PIECE]
            start, end = info.start + at, info.start + at + len(part)
            if request and ((request.file, request.end) != (info.file, start) or end - request.start > PIECE):
                yield request
                request = None
            request = request or _Request(info.file, start, start)
            request.end = end
            request.views.append(part)
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
    return {one.path: HubFile(one.path, one.size, one.lfs.sha256 if one.lfs else None, one.blob_id) for one in files}


@contextlib.contextmanager
def hub_errors(model: str, what: str, revision: str, *, begun: bool = True) -> Iterator[None]:
    """Turn the library's exceptions, for `what` is asked for, into one line that says what to do.

    `begun` says whether the same command would go on from here; else a name or the network may be wrong from the start.
    """
    from httpx import HTTPError
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise CheckpointError(
            f"{model}: is gated, and the Hub refuses {what}; accept its terms on https://huggingface.co/{model}, and "
            f"{TOKEN}"
        ) from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(
            f"{model}: the Hub has no revision {revision}, or no longer; give another one, with --fresh if a run was "
            "begun"
        ) from None
    except (HTTPError, OSError, ValueError) as failure:
        reason = reason_of(failure)
        if begun and not isinstance(failure, errors.RepositoryNotFoundError | errors.EntryNotFoundError):
            raise HubUnavailable(f"{model}: {what}: the Hub stopped answering ({reason}); {AGAIN}") from None
        raise CheckpointError(
            f"{model}: the Hub did not give {what} ({reason}); check the name and the network, or name a folder"
        ) from None


def reason_of(failure: Exception) -> str:
    """What the Hub, or else the library, says of a failure, in one line without the token."""
    from huggingface_hub import get_token

    words = first_line(Exception(getattr(failure, "server_message", None) or failure))
    return re.sub(r"Bearer [^'\"]*|hf_[A-Za-z0-9]{10,}", "***", words.replace(get_token() or "\0", "***"))


def status_of(failure: Exception) -> int | None:
    """The status of the Hub's answer; None if it did not answer."""
    status: int | None = getattr(getattr(failure, "response", None), "status_code", None)
    return status


def is_transient(failure: Exception) -> bool:
    """Whether the same request may succeed later."""
    status = status_of(failure)
    return not isinstance(failure, ValueError) if status is None else status in LATER or status >= 500


def retried(request: Callable[[], Result], stopped: Event) -> Result:
    """The result of a request; where the Hub is unavailable, it is made again after each of `PAUSES`, which is said.

    Raises:
        HubUnavailable: it still is, or `stopped` was set meanwhile.
    """
    for pause in PAUSES:
        try:
            return request()
        except HubUnavailable as failure:
            if stopped.is_set():
                raise
            print(f"{failure.without_remedy}; trying again in {pause:g} s", file=sys.stderr, flush=True)
            if stopped.wait(pause):
                raise
    return request()
