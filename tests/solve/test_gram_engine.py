"""The gram engine's invariants, and a whole layer solved again by a slow oracle that replays the inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_layer import EXPERTS, GROUP, HIDDEN, WIDTH, Layer, assert_same, make_layer, plain, silu

from quantizers.architectures.gates import Gate, gate_of
from quantizers.architectures.matrices import MATRICES
from quantizers.formats.packed_integers import dequantize
from quantizers.planning.device_memory import Residents
from quantizers.recipe.schema import Awq, Experts
from quantizers.solve import solver
from quantizers.solve.awq import grid_scales, weight_means
from quantizers.solve.damping import damped
from quantizers.solve.hessians import collect_down_hessian
from quantizers.solve.result import LayerResult
from quantizers.solve.rounding import gptq, mse_scales, refine
from quantizers.solve.routing_weights import routing_statistics
from quantizers.solve.solver import corrected, solve

BATCH = 8


class Shifted:
    """Experts with a gate of their own, clamped and shifted."""

    def _apply_gate(self, products: torch.Tensor) -> torch.Tensor:
        gate, up = products.chunk(2, dim=-1)
        return silu(gate.clamp(max=1)) * (up.clamp(-1, 1) + 1)


def solve_layer(
    layer: Layer,
    *,
    size: int = BATCH,
    resident: int = 8,
    gate: Gate = plain,
    inner: int = 1,
    bias: torch.Tensor | None = None,
    **options: Any,
) -> LayerResult:
    settings = Experts(**({"group_size": GROUP, "awq": Awq(grid=8)} | options))
    return solve(
        layer.recorded(),
        layer.weights(),
        norm=layer.norm,
        router=layer.router,
        shape=layer.router.shape,
        gate=gate,
        inner=inner,
        bias=bias,
        settings=settings,
        batch_size=size,
        residents=Residents(resident, size, 0),
    )


def weights(solved: LayerResult) -> tuple[torch.Tensor, torch.Tensor]:
    """Fused gate_up (E, 2I, H) and down (E, H, I) as a reader of the file sees them."""
    gate, up, down = (dequantize(solved.codes[m], solved.scales[m]) for m in MATRICES)
    return torch.cat([gate, up], dim=1), down


def outputs(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Every expert's output (E, T, H) for every token, in float64."""
    gate, up = (x.double() @ gate_up.double().mT).chunk(2, dim=-1)
    return (silu(gate) * up) @ down.double().mT


METHODS = pytest.mark.parametrize(
    ("awq", "bits", "scales", "rounding", "sign"),
    [
        (Awq(grid=8), 4, "mse", "gptq", "positive"),
        (Awq(grid=6, duo_scaling=False), 8, "minmax", "gptq", "positive"),
        (Awq(grid=6), 3, "mse", "gptq", "both"),
        (False, 2, "minmax", "nearest", "both"),
    ],
)


