"""The counter: against numbers by hand, against itself without shortcuts, and against torch's own profiler."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from counted_layer import Size, counted
from torch.profiler import ProfilerActivity, profile

from quantizers.cost.counting import Counting
from quantizers.cost.cpu import INSTEAD
from quantizers.cost.one_kernel import OneKernel
from quantizers.cost.values import META, untouched
from quantizers.cost.work import Work
from quantizers.device import kind
from quantizers.forward.fused import operators as stored
from quantizers.forward.recorded import Recorded, usable_rows
from quantizers.forward.stored_matrix import Form, is_finite
from quantizers.recipe.schema import Awq, Experts
from quantizers.solve import awq, refine, rounding, symmetric
from quantizers.solve.fused import operators
from quantizers.solve.gram_engine import solve
from quantizers.solve.sum_in_order import sum_in_order
from quantizers.solve.token_weights import squared_weights
from quantizers.system.residents import Residents


def test_operations_views_and_copies_of_a_few_lines() -> None:
    with Counting() as counting:
        with counting.block("first"):
            a = torch.empty(4, 8, device=META)
            b = a[1:3].mul_(2)
            c = a @ a.mT
        del b, c
        d = torch.zeros(6).to(META)
        assert d.cpu().tolist() == [0.0] * 6
        assert bool(d.isfinite().all()) is True
        assert bool((d != 0).any()) is False
        counting.lap("second")
    first, second = counting.phases["first"], counting.phases["second"]
    assert {operation.name: times for operation, times in first.operations.items()} == {"mul_": 1, "mm": 1}
    assert (first.launches, first.read, first.written) == (2, 64 + 128 + 128, 64 + 64)
    assert first.flops == {"float32": 2 * 4 * 8 * 4}
    assert first.peak == 128 + 64
    assert (second.to_device, second.to_host, second.copies, second.syncs) == (24, 24 + 1 + 1, 2, 3)


def test_memory_is_counted_while_it_lives() -> None:
    with Counting() as counting:
        a = torch.empty(1000, device=META)
        with counting.block("inside"):
            b = a + 1
            del b
            c = a[:10].clone()
        del a, c
        counting.lap("outside")
        torch.empty(10, device=META).add_(1)
        counting.lap("after")
    assert [counting.phases[name].peak for name in ("inside", "outside", "after")] == [8000, 4040, 40]


def test_what_is_broadcast_is_read_once_and_what_is_picked_is_read_for_each_index() -> None:
    with Counting() as counting:
        table, index = torch.empty(1000, 8, device=META), torch.empty(5, dtype=torch.int64, device=META)
        row = torch.empty(8, device=META)
        table += row
        table[index]
        table.gather(0, index.unsqueeze(1).expand(-1, 8))
        table.zero_()
        torch.zeros_like(table)
        counting.lap("all")
    cost = {one.name: (one.read, one.written) for one in counting.phases["all"].operations}
    assert cost["add_"] == (32000 + 32, 32000)
    assert cost["index"] == (160 + 40, 160)
    assert cost["gather"] == (160 + 40, 160)
    assert cost["zero_"] == cost["zeros_like"] == (0, 32000)


def test_attention_is_one_kernel_without_a_matrix_of_all_pairs() -> None:
    with Counting() as counting, OneKernel(counting):
        q = torch.empty(1, 4, 1000, 64, dtype=torch.bfloat16, device=META)
        k, v = q.new_empty(1, 2, 1000, 64), q.new_empty(1, 2, 1000, 32)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        counting.lap("all")
    assert out.shape == (1, 4, 1000, 32)
    assert counting.phases["all"].flops == {"bfloat16": 4 * 1000 * 1000 * (64 + 32)}
    assert counting.phases["all"].launches == 1
    assert counting.phases["all"].peak < 2**21


def test_large_memory_of_the_host_is_not_touched() -> None:
    with Counting() as counting:
        rows = torch.empty(2**36, dtype=torch.bfloat16)  # 128 GiB
        rows[: 2**30].copy_(torch.empty(2**30, dtype=torch.bfloat16, device=META))
        assert rows[: 2**30].float().sum() == 1
        counting.lap("all")
    assert counting.phases["all"].to_host == 2**31
    assert counting.phases["all"].host_bytes == 2**31 + 2 * 2**32 + 4
    assert untouched((0, 3), torch.float32).shape == (0, 3)


def comparable(phases: Mapping[str, Work]) -> Any:
    return {name: (dict(work.operations), work.as_dict() | {"peak_bytes": 0}) for name, work in phases.items()}


def test_what_is_done_once_is_counted_as_often_as_it_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same visit in which everything is done every time. What a function frees of its arguments is known
    to be freed only when it returns, so a peak is never too small.
    """
    size = Size(32, 128, 128)
    once = counted(size, [256, 256, 5000])
    monkeypatch.setattr(Counting, "once", lambda self, function, name=None: function)
    every = counted(size, [256, 256, 5000])
    assert comparable(once.phases) == comparable(every.phases)
    assert all(
        every.phases[name].peak <= work.peak <= 1.07 * every.phases[name].peak for name, work in once.phases.items()
    )


