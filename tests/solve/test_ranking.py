"""A search that ranks its points with products of 11 bits chooses what the exact one chooses, or says that it may not.

On layers with heavy tails and outliers: on plain random ones the identity wins, and nothing is tested.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_layer import EXPERTS, Layer, assert_same, make_layer, silu
from tf32 import Tf32

from quantizers.device import rough
from quantizers.plan.device_memory import Residents
from quantizers.recipe.schema import Awq, Experts
from quantizers.solve import gram_engine, ranking
from quantizers.solve.awq import grid_scales, scale_losses, weight_means
from quantizers.solve.gram_engine import solve
from quantizers.solve.ranking import finalists, rough_losses, tried, unproven
from quantizers.solve.solved import Solved

HOPPER = 9, 0
CPU = torch.device("cpu")


@pytest.fixture
def ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card on which that is worthwhile."""
    monkeypatch.setattr(rough, "capability", lambda device: HOPPER)


def heavy(seed: int, experts: int = 4, rows: int = 96, columns: int = 256) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Weights (E, R, C), the Gram matrices of their inputs, and the mean of those."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def some(of: int, count: int) -> torch.Tensor:
        return torch.randperm(of, generator=generator)[:count]

    x = normal(1000, columns) @ (torch.eye(columns) + 0.05 * normal(columns, columns)) * normal(columns).exp()
    x[:, some(columns, 4)] *= 30
    x = silu(x) if seed % 2 else x
    weight = 0.02 * normal(experts, rows, columns) / normal(experts, rows, columns).abs().clamp(min=0.1)
    for expert in range(experts):
        weight[expert, some(rows, 6)] *= 15
        weight[expert][:, some(columns, 3)] *= 8
    gram = (x.mT @ x / len(x)).expand(experts, -1, -1).contiguous()
    return weight, gram, x.abs().mean(0).expand(experts, -1)


@pytest.mark.usefixtures("ranked")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("cut_off", [False, True], ids=["rounded", "cut off"])
def test_the_choice_is_the_exact_one(cut_off: bool, bits: int) -> None:
    proven = others = 0
    for seed in range(6):
        weight, gram, mean = heavy(seed)
        grid = grid_scales(mean, weight_means(weight, 32), 20, duo_scaling=True)
        wanted = scale_losses(weight, gram, grid, 32, bits)
        with Tf32(cut_off=cut_off) as products:
            losses, bound = rough_losses(weight, gram, grid, 32, bits)
            points, exact, doubtful = tried(weight, gram, grid, 32, bits, careful=False)
        assert products.rough == 2 * 20 * 3  # ranked twice here; three blocks of columns
        assert products.whole == len(points) * 3
        assert not torch.equal(losses, wanted)
        assert bool(((losses - wanted).abs() <= bound).all()), "as wrong as that they may be"
        assert len(points) == len(exact) == 4
        assert torch.equal(exact[0], wanted[0]), "the identity, for the report"
        assert doubtful is not None
        best, chosen = wanted.argmin(0), exact.argmin(0)
        for expert in range(len(best)):
            if not doubtful[expert]:
                assert exact[chosen[expert], expert] == wanted[best[expert], expert]
                assert torch.equal(points[chosen[expert], expert], grid[best[expert], expert])
                proven, others = proven + 1, others + int(best[expert] > 0)
    assert proven >= 20
    assert others >= 20, "points other than the identity"


@pytest.mark.on_device
def test_the_choice_on_the_device_is_the_exact_one(device: torch.device) -> None:
    """With the card's own rough products, where it has any that are worthwhile."""
    for seed in range(4):
        weight, gram, mean = (tensor.to(device) for tensor in heavy(seed))
        grid = grid_scales(mean, weight_means(weight, 32), 20, duo_scaling=True)
        wanted = scale_losses(weight, gram, grid, 32, 4)
        losses, bound = rough_losses(weight, gram, grid, 32, 4)
        assert bool(((losses - wanted).abs() <= bound).all())
        points, exact, doubtful = tried(weight, gram, grid, 32, 4, careful=False)
        best, chosen = wanted.argmin(0), exact.argmin(0)
        for expert in range(len(best)):
            if doubtful is None or not doubtful[expert]:
                assert torch.equal(points[chosen[expert], expert], grid[best[expert], expert])


@pytest.mark.usefixtures("ranked")
def test_where_all_points_are_as_good_that_is_said() -> None:
    weight, gram, mean = heavy(0)
    grid = torch.ones(20, *mean.shape)
    *_, doubtful = tried(weight, gram, grid, 32, 4, careful=False)
    assert doubtful is not None
    assert bool(doubtful.all())


