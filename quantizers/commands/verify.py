"""A finished checkpoint against its source, its own report and the rules of serving engines: `quantizers.verify`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from quantizers.architectures.architecture import Architecture
from quantizers.architectures.families import Own, architecture_for
from quantizers.checkpoint.reader import CONFIG, Checkpoint, open_checkpoint, read_config, read_json, refuse_gguf
from quantizers.checkpoint.source_identity import is_source
from quantizers.device.determinism import ordered
from quantizers.device.devices import choose_device
from quantizers.formats.stored_matrices import architecture_of
from quantizers.formats.unsupported import refuse_swapped_arguments, refuse_unsupported
from quantizers.hooks import required
from quantizers.output.manifest import output_facts, read_record, refuse_incomplete
from quantizers.pipeline.consumers import Findings, folder_findings
from quantizers.pipeline.report_files import Record, check_manifest
from quantizers.recipe.portable import is_hub_id
from quantizers.stitch.audit.checkpoint import Audit
from quantizers.stitch.audit.checkpoint import verify as audit_of
from quantizers.system.errors import ArchitectureError, CheckpointError, DamagedRecord, InputError
from quantizers.system.output_files import FACTS, REPORT
from quantizers.system.progress import progress
from quantizers.system.shipped import shipped_model

from . import options as opt

VERIFIED = (None, "compressed-tensors", "fp8")  # quant_method of what the audit reads


@dataclass(frozen=True)
class Verification:
    """The result of `verify`.

    Attributes:
        audit: the files compared with the source.
        record: the files compared with report.json, and report.json with its checksum.
        consumers: how serving engines would read it; None if the folder cannot be opened, which the audit reports.
        vllm: the answers of an installed vLLM, see `quantizers.serving.ask_vllm`; None if it was not asked.
    """

    audit: Audit
    record: Record
    consumers: Findings | None
    vllm: dict[str, Any] | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing differs, and every serving engine would read it as it is stored."""
        return not (self.differences or self.misread or (self.vllm and self.vllm["differences"]))

    @property
    def differences(self) -> list[str]:
        """Faults of the files, one line each."""
        return [*self.audit.differences, *self.record.differences]

    @property
    def misread(self) -> list[str]:
        """Findings on data that serving engines would read differently from how it is stored, one line each."""
        return [str(finding) for finding in self.consumers.errors] if self.consumers else []

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `quantize verify --json` prints, a VerifyReport."""
        result = self.audit.as_dict() | {"differences": self.differences, "notes": list(self.record.notes)}
        if self.consumers is not None:
            findings = [finding.as_dict() | {"places": list(finding.places)} for finding in self.consumers.findings]
            result["consumers"] = self.consumers.as_dict() | {"findings": findings}
        return result | ({"vllm": self.vllm} if self.vllm else {})


@opt.documented
def verify(
    folder: Annotated[
        str | Path,
        opt.Argument("a finished checkpoint", "CANDIDATE", is_path=True),
        "a finished checkpoint of compressed-tensors' formats, made by this program or another",
    ],
    source: opt.SourceModel = None,
    *,
    revision: Annotated[
        str | None, opt.Option("revision of the source on the Hub; the one in report.json by default")
    ] = None,
    with_vllm: Annotated[bool, opt.Option("also ask the installed vLLM for the scheme of every layer")] = False,
    facts: Annotated[opt.Facts, "the user's own architecture spec, instead of one that the folder carries"] = None,
    stream: opt.Stream = False,
    device: opt.Device = "auto",
) -> Verification:
    """Compare a finished checkpoint with its source, with its own report, and with the rules of serving engines.

    Raises:
        InputError: the folder or the source cannot be opened, or the source is unknown.
        DamagedRecord: report.json, which would name the source, cannot be read.
    """
    ask_server = required("ask_server", "--with-vllm") if with_vllm else None
    folder, own = Path(folder), Path(facts) if facts is not None else None
    refuse_incomplete(folder)
    if source is not None:
        refuse_incomplete(Path(source))
    opened = source_of(folder, str(source) if source is not None else None, revision, stream=stream)
    if revision is not None and Path(opened.name).is_dir():
        raise InputError(f"--revision {revision}", f"{opened.name} is a folder, which has none", "leave it out")
    with ordered():
        verification = verify_folder(folder, opened, choose_device(device), own)
    if ask_server is None:
        return verification
    own = own or output_facts(folder)
    architecture = architecture_of(opened, own)
    return replace(verification, vllm=ask_server(folder, architecture))


def verify_folder(folder: Path, source: Checkpoint, device: torch.device, own: Own = None) -> Verification:
    """As `verify`, with the source opened, and perhaps the user's `own` facts instead of those that the folder carries.

    Raises:
        CheckpointError: the folder's format is not read here, or the source is broken, or was made from the folder.
        ArchitectureError: there are no facts for the source. A fault in facts that the folder carries is a difference.
    """
    _refuse(folder, source)
    record, where = check_manifest(folder), str(source.folder / CONFIG)
    probed = read_record(folder).get("architecture")  # what probing found when the folder was written
    recorded = probed if isinstance(probed, dict) else None
    carried = output_facts(folder) if own is None and recorded is None else None  # what was derived is derived again
    if carried is not None:
        try:
            architecture_for(source.config, where, carried)
        except ArchitectureError as failure:
            told = any(line.startswith(f"{FACTS}:") for line in record.differences)
            fault = str(failure).replace(f"{folder}/", "")
            return Verification(Audit(differences=[] if told else [fault]), record, None)
        own, record = carried, replace(record, notes=(*record.notes, f"read with the facts that it carries, {FACTS}"))
    facts = architecture_of(source, own)
    _refuse_another_model(folder, source, facts)
    with progress("verifying", facts.num_layers) as step:
        audit = audit_of(folder, source, device, step=step, own=facts)
    if recorded is not None:  # but for the probes' numbers
        now = json.loads(json.dumps(facts.found()))
        keys = [key for key in now if key != "probes" and now[key] != recorded.get(key)]
        lines = [f"{REPORT}: architecture.{key} is {recorded.get(key)}, probing now finds {now[key]}" for key in keys]
        record = replace(record, differences=(*record.differences, *lines))
    return Verification(audit, record, folder_findings(folder, facts))


def _refuse(folder: Path, source: Checkpoint) -> None:
    """Refuse a folder of a format that is not read here, and one from which the source was made."""
    try:
        config = read_config(folder)
    except CheckpointError:
        return  # which the audit reports
    refuse_unsupported(config, str(folder / CONFIG))
    section = config.get("quantization_config")
    method = section.get("quant_method") if isinstance(section, dict) else None
    if method not in VERIFIED:
        raise CheckpointError(
            folder / CONFIG,
            f"quantization_config.quant_method is {method!r}; `verify` checks compressed-tensors checkpoints, such as "
            "those of `quantize run` and `quantize stitch`",
            f"measure this one with `quantize eval {source.name} {folder} --data held-out`",
        )
    candidate = Checkpoint(folder, str(folder), config, {})
    refuse_swapped_arguments(source, candidate, f"quantize verify {source.name} --source {folder}")


def _refuse_another_model(folder: Path, source: Checkpoint, facts: Architecture) -> None:
    """Refuse a source of other sizes, unless report.json names it: then the folder's config.json is damaged."""
    try:
        config = read_config(folder)
    except CheckpointError:
        return  # which the audit reports
    if not facts.is_of(config) and not is_source(read_record(folder).get("source"), source, source.name):
        raise CheckpointError(folder / CONFIG, f"is another model than {source.name}", "give its own source")


