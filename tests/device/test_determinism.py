"""The same bytes on a GPU: what is set where one is chosen, what is refused, and which operations the program uses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from one_layer import GROUP, make_layer, sliced
from torch.utils._python_dispatch import TorchDispatchMode

from quantizers.architectures.gates import plain_gate
from quantizers.budget.measure import column_scale, scheme_errors
from quantizers.cli import main as cli
from quantizers.device import devices, triton_support
from quantizers.device.determinism import (
    ALLOCATOR,
    LT_WORKSPACE,
    UNDOING,
    WORKSPACE,
    gpu_settings,
    ordered,
    settings_in_force,
)
from quantizers.eval.fidelity.scoring import score_text
from quantizers.formats.packed_integers import Integers
from quantizers.model.moe_inputs import capture_moe_inputs as seen_by
from quantizers.planning.device_memory import Residents
from quantizers.recipe.schema import Awq, Experts
from quantizers.solve.solver import solve
from quantizers.system.errors import InputError, QuantizeError

MEMORY: Any = torch.utils.deterministic  # a module to which torch adds a property, unseen by type checkers

aten = torch.ops.aten
plain = plain_gate(torch.nn.functional.silu)


CARD = SimpleNamespace(name="a GPU", multi_processor_count=132, major=9, minor=0, total_memory=80 * 2**30)
VARIABLES = (*UNDOING, *ALLOCATOR, WORKSPACE, LT_WORKSPACE)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stand-in for a GPU, on which nothing is set yet; the process's settings are given back afterwards."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is given back whatever the test does with it
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: CARD)
    monkeypatch.setattr(torch, "zeros", lambda *_, **named: None)
    # A build for the CPU alone refuses cuSOLVER, and only that.
    linalg = ["_LinalgBackend.Default"]
    monkeypatch.setattr(
        torch.backends.cuda,
        "preferred_linalg_library",
        lambda *new: linalg.__setitem__(0, f"_LinalgBackend.{new[0].title()}") if new else linalg[0],
    )
    before = [(setting, setting.read()) for setting in gpu_settings()]
    yield
    for setting, value in before:
        setting.write(value)


SETTLED = {
    "deterministic_algorithms": True,
    "fill_uninitialized_memory": False,
    "float32_matmul_precision": "highest",
    "cudnn_allow_tf32": False,
    "allow_bf16_reduced_precision_reduction": False,
    "allow_fp16_reduced_precision_reduction": False,
    "preferred_linalg_library": "cusolver",
    "preferred_blas_library": "cublas",
}


@pytest.mark.parametrize("name", ["auto", "cuda:1"])
def test_choosing_a_gpu_settles_how_it_computes(name: str, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first tensor there; asked of torch itself."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "zeros", lambda *_, **named: seen.append(settings_in_force() | dict(os.environ)))
    torch.set_float32_matmul_precision("high")  # as with TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1
    assert torch.backends.cuda.matmul.allow_tf32
    assert devices.choose_device(name).type == "cuda"
    (first,) = seen
    assert SETTLED.items() <= first.items()
    assert (first[WORKSPACE], first["PYTORCH_ALLOC_CONF"]) == (":4096:8", "expandable_segments:True")
    assert not MEMORY.fill_uninitialized_memory
    assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"


def test_a_setting_that_torch_does_not_take_is_named(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "preferred_linalg_library", lambda *_: "_LinalgBackend.Magma")
    with pytest.raises(QuantizeError, match=r"^torch 2\S+: preferred_linalg_library is magma after it was set to cus"):
        devices.choose_device("cuda")


def test_choosing_the_cpu_sets_nothing(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its fingerprint has what it always had, so that runs begun by an earlier version go on."""
    before = settings_in_force()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    assert devices.choose_device("cpu").type == "cpu"
    assert settings_in_force() == before
    assert not {WORKSPACE, *ALLOCATOR} & os.environ.keys()
    assert devices.fingerprint(torch.device("cpu")) == {
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


@pytest.mark.parametrize("name", [*UNDOING, WORKSPACE])
def test_an_environment_without_the_same_bytes_is_refused(
    name: str, gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = settings_in_force()
    value = ":2048:8" if name == WORKSPACE else "1"
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=rf"^{name}={value}: .+; unset it, or set it to [^\n]+$"):
        devices.choose_device("cuda")
    assert settings_in_force() == before
    if name != WORKSPACE:
        monkeypatch.setenv(name, "0")
        devices.choose_device("cuda")


def test_a_gpu_that_is_not_there_is_one_line(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch, "zeros", missing)
    with pytest.raises(InputError, match=r"^--device cuda:1: no such device; give another device"):
        devices.choose_device("cuda:1")


def test_the_fingerprint_of_a_gpu(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the memory, the driver, the threads or the allocator is in it."""
    versions = {"nvidia-cublas": "13.1", "nvidia-cusolver-cu12": "11.7", "transformers": "5.17"}

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(devices, "version", version)
    monkeypatch.setattr(triton_support, "why_not", lambda _: "a reason")
    devices.choose_device("cuda")
    assert devices.fingerprint(torch.device("cuda")) == SETTLED | {
        "device": "a GPU", "multiprocessors": 132, "compute_capability": "9.0",
        "cuda": "13.0", "cublas": "13.1", "cusolver": None, "cublas_workspace": ":4096:8", "cublaslt_workspace": None,
        "torch": torch.__version__, "transformers": "5.17", "kernels": "torch (a reason)",
    }  # fmt: skip
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    found = devices.fingerprint(torch.device("cuda"))
    assert (found["cublas"], found["cusolver"]) == (None, "11.7")


def test_an_environment_that_is_as_good_is_kept_and_part_of_the_fingerprint(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another workspace may mean another algorithm, so a run does not go on under it."""
    devices.choose_device("cuda")
    usual = devices.fingerprint(torch.device("cuda"))
    monkeypatch.setenv(WORKSPACE, ":16:8")
    monkeypatch.setenv(LT_WORKSPACE, "1024")
    devices.choose_device("cuda")
    assert os.environ[WORKSPACE] == ":16:8"
    found = devices.fingerprint(torch.device("cuda"))
    assert found == usual | {"cublas_workspace": ":16:8", "cublaslt_workspace": "1024"}


@pytest.mark.parametrize("name", ALLOCATOR)
def test_the_users_own_allocator_is_kept(name: str, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under any of the names that torch has for it; it is no part of the fingerprint."""
    devices.choose_device("cuda")
    usual = devices.fingerprint(torch.device("cuda"))
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv(name, "max_split_size_mb:512")
    devices.choose_device("cuda")
    assert {key: os.environ[key] for key in ALLOCATOR if key in os.environ} == {name: "max_split_size_mb:512"}
    assert devices.fingerprint(torch.device("cuda")) == usual


def test_amds_allocator_is_left_alone(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    devices.choose_device("cuda")
    assert not set(ALLOCATOR) & os.environ.keys()


@pytest.mark.slow
def test_an_image_that_switches_tf32_on() -> None:
    """In a process of its own: torch reads these variables once, when it starts; the allocator's on its first use."""
    script = (
        "import warnings; warnings.simplefilter('error')\n"
        "import torch; from quantizers.device import determinism\n"
        "found = {s.name: s for s in determinism.gpu_settings()}; matmul = torch.backends.cuda.matmul\n"
        "print(matmul.allow_tf32, found['preferred_blas_library'].read())\n"
        "del found['preferred_linalg_library']  # refused by a build for the CPU alone\n"
        "determinism.gpu_settings = lambda: tuple(found.values())\n"
        "determinism.settle_gpu(); print(matmul.allow_tf32, matmul.fp32_precision, torch.backends.cudnn.allow_tf32)\n"
        "print(found['preferred_blas_library'].read(), torch._C._accelerator_getAllocatorSettings())\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    environment |= {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "TORCH_BLAS_PREFER_CUBLASLT": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    wanted = "True cublaslt\nFalse ieee False\ncublas expandable_segments:True\n"
    assert (done.stdout, done.stderr) == (wanted, "")


REFUSAL = (
    "cumsum_cuda_kernel does not have a deterministic implementation, but you set "
    "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation"
)


def test_an_operation_without_a_fixed_order_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the function as of the command; every other RuntimeError stays what it is."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(REFUSAL)

    with pytest.raises(QuantizeError, match=r"^cumsum_cuda_kernel: torch cannot do this in a fixed order"), ordered():
        refuse()
    with pytest.raises(RuntimeError, match=r"^out of memory$"), ordered():
        raise RuntimeError("out of memory")
    monkeypatch.setattr(cli, "app", refuse)
    monkeypatch.setattr("sys.argv", ["quantize", "run"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("quantize: cumsum_cuda_kernel: torch cannot do this in a fixed order on a GPU")
    assert "--device cpu" in line


def test_torch_says_it_in_these_words() -> None:
    """Of an operation that has no order on a CPU either."""
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(QuantizeError, match=r"^put_: "), ordered():
            torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
    finally:
        torch.use_deterministic_algorithms(False)


class InOrder(TorchDispatchMode):
    """Refuses what a GPU would do in no fixed order, or torch by other and larger means once it must be fixed."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.places, self.seen = places, set[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__.removesuffix("_")
        self.seen.add(name)
        result = function(*args, **kwargs)
        first = next((a for a in args if isinstance(a, torch.Tensor)), result)
        real = isinstance(first, torch.Tensor) and first.is_floating_point()
        # See torch.use_deterministic_algorithms: what it lists, and what is added up in floating point.
        assert name not in ("put", "median", "nanmedian", "nll_loss_forward", "kthvalue", "index_copy"), name
        if real:
            assert name not in ("scatter_add", "index_add", "scatter_reduce", "index_reduce", "histc"), name
            assert name not in ("cumsum", "cumprod", "logcumsumexp", "_index_put_impl", "index_put"), name
        assert name != "bincount" or len(args) < 2 or args[1] is None, name
        if name == "scatter":
            # Done by sorting int64 numbers of every element: well enough for a table of the router's choices.
            assert args[2].numel() <= self.places, f"scatter of {args[2].numel()} elements"
        return result


def test_the_watch_refuses() -> None:
    places, ones = torch.tensor([0, 0, 1]), torch.ones(3)
    unordered = {
        "histc": lambda: ones.histc(2),
        "cumsum": lambda: ones.cumsum(0),
        "index_add": lambda: torch.zeros(2).index_add_(0, places, ones),
        "put": lambda: torch.zeros(2).put_(places, ones),
        "scatter": lambda: torch.zeros(2).scatter_(0, places, ones),
        "bincount": lambda: places.bincount(ones),
    }
    for name, operation in unordered.items():
        with pytest.raises(AssertionError, match=name), InOrder(2):
            operation()


@pytest.mark.parametrize(("rounding", "dtype"), [("gptq", torch.bfloat16), ("nearest", torch.float32)])
def test_a_layer_is_solved_without_operations_that_have_no_order(rounding: Any, dtype: torch.dtype) -> None:
    """Search, rounding, and what a budget is measured by."""
    layer = make_layer(5, tokens=200)
    seen = [seen_by(r.x.to(dtype), r.chosen, r.weight) for r in layer.recorded()]
    gate_up, down = layer.gate_up.to(dtype), layer.down.to(dtype)
    settings = Experts(group_size=GROUP, awq=Awq(grid=4), rounding=rounding)
    choices = max(1024, *(len(r.x) for r in seen)) * seen[0].chosen.shape[1]  # of sequences joined
    with InOrder(choices) as watch:
        solve(
            seen, sliced(gate_up, down),
            norm=layer.norm, router=layer.router, gate=plain, shape=layer.router.shape, settings=settings, batch_size=2,
            residents=Residents(2, 2, 0),
        )  # fmt: skip
        outer = column_scale(seen[0].x)
        scheme_errors(seen[0], (gate_up, down), 1, [Integers(4, GROUP)], plain, outer=outer, inner=True)
    assert {"scatter_add", "cumsum", "sum", "bmm"} <= watch.seen, "the watch saw the work"


def test_figures_without_operations_that_have_no_order() -> None:
    """Perplexity and KL, of the evaluation and of the probe that a budget is measured by."""
    generator = torch.Generator().manual_seed(0)
    states, head = (torch.randn(n, 16, generator=generator).bfloat16() for n in (40, 50))
    model: Any = SimpleNamespace(device=states.device, final=lambda rows: rows, logits=lambda rows: rows)
    with InOrder(0) as watch:
        score_text([(model, head), (model, head)], torch.arange(40), [states, states + 1])
    assert {"_log_softmax", "gather", "mm"} <= watch.seen, "the watch saw the work"
