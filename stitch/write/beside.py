"""Writes what lies beside the shards: the index, config.json, and the source's other files."""

from __future__ import annotations

import json
from pathlib import Path

from quantizers.architectures.architecture import Architecture
from quantizers.checkpoint.reader import CONFIG, INDEX, Checkpoint, block_size, side_files
from quantizers.plan.plan import Plan, index_json
from quantizers.system.files import copy_file, write_text

from .config import output_config


def write_beside(folder: Path, source: Checkpoint, plan: Plan, facts: Architecture) -> None:
    """Write them into a folder with finished shards; what an earlier attempt left beside those is removed first.

    Args:
        source: the checkpoint that the plan was made for.
        facts: of its family.
    """
    shards = plan.shards()
    for path in folder.iterdir():  # an earlier attempt may have had other options
        if path.name not in shards:
            path.unlink()
    for file in side_files(source.folder):
        copy_file(file, folder / file.name)
    write_text(index_json(plan), folder / INDEX)
    config = output_config(source.config, facts, plan, plan.fp8_form(block_size(source)))
    write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", folder / CONFIG)
