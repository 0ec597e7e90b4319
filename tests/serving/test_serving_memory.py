"""Whether an output fits on GPUs: MiniMax-M2.1's published and measured figures, and vLLM's rules."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from commands import Command
from planned import tiny_model

from quantizers.commands.plan import plan
from quantizers.formats.packed_integers import Integers
from quantizers.planning.gpus import UTILISATION, Gpus, parse_gpus
from quantizers.planning.job import Job, prepare
from quantizers.planning.plan import file_size
from quantizers.serving.check import check
from quantizers.serving.host_experts import host_ways
from quantizers.serving.memory import (
    LITTLE,
    RUNTIME,
    Model,
    assumptions,
    can_split,
    common_fits,
    fit,
    kv_bytes_per_token,
    largest_budget,
    notes,
    remedies,
    serving_model,
    tensor_parallel_problem,
    ways,
    with_budget,
    with_scheme,
)
from quantizers.stitch.write.config_files import output_config
from quantizers.system.errors import InputError
from quantizers.system.formatting import parse_bytes
from quantizers.system.shipped import shipped

MIB, GIB = 2**20, 2**30
EVERY = (pytest.mark.slow, pytest.mark.every)  # too long for CI
WHOLE = 196_608


@pytest.fixture(scope="module")
def model(published_job: Job) -> Model:
    job = published_job
    return serving_model(job.plan, job.facts)


def test_the_measured_cache(model: Model) -> None:
    """15,872 MiB at 65,536 tokens in 16 bit, as measured on M2.5; half of it in 8 bit."""
    assert kv_bytes_per_token(model, "auto") == 253_952
    assert kv_bytes_per_token(model, "auto") * 65_536 == 15_872 * MIB
    assert kv_bytes_per_token(model, "fp8") * 65_536 == 7_936 * MIB
    assert fit(model, parse_gpus("1x512GiB"), 65_536).kv_cache == 15_872 * MIB


def test_two_large_gpus_take_the_whole_context_and_four_small_ones_nothing(model: Model) -> None:
    """The FP8 + INT4 quant has been served on 2 x 96 GiB with all 196,608 tokens, at 92.5 GiB a card."""
    two = fit(model, parse_gpus("2x96GiB"), WHOLE)
    assert (two.fits, two.longest, two.tensor_parallel, two.pipeline_parallel) == (True, WHOLE, 2, 1)
    assert round(two.weights / GIB, 1) == 61.5
    assert two.kv_cache == 253_952 * WHOLE // 2
    assert two.budget == int(96 * GIB * UTILISATION)
    assert two.left == two.budget - two.weights - two.kv_cache - two.activations - RUNTIME
    assert two.budget - two.left < 92.5 * GIB
    four = fit(model, parse_gpus("4x24GiB"), WHOLE)
    assert (four.fits, four.longest) == (False, 0)
    assert four.weights > 24 * GIB


def test_humming_fills_up_what_a_gpu_has_of_an_expert(published_job: Job) -> None:
    """M2.1 in INT2: with TP 8, 384 rows of w1 and w3 become 512, and 192 columns of w2 256; with TP 4 nothing does."""
    plan = published_job.plan.with_schemes([Integers(2, 64)] * published_job.plan.layers)
    few = serving_model(plan, published_job.facts)
    stored = 62 * 256 * 3 * 3072 * 1536 * 2.25 / 8
    for ranks, more in ((4, 0), (8, stored / 8 / 3)):
        gpus = parse_gpus(f"{ranks}x24GiB")
        filled, as_stored = (fit(one, gpus, 65_536, "fp8", ranks) for one in (few, replace(few, padded=frozenset())))
        assert filled.weights - as_stored.weights == pytest.approx(more, rel=1e-3)
        assert any("33% more memory than on disk" in line for line in notes(few, [filled])) == (ranks == 8)


def test_all_weights_are_somewhere(model: Model, published_job: Job) -> None:
    """On one card, the weights are the planned output's, but for headers."""
    planned = sum(spec.bytes for action in published_job.plan.actions for spec in action.outputs.values())
    assert fit(model, parse_gpus("1x200GiB")).weights == planned


