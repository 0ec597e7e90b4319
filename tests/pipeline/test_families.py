"""Every family, from a tiny model in its published layout to a proven output; one run of each, shared by its tests.

The oracles know nothing of the families' facts: transformers' whole models, which transformers fills by itself, and
compressed-tensors' own unpacking.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import families
import pytest
import runs
import tiny
import torch
from commands import Command
from edited import edit
from safetensors import safe_open
from source_forms import rewrite
from torch import Tensor
from whole_models import finished_weights, run_whole, source_weights, stored

from quantizers.architectures.families import known
from quantizers.checkpoint.reader import open_folder
from quantizers.model.streamed_model import StreamedModel
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.job import prepare
from quantizers.planning.plan import file_size, index_json
from quantizers.repair.stitch import stitch_experts
from quantizers.serving.check import OWN_HEAD
from quantizers.stitch.audit.checkpoint import verify
from quantizers.system.errors import CheckpointError

CPU = torch.device("cpu")
NORM = "model.layers.1.post_attention_layernorm.weight"
# The block of layer 1 and the matrices of its experts, under published names: w1, w3 and w2.
BLOCKS = {
    "minimax_m2": ("model.layers.1.block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("model.layers.1.mlp", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("model.layers.1.block_sparse_moe", ("w1", "w3", "w2")),
} | dict.fromkeys(
    ("glm4_moe", "deepseek_v3", "kimi_k2", "glm4_moe_lite"),
    ("model.layers.1.mlp", ("gate_proj", "up_proj", "down_proj")),
)
# Tensors that keep their bytes, in every layer, besides in one with experts, in one without, and in one that predicts
# further tokens.
KEPT = {
    "minimax_m2": (8 + 3, 1, 0, 0),
    "qwen3_moe": (8 + 3, 0, 6 + 1, 0),  # the norm of a dense layer too, into which nothing is folded
    "mixtral": (4 + 1, 0, 0, 0),
    "glm4_moe": (8 + 2 + 2 + 3, 2 + 6, 6, 15 + 8 + 48 + 6),
    "deepseek_v3": (10 + 4, 2 + 6, 6, 14 + 8 + 48 + 6),
    "deepseek_v3 tied": (8 + 3, 2 + 6, 6, 11 + 8 + 48 + 6),
    "kimi_k2": (10 + 4, 2 + 6, 6, 0),
    "glm4_moe_lite": (5 + 4, 2 + 3, 3, 9 + 5 + 24 + 6),
}
FOLDING = [
    "minimax_m2", "qwen3_moe", "mixtral", "mixtral with windows", "qwen3_moe with a dense layer and windows",
    "qwen3_moe tied",
]  # fmt: skip
ATTENTION = {"mixtral": "plain", "glm4_moe": "FP8 per channel", "glm4_moe_lite": "plain"}  # else FP8 in blocks


class Made(runs.Made):
    """A family's run, and the family's facts that its tests need."""

    @property
    def dense(self) -> list[int]:
        """The layers without experts."""
        config = json.loads((self.model / "config.json").read_text())
        return config.get("mlp_only_layers") or list(range(config.get("first_k_dense_replace", 0)))

    @property
    def folds(self) -> bool:
        return self.name in FOLDING

    @property
    def family(self) -> str:
        return families.family_of(self.name)


QUICK = ("deepseek_v3",)  # with each kind of layer; MiniMax-M2 is what the other tests are about
# Latent attention and layers as DeepSeek-V3's, and windows as Qwen3-MoE's.
ALIKE = ("kimi_k2", "glm4_moe_lite", "mixtral with windows")


def slow_but(quick: Collection[str], models: Iterable[str]) -> list[Any]:
    slow = {name: pytest.mark.every if name in ALIKE else pytest.mark.slow for name in models if name not in quick}
    return [pytest.param(name, marks=[slow[name]] if name in slow else ()) for name in models]


@pytest.fixture(
    scope="module", params=slow_but(QUICK, [name for name in families.MODELS | families.TIED if name != "qwen3_moe"])
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """GPTQ, which takes most of the time, rounds one of them; it sees a matrix, of whatever family."""
    folder = tmp_path_factory.mktemp("made")
    families.write_job(folder, request.param, rounding="gptq" if request.param == "minimax_m2" else "nearest")
    return Made(folder, request.param, runs.report_of(runs.JobFolder(folder)))


@pytest.fixture(scope="module")
def whole(made: Made) -> Any:
    """The source in memory, by transformers."""
    return families.whole_model(*source_weights(made.model))


@pytest.fixture
def streamed(made: Made) -> StreamedModel:
    return StreamedModel(open_folder(made.model), made.job.facts, CPU, torch.float32)


def test_every_family_that_is_known_is_tested() -> None:
    assert set(known()) == set(families.CONFIGS) == set(BLOCKS) == set(map(families.family_of, KEPT))


# What is computed ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_streamed_model_is_transformers_whole_model(made: Made, whole: Any, streamed: StreamedModel) -> None:
    text = made.texts("held-out")[0]
    assert len(text) > 2 * families.MODELS.get(made.name, {}).get("sliding_window", 0), "a window would not show"
    expected = run_whole(whole, [text])
    states = streamed.begin(text, streamed.embedding())
    for number in range(streamed.facts.num_layers):
        with streamed.layer(number) as layer:
            states, chosen = streamed.run(layer, states)
        wanted = expected.states[number][0]
        assert float((states.double() - wanted).norm() / wanted.norm()) < 1e-5
        assert (chosen is None) == (number in made.dense)
        if chosen is not None:
            assert [set(row) for row in chosen.tolist()] == expected.choices[number][0]
    logs = torch.log_softmax((streamed.final(states) @ streamed.head().mT).double(), dim=-1)
    assert float((logs - expected.logs[0]).abs().max()) < 1e-5 * float(expected.logs[0].abs().max())


def test_the_kl_is_that_of_the_output_as_the_library_unpacks_it(made: Made, whole: Any) -> None:
    texts = made.texts("held-out")
    source, candidate = (
        run_whole(whole, texts),
        run_whole(families.whole_model(*finished_weights(made.output)), texts),
    )
    parts = [(p[:-1].exp() * (p - q)[:-1]).sum(-1) for p, q in zip(source.logs, candidate.logs, strict=True)]
    kl = float(torch.cat(parts).mean())
    assert kl > 1e-3, "a comparison of two equal models would prove nothing"
    assert made.report["kl"]["mean"] == pytest.approx(kl, abs=1e-5)


# What is written -----------------------------------------------------------------------------------


def test_the_output_is_what_the_plan_says_to_the_byte(made: Made) -> None:
    plan = made.job.plan
    for file, specs in plan.shards().items():
        assert (made.output / file).stat().st_size == file_size(specs)
    written = {name: (info.dtype, info.shape) for name, info in open_folder(made.output).tensors.items()}
    assert written == {name: (s.dtype, s.shape) for part in plan.shards().values() for name, s in part.items()}
    assert (made.output / "model.safetensors.index.json").read_text() == index_json(plan)


def test_everything_but_experts_folded_norms_and_their_routers_has_the_sources_bytes(made: Made) -> None:
    own, source = stored(made.model)
    output = stored(made.output)[1]
    kept = 0
    for name, tensor in source.items():
        in_layers = name.startswith("model.layers.") and not families.is_mtp(own, name)
        folded = name.endswith(("post_attention_layernorm.weight", ".gate.weight")) and made.folds
        if in_layers and (".experts." in name or (folded and int(name.split(".")[2]) not in made.dense)):
            continue
        found = output[name.replace("weight_scale_inv", "weight_scale")]
        assert found.dtype == tensor.dtype
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), name
        kept += 1
    every, moe, dense, mtp = KEPT.get(made.name, KEPT[made.family])
    number, outside = len(made.dense), 2 if own["tie_word_embeddings"] else 3
    assert kept == outside + 3 * every + (3 - number) * moe + number * dense + mtp
    assert all(".self_attn." not in name or "_proj.weight" not in name or not name.endswith("_inv") for name in output)


@pytest.mark.parametrize("made", slow_but(QUICK, FOLDING), indirect=True)
def test_norm_and_router_change_by_one_scale_in_the_dtype_of_the_server(made: Made) -> None:
    """gate' = gate * norm / norm' in float32, rounded once where servers hold it in bfloat16."""
    source, output = stored(made.model)[1], stored(made.output)[1]
    router = f"{BLOCKS[made.family][0]}.gate.weight"
    ratio = source[NORM].float() / output[NORM].float()
    assert output[NORM].dtype == torch.bfloat16
    assert float((ratio - 1).abs().max()) > 0.1
    dtype = torch.float32 if made.family == "minimax_m2" else torch.bfloat16
    assert output[router].dtype == dtype
    assert torch.equal(output[router], (source[router].float() * ratio).to(dtype))


# What verify finds ---------------------------------------------------------------------------------


def changed_byte(name: str, byte: int) -> Callable[[dict[str, Tensor]], object]:
    return lambda t: t[name].view(torch.uint8).view(-1)[byte : byte + 1].bitwise_xor_(0x10)


def scaled(name: str, number: int, factor: float) -> Callable[[dict[str, Tensor]], object]:
    return lambda t: t[name].view(-1)[number : number + 1].mul_(factor)


def swapped(*names: str) -> Callable[[dict[str, Tensor]], object]:
    def swap(t: dict[str, Tensor]) -> None:
        t[names[0]], t[names[1]] = t[names[1]], t[names[0]]

    return swap


Tampering = tuple[str, Callable[[dict[str, Tensor]], object], str]


def tamperings(made: Made) -> list[list[Tampering]]:
    """The tensor by whose shard a change is made, the change, and what is said of it; in copies of the output."""
    block, (w1, w3, w2) = BLOCKS[made.family]
    router, bias, shared = (f"{block}.{n}" for n in ("gate.weight", "gate.e_score_correction_bias", "shared_experts"))
    attention, first = (f"model.layers.1.{n}.weight" for n in ("self_attn.o_proj", "input_layernorm"))
    packed, scale, zeros = (f"{block}.experts.1.{w1}.weight_{n}" for n in ("packed", "scale", "zero_point"))
    word, two = f"{block}.experts.2.{w2}.weight_packed", [f"{block}.experts.{n}.{w3}.weight_packed" for n in (0, 1)]
    other = f"{block}.experts.3.{w1}.weight_scale"
    original = open_folder(made.model).tensor(router)
    values: list[Tampering] = [
        (attention, changed_byte(attention, 3), f"{attention}: bytes differ"),
        (first, scaled(first, 4, 1.01), f"{first}: bytes differ"),
        (router, scaled(router, 9, 1.01), f"{router}: "),
        (word, changed_byte(word, 9), f"{word}: changed since the run wrote it"),
        (two[0], swapped(*two), f"{two[0]}: "),
        (other, scaled(other, 0, torch.nan), other.removesuffix(".weight_scale")),
    ]
    added = {zeros: torch.zeros(4).int()}
    more: Tampering = (packed, lambda t: t.update(added), f"{zeros}: no tensor of the source accounts for it")
    fewer: Tampering = (scale, lambda t: t.pop(scale), f"{scale}: missing")
    if made.folds:
        back: Tampering = (router, lambda t: t.update({router: original.to(t[router].dtype)}), f"{router}: not comp")
        return [values, [(NORM, scaled(NORM, 7, 1.5), f"{router}: "), fewer], [back, more]]
    up, stored_scale = f"{shared}.up_proj.weight", attention + "_scale"
    kept: list[Tampering] = [
        (NORM, scaled(NORM, 7, 1.5), f"{NORM}: bytes differ"),
        (bias, changed_byte(bias, 2), f"{bias}: bytes differ"),
        (up, changed_byte(up, 17), f"{up}: bytes differ"),
    ]
    if ATTENTION.get(made.family) != "plain":
        kept.append((stored_scale, scaled(stored_scale, 0, 2.0), f"{stored_scale}: bytes differ"))
    return [values, [*kept, fewer], [more]]


def test_tampering_is_found_and_named(made: Made, tmp_path: Path) -> None:
    source = open_folder(made.model)
    for number, tampered in enumerate(tamperings(made)):
        copy = shutil.copytree(made.output, tmp_path / str(number))
        for tensor, change, _ in tampered:
            edit(copy, tensor, change)
        found = verify(copy, source, CPU).differences
        for tensor, _, expected in tampered:
            assert any(expected in line for line in found), (tensor, found)


def test_servers_read_it_as_it_is_stored(made: Made, command: Command) -> None:
    assert command("verify", made.output, "--source", made.model, "--json") == 0
    consumers = json.loads(command.out)["consumers"]
    own_head = {"qwen3_moe tied": "SGLang", "deepseek_v3 tied": "vLLM 0.32+, vLLM 0.14-0.31, SGLang"}.get(made.name)
    assert [(row["engine"], row["consequence"]) for row in consumers["findings"]] == [(own_head, OWN_HEAD)] * bool(
        own_head
    )
    served = [row for engine, row in consumers["schemes"].items() if engine != "stored as"]
    assert len(served) == 4
    assert {row["experts"] for row in served} == {"INT4 group 32"}
    attention = ATTENTION.get(made.family, "FP8 block 128x128")
    assert {row["attention q,k,v"] for row in served} == {attention}
    assert {row["dense MLP"] for row in served} == {attention if made.dense else "-"}
    shared = made.family in ("glm4_moe", "deepseek_v3", "kimi_k2", "glm4_moe_lite")
    assert {row["shared experts"] for row in served} == {attention if shared else "-"}
    beyond = attention if KEPT[made.family][3] else "-"
    for engine, row in consumers["schemes"].items():
        if engine != "stored as":
            expected = "-" if engine == "transformers" else beyond  # it builds no such layer
            assert (row["MTP linear"], row["MTP experts"]) == (expected, expected), engine


# Without a fold ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "made",
    ["minimax_m2", pytest.param("qwen3_moe with a dense layer and windows", marks=pytest.mark.every)],
    indirect=True,
)
def test_without_a_fold_norm_and_router_keep_their_bytes_and_verify_demands_it(made: Made, tmp_path: Path) -> None:
    rounding = made.job.recipe.experts.rounding  # or else the two errors below would tell of it
    job = prepare(str(families.write_job(tmp_path, made.name, awq={"fold": False}, rounding=rounding)))
    assert not job.plan.folds
    report = run(job, Options(tmp_path / "output", CPU))
    assert report["audit"]["differences"] == []
    source, output = stored(tmp_path / "model")[1], stored(tmp_path / "output")[1]
    router = f"{BLOCKS[made.family][0]}.gate.weight"
    for name in (NORM, router):
        assert torch.equal(source[name].view(torch.uint8), output[name].view(torch.uint8))
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "output", copy)
        edit(copy, name, lambda t, name=name: t[name].view(-1)[1:2].mul_(1.5))
        found = verify(copy, open_folder(tmp_path / "model"), CPU).differences
        assert any(line.startswith(f"{router}: " if name == NORM else f"{name}: bytes differ") for line in found), found
        shutil.rmtree(copy)
    assert report["layers"][1]["error"]["down_search_after"] < report["layers"][1]["error"]["down_search_before"]
    assert "norm_search_after" not in report["layers"][1]["error"]
    # Planted outliers are what the fold is for. (KL on so few texts says as much, but not always.)
    with_fold, without = (layers["layers"][1]["error"]["gate_up_rounding"] for layers in (made.report, report))
    print(f"{made.family}: {with_fold:.4f} with a fold, {without:.4f} without")
    assert with_fold < without


# Layers that predict further tokens ----------------------------------------------------------------

MTP = ["deepseek_v3", "glm4_moe", "glm4_moe_lite"]


@pytest.mark.parametrize("made", slow_but(QUICK, MTP), indirect=True)
def test_a_layer_that_predicts_further_tokens_has_a_shard_of_its_own(made: Made, tmp_path: Path) -> None:
    """With every tensor of the source in it; a byte of one of its experts that changes is found."""
    shard = made.output / "model-00004-of-00005.safetensors"
    own, source = stored(made.model)
    with safe_open(shard, "pt") as opened:
        names = set(opened.keys())
    mtp = {name.replace("weight_scale_inv", "weight_scale") for name in source if families.is_mtp(own, name)}
    assert names == mtp
    copy = tmp_path / "copy"
    shutil.copytree(made.output, copy)
    name = "model.layers.3.mlp.experts.5.down_proj.weight"
    edit(copy, name, lambda t: t[name].view(torch.uint8).view(-1)[5:6].bitwise_xor_(1))
    found = verify(copy, open_folder(made.model), CPU).differences
    assert any(line.startswith(f"{name}: bytes differ") for line in found), found


@pytest.mark.slow
def test_a_source_without_the_layers_that_its_config_speaks_of_is_quantized(tmp_path: Path) -> None:
    """As copies by other tools are; but half of such a layer is refused."""
    recipe = families.write_job(tmp_path, "glm4_moe")
    own, tensors = stored(tmp_path / "model")
    mtp = [name for name in tensors if families.is_mtp(own, name)]
    edit(tmp_path / "model", mtp[0], lambda t: t.pop(mtp[0]))
    with pytest.raises(CheckpointError, match=re.escape(f"{mtp[0]} is missing")):
        prepare(str(recipe))
    rewrite(tmp_path / "model", own, {name: t for name, t in tensors.items() if name not in mtp})
    report = run(prepare(str(recipe)), Options(tmp_path / "output", CPU))
    assert report["audit"]["differences"] == []
    assert report["consumers"]["findings"] == []


# Stitched ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "made", ["mixtral", "qwen3_moe with a dense layer and windows", "glm4_moe", "deepseek_v3"], indirect=True
)
def test_stitching_its_own_experts_gives_the_output_again(made: Made, tmp_path: Path) -> None:
    """From an experts' checkpoint as others make it of a bfloat16 copy: no FP8, and no layer beyond the last."""
    own, output = stored(made.output)
    tensors = {name: t.bfloat16() for name, t in source_weights(made.model)[1].items()}
    kept = {n for n in tensors if not families.is_mtp(own, n)}
    written = {n: t for n, t in output.items() if n in kept and ("norm" in n or n.endswith("gate.weight"))}
    packed = {n: t for n, t in output.items() if f"{n.rpartition('.')[0]}.weight_packed" in output}
    experts = {n: tensors[n] for n in kept if f"{n.removesuffix('.weight')}.weight_packed" not in output}
    groups = own["quantization_config"]["config_groups"]
    section = own["quantization_config"] | {"config_groups": {"routed_experts": groups["routed_experts"]}}
    folder = tiny.write(tmp_path / "experts", own | {"quantization_config": section}, experts | written | packed)
    stitch_experts(made.model, folder, tmp_path / "output", device="cpu", repair_router=made.folds)
    found = stored(tmp_path / "output")[1]
    assert found.keys() == output.keys()
    assert [n for n, t in output.items() if not torch.equal(t.view(torch.uint8), found[n].view(torch.uint8))] == []


