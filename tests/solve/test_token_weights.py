"""The Hessians against transformers' own experts, and against slow float64 loops over tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantizers.architectures.families import architecture_for
from quantizers.architectures.gates import plain_gate
from quantizers.checkpoint.reader import open_folder
from quantizers.model.moe_inputs import MoeInputs
from quantizers.model.moe_inputs import capture_moe_inputs as seen_by
from quantizers.model.streamed_model import StreamedModel
from quantizers.planning.expert_batches import ALIGNED, by_load, expert_batches
from quantizers.solve import routing_weights
from quantizers.solve.hessians import InputHessian, blended_hessian, collect_down_hessian, sweep
from quantizers.solve.routing_weights import RoutingStatistics, routing_statistics
from quantizers.solve.symmetric import transposed_product

FEW = settings(max_examples=15, deadline=None, database=None, derandomize=True)
EXPERTS, HIDDEN, WIDTH = 4, 128, 64
LENGTHS = (37, 1, 90)
silu = torch.nn.functional.silu


@dataclass(frozen=True)
class Observed:
    """One layer of a tiny checkpoint: its module, what went in, and what was recorded."""

    model: StreamedModel
    layer: int
    states: list[torch.Tensor]
    recorded: list[MoeInputs]
    gate_up: torch.Tensor
    down: torch.Tensor


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """A layer of a random MiniMax-M2, given random states and read through `StreamedModel.record`."""
    folder = tiny.make(tmp_path_factory.mktemp("observed") / "model", seed=1)
    checkpoint = open_folder(folder)
    facts = architecture_for(checkpoint.config, "config.json")
    model = StreamedModel(checkpoint, facts, torch.device("cpu"), torch.float32)
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn(n, HIDDEN, generator=generator) for n in LENGTHS]
    with model.layer(1) as layer:
        experts: Any = layer.module.get_submodule(facts.modules.experts)
        recorded = [model.route(layer, model.attend(layer, s)) for s in states]
        return Observed(model, 1, states, recorded, experts.gate_up_proj.clone(), experts.down_proj.clone())


def down_inputs(observed: Observed, x: torch.Tensor, expert: int) -> torch.Tensor:
    """h_e (T, I) of every token from transformers' own experts, caught with a forward hook.

    Every token is sent to one expert with weight 1, and w2 replaced by an identity above zeros: what comes
    out is what w2 would have read.
    """
    caught: list[torch.Tensor] = []
    with observed.model.layer(observed.layer) as layer:
        experts: Any = layer.module.get_submodule(observed.model.facts.modules.experts)
        experts.down_proj.data = torch.eye(HIDDEN, WIDTH).repeat(EXPERTS, 1, 1)
        hook = experts.register_forward_hook(lambda _module, _arguments, output: caught.append(output))
        with torch.no_grad():
            experts(x, torch.full((x.shape[0], 1), expert), torch.ones(x.shape[0], 1))
        hook.remove()
    assert torch.equal(caught[0][:, WIDTH:], torch.zeros(x.shape[0], HIDDEN - WIDTH))
    return caught[0][:, :WIDTH]


@dataclass(frozen=True)
class Hessians:
    """`sweep` and `collect_down_hessian` of all experts."""

    input_hessian: torch.Tensor
    width_hessian: torch.Tensor
    width_mean: torch.Tensor
    seen: torch.Tensor
    dropped: torch.Tensor


def all_hessians(
    recorded: Sequence[MoeInputs],
    gate_up: torch.Tensor,
    *,
    routed_weight: float,
    full_share_at: int,
    chunk: int | None = None,
) -> Hessians:
    """The Hessians of all experts, `chunk` at a time (all at once when None)."""
    experts = gate_up.shape[0]
    found = routing_statistics(recorded, experts, routed_weight, full_share_at)
    batches = expert_batches(experts, chunk or experts)
    inputs, routed = sweep(recorded, found, batches, gate_up.shape[-1], with_all=True)
    parts = []
    for batch in batches:
        hessians = blended_hessian(routed[batch], inputs.hessian, found, batch)
        sums = collect_down_hessian(recorded, found, gate_up[slice(*batch)], gate=plain_gate(silu), batch=batch)
        assert sums.changes is None
        parts.append((hessians, sums.hessian, sums.mean, sums.seen, sums.dropped))
    return Hessians(*(torch.cat(column) for column in zip(*parts, strict=True)))


def inputs_of(recorded: Sequence[MoeInputs]) -> tuple[InputHessian, RoutingStatistics]:
    """The sums of x alone."""
    found = routing_statistics(recorded, EXPERTS, 0.0, HIDDEN)
    inputs, routed = sweep(recorded, found, [], HIDDEN, with_all=True)
    assert not routed
    return inputs, found


Read = Callable[[torch.Tensor, int], torch.Tensor]


def slow_hessians(
    recorded: Sequence[MoeInputs], read: Read, expert: int, a: float, full_share_at: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One expert's blended Σ x xᵀ, Σ h hᵀ and mean |h|, token by token in float64, from the definition.

    H = a' Σ_routed r² v vᵀ / Σ_routed r² + (1 − a') Σ_all v vᵀ / n with a' = a · min(1, n_routed / n0), and 0
    where nothing was routed.
    """
    tokens: list[tuple[torch.Tensor, torch.Tensor, float]] = []
    for sequence in recorded:
        h = read(sequence.x, expert).double()
        for t in range(sequence.x.shape[0]):
            r = [float(w) for e, w in zip(sequence.chosen[t], sequence.weight[t], strict=True) if int(e) == expert]
            tokens.append((sequence.x[t].double(), h[t], r[0] if r else -1.0))
    routed = [r for *_, r in tokens if r >= 0]
    mass = sum(r * r for r in routed)
    share = a * min(1.0, len(routed) / full_share_at) if mass else 0.0
    of_x, of_h, mean = 0.0, 0.0, 0.0
    for x, h, r in tokens:
        weight = (1 - share) / len(tokens) + (share * r * r / mass if r >= 0 and mass else 0)
        of_x, of_h, mean = of_x + weight * torch.outer(x, x), of_h + weight * torch.outer(h, h), mean + weight * h.abs()
    return torch.as_tensor(of_x), torch.as_tensor(of_h), torch.as_tensor(mean)


