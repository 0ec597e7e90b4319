"""A whole run at a published model's real size, from a Hub on this machine to the same Hub, interrupted and resumed.

    python benchmarks/full_size.py minimax-m2.1-fp8-int4 --width-divisor 4 --signals INT@2,KILL@5 --verify
    python benchmarks/full_size.py minimax-m2.1-fp8-int4 --folder /data/full --seconds 480     # again, and it goes on

The source has made-up weights, see made_checkpoint.py, and is never on the disk. The Hub is on the loopback interface,
see full_size_hub.py. Everything is in one folder: the Hub's state and what was uploaded, the output, logs, and the
figures of all calls. What is given after `--` goes to `quantize run`, as `-- --set experts.rounding=nearest`.

The exit code is 75 if the time of --seconds was over before the end: the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from full_size_hub import TOKEN, Hub
from made_checkpoint import made_checkpoint

from quantizers.architectures.architecture import Architecture
from quantizers.planning.job import Job, prepare
from quantizers.system.formatting import parse_bytes, size, text_table
from quantizers.system.shipped import shipped

OWNER = "full-size"
LOOK = 0.2  # seconds between two looks at a process
UNFINISHED = 75  # exit code: the time was over
PR_SET_PDEATHSIG = 1
# What random weights cannot pass.
NO_LIMITS = ("coverage=null", "perplexity.max_increase=null", "perplexity.max_kl=null", "perplexity.max_source=any")
# Runs a module that ends with this process, however that ends: without its Hub it would wait for it for an hour.
MODULE = f"""
import ctypes, runpy, sys
ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {int(signal.SIGKILL)})
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@dataclass
class Run:
    """A run of the program in a folder, as processes of their own, with a Hub.

    Attributes:
        words: arguments of `quantize run` and `quantize plan`: the recipe, and what is set.
        further: arguments of `quantize run` alone.
        window: bytes of the source that lie on the disk; 0 for the smallest that `plan` names.
        until: by time.monotonic(), when the time of this call is over.
    """

    hub: Hub
    folder: Path
    words: Sequence[object]
    further: Sequence[str]
    window: int
    until: float

    @property
    def output(self) -> Path:
        """The folder of the finished checkpoint."""
        return self.folder / "out"

    @property
    def repo(self) -> str:
        """The repository on the Hub to which it is published."""
        return f"{OWNER}/{self.folder.name}"

    @property
    def is_finished(self) -> bool:
        """Whether the output is complete."""
        return (self.output / "config.json").exists()

    def plan(self) -> dict[str, Any]:
        """The answer of `quantize plan --hub`: what the program promises."""
        file, unfinished = self.folder / "plan.json", self.folder / "plan.json.part"
        if not file.exists():
            unfinished.unlink(missing_ok=True)
            if code := self.call("plan", *self.words, "--hub", "--json", log=unfinished):
                sys.exit(self._failed("plan", code))
            unfinished.replace(file)
        promised: dict[str, Any] = json.loads(file.read_text())
        promised["source_ways"][-1]["source"] = self.window or promised["source_ways"][-1]["source"]
        return promised

    def go_on(self, signals: Sequence[str]) -> int:
        """Begin the run, or resume it, until it is finished or the time is over; the exit code of this script."""
        window = self.plan()["source_ways"][-1]["source"]
        words = [*self.words, "--output", self.output, "--stream", "--window", f"{window}B"]
        words += ["--publish-as-you-go", self.repo, "--remove-uploaded", *self.further]
        figures = self.hub.figures
        while not self.is_finished:
            if time.monotonic() > self.until:
                return UNFINISHED
            count = figures.setdefault("signals", 0)
            code = self.call("run", *words, signalled=signals[count] if count < len(signals) else "")
            if code and not figures["processes"][-1]["ended_by"]:
                return self._failed("run", code)
        return 0

    def verify(self) -> int:
        """Bring the shards back from the Hub and verify them against the source there; the exit code."""
        code = self.call("download", self.repo, "--local-dir", self.output, module="huggingface_hub.cli.hf")
        code = code or self.call("verify", self.output, "--stream", "--device", "cpu")
        return self._failed("verify", code) if code else 0

    def _failed(self, name: str, code: int) -> int:
        log = self.folder / f"{name}.log"
        print(f"{log}: ended with {code}\n{''.join(log.read_text().splitlines(True)[-5:])}", file=sys.stderr)
        return 1

    def call(
        self, name: str, *words: object, module: str = "quantizers", log: Path | None = None, signalled: str = ""
    ) -> int:
        """The exit code of a process, looked at until it ends. It gets SIGINT when the time is over.

        Args:
            name: the command, under which its figures are kept, and of its log.
            module: that is run.
            log: the file for its standard output, if that is no log.
            signalled: the signal that it gets as soon as so many layers are done, as INT@2.
        """
        figures, began, read = self.hub.figures, time.monotonic(), self.hub.read()
        wanted, _, layers = signalled.partition("@")
        reason = ""
        with (self.folder / f"{name}.log").open("a") as errors, (log or self.folder / f"{name}.log").open("a") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", MODULE, module, name, *map(str, words)],
                stdout=out,
                stderr=errors,
                env=self._environment(),
            )
            try:
                while process.poll() is None:
                    time.sleep(LOOK)
                    _raise_to(figures, f"peak memory of {name}", _resident(process.pid))
                    if name == "run":  # what is downloaded to be verified is no need of the run
                        _raise_to(figures, "peak disk", _on_disk(self.output))
                    if signalled and not reason and self.layers_done() >= int(layers):
                        reason = f"SIG{wanted}"
                        process.send_signal(getattr(signal, reason))
                        figures["signals"] += 1
                    elif name == "run" and not reason and time.monotonic() > self.until:
                        reason = "the end of the time"
                        process.send_signal(signal.SIGINT)
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
                seconds, (source, output) = time.monotonic() - began, self.hub.read() - read
                ended = {"command": name, "seconds": round(seconds, 1), "exit_code": process.returncode}
                ended |= {"ended_by": reason, "layers_done": self.layers_done()}
                figures.setdefault("processes", []).append(ended | {"source": int(source), "output": int(output)})
                self.hub.save()
        return process.returncode

    def _environment(self) -> dict[str, str]:
        others = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        home = str(self.folder / "home")
        return others | {
            "HF_ENDPOINT": self.hub.stand_in.endpoint,
            "HF_HOME": home,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_TOKEN": TOKEN,
            "XDG_CACHE_HOME": home,
        }

    def layers(self) -> list[dict[str, Any]]:
        """The entries of the layers that are done, of the journal or the report, which has the memory of all."""
        if not self.is_finished:
            return [json.loads(file.read_text()) for file in self._journal()]
        made = json.loads((self.output / "report.json").read_text())
        return [entry | {"peak_memory_bytes": made["peak_memory_bytes"]} for entry in made["layers"]]

    def layers_done(self) -> int:
        """How many layers are done."""
        return len(self.layers()) if self.is_finished else len(self._journal())

    def _journal(self) -> list[Path]:
        return sorted((self.output / ".quantize" / "layers").glob("*.json"))


