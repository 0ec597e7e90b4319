"""GPUs by name: their memory for `plan --vram`, and the nominal rates of some for the estimated time of a run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quantizers.system.errors import InputError, did_you_mean
from quantizers.system.formatting import parse_bytes

GIB = 2**30

# GiB as torch reports them ("GPU 0 has a total capacity of ..."): drivers differ in the first decimal, so these are
# the smallest of those seen. A GPU that is not among them counts with the nominal size.
SEEN = {
    "RTX-4090": 23.6, "RTX-PRO-6000": 94.9, "L40S": 44.3, "A100": 79.1, "A100-40": 39.3, "H100": 79.1, "H200": 139.7,
    "B200": 178.3, "MI300X": 191.4,
}  # fmt: skip
# Nominal sizes in GB, which for GPU memory are 2**30 bytes.
STATED = {
    "RTX-3090": 24, "RTX-4090": 24, "RTX-5090": 32, "RTX-A6000": 48, "RTX-6000-ADA": 48, "RTX-PRO-6000": 96,
    "L4": 24, "A10": 24, "L40": 48, "L40S": 48, "A100-40": 40, "A100": 80, "H100": 80, "H100-NVL": 94, "H20": 96,
    "H200": 141, "B200": 180, "MI300X": 192, "MI325X": 256, "MI355X": 288,
}  # fmt: skip
OTHER_NAMES = {"A100-80": "A100", "H100-80": "H100", "A6000": "RTX-A6000", "6000-ADA": "RTX-6000-ADA"}


# The shares of nominal rates that are assumed to be reached; not measured with this program. Batched
# Cholesky factors and triangular solves are far from the rate of matrix products.
OF_A_GPU = {"bandwidth": 0.8, "products": 0.6, "float32": 0.75, "factorization": 0.15}
OF_A_CPU = {"bandwidth": 1.0, "products": 0.75, "float32": 0.75, "factorization": 0.3}


@dataclass(frozen=True)
class Rates:
    """Nominal rates of a GPU, or of a CPU.

    Attributes:
        name: as it is printed.
        memory: bytes that torch sees; 0 for a CPU, whose memory is the machine's.
        bandwidth: bytes a second of the device's memory.
        products: operations a second of matrix products in the dtype of the forward pass: bfloat16 with float32 sums
            and without sparsity on a GPU, float32 on a CPU.
        float32: operations a second.
        shares: of these that are assumed to be reached.
    """

    name: str
    memory: int
    bandwidth: float
    products: float
    float32: float
    shares: Mapping[str, float]

    def reached(self, kind: str) -> float:
        """Bytes or operations a second that are assumed to be reached: one of the keys of `shares`."""
        return float(getattr(self, "float32" if kind == "factorization" else kind)) * self.shares[kind]


def rates_in_words(devices: Sequence[Rates]) -> list[str]:
    """Nominal rates and the shares of them that are assumed to be reached, in a line for each kind of device."""
    lines = []
    for kind, shares in (("bfloat16", OF_A_GPU), ("float32", OF_A_CPU)):
        nominal = "; ".join(
            f"{one.name} {one.bandwidth / 1e12:.3g} TB/s, {one.products / 1e12:.3g} and {one.float32 / 1e12:.3g} "
            "TFLOP/s"
            for one in devices
            if one.shares is shares
        )
        if nominal:
            lines.append(
                f"nominal rates, {kind} and float32: {nominal}; of these {shares['bandwidth']:.0%}, "
                f"{shares['products']:.0%} and {shares['float32']:.0%} are reached, {shares['factorization']:.0%} in "
                "factorizations"
            )
    return lines


def _gpu(name: str, label: str, bandwidth: float, products: float, float32: float) -> Rates:
    return Rates(label, int(SEEN[name] * GIB), 1e12 * bandwidth, 1e12 * products, 1e12 * float32, OF_A_GPU)


# TB/s, then TFLOP/s in bfloat16 (dense) and float32, as NVIDIA states them.
RATES: Mapping[str, Rates] = {
    # "NVIDIA Ada GPU Architecture" whitepaper, appendix A: AD102
    "RTX-4090": _gpu("RTX-4090", "RTX 4090", 1.008, 165.2, 82.6),
    # "NVIDIA A100 Tensor Core GPU" data sheet: A100 80GB SXM
    "A100": _gpu("A100", "A100", 2.039, 312, 19.5),
    # "NVIDIA RTX Blackwell PRO GPU Architecture" whitepaper: Workstation Edition
    "RTX-PRO-6000": _gpu("RTX-PRO-6000", "RTX PRO 6000", 1.792, 504, 126),
    # "NVIDIA H100 Tensor Core GPU" data sheet: H100 SXM; its figures with sparsity halved
    "H100": _gpu("H100", "H100", 3.35, 989, 67),
    # "NVIDIA H200 Tensor Core GPU" data sheet: H200 SXM; its figures with sparsity halved
    "H200": _gpu("H200", "H200", 4.8, 989, 67),
}
# Of one core, on which a layer was measured: operations and bytes a second.
OF_A_CORE, CORE_BANDWIDTH, MOST_BANDWIDTH = 0.095e12, 7.5e9, 200e9


def this_cpu() -> Rates:
    """The cores of this machine that the program may use."""
    cores = len(os.sched_getaffinity(0))
    bandwidth, rate = min(CORE_BANDWIDTH * cores, MOST_BANDWIDTH), OF_A_CORE * cores
    return Rates("CPU", 0, bandwidth, rate, rate, OF_A_CPU)


@dataclass(frozen=True)
class Gpus:
    """`count` equal GPUs of `bytes` each; `name` is the user's text, such as 2x96GiB or 2xH100."""

    name: str
    count: int
    bytes: int

    def of(self, count: int) -> Gpus:
        """Another number of the same GPUs."""
        return Gpus(f"{count}x{_COUNT.sub('', self.name)}", count, self.bytes)


