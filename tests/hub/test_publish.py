"""Publishing to a stand-in for the Hub on the loopback interface, by the real huggingface_hub."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPOSITORY, Finished
from hub_stand_in import HubStandIn
from publishing import REPO, TOKEN, Publish, break_a_byte, contents
from runs import private_job

from quantizers.output.manifest import write_record
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.job import prepare

# huggingface_hub's own way of sending a file by the LFS protocol, in this process.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.mark.usefixtures("no_source")
def test_published_and_equal(hub: HubStandIn, publish: Publish, folder: Path, tmp_path: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    code, out, err = publish(folder, "--repo", REPO, "--private", "--revision", "v1", "--json")
    assert code == 0, err
    result = json.loads(out)
    sent = {name: raw for name, raw in contents(folder).items() if name != "notes.txt"}
    on_hub = dict(hub.repositories[REPO]["v1"])
    assert on_hub.pop(".gitattributes")
    assert on_hub == sent
    assert hub.private == {REPO: True}
    assert list(hub.repositories[REPO]["main"]) == [".gitattributes"]
    assert {file["name"] for file in result["files"]} == set(sent)
    assert result["bytes"] == sum(map(len, sent.values()))
    kept = [path.read_bytes() for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in raw for raw in [*kept, *on_hub.values()])


@pytest.mark.slow
def test_interrupted_and_published_again(hub: HubStandIn, folder: Path, finished: Finished, tmp_path: Path) -> None:
    """In processes of their own, with the token in their environment; nothing they print contains it."""
    own = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1", "HF_DEBUG": "1"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    words = [sys.executable, "-m", "quantizers", "publish", folder, "--repo", REPO, "--source", finished.source]

    def start() -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            words, env=environment | own | {"HF_TOKEN": TOKEN}, stdout=pipe, stderr=pipe, text=True, cwd="/"
        )

    def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
        out, err = process.communicate(timeout=600)
        assert TOKEN not in out + err
        return process.returncode, out, err

    hub.stall_after = 3
    process = start()
    while not hub.stalled.wait(0.2) and process.poll() is None:
        pass
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process)
    assert code == 130, err
    assert "give the same command again" in err
    assert list(hub.repositories[REPO]["main"]) == [".gitattributes"]
    assert len(hub.received) == 3

    hub.stall_after = None
    hub.release.set()
    code, out, err = ended(start())
    assert code == 0, err
    assert "the Hub's hashes equal the local ones" in out
    on_hub = hub.repositories[REPO]["main"]
    assert {name: raw for name, raw in on_hub.items() if name != ".gitattributes"} == contents(folder)
    assert len(hub.received) == len(set(hub.received)), "an object was sent twice"


def test_a_dry_run_sends_nothing(hub: HubStandIn, publish: Publish, folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    before = contents(folder)
    code, out, err = publish(folder, "--repo", REPO, "--dry-run")
    assert code == 0, err
    assert [request for request in hub.asked if not request.startswith("GET ")] == []
    assert contents(folder) == before
    for name in before:
        assert name in out
    assert "not sent: notes.txt" in out


def fail_a_gate(folder: Path) -> None:
    report = json.loads((folder / "report.json").read_text())
    gate = {"name": "kl", "passed": False, "value": 0.5, "limit": 0.1, "meaning": "mean KL"}
    write_record(folder, report | {"gates": [gate]})


def mislead_servers(folder: Path) -> None:
    """The published mistake: no vLLM asks for experts under this name."""
    config = json.loads((folder / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["routed_experts"]
    group["targets"] = [r"re:.*block_sparse_moe\.experts\.\d+\.(w1|w2|w3)$"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.slow
def test_nothing_that_is_published_names_the_machine(hub: HubStandIn, publish: Publish, tmp_path: Path) -> None:
    """Every file but the shards, as the Hub holds it: no absolute path, no user's name, no token."""
    home = tmp_path / "somebody"
    recipe, output = private_job(home), home / "out"
    run(prepare(str(recipe)), Options(output, torch.device("cpu")))
    code, _, err = publish(output, "--repo", REPO, "--source", home / "models" / "secret-model", "--force", "a test")
    assert code == 0, err
    break_a_byte(output, "model-00002-of-00003.safetensors")  # the card then states a problem, which names files
    code, _, err = publish(output, "--repo", REPO, "--source", home / "models" / "secret-model", "--force", "a test")
    assert code == 0, err
    held = hub.repositories[REPO]["main"]
    assert json.loads(held["report.json"])["forced"]["problems"]
    texts = {name: raw for name, raw in held.items() if not name.endswith(".safetensors")}
    assert {"report.json", "recipe.yaml", "calibration.yaml", "calibration.lock.json", "report.html"} < set(texts)
    words = ("somebody", str(tmp_path), str(REPOSITORY), str(Path.home()), sys.prefix, TOKEN, "diary.jsonl")
    assert [(name, word) for name, raw in texts.items() for word in words if word.encode() in raw] == []


