"""After the loop: audit, coverage, perplexity and KL of the assembled files, as one report with gates."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from eval.consumer_folder import check_folder
from eval.coverage import gates as coverage_gates
from eval.coverage import summarise
from eval.lockstep import evaluate
from eval.perplexity import Measured, Text, figures
from stitch.audit import verify
from stitch.digests import ShardDigest
from stitch.folder_audit import folders_left_out

from .atomic import write_json
from .calibration.data import digest_of
from .checkpoint import Checkpoint, open_folder
from .devices import fingerprint, forward_dtype, machine, versions
from .errors import CheckpointError, OutputError, QuantizeError
from .held_out import cut, past_the_model, positions, texts
from .layers import LayeredModel
from .measure_schemes import measured
from .plan import summary
from .progress import progress
from .ranks import ALONE, Ranks
from .recipe import PerplexityGate, set_location
from .samples import samples
from .scheme_choice import choice
from .session import Job
from .source_files import source_digest
from .texts import load_tokenizer, token_tensors

if TYPE_CHECKING:
    from .calibration import CalibrationData
    from .resolved import Resolved

JOURNAL_ONLY = ("routed", "peak_memory_bytes", "shard", "digest")  # of a layer's entry; the report has it elsewhere
EVALUATION = "evaluation.json"  # what a resumable evaluation was begun with
NOT_SIMULATED = (
    "vLLM quantizes activations to FP8 in the attention at run time; that is not simulated in these figures."
)


def prove(
    job: Job,
    resolved: Resolved,
    device: torch.device,
    source: Checkpoint,
    data: CalibrationData,
    layers: list[dict[str, Any]],
    written: Mapping[str, ShardDigest],
    work: Path,
    check: Callable[[], None],
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Measure the files in work/output against the source.

    Args:
        resolved: the recipe as it travels with the output, which the report names.
        layers: the journal's entries.
        written: digests of the shards, from when they were written.
        ranks: this is rank 0; the others are in `fidelity`.

    Returns:
        The report but for times, memory and the list of files.
    """
    folder = work / "output"
    recipe = job.recipe
    with progress("verifying", job.sizes["layers"]) as step:
        audit = verify(folder, source, device, written, _checked(step, check))
    _refuse_unreadable(folder, audit.differences)
    names = sorted({sample.category for sample in data.samples})
    counts = [np.array(entry["routed"], dtype=np.int64) for entry in layers]
    rule = recipe.verify.coverage if recipe.verify else None
    coverage = summarise(counts, names, rule.min_routed_tokens if rule else 1)
    seen = [entry["error"]["expert_tokens"] for entry in layers if entry["error"].get("expert_tokens") is not None]
    if seen:  # by every expert, whatever the router chose
        coverage["forced"] = {"min": int(min(seen)), "tokens": sum(len(sample.tokens) for sample in data.samples)}
    report: dict[str, Any] = {
        "source": {
            "model": resolved.recipe.source.model,
            "revision": recipe.source.revision,
            "digest": source_digest(source),
        },
        "settings": {"recipe": resolved.recipe.settings(), "hash": resolved.hash, "machine": machine(device)},
        "versions": versions(),
        "plan": {key: value for key, value in summary(job.plan, job.sizes).items() if key != "shards"},
        "calibration": describe(data, resolved),
        "layers": [{k: v for k, v in entry.items() if k not in JOURNAL_ONLY} for entry in layers],
        "coverage": coverage,
        "audit": audit.as_dict() | {"digests": dict(written)},
        "notes": [NOT_SIMULATED, *folders_left_out(source.folder)],
    }
    if job.allocation:
        entries = measured(work, job.sizes["layers"])
        assert entries is not None
        report["schemes"] = choice(job.allocation, entries)
    gates = [
        {
            "name": "audit",
            "passed": not audit.differences,
            "value": len(audit.differences),
            "limit": 0,
            "meaning": "differences from what the plan promises",
        }
    ]
    consumers = check_folder(folder)
    if consumers is not None:
        report["consumers"] = consumers.as_dict()
        gates.append(
            {
                "name": "consumers",
                "passed": not consumers.errors,
                "value": len(consumers.errors),
                "limit": 0,
                "meaning": "ways in which vLLM, SGLang or transformers would misread it",
            }
        )
    if rule:
        gates += coverage_gates(coverage, counts, names, rule)
    asked = recipe.verify.perplexity if recipe.verify else None
    if asked:
        (result,) = fidelity(job, asked, device, source, work, check, ranks)
        report |= result
        gates += fidelity_gates(result, asked)
    report["gates"] = gates
    return report


