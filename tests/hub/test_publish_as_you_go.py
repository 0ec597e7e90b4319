"""A run that publishes as it goes, to a stand-in for the Hub on the loopback interface."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from commands import Command
from forking import Forking
from hub_stand_in import HubStandIn, reached
from launched import quantize as launched
from on_the_hub import MODEL, Watching, job_on_the_hub, sent
from publishing import REPO, TOKEN

from quantizers.output import journal, uploads
from quantizers.planning.plan import WAITING

# huggingface_hub's own way of sending a file by the LFS protocol, in this process.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

LAYERS = 6
VARYING = {"report.json", "README.md", "report.html"}  # these carry times, and the repository's name


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a recipe, with the output of a run that was not published in `whole`, and what it `needed`."""
    import torch

    from quantizers.pipeline.options import Options
    from quantizers.pipeline.pipeline import run
    from quantizers.planning.job import prepare

    folder = tmp_path_factory.mktemp("job")
    recipe = tiny.write_job(folder, layers=LAYERS, words=12, samples=2, rounding="nearest")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(journal, "check_room", lambda _, asked, less: (folder / "needed").write_text(str(asked)))
        run(prepare(str(recipe)), Options(folder / "whole", torch.device("cpu")))
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    with HubStandIn(TOKEN) as stand_in:
        reached(stand_in, tmp_path / "home", monkeypatch)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield stand_in


@pytest.fixture
def publish(job: Path, hub: HubStandIn, command: Command, tmp_path: Path) -> Iterator[Callable[..., int]]:
    """`publish(*options)`: the command; after the test the token is in no file that was made."""

    def call(*options: object) -> int:
        words = ("run", job / "recipe.yaml", "--output", tmp_path / "output", "--device", "cpu")
        code = command(*words, "--publish-as-you-go", REPO, *options)
        assert TOKEN not in command.out + command.err
        return code

    yield call
    assert [path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()] == []
    assert not any(TOKEN.encode() in raw for files in hub.repositories.values() for raw in files["main"].values())


def below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def lasting(files: dict[str, bytes]) -> dict[str, str]:
    """SHA-256 of the files that no two runs have differently."""
    return {name: hashlib.sha256(raw).hexdigest() for name, raw in files.items() if name not in VARYING}


def on_hub(hub: HubStandIn) -> dict[str, bytes]:
    return {name: raw for name, raw in hub.repositories[REPO]["main"].items() if name != ".gitattributes"}


def shards(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: raw for name, raw in files.items() if name.endswith(".safetensors")}


