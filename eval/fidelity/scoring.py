"""Held-out texts, and their scores by source and candidates after all layers: −log p, KL both ways, top-1.

Nothing is scored past the model's `max_position_embeddings`, of which quantization says nothing: longer texts are
truncated there and counted.

Logits are float32, independent of the forward pass's dtype: rounded to bfloat16, logits around 40 are off by up to 1/8,
and a KL of 0.0002 reads 0.001. So the matrix product itself must produce float32: on a GPU from bfloat16 operands,
elsewhere from a float32 copy of the head, block by block.

Legend: T positions, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from quantizers.architectures.architecture import Architecture
from quantizers.calibration.render import load_tokenizer, scored_bytes
from quantizers.calibration.samples import CalibrationData, identity, token_tensors
from quantizers.checkpoint.reader import Checkpoint
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.model.activation_stream import ActivationStream
from quantizers.model.streamed_model import StreamedModel
from quantizers.solve.symmetric import transposed_product
from quantizers.system.errors import QuantizeError
from quantizers.system.files import atomic, disk_errors
from quantizers.system.progress import Step

from .figures import Cut, Fidelity, HeldOutSet
from .metrics import Measured, Text, figures

HEAD_ROWS = 16384  # rows of the head (vocabulary entries) that are multiplied at a time
COLUMNS = ("nll", "kl", "reverse_kl", "same_top1")  # what `score_text` finds at a position
CHUNK = 256  # positions whose logits are in memory at a time: 0.2 GB with a vocabulary of 200,064
Stage = Callable[[str, int, int], AbstractContextManager[Step]]  # its name, its steps, steps done by an earlier call
Scores = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # the COLUMNS, (N,) each over all texts
Models = Sequence[tuple[StreamedModel, torch.Tensor]]  # with the head (V, H) of each
Pair = tuple[ActivationStream, ActivationStream]  # P and Q: what is measured is Q, and KL(P || Q)


def score(
    pairs: Sequence[Pair],
    texts: Sequence[Text],
    stage: Stage,
    work: Path | None = None,
    dist: ProcessGroup = SINGLE_PROCESS,
) -> dict[Pair, Scores]:
    """Score every text with every stream; the same result in all processes.

    Args:
        pairs: which streams are compared; all have left the last layer.
        texts: each has two tokens or more; each of the processes of `dist` scores its own.
        stage: shows progress; it counts this process's chunks of positions, since a long text takes as long as many
            short ones.
        work: a folder for scored texts, with which the same call resumes after an interruption; None for nowhere. What
            a version with other columns left there is scored again.
    """
    streams = list(dict.fromkeys(stream for pair in pairs for stream in pair))
    numbers = [(streams.index(p), streams.index(q)) for p, q in pairs]
    layers = streams[0].model.facts.num_layers
    states = [stream.states(layers) for stream in streams]
    heads: dict[tuple[Path, torch.dtype], torch.Tensor] = {}
    tables: dict[str, torch.Tensor] = {}
    own = {i: math.ceil((len(texts[i].tokens) - 1) / CHUNK) for i in states[0].owned}
    paths = {i: work / f"scores-{i:05d}.npy" for i in own} if work else {}
    kept = {i: np.load(path) for i, path in paths.items() if path.exists()}
    done = {i: table for i, table in kept.items() if table.shape[1] == len(COLUMNS)}
    with stage("scoring", sum(own.values()), sum(own[i] for i in done)) as step:
        for i, chunks in own.items():
            if i in done:
                tables[str(i)] = torch.from_numpy(done[i])
                continue
            models = []
            for model in (stream.model for stream in streams):
                head = (model.checkpoint.folder, model.dtype)
                if head not in heads:
                    heads[head] = model.head()
                models.append((model, heads[head]))
            table = score_text(models, texts[i].tokens, [rows[i] for rows in states], numbers)
            if work:
                with disk_errors(paths[i]), atomic(paths[i]) as file:
                    np.save(file, table)
            tables[str(i)] = torch.from_numpy(table)
            for _ in range(chunks):
                step(f"text {i + 1} of {len(texts)}")
    tables = dist.all_gather(tables, torch.device("cpu"))
    columns = np.concatenate([tables[str(i)].numpy() for i in range(len(texts))], axis=-1)
    scores = [(nll, kl, reverse, same.astype(bool)) for nll, kl, reverse, same in columns]
    return dict(zip(pairs, scores, strict=True))


@torch.no_grad()
def score_text(
    models: Models, tokens: torch.Tensor, states: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]] = ()
) -> np.ndarray:
    """The COLUMNS of each pair, (pairs, len(COLUMNS), T - 1) float64.

    They are Q's nll, KL(P || Q), KL(Q || P), and 1 where the top-1 token of both is the same.

    Args:
        models: with the head (V, H) of each; `pairs` are their numbers, by default each one with the first.
        tokens: (T,) int64; `states`: (T, H) of each model, leaving the last layer.
    """
    pairs = pairs or [(0, n) for n in range(len(models))]
    targets, chunks = tokens[1:].to(models[0][0].device), []
    for positions, logs in log_probabilities(models, states, CHUNK):
        target = targets[positions, None]
        best = [log.argmax(-1) for log in logs]
        rows = []
        for p, q in pairs:
            kl, reverse = divergence(logs[p], logs[q]), divergence(logs[q], logs[p])
            nll = -logs[q].gather(1, target)[:, 0].double()
            rows.append(torch.stack([nll, kl, reverse, (best[p] == best[q]).double()]).cpu())
        chunks.append(torch.stack(rows).numpy())
    return np.concatenate(chunks, axis=-1)


def log_probabilities(
    models: Models, states: Sequence[torch.Tensor], size: int
) -> Iterator[tuple[slice, list[torch.Tensor]]]:
    """Log-probabilities of tokens 1 to T - 1 by each model, (size, V) float32, in chunks; arguments as `score_text`."""
    final = [model.final(rows[:-1]) for (model, _), rows in zip(models, states, strict=True)]
    for start in range(0, len(final[0]), size):
        chunk = slice(start, start + size)
        logs = []
        for rows, (model, head) in zip(final, models, strict=True):
            logs.append(torch.log_softmax(model.logits(products(rows[chunk], head)), dim=-1))
        yield chunk, logs


def divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) in nats, (T,) float64, from log-probabilities (T, V); exactly 0 where they are equal."""
    return (log_p.exp() * (log_p - log_q)).sum(-1, dtype=torch.float64)


