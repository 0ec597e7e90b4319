"""A finished checkpoint with one thing in it changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

MOE = "model.layers.1.block_sparse_moe"


def edit(folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite the shard that holds `name`, and the index to fit."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = index["weight_map"][name]
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})
    kept = {tensor: shard for tensor, shard in index["weight_map"].items() if shard != file}
    index["weight_map"] = kept | dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
