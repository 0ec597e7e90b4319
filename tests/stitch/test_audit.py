"""`quantize verify` names every tensor that is not what the plan promises, from the files alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import Command
from conftest import Finished
from edited import MOE, edit
from safetensors.torch import load_file

from quantizers.checkpoint.reader import open_folder
from stitch.audit.checkpoint import verify

CPU = torch.device("cpu")
Tamper = Callable[[Path], str]


def flip_a_byte(folder: Path) -> str:
    name = "model.layers.2.self_attn.k_proj.weight"
    info = open_folder(folder).tensors[name]
    with info.file.open("rb+") as stream:
        stream.seek(info.start + 5)
        byte = stream.read(1)[0]
        stream.seek(info.start + 5)
        stream.write(bytes([byte ^ 1]))
    return f"{name}: bytes differ"


def change_a_word(folder: Path) -> str:
    name = f"{MOE}.experts.3.w2.weight_packed"
    edit(folder, name, lambda t: t[name].view(-1)[7:8].bitwise_xor_(torch.tensor(1, dtype=torch.int32)))
    return f"{name}: changed since the run wrote it"


def restore_the_router(folder: Path) -> str:
    name = f"{MOE}.gate.weight"
    source = open_folder(Path(json.loads((folder / "tampered.json").read_text())["source"]))
    edit(folder, name, lambda t: t.__setitem__(name, source.tensor(name)))
    return f"{name}: not compensated"


def nudge_the_router(folder: Path) -> str:
    name = f"{MOE}.gate.weight"
    edit(folder, name, lambda t: t[name][0].mul_(1.00001))
    return f"{name}: "


def drop_a_tensor(folder: Path) -> str:
    name = f"{MOE}.experts.0.w1.weight_scale"
    edit(folder, name, lambda t: t.__delitem__(name))
    return f"{name}: missing"


def add_a_tensor(folder: Path) -> str:
    name = f"{MOE}.experts.0.w1.weight_g_idx"
    edit(folder, f"{MOE}.gate.weight", lambda t: t.__setitem__(name, torch.zeros(4, dtype=torch.int32)))
    return f"{name}: no tensor of the source accounts for it"


def rename_a_scale_back(folder: Path) -> str:
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    edit(folder, name, lambda t: t.__setitem__(name + "_inv", t.pop(name)))
    return f"{name}: missing"


def swap_two_experts(folder: Path) -> str:
    one, other = f"{MOE}.experts.0.w3", f"{MOE}.experts.1.w3"

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("weight_packed", "weight_scale"):
            a, b = f"{one}.{part}", f"{other}.{part}"
            tensors[a], tensors[b] = tensors[b], tensors[a]

    edit(folder, f"{one}.weight_packed", swap)
    (folder / "report.json").unlink()  # without the recorded digests, only closeness can tell
    return f"{one}.weight_packed: "


def put_a_nan_into_a_scale(folder: Path) -> str:
    name = f"{MOE}.experts.5.w1.weight_scale"
    edit(folder, name, lambda t: t[name][0].fill_(float("nan")))
    return f"{MOE}.experts.5"


def truncate_a_shard(folder: Path) -> str:
    file = folder / "model-00002-of-00005.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return file.name


TAMPERINGS = [
    flip_a_byte, change_a_word, restore_the_router, nudge_the_router, drop_a_tensor, add_a_tensor, rename_a_scale_back,
    swap_two_experts, put_a_nan_into_a_scale, truncate_a_shard,
]  # fmt: skip


@pytest.mark.parametrize("tamper", TAMPERINGS)
def test_a_tampered_checkpoint_exits_3_and_names_the_tensor(
    tamper: Tamper, finished: Finished, tmp_path: Path, command: Command
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished.folder, copy)
    (copy / "tampered.json").write_text(json.dumps({"source": str(finished.source)}))
    expected = tamper(copy)
    assert command("verify", copy, "--source", finished.source) == 3
    assert expected in command.out


def test_an_untouched_checkpoint_passes(finished: Finished) -> None:
    audit = verify(finished.folder, open_folder(finished.source), CPU)
    assert audit.differences == []
    assert audit.digests_checked
    assert audit.tensors == len(open_folder(finished.source).tensors)
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
