"""The roles of a layer's parts, against files of facts written by hand, and classes that are known to differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import families
import pytest
import torch
import transformers
import zoo
from transformers.activations import ACT2FN

from quantizers.architectures.architecture import EXPERTS, ROUTER
from quantizers.architectures.derive import Kind, _common
from quantizers.architectures.families import architecture_for
from quantizers.architectures.roles import EXACT, Roles, kinds_of_layers, probe, require_usable
from quantizers.architectures.skeleton import Skeleton
from quantizers.system.errors import ArchitectureError

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def skeleton_of(family: str) -> Skeleton:
    """One of the seven families, as small as its tests have it."""
    return Skeleton(*families.in_transformers(families.config(family)))


def small(name: str, **changes: Any) -> Skeleton:
    """A tiny model of one of transformers' classes."""
    model_class = getattr(transformers, name)
    return Skeleton(model_class, model_class.config_class(**SMALL | changes))


def roles_of(skeleton: Skeleton, number: int) -> Roles:
    roles, *_ = probe(skeleton, number)
    assert roles is not None
    return roles


@pytest.mark.parametrize("family", families.CONFIGS)
def test_roles_are_those_that_the_family_was_written_with(family: str) -> None:
    config = families.config(family)
    facts = architecture_for(config, family)
    skeleton = skeleton_of(family)
    dense = facts.dense
    kinds = kinds_of_layers(skeleton)
    assert kinds == [part for part in (sorted(dense), [n for n in range(3) if n not in dense]) if part]
    assert all(probe(skeleton, number)[0] is None for number in dense)
    roles = roles_of(skeleton, kinds[-1][0])
    linear = {facts.in_transformers(name) for name in facts.norm.readers if name not in (ROUTER, EXPERTS)}
    found = (roles.experts, roles.norm, roles.norm_offset, roles.scoring, roles.chosen, set(roles.readers))
    written = (facts.modules.experts, facts.modules.norm, facts.norm.offset, facts.router.scoring, 2, linear)
    assert found == written
    assert roles.router_weight == facts.in_transformers(facts.router.tensor)
    assert (roles.probes["fold"] < EXACT) == (not linear)
    assert roles.probes["halves"] < EXACT
    require_usable(roles, family)


def test_a_norm_that_adds_one_and_two_kinds_of_attention() -> None:
    linear = {f"linear_{part}_head_dim": 16 for part in ("key", "value")}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    types = ["linear_attention", "full_attention", "linear_attention"]
    skeleton = small(
        "Qwen3NextForCausalLM",
        **linear | heads,
        num_hidden_layers=3,
        layer_types=types,
        shared_expert_intermediate_size=64,
    )
    assert kinds_of_layers(skeleton) == [[0, 2], [1]]
    for number in (0, 1):
        roles = roles_of(skeleton, number)
        shared = [f"mlp.{name}" for name in ("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert_gate")]
        assert (roles.norm_offset, roles.scoring, sorted(roles.readers)) == (1, "softmax", sorted(shared))


def test_a_residual_that_comes_from_the_norm_is_a_reader() -> None:
    roles = roles_of(small("MiniMaxForCausalLM", layer_types=["full_attention"] * 2, mlp_alpha_factor=3.5), 0)
    assert roles.readers == ("residual",)
    assert min(roles.probes["fold"], roles.probes["halves"]) > 0.01
    require_usable(roles, "minimax")


