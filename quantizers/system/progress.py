"""Progress of long work, on stderr: a bar with an estimate on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Step = Callable[[str], None]
LINES = 5.0  # seconds between two lines, at least
PATIENCE = 90.0  # seconds without a line before a phase within a step gets one
WIDEST = len("calibration pass")  # phases are padded to this width
_phases: list[Step] = []  # functions that show a phase, of the innermost progress of this process last


def duration(seconds: float) -> str:
    """`2 h 05 min`, `3 min 20 s` or `12 s`."""
    whole = round(seconds)
    hours = whole // 3600
    minutes = whole % 3600 // 60
    left = whole % 60
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {left:02d} s" if minutes else f"{left} s"


def doing(phase: str) -> None:
    """Show the phase of the current step, such as `rounding`: on a terminal at once, elsewhere after PATIENCE.

    Only for the thread that shows the progress.
    """
    if _phases:
        _phases[-1](phase)


@contextlib.contextmanager
def progress(
    title: str,
    total: int,
    done: int = 0,
    unit: str = "",
    *,
    check: Callable[[], None] = lambda: None,
    trusted: int = 3,
    kept: bool = False,
    silent: bool = False,
) -> Iterator[Step]:
    """Yield a function to call after each of `total` steps with a short note about the step.

    Args:
        done: steps that an earlier run completed; the time estimate ignores them.
        unit: the word for one step, for the plain lines.
        check: called before each step is shown; may raise to interrupt.
        trusted: steps after which plain lines estimate the remaining time.
        kept: whether a terminal keeps each note, as a line above the bar; else the bar shows the last one.
        silent: show nothing.
    """
    if silent:
        yield lambda _: check()
        return
    shown = (
        _bar(title, total, done, f"{unit} " if kept else None)
        if sys.stderr.isatty()
        else _lines(title, total, done, unit, trusted)
    )
    with shown as (step, phase):
        _phases.append(phase)

        def checked(note: str) -> None:
            check()
            step(note)

        try:
            yield checked
        finally:
            _phases.remove(phase)


@contextlib.contextmanager
def _bar(title: str, total: int, done: int, kept: str | None) -> Iterator[tuple[Step, Step]]:
    """`kept`: what stands before the number in the line of a step; None if steps have none."""
    from rich import progress as rich
    from rich.console import Console
    from rich.table import Column

    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # what is left of the line; others keep their widths
    columns = (
        rich.TextColumn("{task.description:<12}"),
        rich.BarColumn(20),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TextColumn("left"),
        rich.TimeRemainingColumn(),
        rich.TextColumn("{task.fields[phase]}{task.fields[note]}", markup=False, table_column=rest),
    )
    with rich.Progress(*columns, console=Console(stderr=True), expand=True) as bar:
        task = bar.add_task(title, total=total, completed=done, note="", phase="")

        def step(note: str) -> None:
            bar.update(task, advance=1, note="" if kept is not None else f"last: {note}")
            if kept is not None:
                line = f"{title}: {kept}{bar.tasks[0].completed:.0f} of {total}  {note}"
                bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

        yield step, lambda phase: bar.update(task, phase=f"{phase:<{WIDEST}} ")


@contextlib.contextmanager
def _lines(title: str, total: int, done: int, unit: str, trusted: int) -> Iterator[tuple[Step, Step]]:
    started = latest = time.monotonic()  # of the last line
    count, stepped = done, 0.0  # stepped: when the last step had a line

    def line(number: int, rest: str) -> None:
        nonlocal latest
        latest = time.monotonic()
        print(f"{title}: {unit}{' ' if unit else ''}{number} of {total}{rest}", file=sys.stderr, flush=True)

    def step(note: str) -> None:
        nonlocal count, stepped
        count += 1
        now = time.monotonic()
        if count < total and now - stepped < LINES:
            return
        stepped, steps = now, count - done
        known = steps >= trusted and count < total
        left = f", {duration((now - started) / steps * (total - count))} left" if known else ""
        line(count, f"{left}  {note}")

    def phase(name: str) -> None:
        if time.monotonic() - latest >= PATIENCE:
            line(count + 1, f": {name}")

    yield step, phase


def forecast(layers: int) -> Callable[[int, float, bool], None]:
    """A function of a layer's number, its seconds and whether it has experts.

    At the first that has, it prints how long the rest takes.
    """
    printed = False

    def show(layer: int, seconds: float, experts: bool) -> None:
        nonlocal printed
        left = layers - layer - 1
        if experts and not printed and left:
            printed = True
            more = f"{left} more layer{'s' if left > 1 else ''}"
            print(
                f"forecast from layer {layer}: about {duration(left * seconds)} for {more}", file=sys.stderr, flush=True
            )

    return show


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes so far: resident memory of this process, or allocated memory on a GPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
