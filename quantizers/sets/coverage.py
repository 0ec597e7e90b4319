"""The tokens that the router sends to each expert, for one calibration set or two: `quantizers.coverage`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from quantizers.calibration.samples import token_tensors
from quantizers.commands.question import Question, opened, question_of
from quantizers.device.determinism import ordered
from quantizers.device.devices import choose_device
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup, rank_0_progress
from quantizers.eval.coverage.routing import count_routes
from quantizers.eval.coverage.summary import check_floors, report
from quantizers.recipe.schema import CoverageGate
from quantizers.system.errors import InputError, OutputError
from quantizers.system.files import json_finite, write_json, write_text

from .coverage_change import SIDES, compare_counts, labels
from .saliency import lists
from .saliency import saliency as saliency_of


@dataclass(frozen=True)
class Coverage:
    """The result of `coverage`.

    Attributes:
        figures: what `quantize coverage --json` prints, of one set a CoverageReport; empty in ranks except 0.
    """

    figures: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether every gate passed; a comparison has none."""
        return all(gate["passed"] for gate in self.figures.get("gates", ()))


def coverage(
    recipe: str | Path | None = None,
    *,
    source: str | Path | None = None,
    calibration: str | Path | None = None,
    settings: Mapping[str, Any] | Sequence[str] = (),
    facts: str | Path | None = None,
    model: str | Path | None = None,
    data: str | Path | None = None,
    compare: tuple[str | Path, str | Path] | None = None,
    saliency: bool = False,
    output: str | Path | None = None,
    min_routed_tokens: int | None = None,
    max_uncovered: float | None = None,
    device: str = "auto",
    work: str | Path | None = None,
    trust_remote_code: bool = False,
    dist: ProcessGroup = SINGLE_PROCESS,
) -> Coverage:
    """Count the tokens routed to each expert, without quantizing.

    Args:
        recipe: recipe whose source, calibration set and gates are used.
        source, calibration, settings, device, dist: as in `quantizers.run`.
        facts: the user's own architecture spec.
        model: without a recipe, or instead of its source: a checkpoint's folder or Hub id.
        data: without a recipe, or instead of its set: a calibration set.
        compare: two sets: experts whose share of tokens grows or shrinks, newly covered or no longer covered.
        saliency: score the experts by what they contribute (REAP), over all texts and by category.
        output: with `saliency`, a folder for the figures and lists of experts, see `quantizers.sets.saliency.lists`.
        min_routed_tokens, max_uncovered: without a recipe, the gate: 1 token, and 0.01 of the experts by default.
        work: scratch folder for activations; a temporary one by default.
        trust_remote_code: allow custom tokenizer code.

    Raises:
        InputError: something is missing, given twice, or wrong.
    """
    if compare and saliency:
        raise InputError("--saliency scores experts on one set; leave out --compare")
    if output is not None and not saliency:
        raise InputError(f"--output {output}: is for the files of --saliency; give that too, or leave it out")
    given = {"min_routed_tokens": min_routed_tokens, "max_uncovered": max_uncovered}
    gates = {key: value for key, value in given.items() if value is not None}
    question, read = question_of(
        recipe,
        source=source,
        calibration=calibration,
        settings=settings,
        facts=facts,
        model=model,
        data=data,
        compare=compare,
        trust_remote_code=trust_remote_code,
    )
    rule = (read and read.verify and read.verify.coverage) or CoverageGate()
    if read is None:
        rule = rule.model_copy(update=gates)
    elif gates:
        raise InputError(
            f"{question.where}: holds the gates; leave out --min-routed-tokens and --max-uncovered, or change it "
            "with --set verify.coverage.min_routed_tokens=N"
        )
    files = Path(output) if output is not None and dist.is_main else None
    if files is not None:
        try:
            files.mkdir(parents=True, exist_ok=True)
        except OSError as failure:
            raise OutputError(f"--output {files}: cannot be made a folder ({failure.strerror}); give another") from None
    if work is not None:
        Path(work).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as folder, ordered():
        figures = measure_coverage(question, rule, choose_device(device, dist), Path(folder), dist, scored=saliency)
    if files is not None:
        write_json(files / "saliency.json", json_finite(figures))
        for name, text in lists(figures).items():
            write_text(text, files / name)
    return Coverage(figures if dist.is_main else {})


def measure_coverage(
    question: Question,
    rule: CoverageGate,
    device: torch.device,
    work: Path,
    dist: ProcessGroup = SINGLE_PROCESS,
    *,
    scored: bool = False,
) -> dict[str, Any]:
    """The report on one set, see `eval.coverage.summary.report`; or what the second of two sets wins and loses compared
    with the first, see `quantizers.sets.coverage_change.compare_counts`. Experts are `scored` on one set only.
    """
    model, loaded = opened(question, device, dist)
    for data in loaded:
        check_floors(rule, [sample.category for sample in data.samples], question.where)
    sequences = [tokens for data in loaded for tokens in token_tensors(data, model.facts.vocab_size)]
    # All sets in one pass: the categories of set n get the prefix `n:`.
    categories = [f"{n}:{sample.category}" for n, data in enumerate(loaded) for sample in data.samples]
    with rank_0_progress("streaming", model.facts.num_layers, 0, lambda: None, dist) as step:
        routed = count_routes(model, sequences, categories, work, step, dist, norms=scored)
    names = [data.name for data in loaded]
    if len(loaded) == 1:
        one = routed.part("0:")
        found = {"model": question.model, "set": names[0]} | report(one, rule)
        if scored:
            paths = (f"{model.skeleton.path}.{number}.{model.facts.modules.experts}" for number in one.layers)
            found["saliency"] = saliency_of(one, [path.rpartition(".")[0] for path in paths])
        return found | ({"drawn": asdict(loaded[0].drawn)} if loaded[0].drawn else {})
    comparison = compare_counts(routed.part("0:"), routed.part("1:"), rule)
    for side, name, file, label in zip(SIDES, names, question.sets, labels(names, question.sets), strict=True):
        comparison[side] |= {"name": name, "file": str(file), "label": label}
    return {"model": question.model} | comparison
