"""Uploads to the Hub: hashes before and after, and the shards of a run that go there while it works.

What a run has uploaded is in DIR/.quantize/uploaded.json:

    repo      the repository
    created   whether this run made it, private: then it becomes public at the end
    proven    the output's files, once all are there, compared by hash

Which shards are there is not noted: the Hub has their hashes, and the journal those that they were written with. The
Hub library takes the token from its own login or environment; it is masked in every message of the library.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from threading import Condition, Event, Thread
from typing import Any

from quantizers.checkpoint.reader import read_into
from quantizers.checkpoint.remote import HubFile, HubFiles, by_name, files_of
from quantizers.checkpoint.safetensors_header import TensorInfo, read_header
from quantizers.system.errors import InputError, QuantizeError
from quantizers.system.files import disk_errors, write_json
from quantizers.system.hub_client import AGAIN, LOGIN, is_transient, retried, upload_errors

from . import journal
from .journal import Shard

CHUNK = 1 << 24  # bytes read at a time
ATTRIBUTES = ".gitattributes"  # which the Hub adds
MESSAGE = "Upload with moe-quantizers"
POLL = 0.1  # seconds between two looks at what is waited for
LINES = 20.0  # seconds of waiting between two lines about it


@dataclass(frozen=True)
class LocalFile:
    """A file to upload."""

    name: str  # in the folder, with those of subfolders, and on the Hub
    size: int  # bytes
    sha256: str  # the Hub's hash of a file stored as LFS or Xet
    blob: str  # git's blob id (SHA-1), the Hub's hash of any other file; empty for a shard, which is none


def hashed(folder: Path, name: str) -> LocalFile:
    """A file with its hashes."""
    path = folder / name
    length = path.stat().st_size
    sha256, blob = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % length, usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(CHUNK):
            sha256.update(block)
            blob.update(block)
    return LocalFile(name, length, sha256.hexdigest(), blob.hexdigest())


def written_shard(shard: Shard) -> LocalFile:
    """A shard with the digest with which it was written."""
    return LocalFile(shard.name, shard.digest.bytes, shard.digest.sha256, "")


def compare(repo: str, files: Iterable[LocalFile], on_hub: Mapping[str, HubFile], remedy: str) -> list[str]:
    """Compare files with those on the Hub: by SHA-256 if stored as LFS or Xet, else by git's blob id.

    `HfApi.verify_repo_checksums` compares the same hashes, but of the local files as they are after the upload; these
    are the hashes of the files that were checked.

    Returns the names of other files on the Hub. Raises a QuantizeError if one differs.
    """
    files = list(files)
    different = [file.name for file in files if not _is_same(file, on_hub.get(file.name))]
    if different:
        raise QuantizeError(
            repo,
            "the Hub has other content in "
            f"{', '.join(different[:5])}{f' and {len(different) - 5} more' if len(different) > 5 else ''}",
            remedy,
        )
    return sorted(on_hub.keys() - {file.name for file in files} - {ATTRIBUTES})


def _is_same(file: LocalFile, entry: HubFile | None) -> bool:
    return entry is not None and (entry.size, entry.digest) == (file.size, file.sha256 if entry.sha256 else file.blob)


def require_token() -> None:
    """Raise an InputError if the Hub library has no token that a request can carry."""
    from huggingface_hub import get_token

    token = get_token()
    if token is None:
        raise InputError("", "no Hub token", LOGIN)
    if not (token.isascii() and token.isprintable()):
        raise InputError("", "the Hub token has characters that no token has", LOGIN)


def may_write(account: Mapping[str, Any]) -> bool:
    """Whether a token may write to a repository, by the Hub's answer to whoami; one of chosen rights, to some."""
    token = account.get("auth", {}).get("accessToken", {})
    if token.get("role") == "fineGrained":
        scopes = token.get("fineGrained", {}).get("scoped", [])
        return any("repo.write" in scope.get("permissions", ()) for scope in scopes)
    return bool(token.get("role") != "read")


