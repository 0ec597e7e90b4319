"""Hook of mkdocs: links to files beside docs/ become their names, or lead to the repository if one is known.

On GitHub `[kernels](../../quantizers/solve/kernels.py)` is a link. A site holds docs/ alone: there it is a link to
`repo_url` of mkdocs.yml, and without one the words and the file's path. A file that does not exist stays as it is, so
that `mkdocs build --strict` names it. The site's first page begins with the README's first screen.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<!!)\[(?P<words>[^\]]*)\]\((?P<path>\.\.?/[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """The page's text with links that leave docs/ replaced; mkdocs calls it for every page."""
    docs = Path(config["docs_dir"]).resolve()
    if page.file.src_uri == "index.md":
        markdown = _first_screen(docs.parent / "README.md") + markdown[markdown.index("## ") :]
    here = (docs / page.file.src_uri).parent

    def beside(link: re.Match[str]) -> str:
        target = (here / link["path"]).resolve()
        if target.is_relative_to(docs) or not target.exists() or not target.is_relative_to(docs.parent):
            return link[0]
        name = target.relative_to(docs.parent).as_posix()
        if repository := config["repo_url"]:
            return f"[{link['words']}]({repository.rstrip('/')}/blob/main/{name}{link['anchor'] or ''})"
        return f"`{name}`" if link["words"] == name else f"{link['words']} (`{name}`)"

    return _LINK.sub(beside, markdown)


def _first_screen(readme: Path) -> str:
    """The README up to where it says how to install, with its links as from docs/."""
    text = readme.read_text(encoding="utf-8").partition("## Install")[0]
    return re.sub(r"\]\((?!\w+:|#)", "](../", text).replace("](../docs/", "](")
