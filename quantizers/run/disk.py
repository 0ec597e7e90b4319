"""Disk space: how much a run needs at its peak."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from quantizers.checkpoint.reader import side_files
from quantizers.plan.job import Job
from quantizers.plan.summary import summary


def disk_needed(job: Job, tokens: int, held_out: int, itemsize: int, data: Collection[Path] = ()) -> int:
    """Bytes of the output with its side files and data, plus the hidden states at their peak.

    While a layer is solved, the states before it, after it and at its experts are on disk; while source and
    output are measured, the states before and after the layer, for each of the two models.

    Args:
        tokens, held_out: calibration tokens, and tokens that perplexity and KL are measured on.
        itemsize: bytes of one element of a hidden state.
        data: data files of the calibration sets to be copied into the output.
    """
    output = int(str(summary(job.plan, job.sizes)["output_bytes"]))
    output += sum(file.stat().st_size for file in side_files(job.opened.folder))
    output += sum(file.stat().st_size for file in data)
    row = itemsize * job.sizes["hidden"]
    return output + max(tokens * (3 * row + 8 * job.sizes["chosen"]), held_out * 4 * row)


def handed_over(job: Job) -> int:
    """Bytes of one layer's codes (int8) and scales (bfloat16), which ranks pass to each other as files."""
    sizes, group = job.sizes, min(scheme.group_size for scheme in job.plan.schemes)
    return 3 * sizes["experts"] * sizes["hidden"] * sizes["width"] * (group + 2) // group
