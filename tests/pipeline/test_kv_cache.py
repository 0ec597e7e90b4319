"""Scales for an FP8 cache of keys and values: what is written, what it costs, and what is refused.

The oracles are transformers' whole models with a cache of its own, which gets keys and values past the attention
interface, and compressed-tensors' rounding.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import pytest
import runs
import tiny
import torch
import transformers
import zoo
from commands import Command
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from edited import edit
from packaging.version import Version
from runs import change
from server_stand_in import ServerStandIn
from torch import Tensor
from transformers import DynamicCache
from whole_models import finished_weights, source_weights, stored

from quantizers.checkpoint.reader import open_folder
from quantizers.model.kv_cache import cached, scales_of
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.gpus import parse_gpus
from quantizers.planning.job import Job, prepare
from quantizers.serving.memory import fit, serving_model
from quantizers.stitch.audit.checkpoint import verify

CPU = torch.device("cpu")
# The argument has another name since transformers 5.24, if not before.
NAMES = inspect.signature(transformers.MiniMaxM2ForCausalLM.forward).parameters
CACHE = "past_key_values" if "past_key_values" in NAMES else "cache"
SCALE = "model.layers.1.self_attn.k_scale"
FP8 = QuantizationArgs(num_bits=8, type="float", strategy="tensor", symmetric=True)


def write_job(folder: Path, model: str) -> Path:
    recipe = families.write_job(folder, model, rounding="nearest")
    change(recipe, lambda body: body.update(kv_cache="fp8"))
    return recipe


# With biases of keys and values, windows, and a layer without experts.
MODELS = ("minimax_m2", "glm4_moe", "qwen3_moe with a dense layer and windows")


@pytest.fixture(
    scope="module", params=[MODELS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS[1:])]
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> runs.Made:
    folder = tmp_path_factory.mktemp("made")
    write_job(folder, request.param)
    return runs.Made(folder, request.param, runs.report_of(runs.JobFolder(folder)))


class RoundedCache(DynamicCache):
    """A cache that rounds as compressed-tensors does, with the scales (2,) of each layer."""

    def __init__(self, scales: dict[int, Tensor]) -> None:
        super().__init__()
        self.scales = scales

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
        both = (
            fake_quantize(one, scale.view(1), torch.zeros(1), FP8)
            for one, scale in zip((keys, values), self.scales[layer_idx], strict=True)
        )
        result: tuple[Tensor, Tensor] = super().update(*both, layer_idx, *rest, **named)
        return result


def log_probabilities(model: Any, text: Tensor, cache: DynamicCache) -> Tensor:
    logits = model(text.unsqueeze(0), **{CACHE: cache}, use_cache=True).logits[0]
    return torch.log_softmax(logits.double(), dim=-1)


def written_scales(made: runs.Made) -> dict[int, Tensor]:
    tensors, name = stored(made.output)[1], "model.layers.{}.self_attn.{}_scale"
    return {n: torch.cat([tensors[name.format(n, kind)] for kind in "kv"]) for n in range(3)}


@pytest.mark.slow
def test_the_scales_are_those_of_the_largest_keys_and_values_of_the_whole_model(made: runs.Made) -> None:
    """Layer by layer with the quantized layers before it, over the calibration texts."""
    model, scales = families.whole_model(*finished_weights(made.output)), written_scales(made)
    peaks = {n: torch.zeros(2) for n in scales}
    for text in made.texts("calibration"):
        cache = DynamicCache()
        model(text.unsqueeze(0), **{CACHE: cache}, use_cache=True)
        for n, layer in enumerate(cache.layers):
            seen = torch.stack([layer.keys.abs().amax(), layer.values.abs().amax()])
            peaks[n] = torch.maximum(peaks[n], seen)
    for n, scale in scales.items():
        assert scale.dtype == torch.float32
        torch.testing.assert_close(scale, 2 * peaks[n] / 448, rtol=1e-5, atol=0)
        assert made.report["layers"][n]["kv_peaks"] == pytest.approx(peaks[n].tolist(), rel=1e-5)


def test_the_cost_of_the_cache_is_that_of_the_librarys_rounding(made: runs.Made) -> None:
    source = families.whole_model(*source_weights(made.model))
    model, scales = families.whole_model(*finished_weights(made.output)), written_scales(made)
    parts: dict[str, list[Tensor]] = {"calibrated": [], "ones": []}
    for text in made.texts("held-out"):
        before = log_probabilities(source, text, DynamicCache())[:-1]
        for kind, found in parts.items():
            own = scales if kind == "calibrated" else {n: torch.ones(2) for n in scales}
            after = log_probabilities(model, text, RoundedCache(own))[:-1]
            found.append((before.exp() * (before - after)).sum(-1))
    for kind, found in parts.items():
        measured = made.report["kv_cache"][kind]["kl"]["mean"]
        assert measured == pytest.approx(float(torch.cat(found).mean()), abs=1e-5)
        assert abs(measured - made.report["kl"]["mean"]) > 1e-5, "the cache costs something"


# Of what evaluates whole outputs again, one model; the others are one more of a kind.
AGAIN = [MODELS[0], *(pytest.param(name, marks=pytest.mark.every) for name in MODELS[1:])]


@pytest.mark.slow
@pytest.mark.parametrize("made", AGAIN, indirect=True)
def test_evaluating_the_files_gives_the_same(
    made: runs.Made, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the picture goes
    assert command("eval", made.model, made.output, "--data", made.folder / "held-out.yaml", "--json") == 0
    (candidate,) = json.loads(command.out)["candidates"]
    assert candidate["kv_cache"] == made.report["kv_cache"]
    assert command("eval", made.model, made.output, "--data", made.folder / "held-out.yaml") == 0
    assert "FP8 cache, scales of 1" in command.out


@pytest.mark.slow
@pytest.mark.parametrize("made", AGAIN, indirect=True)
def test_a_server_that_caches_in_fp8_is_found_exact(
    made: runs.Made, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that does not is found out: its log-probabilities are others than those of what it should serve."""
    monkeypatch.chdir(tmp_path)
    model, scales = families.whole_model(*finished_weights(made.output)), written_scales(made)
    for cache, code in ((lambda: RoundedCache(scales), 0), (DynamicCache, 3)):

        @torch.no_grad()
        def logs(tokens: list[int], cache: Callable[[], DynamicCache] = cache) -> Tensor:
            return log_probabilities(model, torch.tensor(tokens), cache()).float()

        with ServerStandIn(logs) as server:
            words = ("--server", f"{server.url}/v1", "--source", made.model, "--data", made.folder / "held-out.yaml")
            assert command("serve-check", made.output, *words, "--exact") == code, command.out + command.err


