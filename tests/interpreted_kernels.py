"""Kernels in Triton's interpreter beside torch's own operations, for tests/solve/test_kernels.py.

Run as a program of its own, since Triton decides when it is first imported whether to interpret:

    TRITON_INTERPRET=1 python tests/interpreted_kernels.py gptq_block

Prints JSON: of each shape the results that differ.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from quantizers.forward import stored_matrix
from quantizers.forward.fused import operators as stored
from quantizers.forward.packing import pack
from quantizers.forward.recorded import Recorded, usable_rows
from quantizers.solve import awq, refine, rounding
from quantizers.solve.fused import operators
from quantizers.solve.sum_in_order import sum_in_order
from quantizers.solve.token_weights import squared_weights

# Rows of a program, so that some matrices take several, of which the last is not full; and columns likewise.
operators.INTERPRETED = 64
stored.INTERPRETED, stored.COLUMNS = 32, 64
SHAPES = [
    *itertools.product((1, 2), (1, 40, 130), (32,), (4, 8)),
    *itertools.product((1,), (24,), (64, 128), (4, 8)),
]  # experts, rows, columns of a block or group, bits


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def within(tensor: torch.Tensor, columns: int = 0) -> torch.Tensor:
    """The tensor as a view of a larger one: what a kernel gets is part of a matrix."""
    larger = torch.zeros(tensor.shape[0], tensor.shape[1] + columns, *tensor.shape[2:], dtype=tensor.dtype)
    larger[:, columns:] = tensor
    return larger[:, columns:]


def scales(experts: int, groups: int, rows: int) -> torch.Tensor:
    return (drawn(experts, groups, rows).abs() / 4 + 0.05).bfloat16()


def gram(experts: int, columns: int) -> torch.Tensor:
    x = drawn(experts, 3 * columns, columns)
    return x.mT @ x / columns


def gptq_block(experts: int, rows: int, columns: int, bits: int) -> list[Any]:
    groups = 3
    factor = drawn(experts, columns + 5, columns + 5).triu()[:, 5:, 5:] / 4
    order = torch.randint(groups, (experts, columns), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    order[:, :groups] = torch.arange(groups)
    errors, codes = torch.zeros(experts, columns, rows), torch.zeros(experts, columns, rows, dtype=torch.int8)
    work = within(drawn(experts, columns, rows), 7)
    return [work, factor, scales(experts, groups, rows), within(order, 2), within(errors, 3), within(codes, 4), bits]


def refine_group(experts: int, rows: int, columns: int, bits: int) -> list[Any]:
    block, limit = gram(experts, columns), 2 ** (bits - 1)
    codes = torch.randint(-limit, limit, (experts, columns, rows), generator=torch.Generator().manual_seed(2))
    return [
        block, scales(experts, 3, rows)[:, 1], within(drawn(experts, columns, rows) * 3, 3),
        within(block @ codes.float(), 2), within(codes.to(torch.int8), 5), within(torch.zeros_like(codes).float(), 1),
        bits,
    ]  # fmt: skip


def mse_scales(experts: int, rows: int, columns: int, bits: int) -> list[Any]:
    weight = drawn(experts, 2 * columns, rows)
    weight[0, :columns, 0] = 0
    importance = drawn(experts, 2 * columns).square()
    return [weight, importance, columns, bits, rounding.MSE_COUNT, rounding.MSE_FIRST, rounding.MSE_LESS]


def tried_errors(experts: int, rows: int, columns: int, bits: int) -> list[Any]:
    weight = drawn(experts, 2 * columns, rows)
    weight[0, :columns, 0] = 0
    scales = drawn(3, experts if bits == 4 else 1, 2 * columns).abs() + 0.1
    return [weight, scales, torch.zeros(experts, 2 * columns, 3, rows), columns, bits]


def mse_scales_by_torch(weight: torch.Tensor, importance: torch.Tensor, group: int, bits: int, *_: Any) -> torch.Tensor:
    return rounding._mse_steps(
        weight.unflatten(1, (-1, group)), importance.unflatten(1, (-1, group)).unsqueeze(-1), bits
    )


def summed_products(experts: int, rows: int, columns: int, _: int) -> list[Any]:
    return [within(drawn(experts, 3 * columns, rows), 8), drawn(experts, 3 * columns, rows) + 1]


def summed_products_by_torch(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return sum_in_order(first * second)


def token_roots(experts: int, rows: int, columns: int, bits: int) -> list[Any]:
    """Of `rows` tokens, each of which chooses 3 of 8 experts; about every fifth counts nothing for an expert."""
    generator = torch.Generator().manual_seed(columns + bits)
    chosen = torch.rand(rows, 8, generator=generator).topk(3).indices.int()
    good = torch.rand(experts, rows, generator=generator) > 0.2
    factors = drawn(2, experts).abs()
    return [chosen, drawn(rows, 3).abs(), good, factors[0], factors[1], torch.tensor([5, 2])[:experts]]


def token_roots_by_torch(
    chosen: torch.Tensor,
    weight: torch.Tensor,
    good: torch.Tensor,
    of_routed: torch.Tensor,
    of_any: torch.Tensor,
    numbers: torch.Tensor,
) -> torch.Tensor:
    block = Recorded(weight, chosen, weight, good[0])
    squared = squared_weights(block, numbers)
    return (squared * of_routed[:, None] + of_any[:, None]).mul_(good).sqrt_().bfloat16()


def gate_rows(experts: int, rows: int, columns: int, _: int) -> list[Any]:
    gate = drawn(experts, columns, rows).bfloat16()
    for token, value in enumerate((float("nan"), float("inf"), -1e17)[:rows]):
        gate[-1, columns // 2, token] = value
    up = within(drawn(experts, columns, rows).bfloat16() + 1, columns)
    return [gate, up, torch.ones(experts, operators.strips(columns), rows, dtype=torch.int8)]


def gate_rows_by_torch(gate: torch.Tensor, up: torch.Tensor, unusable: torch.Tensor) -> None:
    gate.mul_(up)
    for i, strip in enumerate(gate.split(operators.STRIP, dim=1)):
        unusable[:, i] = ~usable_rows(strip, 1)


def weigh_rows(experts: int, rows: int, columns: int, _: int) -> list[Any]:
    h, root = drawn(experts, columns, rows).bfloat16(), drawn(experts, rows).abs().bfloat16()
    if rows > 1:
        root[0, 0] = 0
        h[0, 1, 0] = float("nan")
    return [h, root, drawn(experts, columns, operators.SUMS)]


def weigh_rows_by_torch(h: torch.Tensor, root: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Token by token."""
    h.masked_fill_((root == 0).unsqueeze(1), 0).mul_(root.unsqueeze(1))
    for token in range(h.shape[2]):
        magnitude[..., token % operators.SUMS] += (h[..., token].abs() * root[:, token, None]).float()


