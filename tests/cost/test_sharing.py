"""Several processes, counted: what passes between them by formulas, what all of them do, and what they gain.

Legend: E experts, N units of 16 experts, H hidden, I expert width, B blocks of 8,192 rows, K experts of a token.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from counted_layer import ROWS, Size, counted

from quantizers.bench.ranks import count_ranks
from quantizers.cli import main as cli
from quantizers.cli.options import ASSUMED_DISK
from quantizers.cost.cards import CARDS, NETWORK
from quantizers.cost.counted_team import ALONE, Ranks, busiest, own_texts
from quantizers.cost.seconds import DISK, HASH, layer_seconds, writing_seconds
from quantizers.cost.sharing import PASSING, serial, shared_layer
from quantizers.cost.visit import CountedVisit
from quantizers.cost.work import Work, together
from quantizers.forward.share import Share
from quantizers.system.errors import InputError
from quantizers.system.formatting import parse_bytes
from quantizers.team.team import Team

SIZES = [Size(32, 256, 512, B=2), Size(64, 512, 256, B=4)]
H100 = CARDS["h100"]


def work_of(visit: CountedVisit) -> Work:
    return together(visit.phases.values())


def inputs(size: Size) -> int:
    """Bytes of what the experts are called with: x in bfloat16, K numbers and weights of four bytes, a yes or no."""
    return size.B * ROWS * (2 * size.H + 8 * size.K + 1)


def solved(size: Size) -> int:
    """Of each expert codes of a byte and scales of two, 24 figures of four; of the search H means and 20 losses."""
    weights = 3 * size.H * size.I
    return size.E * (weights + 2 * weights // 32 + 4 * 24 + 4 * size.H + 4 * 20)


@pytest.mark.parametrize(
    ("size", "ranks"),
    [(SIZES[0], Ranks(2, 8)), (SIZES[0], Ranks(2, 1)), (SIZES[1], Ranks(4, 8)), (SIZES[1], Ranks(4, 2))],
    ids=str,
)
def test_bytes_between_processes(size: Size, ranks: Ranks) -> None:
    """Each passes on its share, and gets those of the others; all of it between machines, if there are several."""
    work, whole = work_of(counted(size, ranks=ranks)), inputs(size) + solved(size)
    assert work.sent == whole / ranks.count
    assert work.sent + work.received == whole
    assert work.between == (whole if ranks.nodes > 1 else 0)


def test_inputs_in_host_memory_pass_between_machines_only() -> None:
    size = SIZES[1]
    here, between = (work_of(counted(size, ranks=Ranks(4, gpus), in_host_memory=True)) for gpus in (4, 2))
    assert here.sent + here.received == solved(size)
    assert between.sent + between.received == inputs(size) + solved(size)
    assert between.sent == inputs(size) / 2 + solved(size) / 4
    crossing = between.to_device + between.to_host - here.to_device - here.to_host
    assert crossing == inputs(size), "they go over the bus to the network and back"


def test_texts_at_a_border() -> None:
    """The second batch, of one text, reaches across row 16,384 of 28,000: in both lanes its rows are passed on."""
    size, texts = SIZES[0], [6000, 6000, 6000, 10000]
    phases = counted(size, texts, Ranks(2, 8)).phases
    for lane in ("reference", "candidate"):
        assert phases[lane].sent + phases[lane].received == 6000 * (2 * size.H + 4 * size.K)


@pytest.mark.parametrize("count", [2, 4])
def test_all_together_do_what_one_does_and_what_each_needs(count: int) -> None:
    """Sums over all rows are each process's own: H x H products, of which one triangle's blocks of 128 are computed."""
    size = SIZES[1]
    alone, shared = counted(size).phases, counted(size, ranks=Ranks(count, 8)).phases
    assert alone.keys() == shared.keys()
    blocks = size.H // 128
    all_rows = 2 * size.B * ROWS * size.H**2 * (blocks + 1) // (2 * blocks)
    for phase, work in alone.items():
        before, after = sum(work.flops.values()), count * sum(shared[phase].flops.values())
        if phase == "sums":
            assert after - before == pytest.approx((count - 1) * all_rows, rel=1e-3)
        elif phase not in ("solve", "audit"):  # a few numbers for the report, and two looks
            assert after == pytest.approx(before, rel=1e-6)


def test_who_has_most_to_do() -> None:
    """Oracle: a look at every rank."""
    texts = [256] * 40 + [8192] * 3
    for count, units in ((2, 16), (3, 16), (5, 7), (8, 4)):
        routed = [100_000 // (unit + 1) for unit in range(units)]
        ranks, loads = Ranks(count, 8), dict[int, tuple[int, int]]()
        for rank in range(count):
            team = Team()
            team.rank, team.count = rank, count
            tokens = sum(texts[i] for i in Share(texts, team, ROWS).owned)
            experts = team.share(units)
            loads[rank] = len(experts), sum(routed[unit] for unit in experts) + 2 * 8 * tokens
            assert sum(texts[i] for i in own_texts(ranks, rank, texts)) == tokens
        assert loads[busiest(ranks, routed, 8, texts)] == max(loads.values())
    assert sorted(i for rank in range(3) for i in own_texts(Ranks(3, 8), rank, texts)) == list(range(43))


def test_seconds_of_links_and_files() -> None:
    visit = replace(counted(SIZES[0], ranks=Ranks(2, 1)), source=6 * 10**9, shard=2 * 10**9)
    work = work_of(visit)
    waits = work.broadcasts * 0.5e-3 + work.rounds * 1e-3
    assert H100.passing(work) == pytest.approx((work.sent + work.received) / NETWORK + waits)
    assert parse_bytes(ASSUMED_DISK, "the help of --disk") == DISK
    here = replace(work, between=0)
    assert H100.passing(here) == pytest.approx((work.sent + work.received) / 300e9 + waits)
    one, two, apart = (layer_seconds(visit, H100, ranks, 2e9) for ranks in (ALONE, Ranks(2, 2), Ranks(2, 1)))
    assert H100.readers == 8
    assert one.reading == two.reading == apart.reading == 3.0
    assert one.writing == apart.writing == pytest.approx(1 + 2e9 / HASH * (1 + 1 / 8))
    assert two.writing == pytest.approx(1 + 2e9 / HASH * (1 + 1 / 4))
    assert one.files == two.files == apart.files == one.layer == two.layer == pytest.approx(4.0)  # what the disk allows
    hashed = layer_seconds(visit, H100, ALONE, 1e12)
    assert hashed.reading == pytest.approx(6e9 / HASH / 8)
    assert hashed.files == pytest.approx(hashed.writing)
    assert writing_seconds(10**9, 1e12, 1) == pytest.approx(3e9 / HASH, rel=1e-2)


def test_what_does_not_become_less() -> None:
    alone = {"phases": {"a": 8.0, "b": 1.0, "c": 4.0}}
    shared = {"ranks": 4, "phases": {"a": 2.0, "b": 1.0, "c": 0.5}, PASSING: 0.25}
    assert serial(alone, shared) == {"b": 1.0, PASSING: 0.25, "a": 0.0, "c": 0.0}
    visit = counted(SIZES[0])
    row = shared_layer(visit, H100)
    assert row["computing"] == pytest.approx(sum(row["phases"].values()))
    assert row[PASSING] == row["bytes_sent"] == row["bytes_received"] == 0


def test_a_table_of_processes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr("sys.argv", ["quantize", "bench", "count", "--like", "minimax-m2.1", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    size = ("--experts", "32", "--tokens", "8192", "--length", "1024")
    code, out, _ = said(*size, "--ranks", "4", "--gpus", "2", "--disk", "6GB", "--json")
    assert code == 0
    rows = json.loads(out)["rows"]
    assert [(row["ranks"], row["machines"]) for row in rows] == [(1, 1), (4, 2)]
    assert rows[0]["speed_up"] == rows[0]["apart"] == 1
    assert rows[1]["speed_up"] == rows[0]["layer"] / rows[1]["layer"]
    assert rows[1]["apart"] <= rows[1]["speed_up"]
    assert rows[1]["operations"] < rows[0]["operations"]
    assert rows[1]["bytes_between_machines"] == rows[1]["bytes_sent"] + rows[1]["bytes_received"]
    for wrong, words in (
        (("--ranks", "1,12"), "--ranks 12: do not fill machines of 8 GPUs"),
        (("--ranks", "two"), "--ranks two: is not a list of numbers"),
        (("--ranks", "0"), "--ranks 0: is not a list of numbers"),
        (("--ranks", "1"), "there is nothing to compare"),
        (("--gpus", "4"), "--gpus and --disk go with --ranks"),
        (("--ranks", "2", "--card", "cpu"), "its rates are not known"),
    ):
        code, _, err = said(*wrong)
        assert (code, words in err) == (2, True), err


def test_a_plan_of_several_machines(
    finished: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def plan(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr("sys.argv", ["quantize", "plan", str(finished.recipe), *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    assert "passed on in a layer" not in plan()[1]
    code, out, _ = plan("--nodes", "2", "--gpus", "2")
    assert code == 0
    assert "by 2 machines of 2 H100" in out
    assert "passed on in a layer  each process sends" in out
    several = json.loads(plan("--nodes", "2", "--gpus", "2", "--json")[1])["needs"]["several"]
    assert several["speed_up"] == several["alone"]["all"] / several["seconds"]["all"]
    assert several["layer"]["bytes_between_machines"] > 0
    code, _, err = plan("--nodes", "2", "--vram", "2x96GiB")
    assert (code, "give one or the other" in err) == (2, True)


@pytest.mark.slow
def test_eight_gpus_at_the_published_size() -> None:
    """Counted, so the same on every machine: with the whole set they are six and a half times as fast as one."""
    found = count_ranks("minimax-m2.1", 4_830_000, [8], disk=6e9)
    assert found["rows"][1]["speed_up"] > 6.5
    assert not found["rows"][1]["waits_for_files"]
    with pytest.raises(InputError, match="do not fill machines"):
        Ranks(12, 8)
