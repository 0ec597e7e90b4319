"""Trains the MiniMax-M2 of tiny size that the tests and the README's first command use.

    python scripts/train_tiny_model.py [--steps 1500] [--output models/tiny-minimax-m2]

What comes out has the published layout of MiniMax-M2: FP8 e4m3 linear weights with one
`weight_scale_inv` per 128x128 block, a float32 router with a non-zero float32 bias, the original
tensor names, and a config.json in the published style (`rope_theta` and `rotary_dim`, no
`rope_parameters`). About 20 minutes on two cores. The kept model was made by this script; another
machine or torch gives another, equally good one.

    python scripts/train_tiny_model.py --family qwen3_moe --steps 600 --output /tmp/tiny-qwen3

makes a Qwen3-MoE of the same size from the same texts, likewise as published: a bfloat16 router
that chooses after a softmax, without a bias, and bfloat16 block scales. `--family glm4_moe` makes a
GLM-4.5: a dense layer before three with experts, a shared expert in each of these, FP8 with a scale
per row, and a layer that predicts further tokens, which is written by hand since transformers builds
none. These do not travel with the program. About a quarter of an hour each on one core.

Text: the calibration texts of this project (Apache-2.0; never the held-out ones) and the running
Python's standard library (PSF-2.0). Every file the model learns from is written to PROVENANCE.md.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sysconfig
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Glm4MoeForCausalLM,
    MiniMaxM2ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

ROOT = Path(__file__).parent.parent
LAYERS = 4
EXPERTS, TOP_K = 16, 2
HIDDEN, WIDTH = 128, 128
VOCAB = 2048
HEADS, KV_HEADS = 4, 2
HEAD_DIM, ROTARY_DIM = 64, 32
ROPE_THETA = 10_000
SEQUENCE, BATCH = 256, 16
PEAK_RATE = 2e-3
ROUTER_NOISE = 0.2
BALANCE_RATE, BALANCE_WEIGHT = 1e-3, 0.01  # of the bias, and of the term in the loss
SPECIAL = [
    "[end]", "[turn]", "<think>", "</think>", "<call>", "</call>", "<result>", "</result>", "<tools>", "</tools>",
]  # fmt: skip


@dataclass(frozen=True)
class Family:
    """What differs between families; transformers has the same module names for all of them.

    Attributes:
        model: transformers' class.
        published_config: the content of config.json.
        trained_with: what the class is given instead, where it is trained otherwise or does not read a key.
        block: the published name of a layer's MoE block; transformers' is `mlp`.
        matrices: the published names of an expert's gate, up and down.
        router, scale: the published dtypes of the router and of FP8 scales.
        bias: the layer's buffer with the router's bias, which then balances the experts; else a term in the loss does.
        planted: norms that get outlier channels, and all parameters that read what comes out of them, in any layer.
        per_row: FP8 has a scale per row, not per block.
        mtp: a layer that predicts further tokens follows the last one.
    """

    model: type[PreTrainedModel]
    published_config: Callable[[], dict[str, object]]
    block: str
    matrices: tuple[str, str, str]
    router: torch.dtype
    scale: torch.dtype
    bias: str | None
    planted: dict[str, tuple[str, ...]]
    per_row: bool = False
    mtp: bool = False
    trained_with: Mapping[str, object] = field(default_factory=dict)

    def untrained(self) -> PreTrainedModel:
        """The model with random weights."""
        fields = {k: v for k, v in self.published_config().items() if k not in ("architectures", "quantization_config")}
        return self.model(self.model.config_class(**fields | self.trained_with))


def training_texts(folder: Path) -> list[tuple[str, str, str]]:
    """(origin, licence, text): the project's calibration texts, and the standard library."""
    texts = []
    for file in sorted(folder.glob("*.jsonl")):
        if not file.name.startswith("held-out"):
            for number, line in enumerate(file.read_text().splitlines()):
                texts.append((f"calibration/embedded/{file.name}:{number + 1}", "Apache-2.0", line))
    library = Path(sysconfig.get_paths()["stdlib"])
    modules = [
        p for p in sorted(library.rglob("*.py")) if not {"site-packages", "test", "tests", "idlelib"} & set(p.parts)
    ]
    for file in modules:
        body = file.read_text(encoding="utf-8", errors="ignore")
        if 2_000 < len(body) < 200_000:
            texts.append((f"python{platform.python_version()}/{file.relative_to(library)}", "PSF-2.0", body))
    return texts


