"""The importance matrix: sums against hooks on transformers' whole model, and names against gguf-py's map."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import families
import gguf
import pytest
import torch
import zoo
from commands import Command
from rank_threads import together
from runs import Small
from safetensors import safe_open
from sets import rows_set
from torch import Tensor
from whole_models import source_weights

import quantizers
from quantizers.calibration.load_set import load_set
from quantizers.commands.question import Question
from quantizers.llama_cpp.imatrix import write_sums
from quantizers.llama_cpp.imatrix_file import write_imatrix
from quantizers.llama_cpp.input_sums import Sums, no_sums
from quantizers.pipeline import layer_entry
from quantizers.system.errors import OutputError, QuantizeError

CPU = torch.device("cpu")
WORDS = "def add ( a , b ) return the sum of two numbers die Summe zweier Zahlen"
ARCHITECTURES = {
    "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
}
Read = dict[str, tuple[Tensor, Tensor]]  # by matrix Σ x² (N, C) and counts (N, 1), in float64


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of texts of several lengths."""
    return rows_set(tmp_path_factory.mktemp("texts"), [("a", (WORDS * 3)[7 * n : 30 * n + 40]) for n in range(5)])


def read(path: Path) -> tuple[gguf.GGUFReader, Read]:
    """A file by gguf's own reader."""
    reader = gguf.GGUFReader(path)
    parts = {tensor.name: torch.from_numpy(tensor.data.copy()).double() for tensor in reader.tensors}
    assert {tensor.tensor_type for tensor in reader.tensors} == {gguf.GGMLQuantizationType.F32}
    names = [name.removesuffix(".counts") for name in parts if name.endswith(".counts")]
    assert len(parts) == 2 * len(names)
    return reader, {name: (parts[f"{name}.in_sum2"], parts[f"{name}.counts"]) for name in names}


def oracle(model: Any, texts: list[Tensor], every: bool) -> Read:
    """Σ x² of every linear module and expert of a whole model, token by token, by names of its modules."""
    sums: dict[str, Any] = defaultdict(float)
    counts: dict[str, Any] = defaultdict(int)

    def add(name: str, rows: Tensor) -> None:
        for row in rows.flatten(0, -2).double():
            sums[name] = sums[name] + row.square()
            counts[name] += 1

    def of_experts(name: str, module: Any, x: Tensor, chosen: Tensor) -> None:
        for row, numbers in zip(x, chosen.tolist(), strict=True):
            for expert in range(len(module.gate_up_proj)) if every else numbers:
                gate, up = (module.gate_up_proj[expert] @ row).chunk(2)
                add(f"{name}.{expert}.gate", row[None])
                add(f"{name}.{expert}.down", (torch.nn.functional.silu(gate) * up)[None])

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(
                lambda m, args, kwargs, name=name: of_experts(name, m, *[*args, *kwargs.values()][:2]), with_kwargs=True
            )
        elif isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, args, name=name: add(name, args[0]))
        if name.endswith("q_b_proj"):
            module.register_forward_hook(lambda _, __, output, name=name: add(f"{name} made", output))
    with torch.no_grad():
        for text in texts:
            model(text[None])
    return {name: (sums[name], torch.tensor(counts[name])) for name in sums}


