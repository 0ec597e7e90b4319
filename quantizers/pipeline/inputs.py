"""The token sequences of a run: its sets, read once, and the recipe with what was read of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantizers.calibration.load_set import load_set, pins_of, print_notes
from quantizers.calibration.lock import Pin
from quantizers.calibration.samples import CalibrationData, token_tensors
from quantizers.calibration.set import read_set
from quantizers.checkpoint.reader import COMMIT
from quantizers.distributed.process_group import ProcessGroup
from quantizers.eval.coverage.summary import check_floors
from quantizers.eval.fidelity.metrics import Text
from quantizers.eval.fidelity.scoring import HeldOut, held_out
from quantizers.planning.job import Job
from quantizers.recipe.portable import Resolved, resolve_recipe
from quantizers.recipe.read import set_location
from quantizers.system.errors import InputError
from quantizers.system.output_files import CALIBRATION, FACTS, HELD_OUT


@dataclass(frozen=True)
class Inputs:
    """The token sequences of a run.

    Attributes:
        data, tokens: the calibration samples, and their token ids (T,) int64.
        evaluation: the held-out set; None if the recipe has nothing measured.
        resolved: the recipe as it is published, with locks of what was read of datasets of the Hub.
    """

    data: CalibrationData
    tokens: Sequence[torch.Tensor]
    evaluation: HeldOut | None
    resolved: Resolved

    @property
    def texts(self) -> Sequence[Text]:
        """The held-out texts."""
        return self.evaluation.texts if self.evaluation else ()

    @property
    def lengths(self) -> list[int]:
        """Tokens of each calibration sequence."""
        return [len(sequence) for sequence in self.tokens]

    @property
    def counts(self) -> tuple[int, int]:
        """Tokens of the calibration set, and of the held-out texts."""
        return sum(map(len, self.tokens)), sum(len(text.tokens) for text in self.texts)


def refuse_library(job: Job, dist: ProcessGroup) -> None:
    """Raise an InputError if the recipe's engine cannot share its work among the processes."""
    if dist.is_distributed and job.recipe.experts.engine != "gram":
        raise InputError(
            f"{job.path}: experts.engine",
            f"{job.recipe.experts.engine} works in one process",
            "start quantize without torchrun, or choose gram",
        )


def read_inputs(job: Job, dist: ProcessGroup, work: Path) -> Inputs:
    """Read and tokenize all sets before anything slow, so that a fault in one is found now.

    Raises:
        InputError: a set cannot be read, or the engine works in one process only.
    """
    recipe, facts = job.recipe, job.facts
    trusted = recipe.source.trusts_tokenizer
    refuse_library(job, dist)
    pins: dict[str, list[Pin]] = {}

    def read(name: str, target: str, title: str = "calibration", **chosen: Any) -> CalibrationData:
        """The samples of a set, chosen by arguments of `load_set`; the run keeps the set."""
        file = set_location(name, job.path)
        data = print_notes(load_set(file, job.opened.folder, trusted, run=work / "calibration", **chosen), title)
        pins[target] = pins_of(read_set(file), data)
        return data

    data = read(
        recipe.calibration_set,
        CALIBRATION,
        tokens=recipe.calibration_tokens,
        without=recipe.calibration_without,
        positions=facts.positions,
    )
    if recipe.verify and recipe.verify.coverage:
        check_floors(recipe.verify.coverage, [sample.category for sample in data.samples], str(job.path))
    gate = recipe.verify and recipe.verify.perplexity
    other = read(gate.data, HELD_OUT, "held out") if gate else None
    commit = job.opened.revision if COMMIT.fullmatch(job.opened.revision or "") else None
    resolved = resolve_recipe(recipe, job.path, pins, commit)
    published = partial(resolved.published, target=HELD_OUT)
    texts = held_out(other, job.opened, facts, trusted, published) if other else None
    if job.facts.probes:  # derived ones, for those who have the output alone
        resolved = replace(resolved, sets={**resolved.sets, FACTS: job.facts.as_yaml()})
    return Inputs(data, token_tensors(data, facts.vocab_size), texts, resolved)
