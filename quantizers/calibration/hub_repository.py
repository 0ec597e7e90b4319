"""Repositories of datasets on the Hub: what they hold now, and their files by ranges, with a patience that ends."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Any, TypeVar
from urllib.parse import quote

from .source_faults import SourceError, Unreachable

TIMEOUT = 20.0  # seconds to wait for an answer, or for the next bytes of one
RETRIES = 3  # of a request whose connection broke, or that a server's error answered
GIVE_UP = 600.0  # seconds after which a request that is told to wait is given up
PIECE = 8 << 20  # bytes of a request where all of a file is read
UNSAID = 60.0  # seconds to wait where the Hub does not say how long

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Repository:
    """A dataset at one commit.

    Attributes:
        dataset: its id.
        commit: of the revision that was asked for.
        files: paths of all its files.
        card: the metadata of its README.
    """

    dataset: str
    commit: str
    files: tuple[str, ...]
    card: Mapping[str, Any]

    @property
    def licence(self) -> str:
        """The licence that its card names, by the Hub's identifier; empty if it names none."""
        licence = self.card.get("license_name") or self.card.get("license") or ""
        return ", ".join(map(str, licence)) if isinstance(licence, list) else str(licence)


@dataclass
class Hub:
    """The Hub during the loading of one set. Use as a context manager: leaving it ends what still waits.

    Attributes:
        give_up: seconds after which a request that is told to wait is given up.
        stopped: set when nothing may be waited for any more.
    """

    give_up: float = GIVE_UP
    stopped: Event = field(default_factory=Event)

    def __enter__(self) -> Hub:
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()

    def look_up(self, dataset: str, revision: str | None = None) -> Repository:
        """The repository of a dataset as it is now, with one request.

        Raises:
            Unreachable: the Hub cannot be reached, or does not answer in time.
            SourceError: it has no such dataset or revision.
        """
        import huggingface_hub

        api = huggingface_hub.HfApi()
        with _explained(dataset, revision):
            found = self._patiently(dataset, lambda: api.dataset_info(dataset, revision=revision, timeout=TIMEOUT))
        card = found.card_data.to_dict() if found.card_data else {}
        return Repository(dataset, str(found.sha), tuple(file.rfilename for file in found.siblings or ()), card)

    def open(self, repository: Repository, path: str) -> io.RawIOBase:
        """A file of a repository, seekable and not buffered; each read is one request.

        Reading raises what `look_up` raises, and SourceError where the dataset is gated.
        """
        return _RemoteFile(self, repository, path)

    def read_range(self, repository: Repository, path: str, first: int, size: int) -> tuple[bytes, int]:
        """At most `size` bytes of a file from byte `first` on, and the file's size."""
        from huggingface_hub import HfApi, get_session, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        dataset = repository.dataset
        url = f"{HfApi().endpoint}/datasets/{dataset}/resolve/{quote(repository.commit, safe='')}/{quote(path)}"
        headers = build_hf_headers() | {"Range": f"bytes={first}-{first + size - 1}", "Accept-Encoding": "identity"}

        def request() -> tuple[bytes, int]:
            answer = get_session().get(url, headers=headers, timeout=TIMEOUT, follow_redirects=True)
            if answer.status_code == 416:  # the file ends before
                return b"", int(answer.headers.get("Content-Range", "*/0").rpartition("/")[2])
            hf_raise_for_status(answer)
            if answer.status_code == 206:
                return answer.content, int(answer.headers["Content-Range"].rpartition("/")[2])
            return answer.content[first : first + size], len(answer.content)  # ranges are not served

        with _explained(dataset, repository.commit):
            return self._patiently(dataset, request)

    def _patiently(self, dataset: str, request: Callable[[], Answer]) -> Answer:
        """The answer of a request, made again after broken connections, errors of servers, and 429.

        Waiting is said on standard error before it begins.
        """
        import httpx
        from huggingface_hub.errors import HfHubHTTPError

        begun, broken = time.monotonic(), 0
        while True:
            try:
                return request()
            except (httpx.TransportError, HfHubHTTPError) as failure:
                answer = failure.response if isinstance(failure, HfHubHTTPError) else None
                status = answer.status_code if answer is not None else 0
                if isinstance(failure, httpx.ConnectError) or (answer is not None and status != 429 and status < 500):
                    raise
                wait = _told_to_wait(answer.headers) if answer is not None and status == 429 else 2.0**broken / 2
                broken += status != 429
                waited = time.monotonic() - begun
                if broken > RETRIES or waited + wait > self.give_up:
                    raise
                why = f"answers {status}" if status else f"does not answer ({type(failure).__name__})"
                last = (
                    f"given up after {self.give_up / 60:.0f} min" if status == 429 else f"{broken} of {RETRIES} times"
                )
                said = f"calibration: {dataset}: the Hub {why}; asking again in {wait:.0f} s, {last}"
                print(said, file=sys.stderr, flush=True)
                if self.stopped.wait(wait):
                    raise


