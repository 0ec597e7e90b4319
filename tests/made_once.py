"""What takes long to make is made by one of the processes that run tests, for all of them."""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # programs that tests start import this file too
    import pytest

Result = TypeVar("Result")


def common_folder(folders: pytest.TempPathFactory) -> Path:
    """The folder of this session of tests, which all its processes see."""
    own = folders.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def write_whole(file: Path, content: bytes) -> None:
    """A file that other processes see complete or not at all."""
    own = file.with_name(f"{file.name}.{os.getpid()}")
    own.write_bytes(content)
    own.replace(file)


def made_once(folders: pytest.TempPathFactory, name: str, make: Callable[[Path], Result]) -> Result:
    """What `make(folder)` returned to the first process that asked; the others wait for it and read it.

    Nobody may change the folder, which has this name. What is returned goes through pickle.
    """
    folder = common_folder(folders) / f"once-{name}"
    answer = folder.with_suffix(".pickle")
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not answer.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a process that failed in it
            folder.mkdir()
            answer.write_bytes(pickle.dumps(make(folder)))
    result: Result = pickle.loads(answer.read_bytes())
    return result
