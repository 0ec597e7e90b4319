"""Whether the source makes sense of text: its perplexity on the beginnings of held-out texts, before a run begins."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from functools import partial

from quantizers.budget.measure import probes_of
from quantizers.checkpoint.loaded_tensors import load_tensors, outside_names
from quantizers.device.devices import forward_dtype
from quantizers.distributed.process_group import rank_0_progress
from quantizers.eval.fidelity.metrics import Text
from quantizers.eval.fidelity.scoring import score
from quantizers.model.activation_stream import ActivationStream
from quantizers.model.streamed_model import StreamedModel
from quantizers.planning.job import Job
from quantizers.system.errors import CheckpointError
from quantizers.system.files import write_json
from quantizers.system.progress import doing
from quantizers.walk.context import Context
from quantizers.walk.walk import all_tensors, walk

CHECKED_TOKENS, CHECKED_LENGTH = 2048, 256  # of texts, all together and the beginning of one


def check_source(job: Job, texts: Sequence[Text], context: Context, *, ignore: bool) -> None:
    """Measure the source's perplexity on the beginnings of some held-out texts, once in a run; all processes call this.

    A checkpoint whose tensors are mixed up, or one that transformers computes otherwise than its makers, runs as fast
    as any, and its output agrees with it. Only texts tell: their perplexity is then that of noise.

    Args:
        ignore: whether the user asked for no such check.

    Raises:
        CheckpointError: it is above the recipe's `verify.perplexity.max_source`.
    """
    gate, record = job.recipe.verify and job.recipe.verify.perplexity, context.work / "source-check.json"
    if ignore or not gate or gate.max_source == "any" or not texts:
        return
    if job.opened.remote:
        if context.dist.is_main:
            print(
                "whether the source makes sense of text is checked at the end: before, it would be fetched twice",
                file=sys.stderr,
            )
        return
    if context.dist.broadcast_object(record.exists()):
        return
    chosen = probes_of([len(text.tokens) for text in texts], CHECKED_TOKENS, CHECKED_LENGTH)
    beginnings = [Text(texts[i].tokens[:length], "source", 1) for i, length in chosen.items()]
    perplexity = _perplexity(job, beginnings, context)
    refuse_source(job, perplexity, f"the beginnings of {len(beginnings)} texts")
    if context.dist.is_main:
        write_json(record, {"perplexity": perplexity, "texts": len(beginnings)})


def refuse_source(job: Job, perplexity: float | None, where: str) -> None:
    """Raise the CheckpointError of `check_source` if the source's perplexity, measured `where`, is too large."""
    gate = job.recipe.verify and job.recipe.verify.perplexity
    if not gate or gate.max_source == "any" or perplexity is None or perplexity <= gate.max_source:
        return
    raise CheckpointError(
        job.opened.folder,
        f"makes no sense of text: on {where} of {gate.data} its perplexity is {perplexity:,.1f}, above "
        f"{gate.max_source:g} (verify.perplexity.max_source)",
        "check its files and its config.json, or give --ignore-source-check if its weights are random",
    )


def _perplexity(job: Job, texts: Sequence[Text], context: Context) -> float:
    """The source's perplexity, layer by layer in one pass over its files."""
    dist, check = context.dist, context.check
    folder = context.work / "source-check"
    if dist.local_rank == 0:
        shutil.rmtree(folder, ignore_errors=True)  # of an interrupted check
    dist.in_turn(partial(folder.mkdir, parents=True, exist_ok=True))
    outside = load_tensors(job.opened, outside_names(job.opened, job.facts))
    model = StreamedModel(outside, job.facts, context.device, forward_dtype(context.device))
    lengths = [len(text.tokens) for text in texts]
    stream = ActivationStream(job.opened.name, model, 0, lengths, folder, durable=False, check=check, dist=dist)
    stream.enter(0, [text.tokens for text in texts])
    tensors = all_tensors(model, job.opened)
    with (
        rank_0_progress("checking the source", job.facts.num_layers, 0, check, dist) as shown,
        walk(job.opened, tensors, model, check=check, dist=dist) as steps,
    ):
        for step in steps:
            with step.module() as layer:
                doing("held-out texts")
                stream.advance(layer)
            stream.forget(step.number)
            shown(f"layer {step.number}")
    pair = stream, stream
    nll, *_ = score([pair], texts, partial(rank_0_progress, check=check, dist=dist), dist=dist)[pair]
    if dist.local_rank == 0:
        shutil.rmtree(folder)
    mean = float(nll.mean())
    return math.exp(mean) if mean < 700 else math.inf  # NaN stays