def render(tokenizer: PreTrainedTokenizerFast, origin: str, text: str) -> str:
    if not origin.startswith("calibration/"):
        return text
    row = json.loads(text)
    if "messages" in row:
        return tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
    if "prompt" in row:
        turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["answer"]}]
        return tokenizer.apply_chat_template(turns, tokenize=False)
    return row["text"]


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE that knows every byte, so that nothing is ever unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="[end]",
        bos_token="[turn]",
        chat_template=(ROOT / "scripts" / "chat_template.jinja").read_text(),
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def with_experts(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The layers that are not dense."""
    return [layer for layer in model.model.layers if hasattr(layer.mlp, "experts")]


def balance(model: PreTrainedModel, bias: str, counts: list[torch.Tensor], rate: float) -> None:
    """DeepSeek-V3's loss-free balancing (arXiv 2408.15664): the bias follows the sign of the load error."""
    for layer, count in zip(with_experts(model), counts, strict=True):
        layer.get_buffer(bias).add_(rate * torch.sign(count.float().mean() - count.float()))


def imbalance(router_logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Switch Transformer's auxiliary loss (arXiv 2101.03961) by transformers, the mean over the layers.

    Given all layers at once, transformers adds their loads up before it compares experts. One layer's idle expert is
    then made up for by another layer's busy one, and the tiny model ends with experts that hardly a token reaches.
    """
    losses = [load_balancing_loss_func((logits,), EXPERTS, TOP_K) for logits in router_logits]
    return torch.stack(losses).mean()


def train(model: PreTrainedModel, family: Family, own: np.ndarray, library: np.ndarray, steps: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1.0,
        betas=(0.9, 0.95),
    )
    layers = with_experts(model)
    counts = [torch.zeros(EXPERTS) for _ in layers]

    def count_routed(index: int) -> Callable[..., None]:
        def hook(_: object, __: object, output: tuple[torch.Tensor, ...]) -> None:
            counts[index].add_(torch.bincount(output[2].flatten(), minlength=EXPERTS))

        return hook

    def disturb(_: object, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        # Noisy gating (Shazeer et al., arXiv 1701.06538), on the router's input: near a tie either expert
        # must serve the token. Without it a tiny model's function jumps wherever two experts change places.
        return arguments[0] * (1 + ROUTER_NOISE * torch.randn_like(arguments[0])), *arguments[1:]

    hooks = [layer.mlp.gate.register_forward_hook(count_routed(i)) for i, layer in enumerate(layers)]
    hooks += [layer.mlp.gate.register_forward_pre_hook(disturb) for layer in layers]
    started, smooth = time.time(), None
    for step in range(steps):
        rate = PEAK_RATE * min(1.0, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimiser.param_groups:
            group["lr"] = rate
        rows = []
        for row in range(BATCH):
            text = own if row % 2 else library  # every other row: texts that look like the held-out set
            start = rng.integers(0, len(text) - SEQUENCE - 1)
            rows.append(text[start : start + SEQUENCE])
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
        output = model(tokens, labels=tokens, use_cache=False)
        loss = output.loss if family.bias else output.loss + BALANCE_WEIGHT * imbalance(output.router_logits)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if family.bias:
            with torch.no_grad():
                balance(
                    model, family.bias, counts, BALANCE_RATE if step < 0.7 * steps else 0.0
                )  # then the router settles
        for count in counts:
            count.zero_()
        smooth = output.loss.item() if smooth is None else 0.98 * smooth + 0.02 * output.loss.item()
        if step % 50 == 49:
            left = (time.time() - started) / (step + 1) * (steps - step - 1)
            print(f"step {step + 1}/{steps} loss {smooth:.3f} left {left / 60:.1f} min", flush=True)
    for hook in hooks:
        hook.remove()


def powers_of_two(x: torch.Tensor) -> torch.Tensor:
    return torch.exp2(torch.round(torch.log2(x)))


@torch.no_grad()
def plant_outliers(model: PreTrainedModel, planted: dict[str, tuple[str, ...]], seed: int) -> None:
    """Outlier channels as real models have them, without changing the function.

    Norm times o and every reader's columns over o; w3's rows times o and w2's columns over o. All
    factors are powers of two, so the planting itself is exact in any binary float.
    """
    generator = torch.Generator().manual_seed(seed)

    def factors(size: int, outliers: int, height: float) -> torch.Tensor:
        o = torch.exp(0.5 * torch.randn(size, generator=generator))
        o[torch.randperm(size, generator=generator)[:outliers]] *= height
        return powers_of_two(o)

    for layer in model.model.layers:
        parameters = dict(layer.named_parameters())
        for norm, readers in planted.items():
            o = factors(HIDDEN, 3, 32.0)
            parameters[norm].mul_(o)
            for reader in readers:
                if reader in parameters:
                    parameters[reader].div_(o)
        for expert in range(EXPERTS if hasattr(layer.mlp, "experts") else 0):
            o = factors(WIDTH, 2, 16.0)
            layer.mlp.experts.gate_up_proj[expert, WIDTH:].mul_(o[:, None])
            layer.mlp.experts.down_proj[expert].div_(o)


def to_fp8(weight: torch.Tensor, dtype: torch.dtype, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, columns) float32 as e4m3, and scales of this dtype per block (height, width): weight = q * scale."""
    height, width = block
    rows, columns = math.ceil(weight.shape[0] / height), math.ceil(weight.shape[1] / width)
    scale = torch.empty(rows, columns, dtype=dtype)
    codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            cells = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
            scale[i, j] = weight[cells].abs().max() / 448.0
            # By the scale as it is stored: rounding it is then no error of the codes.
            codes[cells] = (weight[cells] / scale[i, j]).to(torch.float8_e4m3fn)
    return codes, scale


@torch.no_grad()
def published_tensors(model: PreTrainedModel, family: Family) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}

    def put(name: str, tensor: torch.Tensor) -> None:
        weight = tensor.float()
        if name.endswith(".gate.weight"):
            tensors[name] = weight.to(family.router)
        elif name.endswith("e_score_correction_bias"):
            tensors[name] = weight
        elif not name.endswith(("_proj.weight", *(f"{matrix}.weight" for matrix in family.matrices))):
            tensors[name] = weight.bfloat16()
        elif family.per_row:
            tensors[name], tensors[f"{name}_scale"] = to_fp8(weight, family.scale, (1, weight.shape[1]))
        else:
            tensors[name], tensors[f"{name}_scale_inv"] = to_fp8(weight, family.scale, (128, 128))

    for inner, tensor in model.state_dict().items():
        name = inner.replace(".mlp.", f".{family.block}.")
        fused = name.rpartition(".")[2]
        if fused not in ("gate_up_proj", "down_proj"):
            put(name, tensor)
            continue
        gate, up, down = family.matrices
        for e, weight in enumerate(tensor):
            expert = f"{name.removesuffix(fused)}{e}"
            if fused == "down_proj":
                put(f"{expert}.{down}.weight", weight)
            else:
                put(f"{expert}.{gate}.weight", weight[:WIDTH])
                put(f"{expert}.{up}.weight", weight[WIDTH:])
    if family.mtp:
        tensors |= mtp_layer(tensors)
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


def mtp_layer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The layer that predicts further tokens: the last one's tensors, and what such a layer has besides, untrained."""
    last, prefix = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    made = {prefix + name.removeprefix(last): t for name, t in tensors.items() if name.startswith(last)}
    made |= {f"{prefix}{name}.weight": torch.ones(HIDDEN).bfloat16() for name in ("enorm", "hnorm", "shared_head.norm")}
    made[f"{prefix}eh_proj.weight"] = (torch.eye(HIDDEN).repeat(1, 2) / 2).bfloat16()  # the mean of both
    made[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    made[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"]
    return made


def published_minimax_m2() -> dict[str, object]:
    return {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "attention_dropout": 0.0,
        "attn_type_list": [1] * LAYERS,
        "bos_token_id": 1,
        "eos_token_id": 0,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": WIDTH,
        "max_position_embeddings": 2048,
        "model_type": "minimax_m2",
        "mtp_transformer_layers": 1,
        "num_attention_heads": HEADS,
        "num_experts_per_tok": TOP_K,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "num_local_experts": EXPERTS,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "float8_e4m3fn",
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-6,
        "rope_theta": ROPE_THETA,
        "rotary_dim": ROTARY_DIM,
        "router_jitter_noise": 0.0,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "use_cache": True,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "vocab_size": VOCAB,
    }


def published_qwen3_moe() -> dict[str, object]:
    unconverted = ("input_layernorm", "mlp.gate", "post_attention_layernorm")
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "decoder_sparse_step": 1,
        "eos_token_id": 0,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": 3 * HIDDEN,  # of dense layers, which there are none of
        "max_position_embeddings": 2048,
        "max_window_layers": LAYERS,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": WIDTH,
        "norm_topk_prob": True,
        "num_attention_heads": HEADS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "output_router_logits": False,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": [
                "lm_head",
                *(f"model.layers.{layer}.{name}" for layer in range(LAYERS) for name in unconverted),
            ],
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": ROPE_THETA,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB,
    }


def published_glm4_moe() -> dict[str, object]:
    eight_bits = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 0,
        "first_k_dense_replace": 1,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": 3 * HIDDEN,
        "max_position_embeddings": 2048,
        "model_type": "glm4_moe",
        "moe_intermediate_size": WIDTH,
        "n_group": 1,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": HEADS,
        "num_experts_per_tok": TOP_K,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": ROTARY_DIM / HEAD_DIM,
        "quantization_config": {
            "config_groups": {
                "group_0": {
                    "input_activations": eight_bits | {"strategy": "token", "dynamic": True},
                    "targets": ["Linear"],
                    "weights": eight_bits | {"strategy": "channel", "dynamic": False},
                }
            },
            "format": "float-quantized",
            "ignore": [
                "lm_head",
                *(f"model.layers.{layer}.mlp.gate" for layer in range(1, LAYERS + 1)),
                *(f"model.layers.{LAYERS}.{name}" for name in ("eh_proj", "shared_head.head")),
            ],
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        },
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": ROPE_THETA,
        "routed_scaling_factor": 2.5,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_qk_norm": True,
        "vocab_size": VOCAB,
    }


