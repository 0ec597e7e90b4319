"""vllm_probe.py and vllm_forward.py, run by the interpreter that has a vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conftest import REPOSITORY, VLLM_PYTHON
from torch import Tensor

# For vLLM's engine on a CPU. Its kernel for MLA has one size of head, larger than the tests' models have.
ENGINE = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_MLA_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}  # fmt: skip


def in_vllm(script: str, *words: object, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """A script of this folder, with the repository and the stand-ins for packages that vLLM only imports."""
    path = os.pathsep.join(map(str, (REPOSITORY, REPOSITORY / "tests" / "stand_ins")))
    return subprocess.run(
        [os.environ[VLLM_PYTHON], f"tests/{script}", *map(str, words)],
        cwd=REPOSITORY, env=os.environ | environment | {"PYTHONPATH": path}, stdout=subprocess.PIPE, check=False
    )  # fmt: skip


def probed(*words: object) -> tuple[int, dict[str, Any]]:
    """The probe's exit code and report."""
    done = in_vllm("vllm_probe.py", *words)
    return done.returncode, json.loads(done.stdout)


@dataclass(frozen=True)
class Computed:
    """What vLLM computed from a checkpoint: log-probabilities (T - 1, V) float64 of each text, or why it did not."""

    logs: list[Tensor]
    problem: str
    seconds: float


def computed(folders: Sequence[Path], texts: Sequence[Sequence[Tensor]], *, kernels: bool = False) -> list[Computed]:
    """Each of the folders in one process of vLLM's, with its own texts: token ids (T,)."""
    asked = [
        {"folder": str(folder), "texts": [text.tolist() for text in own], "kernels": kernels}
        for folder, own in zip(folders, texts, strict=True)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        request, result = Path(scratch, "request.json"), Path(scratch, "result.npz")
        request.write_text(json.dumps(asked))
        in_this_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        in_vllm("vllm_forward.py", request, result, **ENGINE, **in_this_process).check_returncode()
        with np.load(result) as found:
            return [
                Computed(
                    [torch.log_softmax(torch.from_numpy(found[name]).double(), -1)
                     for text in range(len(own)) if (name := f"{number}/{text}") in found],
                    str(found.get(f"{number}/problem", "")),
                    float(found[f"{number}/seconds"]),
                )
                for number, own in enumerate(texts)
            ]  # fmt: skip
