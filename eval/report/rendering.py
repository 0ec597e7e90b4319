"""The Jinja2 environment of the HTML report and the model card, with its filters."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from quantizers.recipe.portable import is_hub_id
from quantizers.system.formatting import gate_figures, gib, number, size


def render(template: str, **context: Any) -> str:
    """A template of this folder; in `.html.jinja` every value is escaped, in `.md.jinja` those with the filters below.

    What is no character, such as half of a surrogate pair in a JSON file, becomes a question mark.
    """
    return _environment().get_template(template).render(context).encode(errors="replace").decode()


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("eval.report"),
        autoescape=lambda name: name is not None and name.endswith(".html.jinja"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "n": lambda value: f"{value:,}",
        "f": number,
        "size": size,
        "gib": gib,
        "md": md,
        "cell": cell,
        "code": code,
        "linked": linked,
        "is_hub_id": is_hub_id,
        "gate_figures": gate_figures,
    }
    return environment


# What Markdown or the Hub's mathematics read within a line; an underscore between two letters is none.
_MARKS = re.compile(r"[\\`*\[\]<>&$~]|(?<![^\W_])_|_(?![^\W_])|(?<!\S)#")
_OPENING = re.compile(r"[+=-]|\d+(?=[.)](?: |$))")  # what makes more than a paragraph of a line that begins with it


def md(text: object) -> str:
    """Plain text in a line of Markdown, of which nothing is a mark."""
    line = _MARKS.sub(lambda mark: f"&#{ord(mark[0])};", " ".join(str(text).split()))
    return f"&#{ord(line[0])};{line[1:]}" if _OPENING.match(line) else line


def code(text: object) -> str:
    """Text as code in a line of Markdown, between more backticks than are in it."""
    line = " ".join(str(text).split()) or " "
    ticks = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    room = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{room}{line}{room}{ticks}"


def cell(markdown: str) -> str:
    """A line of Markdown in a cell of a table."""
    return markdown.replace("|", r"\|")


def linked(model: str) -> str:
    """A model's name as Markdown: a link if it is a Hub id, else the name of its folder."""
    return f"[{md(model)}](https://huggingface.co/{model})" if is_hub_id(model) else code(base_name(model))


def base_name(model: object) -> str:
    """The last part of a Hub id or folder."""
    return str(model).rstrip("/").rpartition("/")[2]
