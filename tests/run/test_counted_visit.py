"""One layer of real size on an accelerator, counted on the meta device: what crosses the bus, looks, living bytes.

Everything that a run does to a layer with its calibration set is there: copying the layer, attention, routing, solving,
packing, the audit, the quantized layer and the calibration pass. Not in it are held-out texts. Of the units of experts
the first is solved; all others do the same on other numbers, as tests/solve/test_accelerator.py shows, and here only
leave their results. Codes are not refined column by column: that has arrays of a few columns, and very many operations.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from on_meta import META, Count, looks_answered

from quantizers.architectures.families import architecture_for
from quantizers.architectures.sizes import sizes_of
from quantizers.bench.random_model import published, resized
from quantizers.checkpoint.held import Held, bytes_needed, held_tensors, layer_names, ranges
from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.safetensors_header import TensorInfo
from quantizers.checkpoint.tensor_bytes import as_tensor
from quantizers.forward.halves import finish, observe
from quantizers.forward.layered_model import LayeredModel
from quantizers.forward.recorded import recorded_rows
from quantizers.forward.states import Rows
from quantizers.forward.weights import ExpertWeights
from quantizers.plan.making import expected_tensors, make_plan
from quantizers.plan.solve_memory import DeviceMemory, device_memory
from quantizers.plan.states import recorded_bytes
from quantizers.plan.units import rows_of_block
from quantizers.recipe.schema import Awq, Experts
from quantizers.solve import gram_engine, refine
from quantizers.solve.expert_unit import SolvedUnit
from quantizers.solve.layer import solve_layer
from quantizers.system.residents import Residents
from stitch.audit.layer import LayerAudit, audit_layer
from stitch.write.shard import layer_tensors

GIB, TOKENS, LENGTH = 2**30, 131_072, 8192
BFLOAT16 = torch.bfloat16


@dataclass
class Counted:
    count: Count
    memory: DeviceMemory
    layer_bytes: int
    input_bytes: int


def in_memory(folder: Path, config: dict[str, Any], specs: Any, names: list[str]) -> Held:
    """Tensors in one buffer, as a layer arrives."""
    infos, start = {}, 0
    for name in names:
        size = specs[name].bytes
        infos[name] = TensorInfo(name, specs[name].dtype, specs[name].shape, folder / "a", start, start + size)
        start += size
    (together,) = ranges(infos.values())
    buffer = torch.from_numpy(np.zeros(bytes_needed(infos.values()), np.uint8))  # pages that nobody has touched
    stored = {name: as_tensor(info, buffer[info.start + together.place :][: info.size]) for name, info in infos.items()}
    return Held(folder, "counted", config, infos, None, stored, dict.fromkeys(infos, ""), buffer)


def unsolved(like: SolvedUnit, count: int) -> SolvedUnit:
    """Results of another unit: their shapes."""
    parts = (like.codes, like.scales, like.damping, like.totals)
    return SolvedUnit(*({k: v.new_empty(count, *v.shape[1:]) for k, v in part.items()} for part in parts))


def free(layer: torch.nn.Module) -> None:
    """What leaving a layer's block does on a device: to move a module from the meta device there frees nothing."""
    for module in layer.modules():
        module._parameters.clear()
    gc.collect()