def test_the_longest_context_fits_and_a_block_more_does_not(model: Model) -> None:
    gpus = parse_gpus("2x80GiB")
    longest = fit(model, gpus).longest
    assert fit(model, gpus, longest).fits
    assert not fit(model, gpus, longest + 16).fits


@pytest.mark.parametrize(
    ("parallel", "problem"),
    [(2, None), (8, None), (3, "8 key-value heads"), (5, "48 attention heads"), (32, "48 attention heads")],
)
def test_what_vllm_can_split(model: Model, parallel: int, problem: str | None) -> None:
    found = tensor_parallel_problem(model, parallel)
    assert found is None if problem is None else problem in str(found)


def test_gpus_that_do_not_divide_go_in_stages(model: Model) -> None:
    three = fit(model, parse_gpus("3x96GiB"), WHOLE)
    assert (three.tensor_parallel, three.pipeline_parallel) == (1, 3)
    assert three.kv_cache == 2 * 21 * 8 * 128 * 2 * WHOLE  # 21 of 62 layers on the fullest card
    assert three.fits


STAGES = ("1000x80GiB", None), ("63x24GiB", None), ("9999xH100", None), ("100x24GiB", 1)


@pytest.mark.parametrize(("cards", "tensor"), STAGES)
def test_no_more_pipeline_stages_than_layers(model: Model, cards: str, tensor: int | None) -> None:
    """What the remedy names is taken; so is every layer a stage."""
    with pytest.raises(InputError, match="pipeline stages, and the model has 62 layers") as refused:
        fit(model, parse_gpus(cards), WHOLE, "auto", tensor)
    fewer = fit(model, parse_gpus(refused.value.remedy.removeprefix("give ")), WHOLE, "auto", tensor)
    assert fewer.fits
    assert fewer.pipeline_parallel <= 62
    assert fit(model, parse_gpus("62x24GiB"), WHOLE, "auto", 1).pipeline_parallel == 62


def test_few_layers_bound_what_is_suggested(model: Model, published_job: Job) -> None:
    """Of a model with two layers: neither remedies, schemes nor common GPUs have more stages, which is no error."""
    short = replace(model, layers=model.layers[:2])
    odd = parse_gpus("3x16GiB")
    assert not can_split(short, odd)
    gpus = parse_gpus("2x4GiB")
    fits = [
        remedy.fit for remedy in remedies(published_job, short, gpus, fit(short, gpus, WHOLE, tensor_parallel=1), 1)
    ]
    assert all(row.pipeline_parallel <= 2 for row in (*fits, *common_fits(short)))
    assert ways(short, odd, WHOLE) == []


def test_a_context_that_is_not_known_is_asked_for(model: Model) -> None:
    with pytest.raises(
        InputError, match=r"config\.json does not say how long a text this model takes; give the tokens"
    ):
        fit(replace(model, longest=0), parse_gpus("2x96GiB"))


@pytest.mark.parametrize("name", ["context", "tp", "ram", "nodes", "gpus", "disk", "device_memory"])
@pytest.mark.parametrize("number", [0, -5])
def test_no_number_of_a_plan_is_less_than_one(name: str, number: int) -> None:
    vram = ["2x96GiB"] if name in ("context", "tp", "ram") else []
    with pytest.raises(InputError, match=f"^{name}: should be greater than or equal to 1, not {number}$"):
        plan("minimax-m2.1-fp8-int4", vram=vram, **{name: number})


def test_common_gpus(model: Model) -> None:
    rows = common_fits(model)
    assert {"2x96GiB", "4x80GiB"} <= {row.cards for row in rows if row.fits}
    assert "4x24GiB" not in {row.cards for row in rows}
    assert common_fits(replace(model, longest=0)) == [], "config.json need not say for how long texts a model is made"


