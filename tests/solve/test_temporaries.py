"""No int64 or float64 array of matrix size, and the same result part by part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quantizers.solve import rounding
from quantizers.solve.awq import scale_losses, weight_means
from quantizers.solve.rounding import gptq, minmax_scales, mse_scales, nearest, refine
from quantizers.solve.solver import corrected

EXPERTS, ROWS, COLUMNS, GROUP = 2, 48, 320, 32
WIDE = (torch.int64, torch.float64)


class Watch(TorchDispatchMode):
    """Fails on an operation that fills an int64 or float64 array of matrix size; a view of a small one is none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.dtype in WIDE:
                size = leaf.untyped_storage().nbytes() // leaf.element_size()
                assert size < EXPERTS * min(ROWS, COLUMNS) * COLUMNS, f"{func}: {leaf.dtype} {tuple(leaf.shape)}"
        return result


def case(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(EXPERTS, 2 * COLUMNS, COLUMNS, generator=generator)
    x *= torch.randn(EXPERTS, 1, COLUMNS, generator=generator).exp()
    return torch.randn(EXPERTS, ROWS, COLUMNS, generator=generator), x.mT @ x


def work(name: str) -> Callable[[], object]:
    weight, hessian = case()
    scale = minmax_scales(weight, GROUP, 4)
    s = torch.ones(2, EXPERTS, COLUMNS)
    return {
        "gptq": lambda: gptq(weight, hessian, scale, 4),
        "refine": lambda: refine(weight, hessian, nearest(weight, scale, 4), scale, 4, sweeps=2),
        "mse_scales": lambda: mse_scales(weight, hessian[:, 0].abs(), GROUP, 4),
        "scale_losses": lambda: scale_losses(weight, hessian, s, GROUP, 4),
        "corrected": lambda: corrected(weight, hessian, hessian),
    }[name]


@pytest.mark.parametrize("name", ["gptq", "refine", "mse_scales", "scale_losses", "corrected"])
def test_no_wide_array_of_matrix_size(name: str) -> None:
    solve = work(name)
    with Watch():
        solve()


@pytest.mark.parametrize("part", [ROWS - 1, 3 * GROUP * ROWS, ROWS * COLUMNS, 10 * ROWS * COLUMNS])
def test_parts_of_a_matrix_give_what_the_whole_gives(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One group at a time, three groups, one expert, all experts. Oracle: the formulas written out in float64."""
    monkeypatch.setattr(rounding, "PART", part)
    weight, hessian = case(2)
    seen = torch.zeros(EXPERTS, COLUMNS)
    for experts, columns in rounding.column_parts(weight.mT, GROUP):
        seen[experts, columns] += 1
    assert bool((seen == 1).all())
    importance = hessian.diagonal(dim1=-2, dim2=-1)
    monkeypatch.setattr(rounding, "PART", 2**30)
    whole = mse_scales(weight, importance, GROUP, 4)
    monkeypatch.setattr(rounding, "PART", part)
    assert torch.equal(mse_scales(weight, importance, GROUP, 4), whole)
    magnitude = weight.double().unflatten(-1, (-1, GROUP)).abs()
    means = (magnitude / (magnitude.amax(-1, keepdim=True) + 1e-6)).flatten(-2).mean(-2)
    torch.testing.assert_close(weight_means(weight, GROUP).double(), means, rtol=1e-5, atol=0)
    scale = minmax_scales(weight, GROUP, 4)
    lost = nearest(weight, scale, 4).double() * scale.double().repeat_interleave(GROUP, -1) - weight.double()
    for hessians in (hessian, hessian[:1]):
        losses = scale_losses(weight, hessians, torch.ones(1, len(hessians), COLUMNS), GROUP, 4)
        wanted = ((lost @ hessians.double()) * lost).sum((-1, -2))
        torch.testing.assert_close(losses[0].double(), wanted, rtol=1e-5, atol=0)
