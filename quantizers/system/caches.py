"""The user's cache folder, and folders for libraries where the user has none that can be written.

A container whose user id is not in its /etc/passwd (`docker run --user`, OpenShift) has no home, or / as one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from pathlib import Path

# Where triton, torch and matplotlib keep what they compile or find out; where they cannot, they fail or are slow.
COMPILED = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "MPLCONFIGDIR")
DATASETS = ("HF_DATASETS_CACHE", "HF_MODULES_CACHE")  # which `datasets` makes even where it reads what is cached
TEMPORARY = "quantize-caches-"


def user_cache() -> Path | None:
    """XDG_CACHE_HOME, else ~/.cache; None if that neither exists nor can be made. It may be read-only."""
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given)
    home = os.path.expanduser("~")
    folder = os.path.join(home, ".cache")
    return Path(folder) if os.path.isabs(home) and (os.path.isdir(folder) or os.access(home, os.W_OK)) else None


def settle_caches() -> None:
    """Give libraries a temporary folder of this process instead of a folder that is not there or cannot be written.

    They read the environment variables when they are imported.
    """
    cache, names = user_cache(), list[str]()
    if not _writable(os.path.expanduser("~")):
        names += COMPILED
    if hub := os.environ.get("HF_HOME") or (cache and os.path.join(cache, "huggingface")):
        names += () if _writable(hub) else DATASETS
    else:
        names.append("HF_HOME")
    if not names:
        return
    with contextlib.suppress(OSError):  # nowhere to write: what needs no cache still works
        folder = tempfile.mkdtemp(prefix=TEMPORARY)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for name in names:
            os.environ.setdefault(name, os.path.join(folder, name.lower()))


def _writable(folder: str) -> bool:
    """Whether a folder, given by its absolute path, can be written, or made."""
    while os.path.isabs(folder) and not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return os.path.isabs(folder) and os.access(folder, os.W_OK)


def downloads_are_lost() -> bool:
    """Whether what is downloaded from the Hub would be gone at the end of this process."""
    return TEMPORARY in os.environ.get("HF_HOME", "") and "HF_HUB_CACHE" not in os.environ
