"""A stored format is one object in one file: what it says agrees with itself, and nobody else asks for its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import quantizers
from quantizers.checkpoint.safetensors_header import Spec
from quantizers.formats.format import ExpertFormat, QuantizedFormat, expert_formats, format_of
from quantizers.formats.fp8 import BLOCKS, ROWS, Fp8Blocks
from quantizers.formats.mxfp4 import Mxfp4
from quantizers.formats.mxfp8 import Mxfp8
from quantizers.formats.nvfp4 import Nvfp4
from quantizers.formats.packed_integers import CANDIDATES, Integers
from quantizers.formats.plain import BF16
from quantizers.recipe.schema import Experts, Format
from quantizers.serving.kernels import EXPERT_KERNELS

EXPERTS: list[ExpertFormat] = [*CANDIDATES, Integers(5, 64), Nvfp4(16), Nvfp4(4)]
DECLARED: list[QuantizedFormat] = [*EXPERTS, ROWS, BLOCKS, Fp8Blocks(64, 32), Mxfp8(), Mxfp4()]
CODE = Path(quantizers.__file__).parent
# Rooms and files that may ask for the name: the formats themselves, the recipe's literal, and the servers' rules.
MAY_ASK = ("formats/", "recipe/schema.py", "serving/check.py", "serving/engines.py", "serving/kernels.py")


def test_a_recipe_names_every_format_of_experts() -> None:
    assert set(get_args(Format)) == set(expert_formats())


@pytest.mark.parametrize("form", EXPERTS, ids=str)
def test_a_format_is_found_again_by_what_the_report_says_of_it(form: ExpertFormat) -> None:
    assert format_of(form.as_dict) == form
    keys = {key: value for key, value in form.as_dict.items() if key in (*form.keys, "format")}
    assert Experts.model_validate(keys).scheme == form


@pytest.mark.parametrize("form", DECLARED, ids=str)
def test_a_config_group_declares_one_format(form: QuantizedFormat) -> None:
    group = form.config_group()
    known = {*expert_formats().values(), type(ROWS), Fp8Blocks, Mxfp8, Mxfp4}
    declared = [one for kind in known if (one := kind.of_config_group(group["weights"], group["input_activations"]))]
    assert declared == [form]


@pytest.mark.parametrize("form", EXPERTS, ids=str)
def test_bits_per_weight_are_those_of_its_tensors_but_for_what_a_matrix_has_once(form: ExpertFormat) -> None:
    rows, columns = 512, 1024
    specs: list[Spec] = [spec for _, spec in form.parts((rows, columns)) if len(spec.shape) == 2]
    assert 8 * sum(spec.bytes for spec in specs) == form.bits_per_weight * rows * columns


@pytest.mark.parametrize("form", EXPERTS, ids=str)
def test_a_card_has_a_kernel_for_it_or_nothing_is_known(form: ExpertFormat) -> None:
    assert [card for card, kernels in EXPERT_KERNELS.items() if form.kind not in kernels] == [*form.unknown_on]


def test_nobody_else_asks_for_the_name_of_a_format() -> None:
    names = {BF16.kind, ROWS.kind, BLOCKS.kind} | {text for form in EXPERTS for text in (form.name, form.kind)}
    classes = {form.__name__ for form in expert_formats().values()}
    asking = [
        f"{path.relative_to(CODE)}:{node.lineno}"
        for path in shipped_files()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Compare | ast.Call | ast.MatchValue) and asks(node, names, classes)
    ]
    assert asking == []


def shipped_files() -> Iterator[Path]:
    for folder in (CODE, CODE / "eval", CODE / "stitch"):  # links, which rglob does not follow
        for path in sorted(folder.rglob("*.py")):
            if not str(path.relative_to(CODE)).startswith(MAY_ASK):
                yield path


def asks(node: ast.Compare | ast.Call | ast.MatchValue, names: set[str], classes: set[str]) -> bool:
    """Whether a test compares something with the name of a format, or asks for its class."""
    if isinstance(node, ast.Call):
        is_instance = isinstance(node.func, ast.Name) and node.func.id == "isinstance"
        return is_instance and any(isinstance(one, ast.Name) and one.id in classes for one in ast.walk(node.args[1]))
    texts = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str))
    return any(text in names for text in texts)


def test_the_search_for_names_sees_them() -> None:
    asked = ['form.name == "nvfp4"', 'kind in ("rows", "nvfp4-a4")', "isinstance(form, Nvfp4)"]
    nodes = [ast.parse(text, mode="eval").body for text in (*asked, 'engine == "gram"', "isinstance(form, Plain)")]
    found = [asks(node, {"nvfp4", "nvfp4-a4"}, {"Nvfp4"}) for node in nodes if isinstance(node, ast.Compare | ast.Call)]
    assert found == [True, True, True, False, False]