@METHODS
def test_what_is_solved_has_the_promised_shapes_dtypes_and_ranges(
    awq: Any, bits: int, scales: str, rounding: str, sign: str
) -> None:
    """Codes int8 within the range and using it, scales bfloat16, finite and not zero; arguments left alone."""
    layer = make_layer()
    before = [t.clone() for t in (layer.norm, layer.router, layer.gate_up, layer.down)]
    solved = solve_layer(layer, awq=awq, bits=bits, scales=scales, rounding=rounding, scales_sign=sign)
    after = (layer.norm, layer.router, layer.gate_up, layer.down)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    shapes = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    assert set(solved.codes) == set(solved.scales) == set(MATRICES)
    for matrix in MATRICES:
        codes, scale = solved.codes[matrix], solved.scales[matrix]
        rows, columns = shapes[matrix]
        assert codes.shape == (EXPERTS, rows, columns)
        assert codes.dtype == torch.int8
        assert -(2 ** (bits - 1)) == int(codes.min())
        assert int(codes.max()) == 2 ** (bits - 1) - 1
        assert scale.shape == (EXPERTS, rows, columns // GROUP)
        assert scale.dtype == torch.bfloat16
        assert torch.isfinite(scale).all()
        assert (scale != 0).all()
        assert bool((scale < 0).any()) == (sign == "both")
    assert solved.norm.dtype == torch.bfloat16
    assert all(isinstance(v, float) and v >= 0 for v in solved.error.values())


def test_folding_is_exact_and_the_router_compensated() -> None:
    """smooth = norm / norm' as float32 divides; router' = router · smooth; where the norm is zero nothing moves."""
    layer = make_layer()
    solved = solve_layer(layer)
    norm, folded = layer.norm.float(), solved.norm.float()
    assert solved.router is not None
    live = norm != 0
    assert torch.equal(solved.smooth[live], norm[live] / folded[live])
    assert torch.equal(solved.smooth[~live], torch.ones(int((~live).sum())))
    assert torch.equal(solved.norm[~live], layer.norm[~live])
    product = folded * solved.smooth
    assert ((product - norm).abs() <= 2.0**-23 * norm.abs()).all()
    assert torch.equal(product.bfloat16(), layer.norm)
    assert torch.equal(solved.router, layer.router * solved.smooth)
    assert float(solved.smooth.max() / solved.smooth.min()) > 2  # outlier channels: the search did find something


def test_the_folded_router_gives_the_same_logits() -> None:
    """Oracle: float64. Only float32 rounding of norm', smooth and router' remains, and no choice changes."""
    layer = make_layer()
    solved = solve_layer(layer)
    assert solved.router is not None
    for normed in layer.normed:
        wanted = normed.double() * layer.norm.double() @ layer.router.double().mT
        got = normed.double() * solved.norm.double() @ solved.router.double().mT
        size = (normed.double() * layer.norm.double()).abs() @ layer.router.double().abs().mT
        assert ((got - wanted).abs() <= 3e-7 * size).all()
        chosen = [logits.topk(2, dim=-1).indices.sort(-1).values for logits in (got, wanted)]
        assert torch.equal(*chosen)


@pytest.mark.parametrize(("rounding", "awq"), [("nearest", Awq(grid=6, duo_scaling=False)), ("gptq", Awq(grid=8))])
def test_folding_leaves_every_experts_function_as_it_was(awq: Any, rounding: str) -> None:
    """Oracle: the source's experts in float64. With 8 bits the whole solved block is within 2.5 % of them.

    A scale that is not undone where it should be is off by tens of percent.
    """
    layer = make_layer()
    solved = solve_layer(layer, awq=awq, bits=8, rounding=rounding)
    gate_up, down = weights(solved)
    for normed in layer.normed:
        wanted = outputs(normed.double() * layer.norm.double(), layer.gate_up, layer.down)
        got = outputs(normed.double() * solved.norm.double(), gate_up, down)
        relative = (got - wanted).square().sum((1, 2)).sqrt() / wanted.square().sum((1, 2)).sqrt()
        assert float(relative.max()) < 0.025, relative


def test_without_awq_nothing_is_folded() -> None:
    """Norm its own, smooth ones, no router; the codes are of the source's own weights."""
    layer = make_layer()
    solved = solve_layer(layer, awq=False, scales="minmax", rounding="nearest")
    assert torch.equal(solved.norm, layer.norm)
    assert torch.equal(solved.smooth, torch.ones(HIDDEN))
    assert solved.router is None
    gate_up, down = weights(solved)
    for got, source in ((gate_up, layer.gate_up), (down, layer.down)):
        step = source.unflatten(-1, (-1, GROUP)).abs().amax(-1, keepdim=True) / 7.5
        assert ((got - source).unflatten(-1, (-1, GROUP)).abs() <= 0.54 * step).all()
    assert set(solved.error) == {"gate_up_rounding", "down_rounding", "expert_tokens"}


@METHODS
def test_experts_at_a_time_do_not_change_a_code(awq: Any, bits: int, scales: str, rounding: str, sign: str) -> None:
    """One, three and all at once: on a CPU the same bits, and the same errors up to the order of adding."""
    layer = make_layer(1)
    how: Any = {"awq": awq, "bits": bits, "scales": scales, "rounding": rounding, "scales_sign": sign}
    whole = solve_layer(layer, size=EXPERTS, **how)
    for size in (1, 3):
        part = solve_layer(layer, size=size, **how)
        assert_same(part, whole)
        assert part.error == pytest.approx(whole.error, rel=1e-5)
        assert sorted(part.fallbacks) == sorted(whole.fallbacks)


@pytest.mark.on_device
def test_errors_go_down(device: torch.device) -> None:
    """After the search not above before; AWQ, MSE scales and GPTQ each lower the error of what was calibrated."""
    layer = make_layer(0).to(device)
    solved = solve_layer(layer)
    for name in ("norm_search", "down_search"):
        assert 0 < solved.error[f"{name}_after"] <= solved.error[f"{name}_before"]
    assert solved.error["norm_search_after"] < 0.9 * solved.error["norm_search_before"]
    plain = solve_layer(layer, scales="minmax", rounding="nearest")
    mse = solve_layer(layer, scales="mse", rounding="nearest")
    none = solve_layer(layer, awq=False, scales="minmax", rounding="nearest")
    for name in ("gate_up_rounding", "down_rounding"):
        assert solved.error[name] < 0.8 * mse.error[name]
        assert mse.error[name] < plain.error[name] < none.error[name]


@pytest.mark.parametrize("rounding", ["nearest", "gptq"])
def test_reported_errors_are_those_of_replayed_inputs(rounding: str) -> None:
    """Without AWQ and blending. Oracle: ‖(Ŵ − W) X‖ / ‖W X‖ over all experts and tokens, in float64."""
    layer = make_layer(3)
    solved = solve_layer(layer, awq=False, routed_weight=0.0, rounding=rounding)
    gate_up, down = weights(solved)
    x = torch.cat([r.x for r in layer.recorded()]).double()
    gate, up = (x @ gate_up.double().mT).chunk(2, dim=-1)  # the rounded ones: w2 reads what it will be served
    inputs = {"gate_up": x.expand(EXPERTS, -1, -1), "down": silu(gate) * up}
    compared = [("gate_up", gate_up, layer.gate_up)]
    if rounding == "nearest":  # with gptq w2 is corrected first, see test_rounding_reads_the_inputs_…
        compared.append(("down", down, layer.down))
    for name, got, source in compared:
        lost = (inputs[name] @ (got.double() - source.double()).mT).square().sum()
        whole = (inputs[name] @ source.double().mT).square().sum()
        assert solved.error[f"{name}_rounding"] == pytest.approx(float((lost / whole).sqrt()), rel=1e-5)


def slow_quantized(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and bfloat16 scales of one matrix by compressed-tensors, whose scales are positive."""
    from compressed_tensors.quantization import QuantizationArgs, quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = QuantizationArgs(
        num_bits=bits, type="int", symmetric=True, strategy="group", group_size=GROUP, scale_dtype=torch.bfloat16
    )
    view = weight.unflatten(-1, (-1, GROUP))
    turned = torch.where(view.amax(-1) > -view.amin(-1), -1.0, 1.0)
    scale, zero = calculate_qparams(view.amin(-1), view.amax(-1), arguments)
    weight = weight * turned.repeat_interleave(GROUP, -1)
    return quantize(weight, scale, zero, arguments, dtype=torch.int8), scale * turned


@pytest.mark.parametrize(("degree", "bits"), [(2, 4), (2, 8), (1, 4), (0, 8)])
def test_experts_without_a_gate_compute_what_the_source_does(degree: int, bits: int) -> None:
    """With a scale between up and down that is exact: none but the right power gives so small an error."""
    layer = make_layer(2, experts=3)
    activation = {2: lambda x: torch.relu(x).square(), 1: torch.relu, 0: silu}[degree]
    alone = Layer(layer.norm, layer.router, layer.gate_up[:, :WIDTH], layer.down, layer.normed)
    solved = solve_layer(alone, gate=activation, inner=degree, bits=bits)
    assert [*solved.codes] == ["up", "down"]
    up, down = (dequantize(solved.codes[matrix], solved.scales[matrix]).double() for matrix in ("up", "down"))
    x = torch.cat([recorded.x for recorded in alone.recorded()]).double()
    wanted = activation(x @ alone.gate_up.double().mT) @ alone.down.double().mT
    output = activation(x / solved.smooth.double() @ up.mT) @ down.mT
    assert (output - wanted).norm() / wanted.norm() < (0.02 if bits == 8 else 0.2)
    moved = (up / (alone.gate_up * solved.smooth)).flatten(1).median(1).values
    assert bool(((moved - 1).abs() > 0.01).any()) == (degree > 0)


def test_a_bias_is_part_of_what_down_reads() -> None:
    """The Hessian of h against the sum over all tokens; and a solution with it is nearer to the source than without."""
    layer = make_layer(6, experts=3)
    bias = 2 * torch.randn(3, 2 * WIDTH, generator=torch.Generator().manual_seed(7))
    gate = gate_of(Shifted(), own=True)
    recorded = layer.recorded()
    x = torch.cat([block.x for block in recorded])
    routing = routing_statistics(recorded, 3, 0.0, HIDDEN)
    sums = collect_down_hessian(recorded, routing, layer.gate_up, gate=gate, batch=(0, 3), bias=bias)
    h = Shifted()._apply_gate(x @ layer.gate_up.mT + bias.unsqueeze(1))  # (E, T, I)
    torch.testing.assert_close(sums.hessian, h.mT @ h / len(x), rtol=1e-4, atol=1e-5)
    errors = []
    for given in (bias, None):
        solved = solve_layer(layer, gate=gate, inner=False, bias=given, bits=3, routed_weight=0.0)
        gate_up, down = weights(solved)
        output = Shifted()._apply_gate(x / solved.smooth @ gate_up.mT + bias.unsqueeze(1)) @ down.mT
        errors.append(float((output - h @ layer.down.mT).norm()))
    assert errors[0] < errors[1]


def test_choices_of_experts_without_matrices_are_left_out() -> None:
    """They count as nobody's tokens, whatever their weights; all else is as with their weights at zero."""
    layer = make_layer(8, experts=5)
    recorded = layer.recorded(chosen=3)
    less = [block._replace(weight=block.weight.masked_fill(block.chosen >= 3, 0)) for block in recorded]
    ours, wanted = (routing_statistics(blocks, count, 0.7, HIDDEN) for blocks, count in ((recorded, 3), (less, 5)))
    assert torch.equal(ours.routed_tokens, wanted.routed_tokens[:3])
    assert torch.equal(ours.share, wanted.share[:3])
    assert torch.equal(ours.of_routed, wanted.of_routed[:3])
    for mine, theirs in zip(ours.tables, wanted.tables, strict=True):
        for number in range(3):
            pairs = zip(mine.routed(number, number + 1), theirs.routed(number, number + 1), strict=True)
            for (rows, weight), (other_rows, other_weight) in pairs:
                assert torch.equal(weight, other_weight)
                assert torch.equal(rows[weight != 0], other_rows[weight != 0])


def slow_replay(weight: torch.Tensor, s: torch.Tensor, x: torch.Tensor, share: torch.Tensor, bits: int) -> float:
    """Σ over tokens of share · ‖(Q(W s)/s − W) x‖² in float64, by running the tokens."""
    codes, scale = slow_quantized(weight * s, bits)
    delta = codes.double() * scale.double().repeat_interleave(GROUP, -1) / s.double() - weight.double()
    return float(((x.double() @ delta.mT).square().sum(-1) * share).sum())


@pytest.mark.parametrize(("routed_weight", "bits", "own"), [(0.0, 8, False), (0.9, 4, False), (0.9, 8, True)])
def test_a_whole_layer_solved_again_by_replaying_its_inputs(routed_weight: float, bits: int, own: bool) -> None:
    """Min-max and nearest. Oracle: no Hessian anywhere: every grid point is run on every token in float64,

    expert by expert; the best is folded; compressed-tensors gives scales and codes. With a gate of their own the
    experts get no scale before w2.
    """
    layer = make_layer(5, experts=3, tokens=25)
    options: Any = {"bits": bits, "scales": "minmax", "rounding": "nearest", "routed_weight": routed_weight}
    solved = solve_layer(layer, gate=gate_of(Shifted(), own=True) if own else plain, inner=not own, **options)
    recorded = layer.recorded()
    x, chosen, weight = (torch.cat([getattr(r, name) for r in recorded]) for name in ("x", "chosen", "weight"))
    tokens = len(x)

    mean = x.double().abs().mean(0).float()
    grid = grid_scales(mean[None], weight_means(layer.gate_up, GROUP).mean(0, keepdim=True), 8, True)[:, 0]
    each = torch.full((tokens,), 1 / tokens, dtype=torch.float64)
    losses = [sum(slow_replay(w, s, x, each, bits) for w in layer.gate_up) for s in grid]
    best = min(range(8), key=lambda point: losses[point])
    assert best > 0
    assert solved.error["norm_search_before"] == pytest.approx(losses[0], rel=1e-5)
    assert solved.error["norm_search_after"] == pytest.approx(losses[best], rel=1e-5)
    norm = (layer.norm.float() / grid[best]).bfloat16()
    assert torch.equal(solved.norm, norm)
    smooth = torch.where(norm == 0, torch.ones(HIDDEN), layer.norm.float() / norm.float())
    assert torch.equal(solved.smooth, smooth)

    before, after = 0.0, 0.0
    for expert in range(3):
        w1, w3 = layer.gate_up[expert].chunk(2)
        gate, up = (slow_quantized(part * smooth, bits) for part in (w1, w3))
        read = x.double() / smooth.double()
        served = [
            read @ (codes.double() * scale.double().repeat_interleave(GROUP, -1)).mT for codes, scale in (gate, up)
        ]
        if bits == 8 and not own:  # then s comes first, from what the source gives w2
            served = [x.double() @ part.double().mT for part in (w1, w3)]
        h = Shifted()._apply_gate(torch.cat(served, -1)) if own else silu(served[0]) * served[1]
        r = (torch.where(chosen == expert, weight, torch.zeros(()))).sum(-1).double()
        routed = int((chosen == expert).sum())
        share = routed_weight * min(1.0, routed / HIDDEN)
        each = torch.full((tokens,), (1 - share) / tokens, dtype=torch.float64)
        if routed:
            each += share * r.square() / r.square().sum()
        means = (h.abs() * each[:, None]).sum(0).float()
        grid = grid_scales(means[None], weight_means(layer.down[expert][None], GROUP), 8, True)[:, 0]
        losses = [slow_replay(layer.down[expert], s, h, each, bits) for s in grid]
        best = min(range(8), key=lambda point: losses[point])
        before, after = before + losses[0], after + losses[best]
        s = torch.ones(WIDTH) if own else grid[best]
        if bits == 8:
            up = slow_quantized(w3 * smooth / s[:, None], bits)
        else:
            up = up[0], (up[1].float() / s[:, None]).bfloat16()
        wanted = {"gate": gate, "up": up, "down": slow_quantized(layer.down[expert] * s, bits)}
        for matrix in MATRICES:
            codes, scale = wanted[matrix]
            # The oracle's mean |h| is summed in float64, so a scale or code on an edge may fall the other way.
            same = (solved.codes[matrix][expert] == codes).float().mean()
            assert float(same) > (0.9995 if bits == 4 else 0.99), (expert, matrix)
            close = (solved.scales[matrix][expert].float() / scale - 1).abs()
            assert float((close > 0).float().mean()) < 0.01
            assert float(close.max()) < 2**-7
    if own:
        assert "down_search_before" not in solved.error
        return
    assert solved.error["down_search_before"] == pytest.approx(before / 3, rel=1e-5)
    assert solved.error["down_search_after"] == pytest.approx(after / 3, rel=1e-5)


def test_with_8_bits_a_part_of_a_large_set_is_searched_and_all_of_it_solved_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every second batch of a set with 32 tokens for each column of w2; the sums that w2 is rounded by are of all."""
    layer = make_layer(15, tokens=17 * WIDTH)
    layer.normed = [n[: 8 * WIDTH] for n in (layer.normed * 2)[:4]]  # four blocks
    seen, real = list[int](), solver.width_scale

    def search(down: torch.Tensor, sums: Any, settings: Experts) -> Any:
        seen.extend(sums.seen.tolist())
        return real(down, sums, settings)

    monkeypatch.setattr(solver, "width_scale", search)
    solved = solve_layer(layer, bits=8)
    assert seen == [2 * 8 * WIDTH] * EXPERTS
    assert solved.error["expert_tokens"] == 4 * 8 * WIDTH
    seen.clear()
    solve_layer(layer, bits=4)
    assert seen == [4 * 8 * WIDTH] * EXPERTS


def test_a_smaller_share_of_routed_tokens_is_counted_and_no_fallback() -> None:
    """Only an expert without any routed token is a fallback, and no longer with three."""
    layer = make_layer(6)
    counts = [sum(int((r.chosen == expert).sum()) for r in layer.recorded()) for expert in range(EXPERTS)]
    assert 0 < min(counts[:4]) < HIDDEN < max(counts)
    assert counts[4] == 0
    solved = solve_layer(layer, routed_weight=0.8)
    assert solved.fallbacks == ["expert 4: 0 routed tokens, so all tokens count alike for it"]
    few = sum(count < HIDDEN for count in counts)
    assert solved.under_routed == {"full_share_at": HIDDEN, "experts": few, "smallest_share": 0.0}
    some = layer.recorded()
    for recorded in some:
        recorded.chosen[0, 0] = 4
    settings = Experts(group_size=GROUP, awq=False, routed_weight=0.8)
    solved = solve(
        some, layer.weights(), norm=layer.norm, router=layer.router, gate=plain,
        shape=layer.router.shape, settings=settings, batch_size=8, residents=Residents(1, 8, 0),
    )  # fmt: skip
    assert solved.fallbacks == []
    assert solved.under_routed is not None
    assert solved.under_routed["smallest_share"] == pytest.approx(0.8 * 3 / HIDDEN)
    assert solve_layer(layer, routed_weight=0.0).under_routed is None


def test_a_zero_w1_alone_still_gives_a_finite_expert() -> None:
    """h is zero, w2 is not: w2 is rounded to nearest, and still close to its source once the scale is undone."""
    layer = make_layer(7)
    layer.gate_up[2, :WIDTH] = 0
    solved = solve_layer(layer)
    assert any(line.startswith("expert 2: down: rounded to nearest") for line in solved.fallbacks)
    gate_up, down = weights(solved)
    assert torch.isfinite(gate_up).all()
    assert torch.isfinite(down).all()
    # w3's rows are divided by what w2's columns are multiplied by: the product does not depend on it.
    product = down[2].double() @ gate_up[2, WIDTH:].double()
    source = layer.down[2].double() @ (layer.gate_up[2, WIDTH:].double() * solved.smooth.double())
    assert float((product - source).norm() / source.norm()) < 0.25


@pytest.mark.parametrize(("what", "awq"), [("weights", Awq(grid=8)), ("inputs", Awq(grid=8)), ("inputs", False)])
def test_a_layer_of_zeros_is_solved(awq: Any, what: str) -> None:
    """Every expert's weights, or every input: nothing to divide by, and still finite output and a report."""
    layer = make_layer(8)
    if what == "weights":
        layer.gate_up.zero_()
        layer.down.zero_()
    else:
        layer.normed = [torch.zeros_like(n) for n in layer.normed]
    solved = solve_layer(layer, awq=awq)
    gate_up, down = weights(solved)
    assert torch.isfinite(gate_up).all()
    assert torch.isfinite(down).all()
    assert torch.isfinite(solved.norm).all()
    assert all(value == value and value < float("inf") for value in solved.error.values())
    assert len([line for line in solved.fallbacks if "rounded to nearest" in line]) >= EXPERTS


def test_rounding_reads_the_inputs_as_they_are_after_folding() -> None:
    """MSE scales, GPTQ, the sweep and the reported errors. Oracle: Hessians of explicitly divided inputs.

    The scales of the search are the same as with min-max and nearest, so they come from a grid that is
    searched again here; rounding.py's own functions then round what they are given (test_rounding.py).
    """
    layer, routed_weight = make_layer(12, experts=3, tokens=80), 0.9
    solved = solve_layer(layer, routed_weight=routed_weight)
    recorded, smooth = layer.recorded(), solved.smooth
    x, chosen, weight = (torch.cat([getattr(r, name) for r in recorded]) for name in ("x", "chosen", "weight"))
    lost, whole = {"gate_up": 0.0, "down": 0.0}, {"gate_up": 0.0, "down": 0.0}

    def slow_rounded(source: torch.Tensor, read: torch.Tensor, each: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hessian = ((read * each[:, None]).mT @ read).float()[None]
        scale = mse_scales(source[None], hessian.diagonal(dim1=-2, dim2=-1), GROUP, 4)
        codes, used = gptq(source[None], hessian, scale, 4)
        for _ in range(2):
            codes, scale = refine(source[None], damped(hessian, used), codes, scale, 4)
        return codes[0], scale[0]

    def account(name: str, delta: torch.Tensor, source: torch.Tensor, read: torch.Tensor, each: torch.Tensor) -> None:
        lost[name] += float(((read @ delta.mT).square().sum(-1) * each).sum())
        whole[name] += float(((read @ source.double().mT).square().sum(-1) * each).sum())

    for expert in range(3):
        r = torch.where(chosen == expert, weight, torch.zeros(())).sum(-1).double()
        share = routed_weight * min(1.0, int((chosen == expert).sum()) / HIDDEN)
        routed = share * r.square() / r.square().sum() if share else torch.zeros(len(x), dtype=torch.float64)
        each = routed + (1 - share) / len(x)

        read, source = x.double() / smooth.double(), layer.gate_up[expert] * smooth
        wanted, scale = slow_rounded(source, read, each)
        codes = torch.cat([solved.codes[m][expert] for m in ("gate", "up")])
        assert float((codes == wanted).float().mean()) > 0.99
        found = dequantize(codes, scale).double()
        served = silu(read @ found[:WIDTH].mT) * (read @ found[WIDTH:].mT)
        account("gate_up", found - source, source, read, each)

        # LayerResult for what the rounded w1 and w3 give it, on the tokens that are routed here.
        h = silu(x @ layer.gate_up[expert, :WIDTH].mT) * (x @ layer.gate_up[expert, WIDTH:].mT)
        changes = ((h.double() - served) * routed[:, None]).mT @ served
        hessian = ((served * each[:, None]).mT @ served).float()
        down = corrected(layer.down[expert][None], hessian[None], changes.float()[None])[0]
        means = (served.abs() * each[:, None]).sum(0).float()
        grid = grid_scales(means[None], weight_means(down[None], GROUP), 8, True)[:, 0]
        s = min(grid, key=lambda point: slow_replay(down, point, served, each, 4))
        for matrix, part in (("gate", scale[:WIDTH]), ("up", (scale[WIDTH:].float() / s[:, None]).bfloat16())):
            assert float((solved.scales[matrix][expert] == part).float().mean()) > 0.99, (expert, matrix)
        wanted, scale = slow_rounded(down * s, served / s.double(), each)
        assert float((solved.codes["down"][expert] == wanted).float().mean()) > 0.99, expert
        assert float((solved.scales["down"][expert] == scale).float().mean()) > 0.99, expert
        account("down", dequantize(wanted, scale).double() - down * s, down * s, served / s.double(), each)
    for name in ("gate_up", "down"):
        assert solved.error[f"{name}_rounding"] == pytest.approx((lost[name] / whole[name]) ** 0.5, rel=1e-3)
