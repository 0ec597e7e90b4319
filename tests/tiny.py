"""Random checkpoints of any size in MiniMax-M2's published layout, for tests that need no trained model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import yaml
from calibration_tokenizer import write_tokenizer
from safetensors.torch import save_file


def config(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "hidden_act": "silu",
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rotary_dim": 32,
        "rope_theta": 10000,
        "rms_norm_eps": 1e-6,
        "vocab_size": 320,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 2048,
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "use_routing_bias": True,
        "num_mtp_modules": 3,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 0,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "float8_e4m3fn",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    }
    return base | changes


def fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes and a float32 scale per 128x128 block."""
    rows, columns = (math.ceil(n / 128) for n in weight.shape)
    scale = torch.empty(rows, columns)
    codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            part = weight[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128]
            scale[i, j] = part.abs().max() / 448
            codes[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128] = (part / scale[i, j]).to(torch.float8_e4m3fn)
    return codes, scale


def fp8_rows(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes and a scale for each row, [rows, 1], in this dtype."""
    scale = (weight.float().abs().amax(1, keepdim=True) / 448).to(dtype)
    return (weight.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def tensors(c: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, spread: float = 0.05) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * spread

    out: dict[str, torch.Tensor] = {}

    def linear(name: str, rows: int, columns: int) -> None:
        out[f"{name}.weight"], out[f"{name}.weight_scale_inv"] = fp8(normal(rows, columns, spread=1.5 / columns**0.5))

    def norm(name: str, size: int, outliers: int = 0) -> None:
        weight = 1 + normal(size, spread=0.2)
        weight[:outliers] *= 8
        out[name] = weight.bfloat16()

    hidden, width, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    out["model.embed_tokens.weight"] = normal(c["vocab_size"], hidden, spread=1.0).bfloat16()
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        norm(f"{at}.input_layernorm.weight", hidden)
        norm(f"{at}.post_attention_layernorm.weight", hidden, outliers=3)
        for name, rows, columns in (
            ("q_proj", c["num_attention_heads"] * head, hidden),
            ("k_proj", c["num_key_value_heads"] * head, hidden),
            ("v_proj", c["num_key_value_heads"] * head, hidden),
            ("o_proj", hidden, c["num_attention_heads"] * head),
        ):
            linear(f"{at}.self_attn.{name}", rows, columns)
        norm(f"{at}.self_attn.q_norm.weight", c["num_attention_heads"] * head)
        norm(f"{at}.self_attn.k_norm.weight", c["num_key_value_heads"] * head)
        moe = f"{at}.block_sparse_moe"
        out[f"{moe}.gate.weight"] = normal(c["num_local_experts"], hidden, spread=0.2)
        out[f"{moe}.e_score_correction_bias"] = normal(c["num_local_experts"], spread=0.05)
        for expert in range(c["num_local_experts"]):
            linear(f"{moe}.experts.{expert}.w1", width, hidden)
            linear(f"{moe}.experts.{expert}.w3", width, hidden)
            linear(f"{moe}.experts.{expert}.w2", hidden, width)
    norm("model.norm.weight", hidden)
    out["lm_head.weight"] = normal(c["vocab_size"], hidden, spread=0.3).bfloat16()
    return out


def write(folder: Path, c: dict[str, Any], t: dict[str, torch.Tensor], shards: int = 2) -> Path:
    """A checkpoint folder; names are dealt to the shards in turn, so that scales lie apart from their weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(c, indent=2))
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        names = [name for i, name in enumerate(t) if i % shards == number]
        save_file({name: t[name].contiguous() for name in names}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    body = {"metadata": {"total_size": sum(x.nbytes for x in t.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(body))
    return folder


def make(folder: Path, seed: int = 0, shards: int = 2, **changes: Any) -> Path:
    """A random checkpoint with `changes` to the config."""
    c = config(**changes)
    return write(folder, c, tensors(c, seed), shards)


def write_job(folder: Path, layers: int = 4, words: int = 40, samples: int = 4, **experts: Any) -> Path:
    """A random checkpoint, calibration and held-out set, and the recipe of them."""
    write_tokenizer(make(folder / "model", num_hidden_layers=layers))
    return write_recipe(folder, words, samples, **experts)


def write_recipe(folder: Path, words: int = 40, samples: int = 4, **experts: Any) -> Path:
    """A calibration and a held-out set, and the recipe for the checkpoint in `folder`/model.

    AWQ tries five scales, not twenty, where `experts` says nothing of it.
    """
    for name in ("calibration", "held-out"):
        rows = [{"text": " ".join(f"{name} {i} {j}" for j in range(words))} for i in range(samples)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = {
            "dataset": f"{name}.jsonl", "columns": ["text"], "shape": "text", "samples": "all", "category": "spoken"
        }  # fmt: skip
        body = {"name": name, "sequence_length": 256, "seed": 1, "sources": [source]}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(body))
    recipe = {
        "source": {"model": "model"},
        "calibration": "calibration.yaml",
        "experts": {"awq": {"grid": 5}} | experts,
        "verify": {"perplexity": {"data": "held-out.yaml", "max_source": "any"}},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"
