"""A solved layer as the tensors of a shard: what compressed-tensors packs, in one copy from wherever it was solved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file
from tiny import make

from quantizers.architectures.families import architecture_for
from quantizers.architectures.matrices import MATRICES
from quantizers.checkpoint.loaded_tensors import LoadedTensors, layer_names, load_tensors, tensors_in_memory
from quantizers.checkpoint.reader import open_folder
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.formats.dequantization import read_weight
from quantizers.planning.assign_actions import make_plan
from quantizers.planning.plan import PASSTHROUGH, Plan
from quantizers.recipe.schema import Experts
from quantizers.solve.result import LayerResult
from quantizers.solve.rounding import minmax_scales, nearest
from quantizers.stitch.audit import layer as auditing
from quantizers.stitch.audit.layer import LayerAudit, audit_layer
from quantizers.stitch.write.shard import (
    LayerTensors,
    changes,
    check_finite,
    layer_tensors,
    recorded_digests,
    write_shard,
)
from quantizers.system.errors import QuantizeError

BLOCK = (128, 128)


class Layer:
    """Layer 0 of a tiny model, with codes that nobody solved: only where they go matters here."""

    def __init__(self, folder: Path, bits: Literal[2, 3, 4] = 4) -> None:
        model = open_folder(make(folder / "model", num_hidden_layers=1))
        self.facts = architecture_for(model.config, "config.json")
        self.source: LoadedTensors = load_tensors(model, layer_names(model, self.facts, 0))
        specs = {name: Spec(info.dtype, info.shape) for name, info in model.tensors.items()}
        self.plan: Plan = make_plan(self.facts, specs, Experts(bits=bits, group_size=32), "tiny", BLOCK)
        self.norm = self.source.tensor(self.facts.layer(0, self.facts.norm.tensor))
        self.router = self.source.tensor(self.facts.layer(0, self.facts.router.tensor))

    def solved(self, device: str = "cpu") -> LayerResult:
        experts, hidden, width = self.facts.num_experts, self.facts.hidden_size, self.facts.expert_width
        shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        generator = torch.Generator().manual_seed(0)
        codes, scales = {}, {}
        for matrix in MATRICES:
            rows, columns = shapes[matrix]
            drawn = torch.randint(-8, 8, (experts, rows, columns), generator=generator)
            codes[matrix] = drawn.to(torch.int8).to(device)
            scales[matrix] = torch.rand(experts, rows, columns // 32, generator=generator).bfloat16().to(device)
        return LayerResult(
            self.norm.to(device), torch.ones(hidden, device=device), self.router.float().to(device), codes, scales
        )


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Layer:
    return Layer(tmp_path_factory.mktemp("layer_tensors"))


def test_a_shard_holds_what_the_plan_says_and_the_library_packs(layer: Layer, tmp_path: Path) -> None:
    solved = layer.solved()
    tensors = layer_tensors(layer.plan, 0, layer.source, solved)
    write_shard(tensors.host, tmp_path / "x.safetensors")
    written = load_file(tmp_path / "x.safetensors")
    planned = {name: spec for action in layer.plan.of_layer(0) for name, spec in action.outputs.items()}
    assert {name: tuple(tensor.shape) for name, tensor in written.items()} == {
        name: spec.shape for name, spec in planned.items()
    }
    for expert in range(layer.facts.num_experts):
        for matrix in MATRICES:
            module = layer.facts.expert(0, expert, matrix)
            assert torch.equal(written[f"{module}.weight_packed"], pack_to_int32(solved.codes[matrix][expert], 4))
            assert torch.equal(written[f"{module}.weight_scale"], solved.scales[matrix][expert])


def test_an_accelerators_tensors_have_the_same_bytes(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its branch taken on the CPU: experts are packed several at a time."""
    from quantizers.stitch.write import shard

    plain = layer_tensors(layer.plan, 0, layer.source, layer.solved())
    monkeypatch.setattr(shard, "is_accelerator", lambda device: True)
    monkeypatch.setattr(shard, "PACKED_AT_A_TIME", 3)
    laid = layer_tensors(layer.plan, 0, layer.source, layer.solved())
    for name, tensor in plain.host.items():
        assert torch.equal(tensor.view(torch.uint8), laid.host[name].view(torch.uint8)), name
    kept = {name for action in layer.plan.of_layer(0) if action.kind in PASSTHROUGH for name in action.outputs}
    unwritten = layer_tensors(layer.plan, 0, layer.source, layer.solved(), written=False)
    assert unwritten.host.keys() == kept
    assert unwritten.device.keys() == laid.device.keys()