def same(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(found[1].flatten(), wanted[1].double().flatten())
    torch.testing.assert_close(found[0].flatten(), wanted[0].flatten(), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
    ("family", "tokens"),
    [
        ("minimax_m2", "routed"),
        pytest.param("minimax_m2", "all", marks=pytest.mark.every),
        ("qwen3_moe", "all"),
        pytest.param("qwen3_moe", "routed", marks=pytest.mark.every),
        ("deepseek_v3", "routed"),
        pytest.param("deepseek_v3", "all", marks=pytest.mark.every),
    ],
)
@pytest.mark.slow
def test_sums_equal_hooks_on_the_whole_model(family: str, tokens: Any, texts: Path, tmp_path: Path) -> None:
    """Attention, latent and not, dense layers, shared and routed experts, and the head."""
    folder, path = families.write(tmp_path / "model", family), tmp_path / "out.gguf"
    figures = quantizers.imatrix(model=folder, data=texts, output=path, tokens=tokens, work=tmp_path).figures
    own, weights = source_weights(folder)
    samples = [torch.from_numpy(sample.tokens).long() for sample in load_set(texts, str(folder)).samples]
    assert len({len(sample) for sample in samples}) > 3, "padding is not tested"
    wanted = oracle(families.whole_model(own, weights), samples, every=tokens == "all")
    reader, found = read(path)
    count, seen = own.get("n_routed_experts") or own.get("num_local_experts") or own["num_experts"], set[str]()
    experts_at = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")
    linears = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "attn_q_a": "self_attn.q_a_proj", "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_b": "self_attn.kv_b_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    }  # fmt: skip
    for name, (squares, counts) in found.items():
        if match := experts_at.fullmatch(name):
            for expert in range(count):
                key = f"model.layers.{match[1]}.mlp.experts.{expert}.{'down' if match[2] == 'down' else 'gate'}"
                if key in wanted:
                    same((squares[expert], counts[expert]), wanted[key])
                else:
                    assert (float(squares[expert].sum()), float(counts[expert])) == (0, 0)
                    assert expert in figures["without_tokens"][name]
                seen.add(key)
            continue
        _, layer, last, _ = name.split(".") if name != "output.weight" else ("", "", "", "")
        prefix = f"model.layers.{layer}."
        if last == "attn_k_b":  # each head's query without its rotary part
            heads, width = own["num_attention_heads"], own["qk_nope_head_dim"]
            made, rows = wanted[f"{prefix}self_attn.q_b_proj made"]
            same((squares, counts), (made.view(heads, -1)[:, :width], rows))
        elif last == "attn_v_b":
            latent, rows = wanted[f"{prefix}self_attn.kv_b_proj"]
            same((squares, counts), (latent.repeat(own["num_attention_heads"]), rows))
        else:
            key = prefix + linears[last] if last else "lm_head"
            same((squares, counts), wanted[key])
            seen.add(key)
    assert not {key for key in wanted if not key.endswith("made")} - seen, "of all that the whole model computes"
    assert reader.fields["general.type"].contents() == "imatrix"
    assert "general.architecture" not in reader.fields
    assert reader.fields["imatrix.datasets"].contents() == ["mine"]
    assert reader.fields["imatrix.chunk_size"].contents() == max(map(len, samples))
    assert reader.fields["imatrix.chunk_count"].contents() == sum(map(len, samples)) // max(map(len, samples))
    assert not (tokens == "all" and figures["without_tokens"])


def test_routed_tokens_count_more_where_both_are_added(texts: Path, tmp_path: Path) -> None:
    """At an even load, K of E experts a token, they have 9 times the weight of all tokens; and no count is 0."""
    folder, kinds = families.write(tmp_path / "model", "qwen3_moe"), ("both", "all", "routed")
    for kind in kinds:
        quantizers.imatrix(model=folder, data=texts, output=tmp_path / kind, tokens=kind)
    both, every, routed = (read(tmp_path / kind)[1] for kind in kinds)
    times = 9 * 8 // 2
    for name, (squares, counts) in both.items():
        more = times if "exps" in name else 0
        same((squares, counts), (every[name][0] + more * routed[name][0], every[name][1] + more * routed[name][1]))
        assert bool((counts > 0).all())


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.slow
def test_names_are_those_of_every_matrix_that_is_published(family: str, texts: Path, tmp_path: Path) -> None:
    """As convert_hf_to_gguf.py makes them of a checkpoint's names: experts joined, kv_b_proj in halves."""
    folder, path = families.write(tmp_path / "model", family), tmp_path / "out.gguf"
    figures = quantizers.imatrix(model=folder, data=texts, output=path).figures
    layers = families.config(family)["num_hidden_layers"]
    names, wanted = gguf.get_tensor_name_map(ARCHITECTURES[family], layers), set[str]()
    for shard in folder.glob("*.safetensors"):
        with safe_open(shard, "pt") as stored:
            names_in_file = list(stored.keys())
            matrices = [n for n in names_in_file if n.endswith(".weight") and len(stored.get_slice(n).get_shape()) == 2]
        for name in matrices:
            if families.is_mtp(families.config(family), name) or name.endswith(("gate.weight", "embed_tokens.weight")):
                continue
            halves = [name.replace("kv_b_proj", half) for half in ("kv_b_proj", "k_b_proj", "v_b_proj")]
            for one in halves:
                wanted.add(str(names.get_name(re.sub(r"experts\.\d+\.", "experts.", one), (".weight",))))
    assert set(read(path)[1]) == wanted
    assert figures["unnamed"] == []
    assert figures["architecture"] == gguf.MODEL_ARCH_NAMES[ARCHITECTURES[family]]


def test_linear_attention_of_qwen3_5_has_llama_cpps_order_of_heads(texts: Path, tmp_path: Path) -> None:
    """And with vision the names are those of the text model."""
    folder, path = zoo.save("qwen3_5_moe with vision", tmp_path / "model"), tmp_path / "out.gguf"
    figures = quantizers.imatrix(model=folder, data=texts, output=path).figures
    own, weights = source_weights(folder)
    samples = [torch.from_numpy(sample.tokens).long() for sample in load_set(texts, str(folder)).samples]
    wanted = oracle(zoo.whole_model("qwen3_5_moe with vision", own, weights).model.language_model, samples, every=False)
    squares, rows = wanted["layers.0.linear_attn.out_proj"]
    found = read(path)[1]
    tiled = squares.view(2, 2, -1).permute(1, 0, 2)  # key heads, value heads of each, width
    same(found["blk.0.ssm_out.weight"], (tiled, rows))
    same(found["blk.0.attn_qkv.weight"], wanted["layers.0.linear_attn.in_proj_qkv"])
    same(found["blk.1.attn_q.weight"], wanted["layers.1.self_attn.q_proj"])
    same(found["blk.0.ffn_up_shexp.weight"], wanted["layers.0.mlp.shared_expert.up_proj"])
    assert {"blk.0.ffn_gate_up_exps.weight", "blk.0.attn_gate.weight", "output.weight"} <= set(found)
    assert figures["unnamed"] == []


def test_several_processes_add_up_to_one(texts: Path, tmp_path: Path) -> None:
    folder = families.write(tmp_path / "model", "qwen3_moe")
    question = Question(str(folder), "main", False, (texts,), "x")
    whole = write_sums(question, tmp_path / "one.gguf", "routed", CPU, tmp_path / "alone")
    first, second = together(
        2, lambda dist: write_sums(question, tmp_path / "two.gguf", "routed", CPU, tmp_path / "both", dist)
    )
    assert first == whole | {"output": str(tmp_path / "two.gguf")}
    assert second == {}
    one, two = read(tmp_path / "one.gguf")[1], read(tmp_path / "two.gguf")[1]
    assert one.keys() == two.keys()
    for name in one:
        same(two[name], one[name])


def test_rows_that_are_not_finite_are_left_out_and_counted() -> None:
    sums = no_sums(2, 3, CPU)
    sums.add(torch.tensor([[1.0, 2, 3], [torch.nan, 0, 0], [0, torch.inf, 0], [2, 0, 0]]), 1)
    assert sums.squares.tolist() == [[0, 0, 0], [5, 4, 9]]
    assert (sums.counts.tolist(), sums.left_out.tolist()) == ([0, 2], [0, 2])


def test_a_sum_that_is_not_finite_is_never_written(tmp_path: Path) -> None:
    none = torch.zeros(1, dtype=torch.int64)
    bad = Sums(torch.full((1, 4), torch.inf), none, none)
    with pytest.raises(QuantizeError, match=r"blk\.0\.attn_q\.weight: Σ x² of its inputs is not finite"):
        write_imatrix(tmp_path / "a.gguf", {"blk.0.attn_q.weight": bad}, ["x"], [1])
    assert list(tmp_path.iterdir()) == []


def test_the_command(command: Command, texts: Path, tmp_path: Path) -> None:
    """Experts without a token are named; a type without names in llama.cpp is refused before any work."""
    few, path = rows_set(tmp_path / "few", [("a", "ab")]), tmp_path / "out.gguf"
    folder = families.write(tmp_path / "model", "minimax_m2")
    asked = ("imatrix", "--model", folder, "--data", few, "-o", path, "--tokens", "routed")
    assert command(*asked, "--json") == 0
    found = json.loads(command.out)
    empty = found["without_tokens"]["blk.0.ffn_down_exps.weight"]
    assert empty
    counts = read(path)[1]["blk.0.ffn_down_exps.weight"][1].flatten()
    assert [expert for expert, count in enumerate(counts.tolist()) if not count] == empty
    assert command(*asked) == 0
    missing = sum(len(experts) for name, experts in found["without_tokens"].items() if "down" in name)
    assert f"no token reached {missing} experts, of which llama.cpp has partial data" in command.out
    other = zoo.save("flex_olmo", tmp_path / "other")
    assert command("imatrix", "--model", other, "--data", few, "-o", tmp_path / "other.gguf") == 2
    assert "flex_olmo: the installed gguf package knows no llama.cpp architecture" in command.err
    assert not (tmp_path / "other.gguf").exists()
    assert command("imatrix", "--model", folder, "--data", few, "-o", tmp_path) == 2
    assert f"--output {tmp_path}: cannot be written (Is a directory); give a file in it" in command.err


@pytest.mark.parametrize("from_the_start", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_run_that_resumes_writes_the_matrix_of_the_source(
    from_the_start: bool, small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the command does, bit for bit; also where it is first asked for when the run resumes."""
    wanted, output = tmp_path / "wanted.gguf", tmp_path / "output"
    quantizers.imatrix(small.recipe, wanted)
    real = layer_entry.write_json

    def interrupted(path: Path, entry: Any) -> None:
        real(path, entry)
        if entry.get("layer") == 1:
            raise QuantizeError("", "cut off")

    with monkeypatch.context() as patched:
        patched.setattr(layer_entry, "write_json", interrupted)
        with pytest.raises(QuantizeError, match="cut off"):
            quantizers.run(small.recipe, output, imatrix=from_the_start)
    assert len(list((output / ".quantize").glob("imatrix/0*.safetensors"))) == 2 * from_the_start
    quantizers.run(small.recipe, output, imatrix=True)
    assert (tmp_path / "output.imatrix.gguf").read_bytes() == wanted.read_bytes()
    for file in output.glob("*.safetensors"):
        assert file.read_bytes() == (small.whole / file.name).read_bytes()
    (tmp_path / "output.imatrix.gguf").unlink()
    with pytest.raises(OutputError, match="was finished before, without an importance matrix"):
        quantizers.run(small.recipe, output, imatrix=True)
