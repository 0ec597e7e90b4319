"""A model, and the calibration sets to stream over it: what `coverage` and `imatrix` are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantizers.calibration.load_set import load_set, print_notes
from quantizers.calibration.samples import CalibrationData
from quantizers.checkpoint.reader import open_checkpoint
from quantizers.device.devices import forward_dtype, use_threads
from quantizers.distributed.process_group import ProcessGroup
from quantizers.formats.stored_matrices import architecture_of
from quantizers.formats.tensor_names import published_names
from quantizers.model.streamed_model import StreamedModel
from quantizers.output.manifest import refuse_incomplete
from quantizers.planning.job import given_folder
from quantizers.recipe.read import changes_of, facts_location, find_set, read_recipe, set_file, source_location
from quantizers.recipe.schema import Recipe
from quantizers.system.errors import InputError


@dataclass(frozen=True)
class Question:
    """A model, the sets to stream over it, and what names them in messages.

    Attributes:
        tokens: how many to draw from the recipe's set; None to stream all of every set.
        without: sources of the recipe's set that are left out.
    """

    model: str
    revision: str
    trust_remote_code: bool
    sets: tuple[Path, ...]
    where: str
    facts_file: Path | None = None
    tokens: int | None = None
    without: tuple[str, ...] = ()


def question_of(
    recipe: str | Path | None,
    *,
    source: str | Path | None,
    calibration: str | Path | None,
    settings: Mapping[str, Any] | Sequence[str],
    facts: str | Path | None,
    model: str | Path | None,
    data: str | Path | None,
    compare: tuple[str | Path, str | Path] | None = None,
    trust_remote_code: bool,
) -> tuple[Question, Recipe | None]:
    """The question that arguments of a command ask, and the recipe if one is given.

    Raises:
        InputError: something is missing, given twice, or wrong.
    """
    for name in (source, model):
        if name is not None:
            refuse_incomplete(Path(name))
    changes = changes_of(settings, calibration)
    if source is not None and (model is not None or recipe is None):
        raise InputError("", "--source says where a recipe's model lies", "give a recipe and no --model with it")
    if (compare or data) and any(change.place[0] == "calibration" for change in changes):
        raise InputError("", "--data and --compare name the sets", "leave out --calibration and --set calibration")
    if compare and data:
        raise InputError("", "--compare names both sets", "leave out --data")
    sets = tuple(find_set(str(name)) for name in compare or ([data] if data else []))
    own = Path(facts) if facts is not None else None
    question = Question(str(model), "main", trust_remote_code, sets, str(model), own)
    if recipe is not None:
        read, path = read_recipe(str(recipe), changes)
        question = replace(question, where=str(path))
        if not sets:
            file, tokens = set_file(read.calibration_set, path), read.calibration_tokens
            question = replace(question, sets=(file,), tokens=tokens, without=read.calibration_without)
        if model is None:  # what the recipe says of its source holds for that alone
            question = replace(
                question,
                model=source_location(read, path) if source is None else given_folder(Path(source)),
                revision=read.source.revision,
                trust_remote_code=trust_remote_code or read.source.trusts_tokenizer,
                facts_file=own or facts_location(read, path),
            )
        return question, read
    if changes:
        raise InputError(changes[0].shown, "changes a recipe", "give one, or leave it out")
    if model is None:
        raise InputError("", "give a recipe, or --model with --data")
    if not sets:
        raise InputError("", "--data is missing", "name a calibration set, such as embedded")
    return question, None


def opened(question: Question, device: torch.device, dist: ProcessGroup) -> tuple[StreamedModel, list[CalibrationData]]:
    """The model, with its whole checkpoint, and the samples of each set; the same in all processes."""
    checkpoint = dist.in_turn(lambda: open_checkpoint(question.model, question.revision))
    facts = architecture_of(checkpoint, question.facts_file)
    named = published_names(checkpoint, facts)  # first, for reading the sets may take long
    load = partial(
        load_set,
        tokenizer=checkpoint.folder,
        trust_remote_code=question.trust_remote_code,
        tokens=question.tokens,
        without=question.without,
        positions=facts.positions,
    )
    read = [print_notes(load(file)) for file in question.sets] if dist.is_main else None
    loaded: list[CalibrationData] = dist.broadcast_object(read)
    use_threads(facts)
    return StreamedModel(named, facts, device, forward_dtype(device)), loaded
