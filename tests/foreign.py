"""Checkpoints as others make them: a BF16 copy of the tiny model, quantized and saved by stock llm-compressor."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from quantizers.checkpoint.reader import open_folder, side_files
from quantizers.formats.dequantization import read_weight

# Runs in a process of its own: llm-compressor changes loguru, tqdm and global state for good.
CHILD = """
import json, sys, warnings
from pathlib import Path
import torch
torch.set_num_threads(1)
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from datasets import Dataset
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache

source = Path(sys.argv[1])
IntermediatesCache.pin_memory = lambda *_: None  # 0.14 pins without asking; there is no accelerator here

def make(target, job):
    config = AutoConfig.from_pretrained(source)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.5}
    model = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=torch.bfloat16)
    weights = QuantizationArgs(**job["weights"])
    targets = ["re:.*[.]experts[.].*proj$"] if job["experts_only"] else ["Linear"]
    scheme = QuantizationScheme(targets=targets, weights=weights)
    recipe = [QuantizationModifier(config_groups={"group_0": scheme}, ignore=["lm_head", "re:.*gate$"])]
    options = {}
    if job["awq"]:
        routed = ["re:.*mlp.experts.*gate_proj$", "re:.*mlp.experts.*up_proj$"]
        readers = ["re:.*mlp.gate$"] * job["compensate"] + routed
        recipe.insert(0, AWQModifier(mappings=[AWQMapping(job["norms"], readers)]))
        rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in job["sequences"]]
        longest = max(len(row["input_ids"]) for row in rows)
        options = {"dataset": Dataset.from_list(rows), "max_seq_length": longest, "num_calibration_samples": len(rows)}
    model = oneshot(model=model, recipe=recipe, **options) or model
    model.save_pretrained(target, save_compressed=True)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)

for target, job in json.loads(sys.argv[2]).items():
    make(target, job)
"""


NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # in compressed-tensors checkpoints


def bf16_copy(source: Path, folder: Path) -> Path:
    """The FP8 source dequantized to bfloat16, as people make one before they quantize."""
    checkpoint = open_folder(source)
    tensors = {}
    for name in checkpoint.tensors:
        if not name.endswith(("_scale_inv", "_scale")):
            tensor = checkpoint.tensor(name)
            if tensor.dtype == torch.float8_e4m3fn:
                tensor = read_weight(checkpoint, name.removesuffix(".weight"), torch.device("cpu")).bfloat16()
            tensors[name] = tensor
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config))
    for file in side_files(source):
        shutil.copyfile(file, folder / file.name)
    return folder


def experts_only(made: Path, copy: Path, folder: Path, *, compensated: bool = False, folded: bool = True) -> Path:
    """An experts-only checkpoint of a finished output's experts, as llm-compressor would name them.

    Args:
        made: the finished output.
        copy: the BF16 copy of its source.
    """
    tensors = load_file(copy / "model.safetensors")
    output = open_folder(made)
    for name in list(tensors):
        module, _, matrix = name.removesuffix(".weight").rpartition(".")
        if ".experts." in name:
            del tensors[name]
            for part in ("weight_packed", "weight_scale", "weight_shape"):
                tensors[f"{module}.{NAMES[matrix]}.{part}"] = output.tensor(f"{module}.{matrix}.{part}")
        elif folded and (name.endswith("post_attention_layernorm.weight") or (compensated and ".gate." in name)):
            tensors[name] = output.tensor(name).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((copy / "config.json").read_text())
    group = {"targets": ["Linear"], "format": "pack-quantized", "weights": INT4}
    section = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    return folder


def oneshots(copy: Path, jobs: dict[Path, dict[str, object]]) -> list[Path]:
    """Quantize a BF16 copy with llm-compressor's oneshot, and save it as it does, once for each folder.

    One process makes all of them, since it imports the library for longer than it quantizes.

    Args:
        jobs: for each folder `weights`, the arguments of QuantizationArgs; and where they are wanted
            `experts_only`; `awq`, with the `sequences` of token ids to calibrate on; `compensate`: AWQ's mapping
            of the norm includes the router; `norms`: which norms that mapping is for.
    """
    plain = {"experts_only": False, "awq": False, "compensate": False, "norms": "re:.*post_attention_layernorm$"}
    for folder in jobs:
        folder.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(copy), json.dumps({str(path): plain | job for path, job in jobs.items()})],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return list(jobs)


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FORMATS: dict[str, dict[str, object]] = {
    "pack-quantized, group": INT4,
    "pack-quantized, channel": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"},
    "pack-quantized, zero points": INT4 | {"symmetric": False},
    "int-quantized": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
    "float-quantized, channel": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
    "float-quantized, block": {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [64, 64],
    },
    "naive-quantized, tensor": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"},
}  # fmt: skip
