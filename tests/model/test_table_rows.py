"""Tables of n-grams: their rows are looked up in the files, and neither device nor host ever holds one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
import zoo
from live_bytes import Alive
from runs import JobFolder, report_of
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import FP8Embedding

from quantizers.checkpoint import reader
from quantizers.checkpoint.loaded_tensors import layer_names
from quantizers.checkpoint.reader import Checkpoint, open_folder
from quantizers.commands.verify import verify_folder
from quantizers.model.table_rows import TableRows
from quantizers.planning.device_memory import device_memory
from quantizers.planning.job import parts_of_run, prepare
from quantizers.stitch.write.config_files import output_config
from quantizers.stitch.write.shard import copy_shard
from quantizers.system.errors import ArchitectureError, CheckpointError

CPU = torch.device("cpu")
ROWS, WIDTH = (300, 1, 200_000), 64  # of the tensors of a table
NAMES = [f"table.shard_{n}.weight" for n in range(len(ROWS))]
PATH = "ple.ple_embedding.ngram_embedding"


def in_fp8(tensors: dict[str, torch.Tensor], names: list[str], scale: str) -> None:
    """Make a table FP8 with one scale."""
    number = (max(tensors[name].float().abs().max() for name in names) / 448).bfloat16()
    tensors |= {name: (tensors[name].float() / number.float()).to(torch.float8_e4m3fn) for name in names}
    tensors[scale] = number.reshape(1)


def table(folder: Path, *, fp8: bool) -> tuple[Checkpoint, torch.Tensor, torch.Tensor | None]:
    """A table in three tensors of one file; its rows as they are stored, and its scale."""
    generator = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(r, WIDTH, generator=generator).bfloat16() for n, r in zip(NAMES, ROWS, strict=True)}
    if fp8:
        in_fp8(tensors, NAMES, "scale")
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return open_folder(folder), torch.cat([tensors[name] for name in NAMES]), tensors.get("scale")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fp8", [False, True])
def test_rows_are_those_of_transformers_embedding_bit_by_bit(tmp_path: Path, dtype: torch.dtype, *, fp8: bool) -> None:
    """At the edges of tensors, alone and beside each other, several times; FP8 as transformers multiplies it."""
    checkpoint, rows, scale = table(tmp_path, fp8=fp8)
    ids = torch.tensor([[300, 0, 299, 301, 300], [200_300, 200_299, 5, 7, 6]])
    if scale is None:
        own = torch.nn.Embedding(*rows.shape, _weight=rows.to(dtype))
    else:
        with torch.device("meta"):
            own = FP8Embedding(*rows.shape)
        own.load_state_dict({"weight": rows, "weight_scale": scale.to(dtype)}, assign=True)
    looked_up = TableRows(checkpoint, NAMES, "scale" if fp8 else None, CPU, dtype)
    with torch.no_grad():
        assert torch.equal(looked_up(ids), own(ids))
    assert looked_up(ids[:, :0]).shape == (2, 0, WIDTH)
    assert looked_up.weight.dtype == dtype


def test_a_lookup_holds_no_more_than_a_few_rows(tmp_path: Path) -> None:
    checkpoint, rows, _ = table(tmp_path, fp8=False)
    ids = torch.randint(len(rows), (500,), generator=torch.Generator().manual_seed(1))
    with Alive() as alive:
        made = TableRows(checkpoint, NAMES, None, CPU, torch.float32)(ids)
    assert made.shape == (500, WIDTH)
    assert alive.most < rows.nbytes / 20


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"dtype": "F8_E4M3", "shape": (1, 128)},
            r"is F8_E4M3 \[1, 128\]; a table is read in 16 or 32 bits, or in FP8 with one scale",
        ),
        ({"dtype": "I16"}, r"is I16 \[1, 64\]; a table is read in 16 or 32 bits"),
        (
            {"shape": (2, 32)},
            r"is BF16 \[2, 32\], and table.shard_0.weight BF16 \[300, 64\]: these are no parts of one",
        ),
    ],
)
def test_a_table_that_cannot_be_read_is_named(tmp_path: Path, change: dict[str, object], problem: str) -> None:
    checkpoint, _, _ = table(tmp_path, fp8=False)
    checkpoint.tensors[NAMES[1]] = replace(checkpoint.tensors[NAMES[1]], **change)
    with pytest.raises(CheckpointError, match=f"^{tmp_path}/model.safetensors: {NAMES[1]} {problem}"):
        TableRows(checkpoint, NAMES, None, CPU, torch.float32)


def test_a_scale_of_rows_that_are_not_fp8_is_named(tmp_path: Path) -> None:
    checkpoint, _, _ = table(tmp_path, fp8=False)
    with pytest.raises(CheckpointError, match=rf"{NAMES[0]} is BF16 \[300, 64\], but table.weight_scale is a scale"):
        TableRows(checkpoint, NAMES, "table.weight_scale", CPU, torch.float32)


def test_a_scale_that_is_nan_is_named(tmp_path: Path) -> None:
    checkpoint, _, _ = table(tmp_path, fp8=True)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.tensors}
    save_file(tensors | {"scale": torch.tensor([torch.nan]).bfloat16()}, tmp_path / "model.safetensors")
    looked_up = TableRows(open_folder(tmp_path), NAMES, "scale", CPU, torch.float32)
    with pytest.raises(CheckpointError, match=f"{NAMES[0]}, or what follows it .*, or its scale, holds a NaN"):
        looked_up(torch.tensor([5]))


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A model whose table has ten times as many bytes as all else of its layers."""
    monkeypatch.setitem(zoo.TYPES, "qwen4_exp", zoo.TYPES["qwen4_exp"] | {"ngram_vocab_size_base": 200_000})
    return zoo.save("qwen4_exp", tmp_path / "model")


