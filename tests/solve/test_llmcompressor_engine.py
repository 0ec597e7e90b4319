"""The reference engine against the library's own `oneshot`, and what it promises to the stitch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM
from transformers.masking_utils import create_causal_mask

from quantizers.architectures.architecture import Modules
from quantizers.architectures.matrices import MATRICES
from quantizers.recipe.schema import Awq, Experts
from quantizers.solve.llmcompressor_engine import solve_with_llmcompressor
from quantizers.solve.result import LayerResult
from quantizers.system.errors import QuantizeError

pytest.importorskip("llmcompressor", reason="it takes no transformers after 5.17")

EXPERTS, HIDDEN, WIDTH = 4, 64, 32
GROUP: Final = 32
SHAPES = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
MODULES = Modules(norm="post_attention_layernorm", router="mlp.gate", experts="mlp.experts")
LENGTHS = [17, 20, 23, 26]
SEQUENCES = [torch.randint(0, 96, (1, n), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny_model(layers: int = 1) -> Any:
    """MiniMax-M2 with random weights, and outlier channels in norms that bfloat16 can hold."""
    torch.manual_seed(7)
    config = MiniMaxM2Config(
        vocab_size=96,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.1,
        attn_implementation="eager",
    )
    model = MiniMaxM2ForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            norm = layer.post_attention_layernorm.weight
            norm.copy_((1 + 0.3 * torch.randn(HIDDEN)).abs().bfloat16())
            norm[5], norm[11], norm[40] = 12.0, 0.0, 6.0
            layer.mlp.e_score_correction_bias[3] = -2.0  # expert 3 is never chosen
    return model


@torch.no_grad()
def inputs_of(model: Any, index: int = 0) -> list[dict[str, Any]]:
    """What layer `index` is called with, one sequence at a time."""
    inputs = []
    for sequence in SEQUENCES:
        hidden = model.model.embed_tokens(sequence)
        positions = torch.arange(sequence.shape[1])[None]
        rest = {
            "position_embeddings": model.model.rotary_emb(hidden, positions),
            "attention_mask": create_causal_mask(model.config, hidden, None, None, positions),
            "position_ids": positions,
        }
        for layer in model.model.layers[:index]:
            hidden = layer(hidden, **rest)
        inputs.append({"hidden_states": hidden, **rest})
    return inputs


def solve(model: Any = None, *, awq: Any = None, bits: Any = 4, **options: Any) -> LayerResult:
    """The last layer of `model`, a new tiny one if None; AWQ with a grid of 8 if `awq` is None."""
    model = tiny_model() if model is None else model
    layers = model.model.layers
    settings = Experts(group_size=GROUP, bits=bits, awq=Awq(grid=8) if awq is None else awq)
    inputs = [] if awq is False else inputs_of(model, len(layers) - 1)
    norm = layers[-1].post_attention_layernorm.weight.detach().bfloat16()
    return solve_with_llmcompressor(layers[-1], inputs, settings, MODULES, norm, **options)


def weights_of(solved: LayerResult, matrix: Any) -> torch.Tensor:
    scales = solved.scales[matrix].float().repeat_interleave(GROUP, dim=-1)
    return solved.codes[matrix].float() * scales


def source_weights(layer: Any, matrix: str) -> Any:
    experts = layer.mlp.experts
    if matrix == "down":
        return experts.down_proj.detach()
    return experts.gate_up_proj.detach().chunk(2, dim=1)[0 if matrix == "gate" else 1]


def nearest(weights: torch.Tensor, *, bfloat16_scales: bool) -> torch.Tensor:
    """Min-max group scales and nearest rounding by compressed-tensors: (E, rows, columns), dequantized."""
    from compressed_tensors.quantization import QuantizationArgs, fake_quantize

    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP)
    scales = weights.reshape(*weights.shape[:-1], -1, GROUP).abs().amax(-1) / 7.5
    if bfloat16_scales:
        scales = scales.bfloat16().float()
    zero = torch.zeros_like(scales[0])
    return torch.stack([fake_quantize(w, s, zero, args) for w, s in zip(weights, scales, strict=True)])


@torch.no_grad()
def moe_inputs(layer: Any, inputs: list[dict[str, Any]]) -> list[torch.Tensor]:
    """What the norm is given, one (T, H) a sequence."""
    seen: list[torch.Tensor] = []
    hook = layer.post_attention_layernorm.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    for batch in inputs:
        layer(**batch)
    hook.remove()
    return seen


@torch.no_grad()
def router_logits(layer: Any, states: torch.Tensor) -> Any:
    return layer.mlp.gate(layer.post_attention_layernorm(states), layer.mlp.e_score_correction_bias)[0]


@pytest.mark.parametrize(("pipeline", "compensate"), [("sequential", True), ("independent", False)])
def test_oneshot_on_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipeline: str, compensate: bool
) -> None:
    from llmcompressor import oneshot
    from llmcompressor.core import create_session
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache
    from torch.utils.data import DataLoader

    monkeypatch.setattr(IntermediatesCache, "pin_memory", lambda *_args: None)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    model = tiny_model()
    model.save_pretrained(tmp_path)
    model.config.name_or_path, model.config.dtype = str(tmp_path), torch.float32
    router = ["re:.*mlp.gate$"] if compensate else []
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    scheme = {"targets": ["re:.*experts.*_proj$"], "weights": weights}
    recipe = [
        AWQModifier(
            mappings=[
                AWQMapping(
                    "re:.*post_attention_layernorm$", [*router, "re:.*experts.*gate_proj$", "re:.*experts.*up_proj$"]
                ),
                AWQMapping("re:.*up_proj$", ["re:.*down_proj$"]),
            ],
            n_grid=8,
        ),
        QuantizationModifier(config_groups={"group_0": scheme}),
    ]
    batches: Any = DataLoader([{"input_ids": sequence[0]} for sequence in SEQUENCES], batch_size=1)
    with create_session():
        oneshot(model=model, processor=object(), dataset=batches, recipe=recipe, pipeline=pipeline)
    layer = model.model.layers[0]

    solved = solve(compensate_router=compensate)
    assert torch.equal(solved.norm, layer.post_attention_layernorm.weight.bfloat16())
    if compensate:
        assert solved.router is not None
        live = solved.norm != 0  # where the norm is 0 the library scales the router too, to no effect
        theirs = layer.mlp.gate.weight.detach()[:, live]
        torch.testing.assert_close(solved.router[:, live], theirs, rtol=2**-8, atol=0)
    for matrix in MATRICES:
        for expert in range(EXPERTS):
            linear = getattr(layer.mlp.experts[expert], f"{matrix}_proj")
            scale = linear.weight_scale.bfloat16()
            assert torch.equal(solved.scales[matrix][expert], scale)
            steps = linear.weight.detach() / scale.float().repeat_interleave(GROUP, dim=-1)
            assert torch.equal(solved.codes[matrix][expert], steps.round().clamp(-8, 7).to(torch.int8))
            # and what the library itself would save, in float32: the same but for the scale's rounding
            theirs = linear.weight.detach() / linear.weight_scale.repeat_interleave(GROUP, dim=-1)
            different = solved.codes[matrix][expert] - theirs.round().clamp(-8, 7)
            assert different.abs().max() <= 1
            assert different.abs().mean() < 0.02


def test_every_expert_sees_every_token() -> None:
    calls: dict[torch.nn.Module, list[int]] = {}

    def record(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if type(module).__name__ == "ExpertMLPWithGate":
            calls.setdefault(module, []).append(len(args[0]))

    hook = torch.nn.modules.module.register_module_forward_pre_hook(record)
    try:
        solved = solve()
    finally:
        hook.remove()
    assert len(calls) == EXPERTS
    # the calibration, the block's output to compare with, and one run for each of the 8 scales
    assert all(seen == LENGTHS * 10 for seen in calls.values())
    assert solved.error["expert_tokens"] == sum(LENGTHS)


def test_experts_that_miss_tokens_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmcompressor.modeling.moe import linear_experts

    monkeypatch.setattr(linear_experts, "get_calibrate_all_experts_flag", lambda: False)
    with pytest.raises(QuantizeError, match=rf"expert \d saw \d+ of {sum(LENGTHS)} calibration tokens"):
        solve()


@pytest.mark.parametrize("compensate", [True, False])
def test_only_a_compensated_router_chooses_as_before(compensate: bool) -> None:
    solved = solve(compensate_router=compensate)
    model = tiny_model()
    layer = model.model.layers[0]
    source = layer.post_attention_layernorm.weight.detach().clone()
    router = layer.mlp.gate.weight.detach().clone()
    states = torch.cat(moe_inputs(layer, inputs_of(model)))
    before = router_logits(layer, states)
    with torch.no_grad():
        layer.post_attention_layernorm.weight.copy_(solved.norm)
        if solved.router is not None:
            layer.mlp.gate.weight.copy_(solved.router)
    after = router_logits(layer, states)

    live = solved.norm != 0
    assert not live[11]
    assert torch.equal(solved.smooth[live], (source / solved.norm.float())[live])
    assert torch.equal(solved.smooth[~live], torch.ones(int((~live).sum())))
    assert not torch.equal(solved.smooth, torch.ones(HIDDEN))
    if compensate:
        assert solved.router is not None
        assert torch.equal(solved.router, router * solved.smooth)
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5 * before.abs().max().item())
    else:
        assert solved.router is None
        assert (after - before).abs().mean() > 0.1 * before.std()
        assert (after.argmax(-1) != before.argmax(-1)).any()


def test_shapes_dtypes_and_ranges() -> None:
    bits = 8
    solved = solve(tiny_model(2), awq=Awq(grid=4, duo_scaling=False), bits=bits)
    assert solved.norm.shape == solved.smooth.shape == (HIDDEN,)
    assert (solved.norm.dtype, solved.smooth.dtype) == (torch.bfloat16, torch.float32)
    assert solved.router is not None
    assert (solved.router.shape, solved.router.dtype) == ((EXPERTS, HIDDEN), torch.float32)
    for matrix in MATRICES:
        rows, columns = SHAPES[matrix]
        codes, scales = solved.codes[matrix], solved.scales[matrix]
        assert (codes.shape, codes.dtype) == ((EXPERTS, rows, columns), torch.int8)
        assert (scales.shape, scales.dtype) == ((EXPERTS, rows, columns // GROUP), torch.bfloat16)
        assert codes.min() >= -(2 ** (bits - 1))
        assert codes.max() <= 2 ** (bits - 1) - 1
        assert codes.int().reshape(EXPERTS, rows, -1, GROUP).abs().amax(-1).min() >= 2 ** (bits - 1) - 1
    assert solved.fallbacks == []
    assert solved.error["search_after"] <= solved.error["search_before"]
    assert solved.error["search_down_after"] <= solved.error["search_down_before"]


def test_search_errors_are_those_of_weights_quantized_once() -> None:
    """The library's BasicPipeline leaves fake quantization on in the search: both would be far off."""
    solved = solve()
    model = tiny_model()
    layer = model.model.layers[0]
    experts = layer.mlp.experts
    with torch.no_grad():
        states = [layer.post_attention_layernorm(x) for x in moe_inputs(layer, inputs_of(model))]
        x = torch.cat(states)
        down = source_weights(layer, "down")
        change = nearest(down, bfloat16_scales=False) - down  # (E, H, I)
        gates, ups = x @ source_weights(layer, "gate").mT, x @ source_weights(layer, "up").mT  # (E, T, I)
        hidden = torch.nn.functional.silu(gates) * ups
        down_error = (hidden @ change.mT).square().mean().item()
        before = torch.cat([layer.mlp(y[None])[0] for y in states])
        experts.gate_up_proj.copy_(nearest(experts.gate_up_proj, bfloat16_scales=False))
        block_error = (torch.cat([layer.mlp(y[None])[0] for y in states]) - before).square().mean().item()
    assert solved.error["search_before"] == pytest.approx(block_error, rel=1e-3)
    # w2 is searched after the shared scale was folded, which leaves its input as it was
    assert solved.error["search_down_before"] == pytest.approx(down_error, rel=1e-3)


