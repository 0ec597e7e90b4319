"""Runs that are killed at random moments, forked from a process that has imported everything.

    python tests/forked_runs.py RECIPE FOLDER SIGNAL KILLS SEED

The parent makes FOLDER/whole in its own process, unbroken, which also loads whatever is imported late.
Then it starts runs into FOLDER/0, FOLDER/1, …, sends each the signal at a random moment, and starts
the same command again until it finishes, however often that takes. Prints, as JSON, how each run ended
and the output folders. Forking is sound here: one thread, and those of a finished run have ended.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

import torch

from quantizers.cli import main as cli


def quantize(recipe: str, output: Path) -> int:
    """`quantize run` in this process; its exit code."""
    sys.argv = ["quantize", "run", recipe, "--output", str(output), "--device", "cpu"]
    try:
        cli.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    raise AssertionError("main() always exits")


def start(recipe: str, output: Path, log: Path) -> int:
    """A forked run. SIGTERM is blocked until its handler is there, so that none arrives in between."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        return child
    app = cli.app

    def unblocked(**named: object) -> object:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        return app(**named)

    cli.app = unblocked  # type: ignore[assignment]  # in the child alone, which never returns
    with log.open("a") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os._exit(quantize(recipe, output))


def main(recipe: str, folder: Path, number: signal.Signals, kills: int, seed: int) -> dict[str, object]:
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nothing:
        sys.stdout, before = nothing, sys.stdout
        assert quantize(recipe, folder / "whole") == 0
        sys.stdout = before
    began = time.monotonic()
    os.waitpid(start(recipe, folder / "again", folder / "again.log"), 0)
    seconds = time.monotonic() - began
    moments = random.Random(seed)
    ended: list[int] = []  # how each signalled run ended: its exit code, or minus the signal
    outputs = ["again"]
    while len(ended) < kills:
        name = str(len(outputs) - 1)
        child = start(recipe, folder / name, folder / f"{name}.log")
        time.sleep(moments.uniform(0.0, seconds))
        if os.waitpid(child, os.WNOHANG)[0] == 0:
            os.kill(child, number)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code == 0 and number is signal.SIGKILL:  # it was on its way out already
                outputs.append(name)
            else:
                ended.append(code)
        else:
            outputs.append(name)
    name = str(len(outputs) - 1)
    last = os.waitstatus_to_exitcode(os.waitpid(start(recipe, folder / name, folder / f"{name}.log"), 0)[1])
    return {"ended": ended, "outputs": [*outputs, name], "last": last, "seconds": seconds}


if __name__ == "__main__":
    recipe, folder, name, kills, seed = sys.argv[1:]
    print(json.dumps(main(recipe, Path(folder), signal.Signals[name], int(kills), int(seed))))
