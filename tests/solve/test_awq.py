"""The scale search against replayed matmuls in float64, the design's formula, and llm-compressor's own search."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantizers.solve.awq import fold_norm, grid_scales, scale_losses, weight_means

FEW = settings(max_examples=20, deadline=None, database=None, derandomize=True)


def random_case(
    seed: int, experts: int, rows: int, columns: int, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights (E, R, C), inputs (T, C) with outlier and dead columns, and their Hessian from float64."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(experts, rows, columns, generator=generator) * columns**-0.5
    spread = torch.randn(columns, generator=generator).exp()
    spread[columns // 3] *= 20
    x = torch.randn(tokens, columns, generator=generator) * spread
    x[:, columns // 2] = 0
    return weight, x, (x.double().mT @ x.double()).float()


def slow_delta(weight: torch.Tensor, s: torch.Tensor, group: int, bits: int) -> torch.Tensor:
    """Q(W s) / s − W for one (R, C) matrix, group by group, with the arithmetic that a file's reader sees.

    Codes and scales are float32 and bfloat16 as in the code under test, so that both measure the same D.
    """
    half = 2 ** (bits - 1)
    delta = torch.empty_like(weight)
    for start in range(0, weight.shape[1], group):
        part = slice(start, start + group)
        scaled = weight[:, part] * s[part]
        step = (scaled.abs().max(1).values / (half - 0.5)).to(torch.bfloat16).float()
        step[step == 0] = 1
        step[scaled.amax(1) > -scaled.amin(1)] *= -1
        codes = (scaled / step[:, None]).round().clamp(-half, half - 1)
        delta[:, part] = codes * step[:, None] / s[part] - weight[:, part]
    return delta


@FEW
@given(
    seed=st.integers(0, 10_000),
    experts=st.integers(1, 3),
    rows=st.integers(1, 20),
    groups=st.integers(1, 3),
    group=st.sampled_from([8, 32]),
    tokens=st.integers(1, 60),
    bits=st.sampled_from([2, 4, 8]),
    points=st.integers(3, 8),
    shared=st.booleans(),
)
def test_losses_are_replayed_losses_for_any_shape(
    seed: int, experts: int, rows: int, groups: int, group: int, tokens: int, bits: int, points: int, shared: bool
) -> None:
    """Oracle as above; 1e-6 of Σ |D| |H| |D|ᵀ, which is what float32 can promise where terms cancel (T < C)."""
    weight, x, hessian = random_case(seed, experts, rows, groups * group, tokens)
    means = weight_means(weight, group)
    magnitude = x.abs().mean(0, keepdim=True)
    if shared:
        grid, hessians = grid_scales(magnitude, means.mean(0, keepdim=True), points, True), hessian.unsqueeze(0)
    else:
        grid, hessians = (
            grid_scales(magnitude.expand(experts, -1), means, points, True),
            hessian.expand(experts, -1, -1),
        )
    losses = scale_losses(weight, hessians, grid, group, bits)
    for point in range(points):
        for expert in range(experts):
            delta = slow_delta(weight[expert], grid[point, 0 if shared else expert], group, bits).double()
            replayed = float((delta @ x.double().mT).square().sum())
            scale = float((delta.abs() @ hessian.double().abs() * delta.abs()).sum())
            assert abs(float(losses[point, expert]) - replayed) <= 1e-6 * scale, (point, expert)


def test_a_loss_that_is_not_finite_is_infinite_and_leaves_other_experts_alone() -> None:
    """A NaN or infinite Hessian must never win the search."""
    weight, x, hessian = random_case(4, experts=3, rows=4, columns=32, tokens=40)
    hessians = hessian.repeat(3, 1, 1)
    hessians[0, 5, 5], hessians[2, 1, 1] = float("nan"), float("inf")
    grid = grid_scales(x.abs().mean(0).expand(3, -1), weight_means(weight, 32), 5, True)
    losses = scale_losses(weight, hessians, grid, 32, 4)
    assert torch.isinf(losses[:, [0, 2]]).all()
    torch.testing.assert_close(losses[:, 1:2], scale_losses(weight[1:2], hessian[None], grid[:, 1:2], 32, 4))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("duo", [True, False])
def test_grid_is_finite_and_positive_whatever_comes_in(poison: float, duo: bool) -> None:
    """A dead or overflowing column must not put a zero, NaN or infinity into the file."""
    x_mean, w_mean = torch.full((2, 8), 3.0), torch.full((2, 8), 0.5)
    x_mean[0, 2] = poison
    w_mean[0, 3] = 0
    grid = grid_scales(x_mean, w_mean, 12, duo)
    assert torch.isfinite(grid).all()
    assert (grid > 0).all()
    assert torch.equal(grid[:, 1], grid_scales(x_mean[1:], w_mean[1:], 12, duo)[:, 0])


class LibrarySearch:
    """llm-compressor's `AWQModifier._compute_best_scale` on one linear layer, made to choose a given point."""

    def __init__(self, weight: torch.Tensor, x: torch.Tensor, points: int, duo: bool, bits: int, group: int) -> None:
        pytest.importorskip("llmcompressor", reason="it takes no transformers after 5.17")
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from llmcompressor.modifiers.transform.awq.base import AWQModifier

        self.weight, self.x, self.target = weight, x, 0
        self.losses: list[float] = []
        search = self

        class Forced(AWQModifier):
            def _run_samples(self, module: Any) -> list[torch.Tensor]:
                return [module(search.x)]

            def _compute_loss(self, wanted: list[torch.Tensor], got: list[torch.Tensor]) -> float:
                search.losses.append(float((wanted[0].double() - got[0].double()).square().sum()))
                return 0.0 if len(search.losses) - 1 == search.target else 1.0

        self.modifier = Forced(n_grid=points, duo_scaling=duo)
        # scale_dtype: the library's group scales rounded as the file stores them, which is what ours searches with.
        arguments = QuantizationArgs(
            num_bits=bits, type="int", symmetric=True, strategy="group", group_size=group, scale_dtype=torch.bfloat16
        )
        self.scheme = QuantizationScheme(targets=["Linear"], weights=arguments)

    def linear(self, weight: torch.Tensor) -> torch.nn.Module:
        from compressed_tensors.quantization import initialize_module_for_quantization
        from llmcompressor.modifiers.quantization.calibration import initialize_observer

        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False).requires_grad_(False)
        linear.weight.data = weight.clone()
        initialize_module_for_quantization(linear, self.scheme)
        initialize_observer(linear, "weight")
        linear.quantization_enabled = False  # as during calibration: the search quantizes the weight by itself
        return linear

    @torch.no_grad()
    def scales(self, target: int) -> torch.Tensor:
        """The scale of grid point `target`; `losses` then holds ‖(Q(W s)/s − W) X‖² of every point."""
        from llmcompressor.modifiers.transform.awq.mappings import ResolvedMapping

        self.target, self.losses = target, []
        linear, norm = self.linear(self.weight), torch.nn.LayerNorm(self.weight.shape[1])
        mapping = ResolvedMapping("norm", norm, [linear], ["linear"], linear, "linear")
        self.modifier._smooth_activation_stats["norm"] = [self.x.abs().sum(0), torch.tensor(self.x.shape[0])]
        chosen: torch.Tensor = self.modifier._compute_best_scale(
            mapping, [self.x @ self.weight.mT], {linear: self.weight.clone()}
        )
        return chosen


