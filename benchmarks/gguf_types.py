"""KL of the experts in llama.cpp's types beside ours, at the size of each, on one model with the same tokens.

    pip install libgguf && python benchmarks/gguf_types.py tiny-minimax-m2-fp8-int4

The types are quantized by libgguf's native reference with the importance matrix of `quantize imatrix`: for each expert
the squares of its inputs, over the calibration tokens that the router sends to it, over all, or both (--importance).
All but the experts stays as it is. Rows shorter than a super-block of 256 are laid end to end, with their importance
repeated.

The tiny model has outlier channels by powers of two, in the norm before the experts and between w3 and w2. AWQ folds
such channels away, and a type of llama.cpp cannot, so both models are measured: with them, and with the same function
without them (flat).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from methods import Method, calibration_data, held_out, options, quantized, recipe_job, spread, variant
from safetensors.torch import save_file

from quantizers.architectures.matrices import MATRICES
from quantizers.budget.choice import choose_schemes
from quantizers.calibration.samples import CalibrationData, token_tensors
from quantizers.checkpoint.reader import Checkpoint, open_folder
from quantizers.device.devices import choose_device
from quantizers.formats.dequantization import read_weight
from quantizers.formats.packed_integers import Integers
from quantizers.llama_cpp.input_sums import DOWN, GATE, InputSums, Tokens, read_sums
from quantizers.model.streamed_model import StreamedModel
from quantizers.planning.device_memory import Placement, Residents
from quantizers.planning.job import Job, prepare
from quantizers.recipe.read import changes_of
from quantizers.system.formatting import text_table
from quantizers.walk.context import Context
from quantizers.walk.walk import all_tensors, walk

TYPES = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "Q2_K", "IQ3_XXS", "IQ3_S", "Q3_K", "IQ4_XS", "Q4_K")
SCHEMES = (Integers(2, 64), Integers(2, 32), Integers(3, 64), Integers(3, 32), Integers(4, 64), Integers(4, 32))
BUDGETS = (2.75, 3.0)  # bits per weight
SUPER_BLOCK = 256
CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
Expert = tuple[int, int]  # layer, and number in it


def power_of_two(ratio: torch.Tensor) -> torch.Tensor:
    """The nearest power of two to each channel's size, relative to the median channel."""
    return torch.exp2(torch.round(torch.log2(ratio / ratio.median())))


def plain_tensors(job: Job, flat: bool) -> Tensors:
    """The source's tensors with dequantized linear weights in bfloat16; if `flat`, without its outlier channels."""
    source, facts = job.opened, job.facts
    modules = {name for name, info in source.tensors.items() if info.dtype.startswith("F8")}
    scales = {name + suffix for name in modules for suffix in ("_scale_inv", "_scale")}
    tensors = {name: source.tensor(name) for name in source.tensors if name not in modules | scales}
    tensors |= {name: read_weight(source, name.removesuffix(".weight"), CPU) for name in modules}
    for layer in job.facts.moe_layers if flat else ():
        experts = [[f"{facts.expert(layer, e, m)}.weight" for m in MATRICES] for e in range(job.facts.num_experts)]
        norm, router = facts.layer(layer, facts.norm.tensor), facts.layer(layer, facts.router.tensor)
        outer = power_of_two(tensors[norm].float().abs())
        tensors[norm] = (tensors[norm] / outer).to(tensors[norm].dtype)
        for name in (router, *(name for gate, up, _ in experts for name in (gate, up))):
            tensors[name] = tensors[name] * outer
        for _, up, down in experts:
            inner = power_of_two((tensors[up].norm(dim=1) / tensors[down].norm(dim=0)).sqrt())
            tensors[up], tensors[down] = tensors[up] / inner[:, None], tensors[down] * inner
    return {name: tensor.bfloat16() if name in modules else tensor for name, tensor in tensors.items()}


def written(tensors: Tensors, like: Checkpoint, folder: Path) -> Path:
    """A model folder with these tensors, and `like`'s config without quantization and tokenizer."""
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {key: value for key, value in like.config.items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config))
    for file in like.folder.glob("*token*"):
        shutil.copy(file, folder)
    for file in like.folder.glob("*.jinja"):
        shutil.copy(file, folder)
    return folder


