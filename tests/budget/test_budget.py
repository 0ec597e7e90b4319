"""Bits by budget from end to end: what is measured, that it is right, what is chosen, and that a cut costs nothing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import families
import pytest
import tiny
import torch
import yaml
from commands import Command
from compressed_tensors.utils.match import is_match
from conftest import needs_vllm
from probed import probed
from runs import cut_at
from torch import Tensor
from whole_models import compared, finished_weights, load, run_whole, source_weights

from quantizers.architectures.gates import plain_gate
from quantizers.budget import choice, measure
from quantizers.budget.measure import column_scale, scheme_errors
from quantizers.calibration.load_set import load_set
from quantizers.eval.report.schema import Schemes
from quantizers.eval.report.summary import choice_lines
from quantizers.formats.dequantization import read_weight
from quantizers.formats.packed_integers import CANDIDATES, Integers, dequantize
from quantizers.model.moe_inputs import capture_moe_inputs as seen_by
from quantizers.output import journal
from quantizers.pipeline import pipeline
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.allocation import Allocation
from quantizers.planning.device_memory import Placement, Residents
from quantizers.planning.job import Job, prepare
from quantizers.planning.plan import file_size
from quantizers.repair.stitch import stitch_experts
from quantizers.serving.check import STORED
from quantizers.solve.rounding import minmax_scales, nearest
from quantizers.stitch.audit.checkpoint import verify
from quantizers.stitch.write.config_files import output_config
from quantizers.system.errors import OutputError
from quantizers.walk.context import Context

CPU = torch.device("cpu")
MEAN_BITS = 4.375  # between groups of 64 and of 32 in every layer
GATE, UP, DOWN = "w1", "w3", "w2"


@pytest.fixture(scope="module")
def budgeted(write_recipe: Callable[..., Path]) -> Callable[..., Path]:
    """`budgeted(folder, **experts)`: conftest's recipe with a budget instead of bits and group size."""

    def write(folder: Path, **experts: Any) -> Path:
        path = write_recipe(folder)
        body = yaml.safe_load(path.read_text())
        body["experts"] = {"awq": {"grid": 3}} | (experts or {"bits_per_weight": MEAN_BITS})
        path.write_text(yaml.safe_dump(body, sort_keys=False))
        return path

    return write


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, budgeted: Callable[..., Path]) -> tuple[Job, Path, dict[str, Any]]:
    """A finished run with a budget: its job as first planned, folder and report."""
    folder = tmp_path_factory.mktemp("budget")
    job = prepare(str(budgeted(folder)))
    return job, folder / "output", run(job, Options(folder / "output", CPU))


def chosen_of(report: dict[str, Any]) -> list[Integers]:
    return [Integers(row["bits"], row["group_size"]) for row in report["schemes"]["layers"]]


