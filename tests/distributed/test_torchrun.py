"""Processes of a real launcher: the bytes of one process, in two families, and whoever is killed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import families
import pytest
from launched import ACCELERATE, TORCHRUN, quantize
from runs import assert_same
from tiny import write_recipe

from quantizers.output import journal

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """From a family to a recipe, and its output by one process. One family has a dense layer and a shared expert."""

    @functools.cache
    def make(family: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(family)
        families.write_job(folder, family)
        recipe = write_recipe(folder, words=60, samples=60)  # four blocks of rows: nobody is without
        code, said = quantize(recipe, folder / "by-1", 1)
        assert code == 0, said
        return recipe, folder / "by-1"

    return make


@pytest.mark.parametrize(
    ("family", "count", "launcher"),
    [
        ("minimax_m2", 2, ACCELERATE),
        ("minimax_m2", 4, TORCHRUN),
        ("glm4_moe", 3, TORCHRUN),
    ],
    ids=str,
)
def test_the_bytes_of_one_process(
    family: str, count: int, launcher: list[str], jobs: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    recipe, one = jobs(family)
    code, said = quantize(recipe, tmp_path / "output", count, launcher)
    assert code == 0, said
    assert f"one of {count} processes" in said
    assert_same(tmp_path / "output", one)


@pytest.mark.parametrize(("family", "victim", "again"), [("minimax_m2", 1, 1), ("glm4_moe", 0, 3)])
def test_whoever_is_killed(
    family: str, victim: int, again: int, jobs: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    """Of two; the other ends with one line that names it. Then the run goes on with another number of processes."""
    (recipe, one), output = jobs(family), tmp_path / "output"
    code, said = quantize(recipe, output, 2, KILLED_RANK=str(victim))
    assert code == 1, said
    (line,) = [line for line in said.splitlines() if line.startswith("quantize: ")]
    assert line.startswith(f"quantize: rank {victim} of 2 on ")
    assert "is gone: killed, or out of memory? give the same command again to go on" in line
    assert journal.unfinished(output)
    code, said = quantize(recipe, output, again)
    assert code == 0, said
    assert_same(output, one)
