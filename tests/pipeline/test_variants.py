"""Attention, shared experts and dense layers that are converted: `attention: bf16 | fp8 | fp8-block`.

The oracles are compressed-tensors' dequantization and quantization, and formulas that go over rows and blocks one by
one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import families
import pytest
import runs
import tiny
import torch
import zoo
from commands import Command
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.utils.match import match_name
from edited import edit
from runs import change
from source_forms import write_variant
from torch import Tensor
from whole_models import finished_weights, run_whole, source_weights, stored

from quantizers.architectures.fused import fits_fp8
from quantizers.checkpoint.reader import open_folder
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.job import prepare
from quantizers.stitch.audit.checkpoint import verify
from quantizers.stitch.write.config_files import output_config

CPU = torch.device("cpu")
ATTENTION = "model.layers.1.self_attn.o_proj.weight"
SERVED = {"bf16": "plain", "fp8": "FP8 per channel", "fp8-block": "FP8 block 128x128"}
# Sources in FP8 become BF16, those in BF16 become FP8.
VARIANTS = [
    ("deepseek_v3", "bf16"),
    ("mixtral", "fp8"),
    pytest.param(("minimax_m2", "bf16"), marks=pytest.mark.every),
    pytest.param(("glm4_moe", "bf16"), marks=pytest.mark.slow),
    pytest.param(("glm4_moe_lite", "fp8"), marks=pytest.mark.slow),
    pytest.param(("qwen3_moe", "fp8-block"), marks=pytest.mark.slow),
]


class Made(runs.Made):
    """A run whose recipe says `attention`."""

    @property
    def attention(self) -> str:
        return str(self.report["settings"]["recipe"]["attention"])


@pytest.fixture(scope="module", params=VARIANTS, ids=" ".join)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    family, attention = request.param
    write_variant(folder, family, attention)
    return Made(folder, family, runs.report_of(runs.JobFolder(folder)))


def is_converted(name: str, tensor: Tensor) -> bool:
    """Whether a tensor of a source is a weight of attention, a shared expert or a dense layer, by its name alone."""
    kept = (".experts.", "norm", "gate.weight", "eh_proj", "embed_tokens", "head")
    return name.startswith("model.layers.") and tensor.dim() == 2 and not any(part in name for part in kept)


def slow_error(weight: Tensor, scale: Tensor) -> Tensor:
    """The squared error of each row (R,) float64, with a scale (R, 1)."""
    return ((weight / scale).to(torch.float8_e4m3fn).double() * scale.double() - weight.double()).square().sum(1)


def check_rows(weight: Tensor, scale: Tensor) -> None:
    """Nothing is clipped, and none of sixteen scales up to twice the least would lose less."""
    least = weight.abs().amax(1, keepdim=True) / 448
    assert bool((scale >= least).all())
    assert bool((scale < 2 * least).all())
    lost = slow_error(weight, scale)
    for step in range(16):
        assert bool((lost <= slow_error(weight, least * 2 ** (step / 16)) * (1 + 1e-12)).all())
    assert float(lost.sum()) < 0.98 * float(slow_error(weight, least).sum())


def check_blocks(weight: Tensor, scale: Tensor) -> None:
    """Each scale is the least power of two that clips nothing."""
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            block = weight[128 * row : 128 * row + 128, 128 * column : 128 * column + 128]
            assert float(scale[row, column]) in {2.0**n for n in range(-40, 0)}
            assert 224 < float(block.abs().max() / scale[row, column]) <= 448


@pytest.mark.slow
def test_every_converted_tensor_is_what_the_library_makes_of_the_source(made: Made) -> None:
    config, source = source_weights(made.model)
    output, raw = stored(made.output)[1], stored(made.model)[1]
    for name, weight in source.items():
        module = name.removesuffix(".weight")
        if is_converted(name, weight):
            found, scale = output[name], output.get(f"{module}.weight_scale")
            if made.attention == "bf16":
                assert scale is None
                assert torch.equal(found, weight.bfloat16()), name
                continue
            assert scale is not None
            block = {"strategy": "block", "block_structure": [128, 128]}
            how = {"strategy": "channel"} if made.attention == "fp8" else block
            scheme = QuantizationArgs(num_bits=8, type="float", symmetric=True, **how)
            codes = quantize(weight.float(), scale, None, scheme, torch.float8_e4m3fn)
            assert torch.equal(found.view(torch.uint8), codes.view(torch.uint8)), name
            (check_rows if made.attention == "fp8" else check_blocks)(weight.float(), scale)
        elif ".experts." not in name or families.is_mtp(config, name):
            changed = name.endswith(("post_attention_layernorm.weight", "gate.weight")) and made.job.plan.folds
            assert changed or torch.equal(output[name].view(torch.uint8), raw[name].view(torch.uint8)), name
    assert made.report["audit"]["differences"] == []
    assert made.report["audit"]["converted_matrices"] == sum(map(is_converted, source, source.values()))


def test_the_kl_is_that_of_the_output_as_the_library_reads_it(made: Made) -> None:
    """So the experts were solved, and the texts measured, behind the converted attention."""
    texts, whole = made.texts("held-out"), families.whole_model
    source, candidate = (
        run_whole(whole(*f), texts) for f in (source_weights(made.model), finished_weights(made.output))
    )
    parts = [(p[:-1].exp() * (p - q)[:-1]).sum(-1) for p, q in zip(source.logs, candidate.logs, strict=True)]
    assert made.report["kl"]["mean"] == pytest.approx(float(torch.cat(parts).mean()), abs=1e-5)


def test_servers_and_transformers_read_it(made: Made, command: Command) -> None:
    assert command("verify", made.output, "--source", made.model, "--json") == 0
    consumers = json.loads(command.out)["consumers"]
    assert consumers["findings"] == []
    for engine, row in consumers["schemes"].items():
        if engine != "stored as":
            assert row["attention q,k,v"] == SERVED[made.attention]
    refused = "refused" in consumers["kernels"].get("SGLang on ampere", {}).get("attention q,k,v", "")
    assert refused == (made.attention == "fp8-block")
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(made.output, output_loading_info=True)
    beyond = {name for name in info["unexpected_keys"] if not families.is_mtp(stored(made.output)[0], name)}
    assert not info["missing_keys"] | beyond
    projection = model.model.layers[1].self_attn.o_proj
    assert hasattr(projection, "quantization_scheme") == (made.attention != "bf16")


def test_a_converted_weight_that_changed_is_named(made: Made, tmp_path: Path) -> None:
    copy = shutil.copytree(made.output, tmp_path / "copy")
    edit(copy, ATTENTION, lambda t: t[ATTENTION].view(torch.uint8)[3, :1].bitwise_xor_(1))
    (copy / "report.json").unlink()  # so that it is the formula which tells
    found = verify(copy, open_folder(made.model), CPU).differences
    assert f"{ATTENTION}: is not what `attention: {made.attention}` makes of the source's" in found


def test_the_card_says_what_was_converted(made: Made) -> None:
    card = (made.output / "README.md").read_text()
    said = {"bf16": "rounded once to bfloat16", "fp8": "a scale per row", "fp8-block": "in blocks of 128 x 128"}
    assert said[made.attention] in card
    in_fp8 = made.attention != "bf16" or "mtp" in made.report["plan"]  # a layer whose experts are FP8 still
    assert ("fp8" in card.partition("---\n")[2].partition("---")[0]) == in_fp8


@pytest.mark.slow
def test_a_run_that_was_cut_off_gives_the_same_bytes(tmp_path: Path) -> None:
    recipe = write_variant(tmp_path, "mixtral", "fp8")
    whole = run(prepare(str(recipe)), Options(tmp_path / "whole", CPU))
    again = Options(tmp_path / "output", CPU)
    runs.cut_in_layer(1, prepare(str(recipe)), again)
    report = run(prepare(str(recipe)), again)
    assert runs.timeless(report) == runs.timeless(whole)
    assert runs.hashes(tmp_path / "output") == runs.hashes(tmp_path / "whole")


REFUSALS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "FP8 to FP8": ("minimax_m2", {}, "fp8", "is FP8 already; remove the key, or give bf16"),
    "16 bits to BF16": ("mixtral", {}, "bf16", "shared experts or dense layers is quantized; remove"),
    "rows that do not divide": (
        "mixtral", {"num_attention_heads": 8, "num_key_value_heads": 2}, "fp8-block",
        "k_proj.weight has 64 rows, not a multiple of 128, and servers take no such blocks; give fp8",
    ),
    "no such variant": ("mixtral", {}, "int8", "attention"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_converted_is_refused_in_a_line(case: str, tmp_path: Path, command: Command) -> None:
    family, changes, attention, said = REFUSALS[case]
    families.write(tmp_path / "model", family, **changes)
    recipe = tiny.write_recipe(tmp_path)
    change(recipe, lambda body: body.update(attention=attention))
    assert command("run", recipe, "--output", tmp_path / "output") == 2
    (line,) = [line for line in command.err.splitlines() if line.startswith("quantize: ")]
    assert said in line
    assert not (tmp_path / "output").exists()


def test_only_matrices_that_servers_take_in_fp8_fit() -> None:
    """Gates that make a number for each head or token, routers and indexers stay as they are."""
    fit = ("self_attn.q_proj", "linear_attn.in_proj_qkvz", "mlp.shared_expert.down_proj", "feed_forward.w1")
    stay = (
        "mlp.shared_expert_gate", "linear_attn.in_proj_ba", "self_attn.indexer.wk", "self_attn.indexer.q_proj",
        "mlp.gate", "mlp.gate.down_proj", "self_attn.compressor.kv_proj", "eh_proj",
    )  # fmt: skip
    assert all(fits_fp8(f"model.layers.0.{name}") for name in fit)
    assert not any(fits_fp8(f"model.layers.0.{name}") for name in stay)


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("qwen3_5_moe as published", "bf16"),  # layers that predict further tokens stay FP8, under another name
        pytest.param("qwen3_next", "fp8", marks=pytest.mark.slow),
        pytest.param("minimax", "fp8", marks=pytest.mark.slow),
    ],
)
def test_a_derived_types_config_has_what_is_fp8_in_its_fp8_group_and_nothing_else(
    name: str, attention: str, tmp_path: Path
) -> None:
    """By compressed-tensors' own matching of names, in the order of the groups."""
    zoo.save(name, tmp_path / "model")
    recipe = tiny.write_recipe(tmp_path)
    change(recipe, lambda body: body.update(attention=attention))
    job = prepare(str(recipe))
    section = output_config(job.config, job.facts, job.plan)["quantization_config"]
    groups = section["config_groups"]
    found: dict[str, set[str]] = {"fp8": set(), "plain": set()}
    for file in job.plan.shards().values():
        for tensor, spec in file.items():
            module = tensor.removesuffix(".weight")
            if module == tensor or len(spec.shape) != 2:
                continue
            matched = [g for g, one in groups.items() if any(match_name(module, target) for target in one["targets"])]
            ignored = any(match_name(module, target) for target in section["ignore"])
            kind = "fp8" if spec.dtype == "F8_E4M3" else "plain"
            found[kind].add(module)
            assert matched == ([g for g in groups if "fp8" in g] if kind == "fp8" else []), module
            assert not (ignored and kind == "fp8"), module
    assert all(found.values())
