"""One layer in memory, however many layers there are; and the hidden states in files, however many tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from calibration_tokenizer import write_tokenizer
from safetensors.torch import save_file

HIDDEN, WIDTH, EXPERTS, SEQUENCE = 2048, 1024, 4, 128  # few large matrices, as real layers have them
GROWTH = 1.05
ALLOWED = 400_000_000  # bytes of data above those after imports, for the largest model

# Runs a recipe in a process of its own and prints what it used above what the imports did. Whatever is
# imported late counts as imports, so a run over another folder comes first.
CHILD = """
import gc, json, os, resource, sys, threading, time
from pathlib import Path
import torch
from quantizers import heap, pipeline, session

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024

first, recipe, output, allowed = sys.argv[1:]
torch.set_num_threads(1)
cpu = torch.device("cpu")
pipeline.run(session.prepare(first), pipeline.Options(Path(output + "-first"), cpu))
job = session.prepare(recipe)
gc.collect()
heap.give_back()  # or what the first run left free would be counted as used before
before, anonymous, most, done = status("VmRSS"), status("RssAnon"), 0, False

def watch():
    global most
    while not done:
        most = max(most, status("RssAnon"))
        time.sleep(0.005)

limit = 0
if int(allowed):
    limit = status("VmData") + int(allowed)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from here
watcher = threading.Thread(target=watch)
watcher.start()
began = time.monotonic()
try:
    report = pipeline.run(job, pipeline.Options(Path(output), cpu))
finally:
    done = True
    watcher.join()
print(json.dumps({
    "peak": status("VmHWM") - before, "anonymous": most - anonymous, "limit": limit,
    "seconds": time.monotonic() - began, "tokens": report["calibration"]["tokens"],
}))
"""


@dataclass(frozen=True)
class Used:
    """Bytes above those after imports: at most resident, at most anonymous. The limit on data, the model's bytes."""

    peak: int
    anonymous: int
    limit: int
    model: int
    seconds: float
    tokens: int


def write_model(folder: Path, layers: int) -> int:
    """A model of equal layers, a shard each, written without ever holding more than one; its bytes."""
    config = tiny.config(
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_local_experts=EXPERTS,
        num_hidden_layers=layers,
        vocab_size=320,
    )
    folder.mkdir(parents=True)
    tensors = tiny.tensors(config | {"num_hidden_layers": 1})
    parts = [{name: tensor for name, tensor in tensors.items() if ".layers." not in name}]
    layer = {name: tensor.contiguous() for name, tensor in tensors.items() if ".layers." in name}
    weight_map: dict[str, str] = {}

    def write(part: dict[str, torch.Tensor], number: int) -> None:
        file = f"model-{number:05d}-of-{layers + 1:05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))

    for number in range(layers):
        write({name.replace("layers.0.", f"layers.{number}."): tensor for name, tensor in layer.items()}, number + 1)
    write(parts[0], layers + 1)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    write_tokenizer(folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def write_job(folder: Path, layers: int, samples: int, **experts: Any) -> Path:
    write_model(folder / "model", layers)
    rows = [{"text": f"text number {i}, " + "repeated until it is long enough. " * 30} for i in range(samples)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "set.yaml").write_text(
        f"name: memory\nsequence_length: {SEQUENCE}\nseed: 1\nsources:\n"
        "  - {dataset: texts.jsonl, columns: [text], shape: text, samples: all, category: text}\n"
    )
    # Quick settings: memory is that of one layer and its sums, whatever the search.
    settings = {"rounding": "nearest", "scales": "minmax", "awq": False} | experts
    recipe = {"source": {"model": "model"}, "calibration": "set.yaml", "experts": settings}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return folder / "recipe.yaml"


def used(folder: Path, layers: int, samples: int, allowed: int = 0, **experts: Any) -> Used:
    first = write_job(folder / "first", 2, 2, **experts)
    recipe = write_job(folder / "job", layers, samples, **experts)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(first), str(recipe), str(folder / "output"), str(allowed)],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
    )
    assert done.returncode == 0, done.stderr
    size = sum(file.stat().st_size for file in (folder / "job" / "model").glob("*.safetensors"))
    return Used(**json.loads(done.stdout.splitlines()[-1]), model=size)


def mb(number: int) -> str:
    return f"{number / 1e6:8.1f} MB"


@pytest.fixture(scope="module")
def by_layers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Used]:
    """Models of 4, 16 and 64 layers of 25 MB; the data of the last run are limited.

    Where the heap has its holes wanders by a hundredth or two from layer to layer, and the most of 64 layers is
    more than the most of 4. So the short model runs four times: as many layers as that of 16 has.
    """
    folder = tmp_path_factory.mktemp("layers")
    short = [used(folder / f"4-{i}", 4, 4) for i in range(4)]
    longer = {n: used(folder / str(n), n, 4, allowed=ALLOWED if n == 64 else 0) for n in (16, 64)}
    return {4: max(short, key=lambda row: row.peak)} | longer


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_layers(by_layers: dict[int, Used]) -> None:
    print("\nlayers    resident   anonymous")
    for layers, row in by_layers.items():
        print(f"{layers:6} {mb(row.peak)} {mb(row.anonymous)}  {row.seconds:.0f} s")
    assert by_layers[16].peak <= GROWTH * by_layers[4].peak
    assert by_layers[64].peak <= GROWTH * by_layers[4].peak


@pytest.mark.slow
def test_a_model_larger_than_the_memory_allowed(by_layers: dict[int, Used]) -> None:
    """RLIMIT_DATA bounds all that is not a file's page; the model is larger than that, imports included."""
    row = by_layers[64]
    print(f"\nmodel {mb(row.model)}, allowed {mb(row.limit)}, of it for the run {mb(ALLOWED)}")
    assert row.model > row.limit > 0


@pytest.mark.slow
def test_memory_grows_with_tokens_only_by_the_pages_of_the_states(tmp_path: Path) -> None:
    """Once, four and sixteen times the tokens: what is not a file's pages grows by 5 % at most."""
    fewest = [used(tmp_path / f"1-{i}", 4, 8) for i in range(3)]  # the most of few batches is less than of many
    rows = {1: max(fewest, key=lambda row: row.anonymous)}
    rows |= {factor: used(tmp_path / str(factor), 4, 8 * factor) for factor in (4, 16)}
    print("\ntokens    resident   anonymous   states")
    for row in rows.values():
        print(f"{row.tokens:6} {mb(row.peak)} {mb(row.anonymous)} {mb(row.tokens * 4 * 3 * HIDDEN)}")
    for factor, row in rows.items():
        more = row.tokens - rows[1].tokens
        assert row.tokens == factor * rows[1].tokens
        assert row.anonymous <= GROWTH * rows[1].anonymous
        assert row.peak <= GROWTH * rows[1].peak + more * (4 * 3 * HIDDEN + 16)