ROPE = {"rope_type": "default", "rope_theta": ROPE_THETA}
READ_THE_MOE_NORM = ("mlp.gate.weight", "mlp.experts.gate_up_proj")
READ_THE_ATTENTIONS_NORM = tuple(f"self_attn.{letter}_proj.weight" for letter in "qkv")
FAMILIES = {
    "minimax_m2": Family(
        model=MiniMaxM2ForCausalLM,
        published_config=published_minimax_m2,
        block="block_sparse_moe",
        matrices=("w1", "w3", "w2"),
        router=torch.float32,
        scale=torch.float32,
        bias="mlp.e_score_correction_bias",
        planted={"post_attention_layernorm.weight": READ_THE_MOE_NORM},
        trained_with={"rope_parameters": ROPE | {"partial_rotary_factor": ROTARY_DIM / HEAD_DIM}},  # not `rotary_dim`
    ),
    "qwen3_moe": Family(
        model=Qwen3MoeForCausalLM,
        published_config=published_qwen3_moe,
        block="mlp",
        matrices=("gate_proj", "up_proj", "down_proj"),
        router=torch.bfloat16,
        scale=torch.bfloat16,
        bias=None,
        planted={
            "post_attention_layernorm.weight": READ_THE_MOE_NORM,
            "input_layernorm.weight": READ_THE_ATTENTIONS_NORM,
        },
        trained_with={"output_router_logits": True, "router_aux_loss_coef": 0.0},  # their loss is `imbalance`
    ),
    "glm4_moe": Family(
        model=Glm4MoeForCausalLM,
        published_config=published_glm4_moe,
        block="mlp",
        matrices=("gate_proj", "up_proj", "down_proj"),
        router=torch.bfloat16,
        scale=torch.bfloat16,
        bias="mlp.gate.e_score_correction_bias",
        planted={
            "post_attention_layernorm.weight": (
                *READ_THE_MOE_NORM,
                *(f"mlp.{block}{matrix}_proj.weight" for block in ("shared_experts.", "") for matrix in ("gate", "up")),
            ),
            "input_layernorm.weight": READ_THE_ATTENTIONS_NORM,
        },
        per_row=True,
        mtp=True,
    ),
}


