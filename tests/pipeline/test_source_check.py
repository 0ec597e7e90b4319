"""A source that makes no sense of text is refused with its figure before anything is quantized."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.job import prepare
from quantizers.recipe.read import changes_of
from quantizers.system.errors import CheckpointError, Stopped

CPU = torch.device("cpu")
TINY = "tiny-minimax-m2-fp8-int4"  # a trained model, whose recipe allows a perplexity of 37: it has 34.1
Tensors = dict[str, Tensor]


def shuffled_vocabulary(tensors: Tensors, config: dict[str, object]) -> None:
    table = tensors["model.embed_tokens.weight"]
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
    tensors["model.embed_tokens.weight"] = table[order]


def swapped_layers(tensors: Tensors, config: dict[str, object]) -> None:
    for name in [name for name in tensors if ".layers.1." in name]:
        other = name.replace(".layers.1.", ".layers.2.")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def no_rotary_correction(tensors: Tensors, config: dict[str, object]) -> None:
    """As transformers 5.17 computes MiniMax-M2 without it: every channel of a head is rotated."""
    config["rotary_dim"] = config["head_dim"]


def damaged(source: Path, folder: Path, damage: Callable[[Tensors, dict[str, object]], None]) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    parts = {shard: load_file(shard) for shard in sorted(folder.glob("*.safetensors"))}
    tensors = {name: tensor for part in parts.values() for name, tensor in part.items()}
    damage(tensors, config)
    for shard, part in parts.items():
        save_file({name: tensors[name].contiguous() for name in part}, shard, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("damage", "perplexity"),
    [
        pytest.param(shuffled_vocabulary, 13_594, marks=pytest.mark.slow),
        pytest.param(swapped_layers, 41.2, marks=pytest.mark.slow),
        pytest.param(no_rotary_correction, 61.0, marks=pytest.mark.slow),
    ],
)
def test_a_source_that_is_mixed_up_is_refused(
    damage: Callable[[Tensors, dict[str, object]], None], perplexity: float, tiny_model: Path, tmp_path: Path
) -> None:
    source, output = damaged(tiny_model, tmp_path / "model", damage), tmp_path / "out"
    job = prepare(TINY, source_folder=source)
    with pytest.raises(
        CheckpointError, match=r"makes no sense of text: .* its perplexity is ([\d,.]+), above 37 "
    ) as e:
        run(job, Options(output, CPU))
    said = float(str(e.value).partition("perplexity is ")[2].partition(", above")[0].replace(",", ""))
    assert said == pytest.approx(perplexity, rel=0.01)
    assert e.value.exit_code == 2
    assert not list(output.glob("*.safetensors"))


@pytest.mark.slow
def test_a_model_that_is_sound_is_checked_once_and_any_other_on_demand(tiny_model: Path, tmp_path: Path) -> None:
    stop = changes_of(["verify.stop.max_hidden_error=1e-9", "calibration.tokens=2000"], None)  # after layer 0
    record = tmp_path / "out" / ".quantize" / "source-check.json"
    for _ in range(2):
        with pytest.raises(Stopped):
            run(prepare(TINY, changes=stop), Options(tmp_path / "out", CPU))
        assert json.loads(record.read_text())["perplexity"] == pytest.approx(34.1, abs=0.1)
        record.write_text(record.read_text().replace("{", '{"kept": true,', 1))
    assert json.loads(record.read_text())["kept"]
    source = damaged(tiny_model, tmp_path / "model", shuffled_vocabulary)
    with pytest.raises(Stopped):
        run(
            prepare(TINY, source_folder=source, changes=stop),
            Options(tmp_path / "mixed up", CPU, ignore_source_check=True),
        )
