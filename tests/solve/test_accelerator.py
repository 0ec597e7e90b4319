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
from quantizers.solve.solver import solve

EXPERTS, CHOSEN, HIDDEN, WIDTH, BATCH = 4, 2, 32, 32, 2  # two expert batches
ROWS = [48, 48, 20]
QUICK: dict[str, Any] = {"rounding": "nearest", "scales": "minmax"}  # others are many small operations


def chunks(rows: list[int]) -> list[MoeInputs]:
    return [
        MoeInputs(
            torch.empty(count, HIDDEN, dtype=torch.bfloat16, device=META),
            torch.empty(count, CHOSEN, dtype=torch.int32, device=META),
            torch.empty(count, CHOSEN, device=META),
            torch.empty(count, dtype=torch.bool, device=META),
        )
        for count in rows
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


def traced(
    resident: int, *full_at: int, batch: int = BATCH, rows: list[int] = ROWS, **options: Any
) -> tuple[Counter[Operation], int, list[int]]:
    """The operations behind the output, the number of all operations, and the looks at numbers."""
    settings = Experts(**({"group_size": 32, "awq": Awq(grid=3)} | options))
    with looks_answered(EXPERTS, CHOSEN, rows) as looks, Full(*full_at) as trace:
        solved = solve(
            chunks(rows),
            weights,
            norm=torch.ones(HIDDEN, dtype=torch.bfloat16, device=META),
            router=torch.empty(EXPERTS, HIDDEN, device=META),
            activation=torch.nn.functional.silu,
            settings=settings,
            batch_size=batch,
            residents=Residents(resident, batch, 0),
        )
    results = tensors((solved.norm, solved.router, solved.codes, solved.scales))
    assert len(results) == 8 - (solved.router is None)
    return trace.behind(results), len(trace.nodes), looks


@pytest.mark.parametrize(
    "options", [QUICK, pytest.param({"bits": 8, "scales": "minmax"}, marks=pytest.mark.slow)], ids=str
)
def test_any_memory_gives_the_same_operations(options: dict[str, Any]) -> None:
    """The same operations on the same shapes and dtypes, as often each, with fewer cached Hessians or a full device.

    The device is full twice.
    """
    wanted, operations, looks = traced(2, **options)
    factorizations = 0 if options == QUICK else 2 * 2
    assert len(looks) == 2 + factorizations, "the routing, the factorizations, the report"
    got, more, _ = traced(1, **options)
    assert more > operations, "more sweeps"
    assert got == wanted
    got, more, _ = traced(4, 3 * operations // 10, 9 * operations // 10, **options)
    assert more > operations
    assert got == wanted


def test_the_trace_sees_another_shape() -> None:
    """With three experts at a time, or other token chunks, the operations differ: the comparison could fail."""
    wanted = traced(2, **QUICK)[0]
    assert traced(2, batch=3, **QUICK)[0] != wanted
    assert traced(2, rows=[58, 58], **QUICK)[0] != wanted
