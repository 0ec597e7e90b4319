"""--device-memory: the chunk it leads to, against the arrays that are really alive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conftest import SEQUENCE_LENGTH, Finished
from live_bytes import Alive
from runs import hashes

from quantizers.architectures.families import architecture_for
from quantizers.architectures.sizes import sizes_of
from quantizers.forward.recorded import Recorded
from quantizers.plan import solve_memory
from quantizers.plan.job import prepare
from quantizers.plan.making import expected_tensors, make_plan
from quantizers.plan.plan import Plan
from quantizers.plan.solve_memory import BATCH_TOKENS, DeviceMemory, device_memory
from quantizers.recipe.schema import Awq, Experts
from quantizers.run.options import Options
from quantizers.run.pipeline import run
from quantizers.run.quantized import _by_expert
from quantizers.solve import gram_engine
from quantizers.solve.gram_engine import CPU_CACHE_BYTES, CPU_EXPERTS, solve
from quantizers.system.errors import InputError

GIB = 2**30


def planned(experts: Experts, **changes: int) -> tuple[Plan, Any]:
    config = tiny.config(**changes)
    facts = architecture_for(config, "config.json")
    sizes = sizes_of(facts, config, "config.json")
    tensors = expected_tensors(facts, sizes, config, "a test")
    return make_plan(facts, sizes, tensors, experts, "a test", (128, 128)), sizes


def chosen(limit: int | None, longest: int = 8192) -> DeviceMemory:
    """MiniMax-M2's shapes, two layers of them."""
    plan, sizes = planned(
        Experts(),
        hidden_size=3072,
        intermediate_size=1536,
        num_local_experts=256,
        num_experts_per_tok=8,
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
    )
    return device_memory(plan, sizes, longest, 2, limit)


def test_the_chunk_grows_with_the_limit_and_stays_within_it() -> None:
    before = 0
    for size in (14, 16, 20, 40, 78, 140):
        memory = chosen(size * GIB)
        assert before < memory.chunk <= 256
        assert memory.peak <= size * GIB
        before = memory.chunk
    assert chosen(None).chunk == chosen(2**50).chunk == 256


def test_shorter_sequences_leave_room_for_more_experts() -> None:
    assert chosen(20 * GIB, 2048).chunk > chosen(20 * GIB).chunk


def test_a_limit_that_not_even_one_expert_fits_in_is_refused_with_one_that_suffices() -> None:
    with pytest.raises(InputError, match="give --device-memory") as refused:
        chosen(8 * GIB)
    enough = int(str(refused.value).partition("give --device-memory ")[2].partition("MiB")[0])
    assert chosen(enough * 2**20).chunk >= 1
    with pytest.raises(InputError):
        chosen((enough - 64) * 2**20)


SHAPES = {
    "wide states": {"hidden_size": 256, "intermediate_size": 64, "num_local_experts": 4},
    "wide experts": {"hidden_size": 128, "intermediate_size": 256, "num_local_experts": 4},
    "as MiniMax's": {"hidden_size": 256, "intermediate_size": 128, "num_local_experts": 6},
}


@pytest.mark.parametrize(
    ("method", "longest"),
    [
        (("gptq", "mse", 4), 32),
        (("gptq", "mse", 4), 1024),
        pytest.param(("nearest", "minmax", 4), 32, marks=pytest.mark.slow),
        pytest.param(("nearest", "minmax", 4), 1024, marks=pytest.mark.slow),
        pytest.param(("gptq", "mse", 8), 1024, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("shape", ["wide states", "wide experts", pytest.param("as MiniMax's", marks=pytest.mark.slow)])
def test_what_is_alive_while_a_layer_is_solved(
    shape: str, method: tuple[str, str, int], longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes foreseen are enough, and for the full method not more than twice what is used."""
    monkeypatch.setattr(gram_engine, "CPU_EXPERTS", 10**6)  # as on a device, where the chunk is what was asked for
    monkeypatch.setattr(gram_engine, "CPU_CACHE_BYTES", 10**12)
    monkeypatch.setattr(solve_memory, "ROW_BLOCK", longest)  # whole blocks of rows need more than such small layers
    # Every scale that is tried needs the same arrays, so three say as much as twenty.
    few = Awq(grid=3)
    settings = Experts(rounding=method[0], scales=method[1], bits=method[2], awq=few)
    plan, sizes = planned(settings, **SHAPES[shape])
    experts, hidden, width = sizes["experts"], sizes["hidden"], sizes["width"]
    torch.manual_seed(0)
    for chunk in (1, experts):
        with Alive() as alive:
            gate_up, down = torch.randn(experts, 2 * width, hidden), torch.randn(experts, hidden, width)
            together = max(1, BATCH_TOKENS // longest)  # sequences of a batch
            scores = torch.rand(together + 1, longest, experts)
            scores[..., 0] += 1  # one expert gets every token, the worst case that is foreseen
            chosen = scores.topk(sizes["chosen"]).indices
            recorded = [Recorded(torch.randn(longest, hidden), c, torch.rand(c.shape)) for c in chosen]
            del scores
            # On a device only the sequences of a batch are there at a time.
            alive.now -= recorded[0].x.nbytes
            alive.most = alive.now
            solve(
                recorded,
                gate_up,
                down,
                norm=torch.ones(hidden).bfloat16(),
                router=torch.randn(experts, hidden),
                activation=torch.nn.functional.silu,
                settings=settings,
                chunk=chunk,
            )
        memory = device_memory(plan, sizes, longest, 4, None)
        foreseen = memory.peak - (experts - chunk) * memory.expert
        print(f"{shape}, {method}, {longest} tokens, chunk {chunk}: {alive.most:,} of {foreseen:,}", end=" ")
        print(f"{alive.most / foreseen:.2f}")
        assert alive.most <= foreseen
        # On a CPU the engine takes no more experts at a time than its cache holds.
        taken = min(chunk, CPU_EXPERTS, max(1, CPU_CACHE_BYTES // (6 * gate_up[0].numel())))
        if chunk == experts and method[0] == "gptq":
            assert foreseen - (chunk - taken) * memory.expert <= 2 * alive.most


def test_fallbacks_are_in_the_order_of_experts_however_they_were_solved() -> None:
    lines = ["rows left out", "expert 10: a", "expert 2: b", "expert 10: b", "expert 2: a"]
    assert _by_expert(lines) == ["rows left out", "expert 2: b", "expert 2: a", "expert 10: a", "expert 10: b"]


@pytest.mark.slow
def test_a_run_within_a_bound_gives_the_same_bytes(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the chunk decides no byte, and of the report only the last digits of its errors."""
    monkeypatch.setattr(solve_memory, "ROW_BLOCK", SEQUENCE_LENGTH)  # in a small layer they need more than the experts
    job = prepare(str(finished.recipe))
    whole = device_memory(job.plan, job.sizes, SEQUENCE_LENGTH, 4, None)
    limit = whole.peak - 11 * whole.expert
    assert device_memory(job.plan, job.sizes, SEQUENCE_LENGTH, 4, limit).chunk == 5
    report = run(job, Options(tmp_path / "output", torch.device("cpu"), limit))
    assert hashes(tmp_path / "output") == hashes(finished.folder)
    for mine, theirs in zip(report["layers"], finished.report["layers"], strict=True):
        assert mine["fallbacks"] == theirs["fallbacks"]
        assert mine["error"] == pytest.approx(theirs["error"], rel=1e-9)
