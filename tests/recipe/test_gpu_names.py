"""GPUs by the names that nvidia-smi and torch print, with the memory that nvidia-smi prints beside them."""

from __future__ import annotations

import pytest

from quantizers.planning.gpus import parse_gpus
from quantizers.recipe.cards import CARDS, known_cards
from quantizers.recipe.gpu_names import find_gpu, known_gpus
from quantizers.system.errors import InputError

# MiB of `nvidia-smi --query-gpu=name,memory.total`; of AMD's what torch reports.
PRINTED = {
    "NVIDIA A100-SXM4-80GB": 81_920,
    "NVIDIA A100-SXM4-40GB": 40_960,
    "NVIDIA A100-PCIE-40GB": 40_960,
    "NVIDIA A100 80GB PCIe": 81_920,
    "NVIDIA A100-SXM-64GB": 65_536,
    "NVIDIA A800-SXM4-80GB": 81_920,
    "NVIDIA H100 80GB HBM3": 81_559,
    "NVIDIA H100 PCIe": 81_559,
    "NVIDIA H100 NVL": 95_830,
    "NVIDIA H200": 143_771,
    "NVIDIA H200 NVL": 143_771,
    "NVIDIA H20": 97_871,
    "NVIDIA H20-3e": 143_771,
    "NVIDIA GH200 480GB": 97_871,
    "NVIDIA B200": 183_359,
    "NVIDIA GB200": 189_471,
    "NVIDIA B300 SXM6 AC": 275_040,
    "NVIDIA GB300": 284_208,
    "NVIDIA GB10": 122_570,
    "NVIDIA L4": 23_034,
    "NVIDIA L40": 46_068,
    "NVIDIA L40S": 46_068,
    "NVIDIA A40": 46_068,
    "NVIDIA A10G": 23_028,
    "Tesla T4": 15_360,
    "Tesla V100-SXM2-16GB": 16_384,
    "Tesla V100-SXM2-32GB": 32_768,
    "Tesla V100-PCIE-16GB": 16_384,
    "Tesla V100S-PCIE-32GB": 32_768,
    "Quadro RTX 6000": 24_576,
    "Quadro RTX 8000": 49_152,
    "NVIDIA RTX A6000": 49_140,
    "NVIDIA RTX 6000 Ada Generation": 49_140,
    "NVIDIA RTX 4000 SFF Ada Generation": 20_475,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 97_887,
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": 97_887,
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": 97_887,
    "NVIDIA RTX PRO 5000 Blackwell": 48_935,
    "NVIDIA RTX PRO 5000 72GB Blackwell": 73_415,
    "NVIDIA GeForce RTX 3090": 24_576,
    "NVIDIA GeForce RTX 3090 Ti": 24_564,
    "NVIDIA GeForce RTX 4090": 24_564,
    "NVIDIA GeForce RTX 4090 D": 24_564,
    "NVIDIA GeForce RTX 4090 Laptop GPU": 16_376,
    "NVIDIA GeForce RTX 4080 SUPER": 16_376,
    "NVIDIA GeForce RTX 5090": 32_607,
    "NVIDIA TITAN RTX": 24_576,
    "AMD Instinct MI300X": 196_592,
    "AMD Instinct MI300X OAM": 196_592,
    "AMD Instinct MI250X/MI250": 65_520,
}


@pytest.mark.parametrize("name", PRINTED)
def test_a_printed_name_has_the_memory_that_is_printed(name: str) -> None:
    """In any case, with a number, hyphens for spaces (as Kubernetes labels nodes), or as `nvidia-smi -L` has it;
    with the memory beside it, that counts.

    The vendor's nominal memory is up to 8 % more where ECC takes some.
    """
    mib = parse_gpus(name).bytes / 2**20
    assert 0.96 * PRINTED[name] <= mib <= 1.09 * PRINTED[name]
    for other in (name.upper(), name.lower(), name.replace(" ", "-"), f"GPU 7: {name} (UUID: GPU-0a1b-2c)"):
        gpus = parse_gpus(f"8x{other}")
        assert (gpus.count, gpus.bytes, gpus.sm) == (8, parse_gpus(name).bytes, parse_gpus(name).sm)
    row = parse_gpus(f"2x{name}, {PRINTED[name]} MiB")
    assert (row.count, row.bytes, row.sm) == (2, PRINTED[name] * 2**20, parse_gpus(name).sm)


