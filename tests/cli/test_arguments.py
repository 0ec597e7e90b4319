"""The public functions' arguments: a value of the wrong type is taken, or is one line that names the parameter."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import write_job

import quantizers
from quantizers.commands.arguments import accepted
from quantizers.commands.options import option_of

FUNCTIONS = [name for name in quantizers.__all__ if not name.endswith("Error")]
PARAMETERS = [(name, key) for name in FUNCTIONS for key in inspect.signature(getattr(quantizers, name)).parameters]
WRONG: list[Any] = [
    "text", "2GiB", "4", "4.0", "true", "", b"bytes", b"\xff", Path("path"), 4, -1, 10**30, 4.5, float("nan"), True,
    None, ["text"], ("text", "other", "third"), [Path("path")], [4], [None], [b"bytes"], {"key": "value"}, {4: 5},
    {"text"}, iter(["text"]), np.int64(4), np.float32(0.5), np.array(["text"]), torch.tensor(4), Decimal("4"), len,
]  # fmt: skip


def kind_of(name: str, parameter: str) -> Any:
    return typing.get_type_hints(getattr(quantizers, name), include_extras=True)[parameter]


def taken_or_refused(parameter: str, value: Any, kind: Any) -> Any:
    try:
        return accepted(parameter, value, kind)
    except quantizers.InputError as refusal:
        return refusal


@pytest.mark.parametrize(("name", "parameter"), PARAMETERS)
def test_a_value_is_of_its_type_or_one_line_names_the_parameter(name: str, parameter: str) -> None:
    """With every value in turn; what is taken has the type that the signature says, and text is never taken apart."""
    kind = kind_of(name, parameter)
    for value in WRONG:
        taken = taken_or_refused(parameter, value, kind)
        if isinstance(taken, quantizers.InputError):
            assert taken.place == parameter
            assert "\n" not in str(taken)
            continue
        assert accepted(parameter, taken, kind) == taken or taken != taken  # NaN
        if isinstance(value, str | Path) and isinstance(taken, Sequence) and not isinstance(taken, str):
            assert [str(each) for each in taken] == [str(value)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_checks_before_it_begins(name: str) -> None:
    """All parameters wrong at once are a line each, in their order; an unknown one is a TypeError that names it."""
    function = getattr(quantizers, name)
    parameters = inspect.signature(function).parameters
    with pytest.raises(quantizers.InputError) as raised:
        function(**dict.fromkeys(parameters, len))
    assert [error.place for error in raised.value.errors] == list(parameters)
    with pytest.raises(TypeError, match="nonsense"):
        function(**dict.fromkeys(parameters, len), nonsense=1)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_job(tmp_path_factory.mktemp("job"), layers=2)


def test_one_is_taken_for_a_list_of_one(recipe: Path) -> None:
    def figures(**options: Any) -> Any:
        return quantizers.plan(recipe, **options).figures

    assert figures(settings="experts.bits=3") == figures(settings=["experts.bits=3"])
    assert figures(vram="2x96GiB") == figures(vram=iter(["2x96GiB"])) == figures(vram=("2x96GiB",))
    assert figures(device_memory="2GiB") == figures(device_memory=2**31) == figures(device_memory=np.int64(2**31))
    model = recipe.parent / "model"
    wanted = figures(settings=["experts.bits=3", f"source.model={model}"])
    assert figures(settings={"experts.bits": np.int64(3), "source.model": model}) == wanted
    with pytest.raises(quantizers.InputError, match=r"^give two sets or more"):
        quantizers.compare(recipe, "embedded")
    with pytest.raises(quantizers.InputError, match=r"^settings: experts\.bits: \{3\} is no value of a recipe; give "):
        figures(settings={"experts.bits": {3}})
    with pytest.raises(quantizers.InputError, match=r"^nodes: should be greater than or equal to 1, not 0$"):
        figures(nodes=0)
    with pytest.raises(quantizers.InputError, match=r"^device_memory: '12' is not a size; write it as 96GiB or 96GB$"):
        figures(device_memory="12")


def test_options_that_are_bounded_are_so_in_python_too() -> None:
    """The bounds that the help states, of every number."""
    bounded = 0
    for name, parameter in PARAMETERS:
        kind = kind_of(name, parameter)
        option = option_of(kind)
        if option and option.min is not None:
            bounded += 1
            with pytest.raises(quantizers.InputError, match=rf"^{parameter}: should be greater than or equal to "):
                accepted(parameter, option.min - 1, kind)
    assert bounded > 5
