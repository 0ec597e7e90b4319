"""What an error tells a user to do, done literally: the command lines that its remedy makes of the one that failed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

Part = tuple[str, ...]  # the command with its arguments, or an option with its values
PROSE = "and|or|with|to|goes?|is|in|for|instead|at|as|names?|says|choose|scores|holds?|prints"  # no value of an option
OPTION = re.compile(rf"--[a-z][a-z-]*(?: (?!(?:{PROSE})\b)(?:[^-\s;`,:'=][^\s;`,'=]*)?(?:='[^']*'|=[^\s;`,]+)?)?")
KEY = re.compile(r"([a-z_]+(?:\.[a-z_]+)*): (\S+)$")
EXAMPLES = {
    "experts.budget": "1MB",
    "verify.perplexity.data": "held-out",
}  # of keys that a remedy names without a value


def followed(words: Sequence[str], errors: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """The command lines that follow the remedies of all errors of one line; one for each alternative that they name.

    Alternatives in mere words, such as `or shorter sequences`, are passed over.

    Args:
        words: the command, its arguments, and then its options.
        errors: place, problem and remedy of each, as `QuantizeError.as_dict` gives them.

    Raises:
        ValueError: a remedy has no alternative that names an option, a key or a command.
    """
    lines: list[list[Part]] = [_parts(words)]
    for error in errors:
        changes = list(filter(None, (_change(error, text) for text in _alternatives(error["remedy"]))))
        if not changes:
            raise ValueError(f"nothing to follow in {error}")
        most = max(len(lines), len(changes))
        lines = [_changed(lines[min(n, len(lines) - 1)], *changes[min(n, len(changes) - 1)]) for n in range(most)]
    return [[word for part in parts for word in part] for parts in lines]


def _parts(words: Sequence[str]) -> list[Part]:
    starts = [0, *(n for n, word in enumerate(words) if word.startswith("--"))]
    return [tuple(words[a:b]) for a, b in zip(starts, [*starts[1:], len(words)], strict=True)]


def _alternatives(remedy: str) -> list[str]:
    """`leave --a out, or give --b c` as its two parts; of `give one of a, b` one for each value."""
    if listed := re.search(r"give .*?one of (.*)", remedy):
        return [f"give {value}" for value in re.split(r", | and | or ", listed[1])]
    first, *others = re.split(r",? or (?!more\b)", remedy)
    verb = "give " if first.startswith("give ") else ""
    return [first, *(part if re.match(r"give|leave|write|remove|`", part) else f"{verb}{part}" for part in others)]


def _change(error: Mapping[str, str], text: str) -> tuple[list[Part], list[Part]] | None:
    """The options that a remedy takes out, and those that it puts in; None if it names nothing of the kind."""
    if command := re.search(r"(?:`|: )quantize ([^`]*)", text):
        return [()], _parts(shlex.split(command[1]))
    named = _options(error["place"]) or [("--set", f"{key[1]}=") for key in [KEY.search(error["place"])] if key]
    text = re.sub(r"leave (--\S+|it) out", r"leave out \1", text)
    puts_in, _, takes_out = re.sub(r"instead of", "leave out", text).partition("leave out ")
    out = _options(takes_out) or [("--set", f"experts.{key}=") for key in re.findall("bits|group_size", takes_out)]
    if takes_out == "it" or re.match("remove (?:it|this key|the key|one of the two keys)$", text):
        return (named or _options(error["problem"])[:1], [])
    if key := re.match(r"give ([a-z_]+(?:\.[a-z_]+)+)(?:: (\S+))?", puts_in):
        return out, [("--set", f"{key[1]}={key[2] or EXAMPLES[key[1]]}")]
    value = re.match(r"(?:give|write it as) ([^-\s]\S*?)(?: or more)?$", puts_in.rstrip(", "))
    if value and named:
        key = named[0][-1].partition("=")[0]
        return named[:1], [("--set", f"{key}={value[1]}") if named[0][0] == "--set" else (named[0][0], value[1])]
    within = _options(puts_in)
    if within and text.startswith(("write --", "write it as --")):
        out = named[:1]
    return (out, within) if out or within else None


def _changed(parts: list[Part], takes_out: Sequence[Part], puts_in: Sequence[Part]) -> list[Part]:
    for option in takes_out:
        parts = [part for part in parts if not (part[: len(option)] == option or _same_key(part, option))]
    for option in puts_in:
        parts = [
            part for part in parts if part[0] != option[0] or (option[0] == "--set" and not _same_key(part, option))
        ]
        parts.append(option)
    return parts


def _same_key(part: Part, option: Part) -> bool:
    """Whether both are `--set` with the same key."""
    keys = [each[-1].partition("=")[0] for each in (part, option) if each[:1] == ("--set",)]
    return len(keys) == 2 and keys[0] == keys[1]


def _options(text: str) -> list[Part]:
    """The options in a text, each with its value if it has one."""
    return [tuple(shlex.split(option.rstrip(":"))) for option in OPTION.findall(text)]