# The library's engine ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "fold"),
    [
        pytest.param("qwen3_moe with a dense layer and windows", None, marks=pytest.mark.every),
        ("mixtral", None),
        ("mixtral", False),
        ("glm4_moe", None),
    ],
)
def test_the_library_is_given_the_readers_that_the_facts_name(model: str, fold: bool | None, tmp_path: Path) -> None:
    """llm-compressor 0.14 has no mapping for Mixtral at all; here it folds into the norm and compensates the router.

    Where a shared expert reads the norm too, there are scales between up and down alone.
    """
    folded = fold is None and model in FOLDING
    awq = {"grid": 5} | ({} if fold is None else {"fold": fold})
    recipe = families.write_job(tmp_path, model, engine="llmcompressor", awq=awq)
    report = run(prepare(str(recipe)), Options(tmp_path / "output", CPU))
    assert report["audit"]["differences"] == []
    source, output = stored(tmp_path / "model")[1], stored(tmp_path / "output")[1]
    router = f"{BLOCKS[families.family_of(model)][0]}.gate.weight"
    ratio = source[NORM].float() / output[NORM].float()
    assert bool((ratio != 1).any()) == folded
    assert torch.equal(output[router], (source[router].float() * ratio).bfloat16())
    error = report["layers"][1]["error"]
    assert error["search_down_after"] < error["search_down_before"]
    assert ("search_after" in error) == folded


# Layers without experts ----------------------------------------------------------------------------


def test_a_dense_layer_has_no_experts_anywhere_in_the_report(made: Made) -> None:
    report = made.report
    with_experts = [layer for layer in range(3) if layer not in made.dense]
    assert report["plan"]["dense_layers"] == made.dense
    assert [row["layer"] for row in report["coverage"]["per_layer"]] == with_experts
    assert [layer for layer, share in enumerate(report["router"]["agreement"]) if share is not None] == with_experts
    assert len(report["hidden_error"]) == 3
    for layer in report["layers"]:
        assert bool(layer["error"]) == (layer["layer"] in with_experts)
    page = (made.output / "report.html").read_text()
    coverage = page.partition('id="coverage"')[2].partition("</section>")[0]
    assert [int(layer) for layer in re.findall(r"<tr>\s*<td[^>]*>(\d+)</td>", coverage)] == with_experts