def test_whoever_is_careful_has_all_points(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, gram, mean = heavy(0)
    grid = grid_scales(mean, weight_means(weight, 32), 20, duo_scaling=True)
    for capability, careful, points in ((HOPPER, True, 20), (HOPPER, False, 4), ((8, 9), False, 20), (None, False, 20)):
        monkeypatch.setattr(rough, "capability", lambda device, own=capability: own)
        found, losses, doubtful = tried(weight, gram, grid, 32, 4, careful=careful)
        assert len(found) == len(losses) == points
        assert (doubtful is None) == (points == 20)
    monkeypatch.setattr(rough, "capability", lambda device: HOPPER)
    assert tried(weight, gram, grid[:4], 32, 4, careful=False)[2] is None, "so few are computed exactly anyway"


def test_finalists_and_what_is_unproven() -> None:
    inf = torch.inf
    losses = torch.tensor(
        [[9.0, 1, inf, 5], [3, 5, inf, inf], [2, 6, inf, inf], [5, 3, 7, 6], [4, 4, inf, 7], [8, 7, 8, 8]]
    )
    found = finalists(losses)
    assert found.mT.tolist() == [[0, 1, 2, 4], [0, 1, 3, 4], [0, 1, 3, 5], [0, 3, 4, 5]]
    exact, bound = losses.gather(0, found), torch.zeros_like(losses)
    assert unproven(losses, bound, found, exact).tolist() == [False] * 4
    bound[3, 0] = 2.9  # it may be 2.1, and 2 is there
    bound[2, 1] = 5  # it may be 1, and so is the best
    assert unproven(losses, bound, found, exact).tolist() == [False, True, False, False]
    nothing = torch.full((6, 1), inf)
    assert unproven(nothing, nothing * 0, finalists(nothing), nothing[:4]).tolist() == [True]


def spiky(seed: int) -> Layer:
    """A layer whose norm's scale and w2's scales are worth searching."""
    layer = make_layer(seed)
    generator = torch.Generator().manual_seed(seed)
    for tensor in (layer.gate_up, layer.down, *layer.normed):
        columns = torch.randn(tensor.shape[-1], generator=generator).exp()
        tensor.mul_(columns.to(tensor.dtype))
    return layer


def solved(layer: Layer, bits: int) -> Solved:
    return solve(
        layer.recorded(),
        layer.weights(),
        norm=layer.norm,
        router=layer.router,
        activation=silu,
        settings=Experts(group_size=32, bits=bits, awq=Awq(grid=20)),
        unit=2,
        residents=Residents.all_of(3),
    )


@pytest.mark.usefixtures("ranked")
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bound", [ranking.BOUND, 1.0, 0.0], ids=["proven", "never proven", "always proven"])
def test_a_layer_is_solved_to_the_same_bytes(bound: float, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranking was not enough, the norm is searched again exactly, and a unit is solved again."""
    layer = spiky(5)
    wanted = solved(layer, bits)
    assert bool((wanted.smooth != 1).any())
    careful: list[bool] = []
    real = gram_engine._solve_unit

    def noted(*arguments: Any, **named: Any) -> Any:
        careful.append(named["careful"])
        return real(*arguments, **named)

    monkeypatch.setattr(gram_engine, "accelerated", lambda device: True)
    monkeypatch.setattr(gram_engine, "_solve_unit", noted)
    monkeypatch.setattr(ranking, "BOUND", bound)
    with Tf32(cut_off=True) as products:
        assert_same(solved(layer, bits), wanted)
    assert products.rough > 0
    units = -(-EXPERTS // 2)
    again = {ranking.BOUND: careful[units:], 1.0: [True] * units, 0.0: []}[bound]
    assert careful == [False] * units + again
    assert len(again) < units or bound == 1.0


def test_rough_products_are_worthwhile_on_some_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not rough.worthwhile(CPU)
    assert not rough.worthwhile(torch.device("meta"))
    for capability, faster in (((8, 0), True), ((8, 6), False), ((8, 9), False), ((9, 0), True), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, own=capability: own)
        assert rough.worthwhile(torch.device("cuda:0")) == faster
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not rough.worthwhile(torch.device("cuda:0"))


def test_products_are_whole_again_afterwards() -> None:
    before = torch.get_float32_matmul_precision()

    def fail() -> None:
        with rough.rough_products():
            assert torch.get_float32_matmul_precision() == "high"
            raise ValueError("spoilt")

    with pytest.raises(ValueError, match="spoilt"):
        fail()
    assert torch.get_float32_matmul_precision() == before
