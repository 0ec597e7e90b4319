"""How much disk space a run needs, beside that for hidden states."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from quantizers.checkpoint.reader import side_files
from quantizers.planning.job import Job
from quantizers.planning.plan import summary


def output_bytes(job: Job, data: Collection[Path] = ()) -> int:
    """Bytes of the output with its side files.

    Args:
        data: data files of the calibration sets to be copied into the output.
    """
    output = int(str(summary(job.plan, job.sizes)["output_bytes"]))
    return output + sum(file.stat().st_size for file in (*side_files(job.opened.folder), *data))
