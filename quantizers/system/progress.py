"""How far long work has come: a bar with an estimate on a terminal, plain lines elsewhere. To stderr."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Step = Callable[[str], None]


def duration(seconds: float) -> str:
    """`2 h 05 min`, `3 min 20 s` or `12 s`."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


@contextlib.contextmanager
def progress(title: str, total: int, done: int = 0, unit: str = "") -> Iterator[Step]:
    """Yield a function that is called after each of `total` steps with a few words about it.

    Args:
        title: what is being done.
        done: steps that an earlier run did; they do not count for the estimate.
        unit: what one step is, for the lines.
    """
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description:<12}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(title, total=total, completed=done, note="")
            yield lambda note: bar.update(task, advance=1, note=note)
        return
    started, last, count = time.monotonic(), 0.0, done

    def line(note: str) -> None:
        nonlocal last, count
        count += 1
        now = time.monotonic()
        if count < total and now - last < 5.0:
            return  # at most a line every five seconds, and the last one
        last, fresh = now, count - done
        left = f", {duration((now - started) / fresh * (total - count))} left" if fresh >= 3 and count < total else ""
        print(f"{title}: {unit}{' ' if unit else ''}{count} of {total}{left}  {note}", file=sys.stderr, flush=True)

    yield line


def layer_line(entry: dict[str, Any]) -> str:
    """One layer in a line of numbers, for the log: seconds by phase, errors, fallbacks, memory.

    Args:
        entry: the layer's journal entry.
    """
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in entry["seconds"].items())
    errors = ", ".join(f"{name} {'infinite' if e is None else f'{e:.4g}'}" for name, e in entry["error"].items())
    return (
        f"layer {entry['layer']}: {sum(entry['seconds'].values()):.1f} s ({phases}); {errors}; "
        f"{len(entry['fallbacks'])} fallbacks; peak memory {entry['peak_memory_bytes'] / 1e9:.2f} GB"
    )


def peak_memory(device: torch.device) -> int:
    """Largest resident memory of this process so far, in bytes; the device's on an accelerator."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
