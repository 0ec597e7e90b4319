"""What `publish` checks without the source, what it writes into the card, and the list at the end of a dry run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import quantize
from conftest import Finished
from foreign import bf16_copy, experts_only
from hub_stand_in import HubStandIn
from huggingface_hub import ModelCard
from publishing import REPO, SHARD, Publish, break_a_byte, contents

from quantizers.commands import verify as verification
from quantizers.output.manifest import write_record

# huggingface_hub's own way of sending a file by the LFS protocol, in this process.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def rewrite_report(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A report with changes, and sealed again."""
    report = json.loads((folder / "report.json").read_text())
    change(report)
    write_record(folder, report)


@pytest.mark.usefixtures("no_source")
@pytest.mark.slow
def test_a_changed_byte_in_any_file_is_noticed_without_the_source(
    hub: HubStandIn, publish: Publish, folder: Path
) -> None:
    """Named by tensor, by file, or as an edited card, whose text may be edited."""
    before = contents(folder)
    assert len(before) > 15
    for name in before:
        break_a_byte(folder, name)
        code, _, err = publish(folder, "--repo", REPO)
        if name == "README.md":
            assert (code, "README.md: was edited since the run wrote it" in err) == (0, True)
            assert hub.repositories.pop(REPO)
            hub.asked.clear()
        else:
            assert code == 2, name
            named = "model.layers.1." if name == SHARD else "weight" if name.endswith(".safetensors") else name
            assert named in err.splitlines()[-1], name
            assert hub.asked == []
        for file, content in before.items():
            (folder / file).write_bytes(content)


def differ(report: dict[str, Any]) -> None:
    report["audit"]["differences"].append("x: bytes differ")


def fail_coverage(report: dict[str, Any]) -> None:
    report["gates"][-1]["passed"] = False


@pytest.mark.usefixtures("no_source")
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json: cannot be read"),
        (lambda folder: (folder / SHARD).unlink(), f"{SHARD}: named in report.json, not in the folder"),
        (lambda folder: (folder / "extra.safetensors").touch(), "extra.safetensors: weights file not in the index"),
        (lambda folder: (folder / "added.json").touch(), "added.json: not a file of this output, but loaders read it"),
        (lambda folder: rewrite_report(folder, differ), "x: bytes differ"),
        (lambda folder: rewrite_report(folder, fail_coverage), "gate coverage failed"),
    ],
)
def test_what_else_speaks_against_publishing(
    hub: HubStandIn, publish: Publish, folder: Path, spoil: Callable[[Path], object], said: str
) -> None:
    spoil(folder)
    code, _, err = publish(folder, "--repo", REPO)
    assert code == 2
    assert said in err.splitlines()[-1]
    assert hub.asked == []


