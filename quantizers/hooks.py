"""Rooms that the core does not import, and what each adds: commands, functions, findings.

Such a room is a folder of the package with a file `hooks.py`. The core finds it by that file and never by its name, so
that without the folder the program does all but what the room adds. The file imports little, and defines some of these:

- `FUNCTIONS`: functions that `import quantizers` offers, each with the module that has it.
- `SEVERAL`: commands that work with several processes, such as `calibration why`.
- `commands(app, calibration)`: adds commands to `quantize` and to `quantize calibration`.
- `check_plan(job, one_expert)`, `check_folder(folder, own, remote)`: findings on who will read an output, before a run
  and of a folder; see `pipeline/consumers.py`. `ask_server(folder, own)`: the same asked of an installed server.
- `how_to_serve(plan, facts, source, name)`: the section `serving` of report.json.
- `fits_on(job, gpus, checked, budget, **options)`: GPUs that an output fits, for `plan --vram`.
- `on_card(report, place)`, `next_commands(report, folder)`, `plan_remarks(numbers)`: what page and model card say of
  servers, and the last lines of `run` and of `plan`.
- `served_model(checkpoint, facts, device, card)`, `kernels_of(model, checkpoint, experts)`: a model as it is computed
  on a kind of card, and by which kernels. `unknown_kernel(plan, card)`: the format of a plan that has none there.
- `imatrix_of_run()`: the work of `run --imatrix` at each layer of the source, see `pipeline/observer.py`.
- `look_at_machine(rows)`: rows of `doctor`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from quantizers.system.errors import InputError


@cache
def rooms() -> tuple[ModuleType, ...]:
    """`hooks.py` of every room that has one, by the rooms' names."""
    files = sorted(Path(__file__).parent.glob("*/hooks.py"))
    return tuple(import_module(f"{__package__}.{file.parent.name}.hooks") for file in files)


def hooks(name: str) -> list[Any]:
    """Return the objects of this name from every `hooks.py` that defines one."""
    return [getattr(room, name) for room in rooms() if hasattr(room, name)]


def hook(name: str) -> Any | None:
    """The function of that name of the first room that defines it; None if none does."""
    return next(iter(hooks(name)), None)


def required(name: str, option: str) -> Any:
    """The function that an option needs. Raises an InputError without its room."""
    function = hook(name)
    if function is None:
        raise InputError(option, "the part of quantize that does this is not installed", "leave the option out")
    return function


def functions() -> dict[str, str]:
    """The functions that rooms add to `import quantizers`, each with the module that has it."""
    return {name: module for added in hooks("FUNCTIONS") for name, module in added.items()}