def test_attention_beside_the_experts_reads_their_norm() -> None:
    roles = roles_of(small("Cohere2MoeForCausalLM", num_shared_experts=1, mlp_layer_types=["sparse"] * 2), 0)
    assert {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"} < set(roles.readers)
    assert "residual" not in roles.readers  # these explain all that a scale in the norm changes
    assert min(roles.probes["fold"], roles.probes["halves"]) > 0.01


@pytest.mark.parametrize(
    ("model_type", "norm", "readers", "follows", "folds", "halves"),
    [
        # A norm and a gate of low rank behind it; the residual stream itself; a norm of the experts' own, with scores
        # of something else; matrices of shared experts in one tensor, whose gates are rows of the router's.
        ("axk2", None, [], True, False, True),
        ("flex_olmo", None, [], True, False, False),
        ("gemma4", "pre_feedforward_layernorm_2", [], False, True, False),
        ("inkling", "post_attention_layernorm", ["gate_proj", "up_proj"], True, False, False),
    ],
)
def test_what_the_experts_read_and_whether_a_scale_can_be_folded_into_it(
    model_type: str, norm: str | None, readers: list[str], follows: bool, folds: bool, halves: bool
) -> None:
    roles = roles_of(Skeleton(zoo.whole_class(model_type), zoo.config_of(model_type)), 1)
    assert (roles.norm if roles.norm_offset is not None else None) == norm
    assert roles.readers == tuple(f"mlp.shared_experts.{name}" for name in readers)
    assert (roles.router_follows, roles.probes["fold"] < EXACT) == (follows, folds)
    assert (roles.probes["halves"] < EXACT) == halves
    assert folds or roles.probes["fold"] > 0.01
    require_usable(roles, model_type)


def test_a_layer_that_reads_what_another_one_has_kept_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values that Gemma's last layers share."""
    full = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 1}
    wide = {"per_layer_config": {key: {"head_dim": 64} for key in "13"}}
    monkeypatch.setitem(zoo.TYPES, "gemma4", zoo.TYPES["gemma4"] | full | wide)
    skeleton = Skeleton(zoo.whole_class("gemma4"), zoo.config_of("gemma4"))
    with pytest.raises(
        ArchitectureError,
        # The second since transformers 5.24, which cuts what those layers get, and there is nothing to cut.
        match=r"^Gemma4ForCausalLM: (layer 3 cannot run alone: it looks for 'full_att|it cannot run with layers that)",
    ):
        probe(skeleton, 3)


