"""Checkpoint folders: what is read, what is refused, and that a damaged index never does anything else."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from quantizers.checkpoint import reader
from quantizers.checkpoint.reader import as_tensor, left_behind, locate, open_checkpoint, open_folder, side_files
from quantizers.checkpoint.safetensors_header import TensorInfo
from quantizers.system.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SHARDS = [f"part-{number}.safetensors" for number in (1, 2)]
TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16), "c": torch.tensor(3)}


def make(folder: Path) -> Path:
    """Three tensors in two shards."""
    folder.mkdir()
    save_file({"a": TENSORS["a"]}, folder / SHARDS[0])
    save_file({"b": TENSORS["b"], "c": TENSORS["c"]}, folder / SHARDS[1])
    (folder / "config.json").write_text("{}")
    write_map(folder, {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]})
    return folder


def write_map(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path / "model")


def test_tensors_of_all_shards(folder: Path) -> None:
    checkpoint = open_folder(folder, "mine", "main")
    assert (checkpoint.name, checkpoint.revision, checkpoint.config) == ("mine", "main", {})
    assert set(checkpoint.tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(checkpoint.tensor(name), tensor)
        assert bytes(checkpoint.raw(name)) == tensor.view(-1).view(torch.uint8).numpy().tobytes()
    checkpoint.tensor("a").zero_()  # memory of its own
    assert torch.equal(checkpoint.tensor("a"), TENSORS["a"])
    assert checkpoint.require("a", "a test").shape == (2, 3)
    with pytest.raises(CheckpointError, match=r"x is missing \(a test\); the checkpoint is incomplete"):
        checkpoint.require("x", "a test")


def test_one_file_without_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert set(open_folder(tmp_path).tensors) == set(TENSORS)
    (tmp_path / "model.safetensors").rename(tmp_path.parent / "outside.safetensors")
    (tmp_path / "model.safetensors").symlink_to("../outside.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors: is a link that leads out of the checkpoint"):
        open_folder(tmp_path)


def test_a_file_that_shrinks_or_vanishes_after_its_header_was_read(folder: Path) -> None:
    checkpoint = open_folder(folder)
    os.truncate(folder / SHARDS[0], (folder / SHARDS[0]).stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"part-1.safetensors: a: the file is truncated; download this shard"):
        checkpoint.tensor("a")
    (folder / SHARDS[0]).unlink()
    with pytest.raises(CheckpointError, match=r"part-1.safetensors: a: cannot be read \(No such file"):
        checkpoint.tensor("a")


def test_a_dtype_that_torch_cannot_compute_with() -> None:
    with pytest.raises(CheckpointError, match=r"x: a: dtype U16 cannot be read"):
        as_tensor(TensorInfo("a", "U16", (1,), Path("x"), 0, 2), bytearray(2))


# The index and what it names.


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        ({"a": "../other.safetensors"}, "names the shard '../other.safetensors', which is not a plain file name"),
        ({"a": "sub/x.safetensors"}, "which is not a plain file name, and is refused; download this file again"),
        ({"a": "/etc/passwd"}, "which is not a plain file name"),
        ({"a": ".."}, "which is not a plain file name"),
        ({"a": ""}, "which is not a plain file name"),
        ({"a": None}, "names the shard None, which is not a plain file name"),
        ({"a": "x\ny"}, "which is not a plain file name"),
        ({"a": "\ud800"}, "which is not a plain file name"),
        ({"a": "n" * 5000}, "which is not in the folder; download it"),
        ({"a": "absent.safetensors"}, "names absent.safetensors, which is not in the folder; download it"),
        ({"a": "config.json"}, "config.json: the header is cut off or corrupt"),
        ({"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1]}, "b should be in part-1.safetensors, which has no such"),
        ({"a": SHARDS[0], "b": SHARDS[1]}, "c is not in model.safetensors.index.json; index and shards"),
        ({"a": SHARDS[0], "x": SHARDS[0]}, "x should be in part-1.safetensors"),
        ({}, "weight_map is missing or empty; download this file again"),
        (None, "weight_map is missing or empty"),
    ],
)
def test_a_wrong_index(folder: Path, weight_map: object, said: str) -> None:
    write_map(folder, weight_map)
    with pytest.raises(CheckpointError) as failure:
        open_folder(folder)
    assert said in str(failure.value)
    assert str(folder) in str(failure.value)
    assert "\n" not in str(failure.value)
    str(failure.value).encode()


def test_one_tensor_in_two_shards(folder: Path) -> None:
    save_file(TENSORS, folder / SHARDS[1])
    with pytest.raises(CheckpointError, match=r"part-2.safetensors: a is also in part-1.safetensors; keep one"):
        open_folder(folder)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("config.json", "../outside"),
        (INDEX, "../outside"),
        (SHARDS[0], "/etc/hostname"),
        ("tokenizer.json", "../outside"),
        ("additional_chat_templates/a.jinja", "../../outside"),
    ],
)
def test_a_link_out_of_the_folder_is_refused(folder: Path, name: str, target: str) -> None:
    (folder.parent / "outside").write_text("private")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target)
    with pytest.raises(CheckpointError, match=f"{name}: is a link that leads out of the checkpoint; put the file"):
        open_folder(folder)


def test_links_within_the_folder_and_to_it(folder: Path, tmp_path: Path) -> None:
    (folder / SHARDS[0]).rename(folder / "real.bin")
    (folder / SHARDS[0]).symlink_to("real.bin")
    (tmp_path / "link").symlink_to(folder)
    assert set(open_folder(folder).tensors) == set(open_folder(tmp_path / "link").tensors) == set(TENSORS)


@pytest.mark.parametrize("moved", ["", "blobs", "each"])
def test_the_hubs_cache_links_into_its_blobs(tmp_path: Path, folder: Path, moved: str) -> None:
    """Also where they lie on another disk, to which the cache links, as a folder or each."""
    cache, disk = tmp_path / "models--a--b", tmp_path / "disk"
    snapshot, blobs = cache / "snapshots" / "0123", cache / "blobs"
    (folder / "more").mkdir()
    (folder / "more" / "a.jinja").touch()
    (snapshot / "more").mkdir(parents=True)
    disk.mkdir()
    blobs.symlink_to(disk) if moved == "blobs" else blobs.mkdir()
    for number, file in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        within = file.relative_to(folder)
        shutil.copy(file, (disk if moved else blobs) / f"{number:064x}")
        if moved == "each":
            (blobs / f"{number:064x}").symlink_to(disk / f"{number:064x}")
        (snapshot / within).symlink_to(f"{'../' * (len(within.parts) + 1)}blobs/{number:064x}")
    assert set(open_folder(snapshot).tensors) == set(TENSORS)
    assert [path.relative_to(snapshot) for path in side_files(snapshot)] == [Path("more/a.jinja")]


def test_a_link_in_a_circle(folder: Path) -> None:
    (folder / SHARDS[0]).unlink()
    (folder / SHARDS[0]).symlink_to(SHARDS[0])
    with pytest.raises(CheckpointError, match=r"part-1"):
        open_folder(folder)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json: cannot be read (No such file or directory)"),
        (lambda folder: (folder / INDEX).unlink(), f"neither {INDEX} nor model.safetensors; give a safetensors"),
        (lambda folder: (folder / SHARDS[0]).unlink(), "names part-1.safetensors, which is not in the folder"),
        (
            lambda folder: shutil.copy(folder / SHARDS[0], folder / "model.safetensors"),
            "holds two sets of weights: model.",
        ),
        (lambda folder: (folder / "adapter_config.json").touch(), "with it transformers reads an adapter"),
        (lambda folder: (folder / "config.json").write_text('{"transformers_weights": "x"}'), "_weights is 'x', which"),
        (shutil.rmtree, "model: no such folder; give a checkpoint folder or a Hub id"),
        (lambda folder: (folder / INDEX).write_bytes(b"\xff"), f"{INDEX}:1: not valid JSON; download this file again"),
        (lambda folder: (folder / INDEX).write_text("{\n\n"), f"{INDEX}:3: not valid JSON"),
        (lambda folder: (folder / INDEX).write_text("[]"), f"{INDEX}:1: must be a JSON object"),
        (lambda folder: (folder / INDEX).write_text("{}"), "weight_map is missing or empty"),
        (lambda folder: (folder / INDEX).write_text('{"a":' * 10**5), "not valid JSON"),
        (lambda folder: (folder / INDEX).write_text('{"a":' + "9" * 5000 + "}"), "not valid JSON"),
    ],
)
def test_a_wrong_folder(folder: Path, spoil: Callable[[Path], object], said: str) -> None:
    spoil(folder)
    with pytest.raises(CheckpointError) as failure:
        open_folder(folder)
    assert said in str(failure.value)


@pytest.mark.altered_report
def test_side_files_and_what_is_left_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All small files go along, in folders too, but no other weights, and no folder that holds some."""
    monkeypatch.setattr(reader, "LARGEST_SIDE_FILE", 1000)
    wanted = [
        "1_Pooling/config.json", "LICENSE", "additional_chat_templates/tool_use.jinja", "chat_template.jinja",
        "figures/deep/er.png", "modeling.py", "parsers/README.md", "tokenizer.json",
    ]  # fmt: skip
    left = ["audio/config.json", "audio/model.safetensors", "onnx/config.json", "x.bin", "x.gguf", "y.index.json"]
    ours = ["README.md", "report.json", "recipe.yaml", ".hidden", ".cache/huggingface/x.json", "__pycache__/a.pyc"]
    for name in [*wanted, *left, *ours, "hf_quant_config.json"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "film.mp4").write_bytes(bytes(1001))
    (folder / "linked").symlink_to("parsers")
    assert [str(path.relative_to(folder)) for path in side_files(folder)] == wanted
    assert left_behind(open_folder(folder)) == (
        "left behind in the source: audio/, onnx/, x.bin and 2 more (weights that are not read); "
        "film.mp4 (larger than 1,000 bytes); hf_quant_config.json (says how the source is quantized); "
        "linked/ (a link to a folder); "
        "recipe.yaml, report.json (names of a run's own files)"
    )


