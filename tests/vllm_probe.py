"""Loads finished checkpoints into vLLM's own models, and compares every parameter with the files, byte for byte.

Runs in an environment of its own that has a vLLM for the CPU (.ci/vllm-requirements.txt):

    PYTHONPATH=.:tests/stand_ins /path/to/that/python tests/vllm_probe.py FOLDER... [--compare FOLDER FOLDER...]

For each folder vLLM reads the config, builds the model class of its registry on one CPU, and loads the shards, all by
its own code. Before it loads, every byte of every parameter is set to 0xFF (NaN in any float dtype), so what it does
not write shows. A layer that predicts further tokens (MTP) is in a model of its own, which vLLM builds for speculative
decoding: it is built and loaded after the main one, from the config that vLLM's SpeculativeConfig makes. Then, before
kernels rearrange anything, each tensor of the files must lie in exactly one place of the models with equal bytes (the
main model's matrices of the vocabulary may lie in both), and these places must make up every parameter: see
vllm_parameters.py. Nothing is
computed with the weights.

Standard output is one JSON object; exit code 0 without problems, 1 with any. The values of the folders after the first
of --compare are compared with those of the first, which is how a test shows that unequal values are seen. With --pins
the packages that were imported are written to a file, as requirements for such an environment.
"""

# ruff: noqa: E402
# Before vLLM is imported, the variables that it reads then are set, and standard output is turned away from it.

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

# What vLLM and its processes print goes to standard error, whatever they print it with.
STANDARD_OUTPUT = os.dup(1)
os.dup2(2, 1)

import compressed_tensors
import torch
import transformers
import vllm
from torch import Tensor
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.kernels.linear.scaled_mm import cpu as cpu_kernels
from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16 as int4_experts,
)
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.models import registry
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm_parameters import compare, fill, state_of
from whole_models import stored

from quantizers.serving.ask_vllm import ask_vllm
from quantizers.system.errors import InputError


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """The two places in which vLLM asks, when it creates a layer, for a kernel that a CPU may lack.

    - Experts of INT4: the CPU's kernel does not take groups of 32. Marlin, which a GPU would take, is chosen instead;
      the parameters are the same, and vLLM's check of the shapes that Marlin takes stays in force.
    - Linear layers of block FP8: the CPU's kernel needs AMX. It is chosen without AMX too; vLLM's check of the
      block's shape stays in force.
    """
    marlin = patch.object(int4_experts, "select_wna16_moe_backend", lambda **_: (WNA16MoEBackend.MARLIN, MarlinExperts))
    amx = patch.object(cpu_kernels.CPUFp8BlockScaledMMKernel, "is_supported", lambda *_: (True, None))
    with marlin, amx:
        yield


def start_group(store: Path) -> None:
    """One process is the whole group, so that it has all weights; `store` is a file that the group needs."""
    init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
    with set_current_vllm_config(VllmConfig()):
        ensure_model_parallel_initialized(1, 1)


@contextlib.contextmanager
def current(config: VllmConfig) -> Iterator[None]:
    """What vLLM sets up around the building and the loading of a model."""
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype), without_kernels():
        yield


def build(config: VllmConfig, model_config: ModelConfig) -> torch.nn.Module:
    """vLLM's model, every byte of its parameters 0xFF."""
    with current(config):
        model = get_model_loader(config.load_config).create_model(config, model_config)
    for _, parameter in state_of(model).values():
        fill(parameter)
    return model


def load(model: torch.nn.Module, config: VllmConfig, model_config: ModelConfig) -> None:
    """The shards, through the model's own `load_weights`."""
    with current(config):
        get_model_loader(config.load_config).load_weights(model, model_config)


def has_mtp(folder: Path) -> bool:
    """Whether the files have a layer beyond the last one."""
    config, tensors = stored(folder)
    layers = config.get("text_config", config).get("num_hidden_layers", math.inf)
    numbers = {int(match[1]) for name in tensors if (match := re.match(r"model\.layers\.(\d+)\.", name))}
    return any(number >= layers for number in numbers) or any(name.startswith("mtp.") for name in tensors)