def counted(folder: Path, limit: int, **sizes: int) -> Counted:
    """A visit to the first layer of a model with MiniMax-M2.1's attention."""
    config = resized(published("minimax-m2.1"), layers=1, vocabulary=256, **sizes)
    config |= {"bos_token_id": 0, "eos_token_id": 1}
    facts = architecture_for(config, "config.json")
    size = sizes_of(facts, config, "config.json")
    specs = expected_tensors(facts, size, config, "a test")
    settings = Experts(awq=Awq(grid=3))  # every point has the same arrays
    plan = make_plan(facts, size, specs, settings, "a test", (128, 128))
    memory = device_memory(plan, size, LENGTH, True, limit, TOKENS)
    infos = {n: TensorInfo(n, s.dtype, s.shape, folder / "a", 0, s.bytes) for n, s in specs.items()}
    names = layer_names(Checkpoint(folder, "counted", config, infos), facts, 0)
    source = in_memory(folder, config, specs, names)
    outside = in_memory(folder, config, specs, [facts.embedding, facts.final_norm, facts.head])
    lengths = [LENGTH] * (TOKENS // LENGTH)
    rows = [rows_of_block(True)] * (TOKENS // rows_of_block(True))
    real, done = gram_engine.solve_unit, list[SolvedUnit]()

    def solve_first(*arguments: Any, **named: Any) -> SolvedUnit:
        if not done:
            done.append(unsolved(real(*arguments, **named), 1))
        return unsolved(done[0], memory.unit)

    def place(held: bool) -> torch.device | None:
        return META if held else None

    with pytest.MonkeyPatch.context() as patched, torch.no_grad():
        # On the meta device attention takes the way that has a matrix for all pairs of tokens, which a GPU's has not.
        patched.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda q, *_, **__: torch.empty_like(q))
        patched.setattr(gram_engine, "solve_unit", solve_first)
        patched.setattr(refine, "_set_codes", lambda *_: None)
        with looks_answered(size["experts"], size["chosen"], rows) as looks, Count() as count:
            model = LayeredModel(outside, facts, size, META, BFLOAT16)
            model.layer_class = count.beside(model.layer_class)
            states = Rows(None, lengths, size["hidden"], BFLOAT16, place(memory.states))
            recorded = recorded_rows(
                lambda _, width, dtype: Rows(None, lengths, width, dtype, place(memory.inputs)), size, BFLOAT16
            )
            count.syncs = count.to_device = 0
            there = source.to(META)
            with model.layer(0, there, experts=False) as layer:
                observe(model, layer, states, recorded)
                weights = ExpertWeights(there, facts, size, 0, META, BFLOAT16)
                solved = solve_layer(
                    model, layer, there.tensor(facts.layer(0, facts.norm.tensor)), recorded, settings,
                    weights=weights.unit, residents=Residents(memory.resident, memory.unit, memory.smallest),
                )  # fmt: skip
                weights.require_finite()
            free(layer)
            written = layer_tensors(plan, 0, source, solved, near=there)
            made = held_tensors(source, written.device, folder / "b")
            del solved
            with model.layer(0, made) as layer:
                finish(model, layer, states, "the layer")
            free(layer)
            audit_layer(0, facts, size, there, made, device=META, audit=LayerAudit())
    count.syncs += len(looks)
    layer_bytes = sum(info.size for info in source.tensors.values())
    return Counted(count, memory, layer_bytes, recorded_bytes(size, TOKENS, 2))


CASES = {"80 GiB": (80, {}), "22 GiB": (22, {}), "DeepSeek-V3's size, 80 GiB": (80, {"hidden": 7168, "width": 2048})}


@pytest.fixture(scope="module", params=CASES)
def visit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Counted:
    limit, sizes = CASES[request.param]
    found = counted(tmp_path_factory.mktemp("counted"), limit * GIB, **sizes)
    count, memory = found.count, found.memory
    print(
        f"\n{request.param}: layer {found.layer_bytes / 1e9:.2f} GB, inputs {found.input_bytes / 1e9:.2f} GB; to the "
        f"device {count.to_device / 1e9:.2f} GB, to the host {count.to_host / 1e9:.2f} GB; {count.syncs} "
        f"synchronisations; {count.most / GIB:.1f} GiB alive at most, {memory.peak / GIB:.1f} foreseen; "
        f"{memory.resident} of {memory.units} units of {memory.unit} held; {count.operations:,} operations"
    )
    return found


@pytest.mark.slow
def test_what_crosses_the_bus_and_how_often_it_is_waited_for(visit: Counted) -> None:
    """The layer's own bytes, and where memory has room for the inputs nothing else; its result comes back once."""
    assert visit.memory.inputs
    assert visit.layer_bytes <= visit.count.to_device <= visit.layer_bytes + 1.1 * visit.input_bytes
    assert visit.count.to_host < 0.6 * visit.layer_bytes
    assert visit.count.syncs <= 20


@pytest.mark.slow
def test_what_is_alive_is_what_was_foreseen(visit: Counted) -> None:
    """Less than the plan says, which stays within the limit; and not so much less that memory is wasted."""
    assert visit.count.most <= visit.memory.peak
    assert visit.count.most >= 0.5 * visit.memory.peak
