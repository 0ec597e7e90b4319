"""An importance matrix for llama.cpp's `llama-quantize`, from the source's activations: `quantizers.imatrix`."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from quantizers.calibration.samples import token_tensors
from quantizers.commands import options as opt
from quantizers.commands.question import Question, opened, question_of
from quantizers.device.determinism import ordered
from quantizers.device.devices import choose_device
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup, rank_0_progress
from quantizers.system.errors import InputError
from quantizers.system.extras import lacking
from quantizers.system.files import ready_file, ready_folder
from quantizers.walk.walk import all_tensors, walk

from .imatrix_file import architecture_of, make_imatrix
from .input_sums import InputSums, Tokens


@dataclass(frozen=True)
class Imatrix:
    """The result of `imatrix`.

    Attributes:
        figures: what `quantize imatrix --json` prints, an ImatrixReport; empty in ranks except 0.
    """

    figures: dict[str, Any]


@opt.documented
def imatrix(
    recipe: Annotated[
        str | Path | None, opt.Argument("recipe whose source and calibration set are used", "[RECIPE]")
    ] = None,
    output: Annotated[
        str | Path | None,
        opt.Option("the file; NAME.imatrix.gguf by default, after the recipe or the model", "FILE", opt.OUTPUT),
        "the file, which may exist; NAME.imatrix.gguf by default, after the recipe or the model",
    ] = None,
    *,
    tokens: Annotated[
        Literal["both", "routed", "all"],
        opt.Option(
            "of an expert: routed, those that the router sends to it, as llama.cpp counts; all, so that none is "
            "without data; both, all of them, where routed ones count more"
        ),
    ] = "both",
    source: opt.Source = None,
    calibration: opt.Calibration = None,
    settings: opt.Settings = (),
    facts: opt.Facts = None,
    model: opt.Model = None,
    data: opt.Data = None,
    device: opt.Device = "auto",
    work: opt.Scratch = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    dist: opt.Dist = SINGLE_PROCESS,
) -> Imatrix:
    """Write an importance matrix: Σ x² of the inputs of every matrix of the source, without quantizing.

    Raises:
        InputError: something is missing, given twice, or wrong; gguf-py knows no names for the model.
    """
    if lack := lacking("gguf"):
        raise InputError("an importance matrix", *lack)
    question, read = question_of(
        recipe,
        source=source,
        calibration=calibration,
        settings=settings,
        facts=facts,
        model=model,
        data=data,
        trust_remote_code=trust_remote_code,
    )
    name = Path(question.where if read is not None else question.model)
    path = Path(output or f"{name.stem if read is not None else name.name}.imatrix.gguf")
    if dist.is_main:
        ready_file(path, "--output")
    if work is not None:
        ready_folder(Path(work), "--work")
    with tempfile.TemporaryDirectory(dir=work) as folder, ordered():
        figures = write_sums(question, path, tokens, choose_device(device, dist), Path(folder), dist)
    return Imatrix(figures)


def write_sums(
    question: Question,
    output: Path,
    tokens: Tokens,
    device: torch.device,
    work: Path,
    dist: ProcessGroup = SINGLE_PROCESS,
) -> dict[str, Any]:
    """Take the question's set through its model, and write the matrix; its figures, none in ranks except 0.

    Args:
        work: an empty folder.
    """
    streamed, (data,) = opened(question, device, dist)
    checkpoint, facts = streamed.checkpoint, streamed.facts
    architecture_of(facts)  # first, for its error
    sequences = token_tensors(data, facts.vocab_size)
    if not sequences:
        raise InputError(question.sets[0], "has no samples", "an importance matrix needs some")
    sums = InputSums(streamed, sequences, work, tokens, dist=dist)
    with (
        rank_0_progress("streaming", facts.num_layers, 0, lambda: None, dist) as shown,
        walk(checkpoint, all_tensors(streamed, checkpoint), streamed, dist=dist) as steps,
    ):
        for step in steps:
            with step.module() as layer:
                sums.add_layer(layer)
            shown(f"layer {step.number}")
    sums.end()
    if not dist.is_main:
        return {}
    figures = make_imatrix(output, work, facts, checkpoint.config, data)
    drawn = {"drawn": asdict(data.drawn)} if data.drawn else {}
    return {"model": question.model, "of": tokens} | figures | drawn
