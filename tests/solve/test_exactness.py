"""What scaling alone changes, before anything is rounded: nothing where it is done, and much where it is refused.

Whole models of transformers' in float32, with random scales instead of searched ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from torch import Tensor
from whole_models import source_weights

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import architecture_for
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.planning.assign_actions import expected_tensors, folds, make_plan
from quantizers.recipe.schema import Awq, Experts
from quantizers.solve.awq import fold_norm
from quantizers.system.errors import RecipeError

HIDDEN, WIDTH = 64, 32
ALIKE = ("kimi_k2", "glm4_moe_lite")  # latent attention, and a shared expert that reads the norm, as DeepSeek-V3


def positive(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).mul(0.7).exp()


@torch.no_grad()
def logs(model: Any, tokens: Tensor) -> Tensor:
    return torch.log_softmax(model(tokens[None]).logits[0].double(), dim=-1)


def scale(layer: Any, generator: torch.Generator, fold: bool) -> None:
    """Between every expert's up and down, and, with `fold`, between the norm and what this program compensates."""
    experts = layer.mlp.experts
    count, hidden, width = experts.down_proj.shape
    s = positive(generator, count, width)
    experts.gate_up_proj[:, width:] /= s[..., None]
    experts.down_proj *= s[:, None]
    if fold:
        norm = layer.post_attention_layernorm
        stored, smooth = fold_norm(norm.weight.bfloat16(), positive(generator, hidden))
        norm.weight.copy_(stored)
        layer.mlp.gate.weight *= smooth
        experts.gate_up_proj *= smooth


def change(model: Any, vocabulary: int, fold: bool) -> float:
    """How far a model's log-probabilities move when all its layers are scaled."""
    tokens = torch.randint(0, vocabulary, (40,), generator=torch.Generator().manual_seed(5))
    before = logs(model, tokens)
    generator = torch.Generator().manual_seed(6)
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            scale(layer, generator, fold)
    return float((logs(model, tokens) - before).abs().max() / before.abs().max())


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.every if name in ALIKE else ()) for name in sorted(families.CONFIGS)],
)
def test_scaling_alone_is_exact(family: str, tmp_path: Path) -> None:
    """With the norm as it is stored, in bfloat16, where it is folded; where a shared expert reads it, that is not."""
    folder = families.write(tmp_path / "model", family)
    model = source_weights(folder)
    facts = architecture_for(families.config(family), "x")
    folded = folds(facts, Experts(), "x")
    assert folded == (family in ("minimax_m2", "mixtral", "qwen3_moe"))
    assert change(families.whole_model(*model), 320, fold=folded) < 1e-5
    if not folded:
        assert change(families.whole_model(*model), 320, fold=True) > 1e-2


def facts_with(*readers: str) -> Architecture:
    facts = architecture_for({"model_type": "qwen3_moe"}, "x")
    norm = facts.norm.model_copy(update={"readers": ["router", "experts", *readers]})
    return facts.model_copy(update={"norm": norm})


def planned(facts: Architecture, experts: Experts) -> Any:
    config = families.config("qwen3_moe")
    tensors: dict[str, Spec] = expected_tensors(facts, config, "here")
    return make_plan(facts, tensors, experts, "here", (128, 128))


@pytest.mark.parametrize("reader", ["self_attn.o_proj", "residual"])
def test_a_fold_that_is_not_exact_is_left_out_or_refused_by_name(reader: str) -> None:
    facts = facts_with(reader)
    plan = planned(facts, Experts())
    assert not plan.folds
    kept = {action.source: action for action in plan.actions if action.kind == "keep"}
    for name in (facts.norm.tensor, facts.router.tensor):
        action = kept[facts.layer(1, name)]
        assert action.outputs == {action.source: action.spec}
    with pytest.raises(RecipeError, match=rf"^here: experts\.awq\.fold: .* also read by {reader}, .*; remove the key"):
        planned(facts, Experts(awq=Awq(fold=True)))
    assert planned(facts_with(), Experts(awq=Awq(fold=True))).folds


def test_llm_compressor_does_not_fold_a_norm_that_the_model_adds_one_to() -> None:
    facts = facts_with()
    facts = facts.model_copy(update={"norm": facts.norm.model_copy(update={"offset": 1})})
    assert planned(facts, Experts()).folds
    assert not planned(facts, Experts(engine="llmcompressor")).folds
    with pytest.raises(RecipeError, match=r"llm-compressor divides post_attention_layernorm\.weight itself"):
        planned(facts, Experts(engine="llmcompressor", awq=Awq(fold=True)))


@pytest.mark.parametrize("offset", [0, 1])
def test_what_the_norm_is_really_divided_by_is_exact(offset: int) -> None:
    """offset + norm' times the returned scale is offset + norm, though norm' is rounded to bfloat16."""
    generator = torch.Generator().manual_seed(1)
    norm = (torch.randn(256, generator=generator) * 0.3 + 1 - offset).bfloat16()
    s = positive(generator, 256)
    folded, exact = fold_norm(norm, s, offset)
    assert folded.dtype == torch.bfloat16
    assert torch.allclose((offset + folded.float()) * exact, offset + norm.float(), rtol=3e-7)
    assert float((exact / s - 1).abs().median()) < 0.005


def test_a_reader_that_is_no_module_is_refused() -> None:
    facts = architecture_for({"model_type": "mixtral"}, "x").model_dump()
    facts["norm"]["readers"] = ["router", "self_attn.z_proj"]
    with pytest.raises(ValueError, match=r"norm\.readers: self_attn\.z_proj is neither router, experts nor residual"):
        Architecture.model_validate(facts)