def assert_hessians_close(ours: torch.Tensor, slow: torch.Tensor, relative: float = 1e-6) -> None:
    """To `relative` of the product of the two columns' lengths: an off-diagonal sum may cancel to nothing."""
    length = slow.diagonal(dim1=-2, dim2=-1).sqrt()
    bound = relative * length.unsqueeze(-1) * length.unsqueeze(-2)
    worst = ((ours.double() - slow).abs() / bound.clamp(min=1e-300)).max()
    assert float(worst) <= 1, f"{float(worst) * relative:.2e} relative"


@pytest.mark.parametrize("poison", [None, float("nan"), -float("inf"), 3e38])
def test_input_hessians_are_float64_sums_of_the_usable_rows(observed: Observed, poison: float | None) -> None:
    """Oracle: all these rows in one float64 matrix; 1e-6 relative."""
    read = [s.x.clone() for s in observed.recorded]
    if poison is not None:
        read[0][5, 3] = read[2][0, 0] = poison
    recorded = [seen_by(x, s.chosen, s.weight) for x, s in zip(read, observed.recorded, strict=True)]
    sums, found = inputs_of(recorded)
    x = torch.cat(read)
    good = torch.ones(len(x), dtype=torch.bool)
    good[[5, LENGTHS[0] + LENGTHS[1]]] = poison is None
    assert (found.tokens, found.rows) == (int(good.sum()), sum(LENGTHS))
    assert_hessians_close(sums.hessian, x[good].double().mT @ x[good].double())
    torch.testing.assert_close(sums.mean.double(), x[good].double().abs().mean(0), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("routed_weight", "full_share_at"), [(0.0, HIDDEN), (0.9, HIDDEN), (1.0, 1)])
def test_blended_sums_are_the_definition_token_by_token(
    observed: Observed, routed_weight: float, full_share_at: int
) -> None:
    """Oracle: `slow_hessians` over what transformers' own experts compute; 2e-6 relative."""
    sums = all_hessians(observed.recorded, observed.gate_up, routed_weight=routed_weight, full_share_at=full_share_at)
    assert sums.seen.tolist() == [sum(LENGTHS)] * EXPERTS
    for expert in range(EXPERTS):
        of_x, of_h, mean = slow_hessians(
            observed.recorded, lambda x, e: down_inputs(observed, x, e), expert, routed_weight, full_share_at
        )
        assert_hessians_close(sums.input_hessian[expert], of_x, 2e-6)
        assert_hessians_close(sums.width_hessian[expert], of_h, 2e-6)
        torch.testing.assert_close(sums.width_mean[expert].double(), mean, rtol=2e-6, atol=0)