def saved_by_transformers(folder: Path, **config: Any) -> Path:
    """A tiny Mixtral of transformers' own saving, in one file; and a second one in shards, with an index, beside it."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8, "num_local_experts": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads))
    model.save_pretrained(folder, max_shard_size="2KB")
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(folder / "one")
    shutil.move(folder / "one" / "model.safetensors", folder / "model.safetensors")
    shutil.rmtree(folder / "one")
    written = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(written))
    return folder


@pytest.mark.slow
def test_a_folder_of_which_transformers_reads_other_weights_is_refused(tmp_path: Path) -> None:
    """`open_folder` reads the same head as transformers does, or nothing."""
    from transformers import MixtralForCausalLM

    def opens(folder: Path) -> bool:
        read = open_folder(folder).tensor("lm_head.weight")
        return torch.equal(read, MixtralForCausalLM.from_pretrained(folder).lm_head.weight)

    folder = saved_by_transformers(tmp_path / "two")
    with pytest.raises(CheckpointError, match=r"two sets of weights: model.safetensors, which transformers reads, and"):
        open_folder(folder)
    assert "lm_head.weight" in open_folder(folder, strays=True).tensors  # for an audit, which reports it
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert opens(folder)
    (tmp_path / "model.safetensors").rename(folder / "other.safetensors")
    assert opens(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "other.safetensors"}))
    with pytest.raises(CheckpointError, match=r"transformers_weights is 'other.safetensors', which transformers reads"):
        open_folder(folder)
    assert not MixtralForCausalLM.from_pretrained(folder).lm_head.weight.any()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"adapter_config.json: with it transformers reads an adapter"):
        open_folder(folder)


@pytest.mark.parametrize(
    "name", ["config.json", INDEX, SHARDS[1], "tokenizer.json", "tokenizer.model", "additional_chat_templates/a.jinja"]
)
def test_a_pointer_of_git_lfs_is_named(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123456\n")
    with pytest.raises(CheckpointError, match=f"{name}: is a pointer of git-lfs, not the file itself; run `git lfs"):
        open_folder(folder)


# Where a checkpoint is found.


def test_a_folder_is_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert locate(str(folder)) == locate("~/model") == (folder, None)


def test_the_shipped_model_has_a_name_unless_a_folder_here_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped_one, _ = locate("tiny-minimax-m2")
    assert (shipped_one / "config.json").is_file()
    assert shipped_one.is_absolute()
    (tmp_path / "tiny-minimax-m2").mkdir()
    assert locate("tiny-minimax-m2") == (Path("tiny-minimax-m2"), None)


@pytest.mark.parametrize(
    "name", ["", "model", "./a/b", "../b", "/a/b", "~/b", "~nobody/b", "a/b/c", "m" * 5000, "a\0b"]
)
def test_what_is_neither_folder_nor_id(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # names are relative to it, and nothing of the kind lies near
    with pytest.raises(CheckpointError, match=r"no such folder, and not a Hub id \(owner/name\); correct it"):
        open_checkpoint(name)


@pytest.mark.parametrize("name", ["nobody/nothing", "a b/c", "-a/b", "a/b..c"])
def test_an_id_that_the_hub_does_not_give(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match=rf"^{name}: .*; download it and name the folder$"):
        open_checkpoint(name)


def test_a_full_disk_is_no_fault_of_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(
        CheckpointError, match=r"me/large: the disk .* is full .*; make room .* HF_HOME .* --stream` needs"
    ):
        locate("me/large")


# Anything at all.

PROPERTY = settings(
    derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
NAMES = st.sampled_from([*SHARDS, "a", "b", "c", "..", "", "/", "\0", "a\nb", "config.json", "weight_map"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=6,
)


def opens_or_refuses(folder: Path) -> None:
    said = ""
    try:
        checkpoint = open_folder(folder)
    except CheckpointError as failure:
        said = str(failure)
    if said:
        assert str(folder) in said
        assert "\n" not in said
    else:
        assert len(checkpoint.tensors) == len(TENSORS)


@PROPERTY
@given(weight_map=st.dictionaries(NAMES, JSON, max_size=4), body=JSON)
def test_any_index_opens_or_is_refused(folder: Path, weight_map: dict[str, Any], body: object) -> None:
    write_map(folder, {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]} | weight_map)
    opens_or_refuses(folder)
    (folder / INDEX).write_text(json.dumps(body))
    opens_or_refuses(folder)


@PROPERTY
@given(data=st.data(), name=st.sampled_from([INDEX, "config.json", *SHARDS]))
def test_any_byte_may_be_wrong(folder: Path, data: st.DataObject, name: str) -> None:
    before = (folder / name).read_bytes()
    raw = bytearray(before)
    at = data.draw(st.integers(0, len(raw)))
    raw[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try:
        (folder / name).write_bytes(raw)
        opens_or_refuses(folder)
    finally:
        (folder / name).write_bytes(before)