def rounded(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    """A matrix as it is read again."""
    return dequantize(nearest(weight, scale, bits), scale)


# What is measured -----------------------------------------------------------------------------------


def test_errors_are_those_of_an_experts_outputs() -> None:
    """Against one token at a time, without scales; the chosen rounding is the coarsest scheme's."""
    torch.manual_seed(0)
    experts, hidden, width = 4, 64, 32
    gate_up, down = torch.randn(experts, 2 * width, hidden), torch.randn(experts, hidden, width)
    chosen = torch.stack([torch.randperm(experts)[:2] for _ in range(12)])
    recorded = seen_by(torch.randn(12, hidden), chosen, torch.rand(12, 2))
    schemes = [Integers(4, 32), Integers(8, 32)]

    def output(x: Tensor, gate: Tensor, up: Tensor, w2: Tensor) -> Tensor:
        return w2 @ (torch.nn.functional.silu(gate @ x) * (up @ x))

    for expert in range(experts):
        found, coarsest = scheme_errors(
            recorded, (gate_up, down), expert, schemes, plain_gate(torch.nn.functional.silu), outer=None, inner=False
        )
        source = [gate_up[expert, :width], gate_up[expert, width:], down[expert]]
        for scheme in schemes:
            expected = dict.fromkeys(("all", "gate", "up", "down"), 0.0)
            stored = [rounded(w, minmax_scales(w, 32, scheme.bits), scheme.bits) for w in source]
            for x, picked, weight in zip(recorded.x, recorded.chosen, recorded.weight, strict=True):
                for r in weight[picked == expert].tolist():
                    for name, which in (("all", (0, 1, 2)), ("gate", (0,)), ("up", (1,)), ("down", (2,))):
                        used = [stored[m] if m in which else source[m] for m in range(3)]
                        difference = output(x, *used) - output(x, *source)
                        expected[name] += r**2 * float(difference.square().sum())
            assert found[scheme] == pytest.approx(expected, rel=1e-4)
        assert torch.allclose(coarsest[1], rounded(down[expert], minmax_scales(down[expert], 32, 4), 4), atol=1e-6)


def test_columns_are_scaled_by_their_inputs() -> None:
    """By the root of the mean magnitude: of the whole layer's inputs for w1 and w3, of the expert's own for w2."""
    torch.manual_seed(0)
    gate_up, down, x = torch.randn(2, 64, 64), torch.randn(2, 64, 32), torch.randn(50, 64)
    x[:, 5] *= 10
    chosen = torch.randint(2, (50, 1))
    silu = torch.nn.functional.silu
    recorded = seen_by(x, chosen, torch.ones(50, 1))
    _, (both, w2) = scheme_errors(
        recorded, (gate_up, down), 1, [Integers(4, 32)], plain_gate(silu), outer=column_scale(x), inner=True
    )
    own = x[chosen[:, 0] == 1]
    inner = silu(own @ gate_up[1, :32].T) * (own @ gate_up[1, 32:].T)
    for stored, weight, inputs in ((both, gate_up[1], x), (w2, down[1], inner)):
        s = inputs.abs().mean(0).sqrt()
        assert torch.allclose(stored, rounded(weight * s, minmax_scales(weight * s, 32, 4), 4) / s, atol=1e-5)


@pytest.mark.slow
def test_smaller_groups_make_the_error_smaller_and_more_bits_even_smaller(done: Any) -> None:
    job, _, report = done
    assert job.allocation.candidates == tuple(s for s in CANDIDATES if s.bits >= 4)
    for row in report["schemes"]["layers"]:
        errors = [row["error"][str(scheme)] for scheme in job.allocation.candidates]
        assert errors == sorted(errors, reverse=True)
        assert errors[0] > 50 * errors[-1]
        for scheme in ("INT4 group 64", "INT4 group 32"):
            parts = row["by_matrix"][scheme]
            assert sum(parts.values()) == pytest.approx(row["error"][scheme], rel=0.1)  # nearly independent


@pytest.mark.parametrize("count", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_the_probe_is_the_whole_model_with_the_first_layer_rounded(
    count: int,
    tmp_path: Path,
    budgeted: Callable[..., Path],
    whole_model: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers' whole model as the oracle: KL at its end, and what is left of the disturbance after each layer.

    Where only 4 of 16 experts are measured, theirs are the only errors, twice as large.
    """
    job = prepare(str(budgeted(tmp_path, bits_per_weight=4.5, awq=False, scales="minmax")))
    monkeypatch.setattr(measure, "MEASURED_EXPERTS", count)
    monkeypatch.setattr(measure, "PROBE_LENGTH", 100)
    source, factor = job.opened, (16 / count) ** 0.5
    data = load_set(tmp_path / "calibration.yaml", str(source.folder))
    tokens = [torch.from_numpy(sample.tokens).long() for sample in data.samples][:4]
    entries = measure.measure_schemes(job, tokens, Context(tmp_path, CPU, Placement(Residents(5, 1, 0))))
    assert entries is not None
    modules = [name.removesuffix(".weight") for name, info in source.tensors.items() if name.endswith(".weight")]
    weights = {f"{m}.weight": read_weight(source, m, CPU) for m in modules}
    weights |= {n: source.tensor(n) for n in source.tensors if n.endswith("correction_bias")}
    coarse = dict(weights)
    for expert in range(count):
        for matrix in ("w1", "w2", "w3"):
            name = f"model.layers.0.block_sparse_moe.experts.{expert}.{matrix}.weight"
            w = weights[name]
            coarse[name] = w + factor * (rounded(w, minmax_scales(w, 128, 4), 4) - w)

    def passed(model: Any, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        leaving: list[Tensor] = []
        hooks = [one.register_forward_hook(lambda _, __, out: leaving.append(out)) for one in model.model.layers]
        log = torch.log_softmax(model(ids[None, :100]).logits[0], -1)
        for hook in hooks:
            hook.remove()
        return log, leaving

    models = [whole_model(source.config, one) for one in (weights, coarse)]
    kl, moved, size = list[Tensor](), [0.0] * 4, [0.0] * 4
    for ids in tokens:
        (p, exact), (q, disturbed) = (passed(model, ids) for model in models)
        kl.append((p.exp() * (p - q)).sum(-1)[:-1])
        for layer, (a, b) in enumerate(zip(exact, disturbed, strict=True)):
            moved[layer] += float((a - b).square().sum())
            size[layer] += float(a.square().sum())
    for layer, entry in enumerate(entries):
        assert entry.kl == pytest.approx(float(torch.cat(kl).mean()), rel=1e-3)
        assert entry.disturbance == pytest.approx(moved[layer] / size[layer], rel=1e-3)
        for scheme, error in entry.error.items():
            assert entry.loss[scheme] == pytest.approx(entry.kl * error / entry.disturbance)
    assert sorted(path.name for path in (tmp_path / "schemes").iterdir()) == [
        *(f"{n:05d}.json" for n in range(4)),
        "kl.json",
    ]


def test_a_mixture_is_chosen_only_if_its_gain_is_certain() -> None:
    """INT8 for one layer instead of groups of 32 for both: what each of four experts loses under each scheme."""
    schemes = (Integers(4, 64), Integers(4, 32), Integers(8, 64))
    allocation = Allocation((0, 1), 2, schemes, ((10, 11, 16),) * 2, 0, 1, 64, 26, "bytes")
    for first, picked, gain in (
        ([[0.5] * 4, [0.25] * 4, [0.0] * 4], [2, 0], 1 - 1.2 / 2.16),
        ([[0.0, 0.0, 0.0, 2.0], [0.0, 0.0, 0.0, 1.0], [0.0] * 4], [1, 1], 1 - 1.2 / 2.16),  # of one expert alone
        ([[0.0] * 4] * 3, [0, 2], 1.0),
    ):
        entries = []
        for layer, values in enumerate((first, [[0.3] * 4, [0.29] * 4, [0.0] * 4])):
            by_expert = dict(zip(map(str, schemes), values, strict=True))
            error = {name: sum(lost) for name, lost in by_expert.items()}
            entries.append(measure.LayerMeasurement(4, error, {}, by_expert, layer, kl=1.0, disturbance=1.0))
        found = choice.choose(allocation, entries)
        assert (found.picked, found.uniform) == (picked, 1)
        assert found.gain == pytest.approx(gain)
        assert found.interval[0] <= found.gain <= found.interval[1]
        assert (found.interval[0] > 0) == (picked != [1, 1])


# What is chosen and written -------------------------------------------------------------------------


@pytest.mark.slow
def test_the_output_is_what_was_chosen_to_the_byte(done: Any) -> None:
    job, folder, report = done
    schemes, found = chosen_of(report), report["schemes"]
    assert sorted(schemes) == [Integers(4, 32)] * 2 + [Integers(4, 64)] * 2
    shards = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    plan = job.plan.with_schemes(schemes)
    assert shards == {name: file_size(tensors) for name, tensors in plan.shards().items()}
    assert found["output_bytes"] == sum(shards.values())
    assert found["bits_per_weight"] == MEAN_BITS
    assert found["chosen"] == "INT4 group 32 (2 layers), INT4 group 64 (2 layers)"
    assert report["audit"]["differences"] == []
    settings = yaml.safe_load((folder / "recipe.yaml").read_text())["experts"]
    assert settings["bits_per_weight"] == MEAN_BITS
    assert not {"bits", "group_size", "budget"} & settings.keys()
    for text in ((folder / "README.md").read_text(), (folder / "report.html").read_text()):
        assert found["chosen"] in text


@pytest.mark.slow
def test_servers_read_each_layer_as_it_is_stored(done: Any) -> None:
    _, folder, report = done
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert len(config["config_groups"]) == 3
    consumers = report["consumers"]
    assert [f["engine"] for f in consumers["findings"]] == ["transformers"]
    assert "differ between layers" in consumers["findings"][0]["problem"]
    assert consumers["findings"][0]["severity"] == "warning"
    assert consumers["schemes"]["vLLM 0.32+"]["experts"].count("(2)") == 2
    assert consumers["schemes"][STORED]["experts"].count("(96)") == 2


@pytest.mark.slow
def test_verify_reads_the_schemes_from_the_files(done: Any, tmp_path: Path) -> None:
    job, folder, _ = done
    assert verify(folder, job.source, CPU).differences == []
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    names = [name for name in groups if name.startswith("routed")]
    groups[names[0]]["targets"], groups[names[1]]["targets"] = groups[names[1]]["targets"], groups[names[0]]["targets"]
    (copy / "config.json").write_text(json.dumps(config))
    differences = verify(copy, job.source, CPU).differences
    assert any(line.startswith("config.json: quantization_config.config_groups") for line in differences)
    del config["quantization_config"]
    (copy / "config.json").write_text(json.dumps(config))
    (line,) = verify(copy, job.source, CPU).differences
    assert line.startswith("config.json: quantization_config is missing, should be {")


@pytest.mark.slow
def test_stitch_keeps_each_layers_scheme(done: Any, tmp_path: Path) -> None:
    """The output taken as an experts' checkpoint: the same config, packed experts and routers."""
    job, folder, _ = done
    report = stitch_experts(job.source.folder, folder, tmp_path / "output", device="cpu", repair_router=True).report
    assert report["audit"]["differences"] == []
    for name in ("config.json", "model-00001-of-00005.safetensors", "model-00004-of-00005.safetensors"):
        assert (tmp_path / "output" / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.slow
def test_compressed_tensors_finds_each_layers_own_scheme(done: Any) -> None:
    """transformers 5.17 has one scheme for all layers' experts, and says so."""
    _, folder, report = done
    with pytest.raises(RuntimeError, match="automatic conversion"):
        load(folder)
    groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"].values()
    assert len(set(chosen_of(report))) == 2
    for layer, scheme in enumerate(chosen_of(report)):
        name, module = f"model.layers.{layer}.mlp.experts.0.w1", torch.nn.Linear(1, 1)
        (group,) = [g for g in groups if any(is_match(name, module, target) for target in g["targets"])]
        assert (group["weights"]["num_bits"], group["weights"]["group_size"]) == (scheme.bits, scheme.group_size)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, budgeted: Callable[..., Path]) -> tuple[Job, Path, dict[str, Any]]:
    """A finished run that chose 2, 3, 4 and 8 bits, whatever it measured."""
    folder = tmp_path_factory.mktemp("mixed")
    job = prepare(str(budgeted(folder, bits_per_weight=4.1)))
    assert job.allocation is not None
    names = list(map(str, job.allocation.candidates))
    picked = [names.index(f"INT{bits} group {group}") for bits, group in ((3, 64), (8, 64), (2, 32), (4, 32))]
    with patch.object(choice, "choose", lambda *_: choice.Choice(picked, 0, 0.5, (0.4, 0.6))):
        return job, folder / "output", run(job, Options(folder / "output", CPU))


@pytest.mark.slow
def test_layers_of_2_3_4_and_8_bits_are_what_compressed_tensors_reads(
    mixed: tuple[Job, Path, dict[str, Any]], whole_model: Callable[..., Any]
) -> None:
    job, folder, report = mixed
    assert [scheme.bits for scheme in chosen_of(report)] == [3, 8, 2, 4]
    assert report["audit"]["differences"] == []
    assert [one for one in report["consumers"]["findings"] if one["severity"] == "error"] == []
    assert report["audit"]["weight_error"][1] < 0.05 < report["audit"]["weight_error"][2]
    data = load_set(job.path.parent / "held-out.yaml", str(job.opened.folder))
    texts = [torch.from_numpy(sample.tokens).long() for sample in data.samples]
    weights = (source_weights(job.opened.folder), finished_weights(folder))
    models = [run_whole(whole_model(*one), texts) for one in weights]
    assert report["kl"]["mean"] == pytest.approx(float(compared(*models, texts).kl.mean()), abs=1e-6)


@pytest.mark.slow
@needs_vllm
def test_a_real_vllm_loads_layers_of_2_3_4_and_8_bits(mixed: tuple[Job, Path, dict[str, Any]]) -> None:
    code, found = probed(mixed[1])
    (checked,) = found["checked"]
    assert (code, checked["problems"]) == (0, [])
    assert {name.partition(" (")[0] for name in checked["schemes"]["experts"]} == {
        "INT3 group 64", "INT8 group 64", "INT2 group 32", "INT4 group 32",
    }  # fmt: skip


# Resuming, and what is refused ----------------------------------------------------------


@pytest.mark.slow
def test_a_cut_while_measuring_measures_again_and_another_choice_is_refused(tmp_path: Path) -> None:
    words = {"layers": 2, "words": 20, "samples": 3, "awq": {"grid": 3}}
    job = prepare(str(tiny.write_job(tmp_path / "job", bits_per_weight=MEAN_BITS, **words)))
    options = Options(tmp_path / "output", CPU)

    def chosen(options: Options) -> Any:
        """What a run chooses that is cut then."""
        cut_at(pipeline, "quantize_layers", job, options)
        return choice.read_choice(job, options.output)

    cut_at(measure, "by_text", job, options, 1)
    work = journal.work_folder(options.output)
    assert not journal.layer_file(work, 0).exists()
    assert chosen(options) == chosen(Options(tmp_path / "whole", CPU))
    with pytest.raises(OutputError, match=r"another experts.bits_per_weight \(4.375, now 4.5\)"):
        run(prepare(str(tiny.write_job(tmp_path / "other", bits_per_weight=4.5, **words))), options)
    entry = work / "schemes" / "00000.json"
    changed = json.loads(entry.read_text())
    changed["error"]["INT4 group 32"] = changed["error"]["INT4 group 64"]
    entry.write_text(json.dumps(changed))
    with pytest.raises(OutputError, match="holds an unfinished run with another schemes"):
        run(job, options)


@pytest.mark.slow
def test_plan_shows_candidates_before_and_the_choice_after(
    done: Any, tmp_path: Path, write_recipe: Callable[..., Path], command: Command
) -> None:
    job, folder, report = done
    assert command("plan", job.path) == 0
    assert "budget 4.375 bits per expert weight; possible are 4.125 to 8.5 bits per weight" in command.out
    assert "the run measures, then chooses" in command.out
    assert command("plan", job.path, "--output", folder) == 0
    assert report["schemes"]["chosen"] in command.out
    assert command("plan", job.path, "--output", folder, "--json") == 0
    shards = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    assert json.loads(command.out)["shards"] == shards
    assert command("plan", job.path, "--output", tmp_path) == 2
    assert "no run of this recipe has measured" in command.err
    assert command("plan", write_recipe(tmp_path / "plain"), "--output", folder) == 2
    assert "has no budget" in command.err


@pytest.mark.slow
def test_a_budget_where_some_layers_have_no_experts(tmp_path: Path) -> None:
    """A dense layer at the start, and a layer that predicts further tokens at the end."""
    recipe = families.write_job(tmp_path, "deepseek_v3")
    body = yaml.safe_load(recipe.read_text())
    # Of a width of 32: INT4 for one of two layers, INT8 for the other.
    body["experts"] = {"bits_per_weight": 6.5, "awq": {"grid": 3}}
    recipe.write_text(yaml.safe_dump(body))
    job = prepare(str(recipe))
    report = run(job, Options(tmp_path / "output", CPU))
    schemes = report["schemes"]
    assert report["audit"]["differences"] == []
    assert not [finding for finding in report["consumers"]["findings"] if finding["severity"] == "error"]
    assert [row["layer"] for row in schemes["layers"]] == [1, 2]
    assert sorted(chosen_of(report)) == [Integers(4, 32), Integers(8, 32)]
    assert schemes["bits_per_weight"] <= 6.5
    assert report["seconds"]["measuring"] > 0
    card = (tmp_path / "output" / "README.md").read_text()
    assert "INT4 and INT8 experts" in card
    assert "- int8" in card
    shards = [path.stat().st_size for path in (tmp_path / "output").glob("*.safetensors")]
    assert schemes["output_bytes"] == sum(shards)
    assert 0.3 < schemes["predicted_kl"] / report["kl"]["mean"] < 10
    named = re.findall(r"\(layer (\d+)\)", "\n".join(choice_lines(Schemes.model_validate(schemes))))
    assert len(named) == 2
    assert {int(number) for number in named} <= {1, 2}


def test_one_scheme_for_all_layers_is_written_as_ever(tmp_path: Path, write_recipe: Callable[..., Path]) -> None:
    """The config of a uniform choice within a budget is that of the same scheme asked for."""
    job = prepare(str(write_recipe(tmp_path)))
    chosen = job.plan.with_schemes([Integers(4, 32)] * 4)
    assert replace(job.plan, schemes=()) == replace(chosen, schemes=())
    asked, uniform = (output_config(job.config, job.facts, plan) for plan in (job.plan, chosen))
    assert asked == uniform
