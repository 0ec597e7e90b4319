"""Runs source and candidates layer by layer in lock-step, and collects the numbers that figures.py summarises.

Each model keeps its own hidden states for every sequence, in files. Layer by layer, the source's weights are
materialised, run over all sequences and freed, then each candidate's; so only one layer is in memory at a
time, and the source is computed once for any number of candidates. A step (one layer of one model) reads one
file of states and writes another, and is journaled once both are on disk: an interrupted evaluation resumes
at the step it was in. Several ranks deal the sequences among themselves; sums over sequences are formed by
rank 0, in the order of the sequences.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantizers.forward.layered_model import LayeredModel
from quantizers.forward.states import Rows
from quantizers.system.atomic import write_json
from quantizers.system.errors import QuantizeError
from quantizers.system.plain_json import finite
from quantizers.system.progress import Step
from quantizers.team.ranks import ALONE, Ranks

from .figures import Measured, Text, parts
from .logits import log_probabilities
from .weight_error import weight_errors

CHUNK = 256  # positions whose logits are in memory at a time: 0.2 GB with a vocabulary of 200,064
Stage = Callable[[str, int, int], AbstractContextManager[Step]]  # its name, its steps, steps done by an earlier call
Pair = tuple[torch.Tensor, torch.Tensor]  # of one text: the source's rows, the candidate's
Scores = tuple[np.ndarray, np.ndarray, np.ndarray]  # nll, kl, same: (T - 1,) each


def evaluate(
    source: LayeredModel,
    candidates: Sequence[LayeredModel],
    texts: Sequence[Text],
    work: Path,
    stage: Stage = lambda *_: nullcontext(lambda _: None),
    *,
    weights: bool = False,
    resumable: bool = False,
    ranks: Ranks = ALONE,
) -> list[Measured]:
    """Run all models over the texts.

    Args:
        source, candidates: models of one architecture and vocabulary.
        texts: at least one; each has two tokens or more.
        work: an existing folder for states and journal: empty, or left by the same evaluation when interrupted.
        stage: shows progress. Entered twice, for layers ("evaluating") and for chunks of scored positions
            ("scoring"), which take far less time than a layer; the function it yields is called after each step.
        weights: also compare the weights, layer by layer.
        resumable: keep a journal in `work`, so that the same call can resume.
        ranks: the processes that share the work; each of them calls this. Only rank 0's result holds agreement and
            errors.

    Raises:
        QuantizeError: a model's hidden states are not finite.
    """
    journal = _Journal(work, resumable, ranks)
    lengths = [len(text.tokens) for text in texts]
    lanes = [_Lane(model, number, lengths, work) for number, model in enumerate([source, *candidates])]
    ranks.rank_zero_first(lambda: _open(lanes, texts, journal))
    top, long = parts(texts)
    entries: list[list[dict[str, Any]]] = [[] for _ in candidates]
    weight_error: list[list[dict[str, float]]] = [[] for _ in candidates]
    steps = [(number, lane) for number in range(source.sizes["layers"]) for lane in lanes]
    done = sum(journal.holds(_name(number, lane)) for number, lane in steps)
    with stage("evaluating", len(steps), done) as step:
        for position, (number, lane) in enumerate(steps):
            entry = journal.once(
                _name(number, lane),
                partial(_layer, lanes, lane, number, top=top, long=long, weights=weights, ranks=ranks),
            )
            ranks.barrier()  # the next step may overwrite files that this one still reads
            if not ranks.leads:
                continue
            if lane.number:
                entries[lane.number - 1].append(entry)
            elif weights:
                for of_candidate, error in zip(weight_error, entry["weight_error"], strict=True):
                    of_candidate.append(error)
            if position >= done:
                step(f"layer {number}, " + (f"candidate {lane.number}" if lane.number else "source"))
    scores = _score(lanes, texts, journal, stage, ranks)
    return [
        Measured(
            scores[0][0], nll, kl, same, [n - 1 for n in lengths],
            [layer["agreement"] for layer in layers], [layer["hidden_error"] for layer in layers], errors,
            [layer["long"]["agreement"] for layer in layers if "long" in layer],
            [layer["long"]["hidden_error"] for layer in layers if "long" in layer],
        )
        for (nll, kl, same), layers, errors in zip(scores[1:], entries, weight_error, strict=True)
    ]  # fmt: skip


def _name(number: int, lane: _Lane) -> str:
    """The journal's name for one layer of one model."""
    return f"layer-{number:05d}-{lane.number}"


