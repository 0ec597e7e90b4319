"""One thread, the trained tiny model, and one finished run of it that many tests read."""

from __future__ import annotations

import atexit
import gc
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Command
from made_once import common_folder, made_once
from plotted import drawn_once

REPOSITORY = Path(__file__).resolve().parent.parent
VLLM_PYTHON = "QUANTIZERS_TEST_VLLM_PYTHON"  # environment variable: an interpreter with .ci/vllm-requirements.txt
needs_vllm = pytest.mark.skipif(VLLM_PYTHON not in os.environ, reason=f"{VLLM_PYTHON} names no interpreter with vLLM")
THREADS = "QUANTIZERS_TEST_THREADS"  # environment variable; one thread when it is not set
DEVICE = (
    "QUANTIZERS_TEST_DEVICE"  # environment variable: the device of tests marked on_device; the CPU when it is not set
)

# From each file of calibration/embedded, this many lines, spread over the file.
CALIBRATION = {"code": 12, "spoken": 6, "chat": 6}
HELD_OUT = {"held-out-code": 6, "held-out-spoken": 3, "held-out-chat": 3}
SEQUENCE_LENGTH = 128


@dataclass(frozen=True)
class Finished:
    """What one run made. Tests read it; a test that changes something copies the folder first.

    Attributes:
        folder: the finished checkpoint.
        source: the checkpoint that it was made from.
        report: what `pipeline.run` returned, which is report.json.
        recipe: the recipe file.
        calibration, held_out: the two sets' files that the recipe names.
    """

    folder: Path
    source: Path
    report: dict[str, Any]
    recipe: Path
    calibration: Path
    held_out: Path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", metavar="K/N", help="of the chosen tests every Nth, the first of them number K from 0")


