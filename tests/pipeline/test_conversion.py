"""Runs that convert: the source's numbers by an independent reader, what does not fit, interruptions, and `verify`.

Sources are read by tests/low_bits.py from the bits, outputs by compressed-tensors.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import exact
import jsonschema
import pytest
import torch
import yaml
import zoo
from commands import Command
from conftest import REPOSITORY
from hub_stand_in import HubStandIn, reached
from low_bits import rewrite_as, weights_of
from runs import assert_same, cut_at
from safetensors.torch import load_file, save_file
from torch import Tensor
from whole_models import finished_weights, source_weights, stored

import quantizers
from quantizers.output import journal
from quantizers.pipeline import conversion
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.estimate import estimate_run
from quantizers.planning.job import prepare
from quantizers.recipe.read import read_recipe
from quantizers.system.errors import InputError, RecipeError

CPU = torch.device("cpu")


def write_recipe(folder: Path, to: str, **more: Any) -> Path:
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"source": {"model": "model"}, "experts": {"convert": to}} | more))
    return recipe


def converted(recipe: Path, output: str = "output") -> dict[str, Any]:
    return run(prepare(str(recipe)), Options(recipe.parent / output, CPU))


def assert_equal_numbers(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor.float(), after[name].float()), name


def experts_of(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if ".experts." in name}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exact.write_exact(tmp_path_factory.mktemp("plain") / "model")


@pytest.mark.parametrize(
    ("layout", "to", "attention"),
    [
        ("MXFP4 of compressed-tensors", "fp8-block", "keep"),
        ("MXFP4 of compressed-tensors", "nvfp4", "bf16"),
        ("MXFP4 of DeepSeek", "fp8-block", "keep"),
        ("MXFP4 of DeepSeek", "nvfp4", "keep"),
        ("MXFP4 of Quark", "bf16", "bf16"),
        ("MXFP8 of MiniMax", "bf16", "keep"),
        ("MXFP8 of MiniMax", "mxfp4", "keep"),
        ("E8M0 blocks", "fp8-block", "keep"),
    ],
)
def test_published_forms_keep_their_numbers(plain: Path, tmp_path: Path, layout: str, to: str, attention: str) -> None:
    """The values are those of MXFP4, which MXFP8 and blocks with other scales hold as well."""
    rewrite_as(plain, tmp_path / "model", layout)
    report = converted(write_recipe(tmp_path, to, attention=attention))
    before, after = weights_of(tmp_path / "model")[1], finished_weights(tmp_path / "output")[1]
    assert_equal_numbers(before, after)
    changed = [tensor for name, tensor in before.items() if ".experts." in name]
    if attention != "keep":
        changed += [tensor for name, tensor in before.items() if "_proj.weight" in name]
    proof = report["conversion"]
    assert (proof["to"], proof["equal"], proof["matrices"]) == (to, True, len(changed))
    assert not [note for note in report["notes"] if "perplexity" in note]
    config = json.loads((tmp_path / "output" / "config.json").read_text())
    card = (tmp_path / "output" / "README.md").read_text()
    assert ("- compressed-tensors\n" in card) == ("quantization_config" in config)
    assert proof["values"] == report["audit"]["values"] == sum(map(torch.numel, changed))
    assert all(gate["passed"] for gate in report["gates"])


@pytest.mark.parametrize(
    ("form", "to"), [("bf16", "fp8-block"), ("bf16", "mxfp4"), ("bf16", "nvfp4"), ("fp8", "bf16"), ("fp8", "nvfp4")]
)
def test_experts_beside_attention_that_keeps_its_bytes(tmp_path: Path, form: str, to: str) -> None:
    """FP8 in blocks with scales that are no powers of two, which attention keeps."""
    converted(exact.write(tmp_path, form, convert=to))
    before, after = (
        read(tmp_path / name)[1] for read, name in ((source_weights, "model"), (finished_weights, "output"))
    )
    assert_equal_numbers(before, after)
    source, output = (stored(tmp_path / name)[1] for name in ("model", "output"))
    kept = [name for name in source if ".experts." not in name and not name.endswith("_scale_inv")]
    assert kept
    for name in kept:
        assert torch.equal(source[name].view(torch.uint8), output[name].view(torch.uint8)), name


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    converted(exact.write(folder, layers=3, convert="nvfp4"), "whole")
    return folder


def test_a_conversion_says_so_everywhere(finished: Path, command: Command) -> None:
    whole = finished / "whole"
    report = json.loads((whole / "report.json").read_text())
    assert not {"calibration", "coverage", "kl"} & report.keys()
    schema = json.loads((REPOSITORY / "docs/reference/schemas/report.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(report)
    assert yaml.safe_load((whole / "recipe.yaml").read_text())["experts"] == {"convert": "nvfp4"}
    assert read_recipe(str(whole / "recipe.yaml"))[0].calibration is None
    proven = "36 matrices in BF16 were converted to NVFP4: all 589,824 values are equal to the source"
    for page in ("README.md", "report.html"):
        text = (whole / page).read_text().replace("&#39;", "'")
        assert proven in text
        assert "alibration" not in text.partition("<style>")[0] + text.partition("</style>")[2]
    assert command("report", whole) == 0
    assert command("run", finished / "recipe.yaml", "--output", whole) == 0
    assert "was finished before" in command.out
    assert proven in command.out
    assert command("plan", finished / "recipe.yaml") == 0
    assert "36 expert matrices converted to nvfp4" in command.out
    assert command("plan", finished / "recipe.yaml", "--vram", "1x24GiB", "--json") == 0
    assert command("doctor", finished / "recipe.yaml", "--output", finished / "new") == 0, command.out


def test_verify_repeats_the_proof_and_names_the_first_value_that_differs(finished: Path, tmp_path: Path) -> None:
    output = shutil.copytree(finished / "whole", tmp_path / "output")
    checked = quantizers.verify(output, source=finished / "model")
    assert (checked.passed, checked.audit.values, checked.audit.differences) == (True, 589_824, [])
    shard = output / "model-00002-of-00004.safetensors"
    tensors = load_file(shard)
    name = "model.layers.1.block_sparse_moe.experts.2.w3"
    tensors[f"{name}.weight_packed"][17, 5] ^= 0x70  # of the odd column
    save_file(tensors, shard, metadata={"format": "pt"})
    lines = quantizers.verify(output, source=finished / "model").differences
    assert any(line.startswith(f"{name}.weight: row 17, column 11 is ") for line in lines), lines
    assert any(line.startswith(f"{name}.weight_packed: changed since the run wrote it") for line in lines)


def test_a_run_that_is_cut_off_resumes_to_the_same_bytes(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "model", tmp_path / "model")
    recipe = shutil.copy(finished / "recipe.yaml", tmp_path)
    job, options = prepare(str(recipe)), Options(tmp_path / "output", CPU)
    for calls in (0, 2):
        cut_at(conversion, "write_shard", job, options, calls)
    work = tmp_path / "output" / ".quantize"
    assert len(list((work / "layers").iterdir())) == 1
    damaged = work / "output" / "model-00001-of-00004.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0")
    run(job, options)
    assert_same(tmp_path / "output", finished / "whole")


def test_tables_are_copied_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In shards of their own, which no memory holds, and which a run that is resumed checks like those of layers."""
    monkeypatch.setitem(zoo.TYPES, "qwen4_exp", zoo.TYPES["qwen4_exp"] | {"ngram_vocab_size_base": 20_000})
    zoo.save("qwen4_exp", tmp_path / "model")
    generator = torch.Generator().manual_seed(3)
    for shard in (tmp_path / "model").glob("*.safetensors"):
        tensors = load_file(shard)
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name] = exact.matrix(*tensors[name].shape, generator).bfloat16()
        save_file(tensors, shard, metadata={"format": "pt"})
    job, options = prepare(str(write_recipe(tmp_path, "mxfp4"))), Options(tmp_path / "output", CPU)
    (part,) = job.plan.tables
    table = sum(action.spec.bytes for action in job.plan.of_layer(part))
    cut_at(conversion, "write_shard", job, options, 2)  # after what is outside the layers, and the first of these
    work = tmp_path / "output" / ".quantize"
    assert journal.passthrough_file(work, part).exists()
    assert [file.stem for file in (work / "layers").iterdir()] == ["00000"]
    damaged = work / "output" / job.plan.shard_file(part)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0")
    run(job, options)
    converted(tmp_path / "recipe.yaml", "whole")
    assert_same(tmp_path / "output", tmp_path / "whole")
    before, after = (stored(tmp_path / name)[1] for name in ("model", "output"))
    for name in (action.source for action in job.plan.of_layer(part)):
        assert torch.equal(before[name], after[name]), name
    without = replace(job.plan, actions=tuple(action for action in job.plan.actions if action.layer != part))
    assert table > max(sum(action.spec.bytes for action in job.plan.of_layer(layer)) for layer in range(4))
    assert estimate_run(job, 0).host == estimate_run(replace(job, plan=without), 0).host