def products(states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """states · headᵀ, (T, V) float32, from (T, H) and (V, H) of the same dtype."""
    if head.dtype == torch.float32:
        return transposed_product(states.mT, head.mT)
    product = torch.empty(len(states), len(head), dtype=torch.float32, device=head.device)
    for start in range(0, len(head), HEAD_ROWS):
        product[:, start : start + HEAD_ROWS] = transposed_product(states.mT, head[start : start + HEAD_ROWS].mT)
    return product


# Held-out texts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldOut:
    """One set.

    Attributes:
        texts: to be scored, truncated at the model's positions.
        identity: of the set, whatever its categories are called.
        about: for the report.
    """

    texts: list[Text]
    identity: str
    about: HeldOutSet

    def figures(self, measured: Measured, name: str) -> Fidelity:
        """Figures of the candidate called `name`; a QuantizeError if a perplexity is not a number."""
        try:
            return figures(measured, self.texts, self.about)
        except OverflowError as failure:
            raise QuantizeError(
                name,
                f"its perplexity, or its source's, is not a number ({failure}): logits overflow, and nothing can be "
                "compared",
                "without verify.perplexity in its recipe a run ends without these figures",
            ) from None


def held_out(
    data: CalibrationData,
    source: Checkpoint,
    facts: Architecture,
    trust_remote_code: bool,
    published: Callable[[str], str] = str,
) -> HeldOut:
    """The texts of a set whose samples were tokenized with the source's tokenizer, which may run code of its own or
    not.

    The sizes have the vocabulary for the check of token ids; `published` is the place of a row as figures name it.
    """
    limit = facts.positions
    tokenizer = load_tokenizer(str(source.folder), trust_remote_code=trust_remote_code)
    texts = []
    for sample, whole in zip(data.samples, token_tensors(data, facts.vocab_size), strict=True):
        tokens = whole[:limit]
        size = scored_bytes(tokenizer, tokens.tolist())
        texts.append(Text(tokens, sample.category, size, sample.long, published(sample.place)))
    lost = [len(sample.tokens) - limit for sample in data.samples if limit is not None and len(sample.tokens) > limit]
    cut = Cut(texts=len(lost), tokens=sum(lost), positions=limit or None)
    about = HeldOutSet(name=data.name, digest=data.digest, past_the_model=cut)
    return HeldOut(texts, identity(data.samples), about)
