"""Rows of a table: one output each, made, measured on the held-out texts, shown and removed before the next is made.

The source goes through the texts once for all rows. With `--keep FILE` what was measured lies in that file, row by row,
and the same command goes on where it was interrupted.

All figures are of the set's short texts, computed as `quantize eval` does.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantizers.architectures.architecture import Architecture
from quantizers.calibration.load_set import load_set
from quantizers.checkpoint.loaded_tensors import layer_names, load_tensors, outside_names
from quantizers.checkpoint.reader import Checkpoint
from quantizers.checkpoint.source_identity import source_digest
from quantizers.device.devices import choose_device, forward_dtype, use_threads
from quantizers.eval.fidelity.metrics import Text, parts, table
from quantizers.eval.fidelity.scoring import held_out, score_text
from quantizers.formats.tensor_names import published_names
from quantizers.model.activation_stream import ActivationStream
from quantizers.model.streamed_model import StreamedModel
from quantizers.planning.job import Job, prepare
from quantizers.recipe.read import changes_of, set_location
from quantizers.system.errors import InputError
from quantizers.system.files import write_json

Maker = Callable[[Path], Checkpoint]  # makes an output in an empty folder
Row = dict[str, Any]  # name, kl, median, top1, increase, router, and what a benchmark adds


@dataclass(frozen=True)
class Passed:
    """A checkpoint's pass through the texts.

    Attributes:
        stream: has left the last layer.
        chosen: the experts that each token was sent to, (tokens, top k) int32, by layer with experts.
    """

    stream: ActivationStream
    chosen: dict[int, torch.Tensor]


def options(about: str | None) -> argparse.ArgumentParser:
    """The options that these scripts share."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="tiny-minimax-m2-fp8-int4", help="with an evaluation set")
    parser.add_argument("--tokens", type=int, default=16384, help="of the calibration set, about, taken evenly")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser


def row_options(about: str | None, *, chosen: bool = True) -> argparse.ArgumentParser:
    """The shared options, and those of tables that `Table` makes; `chosen` if a user can name rows."""
    parser = options(about)
    parser.set_defaults(only=None)
    parser.add_argument("--held-out-tokens", type=int, help="of the evaluation set's short texts, about, taken evenly")
    if chosen:
        parser.add_argument("--only", nargs="+", metavar="ROW", help="these rows, by name")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="for finished rows; the same command goes on there")
    return parser


def recipe_job(recipe: str, *settings: str) -> Job:
    """The prepared job of a recipe that names an evaluation set, changed as by --set, with the number of threads set.

    Raises:
        InputError: it names none.
    """
    job = prepare(recipe, changes=changes_of(settings))
    use_threads(job.facts)
    if job.recipe.verify is None or job.recipe.verify.perplexity is None:
        raise InputError(recipe, "verify.perplexity.data is missing", "the methods are measured on it")
    return job


def budget_settings(job: Job, budget: float) -> list[str]:
    """The changes that give a recipe this many bits per weight in place of its bits and group size, as by --set."""
    named = job.recipe.experts.model_fields_set & {"bits", "group_size"}
    return [f"experts.bits_per_weight={budget}", *(f"experts.{key}=null" for key in sorted(named))]


def short_texts(job: Job, most_tokens: int | None = None) -> list[Text]:
    """The short texts of the recipe's held-out set; of about `most_tokens` every n-th."""
    assert job.recipe.verify is not None
    assert job.recipe.verify.perplexity is not None
    trusts = job.recipe.source.trusts_tokenizer
    location = set_location(job.recipe.verify.perplexity.data, job.path)
    held = held_out(load_set(location, job.opened.folder, trusts), job.opened, job.facts, trusts)
    texts = [held.texts[number] for number in parts(held.texts)[0]]
    total = sum(len(text.tokens) for text in texts)
    return texts[:: max(1, round(total / most_tokens))] if most_tokens else texts


def passed(checkpoint: Checkpoint, facts: Architecture, texts: list[Text], work: Path, device: torch.device) -> Passed:
    """The pass of a checkpoint through all of its layers, with all states in memory."""
    opened = published_names(checkpoint, facts)
    outside = load_tensors(opened, outside_names(opened, facts))
    model = StreamedModel(outside, facts, device, forward_dtype(device))
    lengths = [len(text.tokens) for text in texts]
    stream = ActivationStream(checkpoint.name, model, 0, lengths, work, durable=False, device=device)
    stream.enter(0, [text.tokens for text in texts])
    chosen = dict[int, torch.Tensor]()
    for number in range(facts.num_layers):
        with model.layer(number, load_tensors(opened, layer_names(opened, facts, number))) as layer:
            stream.advance(layer)
        if number not in facts.dense:
            chosen[number] = stream.chosen.flat.clone()
    return Passed(stream, chosen)


