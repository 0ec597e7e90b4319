"""A recipe becomes a finished checkpoint: `quantizers.run`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quantizers.device.determinism import ordered
from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from quantizers.output import journal
from quantizers.pipeline.publication import Destination, refuse_early
from quantizers.planning.job import Job, prepare
from quantizers.recipe.portable import is_hub_id, source_name
from quantizers.recipe.read import changes_of, find_recipe
from quantizers.system.errors import InputError
from quantizers.system.output_files import RECIPE, REPORT


@dataclass(frozen=True)
class FinishedCheckpoint:
    """A checkpoint that `run` or `stitch` finished, with its report.

    Attributes:
        folder: with the shards, config.json, report.json, report.html and the model card README.md.
        report: the contents of report.json, a RunReport, a MeasuredRunReport if held-out texts were measured, or a
            StitchReport; empty in ranks except 0.
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


def run(
    recipe: str | Path,
    output: str | Path | None = None,
    *,
    source: str | Path | None = None,
    calibration: str | Path | None = None,
    without: Sequence[str] = (),
    settings: Mapping[str, Any] | Sequence[str] = (),
    device: str = "auto",
    device_memory: int | None = None,
    fresh: bool = False,
    paranoid: bool = False,
    states: Literal["auto", "memory", "files"] = "auto",
    ignore_stop: bool = False,
    ignore_source_check: bool = False,
    with_data: bool = False,
    imatrix: bool = False,
    stream: bool = False,
    window: int | None = None,
    publish_as_you_go: str | None = None,
    remove_uploaded: bool = False,
    private: bool = False,
    command: Sequence[str] = (),
    dist: ProcessGroup = SINGLE_PROCESS,
) -> FinishedCheckpoint:
    """Quantize a checkpoint, stitch it, verify and measure it. An interrupted run resumes when it is called again.

    Progress is printed on standard error. Ctrl-C and SIGTERM end it between two steps.

    Args:
        recipe: a recipe file, the name of a shipped recipe, or the Hub id of a model that has one.
        output: folder for the finished checkpoint: new, empty, or an unfinished run; out/<name of the recipe> by
            default.
        source: local folder of the source model, instead of the recipe's.
        calibration: calibration set instead of the recipe's: a file, or the name of a shipped set.
        without: sources of the calibration set to leave out; samples of the same category take their place.
        settings: keys of the recipe to override, such as `{"experts.group_size": 64}`; None removes a key.
        device: cpu, cuda, cuda:N, or auto (the first GPU if there is one).
        device_memory: bytes of the device's memory to use at most; the output is the same.
        fresh: discard an earlier run in `output`, without asking.
        paranoid: hash the source's shards, and check them again on resume.
        states: where calibration activations are kept; auto: on the device or in memory if they fit, else in files.
        ignore_stop: continue after a layer whose figures are beyond the recipe's `verify.stop`.
        ignore_source_check: quantize a source that makes no sense of text, such as random weights; see the recipe's
            `verify.perplexity.max_source`.
        with_data: copy the sets' local data files into the output, for publishing.
        imatrix: also write OUTPUT.imatrix.gguf, the source's importance matrix for llama.cpp, as `quantizers.imatrix`.
        stream: leave the source on the Hub: its shards are fetched ahead of the layers that need them, and removed.
        window: with `stream`, bytes of the source that lie on the disk at most; 40 GB, or what is needed, by default.
        publish_as_you_go: owner/name of a repository on the Hub, to which finished shards are uploaded during the run,
            and the rest once all gates have passed. It is private until then; one that exists must be private and
            empty, and stays private.
        remove_uploaded: remove shards here once they are there.
        private: leave the repository private.
        command: what the user typed, named where the run is found unfinished.
        dist: the processes that share the run; each of them calls this.

    Returns:
        The checkpoint. Gates that failed do not raise: see `passed`.

    Raises:
        InputError: something that was given is wrong; the message names file, line or key, and the remedy.
        Stopped: the recipe's `verify.stop` ended the run after a layer.
        QuantizeError: the run failed; what was finished stays on disk.
        Interrupted: by a signal; the same.
    """
    if window is not None and not stream:
        raise InputError("--window is that of --stream; give both, or leave it out")
    if stream and source is not None:
        raise InputError(f"--source {source}: a folder is read where it lies; leave --stream out")
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
                    f"{job.path}: --fresh would discard it with the rest of {folder}; give --output another folder"
                )
            journal.discard(folder)
        return job

    job = dist.in_turn(begin)
    if output is None and dist.is_main:
        print_default(folder)
    from quantizers.device.devices import choose_device, use_threads  # which take seconds, as what refuses does not
    from quantizers.pipeline.pipeline import Options
    from quantizers.pipeline.pipeline import run as run_job

    use_threads(job.facts, dist.broadcast_object(journal.begun_with(work).get("threads")), dist)
    options = Options(
        folder,
        choose_device(device, dist),
        device_memory,
        paranoid,
        with_data,
        states,
        ignore_stop,
        ignore_source_check,
        dist,
        tuple(command),
        imatrix,
        window,
        destination,
    )
    with ordered():
        return FinishedCheckpoint(folder, run_job(job, options), job.location)


def destination_of(repo: str | None, *, remove: bool = False, private: bool = False) -> Destination | None:
    """Where a run publishes as it goes; None if it does not.

    Raises InputError: `repo` is not owner/name, or one of the other two is given without it.
    """
    if (remove or private) and repo is None:
        given = "--remove-uploaded" if remove else "--private"
        raise InputError(f"{given} is that of --publish-as-you-go; give both, or leave it out")
    if repo is not None and not is_hub_id(repo):
        raise InputError(f"--publish-as-you-go {repo}: write it as owner/name")
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
            f"{recipe}: the current folder is inside this finished checkpoint; give --output a folder outside of it"
        )
    return Path("out") / f"{Path(source_name(str(folder), folder)).name}-again"
