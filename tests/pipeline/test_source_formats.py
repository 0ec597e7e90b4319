"""Sources that are quantized otherwise than in FP8: MXFP8, MXFP4, NVFP4 and packed integers, as they are published.

Oracles: their numbers from the bits (low_bits.py), the output's by compressed-tensors, transformers' whole models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import pytest
import runs
import tiny
import torch
import yaml
from commands import Command
from low_bits import LAYOUTS, rewrite_as, weights_of
from planned import tiny_model
from runs import change
from source_forms import packed_integers, rewrite, write_plain
from torch import Tensor
from whole_models import finished_weights, run_whole, stored

from quantizers.checkpoint.reader import open_folder, read_config
from quantizers.formats.declared import declared_forms
from quantizers.planning.job import prepare
from quantizers.stitch.audit.checkpoint import verify
from quantizers.system.errors import CheckpointError

CPU = torch.device("cpu")
INT4 = "INT4 of compressed-tensors"
QUICK = ("MXFP8 of MiniMax", "MXFP4 of DeepSeek", INT4)
EXPERTS = {"MXFP8": "MXFP8", "MXFP4": "MXFP4", "NVFP4": "ModelOpt's NVFP4 W4A4", "E8M0 ": "FP8 block 128x128"}
# What no config group of compressed-tensors describes must be converted, and is everywhere here.
CONVERTED = ("NVFP4 of ModelOpt", "NVFP4 of ModelOpt, declared beside")


class Made(runs.Made):
    """A run that brings a source in the layout `name` to 3 bits."""

    @property
    def source(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return finished_weights(self.model) if self.name == INT4 else weights_of(self.model)


def write_source(folder: Path, layout: str, layers: int = 3, **experts: Any) -> Path:
    """The recipe for a model in this layout, some layers of MiniMax-M2's class."""
    plain = write_plain(folder / "plain", "minimax_m2", layers)
    packed_integers(plain, folder / "model") if layout == INT4 else rewrite_as(plain, folder / "model", layout)
    recipe = tiny.write_recipe(folder, words=20, samples=3, rounding="nearest", **experts)
    if layout in CONVERTED:
        change(recipe, lambda body: body.update(attention="bf16"))
    return recipe


def accept(recipe: Path, layout: str = INT4) -> None:
    """Accept a source in this layout, if that has an effect."""
    if layout.startswith(("MXFP8", "E8M0")):
        return
    change(recipe, lambda body: body["source"].update(accept_quantized=True))


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in (*LAYOUTS, INT4)],
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    recipe = write_source(folder, request.param, bits=3)
    accept(recipe, request.param)
    return Made(folder, request.param, runs.report_of(runs.JobFolder(folder)))


def test_the_kl_is_that_of_both_as_others_read_them(made: Made) -> None:
    texts = made.texts()
    source, output = (
        run_whole(families.whole_model(*files), texts) for files in (made.source, finished_weights(made.output))
    )
    parts = [(p[:-1].exp() * (p - q)[:-1]).sum(-1) for p, q in zip(source.logs, output.logs, strict=True)]
    assert made.report["kl"]["mean"] == pytest.approx(float(torch.cat(parts).mean()), abs=1e-6)
    assert made.report["kl"]["mean"] > 1e-3
    assert verify(made.output, open_folder(made.model), CPU).differences == []


def test_attention_keeps_its_bytes_and_its_config_group_says_how(made: Made) -> None:
    """But where it is converted. The names are compressed-tensors'; MXFP8's scales are U8, as servers load them."""
    before, after = stored(made.model)[1], stored(made.output)[1]
    groups = stored(made.output)[0]["quantization_config"]["config_groups"]
    formats = {name: group["format"] for name, group in groups.items() if name.startswith("attention")}
    module = "model.layers.1.self_attn.q_proj"
    if made.name in (*CONVERTED, INT4):
        assert after[f"{module}.weight"].dtype == torch.bfloat16
        assert not formats
        return
    raw = [
        sorted(bytes(t.view(torch.uint8).flatten()) for name, t in tensors.items() if name.startswith(f"{module}."))
        for tensors in (before, after)
    ]
    assert raw[0] == raw[1]
    blocks = "DeepSeek" in made.name or made.name.startswith("E8M0")
    kept = "float-quantized" if blocks else "mxfp4-pack-quantized" if "MXFP4" in made.name else "mxfp8-quantized"
    assert list(formats.values()) == [kept]
    assert after[f"{module}.weight_scale"].dtype == (torch.float8_e8m0fnu if blocks else torch.uint8)


