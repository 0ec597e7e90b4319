"""`quantize verify` of checkpoints of AutoAWQ and GPTQ: an account of every tensor, and what contradicts the source."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import awq_gptq
import families
import pytest
import tiny
import torch
from awq_gptq import Kind
from commands import quantize
from torch import Tensor

AT = "model.layers.1"
EXPERTS = f"{AT}.block_sparse_moe.experts"
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.write(tmp_path_factory.mktemp("words") / "source", "mixtral", num_hidden_layers=2)


def verified(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any]:
    code = quantize(monkeypatch, "verify", *words, "--device", "cpu", "--json")
    return code, json.loads(capsys.readouterr().out)


def smoothed(source: Path, folder: Path, *, router: bool) -> Path:
    """A BF16 copy as AWQ leaves one: norms divided, what reads them multiplied; up's rows and v's divided again."""
    config = json.loads((source / "config.json").read_text())
    weights = {name: tensor.float() for name, tensor in families.source_weights(source).items()}
    generator = torch.Generator().manual_seed(1)
    experts = [f"block_sparse_moe.experts.{expert}.{matrix}" for expert in range(4) for matrix in ("w1", "w3")]
    for layer in range(2):
        at = f"model.layers.{layer}"
        for norm, readers in (
            ("input_layernorm", [f"self_attn.{name}_proj" for name in "qkv"]),
            ("post_attention_layernorm", [*experts, *["block_sparse_moe.gate"] * router]),
        ):
            scale = 2 ** torch.randint(-2, 3, (256,), generator=generator).float()
            weights[f"{at}.{norm}.weight"] /= scale
            for reader in readers:
                weights[f"{at}.{reader}.weight"] *= scale
        for expert in range(4):
            scale = 1 + torch.rand(192, generator=generator)
            weights[f"{at}.block_sparse_moe.experts.{expert}.w3.weight"] /= scale[:, None]
            weights[f"{at}.block_sparse_moe.experts.{expert}.w2.weight"] *= scale
    return tiny.write(folder, config, {name: tensor.bfloat16() for name, tensor in weights.items()})


def test_every_tensor_is_accounted_for(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    awq_gptq.checkpoint(source, tmp_path / "gptq", Kind("gptq", bits=8, group=64, symmetric=True))
    code, report = verified(monkeypatch, capsys, tmp_path / "gptq", "--source", source)
    assert report["differences"] == []
    counts = report["account"]
    # Of 2 layers 4 attention and 12 experts' matrices; norms, router, embeddings, head and last norm stay.
    assert counts[:2] == ["32 quantized to GPTQ INT8 group 64", "9 converted to F16"]
    assert counts[2].startswith("quantized matrices: at most 0.01")
    assert report["tensors"] == 41
    assert code == 0
    kinds = report["consumers"]["schemes"]["stored as"]
    assert kinds["experts"] == kinds["attention o"] == "GPTQ INT8 group 64"


@pytest.mark.parametrize("router", [True, False], ids=["router compensated", "router not compensated"])
def test_awqs_scales_are_undone_and_a_router_without_them_is_found(
    router: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    awq_gptq.checkpoint(smoothed(source, tmp_path / "smoothed", router=router), tmp_path / "awq", Kind("awq"))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "awq" / file).write_bytes((source / file).read_bytes())
    code, report = verified(monkeypatch, capsys, tmp_path / "awq", "--source", source)
    differences = [f"model.layers.{layer}.block_sparse_moe.gate.weight: not compensated, though" for layer in (0, 1)]
    assert [line[: len(differences[0])] for line in report["differences"]] == ([] if router else differences)
    assert "4 norms divided by a scale" in report["account"]
    assert ("2 routers multiplied by their norm's scale" in report["account"]) == router
    assert 0.05 < max(report["weight_error"]) < 0.2
    assert router or code == 3


def another_matrix(tensors: Tensors) -> None:
    for part in ("qweight", "qzeros", "scales"):
        tensors[f"{EXPERTS}.2.w1.{part}"] = tensors[f"{EXPERTS}.3.w1.{part}"]


def another_attention(tensors: Tensors) -> None:
    tensors[f"{AT}.self_attn.o_proj.qweight"] = tensors[f"{AT}.self_attn.o_proj.qweight"].flip(0)


def other_embeddings(tensors: Tensors) -> None:
    tensors["model.embed_tokens.weight"][3] += 1


def missing(tensors: Tensors) -> None:
    del tensors[f"{AT}.block_sparse_moe.gate.weight"]


def no_norm(tensors: Tensors) -> None:
    del tensors[f"{AT}.post_attention_layernorm.weight"]


def broken_norm(tensors: Tensors) -> None:
    tensors[f"{AT}.input_layernorm.weight"][0] = torch.nan


def unknown(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.rotation"] = torch.ones(2)


def unreadable(tensors: Tensors) -> None:
    del tensors[f"{EXPERTS}.0.w2.qzeros"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (another_matrix, f"{EXPERTS}.2.w1.qweight: "),
        (another_attention, f"{AT}.self_attn.o_proj.qweight: "),
        (other_embeddings, "model.embed_tokens.weight: BF16 [320, 256] of the source, but other numbers"),
        (missing, f"{AT}.block_sparse_moe.gate.weight: missing; the source has it"),
        (no_norm, f"{AT}.post_attention_layernorm.weight: missing; the source has it"),
        (broken_norm, f"{AT}.input_layernorm.weight is not finite"),
        (unknown, "model.layers.0.self_attn.rotation: no tensor of the source accounts for it"),
        (unreadable, f"{EXPERTS}.0.w2.qzeros is missing (a part of a quantized layer)"),
    ],
)
def test_what_contradicts_the_source_is_a_difference(
    change: Callable[[Tensors], None],
    said: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    awq_gptq.checkpoint(source, tmp_path / "awq", Kind("awq"), edit=change)
    code, report = verified(monkeypatch, capsys, tmp_path / "awq", "--source", source)
    assert code == 3
    assert said in report["differences"][0]
    assert len(report["differences"]) <= 2
    assert len(set(report["differences"])) == len(report["differences"])


# Families with shared experts, dense layers, MLA, and a layer beyond the last ----------------------------------

BLOCK = "post_attention_layernorm"
PLAIN = {
    "glm4_moe": {"input_layernorm": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]},
    "deepseek_v3": {
        "input_layernorm": ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"],
        "self_attn.q_a_layernorm": ["self_attn.q_b_proj"],
        "self_attn.kv_a_layernorm": ["self_attn.kv_b_proj"],
    },
}


@pytest.fixture(scope="module", params=list(PLAIN))
def with_shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("words-shared") / "source"
    return request.param, families.write(folder, request.param, num_hidden_layers=2)


def all_smoothed(family: str, source: Path, folder: Path, *, left_out: tuple[str, ...] = ()) -> Path:
    """A BF16 copy of which every norm was divided and every reader multiplied, but those that end as `left_out` says;
    up's rows divided and down's columns multiplied, in every kind of MLP. Layer 0 is dense; the layer after layer 1,
    which predicts further tokens, is left as it is.
    """
    weights = {name: tensor.float() for name, tensor in families.source_weights(source).items()}
    config = json.loads((source / "config.json").read_text())
    generator = torch.Generator().manual_seed(1)
    for layer in range(2):
        at = f"model.layers.{layer}."
        inside = [name.removeprefix(at).removesuffix(".weight") for name in weights if name.startswith(at)]
        mlp = [n for n in inside if n.startswith("mlp.") and n.endswith(("gate_proj", "up_proj"))]
        norms = PLAIN[family] | {BLOCK: [*mlp, *["mlp.gate"] * (layer == 1)]}
        for norm, readers in norms.items():
            scale = 2 ** torch.randint(-1, 2, weights[f"{at}{norm}.weight"].shape, generator=generator).float()
            weights[f"{at}{norm}.weight"] /= scale
            for reader in readers:
                if not reader.endswith(left_out or "nothing"):
                    weights[f"{at}{reader}.weight"] *= scale
        for up in [n for n in mlp if n.endswith("up_proj")]:
            scale = 1 + torch.rand(weights[f"{at}{up}.weight"].shape[0], generator=generator)
            weights[f"{at}{up}.weight"] /= scale[:, None]
            weights[f"{at}{up.replace('up_proj', 'down_proj')}.weight"] *= scale
    return tiny.write(folder, config, {name: tensor.bfloat16() for name, tensor in weights.items()})


def awq_of(copy: Path, source: Path, folder: Path, plain: str = "nothing") -> Path:
    """Quantized, but for modules whose name has `plain` in it."""

    def chosen(module: str) -> Kind | None:
        return Kind("awq") if module.endswith("_proj") and plain not in module else None

    awq_gptq.checkpoint(copy, folder, Kind("awq"), chosen=chosen)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((source / file).read_bytes())
    return folder


def test_scales_in_every_kind_of_layer_are_undone(
    with_shared: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    family, source = with_shared
    copy = all_smoothed(family, source, tmp_path / "copy")
    _, report = verified(monkeypatch, capsys, awq_of(copy, source, tmp_path / "awq"), "--source", source)
    assert report["differences"] == []
    assert f"{2 * len(PLAIN[family]) + 2} norms divided by a scale" in report["account"]
    assert "1 routers multiplied by their norm's scale" in report["account"]
    left = "2 matrices multiplied by their norm's scale"  # kv_a of two layers, which is no _proj here
    assert (left in report["account"]) == (family == "deepseek_v3")
    assert 0.05 < float(report["account"][-1].split()[4]) < 0.2


@pytest.mark.parametrize("plain", ["nothing", "shared_experts"], ids=["quantized", "left plain"])
def test_a_shared_expert_without_its_norms_scale_is_found(
    plain: str,
    with_shared: tuple[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    family, source = with_shared
    copy = all_smoothed(family, source, tmp_path / "copy", left_out=("shared_experts.gate_proj",))
    _, report = verified(monkeypatch, capsys, awq_of(copy, source, tmp_path / "awq", plain), "--source", source)
    at = "model.layers.1.mlp.shared_experts.gate_proj"
    (line,) = [one for one in report["differences"] if at in one]
    assert line.startswith(f"{at}: not compensated, though" if plain != "nothing" else f"{at}.qweight: ")


def test_an_attention_without_its_norms_scale_is_found(
    with_shared: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    family, source = with_shared
    readers = list(PLAIN[family].values())[-1]
    copy = all_smoothed(family, source, tmp_path / "copy", left_out=(readers[-1],))
    _, report = verified(monkeypatch, capsys, awq_of(copy, source, tmp_path / "awq"), "--source", source)
    found = report["differences"]
    assert [line.partition(".qweight")[0] for line in found] == [f"model.layers.{n}.{readers[-1]}" for n in range(2)]


def test_matrices_of_the_layer_beyond_the_last_are_compared_too(
    with_shared: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    family, source = with_shared
    copy = all_smoothed(family, source, tmp_path / "copy")

    flipped = ("eh_proj", "mlp.experts.3.down_proj", "mlp.shared_experts.up_proj")

    def wrong(tensors: Tensors) -> None:
        for module in flipped:
            name = f"model.layers.2.{module}.qweight"
            tensors[name] = tensors[name].flip(0)

    awq_gptq.checkpoint(copy, tmp_path / "awq", Kind("awq"), edit=wrong)
    _, report = verified(monkeypatch, capsys, tmp_path / "awq", "--source", source)
    found = {line.partition(".qweight")[0] for line in report["differences"] if ".qweight: " in line}
    assert found == {
        f"model.layers.2.{n}" for n in ("eh_proj", "mlp.experts.3.down_proj", "mlp.shared_experts.up_proj")
    }
    awq_gptq.checkpoint(copy, tmp_path / "without", Kind("awq"), edit=without_the_last)
    _, report = verified(monkeypatch, capsys, tmp_path / "without", "--source", source)
    (line,) = [one for one in report["differences"] if one.startswith("model.layers.2")]
    assert line.startswith("model.layers.2: none of the ")


def without_the_last(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("model.layers.2.")]:
        del tensors[name]
