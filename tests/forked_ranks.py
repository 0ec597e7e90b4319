"""Runs of several processes, forked from one that has imported everything; stands in for torchrun.

    python tests/forked_ranks.py RECIPE FOLDER

Makes FOLDER/one in its own process. Then FOLDER/two and FOLDER/four with so many; FOLDER/cut-0 and
FOLDER/cut-2 with three, of which the one of that number is killed in the middle, and which go on with
one process and with two. What a group says goes to FOLDER/NAME.log. Prints, as JSON, exit codes and
how many layers were done. Unlike torchrun it signals nobody: that a process has died, the others must
notice themselves.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

import torch
from forked_runs import quantize
from torch.distributed import TCPStore

from quantizers.run import quantized

stores: list[TCPStore] = []  # one for each group, kept as torchrun keeps it


def die_in_the_second_layer() -> None:
    """Let this process kill itself as it begins to solve one, while the others are in the same layer."""
    real, layers = quantized.solve_layer, iter(range(1_000_000))

    def die(*arguments: Any, **named: Any) -> Any:
        if next(layers) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)

    quantized.solve_layer = die


def start(recipe: str, output: Path, log: Path, count: int, victim: int | None = None) -> list[int]:
    """The process numbers of `count` forked ranks, of which one may die."""
    stores.append(TCPStore("localhost", 0, None, True, wait_for_workers=False))
    os.environ["MASTER_PORT"] = str(stores[-1].port)
    children = []
    for rank in range(count):
        child = os.fork()
        if not child:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
            with log.open("a") as stream:
                os.dup2(stream.fileno(), 1)
                os.dup2(stream.fileno(), 2)
            if rank == victim:
                die_in_the_second_layer()
            os._exit(quantize(recipe, output))
        children.append(child)
    return children


def ends(children: list[int]) -> list[int]:
    """How they ended: exit codes, or minus the signal."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main(recipe: str, folder: Path) -> dict[str, object]:
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nothing:
        sys.stdout, before = nothing, sys.stdout
        assert quantize(recipe, folder / "one") == 0
        sys.stdout = before
    result: dict[str, object] = {}
    for name, count in (("two", 2), ("four", 4)):
        result[name] = ends(start(recipe, folder / name, folder / f"{name}.log", count))
    for victim, count in ((0, 1), (2, 2)):
        name = f"cut-{victim}"
        output, log = folder / name, folder / f"{name}.log"
        result[name] = ends(start(recipe, output, log, 3, victim))
        result[f"{name} layers"] = len(list((output / ".quantize" / "layers").glob("*.json")))
        result[f"{name} again"] = ends(start(recipe, output, folder / f"{name}-again.log", count))
    return result


if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "localhost", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