def test_a_source_on_the_hub_is_streamed(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {path.name: path.read_bytes() for path in (finished / "model").iterdir()}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("source: {model: org/tiny}\nexperts: {convert: nvfp4}\n")
    with HubStandIn(repositories={"org/tiny": {"main": files}}) as hub:
        reached(hub, tmp_path / "home", monkeypatch)
        made = quantizers.run(recipe, tmp_path / "output", stream=True)
    assert made.report["source"]["model"] == "org/tiny"
    for shard in (finished / "whole").glob("*.safetensors"):
        assert (tmp_path / "output" / shard.name).read_bytes() == shard.read_bytes()


# What is refused ------------------------------------------------------------------------------------------------------


def test_a_value_that_does_not_fit_names_the_first_tensor(tmp_path: Path, command: Command) -> None:
    recipe = exact.write(tmp_path, convert="mxfp4")
    spoilt = "model.layers.1.block_sparse_moe.experts.1.w2.weight"
    shard = next(file for file in (tmp_path / "model").glob("*.safetensors") if spoilt in load_file(file))
    tensors = load_file(shard)
    tensors[spoilt][3, 77] = 448 * 2.0**-12  # 7, which E2M1 has not
    save_file(tensors, shard, metadata={"format": "pt"})
    assert command("run", recipe, "--output", tmp_path / "output") == 2
    line = command.err.splitlines()[-1]
    assert f"recipe.yaml: experts.convert: mxfp4: {spoilt} does not fit: row 3, column 77 is 0.109375" in line
    assert line.endswith("give fp8-block, which holds it, or quantize instead")
    assert not (tmp_path / "output" / "config.json").exists()
    assert not (tmp_path / "output" / "report.json").exists()
    assert command("run", recipe, "--output", tmp_path / "other", "--set", "experts.convert=fp8-block") == 0


def test_attention_must_keep_its_values_too(tmp_path: Path) -> None:
    recipe = exact.write(tmp_path, convert="nvfp4")  # whose attention is FP8 with scales that bfloat16 does not hold
    recipe.write_text(recipe.read_text() + "attention: bf16\n")
    with pytest.raises(RecipeError, match=r"attention: bf16: model\.layers\.0\.self_attn\.q_proj\.weight does not fit"):
        converted(recipe)


@pytest.mark.parametrize(
    ("form", "to", "line"),
    [
        ("bf16", "bf16", "these experts are BF16 already"),
        ("fp8", "fp8-block", "these experts are FP8 block 128x128 already"),
    ],
)
def test_what_is_so_already_is_not_converted(tmp_path: Path, form: str, to: str, line: str) -> None:
    recipe = exact.write(tmp_path, form, convert=to)
    with pytest.raises(RecipeError, match=line):
        prepare(str(recipe))


def test_blocks_that_servers_do_not_take(tmp_path: Path) -> None:
    recipe = exact.write(tmp_path, hidden=192, convert="fp8-block")
    with pytest.raises(RecipeError, match=r"hidden_size 192 is not a multiple of 128.* give experts\.convert: bf16 or"):
        prepare(str(recipe))


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"calibration": "embedded"}, "calibration: has no effect beside experts.convert"),
        ({"kv_cache": "fp8"}, "kv_cache: has no effect beside experts.convert"),
        ({"verify": {"coverage": {}}}, "verify: has no effect beside experts.convert: all values are equal"),
        ({"experts": {"convert": "bf16", "bits": 4}}, "experts.bits: has no effect beside experts.convert"),
        ({"experts": {"awq": False, "convert": "bf16"}}, "experts.awq: has no effect beside experts.convert"),
        ({"experts": {"convert": "fp8"}}, "experts.convert: should be 'bf16', 'fp8-block', 'mxfp4' or 'nvfp4'"),
        ({"source": {"model": "model", "accept_quantized": True}}, "source.accept_quantized has no effect"),
        ({"experts": {"bits": 4}}, "calibration: missing; add it"),
    ],
)
def test_keys_without_effect_are_refused(tmp_path: Path, more: dict[str, Any], line: str) -> None:
    with pytest.raises(RecipeError, match=line):
        read_recipe(str(write_recipe(tmp_path, "bf16", **more)))


def test_options_and_commands_that_need_texts_are_refused(finished: Path, command: Command) -> None:
    recipe = finished / "recipe.yaml"
    for option in (["--states", "memory"], ["--ignore-stop"], ["--ignore-source-check"], ["--device-memory", "1GB"]):
        assert command("run", recipe, "--output", finished / "none", *option) == 2
        assert f"{option[0]}: has no effect on a conversion" in command.err
    for words in (["coverage"], ["imatrix"]):
        assert command(*words, recipe) == 2
        assert "this recipe converts, and names no calibration set" in command.err
    with pytest.raises(InputError, match="converts, so that no set decides anything"):
        quantizers.compare(recipe, ["embedded", "software-engineer"], data="held-out")
