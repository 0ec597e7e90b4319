"""The tokens that the router sends to each expert, for one calibration set or two: `quantizers.coverage`."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from quantizers.calibration.samples import token_tensors
from quantizers.commands import options as opt
from quantizers.commands.question import Question, opened, question_of
from quantizers.device.determinism import ordered
from quantizers.device.devices import choose_device
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup, rank_0_progress
from quantizers.eval.coverage.figures import CoverageComparison, CoverageReport, Drawn, SetName
from quantizers.eval.coverage.routing import count_routes
from quantizers.eval.coverage.summary import check_floors, report
from quantizers.recipe.schema import CoverageGate
from quantizers.system.errors import InputError
from quantizers.system.files import json_finite, ready_folder, write_json, write_text

from .coverage_change import compare_counts, labels
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


@opt.documented
def coverage(
    recipe: Annotated[
        str | Path | None,
        opt.Argument("recipe whose source, calibration set and gates are used", "[RECIPE]"),
    ] = None,
    *,
    source: opt.Source = None,
    calibration: opt.Calibration = None,
    settings: opt.Settings = (),
    facts: opt.Facts = None,
    model: opt.Model = None,
    data: opt.Data = None,
    compare: Annotated[
        tuple[str | Path, str | Path] | None,
        opt.Option(
            "compare two sets: experts whose share of tokens grows or shrinks, newly covered or no longer covered",
            "SET_A SET_B",
        ),
    ] = None,
    saliency: Annotated[
        bool,
        opt.Option(
            "score the experts by what they contribute (REAP), by category too; writes scores, a heat map and "
            "lists of experts"
        ),
        "score the experts by what they contribute (REAP), over all texts and by category",
    ] = False,
    output: Annotated[
        str | Path | None,
        opt.Option("folder for the files of --saliency; saliency by default", "DIR", opt.OUTPUT),
        "with `saliency`, a folder for the figures and lists of experts, see `quantizers.sets.saliency.lists`",
    ] = None,
    min_routed_tokens: Annotated[int | None, opt.Option("without a recipe: gate; 1 by default", min=0)] = None,
    max_uncovered: Annotated[
        float | None,
        opt.Option("without a recipe: gate, a share of experts; 0.01 by default", min=0, max=1),
    ] = None,
    device: opt.Device = "auto",
    work: opt.Scratch = None,
    trust_remote_code: opt.TrustRemoteCode = False,
    dist: opt.Dist = SINGLE_PROCESS,
) -> Coverage:
    """Count the tokens routed to each expert, without quantizing.

    Raises:
        InputError: something is missing, given twice, or wrong.
    """
    if compare and saliency:
        raise InputError("", "--saliency scores experts on one set", "leave out --compare")
    if compare and max_uncovered is not None:
        raise InputError("--max-uncovered", "is a gate, and a comparison has none", "leave it out")
    if output is not None and not saliency:
        raise InputError(f"--output {output}", "is for the files of --saliency", "give that too, or leave it out")
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
        options = " and ".join(f"--{key.replace('_', '-')}" for key in gates)
        changed = " ".join(f"--set verify.coverage.{key}={value}" for key, value in gates.items())
        raise InputError(question.where, "holds the gates", f"give {changed} instead of {options}")
    files = Path(output) if output is not None and dist.is_main else None
    if files is not None:
        ready_folder(files, "--output")
    if work is not None:
        ready_folder(Path(work), "--work")
    with tempfile.TemporaryDirectory(dir=work) as folder, ordered():
        figures = measure_coverage(question, rule, choose_device(device, dist), Path(folder), dist, scored=saliency)
    if files is not None:
        write_json(files / "saliency.json", json_finite(figures.as_dict()))
        if isinstance(figures, CoverageReport) and figures.saliency:
            for name, text in lists(figures, figures.saliency).items():
                write_text(text, files / name)
    return Coverage(figures.as_dict() if dist.is_main else {})


def measure_coverage(
    question: Question,
    rule: CoverageGate,
    device: torch.device,
    work: Path,
    dist: ProcessGroup = SINGLE_PROCESS,
    *,
    scored: bool = False,
) -> CoverageReport | CoverageComparison:
    """The report on one set; or what the second of two sets wins and loses compared with the first. Experts are
    `scored` on one set only.
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
        routed = routed.part("0:")
        saliency = None
        if scored:
            paths = (f"{model.skeleton.path}.{number}.{model.facts.modules.experts}" for number in routed.layers)
            saliency = saliency_of(routed, [path.rpartition(".")[0] for path in paths])
        drawn = Drawn(**asdict(loaded[0].drawn)) if loaded[0].drawn else None
        return report(routed, rule, model=question.model, name=names[0], drawn=drawn, saliency=saliency)
    sets = [
        SetName(label=label, name=name, file=str(file))
        for label, name, file in zip(labels(names, question.sets), names, question.sets, strict=True)
    ]
    change = compare_counts(routed.part("0:"), routed.part("1:"), rule, sets)
    return CoverageComparison(**change.given(), model=question.model)
