"""The Triton kernels: the bits of torch's operations, what happens to one that is wrong, and code for every GPU."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import yaml
from calibration_tokenizer import write_tokenizer
from conftest import REPOSITORY
from sets import rows_set

from quantizers.device import triton_support
from quantizers.device.triton_support import OPTIONS
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.job import prepare
from quantizers.solve import rounding
from quantizers.solve.kernel_check import KERNELS, differences, verify_kernels
from quantizers.solve.kernels import STRIP, SUMS, rows_of_program

INTERPRETED = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
RECIPE = {"source": {"model": "model"}, "calibration": "set.yaml", "experts": {"group_size": 32, "awq": {"grid": 3}}}
PROGRAM = str(REPOSITORY / "tests" / "interpreted_kernels.py")


@pytest.mark.slow
def test_kernels_have_the_bits_of_torch_s_operations() -> None:
    """In Triton's interpreter; float32 errors and changes too, not codes and scales alone."""
    program = [sys.executable, PROGRAM, "compare"]
    done = subprocess.run(program, env=INTERPRETED, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {kernel: [[], []] for kernel in KERNELS}


@pytest.mark.on_device
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_gpu_s_kernels_have_the_bits_of_its_eager_operations(kernel: str, device: torch.device) -> None:
    # scripts/first_hour_gpu.sh runs this where there is one; in CI the test above does, in Triton's interpreter.
    if not triton_support.can_launch(device):
        pytest.skip("no GPU that kernels are launched on")
    for bits, group in product((2, 3, 4, 8), (32, 64, 128)):
        assert differences(kernel, device, (3, 200, group, bits, bits != 8)) == []


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels, before and after the test, as if they could be launched here."""
    monkeypatch.setattr(triton_support, "_disabled", set())
    monkeypatch.setenv(triton_support.INTERPRETER, "1")


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("leads", [True, False])
def test_what_one_process_refuses_all_do_without(
    leads: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu, other = torch.device("cpu"), {"gptq_block": "", "weigh_rows": "differs from torch's operations in rows"}
    dist: Any = SimpleNamespace(is_main=leads, all_gather_object=lambda own: [own, other])
    monkeypatch.delenv(triton_support.INTERPRETER)
    verify_kernels(cpu, {(4, 32, True)}, dist)
    monkeypatch.setenv(triton_support.INTERPRETER, "1")
    assert [name for name in KERNELS if not triton_support.use_kernel(name, cpu)] == ["weigh_rows"]
    said = "kernel weigh_rows differs from torch's operations in rows; torch's own operations do its work in this run\n"
    assert capsys.readouterr().err == (said if leads else "")


def quantized(folder: Path, name: str, program: list[str], environment: dict[str, str]) -> tuple[dict[str, bytes], str]:
    """The shards of a run by a program, and what it printed on standard error."""
    arguments = ["run", str(folder / "recipe.yaml"), "--output", str(folder / name), "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, *program, *arguments], env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return {path.name: path.read_bytes() for path in (folder / name).glob("*.safetensors")}, done.stderr


@pytest.mark.slow
def test_interpreted_and_wrong_kernels_write_the_same_shards(tmp_path: Path) -> None:
    """Kernels that are wrong, or cannot be launched, are found at the start, and replaced by torch's operations."""
    config = tiny.config(num_hidden_layers=1, num_local_experts=2, hidden_size=64, intermediate_size=32, vocab_size=320)
    write_tokenizer(tiny.write(tmp_path / "model", config, tiny.tensors(config)))
    rows = [("any", " ".join(f"text {i} word {j}" for j in range(30))) for i in range(4)]
    rows_set(tmp_path, rows, sequence_length=192)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    run(prepare(str(tmp_path / "recipe.yaml")), Options(tmp_path / "plain", torch.device("cpu")))
    plain = {path.name: path.read_bytes() for path in (tmp_path / "plain").glob("*.safetensors")}
    assert len(plain) == 2
    shards, said = quantized(tmp_path, "interpreted", ["-m", "quantizers"], INTERPRETED)
    assert shards == plain
    assert "kernel " not in said
    shards, said = quantized(tmp_path, "wrong", [PROGRAM, "wrong"], INTERPRETED)
    assert shards == plain
    assert [line.partition(";")[0] for line in said.splitlines() if line.startswith("kernel ")] == [
        "kernel gptq_block differs from torch's operations in errors and codes",
        "kernel refine_group cannot be launched (ptxas failed)",
        "kernel mse_scales differs from torch's operations in scales",
    ]


POINTERS = {
    "group_of": "*i32", "codes": "*i8",
    **dict.fromkeys(("scale", "chosen", "rows", "root"), "*bf16"),
    **dict.fromkeys(("work", "factor", "errors", "block", "near", "image", "change"), "*fp32"),
    **dict.fromkeys(("weight", "importance", "magnitude"), "*fp32"),
}  # fmt: skip
COMPILED = [
    ("gptq_block", {"W": rounding.BLOCK, "factor_row": 1}, rounding.BLOCK),
    ("refine_group", {"G": 128, "SIGNED": True}, 128),
    ("weigh_rows", {"STRIP": STRIP, "SUMS": SUMS}, 0),
    ("mse_scales", {"G": 128, "COUNT": 20, "FIRST": 1.05, "LESS": 0.02, "SIGNED": True}, 8),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "sizes", "columns"), COMPILED)