def scored(streams: list[ActivationStream], texts: list[Text]) -> np.ndarray:
    """-log p by the last stream, its KL to the first both ways, and top-1 at each scored position, (4, N)."""
    models = [(stream.model, stream.model.head()) for stream in streams]
    states = [stream.states(stream.model.facts.num_layers) for stream in streams]
    pair = [(0, len(streams) - 1)]
    tables = [
        score_text(models, text.tokens, [rows[n] for rows in states], pair)[0]
        for n, text in enumerate(texts)
        if len(text.tokens) > 1
    ]
    return np.concatenate(tables, axis=1)


class Table:
    """Rows of one job, each measured against the job's source.

    Attributes:
        given: the options of the command, see `row_options`.
        label: all else that decides the figures beside the job, the tokens and a row's name.
        rows: those that are measured, by name.
    """

    def __init__(self, job: Job, given: argparse.Namespace, label: str) -> None:
        """Take up the rows that an earlier command kept."""
        self.job, self.given, self.label = job, given, label
        self.device = choose_device(given.device)
        self.texts = short_texts(job, given.held_out_tokens)
        self.rows: dict[str, Row] = {}
        self._source: tuple[Passed, np.ndarray] | None = None
        self._of = {
            "recipe": job.recipe.model_dump(mode="json"),
            "source": source_digest(job.opened),
            "tokens": given.tokens,
            "held_out_tokens": given.held_out_tokens,
        }
        if (kept := self._kept().get(label)) is None:
            return
        if kept["of"] != self._of:
            remedy = "give the options that it was made with, or another file"
            raise InputError(given.keep, "has rows of another model, or of other options", remedy)
        self.rows = kept["rows"]

    def _kept(self) -> dict[str, Any]:
        keep = self.given.keep
        tables: dict[str, Any] = json.loads(keep.read_text()) if keep and keep.exists() else {}
        return tables

    def measure(self, makers: Mapping[str, Maker], also: Callable[[str, Path], Row] = lambda *_: {}) -> list[Row]:
        """The rows in the order of their makers, as far as they are wanted; `also` adds figures from a row's folder."""
        wanted = self.given.only or list(makers)
        if unknown := [name for name in wanted if name not in makers]:
            raise InputError("--only", f"no row is called {unknown[0]!r}", f"give one of {', '.join(makers)}")
        for name in makers:
            if name in wanted and name not in self.rows:
                self._add(name, makers[name], also)
        return [self.rows[name] for name in makers if name in wanted]

    def _add(self, name: str, make: Maker, also: Callable[[str, Path], Row]) -> None:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            place = Path(folder) / "output"
            place.mkdir()
            output = make(place)
            made = time.monotonic()
            row = {"name": name} | self.figures(output) | also(name, place)
        self.rows[name] = row
        if self.given.keep:
            write_json(self.given.keep, self._kept() | {self.label: {"of": self._of, "rows": self.rows}})
        took = f"made in {made - started:.0f} s, measured in {time.monotonic() - made:.0f} s"
        figures = f"KL {row['kl']:.5f}, median {row['median']:.5f}, top-1 {row['top1']:.1%}"
        print(f"{self.label}: {name}: {figures} ({took})", file=sys.stderr, flush=True)

    def figures(self, output: Checkpoint) -> Row:
        """Mean and median KL, top-1, the increase of perplexity, and router agreement in the worst layer."""
        facts = self.job.facts
        with tempfile.TemporaryDirectory() as folder:
            if self._source is None:
                source = passed(self.job.opened, facts, self.texts, Path(folder), self.device)
                self._source = source, scored([source.stream], self.texts)[0]
            source, source_nll = self._source
            own = passed(output, facts, self.texts, Path(folder), self.device)
        nll, kl, reverse, same = scored([source.stream, own.stream], self.texts)
        figures = table(self.texts, np.stack([source_nll, nll, kl, reverse, same]))
        agreement = [
            float((theirs.unsqueeze(-1) == own.chosen[layer].unsqueeze(-2)).any(-1).double().mean())
            for layer, theirs in source.chosen.items()
        ]
        return {
            "kl": figures.kl.mean,
            "median": figures.kl.median,
            "top1": figures.top1,
            "increase": figures.perplexity.increase,
            "router": min(agreement),
            "held_out_tokens": figures.tokens,
        }