def test_without_awq_it_is_compressed_tensors_own_rounding() -> None:
    model = tiny_model()
    layer = model.model.layers[0]
    source = layer.post_attention_layernorm.weight.detach().bfloat16()
    expected = {m: nearest(source_weights(layer, m), bfloat16_scales=True) for m in MATRICES}
    solved = solve(model, awq=False)
    for matrix in MATRICES:
        assert torch.equal(weights_of(solved, matrix), expected[matrix])
    assert torch.equal(solved.norm, source)
    assert torch.equal(solved.smooth, torch.ones(HIDDEN))
    assert solved.router is None
    assert (solved.error, solved.fallbacks) == ({}, [])


def test_the_configs_dtype_does_not_round_the_layer() -> None:
    model = tiny_model()
    model.config.dtype = torch.bfloat16  # as in a real config.json, beside a layer materialised in float32
    solved = solve(model)
    expected = solve()
    assert all(torch.equal(solved.codes[m], expected.codes[m]) for m in MATRICES)
    assert all(torch.equal(solved.scales[m], expected.scales[m]) for m in MATRICES)
    assert torch.equal(solved.norm, expected.norm)
    assert solved.error == expected.error


@pytest.mark.parametrize("expert", [0, 3])
def test_an_expert_that_overflows_is_named_and_its_block_not_folded(expert: int) -> None:
    """Expert 3 is never chosen but sees all tokens: the library skips its w2 and only logs that."""
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[0].mlp.experts.gate_up_proj[expert] *= 1e25
    source = model.model.layers[0].post_attention_layernorm.weight.detach().bfloat16()
    solved = solve(model)
    block = ["all experts: no scale for post_attention_layernorm, the MoE block's output is not finite"]
    assert solved.fallbacks == block * (expert == 0) + [f"expert {expert}: no scale for w2, its output is not finite"]
    assert torch.equal(solved.norm, source) == torch.equal(solved.smooth, torch.ones(HIDDEN)) == (expert == 0)