def test_a_layer_never_holds_its_table_and_computes_the_same(large: Path) -> None:
    model = zoo.opened(large)
    names = model.facts.in_tables(0)
    assert names == [f"model.layers.0.{PATH}.shard_{n}.weight" for n in (0, 1)]
    assert not set(names) & set(layer_names(model.checkpoint, model.facts, 0))
    joined = torch.cat([model.checkpoint.tensor(name) for name in names])
    states = model.begin(torch.randint(2, 300, (40,)), model.embedding())
    with Alive() as alive, model.layer(0) as layer:
        made, _ = model.run(layer, states)
    assert alive.most < joined.nbytes
    with model.layer(0) as layer:
        assert isinstance(layer.module.get_submodule(PATH), TableRows)
        layer.module.set_submodule(PATH, torch.nn.Embedding(*joined.shape, _weight=joined.float()))
        assert torch.equal(model.run(layer, states)[0], made)


def test_the_plan_counts_a_table_in_no_layer_and_the_run_reads_it_behind_its_own(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write_recipe(large.parent, bits=4, group_size=32)
    job = prepare(str(large.parent / "recipe.yaml"))
    assert "ple_embedding_dtype" not in output_config(job.config, job.facts, job.plan)
    facts, names = job.facts, job.facts.in_tables(0)
    assert (job.plan.tables, job.plan.passthrough_parts) == ((4,), (4, None))
    assert [action.source for action in job.plan.of_layer(4)] == names
    size = sum(job.opened.tensors[name].size for name in names)
    assert job.plan.shard_file(4) == "model-00005-of-00006.safetensors"
    for accelerator in (False, True):
        memory = device_memory(job.plan, facts, 64, accelerator, None)
        assert max(memory.forward, memory.layer) < size
    monkeypatch.setattr(reader, "PIECE", 1 << 16)
    with Alive() as alive:
        copy_shard(job.plan, 4, job.opened, large.parent / "copy.safetensors")
    assert alive.most < size / 20
    assert load_file(large.parent / "copy.safetensors").keys() == set(names)
    parts = parts_of_run(job)
    assert parts[:4] == [
        [action.source for action in job.plan.of_layer(None)], names, layer_names(job.opened, facts, 0), names
    ]  # fmt: skip


@pytest.mark.parametrize("drop", [False, True])
def test_two_layers_have_the_same_table(drop: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Layers 0 and 2, in FP8: each with its scale, or it is refused."""
    monkeypatch.setitem(zoo.TYPES, "qwen4_exp", zoo.TYPES["qwen4_exp"] | {"ple_layer_ids": [1, 3]})
    model = zoo.save("qwen4_exp", tmp_path)
    tensors = load_file(model / "model.safetensors")
    names = {
        number: [f"model.layers.{number}.{PATH}.{end}" for end in ("shard_0.weight", "shard_1.weight", "weight_scale")]
        for number in (0, 2)
    }
    for *shards, scale in names.values():
        in_fp8(tensors, shards, scale)
    if drop:
        del tensors[names[2][-1]]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    if drop:
        problem = rf"layers.2.{PATH}.weight: this table is not stored as that of layer 0, and one has a scale"
        with pytest.raises(ArchitectureError, match=problem):
            zoo.opened(model)
        return
    opened = zoo.opened(model)
    assert {number: opened.facts.in_tables(number) for number in (0, 1, 2)} == names | {1: []}
    assert not any(opened.facts.is_unread(name) for of_layer in names.values() for name in of_layer)
    for number, (shard, _, scale) in names.items():
        with opened.layer(number) as layer:
            rows = layer.module.get_submodule(PATH)(torch.tensor([3]))
        assert torch.equal(rows[0], tensors[shard][3].float() * tensors[scale].float())


@pytest.fixture
def job(tmp_path: Path) -> JobFolder:
    """A model with an FP8 table."""
    model = zoo.save("qwen4_exp", tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    names = [f"model.layers.0.{PATH}.shard_{n}.weight" for n in (0, 1)]
    in_fp8(tensors, names, f"model.layers.0.{PATH}.weight_scale")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    tiny.write_recipe(tmp_path, words=20, samples=3, bits=4, group_size=32, rounding="nearest")
    return JobFolder(tmp_path)


def test_an_fp8_table_keeps_its_bytes_and_vllm_is_told(job: JobFolder) -> None:
    assert report_of(job)["kl"]["mean"] < 0.01
    source, output = open_folder(job.model), open_folder(job.output)
    names = [name for name in source.tensors if PATH in name]
    assert len(names) == 3
    for name in names:
        assert (source.raw(name), source.tensors[name].dtype) == (output.raw(name), output.tensors[name].dtype)
        assert output.tensors[name].file.name == "model-00005-of-00006.safetensors"
    assert output.config["ple_embedding_dtype"] == "float8_e4m3fn"
    verified = verify_folder(job.output, source, CPU)
    assert verified.passed, (verified.differences, verified.misread)


@pytest.mark.parametrize(
    ("drop", "problem"),
    [
        (True, "shard_0.weight is F8_E4M3; BF16 or F16 or F32 is needed; give the published checkpoint"),
        (False, "model.safetensors: .*shard_0.weight.* holds a NaN or infinity; download this shard again"),
    ],
)
def test_an_fp8_table_without_a_scale_or_with_nan_is_refused(job: JobFolder, drop: bool, problem: str) -> None:
    tensors = load_file(job.model / "model.safetensors")
    if drop:
        del tensors[f"model.layers.0.{PATH}.weight_scale"]
    else:
        for name in (name for name in tensors if "shard" in name):
            tensors[name] = torch.full_like(tensors[name].float(), torch.nan).to(torch.float8_e4m3fn)
    save_file(tensors, job.model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=problem):
        report_of(job)
