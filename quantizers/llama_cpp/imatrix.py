"""An importance matrix for llama.cpp's `llama-quantize`, from the source's activations: `quantizers.imatrix`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from quantizers.calibration.samples import token_tensors
from quantizers.commands.question import Question, opened, question_of
from quantizers.device.determinism import ordered
from quantizers.device.devices import choose_device
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup, rank_0_progress
from quantizers.importance.input_sums import InputSums, Tokens
from quantizers.layers.loop import all_tensors, layer_steps
from quantizers.system.errors import InputError, OutputError

from .imatrix_file import architecture_of, make_imatrix


@dataclass(frozen=True)
class Imatrix:
    """The result of `imatrix`.

    Attributes:
        figures: what `quantize imatrix --json` prints, an ImatrixReport; empty in ranks except 0.
    """

    figures: dict[str, Any]


def imatrix(
    recipe: str | Path | None = None,
    output: str | Path | None = None,
    *,
    tokens: Literal["both", "routed", "all"] = "both",
    source: str | Path | None = None,
    calibration: str | Path | None = None,
    settings: Mapping[str, Any] | Sequence[str] = (),
    facts: str | Path | None = None,
    model: str | Path | None = None,
    data: str | Path | None = None,
    device: str = "auto",
    work: str | Path | None = None,
    trust_remote_code: bool = False,
    dist: ProcessGroup = SINGLE_PROCESS,
) -> Imatrix:
    """Write an importance matrix: Σ x² of the inputs of every matrix of the source, without quantizing.

    Args:
        recipe: recipe whose source and calibration set are used.
        output: the file, which may exist; NAME.imatrix.gguf by default, after the recipe or the model.
        tokens: of each expert's matrices: routed, those of its router; all, every token through every expert; both,
            all of them, where routed ones count more.
        source, calibration, settings, device, dist: as in `quantizers.run`.
        facts: the user's own architecture spec.
        model: without a recipe, or instead of its source: a checkpoint's folder or Hub id.
        data: without a recipe, or instead of its set: a calibration set.
        work: scratch folder for activations; a temporary one by default.
        trust_remote_code: allow custom tokenizer code.

    Raises:
        InputError: something is missing, given twice, or wrong; gguf-py knows no names for the model.
    """
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
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise OutputError(f"{path}: is a folder, or lies in none; give --output a file in an existing folder")
    if work is not None:
        Path(work).mkdir(parents=True, exist_ok=True)
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
        raise InputError(f"{question.sets[0]}: has no samples; an importance matrix needs some")
    sums = InputSums(streamed, sequences, work, tokens, dist=dist)
    steps = layer_steps(checkpoint, all_tensors(streamed, checkpoint), [sums], streamed, dist=dist)
    with rank_0_progress("streaming", facts.num_layers, 0, lambda: None, dist) as step, closing(steps):
        for one in steps:
            step(f"layer {one.number}")
    sums.end()
    if not dist.is_main:
        return {}
    figures = make_imatrix(output, work, facts, checkpoint.config, data)
    drawn = {"drawn": asdict(data.drawn)} if data.drawn else {}
    return {"model": question.model, "of": tokens} | figures | drawn
