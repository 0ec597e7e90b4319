"""`quantize serve-check` against servers on the loopback interface, whose models are transformers' whole ones."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import families
import pytest
import tiny
import torch
from commands import Command
from conftest import REPOSITORY, VLLM_PYTHON, Finished, needs_vllm
from probed import ENGINE
from runs import change
from server_stand_in import Logs, ServerStandIn, logs_of
from source_forms import write_plain
from torch import Tensor
from whole_models import finished_weights, source_weights

import quantizers
from quantizers.calibration.load_set import load_set
from quantizers.pipeline.options import Options
from quantizers.pipeline.pipeline import run
from quantizers.planning.job import prepare
from quantizers.serving.schema import ServeCheckReport
from quantizers.serving.served import bounded_kl, verdict
from quantizers.serving.server import kernel_lines

WORDS = 320  # the random model's vocabulary


@dataclass(frozen=True)
class Plain:
    """A random Qwen3-MoE in bfloat16, a set of four texts, and the model in float32 by transformers."""

    folder: Path
    data: Path
    texts: list[list[int]]
    logs: Logs


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, whole_model: Callable[..., Any]) -> Plain:
    folder = tmp_path_factory.mktemp("served")
    model = write_plain(folder / "model", "qwen3_moe")
    tiny.write_recipe(folder)
    texts = [sample.tokens.tolist() for sample in load_set(folder / "held-out.yaml", str(model)).samples]
    return Plain(model, folder / "held-out.yaml", texts, logs_of(whole_model(*source_weights(model))))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file goes into the current folder where there is no report.json."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def written(path: Path = Path("serve-check.json")) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text())
    ServeCheckReport.model_validate(report)
    return report


# The bound ---------------------------------------------------------------------------------------------------------


def distributions(seed: int, distance: float) -> tuple[Tensor, Tensor]:
    """(64, 500) float32 log-probabilities of p, and of a q that is this far away."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(64, 500, generator=generator)
    other = logits + distance * torch.randn(64, 500, generator=generator)
    return torch.log_softmax(logits, -1), torch.log_softmax(other, -1)


def test_the_bound_is_below_the_whole_divergence_and_reaches_it_with_all_ids() -> None:
    p, q = distributions(0, 0.5)
    whole = (p.double().exp() * (p.double() - q.double())).sum(-1)
    before = torch.zeros(64, dtype=torch.float64)
    for count in (1, 5, 20, 100, 500):
        logs, ids = q.topk(count)
        bound, rest = bounded_kl(p, ids, logs.double())
        assert bool((bound <= whole + 1e-6).all())
        assert bool((bound >= before - 1e-6).all()), "a finer division of events is no closer"
        outside = torch.ones(64, 500).scatter(1, ids, 0).bool()
        assert rest.numpy() == pytest.approx(p.double().exp().mul(outside).sum(1).numpy(), abs=1e-6)
        before = bound
    assert before.numpy() == pytest.approx(whole.numpy(), abs=1e-6)
    assert float(whole.mean()) > 0.05


def test_equal_distributions_are_not_told_apart_by_rounding() -> None:
    p, q = distributions(1, 1e-7)
    for count in (1, 20, 499, 500):
        logs, ids = q.topk(count)
        assert float(bounded_kl(p, ids, logs.double())[0].max()) < 1e-10


def test_padding_and_impossible_tokens_count_nothing_and_something() -> None:
    p, q = distributions(2, 0.5)
    logs, ids = q.double().topk(20)
    wanted, rest = bounded_kl(p, ids, logs)
    padded = torch.cat([ids, torch.full((64, 3), -1)], 1), torch.cat([logs, torch.full((64, 3), -math.inf)], 1)
    found, same_rest = bounded_kl(p, *padded)
    assert torch.equal(found, wanted)
    assert torch.equal(rest, same_rest)
    logs[:, 0] = -9999.0
    assert bool((bounded_kl(p, ids, logs)[0] > wanted).all())
    assert bool(bounded_kl(p, ids, torch.full_like(logs, -9999.0))[0].isfinite().all())


def test_the_verdict_of_an_exact_server() -> None:
    def of(mean: float, median: float) -> dict[str, Any]:
        kl = {"candidate_server": {"mean": mean, "median": median}}
        found = {"kl": kl, "top1": 0.99, "outside": 0.0, "perplexity": {"candidate": 2.0, "server": 2.0}}
        return verdict(found, exact=True, source_figures=None)

    assert of(9e-7, 1e-8)["passed"]
    tied = of(3e-5, 1e-12)
    assert tied["passed"]
    assert "near tie" in tied["said"][0]
    assert not of(3e-5, 1e-8)["passed"]
    assert not of(2e-4, 1e-12)["passed"]