def probe(folder: Path, reference: Path | None) -> dict[str, Any]:
    """The report on one folder, with whose values, or with those of `reference`, vLLM's are compared."""
    report: dict[str, Any] = {"folder": str(folder), "model_class": "", "parameters": 0, "tensors": 0, "problems": []}
    doing = "reading the config"
    try:
        speculative = {"method": "mtp", "num_speculative_tokens": 1} if has_mtp(folder) else None
        with patch.object(registry, "_run_in_subprocess", lambda call: call()):  # where no GPU is, it needs no process
            config = EngineArgs(
                model=str(folder),
                skip_tokenizer_init=True,
                enforce_eager=True,
                enable_prefix_caching=False,
                speculative_config=speculative,
            ).create_engine_config()
        config.load_config.use_tqdm_on_load = False
        doing = "building the model"
        model = build(config, config.model_config)
        report["model_class"] = type(model).__name__
        doing = "loading the weights"
        load(model, config, config.model_config)
        models = [model]
        if config.speculative_config is not None:
            doing = "building the MTP model"
            draft = config.speculative_config.draft_model_config
            models.append(build(config, draft))
            doing = "loading the MTP model's weights"
            load(models[-1], config, draft)
        modules = (module for model in models for module in model.modules())
        report["router_dtype"] = dtypes(module.weight for module in modules if isinstance(module, GateLinear))
        doing = "after which its parameters were compared"
        report |= compare(models, stored(folder)[1] | (stored(reference)[1] if reference is not None else {}))
    # What vLLM raises has no common base class; whatever it is, vLLM cannot serve this folder.
    except Exception as failure:
        traceback.print_exc()
        said = " ".join(str(failure).split()) or traceback.extract_tb(failure.__traceback__)[-1].line
        report["problems"].append(f"vLLM, {doing}: {type(failure).__name__}: {said}")
    try:
        answer = ask_vllm(folder)
        report["schemes"] = answer["schemes"]
        report["problems"] += answer["differences"]
    except InputError as failure:
        report["schemes"] = {"not asked": str(failure)}  # a family that this repository does not know
    return report


def dtypes(tensors: Iterator[Tensor]) -> str:
    return ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))


def pins() -> str:
    """A requirement, with its exact version, for every package of which something has been imported."""
    packages = metadata.packages_distributions()
    imported = {package for module in sys.modules for package in packages.get(module.partition(".")[0], ())}
    # setuptools adds the folder of packages that it carries to those in which packages are looked for.
    installed = {d.name for d in metadata.distributions(path=[sysconfig.get_path("purelib")])}
    return "".join(f"{name}=={metadata.version(name)}\n" for name in sorted(imported & installed, key=str.lower))


def main() -> int:
    parser = argparse.ArgumentParser(description="Load finished checkpoints into vLLM's models and compare.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--compare", nargs="+", type=Path, metavar="FOLDER", help="compare values of those after the first with its own"
    )
    parser.add_argument("--pins", type=Path, metavar="FILE", help="write the imported packages' versions to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    versions = {m.__name__: m.__version__ for m in (vllm, torch, compressed_tensors, transformers)}
    with tempfile.TemporaryDirectory() as scratch:
        start_group(Path(scratch, "group"))
        reference, *compared = arguments.compare or [None]
        checked = [probe(folder, None) for folder in arguments.folders]
        checked += [probe(folder, reference) for folder in compared]
    if arguments.pins is not None:
        arguments.pins.write_text(pins())
    with os.fdopen(STANDARD_OUTPUT, "w") as output:
        json.dump({"versions": versions, "checked": checked}, output, indent=1)
        output.write("\n")
    return int(any(report["problems"] for report in checked))


if __name__ == "__main__":
    sys.exit(main())