class _Journal:
    """One file per finished step, with its result. If not resumable, nothing is written and nothing looked up.

    All ranks look for a step's file before any rank can have finished the step, so they agree on what is done.
    """

    def __init__(self, work: Path, resumable: bool, ranks: Ranks) -> None:
        self.work, self.resumable, self.ranks = work, resumable, ranks

    def holds(self, name: str) -> bool:
        """Whether this step is done, in this call or an earlier one."""
        return self.resumable and (self.work / f"{name}.json").exists()

    def once(self, name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of a step: from its file if it is done, else computed and, by rank 0, written."""
        path = self.work / f"{name}.json"
        result: dict[str, Any]
        if self.holds(name):
            result = json.loads(path.read_text())
            return result
        result = compute()
        if self.resumable and self.ranks.leads:
            for states in self.work.glob("*.bin"):
                _sync(states)
            write_json(path, finite(result))
        return result


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _Lane:
    """One model with the files of its hidden states, two that are read and written in turn, and of its routing."""

    def __init__(self, model: LayeredModel, number: int, lengths: Sequence[int], work: Path) -> None:
        self.model, self.number, self._lengths, self._work = model, number, lengths, work

    def states(self, layer: int) -> Rows:
        """The states that enter a layer; the number of layers stands for those that leave the last."""
        path = self._work / f"states-{self.number}-{layer % 2}.bin"
        return Rows(path, self._lengths, self.model.sizes["hidden"], self.model.dtype)

    def chosen(self) -> Rows:
        """The experts chosen in the layer that ran last."""
        path = self._work / f"chosen-{self.number}.bin"
        return Rows(path, self._lengths, self.model.sizes["chosen"], torch.int32)


def _open(lanes: Sequence[_Lane], texts: Sequence[Text], journal: _Journal) -> None:
    """Create or open all files; rank 0 also fills the states that enter layer 0."""
    if journal.ranks.leads:
        journal.once("embedded", lambda: _embed(lanes, texts))
    for lane in lanes:
        for number in (0, 1):
            lane.states(number)
        lane.chosen()


def _embed(lanes: Sequence[_Lane], texts: Sequence[Text]) -> dict[str, Any]:
    for lane in lanes:
        table, rows = lane.model.embedding(), lane.states(0)
        for i, text in enumerate(texts):
            rows[i] = table[text.tokens.to(table.device)]
    return {}


def _layer(
    lanes: Sequence[_Lane],
    lane: _Lane,
    number: int,
    *,
    top: list[int],
    long: list[int],
    weights: bool,
    ranks: Ranks,
) -> dict[str, Any]:
    """Run one layer of one model. For a candidate, rank 0 then compares it with the source, which ran just before.

    Short and long texts are compared separately: `top` and `long` are the indices from `figures.parts`.
    """
    model, before, after, chosen = lane.model, lane.states(number), lane.states(number + 1), lane.chosen()
    with model.layer(number) as layer:
        for i in ranks.round_robin(len(before)):
            output, choices = model.run(layer, before[i])
            if not bool(torch.isfinite(output).all()):
                raise QuantizeError(f"{model.checkpoint.name}: layer {number}: its output is not finite")
            after[i], chosen[i] = output, choices.to(torch.int32)
    ranks.barrier()
    if not ranks.leads:
        return {}
    if lane.number:
        reference, states = lanes[0].chosen(), lanes[0].states(number + 1)
        compared = [
            {
                "agreement": _agreement([(reference[i], chosen[i]) for i in part]),
                "hidden_error": _relative_error([(states[i], after[i]) for i in part]),
            }
            for part in (top, long)
            if part
        ]
        return compared[0] | ({"long": compared[1]} if long else {})
    if not weights:
        return {}
    candidates = [other.model.checkpoint for other in lanes[1:]]
    return {"weight_error": weight_errors(model.checkpoint, candidates, model.facts, model.sizes, number, model.device)}


def _agreement(pairs: Sequence[Pair]) -> float:
    """The share of the source's expert choices that the candidate makes too."""
    same = sum(int((a.unsqueeze(-1) == b.unsqueeze(-2)).any(-1).sum()) for a, b in pairs)
    return same / sum(a.numel() for a, _ in pairs)


def _relative_error(pairs: Sequence[Pair]) -> float:
    """‖candidate − source‖ / ‖source‖ over all states."""
    difference = sum(float((a.float() - b.float()).double().square().sum()) for a, b in pairs)
    return math.sqrt(difference / sum(float(a.double().square().sum()) for a, _ in pairs))


def _score(
    lanes: Sequence[_Lane], texts: Sequence[Text], journal: _Journal, stage: Stage, ranks: Ranks
) -> list[Scores]:
    """Score every text with every model; the same result in all ranks, one entry per model over all texts."""
    layers = lanes[0].model.sizes["layers"]
    heads: list[torch.Tensor] = []
    tables: dict[str, torch.Tensor] = {}
    # Progress counts chunks of positions, since a long text takes as long as many short ones. While this rank scores
    # a text, every other rank scores one too, so their chunks are counted with it.
    chunks = [math.ceil((len(text.tokens) - 1) / CHUNK) for text in texts]
    own = {i: sum(chunks[i : i + ranks.count]) for i in ranks.round_robin(len(texts))}
    paths = {i: journal.work / f"scores-{i:05d}.npy" for i in own}
    done = {i for i, path in paths.items() if journal.resumable and path.exists()}
    with stage("scoring", sum(chunks), sum(own[i] for i in done)) as step:
        for i, scored_chunks in own.items():
            if i in done:
                tables[str(i)] = torch.from_numpy(np.load(paths[i]))
                continue
            heads = heads or [lane.model.head() for lane in lanes]
            table = _score_text(lanes, heads, texts[i], [lane.states(layers)[i] for lane in lanes])
            if journal.resumable:
                temporary = paths[i].with_name(paths[i].name + ".tmp")
                with temporary.open("wb") as stream:
                    np.save(stream, table)
                os.replace(temporary, paths[i])
            tables[str(i)] = torch.from_numpy(table)
            for _ in range(scored_chunks):
                step(f"text {i + 1} of {len(texts)}")
    tables = ranks.gather(tables, torch.device("cpu"))
    by_lane: list[list[Scores]] = [[] for _ in lanes]
    for i in range(len(texts)):
        for by_text, (nll, kl, same) in zip(by_lane, tables[str(i)].numpy(), strict=True):
            by_text.append((nll, kl, same.astype(bool)))
    return [
        (
            np.concatenate([scores[0] for scores in by_text]),
            np.concatenate([scores[1] for scores in by_text]),
            np.concatenate([scores[2] for scores in by_text]),
        )
        for by_text in by_lane
    ]


@torch.no_grad()
def _score_text(
    lanes: Sequence[_Lane], heads: Sequence[torch.Tensor], text: Text, states: Sequence[torch.Tensor]
) -> np.ndarray:
    """(models, 3, T - 1) float64: nll, KL from the source, and 1 where the model's top-1 token is the source's."""
    device = lanes[0].model.device
    targets = text.tokens[1:].to(device)
    final = [lane.model.final(rows[:-1]) for lane, rows in zip(lanes, states, strict=True)]
    chunks = []
    for start in range(0, len(targets), CHUNK):
        target = targets[start : start + CHUNK, None]
        logs = [log_probabilities(x[start : start + CHUNK], head) for x, head in zip(final, heads, strict=True)]
        p, best = logs[0].exp(), logs[0].argmax(-1)
        rows = []
        for q in logs:
            # The source against itself gives exactly 0, since the difference of equal logarithms is 0.
            kl = (p * (logs[0] - q)).sum(-1, dtype=torch.float64)
            same = (q.argmax(-1) == best).double()
            rows.append(torch.stack([-q.gather(1, target)[:, 0].double(), kl, same]).cpu())
        chunks.append(torch.stack(rows).numpy())
    return np.concatenate(chunks, axis=-1)
