"""Several processes: the same bytes as one, one line when something fails, and nobody waits for the dead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from conftest import REPOSITORY, Finished
from one_layer import EXPERTS, GROUP, assert_same, make_layer, silu
from runs import assert_same as assert_same_output
from sets import write_set
from tiny import write_job
from torch.distributed import HashStore

from eval.coverage.measure import Question, measure_coverage
from quantizers.checkpoint.reader import open_folder
from quantizers.cli import main as cli
from quantizers.device import determinism
from quantizers.device.devices import choose_device
from quantizers.output import journal
from quantizers.plan.job import prepare
from quantizers.recipe.schema import Awq, CoverageGate, Experts
from quantizers.run.measure import measure
from quantizers.run.options import Options
from quantizers.run.pipeline import run
from quantizers.solve.gram_engine import solve
from quantizers.solve.solved import Solved
from quantizers.system.errors import InputError, Interrupted, OutputError, PeerFailed, QuantizeError
from quantizers.system.residents import Residents
from quantizers.team.ranks import ALONE, Ranks, from_environment, join
from quantizers.team.rendezvous import Rendezvous

CPU = torch.device("cpu")
Result = TypeVar("Result")


def together(count: int, folder: Path, work: Callable[[Ranks], Result]) -> list[Result | BaseException]:
    """`work` by `count` ranks, which are threads here: what each returned or raised."""
    store = HashStore()

    def one(rank: int) -> Result | BaseException:
        meeting = Rendezvous(store, rank, count)
        try:
            return work(Ranks(rank, count, rank, meeting, folder))
        except Exception as failure:
            meeting.fail(1)  # or the others would wait for ever: their process lives
            return failure

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


@pytest.fixture
def keep_sigterm() -> Any:
    """`last_words` ignores the signal from then on; here others come after it."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("count", range(1, 6))
def test_every_item_is_one_processs(count: int) -> None:
    team = [Ranks(rank, count) for rank in range(count)]
    for items in range(12):
        assert sorted(i for ranks in team for i in ranks.round_robin(items)) == list(range(items))
        assert [i for ranks in team for i in ranks.contiguous(items)] == list(range(items))
        sizes = [len(ranks.contiguous(items)) for ranks in team]
        assert max(sizes) - min(sizes) <= 1


def test_alone_nothing_happens() -> None:
    rows = torch.arange(3)
    ALONE.barrier()
    ALONE.broadcast("anything", None)
    ALONE.finish()
    assert ALONE.gather({"rows": rows}, rows.device)["rows"] is rows
    assert ALONE.rank_zero_first(lambda: 5) == 5
    assert ALONE.last_words("what happened", 2) == ("what happened", 2)


def test_rows_are_gathered_in_the_order_of_ranks(tmp_path: Path) -> None:
    """Whoever comes first, in any dtype; a rank may have none. Nothing stays behind."""

    def work(ranks: Ranks) -> dict[str, torch.Tensor]:
        time.sleep(0.02 * (3 - ranks.rank))
        own = [i for i in ranks.contiguous(6) if ranks.rank != 1]
        parts = {"a": torch.tensor(own, dtype=torch.int8), "b": torch.tensor(own).bfloat16()[:, None].expand(-1, 3)}
        return ranks.gather(parts if own else {}, CPU)

    for got in together(3, tmp_path, work):
        assert isinstance(got, dict)
        assert torch.equal(got["a"], torch.tensor([0, 1, 4, 5], dtype=torch.int8))
        assert torch.equal(got["b"], torch.tensor([0, 1, 4, 5]).bfloat16()[:, None].expand(-1, 3))
    assert not list(tmp_path.iterdir())


def test_rank_0_goes_first_and_tells(tmp_path: Path) -> None:
    made = tmp_path / "made"

    def work(ranks: Ranks) -> Any:
        if ranks.leads:
            time.sleep(0.05)
            ranks.broadcast("word", {"layers": [1, None]})
        existed = ranks.rank_zero_first(lambda: made.exists() or made.touch())
        return existed, None if ranks.leads else ranks.receive("word")

    assert together(3, tmp_path, work) == [(None, None)] + 2 * [(True, {"layers": [1, None]})]