EXPERTS, CHOSEN, HIDDEN, WIDTH = 6, 2, 64, 64
# What kernels of a CPU call themselves, so that a profiler sees more of them.
INSIDE = {
    "_to_copy", "abs", "add", "addmm_", "any", "arange", "cat", "clone", "copy_", "div_", "eq", "lt", "ones", "sub",
    "sum", "tril", "where", "zeros",
}  # fmt: skip


def solved_on(device: torch.device) -> None:
    """A layer with the accelerator's branch, in float32, on any device."""
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(device)

    def block(rows: int) -> Recorded:
        chosen = (torch.arange(rows).unsqueeze(1) + torch.arange(CHOSEN)) % EXPERTS
        weight = torch.full((rows, CHOSEN), 0.5)
        return Recorded(
            drawn(rows, HIDDEN), chosen.int().to(device), weight.to(device),
            torch.ones(rows, dtype=torch.bool).to(device),
        )  # fmt: skip

    solve(
        [block(48), block(30)],
        lambda some: (drawn(len(some), 2 * WIDTH, HIDDEN), drawn(len(some), HIDDEN, WIDTH)),
        norm=torch.ones(HIDDEN).to(device), router=drawn(EXPERTS, HIDDEN), activation=torch.nn.functional.silu,
        settings=Experts(group_size=32, awq=Awq(grid=3)), unit=2, residents=Residents(3, 2, 0),
    )  # fmt: skip