@pytest.mark.altered_report
def test_the_source_is_read_on_request(
    publish: Publish, folder: Path, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real = verification.source_of

    def counted(where: Path, given: str | None, revision: str | None) -> Any:
        opened.append(str(given))
        return real(where, given, revision)

    monkeypatch.setattr(verification, "source_of", counted)
    words = (folder, "--repo", REPO, "--dry-run")
    assert publish(*words)[0] == 0
    assert opened == []
    assert publish(*words, "--thorough")[0] == 0
    assert publish(*words, "--source", finished.source)[0] == 0
    assert opened == ["None", str(finished.source)]
    rewrite_report(folder, lambda report: report["audit"].pop("digests"))
    code, out, _ = publish(*words)
    assert (code, "has no hash of it; compare it with the source by --thorough" in out) == (3, True)
    assert publish(*words, "--thorough")[0] == 0


def commands(card: str) -> list[str]:
    """What the card's commands call the checkpoint."""
    words = card.replace('("', " ").replace('"', " ").split()
    before = ("serve", "--model-path", "AutoModelForCausalLM.from_pretrained")
    return [words[i + 1] for i, word in enumerate(words[:-1]) if word in before]


@pytest.mark.usefixtures("no_source")
def test_the_card_names_the_repository_the_licence_and_the_base_model(
    hub: HubStandIn, publish: Publish, folder: Path, monkeypatch: pytest.MonkeyPatch, finished: Finished
) -> None:
    assert commands((folder / "README.md").read_text()) == ["PATH_OR_ID"] * 3
    code, _, err = publish(folder, "--repo", REPO, "--license", "apache-2.0", "--base-model", "me/tiny")
    assert (code, "the card has no" in err) == (0, False)
    card = hub.repositories[REPO]["main"]["README.md"].decode()
    assert commands(card) == [REPO] * 3
    data = ModelCard(card).data
    assert (data.license, data.base_model, data["base_model_relation"]) == ("apache-2.0", "me/tiny", "quantized")

    # An edited card keeps its text, also when the folder goes to another place; what was given before stays.
    (folder / "README.md").write_text(card.replace("## Limits", "My own words.\n\n## Limits"))
    code, _, err = publish(folder, "--repo", "me/other", "--base-model", "me/tiny-2")
    assert (code, "the card has no" in err) == (0, False)
    moved = hub.repositories["me/other"]["main"]["README.md"].decode()
    assert "My own words." in moved
    assert commands(moved) == ["me/other"] * 3
    assert ModelCard(moved).data.to_dict() == data.to_dict() | {"base_model": "me/tiny-2"}
    assert publish(folder, "--repo", "me/other", "--dry-run")[0] == 0
    monkeypatch.undo()
    assert quantize(monkeypatch, "verify", folder, "--source", finished.source) == 0


@pytest.mark.usefixtures("no_source")
def test_a_card_without_licence_and_base_model_is_warned_about(publish: Publish, folder: Path) -> None:
    rewrite_report(folder, lambda report: report["source"].update(made_from=["some/original"]))
    code, _, err = publish(folder, "--repo", REPO)
    assert code == 0
    assert "the card has no license: the source names none; give --license NAME\n" in err
    assert "the card has no base_model: the source was a folder (made from some/original according to its card)" in err
    assert not {"license", "base_model"} & ModelCard((folder / "README.md").read_text()).data.to_dict().keys()


@pytest.mark.usefixtures("no_source")
def test_a_dry_run_ends_with_what_is_done_and_what_remains(
    hub: HubStandIn, publish: Publish, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def points(*words: object, **named: Any) -> dict[str, tuple[str, str]]:
        code, out, err = publish(folder, "--repo", REPO, "--dry-run", "--json", *words, **named)
        assert code in (0, 3), err
        return {point["name"]: (point["state"], point["words"]) for point in json.loads(out)["checklist"]}

    code, out, _ = publish(folder, "--repo", REPO, "--dry-run")
    assert (code, out.splitlines()[-1]) == (0, "nothing here would stop the upload")
    assert "missing: it would be published without\nopen: only the upload itself shows this\n" in out
    assert f"{REPO}: not found; will be created with default visibility" in out
    code, out, _ = publish(folder, "--repo", REPO, "--dry-run", token=None)
    assert (code, out.splitlines()[-1]) == (3, "would stop the upload: token")
    first = points("--private", token=None)
    assert {name for name, (state, _) in first.items() if state == "missing"} == {"license", "base_model"}
    assert first["token"][0] == "stops"
    assert first["repository"][1].endswith("will be created as private")

    assert publish(folder, "--repo", REPO, "--license", "mit", "--base-model", "me/tiny")[0] == 0
    done = points()
    assert {state for state, _ in done.values()} == {"done"}
    assert done["repository"][1] == f"{REPO} exists, public"
    assert points("--private")["repository"][1].endswith("--private and --public have no effect")

    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert points()["repository"] == ("open", f"{REPO}: the Hub did not answer")


@pytest.mark.usefixtures("no_source")
def test_a_repaired_checkpoint_is_published_with_its_card(
    hub: HubStandIn, publish: Publish, finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors on the Hub are those of the finished run that its experts were taken from."""
    copy = bf16_copy(finished.source, tmp_path / "bf16")
    experts = experts_only(finished.folder, copy, tmp_path / "experts")
    fixed = tmp_path / "fixed"
    words = ("stitch", "--source", finished.source, "--experts", experts, "--output", fixed, "--repair-router")
    assert quantize(monkeypatch, *words) == 0
    code, _, err = publish(fixed, "--repo", REPO, "--base-model", "me/tiny")
    assert code == 0, err
    held = {name: raw for name, raw in hub.repositories[REPO]["main"].items() if name != ".gitattributes"}
    assert held == contents(fixed)
    assert {name for name in held if name.endswith(".safetensors")} < contents(finished.folder).keys()
    for name, raw in contents(finished.folder).items():
        if name.endswith(".safetensors") or name in ("config.json", "model.safetensors.index.json"):
            assert held[name] == raw, name
    card = held["README.md"].decode()
    assert "## What is not known" in card
    assert commands(card) == [REPO] * 3
    assert ModelCard(card).data.base_model == "me/tiny"
