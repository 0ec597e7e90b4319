"""The arguments of a public function, checked against its signature before it begins.

What can only be meant in one way is taken: one text or path where several are asked for, a path for a text, a size such
as `20GiB` for bytes, a number of numpy, a number as text. All else is an InputError that names the parameter.
"""

from __future__ import annotations

import functools
import os
import re
import reprlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from quantizers.system.errors import InputError
from quantizers.system.formatting import parse_bytes

Function = TypeVar("Function", bound=Callable[..., Any])
UNDERSTOOD = {"literal_error", "greater_than_equal", "less_than_equal"}  # pydantic's messages that a user understands


@dataclass(frozen=True)
class Option:
    """An option of a command. A text beside it in the type is said in Python instead of the help, where they differ.

    Attributes:
        help: one line. In Python's documentation `--as-served` becomes `as_served` by itself.
        metavar: the value's placeholder. DIR and FILE make it a path, SIZE a number of bytes such as 96GiB.
        names: on the command line; that of the parameter by default.
        min, max: of a number.
        completes: a folder of shipped files, whose names a shell completes.
        is_path: whether it is one, with another metavar.
    """

    help: str
    metavar: str | None = None
    names: tuple[str, ...] = ()
    min: float | None = None
    max: float | None = None
    completes: str | None = None
    is_path: bool = False


@dataclass(frozen=True)
class Argument(Option):
    """An argument of a command, which is given by its place."""


def checked(function: Function) -> Function:
    """Decorator: the function with arguments of the annotated types; an InputError has a line for each that is not."""
    declared = signature(function)
    kinds = get_type_hints(function, include_extras=True)
    named = {name: parameter for name, parameter in declared.parameters.items() if name in kinds}

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        given = declared.bind(*args, **options)  # its TypeError names an argument that is missing or unknown
        faults = []
        for name in named.keys() & given.arguments.keys():
            value, parameter = given.arguments[name], named[name]
            if value is not parameter.default and parameter.kind is not parameter.VAR_KEYWORD:
                try:
                    given.arguments[name] = accepted(name, value, kinds[name])
                except InputError as fault:
                    faults.append(fault)
        if faults:
            raise InputError.several(sorted(faults, key=lambda fault: list(named).index(fault.place)))
        return function(*given.args, **given.kwargs)

    return cast(Function, call)


def accepted(name: str, value: Any, kind: Any) -> Any:
    """A value as an annotated type has it. Raises InputError, whose place is `name`, if it is none."""
    from pydantic import ConfigDict, Field, TypeAdapter, ValidationError  # which is slow to import, and help needs none

    plain, option = get_args(kind)[0] if get_origin(kind) is Annotated else kind, option_of(kind)
    is_size = option is not None and option.metavar == "SIZE"
    if is_size and isinstance(value, str):
        return parse_bytes(value, name)
    least, most = (1 if is_size else option.min, option.max) if option else (None, None)
    bounded: Any = plain if least is most is None else Annotated[plain, Field(ge=least, le=most)]
    taken = _meant(value, plain)
    try:
        if isinstance(taken, bool) and bool not in _members(plain):  # which Python takes for a number
            taken = object()
        return TypeAdapter[Any](bounded, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(taken)
    except ValidationError as failure:
        first = failure.errors()[0]
        should = first["msg"].removeprefix("Input ") if first["type"] in UNDERSTOOD else f"should be {type_name(plain)}"
        raise InputError(name, f"{should}, not {reprlib.repr(value)}") from None


def _meant(value: Any, kind: Any) -> Any:
    """A value as it can only be meant: one for several as a list, a path for a text as text."""
    members = _members(kind)
    several = next((member for member in members if get_origin(member) is Sequence), None)
    if isinstance(value, os.PathLike) and not isinstance(value, Path):
        value = os.fspath(value)
    if several is not None and str not in members:
        values = [value] if isinstance(value, str | Path) else list(value) if isinstance(value, Iterator) else value
        (inner,) = get_args(several)
        return [_meant(each, inner) for each in values] if isinstance(values, list | tuple) else values
    if isinstance(value, Path) and str in members and Path not in members:
        return str(value)
    is_number = getattr(value, "ndim", None) == 0 and hasattr(value, "item")  # of numpy or torch
    return value.item() if is_number else value


def _members(kind: Any) -> tuple[Any, ...]:
    """The members of a union; the type itself if it is none."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def option_of(kind: Any) -> Option | None:
    """The option that an annotated type declares; None for a parameter that only Python has."""
    return next((note for note in get_args(kind) if isinstance(note, Option)), None)


def type_name(kind: Any) -> str:
    """A type as it is written in code: `str | Path | None`."""
    shown = kind.__name__ if isinstance(kind, type) else str(kind)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", shown)