@pytest.mark.parametrize(
    "spoil", [break_a_byte, *(pytest.param(one, marks=pytest.mark.slow) for one in (fail_a_gate, mislead_servers))]
)
def test_a_failing_checkpoint_is_refused_unless_forced(
    hub: HubStandIn, publish: Publish, folder: Path, spoil: Any
) -> None:
    spoil(folder)
    words = (folder, "--repo", REPO)
    code, out, err = publish(*words)
    assert (code, out) == (2, "")
    assert "give --force with a reason" in err.splitlines()[-1]
    assert hub.asked == []

    code, out, err = publish(*words, "--force", "to show | a failure")
    assert code == 0, err
    assert "published though" in out
    card = hub.repositories[REPO]["main"]["README.md"].decode()
    assert "did not pass its checks and was published all the same" in card
    assert "to show | a failure" in card
    assert json.loads(hub.repositories[REPO]["main"]["report.json"])["forced"]["problems"]


def test_no_reason_publishes_changed_figures(hub: HubStandIn, publish: Publish, folder: Path) -> None:
    """Before, --force sealed a report that had been edited, and the next publishing sent it as it was."""
    report = json.loads((folder / "report.json").read_text())
    report["kl"]["mean"] = 1e-9
    (folder / "report.json").write_text(json.dumps(report))
    before = contents(folder)
    code, _, err = publish(folder, "--repo", REPO, "--force", "a test")
    assert code == 2
    assert "was modified after the run (checksum mismatch), so its figures are not published, even with --force" in err
    assert contents(folder) == before
    assert hub.repositories == {}


@pytest.mark.slow
def test_a_forced_card_is_taken_back(publish: Publish, folder: Path, finished: Finished) -> None:
    words = (folder, "--repo", REPO)
    assert publish(*words)[0] == 0
    before = contents(folder)
    break_a_byte(folder)
    assert publish(*words, "--force", "a test")[0] == 0
    assert (folder / "README.md").read_bytes() != before["README.md"]
    shutil.copy(finished.folder / "model-00002-of-00005.safetensors", folder)
    code, _, err = publish(*words)
    assert code == 0, err
    assert (folder / "README.md").read_bytes() == before["README.md"]


def test_a_hub_with_other_content(hub: HubStandIn, publish: Publish, folder: Path) -> None:
    for spoiled in ("model-00001-of-00005.safetensors", "config.json"):
        hub.damage = lambda path, raw, spoiled=spoiled: raw[:-1] + b"?" if path == spoiled else raw
        code, _, err = publish(folder, "--repo", f"me/{spoiled[:5]}")
        assert code == 1
        assert f"the Hub has other content in {spoiled}; publish again" in err


def test_a_missing_or_refused_token(publish: Publish, folder: Path) -> None:
    words = (folder, "--repo", REPO)
    code, _, err = publish(*words, token=None)
    assert (code, err.splitlines()[-1]) == (
        2,
        "quantize: no Hub token; log in with `hf auth login`, or set HF_TOKEN to one with write access",
    )
    other = "hf_" + "another" * 5
    code, _, err = publish(*words, token=other)
    assert code == 2
    assert "the Hub refuses this (401: " in err
    assert other not in err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--repo", "tiny", "write it as owner/name"),
        ("--repo", "me/a b", "write it as owner/name"),
        ("--base-model", "tiny", "write it as owner/name"),
        ("--force", " ", "give the reason, which the card states"),
        ("--license", "Apache 2", "use the Hub's identifier, such as apache-2.0, mit or other"),
    ],
)
def test_wrong_arguments(publish: Publish, folder: Path, option: str, value: str, message: str) -> None:
    code, _, err = publish(folder, "--repo", REPO, option, value)
    assert (code, err.splitlines()[-1].startswith(f"quantize: {option}")) == (2, True)
    assert err.endswith(f": {message}\n")


def test_what_is_no_finished_output(publish: Publish, folder: Path, tmp_path: Path) -> None:
    (folder / ".quantize").mkdir()
    (folder / ".quantize" / "run.json").write_text("{}")
    code, _, err = publish(folder, "--repo", REPO)
    assert code == 2
    assert f"{folder}: unfinished; finish it with the same command: the one that began it" in err
    code, _, err = publish(tmp_path, "--repo", REPO)
    assert code == 2
    assert "has no report.json of a finished run" in err