class _RemoteFile(io.RawIOBase):
    """A file of a repository: readable and seekable, without a buffer."""

    def __init__(self, hub: Hub, repository: Repository, path: str) -> None:
        self._hub, self._repository, self._path = hub, repository, path
        self._position, self._size = 0, -1  # -1: not known yet

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END and self._size < 0:
            self._fetch(0, 1)
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        if 0 <= self._size <= self._position:
            return 0
        content = self._fetch(self._position, len(buffer))
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def readall(self) -> bytes:
        """The rest, in large pieces: the inherited method asks for 8 KiB at a time."""
        return b"".join(iter(lambda: self.read(PIECE), b""))

    def _fetch(self, first: int, size: int) -> bytes:
        content, self._size = self._hub.read_range(self._repository, self._path, first, size)
        return content


def _told_to_wait(headers: Mapping[str, str]) -> float:
    """Seconds until the Hub wants to be asked again."""
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

    limit = parse_ratelimit_headers(headers)
    if limit is not None and not limit.remaining:
        return limit.reset_in_seconds + 1.0
    after = headers.get("Retry-After", "")
    return float(after) if after.isdecimal() else UNSAID


@contextmanager
def _explained(dataset: str, revision: str | None) -> Iterator[None]:
    """Turn exceptions of `huggingface_hub` into a SourceError with a reason and a remedy."""
    try:
        yield
    except Exception as failure:
        raise _explanation(failure, dataset, revision) from failure


def _explanation(failure: Exception, dataset: str, revision: str | None) -> SourceError:
    import httpx
    from huggingface_hub import errors

    without = "leave it out: --without ID, or remove it from the set"
    if isinstance(failure, errors.GatedRepoError):
        return SourceError(dataset, "gated", f"accept its terms on the Hub, then `hf auth login`; or {without}")
    if isinstance(failure, errors.RevisionNotFoundError):
        remedy = "correct the source's revision, or lock the set again"
        return SourceError(dataset, f"no revision {revision}", remedy)
    if isinstance(failure, errors.RepositoryNotFoundError):
        remedy = f"correct the id, or `hf auth login` if it is private; or {without}"
        return SourceError(dataset, "no such dataset on the Hub", remedy)
    status = failure.response.status_code if isinstance(failure, errors.HfHubHTTPError) else 0
    if status == 429 or status >= 500:
        why = "asks to wait too often" if status == 429 else "has an error of its own"
        return Unreachable(dataset, f"the Hub {why} ({status})", f"give the command again later; or {without}")
    if isinstance(failure, (ConnectionError, TimeoutError, httpx.TransportError)):
        remedy = "check the network, or take the shipped set embedded, which needs none (--calibration embedded)"
        offline = isinstance(failure, errors.OfflineModeIsEnabled)
        return Unreachable(
            dataset, f"cannot be reached ({'HF_HUB_OFFLINE is set' if offline else _short(failure)})", remedy
        )
    return SourceError(dataset, f"cannot be read ({_short(failure)})", f"try again; or {without}")


def _short(failure: Exception) -> str:
    """The failure as part of a line: without memory addresses and request ids, at most 160 characters."""
    text = " ".join(f"{type(failure).__name__}: {failure}".split())
    text = re.sub(r"\s*\(Request ID: [^)]*\)| at 0x[0-9a-f]+", "", text)
    return text if len(text) <= 160 else text[:157] + "..."