def _refuse_unreadable(folder: Path, differences: list[str]) -> None:
    """Nothing can be measured of files that cannot be opened: the run stops, and goes on once they are restored."""
    try:
        open_folder(folder)
    except CheckpointError:
        raise OutputError(f"{folder}: {differences[0]}; restore the file, or start over with --fresh") from None


def fidelity(
    job: Job,
    asked: PerplexityGate,
    device: torch.device,
    source: Checkpoint,
    work: Path,
    check: Callable[[], None],
    ranks: Ranks,
) -> list[dict[str, Any]]:
    """`measure` of the files in work/output, once rank 0 has made them; all ranks call this."""
    ranks.meet()
    candidates = [open_folder(work / "output")]
    data_set = set_location(asked.data, job.path)
    trusted = job.recipe.source.trust_remote_code
    return measure(source, candidates, data_set, device, work / "eval", check, trust_remote_code=trusted, ranks=ranks)


def _checked(step: Callable[[str], None], check: Callable[[], None]) -> Callable[[str], None]:
    def both(note: str) -> None:
        check()
        step(note)

    return both


def describe(data: CalibrationData, resolved: Resolved) -> dict[str, Any]:
    """A calibration set in numbers: its own summary, with samples, tokens and cut samples by category.

    Args:
        resolved: by which names local data files are published.
    """
    categories: dict[str, dict[str, int]] = {}
    for sample in data.samples:
        row = categories.setdefault(sample.category, {"samples": 0, "tokens": 0, "truncated": 0})
        row["samples"] += 1
        row["tokens"] += len(sample.tokens)
        row["truncated"] += int(sample.truncated > 0)
    summary = data.summary()
    for dropped in summary["dropped"]:
        dropped |= {key: resolved.published(dropped[key]) for key in ("source", "first")}
    return summary | {"categories": dict(sorted(categories.items()))}


