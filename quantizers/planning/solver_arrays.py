"""Arrays alive at each peak of solve/: what one expert takes while its batch is solved.

solve/ takes PANEL from here. Another array there means another number here; two tests measure them:
tests/solve/test_solver_arrays.py matrix by matrix, tests/planning/test_memory_plan.py a whole layer.

Legend: R rows and C columns of a matrix W (rounded: Ŵ), H its Hessian in P = (W − Ŵ) H, I expert width.
"""

from __future__ import annotations

from typing import NamedTuple

from quantizers.architectures.architecture import Architecture

from .expert_batches import FLOAT, ROUTED_ROWS

PANEL = 256  # columns that get the errors of all panels before them, or their part of P = (W − Ŵ) H, by one matmul


class Arrays(NamedTuple):
    """Numbers of float32 arrays that are alive together while a matrix (R, C) is rounded, without itself."""

    squares: int  # (C, C)
    matrices: int  # (R, C)
    panels: int  # (R, PANEL)

    def bytes(self, rows: int, columns: int) -> int:
        """Bytes of the arrays for a matrix of `rows` and `columns`."""
        panel = min(PANEL, columns)
        return FLOAT * (self.squares * columns**2 + self.matrices * rows * columns + self.panels * rows * panel)


# The Hessian, ordered, damped and factorized; the transposed matrix.
FACTORIZING = Arrays(squares=6, matrices=2, panels=0)
# The Hessian, ordered and as a factor; the transposed matrix, the residual, the codes; panels.
ROUNDING = Arrays(squares=3, matrices=4, panels=5)


def expert_bytes(facts: Architecture, rows: int, itemsize: int) -> int:
    """Bytes of one expert while its batch is solved in chunks of `rows` tokens, without its routed Hessian."""
    hidden = facts.expert_inputs
    width = facts.expert_width
    chosen = facts.top_k
    readers = len(facts.matrices) - 1  # of an expert's input: gate and up
    square, narrow = FLOAT * hidden**2, FLOAT * width**2  # the Hessians of x and of h
    gate_up, down = FLOAT * readers * width * hidden, FLOAT * width * hidden
    stored = itemsize * (readers + 1) * width * hidden  # the weights as they are served
    small = rows * (9 * chosen + 40)  # routing weights and row indices
    # Routed rows: all that are gathered at a time may be one expert's.
    routed = min(rows, ROUTED_ROWS)
    inputs = routed * itemsize * 2 * hidden + square // 4 + small
    # The weights in float32, rounded and as served; gate, up and h of a token chunk, and of its routed rows.
    batch = (
        itemsize
        * max(2 * readers * width * rows, (readers + 1) * width * rows + (2 * hidden + (readers + 1) * width) * routed)
        + small
    )
    serving = stored + 3 * gate_up + down + 2 * narrow + batch
    # The weights in float32 and as served, and one matrix being rounded.
    weights = stored + 2 * (gate_up + down) + narrow
    rounding = max(
        arrays.bytes(*shape)
        for arrays in (FACTORIZING, ROUNDING)
        for shape in ((readers * width, hidden), (hidden, width))
    )
    return max(inputs, serving, weights + rounding)