def is_to_be_made(repo: str, *, ours: bool) -> bool:
    """Whether there is no such repository yet; nothing is changed.

    Args:
        ours: whether what lies there is of the run that asks.

    Raises:
        InputError: no token, or one without write access; the repository is public, or, unless `ours`, holds files.
        QuantizeError: the Hub does not answer.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    require_token()
    with upload_errors(repo):
        try:
            info = HfApi().model_info(repo)
        except RepositoryNotFoundError:
            if not may_write(HfApi().whoami()):
                raise InputError(repo, "this token may only read", LOGIN) from None
            return True
    if not info.private:
        raise InputError(
            repo,
            "is public, and nothing of a run is to be public before its proof",
            f"make it private{' again' if ours else ', or name a new repository'}",
        )
    others = sorted({sibling.rfilename for sibling in info.siblings or ()} - {ATTRIBUTES})
    if others and not ours:
        raise InputError(
            repo,
            f"has {others[0]}{f' and {len(others) - 1} more files' if len(others) > 1 else ''}, which this run did "
            "not upload",
            "name a new repository, or delete this one",
        )
    with upload_errors(repo, "name another repository"):
        HfApi().auth_check(repo, write=True)
    return False


def refuse_card(repo: str, text: str) -> None:
    """Raise an InputError if the Hub would not take a model card, which it looks at when the card is committed."""
    from huggingface_hub import constants, get_session, hf_raise_for_status
    from huggingface_hub.utils import build_hf_headers

    with upload_errors(repo):  # RepoCard.validate asks huggingface.co, whatever HF_ENDPOINT says
        url, asked = f"{constants.ENDPOINT}/api/validate-yaml", {"content": text, "repoType": "model"}
        answer = get_session().post(url, json=asked, headers=build_hf_headers())
        if answer.status_code != 400:
            hf_raise_for_status(answer)
            return
        errors = [error["message"] for error in answer.json()["errors"]]
    if errors:
        raise InputError(
            repo,
            f"the Hub refuses the card's front matter ({errors[0]})",
            "leave --publish-as-you-go out, and give `quantize publish` --license or --base-model",
        )


class HereOrHub(HubFiles):
    """The shards of a folder of which some are on the Hub alone."""

    def header(self, file: Path) -> dict[str, TensorInfo]:
        """As `HubFiles.header`."""
        return read_header(file) if file.is_file() else super().header(file)

    def read_into(
        self, wanted: Iterable[tuple[TensorInfo, memoryview]], stop: Event | None = None
    ) -> Iterator[TensorInfo]:
        """As `HubFiles.read_into`."""
        for file, of_file in groupby(wanted, lambda pair: pair[0].file):
            read = read_into if file.is_file() else super().read_into
            yield from read(of_file)


class Uploads:
    """The uploads of a run: a thread sends what is finished, several files in one commit if they have piled up.

    What fails in the thread is raised by the next call of `put` or `wait`, and the same command then goes on. The
    process ends without waiting for the thread.

    Args:
        work: the run's work folder.
        most: shards that may wait while the run goes on, and are removed once they are on the Hub; None to keep all.
        is_new: whether the repository is to be made.

    Attributes:
        there: the Hub's files of the run's last commit, and those of the output that are here; what the thread may be
            sending is not to be read.
        shards: finished shards that are on the Hub, compared by hash: they may be missing here.
    """

    def __init__(self, work: Path, repo: str, *, most: int | None, is_new: bool) -> None:
        self.repo = repo
        self._most = most
        self._is_new = is_new
        self.there, self.shards = HereOrHub(repo, "main", {}), set[str]()
        self._work, self._state = work, journal.uploads(work)
        self._waiting: dict[str, LocalFile] = {}
        self._turn, self._ended = Condition(), Event()
        self._failure: BaseException | None = None

    @property
    def url(self) -> str:
        """URL of the repository."""
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{self.repo}"

    @property
    def stays_private(self) -> bool:
        """Whether the repository is not this run's own: it existed before."""
        return not self._state["created"]

    @property
    def proven(self) -> bool:
        """Whether `finish` has come to its end."""
        return bool(self._state.get("proven"))

    def begin(self) -> None:
        """Create the repository, private, if there is none; look which shards it has; start the thread."""
        from huggingface_hub import HfApi

        before = self._state
        known = before.get("repo") == self.repo
        # First: otherwise a kill would leave a repository of which nobody knows whose it is.
        self._note({"repo": self.repo, "created": before["created"] if known else self._is_new})
        with upload_errors(self.repo, "name another repository"):
            if self._is_new:
                try:
                    HfApi().create_repo(self.repo, private=True)
                except Exception as failure:
                    # Else it may be there, and only the answer is lost. A private one is hidden from another token.
                    if not is_transient(failure):
                        self._note(before)
                    raise
            self._list()
        on_hub = {name: file.sha256 for name, file in self.there.files.items()}
        self.shards = {
            name for name, digest in journal.digests(self._work).items() if on_hub.get(name) == digest.sha256
        }
        Thread(target=self._run, daemon=True).start()

    @property
    def removed_bytes(self) -> int:
        """Bytes of the shards that are on the Hub, and not here."""
        folder = self._work / "output"
        return sum(self.there.files[name].size for name in self.shards if not (folder / name).exists())

    def put(self, shard: LocalFile, check: Callable[[], None]) -> None:
        """Let a finished shard be uploaded. If shards are removed, this waits while too many of them are here.

        Args:
            check: called again and again; may raise to interrupt.
        """
        with self._turn:
            if shard.name in self.shards:
                self._remove(shard)
            else:
                self._waiting[shard.name] = shard
            self._turn.notify_all()
        self.wait(check, sys.maxsize if self._most is None else self._most)

    def wait(self, check: Callable[[], None], most: int = 0) -> None:
        """Wait until at most so many files are not on the Hub yet."""
        printed = time.monotonic()
        while True:
            check()
            with self._turn:
                if self._failure:
                    raise self._failure
                waiting = len(self._waiting)
                if waiting > most:
                    self._turn.wait(POLL)
            if waiting <= most:
                return
            if time.monotonic() - printed > LINES:
                printed = time.monotonic()
                print(f"waiting for {waiting} files to be uploaded to {self.repo}", file=sys.stderr, flush=True)

    def make_room(self, check: Callable[[], None]) -> None:
        """Wait for all uploads, if shards are removed."""
        if self._most is not None:
            self.wait(check)

    def settle(self, check: Callable[[], None]) -> HubFiles:
        """Wait for all files, and ask the Hub for what it has now."""
        self.wait(check)
        with upload_errors(self.repo):
            self._list()
        return self.there

    def finish(self, files: Sequence[LocalFile], shards: Sequence[LocalFile], check: Callable[[], None]) -> None:
        """Upload the rest of a proven output, and compare all its files."""
        with self._turn:
            self._waiting |= {file.name: file for file in files}
            self._turn.notify_all()
        self.settle(check)
        compare(self.repo, [*files, *shards], self.there.files, AGAIN)
        self._note(self._state | {"proven": sorted(file.name for file in (*files, *shards))})

    def others(self) -> list[str]:
        """Files that the Hub has now beside those of the proven output."""
        with upload_errors(self.repo):
            self._list()
        return sorted(self.there.files.keys() - {*self._state["proven"], ATTRIBUTES})

    def make_public(self) -> None:
        """Let everybody see the repository."""
        from huggingface_hub import HfApi

        with upload_errors(self.repo, "add --private, and make it public on the Hub"):
            HfApi().update_repo_settings(self.repo, private=False)

    def close(self) -> None:
        """Let the thread end, and remove nothing more; what it is sending is not waited for."""
        with self._turn:
            self._ended.set()
            self._turn.notify_all()

    def _run(self) -> None:
        try:
            while True:
                with self._turn:
                    self._turn.wait_for(lambda: self._waiting or self._ended.is_set())
                    if self._ended.is_set():
                        return
                    files = list(self._waiting.values())
                new = [file.name for file in files if not _is_same(file, self.there.files.get(file.name))]
                if new:
                    retried(partial(self._send, new), self._ended)
                compare(self.repo, files, self.there.files, AGAIN)
                with self._turn:
                    if self._ended.is_set():
                        return
                    for file in files:
                        if not file.blob:
                            self.shards.add(file.name)
                            self._remove(file)
                        del self._waiting[file.name]
                    self._turn.notify_all()
        except BaseException as failure:  # for the run's own thread; a panic of the library is no Exception
            with self._turn:
                self._failure = failure
                self._turn.notify_all()

    def _send(self, names: Sequence[str]) -> None:
        from huggingface_hub import CommitOperationAdd, HfApi

        api, additions = HfApi(), []
        with upload_errors(self.repo):
            for name in names:
                addition = CommitOperationAdd(name, self._work / "output" / name)
                # One at a time: for several the library starts threads, for which an interrupted process would wait.
                api.preupload_lfs_files(self.repo, [addition])
                additions.append(addition)
            self.there.commit = api.create_commit(self.repo, additions, commit_message=MESSAGE).oid
            self.there.files |= by_name(api.get_paths_info(self.repo, list(names), revision=self.there.commit))

    def _list(self) -> None:
        self.there = HereOrHub(self.repo, *files_of(self.repo, "main"))

    def _note(self, state: dict[str, Any]) -> None:
        self._state = state
        write_json(self._work / journal.UPLOADED, state)

    def _remove(self, file: LocalFile) -> None:
        path = self._work / "output" / file.name
        if self._most is not None:
            with disk_errors(path):
                path.unlink(missing_ok=True)