class Experts(torch.nn.Module):
    """Mixtral's experts as a loop, with a product or inputs of another kind, and no function for the gate alone."""

    act_fn = torch.nn.SiLU()

    def __init__(self, other: str, gate_up_proj: torch.nn.Parameter, down_proj: torch.nn.Parameter) -> None:
        super().__init__()
        self.other, self.gate_up_proj, self.down_proj = other, gate_up_proj, down_proj

    def forward(self, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.other == "tokens":
            x = x + 0.1 * x.cumsum(0)
        elif self.other == "weight":
            weight = weight.square()
        products = torch.einsum("th,tkfh->tkf", x, self.gate_up_proj[index])
        down = torch.einsum("tkf,tkhf->tkh", self.product(products), self.down_proj[index])
        return (down * weight.unsqueeze(-1)).sum(1)

    def product(self, products: torch.Tensor) -> torch.Tensor:
        gate, up = products.chunk(2, -1)
        if self.other == "gate":
            gate = gate.clamp(max=25)
        elif self.other == "up":
            up = up.clamp(-25, 25)
        elif self.other == "one":
            up = up + 1
        return self.act_fn(gate) * up


class Gated(Experts):
    """The same with that function."""

    def _apply_gate(self, products: torch.Tensor) -> torch.Tensor:
        return self.product(products)


@pytest.mark.parametrize(
    ("other", "refuted"),
    [
        ("nothing", set()),
        ("tokens", {"tokens", "product", "large"}),
        ("weight", {"tokens", "product", "large"}),
        ("gate", {"large"}),
        ("up", {"large"}),
        ("one", {"product", "up_down", "large"}),
    ],
)
def test_experts_that_compute_something_else_are_refused(other: str, refuted: set[str]) -> None:
    roles, gated = (roles_of(with_experts(kind, other), 1) for kind in (Experts, Gated))
    assert roles.own_gate == gated.own_gate == bool(refuted)
    assert {name for name in ("tokens", "product", "up_down", "large") if not roles.probes[name] < EXACT} == refuted
    if refuted:
        first = next(name for name in ("tokens", "product", "up_down", "large") if name in refuted)
        with pytest.raises(ArchitectureError, match=rf"^model type mine: its experts .* \(probe {first}: [\d.]+ where"):
            require_usable(roles, "mine")
    if "tokens" not in refuted:  # the module's own function explains all else
        require_usable(gated, "mine")


def with_experts(kind: Callable[..., torch.nn.Module], other: str) -> Skeleton:
    """Mixtral with other experts in its last layer."""
    skeleton = small("MixtralForCausalLM")
    block: Any = skeleton.layers[1].mlp
    block.experts = kind(other, block.experts.gate_up_proj, block.experts.down_proj)
    assert kinds_of_layers(skeleton) == [[0], [1]]  # of other classes
    return skeleton


class WithoutGate(torch.nn.Module):
    """The same without a gate: the first half of the rows alone."""

    def __init__(self, other: str, gate_up_proj: torch.nn.Parameter, down_proj: torch.nn.Parameter) -> None:
        super().__init__()
        self.other, self.down_proj = other, down_proj
        self.up_proj = torch.nn.Parameter(gate_up_proj[:, ::2], requires_grad=False)
        self.act_fn = ACT2FN["relu2" if other == "clamp" else other]

    def forward(self, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        h = self.act_fn(torch.einsum("th,tkfh->tkf", x, self.up_proj[index]))
        h = h.clamp(max=25) if self.other == "clamp" else h
        return (torch.einsum("tkf,tkhf->tkh", h, self.down_proj[index]) * weight.unsqueeze(-1)).sum(1)


@pytest.mark.parametrize(("other", "degree"), [("relu2", 2), ("relu", 1), ("silu", 0), ("clamp", None)])
def test_the_power_of_a_scale_that_passes_through_experts_without_a_gate(other: str, degree: int | None) -> None:
    roles = roles_of(with_experts(WithoutGate, other), 1)
    assert not roles.own_gate
    assert not roles.has_gate
    if degree is None:
        with pytest.raises(ArchitectureError, match=r"another product where activations are large.*\(probe large: "):
            require_usable(roles, "mine")
        return
    require_usable(roles, "mine")
    assert roles.degree == degree


def test_experts_with_a_gate_in_one_layer_and_without_in_another_are_refused() -> None:
    skeleton = with_experts(WithoutGate, "relu2")
    kinds = [Kind([number], *probe(skeleton, number)) for number in (0, 1)]
    with pytest.raises(
        ArchitectureError, match=r"^whether experts have a gate is True in layer 0, and False in layer 1"
    ):
        _common(kinds)


class Transposed(WithoutGate):
    """The same with both matrices transposed, whose shapes alone would be those of the other kind."""

    is_transposed = True

    def __init__(self, other: str, gate_up_proj: torch.nn.Parameter, down_proj: torch.nn.Parameter) -> None:
        super().__init__(other, gate_up_proj, down_proj)
        self.up_proj, self.down_proj = (torch.nn.Parameter(p.mT) for p in (self.up_proj, self.down_proj))

    def forward(self, x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        h = self.act_fn(torch.einsum("th,tkhf->tkf", x, self.up_proj[index]))
        return (torch.einsum("tkf,tkfh->tkh", h, self.down_proj[index]) * weight.unsqueeze(-1)).sum(1)


def test_transposed_experts_without_a_gate_are_what_they_say() -> None:
    roles = roles_of(with_experts(Transposed, "relu2"), 1)
    assert roles.transposed
    assert roles.degree == 2


class OtherNames(torch.nn.Module):
    def __init__(self, _: str, gate_up_proj: torch.nn.Parameter, down_proj: torch.nn.Parameter) -> None:
        super().__init__()
        self.fc1, self.fc2 = gate_up_proj, down_proj


def test_matrices_of_another_kind_are_refused() -> None:
    with pytest.raises(ArchitectureError, match=r"^MixtralForCausalLM: its experts hold fc1 \[.*\], not gate_up_proj"):
        probe(with_experts(OtherNames, ""), 1)


def test_experts_of_which_several_read_other_multiples_of_a_token_are_refused() -> None:
    message = "^Llama4ForCausalLM: each of the 2 experts of a token reads another multiple of"
    with pytest.raises(ArchitectureError, match=message):
        probe(small("Llama4ForCausalLM", num_experts_per_tok=2), 1)
