"""This program's kernels: the same bits as torch's operations, and code for every card."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from calibration_tokenizer import write_tokenizer
from conftest import REPOSITORY

from quantizers.device import fused as device_fused
from quantizers.device.fused import OPTIONS, WIDER
from quantizers.forward.fused import operators as stored
from quantizers.forward.recorded import LARGEST
from quantizers.solve import rounding
from quantizers.solve.fused.operators import STRIP, SUMS, TOKENS, WEIGHED, rows_of_program
from quantizers.solve.rounding import mse_scales

LAUNCHES = (
    "gptq_block", "refine_group", "tried_errors", "summed_products", "token_roots", "gate_rows", "weigh_rows",
    "dequantize", "mse_scales",
)  # fmt: skip
INTERPRETED = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def interpreted(*arguments: str) -> Any:
    program = [sys.executable, str(REPOSITORY / "tests" / "interpreted_kernels.py"), *arguments]
    done = subprocess.run(program, env=INTERPRETED, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("kernel", [*LAUNCHES[:-1], pytest.param("mse_scales", marks=pytest.mark.slow)])
def test_a_kernel_leaves_the_bits_that_torch_s_operations_leave(kernel: str) -> None:
    """In Triton's interpreter, over 16 shapes each; float32 errors and changes too, not codes and scales alone."""
    found = interpreted(kernel)
    assert len(found) == 16
    assert {shape: differing for shape, differing in found.items() if differing} == {}


POINTERS = {
    "group_of": "*i32", "chosen_experts": "*i32", "experts": "*i64",
    **dict.fromkeys(("codes", "unusable", "good", "finite"), "*i8"),
    **dict.fromkeys(("scale", "chosen", "gate", "up", "rows", "root"), "*bf16"),
    **dict.fromkeys(("work", "factor", "errors", "block", "near", "image", "change"), "*fp32"),
    **dict.fromkeys(("weight", "importance", "magnitude", "first", "second", "sums"), "*fp32"),
    **dict.fromkeys(("of_routed", "of_any"), "*fp32"),
}  # fmt: skip
STORED = {"codes": "*u8", "ROWS": stored.ROWS, "COLUMNS": stored.COLUMNS}
COMPILED = [
    ("dequantize", STORED | {"BITS": 0, "ROUNDED": True, "slot": "*bf16", "scale": "*fp32"}, 0),
    *(("dequantize", STORED | {"BITS": bits, "ROUNDED": False, "slot": "*fp32"}, 0) for bits in (4, 8)),
    ("gptq_block", {"W": rounding.BLOCK, "factor_row": 1}, rounding.BLOCK),
    *(("refine_group", {"G": group}, group) for group in (32, 64, 128)),
    *(("tried_errors", {"G": group, "P": 4}, 8) for group in (32, 128)),
    ("summed_products", {}, 8),
    ("token_roots", {"K": 8, "TOKENS": TOKENS}, 0),
    ("gate_rows", {"LARGEST": LARGEST, "STRIP": STRIP, "TOKENS": TOKENS}, 0),
    ("weigh_rows", {"STRIP": WEIGHED, "SUMS": SUMS}, 0),
    *(("mse_scales", {"G": group, "COUNT": 20, "FIRST": 1.05, "LESS": 0.02}, 8) for group in (32, 64, 128)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "sizes", "columns"), COMPILED)
def test_a_kernel_compiles_for_every_card(
    kernel: str, sizes: dict[str, Any], columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU, for A100, H100, RTX 40 and RTX 50: nothing is spilled, nothing fused, and no sum is atomic.

    A division has fused instructions of its own in machine code, so it is in the code before that, PTX, that none may
    be: there a product and a sum that each say how they are rounded are left alone. Sizes and steps in memory are
    multiples of 16, as a model's are; Triton then compiles for that.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from quantizers.forward.fused.kernels import dequantize
    from quantizers.solve.fused import kernels

    function = getattr(kernels, kernel, dequantize)
    pointers = POINTERS | {name: size for name, size in sizes.items() if isinstance(size, str)}
    sizes = {name: size for name, size in sizes.items() if name not in pointers}
    constants, options = sizes, OPTIONS | WIDER
    if columns:
        rounding_s = {"LOW": -8, "HIGH": 7, "ROWS": rows_of_program(columns)}
        constants, options = {n: v for n, v in (sizes | rounding_s).items() if n in function.arg_names}, OPTIONS
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in function.arg_names}
    places = {(function.arg_names.index(name),): value for name, value in constants.items()}
    even = {(place,): [["tt.divisibility", 16]] for place in range(len(function.arg_names)) if (place,) not in places}
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    for card in (80, 90, 89, 120):
        source = ASTSource(fn=function, signature=signature, constexprs=places, attrs=even)
        made = triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)
        (tmp_path / "cubin").write_bytes(made.asm["cubin"])
        command = [tools / "cuobjdump", "-res-usage", tmp_path / "cubin"]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = (int(re.findall(rf"{name}:(\d+)", usage)[0]) for name in ("REG", "STACK"))
        print(
            f"{kernel} {sizes} sm_{card}: {registers} registers, {stack} bytes of stack, {made.metadata.shared} shared"
        )
        assert stack == 0
        assert registers <= 192
        assert not re.findall(r"\b(?:fma|atom|red)\.", made.asm["ptx"])
        assert re.findall(r"\bmul(?:\.rn)?\.f32", made.asm["ptx"])