def random_routing(seed: int, experts: int, chosen: int, lengths: Sequence[int], hidden: int) -> list[MoeInputs]:
    """Sequences whose last expert is never chosen (unless all must be), some weights being zero."""
    generator = torch.Generator().manual_seed(seed)
    recorded = []
    for length in lengths:
        scores = torch.rand(length, experts, generator=generator)
        if chosen < experts:
            scores[:, -1] = -1
        weight = torch.rand(length, chosen, generator=generator)
        weight[:, 0] *= torch.rand(length, generator=generator) > 0.1
        x = torch.randn(length, hidden, generator=generator)
        recorded.append(seen_by(x, scores.topk(chosen, dim=-1).indices, weight))
    return recorded


@FEW
@given(
    seed=st.integers(0, 10_000),
    experts=st.integers(1, 5),
    chosen=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    a=st.sampled_from([0.0, 0.5, 1.0]),
    full_share_at=st.integers(1, 20),
    chunk=st.integers(1, 5),
)
def test_blended_sums_for_any_shape(
    seed: int, experts: int, chosen: int, lengths: list[int], a: float, full_share_at: int, chunk: int
) -> None:
    """Oracle: `slow_hessians` with h from two explicit matmuls in float64; unrouted experts and single tokens too."""
    chosen = min(chosen, experts)
    recorded = random_routing(seed, experts, chosen, lengths, 6)
    gate_up = torch.randn(experts, 8, 6, generator=torch.Generator().manual_seed(seed))
    sums = all_hessians(recorded, gate_up, routed_weight=a, full_share_at=full_share_at, chunk=chunk)

    def read(x: torch.Tensor, expert: int) -> torch.Tensor:
        w1, w3 = gate_up[expert, :4].double(), gate_up[expert, 4:].double()
        gate = x.double() @ w1.mT
        return gate * torch.sigmoid(gate) * (x.double() @ w3.mT)

    for expert in range(experts):
        of_x, of_h, mean = slow_hessians(recorded, read, expert, a, full_share_at)
        torch.testing.assert_close(sums.input_hessian[expert].double(), of_x, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(sums.width_hessian[expert].double(), of_h, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(sums.width_mean[expert].double(), mean, rtol=1e-5, atol=1e-6)


def test_an_expert_without_routed_tokens_is_solved_from_all_tokens() -> None:
    """Share 0, and exactly the sums of a plain all-token calibration; so where all its routing weights are zero."""
    recorded = random_routing(3, 4, 2, [20, 9], 8)
    recorded = [seen_by(s.x, s.chosen, s.weight.where(s.chosen != 1, torch.zeros(()))) for s in recorded]
    gate_up = torch.randn(4, 10, 8, generator=torch.Generator().manual_seed(3))
    blended = routing_statistics(recorded, 4, 0.9, 4)
    assert int(blended.routed_tokens[3]) == 0
    assert int(blended.routed_tokens[1]) > 0
    assert blended.share[[1, 3]].tolist() == [0, 0]
    sums = all_hessians(recorded, gate_up, routed_weight=0.9, full_share_at=4)
    plain = all_hessians(recorded, gate_up, routed_weight=0.0, full_share_at=4)
    for expert in (1, 3):
        assert torch.equal(sums.input_hessian[expert], plain.input_hessian[expert])
        assert torch.equal(sums.width_hessian[expert], plain.width_hessian[expert])
        assert torch.equal(sums.width_mean[expert], plain.width_mean[expert])
    assert not torch.equal(sums.width_hessian[0], plain.width_hessian[0])


@pytest.mark.parametrize("poison", [float("nan"), 1e30])
def test_rows_of_h_that_are_not_finite_are_left_out_and_counted(observed: Observed, poison: float) -> None:
    """One expert overflows for tokens with a large first column. Oracle: its sums over the other tokens."""
    gate_up = observed.gate_up.clone()
    recorded = []
    for sequence in observed.recorded:
        x = sequence.x.clone()
        x[:, 7] = 0
        x[::4, 7] = 1
        recorded.append(seen_by(x, sequence.chosen, sequence.weight))
    gate_up[2, :, 7] = poison
    # 0 · ∞ is NaN, so that every row of h is.
    bad = sum(len(range(0, n, 4)) if poison == 1e30 else n for n in LENGTHS)
    sums = all_hessians(recorded, gate_up, routed_weight=0.0, full_share_at=HIDDEN)
    assert sums.dropped.tolist() == [0, 0, bad, 0]
    assert sums.seen.tolist() == [sum(LENGTHS), sum(LENGTHS), sum(LENGTHS) - bad, sum(LENGTHS)]
    clean = all_hessians(recorded, observed.gate_up, routed_weight=0.0, full_share_at=HIDDEN)
    for name in ("input_hessian", "width_hessian", "width_mean"):
        ours, wanted = getattr(sums, name), getattr(clean, name)
        assert torch.isfinite(ours).all()
        assert torch.equal(ours[[0, 1, 3]], wanted[[0, 1, 3]])
    x = torch.cat([s.x for s in recorded])
    x = x[x[:, 7] == 0] if poison == 1e30 else x[:0]
    gate, up = (x.double() @ observed.gate_up[2].double().mT).chunk(2, dim=-1)
    h = silu(gate) * up
    if len(h):
        assert_hessians_close(sums.width_hessian[2], h.mT @ h / len(h), 2e-6)
        torch.testing.assert_close(sums.width_mean[2].double(), h.abs().mean(0), rtol=2e-6, atol=0)
    else:
        assert torch.equal(sums.width_hessian[2], torch.zeros(WIDTH, WIDTH))


@pytest.mark.parametrize("by_load", [None, 2])
@pytest.mark.parametrize("together", [3, 4096])
@pytest.mark.parametrize("batch", [(0, 5), (2, 3), (4, 5)])
def test_routed_rows_are_the_routed_tokens_in_order_and_padding_weighs_nothing(
    batch: tuple[int, int], together: int, by_load: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: nonzero() of the choices whose weight is not zero. The last expert gets no token at all."""
    monkeypatch.setattr(routing_weights, "ROUTED_ROWS", together)
    recorded = random_routing(5, 5, 2, [31], 4)[0]
    x = recorded.x.clone()
    x[7] = torch.inf
    recorded = seen_by(x, recorded.chosen, recorded.weight)
    found = routing_statistics([recorded], 5, 0.9, 4, batch_size=by_load)
    table = found.tables[0]
    kept = [((recorded.chosen == e) & (recorded.weight != 0)).nonzero(as_tuple=True) for e in found.experts]
    assert table.known == [len(tokens) for tokens, _ in kept]
    assert (recorded.weight == 0).sum() > 2  # those of row 7, and others
    parts = list(table.routed(*batch))
    assert all(len(part[0][0]) == together for part in parts[:-1])
    empty = torch.empty(batch[1] - batch[0], 0)
    rows, weight = (torch.cat([empty, *(part[i] for part in parts)], 1) for i in (0, 1))
    most = -(-max(len(tokens) for tokens, _ in kept[slice(*batch)]) // ALIGNED) * ALIGNED
    assert rows.shape == weight.shape == (batch[1] - batch[0], most)
    assert table.most(*batch) == most
    for i, expert in enumerate(range(*batch)):
        tokens, slots = kept[expert]
        assert rows[i].tolist()[: len(tokens)] == tokens.tolist()
        assert rows.shape[1] == most
        assert weight[i].tolist() == recorded.weight[tokens, slots].tolist() + [0] * (most - len(tokens))


def test_experts_of_a_batch_have_about_as_many_tokens_so_that_little_is_padded() -> None:
    """Oracle: all that an expert has in statistics in the order of numbers."""
    share, generator = torch.tensor([1.0, 10, 4] * 4), torch.Generator().manual_seed(8)
    recorded = random_routing(8, 12, 1, [900, 1100], 4)
    recorded = [
        seen_by(s.x, share.multinomial(len(s.x), True, generator=generator).unsqueeze(1), s.weight) for s in recorded
    ]
    plain, found = (routing_statistics(recorded, 12, 0.9, 90, batch_size=batch) for batch in (None, 4))
    counts = plain.routed_tokens.tolist()
    assert plain.experts == plain.numbers.tolist() == list(range(12))
    assert found.experts == by_load(counts, 4) == found.numbers.tolist()
    for field in ("routed_tokens", "share", "of_routed", "of_all"):
        assert torch.equal(getattr(found, field), getattr(plain, field)[found.numbers])
    for mine, theirs in zip(found.tables, plain.tables, strict=True):
        assert mine.known == [theirs.known[expert] for expert in found.experts]
        assert torch.equal(mine.starts, theirs.starts[found.numbers])
    padded = [sum(t.most(*batch) for t in s.tables for batch in expert_batches(12, 4)) for s in (plain, found)]
    assert padded[1] < 0.6 * padded[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transposed_product_accumulates_in_float32(dtype: torch.dtype) -> None:
    """Oracle: the float64 product of the same values; a bfloat16 accumulator would be off by 2^-9."""
    generator = torch.Generator().manual_seed(6)
    a, b = (torch.randn(300, 8, generator=generator).to(dtype) for _ in range(2))
    product = transposed_product(a, b)
    assert product.dtype == torch.float32
    bound = 1e-6 * (a.double().abs().mT @ b.double().abs())
    assert ((product.double() - a.double().mT @ b.double()).abs() <= bound).all()
