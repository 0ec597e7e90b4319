"""A command made from the function that does its work: its options are the function's parameters.

A command's file says what the command line has besides, and prints the result.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import InspectLoader
from importlib.util import find_spec
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from quantizers.commands import options as opt
from quantizers.distributed.process_group import ProcessGroup
from quantizers.system.errors import InputError
from quantizers.system.formatting import parse_bytes
from quantizers.system.shipped import shipped_names

from . import common


@dataclass(frozen=True)
class Call:
    """A command's function, and what the user gave it.

    Attributes:
        options: values of all its options by the parameters' names; its defaults where none was given.
        as_json: whether the result is printed as JSON.
    """

    function: str
    options: dict[str, Any]
    as_json: bool
    dist: ProcessGroup
    internal: frozenset[str]  # parameters that are no options

    def __call__(self, **more: Any) -> Any:
        """The function's result, with the options that were given, and `more` arguments."""
        module, _, name = self.function.partition(":")
        given = {key: value for key, value in self.options.items() if value not in (None, ())}
        own = {"dist": self.dist, "command": common.typed()}
        return getattr(import_module(module), name)(**given | {key: own[key] for key in self.internal} | more)


def command(
    function: str, *, rest: str = "", before: Mapping[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: makes a typer command of a function that takes a Call, and the options that only the command has.

    Args:
        function: module and name of the function that does the work, as `quantizers.commands.run:run`.
        rest: the same of a function whose keyword-only parameters its `**options` are.
        before: own options by the parameter before which the help lists them; all others come last.
    """
    parameters = _parameters(function, rest)
    options = [parameter for parameter in parameters if opt.option_of(parameter.annotation)]
    internal = frozenset(parameter.name for parameter in parameters if parameter not in options)
    places = before or {}

    def decorate(show: Callable[..., None]) -> Callable[..., None]:
        _, *after_call = signature(show, eval_str=True).parameters.values()
        own = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in after_call]

        def called(**given: Any) -> None:
            if given.get("no_picture") and given["_context"].get_parameter_source("picture").name == "COMMANDLINE":
                raise InputError(f"--picture {given['picture']}", "--no-picture draws none", "leave one of them out")
            values = {parameter.name: given[parameter.name] for parameter in options}
            call = Call(function, values, given["as_json"], given["_context"].obj, internal)
            show(call, **{parameter.name: given[parameter.name] for parameter in own})

        listed = [_keyword("_context", typer.Context)]
        for option in options:
            listed += [parameter for parameter in own if places.get(parameter.name) == option.name]
            listed.append(_typed(option))
        listed += [parameter for parameter in own if parameter.name not in places]
        listed += [_keyword("as_json", common.Json, False), _keyword("debug", common.Debug, False)]
        called.__name__ = show.__name__
        called.__doc__ = show.__doc__
        vars(called)["__signature__"] = Signature(listed)  # which typer reads by `inspect.signature`
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in listed}
        return called

    return decorate


def typer_option(name: str, kind: Any) -> Any:
    """Convert a declared option to typer's, for a command whose function is not part of `import quantizers`."""
    option = opt.option_of(kind)
    assert option is not None
    more: dict[str, Any] = {"metavar": option.metavar, "help": option.help, "min": option.min, "max": option.max}
    if option.completes:
        more["autocompletion"] = _completion(option.completes)
    if isinstance(option, opt.Argument):
        return typer.Argument(**more)
    names = option.names or (f"--{name.replace('_', '-')}",)
    if option.metavar == "SIZE":
        more["parser"] = lambda text: parse_bytes(text, names[0])
    return typer.Option(*names, **more)


def _completion(folder: str) -> Callable[[str], list[str]]:
    """For the shell: the shipped files of a folder whose names begin as the incomplete word."""
    return lambda incomplete: [name for name in shipped_names(folder) if name.startswith(incomplete)]


def _keyword(name: str, kind: Any, default: Any = Parameter.empty) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind, default=default)


def _parameters(function: str, rest: str) -> list[Parameter]:
    """Parameters with evaluated types; those of `rest` that are keyword-only instead of `**options`."""
    head = declaration(function)
    kinds = get_type_hints(head, include_extras=True)
    listed = [parameter.replace(annotation=kinds[parameter.name]) for parameter in signature(head).parameters.values()]
    if listed[-1].kind is Parameter.VAR_KEYWORD:
        listed[-1:] = [parameter for parameter in _parameters(rest, "") if parameter.kind is Parameter.KEYWORD_ONLY]
    return listed


def declaration(function: str) -> Callable[..., Any]:
    """The function without its body, read from its file: to import its module takes seconds, and help must not."""
    module, _, name = function.partition(":")
    spec = find_spec(module)
    source = spec.loader.get_source(module) if spec and isinstance(spec.loader, InspectLoader) else None
    if source is None:  # an installation without it
        whole: Callable[..., Any] = getattr(import_module(module), name)
        return whole
    statements = ast.parse(source).body
    head = next(
        statement for statement in statements if isinstance(statement, ast.FunctionDef) and statement.name == name
    )
    head.decorator_list = []
    head.returns = None
    head.body = [ast.Pass()]
    aliases = [statement for statement in statements if _is_alias(statement)]
    names = vars(opt) | {"opt": opt}
    exec(compile(ast.fix_missing_locations(ast.Module([*aliases, head], [])), module, "exec"), names)
    declared: Callable[..., Any] = names[name]
    return declared


def _is_alias(statement: ast.stmt) -> bool:
    """Whether it is an assignment of an annotated type, `Name = Annotated[...]`."""
    value = statement.value if isinstance(statement, ast.Assign) else None
    return isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name) and value.value.id == "Annotated"


def _typed(parameter: Parameter) -> Parameter:
    """The parameter as typer reads it: paths are Path, what may be repeated is a list, all other text is str."""
    kind, *_ = get_args(parameter.annotation)
    members = [member for member in get_args(kind) if member is not type(None)]
    option = opt.option_of(parameter.annotation)
    origins = {get_origin(member) for member in members or [kind]} | {get_origin(kind)}
    value = kind
    if option and (option.is_path or option.metavar in ("DIR", "FILE")):
        value = Path
    elif origins & {Sequence, Mapping}:
        value = list[str]
    elif tuple in origins:
        value = tuple[str, str]
    elif str in members:
        value = str
    default = None if parameter.default == () else parameter.default
    if default is None:
        value = value | None
    return _keyword(parameter.name, Annotated[value, typer_option(parameter.name, parameter.annotation)], default)