def _raise_to(figures: dict[str, Any], name: str, value: int) -> None:
    figures[name] = max(figures.get(name, 0), value)


def _resident(process: int) -> int:
    """Peak resident memory of a process in bytes; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def _on_disk(folder: Path) -> int:
    """Bytes of all files in a folder, as far as they take room; files come and go meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += 512 * os.stat(os.path.join(place, name)).st_blocks
            except FileNotFoundError:
                continue
    return total


def held_out_set(folder: Path, texts: int) -> Path:
    """Write a held-out set of a few of the shipped texts."""
    source = {
        "dataset": str(shipped("calibration") / "embedded" / "held-out-code.jsonl"),
        "columns": ["prompt", "answer"],
        "shape": "prompt-answer",
        "samples": texts,
        "category": "code",
    }
    file = folder / "held-out.yaml"
    file.write_text(json.dumps({"name": "held-out", "sequence_length": 256, "sources": [source]}))  # which is YAML
    return file


def report(run: Run, name: str, facts: Architecture) -> dict[str, Any]:
    """All figures of a run so far, beside what `quantize plan` promised."""
    figures, promised, layers = run.hub.figures, run.plan(), run.layers()
    seconds: Counter[str] = Counter()
    for entry in layers:
        seconds.update(entry["seconds"])
    way = promised["source_ways"][-1]
    runs = [process for process in figures["processes"] if process["command"] == "run"]
    return {
        "model": name,
        "sizes": {word: size_of.value for word, size_of in facts.sizes.items()},
        "source_bytes": promised["source_bytes"],
        "output_bytes": promised["output_bytes"],
        "layers": [len(layers), promised["layers"]],
        "layer_seconds": sum(seconds.values()) / max(len(layers), 1),
        "phases": {phase: total / len(layers) for phase, total in seconds.items()},
        "memory": [figures.get("peak memory of run", 0), promised["needs"]["memory"], promised["needs"]["host"]],
        "device_memory": max((entry["peak_memory_bytes"] for entry in layers), default=0),
        "disk": [figures["peak disk"], way["source"] + way["output"]],
        "from_hub": [sum(process["source"] for process in runs), way["download"]],
        "to_hub": [figures.get("received", 0), way["upload"]],
        "requests": figures["requests"],
        "processes": figures["processes"],
    }


