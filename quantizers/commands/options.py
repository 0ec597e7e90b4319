"""Declaration of command-line options, and the options that several commands share.

An option is declared once, as a parameter of the function that does the command's work: its name, type and default
stand there, its help in the type. From `device: opt.Device = "auto"` come `--device` of the command (cli/adapter.py),
and what `documented` writes into the function's docstring, of which docs/reference/python.md is made.

The command line reads signatures without importing the modules of their bodies, since torch takes seconds: therefore a
signature uses no names but those of this module, and aliases `Name = Annotated[...]` of its own.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from inspect import cleandoc, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from quantizers.distributed.process_group import SINGLE_PROCESS, ProcessGroup

from .arguments import Argument, Function, Option, checked, option_of, type_name

# For signatures, besides what is declared here.
__all__ = [
    "SINGLE_PROCESS", "Annotated", "Any", "Argument", "Literal", "Mapping", "Option", "Path", "ProcessGroup",
    "Sequence", "option_of",
]  # fmt: skip


OUTPUT = ("--output", "-o")
Recipe = Annotated[
    str | Path,
    Argument(
        "a recipe file, the name of a shipped recipe, or the Hub id of a model that has one",
        "RECIPE",
        completes="recipes",
    ),
]
Source = Annotated[
    str | Path | None,
    Option("local folder of the source model", "DIR"),
    "local folder of the source model, instead of the recipe's",
]
SourceModel = Annotated[
    str | Path | None, Option("the source model, a folder or Hub id; the one in report.json by default")
]
Facts = Annotated[str | Path | None, Option("your own architecture spec, such as the facts.yaml of an output", "FILE")]
Settings = Annotated[
    Mapping[str, Any] | Sequence[str],
    Option(
        "override a key of the recipe, such as experts.group_size=64; null removes it; "
        "may be repeated; paths are relative to the current folder",
        "KEY=VALUE",
        ("--set",),
    ),
    'keys of the recipe to override, such as `{"experts.group_size": 64}`; None removes a key',
]
Calibration = Annotated[
    str | Path | None,
    Option(
        "calibration set to use instead of the recipe's: a file, or the name of a shipped set",
        "SET",
        completes="calibration",
    ),
]
Without = Annotated[
    Sequence[str],
    Option(
        "leave a source of the calibration set out, by its data set's id; samples of the same category take "
        "their place; may be repeated",
        "SOURCE",
    ),
    "sources of the calibration set to leave out; samples of the same category take their place",
]
TrustRemoteCode = Annotated[bool, Option("allow custom tokenizer code (model code is never executed)")]
Device = Annotated[str, Option("cpu, cuda, cuda:N, or auto (the first GPU if there is one)")]
DeviceMemory = Annotated[
    int | None,
    Option("limit the device's memory, e.g. 20GiB (slower; the output is unchanged)", "SIZE"),
    "bytes of the device's memory to use at most; the output is the same",
]
Model = Annotated[
    str | Path | None,
    Option("without a recipe, or instead of its source: a checkpoint's folder or Hub id"),
]
Data = Annotated[
    str | Path | None,
    Option("without a recipe, or instead of its set: a calibration set", "SET"),
]
EvaluationSet = Annotated[str | Path, Option("evaluation set: a file, or the name of a shipped set", "SET")]
Scratch = Annotated[str | Path | None, Option("scratch folder for activations; a temporary one by default", "DIR")]
Stream = Annotated[bool, Option("leave shards that are on the Hub there, and read what is needed", names=("--stream",))]
StreamSource = Annotated[
    bool, Option("leave the source on the Hub; fetch its shards when layers need them", names=("--stream",))
]
PublishAsYouGo = Annotated[
    str | None,
    Option("upload shards as they are finished, to a repository private until the end", "OWNER/NAME"),
    "owner/name of a repository on the Hub, to which finished shards are uploaded during the run, and the rest once "
    "all gates have passed. It is private until then; one that exists must be private and empty, and stays private",
]
RemoveUploaded = Annotated[bool, Option("with --publish-as-you-go: remove shards here once they are there")]
# What the command line passes by itself.
Dist = Annotated[ProcessGroup, "the processes that share the work; each of them calls this"]
Command = Annotated[Sequence[str], "what the user typed, named where the output is found unfinished"]


def documented(function: Function) -> Function:
    """Decorator: checks the arguments, and writes "Args" into the docstring and the plain types into the signature.

    Raises:
        ValueError: a parameter has neither an option nor a text.
    """
    given = signature(function)
    kinds = get_type_hints(function, include_extras=True)
    entries = []
    plain = []
    for name, parameter in given.parameters.items():
        words = _words(name, kinds[name], given.parameters)
        entries.append(textwrap.fill(f"{name}: {words}.", 112, subsequent_indent="    "))
        plain.append(parameter.replace(annotation=type_name(get_args(kinds[name])[0])))
    about, raises, errors = cleandoc(function.__doc__ or "").partition("\n\nRaises:")
    about, returns, result = about.partition("\n\nReturns:")
    arguments = textwrap.indent("\n".join(entries), "    ")
    documentation = "".join([about, "\n\nArgs:\n", arguments, returns, result, raises, errors, "\n"])
    call = checked(function)
    call.__doc__ = documentation
    vars(call)["__signature__"] = given.replace(parameters=plain)  # which `inspect.signature` and help() read
    return call


def _words(name: str, kind: Any, parameters: Iterable[str]) -> str:
    """Description of a parameter in Python's documentation, without a full stop."""
    option = option_of(kind)
    texts = [note for note in get_args(kind)[1:] if isinstance(note, str)]
    if texts:
        return texts[-1]
    if option is None:
        raise ValueError(f"{name}: has no help; declare an Option, or a text")
    words = option.help.replace("; may be repeated", "")
    for other in parameters:
        words = re.sub(rf"--{other.replace('_', '-')}\b", f"`{other}`", words)
    return words
