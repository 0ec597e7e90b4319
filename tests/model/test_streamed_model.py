"""The streamed forward pass against MiniMax-M2 written out by hand, and against transformers' whole model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import make
from torch import Tensor

from quantizers.architectures.families import architecture_for
from quantizers.architectures.skeleton import replaced_forward
from quantizers.checkpoint.reader import open_folder
from quantizers.model.streamed_model import StreamedModel, require_gate
from quantizers.system.errors import ArchitectureError

# ‖streamed − by hand‖ / ‖by hand‖, float32 against float64. Measured: at most 1.1e-6 over all models and
# layers; without the rotary factor 0.2 to 0.7 after the first layer.
TOLERANCE = 1e-5


class ByHand:
    """MiniMax-M2 in float64, one token and one head at a time where that is plainer.

    Reads the shards itself and shares no code with the program or with transformers.
    """

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors: dict[str, Tensor] = {}
        for shard in sorted(folder.glob("*.safetensors")):
            self.tensors |= load_file(shard)
        self.rotated = self.config["rotary_dim"]  # dimensions of each head

    def weight(self, name: str) -> Tensor:
        """A matrix in float64: FP8 codes times the scale of their block, block by block."""
        stored = self.tensors[f"{name}.weight"]
        if stored.dtype != torch.float8_e4m3fn:
            return stored.double()
        scale = self.tensors[f"{name}.weight_scale_inv"]
        height, width = self.config["quantization_config"]["weight_block_size"]
        result = torch.full(stored.shape, torch.nan, dtype=torch.float64)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                block = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
                result[block] = stored[block].double() * float(scale[i, j])
        assert not bool(result.isnan().any())
        return result

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMS norm over the whole last dimension."""
        mean_square = (x * x).mean(-1, keepdim=True)
        return x / torch.sqrt(mean_square + self.config["rms_norm_eps"]) * self.tensors[f"{name}.weight"].double()

    def rotate(self, head: Tensor, position: int) -> Tensor:
        """The first `rotated` of a head's dimensions, in pairs (i, i + rotated/2), by position · θ^(−2i/rotated)."""
        half, turned = self.rotated // 2, head.clone()
        for i in range(half):
            angle = torch.tensor(position * self.config["rope_theta"] ** (-2 * i / self.rotated), dtype=torch.float64)
            a, b = head[i], head[i + half]
            turned[i] = a * torch.cos(angle) - b * torch.sin(angle)
            turned[i + half] = b * torch.cos(angle) + a * torch.sin(angle)
        return turned

    def attention(self, x: Tensor, at: str) -> Tensor:
        c, length = self.config, len(x)
        heads, kv_heads, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        # One norm over all heads together, before they are split.
        q = self.norm(x @ self.weight(f"{at}.q_proj").T, f"{at}.q_norm").view(length, heads, size)
        k = self.norm(x @ self.weight(f"{at}.k_proj").T, f"{at}.k_norm").view(length, kv_heads, size)
        v = (x @ self.weight(f"{at}.v_proj").T).view(length, kv_heads, size)
        q = torch.stack([torch.stack([self.rotate(head, t) for head in q[t]]) for t in range(length)])
        k = torch.stack([torch.stack([self.rotate(head, t) for head in k[t]]) for t in range(length)])
        mixed = torch.empty(length, heads, size, dtype=torch.float64)
        for head in range(heads):
            group = head // (heads // kv_heads)
            for t in range(length):
                scores = k[: t + 1, group] @ q[t, head] / size**0.5
                mixed[t, head] = torch.softmax(scores, dim=0) @ v[: t + 1, group]
        return mixed.view(length, heads * size) @ self.weight(f"{at}.o_proj").T

    def experts(self, x: Tensor, at: str) -> tuple[Tensor, list[set[int]]]:
        router = self.tensors[f"{at}.gate.weight"].double()
        bias = self.tensors[f"{at}.e_score_correction_bias"].double()
        output, choices = torch.zeros_like(x), []
        for t, token in enumerate(x):
            sigmoid = 1 / (1 + torch.exp(-(router @ token)))
            # The bias helps to choose; it is no part of the weight.
            ranking = sorted(range(len(sigmoid)), key=lambda e: float(sigmoid[e] + bias[e]), reverse=True)
            chosen = ranking[: self.config["num_experts_per_tok"]]
            total = sum(float(sigmoid[e]) for e in chosen)
            for e in chosen:
                w1, w2, w3 = (self.weight(f"{at}.experts.{e}.{name}") for name in ("w1", "w2", "w3"))
                gate = w1 @ token
                output[t] += float(sigmoid[e]) / total * (w2 @ (gate / (1 + torch.exp(-gate)) * (w3 @ token)))
            choices.append(set(chosen))
        return output, choices

    def layer(self, x: Tensor, number: int) -> tuple[Tensor, list[set[int]]]:
        at = f"model.layers.{number}"
        x = x + self.attention(self.norm(x, f"{at}.input_layernorm"), f"{at}.self_attn")
        mixed, choices = self.experts(self.norm(x, f"{at}.post_attention_layernorm"), f"{at}.block_sparse_moe")
        return x + mixed, choices

    def run(self, tokens: Tensor) -> Pass:
        x = torch.stack([self.tensors["model.embed_tokens.weight"][token].double() for token in tokens])
        states, choices = [], []
        for number in range(self.config["num_hidden_layers"]):
            x, chosen = self.layer(x, number)
            states.append(x)
            choices.append(chosen)
        return Pass(states, self.norm(x, "model.norm") @ self.weight("lm_head").T, choices)


