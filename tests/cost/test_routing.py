"""How tokens are taken to be routed where a layer is counted, and what unevenness costs."""

from __future__ import annotations

import pytest
import torch
from counted_layer import ROWS, Size, counted

from quantizers.cost.routing import SPREAD, answer, of_units, routed_rows

SIZES = {"experts": 256, "chosen": 8}


@pytest.mark.parametrize("spread", [0.0, SPREAD])
def test_every_token_of_every_block_is_routed(spread: float) -> None:
    routed = routed_rows(SIZES, 2 * ROWS + 100, spread)
    assert routed[:, -1].tolist() == [ROWS, ROWS, 100]
    for rows, total in zip(routed[:, :-1], (ROWS, ROWS, 100), strict=True):
        assert 8 * total <= int(rows.sum()) <= 8 * total + 256, "each expert's number is rounded up"
        assert int(rows.max()) <= total


def test_what_the_documents_say_of_it() -> None:
    routed = routed_rows(SIZES, 8 * ROWS)[:, :-1].sum(0) / (8 * ROWS * 8 / 256)
    assert float(routed.max()) == pytest.approx(6, rel=0.05)
    assert float(routed.min()) == pytest.approx(1 / 8, rel=0.05)
    assert torch.equal(routed_rows(SIZES, 3 * ROWS), routed_rows(SIZES, 3 * ROWS))
    assert int(routed_rows(SIZES, ROWS, 0.0)[:, :-1].unique()) == 512


def test_rows_of_the_units_that_are_solved() -> None:
    """Oracle: experts in falling order, a unit of busy ones and a unit of idle ones by turns."""
    routed = routed_rows({"experts": 6, "chosen": 2}, ROWS)
    rows = sorted(routed[0, :-1].tolist(), reverse=True)
    assert of_units(routed, 2) == [sum(rows[:2]), sum(rows[4:]), sum(rows[2:4])]
    assert of_units(routed, 1) == [rows[0], rows[5], rows[2], rows[3], rows[1], rows[4]]


def test_only_the_look_at_the_routing_is_answered() -> None:
    routed = routed_rows({"experts": 4, "chosen": 2}, ROWS + 10)
    known = answer(routed)(torch.empty(2, 9))
    assert known is not None
    assert torch.equal(known, torch.cat([routed[:, :4], routed], 1))
    assert answer(routed)(torch.empty(3, 9)) is None


def test_what_uneven_routing_costs() -> None:
    """Padded rows, in the sums of routed rows and in the changes. Oracle: the busiest expert of each unit and block."""
    size = Size(64, 256, 256, B=2)
    even, uneven = counted(size).phases, counted(size, spread=SPREAD).phases
    routed = routed_rows({"experts": size.E, "chosen": size.K}, size.B * ROWS)[:, :-1]

    def padded(order: torch.Tensor) -> float:
        units = routed[:, order].unflatten(1, (-1, 16))
        return float(units.amax(2).sum()) * 16 / float(routed.sum())

    as_solved = padded(routed.sum(0).argsort(descending=True))
    assert 1.2 < as_solved < 0.7 * padded(torch.arange(size.E))
    changed = sum(uneven["changes"].flops.values()) / sum(even["changes"].flops.values())
    assert changed == pytest.approx(as_solved, rel=0.02)
    for phase, work in uneven.items():
        if phase not in ("sums", "changes"):
            assert work.flops == even[phase].flops