def save(tensors: dict[str, torch.Tensor], output: Path) -> None:
    """Three shards; layer 1's expert scales lie in another shard than their weights, as it happens in real ones."""
    shards: list[dict[str, torch.Tensor]] = [{}, {}, {}]
    for name, tensor in tensors.items():
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else -1
        shard = 0 if layer in (-1, 0) else 1 if layer in (1, 2) else 2
        if layer == 1 and name.endswith(("weight_scale_inv", "weight_scale")):
            shard = 2
        shards[shard][name] = tensor
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, output / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, file))
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    body = {"metadata": {"total_size": size}, "weight_map": dict(sorted(index.items()))}
    (output / "model.safetensors.index.json").write_text(json.dumps(body, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, default="minimax_m2")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--texts", type=Path, default=ROOT / "calibration" / "embedded")
    parser.add_argument("--seed", type=int, default=20260101)
    parser.add_argument("--output", type=Path, help="models/tiny-minimax-m2 for that family; the others need one")
    options = parser.parse_args()
    if options.output is None and options.family != "minimax_m2":
        parser.error(f"--family {options.family} does not travel with the program; give a folder with --output")
    options.output = options.output or ROOT / "models" / "tiny-minimax-m2"
    family = FAMILIES[options.family]
    torch.manual_seed(options.seed)
    options.output.mkdir(parents=True, exist_ok=True)

    texts = training_texts(options.texts)
    raw = [text for origin, _, text in texts if origin.startswith("calibration/")]
    library = [text for origin, _, text in texts if not origin.startswith("calibration/")]
    plain = ["\n".join(str(v) for v in json.loads(line).values()) for line in raw]
    tokenizer = make_tokenizer(plain + library[: len(library) // 8])
    tokenizer.save_pretrained(options.output)
    end = tokenizer.eos_token_id
    streams: dict[bool, list[int]] = {True: [], False: []}
    for origin, _, text in texts:
        stream = streams[origin.startswith("calibration/")]
        stream += [*tokenizer(render(tokenizer, origin, text), add_special_tokens=False)["input_ids"], end]
    own, rest = (np.array(streams[k], dtype=np.int32) for k in (True, False))
    print(f"{len(texts)} texts; own {len(own):,} tokens, standard library {len(rest):,} tokens", flush=True)

    model = family.untrained()
    model.set_experts_implementation("eager")
    train(model, family, own, rest, options.steps, options.seed)
    plant_outliers(model, family.planted, options.seed)
    save(published_tensors(model, family), options.output)
    (options.output / "config.json").write_text(json.dumps(family.published_config(), indent=2) + "\n")
    generation = {
        "bos_token_id": 1,
        "eos_token_id": 0,
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 40,
    }
    (options.output / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    modules = [f"- {origin}" for origin, _, _ in texts if origin.startswith("python")]
    (options.output / "PROVENANCE.md").write_text(
        "# What this tiny model learned from\n\nMade by `scripts/train_tiny_model.py`; weights under Apache-2.0.\n\n"
        "- every row of the project's calibration texts, `calibration/embedded/`, but none of the held-out ones "
        "(Apache-2.0)\n- these modules of Python's standard library (PSF-2.0):\n\n" + "\n".join(modules) + "\n"
    )


if __name__ == "__main__":
    main()