def test_shards_go_first_and_all_is_public_at_the_end(
    hub: HubStandIn, publish: Callable[..., int], command: Command, job: Path, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    assert publish() == 0, command.err
    assert "the card has no base_model: the source was a folder" in command.err
    assert f"{REPO}: public; the Hub's hashes equal those here" in command.err
    assert f"on Hub    {REPO}" in command.out
    assert on_hub(hub) == below(output)
    assert lasting(on_hub(hub)) == lasting(below(job / "whole"))
    assert hub.private == {REPO: False}
    assert all(private for _, private in hub.commits)
    *first, last = [set(names) for names, _ in hub.commits]
    assert set().union(*first) == set(shards(on_hub(hub)))
    assert not last & set().union(*first)
    assert f"vllm serve {REPO}" in (output / "README.md").read_text()
    before = len(hub.asked)
    assert publish("--json") == 0, command.err
    assert json.loads(command.out)["already_done"]
    assert len(hub.asked) == before
    assert command("run", job / "recipe.yaml", "--output", job / "whole", "--publish-as-you-go", REPO) == 2
    assert f"was finished before, without publishing; `quantize publish {job / 'whole'} --repo" in command.err


@pytest.mark.slow
def test_removed_shards_never_pile_up(
    hub: HubStandIn,
    publish: Callable[..., int],
    command: Command,
    job: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a Hub that is slower than the work; nor where it lost them, and they are made again."""
    output, whole, needed = tmp_path / "output", below(job / "whole"), list[int]()
    hub.slow = {"/lfs/": 0.2}
    monkeypatch.setattr(journal, "check_room", lambda _, asked, less: needed.append(asked))
    hub.damage = lambda path, raw: raw + b" " if path == "config.json" else raw
    with Watching(output / ".quantize" / "output") as watched:
        assert publish("--remove-uploaded", "--private") == 1
        assert f"{REPO}: the Hub has other content in config.json" in command.err
        hub.damage = lambda _, raw: raw
        hub.repositories[REPO]["main"].clear()
        hub.objects.clear()
        assert publish("--remove-uploaded", "--private") == 0, command.err
    assert command.err.count("made again, with the bytes that it had") == LAYERS
    assert "private, as --private says" in command.err
    assert hub.private == {REPO: True}
    sizes = sorted(map(len, shards(whole).values()))
    others = sum(len(raw) for name, raw in whole.items() if not name.endswith(".safetensors"))
    # Those that wait, one more that makes the run wait, and one that is being written: `Plan.removed_bytes`.
    assert 0 < watched.largest <= sum(sizes[-WAITING - 2 :]) + 1.1 * others < sum(sizes)
    assert int((job / "needed").read_text()) - needed[0] == sum(sizes[:3])
    assert lasting(on_hub(hub)) == lasting(whole)
    here = below(output)
    assert here == {name: raw for name, raw in on_hub(hub).items() if name not in shards(whole)}
    report = json.loads(here["report.json"])
    assert report["published"] == {"repo": REPO, "removed": sorted(shards(whole))}
    assert set(report["files"]) | {"report.json"} == set(whole)
    words_of_eval = ("eval", job / "model", output, "--data", job / "held-out.yaml")
    for words in (("verify", output), ("publish", output, "--repo", REPO), words_of_eval):
        assert command(*words) == 2
        assert len(command.err.splitlines()) == 1
        assert f"{LAYERS} more were removed here after their upload to {REPO}; `hf download {REPO}" in command.err
    for name, raw in shards(on_hub(hub)).items():
        (output / name).write_bytes(raw)
    assert command("verify", output, "--source", job / "model") == 0, command.out


# Where a process is killed: the request, whether the Hub has done it by then, and what it must have got.
COMMIT, OPENED = r"POST .*/commit/main", r"PUT .*/settings"
CUTS = [(COMMIT, False, ""), (COMMIT, True, ".safetensors"), (COMMIT, True, "config.json")]
CUTS += [(OPENED, False, ""), (OPENED, True, "")]


@pytest.mark.slow
def test_killed_wherever_the_hub_is_asked(hub: HubStandIn, job: Path, tmp_path: Path) -> None:
    """One run that is stopped at one place after the other: its shards are made once, and the files are the same."""
    own = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1", "HF_DEBUG": "1"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    output, run = tmp_path / "output", ("run", job / "recipe.yaml", "--device", "cpu", "--output")
    words = (*run, output, "--publish-as-you-go", REPO, "--remove-uploaded")
    first = (*run, tmp_path / "first")

    with Forking(tmp_path / "log", first, environment | own | {"HF_TOKEN": TOKEN}) as forking:

        def ended() -> tuple[int, str]:
            code, said = forking.ended()
            assert TOKEN not in said
            assert "made again" not in said
            return code, said

        hub.stall_after = 1
        forking.start(*words)
        assert hub.stalled.wait(300)
        os.kill(forking.process, signal.SIGINT)
        code, said = ended()  # though the upload does not end
        assert code == 130, said
        assert "give the same command again" in said
        hub.stall_after = None
        hub.release.set()

        for pattern, done, wanted in CUTS:

            def kill(request: str, pattern: str = pattern, wanted: str = wanted) -> None:
                got = hub.commits[-1][0] if hub.commits else []
                if re.fullmatch(pattern, request) and (not wanted or any(name.endswith(wanted) for name in got)):
                    forking.kill()

            hub.before, hub.after = (lambda _: None, kill) if done else (kill, lambda _: None)
            forking.start(*words)
            code, said = ended()
            assert code == -signal.SIGKILL, said
            assert all(private for _, private in hub.commits)
        assert not (output / "config.json").exists()
        hub.before = hub.after = lambda _: None
        forking.start(*words)
        code, said = ended()
        assert code == 0, said
    assert lasting(on_hub(hub)) == lasting(below(job / "whole"))
    assert below(output) == {k: v for k, v in on_hub(hub).items() if not k.endswith(".safetensors")}
    assert len(hub.received) == len(set(hub.received)), "an object was sent twice"
    assert hub.private == {REPO: False}


@pytest.mark.slow
def test_a_hub_that_fails_ends_the_run_which_goes_on(
    hub: HubStandIn,
    publish: Callable[..., int],
    command: Command,
    job: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    whole = below(job / "whole")

    def lose(request: str) -> None:
        if request == "POST /api/repos/create":
            raise ConnectionError  # the connection is closed, with no answer

    hub.after = lose
    assert publish("--remove-uploaded") == 1
    assert f"{REPO}: the upload stopped (Server disconnected" in command.err.splitlines()[-1]
    hub.after = lambda _: None
    assert hub.private == {REPO: True}
    first, second = sorted(shards(whole))[:2]
    hub.damage = lambda path, raw: raw[:-1] + b"?" if path == first else raw
    assert publish("--remove-uploaded") == 1
    assert f"{REPO}: the Hub has other content in {first}; give the same command again" in command.err.splitlines()[-1]
    hub.damage = lambda _, raw: raw
    hub.failing = {REPO}
    assert publish("--remove-uploaded") == 1
    assert f"{REPO}: the upload stopped" in command.err.splitlines()[-1]
    hub.failing = set()
    hub.limited = {f"/api/models/{REPO}/commit": 2}
    assert publish("--remove-uploaded") == 1
    assert re.search(rf"{REPO}: the upload stopped \(.*429.*\); trying again in 0.01 s", command.err)
    assert f"{REPO}: the upload stopped (" in command.err.splitlines()[-1]
    hub.limited = {f"/api/models/{REPO}/commit": 1}
    real, count = uploads.compare, iter(range(1000))

    def cut(*arguments: Any) -> Any:
        if next(count) == 2:  # turns of the thread
            raise RuntimeError("cut here")
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(uploads, "compare", cut)
        assert publish("--remove-uploaded") == 1
    assert "cut here" in command.err
    assert second in hub.repositories[REPO]["main"]
    monkeypatch.setenv("HF_TOKEN", "another")  # which does not see it, and may not make it
    assert publish("--remove-uploaded") == 2
    assert f"{REPO}: the Hub refuses this (401: Invalid" in command.err.splitlines()[-1]
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.repositories[REPO]["main"][second] = b"damaged meanwhile, and no longer here"
    assert command("run", job / "recipe.yaml", "--output", tmp_path / "output") == 2
    assert f"publishes to {REPO}, and has removed shards; give --publish-as-you-go {REPO} as before" in command.err
    assert publish("--remove-uploaded") == 0, command.err
    assert "made again" in command.err
    assert lasting(on_hub(hub)) == lasting(whole)
    assert hub.private == {REPO: False}, "the one that this run made, though it never heard of that"


@pytest.mark.slow
@pytest.mark.parametrize("remove", [False, True])
def test_a_failed_gate_leaves_it_private(
    remove: bool, hub: HubStandIn, publish: Callable[..., int], command: Command, job: Path, tmp_path: Path
) -> None:
    limit = ("--set", "verify.perplexity.max_kl=1e-9", *(["--remove-uploaded"] if remove else []))
    assert publish(*limit) == 3
    assert f"{REPO}: stays private, with shards alone: a gate failed (kl); delete it; or " in command.err
    assert set(on_hub(hub)) == set(shards(below(job / "whole")))
    assert hub.private == {REPO: True}
    assert ("published" in json.loads((tmp_path / "output" / "report.json").read_text())) == remove
    verified = command("verify", tmp_path / "output", "--source", job / "model")
    assert (verified, "were removed here after" in command.err) == ((2, True) if remove else (0, False))
    assert publish(*limit) == 3
    assert "was finished before; nothing was touched" in command.out


@pytest.mark.slow
def test_an_empty_private_repository_stays_private(
    hub: HubStandIn, publish: Callable[..., int], command: Command
) -> None:
    hub.repositories[REPO], hub.private[REPO] = {"main": {".gitattributes": b""}}, True
    assert publish() == 0, command.err
    assert f"{REPO}: private, as it was before" in command.err
    assert hub.private == {REPO: True}


def test_other_files_keep_it_private(
    hub: HubStandIn, publish: Callable[..., int], command: Command, tmp_path: Path
) -> None:
    """As does an account that may publish nothing; a shard of an adapter would change what is loaded."""
    hub.public_refused = "this organization has no public models"
    assert publish() == 2
    refused = rf"refuses this \(403: .*{hub.public_refused}.*add --private, and make it public on the Hub"
    assert re.search(refused, command.err.splitlines()[-1])
    assert (tmp_path / "output" / ".quantize" / "moving").exists()
    hub.public_refused = ""
    hub.repositories[REPO]["main"]["adapter_config.json"] = b"{}"
    assert publish() == 0, command.err
    assert f"{REPO}: private, as it has adapter_config.json, not of this output: delete that and" in command.err
    assert hub.private == {REPO: True}


def test_what_is_refused_before_anything_else(
    hub: HubStandIn, publish: Callable[..., int], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(words: str) -> None:
        assert words in command.err.splitlines()[-1]
        assert not (tmp_path / "output").exists()

    hub.repositories[REPO] = {"main": {".gitattributes": b""}}
    assert publish() == 2
    refused(f"{REPO}: is public, and nothing of a run is to be public before its proof")
    hub.private[REPO] = True
    hub.repositories[REPO]["main"]["notes.txt"] = b"mine"
    assert publish() == 2
    refused(f"{REPO}: has notes.txt, which this run did not upload")
    del hub.repositories[REPO]
    hub.role = "read"
    assert publish() == 2
    refused(f"{REPO}: this token may only read; log in")
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}\x0b!")
    assert publish() == 2
    refused("the Hub token has characters that no token has; log in")
    monkeypatch.delenv("HF_TOKEN")
    assert publish() == 2
    refused("no Hub token; log in")
    assert publish("--publish-as-you-go", "tiny") == 2
    refused("--publish-as-you-go tiny: write it as owner/name")
    for option in ("--remove-uploaded", "--private"):
        assert command("run", "any", "--output", tmp_path / "output", option) == 2
        refused(f"{option} is that of --publish-as-you-go")


def test_a_card_that_the_hub_does_not_take(
    hub: HubStandIn, publish: Callable[..., int], command: Command, tmp_path: Path
) -> None:
    """Is known before the first layer, not when all is quantized and the card is committed."""
    hub.card_errors = ['"license" must be one of [apache-2.0, mit]']
    assert publish() == 2
    assert f"{REPO}: the Hub refuses the card's front matter ({hub.card_errors[0]}); " in command.err.splitlines()[-1]
    assert REPO not in hub.repositories
    assert not list(tmp_path.glob("output/.quantize/layers/*"))


@pytest.mark.slow
def test_two_windows(hub: HubStandIn, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the Hub to the Hub: neither the source nor the output ever lies here as a whole.

    In two processes too: the shards come once, each process reads the headers, and the bytes are those of one process.
    """
    hub.repositories[MODEL] = {"main": job_on_the_hub(tmp_path)}
    monkeypatch.chdir(tmp_path)
    assert command("plan", "recipe.yaml", "--hub", "--json") == 0, command.err
    streamed, foreseen = json.loads(command.out)["source_ways"][1:]
    needed, room = foreseen["source"], foreseen["output"]
    options = ["--stream", "--window", f"{needed}B", "--remove-uploaded", "--publish-as-you-go"]
    work = tmp_path / "output" / ".quantize"
    hub.slow = {"/lfs/": 0.3}
    with Watching(work / "source") as read, Watching(work / "output") as made:
        assert command("run", "recipe.yaml", "--output", tmp_path / "output", *options, REPO) == 0, command.err
    evaluate = f"quantize eval {MODEL} {REPO} --data held-out"
    assert f"{evaluate} --stream\n      hf download {REPO} --local-dir output\n" in command.out
    assert command(*evaluate.replace("held-out", "held-out.yaml").split()[1:], "--stream") == 0, command.err
    sizes = sorted(map(len, shards(on_hub(hub)).values()))
    others = sum(len(raw) for name, raw in on_hub(hub).items() if not name.endswith(".safetensors"))
    assert 0 < read.largest <= needed == streamed["source"]
    assert 0 < made.largest <= sum(sizes[-WAITING - 1 :]) + 1.1 * others < room + others < sum(sizes)
    assert foreseen["download"] == streamed["download"]
    assert foreseen["upload"] == streamed["output"]
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
    hub.slow = {}
    before, model = sent(hub), [path.read_bytes() for path in (tmp_path / "model").glob("*.safetensors")]
    code, said = launched(tmp_path / "recipe.yaml", tmp_path / "two", 2, options=[*options, "me/two"], **environment)
    assert code == 0, said
    assert TOKEN not in said
    heads = sum(int.from_bytes(raw[:8], "little") + 8 for raw in model)
    assert sent(hub) - before <= 1.02 * sum(map(len, model)) + 2 * heads
    assert said.count("compared with the Hub's SHA-256") == 1
    assert shards(hub.repositories["me/two"]["main"]) == shards(on_hub(hub))
    assert not shards(below(tmp_path / "two"))
