"""What a visit asks of an accelerator, by phase, as formulas in the layer's sizes: whatever is added is named.

Formulas of launches, waits and the bus are exact at every size below, and bytes of three phases are counted by hand. A
change that is meant changes a formula; a change that is not meant fails here, on a laptop.

Legend: E experts, N units of 16 experts, H hidden, I expert width, B blocks of 16,384 rows, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from counted_layer import ROWS, Size, counted

from quantizers.bench.count import published_job
from quantizers.cost.visit import CountedVisit
from quantizers.solve import gram_engine, input_sums
from quantizers.solve.expert_unit import REPORTED_ROWS
from quantizers.system.errors import QuantizeError

SIZES = [Size(32, 256, 256), Size(64, 256, 512), Size(48, 512, 256, B=2)]  # none routes 4,096 rows to an expert


def packed(s: Size) -> float:
    """Half a byte a weight, a bfloat16 for 32 of them; the norm in bfloat16 and the router in float32."""
    return 3 * s.E * s.H * s.I * (1 / 2 + 2 / 32) + 2 * s.H + 4 * s.E * s.H


# In `rounding`, 32 columns of GPTQ are a kernel and a product, and so is a group in each of two sweeps of refine, but
# for the first of each 256 columns, whose own few operations are left.
LAUNCHES: dict[str, Callable[[Size], float]] = {
    "read": lambda s: 0,
    "materialise": lambda s: 168 + 12 * s.N,
    "observe": lambda s: 101 * s.B,
    "sums": lambda s: (
        21 + 4 * s.N + 30 * s.B + 19 * s.N * s.B + (s.H + s.N * s.H) / 32 + s.B * (s.H + s.N * s.H + s.N * s.I) / 128
    ),
    "search": lambda s: 49 + 105 * s.N + s.N * (s.H + s.I) * 10 / 128,
    "dequantize": lambda s: 12 * s.N,
    # The report's losses are those of some rows, if there are many; then these are laid in one piece.
    "rounding": lambda s: (187 + (2 * s.I >= 2 * REPORTED_ROWS)) * s.N + s.N * (s.H + s.I) * 67 / 256,
    "forced pass": lambda s: 5 * s.N * s.B,
    "changes": lambda s: 32 * s.N * s.B,
    "solve": lambda s: 61 + 45 * s.N + s.N * s.I / 32,
    "pack": lambda s: 5 + 15 * s.N,
    "audit": lambda s: 42 + 62 * s.N,
    "propagate": lambda s: 55 * s.B - 1,
}
# Those of `materialise` and two of `audit` see whether what is stored is finite.
WAITS: dict[str, Callable[[Size], int]] = {
    "materialise": lambda s: 2,
    "sums": lambda s: 1,  # the routing
    "solve": lambda s: 3,  # factorizations, the report's numbers, weights
    "audit": lambda s: 6,  # and that what was packed is on the host
    "rounding": lambda s: 1,  # for the next layer's bytes, which crossed meanwhile
    "propagate": lambda s: 1,
}
COPIES: dict[str, Callable[[Size], int]] = {
    "rounding": lambda s: 1, "sums": lambda s: 2, "solve": lambda s: 2, "audit": lambda s: 3,
}  # fmt: skip
# Scales of blocks of 128 x 128 are a float32 for 16,384 weights.
TO_DEVICE: dict[str, Callable[[Size], float]] = {
    "rounding": lambda s: 3 * s.E * s.H * s.I * (1 + 4 / 16384) + attention(s) + 4 * s.E * s.H + 4 * s.E,
    "sums": lambda s: 8 * s.E,  # the order in which experts are solved
}
TO_HOST: dict[str, Callable[[Size], float]] = {
    "materialise": lambda s: 2,
    "sums": lambda s: 8 * s.B * (2 * s.E + 1),
    "solve": lambda s: 17 + 2176 * s.N,
    "audit": lambda s: 19 + 12 * s.E + packed(s),
    "propagate": lambda s: 1,
}
# What is large crosses the bus from and to memory that the device reads and writes by itself, beside its work.
BESIDE: dict[str, Callable[[Size], float]] = {"rounding": TO_DEVICE["rounding"], "audit": packed}
# By hand. Forced pass, a block: a product that reads a unit's weights and x, silu in new memory, a product in place;
# and a byte for 64 columns of a token, which says whether they are usable.
# Dequantize, a weight: laid together as bytes, read once and written as bfloat16 by a kernel.
# Pack, two codes: one shifted, one masked, joined, their signs flipped, laid in a buffer; scales and norm as they are
READ: dict[str, Callable[[Size], float]] = {
    "forced pass": lambda s: (
        2 * s.B * (2 * s.E * s.H * s.I + s.N * ROWS * s.H + 3 * s.E * s.I * ROWS) + s.B * s.E * ROWS * (s.I / 64 + 1)
    ),
    "dequantize": lambda s: 3 * s.E * s.H * s.I * (1 + 1),
    "pack": lambda s: 3 * s.E * s.H * s.I * ((1 + 1 + 2 + 1 + 1) / 2 + 2 / 32) + 2 * s.H + 4 * s.E * s.H,
}
WRITTEN: dict[str, Callable[[Size], float]] = {
    "forced pass": lambda s: 2 * s.B * 4 * s.E * s.I * ROWS + s.B * s.E * ROWS * (s.I / 64 + 2),
    "dequantize": lambda s: 3 * s.E * s.H * s.I * (1 + 2),
    "pack": lambda s: 3 * s.E * s.H * s.I * ((1 + 1 + 1 + 1 + 1) / 2 + 2 / 32) + 2 * s.H + 4 * s.E * s.H,
}


def attention(size: Size) -> int:
    """Bytes of attention and norms as they are stored."""
    job = published_job("minimax-m2.1", size.E, hidden=size.H, width=size.I)
    kept = (a for a in job.plan.of_layer(0) if a.expert is None and "block_sparse_moe" not in a.source)
    return sum(action.spec.bytes for action in kept)


def differences(visit: CountedVisit, size: Size) -> list[str]:
    """What differs from the formulas, one line each."""
    found = []
    for phase, work in visit.phases.items():
        values = {
            "launches": (work.launches, LAUNCHES), "waits": (work.syncs, WAITS), "copies": (work.copies, COPIES),
            "bytes of pinned memory": (work.pinned, BESIDE), "bytes beside the work": (work.beside, BESIDE),
            "bytes to the device": (work.to_device, TO_DEVICE), "bytes to the host": (work.to_host, TO_HOST),
        }  # fmt: skip
        for name, (number, formulas) in values.items():
            wanted = formulas.get(phase, lambda _: 0)(size)
            if number != wanted:
                found.append(f"{phase}: {number:,} {name}, not {wanted:,}")
    return found


@pytest.fixture(scope="module", params=SIZES, ids=str)
def visit(request: pytest.FixtureRequest) -> tuple[CountedVisit, Size]:
    return counted(request.param), request.param


def test_every_phase_does_what_the_formulas_say(visit: tuple[CountedVisit, Size]) -> None:
    assert differences(*visit) == []
    assert [name for name in visit[0].phases if name not in LAUNCHES] == []


def test_bytes_are_those_counted_by_hand(visit: tuple[CountedVisit, Size]) -> None:
    found, size = visit
    for phase, formula in READ.items():
        assert found.phases[phase].read == pytest.approx(formula(size), rel=0.001)
        assert found.phases[phase].written == pytest.approx(WRITTEN[phase](size), rel=0.001)


def test_arithmetic_of_the_products(visit: tuple[CountedVisit, Size]) -> None:
    found, s = visit
    routed = s.B * ROWS * s.K  # rows, each through three matrices
    assert found.phases["forced pass"].flops == {"bfloat16": 2 * s.B * ROWS * s.E * 2 * s.I * s.H}
    assert found.phases["propagate"].flops == {
        "bfloat16": 2 * routed * 3 * s.H * s.I, "float32": 2 * s.B * ROWS * s.H * s.E,
    }  # fmt: skip


def test_what_ranking_costs() -> None:
    """All 20 points once in TF32, 4 of them exactly, and one look for the norm's search."""
    size = SIZES[0]
    exact, ranked = (counted(size, capability=own).phases["search"] for own in (None, (9, 0)))
    tried = sum(o.flops * n for o, n in exact.operations.items() if o.name == "tried_errors")
    assert ranked.flops["tf32"] == exact.flops["float32"] - tried
    assert ranked.flops["float32"] == ranked.flops["tf32"] * 4 / 20 + tried * 24 / 20
    assert ranked.syncs == exact.syncs + 1 == 1