@pytest.mark.parametrize("name", known_gpus())
def test_a_known_name_is_found_and_a_further_word_is_not_ignored(name: str) -> None:
    assert find_gpu(name, "") == find_gpu(f"NVIDIA {name.replace('-', ' ').lower()}", "") == name
    with pytest.raises(InputError):
        find_gpu(f"{name} Mobile", "")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("2xH10O", "no GPU H10O is known (did you mean H100, 80 GB?); give the memory of each, as 2x96GiB"),
        ("rtx4090ti", "(did you mean RTX-4090, 24 GB?)"),
        ("MI300", "(did you mean MI300X, 192 GB, or MI300A, 128 GB?)"),
        ("RTX 6000", "RTX-A6000, 48 GB, or RTX-PRO-6000, 96 GB, or RTX-6000-ADA, 48 GB, or QUADRO-RTX-6000, 24 GB?)"),
        ("H10O 64GB", "no GPU H10O 64GB is known; give the memory of each, as 1x64GiB, or one of "),
        ("RTX 3070", "no GPU RTX 3070 is known; give the memory of each, as 1x96GiB, or one of A10, A100, "),
        ("RTX 4060 Laptop GPU", "no GPU RTX 4060 Laptop GPU is known; give"),
        ("NVIDIA Graphics Device", "no GPU NVIDIA Graphics Device is known; give"),
        ("GRID A100-40C", "no GPU GRID A100-40C is known; give"),
        ("4xA100-SXM4-48GB", "this GPU has 40 or 64 or 80 GB, not 48; give the memory of each, as 4x48GiB"),
        ("RTX 4090 48GB", "this GPU has 24 GB, not 48; give the memory of each, as 1x48GiB"),
        ("AMD Radeon 8060S Graphics", "this GPU has 128 GB; say which, as STRIX-HALO-128"),
        ("Tesla V100", "this GPU has 16 or 32 GB; say which, as V100-16 or V100-32"),
        ("8xH100 80GB HBM3 MIG 3g.40gb", "is a slice of a GPU (MIG); give the memory of such slices, as 8x40GiB"),
        ("MIG 1g.10gb+me", "as 1x10GiB"),
    ],
)  # fmt: skip
def test_no_other_size_is_taken_or_suggested(text: str, problem: str) -> None:
    """What the remedy names is taken."""
    with pytest.raises(InputError) as refused:
        parse_gpus(text)
    assert problem in str(refused.value)
    remedies = refused.value.remedy.partition(" as ")[2].partition(", or one of ")[0].split(" or ")
    assert all(parse_gpus(remedy).count for remedy in remedies)


def test_memory_that_cpu_and_gpu_share_is_known_as_such() -> None:
    """nvidia-smi prints [N/A] for it."""
    for name in ("2xGB10", "2xNVIDIA GB10, [N/A]", "2xDGX Spark", "2xNVIDIA GB10, 122570 MiB"):
        gpus = parse_gpus(name)
        assert (gpus.count, gpus.sm, gpus.shared, gpus.utilisation) == (2, 121, True, 0.83), name
        assert 101 < gpus.bytes * gpus.utilisation / 2**30 + 2 < 104
    for name in ("Strix Halo 128GB", "Ryzen AI Max+ 395 128 GB", "8060S-128", "AMD Instinct MI300A"):
        assert parse_gpus(name).shared, name
    assert parse_gpus("Strix Halo 128GB").bytes == 96 * 2**30
    assert not parse_gpus("RTX PRO 6000").shared
    assert (parse_gpus("8xAMD Instinct MI355X").bytes, parse_gpus("MI355X").shared) == (288 * 2**30, False)


def test_a_card_is_simulated_by_a_gpus_name() -> None:
    """Of a kind that has several sizes, and of a slice, too; each kind once."""
    names = ("NVIDIA L40S", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "RTX 3080", "ADA", "NVIDIA B200", "H200")
    assert known_cards(names) == ("ampere", "ada", "hopper", "blackwell")
    for name, problem in {
        "Tesla V100-SXM2-16GB": "nothing is known of kernels on V100-16",
        "AMD Instinct MI300X": "nothing is known of kernels on MI300X",
        "RTX 6000": "no such card is known here",
    }.items():
        with pytest.raises(InputError, match=f"--as-served {name}: {problem}; give one of {', '.join(CARDS)}"):
            known_cards([name])
