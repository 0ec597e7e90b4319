"""Model types without a file of facts, from a tiny model to a proven output.

The oracles are transformers' whole models and compressed-tensors' unpacking, which know nothing of what is derived.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import tiny
import torch
import zoo
from runs import JobFolder, Made, report_of
from torch import Tensor
from whole_models import finished_weights, source_weights, stored

from quantizers.architectures.families import known
from quantizers.checkpoint.reader import open_folder
from quantizers.commands.verify import verify_folder

CPU = torch.device("cpu")
QUICK = {"qwen3_5_moe as published"}  # FP8, vision, layers of several kinds, one beyond the last
# With that one they have every kind of layer, of gate, and of what layers hand on; all others are run by `-m every`.
IN_CI = {
    "deepseek_v4", "gemma4 with vision", "glm_moe_dsa", "hy_v4", "jamba", "kimi_linear", "mimo_v2_flash", "minimax",
    "qwen4_exp", "step3p7 as published", "zaya",
}  # fmt: skip
# The matrices of experts in decoder layers, each a tensor or all of a layer in two or three.
ROUTED = re.compile(
    r"(language_model\.|llm\.)?(model|backbone)\..*\.(experts\.(\d+\.\w+\.weight(_scale_inv)?|gate_up_proj|down_proj|fc[12]\.weight)"
    r"|(moe\.\w+_proj|block_sparse_moe\.\w+_linear)\.weight(_scale_inv)?)"
    r"|layers\.\d+\.experts\.\d+\.w[123]\.weight"  # in Mistral's own names
)
DERIVED = [name for name in zoo.TYPES if name not in zoo.REFUSED and name not in known()]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in QUICK else [pytest.mark.slow if name in IN_CI else pytest.mark.every])
        for name in DERIVED
    ],
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("derived")
    zoo.save(request.param, folder / "model")
    tiny.write_recipe(folder, words=20, samples=3, bits=4, group_size=32, rounding="nearest")
    return Made(folder, request.param, report_of(JobFolder(folder)))


@torch.no_grad()
def log_probabilities(model: Any, texts: list[Tensor]) -> list[Tensor]:
    return [model(input_ids=text.unsqueeze(0)).logits[0].double().log_softmax(-1) for text in texts]


def test_the_kl_is_that_of_transformers_whole_models(made: Made) -> None:
    weights = (source_weights(made.model), finished_weights(made.output))
    source, candidate = (log_probabilities(zoo.whole_model(made.name, *one), made.texts()) for one in weights)
    parts = [(p[:-1].exp() * (p - q)[:-1]).sum(-1) for p, q in zip(source, candidate, strict=True)]
    kl = float(torch.cat(parts).mean())
    assert kl > 5e-5, "a comparison of two equal models would prove nothing"
    assert made.report["kl"]["mean"] == pytest.approx(kl, abs=1e-6)


def test_the_gates_pass_and_so_does_verify(made: Made) -> None:
    assert [gate["name"] for gate in made.report["gates"] if not gate["passed"]] == []
    verified = verify_folder(made.output, open_folder(made.model), CPU)
    assert verified.passed, (verified.differences, verified.misread)


def test_everything_but_experts_folded_norms_and_their_routers_has_the_sources_bytes(made: Made) -> None:
    job, output = made.job, stored(made.output)[1]
    facts = job.facts
    changed = {
        facts.layer(number, name)
        for number in (facts.moe_layers if job.plan.folds else [])
        for name in (facts.norm.tensor, *([facts.router.tensor] if facts.router_follows else []))
    }
    for name, tensor in stored(made.model)[1].items():
        if name in changed or (ROUTED.fullmatch(name) and not facts.is_unread(name)):
            continue
        found = output[name.replace("weight_scale_inv", "weight_scale")]
        assert found.dtype == tensor.dtype, name
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), name
