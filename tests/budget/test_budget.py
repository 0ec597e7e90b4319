"""Bits by budget from end to end: what is measured, that it is right, what is chosen, and that a cut costs nothing."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import families
import pytest
import torch
import yaml
from one_layer import make_layer, solving_order
from runs import cut_in_layer
from torch import Tensor

from eval.consumers.check import STORED
from eval.report.schemes import choice_lines
from quantizers.architectures.matrices import MATRICES
from quantizers.budget import branches, choice, measure, measurements, output_errors
from quantizers.budget.output_errors import scheme_errors
from quantizers.calibration.load_set import load_set
from quantizers.checkpoint.reader import open_folder
from quantizers.cli import main as cli
from quantizers.forward.codes import dequantize
from quantizers.forward.recorded import recorded as seen_by
from quantizers.forward.weights import layer_weights, read_weight
from quantizers.output import journal
from quantizers.output.context import Context
from quantizers.plan.job import Job, prepare
from quantizers.plan.plan import file_size
from quantizers.recipe.schema import ALL, Awq, Experts, Scheme
from quantizers.run import pipeline
from quantizers.run.options import Options
from quantizers.run.pipeline import run
from quantizers.run.stitched import stitch
from quantizers.solve import expert_unit, gram_engine
from quantizers.solve.rounding import minmax_scales, nearest
from quantizers.system.errors import OutputError, QuantizeError
from quantizers.system.residents import Residents
from stitch.audit.checkpoint import verify

CPU = torch.device("cpu")
MEAN_BITS = 4.375  # half of the layers in groups of 32, half of 64: what the tiny model's width allows
GATE, UP, DOWN = "w1", "w3", "w2"


@pytest.fixture(scope="module", autouse=True)
def short_lanes() -> Iterator[None]:
    """Some 600 tokens go on from each layer instead of all: here runs are compared with each other."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(branches, "BRANCH_TOKENS", 600)
        yield


@pytest.fixture(scope="module")
def budgeted(write_recipe: Callable[..., Path]) -> Callable[..., Path]:
    """`budgeted(folder, **experts)`: conftest's recipe with a budget instead of bits and group size."""

    def write(folder: Path, **experts: Any) -> Path:
        path = write_recipe(folder)
        body = yaml.safe_load(path.read_text())
        body["experts"] = experts or {"bits_per_weight": MEAN_BITS}
        path.write_text(yaml.safe_dump(body, sort_keys=False))
        return path

    return write


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, budgeted: Callable[..., Path]) -> tuple[Job, Path, dict[str, Any]]:
    """A finished run with a budget: its job as first planned, folder and report."""
    folder = tmp_path_factory.mktemp("budget")
    job = prepare(str(budgeted(folder)))
    return job, folder / "output", run(job, Options(folder / "output", CPU))


def chosen_of(report: dict[str, Any]) -> list[Scheme]:
    return [Scheme(row["bits"], row["group_size"]) for row in report["schemes"]["layers"]]


