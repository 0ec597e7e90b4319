"""Runs that are killed at seeded moments, forked from a process that has imported everything.

    python tests/forked_runs.py RECIPE FOLDER SIGNAL KILLS SEED [OPTION…]

The parent makes FOLDER/whole in its own process, unbroken, which also loads whatever is imported late.
Then it starts runs into FOLDER/0, FOLDER/1, …, each of which gets the signal at a moment drawn from the
seed, and starts the same command again until it finishes, however often that takes. Prints, as JSON, how
each run ended and the output folders. Forking is sound here: one thread, and those of a finished run have
ended.

A moment is a call from the program's own code or a return to it, not a time: it lies at the same place
on a fast machine and on a slow one. Between any two writes there are some; what libraries do among
themselves, which is most of all calls and mostly drawing, does not count.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from types import FrameType

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from forking import quantize

import quantizers
from quantizers.cli import main as cli

OPTIONS = sys.argv[6:]
MOMENTS = ".moments"  # suffix of the file with their number
OWN = os.path.dirname(str(quantizers.__file__)) + os.sep


def run(recipe: str, output: Path) -> int:
    """`quantize run` in this process; its exit code."""
    return quantize("run", recipe, "--output", output, "--device", "cpu", *OPTIONS)


def start(recipe: str, output: Path, log: Path, number: signal.Signals | None = None, moment: int = 0) -> int:
    """A forked run that gets the signal at its moment; without one it leaves how many it had in MOMENTS.

    SIGTERM is blocked until its handler is there, so that none arrives in between.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        return child
    app = cli.app

    def unblocked(**named: object) -> object:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        return app(**named)

    vars(cli)["app"] = unblocked  # in the child alone, which never returns
    with log.open("a") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    moments = 0

    def count(frame: FrameType, _event: str, _what: object) -> None:
        nonlocal moments
        if frame.f_code.co_filename.startswith(OWN):
            moments += 1
            if moments == moment and number:
                os.kill(os.getpid(), number)

    sys.setprofile(count)
    code = run(recipe, output)
    sys.setprofile(None)
    if not number:
        log.with_suffix(MOMENTS).write_text(str(moments))
    os._exit(code)


def ended(child: int) -> int:
    """How it ended: its exit code, or minus the signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(recipe: str, folder: Path, number: signal.Signals, kills: int, seed: int) -> dict[str, object]:
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nothing:
        sys.stdout, before = nothing, sys.stdout
        assert run(recipe, folder / "whole") == 0
        sys.stdout = before
    ended(start(recipe, folder / "again", folder / "again.log"))
    most = int((folder / "again").with_suffix(MOMENTS).read_text())
    chance = random.Random(seed)
    codes: list[int] = []  # of the runs that the signal ended
    outputs = ["again"]
    while len(codes) < kills:
        name = str(len(outputs) - 1)
        moment = chance.randint(1, most)
        code = ended(start(recipe, folder / name, folder / f"{name}.log", number, moment))
        if code:
            codes.append(code)
        else:  # what was left of it had fewer moments, or after this one nothing that could be stopped
            outputs.append(name)
    name = str(len(outputs) - 1)
    last = ended(start(recipe, folder / name, folder / f"{name}.log"))
    return {"ended": codes, "outputs": [*outputs, name], "last": last, "moments": most}


if __name__ == "__main__":
    recipe, folder, name, kills, seed = sys.argv[1:6]
    print(json.dumps(main(recipe, Path(folder), signal.Signals[name], int(kills), int(seed))))