def measure(
    source: Checkpoint,
    candidates: list[Checkpoint],
    data_set: Path,
    device: torch.device,
    work: Path,
    check: Callable[[], None] = lambda: None,
    *,
    weights: bool = False,
    resumable: bool = False,
    long: bool = True,
    trust_remote_code: bool = False,
    ranks: Ranks = ALONE,
) -> list[dict[str, Any]]:
    """Perplexity, KL and routing of candidates against their source on a held-out set.

    Args:
        source, candidates: in any format that formats.py and weights.py read.
        data_set: a calibration set file; tokenized with the source's tokenizer.
        work: a folder for hidden states, made and removed here.
        check: called between steps; may raise to interrupt.
        weights: also compare the weights, layer by layer.
        resumable: leave `work` when cut off, and go on from what it holds.
        long: also measure the set's long texts; where it has no others they are measured in any case.
        trust_remote_code: whether the tokenizer may bring code of its own.
        ranks: who does it together; each of them calls this.

    Returns:
        Figures of each candidate, see `eval.perplexity.figures`, and evaluated_on (name and digest of the
        set, and what of it lies past the model's positions); nothing in other ranks than 0.

    Raises:
        CheckpointError: a candidate is another model, or in a format that cannot be read.
        OutputError: `work` holds another evaluation.
    """
    from .architecture import architecture_for, sizes_of
    from .formats import readable

    ranks = ranks.at(work / "ranks", check)
    where = str(source.folder / "config.json")
    facts = architecture_for(source.config, where)
    sizes = sizes_of(facts, source.config, where)
    opened = [readable(checkpoint, facts) for checkpoint in (source, *candidates)]
    for candidate in candidates:
        place = str(candidate.folder / "config.json")
        other = sizes_of(architecture_for(candidate.config, place), candidate.config, place)
        if candidate.config.get("model_type") != facts.model_type or other != sizes:
            raise CheckpointError(f"{place}: is another model than {source.name}; give checkpoints of one model")
    data = ranks.after_first(lambda: samples(data_set, source.folder, trust_remote_code))
    if not long and any(not sample.long for sample in data.samples):
        short = tuple(sample for sample in data.samples if not sample.long)
        data = replace(data, samples=short, digest=digest_of(short))
    most = positions(source.config)
    tokens = cut(token_tensors(data, sizes["vocabulary"]), most)
    scored = texts(data.samples, tokens, load_tokenizer(str(source.folder), trust_remote_code))
    dtype = forward_dtype(device)
    models = [LayeredModel(checkpoint, facts, sizes, device, dtype) for checkpoint in opened]

    @contextlib.contextmanager
    def stage(title: str, total: int, done: int) -> Iterator[Callable[[str], None]]:
        with progress(title, total, done) if ranks.leads else contextlib.nullcontext(lambda _: None) as step:
            yield _checked(step, check)

    if not ranks.leads:
        ranks.meet()
        evaluate(models[0], models[1:], scored, work, stage, weights=weights, resumable=resumable, ranks=ranks)
        return []
    if not resumable:
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    try:
        if resumable:
            _same_evaluation(work, opened, data, device, weights)
        ranks.meet()
        measured = evaluate(
            models[0], models[1:], scored, work, stage, weights=weights, resumable=resumable, ranks=ranks
        )
    except BaseException:
        if not resumable:
            shutil.rmtree(work, ignore_errors=True)
        raise
    shutil.rmtree(work, ignore_errors=True)
    on = {"name": data.name, "digest": data.digest, "past_the_model": past_the_model(data.samples, most)}
    return [
        _figures(one, scored, candidate) | {"evaluated_on": on}
        for one, candidate in zip(measured, candidates, strict=True)
    ]


def _figures(one: Measured, scored: Sequence[Text], candidate: Checkpoint) -> dict[str, Any]:
    try:
        return figures(one, scored)
    except OverflowError as failure:
        raise QuantizeError(
            f"{candidate.name}: its perplexity, or its source's, is no number ({failure}): logits overflow, and "
            "nothing can be compared; without verify.perplexity in its recipe a run ends without these figures"
        ) from None


def _same_evaluation(
    work: Path, opened: list[Checkpoint], data: CalibrationData, device: torch.device, weights: bool
) -> None:
    """Write what decides the figures beside the states, or compare it with what is there."""
    settings = {
        "data": data.digest,
        "checkpoints": [
            {f.name: [f.stat().st_size, f.stat().st_mtime_ns] for f in {info.file for info in c.tensors.values()}}
            | {"folder": str(c.folder)}
            for c in opened
        ],
        "machine": fingerprint(device),
        "weights": weights,
    }
    path = work / EVALUATION
    if not path.exists():
        write_json(path, settings)
    elif json.loads(path.read_text()) != json.loads(json.dumps(settings)):
        raise OutputError(f"{work}: holds an unfinished evaluation of other models or data; empty it, or name another")


def fidelity_gates(result: dict[str, Any], asked: PerplexityGate) -> list[dict[str, Any]]:
    """The recipe's limits on perplexity and KL."""
    limits = (
        ("perplexity", result["perplexity"]["increase"], asked.max_increase, "relative increase of perplexity"),
        ("kl", result["kl"]["mean"], asked.max_kl, "mean KL(source || output), nats"),
    )
    return [
        {"name": name, "passed": value <= limit, "value": value, "limit": limit, "meaning": meaning}
        for name, value, limit, meaning in limits
        if limit is not None
    ]
