"""Every mixture-of-experts type of transformers, streamed layer by layer, against transformers' whole model.

A type has the whole model's hidden states before every layer and its logits, two sequences at a time, or it is refused
with a reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from by_layers import TOLERANCE, apart, of_the_whole, streamed
from safetensors.torch import load_file, save_file
from whole_models import source_weights

from quantizers.architectures import derive
from quantizers.architectures.families import architecture_for
from quantizers.checkpoint.reader import open_folder
from quantizers.system.errors import ArchitectureError

LENGTHS = (96, 57)

# These together have every kind of layer: see the words beside each.
QUICK = {
    "afmoe": "norms behind attention and MoE block, so that layers run whole; sliding windows; a factor on embeddings",
    "cohere2_moe": "attention and MoE block beside each other; a logit scale",
    "deepseek_v32": "latent attention, an indexer, dense layers",
    "granitemoe_swa": "factors on embeddings and logits, sliding windows",
    "laguna": "layers with shapes of their own",
    "lfm2_moe": "convolutions",
    "mimo_v2_flash": "attention sinks; windows with other shapes",
    "minimax": "lightning attention; the norm's output as residual",
    "phimoe": "norms with a bias, a head with one",
    "qwen3_5_moe as published": "FP8, an expert's matrix a tensor; linear attention; vision; a layer beyond the last",
    "qwen3_5_moe with vision": "fused experts, a norm that multiplies by 1 + w, shared experts",
    "solar_open": "shared experts and a bias on the router",
}


def differences(name: str, folder: Path) -> list[float]:
    """Those of the states before each layer, and of the logits, over all texts."""
    model = zoo.opened(zoo.save(name, folder))
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(2, model.facts.vocab_size, (2, length), generator=generator) for length in LENGTHS]
    whole = zoo.whole_model(name, *source_weights(folder))
    assert whole.config._attn_implementation == model.skeleton.config._attn_implementation
    expected = of_the_whole(whole, model.skeleton.path, texts)
    return [apart(*pair) for pair in zip(streamed(model, texts), expected, strict=True)]


def some(names: Iterable[str]) -> list[Any]:
    """All as parameters, slow but for those that have every kind of layer together."""
    return [pytest.param(name, marks=() if name in QUICK else [pytest.mark.slow]) for name in names]


def test_every_type_of_transformers_is_streamed_or_refused() -> None:
    known = {name.partition(" ")[0] for name in (*zoo.TYPES, *zoo.REFUSED)}
    assert set(zoo.found()) - known == set(), "new in transformers: add them to zoo.TYPES"


@pytest.mark.parametrize("name", some(name for name in zoo.TYPES if name not in zoo.REFUSED))
def test_the_streamed_model_is_transformers_whole_model(name: str, tmp_path: Path) -> None:
    assert max(differences(name, tmp_path)) < TOLERANCE


def test_layers_that_add_in_float32_hand_on_rows_of_the_models_dtype(tmp_path: Path) -> None:
    """As on a GPU: each layer is proven, and what it hands on beside its states fits behind them."""
    model = zoo.opened(zoo.save("zaya", tmp_path), torch.bfloat16)
    logits = streamed(model, [torch.arange(2, 60).expand(2, -1)])[-1]
    assert logits.dtype == torch.bfloat16
    assert torch.isfinite(logits).all()


@pytest.mark.slow
def test_what_transformers_joins_is_dequantized_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MiniMax-M3's gate and up of a dense layer, stored as FP8 and joined on loading."""
    monkeypatch.setattr(derive, "require_usable", lambda *_: None)  # its other layers are refused
    folder = zoo.save("minimax_m3_vl with vision", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": zoo.FP8}))
    tensors, expected = load_file(folder / "model.safetensors"), []
    for name in [name for name in tensors if re.search(r"\.layers\.0\..*(gate|up)_proj\.weight", name)]:
        codes, scale = tensors[name], tensors[f"{name}_scale_inv"] = zoo.fp8(tensors[name])
        expected.append(codes.float() * scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with zoo.opened(folder).layer(0) as layer:
        assert torch.equal(layer.module.get_parameter("mlp.gate_up_proj.weight"), torch.cat(expected))


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.REFUSED)
def test_other_types_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    if name in zoo.TYPES:
        checkpoint = open_folder(zoo.save(name, tmp_path))
        config, tensors = checkpoint.config, checkpoint.tensors
    else:
        config, tensors = {"model_type": name, "architectures": [zoo.found()[name][-1]]}, {}
    with pytest.raises(ArchitectureError, match=re.escape(zoo.REFUSED[name])) as refused:
        architecture_for(config, "config.json", None, tensors)
    assert "\n" not in str(refused.value)
    assert any(word in str(refused.value) for word in ("such a model cannot", "give ", "correct this file"))