@pytest.hookimpl(trylast=True)  # after -m has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --share, leave out all tests but one of N: CI runs another share of those marked `every` at each commit."""
    if share := config.option.share:
        first, parts = map(int, share.split("/"))
        config.hook.pytest_deselected(items=[item for n, item in enumerate(items) if n % parts != first])
        items[:] = items[first::parts]


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """With -s what tests print is wanted, which the processes that run two at a time do not pass on."""
    if config.option.capture == "no":
        config.option.numprocesses = 0


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Any:
    """The garbage collector leaves alone what collecting the tests makes, most of which is imported modules.

    Looking at it again and again took a sixth of the CPU time of all tests. At the very end it is freed.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)
        gc.set_threshold(100_000, 20, 10)
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    """Ctrl-C and SIGTERM end pytest also within a run, whose own handlers would end one test alone."""
    real = signal.signal

    def without_handlers(number: int, handler: Any) -> Any:
        return signal.getsignal(number) if number in (signal.SIGINT, signal.SIGTERM) else real(number, handler)

    with pytest.MonkeyPatch.context() as patched:
        if not item.get_closest_marker("own_signals"):
            patched.setattr(signal, "signal", without_handlers)
        return (yield)


@pytest.fixture
def say(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """`say(text)`: figures for the end of pytest's output, from whichever process the test runs in."""
    return lambda text: record_property("said", text)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests said, by their names."""
    for report in terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", []):
        if said := [text for name, text in report.user_properties if name == "said"]:
            terminalreporter.write_line("\n".join(["", report.nodeid, *map(str, said)]))


@pytest.fixture(scope="session", autouse=True)
def threads() -> Iterator[int]:
    """One thread: the same bits on every machine, and no fight with whatever else runs there."""
    import torch

    before, count = torch.get_num_threads(), int(os.environ.get(THREADS, "1"))
    torch.set_num_threads(count)
    with pytest.MonkeyPatch.context() as patched:
        if "OMP_NUM_THREADS" in os.environ:  # of the caller, which a resumed run would compare with these
            patched.setenv("OMP_NUM_THREADS", str(count))
        yield count
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def device() -> Any:
    """Where tests marked on_device compute, with the settings that a run makes there. Their oracles stay on the CPU."""
    from quantizers.device.devices import choose_device

    return choose_device(os.environ.get(DEVICE, "cpu"))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What libraries keep, as matplotlib its list of fonts, is in a folder of the test session's own."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(common_folder(tmp_path_factory) / "cache"))
        yield


@pytest.fixture(scope="session", autouse=True)
def plots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Plots are drawn once for all equal reports; those of random models not at all, see plotted.py."""
    from quantizers.eval.report import plots

    folder = common_folder(tmp_path_factory) / "plots"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plots, "draw", drawn_once(plots.draw, folder))
        yield


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`quantize` in this process."""
    return Command(monkeypatch, capsys)


@pytest.fixture(autouse=True)
def reports_have_the_schema(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test: every report.json that it made has the schema, unless it stands for one of an older version."""
    folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield
    if folder is None or request.node.get_closest_marker("altered_report"):
        return
    for path in folder.rglob("report.json"):
        from quantizers.eval.report.schema import checked
        from quantizers.output.manifest import seal_of

        report = json.loads(path.read_bytes()) if path.is_file() else None
        if isinstance(report, dict) and report.get("seal") == seal_of(report):
            checked(report)


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The trained MiniMax-M2 that travels with the repository: FP8, 4 layers, 16 experts."""
    folder = REPOSITORY / "models" / "tiny-minimax-m2"
    assert (folder / "config.json").is_file(), f"{folder} is part of the repository; check it out"
    return folder


@pytest.fixture(scope="session")
def write_recipe(tiny_model: Path) -> Callable[..., Path]:
    """`write_recipe(folder, source=tiny_model, **experts)`: a recipe of seconds, its two sets beside it."""

    def write(folder: Path, source: Path = tiny_model, **experts: Any) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        write_set(folder / "calibration.yaml", CALIBRATION)
        write_set(folder / "held-out.yaml", HELD_OUT)
        recipe = {
            "source": {"model": str(source)},
            "calibration": "calibration.yaml",
            "experts": {"bits": 4, "group_size": 32} | experts,
            "verify": {
                "coverage": {"min_routed_tokens": 1},
                "perplexity": {"data": "held-out.yaml", "max_source": "any"},
            },
        }
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe, sort_keys=False))
        return path

    return write


def write_set(path: Path, counts: dict[str, int], length: int = SEQUENCE_LENGTH) -> None:
    """A set of so many texts of each file of calibration/embedded, spread over the file."""
    sources = []
    for name, count in counts.items():
        lines = (REPOSITORY / "calibration" / "embedded" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        chosen = [lines[i * len(lines) // count] for i in range(count)]
        (path.parent / f"{name}.jsonl").write_text("\n".join(chosen) + "\n", encoding="utf-8")
        chat = name.endswith("chat")
        sources.append(
            {
                "dataset": f"{name}.jsonl",
                "columns": ["messages", "tools"] if chat else ["prompt", "answer"],
                "shape": "chat" if chat else "prompt-answer",
                "samples": "all",
                "category": {"column": "category"},
            }
        )
    body = {"name": path.stem, "sequence_length": length, "seed": 1, "sources": sources}
    path.write_text(yaml.safe_dump(body, sort_keys=False))


@pytest.fixture(scope="session")
def finished(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, write_recipe: Callable[..., Path], threads: int
) -> Finished:
    """The pipeline run once, in this process, on a small set."""
    import torch

    from quantizers.pipeline import pipeline
    from quantizers.planning.job import prepare

    def made(folder: Path) -> Finished:
        recipe, output = write_recipe(folder), folder / "output"
        report = pipeline.run(prepare(str(recipe)), pipeline.Options(output, torch.device("cpu")))
        return Finished(output, tiny_model, report, recipe, folder / "calibration.yaml", folder / "held-out.yaml")

    return made_once(tmp_path_factory, "finished", made)


@pytest.fixture
def copied(finished: Finished, tmp_path: Path) -> Path:
    """A copy of the finished folder, to be damaged."""
    return shutil.copytree(finished.folder, tmp_path / "copy")


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A `runs.Small`: a random model of three layers, and an unbroken run of it."""
    import torch
    from runs import Small, change
    from tiny import write_job

    from quantizers.pipeline import pipeline
    from quantizers.pipeline.options import Options
    from quantizers.planning.job import prepare

    def made(folder: Path) -> Small:
        needed = list[int]()
        recipe = write_job(folder, layers=3, words=12, samples=3, awq={"grid": 3})
        change(recipe, lambda body: body["verify"].update(as_served=["hopper"]))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(pipeline.journal, "check_room", lambda _, asked, __: needed.append(asked))
            report = pipeline.run(prepare(str(recipe)), Options(folder / "whole", torch.device("cpu")))
        return Small(folder, report, needed[0])

    return made_once(tmp_path_factory, "small", made)


@pytest.fixture(scope="session")
def whole_model() -> Callable[[dict[str, Any], dict[str, Any]], Any]:
    """`whole_model(config, weights)`: transformers' whole model in float32, of weights by their published names."""
    from families import whole_model

    return whole_model


@pytest.fixture(scope="session")
def published_job() -> Any:
    """MiniMax-M2.1 as its shipped recipe plans it from the kept facts: 190,000 tensors, so it is planned once."""
    from quantizers.planning.job import prepare

    return prepare("minimax-m2.1-fp8-int4", offline_facts=True)
