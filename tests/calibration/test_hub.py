"""Datasets of the Hub, served by a stand-in on the loopback interface to the real client libraries.

The libraries read HF_ENDPOINT and HF_HOME when they are imported, so a machine with caches of its own is a process of
its own. A quick test changes in this process what they have read.
"""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from calibration_tokenizer import write_tokenizer
from hub_stand_in import HubStandIn
from huggingface_hub.errors import OfflineModeIsEnabled

from quantizers.calibration.load_set import load_set
from quantizers.calibration.rows import Unreachable, explained, quiet
from quantizers.calibration.set import CalibrationSet, DataSource, read_set
from quantizers.system.errors import CalibrationError
from quantizers.system.package_data import shipped

SETS = shipped("calibration")
SOFTWARE = SETS / "software-engineer.yaml"
LARGE = "HuggingFaceH4/ultrachat_200k"
MACHINE = """
import json, sys
from pathlib import Path
from tempfile import mkdtemp
from quantizers.calibration.load_set import load_set
from quantizers.calibration.lock import lock_set
from quantizers.calibration.samples import language_counts
from quantizers.calibration.set import read_set
from quantizers.system.errors import CalibrationError

for line in sys.stdin:
    path, tokenizer, workers, cache, lock = json.loads(line)
    try:
        if lock:
            lock_set(Path(path))
        data = load_set(Path(path), tokenizer, workers=workers, cache=Path(cache or mkdtemp()))
        counts = language_counts(read_set(Path(path)), data.samples)
        answer = data.summary() | {"languages": counts}
    except CalibrationError as failure:
        answer = {"error": str(failure)}
    print(json.dumps(answer), flush=True)
"""


@dataclass(frozen=True)
class Machine:
    """A computer with caches in `folder`, which answers a line for every line it gets."""

    folder: Path
    tokenizer: str
    process: subprocess.Popen[str]

    def load(self, path: Path, *, workers: int = 4, cache: bool = True, lock: bool = False) -> dict[str, Any]:
        """The summary of a set as loaded there; `{"error": …}` where it is refused."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        kept = str(self.folder / "cache") if cache else ""
        self.process.stdin.write(json.dumps([str(path), self.tokenizer, workers, kept, lock]) + "\n")
        self.process.stdin.flush()
        summary: dict[str, Any] = json.loads(self.process.stdout.readline())
        return summary

    def downloaded(self) -> set[str]:
        """The ids of the datasets whose data files were downloaded rather than streamed."""
        hub = self.folder / "hf" / "hub"
        files = [file.relative_to(hub) for file in hub.glob("datasets--*/snapshots/*/**/part-*")]
        return {file.parts[0].removeprefix("datasets--").replace("--", "/") for file in files}


@contextmanager
def switched_on(folder: Path, endpoint: str, seed: int) -> Iterator[Machine]:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = str(write_tokenizer(folder / "tokenizer"))
    home = {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "hf"), "PYTHONHASHSEED": str(seed)}
    with (
        (folder / "stderr").open("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-c", MACHINE],
            env={"PATH": os.environ["PATH"], **home},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        yield Machine(folder, tokenizer, process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0
        errors.seek(0)
        assert errors.read() == ""  # the libraries are silent


@pytest.fixture(scope="module")
def hub() -> Iterator[HubStandIn]:
    with HubStandIn() as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def machine(hub: HubStandIn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with switched_on(tmp_path_factory.mktemp("one"), hub.endpoint, seed=1) as one:
        yield one


@pytest.fixture(scope="module")
def other_machine(hub: HubStandIn, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with switched_on(tmp_path_factory.mktemp("two"), hub.endpoint, seed=2) as two:
        yield two


@pytest.fixture(scope="module")
def offline(machine: Machine) -> Iterator[Machine]:
    """The first machine after a restart, without a network."""
    with switched_on(machine.folder, "http://127.0.0.1:9", seed=3) as same:
        yield same


def rows(name: str, count: int = 12) -> bytes:
    return "".join(json.dumps({"text": f"{name}, row {number}"}) + "\n" for number in range(count)).encode()


SMALL = """\
name: small
sequence_length: 64
sources:
  - {dataset: org/plain, columns: [text], shape: text, samples: 8, category: x}
  - {dataset: org/streamed, streaming: true, columns: [text], shape: text, samples: 8, category: x}
