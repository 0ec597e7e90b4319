"""torch operators of this program's own, one for each kernel: `torch.ops.quantizers.…`.

As operators they are seen by whatever follows torch's dispatch. On the meta device, where work is only counted, they
do nothing and need no Triton. Every tensor may be a view, as long as rows lie in one piece.

Legend: E experts, C columns, W columns of a block, R rows, g group size, n = C / g groups, P grid points; B = E, or 1
where all experts share something; c experts of a unit, I expert width, T tokens, K experts chosen per token.
"""

from __future__ import annotations

from typing import Any

import torch

from quantizers.device.fused import OPTIONS, WIDER, launched
from quantizers.forward.codes import code_range
from quantizers.forward.recorded import LARGEST
from quantizers.solve.sum_in_order import LANES

ROWS, WIDE = 32, 64  # rows of a program, and columns from which on there are fewer, for want of registers
INTERPRETED = 1024  # rows of a program in Triton's interpreter, where every operation takes as long
# Of a program: columns and tokens that are gated, columns that are weighed, and tokens of theirs that are added apart.
STRIP, TOKENS, WEIGHED, SUMS = 64, 1024, 16, 128


def rows_of_program(columns: int) -> int:
    """Rows of a program on a GPU that has so many columns in registers."""
    return ROWS if columns <= WIDE else ROWS * WIDE // columns


