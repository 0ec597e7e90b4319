"""Every check that `quantize verify` and `quantize publish` make of a finished folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantizers.architectures.families import architecture_for
from quantizers.checkpoint.reader import CONFIG, Checkpoint, open_checkpoint, read_config, read_json, refuse_gguf
from quantizers.formats.argument_order import refuse_swapped_arguments
from quantizers.formats.awq_gptq import is_awq_or_gptq
from quantizers.formats.unsupported import refuse_unsupported
from quantizers.output.manifest import carried_facts
from quantizers.recipe.portable import is_hub_id
from quantizers.system.errors import ArchitectureError, CheckpointError, DamagedRecord, InputError
from quantizers.system.output_files import FACTS, REPORT
from quantizers.system.package_data import shipped
from quantizers.system.progress import progress

from .manifest_check import Record, check_manifest

if TYPE_CHECKING:
    import torch

    from eval.serving.findings import Consumers
    from stitch.audit.checkpoint import Audit


@dataclass(frozen=True)
class Verification:
    """What `verify_folder` found.

    Attributes:
        audit: the files compared with the source.
        record: the files compared with report.json, and report.json with its seal.
        consumers: how serving engines would read it; None if the folder cannot be opened, which the audit reports.
    """

    audit: Audit
    record: Record
    consumers: Consumers | None

    @property
    def differences(self) -> list[str]:
        """What is wrong with the files, one line each."""
        return [*self.audit.differences, *self.record.differences]

    @property
    def misread(self) -> list[str]:
        """What serving engines would read differently from how it is stored, one line each."""
        return [str(finding) for finding in self.consumers.errors] if self.consumers else []

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        found = self.audit.as_dict() | {"differences": self.differences, "notes": list(self.record.notes)}
        if self.consumers is None:
            return found
        listed = [one.as_dict() | {"places": list(one.places)} for one in self.consumers.findings]
        return found | {"consumers": self.consumers.as_dict() | {"findings": listed}}


def verify_folder(folder: Path, source: Checkpoint, device: torch.device, own: Path | None = None) -> Verification:
    """Compare a finished checkpoint with its source, with its own record, and with the serving engines' rules.

    Args:
        own: a file with the user's own facts about the family, instead of those that the folder may carry.

    Raises:
        CheckpointError: the folder does not exist, or is in a format that is not read here; the source is broken, or
            was made from the folder.
        ArchitectureError: there are no facts for the source. A fault in facts that the folder carries is a difference.
    """
    from eval.serving.check import check_folder
    from stitch.audit.checkpoint import Audit, verify

    _refuse(folder, source)
    record, carried = check_manifest(folder), carried_facts(folder)
    if own is None and carried is not None:
        try:
            architecture_for(source.config, str(source.folder / CONFIG), carried)
        except ArchitectureError as failure:
            told = any(line.startswith(f"{FACTS}:") for line in record.differences)
            fault = str(failure).replace(f"{folder}/", "")
            return Verification(Audit(differences=[] if told else [fault]), record, None)
    if own is None and carried is not None:
        own, record = carried, replace(record, notes=(*record.notes, f"read with the facts that it carries, {FACTS}"))
    with progress("verifying", int(source.config.get("num_hidden_layers", 1))) as step:
        audit = verify(folder, source, device, step=step, own=own)
    return Verification(audit, record, check_folder(folder, own))


def _refuse(folder: Path, source: Checkpoint) -> None:
    """Refuse a folder of a format that is not read here, and one from which the source was made."""
    try:
        config = read_config(folder)
    except CheckpointError:
        return  # which the audit reports
    refuse_unsupported(config, str(folder / CONFIG))
    if is_awq_or_gptq(config):
        method = config["quantization_config"]["quant_method"]
        raise CheckpointError(
            f"{folder / CONFIG}: quantization_config.quant_method is {method!r}; "
            "`verify` checks compressed-tensors checkpoints, such as those of `quantize run` and `quantize stitch`; "
            f"measure this one with `quantize eval {source.name} {folder} --data SET`"
        )
    candidate = Checkpoint(folder, str(folder), config, {})
    refuse_swapped_arguments(source, candidate, f"quantize verify {source.name} --source {folder}")


def source_of(folder: Path, given: str | None, revision: str | None) -> Checkpoint:
    """The source of a finished checkpoint: the one given, or the one that its report.json names.

    Args:
        given: a folder or Hub id; if None, the report's Hub id, or the shipped model with the report's name.
        revision: on the Hub; if None, the report's, or main.

    Raises:
        InputError: the report names a folder and no shipped model has that name, or there is no report.
        DamagedRecord: the report cannot be read.
        CheckpointError: the source cannot be opened.
    """
    refuse_gguf(str(folder))
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give a finished checkpoint")
    model, made_at = _named_source(folder, needed=given is None)
    if given is not None:
        return open_checkpoint(given, revision or made_at)
    if is_hub_id(model):
        return open_checkpoint(model, revision or made_at)
    for kept in sorted(shipped("models").iterdir()):
        if kept.name == model:
            return open_checkpoint(str(kept))
    raise InputError(f"{folder}: was made from a folder called {model}; say where that is with --source")


def _named_source(folder: Path, needed: bool) -> tuple[str, str]:
    """The source's name and revision in report.json; if it has none and none is needed, an empty name and main."""
    try:
        source = read_json(folder / REPORT)["source"]
        return str(source["model"]), str(source["revision"] or "main")
    except (CheckpointError, KeyError, TypeError) as failure:
        if not needed:
            return "", "main"
        damaged = check_manifest(folder).differences
        if damaged:
            raise DamagedRecord(f"{damaged[0]}; with --source the rest can be verified") from None
        raise InputError(
            f"{folder}: has no {REPORT} that names its source; say where that is with --source"
        ) from failure
