"""report.html in a real headless browser: it opens from a disk, asks for nothing and complains of nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Command
from conftest import Finished

from quantizers.cli.run import run_table
from quantizers.eval.coverage.summary import summarise
from quantizers.eval.fidelity.figures import Fidelity
from quantizers.eval.report.pages import html_report, model_card
from quantizers.eval.report.plots import HIGH, LOW, coverage_figure
from quantizers.eval.report.schema import checked
from quantizers.eval.report.summary import summary
from quantizers.serving.server_commands import vllm_command

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Nesting(HTMLParser):
    """Every tag that is opened is closed, in order; and no attribute names a place outside the page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            assert key not in ("srcset", "action", "xlink:href"), (tag, key)
            assert key != "src" or str(value).startswith("data:image/png;base64,")
            assert key != "href" or value == "data:,"
            if key == "id":
                self.ids.append(str(value))
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_self_contained(finished: Finished) -> None:
    text = (finished.folder / "report.html").read_text()
    parser = Nesting()
    parser.feed(text)
    assert parser.open == []
    wanted = "gates settings plan calibration coverage layers kl audit consumers serving versions"
    assert set(parser.ids) == set(wanted.split())
    assert "<script" not in text
    assert "url(" not in text
    assert not re.search(r"https?://", text)


def test_run_and_report_write_the_same_page(finished: Finished, tmp_path: Path, command: Command) -> None:
    """And it holds no times, so that two runs give the same one."""
    target = tmp_path / "page.html"
    assert command("report", finished.folder, "--output", target) == 0
    assert str(target) in command.out
    assert target.read_bytes() == (finished.folder / "report.html").read_bytes()


@pytest.mark.altered_report
def test_a_report_of_another_version_is_refused(finished: Finished, tmp_path: Path, command: Command) -> None:
    report = {key: value for key, value in finished.report.items() if key != "gates"}
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert command("report", tmp_path) == 2
    assert command.err.startswith(f"quantize: {tmp_path / 'report.json'}: gates: Field required; take the version ")
    assert not (tmp_path / "report.html").exists()


def test_text_is_escaped(finished: Finished) -> None:
    report: dict[str, Any] = json.loads(json.dumps(finished.report))
    report["audit"]["differences"] = ["<script>alert(1)</script>"]
    report["layers"][0]["fallbacks"] = ["expert 5: 0 routed tokens & <b>no</b>"]
    report["notes"] = ["<img src=x>", "`quantize <b>` does"]
    text = html_report(checked(report), {})
    Nesting().feed(text)
    assert "&lt;script&gt;alert(1)" in text
    assert "<img" not in text
    assert "<code>quantize &lt;b&gt;</code> does" in text


def test_smaller_shares_are_one_line_wherever_a_run_is_shown(finished: Finished) -> None:
    """Counted from the coverage that the same report holds; no expert of them is among the fallbacks."""
    report: dict[str, Any] = json.loads(json.dumps(finished.report))
    few = [n for layer in report["coverage"]["per_layer"] for n in layer["routed_tokens"] if n < 128]
    assert 0 < len(few) < 64
    line = f"{len(few)} of 64 experts got fewer than 128 routed tokens and rely on all tokens in part (smallest share "
    assert [words for layer in report["layers"] for words in layer["fallbacks"] if "routed tokens" in words] == []
    shown = (
        html_report(checked(report), {}),
        model_card(checked(report)),
        run_table(checked(report), Path("out"), "source", "mine.yaml"),
    )
    shares = [[float(one) for one in re.findall(rf"{re.escape(line)}(\S+) of 0\.9\)", text)] for text in shown]
    assert shares == [[pytest.approx(0.9 * min(few) / 128, abs=0.006)]] * 3
    for layer in report["layers"]:
        layer["leaning"]["experts"] = 0
    assert [text.count("rely on all") for text in (html_report(checked(report), {}), model_card(checked(report)))] == [
        0,
        0,
    ]


def cells(tokens: list[list[int]], minimum: int) -> tuple[Any, Any]:
    """The image of a heat map, and its axes."""
    counts = [np.array([row]) for row in tokens]  # of one category
    layers = summarise(counts, ["x"], minimum, range(len(counts))).per_layer
    axes = coverage_figure(layers, minimum, "x").axes[0]
    return axes.images[0], axes


