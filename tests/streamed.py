"""Log-probabilities by this program's own streamed evaluation, and texts for them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quantizers.architectures.families import Own, architecture_for
from quantizers.calibration.load_set import load_set
from quantizers.checkpoint.reader import open_folder
from quantizers.device.devices import choose_device
from quantizers.eval.fidelity.scoring import products
from quantizers.formats.tensor_names import published_names
from quantizers.model.streamed_model import StreamedModel


@torch.no_grad()
def log_probabilities(folder: Path, texts: list[Tensor], own: Own = None) -> list[Tensor]:
    """Of each text, token ids (T,), what a checkpoint predicts for all but the first: (T - 1, V) float64."""
    opened = open_folder(folder)
    facts = architecture_for(opened.config, str(folder), own, opened.tensors)
    model = StreamedModel(published_names(opened, facts), facts, choose_device("cpu"), torch.float32)
    table, head = model.embedding(), model.head()
    states = [model.begin(text, table) for text in texts]
    for number in range(model.facts.num_layers):
        with model.layer(number) as layer:
            states = [model.run(layer, rows)[0] for rows in states]
    logits = (model.logits(products(model.final(rows[:-1]), head)) for rows in states)
    return [torch.log_softmax(one.double(), -1) for one in logits]


def divergence(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Mean KL(ours || theirs) over all positions, in nats."""
    return float(torch.cat([(p.exp() * (p - q)).sum(-1) for p, q in zip(ours, theirs, strict=True)]).mean())


def held_out_texts(folder: Path, count: int = 2, length: int = 96, model: Path | None = None) -> list[Tensor]:
    """Token ids (T,) of the beginnings of some texts of the folder's held-out.yaml, by its model or another."""
    samples = load_set(folder / "held-out.yaml", model or folder / "model").samples[:count]
    return [torch.from_numpy(sample.tokens[:length]).long() for sample in samples]