def dequantize(experts: int, rows: int, columns: int, bits: int) -> list[Any]:
    """All that FP8 has, or packed integers, with some that are not finite; into part of a matrix of either type.

    (Numbers below 2⁻¹²⁶ are float32 here: of bfloat16 the interpreter takes them for 0.)
    """
    columns += columns // 2  # so that the last program of a row is not full either
    block = 4, 20 if columns > 48 else 8
    slot = within(torch.zeros(experts, 4 * rows, columns, dtype=torch.bfloat16 if rows > 30 else torch.float32), 3)
    if bits == 4 and rows != 40:
        codes = torch.arange(experts * 4 * rows * columns).view(-1, columns).to(torch.uint8)
        codes[8 * (rows > 1) :][codes[8 * (rows > 1) :] & 0x7F == 0x7F] = 5
        codes = codes.view(torch.float8_e4m3fn)
        scale = drawn(len(codes) // block[0], -(-columns // block[1]))
        scale[-1] *= 1e-38 if rows < 30 else 1
        return [codes, scale, slot, stored.looks_at(slot), *block, 0]
    limit, generator = 2 ** (bits - 1), torch.Generator().manual_seed(3)
    codes = torch.randint(-limit, limit, (experts * 4 * rows, columns), generator=generator, dtype=torch.int8)
    scale = drawn(len(codes), columns // 8).bfloat16()
    scale[:4, 0] = torch.tensor([0, 3e38, float("inf"), float("nan")]) if rows > 1 else 3e-38
    return [pack(codes, bits), scale, slot, stored.looks_at(slot), 1, 8, bits]


def dequantize_by_torch(
    codes: torch.Tensor,
    scale: torch.Tensor,
    slot: torch.Tensor,
    finite: torch.Tensor,
    rows: int,
    columns: int,
    bits: int,
) -> None:
    form = stored_matrix.Form("packed" if bits else "blocks", (), (), (slot.shape[1], slot.shape[2]), (rows, columns))
    numbers = form.numbers([codes, scale]).view(slot.shape)
    slot.copy_(numbers)
    for i, parts in enumerate(numbers.split(stored.INTERPRETED, dim=1)):
        for k, part in enumerate(parts.split(stored.COLUMNS, dim=2)):
            finite[:, i, k] = torch.isfinite(part).all(2).all(1)


# What makes its arguments, torch's own operations, and which arguments hold the results.
KERNELS: dict[str, tuple[Callable[..., list[Any]], Callable[..., Any], dict[str, int]]] = {
    "gptq_block": (gptq_block, rounding._round_block, {"errors": 4, "codes": 5}),
    "refine_group": (refine_group, refine._refine_group, {"scale": 1, "codes": 4, "change": 5}),
    "mse_scales": (mse_scales, mse_scales_by_torch, {}),
    "gate_rows": (gate_rows, gate_rows_by_torch, {"gate": 0, "unusable": 2}),
    "weigh_rows": (weigh_rows, weigh_rows_by_torch, {"rows": 0, "magnitude": 2}),
    "tried_errors": (tried_errors, awq._tried_errors, {"errors": 2}),
    "summed_products": (summed_products, summed_products_by_torch, {}),
    "token_roots": (token_roots, token_roots_by_torch, {}),
    "dequantize": (dequantize, dequantize_by_torch, {"slot": 2, "finite": 3}),
}


def operator(name: str) -> Any:
    return getattr(torch.ops.quantizers, name)


def results(function: Callable[..., Any], given: list[Any], places: dict[str, int]) -> dict[str, torch.Tensor]:
    own = [value.clone() if isinstance(value, torch.Tensor) and not value._is_view() else value for value in given]
    for place, value in enumerate(own):
        if isinstance(value, torch.Tensor) and value._is_view():
            own[place] = value._base.clone().as_strided(value.shape, value.stride(), value.storage_offset())
    result = function(*own)
    return {name: own[place] for name, place in places.items()} or {"chosen": result}


def bits(name: str) -> dict[str, list[str]]:
    """Of each shape, the results that are not the same bits, or are not results at all."""
    make, by_torch, places = KERNELS[name]
    found = {}
    for shape in SHAPES:
        given = make(*shape)
        kernel, wanted = results(operator(name), given, places), results(by_torch, given, places)
        found[str(shape)] = [key for key in wanted if not same_bits(kernel[key], wanted[key]) or not wanted[key].any()]
    return found


def same_bits(own: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Signs of zeros included; any NaN is as good as another."""
    known = ~wanted.isnan()
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32}[own.element_size()]
    return torch.equal(~own.isnan(), known) and torch.equal(own.view(whole)[known], wanted.view(whole)[known])


if __name__ == "__main__":
    print(json.dumps(bits(sys.argv[1])))
