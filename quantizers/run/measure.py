"""Perplexity, KL and routing of finished checkpoints against their source, on a held-out set."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eval.fidelity.figures import Measured, Text, figures
from eval.fidelity.held_out import cut, past_the_model, positions, texts
from eval.fidelity.lockstep import evaluate
from quantizers.calibration.data import CalibrationData, digest_of
from quantizers.calibration.samples import samples
from quantizers.calibration.texts import load_tokenizer, token_tensors
from quantizers.checkpoint.reader import Checkpoint
from quantizers.device.devices import fingerprint, forward_dtype
from quantizers.forward.layered_model import LayeredModel
from quantizers.system.atomic import write_json
from quantizers.system.errors import CheckpointError, OutputError, QuantizeError
from quantizers.system.progress import checked, progress
from quantizers.team.ranks import ALONE, Ranks

EVALUATION = "evaluation.json"  # in `work`: the settings that a resumable evaluation was started with


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
    """Perplexity, KL and routing of candidates against their source evaluated_on a held-out set.

    Args:
        source, candidates: in any format that checkpoint/formats.py and forward/weights.py read.
        data_set: a calibration set file; tokenized with the source's tokenizer.
        work: a folder for hidden states, created and removed here.
        check: called between steps; may raise to interrupt.
        weights: also compare the weights, layer by layer.
        resumable: keep `work` when interrupted, and resume from what it holds.
        long: also measure the set's long texts; a set that has only long texts is measured in any case.
        trust_remote_code: whether the tokenizer may run code of its own.
        ranks: the processes that share the work; each of them calls this.

    Returns:
        Figures of each candidate, see `eval.fidelity.figures.figures`, and evaluated_on (name and digest of the
        set, and how much of it lies past the model's positions). An empty list in all ranks except 0.

    Raises:
        CheckpointError: a candidate is a different model, or in a format that cannot be read.
        OutputError: `work` holds another evaluation.
    """
    from quantizers.architectures.architecture import architecture_for, sizes_of
    from quantizers.checkpoint.formats import readable

    ranks = ranks.at(work / "ranks", check)
    where = str(source.folder / "config.json")
    facts = architecture_for(source.config, where)
    sizes = sizes_of(facts, source.config, where)
    opened = [readable(checkpoint, facts) for checkpoint in (source, *candidates)]
    for candidate in candidates:
        config_path = str(candidate.folder / "config.json")
        other = sizes_of(architecture_for(candidate.config, config_path), candidate.config, config_path)
        if candidate.config.get("model_type") != facts.model_type or other != sizes:
            raise CheckpointError(f"{config_path}: is another model than {source.name}; give checkpoints of one model")
    data = ranks.rank_zero_first(lambda: samples(data_set, source.folder, trust_remote_code))
    if not long and any(not sample.long for sample in data.samples):
        short = tuple(sample for sample in data.samples if not sample.long)
        data = replace(data, samples=short, digest=digest_of(short))
    limit = positions(source.config)
    tokens = cut(token_tensors(data, sizes["vocabulary"]), limit)
    scored = texts(data.samples, tokens, load_tokenizer(str(source.folder), trust_remote_code))
    dtype = forward_dtype(device)
    models = [LayeredModel(checkpoint, facts, sizes, device, dtype) for checkpoint in opened]

    @contextlib.contextmanager
    def stage(title: str, total: int, done: int) -> Iterator[Callable[[str], None]]:
        with progress(title, total, done) if ranks.leads else contextlib.nullcontext(lambda _: None) as step:
            yield checked(step, check)

    if not ranks.leads:
        ranks.barrier()
        evaluate(models[0], models[1:], scored, work, stage, weights=weights, resumable=resumable, ranks=ranks)
        return []
    if not resumable:
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    try:
        if resumable:
            _same_evaluation(work, opened, data, device, weights)
        ranks.barrier()
        measured = evaluate(
            models[0], models[1:], scored, work, stage, weights=weights, resumable=resumable, ranks=ranks
        )
    except BaseException:
        if not resumable:
            shutil.rmtree(work, ignore_errors=True)
        raise
    shutil.rmtree(work, ignore_errors=True)
    evaluated_on = {"name": data.name, "digest": data.digest, "past_the_model": past_the_model(data.samples, limit)}
    return [
        _figures(one, scored, candidate) | {"evaluated_on": evaluated_on}
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
    """Write the settings that the figures depend on beside the states, or compare them with those already there."""
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