def rounded(layer: Layer) -> LayerTensors:
    """The layer's own weights rounded to nearest, so that the audit finds nothing."""
    solved = layer.solved()
    for matrix in MATRICES:
        for expert, (codes, scales) in enumerate(zip(solved.codes[matrix], solved.scales[matrix], strict=True)):
            weight = read_weight(layer.source, layer.facts.expert(0, expert, matrix), torch.device("cpu"))
            groups = weight.view(len(weight), -1, 32)
            scales.copy_(groups.abs().amax(-1) / 7)
            codes.copy_((groups / scales.float().unsqueeze(-1)).round().clamp(-8, 7).flatten(1))
    return layer_tensors(layer.plan, 0, layer.source, solved)


def audited(layer: Layer, tensors: dict[str, torch.Tensor]) -> LayerAudit:
    audit, made = LayerAudit(), tensors_in_memory(layer.source, tensors, Path("made"))
    bits = layer.plan.schemes[0].bits
    audit_layer(0, layer.facts, layer.source, made, bits=bits, device=torch.device("cpu"), audit=audit)
    return audit


def test_units_of_experts_are_audited_as_single_ones(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one of a unit cannot be read, and another is wrong; both are named in their order."""
    tensors = dict(rounded(layer).host)
    assert audited(layer, tensors).differences == []
    unreadable, wrong = layer.facts.expert(0, 2, "gate"), layer.facts.expert(0, 1, "down")
    tensors[f"{unreadable}.weight_scale"] = torch.full_like(tensors[f"{unreadable}.weight_scale"], torch.nan)
    tensors[f"{wrong}.weight_scale"] = tensors[f"{wrong}.weight_scale"] * 2
    single = audited(layer, tensors)
    monkeypatch.setattr(auditing, "experts_per_batch", lambda *_: 3)
    units = audited(layer, tensors)
    assert units.differences == single.differences
    assert [line.partition(":")[0] for line in single.differences] == [
        f"{wrong}.weight_packed", unreadable.rpartition(".")[0],
    ]  # fmt: skip
    assert [error is None for error in units.by_expert] == [i == 2 for i in range(layer.facts.num_experts)]
    known = [[error for error in found.by_expert if error is not None] for found in (units, single)]
    assert known[0] == pytest.approx(known[1], rel=1e-5)


@pytest.mark.parametrize("bits", [2, 3])
def test_with_few_bits_an_expert_that_was_not_scaled_as_its_norm_is_still_named(
    bits: Literal[2, 3], tmp_path: Path
) -> None:
    """Rounding alone is then as far away as a wrong scale, so both are compared."""
    layer = Layer(tmp_path, bits)
    norm = (layer.norm.float() / torch.linspace(0.4, 2.5, len(layer.norm))).to(layer.norm.dtype)
    smooth = layer.norm.float() / norm.float()
    for right in (True, False):
        solved = layer.solved()
        for matrix in MATRICES:
            scale = smooth if right and matrix != "down" else torch.ones(1)
            modules = [layer.facts.expert(0, expert, matrix) for expert in range(layer.facts.num_experts)]
            weight = scale * torch.stack([read_weight(layer.source, name, torch.device("cpu")) for name in modules])
            solved.scales[matrix] = minmax_scales(weight, 32, bits)
            solved.codes[matrix] = nearest(weight, solved.scales[matrix], bits)
        solved = replace(solved, norm=norm, smooth=smooth, router=layer.router.float() * smooth)
        audit = audited(layer, layer_tensors(layer.plan, 0, layer.source, solved).host)
        assert right == (not audit.differences), audit.differences
        assert right or len(audit.differences) >= 2 * layer.facts.num_experts  # gate and up, and with it maybe down
        assert all("closer to the source's matrix without the norm's ratio" in line for line in audit.differences)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_nan_anywhere_is_refused_except_in_what_is_carried(dtype: torch.dtype) -> None:
    for position in (0, 7, 8, 20):
        values = torch.ones(3, 7)
        check_finite({"x": values.to(dtype)}, "y")
        values.view(-1)[position] = torch.nan
        with pytest.raises(QuantizeError, match="y: x is not finite"):
            check_finite({"x": values.to(dtype)}, "y")
        check_finite({"x": values.to(dtype)}, "y", carried=["x"])


def test_a_damaged_digest_in_a_report_is_compared_all_the_same(tmp_path: Path) -> None:
    """Left out, its shard would pass for one of which nothing is known."""
    file = tmp_path / "x.safetensors"
    written = write_shard({"a": torch.ones(3)}, file)
    for damage in ({"sha256": 3}, {"sha256": "0" * 64, "more": 1}):
        read = recorded_digests({"audit": {"digests": {file.name: written.as_dict() | damage}}})
        assert changes(file, read[file.name]) == [f"{file.name}: changed since the run wrote it, only in its header"]
    assert changes(file, recorded_digests({"audit": {"digests": {file.name: written.as_dict()}}})[file.name]) == []