def rounded(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    """A matrix as it is read again."""
    return dequantize(nearest(weight, scale, bits), scale)


# What is measured -----------------------------------------------------------------------------------


def test_errors_are_those_of_the_experts_outputs() -> None:
    """Against one token and one expert at a time, without any scale search."""
    torch.manual_seed(0)
    experts, hidden, width = 4, 64, 32
    gate_up, down = torch.randn(experts, 2 * width, hidden), torch.randn(experts, hidden, width)
    recorded = []
    for tokens in (7, 5):
        chosen = torch.stack([torch.randperm(experts)[:2] for _ in range(tokens)])
        recorded.append(seen_by(torch.randn(tokens, hidden), chosen, torch.rand(tokens, 2)))
    plain = Experts(awq=False, scales="minmax", routed_weight=0.5)
    schemes = [Scheme(4, 32), Scheme(8, 32)]

    def output(x: Tensor, gate: Tensor, up: Tensor, w2: Tensor) -> Tensor:
        return w2 @ (torch.nn.functional.silu(gate @ x) * (up @ x))

    for compared in ([0, 1], [1]):
        found = scheme_errors(
            recorded, gate_up, down, norm=torch.ones(hidden), activation=torch.nn.functional.silu, settings=plain,
            schemes=schemes, experts=3, unit=2, compared=[recorded[i] for i in compared],
        )  # fmt: skip
        for scheme in schemes:
            expected = dict.fromkeys(("all", "gate", "up", "down"), 0.0)
            for i in compared:
                for x, chosen, weight in zip(recorded[i].x, recorded[i].chosen, recorded[i].weight, strict=True):
                    for expert, r in zip(chosen.tolist(), weight.tolist(), strict=True):
                        if expert == 3:
                            continue  # not among the measured ones
                        source = [gate_up[expert, :width], gate_up[expert, width:], down[expert]]
                        stored = [rounded(w, minmax_scales(w, 32, scheme.bits), scheme.bits) for w in source]
                        for name, which in (("all", (0, 1, 2)), ("gate", (0,)), ("up", (1,)), ("down", (2,))):
                            used = [stored[m] if m in which else source[m] for m in range(3)]
                            difference = output(x, *used) - output(x, *source)
                            expected[name] += r**2 * float(difference.square().sum())
            assert found.lost[scheme] == pytest.approx(expected, rel=1e-4)
        assert found.coarsest[0].shape == (3, 2 * width, hidden)
        assert torch.allclose(found.coarsest[1][2], rounded(down[2], minmax_scales(down[2], 32, 4), 4), atol=1e-6)


@pytest.mark.parametrize("scales", ["minmax", "mse"])
@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_predicted_from_is_what_the_run_stores(
    bits: Literal[4, 8], scales: Literal["minmax", "mse"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded to nearest, bit for bit: the scale that the rounded norm leaves, w3 divided before or after its codes.

    By design w2's sums are the source's; so its mse scales differ, and with 4 bits s, which is handed on here.
    """
    layer = make_layer(3)
    order = torch.tensor(solving_order(layer, unit=8))
    settings = Experts(group_size=32, bits=bits, awq=Awq(grid=8), scales=scales, rounding="nearest")
    of_s = list[Tensor]()
    real, search = output_errors.divided, expert_unit._width_scale

    def predicted(scale: Tensor, codes: Tensor, s: Tensor) -> Tensor:
        of_s.append(s)
        return real(scale, codes, s)

    def found(down: Tensor, sums: Any, settings: Experts, careful: bool) -> tuple[Tensor, dict[str, Tensor]]:
        s, totals = search(down, sums, settings)
        of_s.append(s[order.argsort()])
        return of_s[0][order], totals

    monkeypatch.setattr(output_errors, "divided", predicted)
    monkeypatch.setattr(expert_unit, "_width_scale", found)
    common: Any = {"norm": layer.norm, "activation": torch.nn.functional.silu, "settings": settings, "unit": 8}
    seen = layer.recorded()
    guess = scheme_errors(
        seen, layer.gate_up, layer.down, schemes=[Scheme(bits, 32)], experts=5, compared=seen[:1], **common
    )
    solved = gram_engine.solve(seen, layer.weights(), router=layer.router, residents=Residents.all_of(5), **common)
    assert bool((solved.smooth != 1).any())
    s = of_s[0]
    assert bool((s != 1).any())
    gate, up, down = (dequantize(solved.codes[matrix], solved.scales[matrix]) for matrix in MATRICES)
    guessed_gate, guessed_up = guess.coarsest[0].chunk(2, dim=1)
    assert torch.equal(guessed_gate, gate / solved.smooth)
    assert torch.equal(guessed_up, up * s.unsqueeze(-1) / solved.smooth)
    if scales == "minmax":
        assert torch.equal(guess.coarsest[1], down / s.unsqueeze(1))


def test_a_search_makes_the_error_smaller_and_more_bits_even_smaller(done: Any) -> None:
    job, _, report = done
    assert job.allocation.candidates == tuple(s for s in ALL if s.group_size <= 64)
    for row in report["schemes"]["layers"]:
        errors = [row["error"][str(scheme)] for scheme in job.allocation.candidates]
        assert errors == sorted(errors, reverse=True)
        assert errors[0] > 100 * errors[-1]
        for scheme in ("INT4 group 64", "INT4 group 32"):
            parts = row["by_matrix"][scheme]
            assert sum(parts.values()) == pytest.approx(row["error"][scheme], rel=0.1)  # nearly independent


@pytest.mark.parametrize(("count", "boost"), [(16, 1), (4, 1), (16, 100)])
def test_a_lanes_kl_is_that_of_the_whole_model_with_this_layer_rounded(
    count: int,
    boost: int,
    tmp_path: Path,
    budgeted: Callable[..., Path],
    whole_model: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers' whole model as the oracle, without scale search; one layer rounded to nearest in groups of 64.

    Where only 4 of 16 experts are measured, theirs are the only errors, twice as large. A hundred times as large they
    leave nothing of a layer: KL levels off, and the layer's loss is that of half of them.
    """
    job = prepare(str(budgeted(tmp_path, bits_per_weight=4.5, awq=False, scales="minmax")))
    monkeypatch.setattr(measure, "MEASURED_EXPERTS", count)
    disturb = measure._Walk._disturb

    def enlarged(experts: Any, exact: Any, coarsest: Any, times: float) -> None:
        disturb(experts, exact, coarsest, boost * times)

    monkeypatch.setattr(measure._Walk, "_disturb", staticmethod(enlarged))
    factor = boost * (16 / count) ** 0.5
    source = job.source
    assert source is not None
    data = load_set(tmp_path / "calibration.yaml", str(source.folder))
    tokens = [torch.from_numpy(sample.tokens).long() for sample in data.samples][:6]
    monkeypatch.setattr(branches, "BRANCH_TOKENS", 300)
    monkeypatch.setattr(branches, "BRANCH_LENGTH", 100)
    monkeypatch.setattr(branches, "HALF_EVERY", 2)
    layout = branches.Branches([len(t) for t in tokens])
    probes = layout.probes
    assert 3 <= len(probes) < 6
    remove, sizes = measure._remove, dict[str, int]()

    def weigh(work: Path) -> None:
        sizes.update((path.name, path.stat().st_size) for path in (work / "schemes").glob("states-*"))
        remove(work)

    monkeypatch.setattr(measure, "_remove", weigh)
    entries = measure.measure_schemes(job, tokens, Context(tmp_path, CPU, 5))
    assert entries is not None
    rows = sum(layout.lengths) + sum(layout.probe_lengths) + 4 * sum(layout.probe_lengths + layout.probe_lengths[::2])
    assert sizes == {"states-00004.bin": 4 * 128 * rows}
    modules = [name.removesuffix(".weight") for name, info in source.tensors.items() if name.endswith(".weight")]
    weights = {f"{m}.weight": read_weight(source, m, CPU) for m in modules}
    weights |= {n: source.tensor(n) for n in source.tensors if n.endswith("correction_bias")}
    exact = whole_model(source.config, weights)

    def logs_and_states(model: Any, layer: int, i: int) -> tuple[Tensor, Tensor]:
        leaving: list[Tensor] = []
        hook = model.model.layers[layer].register_forward_hook(lambda _, __, out: leaving.append(out))
        log = torch.log_softmax(model(tokens[i][None, :100]).logits[0], -1)
        hook.remove()
        return log, leaving[0]

    def kl_and_disturbance(layer: int, times: float, which: list[int]) -> tuple[float, float]:
        part = f"model.layers.{layer}.block_sparse_moe.experts."
        coarse = dict(weights)
        for name in (f"{part}{expert}.{matrix}.weight" for expert in range(count) for matrix in ("w1", "w2", "w3")):
            w = weights[name]
            coarse[name] = w + times * (rounded(w, minmax_scales(w, 64, 4), 4) - w)
        other, total, rows, moved, size = whole_model(source.config, coarse), 0.0, 0, 0.0, 0.0
        for i in which:
            (p, y), (q, disturbed) = (logs_and_states(model, layer, i) for model in (exact, other))
            total, rows = total + float((p.exp() * (p - q)).sum()), rows + len(p)
            moved, size = moved + float((disturbed - y).square().sum()), size + float(y.square().sum())
        return total / rows, moved / size

    for layer in (1, 3):
        entry = entries[layer]
        kl, disturbance = kl_and_disturbance(layer, factor, probes)
        assert entry["kl"] == pytest.approx(kl, rel=1e-3)
        assert entry["disturbance"] == pytest.approx(disturbance, rel=1e-3)
        (some, of_some), (half, of_half) = (kl_and_disturbance(layer, factor / n, probes[::2]) for n in (1, 2))
        assert entry["growth"] == pytest.approx(some / of_some / (half / of_half), rel=1e-2)
        assert entry["at_half"] == (boost > 1)
        assert 1 / 2.5 <= entry["growth"] <= 2.5 or boost > 1
        rate = half / of_half if boost > 1 else kl / disturbance
        for scheme in ("INT4 group 64", "INT8 group 32"):
            assert entry["loss"][scheme] == pytest.approx(rate * entry["error"][scheme], rel=1e-2)
    assert sorted(path.name for path in (tmp_path / "schemes").iterdir()) == [
        *(f"{n:05d}.json" for n in range(4)),
        "kl.json",
    ]


def test_a_square_needs_no_half_and_what_levels_off_does() -> None:
    """The rule alone: KL = disturbance, its root (tokens that change their expert), and nothing more than before."""
    entry = {"layer": 0, "disturbance": 0.5, "error": {"a": 0.25}, "halved": {"some": 0.4, "half": 0.1}}
    for kl, growth, at_half, loss in (
        ({"all": 1.0, "some": 0.8, "half": 0.2}, 1.0, False, 0.5),
        ({"all": 1.0, "some": 0.4, "half": 0.2}, 0.5, False, 0.5),
        ({"all": 1.0, "some": 0.2, "half": 0.2}, 0.25, True, 0.5),
        ({"all": 1.0, "some": 0.8, "half": 0.05}, 4.0, True, 0.125),
        ({"all": 0.0, "some": 0.0, "half": 0.0}, None, False, 0.0),
        ({"all": 1.0, "some": 0.8, "half": -1e-9}, None, False, 0.5),
    ):
        found = measurements._with_loss(entry, kl)
        assert (found["growth"], found["at_half"]) == (growth and pytest.approx(growth), at_half)
        assert found["loss"]["a"] == pytest.approx(loss)
    layers = [{"layer": n, "loss": {"a": 1.0}, "at_half": n in (1, 3)} for n in range(4)]
    shown = choice_lines(
        {"layers": layers, "by_matrix": {}, "coarsest": "a", "above_the_largest": False, "chosen": "a"}
        | {"output_bytes": 1, "bits_per_weight": 4, "unit": "bytes", "limit": 1}
    )
    assert shown[-1].startswith(
        "KL did not grow with the square of the disturbance in 2 of 4 layers (1, 3), which were"
    )


# What is chosen and written -------------------------------------------------------------------------


def test_the_output_is_what_was_chosen_to_the_byte(done: Any) -> None:
    job, folder, report = done
    schemes, found = chosen_of(report), report["schemes"]
    assert sorted(schemes) == [Scheme(4, 32)] * 2 + [Scheme(4, 64)] * 2
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
    assert any("weight_scale: is BF16" in line for line in differences)
    del config["quantization_config"]
    (copy / "config.json").write_text(json.dumps(config))
    (line,) = verify(copy, job.source, CPU).differences  # the schemes are then read off the tensors
    assert line.startswith("config.json: quantization_config is missing, should be {")


def test_stitch_keeps_each_layers_scheme(done: Any, tmp_path: Path) -> None:
    """The output taken as an experts' checkpoint: the same config, packed experts and routers again."""
    job, folder, _ = done
    report = stitch(job.source, open_folder(folder), tmp_path / "output", CPU, repair_router=True)
    assert report["audit"]["differences"] == []
    for name in ("config.json", "model-00001-of-00005.safetensors", "model-00004-of-00005.safetensors"):
        assert (tmp_path / "output" / name).read_bytes() == (folder / name).read_bytes()


def test_transformers_with_each_layers_own_scheme(done: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.17 has one scheme for all layers' experts. Given compressed-tensors' own answer, all is there."""
    from compressed_tensors.utils.match import is_match
    from transformers.integrations.compressed_tensors import DecompressExperts
    from whole_models import load

    job, folder, report = done
    with pytest.raises(RuntimeError, match="automatic conversion"):
        load(folder)
    real = DecompressExperts.convert

    def by_layer(self: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        layer = named["full_layer_name"].split(".")[2]
        groups = self.hf_quantizer.compressor.quantization_config.config_groups.values()
        name, module = f"model.layers.{layer}.mlp.experts.0.w1", torch.nn.Linear(1, 1)
        (self.scheme,) = [g for g in groups if any(is_match(name, module, target) for target in g.targets)]
        return real(self, inputs, *arguments, **named)

    monkeypatch.setattr(DecompressExperts, "convert", by_layer)
    model, info = load(folder)
    assert not any(info.values()), info
    model(torch.tensor([[1, 2, 3]]))
    checkpoint = open_folder(folder)
    assert len(set(chosen_of(report))) == 2
    for number, layer in enumerate(model.model.layers):
        exact = layer_weights(checkpoint, job.facts, job.sizes, number, CPU, torch.float32)
        for name in ("gate_up_proj", "down_proj"):
            assert torch.equal(getattr(layer.mlp.experts, name), exact[f"mlp.experts.{name}"].bfloat16())


@pytest.mark.slow
def test_eight_bits_where_the_budget_allows_them(tmp_path: Path, budgeted: Callable[..., Path]) -> None:
    job = prepare(str(budgeted(tmp_path, bits_per_weight=5.5)))
    report = run(job, Options(tmp_path / "output", CPU))
    assert {scheme.bits for scheme in chosen_of(report)} == {4, 8}
    assert report["schemes"]["bits_per_weight"] <= 5.5
    assert report["audit"]["differences"] == []
    assert not [f for f in report["consumers"]["findings"] if f["severity"] == "error"]
    card = (tmp_path / "output" / "README.md").read_text()
    assert "INT4 and INT8 experts" in card
    assert "- int8" in card


# Going on after a cut, and what is refused ----------------------------------------------------------


def hashes(folder: Path) -> dict[str, str]:
    varying = {"report.json", "README.md"}
    files = sorted(path for path in folder.iterdir() if path.name not in varying)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        pytest.param("scheme_errors", 2, marks=pytest.mark.slow),  # in the middle of a layer
        pytest.param("scheme_errors", 0, marks=pytest.mark.slow),
        pytest.param("write_json", 1, marks=pytest.mark.slow),  # before a layer's entry
        pytest.param("write_json", 4, marks=pytest.mark.slow),  # before the last one of all
    ],
)
def test_a_cut_while_measuring_costs_a_layer_at_most(name: str, calls: int, done: Any, tmp_path: Path) -> None:
    job, folder, _ = done
    options, count, real = Options(tmp_path / "output", CPU), [0, 0], getattr(measure, name)

    def counted(*arguments: Any, **named: Any) -> Any:
        count[1] += 1
        if count[1] == calls + 1 and not count[0]:
            count[0] = 1
            raise QuantizeError("cut here")
        return real(*arguments, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(measure, name, counted)
        with pytest.raises(QuantizeError, match="cut here"):
            run(job, options)
        assert not journal.layer_file(journal.work_folder(options.output), 0).exists()
        report = run(job, options)
    assert count[1] <= (5 if name == "write_json" else 4) + 1
    assert hashes(options.output) == hashes(folder)
    assert report["schemes"] == json.loads((folder / "report.json").read_text())["schemes"]


def test_another_budget_or_choice_is_refused(done: Any, tmp_path: Path, budgeted: Callable[..., Path]) -> None:
    job = done[0]
    options = Options(tmp_path / "output", CPU)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pipeline, "quantize_layers", lambda *_, **__: (_ for _ in ()).throw(QuantizeError("cut")))
        with pytest.raises(QuantizeError, match="cut"):
            run(job, options)
    shown = choice.read_choice(job, options.output)
    assert shown is not None
    assert json.loads(json.dumps(shown)) == json.loads((done[1] / "report.json").read_text())["schemes"]
    with pytest.raises(OutputError, match=r"another experts.bits_per_weight \(4.375, now 4.5\)"):
        run(prepare(str(budgeted(tmp_path / "other", bits_per_weight=4.5))), options)
    entry = journal.work_folder(options.output) / "schemes" / "00000.json"
    changed = json.loads(entry.read_text())
    changed["error"]["INT4 group 32"] = changed["error"]["INT4 group 64"]
    entry.write_text(json.dumps(changed))
    with pytest.raises(OutputError, match="holds an unfinished run with another schemes"):
        run(job, options)


def test_plan_shows_candidates_before_and_the_choice_after(
    done: Any, finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job, folder, report = done

    def plan(*arguments: object) -> tuple[object, str, str]:
        monkeypatch.setattr("sys.argv", ["quantize", "plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    code, out, _ = plan(job.path)
    assert code == 0
    assert "budget 4.375 bits per expert weight; possible are 4.25 to 8.5 bits per weight" in out
    assert "the run measures and then chooses" in out
    code, out, _ = plan(job.path, "--output", folder)
    assert code == 0
    assert report["schemes"]["chosen"] in out
    code, out, _ = plan(job.path, "--output", folder, "--json")
    assert json.loads(out)["shards"] == {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    code, _, err = plan(job.path, "--output", tmp_path)
    assert (code, "no run of this recipe has measured" in err) == (2, True)
    code, _, err = plan(finished.recipe, "--output", folder)
    assert (code, "has no budget" in err) == (2, True)


def test_a_budget_above_everything_takes_the_best_and_says_so(tmp_path: Path, budgeted: Callable[..., Path]) -> None:
    job = prepare(str(budgeted(tmp_path, budget="1GB")))
    assert job.allocation is not None
    assert job.allocation.exceeded
    entries = [{"loss": {str(s): 1 / s.bits_per_weight for s in job.allocation.candidates}} for _ in range(4)]
    assert job.allocation.spell(choice.chosen_candidates(job.allocation, entries)) == [Scheme(8, 32)] * 4
    assert job.allocation.as_dict()["above_the_largest"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3_moe with a dense layer between"])
def test_a_budget_where_some_layers_have_no_experts(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dense layer at the start, with a layer that predicts further tokens at the end; and one in the middle."""
    monkeypatch.setitem(families.MODELS, "qwen3_moe with a dense layer between", {"mlp_only_layers": [1]})
    recipe = families.write_job(tmp_path, model)
    body = yaml.safe_load(recipe.read_text())
    body["experts"] = {"bits_per_weight": 6.5}  # of a width of 32: INT4 for one of two layers, INT8 for the other
    recipe.write_text(yaml.safe_dump(body))
    job = prepare(str(recipe))
    with_experts = [1, 2] if model == "deepseek_v3" else [0, 2]
    entries, write = list[dict[str, Any]](), measure.write_json

    def noted(path: Path, entry: Any) -> None:
        write(path, entry)
        if path.name != "kl.json":
            entries.append(entry)

    with monkeypatch.context() as patched:
        patched.setattr(measure, "write_json", noted)
        report = run(job, Options(tmp_path / "output", CPU))
    schemes = report["schemes"]
    assert report["audit"]["differences"] == []
    assert not [finding for finding in report["consumers"]["findings"] if finding["severity"] == "error"]
    assert [row["layer"] for row in schemes["layers"]] == with_experts
    assert sorted(chosen_of(report)) == [Scheme(4, 32), Scheme(8, 32)]
    assert schemes["bits_per_weight"] <= 6.5
    assert [entry["layer"] for entry in entries] == [0, 1, 2]
    assert report["seconds"]["measuring"] == sum(entry["seconds"] for entry in entries)
    shards = [path.stat().st_size for path in (tmp_path / "output").glob("*.safetensors")]
    assert schemes["output_bytes"] == sum(shards)
    # Every branch passes through the layers after its own, of which one has no experts. KL is what their sum foretells.
    assert 0.3 < schemes["predicted_kl"] / report["kl"]["mean"] < 3
    named = re.findall(r"\(layer (\d+)\)", "\n".join(choice_lines(schemes)))
    assert len(named) == 2
    assert {int(number) for number in named} <= set(with_experts)
    resumed = Options(tmp_path / "resumed", CPU)
    cut_in_layer(1, job, resumed)
    run(job, resumed)
    assert hashes(tmp_path / "resumed") == hashes(tmp_path / "output")


def test_one_scheme_for_all_layers_is_written_as_ever(finished: Any) -> None:
    """The config of a uniform choice within a budget is that of the same scheme asked for."""
    from stitch.write.config import output_config

    config = json.loads((finished.folder / "config.json").read_text())
    job = prepare(str(finished.recipe))
    assert output_config(job.config, job.facts, job.plan.with_schemes([Scheme(4, 32)] * 4), job.fp8) == config
    assert "schemes" not in finished.report
    assert replace(job.plan, schemes=()) == replace(job.plan.with_schemes([Scheme(4, 32)] * 4), schemes=())
