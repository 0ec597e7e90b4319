"""The made-up checkpoint of a published model's shapes, and the Hub that serves it and takes what is made of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from full_size import held_out_set
from full_size_hub import PIECE, Hub, Upload, kept
from hub_stand_in import HubStandIn
from made_checkpoint import MadeCheckpoint, made_checkpoint
from safetensors.torch import load

from quantizers.architectures.families import published_config
from quantizers.calibration.load_set import load_set
from quantizers.checkpoint.reader import open_folder
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.planning.assign_actions import expected_tensors
from quantizers.system.errors import InputError
from quantizers.system.shipped import shipped_model

SMALL = {"layers": 3, "hidden": 256, "width": 128, "experts": 16, "vocabulary": 512}
SOURCE, REPO = "MiniMaxAI/MiniMax-M2.1", "me/made"


@pytest.fixture(scope="module")
def made() -> MadeCheckpoint:
    config = published_config(SOURCE)
    assert config is not None
    return made_checkpoint(config, **SMALL)


def test_a_made_checkpoint_is_what_the_program_expects_of_the_published_one(
    made: MadeCheckpoint, tmp_path: Path
) -> None:
    """By its own reader: names, shapes, index; two shards a layer, numbered as MiniMax-M2.1's 125 of 130."""
    for name, content in {**made.shards, **made.files}.items():
        (tmp_path / name).write_bytes(content[:])
    opened = open_folder(tmp_path)
    expected = expected_tensors(made.facts, made.config, "")
    assert {name: Spec(info.dtype, info.shape) for name, info in opened.tensors.items()} == expected
    assert list(made.shards) == [f"model-0000{number}-of-00012.safetensors" for number in range(7)]
    assert opened.tensors["model.embed_tokens.weight"].file.name == "model-00000-of-00012.safetensors"
    last = {"lm_head.weight", "model.norm.weight"}
    assert {name for name, info in opened.tensors.items() if info.file.name.startswith("model-00006")} == last
    for number in range(3):
        files = {info.file.name for name, info in opened.tensors.items() if name.startswith(f"model.layers.{number}.")}
        assert files == {f"model-0000{2 * number + half}-of-00012.safetensors" for half in (0, 1)}


def test_its_numbers_are_those_of_a_random_model(made: MadeCheckpoint) -> None:
    """Finite, of the deviation that preserves a vector's length; the same in every layer, and no two experts alike."""
    tensors = {name: tensor for shard in made.shards.values() for name, tensor in load(shard[:]).items()}
    experts = [f"model.layers.{layer}.block_sparse_moe.experts.{e}.w1" for layer in (0, 1) for e in range(16)]
    weights = [tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale_inv"].mean() for name in experts]
    for weight in weights:
        assert float(weight.square().mean().sqrt()) == pytest.approx(256**-0.5, rel=0.05)
    assert all(torch.equal(*pair) for pair in zip(weights[:16], weights[16:], strict=True))
    assert len({weight.numpy().tobytes() for weight in weights}) == 16
    assert torch.equal(tensors["model.norm.weight"], torch.ones(256, dtype=torch.bfloat16))


def test_a_shard_is_hashed_and_cut_as_its_bytes(made: MadeCheckpoint) -> None:
    for shard in made.shards.values():
        whole = shard[:]
        assert len(whole) == len(shard)
        assert shard.hash() == hashlib.sha256(whole).hexdigest()
        for start, stop in ((0, 9), (7, 100_000), (len(shard) // 2, len(shard) // 2 + 1), (len(shard) - 5, len(shard))):
            assert shard[start:stop] == whole[start:stop]


def blocks(raw: bytes, count: int = 1 << 20) -> Iterator[bytes]:
    for start in range(0, len(raw), count):
        yield raw[start : start + count]


def test_uploads_of_equal_tensors_take_the_room_of_one(tmp_path: Path) -> None:
    def file(name: str) -> bytes:
        header = json.dumps({name: {"dtype": "U8", "shape": [PIECE + 9], "data_offsets": [0, PIECE + 9]}}).encode()
        return len(header).to_bytes(8, "little") + header + bytes(range(256)) * (PIECE // 256) + b"the rest."

    first, second = file("model.layers.9"), file("model.layers.10")
    uploads = [kept(tmp_path, blocks(raw)) for raw in (first, second)]
    assert len(list(tmp_path.iterdir())) == 4  # two headers
    for raw, upload in zip((first, second), uploads, strict=True):
        assert (upload.sha256, len(upload), upload[:]) == (hashlib.sha256(raw).hexdigest(), len(raw), raw)
        assert upload[PIECE - 3 : PIECE + 200] == raw[PIECE - 3 : PIECE + 200]
    assert kept(tmp_path, blocks(b"small"))[:] == b"small"
    assert kept(tmp_path, blocks(b""))[:] == b""


def test_a_hub_goes_on_where_it_was_stopped(made: MadeCheckpoint, tmp_path: Path) -> None:
    """At the same address, with what was uploaded, without hashing the source again."""
    with Hub(tmp_path, SOURCE, made) as first:
        address = first.stand_in.endpoint
        upload = kept(tmp_path / "pieces", blocks(b"a shard"))
        first.stand_in.objects[upload.sha256] = upload
        first.stand_in.repositories[REPO] = {"main": {"x.safetensors": upload, "config.json": b"{}"}}
        first.stand_in.private[REPO] = True
        first.figures["peak disk"] = 7
        commits = [first.stand_in.commit(repo) for repo in (SOURCE, REPO)]
    assert {name: shard.sha256 for name, shard in made.shards.items()} == {n: s.hash() for n, s in made.shards.items()}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("made_checkpoint.Shard.hash", lambda _: pytest.fail("it was hashed again"))
        with Hub(tmp_path, SOURCE, made) as second:
            hub: HubStandIn = second.stand_in
            assert hub.endpoint == address
            assert [hub.commit(repo) for repo in (SOURCE, REPO)] == commits
            files = hub.repositories[REPO]["main"]
            assert (files["x.safetensors"][:], files["config.json"]) == (b"a shard", b"{}")
            assert isinstance(files["x.safetensors"], Upload)
            assert (hub.private, second.figures["peak disk"]) == ({REPO: True}, 7)
            assert second.digests(REPO) == [upload.sha256]
    other = replace(made, config=made.config | {"hidden_size": 128})
    with pytest.raises(InputError, match="holds a run of another model, or of other sizes; give another --folder"):
        Hub(tmp_path, SOURCE, other)


def test_a_held_out_set_of_a_few_texts(tmp_path: Path) -> None:
    tokenizer = shipped_model("tiny-minimax-m2")
    assert tokenizer is not None
    data = load_set(held_out_set(tmp_path, 3), tokenizer)
    assert len(data.samples) == 3
    assert max(len(sample.tokens) for sample in data.samples) == 256