def test_a_kernel_compiles_for_every_card(
    kernel: str, sizes: dict[str, Any], columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU, for A100 and H100: no spilled registers, fused multiply-adds of its own, or atomics.

    A division has fused instructions of its own in machine code, so it is in the code before that, PTX, that none may
    be. Sizes and steps in memory are multiples of 16, as a model's are; Triton then compiles for that.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from quantizers.solve import triton_code

    function = getattr(triton_code, kernel)
    constants, options = sizes, OPTIONS | {"num_warps": 4}
    if columns:
        rounding_s = {"LOW": -8, "HIGH": 7, "ROWS": rows_of_program(columns)}
        constants, options = {n: v for n, v in (sizes | rounding_s).items() if n in function.arg_names}, OPTIONS
    signature = {name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in function.arg_names}
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    even = {(place,): [["tt.divisibility", 16]] for place in range(len(function.arg_names)) if (place,) not in places}
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    for card in (80, 90):
        source = ASTSource(fn=function, signature=signature, constexprs=places, attrs=even)
        made = triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)
        (tmp_path / "cubin").write_bytes(made.asm["cubin"])
        command = [tools / "cuobjdump", "-res-usage", tmp_path / "cubin"]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = (int(re.findall(rf"{name}:(\d+)", usage)[0]) for name in ("REG", "STACK"))
        assert stack == 0
        assert registers <= 192
        assert not re.findall(r"\b(?:fma|atom|red)\.", made.asm["ptx"])
        assert re.findall(r"\bmul(?:\.rn)?\.f32", made.asm["ptx"])


def test_one_thread_launches_at_a_time_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread's current device is the first GPU, whichever one the tensors lie on."""
    there, events = torch.empty(1), list[str]()

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return self.launch

        def launch(self, name: str, **options: int) -> None:
            events.append(f"begin {name} {options['ROWS']}")
            time.sleep(0.01)
            events.append("end")

    @contextlib.contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        assert tensor is there
        events.append("its device")
        yield

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda name: triton_support.launch(Kernel(), (1, 2), there, name, ROWS=8), "abcd"))
    assert sorted(events[1::3]) == [f"begin {name} 8" for name in "abcd"]
    assert (events[::3], events[2::3]) == (["its device"] * 4, ["end"] * 4)


@pytest.mark.parametrize(
    ("hip", "capability", "found", "reason"),
    [
        ("7.0", (9, 4), object(), "not tried on AMD's GPUs"),
        (None, (7, 5), object(), "compute capability below 8.0"),
        (None, (9, 0), None, "Triton is not installed"),
    ],
)
def test_why_no_kernels_are_launched(
    hip: str | None, capability: tuple[int, int], found: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(triton_support, "find_spec", lambda _: found)
    monkeypatch.setattr(triton_support, "why_not", triton_support.why_not.__wrapped__)
    card = torch.device("cuda:0")
    assert triton_support.why_not(card) == reason
    assert triton_support.kernels(card) == f"torch ({reason})"
    assert not triton_support.can_launch(card)


def test_without_a_compiler_or_a_driver_torch_s_operations_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, where there is no GPU, Triton itself says why it cannot launch."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    reason = triton_support.why_not.__wrapped__(torch.device("cuda:0"))
    assert re.fullmatch(r"Triton cannot launch: .+", reason)
    assert "\n" not in reason