@pytest.mark.on_device
def test_a_gpu_gives_the_bits_that_a_cpu_gives(device: torch.device) -> None:
    """By its kernels; the products between them are left out, which are a library's."""
    if not device_fused.fused(device):
        pytest.skip("no GPU that kernels are launched on")
    generator = torch.Generator().manual_seed(0)
    for bits, group in product((4, 8), (32, 64, 128)):
        weight, importance = (torch.randn(shape, generator=generator) for shape in ((3, 200, 256), (3, 256)))
        there = mse_scales(weight.to(device), importance.square().to(device), group, bits).cpu()
        assert torch.equal(there, mse_scales(weight, importance.square(), group, bits))


def quantized(folder: Path, environment: dict[str, str]) -> dict[str, bytes]:
    program = [sys.executable, "-m", "quantizers", "run", str(folder / "recipe.yaml"), "--output", str(folder / "out")]
    subprocess.run([*program, "--device", "cpu"], env=environment, check=True, capture_output=True)
    made = {path.name: path.read_bytes() for path in (folder / "out").glob("*.safetensors")}
    shutil.rmtree(folder / "out")
    return made


@pytest.mark.slow
def test_a_run_with_interpreted_kernels_writes_the_same_shards(tmp_path: Path) -> None:
    config = tiny.config(
        num_hidden_layers=1, num_local_experts=4, hidden_size=128, intermediate_size=64, vocab_size=320
    )
    write_tokenizer(tiny.write(tmp_path / "model", config, tiny.tensors(config)))
    rows = [{"text": " ".join(f"text {i} word {j}" for j in range(30))} for i in range(4)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"dataset": "texts.jsonl", "columns": ["text"], "shape": "text", "samples": "all", "category": "any"}
    (tmp_path / "set.yaml").write_text(
        yaml.safe_dump({"name": "kernels", "sequence_length": 192, "seed": 1, "sources": [source]})
    )
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"source": {"model": "model"}, "calibration": "set.yaml"}))
    plain = quantized(tmp_path, os.environ | {"OMP_NUM_THREADS": "1"})
    assert quantized(tmp_path, INTERPRETED) == plain
    assert len(plain) == 2


@pytest.mark.slow
def test_stored_matrices_of_every_form_become_numbers_by_the_kernel() -> None:
    """tests/forward/test_expert_weights.py again, in the interpreter, which warns of 0 times infinity."""
    of_forms = REPOSITORY / "tests" / "forward" / "test_expert_weights.py"
    program = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-o",
        "filterwarnings=ignore",
        "-k",
        "numbers or blocks or named",
    ]
    done = subprocess.run([*program, str(of_forms)], env=INTERPRETED, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_one_thread_launches_at_a_time_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread's current device is the first GPU, whichever one the tensors lie on."""
    there, events = torch.empty(1), list[str]()

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return self.launch

        def launch(self, name: str, **options: int) -> None:
            events.append(f"begin {name} {options}")
            time.sleep(0.01)
            events.append("end")

    @contextlib.contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        assert tensor is there
        events.append("its device")
        yield

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    launch = device_fused.launched(Kernel(), (1, 2), there, ROWS=8)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(launch, "abcd"))
    assert sorted(events[1::3]) == [f"begin {name} {{'ROWS': 8}}" for name in "abcd"]
    assert (events[::3], events[2::3]) == (["its device"] * 4, ["end"] * 4)


def test_where_kernels_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.delenv(device_fused.INTERPRETER, raising=False)
    assert (device_fused.fused(cpu), device_fused.fused(torch.device("meta"))) == (False, True)
    monkeypatch.setenv(device_fused.INTERPRETER, "1")
    assert device_fused.fused(cpu)
    monkeypatch.setattr(device_fused, "find_spec", lambda _: None)
    assert not device_fused.fused(cpu)


@pytest.mark.parametrize(
    ("hip", "capability", "found", "reason"),
    [
        ("7.0", (9, 4), object(), "not tried on AMD's cards"),
        (None, (7, 5), object(), "compute capability below 8.0"),
        (None, (9, 0), None, "Triton is not installed"),
    ],
)
def test_why_no_kernels_are_launched(
    hip: str | None, capability: tuple[int, int], found: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(device_fused, "find_spec", lambda _: found)
    monkeypatch.setattr(device_fused, "why_not", device_fused.why_not.__wrapped__)
    card = torch.device("cuda:0")
    assert device_fused.why_not(card) == reason
    assert device_fused.kernels(card) == f"torch ({reason})"
    assert not device_fused.fused(card)


def test_without_a_compiler_or_a_driver_torch_s_operations_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, where there is no GPU, Triton itself says why it cannot launch."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    reason = device_fused.why_not.__wrapped__(torch.device("cuda:0"))
    assert re.fullmatch(r"Triton cannot launch: .+", reason)
    assert "\n" not in reason
