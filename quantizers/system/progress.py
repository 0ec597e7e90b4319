"""Progress of long work, on stderr: a bar with an estimate on a terminal, plain lines elsewhere."""

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
PATIENCE = 90.0  # seconds without a line before a phase within a step is worth one, where there is no terminal
WIDEST = len("calibration pass")  # of the phases, so that what stands behind them does not jump
_watching: list[Step] = []  # what shows the phases of the innermost progress of this process


def duration(seconds: float) -> str:
    """`2 h 05 min`, `3 min 20 s` or `12 s`."""
    whole = round(seconds)
    hours, minutes, left = whole // 3600, whole % 3600 // 60, whole % 60
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {left:02d} s" if minutes else f"{left} s"


def checked(step: Step, check: Callable[[], None]) -> Step:
    """`step`, with a call of `check` before it, which may raise to interrupt."""

    def both(note: str) -> None:
        check()
        step(note)

    return both


def doing(phase: str) -> None:
    """Say what the step is at now, such as `rounding`; it costs a comparison where nothing new is said.

    Only the thread that shows the progress may call it.
    """
    if _watching:
        _watching[-1](phase)


@contextlib.contextmanager
def progress(title: str, total: int, done: int = 0, unit: str = "", *, trusted: int = 3) -> Iterator[Step]:
    """Yield a function to call after each of `total` steps with a short note about the step.

    Within a step `doing` says its phases: on a terminal at once, elsewhere in a line where there was none for a while.

    Args:
        title: the name of the work.
        done: steps that an earlier run completed; the time estimate ignores them.
        unit: the word for one step, for the plain lines.
        trusted: steps after which the time of those that are left is estimated, without a terminal.
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
            TextColumn("{task.fields[phase]}{task.fields[note]}"),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task, latest = bar.add_task(title, total=total, completed=done, note="", phase=""), ""

            def show(phase: str) -> None:
                nonlocal latest
                if phase != latest:
                    latest = phase
                    bar.update(task, phase=f"{phase:<{WIDEST}} ")

            with _shows_phases(show):
                yield lambda note: bar.update(task, advance=1, note=f"last: {note}" if latest else note)
        return
    started, last, count = time.monotonic(), 0.0, done
    spoken = started

    def line(note: str) -> None:
        nonlocal last, spoken, count
        count += 1
        now = time.monotonic()
        if count < total and now - last < 5.0:
            return  # at most one line every five seconds; the last step always prints
        last, spoken, steps = now, now, count - done
        known = steps >= trusted and count < total
        left = f", {duration((now - started) / steps * (total - count))} left" if known else ""
        print(f"{title}: {unit}{' ' if unit else ''}{count} of {total}{left}  {note}", file=sys.stderr, flush=True)

    def phase_line(phase: str) -> None:
        nonlocal spoken
        now = time.monotonic()
        if now - spoken >= PATIENCE:
            spoken = now
            print(f"{title}: {unit}{' ' if unit else ''}{count + 1} of {total}: {phase}", file=sys.stderr, flush=True)

    with _shows_phases(phase_line):
        yield line


@contextlib.contextmanager
def _shows_phases(show: Step) -> Iterator[None]:
    _watching.append(show)
    try:
        yield
    finally:
        _watching.remove(show)


def forecast(layers: int) -> Callable[[dict[str, Any]], None]:
    """A function to call with the journal entry of each finished layer of so many.

    At the first one with experts it says on stderr how long the layers after it will take, if each takes as long.
    """
    said = False

    def line(entry: dict[str, Any]) -> None:
        nonlocal said
        left = layers - entry["layer"] - 1
        if entry["routed"] and not said and left:
            said = True
            about = duration(left * sum(entry["seconds"].values()))
            more = f"{left} more layer{'s' if left > 1 else ''}"
            print(f"forecast from layer {entry['layer']}: about {about} for {more}", file=sys.stderr, flush=True)

    return line


def layer_line(entry: dict[str, Any]) -> str:
    """The log line of one layer: seconds by phase, errors, what the held-out set says, fallbacks, peak memory.

    Args:
        entry: the layer's journal entry.
    """
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in entry["seconds"].items())
    errors = ", ".join(f"{name} {'infinite' if e is None else f'{e:.4g}'}" for name, e in entry["error"].items())
    held_out = entry.get("held_out")
    if held_out:
        errors += f"; hidden error {held_out['hidden_error']:.4g}"
        if held_out["agreement"] is not None:  # as in a layer without experts
            errors += f", router agreement {held_out['agreement']:.4g}"
    return (
        f"layer {entry['layer']}: {sum(entry['seconds'].values()):.1f} s ({phases}); {errors}; "
        f"{len(entry['fallbacks'])} fallbacks; peak memory {entry['peak_memory_bytes'] / 1e9:.2f} GB"
    )


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes so far: resident memory of this process, or allocated memory on a GPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