"""


@pytest.fixture
def small(tmp_path: Path, hub: HubStandIn) -> Path:
    """A set of two datasets in four files each, which the stand-in serves."""
    files = {f"train-{number}.jsonl": rows(f"file {number}") for number in range(4)}
    hub.datasets = {"org/plain": files, "org/streamed": dict(files)}
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.mark.slow
def test_the_whole_software_engineer_set_loads_and_again_offline(
    hub: HubStandIn, machine: Machine, offline: Machine
) -> None:
    calibration = read_set(SOFTWARE)
    hub.datasets = hub_datasets(calibration, LARGE)
    loaded = machine.load(SOFTWARE)
    assert loaded["samples"] == 590
    assert loaded["categories"]["tool-use"] == 48
    assert min(loaded["languages"]["programming"].values()) == 3
    assert min(loaded["languages"]["spoken"].values()) == 4
    agents = ["interstellarninja/hermes_reasoning_tool_use", "lambda/hermes-agent-reasoning-traces"]
    assert [item["source"] for item in loaded["dropped"]] == agents
    assert loaded["dropped"][0]["reason"] == "the chat template refuses it: a tool turn without a call"
    on_hub = [source for source in calibration.sources if not source.is_local]
    assert machine.downloaded() == {source.dataset for source in on_hub if not source.streaming}
    large = {path: raw for path, raw in hub.datasets[LARGE].items() if path.endswith(".jsonl")}
    assert all(0 < hub.reached[f"{LARGE}/{path}"] < len(raw) for path, raw in large.items())
    again = offline.load(SOFTWARE)
    refused = offline.load(SOFTWARE, cache=False)["error"]
    assert again["digest"] == loaded["digest"]
    assert again["notes"] == ["from the cache; 53 sources could not be reached"]
    assert refused.startswith(f"{SOFTWARE}:")
    assert " and 48 more: cannot be reached (ConnectError: " in refused
    assert "\n" not in refused


@pytest.mark.slow
def test_order_of_files_workers_and_hash_seed_make_no_difference(
    small: Path, hub: HubStandIn, machine: Machine, other_machine: Machine
) -> None:
    one = machine.load(small, workers=1)
    hub.backwards = True
    other = other_machine.load(small, workers=4)
    hub.backwards = False
    assert one["digest"] == other["digest"]


@pytest.mark.slow
def test_a_moved_revision_is_loaded_anew_unless_a_lock_holds_it(
    small: Path, hub: HubStandIn, machine: Machine, other_machine: Machine
) -> None:
    before = machine.load(small)
    hub.datasets["org/plain"] = {"train.jsonl": rows("changed")}
    after, locked = machine.load(small), machine.load(small, lock=True)
    assert (after["notes"], locked["notes"]) == ([], ["versions are those of the set's lock"])
    assert before["digest"] != after["digest"] == locked["digest"]
    commits = [hub.commit("org/plain"), before["versions"][1]]
    assert after["versions"] == locked["versions"] == commits
    assert [pin["commit"] for pin in json.loads((small.parent / "small.lock.json").read_text())["sources"]] == commits
    hub.datasets["org/streamed"] = {"train.jsonl": rows("changed")}
    refused = other_machine.load(small, cache=False)["error"]
    assert f"org/streamed: no revision {commits[1]}; correct the source's revision, or lock" in refused


def test_a_hub_that_was_switched_off_is_called_so() -> None:
    """The library's own sentence is as long as the rest of the line."""
    source = read_set(SOFTWARE).sources[0]
    with pytest.raises(Unreachable) as refused, explained(source):
        raise OfflineModeIsEnabled("Cannot reach https://huggingface.co: offline mode is enabled. To disable it, ...")
    assert refused.value.reason == "cannot be reached (HF_HUB_OFFLINE is set)"


