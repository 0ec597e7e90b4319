"""What a user is told in one line: each message is provoked as it would be typed, and its remedy is tried."""

from __future__ import annotations

import io
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Command, quantize
from conftest import Finished
from edited import edit
from runs import assert_same

from quantizers.checkpoint.reader import open_folder
from quantizers.device.devices import choose_device
from quantizers.output import journal
from quantizers.output.journal import refuse_changes
from quantizers.pipeline import layer_entry
from quantizers.system.errors import InputError, QuantizeError

Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def said(command: Command) -> Said:
    """`said(*words)`: exit code, standard output, and the last line of standard error."""

    def call(*words: object) -> tuple[int, str, str]:
        return command(*words), command.out, (command.err.splitlines() or [""])[-1]

    return call


@pytest.fixture(scope="module")
def typed(finished: Finished, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a run of four layers was typed that was cut off after its second; its output is `cut`."""
    folder, real = tmp_path_factory.mktemp("typed"), layer_entry.write_json

    def cut(path: Path, entry: Any) -> None:
        real(path, entry)
        if entry.get("layer") == 1:
            raise QuantizeError("", "cut here")

    with pytest.MonkeyPatch.context() as patched, (folder / "said").open("w") as said:
        patched.chdir(folder)
        patched.setattr("sys.stderr", said)
        patched.setattr(layer_entry, "write_json", cut)
        assert quantize(patched, "run", finished.recipe, "--fresh", "--yes", "cut", "--device", "cpu") == 1
    return folder


@pytest.fixture
def unfinished(typed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it in the current folder; `said` is what the run said."""
    shutil.copytree(typed, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Path("cut")


@pytest.mark.slow
def test_an_unfinished_folder_and_the_command_that_finishes_it(
    unfinished: Path, finished: Finished, said: Said, typed: Path, command: Command
) -> None:
    """Named by all commands that take a finished checkpoint; it gives the bytes of an unbroken run.

    The first line of a run has the report's counts.
    """
    again = f"quantize run {finished.recipe} {unfinished} --device cpu"
    line = f"quantize: cut: unfinished; finish it with the same command: `{again}`, in {typed}"
    for words in (
        ("verify", unfinished),
        ("verify", unfinished, "--source", finished.source),
        ("verify", finished.folder, "--source", unfinished),
        ("report", unfinished),
        ("eval", finished.source, unfinished, "--data", finished.held_out),
        ("eval", unfinished, finished.folder, "--data", finished.held_out),
        ("coverage", "--model", unfinished, "--data", finished.calibration),
        ("stitch", "--source", finished.source, "--experts", unfinished),
        ("publish", unfinished, "--repo", "me/it", "--source", finished.source, "--dry-run"),
    ):
        assert said(*words) == (2, "", line), words
    first = Path("said").read_text().splitlines()[0]
    tokens = finished.report["calibration"]["tokens"]
    held_out = finished.report["tokens"] + finished.report["samples"]  # the first token of a text is not predicted
    size = sum(info.size for info in open_folder(finished.source).tensors.values())
    assert first.startswith(f"tiny-minimax-m2 ({size / 1e6:.1f} MB, 4 layers × 16 experts) → cut on cpu, 1 thread; ")
    assert f"; {tokens:,} calibration and {held_out:,} held-out tokens" in first
    assert command(*shlex.split(again)[1:]) == 0
    assert command.err.splitlines()[0] == f"{first}; resuming after layer 2 of 4"
    assert_same(unfinished, finished.folder)
    assert said("verify", unfinished, "--source", finished.source)[0] == 0


def test_an_unfinished_stitch_names_its_command(
    finished: Finished, said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantizers.repair import stitch as stitched

    def cut(*_: Any, **__: Any) -> None:
        raise QuantizeError("", "cut here")

    monkeypatch.chdir(tmp_path)
    words = ("stitch", "--source", finished.source, "--experts", finished.folder, "-o", "mixed", "--repair-router")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stitched, "verify", cut)
        assert said(*words)[2] == "quantize: cut here"
    code, _, line = said("report", "mixed")
    assert code == 2
    assert line.startswith("quantize: mixed: unfinished; finish it with the same command: ")
    assert shlex.split(line.split("`")[1]) == ["quantize", *map(str, words)]


def test_fresh_without_a_terminal_names_yes(
    unfinished: Path, finished: Finished, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("run", finished.recipe, "-o", unfinished, "--device", "cpu", "--fresh")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    code, _, line = said(*words)
    assert (code, line) == (
        2,
        "quantize: --fresh: discard the run in cut? There is no terminal to confirm on; pass --yes",
    )
    assert journal.unfinished(unfinished)
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))  # an answer through a pipe is one
    assert said(*words)[0] == 2
    assert journal.unfinished(unfinished)


def test_other_threads_name_the_variable_and_the_number(
    unfinished: Path, finished: Finished, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", str(begun + 1))
    code, _, line = said("run", finished.recipe, "-o", unfinished, "--device", "cpu")
    assert code == 2
    assert f"OMP_NUM_THREADS is {begun + 1}" in line
    assert line.endswith(f"unset it, or set OMP_NUM_THREADS={begun}")


@pytest.mark.parametrize(
    ("key", "before", "remedy"),
    [
        ("threads", 3, "set OMP_NUM_THREADS=3"),
        ("device", "cpu", "give --device cpu"),
        ("device", "NVIDIA L4", "resume on the device NVIDIA L4"),
        ("torch", "2.0", "install torch 2.0"),
        ("transformers", "5.17.0", "install transformers 5.17.0"),
        ("cpu_capability", "AVX2", "restore it"),
    ],
)
def test_another_machine_has_a_remedy_of_its_own(key: str, before: Any, remedy: str, tmp_path: Path) -> None:
    refuse_changes(tmp_path, {"machine": {key: before}}, tmp_path)
    with pytest.raises(InputError, match=rf"another machine\.{key} .*; {remedy}, or start over with --fresh$"):
        refuse_changes(tmp_path, {"machine": {key: "other"}}, tmp_path)


def test_a_finished_folder_says_which_setting_differs(
    finished: Finished, write_recipe: Callable[..., Path], tmp_path: Path, said: Said
) -> None:
    other = write_recipe(tmp_path / "bits", bits=8)
    code, _, line = said("run", other, finished.folder, "--device", "cpu")
    assert code == 2
    assert line == (
        f"quantize: {finished.folder}: holds the finished output of another recipe (experts.bits: 4, now 8); choose "
        "another --output, or start over with --fresh"
    )
    longer = write_recipe(tmp_path / "longer")
    for file in ("calibration.yaml", "held-out.yaml"):
        text = (longer.parent / file).read_text()
        (longer.parent / file).write_text(text.replace("sequence_length: 128", "sequence_length: 96"))
    assert "(calibration.yaml.sequence_length: 128, now 96, held-out.yaml" in said("run", longer, finished.folder)[2]
    (shutil.copytree(finished.folder, tmp_path / "copy") / "recipe.yaml").unlink()
    assert "of another recipe; choose another" in said("run", other, tmp_path / "copy")[2]


@pytest.mark.parametrize("device", ["gpu", "mps", "cuda:x"])
def test_a_device_of_another_name(device: str, finished: Finished, said: Said) -> None:
    remedy = "only the CPU and GPUs of NVIDIA and AMD are supported; give cpu, cuda, cuda:N or auto"
    words = ("verify", finished.folder, "--source", finished.source, "--device", device)
    assert said(*words) == (2, "", f"quantize: --device {device}: {remedy}")


@pytest.mark.parametrize(
    ("cuda", "found", "device", "problem"),
    [
        (None, 0, "cuda", "is a build for the CPU alone; install one for GPUs, or give cpu"),
        ("13.0", 0, "cuda:9", "torch finds no GPU; see whether nvidia-smi lists one and what CUDA_VISIBLE_DEVICES"),
        ("13.0", 1, "cuda:1", "torch finds one GPU; give cuda:0"),
        ("13.0", 2, "cuda:9", "torch finds 2 GPUs; give one of cuda:0 to cuda:1"),
    ],
)
def test_a_gpu_that_is_not_there(
    cuda: str | None, found: int, device: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    with pytest.raises(InputError, match=f"^--device {device}: .*{problem}"):
        choose_device(device)


def test_what_concerns_all_layers_is_one_line_in_text(finished: Finished, tmp_path: Path, said: Said) -> None:
    """No scheme names the experts any more, and the norms are not those that they were folded into."""
    folder = shutil.copytree(finished.folder, tmp_path / "copy")
    (folder / "report.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups.pop(next(name for name, group in groups.items() if "experts" in str(group["targets"])))
    (folder / "config.json").write_text(json.dumps(config))
    for n in range(4):
        norm = f"model.layers.{n}.post_attention_layernorm.weight"
        edit(folder, norm, lambda tensors, norm=norm: tensors[norm].mul_(3))
    code, out, _ = said("verify", folder, "--source", finished.source)
    assert code == 3
    (line,) = [line for line in out.splitlines() if line.startswith("error: ") and "vLLM" in line]
    assert line.startswith("error: layers 0–3, experts 0–15: block_sparse_moe.experts.*.w1, ")
    assert "(192 times)" in line
    (line,) = [line for line in out.splitlines() if "block_sparse_moe.gate.weight: " in line]
    assert "layers 0–3: block_sparse_moe.gate.weight: " in line
    code, out, _ = said("verify", folder, "--source", finished.source, "--json")
    found = json.loads(out)
    findings = [one for one in found["consumers"]["findings"] if "vLLM" in one["engine"]]
    assert [(one["count"], len(set(one["places"]))) for one in findings] == [(192, 192)]
    routers = [line for line in found["differences"] if ".block_sparse_moe.gate.weight: " in line]
    assert [line.split(".")[2] for line in routers] == ["0", "1", "2", "3"]