@dataclass
class Pass:
    """One sequence: states (T, H) after each layer, logits (T, vocabulary), choices by layer and token."""

    states: list[Tensor]
    logits: Tensor
    choices: list[list[set[int]]]


def layered(folder: Path) -> StreamedModel:
    checkpoint = open_folder(folder)
    facts = architecture_for(checkpoint.config, str(folder))
    return StreamedModel(checkpoint, facts, torch.device("cpu"), torch.float32)


def streamed(folder: Path, tokens: Tensor) -> Pass:
    model = layered(folder)
    x = model.begin(tokens, model.embedding())
    states, choices = [], []
    for number in range(model.facts.num_layers):
        with model.layer(number) as layer:
            x, chosen = model.run(layer, x)
        states.append(x)
        choices.append([set(row) for row in chosen.tolist()])
    return Pass(states, model.final(x) @ model.head().T, choices)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


SHAPES: dict[str, dict[str, Any]] = {
    "published layout": {},
    # Blocks that the FP8 matrices do not fill, one kv head for all, other choices, another quarter rotated.
    "odd sizes": {
        "hidden_size": 192,
        "intermediate_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rotary_dim": 8,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "rope_theta": 5_000_000,
        "rms_norm_eps": 1e-5,
    },
}


@pytest.fixture(params=[*SHAPES, "trained"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "trained":
        yield request.getfixturevalue("tiny_model")
    else:
        yield make(tmp_path / "model", seed=3, **SHAPES[request.param])


def tokens_for(folder: Path, length: int = 12) -> Tensor:
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    return torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(11))


def test_streamed_is_the_model_written_out_by_hand(model: Path) -> None:
    tokens = tokens_for(model)
    found, expected = streamed(model, tokens), ByHand(model).run(tokens)
    assert found.choices == expected.choices
    for number, (a, b) in enumerate(zip(found.states, expected.states, strict=True)):
        assert distance(a, b) < TOLERANCE, f"states after layer {number}"
    assert distance(found.logits, expected.logits) < TOLERANCE
    difference = torch.log_softmax(found.logits, -1) - torch.log_softmax(expected.logits, -1)
    assert float(difference.abs().max()) < 1e-3


@torch.no_grad()
def test_route_sees_what_the_experts_of_the_whole_layer_are_given(tmp_path: Path) -> None:
    """`route` stands in for the experts: input and choice are those of transformers' layer; nothing stays behind."""
    folder = make(tmp_path / "model", seed=5)
    model, tokens = layered(folder), tokens_for(folder)
    states = model.begin(tokens, model.embedding())
    with model.layer(0) as layer:
        seen: list[tuple[Tensor, ...]] = []
        hook = layer.module.mlp.experts.register_forward_pre_hook(lambda _, args: seen.append(args))
        before = layer.module(**model.inputs(layer, states.unsqueeze(0)))[0]
        hook.remove()
        recorded = model.route(layer, model.attend(layer, states))
        after = layer.module(**model.inputs(layer, states.unsqueeze(0)))[0]
    for a, b in zip((recorded.x, recorded.chosen, recorded.weight), seen[0], strict=True):
        assert torch.equal(a, b)
    assert torch.allclose(recorded.weight.sum(-1), torch.ones(len(tokens)))
    assert torch.equal(before, after)
    assert all(parameter.is_meta for parameter in layer.module.parameters())  # freed when the block ended


class Scaled(torch.nn.Embedding):
    """As Gemma's, whose module multiplies."""

    def forward(self, ids: Tensor) -> Tensor:
        return 3 * super().forward(ids)


def test_states_begin_with_the_models_own_embedding_module(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", seed=5)
    model, tokens = layered(folder), tokens_for(folder)
    table = model.embedding()
    model.skeleton.model.set_input_embeddings(Scaled(*table.shape, device="meta"))
    assert torch.equal(model.begin(tokens, table), 3 * table[tokens])
    assert model.skeleton.model.get_input_embeddings().weight.is_meta  # the table is the caller's


def test_memory_that_is_full_is_not_said_to_be_another_kind_of_model(tmp_path: Path) -> None:
    def full(**_: Any) -> None:
        raise torch.OutOfMemoryError

    skeleton = layered(make(tmp_path / "model")).skeleton
    with replaced_forward(skeleton.model, full), pytest.raises(torch.OutOfMemoryError):
        skeleton.calls(4)


def test_experts_that_compute_another_product_are_refused() -> None:
    """gpt-oss clamps and shifts; MiniMax-M2 multiplies plainly."""
    from transformers import GptOssConfig, MiniMaxM2Config
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2Experts

    facts = architecture_for({"model_type": "minimax_m2"}, "x")
    with torch.device("meta"):
        plain, clamped = MiniMaxM2Experts(MiniMaxM2Config()), GptOssExperts(GptOssConfig())
    require_gate(plain, facts, 1)
    with pytest.raises(ArchitectureError, match="GptOssExperts do not compute"):
        require_gate(clamped, facts, 1)
