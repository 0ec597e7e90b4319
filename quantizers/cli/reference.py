"""Generates what the docs say of commands, recipes and schemas: `python -m quantizers.cli.reference [--check]`.

These are docs/commands.md, recipes/README.md, the JSON schemas, and marked parts of docs/calibration.md, recipe.md
and report.md.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import cleandoc, signature
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo

from quantizers.recipe.catalogue import catalogue
from quantizers.system.package_data import shipped

from .main import app
from .schema_reference import pages

HEAD = """# Commands

Made by `python -m quantizers.cli.reference` from what `--help` says; a test keeps it so.

Exit codes: 0 done, 1 the run failed, 2 something given is wrong (one line: file, line, remedy), 3 done but a
gate failed or something differs, 130 and 143 interrupted. With `--json` a command prints one JSON object on
standard output, and everything else on standard error; `--debug` adds a traceback to an error.
"""
EVERYWHERE = {"as_json", "debug"}


@dataclass(frozen=True)
class Parameter:
    """One argument or option of a command, from its signature.

    Attributes:
        spelled: an argument's metavar, or an option's names with its value.
    """

    spelled: str
    help: str
    option: bool
    required: bool


def reference() -> str:
    """The text of docs/commands.md."""
    return HEAD + "".join(_section(f"quantize {words}", callback) for words, callback in _commands(app))


def _commands(group: typer.Typer, before: str = "") -> Iterator[tuple[str, Callable[..., Any]]]:
    """Name and function of every command; `before` is the names of the groups around it."""
    callback = group.registered_callback
    if before and callback and callback.callback:
        yield before.strip(), callback.callback
    for command in group.registered_commands:
        assert command.callback is not None
        yield before + (command.name or command.callback.__name__.replace("_", "-")), command.callback
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from _commands(inner.typer_instance, f"{before}{inner.name} ")


def _section(words: str, callback: Callable[..., Any]) -> str:
    parameters = [_parameter(name, parameter, callback) for name, parameter in signature(callback).parameters.items()]
    shown = [parameter for parameter in parameters if parameter is not None]
    usage = [
        words,
        *(p.spelled if p.required else f"[{p.spelled.strip('[]')}]" for p in shown if p.required or not p.option),
    ]
    usage += ["[OPTIONS]"] if any(p.option and not p.required for p in shown) else []
    text, _, example = cleandoc(callback.__doc__ or "").partition("Example:")
    lines = ["", f"## `{words}`", "", text.strip(), "", "```", " ".join(usage), "```", ""]
    if shown:
        lines += ["| | |", "|---|---|"]
        lines += [f"| `{p.spelled}` | {p.help} |".replace("\n", " ") for p in shown]
        lines += [""]
    return "\n".join([*lines, "```", " ".join(example.split()), "```", ""])


def _parameter(name: str, parameter: inspect.Parameter, callback: Callable[..., Any]) -> Parameter | None:
    if name in EVERYWHERE:
        return None
    annotation = get_type_hints(callback, include_extras=True)[name]
    if annotation is typer.Context:
        return None
    kind, info = get_args(annotation)[:2]
    required = parameter.default is inspect.Parameter.empty
    stated = (
        f" (default: `{parameter.default}`)" if parameter.default not in (None, False, True) and not required else ""
    )
    text = f"{info.help or ''}{stated}".replace("|", "\\|")
    if isinstance(info, ArgumentInfo):
        return Parameter((info.metavar or name.upper()).replace("|", "\\|"), text, False, required)
    # Within Annotated, typer keeps the option's first name where the default would be.
    declared = [text for text in (info.default, *(info.param_decls or ())) if isinstance(text, str)]
    spelled = ", ".join(declared).replace("/--", " / --") or f"--{name.replace('_', '-')}"
    flag = kind is bool or bool in get_args(kind)
    return Parameter(spelled if flag else f"{spelled} {_value(kind, info.metavar)}", text, True, required)


def _value(kind: Any, metavar: str | None) -> str:
    """The placeholder for an option's value: its metavar, its choices, or a word for its type."""
    kinds = [inner for inner in get_args(kind) if inner is not type(None)] or [kind]
    if metavar:
        return metavar
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    return {int: "N", float: "NUMBER", Path: "PATH"}.get(kinds[0], "TEXT")


def main() -> None:
    """Write the files; with --check, only report those that are not up to date."""
    recipes = shipped("recipes")
    docs = recipes.parent / "docs"
    wanted = {docs / "commands.md": reference(), recipes / "README.md": catalogue()} | pages(docs)
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv:
        for path in stale:
            print(f"{path.relative_to(Path.cwd())}: is not up to date; run python -m quantizers.cli.reference")
        sys.exit(1 if stale else 0)
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(wanted[path], encoding="utf-8")


if __name__ == "__main__":
    main()