def test_a_cache_rounds_as_compressed_tensors_does() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (1e-3, 1.0, 300.0):
        x = size * torch.randn(2, 4, 64, 32, generator=generator)
        (scale,) = scales_of(x.abs().amax().view(1))
        assert float((x / scale).abs().max()) == pytest.approx(224)
        expected = fake_quantize(x, scale.view(1), torch.zeros(1), FP8)
        assert float((cached(x, scale) - expected).abs().max()) <= 1e-6 * size
    assert scales_of(torch.zeros(2)).tolist() == [1, 1]
    assert cached(torch.tensor([1e4, -1e4]), torch.tensor(1.0)).tolist() == [448, -448]


def test_servers_are_told_and_transformers_reads_it(made: runs.Made, command: Command) -> None:
    config = json.loads((made.output / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    assert config["quantization_config"]["kv_cache_scheme"] == scheme
    assert command("verify", made.output, "--source", made.model, "--json") == 0
    findings = json.loads(command.out)["consumers"]["findings"]
    assert {one["severity"] for one in findings} == {"warning"}
    assert any("SM80 to 88" in one["consequence"] for one in findings)
    loads = made.name == "minimax_m2"  # of SGLang's models, this one
    assert any("loads no scales" in one["consequence"] for one in findings) != loads
    assert "### FP8 cache of keys and values" in (made.output / "README.md").read_text()
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(made.output, output_loading_info=True)
    assert not [name for name in info["missing_keys"] if "scale" in name]
    unread = [name for name in info["unexpected_keys"] if name.endswith(("k_scale", "v_scale"))]
    if Version(transformers.__version__) >= Version("5.24"):  # it computes with keys and values as they are
        assert len(unread) == 2 * len(model.model.layers)
        return
    assert not unread
    held = model.model.layers[1].self_attn.k_scale.detach()
    torch.testing.assert_close(held.float().view(1), written_scales(made)[1][:1], rtol=1e-2, atol=0)  # held in bfloat16


def test_damaged_scales_are_named(made: runs.Made, tmp_path: Path) -> None:
    def negative(tensors: dict[str, Tensor]) -> None:
        tensors[SCALE] = -tensors[SCALE]

    def missing(tensors: dict[str, Tensor]) -> None:
        del tensors[SCALE]

    def misnamed(tensors: dict[str, Tensor]) -> None:
        tensors[SCALE.replace("self_attn.", "self_attn.k_proj.")] = tensors.pop(SCALE)

    for damage, said in (
        (negative, f"{SCALE}: is [-"),
        (missing, f"{SCALE}: missing (servers then take 1 without a word)"),
        (misnamed, "self_attn.k_proj.k_scale: no tensor of the source accounts for it"),
    ):
        copy = shutil.copytree(made.output, tmp_path / damage.__name__)
        edit(copy, SCALE, damage)
        (copy / "report.json").unlink()
        assert any(said in line for line in verify(copy, open_folder(made.model), CPU).differences), said


def test_a_plan_counts_fp8_keys_and_values(made: runs.Made, tmp_path: Path) -> None:
    def needed(job: Job) -> int:
        model = serving_model(job.plan, job.facts)
        return fit(model, parse_gpus("1x24GiB")).kv_cache

    recipe = shutil.copy(made.recipe, made.folder / "without.yaml")
    change(Path(recipe), lambda body: body.pop("kv_cache"))
    assert needed(prepare(str(recipe))) == 2 * needed(made.job)


@pytest.mark.slow
def test_layers_of_linear_attention_get_none(tmp_path: Path) -> None:
    """The others of Qwen3.5 do, and a resumed run gives the same bytes."""
    zoo.save("qwen3_5_moe", tmp_path / "model")
    recipe = tiny.write_recipe(tmp_path, words=20, samples=3, rounding="nearest")
    change(recipe, lambda body: body.update(kv_cache="fp8"))
    whole = run(prepare(str(recipe)), Options(tmp_path / "whole", CPU))
    tensors = stored(tmp_path / "whole")[1]
    names = {name for name in tensors if name.endswith(("k_scale", "v_scale"))}
    assert names == {f"model.layers.{n}.self_attn.{kind}_scale" for n in (1, 3) for kind in "kv"}
    assert whole["plan"]["kv_cache"] == [1, 3]
    assert whole["audit"]["differences"] == []
    assert any("layers 0, 2 have none" in one["problem"] for one in whole["consumers"]["findings"])
    again = Options(tmp_path / "output", CPU)
    runs.cut_in_layer(2, prepare(str(recipe)), again)
    assert runs.timeless(run(prepare(str(recipe)), again)) == runs.timeless(whole)
    assert runs.hashes(tmp_path / "output") == runs.hashes(tmp_path / "whole")


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_latent_attention_is_refused_in_a_line(family: str, tmp_path: Path, command: Command) -> None:
    recipe = write_job(tmp_path, family)
    assert command("run", recipe, "--output", tmp_path / "output") == 2
    (line,) = [line for line in command.err.splitlines() if line.startswith("quantize: ")]
    assert "kv_cache: fp8: self_attn.k" in line
    assert "is of latent attention (MLA), of whose cache servers read no scales; remove the key" in line
    assert not (tmp_path / "output").exists()
