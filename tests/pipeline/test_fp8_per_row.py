"""FP8 with a scale per row, as GLM is published: from a tiny Qwen3-MoE in that form to a proven output.

The oracle is compressed-tensors' own unpacking of source and output, in transformers' whole model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from edited import edit
from source_forms import per_row, write_plain
from whole_models import finished_weights, run_whole, stored

from eval.report.model_card import has_fp8_attention
from eval.serving.check import STORED, check_folder
from eval.serving.engines import ATTENTION, OUTPUT
from quantizers.calibration.load_set import load_set
from quantizers.checkpoint.reader import open_folder
from quantizers.formats.dequantization import read_weight
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.job import prepare
from stitch.audit.checkpoint import verify

CPU = torch.device("cpu")
Q_SCALE = "model.layers.1.self_attn.q_proj.weight_scale"


@dataclass(frozen=True)
class Made:
    """A run: its folder, and what it reported."""

    folder: Path
    report: dict[str, Any]

    @property
    def source(self) -> Path:
        return self.folder / "model"

    @property
    def output(self) -> Path:
        return self.folder / "output"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("per-row")
    per_row(write_plain(folder / "plain", "qwen3_moe"), folder / "model", torch.bfloat16)
    recipe = tiny.write_recipe(folder, words=20, samples=3)
    return Made(folder, run(prepare(str(recipe)), Options(folder / "output", CPU)))


def test_kept_scales_keep_name_and_bytes_and_those_of_experts_are_dropped(made: Made) -> None:
    (_, source), (_, output) = stored(made.source), stored(made.output)
    kept = {name for name in source if ".self_attn." in name}
    assert len(kept) == 2 * (4 + 4 + 2)
    for name in kept:
        assert output[name].dtype == source[name].dtype
        assert torch.equal(output[name].view(torch.uint8), source[name].view(torch.uint8)), name
    assert source[Q_SCALE].shape == (4 * 128, 1)
    assert not [name for name in output if name.endswith("weight_scale_inv")]
    experts = {name.rpartition(".")[2] for name in output if ".experts." in name}
    assert experts == {"weight_packed", "weight_scale", "weight_shape"}


def test_the_config_says_a_scale_per_row_and_dynamic_activations(made: Made) -> None:
    section = json.loads((made.output / "config.json").read_text())["quantization_config"]
    assert section["config_groups"]["attention_fp8_channel"] == {
        "targets": [r"re:.*self_attn\.(q|k|v|o|qkv)_proj$", r"re:.*\.mlp\.(gate|up|down|gate_up)_proj$"],
        "format": "float-quantized",
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
        "input_activations": families.PER_ROW["config_groups"]["group_0"]["input_activations"],
    }
    assert sorted(section["config_groups"]) == ["attention_fp8_channel", "routed_experts"]
    assert "re:.*self_attn.*" not in section["ignore"]
    assert has_fp8_attention(made.report)
    assert "FP8 attention" in (made.output / "README.md").read_text()


def test_every_engine_reads_it_as_it_is_stored(made: Made) -> None:
    found = check_folder(made.output)
    assert found is not None
    assert found.findings == []
    assert {rows[ATTENTION] for rows in found.schemes.values()} == {"FP8 per channel"}
    assert found.schemes[STORED][OUTPUT] == "FP8 per channel"


def test_verify_compares_the_scales(made: Made, tmp_path: Path) -> None:
    source = open_folder(made.source)
    assert verify(made.output, source, CPU).differences == []
    edit(made.output, Q_SCALE, lambda t: t[Q_SCALE][3].mul_(2))
    found = verify(made.output, source, CPU).differences
    edit(made.output, Q_SCALE, lambda t: t[Q_SCALE][3].div_(2))
    assert f"{Q_SCALE}: bytes differ from the source's {Q_SCALE}" in found


def test_the_kl_is_that_of_source_and_output_as_the_library_unpacks_them(made: Made) -> None:
    data = load_set(made.folder / "held-out.yaml", str(made.source))
    texts = [torch.from_numpy(sample.tokens).long() for sample in data.samples]
    source, output = (
        run_whole(families.whole_model(*finished_weights(folder)), texts) for folder in (made.source, made.output)
    )
    parts = [(p[:-1].exp() * (p - q)[:-1]).sum(-1) for p, q in zip(source.logs, output.logs, strict=True)]
    kl = float(torch.cat(parts).mean())
    assert kl > 1e-3, "a comparison of two equal models would prove nothing"
    assert made.report["kl"]["mean"] == pytest.approx(kl, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_each_code_times_its_rows_scale(dtype: torch.dtype, tmp_path: Path) -> None:
    codes = torch.randn(96, 160, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scale = torch.rand(96, 1, generator=torch.Generator().manual_seed(1)).to(dtype)
    tiny.write(tmp_path / "m", tiny.config(), {"m.weight": codes, "m.weight_scale": scale}, shards=1)
    weight = read_weight(open_folder(tmp_path / "m"), "m", CPU)
    assert torch.equal(weight, torch.stack([row.float() * s.float() for row, s in zip(codes, scale, strict=True)]))