def test_report_and_card_say_what_was_measured_against(made: Made) -> None:
    experts = "INT4 group 32" if made.name == INT4 else EXPERTS[made.name[:5]]
    assert made.report["source"]["experts"] == experts
    line = f"the source's experts are {experts} already: perplexity, KL and all other differences are from these"
    few = not made.name.startswith(("MXFP8", "E8M0"))
    assert any(line in note for note in made.report["notes"]) == few
    assert (line in (made.output / "README.md").read_text()) == few


def test_four_bits_are_quantized_only_where_the_recipe_accepts_it(tmp_path: Path, command: Command) -> None:
    recipe = write_source(tmp_path, INT4, bits=3)
    assert command("run", recipe, "--output", tmp_path / "output") == 2
    (line,) = [line for line in command.err.splitlines() if line.startswith("quantize: ")]
    assert line.endswith("source.accept_quantized: true in the recipe (quantize new --accept-quantized)")
    assert not (tmp_path / "output").exists()
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["weights"]["num_bits"] = 8  # what config.json says is not what counts
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert command("plan", recipe) == 2
    accept(recipe)
    group["weights"]["num_bits"] = 4
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert command("plan", recipe) == 0


def test_a_key_that_accepts_what_needs_no_acceptance_is_refused(tmp_path: Path, command: Command) -> None:
    recipe = write_source(tmp_path, "MXFP8 of MiniMax", layers=1, bits=4)
    accept(recipe)
    assert command("plan", recipe) == 2
    said = "source.accept_quantized: has no effect on experts that are stored as MXFP8; remove the key"
    assert command.err.splitlines()[-1].endswith(said)
    assert command("plan", recipe, "--set", "source.accept_quantized=false") == 0


def test_a_new_recipe_accepts_few_bits_only_where_there_are_some(tmp_path: Path, command: Command) -> None:
    model, file = write_source(tmp_path, INT4).parent / "model", tmp_path / "new.yaml"
    assert command("new", model, file) == 2
    assert command("new", model, file, "--accept-quantized") == 0
    assert yaml.safe_load(file.read_text())["source"]["accept_quantized"] is True
    assert command("new", tmp_path / "plain", tmp_path / "other.yaml", "--accept-quantized") == 2
    assert "shows no weights of 4 bits or fewer, so it has no effect; leave it out" in command.err


def test_a_section_within_text_config_is_the_models_own(tmp_path: Path) -> None:
    """As Kimi-K2.5 has it, and vLLM reads it."""
    section = {"quant_method": "compressed-tensors"}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"quantization_config": section, "x": 1}}))
    assert read_config(tmp_path) == {"text_config": {"x": 1}, "quantization_config": section}


def test_config_json_alone_is_enough_for_a_plan(tmp_path: Path) -> None:
    """What it declares for each module is what the files hold."""
    of_library = [f"{name} of compressed-tensors" for name in ("INT4", "MXFP4", "MXFP8")]
    for layout in (*of_library, "MXFP8 of MiniMax", "MXFP8 of ModelOpt"):
        recipe = write_source(tmp_path / layout, layout, bits=3)
        accept(recipe, layout)
        whole = prepare(str(recipe))
        for shard in (tmp_path / layout / "model").glob("*.safetensors"):
            shard.unlink()
        alone = prepare(str(recipe), offline_facts=True)
        assert alone.source is None
        assert alone.plan.shards() == whole.plan.shards(), layout


def test_modules_that_config_json_excludes_are_planned_as_plain() -> None:
    """By its patterns alone, as transformers reads them; ModelOpt's are refused without the files."""
    config = tiny.config()
    section = config["quantization_config"] | {
        "modules_to_not_convert": [r"model.layers.\d+.self_attn", "gate", "lm_head"]
    }
    plain = tiny_model(quantization_config=section).tensors
    name = "model.layers.1.self_attn.q_proj.weight"
    assert plain[name].dtype == "BF16"
    assert f"{name}_scale_inv" not in plain
    assert plain["model.layers.0.block_sparse_moe.experts.0.w1.weight"].dtype == "F8_E4M3"
    names = "model.layers.1.block_sparse_moe.gate_proj", "model.layers.1.block_sparse_moe.gate", "x.gate"
    declared = declared_forms(config | {"quantization_config": section | {"ignored_layers": [names[1]]}}, "here")
    assert [declared.of(module) is None for module in names] == [False, True, True]
    with pytest.raises(CheckpointError, match=r"modules_to_not_convert: '\*' is no regular expression"):
        tiny_model(quantization_config=section | {"modules_to_not_convert": ["*"]})
    with pytest.raises(CheckpointError, match=r"modules_to_not_convert: is .gate.; a list of names is needed"):
        tiny_model(quantization_config=section | {"modules_to_not_convert": "gate"})
    of_modelopt = {"quant_method": "modelopt", "quant_algo": "MXFP8"}
    tiny_model(quantization_config=of_modelopt | {"ignore": ["lm_head"]})
    with pytest.raises(CheckpointError, match="does not say how each matrix is stored"):
        tiny_model(quantization_config=of_modelopt | {"ignore": ["lm_head", "*self_attn*"]})