# A server that is right --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.slow
def test_an_exact_server_is_found_exact(kind: str, plain: Plain, command: Command) -> None:
    with ServerStandIn(plain.logs, kind) as server:
        words = ("--server", f"{server.url}/v1", "--data", plain.data, "--exact")
        assert command("serve-check", plain.folder, *words) == 0, command.err
        assert server.texts == plain.texts
        first = Path("serve-check.json").read_bytes()
        assert command("serve-check", plain.folder, *words, "--json", "--output", "again.json") == 0
    report = written()
    assert report["figures"]["kl"]["candidate_server"]["mean"] < 1e-11
    assert report["figures"]["top1"] == 1
    nll = [-plain.logs(t)[:-1].gather(1, torch.tensor(t[1:])[:, None]).double() for t in plain.texts]
    wanted = math.exp(float(torch.cat(nll).mean()))
    assert report["figures"]["perplexity"]["server"] == pytest.approx(wanted, rel=1e-9)
    assert report["figures"]["perplexity"]["candidate"] == pytest.approx(wanted, rel=1e-6)
    inside = torch.cat([plain.logs(t)[:-1].exp().topk(20).values.sum(1) for t in plain.texts])
    assert report["figures"]["outside"] == pytest.approx(1 - float(inside.mean()), abs=0.01)  # and the next token
    assert report["server"]["version"] == "0.32.0"
    assert "source" not in report
    assert json.loads(command.out) == report == written(Path("again.json"))
    assert first == Path("again.json").read_bytes()


def test_texts_are_cut_where_the_server_ends_which_is_said(plain: Plain, command: Command) -> None:
    with ServerStandIn(plain.logs, max_model_len=101) as server:
        assert command("serve-check", plain.folder, "--server", server.url, "--data", plain.data) == 0
        assert server.texts == [text[:100] for text in plain.texts]
    assert "4 of 4 texts are longer than the 100 tokens that the server takes" in command.err
    report = written()
    assert report["data"]["cut"] == 4
    assert report["data"]["cut_tokens"] == sum(map(len, plain.texts)) - 400
    assert report["figures"]["tokens"] == 4 * 99
    assert "no limit was applied; where this is a source" in command.out
    assert report["verdict"]["limit"] is None


