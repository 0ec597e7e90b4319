"""--device-memory: what is kept within it, against the arrays that are really alive."""

from __future__ import annotations

import pytest
import torch
from live_bytes import Alive
from one_layer import sliced
from planned import published, tiny_model

from quantizers.architectures.gates import plain_gate
from quantizers.model.moe_inputs import capture_moe_inputs
from quantizers.planning.device_memory import DeviceMemory, Residents, _Phases, device_memory
from quantizers.recipe.schema import Awq, Experts
from quantizers.solve.solver import solve
from quantizers.system.errors import InputError

GIB = 2**30
MINIMAX = published("MiniMaxAI/MiniMax-M2.1", layers=1)
PLAN = MINIMAX.plan()


def within(limit: int | None, tokens: int = 131_072, held_out: int = 90_000) -> DeviceMemory:
    """A layer of MiniMax-M2 on an accelerator."""
    return device_memory(PLAN, MINIMAX.facts, 8192, True, limit, tokens, held_out=held_out)


def test_more_is_kept_the_larger_the_limit_and_the_peak_stays_within_it() -> None:
    """The inputs first, then the states, those of texts, then Hessians; the expert batch is the same throughout."""
    before = (0, False, False, False)
    for size in (19, 19.5, 20, 22, 24, 28, 40, 78, 140):
        memory = within(int(size * GIB))
        kept = memory.resident, memory.inputs, memory.states, memory.texts
        assert (memory.unit, memory.units) == (16, 16)
        assert kept >= before or kept[1:] > before[1:]
        assert memory.peak <= size * GIB
        assert memory.inputs or not memory.states
        before = kept
    assert within(None) == within(2**50)
    assert before == (16, True, True, True)
    assert within(None).peak - within(None, held_out=0).peak == 90_000 * (3 * 2 * 3072 + 8 * 8)
    assert within(2**50).sweeps == 1


def test_many_tokens_stay_outside() -> None:
    """A set of 4.8 million tokens has 29.7 GB of inputs, and as many bytes of states."""
    memory = within(24 * GIB, tokens=4_830_000)
    assert (memory.inputs, memory.states) == (False, False)
    assert (within(60 * GIB, tokens=4_830_000).inputs, within(60 * GIB, tokens=4_830_000).states) == (True, False)
    assert within(140 * GIB, tokens=4_830_000).states


def test_a_limit_too_small_for_one_expert_batch_is_refused_with_one_that_suffices() -> None:
    with pytest.raises(InputError, match="experts at a time and a text of 8,192 tokens; give") as refused:
        within(8 * GIB)
    enough = int(str(refused.value).partition("give --device-memory ")[2].partition("MiB")[0])
    assert within(enough * 2**20).resident >= 1
    with pytest.raises(InputError):
        within((enough - 64) * 2**20)


@pytest.mark.parametrize(
    ("hidden", "width", "experts", "method"),
    [
        pytest.param(128, 256, 4, ("gptq", "mse", 8), marks=pytest.mark.every),
        (256, 64, 4, ("nearest", "minmax", 4)),
        pytest.param(256, 64, 4, ("gptq", "minmax", 4), marks=pytest.mark.slow),
    ],
)
def test_never_more_than_planned(
    hidden: int, width: int, experts: int, method: tuple[str, str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live arrays while a layer is solved; for the full method the plan is at most 2.5 times what is used.

    The source's weights and the captured inputs are not counted: on a CPU they are in memory anyway.
    """
    # Every scale that is tried needs the same arrays, so three say as much as twenty.
    settings = Experts(rounding=method[0], scales=method[1], bits=method[2], awq=Awq(grid=3))
    model = tiny_model(hidden_size=hidden, intermediate_size=width, num_local_experts=experts)
    facts = model.facts
    torch.manual_seed(0)
    gate_up, down = torch.randn(experts, 2 * width, hidden), torch.randn(experts, hidden, width)
    for rows, unit, resident in ((32, 1, 1), (256, 2, 2)):
        scores = torch.rand(2, rows, experts)
        scores[..., 0] += 1  # one expert gets every token, the worst case that is planned for
        chosen = scores.topk(facts.top_k).indices
        blocks = [capture_moe_inputs(torch.randn(rows, hidden), c, torch.rand(c.shape)) for c in chosen]
        with Alive() as alive:
            solve(
                blocks,
                sliced(gate_up, down),
                norm=torch.ones(hidden).bfloat16(),
                router=torch.randn(experts, hidden),
                shape=(experts, hidden),
                gate=plain_gate(torch.nn.functional.silu),
                settings=settings,
                batch_size=unit,
                residents=Residents(resident, unit, 0),
            )
        monkeypatch.setattr("quantizers.planning.device_memory.experts_per_batch", lambda *_, unit=unit: unit)
        monkeypatch.setattr("quantizers.planning.device_memory.tokens_per_chunk", lambda _, rows=rows: rows)
        phases = _Phases(model.plan(), facts, rows, accelerator=False, tokens=2 * rows)
        foreseen = phases.solve(min(resident, -(-experts // unit)))
        assert alive.most <= foreseen
        assert method[0] != "gptq" or foreseen <= 2.5 * alive.most