def test_a_card_whose_kernels_are_unknown_is_left_out_or_refused(tmp_path: Path, command: Command) -> None:
    """Before anything is computed: nobody asked for it, or the recipe names it."""
    recipe = write_source(tmp_path, "MXFP8 of MiniMax", layers=1, format="nvfp4", activations=4)
    output = tmp_path / "output"
    change(recipe, lambda body: body["verify"].update(as_served=["blackwell"]))
    assert command("run", recipe, "--output", output) == 2
    line = command.err.splitlines()[-1]
    assert line.endswith("verify.as_served: blackwell: MXFP8 is not known for linear layers there; remove this card")
    change(recipe, lambda body: body["verify"].pop("as_served"))
    assert command("run", recipe, "--output", output) == 0
    report = json.loads((output / "report.json").read_text())
    assert "as_served" not in report
    assert "not measured as served on blackwell: MXFP8 is not known for linear layers there" in report["notes"]


def test_a_scale_of_the_matrix_may_have_a_dimension(tmp_path: Path) -> None:
    """As some of ModelOpt's files have it."""
    recipe = write_source(tmp_path, "NVFP4 of ModelOpt", bits=3)
    accept(recipe)
    config, tensors = stored(tmp_path / "model")
    scales = {name: t.view(1) for name, t in tensors.items() if name.endswith(("weight_scale_2", "input_scale"))}
    assert scales
    rewrite(tmp_path / "model", config, tensors | scales)
    plan = prepare(str(recipe)).plan
    assert {action.spec.shape for action in plan.actions if action.source in scales} == {(1,)}


def test_what_cannot_be_kept_is_refused_with_a_remedy(tmp_path: Path) -> None:
    recipe = write_source(tmp_path, "NVFP4 of ModelOpt", bits=3)
    accept(recipe)
    change(recipe, lambda body: body.pop("attention"))
    with pytest.raises(CheckpointError, match=r"q_proj.weight is stored as ModelOpt's NVFP4 W4A4, which no"):
        prepare(str(recipe))


BROKEN = {
    "a scale of NaN": ("MXFP8 of MiniMax", lambda t, m: t[f"{m}.weight_scale_inv"].fill_(255), "holds a NaN"),
    "no scale": ("MXFP4 of compressed-tensors", lambda t, m: t.pop(f"{m}.weight_scale"), "weight_scale"),
    "odd nibbles": (
        "MXFP4 of compressed-tensors",
        lambda t, m: t.update({f"{m}.weight_packed": t[f"{m}.weight_packed"][:, :-1].contiguous()}),
        "MXFP4",
    ),
    "another shape": (
        INT4, lambda t, m: t.update({f"{m}.weight_scale": t[f"{m}.weight_scale"][:-1].contiguous()}), "weight_scale",
    ),
    "zero points": (
        INT4, lambda t, m: t.update({f"{m}.weight_zero_point": torch.zeros(1, dtype=torch.int32)}), "packed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_matrix_is_named_in_a_line(case: str, tmp_path: Path, command: Command) -> None:
    layout, breaking, words = BROKEN[case]
    recipe = write_source(tmp_path, layout, bits=3)
    accept(recipe, layout)
    module = "model.layers.1.block_sparse_moe.experts.3.w2"
    config, tensors = stored(tmp_path / "model")
    breaking(tensors, module)
    rewrite(tmp_path / "model", config, tensors)
    assert command("run", recipe, "--output", tmp_path / "output") == 2
    (line,) = [line for line in command.err.splitlines() if line.startswith("quantize: ")]
    assert module in line
    assert words in line
    assert not (tmp_path / "output" / "config.json").exists()
