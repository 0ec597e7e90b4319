"""GPUs that a user names: their memory for `plan --vram`, and the nominal rates of some for estimated times."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from quantizers.architectures.architecture import Architecture
from quantizers.recipe.gpu_names import SLICE, find_gpu, gpus_named, known_gpus
from quantizers.system.cores import cores
from quantizers.system.errors import InputError
from quantizers.system.formatting import gib, parse_bytes

GIB, TERA = 2**30, 1e12
UTILISATION = 0.93  # vLLM's --gpu-memory-utilization; the rest is for the driver
LEAST, MOST = GIB, 4096 * GIB  # bytes of a GPU: others are a slip
MOST_COUNT = 10_000  # GPUs
_ROW = re.compile(r"(.+),\s*(\d+ ?MiB)", re.IGNORECASE)  # nvidia-smi --query-gpu=name,memory.total --format=csv
UNSAID = ", [N/A]"  # what nvidia-smi prints for the memory that CPU and GPU share
_COUNT = re.compile(r"^\d+\s*[xX×]\s*")

# The shares of nominal rates that are reached. On GPUs as a layer of MiniMax-M2.1 took them on one H200
# (docs/explanation/gpu.md): products 2.7 s, where 2.9 were expected; search, rounding and factorization 4.8 s together.
# Batched factorizations and triangular solves are far from the rate of matrix products.
GPU_SHARES = {"bandwidth": 0.8, "products": 0.6, "float32": 0.4, "factorization": 0.1}
CPU_SHARES = {"bandwidth": 1.0, "products": 0.75, "float32": 0.75, "factorization": 0.3}
# Of one core, on which a layer was measured: operations and bytes a second.
CORE_RATE = 0.095e12
CORE_BANDWIDTH = 7.5e9
MOST_BANDWIDTH = 200e9


def _memory(entry: dict[str, Any]) -> int:
    return int(entry.get("seen", entry["memory"]) * GIB)


@dataclass(frozen=True)
class Rates:
    """Nominal rates of a GPU, or of a CPU, in bytes or operations a second, and the shares of them that are reached."""

    name: str
    memory: int  # bytes that torch sees; 0 for a CPU, whose memory is the machine's
    bandwidth: float  # of the device's memory
    products: float  # of matrix products in the forward pass's dtype: bfloat16 on a GPU, else float32
    float32: float
    shares: dict[str, float]

    def reached(self, kind: str) -> float:
        """Rate that is assumed to be reached for one of the keys of `shares`, in bytes or operations a second."""
        return float(getattr(self, "float32" if kind == "factorization" else kind)) * self.shares[kind]


def rates_of_gpus() -> list[Rates]:
    """The GPUs whose rates are known, in the order of gpus.yaml."""
    entries = {name.replace("-", " "): entry for name, entry in known_gpus().items() if "bandwidth" in entry}
    return [
        Rates(
            name,
            _memory(entry),
            TERA * entry["bandwidth"],
            TERA * entry["bfloat16"],
            TERA * entry["float32"],
            GPU_SHARES,
        )
        for name, entry in entries.items()
    ]


def rates_of_cpu() -> Rates:
    """The cores of this machine that the program may use."""
    count = cores()
    bandwidth, rate = min(CORE_BANDWIDTH * count, MOST_BANDWIDTH), CORE_RATE * count
    return Rates("CPU", 0, bandwidth, rate, rate, CPU_SHARES)


@dataclass(frozen=True)
class Gpus:
    """`count` equal GPUs of `bytes` each; `name` is the user's text, such as 2x96GiB or 2xH100."""

    name: str
    count: int
    bytes: int
    sm: int | None = None  # their compute capability, as 86; None where it is not known
    nominal: bool = True  # whether `bytes` is what the vendor or the user calls them; otherwise it is what torch sees
    shared: bool = False  # whether it is the host's memory, too
    utilisation: float = UTILISATION  # the share of it that vLLM may use

    def of(self, count: int) -> Gpus:
        """Another number of the same GPUs."""
        return replace(self, name=f"{count}x{_COUNT.sub('', self.name)}", count=count)


def most_unseen() -> float:
    """The largest share of its nominal memory that torch does not see of a GPU where that is known."""
    own = (gpu for gpu in known_gpus().values() if "seen" in gpu and not gpu.get("shared"))
    return max(1 - float(gpu["seen"]) / float(gpu["memory"]) for gpu in own)


def parse_gpus(text: str) -> Gpus:
    """Parse `2x96GiB`, `2xH100`, or either for one GPU; InputError for any other form, and an unknown name."""
    match = re.fullmatch(r"(?:(\d{1,30})\s*[xX×]\s*)?(.+)", text.strip())
    if match is None or (match[1] is not None and not int(match[1])):
        raise InputError(f"--vram {text!r}", "write the number of GPUs and the memory of each, as 2x96GiB, or 2xH100")
    count = int(match[1] or 1)
    if count > MOST_COUNT:
        raise InputError(f"--vram {text!r}", f"{MOST_COUNT:,} GPUs at most are planned for", "write it as 2x96GiB")
    given = match[2].removesuffix(UNSAID).rstrip()
    names: list[str] = []
    if (row := _ROW.fullmatch(given)) and not SLICE.search(given):
        names, given = gpus_named(row[1]), row[2]
    elif re.match(r"[A-Za-z]|\d{4}(?!.*[bB]$)", given) or SLICE.search(given):
        entry = known_gpus()[find_gpu(given, f"--vram {text!r}", count)]
        return Gpus(text.strip(), count, _memory(entry), nominal="seen" not in entry, **_told(entry))
    try:
        memory = parse_bytes(given, "")
    except InputError as failure:
        raise InputError(f"--vram {text!r}", failure.problem, f"write it as {count}x96GiB, or {count}xH100") from None
    if not LEAST <= memory <= MOST:
        bounds = f"of {gib(LEAST)} to {gib(MOST)}"
        raise InputError(f"--vram {text!r}", f"GPUs {bounds} are planned for", f"write it as {count}x96GiB")
    return Gpus(text.strip(), count, memory, **_told(known_gpus()[names[0]] if names else {}))


def _told(entry: dict[str, Any]) -> dict[str, Any]:
    """The properties of a GPU besides its memory in an entry, as arguments of Gpus."""
    return {key: entry[key] for key in ("sm", "shared", "utilisation") if key in entry}


def lacking_facts(facts: Architecture) -> str | None:
    """Name the facts about servers without which nothing can be said about GPUs; None if they are all known."""
    words = {"tensor_parallel": "how servers divide it among GPUs", "kv_cache": "what they cache of a token"}
    lacking = [text for key, text in words.items() if getattr(facts, key) is None]
    return f"{' and '.join(lacking)} is not known here for {facts.model_type}" if lacking else None
