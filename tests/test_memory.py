"""One layer in memory, however many layers there are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

# Runs a recipe in a process of its own and prints its peak resident memory less that after imports.
CHILD = """
import sys
from pathlib import Path
import torch
import llmcompressor, transformers, datasets  # noqa: F401  (whatever is imported lazily counts as imports)
import compressed_tensors.compressors.pack_quantized.helpers, compressed_tensors.entrypoints.convert  # noqa: F401
from transformers import MiniMaxM2ForCausalLM  # noqa: F401
from quantizers import pipeline, session

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024

torch.set_num_threads(1)
job = session.prepare(sys.argv[1])
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak starts again from here
pipeline.run(job, pipeline.Options(Path(sys.argv[2]), torch.device("cpu")))
print(status("VmHWM") - before)
"""


def peak(folder: Path, layers: int, tokenizer: Path) -> int:
    source = tiny.make(
        folder / "source",
        shards=4,
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=256,
        num_local_experts=88,
        num_hidden_layers=layers,
    )
    for file in tokenizer.glob("*token*"):
        (source / file.name).write_bytes(file.read_bytes())
    (folder / "texts.jsonl").write_text(json.dumps({"text": "one text, repeated until it is long enough. " * 30}) + "\n")
    (folder / "set.yaml").write_text(
        "name: memory\nsequence_length: 128\nseed: 1\nsources:\n"
        "  - {dataset: texts.jsonl, columns: [text], shape: text, samples: all, category: text}\n"
    )
    recipe = folder / "recipe.yaml"
    recipe.write_text("source: {model: source}\ncalibration: set.yaml\nexperts: {rounding: nearest, scales: minmax, awq: {grid: 3}}\n")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(recipe), str(folder / "output")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
def test_peak_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path, tiny_model: Path) -> None:
    """Layers of 34.6 MB of FP8; 8 against 32 of them differ by less than 10 %."""
    few, many = (peak(tmp_path / str(layers), layers, tiny_model) for layers in (8, 32))
    print(f"peak above imports: 8 layers {few / 1e6:.0f} MB, 32 layers {many / 1e6:.0f} MB")
    assert abs(many - few) / few < 0.10
