"""`quantize verify` names every tensor that is not what the plan promises, from the files alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from commands import Command
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from conftest import Finished
from edited import MOE, edit
from safetensors.torch import load_file

from quantizers.checkpoint.reader import open_folder
from quantizers.solve.folded_scales import CLOSE_ENOUGH, matrix_errors
from quantizers.stitch.audit.checkpoint import verify

CPU = torch.device("cpu")
LAYER = "model.layers.{}.block_sparse_moe"
Tensors = dict[str, torch.Tensor]


def swap_two_experts(tensors: Tensors) -> None:
    for part in ("weight_packed", "weight_scale"):
        one, other = (f"{MOE}.experts.{n}.w3.{part}" for n in (0, 1))
        tensors[one], tensors[other] = tensors[other], tensors[one]


def turn_the_signs(tensors: Tensors) -> None:
    """An expert's codes and scales the other way round: the same weights, but for -8, which has no counterpart."""
    module = f"{MOE}.experts.4.w1"
    packed, scale = f"{module}.weight_packed", f"{module}.weight_scale"
    codes = unpack_from_int32(tensors[packed], 4, torch.Size(tensors[f"{module}.weight_shape"].tolist()))
    tensors[packed] = pack_to_int32(-codes.clamp(min=-7), 4)
    tensors[scale] = -tensors[scale]
    assert bool((tensors[scale] < 0).any())


# A tensor, what is done to its shard, and what `quantize verify` says of it.
TAMPERED: dict[str, tuple[str, Callable[..., object], str]] = {
    "a byte of a passthrough tensor": (
        "model.layers.2.self_attn.k_proj.weight",
        lambda t, name: t[name].view(torch.uint8)[0, :1].bitwise_xor_(torch.tensor(1, dtype=torch.uint8)),
        "{}: bytes differ",
    ),
    "a nudged router": (f"{MOE}.gate.weight", lambda t, name: t[name][0].mul_(1.00001), "{}: "),
    "a tensor less": (
        f"{LAYER.format(0)}.experts.0.w1.weight_scale", lambda t, name: t.pop(name), "{}: missing"
    ),
    "a tensor more": (
        f"{LAYER.format(3)}.gate.weight",
        lambda t, name: t.update({f"{LAYER.format(3)}.experts.0.w1.weight_g_idx": torch.zeros(4, dtype=torch.int32)}),
        f"{LAYER.format(3)}.experts.0.w1.weight_g_idx: no tensor of the source accounts for it",
    ),
    "a scale under the source's name": (
        "model.layers.0.self_attn.q_proj.weight_scale",
        lambda t, name: t.update({f"{name}_inv": t.pop(name)}),
        "{}: missing",
    ),
    "two experts swapped": (f"{MOE}.experts.0.w3.weight_packed", lambda t, name: swap_two_experts(t), "{}: "),
    "a zero among the scales": (
        f"{MOE}.experts.7.w2.weight_scale", lambda t, name: t[name][3].fill_(0), "{}: 4 of its group scales are zero"
    ),
    "a NaN in a scale": (
        f"{MOE}.experts.5.w1.weight_scale", lambda t, name: t[name][0].fill_(float("nan")), f"{MOE}.experts.5"
    ),
}  # fmt: skip


@pytest.mark.parametrize("inner", [True, False])
def test_a_scale_between_up_and_down_is_right_unless_the_gate_lets_none_through(inner: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    up, down = (torch.randn(shape, generator=generator) for shape in ((8, 6), (6, 8)))
    scale = torch.linspace(0.2, 5, 8)
    old, new = [up, up, down], [up, up * scale[:, None], down / scale]
    errors = matrix_errors(old, new, torch.ones(6), inner=inner).tolist()
    assert [error < 1e-6 for error in errors] == [True, inner, inner]
    assert inner or min(errors[1:]) > CLOSE_ENOUGH


def test_a_scale_in_experts_without_a_gate_is_squared_and_positive() -> None:
    generator = torch.Generator().manual_seed(0)
    up, down = (torch.randn(shape, generator=generator) for shape in ((8, 6), (6, 8)))
    scale = torch.linspace(0.2, 5, 8)
    for rows, power, right in ((scale, 2, True), (scale, 1, False), (-scale, 2, False)):
        new = [up * rows[:, None], down / scale**power]
        errors = matrix_errors([up, down], new, torch.ones(6), inner=2).tolist()
        assert (max(errors) < 1e-6) == right
        assert right or max(errors) > CLOSE_ENOUGH


def test_each_tensor_that_was_tampered_with_is_named(copied: Path, finished: Finished, command: Command) -> None:
    """All at once, and without the digests of report.json: by the source alone."""
    (copied / "report.json").unlink()
    for name, change, _ in TAMPERED.values():
        edit(copied, name, partial(change, name=name))
    router, source = f"{LAYER.format(2)}.gate.weight", open_folder(finished.source)
    edit(copied, router, lambda tensors: tensors.update({router: source.tensor(router)}))
    edit(copied, f"{MOE}.experts.4.w1.weight_packed", turn_the_signs)
    assert command("verify", copied, "--source", finished.source) == 3
    said = {kind: words.format(name) for kind, (name, _, words) in TAMPERED.items()}
    said["the source's router"] = f"{router}: not compensated"
    assert {kind: words for kind, words in said.items() if words not in command.out} == {}, command.out
    assert f"{MOE}.experts.4.w1" not in command.out


def test_a_cut_shard_is_named(copied: Path, finished: Finished, command: Command) -> None:
    shard = copied / "model-00002-of-00005.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    assert command("verify", copied, "--source", finished.source) == 3
    assert f"{shard.name}: " in command.out


def test_an_untouched_checkpoint_passes(finished: Finished) -> None:
    audit = verify(finished.folder, open_folder(finished.source), CPU)
    assert audit.differences == []
    assert audit.digests_checked
    assert audit.tensors == len(open_folder(finished.source).tensors) > audit.kept > 0
    assert max(audit.weight_error) < 0.2
    assert finished.report["audit"] == audit.as_dict() | {"digests": finished.report["audit"]["digests"]}


def test_the_folded_norm_reappears_inverted_in_the_router(finished: Finished) -> None:
    """The closure rule read straight from the files: gate' = gate * norm / norm', in float32."""
    source, output = open_folder(finished.source), open_folder(finished.folder)
    for layer in range(4):
        norm = f"model.layers.{layer}.post_attention_layernorm.weight"
        gate = f"model.layers.{layer}.block_sparse_moe.gate.weight"
        ratio = source.tensor(norm).double() / output.tensor(norm).double()
        expected = source.tensor(gate).double() * ratio
        assert not torch.equal(source.tensor(norm), output.tensor(norm)), "AWQ folded nothing, so nothing is tested"
        torch.testing.assert_close(output.tensor(gate).double(), expected, rtol=3e-7, atol=0)


def test_kept_tensors_are_the_sources_bytes(finished: Finished) -> None:
    """An oracle apart from the audit: safetensors' own reader on both sides."""
    source, output = open_folder(finished.source), open_folder(finished.folder)
    kept = [n for n in source.tensors if "experts" not in n and "gate.weight" not in n and "post_attention" not in n]
    assert len(kept) > 40
    for name in kept:
        written = name.replace("weight_scale_inv", "weight_scale")
        before = load_file(source.tensors[name].file)[name]
        after = load_file(output.tensors[written].file)[written]
        assert before.dtype == after.dtype
        assert torch.equal(before.view(torch.uint8), after.view(torch.uint8)), name