def importances(job: Job, data: CalibrationData, tokens: Tokens, work: Path) -> dict[Expert, tuple[torch.Tensor, ...]]:
    """Of each expert mean x² of w1's and w3's inputs (H,) and of w2's (I,), as `quantize imatrix` writes it."""
    model = StreamedModel(job.opened, job.facts, CPU, torch.float32)
    sums = InputSums(model, token_tensors(data, job.facts.vocab_size), work, tokens)
    with walk(job.opened, all_tensors(model, job.opened), model) as steps:
        for step in steps:
            with step.module() as layer:
                sums.add_layer(layer)
    by_expert: dict[Expert, tuple[torch.Tensor, ...]] = {}
    for layer in job.facts.moe_layers:
        stored = read_sums(work, layer)
        means = [(stored[name].squares / stored[name].counts.unsqueeze(1)).nan_to_num(1) for name in (GATE, DOWN)]
        by_expert |= {(layer, expert): (means[0][expert], means[1][expert]) for expert in range(job.facts.num_experts)}
    return by_expert


def in_type(name: str, weight: torch.Tensor, importance: torch.Tensor) -> tuple[torch.Tensor, float]:
    """A matrix (R, C) as a type stores it, and the type's bits per weight."""
    import libgguf

    kind = libgguf.GGMLQuantizationType[name]
    rows = weight.float().reshape(-1, SUPER_BLOCK).numpy()
    weights = importance.repeat(SUPER_BLOCK // len(importance)).numpy().astype(np.float32)
    stored = libgguf.quantize_rows(rows, kind, imatrix=weights)
    back = libgguf.dequantize_rows(stored, kind, n_per_row=SUPER_BLOCK)
    return torch.from_numpy(back).view(weight.shape), stored.nbytes * 8 / rows.size


def outputs(
    job: Job, tensors: Tensors, data: CalibrationData, tokens: Tokens, place: Path
) -> Iterator[tuple[str, float, Checkpoint]]:
    """Each type, scheme and budget with its bits per weight and output."""
    source, important = job.opened, importances(job, data, tokens, place / "imatrix")
    for name in TYPES:
        changed, bits = dict(tensors), 0.0
        for (layer, expert), (of_x, of_h) in important.items():
            for matrix in MATRICES:
                weight = f"{job.facts.expert(layer, expert, matrix)}.weight"
                changed[weight], bits = in_type(name, tensors[weight], of_h if matrix == "down" else of_x)
        yield name, bits, open_folder(written(changed, source, place / name))
    for scheme in SCHEMES:
        update = {"bits": scheme.bits, "group_size": scheme.group_size}
        job_of_scheme = variant(job, Method(str(scheme), job.recipe.experts.model_copy(update=update)))
        yield str(scheme), scheme.bits_per_weight, quantized(job_of_scheme, data, place / str(scheme), CPU)
    for budget in BUDGETS:
        keys = (f"experts.bits_per_weight={budget}", "experts.bits=null", "experts.group_size=null")
        given = prepare(str(job.path), source_folder=source.folder, changes=changes_of(keys))
        work = place / f"measured-{budget}"
        work.mkdir()
        context = Context(work, CPU, Placement(Residents(job.facts.num_experts, 1, 0)))
        chosen = choose_schemes(given, token_tensors(data, job.facts.vocab_size), context, work)
        mean = sum(scheme.bits_per_weight for scheme in chosen.plan.schemes) / len(chosen.plan.schemes)
        yield f"budget of {budget:g} bits", mean, quantized(chosen, data, place / f"budget-{budget}", CPU)


def compare_types(recipe: str, most_tokens: int, tokens: Tokens) -> list[dict[str, Any]]:
    """A row for each type, scheme and budget: bits per weight, and KL on the flat and the planted model."""
    planted = recipe_job(recipe)
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for key, flat in (("flat", True), ("planted", False)):
            place = Path(folder) / key
            place.mkdir()
            tensors = plain_tensors(planted, flat)
            job = prepare(recipe, source_folder=written(tensors, planted.opened, place / "source"))
            made = list(outputs(job, tensors, spread(calibration_data(job), most_tokens), tokens, place))
            results = held_out(job, [output for *_, output in made], place / "eval", CPU)
            for (name, bits, _), result in zip(made, results, strict=True):
                rows.setdefault(name, {"name": name, "bits": bits})[key] = result["kl"]["mean"]
    return sorted(rows.values(), key=lambda row: row["bits"])


def types_table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    cells = [(row["name"], f"{row['bits']:.3g}", f"{row['flat']:.4f}", f"{row['planted']:.4f}") for row in rows]
    return text_table(("experts", "bits", "KL, flat", "KL, with outliers"), cells)


def main() -> None:
    """Compare llama.cpp's types with ours on a recipe's model."""
    parser = options(__doc__)
    parser.add_argument("--importance", choices=("routed", "both", "all"), default="routed", help="as imatrix --tokens")
    given = parser.parse_args()
    choose_device("cpu")
    rows = compare_types(given.recipe, given.tokens, given.importance)
    print(json.dumps(rows, indent=1) if given.json else types_table(rows))


if __name__ == "__main__":
    main()
