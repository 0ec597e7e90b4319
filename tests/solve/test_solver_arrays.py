"""The planner's numbers of arrays, against those that are really alive while a matrix is rounded."""

from __future__ import annotations

import pytest
import torch
from live_bytes import Alive

from quantizers.planning.solver_arrays import FACTORIZING, PANEL, ROUNDING, Arrays
from quantizers.recipe.schema import Experts
from quantizers.solve import solver

COLUMNS = 2 * PANEL


@pytest.mark.parametrize(("rows", "peak"), [(32, FACTORIZING), (2048, ROUNDING)])
def test_a_matrix_is_rounded_in_the_arrays_that_are_planned(rows: int, peak: Arrays) -> None:
    """Few rows show the squares, many the matrices and panels; the plan suffices, and is a fifth too much at most."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(1, size, COLUMNS, generator=generator) for size in (64, rows))
    with Alive() as alive:
        hessian = x.mT @ x
        solver._round(weight, hessian, Experts(group_size=32), "down", {})
    planned = max(arrays.bytes(rows, COLUMNS) for arrays in (FACTORIZING, ROUNDING))
    assert planned == peak.bytes(rows, COLUMNS)
    assert alive.most <= planned <= 1.2 * alive.most
