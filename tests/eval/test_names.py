"""Names from outside, of categories, sets, folders and tensors, in Markdown, HTML, YAML, pictures and terminals."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from conftest import Finished
from huggingface_hub import ModelCard
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from quantizers.eval.fidelity.figures import Fidelity
from quantizers.eval.report import plots
from quantizers.eval.report.pages import cell, code, front_matter, html_report, md, model_card
from quantizers.eval.report.schema import Calibration, checked
from quantizers.pipeline.report_files import read_front_matter
from quantizers.system.formatting import printable, text_table

MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])  # an independent reader, with GitHub's tables
PIECES = (
    *(
        "$",
        "$$",
        "|",
        "`",
        "``",
        "<",
        ">",
        "&",
        "&amp;",
        '"',
        "'",
        "\n",
        "\r\n",
        "\t",
        "\ufeff",
        "[bold]",
        "[/x]",
        "](y)",
        "!",
    ),
    *(
        "{{ x }}",
        "{% y %}",
        "---",
        "===",
        "- ",
        "+ ",
        "1. ",
        "2) ",
        "# ",
        ":",
        "*",
        "**",
        "_",
        "__",
        "~~",
        "\\",
        "\\(",
        "%d",
    ),
    *("😀", "中文", "ש", "\u202e", "\u200d", "\x00", "\x1b[31m", "<b>", "<!--", "</td>", "http://a.b", "x", "y", " "),
)
names = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join) | st.text(
    st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12
)
NAMES = ["".join(PIECES[i::9]) for i in range(9)] + ["a<b>&$x$|`c`", "algebra $\\frac12$ $x_", "#", "1.", "`|`", "\\|"]


def line(name: str) -> str:
    """What a reader sees of a name: one line, with a mark for what is no character."""
    return " ".join(name.split()).replace("\0", "\ufffd")


def plain(token: Token) -> str:
    """The text of an inline token in which nothing is formatted, or is code as a whole."""
    children = token.children or []
    assert {child.type for child in children} <= {"text", "text_special"} or [c.type for c in children] == [
        "code_inline"
    ]
    return "".join(child.content for child in children)


def tables(text: str) -> Iterator[list[list[Token]]]:
    """The rows of each table, with the tokens of their cells."""
    tokens, rows = MARKDOWN.parse(text), list[list[Token]]()
    for before, token in pairwise(tokens):
        if token.type == "tr_open":
            rows.append([])
        elif before.type in ("td_open", "th_open"):
            rows[-1].append(token)
        elif token.type == "table_close":
            yield rows
            rows = []


@given(names)
def test_a_name_is_read_back_from_markdown(name: str) -> None:
    """In a paragraph, a heading, a list, and cells of a table, as words and as code."""
    wanted = line(name)
    for before, kinds in (("", 3), ("# ", 3), ("- ", 7), ("> ", 5)):
        tokens = MARKDOWN.parse(f"{before}{md(name)}")
        if wanted:
            assert len(tokens) == kinds, [token.type for token in tokens]
            assert [plain(token) for token in tokens if token.type == "inline"] == [wanted]
    (inline,) = (token for token in MARKDOWN.parse(f"x {code(name)}") if token.type == "inline")
    assert (inline.children or [])[-1].content.strip(" ") == wanted
    (rows,) = tables(f"| a | b |\n|---|---|\n| {cell(md(name))} | {cell(code(name))} |")
    assert [plain(one).strip(" ") for one in rows[1]] == [wanted, wanted]


@given(names)
def test_a_name_steers_no_terminal(name: str) -> None:
    table = text_table(("name", "figure"), [(name, 1)])
    assert len(table.splitlines()) == len(table.split("\n")) == 3
    assert not set(table) & set("\x00\x1b\r\u202e")
    assert printable(table.split("\n")[2]) == table.split("\n")[2]
    assert printable("中文 😀 ש") == "中文 😀 ש"


class _Texts(HTMLParser):
    """The texts of a page, and the tags that it opens."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts, self.tags = list[str](), set[str]()
        self.feed(page)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)


