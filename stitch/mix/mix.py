"""`quantize stitch`: examine, assemble, audit, move into place. layers.py builds the layers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from quantizers.architectures.families import architecture_for
from quantizers.architectures.sizes import sizes_of
from quantizers.checkpoint.formats import readable
from quantizers.checkpoint.fused_experts import with_experts_apart
from quantizers.checkpoint.reader import CONFIG, INDEX, Checkpoint, block_size, side_files
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.checkpoint.source_files import source_digest
from quantizers.output import journal
from quantizers.output.folder import finished_report, move_into_place, refuse_strangers
from quantizers.output.record import describe_files, text_sha256, write_record
from quantizers.plan.making import make_plan
from quantizers.plan.plan import index_json
from quantizers.recipe.portable import facts_copy, source_name
from quantizers.recipe.schema import Experts
from quantizers.system.atomic import copy_file, write_text
from quantizers.system.errors import CheckpointError, OutputError
from quantizers.system.progress import checked, progress
from quantizers.system.repeated import repeated
from stitch.audit.checkpoint import verify
from stitch.audit.folder import folders_left_out
from stitch.audit.packed_scheme import stored_schemes
from stitch.write.config import output_config
from stitch.write.shard import layer_tensors, write_shard

from .layers import as_rows, describe, examine, write_layers


def mix(
    source: Checkpoint,
    experts: Checkpoint,
    output: Path,
    device: torch.device,
    *,
    repair_router: bool = False,
    versions: dict[str, str] | None = None,
    check: Callable[[], None] = lambda: None,
    own: Path | None = None,
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """Build the mixed checkpoint, and audit it against its source as `quantize verify` does.

    Args:
        source: the FP8 checkpoint.
        experts: an experts-only checkpoint made from a BF16 copy of it, by any tool.
        output: a new or empty folder, or that of the same call that was interrupted.
        repair_router: multiply the source's router by the ratio of the norms.
        versions: for report.json.
        check: called between steps; may raise to interrupt.
        own: a file with the user's own facts about the family, of which the output then carries a copy.
        command: what the user typed, to be named where the folder is found unfinished.

    Returns:
        The contents of report.json.

    Raises:
        CheckpointError: the two do not belong together, or have a format that cannot be stitched.
        OutputError: the folder holds something else.
    """
    carried = facts_copy(own)
    digests = {"source": source_digest(source), "experts": source_digest(experts)}
    settings = {
        "source": source_name(source.name, Path.cwd()),
        "experts": source_name(experts.name, Path.cwd()),
        "digests": digests,
        "repair_router": repair_router,
    } | {name: text_sha256(text) for name, text in carried.items()}
    finished = finished_report(output)
    if finished is not None:
        if finished.get("stitched") != settings:
            raise OutputError(f"{output}: holds another finished output; choose another --output")
        return finished | {"already_done": True}
    where = str(source.folder / CONFIG)
    facts = architecture_for(source.config, where, own)
    sizes = sizes_of(facts, source.config, where)
    source = with_experts_apart(source, facts, sizes)
    config_path = str(experts.folder / CONFIG)
    if sizes_of(architecture_for(experts.config, config_path, own), experts.config, config_path) != sizes:
        raise CheckpointError(f"{config_path}: is another model than {source.name}; give one made from a copy of it")
    renamed = readable(experts, facts)
    schemes = stored_schemes(renamed, facts, sizes)
    examined = examine(source, renamed, facts, sizes, device)
    specs = {name: Spec(info.dtype, info.shape) for name, info in source.tensors.items()}
    plan = make_plan(facts, sizes, specs, Experts(), str(source.folder), block_size(source))
    plan = plan.with_schemes(schemes).with_norms_kept([layer.layer for layer in examined if not layer.folded])
    refuse_strangers(output)
    with journal.locked(output):
        work = journal.work_folder(output)
        if (work / "moving").exists():
            return move_into_place(work, output)
        journal.refuse_changes(work, settings, output)
        journal.note_command(work, command, sizes["layers"])
        for layer in journal.damaged_shards(work, journal.done_layers(work, sizes["layers"])):
            journal.layer_file(work, layer).unlink()  # so that it is stitched again
        journal.remove_cut_files(work)
        for name in ("layers", "output"):
            (work / name).mkdir(exist_ok=True)
        folder = work / "output"
        with progress("stitching", sizes["layers"]) as step:
            write_layers(plan, facts, source, renamed, work, repair_router=repair_router, step=checked(step, check))
        outside = layer_tensors(plan, None, source, None)
        last = write_shard(outside, folder / plan.shard_file(None), carried=plan.carried(None))
        for file in side_files(source.folder):
            copy_file(file, folder / file.name)
        for name, text in carried.items():
            write_text(text, folder / name)
        write_text(index_json(plan), folder / INDEX)
        config = output_config(source.config, facts.targets, schemes, plan.fp8_form(block_size(source)))
        write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", folder / CONFIG)
        entries = journal.done_layers(work, sizes["layers"])
        written = {entry["shard"]: entry["digest"] for entry in entries} | {plan.shard_file(None): last}
        with progress("verifying", sizes["layers"]) as step:
            audit = verify(folder, source, device, written, checked(step, check), own=own)
        report = {
            "stitched": settings,
            "source": {
                "model": settings["source"],
                "revision": source.revision,
                "digest": digests["source"],
            },
            "versions": versions or {},
            "notes": [*describe(examined), *folders_left_out(source.folder)],
            "layers": as_rows(examined),
            "audit": audit.as_dict() | {"digests": written},
        }
        write_record(folder, report | describe_files(folder, carried))
        write_text("", work / "moving")
        return move_into_place(work, output)


def stitch_table(report: dict[str, Any], output: Path) -> str:
    """What `quantize stitch` prints."""
    affected = [line for line in report["audit"]["differences"] if "not compensated" in line]
    lines = [f"{output} was finished before; nothing was touched"] if report.get("already_done") else []
    lines += report["notes"]
    if report["stitched"]["repair_router"]:
        lines.append("the router of every smoothed layer was compensated: router * norm / norm', in float32")
    elif affected:
        lines.append(
            f"the source's router reads a smoothed norm in {len(affected)} layers, and sends tokens to other experts "
            "than the source does; write the compensated router with --repair-router"
        )
    audit = report["audit"]
    lines.append(
        f"{audit['tensors']:,} source tensors accounted for, {audit['kept_tensors']:,} compared byte for byte, "
        f"{len(audit['differences'])} differences"
    )
    return "\n".join([*lines, *(f"  {line}" for line in repeated(audit["differences"])[:10])])
