"""The accelerator's branch, on the meta device: whatever the memory, the same operations reach the output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from on_meta import META, Operation, Trace, looks_answered, tensors

from quantizers.forward.moe_inputs import MoeInputs
from quantizers.planning.device_memory import Residents
from quantizers.recipe.schema import Awq, Experts
from quantizers.solve import solver
from quantizers.solve.result import LayerResult
from quantizers.solve.solver import solve

EXPERTS, CHOSEN, HIDDEN, WIDTH, UNIT = 6, 2, 32, 32, 2  # three units
ROWS = [48, 48, 20]
QUICK: dict[str, Any] = {"rounding": "nearest"}  # a column of GPTQ is many operations


def blocks() -> list[MoeInputs]:
    return [
        MoeInputs(
            torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device=META),
            torch.empty(rows, CHOSEN, dtype=torch.int32, device=META),
            torch.empty(rows, CHOSEN, device=META),
            torch.empty(rows, dtype=torch.bool, device=META),
        )
        for rows in ROWS
    ]


def weights(experts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = (len(experts), 2 * WIDTH, HIDDEN), (len(experts), HIDDEN, WIDTH)
    gate_up, down = (torch.empty(shape, dtype=torch.bfloat16, device=META) for shape in shapes)
    return gate_up, down


class Full(Trace):
    """Out of memory at these operations."""

    def __init__(self, *at: int) -> None:
        super().__init__()
        self.at = set(at)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(self.nodes) in self.at:
            self.at.discard(len(self.nodes))
            raise torch.OutOfMemoryError("injected")
        return super().__torch_dispatch__(function, types, args, kwargs)


def traced(resident: int, *full_at: int, **options: Any) -> tuple[Counter[Operation], int, list[int]]:
    """What reaches the output, how many operations there were, and the looks at numbers."""
    settings = Experts(**({"group_size": 32, "awq": Awq(grid=3)} | options))
    with looks_answered(EXPERTS, CHOSEN, ROWS) as looks, Full(*full_at) as trace:
        solved: LayerResult = solve(
            blocks(), weights,
            norm=torch.ones(HIDDEN, dtype=torch.bfloat16, device=META),
            router=torch.empty(EXPERTS, HIDDEN, device=META),
            activation=torch.nn.functional.silu, settings=settings, unit=UNIT, residents=Residents(resident, UNIT, 0),
        )  # fmt: skip
    results = tensors((solved.norm, solved.router, solved.codes, solved.scales))
    assert len(results) == 8 - (solved.router is None)
    return trace.behind(results), len(trace.nodes), looks


@pytest.mark.parametrize(
    "options",
    [QUICK, *(pytest.param(options, marks=pytest.mark.slow) for options in ({}, {"bits": 8}, {"awq": False}))],
    ids=str,
)
def test_any_memory_gives_the_same_operations(options: dict[str, Any]) -> None:
    """The same operations on the same shapes and dtypes, as often each, for every number of sums that is held."""
    wanted, operations, looks = traced(3, **options)
    assert len(looks) <= 3, "the routing, the factorizations, the report"
    for resident in (1, 2):
        got, more, _ = traced(resident, **options)
        assert more > operations, "more sweeps"
        assert got == wanted


@pytest.mark.parametrize("options", [QUICK, pytest.param({}, marks=pytest.mark.slow)], ids=str)
def test_a_full_device_gives_the_same_operations(options: dict[str, Any]) -> None:
    """Interrupted early, in the middle, and twice: what was interrupted reaches nothing."""
    wanted, operations, _ = traced(3, **options)
    for at in ([operations // 10], [operations // 2], [3 * operations // 10, 9 * operations // 10]):
        got, more, _ = traced(4, *at, **options)
        assert more > operations
        assert got == wanted


def test_the_trace_sees_another_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """With three experts at a time, or other blocks of rows, the operations differ: the comparison could fail."""
    wanted = traced(3, **QUICK)[0]
    monkeypatch.setitem(globals(), "UNIT", 3)
    assert traced(3, **QUICK)[0] != wanted
    monkeypatch.undo()
    monkeypatch.setitem(globals(), "ROWS", [58, 58])
    assert traced(3, **QUICK)[0] != wanted


def test_a_factorization_that_failed_is_done_again_with_care(monkeypatch: pytest.MonkeyPatch) -> None:
    """One look finds it; that unit alone is solved again, and looked at."""
    done: list[tuple[tuple[int, int], bool]] = []
    real = solver._solve_batch

    def noted(*arguments: Any, exact: bool) -> Any:
        done.append((arguments[-1][0], exact))
        return real(*arguments, exact=False)

    monkeypatch.setattr(solver, "_solve_batch", noted)
    monkeypatch.setattr(solver, "_in_doubt", lambda _, units: [units[1]])
    traced(3, **QUICK)
    assert done == [((0, 2), False), ((2, 4), False), ((4, 6), False), ((2, 4), True)]
