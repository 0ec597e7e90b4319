"""llama.cpp's names for a model's matrices, by gguf-py's own map, and its file of an importance matrix.

A GGUF file with `general.type` "imatrix", and for each matrix two float32 tensors (tools/imatrix/imatrix.cpp):

    NAME.in_sum2  (N, C)  Σ x² of its inputs
    NAME.counts   (N, 1)  the rows that were added up

N is the number of experts, or 1. `llama-quantize` divides the one by the other; where a count is 0 it weighs all
columns of that expert alike. Matrices of each head, the halves of latent attention, are one row, head after head, with
one count. Files are merged by adding both up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.system.errors import ArchitectureError, QuantizeError
from quantizers.system.files import atomic, disk_errors
from quantizers.system.formatting import ranges

from .input_sums import DOWN, GATE, HEAD, KV_B, Sums, read_sums

if TYPE_CHECKING:
    from gguf import MODEL_ARCH

    from quantizers.calibration.samples import CalibrationData

# llama.cpp's architectures of the model types whose name is another one there, from its convert_hf_to_gguf.py.
OTHERS = {
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "deepseek_v32": "deepseek32", "glm4_moe_lite": "deepseek2",
    "glm4v_moe": "glm4moe", "glm_moe_dsa": "glm-dsa", "granitemoehybrid": "granitehybrid",
    "granitemoeshared": "granitemoe", "hunyuan_v1_moe": "hunyuan-moe", "kimi_k2": "deepseek2",
    "mimo_v2_flash": "mimo2", "minimax_m3_vl": "minimax-m3", "mixtral": "llama", "solar_open": "glm4moe",
    "step3p7": "step35",
}  # fmt: skip
EXPERT_TENSORS = {GATE: ("FFN_GATE_EXP", "FFN_UP_EXP", "FFN_GATE_UP_EXP"), DOWN: ("FFN_DOWN_EXP",)}
MOST = 5  # matrices that are named of each kind; --json has all
V_B = ".v_b_proj"  # as convert_hf_to_gguf.py calls the half of kv_b_proj that makes values
# What else it makes of a linear module: of Qwen3-Next's older releases wrote the whole.
ALSO = {
    "linear_attn.in_proj_qkvz": ("ATTN_QKV", "ATTN_GATE"),
    "shared_mlp.input_linear": ("FFN_GATE_SHEXP", "FFN_UP_SHEXP"),
}
TILED = ("qwen3_5", "qwen4")  # beginnings of model types whose linear attention gets another order of heads


def architecture_of(facts: Architecture) -> MODEL_ARCH:
    """gguf-py's architecture of a model type; an ArchitectureError if it knows none with experts."""
    from gguf import MODEL_ARCH_NAMES, MODEL_TENSOR, MODEL_TENSORS

    model_type = facts.model_type.removesuffix("_text")
    wanted = OTHERS.get(model_type, model_type)
    for architecture, name in MODEL_ARCH_NAMES.items():
        same = re.sub("[^a-z0-9]", "", name) == re.sub("[^a-z0-9]", "", wanted)
        if same and MODEL_TENSOR.FFN_DOWN_EXP in MODEL_TENSORS[architecture]:
            return architecture
    raise ArchitectureError(
        facts.model_type,
        "the installed gguf package knows no llama.cpp architecture with experts for this model type, so its matrices "
        "have no names there",
        "a newer gguf may",
    )


def by_llama_cpp_names(
    architecture: MODEL_ARCH, folder: Path, facts: Architecture, config: Mapping[str, Any]
) -> tuple[dict[str, Sums], list[str]]:
    """The sums of a whole model by llama.cpp's names, such as blk.0.attn_q.weight.

    Args:
        folder: where `InputSums` has kept them.
        config: config.json.

    Returns:
        They, and the published names of matrices that gguf-py has no name for, or that no text reached.
    """
    from gguf import MODEL_TENSORS, TENSOR_NAMES, get_tensor_name_map

    name_map = get_tensor_name_map(architecture, facts.num_layers)
    known = {tensor.name: tensor for tensor in MODEL_TENSORS[architecture]}
    named, unnamed = dict[str, Sums](), list[str]()

    def llama_cpp_name(published: str) -> str | None:
        return name_map.get_name(re.sub(r"^(model\.)?language_model\.(model\.)?", "model.", published), (".weight",))

    for number in range(facts.num_layers):
        for name, sums in read_sums(folder, number).items():
            mapped = None if name in EXPERT_TENSORS else llama_cpp_name(facts.layer(number, f"{name}.weight"))
            names = [mapped] if mapped else []
            tensors = [known[tensor] for tensor in (EXPERT_TENSORS | ALSO).get(name, ()) if tensor in known]
            names += [f"{TENSOR_NAMES[tensor].format(bid=number)}.weight" for tensor in tensors]
            if not names or not int(sums.counts.sum()):
                unnamed.append(facts.layer(number, name))
                continue
            tiled = facts.model_type.startswith(TILED) and name.endswith("linear_attn.out_proj")
            named |= dict.fromkeys(names, _tiled(sums, config.get("text_config", config)) if tiled else sums)
            values = llama_cpp_name(facts.layer(number, f"{name.removesuffix(KV_B)}{V_B}.weight"))
            if name.endswith(KV_B) and values:  # each head's part of it reads all of the input
                named[values] = replace(sums, squares=sums.squares.repeat(1, facts.num_heads))
    if head := llama_cpp_name(facts.head):
        named[head] = read_sums(folder, None)[HEAD]
    else:
        unnamed.append(facts.head)
    return named, unnamed