def test_the_log_names_kernels(plain: Plain, command: Command, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text(
        "INFO [a.py:1] Using MARLIN WNA16 MoE backend\nINFO Loading\nINFO [b.py:2] Using FlashAttention backend.\n"
        "(Worker) INFO [a.py:1] Using MARLIN WNA16 MoE backend\nAttention backend not set. Use flashinfer backend.\n"
    )
    kernels = ["Using MARLIN WNA16 MoE backend", "Using FlashAttention backend.", "Use flashinfer backend."]
    assert kernel_lines(log.read_text().splitlines()) == kernels
    with ServerStandIn(plain.logs) as server:
        words = ("--server", server.url, "--data", plain.data, "--server-log")
        assert command("serve-check", plain.folder, *words, tmp_path / "none.log") == 2
        assert "none.log: cannot be read" in command.err
        assert command("serve-check", plain.folder, *words, log) == 0
    assert written()["server"]["kernels"] == kernels


def test_sglang_takes_shorter_texts_than_its_context(plain: Plain, command: Command) -> None:
    with ServerStandIn(plain.logs, "sglang", info={"max_req_input_len": 51}) as server:
        assert command("serve-check", plain.folder, "--server", server.url, "--data", plain.data) == 0
        assert server.texts == [text[:50] for text in plain.texts]
    assert written()["server"]["kind"] == "SGLang"


# One that is wrong: exit 3 -----------------------------------------------------------------------------------------


def shuffled(logs: Logs) -> Logs:
    """The model with its vocabulary in another order."""
    order = torch.randperm(WORDS, generator=torch.Generator().manual_seed(0))
    back = order.argsort()
    return lambda tokens: logs(order[torch.tensor(tokens)].tolist())[:, order[back[order]]]


def test_another_order_of_the_vocabulary_is_named(plain: Plain, command: Command) -> None:
    with ServerStandIn(shuffled(plain.logs)) as server:
        assert command("serve-check", plain.folder, "--server", server.url, "--data", plain.data, "--exact") == 3
        assert "beyond the limit of 1e-06" in command.out
        assert "near chance: another tokenizer or order of the vocabulary" in command.out
        assert not written()["verdict"]["passed"]
        assert command("serve-check", plain.folder, "--server", server.url, "--data", plain.data) == 0
    assert "near chance" in command.out, "said without a limit too"


def test_another_router_is_not_exact(plain: Plain, command: Command, whole_model: Callable[..., Any]) -> None:
    config, weights = source_weights(plain.folder)
    weights = {name: w * 1.02 if name.endswith("mlp.gate.weight") else w for name, w in weights.items()}
    with ServerStandIn(logs_of(whole_model(config, weights))) as server:
        assert command("serve-check", plain.folder, "--server", server.url, "--data", plain.data, "--exact") == 3
    assert "wrong router" in command.out
    assert 1e-6 < written()["verdict"]["distance"] < 0.1


@pytest.fixture(scope="module")
def in_bfloat16(finished: Finished, whole_model: Callable[..., Any]) -> dict[str, Logs]:
    """The tiny model's source, its finished output, and this with a wrong router, as a bfloat16 server has them.

    Weights are rounded, products are not: a CPU's own bfloat16 would decide who is chosen, and so the figures.
    """
    config, weights = finished_weights(finished.folder)
    wrong = {name: w * 1.3 if name.endswith("gate.weight") else w for name, w in weights.items()}
    models = {"source": source_weights(finished.source), "output": (config, weights), "wrong": (config, wrong)}
    return {name: logs_of(whole_model(*model).bfloat16().float()) for name, model in models.items()}


@pytest.fixture(scope="module")
def source_json(finished: Finished, in_bfloat16: dict[str, Logs], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of the source."""
    from quantizers.serving.serve_check import serve_check

    path = tmp_path_factory.mktemp("source") / "source.json"
    with ServerStandIn(in_bfloat16["source"]) as server:
        serve_check(finished.source, finished.held_out, server=server.url, output=path)
    return path


@pytest.mark.slow
def test_as_served_is_bounded_by_the_source(
    finished: Finished, copied: Path, in_bfloat16: dict[str, Logs], source_json: Path, command: Command
) -> None:
    words = ("--data", finished.held_out, "--source-check", source_json)
    with ServerStandIn(in_bfloat16["output"]) as server:
        assert command("serve-check", copied, "--server", server.url, *words) == 0, command.out + command.err
        print(command.out)
        report = written(copied / "serve-check.json")
        assert command("serve-check", copied, "--server", server.url, "--data", finished.held_out, "--exact") == 3
    kl, floor = report["figures"]["kl"], written(source_json)["verdict"]["distance"]
    stored = finished.report["kl"]["mean"]
    assert kl["source_candidate"]["mean"] == pytest.approx(stored, rel=1e-9), "as `quantize eval` finds it"
    assert report["figures"]["perplexity"]["source"] == pytest.approx(finished.report["perplexity"]["source"], rel=1e-9)
    assert report["verdict"]["limit"] == pytest.approx(2 * floor + 0.1 * stored)
    assert floor > 1e-5
    assert command("verify", copied) == 0, command.out + command.err
    sent = quantizers.publish(copied, "me/tiny", dry_run=True).figures["files"]
    assert "serve-check.json" not in {file["name"] for file in sent}
    with ServerStandIn(in_bfloat16["wrong"]) as server:
        assert command("serve-check", copied, "--server", server.url, *words) == 3
    assert "as served" in command.out
    assert "wrong router" in command.out
    with ServerStandIn(in_bfloat16["source"]) as server:
        assert command("serve-check", copied, "--server", server.url, *words) == 3
    assert "closer to the source than to this checkpoint" in command.out


@pytest.mark.slow
def test_a_record_of_something_else_is_refused(
    finished: Finished, copied: Path, plain: Plain, in_bfloat16: dict[str, Logs], source_json: Path, command: Command
) -> None:
    def refused(*words: object, version: str = "0.32.0", longest: int = 4096) -> str:
        with ServerStandIn(in_bfloat16["output"], version=version, max_model_len=longest) as server:
            assert command("serve-check", copied, "--server", server.url, "--data", finished.held_out, *words) == 2
        return command.err.splitlines()[-1]

    assert "is of vLLM 0.32.0, and this server is vLLM 0.33.0" in refused(
        "--source-check", source_json, version="0.33.0"
    )
    assert "other texts" in refused("--source-check", source_json, longest=50)
    assert "--top-k 20" in refused("--source-check", source_json, "--top-k", 5)
    assert "--exact has a limit of its own" in refused("--source-check", source_json, "--exact")
    assert "no such file" in refused("--source-check", "none.json").lower()
    unlike = written(source_json)
    unlike["figures"]["top1"] = 0.01
    Path("unlike.json").write_text(json.dumps(unlike))
    assert "served something else" in refused("--source-check", "unlike.json")
    Path("other.json").write_text("{}")
    assert "is not what `quantize serve-check` writes" in refused("--source-check", "other.json")
    with ServerStandIn(plain.logs) as server:
        assert command("serve-check", plain.folder, "--server", server.url, "--data", plain.data) == 0
    assert "which is not the source tiny-minimax-m2" in refused("--source-check", "serve-check.json")


# One that does not answer as it should: exit 2 ---------------------------------------------------------------------


def of_rows(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any], Any]:
    """Changes each row of vLLM's answer."""

    def changed(answer: Any) -> Any:
        choice = answer["choices"][0]
        choice["prompt_logprobs"] = [row and change(row) for row in choice["prompt_logprobs"]]
        return answer

    return changed


FAULTS: dict[str, tuple[dict[str, Any], tuple[object, ...], str]] = {
    "capped": ({}, ("--top-k", 30), "start it with --max-logprobs 30, or give a smaller --top-k"),
    "fewer": ({"given": 5}, (), "20 were asked for: the server caps them; start vLLM with --max-logprobs 20"),
    "larger vocabulary": (
        {"changed": of_rows(lambda row: row | {"5000": {"logprob": -9.0}})}, (),
        "token 5000 was returned, and this model has 320: another model is served",
    ),
    "no ids": (
        {"changed": of_rows(lambda row: {f"token:{i}": one for i, one in row.items()})}, (),
        "have no token ids",
    ),
    "no prompt": ({"changed": lambda answer: {"choices": [{"text": "x"}]}}, (), "prompt_logprobs are missing"),
    "logits": (
        {"changed": of_rows(lambda row: {i: {"logprob": one["logprob"] + 20} for i, one in row.items()})}, (),
        "--logprobs-mode raw_logprobs",
    ),
    "one position": (
        {"changed": lambda answer: {"choices": [{"prompt_logprobs": answer["choices"][0]["prompt_logprobs"][:9]}]}}, (),
        "8 positions were scored, not 255",
    ),
    "truncated": ({"changed": lambda answer: (200, json.dumps(answer).encode()[:5000])}, (), "the answer is no JSON"),
    "500": ({"changed": lambda _: (500, {"error": {"message": "Dead " + "x" * 999}})}, (), "HTTP 500: Dead"),
    "key": ({"key": "right"}, (), "the server wants a key (the one in OPENAI_API_KEY is not taken)"),
    "stalls": ({"stalls": True}, ("--timeout", 0.3), "text 1 of 4 (256 tokens): no answer within 0.3 s"),
    "neither": ({"kind": "other"}, (), "answers neither /version (vLLM) nor /server_info (SGLang)"),
    "too short": ({"max_model_len": 2}, (), "serve it with a larger --max-model-len"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line(fault: str, plain: Plain, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, words, line = FAULTS[fault]
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    with ServerStandIn(plain.logs, **settings) as server:
        assert command("serve-check", plain.folder, "--server", server.url, "--data", plain.data, *words) == 2
    last = command.err.splitlines()[-1]
    print(last)
    assert line in last
    assert "secret-key" not in command.err + command.out
    assert len(last) < 600
    assert not Path("serve-check.json").exists()


@pytest.mark.slow
def test_the_remedies_work(plain: Plain, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "right\n")
    with ServerStandIn(plain.logs, key="right", max_logprobs=WORDS) as server:
        words = ("--server", server.url, "--data", plain.data, "--top-k", WORDS, "--exact")
        assert command("serve-check", plain.folder, *words) == 0, command.err
    assert written()["figures"]["outside"] == 0


def test_a_key_that_cannot_be_sent_is_not_printed(
    plain: Plain, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ServerStandIn(plain.logs) as server:
        for key in ("secret\nkey", "secret\u20ac"):
            monkeypatch.setenv("OPENAI_API_KEY", key)
            assert command("serve-check", plain.folder, "--server", server.url, "--data", plain.data) == 2
            assert "OPENAI_API_KEY" in command.err.splitlines()[-1]
            assert "secret" not in command.err


def test_a_smaller_model_refuses_the_ids(plain: Plain, command: Command) -> None:
    with ServerStandIn(lambda tokens: plain.logs(tokens)[:, :20]) as server:
        assert command("serve-check", plain.folder, "--server", server.url, "--data", plain.data) == 2
    assert "it serves a model with another vocabulary" in command.err


def test_arguments_that_contradict_and_addresses_without_a_server(plain: Plain, command: Command) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for words, line in (
        (("--server", f"http://127.0.0.1:{port}"), "Connection refused; see whether the server is ready"),
        (("--server", f"127.0.0.1:{port}"), "http://127.0.0.1:8000"),
        ((), "give --server URL, or --offline PYTHON"),
        (("--server", "http://x", "--offline", "python"), "leave out --server or --offline"),
        (("--server", "http://x", "--engine", "dtype=float32"), "--engine is for --offline"),
        (("--offline", "no-such-python"), "cannot be started"),
        (("--offline", sys.executable, "--engine", "dtype"), "is not key=value"),
        (("--offline", sys.executable), "No module named 'vllm'"),
        (("--offline", sys.executable, "--server-log", "x"), "with --offline the log is known"),
    ):
        assert command("serve-check", plain.folder, "--data", plain.data, *words) == 2
        assert line in command.err.splitlines()[-1], command.err
    assert not Path("serve-check.json").exists()


# A real one --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_vllm
def test_a_real_vllm_over_http_and_offline(command: Command, tmp_path: Path, say: Callable[[str], None]) -> None:
    """It serves a quantized Qwen3-MoE, of plain numbers in float32: equal but for rounding, bit for bit the same both
    ways, over HTTP and without a server; and its own refusal of K = 30.
    """
    recipe = families.write_job(tmp_path / "job", "qwen3_moe")
    output = tmp_path / "output"
    change(recipe, lambda body: body.pop("verify"))
    run(prepare(str(recipe)), Options(output, torch.device("cpu")))
    plugin = tmp_path / "plugin" / "plain-0.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: plain\nVersion: 0\n")
    (plugin / "entry_points.txt").write_text("[vllm.general_plugins]\nplain = vllm_forward:serve_plain_numbers\n")
    environment = ENGINE | {"PYTHONPATH": os.pathsep.join(map(str, (plugin.parent, REPOSITORY / "tests")))}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", tmp_path / "server.log"
    options = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--host", "127.0.0.1")
    start = [os.environ[VLLM_PYTHON], "-m", "vllm.entrypoints.openai.api_server", "--model", str(output)]
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*start, "--port", str(port), *options], cwd=tmp_path, env=os.environ | environment,
            stdout=stream, stderr=stream,
        )  # fmt: skip
    words = ("serve-check", output, "--source", recipe.parent / "model", "--data", recipe.parent / "held-out.yaml")
    try:
        for _ in range(1200):
            if is_ready(url) or process.poll() is not None:
                break
            time.sleep(0.5)
        assert is_ready(url), log.read_text()[-3000:]
        assert command(*words, "--server", url, "--exact", "--server-log", log, "--output", "http.json") == 0, (
            command.err
        )
        report, shown = written(Path("http.json")), [command.out]
        assert command(*words, "--server", url, "--top-k", 30) == 2
        shown.append(command.err.splitlines()[-1])
        assert "start it with --max-logprobs 30" in command.err
    finally:
        process.terminate()
        process.wait()
    kl = report["figures"]["kl"]
    assert 0 < kl["candidate_server"]["mean"] < 1e-11
    assert kl["source_server"]["mean"] > 1e-4
    assert report["figures"]["top1"] == 1
    assert report["server"]["version"] == "0.32.0"
    assert report["server"]["max_model_len"] == 512
    assert any("MoE backend" in line for line in report["server"]["kernels"])
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment.items():
            patched.setenv(name, value)
        engine = ("dtype=float32", "enforce_eager=true", "max_model_len=512")
        offline = [word for one in engine for word in ("--engine", one)]
        offline += ["--offline", os.environ[VLLM_PYTHON], "--exact", "--output", "offline.json"]
        assert command(*words, *offline) == 0, command.err
    for _ in range(600):  # none of its processes is left, which takes a moment
        if str(plugin.parent) not in environments():
            break
        time.sleep(0.1)
    else:
        raise AssertionError("a process of vLLM's is left")
    say("\n".join(shown))
    assert written(Path("offline.json"))["figures"] == report["figures"]


def environments() -> str:
    """The environments of all processes that can be read."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            found.append(path.read_text(errors="replace"))
    return " ".join(found)


def is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/version"):
            return True
    except OSError:
        return False