@pytest.fixture
def refused(
    hub: HubStandIn, tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Path], CalibrationError]:
    """`refused(path)`: the error with which a set cannot be loaded from the stand-in."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)

    def call(path: Path) -> CalibrationError:
        with pytest.raises(CalibrationError) as failure:
            load_set(path, tokenizer, cache=tmp_path / "cache")
        return failure.value

    return call


SOURCE = "columns: [text], shape: text, samples: 1, category: x}\n"
NO_SUCH = "no such dataset on the Hub; correct the id, or `hf auth login` if it is private"


@pytest.mark.parametrize("how", ["dead", "failing"])
def test_unreachable_sources_are_one_line_that_hides_no_other_fault(
    how: str, small: Path, hub: HubStandIn, refused: Callable[[Path], CalibrationError]
) -> None:
    """The Hub does not answer about some sources, or with a server's error."""
    starts = ("dataset: org/none", "dataset: missing.jsonl", "dataset: org/third, revision: v9")
    small.write_text(SMALL + "".join(f"  - {{{start}, {SOURCE}" for start in starts))
    hub.datasets["org/third"] = {}
    silent = getattr(hub, how)
    silent.update(("org/plain", "org/streamed"))
    try:
        unreachable, *others = str(refused(small)).splitlines()
    finally:
        silent.clear()
    assert unreachable.startswith(f"{small}:4: org/plain, org/streamed (line 5): cannot be reached (")
    assert unreachable.endswith(
        "; check the network, or take the shipped set embedded, which needs none (--calibration embedded)"
    )
    assert others == [
        f"{small}:6: org/none: {NO_SUCH}",
        f"{small}:7: {small.parent}/missing.jsonl: cannot be read (No such file or directory); give an existing file",
        f"{small}:8: org/third: no revision v9; correct the source's revision, or lock the set again",
    ]


@pytest.mark.slow
def test_faults_of_all_sources_are_reported_together(small: Path, machine: Machine) -> None:
    extra = (f"  - {{dataset: org/plain, {key}, {SOURCE}" for key in ("revision: v9", "split: test", "subset: other"))
    small.write_text(SMALL.replace("[text]", "[txt]") + "".join(extra))
    assert machine.load(small)["error"].splitlines() == [
        f"{small}:6: org/plain: no revision v9; correct the source's revision, or lock the set again"
    ]
    small.write_text(small.read_text().replace("revision: v9", "revision: main"))
    assert machine.load(small)["error"].splitlines() == [
        f"{small}:4: org/plain, org/streamed (line 5): no column 'txt' (it has text); "
        "correct the source's columns or category",
        f"{small}:7: org/plain: cannot be loaded (ValueError: Unknown split \"test\". Should be one of ['train'].); "
        "correct the source's subset, split or revision",
        f"{small}:8: org/plain: cannot be loaded (ValueError: BuilderConfig 'other' not found. "
        "Available: ['default']); correct the source's subset, split or revision",
    ]


def test_quiet_restores_what_was_shown() -> None:
    import datasets

    bars, log = datasets.are_progress_bars_disabled(), logging.getLogger("huggingface_hub")
    with quiet():
        assert datasets.are_progress_bars_disabled()
        assert not log.isEnabledFor(logging.CRITICAL)
    assert datasets.are_progress_bars_disabled() == bars
    assert log.isEnabledFor(logging.CRITICAL)


SPARE = 14  # rows more than a set asks for
PADDING = 100_000  # characters in each row of the one dataset that is too large to be read whole

Row = dict[str, Any]