@pytest.fixture
def awkward(finished: Finished) -> dict[str, Any]:
    """A report with awkward names wherever one comes from outside."""
    report = copy.deepcopy(finished.report)
    figures, row = next(iter(report["categories"].values())), next(iter(report["calibration"]["categories"].values()))
    report["categories"] = report["families"] = dict.fromkeys(NAMES, figures)
    report["calibration"] |= {"categories": dict.fromkeys(NAMES, row), "name": NAMES[0]}
    report["evaluated_on"]["name"] = NAMES[0]
    report["worst"] |= {"place": NAMES[4], "category": NAMES[5]}
    report["source"] |= {"model": NAMES[1].replace("/", ""), "revision": NAMES[2]}
    report["gates"] = [report["gates"][0] | {"name": name, "meaning": name, "passed": False} for name in NAMES]
    report["plan"]["kinds"] = [report["plan"]["kinds"][0] | {"kind": name} for name in NAMES]
    report["notes"], report["settings"]["file"] = NAMES, NAMES[3]
    report["audit"]["digests"] = dict.fromkeys(NAMES, next(iter(report["audit"]["digests"].values())))
    return report


def test_card_and_page_hold_every_name_as_it_is(finished: Finished, awkward: dict[str, Any]) -> None:
    text, usual = model_card(checked(awkward)), model_card(checked(finished.report))
    front = front_matter(checked(awkward))
    assert ModelCard(text).data.to_dict() == front
    assert ModelCard(text).data.eval_results[0].dataset_name == NAMES[0]
    assert read_front_matter(text)["model-index"][0]["name"] == front["model-index"][0]["name"]
    body, found = text.split("\n---\n", 1)[1], list(tables(text))
    for rows in found:
        assert {len(row) for row in rows} == {len(rows[0])}
    assert len(found) == len(list(tables(usual)))
    cells = {one.content for rows in found for row in rows for one in row} | {
        plain(row[0])
        for rows in found
        for row in rows[1:]
        if "strong_open" not in {c.type for c in row[0].children or []}
    }
    assert {line(name) for name in NAMES} <= cells
    headings = [token.tag for token in MARKDOWN.parse(body) if token.type == "heading_open"]
    assert headings == [t.tag for t in MARKDOWN.parse(usual.split("\n---\n", 1)[1]) if t.type == "heading_open"]
    page, before = _Texts(html_report(checked(awkward), {})), _Texts(html_report(checked(finished.report), {}))
    assert page.tags == before.tags
    assert {name.replace("\r\n", "\n") for name in NAMES} <= {one.replace("\r\n", "\n") for one in page.texts}


def test_a_picture_takes_any_name_and_no_setting_of_the_users(awkward: dict[str, Any]) -> None:
    changed = {"name": "half $\\frac$", "by_language": {"programming": {}, "spoken": {}}}
    calibration = Calibration.model_validate(awkward["calibration"] | changed)
    wanted = plots.png(plots.calibration_figure(calibration, NAMES[1]))
    with matplotlib.rc_context({"text.usetex": True, "savefig.dpi": 20, "font.size": 30}):
        assert plots.png(plots.calibration_figure(calibration, NAMES[1])) == wanted


def test_a_picture_that_fails_is_a_line(awkward: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    awkward["source"]["model"] = "tiny-minimax-m2"
    awkward = {key: value for key, value in awkward.items() if key not in Fidelity.model_fields}
    monkeypatch.setattr(plots, "calibration_figure", lambda *_: 1 / 0)
    drawn, failed = plots.draw(checked(awkward))
    assert list(drawn) == ["coverage", "layers"]
    assert failed == ["the picture of calibration could not be drawn (ZeroDivisionError: division by zero)"]
    assert "![" not in model_card(checked(awkward | {"files": []}))


@pytest.mark.slow
def test_a_notebooks_backend_is_left_alone() -> None:
    """One that matplotlib would refuse when it is imported."""
    words = "from quantizers.eval.report import plots; plots.png(plots.layers_figure({'x': {'y': [1.0]}}))"
    backend = {"MPLBACKEND": "module://not_installed.backend"}
    path = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", words], env=os.environ | backend | {"PYTHONPATH": path}, check=True)
    assert Path(plots.__file__).is_file()