def _launched(kernel: Any, tensor: torch.Tensor, *more: int, columns: int) -> Any:
    """The kernel, to be called with its arguments: a program for some rows of each expert of (E, …, R).

    How many rows decides no bit, and is not searched for: the same programs are launched every time.
    """
    rows = rows_of_program(columns) if tensor.is_cuda else INTERPRETED
    return launched(kernel, (tensor.shape[0], -(-tensor.shape[-1] // rows), *more), tensor, ROWS=rows, **OPTIONS)


@torch.library.custom_op("quantizers::gptq_block", mutates_args=("errors", "codes"))
def gptq_block(
    work: torch.Tensor,
    factor: torch.Tensor,
    scale: torch.Tensor,
    group_of: torch.Tensor,
    errors: torch.Tensor,
    codes: torch.Tensor,
    bits: int,
) -> None:
    """Round the columns of a block one by one, each less its share of the errors before it.

    Args:
        work: (E, W, R) float32, what is left of the columns.
        factor: (E, W, W) float32, an error's (row) share in each later column.
        scale: (E, n, R) bfloat16, of all groups.
        group_of: (E, W) int32, the group of each column.
        errors: (E, W, R) float32, filled.
        codes: (E, W, R) int8, filled.
    """
    from .kernels import gptq_block as kernel

    low, high = code_range(bits)
    _launched(kernel, work, columns=work.shape[1])(
        work, factor, scale, group_of, errors, codes,
        work.shape[2], work.stride(0), factor.stride(0), factor.stride(1), factor.stride(2), scale.stride(0),
        group_of.stride(0), errors.stride(0), codes.stride(0),
        W=work.shape[1], LOW=low, HIGH=high,
    )  # fmt: skip


@torch.library.custom_op("quantizers::refine_group", mutates_args=("scale", "near", "image", "codes", "change"))
def refine_group(
    block: torch.Tensor,
    scale: torch.Tensor,
    near: torch.Tensor,
    image: torch.Tensor,
    codes: torch.Tensor,
    change: torch.Tensor,
    bits: int,
) -> None:
    """Set a group's scale, and then its codes one by one, each to the best given all others.

    Args:
        block: (E, g, g) float32, the group's own part of the Gram matrix G.
        scale: (E, R) bfloat16, set.
        near: (E, g, R) float32, the group's columns of Pᵀ, see refine.py. Worthless afterwards.
        image: (E, g, R) float32, block @ codes. Worthless afterwards.
        codes: (E, g, R) int8, set.
        change: (E, g, R) float32, filled: Ŵᵀ before less Ŵᵀ after.
    """
    from .kernels import refine_group as kernel

    low, high = code_range(bits)
    _launched(kernel, codes, columns=codes.shape[1])(
        block, scale, near, image, codes, change,
        codes.shape[2], block.stride(0), block.stride(1), scale.stride(0), near.stride(0), image.stride(0),
        codes.stride(0), change.stride(0),
        G=codes.shape[1], LOW=low, HIGH=high,
    )  # fmt: skip


@torch.library.custom_op("quantizers::mse_scales", mutates_args=())
def mse_scales(
    weight: torch.Tensor, importance: torch.Tensor, group: int, bits: int, count: int, first: float, less: float
) -> torch.Tensor:
    """The best of each group's min-max scale and some multiples of it.

    Args:
        weight: (E, C, R) float32, transposed.
        importance: (E, C) float32, what a squared error in each column counts.
        count, first, less: the multiples are `first`, `first - less`, …, so many.

    Returns:
        (E, n, R) bfloat16.
    """
    from .kernels import mse_scales as kernel

    low, high = code_range(bits)
    chosen = _scales_like(weight, group)
    _launched(kernel, weight, weight.shape[1] // group, columns=LANES)(
        weight, importance, chosen,
        weight.shape[2], weight.stride(0), importance.stride(0), chosen.stride(0),
        G=group, COUNT=count, FIRST=first, LESS=less, LOW=low, HIGH=high,
    )  # fmt: skip
    return chosen


@torch.library.custom_op("quantizers::tried_errors", mutates_args=("errors",))
def tried_errors(weight: torch.Tensor, scales: torch.Tensor, errors: torch.Tensor, group: int, bits: int) -> None:
    """What is lost when columns are multiplied by a scale, rounded with min-max steps and divided again.

    Args:
        weight: (E, C, R) float32, transposed.
        scales: (P, B, C) float32, to be tried.
        errors: (E, C, P, R) float32, contiguous, filled with Q(W s) / s − W.
    """
    from .kernels import tried_errors as kernel

    low, high = code_range(bits)
    shared = scales.shape[1] == 1
    _launched(kernel, weight, weight.shape[1] // group, columns=LANES)(
        weight, scales, errors,
        weight.shape[2], weight.stride(0), scales.stride(0), 0 if shared else scales.stride(1), errors.stride(0),
        G=group, P=len(scales), LOW=low, HIGH=high,
    )  # fmt: skip


@torch.library.custom_op("quantizers::summed_products", mutates_args=())
def summed_products(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The sum over columns of first · second, added as sum_in_order.py says.

    Args:
        first, second: (E, C, R) float32, each expert's in one piece; C a multiple of 8.

    Returns:
        (E, R) float32.
    """
    from .kernels import summed_products as kernel

    sums = _rows_like(first)
    _launched(kernel, first, columns=LANES)(
        first, second, sums, first.shape[1], first.shape[2], first.stride(0), second.stride(0), sums.stride(0)
    )
    return sums


@torch.library.custom_op("quantizers::token_roots", mutates_args=())
def token_roots(
    chosen: torch.Tensor,
    weight: torch.Tensor,
    good: torch.Tensor,
    of_routed: torch.Tensor,
    of_any: torch.Tensor,
    experts: torch.Tensor,
) -> torch.Tensor:
    """The root of what each token counts for each expert of a unit, see token_weights.py.

    Args:
        chosen: (T, K) int32 or int64, contiguous.
        weight: (T, K) float32, contiguous, routing weights.
        good: (c, T) bool, rows of it in one piece; the others count nothing.
        of_routed, of_any: (c,) float32, see `Blend.factors`.
        experts: (c,) int64, the numbers of the unit's experts.

    Returns:
        (c, T) bfloat16.
    """
    from .kernels import token_roots as kernel

    root = torch.empty_like(good, dtype=torch.bfloat16)
    count, tokens = good.shape
    together = TOKENS if good.is_cuda else INTERPRETED
    launched(kernel, (count, -(-tokens // together)), good)(
        chosen, weight, good.view(torch.int8), of_routed, of_any, experts, root,
        tokens, good.stride(0), root.stride(0),
        K=chosen.shape[1], TOKENS=together, **(OPTIONS | WIDER),
    )  # fmt: skip
    return root


@torch.library.custom_op("quantizers::gate_rows", mutates_args=("gate", "unusable"))
def gate_rows(gate: torch.Tensor, up: torch.Tensor, unusable: torch.Tensor) -> None:
    """gate *= up, rounded to bfloat16; and where a token has a value that no sum can use, see `recorded.usable_rows`.

    Args:
        gate: (c, I, T) bfloat16, each expert's in one piece.
        up: (c, I, T) bfloat16, each expert's in one piece.
        unusable: (c, strips(I), T) int8, filled; not 0 where one of a strip's values is not finite, or too large.
    """
    from .kernels import gate_rows as kernel

    experts, width, tokens = gate.shape
    together = TOKENS if gate.is_cuda else INTERPRETED
    launched(kernel, (experts, unusable.shape[1], -(-tokens // together)), gate)(
        gate, up, unusable, width, tokens, gate.stride(0), up.stride(0), unusable.stride(0),
        LARGEST=LARGEST, STRIP=STRIP, TOKENS=together, **(OPTIONS | WIDER),
    )  # fmt: skip


def strips(width: int) -> int:
    """Parts of an expert's columns that `gate_rows` looks at together."""
    return -(-width // STRIP)


@torch.library.custom_op("quantizers::weigh_rows", mutates_args=("rows", "magnitude"))
def weigh_rows(rows: torch.Tensor, root: torch.Tensor, magnitude: torch.Tensor) -> None:
    """rows *= root, rounded to bfloat16, zero where root is; and magnitude += |rows| · root.

    Args:
        rows: (c, I, T) bfloat16, each expert's in one piece.
        root: (c, T) bfloat16, not negative.
        magnitude: (c, I, SUMS) float32: each is the sum of every SUMS-th token's, from left to right.
    """
    from .kernels import weigh_rows as kernel

    experts, width, tokens = rows.shape
    launched(kernel, (experts, -(-width // WEIGHED)), rows)(
        rows, root, magnitude, width, tokens, rows.stride(0), root.stride(0), magnitude.stride(0),
        STRIP=WEIGHED, SUMS=SUMS, **(OPTIONS | WIDER),
    )  # fmt: skip


def _scales_like(weight: torch.Tensor, group: int) -> torch.Tensor:
    experts, columns, rows = weight.shape
    return torch.empty(experts, columns // group, rows, dtype=torch.bfloat16, device=weight.device)


def _rows_like(matrices: torch.Tensor) -> torch.Tensor:
    experts, _, rows = matrices.shape
    return torch.empty(experts, rows, dtype=torch.float32, device=matrices.device)


@gptq_block.register_fake
def _(*_: Any) -> None:
    pass


@refine_group.register_fake
def _(*_: Any) -> None:
    pass


@gate_rows.register_fake
def _(*_: Any) -> None:
    pass


@weigh_rows.register_fake
def _(*_: Any) -> None:
    pass


@tried_errors.register_fake
def _(*_: Any) -> None:
    pass


@summed_products.register_fake
def _(first: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return _rows_like(first)


@token_roots.register_fake
def _(_: torch.Tensor, __: torch.Tensor, good: torch.Tensor, *___: Any) -> torch.Tensor:
    return torch.empty_like(good, dtype=torch.bfloat16)


@mse_scales.register_fake
def _(weight: torch.Tensor, importance: torch.Tensor, group: int, *_: Any) -> torch.Tensor:
    return _scales_like(weight, group)
