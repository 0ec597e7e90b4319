"""Quantizes a model's experts by another tool, in that tool's own environment: run_tool.py TOOL MODEL JOB.json OUTPUT.

other_tools.py calls it; nothing of this program is imported here. INT4 in groups of 32, symmetric; attention, router
and head stay as they are, and all else is the tool's default. JOB.json has `sequences` of token ids, and `iters` for
AutoRound.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

LENGTH = 256  # tokens; AutoRound leaves out samples that are shorter than its sequence length
GROUP = {"bits": 4, "group_size": 32, "sym": True}


def pieces(sequences: list[list[int]]) -> torch.Tensor:
    """The tokens of all sequences, end to end, in pieces (N, LENGTH); the last few are left out."""
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    return tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)


def by_autoround(model: str, job: dict[str, Any], output: str) -> None:
    """Quantize with AutoRound."""
    from auto_round import AutoRound
    from transformers import AutoTokenizer

    rows = pieces(job["sequences"])
    loader = torch.utils.data.DataLoader(rows, batch_size=8)
    given = {"dataset": loader, "seqlen": LENGTH, "nsamples": len(rows), "iters": job["iters"]}
    tokenizer = AutoTokenizer.from_pretrained(model)
    tool = AutoRound(model, tokenizer, scheme="W4A16", **GROUP, ignore_layers="self_attn", device_map="cpu", **given)
    tool.quantize_and_save(output, format="auto_round")


def by_gptqmodel(model: str, job: dict[str, Any], output: str) -> None:
    """Quantize with GPTQModel."""
    from gptqmodel import GPTQModel, QuantizeConfig

    rows = [{"input_ids": sequence, "attention_mask": [1] * len(sequence)} for sequence in job["sequences"]]
    # "original" packs without an extension that it would compile first.
    config = QuantizeConfig(
        **GROUP, dynamic={"-:.*self_attn.*": {}}, device="cpu", offload_to_disk=False, pack_impl="original"
    )
    loaded = GPTQModel.load(model, config)
    loaded.quantize(rows, batch_size=1)
    loaded.save(output)


def main() -> None:
    """Run the tool that is named."""
    tool, model, job, output = sys.argv[1:]
    {"autoround": by_autoround, "gptqmodel": by_gptqmodel}[tool](model, json.loads(Path(job).read_text()), output)


if __name__ == "__main__":
    main()