def hub_datasets(calibration: CalibrationSet, large: str) -> dict[str, dict[str, bytes]]:
    """Repositories for every Hub source of a set: files by path, by id.

    Streamed datasets lie in two JSON lines files, others in one Parquet file; a README names subsets
    and splits, as it does on the Hub.

    Args:
        large: a streamed dataset that gets files of many megabytes, so that reading it whole shows.
    """
    repositories: dict[str, dict[str, bytes]] = {}
    configurations: dict[str, dict[str, dict[str, str]]] = {}
    for source in calibration.sources:
        if source.is_local:
            continue
        assert isinstance(source.samples, int)
        files = repositories.setdefault(source.dataset, {})
        subset = source.subset or "default"
        folder = f"{subset}/{source.split}"
        rows = list(_rows(source, source.samples + SPARE, PADDING if source.dataset == large else 0))
        if source.streaming:
            splits = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
            if source.dataset == large:
                splits = [splits[0] * 16, splits[1] * 16]
            for number, part in enumerate(splits):
                files[f"{folder}/part-{number}.jsonl"] = "".join(json.dumps(row) + "\n" for row in part).encode()
        else:
            buffer = io.BytesIO()
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
            files[f"{folder}/part-0.parquet"] = buffer.getvalue()
        pattern = f"{folder}/*.{'jsonl' if source.streaming else 'parquet'}"
        configurations.setdefault(source.dataset, {}).setdefault(subset, {})[source.split] = pattern
    for repository, subsets in configurations.items():
        repositories[repository]["README.md"] = _readme(subsets).encode()
    return repositories


def _readme(subsets: dict[str, dict[str, str]]) -> str:
    lines = ["---", "configs:"]
    for subset, splits in subsets.items():
        lines += [f"- config_name: {subset}", "  data_files:"]
        for split, pattern in splits.items():
            lines += [f"  - split: {split}", f'    path: "{pattern}"']
    return "\n".join([*lines, "---", ""])


def _rows(source: DataSource, count: int, padding: int) -> Iterator[Row]:
    for number in range(count):
        text = f"{source.dataset} {source.split}, number {number}. " + f"word{number} " * 20 + "x" * padding
        yield _row(source, text, number) | {"unused": number, "language": ("Hindi", "Turkish")[number % 2]}


def _row(source: DataSource, text: str, number: int) -> Row:
    first = source.columns[0]
    if source.shape == "text":
        return {first: text}
    if source.shape == "prompt-answer":
        asked = [{"role": "user", "content": text}] if "Llama-Nemotron" in source.dataset else text
        return {first: asked, source.columns[1]: f"<think>\nEasy.\n</think>\nThe answer to {text}"}
    if source.shape == "code-contests":
        solutions = {"language": [2, 3], "solution": ["int main() {}", f"print({number})"]}
        return {first: f"{number}_A. Task", "description": text, "solutions": solutions}
    roles, texts = ("user", "assistant"), (text, f"Answer {number}.")
    if source.shape == "chat":
        return {first: [{"role": role, "content": said} for role, said in zip(roles, texts, strict=True)]}
    if source.category == "tool-use" or len(source.columns) == 2:
        return {first: _tool_dialogue(text, number)} | dict.fromkeys(source.columns[1:], "[]")
    names = ("human", "gpt") if number % 2 else roles
    return {first: [{"from": name, "value": said} for name, said in zip(names, texts, strict=True)]}


def _tool_dialogue(text: str, number: int) -> list[dict[str, str]]:
    """As Hermes writes them; every tenth has a tool turn without a call, which templates refuse."""
    call = json.dumps({"name": "look_up", "arguments": {"number": number}})
    asked = "" if number % 10 == 9 else f"<tool_call>\n{call}\n</tool_call>"
    return [
        {"from": "system", "value": "You may call <tools>[...]</tools>."},
        {"from": "human", "value": text},
        {"from": "gpt", "value": f"<think>\nI look it up.\n</think>\nA moment.{asked}"},
        {"from": "tool", "value": f"<tool_response>\n{number}\n</tool_response>"},
        {"from": "gpt", "value": f"It is {number}."},
    ]
