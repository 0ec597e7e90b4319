"""A recipe becomes a finished checkpoint: `quantizers.run`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from quantizers.device.determinism import ordered
from quantizers.distributed.process_group import SINGLE_PROCESS
from quantizers.output import journal
from quantizers.pipeline.publication import Destination, refuse_early
from quantizers.planning.job import Job, prepare
from quantizers.recipe.portable import is_hub_id, source_name
from quantizers.recipe.read import changes_of, find_recipe
from quantizers.system.errors import InputError
from quantizers.system.extras import lacking
from quantizers.system.output_files import RECIPE, REPORT

from . import options as opt


@dataclass(frozen=True)
class FinishedCheckpoint:
    """A checkpoint that `run` or `stitch` finished, with its report.

    Attributes:
        folder: with the shards, config.json, report.json, report.html and the model card README.md.
        report: the contents of report.json, a RunReport, a MeasuredRunReport if held-out texts were measured, a
            ConversionReport of a recipe that converts, or a StitchReport; empty in ranks except 0.
        source: the source's folder on this machine, or its Hub id.
    """

    folder: Path
    report: dict[str, Any]
    source: str

    @property
    def passed(self) -> bool:
        """Whether every gate passed."""
        return all(gate["passed"] for gate in self.report.get("gates", ()))

    @property
    def kl(self) -> float | None:
        """Mean KL(source || output) on the held-out texts, in nats; None if it was not measured."""
        return self.report["kl"]["mean"] if "kl" in self.report else None

    @property
    def perplexity(self) -> float | None:
        """Perplexity of the output on the held-out texts; None if it was not measured."""
        return self.report["perplexity"]["candidate"] if "perplexity" in self.report else None


@opt.documented
def run(
    recipe: opt.Recipe,
    output: Annotated[
        str | Path | None,
        opt.Option(
            "folder for the finished checkpoint, new, empty, or an unfinished run; out/<name of RECIPE> by default",
            names=opt.OUTPUT,
            is_path=True,
        ),
    ] = None,
    *,
    source: opt.Source = None,
    calibration: opt.Calibration = None,
    without: opt.Without = (),
    settings: opt.Settings = (),
    device: opt.Device = "auto",
    fresh: Annotated[
        bool,
        opt.Option("discard an earlier run in the output folder, after asking"),
        "discard an earlier run in `output`, without asking",
    ] = False,
    device_memory: opt.DeviceMemory = None,
    paranoid: Annotated[bool, opt.Option("hash the source's shards, and check them again on resume")] = False,
    states: Annotated[
        Literal["auto", "memory", "files"],
        opt.Option("keep calibration activations in memory, in files, or in memory if they fit"),
        "where calibration activations are kept; auto: on the device or in memory if they fit, else in files",
    ] = "auto",
    ignore_stop: Annotated[bool, opt.Option("ignore the recipe's verify.stop and continue")] = False,
    ignore_source_check: Annotated[
        bool,
        opt.Option("quantize a source that makes no sense of text (random weights)"),
        "quantize a source that makes no sense of text, such as random weights; see the recipe's "
        "`verify.perplexity.max_source`",
    ] = False,
    with_data: Annotated[bool, opt.Option("copy the sets' local data files into the output, for publishing")] = False,
    imatrix: Annotated[
        bool,
        opt.Option("also write OUTPUT.imatrix.gguf, an importance matrix for llama.cpp"),
        "also write OUTPUT.imatrix.gguf, the source's importance matrix for llama.cpp, as `quantizers.imatrix`",
    ] = False,
    stream: opt.StreamSource = False,
    window: Annotated[
        int | None,
        opt.Option("with --stream: the source's part on the disk; 40GB, or what is needed, by default", "SIZE"),
        "with `stream`, bytes of the source that lie on the disk at most; 40 GB, or what is needed, by default",
    ] = None,
    publish_as_you_go: opt.PublishAsYouGo = None,
    remove_uploaded: opt.RemoveUploaded = False,
    private: Annotated[bool, opt.Option("with --publish-as-you-go: leave the repository private at the end")] = False,
    command: opt.Command = (),
    dist: opt.Dist = SINGLE_PROCESS,
) -> FinishedCheckpoint:
    """Quantize a checkpoint, stitch it, verify and measure it. An interrupted run resumes when it is called again.

    Progress is printed on standard error. Ctrl-C and SIGTERM end it between two steps.

    Returns:
        The checkpoint. Gates that failed do not raise: see `passed`.

    Raises:
        InputError: something that was given is wrong; the message names file, line or key, and the remedy.
        Stopped: the recipe's `verify.stop` ended the run after a layer.
        QuantizeError: the run failed; what was finished stays on disk.
        Interrupted: by a signal; the same.
    """
    if window is not None and not stream:
        raise InputError("", "--window is that of --stream", "give both, or leave it out")
    if stream and source is not None:
        raise InputError(f"--source {source}", "a folder is read where it lies", "leave --stream out")
    if imatrix and (lack := lacking("gguf")):
        raise InputError("--imatrix", *lack)
    destination = destination_of(publish_as_you_go, remove=remove_uploaded, private=private)
    changes = changes_of(settings, calibration, without)
    path = find_recipe(str(recipe))
    folder = default_output(path) if output is None else Path(output)

    work = journal.work_folder(folder)
    commits = dist.broadcast_object({} if fresh else journal.begun_with(work, part="commits"))

    def begin() -> Job:
        """Everything that may refuse or download; rank 0 does it first."""
        if dist.is_main:
            journal.refuse_second_run(folder)
            refuse_early(destination, folder, fresh=fresh)
        job = prepare(
            str(recipe),
            source_folder=Path(source) if source is not None else None,
            changes=changes,
            sets_first=dist.is_main,
            stream=stream,
            commits=commits,
        )
        if fresh and dist.is_main:
            if Path(os.path.abspath(job.path)).parent.resolve() == folder.resolve():
                raise InputError(
                    job.path, f"--fresh would discard it with the rest of {folder}", "give --output another folder"
                )
            journal.discard(folder)
        return job

    job = dist.in_turn(begin)
    if output is None and dist.is_main:
        print_default(folder)
    from quantizers.device.devices import choose_device, use_threads  # which take seconds, as what refuses does not
    from quantizers.pipeline.options import Options
    from quantizers.pipeline.pipeline import run as run_job

    use_threads(job.facts, dist.broadcast_object(journal.begun_with(work).get("threads")), dist)
    options = Options(
        output=folder,
        device=choose_device(device, dist),
        device_memory=device_memory,
        paranoid=paranoid,
        with_data=with_data,
        states=states,
        ignore_stop=ignore_stop,
        ignore_source_check=ignore_source_check,
        dist=dist,
        command=tuple(command),
        imatrix=imatrix,
        window=window,
        destination=destination,
    )
    with ordered():
        return FinishedCheckpoint(folder, run_job(job, options), job.location)


def destination_of(repo: str | None, *, remove: bool = False, private: bool = False) -> Destination | None:
    """Return the destination of a run that publishes as it goes; None if it does not.

    Raises InputError: `repo` is not owner/name, or one of the other two is given without it.
    """
    if (remove or private) and repo is None:
        given = "--remove-uploaded" if remove else "--private"
        raise InputError("", f"{given} is that of --publish-as-you-go", "give both, or leave it out")
    if repo is not None and not is_hub_id(repo):
        raise InputError(f"--publish-as-you-go {repo}", "write it as owner/name")
    return Destination(repo, remove, private) if repo is not None else None


def print_default(output: Path) -> None:
    """Say on standard error which folder is written where none was given."""
    print(f"output: {output} (another with --output)", file=sys.stderr, flush=True)


def default_output(recipe: Path) -> Path:
    """The folder of a run without an output: out, and its recipe's name.

    The recipe of a finished checkpoint is always called recipe.yaml, so its run is called after the checkpoint's
    folder: NAME-again.

    Raises:
        InputError: the current folder is inside that checkpoint, where loaders would find the second one.
    """
    folder = Path(os.path.abspath(recipe)).parent  # of a link, as in the Hub's cache, and not of its target
    if recipe.name != RECIPE or not (folder / REPORT).is_file():
        return Path("out") / recipe.stem
    if Path.cwd().resolve().is_relative_to(folder.resolve()):
        raise InputError(
            recipe, "the current folder is inside this finished checkpoint", "give --output a folder outside of it"
        )
    return Path("out") / f"{Path(source_name(str(folder), folder)).name}-again"
