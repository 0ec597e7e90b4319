"""Memory that all processes of a machine see: what one of them reads or computes need not lie there once for each."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from quantizers.system.files import disk_errors

from .team import Team


@contextlib.contextmanager
def shared_memory(here: Team, size: int) -> Iterator[Path]:
    """A file in memory, full of zeros, that all processes of a machine can map within the block.

    It has no name on any disk, and is freed when the last mapping of it has ended, however the processes end. (What
    lies below /dev/shm stays after a kill, and is 64 MB in many containers.)

    Args:
        here: the processes of this machine.
        size: in bytes, more than 0.

    Raises:
        QuantizeError: there is not so much memory.
    """
    if not here.leads:
        yield Path(here.tell())
        here.barrier()
        return
    handle = os.memfd_create("quantize", os.MFD_CLOEXEC)
    try:
        path = Path(f"/proc/{os.getpid()}/fd/{handle}")
        with disk_errors(path):
            os.posix_fallocate(handle, 0, size)
        yield Path(here.tell(str(path)))
        here.barrier()  # all have mapped it
    finally:
        os.close(handle)
