"""The line with which a run begins: what, how big, to where, on what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantizers.planning.job import Job
from quantizers.system.formatting import short_path, size

from .options import Options

if TYPE_CHECKING:
    import torch


def opening_line(job: Job, options: Options, model: str, counts: tuple[int, int], done: int) -> str:
    """One line for standard error.

    How long it takes is not in it: the rates of `plan` are not this machine's, and on a CPU they are off by an order of
    magnitude. After the first layer the progress says what is left, measured.

    Args:
        model: the source's published name.
        counts: tokens of the calibration set, and of the held-out texts.
        done: layers that earlier calls finished.
    """
    tokens, held_out = counts
    layers, dense = job.sizes["layers"], len(job.sizes.dense)
    source = sum(action.spec.bytes for action in job.plan.actions)
    routed = f"{layers - dense} of {layers} layers" if dense else f"{layers} layer{'s' if layers > 1 else ''}"
    texts = f" and {held_out:,} held-out" if held_out else ""
    resuming = f"; resuming after layer {done} of {layers}" if done else ""
    return (
        f"{model} ({size(source)}, {routed} × {job.sizes['experts']} experts) → {short_path(options.output)} on "
        f"{_machine(options.device, options.dist.world_size)}; {tokens:,} calibration{texts} tokens{resuming}"
    )


def _machine(device: torch.device, processes: int) -> str:
    import torch

    if device.type == "cpu":
        threads = torch.get_num_threads()
        name = f"cpu, {threads} thread{'s' if threads > 1 else ''}"
    else:
        name = f"{device} ({torch.cuda.get_device_name(device)})"
    return name if processes == 1 else f"{name}, one of {processes} processes"