def source_of(folder: Path, given: str | None, revision: str | None, *, stream: bool = False) -> Checkpoint:
    """The source of a finished checkpoint: the folder or Hub id given, or the Hub id or shipped model that its
    report.json names, at the `revision` given, or the report's.

    Raises:
        InputError: the report names a folder and no shipped model has that name, or there is no report.
        DamagedRecord: the report cannot be read.
        CheckpointError: the source cannot be opened.
    """
    refuse_gguf(str(folder))
    if not folder.is_dir():
        raise CheckpointError(folder, "no such folder", "give a finished checkpoint")
    model, made_at = "", "main"
    try:
        source = read_json(folder / REPORT)["source"]
        model, made_at = str(source["model"]), str(source["revision"] or "main")
    except (CheckpointError, KeyError, TypeError) as failure:
        if given is None:
            damaged = check_manifest(folder).differences
            if damaged:
                raise DamagedRecord("", damaged[0], "with --source the rest can be verified") from None
            raise InputError(
                folder, f"has no {REPORT} that names its source", "say where that is with --source"
            ) from failure
    if given is not None or is_hub_id(model):
        return open_checkpoint(model if given is None else given, revision or made_at, stream=stream)
    if kept := shipped_model(model):
        return open_checkpoint(str(kept), stream=stream)
    raise InputError(folder, f"was made from a folder called {model}", "say where that is with --source")