def test_operations_are_those_that_the_profiler_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same shapes on a CPU with numbers: each operation that torch's kernels do not call themselves, as often."""
    real = kind.accelerated
    for name, module in list(sys.modules.items()):
        if name.startswith("quantizers.") and getattr(module, "accelerated", None) is real:
            monkeypatch.setattr(module, "accelerated", lambda _: True)
    for module in (awq, rounding, refine, symmetric):  # torch's own operations on both, which the profiler sees
        monkeypatch.setattr(module, "fused", lambda _: False)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        solved_on(torch.device("cpu"))
    profiled = {event.key.removeprefix("aten::"): event.count for event in seen.key_averages()}

    def routing(asked: torch.Tensor) -> torch.Tensor | None:
        even = [[rows * CHOSEN // EXPERTS] * (2 * EXPERTS) + [rows] for rows in (48, 30)]
        return torch.tensor(even) if asked.shape == (2, 2 * EXPERTS + 1) else None

    with Counting(routing) as counting:
        solved_on(META)
        counting.lap("all")
    found = Counter[str]()
    for operation, times in counting.phases["all"].operations.items():
        found[operation.name] += times
    # Nothing is launched for no elements: the last column of a block of GPTQ, and of a group in each sweep of refine.
    for name in ("mul", "sub_"):
        found[name] += 3 * 2 * (2 + 2 * 2)
    assert {n: (c, profiled.get(n, 0)) for n, c in found.items() if c != profiled.get(n, 0) and n not in INSIDE} == {}
    assert all(found[name] <= profiled[name] for name in INSIDE)
    assert len(found) > 3 * len(INSIDE)


def moved(work: Callable[[], object]) -> tuple[int, int]:
    """Bytes and launches."""
    with Counting() as counting:
        work()
        counting.lap("all")
    found = counting.phases["all"]
    return found.read + found.written, found.launches


@pytest.mark.parametrize("kernel", INSTEAD)
def test_what_a_cpu_does_instead_of_a_kernel(kernel: str) -> None:
    """Against a count of torch's operations, for a matrix of real size."""
    experts, columns, rows, group = 16, 3072, 3072, 32

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(experts, *shape, dtype=dtype, device=META)

    scale, codes = empty(columns // group, rows, dtype=torch.bfloat16), empty(group, rows, dtype=torch.int8)
    block, some = empty(group, group), [empty(group, rows) for _ in range(3)]
    order = empty(group, dtype=torch.int32)
    weight, importance = empty(columns, rows), empty(columns)
    h = [torch.empty(experts, columns, rows, dtype=torch.bfloat16, device=META) for _ in range(2)]
    flags = torch.empty(experts, columns // 64, rows, dtype=torch.int8, device=META)
    root, magnitude = h[0][:, 0], [empty(columns, parts) for parts in (operators.SUMS, 1)]
    scales, errors = torch.empty(4, experts, columns, device=META), empty(columns, 4, rows)
    numbers = [torch.empty(rows, 8, dtype=dtype, device=META) for dtype in (torch.int32, torch.float32)]
    routed = Recorded(h[0][0], *numbers, flags[0, 0])
    good, factors = flags[:, 0].bool(), torch.empty(2, experts, device=META)
    experts_of_unit = torch.empty(experts, dtype=torch.int64, device=META)
    codes8 = torch.empty(experts * columns, rows, dtype=torch.float8_e4m3fn, device=META)
    form = Form("blocks", ("weight", "scale"), (), (columns, rows), (128, 128))
    parts = [codes8, torch.empty(experts * columns // 128, rows // 128, device=META)]
    of_kernel, of_torch = {
        "dequantize": (
            lambda: stored.dequantize(*parts, h[0], stored.looks_at(h[0]), 128, 128, 0),
            lambda: (is_finite(numbers := form.numbers(parts)), h[0].copy_(numbers.view(h[0].shape))),
        ),
        "gptq_block": (
            lambda: operators.gptq_block(some[0], block, scale, order, some[1], codes, 4),
            lambda: rounding._round_block(some[0], block, scale, order, some[1], codes, 4),
        ),
        "refine_group": (
            lambda: operators.refine_group(block, scale[:, 0], *some[:2], codes, some[2], 4),
            lambda: refine._refine_group(block, scale[:, 0], *some[:2], codes, some[2], 4),
        ),
        "mse_scales": (
            lambda: operators.mse_scales(weight, importance, group, 4, 20, 1.05, 0.02),
            lambda: rounding._mse_steps(
                weight.view(experts, -1, group, rows), importance.view(experts, -1, group, 1), 4
            ),
        ),
        "gate_rows": (
            lambda: operators.gate_rows(*h, flags),
            lambda: usable_rows(h[0].mul_(h[1]), 1),
        ),
        "weigh_rows": (
            lambda: operators.weigh_rows(h[0], root, magnitude[0]),
            lambda: (
                h[0].mul_(root.unsqueeze(1)),
                magnitude[1].add_(h[0].abs_().mul_(root.unsqueeze(1)).sum(-1, keepdim=True, dtype=torch.float32)),
            ),
        ),
        "summed_products": (
            lambda: operators.summed_products(weight, weight),
            lambda: sum_in_order(torch.empty_like(weight).mul_(weight)),
        ),
        "token_roots": (
            lambda: operators.token_roots(routed.chosen, routed.weight, good, *factors, experts_of_unit),
            lambda: (
                squared_weights(routed, experts_of_unit)
                .mul_(factors[0][:, None])
                .add_(factors[1][:, None])
                .mul_(good)
                .sqrt_()
                .bfloat16()
            ),
        ),
        "tried_errors": (
            lambda: operators.tried_errors(weight, scales, errors, group, 4),
            lambda: awq._tried_errors(weight, scales, errors, group, 4),
        ),
    }[kernel]
    (own, launched), (read_and_written, operations) = moved(of_kernel), moved(of_torch)
    assert launched == 1
    assert INSTEAD[kernel] == (pytest.approx(read_and_written / own, rel=0.1), operations)
