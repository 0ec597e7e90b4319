"""The branches that an accelerator takes, on torch's meta device, where tensors have shapes and no numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from one_layer import plain
from torch.utils._python_dispatch import TorchDispatchMode

from quantizers.device import prefetch
from quantizers.model.moe_inputs import MoeInputs
from quantizers.planning.device_memory import Residents
from quantizers.recipe.schema import Awq, Experts
from quantizers.solve import damping, routing_weights
from quantizers.solve.solver import solve

META = torch.device("meta")
EXPERTS, CHOSEN, HIDDEN, WIDTH, BATCH = 4, 2, 32, 32, 2  # two expert batches
ROWS = [48, 48, 20]


def chunks() -> list[MoeInputs]:
    return [
        MoeInputs(
            torch.empty(count, HIDDEN, dtype=torch.bfloat16, device=META),
            torch.empty(count, CHOSEN, dtype=torch.int32, device=META),
            torch.empty(count, CHOSEN, device=META),
            torch.empty(count, dtype=torch.bool, device=META),
        )
        for count in ROWS
    ]


def weights(experts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = (len(experts), 2 * WIDTH, HIDDEN), (len(experts), HIDDEN, WIDTH)
    gate_up, down = (torch.empty(shape, dtype=torch.bfloat16, device=META) for shape in shapes)
    return gate_up, down


class WithoutNumbers(TorchDispatchMode):
    """Products that are added to a sum in another dtype, for which torch has no shape function."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function._schema.name in ("aten::addmm", "aten::baddbmm"):
            return kwargs["out"]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("options", "factorizations", "resident"),
    [
        ({"rounding": "nearest", "scales": "minmax"}, 0, 2),
        pytest.param({"bits": 8, "scales": "minmax"}, 4, 1, marks=pytest.mark.slow),
    ],
    ids=["nearest", "gptq"],
)
def test_a_gpu_is_waited_for_as_seldom_as_can_be(
    options: dict[str, Any], factorizations: int, resident: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the routing, for each factorization, and for the report; nothing else reads numbers from the device."""
    waits: list[int] = []

    def even(tensor: torch.Tensor) -> torch.Tensor:
        """As many rows for each expert, in place of the numbers."""
        waits.append(tensor.numel())
        if tensor.shape != (len(ROWS), 2 * EXPERTS + 1):
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        return torch.tensor([[count * CHOSEN // EXPERTS] * (2 * EXPERTS) + [count] for count in ROWS]).to(tensor.dtype)

    for module in (prefetch, damping, routing_weights):
        monkeypatch.setattr(module, "tensor_to_host", even)
    with WithoutNumbers():
        solved = solve(
            chunks(),
            weights,
            norm=torch.ones(HIDDEN, dtype=torch.bfloat16, device=META),
            router=torch.empty(EXPERTS, HIDDEN, device=META),
            shape=(EXPERTS, HIDDEN),
            gate=plain,
            settings=Experts(group_size=32, awq=Awq(grid=3), **options),
            batch_size=BATCH,
            residents=Residents(resident, BATCH, 0),
        )
    assert solved.codes["gate"].shape == solved.codes["up"].shape == (EXPERTS, WIDTH, HIDDEN)
    assert len(waits) == 2 + factorizations