def test_weights_that_are_not_finite_are_an_error() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj[2, 0, 0] = torch.nan
    with pytest.raises(QuantizeError, match="expert 2: a group scale of down_proj is not finite"):
        solve(model, awq=False)


def test_it_is_silent_and_leaves_logging_and_the_session_alone(capsys: pytest.CaptureFixture[str]) -> None:
    from llmcompressor.core import active_session
    from llmcompressor.modeling.moe.context import get_calibrate_all_experts_flag
    from loguru import logger
    from tqdm import tqdm

    session, bar = active_session(), vars(tqdm)["__init__"]
    messages: list[str] = []
    sink = logger.add(messages.append, level="DEBUG", format="{message}")
    capsys.readouterr()  # what the imports above may have said
    try:
        solve()
        logger.debug("still heard")
    finally:
        logger.remove(sink)
    assert messages == ["still heard\n"]
    assert capsys.readouterr() == ("", "")
    assert active_session() is session
    assert not get_calibrate_all_experts_flag()
    assert vars(tqdm)["__init__"] is bar


@pytest.mark.slow
def test_the_first_import_is_silent_too() -> None:
    """By default llm-compressor's import removes all loguru sinks, adds one on standard output, and warns there."""
    program = """
import sys
from loguru import logger
logger.remove()
logger.add(sys.stderr, format="mine: {message}")
from quantizers.solve.llmcompressor_engine import quiet_library
with quiet_library():
    assert "llmcompressor" in sys.modules
logger.info("heard")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1] == "mine: heard"
