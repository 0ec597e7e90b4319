"""Sources as people have them: saved by other tools, with more folders or fewer keys than the published ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from edited import edit
from runs import JobFolder, hashes
from safetensors.torch import load_file, save_file

from quantizers.eval.report.schema import checked
from quantizers.formats.fp8 import dequantize_fp8
from quantizers.hub.publish import local_files
from quantizers.output.journal import discard

pytestmark = pytest.mark.slow
Quantize = Callable[..., tuple[int, str, str]]
ATTENTION = "model.layers.0.self_attn."
TEMPLATE = "additional_chat_templates/tool_use.jinja"


def run(case: JobFolder, quantize: Quantize) -> Path:
    """The output of a run that passes; its weights are random."""
    output = case.folder / "output"
    code, _, err = quantize("run", case.recipe, "-o", output, "--ignore-source-check")
    assert code == 0, err
    return output


def shards(output: Path) -> dict[str, str]:
    return {name: digest for name, digest in hashes(output).items() if name.endswith(".safetensors")}


def configure(folder: Path, **changes: Any) -> None:
    """Change config.json; None removes a key."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: value for k, value in config.items() if value is not None}))


def in_bfloat16(model: Path, name: str) -> None:
    """Dequantize one matrix of a source in FP8."""

    def plain(tensors: dict[str, Any]) -> None:
        scale = next(load_file(file) for file in model.glob("*.safetensors") if f"{name}_scale_inv" in load_file(file))
        tensors[name] = dequantize_fp8(tensors[name], scale[f"{name}_scale_inv"], (128, 128)).bfloat16()

    edit(model, name, plain)
    edit(model, f"{name}_scale_inv", lambda tensors: tensors.pop(f"{name}_scale_inv"))


def test_blocks_as_compressed_tensors_writes_them_give_the_same_output(case: JobFolder, quantize: Quantize) -> None:
    before = shards(run(case, quantize))
    shutil.rmtree(case.folder / "output")
    for file in case.model.glob("*.safetensors"):
        named = {name.replace("weight_scale_inv", "weight_scale"): tensor for name, tensor in load_file(file).items()}
        save_file(named, file, metadata={"format": "pt"})
    index = case.model / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("weight_scale_inv", "weight_scale"))
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128], "symmetric": True}
    section = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    configure(case.model, quantization_config=section)
    assert shards(run(case, quantize)) == before
    weights["strategy"] = "tensor"
    configure(case.model, quantization_config=section)
    code, _, err = quantize("plan", case.recipe)
    assert code == 2
    assert "quantization_config.config_groups: group_0: weights are float8 tensor, symmetric: true; no source in" in err


def test_a_matrix_in_bfloat16_among_fp8_is_named_to_servers(case: JobFolder, quantize: Quantize) -> None:
    """transformers finds it again; where servers fuse it with others in FP8, there is no output that they can read."""
    from transformers import AutoModelForCausalLM

    in_bfloat16(case.model, f"{ATTENTION}o_proj.weight")
    output = run(case, quantize)
    section = json.loads((output / "config.json").read_text())["quantization_config"]
    assert r"re:.*\.layers\.(0)\.self_attn\.o_proj$" in section["ignore"]
    (source,) = [t for t in map(load_file, case.model.glob("*.safetensors")) if f"{ATTENTION}o_proj.weight" in t]
    loaded = AutoModelForCausalLM.from_pretrained(output, dtype="bfloat16").model.layers[0].self_attn.o_proj.weight
    assert loaded.equal(source[f"{ATTENTION}o_proj.weight"])
    shutil.rmtree(output)
    in_bfloat16(case.model, f"{ATTENTION}q_proj.weight")
    for words in (["plan", case.recipe], ["run", case.recipe, "-o", output]):
        code, _, err = quantize(*words)
        assert code == 2
        assert f"{ATTENTION}qkv_proj: attention q,k,v: `ignore` covers only some of q_proj, k_proj, v_proj" in err
    assert not output.exists()
    for name in ("k_proj", "v_proj"):  # fused with nothing in FP8 any more
        in_bfloat16(case.model, f"{ATTENTION}{name}.weight")
    run(case, quantize)


def test_every_folder_of_the_source_goes_along(case: JobFolder, quantize: Quantize) -> None:
    """transformers renders with tools as from the source; a lost or changed file is a difference."""
    from transformers import AutoTokenizer

    for name, text in {TEMPLATE: "TOOLS {{ messages[0].content }}", "parsers/tools.py": "x = 1\n"}.items():
        (case.model / name).parent.mkdir()
        (case.model / name).write_text(text)
    (case.model / "onnx").mkdir()
    output = run(case, quantize)
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
    said = [
        AutoTokenizer.from_pretrained(folder).apply_chat_template(
            [{"role": "user", "content": "hello"}], tools=tools, tokenize=False
        )
        for folder in (case.model, output)
    ]
    assert said == ["TOOLS hello"] * 2
    report = json.loads((output / "report.json").read_text())
    assert {TEMPLATE, "parsers/tools.py"} <= set(report["files"])
    assert "left behind in the source: onnx/ (weights that are not read)" in report["notes"]
    assert {TEMPLATE, "parsers/tools.py"} <= {file.name for file in local_files(output, checked(report))}
    assert quantize("verify", output, "--source", case.model)[0] == 0
    (output / "parsers" / "tools.py").write_text("x = 2\n")
    (output / "parsers" / "more.py").touch()
    shutil.rmtree(output / "additional_chat_templates")
    code, out, _ = quantize("verify", output, "--source", case.model)
    assert code == 3
    for line in (
        f"{TEMPLATE}: missing; the source has it",
        "parsers/tools.py: differs from the source's",
        "parsers/tools.py: changed since the run wrote it",
        "parsers/more.py: not in the source, but loaders read it; remove it",
    ):
        assert line in out
    (output / "parsers" / "more.py").unlink()
    discard(output)
    assert list(output.iterdir()) == []


def test_a_source_that_does_not_name_its_class_gets_it_named(case: JobFolder, quantize: Quantize) -> None:
    configure(case.model, architectures=None)
    output = run(case, quantize)
    assert json.loads((output / "config.json").read_text())["architectures"] == ["MiniMaxM2ForCausalLM"]
    assert quantize("verify", output, "--source", case.model)[0] == 0
    configure(output, architectures=None)
    code, out, _ = quantize("verify", output, "--source", case.model)
    assert code == 3
    assert "config.json: architectures: missing; servers look the model's class up by it" in out