def test_uncovered_experts_are_marked() -> None:
    """They have no colour of the scale, and a cross each, at their expert and layer."""
    image, axes = cells([[100, 0, 10], [3, 50, 1]], minimum=2)
    assert image.get_array().mask.tolist() == [[False, True, False], [False, False, True]]
    assert axes.collections[0].get_offsets().tolist() == [[1, 0], [2, 1]]
    assert image.get_array()[0, 2] == pytest.approx(10 / (110 / 3))


def test_a_load_has_one_colour_in_every_report() -> None:
    """Half of an even load looks alike beside any other load, and in sets of any size."""

    def colour(tokens: list[int], expert: int) -> Any:
        image, _ = cells([tokens], 1)
        return image.cmap(image.norm(image.get_array()))[0, expert].tolist()

    assert colour([50, 100, 100, 150], 0) == colour([5000, 1, 1, 34998], 0)
    assert colour([50, 100, 100, 150], 1) != colour([50, 100, 100, 150], 0)
    norm = cells([[1, 2]], 1)[0].norm
    assert (norm.vmin, norm.vmax) == (LOW, HIGH)
    assert float(norm(1.0)) == pytest.approx(0.5), "an even load is in the middle of the logarithmic scale"


def test_the_summary_holds_the_kl_against_the_recipes_limit(finished: Finished) -> None:
    report: dict[str, Any] = json.loads(json.dumps(finished.report))
    gate = {"passed": True, "value": 0.0, "meaning": "x", "limit": 0.25}
    report["gates"] = [gate | {"name": "audit"}, gate | {"name": "kl"}]
    report["kl"]["mean"] = 0.0123
    gates, kl = summary(checked(report))
    assert gates == "All 2 gates passed."
    assert kl.startswith("KL 0.0123 nats per token on ")
    assert "within the limit of 0.25 that its recipe sets" in kl
    report["gates"][1] |= {"passed": False, "limit": 0.01}
    gates, kl = summary(checked(report))
    assert gates == "1 of 2 gates failed: kl."
    assert "above the limit of 0.01 that its recipe sets" in kl
    text = html_report(checked(report), {})
    assert 'class="summary failed"' in text
    assert "1 of 2 gates failed: kl." in text
    report["gates"].pop()
    assert "its recipe sets no limit" in summary(checked(report))[1]
    report = {key: value for key, value in report.items() if key not in Fidelity.model_fields}
    assert summary(checked(report)) == ["The only gate passed."]
    assert 'class="summary"' in (finished.folder / "report.html").read_text()


def test_the_page_serves_as_the_card_does(finished: Finished) -> None:
    """The same options; and no command for a family that vLLM does not know."""
    report: dict[str, Any] = json.loads(json.dumps(finished.report))
    report["serving"] |= {"parsers": {"tool-call-parser": "x<y"}, "sampling": {"top_k": 40}}
    command = vllm_command(checked(report).serving, "PATH_OR_ID")
    assert command in model_card(checked(report))
    assert "--enable-auto-tool-choice" in command
    assert command.replace("PATH_OR_ID", ".") in unescape(html_report(checked(report), {}))
    report["serving"]["servers"] = []
    assert "vllm serve" not in html_report(checked(report), {})


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
def test_a_browser_shows_it_without_error_or_request(finished: Finished, tmp_path: Path) -> None:
    """And a page that does either is noticed."""
    text = (finished.folder / "report.html").read_text()
    spoilt = text.replace("</body>", '<img src="http://x.invalid/a.png"><script>console.error("no")</script></body>')
    assert look(spoilt, tmp_path / "spoilt")[:2] == (1, True), "an error or a request would not be noticed"
    requests, complaints, dom = look(text, tmp_path / "page")
    assert (requests, complaints) == (0, False)
    assert dom.count("<img") == dom.count("><b>drawn</b>") == 4
    assert dom.count("<h2>") == 11


def look(text: str, folder: Path) -> tuple[int, bool, str]:
    """Open a page from the disk: what it asked for, whether the console has a word, and its DOM with drawn images."""
    folder.mkdir()
    mark = "document.images].forEach(i => i.naturalWidth > 100 && i.insertAdjacentHTML('afterend', '<b>drawn</b>'))"
    count = "document.title = 'asked ' + performance.getEntriesByType('resource').length"
    script = f"<script>addEventListener('load', () => {{ [...{mark}; {count} }})</script>"
    (folder / "report.html").write_text(text.replace("</body>", f"{script}</body>"))
    assert CHROMIUM is not None
    words = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
        "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr",
        "--dump-dom", (folder / "report.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    asked = re.search(r"<title>asked (\d+)</title>", done.stdout)
    assert asked is not None
    return int(asked[1]), "CONSOLE" in done.stderr, done.stdout
