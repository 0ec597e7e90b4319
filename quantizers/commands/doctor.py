"""Checks of this machine, and of a recipe on it, before anything long begins: `quantizers.doctor`.

Everything is asked of the functions that a run asks, and what they raise becomes a row. Nothing stays on the disk.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, TypeVar

from huggingface_hub import HfApi, constants, get_session, get_token
from huggingface_hub.utils import build_hf_headers
from packaging.requirements import Requirement

from quantizers.architectures.families import published_config
from quantizers.architectures.whole_class import NEWEST
from quantizers.calibration.hub import Hub
from quantizers.calibration.load_set import load_set, look_at_sources
from quantizers.calibration.render import load_tokenizer
from quantizers.calibration.samples import CalibrationData
from quantizers.calibration.set import read_set
from quantizers.checkpoint.reader import side_files
from quantizers.checkpoint.window import DEFAULT, schedule
from quantizers.eval.coverage.summary import check_floors
from quantizers.hooks import hooks
from quantizers.output import journal
from quantizers.output.uploads import may_write, require_token
from quantizers.pipeline.consumers import plan_findings
from quantizers.pipeline.publication import Destination, refuse_early
from quantizers.planning.estimate import calibration_lengths, estimate_run, evaluation_lengths, ways_of_source
from quantizers.planning.job import Job, cached_folder, given_folder, parts_of_run, prepare, sets_of
from quantizers.planning.plan import summary
from quantizers.recipe.gpu_names import gpus_named
from quantizers.recipe.portable import is_hub_id
from quantizers.recipe.read import Change, changes_of, read_recipe, set_file, source_location
from quantizers.recipe.schema import Recipe
from quantizers.system.caches import downloads_are_lost
from quantizers.system.cores import limits as core_limits
from quantizers.system.cores import threads_asked
from quantizers.system.errors import InputError, Interrupted, QuantizeError, first_line
from quantizers.system.extras import EXTRAS
from quantizers.system.files import nearest_existing
from quantizers.system.formatting import gib, short_path, size
from quantizers.system.host_memory import available
from quantizers.system.host_memory import limits as memory_limits
from quantizers.system.hub_client import LOGIN, hub_errors, reason_of
from quantizers.system.progress import duration
from quantizers.system.version import __version__

from . import options as opt
from .run import default_output, destination_of

if TYPE_CHECKING:
    import torch

PROGRAM = "moe-quantizers"
NAMED = ("transformers", "compressed-tensors", "llmcompressor")  # libraries whose versions are shown
PATIENCE = 5.0  # seconds to wait for an answer of the Hub
WAITING = 20.0  # seconds that a source of a calibration set may ask to wait
DAY = 86_400  # seconds
DONE = "finished before: it would only say so"
USUAL = {(4, 32, True)}  # the integers for which kernels are compared without a recipe: bits, group size, signed
_UP = re.compile(r"[\w.-]+/\.\./")  # in a path, and leads back
Found = TypeVar("Found")
Given = ParamSpec("Given")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        what: its name.
        found: what was found.
        state: `note` for what no run ends by, `stops` for what would end it.
        remedy: one line; empty if the state is ok.
    """

    what: str
    found: str
    state: Literal["ok", "note", "stops"] = "ok"
    remedy: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The result of `doctor`.

    Attributes:
        recipe: as it was given; None without one.
        output: the folder that a run would write.
        checks: all that was looked at: the machine, the Hub, servers, then the recipe.
    """

    recipe: str | None
    output: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing would stop the recipe here; without one, whether the program can work at all."""
        return all(check.state != "stops" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `quantize doctor --json` prints."""
        checks = [{key: value for key, value in asdict(check).items() if value} for check in self.checks]
        return {"recipe": self.recipe, "output": self.output, "passed": self.passed, "checks": checks}


class _Rows(list[Check]):
    """Checks, in the order in which they are made."""

    def add(self, what: str, found: str, remedy: str = "", *, stops: bool = False) -> None:
        """A row; it is ok if it needs no remedy."""
        self.append(Check(what, found, ("stops" if stops else "note") if remedy else "ok", remedy))

    def tried(
        self, what: str, work: Callable[Given, Found], *args: Given.args, **options: Given.kwargs
    ) -> Found | None:
        """`work(…)`; None if it raises what a run would end with: a row for each line of the message."""
        try:
            return work(*args, **options)
        except Interrupted:
            raise
        except OSError as failure:
            problem = f"{failure.filename or what}: {failure.strerror or failure}"
            self.add(what, problem, "choose another place, or allow it", stops=True)
        except QuantizeError as failure:
            for error in failure.errors:
                self.add(what, _short(error.without_remedy), _short(error.remedy) or "correct it", stops=True)
        except Exception as failure:  # of a library, or a mistake here: the rest is still looked at
            problem, remedy = f"{type(failure).__name__}: {first_line(failure)}", "report this, with what was given"
            self.add(what, problem, remedy, stops=True)
        return None


@dataclass(frozen=True)
class _Given:
    """Inputs that a run would be given."""

    recipe: Recipe
    path: Path
    folder: Path  # of the output
    location: str  # of the source, a folder or Hub id; empty if there is none
    here: Path | None  # the source's folder on this machine; None if a run would download it
    changes: tuple[Change, ...]
    device_memory: int | None  # bytes of the device's memory that may be used; None for what is free
    stream: bool  # whether the source stays on the Hub
    destination: Destination | None  # where the output is published as it is made


@opt.documented
def doctor(
    recipe: Annotated[
        str | Path | None,
        opt.Argument("a recipe file, the name of a shipped recipe, or a Hub id that has one", "[RECIPE]"),
    ] = None,
    *,
    output: Annotated[
        str | Path | None, opt.Option("folder that a run would write; out/NAME by default", "DIR", opt.OUTPUT)
    ] = None,
    source: opt.Source = None,
    calibration: opt.Calibration = None,
    without: opt.Without = (),
    settings: opt.Settings = (),
    device: opt.Device = "auto",
    device_memory: opt.DeviceMemory = None,
    stream: opt.StreamSource = False,
    publish_as_you_go: opt.PublishAsYouGo = None,
    remove_uploaded: opt.RemoveUploaded = False,
) -> Diagnosis:
    """Say what this machine can do, and what would stop a recipe here. Takes seconds, and writes nothing that stays.

    Raises:
        InputError: settings that are no `key=value`, or options of which one needs another.
    """
    changes = changes_of(settings, calibration, without)
    of_a_recipe = {"--source": source, "--device-memory": device_memory, "--stream": stream or None}
    unused = [change.shown for change in changes] + [name for name, value in of_a_recipe.items() if value is not None]
    if recipe is None and unused:
        raise InputError(unused[0], "is for a recipe", "give one, or leave it out")
    if stream and source is not None:
        raise InputError(f"--source {source}", "a folder is read where it lies", "leave --stream out")
    destination = destination_of(publish_as_you_go, remove=remove_uploaded)
    machine = _Rows()
    hub = _Rows()
    of_recipe = _Rows()
    unreachable, chosen = _ask_hub(hub), _versions(machine, device)
    folder = Path(output or "out")
    given = None
    job = None
    read = None if recipe is None else of_recipe.tried("recipe", read_recipe, str(recipe), changes)
    if read is not None:
        of_recipe.add("recipe", shown(read[1]))
        folder = Path(output) if output else of_recipe.tried("output", default_output, read[1]) or folder
        location, here = of_recipe.tried("source", _source, *read, source) or ("", None)
        if stream and Path(location).is_dir():
            problem = f"{shown(location)}: is a folder, which is read where it lies"
            of_recipe.add("source", problem, "leave --stream out", stops=True)
        given = _Given(*read, folder, location, here, changes, device_memory, stream and not here, destination)
        job = _look_at_recipe(of_recipe, given, chosen, unreachable) if chosen else None
    if chosen is not None:
        machine.tried("devices", _devices, machine, chosen, job.integers if job else USUAL)
    _memory(machine)
    _folder(machine, "output", folder, "give --output in a folder that can be written", stops=True)
    fetched = given is not None and not (given.here or given.stream) and is_hub_id(given.location)
    remedy = "set HF_HOME to a folder with room that can be written"
    if downloads_are_lost():
        machine.add("Hub's cache", "no home folder: nothing that is downloaded is kept", remedy, stops=fetched)
    else:
        _folder(machine, "Hub's cache", constants.HF_HUB_CACHE, remedy, stops=fetched)
    if temporary := machine.tried("temporary", tempfile.gettempdir):
        _folder(machine, "temporary", temporary, "set TMPDIR to a folder with room", stops=True)
    for look_at_machine in hooks("look_at_machine"):
        look_at_machine(hub)
    return Diagnosis(None if recipe is None else str(recipe), str(folder), (*machine, *hub, *of_recipe))


# The machine --------------------------------------------------------------------------------------------------------


def _versions(rows: _Rows, asked: str) -> torch.device | None:
    """Versions against the ranges that the program states; the device of a run, None if torch cannot be used."""
    faults = _Rows()
    shown: dict[str, str] = {}
    requires: list[str] = []
    rows.add("program", f"quantize {__version__}, Python {platform.python_version()}")
    try:
        requires = metadata.requires(PROGRAM) or []
    except metadata.PackageNotFoundError:
        faults.add("program", f"{PROGRAM} is not installed", "`pip install .` in its clone", stops=True)
    # A package of several extras is listed for each of them.
    for needed in {requirement.name: requirement for requirement in map(Requirement, requires)}.values():
        optional = needed.marker is not None and not needed.marker.evaluate({"extra": ""})
        if optional and needed.name not in EXTRAS:
            continue
        tried = needed.specifier & (f"<={NEWEST}" if needed.name == "transformers" else "")
        remedy = f"`pip install '{needed.name}{tried}'`"
        try:
            shown[needed.name] = installed = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            if not optional:
                faults.add(needed.name, "is not installed", remedy, stops=True)
            continue
        if not tried.contains(installed, prereleases=True):
            faults.add(needed.name, f"{installed}, tested with {tried}", remedy)
    device = None
    try:
        import torch
    except Exception as failure:  # a driver's or another library's
        faults.add("torch", f"cannot be imported ({first_line(failure)})", "install it again", stops=True)
    else:
        from quantizers.device.devices import choose_device

        built = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        rows.add("torch", f"{torch.__version__}, {built if torch.version.hip or torch.version.cuda else 'CPU build'}")
        device = faults.tried("device", choose_device, asked) or torch.device("cpu")
    rows.add("libraries", ", ".join(f"{name} {shown[name]}" for name in NAMED if name in shown))
    rows += faults
    return device


def _devices(rows: _Rows, device: torch.device, integers: set[tuple[int, int, bool]]) -> None:
    """The CPU and every GPU, and the kernels compared with torch's operations as a run does at its start."""
    import torch

    from quantizers.device.devices import device_problem, gpus
    from quantizers.device.triton_support import can_launch, why_not
    from quantizers.solve.kernel_check import KERNELS, problem_of

    counts = core_limits()
    least = min(counts, key=lambda limit: limit.most)
    by = f" of {counts[0].most} ({least.place})" if least.place else ""
    rows.add("CPU", f"{least.most} cores{by}, {torch.backends.cpu.get_cpu_capability()}")
    rows.tried("threads", threads_asked)
    entries = gpus()
    for entry in entries:
        free = torch.cuda.mem_get_info(torch.device(entry["device"]))[0]
        rows.add(entry["device"], f"{entry['name']}, {gib(entry['bytes'])}, {gib(free)} of it free")
    if not entries:
        problem, remedies = device_problem("cuda") or ("none", [])
        rows.add("GPU", problem, "; ".join([*remedies[:1], "on a CPU only small models are practical"]))
    for target in [torch.device(entry["device"]) for entry in entries] or [device]:
        if can_launch(target):
            faults = {kernel: fault for kernel in KERNELS if (fault := problem_of(kernel, target, integers))}
            problems = "; ".join(f"{kernel} {fault}" for kernel, fault in faults.items())
            more = "torch's own operations do its work, more slowly; please report this" if faults else ""
            same = f"{len(KERNELS)} of {len(KERNELS)} give the bits of torch's"
            rows.add(f"kernels {target}", problems or same, more)
        elif target.type == "cuda":
            reason = f"torch's own operations ({why_not(target)})"
            rows.add(f"kernels {target}", reason, "slower, with the same results")


def _memory(rows: _Rows) -> None:
    """The memory that a run may use, and the file of each limit that makes it less than the machine's."""
    limits = memory_limits()
    most, left = min(limits, key=lambda limit: limit.most), min(limits, key=lambda limit: limit.left)
    by = f" of the machine's {gib(limits[0].most)} ({most.place})" if most.place else ""
    free_by = f" ({left.place})" if left.place not in ("", most.place) else ""
    rows.add("memory", f"{gib(most.most)}{by}, {gib(max(0, left.left))} of it free{free_by}")


def _folder(rows: _Rows, what: str, path: str | Path, remedy: str, *, stops: bool) -> None:
    """Whether a folder, or the nearest one above it that exists, can be written, and its room."""
    place = nearest_existing(Path(path))
    try:
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(b"0")
            probe.flush()
        rows.add(what, f"{shown(path)}: {size(shutil.disk_usage(place).free)} free")
    except OSError as failure:
        rows.add(what, f"{shown(path)}: cannot be written ({failure.strerror})", remedy, stops=stops)


def _short(text: str) -> str:
    """A text in which paths are relative to the current folder."""
    return _UP.sub("", text).replace(f"{Path.cwd()}{os.sep}", "")


def shown(path: str | Path) -> str:
    """A path, relative to the current folder if it is in it."""
    short = short_path(os.path.abspath(path))
    return os.path.abspath(path) if short.startswith("..") else short


# The Hub, and servers -----------------------------------------------------------------------------------------------


def _bounded(work: Callable[[], Found]) -> Found:
    """The result of a request, in a thread that is left alone after PATIENCE: looking up a name has no time limit."""
    future = Future[Found]()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as failure:
            future.set_exception(failure)

    Thread(target=run, daemon=True).start()
    try:
        return future.result(PATIENCE)
    except TimeoutError:
        raise TimeoutError(f"no answer in {PATIENCE:g} s") from None


def _ask_hub(rows: _Rows) -> str:
    """Rows for the Hub and its token, by one request; why the Hub cannot be asked, empty if it can."""
    variables = (name for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") if os.environ.get(name))
    place = next(variables, shown(constants.HF_TOKEN_PATH))
    token = None
    fault = ""
    try:
        token = get_token()
        if token is not None:
            require_token()
    except (QuantizeError, OSError) as failure:
        token, fault = None, failure.problem if isinstance(failure, QuantizeError) else failure.strerror or str(failure)
    account: Mapping[str, Any] = {}
    refused, why = False, "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
    if why:
        rows.add("Hub", f"not asked: {why}", "unset HF_HUB_OFFLINE for downloads, and to publish")
    else:

        def request() -> Any:
            headers, url = build_hf_headers(token=token or False), f"{constants.ENDPOINT}/api/whoami-v2"
            return get_session().get(url, headers=headers, timeout=PATIENCE)

        try:
            answer = _bounded(request)
            refused = token is not None and answer.status_code in (401, 403)
            account = answer.json() if answer.status_code == 200 else {}
            why = f"answers {answer.status_code}" if answer.status_code >= 500 else ""
        except Exception as failure:  # of the network's many kinds, or of an answer that is no JSON
            why = reason_of(failure)
        remedy = "check the network, HTTPS_PROXY and HF_ENDPOINT; what lies on this machine needs no Hub"
        rows.add("Hub", f"{constants.ENDPOINT}: {why or 'answers'}", remedy if why else "")
    writes = bool(account) and may_write(account)
    answered = "the Hub refuses it" if refused else f"accepted, may {'write' if writes else 'only read'}"
    if fault or token:
        tried = bool(fault or refused or account)
        remedy = "" if writes else LOGIN if tried else "`hf auth whoami` asks the Hub"
        rows.add("token", f"{place}: {fault or (answered if tried else 'not tried')}", remedy)
    else:
        rows.add("token", "none", f"for gated models, and to publish: {LOGIN}")
    return why


# The recipe ---------------------------------------------------------------------------------------------------------


def _source(recipe: Recipe, path: Path, source: str | Path | None) -> tuple[str, Path | None]:
    """The source's location, and its folder on this machine if it is here as a whole."""
    location = source_location(recipe, path) if source is None else given_folder(Path(source))
    return location, Path(location) if os.path.isdir(location) else cached_folder(location, recipe.source.revision)


def _look_at_recipe(rows: _Rows, given: _Given, device: torch.device, unreachable: str) -> Job | None:
    """Rows for everything that would end a run early; the job, None if no plan can be made."""
    job = _job(rows, given, unreachable)
    sets = _sets(rows, given, job, unreachable)
    if job is None:
        return None
    rows.add("model", f"{job.facts.model_type}, {job.facts.num_layers} layers of {job.facts.num_experts} experts")
    rows.tried("model", plan_findings, job, one_expert=True)
    state = rows.tried("run", _output_state, given.folder, job, sets.get("calibration"), device)
    if state is not None:
        rows.add("run", state)
    if state != DONE:
        rows.tried("publication", refuse_early, given.destination, given.folder, fresh=False)
        output = job.allocation.most_bytes if job.allocation else int(str(summary(job.plan, job.facts)["output_bytes"]))
        temporary = 0, 0
        if len(sets) == len(sets_of(given.recipe)):
            temporary = rows.tried("memory", _memory_and_time, rows, given, job, output, sets, device) or temporary
        rows.tried("disk", _room, rows, given, job, output, *temporary)
    return job


def _job(rows: _Rows, given: _Given, unreachable: str) -> Job | None:
    """The plan, from the source's headers or, if it is not here, from what is kept of its architecture."""
    location = given.location
    recipe = given.recipe
    on_hub = None
    if given.here is not None:
        rows.add("source", shown(given.here))
    elif is_hub_id(location):
        if unreachable:
            remedy = f"`hf download {location}` where there is a network, then --source DIR"
            rows.add("source", f"{location}: not here, and no Hub to ask", remedy, stops=True)
        elif on_hub := rows.tried("source", _accessible, location, recipe.source.revision):
            rows.add("source", f"{location}: on the Hub, would be {'streamed' if given.stream else 'downloaded'}")
        if not on_hub and (recipe.source.facts or published_config(location) is None):
            return None
    return rows.tried("source", _planned, given) if location else None


def _accessible(model: str, revision: str) -> bool:
    """Raise a CheckpointError if the Hub does not give a model to this user."""
    with hub_errors(model, "its files", revision, begun=False):
        _bounded(lambda: HfApi().auth_check(model))
    return True


def _planned(given: _Given) -> Job:
    """The job of a run; what is read of a source on the Hub is in no cache afterwards."""
    path, here = str(given.path), given.here
    with tempfile.TemporaryDirectory() as cache:
        return prepare(path, not here, source_folder=here, changes=given.changes, any_sets=True, cache=Path(cache))


def _sets(rows: _Rows, given: _Given, job: Job | None, unreachable: str) -> dict[str, CalibrationData | None]:
    """Rows for the recipe's sets, and those that can be read; with their samples if source and data are here."""
    recipe = given.recipe
    trusted = recipe.source.trusts_tokenizer
    sets: dict[str, CalibrationData | None] = {}
    tokenizer = given.here and rows.tried("tokenizer", load_tokenizer, str(given.here), trust_remote_code=trusted)
    for what, (name, without) in zip(("calibration", "held-out"), sets_of(recipe).items(), strict=False):
        file = rows.tried(what, set_file, name, given.path)
        calibration = None if file is None else rows.tried(what, read_set, file)
        if file is None or calibration is None:
            continue
        on_hub = sum(not source.is_local for source in calibration.sources)
        sets[what] = None
        limits: dict[str, Any] = {}
        if what == "calibration":
            limits = {"tokens": recipe.calibration_tokens, "positions": job and job.facts.positions}
        if tokenizer and given.here and not on_hub:
            sets[what] = data = rows.tried(what, load_set, file, given.here, trusted, without=without, **limits)
            if data is not None:
                tokens = sum(len(sample.tokens) for sample in data.samples)
                rows.add(what, f"{file.name}: {len(data.samples):,} texts, {tokens:,} tokens")
            continue
        with Hub(WAITING, unreachable) as hub:
            left = rows.tried(what, look_at_sources, file, hub, without)
        if left is not None:
            out = f"; left out: {', '.join(left)}" if left else ""
            shown = f"{file.name}: {len(calibration.sources)} sources, {on_hub} of them on the Hub{out}"
            rows.add(what, shown, "other samples take their place" if left else "")
    data, rule = sets.get("calibration"), recipe.verify and recipe.verify.coverage
    if data and rule:
        categories = [sample.category for sample in data.samples]
        rows.tried("calibration", check_floors, rule, categories, str(given.path))
    return sets


def _output_state(folder: Path, job: Job, data: CalibrationData | None, device: torch.device) -> str:
    """Describe the output folder as a run would find it; raises the errors that a run would raise."""
    import torch

    from quantizers.device.devices import use_threads
    from quantizers.pipeline.fingerprint import deciding
    from quantizers.pipeline.finished import refuse_another

    journal.refuse_second_run(folder)
    finished = journal.finished_report(folder)
    if finished is not None:
        refuse_another(job, folder, finished)
        return DONE
    journal.refuse_strangers(folder)
    if not journal.unfinished(folder):
        return "would begin anew"
    work, known = journal.work_folder(folder), data is not None or job.recipe.experts.convert is not None
    if known and job.source is not None and not (work / "moving").exists():
        threads = torch.get_num_threads()
        try:
            use_threads(job.facts, journal.begun_with(work).get("threads"))
            journal.refuse_changes(work, deciding(job, data, device), folder)
        finally:
            torch.set_num_threads(threads)
    layers = job.facts.num_layers
    return f"unfinished: would resume after layer {len(journal.done_layers(work, layers))} of {layers}"


def _memory_and_time(
    rows: _Rows, given: _Given, job: Job, output: int, sets: Mapping[str, CalibrationData | None], device: torch.device
) -> tuple[int, int]:
    """Rows for memory and time; bytes of a run's temporary files, 0 until the sets are read, and those at most."""
    import torch

    from quantizers.budget.measure import probe_bytes
    from quantizers.device.devices import device_limit, forward_dtype
    from quantizers.pipeline.options import Options
    from quantizers.pipeline.placement import share_memory

    needs = estimate_run(job, output)
    free = available()
    on = "CPU" if device.type == "cpu" else "GPU"
    remedy = "" if needs.host <= free else "end other programs, or take a machine with more"
    rows.add("host memory", f"{gib(needs.host)} needed, estimated; {gib(free)} free", remedy, stops=True)
    names = [on] if on == "CPU" else [name.replace("-", " ") for name in gpus_named(torch.cuda.get_device_name(device))]
    for seconds in [seconds["all"] for rates, seconds in (needs.seconds or {}).items() if rates in names]:
        time = f"{seconds / DAY:,.0f} days" if seconds > 2 * DAY else duration(seconds)
        remedy = "`quantize plan` has the times on GPUs" if seconds > DAY else ""
        rows.add("time", f"about {time} on this {on}, estimated", remedy)
    if job.recipe.experts.convert is not None:
        return 0, 0
    lengths, texts = calibration_lengths(job)[0], evaluation_lengths(job)
    data, held_out = sets.get("calibration"), sets.get("held-out")
    if data:
        lengths = [len(sample.tokens) for sample in data.samples]
    if held_out:
        texts = [min(len(sample.tokens), job.facts.positions or len(sample.tokens)) for sample in held_out.samples]
    if lengths is None or texts is None:
        rows.add(f"{on} memory", "unknown before the sets are read", "`quantize calibration check` reads one")
        return 0, 0
    options = Options(given.folder, device, given.device_memory)
    kept = rows.tried(f"{on} memory", share_memory, job, lengths, texts, options)
    if kept is None:
        return 0, 0
    usable = given.device_memory or device_limit(device)
    rows.add(f"{on} memory", f"{gib(needs.memory[on][0])} needed; {gib(usable)} usable")
    probe = probe_bytes(job.facts, lengths, forward_dtype(device).itemsize) if job.allocation else 0
    most = kept[1] + probe
    return most if data and (held_out or not texts) else 0, most


def _room(rows: _Rows, given: _Given, job: Job, output: int, temporary: int, most: int) -> None:
    """Rows for the disk: the source's part on it, and what a run keeps, which may be on the same disk.

    Bytes of temporary files are those that are known, and at `most`.
    """
    cache = Path(constants.HF_HUB_CACHE)
    needed = output + temporary
    less: list[str] = []
    free, room = (shutil.disk_usage(nearest_existing(folder)).free for folder in (given.folder, cache))
    if given.destination and given.destination.remove:
        needed -= job.plan.removed_bytes(1)
    elif output > free:
        less = [f"give {'' if given.destination else '--publish-as-you-go and '}--remove-uploaded"]
    if given.here is not None:
        needed += sum(file.stat().st_size for file in side_files(given.here))
    elif given.stream:
        needed += schedule(job.source, parts_of_run(job)).window(None) if job.source else DEFAULT
    else:
        begun = (cache / f"models--{given.location.replace('/', '--')}" / "blobs").glob("*")
        download = sum(action.spec.bytes for action in job.plan.actions) - sum(file.stat().st_size for file in begun)
        window = ways_of_source(job, output)[1].source
        less = [f"give --stream{f', which keeps {size(window)} of the source here' if window else ''}", *less]
        remedy = f"set HF_HOME to a folder with room, or {less[0]}" if download > room else ""
        downloads = f"{size(max(download, 0))} to download into the Hub's cache; {size(room)} free"
        rows.add("disk", downloads, remedy, stops=True)
        if len({nearest_existing(folder).stat().st_dev for folder in (given.folder, cache)}) == 1:
            needed += max(download, 0)
    before = len(rows)
    rows.tried("disk", journal.check_room, journal.work_folder(given.folder), needed, less)
    if len(rows) == before:
        more = most - temporary if needed + most - temporary > free else 0
        needs = f"{size(needed)} needed in all{f', and at most {size(more)} of activations' * bool(more)}"
        remedy = "known once the sets are read; make room, or choose another --output" if more else ""
        rows.add("disk", f"{needs}; {size(free)} free", remedy)