@pytest.mark.parametrize("texts", [[256] * 3, [256] * 3 + [5000]], ids=str)
def test_what_held_out_texts_cost(texts: list[int]) -> None:
    """They lie on the device in both lanes, and what leaves the layer goes to its file in one copy.

    Texts of one length go through attention together.
    """
    size = SIZES[0]
    phases = counted(size, texts).phases
    tokens, batches, blocks, state = sum(texts), len(set(texts)), -(-sum(texts) // ROWS), 2 * size.H
    assert phases["candidate"].launches == 56 * blocks - 1, "the first layer's attention is the source's"
    assert phases["reference"].launches == 64 * batches + phases["candidate"].launches + 1
    assert phases["compare"].launches == 16 * batches + 1
    for lane in ("reference", "candidate"):
        assert phases[lane].to_device == 0
        assert phases[lane].to_host == tokens * state + 1
        assert phases[lane].syncs == 2
    assert phases["compare"].syncs == 1


@pytest.mark.parametrize("texts", [[256] * 3, [256] * 3 + [5000]], ids=str)
def test_what_held_out_texts_cost_on_a_small_device(texts: list[int]) -> None:
    """Each batch goes to attention and back, each block of rows to router and experts and back; in both lanes."""
    size = SIZES[0]
    phases = counted(size, texts, in_host_memory=True).phases
    tokens, batches, blocks, state = sum(texts), len(set(texts)), -(-sum(texts) // ROWS), 2 * size.H
    assert phases["reference"].launches == 63 * batches + 55 * blocks - 1
    assert phases["candidate"].launches == 55 * blocks - 1, "the first layer's attention is the source's"
    assert phases["reference"].to_device == 2 * tokens * state == 2 * phases["candidate"].to_device
    assert phases["reference"].to_host == tokens * (2 * state + 4 * size.K) + 1
    # What lies in files cannot be registered with the driver, so this process waits; and at the end of each half.
    assert phases["reference"].syncs == batches + 2 * blocks + 1 + 2


def test_a_wait_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = gram_engine.blended_gram

    def waiting(routed: torch.Tensor, *others: Any) -> torch.Tensor:
        assert bool(routed.isfinite().all()) or True
        return real(routed, *others)

    monkeypatch.setattr(gram_engine, "blended_gram", waiting)
    assert "sums: 3 waits, not 1" in differences(counted(SIZES[0]), SIZES[0])


def test_a_temporary_as_large_as_a_matrix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real, size = gram_engine.blended_gram, SIZES[0]
    before = counted(size)
    monkeypatch.setattr(gram_engine, "blended_gram", lambda routed, *others: real(routed.clone(), *others))
    after = counted(size)
    assert len(differences(after, size)) == 1
    assert differences(after, size)[0].startswith("sums: ")
    moved = after.phases["sums"].written - before.phases["sums"].written
    assert moved == 4 * size.E * size.H**2


def test_a_sum_without_an_order_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def scattered(total: torch.Tensor, x: torch.Tensor, *_: Any) -> None:
        index = torch.zeros(len(x), dtype=torch.int64, device=total.device)
        total.view(-1).scatter_add_(0, index, x[:, 0].float())

    monkeypatch.setattr(input_sums, "_add_routed", scattered)
    with pytest.raises(QuantizeError, match=r"^scatter_add_ of float32: a GPU adds in the order in which its threads"):
        counted(SIZES[0])


def test_the_source_s_experts_are_gone_when_the_layer_is_solved() -> None:
    """Held-out texts pass through them; what comes after has them in memory no longer."""
    size = SIZES[1]
    experts = 2 * 3 * size.E * size.H * size.I  # bytes in bfloat16
    with_texts, without = counted(size, [256]).phases, counted(size).phases
    assert with_texts["reference"].peak > experts
    for phase in ("observe", "sums", "rounding"):
        assert abs(with_texts[phase].peak - without[phase].peak) < 0.1 * experts


def test_hidden_states_in_host_memory_cross_the_bus_without_a_detour() -> None:
    """What the driver would copy twice is what is not registered with it: numbers that are looked at, and an order."""
    phases = counted(SIZES[0], in_host_memory=True).phases
    for phase in ("observe", "sums", "forced pass", "propagate"):
        looks = sum(formulas.get(phase, lambda _: 0)(SIZES[0]) for formulas in (TO_HOST, TO_DEVICE))
        crossed = phases[phase].to_device + phases[phase].to_host - looks
        assert phases[phase].beside == phases[phase].pinned == crossed > 0