def _tiled(sums: Sums, config: Mapping[str, Any]) -> Sums:
    """Columns in the order of convert_hf_to_gguf.py for Qwen3.5's linear attention: the first value head of each key
    head, then the second ones, where published are all of the first key head, then those of the second.
    """
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    squares = sums.squares.unflatten(1, (keys, values // keys, -1)).transpose(1, 2).flatten(1)
    return replace(sums, squares=squares)


def write_imatrix(path: Path, matrices: Mapping[str, Sums], datasets: Sequence[str], lengths: Sequence[int]) -> None:
    """Write the file, atomically.

    Args:
        datasets: what the texts are called.
        lengths: tokens of each text; llama.cpp's "chunk size" is the longest one.

    Raises:
        QuantizeError: a sum is not finite in float32, or the disk is full.
    """
    from gguf import GGUFWriter

    class Writer(GGUFWriter):
        def add_architecture(self) -> None:  # which it would add; a matrix has a type instead
            self.add_type("imatrix")

    for name, sums in matrices.items():
        if not bool(torch.isfinite(sums.squares).all()):
            raise QuantizeError(name, "Σ x² of its inputs is not finite", "llama-quantize would refuse it")
    with disk_errors(path), atomic(path) as stream:
        writer = Writer(stream.name, "")
        writer.add_array("imatrix.datasets", list(datasets))
        writer.add_uint32("imatrix.chunk_count", max(1, sum(lengths) // max(lengths)))
        writer.add_uint32("imatrix.chunk_size", max(lengths))
        for name in sorted(matrices):
            sums = matrices[name]
            writer.add_tensor(f"{name}.in_sum2", sums.squares.numpy())
            writer.add_tensor(f"{name}.counts", sums.counts.float().unsqueeze(1).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def make_imatrix(
    path: Path, folder: Path, facts: Architecture, config: Mapping[str, Any], data: CalibrationData
) -> dict[str, Any]:
    """Write the matrix of what `InputSums` has kept in a folder; returns what is said of it, see `imatrix_table`."""
    from gguf import MODEL_ARCH_NAMES

    architecture, lengths = architecture_of(facts), [len(sample.tokens) for sample in data.samples]
    matrices, unnamed = by_llama_cpp_names(architecture, folder, facts, config)
    write_imatrix(path, matrices, [data.name], lengths)
    experts = {name: sums for name, sums in matrices.items() if len(sums.counts) > 1}
    empty = {name: (sums.counts == 0).nonzero().flatten().tolist() for name, sums in experts.items()}
    left_out = {name: int(sums.left_out.sum()) for name, sums in matrices.items()}
    return {
        "output": str(path),
        "set": data.name,
        "tokens": sum(lengths),
        "architecture": MODEL_ARCH_NAMES[architecture],
        "matrices": len(matrices),
        "without_tokens": {name: numbers for name, numbers in empty.items() if numbers},
        "left_out": {name: rows for name, rows in left_out.items() if rows},
        "unnamed": unnamed,
        "not_computed": list(facts.mtp_layers),
    }


def imatrix_table(figures: Mapping[str, Any]) -> str:
    """Text output for an importance matrix: its file, and the data that it lacks."""
    lines = [
        f"{figures['output']}: importance matrix of {figures['matrices']} matrices of {figures['architecture']}, from "
        f"{figures['tokens']:,} tokens of {figures['set']}"
    ]
    down = {name: experts for name, experts in figures["without_tokens"].items() if "ffn_down_exps" in name}
    count = sum(map(len, down.values()))
    left_out = [f"{name} ({rows:,} rows)" for name, rows in figures["left_out"].items()]
    for head, named in (
        (
            f"no token reached {count} experts, of which llama.cpp has partial data; --tokens both or all has it",
            [f"{name.split('.ffn_')[0]} {ranges(experts)}" for name, experts in down.items()],
        ),
        ("rows that are not finite are left out of", left_out),
        ("left out, without a name in llama.cpp or unused", figures["unnamed"]),
        ("no data for layers that predict further tokens", list(map(str, figures["not_computed"]))),
    ):
        more = f", and {len(named) - MOST} more (--json)" if len(named) > MOST else ""
        lines += [f"{head}: {', '.join(named[:MOST])}{more}"] if named else []
    return "\n".join(lines)
