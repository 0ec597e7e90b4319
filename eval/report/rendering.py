"""The Jinja2 environment of the HTML report and the model card, with its filters."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from quantizers.recipe.portable import is_hub_id
from quantizers.system.formatting import gate_figures, gib, number, size


def render(template: str, **context: Any) -> str:
    """A template of this folder; in `.html.jinja` every value is escaped, in `.md.jinja` those with the filter md."""
    return _environment().get_template(template).render(context)


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


def md(text: object) -> str:
    """Plain text in Markdown: it opens no tag and is no formula."""
    marks = {"&": "&amp;", "<": "&lt;", "$": r"\$", "\n": " ", "\r": " "}
    return "".join(marks.get(char, char) for char in str(text))


def cell(text: object) -> str:
    """Plain text in a cell of a table in Markdown."""
    return md(text).replace("|", r"\|")


def code(text: object) -> str:
    """Text between backticks in Markdown, also in a cell of a table."""
    return " ".join(str(text).replace("`", "'").replace("|", r"\|").split())


def linked(model: str) -> str:
    """A model's name as Markdown: a link if it is a Hub id, else the name of its folder."""
    return f"[{model}](https://huggingface.co/{model})" if is_hub_id(model) else f"`{code(base_name(model))}`"


def base_name(model: object) -> str:
    """The last part of a Hub id or folder."""
    return str(model).rstrip("/").rpartition("/")[2]
