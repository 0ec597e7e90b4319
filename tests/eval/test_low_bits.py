"""`eval`, `coverage` and `imatrix` of models in MXFP8, MXFP4, ModelOpt's NVFP4 and E8M0 blocks, as candidates and
sources: as whole models with the same numbers, read from the bits by `low_bits.weights_of`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import pytest
import torch
import zoo
from calibration_tokenizer import write_tokenizer
from commands import Command
from low_bits import HF_QUANT, LAYOUTS, rewrite_as, rewrite_as_gpt_oss, weights_of
from sets import rows_set
from source_forms import write_plain
from whole_models import compared, run_whole

from quantizers.calibration.load_set import load_set
from quantizers.checkpoint.reader import open_folder
from quantizers.commands.evaluate import measure

CPU = torch.device("cpu")
TEXTS = [("spoken", "def area(r):\n    return 3.14 * r * r\n" * 4)]
# The experts' names of a family, and a layout with several forms; of the others an eighth in each run of CI.
QUICK = {("mixtral", "MXFP4 of DeepSeek"), ("qwen3_moe", "NVFP4 of ModelOpt with MXFP8")}
PAIRS = [
    pytest.param(family, layout, marks=() if (family, layout) in QUICK else pytest.mark.every)
    for family in ("mixtral", "qwen3_moe")
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("family", "layout"), PAIRS)
def test_a_model_measures_as_the_whole_model_does(family: str, layout: str, tmp_path: Path) -> None:
    """Against its copy in bfloat16; and as the source of itself without a difference."""
    plain = write_plain(tmp_path / "plain", family)
    other = rewrite_as(plain, tmp_path / "other", layout)
    data = rows_set(tmp_path, TEXTS, sequence_length=128)
    texts = [torch.from_numpy(sample.tokens).long() for sample in load_set(data, str(plain)).samples]
    (measured,) = measure(open_folder(plain), [open_folder(other)], data, CPU, tmp_path / "work")
    runs = [run_whole(families.whole_model(*weights_of(folder)), texts) for folder in (plain, other)]
    wanted = compared(*runs, texts)
    assert float(wanted.kl.mean()) > 1e-4  # the quantization shows
    assert measured.as_dict()["kl"]["mean"] == pytest.approx(float(wanted.kl.mean()), abs=1e-6)
    (same,) = measure(open_folder(other), [open_folder(other)], data, CPU, tmp_path / "same")
    assert same.as_dict()["kl"]["mean"] == 0
    assert same.as_dict()["perplexity"]["source"] == pytest.approx(float(wanted.nll[1].mean().exp()), rel=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("name", [pytest.param("deepseek_v4", marks=pytest.mark.slow), "gpt_oss"])
def test_models_in_mxfp4_measure_as_whole_models_do_under_their_own_names(name: str, tmp_path: Path) -> None:
    """With experts in tensors of their own and attention in E8M0 blocks; with all experts of a layer in blocks."""
    plain = zoo.save(name, tmp_path / "plain")
    if name == "gpt_oss":
        other = rewrite_as_gpt_oss(plain, tmp_path / "other")
    else:
        other = rewrite_as(plain, tmp_path / "other", "MXFP4 of DeepSeek")
    data = rows_set(tmp_path, TEXTS, sequence_length=64)
    (text,) = (torch.from_numpy(sample.tokens).long() for sample in load_set(data, str(plain)).samples)
    (measured,) = measure(open_folder(plain), [open_folder(other)], data, CPU, tmp_path / "work")
    p, q = (
        torch.log_softmax(zoo.whole_model(name, *weights_of(folder))(text[None]).logits[0].double(), -1)[:-1]
        for folder in (plain, other)
    )
    assert measured.as_dict()["kl"]["mean"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), abs=1e-6)
    assert measured.as_dict()["kl"]["mean"] > 1e-3
    (same,) = measure(open_folder(other), [open_folder(other)], data, CPU, tmp_path / "same")
    assert same.as_dict()["kl"]["mean"] == 0


def test_coverage_and_the_importance_matrix_read_them(tmp_path: Path, command: Command) -> None:
    plain = write_plain(tmp_path / "plain", "qwen3_moe")
    data = rows_set(tmp_path, TEXTS, sequence_length=128)
    routed: dict[str, Any] = {}
    for layout in ("MXFP8 of MiniMax", "MXFP4 of DeepSeek"):
        source = rewrite_as(plain, tmp_path / layout.replace(" ", "-"), layout)
        write_tokenizer(source)
        assert command("coverage", "--model", source, "--data", data, "--no-picture", "--json", "--device", "cpu") == 0
        routed[layout] = json.loads(command.out)
        out = source / "imatrix.gguf"
        assert command("imatrix", "--model", source, "--data", data, "-o", out, "--device", "cpu") == 0, command.err
    assert routed["MXFP8 of MiniMax"] != routed["MXFP4 of DeepSeek"]


def test_mxfp8_is_measured_as_served_where_its_kernel_is_known(tmp_path: Path, command: Command) -> None:
    """Marlin multiplies it as it is; what kernels of Blackwell round activations to is not known."""
    plain = write_plain(tmp_path / "plain", "mixtral", 1)
    write_tokenizer(plain)
    data = rows_set(tmp_path, TEXTS, sequence_length=128)
    other = rewrite_as(plain, tmp_path / "other", "MXFP8 of MiniMax")
    words = ("eval", plain, other, "--data", data, "--device", "cpu", "--json", "--no-picture")
    assert command(*words, "--as-served", "ampere") == 0, command.err
    served = json.loads(command.out)["candidates"][0]["as_served"]
    assert "Marlin" in json.dumps(served)
    assert command(*words, "--as-served", "blackwell") == 2
    assert "as served on blackwell: MXFP8 is not known for" in command.err.splitlines()[-1]


CONTRADICTIONS: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None, str]] = {
    "nothing is declared": (None, None, "of ModelOpt's NVFP4, but no quant_algo is said here, and there is none in"),
    "modelopt alone": ({"quant_method": "modelopt"}, None, "but no quant_algo is said here, and there is none in hf_"),
    "two algorithms": (
        {"quant_method": "modelopt", "quant_algo": "FP8"}, HF_QUANT,
        "hf_quant_config.json: quant_algo is 'NVFP4', but config.json says 'FP8'; download both files of one release",
    ),
    "an algorithm that is not read": (
        None, {"quantization": {"quant_algo": "W4A8_AWQ"}}, "hf_quant_config.json: quant_algo is 'W4A8_AWQ', and only",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_checkpoint_that_declares_nothing_or_two_things_is_refused(
    name: str, tmp_path: Path, command: Command
) -> None:
    section, beside, said = CONTRADICTIONS[name]
    plain = write_plain(tmp_path / "plain", "mixtral", 1)
    other = rewrite_as(plain, tmp_path / "other", "NVFP4 of ModelOpt")
    config = json.loads((other / "config.json").read_text()) | {"quantization_config": section}
    (other / "config.json").write_text(json.dumps(config))
    if beside is not None:
        (other / "hf_quant_config.json").write_text(json.dumps(beside))
    data = rows_set(tmp_path, TEXTS, sequence_length=128)
    assert command("eval", plain, other, "--data", data, "--device", "cpu") == 2
    assert said in command.err.splitlines()[-1]


def test_a_nan_among_e8m0_scales_is_one_line_that_names_the_tensor(tmp_path: Path, command: Command) -> None:
    from safetensors.torch import load_file, save_file

    plain = write_plain(tmp_path / "plain", "mixtral", 1)
    other = rewrite_as(plain, tmp_path / "other", "MXFP4 of DeepSeek")
    name = "model.layers.0.block_sparse_moe.experts.1.w2.scale"
    for shard in other.glob("*.safetensors"):
        tensors = load_file(shard)
        if name in tensors:
            tensors[name].view(torch.uint8)[3, 1] = 255
            save_file(tensors, shard, metadata={"format": "pt"})
    data = rows_set(tmp_path, TEXTS, sequence_length=128)
    assert command("eval", plain, other, "--data", data, "--device", "cpu") == 2
    line = command.err.splitlines()[-1]
    assert f"{name} holds a NaN (E8M0's byte 255); download this shard again" in line
