"""A layer's experts dequantized together, against `read_weight`, which reads one matrix at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from quantizers.architectures.families import architecture_for
from quantizers.checkpoint.loaded_tensors import load_tensors
from quantizers.checkpoint.reader import Checkpoint, open_folder
from quantizers.formats.dequantization import read_weight
from quantizers.model import layer_weights as weights
from quantizers.model.layer_weights import ExpertWeights, layer_weights
from quantizers.model.streamed_model import StreamedModel, load_layer
from quantizers.system.errors import ArchitectureError, CheckpointError

CPU, META = torch.device("cpu"), torch.device("meta")
HIDDEN, WIDTH, EXPERTS = 96, 64, 5
MODULE = "model.layers.0.block_sparse_moe.experts.{}.{}"
MATRICES = ("w1", "w3", "w2")
Tensors = dict[str, torch.Tensor]


def fp8(rows: int, columns: int, block: tuple[int, int], dtype: torch.dtype) -> Tensors:
    codes = torch.randn(rows, columns).mul(50).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": torch.rand(-(-rows // block[0]), -(-columns // block[1])).to(dtype)}


def per_row(rows: int, columns: int) -> Tensors:
    return {"weight": fp8(rows, columns, (32, 32), torch.float32)["weight"], "weight_scale": torch.rand(rows, 1)}


def packed(bits: int, rows: int, columns: int) -> Tensors:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    half = 2 ** (bits - 1)
    codes = torch.randint(-half, half, (rows, columns), dtype=torch.int8)
    shape, scale = torch.tensor([rows, columns]), torch.rand(rows, columns // 32).bfloat16()
    return {"weight_packed": pack_to_int32(codes, bits), "weight_scale": scale, "weight_shape": shape}


def integers(rows: int, columns: int) -> Tensors:
    return {"weight": torch.randint(-128, 128, (rows, columns), dtype=torch.int8), "weight_scale": torch.rand(rows, 1)}


# What is stored for matrix number n of a layer, by its rows and columns.
FORMS: dict[str, Callable[[int, int, int], Tensors]] = {
    "FP8 in blocks": lambda n, r, c: fp8(r, c, (32, 32), torch.float32),
    "FP8 with bfloat16 scales": lambda n, r, c: fp8(r, c, (32, 32), torch.bfloat16),
    "FP8 with either dtype of scales": lambda n, r, c: fp8(r, c, (32, 32), (torch.bfloat16, torch.float32)[n % 2]),
    "FP8 with a scale per row": lambda n, r, c: per_row(r, c),
    "bfloat16": lambda n, r, c: {"weight": torch.randn(r, c).bfloat16()},
    "float16": lambda n, r, c: {"weight": torch.randn(r, c).half()},
    "float32": lambda n, r, c: {"weight": torch.randn(r, c)},
    "4 bits": lambda n, r, c: packed(4, r, c),
    "8 bits": lambda n, r, c: packed(8, r, c),
    "integers of another program": lambda n, r, c: integers(r, c),
    "each another": lambda n, r, c: (packed(4, r, c), per_row(r, c), fp8(r, c, (32, 32), torch.float32))[n % 3],
}


def stored(folder: Path, form: str, block: tuple[int, int] = (32, 32), **changes: Tensors) -> Checkpoint:
    """A layer whose experts are stored in a form; `changes` replace what a matrix `expert_w` is stored as."""
    torch.manual_seed(7)
    quantization = {"quant_method": "fp8", "weight_block_size": list(block)}
    config = tiny.config(
        hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=EXPERTS, num_hidden_layers=1,
        quantization_config=quantization,
    )  # fmt: skip
    tensors = {name: t for name, t in tiny.tensors(config).items() if ".experts." not in name}
    for name in [name for name in tensors if name.endswith("_scale_inv")]:  # the attention in these blocks
        weight = name.removesuffix("_scale_inv")
        tensors |= {
            f"{weight.removesuffix('.weight')}.{key}": t
            for key, t in fp8(*tensors[weight].shape, block, torch.float32).items()
        }
    for expert in range(EXPERTS):
        for n, matrix in enumerate(MATRICES):
            shape = (HIDDEN, WIDTH) if matrix == "w2" else (WIDTH, HIDDEN)
            made = changes.get(f"{expert}_{matrix}") or FORMS[form](3 * expert + n, *shape)
            if block != (32, 32) and "weight_scale_inv" in made:
                made = fp8(*shape, block, torch.float32)
            tensors |= {f"{MODULE.format(expert, matrix)}.{part}": t for part, t in made.items()}
    return open_folder(tiny.write(folder / "model", config, tensors))


def experts_of(checkpoint: Checkpoint, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> ExpertWeights:
    facts = architecture_for(checkpoint.config, "config.json")
    return ExpertWeights(checkpoint, facts, 0, device, dtype)


@pytest.fixture(autouse=True, params=[40, 2 * WIDTH])
def bands(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a matrix is filled in several, as large ones are on a CPU, or two together, as small ones are."""
    monkeypatch.setattr(weights, "BAND", 4 * HIDDEN * request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_a_batch_has_the_numbers_of_its_matrices(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Bit for bit, in batches that do not divide the experts."""
    checkpoint = stored(tmp_path, form)
    routed = experts_of(checkpoint, dtype=dtype)
    for first, last in ((0, 2), (2, 5)):
        gate_up, down = routed.batch(range(first, last))
        assert gate_up.dtype == down.dtype == dtype
        for expert in range(first, last):
            w1, w3, w2 = (read_weight(checkpoint, MODULE.format(expert, m), CPU).to(dtype) for m in MATRICES)
            assert torch.equal(gate_up[expert - first], torch.cat([w1, w3]))
            assert torch.equal(down[expert - first], w2)
    routed.require_finite()


@pytest.mark.on_device
@pytest.mark.parametrize("form", FORMS)
def test_a_device_makes_the_numbers_that_a_cpu_makes(form: str, device: torch.device, tmp_path: Path) -> None:
    """In another thread as well, as an audit does."""
    checkpoint, some = stored(tmp_path, form), [3, 0, 4]
    here, there = (experts_of(checkpoint, where, torch.bfloat16) for where in (CPU, device))
    with ThreadPoolExecutor(1) as thread:
        for found in (there.batch(some), thread.submit(there.batch, some).result()):
            for own, wanted in zip(found, here.batch(some), strict=True):
                assert torch.equal(own.cpu(), wanted)
    there.require_finite()


@pytest.mark.parametrize("block", [(32, 64), (128, 128), (33, 7)])
def test_blocks_of_any_size(block: tuple[int, int], tmp_path: Path) -> None:
    """Whole or partial, in rows and in columns."""
    checkpoint = stored(tmp_path, "FP8 in blocks", block)
    gate_up, down = experts_of(checkpoint).batch(range(EXPERTS))
    for expert in range(EXPERTS):
        w1, w3, w2 = (read_weight(checkpoint, MODULE.format(expert, m), CPU) for m in MATRICES)
        assert torch.equal(gate_up[expert], torch.cat([w1, w3]))
        assert torch.equal(down[expert], w2)


def test_on_an_accelerator_nothing_waits(tmp_path: Path) -> None:
    """A look at a number would fail on the meta device."""
    checkpoint = stored(tmp_path, "FP8 in blocks")
    source = load_tensors(checkpoint, checkpoint.tensors).to(META)
    gate_up, down = experts_of(source, META, torch.bfloat16).batch(range(1, 4))
    assert (gate_up.shape, down.shape) == ((3, 2 * WIDTH, HIDDEN), (3, HIDDEN, WIDTH))


def spoiled(form: str, value: float) -> Tensors:
    """A w1 or w3 with such a number: in the scale if there is one."""
    made = FORMS[form](0, WIDTH, HIDDEN)
    key = next((key for key in made if key in ("weight_scale_inv", "weight_scale")), "weight")
    made[key][-1, -1] = value
    return made


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("form", ["FP8 in blocks", "FP8 with a scale per row", "bfloat16", "float32", "4 bits"])
def test_a_number_that_is_not_finite_is_named_in_the_words_of_read_weight(
    form: str, value: float, tmp_path: Path
) -> None:
    checkpoint = stored(tmp_path, form, **{"3_w3": spoiled(form, value)})
    with pytest.raises(CheckpointError) as caught:
        read_weight(checkpoint, MODULE.format(3, "w3"), CPU)
    routed = experts_of(checkpoint)
    routed.batch(range(3))
    routed.require_finite()  # the batches so far are
    routed.batch(range(3, 5))
    with pytest.raises(CheckpointError) as found:
        routed.require_finite()
    assert str(found.value) == str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight": torch.ones(WIDTH, HIDDEN).to(torch.float8_e4m3fn)}, "is FP8 but has no weight_scale_inv"),
        (fp8(WIDTH, HIDDEN, (16, 32), torch.float32), r"weight_scale_inv has shape \[4, 3\]"),
        ({"weight": torch.ones(WIDTH, HIDDEN - 32)}, r"a weight of shape \[64, 64\], but .* need \[64, 96\]"),
        ({"weight": torch.ones(WIDTH, HIDDEN), "bias": torch.ones(WIDTH)}, "bias is not zero"),
        ({"bias": torch.zeros(WIDTH)}, "missing"),
    ],
)
def test_a_wrong_header_is_refused_before_anything_is_dequantized(change: Tensors, said: str, tmp_path: Path) -> None:
    checkpoint = stored(tmp_path, "FP8 in blocks", **{"4_w1": change})
    with pytest.raises(CheckpointError, match=said) as caught:
        experts_of(checkpoint)
    assert MODULE.format(4, "w1") in str(caught.value)


def test_a_wrong_shape_in_another_format_is_refused(tmp_path: Path) -> None:
    checkpoint = stored(tmp_path, "FP8 in blocks", **{"4_w1": integers(WIDTH, HIDDEN - 1)})
    with pytest.raises(CheckpointError, match=r"experts.4.w1: a weight of shape"):
        experts_of(checkpoint).batch(range(EXPERTS))


def test_a_layer_without_its_experts_attends_and_routes(tmp_path: Path) -> None:
    """As the whole one does; the experts' parameters need no memory, and can be given back later."""
    checkpoint = stored(tmp_path, "FP8 in blocks")
    facts = architecture_for(checkpoint.config, "config.json")
    model = StreamedModel(checkpoint, facts, CPU, torch.float32)
    states = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1))
    with model.layer(0) as layer:
        residual = model.attend(layer, states)
        wanted = model.route(layer, residual)
        model.release_experts(layer)
        kinds = {name: parameter.device.type for name, parameter in layer.module.named_parameters()}
        assert {name for name, kind in kinds.items() if kind == "meta"} == {
            f"{facts.modules.experts}.{last}" for last in ("gate_up_proj", "down_proj")
        }
    with model.layer(0, experts=False) as layer:
        assert {name: parameter.device.type for name, parameter in layer.module.named_parameters()} == kinds
        assert torch.equal(model.attend(layer, states), residual)
        found = model.route(layer, residual)
        assert torch.equal(found.x, wanted.x)
        assert torch.equal(found.chosen, wanted.chosen)
        assert torch.equal(found.weight, wanted.weight)
        experts: Any = layer.module.get_submodule(facts.modules.experts)
        assert torch.equal(experts.act_fn(states), torch.nn.functional.silu(states))
    whole = layer_weights(checkpoint, facts, 0, CPU, torch.float32)
    without = layer_weights(checkpoint, facts, 0, CPU, torch.float32, experts=False)
    assert whole.keys() - without.keys() == {name for name, kind in kinds.items() if kind == "meta"}
    short = {name: t for name, t in without.items() if name != "input_layernorm.weight"}
    module = model.skeleton.layer(0)
    with pytest.raises(ArchitectureError, match=r"needs input_layernorm\.weight"):
        load_layer(module, short, facts, whole.keys() - without.keys())
    with pytest.raises(ArchitectureError, match=r"gate_up_proj|down_proj"):
        load_layer(module, without, facts)