@pytest.mark.parametrize(("bits", "duo"), [(4, True), (8, False)])
def test_grid_and_losses_are_llm_compressors(duo: bool, bits: int) -> None:
    """Oracle: the library's own grid search, every scale that it tries and every loss that it measures."""
    points = 8 if bits == 4 else 5
    weight, x, hessian = random_case(7, experts=1, rows=24, columns=64, tokens=50)
    library = LibrarySearch(weight[0], x, points, duo, bits, group=32)
    grid = grid_scales(x.abs().mean(0, keepdim=True), weight_means(weight, 32), points, duo)
    for point in range(points):
        torch.testing.assert_close(library.scales(point).float(), grid[point, 0], rtol=2e-6, atol=0)
    ours = scale_losses(weight, hessian.unsqueeze(0), grid, 32, bits, signed=False)[:, 0]
    torch.testing.assert_close(ours, torch.tensor(library.losses), rtol=1e-5 if bits == 4 else 1e-4, atol=0)


def test_weight_means_of_many_experts_are_llm_compressors_layer_means() -> None:
    """Oracle: `AWQModifier._compute_layer_means` over every expert's matrices as one list of layers."""
    weight, x, _ = random_case(8, experts=4, rows=6, columns=64, tokens=3)
    library = LibrarySearch(weight[0], x, 5, True, 4, group=32)
    means = library.modifier._compute_layer_means([library.linear(expert) for expert in weight])
    torch.testing.assert_close(weight_means(weight, 32).mean(0), means.float(), rtol=1e-6, atol=0)


def test_folding_is_exact_for_every_pair_of_bfloat16_significands() -> None:
    """All 128 · 128 quotients, both signs: s is norm / norm' as float32 divides, and s · norm' gives the norm back.

    Float32 can miss the norm by one unit in its last place; rounded to the file's bfloat16 it is the norm.
    """
    significands = torch.arange(128, 256) / 128
    norm, divisor = (t.flatten() for t in torch.meshgrid(significands, significands, indexing="ij"))
    norm = torch.cat([norm, -norm]).bfloat16()
    folded, s = fold_norm(norm, torch.cat([divisor, divisor]) * 1.003)
    assert folded.dtype == torch.bfloat16
    assert s.dtype == torch.float32
    assert (s > 0).all()
    assert torch.equal(folded, (norm.float() / (torch.cat([divisor, divisor]) * 1.003)).bfloat16())
    assert torch.equal(s, norm.float() / folded.float())
    product = folded.float() * s
    assert ((product - norm.float()).abs() <= 2.0**-23 * norm.float().abs()).all()
    assert torch.equal(product.bfloat16(), norm)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_folding_leaves_alone_what_cannot_be_divided(dtype: torch.dtype) -> None:
    """Zero, minus zero, and quotients that underflow or overflow: s is 1 and the norm its own."""
    small, large = torch.finfo(dtype).tiny, torch.finfo(dtype).max
    norm = torch.tensor([0.0, -0.0, small, large, 1.0, -2.0]).to(dtype)
    s = torch.tensor([3.0, 3.0, 1e9, 1e-9, 2.0, 4.0])
    folded, exact = fold_norm(norm, s)
    assert torch.equal(folded[:4].float(), norm[:4].float())
    assert exact.tolist() == [1, 1, 1, 1, 2, 4]
    assert folded[4:].tolist() == [0.5, -0.5]
