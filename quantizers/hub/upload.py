"""Resumable upload to the Hub, and comparison of the Hub's hashes with the local ones.

The Hub library takes the token from its own login or environment. It is masked in every message of the library.
"""

from __future__ import annotations

import glob
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from quantizers.system.errors import InputError, QuantizeError
from quantizers.system.interrupts import handle_signals
from quantizers.system.progress import Step

from .checks import LocalFile

AGAIN = "give the same command again; it resumes the upload"


def upload(
    folder: Path, files: list[LocalFile], repo: str, revision: str, private: bool | None, step: Step = lambda _: None
) -> dict[str, Any]:
    """Create the repository if it is missing, upload the files, and compare the Hub's hashes.

    Args:
        files: from `local_files`.
        revision: a branch; created if it is missing.
        private: visibility of a new repository; None for the account's default.

    Returns:
        The URL, the commit, the uploaded files with their bytes in all, and the `strangers`: files on the Hub that were
        not uploaded from this folder.

    Raises:
        InputError: no token, or one without write access.
        QuantizeError: the Hub cannot be reached, or its files differ afterwards. The same command resumes the upload.
    """
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise InputError("no Hub token; log in with `hf auth login`, or set HF_TOKEN to one with write access")
    api = HfApi()
    with _hub_errors(repo):
        url = str(api.create_repo(repo, private=private, exist_ok=True))
        if revision != "main":
            api.create_branch(repo, branch=revision, exist_ok=True)
        step("uploading")
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            revision=revision,
            allow_patterns=[glob.escape(file.name) for file in files],
            commit_message="Upload with moe-quantizers",
        )
        step("comparing")
        commit = api.model_info(repo, revision=revision).sha or revision
        on_hub = {entry.path: entry for entry in api.list_repo_tree(repo, recursive=True, revision=commit)}
    different = [file.name for file in files if not _same(file, on_hub.get(file.name))]
    if different:
        raise QuantizeError(
            f"{repo}: the Hub has other content in {', '.join(different[:5])}"
            f"{f' and {len(different) - 5} more' if len(different) > 5 else ''}; publish again"
        )
    known = {file.name for file in files} | {".gitattributes"}
    strangers = sorted(path for path, entry in on_hub.items() if path not in known and hasattr(entry, "blob_id"))
    sent = {"files": [vars(file) for file in files], "bytes": sum(file.size for file in files)}
    return {"url": url, "commit": commit, "strangers": strangers} | sent


def _same(file: LocalFile, entry: Any) -> bool:
    """Whether the Hub's entry has this file's content: by SHA-256 if stored as LFS or Xet, else by git blob id.

    `HfApi.verify_repo_checksums` compares the same hashes, but of the local files as they are after the upload; these
    are the hashes of the files that were checked.
    """
    if entry is None or not hasattr(entry, "blob_id") or entry.size != file.size:
        return False
    stored = entry.lfs
    return bool(stored.sha256 == file.sha256 if stored else entry.blob_id == file.blob)


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Within the block the library's exceptions become ours, in one line without the token; signals end the process."""
    from httpx import HTTPError

    def end(number: int, _frame: FrameType | None) -> None:
        os.write(2, f"quantize: {repo}: interrupted while uploading; {AGAIN}\n".encode())
        os._exit(128 + number)  # the library's threads would finish their shards first; nothing is written to disk

    restore = handle_signals(end, signal.SIGINT, signal.SIGTERM)
    try:
        yield
    except (HTTPError, OSError, RuntimeError, ValueError) as failure:
        status = getattr(getattr(failure, "response", None), "status_code", None)
        if status in (401, 403):
            raise InputError(
                f"{repo}: the Hub refuses this token ({status}); log in with `hf auth login` to an account with write "
                "access, or choose another --repo"
            ) from None
        raise QuantizeError(f"{repo}: the upload stopped ({_first_line(failure)}); {AGAIN}") from None
    finally:
        restore()


def _first_line(failure: BaseException) -> str:
    from huggingface_hub import get_token

    line = next(iter(str(failure).strip().splitlines()), "") or type(failure).__name__
    token = get_token()
    return line.replace(token, "***") if token else line
