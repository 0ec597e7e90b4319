"""Checkpoints of others in which a shared expert reads a norm that was divided, and was not multiplied."""

from __future__ import annotations

import shutil
from pathlib import Path

import families
import pytest
import tiny
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from foreign import INT4, bf16_copy, oneshots
from torch import Tensor
from whole_models import source_weights, stored

from quantizers.checkpoint.reader import open_folder, side_files
from quantizers.repair.stitch import stitch_experts
from quantizers.stitch.audit.checkpoint import verify
from quantizers.system.errors import CheckpointError

CPU = torch.device("cpu")
CHANNELS = 256
LEFT_OUT = "not compensated, though"
SHARED = "model.layers.{}.mlp.shared_experts.gate_proj"
DIVIDED = (100, 37)  # channels in layer 1, and in layer 2


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.write(tmp_path_factory.mktemp("shared") / "source", "glm4_moe")


def packed(module: str, weight: Tensor) -> dict[str, Tensor]:
    """INT4 in groups of 32, rounded to nearest, by the definition; the library packs the words."""
    groups = weight.float().unflatten(1, (-1, 32))
    scale = (groups.abs().amax(-1) / 7.5).bfloat16()
    codes = (groups / scale.float().unsqueeze(-1)).round().clamp(-8, 7).flatten(1).to(torch.int8)
    return {
        f"{module}.weight_packed": pack_to_int32(codes, 4),
        f"{module}.weight_scale": scale,
        f"{module}.weight_shape": torch.tensor(weight.shape),
    }


def quantized(source: Path, folder: Path, shared: str, *, router: bool = True, mtp: bool = True) -> Path:
    """As llm-compressor's mapping for GLM leaves it: the norm divided, the router and the routed experts multiplied.

    Args:
        shared: what became of the shared experts: "kept" as the source's FP8, "copied" to bfloat16, "packed" as INT4,
            or "multiplied", in bfloat16, as it would be right.
        router: it was multiplied.
        mtp: the layer that predicts further tokens is there.
    """
    tensors = stored(source)[1]
    own, numbers = source_weights(source)
    generator = torch.Generator().manual_seed(2)
    for layer, divided in enumerate(DIVIDED, 1):
        scale = torch.ones(CHANNELS)
        scale[torch.randperm(CHANNELS, generator=generator)[:divided]] = 4.0
        at = f"model.layers.{layer}"
        tensors[f"{at}.post_attention_layernorm.weight"] /= scale.bfloat16()
        if router:
            tensors[f"{at}.mlp.gate.weight"] *= scale.bfloat16()
        for name in [name for name in tensors if name.startswith(f"{at}.mlp.") and name.endswith("_proj.weight")]:
            module = name.removesuffix(".weight")
            reads = not name.endswith("down_proj.weight")
            routed = ".experts." in name
            if not routed and shared == "kept":
                continue
            del tensors[name], tensors[f"{name}_scale"]
            weight = numbers[name].float() * (scale if reads and (routed or shared == "multiplied") else 1)
            tensors |= packed(module, weight) if routed or shared == "packed" else {name: weight.bfloat16()}
    if not mtp:
        tensors = {name: tensor for name, tensor in tensors.items() if not families.is_mtp(own, name)}
    group = {"targets": ["re:.*experts.*_proj$"], "format": "pack-quantized", "weights": INT4}
    section = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}
    tiny.write(folder, own | {"quantization_config": section}, tensors)
    for file in side_files(source):
        shutil.copyfile(file, folder / file.name)
    return folder


@pytest.mark.parametrize("shared", ["kept", "copied", "packed", "multiplied"])
def test_a_shared_expert_that_was_left_out_is_named_once_a_layer(shared: str, source: Path, tmp_path: Path) -> None:
    found = verify(quantized(source, tmp_path / "made", shared), open_folder(source), CPU).differences
    named = [line for line in found if LEFT_OUT in line]
    assert found[: len(named)] == named, "first of all differences"
    assert named == [
        f"{SHARED.format(layer)}: {LEFT_OUT} model.layers.{layer}.post_attention_layernorm.weight was divided in "
        f"{divided} of {CHANNELS} channels: mlp.shared_experts.gate_proj and mlp.shared_experts.up_proj read it and "
        "have the source's numbers; repairing this would change passthrough bytes; quantize again "
        "without scales in this norm"
        for layer, divided in enumerate(DIVIDED, 1)
        if shared != "multiplied"
    ]
    assert not any("weight_packed: " in line and "away" in line for line in found), "its experts are the source's"
    for layer in (1, 2):
        assert any(line.startswith(f"model.layers.{layer}.post_attention_layernorm.weight: bytes") for line in found)


def test_a_repair_that_is_not_possible_is_not_recommended(source: Path, tmp_path: Path) -> None:
    made = quantized(source, tmp_path / "made", "kept", router=False)
    found = [line for line in verify(made, open_folder(source), CPU).differences if LEFT_OUT in line]
    routers = [line for line in found if ".mlp.gate.weight: " in line]
    assert (len(found), len(routers)) == (4, 2)
    assert all(line.endswith("; quantize again without scales in this norm") for line in found)


def test_a_layer_that_predicts_further_tokens_is_missed_in_one_line(source: Path, tmp_path: Path) -> None:
    made = quantized(source, tmp_path / "made", "kept", mtp=False)
    found = [line for line in verify(made, open_folder(source), CPU).differences if "model.layers.3" in line]
    (line,) = found
    assert line.startswith(f"model.layers.3: all {15 + 8 + 48 + 6} tensors of this MTP layer are missing")


@pytest.mark.parametrize("shared", ["copied", "multiplied"])
@pytest.mark.parametrize("repair", [False, True])
def test_stitching_is_refused_since_neither_norm_would_be_right(
    shared: str, repair: bool, source: Path, tmp_path: Path
) -> None:
    experts = quantized(source, tmp_path / "experts", shared, mtp=False)
    says = (
        r"experts: layer 1: post_attention_layernorm.weight was divided in 100 of 256 channels, but .*gate_proj and .*"
        r"up_proj read it too and would keep the source's bytes: its experts fit the divided norm alone"
    )
    with pytest.raises(CheckpointError, match=says):
        stitch_experts(source, experts, tmp_path / "output", device="cpu", repair_router=repair)
    assert not (tmp_path / "output").exists()


@pytest.mark.slow
@pytest.mark.every
def test_the_librarys_own_mapping_leaves_the_shared_experts_out(source: Path, tmp_path: Path) -> None:
    """That of llm-compressor 0.14 for Glm4MoeForCausalLM, limited to layers with a router."""
    generator = torch.Generator().manual_seed(4)
    sequences = [torch.randint(0, 320, (64,), generator=generator).tolist() for _ in range(4)]
    job = {"weights": INT4, "experts_only": True, "awq": True, "compensate": True, "sequences": sequences}
    norms = r"re:.*layers\.[12]\.post_attention_layernorm$"
    copy = bf16_copy(source, tmp_path / "copy")
    (made,) = oneshots(copy, {tmp_path / "made": job | {"norms": norms}})
    found = [line for line in verify(made, open_folder(source), CPU).differences if LEFT_OUT in line]
    assert [line.partition(":")[0] for line in found] == [SHARED.format(layer) for layer in (1, 2)]