@pytest.mark.parametrize("count", [2, 3, EXPERTS + 2])
@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize("options", [{}, {"awq": False, "rounding": "nearest", "scales": "minmax"}])
def test_a_layer_solved_by_several(count: int, unit: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Every rank gets what one process gets, bit for bit, the report's numbers and lines included."""
    layer = make_layer(3)
    settings = Experts(**({"group_size": GROUP, "awq": Awq(grid=8)} | options))

    def work(ranks: Ranks) -> Solved:
        return solve(
            layer.recorded(), layer.weights(), norm=layer.norm, router=layer.router, activation=silu,
            settings=settings, unit=unit, residents=Residents(2, unit, 0), ranks=ranks,
        )  # fmt: skip

    wanted = work(ALONE)
    for got in together(count, tmp_path, work):
        assert isinstance(got, Solved)
        assert_same(got, wanted)
        assert got.error == wanted.error
        assert got.fallbacks == wanted.fallbacks


@pytest.mark.usefixtures("keep_sigterm")
def test_the_first_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others end with the same code and say nothing; so does one that torchrun has interrupted meanwhile."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # threads may not

    def work(ranks: Ranks) -> tuple[str | None, int]:
        try:
            if ranks.rank == 1:
                raise InputError("what is wrong")
            ranks.barrier()
        except QuantizeError as failure:
            if isinstance(failure, PeerFailed) and ranks.rank == 2:
                return ranks.last_words("interrupted", 143)
            return ranks.last_words(str(failure), failure.exit_code)
        raise AssertionError("a meeting without rank 1")

    assert together(3, tmp_path, work) == [(None, 2), ("what is wrong", 2), (None, 2)]


def test_waiting_ends_with_an_interrupt(tmp_path: Path) -> None:
    def stop() -> None:
        raise Interrupted("stopped", 15)

    def work(ranks: Ranks) -> None:
        if ranks.leads:
            ranks.at(tmp_path, stop).barrier()

    ended = together(2, tmp_path, work)
    assert isinstance(ended[0], Interrupted)


@pytest.fixture
def peer() -> Any:
    """A process that has announced itself as rank 1 of 2 in a store, and sleeps."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    store = HashStore()
    store.set("pid/1", str(process.pid))
    yield process, store
    process.kill()
    process.wait()


@pytest.mark.usefixtures("keep_sigterm")
def test_a_killed_process_is_noticed(
    peer: tuple[subprocess.Popen[bytes], HashStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first look, so without waiting once."""
    process, store = peer
    ranks = Ranks(0, 2, 0, Rendezvous(store, 0, 2))
    assert ranks.rendezvous
    assert ranks.rendezvous.gone() == []
    process.kill()
    process.wait()
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waited for the dead"))
    with pytest.raises(QuantizeError, match=r"process 1 of 2 is gone: .* the same command again") as ended:
        ranks.barrier()
    assert ended.value.exit_code == 1
    # torchrun interrupts the others; that is not the reason
    said, code = ranks.last_words("interrupted by SIGTERM", 143)
    assert (str(said), code) == (str(ended.value), 1)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


@pytest.mark.usefixtures("keep_sigterm")
def test_who_has_done_its_part_is_not_missed(peer: tuple[subprocess.Popen[bytes], HashStore]) -> None:
    process, store = peer
    ranks = Ranks(0, 2, 0, Rendezvous(store, 0, 2))
    assert ranks.rendezvous
    store.set("barrier/1/1", "")
    store.set("ended/1", "")
    process.kill()
    process.wait()
    ranks.barrier()
    assert ranks.rendezvous.gone() == []
    assert ranks.last_words("interrupted by SIGTERM", 143) == ("interrupted by SIGTERM", 143)


def test_a_process_that_died_before_the_others_came(peer: tuple[subprocess.Popen[bytes], HashStore]) -> None:
    process, store = peer
    process.kill()
    process.wait()
    with pytest.raises(QuantizeError, match="process 1 of 2 is gone"):
        Rendezvous(store, 0, 2)


def test_the_environment_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert from_environment() is ALONE
    monkeypatch.setenv("WORLD_SIZE", "4")  # as on some clusters, without torchrun
    monkeypatch.setenv("RANK", "0")
    assert from_environment() is ALONE
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("RANK", "3")
    assert from_environment() == Ranks(3, 4, 3, check=from_environment().check)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(InputError, match="2 of 4 processes are on this machine; all of them must be"):
        join(from_environment())
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert join(from_environment()) is ALONE


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
@pytest.mark.usefixtures("keep_sigterm")
def test_other_commands_are_for_one_process(
    rank: int, lines: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("sys.argv", ["quantize", "recipes", "list"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == lines
    assert all(line.startswith("quantize: only run, eval and coverage work with several processes") for line in said)


def test_the_librarys_engine_is_for_one_process(tmp_path: Path, write_recipe: Callable[..., Path]) -> None:
    recipe = write_recipe(tmp_path, engine="llmcompressor")
    options = Options(tmp_path / "output", CPU, ranks=Ranks(0, 2))
    with pytest.raises(InputError, match=r"recipe\.yaml: experts\.engine: llmcompressor works in one process"):
        run(prepare(str(recipe)), options)


def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("cpu", Ranks(1, 2, 1)).type == "cpu"
    monkeypatch.setattr(determinism, "settle_gpu", lambda: None)  # it would hold for all tests after this one
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "zeros", lambda *_, **named: named["device"])
    assert choose_device("auto", Ranks(2, 4, 2)) == torch.device("cuda:2")
    assert choose_device("cuda", Ranks(2, 4, 2)) == torch.device("cuda:2")
    assert choose_device("cuda:1", Ranks(2, 4, 2)) == torch.device("cuda:1")
    assert choose_device("cuda") == torch.device("cuda")


def test_the_folder_is_held_until_the_last_has_ended(tmp_path: Path) -> None:
    """A rank that still writes after rank 0 has died keeps a new run out."""
    lead, other = Ranks(0, 2), Ranks(1, 2)
    with journal.locked(tmp_path, other):
        with pytest.raises(OutputError, match="is working here"), journal.locked(tmp_path, lead):
            pass
        with pytest.raises(OutputError, match="is working here"), journal.locked(tmp_path):
            pass
    with (
        journal.locked(tmp_path, lead),
        journal.locked(tmp_path, other),
        pytest.raises(OutputError, match="is working here"),
        journal.locked(tmp_path),
    ):
        pass
    with journal.locked(tmp_path):
        pass


def test_an_evaluation_by_several(finished: Finished, tmp_path: Path) -> None:
    """The figures of one process; cut off in one of three, it goes on with two and then alone."""
    source, candidate = open_folder(finished.source), open_folder(finished.folder)

    def work(ranks: Ranks, folder: str, done: str | None = None) -> list[dict[str, Any]]:
        def check() -> None:
            if done and ranks.rank == ranks.count - 1 and (tmp_path / folder / done).exists():
                raise QuantizeError("cut here")

        return measure(
            source, [candidate], finished.held_out, CPU, tmp_path / folder, check,
            weights=True, resumable=True, ranks=ranks,
        )  # fmt: skip

    wanted = work(ALONE, "alone")
    first, *others = together(2, tmp_path, lambda ranks: work(ranks, "two"))
    assert first == wanted
    assert others == [[]]
    for count, done in ((3, "layer-00001.json"), (2, "layer-00002.json")):
        ended = together(count, tmp_path, lambda ranks, done=done: work(ranks, "cut", done))
        assert "cut here" in str(ended[-1])
        assert (tmp_path / "cut" / done).exists()
    assert work(ALONE, "cut") == wanted


@pytest.mark.slow
def test_long_texts_by_several(finished: Finished, tmp_path: Path) -> None:
    """They have rows and figures of their own, which are those of one process too."""
    source, candidate, data = open_folder(finished.source), open_folder(finished.folder), write_set(tmp_path)
    (wanted,) = measure(source, [candidate], data, CPU, tmp_path / "alone")
    assert wanted["long"]
    first, *others = together(3, tmp_path, lambda ranks: measure(
        source, [candidate], data, CPU, tmp_path / "three", ranks=ranks,
    ))  # fmt: skip
    assert first == [wanted]
    assert others == [[], []]


@pytest.mark.slow
def test_coverage_by_several(finished: Finished, tmp_path: Path) -> None:
    question = Question(str(finished.source), "main", False, (finished.calibration,), CoverageGate(), "")
    wanted = measure_coverage(question, CPU, tmp_path)
    for got in together(3, tmp_path, lambda ranks: measure_coverage(question, CPU, tmp_path, ranks)):
        assert got == wanted


def own_lines(log: Path) -> list[str]:
    """What `quantize` itself said went wrong."""
    return [line for line in log.read_text().splitlines() if line.startswith("quantize: ")]


@pytest.mark.slow
def test_the_bytes_of_one_process_whoever_is_killed(tmp_path: Path) -> None:
    """Two, four (of which one has no sequence); three with rank 0 or 2 killed, then one or two to go on."""
    recipe = write_job(tmp_path, layers=3, samples=3)
    script = REPOSITORY / "tests" / "forked_ranks.py"
    done = subprocess.run(
        [sys.executable, "-P", str(script), str(recipe), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(script.parent), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    print(result)
    assert result["two"] == [0, 0]
    assert result["four"] == 4 * [0]
    for victim, count in ((0, 1), (2, 2)):
        name = f"cut-{victim}"
        assert result[name] == [-9 if rank == victim else 1 for rank in range(3)]
        assert result[f"{name} layers"] == 1
        assert result[f"{name} again"] == count * [0]
        assert len(own_lines(tmp_path / f"{name}.log")) == 1
        assert own_lines(tmp_path / f"{name}.log")[0].startswith(f"quantize: process {victim} of 3 is gone")
        assert_same_output(tmp_path / name, tmp_path / "one")
    for name in ("two", "four"):
        assert_same_output(tmp_path / name, tmp_path / "one")
        table = (tmp_path / f"{name}.log").read_text()
        assert table.count("what it is") == 1
        assert table.count("quantizing: layer 3 of 3") == 1
    assert "Traceback" not in "".join(log.read_text() for log in tmp_path.glob("*.log"))


@pytest.mark.slow
def test_torchrun_on_the_tiny_model(tmp_path: Path, write_recipe: Callable[..., Path]) -> None:
    """By one, two and four processes of torchrun's; then two of which one is killed, and one that goes on."""
    recipe = write_recipe(tmp_path / "recipe")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
    }

    def run_by(count: int, name: str, *program: str, **more: str) -> tuple[int, Path]:
        """The command's exit code and its log; `program` is `quantize` unless something else is said."""
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(count)] if count > 1 else []
        command = [*launcher, *(program or ("-m", "quantizers")), "run", str(recipe), "--output", str(tmp_path / name)]
        log = tmp_path / f"{name}-{count}.log"
        with log.open("w") as stream:
            done = subprocess.run(
                [sys.executable, *command], stdout=stream, stderr=stream, env=environment | more, check=False
            )
        return done.returncode, log

    for count in (1, 2, 4):
        code, log = run_by(count, f"by-{count}")
        assert code == 0, log.read_text()
    for count in (2, 4):
        assert_same_output(tmp_path / f"by-{count}", tmp_path / "by-1")

    code, log = run_by(2, "cut", str(REPOSITORY / "tests" / "stopping.py"), KILLED_RANK="1")
    assert code == 1, log.read_text()
    assert [path.name for path in (tmp_path / "cut" / journal.WORK / "layers").iterdir()] == ["00000.json"]
    said = own_lines(log)
    assert len(said) == 1
    assert said[0].startswith("quantize: process 1 of 2 is gone")
    assert "exitcode  : 1 " in log.read_text()  # of rank 0, in torchrun's summary
    assert run_by(1, "cut")[0] == 0
    assert_same_output(tmp_path / "cut", tmp_path / "by-1")
