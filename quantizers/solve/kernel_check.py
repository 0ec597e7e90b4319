"""Verification of the Triton kernels at the start of a run: each must give its eager twin's bits on a small input.

Legend: E experts, R rows, C columns of a block or a group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantizers.device.triton_support import can_launch, disable_kernel
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.system.errors import first_line

from . import kernels
from .hessians import weigh_rows
from .rounding import BLOCK, mse_scales, refine_group, round_block

Arguments = list[Any]


class Case(NamedTuple):
    """Test case of a kernel and its twin in torch's operations: the calls, and a small input of both."""

    arguments: Callable[..., Arguments]  # of device, E, R, C, bits and signed; the same numbers every time
    function: Callable[..., None]  # of these, and whether by the kernel
    results: dict[str, int]  # places of the arguments that must have the same bits
    sums: int | None = None  # place of the argument that the twin adds up in another order


def verify_kernels(
    device: torch.device, schemes: Collection[tuple[int, int, bool]], dist: ProcessGroup = SINGLE_PROCESS
) -> None:
    """Disable each kernel that cannot be launched on a device, or differs from its eager twin there.

    All processes call this, with bits, group size and `signed` of each scheme of the run, and disable the kernels of
    all; rank 0 prints them.
    """
    own_problems = {kernel: problem_of(kernel, device, schemes) for kernel in KERNELS} if can_launch(device) else {}
    problems: dict[str, str] = {}
    for of_process in dist.all_gather_object(own_problems):
        problems = {kernel: problem for kernel, problem in of_process.items() if problem} | problems
    for kernel, problem in problems.items():
        disable_kernel(kernel)
        if dist.is_main:
            print(f"kernel {kernel} {problem}; torch's own operations do its work in this run", file=sys.stderr)


def problem_of(kernel: str, device: torch.device, schemes: Collection[tuple[int, int, bool]]) -> str:
    """The reason why a kernel cannot be used on a device; empty if there is none."""
    for bits, group, signed in sorted(set(schemes)):
        try:
            differing = differences(kernel, device, (2, 40, group, bits, signed))
        except Exception as failure:  # Triton's, its compiler's, the driver's, or torch's for want of memory
            return f"cannot be launched ({first_line(failure)})"
        if differing:
            return f"differs from torch's operations in {' and '.join(differing)}"
    return ""


def differences(kernel: str, device: torch.device, shape: tuple[int, int, int, int, bool]) -> list[str]:
    """The results of a kernel that do not have its eager twin's bits; `shape` is E, R, C, bits and signed."""
    case = KERNELS[kernel]
    by_kernel, by_twin = case.arguments(device, *shape), case.arguments(device, *shape)
    case.function(*by_kernel, True)
    case.function(*by_twin, False)
    differing = [name for name, at in case.results.items() if not same_bits(by_kernel[at], by_twin[at])]
    if case.sums is not None:
        first, second = (arguments[case.sums].sum(-1) for arguments in (by_kernel, by_twin))
        differing += [] if torch.allclose(first, second, rtol=1e-4) else ["sums"]
    return differing


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same bits, signs of zero included; any NaN is as good as another."""
    known = ~second.isnan()
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32}[first.element_size()]
    return torch.equal(~first.isnan(), known) and torch.equal(first.view(whole)[known], second.view(whole)[known])


def _drawn(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device)


def _scales(device: torch.device, signed: bool, *shape: int) -> Tensor:
    drawn = _drawn(device, *shape)
    scales = drawn.abs() / 4 + 0.05
    return (scales.copysign(drawn) if signed else scales).bfloat16()


def _within(tensor: Tensor, columns: int) -> Tensor:
    """The tensor as a view of a larger one, as a kernel gets a part of a matrix."""
    larger = tensor.new_zeros(tensor.shape[0], tensor.shape[1] + columns, *tensor.shape[2:])
    larger[:, columns:] = tensor
    return larger[:, columns:]


def _gptq_block(device: torch.device, experts: int, rows: int, _: int, bits: int, signed: bool) -> Arguments:
    groups = 3
    factor = _within(_drawn(device, experts, BLOCK, BLOCK).triu() / 4, 5)
    order = torch.arange(experts * BLOCK, dtype=torch.int32, device=device).view(experts, BLOCK) * 7 % groups
    errors = torch.zeros(experts, BLOCK, rows, device=device)
    work = _drawn(device, experts, BLOCK, rows)
    work[:, 1::5] = -0.0
    scales = _scales(device, signed, experts, groups, rows)
    return [
        _within(work, 7), factor, scales, _within(order, 2), _within(errors, 3),
        _within(errors.to(torch.int8), 4), bits,
    ]  # fmt: skip


def _refine_group(device: torch.device, experts: int, rows: int, columns: int, bits: int, signed: bool) -> Arguments:
    x = _drawn(device, experts, 3 * columns, columns)
    block, limit = x.mT @ x / columns, 2 ** (bits - 1)
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(-limit, limit, (experts, columns, rows), generator=generator, dtype=torch.int8).to(device)
    codes[:, ::4] = 0
    return [
        block, _scales(device, signed, experts, 3, rows)[:, 1], _within(_drawn(device, experts, columns, rows) * 3, 3),
        _within(block @ codes.float(), 2), _within(codes, 5), _within(torch.zeros_like(codes).float(), 1), bits, signed,
    ]  # fmt: skip


def _mse_scales(device: torch.device, experts: int, rows: int, columns: int, bits: int, signed: bool) -> Arguments:
    weight = _drawn(device, experts, 2 * columns, rows)
    weight[0, :columns, 0] = 0
    importance = _drawn(device, experts, 2 * columns).square()
    return [weight, importance, _scales(device, signed, experts, rows, 2), bits, signed]


def _choose_scales(
    weight: Tensor, importance: Tensor, chosen: Tensor, bits: int, signed: bool, by_kernel: bool
) -> None:
    group = weight.shape[1] // chosen.shape[2]
    chosen.copy_(mse_scales(weight.mT, importance, group, bits, signed=signed, by_kernel=by_kernel))


def _weigh_rows(device: torch.device, experts: int, rows: int, columns: int, *_: int) -> Arguments:
    """Rows are tokens: some have weight zero, and one of these is not a number."""
    h, root = _drawn(device, experts, columns, rows).bfloat16(), _drawn(device, experts, rows).abs().bfloat16()
    root[:, ::3] = 0
    h[0, 1, 0] = torch.nan
    h[0, 2] = -0.0
    return [_within(h, columns), root, torch.zeros(experts, columns, kernels.SUMS, device=device)]


def _weigh(h: Tensor, root: Tensor, magnitude: Tensor, by_kernel: bool) -> None:
    if by_kernel:
        kernels.weigh_rows(h, root, magnitude)
        return
    weigh_rows(h, root)
    magnitude[..., 0] += (h.abs() * root.unsqueeze(1)).sum(-1, dtype=torch.float32)


KERNELS = {
    "gptq_block": Case(_gptq_block, round_block, {"errors": 4, "codes": 5}),
    "refine_group": Case(_refine_group, refine_group, {"scales": 1, "codes": 4, "changes": 5}),
    "mse_scales": Case(_mse_scales, _choose_scales, {"scales": 2}),
    "weigh_rows": Case(_weigh_rows, _weigh, {"rows": 0}, sums=2),
}
