"""What a release needs: one version, and a changelog that names it."""

from __future__ import annotations

import json
import re
import tomllib

import yaml
from commands import Command
from conftest import REPOSITORY, Finished

import quantizers


def test_there_is_one_version(finished: Finished, command: Command) -> None:
    """`--version`, report.json and the model card say the same."""
    assert command("--version", "--json") == 0
    said = json.loads(command.out)["versions"]["moe-quantizers"]
    assert said == finished.report["versions"]["moe-quantizers"] == quantizers.__version__
    card = (finished.folder / "README.md").read_text(encoding="utf-8")
    assert f"with moe-quantizers {said} (the commit with which" in card


def test_the_changelog_begins_with_this_version() -> None:
    """Between releases, where the version ends in .dev0, with what is not released; else with version and date."""
    text = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    released = rf"{re.escape(quantizers.__version__)} - \d{{4}}-\d\d-\d\d"
    heading = r"Unreleased" if quantizers.__version__.endswith(".dev0") else released
    first = re.search(r"^## (.*)$", text, re.MULTILINE)
    assert first
    assert re.fullmatch(heading, first[1])


def test_the_citation_names_this_version_and_licence() -> None:
    """The keys that CFF 1.2.0 requires are there; title and licence are those of pyproject.toml."""
    cited = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert (cited["title"], cited["license"]) == (project["name"], project["license"])
    assert cited["version"] == quantizers.__version__