ABSURD = ("1x0.5kB", "1x1EB", "1x4097GiB", "1x1000000TiB", "99999999999x80GiB", "10001xH100", "1.5x80GiB", "1e3x80GiB")


@pytest.mark.parametrize("text", ["", "x", "0x24GiB", "2x", "2x24", "2x0GiB", "-1x24GiB", "2x24GiX", *ABSURD])
def test_what_is_no_set_of_gpus(text: str) -> None:
    with pytest.raises(InputError, match="--vram"):
        parse_gpus(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--context", "4096"), "--context, --kv, --tp and --ram go with --vram"),
        (("--vram", "2x96GiB", "--tp", "3"), "--tp 3: does not divide the 2 GPUs"),
        (("--vram", "3x96GiB", "--tp", "3"), "--tp 3: 8 key-value heads"),
        (("--vram", "2x96GiB", "--context", "196609"), "this model takes 1 to 196,608 tokens"),
        (("--vram", "2xGB10", "--ram", "128GB"), "--ram with --vram 2xGB10: CPU and GPU share its memory"),
    ],
)
def test_what_is_refused(
    monkeypatch: pytest.MonkeyPatch, command: Command, published_job: Job, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr("quantizers.commands.plan.prepare", lambda *_, **__: published_job)
    assert command("plan", "minimax-m2.1-fp8-int4", *words) == 2
    assert command.out == ""
    assert message in command.err


@pytest.mark.parametrize(
    ("text", "count", "least", "most"),
    [
        ("2xH100", 2, 79, 80),
        ("4x4090", 4, 23.5, 24),
        ("8xH200", 8, 139, 141),
        ("4xRTX3090", 4, 23.5, 24),
        ("rtxpro 6000", 1, 94, 96),
        ("A100", 1, 79, 80),
        ("a100-40", 1, 39, 40),
        ("RTX-PRO-6000", 1, 94, 96),
        ("2 x RTX 6000 Ada", 2, 48, 48),
        ("B200", 1, 178, 180),
        ("nvidia L40S", 1, 44, 48),
        ("MI300X", 1, 191, 192),
        ("H20", 1, 96, 96),
        ("24GB", 1, 22.3, 22.4),
    ],
)
def test_gpus_by_name(text: str, count: int, least: float, most: float) -> None:
    """Never more than the vendor states, and not much less; a size is still a size."""
    gpus = parse_gpus(text)
    assert (gpus.name, gpus.count) == (text, count)
    assert least <= gpus.bytes / GIB <= most


def experts_of(scheme: str) -> float:
    """Bytes of M2.1's experts by arithmetic: codes, a bfloat16 scale for each group, three shapes of two int64."""
    bits, group = map(int, re.findall(r"\d+", scheme))
    return 62 * 256 * (3 * 3072 * 1536 * (bits + 16 / group) / 8 + 3 * 16)


@pytest.mark.parametrize(
    ("cards", "split", "longest"),
    [  # tensor and pipeline parallel, and the longest context of some schemes, with a cache in FP8
        ("4x3090", (4, 1), {"INT2 group 128": 138_064, "INT2 group 32": 55_120}),
        ("4x24GiB", (4, 1), {"INT2 group 128": 151_904, "INT2 group 32": 68_960}),
        ("1x96GiB", (1, 1), {"INT2 group 128": WHOLE, "INT2 group 32": 132_048}),
        ("2x96GiB", (2, 1), {"INT2 group 128": WHOLE, "INT4 group 32": WHOLE}),
        ("8x3090", (8, 1), {"INT2 group 64": WHOLE, "INT4 group 32": WHOLE}),
        ("6x24GiB", (2, 3), {"INT2 group 128": WHOLE, "INT4 group 128": 21_008}),
        ("1x128GiB", (1, 1), {"INT2 group 128": WHOLE, "INT3 group 32": 162_512}),
    ],
)
def test_what_fits_on_a_rig(model: Model, cards: str, split: tuple[int, int], longest: dict[str, int]) -> None:
    """By arithmetic from what a GPU has of the INT4 output: only the experts' bytes differ."""
    gpus, context = parse_gpus(cards), 65_536
    found = [way for way in ways(model, gpus, context) if way.longest["fp8"]]
    assert {way.scheme: way.longest["fp8"] for way in found if way.scheme in longest} == longest
    for way in found:
        tensor, pipeline = way.tensor_parallel, way.pipeline_parallel
        assert (tensor, pipeline) == split or "group 128" in way.scheme
        at = fit(model, gpus, context, "fp8", tensor)
        filled = 4 / 3 if tensor == 8 and "INT4" not in way.scheme else 1
        share = math.ceil(62 / pipeline) / 62 / tensor
        more = experts_of(way.scheme) * filled - experts_of("INT4 group 32")
        assert way.bytes == pytest.approx(131_800e6 + experts_of(way.scheme) - experts_of("INT4 group 32"), rel=1e-3)
        room = at.left + at.kv_cache - more * share
        per_token = kv_bytes_per_token(model, "fp8", tensor, pipeline)
        assert way.longest["fp8"] == pytest.approx(min(room / per_token, WHOLE), rel=1e-3)
        grown = (room - at.kv_cache - LITTLE) / share / filled
        assert way.budget["fp8"] == pytest.approx(way.bytes + grown if room > at.kv_cache else 0, rel=1e-3)
        for kv, mixture in way.mixture.items():
            assert not mixture or way.output < parse_bytes(mixture, "budget") <= way.budget[kv]


def test_all_of_a_budget_counts_before_a_run_has_chosen(model: Model) -> None:
    """Experts that grow evenly to the largest budget leave what budgets leave, and 0.1 GB more leaves less."""
    gpus = parse_gpus("4x3090")
    few = with_scheme(model, Integers(2, 64))
    most = largest_budget(few, fit(few, gpus, 65_536, "fp8"))
    full = with_budget(few, most)
    assert full.stored + full.beside == pytest.approx(most, abs=100)
    left = fit(full, gpus, 65_536, "fp8").left
    assert left == pytest.approx(LITTLE, abs=100)
    assert fit(with_budget(few, most + 10**8), gpus, 65_536, "fp8").left < left


def test_of_some_gpus_it_is_known_what_torch_sees(model: Model) -> None:
    """A 3090 is less than its 24 GiB; of a size, and of others, the nominal memory counts, which is said."""
    seen, nominal = parse_gpus("4x3090"), parse_gpus("4x24GiB")
    assert (seen.nominal, seen.sm, nominal.nominal, nominal.sm) == (False, 86, True, None)
    assert seen.bytes == int(23.56 * GIB)
    assert seen.of(8) == parse_gpus("8x3090")
    assert not any("nominal" in line for line in assumptions([seen]))
    assert any(
        line.startswith("4x24GiB, 1xL4: the nominal memory") for line in assumptions([nominal, parse_gpus("1xL4")])
    )
    flashinfer = [
        any("FLASHINFER" in line for line in assumptions([parse_gpus(one)])) for one in ("3090", "4090", "24GB")
    ]
    assert flashinfer == [True, False, True]


def test_little_memory_that_is_left_is_said(model: Model) -> None:
    gpus = parse_gpus("2x80GiB")
    longest = fit(model, gpus).longest
    rows = [fit(model, gpus, longest), fit(model, gpus, longest // 2), fit(model, gpus, WHOLE)]
    assert [any("of a GPU are left" in line for line in notes(model, [row])) for row in rows] == [True, False, False]


def test_experts_in_host_memory(model: Model) -> None:
    """M2.1 in INT4 on one card of 96 GiB: its 126.4 GB of experts, each 7.96 MB, and 62 layers."""
    experts, gpus = experts_of("INT4 group 32"), parse_gpus("1x96GiB")
    at = fit(model, gpus, 65_536)
    room = at.budget - (at.weights - experts) - at.kv_cache - at.activations - RUNTIME
    resident = int(room / (experts / 256))
    assert not at.fits
    paged, uva, kt = host_ways(model, gpus, at, 144 * 10**9, None)
    assert (paged.problem, uva.problem, kt.problem) == ("", "", "")
    assert (paged.needs, uva.needs, kt.needs) == ("from Ada on", "", "from Ada on"), "SGLang, of FP8 in blocks"
    assert paged.ram == kt.ram == pytest.approx(experts, rel=1e-6)
    assert f"--paged-experts-num-resident {resident} " in paged.command
    assert f"--kt-num-gpu-experts {resident} " in kt.command
    assert "--kt-cpuinfer CORES " in kt.command, "it has no default"
    assert uva.ram == math.ceil((experts - room) / GIB) * GIB, "vLLM counts GiB"
    assert f"--cpu-offload-gb {uva.ram // GIB} " in uva.command
    assert paged.on_gpu == pytest.approx(resident / 256)
    paged, uva, kt = host_ways(model, gpus, at, 64 * 10**9, "names do not fit")
    assert paged.problem == "needs 133 GB, 6 of it for the rest"
    assert (uva.problem, kt.problem, kt.command) == ("", "names do not fit", "")
    two, few = parse_gpus("2x48GiB"), with_scheme(model, Integers(2, 64))
    assert host_ways(model, two, fit(model, two, 65_536), 10**12, None)[0].problem == "it takes one GPU"
    assert host_ways(few, gpus, fit(few, gpus), 10**12, None)[0].problem == "it takes 4 and 8 bits"
    four = parse_gpus("4x3090")
    _, uva, kt = host_ways(model, four, fit(model, four, 65_536, "fp8"), 10**12, None)
    assert "--tensor-parallel-size 4 --kv-cache-dtype fp8 --attention-backend FLASHINFER " in uva.command
    assert (kt.problem, kt.command) == ("SGLang refuses FP8 in blocks before Ada: attention: bf16", "")
    without = replace(model, blocks={})
    wanted = {"vllm": "--reasoning-parser its", "sglang": "--its"}
    _, uva, kt = host_ways(without, four, fit(model, four, 65_536, "fp8"), 10**12, None, wanted)
    assert "--tensor-parallel-size 4 --its --kv-cache-dtype fp8_e4m3 " in kt.command
    assert "--tensor-parallel-size 4 --reasoning-parser its --kv-cache-dtype fp8 " in uva.command
    four = parse_gpus("4x4090")
    _, uva, kt = host_ways(model, four, fit(model, four, 65_536, "fp8"), 10**12, None)
    assert "--kv-cache-dtype fp8 --max-model-len 65536 --gpu-memory-utilization 0.93 " in uva.command
    assert "--tensor-parallel-size 4 --kv-cache-dtype fp8_e4m3 " in kt.command
    assert host_ways(model, parse_gpus("2x96GiB"), fit(model, parse_gpus("2x96GiB")), 10**12, None) == []
    small = parse_gpus("1x16GiB")
    assert all(way.problem for way in host_ways(model, small, fit(model, small, 65_536), 10**12, None))


def test_what_a_rig_takes_is_printed_as_documented(
    monkeypatch: pytest.MonkeyPatch, command: Command, published_job: Job
) -> None:
    """The table of docs/how-to/fit-a-rig.md, in 80 columns; a budget is named only where no larger scheme fits."""
    monkeypatch.setattr("quantizers.commands.plan.prepare", lambda *_, **__: published_job)
    cards = [word for one in ("4x3090", "6x24GiB", "8x141GiB") for word in ("--vram", one)]
    assert command("plan", "minimax-m2.1-fp8-int4", *cards, "--context", "65536") == 0
    documented = (Path(__file__).parents[2] / "docs/how-to/fit-a-rig.md").read_text(encoding="utf-8")
    table = re.search(r"^what 4x3090 take.*?(?=^```)", documented, re.DOTALL | re.MULTILINE)
    assert table is not None
    assert table[0] in command.out
    four, six, eight = command.out[: command.out.index("assumed:")].partition("what 4x3090")[2].split("\nwhat ")
    assert all(len(line) <= 80 for block in (four, six, eight) for line in block.splitlines())
    assert "pipeline stages" not in four
    assert "budgets fit if pipeline stages get equal parts" in six
    assert eight.strip().endswith("largest with a KV cache in 16 bit: INT8 group 32")


@pytest.mark.parametrize(
    ("model", "cards", "experts"),
    [
        (str(shipped("models") / "tiny-minimax-m2"), "1x24GiB", {"bits": 8, "group_size": 32}),
        pytest.param("MiniMaxAI/MiniMax-M2.1", "2x96GiB", {"bits": 4, "group_size": 32}, marks=EVERY),
        pytest.param("MiniMaxAI/MiniMax-M2.1", "4x3090", {"budget": "72.1GB", "tensor_parallel": 4}, marks=EVERY),
        pytest.param("MiniMaxAI/MiniMax-M2.1", "1x128GiB", {"budget": "115.4GB"}, marks=EVERY),
    ],
)
def test_a_new_recipe_for_a_rig(
    model: str, cards: str, experts: dict[str, object], tmp_path: Path, command: Command
) -> None:
    """The largest experts that fit; the recipe's own plan says that they do."""
    path, context = tmp_path / "new.yaml", ("--context", "65536") if "M2.1" in model else ()
    assert command("new", model, path, "--vram", cards, *context) == 0
    written = yaml.safe_load(path.read_text())
    assert experts.items() <= written["experts"].items()
    limit = {"4x3090": 0.4, "1x128GiB": 0.12}.get(cards, 0.05)  # of 2 bits, of 3, where INT3 fits, and of more
    assert written["verify"]["perplexity"]["max_kl"] == limit
    _, _, step = command.out.partition("next: quantize ")
    assert f"--vram {cards} " in step
    assert command(*shlex.split(step), "--json") == 0
    (row,) = json.loads(command.out)["fits"]
    assert row["fits"]
    assert row["command"].startswith("vllm serve OUT")
    assert command("new", model, tmp_path / "no.yaml", "--vram", "1x1GiB", *context) == 2
    assert "nothing fits 1x1GiB" in command.err
    assert "however short the context is" in command.err
    assert not (tmp_path / "no.yaml").exists()
    assert command("new", model, tmp_path / "no.yaml", "--context", "4096") == 2


@pytest.mark.parametrize("context", [110_416, 137_000, 138_064])
def test_a_new_recipe_asks_for_no_budget_that_is_too_small(
    monkeypatch: pytest.MonkeyPatch, published_job: Job, context: int, command: Command, tmp_path: Path
) -> None:
    """Where no budget above the smallest scheme leaves enough, the recipe has the largest scheme that fits.

    At 110,416 tokens INT2 in groups of 64 fits and leaves nothing, so there it has a smaller budget.
    """
    monkeypatch.setattr("quantizers.commands.plan.prepare", lambda *_, **__: published_job)
    path = tmp_path / "new.yaml"
    assert command("new", "MiniMaxAI/MiniMax-M2.1", path, "--vram", "4x3090", "--context", context) == 0
    experts = yaml.safe_load(path.read_text())["experts"]
    if context > 110_416:
        assert (experts["bits"], experts["group_size"]) == (2, 128)
        assert "budget" not in experts
    else:
        plan = published_job.plan.with_schemes([Integers(2, 128)] * 62)
        least = sum(file_size(plan.shard(part)) for part in plan.parts)
        plan = published_job.plan.with_schemes([Integers(2, 64)] * 62)
        fuller = sum(file_size(plan.shard(part)) for part in plan.parts)
        assert least <= parse_bytes(experts["budget"], "budget") < fuller
    assert command("new", "MiniMaxAI/MiniMax-M2.1", tmp_path / "no.yaml", "--vram", "4x3090", "--context", 140_000) == 2
    assert "or --context 138064 at most" in command.err


def test_the_command_to_serve_with_is_complete(
    monkeypatch: pytest.MonkeyPatch, command: Command, published_job: Job
) -> None:
    """Its split, parsers, cache and memory; with FlashInfer where it must be. None for what does not fit."""
    monkeypatch.setattr("quantizers.commands.plan.prepare", lambda *_, **__: published_job)
    cards = [word for one in ("8x3090", "8x4090", "4x3090") for word in ("--vram", one)]
    words = ("plan", "minimax-m2.1-fp8-int4", *cards, "--context", "65536", "--kv", "fp8")
    assert command(*words, "--json") == 0
    *both, none = (row["command"] for row in json.loads(command.out)["fits"])
    assert none is None
    options = [
        "--tensor-parallel-size 8", "--enable-auto-tool-choice", "--tool-call-parser minimax_m2",
        "--reasoning-parser minimax_m2", "--kv-cache-dtype fp8", "--attention-backend FLASHINFER",
        "--max-model-len 65536", "--gpu-memory-utilization 0.93",
    ]  # fmt: skip
    assert [one.split(" \\\n    ") for one in both] == [
        ["vllm serve OUT", *options],
        ["vllm serve OUT", *(option for option in options if "FLASHINFER" not in option)],
    ]
    assert command(*words) == 0
    assert f"to serve it on 8x3090, OUT being its folder (not tried):\n{both[0]}\n" in command.out
    assert command(*words[:2], "--vram", "4x3090", "--context", 150_000) == 0
    assert "no scheme fits; INT2 group 128 does with --context 138064 --kv fp8" in command.out


def test_the_rig_recipe_fits_and_is_served_as_documented(command: Command) -> None:
    """The recipe for 96 GB, its budget filled, on 4x3090; fit-a-rig.md has the whole command that the plan prints."""
    words = ("plan", "minimax-m2.1-fp8-96gb", "--vram", "4x3090", "--context", "65536", "--kv", "fp8")
    assert command(*words, "--json") == 0
    figures = json.loads(command.out)
    assert figures["counted"] == 72_000_000_000
    (row,) = figures["fits"]
    assert row["left"] >= LITTLE
    documented = (Path(__file__).parents[2] / "docs/how-to/fit-a-rig.md").read_text(encoding="utf-8")
    assert f"\n{row['command']}\n".replace(" OUT ", " /data/M2.1-96GB ") in documented


SMALL = ("2xH100", "4x4090", "2x94GiB")


@pytest.mark.slow
def test_what_would_make_it_fit_fits(model: Model, published_job: Job) -> None:
    """Each remedy is given to the estimate as its words say it, with nothing else changed."""
    said = set()
    for gpus in map(parse_gpus, SMALL):
        before = fit(model, gpus)
        assert not before.fits
        remedied = list(remedies(published_job, model, gpus, before))
        assert remedied
        for way in remedied:
            if fewer_bits := re.fullmatch(r"experts.bits: (\d) with group_size: (\d+) in the recipe", way.say):
                plan = published_job.plan.with_schemes([Integers(*map(int, fewer_bits.groups()))] * 62)
                job = published_job
                small = serving_model(plan, job.facts)
                assert fit(small, gpus) == way.fit
                assert way.fit.fits
                said.add("experts")
                continue
            words = shlex.split(way.say)
            said.add(words[0])
            options = dict(zip(words[::2], words[1::2], strict=True))
            other = parse_gpus(options.get("--vram", gpus.name))
            context = int(options.get("--context", WHOLE))
            assert fit(model, other, context, options.get("--kv", "auto")).fits, way.say
            assert fit(model, other, context, options.get("--kv", "auto")) == way.fit
            if "--vram" in options:
                assert other.bytes == gpus.bytes
                fewer = [other.of(count) for count in range(gpus.count, other.count)]
                assert not any(fit(model, one, context, options.get("--kv", "auto")).fits for one in fewer), way.say
    assert said == {"--context", "--kv", "--vram", "experts"}


def test_fewer_bits_are_a_remedy_where_they_are_enough(tmp_path: Path, write_recipe: Callable[..., Path]) -> None:
    """Where the same plan with fewer bits fits; with a budget its own key is named, and planning with it fits."""
    for key, experts in (
        ("bits", {"bits": 8, "group_size": 32}),
        ("bits_per_weight", {"bits": None, "group_size": None, "bits_per_weight": 8.5}),
        ("budget", {"bits": None, "group_size": None, "budget": "4MB"}),
    ):
        given = {name: value for name, value in experts.items() if value is not None}
        recipe = write_recipe(tmp_path / key)
        body = yaml.safe_load(recipe.read_text())
        body["experts"] = given
        recipe.write_text(yaml.safe_dump(body))
        job = prepare(str(recipe))
        large = serving_model(job.plan, job.facts)
        gpus = Gpus("1x1GiB", 1, int((RUNTIME + 24 * MIB) / UTILISATION))
        room = fit(large, gpus, 16)
        gpus = Gpus("1x1GiB", 1, int((room.weights + room.activations + RUNTIME + room.kv_cache - 1) / UTILISATION))
        asked = fit(large, gpus, 16)
        assert not asked.fits
        way = next(way for way in remedies(job, large, gpus, asked) if way.say.startswith(f"experts.{key}: "))
        assert way.fit.fits
        assert way.fit.weights < asked.weights
        value = way.say.removesuffix(" in the recipe").removeprefix("experts.")
        changes = dict(part.split(": ") for part in value.split(" with "))
        body["experts"] = {name: yaml.safe_load(text) for name, text in changes.items()}
        recipe.write_text(yaml.safe_dump(body))
        again = prepare(str(recipe))
        smaller = serving_model(again.plan, again.facts)
        assert fit(smaller, gpus, 16).fits, way.say


def test_groups_of_experts_that_are_converted_are_not_split() -> None:
    """In the estimate of a plan and in the check of its files: 80 columns of each of two GPUs are no groups of 32."""
    model = tiny_model(intermediate_size=160, quantization_config=None)
    plan = model.plan(convert="mxfp4")
    problem = tensor_parallel_problem(serving_model(plan, model.facts), 2)
    assert problem is not None
    assert problem.startswith("the experts' width per rank, 80, is not a multiple of the group, 32")
    written = {name: spec for action in plan.actions for name, spec in action.outputs.items()}
    checked = check(output_config(model.config, model.facts, plan), written, model.facts)
    assert checked.tensor_parallel[2] == problem
    assert tensor_parallel_problem(serving_model(model.plan(convert="nvfp4"), model.facts), 2) is None


@pytest.mark.slow
def test_the_command_says_what_would_fit(monkeypatch: pytest.MonkeyPatch, command: Command, published_job: Job) -> None:
    """What it suggests is typed again, and fits."""
    monkeypatch.setattr("quantizers.commands.plan.prepare", lambda *_, **__: published_job)
    words = ("plan", "minimax-m2.1-fp8-int4", "--vram", "2xH100", "--vram", "8xH200")
    assert command(*words) == 0
    assert command.err == ""
    lines = command.out.splitlines()
    assert next(line for line in lines if line.startswith("8xH200")).endswith(" fits")
    assert next(line for line in lines if line.startswith("2xH100")).endswith("does NOT fit")
    assert "assumed:" in lines
    assert "8xH200 fits with up to 196,608 tokens of context, the model's longest" in command.out
    line = next(line for line in lines if line.startswith("2xH100, to fit: "))
    remedied = line.removeprefix("2xH100, to fit: ").split("; or ")
    assert len(remedied) == 4
    # The estimate of each is tried above; a command takes seconds, so only the last is typed.
    assert command(*words[:2], *shlex.split(remedied[-1]), "--json") == 0
    assert [row["fits"] for row in json.loads(command.out)["fits"]] == [True]
    assert command(*words, "--json") == 0
    assert [one["say"] for one in json.loads(command.out)["fits"][0]["to_fit"]] == remedied
