"""Model types without a file of facts, from a tiny model to a proven output.

The oracles are transformers' whole models and compressed-tensors' unpacking, which know nothing of what is derived.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import zoo
from torch import Tensor
from whole_models import finished_weights, source_weights, stored

from quantizers.architectures.families import known
from quantizers.calibration.load_set import load_set
from quantizers.checkpoint.reader import open_folder
from quantizers.commands.verify import verify_folder
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.job import Job, prepare

CPU = torch.device("cpu")
# One of each kind is quick: its scales are folded, or its weights are FP8.
QUICK = {
    "mimo_v2_flash": "a fold, layers of several kinds",
    "qwen3_5_moe as published": "FP8, vision, a layer beyond the last",
}
# The matrices of experts in decoder layers, each a tensor or all of a layer in two.
ROUTED = re.compile(r"model\..*\.experts\.(\d+\.\w+\.weight(_scale_inv)?|gate_up_proj|down_proj)")
DERIVED = [name for name in zoo.TYPES if name not in zoo.REFUSED and name not in known()]


@dataclass(frozen=True)
class Made:
    """A run of a type: its job, its output, and its report."""

    name: str
    job: Job
    output: Path
    report: dict[str, Any]

    @property
    def source(self) -> Path:
        return self.job.opened.folder

    def texts(self) -> list[Tensor]:
        data = load_set(self.job.path.parent / "held-out.yaml", str(self.source))
        return [torch.from_numpy(sample.tokens).long() for sample in data.samples]


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in QUICK else [pytest.mark.slow]) for name in DERIVED],
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("derived")
    zoo.save(request.param, folder / "model")
    job = prepare(str(tiny.write_recipe(folder, samples=3, bits=4, group_size=32)))
    report = run(job, Options(folder / "output", CPU))
    return Made(request.param, job, folder / "output", report)


@torch.no_grad()
def log_probabilities(model: Any, texts: list[Tensor]) -> list[Tensor]:
    return [model(input_ids=text.unsqueeze(0)).logits[0].double().log_softmax(-1) for text in texts]


def test_the_kl_is_that_of_transformers_whole_models(made: Made) -> None:
    weights = (source_weights(made.source), finished_weights(made.output))
    source, candidate = (log_probabilities(zoo.whole_model(made.name, *one), made.texts()) for one in weights)
    parts = [(p[:-1].exp() * (p - q)[:-1]).sum(-1) for p, q in zip(source, candidate, strict=True)]
    kl = float(torch.cat(parts).mean())
    assert kl > 1e-4, "a comparison of two equal models would prove nothing"
    assert made.report["kl"]["mean"] == pytest.approx(kl, abs=1e-6)


def test_the_gates_pass_and_so_does_verify(made: Made) -> None:
    assert [gate["name"] for gate in made.report["gates"] if not gate["passed"]] == []
    verified = verify_folder(made.output, open_folder(made.source), CPU)
    assert verified.passed, (verified.differences, verified.misread)


def test_everything_but_experts_folded_norms_and_their_routers_has_the_sources_bytes(made: Made) -> None:
    facts, sizes, output = made.job.facts, made.job.sizes, stored(made.output)[1]
    changed = {
        facts.layer(number, name)
        for number in (sizes.moe_layers if made.job.plan.folds else [])
        for name in (facts.norm.tensor, *([facts.router.tensor] if facts.router_follows else []))
    }
    for name, tensor in stored(made.source)[1].items():
        if name in changed or ROUTED.fullmatch(name):
            continue
        found = output[name.replace("weight_scale_inv", "weight_scale")]
        assert found.dtype == tensor.dtype, name
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), name