_COUNT = re.compile(r"^\d+\s*[xX×]\s*")


def parse_gpus(text: str) -> Gpus:
    """Parse `2x96GiB`, `2xH100`, or either for one GPU.

    Raises:
        InputError: the text has neither form, or no GPU has this name; the message lists the known ones.
    """
    match = re.fullmatch(r"(?:(\d+)\s*[xX×]\s*)?(.+)", text.strip())
    if match is None or (match[1] is not None and not int(match[1])):
        raise InputError(f"--vram {text!r}: write the number of GPUs and the memory of each, as 2x96GiB, or 2xH100")
    count = int(match[1] or 1)
    if re.match(r"[a-z]|\d+$|\d{4}", match[2], re.IGNORECASE) and (name := _known(match[2])):
        return Gpus(text.strip(), count, int(SEEN.get(name, STATED[name]) * GIB))
    if re.match(r"[a-z]", match[2], re.IGNORECASE) or re.fullmatch(r"\d{4}\s*\w*", match[2]):
        meant = did_you_mean(_spelled(match[2]), STATED)
        raise InputError(
            f"--vram {text!r}: no GPU {match[2]} is known{meant}; give the memory of each, as {count}x96GiB, or one "
            f"of {', '.join(sorted(STATED))}"
        )
    return Gpus(text.strip(), count, parse_bytes(match[2], "--vram"))


def _known(name: str) -> str | None:
    """The name of a GPU in STATED: in any case, with blanks, and with or without RTX."""
    spelled = _spelled(name)
    spelled = OTHER_NAMES.get(spelled, spelled)
    return next((one for one in (spelled, f"RTX-{spelled}") if one in STATED), None)


def _spelled(name: str) -> str:
    return re.sub(r"[\s_-]+", "-", name.strip().upper().removeprefix("NVIDIA ").removeprefix("AMD "))