def report_text(figures: Mapping[str, Any]) -> str:
    """The figures as tables."""
    done, layers = figures["layers"]
    memory, promised, host = figures["memory"]
    disk, of_plan = figures["disk"]
    fetched, download = figures["from_hub"]
    received, upload = figures["to_hub"]
    rows = [
        ("layers", str(done), str(layers)),
        ("seconds a layer", f"{figures['layer_seconds']:.1f}", ""),
        ("peak memory of the run", size(memory), f"{size(promised['CPU'][0])} on a CPU, and {size(host)} besides"),
        ("disk: source's window, output, states", size(disk), f"{size(of_plan)} without states"),
        ("from the Hub, of the source, by the run", size(fetched), size(download)),
        ("to the Hub", size(received), size(upload)),
    ]
    ends = [tuple(map(_cell, process.values())) for process in figures["processes"]]
    phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in figures["phases"].items())
    sizes, requests = figures["sizes"], figures["requests"]
    lines = [
        f"{figures['model']}, {sizes['experts']} experts of {sizes['hidden']} x {sizes['width']}: "
        f"{size(figures['source_bytes'])} to {size(figures['output_bytes'])}",
        "",
        text_table(("figure", "measured", "promised by plan"), rows),
        "",
        f"seconds of a layer by phase, mean: {phases}",
        "",
        f"requests: {', '.join(f'{count:,} {kind}' for kind, count in sorted(requests.items(), key=_count))}",
        "",
        text_table(("command", "seconds", "exit code", "ended by", "layers then", "source read", "output read"), ends),
    ]
    if reference := figures.get("reference"):
        same = "the same" if reference["same"] else "OTHER"
        lines += ["", f"{same} bytes in the first {reference['layers']} layers as in a run without interruption"]
    return "\n".join(lines)


def _cell(value: str | float) -> str:
    return size(value) if isinstance(value, int) and value > 10**5 else str(value)


def _count(pair: tuple[str, int]) -> int:
    return -pair[1]


def settings(job: Job, folder: Path, given: argparse.Namespace) -> list[str]:
    """The words of the recipe's changes: sets that need no network, and no limits that random weights cannot pass."""
    held_out = held_out_set(folder, given.texts)
    changed = [f"verify.{limit}" for limit in NO_LIMITS]
    changed += [f"verify.perplexity.data={held_out}", f"calibration.tokens={given.tokens}"]
    return [str(job.path), "--calibration", "embedded", *(word for change in changed for word in ("--set", change))]


def main() -> None:
    """Do the run, or go on with it, and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--folder", type=Path, default=Path("out/full-size"), help="new, or of an earlier call")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--width-divisor", type=int, default=1, help="of the hidden and the experts' width")
    parser.add_argument("--experts", type=int, help="fewer than the model has")
    parser.add_argument("--tokens", type=int, default=4096, help="calibration tokens")
    parser.add_argument("--texts", type=int, default=4, help="held-out texts, of 256 tokens at most")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N or auto")
    parser.add_argument(
        "--window", help="of the source on the disk, such as 12GB; the smallest that plan names by default"
    )
    parser.add_argument("--signals", default="", help="INT@2,KILL@5: signals, each once so many layers are done")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of this call; SIGINT ends it")
    parser.add_argument("--reference", type=int, default=0, help="so many layers also without interruption, compared")
    parser.add_argument("--verify", action="store_true", help="then `quantize verify --stream`, with the output here")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given = parser.parse_args(sys.argv[1:cut])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    until = time.monotonic() + given.seconds
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    job = prepare(given.recipe, offline_facts=True)
    sizes = {word: job.facts.sizes[word].value // given.width_divisor for word in ("hidden", "width")}
    sizes |= {word: getattr(given, word) for word in ("layers", "experts") if getattr(given, word)}
    words = settings(job, folder, given)
    window = parse_bytes(given.window, "--window") if given.window else 0
    further = ["--device", given.device, *sys.argv[cut + 1 :]]
    checkpoint = made_checkpoint(job.config, **sizes)
    with Hub(folder, job.location, checkpoint) as hub:
        run = Run(hub, folder, words, further, window, until)
        code = run.go_on([word for word in given.signals.split(",") if word])
        if not code and given.verify:
            code = run.verify()
        figures = report(run, job.location, checkpoint.facts)
        digests = [] if code else hub.digests(run.repo)
    if not code and given.reference:
        shallow = folder / "reference"
        shallow.mkdir(exist_ok=True)
        with Hub(shallow, job.location, made_checkpoint(job.config, **sizes | {"layers": given.reference})) as hub:
            reference = Run(hub, shallow, words, further, window, until)
            code = reference.go_on([])
            if not code:
                same = digests[: given.reference] == hub.digests(reference.repo)[: given.reference]
                figures["reference"] = {"layers": given.reference, "same": same}
                code = int(not same)
    print(json.dumps(figures, indent=1) if given.json else report_text(figures))
    sys.exit(code)


if __name__ == "__main__":
    main()
