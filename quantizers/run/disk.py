"""How much disk space a run needs, beside that for hidden states."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from quantizers.checkpoint.reader import side_files
from quantizers.plan.job import Job
from quantizers.plan.summary import summary


def output_bytes(job: Job, data: Collection[Path] = ()) -> int:
    """Bytes of the output with its side files.

    Args:
        data: data files of the calibration sets to be copied into the output.
    """
    output = int(str(summary(job.plan, job.sizes)["output_bytes"]))
    return output + sum(file.stat().st_size for file in (*side_files(job.opened.folder), *data))


def handed_over(job: Job) -> int:
    """Bytes of one layer's codes (int8) and scales (bfloat16), which ranks pass to each other as files."""
    sizes, group = job.sizes, min(scheme.group_size for scheme in job.plan.schemes)
    return 3 * sizes["experts"] * sizes["hidden"] * sizes["width"] * (group + 2) // group
