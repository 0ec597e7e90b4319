"""KL of the experts in llama.cpp's types beside ours, at the size of each, on one model with the same tokens.

    pip install libgguf && python benchmarks/gguf_types.py tiny-minimax-m2-fp8-int4 --flat

The types are quantized by libgguf's native reference with the importance matrix of `quantize imatrix`: for each expert
the squares of its inputs, over the calibration tokens that the router sends to it, over all, or both (--importance).
All but the experts stays as it is. Rows that do not end with a super-block of 256 are laid end to end, with their
importance repeated; llama.cpp itself would give such a matrix another type.

The tiny model has outlier channels by powers of two, in the norm before the experts and between w3 and w2. AWQ folds
such channels away, and a type of llama.cpp cannot: `--flat` adds the same function without them.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from measured_rows import Maker, Row, Table, budget_settings, recipe_job, row_options
from methods import Method, calibration_data, quantized, spread, variant
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
from quantizers.system.errors import InputError
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
    """A matrix (R, C) as a type stores it, and the type's bits per weight.

    Raises:
        InputError: super-blocks would not end where the matrix ends.
    """
    import libgguf

    kind = libgguf.GGMLQuantizationType[name]
    length = math.lcm(weight.shape[1], SUPER_BLOCK)  # whole rows, and whole super-blocks
    if weight.numel() % length:
        remedy = f"leave it out; a matrix needs a multiple of {length} weights"
        raise InputError(name, f"a matrix of {weight.shape[0]} x {weight.shape[1]} has no whole super-blocks", remedy)
    rows = weight.float().reshape(-1, length).numpy()
    weights = importance.repeat(length // len(importance)).numpy().astype(np.float32)
    stored = libgguf.quantize_rows(rows, kind, imatrix=weights)
    back = libgguf.dequantize_rows(stored, kind, n_per_row=length)
    return torch.from_numpy(back).view(weight.shape), stored.nbytes * 8 / rows.size


def compare_types(job: Job, given: argparse.Namespace, place: Path, *, flat: bool) -> list[Row]:
    """A row for each type, scheme and budget, with its bits per weight; if `flat`, of the model without outliers."""
    tensors, bits = plain_tensors(job, flat), dict[str, float]()
    job = prepare(str(job.path), source_folder=written(tensors, job.opened, place / "source"))
    data = spread(calibration_data(job), given.tokens)

    @functools.cache
    def important() -> dict[Expert, tuple[torch.Tensor, ...]]:
        return importances(job, data, given.importance, place / "imatrix")

    def by_type(name: str, folder: Path) -> Checkpoint:
        changed = dict(tensors)
        for (layer, expert), (of_x, of_h) in important().items():
            for matrix in MATRICES:
                weight = f"{job.facts.expert(layer, expert, matrix)}.weight"
                in_stored = in_type(name, tensors[weight], of_h if matrix == "down" else of_x)
                changed[weight], bits[name] = in_stored
        return open_folder(written(changed, job.opened, folder / name))

    def by_scheme(scheme: Integers, folder: Path) -> Checkpoint:
        update = {"bits": scheme.bits, "group_size": scheme.group_size}
        bits[str(scheme)] = scheme.bits_per_weight
        job_of_scheme = variant(job, Method(str(scheme), job.recipe.experts.model_copy(update=update)))
        return quantized(job_of_scheme, data, folder, CPU)

    def by_budget(name: str, budget: float, folder: Path) -> Checkpoint:
        changes = changes_of(budget_settings(job, budget))
        asked = prepare(str(job.path), source_folder=job.opened.folder, changes=changes)
        context = Context(folder, CPU, Placement(Residents(job.facts.num_experts, 1, 0)))
        chosen = choose_schemes(asked, token_tensors(data, job.facts.vocab_size), context, folder)
        bits[name] = sum(scheme.bits_per_weight for scheme in chosen.plan.schemes) / len(chosen.plan.schemes)
        return quantized(chosen, data, folder / "chosen", CPU)

    makers: dict[str, Maker] = {name: functools.partial(by_type, name) for name in TYPES}
    makers |= {str(scheme): functools.partial(by_scheme, scheme) for scheme in SCHEMES}
    for budget in BUDGETS:
        name = f"budget of {budget:g} bits"
        makers[name] = functools.partial(by_budget, name, budget)
    label = f"types, {given.importance}{', flat' if flat else ''}"
    return Table(job, given, label).measure(makers, lambda name, _: {"bits": bits[name]})


def types_table(rows_by_model: dict[str, list[Row]]) -> str:
    """The rows of each model as text, by bits."""
    cells: dict[str, list[str]] = {}
    columns = ["experts", "bits"]
    for model, rows in rows_by_model.items():
        columns.append(f"KL{model}")
        for row in sorted(rows, key=lambda row: row["bits"]):
            cells.setdefault(row["name"], [row["name"], f"{row['bits']:.3g}"]).append(f"{row['kl']:.4f}")
    return text_table(columns, list(cells.values()))


def main() -> None:
    """Compare llama.cpp's types with ours on a recipe's model."""
    parser = row_options(__doc__)
    parser.set_defaults(device="cpu")
    parser.add_argument("--importance", choices=("routed", "both", "all"), default="routed", help="as imatrix --tokens")
    parser.add_argument("--flat", action="store_true", help="measure the model without its outlier channels too")
    given = parser.parse_args()
    choose_device("cpu")
    job = recipe_job(given.recipe)
    models = ({", flat": True} if given.flat else {}) | {"": False}
    rows_by_model = {}
    for name, flat in models.items():
        with tempfile.TemporaryDirectory() as folder:
            rows_by_model[name] = compare_types(job, given, Path(folder), flat=flat)
    print(json.dumps(rows_by_model, indent=1) if given.json else types_table(rows_by_model))


if __name__ == "__main__":
    main()
