"""Room on the disk: what a run will write, at its fullest moment."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from quantizers.checkpoint.reader import side_files
from quantizers.plan.job import Job
from quantizers.plan.summary import summary


def disk_needed(job: Job, tokens: int, held_out: int, itemsize: int, data: Collection[Path] = ()) -> int:
    """Bytes of the output with its side files and data, and of the hidden states when they are most.

    While layers are solved, states lie there before and after the layer and at its experts; while source
    and output are measured, of each before and after.
    """
    output = int(str(summary(job.plan, job.sizes)["output_bytes"]))
    output += sum(file.stat().st_size for file in side_files(job.opened.folder))
    output += sum(file.stat().st_size for file in data)
    row = itemsize * job.sizes["hidden"]
    return output + max(tokens * (3 * row + 8 * job.sizes["chosen"]), held_out * 4 * row)


def handed_over(job: Job) -> int:
    """Bytes of one layer's codes (int8) and scales (bfloat16), which several processes hand each other as files."""
    sizes, group = job.sizes, min(scheme.group_size for scheme in job.plan.schemes)
    return 3 * sizes["experts"] * sizes["hidden"] * sizes["width"] * (group + 2) // group
